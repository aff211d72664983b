# SPDX-License-Identifier: Apache-2.0
"""Writes the devices of a pod's ledger record into the pod's ResourceClaim (ADR 0039, ADR 0043).

The bind chooses devices by HAMi's rules and appends to the ledger; ``settle`` then makes the claim
equal to that record. In the profile that leaves claims to HAMi, the claim does not exist before:
it is created and allocated, two writes. In any other, the claim exists, and kube-scheduler has
allocated devices to it by first fit. No write is needed where both chose the same; otherwise the
allocation is cleared and written again, because the API server changes none.

Creation fails if a claim of the name exists, and each other write is conditional on a version of
the claim: the newest that the watch delivered, or that an earlier write returned. A writer that is
refused reads the claim, and may find its work done. Seconds throughout.
"""

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Final, Literal
from uuid import uuid4

from opentelemetry.trace import Span, SpanKind

from hami_common.dra.claims import ResourceClaim
from hami_common.dra.names import node_of_pool
from hami_common.dra.podclaims import owner_pod
from hami_common.errors import Conflict, Denied, HamiError, NotFound, Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.model.placement import ContainerShares
from hami_common.runtime.telemetry import Tracing
from hami_core.ledger.podclaim import (
    FINALIZER,
    StoredClaim,
    allocate_document,
    claim_document,
    clear_document,
    finalizer_document,
    holds,
    is_reserved_for,
    reserve_document,
)
from hami_core.ledger.podfacts import PodFacts
from hami_core.planning.conditions import kube_time
from hami_scheduler.shell.claimapi import ClaimApi
from hami_scheduler.shell.ledgerwriter import LedgerWriter
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.podapi import PodApi
from hami_scheduler.shell.state import State

TRIES: Final = 5
"""Attempts at one claim that other writers keep changing."""
Settled = Literal["unchanged", "reserved", "written", "re-picked"]

_log = logging.getLogger(__name__)


class Unsettled(HamiError):
    """The pod's claim cannot get the record's devices. ``outcome``: as of ``binder.Refused``."""

    def __init__(self, *, outcome: str, text: str) -> None:
        """``text`` becomes part of an Event of the pod."""
        super().__init__(outcome, text)
        self.outcome = outcome
        self.text = text

    def __str__(self) -> str:
        return self.text


class PodClaims:
    """Writer of the claims of pods."""

    def __init__(
        self,
        *,
        api: ClaimApi,
        state: State,
        ledger: LedgerWriter,
        pods: PodApi,
        metrics: Metrics,
        tracing: Tracing,
    ) -> None:
        """Write with ``api``."""
        self.api = api
        self._state = state
        self._ledger = ledger
        self._pods = pods
        self._metrics = metrics
        self._tracing = tracing
        self._known: dict[str, StoredClaim] = {}
        """Newest known version of a claim, by the uid of its pod."""
        self._pods_by_claim: dict[str, str] = {}
        """UID of the pod by the uid of its claim."""

    # --- known versions --------------------------------------------------------------------------

    def known(self, pod_uid: str) -> ResourceClaim | None:
        """Return the newest known version of the pod's claim."""
        stored = self._known.get(pod_uid)
        return None if stored is None else stored.claim

    def see(self, stored: StoredClaim, pod_uid: str) -> None:
        """Take a version of a claim that the pod with this uid controls, unless a newer is known.

        The watch delivers versions of our own writes after these returned them.
        """
        known = self._known.get(pod_uid)
        if known is None or not stored.is_older_than(known):
            self._known[pod_uid] = stored
            self._pods_by_claim[stored.claim.uid] = pod_uid

    def forget(self, uid: str) -> str:
        """Forget a claim that is gone; returns the uid of the pod that lacks one now, if any."""
        pod_uid = self._pods_by_claim.pop(uid, "")
        known = self._known.get(pod_uid)
        if known is None or known.claim.uid != uid:
            return ""
        del self._known[pod_uid]
        return pod_uid

    def known_uids(self) -> AbstractSet[str]:
        """Return the uids of all known claims."""
        return self._pods_by_claim.keys()

    # --- the writes of a bind --------------------------------------------------------------------

    async def create(self, pod: PodFacts) -> StoredClaim:
        """Create the pod's claim, or return the one that exists.

        ``Unsettled``: a claim of this name is not the pod's. ``NotFound``, ``Denied``: the API
        server does not take it.
        """
        devices = (one for some in self._state.core.inventory.devices() for one in some.devices)
        try:
            self._metrics.claim_writes.labels(write="create").inc()
            stored = await self.api.create(pod.namespace, claim_document(pod, devices))
        except Conflict:
            found = await self.api.read(pod.namespace, pod.claim)
            if found is None:
                raise Unavailable(peer="API server", detail="the claim was deleted") from None
            self._require_owner(found, pod.uid)
            stored = found
        else:
            self._metrics.claims.labels(outcome="created").inc()
            _log.debug(
                "claim created",
                extra={"namespace": pod.namespace, "pod": pod.name, "claim": pod.claim},
            )
        self.see(stored, pod.uid)
        return stored

    async def create_early(self, pod: PodFacts) -> None:
        """Create the claim of a pod while its reservation is appended; ``settle`` needs it next.

        A claim without an allocation reserves nothing, so one whose bind is refused stays for the
        next attempt; the pod owns it. A failure is left to ``settle``, which tries again.
        """
        if pod.uid in self._known:
            return
        try:
            with self._span(pod.claim):
                await self.create(pod)
        except HamiError as error:
            _log.debug("claim not created early", extra={"pod": pod.name, "problem": str(error)})

    def _require_owner(self, stored: StoredClaim, pod_uid: str) -> None:
        if owner_pod(stored.claim.metadata) != pod_uid:
            text = (
                f"ResourceClaim {stored.claim.metadata.name} exists and is not controlled by the"
                " pod; delete the claim, or create the pod again"
            )
            raise Unsettled(outcome="claim-foreign", text=text)

    async def settle(self, record: AllocationRecord, pod: PodFacts) -> Settled:
        """Make the allocation of the pod's claim that of the record; safe to repeat.

        ``pod``: as it was when it had no node; it has the requests of a claim that does not exist.
        ``Unsettled``: the claim is being deleted, is another pod's, or keeps changing.
        """
        with self._span(record.claim) as span:
            settled = await self._settle(record, pod)
            span.set_attribute("hami.outcome", settled)
        self._metrics.claims.labels(outcome=settled).inc()
        return settled

    def _span(self, claim: str) -> AbstractContextManager[Span]:
        attributes = {"hami.claim": claim} if self._tracing.is_recording else None
        return self._tracing.start_span(
            "claim", begins=False, kind=SpanKind.CLIENT, attributes=attributes
        )

    async def _settle(self, record: AllocationRecord, pod: PodFacts) -> Settled:
        name = f"ResourceClaim {record.claim}"
        for number in range(TRIES):
            stored = await self._find(pod, is_first=number == 0)
            now, seen = self._live(record), self._state.pods.get(record.pod_uid)
            if now is None or (seen is not None and seen.node not in ("", record.node)):
                raise Unsettled(
                    outcome="taken-back", text="the reservation was released; try again"
                )
            if stored.claim.metadata.deletion_timestamp is not None:
                text = f"{name} of the pod is being deleted; it is created again"
                raise Unsettled(outcome="claim-deleted", text=text)
            self._require_owner(stored, record.pod_uid)
            try:
                return await self._bring(stored, now)
            except (Conflict, NotFound):
                continue
        raise Unsettled(outcome="claim-changing", text=f"{name} kept changing; try again")

    async def _find(self, pod: PodFacts, *, is_first: bool) -> StoredClaim:
        """Return a version of the pod's claim, which is created if there is none.

        For the first attempt, a version is enough that may be outdated. A version without
        consumers is not, where kube-scheduler has just allocated devices.
        """
        stored = self._known.get(pod.uid) if is_first else None
        if stored is not None and (pod.claim_at_bind or stored.is_in_use()):
            return stored
        if not (is_first and pod.claim_at_bind):
            stored = await self.api.read(pod.namespace, pod.claim)
        return stored or await self.create(pod)

    def _live(self, record: AllocationRecord) -> AllocationRecord | None:
        """Return the newest record of this allocation, unless it was released."""
        holding = self._state.ledger.holding(record.node, record.pod_uid)
        if holding is None or holding.record.allocation_id != record.allocation_id:
            return None
        return holding.record

    async def _bring(self, stored: StoredClaim, record: AllocationRecord) -> Settled:
        """Bring this version of the claim to the record. ``Conflict``: it has changed."""
        settled: Settled = "re-picked" if stored.is_in_use() else "written"
        if stored.is_allocated and holds(stored.claim, record):
            if is_reserved_for(stored.claim, record.pod_uid):
                return "unchanged"
            await self._write(
                "reserve", stored, record.pod_uid, reserve_document(stored.claim, record)
            )
            return "reserved"
        config = stored.config
        if FINALIZER not in stored.finalizers:
            document = finalizer_document(stored)
            stored = await self._write(
                "finalizer", stored, record.pod_uid, document, subresource=""
            )
        if stored.is_in_use():
            stored = await self._write(
                "clear", stored, record.pod_uid, clear_document(stored.claim)
            )
        document = allocate_document(
            stored.claim,
            record,
            config=config,
            at=kube_time(self._state.clock.now_s()),
            share_ids=lambda: str(uuid4()),
        )
        await self._write("allocate", stored, record.pod_uid, document)
        _log.debug("claim allocated", extra=_fields(record, outcome=settled))
        return settled

    async def _write(
        self,
        write: str,
        stored: StoredClaim,
        pod_uid: str,
        document: bytes,
        *,
        subresource: str = "status",
    ) -> StoredClaim:
        self._metrics.claim_writes.labels(write=write).inc()
        written = await self.api.patch(stored.claim, document, subresource=subresource)
        self.see(written, pod_uid)
        return written

    async def show(self, claim: ResourceClaim, containers: Sequence[ContainerShares]) -> None:
        """Write the amounts in force of a resized claim; a right that is missing is logged."""
        try:
            if await self.api.show(claim, containers):
                self._metrics.claim_writes.labels(write="amounts").inc()
        except Denied as error:
            extra = {"claim": f"{claim.namespace}/{claim.metadata.name}", "problem": str(error)}
            _log.warning("amounts not written to the claim", extra=extra)

    async def clear(self, *, namespace: str, pod: str, pod_uid: str, claim: str) -> bool:
        """Clear the allocation that a pod without a node would keep; returns whether it did.

        Such an allocation pins the pod to its node. It stays where a record of the pod has these
        devices, or the pod has a node.
        """
        for _ in range(TRIES):
            stored = await self.api.read(namespace, claim)
            if (
                stored is None
                or not stored.is_allocated
                or owner_pod(stored.claim.metadata) != pod_uid
            ):
                return False
            # A bind of another replica appends its record before it compares the claim.
            for node in sorted({node_of_pool(one.pool) for one in stored.claim.results()} - {""}):
                await self._ledger.read_node(node)
            records = [one.record for one in self._state.ledger.holdings_of_pod(pod_uid)]
            if any(holds(stored.claim, record) for record in records):
                return False
            now = await self._pods.get(namespace, pod)
            if now is None or now.uid != pod_uid or now.node:
                return False
            try:
                await self._write("clear", stored, pod_uid, clear_document(stored.claim))
            except (Conflict, NotFound):
                continue
            self._metrics.claims.labels(outcome="cleared").inc()
            _log.info(
                "claim allocation cleared",
                extra={"namespace": namespace, "pod": pod, "claim": claim},
            )
            return True
        return False


def _fields(record: AllocationRecord, **more: object) -> dict[str, object]:
    return {
        "namespace": record.namespace,
        "pod": record.pod,
        "claim": record.claim,
        "node": record.node,
        "allocation_id": record.allocation_id,
        **more,
    }
