# SPDX-License-Identifier: Apache-2.0
"""Tables for people, JSON and YAML for programs."""

import json
from collections.abc import Sequence
from typing import Any

import click
import msgspec
import yaml

FORMATS = ("table", "wide", "json", "yaml")
_GAP = "   "


def show(value: object, format_: str) -> None:
    """Print a value of Structs as JSON or YAML, in full."""
    plain: Any = msgspec.to_builtins(value)
    if format_ == "json":
        click.echo(json.dumps(plain, indent=2))
    else:
        click.echo(yaml.safe_dump(plain, sort_keys=False, width=10_000), nl=False)


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print rows under headings, columns as wide as they need; ``empty`` when there is none."""
    if not rows:
        click.echo(empty, err=True)
        return
    lines = [[str(cell) for cell in row] for row in [headings, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo(_GAP.join(padded).rstrip())


def part(used: int, whole: int) -> str:
    """``used/whole (percent)``."""
    return f"{used}/{whole} ({100 * used // whole}%)" if whole else f"{used}/{whole}"
