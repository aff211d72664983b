# SPDX-License-Identifier: Apache-2.0
"""Silence of agents: counted only while the bus is connected, and reported when it ends."""

from hami_common.events.inventory import Heartbeat, NodeDevices
from hami_common.model.device import Device
from hami_core.table.inventory import Inventory
from hami_core.table.table import DeviceTable


def devices(*, healthy: bool = True) -> NodeDevices:
    device = Device(
        uuid="GPU-a",
        vendor="nvidia",
        index=0,
        type="H200",
        memory_mib=1000,
        capacity_mib=1000,
        healthy=healthy,
    )
    return NodeDevices(
        node="n",
        vendor="nvidia",
        boot_id="1",
        seq=1,
        time_s=0,
        config_generation=1,
        devices=(device,),
    )


def heartbeat() -> Heartbeat:
    return Heartbeat(node="n", boot_id="1", seq=2, time_s=0, vendors=("nvidia",))


def inventory() -> Inventory:
    made = Inventory(DeviceTable(), heartbeat_timeout_s=15)
    made.put(devices(), revision=1, now_s=0)
    return made


def test_outage_of_the_bus_does_not_count_as_silence_of_agents() -> None:
    listening = inventory()
    listening.deaf(now_s=14)
    assert listening.tick(now_s=20) == []
    assert listening.tick(now_s=29) == [("n", "nvidia")]


def test_agent_that_was_silent_before_the_outage_stays_silent() -> None:
    listening = inventory()
    assert listening.tick(now_s=15) == [("n", "nvidia")]
    listening.deaf(now_s=16)
    assert listening.silent() == [("n", "nvidia")]


def test_vendor_that_its_agent_cannot_serve_is_unusable_at_once() -> None:
    listening = inventory()
    unserved = Heartbeat(node="n", boot_id="1", seq=2, time_s=0, unserved=("nvidia",))
    assert not listening.hear(unserved, now_s=1)
    assert listening.silent() == [("n", "nvidia")]
    assert listening.tick(now_s=2) == []
    assert listening.hear(heartbeat(), now_s=3)
    assert listening.silent() == []


def test_devices_that_appear_while_unserved_are_unusable_until_served() -> None:
    listening = Inventory(DeviceTable(), heartbeat_timeout_s=15)
    listening.hear(Heartbeat(node="n", boot_id="1", seq=2, time_s=0, unserved=("nvidia",)), now_s=0)
    listening.put(devices(), revision=1, now_s=1)
    assert listening.silent() == [("n", "nvidia")]
    assert listening.hear(heartbeat(), now_s=2)
    assert listening.silent() == []


def test_devices_are_unusable_before_the_first_heartbeat_after_a_start() -> None:
    started = Inventory(DeviceTable(), heartbeat_timeout_s=15, trusts_unheard=False)
    started.put(devices(), revision=1, now_s=0)
    assert started.silent() == [("n", "nvidia")]
    assert started.tick(now_s=1) == []
    assert started.hear(heartbeat(), now_s=2)
    assert started.silent() == []
    assert started.tick(now_s=17) == [("n", "nvidia")]


def test_heartbeat_before_the_first_record_counts_until_its_timeout() -> None:
    for appeared_s, silent in ((14, []), (16, [("n", "nvidia")])):
        started = Inventory(DeviceTable(), heartbeat_timeout_s=15, trusts_unheard=False)
        started.hear(heartbeat(), now_s=0)
        started.put(devices(), revision=1, now_s=appeared_s)
        assert started.silent() == silent


def test_last_word_about_unknown_devices_counts() -> None:
    started = Inventory(DeviceTable(), heartbeat_timeout_s=15, trusts_unheard=False)
    started.hear(heartbeat(), now_s=0)
    started.hear(Heartbeat(node="n", boot_id="1", seq=3, time_s=0, unserved=("nvidia",)), now_s=1)
    started.put(devices(), revision=1, now_s=2)
    assert started.silent() == [("n", "nvidia")]


def test_end_of_silence_is_reported_once() -> None:
    listening = inventory()
    assert not listening.hear(heartbeat(), now_s=5)
    listening.tick(now_s=30)
    assert listening.hear(heartbeat(), now_s=31)
    assert not listening.hear(heartbeat(), now_s=36)


def test_change_of_devices_is_reported_and_repetition_is_not() -> None:
    listening = inventory()
    assert not listening.put(devices(), revision=2, now_s=1)
    assert listening.put(devices(healthy=False), revision=3, now_s=2)
    assert listening.put(devices(), revision=4, now_s=3)
