# SPDX-License-Identifier: Apache-2.0
"""The scheduling loop: watch pods and nodes, choose a node for one pod at a time, bind.

One task takes pods from the queue and runs filter and score, in-tree and at the extenders, strictly
one pod at a time; each bind runs in a task of its own while the pod is counted as assumed on its
node. Refusals and errors end in the pod's PodScheduled condition, written only when it changes, and
in a FailedScheduling event. As ``pkg/scheduler/schedule_one.go`` (Kubernetes 1.34), without
preemption (which, with extender-managed resources, finds no victims there either).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import aiohttp
import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from hami_common.errors import HamiError
from hami_common.runtime.clock import SystemClock
from hami_sim.apiserver.calls import rfc3339
from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.server import leave
from hami_sim.kube import STRATEGIC, Access, Objects
from hami_sim.kubescheduler import claims, fit
from hami_sim.kubescheduler.devices import AllocationFailed
from hami_sim.kubescheduler.events import EventWriter
from hami_sim.kubescheduler.extender import Extender, ExtenderFailed
from hami_sim.kubescheduler.queue import SchedulingQueue, Waiting
from hami_sim.kubescheduler.settings import SchedulerSettings

_LOG: Final = logging.getLogger(__name__)
_IDLE_S: Final = 60.0
_FINISHED: Final = frozenset({"Succeeded", "Failed"})


class Unschedulable(Exception):
    """No node takes the pod."""

    def __init__(self, refusals: dict[str, fit.NodeRefusal], total: int, text: str) -> None:
        super().__init__(text)
        self.refusals = refusals
        self.total = total


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A record of one attempt, for tests to read."""

    pod: str
    """namespace/name"""
    node: str = ""
    error: str = ""


class SimScheduler:
    """A running scheduler; use it as an async context manager."""

    def __init__(self, access: Access, settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        self.attempts: list[Attempt] = []
        self._access = access
        self._clock = SystemClock()
        self._client = Objects(access, user_agent="kube-scheduler (hami-sim)")
        self.queue = SchedulingQueue(
            initial_s=self.settings.initial_backoff_s,
            max_s=self.settings.max_backoff_s,
            flush_s=self.settings.unschedulable_flush_s,
        )
        self._claims = claims.Claims(
            self._client, moved=self._claims_moved, ignored_by=self.settings.without_claims
        )
        self._gated: dict[str, Obj] = {}
        """Pods whose claims do not all exist, by uid."""
        self._nodes: dict[str, fit.NodeState] = {}
        self._orphans: dict[str, dict[str, Obj]] = {}
        self._assumed: dict[str, str] = {}
        self._extenders: list[Extender] = []
        self._random = random.Random(self.settings.seed)
        self._wake = anyio.Event()
        self._binds = anyio.Semaphore(self.settings.binds_at_once)
        self._tasks: TaskGroup | None = None
        self._session: aiohttp.ClientSession | None = None
        self._events = EventWriter(self._client, self._clock.now_s)

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._extenders = [Extender(item, self._session) for item in self.settings.extenders]
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        await self._tasks.start(self._follow, "nodes", self._node_seen)
        for resource in claims.RESOURCES:
            await self._tasks.start(self._follow, resource, self._claims.seen(resource))
        await self._tasks.start(self._follow, "pods", self._pod_seen)
        self._tasks.start_soon(self._events.run)
        self._tasks.start_soon(self._run)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        suppressed: bool | None = None
        if self._tasks is not None:
            suppressed = await leave(self._tasks, kind, error, trace)
        with anyio.CancelScope(shield=True):
            self._events.close()
            if self._session is not None:
                await self._session.close()
            await self._client.__aexit__(None, None, None)
        return suppressed

    def node_version(self, name: str) -> str:
        """Return the resourceVersion of a node as last seen; empty if it is not known."""
        state = self._nodes.get(name)
        return "" if state is None else str(state.node["metadata"]["resourceVersion"])

    # -- changes in the cluster

    async def _follow(
        self,
        resource: str,
        seen: Callable[[Obj | None, Obj | None], None],
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        started = anyio.Event()

        def synced() -> None:
            if not started.is_set():
                started.set()
                task_status.started()

        await self._client.follow(resource, seen, synced=synced)

    def _node_seen(self, old: Obj | None, new: Obj | None) -> None:
        if new is None:
            if old is not None:
                state = self._nodes.pop(old["metadata"]["name"], None)
                if state is not None and state.pods:
                    self._orphans[state.name] = state.pods
            return
        name = new["metadata"]["name"]
        state = self._nodes.get(name)
        if state is None:
            state = self._nodes[name] = fit.NodeState(new)
            for pod in self._orphans.pop(name, {}).values():
                state.add(pod)
        else:
            state.update(new)
        if old is None or _node_facts(old) != _node_facts(new):
            self._moved()

    def _moved(self) -> None:
        self.queue.moved()
        self._wake.set()

    def _claims_moved(self) -> None:
        for pod in [pod for pod in self._gated.values() if self._claims.are_there(pod)]:
            self._pod_seen(None, pod)
        self._moved()

    def _pod_seen(self, old: Obj | None, new: Obj | None) -> None:
        obj = new or old
        if obj is not None:
            self._gated.pop(obj["metadata"]["uid"], None)
        if old is not None and _on_node(old) and (new is None or not _on_node(new)):
            self._uncount(old)
            self._moved()
        if new is None:
            if old is not None:
                self.queue.remove(old["metadata"]["uid"])
                if self._assumed.get(old["metadata"]["uid"]):
                    self._uncount(old)
                    self._moved()
            return
        if _on_node(new):
            self._assigned(old, new)
        elif self._is_mine(new) and not self._claims.are_there(new):
            self._gated[new["metadata"]["uid"]] = new
            self.queue.remove(new["metadata"]["uid"])
        elif self._is_mine(new):
            wakes = old is not None and _pod_facts(old) != _pod_facts(new)
            self.queue.update(new, wakes=wakes)
            self._wake.set()
        else:
            self.queue.remove(new["metadata"]["uid"])

    def _assigned(self, old: Obj | None, new: Obj) -> None:
        uid = new["metadata"]["uid"]
        self.queue.remove(uid)
        guessed = self._assumed.pop(uid, None)
        node = new["spec"]["nodeName"]
        if guessed is not None and guessed != node and guessed in self._nodes:
            self._nodes[guessed].remove(new)
        state = self._nodes.get(node)
        if state is None:
            self._orphans.setdefault(node, {})[uid] = new
        else:
            state.add(new)
        was_there = old is not None and _on_node(old)
        if not was_there or (old is not None and _pod_facts(old) != _pod_facts(new)):
            self._moved()

    def _uncount(self, pod: Obj) -> None:
        uid = pod["metadata"]["uid"]
        node = self._assumed.pop(uid, None) or pod["spec"].get("nodeName", "")
        if node in self._nodes:
            self._nodes[node].remove(pod)
        self._orphans.get(node, {}).pop(uid, None)

    def _is_mine(self, pod: Obj) -> bool:
        spec, metadata = pod["spec"], pod["metadata"]
        return (
            spec.get("schedulerName") in self.settings.profiles
            and not spec.get("nodeName")
            and not spec.get("schedulingGates")
            and not metadata.get("deletionTimestamp")
            and (pod.get("status") or {}).get("phase") not in _FINISHED
            and metadata["uid"] not in self._assumed
        )

    # -- the loop

    async def _run(self) -> None:
        while True:
            self._wake = anyio.Event()
            now_s = self._clock.monotonic_s()
            waiting = self.queue.pop(now_s)
            if waiting is None:
                due_s = self.queue.next_wake_s()
                pause_s = _IDLE_S if due_s is None else max(due_s - now_s, 0.001)
                with anyio.move_on_after(pause_s):
                    await self._wake.wait()
                continue
            await self._try(waiting)

    async def _try(self, waiting: Waiting) -> None:
        pod = waiting.pod
        try:
            node = await self._choose(pod)
        except Unschedulable as error:
            await self._failed(waiting, error, "Unschedulable")
            return
        except (ExtenderFailed, AllocationFailed) as error:
            await self._failed(waiting, error, "SchedulerError")
            return
        if not self._is_mine(waiting.pod) or self._tasks is None:
            self.queue.done(waiting.uid)
            return
        self._claims.reserve(pod, node)
        self._assumed[waiting.uid] = node
        self._nodes[node].add({**pod, "spec": {**pod["spec"], "nodeName": node}})
        await self._binds.acquire()
        self._tasks.start_soon(self._bind, waiting, node)

    async def _choose(self, pod: Obj) -> str:
        ignored = self.settings.ignored_resources
        if problem := self._claims.begin(pod):
            text = f"0/{len(self._nodes)} nodes are available: {problem}."
            raise Unschedulable({}, len(self._nodes), text)
        refusals: dict[str, fit.NodeRefusal] = {}
        fitting: list[str] = []
        for name, state in self._nodes.items():
            found = fit.refusal(pod, state, ignored) or self._claims.refusal(pod, state)
            if found is None:
                fitting.append(name)
            else:
                refusals[name] = found
        interested = [extender for extender in self._extenders if extender.wants(pod)]
        for extender in interested:
            if not fitting:
                break
            nodes = {name: self._nodes[name].node for name in fitting}
            try:
                fitting, more = await extender.filter(pod, nodes)
            except ExtenderFailed:
                if extender.settings.ignorable:
                    continue
                raise
            refusals.update(more)
        fitting = [name for name in fitting if name in self._nodes]
        if not fitting:
            preempts = pod["spec"].get("preemptionPolicy") != "Never"
            total = len(self._nodes)
            text = fit.explain(refusals, total, preempts=preempts)
            if not total:
                text = "no nodes available to schedule pods"
            raise Unschedulable(refusals, total, text)
        if len(fitting) == 1:
            return fitting[0]
        return await self._best(pod, fitting, interested)

    async def _best(self, pod: Obj, fitting: list[str], interested: list[Extender]) -> str:
        totals = fit.scores(pod, [self._nodes[name] for name in fitting])
        nodes = {name: self._nodes[name].node for name in fitting}
        for extender in interested:
            try:
                extra = await extender.prioritize(pod, nodes)
            except ExtenderFailed as error:
                # The real scheduler ignores a failing prioritize as well.
                _LOG.info("prioritize failed", extra={"why": str(error)})
                continue
            for name, score in extra.items():
                if name in totals:
                    totals[name] += score
        top = max(totals.values())
        best = [name for name in fitting if totals[name] == top and name in self._nodes]
        if not best:
            msg = f"the chosen node vanished: {fitting}"
            raise ExtenderFailed(msg)
        return self._random.choice(best)

    async def _bind(self, waiting: Waiting, node: str) -> None:
        pod = waiting.pod
        metadata = pod["metadata"]
        try:
            if self._claims.has_any(pod):
                await self._nominate(pod, node)
                await self._claims.store(pod, node)
            binder = next((x for x in self._extenders if x.binds and x.wants(pod)), None)
            if binder is not None:
                await binder.bind(pod, node)
            else:
                await self._client.bind(
                    metadata["name"], node, namespace=metadata["namespace"], uid=metadata["uid"]
                )
        except (ExtenderFailed, HamiError) as error:
            if self._assumed.get(waiting.uid) == node:
                self._uncount(pod)
            await self._unreserve(pod)
            self._moved()
            await self._failed(waiting, error, "SchedulerError")
            return
        finally:
            self._binds.release()
        self.queue.done(waiting.uid)
        name = f"{metadata['namespace']}/{metadata['name']}"
        self.attempts.append(Attempt(pod=name, node=node))
        self._events.write(
            pod,
            kind="Normal",
            reason="Scheduled",
            action="Binding",
            note=f"Successfully assigned {name} to {node}",
        )

    async def _nominate(self, pod: Obj, node: str) -> None:
        """Show the node before work that precedes the bind, as since Kubernetes 1.35."""
        metadata = pod["metadata"]
        await self._client.patch(
            "pods",
            metadata["name"],
            {"metadata": {"uid": metadata["uid"]}, "status": {"nominatedNodeName": node}},
            namespace=metadata["namespace"],
            subresource="status",
        )

    async def _unreserve(self, pod: Obj) -> None:
        try:
            await self._claims.take_back(pod)
        except HamiError as error:
            _LOG.info("claim stays reserved", extra={"why": str(error)})

    async def _failed(self, waiting: Waiting, error: Exception, reason: str) -> None:
        pod = waiting.pod
        text = str(error)
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        self.attempts.append(Attempt(pod=name, error=text))
        self._events.write(
            pod, kind="Warning", reason="FailedScheduling", action="Scheduling", note=text
        )
        self.queue.back(
            waiting, self._clock.monotonic_s(), unschedulable=isinstance(error, Unschedulable)
        )
        self._wake.set()
        await self._note_condition(pod, reason, text)

    async def _note_condition(self, pod: Obj, reason: str, text: str) -> None:
        metadata = pod["metadata"]
        before: Obj = next(
            (
                condition
                for condition in (pod.get("status") or {}).get("conditions") or ()
                if condition.get("type") == "PodScheduled"
            ),
            {},
        )
        wanted = {"status": "False", "reason": reason, "message": text}
        if all(before.get(field) == value for field, value in wanted.items()):
            return
        condition = {"type": "PodScheduled", **wanted, "lastProbeTime": None}
        condition["lastTransitionTime"] = (
            before["lastTransitionTime"]
            if before.get("status") == "False" and before.get("lastTransitionTime")
            else rfc3339(self._clock.now_s())
        )
        try:
            await self._client.patch(
                "pods",
                metadata["name"],
                {"metadata": {"uid": metadata["uid"]}, "status": {"conditions": [condition]}},
                namespace=metadata["namespace"],
                subresource="status",
                kind=STRATEGIC,
            )
        except HamiError as error:
            _LOG.info("condition not written", extra={"pod": metadata["name"], "why": str(error)})


def _on_node(pod: Obj) -> bool:
    return bool(pod["spec"].get("nodeName")) and (
        (pod.get("status") or {}).get("phase") not in _FINISHED
    )


def _node_facts(node: Obj) -> object:
    """Return what of a node can matter to a waiting pod; heartbeats do not."""
    status = node.get("status") or {}
    return (
        node["metadata"].get("labels"),
        node["metadata"].get("annotations"),
        node.get("spec"),
        status.get("allocatable"),
        {c.get("type"): c.get("status") for c in status.get("conditions") or ()},
    )


def _pod_facts(pod: Obj) -> object:
    """Return what of a pod can matter to scheduling; its status does not."""
    metadata = pod["metadata"]
    return (
        metadata.get("labels"),
        metadata.get("annotations"),
        metadata.get("deletionTimestamp"),
        pod["spec"],
    )
