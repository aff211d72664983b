# SPDX-License-Identifier: Apache-2.0
"""Annotations by which Volcano's plugin deviceshare knows devices, and pods that hold shares.

Formats are those that Volcano 1.14.1 decodes (``decodeNodeDevices`` and ``decodePodDevices`` in
``pkg/scheduler/api/devices/nvidia/vgpu/utils.go``). Those written here describe the ledger for
Volcano and are never read back as truth; those of its own device plugin are read while a node
migrates (``hami_common.compat.origins``). A text that does not decode raises ``WireInvalid``.
Memory in units of the setting ``vendors.nvidia.memory_factor`` (MiB), which is Volcano's
``gpuMemoryFactor``; compute in percent of one device. Pure.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from hami_common.compat.hamiformat import (
    MOST_CONTAINERS,
    Given,
    Registered,
    Word,
    check_length,
    decode_container,
    decode_number,
)
from hami_common.errors import WireInvalid
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.units import shown

REGISTER: Final = "volcano.sh/node-vgpu-register"
"""On a node: its devices, in the order of their index."""
HANDSHAKE: Final = "volcano.sh/node-vgpu-handshake"
"""On a node, read by Volcano up to 1.15.0."""
_HANDSHAKE_DAY: Final = "Requesting_9999.12.31 "
"""Begin of the handshake: a question that Volcano takes for its own. It waits for 60 s after the
time in it, so it never writes a further one and never drops the node's devices. The
allocatable amounts show if the node can be used, as Volcano from 1.15.1 on expects. No other device
plugin writes this value."""
OF_NODE: Final = (REGISTER, HANDSHAKE)
POD_IDS: Final = "volcano.sh/vgpu-ids-new"
"""On a pod: its devices. Volcano counts them on the pod's node, for pods of all schedulers."""
POD_NODE: Final = "volcano.sh/vgpu-node"
TO_ALLOCATE: Final = "volcano.sh/devices-to-allocate"
"""On a pod: devices that Volcano's device plugin has yet to give; here always none."""
BIND_PHASE: Final = "volcano.sh/bind-phase"
BOUND: Final = "success"
NODE_LOCK: Final = "hamivgpu"
"""On a node: the lock of ``deviceshare.NodeLockEnable``."""

_WORD: Final = "NVIDIA"
_MODE: Final = "hami-core"
"""Volcano's mode ``mig`` works only with its own list of MIG sizes; shares of devices in MIG mode
are counted by their memory here."""
_FULL_PCT: Final = 100
_FIELDS: Final = 6
"""Of a registered device."""
_SEPARATORS: Final = str.maketrans(dict.fromkeys(",:;", " "))


def handshake(time_s: float) -> str:
    """Return the handshake at a time (Unix seconds).

    Only the time of the day changes: a change of the node makes Volcano count it again. Volcano
    1.14 keeps what a session allocated in vain, as for a group that did not fit, until then.
    """
    return _HANDSHAKE_DAY + datetime.fromtimestamp(time_s, tz=UTC).strftime("%H:%M:%S")


def is_ours(annotations: Mapping[str, str]) -> bool:
    """Return whether this project's agent has written the annotations of a node."""
    return annotations.get(HANDSHAKE, "").startswith(_HANDSHAKE_DAY)


def of_node(devices: Iterable[Device], *, unit_mib: int, time_s: float) -> dict[str, str]:
    """Return the annotations of a node with these devices; empty without any."""
    ordered = sorted(devices, key=lambda device: (device.index, device.uuid))
    if not ordered:
        return {}
    register = "".join(f"{_registered(device, unit_mib)}:" for device in ordered)
    return {REGISTER: register, HANDSHAKE: handshake(time_s)}


def of_pod(
    containers: Iterable[ContainerShares], *, vendor: str, node: str, unit_mib: int
) -> dict[str, str]:
    """Return the annotations of a pod on ``node``; empty if it holds no share of ``vendor``.

    One entry per container with shares, as Volcano writes them: containers in their order, then
    init containers that keep running. Volcano does not count other init containers.
    """
    shares = [
        (one.kind, [share for share in one.shares if share.vendor == vendor]) for one in containers
    ]
    entries = [
        own for wanted in ("app", "sidecar") for kind, own in shares if own and kind == wanted
    ]
    if not entries:
        return {}
    return {
        POD_IDS: ";".join("".join(_given(share, unit_mib) for share in own) for own in entries),
        POD_NODE: node,
        TO_ALLOCATE: "",
        BIND_PHASE: BOUND,
    }


def decode_shares(text: str, key: str) -> tuple[tuple[Given, ...], ...]:
    """Return the devices of each container that requests any, in order; ``key``: the annotation.

    Volcano separates containers by ``;`` and ends each device with ``:``. The id of a MIG instance
    is that of its device and ``[<group>-<position>]``.
    """
    what = f"annotation {key}"
    check_length(text, what)
    containers = text.split(";")
    if len(containers) > MOST_CONTAINERS:
        raise WireInvalid(what=what, problem=f"names {len(containers)} containers")
    for one in containers:
        if one.strip() and not one.rstrip().endswith(":"):
            raise WireInvalid(
                what=what, problem=f"{shown(one)} does not end with ':', so it may be cut off"
            )
    return tuple(decode_container(one, what) for one in containers)


def device_of(device_id: str) -> str:
    """Return the UUID of the device in the id of a share."""
    return device_id.partition("[")[0]


def decode_register(text: str, word: Word) -> tuple[Registered, ...]:
    """Return the devices that a node registers; a device's index is its position."""
    what = f"annotation {word.register}"
    check_length(text, what)
    found = []
    for index, entry in enumerate(one for one in text.split(":") if one.strip()):
        fields = [field.strip() for field in entry.split(",")]
        if len(fields) < _FIELDS or not fields[0]:
            raise WireInvalid(what=what, problem=f"{shown(entry)} has fewer than {_FIELDS} fields")
        found.append(
            Registered(
                id=fields[0],
                index=index,
                count=decode_number(fields[1], entry, what),
                memory_mib=decode_number(fields[2], entry, what),
                cores=_FULL_PCT,
                type=fields[3].removeprefix(f"{_WORD}-"),
                healthy=fields[4] == "true",
                mode=fields[5],
            )
        )
    return tuple(found)


def _registered(device: Device, unit_mib: int) -> str:
    usable = device.healthy and not device.cordoned
    model = device.type.translate(_SEPARATORS)
    fields = (
        device.uuid,
        # Volcano does not look at the health of a device, but at the number of shares.
        str(device.slots if usable else 0),
        str(device.capacity_mib // unit_mib),
        f"{_WORD}-{model}",
        str(usable).lower(),
        _MODE,
    )
    return ",".join(fields)


def _given(share: Share, unit_mib: int) -> str:
    return f"{share.uuid},{_WORD},{-(-share.memory_mib // unit_mib)},{share.core_pct}:"
