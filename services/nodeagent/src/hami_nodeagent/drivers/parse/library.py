# SPDX-License-Identifier: Apache-2.0
"""Parses the output of vendors' ``binding`` programs: their errors, and lists of devices.

Only this module translates the kind of a trouble to an error of ``errors``. ``devices`` parses the
common list of devices: sizes in MiB, use in percent, temperature in degrees Celsius, power in
watts, ``null`` for values that are not reported::

    {"version": "6.2", "problems": [],
     "devices": [{"index": 0, "uuid": "…", "name": "…", "bus_id": "0000:11:00.0", "minor": null,
                  "memory_mib": 65536, "used_mib": 12, "core_pct": 0, "memory_bus_pct": null,
                  "temperature_c": 36, "power_w": 91.5, "numa": 0, "mode": "", "attributes": {},
                  "processes": [[4711, 1500]], "broken": "", "trouble": null}],
     "links": [[0, 1, "node", 1]]}

``broken`` is the reason for which the library reports the device as broken, ``trouble`` the reason
for which it is unreadable; links are pairs of indexes with ``Neighbour``'s level and count, the
same in both directions.
"""

import re
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from hami_common.units import INT32_MAX
from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceBusy,
    DeviceGone,
    DriverDenied,
    DriverError,
    DriverMissing,
    DriverTransient,
    HardwareAbsent,
    LibraryUnusable,
    NotSupported,
    PartitionBusy,
    PartitionRefused,
    ToolMismatch,
)
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.parse.trouble import one_line, trouble, unexplained
from hami_nodeagent.drivers.protocol import ProcessUsage
from hami_nodeagent.drivers.rules import SCORE_BY_LEVEL, Neighbour
from hami_nodeagent.libraries.loading import Kind

ERROR_BY_KIND: Mapping[Kind, type[DriverError]] = {
    Kind.UNUSABLE: LibraryUnusable,
    Kind.NONSENSE: AnswerUnknown,
    Kind.MISSING: DriverMissing,
    Kind.MISMATCH: ToolMismatch,
    Kind.DENIED: DriverDenied,
    Kind.ABSENT: HardwareAbsent,
    Kind.GONE: DeviceGone,
    Kind.BUSY: DeviceBusy,
    Kind.UNSUPPORTED: NotSupported,
    Kind.REFUSED: PartitionRefused,
    Kind.IN_USE: PartitionBusy,
    Kind.TRANSIENT: DriverTransient,
}
_KIND_BY_STATUS = {int(kind): kind for kind in Kind}
_KIND_BY_WORD = {kind.name.lower(): kind for kind in Kind}
_NUMBER = re.compile(r"\(error (-?\d{1,10})\)\s*$")
_IDENTITY = re.compile(r"[\w.:-]{1,96}", re.ASCII)
_WORD = re.compile(r"[a-z_]{0,16}")
_MOST_INDEX, _MOST_FABRIC, _MOST_NUMA = 1024, 64, 1024
_LONGEST = 200


class Told(Struct, frozen=True):
    """The trouble of one device (``loading.Trouble.plain``)."""

    kind: str
    words: str
    code: int = 0

    def error(self, doing: str) -> DriverError:
        """The error that it means."""
        kind = ERROR_BY_KIND[_KIND_BY_WORD.get(self.kind, Kind.TRANSIENT)]
        return kind(doing=doing, detail=one_line(self.words), code=self.code)


def failure(doing: str, word: str, complaint: str, status: int) -> DriverError:
    """Return the error for a failed run of the program ``word``."""
    lines = complaint.strip().splitlines()
    own = [line for line in lines if line.startswith(f"{word}: ")]
    line = own[-1] if own else " ".join(lines)
    kind = _KIND_BY_STATUS.get(status)
    if kind is None:
        return trouble(doing, complaint, status) or unexplained(doing, complaint, status)
    number = _NUMBER.search(line)
    code = int(number[1]) if number else 0
    return ERROR_BY_KIND[kind](doing=doing, detail=one_line(line), code=code)


# ---- lists of devices --------------------------------------------------------------------------


class _Device(Struct, frozen=True):
    index: int
    uuid: str = ""
    name: str = ""
    bus_id: str = ""
    minor: int | None = None
    memory_mib: int | None = None
    used_mib: int | None = None
    core_pct: float | None = None
    memory_bus_pct: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    numa: int | None = None
    mode: str = ""
    attributes: dict[str, str] = {}
    processes: tuple[tuple[int, int | None], ...] | None = None
    broken: str = ""
    trouble: Told | None = None


class _Answer(Struct, frozen=True):
    devices: tuple[_Device, ...]
    version: str = ""
    problems: tuple[str, ...] = ()
    links: tuple[tuple[int, int, str, int], ...] = ()


def devices(text: str) -> Sight:
    """The list; ``Seen.place`` is the index. Type and identity are as the library has them."""
    try:
        answer = msgspec.json.decode(text.encode("utf-8", "replace"), type=_Answer)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise forms.unknown("the list of devices", text) from error
    seen = tuple(_seen(one) for one in answer.devices)
    uuids = [one.uuid for one in seen if one.uuid]
    indexes = {one.index for one in seen}
    if len(indexes) != len(seen) or len(set(uuids)) != len(uuids):
        raise forms.unknown("the list of devices", text)
    views: dict[tuple[str, str], Neighbour] = {}
    for a, b, level, fabric in answer.links:
        if {a, b} - indexes or level not in SCORE_BY_LEVEL or not 0 <= fabric <= _MOST_FABRIC:
            raise forms.unknown("a link", f"{a} {b} {level} {fabric}")
        view = Neighbour(level=level, fabric_links=fabric)
        views[str(a), str(b)] = views[str(b), str(a)] = view
    return Sight(
        devices=seen,
        views=views,
        driver_version=one_line(answer.version),
        problems=tuple(map(one_line, answer.problems)),
    )


def _seen(one: _Device) -> Seen:
    sizes = (one.memory_mib or 0, one.used_mib or 0, one.minor or 0)
    good = 0 <= one.index <= _MOST_INDEX and all(0 <= size <= INT32_MAX for size in sizes)
    named = not one.uuid or _IDENTITY.fullmatch(one.uuid)
    if not good or not named or not _WORD.fullmatch(one.mode):
        raise forms.unknown("a device", f"{one.index} {sizes} {one.uuid} {one.mode}")
    if one.bus_id and not forms.bus_id(one.bus_id):
        raise forms.unknown("the address of a device", one.bus_id)
    condition, reason = _condition(one)
    return Seen(
        place=str(one.index),
        index=one.index,
        uuid=one.uuid,
        type=one_line(one.name),
        memory_mib=one.memory_mib or None,
        minor=one.minor,
        bus_id=forms.bus_id(one.bus_id),
        numa=one.numa if one.numa is not None and 0 <= one.numa <= _MOST_NUMA else None,
        mode=one.mode,
        attributes={key: value[:_LONGEST] for key, value in one.attributes.items()},
        condition=condition,
        reason=reason,
        used_mib=one.used_mib,
        core_pct=None if one.core_pct is None else forms.percent(_plain(one.core_pct)),
        memory_bus_pct=None
        if one.memory_bus_pct is None
        else forms.percent(_plain(one.memory_bus_pct)),
        temperature_c=None
        if one.temperature_c is None
        else forms.celsius(_plain(one.temperature_c)),
        power_w=None if one.power_w is None else forms.watts(_plain(one.power_w)),
        processes=None if one.processes is None else _processes(one.processes),
    )


def _condition(one: _Device) -> tuple[Condition, str]:
    if one.broken:
        return Condition.BAD, one_line(one.broken)
    if one.trouble is not None:
        lost = isinstance(one.trouble.error(""), DeviceGone)
        return Condition.BAD if lost else Condition.DOUBTFUL, one_line(one.trouble.words)
    return Condition.GOOD, ""


def _plain(value: float) -> str:
    """The number as the parsers of cells read it."""
    return f"{value:.3f}"


def _processes(found: tuple[tuple[int, int | None], ...]) -> tuple[ProcessUsage, ...]:
    rows: list[tuple[int, int, int | None]] = []
    for pid, used in found:
        if not 0 <= pid <= INT32_MAX or not 0 <= (used or 0) <= INT32_MAX:
            raise forms.unknown("a process", f"{pid} {used}")
        rows.append((0, pid, used))
    return forms.processes_of(rows).get(0, ())
