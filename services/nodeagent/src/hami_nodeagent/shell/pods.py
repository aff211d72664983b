# SPDX-License-Identifier: Apache-2.0
"""Follows the pods of this node at the API server, and reads single pods when a decision needs it.

All pods of the node are watched, not only those our webhook prepared: a pod that was scheduled
around us and asks for a device must be recognised to be refused. The watch is the normal source;
``confirm`` and ``confirm_all`` are consistent reads, asked for by ``core.claims`` when it must
know that our picture is not older than kubelet's.
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
from hami_common.units import whole
from hami_nodeagent.core.podfacts import PodFacts, facts_of
from hami_nodeagent.shell.keys import TrustedKeys
from hami_nodeagent.shell.picture import UnreadablePod
from hami_nodeagent.shell.site import Site

PODS_PATH = "/api/v1/pods"
_FIRST_ACTIVE_ONLY = (1, 34)
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


class _NodeInfo(Struct, frozen=True, rename="camel"):
    kubelet_version: str = ""


class _NodeStatus(Struct, frozen=True, rename="camel"):
    node_info: _NodeInfo = _NodeInfo()


class _NodeView(Struct, frozen=True):
    status: _NodeStatus = _NodeStatus()


_node_decoder = msgspec.json.Decoder(_NodeView)


class PodSource:
    """The pods of one node."""

    def __init__(
        self,
        *,
        site: Site,
        kube: KubeApi,
        keys: TrustedKeys,
        resources: Collection[str],
    ) -> None:
        self._kube = kube
        self._picture = site.picture
        self._keys = keys
        self._resources = frozenset(resources)
        self._clock = site.clock
        self._metrics = site.metrics
        self._quarantine = site.quarantine
        self._views_by_uid: dict[str, PodView] = {}
        """Whole pods, to judge their annotations anew when keys change."""

    async def follow(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follow the pods for ever; started once the first list is in."""
        selector = f"spec.nodeName={self._picture.node}"
        told: set[str] | None = set()
        async with self._kube.list_watch(PODS_PATH, field_selector=selector) as events:
            async for event in events:
                if event.type == "SYNCED":
                    if told is not None:
                        # A watch that begins again does not tell what went in between.
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
                    # It is gone, whatever else of it can be read.
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
        """Take one change of a pod; what it raises leaves the pod as it was known before."""
        try:
            with self._noting(event.raw):
                self._learn(_decode(event.raw))
        except WireInvalid:
            self._metrics.undecodable.labels(what="pod").inc()
            raise

    @contextmanager
    def _noting(self, raw: bytes) -> Iterator[None]:
        """Note the pod of the object ``raw`` as unreadable, if the block cannot take it.

        What was known of the pod stays: then nothing is given to it, because it is not confirmed.
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
        """Read the pod that has this name now. ``Unavailable`` when the API server is away."""
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
        """Read all pods of this node. ``Unavailable`` when the API server is away."""
        selector = f"spec.nodeName={self._picture.node}"
        pages = await self._kube.list_pages(PODS_PATH, field_selector=selector)
        lists = [decode(page, _RawList, what="pods of this node") for page in pages]
        # A list that comes in pages shows the state of its first one.
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
                read.append((known, 0))  # it exists, as it was known
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
        """Verify all annotations anew: the trusted keys changed."""
        for uid, pod in list(self._views_by_uid.items()):
            name = (pod.metadata.namespace, pod.metadata.name)
            self._quarantine.call("pod", uid, partial(self._judge, pod), name=name)
        self._picture.note_change()

    def _judge(self, pod: PodView) -> None:
        # Revision 0: same object, other verdict.
        self._picture.pods.put(self._facts(pod), revision=0, now_s=self._clock.monotonic_s())

    def forget(self, *, gone_before_s: float) -> None:
        """Drop what is known of pods that are gone since before this time."""
        self._picture.pods.forget(gone_before_s=gone_before_s)
        for uid in [uid for uid in self._views_by_uid if self._picture.pods.find(uid) is None]:
            del self._views_by_uid[uid]

    async def learn_kubelet_version(self) -> None:
        """Find out whether this kubelet leaves refused pods out of its list."""
        raw = await self._kube.get(api_path("api", "v1", "nodes", self._picture.node))
        try:
            version = _node_decoder.decode(raw).status.node_info.kubelet_version
        except UNDECODABLE:
            version = ""
        active_only = _version(version) >= _FIRST_ACTIVE_ONLY
        if active_only == self._picture.view.lists_active_only:
            return
        self._picture.view.lists_active_only = active_only
        _log.info(
            "kubelet version read",
            extra={"version": version, "active_only": self._picture.view.lists_active_only},
        )

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
        )


def _metadata(raw: bytes) -> _Metadata:
    """Names of a pod, whatever else of it cannot be read; empty when they cannot either."""
    try:
        return _named_decoder.decode(raw).metadata
    except UNDECODABLE:
        return _Metadata()


def _phase(raw: bytes) -> str:
    """Phase of a pod; empty when it cannot be read."""
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
    """Position in the API server's history; 0 when it does not look like one."""
    return whole(revision, most=INT64_MAX) or 0


def _version(text: str) -> tuple[int, int]:
    """Major and minor of a version such as ``v1.34.2-eks-1``; (0, 0) when there is none."""
    major, _, rest = text.removeprefix("v").partition(".")
    minor = rest.partition(".")[0].rstrip("+")
    found = whole(major), whole(minor)
    return (0, 0) if None in found else (found[0] or 0, found[1] or 0)
