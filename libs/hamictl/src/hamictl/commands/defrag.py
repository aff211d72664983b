# SPDX-License-Identifier: Apache-2.0
"""``hamictl defrag``: plans moves of running pods that make a pod fit.

A pod is movable if the snapshot shows its devices and ``--pods`` has its manifest, which states its
request. A pod stays if it is annotated ``hami.io/no-move``, belongs to a gang or a DaemonSet, is
terminating, or is younger than its ``hami.io/min-runtime-s``. Node selectors and other rules of
kube-scheduler are not evaluated: a pod that has them moves only within its node. The search is
``hami_core.planning.defrag``.
"""

from pathlib import Path
from typing import Final

import click
from msgspec import Struct
from msgspec.structs import replace

from hami_common.bounds import RUNTIME_MOST_S
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import is_of_claim
from hami_common.model.placement import ContainerShares
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.units import real
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.holding import Holding
from hami_core.planning.defrag import MOST_MOVES, MOST_TRIALS, DefragPlan, Tenant, plan_moves
from hami_core.planning.gangs import gang_of
from hami_core.replay.snapshot import Snapshot, load
from hamictl import options, output
from hamictl.errors import EXIT_NO, InputRefused
from hamictl.manifests import Running, read_pods, read_running
from hamictl.snapshots import read_snapshot

WANTED_UID: Final = "wanted"
_SETTLED: Final = frozenset({"bound", "prepared", "running"})


class Staying(Struct, frozen=True, kw_only=True):
    """A pod that cannot be moved."""

    namespace: str
    pod: str
    node: str
    why: str


class Defragmentation(Struct, frozen=True, kw_only=True):
    """A plan for one pod, and the pods that cannot be moved."""

    snapshot_id: str
    namespace: str
    pod: str
    plan: DefragPlan
    staying: tuple[Staying, ...]


@click.command()
@options.snapshot_file_option
@click.option(
    "--shape",
    "shape_file",
    type=click.Path(path_type=Path),
    required=True,
    help="Manifest of the pod that should fit.",
)
@click.option(
    "--pods",
    "pod_files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Movable pods: a file of kubectl get pods -A -o json; may be repeated.",
)
@click.option(
    "--moves",
    default=MOST_MOVES,
    show_default=True,
    type=click.IntRange(0),
    help="Maximum number of moves.",
)
@click.option(
    "--trials",
    default=MOST_TRIALS,
    show_default=True,
    type=click.IntRange(1),
    help="Maximum number of placements to try.",
)
@options.format_option
def defrag(  # noqa: PLR0917 - click passes them by name
    snapshot_file: Path,
    shape_file: Path,
    pod_files: tuple[Path, ...],
    moves: int,
    trials: int,
    format_: str,
) -> None:
    """Plan the fewest moves of pods that make a pod fit.

    A dry run: no pod is moved. Exits with 1 if there is no plan.
    """
    known = read_snapshot(snapshot_file)
    shape = shape_of(shape_file, known)
    result = plan(known, shape, pod_files, most_moves=moves, most_trials=trials)
    if not output.structured(result, format_):
        _show(result, most_moves=moves, is_wide=format_ == "wide")
    if result.plan.outcome in ("none", "not-found"):
        raise SystemExit(EXIT_NO)


def _show(result: Defragmentation, *, most_moves: int, is_wide: bool) -> None:
    found, name = result.plan, f"{result.namespace}/{result.pod}"
    match found.outcome:
        case "none":
            click.echo(
                f"No {most_moves} moves or fewer make {name} fit: the search was exhaustive."
            )
        case "not-found":
            click.echo(
                f"Not found within {found.trials} trials: no {found.moves_searched} moves or fewer"
                f" make {name} fit; raise --trials to search for more."
            )
        case "fits":
            click.echo(f"{name} fits on {found.node} as it is: {output.shares(found.containers)}")
        case "found":
            rows = [
                [
                    number,
                    f"{move.namespace}/{move.pod}",
                    f"{move.source}: {_devices(move.gives)}",
                    f"{move.target}: {_devices(move.takes)}",
                    move.memory_mib,
                ]
                for number, move in enumerate(found.moves, start=1)
            ]
            output.table(["STEP", "POD", "FROM", "TO", "MEMORY MIB"], rows, empty="")
            click.echo(f"Then {name} fits on {found.node}: {_devices(found.containers)}")
            least = "the least" if found.is_least_memory else "possibly not the least, see --trials"
            click.echo(f"{found.memory_mib} MiB move, {least} of plans with so few moves.")
    click.echo(f"{found.movable} pods can be moved, {len(result.staying)} stay.")
    if is_wide:
        rows = [[f"{one.namespace}/{one.pod}", one.node, one.why] for one in result.staying]
        output.table(["STAYING", "NODE", "WHY"], rows, empty="Every pod can be moved.")


def _devices(containers: tuple[ContainerShares, ...]) -> str:
    """Format the devices of the shares, with their partitions."""
    shares = [share for container in containers for share in container.shares]
    words = [f"{share.uuid} {share.part}".strip() for share in shares]
    return ", ".join(dict.fromkeys(words))


def shape_of(path: Path, snapshot: Snapshot) -> PodRequest:
    """Read the only pod of a manifest, as admission would complete it."""
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
        message = f"{path}: the pod requests no device"
        raise InputRefused(message)
    return replace(request, uid=WANTED_UID)


def plan(
    snapshot: Snapshot,
    shape: PodRequest,
    pod_files: tuple[Path, ...],
    *,
    most_moves: int,
    most_trials: int,
) -> Defragmentation:
    """Search for a plan."""
    running = {pod.view.metadata.uid: pod for path in pod_files for pod in read_running(path)}
    ledger = load(snapshot)
    catalog = Catalog.from_settings()
    tenants: list[Tenant] = []
    staying: list[Staying] = []
    for holding in sorted(ledger.holdings(), key=lambda one: one.record.pod_uid):
        record = holding.record
        tenant = _tenant(catalog, snapshot, holding, running.get(record.pod_uid))
        if isinstance(tenant, Tenant):
            tenants.append(tenant)
        else:
            staying.append(
                Staying(namespace=record.namespace, pod=record.pod, node=record.node, why=tenant)
            )
    found = plan_moves(ledger.table, shape, tenants, most_moves=most_moves, most_trials=most_trials)
    return Defragmentation(
        snapshot_id=snapshot.snapshot_id,
        namespace=shape.namespace,
        pod=shape.name,
        plan=found,
        staying=tuple(staying),
    )


def _tenant(
    catalog: Catalog, snapshot: Snapshot, holding: Holding, pod: Running | None
) -> Tenant | str:
    """Return the movable pod, or the reason that it stays."""
    record, state = holding.record, holding.state
    if is_of_claim(record):
        return "it is a ResourceClaim, whose devices kube-scheduler chooses"
    if state is None or state.allocation_id != record.allocation_id or state.state not in _SETTLED:
        return "not bound to its node yet"
    if pod is None:
        return "its manifest is not among --pods"
    view = pod.view
    if why := _pinned(view, age_s=snapshot.time_s - record.time_s):
        return why
    try:
        request = catalog.parse_pod(view, defaults=snapshot.policy)
    except RequestInvalid as error:
        return f"would be denied at admission: {error}"
    if request is None:
        return "no longer requests a device"
    return Tenant(
        request=request,
        node=record.node,
        containers=record.containers,
        stays_on_node=pod.is_tied,
    )


def _pinned(view: PodView, *, age_s: float) -> str:
    """Return the reason that the pod must not be moved; empty if there is none."""
    annotations = view.annotations()
    if annotations.get(keys.NO_MOVE, "").strip().lower() == "true":
        return f"annotation {keys.NO_MOVE}"
    if view.metadata.deletion_timestamp is not None or view.is_finished():
        return "is terminating"
    if any(owner.kind == "DaemonSet" for owner in view.metadata.owner_references or ()):
        return "belongs to a DaemonSet"
    if _is_in_gang(view):
        return "is a member of a gang"
    if text := annotations.get(keys.MIN_RUNTIME, "").strip():
        least_s = real(text, least=0.0, most=RUNTIME_MOST_S)
        if least_s is None:
            return f"annotation {keys.MIN_RUNTIME}: {text[:40]!r} is not a number of seconds"
        if not age_s >= least_s:
            return f"runs for {age_s:.0f} s, {keys.MIN_RUNTIME} asks for {least_s:.0f}"
    return ""


def _is_in_gang(view: PodView) -> bool:
    try:
        return gang_of(view) is not None
    except RequestInvalid:
        return True  # an invalid request to be in a gang
