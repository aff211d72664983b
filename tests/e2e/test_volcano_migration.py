# SPDX-License-Identifier: Apache-2.0
"""A node moves from Volcano's device plugin to this project and back while its pods run.

Volcano's scheduler 1.14.1 places the pods of all phases, on the real control plane, with the
configuration of docs/volcano.md. ``tests.support.hami_site`` names the simulated parts: kubelets,
devices, and the device plugin. Memory in MiB.
"""

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

import anyio
import msgspec
import pytest

from hami_common.compat import volcano as form
from hami_common.events.allocation import AllocationRecord
from hami_common.pods import annotations as keys
from hami_sim.cluster import NodeSpec
from tests.e2e.test_migration_day import hamictl
from tests.e2e.test_volcano import (
    CARD_MIB,
    MEMORY,
    NAMESPACE,
    PERCENT,
    Site,
    check_agreement,
    pod,
    share,
    write_overlay,
)
from tests.support.hami_site import VOLCANO, HamiSite
from tests.support.installed import SPEC, Installed, run_installed
from tests.support.kubelet import grpc_poller
from tests.support.volcano import NUMBER, Volcano, volcano_or_skip

__all__ = ["grpc_poller"]

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.volcano,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(400),
]

Obj = dict[str, Any]
NODE: Final = "gpu-a"
THEIRS: Final = ("v1", "v2")
"""Pods that hold more than half of a card each, so that each has one of its own."""
HELD_MIB: Final = 14_000
LARGE_PCT: Final = 60
REFUSED: Final = "hami-vgpuDeviceSharing error"
"""Reason of Volcano's own plugin, before anything is bound."""


class Move:
    """The cluster during the move."""

    def __init__(self, site: Site, plugins: HamiSite, began: dict[str, Obj]) -> None:
        self.site = site
        self.plugins = plugins
        self.began = began
        self.words = ("--from", "volcano", "--kubeconfig", str(site.installed.kubeconfig))

    async def state(self, word: str) -> Obj:
        told: Obj = json.loads(await hamictl("migrate", word, *self.words, "-o", "json"))
        (node,) = told["items"]
        return dict(node)

    async def record(self, name: str) -> AllocationRecord:
        uid = (await self.site.documents())[name]["metadata"]["uid"]
        return (await self.site.records())[uid]

    async def check_runs_as_before(self, *names: str) -> None:
        documents = await self.site.documents()
        for name in names:
            now, before = documents[name]["status"], self.began[name]["status"]
            assert now["phase"] == "Running"
            for status, old in zip(
                now["containerStatuses"], before["containerStatuses"], strict=True
            ):
                assert (status["containerID"], status["restartCount"]) == (old["containerID"], 0)

    async def create(self, name: str, **wanted: int) -> None:
        await self.site.volcano.group(name, members=1)
        await self.site.create(pod(name, wanted, group=name, node=NODE))


async def place(site: Installed, volcano: Volcano, plugins: HamiSite) -> dict[str, Obj]:
    """Let Volcano place its pods with its device plugin; returns them, running."""
    await plugins.until_serves(site, NODE)
    await volcano.sessions(3)
    await volcano.group("before", members=1)
    for name in THEIRS:
        document = pod(name, share(HELD_MIB), group="before", node=NODE)
        await site.client.create("pods", document, NAMESPACE)
        await site.until(f"{name} runs", partial(site.pod_is, name, "Running"), limit_s=90)
        plugins.check_asked(NODE)
        # As the plugin does after the last container.
        notes = {form.BIND_PHASE: form.BOUND, form.TO_ALLOCATE: ""}
        await site.client.patch(
            "pods", name, {"metadata": {"annotations": notes}}, namespace=NAMESPACE
        )
    found = (await site.client.list("pods", NAMESPACE))["items"]
    return {one["metadata"]["name"]: one for one in found}


@pytest.fixture(scope="module")
async def move(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Move]:
    programs = volcano_or_skip()
    folder = tmp_path_factory.mktemp("vm")  # sockets of a node: 107 bytes at most
    plugins = HamiSite({NODE: VOLCANO}, {})
    node = NodeSpec(name=NODE, profile="2xA30")
    agent = {**SPEC.settings["nodeagent"], "volcano_refresh_s": "2"}
    settings = {**SPEC.settings, "nodeagent": agent}
    spec = msgspec.structs.replace(SPEC, nodes=(node,), settings=settings)
    began: dict[str, Obj] = {}
    runs: list[Volcano] = []
    async with anyio.create_task_group() as group:

        async def before(site: Installed) -> None:
            await plugins.build(site)
            await group.start(plugins.follow, site)
            volcano = Volcano(site, programs)
            runs.append(volcano)
            await volcano.start()
            began.update(await place(site, volcano, plugins))

        mine = write_overlay(folder, "take-over")
        async with run_installed(folder / "s", spec, overlay=mine, before=before) as installed:
            try:
                yield Move(Site(installed, runs[0]), plugins, began)
            finally:
                await runs[0].process.stop()
                group.cancel_scope.cancel()


async def test_node_of_volcano_comes_over_with_its_pods_and_goes_back(move: Move) -> None:
    state = await move.state("plan")
    assert (state["side"], state["vendors"], state["former_pods"]) == ("volcano", ["nvidia"], 2)
    assert not state.get("problems")

    await hamictl("migrate", "node", NODE, *move.words)
    await check_taken_over(move)
    await check_volcano_counts_them(move)
    await hamictl("migrate", "rollback", NODE, *move.words)
    await check_rolled_back(move)


async def check_taken_over(move: Move) -> None:
    """Each pod holds in the ledger what Volcano gave it, and Volcano counts the same."""
    site = move.site

    async def are_booked() -> bool:
        return len(await site.records()) == len(THEIRS)

    await site.until("Volcano's pods are booked", are_booked)
    await move.check_runs_as_before(*THEIRS)
    documents = await site.documents()
    for name in THEIRS:
        record = await move.record(name)
        assert (record.origin, record.reason) == ("volcano", "")
        before = move.began[name]["metadata"]["annotations"]
        assert documents[name]["metadata"]["annotations"][form.POD_IDS] == before[form.POD_IDS]
        (held,) = (one for container in record.containers for one in container.shares)
        assert before[form.POD_IDS] == f"{held.uuid},NVIDIA,{HELD_MIB},10:"
    state = await move.state("status")
    assert (state["side"], state["taken_over"]) == ("ours", len(THEIRS))

    async def is_described() -> bool:
        node = await site.admin.get("nodes", NODE)
        return form.is_ours(node["metadata"]["annotations"])

    await site.until("the agent describes the devices", is_described)


async def check_volcano_counts_them(move: Move) -> None:
    """A pod that does not fit beside them waits for one of them to end."""
    site = move.site
    await move.create("new", **{NUMBER: 1, PERCENT: LARGE_PCT})
    await site.until_told("new", REFUSED)
    assert "denied the request" not in await site.message("new")
    freed = await move.record("v1")
    await site.delete("v1")
    await site.until_running("new")
    record = await move.record("new")
    assert record.origin == ""
    (held,) = (one for container in record.containers for one in container.shares)
    (was,) = (one for container in freed.containers for one in container.shares)
    assert (held.uuid, held.memory_mib) == (was.uuid, CARD_MIB * LARGE_PCT // 100)
    check_agreement((await site.documents())["new"], record)
    assert len(await site.records()) == len(THEIRS)
    # Kubelet would reject a pod that requests what the plugin's ids stand for.
    shown = (await site.admin.get("nodes", NODE))["status"]["allocatable"]
    assert shown.get(MEMORY, "0") == "0"


async def check_rolled_back(move: Move) -> None:
    """Volcano counts a pod of each side beside a third one."""
    site = move.site
    await move.plugins.until_serves(site.installed, NODE)
    assert (await move.state("status"))["side"] == "volcano"
    await move.check_runs_as_before("v2")
    assert (await site.documents())["new"]["status"]["phase"] == "Running"
    node = await site.admin.get("nodes", NODE)
    assert not form.is_ours(node["metadata"]["annotations"])
    assert keys.TAKEN_OVER not in node["metadata"]["annotations"]
    await site.volcano.sessions(2)
    await move.create("last", **share(HELD_MIB))
    await site.until_told("last", REFUSED)
    assert "denied the request" not in await site.message("last")
    await site.delete("new")

    async def is_freed() -> bool:
        return {one.pod for one in (await site.records()).values()} == {"v2"}

    await site.until("the share of our pod is freed", is_freed)
