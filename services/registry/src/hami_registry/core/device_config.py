# SPDX-License-Identifier: Apache-2.0
"""Decides how reported devices may be used: the device configuration and its rules.

A configuration has defaults and an ordered list of rules. A rule selects devices (by node, vendor,
type, UUID, index) and sets fields; later rules win field by field. An absent field leaves the value
alone and a zero or ``false`` is a value like any other, so that a node can disable what the
defaults enable. Memory is overcommitted only where the vendor has a mechanism that keeps the excess
in the host (``Capability.memory_backed``): for others a ``memory_scaling`` above 1 of the defaults,
or of a rule that also selects other vendors, means 1. ``overcommit`` has an effect only for vendors
with ``Capability.memory_recalled``. Memory in MiB; scalings are factors of the physical size.
"""

import hashlib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from hami_common import documents
from hami_common.bounds import MEMORY_MIB_MOST, SCALING_MOST, SLOTS_MOST
from hami_common.errors import SettingsInvalid
from hami_common.events.codec import problem_of
from hami_common.model.device import MANAGED, RECALL, Device, DeviceFacts
from hami_common.vendors.catalog import Catalog, partitions_of, resources_of

MAX_SLOTS = SLOTS_MOST
MAX_SCALING = float(SCALING_MOST)
FULL_CORE_PCT = 100
SOFT = "soft"
"""Mode of devices whose shares the in-container library enforces."""
RULES_VERSION = 5
"""Incremented when the same configuration and facts yield other devices: part of the digest."""

_VENDORS = Catalog.from_settings().vendors
_BACKED = frozenset(one.name for one in _VENDORS if one.capability.memory_backed)
"""Vendors whose memory can be overcommitted."""
_RECALLED = frozenset(one.name for one in _VENDORS if one.capability.memory_recalled)
"""Vendors whose containers can be moved to the host."""
Overcommit = Literal["managed", "recall"]
_encoder = msgspec.json.Encoder(order="deterministic")


class Use(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Use of one device, with every field decided."""

    slots: int = 10
    """Maximum containers that may share the device (HAMi: deviceSplitCount)."""
    memory_scaling: float = 1.0
    """Allocatable memory as a factor of physical memory (HAMi: deviceMemoryScaling); at most 1 for
    vendors that cannot overcommit it."""
    overcommit: Overcommit = MANAGED
    """Mechanism behind a ``memory_scaling`` above 1."""
    core_scaling: float = 1.0
    """Allocatable compute as a factor of one device (HAMi: deviceCoreScaling)."""
    reserved_mib: int = 0
    """Physical memory reserved for processes outside our control."""
    ignore_foreign: bool = False
    """New shares may get memory that processes outside our control use beyond ``reserved_mib``."""
    hidden: bool = False
    """The device is not published at all."""
    cordoned: bool = False
    """The device takes no new pods."""


class Rule(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields to set on the devices that match every given selector."""

    nodes: tuple[str, ...] = ()
    """Node names or patterns with ``*`` and ``?``; empty matches all."""
    vendors: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    """Case-insensitive substrings of the device type."""
    uuids: tuple[str, ...] = ()
    indexes: tuple[int, ...] = ()
    slots: int | None = None
    memory_scaling: float | None = None
    overcommit: Overcommit | None = None
    core_scaling: float | None = None
    reserved_mib: int | None = None
    ignore_foreign: bool | None = None
    hidden: bool | None = None
    cordoned: bool | None = None

    def matches(self, node: str, facts: DeviceFacts) -> bool:
        """Return whether the rule applies to this device on this node."""
        lowered = facts.type.lower()
        return (
            (not self.nodes or any(fnmatchcase(node, pattern) for pattern in self.nodes))
            and (not self.vendors or facts.vendor in self.vendors)
            and (not self.types or any(word.lower() in lowered for word in self.types))
            and (not self.uuids or facts.uuid in self.uuids)
            and (not self.indexes or facts.index in self.indexes)
        )


class Defaults(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Values before any rule."""

    slots: int = 10
    memory_scaling: float = 1.0
    overcommit: Overcommit = MANAGED
    """Mechanism that keeps the excess in the host: ``managed`` (CUDA managed memory, page by page)
    or ``recall`` (idle containers are moved to the host as a whole; a share is at most the device).
    """
    core_scaling: float = 1.0
    reserved_mib: int = 0
    ignore_foreign: bool = False
    """Offer memory that processes outside HAMi use, see docs/fleet.md: foreign use."""


class DeviceConfig(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The whole file."""

    defaults: Defaults = Defaults()
    rules: tuple[Rule, ...] = ()
    host_memory_ratio: float = 0.5
    """Part of a node's memory that may back what its devices promise beyond their own memory."""
    allow_stranded: bool = False
    """Use the file even where running pods then use more of a device than it provides."""


def digest(config: DeviceConfig) -> str:
    """Return the digest of ``config``: equal for equal configurations under the same rules."""
    # Field by field: an encoded Struct leaves out some fields that have their default values.
    rules = [asdict(rule) for rule in config.rules]
    meaning = (RULES_VERSION, asdict(config.defaults), config.host_memory_ratio, rules)
    return hashlib.sha256(_encoder.encode(meaning)).hexdigest()[:16]


def parse(text: bytes, *, name: str) -> DeviceConfig:
    """Parse a TOML or YAML file called ``name``; the error names the field."""
    decode = documents.toml if name.endswith(".toml") else documents.yaml_one
    fix = "compare it with docs/wire.md, device configuration"
    try:
        tree = decode(text, field=name, fix=fix) if text.strip() else {}
        config = msgspec.convert(tree, DeviceConfig)
    except msgspec.ValidationError as error:
        raise SettingsInvalid(field=name, problem=problem_of(error), fix=fix) from error
    check(config, name=name)
    return config


def check(config: DeviceConfig, *, name: str) -> None:
    """Reject invalid values, with the field and the fix."""
    if not 0 <= config.host_memory_ratio <= 1:
        raise SettingsInvalid(
            field=f"{name}: host_memory_ratio",
            problem=f"{config.host_memory_ratio} is outside 0..1",
            fix="give the part of a node's memory that may hold overcommitted device memory",
        )
    parts: list[tuple[str, Defaults | Rule]] = [("defaults", config.defaults)]
    parts.extend((f"rules[{i}]", rule) for i, rule in enumerate(config.rules))
    for where, part in parts:
        if part.slots is not None and not 1 <= part.slots <= MAX_SLOTS:
            raise SettingsInvalid(
                field=f"{name}: {where}.slots",
                problem=f"{part.slots} is outside 1..{MAX_SLOTS}",
                fix="give the number of containers that may share a device; use hidden to hide it",
            )
        for field in ("memory_scaling", "core_scaling"):
            value: float | None = getattr(part, field)
            if value is not None and not 0 < value <= MAX_SCALING:
                raise SettingsInvalid(
                    field=f"{name}: {where}.{field}",
                    problem=f"{value} is outside 0..{MAX_SCALING:g}",
                    fix="give a factor such as 1.0 (no oversubscription) or 2.0",
                )
        if (
            isinstance(part, Rule)
            and (part.memory_scaling or 0) > 1
            and part.vendors
            and _BACKED.isdisjoint(part.vendors)
        ):
            raise SettingsInvalid(
                field=f"{name}: {where}.memory_scaling",
                problem=f"{part.memory_scaling} offers more memory than devices of "
                f"{', '.join(part.vendors)} have, and nothing keeps the excess in the host",
                fix=f"write 1.0 or less; only {', '.join(sorted(_BACKED))} can overcommit memory",
            )
        if (
            isinstance(part, Rule)
            and part.overcommit == RECALL
            and part.vendors
            and _RECALLED.isdisjoint(part.vendors)
        ):
            raise SettingsInvalid(
                field=f"{name}: {where}.overcommit",
                problem=f"containers with devices of {', '.join(part.vendors)} cannot be moved to "
                "the host",
                fix=f"remove it; only devices of {', '.join(sorted(_RECALLED))} support recall",
            )
        if part.reserved_mib is not None and not 0 <= part.reserved_mib <= MEMORY_MIB_MOST:
            raise SettingsInvalid(
                field=f"{name}: {where}.reserved_mib",
                problem=f"{part.reserved_mib} is outside 0..{MEMORY_MIB_MOST}",
                fix="give MiB to keep back, 0 or more",
            )


def use_of(config: DeviceConfig, node: str, facts: DeviceFacts) -> Use:
    """Return the use of ``facts``' device on ``node``."""
    d = config.defaults
    use = Use(
        slots=d.slots,
        memory_scaling=d.memory_scaling,
        overcommit=d.overcommit,
        core_scaling=d.core_scaling,
        reserved_mib=d.reserved_mib,
        ignore_foreign=d.ignore_foreign,
    )
    for rule in config.rules:
        if rule.matches(node, facts):
            changes = {
                field: value
                for field in Use.__struct_fields__
                if (value := getattr(rule, field)) is not None
            }
            use = replace(use, **changes)
    if use.memory_scaling > 1 and facts.vendor not in _BACKED:
        use = replace(use, memory_scaling=1.0)
    if facts.vendor not in _RECALLED:
        use = replace(use, overcommit=MANAGED)
    return use


def canonical_devices(
    config: DeviceConfig,
    node: str,
    facts: Iterable[DeviceFacts],
    *,
    host_memory_mib: int,
    cordoned_uuids: Collection[str] = (),
) -> tuple[list[Device], str]:
    """Return a node's devices as the scheduler may use them, and why they offer less than asked.

    What devices promise beyond their own memory has to fit into ``host_memory_ratio`` of the host's
    memory; where it does not, each device's part of it is reduced in proportion. Capacity bounds
    every allocation, so the pods of a node never hold more than both memories have.
    """
    found = [canonical_device(config, node, one, cordoned_uuids=cordoned_uuids) for one in facts]
    devices = [device for device in found if device is not None]
    beyond_mib = [max(0, device.capacity_mib - device.memory_mib) for device in devices]
    promised_mib = sum(beyond_mib)
    budget_mib = int(host_memory_mib * config.host_memory_ratio)
    if not host_memory_mib or promised_mib <= budget_mib:
        return devices, ""
    devices = [
        replace(device, capacity_mib=device.memory_mib + part * budget_mib // promised_mib)
        if part
        else device
        for device, part in zip(devices, beyond_mib, strict=True)
    ]
    return devices, (
        f"memory is overcommitted by {budget_mib} MiB, not by the configured {promised_mib} MiB: "
        f"the host has {host_memory_mib} MiB, of which host_memory_ratio allows {budget_mib} MiB"
    )


def canonical_device(
    config: DeviceConfig, node: str, facts: DeviceFacts, *, cordoned_uuids: Iterable[str] = ()
) -> Device | None:
    """Return the device as the scheduler may use it, ``None`` when it is hidden."""
    use = use_of(config, node, facts)
    if use.hidden:
        return None
    physical_mib = max(0, facts.memory_mib - use.reserved_mib)
    capacity_mib = int(physical_mib * use.memory_scaling)
    core_pct = int(FULL_CORE_PCT * use.core_scaling)
    partitions = partitions_of(facts)
    if partitions:
        # Hardware cannot allocate more than it has, and may reserve a part for itself.
        whole = [profile.memory_mib for profile in partitions if not profile.name]
        capacity_mib, core_pct = min([physical_mib, *whole]), FULL_CORE_PCT
    # Only the in-container library can hold a container's calls while its memory is moved.
    is_recalled = use.overcommit == RECALL and capacity_mib > physical_mib and facts.mode == SOFT
    return Device(
        uuid=facts.uuid,
        vendor=facts.vendor,
        index=facts.index,
        type=facts.type,
        memory_mib=facts.memory_mib,
        capacity_mib=capacity_mib,
        overcommit=RECALL if is_recalled else MANAGED,
        largest_mib=physical_mib if is_recalled else 0,
        foreign_mib=_foreign_mib(use, facts),
        bursts=tuple(sorted(facts.bursts, key=lambda burst: burst.pod_uid)),
        capacity_core_pct=core_pct,
        slots=min(use.slots, facts.max_shares) if facts.max_shares else use.slots,
        minor=facts.minor,
        bus_id=facts.bus_id,
        numa=facts.numa,
        healthy=facts.healthy,
        health_reason=facts.health_reason,
        cordoned=use.cordoned or facts.cordoned or facts.uuid in cordoned_uuids,
        mode=facts.mode,
        partitions=partitions,
        resources=resources_of(facts),
        memory_cap=facts.memory_cap,
        attributes=facts.attributes,
    )


def _foreign_mib(use: Use, facts: DeviceFacts) -> int:
    """Return the memory that new shares do not get because processes outside our control use it."""
    return 0 if use.ignore_foreign else max(0, facts.foreign_mib - use.reserved_mib)
