# SPDX-License-Identifier: Apache-2.0
"""Cards change their mode of sharing while unused; services follow the mode, clients the pods."""

import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device, DeviceFacts
from hami_common.model.placement import Share
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.kubeio import EventRecorder
from hami_nodeagent.drivers.errors import DriverTransient
from hami_nodeagent.drivers.protocol import Inventory
from hami_nodeagent.settings import DriversSettings, NvidiaSettings, PartitionSettings
from hami_nodeagent.shell.mps import MpsService
from hami_nodeagent.shell.sharing import DRAIN_S, REASON_FAULTS, REASON_RESTART, SharingKeeper
from tests.support.manualclock import ManualClock
from tests.unit.nodeagent.core.builders import NODE, Given
from tests.unit.nodeagent.core.test_cgroups import CONTAINER, OTHER
from tests.unit.nodeagent.shell.support import know, make_site
from tests.unit.nodeagent.shell.test_owners import process

pytestmark = pytest.mark.anyio
CARD, SECOND = "GPU-0", "GPU-1"
SERVER = 500


class FakeService:
    """A service without processes."""

    def __init__(
        self, uuid: str, *, on_restart: Callable[[str], Awaitable[None]], **_: object
    ) -> None:
        self.uuid = uuid
        self.problem = "it has not started yet"
        self.on_restart = on_restart
        self.pids: set[int] = set()
        self.terminated: list[int] = []
        self.is_running = False
        self.fails = False

    async def run(self) -> None:
        self.is_running = True
        try:
            await anyio.sleep_forever()
        finally:
            self.is_running = False

    async def clients(self) -> Mapping[int, tuple[int, ...]]:
        if self.fails:
            raise DriverTransient(doing="get_server_list", detail="the test says so")
        return {SERVER: tuple(sorted(self.pids))}

    async def terminate(self, pids: Collection[int]) -> tuple[int, ...]:
        ended = sorted(self.pids & set(pids))
        self.pids -= set(ended)
        self.terminated += ended
        return tuple(ended)


class FakeApi:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def create(self, path: str, body: bytes) -> bytes:
        self.bodies.append(body)
        return b"{}"


class Node:
    """An agent on two cards; the registry applies its reports at once."""

    def __init__(self, directory: Path, sharing: dict[str, str], past: str = "soft") -> None:
        self.proc = directory / "proc"
        self.site = make_site(
            directory / "state",
            host_proc=str(self.proc),
            partitions=PartitionSettings(mode_settle_s=0.0),
            drivers=DriversSettings(nvidia=NvidiaSettings(sharing=sharing)),  # type: ignore[arg-type]  # words
        )
        self.site.picture.ledger_known = self.site.picture.pods_known = True
        self.api = FakeApi()
        kube: Any = self.api
        recorder = EventRecorder(kube, component="test", clock=SystemClock())
        self.made: list[FakeService] = []
        self.publish({CARD: past, SECOND: "soft"})
        service: Any = self._make
        self.keeper = SharingKeeper(
            site=self.site,
            look_again=lambda: None,
            events=lambda: recorder,
            service=service,
        )

    def _make(self, uuid: str, **given: Any) -> FakeService:
        self.made.append(FakeService(uuid, **given))
        return self.made[-1]

    def publish(self, modes: Mapping[str, str]) -> None:
        board = self.site.picture.partitions.sharing
        devices = tuple(
            Device(
                uuid=uuid,
                vendor="nvidia",
                index=index,
                type="A100",
                memory_mib=1000,
                capacity_mib=1000,
                mode=mode,
                cordoned=uuid in board and board[uuid].is_withheld,
            )
            for index, (uuid, mode) in enumerate(modes.items())
        )
        self.site.picture.set_canonical(
            NodeDevices(
                node=NODE,
                vendor="nvidia",
                boot_id="",
                seq=1,
                time_s=0,
                config_generation=1,
                devices=devices,
            )
        )

    async def look(self, group: anyio.abc.TaskGroup, times: int = 1) -> dict[str, str]:
        """Discover, look, and let the registry publish; the modes that were reported."""
        facts = tuple(
            DeviceFacts(uuid=uuid, vendor="nvidia", index=index, type="A100", memory_mib=1000)
            for index, uuid in enumerate((CARD, SECOND))
        )
        modes: dict[str, str] = {}
        for _ in range(times):
            await self.keeper.review(Inventory(devices=facts))
            await self.keeper.look(group)
            await anyio.lowlevel.checkpoint()
            reviewed = await self.keeper.review(Inventory(devices=facts))
            modes = {one.uuid: one.mode for one in reviewed.devices}
            self.publish(modes)
        return modes

    def run_pod(self, name: str, mode: str, container: str = CONTAINER, **facts: Any) -> Given:
        pod = Given(name, container_by_id={f"containerd://{container}": "main"}, **facts)
        share = Share(vendor="nvidia", uuid=CARD, memory_mib=10, mode=mode)
        containers = (replace(pod.record.containers[0], shares=(share,)),)
        pod.entry = replace(pod.entry, record=replace(pod.record, containers=containers))
        know(self.site, pod)
        self.site.picture.grants.add(pod.grant("main", f"{name}-id", uuids=(CARD,)))
        return pod

    def reasons(self, reason: str) -> int:
        return sum(f'"{reason}"'.encode() in body for body in self.api.bodies)


async def test_unused_card_is_cordoned_and_becomes_a_service(tmp_path: Path) -> None:
    node = Node(tmp_path, {f"{NODE}/0": "mps"})
    async with anyio.create_task_group() as group:
        assert await node.look(group) == {CARD: "soft", SECOND: "soft"}
        assert node.site.picture.view.devices_by_uuid[CARD].cordoned
        assert await node.look(group) == {CARD: "mps", SECOND: "soft"}
        (service,) = node.made
        assert service.is_running
        await node.look(group)
        assert "not ready" in node.site.picture.partitions.mode_text(CARD)
        assert node.site.picture.view.devices_by_uuid[CARD].cordoned
        service.problem = ""
        await node.look(group)
        assert not node.site.picture.view.devices_by_uuid[CARD].cordoned
        group.cancel_scope.cancel()


async def test_card_in_use_keeps_its_mode_until_its_last_pod_ends(tmp_path: Path) -> None:
    node = Node(tmp_path, {f"{NODE}/0": "timeslice"})
    pod = node.run_pod("train", mode="")
    async with anyio.create_task_group() as group:
        assert (await node.look(group, 3))[CARD] == "soft"
        assert "waits for pod default/train" in node.site.picture.partitions.mode_text(CARD)
        node.site.picture.entries_by_uid.clear()
        node.site.picture.grants.drop_pod(pod.uid)
        assert (await node.look(group, 2))[CARD] == "timeslice"
        assert node.made == []


async def test_restarted_agent_keeps_the_mode_that_its_pods_were_given(tmp_path: Path) -> None:
    node = Node(tmp_path, {}, past="mps")
    pod = node.run_pod("train", mode="mps")
    async with anyio.create_task_group() as group:
        assert (await node.look(group))[CARD] == "mps"
        (service,) = node.made
        assert service.is_running, "though the setting has no line for the card"
        node.site.picture.entries_by_uid.clear()
        node.site.picture.grants.drop_pod(pod.uid)
        assert (await node.look(group, 2))[CARD] == "soft"
        await anyio.sleep(0.01)
        assert not service.is_running


async def test_agent_that_lost_its_files_takes_the_mode_from_the_ledger(tmp_path: Path) -> None:
    node = Node(tmp_path, {f"{NODE}/0": "mps"}, past="soft")
    node.run_pod("train", mode="mps")
    async with anyio.create_task_group() as group:
        assert (await node.look(group))[CARD] == "mps"
        assert node.made[0].is_running
        group.cancel_scope.cancel()


async def serving(node: Node, group: anyio.abc.TaskGroup) -> FakeService:
    await node.look(group)
    node.made[0].problem = ""
    return node.made[0]


async def test_clients_of_a_pod_are_ended_before_kubelet_kills_it(tmp_path: Path) -> None:
    node = Node(tmp_path, {f"{NODE}/0": "mps"}, past="mps")
    now_s = node.site.clock.now_s()
    pod = node.run_pod("leaving", mode="mps", uid="0f3b9c1a-6d2e-4a57-9a55-0c1d2e3f4a5b")
    other = node.run_pod(
        "staying", mode="mps", uid="1f3b9c1a-6d2e-4a57-9a55-0c1d2e3f4a5b", container=OTHER
    )
    process(node.proc, 10, f"0::/kubepods/pod{pod.uid}/{CONTAINER}")
    process(node.proc, 20, f"0::/kubepods/pod{other.uid}/{OTHER}")
    async with anyio.create_task_group() as group:
        service = await serving(node, group)
        service.pids = {10, 20}
        await node.look(group)
        assert service.terminated == []
        late = replace(pod.facts, killed_at_s=now_s + 3600)
        node.site.picture.pods.put(late, revision=5, now_s=0)
        await node.look(group)
        assert service.terminated == [], "it may still end by itself"
        soon = replace(pod.facts, killed_at_s=now_s + DRAIN_S - 1)
        node.site.picture.pods.put(soon, revision=6, now_s=0)
        service.fails = True
        await node.look(group)
        service.fails = False
        await node.look(group)
        assert service.terminated == [10]
        assert service.pids == {20}
        group.cancel_scope.cancel()


async def test_pods_get_events_of_shared_faults_and_of_restarts(tmp_path: Path) -> None:
    node = Node(tmp_path, {f"{NODE}/0": "mps"}, past="mps")
    node.run_pod("train", mode="mps")
    async with anyio.create_task_group() as group:
        service = await serving(node, group)
        await node.look(group, 3)
        assert node.reasons(REASON_FAULTS) == 1
        await service.on_restart("start a client: no answer within 5 s")
        assert node.reasons(REASON_RESTART) == 1
        group.cancel_scope.cancel()


@pytest.mark.timeout(30)
async def test_no_pod_is_killed_with_clients_in_a_thousand_random_stops(tmp_path: Path) -> None:
    chance = random.Random(27)
    node = Node(tmp_path, {f"{NODE}/0": "mps"}, past="mps")
    uid = "0f3b9c1a-6d2e-4a57-9a55-0c1d2e3f4a5b"
    pod = node.run_pod("train", mode="mps", uid=uid)
    process(node.proc, 10, f"0::/kubepods/pod{uid}/{CONTAINER}")
    clock = node.site.clock = ManualClock()
    async with anyio.create_task_group() as group:
        service = await serving(node, group)
        for revision in range(1000):
            service.pids = {10, 11}
            left_s = chance.uniform(0, 2 * DRAIN_S)
            facts = replace(pod.facts, killed_at_s=clock.now_s() + left_s)
            node.site.picture.pods.put(facts, revision=revision + 10, now_s=0)
            await node.keeper.look(group)
            assert service.pids == ({11} if left_s <= DRAIN_S else {10, 11})
            await clock.advance(max(0.0, left_s - DRAIN_S) + 0.001)
            await node.keeper.look(group)
            assert service.pids == {11}, "ended before kubelet kills the pod"
        group.cancel_scope.cancel()


def test_real_service_has_what_the_keeper_uses() -> None:
    assert all(hasattr(MpsService, name) for name in ("run", "clients", "terminate"))
