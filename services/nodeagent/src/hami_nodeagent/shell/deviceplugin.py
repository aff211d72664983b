# SPDX-License-Identifier: Apache-2.0
"""One vendor's device plugin: the gRPC service that kubelet calls (device plugin v1beta1).

Refusals become gRPC errors with a text that ends in the pod's status: ``hami: <code>: <sentence>``.
Nothing that kubelet sends can end the service: malformed calls are refused, and whatever else goes
wrong is logged and answered with INTERNAL.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, NoReturn

import anyio
import grpc
import grpc.aio
from opentelemetry.trace import SpanKind

from hami_common.kubeletapi import deviceplugin as api
from hami_common.kubeletapi import deviceplugin_grpc
from hami_common.runtime.telemetry import Tracing, carry, log_context
from hami_common.units import real
from hami_nodeagent.core.claims import Claim, Code, Refuse, Request
from hami_nodeagent.core.splits import Splits
from hami_nodeagent.shell.allocate import Allocator
from hami_nodeagent.shell.pluginproxy import REPEATED_S
from hami_nodeagent.shell.site import Site

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
_MOST_IDS = 4096
"""More ids than any container can ask for; a larger call is malformed."""
_STATUS = {
    Code.REQUEST_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.API_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.LIST_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
}

_log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext


class DevicePlugin(deviceplugin_grpc.DevicePluginServicer):
    """The service of one resource."""

    def __init__(
        self,
        *,
        site: Site,
        vendor: str,
        resource: str,
        allocator: Allocator,
        tracing: Tracing,
        name: str = "",
    ) -> None:
        """``name``: of the plugin on this node; empty: the vendor's word.

        ``vendor``: empty for the neutral resource, which has the devices of all vendors.
        """
        self.vendor = vendor
        self.name = name or vendor
        self.resource = resource
        self.options = api.DevicePluginOptions(
            pre_start_required=site.settings.pre_start, get_preferred_allocation_available=True
        )
        self.stream_count = 0
        """ListAndWatch streams that kubelet holds now: none means that it does not know us."""
        self.sent: Splits | None = None
        """List that kubelet was sent last; ``None`` before the first."""
        self.is_displaced = False
        """Another plugin took the resource over: kubelet gets no list that would hide this."""
        self.silent = anyio.Event()
        """Set when the last of these streams ends; another one for each time."""
        self._picture = site.picture
        self._allocator = allocator
        self._tracing = tracing
        self._clock = site.clock
        self._metrics = site.metrics
        self._quarantine = site.quarantine
        self._metrics.begin(resource)
        self._numa_topology = site.settings.numa_topology

    async def GetDevicePluginOptions(  # noqa: N802 - the protocol's name
        self,
        request: api.Empty,
        context: _Context[api.Empty, api.DevicePluginOptions],
    ) -> api.DevicePluginOptions:
        """Return the plugin's options."""
        del request, context
        return self.options

    async def ListAndWatch(  # noqa: N802 - the protocol's name
        self,
        request: api.Empty,
        context: _Context[api.Empty, api.ListAndWatchResponse],
    ) -> AsyncIterator[api.ListAndWatchResponse]:
        """All ids with their health, now and whenever that changes."""
        del request, context
        self.stream_count += 1
        self.displaced(is_displaced=False)
        sent: Splits | None = None
        try:
            while True:
                changed = self._picture.changed
                found: list[Splits] = []
                # A list that cannot be made leaves kubelet with the last one.
                self._quarantine.call("plugin", f"{self.resource} list", partial(self._look, found))
                if found and found[0] != sent and not self.is_displaced:
                    sent = self.sent = found[0]
                    self._count(sent)
                    yield self._devices(sent)
                await changed.wait()
        finally:
            self.stream_count -= 1
            if not self.stream_count:
                silent, self.silent = self.silent, anyio.Event()
                silent.set()
            # The first sign that kubelet died is the end of its stream.
            self.displaced(is_displaced=self.is_displaced)

    def displaced(self, *, is_displaced: bool) -> None:
        """Store whether another plugin took the resource over, and whether ours is served."""
        self.is_displaced = is_displaced
        self._picture.note_served(
            self.vendor, served=self.stream_count > 0 and not is_displaced, resource=self.resource
        )

    def _look(self, found: list[Splits]) -> None:
        found.append(self._picture.splits(self.vendor, self.resource))

    async def GetPreferredAllocation(  # noqa: N802 - the protocol's name
        self,
        request: api.PreferredAllocationRequest,
        context: _Context[api.PreferredAllocationRequest, api.PreferredAllocationResponse],
    ) -> api.PreferredAllocationResponse:
        """Ids on the devices that the waiting container was given."""
        del context
        responses = []
        for one in request.container_requests:
            size = one.allocation_size
            ids: tuple[str, ...] = ()
            if 0 < size <= min(_MOST_IDS, len(one.available_deviceIDs)):
                try:
                    ids = await self._allocator.prefer(
                        self._request(one.available_deviceIDs[:size]),
                        available=list(one.available_deviceIDs),
                        must=list(one.must_include_deviceIDs),
                    )
                except Exception:  # noqa: BLE001 - the loop's top of a call; logged
                    # An error would fail the pod's admission, no advice does not.
                    _log.exception("no preference")
            responses.append(api.ContainerPreferredAllocationResponse(deviceIDs=ids))
        return api.PreferredAllocationResponse(container_responses=responses)

    async def Allocate(  # noqa: N802 - the protocol's name
        self,
        request: api.AllocateRequest,
        context: _Context[api.AllocateRequest, api.AllocateResponse],
    ) -> api.AllocateResponse:
        """Give the waiting container its shares, or refuse with the reason."""
        begun_s = self._clock.monotonic_s()
        requests = [self._request(one.devices_ids) for one in request.container_requests]
        metadata = dict(context.invocation_metadata() or ())
        age_s = real(str(metadata.get(REPEATED_S, "")), least=0.0, most=1e9)
        try:
            outcome = self._malformed(requests) or await self._allocator.allocate(
                requests, repeated_after_s=age_s
            )
        except Exception:  # noqa: BLE001 - the top of a call; logged, answered INTERNAL
            _log.exception("Allocate failed")
            outcome = Refuse(code=Code.INTERNAL, text="internal error, see the agent's log")
        self._metrics.allocate_seconds.labels(resource=self.resource).observe(
            self._clock.monotonic_s() - begun_s
        )
        if isinstance(outcome, Refuse):
            await self._refuse(context, outcome, begun_s)
        claims, responses = outcome
        self._metrics.allocations.labels(resource=self.resource).inc(len(claims))
        for claim, one in zip(claims, requests, strict=True):
            self._tell(claim, one, begun_s)
        return api.AllocateResponse(container_responses=responses)

    async def PreStartContainer(  # noqa: N802 - the protocol's name
        self,
        request: api.PreStartContainerRequest,
        context: _Context[api.PreStartContainerRequest, api.PreStartContainerResponse],
    ) -> api.PreStartContainerResponse:
        """Let a container start only with ids that were granted, and with its partitions."""
        begun_s = self._clock.monotonic_s()
        ids = list(request.devices_ids)
        refusal = self._allocator.check_start(self.resource, ids)
        if refusal is None:
            refusal = await self._prepare_start(ids)
        self._trace_start(ids, begun_s, refusal)
        if refusal is not None:
            await self._refuse(context, refusal, begun_s)
        self._metrics.starts.labels(resource=self.resource).inc()
        return api.PreStartContainerResponse()

    async def _prepare_start(self, ids: Sequence[str]) -> Refuse | None:
        try:
            return await self._allocator.prepare_start(self.resource, ids)
        except Exception:  # noqa: BLE001 - the top of a call; logged, answered INTERNAL
            _log.exception("PreStartContainer failed")
            return Refuse(code=Code.INTERNAL, text="internal error, see the agent's log")

    def _request(self, ids: Sequence[str]) -> Request:
        return Request(vendor=self.vendor, resource=self.resource, ids=tuple(ids))

    def _malformed(self, requests: Sequence[Request]) -> Refuse | None:
        if not requests:
            return Refuse(code=Code.REQUEST_INVALID, text="the call names no container")
        if sum(len(request.ids) for request in requests) > _MOST_IDS:
            return Refuse(
                code=Code.REQUEST_INVALID, text=f"the call names more than {_MOST_IDS} devices"
            )
        splits = self._picture.splits(self.vendor, self.resource)
        for request in requests:
            unknown = next((one for one in request.ids if one not in splits), None)
            if unknown is not None:
                return Refuse(
                    code=Code.REQUEST_INVALID,
                    text=f"device id {unknown[:64]!r} was never announced for {self.resource}",
                )
        return None

    async def _refuse(
        self, context: _Context[Any, Any], refusal: Refuse, begun_s: float
    ) -> NoReturn:
        self._metrics.refusals.labels(resource=self.resource, code=refusal.code).inc()
        _log.warning(
            "call of kubelet refused",
            extra={
                "resource": self.resource,
                "code": refusal.code,
                "reason": refusal.text,
                "waited_s": round(self._clock.monotonic_s() - begun_s, 3),
            },
        )
        await context.abort(
            _STATUS.get(refusal.code, grpc.StatusCode.FAILED_PRECONDITION),
            f"hami: {refusal.code}: {refusal.text}",
        )

    def _tell(self, claim: Claim, request: Request, begun_s: float) -> None:
        record = claim.entry.record
        took_s = self._clock.monotonic_s() - begun_s
        shares = [f"{share.uuid} {share.memory_mib} MiB {share.core_pct} %" for share in claim.own]
        self._trace(
            "allocate", claim.pod.uid, claim.container, took_s, **{"hami.shares": ", ".join(shares)}
        )
        with (
            carry(claim.entry.traceparent or claim.pod.traceparent),
            log_context(pod=claim.pod.title, container=claim.container),
        ):
            _log.info(
                "container granted its shares",
                extra={
                    "allocation_id": record.allocation_id,
                    "ledger_seq": claim.entry.sequence,
                    "devices": [share.uuid for share in claim.own],
                    "ids": list(request.ids),
                    "took_s": round(took_s, 4),
                },
            )

    def _trace_start(self, ids: Sequence[str], begun_s: float, refusal: Refuse | None) -> None:
        grants = self._picture.grants.of_ids(self.resource, ids)
        if grants:
            took_s = self._clock.monotonic_s() - begun_s
            problem = f"{refusal.code}: {refusal.text}" if refusal is not None else ""
            self._trace("prestart", grants[-1].pod_uid, grants[-1].container, took_s, problem)

    def _trace(
        self,
        name: str,
        pod_uid: str,
        container: str,
        took_s: float,
        problem: str = "",
        **attributes: str,
    ) -> None:
        """A span of the pod's trace, below the one that wrote its ledger record."""
        entry = self._picture.entries_by_uid.get(pod_uid)
        if not self._tracing.is_recording or entry is None:
            return
        pod = self._picture.pods.find(pod_uid)
        end_s = self._clock.now_s()
        self._tracing.record(
            name,
            traceparent=entry.traceparent or (pod.traceparent if pod is not None else ""),
            begin_s=end_s - took_s,
            end_s=end_s,
            kind=SpanKind.SERVER,
            attributes={
                "k8s.node.name": self._picture.node,
                "k8s.namespace.name": entry.record.namespace,
                "k8s.pod.name": entry.record.pod,
                "k8s.pod.uid": pod_uid,
                "k8s.container.name": container,
                "hami.resource": self.resource,
                "hami.allocation.id": entry.record.allocation_id,
                **attributes,
            },
            problem=problem,
        )

    def _devices(self, splits: Splits) -> api.ListAndWatchResponse:
        return api.ListAndWatchResponse(
            devices=[
                api.Device(
                    ID=split.id,
                    health=HEALTHY if split.healthy else UNHEALTHY,
                    topology=(
                        api.TopologyInfo(nodes=[api.NUMANode(ID=split.numa)])
                        if self._numa_topology and split.numa is not None
                        else None
                    ),
                )
                for split in splits.all
            ]
        )

    def _count(self, splits: Splits) -> None:
        healthy = sum(split.healthy for split in splits.all)
        for health, count in (("healthy", healthy), ("unhealthy", len(splits.all) - healthy)):
            self._metrics.splits.labels(resource=self.resource, health=health).set(count)
