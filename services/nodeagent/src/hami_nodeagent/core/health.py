# SPDX-License-Identifier: Apache-2.0
"""Decides from driver observations whether a device may be used: a pure debounce per device.

States and their transitions (``fails`` and ``passes`` are probe results)::

    healthy     fails -> suspect
    suspect     passes -> healthy; fails, `failures_to_condemn` in a row -> unhealthy
    unhealthy   passes -> recovering
    recovering  passes, `probes_to_recover` in a row and `recover_s` after the first -> healthy;
                fails -> unhealthy
    any         fatal fault, device lost, driver gone -> unhealthy at once

A fault of a part of the device (a MIG instance) changes only the state of that part, by the same
rules: probes of the device also count for the part, other stimuli do not.

Only healthy and suspect devices are usable. A fault that the driver judges not fatal (an
application's own error) is kept in the history and changes no state. An error of the wait call
itself is no stimulus. An operator's verdict overrides the state while it is set; the state
continues to change underneath.

Stimuli come from drivers (probes, faults, loss), from the inventory (a device was listed) and from
the node's annotation (the operator). Times are seconds of one monotonic clock, given by the caller.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import InvariantBroken
from hami_common.model.device import DeviceFacts

_STORY_LENGTH = 16


class HealthState(StrEnum):
    """Health state of a device; the text appears in logs and metrics."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    RECOVERING = "recovering"


USABLE = frozenset({HealthState.HEALTHY, HealthState.SUSPECT})


class HealthRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thresholds of the state transitions."""

    failures_to_condemn: int = 3
    """Consecutive failed probes that make a device unusable; above 1, because a driver call may
    fail once."""
    probes_to_recover: int = 3
    """Consecutive passed probes after which a device is usable again."""
    recover_s: float = 10.0
    """Minimum seconds between the first of those passed probes and the return to service."""


class DeviceListed(Struct, frozen=True, kw_only=True):
    """Discovery lists the device, with any problem it found."""

    uuid: str
    problem: str = ""
    """Reason why the device cannot be used although it is listed; empty when it answered."""


class ProbePassed(Struct, frozen=True, kw_only=True):
    """The device answered a probe and reports no lasting defect."""

    uuid: str


class ProbeFailed(Struct, frozen=True, kw_only=True):
    """The device answered a probe with an error that may be transient."""

    uuid: str
    reason: str


class FaultSeen(Struct, frozen=True, kw_only=True):
    """The device reported a fault on its own."""

    uuid: str
    code: int
    """The vendor's number, for NVIDIA the Xid."""
    fatal: bool
    """The device itself is at fault, not the application on it."""
    text: str
    part: int | None = None
    """Number of the hardware partition that is at fault, for NVIDIA of the GPU instance; ``None``:
    the device as a whole."""


class DeviceLost(Struct, frozen=True, kw_only=True):
    """The device does not answer and does not recover by waiting."""

    uuid: str
    reason: str


class DriverGone(Struct, frozen=True, kw_only=True):
    """No device of the vendor can be reached."""

    reason: str


class OperatorVerdict(Struct, frozen=True, kw_only=True):
    """An operator decided about the device, or revoked the decision (``usable=None``)."""

    uuid: str
    usable: bool | None
    reason: str = ""


Stimulus = (
    DeviceListed | ProbePassed | ProbeFailed | FaultSeen | DeviceLost | DriverGone | OperatorVerdict
)


class HealthChanged(Struct, frozen=True, kw_only=True):
    """Effect: publish that a device became usable or unusable, or a new reason."""

    uuid: str
    usable: bool
    reason: str
    part: int | None = None
    """The partition concerned; ``None``: the device."""


class Verdict(Struct, frozen=True, kw_only=True):
    """Published verdict on a device."""

    usable: bool
    reason: str
    """Empty when usable."""
    state: HealthState


@dataclass(slots=True, kw_only=True)
class _Record:
    """State of one device. ``streak`` counts equal probe results that led to the present state."""

    state: HealthState = HealthState.HEALTHY
    streak: int = 0
    streak_since_s: float = 0.0
    reason: str = ""
    operator: OperatorVerdict | None = None
    story: deque[str] = field(default_factory=lambda: deque(maxlen=_STORY_LENGTH))

    def verdict(self) -> Verdict:
        """Return the operator's verdict if there is one, else that of the state."""
        usable, reason = self.state in USABLE, self.reason
        if self.operator is not None and self.operator.usable is not None:
            usable = self.operator.usable
            reason = self.operator.reason or "taken out of use by an operator"
        return Verdict(usable=usable, reason="" if usable else reason, state=self.state)

    def move(self, state: HealthState, *, streak: int, now_s: float) -> None:
        """Enter ``state``; a streak of one starts its clock."""
        self.state, self.streak = state, streak
        if streak <= 1:
            self.streak_since_s = now_s


class HealthBook:
    """The health of all devices of one vendor on this node."""

    def __init__(self, rules: HealthRules | None = None) -> None:
        """Start with no device known."""
        self.rules = rules or HealthRules()
        self._record_by_uuid: dict[str, _Record] = {}
        self._record_by_part: dict[tuple[str, int], _Record] = {}
        """Partitions that are at fault, by device and number."""

    def handle(self, stimulus: Stimulus, now_s: float) -> tuple[HealthChanged, ...]:
        """Process one stimulus; return the published verdicts that changed."""
        if isinstance(stimulus, FaultSeen) and stimulus.part is not None:
            return self._fault_of_part(stimulus, stimulus.part, now_s)
        if isinstance(stimulus, DriverGone):
            touched = list(self._record_by_uuid)
        else:
            touched = [stimulus.uuid]
        changes = []
        if isinstance(stimulus, ProbePassed | ProbeFailed):
            changes.extend(self._probe_parts(stimulus, now_s))
        for uuid in touched:
            record = self._record_by_uuid.setdefault(uuid, _Record())
            before, state = record.verdict(), record.state
            self._apply(record, stimulus, now_s)
            after = record.verdict()
            record.story.append(f"{now_s:.3f} {_describe(stimulus)}: {state} -> {record.state}")
            if (before.usable, before.reason) != (after.usable, after.reason):
                changes.append(HealthChanged(uuid=uuid, usable=after.usable, reason=after.reason))
        return tuple(changes)

    def _fault_of_part(
        self, stimulus: FaultSeen, number: int, now_s: float
    ) -> tuple[HealthChanged, ...]:
        if not stimulus.fatal:
            return ()
        key = (stimulus.uuid, number)
        before = self._record_by_part.get(key)
        record = self._record_by_part.setdefault(key, _Record())
        is_news = before is None or record.reason != stimulus.text
        _condemn(record, stimulus.text, now_s)
        if not is_news:
            return ()
        reason = stimulus.text
        return (HealthChanged(uuid=stimulus.uuid, usable=False, reason=reason, part=number),)

    def _probe_parts(
        self, stimulus: ProbePassed | ProbeFailed, now_s: float
    ) -> list[HealthChanged]:
        """Apply a card's probe result to its parts; a part that recovered is removed."""
        changes = []
        for (uuid, number), record in list(self._record_by_part.items()):
            if uuid != stimulus.uuid:
                continue
            if isinstance(stimulus, ProbePassed):
                self._passed(record, now_s)
            else:
                record.move(HealthState.UNHEALTHY, streak=0, now_s=now_s)
            if record.state in USABLE:
                del self._record_by_part[uuid, number]
                changes.append(HealthChanged(uuid=uuid, usable=True, reason="", part=number))
        return changes

    def verdict(self, uuid: str) -> Verdict:
        """Return the published verdict on ``uuid``; a device without observations is usable."""
        return self._record_by_uuid.get(uuid, _Record()).verdict()

    def story(self, uuid: str) -> tuple[str, ...]:
        """Return the recent history of one device, oldest first, for logs and support."""
        record = self._record_by_uuid.get(uuid)
        return () if record is None else tuple(record.story)

    def judge(self, facts: DeviceFacts) -> DeviceFacts:
        """Return the facts with this book's verdict, as they are reported."""
        verdict = self.verdict(facts.uuid)
        return replace(facts, healthy=verdict.usable, health_reason=verdict.reason)

    def check(self) -> None:
        """Raise ``InvariantBroken`` if a record contradicts the rules."""
        for uuid, record in self._record_by_uuid.items():
            limit = {
                HealthState.HEALTHY: 0,
                HealthState.SUSPECT: self.rules.failures_to_condemn - 1,
            }.get(record.state)
            wrong = limit is not None and record.streak > limit
            wrong = wrong or (record.state is HealthState.UNHEALTHY and not record.reason)
            if wrong:
                raise InvariantBroken(
                    what=f"device {uuid} is {record.state} with streak {record.streak}",
                    history=tuple(record.story),
                )

    def _apply(self, record: _Record, stimulus: Stimulus, now_s: float) -> None:
        match stimulus:
            case ProbePassed():
                self._passed(record, now_s)
            case ProbeFailed():
                self._failed(record, stimulus.reason, now_s)
            case FaultSeen(fatal=True):
                _condemn(record, stimulus.text, now_s)
            case DeviceLost() | DriverGone():
                _condemn(record, stimulus.reason, now_s)
            case DeviceListed() if stimulus.problem:
                _condemn(record, stimulus.problem, now_s)
            case OperatorVerdict():
                record.operator = stimulus
            case _:
                pass

    def _passed(self, record: _Record, now_s: float) -> None:
        match record.state:
            case HealthState.SUSPECT:
                _clear(record, now_s)
            case HealthState.UNHEALTHY:
                record.move(HealthState.RECOVERING, streak=1, now_s=now_s)
            case HealthState.RECOVERING:
                record.move(HealthState.RECOVERING, streak=record.streak + 1, now_s=now_s)
            case HealthState.HEALTHY:
                return
        if (
            record.state is HealthState.RECOVERING
            and record.streak >= self.rules.probes_to_recover
            and now_s - record.streak_since_s >= self.rules.recover_s
        ):
            _clear(record, now_s)

    def _failed(self, record: _Record, reason: str, now_s: float) -> None:
        if record.state not in USABLE:
            _condemn(record, reason, now_s)
            return
        record.move(HealthState.SUSPECT, streak=record.streak + 1, now_s=now_s)
        if record.streak >= self.rules.failures_to_condemn:
            _condemn(record, reason, now_s)


def _condemn(record: _Record, reason: str, now_s: float) -> None:
    record.move(HealthState.UNHEALTHY, streak=0, now_s=now_s)
    record.reason = reason


def _clear(record: _Record, now_s: float) -> None:
    record.move(HealthState.HEALTHY, streak=0, now_s=now_s)
    record.reason = ""


def _describe(stimulus: Stimulus) -> str:
    match stimulus:
        case FaultSeen():
            return f"{'fatal' if stimulus.fatal else 'harmless'} fault, {stimulus.text}"
        case ProbeFailed() | DeviceLost() | DriverGone():
            return f"{type(stimulus).__name__}, {stimulus.reason}"
        case OperatorVerdict():
            return f"operator says usable={stimulus.usable}"
        case DeviceListed():
            return f"listed {stimulus.problem}".strip()
        case ProbePassed():
            return "probe passed"
