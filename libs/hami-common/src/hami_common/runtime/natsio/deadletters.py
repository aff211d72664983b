# SPDX-License-Identifier: Apache-2.0
"""Dead-letters messages that a consumer cannot use, so that the consumer continues.

A dead letter is the original, payload and headers unchanged, on
``hami.v1.deadletter.<consumer>.<subject>``, with headers for the reason (docs/events.md). Storing
the same message again within two minutes is idempotent.
"""

import base64
import re
from collections.abc import Mapping

from msgspec import Struct

from hami_common.bus import subjects
from hami_common.ports import Publisher
from hami_common.runtime.natsio.connection import Bus
from hami_common.runtime.natsio.jetstream import MESSAGE_NOT_FOUND, ApiRefusal, api

UNDECODABLE = "undecodable"
TERMINATED = "terminated"
MAX_DELIVERIES = "max-deliveries"
ADVISORIES = tuple(
    f"$JS.EVENT.ADVISORY.CONSUMER.{what}.{subjects.EVENTS_STREAM}.*"
    for what in ("MAX_DELIVERIES", "MSG_TERMINATED")
)
"""The server's advisories about messages of the event stream that a consumer will not see again."""
_PROBLEM_MAX = 500
_NO_TOKEN = re.compile(r"[^-a-zA-Z0-9_]")


class DeadLetter(Struct, frozen=True, kw_only=True):
    """One message and the reason for which it was dead-lettered."""

    consumer: str
    """Service, or name of the consumer."""
    reason: str
    problem: str
    subject: str
    data: bytes
    headers: Mapping[str, str] = {}
    stream: str
    sequence: int
    deliveries: int = 1


async def put_away(publisher: Publisher, letter: DeadLetter) -> None:
    """Store the letter; ``HamiError`` when it may not be stored."""
    consumer = _NO_TOKEN.sub("-", letter.consumer)
    headers = {
        name: value for name, value in letter.headers.items() if not name.startswith("Nats-")
    }
    await publisher.publish_stored(
        subjects.dead_letter(subjects.unescape(consumer), letter.subject),
        letter.data,
        headers={
            **headers,
            "hami-reason": letter.reason,
            "hami-problem": " ".join(letter.problem.split())[:_PROBLEM_MAX],
            "hami-subject": letter.subject,
            "hami-stream": letter.stream,
            "hami-sequence": str(letter.sequence),
            "hami-deliveries": str(letter.deliveries),
        },
        message_id=f"{consumer}/{letter.stream}/{letter.sequence}",
    )


class Stored(Struct, frozen=True, kw_only=True):
    """A message as it is stored in its stream."""

    subject: str
    data: bytes
    headers: Mapping[str, str]


async def read_stored(bus: Bus, stream: str, sequence: int) -> Stored | None:
    """The message, ``None`` when the stream has dropped it."""
    try:
        answer = await api(bus, f"STREAM.MSG.GET.{stream}", {"seq": sequence})
    except ApiRefusal as refusal:
        if refusal.err_code == MESSAGE_NOT_FOUND:
            return None
        raise
    message = answer["message"]
    lines = base64.b64decode(message.get("hdrs", "")).decode("utf-8", "replace").split("\r\n")[1:]
    pairs = [line.partition(":") for line in lines if line]
    return Stored(
        subject=message["subject"],
        data=base64.b64decode(message.get("data", "")),
        headers={name.strip(): value.strip() for name, _, value in pairs},
    )
