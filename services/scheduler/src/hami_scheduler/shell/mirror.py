# SPDX-License-Identifier: Apache-2.0
"""Mirrors ledger and inventory in HAMi's annotations on our pods and nodes (design D21).

With the dialect ``volcano``, shares are also mirrored in the annotation from which Volcano counts
the devices of all pods: with the Binding, and here for pods that were bound before or resized.

Off by default. A pass compares the values last written with the present ones, and writes the
difference: one read and one patch for each pod that was bound or resized, or whose MIG instances
became known, one patch for each node whose devices changed. The annotations are never used as a
source of truth, no task waits for them, and failed writes are retried in the next pass. Seconds
throughout.
"""

import logging
from functools import partial

import anyio
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.apipath import api_path
from hami_common.compat import adoption, mirrors, volcano
from hami_common.compat.mirrors import Mirror
from hami_common.errors import Conflict, Denied, NotFound, Unavailable, WireInvalid
from hami_common.events.allocation import AllocationRecord, CarriedShare, is_of_claim
from hami_common.events.codec import UNDECODABLE
from hami_common.model.device import Device
from hami_common.pods import annotations
from hami_common.pods.podview import MetadataView, PodView
from hami_common.ports import KubeApi
from hami_common.runtime.quarantine import Attempt
from hami_common.vendors import nvidia
from hami_common.vendors.nvidia import NvidiaSettings
from hami_core.ledger.holding import Holding
from hami_core.ledger.podfacts import pod_path
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.isolation import MIRROR
from hami_scheduler.shell.state import State

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_pod_decoder = msgspec.json.Decoder(PodView)


class _NodeView(Struct, frozen=True, kw_only=True):
    metadata: MetadataView


_node_decoder = msgspec.json.Decoder(_NodeView)


def for_volcano(record: AllocationRecord, settings: NvidiaSettings) -> dict[str, str]:
    """Return the annotations from which Volcano counts a pod; empty without its dialect."""
    if "volcano" not in settings.dialects:
        return {}
    return volcano.of_pod(
        record.containers,
        vendor=nvidia.NAME,
        node=record.node,
        unit_mib=max(1, settings.memory_factor),
    )


class HamiMirrors:
    """Writes the mirrors of one scheduler."""

    def __init__(self, *, state: State, kube: KubeApi, settings: Settings) -> None:
        self._state = state
        self._quarantine = state.quarantine
        self._inventory = state.core.inventory
        self._kube = kube
        self._settings = settings
        self._revision_by_uid: dict[str, tuple[int, tuple[CarriedShare, ...]]] = {}
        """Written revision and MIG instances, by uid of the pod."""
        self._devices_by_node: dict[str, dict[str, Device]] = {}
        self._is_warned = False

    @property
    def _is_for_volcano(self) -> bool:
        return "volcano" in self._settings.vendors.nvidia.dialects

    @property
    def _mirrors_pods(self) -> bool:
        return self._settings.mirror_pods or self._is_for_volcano

    async def work(self) -> None:
        """Run a pass at each interval, indefinitely."""
        if not (self._mirrors_pods or self._settings.mirror_nodes):
            return
        while True:
            if self._state.is_complete:
                await self.look()
            await self._state.clock.sleep(self._settings.mirror_s)

    async def look(self) -> None:
        """Run one pass: write the annotations that changed."""
        try:
            if self._settings.mirror_nodes:
                for node in sorted({one.node for one in self._inventory.devices()}):
                    await self._one(node, partial(self._mirror_node, node))
            if self._mirrors_pods:
                await self._mirror_pods()
        except Unavailable as error:
            level = logging.DEBUG if self._is_warned else logging.WARNING
            self._is_warned = True
            _log.log(level, "mirrors not written", extra={"problem": str(error)})
        else:
            self._is_warned = False

    async def _one(self, key: str, mirror: Attempt, *, name: tuple[str, str] = ("", "")) -> None:
        """Write one mirror; a failure does not keep the others from being written."""
        if self._quarantine.is_due(MIRROR, key):
            await self._quarantine.run(
                MIRROR, key, mirror, passes=(Unavailable,), name=name, is_retried=False
            )

    # --- pods ------------------------------------------------------------------------------------

    async def _mirror_pods(self) -> None:
        live = list(self._state.ledger.holdings())
        uids = {holding.record.pod_uid for holding in live}
        for uid in [uid for uid in self._revision_by_uid if uid not in uids]:
            del self._revision_by_uid[uid]
        marks: dict[str, adoption.TakenOver] = {}
        for holding in live:
            record = holding.record
            state = self._state.ledger.state_of(record.node, record.pod_uid)
            is_bound = state in {"bound", "prepared", "running"}
            if is_of_claim(record) or not is_bound:
                continue  # a claim has no pod to annotate
            if record.origin and not self._is_for_volcano:
                continue
            carried = self._state.ledger.carried_of(record.node, record.pod_uid)
            mirrored = (holding.revision, carried)
            if self._revision_by_uid.get(record.pod_uid) == mirrored:
                continue
            await self._one(
                record.pod_uid,
                partial(self._mirror_held, holding, marks, mirrored),
                name=(record.namespace, record.pod),
            )

    async def _mirror_held(
        self,
        holding: Holding,
        marks: dict[str, adoption.TakenOver],
        mirrored: tuple[int, tuple[CarriedShare, ...]],
    ) -> None:
        node = holding.record.node
        if self._settings.mirror_pods and node not in marks:
            marks[node] = await self._mark(node)
        await self._mirror_pod(holding, marks.get(node, adoption.TakenOver()), mirrored[1])
        self._revision_by_uid[holding.record.pod_uid] = mirrored

    async def _mirror_pod(
        self, holding: Holding, mark: adoption.TakenOver, carried: tuple[CarriedShare, ...]
    ) -> None:
        record = holding.record
        path = pod_path(record.namespace, record.pod)
        try:
            pod = await self._pod(path)
        except NotFound:
            return  # its share is about to be released
        if pod.metadata.uid != record.pod_uid or pod.spec.node_name != record.node:
            return
        mirror = Mirror(annotations=for_volcano(record, self._settings.vendors.nvidia))
        if self._settings.mirror_pods and not record.origin:
            mirror = self._for_hami(holding, pod, mark, carried, mirror)
        shown = pod.annotations()
        times = {annotations.HAMI_TIME, annotations.HAMI_BIND_TIME}
        if all(shown.get(k) == v for k, v in mirror.annotations.items() if k not in times):
            return
        await self._patch(path, mirror, uid=record.pod_uid)

    def _for_hami(
        self,
        holding: Holding,
        pod: PodView,
        mark: adoption.TakenOver,
        carried: tuple[CarriedShare, ...],
        before: Mirror,
    ) -> Mirror:
        """Return ``before`` with HAMi's annotations."""
        record = holding.record
        mirror = mirrors.of_pod(
            [container.name for _, container in pod.containers_in_order()],
            record.containers,
            node=record.node,
            devices=self._devices(record.node),
            mark=mark,
            time_s=self._state.clock.now_s(),
            carried=carried,
        )
        for problem in mirror.problems:
            extra = {"namespace": record.namespace, "pod": record.pod, "problem": problem}
            _log.warning("share cannot be expressed in HAMi's form", extra=extra)
        return replace(mirror, annotations=before.annotations | mirror.annotations)

    async def _pod(self, path: str) -> PodView:
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            raw = await self._kube.get(path)
        try:
            return _pod_decoder.decode(raw)
        except UNDECODABLE as error:
            raise WireInvalid(what="pod from the API server", problem=str(error)) from error

    # --- nodes -----------------------------------------------------------------------------------

    async def _mirror_node(self, node: str) -> None:
        devices = self._devices(node)
        if self._devices_by_node.get(node) == devices:
            return
        mirror = mirrors.of_node(
            devices, node=node, mark=await self._mark(node), time_s=self._state.clock.now_s()
        )
        await self._patch(api_path("api", "v1", "nodes", node), mirror)
        self._devices_by_node[node] = devices

    def _devices(self, node: str) -> dict[str, Device]:
        return {
            device.uuid: device
            for devices in self._inventory.of_node(node)
            for device in devices.devices
        }

    async def _mark(self, node: str) -> adoption.TakenOver:
        """Return HAMi's names of the node's devices, where an operator has kept them."""
        try:
            with answer_within(self._settings.api_timeout_s, peer="API server"):
                raw = await self._kube.get(api_path("api", "v1", "nodes", node))
            text = (_node_decoder.decode(raw).metadata.annotations or {}).get(
                annotations.TAKEN_OVER, ""
            )
            return adoption.decode_mark(text) if text else adoption.TakenOver()
        except (NotFound, WireInvalid, *UNDECODABLE) as error:
            _log.debug("mark of a node not read", extra={"node": node, "problem": str(error)})
            return adoption.TakenOver()

    async def _patch(self, path: str, mirror: Mirror, *, uid: str = "") -> None:
        if not mirror.annotations:
            await anyio.lowlevel.checkpoint()
            return
        metadata: dict[str, object] = {"annotations": mirror.annotations}
        if mirror.labels:
            metadata["labels"] = mirror.labels
        if uid:
            metadata["uid"] = uid
        try:
            with answer_within(self._settings.api_timeout_s, peer="API server"):
                await self._kube.patch(path, _encoder.encode({"metadata": metadata}))
        except (NotFound, Conflict, Denied) as error:
            # The object is gone, another one has its name, or we have no permission to write it.
            _log.info("mirror not written", extra={"path": path, "problem": str(error)})
