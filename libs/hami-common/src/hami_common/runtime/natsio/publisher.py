# SPDX-License-Identifier: Apache-2.0
"""Publishes messages that are not bucket values (port ``Publisher``)."""

from collections.abc import Mapping, Sequence

from hami_common.errors import HamiError
from hami_common.ports import Outgoing
from hami_common.runtime.natsio.client import Question
from hami_common.runtime.natsio.connection import Bus
from hami_common.runtime.natsio.jetstream import MESSAGE_ID, store, store_all


class NatsPublisher:
    """Port ``Publisher`` over NATS."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish without acknowledgement; dropped while the bus is unavailable."""
        await self._bus.publish(subject, data, headers=headers)

    async def publish_stored(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        message_id: str = "",
    ) -> int:
        """Store the message; a repeated ``message_id`` of a subject is dropped for two minutes."""
        all_headers = dict(headers or {})
        if message_id:
            all_headers[MESSAGE_ID] = _id(subject, message_id)
        return await store(self._bus, subject, data, headers=all_headers)

    async def publish_all_stored(self, messages: Sequence[Outgoing]) -> list[int | HamiError]:
        """Store several messages at once; see the port."""
        return await store_all(
            self._bus,
            [
                Question(
                    subject=message.subject,
                    data=message.data,
                    headers={
                        **message.headers,
                        MESSAGE_ID: _id(message.subject, message.message_id),
                    },
                )
                for message in messages
            ],
        )


def _id(subject: str, message_id: str) -> str:
    """An id that is unique across subjects: the server compares the ids of a whole stream."""
    return f"{subject}/{message_id}"
