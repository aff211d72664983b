# SPDX-License-Identifier: Apache-2.0
"""The fast path of messages delivers what the client library would, however the bytes are cut."""

import random

import pytest
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from hami_common.runtime.natsio.client import DirectClient, Message, parse_headers

pytestmark = pytest.mark.anyio

HEADED = b"NATS/1.0\r\nce-id: 7\r\ntraceparent:00-ab\r\n\r\n"
HEARTBEAT = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 5\r\n\r\n"
SENT = b"".join(
    (
        b"PING\r\n",
        b"MSG a.b 1 5\r\nhello\r\n",
        b"MSG a.b 1 inbox.1 2\r\n\r\n\r\n",
        b"+OK\r\n",
        b"HMSG a.c 2 %d %d\r\n%bbody\r\n" % (len(HEADED), len(HEADED) + 4, HEADED),
        b"HMSG a.c 2 in.2 %d %d\r\n%b\r\n" % (len(HEARTBEAT), len(HEARTBEAT), HEARTBEAT),
        b"PONG\r\n",
        b"MSG a.b 1 0\r\n\r\n",
        b"MSG a.b 9 6\r\nnobody\r\n",
        b"MSG big 1 40000\r\n" + bytes(40_000) + b"\r\n",
    )
)
Heard = tuple[int, str, str, bytes, dict[str, str]]


class _Library(DirectClient):
    """The calls that the library's own parser makes."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Heard] = []
        self.pings = 0

    async def _process_ping(self) -> None:
        self.pings += 1

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        found = await self._process_headers(headers)
        self.heard.append((sid, subject.decode(), reply.decode(), data, found or {}))


class _Ours(DirectClient):
    """The calls that the project's parser makes."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Heard] = []
        self.pings = 0
        for sid in (1, 2):
            self.sinks[sid] = lambda message, sid=sid: self._note(sid, message)  # type: ignore[misc] # a default binds the number

    def _note(self, sid: int, message: Message) -> None:
        found = (sid, message.subject, message.reply, message.data, dict(message.headers))
        self.heard.append(found)

    async def _process_ping(self) -> None:
        self.pings += 1


async def test_messages_are_those_of_the_library_wherever_the_bytes_are_cut() -> None:
    library, chance = _Library(), random.Random(1)
    await Parser(library).parse(SENT)
    wanted = [heard for heard in library.heard if heard[0] != 9]
    assert len(wanted) == 6
    assert library.pings == 1
    for _ in range(200):
        ours, cuts = _Ours(), sorted(chance.sample(range(400), chance.randrange(1, 30)))
        cuts.append(chance.randrange(400, len(SENT)))
        for begin, end in zip([0, *cuts], [*cuts, len(SENT)], strict=True):
            await ours.reader.parse(SENT[begin:end])
        assert (ours.heard, ours.pings) == (wanted, 1)


@pytest.mark.parametrize("line", [b"MSG a 1 x\r\n", b"MSG a x 1\r\n1\r\n", b"HMSG a 1\r\n"])
async def test_a_line_that_is_no_message_ends_the_connection(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        await _Ours().reader.parse(line)


def test_status_headers_of_the_server_are_parsed() -> None:
    assert parse_headers(HEARTBEAT) == {
        "Status": "100",
        "Description": "Idle Heartbeat",
        "Nats-Last-Consumer": "5",
    }
    assert parse_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503"}
    assert parse_headers(b"NATS/1.0\r\nbad name: 1\r\nno colon\r\nx:  y \r\n\r\n") == {"x": "y"}
