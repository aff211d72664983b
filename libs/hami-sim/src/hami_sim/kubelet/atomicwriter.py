# SPDX-License-Identifier: Apache-2.0
"""Replaces a set of files atomically, in kubelet's layout.

``name -> ..data/name``, ``..data -> ..<time>.<random>/``: the payload is written to a fresh
directory and the link `..data` is renamed over the old one. Rules:
``pkg/volume/util/atomic_writer.go`` of Kubernetes 1.34. Unchanged payload writes nothing. A
reader that opened a file through the link must reopen it to see the change.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from msgspec import Struct

_DATA = "..data"
_FRESH = "..data_tmp"


class File(Struct, frozen=True):
    """Content and mode of one file."""

    content: bytes
    mode: int = 0o644


def check_path(path: str) -> str:
    """Return a clean relative path; ValueError when it could leave the directory."""
    clean = PurePosixPath(path)
    if not path or clean.is_absolute() or ".." in clean.parts or clean.parts[0].startswith(".."):
        msg = f"invalid path: must be relative and without '..': {path!r}"
        raise ValueError(msg)
    return str(clean)


def write(directory: Path, files: Mapping[str, File], *, now_s: float) -> bool:
    """Make the directory show exactly these files; returns whether anything changed."""
    payload = {check_path(path): file for path, file in files.items()}
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / _DATA
    old = directory / link.readlink() if link.is_symlink() else None
    has_changed = old is None or _read(old) != payload
    if has_changed:
        fresh = _write_fresh(directory, payload, now_s=now_s)
        pending = directory / _FRESH
        pending.unlink(missing_ok=True)
        pending.symlink_to(fresh.name)
        pending.replace(link)
    _show(directory, {PurePosixPath(path).parts[0] for path in payload})
    if has_changed and old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return has_changed


def _read(directory: Path) -> dict[str, File]:
    return {
        str(path.relative_to(directory)): File(path.read_bytes(), path.stat().st_mode & 0o7777)
        for path in directory.rglob("*")
        if path.is_file()
    }


def _write_fresh(directory: Path, payload: Mapping[str, File], *, now_s: float) -> Path:
    moment = datetime.fromtimestamp(now_s, UTC).strftime("..%Y_%m_%d_%H_%M_%S.")
    fresh = Path(tempfile.mkdtemp(prefix=moment, dir=directory))
    fresh.chmod(0o755)
    for name, file in payload.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(file.mode)
    return fresh


def _show(directory: Path, names: set[str]) -> None:
    for name in names:
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"{_DATA}/{name}")
    for path in directory.iterdir():
        if not path.name.startswith("..") and path.name not in names:
            path.unlink()
