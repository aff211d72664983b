# SPDX-License-Identifier: Apache-2.0
"""Migrates nodes from HAMi and rolls them back, one at a time, while their pods run.

A node belongs to one side at a time: its labels select the side's device plugin, and only that side
schedules on it. A migration has three steps, each one patch of the node. If it is interrupted
between two steps, the next call resumes it:

1. Cordon the node and remove the old side's label.
2. After the old side's plugin ended, record its pods and device names on the node, and remove its
   registration.
3. Add the new side's label and uncordon the node.

Times in seconds.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal

import anyio
import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.compat import adoption, hamiformat
from hami_common.errors import Conflict, Unavailable, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.model.device import Device
from hami_common.model.placement import Placement
from hami_common.pods import annotations
from hami_common.pods.podview import MetadataView, PodListView, PodView
from hami_common.ports import KubeApi
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.handles import is_divisible
from hamictl.errors import Refused, Unreachable

Side = Literal["hami", "moving", "ours", "none"]

MOVING: Final = "hami.io/moving"
"""Annotation of a node during a migration: ``cordoned`` or ``open``, its state before."""
OURS: Final = "hami.io/"
"""Prefix of the labels ``hami.io/<vendor>=true`` that select a node agent."""
AGENT: Final = ("app.kubernetes.io/name", "hami-nodeagent")
LOCKS: Final = ("hami.io/mutex.lock", "cambricon.com/dsmlu.lock")
TRIES: Final = 5
POLL_S: Final = 0.5
PAGE: Final = 500


class _Payload(Struct, frozen=True, kw_only=True):
    origin: str = ""
    placement: Placement | None = None


class _Allocation(Struct, frozen=True, kw_only=True):
    payload: _Payload = _Payload()


_allocation_decoder = msgspec.json.Decoder(_Allocation)
_pods_decoder = msgspec.json.Decoder(PodListView)


class _SpecView(Struct, frozen=True, kw_only=True):
    unschedulable: bool = False


class _NodeView(Struct, frozen=True, kw_only=True):
    metadata: MetadataView = MetadataView()
    spec: _SpecView = _SpecView()


class _NodeListView(Struct, frozen=True, kw_only=True):
    items: list[_NodeView] = []


_node_decoder = msgspec.json.Decoder(_NodeView)
_nodes_decoder = msgspec.json.Decoder(_NodeListView)


class Sides(Struct, frozen=True, kw_only=True):
    """Labels that identify HAMi's nodes and plugin."""

    label: tuple[str, str] = ("gpu", "on")
    """Label of nodes on which HAMi's plugin runs."""
    plugin: tuple[str, str] = ("app.kubernetes.io/component", "hami-device-plugin")
    """Label of that plugin's pods."""
    wait_s: float = 120.0


class NodeState(Struct, frozen=True, kw_only=True):
    """A node's side and its pods."""

    node: str
    side: Side
    vendors: tuple[str, ...] = ()
    hami_pods: int = 0
    """Pods that HAMi placed and that may run."""
    our_pods: int = 0
    taken_over: int = 0
    """Pods of ``hami_pods`` that the node lists, so that their shares are booked."""
    problems: tuple[str, ...] = ()
    """Doubtful shares, and blockers of a migration."""


class NodeStates(Struct, frozen=True, kw_only=True):
    """All nodes with devices."""

    items: tuple[NodeState, ...]


async def survey(kube: KubeApi, sides: Sides) -> NodeStates:
    """List all nodes that either side uses."""
    nodes = [
        node
        for page in await kube.list_pages("/api/v1/nodes", page_size=PAGE)
        for node in _nodes_decoder.decode(page).items
    ]
    pods_by_node: dict[str, list[PodView]] = {}
    for page in await kube.list_pages("/api/v1/pods", page_size=PAGE):
        for pod in _pods_decoder.decode(page).items:
            pods_by_node.setdefault(pod.spec.node_name, []).append(pod)
    found = [
        state_of(node, pods_by_node.get(node.metadata.name, []), sides)
        for node in sorted(nodes, key=lambda one: one.metadata.name)
    ]
    return NodeStates(items=tuple(one for one in found if one.side != "none" or one.hami_pods))


def state_of(node: _NodeView, pods: Sequence[PodView], sides: Sides) -> NodeState:
    """Return the state of one node."""
    name, notes = node.metadata.name, node.metadata.annotations or {}
    mark, problems = _mark(notes)
    catalog = Catalog.from_settings()
    hami_pods = [pod for pod in pods if _is_of_hami(pod, catalog, mark)]
    view = adoption.NodeView(name=name, devices=_registered(notes, problems), mark=mark)
    for pod in hami_pods:
        title = f"{pod.metadata.namespace}/{pod.metadata.name}"
        read = adoption.read(pod, view, catalog)
        problems += [f"{title}: {problem}" for problem in read.problems]
        problems += [f"{title}: {text}" for text in _partitions(pod, read, view)]
    side = _side(node, sides)
    if side == "ours":
        problems += [
            f"{pod.metadata.namespace}/{pod.metadata.name}: was placed by HAMi and is not taken "
            "over, so no devices are allocated on the node"
            for pod in hami_pods
            if pod.metadata.uid not in mark.pods
            and not _origin(pod)
            and hamiformat.is_placed(pod.annotations())
        ]
    return NodeState(
        node=name,
        side=side,
        vendors=tuple(sorted(_vendors(notes, hami_pods, view, catalog))),
        hami_pods=len(hami_pods),
        our_pods=sum(_is_own(pod, mark) for pod in pods),
        taken_over=sum(pod.metadata.uid in mark.pods for pod in hami_pods),
        problems=tuple(problems),
    )


def _mark(notes: Mapping[str, str]) -> tuple[adoption.TakenOver, list[str]]:
    text = notes.get(annotations.TAKEN_OVER, "")
    if not text:
        return adoption.TakenOver(), []
    try:
        return adoption.decode_mark(text), []
    except WireInvalid as error:
        return adoption.TakenOver(), [str(error)]


def _side(node: _NodeView, sides: Sides) -> Side:
    labels = node.metadata.labels or {}
    if MOVING in (node.metadata.annotations or {}):
        return "moving"
    if labels.get(sides.label[0]) == sides.label[1]:
        return "hami"
    if _our_labels(labels):
        return "ours"
    # Nodes of other vendors' plugins often have a label of their own.
    notes = node.metadata.annotations or {}
    return "hami" if any(notes.get(word.register) for word in hamiformat.WORDS) else "none"


def _our_labels(labels: Mapping[str, str]) -> list[str]:
    vendors = [vendor.name for vendor in Catalog.from_settings().vendors]
    return [vendor for vendor in vendors if labels.get(OURS + vendor) == "true"]


def _is_of_hami(pod: PodView, catalog: Catalog, mark: adoption.TakenOver) -> bool:
    """Return whether the pod may hold devices that HAMi allocated."""
    if pod.is_finished() or not pod.spec.node_name:
        return False
    if pod.metadata.uid in mark.pods or _origin(pod) == "hami":
        return True
    is_marked = hamiformat.is_placed(pod.annotations()) or adoption.may_hold(pod, catalog)
    return is_marked and annotations.ALLOCATION not in pod.annotations()


def _is_own(pod: PodView, mark: adoption.TakenOver) -> bool:
    return (
        annotations.ALLOCATION in pod.annotations()
        and pod.metadata.uid not in mark.pods
        and _origin(pod) != "hami"
        and not pod.is_finished()
    )


def _origin(pod: PodView) -> str:
    """Return the origin in the pod's allocation, unverified."""
    return _allocation(pod).origin


def _is_divided(pod: PodView) -> bool:
    """Return whether a share of the pod is a hardware partition."""
    placement = _allocation(pod).placement
    containers = () if placement is None else placement.containers
    return any(share.profile for container in containers for share in container.shares)


def _allocation(pod: PodView) -> _Payload:
    try:
        return _allocation_decoder.decode(pod.annotations().get(annotations.ALLOCATION, "")).payload
    except UNDECODABLE:
        return _Payload()


def _registered(notes: Mapping[str, str], problems: list[str]) -> dict[str, list[Device]]:
    """The node's devices as HAMi's plugins register them."""
    found: dict[str, list[Device]] = {}
    for word in hamiformat.WORDS:
        if not notes.get(word.register, ""):
            continue
        try:
            listed = hamiformat.decode_register(notes[word.register], word)
        except WireInvalid as error:
            problems.append(str(error))
            continue
        found.setdefault(word.vendor, []).extend(
            Device(
                uuid=one.id,
                vendor=word.vendor,
                index=place if one.index is None else one.index,
                type=one.type,
                memory_mib=one.memory_mib,
                capacity_mib=one.memory_mib,
                capacity_core_pct=one.cores,
                slots=one.count,
            )
            for place, one in enumerate(listed)
        )
    return found


def _vendors(
    notes: Mapping[str, str],
    pods: Sequence[PodView],
    view: adoption.NodeView,
    catalog: Catalog,
) -> set[str]:
    found = set(view.devices)
    for pod in pods:
        for _, container in pod.containers_in_order():
            found |= {vendor.name for vendor in catalog.asked(container)}
    if "metax-tech.com/node-gpu-devices" in notes:
        found.add("metax")
    if "enflame.com/gcu-drs-capacity" in notes:
        found.add("enflame")
    return found


def _partitions(pod: PodView, read: adoption.Adopted, view: adoption.NodeView) -> list[str]:
    """List hardware partitions that HAMi created: the node agent cannot adopt them."""
    if pod.annotations().get(hamiformat.MIG, "").strip(" []"):
        return [
            "uses MIG instances that HAMi created; wait until it ends before migrating the node"
        ]
    sizes = {one.uuid: one.memory_mib for own in view.devices.values() for one in own}
    parts = sorted(
        {
            share.vendor
            for container in read.containers
            for share in container.shares
            if share.vendor != "nvidia"
            and is_divisible(share.vendor)
            and not share.exclusive
            and share.memory_mib < sizes.get(share.uuid, share.memory_mib + 1)
        }
    )
    return [
        f"may use a hardware partition of a {vendor} device; "
        "wait until it ends before migrating the node"
        for vendor in parts
    ]


class Mover:
    """Migrates one node."""

    def __init__(
        self, kube: KubeApi, node: str, sides: Sides, *, report: Callable[[str], None]
    ) -> None:
        """Call ``report`` at each step."""
        self._kube = kube
        self._node = node
        self._path = api_path("api", "v1", "nodes", node)
        self._sides = sides
        self._report = report

    async def migrate(self, *, vendor: str = "", accept: bool = False) -> NodeState:
        """Migrate the node from HAMi; ``Refused`` lists the blockers."""
        state = await self._state()
        if state.side == "ours":
            return await self._list_again(accept=accept)
        if state.problems and not accept:
            raise Refused(
                f"node {self._node} is not migrated:\n  "
                + "\n  ".join(state.problems)
                + "\nwait until these pods end, or give --accept to count each doubtful share as "
                "its maximum"
            )
        wanted = (vendor,) if vendor else state.vendors
        if not wanted:
            raise Refused(f"the vendor of node {self._node}'s devices is unknown; give --vendor")
        if len(wanted) > 1:
            raise Refused(
                f"node {self._node} has devices of {', '.join(wanted)}, and a node has one agent; "
                "select it with --vendor"
            )
        await self._leave([self._sides.label[0]])
        await self._until_gone(self._sides.plugin, "HAMi's device plugin")
        await self._until(self._is_settled, "pods to which HAMi is allocating devices")
        await self._patch(lambda node, pods: self._arrival(node, pods, wanted[0]))
        self._report(f"node {self._node}: migrated")
        return await self._state()

    async def _list_again(self, *, accept: bool) -> NodeState:
        """List missing pods of HAMi on a node that is already migrated."""
        if not (await self._state()).problems:
            raise Refused(f"node {self._node} is already migrated")
        if not accept:
            raise Refused(
                f"node {self._node} is migrated and runs pods of HAMi that it does not list; "
                "see hamictl migrate status; wait until they end, or give --accept to list them"
            )
        await self._patch(self._listed)
        return await self._state()

    def _listed(self, node: _NodeView, pods: Sequence[PodView]) -> dict[str, Any]:
        old, _ = _mark(node.metadata.annotations or {})
        catalog = Catalog.from_settings()
        uids = {pod.metadata.uid for pod in pods if _is_of_hami(pod, catalog, old)}
        mark = adoption.TakenOver(pods=tuple(sorted(uids)), devices=old.devices)
        return {"metadata": {"annotations": {annotations.TAKEN_OVER: adoption.encode_mark(mark)}}}

    async def roll_back(self, *, accept: bool) -> NodeState:
        """Return the node to HAMi; ``Refused`` lists the blockers."""
        state = await self._state()
        if state.side == "hami":
            raise Refused(f"node {self._node} already belongs to HAMi")
        if not accept:
            await self._require_mirrors()
        node = await self._read()
        await self._leave([OURS + one for one in _our_labels(node.metadata.labels or {})])
        await self._until_gone(AGENT, "the node agent")
        if not accept:
            await self._require_mirrors()
        await self._patch(lambda node, _: self._return(node))
        self._report(f"node {self._node}: rolled back to HAMi")
        return await self._state()

    async def _leave(self, labels: Sequence[str]) -> None:
        """Cordon the node and remove the old side's labels."""

        def change(node: _NodeView, _: Sequence[PodView]) -> dict[str, Any]:
            before = (node.metadata.annotations or {}).get(MOVING)
            state = before or ("cordoned" if node.spec.unschedulable else "open")
            return {
                "metadata": {
                    "labels": dict.fromkeys(labels),
                    "annotations": {MOVING: state},
                },
                "spec": {"unschedulable": True},
            }

        await self._patch(change)
        self._report(f"node {self._node}: cordoned")

    def _arrival(self, node: _NodeView, pods: Sequence[PodView], vendor: str) -> dict[str, Any]:
        """Record HAMi's pods and devices, remove its registration, add the agent's label."""
        notes = node.metadata.annotations or {}
        old, _ = _mark(notes)
        catalog = Catalog.from_settings()
        listed = _registered(notes, [])
        mark = adoption.TakenOver(
            pods=tuple(sorted(p.metadata.uid for p in pods if _is_of_hami(p, catalog, old))),
            devices={
                word: {device.uuid: device.index for device in devices}
                for word, devices in sorted(listed.items())
            }
            or old.devices,
        )
        gone = [key for word in hamiformat.WORDS for key in (word.register, word.handshake)]
        gone += ["hami.io/node-nvidia-score", *LOCKS]
        return {
            "metadata": {
                "labels": {OURS + vendor: "true"},
                "annotations": {
                    **{key: None for key in gone if key in notes},
                    annotations.TAKEN_OVER: adoption.encode_mark(mark),
                    MOVING: None,
                },
            },
            "spec": {"unschedulable": True if notes.get(MOVING) == "cordoned" else None},
        }

    def _return(self, node: _NodeView) -> dict[str, Any]:
        notes = node.metadata.annotations or {}
        key, value = self._sides.label
        gone = [key for word in hamiformat.WORDS for key in (word.register, word.handshake)]
        return {
            "metadata": {
                "labels": {key: value},
                "annotations": {
                    # Mirrors of the devices, if any: HAMi's plugin writes its own.
                    **{one: None for one in gone if one in notes},
                    annotations.TAKEN_OVER: None,
                    MOVING: None,
                },
            },
            "spec": {"unschedulable": True if notes.get(MOVING) == "cordoned" else None},
        }

    # --- waiting ---------------------------------------------------------------------------------

    async def _require_mirrors(self) -> None:
        """Raise ``Refused`` unless HAMi will count every remaining pod."""
        node = await self._read()
        mark, _ = _mark(node.metadata.annotations or {})
        lacking = [
            f"{pod.metadata.namespace}/{pod.metadata.name}"
            for pod in await self._pods()
            if _is_own(pod, mark)
            and not (
                hamiformat.is_placed(pod.annotations())
                and pod.annotations().get(hamiformat.NODE) == self._node
            )
        ]
        divided = [
            f"{pod.metadata.namespace}/{pod.metadata.name}"
            for pod in await self._pods()
            if _is_own(pod, mark) and _is_divided(pod)
        ]
        if divided:
            raise Refused(
                f"{len(divided)} pods on node {self._node} use hardware partitions, which HAMi's "
                f"plugins remove: {', '.join(sorted(divided)[:5])}; wait until they end"
            )
        if lacking:
            raise Refused(
                f"{len(lacking)} pods on node {self._node} would not be counted by HAMi: "
                f"{', '.join(sorted(lacking)[:5])}; set mirror_pods = true in the scheduler's "
                "settings (component hami-mirrors) and wait, or wait until they end"
            )

    async def _is_settled(self) -> bool:
        catalog = Catalog.from_settings()
        mark, _ = _mark((await self._read()).metadata.annotations or {})
        return not any(
            _is_of_hami(pod, catalog, mark)
            and pod.annotations().get(hamiformat.BIND_PHASE) == hamiformat.BINDING
            and not pod.status.container_statuses
            for pod in await self._pods()
        )

    async def _until_gone(self, label: tuple[str, str], what: str) -> None:
        async def is_gone() -> bool:
            pods = await self._pods()
            return not any(pod.labels().get(label[0]) == label[1] for pod in pods)

        await self._until(is_gone, what)

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        with anyio.move_on_after(self._sides.wait_s):
            while not await holds():
                self._report(f"node {self._node}: waiting for {what}")
                await anyio.sleep(POLL_S)
            return
        raise Unreachable(
            f"node {self._node}: timed out after {self._sides.wait_s:g} s waiting for {what}; "
            "repeat the command to resume, or run the opposite one to undo it"
        )

    # --- the API ---------------------------------------------------------------------------------

    async def _state(self) -> NodeState:
        return state_of(await self._read(), await self._pods(), self._sides)

    async def _read(self) -> _NodeView:
        return _node_decoder.decode(await self._kube.get(self._path))

    async def _pods(self) -> list[PodView]:
        pages = await self._kube.list_pages(
            "/api/v1/pods", field_selector=f"spec.nodeName={self._node}", page_size=PAGE
        )
        return [pod for page in pages for pod in _pods_decoder.decode(page).items]

    async def _patch(
        self, change: Callable[[_NodeView, Sequence[PodView]], dict[str, Any]]
    ) -> None:
        """Patch the node, on condition of its resourceVersion; retry on a conflict."""
        for _ in range(TRIES):
            pods = await self._pods()
            node = await self._read()
            patch = change(node, pods)
            patch["metadata"]["resourceVersion"] = node.metadata.resource_version
            try:
                await self._kube.patch(self._path, json.dumps(patch).encode())
            except Conflict:
                continue
            return
        raise Unavailable(peer="API server", detail=f"node {self._node} kept changing; retry")
