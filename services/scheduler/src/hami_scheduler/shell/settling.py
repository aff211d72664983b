# SPDX-License-Identifier: Apache-2.0
"""Settles allocations whose outcome is unknown, by comparing the ledger with the pod itself.

A reservation whose lease expired, a Binding without an answer, a committed pod without a record and
a record without a pod each end as: bound, released, or restored. The rules that make a release safe
are those of ``hami_scheduler.shell.ledgerwriter``. Seconds throughout.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hami_common.dra.claims import UNPREPARED
from hami_common.errors import Conflict, Unavailable
from hami_common.events.allocation import is_of_claim, is_of_owner
from hami_core.ledger import binding, repair
from hami_core.ledger.holding import Holding
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import FailurePlanned, RestorePlanned
from hami_core.placement.reasons import NodeRefusal
from hami_scheduler.settings import Settings
from hami_scheduler.shell.isolation import RESTORE
from hami_scheduler.shell.ledgerwriter import LedgerWriter, fields_of
from hami_scheduler.shell.podapi import PodApi
from hami_scheduler.shell.podclaims import PodClaims
from hami_scheduler.shell.state import State

EXPECTED_MOST: Final = 4096
"""Allocations in Bindings of other schedulers whose result the watch has yet to deliver."""

_log = logging.getLogger(__name__)


class Settling:
    """Determines the outcome of a reservation, and acts on it."""

    def __init__(
        self,
        *,
        state: State,
        ledger: LedgerWriter,
        pods: PodApi,
        claims: PodClaims,
        settings: Settings,
    ) -> None:
        """Write with ``ledger``; leave work that needs more calls to ``state.later``."""
        self._state = state
        self._ledger = ledger
        self._pods = pods
        self._claims = claims
        self._unused_s: dict[str, float] = {}
        """Time since which a claim's allocation is known to be gone, by allocation id."""
        self._settings = settings
        self._in_flight: set[str] = set()
        self._expected: OrderedDict[str, str] = OrderedDict()
        """Allocation id by uid of pods whose Binding another scheduler posts."""

    def expect_bound(self, holding: Holding) -> None:
        """Note that another scheduler's Binding carries this allocation."""
        record = holding.record
        self._expected[record.pod_uid] = record.allocation_id
        if len(self._expected) > EXPECTED_MOST:
            self._expected.popitem(last=False)  # examined when its lease expires

    def is_expected(self, holding: Holding) -> bool:
        """Return whether this bound allocation is one of those, once for each."""
        record = holding.record
        if self._expected.get(record.pod_uid) != record.allocation_id:
            return False
        del self._expected[record.pod_uid]
        return True

    @contextmanager
    def while_binding(self, pod_uid: str) -> Iterator[None]:
        """Mark the pod as being bound here, so that its lease is not examined meanwhile."""
        self._in_flight.add(pod_uid)
        try:
            yield
        finally:
            self._in_flight.discard(pod_uid)

    async def restore(self, step: repair.Restore) -> str:
        """Restore a committed allocation in the ledger; returns the action taken, in one word.

        While that fails because of the pod, its node gets no new allocations.
        """
        node, uid = step.signed.placement.node, step.signed.pod_uid
        try:
            outcome = await self._restore(step)
        except Unavailable:
            raise
        except Exception as error:
            self._state.withheld.add(RESTORE, uid, error, node=node)
            raise
        self._state.withheld.lift(RESTORE, uid)
        return outcome

    async def _restore(self, step: repair.Restore) -> str:
        signed = step.signed
        node, uid = signed.placement.node, signed.pod_uid
        is_view_fresh = is_started = False
        async with self._ledger.planning(node):
            for _ in range(self._settings.fence_tries):
                pod = self._state.pods.get(uid)
                if not _runs(pod, uid, node):
                    # Our watch may lag behind the list that showed the pod; a rebuild from the
                    # watch alone would allocate the share again.
                    pod = await self._pods.get(signed.namespace, signed.pod)
                if pod is None or not _runs(pod, uid, node):
                    return "obsolete"
                plan = self._state.core.answer(
                    RestorePlanned(signed=signed, now_s=self._now_s(), must=is_started)
                )
                if plan is None:
                    return "present"
                if isinstance(plan, NodeRefusal):
                    if is_view_fresh:
                        await self._share_lost(step, plan)
                        return "share-lost"
                    # No fence guards a refusal, nor a pod that wins over arithmetic: our feed may
                    # lag behind the pod that we saw, and the pod may have ended since.
                    fresh = await self._pods.get(signed.namespace, signed.pod)
                    if fresh is None or not _runs(fresh, uid, node):
                        return "obsolete"
                    is_started = fresh.is_started
                    await self._ledger.read_node(node)
                    is_view_fresh = True
                    continue
                try:
                    plan = plan.under(
                        pod.account,
                        sku=pod.sku,
                        service_class=pod.service_class,
                        labels=pod.labels,
                    )
                    await self._ledger.append(plan, traceparent=pod.traceparent)
                except Conflict:
                    await self._ledger.read_node(node)
                    continue
                break
            else:
                raise Unavailable(peer="NATS", detail=f"node {node} kept changing")
        holding = self._state.ledger.holding(node, uid)
        if holding is not None:
            _log.warning("allocation restored from its pod", extra=fields_of(holding.record))
            await self._ledger.confirm(holding)
        return "restored"

    async def _share_lost(self, step: repair.Restore, refusal: NodeRefusal) -> None:
        signed = step.signed
        write = self._state.core.answer(
            FailurePlanned(signed=signed, refusal=refusal, now_s=self._now_s())
        )
        if write is None:
            return
        _log.error(
            "share of a bound pod is lost",
            extra={
                "namespace": signed.namespace,
                "pod": signed.pod,
                "node": signed.placement.node,
                "allocation_id": signed.allocation_id,
                "reason": refusal.text,
            },
        )
        await self._ledger.write_state(write)

    async def examine(self, holding: Holding) -> str:
        """Settle a reservation whose lease expired; returns the result, in one word."""
        record = holding.record
        if record.pod_uid in self._in_flight:
            return "in-flight"
        if is_of_owner(record):  # no Binding is ever posted under it
            await self._ledger.release(holding, "lease-expired")
            return "hold-expired"
        if record.origin:  # no Binding is posted for it: it exists, or it does not
            found = await self.doubt(holding)
            await self._ledger.confirm(holding)
            return found
        return await self.settle(holding)

    async def settle(self, holding: Holding) -> binding.Fate:
        """Determine whether a Binding took effect, prevent any other, and act accordingly."""
        record = holding.record
        pod = await self._pods.get(record.namespace, record.pod)
        finding = self._fate(pod, holding)
        if finding in ("free", "deleting"):
            pod = await self._pods.move_pod(holding)
            finding = self._fate(pod, holding)
        if finding == "ours":
            await self._ledger.confirm(holding)
        elif finding == "same-node" and pod is not None and pod.signed is not None:
            self._state.later(
                repair.Restore(signed=pod.signed, must=pod.is_started, replaces=holding)
            )
        elif finding == "unreadable":
            _log.error("bound pod carries an allocation we cannot verify", extra=fields_of(record))
        else:
            reason = {"free": "lease-expired", "elsewhere": "bound-elsewhere"}.get(
                finding, f"pod-{finding}"
            )
            await self._ledger.release(holding, reason)
            if record.claim and finding == "free":
                await self._claims.clear(
                    namespace=record.namespace,
                    pod=record.pod,
                    pod_uid=record.pod_uid,
                    claim=record.claim,
                )
        return finding

    def _fate(self, pod: PodFacts | None, holding: Holding) -> binding.Fate:
        record = holding.record
        return binding.fate_of(
            pod, uid=record.pod_uid, node=record.node, allocation_id=record.allocation_id
        )

    async def doubt(self, holding: Holding) -> str:
        """Check whether the pod of a record is really gone; returns the result."""
        record = holding.record
        if is_of_owner(record):  # held for pods that need not exist yet, and ended by its lease
            return "held"
        if is_of_claim(record):
            return await self._doubt_claim(holding)
        pod = await self._pods.get(record.namespace, record.pod)
        if pod is None or pod.uid != record.pod_uid:
            await self._ledger.release(holding, "pod-gone")
            return "gone"
        judgement, reason = repair.judge(holding, pod)
        if judgement == "release":
            await self._ledger.release(holding, reason)
            return reason
        if pod.is_labelled:
            return "present"
        # The pod exists and our label does not: its share stays taken, and our watch must see it
        # end.
        _log.warning("label of a pod with a share was removed", extra=fields_of(record))
        document = binding.label_document(uid=record.pod_uid)
        pod = await self._pods.patch(record.namespace, record.pod, record.pod_uid, document)
        if pod is None or pod.uid != record.pod_uid:
            await self._ledger.release(holding, "pod-gone")
            return "gone"
        return "relabelled"

    async def _doubt_claim(self, holding: Holding) -> str:
        """Release a claim's share unless the claim has this allocation or the node uses it.

        kube-controller-manager drops an allocation when the last pod has ended, and the agent may
        still have to unprepare the claim. An agent that cannot report that is not waited for longer
        than ``dra.unprepare_wait_s``.
        """
        record = holding.record
        claim = await self._claims.api.get(record.namespace, record.pod)
        if claim is not None and claim.uid != record.pod_uid:
            claim = None  # a later one of the same name
        if claim is not None and claim.allocation_id() == record.allocation_id:
            self._unused_s.pop(record.allocation_id, None)
            await self._ledger.confirm(holding)
            return "present"
        now = self._state.ledger.holding(record.node, record.pod_uid)
        if now is None or now.record.allocation_id != record.allocation_id:
            self._unused_s.pop(record.allocation_id, None)
            return "gone"
        if len(self._unused_s) >= EXPECTED_MOST:
            self._unused_s.clear()  # some were released by other replicas
        now_s = self._state.clock.monotonic_s()
        since_s = self._unused_s.setdefault(record.allocation_id, now_s)
        if is_prepared(now) and now_s - since_s < self._settings.dra.unprepare_wait_s:
            return "in-use"
        reason = "claim-gone" if claim is None else "claim-deallocated"
        if await self._ledger.release(now, reason):
            self._unused_s.pop(record.allocation_id, None)
        return reason

    def _now_s(self) -> float:
        return self._state.clock.now_s()


def _runs(pod: PodFacts | None, uid: str, node: str) -> bool:
    """Return whether this is the pod, assigned to the node and not finished."""
    return pod is not None and pod.uid == uid and pod.node == node and not pod.is_finished


def is_prepared(holding: Holding) -> bool:
    """Return whether the agent reported the claim as prepared, and not as unprepared since."""
    state = holding.state
    return (
        state is not None
        and state.allocation_id == holding.record.allocation_id
        and state.state in ("prepared", "running")
        and state.code != UNPREPARED
    )
