# SPDX-License-Identifier: Apache-2.0
"""Usage messages: what the containers of a node use of what they were given (design D34).

Published by the agent of the node on ``hami.v1.event.usage.<node>``, one message for the whole node
at a steady pace, so that the stream grows with nodes and not with containers. Memory in MiB,
compute in percent of one device, times in seconds; counters grow over the life of a container and
never fall.
"""

from msgspec import Struct


class ShareUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One container on one device."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    vendor: str
    uuid: str
    allocation_id: str = ""
    limit_mib: int = 0
    used_mib: int = 0
    limit_core_pct: int = 0
    """0: no compute limit."""
    core_pct: int = 0
    """What the driver saw last."""
    is_whole: bool = False
    """The share is the whole device."""


class ContainerUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One container as a whole; zeros where nothing inside it counts."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    processes: int = 0
    launches: int = 0
    """Launches of work on devices."""
    waited_s: float = 0.0
    """Time that launches waited for the compute limit or for higher priorities."""
    device_time_s: float = 0.0
    """Time on devices that its work took."""
    refusals: int = 0
    """Requests for memory that its limit refused."""


class DeviceUse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One device, all its users together, as its driver sees it."""

    vendor: str
    uuid: str
    memory_mib: int = 0
    used_mib: int = 0
    core_pct: int = 0


class UsageRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Usage on one node at one moment."""

    node: str
    boot_id: str
    seq: int
    time_s: float
    every_s: float = 0.0
    """Pace: the next message is due after this time."""
    shares: tuple[ShareUsage, ...] = ()
    containers: tuple[ContainerUsage, ...] = ()
    devices: tuple[DeviceUse, ...] = ()
