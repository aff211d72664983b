# SPDX-License-Identifier: Apache-2.0
"""Writes the table of differences in docs/migration.md; ``--check`` only compares."""

import sys

from tools.generated import DOCS, write_parts
from tools.hami_differences import DIFFERENCES


def table() -> str:
    """One row per difference."""
    rows = ["| vendor | request | HAMi 2.10 | here | reason |", f"|{' --- |' * 5}"]
    rows += [f"| {' | '.join(one[:5])} |" for one in DIFFERENCES.values()]
    return "\n".join(rows)


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    return write_parts(DOCS / "migration.md", {"differences": table()})


if __name__ == "__main__":
    sys.exit(main())
