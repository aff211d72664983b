# SPDX-License-Identifier: Apache-2.0
"""``hamictl simulate``: shows where pods would be placed, also with more nodes.

With a snapshot, the pods are placed here, under one or several policies; quotas and queues apply,
those of the snapshot or replacements. Without one, a scheduler answers about its present state, and
obeys node selectors, affinity and taints, which a snapshot does not contain. With ``--since`` it
places the pods of the last hours again under other policies.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import msgspec
from msgspec import Struct

from hami_common import documents
from hami_common.errors import RequestInvalid, SettingsInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.model.request import PlacementPolicy
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.ledger import Ledger
from hami_core.planning import whatif
from hami_core.planning.manifests import Rejected, read, uid_of
from hami_core.planning.packing import Packing, asks_of, packing
from hami_core.planning.scaling import (
    NODES_MOST,
    AddNodes,
    Fresh,
    NodeTemplate,
    Pods,
    Unhelped,
    add_nodes,
    least_nodes,
)
from hami_core.planning.whatif import Governed, Outcome
from hami_core.quota import queues
from hami_core.quota.accounts import QueueRow, QuotaRow
from hami_core.quota.resourcequota import Quota, QuotaReader
from hami_core.replay.questions import (
    Cluster,
    Drained,
    DrainQuestion,
    Scaled,
    ScaleQuestion,
    Simulated,
    SimulateQuestion,
    inventory_of,
    template_for,
    waiting,
)
from hami_core.replay.snapshot import Snapshot, load
from hamictl import addnodes, client, inputs, manifests, options, output, policies, quotatables
from hamictl.addnodes import Added
from hamictl.errors import EXIT_NO, InputRefused
from hamictl.manifests import Manifest, read_objects
from hamictl.snapshots import governed_by, read_snapshot


class Rules(Struct, frozen=True, kw_only=True):
    """Quotas and queues that replace the snapshot's."""

    quotas: tuple[Quota, ...] = ()
    """In place of those with the same namespace and name."""
    tree: queues.QueueTree | None = None
    """In place of all queues."""


class Growth(Struct, frozen=True, kw_only=True):
    """Nodes that exist in addition."""

    template: str
    nodes: int | None
    """Number of added nodes, the least if none was asked for; null: more than ``searched``."""
    searched: int
    """Largest number that was tried."""
    unhelped: tuple[Unhelped, ...] = ()
    """Pods that no number of these nodes would place."""


class Result(Struct, frozen=True, kw_only=True):
    """Result of a simulation under one policy."""

    snapshot_id: str
    policy: PlacementPolicy
    placed: int
    refused: int
    without_devices: int
    """Pods that request no device."""
    before: Packing
    after: Packing
    pods: tuple[Outcome, ...]
    rejected: tuple[Rejected, ...] = ()
    quotas: tuple[QuotaRow, ...] = ()
    """Limits of ResourceQuotas, and use after the simulation."""
    queues: tuple[QueueRow, ...] = ()
    growth: Growth | None = None


class Comparison(Struct, frozen=True, kw_only=True):
    """The same pods on the same snapshot under several policies."""

    results: tuple[Result, ...]


@click.command()
@click.option(
    "--snapshot",
    "snapshot_file",
    type=click.Path(path_type=Path),
    help="Snapshot file written by hamictl snapshot; without it, a scheduler's present state.",
)
@click.option(
    "--pods",
    "pod_files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Manifest of Pods, Deployments, StatefulSets, ReplicaSets or Jobs; may be repeated. "
    "Without it: the pods that wait for a node.",
)
@click.option(
    "--add-nodes",
    "growth",
    default="",
    metavar="TEMPLATE[xN]",
    help="Add N empty copies of a node, or of a template file; without N, the least number with "
    "which no pod waits for devices.",
)
@click.option(
    "--drain",
    "drained",
    default="",
    metavar="NODE",
    help="Place the pods of this node on the others, as if it were drained.",
)
@click.option(
    "--since",
    default="",
    metavar="DURATION",
    help="Place the pods that arrived in this time, such as 24h or 7d, again under each --policy, "
    "and compare with the record.",
)
@click.option(
    "--policy",
    multiple=True,
    help="Scheduling policy: node=binpack|spread;device=…;weights=slot=1,core=1,memory=1. "
    "Repeat to compare policies.",
)
@click.option(
    "--queues",
    "queues_file",
    type=click.Path(path_type=Path),
    help="Queues file that replaces the snapshot's queues.",
)
@click.option(
    "--quotas",
    "quota_files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="ResourceQuotas to add to the snapshot's; the same name replaces one.",
)
@options.prices_option
@click.option("--strict", is_flag=True, help="Exit with 1 if a pod is refused.")
@options.scheduler_option
@options.format_option
def simulate(  # noqa: PLR0913, PLR0917 - click passes them by name
    snapshot_file: Path | None,
    pod_files: tuple[Path, ...],
    growth: str,
    drained: str,
    since: str,
    policy: tuple[str, ...],
    queues_file: Path | None,
    quota_files: tuple[Path, ...],
    prices_file: Path | None,
    strict: bool,  # noqa: FBT001 - click passes flags so
    scheduler: str,
    format_: str,
) -> None:
    """Print where pods would run, also with more nodes.

    Pods that do not fit are listed with their refusals and the closest fit.
    """
    if prices_file is not None and not since:
        message = "--prices needs --since"
        raise InputRefused(message)
    if since or drained:
        others = (snapshot_file, pod_files, growth, queues_file, quota_files)
        if any((*others, since and drained, drained and policy)):
            message = (
                "--drain asks a scheduler about its present state, --since about recorded pods: "
                "give no other input, and --policy with --since only"
            )
            raise InputRefused(message)
        if since:
            refused = policies.compare(scheduler, since, policy, prices_file, format_)
        else:
            refused = _drain(scheduler, drained, format_)
    elif snapshot_file is not None:
        known = read_snapshot(snapshot_file)
        pods = _read(pod_files)
        if policy and not pods:
            message = "--policy needs --pods: waiting pods have their policy"
            raise InputRefused(message)
        rules = rules_of(quota_files, queues_file)
        added = addnodes.parse(growth, nodes_of(known)) if growth else None
        try:
            results = tuple(
                place(known, pods, one, rules, added)
                for one in policies.policies_of(policy, known.policy)
            )
        except RequestInvalid as error:
            raise InputRefused(str(error)) from error
        _show(results, format_)
        refused = max(result.refused for result in results)
    else:
        if policy or queues_file or quota_files:
            message = "--policy, --queues and --quotas need --snapshot"
            raise InputRefused(message)
        added = addnodes.parse(growth) if growth else None
        live = ask_scheduler(scheduler, _read(pod_files), added)
        if not output.structured(live, format_):
            _show_pods(live)
            _show_totals(live)
        refused = live.refused
    if strict and refused:
        raise SystemExit(EXIT_NO)


def _drain(scheduler: str, node: str, format_: str) -> int:
    """Print where a node's pods would start; return how many would not."""
    moved = client.send(Drained, scheduler, "/v1/whatif/drain", DrainQuestion(node=node))
    if not output.structured(moved, format_):
        _show_drained(moved)
    return moved.refused


def _read(files: Sequence[Path]) -> list[Manifest]:
    pods = [found for path in files for found in manifests.read_manifests(path)]
    if files and not pods:
        message = f"{', '.join(map(str, files))}: no pod; write at least one"
        raise InputRefused(message)
    return pods


def _show(results: tuple[Result, ...], format_: str) -> None:
    first = results[0]
    is_one = len(results) == 1
    if not output.structured(first if is_one else Comparison(results=results), format_):
        if is_one:
            _show_result(first)
        else:
            _show_comparison(results)


def ask_scheduler(
    scheduler: str, pods: Sequence[Manifest], added: Added | None
) -> Simulated | Scaled:
    """Return a scheduler's answer."""
    sent = tuple(pod.document for pod in pods) or None
    if added is not None and added.nodes is None:
        least = ScaleQuestion(template=added.template, pods=sent)
        return client.send(Scaled, scheduler, "/v1/whatif/scale", least)
    add = None
    if added is not None and added.nodes is not None:
        add = AddNodes(template=added.template, nodes=added.nodes)
    question = SimulateQuestion(pods=sent, add=add, fitting=False, explain=True)
    return client.send(Simulated, scheduler, "/v1/whatif/simulate", question)


def nodes_of(snapshot: Snapshot) -> set[str]:
    """Return the names of a snapshot's nodes."""
    return {known.node for known in inventory_of(snapshot)}


def _show_comparison(results: tuple[Result, ...]) -> None:
    rows = [
        [
            policies.policy_text(result.policy),
            result.placed,
            result.refused,
            f"{result.after.devices_used}/{result.after.devices}",
            f"{result.after.used_devices_full:.0%}",
            f"{result.after.stranded:.0%}",
        ]
        for result in results
    ]
    headings = [
        "POLICY",
        "PLACED",
        "REFUSED",
        "DEVICES USED",
        "OF THEIR MEMORY BOOKED",
        "FREE MEMORY STRANDED",
    ]
    output.table(headings, rows, empty="")


def _show_drained(result: Drained) -> None:
    _show_pods(result)
    for one in result.staying:
        click.echo(f"\n{one.namespace}/{one.pod} is not moved: {one.why}")
    click.echo(
        f"\n{result.placed} would start elsewhere, {result.refused} would not, "
        f"{len(result.staying)} are not moved"
    )


def _show_pods(result: Result | Simulated | Scaled | Drained) -> None:
    rows = [
        [one.namespace, one.pod, one.node or "-", output.shares(one.containers) or "refused"]
        for one in result.pods
    ]
    output.table(["NAMESPACE", "POD", "NODE", "SHARES"], rows, empty="No pod requests a device.")
    for one in result.pods:
        if one.node:
            continue
        click.echo(f"\n{one.namespace}/{one.pod}:")
        for refusal in one.refusals:
            click.echo(f"  {refusal.nodes} nodes: {refusal.text}")
        for change in one.closest[:3]:
            click.echo(f"  closest fit: {change}")
    for refused in result.rejected:
        click.echo(f"\n{refused.namespace}/{refused.pod} would be refused: {refused.problem}")


def _show_totals(result: Result | Simulated | Scaled) -> None:
    click.echo(
        f"\n{result.placed} placed, {result.refused} refused, "
        f"{result.without_devices} without devices"
    )
    if isinstance(result, Scaled):
        _show_growth(result)
    elif isinstance(result, Simulated):
        if result.added:
            click.echo(f"With {len(result.added)} added nodes.")
    elif result.growth is not None:
        _show_growth(result.growth)


def _show_growth(growth: Growth | Scaled) -> None:
    if growth.nodes is None:
        click.echo(f"More than {growth.searched} nodes like {growth.template} would be needed.")
    else:
        click.echo(f"Nodes like {growth.template} to add: {growth.nodes}")
    for one in growth.unhelped:
        click.echo(f"  no such node helps {one.namespace}/{one.pod}: {one.reason}")


def _show_result(result: Result) -> None:
    _show_pods(result)
    _show_totals(result)
    rows = [
        [f"{one.devices_used}/{one.devices}", f"{one.used_devices_full:.0%}", f"{one.stranded:.0%}"]
        for one in (result.before, result.after)
    ]
    headings = ["", "DEVICES USED", "OF THEIR MEMORY BOOKED", "FREE MEMORY STRANDED"]
    named = [[name, *row] for name, row in zip(("before", "after"), rows, strict=True)]
    output.table(headings, named, empty="")
    if result.quotas:
        click.echo()
        quotatables.quotas(result.quotas)
    if result.queues:
        click.echo()
        quotatables.queues(result.queues)


def rules_of(quota_files: Iterable[Path], queues_file: Path | None) -> Rules:
    """Read quotas from ResourceQuota manifests, and queues from a queues file."""
    catalog = Catalog.from_settings()
    reader = QuotaReader(catalog)
    quotas: list[Quota] = []
    for path in quota_files:
        try:
            read = [
                reader.read(msgspec.json.encode(document))
                for document in read_objects(path, "ResourceQuota")
            ]
        except UNDECODABLE as error:
            message = f"{path}: not a ResourceQuota: {error}"
            raise InputRefused(message) from error
        found = [quota for quota in read if quota is not None]
        if not found:
            message = f"{path}: no ResourceQuota that limits a device; write limits.<resource>"
            raise InputRefused(message)
        quotas += found
    if queues_file is None:
        return Rules(quotas=tuple(quotas))
    content = inputs.read(queues_file)
    try:
        tree = queues.parse(
            documents.toml(content, field="queues file"),
            vendors=[vendor.name for vendor in catalog.vendors],
        )
    except SettingsInvalid as error:
        message = f"{queues_file}: {error}"
        raise InputRefused(message) from error
    return Rules(quotas=tuple(quotas), tree=tree)


def place(
    snapshot: Snapshot,
    pods: Sequence[Manifest],
    policy: PlacementPolicy,
    rules: Rules | None = None,
    added: Added | None = None,
    *,
    explain: bool = True,
) -> Result:
    """Place every pod, in order; without pods those that wait in the snapshot.

    ``explain``: search the closest fit of each refused pod, which takes many times longer.
    """
    if pods:
        views = [pod.view for pod in pods]
        requested = read(views, Catalog.from_settings(), policy)
    else:
        requested = waiting(snapshot)

    def fresh() -> tuple[Ledger, Governed]:
        governed = governed_by(snapshot, requested.askers)
        if rules is not None:
            for quota in rules.quotas:
                governed.quota.put_quota(quota)
            if rules.tree is not None:
                governed.quota.set_tree(rules.tree)
        return load(snapshot), governed

    wanted = Pods(
        requests=requested.requests,
        documents={uid_of(number): pod.document for number, pod in enumerate(pods)},
    )
    ledger, governed = fresh()
    measured = asks_of(requested.requests)
    excluded, growth = wanted.excluded, None
    before = packing(ledger.table, measured)
    if added is not None:
        template = template_for(added.template, snapshot, Cluster(nodes=()))
        growth = _growth(fresh, wanted, template, added.nodes, now_s=snapshot.time_s)
        _, excluded = add_nodes(ledger, template, growth.searched, wanted)
    outcomes = tuple(
        whatif.simulate(
            ledger,
            requested.requests,
            now_s=snapshot.time_s,
            explain=explain,
            governed=governed,
            excluded=excluded,
        )
    )
    placed = sum(1 for outcome in outcomes if outcome.node)
    return Result(
        snapshot_id=snapshot.snapshot_id,
        policy=policy,
        placed=placed,
        refused=len(outcomes) - placed + len(requested.rejected),
        without_devices=requested.without_devices,
        before=before,
        after=packing(ledger.table, measured),
        pods=outcomes,
        rejected=requested.rejected,
        quotas=tuple(governed.quota.quota_rows()),
        queues=tuple(governed.quota.queue_rows()),
        growth=growth,
    )


def _growth(
    fresh: Fresh, pods: Pods, template: NodeTemplate, nodes: int | None, *, now_s: float
) -> Growth:
    """Return the number of nodes that is asked for, or the least one."""
    if nodes is not None:
        return Growth(template=template.name, nodes=nodes, searched=nodes)
    found = least_nodes(fresh, pods, template, most=NODES_MOST, now_s=now_s)
    return Growth(
        template=template.name,
        nodes=found.nodes,
        searched=found.searched,
        unhelped=found.unhelped,
    )
