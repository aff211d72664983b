# SPDX-License-Identifier: Apache-2.0
"""The state of an allocation that is written next."""

from typing import Any

import pytest
from msgspec.structs import replace

from hami_common.errors import InvariantBroken
from hami_common.events.allocation import StateRecord
from hami_nodeagent.core import reporting
from hami_nodeagent.core.grants import Grant, GrantBook
from hami_nodeagent.core.reporting import TRANSITIONS, Failure, Step, next_step, standing
from tests.unit.nodeagent.core.builders import GPU, NPU, Container, Given

TWO: tuple[Container, ...] = (("fetch", "init", {GPU: 1}), ("main", "app", {GPU: 1}))


def step(
    pod: Given,
    state: StateRecord | None = None,
    *grants: Grant,
    facts: Any = "own",
    **more: Any,
) -> Step | None:
    known = pod.facts if facts == "own" else facts
    return next_step(pod.entry, state, known, GrantBook(grants), **more)


def test_proven_pod_without_a_state_is_bound_first() -> None:
    pod = Given("pod", *TWO)
    assert step(pod) == Step(state="bound", containers=("fetch", "main"))
    assert step(pod, pod.state("bound", allocation_id="older")) == Step(
        state="bound", containers=("fetch", "main")
    )


def test_pod_that_is_not_proven_gets_no_state() -> None:
    pod = Given("pod", signed=None)
    assert step(pod) is None
    assert step(pod, facts=None) is None
    other = Given("pod")
    signed = other.facts.signed
    assert signed is not None
    stolen = replace(other.facts, signed=replace(signed, allocation_id="x"))
    assert step(other, facts=stolen) is None


def test_prepared_when_every_container_and_vendor_has_its_grant() -> None:
    pod = Given("pod", ("fetch", "init", {GPU: 1}), ("main", "app", {GPU: 1, NPU: 1}))
    bound = pod.state("bound")
    first, second = pod.grant("fetch", "a"), pod.grant("main", "a")
    third = pod.grant("main", "n", resource=NPU)
    assert step(pod, bound) is None
    assert step(pod, bound, first, second) is None
    assert step(pod, bound, first, second, third) == Step(
        state="prepared", containers=("fetch", "main")
    )


def test_running_when_all_lasting_containers_started() -> None:
    pod = Given("pod", *TWO, ("side", "sidecar", {GPU: 1}))
    prepared = pod.state("prepared")
    started = replace(pod.facts, started=frozenset({"fetch", "main"}))
    assert step(pod, prepared, facts=started) is None
    all_started = replace(pod.facts, started=frozenset({"fetch", "main", "side"}))
    assert step(pod, prepared, facts=all_started) == Step(
        state="running", containers=("fetch", "main", "side")
    )


def test_running_is_written_again_once_when_a_container_is_not_limited() -> None:
    pod = Given("pod", *TWO)
    names = ("fetch", "main")
    running = pod.state("running", containers=names, enforcement="libvgpu")
    assert step(pod, running) is None
    again = Step(state="running", containers=names)
    assert step(pod, running, is_unlimited=True) == again
    assert step(pod, replace(running, enforcement="none"), is_unlimited=True) is None


def test_pod_with_devices_in_init_containers_only_runs_once_one_started() -> None:
    pod = Given("pod", ("fetch", "init", {GPU: 1}), ("main", "app", {}))
    prepared = pod.state("prepared")
    assert step(pod, prepared) is None
    started = replace(pod.facts, started=frozenset({"fetch"}))
    assert step(pod, prepared, facts=started) == Step(state="running", containers=("fetch",))


@pytest.mark.parametrize("state", ["bound", "prepared", "running"])
def test_failure_is_written_from_any_state(state: str) -> None:
    pod = Given("pod")
    failure = Failure(code="device-mismatch", reason="swapped")
    assert step(pod, pod.state(state), failure=failure) == Step(
        state="failed", code="device-mismatch", reason="swapped"
    )
    assert step(pod, None, failure=failure) is not None


def test_failed_and_released_allocations_are_left_alone() -> None:
    pod = Given("pod")
    failure = Failure(code="device-mismatch", reason="swapped")
    assert step(pod, pod.state("failed"), failure=failure) is None
    pod.entry = replace(pod.entry, record=replace(pod.record, op="release"))
    assert step(pod, None) is None


def test_running_allocation_needs_no_step() -> None:
    pod = Given("pod")
    assert step(pod, pod.state("running"), pod.grant("main", "a")) is None
    assert standing(pod.record, pod.state("running")) == "running"
    assert standing(pod.record, None) is None


def test_impossible_step_names_both_states(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Given("pod")
    monkeypatch.setitem(TRANSITIONS, "bound", frozenset())
    with pytest.raises(InvariantBroken, match="cannot go from bound to prepared"):
        step(pod, pod.state("bound"), pod.grant("main", "a"))


def test_every_state_is_reachable_and_failed_is_final() -> None:
    assert reporting.TRANSITIONS["failed"] == frozenset()
    reachable = set().union(*TRANSITIONS.values())
    assert reachable == {"bound", "prepared", "running", "failed"}


def test_claim_is_prepared_from_its_first_grant_to_its_last() -> None:
    pod = Given("claim")
    entry = replace(pod.entry, record=replace(pod.record, origin="claim"))
    grants = GrantBook([replace(pod.grant("main"), is_claim=True)])
    other = GrantBook([replace(pod.grant("main"), is_claim=True, allocation_id="older")])
    nothing = GrantBook()

    def next_of(now: str, book: GrantBook, code: str = "") -> tuple[str, str] | None:
        state = pod.state(now, code=code) if now else None
        found = next_step(entry, state, None, book)
        return None if found is None else (found.state, found.code)

    unprepared = ("prepared", "unprepared")
    assert next_of("", nothing) is None
    assert next_of("", grants) == ("bound", "")
    assert next_of("bound", grants) == ("prepared", "")
    assert next_of("prepared", grants) is None
    assert next_of("prepared", other) == unprepared
    assert next_of("prepared", nothing) == unprepared
    assert next_of("prepared", nothing, "unprepared") is None
    assert next_of("prepared", grants, "unprepared") == ("prepared", "")
    assert next_of("bound", nothing) is None
    assert next_of("failed", grants) is None
