# SPDX-License-Identifier: Apache-2.0
"""The record of a decision alone is enough to derive the verdict.

The judges below see bytes of a record, or of an explanation, and the names in the request; neither
the table nor the request. Their conclusion must equal filter's answer.
"""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.events import codec
from hami_common.events.decision import DecisionRecord
from hami_core.placement.reasons import NodeExplanation, explain
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
    for _ in range(data.draw(st.integers(0, 6))):
        node = data.draw(st.sampled_from(clusters.NODES))
        table.book(node, data.draw(clusters.holdings(node)))
    request = data.draw(clusters.pods())
    filtered = Verdicts(table).filter(request, ASKED)
    assert judge_record(recorded(filtered), ASKED) == filtered.feasible
    for node in ASKED:
        told = codec.encode(explain(table, request, node))
        assert judge_explanation(told) == (node in filtered.feasible)
