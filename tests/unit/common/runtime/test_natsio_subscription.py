# SPDX-License-Identifier: Apache-2.0
"""Messages that wait for a reader are bounded, in total and per subject."""

from typing import Any, cast

import pytest

from hami_common.runtime.natsio.client import DirectClient, Message, Sink
from hami_common.runtime.natsio.connection import Subscription

pytestmark = pytest.mark.anyio


class _Client:
    """Delivers messages to the subscriber."""

    sink: Sink

    async def attach(self, subject: str, sink: Sink, *, queue: str = "") -> None:
        del subject, queue
        self.sink = sink


async def subscribed(**limits: Any) -> tuple[Subscription, Sink]:
    client = _Client()
    subscription = Subscription(subject="heartbeat.*", **limits)
    await subscription.attach(cast("DirectClient", client))
    return subscription, client.sink


def beat(node: str) -> Message:
    return Message(subject=f"heartbeat.{node}", data=b"")


async def test_flood_of_one_subject_displaces_no_other() -> None:
    subscription, sink = await subscribed(capacity=100, per_subject=8)
    for _ in range(1000):
        sink(beat("loud"))
    for number in range(92):
        sink(beat(f"n{number}"))
    received = await subscription.receive()
    assert len([message for message in received if message.subject.endswith("loud")]) == 8
    assert len(received) == 100
    assert subscription.lost_count == 992
    sink(beat("loud"))
    assert len(await subscription.receive()) == 1


async def test_total_of_waiting_messages_is_bounded() -> None:
    subscription, sink = await subscribed(capacity=3)
    for number in range(5):
        sink(beat(f"n{number}"))
    assert len(await subscription.receive()) == 3
    assert subscription.lost_count == 2
