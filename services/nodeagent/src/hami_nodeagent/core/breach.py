# SPDX-License-Identifier: Apache-2.0
"""Compares the usage that the driver reports per process with the container's shares (design D27).

A tenant cannot change the driver's figures, so this check also detects containers that the
in-container library does not limit. Kinds of breach::

  memory    the processes of a container use more of a device than its share and a margin
  compute   their part of the device's time stays above the share and a margin, while another
            container uses the device too, or the limit also applies to lone tenants
  foreign   a process uses a device that was not granted to its container

A breach of memory or foreign use counts once ``looks`` of the last ``window_looks`` samples of the
device show it. A container that is just ending or a stale sample therefore causes no breach, and
bursts that end before the next sample are detected. Compute is already a mean over samples: it
counts after ``looks`` samples in a row. Each breach ends with the first sample that does not show
it; if it returns within the window, it is the same breach. ``pause_s`` randomizes the sample
interval, so that no periodic use falls between the samples. A share that was lowered below its
current use is no breach while the use does not grow: the library refuses further allocations but
cannot reclaim memory in use. For the same reason a container with a memory limit above its request
is compared with that limit, not with its present bound. Whole devices are not compared. Memory in
MiB, compute in percent of one device, times in seconds of the caller's clock.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from hami_common.events.breach import BreachKind
from hami_nodeagent.core.holders import Holder

_FULL_PCT = 100


class BreachRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thresholds above which a difference is a breach."""

    looks: int = 2
    """Samples that must show a breach: of the last ``window_looks``, for compute in a row."""
    window_looks: int = 20
    """Samples over which bursts of memory and foreign use are counted; at least ``looks``."""
    memory_margin_mib: int = 512
    """Memory that a container may use beyond its share, for what the driver takes by itself: local
    memory of kernels (264 MiB for each KiB of stack on a device with 132 multiprocessors), lazily
    loaded code, rounding. The library charges it within seconds, so that it ends further use."""
    memory_margin_pct: int = 5
    """The same in percent of the share; the larger of the two applies."""
    core_margin_pct: int = 20
    """The same for compute, because the driver's samples are coarse."""
    core_looks: int = 3
    """Samples over which compute is averaged."""
    repeat_s: float = 300.0
    """Interval at which an ongoing breach is reported again."""
    host_commands: tuple[str, ...] = (
        "nvidia-persiste",
        "nv-hostengine",
        "nvidia-smi",
        "dcgm-exporter",
        "nvidia-cuda-mps",
    )
    """Processes of the host, by the 15 characters the kernel keeps, that may use any device.
    Processes in pods never match these names."""

    def margin_mib(self, limit_mib: int) -> int:
        """Return the memory that a container with this share may use beyond it."""
        return max(self.memory_margin_mib, limit_mib * self.memory_margin_pct // _FULL_PCT)


class Process(Struct, frozen=True, kw_only=True):
    """A process on a device, with its owner."""

    pid: int
    command: str = ""
    """Name that the process chose itself; printable."""
    pod_uid: str = ""
    """Empty for a process of the host."""
    container: str = ""
    """Empty while the process's container within the pod is unknown."""
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
    """Holder of the exceeded share; ``None`` for ``foreign``."""
    used_mib: int = 0
    core_pct: int = 0

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return the identity of the breach, equal in all samples that show it."""
        return (self.kind, self.uuid, self.pod_uid, self.container)

    @property
    def text(self) -> str:
        """Return the sentence for operators."""
        names = ", ".join(
            f"{one.pid} ({one.command or '?'}) {one.used_mib} MiB" for one in self.processes
        )
        if self.holder is None:
            return f"uses device {self.uuid} without an allocation: process {names}"
        if self.kind == "memory":
            what = f"{self.used_mib} MiB of {self.holder.most_mib} MiB"
        else:
            what = f"{self.core_pct} % of {self.holder.core_pct} % compute"
        return f"container {self.container} uses {what} on device {self.uuid}: process {names}"


class Outcome(Struct, frozen=True, kw_only=True):
    """Result of one sample."""

    tell: tuple[Breach, ...] = ()
    """Breaches to report now: new, or due for a repeated report."""
    new: tuple[Breach, ...] = ()
    """Breaches of ``tell`` that the previous samples did not show."""
    going: tuple[Breach, ...] = ()
    """All ongoing breaches."""
    ended: tuple[Breach, ...] = ()


class _Standing(Struct, kw_only=True):
    breach: Breach
    shown_at: list[int] = field(default_factory=list)
    """Numbers of the samples of the device that showed the breach, oldest first."""
    is_shown: bool = True
    told_s: float | None = None


def pause_s(look_s: float, chance: float) -> float:
    """Return seconds until the next sample: half to all of ``look_s``, by ``chance`` in 0..1."""
    return look_s * (0.5 + chance / 2)


class BreachBook:
    """Evidence of breaches, kept from sample to sample."""

    def __init__(self, rules: BreachRules, *, is_core_forced: bool = False) -> None:
        """Create an empty book; ``is_core_forced``: compute limits also apply to lone tenants."""
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
        """Evaluate a sample of the devices in ``processes_by_uuid``; others keep their breaches."""
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
            holder = holder_of(process, holders)
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
        return has_pending_owner(process, holders)

    def _memory(self, holder: Holder, processes: tuple[Process, ...]) -> list[Breach]:
        key = _share_key(holder)
        used_mib = sum(one.used_mib for one in processes)
        most_mib = holder.most_mib
        allowed_mib = max(most_mib, min(self._allowed_mib.get(key, most_mib), used_mib))
        self._allowed_mib[key] = allowed_mib
        if used_mib <= allowed_mib + self._rules.margin_mib(most_mib):
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
    """Return whether the share still exists; a process without a share keeps its samples."""
    return known.breach.holder is None or _share_key(known.breach.holder) in live


def _share_key(holder: Holder) -> tuple[str, str, str]:
    return (holder.pod_uid, holder.container, holder.uuid)


def has_pending_owner(process: Process, holders: Sequence[Holder]) -> bool:
    """Return whether the container is not known yet, and the pod has shares of the device."""
    return (
        bool(process.pod_uid)
        and not process.container
        and any(one.pod_uid == process.pod_uid for one in holders)
    )


def holder_of(process: Process, holders: Sequence[Holder]) -> Holder | None:
    """Return the share of the container that the process belongs to."""
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
