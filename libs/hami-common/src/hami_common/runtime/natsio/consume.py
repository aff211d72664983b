# SPDX-License-Identifier: Apache-2.0
"""Pull loops over JetStream consumers that we own: ordered reading, and work with acknowledgement.

A pull asks for a batch and names a heartbeat; one pull is open at a time, so the server never sends
more than one batch ahead of the reader. When neither a message nor a heartbeat comes, or the
connection changes, the session ends with ``Unavailable`` and its owner begins a new one. Times in
seconds here, in nanoseconds on the wire.
"""

import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from hami_common.errors import NotFound, Unavailable
from hami_common.runtime.natsio.client import Message
from hami_common.runtime.natsio.connection import CLOSE_S, PEER, Bus, Subscription
from hami_common.runtime.natsio.jetstream import API, api, user_headers
from hami_common.runtime.tasks import Backoff, finish_within

NS = 1_000_000_000
HEARTBEAT_S = 1.0
EXPIRES_S = 30.0
MISSED = 2.5
"""Number of missed heartbeats after which the consumer counts as gone."""
INACTIVE_S = 30.0
"""Time for which the server keeps an ephemeral consumer without a reader."""
BATCH = 500

_ACK_V1_TOKENS = 9


class Sequences(Struct, frozen=True):
    """Content of the acknowledgement subject of a delivered message."""

    stream: int
    consumer: int
    delivered_count: int
    time_ns: int
    pending: int


def parse_ack(reply: str) -> Sequences | None:
    """Sequences from ``$JS.ACK.…`` (both formats of the server), ``None`` when it is not one."""
    tokens = reply.split(".")
    if len(tokens) < _ACK_V1_TOKENS or tokens[0] != "$JS" or tokens[1] != "ACK":
        return None
    # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>, or with
    # <domain>.<account> before the stream and possibly a random token at the end.
    at = 4 if len(tokens) == _ACK_V1_TOKENS else 6
    delivered, stream, consumer, time_ns, pending = (int(t) for t in tokens[at : at + 5])
    return Sequences(stream, consumer, delivered, time_ns, pending)


class Heartbeat(Struct, frozen=True):
    """The server had no messages to deliver for a while."""


class PullSession:
    """Reads one consumer on one connection until an error."""

    def __init__(self, bus: Bus, subscription: Subscription, *, stream: str, consumer: str) -> None:
        self._bus = bus
        self._subscription = subscription
        self._stream = stream
        self._consumer = consumer
        self._generation = bus.generation
        self._received: deque[Message] = deque()

    async def finish(self) -> list[Message]:
        """End the session; return the messages delivered by the server and not yet yielded."""
        self._received.extend(await self._subscription.finish())
        unread = [message for message in self._received if not message.status]
        self._received.clear()
        return unread

    async def messages(self, *, batch: int = BATCH) -> AsyncGenerator[Message | Heartbeat, None]:
        """Messages in order of delivery, and heartbeats. Ends only by raising ``Unavailable``."""
        while True:
            await self._pull(batch)
            remaining = batch
            while remaining > 0:
                self._received.extend(
                    await self._subscription.receive(timeout_s=HEARTBEAT_S * MISSED)
                )
                if not self._received:
                    raise self._gone("no heartbeat")
                while self._received:
                    message = self._received.popleft()
                    if not message.status:
                        remaining -= 1
                        yield message
                    elif message.status == "100":
                        yield Heartbeat()
                    elif message.status in ("404", "408"):
                        remaining = 0  # the pull expired; request the rest again
                    else:
                        raise self._gone(message.headers.get("Description", message.status))

    async def _pull(self, batch: int) -> None:
        if self._bus.generation != self._generation:
            raise self._gone("the connection was renewed")
        request = msgspec.json.encode(
            {
                "batch": batch,
                "expires": int(EXPIRES_S * NS),
                "idle_heartbeat": int(HEARTBEAT_S * NS),
            }
        )
        sent = await self._bus.publish(
            f"{API}.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
            request,
            reply=self._subscription.subject,
        )
        if not sent:
            raise self._gone("the connection is down")

    def _gone(self, why: str) -> Unavailable:
        return Unavailable(peer=PEER, detail=f"consumer {self._consumer} of {self._stream}: {why}")


@asynccontextmanager
async def ordered_session(
    bus: Bus,
    *,
    stream: str,
    start: Mapping[str, Any],
    filter_subjects: Sequence[str],
    inactive_s: float = INACTIVE_S,
) -> AsyncIterator[tuple[PullSession, dict[str, Any]]]:
    """An ephemeral consumer without acknowledgements, and its info.

    ``start``: where it begins. The server keeps it for ``inactive_s`` without a reader.
    """
    consumer = f"{bus.name}-{secrets.token_hex(8)}"
    config = {
        "name": consumer,
        "ack_policy": "none",
        "filter_subjects": list(filter_subjects),
        "inactive_threshold": int(inactive_s * NS),
        "mem_storage": True,
        "num_replicas": 1,
        **start,
    }
    async with bus.subscribe(bus.new_inbox()) as subscription:
        info = await api(
            bus,
            f"CONSUMER.CREATE.{stream}.{consumer}",
            {"stream_name": stream, "config": config, "action": "create"},
        )
        yield (
            PullSession(bus, subscription, stream=stream, consumer=consumer),
            info,
        )


class Delivery:
    """One message of a stream, to be ended by exactly one of ``ack``, ``nak``, ``term``."""

    def __init__(self, bus: Bus, message: Message, sequences: Sequences) -> None:
        self._bus = bus
        self._reply = message.reply
        self.subject = message.subject
        self.data = message.data
        self.headers = user_headers(message)
        self.sequence = sequences.stream
        """Sequence in the stream."""
        self.delivered_count = sequences.delivered_count
        """1 for the first delivery."""
        self.pending = sequences.pending
        """Messages that wait behind this one."""
        self.time_s = sequences.time_ns / NS
        """Time at which the server stored it."""

    async def ack(self) -> None:
        """Acknowledge the message."""
        await self._end(b"+ACK")

    async def nak(self, *, delay_s: float = 0.0) -> None:
        """Deliver again after ``delay_s``."""
        await self._end(f'-NAK {{"delay":{int(delay_s * NS)}}}'.encode())

    async def term(self, *, reason: str) -> None:
        """Never deliver again, because of ``reason``."""
        await self._end(f"+TERM {reason}".encode())

    async def _end(self, verb: bytes) -> None:
        # Lost when the connection is down: the server delivers again, handlers are idempotent.
        await self._bus.publish(self._reply, verb)


@asynccontextmanager
async def pull_events(
    bus: Bus,
    stream: str,
    *,
    durable: str = "",
    filter_subjects: tuple[str, ...] = (),
    deliver: str | datetime = "all",
    batch: int = 100,
    ack_wait_s: float = 30.0,
    max_ack_pending: int = 1000,
) -> AsyncIterator[AsyncIterator[Delivery]]:
    """Messages of ``stream`` that wait for acknowledgement, until cancelled, across reconnects.

    With ``durable`` the position is kept by the server and several replicas share the work; without
    it the consumer is this process's own and begins at ``deliver`` (``all``, ``new``, ``last``,
    ``last_per_subject``, or the first time as an aware datetime).
    """
    consumer = durable or f"{bus.name}-{secrets.token_hex(8)}"
    config: dict[str, Any] = {
        "ack_policy": "explicit",
        "ack_wait": int(ack_wait_s * NS),
        "deliver_policy": deliver,
        "max_ack_pending": max_ack_pending,
    }
    if isinstance(deliver, datetime):
        config |= {"deliver_policy": "by_start_time", "opt_start_time": deliver.isoformat()}
    if filter_subjects:
        config["filter_subjects"] = list(filter_subjects)
    if durable:
        config["durable_name"] = durable
    else:
        config |= {"name": consumer, "inactive_threshold": int(300 * NS), "mem_storage": True}
    deliveries = _deliveries(bus, stream=stream, consumer=consumer, config=config, batch=batch)
    try:
        yield deliveries
    finally:
        await deliveries.aclose()


async def ensure_consumer(bus: Bus, stream: str, *, durable: str, filter_subject: str) -> None:
    """Create a durable consumer for a client that may read it but not create it.

    It begins with the oldest message stored, and expires after a week without a reader.
    """
    config = {
        "durable_name": durable,
        "ack_policy": "explicit",
        "ack_wait": 30 * NS,
        "deliver_policy": "all",
        "filter_subject": filter_subject,
        "inactive_threshold": 7 * 24 * 3600 * NS,
        "max_ack_pending": 1000,
    }
    await api(
        bus,
        f"CONSUMER.CREATE.{stream}.{durable}.{filter_subject}",
        {"stream_name": stream, "config": {**config, "name": durable}, "action": ""},
    )


async def _deliveries(
    bus: Bus, *, stream: str, consumer: str, config: dict[str, Any], batch: int
) -> AsyncGenerator[Delivery, None]:
    backoff = Backoff(first_s=0.05, most_s=2.0)
    while True:
        try:
            await bus.wait_connected()
            async with bus.subscribe(bus.new_inbox()) as subscription:
                await api(
                    bus,
                    f"CONSUMER.CREATE.{stream}.{consumer}",
                    {"stream_name": stream, "config": config, "action": ""},
                )
                session = PullSession(bus, subscription, stream=stream, consumer=consumer)
                try:
                    async for message in session.messages(batch=batch):
                        if isinstance(message, Heartbeat):
                            continue
                        sequences = parse_ack(message.reply)
                        if sequences is not None:
                            backoff.reset()
                            yield Delivery(bus, message, sequences)
                finally:
                    # Released, so that the next reader need not wait for ``ack_wait_s``; only after
                    # delivery here has ended, or the server would send it here again.
                    with finish_within(CLOSE_S):
                        for message in await session.finish():
                            await bus.publish(message.reply, b"-NAK")
        except (Unavailable, NotFound):
            await backoff.wait()


def parse_time_s(text: str) -> float:
    """Unix seconds of an RFC 3339 time as the server writes it, with up to nine decimals."""
    head, dot, rest = text.rstrip("Z").partition(".")
    whole = datetime.fromisoformat(f"{head}+00:00").timestamp()
    return whole + (float(f"0.{rest}") if dot else 0.0)
