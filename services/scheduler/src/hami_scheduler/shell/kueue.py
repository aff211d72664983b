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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import anyio
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.apipath import api_path
from hami_common.bounds import Word
from hami_common.errors import (
    Conflict,
    Denied,
    HamiError,
    NotFound,
    RequestInvalid,
    Unavailable,
)
from hami_common.events.allocation import is_of_workload, workload_of, workload_purpose
from hami_common.events.codec import decode
from hami_common.pods.podview import MetadataView
from hami_common.ports import KubeApi, WatchEvent
from hami_common.runtime.kubeio.recorder import EventRecorder, ObjectRef
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Hold
from hami_core.ledger.podfacts import PodFacts, PodReader
from hami_core.ledger.stimuli import FilterAsked
from hami_core.placement.nodenames import NodeNames
from hami_core.planning import workloads
from hami_core.planning.workloads import (
    CONTROLLER,
    Check,
    Demand,
    Flavor,
    Readiness,
    Verdict,
    Workload,
)
from hami_core.table.table import DeviceTable
from hami_scheduler.settings import Settings
from hami_scheduler.shell.binder import REFUSALS, Binder, Refused
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.feed import NODES
from hami_scheduler.shell.isolation import WORKLOAD
from hami_scheduler.shell.joint import reserve_all, stepwise
from hami_scheduler.shell.leader import Leader
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.podapi import bare_pod
from hami_scheduler.shell.state import State

GROUP: Final = "kueue.x-k8s.io"
VERSIONS: Final = ("v1beta2", "v1beta1")
"""Versions of Kueue's API that we read and write, the preferred first."""
FIELD_MANAGER: Final = "hami-placement"
APPLY: Final = "application/apply-patch+yaml"
_RENEWED_PER_LEASE: Final = 3
_WATCHED: Final = ("workloads", "admissionchecks", "resourceflavors", "nodes")

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_Document = dict[str, Any]


class _Resource(Struct, frozen=True):
    name: Word = ""


class _Resources(Struct, frozen=True):
    """``APIResourceList`` of one version."""

    resources: list[_Resource] = []


class _CheckSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    controller_name: Word = ""
    parameters: msgspec.Raw = msgspec.Raw(b"null")


class _CheckStatus(Struct, frozen=True, kw_only=True):
    conditions: list[workloads.Condition] = []


class _AdmissionCheck(Struct, frozen=True, kw_only=True):
    metadata: MetadataView = MetadataView()
    spec: _CheckSpec = _CheckSpec()
    status: _CheckStatus = _CheckStatus()


class _Node(Struct, frozen=True, kw_only=True):
    metadata: MetadataView = MetadataView()
    spec: dict[str, Any] = {}


class Placement:
    """The controller of one scheduler."""

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
        self._binder = binder
        self._effects = effects
        self._kube = kube
        self._options = settings.kueue
        self._timeout_s = settings.api_timeout_s
        self._heartbeat_timeout_s = settings.heartbeat_timeout_s
        self._retry_s = settings.retry_s
        self._tick_s = settings.tick_s
        self._metrics = metrics
        self._clock = state.clock
        self._recorder = EventRecorder(
            kube, component="hami-scheduler", clock=state.clock, instance=writer
        )
        self._leader = Leader(
            kube,
            clock=state.clock,
            namespace=self._options.namespace,
            name=self._options.lease_name,
            identity=writer,
            lease_s=self._options.leader_lease_s,
        )
        self._version = ""
        self._is_complaining = False
        self._readiness = Readiness(patience_s=self._options.unready_s)
        self._forget()

    def _forget(self) -> None:
        self._synced: set[str] = set()
        self._workloads: dict[str, Workload] = {}
        self._checks: dict[str, _AdmissionCheck] = {}
        self._flavors: dict[str, Flavor] = {}
        self._nodes: dict[str, _Document] = {}
        self._dirty: set[str] = set()
        self._wake = anyio.Event()
        self._renewed_s: dict[tuple[str, str], float] = {}
        self._admitted_s: dict[str, float] = {}
        self._impossible_s: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        """Text of the last refusal by uid of the Workload."""
        self._complete_s: float | None = None
        self._empty: tuple[int, DeviceTable] | None = None

    # --- loops -----------------------------------------------------------------------------------

    async def work(self) -> None:
        """Answer AdmissionChecks while this replica leads; indefinitely, or not at all if off."""
        if self._options.enabled:
            await self._leader.lead(self._serve)

    async def _serve(self) -> None:
        """Serve whenever Kueue's kinds exist; wait and try again otherwise."""
        while True:
            try:
                self._version = await self._discover()
                if self._version:
                    await self._follow()
            except (NotFound, Denied, Unavailable) as error:
                level = logging.DEBUG if self._is_complaining else logging.WARNING
                self._is_complaining = True
                _log.log(level, "workloads not followed", extra={"problem": str(error)})
            await self._clock.sleep(self._options.discovery_s)

    async def _discover(self) -> str:
        """Return the version of Kueue's API to use; empty while it lacks kinds that we read."""
        for version in VERSIONS:
            try:
                with answer_within(self._timeout_s, peer="API server"):
                    raw = await self._kube.get(api_path("apis", GROUP, version))
            except NotFound:
                continue
            served = {one.name for one in decode(raw, _Resources, what="kinds of Kueue").resources}
            if served >= {kind for kind in _WATCHED if kind != "nodes"}:
                return version
        return ""

    async def _until_gone(self) -> None:
        """Return when Kueue's kinds were removed."""
        while True:
            await self._clock.sleep(self._options.discovery_s)
            try:
                if await self._discover() != self._version:
                    return
            except HamiError as error:
                _log.debug("kinds of Kueue unknown", extra={"problem": str(error)})

    async def _follow(self) -> None:
        """Watch and reconcile while the kinds exist; an error of a watch is raised."""
        self._forget()
        failures: list[HamiError] = []
        async with anyio.create_task_group() as group:

            async def until_over(run: Callable[[], Awaitable[None]]) -> None:
                try:
                    await run()
                except HamiError as error:
                    failures.append(error)
                group.cancel_scope.cancel()

            for kind in _WATCHED:
                group.start_soon(until_over, partial(self._watch, kind))
            group.start_soon(until_over, self._until_gone)
            group.start_soon(self._reconcile_all)
        if failures:
            raise failures[0]

    async def _watch(self, kind: str) -> None:
        path = NODES if kind == "nodes" else self._path(kind)
        async with self._kube.list_watch(path) as events:
            async for event in events:
                if event.type == "SYNCED":
                    self._synced.add(kind)
                    self._is_complaining = False
                    self._dirty |= self._workloads.keys()
                else:
                    name = bare_pod(event.raw)
                    await self._state.quarantine.run(
                        WORKLOAD,
                        f"{kind}/{name.metadata.namespace}/{name.metadata.name}",
                        partial(self._take, kind, event),
                        name=name.names(),
                        size_bytes=len(event.raw),
                        is_retried=False,  # the next version of the object is read
                    )
                self._wake.set()

    def _take(self, kind: str, event: WatchEvent) -> None:
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
            self._nodes.pop(metadata.name, None)
            if not is_gone:
                node = decode(event.raw, _Node, what="Node")
                self._nodes[metadata.name] = {
                    "metadata": {"name": metadata.name, "labels": node.metadata.labels or {}},
                    "spec": {key: node.spec.get(key) for key in ("taints", "unschedulable")},
                }

    async def _reconcile_all(self) -> None:
        """Reconcile changed Workloads at once, and all at each interval."""
        while True:
            if self._wake.is_set():
                self._wake = anyio.Event()
            self._note_readiness()
            if self._synced >= set(_WATCHED):
                await self._state_checks()
                if self._state.is_complete:
                    await self._release_orphans()
                dirty, self._dirty = self._dirty, set()
                for uid in sorted(dirty | self._unsettled(), key=self._order):
                    await self._isolated(uid)
            await self._pause()

    async def _pause(self) -> None:
        """Wait for the next change, at most for one interval."""
        async with anyio.create_task_group() as group:

            async def tick() -> None:
                await self._clock.sleep(self._tick_s)
                group.cancel_scope.cancel()

            group.start_soon(tick)
            await self._wake.wait()
            group.cancel_scope.cancel()

    def _order(self, uid: str) -> tuple[str, str]:
        """Return the place of a Workload in a round: the oldest first."""
        workload = self._workloads.get(uid, Workload())
        return workload.metadata.creation_timestamp or "", uid

    def _unsettled(self) -> set[str]:
        """Return the Workloads that wait for an answer, or whose holds are to be renewed."""
        holding = {
            workload_of(one.record)
            for one in self._state.ledger.reserved()
            if is_of_workload(one.record)
        }
        waiting = {
            uid
            for uid, workload in self._workloads.items()
            if workload.is_reserved()
            and any(check.state == "Pending" for check in workload.checks(self._checks))
        }
        return (holding | waiting) & self._workloads.keys()

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

    def _note_readiness(self) -> None:
        if not self._state.is_complete:
            self._complete_s = None
        elif self._complete_s is None:
            self._complete_s = self._clock.monotonic_s()

    # --- one Workload ----------------------------------------------------------------------------

    async def _reconcile(self, uid: str) -> None:
        workload = self._workloads.get(uid)
        checks = [] if workload is None else workload.checks(self._checks)
        try:
            if workload is None or not checks or not workload.is_reserved():
                await self._let_go(uid, workload, checks)
            elif any(check.state in ("Retry", "Rejected") for check in checks):
                await self._release(uid, "workload-refused")
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
            or self._state.ledger.holdings_of_workload(uid)
            or any(pod.hold == uid for pod in self._state.pods)
        )

    async def _let_go(self, uid: str, workload: Workload | None, checks: Sequence[Check]) -> None:
        """Release the holds of a Workload without quota, and show why it was refused last."""
        await self._release(uid, "workload-gone" if workload is None else "workload-stopped")
        self._admitted_s.pop(uid, None)
        if workload is None or workload.has("Finished"):
            self._refusals.pop(uid, None)
            self._impossible_s.pop(uid, None)
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
            await self._release(uid, "workload-refused")
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
        uid = workload.metadata.uid
        try:
            demands = workloads.demands_of(workload, reader=self._reader, flavors=self._flavors)
        except RequestInvalid as error:
            return Verdict(state="Rejected", message=str(error)), []
        try:
            self._state.require_complete()
            if await self._hold(workload, demands):
                return workloads.held(demands), demands
        except Refused as error:
            if error.outcome in REFUSALS:
                return Verdict(state="Retry", message=str(error)), demands
            return Verdict(state="Pending", message=f"not decided yet: {error}"), demands
        except (Unavailable, Denied) as error:
            return Verdict(state="Pending", message=f"not decided yet: {error}"), demands
        if not self._is_settled():
            text = "not decided yet: the scheduler waits for the heartbeats of agents"
            return Verdict(state="Pending", message=text), demands
        table = self._empty_table()
        pod_set = await stepwise(workloads.never_fits(table, uid, demands))
        if not pod_set:
            self._impossible_s.pop(uid, None)
            return await self._refused(uid, demands), demands
        now_s = self._clock.monotonic_s()
        since_s = self._impossible_s.setdefault(uid, now_s)
        if now_s - since_s < self._options.reject_after_s:
            return await self._refused(uid, demands), demands
        return workloads.impossible(demands, pod_set, len(table)), demands

    async def _refused(self, uid: str, demands: Sequence[Demand]) -> Verdict:
        """Return the refusal of a Workload that fits at another time."""
        reasons = self._reasons(demands)
        fitting = {
            demand.pod_set: await stepwise(
                workloads.count_now(self._state.table, uid, demand, self._candidates(demand))
            )
            for demand in demands
            if demand.pod_set not in reasons
        }
        return workloads.refused(demands, reasons, fitting)

    def _is_settled(self) -> bool:
        """Return whether agents had time to report since the ledger was complete."""
        since_s = self._complete_s
        return (
            since_s is not None and self._clock.monotonic_s() - since_s >= self._heartbeat_timeout_s
        ) or not self._state.core.inventory.silent_count()

    def _empty_table(self) -> DeviceTable:
        revision = self._state.table.inventory_revision
        if self._empty is None or self._empty[0] != revision:
            devices = self._state.core.inventory.devices()
            self._empty = revision, workloads.empty_table(devices)
        return self._empty[1]

    def _candidates(self, demand: Demand) -> frozenset[str]:
        return workloads.nodes_for(demand, self._state.table, self._nodes)

    def _reasons(self, demands: Sequence[Demand]) -> dict[str, str]:
        """Return why not even one pod of a pod set fits, by pod set."""
        found: dict[str, str] = {}
        for demand in demands:
            candidates = self._candidates(demand)
            names = NodeNames.of(sorted(candidates))
            if not candidates:
                found[demand.pod_set] = "no node with devices is eligible"
                continue
            filtered = self._state.core.answer(FilterAsked(request=demand.request), names)
            if not len(filtered.left):
                classes = sorted(filtered.classes(), key=lambda one: -one.count)
                found[demand.pod_set] = ", ".join(
                    f"{one.text} ({one.count} nodes)" for one in classes[:3]
                )
        return found

    async def _hold(self, workload: Workload, demands: Sequence[Demand]) -> bool:
        """Hold devices for all pods; returns false if there is no placement for them."""
        uid = workload.metadata.uid
        held = {one.record.pod_uid for one in self._state.ledger.holdings_of_workload(uid)}
        wanted = {
            member.request.uid: demand
            for demand in demands
            for member in demand.members(uid, frozenset())
        }
        if held == wanted.keys():
            return True
        await self._release(uid, "workload-incomplete")
        nodes = {demand.pod_set: self._candidates(demand) for demand in demands}
        assignment = await stepwise(workloads.place(self._state.table, uid, demands, nodes))
        if assignment is None:
            return False
        await reserve_all(
            assignment,
            partial(self._reserve, workload, wanted),
            release=partial(self._effects.ledger.release, reason="workload-incomplete"),
        )
        return True

    async def _reserve(
        self, workload: Workload, wanted: Mapping[str, Demand], uid: str, node: str
    ) -> Holding:
        metadata = workload.metadata
        if self._workloads.get(metadata.uid) is not workload:
            raise Conflict(what=f"Workload {metadata.name}", detail="it changed")
        demand = wanted[uid]
        pod = PodFacts(
            uid=uid,
            namespace=metadata.namespace,
            name=metadata.name,
            resource_version="",
            request=replace(demand.request, uid=uid),
            account=demand.account,
        )
        hold = Hold(
            held_for=workload_purpose(metadata.namespace, metadata.name),
            lease_s=self._options.lease_s,
        )
        return await self._binder.hold(pod, node, hold)

    # --- holds -----------------------------------------------------------------------------------

    async def _keep(self, workload: Workload) -> None:
        """Renew the holds of a Workload until its pods took them over or their time is over."""
        uid, now_s = workload.metadata.uid, self._clock.monotonic_s()
        held = self._state.ledger.holdings_of_workload(uid)
        if not held:
            return
        if workload.has("Admitted"):
            since_s = self._admitted_s.setdefault(uid, now_s)
            if now_s - since_s >= self._options.hold_s or self._is_running(workload):
                await self._release(uid, "workload-started")
                return
        due_s = now_s - self._options.lease_s / _RENEWED_PER_LEASE
        for holding in held:
            key = holding.record.node, holding.record.pod_uid
            if self._renewed_s.get(key, due_s) > due_s:
                continue
            await self._effects.ledger.renew(holding)
            self._renewed_s[key] = now_s

    def _is_running(self, workload: Workload) -> bool:
        """Return whether all pods that request devices have a node."""
        demands = workloads.demands_of(workload, reader=self._reader, flavors=self._flavors)
        total = sum(demand.count for demand in demands)
        uid = workload.metadata.uid
        return total <= sum(1 for pod in self._state.pods if pod.hold == uid and pod.node)

    async def _release(self, uid: str, reason: str) -> None:
        """Release all holds of a Workload."""
        for holding in self._state.ledger.holdings_of_workload(uid):
            record = holding.record
            self._renewed_s.pop((record.node, record.pod_uid), None)
            await self._effects.ledger.release(holding, reason)

    async def _release_orphans(self) -> None:
        """Release holds of Workloads that were deleted while no replica could see it."""
        orphans = {
            workload_of(one.record)
            for one in self._state.ledger.reserved()
            if is_of_workload(one.record)
        } - self._workloads.keys()
        for uid in sorted(orphans):
            await self._isolated(uid)

    # --- Kubernetes ------------------------------------------------------------------------------

    def _path(self, kind: str, *names: str) -> str:
        where = ("namespaces", names[0]) if len(names) > 1 else ()
        return api_path("apis", GROUP, self._version, *where, kind, *names[-1:])

    def _reference(self, workload: Workload) -> ObjectRef:
        metadata = workload.metadata
        return ObjectRef(
            kind="Workload",
            name=metadata.name,
            namespace=metadata.namespace,
            uid=metadata.uid,
            api_version=f"{GROUP}/{self._version}",
        )

    async def _apply(self, path: str, document: _Document) -> None:
        with answer_within(self._timeout_s, peer="API server"):
            await self._kube.patch(
                f"{path}/status?fieldManager={FIELD_MANAGER}&force=true",
                _encoder.encode(document),
                content_type=APPLY,
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
            "lastTransitionTime": self._now(),
        }
        if verdict.state == "Retry":
            entry["requeueAfterSeconds"] = self._options.requeue_s
        if verdict.state == "Ready" and demands:
            entry["podSetUpdates"] = workloads.pod_set_updates(demands, metadata.uid)
        await self._apply(
            self._path("workloads", metadata.namespace, metadata.name),
            {
                "apiVersion": f"{GROUP}/{self._version}",
                "kind": "Workload",
                "metadata": {
                    "name": metadata.name,
                    "namespace": metadata.namespace,
                    "uid": metadata.uid,
                    "resourceVersion": metadata.resource_version,
                },
                "status": {"admissionChecks": [{"name": one.name, **entry} for one in checks]},
            },
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
            "lastTransitionTime": self._now(),
        }
        name = check.metadata.name
        try:
            await self._apply(
                self._path("admissionchecks", name),
                {
                    "apiVersion": f"{GROUP}/{self._version}",
                    "kind": "AdmissionCheck",
                    "metadata": {"name": name, "uid": check.metadata.uid},
                    "status": {"conditions": [condition]},
                },
            )
        except (Conflict, NotFound, Denied, Unavailable) as error:
            _log.warning(
                "condition of an AdmissionCheck not written",
                extra={"check": name, "problem": str(error)},
            )

    def _now(self) -> str:
        at = datetime.fromtimestamp(int(self._clock.now_s()), tz=UTC)
        return at.isoformat().replace("+00:00", "Z")
