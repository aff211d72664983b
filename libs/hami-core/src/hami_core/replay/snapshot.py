# SPDX-License-Identifier: Apache-2.0
"""Everything a decision depends on, as one document: written by a running scheduler, read by tools.

A table built from a snapshot answers filter, prioritize and bind exactly as the scheduler did when
it took it (design D15). Sequences are kept, so that records can be compared. Times are the writer's
and informative.

A stimulus log begins with a snapshot that has ``exact``: with it a replay goes on where the writer
was, with the same leases, fences, signs of life and network (see ``resume``).
"""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from hami_common.events.inventory import NodeDevices
from hami_common.model.request import PlacementPolicy, PodRequest
from hami_core.ledger.ledger import Ledger, LedgerMemory
from hami_core.ledger.repair import Holding
from hami_core.ledger.stimuli import FeedSynced, RecordSeen, Repaired, StateSeen
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.documents import QuotaMemory, Quotas
from hami_core.table.inventory import Inventory, Memory
from hami_core.table.table import DeviceTable


class Unusable(Struct, frozen=True, kw_only=True, array_like=True):
    """One device whose health is not what its canonical record says."""

    node: str
    uuid: str
    healthy: bool


class Silent(Struct, frozen=True, kw_only=True, array_like=True):
    """A vendor on a node whose agent is not heard."""

    node: str
    vendor: str


class Exact(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What decides later answers and a table does not show."""

    inventory_revision: int
    heartbeat_timeout_s: float
    inventory: Memory
    ledger: LedgerMemory
    domains: dict[str, tuple[str, ...]] = {}
    """Where nodes stand in the network."""
    depth: int = 0
    """Levels of the longest path ever seen."""
    withheld: tuple[tuple[str, str], ...] = ()
    """(node, vendor) pairs of which nothing new is given, see ``DeviceTable.set_withheld``."""
    quota: QuotaMemory | None = None
    """Absent in logs of schedulers that did not record quotas."""


class Snapshot(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Devices and live allocations at one moment."""

    snapshot_id: str
    time_s: float
    writer: str = ""
    policy: PlacementPolicy = PlacementPolicy()
    """Placement policy of pods that name none."""
    devices: tuple[NodeDevices, ...] = ()
    silent: tuple[Silent, ...] = ()
    withheld: tuple[Silent, ...] = ()
    """Nodes, or vendors on them, of which nothing new is given; an empty vendor: all."""
    faults: tuple[Unusable, ...] = ()
    holdings: tuple[Holding, ...] = ()
    domains: dict[str, tuple[str, ...]] = {}
    """Where nodes stand in the network, by node, widest domain first."""
    waiting: tuple[PodRequest, ...] = ()
    """What pods ask for that have no node yet."""
    quotas: Quotas = Quotas()
    """What limits pods beside room on devices."""
    exact: Exact | None = None


class Parts(NamedTuple):
    """What decides."""

    ledger: Ledger
    inventory: Inventory
    quota: QuotaLedger


def take_exact(parts: Parts, *, policy: PlacementPolicy, now_s: float) -> Snapshot:
    """The present state in full; cheap, because it refers to what is frozen and copies little."""
    ledger, inventory, quota = parts
    memory, known = ledger.memory(), inventory.memory()
    table = ledger.table
    return Snapshot(
        snapshot_id=ledger.snapshot_id,
        time_s=now_s,
        writer=memory.writer,
        policy=policy,
        exact=Exact(
            inventory_revision=table.inventory_revision,
            heartbeat_timeout_s=inventory.timeout_s,
            inventory=known,
            ledger=memory,
            domains=table.domains.known(),
            depth=table.domains.depth,
            withheld=tuple(table.withheld()),
            quota=quota.memory(),
        ),
    )


def resume(exact: Exact) -> Parts:
    """The parts as they were when ``exact`` was taken."""
    table = DeviceTable()
    inventory = Inventory(table, heartbeat_timeout_s=exact.heartbeat_timeout_s)
    inventory.resume(exact.inventory)
    for node, path in exact.domains.items():
        table.set_domain(node, path)
    table.domains.depth = exact.depth
    for node, vendor in exact.withheld:
        table.set_withheld(node, vendor, withheld=True)
    table.inventory_revision = exact.inventory_revision
    memory = exact.ledger
    ledger = Ledger(
        table,
        writer=memory.writer,
        lease_s=memory.lease_s,
        fence_delay_s=memory.fence_delay_s,
    )
    ledger.resume(memory)
    quota = QuotaLedger()
    if exact.quota is not None:
        quota.resume(exact.quota)
    return Parts(ledger, inventory, quota)


def take(  # noqa: PLR0913 - the parts of one document, by name
    ledger: Ledger,
    *,
    devices: Iterable[NodeDevices],
    silent: Iterable[tuple[str, str]],
    faults: Iterable[tuple[str, str, bool]],
    policy: PlacementPolicy,
    writer: str,
    now_s: float,
    waiting: Iterable[PodRequest] = (),
    quotas: Quotas | None = None,
) -> Snapshot:
    """The present state as a document."""
    return Snapshot(
        snapshot_id=ledger.snapshot_id,
        time_s=now_s,
        writer=writer,
        policy=policy,
        devices=tuple(devices),
        silent=tuple(Silent(node=node, vendor=vendor) for node, vendor in silent),
        withheld=tuple(
            Silent(node=node, vendor=vendor) for node, vendor in ledger.table.withheld()
        ),
        faults=tuple(
            Unusable(node=node, uuid=uuid, healthy=healthy) for node, uuid, healthy in faults
        ),
        holdings=tuple(ledger.holdings()),
        domains=ledger.table.domains.known(),
        waiting=tuple(waiting),
        quotas=quotas or Quotas(),
    )


def load(snapshot: Snapshot) -> Ledger:
    """A ledger, with its table, that decides as the one did which was written down."""
    if snapshot.exact is not None:
        return resume(snapshot.exact).ledger
    table = DeviceTable()
    for devices in snapshot.devices:
        table.upsert_node(devices)
    for silent in snapshot.silent:
        table.set_node_alive(silent.node, silent.vendor, alive=False)
    for place in snapshot.withheld:
        table.set_withheld(place.node, place.vendor, withheld=True)
    for fault in snapshot.faults:
        table.set_health(fault.node, fault.uuid, healthy=fault.healthy)
    for node, path in snapshot.domains.items():
        table.set_domain(node, path)
    ledger = Ledger(table, writer=snapshot.writer)
    now_s = snapshot.time_s
    for holding in snapshot.holdings:
        ledger.handle(RecordSeen(seq=holding.revision, record=holding.record, now_s=now_s))
        if holding.state is not None:
            ledger.handle(StateSeen(seq=1, state=holding.state, now_s=now_s))
    ledger.handle(FeedSynced(now_s=now_s))
    ledger.handle(Repaired(now_s=now_s))
    return ledger


def load_quotas(snapshot: Snapshot) -> QuotaLedger:
    """Quotas and queues, and what is held under them, as they were written down."""
    if snapshot.exact is not None:
        return resume(snapshot.exact).quota
    quota = QuotaLedger()
    known = snapshot.quotas
    holdings = sorted(snapshot.holdings, key=lambda holding: holding.revision)
    quota.resume(
        QuotaMemory(
            seq=holdings[-1].revision if holdings else 0,
            is_exact=True,
            objects=known.objects,
            queues=known.queues,
            records=tuple(holding.record for holding in holdings),
            claims=known.claims,
        )
    )
    return quota
