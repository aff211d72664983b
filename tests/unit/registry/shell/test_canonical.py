# SPDX-License-Identifier: Apache-2.0
"""The writer of canonical devices: only differences, one generation per configuration."""

from collections.abc import Callable

import anyio
import pytest
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.inventory import NodeDevices, NodeReport
from hami_common.runtime.clock import SystemClock
from hami_registry.core.device_config import Defaults, DeviceConfig, Rule
from hami_registry.core.inventory import Inventory
from hami_registry.shell.canonical import CONFIG_DIGEST, CanonicalWriter
from hami_registry.shell.follow import follow
from hami_registry.shell.metrics import Metrics
from tests.support.memorybus import MemoryBucket, MemoryBus
from tests.support.registry import quarantine, report, stored, until_stored

pytestmark = pytest.mark.anyio
FOUR_SLOTS = DeviceConfig(defaults=Defaults(slots=4))
FIVE_SLOTS = DeviceConfig(defaults=Defaults(slots=5))


class Replica:
    """A writer with its task and its view of the bucket."""

    def __init__(
        self, bus: MemoryBus, config: DeviceConfig | None = None, *, keep_cordons: bool = False
    ) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.quarantine = quarantine()
        self.bucket = MemoryBucket(bus, subjects.DEVICES_BUCKET)
        self.writer = CanonicalWriter(
            inventory=Inventory(config or DeviceConfig()),
            bucket=self.bucket,
            clock=SystemClock(),
            metrics=self.metrics,
            source="/registry/test",
            keep_cordons=keep_cordons,
            quarantine=self.quarantine,
        )

    async def start(self, group: anyio.abc.TaskGroup, *, resync_s: float = 60.0) -> None:
        await group.start(follow, self.bucket, (self.writer,), self.metrics, self.quarantine)
        group.start_soon(self._run, resync_s)

    async def _run(self, resync_s: float) -> None:
        await self.writer.run(resync_s=resync_s, retry_s=0.01)

    def accept(self, message: NodeReport) -> None:
        assert self.writer.inventory.accept(message)
        self.writer.mark([(message.node, message.vendor)])

    def count(self, outcome: str) -> float:
        name = "hami_registry_publications_total"
        return self.metrics.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


async def append_count(replica: Replica) -> int:
    """Count the values stored since the bus began, by their revisions."""
    return await replica.bucket.last_revision(subjects.kv_subject(replica.bucket.name, ">"))


def has_slots(slots: int) -> Callable[[NodeDevices], bool]:
    return lambda found: found.devices[0].slots == slots


def has_seq(seq: int) -> Callable[[NodeDevices], bool]:
    return lambda found: found.seq == seq


async def quiet(*replicas: Replica) -> None:
    """Wait until all tasks are idle."""
    await anyio.wait_all_tasks_blocked()


async def test_report_becomes_a_record_with_event_headers() -> None:
    bus = MemoryBus()
    replica = Replica(bus)
    async with anyio.create_task_group() as group:
        await replica.start(group)
        replica.accept(report("a", "b"))
        await until_stored(replica.bucket, lambda found: len(found.devices) == 2)
        group.cancel_scope.cancel()
    (entry,) = await replica.bucket.latest()
    assert entry.headers["ce-type"] == "io.hami.device.changed.v1"
    assert entry.headers["ce-source"] == "/registry/test"
    assert entry.headers[CONFIG_DIGEST]


async def test_restart_publishes_nothing_again() -> None:
    bus = MemoryBus()
    for _ in range(3):
        replica = Replica(bus, FOUR_SLOTS)
        async with anyio.create_task_group() as group:
            await replica.start(group)
            replica.accept(report("a"))
            await until_stored(replica.bucket, has_slots(4))
            await quiet(replica)
            assert await append_count(replica) == 1
            group.cancel_scope.cancel()


async def test_generation_grows_with_the_configuration_across_restarts_and_only_then() -> None:
    bus = MemoryBus()
    generations = []
    for config in (FOUR_SLOTS, FOUR_SLOTS, FIVE_SLOTS, FIVE_SLOTS, FOUR_SLOTS):
        replica = Replica(bus, config)
        async with anyio.create_task_group() as group:
            await replica.start(group)
            replica.accept(report("a"))
            await until_stored(replica.bucket, has_slots(config.defaults.slots))
            group.cancel_scope.cancel()
        generations.append(replica.writer.inventory.generation)
    assert generations == [1, 1, 2, 2, 3]


async def test_new_configuration_republishes_differences() -> None:
    bus = MemoryBus()
    replica = Replica(bus)
    async with anyio.create_task_group() as group:
        await replica.start(group)
        replica.accept(report("a", node="n1"))
        replica.accept(report("b", node="n2"))
        await until_stored(replica.bucket, lambda _: True, node="n2")
        replica.writer.use_config(DeviceConfig(rules=(Rule(nodes=("n2",), slots=3),)))
        found = await until_stored(replica.bucket, has_slots(3), node="n2")
        assert found.config_generation == 2
        await quiet(replica)
        group.cancel_scope.cancel()
    by_key = {entry.key: entry.revision for entry in await replica.bucket.latest()}
    assert by_key == {"n1.nvidia": 1, "n2.nvidia": 3}


async def test_two_replicas_write_each_change_once() -> None:
    bus = MemoryBus()
    first, second = Replica(bus), Replica(bus)
    async with anyio.create_task_group() as group:
        await first.start(group)
        await second.start(group)
        for seq in range(1, 30):
            for replica in (first, second):
                replica.accept(report("a", seq=seq))
            await until_stored(first.bucket, has_seq(seq))
            await quiet(first, second)
        group.cancel_scope.cancel()
    assert await append_count(first) == 29


async def test_replica_that_is_behind_never_overwrites_a_newer_report() -> None:
    bus = MemoryBus()
    behind, ahead = Replica(bus), Replica(bus)
    async with anyio.create_task_group() as group:
        await behind.start(group)
        await ahead.start(group)
        ahead.accept(report("new", boot_id="2", seq=1))
        await until_stored(ahead.bucket, lambda found: found.boot_id == "2")
        behind.accept(report("old", boot_id="1", seq=9))
        await quiet(behind, ahead)
        found = await stored(ahead.bucket)
        group.cancel_scope.cancel()
    assert found is not None
    assert [device.uuid for device in found.devices] == ["new"]
    assert behind.count("unchanged") == 1


async def test_replicas_with_different_configurations_do_not_fight() -> None:
    bus = MemoryBus()
    old, new = Replica(bus), Replica(bus)
    async with anyio.create_task_group() as group:
        await old.start(group, resync_s=0.01)
        await new.start(group, resync_s=0.01)
        for replica in (old, new):
            replica.accept(report("a"))
        await until_stored(old.bucket, lambda _: True)
        new.writer.use_config(FOUR_SLOTS)
        await until_stored(old.bucket, has_slots(4))
        before = old.count("unchanged")
        with anyio.fail_after(3):
            while old.count("unchanged") < before + 5:  # it looked again and again, and let it be
                await anyio.sleep(0.005)
        assert await append_count(old) == 2
        old.writer.use_config(FOUR_SLOTS)
        await quiet(old, new)
        assert old.writer.inventory.generation == new.writer.inventory.generation == 2
        assert await append_count(old) == 2
        group.cancel_scope.cancel()


async def test_wiped_bucket_is_filled_again() -> None:
    bus = MemoryBus()
    replica = Replica(bus)
    async with anyio.create_task_group() as group:
        await replica.start(group)
        for node in ("n1", "n2"):
            replica.accept(report("a", node=node))
        await until_stored(replica.bucket, lambda _: True, node="n2")
        bus.wipe()
        for node in ("n1", "n2"):
            await until_stored(replica.bucket, lambda _: True, node=node)
        await quiet(replica)
        group.cancel_scope.cancel()
    assert await append_count(replica) == 2


async def test_lost_answer_is_read_back_and_not_written_twice() -> None:
    bus = MemoryBus()
    replica = Replica(bus)
    async with anyio.create_task_group() as group:
        await replica.start(group)
        bus.lose_next_ack = True
        replica.accept(report("a"))
        with anyio.fail_after(3):
            while replica.count("unchanged") < 1:
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    assert await append_count(replica) == 1


async def test_recovered_bus_receives_everything() -> None:
    bus = MemoryBus()
    replica = Replica(bus)
    async with anyio.create_task_group() as group:
        await replica.start(group)
        bus.set_available(available=False)
        replica.accept(report("a"))
        with anyio.fail_after(3):
            while replica.count("failed") < 2:
                await anyio.sleep(0.005)
        bus.set_available(available=True)
        await until_stored(replica.bucket, lambda _: True)
        group.cancel_scope.cancel()


async def test_value_that_does_not_decode_is_replaced() -> None:
    bus = MemoryBus()
    bucket = MemoryBucket(bus, subjects.DEVICES_BUCKET)
    await bucket.append("gpu-1.nvidia", b"{")
    replica = Replica(bus)
    async with anyio.create_task_group() as group:
        await replica.start(group)
        replica.accept(report("a"))
        await until_stored_bytes(bucket)
        group.cancel_scope.cancel()
    name = "hami_registry_values_malformed_total"
    origin = {"origin": subjects.DEVICES_BUCKET}
    assert replica.metrics.registry.get_sample_value(name, origin) == 1


async def until_stored_bytes(bucket: MemoryBucket) -> NodeDevices:
    """As ``until_stored``, over a value that does not decode at first."""
    with anyio.fail_after(3):
        while True:
            entry = await bucket.get("gpu-1.nvidia")
            if entry is not None and entry.value != b"{":
                return codec.decode(entry.value, NodeDevices, what=entry.key)
            await anyio.sleep(0.005)


async def test_cordon_survives_a_restart_until_the_nodes_are_seen() -> None:
    bus = MemoryBus()
    replica = Replica(bus)
    async with anyio.create_task_group() as group:
        await replica.start(group)
        replica.accept(report("a", "b"))
        replica.writer.cordon("gpu-1", frozenset({"b"}))
        await until_stored(replica.bucket, lambda found: found.devices[1].cordoned)
        group.cancel_scope.cancel()
    again = Replica(bus, keep_cordons=True)
    async with anyio.create_task_group() as group:
        await again.start(group)
        again.accept(report("a", "b", seq=2))
        found = await until_stored(again.bucket, lambda found: found.seq == 2)
        assert [device.cordoned for device in found.devices] == [False, True]
        again.writer.cordon("gpu-1", frozenset())
        await until_stored(again.bucket, lambda found: not found.devices[1].cordoned)
        group.cancel_scope.cancel()


async def test_cordon_by_configuration_is_not_mistaken_for_the_operators() -> None:
    bus = MemoryBus()
    config = DeviceConfig(rules=(Rule(uuids=("a",), cordoned=True),))
    for _ in range(2):
        replica = Replica(bus, config, keep_cordons=True)
        async with anyio.create_task_group() as group:
            await replica.start(group)
            replica.accept(report("a"))
            await until_stored(replica.bucket, lambda found: found.devices[0].cordoned)
            assert replica.writer.inventory.cordoned_nodes() == []
            group.cancel_scope.cancel()
