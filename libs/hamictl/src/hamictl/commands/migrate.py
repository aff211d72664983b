# SPDX-License-Identifier: Apache-2.0
"""``hamictl migrate``: moves nodes from another system and back, as ``nodemigration`` does it."""

from collections.abc import Callable, Mapping
from typing import Final

import click

from hami_common.compat.origins import HAMI, ORIGINS, VOLCANO
from hami_common.ports import KubeApi
from hami_common.vendors.catalog import Catalog
from hamictl import options, output
from hamictl.errors import InputRefused
from hamictl.kube import with_kube
from hamictl.nodemigration import Mover, NodeState, NodeStates, Sides, survey

LABELS: Final[Mapping[str, tuple[str, str]]] = {
    HAMI.name: ("gpu=on", "app.kubernetes.io/component=hami-device-plugin"),
    VOLCANO.name: ("volcano.sh/vgpu-plugin=on", "name=volcano-device-plugin"),
}
"""By origin: default label of nodes with its device plugin, and label of the plugin's pods.

The manifest of volcano-vgpu-device-plugin selects all nodes; the label is the one that
docs/volcano.md adds.
"""


@click.group()
def migrate() -> None:
    """Migrate nodes from HAMi or Volcano, and roll them back."""


_from_option = click.option(
    "--from",
    "origin",
    type=click.Choice(tuple(ORIGINS)),
    default=HAMI.name,
    show_default=True,
    help="System whose device plugin served the nodes; volcano: volcano-vgpu-device-plugin.",
)
_label_option = click.option(
    "--node-label",
    default="",
    help="Label of nodes that run that system's device plugin."
    f" [default: {LABELS[HAMI.name][0]}; for volcano {LABELS[VOLCANO.name][0]}]",
)
_plugin_option = click.option(
    "--plugin-label",
    default="",
    help="Label of the pods of that device plugin."
    f" [default: {LABELS[HAMI.name][1]}; for volcano {LABELS[VOLCANO.name][1]}]",
)
_wait_option = click.option(
    "--wait", "wait_s", default=120.0, show_default=True, help="Timeout of each step, in seconds."
)


@migrate.command()
@_from_option
@_label_option
@_plugin_option
@options.kubeconfig_option
@options.format_option
def plan(origin: str, node_label: str, plugin_label: str, kubeconfig: str, format_: str) -> None:
    """List nodes of the other system and what blocks their migration."""
    sides = parse_sides(node_label, plugin_label, 0.0, origin=origin)
    found = with_kube(kubeconfig, lambda api: survey(api, sides))
    items = tuple(one for one in found.items if one.side in (origin, "moving"))
    _show(NodeStates(items=items), format_, empty=f"No nodes of {sides.title} found.")


@migrate.command()
@_from_option
@_label_option
@_plugin_option
@options.kubeconfig_option
@options.format_option
def status(origin: str, node_label: str, plugin_label: str, kubeconfig: str, format_: str) -> None:
    """List all nodes with their owner and pods."""
    sides = parse_sides(node_label, plugin_label, 0.0, origin=origin)
    found = with_kube(kubeconfig, lambda api: survey(api, sides))
    _show(found, format_, empty="No devices found.")


@migrate.command()
@click.argument("name")
@click.option(
    "--vendor",
    default="",
    help="Vendor whose agent runs on the node; required if no or several vendors are registered.",
)
@click.option(
    "--accept",
    is_flag=True,
    help="Migrate despite blockers; count each doubtful share as its maximum.",
)
@_from_option
@_label_option
@_plugin_option
@_wait_option
@options.kubeconfig_option
def node(  # noqa: PLR0917 - click passes them by name
    name: str,
    vendor: str,
    accept: bool,  # noqa: FBT001 - click passes flags so
    origin: str,
    node_label: str,
    plugin_label: str,
    wait_s: float,
    kubeconfig: str,
) -> None:
    """Migrate a node to this project."""
    known = [one.name for one in Catalog.from_settings().vendors]
    if vendor and vendor not in known:
        raise InputRefused(f"--vendor {vendor}: give one of {', '.join(known)}")
    sides = parse_sides(node_label, plugin_label, wait_s, origin=origin)

    async def work(api: KubeApi) -> NodeState:
        mover = Mover(api, name, sides, report=_reporter())
        return await mover.migrate(vendor=vendor, accept=accept)

    _show_done(with_kube(kubeconfig, work))


@migrate.command()
@click.argument("name")
@click.option("--accept", is_flag=True, help="Roll back although not all pods will be counted.")
@_from_option
@_label_option
@_plugin_option
@_wait_option
@options.kubeconfig_option
def rollback(  # noqa: PLR0917 - click passes them by name
    name: str,
    accept: bool,  # noqa: FBT001 - click passes flags so
    origin: str,
    node_label: str,
    plugin_label: str,
    wait_s: float,
    kubeconfig: str,
) -> None:
    """Return a node to the system from which it migrated."""
    sides = parse_sides(node_label, plugin_label, wait_s, origin=origin)

    async def work(api: KubeApi) -> NodeState:
        return await Mover(api, name, sides, report=_reporter()).roll_back(accept=accept)

    _show_done(with_kube(kubeconfig, work))


def parse_sides(label: str, plugin: str, wait_s: float, *, origin: str = HAMI.name) -> Sides:
    """Parse the labels of the other system; ``InputRefused`` for an invalid one."""
    of_node, of_plugin = LABELS[origin]
    pairs = []
    for option, text in (
        ("--node-label", label or of_node),
        ("--plugin-label", plugin or of_plugin),
    ):
        key, separator, value = text.partition("=")
        if not (key and separator and value):
            raise InputRefused(f"{option} {text}: write KEY=VALUE")
        pairs.append((key, value))
    return Sides(origin=ORIGINS[origin], label=pairs[0], plugin=pairs[1], wait_s=wait_s)


def _reporter() -> Callable[[str], None]:
    """Return a function that prints each text once."""
    printed: set[str] = set()

    def report(text: str) -> None:
        if text not in printed:
            printed.add(text)
            click.echo(text)

    return report


def _show_done(state: NodeState) -> None:
    click.echo(
        f"{state.former_pods} pods of the other system ({state.taken_over} taken over) and "
        f"{state.our_pods} other pods with devices run there"
    )


def _show(found: NodeStates, format_: str, *, empty: str) -> None:
    if output.structured(found, format_):
        return
    headings = ["NODE", "SIDE", "VENDORS", "FORMER PODS", "TAKEN OVER", "OUR PODS", "BLOCKERS"]
    rows = [
        [
            one.node,
            one.side,
            ",".join(one.vendors) or "-",
            one.former_pods,
            one.taken_over,
            one.our_pods,
            len(one.problems) or "-",
        ]
        for one in found.items
    ]
    output.table(headings, rows, empty=empty)
    for one in found.items:
        for problem in one.problems:
            click.echo(f"{one.node}: {problem}")
