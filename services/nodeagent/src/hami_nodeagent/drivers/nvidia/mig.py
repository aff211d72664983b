# SPDX-License-Identifier: Apache-2.0
"""MIG mode and MIG instances of one NVIDIA device: reads and changes them through NVML.

Blocking calls for worker threads, run by ``partitioner``; the only state between calls is
``Samples`` of the load, which belong to the driver. Names, ids, sizes and positions come from NVML,
never from a list here. A GPU instance with one compute instance over all of it is one partition.
Any other GPU instance (no compute instance, several, a smaller one) is incomplete: it is listed
without a profile, under the name ``GI-<number>``, and can only be removed. Memory in MiB, positions
in the device's own grid.

NVML: https://docs.nvidia.com/deploy/nvml-api/group__nvmlMultiInstanceGPU.html (R570). Device nodes:
https://docs.nvidia.com/datacenter/tesla/mig-user-guide/device-nodes-and-capabilities.html.
"""

import ctypes
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pynvml
from msgspec import Struct
from msgspec.structs import replace

from hami_common.model.device import DeviceFacts, Profile
from hami_common.units import whole
from hami_nodeagent.core.hardware import CardMode, Instance, Wanted
from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DriverError,
    DriverTransient,
    NotSupported,
    PartitionBusy,
    PartitionRefused,
)
from hami_nodeagent.drivers.nvidia import gpm
from hami_nodeagent.drivers.nvidia.nvml import ask, ask_or, find, used_mib
from hami_nodeagent.drivers.protocol import InstanceUsage

if TYPE_CHECKING:
    from pynvml import _GpuInstanceProfileInfo, _Process  # names of the type stub only

MODE = "mig"
"""``DeviceFacts.mode`` of a device in MIG mode."""
_WHOLE_PCT = 100
_MOST_PLACES = 32
_UNDO_TRIES = 2
_HALF = "GI-{}"
_PLAIN = re.compile(r"\d+g\.\d+gb")
"""Names of profiles that differ only in size; others have or lack engines."""
_UNITS = ("decoders", "encoders", "jpeg", "ofa")
"""Media engines: each instance takes some of the device's."""
_REFUSALS = (pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, pynvml.NVML_ERROR_INVALID_ARGUMENT)
_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)\s*$", re.MULTILINE)

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Size(Struct, frozen=True, kw_only=True):
    """One GPU instance profile of a device."""

    name: str
    native_id: int
    slices: int
    count: int
    memory_mib: int
    processors: int
    engines: tuple[int, int, int, int]
    """By ``_UNITS``."""
    length: int
    starts: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """It differs from others in size only."""
        return _PLAIN.fullmatch(self.name) is not None


class _Found(Struct, frozen=True, kw_only=True):
    """One GPU instance."""

    raw: pynvml.c_nvmlGpuInstance_t
    number: int
    size: Size
    start: int


# ---- the mode ----------------------------------------------------------------------------------


def read_mode(raw: pynvml.c_nvmlDevice_t, uuid: str) -> CardMode | None:
    """Return the card's mode; ``None`` if it has none."""
    mode = ask_or(None, "read the MIG mode", pynvml.nvmlDeviceGetMigMode, raw)
    if mode is None:
        return None
    return CardMode(
        uuid=uuid,
        is_divided=bool(mode[0]),
        is_divided_next=bool(mode[1]),
        pids=tuple(sorted({process.pid for process in _running(raw)})),
    )


def _running(raw: pynvml.c_nvmlDevice_t) -> Iterator["_Process"]:
    for fn in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
    ):
        yield from ask_or((), "read processes", fn, raw)


def switch_mode(raw: pynvml.c_nvmlDevice_t, uuid: str, *, is_divided: bool) -> None:
    """Set the mode with immediate effect; on any error, cancel the change pending for a reset.

    Old handles of the card are void afterwards, also on errors. If the mode is already in effect,
    the call cancels a pending change.
    """
    doing = f"switch MIG mode {'on' if is_divided else 'off'}"
    before = read_mode(raw, uuid)
    if before is None:
        raise NotSupported(doing=doing, detail="the card has no MIG mode")
    if before.is_divided != is_divided and before.pids:
        raise PartitionBusy(doing=doing, detail=f"process {before.pids[0]} uses the card")
    try:
        status = _set_mode(raw, is_divided, doing)
        now = ask("read the MIG mode", pynvml.nvmlDeviceGetMigMode, find(uuid))
    except DriverError:
        _take_back(uuid, is_divided=before.is_divided)
        raise
    if [bool(one) for one in now] == [is_divided, is_divided]:
        return
    _take_back(uuid, is_divided=before.is_divided)
    if status == pynvml.NVML_ERROR_IN_USE:
        raise PartitionBusy(doing=doing, detail="a process holds the card open", code=status)
    if status == pynvml.NVML_ERROR_NOT_SUPPORTED:
        detail = "this machine cannot reset the card: only a reboot would do it"
        raise NotSupported(doing=doing, detail=detail, code=status)
    raise DriverTransient(doing=doing, detail="it did not come into effect", code=status)


def _set_mode(raw: pynvml.c_nvmlDevice_t, is_divided: bool, doing: str) -> int:  # noqa: FBT001 - the mode
    """Return NVML's status code for the activation of the mode."""
    try:
        return ask(doing, pynvml.nvmlDeviceSetMigMode, raw, int(is_divided))
    except DriverTransient as error:
        if error.code == pynvml.NVML_ERROR_IN_USE:
            raise PartitionBusy(doing=doing, detail=error.detail, code=error.code) from error
        raise


def _take_back(uuid: str, *, is_divided: bool) -> None:
    """Let no change wait for the card's next reset, unless the change is in effect already."""
    try:
        raw = find(uuid)
        current, pending = ask("read the MIG mode", pynvml.nvmlDeviceGetMigMode, raw)
        if bool(current) == is_divided and pending != current:
            _set_mode(raw, is_divided, "take the MIG mode back")
    except DriverError as error:
        _log.warning(
            "rollback of a failed MIG mode change failed",
            extra={"device": uuid, "error": str(error)},
        )


# ---- sizes -------------------------------------------------------------------------------------


def is_divided(raw: pynvml.c_nvmlDevice_t) -> bool:
    """Return true if the device is in MIG mode now."""
    mode = ask_or(None, "read the MIG mode", pynvml.nvmlDeviceGetMigMode, raw)
    return mode is not None and bool(mode[0])


def read_sizes(raw: pynvml.c_nvmlDevice_t) -> tuple[Size, ...]:
    """All profiles that the device has, smallest first."""
    sizes: dict[int, Size] = {}
    for kind in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        info = _profile_info(raw, kind)
        if info is None or info.id in sizes:
            continue
        places = _places(raw, info.id)
        if places:
            sizes[info.id] = Size(
                name=_name_of(info),
                native_id=info.id,
                slices=info.sliceCount,
                count=info.instanceCount,
                memory_mib=info.memorySizeMB,
                processors=info.multiprocessorCount,
                engines=(info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount),
                length=places[0][1],
                starts=tuple(sorted(start for start, _ in places)),
            )
    return tuple(sorted(sizes.values(), key=by_size))


def by_size(size: Size) -> tuple[int, int, str]:
    """Order of the profiles of a device."""
    return size.memory_mib, size.slices, size.name


def _profile_info(raw: pynvml.c_nvmlDevice_t, kind: int) -> "_GpuInstanceProfileInfo | None":
    """Return ``None`` if the device has no such profile, which drivers report in two ways."""
    try:
        return ask("read a profile", pynvml.nvmlDeviceGetGpuInstanceProfileInfo, raw, kind)
    except NotSupported:
        return None
    except DriverTransient as error:
        if error.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
            return None
        raise


def _name_of(info: "_GpuInstanceProfileInfo") -> str:
    name = info.name.removeprefix("MIG").strip()
    if not name:
        raise AnswerUnknown(doing="read a profile", detail=f"profile {info.id} has no name")
    return name


def _places(raw: pynvml.c_nvmlDevice_t, profile_id: int) -> list[tuple[int, int]]:
    """(start, length) of every place that a profile may have."""
    count = ctypes.c_uint(_MOST_PLACES)
    places = (pynvml.c_nvmlGpuInstancePlacement_t * _MOST_PLACES)()
    ask(
        "read the places of a profile",
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements,
        raw,
        profile_id,
        places,
        ctypes.byref(count),
    )
    return [(place.start, place.size) for place in places[: count.value]]


def with_sizes(raw: pynvml.c_nvmlDevice_t, facts: DeviceFacts) -> DeviceFacts:
    """Add the sizes to the facts of a device in MIG mode; return others unchanged."""
    if facts.mode != MODE:
        return facts
    sizes = read_sizes(raw)
    if not sizes:
        raise NotSupported(
            doing="read the MIG profiles",
            detail="the device is in MIG mode, but the driver lists no profile",
        )
    return divided(facts, sizes)


def divided(facts: DeviceFacts, sizes: tuple[Size, ...]) -> DeviceFacts:
    """Return the facts of a device that has these sizes, at least one.

    The count of a profile is a limit only where its placements allow more. Media engines are
    counted where the driver's own figures add up: if the plain profiles need more engines of a kind
    than the device has, that kind is not counted, because it is shared or reported in another unit.
    """
    most_processors = max(1, *(size.processors for size in sizes))
    totals = {unit: max(size.engines[i] for size in sizes) for i, unit in enumerate(_UNITS)}
    plain = [size for size in sizes if size.is_plain]
    counted = {
        unit: totals[unit]
        for i, unit in enumerate(_UNITS)
        if totals[unit] and all(s.count * s.engines[i] <= totals[unit] for s in plain)
    }
    profiles = tuple(
        Profile(
            name=size.name,
            memory_mib=size.memory_mib,
            core_pct=_WHOLE_PCT * size.processors // most_processors,
            resources={
                unit: size.engines[i]
                for i, unit in enumerate(_UNITS)
                if unit in counted and size.engines[i]
            },
            size=size.length,
            starts=size.starts,
            limit=size.count if size.count < _most_beside(size) else 0,
            native_id=size.native_id,
            by_name_only=not size.is_plain,
        )
        for size in sizes
    )
    return replace(facts, partitions=profiles, resources=counted)


def _most_beside(size: Size) -> int:
    """Return how many instances of one size fit beside each other."""
    count, end = 0, -1
    for start in size.starts:
        if start > end:
            count, end = count + 1, start + size.length - 1
    return count


# ---- instances ---------------------------------------------------------------------------------


class Place(Struct, frozen=True, kw_only=True):
    """The device to read, and the directory that lists its device nodes."""

    raw: pynvml.c_nvmlDevice_t
    uuid: str
    minor: int | None
    proc_root: str


def read_instances(at: Place) -> tuple[Instance, ...]:
    """Return all GPU instances on the device, by position; empty if not in MIG mode."""
    return _instances(at, read_sizes(at.raw)) if is_divided(at.raw) else ()


def _instances(at: Place, sizes: tuple[Size, ...]) -> tuple[Instance, ...]:
    users = _users(at.raw)
    found = sorted(_gpu_instances(at.raw, sizes), key=lambda gi: gi.start)
    return tuple(_describe(at, gi, users) for gi in found)


def _gpu_instances(raw: pynvml.c_nvmlDevice_t, sizes: tuple[Size, ...]) -> Iterator[_Found]:
    for size in sizes:
        count = ctypes.c_uint(0)
        handles = (pynvml.c_nvmlGpuInstance_t * max(size.count, 1))()
        ask(
            "list GPU instances",
            pynvml.nvmlDeviceGetGpuInstances,
            raw,
            size.native_id,
            handles,
            ctypes.byref(count),
        )
        for handle in handles[: count.value]:
            info = ask("read a GPU instance", pynvml.nvmlGpuInstanceGetInfo, handle)
            yield _Found(raw=handle, number=info.id, size=size, start=info.placement.start)


def _describe(at: Place, gi: _Found, users: frozenset[int] | None) -> Instance:
    is_busy = None if users is None else gi.number in users
    number, mig_uuid = _whole(at.raw, gi)
    if not mig_uuid:
        return Instance(
            uuid=at.uuid, instance_id=_HALF.format(gi.number), start=gi.start, is_busy=is_busy
        )
    return Instance(
        uuid=at.uuid,
        instance_id=mig_uuid,
        profile=gi.size.name,
        start=gi.start,
        is_busy=is_busy,
        handles={
            "mig_uuid": mig_uuid,
            "gpu_instance": str(gi.number),
            "compute_instance": str(number),
            **_capabilities(at, gi.number, number),
        },
    )


def _whole(raw: pynvml.c_nvmlDevice_t, gi: _Found) -> tuple[int, str]:
    """Return number and MIG UUID of the compute instance over all of ``gi``; no UUID: none."""
    inside = list(_compute_instances(gi.raw))
    if len(inside) != 1 or inside[0][2] != gi.size.slices:
        return 0, ""
    number = inside[0][1]
    return number, _mig_uuids(raw, gi.number).get(number, "")


def _compute_instances(
    gi: pynvml.c_nvmlGpuInstance_t,
) -> Iterator[tuple[pynvml.c_nvmlComputeInstance_t, int, int]]:
    """(handle, number, slices) of each compute instance."""
    for profile_id, slices, most in _compute_profiles(gi):
        count = ctypes.c_uint(0)
        handles = (pynvml.c_nvmlComputeInstance_t * max(most, 1))()
        ask(
            "list compute instances",
            pynvml.nvmlGpuInstanceGetComputeInstances,
            gi,
            profile_id,
            handles,
            ctypes.byref(count),
        )
        for handle in handles[: count.value]:
            info = ask("read a compute instance", pynvml.nvmlComputeInstanceGetInfo, handle)
            yield handle, info.id, slices


def _compute_profiles(gi: pynvml.c_nvmlGpuInstance_t) -> Iterator[tuple[int, int, int]]:
    """(id, slices, most instances) of each compute profile that the GPU instance has."""
    seen: set[int] = set()
    for kind in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = ask(
                "read a compute profile",
                pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo,
                gi,
                kind,
                pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED,
            )
        except NotSupported:
            continue
        except DriverTransient as error:
            if error.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                continue
            raise
        if info.id not in seen:
            seen.add(info.id)
            yield info.id, info.sliceCount, info.instanceCount


def _mig_uuids(raw: pynvml.c_nvmlDevice_t, gpu_instance: int) -> dict[int, str]:
    """UUIDs of the MIG devices in one GPU instance, by number of the compute instance."""
    found: dict[int, str] = {}
    for mig in _mig_devices(raw):
        if ask("read a MIG device", pynvml.nvmlDeviceGetGpuInstanceId, mig) == gpu_instance:
            number = ask("read a MIG device", pynvml.nvmlDeviceGetComputeInstanceId, mig)
            found[number] = ask("read the UUID of a MIG device", pynvml.nvmlDeviceGetUUID, mig)
    return found


def _mig_devices(raw: pynvml.c_nvmlDevice_t) -> Iterator[pynvml.c_nvmlDevice_t]:
    """Every compute instance, as a device of its own."""
    most = ask("count MIG devices", pynvml.nvmlDeviceGetMaxMigDeviceCount, raw)
    for index in range(most):
        try:
            yield ask("open a MIG device", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, raw, index)
        except DriverTransient as error:
            if error.code in {pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT}:
                continue  # indices have holes
            raise


def _users(raw: pynvml.c_nvmlDevice_t) -> frozenset[int] | None:
    """Return GPU instances with compute processes; ``None`` where the driver reports none."""
    running = ask_or(None, "read processes", pynvml.nvmlDeviceGetComputeRunningProcesses, raw)
    return None if running is None else frozenset(process.gpuInstanceId for process in running)


def _capabilities(at: Place, gpu_instance: int, compute_instance: int) -> dict[str, str]:
    """Return device nodes that give a container access; empty where /proc lists none."""
    parts = (f"gi{gpu_instance}", f"gi{gpu_instance}/ci{compute_instance}")
    minors = [_cap_minor(at, part) for part in parts]
    if None in minors:
        return {}
    return {
        word: f"/dev/nvidia-caps/nvidia-cap{minor}"
        for word, minor in zip(("gi_cap", "ci_cap"), minors, strict=True)
    }


def _cap_minor(at: Place, part: str) -> int | None:
    """Read the minor from the instance's own file, else from the table of all instances."""
    if at.minor is None:
        return None
    root = Path(at.proc_root) / "driver"
    access = root / f"nvidia/capabilities/gpu{at.minor}/mig/{part}/access"
    with suppress(OSError):
        if match := _MINOR.search(access.read_text("ascii")):
            return int(match.group(1))
    with suppress(OSError):
        for line in (root / "nvidia-caps/mig-minors").read_text("ascii").splitlines():
            name, _, number = line.partition(" ")
            if name == f"gpu{at.minor}/{part}/access":
                return whole(number)
    return None


# ---- use ---------------------------------------------------------------------------------------


class Samples:
    """The samples of the load of each GPU instance of one card (``gpm``)."""

    def __init__(self) -> None:
        """None yet."""
        self._by_number: dict[int, gpm.Series] = {}

    def keep_only(self, numbers: frozenset[int]) -> None:
        """Release the samples of all instances except ``numbers``."""
        for number in self._by_number.keys() - numbers:
            self.forget(number)

    def load_pct(self, raw: pynvml.c_nvmlDevice_t, number: int) -> int | None:
        """Return the percentage of time since the last call in which the instance was active."""
        found = self._by_number.setdefault(number, gpm.Series()).read(
            raw,
            lambda card, sample: pynvml.nvmlGpmMigSampleGet(card, number, sample),
            (pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,),
        )
        load = found.get(pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL)
        return None if load is None else round(load)

    def forget(self, number: int) -> None:
        """Release the sample of one instance."""
        series = self._by_number.pop(number, None)
        if series is not None:
            series.close()


def read_uses(raw: pynvml.c_nvmlDevice_t, samples: Samples) -> tuple[InstanceUsage, ...]:
    """Read memory and load of every instance of the card; ``None``: not reported."""
    if not is_divided(raw):
        samples.keep_only(frozenset())
        return ()
    has_samples = gpm.is_supported(raw)
    found: list[InstanceUsage] = []
    loads: dict[int, int | None] = {}
    for mig in _mig_devices(raw):
        number = ask("read a MIG device", pynvml.nvmlDeviceGetGpuInstanceId, mig)
        if number not in loads:
            loads[number] = samples.load_pct(raw, number) if has_samples else None
        found.append(
            InstanceUsage(
                instance_id=ask("read the UUID of a MIG device", pynvml.nvmlDeviceGetUUID, mig),
                used_mib=used_mib(mig),
                core_pct=loads[number],
            )
        )
    samples.keep_only(frozenset(loads))
    return tuple(found)


# ---- making and removing -----------------------------------------------------------------------


def create(at: Place, wanted: Wanted) -> Instance:
    """Create a partition and return it as the hardware reports it; on any error, roll back.

    The new instance is found by its position, because a call that fails may have created it.
    """
    sizes = _sizes_now(at.raw, wanted)
    size, start = _choice(sizes, wanted)
    doing = f"make {size.name} at {start}"
    taken = {p for gi in _gpu_instances(at.raw, sizes) for p in _positions(gi.size, gi.start)}
    if overlap := taken.intersection(_positions(size, start)):
        raise PartitionRefused(doing=doing, detail=f"position {min(overlap)} is taken")
    try:
        gi = _make_gi(at.raw, size, start, doing)
        _make_ci(gi, size, doing)
        return _read_back(at, sizes, size, start)
    except _NothingMade as error:
        raise PartitionRefused(doing=doing, detail=error.detail, code=error.code) from error
    except DriverError:
        _undo(at.raw, size, start)
        raise


class _NothingMade(DriverError):
    """The driver refused to make the GPU instance, so any instance there has another owner."""


def _positions(size: Size, start: int) -> range:
    return range(start, start + size.length)


def _sizes_now(raw: pynvml.c_nvmlDevice_t, wanted: Wanted) -> tuple[Size, ...]:
    if not is_divided(raw):
        doing = f"make {wanted.profile}"
        raise PartitionRefused(doing=doing, detail="the device is not in MIG mode")
    return read_sizes(raw)


def _choice(sizes: tuple[Size, ...], wanted: Wanted) -> tuple[Size, int]:
    """The size and place that are wanted, if the device has them."""
    size = next((size for size in sizes if size.name == wanted.profile), None)
    if size is None:
        known = ", ".join(size.name for size in sizes) or "none"
        raise PartitionRefused(
            doing=f"make {wanted.profile!r}", detail=f"the device has the sizes {known}"
        )
    if wanted.start is None or wanted.start not in size.starts:
        raise PartitionRefused(
            doing=f"make {size.name} at {wanted.start}",
            detail=f"it may be at {', '.join(map(str, size.starts))}",
        )
    return size, wanted.start


def _make_gi(
    raw: pynvml.c_nvmlDevice_t, size: Size, start: int, doing: str
) -> pynvml.c_nvmlGpuInstance_t:
    place = pynvml.c_nvmlGpuInstancePlacement_t(start=start, size=size.length)
    try:
        return ask(
            doing,
            pynvml.nvmlDeviceCreateGpuInstanceWithPlacement,
            raw,
            size.native_id,
            ctypes.byref(place),
        )
    except DriverTransient as error:
        if error.code in _REFUSALS:
            raise _NothingMade(doing=doing, detail=error.detail, code=error.code) from error
        raise


def _make_ci(gi: pynvml.c_nvmlGpuInstance_t, size: Size, doing: str) -> None:
    for profile_id, slices, _ in _compute_profiles(gi):
        if slices == size.slices:
            ask(doing, pynvml.nvmlGpuInstanceCreateComputeInstance, gi, profile_id)
            return
    raise PartitionRefused(doing=doing, detail="no compute instance takes the whole of it")


def _read_back(at: Place, sizes: tuple[Size, ...], size: Size, start: int) -> Instance:
    for instance in _instances(at, sizes):
        if instance.start == start and instance.profile == size.name:
            return instance
    raise DriverTransient(
        doing=f"make {size.name} at {start}",
        detail="the driver reported success, but the instance is not there",
    )


def _undo(raw: pynvml.c_nvmlDevice_t, size: Size, start: int) -> None:
    """Remove the instance at the position, which was free before."""
    for left in reversed(range(_UNDO_TRIES)):
        try:
            for gi in _gpu_instances(raw, (size,)):
                if gi.start == start:
                    _remove(gi.raw)
        except DriverError as error:
            _log.warning(
                "a MIG instance that failed could not be removed",
                extra={"profile": size.name, "start": start, "left": left, "error": str(error)},
            )
        else:
            return


def destroy(at: Place, instance: Instance) -> None:
    """Remove the listed instance with this id; no effect if ``read_instances`` lists none."""
    doing = f"remove {instance.instance_id}"
    if not is_divided(at.raw):
        return
    users = _users(at.raw) or frozenset()
    for gi in _gpu_instances(at.raw, read_sizes(at.raw)):
        if instance.instance_id != (_whole(at.raw, gi)[1] or _HALF.format(gi.number)):
            continue
        if gi.number in users:
            raise PartitionBusy(doing=doing, detail="processes compute in it")
        try:
            _remove(gi.raw)
        except DriverTransient as error:
            if error.code == pynvml.NVML_ERROR_IN_USE:
                raise PartitionBusy(doing=doing, detail=error.detail, code=error.code) from error
            raise
        return


def _remove(gi: pynvml.c_nvmlGpuInstance_t) -> None:
    for ci, _, _ in list(_compute_instances(gi)):
        _gone_is_fine("remove a compute instance", pynvml.nvmlComputeInstanceDestroy, ci)
    _gone_is_fine("remove a GPU instance", pynvml.nvmlGpuInstanceDestroy, gi)


def _gone_is_fine(doing: str, fn: Callable[[T], object], handle: T) -> None:
    try:
        ask(doing, fn, handle)
    except DriverTransient as error:
        if error.code != pynvml.NVML_ERROR_NOT_FOUND:
            raise
