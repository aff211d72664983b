# SPDX-License-Identifier: Apache-2.0
"""Ledger records are read and states written, in every state of the bus."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.events.allocation import StateRecord
from hami_common.events.codec import decode, encode
from hami_common.runtime.tasks import background
from hami_nodeagent.core.reporting import Failure
from hami_nodeagent.shell.feed import LedgerFeed
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.states import States
from tests.support.memorybus import MemoryBucket, MemoryBus, MemoryFeed, MemoryPublisher
from tests.unit.nodeagent.core.builders import NODE, Given
from tests.unit.nodeagent.shell.support import make_site, soon, until

pytestmark = pytest.mark.anyio


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    async def record(self, regarding: Any, *, reason: str, message: str, kind: str) -> None:
        self.events.append((f"{regarding.namespace}/{regarding.name} {reason}", message))


class Bench:
    """Feed and states of one agent over a memory bus."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.bus = MemoryBus()
        self.generation = 1
        self.recorder = Recorder()
        self.states = MemoryBucket(self.bus, subjects.STATE_BUCKET)
        self.ledger = MemoryBucket(self.bus, subjects.ALLOC_BUCKET)
        self.keeper = States(
            site=site,
            bucket=self.states,
            generation=lambda: self.generation,
            events=lambda: self.recorder,  # type: ignore[arg-type, return-value]  # a stand-in
        )
        publisher = MemoryPublisher(self.bus)
        self.feed = LedgerFeed(
            site=site, feed=MemoryFeed(self.bus, NODE), bucket=self.ledger, publisher=publisher
        )

    async def write(self, pod: Given, **change: Any) -> None:
        record = replace(pod.record, **change)
        await self.ledger.append(subjects.allocation_key(NODE, pod.uid), encode(record))

    def bind(self, pod: Given, **facts: Any) -> None:
        self.site.picture.pods.put(replace(pod.facts, **facts), revision=0, now_s=0)
        self.site.picture.note_change()

    async def state(self, pod: Given) -> StateRecord | None:
        entry = await self.states.get(subjects.allocation_key(NODE, pod.uid))
        return None if entry is None else decode(entry.value, StateRecord, what="state")

    async def reaches(self, pod: Given, state: str) -> StateRecord:
        found: list[StateRecord | None] = []

        async def is_there() -> bool:
            found[:] = [await self.state(pod)]
            return found[0] is not None and found[0].state == state

        await soon(is_there)
        assert found[0] is not None
        return found[0]


@asynccontextmanager
async def running(tmp_path: Path, **settings: Any) -> AsyncIterator[Bench]:
    bench = Bench(make_site(tmp_path, **settings))
    async with background() as group:
        await group.start(bench.feed.follow)
        await group.start(bench.keeper.keep)
        yield bench


async def test_states_follow_the_facts_in_order(tmp_path: Path) -> None:
    pod = Given("pod")
    async with running(tmp_path) as bench:
        await bench.write(pod)
        bench.bind(pod)
        bound = await bench.reaches(pod, "bound")
        assert bound.ledger_seq == 1
        bench.site.picture.grants.add(pod.grant("main", "a"))
        bench.site.picture.note_change()
        await bench.reaches(pod, "prepared")
        bench.bind(pod, started=frozenset({"main"}))
        running_state = await bench.reaches(pod, "running")
        assert running_state.containers == ("main",)
        assert running_state.boot_id == bench.site.sequence.boot_id
        headers = (await bench.states.latest())[0].headers
        assert headers["ce-type"] == "io.hami.state.running.v1"


@pytest.mark.parametrize(
    ("enforcement", "library", "is_told", "counted"),
    [
        ("libvgpu", "libvgpu-1.so", False, 0),
        ("libvgpu", "", True, 1),
        ("none", "", False, 1),
    ],
)
async def test_share_that_is_not_enforced_is_reported_to_the_pods_owner(
    tmp_path: Path, enforcement: str, library: str, *, is_told: bool, counted: int
) -> None:
    pod = Given("pod")
    async with running(tmp_path, enforcement=enforcement) as bench:
        await bench.write(pod)
        bench.bind(pod)
        bench.site.picture.grants.add(replace(pod.grant("main", "a"), library=library))
        bench.site.picture.note_change()
        await bench.reaches(pod, "prepared")
        bench.bind(pod, started=frozenset({"main"}))
        await bench.reaches(pod, "running")
        told = [what for what, _ in bench.recorder.events]
        assert told == (["default/pod ShareNotHeld"] if is_told else [])
        metric = bench.site.metrics.unheld.labels(vendor="nvidia")
        assert metric._value.get() == counted  # noqa: SLF001


async def test_share_whose_devices_a_config_map_may_override_is_reported_as_not_enforced(
    tmp_path: Path,
) -> None:
    pod = Given("pod", unseen_env={"main": frozenset({"NVIDIA_VISIBLE_DEVICES"})})
    async with running(tmp_path, enforcement="libvgpu") as bench:
        await bench.write(pod)
        bench.bind(pod)
        bench.site.picture.grants.add(replace(pod.grant("main", "a"), library="libvgpu-1.so"))
        bench.site.picture.note_change()
        assert (await bench.reaches(pod, "prepared")).enforcement == "none"
        ((what, text),) = bench.recorder.events
        assert what == "default/pod ShareNotHeld"
        assert text.startswith("container main: envFrom may name variables")


@pytest.mark.parametrize(("library", "said"), [("libvgpu-1.so", "libvgpu"), ("", "none")])
async def test_states_name_the_enforcement_of_shares(
    tmp_path: Path, library: str, said: str
) -> None:
    pod = Given("pod")
    async with running(tmp_path) as bench:
        await bench.write(pod)
        bench.bind(pod)
        assert (await bench.reaches(pod, "bound")).enforcement == ""
        bench.site.picture.grants.add(pod.grant("main", "a", library=library))
        bench.site.picture.note_change()
        assert (await bench.reaches(pod, "prepared")).enforcement == said
        bench.bind(pod, started=frozenset({"main"}))
        assert (await bench.reaches(pod, "running")).enforcement == said


async def test_lost_race_is_read_again_and_judged_again(tmp_path: Path) -> None:
    pod = Given("pod")
    async with running(tmp_path) as bench:
        key = subjects.allocation_key(NODE, pod.uid)
        await bench.states.append(key, encode(pod.state("bound", writer="scheduler-0")))
        await bench.write(pod)
        bench.site.picture.grants.add(pod.grant("main", "a"))
        bench.bind(pod)
        await bench.reaches(pod, "prepared")
        assert bench.site.metrics.state_conflicts._value.get() == 1  # noqa: SLF001


async def test_unavailable_bus_loses_no_state(tmp_path: Path) -> None:
    pod = Given("pod")
    async with running(tmp_path) as bench:
        await bench.write(pod)
        await until(lambda: pod.uid in bench.site.picture.entries_by_uid)
        bench.bus.set_available(available=False)
        bench.bind(pod)
        bench.site.picture.grants.add(pod.grant("main", "a"))
        bench.site.picture.note_change()
        await anyio.wait_all_tasks_blocked()
        assert pod.uid not in bench.site.picture.states_by_uid
        bench.bus.set_available(available=True)
        await bench.reaches(pod, "prepared")


async def test_replaced_bus_gets_all_states_again(tmp_path: Path) -> None:
    pod = Given("pod")
    async with running(tmp_path) as bench:
        await bench.write(pod)
        bench.site.picture.grants.add(pod.grant("main", "a"))
        bench.bind(pod)
        await bench.reaches(pod, "prepared")
        bench.bus.wipe()
        bench.generation += 1
        await until(lambda: not bench.site.picture.entries_by_uid)
        assert await bench.state(pod) is None
        await bench.write(pod)
        await bench.reaches(pod, "prepared")
        assert bench.site.metrics.feed_resets._value.get() == 1  # noqa: SLF001


async def test_failure_is_written_once_and_reported_to_the_user(tmp_path: Path) -> None:
    pod = Given("pod")
    async with running(tmp_path) as bench:
        await bench.write(pod)
        bench.bind(pod)
        await bench.reaches(pod, "bound")
        failure = Failure(code="device-mismatch", reason="swapped")
        bench.site.picture.failures_by_uid[pod.uid] = failure
        bench.site.picture.note_change()
        failed = await bench.reaches(pod, "failed")
        assert (failed.code, failed.reason) == ("device-mismatch", "swapped")
        await until(lambda: bool(bench.recorder.events))
        bench.bind(pod, started=frozenset({"main"}))
    assert bench.recorder.events == [("default/pod AllocationFailed", "device-mismatch: swapped")]


async def test_undecodable_records_are_kept_for_inspection(tmp_path: Path) -> None:
    pod, other = Given("pod"), Given("other")
    async with running(tmp_path) as bench:
        key = subjects.allocation_key(NODE, pod.uid)
        await bench.ledger.append(key, b"{")
        await bench.ledger.append(key, encode(other.record))
        await bench.write(other)
        await until(lambda: other.uid in bench.site.picture.entries_by_uid)
        assert pod.uid not in bench.site.picture.entries_by_uid
    letters = [one for one in bench.bus.published if one.subject.startswith("hami.v1.deadletter")]
    assert [one.data for one in letters] == [b"{", encode(other.record)]


async def test_undecodable_state_does_not_stop_the_others(tmp_path: Path) -> None:
    pod, other = Given("pod"), Given("other")
    bench = Bench(make_site(tmp_path))
    await bench.states.append(subjects.allocation_key(NODE, pod.uid), b"{")
    async with background() as group:
        await group.start(bench.feed.follow)
        await group.start(bench.keeper.keep)
        await bench.write(other)
        bench.bind(other)
        await bench.reaches(other, "bound")


async def test_single_state_is_read_on_request(tmp_path: Path) -> None:
    pod = Given("pod")
    bench = Bench(make_site(tmp_path))
    await bench.keeper.read_one(pod.uid, timeout_s=1)
    assert bench.site.picture.states_by_uid == {}
    await bench.states.append(subjects.allocation_key(NODE, pod.uid), encode(pod.state("failed")))
    await bench.keeper.read_one(pod.uid, timeout_s=1)
    assert bench.site.picture.states_by_uid[pod.uid].state == "failed"
    bench.bus.set_available(available=False)
    await bench.keeper.read_one(pod.uid, timeout_s=1)
    assert bench.site.picture.states_by_uid[pod.uid].state == "failed"
