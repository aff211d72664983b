# SPDX-License-Identifier: Apache-2.0
"""``hamictl explain``: shows why a pod is placed where it is, or pending.

The registry has the recorded decisions. The current verdict of a pending pod is computed here with
the scheduler's core on a snapshot, quotas and queues included, on the nodes that the pod's own
constraints allow, which are read from the Kubernetes API. Gangs are not in a snapshot: their
refusals appear only in recorded decisions. A ResourceClaim has a verdict in its status.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.apipath import api_path
from hami_common.events.allocation import CLAIM
from hami_common.events.decision import DecisionRecord
from hami_common.ports import KubeApi
from hami_core.placement.reasons import DeviceVerdict
from hami_core.planning.eligible import Document, excluded_nodes
from hami_core.planning.whatif import Standing, standing
from hami_core.replay.snapshot import Snapshot, load
from hamictl import claimviews, client, kube, options, output
from hamictl.client import Allocation, Explanation
from hamictl.errors import Absent, InputRefused, Refused, Unreachable
from hamictl.snapshots import decode_snapshot, governed_by, read_snapshot


class PodExplanation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Recorded decisions of a pod and, while it is pending, its current verdict."""

    namespace: str
    pod: str
    decisions: tuple[DecisionRecord, ...]
    allocations: tuple[Allocation, ...]
    snapshot_id: str = ""
    """Snapshot that ``now`` was computed from."""
    now: Standing | None = None
    """Set for a pending pod."""
    problem: str = ""
    """Reason that ``now`` is missing."""
    unchecked: str = ""
    """Reason that ``now`` ignores the pod's own constraints on nodes; empty: it obeys them."""


class ClaimExplanation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Recorded decisions about a ResourceClaim, and what its status says."""

    namespace: str
    claim: str
    decisions: tuple[DecisionRecord, ...]
    allocations: tuple[Allocation, ...]
    now: claimviews.ClaimView | None = None
    problem: str = ""
    """Reason that ``now`` is missing."""


@click.group()
def explain() -> None:
    """Explain why a pod or claim has its devices, or none."""


@explain.command()
@click.argument("name")
@options.pod_namespace_option
@click.option("--node", default="", help="Also show the verdict for each device of this node.")
@click.option(
    "--snapshot",
    "snapshot_file",
    type=click.Path(path_type=Path),
    help="Snapshot file to use instead of a scheduler's current state.",
)
@options.scheduler_option
@options.registry_option
@options.kubeconfig_option
@options.format_option
def pod(  # noqa: PLR0917 - click passes them by name
    name: str,
    namespace: str,
    node: str,
    snapshot_file: Path | None,
    scheduler: str,
    registry: str,
    kubeconfig: str,
    format_: str,
) -> None:
    """Explain a pod's placement, or the closest fit if it is pending."""
    answer = explain_pod(
        namespace,
        name,
        node=node,
        registry=registry,
        scheduler=scheduler,
        file=snapshot_file,
        documents=partial(_documents, kubeconfig, namespace, name),
    )
    if not output.structured(answer, format_):
        _show_recorded(answer)
        _show_now(answer)


@explain.command()
@click.argument("name")
@click.option(
    "-n", "--namespace", default="default", show_default=True, help="Namespace of the claim."
)
@options.registry_option
@options.kubeconfig_option
@options.format_option
def claim(name: str, namespace: str, registry: str, kubeconfig: str, format_: str) -> None:
    """Explain whether a ResourceClaim is booked, or why it is refused."""
    answer = explain_claim(namespace, name, registry=registry, kubeconfig=kubeconfig)
    if output.structured(answer, format_):
        return
    click.echo(f"Claim {answer.namespace}/{answer.claim}")
    _show_history(answer.allocations, answer.decisions)
    if answer.now is None:
        click.echo(f"  now: {answer.problem}")
        return
    reason = f": {answer.now.reason}" if answer.now.reason else ""
    click.echo(f"  now: {answer.now.state}{reason}")
    for label, text in (
        ("devices", ", ".join(answer.now.devices)),
        ("pods", ", ".join(answer.now.pods)),
    ):
        if text:
            click.echo(f"    {label}: {text}")


def explain_claim(namespace: str, name: str, *, registry: str, kubeconfig: str) -> ClaimExplanation:
    """Read a claim's decisions from the registry, and its status from the Kubernetes API.

    A pod may have the same name: only what the claim's uid is recorded with counts.
    """
    recorded = Explanation(namespace=namespace, pod=name, decisions=(), allocations=())
    absent: Absent | None = None
    try:
        recorded = client.read(Explanation, registry, f"/v1/explain/{namespace}/{name}")
    except Absent as error:
        absent = error
    allocations = tuple(one for one in recorded.allocations if one.origin == CLAIM)
    uids = {one.pod_uid for one in allocations}
    now, problem = None, ""
    try:
        found = kube.with_kube(kubeconfig, lambda api: claimviews.read_claim(api, namespace, name))
    except (Absent, Refused, Unreachable, InputRefused) as error:
        if absent is not None:
            raise
        problem = error.message
    else:
        uids.add(found.uid)
        now = next(
            (one for one in claimviews.views([found], allocations) if one.uid == found.uid), None
        )
        if now is None:
            problem = "the claim has no device of ours, and requests none"
    return ClaimExplanation(
        namespace=namespace,
        claim=name,
        decisions=tuple(one for one in recorded.decisions if one.pod_uid in uids),
        allocations=allocations,
        now=now,
        problem=problem,
    )


def _show_now(answer: PodExplanation) -> None:
    now = answer.now
    if now is None:
        if answer.problem:
            click.echo(f"  now: {answer.problem}")
        return
    click.echo(f"  now: {now.feasible} of {now.nodes} nodes fit")
    if answer.unchecked:
        click.echo(f"    node selector, affinity and taints not checked: {answer.unchecked}")
    if now.best:
        click.echo(f"    {now.best} would be chosen")
    for refusal in now.refusals:
        click.echo(f"    {refusal.nodes} nodes: {refusal.text}")
    for change in now.closest[:3]:
        click.echo(f"    closest fit: {change}")
    if not now.best and not now.closest:
        click.echo("    closest fit: no single change of the request would let the pod fit")
    if now.explained is not None:
        rows = [
            [step.container, device.uuid, _verdict(device)]
            for step in now.explained.steps
            for device in step.devices
        ]
        empty = f"{now.explained.node} has no device of this kind."
        output.table(["CONTAINER", f"DEVICE ON {now.explained.node}", "VERDICT"], rows, empty=empty)


def _verdict(device: DeviceVerdict) -> str:
    if device.code is None:
        return "fits, taken" if device.taken else "fits"
    if not device.wanted:
        return device.code
    wanted = f"{device.wanted} {device.resource}".rstrip()
    return f"{device.code}: {wanted} wanted, {device.free} free"


def _show_recorded(answer: PodExplanation) -> None:
    click.echo(f"Pod {answer.namespace}/{answer.pod}")
    _show_history(answer.allocations, answer.decisions)


def _show_history(allocations: Sequence[Allocation], decisions: Sequence[DecisionRecord]) -> None:
    for one in allocations:
        reason = f" ({one.reason})" if one.reason else ""
        click.echo(f"  {one.state} on {one.node}{reason}: {output.shares(one.containers)}")
    if not decisions:
        click.echo("  No decision is recorded.")
    for decision in decisions:
        when = time.strftime("%H:%M:%S", time.localtime(decision.time_s))
        click.echo(f"  {when} {decision.verb}: {_outcome(decision)}")
        for refusal in decision.refusals:
            click.echo(f"    {refusal.count} nodes: {refusal.text}")


def _outcome(decision: DecisionRecord) -> str:
    """Return the verdict with the numbers or the node that belong to it."""
    if not decision.nodes_considered:  # about one node: a bind, or a share reserved before one
        place = f" on {decision.node}" if decision.node else ""
        return f"{decision.verdict}{place}" + (f": {decision.error}" if decision.error else "")
    fit = f"{decision.nodes_feasible} of {decision.nodes_considered} nodes fit"
    if decision.nodes_named:
        fit += f", the best {decision.nodes_named} were named to kube-scheduler"
    return f"{decision.verdict}, {fit}"


def explain_pod(
    namespace: str,
    name: str,
    *,
    node: str,
    registry: str,
    scheduler: str,
    file: Path | None,
    documents: Callable[[], tuple[Document, list[Document]]],
) -> PodExplanation:
    """Read the registry and, if the pod is pending, a scheduler's state or a snapshot file.

    ``documents`` reads the pod and all nodes from the Kubernetes API. A file is evaluated without
    them, because its nodes need not be those of now.
    """
    absent: Absent | None = None
    recorded = Explanation(namespace=namespace, pod=name, decisions=(), allocations=())
    try:
        recorded = client.read(Explanation, registry, f"/v1/explain/{namespace}/{name}")
    except Absent as error:
        absent = error
    except Unreachable:
        if file is None:  # with a file, a cluster is not required
            raise
    answer = PodExplanation(
        namespace=recorded.namespace,
        pod=recorded.pod,
        decisions=recorded.decisions,
        allocations=recorded.allocations,
    )
    if any(one.state not in ("released", "failed") for one in recorded.allocations):
        return answer
    try:
        known = _state(scheduler, file)
    except Unreachable as error:
        if absent is not None:
            raise absent from error
        return replace(answer, problem=error.message)
    request = next((r for r in known.waiting if (r.namespace, r.name) == (namespace, name)), None)
    if request is None:
        if absent is not None:
            raise absent
        return replace(
            answer,
            snapshot_id=known.snapshot_id,
            problem="the scheduler has no such pending pod",
        )
    ledger, excluded, unchecked = load(known), dict[str, str](), ""
    if file is not None:
        unchecked = "a snapshot has none of them"
    else:
        try:
            excluded = excluded_nodes(*documents(), ledger.table.nodes())
        except (Absent, Refused, Unreachable, InputRefused) as error:
            unchecked = error.message
    return replace(
        answer,
        snapshot_id=known.snapshot_id,
        unchecked=unchecked,
        now=standing(
            ledger,
            request,
            node=node,
            governed=governed_by(known, known.quotas.askers),
            excluded=excluded,
        ),
    )


def _documents(kubeconfig: str, namespace: str, name: str) -> tuple[Document, list[Document]]:
    return kube.with_kube(kubeconfig, lambda api: _pod_and_nodes(api, namespace, name))


async def _pod_and_nodes(
    api: KubeApi, namespace: str, name: str
) -> tuple[Document, list[Document]]:
    path = api_path("api", "v1", "namespaces", namespace, "pods", name)
    pod = msgspec.json.decode(await api.get(path), type=Document)
    pages = await api.list_pages("/api/v1/nodes")
    return pod, [item for page in pages for item in msgspec.json.decode(page).get("items") or []]


def _state(scheduler: str, file: Path | None) -> Snapshot:
    if file is not None:
        return read_snapshot(file)
    body = client.fetch(scheduler, "/v1/snapshot")
    return decode_snapshot(body, what=f"{scheduler}/v1/snapshot")
