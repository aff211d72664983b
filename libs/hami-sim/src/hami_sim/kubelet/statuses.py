# SPDX-License-Identifier: Apache-2.0
"""Sends pod statuses, deletions and events to the API server; knows each pod's newest status.

A status is sent as a strategic merge patch with the pod's UID in it, so it can never land on a pod
of the same name that came later. Several quick changes of one pod become one patch. Failed sends
are tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

from hami_common.errors import Conflict, HamiError, NotFound
from hami_sim.kube import STRATEGIC, Objects, is_invalid
from hami_sim.kubelet.objects import TERMINAL, Obj, key_of, uid_of
from hami_sim.kubelet.podstatus import timestamp

_LOG = logging.getLogger(__name__)
_SENDERS: Final = 4
_RETRY_S: Final = 1.0
_EVENTS_KEPT: Final = 1000
"""The pod is no more, or another one has its name."""


class StatusManager:
    """Newest status per pod, and the tasks that bring it to the API server."""

    def __init__(self, client: Objects, *, node: str, now_s: Callable[[], float]) -> None:
        self._client = client
        self._node = node
        self._now_s = now_s
        self._status: dict[str, Obj] = {}
        self._pods: dict[str, Obj] = {}
        self._sent: dict[str, Obj] = {}
        self._dirty: dict[str, None] = {}
        self._wake = anyio.Event()
        self._idle: dict[str, anyio.Event] = {}
        self._events: MemoryObjectSendStream[Obj] | None = None
        self._event_count = 0

    async def run(self, tasks: TaskGroup, *, events: bool) -> None:
        """Start the senders."""
        for number in range(_SENDERS):
            tasks.start_soon(self._send_all, name=f"status sender {number}")
        if events:
            self._events, stream = anyio.create_memory_object_stream[Obj](_EVENTS_KEPT)
            tasks.start_soon(self._send_events, stream, name="event sender")

    def close(self) -> None:
        """Take no more events."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def get(self, uid: str) -> Obj | None:
        """Return the newest status made here."""
        return self._status.get(uid)

    def is_terminal(self, uid: str) -> bool:
        """Return true if this kubelet has set a final phase for the pod."""
        status = self._status.get(uid)
        return status is not None and status["phase"] in TERMINAL

    def set(self, pod: Obj, status: Obj) -> None:
        """Take a pod's new status; it is sent if it differs from what was sent last."""
        uid = uid_of(pod)
        self._pods[uid] = pod
        self._status[uid] = status
        if self._sent.get(uid) != status:
            self._dirty[uid] = None
            self._idle.setdefault(uid, anyio.Event())
            self._wake.set()

    def forget(self, uid: str) -> None:
        """Drop a pod that is no more."""
        for known in (self._status, self._pods, self._sent, self._dirty):
            known.pop(uid, None)
        idle = self._idle.pop(uid, None)
        if idle is not None:
            idle.set()

    async def flush(self, uid: str) -> None:
        """Return when the newest status of a pod has arrived."""
        while (idle := self._idle.get(uid)) is not None:
            await idle.wait()

    async def _send_all(self) -> None:
        while True:
            uid = next(iter(self._dirty), None)
            if uid is None:
                self._wake = self._wake if not self._wake.is_set() else anyio.Event()
                await self._wake.wait()
                continue
            del self._dirty[uid]
            status = self._status[uid]
            try:
                await self._send(self._pods[uid], status)
            except HamiError as error:
                _LOG.info("status not sent", extra={"pod_uid": uid, "error": str(error)})
                await anyio.sleep(_RETRY_S)
                if uid in self._status:
                    self._dirty[uid] = None
                    self._wake.set()
                continue
            if uid in self._status:
                self._sent[uid] = status
            if uid not in self._dirty and (idle := self._idle.pop(uid, None)) is not None:
                idle.set()

    async def _send(self, pod: Obj, status: Obj) -> None:
        namespace, name = key_of(pod)
        patch = {"metadata": {"uid": uid_of(pod)}, "status": status}
        try:
            await self._client.patch(
                "pods", name, patch, namespace=namespace, kind=STRATEGIC, subresource="status"
            )
        except HamiError as error:
            if not _is_gone(error):
                raise
            _LOG.info("status is for a pod that is gone", extra={"pod": name, "error": str(error)})

    async def delete(self, pod: Obj) -> None:
        """Remove a pod that has ended and was asked to go; its status goes first."""
        await self.flush(uid_of(pod))
        namespace, name = key_of(pod)
        options = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": uid_of(pod)},
        }
        while True:
            try:
                await self._client.delete("pods", name, namespace, body=options)
            except HamiError as error:
                if _is_gone(error):
                    return
                _LOG.info("pod not deleted", extra={"pod": name, "error": str(error)})
            else:
                return
            await anyio.sleep(_RETRY_S)

    # -- events

    def event(self, pod: Obj, reason: str, message: str, *, is_warning: bool = False) -> None:
        """Queue an event about a pod; dropped when a thousand wait already."""
        if self._events is None:
            return
        namespace, name = key_of(pod)
        self._event_count += 1
        moment = timestamp(self._now_s())
        event = {
            "metadata": {
                "name": f"{name[:200]}.{int(self._now_s() * 1e6):x}{self._event_count:x}",
                "namespace": namespace,
            },
            "involvedObject": {
                "kind": "Pod",
                "apiVersion": "v1",
                "namespace": namespace,
                "name": name,
                "uid": uid_of(pod),
                "resourceVersion": pod["metadata"].get("resourceVersion", ""),
            },
            "reason": reason,
            "message": message,
            "type": "Warning" if is_warning else "Normal",
            "source": {"component": "kubelet", "host": self._node},
            "reportingComponent": "kubelet",
            "reportingInstance": self._node,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        with suppress(anyio.WouldBlock):
            self._events.send_nowait(event)

    async def _send_events(self, stream: anyio.abc.ObjectReceiveStream[Obj]) -> None:
        async with stream:
            async for event in stream:
                try:
                    await self._client.create("events", event)
                except HamiError as error:
                    _LOG.debug("event not sent", extra={"error": str(error)})


def _is_gone(error: HamiError) -> bool:
    """Return true if the pod no longer exists or another pod has its name."""
    return isinstance(error, (NotFound, Conflict)) or is_invalid(error)
