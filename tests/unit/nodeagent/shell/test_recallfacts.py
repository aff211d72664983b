# SPDX-License-Identifier: Apache-2.0
"""Facts of recalled containers: what the kernel confirms counts, and nothing is forgotten."""

from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_common.model.device import Device
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.recall import UNKNOWN_MIB, ProcessFacts
from hami_nodeagent.drivers.protocol import DeviceUsage, ProcessUsage
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.gates import Gates
from hami_nodeagent.shell.headroom import Headroom, HostMemory
from hami_nodeagent.shell.owners import Owner
from hami_nodeagent.shell.recallfacts import Observer, groups_of, memory_by_pid, rooms_of
from hami_nodeagent.shell.regions import region_path
from tests.support.regions import Built, Process, Used
from tests.unit.nodeagent.core.builders import device

MIB = 1 << 20
INNER = 4026532000
A, B = ("uid-a", "main"), ("uid-b", "main")
RECALLED = device(0, capacity_mib=2000, largest_mib=900, overcommit="recall")
MANAGED = device(1, capacity_mib=2000)
DEVICES = {one.uuid: one for one in (RECALLED, MANAGED)}


def holder(key: tuple[str, str], uuid: str = "nvidia-0", limit_mib: int = 600) -> Holder:
    return Holder(
        pod_uid=key[0], namespace="default", pod="p", container=key[1], vendor="nvidia",
        uuid=uuid, number=0, limit_mib=limit_mib, priority=3, volume="region",
    )  # fmt: skip


class Breaking(Headroom):
    """A reader that can fail in a way that nothing expects."""

    is_broken = False

    def of(self, pid: int) -> HostMemory:
        if self.is_broken:
            raise RuntimeError(pid)
        return super().of(pid)


class Host:
    """A host's /proc, cgroups and regions, with one process per pid that the test adds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.owner_by_pid: dict[int, Owner] = {}
        self.gates = Gates(Doorbells(directory / "pages"))
        group = directory / "root/sys/fs/cgroup/pod"
        group.mkdir(parents=True)
        self.process(1, namespace=1, owner=None)
        (directory / "proc" / "self").symlink_to("1")
        self.headroom = Breaking(directory / "proc", directory / "root")
        self.observer = Observer(
            proc=directory / "proc",
            pods_dir=directory / "pods",
            gates=self.gates,
            owners=self.owners,
            headroom=self.headroom,
        )

    def owners(self, pids: Collection[int]) -> Mapping[int, Owner]:
        return {pid: self.owner_by_pid[pid] for pid in pids if pid in self.owner_by_pid}

    def process(
        self, pid: int, *, owner: tuple[str, str] | None, namespace: int = INNER, state: str = "S"
    ) -> None:
        own = self.directory / "proc" / str(pid)
        (own / "ns").mkdir(parents=True, exist_ok=True)
        (own / "cgroup").write_text("0::/pod\n")
        (own / "stat").write_text(f"{pid} (x) {state} " + "1 " * 16 + f"1 0 {pid * 10} 0\n")
        (own / "status").write_text(f"NSpid:\t{pid}\t{pid}\n")
        if not (own / "ns" / "pid").is_symlink():
            (own / "ns" / "pid").symlink_to(f"pid:[{namespace}]")
        if owner is not None:
            self.owner_by_pid[pid] = Owner(command="x", pod_uid=owner[0], container=owner[1])

    def region(self, key: tuple[str, str], built: Built | bytes) -> None:
        path = region_path(self.directory / "pods", key[0], "region")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(built if isinstance(built, bytes) else built.data())


def slot(pid: int, used_mib: int = 0) -> Process:
    return Process(pid, [Used(used_mib * MIB, context=3 * MIB)], INNER, pid * 10)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path)
    made.gates.create(A)
    return made


def has_gate(host: Host, key: tuple[str, str]) -> bool:
    return host.gates.is_open(key) is not None


def test_processes_are_those_of_slots_and_of_the_driver(host: Host) -> None:
    for pid in (20, 21, 22):
        host.process(pid, owner=A, state="T" if pid == 21 else "S")
    host.region(
        A, Built(uuids=["nvidia-0"], processes=[slot(20, 50), slot(21)], touched_ns=5 * 10**9)
    )
    groups = groups_of([holder(A)], DEVICES, lambda key: has_gate(host, key))
    (tenant,), failed = host.observer.tenants(groups, {20: {"nvidia-0": 60}, 22: {"nvidia-0": 7}})
    assert not failed
    assert tenant.processes == (
        ProcessFacts(pid=20, start_ticks=200, memory_mib={"nvidia-0": 60}),
        ProcessFacts(pid=21, start_ticks=210, is_stopped=True),
        ProcessFacts(pid=22, start_ticks=220, has_slot=False, memory_mib={"nvidia-0": 7}),
    )
    assert (tenant.level, tenant.limit_mib) == (3, {"nvidia-0": 600})
    assert (tenant.has_gate, tenant.is_gate_open, tenant.is_new) == (True, False, True)
    assert tenant.touched_s == 5.0
    assert tenant.used_mib == {"nvidia-0": 56}
    assert tenant.headroom_mib is None
    assert tenant.is_complete


def test_slot_that_names_a_process_of_another_container_is_ignored(host: Host) -> None:
    host.process(20, owner=B)
    host.region(A, Built(uuids=["nvidia-0"], processes=[slot(20)]))
    groups = groups_of([holder(A)], DEVICES, lambda key: has_gate(host, key))
    (tenant,), _ = host.observer.tenants(groups, {})
    assert tenant.processes == ()


@pytest.mark.parametrize("content", [b"", b"x" * 4096])
def test_region_that_cannot_be_read_makes_the_list_incomplete(host: Host, content: bytes) -> None:
    groups = groups_of([holder(A)], DEVICES, lambda key: has_gate(host, key))
    assert host.observer.tenants(groups, {})[0][0].is_complete, "no process has made one yet"
    host.region(A, content)
    assert not host.observer.tenants(groups, {})[0][0].is_complete


def test_container_whose_status_is_not_known_yet_is_incomplete(host: Host) -> None:
    host.process(20, owner=(A[0], ""))
    host.region(A, Built(uuids=["nvidia-0"], processes=[slot(20)]))
    groups = groups_of([holder(A)], DEVICES, lambda key: has_gate(host, key))
    assert not host.observer.tenants(groups, {})[0][0].is_complete


def test_container_that_cannot_be_observed_keeps_its_last_facts(host: Host) -> None:
    host.process(20, owner=A)
    host.region(A, Built(uuids=["nvidia-0"], processes=[slot(20)]))
    groups = groups_of([holder(A), holder(B)], DEVICES, lambda key: has_gate(host, key))
    before, _ = host.observer.tenants(groups, {})
    host.headroom.is_broken = True
    after, failed = host.observer.tenants(groups, {})
    assert [group.key for group, _ in failed] == [A]
    assert {one.key: one for one in after} == {one.key: one for one in before}


def test_containers_of_recalled_devices_and_with_gates_are_watched(host: Host) -> None:
    held = [
        holder(A, "nvidia-1"),
        holder(A, "nvidia-0"),
        holder(B, "nvidia-1"),
        replace(holder(("uid-c", "main")), vendor="ascend"),
        holder(("uid-d", "main"), "nvidia-2"),
    ]
    groups = groups_of(held, DEVICES, lambda key: has_gate(host, key))
    assert {group.key: group.has_gate for group in groups} == {A: True, B: False}
    assert rooms_of(groups, DEVICES) == {"nvidia-0": 900, "nvidia-1": 1000}


def test_device_that_is_no_longer_recalled_keeps_its_bound_for_its_gates(host: Host) -> None:
    devices: dict[str, Device] = {"nvidia-0": device(0)}
    groups = groups_of([holder(A), holder(B)], devices, lambda key: has_gate(host, key))
    assert {group.key for group in groups} == {A, B}
    assert rooms_of(groups, devices) == {"nvidia-0": 1000}


def test_memory_of_the_driver_is_summed_up_by_process() -> None:
    usages = (
        DeviceUsage(uuid="x", processes=(ProcessUsage(pid=1, used_mib=5), ProcessUsage(pid=2))),
        DeviceUsage(uuid="y", processes=(ProcessUsage(pid=1, used_mib=7),)),
        DeviceUsage(uuid="z"),
    )
    assert memory_by_pid(usages) == {1: {"x": 5, "y": 7}, 2: {"x": UNKNOWN_MIB}}
