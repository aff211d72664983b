# SPDX-License-Identifier: Apache-2.0
"""Watches the pods of this node at the API server, and reads single pods when a decision needs it.

All pods of the node are watched, not only those that our webhook prepared: a pod that requests a
device but bypassed our scheduler must be recognized so that it can be refused. The watch is the
normal source; ``confirm`` and ``confirm_all`` are consistent reads, which ``core.claims`` requests
when it must know that the agent's picture is not older than kubelet's.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import anyio
import msgspec
from anyio.abc import TaskStatus
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.bounds import INT64_MAX
from hami_common.errors import NotFound, WireInvalid
from hami_common.events.codec import UNDECODABLE, decode
from hami_common.pods.podview import ListMetadataView, PodView
from hami_common.ports import KubeApi, WatchEvent
from hami_common.runtime.trustedkeys import TrustedKeys
from hami_common.units import whole
from hami_nodeagent.core.podfacts import PodFacts, facts_of
from hami_nodeagent.shell.listkind import READS, GetProbe, ListKind
from hami_nodeagent.shell.nodestatus import read_node_status
from hami_nodeagent.shell.picture import UnreadablePod
from hami_nodeagent.shell.site import Site

PODS_PATH = "/api/v1/pods"
_FINISHED = ("Succeeded", "Failed")

_log = logging.getLogger(__name__)
_pod_decoder = msgspec.json.Decoder(PodView)


class _Metadata(Struct, frozen=True):
    namespace: str = ""
    name: str = ""
    uid: str = ""


class _Named(Struct, frozen=True):
    metadata: _Metadata = _Metadata()


class _Status(Struct, frozen=True):
    phase: str = ""


class _WithStatus(Struct, frozen=True):
    status: _Status = _Status()


class _RawList(Struct, frozen=True):
    metadata: ListMetadataView = ListMetadataView()
    items: list[msgspec.Raw] = []


_status_decoder = msgspec.json.Decoder(_WithStatus)
_named_decoder = msgspec.json.Decoder(_Named)


class PodSource:
    """Source of the pods of one node."""

    def __init__(
        self,
        *,
        site: Site,
        kube: KubeApi,
        keys: TrustedKeys,
        resources: Collection[str],
        kubelet: GetProbe,
        amounts: Collection[str] = (),
    ) -> None:
        """``amounts``: resources of memory and compute that the agent advertises."""
        self._kube = kube
        self._picture = site.picture
        self._keys = keys
        self._resources = frozenset(resources)
        self._amounts = frozenset(amounts)
        self._clock = site.clock
        self._list_kind = ListKind(picture=site.picture, kubelet=kubelet)
        self._list_timeout_s = site.settings.list_timeout_s
        self._metrics = site.metrics
        self._quarantine = site.quarantine
        self._views_by_uid: dict[str, PodView] = {}
        """Complete pods, to verify their annotations again when keys change."""

    async def follow(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Watch the pods until cancelled; started after the first list."""
        selector = f"spec.nodeName={self._picture.node}"
        told: set[str] | None = set()
        async with self._kube.list_watch(PODS_PATH, field_selector=selector) as events:
            async for event in events:
                if event.type == "SYNCED":
                    if told is not None:
                        # A restarted watch does not report deletions that happened in between.
                        await self._end_all_but(told)
                        told = None
                        task_status.started()
                    self._picture.pods_known = True
                    self._picture.note_change()
                    continue
                metadata = _metadata(event.raw)
                if told is not None:
                    told.add(metadata.uid)
                await self._quarantine.run(
                    "pod",
                    metadata.uid or "unreadable",
                    partial(self._take, event),
                    name=(metadata.namespace, metadata.name),
                    size_bytes=len(event.raw),
                )
                if event.type == "DELETED":
                    # The pod is gone even if its object could not be read.
                    self._end(metadata.uid)
                    self._quarantine.forget("pod", metadata.uid or "unreadable")
                self._metrics.pods.set(len(self._picture.pods))

    async def _end_all_but(self, uids: Collection[str]) -> None:
        now_s = self._clock.monotonic_s()
        for pod in list(self._picture.pods):
            if pod.uid not in uids and not pod.gone:
                _log.info("pod went unseen", extra={"pod": pod.title})
                self._views_by_uid.pop(pod.uid, None)
                self._picture.pods.end(pod.uid, now_s=now_s)
        for uid in [uid for uid in self._picture.unreadable_pods if uid not in uids]:
            del self._picture.unreadable_pods[uid]

    def _take(self, event: WatchEvent) -> None:
        """Apply one pod event; if it raises, the last known facts of the pod stay."""
        try:
            with self._noting(event.raw):
                self._learn(_decode(event.raw))
        except WireInvalid:
            self._metrics.undecodable.labels(what="pod").inc()
            raise

    @contextmanager
    def _noting(self, raw: bytes) -> Iterator[None]:
        """Note the pod of the object ``raw`` as unreadable if the block raises.

        Only pods are noted that have no known facts, have not finished, and mention a resource of
        this agent. Known facts stay, but the pod gets no devices, because it cannot be confirmed.
        """
        try:
            yield
        except Exception:
            metadata = _metadata(raw)
            mentioned = frozenset(one for one in self._resources if one.encode() in raw)
            if (
                mentioned
                and _phase(raw) not in _FINISHED
                and self._picture.pods.find(metadata.uid) is None
            ):
                self._picture.unreadable_pods[metadata.uid] = UnreadablePod(
                    namespace=metadata.namespace, name=metadata.name, resources=mentioned
                )
            else:
                self._picture.unreadable_pods.pop(metadata.uid, None)
            raise

    async def confirm(self, facts: PodFacts) -> None:
        """Read the pod that has this name now; ``Unavailable`` without the API server."""
        try:
            raw = await self._kube.get(
                api_path("api", "v1", "namespaces", facts.namespace, "pods", facts.name)
            )
        except NotFound:
            pass
        else:
            with self._noting(raw):
                pod = _decode(raw)
                if pod.spec.node_name == self._picture.node:
                    self._learn(pod)
                    return
        if self._picture.pods.end_name(
            facts.namespace, facts.name, now_s=self._clock.monotonic_s()
        ):
            self._picture.note_change()

    async def confirm_all(self) -> None:
        """Read all pods of this node; ``Unavailable`` without the API server."""
        selector = f"spec.nodeName={self._picture.node}"
        pages = await self._kube.list_pages(PODS_PATH, field_selector=selector)
        lists = [decode(page, _RawList, what="pods of this node") for page in pages]
        # All pages of a list show the state at the revision of the first page.
        revision = _number(lists[0].metadata.resource_version) if lists else 0
        read: list[tuple[PodFacts, int]] = []
        for raw in [bytes(item) for page in lists for item in page.items]:
            metadata = _metadata(raw)
            is_read = await self._quarantine.run(
                "pod",
                metadata.uid or "unreadable",
                partial(self._read_into, read, raw),
                name=(metadata.namespace, metadata.name),
                is_retried=False,
            )
            known = self._picture.pods.find(metadata.uid)
            if not is_read and known is not None:
                read.append((known, 0))  # it exists; its known facts stay
        self._picture.pods.put_all(read, revision=revision, now_s=self._clock.monotonic_s())
        self._picture.note_change()

    def _read_into(self, read: list[tuple[PodFacts, int]], raw: bytes) -> None:
        with self._noting(raw):
            pod = _decode(raw)
            facts = self._facts(pod)
        self._views_by_uid[facts.uid] = pod
        self._picture.unreadable_pods.pop(facts.uid, None)
        read.append((facts, _number(pod.metadata.resource_version)))

    def judge_again(self) -> None:
        """Verify all annotations again, because the trusted keys changed."""
        for uid, pod in list(self._views_by_uid.items()):
            name = (pod.metadata.namespace, pod.metadata.name)
            self._quarantine.call("pod", uid, partial(self._judge, pod), name=name)
        self._picture.note_change()

    def _judge(self, pod: PodView) -> None:
        # Revision 0 always counts as newer: the object is the same, only its verification changed.
        self._picture.pods.put(self._facts(pod), revision=0, now_s=self._clock.monotonic_s())

    def forget(self, *, gone_before_s: float) -> None:
        """Drop pods that were deleted before this time, in seconds of the monotonic clock."""
        self._picture.pods.forget(gone_before_s=gone_before_s)
        for uid in [uid for uid in self._views_by_uid if self._picture.pods.find(uid) is None]:
            del self._views_by_uid[uid]

    async def learn_list_kind(self, *, reads: int = READS) -> None:
        """Learn whether kubelet's list omits refused pods, unless read so often in this run."""
        await self._list_kind.learn(self, timeout_s=self._list_timeout_s, reads=reads)

    async def kubelet_version(self) -> tuple[int, int]:
        """Read kubelet's version from the node's status; (0, 0) if it is unreadable."""
        try:
            status = await read_node_status(self._kube, self._picture.node)
        except WireInvalid:
            return (0, 0)
        return _version(status.node_info.kubelet_version)

    def _learn(self, pod: PodView) -> None:
        facts = self._facts(pod)
        if self._picture.unreadable_pods.pop(facts.uid, None) is not None:
            self._picture.note_change()
        news = self._picture.pods.put(
            facts,
            revision=_number(pod.metadata.resource_version),
            now_s=self._clock.monotonic_s(),
        )
        if news:
            self._views_by_uid[pod.metadata.uid] = pod
            self._picture.note_change()

    def _end(self, uid: str) -> None:
        self._views_by_uid.pop(uid, None)
        was_unreadable = self._picture.unreadable_pods.pop(uid, None) is not None
        if self._picture.pods.end(uid, now_s=self._clock.monotonic_s()) or was_unreadable:
            self._picture.note_change()

    def _facts(self, pod: PodView) -> PodFacts:
        return facts_of(
            pod,
            node=self._picture.node,
            resources=self._resources,
            verifier=self._keys.verifier,
            amounts=self._amounts,
        )


def _metadata(raw: bytes) -> _Metadata:
    """Return the names of a pod even if the rest is unreadable; empty if they are, too."""
    try:
        return _named_decoder.decode(raw).metadata
    except UNDECODABLE:
        return _Metadata()


def _phase(raw: bytes) -> str:
    """Return the phase of a pod; empty if it is unreadable."""
    try:
        return _status_decoder.decode(raw).status.phase
    except UNDECODABLE:
        return ""


def _decode(raw: bytes) -> PodView:
    try:
        return _pod_decoder.decode(raw)
    except UNDECODABLE as error:
        raise WireInvalid(what="pod", problem=str(error)) from error


def _number(revision: str) -> int:
    """Return a ``resourceVersion`` as a number; 0 if it is not one."""
    return whole(revision, most=INT64_MAX) or 0


def _version(text: str) -> tuple[int, int]:
    """Return major and minor of a version such as ``v1.34.2-eks-1``; (0, 0) if unreadable."""
    major, _, rest = text.removeprefix("v").partition(".")
    minor = rest.partition(".")[0].rstrip("+")
    found = whole(major), whole(minor)
    return (0, 0) if None in found else (found[0] or 0, found[1] or 0)
