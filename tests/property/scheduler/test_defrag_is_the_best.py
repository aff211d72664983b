# SPDX-License-Identifier: Apache-2.0
"""Plans of moves equal those of an exhaustive search, and every step of them is possible.

The other search uses no bounds, no equivalence of devices, and none of the scheduler's columns: it
walks breadth first through all states of the oracle, and tries every set of devices by name.
"""

from collections.abc import Iterator
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.model.device import Device, Profile
from hami_common.model.placement import ContainerShares, Placement
from hami_common.model.request import DevicePolicy, DeviceSelector, PodRequest
from hami_core.placement.pick import pick, satisfies
from hami_core.planning.defrag import DefragPlan, Tenant, plan_moves
from hami_core.table.table import DeviceTable
from tests.support import builders
from tests.support.oracle import Oracle

MOST_MOVES = 3
Spots = tuple[tuple[str, tuple[ContainerShares, ...]], ...]

A100: tuple[Profile, ...] = (
    Profile(name="1g.5gb", memory_mib=4864, size=1, starts=(0, 1, 2, 3, 4, 5, 6), limit=7),
    Profile(name="2g.10gb", memory_mib=9856, size=2, starts=(0, 2, 4), limit=3),
    Profile(name="3g.20gb", memory_mib=19968, size=4, starts=(0, 4), limit=2),
    Profile(name="4g.20gb", memory_mib=19968, size=4, starts=(0,), limit=1, by_name_only=True),
    Profile(name="7g.40gb", memory_mib=40192, size=8, starts=(0,), limit=1),
)
"""NVIDIA A100 40 GB: seven compute and eight memory slices."""


class Site:
    """A small cluster with its pods."""

    def __init__(self, devices: dict[str, list[Device]]) -> None:
        self.devices = devices
        self.tenants: list[Tenant] = []
        self.fixed: list[tuple[str, tuple[ContainerShares, ...]]] = []
        self.table = DeviceTable()
        for node, some in devices.items():
            self.table.upsert_node(builders.node_devices(node, some))

    def start(self, request: PodRequest, node: str, *, movable: bool = True) -> None:
        """Run a pod on the node, if it fits."""
        placed = pick(self.table, request, node)
        if isinstance(placed, Placement):
            self.table.book(node, placed.containers)
            if movable:
                tenant = Tenant(request=request, node=node, containers=placed.containers)
                self.tenants.append(tenant)
            else:
                self.fixed.append((node, placed.containers))

    def oracle(self, spots: Spots, *, without: int | None = None) -> Oracle:
        """The cluster with the movable pods in place."""
        oracle = Oracle()
        for node, some in self.devices.items():
            oracle.upsert_node(builders.node_devices(node, some))
        for node, containers in self.fixed:
            oracle.book(node, containers)
        for number, (node, containers) in enumerate(spots):
            if number != without:
                oracle.book(node, containers)
        return oracle

    def spots(self) -> Spots:
        return tuple((t.node, t.containers) for t in self.tenants)

    def moves(self, spots: Spots) -> Iterator[tuple[Spots, int]]:
        """Every possible move, with its memory."""
        for number, tenant in enumerate(self.tenants):
            oracle = self.oracle(spots, without=number)
            mib = sum(s.memory_mib for c in spots[number][1] for s in c.shares)
            for node, devices in self.devices.items():
                if tenant.stays_on_node and node != tenant.node:
                    continue
                uuids = [device.uuid for device in devices]
                for size in range(1, len(uuids) + 1):
                    for some in combinations(uuids, size):
                        placed = oracle.pick(only_on(tenant.request, some), node)
                        if placed is not None and (node, placed.containers) != spots[number]:
                            moved = list(spots)
                            moved[number] = (node, placed.containers)
                            yield tuple(moved), mib

    def best(self, wanted: PodRequest) -> tuple[int, int] | None:
        """(fewest moves, least memory) after which ``wanted`` fits, by trying everything."""
        here: dict[Spots, int] = {self.spots(): 0}
        for count in range(MOST_MOVES + 1):
            fitting = [
                mib
                for spots, mib in here.items()
                if any(self.oracle(spots).code(wanted, node) is None for node in self.devices)
            ]
            if fitting:
                return count, min(fitting)
            after: dict[Spots, int] = {}
            if count < MOST_MOVES:
                for spots, mib in here.items():
                    for moved, more in self.moves(spots):
                        after[moved] = min(after.get(moved, mib + more), mib + more)
            here = after
        return None


def only_on(request: PodRequest, uuids: tuple[str, ...]) -> PodRequest:
    own = request.selectors.get("nvidia", DeviceSelector())
    wanted = tuple(uuid for uuid in uuids if own.accepts_uuid(uuid)) or ("none",)
    return replace(request, selectors={"nvidia": replace(own, allow_uuids=wanted)})


def check_steps(site: Site, wanted: PodRequest, plan: DefragPlan) -> None:
    """Verify that each move is possible after the ones before, and that the pod fits in the end."""
    table = site.table
    requests = {t.request.uid: t.request for t in site.tenants}
    for move in plan.moves:
        table.unbook(move.source, move.gives)
        uuids = tuple(s.uuid for c in move.takes for s in c.shares)
        placed = pick(table, only_on(requests[move.uid], uuids), move.target)
        assert isinstance(placed, Placement)
        assert placed.containers == move.takes
        assert table.book(move.target, move.takes) == ()
        assert satisfies(table, requests[move.uid], move.target, move.takes)
    placed = pick(table, wanted, plan.node)
    assert isinstance(placed, Placement)
    assert placed.containers == plan.containers
    assert table.book(plan.node, plan.containers) == ()
    table.check()


def agree(site: Site, wanted: PodRequest) -> DefragPlan:
    """Compare the plan with the optimum."""
    before = [(n, u, usage) for n, u, usage in site.table.usages()]
    plan = plan_moves(site.table, wanted, site.tenants, most_moves=MOST_MOVES)
    assert [(n, u, usage) for n, u, usage in site.table.usages()] == before
    best = site.best(wanted)
    if best is None:
        assert (plan.outcome, plan.moves_searched) == ("none", MOST_MOVES)
        return plan
    assert plan.outcome == ("found" if best[0] else "fits")
    assert (len(plan.moves), plan.memory_mib) == best
    assert plan.is_least_memory
    check_steps(site, wanted, plan)
    return plan


POLICIES: tuple[tuple[DevicePolicy, ...], ...] = (
    ("spread",),
    ("binpack",),
    ("spread",),
    ("binpack",),
    ("mutex",),
)


@st.composite
def soft_sites(draw: st.DrawFn) -> tuple[Site, PodRequest]:
    """Two or three nodes with a device or two, and pods that fill them."""
    nodes = draw(st.sampled_from(((1, 1), (2, 1), (1, 1, 1), (2, 2))))
    site = Site(
        {
            f"n{n}": [
                builders.device(
                    f"n{n}-{i}",
                    index=i,
                    type=draw(st.sampled_from(("A", "A", "A", "A", "B"))),
                    memory_mib=10,
                    slots=draw(st.sampled_from((3, 4))),
                    numa=draw(st.sampled_from((None, 0, 1))),
                    cordoned=draw(st.integers(0, 11)) == 0,
                )
                for i in range(count)
            ]
            for n, count in enumerate(nodes)
        }
    )
    for number in range(draw(st.integers(3, 5))):
        request = builders.pod(
            *[
                builders.container(builders.ask(mib=draw(st.integers(2, 4))), name=f"c{i}")
                for i in range(draw(st.sampled_from((1, 1, 1, 1, 2))))
            ],
            uid=f"u{number}",
            name=f"p{number}",
            device=draw(st.sampled_from(POLICIES)),
            selector=DeviceSelector(
                allow_types=draw(st.sampled_from(((), (), (), ("A",)))),
                numa_bind=draw(st.booleans()),
            ),
        )
        node = draw(st.sampled_from(sorted(site.devices)))
        site.start(request, node, movable=draw(st.integers(0, 3)) > 0)
    if site.tenants and draw(st.integers(0, 3)) == 0:
        site.tenants[0] = replace(site.tenants[0], stays_on_node=True)
    count = draw(st.sampled_from((1, 1, 1, 2)))
    free = [10 - usage.memory_mib for _, _, usage in site.table.usages()]
    least = min(10, max(free) + draw(st.sampled_from((0, 1, 1, 1))))
    mib = draw(st.integers(least, 10))
    return site, builders.pod(builders.ask(count, mib=mib), uid="wanted", name="wanted")


@settings(max_examples=60, deadline=None)
@given(soft_sites())
def test_plan_equals_trying_everything(case: tuple[Site, PodRequest]) -> None:
    agree(*case)


def mig(node: str, count: int) -> list[Device]:
    return [
        builders.device(
            f"{node}-{i}", index=i, memory_mib=40_960, slots=7, mode="mig", partitions=A100
        )
        for i in range(count)
    ]


MIG = DeviceSelector(modes=("mig",))


@st.composite
def divided_sites(draw: st.DrawFn) -> tuple[Site, PodRequest]:
    """One or two divided devices with partitions that came and went."""
    site = Site({f"n{n}": mig(f"n{n}", 1) for n in range(2)})
    for number in range(draw(st.integers(4, 9))):
        mib = draw(st.sampled_from((4000, 4000, 9000)))
        request = builders.pod(
            builders.ask(mib=mib), uid=f"u{number}", name=f"p{number}", selector=MIG
        )
        site.start(request, draw(st.sampled_from(("n0", "n1"))))
    left = draw(st.integers(2, 4))
    while len(site.tenants) > left:
        gone = site.tenants.pop(draw(st.integers(0, len(site.tenants) - 1)))
        site.table.unbook(gone.node, gone.containers)
    for mib in (9000, 19_000):
        wanted = builders.pod(builders.ask(mib=mib), uid="wanted", name="wanted", selector=MIG)
        if not any(isinstance(pick(site.table, wanted, n), Placement) for n in ("n0", "n1")):
            return site, wanted
    return site, builders.pod(builders.ask(mib=40_000), uid="wanted", name="wanted", selector=MIG)


@settings(max_examples=40, deadline=None)
@given(divided_sites())
def test_plan_respects_the_places_of_partitions(case: tuple[Site, PodRequest]) -> None:
    agree(*case)
