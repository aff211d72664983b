# SPDX-License-Identifier: Apache-2.0
"""Replays a stimulus log: passes each input to the core and compares the answers, bit by bit.

A segment begins with a snapshot. After an unbroken predecessor the core keeps its state, which must
equal the snapshot; so state that no answer shows is compared too. A gap or a missing segment ends
the replay unless the caller skips gaps; then the core resumes from the next snapshot. Reads no
files and no clock.
"""

from collections.abc import Iterable, Iterator
from typing import Final, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import InvariantBroken
from hami_core.core import Core
from hami_core.ledger import stimuli
from hami_core.replay.snapshot import Exact, Snapshot, resume, take_exact
from hami_core.replay.stimuluslog import DECISIONS, Gap, Head, Item, Stimulated, answer_text


class Difference(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first difference between a replay and its log."""

    segment: int
    number: int
    """Number of the stimulus; 0 where the state at a segment's beginning differs."""
    kind: str
    what: str
    """Name of the stimulus in the log."""
    expected: str
    got: str


class Missing(Struct, frozen=True, kw_only=True):
    """Stimuli that are absent from the log."""

    segment: int
    after: int
    """Number of the last stimulus before them."""
    problem: str


class Report(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of a replay."""

    runs: int = 0
    segments: int = 0
    stimuli: int = 0
    decisions: int = 0
    """Stimuli whose answer is a verdict about a pod."""
    by_kind: dict[str, int] = {}
    difference: Difference | None = None
    missing: tuple[Missing, ...] = ()
    """Gaps of the log.

    The replay ended at the first, or, with ``skip_gaps``, resumed after each.
    """

    @property
    def is_identical(self) -> bool:
        """True when every answer was the same."""
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
"""Errors of an input; the scheduler isolates the object and continues, and so does a replay."""


def answered(core: Core, item: Stimulated) -> object:
    """Return the core's answer to one input of a log, or the error that it raised."""
    try:
        return core.answer(cast("stimuli.Input[object]", item.stimulus), item.names)
    except FAILURES as error:
        return error


def state_of(core: Core, snapshot: Snapshot) -> Exact | None:
    """Return the present state, for comparison with that of ``snapshot``."""
    exact = take_exact(core, policy=snapshot.policy, now_s=snapshot.time_s).exact
    if exact is None or snapshot.exact is None or snapshot.exact.quota is not None:
        return exact
    return replace(exact, quota=None)


class _Rerun:
    """One replay in progress."""

    def __init__(self) -> None:
        self.core: Core | None = None
        self.head = Head(format=0, run="", segment=0, next_number=1)
        self.next_number = 1
        self.runs = self.segments = self.decisions = 0
        self.by_kind: dict[str, int] = {}
        self.missing: list[Missing] = []

    def begin(self, head: Head) -> Missing | None:
        """Begin a segment."""
        before, self.head = self.head, head
        self.segments += 1
        is_next = (before.run, before.segment + 1) == (head.run, head.segment)
        problem = ""
        if head.run != before.run:
            self.runs += 1
            self.core = None
            if before.run and head.segment > 1:
                problem = f"the first segments of run {head.run} are not there"
        elif not is_next:
            problem = f"segment {before.segment + 1} of run {head.run} is not there"
        elif self.core is not None and head.next_number != self.next_number:
            problem = f"stimuli {self.next_number} to {head.next_number - 1} are not there"
        missing = self.lose(problem) if problem else None
        self.next_number = head.next_number
        return missing

    def lose(self, problem: str) -> Missing:
        """Note a gap: the next input does not continue the present state."""
        self.core = None
        missing = Missing(
            segment=self.head.segment, after=max(0, self.next_number - 1), problem=problem
        )
        self.missing.append(missing)
        return missing

    def take_over(self, snapshot: Snapshot) -> Difference | None:
        """Resume from a segment's snapshot."""
        if snapshot.exact is None:
            return self._differs(0, "snapshot", "", "an exact snapshot", "one that is not")
        if self.core is None:
            self.core = resume(snapshot.exact)
            return None
        got = state_of(self.core, snapshot)
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
        """Pass one stimulus to the core."""
        kind = type(item.stimulus).__name__
        if self.core is None:
            return self._differs(item.number, kind, "", "a snapshot before it", "none")
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        self.decisions += isinstance(item.stimulus, DECISIONS)
        self.next_number = item.number + 1
        got = answer_text(answered(self.core, item))
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
        """Return the result."""
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

    A gap ends it, unless ``skip_gaps``: then it resumes from the next snapshot.
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
    """Yield the items that can be replayed."""
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
    """Return both values, or only their first parts that differ."""
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
