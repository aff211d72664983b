# SPDX-License-Identifier: Apache-2.0
"""Writes the table of differences in docs/migration.md; ``--check`` only compares."""

import sys
from pathlib import Path

from tools.gen_vendors import replaced
from tools.hami_differences import DIFFERENCES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "migration.md"


def table() -> str:
    """One row per difference."""
    rows = ["| vendor | request | HAMi 2.10 | here | reason |", f"|{' --- |' * 5}"]
    rows += [f"| {' | '.join(one[:5])} |" for one in DIFFERENCES.values()]
    return "\n".join(rows)


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    text = TARGET.read_text(encoding="utf-8")
    wanted = replaced(text, "differences", table())
    if "--check" in sys.argv[1:]:
        return 0 if wanted == text else 1
    TARGET.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
