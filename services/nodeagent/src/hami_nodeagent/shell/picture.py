# SPDX-License-Identifier: Apache-2.0
"""Holds the agent's current state in one place, and signals its changes.

Owned by the event loop: changed and read between two awaits, never from a thread. Its writers:
pods (``shell.pods``), ledger records (``shell.feed``), states (``shell.states``), devices and
faults (``shell.inventory``), partitions (``shell.partitions``), grants (``shell.allocate``,
``shell.check``), kubelet's run (``shell.kubelet``), the node's status (``shell.nodestatus``),
unlimited pods (``shell.loaders``), foreign use (``shell.usage``), bursts (``shell.bursts``).
Decisions read it through ``view``.
"""

from collections.abc import Callable, Collection, Mapping

import anyio
from msgspec import Struct

from hami_common.events.allocation import StateRecord, is_by_claim
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Burst, Device
from hami_common.model.placement import ContainerShares
from hami_common.skus.expansion import ACCELERATORS
from hami_nodeagent.core.board import Board, DevicesChanged
from hami_nodeagent.core.claims import Entry, View
from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.core.podbook import PodBook
from hami_nodeagent.core.reporting import Failure
from hami_nodeagent.core.splits import Splits


class UnreadablePod(Struct, frozen=True, kw_only=True):
    """A pod of this node that cannot be read."""

    namespace: str
    name: str
    resources: frozenset[str]
    """Resources served by this agent that the pod's object mentions."""


class Picture:
    """State of this node as known to the agent."""

    def __init__(
        self,
        *,
        node: str,
        grants: GrantBook | None = None,
        advertised: Callable[[Device], Collection[str]] | None = None,
    ) -> None:
        """``advertised`` returns the count resources that offer a device; ``None``: all of them."""
        self.node = node
        self._advertised = advertised
        self._served_resources: set[tuple[str, str]] = set()
        self.pods = PodBook()
        self.entries_by_uid: dict[str, Entry] = {}
        self.states_by_uid: dict[str, StateRecord] = {}
        self.grants = grants or GrantBook()
        self.canonical_by_vendor: dict[str, NodeDevices] = {}
        self.faulty_by_vendor: dict[str, frozenset[str]] = {}
        self.sound_by_vendor: dict[str, frozenset[str]] = {}
        self.served: frozenset[str] = frozenset()
        """Vendors whose plugin is registered with kubelet."""
        self.in_status: frozenset[str] = frozenset()
        """Of these, the vendors whose devices the node's status has shown since."""
        self.is_leaving = False
        """The agent stops: no vendor counts as served, so that no more pods are placed."""
        self.failures_by_uid: dict[str, Failure] = {}
        """Allocations that this agent marks as failed, by pod uid."""
        self.unlimited_by_uid: dict[str, str] = {}
        """Reason why a pod's share is not enforced although its containers were given the library,
        by pod uid; written by ``shell.loaders``."""
        self.unreadable_pods: dict[str, UnreadablePod] = {}
        """Pods that were never readable, by uid: a call of kubelet may be for one of them."""
        self.unreadable_by_uid: dict[tuple[str, str], str] = {}
        """Reason why the newest record or state of a pod is unreadable, by (uid, ``record`` or
        ``state``): the known older one may be stale."""
        self.allocated_by_uid: dict[str, tuple[ContainerShares, ...]] = {}
        """Shares by the allocations of prepared claims, by the uid of the record: a resize changes
        the record only; written by ``shell.prepare``."""
        self.partitions = Board()
        self._foreign_by_uuid: dict[str, int] | None = None
        self._bursts_by_uuid: Mapping[str, tuple[Burst, ...]] | None = None
        self.bounds_mib: Mapping[tuple[tuple[str, str], str], int] = {}
        """Memory granted now, by owner and device, of shares with a limit above their request."""
        self.ledger_known = False
        """All records of this node that the ledger holds have arrived."""
        self.pods_known = False
        """All pods of this node that exist have been listed."""
        self.view = View(
            pods_by_name=self.pods.by_name,
            entries_by_uid=self.entries_by_uid,
            states_by_uid=self.states_by_uid,
            grants=self.grants,
            devices_by_uuid={},
            lists_active_only=False,
            bus_connected=False,
        )
        self._changed = anyio.Event()

    def note_change(self) -> None:
        """Wake all tasks that wait for a change."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    @property
    def changed(self) -> anyio.Event:
        """Return the event that the next change sets: take it before reading, wait on it after."""
        return self._changed

    async def wait_change(self, changed: anyio.Event, limit_s: float) -> None:
        """Wait until ``changed`` is set, for at most ``limit_s``."""
        with anyio.move_on_after(limit_s):
            await changed.wait()

    def set_canonical(self, canonical: NodeDevices) -> bool:
        """Store the registry's record of a vendor's devices; true if the devices changed."""
        known = self.canonical_by_vendor.get(canonical.vendor)
        self.canonical_by_vendor[canonical.vendor] = canonical
        if known is not None and known.devices == canonical.devices:
            return False
        self.view.devices_by_uuid = {
            device.uuid: device
            for of_vendor in self.canonical_by_vendor.values()
            for device in of_vendor.devices
        }
        self.partitions.apply(DevicesChanged(devices_by_uuid=self.view.devices_by_uuid))
        self.note_change()
        return True

    def set_foreign(self, mib_by_uuid: Mapping[str, int]) -> None:
        """Store the memory of each device that no allocation covers."""
        if self._foreign_by_uuid != mib_by_uuid:
            self._foreign_by_uuid = dict(mib_by_uuid)
            self.note_change()

    def foreign_mib(self, uuid: str) -> int:
        """Return the memory of the device that no allocation covers.

        Before the first sample it is that of the registry's record, so that a restart of the agent
        does not offer the memory.
        """
        if self._foreign_by_uuid is None:
            device = self.view.devices_by_uuid.get(uuid)
            return device.foreign_mib if device is not None else 0
        return self._foreign_by_uuid.get(uuid, 0)

    def set_bursts(self, bursts_by_uuid: Mapping[str, tuple[Burst, ...]]) -> bool:
        """Store what pods use above their requests; return whether it changed.

        Only the next report depends on it, so no other task is woken.
        """
        is_new = self._bursts_by_uuid != bursts_by_uuid
        self._bursts_by_uuid = bursts_by_uuid
        return is_new

    @property
    def has_bursts(self) -> bool:
        """Return whether the next report has bursts, or may have those of the last run."""
        return self._bursts_by_uuid is None or bool(self._bursts_by_uuid)

    def bursts(self, uuid: str) -> tuple[Burst, ...]:
        """Return what pods use of the device above their requests; see ``foreign_mib``."""
        if self._bursts_by_uuid is None:
            device = self.view.devices_by_uuid.get(uuid)
            return device.bursts if device is not None else ()
        return self._bursts_by_uuid.get(uuid, ())

    def is_unreadable(self, listed: Collection[tuple[str, str]], resource: str) -> str:
        """Return why a call for ``resource`` may be for a pod that cannot be read; empty if not.

        ``listed``: (namespace, name) of the pods that kubelet lists.
        """
        for pod in self.unreadable_pods.values():
            if resource in pod.resources and (pod.namespace, pod.name) in listed:
                return (
                    f"pod {pod.namespace}/{pod.name}, which asks for {resource} too, cannot be "
                    "read, so it may be the one that waits; see the agent's log, and delete it"
                )
        return ""

    def unreadable_of(self, uid: str) -> str:
        """Return why the known record or state of a pod may be stale; empty if both are current."""
        for what in ("record", "state"):
            if problem := self.unreadable_by_uid.get((uid, what)):
                return f"the newest {what} of the allocation cannot be read: {problem}"
        return ""

    def note_unreadable(self, uid: str, what: str, problem: str) -> None:
        """Store why a pod's newest ``record`` or ``state`` is unreadable; empty: it is readable."""
        if problem:
            self.unreadable_by_uid[uid, what] = problem
        elif self.unreadable_by_uid.pop((uid, what), ""):
            self.note_change()

    def note_served(self, vendor: str, *, served: bool, resource: str = "") -> None:
        """Store whether kubelet has the plugin of a vendor's resource registered.

        A vendor is served while at least one of its plugins is registered. The neutral resource,
        which has no vendor, does not count.
        """
        if not vendor:
            return
        if served:
            self._served_resources.add((vendor, resource))
        else:
            self._served_resources.discard((vendor, resource))
        now = frozenset(word for word, _ in self._served_resources)
        if now != self.served:
            self.served = now
            self.in_status &= now
            self.note_change()

    def note_in_status(self, vendor: str) -> None:
        """Store that the node's status shows devices of a vendor whose plugin is registered."""
        self.in_status |= {vendor} & self.served
        self.note_change()

    def offered(self) -> frozenset[str]:
        """Return the vendors whose devices pods may be given now."""
        return frozenset() if self.is_leaving else self.in_status

    def note_leaving(self) -> None:
        """Store that the agent stops."""
        self.is_leaving = True
        self.note_change()

    def awaited(self) -> tuple[str, ...]:
        """Return the pods with a reservation here that kubelet has not asked devices for yet."""
        return tuple(
            f"{entry.record.namespace}/{entry.record.pod}"
            for uid, entry in self.entries_by_uid.items()
            if entry.record.op != "release"
            and not is_by_claim(entry.record)  # kubelet retries to prepare a claim
            and not self.grants.of_pod(uid)
            and (self.pods.find(uid) is None or self.pods.is_alive(uid))
        )

    def set_health(self, vendor: str, *, faulty: frozenset[str], sound: frozenset[str]) -> None:
        """Store the vendor's devices that this node found unusable, and those it found usable."""
        known = (self.faulty_by_vendor.get(vendor), self.sound_by_vendor.get(vendor))
        if known == (faulty, sound):
            return
        self.faulty_by_vendor[vendor] = faulty
        self.sound_by_vendor[vendor] = sound
        self.view.faulty = frozenset().union(*self.faulty_by_vendor.values())
        self.view.sound = frozenset().union(*self.sound_by_vendor.values())
        self.note_change()

    def splits(self, vendor: str, resource: str) -> Splits:
        """Return the ids to advertise now for a vendor's resource, or the neutral one."""
        devices = [
            one
            for word, canonical in sorted(self.canonical_by_vendor.items())
            if vendor in ("", word)
            for one in canonical.devices
            if self._offers(one, resource)
        ]
        return Splits.of_devices(
            devices,
            faulty=self.faulty_by_vendor.get(vendor, frozenset()) if vendor else self.view.faulty,
            held=self.grants.held_ids(resource),
        )

    def _offers(self, device: Device, resource: str) -> bool:
        if self._advertised is None:
            return True
        names = self._advertised(device)
        return bool(names) if resource == ACCELERATORS else resource in names
