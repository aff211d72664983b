# SPDX-License-Identifier: Apache-2.0
"""Handles: the words by which a container gets the driver's object for its share.

Such a share is a hardware partition (MIG, vNPU, sMLU, sGPU, DRS, vXPU) or a description that only
one share may have (a vDCU's file, a mask of compute units). Partitioners call ``needs_instance``;
renderers take the word from ``handle_of``, which raises an error when the node creates such objects
and this one is missing: a container never starts without its share's limits by mistake. Memory in
MiB, compute in percent of one device.
"""

from collections.abc import Callable, Mapping
from typing import Final

from hami_common.errors import NotFound
from hami_common.model.device import Device
from hami_common.model.placement import Share
from hami_common.model.request import NAMED_MODES
from hami_common.vendors.protocol import RenderContext

_FULL_PCT: Final = 100


def is_part(share: Share, device: Device) -> bool:
    """True when the share is less than its device, in memory or in compute."""
    return share.memory_mib < device.memory_mib or 0 < share.core_pct < _FULL_PCT


def _by_profile(share: Share, device: Device) -> bool:  # noqa: ARG001 - one signature for all
    return bool(share.profile)


def _by_mode(mode: str) -> Callable[[Share, Device], bool]:
    return lambda share, device: device.mode == mode and bool(share.profile)


def _smlu(share: Share, device: Device) -> bool:
    return device.mode == "smlu" and is_part(share, device)


def _sgpu(share: Share, device: Device) -> bool:
    """Every sGPU has a class; a whole GPU has none."""
    return device.mode == "sgpu" and bool(share.kind)


def _compute(share: Share, device: Device) -> bool:  # noqa: ARG001 - one signature for all
    return 0 < share.core_pct < _FULL_PCT


_NEEDS: Mapping[str, Callable[[Share, Device], bool]] = {
    "nvidia": _by_mode("mig"),
    "ascend": _by_mode("vnpu"),
    "cambricon": _smlu,
    "hygon": is_part,
    "metax": _sgpu,
    "enflame": _by_mode("drs"),
    "kunlunxin": _by_profile,
    "amd": _compute,
}


def is_divisible(vendor: str) -> bool:
    """True when a driver can divide devices of the vendor."""
    return vendor in _NEEDS


def needs_instance(share: Share, device: Device) -> bool:
    """True when a partitioner must create an object before the share can be used."""
    rule = _NEEDS.get(share.vendor)
    return rule is not None and rule(share, device)


def suits_mode(share: Share, device: Device) -> bool:
    """True when the share fits the way in which the device is divided now.

    An NVIDIA card has either MIG instances or shares in software, and its mode may have changed.
    """
    if share.vendor != "nvidia":
        return True
    if share.profile:
        return bool(device.partitions)
    return device.mode != "mig" and share.mode == (
        device.mode if device.mode in NAMED_MODES else ""
    )


def handle_key(uuid: str, part: str = "") -> str:
    """The key in ``RenderContext.handles`` of a device.

    ``part``: ``Share.part``, where the container has several partitions of the device.
    """
    return f"{uuid}/{part}" if part else uuid


def handles_of(share: Share, device: Device, context: RenderContext) -> Mapping[str, str]:
    """All words of the driver's object for the share."""
    own = context.handles.get(handle_key(device.uuid, share.part))
    return context.handles.get(handle_key(device.uuid), {}) if own is None else own


def handle_of(share: Share, device: Device, context: RenderContext, key: str) -> str:
    """The word ``key`` of the driver's object for the share; empty where the driver creates none.

    ``NotFound`` where the node divides devices (``RenderContext.divides``), the share needs an
    object and it is missing.
    """
    word = handles_of(share, device, context).get(key, "")
    if not word and context.divides and needs_instance(share, device):
        what = f"{key} of the share of {share.memory_mib} MiB on {device.uuid}: its partition"
        raise NotFound(what=f"{what} has not been made on this node")
    return word
