# SPDX-License-Identifier: Apache-2.0
"""What a log of stimuli looks like: kinds with versions, numbered lines, answers (design D15).

A log is a row of segments. A segment is JSON lines, compressed by gzip. Its first line is ``head``
with the run and the segment's number, its second ``snapshot``, exact, so that each segment can be
replayed by itself; then stimuli in the order in which the core took them, each with what the core
answered. Stimuli are numbered from 1 within a run, so what is missing shows. ``names`` lines hold
lists of node names, which repeat; a stimulus refers to the newest list of a number. ``gap`` says
how many stimuli were not written, because the queue to the disk was full.

A kind is one stimulus type. New ledger stimuli (members of ``stimuli.Stimulus``) become kinds by
themselves; a new call gets one entry in ``CALLS`` and one branch in ``rerun.Machine``. Whoever
changes a type so that older logs mean something else raises its version in ``VERSIONS`` and gives
``OLDER`` a function that makes today's type of the older text. A line of a kind or version that
this program does not know is ``WireInvalid``: nothing is skipped.

Answers of filter and prioritize are shortened: counts, classes, the best nodes, and a digest of
everything, so that equal answers are equal to the bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Final, NamedTuple, get_args

import msgspec
import numpy as np
from msgspec import Raw, Struct

from hami_common.errors import InvariantBroken, WireInvalid
from hami_common.events import codec
from hami_common.events.codec import UNDECODABLE
from hami_common.events.decision import NodeScore
from hami_core.ledger import stimuli
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.verdicts import Filtered, Scored
from hami_core.quota.verdicts import Allowed
from hami_core.replay.snapshot import Snapshot

FORMAT: Final = 1
"""Version of the lines themselves."""
DIGEST_BYTES: Final = 16
BEST_TOLD: Final = 4

CALLS: Final[tuple[type[Struct], ...]] = (
    stimuli.DevicesPut,
    stimuli.DevicesRemoved,
    stimuli.DevicesBegin,
    stimuli.DevicesEnd,
    stimuli.HeartbeatHeard,
    stimuli.BusUnheard,
    stimuli.SilenceJudged,
    stimuli.FaultHeard,
    stimuli.NodeStands,
    stimuli.Forgotten,
    stimuli.FilterAsked,
    stimuli.PrioritizeAsked,
    stimuli.BindPlanned,
    stimuli.HoldPlanned,
    stimuli.RestorePlanned,
    stimuli.NodeWithheld,
    stimuli.QuotaPut,
    stimuli.QuotaDropped,
    stimuli.QueuesSet,
    stimuli.QuotaFolded,
    stimuli.QuotaSynced,
    stimuli.QuotaReset,
    stimuli.QuotaExpected,
    stimuli.QuotaUnexpected,
    stimuli.QuotaAsked,
    stimuli.QuotaLooked,
    stimuli.QuotaJudged,
)
"""Stimuli of the core beside those of the ledger."""

VERSIONS: Final[Mapping[str, int]] = MappingProxyType({})
"""Present version of a kind, where that is not 1."""

OLDER: Final[Mapping[tuple[str, int], Callable[[Raw], Struct]]] = MappingProxyType({})
"""Makes today's stimulus of an older version's text."""

Named = stimuli.FilterAsked | stimuli.PrioritizeAsked
DECISIONS: Final = (
    stimuli.FilterAsked,
    stimuli.PrioritizeAsked,
    stimuli.BindPlanned,
    stimuli.HoldPlanned,
    stimuli.RestorePlanned,
    stimuli.QuotaAsked,
    stimuli.QuotaLooked,
    stimuli.QuotaJudged,
)
"""Kinds whose answer is a verdict about a pod."""


class Kind(NamedTuple):
    """One stimulus type."""

    name: str
    version: int
    type: type[Struct]


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        type_.__name__: Kind(type_.__name__, VERSIONS.get(type_.__name__, 1), type_)
        for type_ in (*get_args(stimuli.Stimulus), *CALLS)
    }
)


class Head(Struct, frozen=True, kw_only=True):
    """Begins a segment."""

    format: int
    run: str
    """Name of one run of a scheduler, which nothing else has."""
    segment: int
    """From 1 within the run."""
    next_number: int
    """Number of the first stimulus."""
    program: str = ""
    """Version of what wrote it."""


class Gap(Struct, frozen=True, kw_only=True):
    """Stimuli were not written."""

    dropped: int
    """At least so many."""


class Names(Struct, frozen=True, kw_only=True):
    """A list of node names, from here on known by its number."""

    slot: int
    names: Raw


class Stimulated(NamedTuple):
    """One stimulus and what was answered."""

    number: int
    stimulus: Struct
    names: NodeNames | None
    answer: bytes


Item = Head | Snapshot | Gap | Stimulated


class _Line(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. Letters are short because there are many lines."""

    k: str
    """Kind."""
    v: int = 1
    """Version of the kind."""
    n: int = 0
    """Number, of a stimulus."""
    p: Raw
    """What it says."""
    a: Raw = Raw(b"null")
    """What was answered."""


_encoder = msgspec.json.Encoder(order="deterministic")
_lines = msgspec.json.Decoder(_Line)


# --- answers --------------------------------------------------------------------------------------


class FilterAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A filter's verdict in short."""

    feasible: int
    refused: dict[str, int] = {}
    """Nodes by reason text."""
    digest: str


class PrioritizeAnswer(Struct, frozen=True, kw_only=True):
    """A prioritize's verdict in short."""

    best: tuple[NodeScore, ...]
    digest: str


class Broken(Struct, frozen=True, kw_only=True):
    """The core refused the stimulus, or failed on it: nothing was folded."""

    broken: str


class Told(Struct, frozen=True, kw_only=True):
    """A Struct or several, with their kinds."""

    kinds: tuple[str, ...]
    values: tuple[Struct, ...]


def answer_text(answer: object) -> bytes:
    """The answer of a call as it stands in the log: equal answers give equal bytes."""
    if isinstance(answer, Filtered | Allowed):
        answer = _filter_answer(answer)
    elif isinstance(answer, Scored):
        answer = _prioritize_answer(answer)
    elif isinstance(answer, InvariantBroken):
        answer = Broken(broken=answer.what)
    elif isinstance(answer, Exception):
        # Texts of Python's own errors may name what differs between two runs.
        answer = Broken(broken=type(answer).__name__)
    elif isinstance(answer, Struct):
        answer = Told(kinds=(type(answer).__name__,), values=(answer,))
    elif isinstance(answer, list) and answer and isinstance(answer[0], Struct):
        answer = Told(kinds=tuple(type(one).__name__ for one in answer), values=tuple(answer))
    return _encoder.encode(answer)


def _filter_answer(filtered: Filtered | Allowed) -> FilterAnswer:
    digest = blake2b(filtered.left.json(), digest_size=DIGEST_BYTES)
    digest.update(_encoder.encode(filtered.classes()))
    refused: dict[str, int] = {}
    for refusal, places in filtered.groups():
        digest.update(_encoder.encode(refusal))
        digest.update(np.sort(places).astype(np.int64).tobytes())  # their order means nothing
        refused[refusal.text] = len(places)
    return FilterAnswer(feasible=len(filtered.left), refused=refused, digest=digest.hexdigest())


def _prioritize_answer(scored: Scored) -> PrioritizeAnswer:
    scores = np.ascontiguousarray(scored.scores, np.float64)
    best = np.argsort(-scores, kind="stable")[:BEST_TOLD]
    told = zip(scored.nodes.several(best), scores[best].tolist(), strict=True)
    return PrioritizeAnswer(
        best=tuple(NodeScore(node=node, score=score) for node, score in told),
        digest=blake2b(scores.tobytes(), digest_size=DIGEST_BYTES).hexdigest(),
    )


# --- writing --------------------------------------------------------------------------------------


class Writer:
    """Makes the lines of one segment."""

    SLOTS: Final = 64
    """Lists of names that are known at a time."""

    def __init__(self) -> None:
        """No list of names is known."""
        self._slots: dict[bytes, int] = {}

    def begin(self, head: Head, snapshot: Snapshot) -> Iterator[bytes]:
        """The first lines."""
        yield _line("head", head)
        yield _line("snapshot", snapshot)

    def gap(self, dropped: int) -> bytes:
        """The line that says what is missing."""
        return _line("gap", Gap(dropped=dropped))

    def stimulus(
        self, number: int, stimulus: Struct, names: NodeNames | None, answer: object
    ) -> Iterator[bytes]:
        """The lines of one stimulus."""
        if names is not None:
            text = names.json()
            slot = self._slots.get(text)
            if slot is None:
                slot = self._new_slot(text)
                yield _line("names", Names(slot=slot, names=Raw(text)))
            stimulus = msgspec.structs.replace(stimulus, names=slot)
        kind = KINDS[type(stimulus).__name__]
        yield _line(
            kind.name, stimulus, version=kind.version, number=number, answer=answer_text(answer)
        )

    def _new_slot(self, text: bytes) -> int:
        if len(self._slots) < self.SLOTS:
            slot = len(self._slots)
        else:
            slot = self._slots.pop(next(iter(self._slots)))
        self._slots[text] = slot
        return slot


def _line(
    kind: str, payload: Struct, *, version: int = 1, number: int = 0, answer: bytes = b"null"
) -> bytes:
    said = Raw(_encoder.encode(payload))
    text = _encoder.encode(_Line(k=kind, v=version, n=number, p=said, a=Raw(answer)))
    if b"\n" in text:  # white space in names that somebody else encoded
        text = text.replace(b"\n", b" ")
    return text + b"\n"


# --- reading --------------------------------------------------------------------------------------


class Reader:
    """Reads the lines of one segment."""

    def __init__(self, what: str) -> None:
        """``what`` names the segment in errors."""
        self._what = what
        self._names: dict[int, NodeNames] = {}

    def items(self, lines: Iterable[bytes]) -> Iterator[Item]:
        """What the lines say; ``WireInvalid`` names the first line that this program cannot read.

        A last line without its end is what a writer left that was stopped: it is passed over.
        """
        for number, text in enumerate(lines, start=1):
            if not text.endswith(b"\n"):
                return
            try:
                item = self._item(_lines.decode(text))
            except WireInvalid as error:
                raise WireInvalid(what=f"{self._what}, line {number}", problem=error.problem) from (
                    error
                )
            except UNDECODABLE as error:
                raise WireInvalid(what=f"{self._what}, line {number}", problem=str(error)) from (
                    error
                )
            if item is not None:
                if (number == 1) != isinstance(item, Head):
                    problem = "a segment begins with its head" if number == 1 else "a second head"
                    raise WireInvalid(what=f"{self._what}, line {number}", problem=problem)
                yield item

    def _item(self, line: _Line) -> Item | None:
        match line.k:
            case "head":
                return self._head(line)
            case "snapshot":
                return msgspec.json.decode(line.p, type=Snapshot)
            case "gap":
                return msgspec.json.decode(line.p, type=Gap)
            case "names":
                known = msgspec.json.decode(line.p, type=Names)
                self._names[known.slot] = NodeNames(bytes(known.names).strip()[1:])
                return None
        stimulus = _stimulus(line)
        names: NodeNames | None = None
        if isinstance(stimulus, Named):
            names = self._names.get(stimulus.names)
            if names is None:
                problem = f"names a list {stimulus.names} of nodes that does not stand before it"
                raise WireInvalid(what=line.k, problem=problem)
        return Stimulated(line.n, stimulus, names, bytes(line.a))

    def _head(self, line: _Line) -> Head:
        head = msgspec.json.decode(line.p, type=Head)
        if head.format != FORMAT:
            problem = f"format {head.format}, and this program reads {FORMAT}"
            raise WireInvalid(what=line.k, problem=problem)
        return head


def _stimulus(line: _Line) -> Struct:
    kind = KINDS.get(line.k)
    if kind is None:
        problem = f"stimulus of kind {line.k!r}, which this program does not know; use the program"
        raise WireInvalid(what=line.k, problem=f"{problem} that goes with the scheduler")
    if line.v != kind.version:
        older = OLDER.get((line.k, line.v))
        if older is None:
            problem = (
                f"stimulus {line.k} of version {line.v}, and this program reads {kind.version}"
            )
            raise WireInvalid(what=line.k, problem=problem)
        return older(line.p)
    return codec.decode(bytes(line.p), kind.type, what=line.k)
