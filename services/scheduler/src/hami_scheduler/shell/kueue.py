# SPDX-License-Identifier: Apache-2.0
"""Answers Kueue's AdmissionChecks of the controller ``hami.io/placement`` (ADR 0032).

A Workload with reserved quota is Ready once devices for all its pods are held in the ledger, each
pod's under a uid of its own. Without a placement it is sent back to its queue (Retry), and Rejected
only if unused devices could not hold it either. The holds are renewed until the pods took them
over, and released when the Workload loses its quota, ends or is deleted; without renewal their
lease ends them.

One replica does this (``leader``). Workloads are handled one after another, so two that fit alone
but not together never get the same devices. While bus, ledger or API server are unavailable,
Workloads stay Pending. Without Kueue's kinds in the cluster nothing happens. Seconds throughout.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct

from hami_common.bounds import Word
from hami_common.errors import Conflict, Denied, NotFound, RequestInvalid, Unavailable
from hami_common.events.codec import decode
from hami_common.pods.podview import MetadataView
from hami_common.ports import KubeApi, WatchEvent
from hami_common.runtime.kubeio.recorder import EventRecorder, ObjectRef
from hami_core.ledger.podfacts import PodReader
from hami_core.planning import workloads
from hami_core.planning.conditions import Condition
from hami_core.planning.demands import Demand, Verdict, demands_of
from hami_core.planning.workloads import CONTROLLER, Check, Flavor, Readiness, Workload
from hami_scheduler.settings import Settings
from hami_scheduler.shell.binder import Binder
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.follower import Followed, Follower
from hami_scheduler.shell.isolation import WORKLOAD
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.ownerholds import OwnerHolds
from hami_scheduler.shell.podapi import bare_pod
from hami_scheduler.shell.state import State

GROUP: Final = "kueue.x-k8s.io"
_FOLLOWED: Final = Followed(
    group=GROUP,
    versions=("v1beta2", "v1beta1"),
    kinds=("workloads", "admissionchecks", "resourceflavors", "nodes"),
    isolation=WORKLOAD,
)

_log = logging.getLogger(__name__)
_Document = dict[str, Any]


class _CheckSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    controller_name: Word = ""
    parameters: msgspec.Raw = msgspec.Raw(b"null")


class _CheckStatus(Struct, frozen=True, kw_only=True):
    conditions: list[Condition] = []


class _AdmissionCheck(Struct, frozen=True, kw_only=True):
    metadata: MetadataView = MetadataView()
    spec: _CheckSpec = _CheckSpec()
    status: _CheckStatus = _CheckStatus()


class Placement:
    """The controller of Workloads of one scheduler."""

    def __init__(
        self,
        *,
        state: State,
        reader: PodReader,
        binder: Binder,
        effects: Effects,
        kube: KubeApi,
        settings: Settings,
        metrics: Metrics,
        writer: str,
    ) -> None:
        """Hold shares through ``binder``; ``writer`` names this replica in the election."""
        self._state = state
        self._reader = reader
        self._options = settings.kueue
        self._metrics = metrics
        self._clock = state.clock
        self._recorder = EventRecorder(
            kube, component="hami-scheduler", clock=state.clock, instance=writer
        )
        self._readiness = Readiness(patience_s=self._options.unready_s)
        self._holds = OwnerHolds(
            "workload",
            state=state,
            binder=binder,
            effects=effects,
            lease_s=self._options.lease_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            reject_after_s=self._options.reject_after_s,
        )
        self._follower = Follower(
            self,
            _FOLLOWED,
            state=state,
            kube=kube,
            settings=settings,
            options=self._options,
            writer=writer,
        )
        self.forget()

    async def work(self) -> None:
        """Answer AdmissionChecks while this replica leads; indefinitely, or not at all if off."""
        if self._options.enabled:
            await self._follower.work()

    # --- hami_scheduler.shell.follower.Reconciler ------------------------------------------------

    def forget(self) -> None:
        """Forget all objects, because they are listed again."""
        self._workloads: dict[str, Workload] = {}
        self._checks: dict[str, _AdmissionCheck] = {}
        self._flavors: dict[str, Flavor] = {}
        self._dirty: set[str] = set()
        self._admitted_s: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        """Text of the last refusal by uid of the Workload."""
        self._holds.forget()

    def listed(self) -> None:
        """Reconcile all Workloads."""
        self._dirty |= self._workloads.keys()

    def take(self, kind: str, event: WatchEvent) -> None:
        """Read one event."""
        is_gone = event.type == "DELETED"
        metadata = bare_pod(event.raw).metadata
        if kind == "workloads":
            if is_gone:
                self._workloads.pop(metadata.uid, None)
            else:
                self._workloads[metadata.uid] = decode(event.raw, Workload, what="Workload")
            self._dirty.add(metadata.uid)
        elif kind == "admissionchecks":
            self._checks.pop(metadata.name, None)
            if not is_gone:
                check = decode(event.raw, _AdmissionCheck, what="AdmissionCheck")
                if check.spec.controller_name == CONTROLLER:
                    self._checks[metadata.name] = check
            self._dirty |= self._workloads.keys()
        elif kind == "resourceflavors":
            self._flavors.pop(metadata.name, None)
            if not is_gone:
                flavor = decode(event.raw, Flavor, what="ResourceFlavor")
                self._flavors[metadata.name] = flavor
        else:
            self._holds.take_node(event)

    async def round(self, *, is_synced: bool) -> None:
        """Reconcile changed and waiting Workloads, the oldest first."""
        self._holds.note_readiness()
        if not is_synced:
            return
        await self._state_checks()
        if self._state.is_complete:
            # Workloads that were deleted while no replica could see it.
            for uid in sorted(self._holds.owners() - self._workloads.keys()):
                await self._isolated(uid)
        dirty, self._dirty = self._dirty, set()
        for uid in sorted(dirty | self._unsettled(), key=self._order):
            await self._isolated(uid)

    def _order(self, uid: str) -> tuple[str, str]:
        """Return the place of a Workload in a round: the oldest first."""
        workload = self._workloads.get(uid, Workload())
        return workload.metadata.creation_timestamp or "", uid

    def _unsettled(self) -> set[str]:
        """Return the Workloads that wait for an answer, or whose holds are to be renewed."""
        waiting = {
            uid
            for uid, workload in self._workloads.items()
            if workload.is_reserved()
            and any(check.state == "Pending" for check in workload.checks(self._checks))
        }
        return (self._holds.owners() | waiting) & self._workloads.keys()

    async def _isolated(self, uid: str) -> None:
        workload = self._workloads.get(uid)
        metadata = MetadataView() if workload is None else workload.metadata
        if self._state.quarantine.is_due(WORKLOAD, uid):
            await self._state.quarantine.run(
                WORKLOAD,
                uid,
                partial(self._reconcile, uid),
                name=(metadata.namespace, metadata.name),
                is_retried=False,  # the next round has it again
            )

    # --- one Workload ----------------------------------------------------------------------------

    async def _reconcile(self, uid: str) -> None:
        workload = self._workloads.get(uid)
        checks = [] if workload is None else workload.checks(self._checks)
        try:
            if workload is None or not checks or not workload.is_reserved():
                await self._let_go(uid, workload, checks)
            elif any(check.state in ("Retry", "Rejected") for check in checks):
                await self._holds.release(uid, "workload-refused")
            elif any(check.state != "Ready" for check in checks) or self._has_lost(workload):
                await self._answer(workload, checks)
            else:
                await self._keep(workload)
        except (Conflict, Unavailable, NotFound) as error:
            # The next round has it again, with the newest version of the Workload.
            level = logging.DEBUG if isinstance(error, Conflict) else logging.WARNING
            _log.log(level, "workload not settled", extra={"workload": uid, "problem": str(error)})

    def _has_lost(self, workload: Workload) -> bool:
        """Return whether a Workload that has not started lost its holds to their leases."""
        uid = workload.metadata.uid
        return not (
            workload.has("Admitted")
            or self._holds.of(uid)
            or any(pod.hold == uid for pod in self._state.pods)
        )

    async def _let_go(self, uid: str, workload: Workload | None, checks: Sequence[Check]) -> None:
        """Release the holds of a Workload without quota, and show why it was refused last."""
        await self._holds.release(uid, "workload-gone" if workload is None else "workload-stopped")
        self._admitted_s.pop(uid, None)
        if workload is None or workload.has("Finished"):
            self._refusals.pop(uid, None)
            self._holds.gone(uid)
            return
        text = self._refusals.get(uid, "")
        pending = [one for one in checks if one.state == "Pending" and one.message != text]
        if text and pending and not workload.has("QuotaReserved"):
            await self._patch(workload, pending, Verdict(state="Pending", message=text))

    async def _answer(self, workload: Workload, checks: Sequence[Check]) -> None:
        """Try to hold the Workload's devices, and report the result."""
        uid = workload.metadata.uid
        verdict, demands = await self._judge(workload)
        if verdict.state in ("Retry", "Rejected"):
            await self._holds.release(uid, "workload-refused")
            again = f"; next attempt in {self._options.requeue_s} s"
            self._refusals[uid] = verdict.message
            if verdict.state == "Retry":
                self._refusals[uid] += again
            await self._recorder.record(
                self._reference(workload),
                reason=f"Placement{verdict.state}",
                message=verdict.message,
                kind="Warning",
            )
        else:
            self._refusals.pop(uid, None)
        if any((one.state, one.message) != (verdict.state, verdict.message) for one in checks):
            await self._patch(workload, checks, verdict, demands)
            self._metrics.workloads.labels(state=verdict.state.lower()).inc()
            _log.info(
                "workload judged",
                extra={
                    "namespace": workload.metadata.namespace,
                    "workload": workload.metadata.name,
                    "state": verdict.state,
                    "reason": verdict.message,
                },
            )

    async def _judge(self, workload: Workload) -> tuple[Verdict, list[Demand]]:
        """Hold the devices if there are any; returns the verdict and the demand."""
        metadata = workload.metadata
        try:
            wanted = self._demands(workload)
        except RequestInvalid as error:
            return Verdict(state="Rejected", message=str(error)), []
        verdict = await self._holds.judge(
            metadata, wanted, is_current=lambda: self._workloads.get(metadata.uid) is workload
        )
        return verdict, wanted

    def _demands(self, workload: Workload) -> list[Demand]:
        pod_sets = workloads.pod_sets_of(workload, self._flavors)
        return demands_of(workload.metadata, pod_sets, reader=self._reader)

    async def _keep(self, workload: Workload) -> None:
        """Renew the holds of a Workload until its pods took them over or their time is over."""
        uid, now_s = workload.metadata.uid, self._clock.monotonic_s()
        if workload.has("Admitted") and self._holds.of(uid):
            since_s = self._admitted_s.setdefault(uid, now_s)
            if now_s - since_s >= self._options.hold_s or self._is_running(workload):
                await self._holds.release(uid, "workload-started")
                return
        await self._holds.renew(uid)

    def _is_running(self, workload: Workload) -> bool:
        """Return whether all pods that request devices have a node."""
        total = sum(demand.count for demand in self._demands(workload))
        uid = workload.metadata.uid
        return total <= sum(1 for pod in self._state.pods if pod.hold == uid and pod.node)

    # --- Kubernetes ------------------------------------------------------------------------------

    def _reference(self, workload: Workload) -> ObjectRef:
        metadata = workload.metadata
        return ObjectRef(
            kind="Workload",
            name=metadata.name,
            namespace=metadata.namespace,
            uid=metadata.uid,
            api_version=f"{GROUP}/{self._follower.version}",
        )

    async def _patch(
        self,
        workload: Workload,
        checks: Sequence[Check],
        verdict: Verdict,
        demands: Sequence[Demand] = (),
    ) -> None:
        """Write our entries of the Workload's status, if it is still the version that we read."""
        metadata = workload.metadata
        entry: _Document = {
            "state": verdict.state,
            "message": verdict.message[:32_000],
            "lastTransitionTime": self._follower.now(),
        }
        if verdict.state == "Retry":
            entry["requeueAfterSeconds"] = self._options.requeue_s
        if verdict.state == "Ready" and demands:
            entry["podSetUpdates"] = workloads.pod_set_updates(demands, metadata.uid)
        await self._follower.apply_status(
            self._follower.path("workloads", metadata.namespace, metadata.name),
            "Workload",
            {
                "name": metadata.name,
                "namespace": metadata.namespace,
                "uid": metadata.uid,
                "resourceVersion": metadata.resource_version,
            },
            {"admissionChecks": [{"name": one.name, **entry} for one in checks]},
        )

    async def _state_checks(self) -> None:
        """Write whether our AdmissionChecks are Active, where that changed."""
        is_active = self._readiness.judge(
            is_ready=self._state.is_complete, now_s=self._clock.monotonic_s()
        )
        if is_active is None:
            return
        for check in list(self._checks.values()):
            await self._state.quarantine.run(
                WORKLOAD,
                f"condition/{check.metadata.name}",
                partial(self._state_check, check, is_active=is_active),
                name=("", check.metadata.name),
                is_retried=False,  # the next round has it again
            )

    async def _state_check(self, check: _AdmissionCheck, *, is_active: bool) -> None:
        status, reason, message = "True", "Active", "the scheduler places and holds devices"
        if bytes(check.spec.parameters) not in (b"null", b"{}"):
            status, reason = "False", "ParametersInvalid"
            message = "spec.parameters: this controller has none; remove the field"
        elif not is_active:
            missing = ", ".join(self._state.missing())
            status, reason, message = "False", "NotInSync", f"the scheduler waits for {missing}"
        known = next((one for one in check.status.conditions if one.type == "Active"), None)
        if known is not None and (known.status, known.message) == (status, message):
            return
        condition = {
            "type": "Active",
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": self._follower.now(),
        }
        name = check.metadata.name
        try:
            await self._follower.apply_status(
                self._follower.path("admissionchecks", name),
                "AdmissionCheck",
                {"name": name, "uid": check.metadata.uid},
                {"conditions": [condition]},
            )
        except (Conflict, NotFound, Denied, Unavailable) as error:
            _log.warning(
                "condition of an AdmissionCheck not written",
                extra={"check": name, "problem": str(error)},
            )
