# SPDX-License-Identifier: Apache-2.0
"""Inventory messages.

What agents report, what the registry publishes as canonical, heartbeats and faults.

Order between messages of one agent is the pair (``boot_id``, ``seq``): ``boot_id`` sorts by the
agent's start time and ``seq`` grows within one run. Times are Unix seconds of the writer's clock
and are informative: nothing compares clocks of two machines.
"""

from msgspec import Struct

from hami_common.model.device import Device, DeviceFacts, Link


class NodeReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Raw facts of one vendor's devices on one node.

    Subject ``hami.v1.report.<node>.<vendor>``, published on change.
    """

    node: str
    vendor: str
    boot_id: str
    seq: int
    time_s: float
    devices: tuple[DeviceFacts, ...] = ()
    links: tuple[Link, ...] = ()
    driver_version: str = ""
    agent_version: str = ""
    problem: str = ""
    """Why the vendor's devices cannot be listed, empty when they can.

    For example: driver missing, version mismatch.
    """


class NodeDevices(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Canonical devices of one vendor on one node.

    Value of bucket ``hami_devices``, key ``<node>.<vendor>``; the registry is the only writer.
    """

    node: str
    vendor: str
    boot_id: str
    seq: int
    """Order of the report this was made from."""
    time_s: float
    config_generation: int
    """Which device configuration was applied; grows with each accepted change."""
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    driver_version: str = ""
    problem: str = ""


class Heartbeat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent is alive and serves these vendors.

    Subject ``hami.v1.heartbeat.<node>``, every 5 s, not stored.
    """

    node: str
    boot_id: str
    seq: int
    time_s: float
    vendors: tuple[str, ...] = ()
    """Vendors whose devices kubelet can give to containers now."""
    unserved: tuple[str, ...] = ()
    """Vendors this agent is responsible for and cannot serve now: their plugin is not registered
    with kubelet, which would reject a pod that asks for them."""


class DeviceFault(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device became unusable, or usable again.

    Subject ``hami.v1.fault.<node>``, sent at once, not stored: the next report repeats it.
    """

    node: str
    vendor: str
    uuid: str
    boot_id: str
    seq: int
    time_s: float
    healthy: bool
    reason: str = ""
