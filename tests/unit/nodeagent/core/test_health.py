# SPDX-License-Identifier: Apache-2.0
"""The health book: events that condemn a device, that restore it, and that must not affect it."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.errors import InvariantBroken
from hami_common.model.device import DeviceFacts
from hami_nodeagent.core.health import (
    USABLE,
    DeviceListed,
    DeviceLost,
    DriverGone,
    FaultSeen,
    HealthBook,
    HealthChanged,
    HealthRules,
    HealthState,
    OperatorVerdict,
    ProbeFailed,
    ProbePassed,
    Stimulus,
)

A, B = "GPU-a", "GPU-b"
RULES = HealthRules(failures_to_condemn=3, probes_to_recover=3, recover_s=10.0)


@pytest.fixture
def book() -> Iterator[HealthBook]:
    health = HealthBook(RULES)
    health.handle(DeviceListed(uuid=A), 0.0)
    health.handle(DeviceListed(uuid=B), 0.0)
    yield health
    health.check()


def fatal(uuid: str, code: int = 79) -> FaultSeen:
    return FaultSeen(uuid=uuid, code=code, fatal=True, text=f"Xid {code}")


def harmless(uuid: str, code: int) -> FaultSeen:
    return FaultSeen(uuid=uuid, code=code, fatal=False, text=f"Xid {code}")


def test_fatal_fault_makes_the_device_unusable_at_once(book: HealthBook) -> None:
    assert book.handle(fatal(A), 1.0) == (HealthChanged(uuid=A, usable=False, reason="Xid 79"),)
    assert book.verdict(A).state is HealthState.UNHEALTHY
    assert book.verdict(B).usable


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109])
def test_application_fault_changes_no_state_and_is_kept_in_the_history(
    book: HealthBook, code: int
) -> None:
    assert book.handle(harmless(A, code), 1.0) == ()
    assert book.verdict(A).state is HealthState.HEALTHY
    assert f"harmless fault, Xid {code}" in book.story(A)[-1]


def test_one_failed_probe_is_only_a_suspicion(book: HealthBook) -> None:
    assert book.handle(ProbeFailed(uuid=A, reason="hiccup"), 1.0) == ()
    assert book.verdict(A).state is HealthState.SUSPECT
    assert book.verdict(A).usable
    assert book.handle(ProbePassed(uuid=A), 2.0) == ()
    assert book.verdict(A).state is HealthState.HEALTHY


def test_only_consecutive_failed_probes_condemn(book: HealthBook) -> None:
    stimuli: list[Stimulus] = [
        ProbeFailed(uuid=A, reason="one"),
        ProbeFailed(uuid=A, reason="two"),
        ProbePassed(uuid=A),
        ProbeFailed(uuid=A, reason="one"),
        ProbeFailed(uuid=A, reason="two"),
    ]
    for now_s, stimulus in enumerate(stimuli):
        assert book.handle(stimulus, float(now_s)) == ()
    changed = book.handle(ProbeFailed(uuid=A, reason="three"), 6.0)
    assert changed == (HealthChanged(uuid=A, usable=False, reason="three"),)


def test_device_returns_after_enough_clean_probes_and_enough_time(book: HealthBook) -> None:
    book.handle(fatal(A), 0.0)
    for now_s in (1.0, 2.0, 3.0, 4.0):
        assert book.handle(ProbePassed(uuid=A), now_s) == ()
        assert book.verdict(A).state is HealthState.RECOVERING
    assert book.handle(ProbePassed(uuid=A), 10.9) == ()
    changed = book.handle(ProbePassed(uuid=A), 11.0)
    assert changed == (HealthChanged(uuid=A, usable=True, reason=""),)


def test_time_alone_does_not_restore_a_device(book: HealthBook) -> None:
    book.handle(fatal(A), 0.0)
    book.handle(ProbePassed(uuid=A), 1.0)
    assert book.handle(ProbePassed(uuid=A), 1000.0) == ()
    assert not book.verdict(A).usable


def test_setback_during_recovery_starts_the_count_again(book: HealthBook) -> None:
    book.handle(fatal(A), 0.0)
    book.handle(ProbePassed(uuid=A), 1.0)
    book.handle(ProbePassed(uuid=A), 2.0)
    changed = book.handle(ProbeFailed(uuid=A, reason="again"), 3.0)
    assert changed == (HealthChanged(uuid=A, usable=False, reason="again"),)
    for now_s in (20.0, 29.0):
        assert book.handle(ProbePassed(uuid=A), now_s) == ()
    assert book.handle(ProbePassed(uuid=A), 30.0)[0].usable


def test_lost_device_does_not_touch_the_others(book: HealthBook) -> None:
    changed = book.handle(DeviceLost(uuid=A, reason="fell off the bus"), 1.0)
    assert [change.uuid for change in changed] == [A]


def test_driver_gone_affects_every_device_and_is_reported_once(book: HealthBook) -> None:
    changed = book.handle(DriverGone(reason="unloaded"), 1.0)
    assert {change.uuid for change in changed} == {A, B}
    assert book.handle(DriverGone(reason="unloaded"), 2.0) == ()


def test_device_listed_with_a_problem_is_not_usable(book: HealthBook) -> None:
    changed = book.handle(DeviceListed(uuid=A, problem="no handle"), 1.0)
    assert changed == (HealthChanged(uuid=A, usable=False, reason="no handle"),)


def test_listing_a_device_again_does_not_restore_it(book: HealthBook) -> None:
    book.handle(fatal(A), 1.0)
    assert book.handle(DeviceListed(uuid=A), 2.0) == ()
    assert not book.verdict(A).usable


def test_fault_before_the_device_is_listed_is_kept() -> None:
    book = HealthBook(RULES)
    book.handle(fatal(A), 1.0)
    book.handle(DeviceListed(uuid=A), 2.0)
    assert not book.verdict(A).usable


def test_operator_verdict_hides_the_state_until_it_is_withdrawn(book: HealthBook) -> None:
    out = OperatorVerdict(uuid=A, usable=False, reason="maintenance")
    assert book.handle(out, 1.0) == (HealthChanged(uuid=A, usable=False, reason="maintenance"),)
    assert book.handle(fatal(A), 2.0) == ()
    back = book.handle(OperatorVerdict(uuid=A, usable=None), 3.0)
    assert back == (HealthChanged(uuid=A, usable=False, reason="Xid 79"),)
    forced = book.handle(OperatorVerdict(uuid=A, usable=True), 4.0)
    assert forced == (HealthChanged(uuid=A, usable=True, reason=""),)


def test_judged_facts_carry_the_verdict(book: HealthBook) -> None:
    facts = DeviceFacts(uuid=A, vendor="nvidia", index=0, type="NVIDIA A30", memory_mib=24576)
    assert book.judge(facts) == facts
    book.handle(fatal(A), 1.0)
    judged = book.judge(facts)
    assert (judged.healthy, judged.health_reason) == (False, "Xid 79")


def test_broken_record_is_reported_with_its_story(book: HealthBook) -> None:
    book.handle(ProbeFailed(uuid=A, reason="x"), 1.0)
    stricter = HealthBook(HealthRules(failures_to_condemn=1))
    stricter._record_by_uuid = book._record_by_uuid  # noqa: SLF001 -- a state no stimulus leads to
    with pytest.raises(InvariantBroken, match="ProbeFailed, x"):
        stricter.check()


STIMULI = st.one_of(
    st.sampled_from([A, B]).flatmap(
        lambda uuid: st.sampled_from(
            [
                DeviceListed(uuid=uuid),
                DeviceListed(uuid=uuid, problem="no handle"),
                ProbePassed(uuid=uuid),
                ProbeFailed(uuid=uuid, reason="error"),
                fatal(uuid),
                harmless(uuid, 31),
                DeviceLost(uuid=uuid, reason="lost"),
            ]
        )
    ),
    st.just(DriverGone(reason="gone")),
)


@given(st.lists(st.tuples(STIMULI, st.floats(0, 20)), max_size=60))
def test_exactly_the_changes_of_the_published_verdict_are_reported(
    steps: list[tuple[Stimulus, float]],
) -> None:
    book = HealthBook(RULES)
    published = {A: (True, ""), B: (True, "")}
    now_s = 0.0
    for stimulus, pause_s in steps:
        now_s += pause_s
        for change in book.handle(stimulus, now_s):
            assert published[change.uuid] != (change.usable, change.reason)
            published[change.uuid] = (change.usable, change.reason)
        book.check()
        for uuid, known in published.items():
            verdict = book.verdict(uuid)
            assert (verdict.usable, verdict.reason) == known
            assert verdict.usable == (verdict.state in USABLE)


@given(st.lists(st.tuples(STIMULI, st.floats(0, 20)), max_size=40))
def test_any_device_recovers_by_clean_probes_alone(
    steps: list[tuple[Stimulus, float]],
) -> None:
    book = HealthBook(RULES)
    now_s = 0.0
    for stimulus, pause_s in steps:
        now_s += pause_s
        book.handle(stimulus, now_s)
    for step in range(4):
        book.handle(ProbePassed(uuid=A), now_s + 5.0 * step)
    assert book.verdict(A).state is HealthState.HEALTHY


def of_part(number: int, code: int = 94) -> FaultSeen:
    return FaultSeen(uuid=A, code=code, fatal=True, text=f"Xid {code}", part=number)


def test_fault_of_a_part_leaves_the_device_usable_until_the_part_is_well() -> None:
    book = HealthBook(HealthRules(probes_to_recover=2, recover_s=5.0))
    (told,) = book.handle(of_part(7), 1.0)
    assert told == HealthChanged(uuid=A, usable=False, reason="Xid 94", part=7)
    assert book.handle(of_part(7), 1.5) == ()
    assert book.verdict(A).usable
    assert book.handle(ProbePassed(uuid=B), 2.0) == ()
    assert book.handle(ProbePassed(uuid=A), 2.0) == ()
    assert book.handle(ProbeFailed(uuid=A, reason="no answer"), 4.0) == ()
    assert book.handle(ProbePassed(uuid=A), 5.0) == ()
    assert book.handle(ProbePassed(uuid=A), 7.0) == ()
    (well,) = book.handle(ProbePassed(uuid=A), 10.0)
    assert well == HealthChanged(uuid=A, usable=True, reason="", part=7)
    assert book.handle(ProbePassed(uuid=A), 20.0) == ()


def test_parts_are_judged_apart_and_harmless_faults_of_them_are_none() -> None:
    book = HealthBook()
    assert book.handle(replace(of_part(3), fatal=False), 1.0) == ()
    assert [one.part for one in book.handle(of_part(7), 1.0)] == [7]
    assert [one.part for one in book.handle(of_part(8), 1.0)] == [8]
    assert [one.reason for one in book.handle(of_part(8, 63), 1.0)] == ["Xid 63"]
    book.check()
