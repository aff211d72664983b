# SPDX-License-Identifier: Apache-2.0
"""Answers ProvisioningRequests exactly per device (ADR 0037).

A request is Provisioned once devices for all pods that it announces are held in the ledger. They
stay held for the time of the booking, or until the pods that name the request took them over. A
request without capacity is tried again or fails, as its parameters ask for. One replica does this;
while bus, ledger or API server are unavailable, requests stay as they are. Seconds throughout.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct

from hami_common.errors import Conflict, Denied, NotFound, RequestInvalid, Unavailable
from hami_common.events.allocation import purpose_of
from hami_common.events.codec import decode
from hami_common.pods.podview import MetadataView
from hami_common.ports import KubeApi, WatchEvent
from hami_core.ledger.podfacts import PodReader
from hami_core.planning import provisioning
from hami_core.planning.demands import Demand, Document, demands_of
from hami_core.planning.provisioning import Answer, ProvisioningRequest
from hami_scheduler.settings import Settings
from hami_scheduler.shell.binder import Binder
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.follower import Followed, Follower
from hami_scheduler.shell.isolation import PROVISIONING
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.ownerholds import OwnerHolds
from hami_scheduler.shell.podapi import bare_pod
from hami_scheduler.shell.state import State

_REQUESTS: Final = "provisioningrequests"
_FOLLOWED: Final = Followed(
    group="autoscaling.x-k8s.io",
    versions=("v1", "v1beta1"),
    kinds=(_REQUESTS, "podtemplates", "nodes"),
    isolation=PROVISIONING,
)

_log = logging.getLogger(__name__)


class _PodTemplate(Struct, frozen=True, kw_only=True):
    metadata: MetadataView = MetadataView()
    template: dict[str, Any] = {}


class Provisioning:
    """The processor of ProvisioningRequests of one scheduler."""

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
        self._options = settings.provisioning_requests
        self._metrics = metrics
        self._clock = state.clock
        self._holds = OwnerHolds(
            "provisioningrequest",
            state=state,
            binder=binder,
            effects=effects,
            lease_s=self._options.lease_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
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
        """Answer requests while this replica leads; indefinitely, or not at all if off."""
        if self._options.enabled:
            await self._follower.work()

    # --- hami_scheduler.shell.follower.Reconciler ------------------------------------------------

    def forget(self) -> None:
        """Forget all objects, because they are listed again."""
        self._requests: dict[str, ProvisioningRequest] = {}
        self._templates: dict[str, dict[str, Document]] = {}
        """Templates of pods by namespace and name."""
        self._tried_s: dict[str, float] = {}
        self._holds.forget()

    def listed(self) -> None:
        """Do nothing: each round looks at all requests."""

    def take(self, kind: str, event: WatchEvent) -> None:
        """Read one event."""
        is_gone = event.type == "DELETED"
        metadata = bare_pod(event.raw).metadata
        if kind == _REQUESTS:
            self._requests.pop(metadata.uid, None)
            request = decode(event.raw, ProvisioningRequest, what="ProvisioningRequest")
            options = self._options
            if not is_gone and request.is_for(options.class_name, options.processor_instance):
                self._requests[metadata.uid] = request
            else:
                self._tried_s.pop(metadata.uid, None)
        elif kind == "podtemplates":
            templates = self._templates.setdefault(metadata.namespace, {})
            templates.pop(metadata.name, None)
            if not is_gone:
                document = decode(event.raw, _PodTemplate, what="PodTemplate").template
                templates[metadata.name] = document
            for uid, request in self._requests.items():
                if request.metadata.namespace == metadata.namespace:
                    self._tried_s.pop(uid, None)
        else:
            self._holds.take_node(event)

    async def round(self, *, is_synced: bool) -> None:
        """Reconcile requests that are not over and owners of holds, the oldest first."""
        self._holds.note_readiness()
        if not is_synced:
            return
        held = self._holds.owners() if self._state.is_complete else set()
        active = {uid for uid, request in self._requests.items() if not request.is_over()}
        for uid in sorted(held | active, key=self._order):
            request = self._requests.get(uid)
            metadata = MetadataView() if request is None else request.metadata
            if self._state.quarantine.is_due(PROVISIONING, uid):
                await self._state.quarantine.run(
                    PROVISIONING,
                    uid,
                    partial(self._reconcile, uid),
                    name=(metadata.namespace, metadata.name),
                    is_retried=False,  # the next round has it again
                )

    def _order(self, uid: str) -> tuple[str, str]:
        """Return the place of a request in a round: the oldest first."""
        request = self._requests.get(uid, ProvisioningRequest())
        return request.metadata.creation_timestamp or "", uid

    # --- one request -----------------------------------------------------------------------------

    async def _reconcile(self, uid: str) -> None:
        request = self._requests.get(uid)
        try:
            if request is None or request.is_over():
                await self._holds.release(
                    uid, "request-gone" if request is None else "request-over"
                )
            elif request.has("Provisioned"):
                await self._keep(request)
            else:
                await self._try(request)
        except (Conflict, Unavailable, NotFound, Denied) as error:
            self._tried_s.pop(uid, None)
            # The next round has it again, with the newest version of the request.
            level = logging.DEBUG if isinstance(error, Conflict) else logging.WARNING
            _log.log(
                level,
                "provisioning request not settled",
                extra={"request": uid, "problem": str(error)},
            )

    async def _try(self, request: ProvisioningRequest) -> None:
        """Try to hold devices for the pods of a request, unless that was tried just now."""
        uid, now_s = request.metadata.uid, self._clock.monotonic_s()
        tried_s = self._tried_s.get(uid)
        if tried_s is not None and now_s - tried_s < self._options.retry_s:
            return
        self._tried_s[uid] = now_s
        answer = await self._answer(request)
        if answer.outcome == "undecided":
            self._tried_s.pop(uid, None)
        expire_s = self._options.expire_s
        if answer.outcome == "waiting" and self._clock.now_s() >= request.expires_s(expire_s):
            last = answer.conditions[-1].message
            answer = provisioning.failed("Expired", f"no capacity within {expire_s:g} s: {last}")
        await self._write(request, answer)

    async def _answer(self, request: ProvisioningRequest) -> Answer:
        """Hold the devices if there are any."""
        metadata = request.metadata
        templates = self._templates.get(metadata.namespace, {})
        missing = provisioning.missing_templates(request, templates)
        if missing:
            return provisioning.waiting(
                "PodTemplateNotFound",
                f"PodTemplates that do not exist in namespace {metadata.namespace}:"
                f" {', '.join(missing)}; create them",
            )
        try:
            request.is_retried()
            wanted = self._demands(request)
        except RequestInvalid as error:
            return provisioning.failed("RequestInvalid", str(error))
        verdict = await self._holds.judge(
            metadata, wanted, is_current=lambda: self._requests.get(metadata.uid) is request
        )
        return provisioning.judged(request, verdict)

    def _demands(self, request: ProvisioningRequest) -> Sequence[Demand]:
        templates = self._templates.get(request.metadata.namespace, {})
        pod_sets = provisioning.pod_sets_of(request, templates)
        return demands_of(request.metadata, pod_sets, reader=self._reader)

    async def _keep(self, request: ProvisioningRequest) -> None:
        """Renew the holds of a request until its pods took them over or the booking ends."""
        metadata, booking_s = request.metadata, self._options.booking_s
        uid = metadata.uid
        if self._clock.now_s() >= request.booked_until_s(booking_s):
            await self._holds.release(uid, "booking-expired")
            text = f"the booking of {booking_s:g} s has ended"
            await self._write(request, provisioning.expired("CapacityReservationTimeExpired", text))
        elif not self._state.is_complete:
            return
        elif self._holds.of(uid):
            await self._holds.renew(uid)
        elif arrived := self._arrived(request):
            text = f"the booking has served {arrived} pods"
            await self._write(request, provisioning.expired("CapacityBookingConsumed", text))
        else:
            await self._regain(request)

    def _arrived(self, request: ProvisioningRequest) -> int:
        """Return how many pods of the request have devices."""
        metadata = request.metadata
        purpose = purpose_of("provisioningrequest", metadata.namespace, metadata.name)
        return sum(
            1
            for pod in self._state.pods
            if pod.hold == purpose and (pod.node or self._state.ledger.holdings_of_pod(pod.uid))
        )

    async def _regain(self, request: ProvisioningRequest) -> None:
        """Hold devices again that were lost to their leases, or end the booking."""
        answer = await self._answer(request)
        if answer.outcome in ("waiting", "failed"):
            text = f"the held devices were lost: {answer.conditions[-1].message}"
            await self._write(request, provisioning.expired("CapacityLost", text))

    # --- Kubernetes ------------------------------------------------------------------------------

    async def _write(self, request: ProvisioningRequest, answer: Answer) -> None:
        """Write the conditions, if the request is still the version that we read."""
        conditions = provisioning.merged(request, answer, now_s=self._clock.now_s())
        if conditions is None:
            return
        metadata = request.metadata
        await self._follower.apply_status(
            self._follower.path(_REQUESTS, metadata.namespace, metadata.name),
            "ProvisioningRequest",
            {
                "name": metadata.name,
                "namespace": metadata.namespace,
                "uid": metadata.uid,
                "resourceVersion": metadata.resource_version,
            },
            {"conditions": msgspec.to_builtins(conditions)},
        )
        self._metrics.provisioning.labels(outcome=answer.outcome).inc()
        _log.info(
            "provisioning request answered",
            extra={
                "namespace": metadata.namespace,
                "request": metadata.name,
                "outcome": answer.outcome,
                "reason": answer.conditions[-1].message,
            },
        )
