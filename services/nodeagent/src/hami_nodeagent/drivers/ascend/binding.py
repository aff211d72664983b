# SPDX-License-Identifier: Apache-2.0
"""Huawei's library DCMI: chips, their use and vNPUs.

Commands::

    glance                            chips: health and use
    look                              besides: identity, division, vNPUs
    survey                            besides: links
    create CARD CHIP TEMPLATE ID
    destroy CARD CHIP ID
    keep                              vNPUs survive a reboot of the host
    share CARD CHIP 0|1               several containers may open the chip
    wait SECONDS                      faults that chips report; ends at the first

Structures and calls are those of the vendor's header ``dcmi_interface_api.h`` (version 2 calls). In
drivers before 23.0 a vNPU reports its reserved memory as used; the sizes are the same.

``glance``, ``look``, ``survey`` and ``wait`` print JSON, with ``null`` for values that the library
does not report; the other commands print nothing. Sizes are in MiB (the library's MB), memory of
processes in bytes, power in tenths of a watt. Never run on this vendor's hardware.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hami_nodeagent.libraries.loading import (
    Errors,
    Failed,
    Kind,
    Library,
    Program,
    main,
    nonsense,
)

ANY = 0xFFFFFFFF
"""An id that the library chooses."""
_NAMES = {
    -8001: "INVALID_PARAMETER", -8002: "OPER_NOT_PERMITTED", -8003: "MEM_OPERATE_FAIL",
    -8004: "SECURE_FUN_FAIL", -8005: "INNER_ERR", -8006: "TIME_OUT", -8007: "INVALID_DEVICE_ID",
    -8008: "DEVICE_NOT_EXIST", -8009: "IOCTL_FAIL", -8010: "SEND_MSG_FAIL",
    -8011: "RECV_MSG_FAIL", -8012: "NOT_READY", -8013: "NOT_SUPPORT_IN_CONTAINER",
    -8014: "FILE_OPERATE_FAIL", -8015: "RESET_FAIL", -8016: "ABORT_OPERATE", -8017: "IS_UPGRADING",
    -8020: "RESOURCE_OCCUPIED", -8022: "PARTITION_NOT_RIGHT", -8023: "CONFIG_INFO_NOT_EXIST",
    -8255: "NOT_SUPPORT",
}  # fmt: skip
_KINDS = {
    -8001: Kind.UNSUPPORTED,
    -8002: Kind.DENIED,
    -8007: Kind.GONE,
    -8008: Kind.GONE,
    -8013: Kind.UNSUPPORTED,
    -8020: Kind.BUSY,
    -8023: Kind.UNSUPPORTED,
    -8255: Kind.UNSUPPORTED,
}
_KINDS_OF_CALL = {
    ("dcmi_init", -8005): Kind.MISSING,
    ("dcmi_get_card_list", -8005): Kind.MISSING,
    ("dcmi_create_vdevice", -8001): Kind.REFUSED,
}
"""A library without a driver answers with its inner error; a template that no chip has is a bad
parameter."""
_NEEDED = (
    "dcmi_get_card_list",
    "dcmi_get_device_id_in_card",
    "dcmi_get_device_logic_id",
    "dcmi_get_device_health",
)
_CARDS, _CHIPS, _VDEVS, _CODES, _PROCESSES = 64, 8, 32, 128, 256
_NPU = 0
_VDIE = 1
_UTILIZATION_AICORE = 2
_FULL_PCT = 100
_CHIP_INFORMATION, _SUPER_POD = 12, 1
_VDEVICES = 52
_ONE, _TOTAL, _FREE = 0, 1, 2
_MEDIA = ("jpegd", "jpege", "vpc", "vdec", "pngd", "venc")


class _Chip(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char * 32),
        ("name", ctypes.c_char * 32),
        ("version", ctypes.c_char * 32),
        ("cores", ctypes.c_uint),
        ("npu", ctypes.c_char * 32),
    )


class _Filter(ctypes.Structure):
    """Empty: every event."""

    _fields_ = (
        ("flag", ctypes.c_ulonglong),
        ("event", ctypes.c_uint),
        ("severity", ctypes.c_ubyte),
        ("node", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 32),
    )


class _Fault(ctypes.Structure):
    _fields_ = (
        ("event", ctypes.c_uint),
        ("chip", ctypes.c_ushort),
        ("nodes", ctypes.c_ubyte * 4),
        ("severity", ctypes.c_ubyte),
        ("assertion", ctypes.c_ubyte),
        ("serial", ctypes.c_int),
        ("notice", ctypes.c_int),
        ("time_s", ctypes.c_ulonglong),
        ("name", ctypes.c_char * 256),
        ("more", ctypes.c_char * 64),
    )


class _Event(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("fault", _Fault))


_Handler = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Event))


class _Pcie(ctypes.Structure):
    _fields_ = (
        ("ids", ctypes.c_uint * 4),
        ("domain", ctypes.c_int),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("function", ctypes.c_uint),
        ("reserved", ctypes.c_ubyte * 32),
    )


class _Die(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint * 5),)


class _Hbm(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_ulonglong),
        ("frequency", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("temperature", ctypes.c_int),
        ("bandwidth_pct", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_ulonglong),
        ("available", ctypes.c_ulonglong),
        ("frequency", ctypes.c_uint),
        ("page_size", ctypes.c_ulong),
        ("pages", ctypes.c_ulong),
        ("pages_free", ctypes.c_ulong),
        ("utilization", ctypes.c_uint),
        ("reserved", ctypes.c_ubyte * 60),
    )


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_int), ("used", ctypes.c_ulong))


class _SuperPod(ctypes.Structure):
    _fields_ = (
        ("sdid", ctypes.c_uint),
        ("size", ctypes.c_uint),
        ("id", ctypes.c_uint),
        ("server", ctypes.c_uint),
        ("chassis", ctypes.c_uint),
        ("kind", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 6),
    )


class _Base(ctypes.Structure):
    _fields_ = (
        ("token", ctypes.c_ulonglong * 3),
        ("group", ctypes.c_uint),
        ("vip", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 31),
    )


class _Computing(ctypes.Structure):
    _fields_ = (
        ("aic", ctypes.c_float),
        ("aiv", ctypes.c_float),
        ("queues", ctypes.c_ushort * 8),
        ("memory_size", ctypes.c_ulonglong),
        ("ids", ctypes.c_uint * 4),
        ("host_cpus", ctypes.c_ushort * 3),
        ("device_aicpu", ctypes.c_ushort),
        ("control_slot", ctypes.c_ushort),
        ("vdev_aicore_utilization", ctypes.c_uint),
        ("vdev_memory_total", ctypes.c_ulonglong),
        ("vdev_memory_free", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ubyte * 12),
    )


class _Media(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_float) for name in _MEDIA),
        ("reserved", ctypes.c_ubyte * 32),
    )


class _VdevInfo(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 16),
        ("status", ctypes.c_uint),
        ("used", ctypes.c_uint),
        ("vf", ctypes.c_uint),
        ("group", ctypes.c_uint),
        ("container", ctypes.c_ulonglong),
        ("base", _Base),
        ("computing", _Computing),
        ("media", _Media),
    )


class _Vdev(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("info", _VdevInfo))


class _Free(ctypes.Structure):
    _fields_ = (
        ("groups", ctypes.c_uint),
        ("group_bits", ctypes.c_uint),
        ("base", _Base),
        ("computing", _Computing),
        ("media", _Media),
    )


class _Total(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_uint),
        ("ids", ctypes.c_uint * _VDEVS),
        ("groups", ctypes.c_uint),
        ("group_bits", ctypes.c_uint),
        ("base", _Base),
        ("computing", _Computing),
        ("media", _Media),
    )


class _Wanted(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint),
        ("group", ctypes.c_uint),
        ("template", ctypes.c_char * 32),
        ("reserved", ctypes.c_ubyte * 64),
    )


class _Made(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint),
        ("pcie", ctypes.c_uint * 3),
        ("group", ctypes.c_uint),
        ("reserved", ctypes.c_ubyte * 64),
    )


Place = tuple[int, int]
"""Card and chip: NPU id and chip id in npu-smi."""


class Dcmi:
    """The opened library."""

    def __init__(self, library: Library) -> None:
        """Initialise it."""
        self._library = library
        self._call, self._told, self._number = library.call, library.told, library.number
        self._call("dcmi_init")

    # ---- reading --------------------------------------------------------------------------------

    def glance(self) -> dict[str, Any]:
        """Health and use of every chip."""
        return self._answer(self._use)

    def look(self) -> dict[str, Any]:
        """Everything of every chip."""
        return self._answer(lambda place: {**self._use(place), **self._identity(place)})

    def survey(self) -> dict[str, Any]:
        """Return the data of ``look`` and the links between chips."""
        answer = self.look()
        places = [(chip["card"], chip["chip"]) for chip in answer["chips"]]
        return {**answer, "links": self._links(places)}

    def _answer(self, of: Callable[[Place], dict[str, Any]]) -> dict[str, Any]:
        version = ctypes.create_string_buffer(256)
        told = self._told("dcmi_get_driver_version", version, ctypes.c_uint(255))
        problems: list[str] = []
        chips = []
        for card in self._cards():
            try:
                count, mcu, cpu = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
                self._call(
                    "dcmi_get_device_id_in_card", card, *map(ctypes.byref, (count, mcu, cpu))
                )
            except Failed as error:
                problems.append(f"card {card}: {error}")
                continue
            if not 0 <= count.value <= _CHIPS:
                raise nonsense(f"card {card} has {count.value} chips")
            for chip in range(count.value):
                kind = self._number("dcmi_get_device_type", ctypes.c_int, card, chip)
                if kind in (None, _NPU):
                    chips.append({"card": card, "chip": chip, **of((card, chip))})
        return {
            "version": version.value.decode("utf-8", "replace") if told else "",
            "chips": chips,
            "problems": problems,
        }

    def _cards(self) -> list[int]:
        count, cards = ctypes.c_int(0), (ctypes.c_int * _CARDS)()
        self._call("dcmi_get_card_list", ctypes.byref(count), ctypes.byref(cards), _CARDS)
        if not 0 <= count.value <= _CARDS:
            raise nonsense(f"there are {count.value} cards")
        return list(cards[: count.value])

    def _use(self, place: Place) -> dict[str, Any]:
        trouble, health = None, ctypes.c_uint(ANY)
        try:
            self._call("dcmi_get_device_health", *place, ctypes.byref(health))
        except Failed as error:
            trouble = error.plain()
        core = self._number(
            "dcmi_get_device_utilization_rate", ctypes.c_uint, *place, _UTILIZATION_AICORE
        )
        return {
            "logic": self._logic(place),
            "name": self._name(place),
            "bus_id": self._bus_id(place),
            "health": None if trouble else health.value,
            "trouble": trouble,
            "codes": self._codes(place),
            "core_pct": core if core is not None and core <= _FULL_PCT else None,
            "temperature_c": self._number("dcmi_get_device_temperature", ctypes.c_int, *place),
            "power_dw": self._number("dcmi_get_device_power_info", ctypes.c_int, *place),
            "processes": self._processes(place),
            **self._memory(place),
        }

    def _identity(self, place: Place) -> dict[str, Any]:
        logic = self._logic(place)
        die, pod = _Die(), _SuperPod()
        has_die = self._told("dcmi_get_device_die_v2", *place, _VDIE, ctypes.byref(die))
        division, refused = None, None
        try:
            division = self._division(place)
        except Failed as error:
            refused = error.plain()
        return {
            "physical": None
            if logic is None
            else self._number(
                "dcmi_get_device_phyid_from_logicid", ctypes.c_uint, ctypes.c_uint(logic)
            ),
            "die": list(die.words) if has_die else None,
            "compatibility": self._number("dcmi_get_device_compatibility", ctypes.c_int, *place),
            "share": self._number("dcmi_get_device_share_enable", ctypes.c_int, *place),
            "super_pod": {"sdid": pod.sdid, "id": pod.id, "server": pod.server}
            if self._information(place, _CHIP_INFORMATION, _SUPER_POD, pod)
            else None,
            "division": division,
            "division_error": refused,
        }

    def _logic(self, place: Place) -> int | None:
        logic = ctypes.c_int(-1)
        told = self._told("dcmi_get_device_logic_id", ctypes.byref(logic), *place)
        return logic.value if told and logic.value >= 0 else None

    def _name(self, place: Place) -> str:
        chip = _Chip()
        for call in ("dcmi_get_device_chip_info_v2", "dcmi_get_device_chip_info"):
            if self._told(call, *place, ctypes.byref(chip)) and chip.name:
                return str(chip.name.decode("utf-8", "replace"))
        return ""

    def _bus_id(self, place: Place) -> str:
        pcie = _Pcie()
        if not self._told("dcmi_get_device_pcie_info_v2", *place, ctypes.byref(pcie)):
            return ""
        return f"{pcie.domain & 0xFFFFFFFF:04x}:{pcie.bus:02x}:{pcie.device:02x}.{pcie.function:x}"

    def _codes(self, place: Place) -> list[int]:
        count, codes = ctypes.c_int(0), (ctypes.c_uint * _CODES)()
        arguments = (ctypes.byref(count), ctypes.byref(codes), ctypes.c_uint(_CODES))
        told = self._told("dcmi_get_device_errorcode_v2", *place, *arguments)
        return list(codes[: min(max(count.value, 0), _CODES)]) if told else []

    def _memory(self, place: Place) -> dict[str, Any]:
        hbm, memory = _Hbm(), _Memory()
        if self._told("dcmi_get_device_hbm_info", *place, ctypes.byref(hbm)) and hbm.size:
            pct = hbm.bandwidth_pct if hbm.bandwidth_pct <= _FULL_PCT else None
            return {"memory_mib": hbm.size, "used_mib": hbm.used, "bandwidth_pct": pct}
        told = self._told("dcmi_get_device_memory_info_v3", *place, ctypes.byref(memory))
        if not told or not memory.size:
            return {"memory_mib": None, "used_mib": None, "bandwidth_pct": None}
        used = max(0, memory.size - memory.available)
        return {"memory_mib": memory.size, "used_mib": used, "bandwidth_pct": None}

    def _processes(self, place: Place) -> list[list[int]] | None:
        count, processes = ctypes.c_int(0), (_Process * _PROCESSES)()
        arguments = (ctypes.byref(processes), ctypes.byref(count))
        if not self._told("dcmi_get_device_resource_info", *place, *arguments):
            return None
        if not 0 <= count.value <= _PROCESSES:
            raise nonsense(f"{count.value} processes on chip {place[0]}/{place[1]}")
        return [[one.pid, one.used] for one in processes[: count.value]]

    def _division(self, place: Place) -> dict[str, Any]:
        total, free = _Total(), _Free()
        self._inform(place, _VDEVICES, _TOTAL, total)
        self._inform(place, _VDEVICES, _FREE, free)
        if total.count > _VDEVS or total.computing.aic > 1 << 16:
            raise nonsense(f"chip {place[0]}/{place[1]} has {total.count} vNPUs")
        vdevs = []
        for number in total.ids[: total.count]:
            one = _Vdev(id=number)
            self._inform(place, _VDEVICES, _ONE, one)
            vdevs.append(
                {
                    "id": number,
                    "name": one.info.name.decode("utf-8", "replace"),
                    "used": one.info.used,
                    "container": one.info.container,
                }
            )
        return {"total": _amounts(total), "free": _amounts(free), "vdevs": vdevs}

    def _links(self, places: Sequence[Place]) -> list[list[int]]:
        links = []
        for number, a in enumerate(places):
            for b in places[number + 1 :]:
                call = "dcmi_get_topo_info_by_device_id"
                kind = self._number(call, ctypes.c_int, *a, *b)
                if kind is not None:
                    links.append([*a, *b, kind])
        return links

    # ---- changing -------------------------------------------------------------------------------

    def create(self, place: Place, template: str, number: int) -> None:
        """A vNPU of that template with that number."""
        wanted = _Wanted(id=number, group=ANY, template=template.encode())
        made = _Made()
        arguments = (ctypes.byref(wanted), ctypes.byref(made))
        self._call("dcmi_create_vdevice", *place, *arguments)

    def destroy(self, place: Place, number: int) -> None:
        """One vNPU."""
        self._call("dcmi_set_destroy_vdevice", *place, ctypes.c_uint(number))

    def keep(self) -> None:
        """Enable the re-creation of vNPUs after a reboot, if it is disabled."""
        mode = self._number("dcmi_get_vnpu_config_recover_mode", ctypes.c_uint)
        if mode == 0:
            self._call("dcmi_set_vnpu_config_recover_mode", ctypes.c_uint(1))

    def share(self, place: Place, *, is_on: bool) -> None:
        """Allow or forbid several containers to open the whole chip; lost at a reboot."""
        self._call("dcmi_set_device_share_enable", *place, int(is_on))

    # ---- faults ---------------------------------------------------------------------------------

    def wait(self, limit_s: float) -> list[dict[str, Any]]:
        """Return the events that chips report until the first event or the timeout.

        The library calls back from a thread of its own. ``chip``: logic id; ``assertion``: 0
        cleared, 1 raised, 2 one-time event.
        """
        faults: list[dict[str, Any]] = []
        came = threading.Event()

        def note(event: Any) -> None:  # noqa: ANN401 - ctypes has no public name for its type
            told = event.contents.fault
            faults.append(
                {
                    "chip": told.chip,
                    "event": told.event,
                    "serial": told.serial,
                    "severity": told.severity,
                    "assertion": told.assertion,
                    "name": told.name.decode("utf-8", "replace"),
                }
            )
            came.set()

        handler = _Handler(note)
        for chip in self._answer(lambda _: {})["chips"]:
            place = (chip["card"], chip["chip"])
            self._call("dcmi_subscribe_fault_event", *place, _Filter(), handler)
        came.wait(limit_s)
        return faults

    # ---- calls ----------------------------------------------------------------------------------

    def _inform(self, place: Place, main: int, sub: int, into: ctypes.Structure) -> None:
        size = ctypes.c_uint(ctypes.sizeof(into))
        arguments = (main, ctypes.c_uint(sub), ctypes.byref(into), ctypes.byref(size))
        self._call("dcmi_get_device_info", *place, *arguments)

    def _information(self, place: Place, main: int, sub: int, into: ctypes.Structure) -> bool:
        try:
            self._inform(place, main, sub, into)
        except Failed:
            return False
        return True


def _amounts(found: _Total | _Free) -> dict[str, float | int | None]:
    """Return the total or free resources of a chip; ``None`` for values that are not reported."""
    computing = found.computing
    memory = None if computing.memory_size >= 1 << 40 else computing.memory_size
    media = {name: getattr(found.media, name) for name in _MEDIA}
    return {
        "aicore": computing.aic if computing.aic >= 0 else None,
        "aicpu": computing.device_aicpu if computing.device_aicpu != 0xFFFF else None,  # noqa: PLR2004 - "not reported"
        "memory_mib": memory,
        **{name: amount if 0 <= amount < 1 << 16 else None for name, amount in media.items()},
    }


def _place(card: str, chip: str) -> Place:
    return int(card), int(chip)


_DRIVER = "/usr/local/Ascend/driver/lib64"
PROGRAM = Program(
    vendor="ascend",
    word="dcmi",
    files=("libdcmi.so",),
    folders=("/usr/local/dcmi", f"{_DRIVER}/driver"),
    errors=Errors(names=_NAMES, kinds=_KINDS, of_call=_KINDS_OF_CALL),
    open=Dcmi,
    commands={
        "glance": Dcmi.glance,
        "look": Dcmi.look,
        "survey": Dcmi.survey,
        "create": lambda dcmi, card, chip, template, number: dcmi.create(
            _place(card, chip), template, int(number)
        ),
        "destroy": lambda dcmi, card, chip, number: dcmi.destroy(_place(card, chip), int(number)),
        "keep": Dcmi.keep,
        "wait": lambda dcmi, limit_s: dcmi.wait(float(limit_s)),
        "share": lambda dcmi, card, chip, word: dcmi.share(_place(card, chip), is_on=word == "1"),
    },
    needed=("dcmi_init", *_NEEDED),
    needed_folders=(f"{_DRIVER}/driver", f"{_DRIVER}/common", _DRIVER),
)

if __name__ == "__main__":
    main(PROGRAM)
