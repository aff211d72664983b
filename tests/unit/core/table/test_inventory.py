# SPDX-License-Identifier: Apache-2.0
"""Devices follow canonical records, heartbeats and faults."""

import pytest
from msgspec.structs import replace

from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices
from hami_common.model.device import Device
from hami_common.model.request import ContainerRequest, DeviceRequest, PodRequest
from hami_core.placement.verdicts import Verdicts
from hami_core.table.inventory import UNKNOWN_MOST, Inventory
from hami_core.table.table import DeviceTable

REQUEST = PodRequest(
    uid="u",
    namespace="ns",
    name="p",
    containers=(
        ContainerRequest(
            name="main",
            kind="app",
            requests=(DeviceRequest(vendor="nvidia", count=1, memory_mib=10),),
        ),
    ),
)


def devices(*uuids: str, node: str = "n1", boot_id: str = "b1", seq: int = 1) -> NodeDevices:
    return NodeDevices(
        node=node,
        vendor="nvidia",
        boot_id=boot_id,
        seq=seq,
        time_s=0.0,
        config_generation=1,
        devices=tuple(
            Device(
                uuid=uuid,
                vendor="nvidia",
                index=index,
                type="T",
                memory_mib=1000,
                capacity_mib=1000,
            )
            for index, uuid in enumerate(uuids)
        ),
    )


def fault(*, healthy: bool, seq: int, boot_id: str = "b1", uuid: str = "g") -> DeviceFault:
    return DeviceFault(
        node="n1",
        vendor="nvidia",
        uuid=uuid,
        boot_id=boot_id,
        seq=seq,
        time_s=0.0,
        healthy=healthy,
    )


def beat(*vendors: str) -> Heartbeat:
    return Heartbeat(node="n1", boot_id="b1", seq=1, time_s=0.0, vendors=vendors)


class Rig:
    def __init__(self) -> None:
        table = DeviceTable()
        self.inventory = Inventory(table, heartbeat_timeout_s=15.0)
        self._verdicts = Verdicts(table)
        self.inventory.put(devices("g"), revision=1, now_s=0.0)

    def fits(self) -> bool:
        return self._verdicts.filter(REQUEST, ["n1"]).feasible == ["n1"]


def test_devices_die_after_the_timeout_and_live_again_on_a_heartbeat() -> None:
    rig = Rig()
    assert rig.inventory.tick(now_s=14.9) == []
    assert rig.fits()
    assert rig.inventory.tick(now_s=15.0) == [("n1", "nvidia")]
    assert rig.inventory.tick(now_s=16.0) == []
    assert not rig.fits()
    assert rig.inventory.silent() == [("n1", "nvidia")]
    assert rig.inventory.alive_count() == 0
    rig.inventory.hear(beat("nvidia"), now_s=20.0)
    assert rig.fits()
    assert rig.inventory.tick(now_s=34.9) == []


def test_heartbeat_counts_only_for_the_vendors_it_names() -> None:
    rig = Rig()
    rig.inventory.hear(beat("other"), now_s=14.0)
    assert rig.inventory.tick(now_s=15.0) == [("n1", "nvidia")]


def test_new_record_of_a_silent_node_does_not_revive_it() -> None:
    rig = Rig()
    rig.inventory.tick(now_s=15.0)
    rig.inventory.put(devices("g", seq=2), revision=2, now_s=16.0)
    assert not rig.fits()


def test_fault_outlives_older_records_and_ends_with_a_newer_one() -> None:
    rig = Rig()
    assert rig.inventory.take_fault(fault(healthy=False, seq=3))
    assert not rig.fits()
    assert rig.inventory.faults() == [("n1", "g", False)]
    rig.inventory.put(devices("g", seq=2), revision=2, now_s=0.0)
    assert not rig.fits()
    rig.inventory.put(devices("g", seq=3), revision=3, now_s=0.0)
    assert rig.fits()
    assert rig.inventory.faults() == []


def test_recovery_message_ends_a_fault() -> None:
    rig = Rig()
    rig.inventory.take_fault(fault(healthy=False, seq=3))
    assert rig.inventory.take_fault(fault(healthy=True, seq=4))
    assert rig.fits()


def test_stale_faults_change_nothing() -> None:
    rig = Rig()
    assert not rig.inventory.take_fault(fault(healthy=False, seq=1))
    assert not rig.inventory.take_fault(fault(healthy=False, seq=9, boot_id="b0"))
    assert rig.inventory.take_fault(fault(healthy=True, seq=5))
    assert not rig.inventory.take_fault(fault(healthy=False, seq=5))
    assert rig.fits()


@pytest.mark.parametrize(("boot", "seq"), [("~~~~", 10**12), ("b1", 10**12)])
def test_fault_with_forged_numbers_ends_with_the_agents_next_report(boot: str, seq: int) -> None:
    rig = Rig()
    assert rig.inventory.take_fault(fault(healthy=False, seq=seq, boot_id=boot))
    rig.inventory.put(devices("g", seq=1), revision=2, now_s=0.0)
    assert not rig.fits(), "the same report under another configuration tells nothing new"
    rig.inventory.put(devices("g", seq=2), revision=3, now_s=0.0)
    assert rig.fits()
    assert rig.inventory.faults() == []


def test_agents_own_recovery_overrules_a_fault_of_a_run_that_never_reported() -> None:
    rig = Rig()
    assert rig.inventory.take_fault(fault(healthy=False, seq=10**12, boot_id="~~~~"))
    assert rig.inventory.take_fault(fault(healthy=True, seq=2))
    assert rig.fits()


def test_faults_of_devices_that_are_not_there_are_not_kept() -> None:
    rig = Rig()
    assert not rig.inventory.take_fault(fault(healthy=False, seq=9, uuid="no such device"))
    kept = [
        rig.inventory.take_fault(
            replace(fault(healthy=False, seq=9, uuid=f"u{number}"), vendor=f"v{number % 7}")
        )
        for number in range(UNKNOWN_MOST + 5)
    ]
    assert kept.count(True) == UNKNOWN_MOST
    assert rig.fits()


def test_devices_not_delivered_again_after_a_reset_are_removed() -> None:
    rig = Rig()
    rig.inventory.put(devices("h", node="n2"), revision=2, now_s=0.0)
    rig.inventory.begin_again()
    rig.inventory.put(devices("g"), revision=1, now_s=0.0)
    rig.inventory.end_again()
    assert [found.node for found in rig.inventory.devices()] == ["n1"]
    assert rig.fits()
    rig.inventory.remove("n1", "nvidia")
    assert not rig.fits()
    assert rig.inventory.alive_count() == 0
