# SPDX-License-Identifier: Apache-2.0
"""Keeps messages that inform until the bus takes them, up to a bound; nothing is decided on them.

Messages go out in the order in which they came. What the bus does not take stays, and goes with the
next ``send``; when there are too many, the oldest are dropped. What the bus refuses for good is
dropped as well.
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
"""Messages kept while the bus is away."""

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
    """Messages on their way."""

    def __init__(self, publisher: Callable[[], Publisher | None], quarantine: Quarantine) -> None:
        """The bus is asked for at each use: it may not have been reached yet."""
        self._publisher = publisher
        self._quarantine = quarantine
        self._letters: OrderedDict[str, Letter] = OrderedDict()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._letters)

    def put(self, letter: Letter) -> None:
        """Have it sent some time."""
        self._letters[secrets.token_hex(16)] = letter
        while len(self._letters) > PENDING_MAX:
            self._letters.popitem(last=False)

    async def send(self) -> None:
        """Send what waits, until the bus does not take one."""
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
