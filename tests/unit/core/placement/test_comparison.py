# SPDX-License-Identifier: Apache-2.0
"""Terms of the score in the record of a placed pod: they add up, and name what decided."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.events.decision import NodeScore, ScoreDetail
from hami_common.model.placement import Placement
from hami_common.model.request import DeviceSelector, PodRequest
from hami_core.placement.pick import pick
from hami_core.placement.verdicts import Scored, Verdicts
from hami_core.table.table import DeviceTable
from tests.support import builders

NODES = ("a", "b")


def best_of(scored: Scored) -> list[NodeScore]:
    return [NodeScore(node=node, score=score) for node, score in scored.best(2)]


def table_of(used: dict[str, int]) -> DeviceTable:
    """Two nodes with two devices each; ``used``: memory booked by device."""
    table = DeviceTable()
    for node in NODES:
        devices = [
            builders.device(f"{node}-{n}", index=n, memory_mib=1000, slots=4) for n in range(2)
        ]
        links = [(f"{node}-0", f"{node}-1", 10)]
        table.upsert_node(builders.node_devices(node, devices, links=links))
    for uuid, mib in used.items():
        table.book(uuid[0], (builders.held(builders.share(uuid, mib)),))
    return table


def compared(table: DeviceTable, request: PodRequest, near: tuple[str, ...] = ()) -> ScoreDetail:
    verdicts = Verdicts(table)
    fitting = verdicts.filter(request, NODES).feasible
    scored = verdicts.prioritize(request, fitting, near=near)
    lazy = verdicts.comparison(request, best_of(scored), near=near)
    assert lazy is not None
    found = lazy.made()
    assert found.nodes[0].node == scored.best(1)[0][0]
    return found


def test_fuller_node_wins_by_its_fill() -> None:
    found = compared(table_of({"b-0": 500}), builders.pod(builders.ask(mib=200, core=40)))
    assert (found.node_policy, found.device_policy, found.decided_by) == (
        "binpack",
        "spread",
        "fill",
    )
    best, other = found.nodes
    assert (best.node, best.slot, best.core, best.memory) == ("b", 0.25, 0.2, 0.35)
    assert (other.node, other.slot, other.core, other.memory) == ("a", 0.125, 0.2, 0.1)
    chosen, next_ = found.devices
    assert (chosen.uuid, chosen.slot, chosen.core, chosen.memory) == ("b-1", 0.25, 0.4, 0.2)
    assert (next_.uuid, next_.slot, next_.core, next_.memory) == ("b-0", 0.5, 0.4, 0.7)


def test_equal_nodes_are_taken_by_name_and_a_single_one_needs_no_reason() -> None:
    request = builders.pod(builders.ask(mib=200))
    assert compared(table_of({}), request).decided_by == "name"
    alone = compared(table_of({"a-0": 900, "a-1": 900}), request)
    assert ([one.node for one in alone.nodes], alone.decided_by) == (["b"], "")


def test_nearness_to_the_gang_outweighs_the_fill() -> None:
    found = compared(table_of({"b-0": 500}), builders.pod(builders.ask(mib=200)), near=("a",))
    assert (found.nodes[0].node, found.decided_by) == ("a", "topology")
    assert found.nodes[0].topology > found.nodes[1].topology


def test_links_are_compared_where_the_pod_prefers_them() -> None:
    request = builders.pod(builders.ask(mib=200), device=("topology-aware", "binpack"))
    table = DeviceTable()
    devices = [builders.device(f"a-{n}", index=n, memory_mib=1000) for n in range(3)]
    links = [("a-0", "a-1", 10), ("a-1", "a-2", 1)]
    table.upsert_node(builders.node_devices("a", devices, links=links))
    verdicts = Verdicts(table)
    found = verdicts.comparison(request, best_of(verdicts.prioritize(request, ["a"])))
    assert found is not None
    chosen, next_ = found.made().devices
    assert (chosen.uuid, chosen.topology) == ("a-2", 1.0)
    assert next_.topology == 10.0


def test_comparison_is_of_the_state_at_the_decision() -> None:
    request = builders.pod(
        builders.ask(mib=200), selector=DeviceSelector(allow_uuids=("a-1",), deny_uuids=("b-0",))
    )
    table = table_of({})
    verdicts = Verdicts(table)
    lazy = verdicts.comparison(request, best_of(verdicts.prioritize(request, ["a"])))
    table.book("a", (builders.held(builders.share("a-1", 700)),))
    table.remove_node("b")
    assert lazy is not None
    found = lazy.made()
    assert found.nodes[0].memory == 0.1
    assert [(one.uuid, one.memory) for one in found.devices] == [("a-1", 0.2)]


def test_no_node_has_no_comparison() -> None:
    request = builders.pod(builders.ask(mib=2000))
    verdicts = Verdicts(table_of({}))
    assert verdicts.comparison(request, best_of(verdicts.prioritize(request, NODES))) is None


@settings(max_examples=40, deadline=None)
@given(
    used=st.dictionaries(st.sampled_from(("a-0", "a-1", "b-0", "b-1")), st.integers(1, 900)),
    mib=st.integers(1, 600),
    core=st.sampled_from((0, 30)),
    policy=st.sampled_from(("binpack", "spread")),
)
def test_terms_give_the_score_and_the_device_is_the_one_picked(
    used: dict[str, int], mib: int, core: int, policy: str
) -> None:
    table = table_of(used)
    request = builders.pod(builders.ask(mib=mib, core=core), node=policy)  # type: ignore[arg-type]  # one of the two
    if not Verdicts(table).filter(request, NODES).feasible:
        return
    found = compared(table, request)
    for one in found.nodes:
        parts = [one.slot, one.memory, *([one.core] if core else [])]
        fill = 100 * sum(parts) / len(parts)
        expected = fill if policy == "binpack" else 100 - fill
        assert abs(one.score - expected) < 0.02
    placed = pick(table, request, found.nodes[0].node)
    assert isinstance(placed, Placement)
    assert placed.containers[0].shares[0].uuid == found.devices[0].uuid
