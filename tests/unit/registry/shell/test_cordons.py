# SPDX-License-Identifier: Apache-2.0
"""Cordons follow the nodes' annotations."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.pods import annotations as keys
from hami_common.ports import WatchEvent
from hami_registry.core.device_config import DeviceConfig
from hami_registry.core.inventory import Inventory
from hami_registry.shell.canonical import CanonicalWriter
from hami_registry.shell.cordons import Cordons, parse_cordon
from hami_registry.shell.metrics import Metrics
from tests.support.manualclock import ManualClock
from tests.support.memorybus import MemoryBucket, MemoryBus
from tests.support.registry import quarantine, report


@pytest.mark.parametrize(
    ("text", "uuids"),
    [("", []), (" , ,", []), ("GPU-a", ["GPU-a"]), (" GPU-a , GPU-b,", ["GPU-a", "GPU-b"])],
)
def test_list_is_split_and_trimmed(text: str, uuids: list[str]) -> None:
    assert parse_cordon(text) == frozenset(uuids)


def writer() -> CanonicalWriter:
    made = CanonicalWriter(
        inventory=Inventory(DeviceConfig()),
        bucket=MemoryBucket(MemoryBus(), subjects.DEVICES_BUCKET),
        clock=ManualClock(),
        metrics=Metrics(CollectorRegistry()),
        source="/registry/test",
        keep_cordons=True,
        quarantine=quarantine(),
    )
    made.inventory.accept(report("a", "b"))
    return made


def event(kind: str, text: str | None = None, name: str = "gpu-1") -> WatchEvent:
    annotations = None if text is None else {keys.DEVICE_CORDON: text}
    raw = msgspec.json.encode({"metadata": {"name": name, "annotations": annotations}})
    return WatchEvent(type=kind, raw=raw)


def cordoned(of: CanonicalWriter) -> list[str]:
    devices = of.inventory.canonical("gpu-1", "nvidia", time_s=0).devices
    return [device.uuid for device in devices if device.cordoned]


@pytest.mark.anyio
async def test_cordon_follows_added_changed_and_removed_annotation() -> None:
    target = writer()
    cordons = Cordons(target, quarantine())
    await cordons.take(event("ADDED", "a"))
    assert cordoned(target) == ["a"]
    await cordons.take(event("MODIFIED", "a,b"))
    assert cordoned(target) == ["a", "b"]
    await cordons.take(event("MODIFIED"))
    assert cordoned(target) == []
    await cordons.take(event("MODIFIED", "b"))
    await cordons.take(event("DELETED"))
    assert cordoned(target) == []


@pytest.mark.anyio
async def test_cordon_of_a_deleted_node_ends_with_the_first_list() -> None:
    target = writer()
    target.cordon("gpu-1", frozenset({"a"}))
    cordons = Cordons(target, quarantine())
    await cordons.take(event("ADDED", "x", name="other"))
    assert cordoned(target) == ["a"]
    await cordons.take(WatchEvent(type="SYNCED"))
    assert cordoned(target) == []


@pytest.mark.anyio
async def test_node_that_does_not_decode_is_skipped() -> None:
    target = writer()
    await Cordons(target, quarantine()).take(WatchEvent(type="ADDED", raw=b"{"))
    assert cordoned(target) == []


@pytest.mark.anyio
async def test_node_that_cannot_be_read_keeps_its_cordon_and_hides_no_other() -> None:
    target = writer()
    target.cordon("gpu-1", frozenset({"a"}))
    cordons = Cordons(target, quarantine())
    broken = msgspec.json.encode({"metadata": {"name": "gpu-1", "annotations": "none"}})
    await cordons.take(WatchEvent(type="ADDED", raw=broken))
    await cordons.take(event("ADDED", "c", name="gpu-2"))
    await cordons.take(WatchEvent(type="SYNCED"))
    assert cordoned(target) == ["a"]
    assert target.inventory.cordoned_nodes() == ["gpu-1", "gpu-2"]
