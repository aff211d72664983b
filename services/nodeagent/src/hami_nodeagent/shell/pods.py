# SPDX-License-Identifier: Apache-2.0
"""Follows the pods of this node at the API server, and reads single pods when a decision needs it.

All pods of the node are watched, not only those our webhook prepared: a pod that was scheduled
around us and asks for a device must be recognised to be refused. The watch is the normal source;
``confirm`` and ``confirm_all`` are consistent reads, asked for by ``core.claims`` when it must
know that our picture is not older than kubelet's.
"""

import logging
from collections.abc import Collection

import anyio
import msgspec
from anyio.abc import TaskStatus
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.bounds import INT64_MAX
from hami_common.errors import NotFound, WireInvalid
from hami_common.events.codec import UNDECODABLE, decode
from hami_common.podview import PodListView, PodView
from hami_common.ports import KubeApi
from hami_common.units import whole
from hami_nodeagent.core.podfacts import PodFacts, facts_of
from hami_nodeagent.shell.keys import TrustedKeys
from hami_nodeagent.shell.site import Site

PODS_PATH = "/api/v1/pods"
_FIRST_ACTIVE_ONLY = (1, 34)

_log = logging.getLogger(__name__)
_pod_decoder = msgspec.json.Decoder(PodView)


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
        self._views_by_uid: dict[str, PodView] = {}
        """Whole pods, to judge their annotations anew when keys change."""

    async def follow(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follow the pods for ever; started once the first list is in."""
        selector = f"spec.nodeName={self._picture.node}"
        is_started = False
        async with self._kube.list_watch(PODS_PATH, field_selector=selector) as events:
            async for event in events:
                if event.type == "SYNCED":
                    self._picture.pods_known = True
                    self._picture.note_change()
                    if not is_started:
                        is_started = True
                        task_status.started()
                    continue
                try:
                    pod = _decode(event.raw)
                except WireInvalid as error:
                    self._metrics.undecodable.labels(what="pod").inc()
                    _log.warning("pod not understood", extra={"problem": str(error)})
                    continue
                self._learn(pod)
                if event.type == "DELETED":
                    self._end(pod)
                self._metrics.pods.set(len(self._picture.pods))

    async def confirm(self, facts: PodFacts) -> None:
        """Read the pod that has this name now. ``Unavailable`` when the API server is away."""
        try:
            raw = await self._kube.get(
                api_path("api", "v1", "namespaces", facts.namespace, "pods", facts.name)
            )
        except NotFound:
            pod = None
        else:
            pod = _decode(raw)
        if pod is None or pod.spec.node_name != self._picture.node:
            if self._picture.pods.end_name(
                facts.namespace, facts.name, now_s=self._clock.monotonic_s()
            ):
                self._picture.note_change()
        else:
            self._learn(pod)

    async def confirm_all(self) -> None:
        """Read all pods of this node. ``Unavailable`` when the API server is away."""
        selector = f"spec.nodeName={self._picture.node}"
        pages = await self._kube.list_pages(PODS_PATH, field_selector=selector)
        lists = [decode(page, PodListView, what="pods of this node") for page in pages]
        pods = [pod for page in lists for pod in page.items]
        # A list that comes in pages shows the state of its first one.
        revision = _number(lists[0].metadata.resource_version) if lists else 0
        for pod in pods:
            self._views_by_uid[pod.metadata.uid] = pod
        self._picture.pods.put_all(
            [(self._facts(pod), _number(pod.metadata.resource_version)) for pod in pods],
            revision=revision,
            now_s=self._clock.monotonic_s(),
        )
        self._picture.note_change()

    def judge_again(self) -> None:
        """Verify all annotations anew: the trusted keys changed."""
        for pod in list(self._views_by_uid.values()):
            # Revision 0: same object, other verdict.
            self._picture.pods.put(self._facts(pod), revision=0, now_s=self._clock.monotonic_s())
        self._picture.note_change()

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
        news = self._picture.pods.put(
            self._facts(pod),
            revision=_number(pod.metadata.resource_version),
            now_s=self._clock.monotonic_s(),
        )
        if news:
            self._views_by_uid[pod.metadata.uid] = pod
            self._picture.note_change()

    def _end(self, pod: PodView) -> None:
        self._views_by_uid.pop(pod.metadata.uid, None)
        if self._picture.pods.end(pod.metadata.uid, now_s=self._clock.monotonic_s()):
            self._picture.note_change()

    def _facts(self, pod: PodView) -> PodFacts:
        return facts_of(
            pod,
            node=self._picture.node,
            resources=self._resources,
            verifier=self._keys.verifier,
        )


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
