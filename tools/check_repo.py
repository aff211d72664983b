# SPDX-License-Identifier: Apache-2.0
"""Refuses what must not be in the repository: hosts of registries, paths of machines, leftovers.

Reads the tracked files only. The patterns are put together from parts, so that this file passes its
own check.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent

MAX_BYTES = 1 << 20
"""Largest tracked file; data beyond that is made by a program instead."""

_HOSTS = [
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("npmjs", "org"),
    ("yarnpkg", "com"),
    ("crates", "io"),
    ("proxy.golang", "org"),
    ("repo1", "maven.org"),
    ("repo", "maven.apache.org"),
    ("deb.debian", "org"),
]
HOST = re.compile("|".join(re.escape(".".join(parts)) for parts in _HOSTS), re.IGNORECASE)

_MACHINE_FOLDERS = ["wo" + "rk", "roo" + "t", "ho" + "me", "Us" + "ers", "tmp/ha" + "mi"]
MACHINE_PATH = re.compile(rf"(?<![\w.*}})])/(?:{'|'.join(_MACHINE_FOLDERS)})/[\w.]")

LOCK_NAME = re.compile(r"(\.lock|-lock\.(json|yaml)|npm-shrinkwrap\.json)$")
URL = re.compile(r"https?://")

UNFINISHED = re.compile(
    r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b"
)
UNWRITTEN = re.compile(r"\bNotImplemented" + r"Error\b")
PRODUCT = ("services/", "libs/", "native/")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")

SPDX = "SPDX-License-Identifier: Apache-2.0"
SPDX_SUFFIXES = frozenset({".c", ".cmake", ".go", ".h", ".proto", ".py", ".pyi", ".sh"})
SPDX_WITHIN_LINES = 3


def main() -> int:
    """Check all tracked files; returns the exit code."""
    problems: list[str] = []
    for name in tracked(ROOT):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            problems += problems_of(name, path.read_bytes())
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def tracked(root: Path) -> list[str]:
    """Names of the files that git tracks, relative to ``root``."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    return listing.stdout.decode().rstrip("\0").split("\0")


def problems_of(name: str, content: bytes) -> Iterator[str]:
    """What is wrong with one file, as ``name:line: what``."""
    if len(content) > MAX_BYTES:
        yield f"{name}: {len(content)} bytes, more than {MAX_BYTES}"
    if b"\0" in content:
        return
    text = content.decode("utf-8", "replace")
    rules = [(HOST, "names a registry host"), (MACHINE_PATH, "names a path of one machine")]
    if LOCK_NAME.search(name):
        rules.append((URL, "a lock file with an address; pins live in requirements/"))
    if name.startswith(PRODUCT) and not GENERATED.search(name):
        rules += [(UNFINISHED, "unfinished code"), (UNWRITTEN, "unwritten code")]
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, what in rules:
            found = pattern.search(line)
            if found:
                yield f"{name}:{number}: {what}: {found[0]}"
    if PurePosixPath(name).suffix in SPDX_SUFFIXES and not _has_spdx(text):
        yield f"{name}:1: the first lines lack {SPDX}"


def _has_spdx(text: str) -> bool:
    return any(SPDX in line for line in text.splitlines()[:SPDX_WITHIN_LINES])


if __name__ == "__main__":
    sys.exit(main())
