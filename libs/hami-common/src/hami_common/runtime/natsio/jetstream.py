# SPDX-License-Identifier: Apache-2.0
"""A thin layer over JetStream requests and their errors.

Error codes are the server's (``server/errors.json`` of nats-server 2.15). A request refused with a
5xx (no leader, not ready, disk full, storage used up) is ``Unavailable`` and may be retried; the
outcome of a message refused so is unknown. Two cases differ. The API also uses 500 for changes of a
stream that it will never grant, such as that of its storage: ``Denied``, unless storage is missing.
A consumer that is not created is ``Unavailable`` whatever the status: its reader can only retry.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hami_common.errors import Conflict, Denied, HamiError, NotFound, Unavailable
from hami_common.events.codec import UNDECODABLE
from hami_common.runtime.natsio.client import Message, Question
from hami_common.runtime.natsio.connection import PEER, Bus

API = "$JS.API"

CONSUMER_NOT_FOUND = 10014
INSUFFICIENT_RESOURCES = 10023
MEMORY_EXCEEDED = 10028
MESSAGE_NOT_FOUND = 10037
STORAGE_EXCEEDED = 10047
STREAM_NOT_FOUND = 10059
WRONG_LAST_SEQUENCE = 10071
WRONG_LAST_SEQUENCE_CONSTANT = 10164

EXPECTED_LAST_SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
MESSAGE_ID = "Nats-Msg-Id"

_SERVER_ERROR = 500
_BUSY = 503
_CHANGING = ("STREAM.CREATE.", "STREAM.UPDATE.", "STREAM.DELETE.", "STREAM.MSG.DELETE.")
_CREATING_CONSUMER = "CONSUMER.CREATE."
_NO_STORAGE = frozenset({INSUFFICIENT_RESOURCES, MEMORY_EXCEEDED, STORAGE_EXCEEDED})

_encoder = msgspec.json.Encoder()


class _Error(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct, frozen=True):
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


_ack_decoder = msgspec.json.Decoder(_Ack)


class ApiRefusal(Denied):
    """The JetStream API refused a request; ``err_code`` is the server's number of the reason."""

    def __init__(self, *, what: str, error: _Error) -> None:
        super().__init__(peer=PEER, detail=f"{what}: {error.description}", status=error.code)
        self.err_code = error.err_code


def _failure(what: str, error: _Error, *, unavailable_from: int = _SERVER_ERROR) -> HamiError:
    if error.err_code in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_CONSTANT):
        return Conflict(what=what, detail=error.description)
    if error.err_code == STREAM_NOT_FOUND:
        return NotFound(what=f"the stream of {what}")
    if error.err_code == CONSUMER_NOT_FOUND:
        return NotFound(what=f"the consumer of {what}")
    if error.code >= unavailable_from or error.err_code in _NO_STORAGE:
        return Unavailable(peer=PEER, detail=f"{what}: {error.description}")
    return ApiRefusal(what=what, error=error)


async def api(
    bus: Bus, name: str, payload: object = None, *, timeout_s: float | None = None
) -> dict[str, Any]:
    """Answer of the API request ``name`` (``STREAM.INFO.<stream>``, …) as plain data."""
    data = b"" if payload is None else _encoder.encode(payload)
    message = await bus.request(f"{API}.{name}", data, timeout_s=timeout_s)
    try:
        answer: dict[str, Any] = msgspec.json.decode(message.data)
    except UNDECODABLE as error:
        raise Unavailable(peer=PEER, detail=f"{name}: answer is not JSON") from error
    if "error" in answer:
        error_view = msgspec.convert(answer["error"], _Error)
        unavailable_from = _SERVER_ERROR
        if name.startswith(_CHANGING):
            unavailable_from = _BUSY
        elif name.startswith(_CREATING_CONSUMER):
            unavailable_from = 0
        raise _failure(name, error_view, unavailable_from=unavailable_from)
    return answer


async def store(
    bus: Bus,
    subject: str,
    data: bytes,
    *,
    headers: Mapping[str, str] | None = None,
) -> int:
    """Publish to the stream that stores ``subject``; sequence of the stored message."""
    stored = _stored(subject, await bus.request(subject, data, headers=headers))
    if isinstance(stored, HamiError):
        raise stored
    return stored


async def store_all(bus: Bus, messages: Sequence[Question]) -> list[int | HamiError]:
    """``store`` several messages at once: the sequence of each, or the error."""
    answers = await bus.request_all(messages)
    return [
        answer if isinstance(answer, HamiError) else _stored(message.subject, answer)
        for message, answer in zip(messages, answers, strict=True)
    ]


def _stored(subject: str, answer: Message) -> int | HamiError:
    """Parse the stream's answer to a message."""
    try:
        ack = _ack_decoder.decode(answer.data)
    except UNDECODABLE:
        return Unavailable(peer=PEER, detail=f"{subject}: answer is not an ack")
    if ack.error is not None:
        return _failure(subject, ack.error)
    return ack.seq


def user_headers(message: Message) -> dict[str, str]:
    """Headers of a stored message that its writer set: the server's own are left out."""
    return {
        str(name): value
        for name, value in message.headers.items()
        if not name.startswith("Nats-") and name not in ("Status", "Description")
    }
