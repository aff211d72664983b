# SPDX-License-Identifier: Apache-2.0
"""Moves nodes from HAMi to us and back, one at a time, while their pods go on.

A node belongs to one side at a time: its labels say whose device plugin runs there, and only that
side offers it. A move takes three steps, each one patch of the node, and can be cut off and called
again between any two: the node takes no new pods and the side that leaves loses its label; when its
plugin is gone, what it leaves behind is written down (pods, names of devices) and its registration
is removed; the other side gets its label and the node takes pods again.

Seconds throughout.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal

import anyio
import click
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
from hamictl import kube as kubeapi
from hamictl import output
from hamictl.errors import InputRefused, Refused, Unreachable
from hamictl.options import format_option

Side = Literal["hami", "moving", "ours", "none"]

MOVING: Final = "hami.io/moving"
"""Annotation of a node between two sides: whether it took pods before."""
OURS: Final = "hami.io/"
"""Our labels are ``hami.io/<vendor>=true``."""
AGENT: Final = ("app.kubernetes.io/name", "hami-nodeagent")
HAMI_LABEL: Final = "gpu=on"
HAMI_PLUGIN: Final = "app.kubernetes.io/component=hami-device-plugin"
LOCKS: Final = ("hami.io/mutex.lock", "cambricon.com/dsmlu.lock")
TRIES: Final = 5
LOOK_S: Final = 0.5
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


class Ways(Struct, frozen=True, kw_only=True):
    """How the two sides are told apart."""

    label: tuple[str, str] = ("gpu", "on")
    """Label of nodes on which HAMi's plugin runs."""
    plugin: tuple[str, str] = ("app.kubernetes.io/component", "hami-device-plugin")
    """Label of that plugin's pods."""
    wait_s: float = 120.0


class Standing(Struct, frozen=True, kw_only=True):
    """Where a node stands."""

    node: str
    side: Side
    vendors: tuple[str, ...] = ()
    hami_pods: int = 0
    """Pods that HAMi placed and that may run."""
    our_pods: int = 0
    taken_over: int = 0
    """Of ``hami_pods``: listed on the node, so that they count with us."""
    problems: tuple[str, ...] = ()
    """What is in doubt, or stands in the way of a move."""


class Standings(Struct, frozen=True, kw_only=True):
    """All nodes with devices."""

    items: tuple[Standing, ...]


# --- looking --------------------------------------------------------------------------------------


async def survey(kube: KubeApi, ways: Ways) -> Standings:
    """Every node on which either side has something."""
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
        standing_of(node, pods_by_node.get(node.metadata.name, []), ways)
        for node in sorted(nodes, key=lambda one: one.metadata.name)
    ]
    return Standings(items=tuple(one for one in found if one.side != "none" or one.hami_pods))


def standing_of(node: _NodeView, pods: Sequence[PodView], ways: Ways) -> Standing:
    """Where one node stands."""
    name, notes = node.metadata.name, node.metadata.annotations or {}
    mark, problems = _mark(notes)
    catalog = Catalog.from_settings()
    theirs = [pod for pod in pods if _is_hamis(pod, catalog, mark)]
    view = adoption.NodeView(name=name, devices=_registered(notes, problems), mark=mark)
    for pod in theirs:
        title = f"{pod.metadata.namespace}/{pod.metadata.name}"
        read = adoption.read(pod, view, catalog)
        problems += [f"{title}: {problem}" for problem in read.problems]
        problems += [f"{title}: {text}" for text in _partitions(pod, read, view)]
    side = _side(node, ways)
    if side == "ours":
        problems += [
            f"{pod.metadata.namespace}/{pod.metadata.name}: was placed by HAMi and is not taken "
            "over, so nothing is given on the node"
            for pod in theirs
            if pod.metadata.uid not in mark.pods
            and not _origin(pod)
            and hamiformat.is_placed(pod.annotations())
        ]
    return Standing(
        node=name,
        side=side,
        vendors=tuple(sorted(_vendors(notes, theirs, view, catalog))),
        hami_pods=len(theirs),
        our_pods=sum(_is_ours(pod, mark) for pod in pods),
        taken_over=sum(pod.metadata.uid in mark.pods for pod in theirs),
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


def _side(node: _NodeView, ways: Ways) -> Side:
    labels = node.metadata.labels or {}
    if MOVING in (node.metadata.annotations or {}):
        return "moving"
    if labels.get(ways.label[0]) == ways.label[1]:
        return "hami"
    return "ours" if _our_labels(labels) else "none"


def _our_labels(labels: Mapping[str, str]) -> list[str]:
    vendors = [vendor.name for vendor in Catalog.from_settings().vendors]
    return [vendor for vendor in vendors if labels.get(OURS + vendor) == "true"]


def _is_hamis(pod: PodView, catalog: Catalog, mark: adoption.TakenOver) -> bool:
    """Whether the pod may hold devices that HAMi gave it."""
    if pod.is_finished() or not pod.spec.node_name:
        return False
    if pod.metadata.uid in mark.pods or _origin(pod) == "hami":
        return True
    is_marked = hamiformat.is_placed(pod.annotations()) or adoption.may_hold(pod, catalog)
    return is_marked and annotations.ALLOCATION not in pod.annotations()


def _is_ours(pod: PodView, mark: adoption.TakenOver) -> bool:
    return (
        annotations.ALLOCATION in pod.annotations()
        and pod.metadata.uid not in mark.pods
        and _origin(pod) != "hami"
        and not pod.is_finished()
    )


def _origin(pod: PodView) -> str:
    """Who placed the pod, by an allocation of ours that nobody verifies here."""
    return _allocation(pod).origin


def _is_divided(pod: PodView) -> bool:
    """Whether a share of the pod is a hardware partition of ours."""
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
    """What of the pod is carried by hardware that HAMi's side divided: our agent makes its own."""
    if pod.annotations().get(hamiformat.MIG, "").strip(" []"):
        return ["holds MIG instances that HAMi made; let it end before the node moves"]
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
        f"may hold a part of a {vendor} device that was divided in hardware; "
        "let it end before the node moves"
        for vendor in parts
    ]


# --- moving ---------------------------------------------------------------------------------------


class Mover:
    """Moves one node."""

    def __init__(
        self, kube: KubeApi, node: str, ways: Ways, *, tell: Callable[[str], None]
    ) -> None:
        """Tell of each step."""
        self._kube = kube
        self._node = node
        self._path = api_path("api", "v1", "nodes", node)
        self._ways = ways
        self._tell = tell

    async def take(self, *, vendor: str = "", accept: bool = False) -> Standing:
        """Bring the node from HAMi to us; ``Refused`` says what stands in the way."""
        standing = await self._standing()
        if standing.side == "ours":
            return await self._list_again(accept=accept)
        if standing.problems and not accept:
            raise Refused(
                f"node {self._node} is not moved:\n  "
                + "\n  ".join(standing.problems)
                + "\nlet these pods end first, or give --accept: doubtful shares then count as the "
                "largest that they may be"
            )
        wanted = (vendor,) if vendor else standing.vendors
        if not wanted:
            raise Refused(f"nothing says which devices node {self._node} has; give --vendor")
        if len(wanted) > 1:
            raise Refused(
                f"node {self._node} has devices of {', '.join(wanted)}, and a node has one agent; "
                "give one of them as --vendor"
            )
        await self._leave([self._ways.label[0]])
        await self._until_gone(self._ways.plugin, "HAMi's device plugin")
        await self._until(self._is_settled, "pods that HAMi is giving devices to")
        await self._patch(lambda node, pods: self._arrival(node, pods, wanted[0]))
        self._tell(f"node {self._node}: ours")
        return await self._standing()

    async def _list_again(self, *, accept: bool) -> Standing:
        """The node is ours: write down pods of HAMi's that its list lacks."""
        if not (await self._standing()).problems:
            raise Refused(f"node {self._node} is ours already")
        if not accept:
            raise Refused(
                f"node {self._node} is ours, and runs pods of HAMi's that are not on its list; "
                "see hamictl migrate status; let them end, or give --accept to put them on it"
            )
        await self._patch(self._listed)
        return await self._standing()

    def _listed(self, node: _NodeView, pods: Sequence[PodView]) -> dict[str, Any]:
        old, _ = _mark(node.metadata.annotations or {})
        catalog = Catalog.from_settings()
        uids = {pod.metadata.uid for pod in pods if _is_hamis(pod, catalog, old)}
        mark = adoption.TakenOver(pods=tuple(sorted(uids)), devices=old.devices)
        return {"metadata": {"annotations": {annotations.TAKEN_OVER: adoption.encode_mark(mark)}}}

    async def give_back(self, *, accept: bool) -> Standing:
        """Bring the node back to HAMi; ``Refused`` says what stands in the way."""
        standing = await self._standing()
        if standing.side == "hami":
            raise Refused(f"node {self._node} is HAMi's already")
        if not accept:
            await self._require_mirrors()
        node = await self._read()
        await self._leave([OURS + one for one in _our_labels(node.metadata.labels or {})])
        await self._until_gone(AGENT, "our agent")
        if not accept:
            await self._require_mirrors()
        await self._patch(lambda node, _: self._return(node))
        self._tell(f"node {self._node}: HAMi's")
        return await self._standing()

    async def _leave(self, labels: Sequence[str]) -> None:
        """No new pods, and no plugin of the side that leaves."""

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
        self._tell(f"node {self._node}: takes no new pods")

    def _arrival(self, node: _NodeView, pods: Sequence[PodView], vendor: str) -> dict[str, Any]:
        """The node is ours: what HAMi leaves is written down, what it registered is removed."""
        notes = node.metadata.annotations or {}
        old, _ = _mark(notes)
        catalog = Catalog.from_settings()
        listed = _registered(notes, [])
        mark = adoption.TakenOver(
            pods=tuple(sorted(p.metadata.uid for p in pods if _is_hamis(p, catalog, old))),
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
        key, value = self._ways.label
        gone = [key for word in hamiformat.WORDS for key in (word.register, word.handshake)]
        return {
            "metadata": {
                "labels": {key: value},
                "annotations": {
                    # Our mirrors of the devices, if any: HAMi's plugin writes its own.
                    **{one: None for one in gone if one in notes},
                    annotations.TAKEN_OVER: None,
                    MOVING: None,
                },
            },
            "spec": {"unschedulable": True if notes.get(MOVING) == "cordoned" else None},
        }

    # --- waiting ---------------------------------------------------------------------------------

    async def _require_mirrors(self) -> None:
        """``Refused`` unless HAMi will count every pod of ours that stays."""
        node = await self._read()
        mark, _ = _mark(node.metadata.annotations or {})
        lacking = [
            f"{pod.metadata.namespace}/{pod.metadata.name}"
            for pod in await self._pods()
            if _is_ours(pod, mark)
            and not (
                hamiformat.is_placed(pod.annotations())
                and pod.annotations().get(hamiformat.NODE) == self._node
            )
        ]
        divided = [
            f"{pod.metadata.namespace}/{pod.metadata.name}"
            for pod in await self._pods()
            if _is_ours(pod, mark) and _is_divided(pod)
        ]
        if divided:
            raise Refused(
                f"{len(divided)} pods of ours on node {self._node} use hardware partitions, which "
                f"HAMi's plugins remove: {', '.join(sorted(divided)[:5])}; let them end first"
            )
        if lacking:
            raise Refused(
                f"{len(lacking)} pods of ours on node {self._node} would not be counted by HAMi: "
                f"{', '.join(sorted(lacking)[:5])}; set mirror_pods = true in the scheduler's "
                "settings (component hami-mirrors) and wait, or let them end"
            )

    async def _is_settled(self) -> bool:
        catalog = Catalog.from_settings()
        mark, _ = _mark((await self._read()).metadata.annotations or {})
        return not any(
            _is_hamis(pod, catalog, mark)
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
        with anyio.move_on_after(self._ways.wait_s):
            while not await holds():
                self._tell(f"node {self._node}: waiting for {what}")
                await anyio.sleep(LOOK_S)
            return
        raise Unreachable(
            f"node {self._node}: waited {self._ways.wait_s:g} s for {what}; call the command again "
            "to go on, or the opposite one to go back"
        )

    # --- the API ---------------------------------------------------------------------------------

    async def _standing(self) -> Standing:
        return standing_of(await self._read(), await self._pods(), self._ways)

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
        """One patch, on condition that nobody changed the node since it was read."""
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
        raise Unavailable(peer="API server", detail=f"node {self._node} kept changing; try again")


# --- commands -------------------------------------------------------------------------------------


@click.group(name="migrate")
def migrate_command() -> None:
    """Move nodes from HAMi to us, and back, while their pods go on."""


_label_option = click.option(
    "--hami-label", default=HAMI_LABEL, show_default=True, help="Label of HAMi's nodes."
)
_plugin_option = click.option(
    "--hami-plugin",
    default=HAMI_PLUGIN,
    show_default=True,
    help="Label of the pods of the device plugin that HAMi's nodes run.",
)
_wait_option = click.option(
    "--wait", "wait_s", default=120.0, show_default=True, help="Longest wait of a step, in seconds."
)


@migrate_command.command(name="plan")
@_label_option
@kubeapi.option
@format_option
def plan_command(hami_label: str, kubeconfig: str, format_: str) -> None:
    """Which nodes can be moved, and what stands in the way."""
    found = _survey(kubeconfig, hami_label)
    items = tuple(one for one in found.items if one.side in ("hami", "moving"))
    _show(Standings(items=items), format_, empty="No node is HAMi's.")


@migrate_command.command(name="status")
@_label_option
@kubeapi.option
@format_option
def status_command(hami_label: str, kubeconfig: str, format_: str) -> None:
    """Whose each node is, and whose pods run there."""
    _show(_survey(kubeconfig, hami_label), format_, empty="No node has a device.")


@migrate_command.command(name="node")
@click.argument("name")
@click.option(
    "--vendor", "vendors", multiple=True, help="Whose agent the node gets; several times."
)
@click.option("--accept", is_flag=True, help="Although shares are in doubt.")
@_label_option
@_plugin_option
@_wait_option
@kubeapi.option
def node_command(  # noqa: PLR0917 - click passes them by name
    name: str,
    vendor: str,
    accept: bool,  # noqa: FBT001 - click passes flags so
    hami_label: str,
    hami_plugin: str,
    wait_s: float,
    kubeconfig: str,
) -> None:
    """Bring a node from HAMi to us."""
    known = [one.name for one in Catalog.from_settings().vendors]
    if vendor and vendor not in known:
        raise InputRefused(f"--vendor {vendor}: give one of {', '.join(known)}")
    ways = parse_ways(hami_label, hami_plugin, wait_s)

    async def work(kube: KubeApi) -> Standing:
        mover = Mover(kube, name, ways, tell=_progress())
        return await mover.take(vendor=vendor, accept=accept)

    _done(kubeapi.with_kube(kubeconfig, work))


@migrate_command.command(name="rollback")
@click.argument("name")
@click.option("--accept", is_flag=True, help="Although HAMi does not count all pods of ours.")
@_label_option
@_plugin_option
@_wait_option
@kubeapi.option
def rollback_command(  # noqa: PLR0917 - click passes them by name
    name: str,
    accept: bool,  # noqa: FBT001 - click passes flags so
    hami_label: str,
    hami_plugin: str,
    wait_s: float,
    kubeconfig: str,
) -> None:
    """Bring a node back to HAMi."""
    ways = parse_ways(hami_label, hami_plugin, wait_s)

    async def work(kube: KubeApi) -> Standing:
        return await Mover(kube, name, ways, tell=_progress()).give_back(accept=accept)

    _done(kubeapi.with_kube(kubeconfig, work))


def _survey(kubeconfig: str, hami_label: str) -> Standings:
    ways = parse_ways(hami_label, HAMI_PLUGIN, 0.0)
    return kubeapi.with_kube(kubeconfig, lambda kube: survey(kube, ways))


def parse_ways(label: str, plugin: str, wait_s: float) -> Ways:
    """How the sides are told apart, from options; ``InputRefused`` where one is no label."""
    pairs = []
    for option, text in (("--hami-label", label), ("--hami-plugin", plugin)):
        key, separator, value = text.partition("=")
        if not (key and separator and value):
            raise InputRefused(f"{option} {text}: write KEY=VALUE")
        pairs.append((key, value))
    return Ways(label=pairs[0], plugin=pairs[1], wait_s=wait_s)


def _progress() -> Callable[[str], None]:
    told: set[str] = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            click.echo(text)

    return tell


def _done(standing: Standing) -> None:
    click.echo(
        f"{standing.hami_pods} pods of HAMi's ({standing.taken_over} taken over) and "
        f"{standing.our_pods} of ours run there"
    )


def _show(found: Standings, format_: str, *, empty: str) -> None:
    if format_ in ("json", "yaml"):
        output.show(found, format_)
        return
    headings = ["NODE", "SIDE", "VENDORS", "HAMI PODS", "TAKEN OVER", "OUR PODS", "IN THE WAY"]
    rows = [
        [
            one.node,
            one.side,
            ",".join(one.vendors) or "-",
            one.hami_pods,
            one.taken_over,
            one.our_pods,
            len(one.problems) or "-",
        ]
        for one in found.items
    ]
    output.table(headings, rows, empty=empty)
    for one in found.items:
        for problem in one.problems:
            click.echo(f"{one.node}: {problem}")
