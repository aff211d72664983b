# SPDX-License-Identifier: Apache-2.0
"""Books the devices that kube-scheduler allocated to ResourceClaims (ADR 0038).

Each replica follows all claims. An allocation of our driver without a record is booked like a bind,
conditional on the node's sequence and within quotas, so that replicas and binds cannot book a share
twice. If it does not fit, no record is written, the node agent refuses to prepare the claim, and a
condition of the claim's devices and an Event have the reason; the allocation is tried again until
it fits or is gone. The replica whose condition the API server takes also writes the Event and the
decision; the others find the condition. A claim that was never refused gets no condition. A record
whose claim has another allocation, or none, is settled by ``Settling.doubt``. Seconds throughout.
"""

import logging
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final, Literal

import anyio
import msgspec
from msgspec.structs import replace

from hami_common.dra.claims import (
    ResourceClaim,
    containers_of,
    in_force,
    node_of,
    shown_amounts,
)
from hami_common.dra.names import BOOKED, GROUP, VERSION
from hami_common.dra.podclaims import owner_pod
from hami_common.errors import Conflict, Denied, HamiError, NotFound, RequestInvalid, Unavailable
from hami_common.events.allocation import Account, is_of_claim
from hami_common.events.decision import DecisionRecord
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares
from hami_common.pods import annotations as keys
from hami_common.ports import KubeApi, WatchEvent
from hami_common.runtime.kubeio.recorder import EventRecorder, ObjectRef
from hami_common.runtime.quarantine import Attempt
from hami_core.ledger.holding import Holding
from hami_core.ledger.podclaim import StoredClaim
from hami_core.ledger.stimuli import Append, ClaimPlanned
from hami_core.planning.conditions import Condition, kube_time
from hami_scheduler.settings import Settings
from hami_scheduler.shell.binder import REFUSALS, Binder, Refused
from hami_scheduler.shell.bounded import until_set
from hami_scheduler.shell.claimapi import CLAIMS, read_claim
from hami_scheduler.shell.decisions import Decisions
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.isolation import CLAIM
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.podapi import bare_pod
from hami_scheduler.shell.state import State

INVALID: Final = "AllocationInvalid"
"""Reason of the Event about an allocation that cannot be read as shares of ours."""

REFUSED: Final = "False"
"""Status of the condition ``BOOKED`` of a refused claim."""

_log = logging.getLogger(__name__)


class Claims:
    """Follows the claims of one scheduler."""

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
        writer: str,
    ) -> None:
        """Book through ``binder``; ``writer`` names this replica in Events."""
        self._state = state
        self._binder = binder
        self._effects = effects
        self._keeper = effects.keeper
        self._api = effects.claims.api
        self._kube = kube
        self._decisions = decisions
        self._options = settings.dra
        self._tick_s = settings.tick_s
        self._writer = writer
        self._fence_tries = settings.fence_tries
        self._metrics = metrics
        self._events = EventRecorder(
            kube, component="hami-scheduler", clock=state.clock, instance=writer
        )
        self._claims: dict[str, ResourceClaim] = {}
        """Claims with an allocation of ours, by uid."""
        self._ids: dict[str, str] = {}
        """``ResourceClaim.allocation_id`` of each of them, which is a hash."""
        self._is_synced = False
        self._is_complaining = False
        self._is_denied = False
        """The API server does not let this account write conditions, which was logged."""
        self._refusals: dict[str, tuple[str, str]] = {}
        """(allocation id, code) of this replica's newest verdict about each refused claim."""
        self._dirty: set[str] = set()
        """Claims, by uid, that changed since they were reconciled."""
        self._unsettled: set[str] = set()
        """UIDs with a record whose allocation is gone, and which the node may still use."""
        self._all_due_s = self._records_due_s = 0.0
        self._wake = anyio.Event()

    # --- following -------------------------------------------------------------------------------

    async def work(self) -> None:
        """Follow claims while the cluster has them; indefinitely, or not at all if off."""
        if not self._options.enabled:
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self._reconcile_all)
            while True:
                try:
                    await self._watch()
                except (NotFound, Denied, Unavailable) as error:
                    level = logging.DEBUG if self._is_complaining else logging.WARNING
                    self._is_complaining = True
                    _log.log(level, "claims not followed", extra={"problem": str(error)})
                self._is_synced = False
                await self._state.clock.sleep(self._options.discovery_s)

    async def _watch(self) -> None:
        listed: set[str] | None = set()
        async with self._kube.list_watch(CLAIMS) as events:
            async for event in events:
                if event.type == "SYNCED":
                    if listed is not None:
                        for uid in self._claims.keys() - listed:
                            self._forget(uid)
                            self._dirty.add(uid)
                        self._keeper.keep_claims(listed)
                    listed, self._is_synced, self._is_complaining = None, True, False
                else:
                    name = bare_pod(event.raw)
                    uid = name.metadata.uid
                    await self._state.quarantine.run(
                        CLAIM,
                        uid,
                        partial(self._take, event, uid),
                        name=name.names(),
                        size_bytes=len(event.raw),
                        is_retried=False,  # the next version of the claim is read
                    )
                    self._dirty.add(uid)
                    if listed is not None and event.type != "DELETED":
                        listed.add(uid)
                self._wake.set()

    def _take(self, event: WatchEvent, uid: str) -> None:
        if event.type == "DELETED":
            self._forget(uid)
            self._keeper.forget_claim(uid)
            self._state.quarantine.forget(CLAIM, uid)
            return
        try:
            claim = read_claim(event.raw)
        except HamiError:
            self._metrics.undecodable.labels(source="claims").inc()
            raise
        if pod_uid := owner_pod(claim.metadata):
            self._forget(uid)
            self._keeper.see_claim(StoredClaim.of(event.raw), pod_uid)
        elif allocation_id := claim.allocation_id():
            self._claims[uid], self._ids[uid] = claim, allocation_id
        else:
            self._forget(uid)

    def _forget(self, uid: str) -> None:
        self._claims.pop(uid, None)
        self._ids.pop(uid, None)

    async def _reconcile_all(self) -> None:
        """Reconcile changed claims at once, and those that wait at each interval.

        What is free changes too, and so do the states that agents report. Records are compared
        with all claims at a longer interval, because they are many.
        """
        while True:
            if self._wake.is_set():
                self._wake = anyio.Event()
            now_s = self._state.clock.monotonic_s()
            if self._is_synced and self._state.is_complete:
                dirty, self._dirty = self._dirty, set()
                if now_s >= self._all_due_s:
                    self._all_due_s = now_s + self._tick_s
                    dirty |= self._unsettled | {u for u in self._claims if not self._is_booked(u)}
                    known = self._refusals.items()
                    self._refusals = {uid: one for uid, one in known if uid in self._claims}
                if now_s >= self._records_due_s:
                    self._records_due_s = now_s + self._options.discovery_s
                    dirty |= {
                        holding.record.pod_uid
                        for holding in self._state.ledger.holdings()
                        if is_of_claim(holding.record)
                    }
                await self._reconcile(dirty)
            await until_set(self._wake, self._state.clock, at_most_s=self._tick_s)

    async def _reconcile(self, uids: AbstractSet[str]) -> None:
        """Release what claims hold no more, then book what they have been allocated."""
        for uid in sorted(uids):
            self._unsettled.discard(uid)
            for holding in self._state.ledger.holdings_of_pod(uid):
                if is_of_claim(holding.record) and (
                    self._ids.get(uid) != holding.record.allocation_id
                ):
                    await self._isolated(uid, partial(self._settle, holding))
        for claim in sorted((self._claims[uid] for uid in uids & self._claims.keys()), key=_age):
            # Else it is gone, or was changed meanwhile and is considered again.
            if self._claims.get(claim.uid) is claim and not self._is_booked(claim.uid):
                await self._isolated(claim.uid, partial(self._book, claim))
            elif claim.verdict().status == REFUSED:
                await self._isolated(claim.uid, partial(self._withdraw, claim))
            else:
                await self._isolated(claim.uid, partial(self._show, claim))

    async def _show(self, claim: ResourceClaim) -> None:
        """Write the amounts of a resized claim into its status; a resize books the last ones."""
        records = (one.record for one in self._state.ledger.holdings_of_pod(claim.uid))
        allocation_id = self._ids.get(claim.uid)
        record = next((one for one in records if one.allocation_id == allocation_id), None)
        if record is not None:
            shares = record.limits or record.containers
            if shown_amounts(claim, shares):
                await self._effects.claims.show(claim, shares)

    def resized(self, uid: str) -> None:
        """Consider a claim whose record a resize has changed."""
        self._dirty.add(uid)
        self._wake.set()

    def _is_booked(self, uid: str) -> bool:
        return self._has_record(uid, self._ids[uid])

    def _has_record(self, uid: str, allocation_id: str) -> bool:
        return any(
            holding.record.allocation_id == allocation_id
            for holding in self._state.ledger.holdings_of_pod(uid)
        )

    async def _settle(self, holding: Holding) -> None:
        uid = holding.record.pod_uid
        self._unsettled.add(uid)
        await self._effects.settling.doubt(holding)
        if not self._has_record(uid, holding.record.allocation_id):
            self._unsettled.discard(uid)

    # --- booking ---------------------------------------------------------------------------------

    async def _book(self, claim: ResourceClaim) -> None:
        """Book the allocation, or report why it cannot be booked."""
        node = ""
        try:
            node = node_of(claim)
            containers = containers_of(claim, self._devices(node))
        except RequestInvalid as error:
            await self._refuse(claim, node, f"{INVALID}: {error}")
            return
        planned = self._planned(claim, node, containers)
        if not await self._is_current(claim, planned):
            return
        try:
            holding = await self._binder.book(
                node,
                partial(self._state.core.answer, planned),
                traceparent=(claim.metadata.annotations or {}).get(keys.TRACEPARENT, ""),
            )
        except Refused as refused:
            if refused.outcome in REFUSALS:
                await self._refuse(claim, node, refused.text)
                return
            _log.warning("claim not booked", extra=_fields(claim, problem=refused.text))
            return
        self._refusals.pop(claim.uid, None)
        if holding is not None and holding.record.writer == self._writer:
            self._metrics.claims.labels(outcome="booked").inc()
            _log.info("claim booked", extra=_fields(claim, node=node))
            self._decisions.add(
                replace(
                    self._decision(claim, node, "placed"),
                    allocation_id=holding.record.allocation_id,
                    ledger_seq=holding.revision,
                    containers=containers,
                )
            )
            await self._effects.ledger.confirm(holding)
            if claim.verdict().status == REFUSED:
                await self._withdraw(claim)

    def _planned(
        self,
        claim: ResourceClaim,
        node: str,
        containers: tuple[ContainerShares, ...],
        *,
        must: bool = False,
    ) -> ClaimPlanned:
        return ClaimPlanned(
            node=node,
            claim_uid=claim.uid,
            namespace=claim.namespace,
            name=claim.metadata.name,
            containers=containers,
            allocation_id=claim.allocation_id(),
            now_s=self._state.clock.now_s(),
            account=_account_of(claim),
            must=must,
        )

    async def _is_current(self, claim: ResourceClaim, planned: ClaimPlanned) -> bool:
        """Return whether the claim has this allocation, as far as that may be in doubt.

        Another replica releases a record when the API server shows that its allocation is gone: a
        replica whose watch lags must not book it again.
        """
        is_released = self._state.ledger.state_of(planned.node, claim.uid) == "released"
        if not is_released or not isinstance(self._state.core.answer(planned), Append):
            return True
        fresh = await self._api.get(claim.namespace, claim.metadata.name)
        if (
            fresh is not None
            and fresh.uid == claim.uid
            and fresh.allocation_id() == claim.allocation_id()
        ):
            return True
        self._forget(claim.uid)  # the watch delivers the claim's newest version
        return False

    def _devices(self, node: str) -> list[Device]:
        return [
            device for one in self._state.core.inventory.of_node(node) for device in one.devices
        ]

    def _decision(
        self, claim: ResourceClaim, node: str, verdict: Literal["placed", "refused"]
    ) -> DecisionRecord:
        return DecisionRecord(
            verb="bind",
            namespace=claim.namespace,
            pod=claim.metadata.name,
            pod_uid=claim.uid,
            time_s=self._state.clock.now_s(),
            verdict=verdict,
            snapshot_id=self._state.ledger.snapshot_id,
            node=node,
            writer=self._decisions.writer,
        )

    async def _refuse(self, claim: ResourceClaim, node: str, text: str) -> None:
        """Report a refusal ``<code>: <sentence>``, unless its code is that of the newest one.

        Amounts in the sentence change with each pod that ends, so they are those of the first
        refusal with this code. ``Conflict``, ``Unavailable``: it is to be reported later.
        """
        code = text.partition(":")[0]
        refusal = (claim.allocation_id(), code)
        if self._refusals.get(claim.uid) == refusal:
            return
        known = claim.verdict()
        is_known = (known.status, known.reason) == (REFUSED, code)
        is_ours = not is_known and await self._report(claim, REFUSED, code, text)
        self._refusals[claim.uid] = refusal
        if not is_ours:
            return
        self._metrics.claims.labels(outcome="refused").inc()
        _log.warning("claim refused", extra=_fields(claim, problem=text))
        self._decisions.add(replace(self._decision(claim, node, "refused"), error=text))
        await self._events.record(
            ObjectRef(
                kind="ResourceClaim",
                name=claim.metadata.name,
                namespace=claim.namespace,
                uid=claim.uid,
                api_version=f"{GROUP}/{VERSION}",
            ),
            reason=code,
            message=text,
            kind="Warning",
        )

    async def _report(self, claim: ResourceClaim, status: str, reason: str, text: str) -> bool:
        """Write the claim's condition; return whether this replica is the one that wrote it.

        Without the right to write it, each replica reports by Events alone.
        """
        condition = Condition(
            type=BOOKED,
            status=status,
            reason=reason,
            message=text,
            last_transition_time=kube_time(self._state.clock.now_s()),
        )
        try:
            return await self._api.report(claim, condition)
        except Denied as error:
            level = logging.DEBUG if self._is_denied else logging.WARNING
            self._is_denied = True
            _log.log(level, "condition not written", extra=_fields(claim, problem=str(error)))
            return True

    async def _withdraw(self, claim: ResourceClaim) -> None:
        """Replace the refusal in the status of a claim that is booked now."""
        await self._report(claim, "True", "Booked", "the devices are booked in the ledger")

    async def _isolated(self, uid: str, work: Attempt) -> None:
        """Handle one claim; a failure does not keep the others from being handled."""
        if not self._state.quarantine.is_due(CLAIM, uid):
            return
        claim = self._claims.get(uid)
        name = ("", "") if claim is None else (claim.namespace, claim.metadata.name)
        try:
            await self._state.quarantine.run(
                CLAIM, uid, work, passes=(Unavailable, Conflict), name=name, is_retried=False
            )
        except (Unavailable, Conflict) as error:
            _log.debug("claim is handled later", extra={"uid": uid, "problem": str(error)})

    # --- after the ledger was lost ---------------------------------------------------------------

    async def restore(self) -> None:
        """Book the claims that containers use already, before anything is bound.

        The agent prepares no claim without a record, so these were booked before. Others are booked
        like new ones. ``Unavailable``: it cannot be known yet.
        """
        if not self._options.enabled:
            return
        try:
            documents = await self._api.list_all()
        except Denied as error:
            _log.warning("claims not compared with the ledger", extra={"problem": str(error)})
            return
        for raw in documents:
            uid = bare_pod(raw).metadata.uid
            await self._state.quarantine.run(
                CLAIM, uid, partial(self._restore, raw), passes=(Unavailable,), is_retried=False
            )

    async def _restore(self, raw: msgspec.Raw) -> None:
        claim = read_claim(raw)
        allocation_id = claim.allocation_id()
        if (
            not allocation_id
            or owner_pod(claim.metadata)
            or self._has_record(claim.uid, allocation_id)
        ):
            return
        if not await self._is_in_use(claim):
            return
        if not self._state.has("inventory"):
            raise Unavailable(peer="scheduler", detail="devices of the nodes are not known yet")
        node = node_of(claim)
        containers = in_force(claim, containers_of(claim, self._devices(node)))
        async with self._effects.ledger.planning(node):
            for _ in range(self._fence_tries):
                plan = self._state.core.answer(self._planned(claim, node, containers, must=True))
                if not isinstance(plan, Append):
                    return  # booked meanwhile, or another allocation is to be released first
                try:
                    await self._effects.ledger.append(plan)
                except Conflict:
                    await self._effects.ledger.read_node(node)
                    continue
                break
            else:
                raise Unavailable(peer="NATS", detail=f"node {node} kept changing")
        self._metrics.repairs.labels(action="claim-restored").inc()
        _log.warning("claim restored in the ledger", extra=_fields(claim, node=node))
        holding = self._state.ledger.holding(node, claim.uid)
        if holding is not None:
            await self._effects.ledger.confirm(holding)

    async def _is_in_use(self, claim: ResourceClaim) -> bool:
        """Return whether containers of a pod that the claim is reserved for exist."""
        for consumer in claim.consumers():
            if consumer.resource != "pods":
                continue
            pod = await self._effects.pods.get(claim.namespace, consumer.name)
            is_same = pod is not None and pod.uid == consumer.uid
            if is_same and pod is not None and pod.is_started and not pod.is_finished:
                return True
        return False


def _age(claim: ResourceClaim) -> tuple[str, str]:
    """Return the place of a claim in a round: the one allocated first comes first."""
    return claim.allocated_at(), claim.uid


def _account_of(claim: ResourceClaim) -> Account | None:
    queue = (claim.metadata.labels or {}).get(keys.QUEUE_LABEL, "")
    return Account(queue=queue) if queue else None


def _fields(claim: ResourceClaim, **more: object) -> dict[str, object]:
    return {"namespace": claim.namespace, "claim": claim.metadata.name, "uid": claim.uid, **more}
