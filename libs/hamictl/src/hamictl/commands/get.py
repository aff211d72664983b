# SPDX-License-Identifier: Apache-2.0
"""``hamictl get``: lists objects of the registry and the scheduler."""

from collections.abc import Sequence

import click

from hami_common.model.quarantine import QuarantinedObject
from hami_common.runtime.clock import SystemClock
from hami_common.vendors.catalog import Catalog
from hamictl import claimviews, client, kube, options, output, quotatables
from hamictl.client import Allocation, Device, ModelCapacity, Node, Sku
from hamictl.commands import history, regions, system

_CLOCK = SystemClock()


@click.group()
def get() -> None:
    """List nodes, devices, allocations, queues and more."""


get.add_command(history.pressure)
get.add_command(history.workload)
get.add_command(regions.regions)
get.add_command(system.system)


@get.command()
@regions.region_option
@options.registry_option
@options.format_option
def nodes(region: str, registry: str, format_: str) -> None:
    """List nodes with their booked memory."""
    if region:
        regions.show_nodes(region, registry, format_)
        return
    answer = client.read(client.Nodes, registry, "/v1/nodes")
    if output.structured(answer, format_):
        return
    headings = ["NODE", "VENDORS", "DEVICES", "MEMORY MIB", "PODS", "STATUS"]
    is_wide = format_ == "wide"
    if is_wide:
        headings += ["TESTED ON HARDWARE"]
    rows = [_node(node, is_wide=is_wide) for node in answer.items]
    output.table(headings, rows, empty="No devices found.")


def _node(node: Node, *, is_wide: bool) -> list[object]:
    status = "Ready" if node.alive else "Silent"
    row: list[object] = [
        node.node,
        ",".join(node.vendors),
        f"{node.devices_usable}/{node.devices}",
        output.part(node.booked_mib, node.capacity_mib),
        node.allocations,
        f"{status}: {node.problem}" if node.problem else status,
    ]
    if is_wide:
        row += [_tested(node.vendors)]
    return row


def _tested(vendors: Sequence[str]) -> str:
    """Return the hardware that each vendor's driver was run on, in this release."""
    known = {one.name: one.capability.hardware_status for one in Catalog.from_settings().vendors}
    return "; ".join(f"{name}: {known.get(name, 'unknown')}" for name in vendors) or "-"


@get.command()
@options.only_node_option
@click.option("--vendor", default="", help="Only show this vendor.")
@options.registry_option
@options.format_option
def devices(node: str, vendor: str, registry: str, format_: str) -> None:
    """List devices with their booked memory, compute and slots."""
    answer = client.read(client.Devices, registry, "/v1/devices", node=node, vendor=vendor)
    if output.structured(answer, format_):
        return
    headings = ["NODE", "INDEX", "TYPE", "MEMORY MIB", "CORES %", "SLOTS", "STATUS"]
    is_wide = format_ == "wide"
    if is_wide:
        headings += ["MODE", "OVERCOMMIT", "ISOLATION", "NUMA", "UUID"]
    rows = [_device(device, is_wide=is_wide) for device in answer.items]
    output.table(headings, rows, empty="No devices found.")


def _device(device: Device, *, is_wide: bool) -> list[object]:
    status = "Healthy" if device.healthy else f"Unhealthy: {device.health_reason}"
    if device.cordoned:
        status += ", cordoned"
    if device.exclusive:
        status += ", exclusive"
    if device.foreign_mib:
        status += f", {device.foreign_mib} MiB used by processes outside HAMi"
    if device.burst_mib:
        status += f", {device.burst_mib} MiB used by pods beyond their requests"
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
        numa = "-" if device.numa is None else device.numa
        row += [device.mode, device.overcommit or "-", device.isolation, numa, device.uuid]
    return row


@get.command()
@options.only_namespace_option
@click.option("--released", is_flag=True, help="Also show released allocations.")
@regions.region_option
@options.registry_option
@options.format_option
def allocations(
    *, namespace: str, released: bool, region: str, registry: str, format_: str
) -> None:
    """List allocations: shares of pods and claims."""
    if region:
        if released:
            raise click.UsageError("--released is of one cluster: leave out --region")
        regions.show_allocations(region, namespace, registry, format_)
        return
    answer = client.read(
        client.Allocations,
        registry,
        "/v1/allocations",
        namespace=namespace,
        released="true" if released else "",
    )
    if output.structured(answer, format_):
        return
    headings = ["NAMESPACE", "POD", "NODE", "STATE", "SHARES", "AGE"]
    is_wide = format_ == "wide"
    if is_wide:
        headings += ["ENFORCEMENT", "SKU", "CLASS", "LEDGER", "ALLOCATION"]
    rows = [_allocation(one, is_wide=is_wide) for one in answer.items]
    output.table(headings, rows, empty="No allocations found.")


def _allocation(one: Allocation, *, is_wide: bool) -> list[object]:
    state = f"{one.state}: {one.reason}" if one.reason else one.state
    row: list[object] = [
        one.namespace,
        one.holder,
        one.node,
        state,
        output.shares(one.containers),
        output.age(_CLOCK.now_s() - one.reserved_s),
    ]
    if is_wide:
        row += [one.enforcement or "-", one.sku or "-", one.service_class or "-"]
        row += [one.ledger_seq, one.allocation_id]
    return row


@get.command()
@click.option(
    "--memory-mib", type=click.IntRange(1), help="Also count shares with this memory, in MiB."
)
@click.option(
    "--core-pct",
    type=click.IntRange(0),
    help="Compute of these shares, in percent of one device; needs --memory-mib.",
)
@click.option(
    "-n", "--namespace", default="", help="Only name this namespace; others are one amount."
)
@options.registry_option
@options.format_option
def capacity(
    memory_mib: int | None, core_pct: int | None, namespace: str, registry: str, format_: str
) -> None:
    """List each model's largest free share and stranded memory."""
    answer = client.read(
        client.Capacity,
        registry,
        "/v1/capacity",
        memory_mib="" if memory_mib is None else str(memory_mib),
        core_pct="" if core_pct is None else str(core_pct),
        namespace=namespace,
    )
    if output.structured(answer, format_):
        return
    headings = ["MODEL", "DEVICES", "FREE MIB", "LARGEST SHARE", "FITTING", "STRANDED MIB"]
    is_wide = format_ == "wide"
    if is_wide:
        headings += ["STRANDED BY", "FOREIGN MIB", "BURST MIB", "LARGEST ON"]
    rows = [_capacity(one, is_wide=is_wide) for one in answer.items]
    output.table(headings, rows, empty="No devices found.")


def _capacity(one: ModelCapacity, *, is_wide: bool) -> list[object]:
    largest = f"{one.largest_mib} MiB {one.largest_core_pct} %" if one.largest_mib else "-"
    fits = [
        f"{fit.count} x {fit.memory_mib} MiB {fit.core_pct} %"
        if fit.size == "asked"
        else f"{fit.count} x {fit.size}"
        for fit in one.fits
    ]
    row: list[object] = [
        one.model,
        f"{one.devices_offering}/{one.devices}",
        output.part(one.free_mib, one.capacity_mib),
        largest,
        ", ".join(fits),
        ", ".join(f"{part.memory_mib} {part.cause}" for part in one.stranded) or "0",
    ]
    if is_wide:
        holders = [f"{part.memory_mib} {part.namespace or 'others'}" for part in one.stranded_by]
        row += [", ".join(holders) or "-", one.foreign_mib, one.burst_mib, one.largest_on or "-"]
    return row


@get.command()
@options.only_namespace_option
@options.registry_option
@options.kubeconfig_option
@options.format_option
def claims(namespace: str, registry: str, kubeconfig: str, format_: str) -> None:
    """List ResourceClaims with their devices and state."""
    recorded = client.read(client.Allocations, registry, "/v1/allocations", namespace=namespace)
    found = kube.with_kube(kubeconfig, lambda api: claimviews.read_claims(api, namespace))
    answer = claimviews.Claims(items=tuple(claimviews.views(found, recorded.items)))
    if output.structured(answer, format_):
        return
    headings = ["NAMESPACE", "CLAIM", "PODS", "NODE", "DEVICES", "MEMORY MIB", "CORES %", "STATE"]
    rows = [
        [
            one.namespace,
            one.claim,
            ",".join(one.pods) or "-",
            one.node or "-",
            ",".join(one.devices) or "-",
            one.memory_mib,
            one.core_pct,
            f"{one.state}: {one.reason}" if one.reason else one.state,
        ]
        for one in answer.items
    ]
    output.table(headings, rows, empty="No claims found.")


@get.command()
@options.only_namespace_option
@options.registry_option
@options.format_option
def quarantine(namespace: str, registry: str, format_: str) -> None:
    """List objects that a service cannot handle and retries."""
    answer = client.read(client.QuarantinedObjects, registry, "/v1/quarantine", namespace=namespace)
    if output.structured(answer, format_):
        return
    headings = ["SERVICE", "REPLICA", "KIND", "OBJECT", "FAILURES", "AGE", "PROBLEM"]
    is_wide = format_ == "wide"
    if is_wide:
        headings += ["LAST", "KEY"]
    rows = [_quarantined(one, is_wide=is_wide) for one in answer.items]
    output.table(headings, rows, empty="No objects in quarantine.")


def _quarantined(one: QuarantinedObject, *, is_wide: bool) -> list[object]:
    name = f"{one.namespace}/{one.name}" if one.namespace else one.name
    now_s = _CLOCK.now_s()
    row: list[object] = [
        one.service,
        one.replica,
        one.kind,
        name or one.key,
        one.failures,
        output.age(now_s - one.first_s),
        one.problem,
    ]
    if is_wide:
        row += [output.age(now_s - one.last_s), one.key]
    return row


@get.command()
@options.registry_option
@options.format_option
def skus(registry: str, format_: str) -> None:
    """List SKUs with their prices, and the vendors that serve them."""
    answer = client.read(client.Skus, registry, "/v1/skus")
    if output.structured(answer, format_):
        return
    if answer.problem:
        click.echo(f"The catalog of SKUs is not in force: {answer.problem}", err=True)
    headings = ["SKU", "VERSION", "STATE", "CLASS", "DEVICES", "MEMORY MIB", "CORES %"]
    headings += [f"PRICE {answer.currency or '-'}/H", "VENDORS"]
    is_wide = format_ == "wide"
    if is_wide:
        headings += ["LIMIT MIB", "LIMIT %", "LINK", "ISOLATION", "SUCCESSOR"]
    rows = [_sku(one, is_wide=is_wide) for one in answer.items]
    output.table(headings, rows, empty="No SKUs found.")


def _sku(one: Sku, *, is_wide: bool) -> list[object]:
    row: list[object] = [
        one.name,
        one.version,
        one.state,
        one.service_class,
        one.devices,
        one.memory_mib or "whole",
        one.compute_pct or "-",
        one.price_hour or "-",
        ",".join(dict.fromkeys(alternative.vendor for alternative in one.alternatives)),
    ]
    if is_wide:
        row += [one.memory_limit_mib or "-", one.compute_limit_pct or "-"]
        row += [one.link or "-", one.min_isolation or "-", one.successor or "-"]
    return row


@get.command()
@options.only_namespace_option
@options.scheduler_option
@options.format_option
def queues(namespace: str, scheduler: str, format_: str) -> None:
    """List queues with their use, and the pods that wait.

    Parents come first. With a namespace: the queues that its pods may use, and its own pods.
    """
    answer = client.read(client.Queues, scheduler, "/v1/queues", namespace=namespace)
    if output.structured(answer, format_):
        return
    if answer.problem:
        click.echo(f"The queues file is not in force: {answer.problem}", err=True)
    quotatables.queues(answer.items)
    if answer.waiting:
        click.echo()
        quotatables.waiting(answer.waiting, now_s=_CLOCK.now_s())


@get.command()
@options.scheduler_option
@options.format_option
def policies(scheduler: str, format_: str) -> None:
    """List placement policies, and the state of the canary."""
    answer = client.read(client.Policies, scheduler, "/v1/policies")
    if output.structured(answer, format_):
        return
    if answer.problem:
        click.echo(f"The policies file is not in force: {answer.problem}", err=True)
    canary = answer.canary
    named = "" if canary is None else str(canary.definition.get("policy"))
    rows = [
        [
            one.name or "(setting)",
            one.node,
            ",".join(one.device),
            ",".join(f"{term}={weight}" for term, weight in one.weights.items()),
            "default" if one.name == answer.default.name else "canary" if one.name == named else "",
        ]
        for one in ([] if answer.default.name else [answer.default]) + list(answer.items)
    ]
    output.table(["POLICY", "NODE", "DEVICE", "WEIGHTS", "USE"], rows, empty="")
    if canary is not None:
        _show_canary(canary)


def _show_canary(canary: client.Canary) -> None:
    click.echo(f"\nCanary {canary.definition.get('policy')}: {canary.state}")
    if canary.rollback is not None:
        when = output.clock_time(canary.rollback.time_s)
        click.echo(f"  rolled back at {when}: {canary.rollback.reason}")
    verdict = canary.verdict
    if verdict is None:
        return
    rows = [
        [
            f"  {name}",
            one.pods,
            f"{one.refused_pct:g} %",
            f"{one.refusals_per_min:g}",
            f"{one.wait_p95_s:g} s",
            "-" if one.packing_pct is None else f"{one.packing_pct:.0f} %",
        ]
        for name, one in (("canary", verdict.canary), ("control", verdict.control))
    ]
    headings = ["  GROUP", "PODS", "REFUSED", "REFUSALS/MIN", "P95 WAIT", "PACKING"]
    output.table(headings, rows, empty="")
    if not verdict.is_decidable:
        click.echo("  Too few pods to evaluate the objectives.")


@get.command()
@options.only_namespace_option
@options.scheduler_option
@options.format_option
def quotas(namespace: str, scheduler: str, format_: str) -> None:
    """List ResourceQuotas that limit devices, with their use.

    With a namespace: also the amounts that quotas and queues still allow its pods.
    """
    answer = client.read(client.Quotas, scheduler, "/v1/quotas", namespace=namespace)
    if output.structured(answer, format_):
        return
    quotatables.quotas(answer.items)
    if answer.headroom:
        click.echo()
        quotatables.headroom(answer.headroom)
