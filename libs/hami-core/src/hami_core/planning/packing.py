# SPDX-License-Identifier: Apache-2.0
"""Measures how well bookings are packed onto devices, over all columns of a table at once.

Usable devices are those that are registered, healthy and not cordoned. Memory in MiB, compute in
percent of one device, shares of a whole as fractions 0..1.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from hami_common.model.request import PodRequest
from hami_core.table.block import Block, Bools
from hami_core.table.table import DeviceTable


class Packing(Struct, frozen=True, kw_only=True):
    """Utilization of the devices."""

    devices: int
    devices_used: int
    capacity_mib: int
    booked_mib: int
    used_devices_full: float
    """Booked memory as a fraction of the capacity of the devices in use."""
    stranded: float
    """Fraction of the free memory that the measured pods cannot use, mean over their requests.

    It lies on devices whose free memory, compute or slots are too little for one more of them (the
    measure of fragmentation of Weng et al., USENIX ATC 2023, for memory and one device).
    """


class Ask(NamedTuple):
    """Amounts that one request takes of one device."""

    vendor: str
    memory_mib: int
    memory_pct: int
    """Percent of the device's physical memory; counts where ``memory_mib`` is 0."""
    core_pct: int
    exclusive: bool


Asks = Mapping[Ask, int]
"""Requests and how often each occurs."""


class Fill(NamedTuple):
    """Sums over the usable devices."""

    devices: int
    devices_used: int
    capacity_mib: int
    booked_mib: int
    used_capacity_mib: int
    """Capacity of the devices in use."""

    @property
    def used_devices_full(self) -> float:
        """Booked memory as a fraction of the capacity of the devices in use; 0 if there is none."""
        return self.booked_mib / self.used_capacity_mib if self.used_capacity_mib else 0.0


def asks_of(requests: Iterable[PodRequest]) -> Counter[Ask]:
    """Return what the requests take of a device."""
    return Counter(
        Ask(one.vendor, one.memory_mib, one.memory_pct, one.core_pct, one.exclusive)
        for request in requests
        for container in request.containers
        for one in container.requests
    )


def packing(table: DeviceTable, measured: Asks) -> Packing:
    """Measure the utilization of all usable devices with these requests."""
    full = fill(table)
    return Packing(
        devices=full.devices,
        devices_used=full.devices_used,
        capacity_mib=full.capacity_mib,
        booked_mib=full.booked_mib,
        used_devices_full=round(full.used_devices_full, 4),
        stranded=round(stranded(table, measured), 4),
    )


def fill(table: DeviceTable) -> Fill:
    """Sum capacity and bookings of all usable devices."""
    sums = [0] * len(Fill._fields)
    for block in table.blocks:
        n = block.count
        usable = _usable(block)
        used = usable & (block.used_slots[:, :n] > 0)
        capacity = block.capacity_mib[:, :n]
        for at, value in enumerate(
            (
                usable.sum(),
                used.sum(),
                capacity.sum(where=usable),
                block.used_mib[:, :n].sum(where=usable),
                capacity.sum(where=used),
            )
        ):
            sums[at] += int(value)
    return Fill(*sums)


def used_by_model(table: DeviceTable) -> dict[str, int]:
    """Count the usable devices with any share, by model."""
    found: Counter[str] = Counter()
    for block in table.blocks:
        n = block.count
        used = _usable(block) & (block.used_slots[:, :n] > 0)
        numbers, counts = np.unique(block.type[:, :n][used], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            found[table.types.words[number]] += count
    return found


def stranded(table: DeviceTable, measured: Asks) -> float:
    """Return the fraction of the free memory that the requests cannot use, see ``Packing``."""
    free = lost = 0
    for block in table.blocks:
        n = block.count
        usable = _usable(block)
        left = block.free_mib[:, :n].clip(0)
        free += int(left.sum(where=usable))
        is_open = usable & block.has_slot[:, :n] & block.unheld[:, :n]
        for ask, times in measured.items():
            vendor = table.vendors.find(ask.vendor)
            wanted = ask.memory_mib or block.memory_mib[:, :n] * ask.memory_pct // 100
            fits = is_open & (wanted <= left) & (ask.core_pct <= block.free_core[:, :n])
            fits &= block.vendor[:, :n] == (-1 if vendor is None else vendor)
            if ask.exclusive:
                fits &= block.idle[:, :n]
            lost += times * int(left.sum(where=usable & ~fits))
    total = sum(measured.values())
    return lost / (total * free) if total and free else 0.0


def _usable(block: Block) -> Bools:
    n = block.count

    def make() -> Bools:
        return block.known[:, :n] & block.healthy[:, :n] & ~block.cordoned[:, :n]

    return block.derived("usable for packing", make)
