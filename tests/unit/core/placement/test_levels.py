# SPDX-License-Identifier: Apache-2.0
"""Decisions made from the ranks of devices, and those that need the devices themselves."""

import numpy as np
import pytest

from hami_common.model.request import DeviceSelector, PodRequest
from hami_core.placement.fit import View, compile_request
from hami_core.placement.levels import NODES_WORTH_IT, offered_mib, settled, stopped
from hami_core.table.block import NO_MIB
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, container, device, held, node_devices, pod, share, whole

NODES = NODES_WORTH_IT
MIB = 1_000
FITS, OPEN, STOPPED = "fits", "open", "stopped"


def table_of(nodes: int = NODES) -> DeviceTable:
    """Two devices on each node; on ``n0`` one has its memory in use, the other its compute."""
    table = DeviceTable()
    for i in range(nodes):
        some = [device(f"n{i}-{d}", index=d, memory_mib=MIB) for d in range(2)]
        table.upsert_node(node_devices(f"n{i}", some))
    table.book("n0", (held(share("n0-0", 800, 10)), held(share("n0-1", 100, 90), name="b")))
    return table


def view_of(table: DeviceTable, columns: list[int] | None = None) -> View:
    """All nodes, or those at ``columns``."""
    place = table.place("n0")
    assert place is not None
    return View(table, place.block, None if columns is None else np.array(columns))


def verdicts_on(table: DeviceTable, request: PodRequest) -> list[str]:
    """Facts known about each node."""
    view, plan = view_of(table), compile_request(request)
    fits, stops = settled(view, plan), stopped(view, plan)
    assert fits is not None
    assert not (fits & stops).any()
    pairs = zip(fits.tolist(), stops.tolist(), strict=True)
    return [FITS if fit else STOPPED if stop else OPEN for fit, stop in pairs]


@pytest.mark.parametrize(
    ("request_", "want"),
    [
        (pod(ask(mib=900, core=10)), FITS),
        (pod(ask(mib=901, core=1)), STOPPED),
        (pod(ask(mib=100, core=91)), STOPPED),
        (pod(ask(mib=100, core=90)), OPEN),  # the device with less memory has it
        (pod(ask(mib=900)), FITS),
        (pod(ask(2, mib=200)), FITS),
        (pod(ask(2, mib=201)), STOPPED),
        (pod(ask(pct=90, core=5)), FITS),
        (pod(ask(pct=91)), STOPPED),
        (pod(container(ask(mib=500)), container(ask(mib=401), name="b")), OPEN),
        (pod(container(ask(mib=450, core=4)), container(ask(mib=450, core=5), name="b")), FITS),
    ],
)
def test_node_is_settled_by_its_ranks(request_: PodRequest, want: str) -> None:
    assert verdicts_on(table_of(), request_)[0] == want


def test_ranks_follow_changes() -> None:
    table, wanted = table_of(), pod(ask(mib=MIB, core=100))
    assert verdicts_on(table, wanted) == [STOPPED, *[FITS] * (NODES - 1)]
    shares = (held(share("n3-0", 1, 0), share("n3-1", 1, 0)),)
    table.book("n3", shares)
    table.set_health("n5", "n5-0", healthy=False)
    table.set_node_alive("n6", "nvidia", alive=False)
    want = {0: STOPPED, 3: STOPPED, 6: STOPPED}
    assert verdicts_on(table, wanted) == [want.get(i, FITS) for i in range(NODES)]
    table.unbook("n3", shares)
    table.upsert_node(node_devices("new", [device("new-0"), device("new-1", index=1)]))
    table.remove_node("n6")
    kept = [i for i in range(NODES) if i != 6]
    names = view_of(table).names()
    assert sorted(names) == sorted([*(f"n{i}" for i in kept), "new"])
    expected = [STOPPED if name == "n0" else FITS for name in names]
    assert verdicts_on(table, wanted) == expected


def test_an_exclusive_share_requires_idle_devices() -> None:
    assert verdicts_on(table_of(), pod(whole())) == [STOPPED, *[FITS] * (NODES - 1)]
    table = table_of()
    table.book("n1", (held(share("n1-0", 1, 0)),))
    assert verdicts_on(table, pod(whole()))[:3] == [STOPPED, FITS, FITS]
    assert verdicts_on(table, pod(whole(2)))[:3] == [STOPPED, STOPPED, FITS]


def test_offered_memory_is_of_devices_that_nothing_stops_before() -> None:
    table = table_of()
    table.set_health("n1", "n1-0", healthy=False)
    table.book("n1", (held(share("n1-1", 300, 0)),))
    table.book(
        "n2", (held(share("n2-0", 1, 0, exclusive=True), share("n2-1", 1, 0, exclusive=True)),)
    )
    view = view_of(table, [0, 1, 2, 3] * NODES)
    found = offered_mib(view, compile_request(pod(ask(mib=1))), 0)
    assert found is not None
    assert found[:4].tolist() == [900, 700, NO_MIB, MIB]
    two = compile_request(pod(container(ask(mib=1)), container(ask(mib=1), name="b")))
    assert offered_mib(view, two, 1) is None  # what the first container takes is not known


@pytest.mark.parametrize(
    "request_",
    [
        pod(container(whole()), container(whole(), name="b")),
        pod(ask(2), selectors={"nvidia": DeviceSelector(numa_bind=True)}),
        pod(ask(), device=("mutex",)),
        pod(ask(3)),
    ],
)
def test_requests_with_other_constraints_are_not_settled_by_ranks(request_: PodRequest) -> None:
    table = table_of()
    assert settled(view_of(table), compile_request(request_)) is None


def test_few_nodes_are_not_ranked() -> None:
    table = table_of(NODES - 1)
    assert settled(view_of(table), compile_request(pod(ask()))) is None
