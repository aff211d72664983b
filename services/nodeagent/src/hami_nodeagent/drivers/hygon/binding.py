# SPDX-License-Identifier: Apache-2.0
"""Hygon's libraries RSMI (librocm_smi64) and DMI (libhydmi): cards, their use, health and links.

Commands: ``glance`` (identity, use, health, processes) and ``survey`` (besides: NUMA, compute
units, links). Calls, structures and numbers are those of ``rocm_smi.h``, ``dmi_virtual.h`` and
``dmi_error.h`` as Hygon publishes them with its management library for HCUs (2024 to 2026): sizes
in bytes, temperature in thousandths of a degree, power in microwatts. If releases differ in the
length of a structure, the buffer fits the longest.

A card is broken if one of its blocks counts uncorrectable errors. Only DMI reports compute units;
the vendor's Go code uses the same card numbers for it. Without DMI they are not reported. Never run
on this vendor's hardware.
"""

import ctypes
from typing import Any

from hami_nodeagent.libraries.loading import (
    Errors,
    Failed,
    Kind,
    Library,
    Program,
    Trouble,
    beside,
    main,
    mib,
    nonsense,
    text,
)

_VENDOR = 0x1D94
_NAMES = {
    1: "INVALID_ARGS", 2: "NOT_SUPPORTED", 3: "FILE_ERROR", 4: "PERMISSION",
    5: "OUT_OF_RESOURCES", 6: "INTERNAL_EXCEPTION", 7: "INPUT_OUT_OF_BOUNDS", 8: "INIT_ERROR",
    9: "NOT_YET_IMPLEMENTED", 10: "NOT_FOUND", 11: "INSUFFICIENT_SIZE", 12: "INTERRUPT",
    13: "UNEXPECTED_SIZE", 14: "NO_DATA", 15: "UNEXPECTED_DATA", 16: "BUSY",
    17: "REFCOUNT_OVERFLOW", 18: "SETTING_UNAVAILABLE", 19: "AMDGPU_RESTART_ERR",
    -1: "UNKNOWN_ERROR",
}  # fmt: skip
_KINDS = {2: Kind.UNSUPPORTED, 4: Kind.DENIED, 9: Kind.UNSUPPORTED, 16: Kind.BUSY}
_NOT_INITIALISED = {("rsmi_init", 8): Kind.MISSING}
_MOST_CARDS, _MOST_PROCESSES, _MORE = 64, 4096, 16
_TEXT = 256
_VRAM = 0
_CURRENT = 0
_SENSORS = (0, 1, 2)
"""Edge, junction, memory: hy-smi shows the first that is there."""
_BLOCKS = 14
"""Blocks that count errors have the numbers 1, 2, 4 and so on."""
_FABRIC = 2
_SAME_SOCKET = 2
"""Hops of a way through one processor."""
_NO_DRIVER = 0
_MOST_UNITS = 128


class _Counts(ctypes.Structure):
    _fields_ = (
        ("correctable", ctypes.c_uint64),
        ("uncorrectable", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 14),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint32),
        ("pasid", ctypes.c_uint32),
        ("vram", ctypes.c_uint64),
        ("sdma", ctypes.c_uint64),
        ("occupancy", ctypes.c_uint32),
    )


class _DmiDevice(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * _TEXT),
        ("compute_units", ctypes.c_int),
        ("memory", ctypes.c_size_t),
        ("used", ctypes.c_size_t),
        ("container", ctypes.c_uint64),
        ("device", ctypes.c_int),
        ("room", ctypes.c_uint64 * 8),
    )


class Rsmi:
    """The opened library."""

    def __init__(self, library: Library) -> None:
        """Initialise it."""
        self._library = library
        library.call("rsmi_init", ctypes.c_uint64(0))

    def glance(self) -> dict[str, Any]:
        """Identity, use and health of every card."""
        processes = self._processes()
        cards = [self._card(number) for number in self._numbers()]
        for card in cards:
            card["processes"] = None if processes is None else processes.get(card["index"], [])
        return {"devices": cards}

    def survey(self) -> dict[str, Any]:
        """Return the data of ``glance`` and the values that do not change."""
        answer = self.glance()
        dmi = beside(self._library, DMI)
        numbers = [card["index"] for card in answer["devices"]]
        for card in answer["devices"]:
            number = card["index"]
            card["numa"] = self._library.number(
                "rsmi_topo_get_numa_node_number", ctypes.c_uint32, number
            )
            units = None if dmi is None else _units(dmi, number)
            if units is not None:
                card["attributes"]["compute_units"] = str(units)
        links = [self._link(a, b) for at, a in enumerate(numbers) for b in numbers[at + 1 :]]
        return {**answer, "links": [link for link in links if link is not None]}

    def _numbers(self) -> list[int]:
        count = ctypes.c_uint32(0)
        self._library.call("rsmi_num_monitor_devices", ctypes.byref(count))
        if count.value > _MOST_CARDS:
            raise nonsense(f"there are {count.value} cards")
        if not count.value:
            state = self._library.number("rsmi_driver_status", ctypes.c_uint32)
            missing = state == _NO_DRIVER
            words = "the driver is not loaded" if missing else "the library lists no card"
            raise Trouble(Kind.MISSING if missing else Kind.ABSENT, words)
        makers = [
            self._library.number("rsmi_dev_vendor_id_get", ctypes.c_uint16, number)
            for number in range(count.value)
        ]
        return [number for number, maker in enumerate(makers) if maker in (None, _VENDOR)]

    def _card(self, number: int) -> dict[str, Any]:
        card: dict[str, Any] = {"index": number, "attributes": {}, "trouble": None}
        try:
            card["uuid"] = self._text("rsmi_dev_serial_number_get", number)
            card["bus_id"] = self._bus_id(number)
            card["memory_mib"] = mib(self._size("rsmi_dev_memory_total_get", number))
            card["used_mib"] = mib(self._size("rsmi_dev_memory_usage_get", number))
        except Failed as error:
            card["trouble"] = error.plain()
        unique = self._library.number("rsmi_dev_unique_id_get", ctypes.c_uint64, number)
        if unique:
            card["attributes"]["unique_id"] = f"{unique:#x}"
        power = self._library.number("rsmi_dev_power_ave_get", ctypes.c_uint64, number, 0)
        return {
            **card,
            "name": self._name(number),
            "core_pct": self._library.number("rsmi_dev_busy_percent_get", ctypes.c_uint32, number),
            "memory_bus_pct": self._library.number(
                "rsmi_dev_memory_busy_percent_get", ctypes.c_uint32, number
            ),
            "temperature_c": self._temperature_c(number),
            "power_w": None if power is None else power / 1e6,
            "broken": self._broken(number),
        }

    def _bus_id(self, number: int) -> str:
        found = ctypes.c_uint64(0)
        self._library.call("rsmi_dev_pci_id_get", number, ctypes.byref(found))
        place = found.value
        bus, device, function = place >> 8 & 0xFF, place >> 3 & 0x1F, place & 7
        return f"{place >> 32 & 0xFFFFFFFF:04x}:{bus:02x}:{device:02x}.{function}"

    def _size(self, name: str, number: int) -> int:
        found = ctypes.c_uint64(0)
        self._library.call(name, number, _VRAM, ctypes.byref(found))
        return found.value

    def _text(self, name: str, number: int) -> str:
        found = ctypes.create_string_buffer(_TEXT)
        self._library.call(name, number, found, ctypes.c_size_t(_TEXT))
        return text(found.raw)

    def _name(self, number: int) -> str:
        for name in ("rsmi_dev_name_get", "rsmi_dev_subsystem_name_get"):
            try:
                found = self._text(name, number)
            except Failed:
                continue
            if found:
                return found
        return ""

    def _temperature_c(self, number: int) -> float | None:
        for sensor in _SENSORS:
            found = self._library.number(
                "rsmi_dev_temp_metric_get",
                ctypes.c_int64,
                number,
                ctypes.c_uint32(sensor),
                _CURRENT,
            )
            if found is not None:
                return found / 1000
        return None

    def _broken(self, number: int) -> str:
        errors = 0
        for bit in range(_BLOCKS):
            counts, block = _Counts(), ctypes.c_uint64(1 << bit)
            name = "rsmi_dev_ecc_count_get"
            if self._library.told(name, number, block, ctypes.byref(counts)):
                errors += counts.uncorrectable
        return f"{errors} uncorrectable errors" if errors else ""

    def _processes(self) -> dict[int, list[list[int | None]]] | None:
        """Return processes by card; ``None`` where the library does not report them."""
        count = ctypes.c_uint32(0)
        name = "rsmi_compute_process_info_get"
        if not self._library.told(name, None, ctypes.byref(count)):
            return None
        if count.value > _MOST_PROCESSES:
            raise nonsense(f"there are {count.value} processes")
        count = ctypes.c_uint32(count.value + _MORE)
        found = (_Process * count.value)()
        if not self._library.told(name, ctypes.byref(found), ctypes.byref(count)):
            return None
        by_card: dict[int, list[list[int | None]]] = {}
        for process in found[: min(count.value, len(found))]:
            for card in self._cards_of(process.pid):
                by_card.setdefault(card, []).append([process.pid, self._used(process.pid, card)])
        return by_card

    def _cards_of(self, pid: int) -> list[int]:
        count, cards = ctypes.c_uint32(_MOST_CARDS), (ctypes.c_uint32 * _MOST_CARDS)()
        arguments = (ctypes.c_uint32(pid), ctypes.byref(cards), ctypes.byref(count))
        told = self._library.told("rsmi_compute_process_gpus_get", *arguments)
        return list(cards[: min(count.value, _MOST_CARDS)]) if told else []

    def _used(self, pid: int, card: int) -> int | None:
        found = _Process()
        arguments = (ctypes.c_uint32(pid), ctypes.c_uint32(card), ctypes.byref(found))
        told = self._library.told("rsmi_compute_process_info_by_device_get", *arguments)
        return mib(found.vram) if told else None

    def _link(self, a: int, b: int) -> tuple[int, int, str, int] | None:
        hops, kind = ctypes.c_uint64(0), ctypes.c_int(0)
        arguments = (a, b, ctypes.byref(hops), ctypes.byref(kind))
        if not self._library.told("rsmi_topo_get_link_type", *arguments):
            return None
        if kind.value == _FABRIC:
            return a, b, "node", 1
        return a, b, "node" if hops.value <= _SAME_SOCKET else "system", 0


def _units(dmi: Library, number: int) -> int | None:
    found = _DmiDevice()
    told = dmi.told("dmiGetDeviceInfo", number, ctypes.byref(found))
    return found.compute_units if told and 0 < found.compute_units <= _MOST_UNITS else None


_FOLDERS = ("/opt/hyhal/lib", "/opt/hyhal/lib64", "/opt/dtk/rocm_smi/lib", "/opt/dtk/lib")
DMI = Program(
    vendor="hygon",
    word="dmi",
    files=("libhydmi.so",),
    folders=_FOLDERS,
    errors=Errors(names={}, kinds={}),
    open=lambda library: library,
    commands={},
)
PROGRAM = Program(
    vendor="hygon",
    word="rsmi",
    files=("librocm_smi64.so",),
    folders=_FOLDERS,
    errors=Errors(names=_NAMES, kinds=_KINDS, of_call=_NOT_INITIALISED),
    open=Rsmi,
    commands={"glance": Rsmi.glance, "survey": Rsmi.survey},
    needed=(
        "rsmi_init",
        "rsmi_num_monitor_devices",
        "rsmi_dev_serial_number_get",
        "rsmi_dev_pci_id_get",
        "rsmi_dev_memory_total_get",
        "rsmi_dev_memory_usage_get",
    ),
    needed_folders=("/opt/hyhal/lib",),
)

if __name__ == "__main__":
    main(PROGRAM)
