# SPDX-License-Identifier: Apache-2.0
"""``hamictl explain``: shows why a pod is placed where it is, or pending; where a SKU fits.

The registry has the recorded decisions, with the devices of the closest nodes and the terms of the
score. The current verdict of a pending pod, and the ways to start it, are computed here with the
scheduler's core on a snapshot, quotas and queues included, on the nodes that the pod's own
constraints allow. Those, and the pods that could be moved, are read from the Kubernetes API. Gangs
are not in a snapshot: their refusals appear only in recorded decisions. A ResourceClaim has a
verdict in its status. With ``--at`` the scheduler computes all nodes of a recorded decision.
"""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.apipath import api_path
from hami_common.errors import Denied
from hami_common.events.allocation import CLAIM
from hami_common.events.decision import (
    Amounts,
    DecisionRecord,
    DeviceHolder,
    DeviceTerms,
    Moment,
    NodeTerms,
    RefusedDevice,
    RefusedNode,
    ScoreDetail,
)
from hami_common.pods import annotations as keys
from hami_common.ports import KubeApi
from hami_common.runtime.clock import SystemClock
from hami_core.ledger.ledger import Ledger
from hami_core.placement.reasons import DeviceVerdict
from hami_core.planning.eligible import Document
from hami_core.planning.ways import Occupant, Standing, Surroundings, Way, standing
from hami_core.replay.questions import inventory_of
from hami_core.replay.snapshot import Snapshot, load
from hami_core.replay.tenants import Running, surroundings, tenants_of
from hamictl import claimviews, client, kube, options, output, skufits
from hamictl.client import Allocation, Explanation
from hamictl.errors import Absent, InputRefused, Refused, Unreachable
from hamictl.manifests import read_running
from hamictl.snapshots import decode_snapshot, governed_by, read_snapshot

_AGO: Final = re.compile(r"([0-9]{1,6})([mhd])")
_UNIT_S: Final = {"m": 60.0, "h": 3600.0, "d": 86400.0}
NODES_SHOWN: Final = 3
"""Closest nodes that the table lists; wide lists all."""
CHANGES_SHOWN: Final = 3
"""Changes of the request that the table lists."""


class Objects(NamedTuple):
    """Objects of the Kubernetes API."""

    pod: Document
    nodes: list[Document]
    managed: list[Document] | None
    """All pods with devices of HAMi; ``None``: the caller may not list them."""


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
    "--at",
    default="",
    metavar="TIME",
    help="Explain the newest recorded decision at or before this time (RFC 3339, or a time before "
    "now such as 90m, 24h or 7d), on all nodes, or on --node.",
)
@click.option(
    "--snapshot",
    "snapshot_file",
    type=click.Path(path_type=Path),
    help="Snapshot file to use instead of a scheduler's current state.",
)
@click.option(
    "--pods",
    "pod_files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="With --snapshot, movable pods: a file of kubectl get pods -A -o json; may be repeated.",
)
@options.scheduler_option
@options.registry_option
@options.kubeconfig_option
@options.format_option
def pod(  # noqa: PLR0913, PLR0917 - click passes them by name
    name: str,
    namespace: str,
    node: str,
    at: str,
    snapshot_file: Path | None,
    pod_files: tuple[Path, ...],
    scheduler: str,
    registry: str,
    kubeconfig: str,
    format_: str,
) -> None:
    """Explain a pod's placement, or the closest fit if it is pending."""
    if at:
        if snapshot_file is not None:
            raise click.UsageError("--at reads stored events: leave out --snapshot")
        moment = client.read(
            Moment,
            scheduler,
            f"/v1/whatif/moments/{namespace}/{name}",
            at=_time(at),
            node=node,
        )
        if not output.structured(moment, format_):
            _show_moment(moment, is_wide=format_ == "wide")
        return
    if pod_files and snapshot_file is None:
        raise click.UsageError("--pods needs --snapshot; without it the cluster's pods are read")
    answer = explain_pod(
        namespace,
        name,
        node=node,
        registry=registry,
        scheduler=scheduler,
        file=snapshot_file,
        movable=[pod for path in pod_files for pod in read_running(path)],
        documents=partial(_documents, kubeconfig, namespace, name),
    )
    if not output.structured(answer, format_):
        _show_recorded(answer, is_wide=format_ == "wide")
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
    _show_history(answer.allocations, answer.decisions, is_wide=format_ == "wide")
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


@explain.command()
@click.argument("name")
@options.scheduler_option
@options.registry_option
@options.format_option
def sku(name: str, scheduler: str, registry: str, format_: str) -> None:
    """Explain what a SKU expands to, and where it fits now."""
    catalog = client.read(client.Skus, registry, "/v1/skus")
    found = next((one for one in catalog.items if one.name == name), None)
    if found is None:
        message = f"SKU {name} is not in the catalog; see hamictl get skus"
        raise Absent(message)
    try:
        snapshot = _state(scheduler, None)
    except (Absent, Refused, Unreachable) as error:
        answer = skufits.expand(found, currency=catalog.currency, problem=error.format_message())
    else:
        answer = skufits.explain(found, currency=catalog.currency, snapshot=snapshot)
    if output.structured(answer, format_):
        return
    price = f", {found.price_hour} {catalog.currency} per hour" if found.price_hour else ""
    click.echo(f"SKU {found.name}@{found.version}: {found.state}, {found.service_class}{price}")
    if found.state != "active":
        click.echo(f"  new pods are refused; successor: {found.successor or 'none'}")
    for number, one in enumerate(answer.alternatives, start=1):
        types = f" of types {', '.join(one.types)}" if one.types else ""
        fits = "" if answer.problem else f": fits {len(one.nodes)} nodes"
        click.echo(f"  {number}. {one.vendor}{types}{fits}")
        for key, value in sorted({**one.limits, **one.annotations}.items()):
            click.echo(f"       {key}: {value}")
        if one.nodes:
            more = len(one.nodes) - NODES_SHOWN
            shown = one.nodes if format_ == "wide" or more <= 0 else one.nodes[:NODES_SHOWN]
            rest = f" and {more} more" if len(shown) < len(one.nodes) else ""
            click.echo(f"     nodes: {', '.join(shown)}{rest}")
        for count, text in one.refusals[: None if format_ == "wide" else NODES_SHOWN]:
            click.echo(f"     {count} nodes: {text}")
    if answer.problem:
        click.echo(f"  nodes unknown: {answer.problem}")


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


def _time(text: str) -> str:
    """Return a time as RFC 3339: of such a text, or of a time before now such as 90m."""
    ago = _AGO.fullmatch(text)
    if ago is not None:
        now_s = SystemClock().now_s()
        return datetime.fromtimestamp(now_s - int(ago[1]) * _UNIT_S[ago[2]], tz=UTC).isoformat()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        message = f"--at {text}: is no time; give 2026-05-01T00:00:00Z, or 90m, 24h or 7d ago"
        raise InputRefused(message)
    return moment.isoformat()


def _show_moment(moment: Moment, *, is_wide: bool) -> None:
    decision = moment.decision
    click.echo(f"Pod {decision.namespace}/{decision.pod}")
    _show_history((), [replace(decision, closest=())], is_wide=is_wide)
    refused = len(moment.nodes) - moment.nodes_feasible
    click.echo(f"  then: {moment.nodes_feasible} nodes fit, {refused} refuse, device by device:")
    _show_nodes(moment.nodes)
    if moment.differing:
        named = ", ".join(moment.differing)
        click.echo(
            f"  {len(moment.differing)} of {moment.compared} recorded nodes differ: {named}; "
            "silent agents, faults and withheld nodes are not in stored events"
        )
    else:
        click.echo(f"  All {moment.compared} recorded nodes are equal.")
    if moment.assumed:
        click.echo(
            f"  {moment.assumed} nodes or allocations are older than the stored events: "
            "their next known state is shown"
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
    changes = 0
    for way in now.closest:
        changes += way.kind == "less"
        if way.kind != "less" or changes <= CHANGES_SHOWN:
            click.echo(f"    closest fit: {_way(way)}")
    if not now.best and not now.closest:
        click.echo("    closest fit: no single change of the request would let the pod fit")
    if now.unmoved:
        click.echo(f"    moves of other pods not checked: {now.unmoved}")
    if now.explained is not None:
        rows = [
            [step.container, device.uuid, _verdict(device)]
            for step in now.explained.steps
            for device in step.devices
        ]
        empty = f"{now.explained.node} has no device of this kind."
        output.table(["CONTAINER", f"DEVICE ON {now.explained.node}", "VERDICT"], rows, empty=empty)


def _way(way: Way) -> str:
    """Format a way as one sentence."""
    match way.kind:
        case "less":
            return str(way.change)
        case "move":
            steps = [
                f"move {one.namespace}/{one.pod} ({one.memory_mib} MiB) from {one.source} to "
                + (one.target if one.target != one.source else "other devices there")
                for one in way.moves
            ]
            return f"{', then '.join(steps)}; the pod then fits on {way.node}"
        case "wait":
            pods = ", ".join(map(_occupant, way.ends))
            verb = "end" if len(way.ends) > 1 else "ends"
            return f"wait until {pods} {verb}; the pod then fits on {way.node}"
        case _:
            return f"add a node like {way.like}, empty and healthy; the pod fits on it"


def _occupant(one: Occupant) -> str:
    kind = "" if one.kind == "pod" else f"{one.kind} "
    age = output.age(one.age_s)
    return f"{kind}{one.namespace}/{one.name} ({one.memory_mib} MiB, started {age} ago)"


def _verdict(device: DeviceVerdict) -> str:
    uses = "".join(f", {use}" for use in _uses(device))
    if device.code is None:
        return ("fits, taken" if device.taken else "fits") + uses
    if not device.wanted:
        return device.code + uses
    wanted = f"{device.wanted} {device.resource}".rstrip()
    return f"{device.code}: {wanted} wanted, {device.free} free{uses}"


def _uses(device: DeviceVerdict | RefusedDevice) -> list[str]:
    """Return the uses of the device's memory that no share books."""
    amounts = (
        (device.foreign_mib, "processes outside HAMi"),
        (device.burst_mib, "pods beyond their requests"),
    )
    return [f"{mib} MiB used by {user}" for mib, user in amounts if mib]


def _show_recorded(answer: PodExplanation, *, is_wide: bool) -> None:
    click.echo(f"Pod {answer.namespace}/{answer.pod}")
    _show_history(answer.allocations, answer.decisions, is_wide=is_wide)


def _show_history(
    allocations: Sequence[Allocation], decisions: Sequence[DecisionRecord], *, is_wide: bool
) -> None:
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
        if decision.closest:
            _show_closest(decision.closest, is_wide=is_wide)
        if decision.scores is not None:
            _show_scores(decision.scores)


def _show_closest(nodes: Sequence[RefusedNode], *, is_wide: bool) -> None:
    shown = nodes if is_wide else nodes[:NODES_SHOWN]
    click.echo("    closest nodes, device by device:")
    _show_nodes(shown)
    if len(shown) < len(nodes):
        click.echo(f"    and {len(nodes) - len(shown)} more: see -o wide")


def _show_nodes(nodes: Sequence[RefusedNode]) -> None:
    rows: list[list[object]] = []
    for node in nodes:
        rows += [
            [
                f"    {node.node}",
                device.uuid,
                device.code or "fits",
                _wanted(device.wanted),
                _free(device.free),
                _held_by(device),
            ]
            for device in node.devices
        ] or [[f"    {node.node}", "", node.code, "", "", ""]]
        if node.devices_left_out:
            rows.append([f"    {node.node}", f"{node.devices_left_out} more devices"])
    headings = ["    NODE", "DEVICE", "REFUSAL", "WANTED", "FREE", "HELD BY"]
    rows = [[*row, *[""] * (len(headings) - len(row))] for row in rows]
    output.table(headings, rows, empty="")


def _wanted(amounts: Amounts) -> str:
    compute = f", {amounts.core_pct} %" if amounts.core_pct else ""
    return f"{amounts.memory_mib} MiB{compute}"


def _free(amounts: Amounts) -> str:
    slots = "1 slot" if amounts.slots == 1 else f"{amounts.slots} slots"
    return f"{amounts.memory_mib} MiB, {amounts.core_pct} %, {slots}"


def _held_by(device: RefusedDevice) -> str:
    texts = [_holder(one) for one in device.holders]
    if device.holders_left_out:
        texts.append(f"{device.holders_left_out} more")
    return ", ".join([*texts, *_uses(device)]) or "-"


def _holder(one: DeviceHolder) -> str:
    kind = "" if one.kind in ("pod", "") else f"{one.kind} "
    name = f"{one.namespace}/{one.name}" if one.name else "another namespace"
    compute = " whole" if one.exclusive else f" {one.core_pct} %" if one.core_pct else ""
    return f"{kind}{name} {one.memory_mib} MiB{compute}"


def _show_scores(scores: ScoreDetail) -> None:
    rows = [
        [f"    {rank} node", one.node, f"{one.score:g}", *_in_use(one), f"{one.topology:g}"]
        for rank, one in zip(("best", "next"), scores.nodes, strict=False)
    ]
    rows += [
        [f"    {rank} device", one.uuid, "", *_in_use(one), f"{one.topology:g}"]
        for rank, one in zip(("best", "next"), scores.devices, strict=False)
    ]
    headings = ["    ", "NAME", "SCORE", "SLOTS", "COMPUTE", "MEMORY", "TOPOLOGY"]
    output.table(headings, rows, empty="")
    order = f"node policy {scores.node_policy}, device policy {scores.device_policy}"
    decided = _DECIDED.get(scores.decided_by, "")
    click.echo(f"    {decided}{order}")


_DECIDED: Final = {
    "topology": "the best node is nearer to the pods of its gang; ",
    "excess": "the best node gives less beyond the request; ",
    "fill": "the best node has the better score; ",
    "name": "both nodes score the same, the first by name is taken; ",
}


def _in_use(terms: NodeTerms | DeviceTerms) -> list[str]:
    return [f"{100 * part:.0f} %" for part in (terms.slot, terms.core, terms.memory)]


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
    movable: Sequence[Running],
    documents: Callable[[], Objects],
) -> PodExplanation:
    """Read the registry and, if the pod is pending, a scheduler's state or a snapshot file.

    ``documents`` reads the pod, all nodes and all managed pods from the Kubernetes API. A file is
    evaluated without them, because its nodes need not be those of now; ``movable`` are the pods
    that may be moved then.
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
    except (Absent, Refused, Unreachable) as error:
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
    ledger, unchecked = load(known), "a snapshot has none of them"
    objects: Objects | None = None
    if file is None:
        try:
            objects, unchecked = documents(), ""
        except (Absent, Refused, Unreachable, InputRefused) as error:
            unchecked = error.message
    return replace(
        answer,
        snapshot_id=known.snapshot_id,
        unchecked=unchecked,
        now=standing(
            ledger,
            request,
            _surroundings(known, ledger, objects, movable, unchecked),
            node=node,
            governed=governed_by(known, known.quotas.askers),
        ),
    )


def _surroundings(
    known: Snapshot,
    ledger: Ledger,
    objects: Objects | None,
    movable: Sequence[Running],
    problem: str,
) -> Surroundings:
    """Return what is known besides the snapshot; ``problem``: why there are no ``objects``."""
    around = Surroundings(now_s=known.time_s, inventory=inventory_of(known))
    if objects is None:
        if not movable:
            return replace(around, unmoved=f"{problem}; give --snapshot and --pods")
        tenants, _ = tenants_of(known, ledger, movable)
        return replace(around, tenants=tenants)
    try:
        return surroundings(known, ledger, objects.pod, objects.nodes, objects.managed)
    except msgspec.ValidationError as error:
        message = f"the Kubernetes API: {error}"
        raise InputRefused(message) from error


def _documents(kubeconfig: str, namespace: str, name: str) -> Objects:
    return kube.with_kube(kubeconfig, lambda api: _objects(api, namespace, name))


async def _objects(api: KubeApi, namespace: str, name: str) -> Objects:
    path = api_path("api", "v1", "namespaces", namespace, "pods", name)
    pod = msgspec.json.decode(await api.get(path), type=Document)
    nodes = await api.list_pages("/api/v1/nodes")
    managed: list[Document] | None = None
    with suppress(Denied):
        managed = _items(
            await api.list_pages("/api/v1/pods", label_selector=f"{keys.MANAGED_LABEL}=true")
        )
    return Objects(pod, _items(nodes), managed)


def _items(pages: Sequence[bytes]) -> list[Document]:
    return [item for page in pages for item in msgspec.json.decode(page).get("items") or []]


def _state(scheduler: str, file: Path | None) -> Snapshot:
    if file is not None:
        return read_snapshot(file)
    body = client.fetch(scheduler, "/v1/snapshot")
    return decode_snapshot(body, what=f"{scheduler}/v1/snapshot")
