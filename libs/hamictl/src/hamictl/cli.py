# SPDX-License-Identifier: Apache-2.0
"""Assembles the commands and prints them by section. Exit codes: ``errors``.

Importing a command's module takes half of its run time, so each is imported when it is called: only
the commands that decide with the scheduler's core pay for that core.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Final

import click

SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Inspect": ("get", "top", "usage", "idle", "explain", "trace", "events"),
    "Operate": ("cordon", "uncordon", "resize"),
    "Plan": ("snapshot", "simulate", "policy", "autoscaler-template", "defrag", "scenario"),
    "Troubleshoot": ("doctor", "verify", "support-bundle", "replay"),
    "Install and migrate": ("bootstrap", "rotate-key", "import-config", "migrate", "uninstall"),
    "Settings": ("completion",),
}
"""Commands by section of the help. Each is a name in the module of ``commands`` named after it."""
COMMANDS: Final = frozenset(name for names in SECTIONS.values() for name in names)
_MODULES: Final[Mapping[str, str]] = {"uncordon": "cordon", "idle": "usage"}


class Commands(click.Group):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List all names, sorted."""
        del ctx
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of this name; ``None`` if there is none."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = import_module(f"hamictl.commands.{_MODULES.get(name, name)}")
        command: click.Command = getattr(module, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the commands by section, each with its first sentence in full."""
        for title, names in SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, _summary(command)) for name, command in commands])


def _summary(command: click.Command | None) -> str:
    return "" if command is None else command.get_short_help_str(limit=80)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hamictl")
def main() -> None:
    """Inspect and operate shared accelerators on Kubernetes."""
