# SPDX-License-Identifier: Apache-2.0
"""``hamictl replay``: replays a stimulus log and compares every decision with the recorded one.

A log is a directory of segments, or some of its files. A truncated file, whose writer was killed,
is read up to its end.
"""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click

from hami_common.errors import WireInvalid
from hami_core.replay.rerun import Report, rerun
from hami_core.replay.stimuluslog import Item, Reader
from hamictl import options, output
from hamictl.errors import EXIT_GAP, EXIT_NO, InputRefused

SUFFIX: Final = ".jsonl.gz"
_GZIP: Final = 31
"""zlib's window size for the gzip format."""
_PIECE_BYTES: Final = 1 << 20


@click.command()
@click.argument("log", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--skip-gaps", is_flag=True, help="Resume after a gap, from the next snapshot.")
@options.format_option
def replay(
    log: tuple[Path, ...],
    skip_gaps: bool,  # noqa: FBT001 - click passes flags so
    format_: str,
) -> None:
    """Replay a stimulus log and compare every decision.

    LOG is a directory of segments, or some of its files.
    """
    report = run(log, skip_gaps=skip_gaps)
    if not output.structured(report, format_):
        _show(report, skip_gaps=skip_gaps)
    if report.difference is not None:
        raise SystemExit(EXIT_NO)
    if report.missing and not skip_gaps:
        raise SystemExit(EXIT_GAP)


def _show(report: Report, *, skip_gaps: bool) -> None:
    click.echo(
        f"{report.stimuli} stimuli, {report.decisions} decisions"
        f" in {report.segments} segments of {report.runs} runs"
    )
    for missing in report.missing:
        then = "skipped" if skip_gaps else "stopped there; --skip-gaps resumes after it"
        click.echo(
            f"gap in segment {missing.segment} after stimulus {missing.after}:"
            f" {missing.problem}; {then}"
        )
    different = report.difference
    if different is None:
        click.echo("Every decision is identical.")
        return
    where = f"stimulus {different.number}" if different.number else "its start"
    click.echo(f"First difference: segment {different.segment}, {where}, {different.kind}")
    click.echo(f"  stimulus: {different.what}")
    click.echo(f"  expected: {different.expected}")
    click.echo(f"  got:      {different.got}")


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


def run(paths: Sequence[Path], *, skip_gaps: bool) -> Report:
    """Replay a log."""
    try:
        return rerun(_items(segments_of(paths)), skip_gaps=skip_gaps)
    except WireInvalid as error:
        raise InputRefused(str(error)) from error


def _items(files: Sequence[Path]) -> Iterator[Item]:
    for file in files:
        yield from Reader(file.name).items(read_lines(file))
