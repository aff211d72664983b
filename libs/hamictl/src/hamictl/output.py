# SPDX-License-Identifier: Apache-2.0
"""Prints tables for people, JSON and YAML for programs, and progress at a terminal."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec
import yaml

from hami_common.model.placement import ContainerShares

FORMATS = ("table", "wide", "json", "yaml")
_GAP = "   "


def structured(value: object, format_: str) -> bool:
    """Print a value of Structs in full if the format is JSON or YAML; return whether it is."""
    if format_ not in ("json", "yaml"):
        return False
    plain: Any = msgspec.to_builtins(value)
    if format_ == "json":
        click.echo(json.dumps(plain, indent=2))
    else:
        click.echo(yaml.safe_dump(plain, sort_keys=False, width=10_000), nl=False)
    return True


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print rows under headings in columns; ``empty`` on standard error if there are no rows."""
    if not rows:
        click.echo(empty, err=True)
        return
    lines = [[str(cell) for cell in row] for row in [headings, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo(_GAP.join(padded).rstrip())


def progress(text: str) -> None:
    """Print the current step on standard error, at a terminal only."""
    if sys.stderr.isatty():
        click.echo(text, err=True)


def progress_once() -> Callable[[str], None]:
    """Return a function that reports each text once."""
    shown: set[str] = set()

    def report(text: str) -> None:
        if text not in shown:
            shown.add(text)
            progress(text)

    return report


def part(used: int, whole: int) -> str:
    """Format as ``used/whole (percent)``."""
    return f"{used}/{whole} ({100 * used // whole}%)" if whole else f"{used}/{whole}"


def clock_time(time_s: float) -> str:
    """Format the local time of day with milliseconds."""
    return time.strftime("%H:%M:%S", time.localtime(time_s)) + f".{int(time_s % 1 * 1000):03d}"


def age(seconds: float) -> str:
    """Format a duration in its largest unit, as kubectl does."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def shares(containers: tuple[ContainerShares, ...]) -> str:
    """Format as ``main: 1 x 3000 MiB 30 %``, several containers with commas."""
    texts = []
    for container in containers:
        kinds: dict[str, int] = {}
        for share in container.shares:
            text = f"{share.memory_mib} MiB"
            if share.exclusive:
                text += " whole"
            elif share.core_pct:
                text += f" {share.core_pct} %"
            kinds[text] = kinds.get(text, 0) + 1
        parts = " + ".join(f"{count} x {text}" for text, count in kinds.items())
        texts.append(f"{container.name}: {parts}")
    return ", ".join(texts)
