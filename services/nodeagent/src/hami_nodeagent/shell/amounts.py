# SPDX-License-Identifier: Apache-2.0
"""Keeps the totals of memory and compute in the status of the node (``advertise_amounts``).

With the dialect ``volcano``, also the annotations by which Volcano knows the node's devices.

The agent is the only writer of the totals of its vendors. An annotation of the node names them, so
that they can be withdrawn. Kubelet keeps resources that no device plugin owns, sets their
``allocatable`` to their ``capacity``, and sets all extended resources to 0 when it registers a
known node while its directory of device plugins is empty (``reconcileExtendedResource`` in
``pkg/kubelet/kubelet_node_status.go``, v1.37). So the node is watched, and a total that differs is
written again. With the setting off, totals of an earlier run are withdrawn once. Seconds
throughout.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import anyio
import msgspec
from msgspec import Struct

from hami_common.bounds import INT64_MAX
from hami_common.compat import volcano
from hami_common.compat.origins import VOLCANO
from hami_common.errors import Denied, HamiError, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.model.device import Device
from hami_common.pods import annotations as keys
from hami_common.ports import KubeApi
from hami_common.runtime.kubeio import EventRecorder, ObjectRef
from hami_common.runtime.tasks import Backoff
from hami_common.units import parse_quantity, whole
from hami_common.vendors import nvidia
from hami_common.vendors.protocol import Vendor
from hami_nodeagent.core.amounts import (
    HeldPod,
    NodeAmounts,
    booked_of,
    change,
    of_ended_plugin,
    resources_of,
    totals,
)
from hami_nodeagent.shell.inotify import first_of
from hami_nodeagent.shell.site import Site

NODES_PATH: Final = "/api/v1/nodes"
LOWER_AFTER_S: Final = 10.0
"""Time for which a total must be too high before it is lowered: kubelet counts a pod until its
containers have ended, which it may know later than the API server."""
RETRY_S: Final = 0.5
RETRY_MOST_S: Final = 30.0
NOT_ADVERTISED: Final = "AmountsNotAdvertised"
"""Reason of the Event for totals that cannot be written."""
NOT_WITHDRAWN: Final = "AmountsNotWithdrawn"
FIX: Final = "give the agent the rights of components/advertise-amounts"

_log = logging.getLogger(__name__)


class _Metadata(Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    annotations: dict[str, str] | None = None


class _Status(Struct, frozen=True):
    capacity: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None


class _Node(Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    status: _Status = _Status()

    def revision(self) -> int:
        """Return ``resourceVersion`` as a number; 0 if it is not one."""
        return whole(self.metadata.resource_version, most=INT64_MAX) or 0


_decoder = msgspec.json.Decoder(_Node)


class Advertiser:
    """Writer of the totals of the vendors that this agent serves."""

    def __init__(
        self,
        *,
        site: Site,
        kube: KubeApi,
        vendors: Sequence[Vendor],
        events: Callable[[], EventRecorder | None],
    ) -> None:
        """``events`` returns ``None`` before the API server was reached."""
        self._site = site
        self._picture = site.picture
        self._kube = kube
        self._vendors = tuple(vendors)
        self._events = events
        self._path = f"{NODES_PATH}/{site.node}"
        self._node: _Node | None = None
        """Newest object of the node that was read; ``None`` if there is none."""
        self._seen = anyio.Event()
        self._above_since_s: dict[str, float] = {}
        """Time since which a total is too high, by resource."""

    @property
    def resources(self) -> frozenset[str]:
        """Return the resources whose requests by pods matter; empty while the setting is off."""
        if not self._site.settings.advertise_amounts:
            return frozenset()
        return frozenset().union(*(resources_of(vendor) for vendor in self._vendors))

    async def run(self) -> None:
        """Keep the totals until cancelled; with the setting off, withdraw them and return."""
        if not self._site.settings.advertise_amounts:
            await self._withdraw()
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch)
            await self._keep()

    async def _keep(self) -> None:
        backoff = Backoff(first_s=RETRY_S, most_s=RETRY_MOST_S)
        while True:
            changed, seen = self._picture.changed, self._seen
            try:
                is_above = await self._look()
            except HamiError as error:
                await self._report(NOT_ADVERTISED, f"totals are not advertised: {error}", error)
                await backoff.wait()
                continue
            backoff.reset()
            with anyio.move_on_after(self._wait_s(is_above=is_above)):
                await first_of(changed, seen)

    async def _look(self) -> bool:
        """Write the totals if they differ; return whether one is higher than it has to be."""
        if not self._picture.pods_known:
            return False
        node = self._node or await self._read()
        amounts, described = _amounts(node), self._described()
        wanted = self._wanted(amounts)
        above = change(amounts, wanted).above
        now_s = self._site.clock.monotonic_s()
        self._above_since_s = {name: self._above_since_s.get(name, now_s) for name in above}
        # A pod that cannot be read may request anything.
        due = frozenset(
            name
            for name, since_s in self._above_since_s.items()
            if now_s - since_s >= LOWER_AFTER_S and not self._picture.unreadable_pods
        )
        planned = change(amounts, wanted, due=due, described=described)
        if planned.patch is not None:
            await self._write(planned.patch)
        shown = _amounts(self._node or node).capacity
        for name in (name for of_vendor in wanted.values() for name in of_vendor):
            amount = parse_quantity(shown.get(name, "0")) or 0
            self._site.metrics.advertised.labels(resource=name).set(float(amount))
        return bool(planned.above)

    def _wanted(self, node: NodeAmounts) -> dict[str, dict[str, int]]:
        """Return the totals of the vendors whose devices are known."""
        found: dict[str, dict[str, int]] = {}
        for vendor in self._vendors:
            known = self._picture.canonical_by_vendor.get(vendor.name)
            if known is None:
                continue
            pods = self._pods(vendor.name)
            amounts = totals(vendor, known.devices, is_usable=self._is_usable, pods=pods)
            others = of_ended_plugin(node, pods)
            found[vendor.name] = {name: n for name, n in amounts.items() if name not in others}
        return found

    def _described(self) -> dict[str, str] | None:
        """Return the annotations for Volcano; empty unless pods may use its names.

        ``None`` before the devices are known.
        """
        settings = self._site.settings.vendors.nvidia
        if "volcano" not in settings.dialects:
            return {}
        known = self._picture.canonical_by_vendor.get(nvidia.NAME)
        if known is None:
            return None
        return volcano.of_node(
            known.devices, unit_mib=max(1, settings.memory_factor), time_s=self._handshake_s()
        )

    def _handshake_s(self) -> float:
        """Return the Unix time in the handshake: the begin of the present interval.

        All nodes change at the same time, so that Volcano counts all of them again before its next
        session; a group may need several nodes.
        """
        interval_s = self._site.settings.volcano_refresh_s
        now_s = self._site.clock.now_s()
        return now_s - now_s % interval_s if interval_s else 0.0

    def _wait_s(self, *, is_above: bool) -> float:
        """Return the longest time until the next look."""
        wait_s = LOWER_AFTER_S if is_above else math.inf
        settings = self._site.settings
        if "volcano" in settings.vendors.nvidia.dialects and settings.volcano_refresh_s:
            next_s = self._handshake_s() + settings.volcano_refresh_s
            wait_s = min(wait_s, max(0.0, next_s - self._site.clock.now_s()))
        return wait_s

    def _is_usable(self, device: Device) -> bool:
        """Return whether pods may be placed on the device now or soon.

        This agent knows first that a device has recovered, and raises the total before the
        scheduler places a pod there.
        """
        view = self._picture.view
        return device.uuid in view.sound or (device.healthy and device.uuid not in view.faulty)

    def _pods(self, vendor: str) -> tuple[HeldPod, ...]:
        """Return the pods by their requests, the ledger's records, or their signed placement."""
        entries = self._picture.entries_by_uid
        alive = {pod.uid: pod for pod in self._picture.pods if self._picture.pods.is_alive(pod.uid)}
        found: list[HeldPod] = []
        for uid in alive.keys() | entries.keys():
            pod, entry = alive.get(uid), entries.get(uid)
            signed = pod.signed if pod is not None and entry is None else None
            containers = entry.record.containers if entry is not None else ()
            if signed is not None:
                containers = signed.placement.containers
            proof = entry.record if entry is not None else signed
            found.append(
                HeldPod(
                    requests=pod.amounts_by_resource if pod is not None else {},
                    booked=booked_of(vendor, containers),
                    holds_ids=proof is not None and proof.origin == VOLCANO.name,
                )
            )
        return tuple(found)

    async def _withdraw(self) -> None:
        """Remove the totals that an earlier run advertised, until it succeeds or is not allowed."""
        backoff = Backoff(first_s=RETRY_S, most_s=RETRY_MOST_S)
        nothing: Mapping[str, dict[str, int]] = {vendor.name: {} for vendor in self._vendors}
        while True:
            try:
                patch = change(_amounts(await self._read()), nothing, described={}).patch
                if patch is not None:
                    await self._write(patch)
                    _log.info("totals withdrawn from the status of the node")
            except HamiError as error:
                await self._report(NOT_WITHDRAWN, f"totals are not withdrawn: {error}", error)
                if isinstance(error, Denied):
                    return
                await backoff.wait()
            else:
                return

    async def _watch(self) -> None:
        """Follow the object of the node."""
        selector = f"metadata.name={self._site.node}"
        async with self._kube.list_watch(NODES_PATH, field_selector=selector) as events:
            async for event in events:
                if event.type == "DELETED":
                    self._node = None
                elif event.raw:
                    try:
                        self._take(event.raw)
                    except WireInvalid as error:
                        self._site.metrics.undecodable.labels(what="node").inc()
                        _log.warning("node unreadable", extra={"problem": str(error)})

    async def _read(self) -> _Node:
        return self._take(await self._kube.get(self._path))

    async def _write(self, patch: object) -> None:
        result = "failed"
        try:
            raw = await self._kube.patch(f"{self._path}/status", msgspec.json.encode(patch))
            self._take(raw)
            result = "written"
        finally:
            self._site.metrics.advertisements.labels(result=result).inc()
        _log.info("status of the node changed", extra={"patch": patch})

    def _take(self, raw: bytes) -> _Node:
        """Store the node unless a newer object is known; ``WireInvalid`` if it is unreadable."""
        try:
            node = _decoder.decode(raw)
        except UNDECODABLE as error:
            raise WireInvalid(what="node", problem=str(error)) from error
        if self._node is None or node.revision() >= self._node.revision():
            if _amounts(node) != (self._node and _amounts(self._node)):
                seen, self._seen = self._seen, anyio.Event()
                seen.set()
            self._node = node
        return node

    async def _report(self, reason: str, message: str, error: HamiError) -> None:
        if isinstance(error, Denied):
            message = f"{message}; {FIX}"
        _log.warning("totals not written", extra={"reason": reason, "problem": str(error)})
        recorder = self._events()
        if recorder is not None:
            regarding = ObjectRef(kind="Node", name=self._site.node, uid=self._site.node)
            await recorder.record(regarding, reason=reason, message=message, kind="Warning")


def _amounts(node: _Node) -> NodeAmounts:
    """Return what decides about the totals: the extended resources, and the agents' annotations."""

    def extended(amounts: dict[str, str] | None) -> dict[str, str]:
        return {name: text for name, text in (amounts or {}).items() if "/" in name}

    notes = node.metadata.annotations or {}
    return NodeAmounts(
        capacity=extended(node.status.capacity),
        allocatable=extended(node.status.allocatable),
        annotations={
            key: text
            for key, text in notes.items()
            if key.startswith(keys.ADVERTISED_AMOUNTS) or key in volcano.OF_NODE
        },
    )
