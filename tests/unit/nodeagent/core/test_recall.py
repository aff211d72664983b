# SPDX-License-Identifier: Apache-2.0
"""Order of parking and return, and each reason for which a container keeps its memory."""

from collections.abc import Mapping
from typing import Any

import pytest

from hami_nodeagent.core.recall import (
    ASK_S,
    LOST,
    MARGIN_MIB,
    SETTLE_S,
    UNKNOWN_MIB,
    Action,
    Answer,
    Call,
    Evict,
    Facts,
    PodEvent,
    ProcessFacts,
    Recaller,
    RecallRules,
    SetGate,
    Tenant,
)

GPU = "GPU-0"
CARD_MIB = 80_000
RULES = RecallRules(idle_s=60, park_s=5, retry_s=300)
LOW, HIGH = ("uid-low", "main"), ("uid-high", "main")
PARENT = ProcessFacts(pid=10, start_ticks=100, memory_mib={GPU: 50_000})
CHILD = ProcessFacts(pid=9, start_ticks=200, memory_mib={GPU: 10_000})
OK = Answer(is_ok=True)


def tenant(key: tuple[str, str], level: int, limit_mib: int = 60_000, **more: Any) -> Tenant:
    return Tenant(key=key, level=level, limit_mib={GPU: limit_mib}, is_new=True, **more)


class Node:
    """One device; ``step`` lets time pass, applies gates and returns the other actions."""

    def __init__(self, *tenants: Tenant) -> None:
        self.recaller = Recaller(RULES)
        self.tenants = {one.key: one for one in tenants}
        self.now_s = 1_000.0
        self.is_helper_ready = True

    def change(self, key: tuple[str, str], **more: Any) -> None:
        fields = {name: getattr(self.tenants[key], name) for name in Tenant.__struct_fields__}
        self.tenants[key] = Tenant(**{**fields, **more})

    def step(self, after_s: float = 0.3, *, free_mib: int | None = None) -> list[Action]:
        self.now_s += after_s
        used = sum(
            sum(process.memory_mib.values())
            for one in self.tenants.values()
            for process in one.processes
        )
        facts = Facts(
            now_s=self.now_s,
            tenants=tuple(self.tenants.values()),
            card_mib={GPU: CARD_MIB},
            free_mib={GPU: CARD_MIB - used if free_mib is None else free_mib},
            memory_read_s=self.now_s - 0.001,
            is_helper_ready=self.is_helper_ready,
        )
        actions = list(self.recaller.look(facts))
        for action in actions:
            if isinstance(action, SetGate):
                self.change(action.key, is_gate_open=action.is_open)
        return actions

    def wants(self, key: tuple[str, str], pid: int = 20) -> None:
        self.recaller.heard(key, pid, "waits", now_s=self.now_s)

    def drained(self, *pids: int, key: tuple[str, str] = LOW) -> None:
        for pid in pids:
            self.recaller.heard(key, pid, "drained", now_s=self.now_s)

    def answer(self, call: Call, answer: Answer = OK) -> list[Action]:
        self.recaller.answered(call, answer, now_s=self.now_s)
        return self.step(0.01)

    def phase(self, key: tuple[str, str]) -> str:
        return {one.key: one.phase for one in self.recaller.shown(self.now_s)}[key]

    def is_open(self, key: tuple[str, str]) -> bool:
        return self.tenants[key].is_gate_open


def resident(node: Node, key: tuple[str, str], *processes: ProcessFacts) -> None:
    node.step()
    node.wants(key)
    node.step()
    assert node.phase(key) == "resident"
    node.change(key, processes=processes)


def call_in(actions: list[Action]) -> Call:
    (call,) = [one for one in actions if isinstance(one, Call)]
    return call


def event_in(actions: list[Action]) -> PodEvent:
    (event,) = [one for one in actions if isinstance(one, PodEvent)]
    return event


@pytest.fixture
def node() -> Node:
    """A resident container of low priority with two processes, idle for a minute."""
    node = Node(tenant(LOW, 5), tenant(HIGH, 0))
    resident(node, LOW, PARENT, CHILD)
    node.step(61)
    return node


def begin(node: Node) -> Call:
    """Let the other container want room; return the first lock."""
    node.wants(HIGH)
    node.step()
    assert node.phase(LOW) == "draining"
    node.drained(10, 9)
    node.wants(HIGH)
    return call_in(node.step())


def park(node: Node) -> list[Action]:
    """Park the low container; return the actions after its last checkpoint."""
    actions: list[Action] = node.answer(begin(node))
    for _ in range(2):
        actions = node.answer(call_in(actions))
    return node.answer(call_in(actions))


def gone(*processes: ProcessFacts) -> tuple[ProcessFacts, ...]:
    """The processes without memory on the device."""
    return tuple(ProcessFacts(pid=one.pid, start_ticks=one.start_ticks) for one in processes)


def test_first_call_of_a_container_gets_room_at_once() -> None:
    node = Node(tenant(LOW, 5))
    assert node.step() == []
    node.wants(LOW)
    assert node.step(0.01) == [SetGate(key=LOW, is_open=True)]


def test_container_is_parked_children_first_and_returned_parents_first(node: Node) -> None:
    calls = [begin(node)]
    actions: list[Action] = []
    for _ in range(4):
        actions = node.answer(calls[-1])
        calls += [one for one in actions if isinstance(one, Call)]
    assert [(one.verb, one.pid) for one in calls] == [
        ("lock", 9), ("lock", 10), ("checkpoint", 9), ("checkpoint", 10),
    ]  # fmt: skip
    assert calls[0].timeout_s == RULES.park_s
    assert event_in(actions).event == "RecallParked"
    assert event_in(actions).moved_mib == 60_000
    assert not node.is_open(HIGH)
    node.change(LOW, processes=gone(PARENT, CHILD))
    node.wants(HIGH)
    node.step()
    assert node.is_open(HIGH)
    node.step(61)
    node.wants(LOW)
    node.step()
    assert node.phase(HIGH) == "resident", "a higher level never gives way"
    del node.tenants[HIGH]
    node.wants(LOW)
    node.step()
    calls = [call_in(node.step())]
    for _ in range(4):
        actions = node.answer(calls[-1])
        calls += [one for one in actions if isinstance(one, Call)]
    assert [(one.verb, one.pid) for one in calls] == [
        ("restore", 10), ("restore", 9), ("unlock", 10), ("unlock", 9),
    ]  # fmt: skip
    assert node.is_open(LOW)
    assert event_in(actions).event == "RecallReturned"


def test_gate_that_is_created_after_the_container_was_seen_stays_closed() -> None:
    node = Node(tenant(LOW, 5, has_gate=False), tenant(HIGH, 0))
    node.step()
    node.change(LOW, has_gate=True)
    for _ in range(3):
        assert node.step() == []
    assert node.phase(LOW) == "parked"
    node.wants(LOW)
    assert node.step() == [SetGate(key=LOW, is_open=True)]


def test_lowest_level_gives_way_first_and_then_the_longest_idle() -> None:
    keys = [("uid-a", "main"), ("uid-b", "main"), ("uid-c", "main")]
    node = Node(*(tenant(key, level, 20_000) for key, level in zip(keys, (3, 5, 5), strict=True)))
    for key in keys:
        resident(node, key)
    node.step(61)
    node.change(keys[1], touched_s=node.now_s - 60.5)
    node.tenants[HIGH] = tenant(HIGH, 0, 40_000)
    node.step()
    node.wants(HIGH)
    node.step()
    assert [node.phase(key) for key in keys] == ["resident", "resident", "draining"]


def test_busy_container_is_not_parked(node: Node) -> None:
    node.change(LOW, touched_s=node.now_s - 59)
    node.wants(HIGH)
    assert node.step(0.1) == []


def test_call_at_the_closing_gate_ends_the_parking(node: Node) -> None:
    node.wants(HIGH)
    node.step()
    node.wants(LOW, pid=10)
    assert node.step() == [SetGate(key=LOW, is_open=True)]
    assert node.phase(LOW) == "resident"


def test_parking_ends_when_the_waiting_container_does(node: Node) -> None:
    node.wants(HIGH)
    node.step()
    assert node.phase(LOW) == "draining"
    del node.tenants[HIGH]
    actions = node.step()
    assert event_in(actions).reason == "vanished"
    assert SetGate(key=LOW, is_open=True) in actions
    assert node.phase(LOW) == "resident"
    node.step(61)
    node.tenants[HIGH] = tenant(HIGH, 0)
    node.step()
    assert begin(node).verb == "lock", "another container gets the memory at once"


def test_parking_that_moves_memory_is_finished_for_a_container_that_ended(node: Node) -> None:
    actions: list[Action] = node.answer(begin(node))
    del node.tenants[HIGH]
    for _ in range(3):
        assert node.recaller.wanting == {HIGH}
        actions = node.answer(call_in(actions))
    assert event_in(actions).wanted_by == HIGH


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"is_stopped": True}, "stopped"),
        ({"has_slot": False}, "unhooked"),
        ({"memory_mib": {GPU: UNKNOWN_MIB}}, "unmeasured"),
    ],
)
def test_process_that_would_not_survive_is_refused_before_its_gate_closes(
    node: Node, facts: Mapping[str, Any], reason: str
) -> None:
    one = ProcessFacts(**{"pid": 10, "start_ticks": 100, "memory_mib": {GPU: 1}, **facts})
    node.change(LOW, processes=(one,))
    node.wants(HIGH)
    actions = node.step()
    assert event_in(actions).event == "RecallRefused"
    assert event_in(actions).reason == reason
    assert node.is_open(LOW)
    node.wants(HIGH)
    assert node.step(RULES.retry_s - 1) == [], "it is asked again after retry_s"


@pytest.mark.parametrize(
    ("headroom_mib", "reasons"),
    [(60_063, ["host-memory"]), (60_064, []), (None, []), (UNKNOWN_MIB, ["host-memory"])],
)
def test_host_memory_of_the_container_has_to_hold_its_device_memory(
    node: Node, headroom_mib: int | None, reasons: list[str]
) -> None:
    node.change(LOW, headroom_mib=headroom_mib)
    node.wants(HIGH)
    events = [one for one in node.step() if isinstance(one, PodEvent)]
    assert [one.reason for one in events] == reasons


def test_process_that_reports_managed_memory_is_never_locked(node: Node) -> None:
    node.wants(HIGH)
    node.step()
    node.drained(9)
    node.recaller.heard(LOW, 10, "unmovable", now_s=node.now_s)
    actions = node.step()
    assert event_in(actions).reason == "unmovable"
    assert node.is_open(LOW)
    node.step(RULES.retry_s + 1)
    node.wants(HIGH)
    assert event_in(node.step()).reason == "unmovable", "until the process ends"


def test_thread_in_the_driver_keeps_the_container(node: Node) -> None:
    node.wants(HIGH)
    actions = node.step()
    for _ in range(20):
        node.drained(9, 10)
        node.recaller.heard(LOW, 10, "busy", now_s=node.now_s)
        actions = node.step()
        if node.is_open(LOW):
            break
    assert event_in(actions).reason == "busy"
    assert node.phase(LOW) == "resident"


def test_process_without_device_memory_that_is_in_a_call_is_awaited(node: Node) -> None:
    node.wants(HIGH)
    node.step()
    starting = ProcessFacts(pid=11, start_ticks=300)
    node.change(LOW, processes=(PARENT, CHILD, starting))
    node.drained(9, 10)
    node.recaller.heard(LOW, 11, "busy", now_s=node.now_s)
    assert node.step(SETTLE_S + 0.1) == []
    node.drained(11)
    assert call_in(node.step()).verb == "lock"


@pytest.mark.parametrize("failing", range(4))
def test_parking_that_fails_at_any_step_is_undone(node: Node, failing: int) -> None:
    """After the calls lock, lock, checkpoint, checkpoint; the failed one had no effect."""
    states = {10: "running", 9: "running"}
    after = {"lock": "locked", "checkpoint": "checkpointed", "restore": "locked",
             "unlock": "running"}  # fmt: skip
    call, done = begin(node), 0
    events: list[PodEvent] = []
    for _ in range(20):
        if call.verb == "state":
            answer = Answer(is_ok=True, state=states[call.pid])
        elif done == failing:
            answer, done = Answer(code=999, name="CUDA_ERROR_UNKNOWN"), done + 1
        else:
            answer, done = OK, done + 1
            states[call.pid] = after[call.verb]
        actions = node.answer(call, answer)
        events += [one for one in actions if isinstance(one, PodEvent)]
        calls = [one for one in actions if isinstance(one, Call)]
        if not calls:
            break
        call = calls[0]
    assert node.is_open(LOW)
    assert set(states.values()) == {"running"}
    assert [one.event for one in events] == ["RecallRefused"]
    assert events[0].reason == ("lock" if failing < 2 else "checkpoint")


def test_restore_waits_for_its_room_and_for_free_memory(node: Node) -> None:
    park(node)
    node.change(LOW, processes=gone(PARENT, CHILD))
    third = ("uid-third", "main")
    node.tenants[third] = tenant(third, 0, 19_000)
    node.step()
    node.wants(third)
    node.step()
    assert node.is_open(third)
    node.wants(LOW)
    node.step()
    assert node.phase(LOW) == "returning"
    assert node.step(free_mib=60_000 + MARGIN_MIB - 1) == []
    assert call_in(node.step(free_mib=60_000 + MARGIN_MIB)).verb == "restore"


def test_container_alone_on_its_device_needs_no_margin(node: Node) -> None:
    park(node)
    node.change(LOW, processes=gone(PARENT, CHILD))
    node.wants(LOW)
    node.step()
    assert node.step(free_mib=59_999) == []
    assert call_in(node.step(free_mib=60_000)).verb == "restore"


def test_restore_that_fails_evicts_the_pod(node: Node) -> None:
    park(node)
    node.change(LOW, processes=gone(PARENT, CHILD))
    node.wants(LOW)
    node.step()
    call = call_in(node.step())
    failed = Answer(code=2, name="CUDA_ERROR_OUT_OF_MEMORY")
    node.recaller.answered(call, failed, now_s=node.now_s)
    actions = node.step()
    assert event_in(actions).event == "RecallFailed"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in event_in(actions).text
    assert Evict(key=LOW) in actions
    assert not node.is_open(LOW)


def test_lost_answer_is_replaced_by_the_state_of_the_process(node: Node) -> None:
    lock = begin(node)
    assert node.answer(lock, LOST) == []
    state = call_in(node.step(ASK_S))
    assert (state.verb, state.pid) == ("state", lock.pid)
    following = call_in(node.answer(state, Answer(is_ok=True, state="locked")))
    assert (following.verb, following.pid) == ("lock", 10)


def test_parking_waits_for_no_helper_longer_than_for_threads(node: Node) -> None:
    node.wants(HIGH)
    node.step()
    node.is_helper_ready = False
    node.drained(9, 10)
    actions: list[Action] = []
    for _ in range(30):
        actions += node.step()
        if node.is_open(LOW):
            break
    assert event_in(actions).reason == "helper"


@pytest.mark.parametrize(
    ("gate", "state", "memory_mib", "phase"),
    [
        ("open", "running", 100, "resident"),
        ("closed", "running", 100, "resident"),
        ("closed", "running", 0, "parked"),
        ("closed", "checkpointed", 0, "parked"),
        ("closed", "locked", 100, "resident"),
        ("open", "locked", 100, "resident"),
    ],
)
def test_agent_that_starts_finds_each_container_as_it_is(
    gate: str, state: str, memory_mib: int, phase: str
) -> None:
    memory = {GPU: memory_mib} if memory_mib else {}
    process = ProcessFacts(pid=10, start_ticks=1, memory_mib=memory)
    before = Tenant(
        key=LOW, level=5, limit_mib={GPU: 100}, is_gate_open=gate == "open", processes=(process,)
    )
    node, states, unlocked = Node(before), {10: state}, False
    for _ in range(6):
        for call in node.step():
            if isinstance(call, Call) and call.verb == "state":
                answer = Answer(is_ok=True, state=states[call.pid])
                node.recaller.answered(call, answer, now_s=node.now_s)
            elif isinstance(call, Call):
                assert call.verb == "unlock"
                states[call.pid], unlocked = "running", True
                node.recaller.answered(call, OK, now_s=node.now_s)
    assert node.phase(LOW) == phase
    assert unlocked == (state == "locked")
    assert node.is_open(LOW) == (phase == "resident")


@pytest.mark.parametrize(
    ("before", "verb", "is_open"),
    [("running", "unlock", True), ("checkpointed", "checkpoint", False)],
)
def test_call_of_the_last_agent_that_is_executed_late_is_undone(
    before: str, verb: str, *, is_open: bool
) -> None:
    """A lock of a process that runs, or a restore of one that is parked, half a second late."""
    listed = ProcessFacts(pid=10, start_ticks=1, memory_mib={GPU: 100})
    first = listed if before == "running" else gone(listed)[0]
    node = Node(Tenant(key=LOW, level=5, limit_mib={GPU: 100}, processes=(first,)))
    state, undone = before, False
    for step in range(30):
        if step == 5:
            assert node.is_open(LOW) == is_open
            state = "locked"
            node.change(LOW, processes=(listed,))
        for call in node.step(0.1):
            if isinstance(call, Call):
                if call.verb == verb:
                    state, undone = before, True
                    node.change(LOW, processes=(first,))
                answer = Answer(is_ok=True, state=state) if call.verb == "state" else OK
                node.recaller.answered(call, answer, now_s=node.now_s)
    assert undone
    assert state == before
    assert node.is_open(LOW) == is_open


def test_waiting_containers_are_not_passed_by_later_ones(node: Node) -> None:
    """One that needs two others idle gets the first one's room before the next one asks."""
    keys = [(f"uid-{name}", "main") for name in "abcd"]
    node = Node(*(tenant(key, 5, 40_000) for key in keys[:2]))
    for key in keys[:2]:
        resident(node, key)
    node.step(61)
    node.change(keys[1], touched_s=node.now_s - 1)
    node.tenants[keys[2]] = tenant(keys[2], 5, 80_000)
    node.tenants[keys[3]] = tenant(keys[3], 5, 40_000)
    node.step()
    node.wants(keys[2])
    node.step(0.1)
    for _ in range(3):
        node.wants(keys[2])
        node.wants(keys[3])
        node.step()
    assert node.phase(keys[0]) == "parked"
    assert not node.is_open(keys[3])
    assert node.phase(keys[1]) == "resident"


def test_requested_container_is_parked_when_idle_though_no_other_waits() -> None:
    node = Node(tenant(LOW, 1))
    resident(node, LOW, PARENT)
    node.change(LOW, touched_s=node.now_s)
    node.step()
    assert node.recaller.request("uid-low", now_s=node.now_s) == (0, 0)
    assert node.recaller.request("uid-other", now_s=node.now_s) == (0, 0)
    node.step(RULES.idle_s + 1)
    assert node.is_open(LOW)
    assert node.recaller.request("uid-low", now_s=node.now_s) == (1, 0)
    node.step()
    assert node.phase(LOW) == "draining"
    assert not node.is_open(LOW)
    assert node.recaller.request("uid-low", now_s=node.now_s) == (0, 1)


def test_requested_container_that_works_again_before_the_look_stays() -> None:
    node = Node(tenant(LOW, 1))
    resident(node, LOW, PARENT)
    node.change(LOW, touched_s=node.now_s)
    node.step(RULES.idle_s + 1)
    assert node.recaller.request("uid-low", now_s=node.now_s) == (1, 0)
    node.change(LOW, touched_s=node.now_s)
    node.step()
    assert node.is_open(LOW)
    node.step(RULES.idle_s + 1)
    assert node.is_open(LOW)
