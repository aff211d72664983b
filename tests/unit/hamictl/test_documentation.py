# SPDX-License-Identifier: Apache-2.0
"""Every command is documented, and every command line in the documents is one that works."""

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hamictl.cli import COMMANDS, main

DOCS = Path(__file__).parents[3] / "docs"
TEXTS = ("hamictl.md", "explain.md", "quota.md", "replay.md")


def commands(group: click.Group, *words: str) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands without subcommands, with their words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *words, name)
        else:
            yield " ".join(("hamictl", *words, name)), command


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
        name: name for name in COMMANDS
    }
    assert main.get_command(context, "got") is None


def test_help_lists_each_command_on_one_line() -> None:
    output = CliRunner().invoke(main, ["--help"]).output
    indented = [line for line in output.partition("Inspect:")[2].splitlines() if line[:2] == "  "]
    assert sorted(line.split()[0] for line in indented) == sorted(COMMANDS)


@pytest.mark.parametrize("group", ["get", "top", "migrate"])
def test_help_of_a_group_shows_whole_summaries(group: str) -> None:
    assert "..." not in CliRunner().invoke(main, [group, "--help"]).output.partition("Commands:")[2]


def test_a_command_that_looks_brings_in_no_scheduler() -> None:
    code = "import sys, hamictl.commands.get; print('numpy' in sys.modules, 'nats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_functions_accept_the_parameters_of_their_commands() -> None:
    for words, command in commands(main):
        assert command.callback is not None
        given = {parameter.name for parameter in command.params}
        parameters = inspect.signature(command.callback).parameters.values()
        named = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
        assert named - given <= {"context"}, words
        assert given <= named or len(named) < len(parameters), words


def test_every_command_is_in_the_table() -> None:
    text = (DOCS / "hamictl.md").read_text()
    assert [words for words, _ in commands(main) if f"`{words}" not in text] == []


@pytest.mark.parametrize("line", lines())
def test_documented_command_line_can_be_parsed(line: str) -> None:
    words = shlex.split(line)[1:]
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)  # type: ignore[assignment]  # an unknown name raises
        context = click.Context(command, info_name=name, parent=context)
    command.parse_args(context, words)
