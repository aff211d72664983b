# SPDX-License-Identifier: Apache-2.0
"""Writes the command table of docs/hamictl.md from hamictl's help; ``--check`` only compares."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from hamictl.cli import SECTIONS, main

TARGET = Path(__file__).resolve().parent.parent / "docs" / "hamictl.md"
BEGIN, END = "<!-- generated: commands -->", "<!-- end of commands -->"


def table() -> str:
    """Return the table of all commands, by section of the help."""
    rows = ["| | command | |", "| --- | --- | --- |"]
    context = click.Context(main)
    for title, names in SECTIONS.items():
        label = title
        for name in names:
            for words, command in leaves(main.get_command(context, name), "hamictl", name):
                summary = command.get_short_help_str(limit=200)
                rows.append(f"| {label} | `{words}` | {summary} |".replace("|  |", "| |"))
                label = ""
    return "\n".join(rows)


def leaves(command: click.Command | None, *words: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands without subcommands, with their words and arguments."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from leaves(command.get_command(context, name), *words, name)
    elif command is not None:
        arguments = [
            one.human_readable_name for one in command.params if isinstance(one, click.Argument)
        ]
        yield " ".join((*words, *arguments)), command


def generate() -> int:
    """Write or compare the table; return the exit code."""
    text = TARGET.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(made, encoding="utf-8")
        return 0
    if made == text:
        return 0
    print(f"{TARGET.name} differs from hamictl's help", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(generate())
