# SPDX-License-Identifier: Apache-2.0
"""Executes defragmentations: moves running pods, one after another, so that a waiting pod fits.

A call (``POST /v1/defrag``, or a round of the loop ``defrag.enabled``) executes at most one step
and returns (ADR 0049):

1. Plan (``hami_core.planning.defrag``) with the pods that may be moved now.
2. Hold the place of each moved pod's replacement and of the waiting pod in the ledger, all or none.
3. Evict one pod by its uid. Its controller re-creates it, and the replacement takes its place over.
4. When the replacement has a node, evict the next one.

The held places are the only state: any replica, and a restarted one, continues from them. Calls
renew the places of pods that are not evicted yet; if the calls end, leases end the rest. Seconds
throughout.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Final, Literal

import anyio
import anyio.to_thread
import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.errors import HamiError, NotFound, RequestInvalid, Unavailable
from hami_common.events.allocation import hold_uid, is_of_owner, purpose_of
from hami_common.events.codec import UNDECODABLE
from hami_common.model.request import PodRequest
from hami_common.ports import KubeApi
from hami_common.runtime.httpd import Handler, Request, Response, json_response
from hami_common.runtime.kubeio.recorder import EventRecorder
from hami_common.runtime.openapi import Operation
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Hold
from hami_core.ledger.podfacts import PodFacts
from hami_core.planning.defrag import (
    MOST_MOVES,
    DefragPlan,
    Move,
    Place,
    Progress,
    Tenant,
    places_of,
    plan_moves,
    progress,
)
from hami_core.planning.preempt import is_evictable, wanted_grace_s
from hami_core.planning.whatif import Scene
from hami_core.replay.snapshot import Snapshot, load
from hami_scheduler.settings import Settings
from hami_scheduler.shell.binder import Binder, Refused
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.evictions import Covered, pod_reference
from hami_scheduler.shell.leader import Leader
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.podways import Around, read_around
from hami_scheduler.shell.state import State

PATH: Final = "/v1/defrag"
TRIALS_MOST: Final = 20_000
"""Placements tried for one plan; a plan takes seconds at most."""
NODES_MOST: Final = 64
"""Nodes from which pods are moved: the closest to taking the waiting pod."""
TARGETS_MOST: Final = 16
"""Nodes that are tried for each moved pod, its own first."""
_RENEWED_PER_LEASE: Final = 3
_KIND: Final = "defrag"

_log = logging.getLogger(__name__)

Outcome = Literal[
    "placed", "fits", "planned", "none", "held", "evicted", "waiting", "refused", "stopped"
]


class DefragQuestion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Waiting pod, and how far to go for it."""

    namespace: str
    pod: str
    moves: Annotated[int, Meta(ge=0, le=8)] = MOST_MOVES
    """Maximum number of pods that a plan moves."""
    execute: bool = False
    """Execute the next step; otherwise only report it."""
    evict: bool = True
    """False: keep what is held, and evict no pod in this call."""
    stop: bool = False
    """Release what is held for pods that are not evicted yet, and report."""

    @property
    def is_dry(self) -> bool:
        """Return whether the call only reads."""
        return not (self.execute or self.stop)


class DefragStep(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of the defragmentation for a pod after a call."""

    outcome: Outcome
    """``placed``: the pod has a node and so have all replacements. ``fits``: no move is needed.

    ``planned``: ``moves`` make it fit. ``none``: no plan. ``held``: places are held, nothing is
    evicted yet. ``evicted``: this call evicted ``evicted``. ``waiting``: for pods to end, to be
    re-created or to be bound. ``refused``: the step failed, and what it held is released.
    ``stopped``: as asked.
    """
    text: str
    moves: tuple[Move, ...] = ()
    node: str = ""
    """Node of the waiting pod, or the one that is held for it."""
    evicted: str = ""
    """``namespace/name`` of the pod that this call evicted."""
    staying: int = 0
    """Pods that are still to be evicted."""


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path=PATH,
        name="defrag",
        method="post",
        text="Plan moves of running pods by which a waiting pod fits, or execute the next of them: "
        "at most one pod is evicted per call. Repeat the call until the outcome is placed.",
        body=DefragQuestion,
        answer=DefragStep,
        errors={404: "No such pod requests devices."},
    ),
)
_decoder = msgspec.json.Decoder(DefragQuestion)


class _Plan(Struct, frozen=True, kw_only=True):
    found: DefragPlan
    places: tuple[Place, ...]


class Defrag:
    """Plans and executes, one call at a time."""

    def __init__(
        self,
        *,
        state: State,
        binder: Binder,
        effects: Effects,
        kube: KubeApi,
        take: Callable[[], Awaitable[Snapshot]],
        settings: Settings,
        metrics: Metrics,
        writer: str,
    ) -> None:
        """Hold places through ``binder``; ``take`` returns the present snapshot."""
        self._state = state
        self._binder = binder
        self._effects = effects
        self._kube = kube
        self._take = take
        self._settings = settings
        self._options = settings.defrag
        self._metrics = metrics
        self._writer = writer
        self._clock = state.clock
        self._events = EventRecorder(
            kube, component="hami-scheduler", clock=state.clock, instance=writer
        )
        self._turn = anyio.Lock()
        self._dry_turn = anyio.Lock()
        """Serializes dry runs, which delay no execution."""
        self._evicted_s: deque[float] = deque()
        """Times of the loop's evictions in the last interval."""
        self._searches: dict[str, anyio.CancelScope] = {}
        """Search of the execution that plans now, by purpose."""
        self._begun_s: dict[str, float] = {}
        """Time since which the loop works on a pod, by uid."""
        self._not_before_s: dict[str, float] = {}
        self._held_uid = ""
        """Waiting pod whose place was held after the last round of the loop."""

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handler by method and path."""
        return {("POST", PATH): self.defrag}

    async def defrag(self, request: Request) -> Response:
        """See ``OPERATIONS``."""
        try:
            question = _decoder.decode(request.body)
        except UNDECODABLE as error:
            raise RequestInvalid(
                field="body", problem=str(error), fix="see docs/openapi/scheduler.json"
            ) from error
        return json_response(await self.advance(question))

    async def advance(self, question: DefragQuestion) -> DefragStep:
        """Execute at most one step; ``NotFound``, ``Unavailable``: nothing was done."""
        await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
        purpose = purpose_of(_KIND, question.namespace, question.pod)
        if question.stop and (search := self._searches.get(purpose)) is not None:
            search.cancel()
        async with self._dry_turn if question.is_dry else self._turn:
            step = await self._advance(question)
        self._metrics.defrag_steps.labels(outcome=step.outcome).inc()
        return step

    # --- one call --------------------------------------------------------------------------------

    async def _advance(self, question: DefragQuestion) -> DefragStep:
        purpose = purpose_of(_KIND, question.namespace, question.pod)
        pod = self._find(question.namespace, question.pod)
        if pod is None:
            if not question.is_dry:
                await self._release(self._state.ledger.holdings_of_owner(purpose), "pod-gone")
            raise NotFound(what=f"pod {question.namespace}/{question.pod} that requests devices")
        now = progress(self._state.ledger, purpose, pod.uid, self._state.pods.get)
        if question.stop or pod.node:
            return await self._end(pod, now, question)
        if question.execute:
            await self._renew([*now.pending, *([now.wanted] if now.wanted else [])])
        if now.wanted is None:
            if question.execute:
                await self._stop(now, "defrag-stopped")  # its lease ended
            if now.outstanding or self._state.ledger.holdings_of_pod(pod.uid):
                return _waiting(now)  # with a share of its own it is being bound
            return await self._begin(pod, purpose, question) or _waiting(now)
        node = now.wanted.record.node
        if now.following is None:
            return _waiting(now, node)
        if not (question.execute and question.evict):
            return DefragStep(
                outcome="held",
                text=f"{len(now.staying)} pods are to be moved, next {_name(now.following)}",
                node=node,
                staying=len(now.staying),
            )
        return await self._evict(pod, now, now.following, node)

    async def _end(self, pod: PodFacts, now: Progress, question: DefragQuestion) -> DefragStep:
        """End the run of a pod that has a node, or whose run is stopped."""
        if not question.is_dry:
            await self._stop(now, "defrag-stopped" if question.stop else "pod-placed")
        if question.stop:
            self._pause(pod.uid)
            return DefragStep(
                outcome="stopped",
                text=f"{len(now.outstanding)} replacements keep their places until they have"
                " started, for at most the lease",
            )
        if now.outstanding:
            return _waiting(now, pod.node)
        return DefragStep(outcome="placed", text=f"the pod runs on node {pod.node}", node=pod.node)

    def _find(self, namespace: str, name: str) -> PodFacts | None:
        found = [p for p in self._state.pods if (p.namespace, p.name) == (namespace, name)]
        return next((p for p in found if p.is_waiting() or (p.node and not p.is_finished)), None)

    async def _begin(
        self, pod: PodFacts, purpose: str, question: DefragQuestion
    ) -> DefragStep | None:
        """Plan, and hold the places of the plan; ``None`` when the pod waits no longer."""
        if pod.group or pod.claim:
            kind = "is a member of a gang" if pod.group else "gets its devices by a ResourceClaim"
            return DefragStep(outcome="none", text=f"the pod {kind}, for which no pod is moved")
        with anyio.CancelScope() as search:
            if question.execute:
                self._searches[purpose] = search
            try:
                plan = await self._plan(pod, question.moves)
            finally:
                if question.execute:
                    del self._searches[purpose]
        if search.cancelled_caught:
            return DefragStep(outcome="stopped", text="the search for a plan was stopped")
        if plan is None:
            return None
        found = plan.found
        if found.outcome == "fits":
            return DefragStep(
                outcome="fits", text=f"the pod fits on node {found.node} as it is", node=found.node
            )
        if not found.moves:
            return DefragStep(
                outcome="none",
                text=f"no plan of up to {question.moves} moves found; {found.movable} pods on the"
                f" closest nodes may be moved, {found.trials} placements were tried",
            )
        if not plan.places:
            return DefragStep(
                outcome="none", text="every plan moves a pod twice", moves=found.moves
            )
        text = f"{len(found.moves)} moves make it fit on node {found.node}"
        if not question.execute:
            return DefragStep(outcome="planned", text=text, moves=found.moves, node=found.node)
        problem = await self._hold(pod, purpose, plan)
        if problem:
            return DefragStep(outcome="refused", text=problem, moves=found.moves)
        await self._events.record(
            pod_reference(pod),
            reason="DefragPlanned",
            message=f"{len(found.moves)} pods are moved one after another so that this pod fits on"
            f" node {found.node}; the places are held",
        )
        return DefragStep(
            outcome="held",
            text=text,
            moves=found.moves,
            node=found.node,
            staying=len(found.moves),
        )

    async def _evict(self, pod: PodFacts, now: Progress, moved: PodFacts, node: str) -> DefragStep:
        """Evict one pod, if its protection still allows that."""
        covered = await self._effects.evictions.covered()
        if exhausted := _exhausted(covered, moved):
            # Mostly the replacement evicted before has a node and is not ready yet.
            return DefragStep(
                outcome="waiting",
                text=f"{exhausted} allows no disruption of pod {_name(moved)} now",
                node=node,
                staying=len(now.staying),
            )
        problem = self._protection(pod, moved, covered)
        problem = problem or await self._effects.evictions.evict(moved)
        if problem:
            await self._stop(now, "defrag-refused")
            return DefragStep(
                outcome="refused",
                text=f"pod {_name(moved)} is not moved: {problem}",
                staying=len(now.staying),
            )
        self._metrics.defrag_evictions.inc()
        _log.warning(
            "pod evicted for defragmentation",
            extra={
                "namespace": moved.namespace,
                "pod": moved.name,
                "node": moved.node,
                "for": _name(pod),
            },
        )
        await self._events.record(
            pod_reference(moved),
            reason="DefragEvicted",
            kind="Warning",
            message=f"Evicted so that pod {_name(pod)} fits on node {node}; devices for the"
            " replacement of this pod are held",
        )
        return DefragStep(
            outcome="evicted",
            text=f"pod {_name(moved)} is evicted",
            node=node,
            evicted=_name(moved),
            staying=len(now.staying) - 1,
        )

    # --- plan ------------------------------------------------------------------------------------

    async def _plan(self, pod: PodFacts, moves: int) -> _Plan | None:
        covered = await self._effects.evictions.covered()
        fixed = frozenset(
            other.uid for other in self._state.pods if self._protection(pod, other, covered)
        )
        taken = await self._take()
        request = next((one for one in taken.waiting if one.uid == pod.uid), None)
        if request is None:
            return None
        around = await read_around(self._kube, pod, self._settings)
        search = partial(_planned, taken, request, around, fixed=fixed, moves=moves)
        # A stop leaves the thread behind: it reads its own copies, and its trials are bounded.
        return await anyio.to_thread.run_sync(search, abandon_on_cancel=True)

    def _protection(self, pod: PodFacts, other: PodFacts, covered: Covered) -> str:
        """Return why ``other`` must not be moved for ``pod`` now; empty: it may be."""
        if not other.controller:
            return "it has no controller that re-creates it"
        if other.claim:
            return "it gets its devices by a ResourceClaim"
        if other.priority > pod.priority:
            return f"its priority {other.priority} is above {pod.priority}"
        if exhausted := _exhausted(covered, other):
            return f"{exhausted} allows no disruption"
        budgets = {other.uid: covered.by_uid.get(other.uid, ())}
        rules = self._effects.evictions.rules(budgets)
        if not is_evictable(other, priority=pod.priority + 1, rules=rules):
            return (
                "its minimum run time is not over, several budgets cover it, or its eviction"
                " failed a moment ago"
            )
        return ""

    # --- held places -----------------------------------------------------------------------------

    async def _hold(self, pod: PodFacts, purpose: str, plan: _Plan) -> str:
        """Hold all places of a plan or none; returns why not."""
        moved = [self._state.pods.get(move.uid) for move in plan.found.moves]
        pods = [one for one in moved if one is not None]
        if len(pods) < len(moved):
            return "a pod of the plan has ended; try again"
        lease_s = self._options.lease_s + wanted_grace_s(pods)
        held: list[Holding] = []
        try:
            for number, (one, place) in enumerate(zip([*pods, pod], plan.places, strict=True)):
                uid = hold_uid(pod.uid if one is pod else one.controller, 0, number)
                facts = PodFacts(
                    uid=uid,
                    namespace=one.namespace,
                    name=one.name,
                    resource_version="",
                    request=replace(place.request, uid=uid),
                    account=one.account,
                )
                hold = Hold(held_for=purpose, lease_s=lease_s, awaits=place.awaits)
                held.append(await self._binder.hold(facts, place.node, hold))
        except (Refused, Unavailable) as error:
            await self._release(held, "defrag-refused")
            return f"a place is not held: {error}"
        if len(self._state.ledger.holdings_of_owner(purpose)) > len(held):
            await self._release(held, "defrag-refused")
            return "another replica holds places for this pod; try again"
        return ""

    async def _stop(self, now: Progress, reason: str) -> None:
        """Release everything but the places of evicted pods."""
        await self._release([*([now.wanted] if now.wanted else []), *now.pending], reason)

    async def _release(self, held: Sequence[Holding], reason: str) -> None:
        for holding in held:
            await self._effects.ledger.release(holding, reason)

    async def _renew(self, held: Sequence[Holding]) -> None:
        for holding in held:
            age_s = self._clock.now_s() - holding.record.time_s
            if age_s > holding.record.lease_s / _RENEWED_PER_LEASE:
                await self._effects.ledger.renew(holding)

    # --- the loop --------------------------------------------------------------------------------

    async def work(self) -> None:
        """Defragment for waiting pods while this replica leads; not at all if off."""
        options = self._options
        if not options.enabled:
            return
        leader = Leader(
            self._kube,
            clock=self._clock,
            namespace=options.namespace,
            name=options.lease_name,
            identity=self._writer,
            lease_s=options.leader_lease_s,
        )
        await leader.lead(self._rounds)

    async def _rounds(self) -> None:
        while True:
            await self._clock.sleep(self._options.round_s)
            if not self._state.is_complete:
                continue
            try:
                await self._round()
            except HamiError as error:
                _log.warning("defragmentation delayed", extra={"problem": str(error)})

    async def _round(self) -> None:
        """Execute one step for one pod."""
        now_s = self._clock.monotonic_s()
        for times in (self._begun_s, self._not_before_s):
            for uid in [uid for uid in times if self._state.pods.get(uid) is None]:
                del times[uid]
        begun, ended = self._runs()
        if self._held_uid and self._held_uid not in begun:
            # Stopped through another replica, or bound.
            self._pause(self._held_uid)
        self._held_uid = ""
        pod = self._state.pods.get(min(begun)) if begun else self._due(now_s, ended)
        if pod is None:
            return
        options = self._options
        begun_s = self._begun_s.setdefault(pod.uid, now_s)
        while self._evicted_s and self._evicted_s[0] <= now_s - options.interval_s:
            self._evicted_s.popleft()
        is_late = now_s - begun_s > options.run_s
        question = DefragQuestion(
            namespace=pod.namespace,
            pod=pod.name,
            moves=options.moves,
            execute=True,
            evict=len(self._evicted_s) < options.evictions,
            stop=is_late,
        )
        step = await self.advance(question)
        if step.outcome == "evicted":
            self._evicted_s.append(now_s)
        if step.outcome in ("placed", "fits", "none", "refused", "stopped"):
            self._pause(pod.uid)
        elif step.node and not pod.node:
            self._held_uid = pod.uid

    def _pause(self, uid: str) -> None:
        """Let the loop begin no run for a waiting pod for a while."""
        self._begun_s.pop(uid, None)
        self._not_before_s[uid] = self._clock.monotonic_s() + self._options.retry_s

    def _runs(self) -> tuple[set[str], set[str]]:
        """Return the pods whose runs have steps left, and those whose runs have ended.

        After a stop, only places of evicted pods remain: they need no further step.
        """
        ledger, pods = self._state.ledger, self._state.pods
        owned = {one.record.held_for for one in ledger.reserved() if is_of_owner(one.record, _KIND)}
        begun: set[str] = set()
        ended: set[str] = set()
        for pod in pods if owned else ():
            purpose = purpose_of(_KIND, pod.namespace, pod.name)
            if purpose in owned and (pod.node or pod.is_waiting()):
                now = progress(ledger, purpose, pod.uid, pods.get)
                (begun if now.wanted or now.pending else ended).add(pod.uid)
        return begun, ended

    def _due(self, now_s: float, ended: Collection[str]) -> PodFacts | None:
        """Return the waiting pod that is due first and of no run."""
        oldest_s = self._clock.now_s() - self._options.wait_s
        due = [
            pod
            for pod in self._state.pods.waiting()
            if not pod.is_gated
            and not pod.group
            and pod.uid not in ended
            and pod.created_s <= oldest_s
            and self._not_before_s.get(pod.uid, now_s) <= now_s
        ]
        return min(due, key=lambda pod: (-pod.priority, pod.created_s, pod.uid), default=None)


def _planned(
    taken: Snapshot,
    request: PodRequest,
    around: Around,
    *,
    fixed: frozenset[str],
    moves: int,
) -> _Plan:
    """Search for a plan; runs in a thread and reads nothing of the live state."""
    ledger = load(taken)
    known = around.surroundings(taken, ledger)
    scene = Scene(ledger, None, excluded={request.uid: known.excluded})
    near = {one.node for one in scene.nearest(request, NODES_MOST)}
    tenants: list[Tenant] = [
        one for one in known.tenants or () if one.node in near and one.request.uid not in fixed
    ]
    found = plan_moves(
        ledger.table,
        request,
        tenants,
        most_moves=moves,
        most_trials=TRIALS_MOST,
        excluded=known.excluded,
        most_targets=TARGETS_MOST,
    )
    return _Plan(found=found, places=places_of(found, request, tenants) if found.moves else ())


def _exhausted(covered: Covered, pod: PodFacts) -> str:
    """Return the budget that allows no disruption of the pod now; empty: none."""
    names = covered.by_uid.get(pod.uid, ())
    exhausted = next((name for name in names if not covered.allowed.get(name, 0)), "")
    return f"PodDisruptionBudget {exhausted}" if exhausted else ""


def _name(pod: PodFacts) -> str:
    return f"{pod.namespace}/{pod.name}"


def _waiting(now: Progress, node: str = "") -> DefragStep:
    text = "evicted pods have not left yet, or the pod is being bound"
    if now.outstanding:
        text = f"{len(now.outstanding)} replacements have no node yet"
    return DefragStep(outcome="waiting", text=text, node=node, staying=len(now.staying))
