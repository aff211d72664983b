# SPDX-License-Identifier: Apache-2.0
"""Answers to Workloads and ProvisioningRequests against every placement of their pods."""

from itertools import product
from typing import get_args

import msgspec
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hami_common.events.allocation import OwnerKind, hold_uid, is_of_owner, owner_of, purpose_of
from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import Placement
from hami_common.model.request import DeviceRequest
from hami_core.ledger.ledger import Hold, Ledger
from hami_core.ledger.stimuli import Accepted, Append
from hami_core.placement.pick import pick
from hami_core.planning.demands import Demand, count_now, empty_table, never_fits, place
from hami_core.planning.gangs import Member
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, device, held, node_devices, pod, share, whole
from tests.support.searches import result_of

MIB = 1000
NODES = ("n1", "n2")
UID = "w"
ASKS = st.sampled_from([ask(mib=200), ask(mib=500), ask(mib=900), ask(2, mib=400), whole()])


class Cluster(msgspec.Struct):
    """Devices, partly used and partly unhealthy, and the table of them."""

    table: DeviceTable
    devices: list[NodeDevices]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    table = DeviceTable()
    devices = []
    for node in NODES[: draw(st.integers(1, 2))]:
        some = node_devices(
            node,
            [
                device(
                    f"{node}-{n}",
                    index=n,
                    memory_mib=MIB,
                    slots=2,
                    healthy=draw(st.integers(0, 5)) > 0,
                )
                for n in range(draw(st.integers(1, 2)))
            ],
        )
        table.upsert_node(some)
        devices.append(some)
        for one in some.devices:
            if draw(st.booleans()):
                table.book(node, (held(share(one.uuid, draw(st.integers(1, 900)))),))
    return Cluster(table, devices)


def demand(asked: DeviceRequest, *, index: int, count: int) -> Demand:
    request = pod(asked, uid="template")
    return Demand(
        pod_set=f"s{index}", index=index, count=count, request=request, account=None, pod={}
    )


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    return [demand(draw(ASKS), index=n, count=count) for n, count in enumerate(counts)]


def can_hold(table: DeviceTable, members: list[Member]) -> bool:
    """Return True when some assignment of pods to nodes works, in some order of equal pods."""
    for nodes in product(table.nodes(), repeat=len(members)):
        taken: list[Placement] = []
        for member, node in zip(members, nodes, strict=True):
            chosen = pick(table, member.request, node)
            if not isinstance(chosen, Placement):
                break
            table.book(node, chosen.containers)
            taken.append(chosen)
        for placement in taken:
            table.unbook(placement.node, placement.containers)
        if len(taken) == len(members):
            return True
    return False


@settings(max_examples=60, deadline=None)
@given(cluster=clusters(), wanted=demands())
def test_rejected_only_when_no_empty_cluster_could_hold_it(
    cluster: Cluster, wanted: list[Demand]
) -> None:
    empty = empty_table(cluster.devices)
    members = [m for one in wanted for m in one.members(UID, frozenset(empty.nodes()))]
    never = result_of(never_fits(empty, UID, wanted))
    if never:
        assert not can_hold(empty, members)
    for one in wanted:
        alone = list(one.members(UID, frozenset(empty.nodes())))
        if never == one.pod_set:
            assert not can_hold(empty, alone)
        elif never == "":
            assert can_hold(empty, alone)


@settings(max_examples=60, deadline=None)
@given(cluster=clusters(), wanted=demands())
def test_ready_holds_every_pod_within_capacity_and_one_pod_set_whenever_possible(
    cluster: Cluster, wanted: list[Demand]
) -> None:
    table = cluster.table
    nodes = {one.pod_set: frozenset(table.nodes()) for one in wanted}
    before = list(table.usages())
    found = result_of(place(table, UID, wanted, nodes))
    assert list(table.usages()) == before
    members = [m for one in wanted for m in one.members(UID, nodes[one.pod_set])]
    if len(wanted) == 1:
        assert (found is not None) == can_hold(table, members)
        count = result_of(count_now(table, UID, wanted[0], nodes[wanted[0].pod_set]))
        assert (count == len(members)) == (found is not None)
        assert count == 0 or can_hold(table, members[:count])
        assert count == len(members) or not can_hold(table, members[: count + 1])
    if found is None:
        return
    assert found.keys() == {
        hold_uid(UID, one.index, number) for one in wanted for number in range(one.count)
    }
    for placement in found.values():
        assert not table.book(placement.node, placement.containers), "a device is over-booked"


@settings(max_examples=60, deadline=None)
@given(
    cluster=clusters(),
    asked=ASKS,
    number=st.integers(0, 1),
    kind=st.sampled_from(get_args(OwnerKind)),
)
def test_hold_that_is_taken_over_leaves_the_very_shares_to_its_pod(
    cluster: Cluster, asked: DeviceRequest, number: int, kind: OwnerKind
) -> None:
    """Between the two records no other pod gets the capacity."""
    ledger = Ledger(cluster.table, writer="me")
    node = cluster.table.nodes()[0]
    held_uid = hold_uid(UID, 0, number)
    request = pod(asked, uid=held_uid)
    hold = Hold(held_for=purpose_of(kind, "default", "w"), lease_s=60.0)
    plan = ledger.plan_hold(request, node, allocation_id="h", now_s=0.0, hold=hold)
    assume(isinstance(plan, Append))
    assert isinstance(plan, Append)
    ledger.handle(Accepted(append=plan, seq=1, now_s=0.0))
    (found,) = ledger.holdings_of_owner(UID)
    assert ledger.holdings_of_owner(hold.held_for) == [found]
    assert is_of_owner(found.record, kind)
    assert not any(is_of_owner(found.record, other) for other in {*get_args(OwnerKind)} - {kind})
    assert owner_of(found.record) == UID
    free = list(cluster.table.usages())
    mine = msgspec.structs.replace(request, uid="pod")
    taken = ledger.plan_take(mine, node, held_uid=held_uid, allocation_id="p", now_s=1.0)
    assert isinstance(taken, Append)
    assert taken.record.containers == found.record.containers
    assert taken.record.awaits == (held_uid,)
    assert not taken.record.held_for
    assert ledger.handle(Accepted(append=taken, seq=2, now_s=1.0)) == [], "not over capacity"
    release = ledger.plan_release(found, now_s=2.0, reason="taken-over")
    ledger.handle(Accepted(append=release, seq=3, now_s=2.0))
    assert list(cluster.table.usages()) == free
    assert ledger.holdings_of_owner(UID) == []
    ledger_holding = ledger.holding(node, "pod")
    assert ledger_holding is not None
    assert ledger.awaited(ledger_holding) == []
