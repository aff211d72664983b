# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hami_common import namespaces
from hamictl import output

REGISTRY = "http://127.0.0.1:9396"
SCHEDULER = "http://127.0.0.1:9398"

format_option = click.option(
    "-o",
    "--output",
    "format_",
    type=click.Choice(output.FORMATS),
    default="table",
    show_default=True,
    help="Output format.",
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
    help="Base URL of a scheduler, for example by kubectl port-forward.",
)
kubeconfig_option = click.option(
    "--kubeconfig",
    envvar="KUBECONFIG",
    default="",
    show_envvar=True,
    help="Kubeconfig of the Kubernetes API; empty: ~/.kube/config, or the pod's service account.",
)
pod_namespace_option = click.option(
    "-n", "--namespace", default="default", show_default=True, help="Namespace of the pod."
)
only_namespace_option = click.option(
    "-n", "--namespace", default="", help="Only show this namespace."
)
only_node_option = click.option("--node", default="", help="Only show this node.")
services_namespace_option = click.option(
    "-n",
    "--namespace",
    default=namespaces.SYSTEM,
    show_default=True,
    help="Namespace of the services.",
)
agents_namespace_option = click.option(
    "--agents-namespace",
    default=namespaces.AGENTS,
    show_default=True,
    help="Namespace of the node agents.",
)
snapshot_file_option = click.option(
    "--snapshot",
    "snapshot_file",
    type=click.Path(path_type=Path),
    help="Snapshot file written by hamictl snapshot.",
)
prices_option = click.option(
    "--prices",
    "prices_file",
    type=click.Path(path_type=Path),
    help="TOML file with a table [prices], such as registry.toml; adds the cost of devices in use.",
)


def bus_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the NATS login, passed as the keyword arguments of ``open_bus``."""
    for option in (
        click.option(
            "--nats-ca",
            envvar="HAMICTL_NATS_CA",
            default="",
            help="PEM bundle of trusted CAs; if set, TLS is required.",
        ),
        click.option(
            "--nats-seed",
            envvar="HAMICTL_NATS_SEED",
            default="",
            help="File with the NKey seed, for example of Secret hami-bus-operator.",
        ),
        click.option(
            "--nats-creds", envvar="HAMICTL_NATS_CREDS", default="", help="NATS credentials file."
        ),
        click.option(
            "--nats",
            envvar="HAMICTL_NATS",
            default="nats://127.0.0.1:4222",
            show_default=True,
            show_envvar=True,
            help="URL of a NATS server, for example by kubectl port-forward.",
        ),
    ):
        command = option(command)
    return command
