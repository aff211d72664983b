# SPDX-License-Identifier: Apache-2.0
"""Enflame's library EFML: cards, their condition and use, and the links between them.

::

    python -I -m hami_nodeagent.drivers.enflame.binding FILE glance     cards
    python -I -m hami_nodeagent.drivers.enflame.binding FILE survey     besides: links

Calls, structures and numbers are those of ``efml.h`` of 2024-2025 as the vendor's exporter ships it
(calls that begin with a capital letter); if a library of before 2024 lacks a call, the program uses
its predecessor (ESL for GCU-LARE, ``EfmlGetDevTemp`` for ``EfmlGetDevTempV2``). Units follow the
vendor's Go code: the size of the memory in bytes and its use in MiB, load in percent, power in
watts.

The unit of a process' memory is in no header, so it is not reported; the library has no call for
DRS instances. A card that cannot be read has its ``trouble`` in the output. The program changes
nothing. The library reserves SIGUSR1 and SIGUSR2. Never run on this vendor's hardware.
"""

import ctypes
import math
import signal
from itertools import combinations
from typing import Any

from hami_nodeagent.libraries import loading
from hami_nodeagent.libraries.loading import Errors, Failed, Kind, Library, Program, Trouble

_MOST_CARDS = 128
_MOST_PROCESSES = 64
_MOST_PORTS = 64
_TEXT_SIZE = 128
_ROOM = 1024
"""Size of buffers whose length the library does not receive; larger than its header requires."""
_SRIOV_PF = 3

_ERRORS = Errors(
    names={
        1: "UNINITIALIZED", 2: "INVALID_ARGUMENT", 3: "NOT_SUPPORTED", 4: "LIBRARY_NOT_FOUND",
        5: "INVALID_ERROR_CODE", 6: "DRIVER_NOT_LOADED", 7: "GCU_LARE_PORT_NUMBER_ERR",
        8: "INVALID_INPUT", 9: "FUNCTION_NOT_FOUND", 10: "OPEN_DRIVER_VERSION",
        11: "DRIVER_NOT_COMPATIBLE", 12: "NO_DEVICE", 13: "DEPRECATION", 253: "TIMEOUT",
        254: "FAIL",
    },
    kinds={
        3: Kind.UNSUPPORTED,
        4: Kind.UNUSABLE,
        6: Kind.MISSING,
        9: Kind.UNSUPPORTED,
        10: Kind.MISSING,
        11: Kind.MISMATCH,
        12: Kind.ABSENT,
        13: Kind.UNSUPPORTED,
    },
)  # fmt: skip


class _Info(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * _TEXT_SIZE),
        ("maker", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("domain", ctypes.c_uint32),
        ("bus", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        ("function", ctypes.c_uint32),
        ("logic", ctypes.c_uint32),
    )


class _Memory(ctypes.Structure):
    _fields_ = (("total_bytes", ctypes.c_uint64), ("used_mib", ctypes.c_uint32))


class _Thermal(ctypes.Structure):
    _fields_ = (
        ("chip", ctypes.c_float),
        ("memory", ctypes.c_float),
        ("board", ctypes.c_float),
    )


class _Power(ctypes.Structure):
    _fields_ = (("limit", ctypes.c_float), ("now", ctypes.c_float))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint32),
        ("device", ctypes.c_uint64),
        ("system", ctypes.c_uint64),
    )


_PLACE = ("card", "uuid", "maker", "device", "domain", "bus", "slot", "function", "port", "kind")


class _End(ctypes.Structure):
    """One end of a port: ``card`` of the near end shows if the port is connected."""

    _fields_ = tuple(
        (name, ctypes.c_char * 16 if name == "uuid" else ctypes.c_uint32) for name in _PLACE
    )


class _Port(ctypes.Structure):
    _fields_ = (("near", _End), ("far", _End))


class Efml:
    """The initialised library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        library.call("EfmlInit", ctypes.c_bool(False))  # noqa: FBT003 - C knows no names

    def glance(self) -> dict[str, Any]:
        """All cards."""
        count = ctypes.c_uint32(0)
        self._library.call("EfmlGetDevCount", ctypes.byref(count))
        if not count.value:
            raise Trouble(Kind.ABSENT, "the library lists no device")
        if count.value > _MOST_CARDS:
            raise loading.nonsense(f"{count.value} devices")
        version = ctypes.create_string_buffer(_ROOM)
        told = self._library.told("EfmlGetDriverVer", version)
        return {
            "version": loading.text(version.raw) if told else "",
            "devices": [self._card(number) for number in range(count.value)],
        }

    def survey(self) -> dict[str, Any]:
        """Return all cards and their links."""
        answer = self.glance()
        cards = {one["bus_id"]: one["index"] for one in answer["devices"] if "bus_id" in one}
        seen = {
            number: [cards[far] for far in self._far_ends(number) if far in cards]
            for number in cards.values()
        }
        # A link counts if both ends report it.
        counted = (
            (a, b, min(seen[a].count(b), seen[b].count(a))) for a, b in combinations(seen, 2)
        )
        return {**answer, "links": [(a, b, "node", count) for a, b, count in counted if count]}

    def _card(self, index: int) -> dict[str, Any]:
        library, number = self._library, ctypes.c_uint32(index)
        info, memory, health = _Info(), _Memory(), ctypes.c_bool(False)  # noqa: FBT003
        asked = "EfmlGetDevHealth" if library.has("EfmlGetDevHealth") else "EfmlGetDevIsHealth"
        answer: dict[str, Any] = {"index": index}
        try:
            library.call("EfmlGetDevInfo", number, ctypes.byref(info))
            answer["bus_id"] = _address(info.domain, info.bus, info.slot, info.function)
            serial = self._text("EfmlGetDevSn", number)
            answer["uuid"] = f"GCU-{serial}" if serial else ""
            library.call(asked, number, ctypes.byref(health))
            library.call("EfmlGetDevMem", number, ctypes.byref(memory))
        except Failed as trouble:
            return {**answer, "trouble": trouble.plain()}
        logic = library.number("EfmlGetDevLogicId", ctypes.c_uint32, number)
        mode = library.number("EfmlGetGcuVirtStatus", ctypes.c_uint32, number)
        attributes = {"serial": serial, "dev_uuid": self._text("EfmlGetDevUuid", number)}
        return {
            **answer,
            "name": self._text("EfmlGetDevSKU", number) or loading.text(info.name),
            "minor": info.logic if logic is None else logic,
            "numa": library.number("EfmlGetNumaNode", ctypes.c_int, number),
            "mode": "sriov" if mode == _SRIOV_PF else "whole",
            "attributes": {key: value for key, value in attributes.items() if value},
            "broken": "" if health.value else f"{asked}: false",
            "memory_mib": memory.total_bytes >> 20,
            "used_mib": memory.used_mib,
            "core_pct": self._real("EfmlGetDevDtuUsage", number),
            "temperature_c": self._temperature(number),
            "power_w": self._power(number),
            "processes": self._processes(number),
        }

    def _temperature(self, number: ctypes.c_uint32) -> float | None:
        found = _Thermal()
        for call in ("EfmlGetDevTempV2", "EfmlGetDevTemp"):
            if self._library.told(call, number, ctypes.byref(found)):
                return _finite(found.chip)
        return None

    def _power(self, number: ctypes.c_uint32) -> float | None:
        found = _Power()
        told = self._library.told("EfmlGetDevPwr", number, ctypes.byref(found))
        return _finite(found.now) if told else None

    def _real(self, call: str, number: ctypes.c_uint32) -> float | None:
        found = ctypes.c_float(0.0)
        told = self._library.told(call, number, ctypes.byref(found))
        return _finite(found.value) if told else None

    def _text(self, call: str, number: ctypes.c_uint32) -> str:
        found = ctypes.create_string_buffer(_ROOM)
        return loading.text(found.raw) if self._library.told(call, number, found) else ""

    def _processes(self, number: ctypes.c_uint32) -> list[tuple[int, None]] | None:
        # Larger than the header's maximum, because the call does not receive the size of the
        # buffer.
        count, found = ctypes.c_uint32(_MOST_PROCESSES), (_Process * (4 * _MOST_PROCESSES))()
        arguments = (ctypes.byref(count), ctypes.byref(found))
        if not self._library.told("EfmlGetProcessInfo", number, *arguments):
            return None
        if count.value > len(found):
            raise loading.nonsense(f"{count.value} processes on one device")
        return [(one.pid, None) for one in found[: count.value]]

    def _far_ends(self, index: int) -> list[str]:
        """The card at the other end of each port that is connected, by its address."""
        number, found = ctypes.c_uint32(index), []
        for kind in ("GcuLare", "Esl"):
            ports = self._library.number(f"EfmlGet{kind}PortNum", ctypes.c_uint32, number)
            if ports is not None:
                break
        else:
            return []
        if ports > _MOST_PORTS:
            raise loading.nonsense(f"{ports} ports of one device")
        for at in range(ports):
            port, call = _Port(), f"EfmlGet{kind}PortInfo"
            told = self._library.told(call, number, ctypes.c_uint32(at), ctypes.byref(port))
            if told and port.near.card:
                far = port.far
                found.append(_address(far.domain, far.bus, far.slot, far.function))
        return found


def _address(domain: int, bus: int, slot: int, function: int) -> str:
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


PROGRAM = Program(
    vendor="enflame",
    word="efml",
    files=("libefml.so", "libefml-arm.so"),
    folders=("/usr/local/efsmi", "/usr/local/efsmi/lib"),
    errors=_ERRORS,
    open=Efml,
    commands={"glance": Efml.glance, "survey": Efml.survey},
    needed=("EfmlInit", "EfmlGetDevCount", "EfmlGetDevInfo", "EfmlGetDevSn", "EfmlGetDevMem"),
)

if __name__ == "__main__":
    for _signal in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(_signal, signal.SIG_IGN)
    loading.main(PROGRAM)
