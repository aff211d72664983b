# SPDX-License-Identifier: Apache-2.0
"""The driver's memory limits per cgroup: from the agent through NVML to the group's limit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import Share
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.kubeio import EventRecorder
from hami_nodeagent.drivers.errors import DriverDenied, DriverTransient, NotSupported
from hami_nodeagent.drivers.protocol import Driver, MemoryCap
from hami_nodeagent.settings import DriversSettings, NvidiaSettings
from hami_nodeagent.shell.wall import REASON, MemoryWall
from hami_sim.hardware.fake_nvml import FakeNvml, MemoryLimits, Process
from tests.contract.drivers.benches import FakeNvmlBench
from tests.unit.nodeagent.core.builders import NODE, Given
from tests.unit.nodeagent.core.test_cgroups import CONTAINER, OTHER, UID
from tests.unit.nodeagent.shell.support import know, make_site
from tests.unit.nodeagent.shell.test_cgroupfs import make

pytestmark = pytest.mark.anyio

NO_PERMISSION, IS_LOST = 4, 15
SET = "nvmlDeviceSetMemoryLimits_v1"
MARGIN_MIB = 512
Opened = Callable[[Driver], Driver]


@pytest.fixture
def bench(nvidia_bench: Callable[[str], FakeNvmlBench]) -> FakeNvmlBench:
    bench = nvidia_bench("2xA30")
    bench.nvml.driver_version("615.71.09")
    return bench


async def capping(bench: FakeNvmlBench, opened: Opened) -> MemoryCap:
    driver = opened(bench.driver())
    assert isinstance(driver, MemoryCap)
    await driver.discover()
    return driver


async def test_limit_is_hard_and_never_soft(
    bench: FakeNvmlBench, opened: Opened, tmp_path: Path
) -> None:
    driver, uuid = await capping(bench, opened), bench.uuids[0]
    await driver.cap_memory(uuid, tmp_path, 3000)
    limit = MemoryLimits(group=str(tmp_path), soft_mib=0, hard_mib=3000)
    assert bench.nvml.memory_limits(0) == (limit,)
    assert bench.nvml.memory_limits(1) == ()
    await driver.cap_memory(uuid, tmp_path, 4000)
    assert bench.nvml.memory_limits(0) == (replace(limit, hard_mib=4000),)
    await driver.cap_memory(uuid, tmp_path, None)
    assert bench.nvml.memory_limits(0) == ()


async def test_limit_below_the_use_is_not_in_effect(
    bench: FakeNvmlBench, opened: Opened, tmp_path: Path
) -> None:
    driver, uuid = await capping(bench, opened), bench.uuids[0]
    await driver.cap_memory(uuid, tmp_path, 4000)
    (tmp_path / "cgroup.procs").write_text("77\n")
    bench.nvml.set_processes(0, [Process(pid=77, used_mib=3500)])
    with pytest.raises(DriverTransient, match=r"4000 MiB stay in effect instead of 3000 MiB, 3500"):
        await driver.cap_memory(uuid, tmp_path, 3000)


async def test_older_drivers_divided_cards_and_missing_rights_are_distinguished(
    bench: FakeNvmlBench, opened: Opened, tmp_path: Path
) -> None:
    driver, uuid = await capping(bench, opened), bench.uuids[0]
    bench.nvml.driver_version("580.159.03")
    with pytest.raises(NotSupported):
        await driver.cap_memory(uuid, tmp_path, 3000)
    bench.nvml.driver_version("615.71.09")
    bench.nvml.set_mig_mode(0, is_on=True)
    with pytest.raises(NotSupported):
        await driver.cap_memory(uuid, tmp_path, 3000)
    bench.nvml.set_mig_mode(0, is_on=False)
    bench.nvml.fault(SET, 0, NO_PERMISSION)
    with pytest.raises(DriverDenied):
        await driver.cap_memory(uuid, tmp_path, 3000)


class FakeApi:
    """Keeps the Events."""

    def __init__(self) -> None:
        self.created: list[Any] = []

    async def create(self, path: str, body: bytes) -> bytes:
        self.created.append((path, body))
        return b"{}"


class Node:
    """A node with pods, its cgroups and the agent's wall on the fake NVML."""

    def __init__(self, bench: FakeNvmlBench, driver: MemoryCap, directory: Path) -> None:
        self.root = directory / "cgroup"
        self.site = make_site(
            directory / "state",
            host_proc=str(directory / "proc"),
            drivers=DriversSettings(nvidia=NvidiaSettings(cgroup_root=str(self.root))),
        )
        self.nvml: FakeNvml = bench.nvml
        self.bench = bench
        self.api = FakeApi()
        kube: Any = self.api
        recorder = EventRecorder(kube, component="test", clock=SystemClock())
        self.driver = driver
        self.wall = MemoryWall(site=self.site, cap=driver, events=lambda: recorder)
        make(self.root, f"/kubepods/podffffffff-6d2e-4a57-9a55-0c1d2e3f4a5b/{OTHER}", os.getpid())

    async def discover(self, driver: Driver) -> dict[str, bool]:
        """Let the registry publish what the agent reports."""
        inventory = await self.wall.review(await driver.discover())
        devices = tuple(
            Device(
                uuid=one.uuid,
                vendor=one.vendor,
                index=one.index,
                type=one.type,
                memory_mib=one.memory_mib,
                capacity_mib=one.memory_mib,
                mode=one.mode,
                memory_cap=one.memory_cap,
            )
            for one in inventory.devices
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
        return {one.uuid: one.memory_cap for one in inventory.devices}

    def run_pod(self, memory_mib: int, sequence: int = 1) -> None:
        """A running pod with one container, of this size since its newest record."""
        pod = Given(
            "train",
            uid=UID,
            sequence=sequence,
            started=frozenset({"main"}),
            container_by_id={f"containerd://{CONTAINER}": "main"},
        )
        share = Share(vendor="nvidia", uuid=self.bench.uuids[0], memory_mib=memory_mib)
        containers = (replace(pod.record.containers[0], shares=(share,)),)
        pod.entry = replace(pod.entry, record=replace(pod.record, containers=containers))
        know(self.site, pod)
        self.site.picture.grants.add(pod.grant("main", "id"))

    def start_container(self) -> Path:
        return make(self.root, f"/kubepods/burstable/pod{UID}/{CONTAINER}", 77)

    def limits(self) -> list[tuple[str, int]]:
        return [(one.group, one.hard_mib) for one in self.nvml.memory_limits(0)]

    def reasons(self) -> list[str]:
        return [REASON for _, body in self.api.created if REASON.encode() in body]


@pytest.fixture
async def node(bench: FakeNvmlBench, opened: Opened, tmp_path: Path) -> Node:
    return Node(bench, await capping(bench, opened), tmp_path)


async def discover(node: Node) -> dict[str, bool]:
    driver: Any = node.driver
    return await node.discover(driver)


async def test_container_is_limited_from_its_start_through_a_resize_to_its_end(node: Node) -> None:
    assert await discover(node) == dict.fromkeys(node.bench.uuids, True)
    assert node.limits() == [], "the probe changes nothing"
    node.run_pod(3000)
    group = node.start_container()
    await node.wall.look()
    assert node.limits() == [(str(group), 3000 + MARGIN_MIB)]
    node.run_pod(5000, sequence=2)
    await node.wall.look()
    assert node.limits() == [(str(group), 5000 + MARGIN_MIB)]
    assert all(one.soft_mib == 0 for one in node.nvml.memory_limits(0))
    (group / "cgroup.procs").unlink()
    group.rmdir()
    await node.wall.look()
    assert node.site.metrics.memory_caps._value.get() == 0  # noqa: SLF001 - no other reader


async def test_missing_limit_is_reported_once_per_reason(node: Node) -> None:
    await discover(node)
    node.run_pod(3000)
    await node.wall.look()
    assert node.reasons() == [REASON], "the runtime made no group for it"
    node.start_container()
    node.nvml.fault(SET, 0, IS_LOST)
    await node.wall.look()
    await node.wall.look()
    assert node.reasons() == [REASON, REASON]
    node.nvml.clear_faults()
    await node.wall.look()
    assert len(node.limits()) == 1


async def test_limit_that_a_reset_lost_is_set_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await discover(node)
    node.run_pod(3000)
    node.start_container()
    await node.wall.look()
    node.nvml.reset_memory_limits()
    await node.wall.look()
    assert node.limits() == [], "it was set less than a minute ago"
    monkeypatch.setattr("hami_nodeagent.shell.wall._AGAIN_S", 0.0)
    await node.wall.look()
    assert len(node.limits()) == 1


async def test_older_driver_leaves_the_library_alone(node: Node) -> None:
    node.nvml.driver_version("580.159.03")
    assert await discover(node) == dict.fromkeys(node.bench.uuids, False)
    node.run_pod(3000)
    node.start_container()
    await node.wall.look()
    assert node.limits() == []
    assert node.reasons() == []


async def test_card_in_mig_mode_is_left_out(node: Node) -> None:
    node.nvml.set_mig_mode(0, is_on=True)
    first, second = node.bench.uuids
    assert await discover(node) == {first: False, second: True}


async def test_lost_card_keeps_what_it_offered(node: Node) -> None:
    await discover(node)
    node.nvml.lose(1)
    assert await discover(node) == dict.fromkeys(node.bench.uuids, True)


async def test_agent_without_the_hosts_cgroups_offers_no_limit(node: Node) -> None:
    for group in sorted(node.root.rglob("*"), reverse=True):
        group.unlink() if group.is_file() else group.rmdir()
    assert await discover(node) == dict.fromkeys(node.bench.uuids, False)
