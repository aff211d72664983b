# SPDX-License-Identifier: Apache-2.0
"""Places the pods of manifests on a snapshot, with any policy, and tells what came of it.

Quotas and queues take part: those of the snapshot, or others that are to be tried.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common import documents
from hami_common.errors import HamiError, RequestInvalid, SettingsInvalid
from hami_common.events import codec
from hami_common.events.codec import UNDECODABLE
from hami_common.model.request import PlacementPolicy, PodRequest, ScoringWeights
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog, parse_policy
from hami_core.ledger.podfacts import account_of
from hami_core.planning.whatif import Governed, Outcome, Packing, packing, simulate
from hami_core.quota import queues
from hami_core.quota.accounts import QueueRow, QuotaRow
from hami_core.quota.resourcequota import Asker, Quota, QuotaReader, count_resources
from hami_core.replay.snapshot import Snapshot, load, load_quotas
from hamictl.errors import InputRefused
from hamictl.manifests import read_objects

_QUALITY_BY = ("cpu", "memory")
"""Resources by which Kubernetes tells a pod's quality of service."""


class Rules(Struct, frozen=True, kw_only=True):
    """Quotas and queues to try instead of the snapshot's."""

    quotas: tuple[Quota, ...] = ()
    """In place of those with the same namespace and name."""
    tree: queues.QueueTree | None = None
    """In place of all queues."""


class Rejected(Struct, frozen=True, kw_only=True):
    """A pod that admission would refuse."""

    namespace: str
    pod: str
    problem: str


class Result(Struct, frozen=True, kw_only=True):
    """A whole simulation."""

    snapshot_id: str
    policy: PlacementPolicy
    placed: int
    refused: int
    without_devices: int
    """Pods that ask for no device of ours."""
    before: Packing
    after: Packing
    pods: tuple[Outcome, ...]
    rejected: tuple[Rejected, ...] = ()
    quotas: tuple[QuotaRow, ...] = ()
    """Limits of ResourceQuotas and what is used under them afterwards."""
    queues: tuple[QueueRow, ...] = ()


class Comparison(Struct, frozen=True, kw_only=True):
    """The same pods on the same snapshot under several policies."""

    results: tuple[Result, ...]


def read_snapshot(path: Path) -> Snapshot:
    """A snapshot file, as ``hamictl snapshot`` or ``GET /v1/snapshot`` of a scheduler gives it."""
    try:
        body = path.read_bytes()
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise InputRefused(message) from error
    return decode_snapshot(body, what=str(path))


def decode_snapshot(body: bytes, *, what: str) -> Snapshot:
    """The same from its bytes."""
    try:
        return codec.decode(body, Snapshot, what=what)
    except HamiError as error:
        raise InputRefused(str(error)) from error


def policies_of(words: tuple[str, ...], default: PlacementPolicy) -> list[PlacementPolicy]:
    """The policies to compare, each ``node=…;device=…;weights=…`` over the snapshot's own.

    Several words without a semicolon, each about another part, make one policy together.
    """
    parts = [tuple(filter(None, word.split(";"))) for word in words]
    named = [part.partition("=")[0] for some in parts for part in some]
    if all(len(some) == 1 for some in parts) and len(set(named)) == len(named):
        parts = [tuple(part for some in parts for part in some)]
    return [policy_of(some, default) for some in parts]


def policy_of(words: tuple[str, ...], default: PlacementPolicy) -> PlacementPolicy:
    """Policy from ``node=…``, ``device=…``, ``weights=…`` words over the snapshot's own."""
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
    """The policy in the words that ``--policy`` takes."""
    weights = policy.weights
    text = f"node={policy.node};device={','.join(policy.device)}"
    if weights != ScoringWeights():
        text += f";weights=slot={weights.slot},core={weights.core},memory={weights.memory}"
    return text


def rules_of(quota_files: Iterable[Path], queues_file: Path | None) -> Rules:
    """Quotas and queues from files, as the API server and the scheduler's settings have them."""
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


def governed_by(
    snapshot: Snapshot, askers: Mapping[str, Asker], rules: Rules | None = None
) -> Governed:
    """What is held under quotas in a snapshot, with ``rules`` in place of its own."""
    try:
        quota = load_quotas(snapshot)
    except HamiError as error:
        raise InputRefused(str(error)) from error
    if rules is not None:
        for one in rules.quotas:
            quota.put_quota(one)
        if rules.tree is not None:
            quota.set_tree(rules.tree)
    return Governed(quota, askers)


def asker_of(pod: PodView, names: Mapping[str, tuple[str, str]]) -> Asker:
    """The pod of a manifest as quotas look at it; ``names`` as of ``count_resources``."""
    if not pod.status.qos_class:
        asked = {
            name
            for _, container in pod.containers_in_order()
            for name in (*container.limits(), *container.requests())
        }
        if asked.isdisjoint(_QUALITY_BY):
            pod = replace(pod, status=replace(pod.status, qos_class="BestEffort"))
    return Asker(account=account_of(pod, names), wish=pod.labels().get(keys.QUEUE_LABEL, ""))


def run(
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
    governed = governed_by(snapshot, askers, rules)
    exact = snapshot.exact
    inventory = snapshot.devices if exact is None else exact.inventory.devices
    devices = [(known.node, device) for known in inventory for device in known.devices]
    before = packing(ledger, devices, requests)
    outcomes = tuple(simulate(ledger, requests, now_s=snapshot.time_s, governed=governed))
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
