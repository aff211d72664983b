# SPDX-License-Identifier: Apache-2.0
"""Rebuilds from files what the fleet had to place, for a comparison of policies.

Unlike the event stream, a stimulus log has the requests themselves, the nodes that kube-scheduler
offered and the first refusal of each pod, so waits before a reservation count, and so do pods that
never got devices. A pod that no node took at first arrives at that refusal, any other at its
reservation. The log does not contain the deletion of a waiting pod: it waits to the end. The period
is that of the log. A gap only hides what happened in it. Times in Unix seconds, of the newest
stimulus that has one.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from hami_common.errors import RequestInvalid
from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.request import PlacementPolicy
from hami_core.ledger import stimuli
from hami_core.ledger.holding import Holding
from hami_core.placement.nodenames import NodeNames
from hami_core.replay.arrivals import Asked, History, Put, history_of
from hami_core.replay.questions import inventory_of
from hami_core.replay.snapshot import Snapshot
from hami_core.replay.stimuluslog import Gap, Item, Stimulated

ARRIVALS_MOST: Final = 1_000_000
LISTS_KEPT: Final = 256
LEAST_S: Final = 1.0
"""Length of the period of a log that ends with its first snapshot."""


class _Log:
    """Everything read so far."""

    def __init__(self) -> None:
        self.from_s: float | None = None
        self.now_s = 0.0
        self.policy = PlacementPolicy()
        self.records: list[AllocationRecord] = []
        self.puts: list[Put] = []
        self.asked: dict[str, Asked] = {}
        self._sequences: dict[tuple[str, str], int] = {}
        self.gaps = 0
        self._offered: dict[int, tuple[NodeNames, tuple[str, ...]]] = {}
        """By identity of the names, which the reader shares between questions."""

    def begin(self, snapshot: Snapshot) -> None:
        """Read the state at the beginning of a segment, of which an earlier one knows most."""
        self._at(snapshot.time_s)
        if self.from_s is None:
            self.from_s, self.policy = snapshot.time_s, snapshot.policy
        for devices in inventory_of(snapshot):
            self._put(devices)
        for holding in _held(snapshot):
            self._record(holding.revision, holding.record)

    def take(self, item: Stimulated) -> None:
        """Read one stimulus."""
        self._at(getattr(item.stimulus, "now_s", None))
        match item.stimulus:
            case stimuli.RecordSeen(seq=seq, record=record):
                self._record(seq, record)
            case stimuli.Accepted(seq=seq, append=append):
                self._record(seq, append.record)
            case stimuli.NodeRead(entries=entries):
                for seq, record in sorted(entries, key=lambda entry: entry[0]):
                    self._record(seq, record)
            case stimuli.Wiped():
                self._sequences.clear()
            case stimuli.DevicesPut(devices=devices):
                self._put(devices)
            case stimuli.DevicesRemoved(node=node, vendor=vendor):
                self._put(_no_devices(node, vendor))
            case stimuli.FilterAsked(request=request) if item.names is not None:
                feasible = msgspec.json.decode(item.answer, type=_Feasible).feasible
                known = self.asked.get(request.uid)
                refused_s = self.now_s if not feasible else None
                self.asked[request.uid] = Asked(
                    request=request,
                    offered=self._names(item.names),
                    refused_s=refused_s if known is None else known.refused_s,
                )

    def _at(self, now_s: float | None) -> None:
        if now_s is not None:
            self.now_s = max(self.now_s, now_s)

    def _put(self, devices: NodeDevices) -> None:
        self.puts.append(Put(time_s=self.now_s, devices=devices))

    def _record(self, seq: int, record: AllocationRecord) -> None:
        """Take a record once: the feed repeats what was accepted or read before."""
        key = record.node, record.pod_uid
        if seq > self._sequences.get(key, 0):
            self._sequences[key] = seq
            self.records.append(record)

    def _names(self, names: NodeNames) -> tuple[str, ...]:
        """Return the names, one tuple for all questions that offer the same list."""
        known = self._offered.get(id(names))
        if known is None:
            if len(self._offered) >= LISTS_KEPT:
                del self._offered[next(iter(self._offered))]
            known = self._offered[id(names)] = names, tuple(names.strings())
        return known[1]


class _Feasible(Struct):
    """The part of ``FilterAnswer`` that is needed, or of a failure."""

    feasible: int = 1


class LogHistory(NamedTuple):
    """A history that was read from files."""

    history: History
    policy: PlacementPolicy
    """Policy of pods that named none, at the beginning of a log or the end of events."""
    gaps: int = 0
    """Places of a log where stimuli are missing."""


def history_of_log(items: Iterable[Item]) -> LogHistory:
    """Return the history of a log; ``RequestInvalid`` if it has no snapshot."""
    log = _Log()
    for item in items:
        if isinstance(item, Snapshot):
            log.begin(item)
        elif isinstance(item, Stimulated):
            log.take(item)
        elif isinstance(item, Gap):
            log.gaps += 1
    if log.from_s is None:
        raise RequestInvalid(
            field="log", problem="no segment begins with a snapshot", fix="give a whole segment"
        )
    history = history_of(
        log.records,
        _in_order(log.puts),
        present=(),
        live=(),
        from_s=log.from_s,
        until_s=max(log.now_s, log.from_s + LEAST_S),
        arrivals_most=ARRIVALS_MOST,
        asked=log.asked,
    )
    return LogHistory(history, log.policy, log.gaps)


def history_of_events(
    records: Sequence[AllocationRecord], puts: Sequence[Put], snapshot: Snapshot
) -> LogHistory:
    """Return the history of stored events, in stream order, up to a snapshot taken after them.

    ``RequestInvalid`` if there are none before the snapshot.
    """
    times = [record.time_s for record in records] + [put.time_s for put in puts]
    begin_s = min((time_s for time_s in times if time_s), default=snapshot.time_s)
    if begin_s >= snapshot.time_s:
        raise RequestInvalid(
            field="events",
            problem="none of the ledger or devices is older than the snapshot",
            fix="take the snapshot after the events",
        )
    history = history_of(
        records,
        puts,
        present=inventory_of(snapshot),
        live=[line.record for line in _held(snapshot)],
        from_s=begin_s,
        until_s=snapshot.time_s,
        arrivals_most=ARRIVALS_MOST,
    )
    return LogHistory(history, snapshot.policy)


def _held(snapshot: Snapshot) -> Iterator[Holding]:
    """Yield the live records of a snapshot, the oldest first."""
    if snapshot.exact is None:
        yield from sorted(snapshot.holdings, key=lambda one: one.revision)
        return
    for line in sorted(snapshot.exact.ledger.held, key=lambda line: line.seq):
        if line.record is not None and line.record.op != "release":
            yield Holding(record=line.record, revision=line.seq)


def _in_order(puts: Sequence[Put]) -> Iterable[Put]:
    """Leave out devices that a later segment repeats."""
    known: dict[tuple[str, str], NodeDevices] = {}
    for put in puts:
        served = put.devices.node, put.devices.vendor
        if known.get(served) != put.devices:
            known[served] = put.devices
            yield put


def _no_devices(node: str, vendor: str) -> NodeDevices:
    return NodeDevices(
        node=node, vendor=vendor, boot_id="", seq=0, time_s=0.0, config_generation=0, devices=()
    )
