# SPDX-License-Identifier: Apache-2.0
"""``hamictl get regions``, and the tables of ``--region``: what the registry of a hub shows.

The Structs declare the fields that are printed. Memory in MiB, times in seconds.
"""

from typing import Final

import click
import msgspec

from hamictl import client, options, output

ALL: Final = "all"
region_option = click.option(
    "--region", default="", help="Of a hub: only show this region, or all regions."
)


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One region with its totals and freshness."""

    region: str
    stale: bool
    age_s: float | None
    lag: int
    events: int
    nodes: int
    devices: int
    devices_usable: int
    memory_mib: int
    capacity_mib: int
    booked_mib: int
    allocations: int


class Regions(msgspec.Struct, frozen=True):
    """Response of ``/v1/regions``."""

    items: tuple[Region, ...]


class RegionNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a region."""

    region: str
    node: str
    devices: int
    devices_usable: int
    memory_mib: int
    capacity_mib: int
    booked_mib: int
    allocations: int


class RegionNodes(msgspec.Struct, frozen=True):
    """Response of ``/v1/regions/nodes``."""

    items: tuple[RegionNode, ...]


class RegionAllocation(msgspec.Struct, frozen=True):
    """One allocation of a region."""

    region: str
    allocation: client.Allocation


class RegionAllocations(msgspec.Struct, frozen=True):
    """Response of ``/v1/regions/allocations``."""

    items: tuple[RegionAllocation, ...]


@click.command()
@options.registry_option
@options.format_option
def regions(registry: str, format_: str) -> None:
    """List a hub's regions with their totals and freshness."""
    answer = client.read(Regions, registry, "/v1/regions")
    if output.structured(answer, format_):
        return
    rows = [
        [
            one.region,
            one.nodes,
            f"{one.devices_usable}/{one.devices}",
            output.part(one.booked_mib, one.capacity_mib),
            one.allocations,
            one.lag,
            _freshness(one),
        ]
        for one in answer.items
    ]
    headings = ["REGION", "NODES", "DEVICES", "MEMORY MIB", "PODS", "LAG", "STATUS"]
    output.table(headings, rows, empty="No regions: this registry is not that of a hub.")


def _freshness(one: Region) -> str:
    if not one.stale:
        return "Fresh"
    return "Stale" if one.age_s is None else f"Stale: {output.age(one.age_s)}"


def show_nodes(region: str, registry: str, format_: str) -> None:
    """Print the nodes of a region, or of all."""
    answer = client.read(RegionNodes, registry, "/v1/regions/nodes", region=_name(region))
    if output.structured(answer, format_):
        return
    rows = [
        [
            one.region,
            one.node,
            f"{one.devices_usable}/{one.devices}",
            output.part(one.booked_mib, one.capacity_mib),
            one.allocations,
        ]
        for one in answer.items
    ]
    output.table(["REGION", "NODE", "DEVICES", "MEMORY MIB", "PODS"], rows, empty="No nodes found.")


def show_allocations(region: str, namespace: str, registry: str, format_: str) -> None:
    """Print the allocations of a region, or of all."""
    answer = client.read(
        RegionAllocations,
        registry,
        "/v1/regions/allocations",
        region=_name(region),
        namespace=namespace,
    )
    if output.structured(answer, format_):
        return
    rows = [
        [
            one.region,
            one.allocation.namespace,
            one.allocation.holder,
            one.allocation.node,
            one.allocation.state,
            output.shares(one.allocation.containers),
        ]
        for one in answer.items
    ]
    headings = ["REGION", "NAMESPACE", "POD", "NODE", "STATE", "SHARES"]
    output.table(headings, rows, empty="No allocations found.")


def _name(region: str) -> str:
    return "" if region == ALL else region
