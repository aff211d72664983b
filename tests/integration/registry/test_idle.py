# SPDX-License-Identifier: Apache-2.0
"""Idle periods as events on a real nats-server: once each, with two replicas and a restart."""

from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.idle import IdleRecord
from hami_common.events.usage import ContainerUsage, ShareUsage, UsageRecord
from hami_common.model.placement import ContainerShares, Share
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import NatsBucket, NatsPublisher, connect, ensure_bus
from hami_common.runtime.natsio.history import Bounds, History
from hami_sim.natsd import NatsServer
from tests.support.registry import RunningRegistry, report, run_registry, send, until_stored

pytestmark = pytest.mark.anyio

AFTER_S = 3.0
EVERY_S = 0.2


class Site:
    """A bus with a node whose device ``a`` two pods share; ``pods`` have counted device time."""

    def __init__(self, bus: Any) -> None:
        self.bus = bus
        self.publisher = NatsPublisher(bus)
        self.clock = SystemClock()
        self.device_s = {"worker": 0.0, "sleeper": 0.0}
        self.seq = 0

    async def prepare(self) -> None:
        await send(self.publisher, report("a"))
        await until_stored(NatsBucket(self.bus, subjects.DEVICES_BUCKET), lambda _: True)
        ledger = NatsBucket(self.bus, subjects.ALLOC_BUCKET)
        for pod in self.device_s:
            share = Share(vendor="nvidia", uuid="a", memory_mib=500)
            record = AllocationRecord(
                op="reserve",
                allocation_id=f"id-{pod}",
                node="gpu-1",
                pod_uid=f"uid-{pod}",
                namespace="team-a",
                pod=pod,
                time_s=self.clock.now_s() - 60,
                containers=(ContainerShares(name="main", kind="app", shares=(share,)),),
            )
            await ledger.append(
                subjects.allocation_key("gpu-1", record.pod_uid), codec.encode(record)
            )

    async def report_use(self) -> None:
        """Report as the agent does; ``worker`` works in each interval."""
        while True:
            self.device_s["worker"] += 0.1
            self.seq += 1
            names: list[dict[str, Any]] = [
                {"namespace": "team-a", "pod": pod, "pod_uid": f"uid-{pod}", "container": "main"}
                for pod in self.device_s
            ]
            usage = UsageRecord(
                node="gpu-1",
                boot_id="1",
                seq=self.seq,
                time_s=self.clock.now_s(),
                every_s=EVERY_S,
                shares=tuple(
                    ShareUsage(vendor="nvidia", uuid="a", allocation_id=f"id-{who['pod']}", **who)
                    for who in names
                ),
                containers=tuple(
                    ContainerUsage(launches=1, device_time_s=self.device_s[who["pod"]], **who)
                    for who in names
                ),
            )
            data = codec.encode(usage)
            for _ in range(2):  # delivered twice
                await self.publisher.publish_stored(subjects.usage_event("gpu-1"), data)
            await anyio.sleep(EVERY_S)

    async def published(self) -> list[tuple[dict[str, str], IdleRecord]]:
        history = History(self.bus, bounds=Bounds(messages=1000, mib=1, time_s=5), clock=self.clock)
        async with history.read([f"{subjects.EVENT_PREFIX}.idle.*.*"]) as reading:
            return [
                (dict(event.headers), record)
                async for event in reading
                if (record := event.record(IdleRecord)) is not None
            ]

    async def until(self, count: int) -> list[tuple[dict[str, str], IdleRecord]]:
        with anyio.fail_after(20):
            while len(found := await self.published()) < count:
                await anyio.sleep(0.05)
        return found


def _shows_idle(replica: RunningRegistry) -> bool:
    names = ("hami_registry_idle_allocations", "hami_registry_idle_devices")
    return [replica.sample(name) for name in names] == [1, 0.5]


async def test_each_idle_period_is_published_once_by_replicas_that_restart(
    nats_server: NatsServer,
) -> None:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect([nats_server.url], name="test"))
        await ensure_bus(bus)
        site = Site(bus)
        replicas = [
            await stack.enter_async_context(
                run_registry(nats_server.url, idle_after_s=AFTER_S, replica=f"registry-{n}")
            )
            for n in range(2)
        ]
        await site.prepare()
        group = await stack.enter_async_context(anyio.create_task_group())
        group.start_soon(site.report_use)

        ((headers, idle),) = await site.until(1)
        assert (idle.change, idle.pod, idle.pod_uid) == ("idle", "sleeper", "uid-sleeper")
        assert headers["ce-type"] == "io.hami.allocation.idle.v1"
        assert headers["ce-source"] == f"/registry/{idle.writer}"
        assert idle.time_s - idle.since_s >= AFTER_S
        assert idle.lost_s == pytest.approx(0.5 * (idle.time_s - idle.since_s), abs=0.01)

        # A third replica reads the samples of before; nothing is published again.
        third = run_registry(nats_server.url, idle_after_s=AFTER_S, replica="registry-2")
        replicas.append(await stack.enter_async_context(third))
        await anyio.sleep(1.5 * AFTER_S)
        assert len(await site.published()) == 1
        with anyio.fail_after(20):
            while not all(_shows_idle(replica) for replica in replicas):
                await anyio.sleep(0.05)
        assert len(await site.published()) == 1

        site.device_s["sleeper"] += 5.0
        _, (_, active) = await site.until(2)
        assert (active.change, active.since_s) == ("active", idle.since_s)
        assert active.lost_s == pytest.approx(0.5 * (active.time_s - active.since_s), abs=0.01)
        _, _, (_, again) = await site.until(3)
        assert (again.change, again.is_since_known) == ("idle", True)
        assert active.time_s < again.since_s
        ids = {headers["ce-id"] for headers, _ in await site.published()}
        assert len(ids) == 3
        counter = "hami_registry_idle_events_total"
        with anyio.fail_after(10):  # a replica counts what the stream has acknowledged
            while sum(one.sample(counter, change="idle") for one in replicas) < 2:
                await anyio.sleep(0.05)
        assert sum(one.sample(counter, change="idle") for one in replicas) == 2
        group.cancel_scope.cancel()
