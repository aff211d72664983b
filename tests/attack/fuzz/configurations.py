# SPDX-License-Identifier: Apache-2.0
"""Attacks the registry's reader of device configurations, in TOML and YAML.

The reader runs in a child process, because a parser in C may end it: nested YAML has done so. Run
as a program, the module is that child: it reads cases from stdin and answers each with a line.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, BinaryIO

from hami_common.errors import SettingsInvalid
from hami_common.model.device import DeviceFacts
from hami_registry.core.device_config import canonical_device, digest, parse
from tests.attack.fuzz.inputs import DEEP, DIGITS, damaged, pick
from tests.attack.fuzz.laws import DETAIL, Case, Told, cause, chance_of, resident_mib

TOML, YAML = "devices.toml", "devices.yaml"
FIELDS = (
    "slots", "memory_scaling", "overcommit", "core_scaling", "reserved_mib", "hidden", "cordoned",
)  # fmt: skip
LISTS = ("nodes", "vendors", "types", "uuids", "indexes")
NUMBERS = (
    "0", "1", "10", "-1", "1024", "1025", "2147483648", "9223372036854775808", "1" * 25, DIGITS,
    "0.5", "1.0", "2.5", "100.0", "1e308", "1e-320", "1e9999", "-0.0", "inf", "-inf", "nan",
    "0x7fffffff", "0o17", "0b1", "1_000", "1__0", "01", "+1", ".5", "5.", "1:30:00", ".inf", ".nan",
)  # fmt: skip
WORDS = (
    '"x"', '""', "''", '"gpu-*"', '"[a-"', f'"{"*a" * 40}"', '"\\u0000"', '"\\ud800"',
    '"\\U0010ffff"', "true", "false", "null", "~", "yes", "2026-01-01", "2026-01-01T00:00:00Z",
    "2026-13-45", "[]", "{}", '"""a\nb"""', f'"{"a" * 20_000}"', "[1, 2, 3]", '["a", 1]', "[[1]]",
    "{a = 1}", "{a: 1}", "|", ">", "!!python/object/apply:os.system ['true']", "!!binary aGk=",
    "!!set {a}", "*a", "&a [*a]", "@", "%",
)  # fmt: skip
FACTS = (
    DeviceFacts(uuid="GPU-a", vendor="nvidia", index=0, type="NVIDIA A100", memory_mib=40_960),
    DeviceFacts(uuid="GPU-b", vendor="ascend", index=4_095, type="910B3", memory_mib=1 << 30),
    DeviceFacts(uuid="GPU-c", vendor="nvidia", index=1, type="x", memory_mib=0, max_shares=7),
)
HOSTILE = (0.0, 0.1, 0.3, 1.0)
"""Fractions of the values of one file that are out of place."""
ANSWER_S = 60.0
LENGTH_BYTES = 4


SOUND = {
    "slots": ("1", "2", "16", "1024"),
    "memory_scaling": ("1.0", "2.5", "0.5", "100.0"),
    "overcommit": ('"managed"', '"recall"'),
    "core_scaling": ("1.0", "2", "1e1"),
    "reserved_mib": ("0", "512", "100000"),
    "hidden": ("true", "false"),
    "cordoned": ("true", "false"),
    "nodes": ('["a"]', '["gpu-*", "b?"]', "[]"),
    "vendors": ('["nvidia"]', '["ascend", "x"]'),
    "types": ('["A100"]', '[""]'),
    "uuids": ('["GPU-a"]', "[]"),
    "indexes": ("[0, 1]", "[]", "[4095]"),
}


def _literal(chance: random.Random, field: str, hostile: float) -> str:
    if chance.random() >= hostile:
        return pick(chance, SOUND.get(field, ("true",)))
    return pick(chance, NUMBERS if chance.random() < 0.6 else WORDS)


def _fields(chance: random.Random, names: tuple[str, ...], hostile: float) -> list[tuple[str, str]]:
    found = dict.fromkeys(pick(chance, names) for _ in range(chance.randrange(5)))
    if chance.random() < hostile / 4:
        found[pick(chance, ("allow_stranded", "x", '"a b"', "a.b", "é", "<<"))] = None
    return [(name, _literal(chance, name, hostile)) for name in found]


def toml(chance: random.Random) -> str:
    """Return a TOML document, rarely deep."""
    if chance.random() < 0.02:
        return _deep_toml(chance)
    hostile = pick(chance, HOSTILE)
    parts = ["allow_stranded = true\n"] if chance.random() < 0.1 else []
    parts.append("[defaults]\n")
    parts += [f"{name} = {text}\n" for name, text in _fields(chance, FIELDS[:4], hostile)]
    for _ in range(chance.randrange(4)):
        parts.append("[[rules]]\n")
        parts += [
            f"{name} = {text}\n" for name, text in _fields(chance, (*FIELDS, *LISTS), hostile)
        ]
    return "".join(parts)


def _deep_toml(chance: random.Random) -> str:
    depth = pick(chance, DEEP)
    return pick(
        chance,
        (
            f"rules = {'[' * depth}{']' * depth}\n",
            f"{'.'.join(['a'] * depth)} = 1\n",
            f"[{'.'.join(['a'] * depth)}]\n",
            f"a = {'{b=' * depth}1{'}' * depth}\n",
            f"a = {'[{b=' * depth}1{'}]' * depth}\n",
        ),
    )


def yaml(chance: random.Random) -> str:
    """Return a YAML document, rarely deep or growing when its aliases are followed."""
    if chance.random() < 0.02:
        return _deep_yaml(chance)
    hostile = pick(chance, HOSTILE)
    parts = ["---\n"] if chance.random() < 0.1 else []
    parts.append("defaults:\n  slots: 10\n")
    parts += [f"  {name}: {text}\n" for name, text in _fields(chance, FIELDS[1:4], hostile)]
    rules = chance.randrange(4)
    parts.append("rules:\n" if rules else "")
    for _ in range(rules):
        fields = _fields(chance, (*FIELDS, *LISTS), hostile) or [("slots", "1")]
        lines = [f"    {name}: {text}\n" for name, text in fields]
        parts += [f"  - {lines[0].strip()}\n", *lines[1:]]
    return "".join(parts)


def _deep_yaml(chance: random.Random) -> str:
    depth = pick(chance, (*DEEP, 100_000))
    doubled = "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))
    texts: tuple[Callable[[], str], ...] = (
        lambda: f"rules: {'[' * depth}{']' * depth}\n",
        lambda: "- " * depth + "1\n",
        lambda: "{a: " * depth + "1" + "}" * depth,
        lambda: "? " * depth,
        lambda: "".join(f"{' ' * n}a:\n" for n in range(min(depth, 1500))),
        lambda: f"a0: &a0 [1]\n{doubled}rules: *a29\n",
        lambda: f"defaults: &a {{slots: 1}}\nrules:\n{'- *a' * 3}",
        lambda: f"defaults: {{{'<<: ' * 50}{{}}}}\n",
        lambda: "rules: &a [*a]\n",
        lambda: "&a " * depth,
        lambda: "!a " * depth,
        lambda: "'" * depth,
    )
    return pick(chance, texts)()


class _Reader:
    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child
        self._processor_s = 0.0

    async def take(self, case: Case) -> Told:
        answer = self._ask(case)
        return Told(problem=answer["problem"], outcome=f"{case.kind} {answer['outcome']}")

    def _ask(self, case: Case) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            for part in (case.kind.encode(), case.body):
                self._child.stdin.write(len(part).to_bytes(LENGTH_BYTES) + part)
            self._child.stdin.flush()
        except BrokenPipeError:
            line = b""
        else:
            line = self._child.stdout.readline()
        if not line:
            raise ChildEnded(f"by exit code {self._child.wait(ANSWER_S)}")
        answer: dict[str, Any] = json.loads(line)
        self._processor_s = answer["processor_s"]
        return answer

    async def finish(self) -> str:
        """Read a good file."""
        told = self._ask(Case(kind=TOML, body=b"[defaults]\nslots = 4\n"))
        if told["outcome"] == "taken":
            return ""
        return f"a good file is refused afterwards{DETAIL}{told}"

    def processor_s(self) -> float:
        return self._processor_s

    def resident_mib(self) -> float:
        return resident_mib(self._child.pid)


class ChildEnded(Exception):
    """The child has exited."""


class Configurations:
    """Device configurations."""

    name = "configurations"
    full = 50_000
    few = 2_500
    is_shrunk = True

    def make(self, seed: str, number: int) -> Case:
        """Make a file: two of three by grammar, one damaged."""
        chance = chance_of(seed, self.name, number)
        kind, text = (TOML, toml(chance)) if number % 2 else (YAML, yaml(chance))
        body = text.encode("utf-8", "surrogatepass")
        return Case(kind=kind, body=damaged(body, chance) if number % 3 == 0 else body)

    @asynccontextmanager
    async def service(self) -> AsyncIterator[_Reader]:
        """Start a child that reads configurations."""
        command = [sys.executable, "-m", "tests.attack.fuzz.configurations"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            try:
                yield _Reader(child)
            finally:
                child.kill()


def _serve(stream: BinaryIO) -> None:
    while len(length := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
        name = stream.read(int.from_bytes(length)).decode()
        text = stream.read(int.from_bytes(stream.read(LENGTH_BYTES)))
        problem, outcome = _read(name, text)
        answer = {"problem": problem, "outcome": outcome, "processor_s": time.process_time()}
        print(json.dumps(answer), flush=True)


def _read(name: str, text: bytes) -> tuple[str, str]:
    try:
        config = parse(text, name=name)
        digest(config)
        for facts in FACTS:
            canonical_device(config, "gpu-a", facts)
    except SettingsInvalid:
        return "", "refused"
    except Exception as error:  # noqa: BLE001 - which is what is looked for
        return cause(error), "raised"
    return "", "taken"


if __name__ == "__main__":
    _serve(sys.stdin.buffer)
