# SPDX-License-Identifier: Apache-2.0
"""``hamictl top``: shows the current use of nodes, devices and pods beside their bookings."""

import click
import msgspec
from msgspec import Struct

from hamictl import client, options, output


class TopNode(Struct, frozen=True, kw_only=True):
    """A node's use."""

    node: str
    capacity_mib: int
    booked_mib: int
    used_mib: int
    shares: int
    not_enforced: int = msgspec.field(name="unheld")
    """Shares that nothing limits."""
    answered: bool


class TopDevice(Struct, frozen=True, kw_only=True):
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
    not_enforced: int = msgspec.field(name="unheld")
    """Shares that nothing limits."""


class TopNodes(Struct, frozen=True, kw_only=True):
    """All nodes."""

    items: tuple[TopNode, ...]


class TopDevices(Struct, frozen=True, kw_only=True):
    """All devices."""

    items: tuple[TopDevice, ...]


@click.group()
def top() -> None:
    """Show current use of nodes, devices or pods."""


@top.command()
@options.registry_option
@options.format_option
def nodes(registry: str, format_: str) -> None:
    """Show memory used and booked by node."""
    usage = _usage(registry)
    shares = {one.node: one.shares for one in usage.items}
    rows = [
        TopNode(
            node=node.node,
            capacity_mib=node.capacity_mib,
            booked_mib=node.booked_mib,
            used_mib=sum(one.used_mib for one in shares.get(node.node, ())),
            shares=len(shares.get(node.node, ())),
            not_enforced=sum(map(_is_not_enforced, shares.get(node.node, ()))),
            answered=node.node in shares,
        )
        for node in client.read(client.Nodes, registry, "/v1/nodes").items
    ]
    if output.structured(TopNodes(items=tuple(rows)), format_):
        return
    output.table(
        ["NODE", "USED MIB", "BOOKED MIB", "CAPACITY MIB", "SHARES", "NOT ENFORCED"],
        [
            [
                one.node,
                output.part(one.used_mib, one.booked_mib) if one.answered else "?",
                one.booked_mib,
                one.capacity_mib,
                one.shares,
                one.not_enforced or "-",
            ]
            for one in rows
        ],
        empty="No devices found.",
    )


@top.command()
@options.only_node_option
@options.registry_option
@options.format_option
def devices(node: str, registry: str, format_: str) -> None:
    """Show memory and compute used and booked by device."""
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
                not_enforced=sum(map(_is_not_enforced, shares)),
            )
        )
    if output.structured(TopDevices(items=tuple(rows)), format_):
        return
    headings = ["NODE", "INDEX", "TYPE", "USED MIB", "BOOKED MIB", "CAPACITY MIB", "CORES %"]
    headings += ["SHARES", "NOT ENFORCED"] + (["UUID"] if format_ == "wide" else [])
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
                one.not_enforced or "-",
                *([one.uuid] if format_ == "wide" else []),
            ]
            for one in rows
        ],
        empty="No devices found.",
    )


@top.command()
@options.only_namespace_option
@options.only_node_option
@options.registry_option
@options.format_option
def pods(namespace: str, node: str, registry: str, format_: str) -> None:
    """Show memory and compute used of each container's share."""
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
    if output.structured(kept, format_):
        return
    headings = ["NAMESPACE", "POD", "CONTAINER", "NODE", "MEMORY MIB", "CORES %", "ENFORCED"]
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
                _enforcement(share),
                *([share.uuid] if format_ == "wide" else []),
            ]
            for one in kept.items
            for share in one.shares
        ],
        empty="No shares found.",
    )


def _usage(registry: str, node: str = "") -> client.Usage:
    answer = client.read(client.Usage, registry, "/v1/usage", node=node)
    for silent in answer.silent:
        click.echo(f"The agent of node {silent} does not answer.", err=True)
    return answer


def _is_not_enforced(share: client.ShareUse) -> bool:
    return not share.is_held and not share.is_whole


def _enforcement(share: client.ShareUse) -> str:
    if share.is_whole:
        return "whole device"
    if not share.is_held:
        return "NO: nothing limits it"
    return "yes, over a lowered limit" if share.is_over else "yes"
