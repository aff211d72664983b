# SPDX-License-Identifier: Apache-2.0
"""Formats that several vendors' tools share: boxed tables, key trees, matrices, cells.

Tables are parsed by the names in their headers: a record has as many lines as the header, and the
words of a cell belong to the header's names in their order, so widths and extra columns do not
matter. Text in any other format raises ``AnswerUnknown``; no text raises another error.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from hami_common import units
from hami_common.units import INT32_MAX
from hami_nodeagent.drivers.errors import AnswerUnknown
from hami_nodeagent.drivers.protocol import ProcessUsage
from hami_nodeagent.drivers.rules import Neighbour

_DRAWN = frozenset(" \t|+=-")
_PAIR = re.compile(r"(?<=[0-9WBA%])\s*/\s*(?=[0-9N])")
_UNIT = re.compile(r"(?<=[0-9])\s+(MiB|MB|GiB|GB|W|C|%)(?![\w-])")
_NUMBER = re.compile(r"[+-]?\d{1,12}(\.\d{1,6})?")
_SIZE = re.compile(r"(\d{1,15})(?:\.\d+)?\s*(B|KiB|KB|MiB|MB|M|GiB|GB|G)?", re.IGNORECASE)
_BUS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)
_NOT_TOLD = frozenset({"", "-", "na", "n/a", "none", "null", "unknown", "[n/a]", "not supported"})
_KIB_PER_UNIT = {
    "": 1024, "mib": 1024, "mb": 1024, "m": 1024, "kib": 1, "kb": 1,
    "gib": 1024 * 1024, "gb": 1024 * 1024, "g": 1024 * 1024,
}  # fmt: skip
_HOT_C, _COLD_C = 250, -60
_MOST_W = 20_000.0

_LEVEL_BY_WORD: Mapping[str, str] = {
    "SYS": "system", "NODE": "node", "PHB": "hostbridge", "PXB": "multiple", "PIX": "single",
}  # fmt: skip


def unknown(what: str, text: str) -> AnswerUnknown:
    """Return the error for text without the format of ``what``; keeps its first words."""
    start = " ".join(text.split())[:120]
    return AnswerUnknown(doing=f"read {what}", detail=f"not in a form that is known: {start!r}")


# ---- cells -------------------------------------------------------------------------------------


def is_told(text: str) -> bool:
    """Return true if the cell contains a value."""
    return text.strip().lower() not in _NOT_TOLD


def number(text: str) -> float | None:
    """Return the first number of a cell; ``None`` if it has none."""
    match = _NUMBER.search(text) if is_told(text) else None
    return None if match is None else float(match[0])


def whole(text: str) -> int | None:
    """A whole number that is all of the cell."""
    return units.whole(text)


def percent(text: str) -> int | None:
    """Return percent, rounded; values out of range count as not reported."""
    value = number(text)
    return round(value) if value is not None and 0 <= value <= 100 else None  # noqa: PLR2004


def celsius(text: str) -> int | None:
    """Return a temperature; physically impossible values count as not reported."""
    value = number(text)
    return round(value) if value is not None and _COLD_C < value < _HOT_C else None


def watts(text: str) -> float | None:
    """Power; of a pair ``usage/cap`` the usage."""
    value = number(text.partition("/")[0])
    return value if value is not None and 0 <= value <= _MOST_W else None


def mib(text: str, *, unit: str = "MiB") -> int | None:
    """Parse a size in MiB, rounded down; ``unit`` applies if the text has none (MB means MiB)."""
    match = _SIZE.search(text) if is_told(text) else None
    if match is None:
        return None
    word = (match[2] or unit).lower()
    size = int(match[1])
    found = size >> 20 if word == "b" else size * _KIB_PER_UNIT[word] // 1024
    return found if found <= INT32_MAX else None


def mib_pair(text: str, *, unit: str = "MiB") -> tuple[int | None, int | None]:
    """``used/total`` or ``used(total)``; a unit at the end counts for both."""
    used, separator, total = text.strip().rstrip(")").replace("(", "/", 1).partition("/")
    if not separator:
        return None, None
    match = _SIZE.search(total)
    return mib(used, unit=(match[2] if match else None) or unit), mib(total, unit=unit)


def bus_id(text: str) -> str:
    """A PCI address as sysfs writes it, ``0000:c1:00.0``; empty when it is none."""
    match = _BUS.fullmatch(text.strip())
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function}"


# ---- boxed tables ------------------------------------------------------------------------------


def is_separator(line: str) -> bool:
    """A line that only draws."""
    return _DRAWN.issuperset(line) and ("----" in line or "====" in line)


def cells(line: str) -> list[str]:
    """The cells of one line, without the outer frame."""
    inside = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in inside.split("|")]


def names_in(head: str, known: Sequence[str]) -> list[str]:
    """The column names of a head's cell in their order; ``known`` lists those of several words."""
    found = head
    for name in sorted(known, key=len, reverse=True):
        found = re.sub(rf"(?<!\S){re.escape(name)}(?!\S)", name.replace(" ", "\0"), found, count=1)
    return [word.replace("\0", " ") for word in found.split()]


def values_in(cell: str, names: Sequence[str], *, greedy: str = "") -> dict[str, str]:
    """Return the words of a cell by name; the column ``greedy`` receives the excess words."""
    text = _PAIR.sub("/", cell)
    text = _PAIR.sub("/", _UNIT.sub(r"\1", text))
    words = text.split()
    more = len(words) - len(names)
    if more > 0 and greedy in names:
        at = names.index(greedy)
        words[at : at + more + 1] = [" ".join(words[at : at + more + 1])]
    if len(words) != len(names):
        if len(names) == 1:
            return {names[0]: " ".join(words)}
        if not words:
            return {}
        raise unknown("a table's cell", cell)
    return dict(zip(names, words, strict=True))


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A table found in a tool's output."""

    records: tuple[dict[str, str], ...]
    end: int
    """Number of the line after it."""


def box(
    text: str,
    *,
    first: str,
    needs: str,
    several: Sequence[str] = (),
    greedy: Sequence[str] = (),
    begin: int = 0,
) -> Box:
    """Parse the table whose header has ``first`` as its first word and contains ``needs``.

    ``several``: column names of more than one word. ``greedy``: columns whose values may have
    several words, at most one in each cell. Of columns with equal names, the first is used.
    """
    lines = text.splitlines()
    what = f"the table of {first}"
    at = begin
    for line in lines[begin:]:
        words = cells(line)[0].split()
        if words and words[0] == first and needs in line:
            break
        at += 1
    else:
        raise unknown(what, text)
    head: list[list[list[str]]] = []
    while at < len(lines) and not is_separator(lines[at]):
        head.append([names_in(cell, several) for cell in cells(lines[at])])
        at += 1
    records: list[dict[str, str]] = []
    group: list[str] = []
    closed = False
    width = len(lines[at].rstrip()) if at < len(lines) else 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if is_separator(line):
            if group:
                records.append(_record(group, head, greedy))
                group = []
            closed = len(line.rstrip()) >= width
            continue
        if not line.strip() or (closed and not group and _ends(line, records)):
            at -= 1
            break
        group.append(line)
        if len(group) == len(head):
            records.append(_record(group, head, greedy))
            group = []
            closed = False
    if group or not closed or not records:
        raise AnswerUnknown(doing=f"read {what}", detail="it is cut off")
    return Box(records=tuple(records), end=at)


def _ends(line: str, records: Sequence[object]) -> bool:
    """Return true if a line after a separator belongs to the text after the table."""
    return bool(records) and re.match(r"^[\s|]*(Process|Sliced GPU|NPU\s+Chip)", line) is not None


def _record(
    group: Sequence[str], head: Sequence[Sequence[Sequence[str]]], greedy: Sequence[str]
) -> dict[str, str]:
    if len(group) != len(head):
        raise unknown("a table's record", " ".join(group))
    record: dict[str, str] = {}
    for line, names in zip(group, head, strict=True):
        values = cells(line)
        if len(values) != len(names):
            raise unknown("a table's line", line)
        for cell, cell_names in zip(values, names, strict=True):
            if not cell_names:
                continue
            wide = next((name for name in cell_names if name in greedy), "")
            for name, value in values_in(cell, cell_names, greedy=wide).items():
                record.setdefault(name, value)
    return record


# ---- other forms -------------------------------------------------------------------------------


def key_blocks(text: str, *, start: str) -> list[dict[str, str]]:
    """``key : value`` lines in blocks; a line that begins with ``start`` opens the next block.

    Values by the path of their keys, levels joined by ``/``; indentation makes the levels.
    """
    blocks: list[dict[str, str]] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or is_separator(line):
            continue
        if stripped.startswith(start):
            blocks.append({start: stripped[len(start) :].lstrip(" :")})
            path = []
            continue
        if not blocks:
            continue
        depth = len(line) - len(line.lstrip())
        key, separator, value = (part.strip() for part in stripped.partition(" :"))
        if not separator:
            key, separator, value = (part.strip() for part in stripped.partition(":"))
        while path and path[-1][0] >= depth:
            path.pop()
        name = "/".join([*(outer for _, outer in path), key])
        if separator and value:
            blocks[-1].setdefault(name, value)
        else:
            path.append((depth, key))
    return blocks


def key_lines(text: str) -> dict[str, str]:
    """``key : value`` lines without blocks; the first of equal keys counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(" :")
        if separator:
            found.setdefault(key.strip(), value.strip())
    return found


def matrix(text: str, *, prefix: str, fabric: str) -> dict[tuple[int, int], Neighbour]:
    """Parse links between devices from a square table of words such as ``PIX``.

    Rows and columns are named ``prefix`` and a number. ``fabric`` is the vendor's word for its own
    links (a number after it counts them); unknown words are left out.
    """
    views: dict[tuple[int, int], Neighbour] = {}
    columns: list[int] = []
    label = re.compile(rf"{re.escape(prefix)}(\d{{1,4}})$", re.IGNORECASE)
    for line in text.splitlines():
        words = line.split()
        numbers = [int(match[1]) for word in words if (match := label.match(word))]
        if not columns:
            if len(numbers) > 1:
                columns = numbers
            continue
        if len(numbers) != 1 or not label.match(words[0]):
            continue
        for column, word in zip(columns, words[1:], strict=False):
            if column != numbers[0] and (view := _neighbour(word, fabric)) is not None:
                views[numbers[0], column] = view
    return views


def _neighbour(word: str, fabric: str) -> Neighbour | None:
    if word in _LEVEL_BY_WORD:
        return Neighbour(level=_LEVEL_BY_WORD[word])
    match = re.fullmatch(rf"(?:{fabric})(\d{{1,2}})?", word)
    if match is None:
        return None
    return Neighbour(level="node", fabric_links=int(match[1] or 1))


def json_of(what: str, text: str) -> object:
    """The JSON document of an answer, without the lines some tools print before and after it."""
    starts = [at for at in (text.find("["), text.find("{")) if at >= 0]
    end = max(text.rfind("]"), text.rfind("}"))
    if not starts or end < 0:
        raise unknown(what, text)
    for body in (text, text[min(starts) : end + 1]):
        try:
            return msgspec.json.decode(body.encode("utf-8", "replace"))
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
    raise unknown(what, text)


def entries(what: str, document: object, *, key: str = "") -> list[dict[str, object]]:
    """Return the objects of a JSON list; ``key`` names the list where a tool wraps it."""
    if isinstance(document, dict) and key and key in document:
        document = document[key]
    if not isinstance(document, list) or not all(isinstance(entry, dict) for entry in document):
        raise unknown(what, str(document))
    return document


def at(document: object, *path: str) -> object:
    """Return the value at ``path`` of nested JSON objects; ``None`` if there is none."""
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def text_at(document: object, *path: str) -> str:
    """The same as text; JSON's value-and-unit objects become ``value unit``."""
    found = at(document, *path)
    if isinstance(found, dict) and "value" in found:
        found = f"{found['value']} {found.get('unit', '')}".strip()
    return str(found) if isinstance(found, str | int | float) else ""


def process_lines(
    text: str, *, begin: int, pid: str = "PID", several: Sequence[str] = ()
) -> list[tuple[list[str], int, int | None]]:
    """Parse a table of processes into the words before the pid, the pid, and memory in MiB.

    The column called ``pid`` gives the position of the pid, which is never first, because the
    device precedes it; memory is the last size of the row.
    """
    found: list[tuple[list[str], int, int | None]] = []
    before: int | None = None
    for line in text.splitlines()[begin:]:
        joined = " ".join(cells(line))
        if before is None:
            if pid not in joined:
                continue
            names = names_in(joined, (pid, *several))
            before = (names.index(pid) or None) if pid in names else None
            continue
        words = joined.split()
        if len(words) <= before or (process := whole(words[before])) is None:
            continue
        size = re.search(r"(\d{1,12}\s*(MiB|MB)?)$", joined)
        if len(words) > before + 1:
            found.append((words[:before], process, None if size is None else mib(size[1])))
    return found


def processes_of(
    found: Sequence[tuple[int, int, int | None]],
) -> dict[int, tuple[ProcessUsage, ...]]:
    """Processes by device number, from (device, pid, MiB); one pid is listed once per device."""
    by_device: dict[int, dict[int, int | None]] = {}
    for device, pid, used in found:
        mine = by_device.setdefault(device, {})
        known = mine.get(pid)
        mine[pid] = used if known is None else known + (used or 0)
    return {
        device: tuple(ProcessUsage(pid=pid, used_mib=used) for pid, used in sorted(mine.items()))
        for device, mine in by_device.items()
    }
