# SPDX-License-Identifier: Apache-2.0
"""Read models of a hub: what several regions have, each with its freshness (ADR 46).

Input is a projection of each region and the state of its copies; nothing is decided here. Memory in
MiB, compute in percent of one device, times in seconds.
"""

from collections.abc import Iterable

from msgspec import Struct

from hami_common.model.placement import NOTHING
from hami_registry.core.capacity import Measured, ModelCapacity, measure, offer_of
from hami_registry.core.projection import AllocationView, Projection


class RegionView(Struct, frozen=True, kw_only=True):
    """One region with its totals and its freshness."""

    region: str
    stale: bool
    """True without contact with the region for ``region_stale_s``; the rest is as of then."""
    age_s: float | None
    """Time since the last contact with the region; ``None``: none since the hub's bus started."""
    lag: int
    """Messages that the region has and the hub does not have yet."""
    events: int
    """Events that the hub has stored."""
    nodes: int
    devices: int
    devices_usable: int
    memory_mib: int
    capacity_mib: int
    booked_mib: int
    allocations: int


class RegionNode(Struct, frozen=True, kw_only=True):
    """One node of a region with its totals."""

    region: str
    node: str
    devices: int
    devices_usable: int
    memory_mib: int
    capacity_mib: int
    booked_mib: int
    allocations: int


class RegionAllocation(Struct, frozen=True, kw_only=True):
    """One allocation of a region."""

    region: str
    allocation: AllocationView


class RegionCapacity(Struct, frozen=True, kw_only=True):
    """Capacity of one region by model."""

    region: str
    models: tuple[ModelCapacity, ...]


def nodes(region: str, projection: Projection) -> list[RegionNode]:
    """Return the nodes of a region, sorted by name."""
    return [
        RegionNode(
            region=region,
            node=one.node,
            devices=one.devices,
            devices_usable=one.devices_usable,
            memory_mib=one.memory_mib,
            capacity_mib=one.capacity_mib,
            booked_mib=one.booked_mib,
            allocations=one.allocations,
        )
        for one in projection.nodes(now_s=0.0)
    ]


def view(
    region: str,
    found: Iterable[RegionNode],
    *,
    age_s: float | None,
    stale: bool,
    lag: int,
    events: int,
) -> RegionView:
    """Return the region with the sums of its nodes."""
    rows = tuple(found)
    return RegionView(
        region=region,
        stale=stale,
        age_s=age_s,
        lag=lag,
        events=events,
        nodes=len(rows),
        devices=sum(one.devices for one in rows),
        devices_usable=sum(one.devices_usable for one in rows),
        memory_mib=sum(one.memory_mib for one in rows),
        capacity_mib=sum(one.capacity_mib for one in rows),
        booked_mib=sum(one.booked_mib for one in rows),
        allocations=sum(one.allocations for one in rows),
    )


def capacity(
    region: str, projection: Projection, *, asked: tuple[int, int] | None
) -> RegionCapacity:
    """Return what a region can still give; ``asked``: a size to count in addition."""
    holdings = projection.holdings()
    devices = []
    for published in projection.published():
        for device in published.devices:
            found = holdings.get(device.uuid)
            booked = NOTHING if found is None else found.booked
            devices.append(
                Measured(
                    node=published.node,
                    is_silent=False,
                    device=device,
                    booked=booked,
                    offer=offer_of(device, booked),
                    shares=(),
                )
            )
    return RegionCapacity(region=region, models=measure(devices, asked=asked).items)
