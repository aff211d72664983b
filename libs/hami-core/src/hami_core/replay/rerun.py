# SPDX-License-Identifier: Apache-2.0
"""Gives the stimuli of a log to the core once more, and compares what it answers, to the bit.

A segment begins where its snapshot was taken. Where it follows on the one before, the core goes on
with what it has, and what it has must then equal the new snapshot: so a state that no answer shows
is compared, too. A gap, or a segment that is missing, is never crossed unless the caller asks for
it; the core then begins anew with the next snapshot. Reads no files and no clock.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import InvariantBroken
from hami_core.ledger import stimuli
from hami_core.ledger.ledger import Hold
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.verdicts import Filtered, Verdicts
from hami_core.quota import documents as quota_memory
from hami_core.quota.verdicts import Allowed, QuotaVerdicts
from hami_core.replay.snapshot import Exact, Parts, Snapshot, resume, take_exact
from hami_core.replay.stimuluslog import DECISIONS, Gap, Head, Item, Stimulated, answer_text


class Difference(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first place where a replay and its log part."""

    segment: int
    number: int
    """Of the stimulus; 0 where the state at a segment's beginning differs."""
    kind: str
    what: str
    """The stimulus, as it stands in the log."""
    expected: str
    got: str


class Missing(Struct, frozen=True, kw_only=True):
    """Stimuli that the log does not have."""

    segment: int
    after: int
    """Number of the last stimulus before them."""
    problem: str


class Report(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a replay."""

    runs: int = 0
    segments: int = 0
    stimuli: int = 0
    decisions: int = 0
    """Stimuli whose answer is a verdict about a pod."""
    by_kind: dict[str, int] = {}
    difference: Difference | None = None
    missing: tuple[Missing, ...] = ()
    """Gaps: the replay ended at the first, or, where they were to be skipped, began anew."""

    @property
    def is_identical(self) -> bool:
        """Whether every answer was the same."""
        return self.difference is None


FAILURES: Final = (
    InvariantBroken,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a stimulus can end in: the scheduler isolates the object and goes on, so does a replay."""


class Machine:
    """The core, fed by a log."""

    def __init__(self, exact: Exact) -> None:
        """Begin where ``exact`` was taken."""
        self.parts = parts = resume(exact)
        self._verdicts = Verdicts(parts.ledger.table)
        self._quotas = QuotaVerdicts(parts.ledger.table, parts.quota)
        self._filtered: Filtered | None = None
        """Answer of the newest filter."""

    def answer(self, stimulus: Struct, names: NodeNames | None) -> object:
        """What the core says to the stimulus."""
        call = _CALLS.get(type(stimulus))
        try:
            if call is not None:
                return call(self.parts, stimulus)
            if isinstance(stimulus, stimuli.FilterAsked) and names is not None:
                self._filtered = self._verdicts.filter(stimulus.request, names)
                return self._filtered
            if isinstance(stimulus, stimuli.QuotaAsked):
                return self._allowed(stimulus)
            if isinstance(stimulus, stimuli.PrioritizeAsked) and names is not None:
                return self._verdicts.prioritize(stimulus.request, names, near=stimulus.near)
            return self.parts.ledger.handle(stimulus)  # type: ignore[arg-type]  # KINDS holds calls and stimuli of the ledger
        except FAILURES as error:
            return error

    def _allowed(self, asked: stimuli.QuotaAsked) -> Filtered | Allowed:
        if self._filtered is None:
            raise InvariantBroken(what="quotas are asked before any filter")
        return self._quotas.allowed(
            asked.request, self._filtered, asked.asker, waiting=asked.waiting
        )

    def exact(self, snapshot: Snapshot) -> Exact | None:
        """The present state, for comparison with that of ``snapshot``."""
        exact = take_exact(self.parts, policy=snapshot.policy, now_s=snapshot.time_s).exact
        if exact is None or snapshot.exact is None or snapshot.exact.quota is not None:
            return exact
        return replace(exact, quota=None)


_CALLS: Final[Mapping[type[Struct], Callable[[Parts, Any], object]]] = MappingProxyType(
    {
        stimuli.DevicesPut: lambda parts, it: parts.inventory.put(
            it.devices, revision=it.revision, now_s=it.now_s
        ),
        stimuli.DevicesRemoved: lambda parts, it: parts.inventory.remove(it.node, it.vendor),
        stimuli.DevicesBegin: lambda parts, _: parts.inventory.begin_again(),
        stimuli.DevicesEnd: lambda parts, _: parts.inventory.end_again(),
        stimuli.HeartbeatHeard: lambda parts, it: parts.inventory.hear(
            it.heartbeat, now_s=it.now_s
        ),
        stimuli.BusUnheard: lambda parts, it: parts.inventory.deaf(now_s=it.now_s),
        stimuli.SilenceJudged: lambda parts, it: parts.inventory.tick(now_s=it.now_s),
        stimuli.FaultHeard: lambda parts, it: parts.inventory.take_fault(it.fault),
        stimuli.NodeWithheld: lambda parts, it: parts.ledger.table.set_withheld(
            it.node, it.vendor, withheld=it.withheld
        ),
        stimuli.NodeStands: lambda parts, it: parts.ledger.table.set_domain(it.node, it.path),
        stimuli.Forgotten: lambda parts, it: parts.ledger.forget(it.node, it.pod_uid),
        stimuli.BindPlanned: lambda parts, it: parts.ledger.plan_bind(
            it.request,
            it.node,
            allocation_id=it.allocation_id,
            now_s=it.now_s,
            fenced=it.fenced,
        ),
        stimuli.HoldPlanned: lambda parts, it: parts.ledger.plan_hold(
            it.request,
            it.node,
            allocation_id=it.allocation_id,
            now_s=it.now_s,
            hold=Hold(held_for=it.held_for, lease_s=it.lease_s, awaits=it.awaits),
            fenced=it.fenced,
        ),
        stimuli.RestorePlanned: lambda parts, it: parts.ledger.plan_restore(
            it.signed, now_s=it.now_s, must=it.must
        ),
        stimuli.QuotaPut: lambda parts, it: parts.quota.put_quota(quota_memory.quota_of(it.quota)),
        stimuli.QuotaDropped: lambda parts, it: parts.quota.drop_quota(it.namespace, it.name),
        stimuli.QueuesSet: lambda parts, it: parts.quota.set_tree(quota_memory.tree_of(it.queues)),
        stimuli.QuotaFolded: lambda parts, it: parts.quota.fold(it.seq, it.record),
        stimuli.QuotaSynced: lambda parts, _: parts.quota.synced(),
        stimuli.QuotaReset: lambda parts, _: parts.quota.reset(),
        stimuli.QuotaExpected: lambda parts, it: parts.quota.expect(it.record),
        stimuli.QuotaUnexpected: lambda parts, it: parts.quota.stop_expecting(it.allocation_id),
        stimuli.QuotaLooked: lambda parts, it: parts.quota.first_look(
            it.namespace, it.account, quota_memory.amounts_of_text(it.wanted), own=it.own
        ),
        stimuli.QuotaJudged: lambda parts, it: parts.quota.verdict(it.seq),
    }
)


class _Rerun:
    """One replay on its way."""

    def __init__(self) -> None:
        self.machine: Machine | None = None
        self.head = Head(format=0, run="", segment=0, next_number=1)
        self.next_number = 1
        self.runs = self.segments = self.decisions = 0
        self.by_kind: dict[str, int] = {}
        self.missing: list[Missing] = []

    def begin(self, head: Head) -> Missing | None:
        """A segment begins."""
        before, self.head = self.head, head
        self.segments += 1
        is_next = (before.run, before.segment + 1) == (head.run, head.segment)
        problem = ""
        if head.run != before.run:
            self.runs += 1
            self.machine = None
            if before.run and head.segment > 1:
                problem = f"the first segments of run {head.run} are not there"
        elif not is_next:
            problem = f"segment {before.segment + 1} of run {head.run} is not there"
        elif self.machine is not None and head.next_number != self.next_number:
            problem = f"stimuli {self.next_number} to {head.next_number - 1} are not there"
        missing = self.lose(problem) if problem else None
        self.next_number = head.next_number
        return missing

    def lose(self, problem: str) -> Missing:
        """What follows does not follow on what was."""
        self.machine = None
        missing = Missing(
            segment=self.head.segment, after=max(0, self.next_number - 1), problem=problem
        )
        self.missing.append(missing)
        return missing

    def take_over(self, snapshot: Snapshot) -> Difference | None:
        """Go on from a segment's snapshot."""
        if snapshot.exact is None:
            return self._differs(0, "snapshot", "", "an exact snapshot", "one that is not")
        if self.machine is None:
            self.machine = Machine(snapshot.exact)
            return None
        got = self.machine.exact(snapshot)
        if got == snapshot.exact:
            return None
        for name in Exact.__struct_fields__:
            one, other = getattr(snapshot.exact, name), getattr(got, name)
            if one != other:
                return self._differs(
                    0, "snapshot", f"state at the beginning: {name}", *_first_unlike(one, other)
                )
        return None

    def take(self, item: Stimulated) -> Difference | None:
        """Give the core one stimulus."""
        kind = type(item.stimulus).__name__
        if self.machine is None:
            return self._differs(item.number, kind, "", "a snapshot before it", "none")
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        self.decisions += isinstance(item.stimulus, DECISIONS)
        self.next_number = item.number + 1
        got = answer_text(self.machine.answer(item.stimulus, item.names))
        if got == item.answer:
            return None
        what = msgspec.json.encode(item.stimulus).decode()
        return self._differs(item.number, kind, what, item.answer.decode(), got.decode())

    def _differs(self, number: int, kind: str, what: str, expected: str, got: str) -> Difference:
        return Difference(
            segment=self.head.segment,
            number=number,
            kind=kind,
            what=what,
            expected=expected,
            got=got,
        )

    def report(self, difference: Difference | None) -> Report:
        """What came of it."""
        return Report(
            runs=self.runs,
            segments=self.segments,
            stimuli=sum(self.by_kind.values()),
            decisions=self.decisions,
            by_kind=dict(sorted(self.by_kind.items())),
            difference=difference,
            missing=tuple(self.missing),
        )


def rerun(items: Iterable[Item], *, skip_gaps: bool = False) -> Report:
    """Replay a log, one segment after the other, up to the first difference.

    A gap ends it, unless ``skip_gaps``: then it goes on from the next snapshot.
    """
    run = _Rerun()
    for item in _until_gap(run, items, skip_gaps=skip_gaps):
        difference = run.take_over(item) if isinstance(item, Snapshot) else run.take(item)
        if difference is not None:
            return run.report(difference)
    return run.report(None)


def _until_gap(
    run: _Rerun, items: Iterable[Item], *, skip_gaps: bool
) -> Iterator[Snapshot | Stimulated]:
    """What can be replayed."""
    is_lost = False
    for item in items:
        missing: Missing | None = None
        match item:
            case Head():
                is_lost = False
                missing = run.begin(item)
            case Gap(dropped=dropped):
                missing = run.lose(f"{dropped} stimuli or more were not written")
                is_lost = True
            case Stimulated(number=number) if not is_lost and number != run.next_number:
                missing = run.lose(f"stimuli {run.next_number} to {number - 1} are not there")
                is_lost = True
        if missing is not None and not skip_gaps:
            return
        if isinstance(item, Snapshot | Stimulated) and not is_lost:
            yield item


def _first_unlike(one: object, other: object) -> tuple[str, str]:
    """Both, or only their first parts that differ."""
    if isinstance(one, Struct) and type(one) is type(other):
        for name in one.__struct_fields__:
            if getattr(one, name) != getattr(other, name):
                mine, theirs = _first_unlike(getattr(one, name), getattr(other, name))
                return f"{name}: {mine}", f"{name}: {theirs}"
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            if mine != theirs:
                return _first_unlike(mine, theirs)
    return str(one), str(other)
