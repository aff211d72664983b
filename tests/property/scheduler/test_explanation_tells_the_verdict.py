# SPDX-License-Identifier: Apache-2.0
"""The record of a decision alone is enough to derive the verdict.

The judges below see bytes of a record, or of an explanation, and the names in the request; neither
the table nor the request. Their conclusion must equal filter's answer. The details of the closest
nodes in the record must equal what the explanation computes device by device.
"""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.decision import DecisionRecord, RefusedNode
from hami_common.model.placement import ContainerShares
from hami_common.model.request import PodRequest
from hami_core.placement.reasons import RESOLVABLE, NodeExplanation, explain
from hami_core.placement.verdicts import Filtered, Verdicts
from hami_core.table.table import DeviceTable
from tests.property.scheduler import clusters

ASKED = ("unknown", *clusters.NODES)
NOT_SO = "CardTopologyInfeasible"
"""Enough devices fit, but no set of them that the request allows."""
_AMOUNTS = re.compile(r"(\d+)(?: MiB| devices|%).* wanted, at most (-?\d+)")


def recorded(filtered: Filtered) -> bytes:
    """The decision as it goes to the event stream."""
    feasible = len(filtered.left)
    return codec.encode(
        DecisionRecord(
            verb="filter",
            namespace="default",
            pod="pod",
            pod_uid="uid",
            time_s=0.0,
            verdict="feasible" if feasible else "refused",
            snapshot_id="1.1",
            nodes_considered=len(filtered.nodes),
            nodes_feasible=feasible,
            refusals=filtered.classes(),
        )
    )


def judge_record(data: bytes, asked: tuple[str, ...]) -> list[str]:
    """Return the nodes that fit, by the record alone; the record must not contradict itself."""
    record = codec.decode(data, DecisionRecord, what="record")
    refused = [node for refusal in record.refusals for node in refusal.nodes]
    assert len(refused) == len(set(refused)) == sum(r.count for r in record.refusals)
    for refusal in record.refusals:
        assert refusal.text.startswith(f"{refusal.code}: ")
        if amounts := _AMOUNTS.search(refusal.text):
            assert int(amounts[2]) < int(amounts[1])  # the best of the class is still too little
    fits = [node for node in asked if node not in set(refused)]
    assert record.nodes_considered == len(asked)
    assert record.nodes_feasible == len(fits)
    assert record.verdict == ("feasible" if fits else "refused")
    return fits


def judge_explanation(data: bytes) -> bool:
    """Return True when the node fits, by its devices' answers alone: each step finds enough."""
    told = codec.decode(data, NodeExplanation, what="explanation")
    for step in told.steps:
        for device in step.devices:
            if device.code not in (None, NOT_SO) and device.wanted:
                assert device.free < device.wanted
        assert sum(device.taken for device in step.devices) in (0, step.count)
    if told.refusal is not None and not told.steps:
        return told.refusal.code != "NodeUnregistered"
    return all(
        sum(device.code is None for device in step.devices) >= step.count for step in told.steps
    )


@settings(max_examples=50)
@given(st.data())
def test_record_and_explanation_alone_give_the_verdict(data: st.DataObject) -> None:
    table = DeviceTable()
    for node in clusters.NODES:
        for vendor in clusters.VENDORS[: data.draw(st.integers(1, 2))]:
            table.upsert_node(data.draw(clusters.inventories(node, vendor)))
    records: dict[str, list[AllocationRecord]] = {}
    for number in range(data.draw(st.integers(0, 6))):
        node = data.draw(st.sampled_from(clusters.NODES))
        containers = data.draw(clusters.holdings(node))
        table.book(node, containers)
        records.setdefault(node, []).append(held_by(f"pod-{number}", node, containers))
    request = data.draw(clusters.pods())
    verdicts = Verdicts(table)
    filtered = verdicts.filter(request, ASKED)
    assert judge_record(recorded(filtered), ASKED) == filtered.feasible
    for node in ASKED:
        told = codec.encode(explain(table, request, node))
        assert judge_explanation(told) == (node in filtered.feasible)
    details = verdicts.details(request, filtered, lambda node: records.get(node, ()))
    judge_details(table, request, filtered, details.nodes())


def held_by(name: str, node: str, containers: tuple[ContainerShares, ...]) -> AllocationRecord:
    return AllocationRecord(
        op="reserve",
        allocation_id=name,
        node=node,
        pod_uid=name,
        namespace="team",
        pod=name,
        containers=containers,
    )


def judge_details(
    table: DeviceTable, request: PodRequest, filtered: Filtered, nodes: tuple[RefusedNode, ...]
) -> None:
    """Compare the details with the explanation of each node, and their sums with the devices."""
    assert {one.node for one in nodes} == set(ASKED) - set(filtered.feasible)
    codes = {name: one.code for one in filtered.classes() for name in one.nodes}
    ends = [one.code in RESOLVABLE for one in nodes]
    assert ends == sorted(ends, reverse=True)  # those that pods may leave come first
    for node in nodes:
        told = explain(table, request, node.node)
        assert node.code == codes[node.node]
        assert told.refusal is None or told.refusal.code == node.code
        last = told.steps[-1].devices if told.steps else ()
        assert {one.uuid: one.code for one in last} == {
            one.uuid: one.code or None for one in node.devices
        }
        place = table.place(node.node)
        for device in node.devices:
            assert place is not None
            at = (place.rows[device.uuid], place.column)
            held = sum(one.memory_mib for one in device.holders)
            if len(told.steps) <= 1 and not device.holders_left_out:
                capacity = int(place.block.capacity_mib[at])
                unbooked = device.free.memory_mib + device.foreign_mib + device.burst_mib
                assert unbooked + held == capacity
            if device.code == "CardInsufficientMemory":
                assert device.free.memory_mib < device.wanted.memory_mib
            if device.code == "CardInsufficientCore":
                assert device.free.core_pct < device.wanted.core_pct
            if device.code == "CardTimeSlicingExhausted":
                assert device.free.slots < device.wanted.slots
