# SPDX-License-Identifier: Apache-2.0
"""``hamictl migrate``: moves nodes from HAMi and back, with the steps of ``nodemigration``."""

from collections.abc import Callable

import click

from hami_common.ports import KubeApi
from hami_common.vendors.catalog import Catalog
from hamictl import options, output
from hamictl.errors import InputRefused
from hamictl.kube import with_kube
from hamictl.nodemigration import Mover, NodeState, NodeStates, Sides, survey

HAMI_LABEL = "gpu=on"
HAMI_PLUGIN = "app.kubernetes.io/component=hami-device-plugin"


@click.group()
def migrate() -> None:
    """Migrate nodes from HAMi, or roll back, while their pods run."""


_label_option = click.option(
    "--hami-label",
    default=HAMI_LABEL,
    show_default=True,
    help="Label of nodes that run HAMi's device plugin.",
)
_plugin_option = click.option(
    "--hami-plugin",
    default=HAMI_PLUGIN,
    show_default=True,
    help="Label of the pods of HAMi's device plugin.",
)
_wait_option = click.option(
    "--wait", "wait_s", default=120.0, show_default=True, help="Timeout of each step, in seconds."
)


@migrate.command()
@_label_option
@options.kubeconfig_option
@options.format_option
def plan(hami_label: str, kubeconfig: str, format_: str) -> None:
    """List nodes of HAMi and what blocks their migration."""
    found = _survey(kubeconfig, hami_label)
    items = tuple(one for one in found.items if one.side in ("hami", "moving"))
    _show(NodeStates(items=items), format_, empty="No nodes of HAMi found.")


@migrate.command()
@_label_option
@options.kubeconfig_option
@options.format_option
def status(hami_label: str, kubeconfig: str, format_: str) -> None:
    """List all nodes with their owner and pods."""
    _show(_survey(kubeconfig, hami_label), format_, empty="No devices found.")


@migrate.command()
@click.argument("name")
@click.option(
    "--vendor",
    default="",
    help="Vendor whose agent runs on the node; required if HAMi registers none or several.",
)
@click.option(
    "--accept",
    is_flag=True,
    help="Migrate despite blockers; count each doubtful share as its maximum.",
)
@_label_option
@_plugin_option
@_wait_option
@options.kubeconfig_option
def node(  # noqa: PLR0917 - click passes them by name
    name: str,
    vendor: str,
    accept: bool,  # noqa: FBT001 - click passes flags so
    hami_label: str,
    hami_plugin: str,
    wait_s: float,
    kubeconfig: str,
) -> None:
    """Migrate a node from HAMi."""
    known = [one.name for one in Catalog.from_settings().vendors]
    if vendor and vendor not in known:
        raise InputRefused(f"--vendor {vendor}: give one of {', '.join(known)}")
    sides = parse_sides(hami_label, hami_plugin, wait_s)

    async def work(api: KubeApi) -> NodeState:
        mover = Mover(api, name, sides, report=_reporter())
        return await mover.migrate(vendor=vendor, accept=accept)

    _show_done(with_kube(kubeconfig, work))


@migrate.command()
@click.argument("name")
@click.option("--accept", is_flag=True, help="Roll back although HAMi will not count all pods.")
@_label_option
@_plugin_option
@_wait_option
@options.kubeconfig_option
def rollback(  # noqa: PLR0917 - click passes them by name
    name: str,
    accept: bool,  # noqa: FBT001 - click passes flags so
    hami_label: str,
    hami_plugin: str,
    wait_s: float,
    kubeconfig: str,
) -> None:
    """Return a node to HAMi."""
    sides = parse_sides(hami_label, hami_plugin, wait_s)

    async def work(api: KubeApi) -> NodeState:
        return await Mover(api, name, sides, report=_reporter()).roll_back(accept=accept)

    _show_done(with_kube(kubeconfig, work))


def _survey(kubeconfig: str, hami_label: str) -> NodeStates:
    sides = parse_sides(hami_label, HAMI_PLUGIN, 0.0)
    return with_kube(kubeconfig, lambda api: survey(api, sides))


def parse_sides(label: str, plugin: str, wait_s: float) -> Sides:
    """Parse the labels of both sides; ``InputRefused`` for an invalid one."""
    pairs = []
    for option, text in (("--hami-label", label), ("--hami-plugin", plugin)):
        key, separator, value = text.partition("=")
        if not (key and separator and value):
            raise InputRefused(f"{option} {text}: write KEY=VALUE")
        pairs.append((key, value))
    return Sides(label=pairs[0], plugin=pairs[1], wait_s=wait_s)


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
        f"{state.hami_pods} pods of HAMi ({state.taken_over} taken over) and "
        f"{state.our_pods} other pods with devices run there"
    )


def _show(found: NodeStates, format_: str, *, empty: str) -> None:
    if output.structured(found, format_):
        return
    headings = ["NODE", "SIDE", "VENDORS", "HAMI PODS", "TAKEN OVER", "OUR PODS", "BLOCKERS"]
    rows = [
        [
            one.node,
            one.side,
            ",".join(one.vendors) or "-",
            one.hami_pods,
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
