# SPDX-License-Identifier: Apache-2.0
"""Writes our allocations to HAMi's annotations, for HAMi and the programs that read them (D21).

Mirrors are written, never read back as truth. Those of a pod show that it was bound and what it
holds; they never offer its devices to HAMi's plugin. HAMi's names of devices are those that the
node had there (``TakenOver.devices``), else those that HAMi gives them. A device that has no form
there, for example of a vendor whose names only HAMi's plugin knows, is left out and reported as a
problem. Memory in MiB, compute in percent of one device; times are Unix seconds. Pure.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec import Struct

from hami_common.compat import hamiformat
from hami_common.compat.adoption import TakenOver
from hami_common.compat.hamiformat import Given, MigProfile, Registered, Word
from hami_common.events.allocation import CarriedShare
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.units import whole

_FULL_PCT: Final = 100
_SIXTEENTHS: Final = 16
_LONGEST_LABEL: Final = 63
_WHOLE_XPU, _PART_XPU = "kunlun", "XPU"

_encoder = msgspec.json.Encoder()


class Mirror(Struct, frozen=True, kw_only=True):
    """Annotations and labels to set on an object."""

    annotations: dict[str, str]
    labels: dict[str, str] = {}
    problems: tuple[str, ...] = ()
    """Facts that have no form in HAMi's annotations."""


def of_pod(
    order: Sequence[str],
    containers: Sequence[ContainerShares],
    *,
    node: str,
    devices: Mapping[str, Device],
    mark: TakenOver,
    time_s: float,
    carried: Sequence[CarriedShare] = (),
) -> Mirror:
    """Return the mirror of a pod on ``node``.

    ``order``: all its containers, in kubelet's order. ``devices``: those of the node, by UUID.
    ``carried``: its known MIG instances; empty before they are created.
    """
    names = {(one.container, one.number): one.names for one in carried}
    shares_by_name = {one.name: one.shares for one in containers}
    given: dict[str, list[list[Given]]] = {}
    instances: list[dict[str, object]] = []
    chips: dict[str, list[dict[str, str | int]]] = {}
    problems: list[str] = []
    for place, name in enumerate(order):
        for number, share in enumerate(shares_by_name.get(name, ())):
            device = devices.get(share.uuid)
            word = None if device is None else _word(device, share)
            if device is None or word is None:
                problems.append(f"HAMi has no word for device {share.uuid}")
                continue
            lists = given.setdefault(word.allocated, [[] for _ in order])
            if word.vendor == "nvidia" and share.profile:
                told = names.get((name, number), {})
                instances.append(_instance(place, len(lists[place]), share, device, told))
            name_there = _id(word, device, node=node, devices=devices, mark=mark)
            if word.vendor == "ascend":
                chips.setdefault(word.word, []).append(_chip(name_there, share))
            lists[place].append(
                Given(
                    id=name_there,
                    type=device.type if word.vendor == "amd" else word.word,
                    memory_mib=_memory(word, share),
                    cores=_cores(word, share, device),
                )
            )
    notes = {key: hamiformat.encode_shares(lists) for key, lists in given.items()}
    if not notes:
        return Mirror(annotations={}, problems=tuple(problems))
    if instances:
        notes[hamiformat.MIG] = _encoder.encode(instances).decode()
    for chip, listed in chips.items():
        notes[f"{hamiformat.ASCEND_CHIPS}{chip}"] = _encoder.encode(listed).decode()
    stamp = str(int(time_s))
    notes |= {
        hamiformat.NODE: node,
        hamiformat.TIME: stamp,
        hamiformat.BIND_TIME: stamp,
        hamiformat.BIND_PHASE: hamiformat.BOUND,
    }
    labels = {hamiformat.NODE: node} if len(node) <= _LONGEST_LABEL else {}
    return Mirror(annotations=notes, labels=labels, problems=tuple(problems))


def of_node(devices: Mapping[str, Device], *, node: str, mark: TakenOver, time_s: float) -> Mirror:
    """Return the mirror of a node with these devices, by UUID."""
    found: dict[str, list[Registered]] = {}
    word_by_key: dict[str, Word] = {}
    for device in sorted(devices.values(), key=lambda one: (one.vendor, one.index, one.uuid)):
        word = _word(device, None)
        if word is None or not word.register:
            continue  # HAMi reads such devices from the node's capacity
        word_by_key[word.register] = word
        found.setdefault(word.register, []).append(
            Registered(
                id=_id(word, device, node=node, devices=devices, mark=mark),
                index=device.index,
                count=_count(device),
                memory_mib=device.capacity_mib,
                cores=_units(device) if word.vendor == "amd" else device.capacity_core_pct,
                type=device.type,
                numa=device.numa or 0,
                mode="mig" if device.mode == "mig" else "hami-core",
                profiles=_profiles(device),
                healthy=device.healthy and not device.cordoned,
            )
        )
    notes = {
        key: hamiformat.encode_register(listed, word_by_key[key]) for key, listed in found.items()
    }
    when = datetime.fromtimestamp(time_s, tz=UTC).strftime("%Y.%m.%d %H:%M:%S")
    for key in found:
        if handshake := word_by_key[key].handshake:
            notes[handshake] = f"Reported_{when}"
    chips = [device for device in devices.values() if device.vendor == "ascend"]
    if chips:
        is_soft = any(device.mode == "soft" for device in chips)
        notes[hamiformat.ASCEND_SOFT] = str(is_soft).lower()
    return Mirror(annotations=notes)


def _profiles(device: Device) -> tuple[MigProfile, ...]:
    """The MIG sizes of a device that HAMi knows: profiles that differ only in size."""
    if device.vendor != "nvidia" or device.mode != "mig":
        return ()
    return tuple(
        MigProfile(
            name=one.name,
            memory_mib=one.memory_mib,
            core_pct=one.core_pct,
            slices=slices,
            size=one.size,
            starts=one.starts,
        )
        for one in device.partitions
        if not one.by_name_only and (slices := whole(one.name.partition("g.")[0])) is not None
    )


def _count(device: Device) -> int:
    """Number of pods that may share the device; if divided, of its smallest instances."""
    counts = [len(one.starts) for one in _profiles(device)]
    return max(counts, default=device.slots)


def _word(device: Device, share: Share | None) -> Word | None:
    """HAMi's kind of the device, or of a share of it."""
    words = [word for word in hamiformat.WORDS if word.vendor == device.vendor]
    if len(words) == 1:
        return words[0]
    match device.vendor:
        case "metax":
            name = "Metax-SGPU" if device.mode == "sgpu" else "Metax-GPU"
        case "enflame":
            name = "Enflame" if device.mode == "drs" else "GCU"
        case "kunlunxin":
            is_whole = share is not None and share.exclusive and not share.profile
            name = _WHOLE_XPU if is_whole else _PART_XPU
        case _:
            name = device.type
    return next((word for word in words if word.word == name), None)


def _id(
    word: Word, device: Device, *, node: str, devices: Mapping[str, Device], mark: TakenOver
) -> str:
    known = mark.devices.get(word.vendor, {})
    for name, index in known.items():
        if index == device.index:
            return name
    if not word.numbered:
        return device.uuid
    own = sorted(one.index for one in devices.values() if one.vendor == device.vendor)
    return f"{node}-{word.numbered}-{own.index(device.index)}"


def _memory(word: Word, share: Share) -> int:
    return 0 if word.vendor in ("awsneuron", "vastai", "biren") else share.memory_mib


def _cores(word: Word, share: Share, device: Device) -> int:
    match word.vendor:
        case "vastai" | "biren":
            return 0
        case "mthreads":
            return -(-share.core_pct * _SIXTEENTHS // _FULL_PCT)
        case "amd":
            return max(1, -(-share.core_pct * _units(device) // _FULL_PCT))
        case "awsneuron":
            return _mask(share, device)
        case _:
            return share.core_pct


def _units(device: Device) -> int:
    return whole(device.attributes.get("compute_units", "")) or _FULL_PCT


def _mask(share: Share, device: Device) -> int:
    sizes = {profile.name: profile.size for profile in device.partitions}
    largest = max(sizes.values(), default=1)
    size = sizes.get(share.profile, largest) if share.profile else largest
    return ((1 << size) - 1) << (share.start or 0)


def _chip(name: str, share: Share) -> dict[str, str | int]:
    """One entry of ``hamiformat.ASCEND_CHIPS``; HAMi omits fields that are empty or 0."""
    is_soft = not share.profile and not share.exclusive
    entry: dict[str, str | int] = {
        "UUID": name,
        "temp": share.profile,
        "memory": share.memory_mib,
        "core": share.core_pct if is_soft else 0,
    }
    return {key: value for key, value in entry.items() if value}


def _instance(
    container: int, number: int, share: Share, device: Device, names: Mapping[str, str]
) -> dict[str, object]:
    """One line of ``hamiformat.MIG``; HAMi needs the complete name of an instance."""
    size = next((one.size for one in device.partitions if one.name == share.profile), 0)
    return {
        "containerIndex": container,
        "deviceIndex": number,
        "gpuUUID": device.uuid,
        "profile": share.profile,
        "placement": {"start": share.start or 0, "size": size},
        **_runtime(names),
    }


def _runtime(names: Mapping[str, str]) -> dict[str, object]:
    uuid = names.get("mig_uuid", "")
    numbers = names.get("gpu_instance", ""), names.get("compute_instance", "")
    if not uuid or not all(one.isascii() and one.isdecimal() for one in numbers):
        return {}
    gpu_instance, compute_instance = map(int, numbers)
    return {
        "migUUID": uuid,
        "gpuInstanceID": gpu_instance,
        "computeInstanceID": compute_instance,
    }
