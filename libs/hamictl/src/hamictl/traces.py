# SPDX-License-Identifier: Apache-2.0
"""Reads recorded traces: stimulus logs, events with a snapshot, and snapshots.

The name of a file says what it is: a directory or ``*.jsonl.gz`` is a stimulus log, ``*.jsonl``
events as ``hamictl events -o json`` prints them, ``*.json`` a snapshot. A truncated file of a log,
whose writer was killed, is read up to its end.
"""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from hami_common.errors import HamiError, RequestInvalid, WireInvalid
from hami_common.events.allocation import AllocationRecord
from hami_common.events.codec import UNDECODABLE
from hami_common.events.inventory import NodeDevices
from hami_core.replay.arrivals import Put
from hami_core.replay.loghistory import LogHistory, history_of_events, history_of_log
from hami_core.replay.snapshot import Snapshot
from hami_core.replay.stimuluslog import Item, Reader
from hamictl import eventstream
from hamictl.errors import InputRefused
from hamictl.inputs import read
from hamictl.snapshots import read_snapshot

SUFFIX: Final = ".jsonl.gz"
EVENTS_SUFFIX: Final = ".jsonl"
SNAPSHOT_SUFFIX: Final = ".json"
_GZIP: Final = 31
"""zlib's window size for the gzip format."""
_PIECE_BYTES: Final = 1 << 20
_lines: Final = msgspec.json.Decoder(eventstream.Event)


def read_trace(paths: Sequence[Path]) -> LogHistory | Snapshot:
    """Read a trace, which may be several files."""
    events = [path for path in paths if path.name.endswith(EVENTS_SUFFIX)]
    snapshots = [path for path in paths if path.suffix == SNAPSHOT_SUFFIX and not path.is_dir()]
    rest = [path for path in paths if path not in events and path not in snapshots]
    named = ", ".join(map(str, paths))
    if rest and not events and not snapshots:
        return read_log(rest)
    if rest or len(snapshots) != 1:
        message = (
            f"{named}: give a stimulus log (a directory or *{SUFFIX}), or one snapshot "
            f"(*{SNAPSHOT_SUFFIX}), alone or with events (*{EVENTS_SUFFIX})"
        )
        raise InputRefused(message)
    snapshot = read_snapshot(snapshots[0])
    return _of_events(events, snapshot) if events else snapshot


def read_log(paths: Sequence[Path]) -> LogHistory:
    """Read a stimulus log for a comparison of policies."""
    try:
        return history_of_log(items(paths))
    except (WireInvalid, RequestInvalid) as error:
        raise InputRefused(str(error)) from error


def items(paths: Sequence[Path]) -> Iterator[Item]:
    """Yield the content of a stimulus log; ``WireInvalid`` names a line that is unreadable."""
    for file in segments_of(paths):
        yield from Reader(file.name).items(read_lines(file))


def segments_of(paths: Sequence[Path]) -> list[Path]:
    """List the segments of a log: the named files, and the files of named directories, sorted."""
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
    """Yield the lines of a segment with line endings; a truncated last line has none."""
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


def _of_events(paths: Sequence[Path], snapshot: Snapshot) -> LogHistory:
    """Read events of the ledger and devices; others are skipped."""
    records: list[AllocationRecord] = []
    puts: list[Put] = []
    for path in paths:
        for number, line in enumerate(_text_lines(path), start=1):
            try:
                event = _lines.decode(line)
                if event.kind == "allocation":
                    records.append(msgspec.convert(event.record, AllocationRecord))
                elif event.kind == "device":
                    devices = msgspec.convert(event.record, NodeDevices)
                    puts.append(Put(time_s=event.time_s, devices=devices))
            except UNDECODABLE as error:
                message = f"{path}, line {number}: {error}; write it by hamictl events -o json"
                raise InputRefused(message) from error
    try:
        return history_of_events(records, puts, snapshot)
    except HamiError as error:
        raise InputRefused(f"{', '.join(map(str, paths))}: {error}") from error


def _text_lines(path: Path) -> list[bytes]:
    return [line for line in read(path).splitlines() if line.strip()]
