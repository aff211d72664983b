# SPDX-License-Identifier: Apache-2.0
"""``hamictl uninstall``: prepares nodes for the removal of HAMi, before ``kubectl delete -k``."""

import click

from hami_common.ports import KubeApi
from hami_common.runtime.clock import SystemClock
from hamictl import options, output
from hamictl.errors import EXIT_NO
from hamictl.kube import with_kube
from hamictl.uninstalling import NodeResult, Outcome, Uninstaller

NEXT = "next: kubectl delete -k <your overlay> --ignore-not-found"


@click.command()
@click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
@click.option(
    "--keep-pods",
    is_flag=True,
    help="Continue while pods hold shares by the device plugin: their limits stay in force until "
    "they end. Pods with claims have to be deleted first.",
)
@click.option(
    "--timeout",
    "node_limit_s",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Timeout of the removal of files on one node, in seconds.",
)
@click.option(
    "--wait",
    "kubelet_limit_s",
    type=click.FloatRange(min=0),
    default=420.0,
    show_default=True,
    help="Longest wait for kubelet to forget the device plugins, in seconds; 0: none.",
)
@options.services_namespace_option
@options.agents_namespace_option
@options.kubeconfig_option
@options.format_option
def uninstall(  # noqa: PLR0917 - click passes them by name
    dry_run: bool,  # noqa: FBT001 - click passes flags so
    keep_pods: bool,  # noqa: FBT001 - click passes flags so
    node_limit_s: float,
    kubelet_limit_s: float,
    namespace: str,
    agents_namespace: str,
    kubeconfig: str,
    format_: str,
) -> None:
    """Remove HAMi's agents, files and keys from nodes.

    Run it before the manifests are deleted. It may be repeated. Exits with 1 while pods hold
    shares, and if a node could not be cleaned.
    """

    async def work(kube: KubeApi) -> tuple[bool, Outcome]:
        uninstaller = Uninstaller(
            kube,
            namespace=namespace,
            agents_namespace=agents_namespace,
            clock=SystemClock(),
            node_limit_s=node_limit_s,
            kubelet_limit_s=kubelet_limit_s,
            report=output.progress_once(),
        )
        planned = await uninstaller.plan()
        if dry_run or (planned.pods_by_claim if keep_pods else planned.pods):
            return False, planned
        return True, await uninstaller.run()

    was_run, outcome = with_kube(kubeconfig, work)
    if not output.structured(outcome, format_):
        _show(outcome, was_run=was_run, refused=not dry_run and not was_run)
    if not (dry_run or (was_run and outcome.is_complete)):
        raise SystemExit(EXIT_NO)


def _show(outcome: Outcome, *, was_run: bool, refused: bool) -> None:
    rows = [[one.namespace, one.pod, one.node, one.claim or "-"] for one in outcome.pods]
    if rows:
        output.table(["NAMESPACE", "POD WITH A SHARE", "NODE", "CLAIM"], rows, empty="")
    if refused and outcome.pods_by_claim:
        click.echo(
            "delete the pods with claims first: kubelet cannot end them without the agent: "
            "nothing was changed"
        )
        return
    if refused:
        click.echo("delete these pods first, or give --keep-pods: nothing was changed")
        return
    for path in outcome.deleted:
        click.echo(f"{'deleted' if was_run else 'would delete'} {'/'.join(path.split('/')[-2:])}")
    headings = ["NODE", "FILES", "KEYS", "RESOURCES", "SLICES", "LEFT"]
    output.table(headings, [_row(one) for one in outcome.nodes], empty="No traces on nodes.")
    for one in outcome.nodes:
        if one.problem:
            click.echo(f"{one.node}: {one.problem}")
        if one.files_kept:
            kept = ", ".join(one.files_kept)
            click.echo(f"{one.node}: {kept} stay for running containers; run it again later")
        if one.resources_left:
            left = ", ".join(one.resources_left)
            click.echo(f"{one.node}: {left} still in node status; run it again in five minutes")
    if was_run and outcome.is_complete:
        click.echo(NEXT)


def _row(one: NodeResult) -> list[object]:
    return [
        one.node,
        len(one.files_removed),
        ",".join(one.keys_removed) or "-",
        ",".join(one.resources_removed) or "-",
        len(one.slices_removed),
        ",".join((*one.files_kept, *one.resources_left)) or "-",
    ]
