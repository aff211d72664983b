# SPDX-License-Identifier: Apache-2.0
"""Writes generated files and generated parts of pages; with ``--check`` only compares.

A generated part of a page stands between ``<!-- generated: NAME -->`` and ``END``. Decides whether
a file is stale; its content is the generator's.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
END = "<!-- end of generated part -->"


def replaced(text: str, parts: Mapping[str, str]) -> str:
    """Return a page with fresh parts, by name; ``ValueError`` if it lacks a marker."""
    for name, part in parts.items():
        begin = f"<!-- generated: {name} -->"
        head, marker, rest = text.partition(begin)
        _, end, tail = rest.partition(END)
        if not marker or not end:
            message = f"the page lacks the markers {begin} and {END}"
            raise ValueError(message)
        text = f"{head}{begin}\n\n{part.strip()}\n\n{END}{tail}"
    return text


def write_parts(page: Path, parts: Mapping[str, str]) -> int:
    """Write the parts of a page, or with ``--check`` compare; returns the exit code."""
    return write({page: replaced(page.read_text(encoding="utf-8"), parts)})


def write(fresh: Mapping[Path, str], *, unwanted: Iterable[Path] = ()) -> int:
    """Write files and remove others, or with ``--check`` compare; returns the exit code."""
    stale = [
        path
        for path, text in fresh.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    gone = sorted(unwanted)
    if "--check" in sys.argv[1:]:
        for path in [*stale, *gone]:
            sys.stderr.write(f"{path.relative_to(ROOT)}: differs; run ./dev gen\n")
        return int(bool(stale or gone))
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fresh[path], encoding="utf-8")
    for path in gone:
        path.unlink()
    return 0
