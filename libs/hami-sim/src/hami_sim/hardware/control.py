# SPDX-License-Identifier: Apache-2.0
"""Writes the control file of the agent's simulated driver: what befalls the devices of a profile.

The format is ``Control`` in hami_nodeagent/drivers/simulated/driver.py, met as JSON only. Each
change writes a whole file and renames it into place. Devices are named by index. Memory in MiB,
compute in percent.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hami_sim.hardware.fake_nvml import Process

_NEWEST_FAULTS = 200


class SimulatedControl:
    """One control file. Each method writes it before it returns."""

    def __init__(self, path: Path) -> None:
        """Start with devices that work; the directory must exist."""
        self.path = path
        self._driver_missing = ""
        self._device_by_index: dict[int, dict[str, Any]] = {}
        self._faults: list[dict[str, int]] = []
        self._seq = 0
        self._write()

    def set_used_mib(self, index: int, used_mib: int) -> None:
        """Memory in use on the device, not counting its processes."""
        self._change(index, used_mib=used_mib)

    def set_load(self, index: int, core_pct: int) -> None:
        """Utilisation of the device."""
        self._change(index, core_pct=core_pct)

    def set_processes(self, index: int, processes: Sequence[Process]) -> None:
        """All processes on the device."""
        self._change(
            index,
            processes=[
                {"pid": p.pid, "used_mib": p.used_mib, "core_pct": p.sm_pct} for p in processes
            ],
        )

    def lose(self, index: int, reason: str = "the device fell off the bus") -> None:
        """The device does not answer any more."""
        self._change(index, lost=reason)

    def fail_probes(self, index: int, reason: str) -> None:
        """The device answers probes with an error."""
        self._change(index, failing=reason)

    def restore(self, index: int) -> None:
        """The device answers again."""
        self._change(index, lost="", failing="")

    def unplug(self, index: int) -> None:
        """The driver does not list the device."""
        self._change(index, absent=True)

    def plug(self, index: int) -> None:
        """The driver lists the device."""
        self._change(index, absent=False)

    def unload_driver(self, reason: str = "the driver is not loaded") -> None:
        """No device can be reached."""
        self._driver_missing = reason
        self._write()

    def load_driver(self) -> None:
        """The opposite of ``unload_driver``."""
        self._driver_missing = ""
        self._write()

    def fault(self, index: int, code: int) -> None:
        """The device reports a fault, for NVIDIA an Xid."""
        self._seq += 1
        self._faults.append({"seq": self._seq, "index": index, "code": code})
        del self._faults[:-_NEWEST_FAULTS]
        self._write()

    def _change(self, index: int, **changes: object) -> None:
        self._device_by_index.setdefault(index, {}).update(changes)
        self._write()

    def _write(self) -> None:
        document = {
            "driver_missing": self._driver_missing,
            "devices": {str(index): keys for index, keys in self._device_by_index.items()},
            "faults": self._faults,
        }
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(document))
        fresh.replace(self.path)
