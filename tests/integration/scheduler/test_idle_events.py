# SPDX-License-Identifier: Apache-2.0
"""Idle periods, actions and peaks as the scheduler reads them from a real nats-server."""

from contextlib import aclosing
from typing import Any

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import Unavailable
from hami_common.events import codec
from hami_common.events.idle import IdleActionRecord, IdleRecord
from hami_common.events.usage import ShareUsage, UsageRecord
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import NatsPublisher, connect, ensure_bus
from hami_common.runtime.natsio.history import Bounds
from hami_scheduler.shell import idleevents
from hami_scheduler.shell.idleevents import StoredIdleEvents
from hami_sim.natsd import NatsServer

pytestmark = pytest.mark.anyio


def period(pod: str, change: Any = "idle", since_s: float = 100.0) -> IdleRecord:
    return IdleRecord(
        change=change,
        node="n1",
        pod_uid=f"uid-{pod}",
        allocation_id=f"id-{pod}",
        namespace="team-a",
        pod=pod,
        since_s=since_s,
        time_s=since_s + 1800,
        lost_s=900.0,
    )


def action(pod: str, outcome: Any = "done") -> IdleActionRecord:
    return IdleActionRecord(
        policy="evict",
        outcome=outcome,
        node="n1",
        pod_uid=f"uid-{pod}",
        allocation_id=f"id-{pod}",
        namespace="team-a",
        pod=pod,
        since_s=100.0,
        time_s=2000.0,
    )


async def test_the_newest_messages_come_first_then_new_ones(nats_server: NatsServer) -> None:
    async with connect([nats_server.url], name="test") as bus:
        await ensure_bus(bus)
        publisher = NatsPublisher(bus)

        async def send(message: IdleRecord | IdleActionRecord) -> None:
            make = (
                subjects.idle_event
                if isinstance(message, IdleRecord)
                else subjects.idle_action_event
            )
            subject = make(message.node, message.pod_uid)
            await publisher.publish_stored(subject, codec.encode(message))

        await send(period("p"))
        await send(action("p", "waiting"))
        await send(action("p"))
        await send(period("q"))
        await send(period("q", "active"))
        events = StoredIdleEvents(bus, clock=SystemClock())
        with anyio.fail_after(20):
            async with aclosing(events.messages()) as messages:
                stored = [await anext(messages) for _ in range(4)]
                assert stored == [period("p"), action("p"), period("q", "active"), None]
                await send(period("r"))
                while (found := await anext(messages)) is None:
                    pass
                assert found == period("r")
                # The tick of the policies: nothing came for a second.
                assert await anext(messages) is None


async def test_peaks_are_those_of_one_pod_over_all_its_samples(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect([nats_server.url], name="test") as bus:
        await ensure_bus(bus)
        publisher, clock = NatsPublisher(bus), SystemClock()
        for number, (used_mib, other_mib) in enumerate(((500, 10), (2100, 20), (700, 9000))):
            shares = tuple(
                ShareUsage(
                    namespace="team-a",
                    pod=pod,
                    pod_uid=f"uid-{pod}",
                    container="main",
                    vendor="nvidia",
                    uuid=uuid,
                    used_mib=mib,
                )
                for pod, uuid, mib in (("p", "a", used_mib), ("p", "b", 5), ("q", "a", other_mib))
            )
            usage = UsageRecord(
                node="n1", boot_id="b", seq=number + 1, time_s=clock.now_s(), shares=shares
            )
            await publisher.publish_stored(subjects.usage_event("n1"), codec.encode(usage))
        events = StoredIdleEvents(bus, clock=clock)
        assert await events.peaks("n1", "uid-p", 0.0) == {("main", "a"): 2100, ("main", "b"): 5}
        assert await events.peaks("n1", "uid-p", clock.now_s() + 60) == {}
        monkeypatch.setattr(idleevents, "BOUNDS", Bounds(messages=2, mib=1, time_s=5.0))
        with pytest.raises(Unavailable, match="reading stopped after 2 events"):
            await StoredIdleEvents(bus, clock=clock).peaks("n1", "uid-p", 0.0)
