# SPDX-License-Identifier: Apache-2.0
"""Inventory messages.

Agents publish reports, heartbeats and faults; the registry publishes canonical devices.

Order between messages of one agent is the pair (``boot_id``, ``seq``): ``boot_id`` sorts by the
agent's start time and ``seq`` grows within one run. Times are Unix seconds of the writer's clock
and are informative: no component compares the clocks of two machines.
"""

from typing import Annotated

from msgspec import Meta, Struct

from hami_common.bounds import (
    DEVICES_MOST,
    LINKS_MOST,
    REPORTED_MOST,
    VENDORS_MOST,
    BootId,
    DeviceId,
    MemoryMib,
    Name,
    Sequence,
    Text,
    UnixS,
    Vendor,
    Word,
)
from hami_common.model.device import Device, DeviceFacts, Link


class NodeReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Raw facts of one vendor's devices on one node.

    Subject ``hami.v1.report.<node>.<vendor>``, published on change.
    """

    node: Name
    vendor: Vendor
    boot_id: BootId
    seq: Sequence
    time_s: UnixS
    devices: Annotated[tuple[DeviceFacts, ...], Meta(max_length=REPORTED_MOST)] = ()
    links: Annotated[tuple[Link, ...], Meta(max_length=LINKS_MOST)] = ()
    driver_version: Word = ""
    agent_version: Word = ""
    host_memory_mib: MemoryMib = 0
    """Memory of the node, which has to hold what is overcommitted on its devices; 0: unknown."""
    problem: Text = ""
    """Reason for which the vendor's devices cannot be listed, empty when they can.

    For example: driver missing, version mismatch.
    """


class NodeDevices(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Canonical devices of one vendor on one node.

    Value of bucket ``hami_devices``, key ``<node>.<vendor>``; the registry is the only writer.
    """

    node: Name
    vendor: Vendor
    boot_id: BootId
    seq: Sequence
    """Order of the report this was made from."""
    time_s: UnixS
    config_generation: Sequence
    """Generation of the applied device configuration; grows with each accepted change."""
    devices: Annotated[tuple[Device, ...], Meta(max_length=DEVICES_MOST)] = ()
    links: Annotated[tuple[Link, ...], Meta(max_length=LINKS_MOST)] = ()
    driver_version: Word = ""
    problem: Text = ""


class Heartbeat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent is alive and serves these vendors.

    Subject ``hami.v1.heartbeat.<node>``, every 5 s, not stored.
    """

    node: Name
    boot_id: BootId
    seq: Sequence
    time_s: UnixS
    vendors: Annotated[tuple[Vendor, ...], Meta(max_length=VENDORS_MOST)] = ()
    """Vendors whose devices kubelet can give to containers now."""
    unserved: Annotated[tuple[Vendor, ...], Meta(max_length=VENDORS_MOST)] = ()
    """Vendors this agent is responsible for and cannot serve now: their plugin is not registered
    with kubelet, which would reject a pod that asks for them."""
    version: Word = ""
    """Of the agent; empty: an agent that does not state it."""


class DeviceFault(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device became unusable, or usable again.

    Subject ``hami.v1.fault.<node>``, sent at once, not stored: the next report repeats it.
    """

    node: Name
    vendor: Vendor
    uuid: DeviceId
    boot_id: BootId
    seq: Sequence
    time_s: UnixS
    healthy: bool
    reason: Text = ""
