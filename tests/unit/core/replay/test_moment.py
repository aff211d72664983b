# SPDX-License-Identifier: Apache-2.0
"""A recorded refusal is computed again from events, and equals the record byte for byte."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.decision import DecisionRecord, RefusedNode
from hami_common.events.inventory import NodeDevices
from hami_common.model.request import Choice, PodRequest
from hami_core.core import Core
from hami_core.ledger import stimuli
from hami_core.ledger.ledger import Ledger
from hami_core.placement.nodenames import NodeNames
from hami_core.quota.accounts import QuotaLedger
from hami_core.replay.arrivals import Put
from hami_core.replay.moment import filter_at, moment_of
from hami_core.table.inventory import Inventory
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, device, devices, node_devices, pod, whole


class Fleet:
    """A core whose ledger records and devices are kept as stored events."""

    def __init__(self) -> None:
        table = DeviceTable()
        self.core = Core(
            ledger=Ledger(table, writer="s", lease_s=30.0, fence_delay_s=3.0),
            inventory=Inventory(table, heartbeat_timeout_s=15.0),
            quota=QuotaLedger(),
        )
        self.now_s = 1000.0
        self.seq = self.revision = 0
        self.records: list[tuple[int, AllocationRecord]] = []
        self.puts: list[Put] = []
        self.core.answer(stimuli.FeedSynced(now_s=self.now_s))
        self.core.answer(stimuli.Repaired(now_s=self.now_s))

    def put(self, devices: NodeDevices) -> None:
        self.now_s += 1
        self.revision += 1
        put = stimuli.DevicesPut(devices=devices, revision=self.revision, now_s=self.now_s)
        self.core.answer(put)
        self.puts.append(Put(time_s=self.now_s, devices=devices, revision=self.revision))

    def bind(self, request: PodRequest, node: str, *, is_delivered: bool = True) -> bool:
        self.now_s += 1
        planned = stimuli.BindPlanned(
            request=request, node=node, allocation_id=f"id-{request.uid}", now_s=self.now_s
        )
        plan = self.core.answer(planned)
        if isinstance(plan, stimuli.Append):
            self._append(plan, is_delivered=is_delivered)
        return isinstance(plan, stimuli.Append)

    def release(self, uid: str) -> None:
        self.now_s += 1
        (holding,) = self.core.ledger.holdings_of_pod(uid)
        plan = self.core.answer(
            stimuli.ReleasePlanned(holding=holding, now_s=self.now_s, reason="ended")
        )
        self._append(plan, is_delivered=True)

    def _append(self, plan: stimuli.Append, *, is_delivered: bool) -> None:
        self.seq += 1
        record = replace(plan.record, writer="s")
        self.records.append((self.seq, record))
        self.core.answer(stimuli.Accepted(append=plan, seq=self.seq, now_s=self.now_s))
        if is_delivered:
            self.core.answer(stimuli.RecordSeen(seq=self.seq, record=plan.record, now_s=self.now_s))

    def filter(self, request: PodRequest) -> DecisionRecord:
        """Return the filter's decision, as the scheduler records it."""
        self.now_s += 1
        names = NodeNames.of(self.core.table.nodes())
        snapshot_id = self.core.ledger.snapshot_id
        filtered = self.core.answer(stimuli.FilterAsked(request=request), names)
        return DecisionRecord(
            verb="filter",
            namespace=request.namespace,
            pod=request.name,
            pod_uid=request.uid,
            time_s=self.now_s,
            verdict="feasible" if len(filtered.left) else "refused",
            snapshot_id=snapshot_id,
            nodes_considered=len(names),
            nodes_feasible=len(filtered.left),
            refusals=filtered.classes(),
            closest=self.core.details(request, filtered).nodes(),
            writer="s",
            request=request,
        )

    def present(self) -> Sequence[NodeDevices]:
        return tuple(self.core.inventory.devices())

    def live(self) -> list[AllocationRecord]:
        return [holding.record for holding in self.core.ledger.holdings()]


def fleet_of(sizes: Sequence[int]) -> Fleet:
    fleet = Fleet()
    for number, size in enumerate(sizes):
        fleet.put(of_node(f"n{number:02d}", size))
    return fleet


def of_node(name: str, memory_mib: int) -> NodeDevices:
    return node_devices(name, [device(f"{name}-{at}", memory_mib=memory_mib) for at in range(2)])


def named(number: int, mib: int) -> PodRequest:
    request = whole() if mib == 0 else ask(mib=mib)
    return pod(request, uid=f"uid-{number}", name=f"pod-{number}")


def steps(what: str, numbers: int, *amounts: int) -> st.SearchStrategy[tuple[str, int, int, bool]]:
    """Draw a step with the number of a node or pod, an amount, and whether the feed delivers it."""
    return st.tuples(
        st.just(what), st.integers(0, numbers), st.sampled_from(amounts), st.booleans()
    )


step = st.one_of(
    steps("bind", 5, 0, 200, 400, 900), steps("release", 20, 0), steps("put", 5, 500, 1000, 2000)
)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from((500, 1000, 2000)), min_size=1, max_size=6),
    before=st.lists(step, max_size=15),
    after=st.lists(step, max_size=10),
    wanted=st.sampled_from((0, 300, 800, 5000)),
)
def test_the_moment_equals_the_record_whatever_happened_later(
    sizes: list[int],
    before: list[tuple[str, int, int, bool]],
    after: list[tuple[str, int, int, bool]],
    wanted: int,
) -> None:
    fleet, bound = fleet_of(sizes), list[str]()

    def live(steps: list[tuple[str, int, int, bool]]) -> None:
        for what, number, amount, is_delivered in steps:
            name = f"n{number % len(sizes):02d}"
            if what == "put":
                fleet.put(of_node(name, amount))
            elif what == "bind":
                request = named(len(fleet.records) + 100, amount)
                if fleet.bind(request, name, is_delivered=is_delivered):
                    bound.append(request.uid)
            elif bound:
                fleet.release(bound.pop(number % len(bound)))

    live(before)
    decision = fleet.filter(named(1, wanted))
    live(after)
    found = moment_of(
        decision, fleet.records, fleet.puts, present=fleet.present(), live=fleet.live()
    )
    assert found.differing == ()
    assert found.assumed == 0
    assert found.nodes_feasible == decision.nodes_feasible
    assert len(found.nodes) == len(sizes)
    assert found.compared == len(sizes) - decision.nodes_feasible
    by_node = {one.node: one for one in found.nodes}
    for one in decision.closest:
        assert codec.encode(by_node[one.node]) == codec.encode(one)


def test_nodes_beyond_the_recorded_ones_and_nodes_that_fit_are_answered() -> None:
    fleet = fleet_of([1000] * 20 + [8000])
    decision = fleet.filter(named(1, 5000))
    assert decision.verdict == "feasible"
    refused = fleet.filter(named(2, 9000))
    assert len(refused.closest) == 16
    found = moment_of(refused, (), fleet.puts, present=(), live=())
    assert len(found.nodes) == 21
    assert found.compared == 21
    fits = moment_of(decision, (), fleet.puts, present=(), live=(), node="n20").nodes
    assert [(one.node, one.code, len(one.devices)) for one in fits] == [("n20", "", 2)]
    assert fits[0].devices[0].free.memory_mib == 8000
    with pytest.raises(RequestInvalid, match="n77 had no device then"):
        moment_of(decision, (), fleet.puts, present=(), live=(), node="n77")


def test_nodes_of_all_alternatives_are_answered_by_their_own() -> None:
    fleet = fleet_of([1000, 1000])
    for name, mib in (("a00", 1000), ("a01", 9000)):
        fleet.put(devices(name, 2, memory_mib=mib, vendor="ascend"))
    first, second = (pod(ask(mib=3000, vendor=vendor)) for vendor in ("nvidia", "ascend"))
    other = Choice(containers=second.containers, selectors=second.selectors)
    decision = fleet.filter(replace(first, others=(other,)))
    found = moment_of(decision, (), fleet.puts, present=(), live=())
    assert [(one.node, one.vendor, one.code) for one in found.nodes] == [
        ("n00", "nvidia", "CardInsufficientMemory"),
        ("n01", "nvidia", "CardInsufficientMemory"),
        ("a00", "ascend", "CardInsufficientMemory"),
        ("a01", "ascend", ""),
    ]
    assert (found.nodes_feasible, found.compared, found.differing) == (1, 3, ())
    assert all(len(one.devices) == 2 for one in found.nodes)


def test_a_node_that_was_withheld_differs_and_is_named() -> None:
    fleet = fleet_of([1000, 1000])
    fleet.core.answer(stimuli.NodeWithheld(node="n00", withheld=True))
    decision = fleet.filter(named(1, 5000))
    found = moment_of(decision, (), fleet.puts, present=(), live=())
    assert (found.compared, found.differing) == (2, ("n00",))


def test_state_older_than_the_stream_is_counted() -> None:
    fleet = fleet_of([1000, 1000])
    assert fleet.bind(named(7, 900), "n00")
    decision = fleet.filter(named(1, 600))
    fleet.release("uid-7")
    fleet.put(of_node("n01", 2000))
    # The reservation and the first devices are no longer stored.
    found = moment_of(
        decision, fleet.records[1:], fleet.puts[2:], present=fleet.present(), live=fleet.live()
    )
    assert found.assumed == 2
    whole_story = moment_of(
        decision, fleet.records, fleet.puts, present=fleet.present(), live=fleet.live()
    )
    assert whole_story.assumed == 0
    assert free_of(whole_story.nodes, "n00") == [100, 1000]


def free_of(nodes: Sequence[RefusedNode], name: str) -> list[int]:
    (found,) = (one for one in nodes if one.node == name)
    return sorted(device.free.memory_mib for device in found.devices)


def test_the_newest_filter_up_to_the_time_is_taken() -> None:
    fleet = fleet_of([1000])
    first, second = fleet.filter(named(1, 5000)), fleet.filter(named(1, 6000))
    bind = replace(first, verb="bind", request=None, time_s=2000.0, before=(second,))
    assert filter_at([first, bind], 1e9) == second
    assert filter_at([first, bind], first.time_s) == first
    assert filter_at([first, bind], first.time_s - 1) is None
