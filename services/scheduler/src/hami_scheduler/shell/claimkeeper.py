# SPDX-License-Identifier: Apache-2.0
"""Reconciles the ResourceClaims of pods with the ledger, on one elected replica (ADR 0039).

A pod whose claim is not created at its bind gets it as soon as the watch delivers the pod: its
scheduler considers the pod only then. The replica also completes what a bind left unfinished: it
writes the record's devices into the claim of a pod that is bound, by another scheduler or by a bind
that was interrupted, and clears an allocation that a waiting pod without a record has: it would
pin the pod to its node, or keep others from the devices. Seconds throughout.
"""

import logging
from contextlib import suppress
from typing import Final, Literal

import anyio
from anyio.abc import TaskGroup

from hami_common.dra.claims import ResourceClaim, shown_amounts
from hami_common.dra.podclaims import by_request
from hami_common.errors import Denied, HamiError, NotFound, Unavailable
from hami_common.ports import KubeApi
from hami_common.runtime.kubeio.recorder import EventRecorder, ObjectRef
from hami_core.ledger.holding import Holding
from hami_core.ledger.podclaim import (
    StoredClaim,
    has_devices,
    holds,
    is_reserved_for,
)
from hami_core.ledger.podfacts import PodFacts
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import until_set
from hami_scheduler.shell.isolation import CLAIM
from hami_scheduler.shell.leader import Leader
from hami_scheduler.shell.podclaims import PodClaims, Unsettled
from hami_scheduler.shell.state import State

NOT_CREATED: Final = "ClaimNotCreated"
"""Reason of the Event of a pod whose claim cannot be created."""
PARALLEL: Final = 16
"""Concurrent calls to the API server."""
PAUSE_MOST_S: Final = 60.0
"""Longest pause between two attempts at one claim."""
Step = Literal["create", "report", "settle", "show", "clear", ""]

_log = logging.getLogger(__name__)


class ClaimKeeper:
    """Keeps the claims of pods, on the replica that leads."""

    def __init__(
        self,
        *,
        state: State,
        claims: PodClaims,
        kube: KubeApi,
        settings: Settings,
        writer: str,
    ) -> None:
        """Write with ``claims``; ``writer`` names this replica in the election."""
        self._state = state
        self._writer = claims
        self._options = settings.dra
        self._tick_s = settings.tick_s
        self._lease_s = settings.lease_s
        self._leader = Leader(
            kube,
            clock=state.clock,
            namespace=settings.dra.namespace,
            name=settings.dra.lease_name,
            identity=writer,
            lease_s=settings.dra.leader_lease_s,
        )
        self._events = EventRecorder(
            kube, component="hami-scheduler", clock=state.clock, instance=writer
        )
        self._dirty: set[str] = set()
        """Pods, by uid, that changed or whose claim changed."""
        self._busy: set[str] = set()
        self._pauses: dict[str, tuple[float, float]] = {}
        """(due, pause) of the next attempt at a pod whose last one failed."""
        self._amiss_s: dict[str, float] = {}
        """Time since which a claim is as only a bind in progress leaves it, see ``_is_amiss``."""
        self._reported: dict[str, str] = {}
        """Problem of a pod's request that its newest Event has."""
        self._agreed: dict[str, tuple[str, int]] = {}
        """(version of the claim, revision of the record) that were found equal, by pod."""
        self._wake = anyio.Event()

    # --- following -------------------------------------------------------------------------------

    def see_pod(self, pod: PodFacts) -> None:
        """Consider a pod that the watch delivered."""
        if pod.claim:
            self._mark(pod.uid)

    def see_claim(self, stored: StoredClaim, pod_uid: str) -> None:
        """Take a version of a claim that the pod with this uid controls."""
        self._writer.see(stored, pod_uid)
        self._mark(pod_uid)

    def forget_claim(self, uid: str) -> None:
        """Forget a claim that is gone."""
        if pod_uid := self._writer.forget(uid):
            self._pauses.pop(pod_uid, None)
            self._mark(pod_uid)

    def keep_claims(self, listed: set[str]) -> None:
        """Forget all claims but these, by uid."""
        for uid in self._writer.known_uids() - listed:
            self.forget_claim(uid)

    @property
    def is_leader(self) -> bool:
        """Return whether this replica keeps the claims."""
        return self._leader.is_leader

    def is_allocated(self, pod_uid: str) -> bool:
        """Return whether the claim of the pod has an allocation."""
        claim = self._writer.known(pod_uid)
        return claim is not None and bool(claim.results())

    def _mark(self, pod_uid: str) -> None:
        if self._options.enabled:
            self._dirty.add(pod_uid)
            self._wake.set()

    async def work(self) -> None:
        """Keep claims while this replica leads; indefinitely, or not at all if off."""
        if self._options.enabled:
            await self._leader.lead(self._serve)

    async def _serve(self) -> None:
        all_due_s, limiter = 0.0, anyio.CapacityLimiter(PARALLEL)
        self._busy.clear()  # of an earlier time as leader
        async with anyio.create_task_group() as group:
            while True:
                with suppress(Unavailable):  # what is missing is logged elsewhere
                    await self._state.wait_complete(wait_s=self._tick_s)
                if not self._state.is_complete:
                    continue
                if self._wake.is_set():
                    self._wake = anyio.Event()
                now_s = self._state.clock.monotonic_s()
                due, self._dirty = self._dirty, set()
                due |= {uid for uid, (due_s, _) in self._pauses.items() if due_s <= now_s}
                due |= {uid for uid in self._amiss_s if self._is_amiss_long(uid)}
                if now_s >= all_due_s:
                    all_due_s = now_s + self._options.discovery_s
                    due |= {pod.uid for pod in self._state.pods if pod.claim}
                    self._forget_gone()
                self._start(due, group, limiter)
                await until_set(self._wake, self._state.clock, at_most_s=self._tick_s)

    def _forget_gone(self) -> None:
        for known in (self._pauses, self._amiss_s, self._reported, self._agreed):
            for uid in [uid for uid in known if self._state.pods.get(uid) is None]:
                del known[uid]

    def _start(self, uids: set[str], group: TaskGroup, limiter: anyio.CapacityLimiter) -> None:
        for uid in sorted(uids):
            if uid in self._busy:
                self._dirty.add(uid)  # considered again when the present attempt has ended
            elif self._is_due(uid) and self._step(uid):
                self._busy.add(uid)
                group.start_soon(self._run, uid, limiter)

    def _is_due(self, uid: str) -> bool:
        due_s, _ = self._pauses.get(uid, (0.0, 0.0))
        return due_s <= self._state.clock.monotonic_s()

    async def _run(self, uid: str, limiter: anyio.CapacityLimiter) -> None:
        pod = self._state.pods.get(uid)
        name = ("", "") if pod is None else (pod.namespace, pod.name)

        async def attempt() -> None:
            async with limiter:
                await self._attempt(uid)

        try:
            is_done = await self._state.quarantine.run(
                CLAIM,
                uid,
                attempt,
                passes=(HamiError,),
                name=name,
                is_retried=False,
            )
        except HamiError as error:
            is_done = False
            _log.info("claim of a pod not kept", extra={"pod_uid": uid, "problem": str(error)})
        finally:
            self._busy.discard(uid)
        if is_done:
            self._pauses.pop(uid, None)
        else:
            _, pause_s = self._pauses.get(uid, (0.0, 0.0))
            pause_s = min(PAUSE_MOST_S, 2 * pause_s or self._tick_s)
            self._pauses[uid] = (self._state.clock.monotonic_s() + pause_s, pause_s)
        if uid in self._dirty:
            self._wake.set()

    # --- one pod ---------------------------------------------------------------------------------

    def _step(self, uid: str) -> Step:
        """Return the next step for the claim of a pod; empty if none is needed now."""
        pod = self._state.pods.get(uid)
        if pod is None or not pod.claim or pod.is_finished or (pod.is_deleting and not pod.node):
            return ""
        claim = self._writer.known(uid)
        if claim is not None and claim.metadata.name != pod.claim:
            claim = None
        if self._is_amiss(pod, claim):
            self._amiss_s.setdefault(uid, self._state.clock.monotonic_s())
            if not self._is_amiss_long(uid):
                return ""
        else:
            self._amiss_s.pop(uid, None)
        if claim is None:
            return self._step_without_claim(pod)
        if claim.metadata.deletion_timestamp is not None:
            return ""  # created again once it is gone
        if pod.node:
            holding = self._committed(pod)
            if holding is None:
                return ""
            if self._differs(claim, holding):
                return "settle"
            return "show" if self._is_resized(claim, holding) else ""
        return "clear" if self._is_pinned(uid, claim) else ""

    def _step_without_claim(self, pod: PodFacts) -> Step:
        if pod.claim_at_bind and not pod.node:
            return ""
        if pod.problem:
            return "report" if self._reported.get(pod.uid) != pod.problem else ""
        is_wanted = pod.claim_requests and not pod.is_gated and not pod.is_deleting
        return "create" if is_wanted else ""

    def _is_amiss(self, pod: PodFacts, claim: ResourceClaim | None) -> bool:
        """Return whether the claim is as a bind leaves it for a moment, here or in the watch.

        It has an allocation and the waiting pod has no record; or the pod was bound and its claim,
        which the bind created, is not seen.
        """
        if pod.node:
            return claim is None and pod.claim_at_bind
        return claim is not None and self._is_pinned(pod.uid, claim)

    def _committed(self, pod: PodFacts) -> Holding | None:
        """Return the record of the pod's committed allocation, if it is by claim."""
        holding = self._state.ledger.holding(pod.node, pod.uid)
        if holding is None or not holding.record.claim or pod.signed is None:
            return None
        return holding if pod.signed.allocation_id == holding.record.allocation_id else None

    def _differs(self, claim: ResourceClaim, holding: Holding) -> bool:
        """Return whether the claim of a bound pod is to be written.

        Once its containers exist, they have the devices of this record, and a resize changes the
        amounts in the record alone.
        """
        record = holding.record
        versions = (claim.metadata.resource_version, holding.revision)
        if self._agreed.get(record.pod_uid) == versions:
            return False
        if holds(claim, record) and is_reserved_for(claim, record.pod_uid):
            self._agreed[record.pod_uid] = versions
            return False
        return not (holding.containers_exist() and has_devices(claim, record))

    def _is_resized(self, claim: ResourceClaim, holding: Holding) -> bool:
        """Return whether the claim's status has other amounts than those in force."""
        record = holding.record
        if self._agreed.get(record.pod_uid) == (claim.metadata.resource_version, holding.revision):
            return False
        return bool(shown_amounts(claim, by_request(record.containers)))

    def _is_pinned(self, uid: str, claim: ResourceClaim) -> bool:
        """Return whether the claim of the waiting pod has an allocation without a record."""
        holdings = self._state.ledger.holdings_of_pod(uid)
        return bool(claim.results()) and not any(holds(claim, one.record) for one in holdings)

    def _is_amiss_long(self, uid: str) -> bool:
        """Return whether any bind that could still be in progress has ended."""
        since_s = self._amiss_s.get(uid)
        return since_s is not None and self._state.clock.monotonic_s() - since_s >= self._lease_s

    async def _attempt(self, uid: str) -> None:
        """Do the next step."""
        pod, step = self._state.pods.get(uid), self._step(uid)
        if pod is None:
            return
        if step == "create":
            await self._create(pod)
        elif step == "report":
            self._reported[uid] = pod.problem
            await self._report(pod, f"ResourceClaim {pod.claim} is not created: {pod.problem}")
        elif step == "settle":
            holding = self._committed(pod)
            if holding is not None:
                await self._settle(holding, pod)
        elif step == "show":
            holding, claim = self._committed(pod), self._writer.known(uid)
            if holding is not None and claim is not None:
                await self._writer.show(claim, by_request(holding.record.containers))
        elif step == "clear":
            await self._writer.clear(
                namespace=pod.namespace, pod=pod.name, pod_uid=pod.uid, claim=pod.claim
            )
            self._amiss_s.pop(uid, None)

    async def _settle(self, holding: Holding, pod: PodFacts) -> None:
        try:
            await self._writer.settle(holding.record, pod)
        except Unsettled as error:
            if error.outcome != "taken-back":
                raise

    async def _create(self, pod: PodFacts) -> None:
        try:
            await self._writer.create(pod)
        except Unsettled as error:
            await self._report(pod, error.text)
            raise
        except (Denied, NotFound) as error:
            await self._report(pod, f"ResourceClaim {pod.claim} cannot be created: {error}")
            raise
        self._amiss_s.pop(pod.uid, None)
        self._mark(pod.uid)

    async def _report(self, pod: PodFacts, text: str) -> None:
        await self._events.record(
            ObjectRef(kind="Pod", name=pod.name, namespace=pod.namespace, uid=pod.uid),
            reason=NOT_CREATED,
            message=text,
            kind="Warning",
        )
