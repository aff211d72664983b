# SPDX-License-Identifier: Apache-2.0
"""Reads one device or the library through NVML: blocking calls, errors translated.

Besides ``gpm`` and ``mig``, this is the only module that may import pynvml. All functions run in
worker threads, called by ``driver``; none of them awaits, evaluates health, or keeps state except
the event set that the caller passes. Memory in MiB (NVML: bytes, rounded down), power in watts
(NVML: milliwatts). Facts and names: https://docs.nvidia.com/deploy/nvml-api/ (R570).
"""

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import pynvml
from msgspec import Struct

from hami_common.bounds import NUMA_MOST
from hami_common.model.device import DeviceFacts
from hami_common.units import whole
from hami_nodeagent.core.health import FaultSeen
from hami_nodeagent.drivers.errors import (
    DeviceGone,
    DriverDenied,
    DriverError,
    DriverMismatch,
    DriverMissing,
    DriverTransient,
    NotSupported,
)
from hami_nodeagent.drivers.protocol import DeviceUsage, ProcessUsage
from hami_nodeagent.drivers.rules import FaultPolicy, type_of

if TYPE_CHECKING:
    from pynvml import _EventData, _Memory, _PciInfo, _ProcessSample  # names of the stub only

VENDOR = "nvidia"
_MIB_SHIFT = 20
_OPENS_MAX = 16
_LIBRARY = "libnvidia-ml.so.1"
_LIBRARY_PLACES = tuple(
    f"{place}/{_LIBRARY}"
    for place in ("usr/lib64", "usr/lib/*-linux-gnu", "usr/lib", "lib64", "lib/*-linux-gnu")
)
"""Patterns below the root of a driver's file system, in the order of preference."""
_WHOLE_GPU = 0xFFFFFFFF
"""Number of the GPU instance in events that concern the whole card."""

_LEVEL_BY_ANCESTOR = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "internal",
    pynvml.NVML_TOPOLOGY_SINGLE: "single",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "multiple",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "hostbridge",
    pynvml.NVML_TOPOLOGY_NODE: "node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "system",
}

_ERROR_BY_CODE: dict[int, type[DriverError]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: DriverMissing,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: DriverMissing,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: DriverMissing,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: DriverMismatch,
    pynvml.NVML_ERROR_NO_PERMISSION: DriverDenied,
    pynvml.NVML_ERROR_GPU_IS_LOST: DeviceGone,
    pynvml.NVML_ERROR_RESET_REQUIRED: DeviceGone,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: DeviceGone,
    pynvml.NVML_ERROR_NOT_SUPPORTED: NotSupported,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: NotSupported,
}

_WATCHED_EVENTS = (
    pynvml.nvmlEventTypeXidCriticalError
    | pynvml.nvmlEventTypeDoubleBitEccError
    | pynvml.nvmlEventTypeSingleBitEccError
)

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")


class Handle(Struct, frozen=True):
    """A device handle, valid until NVML is closed."""

    raw: pynvml.c_nvmlDevice_t

    @property
    def address(self) -> int:
        """The number by which events name the device."""
        return ctypes.cast(self.raw, ctypes.c_void_p).value or 0


@dataclass(slots=True)
class Events:
    """The event set and its devices; used by one thread at a time."""

    event_set: pynvml.c_nvmlEventSet_t | None = None
    uuid_by_address: dict[int, str] = field(default_factory=dict)


class LinkView(Struct, frozen=True, kw_only=True):
    """Links of one device as it sees them itself."""

    level_by_uuid: dict[str, str]
    direct_by_bus_id: dict[str, int]
    switch_links: int


# ---- asking ------------------------------------------------------------------------------------


def ask(doing: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call NVML; its error becomes ours. ``mig`` calls through here too."""
    try:
        return fn(*args, **kwargs)
    except pynvml.NVMLError as error:
        code = int(error.value)
        kind = _ERROR_BY_CODE.get(code, DriverTransient)
        raise kind(doing=doing, detail=str(error), code=code) from error


def ask_or(default: D, doing: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | D:
    """Call NVML; parts and drivers that do not support it have the default."""
    try:
        return ask(doing, fn, *args, **kwargs)
    except NotSupported:
        return default


# ---- the library -------------------------------------------------------------------------------


def library_file(path: str) -> str:
    """Return the file of NVML at ``path``: itself, or below it if it is a directory.

    A directory without the library raises ``DriverMissing``: a driver container that has not
    started yet mounts it later.
    """
    root = Path(path)
    if not root.is_dir():
        return path
    places = [place for pattern in _LIBRARY_PLACES for place in sorted(root.glob(pattern))]
    if not places:
        raise DriverMissing(doing="load NVML", detail=f"{path} contains no {_LIBRARY}")
    return str(places[0])


def open_library(path: str) -> None:
    """Open NVML, from the file or the driver's root at ``path`` if one is given."""
    if path:
        file = library_file(path)
        # pynvml opens its library by soname; the linker then finds this one already loaded.
        try:
            ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise DriverMissing(doing="load NVML", detail=str(error)) from error
    ask("open NVML", pynvml.nvmlInit)


def close_library(events: Events) -> None:
    """Free the event set and close NVML as often as it was opened (a close may have failed)."""
    free_events(events)
    with suppress(DriverMissing):  # NVML reports with this error that it is not open
        for _ in range(_OPENS_MAX):
            ask("close NVML", pynvml.nvmlShutdown)


def count_devices() -> int:
    """Return the number of devices that NVML listed when it was opened."""
    return ask("count devices", pynvml.nvmlDeviceGetCount)


def driver_version() -> str:
    """Version of the kernel driver."""
    return ask("read the driver version", pynvml.nvmlSystemGetDriverVersion)


def bound_addresses(sysfs_root: str) -> frozenset[str] | None:
    """Return PCI addresses bound to the kernel driver; ``None`` if sysfs is unreadable."""
    try:
        entries = list((Path(sysfs_root) / "bus/pci/drivers/nvidia").iterdir())
    except OSError:
        return None
    return frozenset(entry.name for entry in entries if ":" in entry.name)


# ---- one device --------------------------------------------------------------------------------


def read_facts(index: int, sysfs_root: str, unified_memory_mib: int) -> tuple[Handle, DeviceFacts]:
    """Read all facts of the inventory about the device at ``index``."""
    raw = ask("open the device", pynvml.nvmlDeviceGetHandleByIndex, index)
    pci = ask("read the PCI address", pynvml.nvmlDeviceGetPciInfo, raw)
    mig = ask_or(None, "read the MIG mode", pynvml.nvmlDeviceGetMigMode, raw)
    facts = DeviceFacts(
        uuid=ask("read the UUID", pynvml.nvmlDeviceGetUUID, raw),
        vendor=VENDOR,
        index=index,
        type=type_of(VENDOR, ask("read the name", pynvml.nvmlDeviceGetName, raw)),
        memory_mib=_memory_mib(raw, unified_memory_mib),
        minor=ask("read the minor number", pynvml.nvmlDeviceGetMinorNumber, raw),
        bus_id=pci.busId,
        numa=_numa_node(Path(sysfs_root), pci),
        mode="mig" if mig is not None and mig[0] else "soft",
        attributes=_attributes(raw, pci, is_mig_capable=mig is not None),
    )
    return Handle(raw), facts


def _memory_mib(raw: pynvml.c_nvmlDevice_t, unified_memory_mib: int) -> int:
    try:
        info = ask("read the memory size", pynvml.nvmlDeviceGetMemoryInfo, raw)
    except NotSupported as error:
        if unified_memory_mib > 0:
            return unified_memory_mib
        raise NotSupported(
            doing=error.doing,
            detail="the device shares the host's memory; set unified_memory_mib to use it",
            code=error.code,
        ) from error
    return info.total >> _MIB_SHIFT


def _numa_node(sysfs_root: Path, pci: "_PciInfo") -> int | None:
    address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    try:
        text = (sysfs_root / "bus/pci/devices" / address / "numa_node").read_text("ascii")
    except (OSError, ValueError):
        return None
    return whole(text, most=NUMA_MOST)


def _attributes(
    raw: pynvml.c_nvmlDevice_t, pci: "_PciInfo", *, is_mig_capable: bool
) -> dict[str, str]:
    capability = ask("read the compute capability", pynvml.nvmlDeviceGetCudaComputeCapability, raw)
    serial = ask_or("", "read the serial number", pynvml.nvmlDeviceGetSerial, raw)
    units = ask_or(None, "read the attributes", pynvml.nvmlDeviceGetAttributes, raw)
    attributes = {
        "compute_capability": f"{capability[0]}.{capability[1]}",
        "pci_device_id": f"0x{pci.pciDeviceId:08X}",
    }
    if serial:
        attributes["serial"] = serial
    if units is not None and units.multiprocessorCount:
        attributes["compute_units"] = str(units.multiprocessorCount)
    if is_mig_capable:
        attributes["mig_capable"] = "true"
    return attributes


def probe(uuid: str, known: Handle | None) -> Handle:
    """Check identity, memory and persistent defects; return the handle that answered."""
    raw = find(uuid) if known is None else known.raw
    answer = ask("read the UUID", pynvml.nvmlDeviceGetUUID, raw)
    if answer != uuid:
        raise DeviceGone(doing="read the UUID", detail=f"another device answers: {answer}")
    ask_or(None, "read the memory", pynvml.nvmlDeviceGetMemoryInfo, raw)
    rows = ask_or(None, "read remapped rows", pynvml.nvmlDeviceGetRemappedRows, raw)
    if rows is not None and rows[3]:
        raise DriverTransient(
            doing="read remapped rows", detail="a defective memory row could not be remapped"
        )
    return Handle(raw)


def find(uuid: str) -> pynvml.c_nvmlDevice_t:
    """A fresh handle; ``mig`` needs one after a switch of the mode."""
    try:
        return ask("find the device", pynvml.nvmlDeviceGetHandleByUUID, uuid.encode("ascii"))
    except DriverTransient as error:
        if error.code == pynvml.NVML_ERROR_NOT_FOUND:
            raise DeviceGone(doing=error.doing, detail=error.detail, code=error.code) from error
        raise


# ---- usage -------------------------------------------------------------------------------------


def read_usage(uuid: str, handle: Handle, since_us: int) -> tuple[DeviceUsage, int]:
    """Read the device's usage; return it and the newest sample's time (``since_us`` if none)."""
    raw = handle.raw
    memory = ask_or(None, "read the memory", _memory_info, raw)
    load = ask_or(None, "read the load", pynvml.nvmlDeviceGetUtilizationRates, raw)
    celsius = ask_or(
        None,
        "read the temperature",
        pynvml.nvmlDeviceGetTemperature,
        raw,
        pynvml.NVML_TEMPERATURE_GPU,
    )
    milliwatts = ask_or(None, "read the power", pynvml.nvmlDeviceGetPowerUsage, raw)
    samples = _process_samples(raw, since_us)
    usage = DeviceUsage(
        uuid=uuid,
        used_mib=None if memory is None else memory.used >> _MIB_SHIFT,
        total_mib=None if memory is None else memory.total >> _MIB_SHIFT,
        core_pct=None if load is None else load.gpu,
        memory_bus_pct=None if load is None else load.memory,
        temperature_c=celsius,
        power_w=None if milliwatts is None else milliwatts / 1000,
        processes=_processes(raw, {sample.pid: sample.smUtil for sample in samples}),
    )
    return usage, max((sample.timeStamp for sample in samples), default=since_us)


def used_mib(raw: pynvml.c_nvmlDevice_t) -> int | None:
    """Return memory in use on a device or in a MIG instance; ``None``: not reported."""
    memory = ask_or(None, "read the memory", _memory_info, raw)
    return None if memory is None else memory.used >> _MIB_SHIFT


def _memory_info(raw: pynvml.c_nvmlDevice_t) -> "_Memory":
    """Version 2 leaves the driver's reserve out of ``used``; older drivers have version 1 only."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(raw, pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return pynvml.nvmlDeviceGetMemoryInfo(raw)


def _processes(
    raw: pynvml.c_nvmlDevice_t, core_pct_by_pid: Mapping[int, int]
) -> tuple[ProcessUsage, ...] | None:
    running = ask_or(None, "read processes", pynvml.nvmlDeviceGetComputeRunningProcesses, raw)
    if running is None:
        return None
    drawing = ask_or(
        (), "read processes that draw", pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, raw
    )
    # A process that computes and draws is in both lists, with the same memory.
    bytes_by_pid: dict[int, int | None] = {}
    for process in (*running, *drawing):
        bytes_by_pid[process.pid] = _larger(bytes_by_pid.get(process.pid), process.usedGpuMemory)
    return tuple(
        ProcessUsage(
            pid=pid,
            used_mib=None if used_bytes is None else used_bytes >> _MIB_SHIFT,
            core_pct=core_pct_by_pid.get(pid),
        )
        for pid, used_bytes in bytes_by_pid.items()
    )


def _larger(one: int | None, other: int | None) -> int | None:
    return max((n for n in (one, other) if n is not None), default=None)


def _process_samples(raw: pynvml.c_nvmlDevice_t, since_us: int) -> Sequence["_ProcessSample"]:
    """Samples newer than ``since_us``; an idle device has none, which NVML calls an error."""
    try:
        return ask("read process load", pynvml.nvmlDeviceGetProcessUtilization, raw, since_us)
    except NotSupported:
        return ()
    except DriverTransient as error:
        if error.code in {pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND}:
            return ()
        raise


# ---- limits of memory --------------------------------------------------------------------------


def cap_memory(own: Handle, group: str, limit_mib: int | None) -> None:
    """Set the hard limit of the cgroup at ``group``, ``None`` for none, and read it back.

    The kernel keeps the old limit where the group uses more than the new one.
    https://docs.nvidia.com/deploy/nvml-api/api/structnvmlSetMemoryLimits__v1__t.html (615)
    """
    limits = pynvml.c_nvmlSetMemoryLimits_v1_t()
    limits.nameSpace, limits.softLimit = group.encode(), 0
    limits.hardLimit = (
        pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX if limit_mib is None else limit_mib << _MIB_SHIFT
    )
    ask("limit memory", pynvml.nvmlDeviceSetMemoryLimits_v1, own.raw, limits)
    if limit_mib is None:
        return
    seen = pynvml.c_nvmlGetMemoryLimits_v1_t()
    seen.nameSpace = limits.nameSpace
    ask("read the limit of memory", pynvml.nvmlDeviceGetMemoryLimits_v1, own.raw, seen)
    if seen.hardLimit > limits.hardLimit:
        raise DriverTransient(
            doing="limit memory",
            detail=f"{seen.hardLimit >> _MIB_SHIFT} MiB stay in effect instead of {limit_mib} MiB,"
            f" {seen.currentUsed >> _MIB_SHIFT} MiB are in use",
        )


# ---- links -------------------------------------------------------------------------------------


def read_links(own: Handle, peers: Mapping[str, Handle]) -> LinkView:
    """Return how one device is linked to its peers (by UUID): closest bridges, active NVLinks."""
    levels = {}
    for uuid, peer in peers.items():
        ancestor = ask_or(
            pynvml.NVML_TOPOLOGY_SYSTEM,
            "read the topology",
            pynvml.nvmlDeviceGetTopologyCommonAncestor,
            own.raw,
            peer.raw,
        )
        levels[uuid] = _LEVEL_BY_ANCESTOR.get(ancestor, "system")
    direct: dict[str, int] = {}
    switch_links = 0
    for link in _active_links(own.raw):
        kind = ask_or(
            pynvml.NVML_NVLINK_DEVICE_TYPE_GPU,
            "read the kind of a link's far end",
            pynvml.nvmlDeviceGetNvLinkRemoteDeviceType,
            own.raw,
            link,
        )
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            switch_links += 1
        elif kind == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            far = ask(
                "read a link's far end", pynvml.nvmlDeviceGetNvLinkRemotePciInfo, own.raw, link
            )
            direct[far.busId] = direct.get(far.busId, 0) + 1
    return LinkView(level_by_uuid=levels, direct_by_bus_id=direct, switch_links=switch_links)


def _active_links(raw: pynvml.c_nvmlDevice_t) -> Iterator[int]:
    """Yield numbers of active links; the first number unknown to the device ends the list."""
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            is_active = ask("read a link", pynvml.nvmlDeviceGetNvLinkState, raw, link)
        except NotSupported:
            return
        except DriverTransient as error:
            if error.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                return
            raise
        if is_active:
            yield link


# ---- events ------------------------------------------------------------------------------------


def wait_events(
    events: Events, handles: Mapping[str, Handle], limit_s: float, policy: FaultPolicy
) -> tuple[FaultSeen, ...]:
    """Watch every device of ``handles`` and wait once; return nothing on timeout.

    Any error but the timeout frees the set, so that the next call makes a new one.
    """
    try:
        event_set = _register(events, handles)
        if event_set is None:
            return ()
        return _one_event(events, event_set, limit_s, policy)
    except DriverError:
        free_events(events)
        raise


def free_events(events: Events) -> None:
    """Release the event set; a set that cannot be freed is dropped."""
    event_set, events.event_set = events.event_set, None
    events.uuid_by_address.clear()
    if event_set is None:
        return
    try:
        ask("free the event set", pynvml.nvmlEventSetFree, event_set)
    except DriverError as error:
        _log.info("an event set could not be freed", extra={"error": str(error)})


def _register(events: Events, handles: Mapping[str, Handle]) -> pynvml.c_nvmlEventSet_t | None:
    """Add every unregistered device to the event set; return ``None`` if the set is empty.

    A device without event support (old parts) or with an error is left out: its probes report it,
    and it must not keep the others from being watched.
    """
    registered = set(events.uuid_by_address.values())
    missing = {uuid: handle for uuid, handle in handles.items() if uuid not in registered}
    event_set = events.event_set
    if event_set is None:
        event_set = events.event_set = ask("make an event set", pynvml.nvmlEventSetCreate)
    for uuid, handle in missing.items():
        try:
            types = ask("read the event types", pynvml.nvmlDeviceGetSupportedEventTypes, handle.raw)
            ask(
                "watch events",
                pynvml.nvmlDeviceRegisterEvents,
                handle.raw,
                types & _WATCHED_EVENTS,
                event_set,
            )
        except (DriverMissing, DriverMismatch):
            raise
        except DriverError as error:
            _log.debug("a device sends no events", extra={"uuid": uuid, "error": str(error)})
        else:
            events.uuid_by_address[handle.address] = uuid
    return event_set if events.uuid_by_address else None


def _one_event(
    events: Events, event_set: pynvml.c_nvmlEventSet_t, limit_s: float, policy: FaultPolicy
) -> tuple[FaultSeen, ...]:
    try:
        event = ask("wait for events", pynvml.nvmlEventSetWait_v2, event_set, int(limit_s * 1000))
    except DriverTransient as error:
        if error.code == pynvml.NVML_ERROR_TIMEOUT:
            return ()
        raise
    uuid = events.uuid_by_address.get(Handle(event.device).address)
    if uuid is None:
        _log.warning("an event names an unknown device", extra={"code": event.eventData})
        return ()
    return (_fault_of(uuid, event, policy),)


def _fault_of(uuid: str, event: "_EventData", policy: FaultPolicy) -> FaultSeen:
    """Return the fault of an event; memory errors never condemn, as an Xid follows them.

    An Xid of a MIG instance affects only the instance, unless it concerns the whole card.
    """
    event_type, data = event.eventType, event.eventData
    if event_type == pynvml.nvmlEventTypeXidCriticalError:
        number = event.gpuInstanceId
        is_part = number != _WHOLE_GPU
        return FaultSeen(
            uuid=uuid,
            code=data,
            fatal=policy.condemns(data),
            text=f"Xid {data} in GPU instance {number}" if is_part else f"Xid {data}",
            part=number if is_part and data not in policy.of_device else None,
        )
    is_double = event_type == pynvml.nvmlEventTypeDoubleBitEccError
    text = f"{'uncorrectable' if is_double else 'corrected'} memory error"
    return FaultSeen(uuid=uuid, code=0, fatal=False, text=text)
