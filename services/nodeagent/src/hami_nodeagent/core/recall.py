# SPDX-License-Identifier: Apache-2.0
"""Decides which containers of a device keep their device memory, and in which order it is moved.

Devices with ``overcommit: recall`` offer more memory than they have. Each of their containers is
resident or parked on all its devices (docs/adr/0026-recall.md). The limits of the containers that
have room on a device never sum to more than its memory. A container that waits at its gate gets
room as soon as idle containers of its own or a lower level have been parked.

The caller passes facts, reports of the containers' processes and answers of ``hami-recall``, and
executes the actions that ``look`` returns. An operation is chosen from the last known driver state
of each process, never from the operation before it, so that a lost answer, a restart of the helper
and a restart of the agent are handled alike: the state is asked again. Times in seconds of
CLOCK_MONOTONIC, memory in MiB.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from hami_nodeagent.core.priorities import ContainerKey

MARGIN_MIB = 512
"""Free memory beyond the moved memory that a restore needs while others have room on the device."""
HOST_MARGIN_MIB = 64
"""Memory of the cgroup that has to remain after the device memory was moved."""
UNKNOWN_MIB = -1
SETTLE_S = 0.2
"""Time after the gate was closed in which each process reports: it repeats its report in half."""
WAIT_S = 0.5
"""Age after which a report of a waiting thread, repeated ten times meanwhile, no longer counts."""
ASK_S = 0.5
"""Interval between two questions for the state of a process whose operation is under way."""
DOUBT_S = 1.0
"""Time for which a call may still reach the driver after its caller has ended."""
TRIES = 5
"""Attempts of one operation whose answers were lost or leave the process as it was."""
NOT_INITIALIZED, OPERATING_SYSTEM, ILLEGAL_STATE = 3, 304, 401
_UNCHANGED = frozenset({NOT_INITIALIZED, OPERATING_SYSTEM, ILLEGAL_STATE})
"""Results (CUresult) of calls without any effect: ended process, other state."""

Verb = Literal["lock", "checkpoint", "restore", "unlock", "state"]
ReportKind = Literal["waits", "drained", "unmovable", "busy"]
DriverState = Literal["unknown", "running", "locked", "checkpointed", "failed"]
Phase = Literal["recovering", "resident", "draining", "parking", "parked", "returning", "lost"]
"""``recovering``: the agent started and has not asked for the processes' states yet.
``draining``: the gate is closed, threads may still be in the driver. ``lost``: a process cannot be
restored; the pod is evicted."""
Reason = Literal[
    "stopped",
    "unhooked",
    "unmeasured",
    "unmovable",
    "host-memory",
    "busy",
    "helper",
    "lock",
    "checkpoint",
    "restore",
    "vanished",
]
EventReason = Literal["RecallParked", "RecallReturned", "RecallFailed", "RecallRefused"]

ProcessKey = tuple[int, int]
"""(pid, start time)."""
_STATES: Mapping[str, DriverState] = {
    "running": "running",
    "locked": "locked",
    "checkpointed": "checkpointed",
    "failed": "failed",
}


class RecallRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of recall; the configuration of a device enables it."""

    idle_s: float = 60.0
    """Time without calls into the driver after which a container may be parked."""
    park_s: float = 5.0
    """Longest wait for the threads of a container that is to be parked, and for its submitted
    work."""
    retry_s: float = 300.0
    """Time for which a container stays resident after it could not be parked."""


class ProcessFacts(Struct, frozen=True, kw_only=True):
    """One process of a container."""

    pid: int
    """In the host's namespace."""
    start_ticks: int
    """Start time; a process starts after its parent."""
    has_slot: bool = True
    """The library of the container's region has counted it."""
    is_stopped: bool = False
    """Stopped by a signal or a debugger: the driver would wait for it without end."""
    memory_mib: Mapping[str, int] = {}
    """Device memory by UUID as the driver lists it, or ``UNKNOWN_MIB``; empty: it is not listed."""


class Tenant(Struct, frozen=True, kw_only=True):
    """One container with shares of recall devices."""

    key: ContainerKey
    level: int
    """Priority level, 0 is the highest."""
    limit_mib: Mapping[str, int]
    """Limit by UUID of each device."""
    has_gate: bool = True
    """Without a gate the container is never parked."""
    is_gate_open: bool = False
    is_new: bool = False
    """The gate was created by this run of the agent: there is nothing to recover."""
    is_complete: bool = True
    """``processes`` lists all processes of the container."""
    processes: tuple[ProcessFacts, ...] = ()
    touched_s: float | None = None
    """Time of the last call into the driver; ``None``: unknown."""
    headroom_mib: int | None = None
    """Memory of the host that its cgroup may still use; ``None``: no limit; ``UNKNOWN_MIB``: it
    cannot be read."""
    used_mib: Mapping[str, int] = {}
    """Device memory by UUID as the container's region counts it; used where the agent was restarted
    after the memory was moved."""


class Facts(Struct, frozen=True, kw_only=True):
    """Everything that was observed."""

    now_s: float
    tenants: tuple[Tenant, ...]
    card_mib: Mapping[str, int]
    """Memory for residents of each device with recall; on others nothing is reserved."""
    free_mib: Mapping[str, int] = {}
    """Free memory of each device that the driver reported."""
    memory_read_s: float = 0.0
    """Time before the driver was asked for free and used memory."""
    is_helper_ready: bool = True


class SetGate(Struct, frozen=True, kw_only=True):
    """Open or close a container's gate."""

    key: ContainerKey
    is_open: bool


class Call(Struct, frozen=True, kw_only=True):
    """Request to ``hami-recall``; the answer is passed to ``Recaller.answered``."""

    key: ContainerKey
    pid: int
    verb: Verb
    timeout_s: float = 0.0
    """Of ``lock``."""


class PodEvent(Struct, frozen=True, kw_only=True):
    """Event on a container's pod."""

    key: ContainerKey
    event: EventReason
    text: str
    reason: Reason | Literal[""] = ""
    moved_mib: int = 0
    took_s: float = 0.0
    wanted_by: ContainerKey | None = None
    """Of ``RecallParked``: the container that waited for the memory; ``None``: none did."""


class Evict(Struct, frozen=True, kw_only=True):
    """Evict the container's pod: its device memory is lost."""

    key: ContainerKey


Action = SetGate | Call | PodEvent | Evict


class Answer(Struct, frozen=True, kw_only=True):
    """Answer of ``hami-recall``."""

    is_ok: bool = False
    state: str = ""
    """Answer to ``state``, in the driver's words."""
    code: int = 0
    """CUresult of a failed call; 0: no answer before the deadline, or the helper ended."""
    name: str = ""


LOST = Answer()
"""The call was or was not executed."""


Refusal = tuple[Reason, str]
"""Reason for which a container stays resident: a word and a text."""
_REASONS: Mapping[Verb, Reason] = {"lock": "lock", "checkpoint": "checkpoint"}
_PARKING: Sequence[tuple[DriverState, Verb]] = (("running", "lock"), ("locked", "checkpoint"))
_STATE_AFTER: Mapping[Verb, DriverState] = {
    "lock": "locked",
    "checkpoint": "checkpointed",
    "restore": "locked",
    "unlock": "running",
}


class Shown(Struct, frozen=True, kw_only=True):
    """State of one container for metrics."""

    key: ContainerKey
    phase: Phase
    since_s: float
    moved_mib: int
    is_waiting: bool


@dataclass
class _Process:
    facts: ProcessFacts
    state: DriverState = "running"
    pending: Verb | None = None
    ask_at_s: float = 0.0
    tries: int = 0
    doubted_until_s: float = 0.0
    """Until then an operation without an answer, or of an earlier agent, may still be executed."""
    is_target: bool = False
    """Held device memory when its container was parked."""
    moved_mib: Mapping[str, int] | None = None
    """Memory that was moved; ``None``: an earlier run of the agent moved it."""


@dataclass
class _Container:
    tenant: Tenant
    phase: Phase
    since_s: float
    """Begin of the phase."""
    opened_s: float = 0.0
    began_s: float = 0.0
    """Begin of the parking or of the return."""
    processes: dict[ProcessKey, _Process] = field(default_factory=dict)
    reports: dict[int, ReportKind] = field(default_factory=dict)
    """Last report after the gate was closed, by pid."""
    unmovable: set[int] = field(default_factory=set)
    """Pids of processes that reported so."""
    is_freed: bool = True
    """The driver does not list memory of the parked container."""
    is_reverting: bool = False
    """It returns because it could not be parked."""
    wanted_by: ContainerKey | None = None
    """Container for which it was parked last."""
    had_gate: bool = False
    is_recovered: bool = False
    """An earlier run of the agent created the gate: its processes may be in any state."""
    retry_at_s: float = 0.0
    waits_since_s: float = 0.0
    waits_at_s: float | None = None
    restored_s: float = 0.0
    """Time of the last answer to a restore."""
    returning_mib: int = 0
    """Memory that was in the host when the return began."""

    @property
    def key(self) -> ContainerKey:
        return self.tenant.key

    @property
    def has_room(self) -> bool:
        return not self.tenant.has_gate or self.phase != "parked" or not self.is_freed

    @property
    def is_coming_free(self) -> bool:
        return self.phase in {"draining", "parking", "parked"} and self.has_room

    @property
    def moved_mib(self) -> int:
        """Memory that is in the host; 0 where an earlier run of the agent moved it."""
        return sum(sum((one.moved_mib or {}).values()) for one in self.of_state("checkpointed"))

    def moved_of(self, uuid: str) -> int:
        """Return the memory of a device that is in the host, in MiB.

        What an earlier run of the agent moved is taken from the region.
        """
        moved = self.of_state("checkpointed")
        known_mib = sum((one.moved_mib or {}).get(uuid, 0) for one in moved)
        if all(one.moved_mib is not None for one in moved):
            return known_mib
        listed_mib = sum(one.facts.memory_mib.get(uuid, 0) for one in self.processes.values())
        return max(known_mib, self.tenant.used_mib.get(uuid, 0) - listed_mib)

    def of_state(self, *states: DriverState) -> list[_Process]:
        """Return the processes in these states, parents before their children."""
        found = [one for one in self.processes.values() if one.state in states]
        return sorted(found, key=lambda one: (one.facts.start_ticks, one.facts.pid))

    def is_waiting(self, now_s: float) -> bool:
        return self.waits_at_s is not None and now_s - self.waits_at_s <= WAIT_S

    def idle_s(self, now_s: float) -> float:
        return now_s - max(self.opened_s, self.tenant.touched_s or 0.0)

    def enter(self, phase: Phase, now_s: float) -> None:
        self.phase, self.since_s = phase, now_s
        for one in self.processes.values():
            one.tries = 0


class Recaller:
    """State of all containers of one node's recall devices."""

    def __init__(self, rules: RecallRules) -> None:
        self.rules = rules
        self._containers: dict[ContainerKey, _Container] = {}
        self._requested: set[ContainerKey] = set()
        """Containers to be parked at the next look, if they are idle then."""
        self._actions: list[Action] = []

    def request(self, pod_uid: str, *, now_s: float) -> tuple[int, int]:
        """Request that a pod's idle containers be parked although no other container waits.

        Returns how many will be, and how many are parked already or on their way.
        """
        own = [one for one in self._containers.values() if one.key[0] == pod_uid]
        idle = {one.key for one in own if self._may_park(one, now_s)}
        self._requested |= idle
        parked = [one for one in own if one.phase in {"draining", "parking", "parked"}]
        return len(idle), len(parked)

    def heard(self, key: ContainerKey, pid: int, kind: ReportKind, *, now_s: float) -> bool:
        """Record a report of a container's process; return whether ``look`` has something to do."""
        container = self._containers.get(key)
        if container is None:
            return kind == "waits"
        if kind == "waits":
            is_news = not container.is_waiting(now_s)
            if is_news:
                container.waits_since_s = now_s
            container.waits_at_s = now_s
            return is_news
        if container.phase != "resident":
            container.reports[pid] = kind
            if kind == "unmovable":
                container.unmovable.add(pid)
        return False

    def answered(self, call: Call, answer: Answer, *, now_s: float) -> None:
        """Record the answer to a call that ``look`` returned; ``LOST`` where none will come."""
        container = self._containers.get(call.key)
        if container is None:
            return
        for one in container.processes.values():
            if one.facts.pid == call.pid and one.pending == call.verb:
                one.pending = None
                self._note_answer(container, one, call.verb, answer, now_s)

    def look(self, facts: Facts) -> tuple[Action, ...]:
        """Return what has to be done now, in order."""
        self._follow(facts)
        for container in list(self._containers.values()):
            self._advance(container, facts)
        self._serve_waiting(facts)
        self._park_requested(facts)
        actions, self._actions = tuple(self._actions), []
        return actions

    @property
    def is_moving(self) -> bool:
        """Return whether ``look`` waits for memory, reports or answers."""
        return any(
            one.tenant.has_gate and one.phase not in {"resident", "lost"} and one.has_room
            for one in self._containers.values()
        )

    def is_awaited(self, now_s: float) -> bool:
        """Return whether a container waits for others to become idle."""
        return any(
            one.phase == "parked" and one.is_waiting(now_s) for one in self._containers.values()
        )

    @property
    def wanting(self) -> set[ContainerKey]:
        """Containers, present or ended, for which the present ones were parked last."""
        return {one.wanted_by for one in self._containers.values() if one.wanted_by is not None}

    def shown(self, now_s: float) -> tuple[Shown, ...]:
        """Return the state of all containers with a gate."""
        return tuple(
            Shown(
                key=one.key,
                phase=one.phase,
                since_s=one.since_s,
                moved_mib=one.moved_mib,
                is_waiting=one.phase != "resident" and one.is_waiting(now_s),
            )
            for one in self._containers.values()
            if one.tenant.has_gate
        )

    # Observations

    def _follow(self, facts: Facts) -> None:
        now_s = facts.now_s
        present = {tenant.key for tenant in facts.tenants}
        for key in set(self._containers) - present:
            del self._containers[key]
        for tenant in facts.tenants:
            known = self._containers.get(tenant.key)
            if known is None or (tenant.has_gate and not known.tenant.has_gate):
                is_recovered = not tenant.is_new or (known is not None and known.had_gate)
                known = self._containers[tenant.key] = _Container(
                    tenant=tenant,
                    phase=_first_phase(tenant, is_recovered=is_recovered),
                    since_s=now_s,
                    opened_s=now_s,
                    is_recovered=is_recovered,
                )
            container = known
            container.tenant = tenant
            container.had_gate = container.had_gate or tenant.has_gate
            self._follow_processes(container, facts)

    def _follow_processes(self, container: _Container, facts: Facts) -> None:
        found = {(one.pid, one.start_ticks): one for one in container.tenant.processes}
        for key in set(container.processes) - found.keys():
            del container.processes[key]
            container.unmovable.discard(key[0])
        for key, process in found.items():
            if known := container.processes.get(key):
                known.facts = process
            else:
                fresh = container.processes[key] = _Process(facts=process)
                if container.is_recovered:
                    fresh.state = "unknown"
                    fresh.doubted_until_s = facts.now_s + DOUBT_S
        if container.phase == "parked" and facts.memory_read_s >= container.since_s:
            keeps = any(
                one.facts.memory_mib or facts.now_s < one.doubted_until_s
                for one in container.processes.values()
            )
            container.is_freed = container.is_freed or not keeps

    def _note_answer(
        self, container: _Container, one: _Process, verb: Verb, answer: Answer, now_s: float
    ) -> None:
        if verb == "state":
            self._note_state(container, one, answer, now_s)
            return
        if verb == "restore":
            container.restored_s = now_s
        if answer.is_ok:
            one.tries = 0
            one.state = _STATE_AFTER[verb]
            if verb == "restore":
                one.moved_mib = {}
            return
        one.state = "unknown"
        if not answer.code:
            one.ask_at_s = now_s + ASK_S
            one.doubted_until_s = now_s + DOUBT_S
        one.tries += bool(answer.code) or container.phase == "parking"
        if verb == "restore" and answer.code not in {0, *_UNCHANGED}:
            self._lose(container, f"restore of process {one.facts.pid}: {answer.name}", now_s)
        elif container.phase == "parking" and answer.code:
            text = f"{verb} of process {one.facts.pid}: {answer.name}"
            self._revert(container, (_REASONS.get(verb, "lock"), text), now_s)

    def _note_state(
        self, container: _Container, one: _Process, answer: Answer, now_s: float
    ) -> None:
        one.ask_at_s = now_s + ASK_S
        if answer.is_ok:
            one.state = _STATES.get(answer.state, "unknown")
        elif answer.code == NOT_INITIALIZED:
            one.state = "running"  # it has not used the driver yet
        if one.state == "failed":
            self._lose(container, f"process {one.facts.pid} is in state failed", now_s)

    # One container

    def _advance(self, container: _Container, facts: Facts) -> None:
        if not container.tenant.has_gate:
            return
        if container.phase == "recovering":
            self._recover(container, facts)
        elif container.phase == "draining":
            self._drain(container, facts)
        elif container.phase == "parking":
            self._park(container, facts)
        elif container.phase == "returning":
            self._return(container, facts)
        elif container.phase == "resident":
            self._unlock_late(container, facts)
        elif container.phase == "parked":
            self._park_late(container, facts)

    def _recover(self, container: _Container, facts: Facts) -> None:
        """Classify a container that an earlier run of the agent left in any state."""
        if not container.tenant.is_complete or not self._know_states(container, facts):
            return
        holds = bool(container.of_state("locked")) or any(
            one.facts.memory_mib for one in container.processes.values()
        )
        if facts.memory_read_s < container.since_s:
            return
        if container.tenant.is_gate_open and not container.of_state("locked", "checkpointed"):
            container.enter("resident", facts.now_s)
            return
        if container.tenant.is_gate_open:
            self._set_gate(container, is_open=False)
        if holds:
            # It had room before the restart: it was being parked or was returning.
            container.began_s = facts.now_s
            container.is_reverting = True
            container.enter("returning", facts.now_s)
        else:
            container.is_freed = not container.of_state("checkpointed")
            container.enter("parked", facts.now_s)

    def _unlock_late(self, container: _Container, facts: Facts) -> None:
        """Check processes of a resident container that may have been locked by an earlier call."""
        if container.since_s < facts.now_s and not container.tenant.is_gate_open:
            self._set_gate(container, is_open=True)  # it could not be written
        self._doubt(container, facts)
        self._know_states(container, facts)
        if container.of_state("locked", "checkpointed"):
            container.enter("recovering", facts.now_s)

    def _park_late(self, container: _Container, facts: Facts) -> None:
        """Move processes of a parked container again that an earlier call has restored."""
        self._doubt(container, facts)
        restored = container.of_state("locked")
        if restored and not _is_being_changed(container):
            for one in container.processes.values():
                one.is_target = one in restored
                if one.is_target:
                    one.moved_mib = dict(one.facts.memory_mib) or one.moved_mib
            container.began_s = facts.now_s
            container.enter("parking", facts.now_s)

    def _doubt(self, container: _Container, facts: Facts) -> None:
        """Ask again for states that a call without an answer may have changed since."""
        for one in container.of_state("running", "checkpointed"):
            is_due = one.ask_at_s <= facts.now_s < one.doubted_until_s
            if is_due and one.pending is None and not one.facts.is_stopped:
                self._call(container, one, "state", facts)

    def _drain(self, container: _Container, facts: Facts) -> None:
        now_s = facts.now_s
        if container.waits_at_s is not None and container.waits_at_s >= container.since_s:
            self._open(container, facts)  # it is not idle
            return
        if container.wanted_by is not None and container.wanted_by not in self._containers:
            text = "stays on the device: the container that waited for the memory has ended"
            self._tell(container, "RecallRefused", text, reason="vanished")
            self._open(container, facts)  # for others it may be parked again at once
            return
        refused = self._refusal(container)
        if refused is not None:
            self._keep(container, refused, facts)
            return
        if container.tenant.is_gate_open and container.since_s < now_s:
            self._set_gate(container, is_open=False)  # it could not be written
            container.reports.clear()
        holders = _holding_memory(container)
        is_read = facts.memory_read_s >= container.since_s + SETTLE_S
        is_read = is_read and not container.tenant.is_gate_open
        if is_read and self._is_drained(container, holders):
            for one in container.processes.values():
                one.is_target = one in holders
                one.moved_mib = dict(one.facts.memory_mib) if one.is_target else {}
            container.enter("parking", now_s)
            self._park(container, facts)
        elif now_s - container.since_s > self.rules.park_s:
            text = f"calls into the driver did not return within {self.rules.park_s:g} s"
            self._keep(container, ("busy", text), facts)

    @staticmethod
    def _is_drained(container: _Container, holders: Iterable[_Process]) -> bool:
        """Return whether no thread is in the driver, and the processes to move know it."""
        reports = container.reports
        alive = {one.facts.pid for one in container.processes.values()}
        return all(reports.get(one.facts.pid) == "drained" for one in holders) and not any(
            kind == "busy" for pid, kind in reports.items() if pid in alive
        )

    def _park(self, container: _Container, facts: Facts) -> None:
        """Lock all processes with device memory, children first; then checkpoint each."""
        targets = [one for one in container.processes.values() if one.is_target]
        targets.sort(key=lambda one: (one.facts.start_ticks, one.facts.pid), reverse=True)
        if _is_being_changed(container):
            return
        problem = self._problem_of_parking(container, targets, facts)
        if problem is not None:
            self._revert(container, problem, facts.now_s)
            return
        if not self._know_states(container, facts, targets):
            return
        for state, verb in _PARKING:
            for one in targets:
                if one.state == state:
                    self._call(container, one, verb, facts)
                    return
        moved_mib, took_s = container.moved_mib, facts.now_s - container.began_s
        container.is_freed = not targets
        container.enter("parked", facts.now_s)
        if targets:
            text = f"{moved_mib} MiB of device memory were moved to the host in {took_s:.1f} s"
            self._tell(container, "RecallParked", text, moved_mib=moved_mib, took_s=took_s)

    def _problem_of_parking(
        self, container: _Container, targets: Sequence[_Process], facts: Facts
    ) -> Refusal | None:
        """Return why a parking that has begun cannot be finished."""
        is_late = facts.now_s - container.since_s > self.rules.park_s
        if not facts.is_helper_ready and is_late:
            return "helper", "hami-recall does not run"
        is_any_moved = any(one.state == "checkpointed" for one in targets)
        for one in targets:
            pid = one.facts.pid
            if one.facts.is_stopped:
                return "stopped", f"process {pid} is stopped"
            if one.state == "running" and is_any_moved:
                return "lock", f"process {pid} is no longer locked"
            if one.state != "checkpointed" and one.tries > TRIES:
                reason: Reason = "lock" if one.state == "running" else "checkpoint"
                return reason, f"{reason} of process {pid}: no result after {one.tries} attempts"
        return None

    def _return(self, container: _Container, facts: Facts) -> None:
        if _is_being_changed(container) or not self._know_states(container, facts):
            return
        moved = container.of_state("checkpointed")
        locked = container.of_state("locked")
        for one in (*moved, *locked):
            if one.tries > TRIES:
                verb: Verb = "restore" if one.state == "checkpointed" else "unlock"
                text = f"{verb} of process {one.facts.pid}: no result after {one.tries} attempts"
                self._lose(container, text, facts.now_s)
                return
        if any(one.facts.is_stopped for one in (*moved, *locked)):
            return  # the driver would wait for it without end
        if moved:
            if self._has_free_memory(container, facts):
                self._call(container, moved[0], "restore", facts)
            return
        if locked:
            self._call(container, locked[0], "unlock", facts)
            return
        took_s = facts.now_s - container.began_s
        was_moved = container.restored_s >= container.began_s
        self._open(container, facts)
        if was_moved and not container.is_reverting:
            text = f"device memory was moved back in {took_s:.1f} s"
            moved_mib = container.returning_mib
            self._tell(container, "RecallReturned", text, moved_mib=moved_mib, took_s=took_s)
        container.is_reverting = False

    def _has_free_memory(self, container: _Container, facts: Facts) -> bool:
        """Return whether every device has the free memory that the restores need.

        One container at a time is restored on a device, because all would count the same memory.
        """
        uuids = container.tenant.limit_mib.keys()
        others = [
            one
            for one in self._containers.values()
            if one is not container and not uuids.isdisjoint(one.tenant.limit_mib)
        ]
        if any(
            process.pending == "restore" for one in others for process in one.processes.values()
        ):
            return False
        newest_s = max([container.since_s, *(one.restored_s for one in (container, *others))])
        if facts.memory_read_s < newest_s:
            return False
        with_room = [one for one in others if one.has_room]
        for uuid in uuids:
            # A parking that is undone had this memory a moment ago.
            shared = uuid not in facts.card_mib or _is_shared(uuid, with_room)
            margin_mib = MARGIN_MIB if shared and not container.is_reverting else 0
            if facts.free_mib.get(uuid, -1) < container.moved_of(uuid) + margin_mib:
                return False
        return True

    def _know_states(
        self,
        container: _Container,
        facts: Facts,
        processes: Sequence[_Process] | None = None,
    ) -> bool:
        """Ask for unknown driver states; return whether all are known."""
        if processes is None:
            processes = list(container.processes.values())
        unknown = [one for one in processes if one.state == "unknown"]
        for one in unknown:
            is_due = one.ask_at_s <= facts.now_s and not one.facts.is_stopped
            if is_due and one.pending is None:
                self._call(container, one, "state", facts)
        return not unknown

    # Distribution of room

    def _serve_waiting(self, facts: Facts) -> None:
        """Give room to waiting containers in order of level and waiting time.

        One that can get its room by parking others keeps the ones behind it from taking what
        becomes free, so that it is not passed without end.
        """
        waiting = [
            one
            for one in self._containers.values()
            if one.phase == "parked" and one.is_waiting(facts.now_s)
        ]
        waiting.sort(key=lambda one: (one.tenant.level, one.waits_since_s, one.key))
        awaited: set[str] = set()
        for container in waiting:
            uuids = container.tenant.limit_mib.keys()
            if not awaited.isdisjoint(uuids):
                continue
            if not self._lacking(container, self._with_room(container), facts):
                container.began_s = facts.now_s
                container.returning_mib = container.moved_mib
                container.is_reverting = False
                container.enter("returning", facts.now_s)
                self._return(container, facts)
            elif self._make_room(container, facts):
                awaited |= uuids

    def _make_room(self, container: _Container, facts: Facts) -> bool:
        """Park idle containers for this one; return whether that can suffice."""
        others = self._with_room(container)
        fixed = [one for one in others if not self._may_give_way(one, container, facts)]
        if self._lacking(container, fixed, facts):
            return False
        staying = [one for one in others if not one.is_coming_free]
        idle = [
            one
            for one in staying
            if one not in fixed
            and one.phase == "resident"
            and one.idle_s(facts.now_s) >= self.rules.idle_s
        ]
        idle.sort(key=lambda one: (-one.tenant.level, -one.idle_s(facts.now_s)))
        for one in idle:
            lacking = self._lacking(container, staying, facts)
            if not lacking:
                break
            if lacking.isdisjoint(one.tenant.limit_mib):
                continue
            if not facts.is_helper_ready and _holding_memory(one):
                continue
            if self._begin_parking(one, facts, wanted_by=container.key):
                staying.remove(one)
        return True

    def _park_requested(self, facts: Facts) -> None:
        requested, self._requested = self._requested, set()
        for key in sorted(requested & self._containers.keys()):
            one = self._containers[key]
            is_able = facts.is_helper_ready or not _holding_memory(one)
            if is_able and self._may_park(one, facts.now_s):
                self._begin_parking(one, facts)

    def _may_park(self, one: _Container, now_s: float) -> bool:
        return (
            one.phase == "resident"
            and one.tenant.has_gate
            and one.retry_at_s <= now_s
            and one.idle_s(now_s) >= self.rules.idle_s
        )

    def _may_give_way(self, one: _Container, wanting: _Container, facts: Facts) -> bool:
        return (
            one.tenant.has_gate
            and one.phase not in {"recovering", "lost"}
            and one.tenant.level >= wanting.tenant.level
            and one.retry_at_s <= facts.now_s
        )

    def _with_room(self, container: _Container) -> list[_Container]:
        return [one for one in self._containers.values() if one is not container and one.has_room]

    @staticmethod
    def _lacking(container: _Container, others: Iterable[_Container], facts: Facts) -> set[str]:
        """Return the devices on which the container does not fit beside the others.

        It needs its limit, and beside others at least what its restores need.
        """
        others = tuple(others)
        left_mib = {}
        for uuid, limit_mib in container.tenant.limit_mib.items():
            need_mib = limit_mib
            if (moved_mib := container.moved_of(uuid)) and _is_shared(uuid, others):
                need_mib = max(need_mib, moved_mib + MARGIN_MIB)
            if uuid in facts.card_mib:
                left_mib[uuid] = facts.card_mib[uuid] - need_mib
        for one in others:
            for uuid in left_mib.keys() & one.tenant.limit_mib.keys():
                left_mib[uuid] -= one.tenant.limit_mib[uuid]
        return {uuid for uuid, mib in left_mib.items() if mib < 0}

    def _begin_parking(
        self, container: _Container, facts: Facts, *, wanted_by: ContainerKey | None = None
    ) -> bool:
        refused = self._refusal(container)
        if refused is not None:
            self._refuse(container, refused, facts.now_s)
            return False
        container.reports.clear()
        container.began_s, container.wanted_by = facts.now_s, wanted_by
        container.enter("draining", facts.now_s)
        self._set_gate(container, is_open=False)
        return True

    @staticmethod
    def _refusal(container: _Container) -> Refusal | None:
        """Return why the container cannot be parked."""
        for one in container.processes.values():
            pid = one.facts.pid
            if one.facts.is_stopped:
                return "stopped", f"process {pid} is stopped"
            if pid in container.unmovable:
                return "unmovable", f"process {pid} uses managed or shared device memory"
            if one.facts.memory_mib and not one.facts.has_slot:
                return "unhooked", f"process {pid} uses the device without the limiter"
            if UNKNOWN_MIB in one.facts.memory_mib.values():
                return "unmeasured", f"the driver does not report the memory of process {pid}"
        need_mib = sum(sum(one.facts.memory_mib.values()) for one in _holding_memory(container))
        headroom_mib = container.tenant.headroom_mib
        if need_mib and headroom_mib == UNKNOWN_MIB:
            return "host-memory", "its memory limit cannot be read on the node"
        if need_mib and headroom_mib is not None and headroom_mib < need_mib + HOST_MARGIN_MIB:
            return "host-memory", (
                f"its memory limit leaves {headroom_mib} MiB, {need_mib + HOST_MARGIN_MIB} MiB are "
                "needed: raise limits.memory by the device memory of the pod"
            )
        return None

    # Changes

    def _keep(self, container: _Container, refused: Refusal, facts: Facts) -> None:
        """Open the gate of a container that cannot be parked."""
        self._refuse(container, refused, facts.now_s)
        self._open(container, facts)

    def _refuse(self, container: _Container, refused: Refusal, now_s: float) -> None:
        container.retry_at_s = now_s + self.rules.retry_s
        reason, text = refused
        self._tell(container, "RecallRefused", f"stays on the device: {text}", reason=reason)

    def _revert(self, container: _Container, problem: Refusal, now_s: float) -> None:
        """Undo a parking that failed; the room is still that of the container."""
        self._refuse(container, problem, now_s)
        container.is_reverting = True
        container.enter("returning", now_s)

    def _lose(self, container: _Container, text: str, now_s: float) -> None:
        if container.phase != "lost":
            container.enter("lost", now_s)
            self._tell(container, "RecallFailed", f"evicted: {text}", reason="restore")
            self._actions.append(Evict(key=container.key))

    def _open(self, container: _Container, facts: Facts) -> None:
        container.opened_s = facts.now_s
        container.reports.clear()
        container.waits_at_s = None
        container.enter("resident", facts.now_s)
        self._set_gate(container, is_open=True)

    def _set_gate(self, container: _Container, *, is_open: bool) -> None:
        self._actions.append(SetGate(key=container.key, is_open=is_open))

    def _call(self, container: _Container, one: _Process, verb: Verb, facts: Facts) -> None:
        if facts.is_helper_ready:
            one.pending = verb
            timeout_s = self.rules.park_s if verb == "lock" else 0.0
            call = Call(key=container.key, pid=one.facts.pid, verb=verb, timeout_s=timeout_s)
            self._actions.append(call)

    def _tell(
        self,
        container: _Container,
        event: EventReason,
        text: str,
        *,
        reason: Reason | Literal[""] = "",
        moved_mib: int = 0,
        took_s: float = 0.0,
    ) -> None:
        self._actions.append(
            PodEvent(
                key=container.key,
                event=event,
                text=text,
                reason=reason,
                moved_mib=moved_mib,
                took_s=took_s,
                wanted_by=container.wanted_by if event == "RecallParked" else None,
            )
        )


def _first_phase(tenant: Tenant, *, is_recovered: bool) -> Phase:
    if not tenant.has_gate:
        return "resident"
    return "recovering" if is_recovered or tenant.is_gate_open else "parked"


def _is_shared(uuid: str, others: Iterable[_Container]) -> bool:
    return any(uuid in one.tenant.limit_mib for one in others)


def _holding_memory(container: _Container) -> list[_Process]:
    return [one for one in container.processes.values() if one.facts.memory_mib]


def _is_being_changed(container: _Container) -> bool:
    """Return whether an answer about a process of the container is awaited."""
    return any(one.pending for one in container.processes.values())
