# SPDX-License-Identifier: Apache-2.0
"""Writes the devices of a pod's ledger record into the pod's ResourceClaim (ADR 0039).

kube-scheduler allocates devices to the claim before it asks for the bind, by first fit. The bind
chooses by HAMi's rules and appends to the ledger; ``settle`` then makes the claim equal to that
record. No write is needed where both chose the same. Otherwise the allocation is cleared and
written again, because the API server changes none. Each write is conditional on the version of the
claim that was read, so writers that meet read again and find their work done. Seconds throughout.
"""

import logging
from typing import Final, Literal
from uuid import uuid4

from opentelemetry.trace import SpanKind

from hami_common.dra.names import node_of_pool
from hami_common.dra.podclaims import owner_pod
from hami_common.errors import Conflict, HamiError, NotFound
from hami_common.events.allocation import AllocationRecord
from hami_common.runtime.telemetry import Tracing
from hami_core.ledger.podclaim import (
    FINALIZER,
    StoredClaim,
    allocate_document,
    clear_document,
    finalizer_document,
    holds,
    is_reserved_for,
    reserve_document,
)
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

    async def settle(self, record: AllocationRecord) -> Settled:
        """Make the allocation of the pod's claim that of the record; safe to repeat.

        ``Unsettled``: the claim is gone, is another pod's, or keeps changing.
        """
        with self._tracing.start_span("claim", begins=False, kind=SpanKind.CLIENT) as span:
            span.set_attribute("hami.claim", record.claim)
            settled = await self._settle(record)
            span.set_attribute("hami.outcome", settled)
        self._metrics.claims.labels(outcome=settled).inc()
        return settled

    async def _settle(self, record: AllocationRecord) -> Settled:
        name = f"ResourceClaim {record.claim}"
        for _ in range(TRIES):
            stored = await self.api.read(record.namespace, record.claim)
            now, pod = self._live(record), self._state.pods.get(record.pod_uid)
            if now is None or (pod is not None and pod.node not in ("", record.node)):
                raise Unsettled(
                    outcome="taken-back", text="the reservation was released; try again"
                )
            if stored is None or stored.claim.metadata.deletion_timestamp is not None:
                text = f"{name} of the pod does not exist; it is created again"
                raise Unsettled(outcome="claim-missing", text=text)
            if owner_pod(stored.claim.metadata) != record.pod_uid:
                text = f"{name} is not controlled by the pod; delete the claim"
                raise Unsettled(outcome="claim-foreign", text=text)
            try:
                return await self._bring(stored, now)
            except (Conflict, NotFound):
                continue
        raise Unsettled(outcome="claim-changing", text=f"{name} kept changing; try again")

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
            await self._write("reserve", stored, reserve_document(stored.claim, record))
            return "reserved"
        config = stored.config
        if FINALIZER not in stored.finalizers:
            document = finalizer_document(stored)
            stored = await self._write("finalizer", stored, document, subresource="")
        if stored.is_in_use():
            stored = await self._write("clear", stored, clear_document(stored.claim))
        document = allocate_document(
            stored.claim,
            record,
            config=config,
            at=kube_time(self._state.clock.now_s()),
            share_ids=lambda: str(uuid4()),
        )
        await self._write("allocate", stored, document)
        _log.info("claim allocated", extra=_fields(record, outcome=settled))
        return settled

    async def _write(
        self, write: str, stored: StoredClaim, document: bytes, *, subresource: str = "status"
    ) -> StoredClaim:
        self._metrics.claim_writes.labels(write=write).inc()
        return await self.api.patch(stored.claim, document, subresource=subresource)

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
                await self._write("clear", stored, clear_document(stored.claim))
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
