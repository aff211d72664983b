# SPDX-License-Identifier: Apache-2.0
"""Rebuilds the fleet of a past time from stored events, in the columns of the live snapshot.

Events are those of the ledger, its states and the devices, in stream order from the oldest stored
one on. Devices and allocations without an event up to that time are older than the stream, or did
not exist: the present devices are used then, and a present allocation that was reserved before that
time. Silent agents are unknown. Times in Unix seconds.
"""

from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_registry.core.fleet import Fleet, FleetDocument, Position, document
from hami_registry.core.projection import Projection, Stored


class PastFleet:
    """The fleet at ``at_s`` while events are folded."""

    def __init__(self, at_s: float) -> None:
        """Start with nothing known."""
        self._at_s = at_s
        self._projection = Projection(liveness_s=0.0)
        self._known: set[str] = set()
        """Keys of the allocations with an event."""
        self._served: set[tuple[str, str]] = set()
        """(node, vendor) with an event."""
        self._nodes: set[str] = set()

    def devices_seen(self, devices: NodeDevices, *, time_s: float) -> None:
        """Fold canonical devices, stored at ``time_s``."""
        if time_s <= self._at_s:
            self._put(devices)

    def _put(self, devices: NodeDevices) -> None:
        self._served.add((devices.node, devices.vendor))
        self._nodes.add(devices.node)
        self._projection.devices_seen(devices)

    def record_seen(self, key: str, sequence: int, record: AllocationRecord) -> None:
        """Fold a ledger record."""
        if record.time_s <= self._at_s:
            self._known.add(key)
            self._nodes.add(record.node)
            self._projection.record_seen(key, sequence, record)

    def state_seen(self, key: str, sequence: int, state: StateRecord) -> None:
        """Fold a state."""
        if state.time_s <= self._at_s:
            self._projection.state_seen(key, sequence, state)

    def document(self, present: Stored, *, namespace: str) -> FleetDocument:
        """Return the fleet, for readers of one namespace or of all; ends the folding."""
        for devices in present.devices:
            if (devices.node, devices.vendor) not in self._served:
                self._put(devices)
        for key, record in present.records:
            if key not in self._known and record.op == "reserve" and record.time_s <= self._at_s:
                self.record_seen(key, 1, record)
                if key in present.states:
                    self._projection.state_seen(key, 1, present.states[key])
        fleet = Fleet(self._projection)
        for node in self._nodes:
            fleet.seen("ledger", 0, node)
        fleet.rebuild(len(self._nodes))
        return document(
            fleet.blocks(),
            position=Position(),
            time_s=self._at_s,
            namespace=namespace,
            silent=(),
        )
