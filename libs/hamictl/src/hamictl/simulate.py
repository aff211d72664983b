# SPDX-License-Identifier: Apache-2.0
"""Places the pods of manifests on a snapshot, with any policy, and tells what came of it."""

from pathlib import Path

import msgspec
from msgspec import Struct

from hami_common.errors import HamiError, RequestInvalid
from hami_common.events import codec
from hami_common.model.request import PlacementPolicy, PodRequest, ScoringWeights
from hami_common.podview import PodView
from hami_common.vendors.catalog import Catalog, parse_policy
from hami_scheduler.core.snapshot import Snapshot, load
from hami_scheduler.core.whatif import Outcome, Packing, packing, simulate
from hamictl.errors import InputRefused


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


def run(snapshot: Snapshot, pods: list[PodView], policy: PlacementPolicy) -> Result:
    """Place every pod, in order."""
    catalog = Catalog.from_settings()
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
            requests.append(msgspec.structs.replace(request, uid=f"whatif-{number}"))
    ledger = load(snapshot)
    exact = snapshot.exact
    inventory = snapshot.devices if exact is None else exact.inventory.devices
    devices = [(known.node, device) for known in inventory for device in known.devices]
    before = packing(ledger, devices, requests)
    outcomes = tuple(simulate(ledger, requests, now_s=snapshot.time_s))
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
    )
