# SPDX-License-Identifier: Apache-2.0
"""Computes all nodes at the time of a recorded decision, from stored events (ADR 48).

The record names the ledger's sequence and the inventory's revision that it was made on. Records and
devices up to these are folded, and records of the same writer that were accepted but not yet
delivered to it: they are newer, and older than the decision. The recorded request is then evaluated
by the same filter, and the nodes that the record names are compared, byte for byte where it has
their devices. Silent agents, faults between two reports, withheld nodes, quotas, gangs and
preemption are not in these events. Memory in MiB, times in Unix seconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from hami_common.errors import RequestInvalid, WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.decision import DecisionRecord, Moment, RefusedNode
from hami_common.events.inventory import NodeDevices
from hami_common.model.request import options
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Ledger
from hami_core.placement.details import look
from hami_core.placement.fit import compile_request
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.reasons import CODE_BY_STAGE, NO_DEVICES, ClosestNode, Reason
from hami_core.placement.verdicts import Verdicts
from hami_core.replay.arrivals import Put
from hami_core.replay.snapshot import Snapshot, load

Numbered = tuple[int, AllocationRecord]
"""A record with its sequence in the ledger."""
_COMPUTED: Final = {*CODE_BY_STAGE.values(), "NodeInsufficientDevice"} | {
    "AllocatedCardsInsufficientRequest"
}
"""Codes that depend on devices and bookings alone."""
_FITS: Final = ClosestNode("", "NodeInsufficientDevice", Reason(step=0, stage=-1, kind=NO_DEVICES))
"""Stands for a node that fits: its devices are evaluated for the first request."""


def filter_at(decisions: Iterable[DecisionRecord], at_s: float) -> DecisionRecord | None:
    """Return the newest recorded filter with a request, at or before a time."""
    found: DecisionRecord | None = None
    for message in decisions:
        for one in message.unfolded():
            is_filter = one.verb == "filter" and one.request is not None
            if is_filter and one.time_s <= at_s and (found is None or one.time_s >= found.time_s):
                found = one
    return found


def moment_of(
    decision: DecisionRecord,
    records: Sequence[Numbered],
    puts: Sequence[Put],
    *,
    present: Iterable[NodeDevices],
    live: Iterable[AllocationRecord],
    node: str = "",
) -> Moment:
    """Evaluate the decision's request on the fleet of its time, on all nodes or on ``node``.

    ``records`` and ``puts`` are all that are stored, in stream order; ``present`` and ``live`` are
    the devices and reservations of now. ``RequestInvalid`` if there is no such node.
    """
    request = decision.request
    if request is None:
        raise WireInvalid(what="decision", problem="has no request")
    ledger, assumed = _ledger_at(decision, records, puts, present=present, live=live)
    table = ledger.table
    nodes = [node] if node else table.nodes()
    if node and table.place(node) is None:
        raise RequestInvalid(
            field="node", problem=f"{node} had no device then", fix="give a node with devices"
        )
    filtered = Verdicts(table).filter(request, NodeNames.of(nodes))

    def records_of(name: str) -> list[AllocationRecord]:
        return [holding.record for holding in ledger.holdings_of_node(name)]

    refused: list[RefusedNode] = []
    fits: list[RefusedNode] = []
    for number, (choice, fitting) in enumerate(
        zip(options(request), filtered.fitting(), strict=True)
    ):
        plan = compile_request(choice)
        closest = filtered.closest(len(nodes), choice=number)
        refused += look(table, choice, plan, closest, records_of).every_node()
        closest = [_FITS._replace(node=name) for name in fitting]
        found = look(table, choice, plan, closest, records_of).every_node()
        fits += [replace(one, code="") for one in found]
    computed = [*refused, *fits]
    by_node = {one.node: one for one in computed}
    compared, differing = _compared(decision, by_node, nodes)
    return Moment(
        decision=decision,
        nodes=tuple(computed),
        nodes_feasible=len(fits),
        compared=compared,
        differing=tuple(differing),
        assumed=assumed,
    )


# --- the fleet then -------------------------------------------------------------------------------


def _ledger_at(
    decision: DecisionRecord,
    records: Sequence[Numbered],
    puts: Sequence[Put],
    *,
    present: Iterable[NodeDevices],
    live: Iterable[AllocationRecord],
) -> tuple[Ledger, int]:
    """Return the ledger with its table, and how many parts of it are assumed."""
    ledger_seq, revision = _position(decision.snapshot_id)
    devices, assumed_devices = _devices_at(puts, present, revision=revision)
    holdings, assumed = _holdings_at(decision, records, live, ledger_seq=ledger_seq)
    snapshot = Snapshot(
        snapshot_id=decision.snapshot_id,
        time_s=decision.time_s,
        writer=decision.writer,
        devices=tuple(devices),
        holdings=tuple(holdings),
    )
    return load(snapshot), assumed + assumed_devices


def _position(snapshot_id: str) -> tuple[int, int]:
    ledger_seq, _, revision = snapshot_id.partition(".")
    if not ledger_seq.isdigit() or not revision.isdigit():
        raise WireInvalid(what="decision", problem=f"snapshot_id {snapshot_id[:40]!r} is unknown")
    return int(ledger_seq), int(revision)


def _devices_at(
    puts: Sequence[Put], present: Iterable[NodeDevices], *, revision: int
) -> tuple[Iterator[NodeDevices], int]:
    known: dict[tuple[str, str], NodeDevices] = {}
    later: dict[tuple[str, str], NodeDevices] = {}
    for put in puts:
        served = put.devices.node, put.devices.vendor
        if put.revision <= revision:
            known[served] = put.devices
        else:
            later.setdefault(served, put.devices)
    assumed = {served: one for served, one in later.items() if served not in known}
    for one in present:
        if (one.node, one.vendor) not in later:
            known.setdefault((one.node, one.vendor), one)
    known.update(assumed)
    return (known[served] for served in sorted(known) if known[served].devices), len(assumed)


def _holdings_at(
    decision: DecisionRecord,
    records: Sequence[Numbered],
    live: Iterable[AllocationRecord],
    *,
    ledger_seq: int,
) -> tuple[list[Holding], int]:
    known: dict[tuple[str, str], Numbered] = {}
    later: dict[tuple[str, str], Numbered] = {}
    for sequence, record in records:
        key = record.node, record.pod_uid
        is_own = record.writer == decision.writer and record.time_s < decision.time_s
        if sequence <= ledger_seq or is_own:
            known[key] = sequence, record
        else:
            later.setdefault(key, (sequence, record))
    # Without a stored reservation, a release or resize shows that the pod held devices before.
    older = {key: one for key, one in later.items() if key not in known and one[1].op != "reserve"}
    for record in live:
        key = record.node, record.pod_uid
        if key not in later and record.time_s <= decision.time_s:
            known.setdefault(key, (0, record))
    known.update({key: one for key, one in older.items() if one[1].op == "resize"})
    held = sorted(
        (one for one in known.values() if one[1].op != "release"),
        key=lambda one: (one[0], one[1].node, one[1].pod_uid),
    )
    return [
        Holding(record=record, revision=number) for number, (_, record) in enumerate(held, start=1)
    ], len(older)


# --- comparison with the record -------------------------------------------------------------------


def _compared(
    decision: DecisionRecord, computed: dict[str, RefusedNode], nodes: Sequence[str]
) -> tuple[int, list[str]]:
    """Return how many nodes the record names with a verdict, and those that differ."""
    wanted = set(nodes)
    detailed = {one.node: one for one in decision.closest}
    codes = {
        name: one.code for one in decision.refusals if one.code in _COMPUTED for name in one.nodes
    }
    codes.update({one.node: "" for one in decision.feasible})
    compared = sorted(wanted & (detailed.keys() | codes.keys()))
    differing = [
        name
        for name in compared
        if not _is_equal(detailed.get(name), codes.get(name), computed.get(name))
    ]
    return len(compared), differing


def _is_equal(detailed: RefusedNode | None, code: str | None, got: RefusedNode | None) -> bool:
    if got is None:
        return False
    if detailed is None:
        return got.code == code
    # The record leaves devices out beyond its size, the last ones first.
    shown = got.devices[: len(detailed.devices)]
    left_out = got.devices_left_out + len(got.devices) - len(shown)
    return codec.encode(replace(got, devices=shown, devices_left_out=left_out)) == codec.encode(
        detailed
    )
