# SPDX-License-Identifier: Apache-2.0
"""One connection to NATS, renewed until closed; requests and subscriptions survive renewal.

The client library's own reconnect is disabled, for two reasons: it keeps unsent messages and sends
them after a reconnect, when their sender has long had an error; and it gives up permanently on some
errors (an expired login, for example). Here each connection is a generation: only the subscriptions
are carried over, by subscribing again. Times in seconds.

A login may be renewed before the server ends it: then the new connection is made while the old one
still serves, and requests on the old one may finish.

Core subscriptions do not deliver messages published while the connection was down. Readers that
must detect this compare ``Bus.generation``.
"""

import logging
import ssl
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import nats.errors
from nats.aio.subscription import Subscription as ClientSubscription

from hami_common.errors import Denied, HamiError, SettingsInvalid, Unavailable
from hami_common.runtime.natsio.client import DirectClient, Message, Question
from hami_common.runtime.natsio.creds import NatsLogin
from hami_common.runtime.settings import without_password
from hami_common.runtime.tasks import Backoff, Waiting, background, finish_within

PEER = "NATS"
DIAL_S = 2.0
"""Longest time for one TCP, TLS and login exchange."""
PING_S = 5.0
"""Interval of pings: a frozen peer is noticed within two of these."""
CLOSE_S = 2.0
"""Longest orderly end of a connection."""
INBOX_CAPACITY = 65_536

_log = logging.getLogger(__name__)


class Subscription:
    """A core subscription that survives reconnects.

    Bounded: messages beyond the bound are counted.
    """

    def __init__(
        self,
        *,
        subject: str,
        queue: str = "",
        capacity: int,
        per_subject: int = 0,
        gather_s: float = 0.0,
    ) -> None:
        self.subject = subject
        self.lost_count = 0
        """Messages dropped because the reader was too slow, or too many arrived on one subject."""
        self._per_subject = per_subject
        self._waiting: Counter[str] = Counter()
        self._group = queue
        self._gather_s = gather_s
        self._capacity = capacity
        self._messages: deque[Message] = deque()
        self._wake = anyio.Event()
        self._is_interrupted = False
        self._client: DirectClient | None = None
        self._attached: ClientSubscription | None = None

    async def receive(self, *, timeout_s: float | None = None) -> list[Message]:
        """All messages that have arrived, at least one.

        None after ``timeout_s``, or when the connection was lost or renewed since the last call.
        """
        if not self._messages and not self._is_interrupted:
            self._wake = anyio.Event()
            with anyio.move_on_after(timeout_s):
                await self._wake.wait()
        self._is_interrupted = False
        received = list(self._messages)
        self._messages.clear()
        self._waiting.clear()
        return received

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield every message until cancelled; immediately, or gathered over a while."""
        while True:
            for message in await self.receive():
                yield message
            if self._gather_s:
                await anyio.sleep(self._gather_s)

    def _take(self, client: DirectClient, message: Message) -> None:
        if client is not self._client:
            return  # of a connection that a newer one has replaced
        is_flood = 0 < self._per_subject <= self._waiting[message.subject]
        if is_flood or len(self._messages) >= self._capacity:
            self.lost_count += 1
        else:
            self._messages.append(message)
            self._waiting[message.subject] += 1
        self._wake.set()

    async def finish(self) -> list[Message]:
        """Stop delivery; return the messages that arrived and were not received."""
        client, attached = self._client, self._attached
        if client is not None and attached is not None:
            try:
                await client.quiesce(attached)
            except (nats.errors.Error, OSError):
                _log.debug("subscription finished without its connection")
        unread = list(self._messages)
        self._messages.clear()
        return unread

    async def attach(self, client: DirectClient) -> None:
        """Subscribe on a new connection; only the connection calls this."""
        self._client = client
        self._attached = await client.attach(
            self.subject, partial(self._take, client), queue=self._group
        )

    def is_attached(self, client: DirectClient) -> bool:
        """True when the subscription is made on this connection."""
        return self._client is client

    async def detach(self) -> None:
        """Unsubscribe; only the connection calls this."""
        attached, self._attached, self._client = self._attached, None, None
        if attached is not None:
            try:
                await attached.unsubscribe()
            except (nats.errors.Error, OSError):
                _log.debug("subscription ended with its connection")

    def interrupt(self) -> None:
        """Wake the reader, because the connection was lost or renewed."""
        self._is_interrupted = True
        self._wake.set()


class Bus:
    """The connection for the adapters of this package; see ``connect``."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        name: str,
        login: NatsLogin,
        ca_file: str = "",
        request_timeout_s: float = 5.0,
        rest_s: float = 0.0,
    ) -> None:
        self.name = name
        self.request_timeout_s = request_timeout_s
        self.generation = 0
        """Number of connections made so far; grows with each reconnect."""
        self._urls = list(urls)
        self._login = login
        self._ca_file = ca_file
        self._rest_s = rest_s
        self._renew_s = login.renew_s
        self._renew_at_s = 0.0
        self._retired: DirectClient | None = None
        """Connection that was replaced; kept for a moment, for answers in flight."""
        self._client: DirectClient | None = None
        self._closing = False
        self._changed = anyio.Event()
        self._lost = anyio.Event()
        self._requests: set[anyio.CancelScope] = set()
        self._subscriptions: list[Subscription] = []

    @property
    def is_connected(self) -> bool:
        """True when the connection is up, as far as is known."""
        return self._client is not None

    @property
    def server_version(self) -> str:
        """Version of the connected server; empty while not connected."""
        client = self._client
        if client is None:
            return ""
        version = client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    @property
    def changed(self) -> anyio.Event:
        """Set when the connection is lost, made or renewed. Take it before reading the state."""
        return self._changed

    async def wait_connected(self, *, after: int = 0) -> int:
        """Wait until a connection later than generation ``after`` is up; returns its generation."""
        while self._client is None or self.generation <= after:
            await self._changed.wait()
        return self.generation

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Message:
        """Send and wait for one answer.

        ``Unavailable`` when none arrives: the outcome is unknown.
        """
        limit_s = self.request_timeout_s if timeout_s is None else timeout_s
        sent = False
        with anyio.move_on_after(limit_s) as scope:
            while True:
                client = await self._connected()
                self._requests.add(scope)
                sent = True
                try:
                    return await _ask(client, subject, data, headers)
                except nats.errors.ConnectionClosedError:
                    sent = False  # found closed before anything was sent
                finally:
                    self._requests.discard(scope)
                self._lost.set()
                while self._client is client:
                    await self._changed.wait()
        if not sent:
            raise Unavailable(peer=PEER, detail=f"not connected for {limit_s:g} s, nothing sent")
        if self._lost.is_set() or anyio.current_time() < scope.deadline:
            raise Unavailable(peer=PEER, detail=f"connection lost while waiting on {subject}")
        raise Unavailable(peer=PEER, detail=f"no answer on {subject} in {limit_s:g} s")

    async def request_all(self, questions: Sequence[Question]) -> list[Message | HamiError]:
        """``request`` several at once; the answer or error of each, in their order."""
        limit_s = self.request_timeout_s
        answers: list[Message | nats.errors.Error] = []
        is_sent, detail = False, f"not connected for {limit_s:g} s, nothing sent"
        with anyio.move_on_after(limit_s) as scope:
            client = await self._connected()
            self._requests.add(scope)
            is_sent, detail = True, "connection lost while waiting"
            try:
                await client.ask_all(questions, answers)
            except (nats.errors.Error, OSError) as error:
                detail = str(error) or type(error).__name__
            finally:
                self._requests.discard(scope)
        if is_sent and scope.cancelled_caught and anyio.current_time() >= scope.deadline:
            detail = f"no answer in {limit_s:g} s"
        found: list[Message | HamiError] = [
            answer
            if isinstance(answer, Message)
            else _refusal(question.subject, len(question.data), answer)
            for question, answer in zip(questions, answers, strict=False)
        ]
        missing = Unavailable(peer=PEER, detail=detail)
        return found + [missing] * (len(questions) - len(found))

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> bool:
        """Send without waiting for an answer.

        False when the connection is down: the message is dropped.
        """
        client = self._client
        if client is None:
            return False
        # A full buffer towards a frozen server makes the client wait without a limit.
        with anyio.move_on_after(self.request_timeout_s) as scope:
            self._requests.add(scope)
            try:
                await client.publish(
                    subject, data, reply=reply, headers=dict(headers or {}) or None
                )
            except nats.errors.MaxPayloadError as error:
                raise Denied(
                    peer=PEER, detail=f"{len(data)} bytes are too large for one message"
                ) from error
            except (nats.errors.Error, OSError):
                return False
            finally:
                self._requests.discard(scope)
            return True
        return False

    @asynccontextmanager
    async def subscribe(
        self,
        subject: str,
        *,
        queue: str = "",
        capacity: int = INBOX_CAPACITY,
        per_subject: int = 0,
        gather_s: float = 0.0,
    ) -> AsyncIterator[Subscription]:
        """Subscribe for the time of the block; members of one ``queue`` share the messages.

        At most ``capacity`` messages wait for the reader, and at most ``per_subject`` of one
        subject (0: no such limit), so that one sender cannot displace the others; more are dropped.
        For many small messages that are not urgent, ``gather_s`` lets the reader wake once for all
        that arrived in that time.
        """
        subscription = Subscription(
            subject=subject,
            queue=queue,
            capacity=capacity,
            per_subject=per_subject,
            gather_s=gather_s,
        )
        self._subscriptions.append(subscription)
        try:
            client = self._client
            if client is not None:
                with anyio.move_on_after(self.request_timeout_s):
                    try:
                        await subscription.attach(client)
                    except (nats.errors.Error, OSError):
                        _log.debug("connection lost while subscribing, subscribed again later")
            yield subscription
        finally:
            self._subscriptions.remove(subscription)
            with finish_within(CLOSE_S):
                await subscription.detach()

    def new_inbox(self) -> str:
        """A new unguessable subject for answers."""
        client = self._client
        if client is None:
            raise Unavailable(peer=PEER, detail="not connected")
        return client.new_inbox()

    async def _connected(self) -> DirectClient:
        while self._client is None:
            await self._changed.wait()
        return self._client

    def _become(self, client: DirectClient | None) -> None:
        self._client = client
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def open(self, timeout_s: float) -> None:
        """Make the first connection; ``Unavailable`` when none is made in ``timeout_s``.

        0 waits indefinitely.
        """
        backoff = Backoff(first_s=0.05, most_s=1.0)
        waiting = Waiting(PEER, timeout_s)
        with anyio.move_on_after(waiting.limit_s):
            while self._client is None:
                try:
                    await self._dial()
                except Unavailable as error:
                    waiting.note(error.detail)
                    await backoff.wait()
        if self._client is None:
            servers = ", ".join(without_password(url) for url in self._urls)
            raise Unavailable(
                peer=PEER,
                detail=f"no connection to {servers} in {timeout_s:g} s: {waiting.problem}",
            )

    async def keep(self) -> None:
        """Renew the connection whenever it is lost, until ``close``."""
        while True:
            if await self._is_alive():
                await self._renew()
                continue
            if self._closing:
                return
            _log.warning("connection to NATS lost", extra={"generation": self.generation})
            await self._drop()
            backoff = Backoff(first_s=0.02, most_s=2.0)
            while self._client is None:
                try:
                    await self._dial()
                except (Unavailable, SettingsInvalid) as error:
                    # Bad credentials too: their file may be in the middle of a replacement.
                    _log.debug("dial failed", extra={"problem": str(error)})
                    await backoff.wait()
            _log.info("connected to NATS again", extra={"generation": self.generation})

    async def _renew(self) -> None:
        """Log in again where it is time, and close the connection before the last one."""
        retired, self._retired = self._retired, None
        if retired is not None:
            await _close(retired)
        if self._renew_s == 0 or self._closing or anyio.current_time() < self._renew_at_s:
            return
        old = self._client
        try:
            await self._dial()
        except (Unavailable, SettingsInvalid) as error:
            # The old login is still valid; the authenticator may recover before it expires.
            _log.warning("login not renewed", extra={"problem": str(error)})
            self._renew_at_s = anyio.current_time() + self._renew_s / 10
        else:
            self._retired = old
            _log.info("login renewed", extra={"generation": self.generation})

    async def close(self) -> None:
        """Send unsent messages and close the connection."""
        self._closing = True
        client = self._client
        if client is None:
            return
        # Flush replaces draining here: the readers of subscriptions have ended.
        try:
            with anyio.move_on_after(CLOSE_S):
                await client.flush(timeout=int(CLOSE_S) + 1)
        except (nats.errors.Error, OSError):
            _log.debug("connection was lost before it was flushed")
        await self._drop()

    async def _is_alive(self) -> bool:
        """Wait for a sign of loss, for ``PING_S``; then ping, still watching for such a sign.

        A connection that is first frozen and then broken breaks while the ping waits.
        """
        with anyio.move_on_after(min(PING_S, self._renew_s or PING_S)):
            await self._lost.wait()
        client = self._client
        if client is None or self._lost.is_set():
            return False
        answered = False
        with anyio.move_on_after(PING_S) as scope:

            async def ask() -> None:
                nonlocal answered
                try:
                    await client.flush(timeout=int(PING_S) + 1)
                except (nats.errors.Error, OSError) as error:
                    _log.debug("server not asked", extra={"problem": str(error)})
                else:
                    answered = client.is_reading  # else the library flushes, and sends no ping
                scope.cancel()

            async with background() as group:
                group.start_soon(ask)
                await self._lost.wait()
        return answered

    async def _drop(self) -> None:
        client = self._client
        self._become(None)
        self._lost.set()
        for scope in list(self._requests):
            scope.cancel()
        for subscription in self._subscriptions:
            subscription.interrupt()
        retired, self._retired = self._retired, None
        for one in (client, retired):
            if one is not None:
                await _close(one)

    def _check_encryption(self, client: DirectClient) -> None:
        """Reject plain text where TLS is required.

        The client library continues without TLS when the server, or an intermediary, does not offer
        it.
        """
        if not any(url.startswith("tls://") for url in self._urls):
            return
        transport: Any = client._transport  # noqa: SLF001 - no public way
        if transport._io_writer.get_extra_info("ssl_object") is None:  # noqa: SLF001 - as above
            raise Unavailable(peer=PEER, detail="the server does not offer TLS")

    async def _dial(self) -> None:
        options, public_key = self._login.options()
        lost = anyio.Event()
        client = DirectClient(rest_s=self._rest_s, lost=lost.set)
        client.message_bytes = self._login.message_bytes
        if public_key:
            client._public_nkey = public_key  # noqa: SLF001 - the library sets it from a seed only

        async def on_lost() -> None:
            lost.set()

        async def on_error(error: Exception) -> None:
            # The server reports a denied subject only here; the keeper handles lost connections.
            is_refusal = "permissions violation" in str(error).lower()
            level = logging.WARNING if is_refusal else logging.DEBUG
            _log.log(level, "NATS client reports", extra={"problem": str(error)})

        is_ready = False
        try:
            with anyio.fail_after(DIAL_S * max(1, len(self._urls))):
                await client.connect(
                    servers=self._urls,
                    name=self.name,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=int(DIAL_S),
                    ping_interval=3600,  # the keeper sends pings
                    drain_timeout=int(CLOSE_S),
                    disconnected_cb=on_lost,
                    closed_cb=on_lost,
                    error_cb=on_error,
                    **options,
                    tls=ssl.create_default_context(cafile=self._ca_file) if self._ca_file else None,
                )
                self._check_encryption(client)
                while waiting := [s for s in self._subscriptions if not s.is_attached(client)]:
                    for subscription in waiting:
                        await subscription.attach(client)
                await client.flush(timeout=int(DIAL_S))
                is_ready = True
        except (TimeoutError, OSError, nats.errors.Error, ValueError) as error:
            raise Unavailable(peer=PEER, detail=str(error) or type(error).__name__) from error
        finally:
            if not is_ready:
                await _close(client)
        self._lost = lost
        self._renew_at_s = anyio.current_time() + self._renew_s
        self.generation += 1
        self._become(client)
        for subscription in self._subscriptions:
            subscription.interrupt()


async def _ask(
    client: DirectClient, subject: str, data: bytes, headers: Mapping[str, str] | None
) -> Message:
    try:
        return await client.ask(subject, data, headers=dict(headers or {}) or None)
    except nats.errors.ConnectionClosedError:
        raise
    except (nats.errors.Error, OSError) as error:
        raise _refusal(subject, len(data), error) from error


def _refusal(subject: str, size: int, error: Exception) -> HamiError:
    """Reason for which a message of ``size`` bytes has no answer."""
    if isinstance(error, nats.errors.NoRespondersError):
        return Unavailable(peer=PEER, detail=f"no service answers on {subject}")
    if isinstance(error, nats.errors.MaxPayloadError):
        return Denied(peer=PEER, detail=f"{size} bytes are too large for one message")
    return Unavailable(peer=PEER, detail=f"{subject}: {error}")


async def _close(client: DirectClient) -> None:
    with finish_within(CLOSE_S):
        try:
            await client.close()
        except (OSError, nats.errors.Error, AssertionError):
            _log.debug("connection ended uncleanly")


@asynccontextmanager
async def connect(
    urls: Sequence[str],
    *,
    name: str,
    creds: str = "",
    login: NatsLogin | None = None,
    ca_file: str = "",
    start_timeout_s: float = 60.0,
    request_timeout_s: float = 5.0,
    rest_s: float = 0.0,
) -> AsyncIterator[Bus]:
    """Connect for the time of the block, and reconnect whenever the connection is lost.

    ``creds`` is short for a login by credentials file. Where hundreds of small messages arrive each
    second, ``rest_s`` lets them be read together: messages without a waiting request may arrive
    that much later. ``Unavailable`` when the first connection is not made in ``start_timeout_s``
    (0: never). Leaving the block sends unsent messages and closes, within a deadline, even when
    the block is cancelled.
    """
    bus = Bus(
        urls,
        name=name,
        login=login or NatsLogin(creds=creds),
        ca_file=ca_file,
        request_timeout_s=request_timeout_s,
        rest_s=rest_s,
    )
    await bus.open(start_timeout_s)
    async with background() as group:
        group.start_soon(bus.keep)
        try:
            yield bus
        finally:
            with finish_within(2 * CLOSE_S):
                await bus.close()
