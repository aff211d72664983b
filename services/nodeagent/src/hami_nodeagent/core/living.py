# SPDX-License-Identifier: Apache-2.0
"""Tells the owners of a region's slots that are gone from those that live.

An owner names itself as its own PID namespace numbers it; the agent sees processes as the host
numbers them, each with its numbers in all namespaces down to its own (``NSpid`` of
``/proc/<pid>/status``, proc(5)) and when it started, which everybody may read. Which namespace it
is in needs more rights, and where that is not told, number and start must do. An owner that is not
seen is gone only if it would be seen: nothing was hidden, and its namespace is the one that
``/proc`` shows, or an inner one. That is certain where ``/proc`` shows the machine's first
namespace, and else once somebody was seen in it. Who cannot be judged lives. Start times in ticks
since boot.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from hami_common.units import whole

FIRST_NAMESPACE = 4026531836
"""Number that the kernel gives the machine's first PID namespace."""

_STATE, _THREADS, _START = 0, 17, 19
"""Fields of ``stat`` after the name."""


class Owner(Struct, frozen=True, kw_only=True):
    """Who holds a slot, by its own word."""

    pid: int
    namespace: int
    start_ticks: int
    """0: not known."""


class Seen(Struct, frozen=True, kw_only=True):
    """One process of the host that has not ended."""

    pid: int
    inner_pid: int
    start_ticks: int
    namespace: int = 0
    """0: not told."""


class View(Struct, frozen=True, kw_only=True):
    """What a walk through ``/proc`` has shown."""

    processes: Mapping[int, Sequence[Seen]]
    """By number in their own namespace."""
    namespace: int
    """The one whose numbers ``/proc`` shows; 0: not known."""
    is_complete: bool
    """No process was hidden."""


def parse_stat(text: str) -> tuple[int, bool] | None:
    """Start time, and whether it and all its threads have ended; ``None``: no process's text."""
    fields = text.rpartition(") ")[2].split()
    if len(fields) <= _START or not (fields[_THREADS] + fields[_START]).isdecimal():
        return None
    state = fields[_STATE]
    ended = state in {"X", "x"} or (state == "Z" and int(fields[_THREADS]) <= 1)
    return int(fields[_START]), ended


def inner_pid(status: str) -> int | None:
    """Number of the process in its own namespace; ``None`` where the kernel does not tell."""
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            last = line.split()[-1]
            return whole(last)
    return None


def find(owner: Owner, view: View) -> Seen | None:
    """The process that the owner is, or may be; ``None``: there is none like it."""
    for seen in view.processes.get(owner.pid, ()):
        is_there = seen.namespace in {0, owner.namespace}
        if is_there and owner.start_ticks in {0, seen.start_ticks}:
            return seen
    return None


def is_dead(owner: Owner, view: View, inner: Collection[int]) -> bool:
    """Whether the owner is gone for certain; ``inner``: namespaces seen inhabited."""
    would_be_seen = (
        view.namespace == FIRST_NAMESPACE
        or owner.namespace in inner
        or owner.namespace == view.namespace
    )
    is_knowable = view.is_complete and owner.namespace != 0 and would_be_seen
    return is_knowable and find(owner, view) is None
