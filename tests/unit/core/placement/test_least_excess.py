# SPDX-License-Identifier: Apache-2.0
"""Shares go where they exceed the request least: devices of any size first, then partitions."""

from collections.abc import Sequence

import pytest

from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.model.request import DevicePolicy, DeviceSelector, PodRequest
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.pick import pick
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, container, device, held, node_devices, pod, share
from tests.support.mig import facts_of

README = ask(mib=3000, core=30)
"""The pod of HAMi's README."""


def mig_card(chip: str, uuid: str, index: int = 0) -> Device:
    facts = facts_of(chip)
    return device(
        uuid,
        index=index,
        type=facts.type,
        memory_mib=facts.memory_mib,
        mode="mig",
        partitions=facts.partitions,
        resources=facts.resources,
    )


def table_of(**nodes: Sequence[Device]) -> DeviceTable:
    table = DeviceTable()
    for name, cards in nodes.items():
        table.upsert_node(node_devices(name.replace("_", "-"), cards))
    return table


def soft(node: str, count: int) -> list[Device]:
    return [device(f"{node}-{i}", index=i, memory_mib=40_960) for i in range(count)]


def mig(node: str, count: int, chip: str = "H200-141") -> list[Device]:
    return [mig_card(chip, f"{node}-{i}", i) for i in range(count)]


def place(table: DeviceTable, request: PodRequest) -> tuple[str, tuple[Share, ...]]:
    """Place the pod as the scheduler does, and book it; ("", ()) where no node fits."""
    verdicts = Verdicts(table)
    left = verdicts.filter(request, table.nodes()).feasible
    if not left:
        return "", ()
    node = verdicts.prioritize(request, left).best(1)[0][0]
    (alone,) = verdicts.shortlist(request, NodeNames.of(left), 1).strings()
    assert verdicts.prioritize(request, [alone, node]).scores.tolist()[0] == pytest.approx(
        verdicts.prioritize(request, [alone, node]).scores.tolist()[1], abs=1e-3
    )
    picked = pick(table, request, node)
    assert isinstance(picked, Placement)
    table.book(node, picked.containers)
    return node, tuple(s for c in picked.containers for s in c.shares)


def stock() -> DeviceTable:
    return table_of(a_mig=mig("a-mig", 2), b_soft=soft("b-soft", 8))


def test_pod_of_the_readme_never_takes_a_mig_card_while_soft_ones_have_capacity() -> None:
    table = stock()
    placed = [place(table, pod(README, uid=f"u{i}")) for i in range(6)]
    assert {node for node, _ in placed} == {"b-soft"}
    assert {(s.memory_mib, s.core_pct, s.profile) for _, shares in placed for s in shares} == {
        (3000, 30, "")
    }


def test_pods_of_the_sharing_example_share_soft_cards() -> None:
    table = stock()
    for number, (memory_pct, core_pct) in enumerate(((40, 60), (60, 40))):
        node, (one,) = place(table, pod(ask(pct=memory_pct, core=core_pct), uid=f"u{number}"))
        assert (node, one.profile, one.core_pct) == ("b-soft", "", core_pct)


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize("chain", [("spread",), ("binpack",), ("topology-aware",), ("numa",)])
def test_within_a_node_soft_cards_come_first(policy: str, chain: tuple[DevicePolicy, ...]) -> None:
    cards = [*mig("n", 1), device("n-soft", index=1, memory_mib=40_960, numa=1)]
    links = [("n-0", "n-soft", 10)]
    table = DeviceTable()
    table.upsert_node(node_devices("n", cards, links=links))
    request = pod(README, node="spread" if policy == "spread" else "binpack", device=chain)
    assert [s.uuid for s in place(table, request)[1]] == ["n-soft"]


def test_partitions_are_taken_when_no_soft_card_has_capacity_least_excess_first() -> None:
    table = table_of(
        a_h200=mig("a-h200", 1),
        b_a100=mig("b-a100", 4, "A100-40"),
        c_soft=[device("c-soft-0", memory_mib=2000)],
    )
    node, (one,) = place(table, pod(README))
    assert (node, one.profile) == ("b-a100", "3g.20gb")
    node, (one,) = place(table, pod(ask(mib=60_000), uid="u2"))
    assert (node, one.profile) == ("a-h200", "3g.71gb")


def test_equal_excess_leaves_the_choice_to_the_policy() -> None:
    table = table_of(a=mig("a", 1), b=mig("b", 1))
    busy: ContainerShares = held(share("b-0", 16_384, 12, profile="1g.18gb", start=6))
    table.book("b", [busy])
    selector = DeviceSelector(modes=("mig",))
    assert place(table, pod(ask(mib=1000), selector=selector))[0] == "b"
    assert place(table, pod(ask(mib=1000), selector=selector, node="spread"))[0] == "a"


def test_named_mode_still_gets_a_partition() -> None:
    table = stock()
    node, (one,) = place(table, pod(README, selector=DeviceSelector(modes=("mig",))))
    assert (node, one.profile) == ("a-mig", "3g.71gb")


def test_excess_of_all_containers_counts() -> None:
    """Each node has a soft card for the first container; the second fits a partition only."""
    table = table_of(
        a=[*soft("a", 1), mig_card("H200-141", "a-mig", 1)],
        b=[*soft("b", 1), mig_card("A100-80", "b-mig", 1)],
    )
    request = pod(container(ask(mib=1000), name="x"), container(ask(mib=60_000), name="y"))
    node, shares = place(table, request)
    assert (node, sorted(s.profile for s in shares)) == ("a", ["", "3g.71gb"])
