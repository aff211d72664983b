# SPDX-License-Identifier: Apache-2.0
"""Converts the devices that HAMi or Volcano gave to a pod into a placement in our terms.

The source is that system's own annotation on the pod (``hami_common.compat.origins``), accepted
only for pods that an operator has listed on their node (``TakenOver``): annotations alone prove
nothing. The annotation is compared with the pod's requests, and doubts are resolved upwards:

- where the two differ, the larger amount counts;
- where the device is unknown, the share counts on every device that it may be on;
- where the amount is unknown too, these devices count as taken whole.

The result is never less than what the pod holds, and never outside its own node. Each doubt is
reported with the pod's field. Memory in MiB, compute in percent of one device. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.bounds import DeviceId, Index, Uid, Vendor
from hami_common.compat import hamiformat, volcano
from hami_common.compat.hamiformat import Given, MigInstance, Word
from hami_common.compat.origins import ORIGINS, OriginName
from hami_common.errors import RequestInvalid, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.model.device import Device, Profile
from hami_common.model.placement import MIXED, ContainerShares, Share
from hami_common.model.request import ContainerKind, DeviceRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import ContainerView, PodView
from hami_common.units import whole
from hami_common.vendors.catalog import Catalog

_FULL_PCT: Final = 100
_SIXTEENTHS: Final = 16


class TakenOver(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of an operator's mark on a node that came over from another system."""

    origin: OriginName = "hami"
    """That system, ``Origin.name``."""
    pods: tuple[Uid, ...] = ()
    """Pods that it placed there, by uid: only these are adopted."""
    devices: dict[Vendor, dict[DeviceId, Index]] = {}
    """By vendor: its id of each device → the vendor's number of it."""


_mark_decoder = msgspec.json.Decoder(TakenOver)
_mark_encoder = msgspec.json.Encoder(order="deterministic")


def decode_mark(text: str) -> TakenOver:
    """The mark of a node, from annotation ``hami.io/taken-over``."""
    what = f"node annotation {keys.TAKEN_OVER}"
    try:
        return _mark_decoder.decode(text.encode())
    except UNDECODABLE as error:
        raise WireInvalid(what=what, problem=f"does not decode: {error}") from error


def encode_mark(mark: TakenOver) -> str:
    """The mark as it stands on the node."""
    return _mark_encoder.encode(mark).decode()


class Adopted(Struct, frozen=True, kw_only=True):
    """Devices that a pod holds."""

    containers: tuple[ContainerShares, ...]
    problems: tuple[str, ...] = ()
    """Facts that could not be determined and were read the safe way, one sentence each."""


class NodeView(Struct, frozen=True, kw_only=True):
    """The fields of the pod's node that adoption needs."""

    name: str
    devices: Mapping[str, Sequence[Device]]
    """By vendor."""
    mark: TakenOver = TakenOver()


def may_hold(pod: PodView, catalog: Catalog) -> bool:
    """True when the pod has a node, may run there, and asks for devices."""
    return bool(pod.spec.node_name) and not pod.is_finished() and catalog.mentions(pod)


def read(pod: PodView, node: NodeView, catalog: Catalog) -> Adopted:
    """Return the devices that ``pod`` holds on its node."""
    return _Reader(pod, node, catalog).read()


class _Reader:
    """Reads one pod."""

    def __init__(self, pod: PodView, node: NodeView, catalog: Catalog) -> None:
        self._pod = pod
        self._node = node
        self._catalog = catalog
        self._origin = ORIGINS[node.mark.origin]
        self._problems: list[str] = []

    def read(self) -> Adopted:
        annotations = self._pod.annotations()
        placed_on = annotations.get(self._origin.node, self._node.name)
        if placed_on != self._node.name:
            self._doubt(f"annotation {self._origin.node} names node {placed_on[:63]!r}")
        instances = self._instances()
        containers = []
        ordered = self._pod.containers_in_order()
        given = self._given(ordered)
        for position, (kind, container) in enumerate(ordered):
            shares: list[Share] = []
            for vendor in self._catalog.asked(container):
                request = self._request(container, vendor.name)
                if request is not None and request.count == 0:
                    continue
                shares += self._shares(
                    container.name,
                    vendor.name,
                    request,
                    given.get((position, vendor.name)),
                    instances.get(position, {}),
                )
            if shares:
                containers.append(
                    ContainerShares(name=container.name, kind=kind, shares=tuple(shares))
                )
        return Adopted(containers=tuple(containers), problems=tuple(self._problems))

    def _doubt(self, text: str) -> None:
        if text not in self._problems:
            self._problems.append(text)

    # --- contents of the annotations -------------------------------------------------------------

    def _instances(self) -> dict[int, dict[int, MigInstance]]:
        text = self._pod.annotations().get(self._origin.mig, "")
        if not text.strip():
            return {}
        try:
            found = hamiformat.decode_mig(text, what=f"annotation {self._origin.mig}")
        except WireInvalid as error:
            self._doubt(str(error))
            return {}
        by_container: dict[int, dict[int, MigInstance]] = {}
        for one in found:
            by_container.setdefault(one.container, {})[one.device] = one
        return by_container

    def _given(
        self, containers: Sequence[tuple[ContainerKind, ContainerView]]
    ) -> dict[tuple[int, str], list[tuple[Word, Given]]]:
        """Shares by (position of the container, vendor); absent where unknown.

        HAMi's entries stand at the positions of the containers. For vendors whose devices have a
        name of their own, only the non-empty entries are there, in order. Volcano has an entry for
        each container that asks, and none for init containers.
        """
        found: dict[tuple[int, str], list[tuple[Word, Given]]] = {}
        unreadable: set[str] = set()
        for word in self._origin.words:
            text = self._pod.annotations().get(word.allocated, "")
            if not text.strip():
                continue
            what = f"annotation {word.allocated}"
            asking = [
                position
                for position, (kind, container) in enumerate(containers)
                if (self._origin.serves_init or kind == "app")
                and any(vendor.name == word.vendor for vendor in self._catalog.asked(container))
            ]
            if not asking:
                self._doubt(f"{what}: no container asks for devices of {word.vendor}")
                continue
            try:
                entries = self._origin.decode_shares(text, word.allocated)
            except WireInvalid as error:
                self._doubt(str(error))
                unreadable.add(word.vendor)
                continue
            filled = [place for place, entry in enumerate(entries) if entry]
            has_places = self._origin.serves_init and len(entries) == len(containers)
            if has_places and set(filled) <= set(asking):
                places = {place: place for place in filled}
            elif len(filled) == len(asking):
                places = dict(zip(filled, asking, strict=True))
            else:
                self._doubt(
                    f"{what} has {len(filled)} shares, {len(asking)} containers ask for one"
                )
                unreadable.add(word.vendor)
                continue
            for place, position in places.items():
                found.setdefault((position, word.vendor), []).extend(
                    (word, self._in_mib(word.vendor, one)) for one in entries[place]
                )
        return {at: given for at, given in found.items() if at[1] not in unreadable}

    def _unit_mib(self, vendor: str) -> int:
        """Return the unit of memory in the annotations."""
        unit_mib = self._catalog.vendor(vendor).resources.memory_unit_mib
        return max(1, unit_mib) if self._origin.in_units else 1

    def _in_mib(self, vendor: str, given: Given) -> Given:
        return replace(given, memory_mib=given.memory_mib * self._unit_mib(vendor))

    def _request(self, container: ContainerView, vendor: str) -> DeviceRequest | None:
        """Request of the container, ``None`` when it cannot be determined."""
        try:
            request = self._catalog.vendor(vendor).parse_request(container, self._pod.annotations())
        except RequestInvalid as error:
            self._doubt(str(error))
            return None
        # Resource named with no amount: a count of 0.
        return request or DeviceRequest(vendor=vendor, count=0)

    # --- the same in our terms -------------------------------------------------------------------

    def _shares(
        self,
        container: str,
        vendor: str,
        request: DeviceRequest | None,
        given: Sequence[tuple[Word, Given]] | None,
        instances: Mapping[int, MigInstance],
    ) -> list[Share]:
        devices = sorted(self._node.devices.get(vendor, ()), key=lambda one: one.index)
        if given is None:
            self._doubt(f"container {container}: nothing says which devices of {vendor} it holds")
            return [self._asked_of(device, request) for device in devices]
        if request is not None and not _is_count(request, given, instances):
            self._doubt(
                f"container {container} asks for {request.count} devices of {vendor} and was given "
                f"{len(given)}"
            )
        shares: list[Share] = []
        lost: list[tuple[Word, Given]] = []
        for number, (word, one) in enumerate(given):
            device = self._find(word, one, devices)
            if device is None and not devices:
                shares.append(_as_given(word, one))  # the node's devices are not known yet
            elif device is None:
                lost.append((word, one))
            else:
                share = self._share(device, word, one, request, instances.get(number))
                shares.append(self._at_least(container, share, device, request))
        if lost:
            names = ", ".join(one.id[:63] for _, one in lost[:3])
            self._doubt(f"container {container}: the node has no device {names} of {vendor}")
            certain = {share.uuid for share in shares}
            for device in devices:
                if device.uuid not in certain:
                    word, one = max(lost, key=lambda pair: (pair[1].memory_mib, pair[1].cores))
                    share = self._share(device, word, one, request, None)
                    shares.append(self._at_least(container, share, device, request))
        if request is not None and not given:
            self._doubt(f"container {container}: nothing says which devices of {vendor} it holds")
            shares = [self._asked_of(device, request) for device in devices]
        return shares

    def _find(self, word: Word, given: Given, devices: Sequence[Device]) -> Device | None:
        for device in devices:
            if device.uuid == volcano.device_of(given.id):
                return device
        index = self._node.mark.devices.get(word.vendor, {}).get(given.id)
        if index is not None:
            return next((device for device in devices if device.index == index), None)
        place = hamiformat.number_in(given.id, word, self._node.name)
        return devices[place] if place is not None and place < len(devices) else None

    def _share(
        self,
        device: Device,
        word: Word,
        given: Given,
        request: DeviceRequest | None,
        instance: MigInstance | None,
    ) -> Share:
        if word.is_whole:
            return _whole(device)
        if word.vendor == "awsneuron":
            return _of_mask(device, given.cores)
        core_pct = _percent(word, device, given.cores)
        memory_mib = given.memory_mib or device.memory_mib
        if device.memory_mib - memory_mib < self._unit_mib(device.vendor):
            memory_mib = max(memory_mib, device.memory_mib)
        if device.partitions:
            return self._part(device, memory_mib, core_pct, instance)
        is_whole = core_pct >= _FULL_PCT and memory_mib >= device.memory_mib
        kind = ""
        if word.word == "Metax-SGPU":
            kind = MIXED if request is None else request.kind
        return Share(
            vendor=device.vendor,
            uuid=device.uuid,
            memory_mib=memory_mib,
            core_pct=core_pct,
            exclusive=is_whole or (request is not None and request.exclusive),
            kind="" if is_whole else kind,
        )

    def _part(
        self, device: Device, memory_mib: int, core_pct: int, instance: MigInstance | None
    ) -> Share:
        """The hardware partition that carries a share; the whole device when unknown."""
        named = {profile.name: profile for profile in device.partitions if profile.name}
        profile: Profile | None
        start: int | None = None
        if instance is not None:
            profile, start = named.get(instance.profile), instance.start
        else:
            profile = min(
                (one for one in named.values() if one.memory_mib >= memory_mib),
                key=lambda one: (one.memory_mib, one.core_pct, one.name),
                default=None,
            )
        if profile is None:
            is_whole = memory_mib >= device.memory_mib and core_pct >= _FULL_PCT
            if instance is not None or not is_whole:
                self._doubt(f"device {device.uuid} has no partition of {memory_mib} MiB")
            return _whole(device)
        if profile.starts and start not in profile.starts:
            self._doubt(f"nothing says where partition {profile.name} of {device.uuid} is")
            return _whole(device)
        return Share(
            vendor=device.vendor,
            uuid=device.uuid,
            memory_mib=profile.memory_mib,
            core_pct=profile.core_pct,
            profile=profile.name,
            start=start if profile.starts else None,
            kind=profile.kind,
        )

    def _at_least(
        self, container: str, share: Share, device: Device, request: DeviceRequest | None
    ) -> Share:
        """Raise a share to the requested size, for vendors whose shares have exactly that size."""
        if request is None or share.profile or request.exact or share.exclusive:
            return share
        wanted_mib = request.memory_mib_on(device.memory_mib)
        # Amounts in units of several MiB are rounded down.
        lowest_mib = wanted_mib - self._unit_mib(device.vendor) + 1
        if share.memory_mib < lowest_mib or share.core_pct < request.core_pct:
            self._doubt(
                f"container {container} asks for {wanted_mib} MiB and {request.core_pct} % of "
                f"{device.uuid}, its annotation says {share.memory_mib} MiB and {share.core_pct} %"
            )
        return replace(
            share,
            memory_mib=max(share.memory_mib, wanted_mib),
            core_pct=max(share.core_pct, request.core_pct),
        )

    def _asked_of(self, device: Device, request: DeviceRequest | None) -> Share:
        """Largest share of a device that the container may hold when only its request is known."""
        if request is None or request.exact or request.exclusive or device.partitions:
            return _whole(device)
        return Share(
            vendor=device.vendor,
            uuid=device.uuid,
            memory_mib=request.memory_mib_on(device.memory_mib) or device.memory_mib,
            core_pct=request.core_pct,
            kind=request.kind,
        )


def _is_count(
    request: DeviceRequest,
    given: Sequence[tuple[Word, Given]],
    instances: Mapping[int, MigInstance],
) -> bool:
    return bool(instances) or bool(request.exact) or len(given) == request.count


def _whole(device: Device) -> Share:
    return Share(
        vendor=device.vendor,
        uuid=device.uuid,
        memory_mib=device.memory_mib,
        core_pct=_FULL_PCT,
        exclusive=True,
    )


def _as_given(word: Word, given: Given) -> Share:
    """A share of a device that no report contains; the device is not offered to other pods."""
    return Share(
        vendor=word.vendor,
        uuid=given.id,
        memory_mib=given.memory_mib,
        core_pct=min(given.cores, _FULL_PCT),
        kind=MIXED,
    )


def _percent(word: Word, device: Device, cores: int) -> int:
    if word.vendor == "mthreads":
        return min(_FULL_PCT, -(-cores * _FULL_PCT // _SIXTEENTHS))
    if word.vendor == "amd":
        units = whole(device.attributes.get("compute_units", ""))
        return min(_FULL_PCT, -(-cores * _FULL_PCT // units)) if units else _FULL_PCT
    return min(_FULL_PCT, cores)


def _of_mask(device: Device, mask: int) -> Share:
    """Cores of a device by mask: those between the first and the last count as taken."""
    first = (mask & -mask).bit_length() - 1
    size = mask.bit_length() - first
    for profile in device.partitions:
        if mask and profile.name and profile.size == size and first in profile.starts:
            return Share(
                vendor=device.vendor,
                uuid=device.uuid,
                memory_mib=profile.memory_mib,
                core_pct=profile.core_pct,
                profile=profile.name,
                start=first,
                kind=profile.kind,
            )
    return _whole(device)
