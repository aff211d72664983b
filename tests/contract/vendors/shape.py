# SPDX-License-Identifier: Apache-2.0
"""The form of the contract suite's input per vendor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hami_common.model.device import Device, Profile
from hami_common.vendors.protocol import Vendor

Limits = dict[str, str]


@dataclass(frozen=True)
class Case:
    """One vendor as the suite sees it."""

    make: Callable[..., Vendor]
    settings: Callable[..., object]
    device: Device
    """One device that serves ``part`` and ``whole``."""
    whole: Limits
    part: Limits = field(default_factory=dict)
    """Empty: this vendor's devices are never shared."""
    part_mib: int = 0
    """Memory of ``device`` that ``part`` takes."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    bad: tuple[tuple[str, str], ...] = ()
    """(resource, text) that is refused when put into ``part`` or ``whole``."""
    refuses_zero: bool = False
    """A count of 0 is refused, as HAMi does; else it is no request."""
    selector_uuid: str = ""
    """Annotation that names the devices wanted."""


def device(
    vendor: str,
    type_: str,
    memory_mib: int,
    *,
    mode: str = "soft",
    partitions: tuple[Profile, ...] = (),
    resources: dict[str, int] | None = None,
    attributes: dict[str, str] | None = None,
    slots: int = 10,
) -> Device:
    """A registered device, number 0 of its node."""
    return Device(
        uuid=f"{vendor}-0",
        vendor=vendor,
        index=0,
        minor=0,
        type=type_,
        memory_mib=memory_mib,
        capacity_mib=min([memory_mib, *(p.memory_mib for p in partitions if not p.name)]),
        slots=slots,
        bus_id="0000:3d:00.0",
        mode=mode,
        partitions=partitions,
        resources=resources or {},
        attributes=attributes or {},
    )
