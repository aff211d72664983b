# SPDX-License-Identifier: Apache-2.0
"""All commands by name, each brought in when it is called. Exit codes: ``errors``.

Half of what a command costs is the import of what it needs, and most need little: the scheduler's
core is for those that decide with it, certificates are for those that make some.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Final

import click

PLACES: Final[Mapping[str, str]] = {
    "bootstrap": "installation:bootstrap_command",
    "completion": "operating:completion_command",
    "cordon": "operating:cordon_command",
    "defrag": "planning:defrag_command",
    "doctor": "operating:doctor_command",
    "events": "operating:events_command",
    "explain": "planning:explain_command",
    "get": "looking:get_command",
    "import-config": "migration:import_command",
    "migrate": "moving:migrate_command",
    "replay": "planning:replay_command",
    "resize": "operating:resize_command",
    "simulate": "planning:simulate_command",
    "snapshot": "looking:snapshot_command",
    "support-bundle": "operating:bundle_command",
    "top": "operating:top_command",
    "trace": "operating:trace_command",
    "uncordon": "operating:uncordon_command",
}
"""Module of this package and name in it, by command."""


class Commands(click.Group):
    """Finds its commands in ``PLACES``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, sorted."""
        del ctx
        return sorted(PLACES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, ``None`` where there is none."""
        del ctx
        if cmd_name not in PLACES:
            return None
        module, _, name = PLACES[cmd_name].partition(":")
        command: click.Command = getattr(import_module(f"hamictl.{module}"), name)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hamictl")
def main() -> None:
    """Look at shared accelerators, and try what would happen."""
