# SPDX-License-Identifier: Apache-2.0
"""Every small pod on every small node: placed if and only if the rules allow a placement.

The rules are implemented here independently, for a whole placement at a time and without any order
of trying: ``allows`` checks each moment of a pod's life on each device. Pods have up to three init
containers and two sidecars in any order and up to three application containers; those that request
no device need not be listed. Memory in MiB, compute in percent of one device.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import pytest

from hami_common.model.placement import Booked, ContainerShares, Placement
from hami_common.model.request import (
    ContainerKind,
    ContainerRequest,
    DevicePolicy,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
)
from hami_core.placement.pick import pick, satisfies
from hami_core.placement.reasons import explain
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable, Usage
from tests.support.builders import ask, container, device, held, node_devices, pod, share

MEMORY_MIB, SLOTS = 4, 3

Used = tuple[int, int, int, bool]
"""Memory, compute, slots, and True when exclusive, of one device."""
FREE: Used = (0, 0, 0, False)
NODES: dict[str, tuple[Used, ...]] = {
    "empty": (FREE, FREE),
    "uneven": ((1, 50, 1, False), (3, 0, 1, False)),
    "crowded": ((1, 10, 2, False), FREE),
    "exhausted": ((0, 100, 1, False), (2, 30, 1, False)),
    "held": ((4, 100, 1, True), FREE),
    "three": ((2, 40, 1, False), (2, 0, 2, False), (1, 40, 1, False)),
    "single": (FREE,),
}
SIZES: dict[str, tuple[DeviceRequest, ...]] = {
    "alike": (ask(mib=1, core=20),),
    "memory": (ask(mib=1), ask(mib=3)),
    "compute": (ask(mib=1, core=40), ask(mib=2, core=70)),
    "exclusive": (ask(mib=1), ask(mib=2, core=100, exclusive=True)),
    "several": (ask(mib=2), ask(2, mib=1, core=30)),
    "unlimited": (ask(mib=1), ask(mib=1, core=100)),
}


def uuids(node: str) -> list[str]:
    return [f"{node}-{i}" for i in range(len(NODES[node]))]


def table_of_all() -> DeviceTable:
    table = DeviceTable()
    for node, used in NODES.items():
        table.upsert_node(
            node_devices(
                node,
                [
                    device(uuid, index=i, memory_mib=MEMORY_MIB, slots=SLOTS, numa=i % 2)
                    for i, uuid in enumerate(uuids(node))
                ],
            )
        )
        for uuid, (mib, core_pct, slots, exclusive) in zip(uuids(node), used, strict=True):
            for i in range(slots):
                table.book(
                    node,
                    [held(share(uuid, 0 if i else mib, 0 if i else core_pct, exclusive=exclusive))],
                )
    return table


def kinds_of_pods(most: int) -> Iterator[tuple[ContainerKind, ...]]:
    """Every order of kinds, by growing size."""
    first: tuple[ContainerKind, ...] = ("init", "sidecar")
    last: ContainerKind = "app"
    starts = [
        order
        for length in range(most + 1)
        for order in product(first, repeat=length)
        if order.count("init") <= 3 and order.count("sidecar") <= 2
    ]
    for start, apps in product(starts, range(4)):
        if 0 < len(start) + apps <= most:
            yield (*start, *([last] * apps))


def pods_of(
    sizes: Sequence[DeviceRequest], most: int, device: Sequence[DevicePolicy], *, numa_bind: bool
) -> Iterator[PodRequest]:
    for kinds in kinds_of_pods(most):
        for wanted in product(sizes, repeat=len(kinds)):
            yield pod(
                *(
                    container(asked, name=f"{kind}-{i}", kind=kind)
                    for i, (kind, asked) in enumerate(zip(kinds, wanted, strict=True))
                ),
                device=device,
                selector=DeviceSelector(numa_bind=numa_bind),
            )


def moments(containers: Sequence[ContainerRequest]) -> Iterator[list[int]]:
    """Sets of containers that run together: each init container's time, and the end."""
    for i, one in enumerate(containers):
        if one.kind == "init":
            yield [*(j for j in range(i) if containers[j].kind == "sidecar"), i]
    yield [i for i, one in enumerate(containers) if one.kind != "init"]


def peak(request: PodRequest, chosen: Sequence[Sequence[int]], at: int) -> Booked | None:
    """Peak bookings of the pod on one device; ``None`` when it has no share of it."""
    found = []
    for together in moments(request.containers):
        shares = [request.containers[i].requests[0] for i in together if at in chosen[i]]
        if shares:
            found.append(
                (
                    sum(s.memory_mib for s in shares),
                    sum(s.core_pct for s in shares),
                    len(shares),
                    any(s.exclusive for s in shares),
                )
            )
    if not found:
        return None
    mib, core, slots, exclusive = (max(values) for values in zip(*found, strict=True))
    return Booked(memory_mib=mib, core_pct=core, slots=slots, exclusive=exclusive)


def allows(request: PodRequest, node: str, chosen: Sequence[Sequence[int]]) -> bool:
    """Return True when each container may have the devices that are ``chosen`` for it."""
    if request.selectors["nvidia"].numa_bind and any(len({at % 2 for at in c}) > 1 for c in chosen):
        return False
    mutex = "mutex" in request.policy.device
    for at, (used_mib, used_core, used_slots, is_held) in enumerate(NODES[node]):
        for together in moments(request.containers):
            shares = [request.containers[i].requests[0] for i in together if at in chosen[i]]
            if not shares:
                continue
            exclusive = mutex or any(s.exclusive for s in shares)
            if (
                is_held
                or (exclusive and len(shares) + used_slots > 1)
                or sum(s.memory_mib for s in shares) + used_mib > MEMORY_MIB
                or sum(s.core_pct for s in shares) + used_core > 100
                or len(shares) + used_slots > SLOTS
                or (used_core == 100 and any(not s.core_pct for s in shares))
            ):
                return False
    return True


def choices(request: PodRequest, node: str) -> Iterator[tuple[tuple[int, ...], ...]]:
    places = range(len(NODES[node]))
    return product(*(combinations(places, c.requests[0].count) for c in request.containers))


def usages_after(
    table: DeviceTable, node: str, containers: tuple[ContainerShares, ...]
) -> list[Usage | None]:
    """Return the bookings of each device with the pod, which is released again."""
    assert table.book(node, containers) == ()
    found = [table.usage(node, uuid) for uuid in uuids(node)]
    table.unbook(node, containers)
    return found


@pytest.mark.parametrize(
    ("sizes", "most", "policy"),
    [
        ("alike", 8, ("spread",)),
        ("memory", 4, ("spread",)),
        ("memory", 3, ("binpack",)),
        ("memory", 3, ("mutex",)),
        ("compute", 3, ("numa", "spread")),
        ("exclusive", 3, ("spread",)),
        ("several", 3, ("spread",)),
        ("several", 3, ("topology-aware", "binpack")),
        ("unlimited", 3, ("spread",)),
    ],
)
def test_pod_is_placed_if_and_only_if_some_placement_is_allowed(
    sizes: str, most: int, policy: tuple[DevicePolicy, ...]
) -> None:
    table = table_of_all()
    verdicts, nodes = Verdicts(table), list(NODES)
    seen = {True: 0, False: 0}
    for number, request in enumerate(
        pods_of(SIZES[sizes], most, policy, numa_bind="topology-aware" in policy)
    ):
        feasible = set(verdicts.filter(request, nodes).feasible)
        for node in nodes:
            fits = any(allows(request, node, chosen) for chosen in choices(request, node))
            assert (node in feasible) == fits, (request, node)
            seen[fits] += 1
        node = nodes[number % len(nodes)]
        picked = pick(table, request, node)
        assert isinstance(picked, Placement) == (node in feasible)
        if isinstance(picked, Placement):
            check_placement(table, request, node, picked)
    assert min(seen.values()) > 100


def check_placement(table: DeviceTable, request: PodRequest, node: str, picked: Placement) -> None:
    """Verify that it is allowed, by container name, and booked and explained alike."""
    assert [c.name for c in picked.containers] == [c.name for c in request.containers]
    order = uuids(node)
    chosen = [[order.index(s.uuid) for s in c.shares] for c in picked.containers]
    assert allows(request, node, chosen)
    assert satisfies(table, request, node, picked.containers)
    before = [table.usage(node, uuid) for uuid in order]
    after = usages_after(table, node, picked.containers)
    for at, (old, new) in enumerate(zip(before, after, strict=True)):
        assert old is not None
        assert new is not None
        more = peak(request, chosen, at) or Booked()
        assert (new.memory_mib - old.memory_mib, new.core_pct - old.core_pct) == (
            more.memory_mib,
            more.core_pct,
        )
        assert (new.slots - old.slots, new.exclusive_holders - old.exclusive_holders) == (
            more.slots,
            more.exclusive,
        )
    explained = explain(table, request, node)
    assert explained.fits
    assert [{d.uuid for d in s.devices if d.taken} for s in explained.steps] == [
        {s.uuid for s in c.shares} for c in picked.containers
    ]
