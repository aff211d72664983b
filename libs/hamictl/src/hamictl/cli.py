# SPDX-License-Identifier: Apache-2.0
"""The commands that look; those of daily operation are in ``operating``. Exit codes: ``errors``."""

import time
from collections.abc import Iterable
from pathlib import Path

import click

from hami_common.model.placement import ContainerShares
from hami_common.runtime.clock import SystemClock
from hami_scheduler.core.defrag import MOST_MOVES, MOST_TRIALS
from hami_scheduler.core.quota_ledger import QueueRow, QuotaRow
from hami_scheduler.core.reasons import DeviceVerdict
from hami_scheduler.core.rerun import Report
from hamictl import (
    client,
    defrag,
    installation,
    manifests,
    migration,
    moving,
    operating,
    output,
    pending,
    replay,
    simulate,
)
from hamictl.client import Allocation, Device, Node
from hamictl.errors import EXIT_GAP, EXIT_NO
from hamictl.options import format_option, namespace_option, registry_option, scheduler_option

_CLOCK = SystemClock()

_format = format_option
_registry = registry_option
_scheduler = scheduler_option
_namespace = namespace_option


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hamictl")
def main() -> None:
    """Look at shared accelerators, and try what would happen."""


@main.group()
def get() -> None:
    """List nodes, devices, allocations, queues or quotas."""


@get.command()
@_registry
@_format
def nodes(registry: str, format_: str) -> None:
    """Nodes with what is booked on them."""
    answer = client.read(client.Nodes, registry, "/v1/nodes")
    if format_ in ("json", "yaml"):
        output.show(answer, format_)
        return
    headings = ["NODE", "VENDORS", "DEVICES", "MEMORY MIB", "PODS", "STATUS"]
    output.table(headings, [_node(node) for node in answer.items], empty="No node has a device.")


def _node(node: Node) -> list[object]:
    status = "Ready" if node.alive else "Silent"
    return [
        node.node,
        ",".join(node.vendors),
        f"{node.devices_usable}/{node.devices}",
        output.part(node.booked_mib, node.capacity_mib),
        node.allocations,
        f"{status}: {node.problem}" if node.problem else status,
    ]


@get.command()
@click.option("--node", default="", help="Only of this node.")
@click.option("--vendor", default="", help="Only of this vendor.")
@_registry
@_format
def devices(node: str, vendor: str, registry: str, format_: str) -> None:
    """Devices with what is booked on them."""
    answer = client.read(client.Devices, registry, "/v1/devices", node=node, vendor=vendor)
    if format_ in ("json", "yaml"):
        output.show(answer, format_)
        return
    headings = ["NODE", "INDEX", "TYPE", "MEMORY MIB", "CORES %", "SLOTS", "STATUS"]
    is_wide = format_ == "wide"
    if is_wide:
        headings += ["MODE", "NUMA", "UUID"]
    rows = [_device(device, is_wide=is_wide) for device in answer.items]
    output.table(headings, rows, empty="No such device.")


def _device(device: Device, *, is_wide: bool) -> list[object]:
    status = "Healthy" if device.healthy else f"Unhealthy: {device.health_reason}"
    if device.cordoned:
        status += ", cordoned"
    if device.exclusive:
        status += ", held whole"
    row: list[object] = [
        device.node,
        device.index,
        device.type,
        output.part(device.booked_mib, device.capacity_mib),
        output.part(device.booked_core_pct, device.capacity_core_pct),
        f"{device.booked_slots}/{device.slots}",
        status,
    ]
    if is_wide:
        row += [device.mode, "-" if device.numa is None else device.numa, device.uuid]
    return row


@get.command()
@click.option("-n", "--namespace", default="", help="Only of this namespace.")
@click.option("--released", is_flag=True, help="Those that ended, too.")
@_registry
@_format
def allocations(namespace: str, released: bool, registry: str, format_: str) -> None:  # noqa: FBT001 - click passes flags so
    """Who holds what."""
    answer = client.read(
        client.Allocations,
        registry,
        "/v1/allocations",
        namespace=namespace,
        released="true" if released else "",
    )
    if format_ in ("json", "yaml"):
        output.show(answer, format_)
        return
    headings = ["NAMESPACE", "POD", "NODE", "STATE", "SHARES", "AGE"]
    is_wide = format_ == "wide"
    if is_wide:
        headings += ["ENFORCEMENT", "LEDGER", "ALLOCATION"]
    rows = [_allocation(one, is_wide=is_wide) for one in answer.items]
    output.table(headings, rows, empty="Nobody holds a device.")


def _allocation(one: Allocation, *, is_wide: bool) -> list[object]:
    state = f"{one.state}: {one.reason}" if one.reason else one.state
    row: list[object] = [
        one.namespace,
        one.pod,
        one.node,
        state,
        shares_text(one.containers),
        _age(_CLOCK.now_s() - one.reserved_s),
    ]
    if is_wide:
        row += [one.enforcement or "-", one.ledger_seq, one.allocation_id]
    return row


def shares_text(containers: tuple[ContainerShares, ...]) -> str:
    """``main: 1 x 3000 MiB 30 %``, several containers with commas."""
    texts = []
    for container in containers:
        kinds: dict[str, int] = {}
        for share in container.shares:
            text = f"{share.memory_mib} MiB"
            if share.exclusive:
                text += " whole"
            elif share.core_pct:
                text += f" {share.core_pct} %"
            kinds[text] = kinds.get(text, 0) + 1
        parts = " + ".join(f"{count} x {text}" for text, count in kinds.items())
        texts.append(f"{container.name}: {parts}")
    return ", ".join(texts)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


@get.command()
@_scheduler
@_format
def queues(scheduler: str, format_: str) -> None:
    """Queues with what is used under them, those above first."""
    answer = client.read(client.Queues, scheduler, "/v1/queues")
    if format_ in ("json", "yaml"):
        output.show(answer, format_)
        return
    if answer.problem:
        click.echo(f"The queues file is not in force: {answer.problem}", err=True)
    _show_queues(answer.items)


def _show_queues(items: Iterable[client.Queue | QueueRow]) -> None:
    headings = ["QUEUE", "RESOURCE", "USED", "GUARANTEED", "BORROWED", "LIMIT", "WEIGHT", "WAITING"]
    rows = [
        [
            "  " * (one.depth - 1) + one.queue,
            one.resource,
            one.used,
            one.guaranteed,
            one.borrowed,
            "-" if one.limit is None else one.limit,
            one.borrow_weight,
            one.waiting,
        ]
        for one in items
    ]
    output.table(headings, rows, empty="There are no queues.")


@get.command()
@click.option("-n", "--namespace", default="", help="Only of this namespace.")
@_scheduler
@_format
def quotas(namespace: str, scheduler: str, format_: str) -> None:
    """ResourceQuotas with what is used under them."""
    answer = client.read(client.Quotas, scheduler, "/v1/quotas")
    found = tuple(one for one in answer.items if namespace in ("", one.namespace))
    if format_ in ("json", "yaml"):
        output.show(client.Quotas(items=found), format_)
        return
    _show_quotas(found)


def _show_quotas(items: Iterable[client.Quota | QuotaRow]) -> None:
    headings = ["NAMESPACE", "QUOTA", "KEY", "USED", "LIMIT"]
    rows = [
        [one.namespace, one.quota, one.key, one.used, one.problem or one.limit] for one in items
    ]
    output.table(headings, rows, empty="No ResourceQuota limits a device.")


@main.group()
def explain() -> None:
    """Say why something is as it is."""


@explain.command()
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
        click.echo(f"  {when} {decision.verb}: {decision.verdict}, {feasible}")
        for refusal in decision.refusals:
            click.echo(f"    {refusal.count} nodes: {refusal.text}")


@main.command()
@_scheduler
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def snapshot(scheduler: str, file: Path) -> None:
    """Save what a scheduler knows, for ``simulate``."""
    body = client.fetch(scheduler, "/v1/snapshot")
    file.write_bytes(body)
    click.echo(f"{file}: {len(body)} bytes")


_snapshot_file = click.option(
    "--snapshot",
    "snapshot_file",
    type=click.Path(path_type=Path),
    required=True,
    help="From ``hamictl snapshot``.",
)


@main.command(name="simulate")
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
def simulate_(  # noqa: PLR0917 - click passes them by name
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
        _show_quotas(result.quotas)
    if result.queues:
        click.echo()
        _show_queues(result.queues)


@main.command(name="defrag")
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
def defrag_(  # noqa: PLR0917 - click passes them by name
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


@main.command(name="replay")
@click.argument("log", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--skip-gaps", is_flag=True, help="Go on after a gap, from the next snapshot.")
@_format
def replay_(
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


main.add_command(installation.bootstrap_command)
for _command in operating.COMMANDS:
    main.add_command(_command)
main.add_command(migration.import_command)
main.add_command(moving.migrate_command)
