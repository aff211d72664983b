# SPDX-License-Identifier: Apache-2.0
"""Hardware profiles: which accelerators a machine has and how they are connected, as TOML data.

The format names no vendor's concepts; what only one vendor knows stands as text in ``attributes``
(of the driver, or of the model) and is read by that vendor's writer alone. Devices are numbered
from 0 in file order; that number is the index which every other table uses. Memory in MiB, power
in watts.

    vendor, uuid_prefix
    [driver]       version, [driver.attributes]
    [model]        name, memory_mib, reserved_mib, compute_units, power_limit_w, unified_memory,
                   mode, max_shares, [model.resources], [model.attributes]
    [[partitions]] sizes in which the hardware divides a device: name (none: the whole device),
                   memory_mib, core_pct, size, starts, kind, limit, resources = {name = amount}
    [[devices]]    bus_id, minor, and where known numa and cpus; name and memory_mib where a device
                   differs from the model
    [fabric]       kind "switch" (all reach all, links_per_device each) or "direct", with
                   [[fabric.joins]] devices = [a, b], links = n; no table: no fabric
    [[proximity]]  devices, level: the closest bridge that each pair of them shares. Unlisted pairs:
                   "node" on one NUMA node, "system" otherwise
"""

import uuid
from collections.abc import Mapping
from enum import StrEnum
from importlib import resources
from itertools import combinations
from pathlib import Path

import msgspec
from msgspec import Struct

from hami_common.errors import SettingsInvalid

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "devices.hami.io")


class Level(StrEnum):
    """Closest bridge that two devices share, nearest first."""

    INTERNAL = "internal"
    SINGLE = "single"
    MULTIPLE = "multiple"
    HOSTBRIDGE = "hostbridge"
    NODE = "node"
    SYSTEM = "system"


class DriverPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The installed driver."""

    version: str
    attributes: dict[str, str] = {}


class ModelPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties that all devices of the profile share."""

    name: str
    memory_mib: int
    compute_units: int
    """Streaming multiprocessors, AI cores, compute units: whatever the vendor counts."""
    reserved_mib: int = 0
    """Part of the memory that the driver keeps for itself."""
    power_limit_w: int = 0
    unified_memory: bool = False
    """The device shares the host's memory and its driver reports none of its own."""
    mode: str = "soft"
    """Sharing mode of the devices, as drivers report it."""
    max_shares: int = 0
    """Most shares that the hardware allows at a time; 0: no limit of its own."""
    resources: dict[str, int] = {}
    """Totals of what partitions take beside memory and compute, by name."""
    attributes: dict[str, str] = {}


class PartitionPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size in which the hardware divides a device."""

    memory_mib: int
    name: str = ""
    core_pct: int = 0
    size: int = 0
    starts: tuple[int, ...] = ()
    kind: str = ""
    limit: int = 0
    resources: dict[str, int] = {}


class DevicePart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: its place in the machine, and where it differs from the model."""

    bus_id: str
    minor: int
    numa: int | None = None
    cpus: str = ""
    """Processors near the device, as a list such as ``0-47,96-143``."""
    name: str = ""
    memory_mib: int = 0


class Join(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Direct links between two devices."""

    devices: tuple[int, int]
    links: int


class Fabric(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Interconnect between devices besides the PCI bus."""

    kind: str
    links_per_device: int = 0
    joins: tuple[Join, ...] = ()


class Proximity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each pair among ``devices`` shares a bridge of ``level``."""

    devices: tuple[int, ...]
    level: Level


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine's accelerators."""

    vendor: str
    driver: DriverPart
    model: ModelPart
    devices: tuple[DevicePart, ...]
    uuid_prefix: str = ""
    fabric: Fabric | None = None
    proximity: tuple[Proximity, ...] = ()
    partitions: tuple[PartitionPart, ...] = ()

    def name_of(self, index: int) -> str:
        """Model name of one device."""
        return self.devices[index].name or self.model.name

    def memory_mib_of(self, index: int) -> int:
        """Memory of one device."""
        return self.devices[index].memory_mib or self.model.memory_mib

    def uuid_of(self, node: str, index: int) -> str:
        """The device's UUID on ``node``: the same on every run, different on every node."""
        return f"{self.uuid_prefix}{uuid.uuid5(_NAMESPACE, f'{node}/{self.vendor}/{index}')}"

    def level_by_pair(self) -> Mapping[tuple[int, int], Level]:
        """Closest shared bridge for each pair (lower index first)."""
        levels: dict[tuple[int, int], Level] = {}
        for a, b in combinations(range(len(self.devices)), 2):
            numa = self.devices[a].numa
            near = numa is not None and numa == self.devices[b].numa
            levels[a, b] = Level.NODE if near else Level.SYSTEM
        for group in self.proximity:
            for a, b in combinations(sorted(group.devices), 2):
                levels[a, b] = group.level
        return levels


def names(vendor: str = "") -> tuple[str, ...]:
    """Names of the profiles that come with the simulation, of one vendor or of all."""
    files = resources.files(__package__).joinpath("profiles").iterdir()
    known = sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))
    return tuple(name for name in known if not vendor or load(name).vendor == vendor)


def path_of(name: str) -> Path:
    """File of a shipped profile; processes that may not import this package read it themselves."""
    path = Path(__file__).parent / "profiles" / f"{name}.toml"
    if not path.is_file():
        raise SettingsInvalid(
            field="hardware profile",
            problem=f"there is no profile {name!r}",
            fix=f"use one of {', '.join(names())}, or the path of a .toml file",
        )
    return path


def load(name_or_path: str | Path) -> Profile:
    """A shipped profile by name, or any profile file by path (recognised by its .toml suffix)."""
    is_path = str(name_or_path).endswith(".toml")
    path = Path(name_or_path) if is_path else path_of(str(name_or_path))
    try:
        profile = msgspec.toml.decode(path.read_bytes(), type=Profile)
    except (msgspec.DecodeError, OSError) as error:
        raise SettingsInvalid(
            field=f"hardware profile {path.name}", problem=str(error), fix="correct the file"
        ) from error
    check(profile, path.name)
    return profile


def check(profile: Profile, name: str) -> None:
    """Refuse what no machine could be: repeated places, indices of devices that are not there."""
    count = len(profile.devices)
    joined = profile.fabric.joins if profile.fabric is not None else ()
    used = [i for group in profile.proximity for i in group.devices]
    used += [i for join in joined for i in join.devices]
    kind = profile.fabric.kind if profile.fabric is not None else "direct"
    problems = {
        "no devices": count == 0,
        "two devices with one bus_id": len({d.bus_id.lower() for d in profile.devices}) != count,
        "two devices with one minor": len({d.minor for d in profile.devices}) != count,
        f"a device index outside 0..{count - 1}": any(not 0 <= i < count for i in used),
        "a partition larger than its device": any(
            p.memory_mib > profile.model.memory_mib for p in profile.partitions
        ),
        "a partition that takes what the model has not": any(
            p.resources.keys() - profile.model.resources.keys() for p in profile.partitions
        ),
        f"fabric kind {kind!r} is neither switch nor direct": kind not in {"switch", "direct"},
    }
    for problem, holds in problems.items():
        if holds:
            raise SettingsInvalid(
                field=f"hardware profile {name}", problem=problem, fix="correct the file"
            )
