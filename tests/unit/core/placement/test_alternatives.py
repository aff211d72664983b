# SPDX-License-Identifier: Apache-2.0
"""Pods with alternatives: a node fits that fits one of them, and earlier ones are preferred."""

from msgspec.structs import replace

from hami_common.events.decision import NodeScore
from hami_common.model.placement import Placement
from hami_common.model.request import Choice, PodRequest, options
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import Append
from hami_core.placement.pick import pick, satisfies
from hami_core.placement.reasons import NodeRefusal
from hami_core.placement.verdicts import Verdicts
from hami_core.quota.resourcequota import Resource
from hami_core.quota.verdicts import allowed
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, devices, held, pod, share


def neutral(*mib: int, vendors: tuple[str, ...] = ("nvidia", "ascend")) -> PodRequest:
    """A pod that asks for this memory of the first vendor, else of the next."""
    first, *rest = (
        pod(ask(mib=one, vendor=vendor)) for one, vendor in zip(mib, vendors, strict=True)
    )
    others = tuple(Choice(containers=one.containers, selectors=one.selectors) for one in rest)
    return replace(first, others=others)


def table_of(**vendor_by_node: str) -> DeviceTable:
    table = DeviceTable()
    for node, vendors in vendor_by_node.items():
        for vendor in vendors.split("_"):
            table.upsert_node(devices(node, 2, vendor=vendor))
    return table


def vendors_of(found: Placement | NodeRefusal) -> set[str]:
    assert isinstance(found, Placement), found
    return {one.vendor for container in found.containers for one in container.shares}


def test_options_are_requests_without_others_in_order() -> None:
    request = neutral(1000, 2000)
    first, second = options(request)
    assert [one.containers[0].requests[0].vendor for one in (first, second)] == ["nvidia", "ascend"]
    assert (first.uid, first.others, second.others) == (request.uid, (), ())
    plain = pod(ask())
    assert options(plain) == (plain,)


def test_nodes_of_either_vendor_fit_and_the_first_is_preferred() -> None:
    table = table_of(a="ascend", b="nvidia", c="nvidia_ascend", d="hygon")
    verdicts = Verdicts(table)
    request = neutral(1000, 1000)
    filtered = verdicts.filter(request, ["a", "b", "c", "d"])
    assert filtered.feasible == ["a", "b", "c"]
    assert set(filtered.refused()) == {"d"}
    scores = verdicts.prioritize(request, ["a", "b", "c", "d"]).scores
    assert scores[3] == 0
    assert 0 < scores[0] < min(scores[1], scores[2])
    assert list(verdicts.shortlist(request, filtered.left, 2).strings()) == ["b", "c"]
    assert [vendors_of(pick(table, request, node)) for node in "abc"] == [
        {"ascend"},
        {"nvidia"},
        {"nvidia"},
    ]


def test_next_alternative_is_taken_where_the_first_is_used_up() -> None:
    table = table_of(c="nvidia_ascend")
    table.book("c", [held(share(f"c-nvidia-{i}", 40_000)) for i in range(2)])
    request = neutral(30_000, 10_000)
    verdicts = Verdicts(table)
    assert verdicts.filter(request, ["c"]).feasible == ["c"]
    assert verdicts.prioritize(request, ["c"]).scores[0] > 0
    assert vendors_of(pick(table, request, "c")) == {"ascend"}


def test_refusals_are_those_of_the_vendor_that_a_node_has() -> None:
    table = table_of(a="ascend", b="nvidia")
    table.book("a", [held(share(f"a-ascend-{i}", 40_000, vendor="ascend")) for i in range(2)])
    request = neutral(90_000, 30_000)
    verdicts = Verdicts(table)
    filtered = verdicts.filter(request, ["a", "b", "x"])
    assert filtered.feasible == []
    texts = filtered.refused()
    assert "90000" in texts["b"]
    assert "30000" in texts["a"]
    assert sum(one.count for one in filtered.classes()) == 3
    assert len(verdicts.details(request, filtered, lambda _: []).nodes()) >= 1
    assert isinstance(pick(table, request, "a"), NodeRefusal)


def test_the_first_alternative_with_devices_of_a_node_refuses_it() -> None:
    table = table_of(a="nvidia", b="nvidia_ascend", c="ascend", d="hygon")
    request = neutral(90_000, 80_000, 70_000, vendors=("nvidia", "nvidia", "ascend"))
    texts = Verdicts(table).filter(request, ["a", "b", "c", "d"]).refused()
    assert "90000" in texts["a"]
    assert "90000" in texts["b"]
    assert "70000" in texts["c"]
    assert texts.keys() == set("abcd")


def test_comparison_is_of_the_nodes_with_the_winners_alternative() -> None:
    table = table_of(a="ascend", b="nvidia", c="nvidia")
    verdicts = Verdicts(table)
    request = neutral(1000, 1000)
    names = ["a", "b", "c"]
    filtered = verdicts.filter(request, names)
    assert filtered.feasible == names
    scored = verdicts.prioritize(request, names)
    best = [NodeScore(node=node, score=value) for node, value in scored.best(3)]
    found = verdicts.comparison(request, best)
    assert found is not None


def test_reservation_that_is_one_of_the_alternatives_is_used_again() -> None:
    table = table_of(a="ascend")
    ledger = Ledger(table)
    request = neutral(1000, 2000)
    plan = ledger.plan_bind(request, "a", allocation_id="x", now_s=1.0)
    assert isinstance(plan, Append)
    record = plan.under(None, sku="s-8g@1", service_class="spot").record
    assert (record.sku, record.service_class) == ("s-8g@1", "spot")
    assert satisfies(table, request, "a", record.containers)
    assert not satisfies(table, neutral(1000, 3000), "a", record.containers)


def test_quota_of_one_vendor_leaves_the_nodes_of_the_other() -> None:
    table = table_of(a="ascend", b="nvidia", c="nvidia_ascend")
    request = neutral(1000, 1000)
    filtered = Verdicts(table).filter(request, ["a", "b", "c"])

    def ask_quota(wanted: object) -> NodeRefusal | None:
        assert isinstance(wanted, dict)
        if Resource("nvidia", "memory_mib") in wanted:
            return NodeRefusal(code="ResourceQuotaNotFit", text="quota of nvidia")
        return None

    answer = allowed(table, request, None, filtered, ask_quota)
    assert list(answer.left.strings()) == ["a", "c"]
    assert [(refusal.text, len(places)) for refusal, places in answer.refused] == [
        ("quota of nvidia", 1)
    ]
    everything = allowed(table, request, None, filtered, lambda _: None)
    assert list(everything.left.strings()) == ["a", "b", "c"]
    refusal = NodeRefusal(code="ResourceQuotaNotFit", text="all")
    nothing = allowed(table, request, None, filtered, lambda _: refusal)
    assert len(nothing.left) == 0
    assert sum(len(places) for _, places in nothing.refused) == 3
