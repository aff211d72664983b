# SPDX-License-Identifier: Apache-2.0
"""Finds memory pressure on overcommitted devices and on the memory of their host.

A device that offers more memory than it has keeps the excess in the host: single pages with class
``managed``, whole containers with class ``recall``. Memory that containers were given beyond the
device's own is certainly in the host, wherever the driver keeps the rest. Each condition begins at
one threshold and ends at a lower one, after it has held for a while; a condition that keeps
returning is reported at most every ``REPEAT_S``. Memory in MiB, times in seconds of
CLOCK_MONOTONIC.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

Kind = Literal["spilled", "thrashing", "host-memory"]
"""``spilled``: memory of the device's containers is in the host. ``thrashing``: its containers move
each other's pages (``core.thrash``). ``host-memory``: the host lacks memory for what its devices
promise."""
NODE = ""
"""Device of conditions that concern the whole node."""

SPILLED_BEGINS = 0.05
"""Part of the device's memory that is in the host from which the condition holds."""
SPILLED_ENDS = 0.02
HOST_ENDS = 0.05
"""Part of the host's memory that must be left again."""
BEGINS_S = 10.0
"""Time for which a condition must hold."""
ENDS_S = 30.0
"""Time for which it must not."""
REPEAT_S = 300.0
"""Shortest interval between two reports of one condition's begin."""


_END_TEXTS: Mapping[Kind, str] = {
    "spilled": "device {uuid}: the memory of its containers fits the device again",
    "thrashing": "device {uuid}: its containers no longer move each other's pages",
    "host-memory": "the host has memory again for what its devices may move there",
}


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """Memory of one device that offers more than it has."""

    uuid: str
    memory_mib: int
    promised_mib: int
    """Sum of the limits of its containers."""
    used_mib: int
    """Memory that its containers were given, on the device and in the host."""

    @property
    def spilled_mib(self) -> int:
        """Return the memory that is in the host at least."""
        return max(0, self.used_mib - self.memory_mib)

    @property
    def owed_mib(self) -> int:
        """Return the memory that may yet move to the host."""
        return max(0, self.promised_mib - self.memory_mib - self.spilled_mib)


class HostMemory(Struct, frozen=True, kw_only=True):
    """Memory of the node."""

    total_mib: int
    available_mib: int
    """Memory that programs can still be given without swapping, as the kernel estimates it."""

    def headroom_mib(self, devices: Sequence[DeviceMemory]) -> int:
        """Return the memory that is left once devices keep all that they promise in the host."""
        return self.available_mib - sum(one.owed_mib for one in devices)


class Signal(Struct, frozen=True, kw_only=True):
    """Observation of one condition; between the thresholds it neither holds nor is over."""

    holds: bool = False
    is_over: bool = False
    is_settled: bool = False
    """The observer has waited already: begin and end count at once."""
    text: str = ""
    """Sentence for operators."""


ConditionKey = tuple[Kind, str]
"""(kind, UUID of the device or ``NODE``)."""


class Change(Struct, frozen=True, kw_only=True):
    """Begin or end of a condition that is to be reported."""

    kind: Kind
    uuid: str
    is_begin: bool
    text: str


def signals_of(
    devices: Sequence[DeviceMemory], host: HostMemory | None
) -> dict[ConditionKey, Signal]:
    """Return the signals of memory that is in the host, and of the memory of the host."""
    found: dict[ConditionKey, Signal] = {}
    for one in devices:
        found["spilled", one.uuid] = Signal(
            holds=one.spilled_mib >= one.memory_mib * SPILLED_BEGINS,
            is_over=one.spilled_mib <= one.memory_mib * SPILLED_ENDS,
            text=f"device {one.uuid}: containers use {one.used_mib} MiB of its {one.memory_mib} "
            f"MiB, so at least {one.spilled_mib} MiB are in the memory of the host",
        )
    if host is not None and devices:
        headroom_mib = host.headroom_mib(devices)
        owed_mib = sum(one.owed_mib for one in devices)
        found["host-memory", NODE] = Signal(
            holds=headroom_mib < 0,
            is_over=headroom_mib >= host.total_mib * HOST_ENDS,
            text=f"devices may move another {owed_mib} MiB to the memory of the host, of which "
            f"{host.available_mib} MiB are available",
        )
    return found


class _Condition(Struct, kw_only=True):
    is_going: bool = False
    since_s: float | None = None
    """Time from which on the signal contradicts ``is_going``."""
    began_s: float | None = None
    """Time of the last reported begin."""
    is_reported: bool = False
    """The begin of the ongoing condition was reported, so its end will be."""
    text: str = ""


class PressureBook:
    """State of all conditions of a node."""

    def __init__(self) -> None:
        self._conditions: dict[ConditionKey, _Condition] = {}

    @property
    def going(self) -> frozenset[ConditionKey]:
        """Return the ongoing conditions, reported or not."""
        return frozenset(key for key, one in self._conditions.items() if one.is_going)

    def look(self, signals: Mapping[ConditionKey, Signal], *, now_s: float) -> tuple[Change, ...]:
        """Take the signals; a condition without one is over. Return what is to be reported."""
        changes: list[Change] = []
        for key in [*signals, *(self._conditions.keys() - signals.keys())]:
            signal = signals.get(key)
            condition = self._conditions.setdefault(key, _Condition())
            if signal is None:
                signal = Signal(is_over=True, is_settled=True)
            condition.text = signal.text
            if self._turns(condition, signal, now_s):
                change = self._turn(key, condition, now_s)
                if change is not None:
                    changes.append(change)
            is_recent = condition.began_s is not None and now_s - condition.began_s < REPEAT_S
            if key not in signals and not is_recent:
                del self._conditions[key]
        return tuple(changes)

    @staticmethod
    def _turns(condition: _Condition, signal: Signal, now_s: float) -> bool:
        """Return whether the condition begins or ends now."""
        if not (signal.is_over if condition.is_going else signal.holds):
            condition.since_s = None
            return False
        if condition.since_s is None:
            condition.since_s = now_s
        wait_s = 0.0 if signal.is_settled else ENDS_S if condition.is_going else BEGINS_S
        return now_s - condition.since_s >= wait_s

    @staticmethod
    def _turn(key: ConditionKey, condition: _Condition, now_s: float) -> Change | None:
        kind, uuid = key
        condition.is_going, condition.since_s = not condition.is_going, None
        if condition.is_going:
            is_recent = condition.began_s is not None and now_s - condition.began_s < REPEAT_S
            condition.is_reported = not is_recent
            if is_recent:
                return None
            condition.began_s = now_s
        elif not condition.is_reported:
            return None
        text = condition.text if condition.is_going else _END_TEXTS[kind].format(uuid=uuid)
        return Change(kind=kind, uuid=uuid, is_begin=condition.is_going, text=text)
