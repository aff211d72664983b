# SPDX-License-Identifier: Apache-2.0
"""Read models for the API, folded from the bus.

Input is the content of the buckets and the event stream (canonical devices, ledger records, states,
decisions) plus heartbeats; output are views sorted by name. A projection never decides anything:
the ledger and the scheduler do. Applying an entry is idempotent. Memory in MiB, compute in percent
of one device, times in Unix seconds.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator

from msgspec import Struct, field
from msgspec.structs import replace

from hami_common.events.allocation import (
    AllocationRecord,
    AllocationState,
    StateRecord,
    joined_state,
)
from hami_common.events.decision import DecisionRecord, Moment
from hami_common.events.inventory import NodeDevices
from hami_common.model.isolation import Isolation, isolation_of
from hami_common.model.placement import NOTHING, Booked, ContainerShares, booked_by_device
from hami_registry.core.capacity import burst_mib
from hami_registry.core.stranded import Holding

DECISIONS_PER_POD = 8
PODS_REMEMBERED = 20_000
PODS_DETAILED = 1000
"""Pods of which the newest details of devices are kept, up to ``DETAIL_BYTES_MOST`` each."""


class DeviceView(Struct, frozen=True, kw_only=True):
    """One device with its booked amounts."""

    node: str
    vendor: str
    uuid: str
    index: int
    type: str
    memory_mib: int
    capacity_mib: int
    overcommit: str
    """Mechanism that keeps memory beyond ``memory_mib``: ``managed`` or ``recall``; empty: none."""
    booked_mib: int
    capacity_core_pct: int
    booked_core_pct: int
    slots: int
    booked_slots: int
    exclusive: bool
    foreign_mib: int
    """Memory in use that no allocation covers; new shares do not get it."""
    burst_mib: int
    """Memory that pods use beyond their requests; new shares do not get it until they end."""
    healthy: bool
    health_reason: str
    cordoned: bool
    numa: int | None
    mode: str
    isolation: Isolation
    """Class and grades of a share of it; a pod that has it whole shares it with no other."""


class NodeView(Struct, frozen=True, kw_only=True):
    """One node's totals over all its devices."""

    node: str
    vendors: tuple[str, ...]
    alive: bool
    """True when the node's agent sent a heartbeat within the liveness limit."""
    last_heartbeat_s: float
    devices: int
    devices_usable: int
    memory_mib: int
    capacity_mib: int
    booked_mib: int
    allocations: int
    config_generation: int
    problem: str


class AllocationView(Struct, frozen=True, kw_only=True):
    """One allocation, joined from ledger and state."""

    namespace: str
    pod: str
    pod_uid: str
    node: str
    state: AllocationState
    allocation_id: str
    ledger_seq: int
    containers: tuple[ContainerShares, ...]
    reserved_s: float
    state_s: float
    code: str
    reason: str
    enforcement: str
    origin: str
    """``claim``: a ResourceClaim holds the shares, and ``pod`` and ``pod_uid`` are the claim's."""
    claim: str
    """ResourceClaim through which the pod gets its shares; empty: through the device plugin."""
    held_for: str = ""
    """Purpose of a reservation that no bind has made or taken over yet."""
    queue: str = ""
    """Queue that the pod names; empty: its namespace decides."""
    priority_class: str = ""
    sku: str = ""
    """SKU that the pod was admitted with, ``<name>@<version>``; empty without one."""
    service_class: str = field(default="", name="class")
    """Class of the SKU, or that the pod names; empty without either."""


class ExplainView(Struct, frozen=True, kw_only=True):
    """Everything known about a pod's placement and its reasons, newest decision first."""

    namespace: str
    pod: str
    decisions: tuple[DecisionRecord, ...]
    """One refusal has details of devices, the newest recorded with them: of up to
    ``PODS_DETAILED`` pods.
    """
    allocations: tuple[AllocationView, ...]
    moment: Moment | None = None
    """With a time: all nodes at the newest recorded filter up to it."""

    def for_namespace(self) -> "ExplainView":
        """Return it for readers of this namespace only, see ``DecisionRecord.for_namespace``."""
        return replace(
            self,
            decisions=tuple(one.for_namespace() for one in self.decisions),
            moment=self.moment.for_namespace() if self.moment is not None else None,
        )


class Stored(Struct, frozen=True, kw_only=True):
    """Everything that a projection has of the ledger and the devices."""

    devices: tuple[NodeDevices, ...]
    records: tuple[tuple[str, AllocationRecord], ...]
    """By key, without released allocations."""
    states: dict[str, StateRecord]


class _Allocation(Struct, kw_only=True):
    sequence: int = 0
    record: AllocationRecord | None = None
    state_revision: int = 0
    state: StateRecord | None = None


class Projection:
    """All read models of one registry replica."""

    def __init__(self, *, liveness_s: float) -> None:
        """Report an agent as alive if its last heartbeat is younger than ``liveness_s``."""
        self._liveness_s = liveness_s
        self._devices: dict[str, dict[str, NodeDevices]] = {}
        """By node and vendor."""
        self._allocations: dict[str, _Allocation] = {}
        self._live: dict[str, set[str]] = {}
        """Keys of the allocations that are not released, by node."""
        self._heartbeats: dict[str, dict[str, float]] = {}
        self._decisions: OrderedDict[tuple[str, str], deque[DecisionRecord]] = OrderedDict()
        """Without details of devices."""
        self._detailed: OrderedDict[tuple[str, str], DecisionRecord] = OrderedDict()
        """Newest decision with details of devices, that of the oldest first."""

    def devices_seen(self, devices: NodeDevices) -> None:
        """Fold canonical devices of one vendor on one node."""
        self._devices.setdefault(devices.node, {})[devices.vendor] = devices

    def record_seen(self, key: str, sequence: int, record: AllocationRecord) -> None:
        """Fold a ledger record; one older than the known record is ignored."""
        known = self._allocations.setdefault(key, _Allocation())
        if sequence > known.sequence:
            known.sequence, known.record = sequence, record
            live = self._live.setdefault(record.node, set())
            if record.op == "release":
                live.discard(key)
            else:
                live.add(key)

    def state_seen(self, key: str, revision: int, state: StateRecord) -> None:
        """Fold a state record; one older than the known record is ignored."""
        known = self._allocations.setdefault(key, _Allocation())
        if revision > known.state_revision:
            known.state_revision, known.state = revision, state

    def heartbeat_seen(self, node: str, vendors: tuple[str, ...], *, now_s: float) -> None:
        """Fold an agent's heartbeat, at our own clock."""
        for vendor in vendors:
            self._heartbeats.setdefault(node, {})[vendor] = now_s

    def decision_seen(self, decision: DecisionRecord) -> None:
        """Fold the decisions of one message.

        The newest few are kept, of a bounded number of pods.
        """
        key = (decision.namespace, decision.pod)
        kept = self._decisions.pop(key, None) or deque(maxlen=DECISIONS_PER_POD)
        for full in decision.unfolded():
            one = replace(full, request=None) if full.request is not None else full
            plain = _plain(one)
            if plain not in kept:
                kept.appendleft(plain)
            if one.closest:
                self._detailed[key] = one
                self._detailed.move_to_end(key)
        self._decisions[key] = kept
        while len(self._decisions) > PODS_REMEMBERED:
            oldest, _ = self._decisions.popitem(last=False)
            self._detailed.pop(oldest, None)
        while len(self._detailed) > PODS_DETAILED:
            self._detailed.popitem(last=False)

    def reset_ledger(self) -> None:
        """Drop the ledger's records after the bus lost them; they will be delivered again."""
        for known in self._allocations.values():
            known.sequence, known.record = 0, None
        self._live.clear()
        self._drop_empty()

    def reset_states(self) -> None:
        """Drop the states after the bus lost them; they will be delivered again."""
        for known in self._allocations.values():
            known.state_revision, known.state = 0, None
        self._drop_empty()

    def _drop_empty(self) -> None:
        self._allocations = {
            key: known for key, known in self._allocations.items() if known.record or known.state
        }

    def reset_devices(self) -> None:
        """Drop the canonical devices after the bus lost them; they will be delivered again."""
        self._devices.clear()

    def allocations(
        self, *, namespace: str | None = None, released: bool = False
    ) -> list[AllocationView]:
        """Return allocations, sorted by namespace, pod and ledger sequence; released on request."""
        views = [
            view
            for known in self._allocations.values()
            if (view := _allocation_view(known)) is not None
            and (released or view.state != "released")
            and namespace in (None, view.namespace)
        ]
        return sorted(views, key=lambda view: (view.namespace, view.pod, view.ledger_seq))

    def _booked(self) -> dict[str, Booked]:
        total: dict[str, Booked] = {}
        for known in self._allocations.values():
            if known.record is not None:
                for uuid, booked in booked_by_device(known.record.containers).items():
                    total[uuid] = total.get(uuid, NOTHING).plus(booked)
        return total

    def holdings(self) -> dict[str, Holding]:
        """Return the booked amounts and their pods, by device UUID."""
        pods: dict[str, set[str]] = {}
        for known in self._allocations.values():
            if known.record is not None:
                for uuid in booked_by_device(known.record.containers):
                    name = f"{known.record.namespace}/{known.record.pod}"
                    pods.setdefault(uuid, set()).add(name)
        return {
            uuid: Holding(booked=booked, pods=tuple(sorted(pods[uuid])))
            for uuid, booked in self._booked().items()
        }

    def devices(self, *, node: str | None = None, vendor: str | None = None) -> list[DeviceView]:
        """Return devices with their bookings, sorted by node, vendor and index."""
        booked = self._booked()
        views = [
            DeviceView(
                node=published.node,
                vendor=device.vendor,
                uuid=device.uuid,
                index=device.index,
                type=device.type,
                memory_mib=device.memory_mib,
                capacity_mib=device.capacity_mib,
                overcommit=device.overcommit if device.capacity_mib > device.memory_mib else "",
                booked_mib=(held := booked.get(device.uuid, NOTHING)).memory_mib,
                capacity_core_pct=device.capacity_core_pct,
                booked_core_pct=held.core_pct,
                slots=device.slots,
                booked_slots=held.slots,
                exclusive=held.exclusive,
                foreign_mib=device.foreign_mib,
                burst_mib=burst_mib(device),
                healthy=device.healthy,
                health_reason=device.health_reason,
                cordoned=device.cordoned,
                numa=device.numa,
                mode=device.mode,
                isolation=isolation_of(
                    device.vendor,
                    divided=bool(device.partitions),
                    exclusive=False,
                    mode=device.mode,
                    memory_cap=device.memory_cap,
                ),
            )
            for published in self._published(node)
            if vendor in (None, published.vendor)
            for device in published.devices
        ]
        return sorted(views, key=lambda view: (view.node, view.vendor, view.index))

    def _published(self, node: str | None) -> Iterator[NodeDevices]:
        if node is None:
            for by_vendor in self._devices.values():
                yield from by_vendor.values()
        else:
            yield from self._devices.get(node, {}).values()

    def devices_of(self, node: str) -> list[NodeDevices]:
        """Return the canonical devices of a node, sorted by vendor."""
        return [devices for _, devices in sorted(self._devices.get(node, {}).items())]

    def published(self) -> Iterator[NodeDevices]:
        """Return the canonical devices of all nodes."""
        return self._published(None)

    def ledger_records(self) -> list[AllocationRecord]:
        """Return the newest ledger record of each pod on each node, releases too."""
        return [known.record for known in self._allocations.values() if known.record is not None]

    def live_of(self, node: str) -> list[AllocationView]:
        """Return the allocations of a node that are not released, sorted by ledger sequence."""
        known = (self._allocations[key] for key in self._live.get(node, ()))
        views = [view for one in known if (view := _allocation_view(one)) is not None]
        return sorted(views, key=lambda view: view.ledger_seq)

    def live_records(self, node: str) -> list[AllocationRecord]:
        """Return the newest ledger records of a node's allocations that are not released."""
        known = (self._allocations[key].record for key in self._live.get(node, ()))
        return [record for record in known if record is not None]

    def forget(self, key: str) -> None:
        """Drop an allocation, if it is released."""
        known = self._allocations.get(key)
        if known is not None and known.record is not None and known.record.op == "release":
            del self._allocations[key]

    def node_names(self) -> list[str]:
        """Return the nodes that ever reported a device, sorted."""
        return sorted(self._devices)

    def placed_uids(self) -> set[str]:
        """Return the uids of the pods to which the ledger gives devices, not only holds them."""
        return {
            known.record.pod_uid
            for known in self._allocations.values()
            if known.record is not None
            and known.record.op != "release"
            and not known.record.held_for
        }

    def stored(self) -> Stored:
        """Return the present devices, live records and their states."""
        live = [
            (key, known.record, known.state)
            for key, known in self._allocations.items()
            if known.record is not None and known.record.op != "release"
        ]
        return Stored(
            devices=tuple(self._published(None)),
            records=tuple((key, record) for key, record, _ in live),
            states={key: state for key, _, state in live if state is not None},
        )

    def silent(self, *, now_s: float) -> list[str]:
        """Return the nodes without a heartbeat within the liveness limit, sorted."""
        since_s = now_s - self._liveness_s
        return sorted(
            node
            for node in self._devices
            if max(self._heartbeats.get(node, {}).values(), default=0.0) < since_s
        )

    def nodes(self, *, now_s: float) -> list[NodeView]:
        """Return nodes with totals, sorted by name."""
        by_node: dict[str, list[DeviceView]] = {}
        for view in self.devices():
            by_node.setdefault(view.node, []).append(view)
        allocations: dict[str, int] = {}
        for allocation in self.allocations():
            allocations[allocation.node] = allocations.get(allocation.node, 0) + 1
        return [
            self._node_view(name, by_node.get(name, []), allocations.get(name, 0), now_s)
            for name in sorted(self._devices)
        ]

    def _node_view(
        self, name: str, devices: list[DeviceView], allocations: int, now_s: float
    ) -> NodeView:
        published = self.devices_of(name)
        last = max(self._heartbeats.get(name, {}).values(), default=0.0)
        return NodeView(
            node=name,
            vendors=tuple(p.vendor for p in published),
            alive=now_s - last <= self._liveness_s,
            last_heartbeat_s=last,
            devices=len(devices),
            devices_usable=sum(d.healthy and not d.cordoned for d in devices),
            memory_mib=sum(d.memory_mib for d in devices),
            capacity_mib=sum(d.capacity_mib for d in devices),
            booked_mib=sum(d.booked_mib for d in devices),
            allocations=allocations,
            config_generation=max((p.config_generation for p in published), default=0),
            problem="; ".join(p.problem for p in published if p.problem),
        )

    def _explained(self, key: tuple[str, str]) -> tuple[DecisionRecord, ...]:
        """Return the decisions about a pod with the newest details, newest first."""
        decisions = list(self._decisions.get(key, ()))
        detailed = self._detailed.get(key)
        if detailed is None:
            return tuple(decisions)
        plain = _plain(detailed)
        if plain not in decisions:
            return (*decisions, detailed)
        return tuple(detailed if one == plain else one for one in decisions)

    def explain(self, namespace: str, pod: str) -> ExplainView | None:
        """Return the known facts about one pod, ``None`` without any."""
        decisions = self._explained((namespace, pod))
        allocations = tuple(
            view for view in self.allocations(namespace=namespace, released=True) if view.pod == pod
        )
        if not decisions and not allocations:
            return None
        return ExplainView(
            namespace=namespace, pod=pod, decisions=decisions, allocations=allocations
        )


def _plain(decision: DecisionRecord) -> DecisionRecord:
    return replace(decision, closest=()) if decision.closest else decision


def _allocation_view(known: _Allocation) -> AllocationView | None:
    record = known.record
    if record is None:
        return None
    state = known.state
    if state is not None and state.allocation_id != record.allocation_id:
        state = None
    return AllocationView(
        namespace=record.namespace,
        pod=record.pod,
        pod_uid=record.pod_uid,
        node=record.node,
        state=joined_state(record, state),
        allocation_id=record.allocation_id,
        ledger_seq=known.sequence,
        containers=record.containers,
        reserved_s=record.time_s,
        state_s=state.time_s if state else 0.0,
        code=state.code if state else "",
        reason=(state.reason if state else "") or record.reason,
        enforcement=state.enforcement if state else "",
        origin=record.origin,
        claim=record.claim,
        held_for=record.held_for,
        queue=record.account.queue if record.account else "",
        sku=record.sku,
        service_class=record.service_class,
        priority_class=record.account.priority_class if record.account else "",
    )
