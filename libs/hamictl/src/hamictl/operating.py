# SPDX-License-Identifier: Apache-2.0
"""The commands of daily operation: look, follow, diagnose, and the few that change something."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import click
import msgspec

from hami_common.apipath import api_path
from hami_common.bounds import INT64_MAX
from hami_common.errors import Denied, HamiError, SettingsInvalid, Unavailable
from hami_common.events.asking import Finding
from hami_common.ports import KubeApi
from hami_common.runtime.clock import SystemClock
from hami_common.units import whole
from hamictl import bundle, bus, client, cordon, doctor, kube, output, story
from hamictl.errors import EXIT_NO, Absent, InputRefused, Refused, Unreachable
from hamictl.options import format_option, namespace_option, registry_option, scheduler_option

_CLOCK = SystemClock()
SYSTEM = "hami-system"


def progress(text: str) -> None:
    """Tell a person at a terminal what is being done; nobody else."""
    if sys.stderr.isatty():
        click.echo(text, err=True)


# --- top -----------------------------------------------------------------------------------------


@click.group(name="top")
def top_command() -> None:
    """What is used of what was given, now; shares that nothing holds are marked."""


class TopNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node's use."""

    node: str
    capacity_mib: int
    booked_mib: int
    used_mib: int
    shares: int
    unheld: int
    answered: bool


class TopDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device's use."""

    node: str
    index: int
    type: str
    uuid: str
    capacity_mib: int
    booked_mib: int
    used_mib: int
    booked_core_pct: int
    used_core_pct: int
    shares: int
    unheld: int


class TopNodes(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes."""

    items: tuple[TopNode, ...]


class TopDevices(msgspec.Struct, frozen=True, kw_only=True):
    """All devices."""

    items: tuple[TopDevice, ...]


def _is_unheld(share: client.ShareUse) -> bool:
    return not share.is_held and not share.is_whole


def _usage(registry: str, node: str = "") -> client.Usage:
    answer = client.read(client.Usage, registry, "/v1/usage", node=node)
    for silent in answer.silent:
        click.echo(f"The agent of node {silent} does not answer.", err=True)
    return answer


@top_command.command(name="nodes")
@registry_option
@format_option
def top_nodes(registry: str, format_: str) -> None:
    """Memory used and booked, by node."""
    usage = _usage(registry)
    shares = {one.node: one.shares for one in usage.items}
    rows = [
        TopNode(
            node=node.node,
            capacity_mib=node.capacity_mib,
            booked_mib=node.booked_mib,
            used_mib=sum(one.used_mib for one in shares.get(node.node, ())),
            shares=len(shares.get(node.node, ())),
            unheld=sum(_is_unheld(one) for one in shares.get(node.node, ())),
            answered=node.node in shares,
        )
        for node in client.read(client.Nodes, registry, "/v1/nodes").items
    ]
    if format_ in ("json", "yaml"):
        output.show(TopNodes(items=tuple(rows)), format_)
        return
    output.table(
        ["NODE", "USED MIB", "BOOKED MIB", "CAPACITY MIB", "SHARES", "UNHELD"],
        [
            [
                one.node,
                output.part(one.used_mib, one.booked_mib) if one.answered else "?",
                one.booked_mib,
                one.capacity_mib,
                one.shares,
                one.unheld or "-",
            ]
            for one in rows
        ],
        empty="No node has a device.",
    )


@top_command.command(name="devices")
@click.option("--node", default="", help="Only of this node.")
@registry_option
@format_option
def top_devices(node: str, registry: str, format_: str) -> None:
    """Memory and compute used and booked, by device."""
    usage = _usage(registry, node)
    by_device: dict[tuple[str, str], list[client.ShareUse]] = {}
    for one in usage.items:
        for share in one.shares:
            by_device.setdefault((one.node, share.uuid), []).append(share)
    rows = []
    for device in client.read(client.Devices, registry, "/v1/devices", node=node).items:
        shares = by_device.get((device.node, device.uuid), [])
        rows.append(
            TopDevice(
                node=device.node,
                index=device.index,
                type=device.type,
                uuid=device.uuid,
                capacity_mib=device.capacity_mib,
                booked_mib=device.booked_mib,
                used_mib=sum(share.used_mib for share in shares),
                booked_core_pct=device.booked_core_pct,
                used_core_pct=sum(share.used_core_pct for share in shares),
                shares=len(shares),
                unheld=sum(_is_unheld(share) for share in shares),
            )
        )
    if format_ in ("json", "yaml"):
        output.show(TopDevices(items=tuple(rows)), format_)
        return
    headings = ["NODE", "INDEX", "TYPE", "USED MIB", "BOOKED MIB", "CAPACITY MIB", "CORES %"]
    headings += ["SHARES", "UNHELD"] + (["UUID"] if format_ == "wide" else [])
    output.table(
        headings,
        [
            [
                one.node,
                one.index,
                one.type,
                output.part(one.used_mib, one.booked_mib),
                one.booked_mib,
                one.capacity_mib,
                f"{one.used_core_pct}/{one.booked_core_pct}",
                one.shares,
                one.unheld or "-",
                *([one.uuid] if format_ == "wide" else []),
            ]
            for one in rows
        ],
        empty="No such device.",
    )


@top_command.command(name="pods")
@click.option("-n", "--namespace", default="", help="Only of this namespace.")
@click.option("--node", default="", help="Only of this node.")
@registry_option
@format_option
def top_pods(namespace: str, node: str, registry: str, format_: str) -> None:
    """Memory and compute used of each container's share."""
    usage = _usage(registry, node)
    kept = msgspec.structs.replace(
        usage,
        items=tuple(
            msgspec.structs.replace(
                one,
                shares=tuple(s for s in one.shares if namespace in ("", s.namespace)),
            )
            for one in usage.items
        ),
    )
    if format_ in ("json", "yaml"):
        output.show(kept, format_)
        return
    headings = ["NAMESPACE", "POD", "CONTAINER", "NODE", "MEMORY MIB", "CORES %", "HELD"]
    headings += ["DEVICE"] if format_ == "wide" else []
    output.table(
        headings,
        [
            [
                share.namespace,
                share.pod,
                share.container,
                one.node,
                output.part(share.used_mib, share.memory_mib),
                f"{share.used_core_pct}/{share.core_pct or '-'}",
                _held(share),
                *([share.uuid] if format_ == "wide" else []),
            ]
            for one in kept.items
            for share in one.shares
        ],
        empty="Nobody holds a device.",
    )


def _held(share: client.ShareUse) -> str:
    if share.is_whole:
        return "whole device"
    if not share.is_held:
        return "NO: nothing limits it"
    return "yes, over a lowered limit" if share.is_over else "yes"


# --- events and trace ----------------------------------------------------------------------------


@click.command(name="events")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(bus.KINDS), help="Several times.")
@click.option("--node", default="", help="Only of this node.")
@click.option("--pod", default="", help="Only of this pod: NAME, or NAMESPACE/NAME.")
@click.option("-n", "--namespace", default="", help="Only of this namespace.")
@click.option(
    "-f", "--follow", is_flag=True, help="Go on for ever, from now unless told otherwise."
)
@click.option("--from", "start", default=0, type=click.IntRange(0), help="From this sequence on.")
@click.option(
    "--position",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File that remembers how far was read: the next call goes on there.",
)
@bus.nats_option
@bus.creds_option
@bus.ca_option
@format_option
def events_command(  # noqa: PLR0917 - click passes them by name
    kinds: tuple[str, ...],
    node: str,
    pod: str,
    namespace: str,
    follow: bool,  # noqa: FBT001 - click passes flags so
    start: int,
    position: Path | None,
    format_: str,
    **login: str,
) -> None:
    """Show the integration stream: allocations, states, decisions, breaches, …, in order."""
    if "/" in pod:
        namespace, _, pod = pod.partition("/")
    wanted = bus.Wanted(
        kinds=frozenset(kinds) or frozenset(bus.KINDS), node=node, namespace=namespace, pod=pod
    )
    start = start or _position(position)

    async def run() -> None:
        async with bus.open_bus(**login) as opened:
            async for event in bus.read_events(opened, wanted, start=start, follow=follow):
                _show_event(event, format_)
                if position is not None:
                    await anyio.Path(position).write_text(f"{event.sequence + 1}\n")

    with suppress(KeyboardInterrupt):
        _on_bus(run)


def _position(file: Path | None) -> int:
    if file is None or not file.exists():
        return 0
    text = file.read_text(encoding="utf-8").strip()
    position = whole(text, most=INT64_MAX)
    if position is None:
        message = f"{file}: {text[:40]!r} is no position; remove the file to begin anew"
        raise InputRefused(message)
    return position


def _on_bus(run: Any) -> None:  # noqa: ANN401 - an async function
    try:
        anyio.run(run)
    except (Unavailable, Denied) as error:
        raise Unreachable(str(error)) from error
    except SettingsInvalid as error:
        raise InputRefused(str(error)) from error


def _show_event(event: bus.Event, format_: str) -> None:
    if format_ == "json":
        click.echo(json.dumps(msgspec.to_builtins(event)))
        return
    if format_ == "yaml":
        click.echo("---")
        output.show(event, format_)
        return
    who = f"{event.namespace}/{event.pod}" if event.pod else "-"
    text = f"{_when(event.time_s)}  {event.kind:<10}  {who}  {event.node or '-'}"
    text += f"  {bus.summary(event)}"
    click.echo(f"{event.sequence:>8}  {text}" if format_ == "wide" else text)


def _when(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s)) + f".{int(time_s % 1 * 1000):03d}"


@click.command(name="trace")
@click.argument("name")
@namespace_option
@bus.nats_option
@bus.creds_option
@bus.ca_option
@registry_option
@kube.option
@format_option
def trace_command(
    name: str,
    namespace: str,
    registry: str,
    kubeconfig: str,
    format_: str,
    **login: str,
) -> None:
    """Tell the whole story of a pod, from admission to start, with times and causes."""
    missing: list[str] = []
    pod: dict[str, Any] | None = None
    kube_events: list[dict[str, Any]] = []
    explanation: client.Explanation | None = None
    events: list[bus.Event] = []
    progress("asking the Kubernetes API")
    try:
        pod, kube_events = kube.with_kube(
            kubeconfig, lambda api: _pod_and_events(api, namespace, name)
        )
    except (Absent, Refused, Unreachable, InputRefused) as error:
        missing.append(f"Kubernetes: {error.message}")
    progress("asking the registry")
    try:
        explanation = client.read(client.Explanation, registry, f"/v1/explain/{namespace}/{name}")
    except (Absent, Refused, Unreachable) as error:
        missing.append(f"registry: {error.message}")
    progress("reading the integration stream")

    async def read() -> None:
        wanted = bus.Wanted(
            kinds=frozenset({"admission", "decision", "allocation", "state", "breach"}),
            namespace=namespace,
            pod=name,
        )
        async with bus.open_bus(**login) as opened:
            async for event in bus.read_events(opened, wanted, start=0, follow=False):
                events.append(event)  # noqa: PERF401 - asynchronous

    try:
        _on_bus(read)
    except (Unreachable, InputRefused) as error:
        missing.append(f"integration stream: {error.message}")
    told = story.story_of(
        namespace,
        name,
        explanation=explanation,
        events=events,
        pod=pod,
        kube_events=kube_events,
        missing=missing,
    )
    if not told.lines:
        text = f"nothing is known of pod {namespace}/{name}; " + "; ".join(missing)
        raise Absent(text) if explanation is None and pod is None else Unreachable(text)
    if format_ in ("json", "yaml"):
        output.show(told, format_)
        return
    _show_story(told)


async def _pod_and_events(
    api: KubeApi, namespace: str, name: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    base = api_path("api", "v1", "namespaces", namespace)
    pod = msgspec.json.decode(await api.get(base + api_path("pods", name)), type=dict[str, Any])
    pages = await api.list_pages(f"{base}/events", field_selector=f"involvedObject.name={name}")
    uid = pod["metadata"].get("uid")
    found = [item for page in pages for item in msgspec.json.decode(page).get("items") or []]
    return pod, [one for one in found if one.get("involvedObject", {}).get("uid") in (None, uid)]


def _show_story(told: story.Story) -> None:
    click.echo(f"Pod {told.namespace}/{told.pod}" + (f", uid {told.uid}" if told.uid else ""))
    if told.trace_id:
        click.echo(f"Trace {told.trace_id}")
    first_s = told.lines[0].time_s
    for line in told.lines:
        cause = f": {line.cause}" if line.cause else ""
        when, after = _when(line.time_s), f"+{line.time_s - first_s:.3f}s"
        if line.to_the_second:
            when, after = when.partition(".")[0] + "    ", ""
        click.echo(f"{when} {after:>10}  {line.who}: {line.what}{cause}")
        for detail in line.details:
            click.echo(f"{'':24}{detail}")
    for text in told.missing:
        click.echo(f"Not asked: {text}", err=True)


# --- cordon --------------------------------------------------------------------------------------


@click.group(name="cordon")
def cordon_command() -> None:
    """Give no more shares of something."""


@click.group(name="uncordon")
def uncordon_command() -> None:
    """Give shares of it again."""


@cordon_command.command(name="device")
@click.argument("uuid")
@click.option("--reason", default="", help="Why, for others.")
@click.option("--node", default="", help="Where the device is; the registry is asked otherwise.")
@registry_option
@kube.option
@format_option
def cordon_device(  # noqa: PLR0917 - click passes them by name
    uuid: str, reason: str, node: str, registry: str, kubeconfig: str, format_: str
) -> None:
    """New pods avoid the device at once; those that run stay."""
    _set_cordon(
        uuid,
        cordoned=True,
        reason=cordon.check_reason(reason),
        node=node,
        registry=registry,
        kubeconfig=kubeconfig,
        format_=format_,
    )


@uncordon_command.command(name="device")
@click.argument("uuid")
@click.option("--node", default="", help="Where the device is; the registry is asked otherwise.")
@registry_option
@kube.option
@format_option
def uncordon_device(uuid: str, node: str, registry: str, kubeconfig: str, format_: str) -> None:
    """New pods may have the device again."""
    _set_cordon(
        uuid,
        cordoned=False,
        reason="",
        node=node,
        registry=registry,
        kubeconfig=kubeconfig,
        format_=format_,
    )


def _set_cordon(
    uuid: str,
    *,
    cordoned: bool,
    reason: str,
    node: str,
    registry: str,
    kubeconfig: str,
    format_: str,
) -> None:
    node = node or _node_of(uuid, registry)
    done = kube.with_kube(
        kubeconfig,
        lambda api: cordon.set_cordon(
            api, node=node, uuid=uuid, cordoned=cordoned, reason=reason, now_s=_CLOCK.now_s()
        ),
    )
    if format_ in ("json", "yaml"):
        output.show(done, format_)
        return
    word = "cordoned" if done.cordoned else "uncordoned"
    already = "" if done.changed else " already"
    click.echo(f"{uuid} on {node} is{already} {word}" + (f": {done.reason}" if done.reason else ""))


def _node_of(uuid: str, registry: str) -> str:
    answer = client.read(client.Devices, registry, "/v1/devices")
    found = sorted({device.node for device in answer.items if device.uuid == uuid})
    if not found:
        message = f"no node has device {uuid}; see hamictl get devices -o wide, or give --node"
        raise Absent(message)
    if len(found) > 1:
        message = f"several nodes have device {uuid}: give --node with one of {', '.join(found)}"
        raise InputRefused(message)
    return found[0]


# --- resize --------------------------------------------------------------------------------------


@click.command(name="resize")
@click.argument("pod")
@namespace_option
@click.option("-c", "--container", default="", help="Needed where several have shares.")
@click.option("--memory", type=click.IntRange(1), help="MiB of each of its devices.")
@click.option("--cores", type=click.IntRange(0, 100), help="Percent of each; 0: no limit.")
@click.option("--force", is_flag=True, help="Also below what is in use.")
@scheduler_option
@format_option
def resize_command(  # noqa: PLR0917 - click passes them by name
    pod: str,
    namespace: str,
    container: str,
    memory: int | None,
    cores: int | None,
    force: bool,  # noqa: FBT001 - click passes flags so
    scheduler: str,
    format_: str,
) -> None:
    """Grow or shrink the share of a running container; its processes go on."""
    if memory is None and cores is None:
        message = "give --memory, --cores or both"
        raise InputRefused(message)
    body = {
        "namespace": namespace,
        "pod": pod,
        "container": container,
        "memory_mib": memory,
        "core_pct": cores,
        "force": force,
    }
    progress("booking, and waiting for the node to take the new limits")
    done = client.send(client.Resized, scheduler, "/v1/resize", body)
    if format_ in ("json", "yaml"):
        output.show(done, format_)
        return
    rows = [
        [
            done.container.name,
            share.uuid,
            f"{was.memory_mib} -> {share.memory_mib}",
            f"{was.core_pct or '-'} -> {share.core_pct or '-'}",
        ]
        for was, share in zip(done.before.shares, done.container.shares, strict=True)
    ]
    output.table(["CONTAINER", "DEVICE", "MEMORY MIB", "CORES %"], rows, empty="")
    if not done.in_force:
        click.echo("The node has not shown the new limits yet; they are written.", err=True)


# --- doctor --------------------------------------------------------------------------------------


@click.command(name="doctor")
@click.option("--node", default="", help="Only this node's agent.")
@click.option("-n", "--namespace", default=SYSTEM, show_default=True, help="Of the installation.")
@registry_option
@scheduler_option
@kube.option
@format_option
def doctor_command(  # noqa: PLR0917 - click passes them by name
    node: str, namespace: str, registry: str, scheduler: str, kubeconfig: str, format_: str
) -> None:
    """Look for what keeps the installation from working; each fault with its fix.

    Exit code 1 when something failed; warnings alone leave it 0.
    """
    found: list[Finding] = []
    checks: doctor.Checks | None = None
    progress("asking the registry and the agents")
    try:
        checks = client.read(doctor.Checks, registry, "/v1/checks", node=node)
    except (Absent, Refused, Unreachable) as error:
        found.append(_away("registry", error.message))
    else:
        own = version("hamictl")
        found += doctor.from_agents(checks, own_version=own, now_s=_CLOCK.now_s())
    progress("asking the scheduler")
    try:
        client.fetch(scheduler, "/readyz")
    except (Absent, Refused, Unreachable) as error:
        found.append(_away("scheduler", error.message))
    else:
        found.append(Finding(check="scheduler", verdict="PASS", text="it is ready"))
    progress("asking the Kubernetes API")

    async def ask(api: KubeApi) -> list[Finding]:
        return await doctor.ClusterDoctor(
            api, namespace=namespace, now_s=_CLOCK.now_s(), agents=None if node else checks
        ).findings()

    try:
        found += kube.with_kube(kubeconfig, ask)
    except (Absent, Refused, Unreachable, InputRefused) as error:
        found.append(
            Finding(
                check="kubernetes",
                verdict="FAIL",
                text=error.message,
                fix="give --kubeconfig, or see whether the API server is up",
            )
        )
    told = doctor.diagnosis(found)
    if format_ in ("json", "yaml"):
        output.show(told, format_)
    else:
        output.table(
            ["VERDICT", "CHECK", "NODE", "FOUND", "FIX"],
            doctor.rows_of(told.findings, is_wide=format_ == "wide"),
            empty="Nothing is wrong.",
        )
        click.echo(f"{told.failed} failed, {told.warned} warnings, {told.passed} passed")
    if told.failed:
        raise SystemExit(EXIT_NO)


def _away(who: str, why: str) -> Finding:
    return Finding(
        check=who,
        verdict="FAIL",
        text=f"the {who} does not answer: {why}",
        fix=f"see the pods of hami-{who}, and kubectl port-forward with --{who}",
    )


# --- support bundle ------------------------------------------------------------------------------


@click.command(name="support-bundle")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("-n", "--namespace", default=SYSTEM, show_default=True, help="Of the installation.")
@bus.nats_option
@bus.creds_option
@bus.ca_option
@registry_option
@scheduler_option
@kube.option
def bundle_command(
    file: Path,
    namespace: str,
    registry: str,
    scheduler: str,
    kubeconfig: str,
    **login: str,
) -> None:
    """Save what helps somebody else to help, without secrets, as one .tar.gz."""
    now_s = _CLOCK.now_s()
    collected = bundle.Bundle(progress)
    collected.put("versions.json", {"hamictl": version("hamictl"), "python": sys.version})

    async def services() -> None:
        await bundle.collect_services(collected, registry=registry, scheduler=scheduler)

    async def stream() -> None:
        async with bus.open_bus(**login) as opened:
            await bundle.collect_events(collected, opened)

    anyio.run(services)
    try:
        anyio.run(stream)
    except (HamiError, OSError) as error:
        collected.problems.append(f"bus: {error}")
    try:
        kube.with_kube(
            kubeconfig,
            lambda api: bundle.collect_kubernetes(collected, api, namespace=namespace),
        )
    except (Absent, Refused, Unreachable, InputRefused) as error:
        collected.problems.append(f"kubernetes: {error.message}")
    prefix = time.strftime("hami-support-%Y%m%d-%H%M%S", time.gmtime(now_s))
    data = collected.tar(prefix=prefix, now_s=now_s)
    try:
        file.write_bytes(data)
    except OSError as error:
        message = f"{file}: {error.strerror}"
        raise InputRefused(message) from error
    click.echo(f"{file}: {len(collected.files)} files, {len(data)} bytes")
    for problem in collected.problems:
        click.echo(f"left out: {problem}", err=True)


# --- completion ----------------------------------------------------------------------------------


@click.command(name="completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the shell's completion: ``source <(hamictl completion bash)``."""
    from click.shell_completion import get_completion_class  # noqa: PLC0415 - needed here alone

    kind = get_completion_class(shell)
    root = context.find_root()
    if kind is None:
        message = f"{shell} is not supported"
        raise InputRefused(message)
    click.echo(kind(root.command, {}, "hamictl", "_HAMICTL_COMPLETE").source())


COMMANDS: Sequence[click.Command] = (
    top_command,
    events_command,
    trace_command,
    cordon_command,
    uncordon_command,
    resize_command,
    doctor_command,
    bundle_command,
    completion_command,
)
