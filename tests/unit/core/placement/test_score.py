# SPDX-License-Identifier: Apache-2.0
"""Node scores are 0..100, computed after placement over what the pod requests; never random."""

import numpy as np
import pytest

from hami_common.model.request import PodRequest
from hami_core.placement.score import priorities
from hami_core.placement.verdicts import Verdicts
from hami_core.table.block import Columns
from hami_core.table.table import DeviceTable
from tests.support.builders import (
    ask,
    container,
    device,
    devices,
    held,
    node_devices,
    pod,
    share,
    whole,
)


def scores(table: DeviceTable, request: PodRequest) -> dict[str, float]:
    names = table.nodes()
    scored = Verdicts(table).prioritize(request, names)
    return dict(zip(names, scored.scores.tolist(), strict=True))


def two_nodes() -> DeviceTable:
    """``busy`` has half of one of its two devices' memory booked, ``idle`` nothing."""
    table = DeviceTable()
    for node in ("busy", "idle"):
        table.upsert_node(devices(node, 2))
    table.book("busy", [held(share("busy-nvidia-0", 20_000))])
    return table


def test_binpack_prefers_the_fuller_node_and_spread_the_emptier() -> None:
    packed = scores(two_nodes(), pod(ask(mib=10_000), node="binpack"))
    spread = scores(two_nodes(), pod(ask(mib=10_000), node="spread"))
    assert packed["busy"] == pytest.approx(100 * (2 / 20 + 30_000 / 80_000) / 2)
    assert packed["idle"] == pytest.approx(100 * (1 / 20 + 10_000 / 80_000) / 2)
    assert spread == {name: 100 - value for name, value in packed.items()}


def test_only_requested_resources_count() -> None:
    table = two_nodes()
    table.book("idle", [held(share("idle-nvidia-0", 1, 90))])
    without = scores(table, pod(ask(mib=10_000)))
    with_core = scores(table, pod(ask(mib=10_000, core=10)))
    assert without["busy"] > without["idle"]
    assert with_core["busy"] < with_core["idle"]


def test_other_vendors_devices_do_not_count() -> None:
    table = two_nodes()
    before = scores(table, pod(ask(mib=10_000)))
    table.upsert_node(devices("busy", 4, vendor="ascend"))
    assert scores(table, pod(ask(mib=10_000))) == before
    both = scores(table, pod(container(ask(), ask(vendor="ascend"))))
    assert both["idle"] == 0


def test_node_that_does_not_fit_scores_zero() -> None:
    table = two_nodes()
    request = pod(ask(2, mib=30_000))
    assert scores(table, request)["busy"] == 0
    assert Verdicts(table).prioritize(request, ["busy", "unknown", "idle"]).scores[1] == 0


def test_pod_is_counted_at_its_peak() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 1))
    init = container(ask(mib=30_000), name="i", kind="init")
    app = container(ask(mib=10_000), name="a")
    assert scores(table, pod(init, app))["n"] == pytest.approx(100 * (1 / 10 + 0.75) / 2)
    assert scores(table, pod(app, app))["n"] == pytest.approx(100 * (2 / 10 + 0.5) / 2)


def test_pod_is_counted_at_its_busiest_moment() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 2))
    init = container(ask(2, mib=30_000), name="i", kind="init")
    sidecar = container(ask(mib=5_000), name="s", kind="sidecar")
    app = container(ask(mib=10_000), name="a")
    assert scores(table, pod(init, sidecar, app))["n"] == pytest.approx(100 * (2 / 20 + 0.75) / 2)
    late = scores(table, pod(sidecar, init, app))["n"]
    assert late == pytest.approx(100 * (3 / 20 + 65 / 80) / 2)


def test_percentage_is_counted_as_of_the_smallest_device() -> None:
    table = DeviceTable()
    big, small = device("b", memory_mib=80_000), device("s", index=1, memory_mib=20_000)
    table.upsert_node(node_devices("n", [big, small]))
    table.book("n", [held(share("b", 1))])
    score = scores(table, pod(ask(pct=50)))["n"]
    assert score == pytest.approx(100 * (2 / 20 + 10_001 / 100_000) / 2)


def test_full_node_scores_a_hundred_and_never_more() -> None:
    table = DeviceTable()
    table.upsert_node(node_devices("n", [device("x", slots=1)]))
    assert scores(table, pod(whole()))["n"] == 100
    table.book("n", [held(share("x", 90_000))])
    assert scores(table, pod(whole()))["n"] == 0


def test_equal_nodes_score_equally() -> None:
    table = DeviceTable()
    for i in range(5):
        table.upsert_node(devices(f"n{i}", 8))
    assert len(set(scores(table, pod(ask(2, pct=30, core=10))).values())) == 1


def given(scores: list[float], names: list[str]) -> list[int]:
    def first(places: Columns, count: int) -> Columns:
        assert count == 1
        return np.array([min(places.tolist(), key=names.__getitem__)])

    found: list[int] = priorities(np.array(scores), first, highest=10).tolist()
    return found


def test_best_node_alone_gets_the_highest_priority() -> None:
    assert given([50.0, 50.2, 0.0, 25.0], ["a", "b", "c", "d"]) == [8, 10, 0, 4]


def test_first_by_name_wins_among_equals() -> None:
    assert given([1.0, 1.0, 1.0], ["c", "a", "b"]) == [9, 10, 9]
    assert given([0.0, 0.0], ["b", "a"]) == [0, 10]
    assert given([], []) == []
