# SPDX-License-Identifier: Apache-2.0
"""The commands that show what there is: get, snapshot. They ask, and decide nothing."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hami_common.model.placement import ContainerShares
from hami_common.runtime.clock import SystemClock
from hamictl import client, output
from hamictl.client import Allocation, Device, Node, QuarantinedObject
from hamictl.options import format_option as _format
from hamictl.options import registry_option as _registry
from hamictl.options import scheduler_option as _scheduler

if TYPE_CHECKING:
    from hami_core.quota.accounts import QueueRow, QuotaRow

_CLOCK = SystemClock()


@click.group(name="get")
def get_command() -> None:
    """List nodes, devices, allocations, quarantined objects, queues or quotas."""


@get_command.command()
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


@get_command.command()
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


@get_command.command()
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


@get_command.command()
@click.option("-n", "--namespace", default="", help="Only show this namespace.")
@_registry
@_format
def quarantine(namespace: str, registry: str, format_: str) -> None:
    """List objects that a service cannot handle and retries."""
    answer = client.read(client.QuarantinedObjects, registry, "/v1/quarantine", namespace=namespace)
    if format_ in ("json", "yaml"):
        output.show(answer, format_)
        return
    headings = ["SERVICE", "REPLICA", "KIND", "OBJECT", "FAILURES", "AGE", "PROBLEM"]
    is_wide = format_ == "wide"
    if is_wide:
        headings += ["LAST", "KEY"]
    rows = [_quarantined(one, is_wide=is_wide) for one in answer.items]
    output.table(headings, rows, empty="Nothing is in quarantine.")


def _quarantined(one: QuarantinedObject, *, is_wide: bool) -> list[object]:
    name = f"{one.namespace}/{one.name}" if one.namespace else one.name
    now_s = _CLOCK.now_s()
    row: list[object] = [
        one.service,
        one.replica,
        one.kind,
        name or one.key,
        one.failures,
        _age(now_s - one.first_s),
        one.problem,
    ]
    if is_wide:
        row += [_age(now_s - one.last_s), one.key]
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


@get_command.command()
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
    show_queues(answer.items)


def show_queues(items: "Iterable[client.Queue | QueueRow]") -> None:
    """Queues as a table."""
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


@get_command.command()
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
    show_quotas(found)


def show_quotas(items: "Iterable[client.Quota | QuotaRow]") -> None:
    """Quotas of namespaces as a table."""
    headings = ["NAMESPACE", "QUOTA", "KEY", "USED", "LIMIT"]
    rows = [
        [one.namespace, one.quota, one.key, one.used, one.problem or one.limit] for one in items
    ]
    output.table(headings, rows, empty="No ResourceQuota limits a device.")


@click.command(name="snapshot")
@_scheduler
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def snapshot_command(scheduler: str, file: Path) -> None:
    """Save what a scheduler knows, for ``simulate``."""
    body = client.fetch(scheduler, "/v1/snapshot")
    file.write_bytes(body)
    click.echo(f"{file}: {len(body)} bytes")
