# SPDX-License-Identifier: Apache-2.0
"""Divides simulated devices; partitions are in a file and survive the agent, as on hardware.

The file (``Parts``) is JSON, replaced as a whole at each change; without a path it is in memory and
lost with the process, as after a reboot. The device's table is enforced: an instance overlaps no
other, takes no more than there is, and starts at a position that its size allows; otherwise the
call raises ``PartitionRefused``.

A script in the file, or a hook, injects failures at the points ``POINTS``: each entry counts once,
and its use is on disk before the failure. Memory in MiB, compute in percent of one device.
"""

import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.model.device import DeviceFacts, Profile
from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers.errors import DriverTransient, PartitionBusy, PartitionRefused

_log = logging.getLogger(__name__)

Act = Literal["", "fail", "leave", "kill"]
"""``fail``: an error, and what was made is undone; ``leave``: an error, and it stays; ``kill``:
the process is gone in this moment."""

POINTS = (
    "instances",
    "create.begin",
    "create.half",
    "create.made",
    "destroy.begin",
    "destroy.done",
)
"""Points at which the script and the hook are called, in order of the lifecycle."""

_FREE_SIZE = frozenset({"amd", "cambricon", "hygon", "metax"})
"""Vendors whose instances have any size."""


class Turn(Struct, frozen=True, kw_only=True):
    """Action that happens once at a point."""

    at: str
    do: Act


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instance."""

    uuid: str
    number: int
    """Lowest that was free on the device."""
    profile: str = ""
    start: int | None = None
    kind: str = ""
    memory_mib: int = 0
    core_pct: int = 0
    whole: bool = True
    busy: bool = False


class Parts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The file."""

    parts: tuple[Part, ...] = ()
    undivided: tuple[str, ...] = ()
    """Devices whose mode was switched off, so that they cannot be divided."""
    script: tuple[Turn, ...] = ()


def nothing_happens(point: str) -> Act:
    """The hook that lets everything work."""
    del point
    return ""


class SimulatedPartitioner:
    """The partitioner protocol over a file."""

    def __init__(
        self,
        *,
        vendor: str,
        devices: Callable[[], Mapping[str, DeviceFacts]],
        path: Path | None = None,
        hook: Callable[[str], Act] = nothing_happens,
    ) -> None:
        """``devices``: reachable devices by UUID; ``hook`` is called after the script."""
        self._vendor = vendor
        self._devices = devices
        self._path = path
        self._hook = hook
        self._in_memory = Parts()

    @property
    def vendor(self) -> str:
        """The vendor of the devices."""
        return self._vendor

    async def instances(self) -> tuple[Instance, ...]:
        """Return the instances in the file."""
        if self._at("instances"):
            raise DriverTransient(doing="list partitions", detail="failure set by the script")
        present = self._devices()
        return tuple(self._shown(part) for part in self.stored().parts if part.uuid in present)

    async def create(self, wanted: Wanted) -> Instance:
        """Make one, in two steps as hardware does."""
        doing = f"make a partition on {wanted.uuid}"
        if self._at("create.begin"):
            raise DriverTransient(doing=doing, detail="failure set by the script")
        known = self.stored()
        used = {part.number for part in known.parts if part.uuid == wanted.uuid}
        half = Part(
            uuid=wanted.uuid,
            number=next(number for number in range(len(used) + 1) if number not in used),
            profile=wanted.profile,
            start=wanted.start,
            kind=wanted.kind,
            memory_mib=wanted.memory_mib,
            core_pct=wanted.core_pct,
            whole=False,
        )
        problem = self._problem(known.parts, half)
        if problem:
            raise PartitionRefused(doing=doing, detail=problem)
        self.store(replace(known, parts=(*known.parts, half)))
        self._may_break("create.half", half, doing)
        made = replace(half, whole=True)
        self._swap(half, made)
        self._may_break("create.made", made, doing)
        return self._shown(made)

    async def destroy(self, instance: Instance) -> None:
        """Remove one."""
        doing = f"remove partition {instance.instance_id} of {instance.uuid}"
        if self._at("destroy.begin"):
            raise DriverTransient(doing=doing, detail="failure set by the script")
        for part in self.stored().parts:
            if (part.uuid, str(part.number)) == (instance.uuid, instance.instance_id):
                if part.busy:
                    raise PartitionBusy(doing=doing, detail="a process uses it")
                self._swap(part, None)
        if self._at("destroy.done"):
            raise DriverTransient(doing=doing, detail="failure set by the script")

    def _may_break(self, point: str, part: Part, doing: str) -> None:
        act = self._at(point)
        if act:
            if act != "leave":
                self._swap(part, None)
            raise DriverTransient(doing=doing, detail="failure set by the script")

    def _at(self, point: str) -> Act:
        known = self.stored()
        turn = next((turn for turn in known.script if turn.at == point), None)
        act = self._hook(point) if turn is None else turn.do
        if turn is not None:
            rest = list(known.script)
            rest.remove(turn)
            self.store(replace(known, script=tuple(rest)))
        if act == "kill":
            _log.warning("killed by the script", extra={"point": point})
            os.kill(os.getpid(), signal.SIGKILL)
        return act

    def _problem(self, parts: tuple[Part, ...], new: Part) -> str:
        """Return the reason why the device has no capacity for ``new``; empty: it fits."""
        facts = self._devices().get(new.uuid)
        if facts is None:
            return "there is no such device"
        own = [part for part in parts if part.uuid == new.uuid]
        if facts.max_shares and len(own) >= facts.max_shares:
            return f"at most {facts.max_shares} partitions are possible"
        if not new.profile:
            return _lack_of_size(facts, [*own, new])
        by_name = {profile.name: profile for profile in facts.partitions}
        profile = by_name.get(new.profile)
        if profile is None:
            return f"there is no size {new.profile!r}"
        if profile.starts and new.start not in profile.starts:
            return f"{new.profile} cannot start at {new.start}"
        return _lack_of_room(facts, by_name, [*own, new])

    def _shown(self, part: Part) -> Instance:
        return Instance(
            uuid=part.uuid,
            instance_id=str(part.number),
            profile=part.profile if part.whole else "",
            start=part.start,
            memory_mib=part.memory_mib if part.whole else 0,
            core_pct=part.core_pct if part.whole else 0,
            kind=part.kind,
            is_busy=part.busy,
            handles=_handles(self._vendor, part) if part.whole else {},
        )

    def _swap(self, old: Part, new: Part | None) -> None:
        known = self.stored()
        kept = [part for part in known.parts if part != old]
        self.store(replace(known, parts=(*kept, *(() if new is None else (new,)))))

    def is_divided(self, uuid: str) -> bool:
        """Return true if the device is in the mode in which it can be divided."""
        return uuid not in self.stored().undivided

    def switch_mode(self, uuid: str, *, is_divided: bool) -> None:
        """Put the device into that mode, or out of it."""
        known = self.stored()
        if any(part.uuid == uuid for part in known.parts):
            raise PartitionBusy(doing=f"switch the mode of {uuid}", detail="it has partitions")
        others = tuple(one for one in known.undivided if one != uuid)
        self.store(replace(known, undivided=others if is_divided else (*others, uuid)))

    def stored(self) -> Parts:
        """Return the stored parts, complete or not."""
        if self._path is None:
            return self._in_memory
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Parts)
        except FileNotFoundError:
            return Parts()

    def store(self, parts: Parts) -> None:
        """Replace the stored parts."""
        self._in_memory = parts
        if self._path is not None:
            fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            fresh.write_bytes(msgspec.json.encode(parts))
            fresh.replace(self._path)


def divides(vendor: str, mode: str, *, has_table: bool) -> bool:
    """Return true if the simulated driver makes partitions of such devices."""
    if vendor in _FREE_SIZE:
        return mode in {"smlu", "sgpu"} or vendor in {"hygon", "amd"}
    return has_table and mode in {"mig", "vnpu", "drs", "sriov", "soft"}


def _lack_of_size(facts: DeviceFacts, parts: list[Part]) -> str:
    memory_mib = sum(part.memory_mib for part in parts)
    core_pct = sum(part.core_pct for part in parts)
    if memory_mib > facts.memory_mib or core_pct > facts.core_pct:
        return f"{memory_mib} MiB and {core_pct} % would be in use"
    return ""


def _lack_of_room(facts: DeviceFacts, by_name: Mapping[str, Profile], parts: list[Part]) -> str:
    taken: dict[str, int] = {}
    places: set[int] = set()
    for part in parts:
        profile = by_name[part.profile]
        for name, amount in profile.resources.items():
            taken[name] = taken.get(name, 0) + amount
            if taken[name] > facts.resources.get(name, 0):
                return f"{taken[name]} {name} would be in use, {facts.resources.get(name, 0)} exist"
        if profile.limit and sum(one.profile == part.profile for one in parts) > profile.limit:
            return f"at most {profile.limit} of {part.profile} are possible"
        if part.start is not None:
            own = set(range(part.start, part.start + profile.size))
            if own & places:
                return f"positions {sorted(own & places)} are taken"
            places |= own
    return ""


def _handles(vendor: str, part: Part) -> dict[str, str]:
    """Return the handles that the vendor's rendering reads."""
    number = str(part.number)
    name = f"{part.uuid}-{number}"
    return {
        "amd": {"cu_mask": number},
        "ascend": {"vnpu_id": str(100 + part.number)},
        "cambricon": {"cap_node": f"/dev/cambricon-caps/{name}"},
        "enflame": {"instance_uuid": name},
        "hygon": {"config_directory": f"/etc/vdev/{name}"},
        "kunlunxin": {"number": str(100 + part.number)},
        "metax": {"sgpu": number},
        "nvidia": {
            "mig_uuid": f"MIG-{name}",
            "gpu_instance": number,
            "compute_instance": "0",
            "gi_cap": f"/dev/nvidia-caps/nvidia-cap{2 * part.number + 1}",
            "ci_cap": f"/dev/nvidia-caps/nvidia-cap{2 * part.number + 2}",
        },
    }.get(vendor, {"instance": name})
