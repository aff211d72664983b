# SPDX-License-Identifier: Apache-2.0
"""Keeps ``requirements/*.txt`` (exact versions with hashes) in step with ``*.in`` and the members.

``write`` compiles them again and needs a package index. ``check`` needs none: it reads the files
and reports inconsistencies. Neither writes nor accepts an address of an index.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent

SETS: tuple[tuple[str, str | None], ...] = (
    ("runtime", None),
    ("dev", "runtime"),
    ("bootstrap", "dev"),
    ("frameworks", "runtime"),
    ("console", None),
)
"""Each set with the one whose versions it must share, in the order of compilation."""

COMPILE = (
    *(
        str(Path(sys.executable).parent / "uv"),
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version",
        "3.11",
    ),
    *("--generate-hashes", "--no-header", "--no-emit-index-url", "--no-emit-find-links"),
)

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: *; *(?P<marker>[^\\]+))?")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


class Pin(NamedTuple):
    """One exact version of one package, for the machines its marker selects."""

    name: str
    version: Version
    marker: str
    hashes: tuple[str, ...]
    """SHA-256 of each file that may be installed, in hexadecimal."""


def main() -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(description="Pinned requirements: write or check them.")
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="compile *.in to *.txt; needs a package index")
    write.add_argument("--upgrade", action="store_true", help="take newer versions")
    commands.add_parser("check", help="compare the files; needs no network")
    options = parser.parse_args()
    if options.command == "write":
        _write(upgrade=options.upgrade)
    problems = check(ROOT)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def check(root: Path) -> list[str]:
    """Return the inconsistencies in the repository at ``root``, one sentence each."""
    folder = root / "requirements"
    problems: list[str] = []
    pins_by_set: dict[str, list[Pin]] = {}
    for name, base in SETS:
        text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        pins = pins_by_set[name] = list(parse_pins(text))
        problems += _problems_of_text(f"{name}.txt", text, pins)
        problems += _missing(f"{name}.in", _wanted(folder / f"{name}.in"), f"{name}.txt", pins)
        if base is not None:
            problems += _differing(f"{name}.txt", pins, f"{base}.txt", pins_by_set[base])
    for member in sorted(root.glob("*/*/pyproject.toml")):
        project = tomllib.loads(member.read_text(encoding="utf-8"))["project"]
        outside = [
            Requirement(text)
            for text in project["dependencies"]
            if not canonicalize_name(text).startswith("hami")
        ]
        where = "dev" if project["name"] == "hami-sim" else "runtime"
        problems += _missing(
            str(member.relative_to(root)), outside, f"{where}.txt", pins_by_set[where]
        )
    return problems


def parse_pins(text: str) -> Iterator[Pin]:
    """All pins of a compiled file; ``check`` judges lines that are no pin."""
    for line in text.replace("\\\n", " ").splitlines():
        found = _PIN.match(line)
        if found:
            yield Pin(
                name=canonicalize_name(found["name"]),
                version=Version(found["version"]),
                marker=(found["marker"] or "").partition(" --hash")[0].strip(),
                hashes=tuple(_HASH.findall(line)),
            )


def _problems_of_text(name: str, text: str, pins: list[Pin]) -> list[str]:
    problems = [f"{name}: {pin.name} has no hash" for pin in pins if not pin.hashes]
    problems += [
        f"{name}: not a pin with hashes: {line.strip()[:80]}"
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.lstrip().startswith("#") and not _PIN.match(line)
    ]
    return problems


def _wanted(path: Path) -> list[Requirement]:
    """Direct requirements of a ``.in`` file and of those it includes with -r."""
    wanted: list[Requirement] = []
    for raw in path.read_text(encoding="utf-8").splitlines():
        line = raw.partition("#")[0].strip()
        if line.startswith("-r "):
            wanted += _wanted(path.parent / line.removeprefix("-r ").strip())
        elif line and not line.startswith("-c "):
            wanted.append(Requirement(line))
    return wanted


def _missing(source: str, wanted: list[Requirement], name: str, pins: list[Pin]) -> list[str]:
    problems = []
    for requirement in wanted:
        versions = [pin.version for pin in pins if pin.name == canonicalize_name(requirement.name)]
        if not versions:
            problems.append(f"{source}: {requirement.name} is not in {name}; run ./dev pins")
        problems += [
            f"{source}: {requirement} does not allow {version} of {name}; run ./dev pins"
            for version in versions
            if not requirement.specifier.contains(version, prereleases=True)
        ]
    return problems


def _differing(name: str, pins: list[Pin], base: str, base_pins: list[Pin]) -> list[str]:
    base_versions = {(pin.name, pin.marker): pin.version for pin in base_pins}
    return [
        f"{name}: {pin.name} is {pin.version}, but {base} has {want}; run ./dev pins"
        for pin in pins
        if (want := base_versions.get((pin.name, pin.marker), pin.version)) != pin.version
    ]


def _write(*, upgrade: bool) -> None:
    folder = ROOT / "requirements"
    before = {path: path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}
    for name, base in SETS:
        # Runs in its folder, with relative names: comments in the output then name no machine.
        command = [*COMPILE, f"{name}.in", "--output-file", f"{name}.txt"]
        if base is not None:
            command += ["--constraint", f"{base}.txt"]
        if upgrade:
            command.append("--upgrade")
        subprocess.run(command, cwd=folder, env=os.environ | {"UV_NO_PROGRESS": "1"}, check=True)
    for path in sorted(folder.glob("*.txt")):
        same = before.get(path) == path.read_text(encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'unchanged' if same else 'written'}")


if __name__ == "__main__":
    sys.exit(main())
