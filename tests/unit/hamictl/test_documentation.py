# SPDX-License-Identifier: Apache-2.0
"""Every command is documented, and every command line in the documents is one that works."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hamictl.cli import PLACES, main

DOCS = Path(__file__).parents[3] / "docs"
TEXTS = ("hamictl.md", "explain.md", "quota.md", "replay.md")


def commands(group: click.Group, *words: str) -> Iterator[str]:
    """All commands, as they are typed."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *words, name)
        else:
            yield " ".join(("hamictl", *words, name))


def lines() -> list[str]:
    """Command lines in the documents' code blocks."""
    found: list[str] = []
    for name in TEXTS:
        for block in re.findall(r"```sh\n(.*?)```", (DOCS / name).read_text(), re.DOTALL):
            found += [line for line in block.splitlines() if line.startswith("hamictl ")]
    return found


def test_commands_bear_the_names_they_are_found_by() -> None:
    context = click.Context(main)
    found = {name: main.get_command(context, name) for name in main.list_commands(context)}
    assert {name: command and command.name for name, command in found.items()} == {
        name: name for name in PLACES
    }
    assert main.get_command(context, "got") is None


def test_a_command_that_looks_brings_in_no_scheduler() -> None:
    code = "import sys, hamictl.looking; print('numpy' in sys.modules, 'nats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_every_command_is_in_the_table() -> None:
    text = (DOCS / "hamictl.md").read_text()
    assert [command for command in commands(main) if f"`{command}" not in text] == []


@pytest.mark.parametrize("line", lines())
def test_documented_command_line_can_be_parsed(line: str) -> None:
    words = shlex.split(line)[1:]
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)  # type: ignore[assignment]  # an unknown name raises
        context = click.Context(command, info_name=name, parent=context)
    command.parse_args(context, words)
