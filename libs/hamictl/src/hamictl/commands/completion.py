# SPDX-License-Identifier: Apache-2.0
"""``hamictl completion``: prints a shell's completion script."""

import click
from click.shell_completion import get_completion_class

from hamictl.errors import InputRefused


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the shell's completion script.

    Load it with: source <(hamictl completion bash)
    """
    kind = get_completion_class(shell)
    root = context.find_root()
    if kind is None:
        message = f"{shell} is not supported"
        raise InputRefused(message)
    click.echo(kind(root.command, {}, "hamictl", "_HAMICTL_COMPLETE").source())
