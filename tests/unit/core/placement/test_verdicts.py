# SPDX-License-Identifier: Apache-2.0
"""Filter returns all nodes that fit, in the order named, and follows every change of the table."""

import random
from collections import Counter

import pytest

from hami_common.events.decision import NODES_LISTED
from hami_common.model.request import DeviceSelector
from hami_core.placement import verdicts as verdicts_module
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, container, devices, held, pod, share


def table_of(count: int, width: int = 2) -> DeviceTable:
    table = DeviceTable()
    for i in range(count):
        table.upsert_node(devices(f"n{i}", width))
    return table


def test_all_feasible_nodes_are_returned_in_the_order_named() -> None:
    verdicts = Verdicts(table_of(6))
    names = ["n4", "n0", "n5", "n1"]
    filtered = verdicts.filter(pod(ask()), names)
    assert filtered.feasible == names
    assert filtered.refused() == {}
    assert filtered.refused() == {}


def test_nodes_of_every_width_are_evaluated() -> None:
    table = DeviceTable()
    for i in range(1, 12):
        table.upsert_node(devices(f"n{i}", i))
    names = table.nodes()
    feasible = Verdicts(table).filter(pod(ask(5)), names).feasible
    assert feasible == sorted(f"n{i}" for i in range(5, 12))


def test_unknown_nodes_are_refused_and_names_may_repeat() -> None:
    verdicts = Verdicts(table_of(2))
    filtered = verdicts.filter(pod(ask()), ["x", "n0", "n0", "y"])
    assert filtered.feasible == ["n0", "n0"]
    assert set(filtered.refused()) == {"x", "y"}
    refused = verdicts.filter(pod(ask(3)), ["n0", "n0"])
    assert refused.feasible == []
    assert set(refused.refused()) == {"n0"}


def test_no_nodes_named_is_no_nodes_answered() -> None:
    verdicts = Verdicts(table_of(2))
    assert verdicts.filter(pod(ask()), []).feasible == []
    assert verdicts.prioritize(pod(ask()), []).scores.tolist() == []
    assert Verdicts(DeviceTable()).filter(pod(ask()), ["n"]).feasible == []


def test_pod_without_a_request_fits_every_node() -> None:
    verdicts = Verdicts(table_of(1))
    assert verdicts.filter(pod(), ["n0", "x"]).feasible == ["n0", "x"]
    assert verdicts.prioritize(pod(), ["n0", "x"]).scores.tolist() == [0.0, 0.0]


def test_answer_follows_bookings_of_one_node_among_many() -> None:
    table = table_of(40, width=1)
    verdicts = Verdicts(table)
    names = table.nodes()
    request = pod(ask(mib=30_000))
    assert len(verdicts.filter(request, names).feasible) == 40
    taken = [held(share("n7-nvidia-0", 20_000))]
    table.book("n7", taken)
    assert set(verdicts.filter(request, names).refused()) == {"n7"}
    assert verdicts.prioritize(request, names).scores[names.index("n7")] == 0
    table.unbook("n7", taken)
    assert len(verdicts.filter(request, names).feasible) == 40
    assert len(set(verdicts.prioritize(request, names).scores)) == 1


def test_nodes_that_need_the_second_attempt_are_feasible_and_scored_like_others() -> None:
    table = table_of(6)
    for i in (1, 4):
        table.book(f"n{i}", [held(share(f"n{i}-nvidia-0", 20_000))])
    table.upsert_node(devices("n5", 1))
    verdicts, names = Verdicts(table), [f"n{i}" for i in range(6)]
    small = container(ask(mib=10_000), name="small")
    large = container(ask(mib=40_000), name="large")
    init = container(ask(2, mib=100), name="init", kind="init")
    for request in (pod(small, large), pod(init, small, large)):
        filtered = verdicts.filter(request, names)
        assert filtered.feasible == ["n0", "n1", "n2", "n3", "n4"]
        scores = verdicts.prioritize(request, names).scores
        assert scores[1] == scores[4] > scores[0] == scores[2] == scores[3] > scores[5] == 0


def test_no_feasible_node_gives_no_score() -> None:
    verdicts = Verdicts(table_of(2))
    request = pod(container(ask(3), name="i", kind="init"), container(ask(), name="a"))
    assert verdicts.prioritize(request, ["n0", "n1"]).scores.tolist() == [0.0, 0.0]
    request = pod(container(ask(mib=50_000), name="i", kind="init"), container(ask(), name="a"))
    assert verdicts.prioritize(request, ["n0", "n1"]).scores.tolist() == [0.0, 0.0]


def test_answer_follows_added_and_removed_nodes() -> None:
    table = table_of(40)
    verdicts = Verdicts(table)
    request = pod(ask(2))
    names = [f"n{i}" for i in range(45)]
    assert len(verdicts.filter(request, names).refused()) == 5
    table.upsert_node(devices("n44", 2))
    assert set(verdicts.filter(request, names).refused()) == {"n40", "n41", "n42", "n43"}
    assert sum(score > 0 for score in verdicts.prioritize(request, names).scores) == 41
    table.remove_node("n3")
    assert "n3" in verdicts.filter(request, names).refused()
    assert sum(score > 0 for score in verdicts.prioritize(request, names).scores) == 40


def test_list_of_names_that_the_caller_changes_is_read_again() -> None:
    verdicts = Verdicts(table_of(2))
    names = ["n0"]
    assert verdicts.filter(pod(ask()), names).feasible == ["n0"]
    names[0] = "n1"
    assert verdicts.filter(pod(ask()), names).feasible == ["n1"]


def test_old_plans_are_dropped_and_computed_again() -> None:
    verdicts = Verdicts(table_of(2))
    many = verdicts_module.PLANS_KEPT + 10
    for round_ in range(2):
        for i in range(1, many):
            assert verdicts.filter(pod(ask(mib=i)), ["n0", "n1"]).feasible == ["n0", "n1"], round_


def test_pods_of_one_template_share_an_answer_whatever_they_are_called() -> None:
    table = table_of(2)
    verdicts = Verdicts(table)
    for i in range(3):
        request = pod(container(ask(mib=50_000), name=f"c{i}"), uid=f"u{i}", name=f"p{i}")
        other = container(ask(), name="x")
        assert verdicts.filter(request, ["n0"]).feasible == []
        text = verdicts.filter(pod(request.containers[0], other), ["n0"]).refused()["n0"]
        assert f"c{i}" in text


def test_recorded_classes_list_few_nodes_and_count_all() -> None:
    table = table_of(100)
    selector = DeviceSelector(allow_types=("H100",))
    names = table.nodes()
    (group,) = Verdicts(table).filter(pod(ask(), selector=selector), names).classes()
    assert group.count == 100
    assert group.nodes == tuple(sorted(names)[:NODES_LISTED])


@pytest.mark.parametrize("seed", range(40))
def test_shortlist_is_of_the_best_and_does_not_depend_on_the_order_of_names(seed: int) -> None:
    chance = random.Random(seed)
    table, is_mixed = DeviceTable(), seed % 2
    for i in range(chance.randint(2, 120)):
        width = chance.choice([1, 2, 4]) if is_mixed else 2
        memory_mib = chance.choice([8_000, 40_000]) if is_mixed else 40_000
        table.upsert_node(devices(f"n{i}", width, memory_mib=memory_mib))
        if is_mixed and chance.random() < 0.3:
            table.upsert_node(devices(f"n{i}", 1, vendor="hygon"))
    verdicts = Verdicts(table)
    wanted = chance.choice([ask(mib=500), ask(pct=10, core=5), ask()])
    request = pod(wanted, node="binpack" if chance.random() < 0.5 else "spread")
    for turn in range(3):
        names = table.nodes()
        for name in chance.sample(names, len(names) // (turn + 2)):
            mib = chance.choice([1000, 2000, 3000])
            table.book(name, [held(share(f"{name}-nvidia-0", mib))])
        table.upsert_node(devices(f"late{turn}", 2))
        names = verdicts.filter(request, table.nodes()).feasible
        count = chance.randint(1, len(names))
        lists = []
        for _ in range(3):
            chance.shuffle(names)
            scores = verdicts.prioritize(request, names).scores.tolist()
            short = list(verdicts.shortlist(request, NodeNames.of(names), count).strings())
            score_of = dict(zip(names, scores, strict=True))
            assert short == [name for name in names if name in short]
            assert len(short) == count
            worst = min(score_of[name] for name in short) + 1e-3
            assert all(score_of[name] <= worst for name in names if name not in short)
            assert max(score_of[name] for name in short) == pytest.approx(max(scores), abs=1e-3)
            lists.append(set(short))
        assert lists[0] == lists[1] == lists[2]


def test_equal_nodes_of_a_shortlist_are_not_neighbors_by_name() -> None:
    table = DeviceTable()
    for i in range(900):
        table.upsert_node(devices(f"zone-{i // 300}-node-{i:03d}", 2))
    names = table.nodes()
    short = Verdicts(table).shortlist(pod(ask()), NodeNames.of(names), 100)
    per_zone = Counter(name[:6] for name in short.strings())
    assert len(per_zone) == 3
    assert min(per_zone.values()) >= 25
