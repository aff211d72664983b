# SPDX-License-Identifier: Apache-2.0
"""Migrates nodes from HAMi or Volcano, or rolls them back, one at a time, while pods run.

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
from hami_common.compat.origins import HAMI, ORIGINS, Origin, title_of
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

Side = Literal["hami", "volcano", "moving", "ours", "none"]

MOVING: Final = "hami.io/moving"
"""Annotation of a node during a migration: ``cordoned`` or ``open``, its state before."""
OURS: Final = "hami.io/"
"""Prefix of the labels ``hami.io/<vendor>=true`` that select a node agent."""
AGENT: Final = ("app.kubernetes.io/name", "hami-nodeagent")
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
    """The system from which nodes migrate, and the labels that identify its nodes and plugin."""

    origin: Origin = HAMI
    label: tuple[str, str] = ("gpu", "on")
    """Label of nodes on which its device plugin runs."""
    plugin: tuple[str, str] = ("app.kubernetes.io/component", "hami-device-plugin")
    """Label of that plugin's pods."""
    wait_s: float = 120.0

    @property
    def title(self) -> str:
        """Return the name of the system in messages."""
        return self.origin.title


class NodeState(Struct, frozen=True, kw_only=True):
    """A node's side and its pods."""

    node: str
    side: Side
    vendors: tuple[str, ...] = ()
    former_pods: int = 0
    """Pods that the other system placed and that may run."""
    our_pods: int = 0
    taken_over: int = 0
    """Pods of ``former_pods`` that the node lists, so that their shares are booked."""
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
    return NodeStates(items=tuple(one for one in found if one.side != "none" or one.former_pods))


def state_of(node: _NodeView, pods: Sequence[PodView], sides: Sides) -> NodeState:
    """Return the state of one node."""
    name, notes = node.metadata.name, node.metadata.annotations or {}
    origin = sides.origin
    mark, problems = _mark(notes, origin)
    former_pods = [pod for pod in pods if _is_of(origin, pod, mark)]
    view = adoption.NodeView(name=name, devices=_registered(notes, problems, origin), mark=mark)
    for pod in former_pods:
        title = f"{pod.metadata.namespace}/{pod.metadata.name}"
        read = adoption.read(pod, view, origin.catalog)
        problems += [f"{title}: {problem}" for problem in read.problems]
        problems += [f"{title}: {text}" for text in _partitions(pod, read, view, origin)]
    side = _side(node, sides)
    if side == "ours":
        problems += [
            f"{pod.metadata.namespace}/{pod.metadata.name}: was placed by {origin.title} and is "
            "not taken over, so no devices are allocated on the node"
            for pod in former_pods
            if pod.metadata.uid not in mark.pods
            and not _origin(pod)
            and origin.is_placed(pod.annotations())
        ]
    elif side == origin.name:
        problems += _unselected(node, pods, sides)
    return NodeState(
        node=name,
        side=side,
        vendors=tuple(sorted(_vendors(notes, former_pods, view, origin.catalog))),
        former_pods=len(former_pods),
        our_pods=sum(_is_own(pod, mark) for pod in pods),
        taken_over=sum(pod.metadata.uid in mark.pods for pod in former_pods),
        problems=tuple(problems),
    )


def _mark(notes: Mapping[str, str], origin: Origin) -> tuple[adoption.TakenOver, list[str]]:
    """Return the node's mark; an empty one of ``origin`` if there is none."""
    nothing = adoption.TakenOver(origin=origin.name)
    text = notes.get(annotations.TAKEN_OVER, "")
    if not text:
        return nothing, []
    try:
        return adoption.decode_mark(text), []
    except WireInvalid as error:
        return nothing, [str(error)]


def _unselected(node: _NodeView, pods: Sequence[PodView], sides: Sides) -> list[str]:
    """Name a pod of the plugin's that would stay although the node's label is removed."""
    key, value = sides.label
    if (node.metadata.labels or {}).get(key) == value:
        return []
    return [
        f"{pod.metadata.namespace}/{pod.metadata.name}: is {sides.title}'s device plugin, but the "
        f"node does not have the label {key}={value}; let the nodeSelector of its DaemonSet select "
        "nodes by one label, and give that label with --node-label"
        for pod in pods
        if pod.labels().get(sides.plugin[0]) == sides.plugin[1]
    ]


def _side(node: _NodeView, sides: Sides) -> Side:
    labels = node.metadata.labels or {}
    if MOVING in (node.metadata.annotations or {}):
        return "moving"
    if labels.get(sides.label[0]) == sides.label[1]:
        return sides.origin.name
    if _our_labels(labels):
        return "ours"
    # Nodes of other vendors' plugins often have a label of their own.
    notes = node.metadata.annotations or {}
    return sides.origin.name if sides.origin.registers(notes) else "none"


def _our_labels(labels: Mapping[str, str]) -> list[str]:
    vendors = [vendor.name for vendor in Catalog.from_settings().vendors]
    return [vendor for vendor in vendors if labels.get(OURS + vendor) == "true"]


def _is_of(origin: Origin, pod: PodView, mark: adoption.TakenOver) -> bool:
    """Return whether the pod may hold devices that the other system allocated."""
    if pod.is_finished() or not pod.spec.node_name:
        return False
    if pod.metadata.uid in mark.pods or _origin(pod) == origin.name:
        return True
    is_marked = origin.is_placed(pod.annotations()) or adoption.may_hold(pod, origin.catalog)
    return is_marked and annotations.ALLOCATION not in pod.annotations()


def _is_own(pod: PodView, mark: adoption.TakenOver) -> bool:
    return (
        annotations.ALLOCATION in pod.annotations()
        and pod.metadata.uid not in mark.pods
        and not _origin(pod)
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


def _registered(
    notes: Mapping[str, str], problems: list[str], origin: Origin
) -> dict[str, list[Device]]:
    """The node's devices as the other system's plugins register them."""
    found: dict[str, list[Device]] = {}
    if not origin.registers(notes):
        return found
    for word in origin.words:
        if not notes.get(word.register, ""):
            continue
        try:
            listed = origin.decode_register(notes[word.register], word)
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


def _partitions(
    pod: PodView, read: adoption.Adopted, view: adoption.NodeView, origin: Origin
) -> list[str]:
    """List hardware partitions of the other system: the node agent cannot adopt them."""
    if origin.uses_mig(pod.annotations()):
        return [
            f"uses MIG instances of {origin.title}; wait until it ends before migrating the node"
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
        """Migrate the node to this project; ``Refused`` lists the blockers."""
        await self._require_origin()
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
        title = self._sides.title
        await self._until_gone(self._sides.plugin, f"{title}'s device plugin")
        await self._until(self._is_settled, f"pods to which {title} is allocating devices")
        await self._patch(lambda node, pods: self._arrival(node, pods, wanted[0]))
        self._report(f"node {self._node}: migrated")
        return await self._state()

    async def _list_again(self, *, accept: bool) -> NodeState:
        """List missing pods of the other system on a node that is already migrated."""
        if not (await self._state()).problems:
            raise Refused(f"node {self._node} is already migrated")
        if not accept:
            raise Refused(
                f"node {self._node} is migrated and runs pods of {self._sides.title} that it does "
                "not list; "
                "see hamictl migrate status; wait until they end, or give --accept to list them"
            )
        await self._patch(self._listed)
        return await self._state()

    def _listed(self, node: _NodeView, pods: Sequence[PodView]) -> dict[str, Any]:
        origin = self._sides.origin
        old, _ = _mark(node.metadata.annotations or {}, origin)
        uids = {pod.metadata.uid for pod in pods if _is_of(origin, pod, old)}
        mark = msgspec.structs.replace(old, pods=tuple(sorted(uids)))
        return {"metadata": {"annotations": {annotations.TAKEN_OVER: adoption.encode_mark(mark)}}}

    async def roll_back(self, *, accept: bool) -> NodeState:
        """Return the node to the other system; ``Refused`` lists the blockers."""
        await self._require_origin()
        state = await self._state()
        if state.side == self._sides.origin.name:
            raise Refused(f"node {self._node} already belongs to {self._sides.title}")
        if not accept:
            await self._require_mirrors()
        node = await self._read()
        await self._leave([OURS + one for one in _our_labels(node.metadata.labels or {})])
        await self._until_gone(AGENT, "the node agent")
        if not accept:
            await self._require_mirrors()
        await self._withdraw_amounts()
        await self._patch(lambda node, _: self._return(node))
        self._report(f"node {self._node}: rolled back to {self._sides.title}")
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
        """Record the other system's pods and devices, remove its registration, add our label."""
        notes = node.metadata.annotations or {}
        origin = self._sides.origin
        old, _ = _mark(notes, origin)
        listed = _registered(notes, [], origin)
        mark = adoption.TakenOver(
            origin=origin.name,
            pods=tuple(sorted(p.metadata.uid for p in pods if _is_of(origin, p, old))),
            devices={
                word: {device.uuid: device.index for device in devices}
                for word, devices in sorted(listed.items())
            }
            or old.devices,
        )
        return {
            "metadata": {
                "labels": {OURS + vendor: "true"},
                "annotations": {
                    **{key: None for key in origin.node_keys if key in notes},
                    annotations.TAKEN_OVER: adoption.encode_mark(mark),
                    MOVING: None,
                },
            },
            "spec": {"unschedulable": True if notes.get(MOVING) == "cordoned" else None},
        }

    def _return(self, node: _NodeView) -> dict[str, Any]:
        notes = node.metadata.annotations or {}
        key, value = self._sides.label
        gone = {one for origin in ORIGINS.values() for one in origin.node_keys}
        return {
            "metadata": {
                "labels": {key: value},
                "annotations": {
                    # The agent's, and mirrors: the other system's plugin writes its own.
                    **{one: None for one in sorted(gone) if one in notes},
                    annotations.TAKEN_OVER: None,
                    MOVING: None,
                },
            },
            "spec": {"unschedulable": True if notes.get(MOVING) == "cordoned" else None},
        }

    # --- waiting ---------------------------------------------------------------------------------

    async def _require_mirrors(self) -> None:
        """Raise ``Refused`` unless the other system will count every remaining pod."""
        node, origin = await self._read(), self._sides.origin
        mark, _ = _mark(node.metadata.annotations or {}, origin)
        lacking = [
            f"{pod.metadata.namespace}/{pod.metadata.name}"
            for pod in await self._pods()
            if _is_own(pod, mark)
            and not (
                origin.is_placed(pod.annotations())
                and pod.annotations().get(origin.node) == self._node
            )
        ]
        divided = [
            f"{pod.metadata.namespace}/{pod.metadata.name}"
            for pod in await self._pods()
            if _is_own(pod, mark) and _is_divided(pod)
        ]
        if divided:
            raise Refused(
                f"{len(divided)} pods on node {self._node} use hardware partitions, which "
                f"{origin.title}'s plugins remove: {', '.join(sorted(divided)[:5])}; wait until "
                "they end"
            )
        if lacking:
            raise Refused(
                f"{len(lacking)} pods on node {self._node} would not be counted by {origin.title}: "
                f"{', '.join(sorted(lacking)[:5])}; {origin.mirrored_by} and wait, or wait until "
                "they end"
            )

    async def _is_settled(self) -> bool:
        origin = self._sides.origin
        mark, _ = _mark((await self._read()).metadata.annotations or {}, origin)
        return not any(
            _is_of(origin, pod, mark)
            and pod.annotations().get(origin.phase) == hamiformat.BINDING
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

    async def _require_origin(self) -> None:
        """Raise ``Refused`` if the node came over from another system than the given one."""
        notes = (await self._read()).metadata.annotations or {}
        mark, _ = _mark(notes, self._sides.origin)
        if mark.origin != self._sides.origin.name:
            raise Refused(
                f"node {self._node} came over from {title_of(mark.origin)}; give --from "
                f"{mark.origin}"
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

    async def _withdraw_amounts(self) -> None:
        """Remove the resources that the agent advertised in the node's status."""
        notes = (await self._read()).metadata.annotations or {}
        listed = {
            key: text
            for key, text in notes.items()
            if key.startswith(annotations.ADVERTISED_AMOUNTS)
        }
        if not listed:
            return
        names = dict.fromkeys(name for text in listed.values() for name in text.split(",") if name)
        patch = {
            "metadata": {"annotations": dict.fromkeys(listed)},
            "status": {"capacity": names, "allocatable": names},
        }
        await self._kube.patch(f"{self._path}/status", json.dumps(patch).encode())

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
