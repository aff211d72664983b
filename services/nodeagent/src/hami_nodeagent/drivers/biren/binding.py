# SPDX-License-Identifier: Apache-2.0
"""Biren's library BRML: cards, or the instances of a card that SVI divides.

Commands::

    glance    devices: health and use
    survey    besides: how they are linked

Both print devices as ``drivers.parse.library`` has them. Structures and calls are those of the
vendor's header ``brml.h`` (API version 1) as its public Go binding ships it: memory in bytes, power
in milliwatts. A device's index is its node id, which names ``/dev/biren/card_<N>``; under SVI each
instance has one of its own. Never run on this vendor's hardware.
"""

import ctypes
from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

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

_CARDS, _PARTS, _PROCESSES = 256, 4, 4096
_NAMES = {
    1: "UNINITIALIZED", 2: "INVALID_ARGUMENT", 3: "NOT_SUPPORTED", 4: "NO_PERMISSION",
    5: "NOT_FOUND", 6: "INSUFFICIENT_SIZE", 7: "DRIVER_NOT_LOADED", 8: "TIMEOUT",
    9: "UNEXPECTED_DATA", 10: "UNEXPECTED_SIZE", 11: "NO_DATA", 12: "INSUFFICIENT_RESOURCES",
    13: "FILE_ERROR", 14: "INTERRUPT", 15: "BUSY", 16: "DRIVER_VERSION_MISMATCH", 17: "IN_USE",
    255: "UNKNOWN",
}  # fmt: skip
_KINDS = {
    3: Kind.UNSUPPORTED,
    4: Kind.DENIED,
    5: Kind.GONE,
    7: Kind.MISSING,
    15: Kind.BUSY,
    16: Kind.MISMATCH,
    17: Kind.BUSY,
}
_NO_PROCESS, _TOO_FEW = 5, 6
_OK, _WARNING, _ERROR = 0, 1, 3
_HEALTH = {2: "health: critical warning", _ERROR: "health: error"}
_LEVELS = {
    0: "internal", 10: "single", 20: "multiple", 30: "hostbridge", 40: "node", 50: "system",
}  # fmt: skip
_DIRECT = 2
_GPU_SENSOR = 0
_MIB, _MILLI = 1 << 20, 1000
_UNKNOWN_NODE = 1 << 16
_VERSION_SIZE, _UUID_SIZE = 80, 80
_Device = ctypes.c_void_p
"""A handle."""


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("host", ctypes.c_ulonglong),
    )


class _Info(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 96),
        ("id", ctypes.c_char * 96),
        ("serial", ctypes.c_char * 96),
        ("board", ctypes.c_char * 96),
    )


class _Pci(ctypes.Structure):
    _fields_ = (
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("function", ctypes.c_uint),
        ("ids", ctypes.c_uint * 2),
        ("address", ctypes.c_char * 32),
    )


class _Link(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("count", ctypes.c_uint), ("ports", ctypes.c_uint * 8))


class _Part(NamedTuple):
    """A card, or an instance of one."""

    place: int
    """The card's."""
    handle: ctypes.c_void_p
    card: ctypes.c_void_p
    """Handle for health, temperature and power."""
    parts: int
    """Number of instances into which the card is divided; 1: not divided."""


class Brml:
    """The opened library."""

    def __init__(self, library: Library) -> None:
        """Initialise it."""
        self._library = library
        self._call, self._told, self._number = library.call, library.told, library.number
        self._call("brmlInit")

    def glance(self) -> dict[str, Any]:
        """Health and use."""
        return self._answer()[0]

    def survey(self) -> dict[str, Any]:
        """Everything."""
        answer, whole = self._answer()
        return {**answer, "links": self._links(whole)}

    def _answer(self) -> tuple[dict[str, Any], dict[int, ctypes.c_void_p]]:
        """Devices, and handles of cards that are not divided, by number."""
        version = ctypes.create_string_buffer(_VERSION_SIZE + 1)
        told = self._told("brmlSystemGetDriverVersion", version, ctypes.c_uint(_VERSION_SIZE))
        devices: list[dict[str, Any]] = []
        problems: list[str] = []
        whole: dict[int, ctypes.c_void_p] = {}
        for index in range(self._count()):
            try:
                parts = self._parts(index)
                found = [self._device(part) for part in parts]
            except Failed as error:
                problems.append(f"card {index}: {error.words}")
                continue
            devices += found
            if parts[0].parts == 1:
                whole[found[0]["index"]] = parts[0].handle
        told_version = text(version.raw) if told else ""
        return {"version": told_version, "devices": devices, "problems": problems}, whole

    def _count(self) -> int:
        count = ctypes.c_uint(0)
        self._call("brmlDeviceGetCount", ctypes.byref(count))
        if count.value > _CARDS:
            raise nonsense(f"there are {count.value} cards")
        return count.value

    def _parts(self, index: int) -> list[_Part]:
        """The card itself, or its instances."""
        card = _Device()
        self._call("brmlDeviceGetHandleByIndex", ctypes.c_uint(index), ctypes.byref(card))
        mode, pending = ctypes.c_uint(0), ctypes.c_uint(0)
        self._told("brmlDeviceGetSviMode", card, ctypes.byref(mode), ctypes.byref(pending))
        if mode.value <= 1:
            return [_Part(index, card, card, 1)]
        if mode.value > _PARTS:
            raise nonsense(f"card {index} has {mode.value} instances")
        found = []
        for number in range(mode.value):
            part = _Device()
            self._call(
                *("brmlDeviceGetGpuInstanceById", card),
                *(ctypes.c_uint(number), ctypes.byref(part)),
            )
            found.append(_Part(index, part, card, mode.value))
        return found

    def _device(self, part: _Part) -> dict[str, Any]:
        number = ctypes.c_uint(0)
        self._call("brmlDeviceGetNodeId", part.handle, ctypes.byref(number))
        memory, load = roomy(_Memory), roomy(_Utilization)
        has_memory = self._told("brmlDeviceGetMemoryInfo", part.handle, ctypes.byref(memory))
        has_load = self._told("brmlDeviceGetUtilizationRates", part.handle, ctypes.byref(load))
        heat, sensor = "brmlDeviceGetTemperature", ctypes.c_uint(_GPU_SENSOR)
        milliwatts = self._number("brmlDeviceGetPowerUsage", ctypes.c_uint, part.card)
        return {
            "index": number.value,
            "minor": number.value,
            "memory_mib": memory.total // _MIB if has_memory else None,
            "used_mib": memory.used // _MIB if has_memory else None,
            "core_pct": load.gpu if has_load else None,
            "memory_bus_pct": load.memory if has_load else None,
            "temperature_c": self._number(heat, ctypes.c_uint, part.card, sensor),
            "power_w": None if milliwatts is None else milliwatts / _MILLI,
            "processes": self._processes(part),
            **self._health(part),
            **self._place(part),
        }

    def _health(self, part: _Part) -> dict[str, Any]:
        """Return the health problem; empty if healthy or not reported."""
        call, health = "brmlDeviceGetHealthStatus", ctypes.c_uint(_OK)
        try:
            if self._library.has(call):
                self._call(call, part.card, ctypes.byref(health))
        except Failed as error:
            return {} if error.kind is Kind.UNSUPPORTED else {"trouble": error.plain()}
        if health.value <= _WARNING:
            return {}
        words = _HEALTH.get(health.value, f"health: {health.value}")
        if health.value == _ERROR:
            return {"broken": words}
        return {"trouble": Trouble(Kind.TRANSIENT, words, health.value).plain()}

    def _place(self, part: _Part) -> dict[str, Any]:
        pci, info = roomy(_Pci), roomy(_Info)
        uuid = ctypes.create_string_buffer(_UUID_SIZE + 1)
        has_pci = self._told("brmlDeviceGetPciInfo", part.card, ctypes.byref(pci))
        has_info = self._told("brmlDeviceGetGpuInfo", part.card, ctypes.byref(info))
        has_uuid = self._told("brmlDeviceGetUUID", part.handle, uuid, ctypes.c_uint(_UUID_SIZE))
        node = self._number("brmlDeviceGetNumaNode", ctypes.c_uint, part.card)
        attributes = {
            "product": text(info.name) if has_info else "",
            "serial": text(info.serial) if has_info else "",
            "uuid": text(uuid.raw) if has_uuid else "",
            "svi": f"1/{part.parts}" if part.parts > 1 else "",
        }
        address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.{pci.function:x}"
        return {
            "bus_id": address if has_pci else "",
            "numa": node if node is not None and node < _UNKNOWN_NODE else None,
            "attributes": {key: word for key, word in attributes.items() if word},
        }

    def _processes(self, part: _Part) -> list[list[int]] | None:
        """Return process ids and MiB; ``None``: not reported."""
        name = "brmlDeviceGetComputeRunningProcesses"
        if not self._library.has(name):
            return None
        room = 256
        while room <= _PROCESSES:
            count, found = ctypes.c_uint(room), (_Process * room)()
            code = self._library.code(name, part.handle, ctypes.byref(count), ctypes.byref(found))
            if code == _NO_PROCESS:
                return []
            if code == _TOO_FEW:
                room *= 4
                continue
            if code:
                return None
            if count.value > room:
                raise nonsense(f"{count.value} processes on card {part.place}")
            return [[one.pid, one.used // _MIB] for one in found[: count.value]]
        return None

    def _links(self, cards: Mapping[int, ctypes.c_void_p]) -> list[list[int | str]]:
        """Number, number, level and ports that are directly connected."""
        links: list[list[int | str]] = []
        for a, b in combinations(sorted(cards), 2):
            pair = (cards[a], cards[b])
            level = self._number("brmlDeviceGetTopologyCommonAncestor", ctypes.c_uint, *pair)
            if level not in _LEVELS:
                continue
            link = roomy(_Link)
            told = self._told("brmlDeviceGetP2PStatus_v2", *pair, ctypes.byref(link))
            direct = link.count if told and link.type == _DIRECT else 0
            links.append([a, b, _LEVELS[level], min(direct, len(link.ports))])
        return links


PROGRAM = Program(
    vendor="biren",
    word="brml",
    files=("libbiren-ml.so",),
    folders=(),
    errors=Errors(names=_NAMES, kinds=_KINDS),
    open=Brml,
    commands={"glance": Brml.glance, "survey": Brml.survey},
    needed=("brmlInit", "brmlDeviceGetCount", "brmlDeviceGetHandleByIndex", "brmlDeviceGetNodeId"),
)

if __name__ == "__main__":
    main(PROGRAM)
