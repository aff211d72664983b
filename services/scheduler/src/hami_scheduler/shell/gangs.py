# SPDX-License-Identifier: Apache-2.0
"""Gangs: reserves the shares of all members before the first of them is bound, or none at all.

Filter calls this module for each member. A gang that lacks members is refused; once all exist, one
job places them together (``core.gangs``) and appends a reservation with a lease for each, on the
fences of their nodes. Only when the gang is complete does filter return the node of a member, and
only that node. A job that cannot reserve all shares releases those it got. Jobs of several
schedulers never wait for each other: each reserves nodes in the order of their names, and a job
that meets a concurrent change of a node releases its shares and pauses for a random time, so
neither deadlocks nor starves.

A bind takes a member's reservation over; the leases of the others expire and are examined and
released like any other. Where so many members are bound that only one is missing, a new member is
placed by itself: that replaces a member that died. Seconds throughout.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import anyio
import msgspec
from msgspec import Struct

from hami_common.bounds import Count
from hami_common.errors import Denied, HamiError, NotFound, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.events.decision import DecisionRecord
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.ports import KubeApi
from hami_common.runtime.tasks import Backoff
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Hold
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import CapacityReturned
from hami_core.placement.nodenames import NodeNames
from hami_core.planning.gangs import Assignment, GangRef, Member, place_together
from hami_scheduler.settings import Settings
from hami_scheduler.shell.answer import Answer
from hami_scheduler.shell.binder import Binder, Refused
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.decisions import Decisions
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.isolation import GANG
from hami_scheduler.shell.joint import reserve_all, stepwise
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.state import State

SIZE_KNOWN_S = 5.0
"""Time for which the size of a PodGroup is cached."""
SAME_ANSWER_S = 1.0
"""Time for which a gang that did not fit is not retried while the ledger stays unchanged."""
REMEMBERED = 4096
"""Cached candidate nodes of members, and cached last outcomes of gangs."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _GroupSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    min_member: Count = 0


class _Group(Struct, frozen=True, kw_only=True):
    spec: _GroupSpec = _GroupSpec()


_group_decoder = msgspec.json.Decoder(_Group)


class _Count(Struct, frozen=True, kw_only=True):
    """Members of a gang by state."""

    bound: tuple[PodFacts, ...]
    binding: tuple[Holding, ...]
    """Shares of members whose bind has begun: a Binding may be on its way."""
    held: tuple[Holding, ...]
    waiting: tuple[PodFacts, ...]
    """Without a node and without a share."""

    @property
    def present(self) -> int:
        return self.ready + len(self.waiting)

    @property
    def ready(self) -> int:
        return len(self.bound) + len(self.binding) + len(self.held)


class _Job(Struct, kw_only=True):
    """One attempt to place a gang."""

    key: str
    size: int
    names: NodeNames
    """Candidates of members for which filter was not called."""
    done: anyio.Event
    move: bool = False
    """A member's node is no candidate any more: restart without reservations."""


class _Last(Struct, frozen=True, kw_only=True):
    """Outcome of the last attempt, and the state of the ledger it was made on."""

    answer: Answer
    snapshot_id: str
    members: frozenset[str]
    until_s: float


class Gangs:
    """All gangs of the members for which filter was called."""

    def __init__(
        self,
        *,
        state: State,
        binder: Binder,
        effects: Effects,
        kube: KubeApi,
        decisions: Decisions,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """Reserve shares through ``binder``; wake waiting members through ``tasks``."""
        self._state = state
        self._quarantine = state.quarantine
        self._binder = binder
        self._effects = effects
        self._kube = kube
        self._decisions = decisions
        self._settings = settings
        self._metrics = metrics
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._wake = anyio.Event()
        self._sizes: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._names: OrderedDict[str, NodeNames] = OrderedDict()
        self._last: OrderedDict[str, _Last] = OrderedDict()
        self._backoffs: OrderedDict[str, Backoff] = OrderedDict()
        self._present: OrderedDict[str, int] = OrderedDict()
        self._later = anyio.Event()
        self._pause_s = 0.0

    def use(self, settings: Settings) -> None:
        """Apply changed settings."""
        self._settings = settings

    # --- called by filter ------------------------------------------------------------------------

    async def admit(
        self, ref: GangRef, pod: PodView, request: PodRequest, names: NodeNames
    ) -> Answer | None:
        """Return the member's node; ``None`` when it is placed like any other pod."""
        size = ref.size or await self._size(ref)
        if size <= 1:
            return None
        _remember(self._names, request.uid, names)
        await self._until_known(request.uid)
        answer = self._answer(ref.key, size, pod, names)
        if not isinstance(answer, _Job):
            return answer
        if not self._quarantine.is_due(GANG, ref.key):
            return self._isolated(ref.key)
        if not self._is_pointless(ref.key):
            known = self._jobs.get(ref.key)
            if known is None:
                known = self._jobs[ref.key] = answer
                self._wake.set()
            with anyio.move_on_after(self._settings.gang_wait_s):
                await known.done.wait()
            answer = self._answer(ref.key, size, pod, names)
            if not isinstance(answer, _Job):
                return answer
        last = self._last.get(ref.key)
        if last is not None:
            return last.answer
        return Answer(code="GangWaiting", text=f"GangWaiting: gang {ref.key} is being placed")

    def _answer(
        self, key: str, size: int, pod: PodView, names: NodeNames
    ) -> "Answer | _Job | None":
        """Return the known node of a member, or a job that must place it first."""
        count = self._count(key)
        if count.present < size:
            if count.present > self._present.get(key, 1):
                self._wake_members()  # earlier members were refused with a smaller number
            _remember(self._present, key, count.present)
            return Answer(
                code="GangIncomplete",
                text=f"GangIncomplete: gang {key} has {count.present} of {size} pods",
            )
        fenced = pod.annotations().get(keys.FENCE, "")
        reserved = self._state.ledger.reserved_for(pod.metadata.uid, fenced=fenced)
        job = _Job(key=key, size=size, names=names, done=anyio.Event())
        if reserved is not None:
            if count.ready < size:
                return job
            node = reserved.record.node
            if node in names.strings():
                return Answer(node=node, text=f"GangWaiting: a share is held on node {node}")
            if not reserved.record.held_for:
                return None
            job.move = True
            return job
        if count.ready >= size or len(count.bound) >= size - 1:
            return None
        return job

    def _count(self, key: str) -> _Count:
        bound: list[PodFacts] = []
        binding: list[Holding] = []
        held: list[Holding] = []
        waiting: list[PodFacts] = []
        for pod in self._state.pods.members_of_group(key):
            if pod.node:
                bound.append(pod)
            elif pod.is_waiting() and not pod.is_gated:
                holding = self._state.ledger.reserved_for(pod.uid, fenced=pod.fence)
                if holding is None:
                    waiting.append(pod)
                elif holding.record.held_for:
                    held.append(holding)
                else:
                    binding.append(holding)
        return _Count(
            bound=tuple(bound), binding=tuple(binding), held=tuple(held), waiting=tuple(waiting)
        )

    def _is_pointless(self, key: str) -> bool:
        """Return whether another attempt would only repeat the last one."""
        last = self._last.get(key)
        if last is None or last.until_s <= self._state.clock.monotonic_s():
            return False
        members = frozenset(pod.uid for pod in self._state.pods.members_of_group(key))
        return last.snapshot_id == self._state.ledger.snapshot_id and last.members == members

    async def _until_known(self, uid: str) -> None:
        """Wait until our watch delivers a pod that kube-scheduler already has."""
        left_s = self._settings.gang_wait_s
        while self._state.pods.get(uid) is None and left_s > 0:
            await self._state.clock.sleep(0.02)
            left_s -= 0.02

    async def _size(self, ref: GangRef) -> int:
        """Return ``minMember`` of the pod's PodGroup; 0 without one."""
        path, now_s = ref.path(), self._state.clock.monotonic_s()
        size, until_s = self._sizes.get(path, (0, 0.0))
        if until_s > now_s:
            return size
        try:
            with answer_within(self._settings.api_timeout_s, peer="API server"):
                raw = await self._kube.get(path)
            size = _group_decoder.decode(raw).spec.min_member
        except NotFound:
            size = 0  # no such group, or its kind is not installed
        except Denied as error:
            size = 0
            _log.warning("group of pods not readable", extra={"problem": str(error)})
        except UNDECODABLE as error:
            raise WireInvalid(what=f"PodGroup {ref.key}", problem=str(error)) from error
        _remember(self._sizes, path, (size, now_s + SIZE_KNOWN_S))
        return size

    # --- jobs ------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Place gangs, one after another, indefinitely."""
        while True:
            while not self._jobs:
                if self._wake.is_set():
                    self._wake = anyio.Event()
                await self._wake.wait()
            key, job = next(iter(self._jobs.items()))
            if not await self._quarantine.run(
                GANG,
                key,
                partial(self._try, job),
                name=_names_of(key),
                is_retried=False,  # filter retries its members
            ):
                self._ended(job, "failed", self._isolated(key))

    async def _try(self, job: _Job) -> None:
        try:
            outcome, answer = await self._place(job)
        except HamiError as error:
            outcome = "unavailable"
            answer = Answer(code="GangWaiting", text=f"GangWaiting: gang {job.key}: {error}")
        self._ended(job, outcome, answer)

    def _isolated(self, key: str) -> Answer:
        """Return the refusal of the members of a gang that failed with an error."""
        entry = self._quarantine.get(GANG, key)
        problem = "an error" if entry is None else entry.problem
        return Answer(
            code="PodQuarantined",
            text=f"PodQuarantined: gang {key} cannot be placed, it is tried again: {problem}"[:500],
        )

    def _ended(self, job: _Job, outcome: str, answer: Answer) -> None:
        key, clock = job.key, self._state.clock
        self._metrics.gangs.labels(outcome=outcome).inc()
        _log.info("gang", extra={"gang": key, "outcome": outcome, "reason": answer.text})
        until_s = clock.monotonic_s() + SAME_ANSWER_S
        if outcome == "placed":
            self._last.pop(key, None)
            self._backoffs.pop(key, None)
        else:
            members = frozenset(pod.uid for pod in self._state.pods.members_of_group(key))
            _remember(
                self._last,
                key,
                _Last(
                    answer=answer,
                    snapshot_id=self._state.ledger.snapshot_id,
                    members=members,
                    until_s=until_s,
                ),
            )
        self._jobs.pop(key, None)
        job.done.set()

    async def _place(self, job: _Job) -> tuple[str, Answer]:
        """Return (outcome in one word, answer to the members) of one attempt."""
        self._state.require_complete()
        if job.move:
            for holding in self._count(job.key).held:
                await self._effects.ledger.release(holding, "gang-moved")
        count = self._count(job.key)
        need = job.size - count.ready
        if need <= 0:
            return "placed", Answer()
        if len(count.waiting) < need:
            return "incomplete", Answer(
                code="GangIncomplete",
                text=f"GangIncomplete: gang {job.key} has {count.present} of {job.size} pods",
            )
        assignment = await self._assign(job, count, count.waiting)
        if assignment is None and len(count.waiting) > need:
            assignment = await self._assign(job, count, count.waiting[:need])
        if assignment is None:
            return "no-fit", Answer(
                code="GangWaiting",
                text=f"GangWaiting: gang {job.key}: no room for {need} pods at the same time",
            )
        return await self._acquire(job, assignment)

    async def _assign(
        self, job: _Job, count: _Count, pods: Sequence[PodFacts]
    ) -> Assignment | None:
        nodes: dict[int, frozenset[str]] = {}
        members: list[Member] = []
        for pod in pods:
            names = self._names.get(pod.uid, job.names)
            if id(names) not in nodes:
                nodes[id(names)] = frozenset(names.strings())
            if pod.request is not None:
                members.append(Member(request=pod.request, nodes=nodes[id(names)]))
        near = [pod.node for pod in count.bound if not pod.is_finished]
        near += [holding.record.node for holding in (*count.binding, *count.held)]
        return await stepwise(place_together(self._state.table, members, near=near))

    async def _acquire(self, job: _Job, assignment: Assignment) -> tuple[str, Answer]:
        """Reserve every share, in the order of the nodes' names, or none."""
        hold = Hold(held_for=f"gang {job.key}", lease_s=self._settings.gang_lease_s)
        try:
            acquired = await reserve_all(
                assignment,
                partial(self._hold, hold),
                release=self._take_back,
            )
        except HamiError as error:
            outcome = error.outcome if isinstance(error, Refused) else "unavailable"
            if outcome != "no-quota":
                self._try_later(job.key)
            return outcome, Answer(code="GangWaiting", text=f"GangWaiting: gang {job.key}: {error}")
        self._publish(acquired)
        self._state.later(CapacityReturned(node=acquired[0].record.node))
        return "placed", Answer()

    async def _hold(self, hold: Hold, uid: str, node: str) -> Holding:
        pod = self._state.pods.get(uid)
        if pod is None or not pod.is_waiting():
            raise Refused(outcome="gone", text="a member has gone")
        return await self._binder.hold(pod, node, hold, traceparent=pod.traceparent)

    async def _take_back(self, holding: Holding) -> bool:
        """Release a share that this job reserved, not one that another replica's job had before."""
        if holding.record.writer != self._decisions.writer:
            return False
        return await self._effects.ledger.release(holding, "gang-incomplete")

    def _try_later(self, key: str) -> None:
        """Wake kube-scheduler after a pause: no event that it watches would trigger the retry."""
        retry_s = self._settings.gang_retry_s
        backoff = self._backoffs.get(key) or Backoff(first_s=retry_s, most_s=10 * retry_s)
        _remember(self._backoffs, key, backoff)
        self._pause_s = backoff.next_s()
        self._later.set()

    async def wake(self) -> None:
        """Wake the members of gangs that lost their nodes to others, after a pause.

        Runs indefinitely.
        """
        while True:
            await self._later.wait()
            self._later = anyio.Event()
            await self._state.clock.sleep(self._pause_s)
            self._wake_members()

    def _wake_members(self) -> None:
        node = next(iter(self._state.table.codes), "")
        if node:
            self._state.later(CapacityReturned(node=node))

    def _publish(self, acquired: Sequence[Holding]) -> None:
        for holding in acquired:
            record = holding.record
            self._decisions.add(
                DecisionRecord(
                    verb="gang",
                    namespace=record.namespace,
                    pod=record.pod,
                    pod_uid=record.pod_uid,
                    time_s=self._state.clock.now_s(),
                    verdict="placed",
                    snapshot_id=self._state.ledger.snapshot_id,
                    node=record.node,
                    allocation_id=record.allocation_id,
                    ledger_seq=holding.revision,
                    containers=record.containers,
                    writer=self._decisions.writer,
                )
            )


def _names_of(key: str) -> tuple[str, str]:
    namespace, _, name = key.partition("/")
    return namespace, name


def _remember(known: OrderedDict[str, T], key: str, value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > REMEMBERED:
        known.popitem(last=False)
