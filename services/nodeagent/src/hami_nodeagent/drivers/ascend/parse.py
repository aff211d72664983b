# SPDX-License-Identifier: Apache-2.0
"""Parses the output of npu-smi (23.0 to 25.0; 310P, 910A, 910B, 910C).

Tables identify a chip by (NPU id, chip id), all other output by its die id; the logic id is its
index, the physical id the number of ``/dev/davinci<N>``. npu-smi writes MB for MiB and GB for GiB.
The words of the die id are printed without leading zeros.
"""

import re

from msgspec import Struct

from hami_common.model.device import Profile
from hami_nodeagent.drivers.errors import (
    DeviceBusy,
    DriverDenied,
    DriverMissing,
    DriverTransient,
    NotSupported,
    PartitionRefused,
)
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Condition
from hami_nodeagent.drivers.parse.trouble import Rule
from hami_nodeagent.drivers.protocol import ProcessUsage
from hami_nodeagent.drivers.rules import Neighbour

RULES = (
    Rule(words=r"ret is -8020", kind=DeviceBusy),
    Rule(words=r"ret is -8002", kind=DriverDenied),
    Rule(words=r"ret is -8005|dcmi.{0,40}initiali[sz]ed? failed", kind=DriverMissing),
    Rule(words=r"ret is -(8006|8012|8017)", kind=DriverTransient),
    Rule(words=r"ret is -(8013|8255)|not in docker mode", kind=NotSupported),
    Rule(words=r"insufficient number of \w+ available", kind=PartitionRefused),
    Rule(words=r"\b(is )?(in use|being used|occupied)\b", kind=DeviceBusy),
)

_SEVERAL = ("Process id", "Process name", "Process memory(MB)")
_CONDITION_BY_WORD = {
    "ok": Condition.GOOD,
    "warning": Condition.GOOD,
    "alarm": Condition.BAD,
    "critical": Condition.BAD,
}
"""``Warning`` is a general alarm with which a chip goes on working."""
_RESOURCES = ("AICORE", "AICPU", "VPC", "VENC", "VDEC", "JPEGD", "JPEGE", "PNGD")
_WORD_BY_CHIP = {"ascend910": "Ascend910C", "910proa": "Ascend910A", "910prob": "Ascend910A"}

_DIE_WORDS = 5

ChipKey = tuple[int, int]
"""NPU id and chip id."""


class Chip(Struct, frozen=True, kw_only=True):
    """One chip of the summary table."""

    key: ChipKey
    name: str
    condition: Condition
    health: str
    bus_id: str
    physical: int | None
    used_mib: int | None
    total_mib: int | None
    core_pct: int | None
    temperature_c: int | None
    power_w: float | None
    processes: tuple[ProcessUsage, ...]


class Place(Struct, frozen=True, kw_only=True):
    """One chip in the other numberings."""

    logic: int
    physical: int | None
    name: str


class Board(Struct, frozen=True, kw_only=True):
    """Result of the board query for one chip."""

    die: str
    chip_name: str
    bus_id: str
    serial: str


class Instance(Struct, frozen=True, kw_only=True):
    """One vNPU."""

    id: int
    template: str
    used: bool
    container: str

    @property
    def owner(self) -> str:
        """Container id if the driver reports one; vNPUs of the runtime show only ``f``."""
        return "" if set(self.container) <= {"0", "f"} else self.container


class Division(Struct, frozen=True, kw_only=True):
    """Current division of a chip."""

    totals: dict[str, int]
    memory_gib: int
    free: dict[str, int]
    free_gib: int
    instances: tuple[Instance, ...]


def info(text: str) -> tuple[tuple[Chip, ...], str]:
    """The summary table: its chips, and the tool's version, which is the driver's."""
    table = forms.box(text, first="NPU", needs="Health", greedy=("Name",))
    used: dict[ChipKey, list[tuple[int, int, int | None]]] = {}
    rows = forms.process_lines(text, begin=table.end, pid="Process id", several=_SEVERAL)
    for before, pid, size in rows:
        key = [forms.whole(word) for word in before[:2]]
        if len(key) == 2 and key[0] is not None and key[1] is not None:  # noqa: PLR2004
            used.setdefault((key[0], key[1]), []).append((0, pid, size))
    chips = tuple(_chip(record, used) for record in table.records)
    if len({chip.key for chip in chips}) != len(chips):
        raise forms.unknown("npu-smi info", text)
    version = re.search(r"Version:\s*(\S+)", text)
    return chips, version[1] if version else ""


def _chip(record: dict[str, str], used: dict[ChipKey, list[tuple[int, int, int | None]]]) -> Chip:
    npu, chip = forms.whole(record.get("NPU", "")), forms.whole(record.get("Chip", ""))
    address, name = forms.bus_id(record.get("Bus-Id", "")), record.get("Name", "")
    if npu is None or chip is None or not address or not name:
        raise forms.unknown("a chip of npu-smi info", " ".join(record.values()))
    memory = record.get("HBM-Usage(MB)") or record.get("Memory-Usage(MB)", "")
    used_mib, total_mib = forms.mib_pair(memory)
    health = record.get("Health", "")
    return Chip(
        key=(npu, chip),
        name=name,
        condition=_CONDITION_BY_WORD.get(health.lower(), Condition.DOUBTFUL),
        health=health,
        bus_id=address,
        physical=forms.whole(record.get("Phy-ID", "")),
        used_mib=used_mib,
        total_mib=total_mib,
        core_pct=forms.percent(record.get("AICore(%)", "")),
        temperature_c=forms.celsius(record.get("Temp(C)", "")),
        power_w=forms.watts(record.get("Power(W)", "")),
        processes=forms.processes_of(used.get((npu, chip), [])).get(0, ()),
    )


def mapping(text: str) -> dict[ChipKey, Place]:
    """``info -m``: which chip has which logic and physical id; controllers are left out."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise forms.unknown("npu-smi info -m", text)
    names = _columns(lines[0])
    needed = ("NPU ID", "Chip ID", "Chip Name")
    if not set(needed) <= set(names):
        raise forms.unknown("npu-smi info -m", text)
    places: dict[ChipKey, Place] = {}
    for line in lines[1:]:
        values = _columns(line)
        if len(values) != len(names):
            raise forms.unknown("a line of npu-smi info -m", line)
        row: dict[str, str] = dict(zip(names, values, strict=True))
        logic = forms.whole(row.get("Chip Logic ID", row.get("Chip Phy-ID", "")))
        npu, chip = forms.whole(row["NPU ID"]), forms.whole(row["Chip ID"])
        if logic is None:
            continue
        if npu is None or chip is None:
            raise forms.unknown("a line of npu-smi info -m", line)
        physical = forms.whole(row.get("Chip Phy-ID", ""))
        places[npu, chip] = Place(logic=logic, physical=physical, name=row["Chip Name"])
    logics = [place.logic for place in places.values()]
    if not places or len(set(logics)) != len(logics):
        raise forms.unknown("npu-smi info -m", text)
    return places


def _columns(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def board(text: str) -> Board:
    """``info -t board``: the die id, padded and joined; empty where the tool does not report it."""
    keys = forms.key_lines(text)
    if "NPU ID" not in keys:
        raise forms.unknown("npu-smi info -t board", text)
    return Board(
        die=die_of(keys.get("VDie ID", "")),
        chip_name=keys.get("Chip Name", ""),
        bus_id=forms.bus_id(keys.get("PCIe Bus Info", "")),
        serial=_told(keys.get("Serial Number", "")),
    )


def _told(text: str) -> str:
    return text if forms.is_told(text) else ""


def die_of(text: str) -> str:
    """A die id from its words: each padded, joined by ``-``; empty when it is none."""
    words = re.split(r"[\s-]+", text.strip())
    is_hex = all(re.fullmatch(r"[0-9A-Fa-f]{1,8}", word) for word in words)
    if len(words) != _DIE_WORDS or not is_hex:
        return ""
    return "-".join(word.upper().zfill(8) for word in words)


def type_of(chip_name: str) -> str:
    """The word by which users select a chip, such as ``Ascend910B4``."""
    name = chip_name.replace(" ", "").strip()
    if word := _WORD_BY_CHIP.get(name.lower()):
        return word
    name = re.sub(r"^Ascend(?=\d)", "", name)
    if name.upper().startswith("310P"):
        return "Ascend310P"
    return f"Ascend{name}"


def templates(text: str) -> tuple[Profile, ...]:
    """``info -t template-info``: the node's vNPU templates, without ``core_pct``."""
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines) if "AICORE" in line and "Name" in line), None)
    if begin is None or begin + 1 >= len(lines):
        raise forms.unknown("npu-smi info -t template-info", text)
    names, more_names = (forms.cells(line)[0].split() for line in lines[begin : begin + 2])
    heads = (names, [word for word in more_names if word != "GB"])
    body = [line for line in lines[begin + 2 :] if line.strip() and not forms.is_separator(line)]
    if not forms.is_separator(text.rstrip().rpartition("\n")[2]):
        raise forms.unknown("the end of npu-smi info -t template-info", text[-80:])
    pairs = zip(body[::2], body[1::2], strict=False)
    found = tuple(_template(_template_row(heads, pair), pair) for pair in pairs)
    if not found or len(body) % 2 or len({profile.name for profile in found}) != len(found):
        raise forms.unknown("npu-smi info -t template-info", text)
    return found


def _template_row(heads: tuple[list[str], list[str]], pair: tuple[str, str]) -> dict[str, str]:
    """Return the values of one template, which has two lines, by the words of both headers."""
    row: dict[str, str] = {}
    for names, line in zip(heads, pair, strict=True):
        values = forms.cells(line)[0].split()
        if len(values) != len(names):
            raise forms.unknown("a template of npu-smi", " ".join(pair))
        row |= dict(zip(names, values, strict=True))
    return row


def _template(row: dict[str, str], pair: tuple[str, str]) -> Profile:
    """One template; ``AnswerUnknown`` names its lines ``pair`` if its values are impossible."""
    memory_gib = forms.whole(row.get("Memory", ""))
    amounts = {name.lower(): forms.whole(row.get(name, "")) for name in _RESOURCES}
    if memory_gib is None or memory_gib < 1 or not amounts["aicore"] or not row.get("Name"):
        raise forms.unknown("a template of npu-smi", " ".join(pair))
    if memory_gib > 1024:  # noqa: PLR2004 - no chip has a TiB
        raise forms.unknown("a template of npu-smi", pair[0])
    return Profile(
        name=row["Name"],
        memory_mib=memory_gib * 1024,
        resources={name: n for name, n in amounts.items() if n},
    )


def division(text: str) -> Division:
    """``info -t info-vnpu``: the chip's free resources and its vNPUs."""
    lines = text.splitlines()
    names: list[str] = []
    pairs: list[str] = []
    announced: int | None = None
    instances: list[Instance] = []
    columns: list[str] = []
    for line in lines:
        parts = forms.cells(line)
        if "AICORE" in line:
            names = parts[0].split()
        elif names and not pairs and re.match(r"^\s*\|?\s*[\dN][\dA.]*/", line):
            pairs = parts[0].split()
        elif match := re.search(r"Total number of vnpu:\s*(\d{1,3})\b", line):
            announced = int(match[1])
        elif "Vnpu ID" in line:
            columns = parts
        elif columns and len(parts) == len(columns) and not forms.is_separator(line):
            instances.append(_instance(dict(zip(columns, parts, strict=True))))
    if not pairs or len(pairs) != len(names) or announced != len(instances):
        raise forms.unknown("npu-smi info -t info-vnpu", text)
    free: dict[str, int] = {}
    totals: dict[str, int] = {}
    for name, pair in zip(names, pairs, strict=True):
        left, _, right = pair.partition("/")
        if (total := forms.whole(right)) is not None:
            totals[name.lower()] = total
            free[name.lower()] = min(forms.whole(left) or 0, total)
    return Division(
        memory_gib=totals.pop("memory", 0),
        free_gib=free.pop("memory", 0),
        totals=totals,
        free=free,
        instances=tuple(instances),
    )


def _instance(row: dict[str, str]) -> Instance:
    number = forms.whole(row.get("Vnpu ID", ""))
    template = row.get("Template Name", "")
    if number is None or not template:
        raise forms.unknown("a vNPU of npu-smi", " ".join(row.values()))
    return Instance(
        id=number,
        template=template,
        used=row.get("Status") == "1",
        container=row.get("Container ID", ""),
    )


def created(text: str) -> bool:
    """``set -t create-vnpu``: return true on success; other output raises ``AnswerUnknown``."""
    return _succeeded("create-vnpu", text, r"Create vnpu success")


def destroyed(text: str) -> bool:
    """``set -t destroy-vnpu``."""
    return _succeeded("destroy-vnpu", text, r"Destroy vnpu \d{1,6} success")


def recovery_set(text: str) -> bool:
    """``set -t vnpu-cfg-recover``."""
    return _succeeded("vnpu-cfg-recover", text, r"recover mode \w+ is set successfully")


def _succeeded(command: str, text: str, words: str) -> bool:
    if not re.search(words, text) or re.search(r"\bfail", text, re.IGNORECASE):
        raise forms.unknown(f"npu-smi set -t {command}", text)
    return True


def recovers(text: str) -> bool:
    """``info -t vnpu-cfg-recover``: return true if vNPUs are re-created after a reboot."""
    match = re.search(r"recover mode\s*:\s*(Enable|Disable)\b", text)
    if match is None:
        raise forms.unknown("npu-smi info -t vnpu-cfg-recover", text)
    return match[1] == "Enable"


def topology(text: str) -> dict[tuple[int, int], Neighbour]:
    """``info -t topo``: links between chips, by their numbers in the table."""
    return forms.matrix(text, prefix="NPU", fabric="HCCS|HCCS_SW|SIO")
