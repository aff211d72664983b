# SPDX-License-Identifier: Apache-2.0
"""``hamictl resize``: changes the share of a running container or of a ResourceClaim."""

import click

from hamictl import client, options, output
from hamictl.errors import InputRefused


@click.command()
@click.argument("pod", required=False, default="")
@options.pod_namespace_option
@click.option("--claim", default="", help="Resize this ResourceClaim instead of a pod.")
@click.option(
    "-c",
    "--container",
    default="",
    help="Container, or request of the claim, to resize; required if several have shares.",
)
@click.option("--memory", type=click.IntRange(1), help="New memory limit per device, in MiB.")
@click.option(
    "--cores",
    type=click.IntRange(0, 100),
    help="New compute limit per device, in percent; 0 removes it.",
)
@click.option("--force", is_flag=True, help="Allow limits below the current use.")
@options.scheduler_option
@options.format_option
def resize(  # noqa: PLR0913, PLR0917 - click passes them by name
    pod: str,
    namespace: str,
    claim: str,
    container: str,
    memory: int | None,
    cores: int | None,
    force: bool,  # noqa: FBT001 - click passes flags so
    scheduler: str,
    format_: str,
) -> None:
    """Resize the share of a running container without a restart."""
    if bool(pod) == bool(claim):
        message = "name a POD, or a ResourceClaim with --claim"
        raise InputRefused(message)
    if memory is None and cores is None:
        message = "give --memory, --cores or both"
        raise InputRefused(message)
    body = {
        "namespace": namespace,
        "pod": pod,
        "claim": claim,
        "container": container,
        "memory_mib": memory,
        "core_pct": cores,
        "force": force,
    }
    output.progress("booking the new limits and waiting for the node to apply them")
    done = client.send(client.Resized, scheduler, "/v1/resize", body)
    if output.structured(done, format_):
        return
    rows = [
        [
            done.container.name,
            share.uuid,
            f"{was.memory_mib} -> {share.memory_mib}",
            f"{was.core_pct or '-'} -> {share.core_pct or '-'}",
        ]
        for was, share in zip(done.before.shares, done.container.shares, strict=True)
    ]
    output.table(
        ["REQUEST" if claim else "CONTAINER", "DEVICE", "MEMORY MIB", "CORES %"], rows, empty=""
    )
    if not done.in_force:
        click.echo("The new limits are written; the node has not confirmed them yet.", err=True)
