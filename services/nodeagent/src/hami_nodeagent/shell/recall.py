# SPDX-License-Identifier: Apache-2.0
"""Executes the decisions of ``core.recall`` on one node: gates, driver calls, Events, metrics.

Facts are collected every ``MOVING_S`` while memory is moved, every ``AWAITED_S`` while a container
waits for idle ones, and otherwise when a container begins to wait or the picture changes. Driver
calls are made by ``hami-recall``, so nothing here waits for the driver. An eviction is requested
until the API server accepts it. Times in seconds of CLOCK_MONOTONIC.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import anyio
import anyio.to_thread

from hami_common.errors import HamiError, NotFound
from hami_common.events.usage import RecallUse
from hami_common.ports import KubeApi
from hami_common.runtime.kubeio import EventRecorder, ObjectRef
from hami_common.units import MIB_BYTES
from hami_nodeagent.core.holders import Holder, holders_of
from hami_nodeagent.core.priorities import ContainerKey, key_of
from hami_nodeagent.core.recall import (
    LOST,
    Action,
    Answer,
    Call,
    Evict,
    Facts,
    Phase,
    PodEvent,
    Recaller,
    ReportKind,
    SetGate,
)
from hami_nodeagent.core.recalluse import RecallUses
from hami_nodeagent.drivers.errors import DriverError
from hami_nodeagent.drivers.protocol import DeviceUsage
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.eviction import evict
from hami_nodeagent.shell.gates import Gates
from hami_nodeagent.shell.headroom import Headroom
from hami_nodeagent.shell.owners import ContainerName, Owner, find_owners
from hami_nodeagent.shell.recallfacts import (
    FindOwners,
    Observer,
    groups_of,
    memory_by_pid,
    rooms_of,
)
from hami_nodeagent.shell.recallhelper import RecallHelper
from hami_nodeagent.shell.site import Site

MOVING_S = 0.1
AWAITED_S = 0.25
IDLE_S = 10.0
_PAUSE_S = 0.01
"""Shortest interval between two looks."""
_EVENT_S = 60.0
"""Shortest interval between two Events of one reason on a pod; refusals have ``retry_s``."""
EVICT_S = 2.0
STUCK_S = 30.0
"""Time without any action after which the facts are collected less often."""
STUCK_LOOK_S = 1.0
_EVENTS_MOST = 256
_OPERATION_BY_EVENT = {"RecallParked": "park", "RecallReturned": "return"}

_log = logging.getLogger(__name__)

ReadUsage = Callable[[], Awaitable[Sequence[DeviceUsage]]]


class RecallWatch:
    """Parks and returns the containers of one node."""

    def __init__(
        self,
        *,
        site: Site,
        bells: Doorbells,
        gates: Gates,
        usage: ReadUsage,
        events: Callable[[], EventRecorder | None],
        kube: Callable[[], KubeApi | None],
        owners: FindOwners | None = None,
    ) -> None:
        """Create the watch; the peers are read at each use, as each may be unset until then.

        ``owners`` replaces the search in ``/proc`` for the containers of processes.
        """
        settings = site.settings
        self._site = site
        self._picture = site.picture
        self._bells = bells
        self._gates = gates
        self._usage = usage
        self._events = events
        self._kube = kube
        proc = self._proc = Path(settings.host_proc)
        root = Path(settings.host_root) if settings.host_root else proc / "1" / "root"
        self._containers: Mapping[str, ContainerName] = {}
        """Containers by the id in their pod's status."""
        self._observer = Observer(
            proc=proc,
            pods_dir=Path(settings.pods_dir),
            gates=gates,
            owners=owners or self._find_owners,
            headroom=Headroom(proc, root),
        )
        self._recaller = Recaller(settings.recall)
        self._helper = RecallHelper(
            settings.recall.helper, clock=site.clock, answered=self._answered
        )
        self._woken = anyio.Event()
        self._usages: Sequence[DeviceUsage] = ()
        self._memory_read_s = 0.0
        self._told_s: dict[tuple[ContainerKey, str], float] = {}
        self._uses = RecallUses()
        self._holder_by_key: dict[ContainerKey, Holder] = {}
        """Present containers, and ended ones for which memory was moved."""
        self._to_evict: set[ContainerKey] = set()
        self._has_run = False
        self._acted_s = 0.0
        self._events_due: deque[PodEvent] = deque(maxlen=_EVENTS_MOST)
        self._has_reports = anyio.Event()

    async def run(self) -> None:
        """Look until cancelled; the helper runs while a container has a gate.

        After a failure all states are asked again, because decisions may not have been executed.
        """
        if self._has_run:
            self._recaller = Recaller(self._site.settings.recall)
            self._gates.new.clear()
        self._has_run = True
        self._bells.listeners.append(self._heard)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._report)
                while True:
                    changed = self._picture.changed
                    if await self._look():
                        await self._recall()
                    else:
                        await changed.wait()
        finally:
            self._bells.listeners.remove(self._heard)

    def request(self, pod_uid: str) -> tuple[int, int]:
        """Request that the idle containers of a pod be parked; see ``Recaller.request``."""
        self._woken.set()
        return self._recaller.request(pod_uid, now_s=self._site.clock.monotonic_s())

    async def _recall(self) -> None:
        """Look until no container has a gate, with a helper."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._helper.run)
            while True:
                changed = self._picture.changed
                self._woken = anyio.Event()
                if not await self._look():
                    break
                await self._rest(changed)
            group.cancel_scope.cancel()

    async def _rest(self, changed: anyio.Event) -> None:
        """Wait until the next look is due."""
        await self._site.clock.sleep(_PAUSE_S)
        now_s = self._site.clock.monotonic_s()
        wait_s = AWAITED_S if self._recaller.is_awaited(now_s) else IDLE_S
        if self._recaller.is_moving:
            wait_s = MOVING_S if now_s - self._acted_s < STUCK_S else STUCK_LOOK_S

        async def follow(event: anyio.Event) -> None:
            await event.wait()
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(follow, changed)
            group.start_soon(follow, self._woken)
            await self._site.clock.sleep(wait_s)
            group.cancel_scope.cancel()

    def _heard(self, key: ContainerKey, pid: int, kind: ReportKind, turn: int | None) -> None:
        """Pass on a report of a recalled container, unless it is about an earlier closure."""
        own = self._gates.turn_of(key)
        if own is None or (kind != "waits" and turn != own):
            return
        if self._recaller.heard(key, pid, kind, now_s=self._site.clock.monotonic_s()):
            self._woken.set()

    def _answered(self, call: Call, answer: Answer) -> None:
        if answer != LOST and not answer.is_ok:
            extra = {"verb": call.verb, "pid": call.pid, "problem": answer.name}
            _log.warning("recall call failed", extra=extra)
        self._recaller.answered(call, answer, now_s=self._site.clock.monotonic_s())
        self._woken.set()

    async def _look(self) -> bool:
        """Collect facts and execute decisions; return whether any container has a gate."""
        if self._recaller.is_moving or not self._memory_read_s:
            await self._read_memory()
        self._recaller.rules = self._site.settings.recall
        devices = self._picture.view.devices_by_uuid
        holders = holders_of(
            self._picture.entries_by_uid, self._picture.pods, self._picture.grants, devices
        )
        wanting = self._recaller.wanting
        self._holder_by_key = {
            key: one for key, one in self._holder_by_key.items() if key in wanting
        }
        self._holder_by_key |= {key_of(one): one for one in holders}
        groups = groups_of(holders, devices, lambda key: self._gates.is_open(key) is not None)
        self._containers = {
            container_id: (pod.uid, container)
            for pod in self._picture.pods
            for container_id, container in pod.container_by_id.items()
        }
        tenants, failed = await anyio.to_thread.run_sync(
            self._observer.tenants, groups, memory_by_pid(self._usages)
        )
        for one, error in failed:
            extra = {"container": "/".join(one.key)}
            _log.error("container not observed", extra=extra, exc_info=error)
        facts = Facts(
            now_s=self._site.clock.monotonic_s(),
            tenants=tenants,
            card_mib=rooms_of(groups, devices),
            free_mib={
                one.uuid: one.total_mib - one.used_mib
                for one in self._usages
                if one.total_mib is not None and one.used_mib is not None
            },
            memory_read_s=self._memory_read_s,
            is_helper_ready=self._helper.is_ready,
        )
        for action in self._recaller.look(facts):
            self._acted_s = facts.now_s
            self._execute(action)
        self._gates.keep_only({group.key for group in groups if group.has_gate})
        self._show(facts.now_s)
        return any(group.has_gate for group in groups)

    async def _read_memory(self) -> None:
        """Ask the driver for free and used memory; without an answer the last figures stay."""
        began_s = self._site.clock.monotonic_s()
        try:
            self._usages = await self._usage()
        except DriverError as error:
            _log.debug("device memory not read", extra={"problem": str(error)})
        else:
            self._memory_read_s = began_s

    def _find_owners(self, pids: Collection[int]) -> Mapping[int, Owner]:
        by = self._site.settings.usage.owners
        return find_owners(self._proc, pids, self._containers, by=by)

    # Actions

    def _execute(self, action: Action) -> None:
        if isinstance(action, SetGate):
            try:
                self._gates.set(action.key, is_open=action.is_open)
            except OSError as error:
                extra = {"container": "/".join(action.key), "problem": error.strerror}
                _log.error("gate not set", extra=extra)
        elif isinstance(action, Call):
            self._helper.send(action)
        elif isinstance(action, Evict):
            self._to_evict.add(action.key)
            self._has_reports.set()
        else:
            self._count(action)
            self._events_due.append(action)
            self._has_reports.set()

    def _count(self, event: PodEvent) -> None:
        """Count a result and log it."""
        metrics, operation = self._site.metrics.recall, _OPERATION_BY_EVENT.get(event.event)
        if operation is not None:
            metrics.seconds.labels(operation=operation).observe(event.took_s)
            metrics.moved.labels(operation=operation).inc(event.moved_mib * MIB_BYTES)
            if operation == "park":
                self._note_move(event)
        else:
            metrics.failures.labels(reason=event.reason).inc()
        extra = {"container": "/".join(event.key), "text": event.text}
        _log.log(logging.WARNING if operation is None else logging.INFO, event.event, extra=extra)

    def _note_move(self, event: PodEvent) -> None:
        """Count a move for the usage messages, with the container that waited for the memory."""
        moved = self._holder_by_key.get(event.key)
        cause = self._holder_by_key.get(event.wanted_by) if event.wanted_by is not None else None
        if moved is None:
            return
        self._uses.moved(moved, cause, moved_mib=event.moved_mib)

    def uses(self) -> tuple[RecallUse, ...]:
        """Return the moves of the present containers since the start of the agent."""
        return self._uses.all()

    # Reports to the API server, which nothing waits for

    async def _report(self) -> None:
        """Record Events and request evictions until cancelled."""
        while True:
            await self._has_reports.wait()
            self._has_reports = anyio.Event()
            while self._events_due or self._to_evict:
                while self._events_due:
                    await self._record(self._events_due.popleft())
                await self._evict()
                if self._to_evict:
                    await self._site.clock.sleep(EVICT_S)

    async def _record(self, event: PodEvent) -> None:
        now_s, pod = self._site.clock.monotonic_s(), self._picture.pods.find(event.key[0])
        is_normal = event.event in _OPERATION_BY_EVENT
        recorder, last_s = self._events(), self._told_s.get((event.key, event.event))
        is_due = not is_normal or last_s is None or now_s - last_s >= _EVENT_S
        if pod is None or recorder is None or not is_due:
            return
        self._told_s[event.key, event.event] = now_s
        await recorder.record(
            ObjectRef(kind="Pod", namespace=pod.namespace, name=pod.name, uid=pod.uid),
            reason=event.event,
            message=f"container {event.key[1]}: {event.text}",
            kind="Normal" if is_normal else "Warning",
        )

    def _show(self, now_s: float) -> None:
        """Set the gauges."""
        shown = self._recaller.shown(now_s)
        for phase in get_args(Phase):
            count = sum(one.phase == phase for one in shown)
            self._site.metrics.recall.containers.labels(phase=phase).set(count)
        self._site.metrics.recall.waiting.set(sum(one.is_waiting for one in shown))
        moved_mib = sum(one.moved_mib for one in shown)
        self._site.metrics.recall.parked.set(moved_mib * MIB_BYTES)
        keys = {one.key for one in shown}
        self._told_s = {what: at for what, at in self._told_s.items() if what[0] in keys}
        self._to_evict &= keys
        self._uses.keep(keys)

    async def _evict(self) -> None:
        """Request the evictions that were not accepted yet."""
        kube = self._kube()
        if kube is None:
            return
        for key in tuple(self._to_evict):
            await self._site.quarantine.run(
                "eviction", "/".join(key), partial(self._evict_one, kube, key), is_retried=False
            )

    async def _evict_one(self, kube: KubeApi, key: ContainerKey) -> None:
        pod = self._picture.pods.find(key[0])
        try:
            if pod is not None:
                await evict(kube, pod)
        except NotFound:
            _log.info("pod to evict is gone", extra={"pod": "/".join(key)})
        except HamiError as error:
            _log.warning("not evicted", extra={"pod": "/".join(key), "problem": str(error)})
            return
        self._to_evict.discard(key)
