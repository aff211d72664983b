# SPDX-License-Identifier: Apache-2.0
"""Writes the table of default interfaces in docs/drivers.md from ``hami_nodeagent``.

The table stands between the markers ``generated: interfaces`` and ``end of generated part``.
``--check`` only compares.
"""

import sys
from pathlib import Path

from hami_nodeagent.drivers.interfaces import INTERFACES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "drivers.md"
BEGIN, END = "<!-- generated: interfaces -->", "<!-- end of generated part -->"


def table() -> str:
    """One row per vendor."""
    rows = ["| vendor | default | because | experimental |", "| --- | --- | --- | --- |"]
    for vendor, one in INTERFACES.items():
        names = {"library": one.library, "tool": f"`{one.tool}`"}
        other = one.experimental
        rows.append(
            f"| {vendor} | {one.default}: {names[one.default]} | {one.reason} "
            f"| {f'{other}: {names[other]}' if other else '–'} |"
        )
    return "\n".join(rows)


def page(text: str) -> str:
    """The page with a fresh table."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        message = f"docs/drivers.md lacks the markers {BEGIN} and {END}"
        raise ValueError(message)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    wanted = page(text)
    if "--check" in sys.argv[1:]:
        return 0 if wanted == text else 1
    if wanted != text:
        PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
