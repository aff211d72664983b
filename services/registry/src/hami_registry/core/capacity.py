# SPDX-License-Identifier: Apache-2.0
"""Measures what devices can still give, and which free memory no share can use, and why.

Per model: the largest share, how many shares of a size fit, free memory and the part of it that is
stranded, by cause and by the namespaces whose allocations cause it. A device counts with its first
cause in the order of ``CAUSES``; ``foreign`` and ``burst`` also count where they take only part of
the free memory. Selectors of pods, quotas and links between devices are not evaluated: the
scheduler decides about a concrete pod (``hamictl simulate``). Memory in MiB, compute in percent of
one device.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from hami_common.model.device import RECALL, Device, Profile
from hami_common.model.placement import Booked

CAUSES: Final = (
    "silent",
    "unhealthy",
    "cordoned",
    "exclusive",
    "slots",
    "compute",
    "mode",
    "foreign",
    "burst",
)
"""Causes of free memory that cannot be given: the agent is silent, the device is unhealthy or
cordoned, one share has it exclusively, its slots or its compute are used up, no hardware partition
of its mode fits, processes outside HAMi use the memory, or pods use it beyond their requests.
"""
TOP: Final = 5
"""Namespaces that are listed per model."""


class Offer(NamedTuple):
    """The largest share that a device can give."""

    memory_mib: int
    core_pct: int
    cause: str
    """One of ``CAUSES`` when it can give none although memory is free, else empty."""
    free_mib: int
    """Memory that is not booked."""


def burst_mib(device: Device) -> int:
    """Return the memory that pods use beyond their requests."""
    return sum(burst.memory_mib for burst in device.bursts)


def offer_of(device: Device, booked: Booked) -> Offer:
    """Return the largest share; whether the agent is silent is not considered."""
    free_mib = max(0, device.capacity_mib - booked.memory_mib)
    core_pct = max(0, device.capacity_core_pct - booked.core_pct)
    unused_mib = max(0, free_mib - device.foreign_mib)
    memory_mib, cause = max(0, unused_mib - burst_mib(device)), ""
    if device.largest_mib and device.overcommit == RECALL:
        memory_mib = min(memory_mib, max(0, device.largest_mib - device.foreign_mib))
    if not device.healthy:
        cause = "unhealthy"
    elif device.cordoned:
        cause = "cordoned"
    elif booked.exclusive:
        cause = "exclusive"
    elif booked.slots >= device.slots:
        cause = "slots"
    elif device.partitions:
        best = max(
            (one for one in device.partitions if _spot(device, booked.parts, one) is not None),
            key=lambda one: (one.memory_mib, one.core_pct),
            default=None,
        )
        if best is None:
            cause = "mode"
        elif best.memory_mib > memory_mib:
            cause = "foreign" if best.memory_mib > unused_mib else "burst"
        else:
            memory_mib, core_pct = best.memory_mib, best.core_pct
    elif not core_pct and device.capacity_core_pct:
        cause = "compute"
    elif not memory_mib and free_mib:
        cause = "burst" if unused_mib else "foreign"
    if cause or not memory_mib:
        memory_mib = core_pct = 0
    return Offer(memory_mib, core_pct, cause if free_mib else "", free_mib)


def _spot(device: Device, parts: Mapping[str, int], profile: Profile) -> str | None:
    """Return the first place at which an instance fits, as a part of ``Booked``; ``None``: none."""
    by_name = {one.name: one for one in device.partitions}
    taken: Counter[str] = Counter()
    for part, count in parts.items():
        name, _, at = part.partition("@")
        known = by_name.get(name)
        if known is None or (known.kind and profile.kind and known.kind != profile.kind):
            return None
        for resource, amount in known.need(int(at) if at else None).items():
            taken[resource] += amount * count
    if not profile.name:
        return "" if not parts else None
    limits = {f"limit {one.name}": one.limit for one in device.partitions if one.limit}
    totals = {**device.resources, **limits}
    starts: tuple[int | None, ...] = profile.starts or (None,)
    for start in starts:
        need = profile.need(start)
        if all(taken[name] + amount <= totals.get(name, 1) for name, amount in need.items()):
            return profile.name if start is None else f"{profile.name}@{start}"
    return None


def fitting(device: Device, booked: Booked, offer: Offer, *, memory_mib: int, core_pct: int) -> int:
    """Return how many shares of the size the device can still give; sizes of at least 1 MiB."""
    if offer.cause or memory_mib > offer.memory_mib or core_pct > offer.core_pct:
        return 0
    slots = device.slots - booked.slots
    if device.partitions:
        return min(slots, _partitions(device, booked, memory_mib, core_pct))
    unused_mib = offer.free_mib - device.foreign_mib - burst_mib(device)
    by_memory = max(0, unused_mib) // memory_mib
    # The first share without a compute limit needs some compute left, and takes none.
    by_core = (device.capacity_core_pct - booked.core_pct) // core_pct if core_pct else slots
    return min(slots, by_memory, by_core)


def _partitions(device: Device, booked: Booked, memory_mib: int, core_pct: int) -> int:
    wanted = sorted(
        (
            one
            for one in device.partitions
            if one.memory_mib >= memory_mib and one.core_pct >= core_pct and not one.by_name_only
        ),
        key=lambda one: (one.memory_mib, one.core_pct),
    )
    parts = dict(booked.parts)
    count = 0
    while count < device.slots:
        spot = next((s for p in wanted if (s := _spot(device, parts, p)) is not None), None)
        if spot is None:
            return count
        count += 1
        if not spot:
            return count
        parts[spot] = parts.get(spot, 0) + 1
    return count


class Share(NamedTuple):
    """Part of a device that one namespace holds."""

    namespace: str
    core_pct: int
    slots: int
    exclusive: bool


class Measured(NamedTuple):
    """One device as it is measured."""

    node: str
    is_silent: bool
    device: Device
    booked: Booked
    offer: Offer
    shares: Sequence[Share]


class Fit(Struct, frozen=True, kw_only=True):
    """Number of shares of one size that fit at the same time."""

    size: str
    """``1/4``, ``1/2`` or ``1`` of a device, or ``asked``."""
    memory_mib: int
    core_pct: int
    count: int


class Stranded(Struct, frozen=True, kw_only=True):
    """Free memory that no share can use, for one cause."""

    cause: str
    devices: int
    memory_mib: int


class ByNamespace(Struct, frozen=True, kw_only=True):
    """Free memory that no share can use because of the allocations of one namespace."""

    namespace: str
    """Empty: all other namespaces together."""
    memory_mib: int


class ModelCapacity(Struct, frozen=True, kw_only=True):
    """All devices of one model."""

    vendor: str
    model: str
    devices: int
    devices_offering: int
    """Devices that can give a share now."""
    capacity_mib: int
    free_mib: int
    """Memory that is not booked, stranded memory included."""
    foreign_mib: int
    """Memory in use that no allocation covers."""
    burst_mib: int
    """Memory that pods use beyond their requests."""
    largest_mib: int
    """Memory of the largest share that can still be given; 0: none."""
    largest_core_pct: int
    """Compute that this share can have."""
    largest_on: str
    """A node that can give it; empty: none."""
    fits: tuple[Fit, ...]
    stranded: tuple[Stranded, ...]
    """By cause, in the order of the causes; only causes that occur."""
    stranded_by: tuple[ByNamespace, ...]
    """Namespaces whose allocations use up compute or slots or are exclusive, largest first. Memory
    of a device is divided by what each has of the resource that is used up.
    """


class Capacity(Struct, frozen=True, kw_only=True):
    """Capacity that can still be given, by vendor and model."""

    items: tuple[ModelCapacity, ...]


def measure(
    devices: Iterable[Measured], *, asked: tuple[int, int] | None = None, namespace: str = ""
) -> Capacity:
    """Sum up by model.

    ``asked``: a size (MiB, percent) to count in addition. With ``namespace``, other namespaces are
    not named.
    """
    by_model: dict[tuple[str, str], list[Measured]] = {}
    for one in devices:
        by_model.setdefault((one.device.vendor, one.device.type), []).append(one)
    return Capacity(
        items=tuple(
            _model(vendor, model, several, asked, namespace)
            for (vendor, model), several in sorted(by_model.items())
        )
    )


def _lost(one: Measured) -> Iterator[tuple[str, int]]:
    """Yield the causes for which free memory of a device cannot be given, with that memory."""
    cause = "silent" if one.is_silent and one.offer.free_mib else one.offer.cause
    if cause:
        yield cause, one.offer.free_mib
        return
    foreign_mib = min(one.offer.free_mib, one.device.foreign_mib)
    bursts_mib = min(one.offer.free_mib - foreign_mib, burst_mib(one.device))
    yield from ((c, mib) for c, mib in (("foreign", foreign_mib), ("burst", bursts_mib)) if mib)


def _model(
    vendor: str,
    model: str,
    devices: Sequence[Measured],
    asked: tuple[int, int] | None,
    namespace: str,
) -> ModelCapacity:
    offering = [one for one in devices if not one.is_silent and one.offer.memory_mib]
    largest = max(
        offering, key=lambda one: (one.offer.memory_mib, one.offer.core_pct), default=None
    )
    whole_mib = max(one.device.memory_mib for one in devices)
    sizes = [("1/4", whole_mib // 4, 25), ("1/2", whole_mib // 2, 50), ("1", whole_mib, 100)]
    if asked is not None:
        sizes.append(("asked", *asked))
    stranded: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    holders: Counter[str] = Counter()
    for one in devices:
        for cause, lost_mib in _lost(one):
            counts[cause] += 1
            stranded[cause] += lost_mib
            holders.update(_by_holder(one.shares, cause, lost_mib))
    return ModelCapacity(
        vendor=vendor,
        model=model,
        devices=len(devices),
        devices_offering=len(offering),
        capacity_mib=sum(one.device.capacity_mib for one in devices),
        free_mib=sum(one.offer.free_mib for one in devices),
        foreign_mib=sum(one.device.foreign_mib for one in devices),
        burst_mib=sum(burst_mib(one.device) for one in devices),
        largest_mib=largest.offer.memory_mib if largest else 0,
        largest_core_pct=largest.offer.core_pct if largest else 0,
        largest_on=largest.node if largest else "",
        fits=tuple(
            Fit(
                size=size,
                memory_mib=mib,
                core_pct=pct,
                count=sum(
                    fitting(one.device, one.booked, one.offer, memory_mib=mib, core_pct=pct)
                    for one in offering
                ),
            )
            for size, mib, pct in sizes
            if mib
        ),
        stranded=tuple(
            Stranded(cause=cause, devices=counts[cause], memory_mib=stranded[cause])
            for cause in CAUSES
            if cause in stranded
        ),
        stranded_by=_ranked(holders, namespace),
    )


def _by_holder(shares: Sequence[Share], cause: str, lost_mib: int) -> dict[str, int]:
    """Divide stranded memory among the namespaces that cause it; the sum is exact."""
    weights: Counter[str] = Counter()
    for share in shares:
        weights[share.namespace] += {
            "exclusive": int(share.exclusive),
            "slots": share.slots,
            "compute": share.core_pct,
        }.get(cause, 0)
    total = weights.total()
    if not total:
        return {}
    parts = {name: lost_mib * weight // total for name, weight in weights.items()}
    most = max(sorted(weights), key=weights.__getitem__)
    parts[most] += lost_mib - sum(parts.values())
    return parts


def _ranked(holders: Mapping[str, int], namespace: str) -> tuple[ByNamespace, ...]:
    """Return the largest, then the rest; only ``namespace`` is named if there is one."""
    ranked = sorted(holders.items(), key=lambda pair: (-pair[1], pair[0]))
    named = [(name, mib) for name, mib in ranked if namespace in ("", name)][:TOP]
    rest = sum(holders.values()) - sum(mib for _, mib in named)
    rows = [ByNamespace(namespace=name, memory_mib=mib) for name, mib in named if mib]
    return (*rows, ByNamespace(namespace="", memory_mib=rest)) if rest else tuple(rows)
