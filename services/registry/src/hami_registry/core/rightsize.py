# SPDX-License-Identifier: Apache-2.0
"""Recommends memory and compute for a container from its use.

The recommendation is the peak of memory and the 95th percentile of compute, plus ``MARGIN_PCT``,
rounded up to an amount that the vendor's resources can express, or to the smallest hardware
partition that has both, and at most what the device has. Compute that waited for its own limit is
not reduced: its use is bounded by the limit. Memory in MiB, compute in percent of one device.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from hami_common.model.device import Device
from hami_common.vendors.protocol import ResourceNames

MARGIN_PCT: Final = 15
"""Reserve above the use."""
LEAST_S: Final = 3600.0
"""Time of samples without which nothing is recommended."""
_FULL_PCT: Final = 100


class Use(Struct, frozen=True, kw_only=True):
    """Use of one container of each of its devices of one vendor, the largest of them."""

    peak_mib: int
    p95_core_pct: int
    limit_mib: int
    limit_core_pct: int
    """0: no compute limit."""
    is_throttled: bool
    """Launches waited for the container's own limit."""
    sampled_s: float
    """Time that the samples cover."""


class RightSize(Struct, frozen=True, kw_only=True):
    """Recommended request of a container for each of its devices."""

    memory_mib: int
    core_pct: int
    profile: str
    """Hardware partition; empty: the share has any size."""
    margin_pct: int
    hours: float
    """Hours of samples on which it is based."""


def percentile(values: Sequence[int], part: float) -> int:
    """Return the value below which ``part`` of the values are (nearest rank); 0 without values."""
    if not values:
        return 0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def recommend(use: Use, device: Device, names: ResourceNames) -> RightSize | None:
    """Return the recommendation; ``None`` with less than ``LEAST_S`` of samples."""
    if use.sampled_s < LEAST_S:
        return None
    memory_mib = max(1, _plus_margin(use.peak_mib))
    core_pct = min(_FULL_PCT, max(1, _plus_margin(use.p95_core_pct)))
    if use.is_throttled:
        core_pct = max(core_pct, use.limit_core_pct)
    if not use.limit_core_pct and not use.p95_core_pct:
        core_pct = 0
    memory_mib = min(memory_mib, device.memory_mib)
    profile = ""
    if device.partitions:
        fitting = [
            one
            for one in device.partitions
            if one.memory_mib >= memory_mib and one.core_pct >= core_pct and not one.by_name_only
        ]
        if fitting:
            best = min(fitting, key=lambda one: (one.memory_mib, one.core_pct, one.name))
            profile, memory_mib, core_pct = best.name, best.memory_mib, best.core_pct
    return RightSize(
        memory_mib=_in_units(memory_mib, device.memory_mib, names.memory_unit_mib),
        core_pct=-(-core_pct * names.core_units // _FULL_PCT) * _FULL_PCT // names.core_units,
        profile=profile,
        margin_pct=MARGIN_PCT,
        hours=round(use.sampled_s / 3600, 1),
    )


def _plus_margin(amount: int) -> int:
    return -(-amount * (100 + MARGIN_PCT) // 100)


def _in_units(memory_mib: int, of_mib: int, unit_mib: int) -> int:
    """Return the memory rounded up to whole units, at most the device; unit 0: percents of it."""
    if unit_mib == 0:
        percent = min(_FULL_PCT, -(-memory_mib * _FULL_PCT // max(1, of_mib)))
        return of_mib * percent // _FULL_PCT
    rounded = -(-memory_mib // unit_mib) * unit_mib
    return rounded if rounded <= of_mib else max(unit_mib, of_mib // unit_mib * unit_mib)


def names_for(families: Iterable[ResourceNames], advertised: Iterable[str]) -> ResourceNames | None:
    """Return the resources under which a device is given; ``None`` if there are none."""
    counts = frozenset(advertised)
    return next((one for one in families if one.count in counts), None)
