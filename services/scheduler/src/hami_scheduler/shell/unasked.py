# SPDX-License-Identifier: Apache-2.0
"""Considers waiting pods by claim about which kube-scheduler does not ask (ADR 0039).

Where no node has devices for a claim that kube-scheduler allocates, it finds no node before it
would call the extender: the pod would get neither preemption nor its gang's placement nor an
explanation. These are pods with claims of their own beside that for their resource limits. The
replica that keeps the claims then asks the extender itself, about the nodes that publish devices
and that the pod's selectors and tolerations allow. Its answer leaves the same records and
reservations as one to kube-scheduler, which tries the pod again when claims or slices change.
Seconds throughout.
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import anyio
import msgspec
from msgspec import Struct

from hami_common.errors import HamiError, NotFound
from hami_common.events.codec import decode
from hami_common.ports import KubeApi
from hami_common.runtime.httpd import Request
from hami_core.ledger.podfacts import PodFacts
from hami_core.planning.eligible import exclusion
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.claimkeeper import ClaimKeeper
from hami_scheduler.shell.extender import Extender
from hami_scheduler.shell.feed import NODES
from hami_scheduler.shell.isolation import CALL
from hami_scheduler.shell.podapi import LIST_TIMEOUTS
from hami_scheduler.shell.state import State

AT_ONCE: Final = 16
"""Pods that are considered concurrently; more wait for the next round."""
PAUSE_MOST_S: Final = 60.0
"""Longest pause between two considerations of one pod."""

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_Obj = dict[str, Any]


class _Taints(Struct, frozen=True, kw_only=True):
    unschedulable: bool = False
    taints: list[_Obj] | None = None


class _Labels(Struct, frozen=True, kw_only=True):
    name: str
    labels: dict[str, str] | None = None


class _Node(Struct, frozen=True, kw_only=True):
    metadata: _Labels
    spec: _Taints = _Taints()


class _Nodes(Struct, frozen=True, kw_only=True):
    items: list[_Node] | None = None


class Unasked:
    """The pods of one scheduler's cluster about which kube-scheduler does not ask."""

    def __init__(
        self,
        *,
        state: State,
        extender: Extender,
        keeper: ClaimKeeper,
        kube: KubeApi,
        settings: Settings,
    ) -> None:
        """Ask ``extender`` while ``keeper`` leads."""
        self._state = state
        self._extender = extender
        self._keeper = keeper
        self._kube = kube
        self._settings = settings
        self._first_s: dict[str, float] = {}
        """Time at which a pod was first found waiting, by uid."""
        self._own: dict[str, tuple[float, float]] = {}
        """(time, following pause) of our own question about a pod."""

    async def work(self) -> None:
        """Consider pods whenever one is due; indefinitely, or not at all if off."""
        if not self._settings.dra.enabled:
            return
        while True:
            await self._state.clock.sleep(self._settings.tick_s)
            if not (self._keeper.is_leader and self._state.is_complete):
                self._first_s.clear()
                self._own.clear()
                continue
            due = self._due()[:AT_ONCE]
            if not due:
                continue
            try:
                nodes = await self._nodes()
            except HamiError as error:
                _log.warning("nodes not listed", extra={"problem": str(error)})
                continue
            async with anyio.create_task_group() as group:
                for pod in due:
                    group.start_soon(self._isolated, pod, nodes)

    async def _isolated(self, pod: PodFacts, nodes: Iterable[_Obj]) -> None:
        """Consider one pod; a failure does not keep the others from being considered."""
        await self._state.quarantine.run(
            CALL,
            pod.uid,
            partial(self._consider, pod, nodes),
            name=(pod.namespace, pod.name),
            is_retried=False,
        )

    def _due(self) -> list[PodFacts]:
        """Return the pods whose last question is too long ago, the longest first."""
        now_s, found = self._state.clock.monotonic_s(), []
        waiting = {pod.uid: pod for pod in self._state.pods.waiting() if self._may_be_stuck(pod)}
        for known in (self._first_s, self._own):
            for uid in known.keys() - waiting.keys():
                del known[uid]
        for uid in waiting:
            first_s = self._first_s.setdefault(uid, now_s)
            asked_s = self._extender.asked_s(uid)
            own_s, pause_s = self._own.get(uid, (0.0, self._settings.dra.unasked_s))
            if asked_s > own_s:
                pause_s = self._settings.dra.unasked_s  # by kube-scheduler
            since_s = max(first_s, asked_s)
            if now_s - since_s >= pause_s:
                found.append((since_s, uid))
                self._own[uid] = (now_s, min(PAUSE_MOST_S, 2 * pause_s))
        return [waiting[uid] for _, uid in sorted(found)]

    def _may_be_stuck(self, pod: PodFacts) -> bool:
        """Return whether the pod waits and neither kube-scheduler nor a bind works on it.

        A claim that is created at the bind keeps no node from the extender.
        """
        return (
            bool(pod.claim)
            and not pod.claim_at_bind
            and not pod.is_gated
            and not self._keeper.is_allocated(pod.uid)
            and not any(
                not holding.record.held_for
                for holding in self._state.ledger.holdings_of_pod(pod.uid)
            )
        )

    async def _nodes(self) -> list[_Obj]:
        """Return the nodes with devices, as far as the rules about taints and labels read them."""
        known = {one.node for one in self._state.core.inventory.devices()}
        with answer_within(LIST_TIMEOUTS * self._settings.api_timeout_s, peer="API server"):
            pages = await self._kube.list_pages(NODES, page_size=self._settings.list_page_size)
        return [
            msgspec.to_builtins(node)
            for page in pages
            for node in decode(page, _Nodes, what="nodes").items or ()
            if node.metadata.name in known
        ]

    async def _consider(self, pod: PodFacts, nodes: Iterable[_Obj]) -> None:
        try:
            with answer_within(self._settings.api_timeout_s, peer="API server"):
                raw = await self._kube.get(pod.path())
        except NotFound:
            return
        except HamiError as error:
            _log.debug("pod not considered", extra={"pod": pod.name, "problem": str(error)})
            return
        document: _Obj = msgspec.json.decode(raw)
        names = [node["metadata"]["name"] for node in nodes if not exclusion(document, node)]
        args = {"Pod": msgspec.Raw(raw), "Nodes": None, "NodeNames": names}
        await self._extender.filter(
            Request(
                method="POST",
                path="/filter",
                query={},
                headers={},
                body=_encoder.encode(args),
                params={},
            )
        )
