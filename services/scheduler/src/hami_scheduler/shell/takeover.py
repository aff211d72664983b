# SPDX-License-Identifier: Apache-2.0
"""Book the pods of HAMi or Volcano in the ledger before anything is allocated on their node.

When an agent starts on a node, the node and its pods are read once. Pods that an operator listed on
the node (annotation ``hami.io/taken-over``, which tenants cannot write) are booked with their
devices (``hami_common.compat.adoption``) and get a signed allocation and our label. From then on
they are treated like all others: watched, released when they end, restored from their own
annotations. The other system's annotations and limiter stay in place. Nothing is allocated on a
node before this is done, nor while an unlisted pod of such a system runs there. Times are in
seconds.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.compat import adoption
from hami_common.compat.origins import ORIGINS, title_of
from hami_common.errors import Conflict, Denied, HamiError, NotFound, Unavailable, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.pods import annotations
from hami_common.pods.podview import MetadataView, PodListView, PodView
from hami_common.pods.signing import Signer
from hami_common.ports import KubeApi
from hami_common.vendors.catalog import Catalog
from hami_core.ledger import binding
from hami_core.ledger.holding import Holding
from hami_core.ledger.podfacts import PodReader
from hami_core.ledger.stimuli import AdoptPlanned
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.isolation import TAKE_OVER
from hami_scheduler.shell.keylocks import KeyLocks
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.podapi import PODS
from hami_scheduler.shell.state import State

US = "us"
NAMES_TOLD = 5
"""Maximum pods that one refusal names."""
MOST_REASON = 1000
"""Maximum characters of doubts that a ledger record keeps."""
UNPROCESSABLE = 422

_log = logging.getLogger(__name__)
_list_decoder = msgspec.json.Decoder(PodListView)


class _NodeView(Struct, frozen=True, kw_only=True):
    metadata: MetadataView


_node_decoder = msgspec.json.Decoder(_NodeView)
_encoder = msgspec.json.Encoder()

_Key = tuple[object, ...]


class Pods(Struct, frozen=True, kw_only=True):
    """Reader of pods, and signer of their allocations."""

    reader: PodReader
    catalog: Catalog
    signer: Signer


class TakeOver:
    """Inspects nodes, each once per agent, and after the ledger was lost."""

    def __init__(
        self,
        *,
        state: State,
        effects: Effects,
        kube: KubeApi,
        pods: Pods,
        settings: Settings,
        metrics: Metrics,
        ids: Callable[[], str],
    ) -> None:
        """``ids`` returns allocation ids."""
        self._state = state
        self._quarantine = state.quarantine
        self._inventory = state.core.inventory
        self._effects = effects
        self._kube = kube
        self._reader = pods.reader
        self._catalog = pods.catalog
        self._signer = pods.signer
        self._settings = settings
        self._metrics = metrics
        self._ids = ids
        self._nodes = KeyLocks("node")
        self._examined: dict[str, _Key] = {}
        self._refusals: dict[str, str] = {}
        self._seen = (-1, -1)

    def is_withheld(self, node: str) -> bool:
        """Return whether the node does not accept allocations yet."""
        return self._settings.take_over and self._examined.get(node) != self._key(node)

    async def ensure(self, node: str) -> None:
        """Return once all listed pods of the node are in the ledger, else ``Unavailable``."""
        if not self.is_withheld(node):
            self._refusals.pop(node, None)
            return
        async with self._nodes.hold(node, wait_s=self._settings.bind_wait_s):
            if not self.is_withheld(node):
                self._refusals.pop(node, None)
                return
            key = self._key(node)
            await self._examine(node)
            self._examined[node] = key
            self._refusals.pop(node, None)

    async def work(self) -> None:
        """Inspect nodes as they arrive, indefinitely."""
        if not self._settings.take_over:
            return
        while True:
            if self._state.is_complete:
                for node in self._to_examine():
                    await self._try(node)
            await self._state.clock.sleep(self._settings.take_over_s)

    def _to_examine(self) -> list[str]:
        """Return nodes that could not be taken over.

        All nodes after inventory or storage changed.
        """
        now = (self._state.table.inventory_revision, self._state.storage_epoch)
        if now == self._seen:
            return sorted(self._refusals)
        self._seen = now
        return sorted({devices.node for devices in self._inventory.devices()})

    async def _try(self, node: str) -> None:
        self._refusals.setdefault(node, "")  # retried until it is done
        if not self._quarantine.is_due(TAKE_OVER, node):
            return
        try:
            await self._quarantine.run(
                TAKE_OVER,
                node,
                partial(self.ensure, node),
                passes=(HamiError,),
                is_retried=False,
            )
        except HamiError as error:
            text = str(error)
            if self._refusals.get(node) != text:
                self._refusals[node] = text
                _log.warning("node is not taken over", extra={"node": node, "problem": text})

    def _key(self, node: str) -> _Key:
        """Return the key of an inspection of the node: its agents and the storage epoch."""
        agents = sorted(
            (devices.vendor, devices.boot_id) for devices in self._inventory.of_node(node)
        )
        return (self._state.storage_epoch, *agents)

    async def _examine(self, node: str) -> None:
        self._state.require_complete()
        devices = {one.vendor: one.devices for one in self._inventory.of_node(node)}
        mark = await self._mark(node)
        view = adoption.NodeView(name=node, devices=devices, mark=mark)
        unlisted: dict[str, list[str]] = {}
        failed: list[str] = []
        for pod in await self._pods(node):
            meta = pod.metadata
            if not await self._quarantine.run(
                TAKE_OVER,
                meta.uid,
                partial(self._examine_pod, pod, view, unlisted),
                passes=(Unavailable,),
                name=(meta.namespace or "default", meta.name),
                is_retried=False,  # retried with the node
            ):
                failed.append(f"{meta.namespace}/{meta.name}")
        if failed:
            raise Unavailable(
                peer=f"node {node}",
                detail=f"{len(failed)} pods there cannot be taken over"
                f" ({', '.join(sorted(failed)[:NAMES_TOLD])}); see GET /v1/quarantine",
            )
        for origin, pods in unlisted.items():
            names = ", ".join(sorted(pods)[:NAMES_TOLD])
            raise Unavailable(
                peer=f"node {node}",
                detail=f"{len(pods)} pods there were placed by {title_of(origin)} and are not taken"
                f" over ({names}); run hamictl migrate node {node} --from {origin}",
            )

    async def _examine_pod(
        self, pod: PodView, node: adoption.NodeView, unlisted: dict[str, list[str]]
    ) -> None:
        placed_by = self._placed_by(pod, node.name)
        if placed_by == US or not adoption.may_hold(pod, self._catalog):
            return
        if pod.metadata.uid in node.mark.pods:
            await self._adopt(pod, node)
        elif not placed_by:
            name = f"{pod.metadata.namespace}/{pod.metadata.name}"
            for origin in ORIGINS.values():
                if origin.is_placed(pod.annotations()):
                    unlisted.setdefault(origin.name, []).append(name)

    def _placed_by(self, pod: PodView, node: str) -> str:
        """Return who placed the pod, by the ledger or a trusted signature; empty: unknown.

        ``US``, or the origin of a pod that was taken over before.
        """
        holding = self._state.ledger.holding(node, pod.metadata.uid)
        if holding is not None:
            return holding.record.origin or US
        known = self._state.pods.get(pod.metadata.uid)
        signed = self._reader.facts_of(pod, known=known).signed
        return "" if signed is None else signed.origin or US

    async def _mark(self, node: str) -> adoption.TakenOver:
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            try:
                raw = await self._kube.get(api_path("api", "v1", "nodes", node))
            except NotFound:
                return adoption.TakenOver()
        try:
            notes = _node_decoder.decode(raw).metadata.annotations or {}
        except UNDECODABLE as error:
            raise WireInvalid(what=f"node {node}", problem=str(error)) from error
        text = notes.get(annotations.TAKEN_OVER, "")
        return adoption.decode_mark(text) if text else adoption.TakenOver()

    async def _pods(self, node: str) -> Sequence[PodView]:
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            pages = await self._kube.list_pages(
                PODS,
                field_selector=f"spec.nodeName={node}",
                page_size=self._settings.list_page_size,
            )
        try:
            found = [pod for page in pages for pod in _list_decoder.decode(page).items]
        except UNDECODABLE as error:
            raise WireInvalid(what=f"pods of node {node}", problem=str(error)) from error
        # The API server may ignore the selector: a pod counts on the node of its spec.
        return [pod for pod in found if pod.spec.node_name == node]

    # --- one pod ---------------------------------------------------------------------------------

    async def _adopt(self, pod: PodView, node: adoption.NodeView) -> None:
        meta = pod.metadata
        found = adoption.read(pod, node, self._catalog)
        extra = {"namespace": meta.namespace, "pod": meta.name, "node": node.name}
        for problem in found.problems:
            _log.warning(
                "share of a pod taken over is in doubt", extra={**extra, "problem": problem}
            )
        if not found.containers:
            return
        async with self._effects.ledger.planning(node.name):
            holding = await self._book(pod, node, found)
        try:
            await self._annotate(holding)
        except NotFound:
            await self._effects.ledger.release(holding, "pod-gone")
            return
        await self._effects.ledger.confirm(holding)

    async def _book(
        self, pod: PodView, view: adoption.NodeView, found: adoption.Adopted
    ) -> Holding:
        """Return the record of the pod with the devices found."""
        meta, ledger, allocation_id = pod.metadata, self._state.ledger, self._ids()
        node, origin = view.name, view.mark.origin
        for _ in range(self._settings.fence_tries):
            self._state.require_complete()
            plan = self._state.core.answer(
                AdoptPlanned(
                    node=node,
                    pod_uid=meta.uid,
                    namespace=meta.namespace or "default",
                    pod=meta.name,
                    containers=found.containers,
                    allocation_id=allocation_id,
                    now_s=self._state.clock.now_s(),
                    reason="; ".join(found.problems)[:MOST_REASON],
                    origin=origin,
                )
            )
            if plan is not None:
                try:
                    await self._effects.ledger.append(plan)
                except Conflict:
                    await self._effects.ledger.read_node(node)
                    continue
                self._metrics.repairs.labels(action="adopted").inc()
                extra = {"namespace": meta.namespace, "pod": meta.name, "node": node}
                _log.info("pod taken over", extra={**extra, "origin": origin})
            holding = ledger.holding(node, meta.uid)
            if holding is not None:
                return holding
        raise Unavailable(peer="NATS", detail=f"node {node} kept changing")

    async def _annotate(self, holding: Holding) -> None:
        """Write our signature and label on the pod, unless both exist; ``NotFound``: it is gone."""
        record = holding.record
        pod = await self._effects.pods.get(record.namespace, record.pod)
        if pod is None or pod.uid != record.pod_uid or pod.is_finished:
            raise NotFound(what=f"pod {record.namespace}/{record.pod}")
        if pod.is_labelled and pod.signed == binding.signed_placement(
            record, ledger_seq=pod.signed.ledger_seq if pod.signed is not None else 0
        ):
            return
        document = {
            "metadata": {
                "uid": record.pod_uid,
                "labels": {annotations.MANAGED_LABEL: "true"},
                "annotations": binding.allocation_annotations(
                    record, ledger_seq=holding.revision, signer=self._signer
                ),
            }
        }
        try:
            with answer_within(self._settings.api_timeout_s, peer="API server"):
                await self._kube.patch(pod.path(), _encoder.encode(document))
        except Denied as error:
            if error.status != UNPROCESSABLE:
                raise
            raise NotFound(what=f"pod {record.namespace}/{record.pod}") from error
