# SPDX-License-Identifier: Apache-2.0
"""Keeps the table's devices up to date: canonical devices, heartbeats, faults (design D19).

A vendor's devices on a node are usable while the node's agent sends heartbeats for that vendor.
After a start, or when a vendor is first seen, the agent has one full timeout to send the first. A
fault counts until the canonical record is made from a report that is newer than the fault; newer is
the pair (``boot_id``, ``seq``) of the agent. The agent chooses both, so they count only where they
can be true: a fault of another run than the record's, or far ahead of it, ends with the next
report. Times are seconds of one monotonic clock, given by the caller; times inside messages are
never read.
"""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from hami_common.bounds import NODE_DEVICES_MOST
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices
from hami_common.model.device import Device
from hami_core.table.table import DeviceTable

AHEAD = 1_000
"""Numbers by which a fault may be ahead of a report that reached us after it.

The agent reports right after a fault, and numbers one heartbeat in 5 s.
"""
UNKNOWN_MOST = 4_096
"""Maximum number of faults, and of unserved vendors, kept for devices that are not known yet."""

_Served = tuple[str, str]
"""(node, vendor)."""
_Order = tuple[str, int]
"""(boot_id, seq)."""


class Memory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Full state of an inventory, from which another one can resume, see ``Inventory.memory``."""

    devices: tuple[NodeDevices, ...] = ()
    alive_until_s: tuple[tuple[str, str, float], ...] = ()
    """(node, vendor, time)."""
    dead: tuple[_Served, ...] = ()
    unserved: tuple[_Served, ...] = ()
    heard_until_s: tuple[tuple[str, str, float], ...] = ()
    """(node, vendor, time) of vendors whose devices are not known yet."""
    faults: tuple[DeviceFault, ...] = ()
    stale: tuple[_Served, ...] = ()
    emptied: tuple[_Served, ...] = ()
    """Vendors without a device on nodes that once had one, and so are still in the table."""


class Inventory:
    """Known state of the cluster's devices, except their bookings."""

    def __init__(
        self, table: DeviceTable, *, heartbeat_timeout_s: float, trusts_unheard: bool = True
    ) -> None:
        """Write to ``table``.

        Devices are unusable ``heartbeat_timeout_s`` after the last heartbeat, and before the first
        one unless ``trusts_unheard``: after a start their agent may be gone, and kubelet would
        reject their pods.
        """
        self._table = table
        self.timeout_s = heartbeat_timeout_s
        self.trusts_unheard = trusts_unheard
        self._devices: dict[_Served, NodeDevices] = {}
        self._order: dict[_Served, _Order] = {}
        self._alive_until_s: dict[_Served, float] = {}
        self._dead: set[_Served] = set()
        self._unserved: set[_Served] = set()
        """Vendors that agents reported as unserved, also of devices that are not known yet."""
        self._heard_until_s: dict[_Served, float] = {}
        """Validity of the last heartbeat for devices that are not known yet."""
        self._faults: dict[_Served, dict[str, DeviceFault]] = {}
        self._stale: set[_Served] = set()

    # --- canonical devices -----------------------------------------------------------------------

    def put(self, devices: NodeDevices, *, revision: int, now_s: float) -> bool:
        """Set the newest canonical devices of one vendor on one node.

        Returns whether they changed.
        """
        served = (devices.node, devices.vendor)
        known = self._devices.get(served)
        is_new_report = known is not None and _order(known) != _order(devices)
        self._table.upsert_node(devices, revision=revision)  # before any other change
        self._stale.discard(served)
        self._devices[served] = devices
        self._order[served] = (devices.boot_id, devices.seq)
        if served not in self._alive_until_s:
            heard_s = self._heard_until_s.pop(served, now_s)
            until_s = now_s + self.timeout_s if self.trusts_unheard else heard_s
            self._alive_until_s[served] = until_s
            if served in self._unserved or until_s <= now_s:
                self._dead.add(served)
        if served in self._dead:
            self._table.set_node_alive(*served, alive=False)
        faults = self._faults.get(served, {})
        for uuid, fault in list(faults.items()):
            if _is_over(fault, devices, is_new_report=is_new_report):
                del faults[uuid]
            else:
                self._table.set_health(fault.node, uuid, healthy=fault.healthy)
        return known is None or known.devices != devices.devices

    def excess(self, devices: NodeDevices) -> str:
        """Return the bound that the node would break with these devices, empty when none.

        The count is over all vendors, which no message type can express.
        """
        others = self.of_node(devices.node)
        count = sum(len(other.devices) for other in others if other.vendor != devices.vendor)
        count += len(devices.devices)
        if count <= NODE_DEVICES_MOST:
            return ""
        return f"{count} devices on node {devices.node}, at most {NODE_DEVICES_MOST} are used"

    def remove(self, node: str, vendor: str) -> None:
        """Remove the devices of a deleted canonical record, except for what is booked on them."""
        served = (node, vendor)
        for known in (self._devices, self._order, self._alive_until_s, self._faults):
            known.pop(served, None)
        self._dead.discard(served)
        self._stale.discard(served)
        self._table.remove_node(node, vendor)

    def begin_again(self) -> None:
        """Begin a new delivery of all records; see ``end_again``."""
        self._stale = set(self._devices)

    def end_again(self) -> None:
        """Drop the records that were not delivered since ``begin_again``."""
        for node, vendor in sorted(self._stale):
            self.remove(node, vendor)

    def devices(self) -> Iterator[NodeDevices]:
        """Yield the canonical devices as they were put."""
        return iter(self._devices.values())

    def of_node(self, node: str) -> list[NodeDevices]:
        """Return the canonical devices of one node, by vendor."""
        place = self._table.place(node)
        words = [] if place is None else [self._table.vendors.words[one] for one in place.alive]
        found = (self._devices.get((node, word)) for word in sorted(words))
        return [devices for devices in found if devices is not None]

    def silent(self) -> list[_Served]:
        """Return the (node, vendor) pairs whose agent is silent."""
        return sorted(self._dead)

    def faults(self) -> list[tuple[str, str, bool]]:
        """Return (node, UUID, healthy) of devices whose health changed after their record."""
        return [
            (fault.node, uuid, fault.healthy)
            for faults in self._faults.values()
            for uuid, fault in faults.items()
        ]

    # --- signs of life ---------------------------------------------------------------------------

    def hear(self, heartbeat: Heartbeat, *, now_s: float) -> bool:
        """Record a heartbeat: the agent of a node is alive and serves the vendors that it names.

        Vendors that it names as unserved are unusable at once: kubelet would reject their pods.
        Returns whether any vendor was unusable before, so that its devices are usable again.
        """
        returned = False
        for vendor in heartbeat.vendors:
            served = (heartbeat.node, vendor)
            self._unserved.discard(served)
            if served in self._devices:
                returned = returned or served in self._dead
                self._alive_until_s[served] = now_s + self.timeout_s
                self._set_alive(served, alive=True)
            elif served in self._heard_until_s or len(self._heard_until_s) < UNKNOWN_MOST:
                self._heard_until_s[served] = now_s + self.timeout_s
        for vendor in heartbeat.unserved:
            served = (heartbeat.node, vendor)
            self._heard_until_s.pop(served, None)
            if served in self._devices or len(self._unserved) < UNKNOWN_MOST:
                self._unserved.add(served)
            if served in self._devices:
                self._alive_until_s[served] = now_s
                self._set_alive(served, alive=False)
        return returned

    def deaf(self, *, now_s: float) -> None:
        """Restart the timeout of each live agent after we could not receive heartbeats."""
        for served in self._alive_until_s.keys() - self._dead:
            self._alive_until_s[served] = now_s + self.timeout_s

    def tick(self, *, now_s: float) -> list[_Served]:
        """Stop using devices whose agent fell silent; returns the pairs that this changes."""
        silent = [
            served
            for served, until_s in self._alive_until_s.items()
            if until_s <= now_s and served not in self._dead
        ]
        for served in silent:
            self._set_alive(served, alive=False)
        return silent

    def alive_count(self) -> int:
        """Return the number of (node, vendor) pairs with a live agent."""
        return len(self._alive_until_s) - len(self._dead)

    def silent_count(self) -> int:
        """Return the number of (node, vendor) pairs without a live agent."""
        return len(self._dead)

    def _set_alive(self, served: _Served, *, alive: bool) -> None:
        if alive:
            self._dead.discard(served)
        else:
            self._dead.add(served)
        self._table.set_node_alive(*served, alive=alive)

    # --- faults ----------------------------------------------------------------------------------

    def take_fault(self, fault: DeviceFault) -> bool:
        """Use or stop using one device at once; false when the canonical record is newer."""
        served = (fault.node, fault.vendor)
        order, known = _order(fault), self._order.get(served)
        before = self._faults.get(served, {}).get(fault.uuid)
        if known is not None and order <= known:
            return False
        if before is not None and order <= _order(before):
            # A fault of the record's run is believed over a fault of another run.
            is_proven = known is not None and fault.boot_id == known[0] != before.boot_id
            if not is_proven:
                return False
        if before is None and not self._has_capacity(fault):
            return False
        self._faults.setdefault(served, {})[fault.uuid] = fault
        self._table.set_health(fault.node, fault.uuid, healthy=fault.healthy)
        return True

    def _has_capacity(self, fault: DeviceFault) -> bool:
        """Return whether a fault of one more device is kept."""
        devices = self._devices.get((fault.node, fault.vendor))
        if devices is not None:
            return any(device.uuid == fault.uuid for device in devices.devices)
        unknown = (len(found) for served, found in self._faults.items() if not self._knows(served))
        return sum(unknown) < UNKNOWN_MOST

    def _knows(self, served: _Served) -> bool:
        return served in self._devices

    # --- as a document ---------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Return everything that answers depend on, by node and vendor."""
        return Memory(
            devices=tuple(self._devices[served] for served in sorted(self._devices)),
            alive_until_s=tuple(
                (*served, until_s) for served, until_s in self._alive_until_s.items()
            ),
            dead=tuple(sorted(self._dead)),
            unserved=tuple(sorted(self._unserved)),
            heard_until_s=tuple(
                (*served, until_s) for served, until_s in self._heard_until_s.items()
            ),
            faults=tuple(
                faults[uuid]
                for _, faults in sorted(self._faults.items())
                for uuid in sorted(faults)
            ),
            stale=tuple(sorted(self._stale)),
            emptied=tuple(
                served
                for served, known in sorted(self._devices.items())
                if not known.devices and self._is_in_table(*served)
            ),
        )

    def _is_in_table(self, node: str, vendor: str) -> bool:
        place = self._table.place(node)
        return place is not None and self._table.vendors.find(vendor) in place.alive

    def resume(self, memory: Memory) -> None:
        """Resume in an empty table and inventory from the point where ``memory`` was taken."""
        for devices in memory.devices:
            served = (devices.node, devices.vendor)
            if served in memory.emptied:
                gone = Device(
                    uuid="",
                    vendor=devices.vendor,
                    index=0,
                    type="",
                    memory_mib=0,
                    capacity_mib=0,
                )
                self._table.upsert_node(replace(devices, devices=(gone,)))
            self._table.upsert_node(devices)
            self._devices[served] = devices
            self._order[served] = (devices.boot_id, devices.seq)
        self._alive_until_s = {
            (node, vendor): until for node, vendor, until in memory.alive_until_s
        }
        self._dead = set(memory.dead)
        self._unserved = set(memory.unserved)
        self._heard_until_s = {
            (node, vendor): until for node, vendor, until in memory.heard_until_s
        }
        self._stale = set(memory.stale)
        for served in sorted(self._dead):
            self._table.set_node_alive(*served, alive=False)
        for fault in memory.faults:
            self._faults.setdefault((fault.node, fault.vendor), {})[fault.uuid] = fault
            self._table.set_health(fault.node, fault.uuid, healthy=fault.healthy)


def _order(message: NodeDevices | DeviceFault) -> _Order:
    return message.boot_id, message.seq


def _is_over(fault: DeviceFault, devices: NodeDevices, *, is_new_report: bool) -> bool:
    """Return whether a fault ends with this record.

    ``is_new_report``: it is of another report than before.
    """
    if not is_new_report:
        return _order(fault) <= _order(devices)
    return fault.boot_id != devices.boot_id or not 0 < fault.seq - devices.seq <= AHEAD
