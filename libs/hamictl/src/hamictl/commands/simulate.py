# SPDX-License-Identifier: Apache-2.0
"""``hamictl simulate``: places the pods of manifests on a snapshot, under one or several policies.

Quotas and queues apply: those of the snapshot, or replacements for what-if questions.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common import documents
from hami_common.errors import RequestInvalid, SettingsInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.model.request import PlacementPolicy, PodRequest, ScoringWeights
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog, parse_policy
from hami_core.ledger.podfacts import account_of
from hami_core.planning import whatif
from hami_core.planning.whatif import Outcome, Packing, packing
from hami_core.quota import queues
from hami_core.quota.accounts import QueueRow, QuotaRow
from hami_core.quota.resourcequota import Asker, Quota, QuotaReader, count_resources
from hami_core.replay.snapshot import Snapshot, load
from hamictl import manifests, options, output, quotatables
from hamictl.errors import EXIT_NO, InputRefused
from hamictl.manifests import read_objects
from hamictl.snapshots import governed_by, read_snapshot

_QOS_RESOURCES = ("cpu", "memory")
"""Resources that determine a pod's quality of service class."""


class Rules(Struct, frozen=True, kw_only=True):
    """Quotas and queues that replace the snapshot's."""

    quotas: tuple[Quota, ...] = ()
    """In place of those with the same namespace and name."""
    tree: queues.QueueTree | None = None
    """In place of all queues."""


class Rejected(Struct, frozen=True, kw_only=True):
    """A pod that admission would deny."""

    namespace: str
    pod: str
    problem: str


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


class Comparison(Struct, frozen=True, kw_only=True):
    """The same pods on the same snapshot under several policies."""

    results: tuple[Result, ...]


@click.command()
@options.snapshot_file_option
@click.option(
    "--pods",
    "pod_files",
    type=click.Path(path_type=Path),
    required=True,
    multiple=True,
    help="Manifest of Pods, Deployments, StatefulSets, ReplicaSets or Jobs; may be repeated.",
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
@click.option("--strict", is_flag=True, help="Exit with 1 if a pod is refused.")
@options.format_option
def simulate(  # noqa: PLR0917 - click passes them by name
    snapshot_file: Path,
    pod_files: tuple[Path, ...],
    policy: tuple[str, ...],
    queues_file: Path | None,
    quota_files: tuple[Path, ...],
    strict: bool,  # noqa: FBT001 - click passes flags so
    format_: str,
) -> None:
    """Place pods on a snapshot and print where each would run.

    Pods that do not fit are listed with their refusals and the closest fit.
    """
    known = read_snapshot(snapshot_file)
    pods = [found for path in pod_files for found in manifests.read_pods(path)]
    policies = policies_of(policy, known.policy)
    rules = rules_of(quota_files, queues_file)
    results = tuple(place(known, pods, one, rules) for one in policies)
    first = results[0]
    is_one = len(results) == 1
    if not output.structured(first if is_one else Comparison(results=results), format_):
        if is_one:
            _show_result(first)
        else:
            _show_comparison(results)
    if strict and any(result.refused for result in results):
        raise SystemExit(EXIT_NO)


def _show_comparison(results: tuple[Result, ...]) -> None:
    rows = [
        [
            policy_text(result.policy),
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


def _show_result(result: Result) -> None:
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
    click.echo(
        f"\n{result.placed} placed, {result.refused} refused, "
        f"{result.without_devices} without devices"
    )
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


def policies_of(words: tuple[str, ...], default: PlacementPolicy) -> list[PlacementPolicy]:
    """Parse the policies to compare, each ``node=…;device=…;weights=…`` over the default.

    Words without a semicolon that each set a different part are joined to one policy.
    """
    parts = [tuple(filter(None, word.split(";"))) for word in words]
    named = [part.partition("=")[0] for some in parts for part in some]
    if all(len(some) == 1 for some in parts) and len(set(named)) == len(named):
        parts = [tuple(part for some in parts for part in some)]
    return [policy_of(some, default) for some in parts]


def policy_of(words: tuple[str, ...], default: PlacementPolicy) -> PlacementPolicy:
    """Parse a policy from ``node=…``, ``device=…``, ``weights=…`` words over the default."""
    keys = {
        "node": "hami.io/node-scheduler-policy",
        "device": "hami.io/gpu-scheduler-policy",
        "weights": "hami.io/device-scoring-weights",
    }
    annotations = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in keys:
            message = f"--policy {word}: write node=…, device=… or weights=…"
            raise InputRefused(message)
        annotations[keys[name]] = value
    try:
        return parse_policy(annotations, defaults=default)
    except RequestInvalid as error:
        raise InputRefused(str(error)) from error


def policy_text(policy: PlacementPolicy) -> str:
    """Format the policy as a value of ``--policy``."""
    weights = policy.weights
    text = f"node={policy.node};device={','.join(policy.device)}"
    if weights != ScoringWeights():
        text += f";weights=slot={weights.slot},core={weights.core},memory={weights.memory}"
    return text


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
    try:
        text = queues_file.read_text(encoding="utf-8")
        tree = queues.parse(
            documents.toml(text, field="queues file"),
            vendors=[vendor.name for vendor in catalog.vendors],
        )
    except OSError as error:
        message = f"{queues_file}: {error.strerror}"
        raise InputRefused(message) from error
    except (UnicodeDecodeError, SettingsInvalid) as error:
        message = f"{queues_file}: {error}"
        raise InputRefused(message) from error
    return Rules(quotas=tuple(quotas), tree=tree)


def asker_of(pod: PodView, names: Mapping[str, tuple[str, str]]) -> Asker:
    """Return the quota account of a manifest's pod; ``names`` as of ``count_resources``."""
    if not pod.status.qos_class:
        asked = {
            name
            for _, container in pod.containers_in_order()
            for name in (*container.limits(), *container.requests())
        }
        if asked.isdisjoint(_QOS_RESOURCES):
            pod = replace(pod, status=replace(pod.status, qos_class="BestEffort"))
    return Asker(account=account_of(pod, names), wish=pod.labels().get(keys.QUEUE_LABEL, ""))


def place(
    snapshot: Snapshot,
    pods: list[PodView],
    policy: PlacementPolicy,
    rules: Rules | None = None,
) -> Result:
    """Place every pod, in order."""
    catalog = Catalog.from_settings()
    names = count_resources(catalog)
    askers: dict[str, Asker] = {}
    requests: list[PodRequest] = []
    rejected: list[Rejected] = []
    plain = 0
    for number, pod in enumerate(pods):
        try:
            request = catalog.parse_pod(pod, defaults=policy)
        except RequestInvalid as error:
            namespace = pod.metadata.namespace or "default"
            rejected.append(
                Rejected(namespace=namespace, pod=pod.metadata.name, problem=str(error))
            )
            continue
        if request is None:
            plain += 1
        else:
            request = replace(request, uid=f"whatif-{number}")
            askers[request.uid] = asker_of(pod, names)
            requests.append(request)
    ledger = load(snapshot)
    governed = governed_by(snapshot, askers)
    if rules is not None:
        for quota in rules.quotas:
            governed.quota.put_quota(quota)
        if rules.tree is not None:
            governed.quota.set_tree(rules.tree)
    exact = snapshot.exact
    inventory = snapshot.devices if exact is None else exact.inventory.devices
    devices = [(known.node, device) for known in inventory for device in known.devices]
    before = packing(ledger, devices, requests)
    outcomes = tuple(whatif.simulate(ledger, requests, now_s=snapshot.time_s, governed=governed))
    placed = sum(1 for outcome in outcomes if outcome.node)
    return Result(
        snapshot_id=snapshot.snapshot_id,
        policy=policy,
        placed=placed,
        refused=len(outcomes) - placed + len(rejected),
        without_devices=plain,
        before=before,
        after=packing(ledger, devices, requests),
        pods=outcomes,
        rejected=tuple(rejected),
        quotas=tuple(governed.quota.quota_rows()),
        queues=tuple(governed.quota.queue_rows()),
    )
