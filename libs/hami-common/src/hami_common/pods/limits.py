# SPDX-License-Identifier: Apache-2.0
"""The limits file.

A container has it at ``/etc/hami/limits``; the in-container library and people read it.

Format ``hami-limits/1``: a first line with that word, then ``key=value`` lines in a fixed order,
UTF-8, newline line ends. Readers ignore unknown keys, so keys can be added. Devices are numbered in
the order in which the container sees them. Memory in MiB, compute in percent (0: no limit). See
docs/wire.md.
"""

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from hami_common.bounds import (
    SHARES_MOST,
    CorePct,
    DeviceId,
    Label,
    MemoryMib,
    TaskPriority,
    Uid,
    Vendor,
    Word,
)
from hami_common.errors import WireInvalid
from hami_common.model.placement import ContainerShares
from hami_common.units import INT32_MAX, shown, whole

DIRECTORY = "/etc/hami"
FILE_NAME = "limits"
REGION_DIRECTORY = "/run/hami"
REGION_FILE = f"{REGION_DIRECTORY}/region"
HEADER = "hami-limits/1"


class DeviceLimit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of one container on one device."""

    vendor: Vendor
    uuid: DeviceId
    memory_mib: MemoryMib
    core_pct: CorePct = 0
    memory_limit_mib: MemoryMib = 0
    """Upper bound of what the agent may grant beyond ``memory_mib``; 0: nothing beyond it."""
    core_limit_pct: CorePct = 0
    """Compute while no other container computes on the device; 0: by ``core_policy``."""
    exclusive: bool = False


class Limits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of a limits file."""

    container: Label
    devices: Annotated[tuple[DeviceLimit, ...], Meta(max_length=SHARES_MOST)]
    allocation_id: Uid
    priority: TaskPriority | None = None
    core_policy: Word = ""
    """Policy for compute limits: ``force``, ``disable``, or nothing for the library's default."""


def limits_of(shares: ContainerShares, *, allocation_id: str, core_policy: str = "") -> Limits:
    """Limits of one container, derived from its shares."""
    return Limits(
        core_policy="" if core_policy == "default" else core_policy,
        container=shares.name,
        allocation_id=allocation_id,
        priority=shares.priority,
        devices=tuple(
            DeviceLimit(
                vendor=s.vendor,
                uuid=s.uuid,
                memory_mib=s.memory_mib,
                core_pct=0 if s.mode else s.core_pct,
                memory_limit_mib=s.memory_limit_mib,
                core_limit_pct=0 if s.mode else s.core_limit_pct,
                exclusive=s.exclusive,
            )
            for s in shares.shares
        ),
    )


def _lines(limits: Limits) -> Iterable[str]:
    yield HEADER
    yield f"container={limits.container}"
    yield f"allocation={limits.allocation_id}"
    if limits.priority is not None:
        yield f"priority={limits.priority}"
    if limits.core_policy:
        yield f"core_policy={limits.core_policy}"
    yield f"devices={len(limits.devices)}"
    for i, device in enumerate(limits.devices):
        yield f"device.{i}.vendor={device.vendor}"
        yield f"device.{i}.uuid={device.uuid}"
        yield f"device.{i}.memory_mib={device.memory_mib}"
        yield f"device.{i}.core_pct={device.core_pct}"
        if device.memory_limit_mib:
            yield f"device.{i}.memory_limit_mib={device.memory_limit_mib}"
        if device.core_limit_pct:
            yield f"device.{i}.core_limit_pct={device.core_limit_pct}"
        yield f"device.{i}.exclusive={int(device.exclusive)}"


def encode(limits: Limits) -> str:
    """Text of the file."""
    return "".join(f"{line}\n" for line in _lines(limits))


def decode(text: str) -> Limits:
    """Limits from the text of a file; ``WireInvalid`` names the line that is wrong."""
    lines = text.splitlines()
    if not lines or lines[0] != HEADER:
        raise WireInvalid(what="limits file", problem=f"line 1 is not {HEADER!r}")
    values: dict[str, str] = {}
    for number, line in enumerate(lines[1:], start=2):
        key, separator, value = line.partition("=")
        if not separator:
            raise WireInvalid(what="limits file", problem=f"line {number} is not key=value")
        values[key] = value

    def number_of(key: str, most: int = INT32_MAX) -> int:
        text_value = values.get(key, "")
        number = whole(text_value, most=most)
        if number is None:
            raise WireInvalid(
                what="limits file",
                problem=f"{key} is {shown(text_value)}, not a whole number from 0 to {most}",
            )
        return number

    def optional(key: str) -> int:
        return number_of(key) if key in values else 0

    def text_of(key: str) -> str:
        if key not in values:
            raise WireInvalid(what="limits file", problem=f"{key} is missing")
        return values[key]

    return Limits(
        container=text_of("container"),
        allocation_id=text_of("allocation"),
        priority=number_of("priority") if "priority" in values else None,
        core_policy=values.get("core_policy", ""),
        devices=tuple(
            DeviceLimit(
                vendor=text_of(f"device.{i}.vendor"),
                uuid=text_of(f"device.{i}.uuid"),
                memory_mib=number_of(f"device.{i}.memory_mib"),
                core_pct=number_of(f"device.{i}.core_pct"),
                memory_limit_mib=optional(f"device.{i}.memory_limit_mib"),
                core_limit_pct=optional(f"device.{i}.core_limit_pct"),
                exclusive=number_of(f"device.{i}.exclusive") == 1,
            )
            for i in range(number_of("devices", SHARES_MOST))
        ),
    )
