# SPDX-License-Identifier: Apache-2.0
"""Ownership of device ids: allocation order, reuse, health, checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hami_common.kubeletapi import deviceplugin as api
from hami_sim.kubelet.devices import CHECKPOINT, DeviceError, DeviceManager
from hami_sim.kubelet.objects import Obj

GPU = "nvidia.com/gpu"


class Recorder:
    """A plugin that notes what it is asked."""

    def __init__(self) -> None:
        self.allocated: list[set[str]] = []
        self.started: list[set[str]] = []
        self.wishes: list[str] = []
        self.error = ""

    async def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        return self.wishes

    async def allocate(self, ids: Sequence[str]) -> Sequence[api.ContainerAllocateResponse]:
        if self.error:
            raise DeviceError(self.error)
        self.allocated.append(set(ids))
        return [api.ContainerAllocateResponse(envs={"IDS": ",".join(sorted(ids))})]

    async def pre_start(self, ids: Sequence[str]) -> None:
        if self.error:
            raise DeviceError(self.error)
        self.started.append(set(ids))


class Rig:
    """A manager with one plugin, a settable time and a settable list of active pods."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plugin = Recorder()
        self.active: list[Obj] = []
        self.time_s = 0.0
        self.manager = self.new_manager()

    def new_manager(self) -> DeviceManager:
        return DeviceManager(
            self.directory,
            active_pods=lambda: self.active,
            now_s=lambda: self.time_s,
            grace_s=300.0,
        )

    def connect(
        self,
        count: int = 4,
        *,
        preferred: bool = False,
        pre_start: bool = False,
        sick: Sequence[str] = (),
    ) -> None:
        self.manager.is_synced = True
        options = api.DevicePluginOptions(
            get_preferred_allocation_available=preferred, pre_start_required=pre_start
        )
        self.manager.connect(GPU, self.plugin, options)
        self.offer(count, sick=sick)

    def offer(self, count: int = 4, *, sick: Sequence[str] = ()) -> None:
        ids = [f"d{i}" for i in range(count)]
        self.manager.update(
            GPU,
            [api.Device(ID=i, health="Unhealthy" if i in sick else "Healthy") for i in ids],
        )

    async def allocate(self, pod: Obj) -> None:
        self.active.append(pod)
        await self.manager.allocate_pod(pod)

    def held(self, pod: Obj, container: str) -> set[str]:
        return set(self.manager.devices_of(pod["metadata"]["uid"], container).get(GPU, {}))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def container(name: str, count: int, *, sidecar: bool = False) -> Obj:
    made: Obj = {"name": name, "resources": {"limits": {GPU: str(count)} if count else {}}}
    return {**made, "restartPolicy": "Always"} if sidecar else made


def pod(uid: str, *apps: Obj, inits: Sequence[Obj] = ()) -> Obj:
    return {
        "metadata": {"uid": uid, "name": uid, "namespace": "n"},
        "spec": {"containers": list(apps), "initContainers": list(inits)},
    }


@pytest.mark.anyio
async def test_each_container_gets_its_number_of_ids(rig: Rig) -> None:
    rig.connect()
    one = pod("u1", container("a", 1), container("b", 2), container("c", 0))
    await rig.allocate(one)
    assert [len(ids) for ids in rig.plugin.allocated] == [1, 2]
    assert not rig.held(one, "a") & rig.held(one, "b")
    assert rig.held(one, "c") == set()


@pytest.mark.anyio
async def test_ids_of_an_init_container_are_reused_by_later_containers(rig: Rig) -> None:
    rig.connect(count=2)
    one = pod("u1", container("a", 1), container("b", 1), inits=[container("i", 2)])
    await rig.allocate(one)
    assert [len(ids) for ids in rig.plugin.allocated] == [2, 1, 1]
    assert rig.held(one, "a") | rig.held(one, "b") == rig.held(one, "i")


@pytest.mark.anyio
async def test_ids_of_a_sidecar_are_not_reused(rig: Rig) -> None:
    rig.connect(count=2)
    one = pod("u1", container("a", 1), inits=[container("i", 2), container("s", 1, sidecar=True)])
    await rig.allocate(one)
    assert rig.held(one, "s") | rig.held(one, "a") == rig.held(one, "i")
    assert not rig.held(one, "s") & rig.held(one, "a")


@pytest.mark.anyio
async def test_preferred_ids_are_taken_and_foolish_ones_ignored(rig: Rig) -> None:
    rig.connect(count=4, preferred=True)
    rig.plugin.wishes = ["d3", "nonsense"]
    one = pod("u1", container("a", 1))
    await rig.allocate(one)
    assert rig.held(one, "a") == {"d3"}
    two = pod("u2", container("a", 1))
    await rig.allocate(two)  # d3 is taken by now
    assert rig.held(two, "a") < {"d0", "d1", "d2"}


@pytest.mark.anyio
async def test_too_many_ids_are_refused_with_kubelets_words(rig: Rig) -> None:
    rig.connect(count=2)
    with pytest.raises(DeviceError) as caught:
        await rig.allocate(pod("u1", container("a", 3)))
    assert str(caught.value) == (
        "requested number of devices unavailable for nvidia.com/gpu. Requested: 3, Available: 2"
    )


@pytest.mark.anyio
async def test_failed_allocate_gives_the_ids_back(rig: Rig) -> None:
    rig.connect(count=1)
    rig.plugin.error = "rpc error: code = Unknown desc = not yours"
    with pytest.raises(DeviceError, match="not yours"):
        await rig.allocate(pod("u1", container("a", 1)))
    rig.plugin.error = ""
    await rig.allocate(pod("u2", container("a", 1)))


@pytest.mark.anyio
async def test_ids_are_freed_when_their_pod_is_not_active_any_more(rig: Rig) -> None:
    rig.connect(count=1)
    one = pod("u1", container("a", 1))
    await rig.allocate(one)
    with pytest.raises(DeviceError, match="Requested: 1, Available: 0"):
        await rig.allocate(pod("u2", container("a", 1)))
    rig.active.clear()
    await rig.allocate(pod("u3", container("a", 1)))
    assert rig.held(one, "a") == set()


@pytest.mark.anyio
async def test_container_that_has_its_ids_is_not_allocated_again(rig: Rig) -> None:
    rig.connect()
    one = pod("u1", container("a", 1))
    await rig.allocate(one)
    await rig.allocate(one)
    assert len(rig.plugin.allocated) == 1


@pytest.mark.anyio
async def test_unhealthy_ids_are_not_given_out(rig: Rig) -> None:
    rig.connect(count=2, sick=["d0"])
    one = pod("u1", container("a", 1))
    await rig.allocate(one)
    assert rig.held(one, "a") == {"d1"}
    counts = rig.manager.capacity()
    assert (counts.capacity[GPU], counts.allocatable[GPU]) == (2, 1)


@pytest.mark.anyio
async def test_vanished_plugin_keeps_capacity_for_the_grace_and_then_goes(rig: Rig) -> None:
    rig.connect(count=2)
    rig.manager.disconnect(GPU)
    counts = rig.manager.capacity()
    assert (counts.capacity[GPU], counts.allocatable[GPU]) == (2, 0)
    with pytest.raises(DeviceError, match="no healthy devices present"):
        await rig.allocate(pod("u1", container("a", 1)))
    rig.time_s = 301.0
    assert rig.manager.capacity().removed == {GPU}
    await rig.allocate(pod("u2", container("a", 1)))  # unknown resources are not kubelet's concern
    assert rig.plugin.allocated == []


@pytest.mark.anyio
async def test_restarted_manager_knows_who_holds_what(rig: Rig) -> None:
    rig.connect()
    one = pod("u1", container("a", 2))
    await rig.allocate(one)
    held = rig.held(one, "a")
    rig.manager = rig.new_manager()
    rig.manager.read_checkpoint()
    rig.manager.running_at_start = frozenset({("u1", "a")})
    await rig.manager.allocate_pod(one)
    assert rig.held(one, "a") == held
    assert len(rig.plugin.allocated) == 1
    assert rig.manager.capacity().capacity[GPU] == 0


@pytest.mark.anyio
async def test_restarted_manager_refuses_ended_containers_until_the_plugin_reconnects(
    rig: Rig,
) -> None:
    rig.connect()
    one = pod("u1", container("a", 1))
    await rig.allocate(one)
    rig.manager = rig.new_manager()
    rig.manager.read_checkpoint()
    with pytest.raises(DeviceError, match="no healthy devices present"):
        await rig.manager.allocate_pod(one)
    rig.connect()
    await rig.manager.allocate_pod(one)
    assert len(rig.plugin.allocated) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b'{"Data":{},"Checksum":1}'])
@pytest.mark.anyio
async def test_damaged_checkpoint_counts_as_none(rig: Rig, damage: bytes) -> None:
    (rig.directory / CHECKPOINT).write_bytes(damage)
    rig.manager.read_checkpoint()
    assert not rig.manager.is_plugin_resource(GPU)


@pytest.mark.anyio
async def test_run_options_join_the_answers_and_call_pre_start(rig: Rig) -> None:
    rig.connect(pre_start=True)
    one = pod("u1", container("a", 2))
    await rig.allocate(one)
    options = await rig.manager.run_options(one, one["spec"]["containers"][0])
    assert set(options.envs["IDS"].split(",")) == rig.held(one, "a") == rig.plugin.started[0]
    rig.plugin.error = "rpc error: code = Internal desc = not ready"
    with pytest.raises(DeviceError, match=r"PreStartContainer rpc failed with err: .* not ready"):
        await rig.manager.run_options(one, one["spec"]["containers"][0])


@pytest.mark.anyio
async def test_numa_nodes_are_reported_as_the_plugin_gave_them(rig: Rig) -> None:
    rig.connect(count=1)
    nodes = [api.NUMANode(ID=0), api.NUMANode(ID=1)]
    device = api.Device(ID="d0", health="Healthy", topology=api.TopologyInfo(nodes=nodes))
    rig.manager.update(GPU, [device])
    one = pod("u1", container("a", 1))
    await rig.allocate(one)
    assert rig.manager.devices_of("u1", "a") == {GPU: {"d0": (0, 1)}}
    assert rig.manager.allocatable_devices() == {GPU: {"d0": (0, 1)}}
