# SPDX-License-Identifier: Apache-2.0
"""Writes the command table of docs/hamictl.md from hamictl's help; ``--check`` only compares."""

import sys
from collections.abc import Iterator

import click

from hamictl import cli
from tools.generated import DOCS, write_parts


def table() -> str:
    """Return the table of all commands, by section of the help."""
    rows = ["| | command | |", "| --- | --- | --- |"]
    context = click.Context(cli.main)
    for title, names in cli.SECTIONS.items():
        label = title
        for name in names:
            for words, command in leaves(cli.main.get_command(context, name), "hamictl", name):
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


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    return write_parts(DOCS / "hamictl.md", {"commands": table()})


if __name__ == "__main__":
    sys.exit(main())
