# SPDX-License-Identifier: Apache-2.0
"""Format of a stimulus log: kinds with versions, numbered lines, answers (design D15).

A log is a row of segments. A segment is JSON lines, compressed by gzip. Its first line is ``head``
with the run and the segment's number, its second ``snapshot``, exact, so that each segment can be
replayed by itself; then stimuli in the order in which the core took them, each with the core's
answer. Stimuli are numbered from 1 within a run, so that gaps are visible. ``names`` lines contain
lists of node names, which repeat; a stimulus refers to the newest list of a number. ``gap``
contains the number of stimuli that were not written because the queue to the disk was full.

Each subclass of ``stimuli.Input`` is a kind. A change of a type that gives older logs another
meaning raises its version in ``VERSIONS``, and adds to ``OLDER`` a function that converts the older
text. A line of an unknown kind or version is ``WireInvalid``: no line is skipped.

Answers that name nodes are shortened: counts, classes, the best nodes, and a digest of everything,
so that equal answers are equal to the bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Final, NamedTuple

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

VERSIONS: Final[Mapping[str, int]] = MappingProxyType({})
"""Present version of a kind where it is not 1."""

OLDER: Final[Mapping[tuple[str, int], Callable[[Raw], Struct]]] = MappingProxyType({})
"""Converts the text of an older version into the present stimulus."""

Named = stimuli.FilterAsked | stimuli.PrioritizeAsked
DECISIONS: Final = (
    stimuli.FilterAsked,
    stimuli.PrioritizeAsked,
    stimuli.ShortlistAsked,
    stimuli.BindPlanned,
    stimuli.HoldPlanned,
    stimuli.TakePlanned,
    stimuli.RestorePlanned,
    stimuli.ClaimPlanned,
    stimuli.QuotaAsked,
    stimuli.QuotaLooked,
    stimuli.QuotaJudged,
)
"""Kinds whose answer is a verdict about a pod or a claim."""


class Kind(NamedTuple):
    """One stimulus type."""

    name: str
    version: int
    type: type[Struct]


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        type_.__name__: Kind(type_.__name__, VERSIONS.get(type_.__name__, 1), type_)
        for type_ in stimuli.Input.__subclasses__()
    }
)


class Head(Struct, frozen=True, kw_only=True):
    """Begins a segment."""

    format: int
    run: str
    """Unique name of one run of a scheduler."""
    segment: int
    """From 1 within the run."""
    next_number: int
    """Number of the first stimulus."""
    program: str = ""
    """Version of the writer."""


class Gap(Struct, frozen=True, kw_only=True):
    """Stimuli were not written."""

    dropped: int
    """Lower bound of their number."""


class Names(Struct, frozen=True, kw_only=True):
    """A list of node names, known by its number from here on."""

    slot: int
    names: Raw


class Stimulated(NamedTuple):
    """One stimulus and its answer."""

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
    """Content of the line."""
    a: Raw = Raw(b"null")
    """The answer."""


_encoder = msgspec.json.Encoder(order="deterministic")
_lines = msgspec.json.Decoder(_Line)


# --- answers --------------------------------------------------------------------------------------


class FilterAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A filter's verdict, shortened."""

    feasible: int
    refused: dict[str, int] = {}
    """Nodes by reason text."""
    digest: str


class PrioritizeAnswer(Struct, frozen=True, kw_only=True):
    """A prioritize's verdict, shortened."""

    best: tuple[NodeScore, ...]
    digest: str


class ShortlistAnswer(Struct, frozen=True, kw_only=True):
    """A shortlist, shortened."""

    nodes: int
    digest: str


class Broken(Struct, frozen=True, kw_only=True):
    """The core refused the stimulus, or failed on it: nothing was folded."""

    broken: str


class Told(Struct, frozen=True, kw_only=True):
    """One Struct or several, with their kinds."""

    kinds: tuple[str, ...]
    values: tuple[Struct, ...]


def answer_text(answer: object) -> bytes:
    """Return the answer of a call as the log contains it: equal answers give equal bytes."""
    if isinstance(answer, Filtered | Allowed):
        answer = _filter_answer(answer)
    elif isinstance(answer, Scored):
        answer = _prioritize_answer(answer)
    elif isinstance(answer, NodeNames):
        digest = blake2b(answer.json(), digest_size=DIGEST_BYTES).hexdigest()
        answer = ShortlistAnswer(nodes=len(answer), digest=digest)
    elif isinstance(answer, InvariantBroken):
        answer = Broken(broken=answer.what)
    elif isinstance(answer, Exception):
        # Texts of Python's own errors may contain values that differ between two runs.
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
    ranked = zip(scored.nodes.several(best), scores[best].tolist(), strict=True)
    return PrioritizeAnswer(
        best=tuple(NodeScore(node=node, score=score) for node, score in ranked),
        digest=blake2b(scores.tobytes(), digest_size=DIGEST_BYTES).hexdigest(),
    )


# --- writing --------------------------------------------------------------------------------------


class Writer:
    """Writes the lines of one segment."""

    SLOTS: Final = 64
    """Lists of names that are known at a time."""

    def __init__(self) -> None:
        """Start without name lists."""
        self._slots: dict[bytes, int] = {}

    def begin(self, head: Head, snapshot: Snapshot) -> Iterator[bytes]:
        """Yield the first lines."""
        yield _line("head", head)
        yield _line("snapshot", snapshot)

    def gap(self, dropped: int) -> bytes:
        """Return the line that reports a gap."""
        return _line("gap", Gap(dropped=dropped))

    def stimulus(
        self, number: int, stimulus: Struct, names: NodeNames | None, answer: object
    ) -> Iterator[bytes]:
        """Yield the lines of one stimulus."""
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
    content = Raw(_encoder.encode(payload))
    text = _encoder.encode(_Line(k=kind, v=version, n=number, p=content, a=Raw(answer)))
    if b"\n" in text:  # white space in names that another encoder wrote
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
        """Decode the lines; ``WireInvalid`` names the first line that this program cannot read.

        An incomplete last line is the rest of a stopped writer: it is skipped.
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
