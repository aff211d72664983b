# SPDX-License-Identifier: Apache-2.0
"""HAMi is installed from its images by the commands of docs/install.md, and works."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from hami_common import namespaces
from tests.install.installation import READY_S, Installation, is_pod_ready, restarts
from tests.install.tenant import Tenant, share

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster, pytest.mark.timeout(600)]

LIVENESS_S = 75.0

Record = Callable[[str, object], None]


@pytest.mark.timeout(1800)  # where the images are not in the cache, they are built
async def test_page_installs_and_every_pod_is_ready_without_a_restart(
    installation: Installation, record_property: Record
) -> None:
    await installation.ensure("dev")
    for name, seconds in installation.site.timings_s.items():
        record_property(name, f"{seconds:.1f} s")
    pods = await installation.pods()
    spaces = {pod["metadata"]["namespace"] for pod in pods}
    assert spaces == {namespaces.SYSTEM, namespaces.AGENTS}
    assert all(is_pod_ready(pod) for pod in pods)
    assert {pod["metadata"]["name"]: restarts(pod) for pod in pods if restarts(pod)} == {}
    assert installation.site.timings_s["dev_ready"] <= READY_S


@pytest.mark.parametrize("card", [0, -1])
async def test_pod_with_a_share_sees_and_gets_its_share_only(tenant: Tenant, card: int) -> None:
    uuid = tenant.site.hardware.uuids[card]
    await tenant.create(share("limited", memory_mib=3000, core_pct=30, uuid=uuid))
    await tenant.running("limited")
    total_mib, fits = await tenant.memory("limited")
    assert total_mib == 3000
    assert 2800 < fits <= 3000


async def test_compute_of_two_shares_of_one_device_is_limited(tenant: Tenant) -> None:
    """Both always have work; a share that is alone on its device would not be limited."""
    uuid = tenant.site.hardware.uuids[0]
    parts = {"quarter": 25, "half": 50}
    for name, core_pct in parts.items():
        await tenant.create(share(name, memory_mib=1000, core_pct=core_pct, uuid=uuid))
        await tenant.running(name)
    used: dict[str, float] = {}

    async def work(name: str) -> None:
        used[name] = await tenant.compute_pct(name, for_s=8)

    # A program that waits for a processor of this machine gets less, never more.
    for _ in range(3):
        async with anyio.create_task_group() as group:
            for name in parts:
                group.start_soon(work, name)
        assert all(used[name] <= core_pct + 3 for name, core_pct in parts.items()), used
        if all(used[name] >= core_pct - 10 for name, core_pct in parts.items()):
            break
    else:
        pytest.fail(f"the shares get less than they may: {used}")


async def test_doctor_finds_no_fault(installation: Installation) -> None:
    """But for the warning that a node with cgroup v1 deserves."""
    await installation.ensure("dev")
    found = await installation.doctor()
    assert found.returncode == 0, found.stdout + found.stderr
    warnings = [line for line in found.stdout.splitlines() if line.startswith("WARN")]
    expected = [] if Path("/sys/fs/cgroup/cgroup.controllers").exists() else ["cgroups"]
    assert [line.split()[1] for line in warnings] == expected, found.stdout


async def test_verify_passes_every_step_of_a_share(installation: Installation) -> None:
    await installation.ensure("dev")
    done = await installation.hamictl("verify")
    assert done.returncode == 0, done.stdout + done.stderr


async def test_no_pod_has_restarted(installation: Installation) -> None:
    """Longer than any liveness probe takes to fail after the pods were Ready."""
    await installation.ensure("dev")
    await installation.aged(LIVENESS_S)
    pods = await installation.pods()
    assert {pod["metadata"]["name"]: restarts(pod) for pod in pods if restarts(pod)} == {}


async def test_restarted_agent_finds_the_driver(installation: Installation) -> None:
    """The node's container toolkit accepts devices from no variable, as the page demands."""
    await installation.ensure("dev")
    await installation.restart_agent()
    assert await installation.finds_devices()
