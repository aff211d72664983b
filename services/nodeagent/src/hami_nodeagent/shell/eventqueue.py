# SPDX-License-Identifier: Apache-2.0
"""Queues Kubernetes Events of loops that must not wait for the API server, such as for leases."""

from collections import deque
from collections.abc import Callable
from typing import Literal

import anyio
from msgspec import Struct

from hami_common.runtime.kubeio import EventRecorder, ObjectRef

EVENTS_MOST = 1024


class _Due(Struct, frozen=True, kw_only=True):
    regarding: ObjectRef
    reason: str
    message: str
    kind: Literal["Normal", "Warning"]


class EventQueue:
    """Events of one loop; the oldest are dropped beyond ``EVENTS_MOST``."""

    def __init__(self, events: Callable[[], EventRecorder | None]) -> None:
        """``events`` returns ``None`` before the API server was reached: Events are then lost."""
        self._events = events
        self._due: deque[_Due] = deque(maxlen=EVENTS_MOST)
        self._has_due = anyio.Event()

    def put(
        self,
        regarding: ObjectRef,
        *,
        reason: str,
        message: str,
        kind: Literal["Normal", "Warning"],
    ) -> None:
        """Append an Event."""
        self._due.append(_Due(regarding=regarding, reason=reason, message=message, kind=kind))
        self._has_due.set()

    async def run(self) -> None:
        """Record Events until cancelled; those that the API server does not accept are lost."""
        while True:
            await self._has_due.wait()
            self._has_due = anyio.Event()
            while self._due:
                one = self._due.popleft()
                recorder = self._events()
                if recorder is not None:
                    await recorder.record(
                        one.regarding, reason=one.reason, message=one.message, kind=one.kind
                    )
