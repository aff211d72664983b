# SPDX-License-Identifier: Apache-2.0
"""Queues informational messages until the bus accepts them, up to a bound; no decision uses them.

Messages are sent in the order in which they were queued. A message that the bus does not accept
stays queued for the next ``send``; when the queue is full, the oldest messages are dropped.
Messages that the bus rejects permanently are dropped, too.
"""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from msgspec import Struct

from hami_common.errors import NotFound, Unavailable
from hami_common.events.codec import encode, event_headers
from hami_common.ports import Publisher
from hami_common.runtime.quarantine import Quarantine

PENDING_MAX = 256
"""Maximum number of queued messages."""

_log = logging.getLogger(__name__)


class Letter(Struct, frozen=True, kw_only=True):
    """One message."""

    subject: str
    event_type: str
    source: str
    time_s: float
    record: Struct
    traceparent: str = ""


class Outbox:
    """Queue of messages that are not yet accepted by the bus."""

    def __init__(self, publisher: Callable[[], Publisher | None], quarantine: Quarantine) -> None:
        """``publisher`` is called at each use: ``None`` before the first connection."""
        self._publisher = publisher
        self._quarantine = quarantine
        self._letters: OrderedDict[str, Letter] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of queued messages."""
        return len(self._letters)

    def put(self, letter: Letter) -> None:
        """Queue a message for the next ``send``."""
        self._letters[secrets.token_hex(16)] = letter
        while len(self._letters) > PENDING_MAX:
            self._letters.popitem(last=False)

    async def send(self) -> None:
        """Send the queued messages until the bus does not accept one."""
        publisher = self._publisher()
        if publisher is None:
            return
        for event_id, letter in list(self._letters.items()):
            try:
                # A letter that cannot be sent must not stand in the way of those behind it.
                await self._quarantine.once(
                    "message",
                    partial(_send, publisher, event_id, letter),
                    passes=(Unavailable, NotFound),
                )
            except (Unavailable, NotFound) as error:
                _log.debug(
                    "message not sent", extra={"subject": letter.subject, "problem": str(error)}
                )
                return
            self._letters.pop(event_id, None)


async def _send(publisher: Publisher, event_id: str, letter: Letter) -> None:
    headers = event_headers(
        event_id=event_id,
        event_type=letter.event_type,
        source=letter.source,
        time_s=letter.time_s,
        traceparent=letter.traceparent,
    )
    await publisher.publish_stored(
        letter.subject, encode(letter.record), headers=headers, message_id=event_id
    )
