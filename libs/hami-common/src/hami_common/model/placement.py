# SPDX-License-Identifier: Apache-2.0
"""Placement of a pod.

Shares of concrete devices, by container name, and how much of each device they book.

Booking rule (Kubernetes semantics of init containers and sidecars, KEP-753): init containers run
one at a time and before the application containers, sidecars start in order among them and stay. So
a device is booked for ``max(over init containers i: init_i + sidecars before i, all sidecars + all
application containers)``, separately for memory, compute and slots. A hardware partition exists for
the pod's whole life, so one that an init container uses counts as a sidecar's.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import add
from typing import Annotated, Final

from msgspec import Meta, Struct

from hami_common.bounds import (
    CONTAINERS_MOST,
    SHARES_MOST,
    CorePct,
    DeviceId,
    GridPosition,
    Label,
    MemoryMib,
    Name,
    TaskPriority,
    Vendor,
    Word,
)
from hami_common.model.request import ContainerKind


def part_word(profile: str, start: int | None) -> str:
    """A partition as one word, see ``Share.part``."""
    return profile if start is None else f"{profile}@{start}"


class Share(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory and compute given to one container on one device."""

    vendor: Vendor
    uuid: DeviceId
    memory_mib: MemoryMib
    core_pct: CorePct = 0
    """0: no compute limit."""
    memory_limit_mib: MemoryMib = 0
    """Most memory while the device has memory that no share books; 0: ``memory_mib``."""
    core_limit_pct: CorePct = 0
    """Most compute while no other container computes on the device; 0: as configured."""
    exclusive: bool = False
    profile: Word = ""
    """Hardware partition that carries the share, by its name in ``Device.partitions``.

    Empty: none, the share is soft or the whole device. Memory and compute are then the profile's.
    """
    start: GridPosition | None = None
    """The partition's first position on the device's grid, where positions matter."""
    kind: Word = ""
    """Shares of one device all have the same kind, such as a QoS class; empty: any.

    ``JOINS`` lists exceptions.
    """

    mode: Word = ""
    """Mode of the device, one of ``hami_common.model.request.NAMED_MODES``; empty: any other. The
    in-container library limits no compute in such a mode.
    """

    @property
    def part(self) -> str:
        """The partition as one word: ``<profile>`` or ``<profile>@<start>``; empty when none."""
        return part_word(self.profile, self.start)


class ContainerShares(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All shares of one container, in the order in which the container sees the devices."""

    name: Label
    kind: ContainerKind
    shares: Annotated[tuple[Share, ...], Meta(max_length=SHARES_MOST)]
    priority: TaskPriority | None = None


class Placement(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pod's shares on one node, containers in kubelet's admission order."""

    node: Name
    containers: Annotated[tuple[ContainerShares, ...], Meta(max_length=CONTAINERS_MOST)]


class Booked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Peak of one device's resources that a pod (or a sum of pods) books."""

    memory_mib: int = 0
    core_pct: int = 0
    slots: int = 0
    exclusive: bool = False
    kind: str = ""
    parts: dict[str, int] = {}
    """Hardware partitions, by ``Share.part``: how many of each."""

    def plus(self, other: "Booked") -> "Booked":
        """Sum of two bookings at the same time."""
        return Booked(
            memory_mib=self.memory_mib + other.memory_mib,
            core_pct=self.core_pct + other.core_pct,
            slots=self.slots + other.slots,
            exclusive=self.exclusive or other.exclusive,
            kind=kind_of_all((self.kind, other.kind)),
            parts=_of_both(self.parts, other.parts, add),
        )

    def peak(self, other: "Booked") -> "Booked":
        """Maximum of two bookings that never coincide."""
        return Booked(
            memory_mib=max(self.memory_mib, other.memory_mib),
            core_pct=max(self.core_pct, other.core_pct),
            slots=max(self.slots, other.slots),
            exclusive=self.exclusive or other.exclusive,
            kind=kind_of_all((self.kind, other.kind)),
            parts=_of_both(self.parts, other.parts, max),
        )


NOTHING = Booked()
MIXED = "*"
"""The kind of shares that differ in it: no further share may join them."""
JOINS: Final[Mapping[str, str]] = {"online": "offline"}
"""By kind: the other kind whose shares it may join. Shares of that kind may not join it."""


def kind_of_all(kinds: Iterable[str]) -> str:
    """Return the kind that decides which shares may join these: empty without one."""
    found = {kind for kind in kinds if kind}
    if len(found) <= 1:
        return next(iter(found), "")
    return next((kind for kind in found if found == {kind, JOINS.get(kind)}), MIXED)


def may_join(kind: str, others: str) -> bool:
    """True when a share of ``kind`` may join shares whose ``kind_of_all`` is ``others``."""
    return others in ("", kind) or others == JOINS.get(kind)


def _of_both(
    a: dict[str, int], b: dict[str, int], join: Callable[[int, int], int]
) -> dict[str, int]:
    if not a or not b:
        return a or b
    return {part: join(a.get(part, 0), b.get(part, 0)) for part in {**a, **b}}


def stays(kind: ContainerKind, share: Share) -> bool:
    """True when the share stays booked for containers that start later."""
    return kind != "init" or bool(share.profile)


def booked_by_device(containers: Iterable[ContainerShares]) -> dict[str, Booked]:
    """Resources that the containers of ONE pod book on each device, by UUID.

    After the rule in this module's docstring.
    """
    running: dict[str, Booked] = {}
    peak: dict[str, Booked] = {}
    for container in containers:
        own: dict[str, Booked] = {}
        kept: dict[str, Booked] = {}
        for share in container.shares:
            booked = Booked(
                memory_mib=share.memory_mib,
                core_pct=share.core_pct,
                slots=1,
                exclusive=share.exclusive,
                kind=share.kind,
                parts={share.part: 1} if share.profile else {},
            )
            own[share.uuid] = own[share.uuid].plus(booked) if share.uuid in own else booked
            if share.profile and container.kind == "init":
                before = kept.get(share.uuid)
                kept[share.uuid] = booked if before is None else before.plus(booked)
        for uuid, booked in own.items():
            with_running = running[uuid].plus(booked) if uuid in running else booked
            peak[uuid] = peak[uuid].peak(with_running) if uuid in peak else with_running
            if container.kind != "init":
                running[uuid] = with_running
            elif uuid in kept:
                running[uuid] = running.get(uuid, NOTHING).plus(kept[uuid])
    return peak
