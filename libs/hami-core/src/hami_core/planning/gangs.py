# SPDX-License-Identifier: Apache-2.0
"""Gangs: membership, size, and placement of all members at once.

A pod names its gang by label or annotation. The number of members the gang needs stands on the pod
itself (``hami.io/gang-size``, Kueue's total count) or in an object of its own (``spec.minMember``
of a PodGroup of scheduler-plugins or Volcano); a pod whose group has no such object is an ordinary
pod, as for the schedulers those labels come from.

Placing tries the domains of the network from the narrowest (a rack) to the whole cluster and takes
the first that fits all members: first where the gang has members already, then the smallest. Within
a domain nodes are filled one after another, each with as many members as it takes, the largest
first; for equal members that finds a placement whenever one exists. For members that differ, every
assignment is tried beyond that while it takes no more than ``PICKS`` picks. ``pick`` chooses the
devices of a pod on a node, as at its bind. Shares are booked on the table only between two points
where other tasks may run.
"""

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from hami_common.apipath import api_path, checked_name
from hami_common.errors import RequestInvalid
from hami_common.model.placement import Placement
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.units import whole
from hami_core.placement.fit import Plan, compile_request
from hami_core.placement.pick import pick
from hami_core.placement.reasons import NodeRefusal
from hami_core.table.table import DeviceTable

PICKS: Final = 256
"""Maximum picks of the search through all assignments, for members that differ."""
DOMAIN_PICKS: Final = 4096
"""Maximum picks spent on domains narrower than the whole cluster."""
SIZE_MOST: Final = 10_000

KUEUE_COUNT: Final = "kueue.x-k8s.io/pod-group-total-count"
_KUEUE_NAME: Final = "kueue.x-k8s.io/pod-group-name"
_PLUGINS_NAME: Final = "scheduling.x-k8s.io/pod-group"
_VOLCANO_NAME: Final = "scheduling.k8s.io/group-name"


_Kind = Literal["pods", "scheduler-plugins", "volcano"]
_GROUP_SOURCES: Final[tuple[tuple[str, _Kind, str], ...]] = (
    (_PLUGINS_NAME, "scheduler-plugins", ""),
    (_VOLCANO_NAME, "volcano", ""),
    (_KUEUE_NAME, "pods", KUEUE_COUNT),
    (keys.GANG, "pods", keys.GANG_SIZE),
)
"""(label or annotation with the name, source of the size, key of the size on the pod itself)."""


class GangRef(Struct, frozen=True, kw_only=True):
    """A pod's reference to its gang."""

    key: str
    """``<namespace>/<name>``."""
    size: int = 0
    """Members it needs; 0: its PodGroup defines it."""
    kind: _Kind = "pods"

    def path(self) -> str:
        """Return the path of the PodGroup in the Kubernetes API; empty without a PodGroup."""
        namespace, _, name = self.key.partition("/")
        group = {
            "pods": "",
            "scheduler-plugins": "scheduling.x-k8s.io/v1alpha1",
            "volcano": "scheduling.volcano.sh/v1beta1",
        }[self.kind]
        if not group:
            return ""
        return api_path("apis", *group.split("/"), "namespaces", namespace, "podgroups", name)


def gang_of(pod: PodView) -> GangRef | None:
    """Return the gang of a pod; ``RequestInvalid`` when its labels or annotations are invalid."""
    labels, annotations = pod.labels(), pod.annotations()
    namespace = pod.metadata.namespace or "default"
    for key, kind, size_key in _GROUP_SOURCES:
        name = labels.get(key) or annotations.get(key)
        if not name:
            continue
        checked_name(name, field=_field(key, labels))
        size = 0
        if size_key:
            size = _size(annotations.get(size_key) or labels.get(size_key), size_key)
        return GangRef(key=f"{namespace}/{name}", size=size, kind=kind)
    return None


def _field(key: str, labels: Mapping[str, str]) -> str:
    return f"metadata.{'labels' if labels.get(key) else 'annotations'}[{key}]"


def _size(text: str | None, key: str) -> int:
    size = None if text is None else whole(text, most=SIZE_MOST)
    if size is None:
        raise RequestInvalid(
            field=f"metadata.annotations[{key}]",
            problem="is missing" if text is None else f"{text[:40]!r} is not a number of pods",
            fix=f"write the number of pods that must run together, 0 to {SIZE_MOST}, such as 4",
        )
    return size


class Member(Struct, frozen=True, kw_only=True):
    """A pod that must be placed together with others."""

    request: PodRequest
    nodes: frozenset[str]
    """Nodes that kube-scheduler would choose from."""


Assignment = dict[str, Placement]
"""Placement by pod uid."""


def place_together(
    table: DeviceTable, members: Sequence[Member], *, near: Iterable[str] = ()
) -> Generator[None, None, Assignment | None]:
    """Return a placement of all ``members``, ``None`` when none exists or none was found.

    ``near`` are nodes of members that are already placed, one entry each.
    """
    ordered = _ordered(members)
    budget = DOMAIN_PICKS
    for is_widest, nodes in _domains(table, ordered, Counter(near)):
        if not is_widest and budget <= 0:
            continue
        filled, picks = yield from _fill(table, ordered, nodes)
        budget -= picks
        if filled is not None:
            return filled
        if is_widest and len({_class_of(member) for member in ordered}) > 1:
            return _Assigning(table, ordered, nodes).run()
    return None


def _ordered(members: Sequence[Member]) -> list[Member]:
    """Return the members, largest first, by uid among equals."""

    def size(member: Member) -> tuple[int, int, int]:
        asked = [r for container in member.request.containers for r in container.requests]
        return (
            sum(r.count * (r.memory_mib or r.memory_pct << 20) for r in asked),
            sum(r.count * r.core_pct for r in asked),
            sum(r.count for r in asked),
        )

    by_uid = sorted(members, key=lambda member: member.request.uid)
    return sorted(by_uid, key=size, reverse=True)


def _domains(
    table: DeviceTable, members: Sequence[Member], near: Counter[str]
) -> Iterator[tuple[bool, list[str]]]:
    """Yield (is the whole cluster, nodes) of each domain worth a try, the narrowest first."""
    wanted = frozenset[str]().union(*(member.nodes for member in members))
    nodes = sorted(node for node in wanted if node in table)
    domains = table.domains
    for level in range(domains.depth, 0, -1):
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for node in nodes:
            path = domains.paths[domains.of(node)]
            if len(path) >= level:
                groups[path[:level]].append(node)
        held = {path: sum(near[node] for node in some) for path, some in groups.items()}
        for path in sorted(groups, key=lambda p: (-held[p], len(groups[p]), p)):
            if len(groups[path]) < len(nodes):
                yield False, _by_nearness(groups[path], near)
    yield True, _by_nearness(nodes, near)


def _by_nearness(nodes: Iterable[str], near: Mapping[str, int]) -> list[str]:
    return sorted(nodes, key=lambda node: (-near.get(node, 0), node))


def _class_of(member: Member) -> tuple[Plan, frozenset[str]]:
    return compile_request(member.request), member.nodes


def _fill(
    table: DeviceTable, members: Sequence[Member], nodes: Sequence[str]
) -> Generator[None, None, tuple[Assignment | None, int]]:
    """Return (all members placed, node by node, or ``None``; number of picks)."""
    left = list(members)
    assigned: Assignment = {}
    picks = 0
    for node in nodes:
        if not left:
            break
        here: list[Placement] = []
        refused: set[Plan] = set()
        for member in list(left):
            plan = compile_request(member.request)
            if plan in refused or node not in member.nodes:
                continue
            picks += 1
            chosen = pick(table, member.request, node)
            if isinstance(chosen, NodeRefusal):
                refused.add(plan)
                continue
            table.book(node, chosen.containers)
            here.append(chosen)
            assigned[member.request.uid] = chosen
            left.remove(member)
        for placement in here:
            table.unbook(node, placement.containers)
        yield
    return (None if left else assigned), picks


class _Assigning:
    """Search of all assignments of members to nodes, until one works or the picks are used up."""

    def __init__(self, table: DeviceTable, members: Sequence[Member], nodes: Sequence[str]) -> None:
        self._table = table
        self._members = members
        self._nodes = nodes
        self._classes = [_class_of(member) for member in members]
        self._picks = PICKS
        self._chosen: list[tuple[int, Placement]] = []

    def run(self) -> Assignment | None:
        """Return the first assignment in which every member has a node.

        The table stays unchanged.
        """
        if not self._grow():
            return None
        return {
            member.request.uid: placement
            for member, (_, placement) in zip(self._members, self._chosen, strict=True)
        }

    def _grow(self) -> bool:
        depth = len(self._chosen)
        if depth == len(self._members):
            return True
        member = self._members[depth]
        # Equal members are interchangeable: the later one never takes an earlier node.
        is_alike = depth > 0 and self._classes[depth] == self._classes[depth - 1]
        for number in range(self._chosen[-1][0] if is_alike else 0, len(self._nodes)):
            node = self._nodes[number]
            if node not in member.nodes:
                continue
            if not self._picks:
                return False
            self._picks -= 1
            chosen = pick(self._table, member.request, node)
            if isinstance(chosen, NodeRefusal):
                continue
            self._table.book(node, chosen.containers)
            self._chosen.append((number, chosen))
            try:
                found = self._grow()
            finally:
                self._table.unbook(node, chosen.containers)
            if found:
                return True
            self._chosen.pop()
        return False
