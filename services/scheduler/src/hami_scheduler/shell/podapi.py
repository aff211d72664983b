# SPDX-License-Identifier: Apache-2.0
"""Pods at the API server: reads them, binds them and patches them, each call bounded in time.

A pod of a list that cannot be decoded is quarantined and its node withheld; the list continues.
Independent of the ledger's rules. Seconds throughout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio.lowlevel
import msgspec
from msgspec import Struct
from opentelemetry.trace import SpanKind

from hami_common.errors import Conflict, Denied, NotFound, Unavailable, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_common.pods.signing import SignedPlacement
from hami_common.ports import KubeApi
from hami_common.runtime.telemetry import Tracing
from hami_core.ledger import binding
from hami_core.ledger.holding import Holding
from hami_core.ledger.podfacts import PodFacts, PodReader, pod_path
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.isolation import POD
from hami_scheduler.shell.state import State

LIST_TIMEOUTS: Final = 6
"""A list of all pods may take this multiple of the time of any other answer."""
PODS: Final = "/api/v1/pods"
UNPROCESSABLE: Final = 422
"""Status of a write that is invalid itself, whatever the object's version."""
MANAGED: Final = f"{annotations.MANAGED_LABEL}=true"
"""Selector of the pods that the webhook prepared."""
UNMANAGED: Final = f"{annotations.MANAGED_LABEL}!=true"

_pod_decoder = msgspec.json.Decoder(PodView)


class _BareSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    node_name: str = ""


class _BareMetadata(Struct, frozen=True, kw_only=True):
    uid: str = ""
    namespace: str = ""
    name: str = ""


class _BareStatus(Struct, frozen=True, kw_only=True):
    phase: str = ""


class BarePod(Struct, frozen=True, kw_only=True):
    """Minimal facts of a pod that cannot be read."""

    metadata: _BareMetadata = _BareMetadata()
    spec: _BareSpec = _BareSpec()
    status: _BareStatus = _BareStatus()

    def names(self) -> tuple[str, str]:
        """Return (namespace, name)."""
        return self.metadata.namespace or "default", self.metadata.name

    def is_finished(self) -> bool:
        """Return whether no container of the pod will run again."""
        return self.status.phase in ("Succeeded", "Failed")


class _RawList(Struct, frozen=True, kw_only=True):
    items: list[msgspec.Raw] | None = None


class _Marked(Struct, frozen=True, kw_only=True):
    uid: str = ""
    namespace: str = ""
    name: str = ""
    annotations: dict[str, str] | None = None


class _MarkedPod(Struct, frozen=True, kw_only=True):
    metadata: _Marked = _Marked()


_marked_decoder = msgspec.json.Decoder(_MarkedPod)
_bare_decoder = msgspec.json.Decoder(BarePod)
_raw_list_decoder = msgspec.json.Decoder(_RawList)
UNREADABLE = BarePod(metadata=_BareMetadata(uid="unreadable"))


def bare_pod(raw: bytes | msgspec.Raw) -> BarePod:
    """Return the identity of a pod, ``UNREADABLE`` where not even that can be read."""
    try:
        return _bare_decoder.decode(raw)
    except UNDECODABLE:
        return UNREADABLE


def _note_unlabelled(raw: msgspec.Raw, paths: dict[str, str]) -> None:
    """Record the path of a pod that carries an allocation, by uid.

    It is read in full afterwards.
    """
    try:
        metadata = _marked_decoder.decode(raw).metadata
    except UNDECODABLE:
        pod = bare_pod(raw)
        paths[pod.metadata.uid] = pod_path(*pod.names())
        return
    if annotations.ALLOCATION in (metadata.annotations or {}):
        paths[metadata.uid] = pod_path(metadata.namespace or "default", metadata.name)


def _items_of(page: bytes) -> list[msgspec.Raw]:
    try:
        return _raw_list_decoder.decode(page).items or []
    except UNDECODABLE as error:
        raise WireInvalid(what="list of pods", problem=str(error)) from error


class PodApi:
    """Calls to the API server about pods."""

    def __init__(
        self,
        kube: KubeApi,
        *,
        state: State,
        reader: PodReader,
        settings: Settings,
        tracing: Tracing,
    ) -> None:
        """Read pods with ``reader``; quarantine in ``state`` those that it cannot read."""
        self._kube = kube
        self._state = state
        self._reader = reader
        self._settings = settings
        self._tracing = tracing

    async def get(self, namespace: str, name: str) -> PodFacts | None:
        """Return the pod as the API server has it now, ``None`` when it does not exist."""
        with self._api():
            try:
                raw = await self._kube.get(pod_path(namespace, name))
            except NotFound:
                return None
        return self._facts(raw)

    async def post_binding(self, pod: PodFacts, document: bytes) -> None:
        """Post the Binding. ``Unavailable``: it is unknown whether it took effect."""
        path = binding.binding_path(pod.namespace, pod.name)
        with (
            self._tracing.start_span("commit", begins=False, kind=SpanKind.CLIENT),
            self._api(),
        ):
            await self._kube.create(path, document)

    async def move_pod(self, holding: Holding) -> PodFacts | None:
        """Invalidate every Binding prepared so far; returns the pod after that."""
        record = holding.record
        document = binding.fence_document(
            uid=record.pod_uid, allocation_id=record.allocation_id, ledger_seq=holding.revision
        )
        return await self.patch(record.namespace, record.pod, record.pod_uid, document)

    async def fence_waiting(self, pod: PodFacts, *, stamp: str) -> PodFacts | None:
        """Invalidate every Binding of an unassigned pod prepared so far (after a wipe)."""
        document = binding.fence_document(uid=pod.uid, allocation_id=stamp, ledger_seq=0)
        return await self.patch(pod.namespace, pod.name, pod.uid, document)

    async def patch(self, namespace: str, name: str, uid: str, document: bytes) -> PodFacts | None:
        """Patch the pod with this uid; returns the pod that has the name after that.

        ``document`` contains the uid. A later pod of the same name stays unchanged: for the API
        server the patch then tries to change a uid, which is invalid.
        """
        try:
            with self._api():
                raw = await self._kube.patch(pod_path(namespace, name), document)
        except NotFound:
            return None
        except Conflict as error:
            problem = error.detail
        except Denied as error:
            if error.status != UNPROCESSABLE:
                raise
            problem = error.detail
        else:
            return self._facts(raw)
        pod = await self.get(namespace, name)
        if pod is not None and pod.uid == uid:
            raise Unavailable(peer="API server", detail=f"pod {name} cannot be patched: {problem}")
        return pod

    def vouch(self, annotation: str, signed: SignedPlacement, *, key_id: str) -> None:
        """Trust this annotation of our own, which is about to be posted, when it is delivered."""
        self._reader.vouch(annotation, signed, key_id=key_id)

    async def list_all(self) -> list[PodFacts]:
        """Return all managed pods, as the API server has them now."""
        with answer_within(LIST_TIMEOUTS * self._settings.api_timeout_s, peer="API server"):
            pages = await self._kube.list_pages(
                PODS, label_selector=MANAGED, page_size=self._settings.list_page_size
            )
        found: list[PodFacts] = []
        for page in pages:
            for item in _items_of(page):
                facts = self._listed(item)
                if facts is not None:
                    found.append(facts)
            # A large cluster's list is long: let calls be answered between its pages.
            await anyio.lowlevel.checkpoint()
        return found

    async def list_unlabelled(self) -> list[PodFacts]:
        """Return assigned pods with an allocation but without our label, which no watch delivers.

        Reads the metadata of every pod of the cluster without our label, page by page.
        """
        paths: dict[str, str] = {}
        pages = self._kube.metadata_pages(
            PODS, label_selector=UNMANAGED, page_size=self._settings.list_page_size
        )
        async for page in pages:
            if annotations.ALLOCATION.encode() in page:
                for item in _items_of(page):
                    _note_unlabelled(item, paths)
            await anyio.lowlevel.checkpoint()
        found: list[PodFacts] = []
        for path in paths.values():
            try:
                with self._api():
                    raw = await self._kube.get(path)
            except NotFound:
                continue
            facts = self._listed(raw)
            if facts is not None and facts.node:
                found.append(facts)
        return found

    def _listed(self, raw: bytes | msgspec.Raw) -> PodFacts | None:
        """Return the facts of one pod of a list; isolate an unreadable one, whose share stays."""
        withheld = self._state.withheld
        try:
            view = _pod_decoder.decode(raw)
            known = self._state.pods.get(view.metadata.uid)
            facts = self._reader.facts_of(view, known=known)
        except Exception as error:  # noqa: BLE001 - of one pod; the list goes on
            pod = bare_pod(raw)
            uid, node = pod.metadata.uid, pod.spec.node_name
            self._state.quarantine.failed(POD, uid, error, name=pod.names())
            if node and not pod.is_finished() and self._state.ledger.holding(node, uid) is None:
                # It may have a share that only its own document records.
                withheld.add(POD, uid, error, node=node)
            return self._state.pods.get(uid)
        if len(withheld):
            withheld.lift(POD, facts.uid)
        return facts

    def _facts(self, raw: bytes) -> PodFacts:
        try:
            view = _pod_decoder.decode(raw)
        except UNDECODABLE as error:
            raise WireInvalid(what="pod from the API server", problem=str(error)) from error
        return self._reader.facts_of(view, known=self._state.pods.get(view.metadata.uid))

    @contextmanager
    def _api(self) -> Iterator[None]:
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            yield
