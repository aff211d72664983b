# SPDX-License-Identifier: Apache-2.0
"""``hamictl autoscaler-template``: prints templates of a pool's nodes for autoscalers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import yaml

from hami_common.apipath import api_path
from hami_common.errors import RequestInvalid
from hami_common.ports import KubeApi
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import ResourceNames
from hami_core.planning.eligible import Document
from hami_core.planning.scaling import template_of
from hami_core.replay.questions import inventory_of
from hamictl import client, kube, manifests, nodetemplates, options
from hamictl.errors import EXIT_NO, InputRefused, Refused
from hamictl.nodetemplates import PoolNode
from hamictl.snapshots import decode_snapshot

FORMATS: Final = ("asg", "capi", "karpenter", "scheduler-config", "simulate")


@click.command("autoscaler-template")
@click.argument("node")
@click.option(
    "--for",
    "kind",
    type=click.Choice(FORMATS),
    default="asg",
    show_default=True,
    help="asg: tags of an AWS Auto Scaling group; capi: patch of a MachineDeployment of Cluster "
    "API; karpenter: a NodeOverlay; scheduler-config: file for cluster-autoscaler's "
    "--scheduler-config-file; simulate: file for hamictl simulate --add-nodes.",
)
@click.option("--name", default="", help="Name of the group or object; default: of the node.")
@click.option(
    "--label",
    "labels",
    multiple=True,
    help="Label of the node that pods of the pool select; may be repeated.",
)
@click.option(
    "--counts-only",
    is_flag=True,
    help="With scheduler-config: also ignore memory and compute, for templates that cannot state "
    "them. The autoscaler then sees free slots on full devices.",
)
@click.option(
    "--check",
    "template_file",
    type=click.Path(path_type=Path),
    help="Print nothing but what this template lacks: a Node, or tags of an Auto Scaling group as "
    "aws autoscaling describe-tags prints them. Exit with 1 if it lacks something.",
)
@options.scheduler_option
@options.kubeconfig_option
def autoscaler_template(  # noqa: PLR0917 - click passes them by name
    node: str,
    kind: str,
    name: str,
    labels: tuple[str, ...],
    counts_only: bool,  # noqa: FBT001 - click passes flags so
    template_file: Path | None,
    scheduler: str,
    kubeconfig: str,
) -> None:
    """Print an autoscaler's template of a node."""
    if counts_only and kind != "scheduler-config":
        message = "--counts-only needs --for scheduler-config"
        raise InputRefused(message)
    document: Document = kube.with_kube(kubeconfig, lambda api: _node(api, node))
    if kind == "simulate":
        click.echo(json.dumps(_simulate(document, scheduler, name or node), indent=2))
        return
    known = nodetemplates.pool_node(document, _families())
    if template_file is not None:
        _check(known, template_file)
        return
    if known.missing and kind != "scheduler-config":
        message = (
            f"node {node} does not offer {', '.join(known.missing)}, so no autoscaler finds that "
            f"pods fit; {nodetemplates.ADVERTISE}"
        )
        raise Refused(message)
    chosen = nodetemplates.chosen_labels(known, labels)
    makers: Mapping[str, Callable[[], object]] = {
        "asg": lambda: nodetemplates.asg_tags(known, group=name or node, labels=chosen),
        "capi": lambda: nodetemplates.capi_patch(known, labels=chosen),
        "karpenter": lambda: nodetemplates.node_overlay(known, name=name or node),
        "scheduler-config": lambda: nodetemplates.scheduler_config(known, counts_only=counts_only),
    }
    made = makers[kind]()
    if kind == "asg":
        click.echo(json.dumps(made, indent=2))
    else:
        click.echo(yaml.safe_dump(made, sort_keys=False), nl=False)
    if kind == "capi" and known.amounts:
        click.echo(
            f"Cluster API annotations cannot state {', '.join(known.amounts)}: keep at least one "
            "node in the pool, which is then the template.",
            err=True,
        )


def _check(known: PoolNode, file: Path) -> None:
    read: Any = manifests.read_as(file, Any)
    template = {"Tags": read} if isinstance(read, list) else read
    if not isinstance(template, dict):
        message = f"{file}: write a Node, or tags of an Auto Scaling group"
        raise InputRefused(message)
    found = nodetemplates.differences(known, template)
    for one in found:
        problem = f"is {one.found}" if one.found else "is missing"
        click.echo(f"{one.resource} {problem}, {known.name} has {one.wanted}: set tag {one.tag}")
    if found:
        raise SystemExit(EXIT_NO)
    click.echo(f"The template offers what {known.name} offers.")


def _simulate(document: Document, scheduler: str, name: str) -> Any:  # noqa: ANN401 - JSON
    """Return the template of ``simulate --add-nodes``."""
    known = decode_snapshot(
        client.fetch(scheduler, "/v1/snapshot"), what=f"{scheduler}/v1/snapshot"
    )
    try:
        template = template_of(document["metadata"]["name"], inventory_of(known), document)
    except RequestInvalid as error:
        raise InputRefused(str(error)) from error
    return msgspec.to_builtins(msgspec.structs.replace(template, name=name))


def _families() -> list[ResourceNames]:
    return [names for vendor in Catalog.from_settings().vendors for names in vendor.families]


async def _node(api: KubeApi, name: str) -> Document:
    found: Document = msgspec.json.decode(await api.get(api_path("api", "v1", "nodes", name)))
    return found
