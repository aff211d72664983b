# SPDX-License-Identifier: Apache-2.0
"""The commands that decide with the scheduler's own core: explain, simulate, defrag, replay."""

import time
from pathlib import Path

import click

from hami_common.model.placement import ContainerShares
from hami_core.placement.reasons import DeviceVerdict
from hami_core.planning.defrag import MOST_MOVES, MOST_TRIALS
from hami_core.replay.rerun import Report
from hamictl import defrag, manifests, output, pending, replay, simulate
from hamictl.errors import EXIT_GAP, EXIT_NO
from hamictl.looking import shares_text, show_queues, show_quotas
from hamictl.options import format_option as _format
from hamictl.options import namespace_option as _namespace
from hamictl.options import registry_option as _registry
from hamictl.options import scheduler_option as _scheduler


@click.group(name="explain")
def explain_command() -> None:
    """Say why something is as it is."""


@explain_command.command()
@click.argument("name")
@_namespace
@click.option("--node", default="", help="Also how each device of this node answers now.")
@click.option(
    "--snapshot",
    "snapshot_file",
    type=click.Path(path_type=Path),
    help="What is true now, from this file instead of a scheduler.",
)
@_scheduler
@_registry
@_format
def pod(  # noqa: PLR0917 - click passes them by name
    name: str,
    namespace: str,
    node: str,
    snapshot_file: Path | None,
    scheduler: str,
    registry: str,
    format_: str,
) -> None:
    """Why a pod is where it is, or waits, and what would let it in."""
    answer = pending.explain(
        namespace, name, node=node, registry=registry, scheduler=scheduler, file=snapshot_file
    )
    if format_ in ("json", "yaml"):
        output.show(answer, format_)
        return
    _explain(answer)
    _show_present(answer)


def _show_present(answer: pending.Answer) -> None:
    now = answer.now
    if now is None:
        if answer.problem:
            click.echo(f"  now: {answer.problem}")
        return
    click.echo(f"  now: {now.feasible} of {now.nodes} nodes fit")
    if now.best:
        click.echo(f"    {now.best} would be chosen")
    for refusal in now.refusals:
        click.echo(f"    {refusal.nodes} nodes: {refusal.text}")
    for change in now.closest[:3]:
        click.echo(f"    closest fit: {change}")
    if not now.best and not now.closest:
        click.echo("    closest fit: no single change of the request would let the pod in")
    if now.explained is not None:
        rows = [
            [step.container, device.uuid, _verdict(device)]
            for step in now.explained.steps
            for device in step.devices
        ]
        empty = f"{now.explained.node} has no device of this kind."
        output.table(["CONTAINER", f"DEVICE ON {now.explained.node}", "ANSWER"], rows, empty=empty)


def _verdict(device: DeviceVerdict) -> str:
    if device.code is None:
        return "fits, taken" if device.taken else "fits"
    if not device.wanted:
        return device.code
    return f"{device.code}: {device.wanted} wanted, {device.free} free"


def _explain(answer: pending.Answer) -> None:
    click.echo(f"Pod {answer.namespace}/{answer.pod}")
    for one in answer.allocations:
        reason = f" ({one.reason})" if one.reason else ""
        click.echo(f"  {one.state} on {one.node}{reason}: {shares_text(one.containers)}")
    if not answer.decisions:
        click.echo("  No decision is remembered.")
    for decision in answer.decisions:
        when = time.strftime("%H:%M:%S", time.localtime(decision.time_s))
        feasible = f"{decision.nodes_feasible} of {decision.nodes_considered} nodes fit"
        if decision.nodes_named:
            feasible += f", the best {decision.nodes_named} were named to kube-scheduler"
        click.echo(f"  {when} {decision.verb}: {decision.verdict}, {feasible}")
        for refusal in decision.refusals:
            click.echo(f"    {refusal.count} nodes: {refusal.text}")


_snapshot_file = click.option(
    "--snapshot",
    "snapshot_file",
    type=click.Path(path_type=Path),
    required=True,
    help="From ``hamictl snapshot``.",
)


@click.command(name="simulate")
@_snapshot_file
@click.option(
    "--pods",
    "pod_files",
    type=click.Path(path_type=Path),
    required=True,
    multiple=True,
    help="Manifests: pods, lists, Deployments, StatefulSets, ReplicaSets, Jobs.",
)
@click.option(
    "--policy",
    multiple=True,
    help="node=binpack|spread;device=…;weights=slot=1,core=1,memory=1. Several are compared.",
)
@click.option(
    "--queues",
    "queues_file",
    type=click.Path(path_type=Path),
    help="A queues file to try instead of the snapshot's queues.",
)
@click.option(
    "--quotas",
    "quota_files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="ResourceQuotas to try beside the snapshot's, or instead of those of the same name.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 unless every pod is placed.")
@_format
def simulate_command(  # noqa: PLR0917 - click passes them by name
    snapshot_file: Path,
    pod_files: tuple[Path, ...],
    policy: tuple[str, ...],
    queues_file: Path | None,
    quota_files: tuple[Path, ...],
    strict: bool,  # noqa: FBT001 - click passes flags so
    format_: str,
) -> None:
    """Place pods on a snapshot: where they would go, and what would let the others in."""
    known = simulate.read_snapshot(snapshot_file)
    pods = [found for path in pod_files for found in manifests.read_pods(path)]
    policies = simulate.policies_of(policy, known.policy)
    rules = simulate.rules_of(quota_files, queues_file)
    results = tuple(simulate.run(known, pods, one, rules) for one in policies)
    first = results[0]
    if format_ in ("json", "yaml"):
        is_one = len(results) == 1
        output.show(first if is_one else simulate.Comparison(results=results), format_)
    elif len(results) == 1:
        _show_result(first)
    else:
        _show_comparison(results)
    if strict and any(result.refused for result in results):
        raise SystemExit(EXIT_NO)


def _show_comparison(results: tuple[simulate.Result, ...]) -> None:
    rows = [
        [
            simulate.policy_text(result.policy),
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


def _show_result(result: simulate.Result) -> None:
    rows = [
        [one.namespace, one.pod, one.node or "-", shares_text(one.containers) or "refused"]
        for one in result.pods
    ]
    output.table(["NAMESPACE", "POD", "NODE", "SHARES"], rows, empty="No pod asks for a device.")
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
        show_quotas(result.quotas)
    if result.queues:
        click.echo()
        show_queues(result.queues)


@click.command(name="defrag")
@_snapshot_file
@click.option(
    "--shape",
    "shape_file",
    type=click.Path(path_type=Path),
    required=True,
    help="Manifest of the one pod that is to fit.",
)
@click.option(
    "--pods",
    "pod_files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="The running pods, as ``kubectl get pods -A -o json`` writes them; others stay.",
)
@click.option(
    "--moves", default=MOST_MOVES, show_default=True, type=click.IntRange(0), help="Most moves."
)
@click.option(
    "--trials",
    default=MOST_TRIALS,
    show_default=True,
    type=click.IntRange(1),
    help="Most placings to try.",
)
@_format
def defrag_command(  # noqa: PLR0917 - click passes them by name
    snapshot_file: Path,
    shape_file: Path,
    pod_files: tuple[Path, ...],
    moves: int,
    trials: int,
    format_: str,
) -> None:
    """Plan the fewest moves of running pods after which a pod fits; changes nothing."""
    known = simulate.read_snapshot(snapshot_file)
    shape = defrag.shape_of(shape_file, known)
    result = defrag.run(known, shape, pod_files, most_moves=moves, most_trials=trials)
    if format_ in ("json", "yaml"):
        output.show(result, format_)
    else:
        _show_defrag(result, most_moves=moves, is_wide=format_ == "wide")
    if result.plan.outcome in ("none", "not-found"):
        raise SystemExit(EXIT_NO)


def _show_defrag(result: defrag.Defragmentation, *, most_moves: int, is_wide: bool) -> None:
    plan, name = result.plan, f"{result.namespace}/{result.pod}"
    match plan.outcome:
        case "none":
            click.echo(
                f"No {most_moves} moves or fewer make room for {name}: every plan was looked at."
            )
        case "not-found":
            click.echo(
                f"Not found within {plan.trials} trials: no {plan.moves_searched} moves or fewer"
                f" make room for {name}; more moves might (--trials)."
            )
        case "fits":
            click.echo(f"{name} fits on {plan.node} as it is: {shares_text(plan.containers)}")
        case "found":
            rows = [
                [
                    number,
                    f"{move.namespace}/{move.pod}",
                    f"{move.source}: {devices_text(move.gives)}",
                    f"{move.target}: {devices_text(move.takes)}",
                    move.memory_mib,
                ]
                for number, move in enumerate(plan.moves, start=1)
            ]
            output.table(["STEP", "POD", "FROM", "TO", "MEMORY MIB"], rows, empty="")
            click.echo(f"Then {name} fits on {plan.node}: {devices_text(plan.containers)}")
            least = "the least" if plan.is_least_memory else "perhaps not the least, see --trials"
            click.echo(f"{plan.memory_mib} MiB move, {least} of plans with so few moves.")
    click.echo(f"{plan.movable} pods can be moved, {len(result.staying)} stay.")
    if is_wide:
        rows = [[f"{one.namespace}/{one.pod}", one.node, one.why] for one in result.staying]
        output.table(["STAYING", "NODE", "WHY"], rows, empty="Nobody stays.")


def devices_text(containers: tuple[ContainerShares, ...]) -> str:
    """Devices, with the partition where there is one."""
    shares = [share for container in containers for share in container.shares]
    words = [f"{share.uuid} {share.part}".strip() for share in shares]
    return ", ".join(dict.fromkeys(words))


@click.command(name="replay")
@click.argument("log", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--skip-gaps", is_flag=True, help="Go on after a gap, from the next snapshot.")
@_format
def replay_command(
    log: tuple[Path, ...],
    skip_gaps: bool,  # noqa: FBT001 - click passes flags so
    format_: str,
) -> None:
    """Decide a stimulus log once more and compare every answer: a directory, or its files."""
    report = replay.run(log, skip_gaps=skip_gaps)
    if format_ in ("json", "yaml"):
        output.show(report, format_)
    else:
        _show_replay(report, skip_gaps=skip_gaps)
    if report.difference is not None:
        raise SystemExit(EXIT_NO)
    if report.missing and not skip_gaps:
        raise SystemExit(EXIT_GAP)


def _show_replay(report: Report, *, skip_gaps: bool) -> None:
    click.echo(
        f"{report.stimuli} stimuli, {report.decisions} decisions"
        f" in {report.segments} segments of {report.runs} runs"
    )
    for missing in report.missing:
        then = "begun anew after it" if skip_gaps else "not crossed; --skip-gaps goes on after it"
        click.echo(
            f"gap in segment {missing.segment} after stimulus {missing.after}:"
            f" {missing.problem}; {then}"
        )
    different = report.difference
    if different is None:
        click.echo("Every answer is identical.")
        return
    where = f"stimulus {different.number}" if different.number else "its beginning"
    click.echo(f"First difference: segment {different.segment}, {where}, {different.kind}")
    click.echo(f"  stimulus: {different.what}")
    click.echo(f"  expected: {different.expected}")
    click.echo(f"  got:      {different.got}")
