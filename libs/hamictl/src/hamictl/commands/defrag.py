# SPDX-License-Identifier: Apache-2.0
"""``hamictl defrag``: plans moves of running pods that make a pod fit, and executes them.

For a shape, the plan is made here from files: ``hami_core.replay.tenants`` defines which pods can
be moved, and ``hami_core.planning.defrag`` searches. For a pod that waits in the cluster, the
scheduler plans and executes, one step per call; this command repeats the call within its budget
(``hamictl.defragmenting``).
"""

from pathlib import Path
from typing import Final

import click
from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.model.request import PodRequest
from hami_common.vendors.catalog import Catalog
from hami_core.planning.defrag import MOST_MOVES, MOST_TRIALS, DefragPlan, plan_moves
from hami_core.replay.snapshot import Snapshot, load
from hami_core.replay.tenants import Staying, tenants_of
from hamictl import defragmenting, options, output
from hamictl.defragmenting import Budget
from hamictl.errors import EXIT_NO, InputRefused
from hamictl.manifests import read_pods, read_running
from hamictl.snapshots import read_snapshot

WANTED_UID: Final = "wanted"


class Defragmentation(Struct, frozen=True, kw_only=True):
    """A plan for one pod, and the pods that cannot be moved."""

    snapshot_id: str
    namespace: str
    pod: str
    plan: DefragPlan
    staying: tuple[Staying, ...]


@click.command()
@click.argument("pod", default="")
@options.pod_namespace_option
@click.option(
    "--execute/--dry-run",
    "executes",
    default=False,
    show_default=True,
    help="Move pods for the waiting POD, one after another.",
)
@click.option(
    "--max-pods",
    default=MOST_MOVES,
    show_default=True,
    type=click.IntRange(1, 8),
    help="Maximum number of pods to evict.",
)
@click.option(
    "--max-evictions",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Maximum number of evictions in --interval.",
)
@click.option(
    "--interval",
    "interval_s",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Interval of --max-evictions, in seconds.",
)
@click.option(
    "--max-time",
    "time_s",
    default=600.0,
    show_default=True,
    type=click.FloatRange(1),
    help="Stop after this many seconds.",
)
@options.scheduler_option
@options.snapshot_file_option
@click.option(
    "--shape",
    "shape_file",
    type=click.Path(path_type=Path),
    help="Manifest of a pod that should fit, instead of a waiting POD; needs --snapshot.",
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
def defrag(  # noqa: PLR0913, PLR0917 - click passes them by name
    pod: str,
    namespace: str,
    executes: bool,  # noqa: FBT001 - click passes flags so
    max_pods: int,
    max_evictions: int,
    interval_s: float,
    time_s: float,
    scheduler: str,
    snapshot_file: Path | None,
    shape_file: Path | None,
    pod_files: tuple[Path, ...],
    moves: int,
    trials: int,
    format_: str,
) -> None:
    """Plan or execute the fewest moves that make a pod fit.

    Without --execute no pod is moved. With it, the pods of the plan are evicted one after another
    within the budget, each after the replacement of the previous one has started; Ctrl-C stops
    after the current step. Exits with 1 if there is no plan or the pod did not start.
    """
    if bool(pod) == (shape_file is not None):
        message = "name a waiting POD, or give --shape with a manifest"
        raise InputRefused(message)
    if shape_file is None:
        budget = Budget(
            pods=max_pods, evictions=max_evictions, interval_s=interval_s, time_s=time_s
        )
        run = defragmenting.Run(scheduler, namespace, pod, budget)
        raise SystemExit(run.execute(format_) if executes else run.plan(min(moves, 8), format_))
    if executes:
        message = "--execute moves pods for a waiting POD, not for --shape: create the pod first"
        raise InputRefused(message)
    if snapshot_file is None:
        message = "--shape needs --snapshot"
        raise InputRefused(message)
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
            defragmenting.show_moves(found.moves)
            click.echo(
                f"Then {name} fits on {found.node}: {defragmenting.devices(found.containers)}"
            )
            least = "the least" if found.is_least_memory else "possibly not the least, see --trials"
            click.echo(f"{found.memory_mib} MiB move, {least} of plans with so few moves.")
    click.echo(f"{found.movable} pods can be moved, {len(result.staying)} stay.")
    if is_wide:
        rows = [[f"{one.namespace}/{one.pod}", one.node, one.why] for one in result.staying]
        output.table(["STAYING", "NODE", "WHY"], rows, empty="Every pod can be moved.")


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
    ledger = load(snapshot)
    running = [pod for path in pod_files for pod in read_running(path)]
    tenants, staying = tenants_of(snapshot, ledger, running)
    found = plan_moves(ledger.table, shape, tenants, most_moves=most_moves, most_trials=most_trials)
    return Defragmentation(
        snapshot_id=snapshot.snapshot_id,
        namespace=shape.namespace,
        pod=shape.name,
        plan=found,
        staying=staying,
    )
