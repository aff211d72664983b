# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/import.md from hamictl's table of keys; ``--check`` only compares."""

import sys

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
from tools.generated import DOCS, write_parts

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


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    parts = [f"## {title}\n\n{table(keys)}" for title, keys in DOCUMENTS]
    return write_parts(DOCS / "import.md", {"keys": "\n\n".join(parts)})


if __name__ == "__main__":
    sys.exit(main())
