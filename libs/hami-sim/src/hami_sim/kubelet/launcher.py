# SPDX-License-Identifier: Apache-2.0
"""Builds the programs of native/ once and finds out what this machine permits.

A program is kept in the user's cache directory under a name made of its source, the flags and the
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
_NATIVE = Path(__file__).parents[3] / "native"


def cache_directory() -> Path:
    """Return where built programs are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hami-sim"


@cache
def launcher() -> Path:
    """Return the program that runs containers."""
    return _built("simrun", cache_directory(), keeps_name=False)


@cache
def driver_programs() -> Path:
    """Return a directory with ``gpu-demo``, the program that shows what a container may do."""
    return _built("gpu-demo", cache_directory() / "programs", keeps_name=True).parent


def _built(name: str, directory: Path, *, keeps_name: bool) -> Path:
    """Return a program, building it when this source was never built here."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    path = _NATIVE / f"{name}.c"
    digest = hashlib.sha256(
        shlex.join([*compiler, *_FLAGS]).encode() + b"\0" + path.read_bytes()
    ).hexdigest()[:16]
    target = directory / digest / name if keeps_name else directory / f"{name}-{digest}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / name
        try:
            subprocess.run(
                [*compiler, *_FLAGS, "-o", str(fresh), str(path), "-ldl"],
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


def maps_user() -> bool:
    """Return true if creating containers requires a user namespace, as for every user but root."""
    return os.geteuid() != 0


@cache
def permits_namespaces() -> bool:
    """Return true if this process may create namespaces for containers, as found by a trial."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        root.mkdir()
        words = ["simrun/1", "root", str(root), *(["map-user"] if maps_user() else [])]
        for name in ("usr", "bin", "lib", "lib64"):
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
    """Word how a top-level entry of the host appears inside.

    A link is a link. Root sees a directory by an overlay, so that anything can be written or
    mounted in it. Others may not write into an overlay of root's directories; they get an
    ordinary directory with the host's entries in it, so that mounts can still be added.
    """
    if path.is_symlink():
        return ["link", str(path.readlink()), str(path)]
    if not path.is_dir():
        return []
    return _shallow(path) if maps_user() else ["overlay", str(path), str(path)]


def _shallow(directory: Path) -> list[str]:
    words = ["mkdir", str(directory), "755"]
    for path in sorted(directory.iterdir()):
        if path.is_symlink():
            words += ["link", str(path.readlink()), str(path)]
        elif path.name == "local":
            words += _shallow(path)
        elif os.access(path, os.R_OK):
            words += ["bind", str(path), str(path), "rR"]
    return words


def encode(words: list[str]) -> bytes:
    """Encode a launcher specification."""
    return b"".join(os.fsencode(word) + b"\0" for word in words)
