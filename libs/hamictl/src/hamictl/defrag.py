# SPDX-License-Identifier: Apache-2.0
"""Which running pods to move so that a pod fits: the plan of ``hami_core.planning.defrag``.

A pod can be moved when the snapshot shows that it holds devices, and its manifest, as the API
server has it, tells what it would ask for anew. It stays where it is when it says so (annotation
``hami.io/no-move``), when it is a member of a gang or a DaemonSet's, when it ends, and as long as
the time that it asked for (``hami.io/min-runtime-s``) has not passed. Rules that only
kube-scheduler knows, such as node selectors, cannot be looked at here: a pod with such rules is
moved only within its node. Why each other pod stays is told.
"""

from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from hami_common.bounds import RUNTIME_MOST_S
from hami_common.errors import RequestInvalid
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.units import real
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.repair import Holding
from hami_core.planning.defrag import DefragPlan, Tenant, plan_moves
from hami_core.planning.gangs import gang_of
from hami_core.replay.snapshot import Snapshot, load
from hamictl.errors import InputRefused
from hamictl.manifests import Running, read_pods, read_running

WANTED_UID: Final = "wanted"
_SETTLED: Final = frozenset({"bound", "prepared", "running"})


class Staying(Struct, frozen=True, kw_only=True):
    """A pod that is not moved."""

    namespace: str
    pod: str
    node: str
    why: str


class Defragmentation(Struct, frozen=True, kw_only=True):
    """A plan, for whom, and who was left alone."""

    snapshot_id: str
    namespace: str
    pod: str
    plan: DefragPlan
    staying: tuple[Staying, ...]


def shape_of(path: Path, snapshot: Snapshot) -> PodRequest:
    """The one pod of a manifest, as it would be admitted."""
    pods = read_pods(path)
    if len(pods) != 1:
        message = f"{path}: {len(pods)} pods; --shape takes a manifest of one pod"
        raise InputRefused(message)
    try:
        request = Catalog.from_settings().parse_pod(pods[0], defaults=snapshot.policy)
    except RequestInvalid as error:
        message = f"{path}: {error}"
        raise InputRefused(message) from error
    if request is None:
        message = f"{path}: the pod asks for no device"
        raise InputRefused(message)
    return replace(request, uid=WANTED_UID)


def run(
    snapshot: Snapshot,
    shape: PodRequest,
    pod_files: tuple[Path, ...],
    *,
    most_moves: int,
    most_trials: int,
) -> Defragmentation:
    """Look for a plan."""
    running = {pod.view.metadata.uid: pod for path in pod_files for pod in read_running(path)}
    ledger = load(snapshot)
    catalog = Catalog.from_settings()
    tenants: list[Tenant] = []
    staying: list[Staying] = []
    for holding in sorted(ledger.holdings(), key=lambda held: held.record.pod_uid):
        record = holding.record
        found = _tenant(catalog, snapshot, holding, running.get(record.pod_uid))
        if isinstance(found, Tenant):
            tenants.append(found)
        else:
            staying.append(
                Staying(namespace=record.namespace, pod=record.pod, node=record.node, why=found)
            )
    plan = plan_moves(ledger.table, shape, tenants, most_moves=most_moves, most_trials=most_trials)
    return Defragmentation(
        snapshot_id=snapshot.snapshot_id,
        namespace=shape.namespace,
        pod=shape.name,
        plan=plan,
        staying=tuple(staying),
    )


def _tenant(
    catalog: Catalog, snapshot: Snapshot, holding: Holding, pod: Running | None
) -> Tenant | str:
    """The pod as one that can be moved, or why it stays."""
    record, state = holding.record, holding.state
    if state is None or state.allocation_id != record.allocation_id or state.state not in _SETTLED:
        return "not settled on its node yet"
    if pod is None:
        return "its manifest is not among --pods"
    view = pod.view
    if why := _stays(view, held_s=snapshot.time_s - record.time_s):
        return why
    try:
        request = catalog.parse_pod(view, defaults=snapshot.policy)
    except RequestInvalid as error:
        return f"could not be admitted again: {error}"
    if request is None:
        return "asks for no device any more"
    return Tenant(
        request=request,
        node=record.node,
        containers=record.containers,
        stays_on_node=pod.is_tied,
    )


def _stays(view: PodView, *, held_s: float) -> str:
    """Why the pod itself does not want to be moved; empty: it does not say."""
    annotations = view.annotations()
    if annotations.get(keys.NO_MOVE, "").strip().lower() == "true":
        return f"annotation {keys.NO_MOVE}"
    if view.metadata.deletion_timestamp is not None or view.is_finished():
        return "is ending"
    if any(owner.kind == "DaemonSet" for owner in view.metadata.owner_references or ()):
        return "belongs to a DaemonSet"
    if _is_in_gang(view):
        return "is a member of a gang"
    if text := annotations.get(keys.MIN_RUNTIME, "").strip():
        least_s = real(text, least=0.0, most=RUNTIME_MOST_S)
        if least_s is None:
            return f"annotation {keys.MIN_RUNTIME}: {text[:40]!r} is not a number of seconds"
        if not held_s >= least_s:
            return f"runs for {held_s:.0f} s, {keys.MIN_RUNTIME} asks for {least_s:.0f}"
    return ""


def _is_in_gang(view: PodView) -> bool:
    try:
        return gang_of(view) is not None
    except RequestInvalid:
        return True  # it says so, if not well
