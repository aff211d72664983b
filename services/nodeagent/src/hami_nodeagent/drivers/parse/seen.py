# SPDX-License-Identifier: Apache-2.0
"""Devices in one answer of a vendor's tool, before the driver makes facts of them.

``None`` and empty text mean: not reported. Memory in MiB (converted where the tool's text is read),
compute in percent of one device, power in watts. ``place`` is the device's name in the tool's
tables (a bus address or a number): it joins answers of one read and is never an identity.
"""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from hami_common.model.device import Profile
from hami_nodeagent.drivers.protocol import ProcessUsage
from hami_nodeagent.drivers.rules import Neighbour


class Condition(StrEnum):
    """Health of a device as the tool reports it."""

    GOOD = "good"
    DOUBTFUL = "doubtful"
    """The device gave no proper answer, or reported a condition that may be temporary."""
    BAD = "bad"
    """The vendor's tool itself condemns it."""


class Seen(Struct, frozen=True, kw_only=True):
    """One device in one answer."""

    place: str
    index: int
    uuid: str = ""
    type: str = ""
    memory_mib: int | None = None
    minor: int | None = None
    bus_id: str = ""
    numa: int | None = None
    mode: str = ""
    partitions: tuple[Profile, ...] = ()
    resources: dict[str, int] = {}
    max_shares: int = 0
    attributes: dict[str, str] = {}
    condition: Condition = Condition.GOOD
    reason: str = ""
    """Reason for a condition that is not good, in the vendor's words."""
    used_mib: int | None = None
    core_pct: int | None = None
    memory_bus_pct: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    processes: tuple[ProcessUsage, ...] | None = None


class Sight(Struct, frozen=True, kw_only=True):
    """Result of one read of all devices of a vendor."""

    devices: tuple[Seen, ...]
    views: Mapping[tuple[str, str], Neighbour] = {}
    """Links between devices, by pairs of places."""
    driver_version: str = ""
    problems: tuple[str, ...] = ()
