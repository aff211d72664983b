# SPDX-License-Identifier: Apache-2.0
"""Compares what the driver sees each process use with what its container was given (design D27).

The driver's word is out of the tenant's reach, so this catches whoever is not held by the library
inside the container. Kinds of breach::

    memory    the processes of a container use more of a device than its share and a margin
    compute   their part of the device's time stays above the share and a margin, while somebody
              else wants the device too or the limit is meant for lone tenants as well
    foreign   a process uses a device that its container, or nobody, was given

A breach of memory and foreign use count once ``looks`` of the last ``window_looks`` looks at the
device show them, so that neither a container that is just ending nor a sample that is a moment old
is accused, and bursts are found that end before the next look. Compute is a mean over looks
already: it counts after ``looks`` looks in a row. Each ends with the first look that does not show
it; one that returns within the window is the same breach. ``pause_s`` spreads the looks, so that no
rhythm of use stays between them. A share that was lowered below its use is no breach while
the use does not grow: the library refuses further memory, it cannot take back what is in use.
Whole devices are not compared. Memory in MiB, compute in percent of one device, times in seconds of
the caller's clock.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from hami_common.events.breach import BreachKind
from hami_nodeagent.core.holders import Holder

_FULL_PCT = 100


class BreachRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a difference counts."""

    looks: int = 2
    """Looks that must show it: of the last ``window_looks``, for compute in a row."""
    window_looks: int = 20
    """Looks over which bursts of memory and foreign use are added up; ``looks`` at least."""
    memory_margin_mib: int = 64
    """What a container may use beyond its memory: rounding, and what the driver takes late."""
    core_margin_pct: int = 20
    """The same for compute: samples of the driver are coarse."""
    core_looks: int = 3
    """Looks over which compute is averaged."""
    repeat_s: float = 300.0
    """How often a breach that goes on is told again."""
    host_commands: tuple[str, ...] = (
        "nvidia-persiste",
        "nv-hostengine",
        "nvidia-smi",
        "dcgm-exporter",
        "nvidia-cuda-mps",
    )
    """Processes of the host, by the 15 characters the kernel keeps, that may use any device.
    Processes in pods never pass for these."""


class Process(Struct, frozen=True, kw_only=True):
    """A process on a device, with its owner."""

    pid: int
    command: str = ""
    """Chosen by the process itself; printable."""
    pod_uid: str = ""
    """Empty for a process of the host."""
    container: str = ""
    """Empty when it is not known (yet) which container of the pod it belongs to."""
    used_mib: int = 0
    core_pct: int = 0


class Breach(Struct, frozen=True, kw_only=True):
    """One breach."""

    kind: BreachKind
    uuid: str
    processes: tuple[Process, ...]
    pod_uid: str = ""
    container: str = ""
    holder: Holder | None = None
    """Whose share was exceeded; ``None`` for ``foreign``."""
    used_mib: int = 0
    core_pct: int = 0

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes two sightings the same breach."""
        return (self.kind, self.uuid, self.pod_uid, self.container)

    @property
    def text(self) -> str:
        """The sentence for people."""
        names = ", ".join(
            f"{one.pid} ({one.command or '?'}) {one.used_mib} MiB" for one in self.processes
        )
        if self.holder is None:
            return f"uses device {self.uuid} without an allocation: process {names}"
        if self.kind == "memory":
            what = f"{self.used_mib} MiB of {self.holder.limit_mib} MiB"
        else:
            what = f"{self.core_pct} % of {self.holder.core_pct} % compute"
        return f"container {self.container} uses {what} on device {self.uuid}: process {names}"


class Outcome(Struct, frozen=True, kw_only=True):
    """What one look showed."""

    tell: tuple[Breach, ...] = ()
    """To be told now: new, or going on for long."""
    new: tuple[Breach, ...] = ()
    """Those of ``tell`` that were not there before."""
    going: tuple[Breach, ...] = ()
    """All that stand."""
    ended: tuple[Breach, ...] = ()


class _Standing(Struct, kw_only=True):
    breach: Breach
    shown_at: list[int] = field(default_factory=list)
    """Numbers of the looks at the device that showed it, oldest first."""
    is_shown: bool = True
    told_s: float | None = None


def pause_s(look_s: float, chance: float) -> float:
    """Return the seconds until the next look: half to all of ``look_s``, by ``chance`` in 0..1."""
    return look_s * (0.5 + chance / 2)


class BreachBook:
    """Remembers from look to look."""

    def __init__(self, rules: BreachRules, *, is_core_forced: bool = False) -> None:
        """``is_core_forced``: compute limits hold for lone tenants, too."""
        self._rules = rules
        self._is_core_forced = is_core_forced
        self._standing: dict[tuple[str, str, str, str], _Standing] = {}
        self._looks_by_uuid: dict[str, int] = {}
        self._allowed_mib: dict[tuple[str, str, str], int] = {}
        self._core: dict[tuple[str, str, str], list[int]] = {}

    def look(
        self,
        holders: Collection[Holder],
        processes_by_uuid: Mapping[str, Sequence[Process]],
        *,
        now_s: float,
    ) -> Outcome:
        """Judge one look at the devices named in ``processes_by_uuid``; others keep what stood."""
        shown: dict[tuple[str, str, str, str], Breach] = {}
        self._forget(holders)
        for uuid, processes in processes_by_uuid.items():
            here = [holder for holder in holders if holder.uuid == uuid]
            for breach in self._judge(uuid, here, processes):
                shown[breach.key] = breach
        live = {_share_key(holder) for holder in holders}
        return self._stand(shown, frozenset(processes_by_uuid), live, now_s)

    def _forget(self, holders: Collection[Holder]) -> None:
        live = {_share_key(holder) for holder in holders}
        for book in (self._allowed_mib, self._core):
            for key in [key for key in book if key not in live]:
                del book[key]

    def _judge(
        self, uuid: str, holders: Sequence[Holder], processes: Sequence[Process]
    ) -> list[Breach]:
        found: list[Breach] = []
        by_owner: dict[tuple[str, str], list[Process]] = {}
        for process in processes:
            holder = _holder_of(process, holders)
            if holder is not None:
                by_owner.setdefault((holder.pod_uid, holder.container), []).append(process)
            elif not self._is_tolerated(process, holders):
                by_owner.setdefault((process.pod_uid, process.container), []).append(process)
        busy = {owner for owner, own in by_owner.items() if any(one.core_pct for one in own)}
        for holder in holders:
            owner = (holder.pod_uid, holder.container)
            own = tuple(by_owner.pop(owner, ()))
            if holder.is_whole:
                continue
            found += self._memory(holder, own)
            found += self._compute(holder, own, is_wanted=bool(busy - {owner}))
        found.extend(
            Breach(
                kind="foreign",
                uuid=uuid,
                pod_uid=pod_uid,
                container=container,
                processes=tuple(own),
                used_mib=sum(one.used_mib for one in own),
                core_pct=sum(one.core_pct for one in own),
            )
            for (pod_uid, container), own in by_owner.items()
        )
        return found

    def _is_tolerated(self, process: Process, holders: Sequence[Holder]) -> bool:
        if not process.pod_uid:
            return process.command in self._rules.host_commands
        # Its container is not known yet, and the pod has shares here: the next look will tell.
        return not process.container and any(one.pod_uid == process.pod_uid for one in holders)

    def _memory(self, holder: Holder, processes: tuple[Process, ...]) -> list[Breach]:
        key = _share_key(holder)
        used_mib = sum(one.used_mib for one in processes)
        allowed_mib = max(
            holder.limit_mib, min(self._allowed_mib.get(key, holder.limit_mib), used_mib)
        )
        self._allowed_mib[key] = allowed_mib
        if used_mib <= allowed_mib + self._rules.memory_margin_mib:
            return []
        return [_breach("memory", holder, processes)]

    def _compute(
        self, holder: Holder, processes: tuple[Process, ...], *, is_wanted: bool
    ) -> list[Breach]:
        samples = self._core.setdefault(_share_key(holder), [])
        if not 0 < holder.core_pct < _FULL_PCT or not (is_wanted or self._is_core_forced):
            samples.clear()
            return []
        samples.append(sum(one.core_pct for one in processes))
        del samples[: -self._rules.core_looks]
        mean_pct = sum(samples) / len(samples)
        if len(samples) < self._rules.core_looks:
            return []
        if mean_pct <= holder.core_pct + self._rules.core_margin_pct:
            return []
        return [replace(_breach("compute", holder, processes), core_pct=round(mean_pct))]

    def _stand(
        self,
        shown: Mapping[tuple[str, str, str, str], Breach],
        looked_at: Collection[str],
        live: Collection[tuple[str, str, str]],
        now_s: float,
    ) -> Outcome:
        tell: list[Breach] = []
        new: list[Breach] = []
        ended: list[Breach] = []
        for uuid in looked_at:
            self._looks_by_uuid[uuid] = self._looks_by_uuid.get(uuid, 0) + 1
        for key, known in list(self._standing.items()):
            if known.breach.uuid not in looked_at:
                continue
            self._forget_old_looks(known)
            if key in shown:
                continue
            if known.is_shown and known.told_s is not None:
                ended.append(known.breach)
            known.is_shown = False
            if not known.shown_at or known.breach.kind == "compute" or not _is_live(known, live):
                del self._standing[key]
        for key, breach in shown.items():
            standing = self._standing.setdefault(key, _Standing(breach=breach))
            standing.breach, standing.is_shown = breach, True
            standing.shown_at.append(self._looks_by_uuid[breach.uuid])
            if len(standing.shown_at) < self._rules.looks:
                continue
            if standing.told_s is None:
                new.append(breach)
            elif now_s - standing.told_s < self._rules.repeat_s:
                continue
            tell.append(breach)
            standing.told_s = now_s
        going = tuple(
            one.breach for one in self._standing.values() if one.is_shown and one.told_s is not None
        )
        return Outcome(tell=tuple(tell), new=tuple(new), going=going, ended=tuple(ended))

    def _forget_old_looks(self, known: _Standing) -> None:
        window = max(self._rules.window_looks, self._rules.looks)
        oldest = self._looks_by_uuid[known.breach.uuid] - window
        known.shown_at = [number for number in known.shown_at if number > oldest]


def _is_live(known: _Standing, live: Collection[tuple[str, str, str]]) -> bool:
    """Whether the share is there still; a process without one keeps its readings."""
    return known.breach.holder is None or _share_key(known.breach.holder) in live


def _share_key(holder: Holder) -> tuple[str, str, str]:
    return (holder.pod_uid, holder.container, holder.uuid)


def _holder_of(process: Process, holders: Sequence[Holder]) -> Holder | None:
    """The container that answers for a process."""
    of_pod = [one for one in holders if process.pod_uid and one.pod_uid == process.pod_uid]
    for holder in of_pod:
        if holder.container == process.container:
            return holder
    return of_pod[0] if len(of_pod) == 1 and not process.container else None


def _breach(kind: BreachKind, holder: Holder, processes: tuple[Process, ...]) -> Breach:
    return Breach(
        kind=kind,
        uuid=holder.uuid,
        pod_uid=holder.pod_uid,
        container=holder.container,
        holder=holder,
        processes=processes,
        used_mib=sum(one.used_mib for one in processes),
        core_pct=sum(one.core_pct for one in processes),
    )
