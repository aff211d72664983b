# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/import.md from hamictl's table of keys; ``--check`` only compares."""

import sys
from pathlib import Path

from hamictl.hamikeys import (
    DEVICE_CONFIG,
    NODE_CONFIG,
    VALUES,
    Carried,
    Refused,
    Rule,
    Table,
    destination,
)

TARGET = Path(__file__).resolve().parent.parent / "docs" / "import.md"
BEGIN, END = "<!-- generated: keys -->", "<!-- end of keys -->"
DOCUMENTS: tuple[tuple[str, Table], ...] = (
    ("Values of the chart", VALUES),
    ("Device configuration", DEVICE_CONFIG),
    ("Configuration of a node", NODE_CONFIG),
)


def table(keys: Table) -> str:
    """Return one row per key."""
    rows = ["| key | result | destination or reason |", "| --- | --- | --- |"]
    for key, rule in keys.items():
        result, text = row(rule)
        rows.append(f"| `{key}` | {result} | {text} |")
    return "\n".join(rows)


def row(rule: Rule) -> tuple[str, str]:
    """Return result and text of a key."""
    if isinstance(rule, Carried):
        return "carried", destination(rule)
    if isinstance(rule, Refused):
        return "refused", f"{rule.why} Fix: {rule.fix}."
    return "no effect", rule.why


def generate() -> int:
    """Write or compare the tables; return the exit code."""
    text = TARGET.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [f"## {title}\n\n{table(keys)}" for title, keys in DOCUMENTS]
    middle = "\n\n".join(parts)
    made = f"{before}{BEGIN}\n\n{middle}\n\n{END}{after}"
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(made, encoding="utf-8")
        return 0
    if made == text:
        return 0
    print(f"{TARGET.name} differs from hamictl's table of keys", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(generate())
