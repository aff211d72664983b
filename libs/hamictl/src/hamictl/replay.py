# SPDX-License-Identifier: Apache-2.0
"""Reads a stimulus log from disk and has it decided once more.

A log is a directory of segments, or some of its files. A file whose writer was stopped has no end:
it is read as far as it goes.
"""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from hami_common.errors import WireInvalid
from hami_core.replay.rerun import Report, rerun
from hami_core.replay.stimuluslog import Item, Reader
from hamictl.errors import InputRefused

SUFFIX: Final = ".jsonl.gz"
_GZIP: Final = 31
"""zlib's word for gzip's frame."""
_PIECE_BYTES: Final = 1 << 20


def segments_of(paths: Sequence[Path]) -> list[Path]:
    """The files of a log: those named, and those of the directories named, in order."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob(f"*{SUFFIX}"))
            if not inside:
                message = f"{path}: no file *{SUFFIX} in it; name the stimulus_log_dir"
                raise InputRefused(message)
            found += inside
        else:
            found.append(path)
    return found


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a segment, with their ends; the last may lack it."""
    inflate = zlib.decompressobj(_GZIP)
    rest = b""
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                *lines, rest = (rest + inflate.decompress(piece)).split(b"\n")
                for line in lines:
                    yield line + b"\n"
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise InputRefused(message) from error
    except zlib.error as error:
        message = f"{path}: not a segment of a stimulus log: {error}"
        raise InputRefused(message) from error
    if rest:
        yield rest


def run(paths: Sequence[Path], *, skip_gaps: bool) -> Report:
    """Replay a log."""
    try:
        return rerun(_items(segments_of(paths)), skip_gaps=skip_gaps)
    except WireInvalid as error:
        raise InputRefused(str(error)) from error


def _items(files: Sequence[Path]) -> Iterator[Item]:
    for file in files:
        yield from Reader(file.name).items(read_lines(file))
