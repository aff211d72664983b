# SPDX-License-Identifier: Apache-2.0
import logging
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest
from prometheus_client import CollectorRegistry

from hami_common.errors import Unavailable
from hami_common.runtime.quarantine import Quarantine, Quarantined
from tests.support.manualclock import ManualClock

pytestmark = pytest.mark.anyio


class World:
    def __init__(self, *, capacity: int = 100) -> None:
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        self.quarantine = Quarantine(
            kinds=("pod",), clock=self.clock, registry=self.registry, capacity=capacity, most_s=8.0
        )
        self.entered: list[Quarantined] = []
        self.released: list[Quarantined] = []
        self.quarantine.entered = self.entered.append
        self.quarantine.released = self.released.append
        self.broken = {"bad"}
        self.handled: list[str] = []

    def handle(self, item: str) -> None:
        if item in self.broken:
            raise ValueError(item)
        self.handled.append(item)

    async def pass_through(self, *items: str) -> None:
        await self.quarantine.each(listed(*items), kind="pod", key=str, handle=self.handle)

    def sample(self, name: str) -> float | None:
        return self.registry.get_sample_value(name, {"kind": "pod"})


async def listed(*items: str) -> AsyncIterator[str]:
    for item in items:
        yield item


async def test_an_object_that_fails_does_not_stop_the_others() -> None:
    world = World()
    await world.pass_through("a", "bad", "b")
    assert world.handled == ["a", "b"]
    assert [entry.problem for entry in world.quarantine.entries()] == ["ValueError: bad"]
    assert world.sample("hami_quarantined_objects") == 1
    assert world.sample("hami_quarantine_failures_total") == 1


async def test_a_failed_object_is_retried_with_growing_delays_until_it_succeeds() -> None:
    world = World()
    await world.pass_through("bad")
    delays = []
    for _ in range(5):
        entry = world.quarantine.entries()[0]
        delays.append(entry.retry_s - entry.last_s)
        await world.clock.advance(delays[-1] - 0.1)
        await world.quarantine.retry_due()
        assert world.quarantine.entries()[0].failures == entry.failures, "retried too early"
        await world.clock.advance(0.1)
        await world.quarantine.retry_due()
    assert delays == [1.0, 2.0, 4.0, 8.0, 8.0]
    world.broken.clear()
    await world.clock.advance(8.0)
    await world.quarantine.retry_due()
    assert world.handled == ["bad"]
    assert world.quarantine.entries() == []
    assert [entry.failures for entry in world.released] == [6]
    assert world.sample("hami_quarantined_objects") == 0


async def test_the_retry_task_runs_attempts_when_they_are_due() -> None:
    world = World()
    async with anyio.create_task_group() as group:
        group.start_soon(world.quarantine.retry)
        await world.pass_through("bad")
        world.broken.clear()
        while not world.handled:
            await anyio.lowlevel.checkpoint()
            if world.clock.sleeper_count:
                await world.clock.advance(1.0)
        group.cancel_scope.cancel()
    assert world.handled == ["bad"]


async def test_a_newer_version_that_succeeds_releases_the_object() -> None:
    world = World()
    quarantine = world.quarantine
    assert not await quarantine.run("pod", "p", lambda: world.handle("bad"))
    assert await quarantine.run("pod", "p", lambda: world.handle("good"))
    assert quarantine.entries() == []
    world.broken.clear()
    await world.clock.advance(100)
    await quarantine.retry_due()
    assert world.handled == ["good"], "the older version was handled after the newer one"


async def test_a_newer_version_waits_for_a_retry_of_the_older_one() -> None:
    world = World()
    gate = anyio.Event()
    attempts = 0

    async def slow() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ValueError
        await gate.wait()
        world.handled.append("older")

    await world.quarantine.run("pod", "p", slow)
    await world.clock.advance(1.0)
    async with anyio.create_task_group() as group:
        group.start_soon(world.quarantine.retry_due)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(world.quarantine.run, "pod", "p", lambda: world.handle("newer"))
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert world.handled == ["older", "newer"]


async def test_a_deleted_object_is_dropped() -> None:
    world = World()
    await world.pass_through("bad")
    world.quarantine.forget("pod", "bad")
    assert world.quarantine.entries() == []
    assert len(world.released) == 1


async def test_errors_of_a_peer_are_raised_to_the_loop() -> None:
    world = World()

    def handle(item: str) -> None:
        raise Unavailable(peer="NATS", detail=item)

    with pytest.raises(Unavailable):
        await world.quarantine.each(
            listed("a"), kind="pod", key=str, handle=handle, passes=(Unavailable,)
        )
    assert world.quarantine.entries() == []


async def test_cancellation_is_no_failure_of_an_object() -> None:
    world = World()
    with anyio.move_on_after(0.01):
        await world.quarantine.run("pod", "p", anyio.sleep_forever)
    assert world.quarantine.entries() == []
    assert await world.quarantine.run("pod", "p", lambda: None), "the key stayed locked"


async def test_a_full_quarantine_keeps_its_entries_and_counts_the_rest() -> None:
    world = World(capacity=1)
    world.broken |= {"worse"}
    await world.pass_through("bad", "worse", "a")
    assert [entry.key for entry in world.quarantine.entries()] == ["bad"]
    assert world.sample("hami_quarantine_failures_total") == 2
    assert world.handled == ["a"]


async def test_objects_without_a_readable_key_and_errors_without_a_text_are_kept() -> None:
    world = World()

    def key(item: str) -> str:
        raise KeyError(item)

    def handle(item: str) -> None:
        raise ValueError(10**5000)

    await world.quarantine.each(listed("a"), kind="pod", key=key, handle=handle)
    (entry,) = world.quarantine.entries()
    assert (entry.key, entry.problem) == ("unreadable", "ValueError")


async def test_only_the_first_of_equal_failures_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    with caplog.at_level(logging.ERROR):
        await world.pass_through("bad", "bad", "bad")
    assert [record.message for record in caplog.records] == ["object quarantined"]
    assert [entry.failures for entry in world.entered] == [1, 2, 3]


async def test_full_kind_leaves_capacity_for_others() -> None:
    world = World(capacity=1)
    world.broken |= {"worse"}
    await world.pass_through("bad", "worse")
    assert not await world.quarantine.run("record", "r", lambda: world.handle("bad"))
    assert [entry.kind for entry in world.quarantine.entries()] == ["pod", "record"]


async def test_objects_too_large_to_keep_are_handled_again_when_they_change() -> None:
    world = World()
    quarantine = Quarantine(
        kinds=("pod",), clock=world.clock, registry=CollectorRegistry(), kept_bytes=100
    )
    for uid in ("a", "b"):
        assert not await quarantine.run("pod", uid, lambda: world.handle("bad"), size_bytes=60)
    world.broken.clear()
    await world.clock.advance(10_000)
    await quarantine.retry_due()
    assert [entry.key for entry in quarantine.entries()] == ["b"]
    assert await quarantine.run("pod", "b", lambda: world.handle("good"), size_bytes=60)
    assert quarantine.entries() == []


async def test_object_that_its_caller_retries_is_not_retried_here() -> None:
    world = World()
    quarantine = world.quarantine
    assert quarantine.is_due("pod", "g")
    assert not await quarantine.run("pod", "g", lambda: world.handle("bad"), is_retried=False)
    assert not quarantine.is_due("pod", "g")
    await world.clock.advance(1.0)
    assert quarantine.is_due("pod", "g")
    await quarantine.retry_due()
    assert [entry.failures for entry in quarantine.entries()] == [1]
    await world.clock.advance(16.0)
    await quarantine.retry_due()
    assert quarantine.entries() == []


async def test_a_call_that_fails_is_kept_with_the_name_of_its_object() -> None:
    world = World()
    assert not world.quarantine.call("pod", "u", lambda: world.handle("bad"), name=("ns", "p"))
    (entry,) = world.quarantine.entries()
    assert (entry.namespace, entry.name) == ("ns", "p")
    assert world.quarantine.call("pod", "u", lambda: world.handle("good"))
    assert world.quarantine.entries() == []


async def test_problems_that_change_all_the_time_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    with caplog.at_level(logging.ERROR):
        for number in range(50):
            world.broken.add(text := f"bad{number}")
            await world.quarantine.run("pod", "u", lambda text=text: world.handle(text))  # type: ignore[misc]  # a default of a lambda has no type
    assert len(caplog.records) == 1
