# SPDX-License-Identifier: Apache-2.0
"""The fuzzers notice every kind of violation, repeat a case exactly, and make inputs small."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from hami_common.errors import WireInvalid
from tests.attack.fuzz import laws
from tests.attack.fuzz.laws import Case, Told, chance_of, run
from tests.attack.fuzz.shrink import smaller
from tests.attack.fuzz.targets import TARGETS

pytestmark = pytest.mark.anyio

CASES = 700
BAD = 5


class Subject:
    """A service that misbehaves at one case, in the way that a test chooses."""

    name = "subject"
    full = few = CASES
    is_shrunk = True

    def __init__(self, misbehave: Callable[["Subject"], Told | None] | None = None) -> None:
        self.used_s = 0.0
        self.held_mib = 10.0
        self.starts = 0
        self.last_words = ""
        self._misbehave = misbehave

    def make(self, seed: str, number: int) -> Case:
        return Case(kind="x", body=f"{seed}-{number}".encode())

    @asynccontextmanager
    async def service(self) -> AsyncIterator["Subject"]:
        self.starts += 1
        yield self

    async def take(self, case: Case) -> Told:
        self.used_s += 0.001
        if case.body.endswith(f"-{BAD}".encode()) and self._misbehave is not None:
            return self._misbehave(self) or Told(outcome="bad")
        return Told(outcome="good")

    async def finish(self) -> str:
        return self.last_words

    def processor_s(self) -> float:
        return self.used_s

    def resident_mib(self) -> float:
        return self.held_mib


def answers_500(_: Subject) -> Told:
    return Told(problem="HTTP 500", outcome="500")


def logs_a_bug(_: Subject) -> None:
    logging.getLogger("hami_x").error("admission failed", exc_info=KeyError("env"))


def logs_a_refusal(_: Subject) -> None:
    error = WireInvalid(what="x", problem="does not decode")
    logging.getLogger("hami_x").error("object quarantined", exc_info=error)


def ends(_: Subject) -> None:
    raise OverflowError("Python int too large to convert to C long")


def takes_long(subject: Subject) -> None:
    subject.used_s += laws.CALL_S + 0.1


def will_not_place(subject: Subject) -> None:
    subject.last_words = "a good pod is not bound afterwards"


@pytest.mark.parametrize(
    ("misbehave", "law"),
    [
        (answers_500, "HTTP 500"),
        (logs_a_bug, "admission failed: KeyError"),
        (ends, "the service ended: OverflowError"),
        (takes_long, "x used more than 1 s"),
        (will_not_place, "a good pod is not bound"),
    ],
)
async def test_violation_is_noted_once_with_its_case(
    misbehave: Callable[[Subject], Told | None], law: str
) -> None:
    subject = Subject(misbehave)
    report = await run(subject, seed="s", count=CASES)
    (fault,) = report.faults
    assert fault.problem.startswith(law)
    assert report.count == CASES
    if misbehave is not will_not_place:
        assert (fault.number, fault.case.body) == (BAD, b"s-5")
    assert subject.starts == (2 if misbehave is ends else 1)


async def test_memory_that_grows_after_the_warm_up_is_noted() -> None:
    subject = Subject()

    class Growing(Subject):
        async def take(self, case: Case) -> Told:
            self.held_mib += 0.2
            return await super().take(case)

    assert (await run(subject, seed="s", count=CASES)).faults == []
    report = await run(Growing(), seed="s", count=CASES)
    assert report.growth_mib > laws.GROWTH_MIB
    assert [fault.law for fault in report.faults] == ["resident memory grew by more than 50 MiB"]


async def test_expected_error_in_the_log_is_no_violation() -> None:
    report = await run(Subject(logs_a_refusal), seed="s", count=CASES)
    assert report.faults == []
    assert report.outcomes == {"bad": 1, "good": CASES - 1}


@pytest.mark.parametrize("name", TARGETS)
def test_case_depends_on_seed_and_number_alone(name: str) -> None:
    target = TARGETS[name]
    again = [target.make("a", number) for number in range(40)]
    assert [target.make("a", number) for number in range(40)] == again
    assert [target.make("b", number) for number in range(40)] != again


async def test_input_is_made_as_small_as_the_failure_allows() -> None:
    document = {
        "metadata": {"name": "p", "labels": {"a": "1"}},
        "spec": {"items": [1, 2, {"x": 9}]},
    }

    async def fails(body: bytes) -> bool:
        try:
            found = json.loads(body)
        except ValueError:
            return False
        return isinstance(found, dict) and "x" in str(found.get("spec"))

    small = await smaller(msgspec.json.encode(document), fails)
    assert await fails(small)
    assert len(small) <= len(b'{"spec":"x"}') + len(b'{"items":[{"":9}]}')
    assert b"metadata" not in small


async def test_bytes_that_are_no_document_are_cut() -> None:
    async def fails(body: bytes) -> bool:
        return b"\xff" in body

    assert await smaller(b"abc" * 50 + b"\xff" + b"xyz" * 50, fails) == b"\xff"


def test_random_numbers_of_different_cases_differ() -> None:
    assert chance_of("s", "a", 1).random() != chance_of("s", "a", 2).random()
    assert chance_of("s", "a", 1).random() == chance_of("s", "a", 1).random()
