# SPDX-License-Identifier: Apache-2.0
"""Reads from the host's ``/proc`` which owners of region slots have ended; rules: ``core.living``.

If the last process of a container is killed, its slot remains, because no other process of the
container is left to reclaim it. A walk through ``/proc`` costs some reads per process, so it is
done only if an owner is not found at its last PID; an owner found dead is not searched again. An
owner whose process was recognized needs no walk. Not thread-safe.
"""

from collections.abc import Collection
from pathlib import Path

from hami_nodeagent.core.living import (
    Owner,
    Seen,
    View,
    find,
    inner_pid,
    is_certain,
    is_dead,
    parse_stat,
)

_U32 = (1 << 32) - 1


class Living:
    """Cache of the host's processes that own region slots."""

    def __init__(self, proc: Path) -> None:
        """Read ``proc``, the host's ``/proc``."""
        self._proc = proc
        self._alive: dict[Owner, Seen] = {}
        self._dead: frozenset[Owner] = frozenset()
        self._inner: set[int] = set()

    def dead_of(self, owners: Collection[Owner]) -> Collection[Owner]:
        """Those that are gone for certain; blocks for as long as ``/proc`` takes."""
        asked = [owner for owner in owners if owner not in self._dead and not self._still(owner)]
        if not asked:
            return self._dead.intersection(owners)
        view = self._walk()
        self._inner |= {seen.namespace for same in view.processes.values() for seen in same} - {0}
        dead = set()
        for owner in asked:
            seen = find(owner, view)
            if seen is not None:
                self._alive[owner] = seen
                if owner.start_ticks:
                    self._inner.add(owner.namespace)
            elif is_dead(owner, view, self._inner):
                dead.add(owner)
        # One whose start is not known may have a successor of the same number.
        self._dead |= {owner for owner in dead if owner.start_ticks}
        return dead | self._dead.intersection(owners)

    def pids_of(self, owners: Collection[Owner]) -> dict[Owner, int]:
        """Return the pids in ``/proc`` of those that live and are visible; blocks as above."""
        self.dead_of(owners)
        return {owner: self._alive[owner].pid for owner in owners if owner in self._alive}

    def recognize(self, pid: int, owners: Collection[Owner]) -> None:
        """Note which of these owners the process is, if that is certain; reads three files."""
        try:
            seen = _look(self._proc / str(pid))
        except OSError:
            return
        for owner in owners:
            if seen is not None and is_certain(owner, seen):
                self._alive[owner] = seen

    def ended_of(self, owners: Collection[Owner]) -> frozenset[Owner]:
        """Those of which the process was recognized and has ended; reads one file for each."""
        recognized = [owner for owner in owners if self.recognizes(owner)]
        return frozenset(owner for owner in recognized if not self._still(owner))

    def recognizes(self, owner: Owner) -> bool:
        """Return whether the owner's process is known for certain, and lived when last read."""
        seen = self._alive.get(owner)
        return seen is not None and is_certain(owner, seen)

    def keep_only(self, owners: Collection[Owner]) -> None:
        """Forget all others."""
        kept = frozenset(owners)
        self._dead &= kept
        self._inner &= {owner.namespace for owner in kept}
        self._alive = {owner: seen for owner, seen in self._alive.items() if owner in kept}

    def _still(self, owner: Owner) -> bool:
        seen = self._alive.get(owner)
        if seen is None:
            return False
        try:
            stat = parse_stat((self._proc / str(seen.pid) / "stat").read_text(errors="replace"))
        except OSError:
            stat = None
        if stat == (seen.start_ticks, False):
            return True
        del self._alive[owner]
        return False

    def _walk(self) -> View:
        processes: dict[int, list[Seen]] = {}
        is_complete = True
        try:
            directories = [one for one in self._proc.iterdir() if one.name.isdecimal()]
            _look(self._proc / "1")  # where this one is hidden from us, others are as well
        except OSError:
            return View(processes={}, namespace=0, is_complete=False)
        for directory in directories:
            try:
                seen = _look(directory)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            except OSError:
                seen = None
            if seen is None:
                is_complete = False
            else:
                processes.setdefault(seen.inner_pid, []).append(seen)
        return View(processes=processes, namespace=self._shown(), is_complete=is_complete)

    def _shown(self) -> int:
        """The namespace whose numbers ``/proc`` shows, if it is this process's own."""
        own = self._proc / "self"
        try:
            if str(own.readlink()) == str(inner_pid((own / "status").read_text(errors="replace"))):
                return _namespace(own)
        except OSError:
            pass
        return 0


def _look(directory: Path) -> Seen | None:
    stat = parse_stat((directory / "stat").read_text(errors="replace"))
    if stat is None:
        return None
    start_ticks, has_ended = stat
    if has_ended:
        raise ProcessLookupError
    number = inner_pid((directory / "status").read_text(errors="replace"))
    if number is None:
        return None
    try:
        namespace = _namespace(directory)
    except PermissionError:
        namespace = 0
    return Seen(
        pid=int(directory.name), inner_pid=number, start_ticks=start_ticks, namespace=namespace
    )


def _namespace(directory: Path) -> int:
    """As the library writes it: the low half of the inode."""
    name = str((directory / "ns" / "pid").readlink())
    return int(name.partition("[")[2].rstrip("]") or 0) & _U32
