# SPDX-License-Identifier: Apache-2.0
"""A configuration that offers less than is booked: affected devices and pods, and exceptions."""

import pytest
from prometheus_client import CollectorRegistry

from hami_common.bus.subjects import DEVICES_BUCKET
from hami_common.errors import SettingsInvalid
from hami_common.events.inventory import NodeReport
from hami_common.model.device import DeviceFacts
from hami_common.model.placement import Booked
from hami_common.runtime.clock import SystemClock
from hami_registry.core.device_config import Defaults, DeviceConfig, Rule
from hami_registry.core.inventory import Inventory
from hami_registry.core.stranded import SHOWN_PODS, Holding, Stranded, refusal
from hami_registry.shell.canonical import CanonicalWriter
from hami_registry.shell.metrics import Metrics
from tests.support.memorybus import MemoryBucket, MemoryBus
from tests.support.registry import quarantine

TWICE = DeviceConfig(defaults=Defaults(memory_scaling=2.0))


def inventory(config: DeviceConfig) -> Inventory:
    """Two devices of 1,000 MiB on one node."""
    made = Inventory(config)
    devices = tuple(
        DeviceFacts(uuid=uuid, index=index, vendor="nvidia", type="H200", memory_mib=1000)
        for index, uuid in enumerate(("a", "b"))
    )
    report = NodeReport(node="n", vendor="nvidia", boot_id="1", seq=1, time_s=0.0, devices=devices)
    assert made.accept(report)
    return made


def held(memory_mib: int = 0, *, slots: int = 1, core_pct: int = 0) -> dict[str, Holding]:
    booked = Booked(memory_mib=memory_mib, slots=slots, core_pct=core_pct)
    return {"a": Holding(booked=booked, pods=("ns/p", "ns/q"))}


@pytest.mark.parametrize(
    ("config", "holdings", "why"),
    [
        (DeviceConfig(), held(1500), "would give 1000 MiB, and 1500 are in use"),
        (DeviceConfig(), held(1000), ""),
        (
            DeviceConfig(defaults=Defaults(slots=2, memory_scaling=2.0)),
            held(3, slots=3),
            "would give 2 shares, and 3 are in use",
        ),
        (
            DeviceConfig(defaults=Defaults(core_scaling=0.5, memory_scaling=2.0)),
            held(3, core_pct=60),
            "would give 50 % of its compute, and 60 are in use",
        ),
        (DeviceConfig(rules=(Rule(uuids=("a",), hidden=True),)), held(3), "would be hidden"),
        (DeviceConfig(rules=(Rule(uuids=("b",), hidden=True),)), held(3), ""),
        (DeviceConfig(), {}, ""),
    ],
)
def test_device_that_gives_less_than_is_held_strands_its_pods(
    config: DeviceConfig, holdings: dict[str, Holding], why: str
) -> None:
    found = inventory(TWICE).stranded_by(config, holdings)
    assert len(found) == bool(why)
    if why:
        assert (found[0].node, found[0].uuid, found[0].pods) == ("n", "a", ("ns/p", "ns/q"))
        assert why in refusal(found)
        assert "ns/p, ns/q" in refusal(found)


def test_device_that_is_overfull_already_is_not_held_against_the_file() -> None:
    stricter = DeviceConfig(defaults=Defaults(memory_scaling=0.5))
    assert inventory(DeviceConfig()).stranded_by(stricter, held(1500)) == []


def test_long_lists_are_truncated_with_a_note() -> None:
    pods = tuple(f"ns/p{number}" for number in range(SHOWN_PODS + 2))
    found = [Stranded(node="n", uuid=f"d{number}", why="w", pods=pods) for number in range(7)]
    text = refusal(found)
    assert "and 2 more;" in text
    assert "and 2 more devices" in text
    assert "d4" in text
    assert "d5" not in text


def test_writer_keeps_the_settings_in_force_unless_overridden() -> None:
    metrics = Metrics(CollectorRegistry())
    writer = CanonicalWriter(
        inventory=inventory(TWICE),
        bucket=MemoryBucket(MemoryBus(), DEVICES_BUCKET),
        clock=SystemClock(),
        metrics=metrics,
        source="/registry/r",
        keep_cordons=False,
        quarantine=quarantine(),
    )
    with pytest.raises(SettingsInvalid, match="ns/p, ns/q"):
        writer.use_config(DeviceConfig(), held(1500))
    assert writer.inventory.config == TWICE
    writer.use_config(DeviceConfig(allow_stranded=True), held(1500))
    (first, _) = writer.inventory.canonical("n", "nvidia", time_s=0).devices
    assert first.capacity_mib == 1000
