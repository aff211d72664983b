# SPDX-License-Identifier: Apache-2.0
"""Random small clusters and pods, dense enough that every constraint applies now and then."""

from hypothesis import strategies as st

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device, Profile
from hami_common.model.placement import ContainerShares
from hami_common.model.request import (
    ContainerKind,
    ContainerRequest,
    DevicePolicy,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
    ScoringWeights,
)
from tests.support import builders

NODES = ("n0", "n1", "n2", "n3")
VENDORS = ("nvidia", "ascend")
TYPES = ("A100-80", "A100-40", "T4")
MODES = ("soft", "mig", "whole", "mps", "timeslice")
TABLES: tuple[tuple[tuple[Profile, ...], dict[str, int]], ...] = (
    (  # positions, as MIG has them; the first by name only
        (
            Profile(name="1g+", memory_mib=2, core_pct=12, size=1, starts=(0,), by_name_only=True),
            Profile(name="1g", memory_mib=2, core_pct=12, size=1, starts=(0, 1, 2, 3)),
            Profile(name="2g", memory_mib=4, core_pct=25, size=2, starts=(0, 2)),
            Profile(name="3g", memory_mib=6, core_pct=50, size=3, starts=(0,), limit=1),
        ),
        {},
    ),
    (  # amounts, as vNPU templates have them
        (
            Profile(name="v1", memory_mib=2, core_pct=12, resources={"core": 2, "cpu": 3}),
            Profile(name="v2", memory_mib=4, core_pct=50, resources={"core": 4, "cpu": 3}),
            Profile(name="", memory_mib=8, core_pct=100, resources={"core": 8, "cpu": 7}),
        ),
        {"core": 8, "cpu": 7},
    ),
    (  # sizes that do not mix
        (
            Profile(name="q", memory_mib=2, core_pct=25, kind="q"),
            Profile(name="h", memory_mib=4, core_pct=50, kind="h"),
            Profile(name="", memory_mib=8, core_pct=100),
        ),
        {},
    ),
)
PARTS = ("1g", "2g", "v1", "v2", "q", "h")
KINDS: tuple[ContainerKind, ...] = ("init", "sidecar", "app")
CHAINS: tuple[tuple[DevicePolicy, ...], ...] = (
    ("spread",),
    ("binpack",),
    ("numa",),
    ("numa", "binpack"),
    ("binpack", "numa"),
    ("mutex",),
    ("mutex", "binpack"),
    ("topology-aware",),
    ("topology-aware", "binpack"),
    ("topology-aware", "numa", "spread"),
    ("spread", "numa"),
    ("binpack", "spread"),
    ("numa", "spread", "binpack"),
    ("mutex", "topology-aware", "binpack"),
    ("topology-aware", "mutex", "numa"),
)
WEIGHTS = (
    ScoringWeights(),
    ScoringWeights(slot=0, core=0, memory=3),
    ScoringWeights(slot=2, core=5, memory=1),
    ScoringWeights(slot=1, core=0, memory=0),
)


def uuids(node: str, vendor: str, count: int = 9) -> list[str]:
    """Possible names of a node's devices."""
    return [f"{node}-{vendor}-{i}" for i in range(count)]


@st.composite
def inventories(draw: st.DrawFn, node: str, vendor: str, *, divided: bool = True) -> NodeDevices:
    """Inventories of a node: the agent's report and the configuration at some time.

    Some devices have tables of partitions, unless none are to be ``divided``.
    """
    count = draw(st.sampled_from((0, 1, 2, 2, 3, 4, 4, 5, 8, 9)))
    alike = draw(st.booleans())
    type_ = draw(st.sampled_from(TYPES))
    memory_mib = draw(st.sampled_from((8, 16)))
    whole: tuple[tuple[tuple[Profile, ...], dict[str, int]], ...] = (((), {}),)
    tables = draw(st.sampled_from((whole, whole, TABLES, (*TABLES, *whole)))) if divided else whole
    devices: list[Device] = []
    for i, uuid in enumerate(uuids(node, vendor)[:count]):
        plain = alike and draw(st.integers(0, 9)) > 0
        physical = memory_mib if plain else draw(st.sampled_from((8, 16, 24)))
        partitions, resources = draw(st.sampled_from(tables))
        scaling = 1 if partitions else draw(st.sampled_from((1, 1, 2)))
        core_pct = 100 if partitions else draw(st.sampled_from((100, 100, 100, 200, 0)))
        # Shares of overcommitted or divided devices have no memory above their requests.
        may_burst = scaling == 1 and not partitions
        bursts = draw(st.sampled_from(({}, {}, {}, {"p": 1}, {"p": 3, "q": 2})))
        devices.append(
            builders.device(
                uuid,
                vendor=vendor,
                index=draw(st.sampled_from((i, i, i, 0))),
                type=type_ if plain else draw(st.sampled_from(TYPES)),
                memory_mib=physical,
                capacity_mib=8 if partitions else physical * scaling,
                largest_mib=draw(st.sampled_from((0, physical))) if scaling > 1 else 0,
                foreign_mib=draw(st.sampled_from((0, 0, 0, 0, 2, 5, physical))),
                bursts=bursts if may_burst else {},
                core_pct=core_pct,
                partitions=partitions,
                resources=resources,
                slots=draw(st.sampled_from((1, 2, 3, 10))),
                numa=draw(st.sampled_from((None, 0, 0, 1))),
                healthy=plain or draw(st.integers(0, 4)) > 0,
                cordoned=not plain and draw(st.integers(0, 4)) == 0,
                mode="soft" if plain else draw(st.sampled_from(MODES)),
                attributes=draw(st.sampled_from(({}, {"board": "x"}, {"board": "y"}))),
                memory_cap=draw(st.booleans()),
            )
        )
    names = [device.uuid for device in devices]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    scores = draw(st.sampled_from(((), (10,), (10, 20, 300))))
    links = [(a, b, draw(st.sampled_from(scores))) for a, b in pairs] if scores else []
    return builders.node_devices(node, devices, vendor=vendor, links=links)


@st.composite
def holdings(draw: st.DrawFn, node: str) -> tuple[ContainerShares, ...]:
    """Random holdings of a pod, whether or not it fits or the devices are registered."""
    return tuple(
        ContainerShares(
            name=f"c{i}",
            kind=draw(st.sampled_from(KINDS)),
            shares=tuple(
                builders.share(
                    f"{node}-{vendor}-{number}",
                    draw(st.integers(0, 8)),
                    draw(st.sampled_from((0, 10, 50, 100))),
                    vendor=vendor,
                    exclusive=draw(st.integers(0, 7)) == 0,
                    profile=(profile := draw(st.sampled_from(("", "", "", *PARTS)))),
                    start=draw(st.integers(0, 3)) if profile.endswith("g") else None,
                    kind=profile
                    if profile in ("q", "h")
                    else draw(st.sampled_from(("", "", "", "online", "offline"))),
                )
                for vendor, number in draw(
                    st.lists(
                        st.tuples(st.sampled_from(VENDORS), st.integers(0, 9)),
                        min_size=1,
                        max_size=2,
                        unique=True,
                    )
                )
            ),
        )
        for i in range(draw(st.integers(1, 2)))
    )


@st.composite
def device_requests(draw: st.DrawFn, vendor: str) -> DeviceRequest:
    """Random requests of a container to a vendor."""
    if draw(st.integers(0, 5)) == 0:
        return builders.whole(draw(st.sampled_from((1, 1, 2, 4))), vendor=vendor)
    shape = draw(st.sampled_from(("", "", "", "", "", "pairs", "wings", "run", "aligned")))
    return DeviceRequest(
        vendor=vendor,
        shape=shape,
        keeps=draw(st.sampled_from(("", "", "", "aligned"))),
        profile=draw(st.sampled_from(("", "", "", "", "", "", "", "1g+", "v1"))),
        exact=draw(st.sampled_from(((), (), (), (), (), (("core", 2),)))),
        kind=draw(st.sampled_from(("", "", "", "", "q", "fixed", "online", "offline"))),
        types=draw(st.sampled_from(((), (), (), (), ("T4",)))),
        modes=draw(st.sampled_from(((), (), (), (), ("mig",), ("soft", "whole")))),
        count=draw(st.sampled_from((1, 1, 1, 2, 2, 3, 4))),
        memory_mib=draw(st.sampled_from((0, 1, 2, 4, 8, 12))),
        memory_pct=draw(st.sampled_from((0, 10, 50, 100))),
        core_pct=draw(st.sampled_from((0, 10, 50, 100))),
        memory_limit_mib=draw(st.sampled_from((0, 0, 6, 30))),
        core_limit_pct=draw(st.sampled_from((0, 0, 50))),
        exclusive=draw(st.integers(0, 5)) == 0,
    )


@st.composite
def selectors(draw: st.DrawFn, vendor: str) -> DeviceSelector:
    """Random device selectors."""
    words = st.sampled_from(("a100", "A100-80", "t4", "x"))
    names = st.sampled_from([uuid for node in NODES for uuid in uuids(node, vendor)])

    def rarely(values: st.SearchStrategy[str]) -> tuple[str, ...]:
        return tuple(draw(st.one_of(st.just([]), st.just([]), st.lists(values, max_size=6))))

    return DeviceSelector(
        allow_types=rarely(words),
        deny_types=rarely(words),
        allow_uuids=rarely(names),
        deny_uuids=rarely(names),
        modes=draw(
            st.sampled_from(((), (), (), ("soft",), ("mig",), ("mps", "soft"), ("timeslice",)))
        ),
        numa_bind=draw(st.integers(0, 3)) == 0,
        no_overcommit=draw(st.integers(0, 4)) == 0,
        min_isolation=draw(
            st.sampled_from(((), (), (), (("memory", "B"),), (("compute", "C"), ("fault", "B"))))
        ),
    )


@st.composite
def pods(draw: st.DrawFn, uid: str = "uid") -> PodRequest:
    """A pod's request."""
    containers = tuple(
        ContainerRequest(
            name=f"c{i}",
            kind=kind,
            requests=tuple(
                draw(device_requests(vendor))
                for vendor in draw(
                    st.sampled_from((("nvidia",), ("nvidia",), ("ascend",), VENDORS))
                )
            ),
        )
        for i, kind in enumerate(
            sorted(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)), key=_admission)
        )
    )
    return builders.pod(
        *containers,
        uid=uid,
        node=draw(st.sampled_from(("binpack", "spread"))),
        device=draw(st.sampled_from(CHAINS)),
        weights=draw(st.sampled_from(WEIGHTS)),
        selectors={vendor: draw(selectors(vendor)) for vendor in VENDORS if draw(st.booleans())},
    )


def _admission(kind: ContainerKind) -> bool:
    return kind == "app"
