# SPDX-License-Identifier: Apache-2.0
"""Separates the dead owners of a region's slots from the living.

- An owner records its number in its own PID namespace. The agent sees host PIDs, each with its
  numbers in all namespaces down to its own (``NSpid`` of ``/proc/<pid>/status``, proc(5)) and its
  start time; every user may read these.
- Reading a process's namespace requires more rights. Where the namespace is unreadable, the number
  and the start time identify the process.
- An owner without a visible process is dead only if the process would be visible: no process was
  hidden, and the owner's namespace is the one that ``/proc`` shows, or an inner one. This is
  certain where ``/proc`` shows the machine's first namespace, and otherwise after a process was
  seen in the owner's namespace.
- An owner without a certain result counts as living.

Start times in ticks since boot.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from hami_common.units import whole

FIRST_NAMESPACE = 4026531836
"""Number that the kernel gives the machine's first PID namespace."""

ENDED_MOST = 200
"""Owners in a list of ended ones, which the library reads up to a size."""
_STATE, _THREADS, _START = 0, 17, 19
"""Fields of ``stat`` after the name."""


class Owner(Struct, frozen=True, kw_only=True):
    """Holder of a slot, as it recorded itself."""

    pid: int
    namespace: int
    start_ticks: int
    """0: unknown."""


class Seen(Struct, frozen=True, kw_only=True):
    """One process of the host that has not ended."""

    pid: int
    inner_pid: int
    start_ticks: int
    namespace: int = 0
    """0: unreadable."""


class View(Struct, frozen=True, kw_only=True):
    """Result of a walk through ``/proc``."""

    processes: Mapping[int, Sequence[Seen]]
    """By number in their own namespace."""
    namespace: int
    """The namespace whose numbers ``/proc`` shows; 0: unknown."""
    is_complete: bool
    """No process was hidden."""


def ended_text(owners: Collection[Owner]) -> str:
    """Return the list of ended owners as the in-container library reads it (``process.h``).

    Owners without a start time are left out: a successor may have the same number.
    """
    known = sorted((one.pid, one.namespace, one.start_ticks) for one in owners if one.start_ticks)
    return "".join(f"{' '.join(map(str, one))}\n" for one in known[:ENDED_MOST])


def parse_stat(text: str) -> tuple[int, bool] | None:
    """Return the start time and whether all threads ended; ``None``: not a ``stat`` text."""
    fields = text.rpartition(") ")[2].split()
    if len(fields) <= _START or not (fields[_THREADS] + fields[_START]).isdecimal():
        return None
    state = fields[_STATE]
    ended = state in {"X", "x"} or (state == "Z" and int(fields[_THREADS]) <= 1)
    return int(fields[_START]), ended


def inner_pid(status: str) -> int | None:
    """Return the process's number in its own namespace; ``None`` if the kernel omits it."""
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            last = line.split()[-1]
            return whole(last)
    return None


def find(owner: Owner, view: View) -> Seen | None:
    """Return the process that the owner is or may be; ``None`` without a match."""
    for seen in view.processes.get(owner.pid, ()):
        is_there = seen.namespace in {0, owner.namespace}
        if is_there and owner.start_ticks in {0, seen.start_ticks}:
            return seen
    return None


def is_certain(owner: Owner, seen: Seen) -> bool:
    """Return whether the owner is this process and no other one."""
    known = (owner.pid, owner.namespace, owner.start_ticks)
    return 0 not in known and known == (seen.inner_pid, seen.namespace, seen.start_ticks)


def is_dead(owner: Owner, view: View, inner: Collection[int]) -> bool:
    """Return whether the owner is certainly gone; ``inner``: namespaces with processes seen."""
    would_be_seen = (
        view.namespace == FIRST_NAMESPACE
        or owner.namespace in inner
        or owner.namespace == view.namespace
    )
    is_knowable = view.is_complete and owner.namespace != 0 and would_be_seen
    return is_knowable and find(owner, view) is None
