# SPDX-License-Identifier: Apache-2.0
"""Derives kubelet's device ids from devices, and selects preferred ids.

A split is one id ``<device uuid>::<i>``, i from 0 to slots - 1: the form of NVIDIA's device plugin
for shared devices, which monitoring tools such as NVIDIA's DCGM exporter resolve to the device. A
uuid that would make the id longer than kubelet's 63 characters is replaced by a digest of it.
Kubelet only counts splits. The id of a container never determines its device (design D9); it only
keeps kubelet's view consistent with the agent's. Ids are ordered by device, then by number.

An id that a running container holds stays advertised even when its device has fewer slots now or is
gone, because kubelet kills a pod at its next re-admission when one of its ids has vanished. That
includes ids of the older form ``<device uuid>-<i>``: while a container holds one, it takes the
place of the newer id with the same number, so that the number of ids stays the same.
Protocol: kubelet device plugin v1beta1. Does not depend on pods.
"""

import hashlib
from collections.abc import Collection, Iterable

from msgspec import Struct

from hami_common.model.device import Device
from hami_common.units import whole

MAX_ID_LENGTH = 63
_DIGITS = 16
_NUMBER_LENGTH = 5
_SEPARATOR = "::"
_OLDER_SEPARATOR = "-"


class Split(Struct, frozen=True, kw_only=True):
    """One id as advertised to kubelet."""

    id: str
    uuid: str
    """Device of the id; empty if the device is no longer known."""
    healthy: bool
    numa: int | None = None


def split_id(uuid: str, number: int) -> str:
    """Return the id of split ``number`` of a device."""
    return f"{_stem(uuid)}{_SEPARATOR}{number}"


def exact_ids(ids: Iterable[str], uuids: Iterable[str]) -> tuple[str, ...]:
    """Return one id for each granted device, where kubelet counts ``ids`` for the container.

    Kubelet may have chosen ids of other devices than the granted ``uuids``. The numbers of the ids
    stay, those of the right device first.
    """
    left = sorted(ids)
    numbers: dict[int, int] = {}
    wanted = list(enumerate(uuids))
    for is_own in (True, False):
        for place, uuid in wanted:
            fitting = [one for one in left if not is_own or _parts(one)[0] == _stem(uuid)]
            if place not in numbers and fitting:
                left.remove(fitting[0])
                numbers[place] = _parts(fitting[0])[1] or 0
    return tuple(split_id(uuid, numbers.get(place, 0)) for place, uuid in wanted)


def _older_id(uuid: str, number: int) -> str:
    return f"{_stem(uuid)}{_OLDER_SEPARATOR}{number}"


def _parts(kubelet_id: str) -> tuple[str, int | None]:
    """Return the stem and the number of an id of either form; ``None``: it has neither form."""
    for separator in (_SEPARATOR, _OLDER_SEPARATOR):
        stem, found, tail = kubelet_id.rpartition(separator)
        number = whole(tail) if found else None
        if number is not None:
            return stem, number
    return kubelet_id, None


def _stem(uuid: str) -> str:
    if len(uuid) + _NUMBER_LENGTH <= MAX_ID_LENGTH:
        return uuid
    digest = hashlib.sha256(uuid.encode()).hexdigest()[:_DIGITS]
    return f"{uuid[: MAX_ID_LENGTH - _NUMBER_LENGTH - _DIGITS - 1]}-{digest}"


class Splits:
    """All splits of one vendor on this node."""

    def __init__(self, splits: Iterable[Split] = ()) -> None:
        """Hold ``splits``; see ``of_devices`` for the usual way."""
        self.all = tuple(splits)
        self._uuid_by_id = {split.id: split.uuid for split in self.all}

    @classmethod
    def of_devices(
        cls,
        devices: Iterable[Device],
        *,
        faulty: Collection[str] = (),
        held: Collection[str] = (),
    ) -> "Splits":
        """Return the splits of canonical ``devices``.

        ``faulty``: uuids that this node found unusable before the registry reports them so.
        ``held``: ids that containers hold.
        """
        splits: list[Split] = []
        known = {device.uuid: device for device in devices}

        def healthy(uuid: str) -> bool:
            return uuid in known and known[uuid].healthy and uuid not in faulty

        def advertised(uuid: str, number: int) -> str:
            new, older = split_id(uuid, number), _older_id(uuid, number)
            return older if older in held and new not in held else new

        for device in known.values():
            splits.extend(
                Split(
                    id=advertised(device.uuid, number),
                    uuid=device.uuid,
                    healthy=healthy(device.uuid),
                    numa=device.numa,
                )
                for number in range(device.slots)
            )
        announced = {split.id for split in splits}
        uuid_by_stem = {_stem(uuid): uuid for uuid in known}
        for kubelet_id in sorted(set(held) - announced):
            uuid = uuid_by_stem.get(_parts(kubelet_id)[0], "")
            numa = known[uuid].numa if uuid else None
            splits.append(Split(id=kubelet_id, uuid=uuid, healthy=healthy(uuid), numa=numa))
        return cls(splits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Splits) and self.all == other.all

    __hash__ = None  # type: ignore[assignment]  # compared, never a key

    def uuid_of(self, kubelet_id: str) -> str:
        """Return the device of an id; empty when the id was never advertised."""
        return self._uuid_by_id.get(kubelet_id, "")

    def owns(self, kubelet_id: str) -> bool:
        """Return whether the id has the form of a split of these devices, advertised or not."""
        stem, number = _parts(kubelet_id)
        return kubelet_id in self._uuid_by_id or (
            number is not None and any(_stem(split.uuid) == stem for split in self.all)
        )

    def __contains__(self, kubelet_id: object) -> bool:
        return kubelet_id in self._uuid_by_id

    def prefer(
        self, available: Collection[str], *, must: Iterable[str], wanted: Iterable[str], size: int
    ) -> tuple[str, ...]:
        """Return ``size`` ids out of ``available``, selected in this order.

        First the ids in ``must``, then one of each ``wanted`` device, then free ids on the device
        with the most free ids. Of one device, ids of the older form come last. Empty when
        ``available`` cannot fill ``size``; kubelet then reports the shortage itself.
        """
        chosen = list(dict.fromkeys(must))
        free = sorted(set(available) - set(chosen), key=self._order)
        if len(chosen) > size or len(chosen) + len(free) < size:
            return ()
        covered = [self.uuid_of(kubelet_id) for kubelet_id in chosen]
        for uuid in wanted:
            if uuid in covered:
                covered.remove(uuid)
                continue
            match = next((one for one in free if self.uuid_of(one) == uuid), None)
            if match is not None and len(chosen) < size:
                chosen.append(match)
                free.remove(match)
        while len(chosen) < size:
            counts: dict[str, int] = {}
            for one in free:
                counts[self.uuid_of(one)] = counts.get(self.uuid_of(one), 0) + 1
            best = max(free, key=lambda one: counts[self.uuid_of(one)])
            chosen.append(best)
            free.remove(best)
        return tuple(chosen)

    def _order(self, kubelet_id: str) -> tuple[str, bool, int, str]:
        uuid = self.uuid_of(kubelet_id)
        number = _parts(kubelet_id)[1] or 0
        return (uuid, kubelet_id != split_id(uuid, number), number, kubelet_id)
