# SPDX-License-Identifier: Apache-2.0
"""Events about pods, in the form kube-scheduler writes them (events.k8s.io/v1).

A repetition of the same event becomes a series: the first object is patched with a growing count.
Losing an event is never an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import anyio

from hami_common.errors import HamiError
from hami_sim.apiserver.errors import Obj
from hami_sim.kube import Objects

_LOG: Final = logging.getLogger(__name__)
_RESOURCE: Final = "events.events.k8s.io"
_NOTE_MAX: Final = 1024
_KEPT: Final = 4096


def _micro(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class EventWriter:
    """Writes events one after another from a bounded queue; a full queue drops the newest."""

    def __init__(self, client: Objects, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._send, self._receive = anyio.create_memory_object_stream[
            tuple[Obj, str, str, str, str]
        ](1000)
        self._known: dict[tuple[str, str, str], tuple[str, int]] = {}

    def write(self, pod: Obj, *, kind: str, reason: str, action: str, note: str) -> None:
        """Queue one event."""
        try:
            self._send.send_nowait((pod, kind, reason, action, note[:_NOTE_MAX]))
        except anyio.WouldBlock:
            _LOG.warning("event dropped", extra={"reason": reason})

    async def run(self) -> None:
        """Write events until cancelled."""
        async for pod, kind, reason, action, note in self._receive:
            try:
                await self._one(pod, kind, reason, action, note)
            except HamiError as error:
                _LOG.info("event lost", extra={"reason": reason, "why": repr(error)})

    def close(self) -> None:
        """Release the queue."""
        self._send.close()
        self._receive.close()

    async def _one(self, pod: Obj, kind: str, reason: str, action: str, note: str) -> None:
        metadata = pod["metadata"]
        now_s = self._clock()
        key = (metadata["uid"], reason, note)
        known = self._known.get(key)
        if known is not None:
            name, seen = known
            self._known[key] = (name, seen + 1)
            series = {"count": seen + 1, "lastObservedTime": _micro(now_s)}
            await self._client.patch(
                _RESOURCE, name, {"series": series}, namespace=metadata["namespace"]
            )
            return
        name = f"{metadata['name']}.{int(now_s * 1e9):x}"
        profile = pod["spec"].get("schedulerName", "")
        await self._client.create(
            _RESOURCE,
            {
                "kind": "Event",
                "apiVersion": "events.k8s.io/v1",
                "metadata": {"name": name, "namespace": metadata["namespace"]},
                "eventTime": _micro(now_s),
                "reportingController": profile,
                "reportingInstance": f"{profile}-hami-sim",
                "action": action,
                "reason": reason,
                "regarding": {
                    "kind": "Pod",
                    "apiVersion": "v1",
                    "namespace": metadata["namespace"],
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "resourceVersion": metadata["resourceVersion"],
                },
                "note": note,
                "type": kind,
            },
        )
        if len(self._known) >= _KEPT:
            self._known.pop(next(iter(self._known)))
        self._known[key] = (name, 1)
