# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share."""

import click

from hamictl import output

REGISTRY = "http://127.0.0.1:9396"
SCHEDULER = "http://127.0.0.1:9398"

format_option = click.option(
    "-o", "--output", "format_", type=click.Choice(output.FORMATS), default="table"
)
registry_option = click.option(
    "--registry",
    envvar="HAMICTL_REGISTRY",
    default=REGISTRY,
    show_default=True,
    show_envvar=True,
    help="Base URL of the registry, for example by kubectl port-forward.",
)
scheduler_option = click.option(
    "--scheduler",
    envvar="HAMICTL_SCHEDULER",
    default=SCHEDULER,
    show_default=True,
    show_envvar=True,
    help="Base URL of a scheduler.",
)
namespace_option = click.option("-n", "--namespace", default="default", show_default=True)
