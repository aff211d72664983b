# SPDX-License-Identifier: Apache-2.0
"""Finds the least number of new nodes with which no pod waits for devices.

Every number from a lower bound on is tried with ``whatif.simulate``, so the answer is what the
scheduler itself would do with that many nodes more; placements are greedy, and a number may fail
although a smaller one succeeds. The lower bound compares sums, which are necessary and never
sufficient. Pods that no number of these nodes helps are reported and do not count: a quota refuses
them, kube-scheduler excludes such a node, or even an empty one is too small for them. CPU, memory,
ports and volumes of nodes are not considered. Memory in MiB.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.bounds import (
    OBJECT_LIST_MOST,
    VENDORS_MOST,
    Label,
    MapKey,
    Name,
    Word,
)
from hami_common.errors import RequestInvalid
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device, Link
from hami_common.model.request import DeviceRequest, DeviceSelector, PodRequest, wants_parts
from hami_core.ledger.ledger import Ledger
from hami_core.placement.verdicts import Verdicts
from hami_core.planning.eligible import Document, exclusion
from hami_core.planning.whatif import (
    NONE_EXCLUDED,
    Excluded,
    Governed,
    Outcome,
    simulate,
)
from hami_core.quota.resourcequota import NOBODY_SPECIAL
from hami_core.quota.verdicts import QuotaVerdicts
from hami_core.table.table import DeviceTable

NODES_MOST: Final = 1000
"""Largest number of added nodes."""
HOST_LABEL: Final = "kubernetes.io/hostname"
OWN_TAINTS: Final = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Taints of a node's condition, which a new node loses when it is ready."""
_NAME_BYTES: Final = 200
_SIZES_MOST: Final = 32
"""Sizes of shares of one vendor that the lower bound considers."""

Fresh = Callable[[], tuple[Ledger, Governed]]
"""Returns a copy of the present state, which the caller may modify."""


class Taint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One taint, as in core/v1."""

    key: MapKey
    value: Label = ""
    effect: Word


class NodeTemplate(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A node that a pool would add."""

    name: Name
    devices: Annotated[tuple[NodeDevices, ...], Meta(max_length=VENDORS_MOST)] = ()
    """Devices by vendor."""
    labels: Annotated[dict[MapKey, Label], Meta(max_length=OBJECT_LIST_MOST)] = {}
    taints: Annotated[tuple[Taint, ...], Meta(max_length=OBJECT_LIST_MOST)] = ()

    def require_usable(self) -> None:
        """Raise ``RequestInvalid`` for a template without devices or with one vendor twice."""
        if not any(one.devices for one in self.devices):
            raise RequestInvalid(
                field="template.devices", problem="is empty", fix="name a node that has devices"
            )
        if len({one.vendor for one in self.devices}) < len(self.devices):
            raise RequestInvalid(
                field="template.devices",
                problem="names a vendor twice",
                fix="write one entry for each vendor",
            )

    def names(self, count: int) -> list[str]:
        """Return the names of ``count`` added nodes."""
        return [f"{self.name[:_NAME_BYTES]}-added-{number}" for number in range(1, count + 1)]

    def inventories(self, node: str) -> Iterator[NodeDevices]:
        """Yield the devices of an added node, with UUIDs of its own."""
        for known in self.devices:
            own = {
                device.uuid: f"{node}-{known.vendor}-{number}"
                for number, device in enumerate(known.devices)
            }
            yield replace(
                known,
                node=node,
                devices=tuple(replace(one, uuid=own[one.uuid]) for one in known.devices),
                links=tuple(
                    Link(a=own[link.a], b=own[link.b], score=link.score)
                    for link in known.links
                    if link.a in own and link.b in own
                ),
            )

    def document(self) -> Document:
        """Return what kube-scheduler would see of an added node."""
        taints = [{"key": t.key, "value": t.value, "effect": t.effect} for t in self.taints]
        return {
            "metadata": {"name": self.names(1)[0], "labels": dict(self.labels)},
            "spec": {"taints": taints},
        }


class AddNodes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes to add before pods are placed."""

    template: NodeTemplate | Name
    """A template, or the name of a present node, whose copies are empty and healthy."""
    nodes: Annotated[int, Meta(ge=0, le=NODES_MOST)] = 1


class Unhelped(Struct, frozen=True, kw_only=True):
    """A pod that no number of the added nodes would place."""

    namespace: str
    pod: str
    reason: str


class Scaling(Struct, frozen=True, kw_only=True):
    """Answer of a search."""

    template: str
    nodes: int | None
    """Least number of added nodes with which no pod waits for devices; null: more than
    ``searched``.
    """
    searched: int
    """Largest number that was tried."""
    pods: tuple[Outcome, ...]
    """Placements with ``nodes``, or with ``searched``, added nodes."""
    unhelped: tuple[Unhelped, ...] = ()


class Pods(Struct, frozen=True, kw_only=True):
    """Pods to place, in this order."""

    requests: Sequence[PodRequest]
    excluded: Excluded = NONE_EXCLUDED
    """Of the present nodes."""
    documents: Mapping[str, Document] = MappingProxyType({})
    """By uid: the pod's manifest, for the constraints that exclude an added node."""


def template_of(
    node: str, inventory: Iterable[NodeDevices], document: Document | None = None
) -> NodeTemplate:
    """Return a template like a present node, empty, with all devices healthy and in service.

    ``document``: the node in the Kubernetes API; without it the template has no labels and taints.
    ``RequestInvalid``: the node has no devices.
    """
    metadata, spec = (document or {}).get("metadata") or {}, (document or {}).get("spec") or {}
    template = NodeTemplate(
        name=node,
        devices=tuple(
            replace(known, problem="", devices=tuple(map(_like_new, known.devices)))
            for known in inventory
            if known.node == node and known.devices
        ),
        labels={k: v for k, v in (metadata.get("labels") or {}).items() if k != HOST_LABEL},
        taints=tuple(
            Taint(key=one["key"], value=one.get("value") or "", effect=one["effect"])
            for one in spec.get("taints") or ()
            if not one["key"].startswith(OWN_TAINTS)
        ),
    )
    if not template.devices:
        raise RequestInvalid(
            field="template",
            problem=f"no node {node} has devices",
            fix="name a node that hamictl get nodes lists, or send the template itself",
        )
    return template


def _like_new(device: Device) -> Device:
    return replace(device, healthy=True, health_reason="", cordoned=False, foreign_mib=0, bursts=())


def add_nodes(
    ledger: Ledger, template: NodeTemplate, count: int, pods: Pods
) -> tuple[list[str], Excluded]:
    """Add nodes to the table; returns their names, and the nodes excluded for each pod."""
    names = template.names(count)
    taken = next((name for name in names if name in ledger.table), "")
    if taken:
        raise RequestInvalid(
            field="template.name", problem=f"node {taken} exists", fix="write another name"
        )
    for name in names:
        for devices in template.inventories(name):
            ledger.table.upsert_node(devices)
    out = _kept_out(template, pods)
    if not out:
        return names, pods.excluded
    excluded = {
        request.uid: pods.excluded.get(request.uid, MappingProxyType({}))
        for request in pods.requests
    }
    for uid, why in out.items():
        excluded[uid] = {**excluded[uid], **dict.fromkeys(names, why)}
    return names, excluded


def _kept_out(template: NodeTemplate, pods: Pods) -> dict[str, str]:
    """Return, by uid, the constraint by which kube-scheduler excludes added nodes."""
    node = template.document()
    out = {uid: exclusion(document, node) for uid, document in pods.documents.items()}
    return {uid: why for uid, why in out.items() if why}


def least_nodes(
    fresh: Fresh,
    pods: Pods,
    template: NodeTemplate,
    *,
    most: int,
    now_s: float,
    check: Callable[[], None] = lambda: None,
) -> Scaling:
    """Find the least number of nodes like ``template``, up to ``most``.

    ``check`` is called between pods and may raise to end the search.
    """
    template.require_usable()
    state = fresh()
    nodes = min(most, _Alone(template, pods, state[1]).least_by_sums(state[0]))
    while True:
        is_enough, scaling = _attempt(
            state, pods, template, nodes=nodes, is_last=nodes >= most, now_s=now_s, check=check
        )
        if is_enough or nodes >= most:
            return scaling
        nodes += 1
        check()
        state = fresh()


def _attempt(
    state: tuple[Ledger, Governed],
    pods: Pods,
    template: NodeTemplate,
    *,
    nodes: int,
    is_last: bool,
    now_s: float,
    check: Callable[[], None],
) -> tuple[bool, Scaling]:
    """Place the pods with so many added nodes; stops at a pod that lacks devices unless last."""
    ledger, governed = state
    _, excluded = add_nodes(ledger, template, nodes, pods)
    alone = _Alone(template, pods, governed)
    is_enough = True
    outcomes: list[Outcome] = []
    unhelped: list[Unhelped] = []
    placed = simulate(
        ledger, pods.requests, now_s=now_s, explain=False, governed=governed, excluded=excluded
    )
    for request, outcome in zip(pods.requests, placed, strict=True):
        check()
        outcomes.append(outcome)
        if outcome.node:
            continue
        reason = outcome.refusals[0].text if outcome.by_quota else alone.refusal(request)
        if reason:
            unhelped.append(Unhelped(namespace=request.namespace, pod=request.name, reason=reason))
            continue
        is_enough = False
        if not is_last:
            break
    return is_enough, Scaling(
        template=template.name,
        nodes=nodes if is_enough else None,
        searched=nodes,
        pods=tuple(outcomes),
        unhelped=tuple(unhelped),
    )


class _Alone:
    """One empty added node without others, under the present quotas."""

    def __init__(self, template: NodeTemplate, pods: Pods, governed: Governed) -> None:
        self._pods = pods
        self._governed = governed
        self._kept_out = _kept_out(template, pods)
        table = DeviceTable()
        (self._name,) = template.names(1)
        for devices in template.inventories(self._name):
            table.upsert_node(devices)
        self._devices = [device for known in template.devices for device in known.devices]
        self._verdicts = Verdicts(table)
        self._quotas = QuotaVerdicts(table, governed.quota)

    def refusal(self, request: PodRequest) -> str:
        """Return why the node does not help the pod; empty: it does."""
        if why := self._kept_out.get(request.uid, ""):
            return f"excluded by {why}"
        asker = self._governed.askers.get(request.uid, NOBODY_SPECIAL)
        filtered = self._verdicts.filter(request, [self._name])
        waiting = tuple(self._governed.quota.claims())
        answer, _ = self._quotas.look(request, filtered, asker, waiting=waiting)
        return "" if len(answer.left) else answer.groups()[0][0].text

    def least_by_sums(self, present: Ledger) -> int:
        """Return a number of nodes below which some pod that they help has no devices.

        Counts memory, whole devices, and shares above a size, of pods without quotas.
        """
        asked: dict[str, list[list[list[DeviceRequest]]]] = {}
        idle = Counter[str]()
        for request in self._pods.requests:
            asker = self._governed.askers.get(request.uid, NOBODY_SPECIAL)
            if self._quotas.governs(request.namespace, asker) or self.refusal(request):
                continue
            for vendor in {r.vendor for c in request.containers for r in c.requests}:
                selector = request.selectors.get(vendor, DeviceSelector())
                mine = [[r for r in c.requests if r.vendor == vendor] for c in request.containers]
                asked.setdefault(vendor, []).append(mine)
                idle[vendor] += max(sum(_whole(r, selector) for r in some) for some in mine)
        free: dict[str, list[int]] = {vendor: [] for vendor in asked}
        for vendor, free_mib, is_idle in _present(present):
            if vendor in asked:
                free[vendor].append(free_mib)
                idle[vendor] -= is_idle
        needed = 0
        for vendor, pods in asked.items():
            each = [one.capacity_mib for one in self._devices if one.vendor == vendor]
            needed = max(
                needed,
                _nodes(idle[vendor], len(each)),
                _nodes(_total(pods, _memory) - sum(free[vendor]), sum(each)),
                *(_by_size(pods, size, free[vendor], each) for size in _sizes(pods)),
            )
        return needed


def _nodes(lacking: int, each: int) -> int:
    """Return how many nodes with ``each`` of something provide what is lacking."""
    return -(-lacking // each) if lacking > 0 and each else 0


def _total(
    pods: Iterable[list[list[DeviceRequest]]], amount: Callable[[DeviceRequest], int]
) -> int:
    """Add up the amounts of pods: at least that of the container that requests most."""
    return sum(max(sum(map(amount, some)) for some in containers) for containers in pods)


def _sizes(pods: Iterable[list[list[DeviceRequest]]]) -> list[int]:
    """Return the largest sizes of shares, in MiB."""
    found = {r.memory_mib for containers in pods for some in containers for r in some if _memory(r)}
    return sorted(found)[-_SIZES_MOST:]


def _by_size(
    pods: Iterable[list[list[DeviceRequest]]], size: int, free: list[int], each: list[int]
) -> int:
    """Return the nodes for all shares of at least this size, by how many each device holds."""
    wanted = _total(pods, lambda r: r.count if _memory(r) and r.memory_mib >= size else 0)
    return _nodes(
        wanted - sum(free_mib // size for free_mib in free),
        sum(capacity_mib // size for capacity_mib in each),
    )


def _present(ledger: Ledger) -> Iterator[tuple[str, int, int]]:
    """Yield (vendor, free memory, 1 if no container holds it) of each usable device."""
    table = ledger.table
    for name in table.nodes():
        place = table.place(name)
        for cell in place.block.read(place.column) if place is not None else ():
            if cell.known and cell.healthy and cell.alive and not (cell.cordoned or cell.withheld):
                free_mib = max(0, cell.capacity_mib - cell.foreign_mib - cell.used_mib)
                yield table.vendors.words[cell.vendor], free_mib, int(not cell.used_slots)


def _memory(request: DeviceRequest) -> int:
    """Return memory that the request books at least."""
    is_by_size = not (request.profile or request.exact)
    return request.count * request.memory_mib if is_by_size else 0


def _whole(request: DeviceRequest, selector: DeviceSelector) -> int:
    """Return the number of idle devices that the request takes at least."""
    return request.count if request.exclusive and not wants_parts(request, selector) else 0
