# SPDX-License-Identifier: Apache-2.0
"""Writes the state file of the fake NVML library: a profile's machine and what befalls it.

The file format is that of native/libvgpu/tests/fakedrv/state.h. Every change writes a whole new
file and renames it into place, so a reader sees the state before or after and nothing in between.
Devices are named by their index in the profile. Memory in MiB here, in bytes in the file.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import NotFound
from hami_sim.hardware import fake_cuda, mig_tables
from hami_sim.hardware.profile import Level, Profile

STATE_VARIABLE = "FAKE_NVML_STATE"
NODES_VARIABLE = "FAKE_NVML_NODES"
"""Start of the paths of device nodes: the fake CUDA driver shows only devices with a node."""
WHOLE_GPU = 0xFFFFFFFF
"""Instance id of events and processes that concern the complete device."""

EVENT_SINGLE_BIT_ECC = 0x1
EVENT_DOUBLE_BIT_ECC = 0x2
EVENT_XID = 0x8
_SUPPORTED_EVENTS = EVENT_SINGLE_BIT_ECC | EVENT_DOUBLE_BIT_ECC | 0x4 | EVENT_XID | 0x10

_MIB = 1 << 20
_NEWEST_EVENTS = 200
_LEVEL_NUMBER = {
    Level.INTERNAL: 0,
    Level.SINGLE: 10,
    Level.MULTIPLE: 20,
    Level.HOSTBRIDGE: 30,
    Level.NODE: 40,
    Level.SYSTEM: 50,
}
_LINK_TO_GPU = 0
_LINK_TO_SWITCH = 2
_FIRST_SWITCH_BUS = 0xC0
_SWITCHES = 4


class Process(Struct, frozen=True, kw_only=True):
    """One process that computes on a device."""

    pid: int
    used_mib: int
    sm_pct: int = 0
    memory_pct: int = 0
    gpu_instance: int = WHOLE_GPU
    compute_instance: int = WHOLE_GPU


class NvLink(Struct, frozen=True, kw_only=True):
    """One link of a device."""

    number: int
    remote_type: int
    remote_bus_id: str
    active: bool = True


class Mig(Struct, frozen=True, kw_only=True):
    """One MIG instance of a device."""

    uuid: str
    memory_mib: int
    compute_units: int
    gpu_instance: int = 1
    compute_instance: int = 0


class MadeInstance(Struct, frozen=True, kw_only=True):
    """One GPU instance that was made through the library."""

    number: int
    profile: str
    start: int
    uuids: tuple[str, ...] = ()
    """MIG UUIDs of its compute instances."""


class MemoryLimits(Struct, frozen=True, kw_only=True):
    """Limits of one cgroup on one device."""

    group: str
    """Full path of the cgroup's directory."""
    soft_mib: int
    hard_mib: int


class Gpu(Struct, frozen=True, kw_only=True):
    """Present state of one device."""

    uuid: str
    keys: dict[str, str]
    """Further keys of the state file, as text."""
    used_mib: int = 0
    gpu_pct: int = 0
    lost: bool = False
    present: bool = True
    processes: tuple[Process, ...] = ()
    links: tuple[NvLink, ...] = ()
    migs: tuple[Mig, ...] = ()
    sizes: tuple[mig_tables.MigProfile, ...] = ()
    """Into what MIG mode divides it."""


class FakeNvml:
    """One fake machine. Each mutating method writes the file before it returns."""

    def __init__(self, path: Path, profile: Profile, node: str) -> None:
        """Describe ``profile`` on ``node`` in the file at ``path``; the directory must exist."""
        self.path = path
        self._system = {
            "driver_version": profile.driver.version,
            "nvml_version": profile.driver.attributes.get("nvml_version", profile.driver.version),
            "cuda_version": profile.driver.attributes.get("cuda_version", "0"),
            "init_error": "0",
        }
        self._gpus = [_gpu_of(profile, node, index) for index in range(len(profile.devices))]
        self._levels: dict[tuple[int, int], int] = {}
        for (a, b), level in profile.level_by_pair().items():
            self._levels[a, b] = self._levels[b, a] = _LEVEL_NUMBER[level]
        self._traffic: dict[str, tuple[float, float, float]] = {}
        self._faults: list[str] = []
        self._events: list[str] = []
        self._seq = 0
        self.write()

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of all devices, in order of index, present or not."""
        return tuple(gpu.uuid for gpu in self._gpus)

    def bus_id(self, index: int) -> str:
        """PCI address of a device, with an eight-digit domain."""
        return self._gpu(index).keys["bus_id"]

    def set_key(self, index: int, key: str, value: str) -> None:
        """Set any single-valued device key of the state file."""
        gpu = self._gpu(index)
        self._change(index, keys={**gpu.keys, key: value})

    def set_used_mib(self, index: int, used_mib: int) -> None:
        """Memory in use on the device, not counting its processes."""
        self._change(index, used_mib=used_mib)

    def set_load(self, index: int, gpu_pct: int) -> None:
        """Utilisation of the device in percent."""
        self._change(index, gpu_pct=gpu_pct)

    def set_processes(self, index: int, processes: Sequence[Process]) -> None:
        """All processes on the device."""
        self._change(index, processes=tuple(processes))

    def set_links(self, index: int, links: Sequence[NvLink]) -> None:
        """All NVLinks of the device."""
        self._change(index, links=tuple(links))

    def set_migs(self, index: int, migs: Sequence[Mig]) -> None:
        """Divide the device into these instances; none: it is whole again."""
        mode = str(int(bool(migs)))
        keys = {**self._gpu(index).keys, "mig_current": mode, "mig_pending": mode}
        self._change(index, migs=tuple(migs), keys=keys)

    def set_mig_mode(self, index: int, *, is_on: bool) -> None:
        """Set whether the library can partition the device; existing instances stay."""
        mode = str(int(is_on))
        keys = {**self._gpu(index).keys, "mig_current": mode, "mig_pending": mode}
        self._change(index, keys=keys)

    def made_instances(self, index: int) -> tuple[MadeInstance, ...]:
        """Return the instances that callers of the library created on the device, by placement."""
        gpu = self._gpu(index)
        name_by_id = {str(size.native_id): size.name for size in gpu.sizes}
        lines = [line.split() for line in self._instances_text().splitlines()]
        own = [words for words in lines if words[1] == gpu.uuid]
        made = [
            MadeInstance(
                number=int(words[2]),
                profile=name_by_id[words[3]],
                start=int(words[4]),
                uuids=tuple(ci[5] for ci in own if ci[0] == "ci" and ci[2] == words[2]),
            )
            for words in own
            if words[0] == "gi"
        ]
        return tuple(sorted(made, key=lambda instance: instance.start))

    def memory_limits(self, index: int) -> tuple[MemoryLimits, ...]:
        """Return the limits that callers of the library set on the device, by group."""
        try:
            text = self._limits_path().read_text(encoding="ascii")
        except FileNotFoundError:
            return ()
        lines = [line.split(" ", 3) for line in text.splitlines()]
        return tuple(
            MemoryLimits(group=group, soft_mib=int(soft) // _MIB, hard_mib=int(hard) // _MIB)
            for uuid, soft, hard, group in sorted(lines)
            if uuid == self._gpu(index).uuid
        )

    def set_traffic(self, index: int, dram_pct: float, tx_mib_s: float, rx_mib_s: float) -> None:
        """Traffic that samples of the device show from now on: bandwidth of memory, and PCIe."""
        self._traffic[self._gpu(index).uuid] = (dram_pct, tx_mib_s, rx_mib_s)
        lines = [f"{uuid} {dram} {tx} {rx}\n" for uuid, (dram, tx, rx) in self._traffic.items()]
        place = self.path.with_name(f"{self.path.name}.traffic")
        fresh = place.with_suffix(".fresh")
        fresh.write_text("".join(lines), encoding="ascii")
        fresh.replace(place)

    def reset_memory_limits(self) -> None:
        """Drop all limits, as a reset of the devices does."""
        self._limits_path().unlink(missing_ok=True)

    def _limits_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.limits")

    def _instances_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.mig")

    def _instances_text(self) -> str:
        try:
            return self._instances_path().read_text(encoding="ascii")
        except FileNotFoundError:
            return ""

    def set_level(self, a: int, b: int, level: Level) -> None:
        """Common ancestor of ``a`` and ``b``, in this direction only."""
        self._levels[a, b] = _LEVEL_NUMBER[level]
        self.write()

    def lose(self, index: int) -> None:
        """The device falls off the bus: everything that touches it answers GPU_IS_LOST."""
        self._change(index, lost=True)

    def restore(self, index: int) -> None:
        """The device answers again."""
        self._change(index, lost=False)

    def unplug(self, index: int) -> None:
        """The device is not there. Those that opened NVML before see it as lost."""
        self._change(index, present=False)

    def plug(self, index: int) -> None:
        """Make the device present; processes that opened NVML before must reopen it to see it."""
        self._change(index, present=True)

    def fault(self, function: str, index: int | None, code: int, *, hang_ms: int = 0) -> None:
        """Let ``function`` sleep, then answer ``code`` (0: the truth); ``None``: on all devices."""
        where = "*" if index is None else str(self._row(index))
        self._faults.append(f"{function} {where} {code} {hang_ms}")
        self.write()

    def clear_faults(self) -> None:
        """Functions answer truly again; sleeping ones wake up."""
        self._faults.clear()
        self.write()

    def driver_version(self, version: str) -> None:
        """Set the version of the kernel driver; memory limits per cgroup need 615."""
        self._system["driver_version"] = version
        self.write()

    def cuda_version(self, version: int) -> None:
        """Set the version of the CUDA driver, as 1000 times major and 10 times minor."""
        self._system["cuda_version"] = str(version)
        self.write()

    def init_error(self, code: int) -> None:
        """Set the result of later nvmlInit calls; 0 lets them succeed."""
        self._system["init_error"] = str(code)
        self.write()

    def unload_driver(self) -> None:
        """Every call answers DRIVER_NOT_LOADED until the driver is loaded."""
        self.path.unlink(missing_ok=True)

    def load_driver(self) -> None:
        """The opposite of ``unload_driver``."""
        self.write()

    def event(
        self, index: int, event_type: int, data: int, *, gpu_instance: int = WHOLE_GPU
    ) -> None:
        """Deliver one event to every event set that watches this device and type."""
        self._seq += 1
        self._events.append(
            f"{self._seq} {self._row(index)} {event_type} {data} {gpu_instance} {WHOLE_GPU}"
        )
        del self._events[:-_NEWEST_EVENTS]
        self.write()

    def xid(self, index: int, xid: int) -> None:
        """Deliver one Xid event."""
        self.event(index, EVENT_XID, xid)

    def write(self) -> None:
        """Put the present state in place."""
        lines = ["# SPDX-License-Identifier: Apache-2.0"]
        lines += [f"{key} = {value}" for key, value in self._system.items()]
        row_by_index = {index: self._row(index) for index in self._present()}
        lines += [
            f"pair = {row_by_index[a]} {row_by_index[b]} {level}"
            for (a, b), level in sorted(self._levels.items())
            if a in row_by_index and b in row_by_index
        ]
        lines += [f"fault = {fault}" for fault in self._faults]
        lines += [f"event = {event}" for event in self._events]
        for index in self._present():
            lines += _gpu_lines(self._gpus[index], row_by_index[index])
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fresh.write_text("\n".join(lines) + "\n", encoding="ascii")
        fresh.replace(self.path)
        fake_cuda.announce(self.path)

    def _present(self) -> list[int]:
        return [index for index, gpu in enumerate(self._gpus) if gpu.present]

    def _row(self, index: int) -> int:
        """Position in the file: unplugged devices leave no gap."""
        if not self._gpu(index).present:
            raise NotFound(what=f"device {index} of the fake machine (it is unplugged)")
        return self._present().index(index)

    def _gpu(self, index: int) -> Gpu:
        if not 0 <= index < len(self._gpus):
            raise NotFound(what=f"device {index} of the fake machine")
        return self._gpus[index]

    def _change(self, index: int, **changes: object) -> None:
        self._gpus[index] = replace(self._gpu(index), **changes)
        self.write()


def write_capabilities(proc_root: Path, profile: Profile) -> None:
    """Write the driver's table of device nodes of MIG instances below ``proc_root``.

    Minor numbers count through all possible instances: fifteen GPU instances with eight compute
    instances each per device.
    """
    lines = ["config 1", "monitor 2"]
    minor = 3
    for device in sorted(profile.devices, key=lambda device: device.minor):
        for gpu_instance in range(15):
            place = f"gpu{device.minor}/gi{gpu_instance}"
            lines.append(f"{place}/access {minor}")
            lines += [f"{place}/ci{number}/access {minor + 1 + number}" for number in range(8)]
            minor += 9
    table = proc_root / "driver/nvidia-caps/mig-minors"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("\n".join(lines) + "\n", encoding="ascii")


def _gpu_of(profile: Profile, node: str, index: int) -> Gpu:
    model, device = profile.model, profile.devices[index]
    attributes = model.attributes
    mig_instances = int(attributes.get("mig_instances", "0"))
    keys = {
        "name": profile.name_of(index),
        "serial": f"165{index:02}{int(profile.uuid_of(node, index)[-6:], 16):08}",
        "minor": str(device.minor),
        "bus_id": device.bus_id,
        "pci_device_id": attributes.get("pci_device_id", "0"),
        "pci_subsystem_id": attributes.get("pci_subsystem_id", "0"),
        "brand": attributes.get("brand", "0"),
        "architecture": attributes.get("architecture", "0"),
        "compute_capability": attributes.get("compute_capability", "0.0"),
        "sm_count": str(model.compute_units),
        "numa": str(-1 if device.numa is None else device.numa),
        "memory_total": str(profile.memory_mib_of(index) * _MIB),
        "memory_reserved": str(model.reserved_mib * _MIB),
        "unified_memory": str(int(model.unified_memory)),
        "temperature_c": str(30 + index),
        "power_mw": str(model.power_limit_w * 100),
        "power_limit_mw": str(model.power_limit_w * 1000),
        "clock_sm_mhz": attributes.get("sm_clock_mhz", "0"),
        "clock_memory_mhz": attributes.get("memory_clock_mhz", "0"),
        "supported_events": str(_SUPPORTED_EVENTS),
        "mig_capable": str(int(mig_instances > 0)),
        "mig_max": str(mig_instances),
        "mig_current": str(int(model.mode == "mig")),
        "mig_pending": str(int(model.mode == "mig")),
    }
    if device.cpus:
        keys["cpus"] = device.cpus
    if "ecc" in attributes:
        keys["ecc_current"] = keys["ecc_pending"] = attributes["ecc"]
    return Gpu(
        uuid=profile.uuid_of(node, index),
        keys=keys,
        links=_links_of(profile, index),
        sizes=mig_tables.TABLES[attributes["mig_table"]] if "mig_table" in attributes else (),
    )


def _links_of(profile: Profile, index: int) -> tuple[NvLink, ...]:
    fabric = profile.fabric
    if fabric is None:
        return ()
    ends = [
        (_LINK_TO_SWITCH, f"00000000:{_FIRST_SWITCH_BUS + number % _SWITCHES:02X}:00.0")
        for number in range(fabric.links_per_device)
    ]
    for join in fabric.joins:
        if index in join.devices:
            peer = join.devices[1] if join.devices[0] == index else join.devices[0]
            ends += [(_LINK_TO_GPU, profile.devices[peer].bus_id)] * join.links
    return tuple(
        NvLink(number=number, remote_type=kind, remote_bus_id=bus_id)
        for number, (kind, bus_id) in enumerate(ends)
    )


def _gpu_lines(gpu: Gpu, row: int) -> list[str]:
    lines = ["", f"[gpu {row}]", f"uuid = {gpu.uuid}"]
    lines += [f"{key} = {value}" for key, value in gpu.keys.items()]
    lines += [f"memory_used = {gpu.used_mib * _MIB}", f"gpu_util = {gpu.gpu_pct}"]
    lines.append(f"lost = {int(gpu.lost)}")
    now_us = time.time_ns() // 1000
    lines += [
        f"process = {p.pid} {p.used_mib * _MIB} {p.sm_pct} {p.memory_pct}"
        f" {p.gpu_instance} {p.compute_instance} {now_us}"
        for p in gpu.processes
    ]
    lines += [
        f"mig = {mig.uuid} {mig.gpu_instance} {mig.compute_instance}"
        f" {mig.memory_mib * _MIB} {mig.compute_units}"
        for mig in gpu.migs
    ]
    lines += [f"gi_profile = {size.line()}" for size in gpu.sizes]
    lines += [
        f"nvlink = {link.number} {int(link.active)} {link.remote_type} {link.remote_bus_id}"
        for link in gpu.links
    ]
    return lines
