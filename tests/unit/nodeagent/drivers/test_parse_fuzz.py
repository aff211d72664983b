# SPDX-License-Identifier: Apache-2.0
"""Damaged answers of tools: an error of ours or a result that could be true, nothing else.

Each tool's parsers get the same number of damaged texts: by default a few from a seed that never
changes and as many from a fresh one, which is printed. ``HAMI_PARSER_FUZZ=100000`` sets the number
per tool, ``HAMI_PARSER_FUZZ_SEED`` repeats a run.
"""

import json
import os
import random
import re
import secrets

import pytest
from msgspec import Struct
from msgspec.structs import asdict

from hami_common.model.device import Profile
from hami_common.units import INT32_MAX
from hami_nodeagent.drivers.ascend.parse import Chip
from hami_nodeagent.drivers.errors import DriverError
from hami_nodeagent.drivers.parse.seen import Seen
from hami_nodeagent.drivers.protocol import ProcessUsage
from tests.fakes.vendoranswers import MAKE_BY_VENDOR
from tests.unit.nodeagent.drivers.outputs import PARSERS, Parser

PER_TOOL = int(os.environ.get("HAMI_PARSER_FUZZ", "1000"))
SEED = os.environ.get("HAMI_PARSER_FUZZ_SEED", "")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SCRAPS = (
    "", "N/A", "-", "|", "/", "\n", " ", "0", "-1", "99999999999999999999", "1e308", "%", "MiB",
    "\x00", "℃", "None", "+---+", "====", "Processes:", "٣", "²", "(", "}", "[", '"', ":", "\t",
)  # fmt: skip
_VALUES: tuple[object, ...] = (
    None, True, -1, 0, 1 << 70, 0.5, 1e300, "", "N/A", "7", "-7", [], {}, [1], {"value": None},
    {"value": "x", "unit": 3}, "0000:ff:1f.7", [[[]]], {"a": {"b": {}}},
)  # fmt: skip


def damaged(text: str, dice: random.Random) -> str:
    """The text after one to four accidents."""
    if text.startswith(("{", "[")) and dice.random() < 0.5:
        return damaged_json(text, dice)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(text) + 1)
        lines = text.split("\n")
        line = dice.randrange(len(lines))
        match dice.randrange(9):
            case 0:
                text = text[:at]
            case 1:
                text = text[:at] + text[at + dice.randint(1, 8) :]
            case 2:
                text = text[:at] + dice.choice(_SCRAPS) + text[at:]
            case 3:
                text = text[:at] + dice.choice(_SCRAPS) + text[at + 1 :]
            case 4:
                del lines[line]
                text = "\n".join(lines)
            case 5:
                lines.insert(dice.randrange(len(lines) + 1), lines[line])
                text = "\n".join(lines)
            case 6:
                other = dice.randrange(len(lines))
                lines[line], lines[other] = lines[other], lines[line]
                text = "\n".join(lines)
            case 7:
                words = lines[line].split()
                if words:
                    word = dice.choice(words)
                    lines[line] = lines[line].replace(word, dice.choice((*_SCRAPS, *words)), 1)
                text = "\n".join(lines)
            case _:
                text = re.sub(
                    r"\d", lambda found: found[0] if dice.random() < 0.9 else dice.choice("0189x"),
                    text,
                )  # fmt: skip
        text = text or " "
    return text


def damaged_json(text: str, dice: random.Random) -> str:
    """The document with one value exchanged or one key lost."""
    document = json.loads(text)
    node = document
    for _ in range(dice.randint(0, 5)):
        children = list(node.values()) if isinstance(node, dict) else node
        inner = [child for child in children if isinstance(child, dict | list) and child]
        if not inner:
            break
        node = dice.choice(inner)
    if isinstance(node, dict):
        key = dice.choice(list(node))
        if dice.random() < 0.3:
            del node[key]
        else:
            node[key] = dice.choice(_VALUES)
    else:
        node[dice.randrange(len(node))] = dice.choice(_VALUES)
    return json.dumps(document)


def check(result: object) -> None:
    """Check the properties of every result, however the text was damaged."""
    if isinstance(result, Seen | Chip):
        check_device(result)
    elif isinstance(result, Profile):
        assert 0 < result.memory_mib <= INT32_MAX
        assert 0 <= result.core_pct <= 100
        assert all(amount > 0 for amount in result.resources.values())
    elif isinstance(result, ProcessUsage):
        assert 0 <= result.pid <= INT32_MAX
        assert result.used_mib is None or 0 <= result.used_mib <= INT32_MAX
    elif isinstance(result, Struct):
        for value in asdict(result).values():
            check(value)
    elif isinstance(result, dict):
        for value in result.values():
            check(value)
    elif isinstance(result, tuple):
        uuids = [one.uuid for one in result if isinstance(one, Seen) and one.uuid]
        assert len(set(uuids)) == len(uuids)
        places = [one.place for one in result if isinstance(one, Seen)]
        assert len(set(places)) == len(places)
        for value in result:
            check(value)


def check_device(one: Seen | Chip) -> None:
    assert not one.bus_id or _ADDRESS.fullmatch(one.bus_id)
    total_mib = one.memory_mib if isinstance(one, Seen) else one.total_mib
    for size_mib in (one.used_mib, total_mib):
        assert size_mib is None or 0 <= size_mib <= INT32_MAX
    assert one.core_pct is None or 0 <= one.core_pct <= 100
    assert one.temperature_c is None or -100 < one.temperature_c < 300
    assert one.power_w is None or 0 <= one.power_w <= 20_000
    for process in one.processes or ():
        check(process)
    if isinstance(one, Seen):
        assert 0 <= one.index <= INT32_MAX
        assert all(isinstance(value, str) for value in one.attributes.values())


@pytest.mark.parametrize(
    "parser", PARSERS, ids=[f"{parser.vendor}-{parser.name}" for parser in PARSERS]
)
def test_undamaged_answers_are_parsed(parser: Parser) -> None:
    for text in parser.texts:
        check(parser.parse(text))


@pytest.mark.timeout(30 + PER_TOOL // 100)
@pytest.mark.parametrize("vendor", sorted(MAKE_BY_VENDOR))
def test_damaged_answers_give_an_error_or_a_plausible_result(vendor: str) -> None:
    parsers = [parser for parser in PARSERS if parser.vendor == vendor]
    seeds = [SEED] if SEED else [f"always/{vendor}", secrets.token_hex(8)]
    refused = 0
    for seed in seeds:
        print(f"{vendor}: HAMI_PARSER_FUZZ_SEED={seed}")
        dice = random.Random(seed)
        for number in range(PER_TOOL):
            parser = parsers[number % len(parsers)]
            text = damaged(dice.choice(parser.texts), dice)
            try:
                result = parser.parse(text)
            except DriverError:
                refused += 1
                continue
            check(result)
    assert refused > PER_TOOL // 20
