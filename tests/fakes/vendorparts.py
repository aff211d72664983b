# SPDX-License-Identifier: Apache-2.0
"""Hardware partitions of the fake vendor tools: creates, lists, removes and rejects them.

The limits of a chip's partitions are enforced as the vendors document them: AI cores, AI CPUs and
memory of an Ascend chip, slices of a GCU, quota and number of sGPUs, one size of vXPU per card. A
wrong plan fails as it would on a machine. State is one JSON file beside the fake tools; each run
reads, changes and replaces it under a lock, so that a run that is killed leaves it whole.

Runs as a program of its own for each call of a fake tool, thus with the standard library only::

    python -I -S vendorparts.py FOLDER TOOL ARGUMENT...

``faults`` in the state name accidents: each is used up by the first command with its word.
Memory in MiB, compute in percent of one card. Layouts of lists that were never seen on a machine
are invented; ``docs/drivers.md`` names them.
"""

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

State = dict[str, Any]
Cards = list[dict[str, Any]]
Said = tuple[str, str, int]
"""Standard output, standard error, exit status."""

UNKNOWN = 64
_NAMES = ("AICORE", "Memory", "AICPU", "VPC", "VENC", "VDEC", "JPEGD", "JPEGE", "PNGD")
ASCEND_CHIPS: dict[str, dict[str, Any]] = {
    "910B3": {
        "memory_mib": 65536,
        "totals": (20, 64, 7, 9, 0, 2, 24, 4, None),
        "templates": {
            "vir10_3c_32g": (10, 32, 3, 4, 0, 1, 12, 2, 0),
            "vir05_1c_16g": (5, 16, 1, 2, 0, 0, 6, 1, 0),
        },
        "ids": 16,
    },
    "910B2": {
        "memory_mib": 65536,
        "totals": (24, 64, 6, 9, 0, 2, 24, 4, None),
        "templates": {
            "vir12_3c_32g": (12, 32, 3, 4, 0, 1, 12, 2, 0),
            "vir06_1c_16g": (6, 16, 1, 2, 0, 0, 6, 1, 0),
            "vir03_1c_8g": (3, 8, 1, 1, 0, 0, 3, 0, 0),
        },
        "ids": 16,
    },
    "910B4": {
        "memory_mib": 32768,
        "totals": (20, 32, 7, 9, 0, 2, 24, 4, None),
        "templates": {
            "vir10_3c_16g": (10, 16, 3, 4, 0, 1, 12, 2, 0),
            "vir10_3c_16g_nm": (10, 16, 3, 0, 0, 0, 0, 0, 0),
            "vir10_4c_16g_m": (10, 16, 4, 9, 0, 2, 24, 4, 0),
            "vir05_1c_8g": (5, 8, 1, 2, 0, 0, 6, 1, 0),
        },
        "ids": 16,
    },
    "910ProA": {
        "memory_mib": 32768,
        "totals": (30, 32, None, None, None, None, None, None, None),
        "templates": {
            "vir02": (2, 2, 1, 0, 0, 0, 0, 0, 0),
            "vir04": (4, 4, 1, 0, 0, 0, 0, 0, 0),
            "vir08": (8, 8, 3, 0, 0, 0, 0, 0, 0),
            "vir16": (16, 17, 7, 0, 0, 0, 0, 0, 0),
        },
        "ids": 16,
    },
    "310P3": {
        "memory_mib": 21527,
        "totals": (8, 21, 7, 12, 3, 12, 16, 8, None),
        "templates": {
            "vir01": (1, 3, 1, 1, 0, 1, 2, 1, 0),
            "vir02": (2, 6, 2, 3, 1, 3, 4, 2, 0),
            "vir02_1c": (2, 6, 1, 3, 0, 3, 4, 2, 0),
            "vir04": (4, 12, 4, 6, 2, 6, 8, 4, 0),
            "vir04_3c": (4, 12, 3, 6, 1, 6, 8, 4, 0),
            "vir04_3c_ndvpp": (4, 12, 3, 0, 0, 0, 0, 0, 0),
            "vir04_4c_dvpp": (4, 12, 4, 12, 3, 12, 16, 8, 0),
        },
        "ids": 8,
    },
    "Ascend910": {
        "memory_mib": 65536,
        "totals": (20, 64, 7, 9, 0, 2, 24, 4, None),
        "templates": {
            "vir10_3c_32g": (10, 32, 3, 4, 0, 1, 12, 2, 0),
            "vir05_1c_16g": (5, 16, 1, 2, 0, 0, 6, 1, 0),
        },
        "ids": 16,
    },
}
"""Amounts of each chip and its templates, in the order of ``_NAMES`` (``None``: unknown)."""
ENFLAME_PROFILES = (
    ("1g.7gb", 0, 6, 7162, 4),
    ("2g.14gb", 1, 3, 14325, 8),
    ("3g.21gb", 2, 2, 21488, 12),
    ("6g.42gb", 3, 1, 42976, 24),
)
"""Name, number, most instances, memory, processors."""
ENFLAME_SLICES = 6
METAX_MOST = 16
METAX_STEP_MIB = 128
CAMBRICON_PROFILES = 16
KUNLUNXIN_SIZES = (0, 2, 4)
KUNLUNXIN_HANDLES = 32
ENDLESS = frozenset({"hang", "stall"})
"""Accidents after which a command never ends."""


# ---- Ascend ------------------------------------------------------------------------------------


def ascend_templates(chip: str) -> str:
    """``info -t template-info``."""
    lines = [
        f"+{'-' * 90}+",
        f"|{'NPU instance template info is:':<90}|",
        f"|{'Name':<20}{'AICORE':<10}{'Memory':<10}{'AICPU':<10}{'VPC':<15}{'VENC':<15}{'JPEGD':<10}|",
        f"|{' GB':>34}{'':<16}{'PNGD':<15}{'VDEC':<15}{'JPEGE':<10}|",
        f"|{'=' * 90}|",
    ]
    for name, amounts in ASCEND_CHIPS[chip]["templates"].items():
        core, memory, cpu, vpc, venc, vdec, jpegd, jpege, pngd = amounts
        lines += [
            f"|{name:<20}{core:<10}{memory:<10}{cpu:<10}{vpc:<15}{venc:<15}{jpegd:<10}|",
            f"|{'':<50}{pngd:<15}{vdec:<15}{jpege:<10}|",
            f"+{'-' * 90}+",
        ]
    return "\n".join([*lines, ""])


def ascend_division(chip: str, parts: dict[str, dict[str, Any]]) -> str:
    """``info -t info-vnpu``: ``parts`` by vNPU id."""
    line = f"+{'-' * 79}+"
    free = _ascend_free(chip, parts)
    pairs = [
        "NA/NA" if total is None else f"{left}/{total}"
        for left, total in zip(free, ASCEND_CHIPS[chip]["totals"], strict=True)
    ]
    lines = [
        line,
        f"| {'NPU resource static info as follow:':<78}|",
        f"| {'Format:Free/Total                   NA: Currently, query is not supported.':<78}|",
        f"| {''.join(f'{name:<10}' for name in _NAMES):<78}"[:80] + "|",
        f"| {'           GB':<78}|",
        f"|{'=' * 79}|",
        f"| {''.join(f'{pair:<9} '[:10] for pair in pairs):<78}"[:80] + "|",
        line,
        f"| {f'Total number of vnpu: {len(parts)}':<78}|",
        line,
    ]
    if parts:
        lines += [
            "|  Vnpu ID  |  Vgroup ID     |  Container ID  |  Status  |  Template Name       |",
            line,
        ]
        for number, part in sorted(parts.items()):
            owner = "ffffffffffff" if part["busy"] else "000000000000"
            lines.append(
                f"|  {number:<7}  |  0             |  {owner}  |  {int(part['busy'])}       |"
                f"  {part['template']:<18}  |"
            )
        lines.append(line)
    return "\n".join([*lines, ""])


def _ascend_free(chip: str, parts: dict[str, dict[str, Any]]) -> list[int]:
    kind = ASCEND_CHIPS[chip]
    taken = [kind["templates"][part["template"]] for part in parts.values()]
    return [
        0 if total is None else total - sum(amounts[at] for amounts in taken)
        for at, total in enumerate(kind["totals"])
    ]


def _ascend(state: State, cards: Cards, arguments: list[str]) -> Said:
    chip = cards[0]["model"] if cards else "910B3"
    match arguments:
        case ["info", "-t", "template-info"]:
            return ascend_templates(chip), "", 0
        case ["info", "-t", "vnpu-cfg-recover"]:
            word = "Enable" if state.get("recover", True) else "Disable"
            return f"\tVNPU config recover mode       : {word}\n", "", 0
        case ["set", "-t", "vnpu-cfg-recover", "-d", word]:
            state["recover"] = word == "1"
            done = "Enable" if word == "1" else "Disable"
            return f"The VNPU config recover mode {done} is set successfully.\n", "", 0
        case ["info", "-t", "info-vnpu", "-i", npu, "-c", "0"]:
            return ascend_division(chip, _parts(state, npu)), "", 0
        case ["set", "-t", "create-vnpu", "-i", npu, "-c", "0", "-f", template, "-v", number]:
            return _ascend_create(chip, npu, _parts(state, npu), template, number)
        case ["set", "-t", "destroy-vnpu", "-i", npu, "-c", "0", "-v", number]:
            part = _parts(state, npu).get(number)
            if part is None or part["busy"]:
                return f"\tdestroy vnpu {number} failed.\n", "", 1
            del _parts(state, npu)[number]
            return _done(f"Destroy vnpu {number} success"), "", 0
    return _unknown(arguments)


def _ascend_create(
    chip: str, npu: str, parts: dict[str, dict[str, Any]], template: str, number: str
) -> Said:
    kind = ASCEND_CHIPS[chip]
    first = int(npu) * 16 + 100
    if template not in kind["templates"]:
        return "Error parameter of -f.\n", "", 1
    if number in parts or int(number) not in range(first, first + kind["ids"]):
        return "Error parameter of -v.\n", "", 1
    free = _ascend_free(chip, parts)
    for name, left, need, total in zip(
        _NAMES, free, kind["templates"][template], kind["totals"], strict=True
    ):
        if total is not None and need > left:
            why = f"Insufficient number of {name} available, unallocated {name} number:{left}."
            return f"\tcreate vnpu failed.\n\t{why}\n", "", 1
    parts[number] = {"template": template, "busy": False}
    return _done("Create vnpu success"), "", 0


def _done(message: str) -> str:
    return f"\tStatus                         : OK\n\tMessage                        : {message}\n"


# ---- Enflame -----------------------------------------------------------------------------------


def _enflame(state: State, cards: Cards, arguments: list[str]) -> Said:
    match arguments:
        case ["-i", card, "--drs", "--list-profile"]:
            line = "+---------------------------------------------------------+"
            rows = [
                f"| {card:<5} {name:<9} {number:<4} {most:<7} {f'{memory}MiB':<10} {sip:<8} |"
                for name, number, most, memory, sip in ENFLAME_PROFILES
            ]
            head = "| DEV   NAME      ID   COUNT   MEMORY     SIP             |"
            return "\n".join([line, head, line.replace("-", "="), *rows, line, ""]), "", 0
        case ["-L"]:
            line = f"+{'-' * 68}+"
            rows = [
                f"| {card['index']:<5} {part['profile']:<9} {number:<13} {part['uuid']:<36} |"
                for card in cards
                for number, part in sorted(_parts(state, card["index"]).items())
            ]
            head = "| DEV   PROFILE   INSTANCE-ID   UUID                                 |"
            return "\n".join([line, head, line.replace("-", "="), *rows, line, ""]), "", 0
        case ["-i", card, "--drs", "--create-instance", profile]:
            return _enflame_create(state, card, profile)
        case ["-i", card, "--drs", "--destroy-instance", number]:
            part = _parts(state, card).get(number)
            if part is None:
                return "", f"efsmi: instance {number} is not found\n", 1
            if part["busy"]:
                return "", f"efsmi: instance {number}: device or resource busy\n", 1
            del _parts(state, card)[number]
            return "Success\n", "", 0
    return _unknown(arguments)


def _enflame_create(state: State, card: str, number: str) -> Said:
    parts = _parts(state, card)
    found = [one for one in ENFLAME_PROFILES if str(one[1]) == number]
    if not found:
        return "", f"efsmi: profile {number} is not found\n", 1
    name, _, most, _, _ = found[0]
    slices = sum(int(part["profile"].partition("g")[0]) for part in parts.values())
    same = sum(part["profile"] == name for part in parts.values())
    if slices + int(name.partition("g")[0]) > ENFLAME_SLICES or same >= most:
        return "", "efsmi: insufficient resources for the instance\n", 1
    free = next(n for n in range(ENFLAME_SLICES) if str(n) not in parts)
    state["made"] = state.get("made", 0) + 1
    parts[str(free)] = {"profile": name, "busy": False, "uuid": f"{state['made']:032x}"}
    return "Success\n", "", 0


# ---- MetaX -------------------------------------------------------------------------------------


def _metax(state: State, cards: Cards, arguments: list[str]) -> Said:
    match arguments:
        case ["sgpu", "-i", card, "--set-sched-class", word]:
            if _parts(state, card) and state.setdefault("class", {}).get(card, "0") != word:
                return "", "mx-smi: device or resource busy\n", 1
            state.setdefault("class", {})[card] = word
            return "Done\n", "", 0
        case ["sgpu", "-i", card, "--create", "--vram", vram, "--compute", compute, "--alias", a]:
            size = int(vram[:-1]) * (1024 if vram.endswith("G") else 1)
            wanted = {"alias": a, "vram": size, "compute": int(compute), "busy": False}
            return _metax_create(state, cards, card, wanted)
        case ["sgpu", "--remove", number, "-i", card]:
            part = _parts(state, card).get(number)
            if part is None:
                return "", f"mx-smi: sGPU {number} does not exist\n", 1
            if part["busy"]:
                return "", "mx-smi: device or resource busy\n", 1
            del _parts(state, card)[number]
            return "Done\n", "", 0
    return _unknown(arguments)


def _mxsml(state: State, cards: Cards, arguments: list[str]) -> Said:
    """The agent's program for MXSML."""
    match arguments:
        case ["list"]:
            return json.dumps({"gpus": [_metax_gpu(state, card) for card in cards]}) + "\n", "", 0
        case ["create", card, memory, compute, alias, *scheduling]:
            for word in scheduling:
                _metax(state, cards, ["sgpu", "-i", card, "--set-sched-class", word])
            wanted = {"alias": alias, "vram": int(memory), "compute": int(compute), "busy": False}
            said, complaint, status = _metax_create(state, cards, card, wanted)
            return said, complaint.replace("mx-smi", "mxsml"), _TRANSIENT if status else 0
        case ["remove", card, number]:
            said, complaint, status = _metax(state, cards, ["sgpu", "--remove", number, "-i", card])
            kind = _BUSY if "busy" in complaint else _GONE
            return said, complaint.replace("mx-smi", "mxsml"), kind if status else 0
    return _unknown(arguments)


def _metax_gpu(state: State, card: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": card["index"],
        "uuid": f"GPU-{card['uuid']}",
        "memory_mib": card["memory_mib"],
        "bus_id": card["bus_id"],
        "scheduling": int(state.get("class", {}).get(str(card["index"]), "0")),
        "sgpus": [
            {
                "number": int(number),
                "alias": part["alias"],
                "memory_mib": part["vram"],
                "compute_pct": part["compute"],
                "used": 1 << 20 if part["busy"] else 0,
            }
            for number, part in sorted(_parts(state, card["index"]).items())
        ],
    }


def _metax_create(state: State, cards: Cards, card: str, wanted: dict[str, Any]) -> Said:
    parts = _parts(state, card)
    total = next(one["memory_mib"] for one in cards if str(one["index"]) == card)
    fixed = state.get("class", {}).get(card, "0") == "1"
    if wanted["vram"] <= 0 or wanted["vram"] % METAX_STEP_MIB:
        return "", "mx-smi: invalid argument\n", 1
    if len(parts) >= METAX_MOST:
        return "", "mx-smi: no more sGPU can be created\n", 1
    if sum(part["vram"] for part in parts.values()) + wanted["vram"] > total:
        return "", "mx-smi: insufficient vram\n", 1
    if not 1 <= wanted["compute"] <= 100:
        return "", "mx-smi: invalid compute\n", 1
    compute = sum(part["compute"] for part in parts.values()) + wanted["compute"]
    if fixed and compute > 100:
        return "", "mx-smi: insufficient compute\n", 1
    free = next(n for n in range(METAX_MOST) if str(n) not in parts)
    parts[str(free)] = wanted
    return f"sGPU {free} was created\n", "", 0


# ---- Kunlunxin ---------------------------------------------------------------------------------


def kunlunxin_table(cards: Cards, cuts: dict[str, int]) -> str:
    """The summary table; ``cuts``: vXPUs by card number."""
    line = "+-------------------------------+----------------------+----------------------+"
    table = [
        f"+{'-' * 77}+",
        "| XPU-SMI               Driver Version: 5.0.21.26    XPU-RT Version: 5.0.21   |",
        line.replace("+", "|", 1),
        "| XPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | XPU-Util  Compute M. |",
        "|                               |             L3-Usage |            SR-IOV M. |",
        "|===============================+======================+======================|",
    ]
    rows = []
    shown = [card for card in cards if not card["failing"]]
    for card in shown:
        parts = cuts.get(str(card["index"]), 0)
        place = (card["index"], card["bus_id"], card["used_mib"], card["core_pct"])
        size = card["memory_mib"] // (parts or 1)
        errors = 2 if card["lost"] else 0
        rows.append((*place, size, errors, "Enabled" if parts else "Disabled"))
    for card in shown:
        parts = cuts.get(str(card["index"]), 0)
        for turn in range(parts):
            number = max(KUNLUNXIN_SIZES) * (card["index"] + 1) + len(cards) + turn
            size = card["memory_mib"] // parts
            rows.append((number, kunlunxin_function(card, turn), 0, 0, size, 0, "N/A"))
    for index, bus_id, used, load, size, errors, word in rows:
        memory = f"{used}MiB / {size}MiB"
        table += [
            f"| {index:>3}  P800 OAM           N/A   | 0000{bus_id.upper()} N/A | {errors:>20} |",
            f"| N/A   35C  N/A     87W / 400W | {memory:>20} | {f'{load}%':>8}      Default |",
            f"|                               |      0MiB /    96MiB | {word:>20} |",
            line,
        ]
    processes = [
        f"|    {card['index']}   N/A  N/A      {pid}      C   trainer {used:>30}MiB|"
        for card in shown
        for pid, used in card["processes"]
    ] or [f"|  {'No running processes found':<75}|"]
    table += [
        "",
        f"+{'-' * 77}+",
        f"| {'Processes:':<76}|",
        "|  XPU   XI   CI        PID   Type   Process name                  XPU Memory |",
        "|        ID   ID                                                   Usage      |",
        f"|{'=' * 77}|",
        *processes,
        f"+{'-' * 77}+",
        "",
    ]
    return "\n".join(table)


def kunlunxin_function(card: dict[str, Any], turn: int) -> str:
    """Address of a card's virtual function."""
    return f"{card['bus_id'][:-4]}01.{turn}"


def _kunlunxin(state: State, cards: Cards, arguments: list[str]) -> Said:
    cuts = state.setdefault("cuts", {})
    if not arguments:
        return kunlunxin_table(cards, cuts), "", 0
    words = [re.fullmatch(r"--(set-sriov-numvfs|id)=(\d+)", word) for word in arguments]
    found = {match[1]: match[2] for match in words if match}
    if len(found) != len(arguments) or len(found) != 2:
        return _unknown(arguments)
    card, parts = found["id"], int(found["set-sriov-numvfs"])
    if parts not in KUNLUNXIN_SIZES:
        return "", f"xpu-smi: Invalid argument: numvfs {parts}\n", 2
    if state.get("using", {}).get(card) or (cuts.get(card) and parts):
        return "", "xpu-smi: In use: the XPU or one of its VFs\n", 19
    handles = len(cards) + sum(cuts.values()) - cuts.get(card, 0) + parts
    if handles > KUNLUNXIN_HANDLES:
        return "", "xpu-smi: Insufficient resources\n", 23
    cuts[card] = parts
    place = next(one for one in cards if str(one["index"]) == card)
    _show_functions(Path(state["sysfs"]), place, parts)
    return "All done.\n", "", 0


def _show_functions(sysfs: Path, card: dict[str, Any], parts: int) -> None:
    """Write the kernel's files of a card's virtual functions."""
    devices = sysfs / "bus/pci/devices"
    home = devices / card["bus_id"]
    for turn in range(max(KUNLUNXIN_SIZES)):
        function = devices / kunlunxin_function(card, turn)
        link = home / f"virtfn{turn}"
        if turn < parts:
            function.mkdir(exist_ok=True)
            for name, target in ((link, function), (function / "physfn", home)):
                if not name.is_symlink():
                    name.symlink_to(target)
        elif link.is_symlink():
            link.unlink()
            (function / "physfn").unlink(missing_ok=True)
            function.rmdir()
    (home / "sriov_numvfs").write_text(f"{parts}\n", encoding="ascii")


# ---- Cambricon ---------------------------------------------------------------------------------

_GONE, _BUSY, _REFUSED, _TRANSIENT = 16, 17, 19, 21
"""Exit status of the agent's program for CNDEV: the kind of the trouble."""


def _cambricon(state: State, cards: Cards, arguments: list[str]) -> Said:
    profiles = state.setdefault("profiles", {})
    match arguments:
        case ["list"]:
            listed = [
                {
                    "slot": card["index"],
                    "uuid": card["uuid"],
                    "memory_mib": card["memory_mib"],
                    "profiles": profiles.get(str(card["index"]), []),
                    "instances": [
                        {
                            "id": int(number),
                            "profile": part["profile"],
                            "name": part["name"],
                            "node": f"/dev/cambricon-caps/cap_dev{card['index']}_mi{number}",
                            "quota": part["quota"],
                            "memory": part["memory"],
                            "used": 1 << 20 if part["busy"] else 0,
                        }
                        for number, part in sorted(_parts(state, card["index"]).items())
                    ],
                }
                for card in cards
            ]
            return json.dumps({"cards": listed}) + "\n", "", 0
        case [word, uuid, *rest]:
            card = next((one for one in cards if one["uuid"] == uuid), None)
            if card is None:
                return "", f"cndev: there is no card {uuid}\n", _GONE
            own = profiles.setdefault(str(card["index"]), [])
            parts = _parts(state, card["index"])
            if word == "create":
                return _cambricon_create(card, own, parts, rest)
            if word == "destroy" and rest[0] not in parts:
                return "", "cndev: NOT_FOUND (error 14)\n", _GONE
            if word == "destroy" and parts[rest[0]]["busy"]:
                return "", "cndev: IN_USE (error 15)\n", _BUSY
            if word == "destroy":
                del parts[rest[0]]
            used = {part["profile"] for part in parts.values()}
            own[:] = [one for one in own if one["id"] in used]
            return "", "", 0
    return _unknown(arguments)


def _cambricon_create(
    card: dict[str, Any],
    own: list[dict[str, int]],
    parts: dict[str, dict[str, Any]],
    rest: list[str],
) -> Said:
    quota, memory, name = int(rest[0]), int(rest[1]), rest[2]
    found = next((one for one in own if (one["quota"], one["memory"]) == (quota, memory)), None)
    if found is None:
        if len(own) >= CAMBRICON_PROFILES:
            return "", "cndev: INSUFFICIENT_SPACE (error 9)\n", _REFUSED
        free = next(n for n in range(CAMBRICON_PROFILES) if all(one["id"] != n for one in own))
        found = {"id": free, "quota": quota, "memory": memory}
        own.append(found)
    total = sum(part["memory"] for part in parts.values()) + memory
    if total > card["memory_mib"] << 20 or sum(p["quota"] for p in parts.values()) + quota > 100:
        if all(part["profile"] != found["id"] for part in parts.values()):
            own.remove(found)
        return "", "cndev: INSUFFICIENT_SPACE (error 9)\n", _REFUSED
    if any(part["name"] == name for part in parts.values()):
        return "", "cndev: DUPLICATE (error 16)\n", _TRANSIENT
    number = next(n for n in range(1, 256) if str(n) not in parts)
    parts[str(number)] = {
        "profile": found["id"], "quota": quota, "memory": memory, "name": name, "busy": False,
    }  # fmt: skip
    return "", "", 0


# ---- all ---------------------------------------------------------------------------------------

ACT_BY_TOOL: dict[str, Callable[[State, Cards, list[str]], Said]] = {
    "npu-smi": _ascend,
    "hami-cndev": _cambricon,
    "efsmi": _enflame,
    "mx-smi": _metax,
    "hami-mxsml": _mxsml,
    "xpu-smi": _kunlunxin,
}
_LIVE = {
    "npu-smi": (("info", "-t", "info-vnpu"), ("info", "-t", "template-info")),
    "xpu-smi": ((),),
}
"""Beginnings of arguments whose answers depend on partitions; ``()``: none at all."""


def is_live(tool: str, arguments: tuple[str, ...]) -> bool:
    """Return true if this program must answer, although an answer could be prepared."""
    return any(
        arguments[: len(start)] == start if start else not arguments
        for start in _LIVE.get(tool, ())
    )


def _parts(state: State, card: str | int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = state.setdefault("parts", {}).setdefault(str(card), {})
    return found


def _unknown(arguments: list[str]) -> Said:
    return "", f"unknown argument: {' '.join(arguments)}\n", UNKNOWN


@contextmanager
def state_of(folder: Path) -> Iterator[State]:
    """The partitions' state, to be changed; it is replaced at the end."""
    with (folder / "parts.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "parts.json"
        state = json.loads(path.read_text("utf-8")) if path.exists() else {}
        yield state
        beside = folder / f"parts.{os.getpid()}"
        beside.write_text(json.dumps(state), encoding="utf-8")
        beside.replace(path)


def run(folder: Path, tool: str, arguments: list[str]) -> tuple[Said, str]:
    """One command: what it says, and by which accident it ends (empty: none)."""
    cards = json.loads((folder / "cards.json").read_text("utf-8"))
    with state_of(folder) as state:
        faults = state.get("faults", [])
        words = " ".join(arguments)
        fault = next((one for one in faults if one["word"] in words), None)
        if fault is not None:
            faults.remove(fault)
        how = fault["how"] if fault else ""
        act = ACT_BY_TOOL.get(tool)
        if act is None:
            return _unknown(arguments), ""
        if how in {"fail", "hang"}:
            return ("", f"{tool}: operation failed\n", 1), how
        said = act(state, cards, arguments)
    if how == "late":
        return ("", f"{tool}: operation failed\n", 1), how
    if how == "garbage":
        return ("\x1b[2J~~ %%@#! ???\n", "", 0), how
    return said, how


def main(arguments: list[str]) -> int:
    """Run as the fake tool's second half; returns its exit status."""
    folder, tool = Path(arguments[0]), arguments[1]
    (text, complaint, status), how = run(folder, tool, arguments[2:])
    if how in ENDLESS:
        time.sleep(600)
    if (folder / "answers" / "garbage").exists():
        text = "\x1b[2J~~ %%@#! ???\n" * 3
    if (folder / "answers" / "truncated").exists():
        half = text[: len(text) * 6 // 10].rstrip("\n+-=|")
        text = half[:-1].rstrip("\n+-=|")
    sys.stderr.write(complaint)
    sys.stdout.write(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
