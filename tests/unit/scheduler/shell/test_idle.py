# SPDX-License-Identifier: Apache-2.0
"""Policies for idle allocations: each applied once, refusals explained, restarts harmless."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.errors import SettingsInvalid, Unavailable
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.asking import RecallAnswer, RecallQuestion, ShareNow, UsageAnswer
from hami_common.events.idle import IdleActionRecord, IdleRecord
from hami_core.planning.idlepolicy import IdleRule
from hami_scheduler.settings import IdleSettings
from hami_scheduler.shell.idleevents import IdleMessage, Peaks
from tests.support.manualclock import ManualClock
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.fakekube import Obj
from tests.unit.scheduler.shell.world import Running, World, quiet

pytestmark = pytest.mark.anyio

NODES = ("n1", "n2")
TICK_S = 1.0


class Stored:
    """The event stream: newest messages first, then nothing for a second at a time."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.sent: list[IdleMessage] = []
        self.peak_mib: Peaks | None = {}
        self.others: IdleRecord | None = None
        """Sent instead of silence, after the stored messages."""

    async def messages(self) -> AsyncGenerator[IdleMessage | None, None]:
        read = 0
        while True:
            for message in self.sent[read:]:
                yield message
            yield self.others if read and self.others is not None else None
            read = len(self.sent)
            await self.clock.sleep(TICK_S)

    async def peaks(self, node: str, pod_uid: str, since_s: float) -> Peaks:
        del pod_uid, since_s
        if self.peak_mib is None:
            raise Unavailable(peer="NATS", detail=f"usage of node {node}: cut")
        return self.peak_mib


class Agent:
    """Answers of the node's agent."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.core_pct = 0
        self.pods: tuple[str, ...] = ("p", "q")
        """Pods whose shares it lists."""
        self.used_mib = 900
        self.limit_mib: int | None = None
        self.recall = RecallAnswer(node="n1")
        self.recalled: list[str] = []

    async def ask(self, subject: str, data: bytes = b"") -> bytes:
        _, _, _, node, what = subject.split(".")
        if what == "recall":
            question = codec.decode(data, RecallQuestion, what="question")
            self.recalled.append(question.pod_uid)
            return codec.encode(self.recall)
        shares = tuple(
            ShareNow(
                namespace="default",
                pod=name,
                pod_uid=f"uid-{name}",
                container="main",
                vendor="nvidia",
                uuid=f"GPU-{node}-0",
                memory_mib=6000,
                core_pct=10,
                used_mib=self.used_mib,
                used_core_pct=self.core_pct,
                file_mib=self.limit_mib,
                file_core_pct=10,
            )
            for name in self.pods
        )
        usage = UsageAnswer(node=node, time_s=self.clock.now_s(), shares=shares)
        return codec.encode(usage)


class Site:
    """A cluster with the running pod ``p`` of 6000 MiB, its agent and the event stream."""

    def __init__(self) -> None:
        self.world = World()
        self.stored = Stored(self.world.clock)
        self.agent = Agent(self.world.clock)
        self.world.idle = self.stored
        self.world.ask = self.agent.ask

    async def place(self, running: Running, name: str = "p", **more: Any) -> AllocationRecord:
        node = more.pop("node", "n1")
        made = builders.pod(name, **{"mem_mib": 6000, **more})
        self.world.add_pod(made)
        await quiet()
        assert await running.bind(made, node) == ""
        path = f"/api/v1/namespaces/default/pods/{name}"
        start = {"phase": "Running", "startTime": "1970-01-01T00:00:10Z"}
        self.world.kube.change(path, status=start)
        (record,) = [one for one in self.world.live() if one.pod == name]
        (sequence, _) = self.world.records()[subjects.allocation_key(record.node, record.pod_uid)]
        await self.world.report_state(
            StateRecord(
                state="running",
                allocation_id=record.allocation_id,
                node=record.node,
                pod_uid=record.pod_uid,
                namespace="default",
                pod=name,
                ledger_seq=sequence,
                time_s=self.world.clock.now_s(),
            )
        )
        await quiet()
        return record

    def idle(self, record: AllocationRecord, change: Any = "idle", **more: Any) -> IdleRecord:
        """Publish a message of the registry about an allocation."""
        now_s = self.world.clock.now_s()
        message = IdleRecord(
            **{
                "change": change,
                "node": record.node,
                "pod_uid": record.pod_uid,
                "allocation_id": record.allocation_id,
                "namespace": record.namespace,
                "pod": record.pod,
                "since_s": now_s - 1800,
                "time_s": now_s,
                "lost_s": 1080.0,
                **more,
            }
        )
        self.stored.sent.append(message)
        return message

    async def pass_s(self, delay_s: float) -> None:
        for _ in range(round(delay_s / TICK_S)):
            await self.world.heartbeat(*NODES)
            await self.world.clock.advance(TICK_S)

    def actions(self) -> list[IdleActionRecord]:
        prefix = f"{subjects.EVENT_PREFIX}.idleaction."
        return [
            codec.decode(one.data, IdleActionRecord, what=one.subject)
            for one in self.world.bus.published
            if one.subject.startswith(prefix)
        ]

    def outcomes(self) -> list[tuple[str, str, str]]:
        return [(one.policy, one.outcome, one.code) for one in self.actions()]

    def event(self) -> Obj:
        """The newest Event about idle allocations."""
        return [e for e in self.world.kube.events if "Idle" in e["reason"]][-1]


@asynccontextmanager
async def site_with(*rules: IdleRule, **more: Any) -> AsyncIterator[tuple[Site, Running]]:
    site = Site()
    for node in NODES:
        await site.world.add_devices(builders.devices(node, memory_mib=10_000))
    settings = more.pop("settings", {})
    idle = IdleSettings(**{"enabled": True, "rules": rules, **more})
    async with site.world.scheduler(idle=idle, resize_confirm_s=5.0, **settings) as running:
        yield site, running


async def test_without_a_rule_the_pod_gets_an_event_once() -> None:
    async with site_with() as (site, running):
        record = await site.place(running)
        period = site.idle(record)
        await site.pass_s(30)
        assert site.outcomes() == [("report", "done", "")]
        (action,) = site.actions()
        assert (action.since_s, action.pod, action.node) == (period.since_s, "p", "n1")
        event = site.event()
        assert (event["reason"], event["involvedObject"]["uid"]) == ("AllocationIdle", "uid-p")
        assert "0.30 device hours lost" in event["message"]
        assert (
            running.value("hami_scheduler_idle_actions_total", policy="report", outcome="done") == 1
        )
        # Another period of the same allocation.
        site.idle(record, "active")
        site.idle(record, since_s=site.world.clock.now_s() - 1900)
        await site.pass_s(5)
        assert site.outcomes() == [("report", "done", "")] * 2


async def test_nothing_is_done_unless_enabled() -> None:
    async with site_with(IdleRule(policy="evict"), enabled=False) as (site, running):
        site.idle(await site.place(running))
        await site.pass_s(10)
        assert site.actions() == []
        assert site.world.kube.evictions == []


async def test_the_first_rule_that_selects_an_allocation_applies() -> None:
    rules = (
        IdleRule(policy="evict", namespaces=("other",)),
        IdleRule(policy="evict", queues=("gold",)),
        IdleRule(policy="evict", classes=("spot",)),
        IdleRule(policy="recall", namespaces=("default",)),
        IdleRule(policy="evict"),
    )
    async with site_with(*rules) as (site, running):
        record = await site.place(running)
        site.agent.recall = RecallAnswer(node="n1", containers=1)
        site.idle(record)
        await site.pass_s(5)
        assert site.outcomes() == [("recall", "done", "")]
        assert site.agent.recalled == ["uid-p"]
        assert site.event()["reason"] == "IdleShareRecalled"


async def test_messages_that_keep_coming_do_not_delay_actions() -> None:
    async with site_with(IdleRule(policy="evict")) as (site, running):
        record = await site.place(running)
        message = site.idle(record)
        await site.pass_s(2)
        site.stored.others = replace(message, pod_uid="uid-other", change="active")
        site.idle(await site.place(running, "q", node="n2"))
        await site.pass_s(20)
        assert site.world.kube.evictions == ["p", "q"]


async def test_recall_without_the_mechanism_is_reported_with_its_reason() -> None:
    async with site_with(IdleRule(policy="recall")) as (site, running):
        site.idle(await site.place(running))
        await site.pass_s(5)
        assert site.outcomes() == [("recall", "refused", "no-recall")]
        event = site.event()
        assert (event["reason"], event["type"]) == ("IdleActionRefused", "Warning")
        assert "overcommit = recall" in event["message"]


async def test_a_pod_is_evicted_once_and_not_before_its_time() -> None:
    async with site_with(IdleRule(policy="evict", after_s=1900.0)) as (site, running):
        period = site.idle(await site.place(running))
        await site.pass_s(90)
        assert site.outcomes() == [("evict", "waiting", "")]
        assert site.actions()[0].due_s == period.since_s + 1900
        assert site.world.kube.evictions == []
        await site.pass_s(20)
        assert site.world.kube.evictions == ["p"]
        assert site.outcomes() == [("evict", "waiting", ""), ("evict", "done", "")]
        await site.pass_s(60)
        assert site.world.kube.evictions == ["p"]
        assert len(site.actions()) == 2


async def test_work_before_the_time_prevents_the_eviction() -> None:
    async with site_with(IdleRule(policy="evict", after_s=1900.0)) as (site, running):
        record = await site.place(running)
        site.idle(record)
        await site.pass_s(90)
        site.idle(record, "active")
        await site.pass_s(60)
        assert site.world.kube.evictions == []


async def test_a_restart_and_another_replica_repeat_nothing() -> None:
    site = Site()
    for node in NODES:
        await site.world.add_devices(builders.devices(node, memory_mib=10_000))
    idle = IdleSettings(enabled=True, rules=(IdleRule(policy="report"),))
    async with site.world.scheduler("s1", idle=idle) as running:
        site.idle(await site.place(running))
        await site.pass_s(5)
        assert len(site.actions()) == 1
        site.stored.sent += site.actions()  # as the stream delivers them
        async with site.world.scheduler("s2", idle=idle):
            await site.pass_s(10)
    async with site.world.scheduler("s1", idle=idle):
        await site.pass_s(60)
    async with site.world.scheduler("s3", idle=idle):
        await site.pass_s(60)
    assert len(site.actions()) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("budget", "eviction-refused"),
        ("min-runtime", "min-runtime"),
        ("works", "active"),
        ("unlisted", "unmeasured"),
        ("gang", "gang-active"),
    ],
)
async def test_refused_evictions_have_a_reason_and_are_tried_again(change: str, code: str) -> None:
    settings = {"min_runtime_s": 1e10} if change == "min-runtime" else {}
    async with site_with(IdleRule(policy="evict"), retry_s=60.0, settings=settings) as (
        site,
        running,
    ):
        gang = {"scheduling.k8s.io/group-name": "g"} if change == "gang" else None
        record = await site.place(running, annotated=gang)
        if change == "gang":
            await site.place(running, "q", annotated=gang, node="n2")
        if change == "budget":
            site.world.kube.kept = {"p"}
        if change == "works":
            site.agent.core_pct = 40
        if change == "unlisted":
            site.agent.pods = ()
        site.idle(record)
        await site.pass_s(30)
        assert site.outcomes() == [("evict", "refused", code)]
        assert site.world.kube.evictions == []
        assert f"({code})" in site.event()["message"]
        await site.pass_s(45)
        assert site.outcomes() == [("evict", "refused", code)] * 2
        if change != "budget":
            return
        site.world.kube.kept = set()
        await site.pass_s(60)
        assert site.world.kube.evictions == ["p"]


async def test_a_gang_is_evicted_while_all_its_members_are_idle_at_a_bounded_rate() -> None:
    gang = {"scheduling.k8s.io/group-name": "g"}
    async with site_with(IdleRule(policy="evict"), actions_per_minute=2.0) as (site, running):
        for name, node in (("p", "n1"), ("q", "n2")):
            site.idle(await site.place(running, name, annotated=gang, node=node))
        await site.pass_s(20)
        assert site.world.kube.evictions == ["p"]
        await site.pass_s(15)
        assert site.world.kube.evictions == ["p", "q"]


async def test_refusals_do_not_keep_others_from_their_turn() -> None:
    """The budget of ``p`` refuses each time; it is tried again more often than the rate allows."""
    rule = IdleRule(policy="evict")
    async with site_with(rule, actions_per_minute=20.0, retry_s=2.0) as (site, running):
        site.world.kube.kept = {"p"}
        longest = await site.place(running)
        site.idle(longest, since_s=site.world.clock.now_s() - 9000)
        site.idle(await site.place(running, "q", node="n2"))
        await site.pass_s(10)
        assert site.world.kube.evictions == ["q"]


async def test_a_share_shrinks_to_its_peak_and_the_rest_is_free() -> None:
    async with site_with(IdleRule(policy="shrink", factor=1.5)) as (site, running):
        record = await site.place(running)
        site.stored.peak_mib = {("main", record.containers[0].shares[0].uuid): 2000}
        site.agent.limit_mib = 3000  # the agent writes the limit at once
        site.idle(record)
        await site.pass_s(10)
        assert site.outcomes() == [("shrink", "done", "")]
        (now,) = site.world.live()
        assert now.op == "resize"
        assert now.containers[0].shares[0].memory_mib == 3000
        assert "from 6000 to 3000 MiB" in site.event()["message"]
        site.idle(now, "active")
        site.idle(now, since_s=site.world.clock.now_s() - 1900)
        await site.pass_s(30)
        assert site.actions()[-1].outcome == "done"
        assert "fit its peak use already" in site.actions()[-1].reason


@pytest.mark.parametrize(
    ("peak_mib", "used_mib", "code"),
    [(None, 0, "unavailable"), (0, 0, "unmeasured"), (1000, 5000, "in-use")],
)
async def test_a_share_does_not_shrink_below_its_use_or_without_all_samples(
    peak_mib: int | None, used_mib: int, code: str
) -> None:
    async with site_with(IdleRule(policy="shrink")) as (site, running):
        record = await site.place(running)
        uuid = record.containers[0].shares[0].uuid
        peaks = {("main", uuid): peak_mib} if peak_mib else {}
        site.stored.peak_mib = None if peak_mib is None else peaks
        site.agent.used_mib = used_mib
        site.idle(record)
        await site.pass_s(10)
        assert site.outcomes() == [("shrink", "refused", code)]
        assert site.world.live()[0].containers[0].shares[0].memory_mib == 6000


async def test_a_whole_device_is_not_shrunk() -> None:
    async with site_with(IdleRule(policy="shrink")) as (site, running):
        record = await site.place(running, mem_mib=10_000, cores=100)
        site.stored.peak_mib = {("main", record.containers[0].shares[0].uuid): 10}
        site.idle(record)
        await site.pass_s(10)
        assert site.outcomes() == [("shrink", "refused", "not-resizable")]


async def test_another_allocation_and_one_that_is_released_are_left_alone() -> None:
    async with site_with(IdleRule(policy="evict")) as (site, running):
        record = await site.place(running)
        site.idle(replace(record, allocation_id="other"))
        await site.pass_s(10)
        assert site.actions() == []
        assert site.world.kube.evictions == []


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"actions_per_minute": 0.0}, "idle.actions_per_minute"),
        ({"rules": (IdleRule(factor=0.5),)}, r"idle\.rules\[0\]\.factor"),
        ({"rules": (IdleRule(), IdleRule(after_s=-1.0))}, r"idle\.rules\[1\]\.after_s"),
    ],
)
async def test_rules_that_cannot_be_used_name_the_field(more: Any, field: str) -> None:
    with pytest.raises(SettingsInvalid, match=field):
        async with World().scheduler(idle=IdleSettings(**more), wait=False):
            await anyio.lowlevel.checkpoint()
