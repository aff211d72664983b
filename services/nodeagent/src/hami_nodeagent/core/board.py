# SPDX-License-Identifier: Apache-2.0
"""State of this node's hardware partitions that the whole agent shares.

``Board`` owns the state: ``apply`` is the only way to change it, and every attribute is a read-only
view that follows later changes. Each event names the module that applies it. Uses no disk and no
clock.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.allocation import CarriedShare
from hami_common.model.device import Device, DeviceFacts
from hami_common.model.placement import Share, part_word
from hami_common.vendors.handles import handle_key
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.partitions import (
    FAULT_NUMBER,
    TOLD,
    Owner,
    divided_shares,
    owner_of,
    without_faulty,
    without_foreign,
)


class ModeNotice(Struct, frozen=True, kw_only=True):
    """Reason why a card's mode differs, or may soon differ, from the configured mode."""

    text: str
    is_withheld: bool
    """The card takes no new pods."""


class VendorsDivided(Struct, frozen=True, kw_only=True):
    """The vendors whose devices this node divides (``shell.partitions``, at start)."""

    vendors: frozenset[str]


class DevicesChanged(Struct, frozen=True, kw_only=True):
    """The registry's devices of this node (``shell.picture``)."""

    devices_by_uuid: Mapping[str, Device]


class PartitionsRead(Struct, frozen=True, kw_only=True):
    """All partitions of one device, as read from the hardware (``shell.partitions``)."""

    uuid: str
    carried: Mapping[Owner, Instance]
    waiting: Mapping[Owner, str]
    """Reason why a share has no partition yet; an earlier reason stays."""
    foreign: tuple[Instance, ...]


class PartitionFailed(Struct, frozen=True, kw_only=True):
    """A share's partition could not be created or read (``shell.partitions``)."""

    owner: Owner
    text: str


class SharesEnded(Struct, frozen=True, kw_only=True):
    """State of all shares but these is dropped (``shell.partitions``)."""

    live: Collection[Owner]
    """Shares that need a partition."""
    granted: Collection[str]
    """UIDs of pods with grants."""


class ContainerStarted(Struct, frozen=True, kw_only=True):
    """A container with these shares may start (``shell.partition_answers``)."""

    owners: Collection[Owner]


class FaultsChanged(Struct, frozen=True, kw_only=True):
    """Faulty partitions of one device (``shell.inventory``)."""

    uuid: str
    faulty: tuple[Instance, ...]


class ModeReported(Struct, frozen=True, kw_only=True):
    """Mode of one card (``shell.modes``); ``None``: as configured."""

    uuid: str
    notice: ModeNotice | None
    is_sharing: bool = False
    """It is the mode of sharing without partitions (``shell.sharing``)."""


Event = (
    VendorsDivided
    | DevicesChanged
    | PartitionsRead
    | PartitionFailed
    | SharesEnded
    | ContainerStarted
    | FaultsChanged
    | ModeReported
)


class Board:
    """Partitions that carry shares, as last read, and the state of all other partitions."""

    def __init__(self) -> None:
        self._vendors: frozenset[str] = frozenset()
        self._devices_by_uuid: Mapping[str, Device] = {}
        self._carried: dict[Owner, Instance] = {}
        self._foreign_by_uuid: dict[str, tuple[Instance, ...]] = {}
        self._faulty_by_uuid: dict[str, tuple[Instance, ...]] = {}
        self._switching: dict[str, ModeNotice] = {}
        self._sharing: dict[str, ModeNotice] = {}
        self._trouble: dict[Owner, str] = {}
        self._started: set[Owner] = set()
        self.carried: Mapping[Owner, Instance] = MappingProxyType(self._carried)
        """The partition of each share that has one."""
        self.foreign_by_uuid: Mapping[str, tuple[Instance, ...]] = MappingProxyType(
            self._foreign_by_uuid
        )
        """Partitions that this agent did not create, by device."""
        self.faulty_by_uuid: Mapping[str, tuple[Instance, ...]] = MappingProxyType(
            self._faulty_by_uuid
        )
        """Faulty partitions, by device; their places get no new partition."""
        self.switching: Mapping[str, ModeNotice] = MappingProxyType(self._switching)
        """Cards whose mode is being switched, or cannot be."""
        self.sharing: Mapping[str, ModeNotice] = MappingProxyType(self._sharing)
        """The same of their mode of sharing without partitions."""
        self.trouble: Mapping[Owner, str] = MappingProxyType(self._trouble)
        """Reason why a share has no partition yet."""

    @property
    def vendors(self) -> frozenset[str]:
        """Vendors whose devices this node divides."""
        return self._vendors

    @property
    def started(self) -> AbstractSet[Owner]:
        """Shares whose container may have started, until their pod's grants end."""
        return frozenset(self._started)

    def apply(self, event: Event) -> None:
        """Apply an event; the only way to change the state."""
        match event:
            case VendorsDivided():
                self._vendors = event.vendors
            case DevicesChanged():
                self._devices_by_uuid = event.devices_by_uuid
            case PartitionsRead():
                self._apply_reading(event)
            case PartitionFailed():
                self._trouble[event.owner] = event.text
            case SharesEnded():
                for owner in [owner for owner in self._trouble if owner not in event.live]:
                    del self._trouble[owner]
                self._started = {one for one in self._started if one.pod_uid in event.granted}
            case ContainerStarted():
                self._started.update(event.owners)
            case FaultsChanged():
                self._faulty_by_uuid[event.uuid] = event.faulty
            case ModeReported():
                notices = self._sharing if event.is_sharing else self._switching
                if event.notice is None:
                    notices.pop(event.uuid, None)
                else:
                    notices[event.uuid] = event.notice

    def _apply_reading(self, event: PartitionsRead) -> None:
        for owner, instance in list(self._carried.items()):
            if instance.uuid == event.uuid and owner not in event.carried:
                del self._carried[owner]
        self._carried.update(event.carried)
        for owner in event.carried:
            self._trouble.pop(owner, None)
        for owner, text in event.waiting.items():
            self._trouble.setdefault(owner, text)
        self._foreign_by_uuid[event.uuid] = event.foreign

    def owners(self, entry: Entry, container: str, vendor: str = "") -> dict[Owner, str]:
        """Shares of a container that need a partition, with their device."""
        return {
            owner_of(entry, shares.name, number): share.uuid
            for shares in entry.record.containers
            if shares.name == container
            for number, share in divided_shares(shares, self._vendors, self._devices_by_uuid)
            if vendor in ("", share.vendor)
        }

    def are_all_there(self, entry: Entry) -> bool:
        """Return whether every partition that a pod needs was read back."""
        return all(
            owner in self._carried
            for container in entry.record.containers
            for owner in self.owners(entry, container.name)
        )

    def lacking(self, owners: Iterable[Owner]) -> str:
        """Return why a container's partitions are missing; empty if they exist."""
        for owner in owners:
            if owner not in self._carried:
                return self._trouble.get(owner) or "it is being made"
        return ""

    def handles(
        self, owners: Mapping[Owner, str], shares: Sequence[Share] = ()
    ) -> dict[str, dict[str, str]]:
        """Return ``RenderContext.handles`` of a container's ``shares``.

        ``owners``: the owners of one vendor's shares, as far as they are known.
        """
        shares_by_uuid = Counter(owners.values()) | Counter(share.uuid for share in shares)
        found: dict[str, dict[str, str]] = {}
        for owner, uuid in owners.items():
            one = self._carried.get(owner)
            if one is not None:
                is_only = shares_by_uuid[uuid] == 1
                part = "" if is_only else part_word(one.profile, one.start)
                found[handle_key(uuid, part)] = dict(one.handles)
        return found

    def told(self, entry: Entry) -> tuple[CarriedShare, ...]:
        """Return the MIG instances that carry the pod's shares, for the pod's state record."""
        record = entry.record
        return tuple(
            CarriedShare(
                container=owner.container,
                number=owner.number,
                names={word: one.handles[word] for word in TOLD if word in one.handles},
            )
            for owner, one in sorted(self._carried.items())
            if (owner.pod_uid, owner.allocation_id) == (record.pod_uid, record.allocation_id)
            and TOLD[0] in one.handles
        )

    def withdraw(self, device: DeviceFacts) -> DeviceFacts:
        """Return the device without foreign and faulty partitions, for the report.

        A card with a pending mode switch is cordoned; its pods stay.
        """
        left = without_foreign(device, self._foreign_by_uuid.get(device.uuid, ()))
        if any(notice.is_withheld for notice in self._notices(device.uuid)):
            left = replace(left, cordoned=True)
        return without_faulty(left, self._faulty_by_uuid.get(device.uuid, ()))

    def mode_text(self, uuid: str) -> str:
        """Return the text of the card's mode notices; empty without any."""
        return "; ".join(notice.text for notice in self._notices(uuid))

    def _notices(self, uuid: str) -> list[ModeNotice]:
        found = (notices.get(uuid) for notices in (self._switching, self._sharing))
        return [notice for notice in found if notice is not None]

    def numbered(self, uuid: str, number: int) -> Instance | None:
        """Return the partition of a device by the number that fault reports use."""
        carried = [one for one in self._carried.values() if one.uuid == uuid]
        for one in (*carried, *self._foreign_by_uuid.get(uuid, ())):
            if one.handles.get(FAULT_NUMBER) == str(number) and one.profile:
                return one
        return None
