# SPDX-License-Identifier: Apache-2.0
"""Writes docs/limiter-symbols.md from native/libvgpu/src/symbols.def; ``--check`` only compares."""

import re
import sys
from typing import NamedTuple

from tools.generated import DOCS, ROOT, write

SOURCE = ROOT / "native/libvgpu/src/symbols.def"

_REASON = re.compile(r'^SYMBOL_REASON\((\w+), "(.*)"\)$', re.MULTILINE)
_HOOK = re.compile(
    r'^(?:CUDA|NVML)_HOOK\(\w+, (\w+), \(.*\), (?:(\d+), )?([A-Z]+), "(.*)"\)$', re.MULTILINE
)
_CALL = re.compile(r"^(?:CUDA|NVML)_CALL\(\w+, (\w+), \(.*\), ([A-Z_]+)\)$", re.MULTILINE)
_PASS = re.compile(r"^(?:CUDA|NVML)_PASS\((\w+), ([A-Z_]+)\)$", re.MULTILINE)
_ENTRY = re.compile(r"^(?:CUDA|NVML)_(?:HOOK|CALL|PASS)\(", re.MULTILINE)

HEAD = """# Entry points and what the limiter does about them

Made from `native/libvgpu/src/symbols.def` by `./dev gen`; do not edit. A test compares the list
with the headers of CUDA 11.8, 12.0, 12.9 and 13.5 and fails for a name that is missing here. Names
of later releases are not in this table and pass through untouched.
"""

MEANING = {
    "COUNTED": "makes device memory: charged before the driver is asked",
    "TRACKED": "ends, moves or prepares what is counted",
    "THROTTLED": "starts device work: waits for the compute budget",
    "VIEWED": "answers with the container's figures",
    "TOUCHED": "uses existing memory: waits while the container is parked",
    "RESOLVED": "hands out functions: the driver's answer is replaced by its hook",
}


class Symbols(NamedTuple):
    """The list, read."""

    reasons: dict[str, str]
    hooks: list[tuple[str, int, str, str]]
    """Name, version to ask for (0: NVML), class, purpose."""
    passed: list[tuple[str, str]]
    """Name and reason of every other entry point."""


def read(text: str) -> Symbols:
    """Parse the list in ``text``; ValueError for an invalid line."""
    hooks = [(name, int(since or 0), kind, why) for name, since, kind, why in _HOOK.findall(text)]
    passed = [*_CALL.findall(text), *_PASS.findall(text)]
    reasons = dict(_REASON.findall(text))
    if len(hooks) + len(passed) != len(_ENTRY.findall(text)):
        raise ValueError("an entry of the list is not understood")
    if unknown := {reason for _, reason in passed} - set(reasons):
        raise ValueError(f"reasons without a text: {', '.join(sorted(unknown))}")
    if unknown := {kind for _, _, kind, _ in hooks} - set(MEANING):
        raise ValueError(f"unknown classes: {', '.join(sorted(unknown))}")
    return Symbols(reasons, hooks, passed)


def document(symbols: Symbols) -> str:
    """The whole page."""
    parts = [HEAD]
    total = len(symbols.hooks) + len(symbols.passed)
    parts.append(f"{total} entry points, {len(symbols.hooks)} of them hooked.\n\n## Hooked\n")
    for kind, meaning in MEANING.items():
        rows = [(name, why) for name, _, which, why in symbols.hooks if which == kind]
        parts.append(f"### {kind.capitalize()}: {meaning}\n\n| entry point | how |\n| --- | --- |")
        parts.append("\n".join(f"| `{name}` | {why} |" for name, why in rows) + "\n")
    parts.append("## Passed through\n\n| why | entry points |\n| --- | --- |")
    for reason, text in symbols.reasons.items():
        names = sorted(name for name, why in symbols.passed if why == reason)
        if names:
            parts.append(f"| {text} | {' '.join(f'`{name}`' for name in names)} |")
    return "\n".join(parts) + "\n"


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    return write({DOCS / "limiter-symbols.md": document(read(SOURCE.read_text()))})


if __name__ == "__main__":
    sys.exit(main())
