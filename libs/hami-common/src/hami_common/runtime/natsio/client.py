# SPDX-License-Identifier: Apache-2.0
"""One connection to a NATS server: the client library's, with a shorter way for messages.

The library (nats-py 2.16) passes each message through a queue and a task of its subscription, and
each command through a list and a task that writes it. Here a message goes to its reader as it is
parsed, and a command to the socket as it is made. Logins, TLS, control lines, errors and closing
are the library's. Readers are called from the loop that reads the socket: they only store.

A connection may rest: while no request waits for an answer on it, the socket is read again only
after ``rest_s``. Hundreds of small messages per second from as many senders then wake the process a
few times and not once each. Times in seconds. Outside document: NATS client protocol.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Final

import nats.errors
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

from hami_common.bus import grants

FULL_BYTES: Final = 16_384
"""A read of this size means that more data waits: no rest."""
ASKED_S: Final = 0.2
"""No rest for this time after a message with a reply subject, even when ``ask`` does not wait."""
_END: Final = b"\r\n"
_MESSAGES: Final = (b"MSG", b"HMSG")
_FEWEST_WORDS: Final = 4
"""``MSG <subject> <subscription> <size>``; a reply is a word more, headers add their size."""
_VERSION: Final = len("NATS/1.0")
_NO_HEADERS: Final[Mapping[str, str]] = {}
_NO_RESPONDERS: Final = "503"


class Message(Struct, frozen=True, kw_only=True):
    """One received message."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = {}
    reply: str = ""

    @property
    def status(self) -> str:
        """Status code of a message from the server itself (``404``, ``100``…), else empty."""
        return self.headers.get("Status", "")


class Question(Struct, frozen=True, kw_only=True):
    """A message that expects an answer."""

    subject: str
    data: bytes
    headers: dict[str, str] | None = None


Sink = Callable[[Message], None]
"""Stores a message and returns."""


def parse_headers(block: bytes) -> Mapping[str, str]:
    """The headers of a message, with the server's own ``Status`` and ``Description``."""
    first, *lines = block.decode("utf-8", "replace").split("\r\n")
    found: dict[str, str] = {}
    status, _, description = first[_VERSION:].strip().partition(" ")
    if status.isdigit():
        found["Status"] = status
    if description:
        found["Description"] = description.strip()
    for line in lines:
        name, separator, value = line.partition(":")
        name = name.strip()
        if separator and name.isascii() and " " not in name and "\t" not in name:
            found[name] = value.strip()
    return found


class MessageReader(Parser):
    """Finds messages in the server's data; every other line goes to the library."""

    def __init__(self, client: "DirectClient") -> None:
        super().__init__(client)
        self._client = client

    def reset(self) -> None:
        """Discard a partly read message."""
        super().reset()
        self._pieces: list[bytes] = []
        self._size = 0
        self._needed = 0

    async def parse(self, data: bytes = b"") -> None:
        """Deliver every complete message."""
        is_full = len(data) >= FULL_BYTES
        if self._pieces:
            self._pieces.append(data)
            self._size += len(data)
            if self._size < self._needed:
                return
            data = b"".join(self._pieces)
            self._pieces.clear()
        at = 0
        while (stop := data.find(_END, at)) >= 0:
            after = stop + len(_END)
            if not data.startswith(_MESSAGES, at):
                await super().parse(data[at:after])
                at = after
                continue
            words = data[at:stop].split()
            if len(words) < _FEWEST_WORDS or not words[-1].isdigit():
                raise nats.errors.ProtocolError("nats: malformed MSG")
            end = after + int(words[-1])
            if end + len(_END) > len(data):
                self._keep(data[at:], needed=end + len(_END) - at)
                return
            await self._deliver(words, data[after:end])
            at = end + len(_END)
        if at < len(data):
            self._keep(data[at:], needed=0)
        elif not is_full:
            self._client.rest()

    def _keep(self, rest: bytes, *, needed: int) -> None:
        """Wait for the end of a line, or of a message that takes ``needed`` bytes."""
        self._pieces.append(rest)
        self._size, self._needed = len(rest), needed

    async def _deliver(self, words: list[bytes], payload: bytes) -> None:
        """Hand over one message."""
        head = b""
        try:
            sid = int(words[2])
            if words[0] == b"HMSG":
                size = int(words.pop(-2))
                head, payload = payload[:size], payload[size:]
        except (ValueError, IndexError) as error:
            raise nats.errors.ProtocolError("nats: malformed MSG") from error
        reply = words[3] if len(words) > _FEWEST_WORDS else b""
        sink = self._client.sinks.get(sid)
        if sink is None:
            await self._client._process_msg(sid, words[1], reply, payload, head)  # noqa: SLF001 - as the parser that this one extends
            return
        sink(
            Message(
                subject=words[1].decode("utf-8", "replace"),
                data=payload,
                headers=parse_headers(head) if head else _NO_HEADERS,
                reply=reply.decode("utf-8", "replace"),
            )
        )


class DirectClient(Client):
    """The library's client with the shorter way for messages."""

    def __init__(self, *, rest_s: float = 0.0, lost: Callable[[], object] = lambda: None) -> None:
        """Not connected.

        Rest for ``rest_s`` between reads; 0: never.

        ``lost`` is called as soon as the library finds the connection broken: its own callbacks
        come after it has closed, and not at all when closing a broken socket fails.
        """
        super().__init__()
        self._lost = lost
        self.reader = self._ps = MessageReader(self)
        self.message_bytes = 0
        """Largest message, with headers, that the login may send; 0: the server's own limit."""
        self.sinks: dict[int, Sink] = {}
        """Readers, by number of the subscription."""
        self._rest_s = rest_s
        self._resting: asyncio.TimerHandle | None = None
        self._awake_until_s = 0.0
        self._answers: dict[str, asyncio.Future[Message]] = {}
        self._answers_prefix = ""
        self._numbers = count()
        self._held: list[bytes] | None = None
        """Commands to be sent together, while a batch is being built."""

    @property
    def is_reading(self) -> bool:
        """True while data from the server is still read."""
        return self._reading_task is not None and not self._reading_task.done()

    async def _process_connect_init(self) -> None:
        await super()._process_connect_init()
        if self.message_bytes:
            self._max_payload = min(self._max_payload, self.message_bytes - grants.HEADER_BYTES)

    # --- receiving -------------------------------------------------------------------------------

    async def attach(self, subject: str, sink: Sink, *, queue: str = "") -> Subscription:
        """Subscribe; ``unsubscribe`` of the result ends it."""
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        self._sid += 1
        subscription = Subscription(self, self._sid, subject, queue=queue, cb=_unused)
        self._subs[self._sid] = subscription
        self.sinks[self._sid] = sink
        await self._send_subscribe(subscription)
        return subscription

    async def quiesce(self, subscription: Subscription) -> None:
        """Stop delivery; messages sent before have arrived when this returns."""
        await self._send_unsubscribe(subscription._id)  # noqa: SLF001 - as for its own subscriptions
        await self.flush()

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self.sinks.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    def _process_disconnect(self) -> None:
        super()._process_disconnect()
        self._lost()

    def rest(self) -> None:
        """Pause reading, unless a request waits for an answer."""
        if not self._rest_s or self._answers or self._pongs or self._resting is not None:
            return
        loop, socket = asyncio.get_running_loop(), self._socket()
        if socket is None or loop.time() < self._awake_until_s:
            return
        socket.pause_reading()
        self._resting = loop.call_later(self._rest_s, self._wake)

    def _wake(self) -> None:
        """Resume reading."""
        resting, self._resting = self._resting, None
        socket = self._socket()
        if resting is not None:
            resting.cancel()
            if socket is not None:
                socket.resume_reading()

    def _socket(self) -> asyncio.ReadTransport | None:
        """The transport that reads the socket itself, beneath TLS; ``None`` if there is none."""
        writer = getattr(self._transport, "_bare_io_writer", None)
        transport = None if writer is None else writer.transport
        return transport if isinstance(transport, asyncio.ReadTransport) else None

    # --- sending ---------------------------------------------------------------------------------

    async def ask(self, subject: str, data: bytes, *, headers: dict[str, str] | None) -> Message:
        """Send and wait for one answer; the caller sets the deadline."""
        token, answer = await self._expect()
        try:
            await super().publish(
                subject, data, reply=f"{self._answers_prefix}{token}", headers=headers
            )
            message = await answer
        finally:
            del self._answers[token]
        if message.status == _NO_RESPONDERS:
            raise nats.errors.NoRespondersError
        return message

    async def ask_all(
        self, questions: Sequence[Question], answers: list[Message | nats.errors.Error]
    ) -> None:
        """``ask`` several at once; ``answers`` grows by the answer to each, in their order.

        They are sent together, and none waits for the answer to another.
        """
        expected: list[tuple[str, asyncio.Future[Message]]] = []
        is_first = self._held is None  # else another call sends them with its own
        if self._held is None:
            self._held = []
        try:
            try:
                for question in questions:
                    token, answer = await self._expect()
                    expected.append((token, answer))
                    try:
                        await super().publish(
                            question.subject,
                            question.data,
                            reply=f"{self._answers_prefix}{token}",
                            headers=question.headers,
                        )
                    except nats.errors.MaxPayloadError as error:
                        answer.set_exception(error)
            finally:
                if is_first:
                    held, self._held = self._held, None
                    if held:
                        await self._send_command(b"".join(held))
            for _, answer in expected:
                try:
                    message = await answer
                except nats.errors.MaxPayloadError as error:
                    answers.append(error)
                    continue
                is_lost = message.status == _NO_RESPONDERS
                answers.append(nats.errors.NoRespondersError() if is_lost else message)
        finally:
            for token, _ in expected:
                del self._answers[token]

    async def _expect(self) -> tuple[str, asyncio.Future[Message]]:
        """Token for the reply subject, and the future of the answer."""
        if not self._answers_prefix:
            self._answers_prefix = f"{self.new_inbox()}."
            await self.attach(f"{self._answers_prefix}*", self._answered)
        # The answerer of one request must not be able to guess the reply subject of another.
        token = f"{next(self._numbers):x}{secrets.token_hex(8)}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[token] = answer
        self._wake()
        return token, answer

    def _answered(self, message: Message) -> None:
        answer = self._answers.get(message.subject[len(self._answers_prefix) :])
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        reply: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send one message; data is read without rest while an answer to ``reply`` may come."""
        if reply and self._rest_s:
            self._awake_until_s = asyncio.get_running_loop().time() + ASKED_S
            self._wake()
        await super().publish(subject, payload, reply=reply, headers=headers)

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        self._wake()
        await super()._send_ping(future)

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:  # noqa: FBT001, FBT002 - the library's
        if self._held is not None:
            self._held.append(cmd)
        elif self._transport is None or not self.is_connected or self._pending:
            await super()._send_command(cmd, priority)
        else:
            self._transport.write(cmd)

    async def _flush_pending(self, force_flush: bool = False) -> None:  # noqa: FBT001, FBT002 - the library's
        if self._transport is None or not self.is_connected or self._pending:
            await super()._flush_pending(force_flush)
            return
        self._pending_data_size = 0  # a ping, which is written at once, is counted as well
        await self._transport.drain()  # type: ignore[no-untyped-call] # the library's


async def _unused(msg: Msg) -> None:
    """Placeholder for a coroutine that the library calls from a task that is not used here."""
    del msg
