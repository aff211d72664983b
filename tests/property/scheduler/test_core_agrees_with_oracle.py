# SPDX-License-Identifier: Apache-2.0
"""The columns decide as the plain loops do, on any table, request and policy, after any event."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.model.placement import ContainerShares, Placement
from hami_common.model.request import PodRequest
from hami_core.placement import levels
from hami_core.placement.pick import pick, satisfies
from hami_core.placement.reasons import CLASSES_SHOWN, NodeExplanation, explain
from hami_core.placement.verdicts import Verdicts
from hami_core.table import block
from hami_core.table.table import DeviceTable
from tests.property.scheduler import clusters
from tests.support.oracle import Oracle

ASKED = ("unknown", *clusters.NODES)


class Pair:
    """A table and an oracle that receive the same events."""

    def __init__(self) -> None:
        self.table = DeviceTable()
        self.oracle = Oracle()
        self.verdicts = Verdicts(self.table)
        self.held: list[tuple[str, tuple[ContainerShares, ...]]] = []

    def happen(self, data: st.DataObject) -> None:
        """One random event."""
        node = data.draw(st.sampled_from(clusters.NODES))
        vendor = data.draw(st.sampled_from(clusters.VENDORS))
        what = data.draw(
            st.sampled_from(("inventory", "book", "book", "unbook", "alive", "health", "remove"))
        )
        if what == "inventory":
            message = data.draw(clusters.inventories(node, vendor))
            self.table.upsert_node(message)
            self.oracle.upsert_node(message)
        elif what == "book":
            self.book(node, data.draw(clusters.holdings(node)))
        elif what == "unbook" and self.held:
            node, containers = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.table.unbook(node, containers)
            self.oracle.unbook(node, containers)
        elif what == "alive":
            alive = data.draw(st.booleans())
            self.table.set_node_alive(node, vendor, alive=alive)
            self.oracle.set_node_alive(node, vendor, alive=alive)
        elif what == "health":
            uuid = data.draw(st.sampled_from(clusters.uuids(node, vendor)))
            healthy = data.draw(st.booleans())
            self.table.set_health(node, uuid, healthy=healthy)
            self.oracle.set_health(node, uuid, healthy=healthy)
        elif what == "remove":
            self.table.remove_node(node)
            self.oracle.remove_node(node)

    def book(self, node: str, containers: tuple[ContainerShares, ...]) -> None:
        """Book shares for a pod."""
        self.table.book(node, containers)
        self.oracle.book(node, containers)
        self.held.append((node, containers))

    def start(self, data: st.DataObject) -> None:
        """Every node has devices of some vendor."""
        for node in clusters.NODES:
            for vendor in clusters.VENDORS[: data.draw(st.integers(1, 2))]:
                message = data.draw(clusters.inventories(node, vendor))
                self.table.upsert_node(message)
                self.oracle.upsert_node(message)

    def agree(self, request: PodRequest) -> None:
        """Compare both for ``request``, in every respect."""
        filtered = self.verdicts.filter(request, ASKED)
        want_codes = {node: self.oracle.code(request, node) for node in ASKED}
        assert filtered.feasible == [node for node in ASKED if want_codes[node] is None]
        classes = filtered.classes()
        codes = {node: group.code for group in classes for node in group.nodes}
        assert codes == {node: code for node, code in want_codes.items() if code}
        texts = filtered.refused()
        assert texts.keys() == codes.keys()
        if len(classes) <= CLASSES_SHOWN:
            assert all(texts[node].startswith(code) for node, code in codes.items())
        scores = self.verdicts.prioritize(request, ASKED).scores.tolist()
        assert scores == self.oracle.scores(request, ASKED)
        for node in ASKED:
            picked = pick(self.table, request, node)
            want = self.oracle.pick(request, node)
            if isinstance(picked, Placement):
                assert picked == want
                assert satisfies(self.table, request, node, picked.containers)
                assert self.table.shortfall(node, picked.containers) == ()
            else:
                assert want is None
                assert picked.code == want_codes[node]
            self.agree_explained(request, node, explain(self.table, request, node))

    def agree_explained(self, request: PodRequest, node: str, explained: NodeExplanation) -> None:
        """Compare the explanation alone with the verdict, and each device's answer with the
        oracle's.
        """
        code = self.oracle.code(request, node)
        asked = len(self.oracle.steps(request))  # several partitions are as many steps
        told = len(explained.steps) == asked and all(
            step.fitting() >= step.count for step in explained.steps
        )
        assert told == explained.fits == (code is None)
        if explained.fits:
            picked = self.oracle.pick(request, node)
            assert picked is not None
            taken = sorted(d.uuid for s in explained.steps for d in s.devices if d.taken)
            assert taken == sorted(s.uuid for c in picked.containers for s in c.shares)
            return
        assert explained.refusal is not None
        assert explained.refusal.code == code
        if explained.steps:
            last = explained.steps[-1]
            assert last.fitting() < last.count
            assert [(d.uuid, d.code, d.wanted, d.free) for d in last.devices] == [
                (v.uuid, v.code, v.wanted, v.free)
                for v in self.oracle.tried(request, node).verdicts
            ]


@settings(max_examples=40)
@given(st.data())
def test_core_and_oracle_agree_on_any_cluster(data: st.DataObject) -> None:
    pair = Pair()
    pair.start(data)
    for _ in range(data.draw(st.integers(0, 6))):
        node = data.draw(st.sampled_from(clusters.NODES))
        pair.book(node, data.draw(clusters.holdings(node)))
    pair.table.check()
    for _ in range(2):
        pair.agree(data.draw(clusters.pods()))


@pytest.fixture(autouse=True, scope="module")
def columns_are_worked_out_one_by_one() -> Iterator[None]:
    """Evaluate each node, however few there are: by default so few are not ranked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "PART_WORTH_IT", 1)
        patch.setattr(levels, "NODES_WORTH_IT", 1)
        yield


@settings(max_examples=20)
@given(st.data())
def test_answers_kept_from_before_stay_right_through_any_events(data: st.DataObject) -> None:
    pair = Pair()
    pair.start(data)
    requests = [data.draw(clusters.pods(f"uid-{i}")) for i in range(2)]
    for _ in range(6):
        pair.agree(data.draw(st.sampled_from(requests)))
        for _ in range(data.draw(st.integers(1, 3))):
            pair.happen(data)
        pair.table.check()


@settings(max_examples=30)
@given(st.data())
def test_pods_placed_one_after_another_never_exceed_a_device(data: st.DataObject) -> None:
    pair = Pair()
    pair.start(data)
    for i in range(6):
        request = data.draw(clusters.pods(f"uid-{i}"))
        feasible = pair.verdicts.filter(request, clusters.NODES).feasible
        if not feasible:
            continue
        node = data.draw(st.sampled_from(feasible))
        picked = pick(pair.table, request, node)
        assert isinstance(picked, Placement)
        assert pair.table.book(node, picked.containers) == ()
        pair.oracle.book(node, picked.containers)
        pair.table.check()
        pair.agree(request)
