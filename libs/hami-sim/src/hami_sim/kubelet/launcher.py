# SPDX-License-Identifier: Apache-2.0
"""Builds the container launcher (native/simrun.c) once and finds out what this machine permits.

The program is kept in the user's cache directory under a name made of its source, the flags and the
compiler, so an unchanged source builds nothing and two builders cannot disturb each other.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from hami_common.errors import Unavailable

_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Wl,-z,now")
_SOURCE = Path(__file__).parents[3] / "native" / "simrun.c"


def cache_directory() -> Path:
    """Return where built programs are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hami-sim"


@cache
def launcher() -> Path:
    """Return the program, building it when this source was never built here."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    source = _SOURCE.read_bytes()
    digest = hashlib.sha256(shlex.join([*compiler, *_FLAGS]).encode() + b"\0" + source)
    target = cache_directory() / f"simrun-{digest.hexdigest()[:16]}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / "simrun"
        try:
            subprocess.run(
                [*compiler, *_FLAGS, "-o", str(fresh), str(_SOURCE)],
                check=True,
                capture_output=True,
                text=True,
            )
        except FileNotFoundError as error:
            raise Unavailable(
                peer="C compiler", detail=f"{compiler[0]} is not installed; install one or set CC"
            ) from error
        except subprocess.CalledProcessError as error:
            raise Unavailable(peer="C compiler", detail=str(error.stderr)) from error
        fresh.replace(target)
    return target


@cache
def permits_namespaces() -> bool:
    """Whether this process may give containers namespaces of their own; tried, not guessed."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        root.mkdir()
        words = ["simrun/1", "root", str(root), "overlay", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64"):
            words += root_entry(Path("/") / name)
        words += ["proc", "/proc", "bind", "/dev/null", "/dev/null", "", "arg", "/bin/true"]
        spec = Path(scratch) / "spec"
        spec.write_bytes(encode(words))
        reading, writing = os.pipe()
        try:
            pid = os.posix_spawn(
                launcher(),
                ["simrun", str(spec), "3"],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, writing, 3)],
            )
            os.close(writing)
            told = b""
            while piece := os.read(reading, 1024):
                told += piece
            os.waitpid(pid, 0)
        finally:
            os.close(reading)
    return told.startswith(b"ok ")


def root_entry(path: Path) -> list[str]:
    """Word how a top-level entry of the host appears inside: link as link, directory as overlay."""
    if path.is_symlink():
        return ["link", str(path.readlink()), str(path)]
    return ["overlay", str(path), str(path)] if path.is_dir() else []


def encode(words: list[str]) -> bytes:
    """Encode a launcher specification."""
    return b"".join(os.fsencode(word) + b"\0" for word in words)
