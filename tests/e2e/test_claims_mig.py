# SPDX-License-Identifier: Apache-2.0
"""MIG instances by ResourceClaims, beside those of pods: slices, ledger, agent, NVML and kubelet.

NVML is a fake library that enforces the tables of two H200. The device class is that of the
component ``dra``.
"""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from hami_common.dra.names import DRIVER
from hami_common.model.placement import Share
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hami_sim.hardware.fake_nvml import MadeInstance
from tests.e2e.conftest import small_pod
from tests.support import claims
from tools.build_native_fakes import DEFAULT_OUT, build

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]

GROUP = "/apis/resource.k8s.io/v1"
CLAIMS = f"{GROUP}/namespaces/default/resourceclaims"
NODE = "gpu-mig"
AGENT = f"agent-{NODE}"
CLASSES = Path("deploy/kustomize/components/dra/device-class.yaml")
SMALL, HALF, WHOLE = "1g.18gb", "3g.71gb", "7g.141gb"
SHOW = "env; trap 'exit 0' TERM; while :; do sleep 0.2; done"
NEVER_MS = 60_000
Obj = dict[str, Any]


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="2xH200-MIG"),),
        nvml_library=str(build(Path(DEFAULT_OUT)) / "libnvidia-ml.so.1"),
        backoff_s=0.2,
        plane="sim",
        settings={
            "scheduler": {"dra.enabled": "true", "tick_s": "0.2"},
            "nodeagent": {
                "dra.enabled": "true",
                "dra.write_s": "0.1",
                "partitions.look_s": "1",
                "partitions.pre_start_wait_s": "3",
            },
        },
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("mig")) as cluster:
        for document in yaml.safe_load_all(CLASSES.read_text(encoding="utf-8")):
            await cluster.create(f"{GROUP}/deviceclasses", document)
        yield cluster


@pytest.fixture
async def cluster(running: Cluster) -> AsyncIterator[Cluster]:
    """Return the cluster; afterwards all pods and claims of the test have to leave nothing."""
    await running.until("cards are idle", lambda: are_idle(running))
    yield running
    running.nvml[NODE].clear_faults()
    for pod in await running.pods():
        await running.delete_pod(pod.metadata.name)
    await running.until("no instance is left", lambda: are_idle(running))
    for claim in (await running.request("GET", CLAIMS))["items"]:
        await running.request("DELETE", f"{CLAIMS}/{claim['metadata']['name']}")

    async def is_cleared() -> bool:
        return not list(running.cdi_directory.glob("*.json"))

    await running.until("CDI files are removed", is_cleared)


async def are_idle(cluster: Cluster) -> bool:
    return not instances(cluster)


def instances(cluster: Cluster) -> list[MadeInstance]:
    """List the instances of both cards."""
    return [one for card in range(2) for one in cluster.nvml[NODE].made_instances(card)]


def exactly(profile: str) -> Obj:
    """The request as docs/dra.md has it."""
    expression = f'device.attributes["{DRIVER}"].profile == "{profile}"'
    return {
        "deviceClassName": "hami-mig",
        "selectors": [{"cel": {"expression": expression}}],
    }


use_claim = partial(claims.use_claim, script=SHOW)


async def runs(cluster: Cluster, name: str) -> None:
    await cluster.until(f"pod {name} runs", lambda: cluster.pod_is(name, "Running"))


async def waits(cluster: Cluster, name: str) -> None:
    """Wait until kube-scheduler finds no device for the pod's claim."""

    async def is_refused() -> bool:
        story = await cluster.story_of(name)
        return "cannot allocate all claims" in story["reason"] and not story["node"]

    await cluster.until(f"pod {name} is refused", is_refused)


async def share_of(cluster: Cluster, uid: str) -> Share:
    (share,) = (await cluster.ledger_of(NODE, uid))[-1][1].containers[0].shares
    return share


async def visible(cluster: Cluster, name: str) -> str:
    """Devices that the container of a pod sees."""
    found: list[str] = []

    async def is_shown() -> bool:
        log = await cluster.container_log(name, "main")
        found[:] = [
            line.partition("=")[2]
            for line in log.splitlines()
            if line.startswith("NVIDIA_VISIBLE_DEVICES=")
        ]
        return bool(found)

    await cluster.until("environment is shown", is_shown)
    return found[0]


async def released(cluster: Cluster, uid: str) -> None:
    """Wait until the ledger has released the claim: the scheduler and the agent are independent."""

    async def is_released() -> bool:
        return (await cluster.ledger_of(NODE, uid))[-1][1].op == "release"

    await cluster.until("claim is released", is_released)


async def test_claim_gets_its_instance_before_it_starts_and_leaves_none(cluster: Cluster) -> None:
    uid = await use_claim(cluster, "c", exactly(SMALL))
    await runs(cluster, "c")
    (made,) = instances(cluster)
    share = await share_of(cluster, uid)
    assert (made.profile, made.start) == (share.profile, share.start) == (SMALL, 6)
    assert share.memory_mib == 16_384
    assert await visible(cluster, "c") == made.uuids[0]
    await cluster.delete_pod("c")
    await cluster.until("instance is gone", lambda: are_idle(cluster))
    await released(cluster, uid)
    states = [(one.state, one.code) for one in await cluster.states_of(NODE, uid)]
    # The agent writes no state of a record that is released before it has seen the end of its use.
    assert states[-2:] == [("prepared", ""), ("prepared", "unprepared")] or (
        states[-1] == ("prepared", "")
    )


async def test_request_by_memory_gets_the_smallest_size(cluster: Cluster) -> None:
    memory = {"deviceClassName": "hami-mig", "capacity": {"requests": {"memory": "20Gi"}}}
    uid = await use_claim(cluster, "sized", memory)
    await runs(cluster, "sized")
    assert (await share_of(cluster, uid)).profile == "1g.35gb"
    await use_claim(cluster, "soft", {"deviceClassName": "hami-share"})
    await waits(cluster, "soft")


async def test_fragmented_cards_refuse_until_an_instance_is_gone(cluster: Cluster) -> None:
    await use_claim(cluster, "small", exactly(SMALL))
    await runs(cluster, "small")
    first = await use_claim(cluster, "whole-1", exactly(WHOLE))
    await runs(cluster, "whole-1")
    await use_claim(cluster, "whole-2", exactly(WHOLE))
    await waits(cluster, "whole-2")
    await use_claim(cluster, "half", exactly(HALF))  # the positions that the small one leaves
    await runs(cluster, "half")
    assert {(one.profile, one.start) for one in instances(cluster)} == {
        (SMALL, 6),
        (HALF, 0),
        (WHOLE, 0),
    }
    await cluster.delete_pod("whole-1")
    await runs(cluster, "whole-2")
    await released(cluster, first)


async def test_pods_and_claims_have_instances_on_one_grid(cluster: Cluster) -> None:
    pod = small_pod("plugin", memory_mib=60_000)
    pod["metadata"]["annotations"] = {"nvidia.com/vgpu-mode": "mig"}
    await cluster.create_pod(pod)
    await runs(cluster, "plugin")
    card = 0 if cluster.nvml[NODE].made_instances(0) else 1
    (theirs,) = cluster.nvml[NODE].made_instances(card)
    assert theirs.profile == HALF
    on_card = exactly(HALF)
    uuid = cluster.nvml[NODE].uuids[card]
    on_card["selectors"].append(
        {"cel": {"expression": f'device.attributes["{DRIVER}"].uuid == "{uuid}"'}}
    )
    await use_claim(cluster, "beside", on_card)
    await runs(cluster, "beside")
    assert {one.start for one in cluster.nvml[NODE].made_instances(card)} == {0, 4}
    await use_claim(cluster, "third", on_card)
    await waits(cluster, "third")
    await cluster.delete_pod("plugin")
    await runs(cluster, "third")


async def has_halves(cluster: Cluster) -> bool:
    return bool(instances(cluster))


@pytest.mark.parametrize(
    ("function", "is_half_made"),
    [
        ("nvmlDeviceCreateGpuInstanceWithPlacement", False),
        ("nvmlGpuInstanceCreateComputeInstance", True),
    ],
)
async def test_agent_killed_while_it_creates_the_instance_leaves_none(
    cluster: Cluster, function: str, *, is_half_made: bool
) -> None:
    nvml = cluster.nvml[NODE]
    nvml.fault(function, None, 0, hang_ms=NEVER_MS)
    uid = await use_claim(cluster, "c", exactly(SMALL))

    async def is_booked() -> bool:
        return bool(await cluster.ledger_of(NODE, uid))

    await cluster.until("claim is booked", is_booked)

    async def is_creating() -> bool:
        journal = cluster.directory / "agents" / NODE / "partitions.json"
        return journal.exists() and '"creating"' in journal.read_text(encoding="utf-8")

    await cluster.until("creation has begun", is_creating)
    if is_half_made:
        await cluster.until("half an instance is there", lambda: has_halves(cluster))
    await cluster.processes[AGENT].kill()
    assert [one.uuids for one in instances(cluster)] == [()] * is_half_made
    await cluster.delete_pod("c")
    nvml.clear_faults()

    await released(cluster, uid)
    cluster.processes[AGENT].start()
    await cluster.ready(AGENT)
    await cluster.until("nothing is left", lambda: are_idle(cluster))
    await use_claim(cluster, "next", exactly(SMALL))
    await runs(cluster, "next")
    assert len(instances(cluster)) == 1


async def test_agent_killed_after_prepare_keeps_the_instance_until_the_pod_ends(
    cluster: Cluster,
) -> None:
    uid = await use_claim(cluster, "c", exactly(SMALL))
    await runs(cluster, "c")
    before = instances(cluster)
    await cluster.processes[AGENT].kill()
    cluster.processes[AGENT].start()
    await cluster.ready(AGENT)
    assert instances(cluster) == before
    await cluster.processes[AGENT].kill()
    await cluster.delete_pod("c")
    cluster.processes[AGENT].start()
    await cluster.ready(AGENT)
    await cluster.until("instance is gone", lambda: are_idle(cluster))
    await released(cluster, uid)
