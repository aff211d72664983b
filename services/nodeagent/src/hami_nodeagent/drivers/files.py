# SPDX-License-Identifier: Apache-2.0
"""Small files that describe partitions, written atomically: a crash leaves no partial file.

A file whose name begins with a dot was being written and is never read. Runs outside of the event
loop (``ToolReader.read_files``). Errors of the file system become errors of drivers.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hami_nodeagent.drivers.errors import DriverDenied, DriverTransient


def entries(folder: Path) -> tuple[str, ...]:
    """Return names in a folder, without unfinished files; empty if it does not exist."""
    with _known(f"read {folder}"):
        try:
            return tuple(sorted(e.name for e in folder.iterdir() if not e.name.startswith(".")))
        except FileNotFoundError:
            return ()


def write(path: Path, text: str) -> None:
    """Write a file atomically; create its folder if it is missing."""
    with _known(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _put(path, lambda beside: _store(beside, text))


def write_folder(path: Path, text_by_name: dict[str, str]) -> None:
    """Put a folder with its files in place at once; it must not be there."""

    def fill(beside: Path) -> None:
        beside.mkdir()
        for name, text in text_by_name.items():
            _store(beside / name, text)

    with _known(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _put(path, fill)


def remove(path: Path) -> None:
    """Remove a file or folder atomically; a missing one is no error."""
    with _known(f"remove {path}"):
        beside = _beside(path)
        _clear(beside)
        with suppress(FileNotFoundError):
            path.rename(beside)
        _clear(beside)


def _put(path: Path, fill: Callable[[Path], None]) -> None:
    beside = _beside(path)
    _clear(beside)
    try:
        fill(beside)
        beside.rename(path)
    finally:
        _clear(beside)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _store(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _known(doing: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise DriverDenied(doing=doing, detail=str(error), code=error.errno or 0) from error
    except OSError as error:
        raise DriverTransient(doing=doing, detail=str(error), code=error.errno or 0) from error
