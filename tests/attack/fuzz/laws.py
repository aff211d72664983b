# SPDX-License-Identifier: Apache-2.0
"""Runs one fuzzer and judges it: what no input may ever do to a service.

No exception that our code did not foresee, no HTTP 500, no end of a service, no call of more than
``CALL_S`` seconds of processor time, resident memory within ``GROWTH_MIB`` of the start, and a good
request succeeds afterwards. Processor time and not wall time, so that other work on the machine
changes nothing.
"""

import ctypes
import gc
import hashlib
import logging
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from hami_common.errors import HamiError

CALL_S = 1.0
GROWTH_MIB = 50
WARM_UP = 300
"""Cases before the memory of the start is read: imports, caches and pools are filled by then."""
TEXT_MOST = 200
LOOK_EVERY = 2_000
"""Cases between two readings of the memory."""
FORESEEN = (HamiError, msgspec.DecodeError)
"""Errors by which input is refused; all others in a log are bugs."""
DETAIL = " — "
"""Ends the part of a problem that is the same for every input."""


class Case(Struct, frozen=True, kw_only=True):
    """One input."""

    kind: str
    """Use of the bytes: a path, a subject, a format."""
    body: bytes
    before: bytes = b""
    """Input that has to be known to the service before ``body`` means anything."""


class Told(Struct, frozen=True, kw_only=True):
    """Result of one case."""

    problem: str = ""
    """Empty when every law holds."""
    outcome: str = ""
    """For the summary: shows that cases reach more than the first check."""


class Service(Protocol):
    """The service under attack, while it runs."""

    async def take(self, case: Case) -> Told:
        """Deliver the case and wait until the service is at rest."""
        ...

    async def finish(self) -> str:
        """Make a good request; returns the problem, empty when it succeeds."""
        ...

    def processor_s(self) -> float:
        """Processor time that the service has used, in seconds."""
        ...

    def resident_mib(self) -> float:
        """Resident memory of the service."""
        ...


class Target(Protocol):
    """A fuzzer."""

    name: str
    full: int
    """Cases of a run at full size."""
    few: int
    """Cases in the tier ``attack``."""
    is_shrunk: bool
    """A single case can be repeated on a fresh service at little cost."""

    def make(self, seed: str, number: int) -> Case:
        """Make the case of this number; the same seed and number give the same case."""
        ...

    def service(self) -> AbstractAsyncContextManager[Service]:
        """Start a fresh service for the time of the block; it raises what ends the service."""
        ...


class Fault(Struct, frozen=True, kw_only=True):
    """One violation of a law, by the first case that showed it."""

    problem: str
    case: Case
    number: int
    minimal: bytes = b""
    """The smallest input found that shows the same; empty where it was not searched for."""
    count: int = 1

    @property
    def law(self) -> str:
        """The part of the problem that does not depend on the input."""
        return self.problem.partition(DETAIL)[0]


class Report(Struct, kw_only=True):
    """One run of one fuzzer."""

    target: str
    seed: str
    count: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    """Most processor time of one case."""
    growth_mib: float = 0.0
    """Most that resident memory was above the start."""
    outcomes: dict[str, int] = {}
    faults: list[Fault] = field(default_factory=list)


def chance_of(seed: str, *about: object) -> random.Random:
    """Return the random numbers that belong to ``seed`` and ``about``."""
    text = ":".join(map(str, (seed, *about)))
    return random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()))


async def run(target: Target, *, seed: str, count: int, first: int = 0) -> Report:
    """Feed ``count`` cases to the target, starting a fresh service whenever one ends."""
    report = Report(target=target.name, seed=seed)
    outcomes: Counter[str] = Counter()
    faults = _Faults()
    started_s = time.monotonic()
    number, end = first, first + count
    while number < end:
        case = target.make(seed, number)
        memory = _Memory()
        try:
            with _unforeseen() as seen:
                async with target.service() as service:
                    while number < end:
                        case = target.make(seed, number)
                        problem, outcome, used_s = await _one(service, case, seen)
                        outcomes[outcome] += 1
                        report.slowest_s = max(report.slowest_s, used_s)
                        faults.note(problem, case, number)
                        number += 1
                        memory.look(service)
                    faults.note(await service.finish() or _first(seen), case, number - 1)
                    memory.read(service)
        except Exception as error:  # noqa: BLE001 - whatever ends a service is the finding
            faults.note(f"the service ended: {cause(error)}", case, number)
            number += 1
        report.growth_mib = max(report.growth_mib, memory.most_mib)
        if memory.most_mib > GROWTH_MIB:
            problem = f"resident memory grew by more than {GROWTH_MIB} MiB"
            faults.note(f"{problem}{DETAIL}{memory.most_mib:.0f} MiB", case, number - 1)
    report.count = number - first
    report.seconds = time.monotonic() - started_s
    report.outcomes = dict(sorted(outcomes.items()))
    report.faults = faults.all()
    return report


async def _one(service: Service, case: Case, seen: list[str]) -> tuple[str, str, float]:
    before_s = service.processor_s()
    told = await service.take(case)
    used_s = service.processor_s() - before_s
    problem = _first(seen) or told.problem
    if not problem and used_s > CALL_S:
        problem = f"{case.kind} used more than {CALL_S:g} s of processor time{DETAIL}{used_s:.1f}"
    return problem, told.outcome, used_s


def _first(seen: list[str]) -> str:
    """Return the first exception that was logged since the last call, and clear them all."""
    problem = seen[0] if seen else ""
    seen.clear()
    return problem


class _Faults:
    """Faults by the part of their problem that does not depend on the input."""

    def __init__(self) -> None:
        self._by_law: dict[str, Fault] = {}

    def note(self, problem: str, case: Case, number: int) -> None:
        """Count a problem; the first case that shows it is kept."""
        if not problem:
            return
        fault = Fault(problem=problem, case=case, number=number)
        known = self._by_law.setdefault(fault.law, fault)
        if known is not fault:
            self._by_law[fault.law] = replace(known, count=known.count + 1)

    def all(self) -> list[Fault]:
        """Return them in the order in which they were found."""
        return list(self._by_law.values())


class _Memory:
    """Resident memory of one service, from ``WARM_UP`` cases on."""

    def __init__(self) -> None:
        self._start_mib: float | None = None
        self._cases = 0
        self.most_mib = 0.0

    def look(self, service: Service) -> None:
        """Count a case and read the memory when it is time to."""
        self._cases += 1
        if self._cases == WARM_UP:
            self._start_mib = _settled_mib(service)
        elif self._cases % LOOK_EVERY == 0:
            self.read(service)

    def read(self, service: Service) -> None:
        """Read the memory."""
        if self._start_mib is not None:
            self.most_mib = max(self.most_mib, _settled_mib(service) - self._start_mib)


def _settled_mib(service: Service) -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return service.resident_mib()


def resident_mib(pid: int | str = "self") -> float:
    """Return the resident memory of a process; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * 4096 / (1 << 20)


class _Unforeseen(logging.Handler):
    """Keeps what was logged with an exception that refuses no input."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        """Note the exception, if there is one."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, FORESEEN):
            self._seen.append(f"{record.getMessage()}: {cause(error)}")


@contextmanager
def _unforeseen() -> Iterator[list[str]]:
    """Collect unforeseen exceptions from the log, and keep the log quiet."""
    seen: list[str] = []
    root, handler = logging.getLogger(), _Unforeseen(seen)
    kept, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    try:
        yield seen
    finally:
        root.handlers[:] = kept
        root.setLevel(level)


def cause(error: BaseException) -> str:
    """Name an exception by its type and the last line of ours that it came from."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/hami_" in frame.filename] or frames[-1:]
    where = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}{where}{DETAIL}{text[:TEXT_MOST]}"
