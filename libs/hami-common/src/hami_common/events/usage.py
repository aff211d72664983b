# SPDX-License-Identifier: Apache-2.0
"""Usage messages: how much of their shares the containers of a node use (design D34).

Published by the agent of the node on ``hami.v1.event.usage.<node>``, one message for the whole node
at a fixed interval, so that the stream grows with nodes and not with containers. Memory in MiB,
compute in percent of one device, times in seconds; counters grow over the life of a container and
never fall.
"""

from typing import Annotated

from msgspec import Meta, Struct

from hami_common.bounds import (
    LIST_MOST,
    Amount,
    BootId,
    CorePct,
    Count,
    Counter,
    DeviceId,
    Duration,
    Label,
    MemoryMib,
    Name,
    Sequence,
    Uid,
    UnixS,
    Vendor,
)


class ShareUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One container on one device."""

    namespace: Label
    pod: Name
    pod_uid: Uid
    container: Label
    vendor: Vendor
    uuid: DeviceId
    allocation_id: Uid = ""
    limit_mib: MemoryMib = 0
    used_mib: Amount = 0
    limit_core_pct: CorePct = 0
    """0: no compute limit."""
    core_pct: Amount = 0
    """Compute use that the driver reported last."""
    starved_s: Duration = 0.0
    """Part of ``waited_s`` of the container: time for which it waited here for higher priorities
    beyond the first second; a counter.
    """
    is_whole: bool = False
    """The share is the whole device."""


class ContainerUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One container as a whole; zeros where no library inside it counts."""

    namespace: Label
    pod: Name
    pod_uid: Uid
    container: Label
    processes: Count = 0
    launches: Counter = 0
    """Launches of work on devices."""
    waited_s: Duration = 0.0
    """Time that launches waited for the compute limit or for higher priorities."""
    device_time_s: Duration = 0.0
    """Device time that its work took."""
    refusals: Counter = 0
    """Requests for memory that its limit refused."""


class DeviceUse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One device, all its users together, as its driver sees it."""

    vendor: Vendor
    uuid: DeviceId
    memory_mib: MemoryMib = 0
    used_mib: Amount = 0
    core_pct: Amount = 0


class RecallUse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Moves of a container's device memory to the host for one reason; counters."""

    namespace: Label
    pod: Name
    pod_uid: Uid
    container: Label
    for_namespace: Label = ""
    """Namespace of the container that waited for the memory. It, ``for_pod`` and the others are
    empty where no container waited: an idle container was parked by request."""
    for_pod: Name = ""
    for_pod_uid: Uid = ""
    for_container: Label = ""
    moves: Counter = 0
    moved_mib: Counter = 0


class UsageRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Usage on one node at one moment."""

    node: Name
    boot_id: BootId
    seq: Sequence
    time_s: UnixS
    every_s: Duration = 0.0
    """Interval until the next message."""
    shares: Annotated[tuple[ShareUsage, ...], Meta(max_length=LIST_MOST)] = ()
    containers: Annotated[tuple[ContainerUsage, ...], Meta(max_length=LIST_MOST)] = ()
    devices: Annotated[tuple[DeviceUse, ...], Meta(max_length=LIST_MOST)] = ()
    recalls: Annotated[tuple[RecallUse, ...], Meta(max_length=LIST_MOST)] = ()
