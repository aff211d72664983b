# SPDX-License-Identifier: Apache-2.0
"""A node whose containers are recalled: processes, a driver that enforces its rules, faults.

The driver raises ``BrokenRule`` where the real one would end the process or lose its memory: a lock
of a process that is stopped, holds managed memory or has a thread in the driver, and a restore
without free memory.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from hami_nodeagent.core.recall import (
    ILLEGAL_STATE,
    LOST,
    MARGIN_MIB,
    OPERATING_SYSTEM,
    WAIT_S,
    Action,
    Answer,
    Call,
    Evict,
    Facts,
    ProcessFacts,
    Recaller,
    RecallRules,
    ReportKind,
    SetGate,
    Tenant,
    Verb,
)

CARD_MIB = 81_920
RULES = RecallRules(idle_s=2.0, park_s=1.0, retry_s=5.0)
ORPHAN_S = 0.4
"""Longest time for which the driver executes a call after the end of its caller."""
_ERROR_BY_VERB: Mapping[Verb, tuple[int, str]] = {
    "lock": (600, "CUDA_ERROR_NOT_READY"),
    "checkpoint": (801, "CUDA_ERROR_NOT_SUPPORTED"),
    "restore": (2, "CUDA_ERROR_OUT_OF_MEMORY"),
    "unlock": (999, "CUDA_ERROR_UNKNOWN"),
    "state": (999, "CUDA_ERROR_UNKNOWN"),
}
_NEEDED_STATE: Mapping[Verb, str] = {
    "lock": "running",
    "checkpoint": "locked",
    "restore": "checkpointed",
    "unlock": "locked",
}
_NEXT_STATE: Mapping[Verb, str] = {
    "lock": "locked",
    "checkpoint": "checkpointed",
    "restore": "locked",
    "unlock": "running",
}


class BrokenRule(AssertionError):
    """The decision would have ended a process, or lost its memory."""


@dataclass
class Proc:
    """A process of a container."""

    pid: int
    memory_mib: dict[str, int] = field(default_factory=dict)
    state: str = "running"
    thread: Literal["idle", "inside", "gate"] = "idle"
    is_stopped: bool = False
    is_unmovable: bool = False
    has_slot: bool = True
    is_late: bool = False
    """Locked by a call whose caller has ended."""

    @property
    def on_device(self) -> Mapping[str, int]:
        """Memory that is on the devices now."""
        return {} if self.state == "checkpointed" else self.memory_mib


@dataclass
class Box:
    """A container."""

    name: str
    level: int
    limit_mib: dict[str, int]
    has_gate: bool = True
    is_new: bool = True
    is_open: bool = False
    is_complete: bool = True
    is_evicted: bool = False
    touched_s: float = 0.0
    headroom_mib: int | None = None
    procs: dict[int, Proc] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """As the agent names it."""
        return self.name, "main"

    @property
    def may_call(self) -> bool:
        """True if its threads may enter the driver."""
        return self.is_open or not self.has_gate

    def used_mib(self, uuid: str) -> int:
        """Memory of the box on the device."""
        return sum(one.on_device.get(uuid, 0) for one in self.procs.values())


class World:
    """The node."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 100.0
        self.uuids = [f"GPU-{number}" for number in range(self.chance.randint(1, 2))]
        self.foreign_mib = dict.fromkeys(self.uuids, 0)
        self.boxes: dict[tuple[str, str], Box] = {}
        self.in_flight: list[Call] = []
        self.orphans: list[tuple[float, Call]] = []
        """Calls that the driver executes later, by time."""
        self.waits: list[tuple[float, int]] = []
        """Reports of waiting threads: time, and level of the container."""
        self.is_helper_ready = True
        self.is_calm = self.is_acting = False
        self.recaller = Recaller(RULES)
        self.counts: dict[str, int] = {}
        self._next = 1
        self._memory = self._read_memory()
        for _ in range(self.chance.randint(2, 5)):
            self.add_box(may_lack_gate=True)

    # Tenants

    def add_box(self, *, may_lack_gate: bool = False) -> None:
        """Start a container; its gate is closed."""
        if len(self.boxes) >= 6:
            return
        name, self._next = f"box-{self._next}", self._next + 1
        count = self.chance.randint(1, len(self.uuids))
        limits = {
            uuid: self.chance.choice([8, 20, 40, 60, 80]) * 1024
            for uuid in self.chance.sample(self.uuids, count)
        }
        box = Box(name, self.chance.randint(0, 2), limits)
        fits = all(self._open_mib(uuid) + mib <= CARD_MIB for uuid, mib in limits.items())
        box.has_gate = not (may_lack_gate and fits and self.chance.random() < 0.05)
        self.boxes[box.key] = box
        self.add_process(box)

    def add_process(self, box: Box) -> None:
        """Start a process that uses the device at once."""
        if len(box.procs) < 3:
            pid, self._next = self._next, self._next + 1
            box.procs[pid] = Proc(pid, has_slot=self.chance.random() < 0.97)
            self.call(box, box.procs[pid])

    def call(self, box: Box, proc: Proc) -> None:
        """Let an idle thread of the process call the driver."""
        if proc.is_stopped or proc.thread == "inside":
            return
        if not box.may_call:
            proc.thread = "gate"
            return
        proc.thread = "idle"
        box.touched_s = self.now_s
        if self.is_calm:
            return
        if self.chance.random() < 0.2:
            proc.thread = "inside"
        if self.chance.random() < 0.01:
            proc.is_unmovable = True
        self.allocate(box, proc)

    def allocate(self, box: Box, proc: Proc) -> None:
        """Allocate what limit and device have left of a random size."""
        is_restoring = any(call.verb == "restore" for call in self._under_way())
        if (is_restoring or self.is_acting) and any(self.foreign_mib.values()):
            return  # processes of the host already use what the limits promise
        for uuid, limit_mib in box.limit_mib.items():
            want = self.chance.choice([0, 500, 10_000, 80_000])
            left = min(limit_mib - self._charged_mib(box, uuid), self.free_mib(uuid))
            if (size := min(want, left)) > 0:
                proc.memory_mib[uuid] = proc.memory_mib.get(uuid, 0) + size

    def _charged_mib(self, box: Box, uuid: str) -> int:
        return sum(one.memory_mib.get(uuid, 0) for one in box.procs.values())

    def free_mib(self, uuid: str) -> int:
        """Free memory of the device."""
        used = sum(box.used_mib(uuid) for box in self.boxes.values())
        return CARD_MIB - self.foreign_mib[uuid] - used

    def _open_mib(self, uuid: str) -> int:
        return sum(box.limit_mib.get(uuid, 0) for box in self.boxes.values() if box.may_call)

    # The driver

    def execute(self, call: Call) -> Answer:
        """Execute one call of the helper."""
        box = self.boxes.get(call.key)
        proc = box.procs.get(call.pid) if box is not None else None
        if box is None or proc is None:
            return Answer(code=OPERATING_SYSTEM, name="CUDA_ERROR_OPERATING_SYSTEM")
        if proc.is_stopped:
            return LOST
        if call.verb == "state":
            return Answer(is_ok=True, state=proc.state)
        if proc.state != _NEEDED_STATE[call.verb]:
            return Answer(code=ILLEGAL_STATE, name="CUDA_ERROR_ILLEGAL_STATE")
        self._check(box, proc, call.verb)
        proc.state, proc.is_late = _NEXT_STATE[call.verb], False
        self.count(call.verb)
        return Answer(is_ok=True)

    def _check(self, box: Box, proc: Proc, verb: Verb) -> None:
        if verb == "lock" and (proc.is_unmovable or proc.thread == "inside" or box.may_call):
            raise BrokenRule(f"{box} locked with {proc}")
        if verb == "restore":
            for uuid, mib in proc.memory_mib.items():
                if self.free_mib(uuid) < mib:
                    raise BrokenRule(f"{proc} of {box} restored with {self.free_mib(uuid)} MiB")

    def count(self, what: str) -> None:
        """Count what happened, so that a test can see that something did."""
        self.counts[what] = self.counts.get(what, 0) + 1

    # The agent

    def look(self) -> None:
        """Let the agent observe and act once."""
        self.execute_orphans()
        self._report()
        if any(self.foreign_mib.values()) or self.is_calm or self.chance.random() < 0.7:
            self._memory = self._read_memory()
        read_s, free_mib, memory_by_pid = self._memory
        facts = Facts(
            now_s=self.now_s,
            tenants=tuple(self._tenant(box, memory_by_pid) for box in self.boxes.values()),
            card_mib=dict.fromkeys(self.uuids, CARD_MIB),
            free_mib=free_mib,
            memory_read_s=read_s,
            is_helper_ready=self.is_helper_ready,
        )
        actions = self.recaller.look(facts)
        self.is_acting = True
        for action in actions:
            self._act(action)
        self.is_acting = False
        self._check_sums()

    def _read_memory(self) -> tuple[float, dict[str, int], dict[int, dict[str, int]]]:
        free_mib = {uuid: self.free_mib(uuid) for uuid in self.uuids}
        by_pid = {
            pid: dict(proc.on_device)
            for box in self.boxes.values()
            for pid, proc in box.procs.items()
        }
        return self.now_s, free_mib, by_pid

    def _tenant(self, box: Box, memory_by_pid: Mapping[int, Mapping[str, int]]) -> Tenant:
        return Tenant(
            key=box.key,
            level=box.level,
            limit_mib=box.limit_mib,
            has_gate=box.has_gate,
            is_gate_open=box.is_open,
            is_new=box.is_new,
            is_complete=box.is_complete,
            processes=tuple(
                ProcessFacts(
                    pid=pid,
                    start_ticks=pid,
                    has_slot=proc.has_slot,
                    is_stopped=proc.is_stopped,
                    memory_mib=memory_by_pid.get(pid, {}),
                )
                for pid, proc in box.procs.items()
            ),
            touched_s=box.touched_s,
            headroom_mib=box.headroom_mib,
            used_mib={uuid: self._charged_mib(box, uuid) for uuid in box.limit_mib},
        )

    def _report(self) -> None:
        for box in self.boxes.values():
            if box.may_call:
                continue
            for pid, proc in box.procs.items():
                if proc.is_stopped or (not self.is_calm and self.chance.random() < 0.2):
                    continue
                kinds: list[ReportKind] = ["waits"] if proc.thread == "gate" else []
                if proc.thread == "inside":
                    kinds.append("busy")
                elif proc.has_slot:
                    kinds.append("unmovable" if proc.is_unmovable else "drained")
                for kind in kinds:
                    if kind == "waits":
                        self.waits.append((self.now_s, box.level))
                    self.recaller.heard(box.key, pid, kind, now_s=self.now_s)

    def _act(self, action: Action) -> None:
        if isinstance(action, SetGate):
            self._set_gate(self.boxes[action.key], is_open=action.is_open)
        elif isinstance(action, Evict):
            self.boxes[action.key].is_evicted = True
            self.count("evicted")
        elif isinstance(action, Call):
            self._request(action)
        else:
            self.count(action.event)

    def _set_gate(self, box: Box, *, is_open: bool) -> None:
        if is_open:
            # An orphan may lock it between the answer to the agent's question and now.
            moved = [
                one
                for one in box.procs.values()
                if one.state == "checkpointed" or (one.state == "locked" and not one.is_late)
            ]
            assert not moved, f"gate of {box} opened"
        elif box.is_open:
            self.waits = [one for one in self.waits if self.now_s - one[0] <= WAIT_S]
            is_locked = any(one.state != "running" for one in box.procs.values())
            is_for_higher = any(level <= box.level for _, level in self.waits)
            assert is_for_higher or is_locked, f"{box} gave way to a lower level"
        box.is_open = is_open
        for proc in box.procs.values():
            if is_open and proc.thread == "gate":
                self.call(box, proc)

    def _request(self, call: Call) -> None:
        proc = self.boxes[call.key].procs[call.pid]
        assert self.is_helper_ready
        assert not proc.is_stopped, f"{call} for a stopped process"
        pending = [one for one in self.in_flight if one.pid == call.pid]
        assert not pending, f"{call} beside {pending}"
        if call.verb == "restore" and proc.state == "checkpointed":
            for uuid, mib in proc.memory_mib.items():
                assert self.free_mib(uuid) >= mib, f"{call} with {self.free_mib(uuid)} MiB free"
            for uuid in self.boxes[call.key].limit_mib:
                room = sum(
                    box.limit_mib.get(uuid, 0)
                    for box in self.boxes.values()
                    if box.key == call.key or box.may_call
                )
                assert room <= CARD_MIB, f"{call} without reserved room: {room} MiB"
        self.in_flight.append(call)

    def _check_sums(self) -> None:
        for uuid in self.uuids:
            assert self.free_mib(uuid) >= 0
            assert self._open_mib(uuid) <= CARD_MIB, f"residents have {self._open_mib(uuid)} MiB"

    def finish_call(self) -> None:
        """Answer one call, in any order."""
        if not self.in_flight:
            return
        call = self.in_flight.pop(self.chance.randrange(len(self.in_flight)))
        outcome = 0.5 if self.is_calm else self.chance.random()
        if outcome < 0.04 and call.verb != "restore":
            code, name = _ERROR_BY_VERB[call.verb]
            answer = Answer(code=code, name=name)
        elif outcome < 0.05 and call.verb == "restore":
            answer = Answer(code=2, name="CUDA_ERROR_OUT_OF_MEMORY")
            self.count("restore failed")
        elif outcome < 0.08:
            answer = LOST
        else:
            answer = self.execute(call)
            if 0.08 <= outcome < 0.12:
                answer = LOST
        self.recaller.answered(call, answer, now_s=self.now_s)

    # Faults

    def restart_helper(self) -> None:
        """End the helper; its calls were executed, or will be: the driver has them."""
        for call in self._abandon_calls():
            self.recaller.answered(call, LOST, now_s=self.now_s)
        self.is_helper_ready = self.is_calm or self.chance.random() < 0.7

    def restart_agent(self) -> None:
        """End the agent and its helper, and start both."""
        self._abandon_calls()
        self.recaller = Recaller(RULES)
        for box in self.boxes.values():
            box.is_new = False
            box.is_complete = self.chance.random() < 0.7

    def _abandon_calls(self) -> list[Call]:
        calls, self.in_flight = self.in_flight, []
        for call in calls:
            if (chance := self.chance.random()) < 0.2:
                self.execute(call)
            elif chance < 0.8:
                self.orphans.append((self.now_s + self.chance.random() * ORPHAN_S, call))
        return calls

    def execute_orphans(self) -> None:
        """Execute calls whose caller has ended; the driver is still in its time for them."""
        due = [call for at_s, call in self.orphans if at_s <= self.now_s]
        self.orphans = [one for one in self.orphans if one[0] > self.now_s]
        for call in due:
            box = self.boxes.get(call.key)
            proc = box.procs.get(call.pid) if box is not None else None
            if call.verb == "lock" and proc is not None and proc.state == "running":
                # It comes too late: the gate may be open, and work may be under way.
                proc.state = "locked" if proc.thread != "inside" else "running"
                proc.is_late = True
            else:
                self.execute(call)

    def go_on(self) -> None:
        """Let a moment pass in which the driver works."""
        if self.chance.random() < 0.7:
            self.finish_call()
        self.now_s += self.chance.choice([0.02, 0.1, 0.2])

    def disturb(self) -> None:
        """Do one random thing."""
        acts, weights = zip(*self._acts(), strict=True)
        self.chance.choices(acts, weights)[0]()
        self.now_s += self.chance.choice([0.02, 0.1, 0.1, 0.3, 0.3, 1.0, 3.0])

    def _acts(self) -> list[tuple[Callable[[], object], int]]:
        acts: list[tuple[Callable[[], object], int]] = [
            (self.finish_call, 25),
            (self.add_box, 2),
            (self.restart_helper, 5),
            (self.restart_agent, 5),
            (self._start_helper, 4),
            (self._use_memory_elsewhere, 10),
        ]
        for box in self.boxes.values():
            share = 60 // len(self.boxes)
            acts += [
                (partial(self.add_process, box), share // 10),
                (partial(self.boxes.pop, box.key), share // 20),
                (partial(self._limit, box), share // 20),
                (partial(self._complete, box), share // 10),
            ]
            for proc in box.procs.values():
                part = share // len(box.procs)
                acts += [
                    (partial(self._come_back, proc), part // 4),
                    (partial(self.call, box, proc), part),
                    (partial(self._stop, proc), part // 8),
                    (partial(box.procs.pop, proc.pid), part // 15),
                ]
        return acts

    def _start_helper(self) -> None:
        self.is_helper_ready = True

    def _use_memory_elsewhere(self) -> None:
        if not any(call.verb == "restore" for call in self._under_way()):
            uuid = self.chance.choice(self.uuids)
            size = self.chance.choice([0, 4_000, 40_000])
            self.foreign_mib[uuid] = max(0, min(size, self.free_mib(uuid)))

    def _limit(self, box: Box) -> None:
        box.headroom_mib = self.chance.choice([None, None, None, None, 64, 5_000])

    @staticmethod
    def _complete(box: Box) -> None:
        box.is_complete = True

    @staticmethod
    def _come_back(proc: Proc) -> None:
        proc.thread = "idle" if proc.thread == "inside" else proc.thread

    @staticmethod
    def _stop(proc: Proc) -> None:
        proc.is_stopped = not proc.is_stopped

    def _under_way(self) -> list[Call]:
        return [*self.in_flight, *(call for _, call in self.orphans)]

    def calm_down(self) -> None:
        """End all faults; from here on everything that waits can be served."""
        self.is_calm = self.is_helper_ready = True
        self.foreign_mib = dict.fromkeys(self.uuids, 0)
        for box in self.boxes.values():
            box.is_complete, box.headroom_mib = True, None
            for proc in box.procs.values():
                proc.is_stopped = False
                if proc.thread == "inside":
                    proc.thread = "idle"
                if not box.may_call and self.chance.random() < 0.5:
                    proc.thread = "gate"

    def step_calmly(self) -> None:
        """Let time pass without faults."""
        for _ in range(len(self.in_flight)):
            self.finish_call()
        self.now_s += 0.3
        self.look()

    def waiting(self) -> list[Box]:
        """Return the containers of which a thread waits at the gate."""
        return [
            box
            for box in self.boxes.values()
            if not box.may_call and any(one.thread == "gate" for one in box.procs.values())
        ]

    def is_blocked(self, waiting: Box) -> bool:
        """Return whether containers that may not be parked for it leave too little room."""
        staying = [
            box
            for box in self.boxes.values()
            if box is not waiting
            and (box.may_call or box.is_evicted)
            and (
                box.level < waiting.level
                or box.is_evicted
                or not box.has_gate
                or any(
                    proc.is_unmovable or (proc.memory_mib and not proc.has_slot)
                    for proc in box.procs.values()
                )
            )
        ]
        for uuid, limit_mib in waiting.limit_mib.items():
            others_mib = sum(box.limit_mib.get(uuid, 0) for box in staying)
            need_mib = limit_mib
            if others_mib and (moved_mib := self._charged_mib(waiting, uuid)):
                need_mib = max(need_mib, moved_mib + MARGIN_MIB)
            if need_mib + others_mib > CARD_MIB:
                return True
        return False
