# SPDX-License-Identifier: Apache-2.0
"""Reads the state of a device that the Neuron kernel driver shows only in sysfs.

Files below ``devices/virtual/neuron_device/neuron<N>`` follow the driver's source of 2025 (2.22)
and its user guide. A missing or unparsable file means "not reported": drivers before 2.14 have no
error counters, and from 2.31 on several files are elsewhere. Reading ``reset`` returns the state of
the device; nothing is written. Error counters start when the driver is loaded. Sizes in MiB.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from hami_common.bounds import INT64_MAX
from hami_common.units import INT32_MAX, whole
from hami_nodeagent.drivers.parse.seen import Condition
from hami_nodeagent.drivers.reader import read_text

_HOME = "devices/virtual/neuron_device"
_MEMORY = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")
_CORE_ERRORS = ("hw_nc_ue_error", "hw_hbm_ue_error")
_REPAIRABLE = "mem_ecc_repairable_uncorrected"
_RESETTING, _READY, _INVALID = 0, 1, 2


class Tree(Struct, frozen=True, kw_only=True):
    """State of one device; ``None`` and empty text: not reported."""

    kind: str = ""
    """Product, in small letters."""
    attributes: dict[str, str] = {}
    state: int | None = None
    memory_errors: int | None = None
    """Uncorrectable, of the memory and of SRAM."""
    core_errors: int | None = None
    """Uncorrectable, as programs on the cores met them."""
    used_mib: int | None = None
    """Memory that the runtime uses on all cores, in MiB."""


def read(sysfs_root: str, number: int) -> Tree:
    """The files of device ``number``."""
    home = Path(sysfs_root) / _HOME / f"neuron{number}"
    kind = read_text(home / "info/architecture/device_name").strip().lower()
    serial = read_text(home / "info/serial_number").strip().lower()
    hardware = home / "stats/hardware"
    cores = _cores(home)
    used = _sum(core / "stats/memory_usage/device_mem/total" for core in cores)
    state = _number(home / "reset")
    repairable = _number(hardware / _REPAIRABLE)
    attributes = {
        "serial": serial if re.fullmatch(r"[0-9a-f]{4,32}", serial) else "",
        "repairable_errors": str(repairable) if repairable else "",
    }
    return Tree(
        kind=kind if kind.isascii() and kind.isalnum() else "",
        attributes={key: value for key, value in attributes.items() if value},
        state=state if state in (_RESETTING, _READY, _INVALID) else None,
        memory_errors=_sum(hardware / name for name in _MEMORY),
        core_errors=_sum(
            core / f"stats/status/{name}/total" for core in cores for name in _CORE_ERRORS
        ),
        used_mib=None if used is None or used >> 20 > INT32_MAX else used >> 20,
    )


def condition_of(tree: Tree, reported: int) -> tuple[Condition, str]:
    """Return the device's condition; ``reported``: memory errors counted by neuron-monitor."""
    memory = max(reported, tree.memory_errors or 0)
    if memory:
        return Condition.BAD, f"{memory} uncorrectable memory errors"
    if tree.core_errors:
        return Condition.BAD, f"{tree.core_errors} uncorrectable errors of its cores"
    if tree.state == _INVALID:
        return Condition.BAD, "the driver could not reset the device"
    if tree.state == _RESETTING:
        return Condition.DOUBTFUL, "the driver resets the device"
    return Condition.GOOD, ""


def _cores(home: Path) -> list[Path]:
    try:
        return [one for one in home.iterdir() if re.fullmatch(r"neuron_core\d{1,3}", one.name)]
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return whole(text, most=INT64_MAX)


def _sum(paths: Iterable[Path]) -> int | None:
    """Return the sum of the numbers that are reported; ``None`` if there are none."""
    found = [number for path in paths if (number := _number(path)) is not None]
    return sum(found) if found else None
