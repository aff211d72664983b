# SPDX-License-Identifier: Apache-2.0
"""Parses the output of ``binding`` for Ascend chips into the types of ``parse``.

Health words are those of the vendor's header and its manual of DCMI.
"""

import re
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from hami_common.model.device import Profile
from hami_common.units import INT32_MAX
from hami_nodeagent.drivers.ascend.parse import Chip, ChipKey, Division, Instance, die_of, type_of
from hami_nodeagent.drivers.errors import DriverError, NotSupported
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.library import Told
from hami_nodeagent.drivers.parse.seen import Condition
from hami_nodeagent.drivers.parse.trouble import one_line
from hami_nodeagent.drivers.protocol import ProcessUsage
from hami_nodeagent.drivers.rules import Neighbour

_HEALTH = {
    0: (Condition.GOOD, "OK"),
    1: (Condition.GOOD, "Warning"),
    2: (Condition.BAD, "Alarm"),
    3: (Condition.BAD, "Critical"),
}
_CARD_DROPPED = 0x40F84E00
_NOT_COMPATIBLE = 2
_LEVEL_BY_LINK = {1: "system", 2: "hostbridge", 4: "multiple", 5: "single"}
_FABRICS = frozenset({3, 6, 7, 8})
"""HCCS, SIO (the two dies of a 910C), switched HCCS, UB."""
_USED = 1
_MIB_PER_GIB = 1024
_BYTES_PER_MIB = 1 << 20
_310P, _910A = "Ascend310P", "Ascend910A"
_HALF_GIB, _FULL_GIB = 32, 64
_24_CORES, _BIG_MIB = 24, 40 << 10
_LONGEST_NAME = 15
_WORDS = 5
_MOST_WORD = (1 << 32) - 1


class _Vdev(Struct, frozen=True):
    id: int
    name: str
    used: int
    container: int


class _Division(Struct, frozen=True):
    total: dict[str, float | None]
    free: dict[str, float | None]
    vdevs: tuple[_Vdev, ...]


class _SuperPod(Struct, frozen=True):
    sdid: int
    id: int
    server: int


class _Chip(Struct, frozen=True):
    card: int
    chip: int
    name: str
    bus_id: str
    codes: tuple[int, ...]
    logic: int | None = None
    health: int | None = None
    trouble: Told | None = None
    core_pct: int | None = None
    temperature_c: int | None = None
    power_dw: int | None = None
    memory_mib: int | None = None
    used_mib: int | None = None
    bandwidth_pct: int | None = None
    processes: tuple[tuple[int, int], ...] | None = None
    physical: int | None = None
    die: tuple[int, ...] | None = None
    compatibility: int | None = None
    share: int | None = None
    super_pod: _SuperPod | None = None
    division: _Division | None = None
    division_error: Told | None = None


class _Answer(Struct, frozen=True):
    version: str
    chips: tuple[_Chip, ...]
    problems: tuple[str, ...]
    links: tuple[tuple[int, int, int, int, int], ...] = ()


class DcmiChip(Struct, frozen=True, kw_only=True):
    """One chip with the values that only the library or a full read reports."""

    chip: Chip
    logic: int | None
    die: str
    """Die id in the format of npu-smi's parser; empty: not reported."""
    bandwidth_pct: int | None
    division: Division | None
    """``None``: the chip cannot be divided, or ``trouble`` contains the reason."""
    trouble: DriverError | None
    """Reason for the missing division, unless the chip cannot be divided at all."""
    is_shared: bool | None
    """Several containers may open the chip."""
    super_pod: dict[str, str]
    is_compatible: bool
    """True if the library reports no mismatch of driver and firmware."""


class DcmiSight(Struct, frozen=True, kw_only=True):
    """One answer."""

    chips: tuple[DcmiChip, ...]
    version: str
    problems: tuple[str, ...]
    views: dict[tuple[ChipKey, ChipKey], Neighbour]


class Fault(Struct, frozen=True):
    """Fault that a chip reported without being polled."""

    chip: int
    """Logic id."""
    event: int
    """The vendor's number of the fault."""
    serial: int
    assertion: int = 1
    """0: it is over, 1: it has begun, 2: it has happened."""
    severity: int = 0
    name: str = ""

    def __str__(self) -> str:
        word = {0: "over", 1: "begun"}.get(self.assertion, "happened")
        return f"chip {self.chip}: 0x{self.event:08X} {one_line(self.name)} ({word})"


def faults(text: str) -> frozenset[Fault]:
    """The answer of ``wait``."""
    try:
        return frozenset(
            msgspec.json.decode(text.encode("utf-8", "replace"), type=tuple[Fault, ...])
        )
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise forms.unknown("an answer of dcmi", text) from error


def sight(text: str) -> DcmiSight:
    """The answer of ``glance``, ``look`` and ``survey``."""
    try:
        answer = msgspec.json.decode(text.encode("utf-8", "replace"), type=_Answer)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise forms.unknown("an answer of dcmi", text) from error
    chips = tuple(_chip(one) for one in answer.chips)
    keys = [one.chip.key for one in chips]
    logics = [one.logic for one in chips if one.logic is not None]
    if len(set(keys)) != len(keys) or len(set(logics)) != len(logics):
        raise forms.unknown("an answer of dcmi", text)
    views: dict[tuple[ChipKey, ChipKey], Neighbour] = {}
    for card, chip, other_card, other_chip, kind in answer.links:
        view = _view(kind)
        if view is not None:
            a, b = (card, chip), (other_card, other_chip)
            views[a, b] = views[b, a] = view
    return DcmiSight(chips=chips, version=answer.version, problems=answer.problems, views=views)


def _view(kind: int) -> Neighbour | None:
    if kind in _FABRICS:
        return Neighbour(level="node", fabric_links=1)
    level = _LEVEL_BY_LINK.get(kind)
    return None if level is None else Neighbour(level=level)


def _chip(one: _Chip) -> DcmiChip:
    sizes = (one.card, one.chip, one.logic or 0, one.physical or 0, one.memory_mib or 0)
    if any(not 0 <= size <= INT32_MAX for size in (*sizes, one.used_mib or 0)):
        raise forms.unknown("a chip of dcmi", f"{sizes}")
    name, address = one.name.strip(), forms.bus_id(one.bus_id)
    condition, health = _health(one)
    if condition is Condition.GOOD and (not name or not address):
        condition, health = Condition.DOUBTFUL, "name or address unknown"
    chip = Chip(
        key=(one.card, one.chip),
        name=name,
        condition=condition,
        health=health,
        bus_id=address,
        physical=one.physical,
        used_mib=one.used_mib,
        total_mib=one.memory_mib,
        core_pct=_read(forms.percent, one.core_pct),
        temperature_c=_read(forms.celsius, one.temperature_c),
        power_w=None if one.power_dw is None else forms.watts(str(one.power_dw / 10)),
        processes=_processes(one.processes or ()),
    )
    return DcmiChip(
        chip=chip,
        logic=one.logic,
        die=_die(one.die),
        bandwidth_pct=_read(forms.percent, one.bandwidth_pct),
        division=None if one.division is None else _division(one.division, type_of(name)),
        trouble=_division_trouble(one),
        is_shared=None if one.share is None else bool(one.share),
        super_pod=_super_pod(one),
        is_compatible=one.compatibility != _NOT_COMPATIBLE,
    )


def _health(one: _Chip) -> tuple[Condition, str]:
    """The chip's condition with its reason, from its health word and its error codes."""
    condition, health = _HEALTH.get(-1 if one.health is None else one.health, (None, ""))
    if condition is None:
        condition, health = Condition.DOUBTFUL, "UNKNOWN"
        if one.trouble is not None:
            health = one_line(one.trouble.words)
    if _CARD_DROPPED in one.codes:
        return Condition.BAD, f"card dropped (code {_CARD_DROPPED:#x})"
    if condition is Condition.BAD and one.codes:
        health = f"{health} (codes {', '.join(f'{code:#x}' for code in one.codes[:4])})"
    return condition, health


def _read(read: Callable[[str], int | None], value: int | None) -> int | None:
    return None if value is None else read(str(value))


def _division_trouble(one: _Chip) -> DriverError | None:
    """Return why the chip's division is unreadable; ``None`` if the chip cannot be divided."""
    if one.division_error is None:
        return None
    trouble = one.division_error.error(f"dcmi look at chip {one.card}/{one.chip}")
    return None if isinstance(trouble, NotSupported) else trouble


def _super_pod(one: _Chip) -> dict[str, str]:
    if one.super_pod is None:
        return {}
    return {
        "sdid": str(one.super_pod.sdid),
        "super_pod": str(one.super_pod.id),
        "server": str(one.super_pod.server),
    }


def _processes(found: Sequence[tuple[int, int]]) -> tuple[ProcessUsage, ...]:
    rows = []
    for pid, size in found:
        if not 0 <= pid <= INT32_MAX or not 0 <= size // _BYTES_PER_MIB <= INT32_MAX:
            raise forms.unknown("a process of dcmi", f"{pid} {size}")
        rows.append((0, pid, size // _BYTES_PER_MIB))
    return forms.processes_of(rows).get(0, ())


def _die(words: tuple[int, ...] | None) -> str:
    if words is None or len(words) != _WORDS or not any(words):
        return ""
    if any(not 0 <= word <= _MOST_WORD for word in words):
        return ""
    return die_of(" ".join(f"{word:X}" for word in words))


def _division(found: _Division, kind: str) -> Division:
    totals = {name: n for name, amount in found.total.items() if (n := _count(amount)) is not None}
    free = {name: n for name, amount in found.free.items() if (n := _count(amount)) is not None}
    memory_gib = totals.pop("memory_mib", 0) // _MIB_PER_GIB
    free_gib = free.pop("memory_mib", 0) // _MIB_PER_GIB
    if kind not in (_310P, _910A):
        memory_gib = _nominal(memory_gib)
    instances = tuple(
        Instance(
            id=one.id,
            template=one.name,
            used=one.used == _USED,
            container=f"{one.container:012x}",
        )
        for one in found.vdevs
    )
    if any(not 0 <= one.id <= INT32_MAX or not _is_name(one.template) for one in instances):
        raise forms.unknown("a vNPU of dcmi", " ".join(one.template for one in instances))
    if len({one.id for one in instances}) != len(instances):
        raise forms.unknown("the vNPUs of dcmi", " ".join(str(one.id) for one in instances))
    return Division(
        totals=totals,
        memory_gib=memory_gib,
        free={name: min(free.get(name, total), total) for name, total in totals.items()},
        free_gib=free_gib,
        instances=instances,
    )


def _is_name(text: str) -> bool:
    return re.fullmatch(rf"[\x21-\x7e]{{1,{_LONGEST_NAME}}}", text) is not None


def _count(amount: float | None) -> int | None:
    return int(amount) if amount is not None and 0 <= amount <= INT32_MAX else None


def _nominal(gib: int) -> int:
    """Return the size of a 910's memory as templates count it; the library omits driver memory."""
    if gib < _HALF_GIB:
        return _HALF_GIB
    return _FULL_GIB if _HALF_GIB < gib < _FULL_GIB else gib


# ---- templates ---------------------------------------------------------------------------------

_AMOUNTS = ("aicore", "aicpu", "vpc", "vdec", "jpegd", "venc", "jpege", "pngd")


def _template(name: str, gib: int, *amounts: int) -> Profile:
    told = zip(_AMOUNTS, amounts, strict=False)
    resources = {word: amount for word, amount in told if amount}
    return Profile(name=name, memory_mib=gib * _MIB_PER_GIB, resources=resources)


TEMPLATES_310P = (
    _template("vir01", 3, 1, 1, 1, 1, 2, 0, 1),
    _template("vir02", 6, 2, 2, 3, 3, 4, 1, 2),
    _template("vir02_1c", 6, 2, 1, 3, 3, 4, 0, 2),
    _template("vir04", 12, 4, 4, 6, 6, 8, 2, 4),
    _template("vir04_3c", 12, 4, 3, 6, 6, 8, 1, 4),
    _template("vir04_3c_ndvpp", 12, 4, 3),
    _template("vir04_4c_dvpp", 12, 4, 4, 12, 12, 16, 3, 8),
)
TEMPLATES_910A = (
    _template("vir02", 2, 2, 1),
    _template("vir04", 4, 4, 1),
    _template("vir08", 8, 8, 3),
    _template("vir16", 17, 16, 7),
)
TEMPLATES_24_CORES = (
    _template("vir06_1c_16g", 16, 6, 1),
    _template("vir12_3c_32g", 32, 12, 3),
)
TEMPLATES_20_CORES_64G = (
    _template("vir05_1c_16g", 16, 5, 1, 2, 0, 6, 0, 1),
    _template("vir10_3c_32g", 32, 10, 3, 4, 1, 12, 0, 2),
)
TEMPLATES_20_CORES_32G = (
    _template("vir05_1c_8g", 8, 5, 1, 2, 0, 6, 0, 1),
    _template("vir10_3c_16g", 16, 10, 3, 4, 1, 12, 0, 2),
    _template("vir10_3c_16g_nm", 16, 10, 3),
    _template("vir10_4c_16g_m", 16, 10, 4, 9, 2, 24, 0, 4),
)


def templates_of(chip: DcmiChip) -> tuple[Profile, ...]:
    """The vendor's published templates of a chip: no call of the library lists them."""
    kind = type_of(chip.chip.name)
    if kind in (_310P, _910A):
        return TEMPLATES_310P if kind == _310P else TEMPLATES_910A
    cores = chip.division.totals.get("aicore", 0) if chip.division else 0
    if cores >= _24_CORES:
        return TEMPLATES_24_CORES
    big = (chip.chip.total_mib or 0) > _BIG_MIB
    return TEMPLATES_20_CORES_64G if big else TEMPLATES_20_CORES_32G
