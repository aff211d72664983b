# SPDX-License-Identifier: Apache-2.0
"""Writes the table of default interfaces in docs/drivers.md from ``hami_nodeagent``."""

import sys

from hami_nodeagent.drivers.interfaces import INTERFACES
from tools.generated import DOCS, write_parts


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


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    return write_parts(DOCS / "drivers.md", {"interfaces": table()})


if __name__ == "__main__":
    sys.exit(main())
