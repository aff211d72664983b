# SPDX-License-Identifier: Apache-2.0
"""Cambricon's library CNDEV: cards, their use and links, sMLU profiles and instances.

Commands::

    glance    cards: identity, health, use
    survey    besides: links
    list      cards in sMLU mode and their instances
    create UUID QUOTA_PERCENT BYTES NAME
    destroy UUID INSTANCE
    tidy UUID

Structures and calls are those of the vendor's header ``cndev.h`` for API version 6, as its
Kubernetes device plugin and its exporter ship it. A library with API version 5 (the same
structures, shorter; cards named by their index) supports reading cards only. Calls of version 2 are
tried first (``cndevGetMemoryUsageV2``), because later libraries have no others.

Sizes are in MiB (the library's MB), of sMLU in bytes; names are in buffers of 100 bytes; the quota
is a percentage of the card. ``glance`` and ``survey`` print devices in the format of
``drivers.parse.library``, ``list`` prints JSON, the others print nothing. A failed ``create`` rolls
back. Never run on this vendor's hardware.
"""

import ctypes
from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeVar

from hami_nodeagent.libraries.loading import (
    Errors,
    Failed,
    Kind,
    Library,
    Program,
    Trouble,
    main,
    nonsense,
    roomy,
    text,
)

_VERSION, _OLDER = 6, 5
_OTHER_VERSION = 3
_NO_SPACE = 9
_NAME_SIZE, _UUID_SIZE = 100, 37
_CARDS, _PORTS, _INSTANCES, _PROFILES, _PROCESSES = 256, 64, 256, 128, 4096
_NOT_TOLD, _GOOD, _RUNNING = -1, 1, 4
_IN_PROBLEM = 18
_PROHIBITED = 2
_KIB = 1024
_DRIVER_STATES = {
    0: "early inited", 1: "bring up", 2: "booting", 3: "late init", 5: "boot error", 6: "reset",
    7: "reset error", 8: "unknown",
}  # fmt: skip
_LEVELS = {1: "internal", 2: "single", 3: "multiple", 4: "hostbridge", 5: "node", 6: "system"}
Structure = TypeVar("Structure", bound=ctypes.Structure)
_NAMES = {
    1: "NO_DRIVER", 2: "LOW_DRIVER_VERSION", 3: "UNSUPPORTED_API_VERSION", 4: "UNINITIALIZED",
    5: "INVALID_ARGUMENT", 6: "INVALID_DEVICE_ID", 7: "UNKNOWN", 8: "MALLOC",
    9: "INSUFFICIENT_SPACE", 10: "NOT_SUPPORTED", 11: "INVALID_LINK", 12: "NO_DEVICES",
    13: "NO_PERMISSION", 14: "NOT_FOUND", 15: "IN_USE", 16: "DUPLICATE", 17: "TIMEOUT",
    18: "IN_PROBLEM",
}  # fmt: skip
_KINDS = {
    1: Kind.MISSING,
    2: Kind.MISMATCH,
    3: Kind.MISMATCH,
    6: Kind.GONE,
    9: Kind.REFUSED,
    10: Kind.UNSUPPORTED,
    12: Kind.ABSENT,
    13: Kind.DENIED,
    14: Kind.GONE,
    15: Kind.BUSY,
}
_KINDS_OF_CALL = {("cndevGetDeviceCount", 3): Kind.UNUSABLE}
"""A library with neither version is unusable, so the agent falls back to the CLI."""


class _Count(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("number", ctypes.c_int))


class _Uuid(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("uuid", ctypes.c_uint8 * _UUID_SIZE),
        ("ncs", ctypes.c_uint64),
    )


class _Mode(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("mode", ctypes.c_int))


class _Versions(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("mcu", ctypes.c_uint * 3),
        ("driver", ctypes.c_uint * 3),
    )


class _Serial(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("card", ctypes.c_uint64),
        ("board", ctypes.c_uint64),
    )


_PCIE = (
    ("ids", ctypes.c_uint * 2),
    ("makers", ctypes.c_uint16 * 2),
    ("domain", ctypes.c_uint),
    ("bus", ctypes.c_uint),
    ("device", ctypes.c_uint),
    ("function", ctypes.c_uint),
)


class _Pcie(ctypes.Structure):
    _fields_ = _PCIE


class _OlderPcie(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), *_PCIE)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_int64), ("used", ctypes.c_int64))


class _OlderMemory(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("total", ctypes.c_int64),
        ("used", ctypes.c_int64),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("average", ctypes.c_int),
        ("cores", ctypes.c_int * 80),
    )


class _Temperature(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("board", ctypes.c_int),
        ("clusters", ctypes.c_int * 20),
        ("dies", ctypes.c_int * 8),
        ("chip", ctypes.c_int),
    )


class _Power(ctypes.Structure):
    _fields_ = (("usage", ctypes.c_int), ("cap", ctypes.c_int))


class _OlderPower(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("usage", ctypes.c_int), ("cap", ctypes.c_int))


class _Numa(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("node", ctypes.c_int32))


class _Health(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("health", ctypes.c_int),
        ("device", ctypes.c_int),
        ("driver", ctypes.c_int),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("pid", ctypes.c_uint),
        ("physical_kib", ctypes.c_uint64),
        ("virtual_kib", ctypes.c_uint64),
    )


class _Relation(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("relation", ctypes.c_int))


class _Port(ctypes.Structure):
    _fields_ = (("state", ctypes.c_int), ("serdes", ctypes.c_int))


class _OlderPort(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("state", ctypes.c_int), ("serdes", ctypes.c_int))


class _Remote(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("serials", ctypes.c_uint64 * 2),
        ("slot", ctypes.c_uint32),
        ("port", ctypes.c_uint32),
        ("ip", ctypes.c_uint8 * 16),
        ("uuid", ctypes.c_uint8 * _UUID_SIZE),
    )


class _Set(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("quota", ctypes.c_uint32),
        ("memory", ctypes.c_uint64),
    )


class _ProfileIds(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("count", ctypes.c_int),
        ("ids", ctypes.c_int * _PROFILES),
    )


class _Profile(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.c_int),
        ("name", ctypes.c_char * _NAME_SIZE),
        ("total", ctypes.c_uint32),
        ("remain", ctypes.c_uint32),
        ("quota", ctypes.c_uint32 * 2),
        ("memory", ctypes.c_uint64 * 2),
    )


class _Instance(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("profile", ctypes.c_int),
        ("id", ctypes.c_int),
        ("uuid", ctypes.c_uint8 * _UUID_SIZE),
        ("domain", ctypes.c_int),
        ("bus", ctypes.c_int),
        ("device", ctypes.c_int),
        ("function", ctypes.c_int),
        ("profile_name", ctypes.c_char * _NAME_SIZE),
        ("name", ctypes.c_char * _NAME_SIZE),
        ("node", ctypes.c_char * _NAME_SIZE),
        ("quota", ctypes.c_uint32 * 2),
        ("memory", ctypes.c_uint64 * 2),
        ("reserved", ctypes.c_uint * 128),
    )


class Cndev:
    """The opened library."""

    def __init__(self, library: Library) -> None:
        """Initialize the library and detect the version of its structures."""
        self._library = library
        self._call = library.call
        self._call("cndevInit", 0)
        self._version = _VERSION
        count = roomy(_Count, version=_VERSION)
        if library.code("cndevGetDeviceCount", ctypes.byref(count)) == _OTHER_VERSION:
            self._version = _OLDER
        self._count = self._counted()

    # ---- reading cards --------------------------------------------------------------------------

    def glance(self) -> dict[str, Any]:
        """Identity, health and use of every card."""
        devices = [self._shown(slot) for slot in range(self._count)]
        return {"version": self._driver(), "devices": devices}

    def survey(self) -> dict[str, Any]:
        """Return the data of ``glance`` and the links between cards."""
        answer = self.glance()
        told = [card for card in answer["devices"] if card.get("uuid")]
        return {**answer, "links": self._links({card["uuid"]: card["index"] for card in told})}

    def _shown(self, slot: int) -> dict[str, Any]:
        try:
            device = self._device(slot)
            uuid = self._uuid(device)
            health = self._new(_Health)
            health.device = health.driver = _NOT_TOLD
            self._call("cndevGetCardHealthState", ctypes.byref(health), device)
        except Failed as error:
            sick = {"broken": error.words} if error.code == _IN_PROBLEM else {}
            return {"index": slot, "trouble": error.plain(), **sick}
        serial, numa = self._new(_Serial), self._new(_Numa)
        load, heat = self._new(_Utilization), self._new(_Temperature)
        has_serial = self._told("cndevGetCardSN", serial, device)
        has_numa = self._told("cndevGetNUMANodeIdByDevId", numa, device)
        has_load = self._told("cndevGetDeviceUtilizationInfo", load, device)
        has_heat = self._told("cndevGetTemperatureInfo", heat, device)
        return {
            "index": slot,
            "uuid": _identity(uuid),
            "name": self._name(device),
            "bus_id": self._bus_id(device),
            "minor": slot,
            "numa": numa.node if has_numa else None,
            "mode": self._mode(device),
            "attributes": {"serial": f"0x{serial.card:016x}"} if has_serial else {},
            "broken": _broken(health) or self._forbidden(device),
            "core_pct": load.average if has_load else None,
            "temperature_c": heat.chip if has_heat else None,
            "power_w": self._power(device),
            "processes": self._processes(device),
            **self._memory(device),
        }

    def _forbidden(self, device: ctypes.c_int) -> str:
        """Return why no process may use the card; empty: the card is usable."""
        mode = self._new(_Mode)
        told = self._told("cndevGetComputeMode", mode, device)
        return "its compute mode is prohibited" if told and mode.mode == _PROHIBITED else ""

    def _driver(self) -> str:
        """Version of the kernel's driver."""
        for slot in range(self._count):
            versions = self._new(_Versions)
            device = self._try_device(slot)
            if device is not None and self._told("cndevGetVersionInfo", versions, device):
                return ".".join(map(str, versions.driver))
        return ""

    def _name(self, device: ctypes.c_int) -> str:
        call = "cndevGetCardNameStringByDevId"
        if not self._library.has(call):
            return ""
        function = self._library.function(call)
        function.restype = ctypes.c_char_p
        found = function(device)
        return text(found) if found else ""

    def _bus_id(self, device: ctypes.c_int) -> str:
        found: _Pcie | _OlderPcie = roomy(_Pcie)
        if not self._told("cndevGetPCIeInfoV2", found, device):
            found = self._new(_OlderPcie)
            if not self._told("cndevGetPCIeInfo", found, device):
                return ""
        return f"{found.domain:04x}:{found.bus:02x}:{found.device:02x}.{found.function:x}"

    def _memory(self, device: ctypes.c_int) -> dict[str, int | None]:
        found: _Memory | _OlderMemory = roomy(_Memory)
        if not self._told("cndevGetMemoryUsageV2", found, device):
            found = self._new(_OlderMemory)
            if not self._told("cndevGetMemoryUsage", found, device):
                return {"memory_mib": None, "used_mib": None}
        return {"memory_mib": found.total, "used_mib": found.used}

    def _power(self, device: ctypes.c_int) -> int | None:
        found = roomy(_Power)
        for call in ("cndevGetDevicePowerInfo", "cndevGetPowerInfoV2"):
            if self._told(call, found, device):
                return int(found.usage)
        older = self._new(_OlderPower)
        return int(older.usage) if self._told("cndevGetPowerInfo", older, device) else None

    def _mode(self, device: ctypes.c_int) -> str:
        for call, word in (("cndevGetSMLUMode", "smlu"), ("cndevGetMimMode", "mim")):
            mode = self._new(_Mode)
            if self._told(call, mode, device) and mode.mode:
                return word
        return ""

    def _processes(self, device: ctypes.c_int) -> list[list[int]] | None:
        """Return process ids and MiB; ``None``: not reported."""
        call, room = "cndevGetProcessInfo", 64
        if not self._library.has(call):
            return None
        while room <= _PROCESSES:
            count, found = ctypes.c_uint(room), (_Process * room)()
            found[0].version = self._version
            code = self._library.code(call, ctypes.byref(count), ctypes.byref(found), device)
            if code == _NO_SPACE:
                room *= 4
                continue
            if code:
                return None
            if count.value > room:
                raise nonsense(f"{count.value} processes")
            return [[one.pid, one.physical_kib // _KIB] for one in found[: count.value]]
        return None

    def _links(self, slot_by_uuid: dict[str, int]) -> list[list[int | str]]:
        """Return slot, slot, level and number of MLU-Links for links that both ends report."""
        devices = {slot: self._device(slot) for slot in sorted(slot_by_uuid.values())}
        ports = {slot: self._ports(one, slot_by_uuid) for slot, one in devices.items()}
        links: list[list[int | str]] = []
        for a, b in combinations(devices, 2):
            found = self._new(_Relation)
            told = self._told("cndevTopologyGetRelationship", found, devices[a], devices[b])
            level = _LEVELS.get(found.relation) if told else None
            if level is not None:
                links.append([a, b, level, min(ports[a].count(b), ports[b].count(a))])
        return links

    def _ports(self, device: ctypes.c_int, slot_by_uuid: dict[str, int]) -> list[int]:
        """Slots of the cards that the card's live MLU-Links lead to."""
        if not self._library.has("cndevGetMLULinkPortNumber"):
            return []
        found = []
        for port in range(min(_PORTS, self._library.code("cndevGetMLULinkPortNumber", device))):
            state: _Port | _OlderPort = roomy(_Port)
            if not self._told("cndevGetMLULinkStatusV2", state, device, port):
                state = self._new(_OlderPort)
                if not self._told("cndevGetMLULinkStatus", state, device, port):
                    continue
            remote = self._new(_Remote)
            if state.state and self._told("cndevGetMLULinkRemoteInfo", remote, device, port):
                slot = slot_by_uuid.get(_identity(_uuid_in(remote.uuid)))
                found += [] if slot is None else [slot]
        return found

    # ---- dividing cards -------------------------------------------------------------------------

    def cards(self) -> list[dict[str, Any]]:
        """Return cards in sMLU mode, with their profiles and instances."""
        return [card for slot in range(self._count) if (card := self._card(slot)) is not None]

    def create(self, uuid: str, quota: int, size: int, name: str) -> None:
        """Create a profile of that size if there is none, and an instance of it."""
        device = self._find(uuid)
        profile = next(
            (p for p in self._profiles(device) if (p.quota[0], p.memory[0]) == (quota, size)), None
        )
        made = ctypes.c_int(-1 if profile is None else profile.id)
        if profile is None:
            wanted = _Set(version=self._version, quota=quota, memory=size)
            self._call(
                "cndevCreateSMluProfileInfo", ctypes.byref(wanted), ctypes.byref(made), device
            )
        handle = ctypes.c_int(0)
        try:
            self._call(
                "cndevCreateSMluInstanceByProfileId",
                *(ctypes.byref(handle), ctypes.c_uint(made.value), device, name.encode()),
            )
        except Failed:
            if profile is None:
                self._library.code("cndevDestroySMluProfileInfo", made, device)
            raise

    def destroy(self, uuid: str, instance: int) -> None:
        """One instance, by its number on the card."""
        device = self._find(uuid)
        slot = next(card["slot"] for card in self.cards() if card["uuid"] == uuid)
        self._call("cndevDestroySMluInstanceByHandle", ctypes.c_int(instance << 8 | slot))
        self.tidy_device(device)

    def tidy(self, uuid: str) -> None:
        """Remove profiles without instances."""
        self.tidy_device(self._find(uuid))

    def tidy_device(self, device: ctypes.c_int) -> None:
        """The same for an opened card."""
        used = {one.profile for one in self._instances(device)}
        for profile in self._profiles(device):
            if profile.id not in used and profile.remain == profile.total:
                self._library.code("cndevDestroySMluProfileInfo", ctypes.c_int(profile.id), device)

    def _card(self, slot: int) -> dict[str, Any] | None:
        device = self._device(slot)
        if self._mode(device) != "smlu":
            return None
        return {
            "slot": slot,
            "uuid": self._uuid(device),
            "memory_mib": self._memory(device)["memory_mib"],
            "profiles": [
                {"id": one.id, "quota": one.quota[0], "memory": one.memory[0]}
                for one in self._profiles(device)
            ],
            "instances": [
                {
                    "id": one.id,
                    "profile": one.profile,
                    "name": text(one.name),
                    "node": text(one.node),
                    "quota": one.quota[0],
                    "memory": one.memory[0],
                    "used": one.memory[1],
                }
                for one in self._instances(device)
            ],
        }

    def _profiles(self, device: ctypes.c_int) -> list[_Profile]:
        ids = self._new(_ProfileIds)
        self._call("cndevGetSMluProfileIdInfo", ctypes.byref(ids), device)
        if not 0 <= ids.count <= _PROFILES:
            raise nonsense(f"{ids.count} sMLU profiles")
        found = []
        for number in ids.ids[: ids.count]:
            profile = self._new(_Profile)
            arguments = (ctypes.byref(profile), ctypes.c_int(number), device)
            self._call("cndevGetSMluProfileInfo", *arguments)
            found.append(profile)
        return found

    def _instances(self, device: ctypes.c_int) -> list[_Instance]:
        count = ctypes.c_int(_INSTANCES)
        found = (_Instance * _INSTANCES)()
        found[0].version = self._version
        self._call("cndevGetAllSMluInstanceInfo", ctypes.byref(count), ctypes.byref(found), device)
        if not 0 <= count.value <= _INSTANCES:
            raise nonsense(f"{count.value} sMLU instances")
        return list(found[: count.value])

    # ---- calls ----------------------------------------------------------------------------------

    def _counted(self) -> int:
        count = self._new(_Count)
        self._call("cndevGetDeviceCount", ctypes.byref(count))
        if not 0 <= count.number <= _CARDS:
            raise nonsense(f"there are {count.number} cards")
        return int(count.number)

    def _find(self, uuid: str) -> ctypes.c_int:
        for slot in range(self._count):
            device = self._device(slot)
            if self._uuid(device) == uuid:
                return device
        raise Trouble(Kind.GONE, f"there is no card {uuid}")

    def _device(self, slot: int) -> ctypes.c_int:
        call, device = "cndevGetDeviceHandleByIndex", ctypes.c_int(slot)
        if self._library.has(call):
            self._call(call, ctypes.c_int(slot), ctypes.byref(device))
        return device

    def _try_device(self, slot: int) -> ctypes.c_int | None:
        try:
            return self._device(slot)
        except Failed:
            return None

    def _uuid(self, device: ctypes.c_int) -> str:
        found = self._new(_Uuid)
        self._call("cndevGetUUID", ctypes.byref(found), device)
        return _uuid_in(found.uuid)

    def _new(self, kind: type[Structure]) -> Structure:
        """Return an empty structure with its version number set."""
        return roomy(kind, version=self._version)

    def _told(self, call: str, into: ctypes.Structure, *arguments: object) -> bool:
        return self._library.told(call, ctypes.byref(into), *arguments)


def _uuid_in(raw: Sequence[int]) -> str:
    return text(bytes(raw)).lower()


def _identity(uuid: str) -> str:
    return f"MLU-{uuid}" if uuid else ""


def _broken(health: _Health) -> str:
    """Return why the library reports a card as broken; empty: it is healthy."""
    if health.health == _GOOD and health.device in (_NOT_TOLD, _GOOD):
        if health.driver in (_NOT_TOLD, _RUNNING):
            return ""
        return f"the driver's state is {_DRIVER_STATES.get(health.driver, health.driver)}"
    return "the device is in problem"


PROGRAM = Program(
    vendor="cambricon",
    word="cndev",
    files=("libcndev.so",),
    folders=("$NEUWARE_HOME/lib64", "/usr/local/neuware/lib64"),
    errors=Errors(names=_NAMES, kinds=_KINDS, of_call=_KINDS_OF_CALL),
    open=Cndev,
    needed=("cndevInit", "cndevGetDeviceCount", "cndevGetUUID", "cndevGetCardHealthState"),
    commands={
        "glance": Cndev.glance,
        "survey": Cndev.survey,
        "list": lambda cndev: {"cards": cndev.cards()},
        "create": lambda cndev, uuid, quota, size, name: cndev.create(
            uuid, int(quota), int(size), name
        ),
        "destroy": lambda cndev, uuid, instance: cndev.destroy(uuid, int(instance)),
        "tidy": Cndev.tidy,
    },
)

if __name__ == "__main__":
    main(PROGRAM)
