# SPDX-License-Identifier: Apache-2.0
"""The scheduling queue: active, backing off, and unschedulable pods.

A pod that found no node waits in *unschedulable* until a cluster event, then for the rest of its
backoff; a pod whose attempt broke (extender down, bind refused) goes to *backoff* at once. An event
that arrives while a pod is being tried counts as having arrived after it. As
``pkg/scheduler/backend/queue`` (Kubernetes 1.34); which events matter is the caller's decision.
Pure but for an injected clock reading; times in seconds.
"""

from __future__ import annotations

import heapq
from itertools import count

import msgspec

from hami_sim.apiserver.errors import Obj


class Waiting(msgspec.Struct, kw_only=True):
    """One pod's place in the queue."""

    pod: Obj
    attempts: int = 0
    tried_at_s: float = 0.0
    moves_seen: int = 0
    """Cluster events counted when the last attempt began."""

    @property
    def uid(self) -> str:
        """Return the pod's uid."""
        return str(self.pod["metadata"]["uid"])

    @property
    def priority(self) -> int:
        """Return the pod's priority."""
        return int(self.pod["spec"].get("priority") or 0)


class SchedulingQueue:
    """Pods waiting for a node."""

    def __init__(self, *, initial_s: float, max_s: float, flush_s: float) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._flush_s = flush_s
        self._order = count()
        self._active: list[tuple[int, int, str]] = []
        self._active_uids: dict[str, Waiting] = {}
        self._backoff: dict[str, Waiting] = {}
        self._unschedulable: dict[str, Waiting] = {}
        self._in_flight: dict[str, Waiting] = {}
        self._moves = 0

    def _push(self, waiting: Waiting) -> None:
        self._active_uids[waiting.uid] = waiting
        heapq.heappush(self._active, (-waiting.priority, next(self._order), waiting.uid))

    def add(self, pod: Obj) -> None:
        """Take a new pod."""
        self._push(Waiting(pod=pod))

    def update(self, pod: Obj, *, wakes: bool) -> None:
        """Take a new version of a waiting pod; `wakes` says whether it may now fit."""
        uid = pod["metadata"]["uid"]
        for place in (self._active_uids, self._backoff, self._in_flight):
            if uid in place:
                place[uid].pod = pod
                if wakes and place is self._in_flight:
                    self._moves += 1
                return
        if uid in self._unschedulable:
            self._unschedulable[uid].pod = pod
            if wakes:
                self._backoff[uid] = self._unschedulable.pop(uid)
            return
        self.add(pod)

    def remove(self, uid: str) -> None:
        """Forget a pod."""
        for place in (self._active_uids, self._backoff, self._unschedulable, self._in_flight):
            place.pop(uid, None)

    def pop(self, now_s: float) -> Waiting | None:
        """Take the next pod to try, highest priority first."""
        self.wake(now_s)
        while self._active:
            _, _, uid = heapq.heappop(self._active)
            waiting = self._active_uids.pop(uid, None)
            if waiting is not None:
                waiting.attempts += 1
                waiting.tried_at_s = now_s
                waiting.moves_seen = self._moves
                self._in_flight[uid] = waiting
                return waiting
        return None

    def done(self, uid: str) -> None:
        """Close an attempt that succeeded, or a pod that needs none any more."""
        self._in_flight.pop(uid, None)

    def back(self, waiting: Waiting, now_s: float, *, unschedulable: bool) -> None:
        """Put a pod back after a failed attempt."""
        if self._in_flight.pop(waiting.uid, None) is None:
            return
        waiting.tried_at_s = now_s
        if unschedulable and waiting.moves_seen == self._moves:
            self._unschedulable[waiting.uid] = waiting
        else:
            self._backoff[waiting.uid] = waiting

    def moved(self) -> None:
        """Note a cluster event that may help any unschedulable pod."""
        self._moves += 1
        self._backoff.update(self._unschedulable)
        self._unschedulable.clear()

    def _ready_at_s(self, waiting: Waiting) -> float:
        doublings = max(waiting.attempts - 1, 0)
        backoff_s = min(self._initial_s * 2.0**doublings, self._max_s)
        return waiting.tried_at_s + backoff_s

    def wake(self, now_s: float) -> None:
        """Activate pods whose backoff is over, and those unschedulable for too long."""
        for uid, waiting in list(self._unschedulable.items()):
            if now_s - waiting.tried_at_s >= self._flush_s:
                self._backoff[uid] = self._unschedulable.pop(uid)
        for uid, waiting in list(self._backoff.items()):
            if self._ready_at_s(waiting) <= now_s:
                self._push(self._backoff.pop(uid))

    def next_wake_s(self) -> float | None:
        """Return when `wake` would next change something, if ever."""
        times = [self._ready_at_s(waiting) for waiting in self._backoff.values()]
        times += [w.tried_at_s + self._flush_s for w in self._unschedulable.values()]
        return min(times, default=None)

    def counts(self) -> dict[str, int]:
        """Count pods by place."""
        return {
            "active": len(self._active_uids),
            "backoff": len(self._backoff),
            "unschedulable": len(self._unschedulable),
            "in_flight": len(self._in_flight),
        }
