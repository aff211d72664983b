# SPDX-License-Identifier: Apache-2.0
"""Everything a decision depends on as one document, written by a scheduler and read by tools.

A table built from a snapshot answers filter, prioritize and bind exactly as the scheduler did when
it took it (design D15). Sequences are kept, so that records can be compared. Times are the writer's
and informative.

A stimulus log begins with a snapshot that has ``exact``: with it a replay resumes at the writer's
state, with the same leases, fences, heartbeats and network (see ``resume``).
"""

from collections.abc import Iterable

from msgspec import Struct

from hami_common.events.inventory import NodeDevices
from hami_common.model.request import PlacementPolicy, PodRequest
from hami_core.core import Core
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Ledger, LedgerMemory
from hami_core.ledger.stimuli import FeedSynced, RecordSeen, Repaired, StateSeen
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.documents import QuotaMemory, Quotas
from hami_core.table.inventory import Inventory, Memory
from hami_core.table.table import DeviceTable


class Unusable(Struct, frozen=True, kw_only=True, array_like=True):
    """One device whose health differs from its canonical record."""

    node: str
    uuid: str
    healthy: bool


class Silent(Struct, frozen=True, kw_only=True, array_like=True):
    """A vendor on a node whose agent is silent."""

    node: str
    vendor: str


class Exact(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State that affects later answers and that a table does not show."""

    inventory_revision: int
    heartbeat_timeout_s: float
    trusts_unheard: bool = True
    inventory: Memory
    ledger: LedgerMemory
    domains: dict[str, tuple[str, ...]] = {}
    """Positions of nodes in the network."""
    depth: int = 0
    """Levels of the longest path ever seen."""
    withheld: tuple[tuple[str, str], ...] = ()
    """(node, vendor) pairs without new allocations, see ``DeviceTable.set_withheld``."""
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
    """Nodes, or vendors on them, without new allocations; an empty vendor: all."""
    faults: tuple[Unusable, ...] = ()
    holdings: tuple[Holding, ...] = ()
    domains: dict[str, tuple[str, ...]] = {}
    """Positions of nodes in the network, by node, widest domain first."""
    waiting: tuple[PodRequest, ...] = ()
    """Requests of the pods that have no node yet."""
    quotas: Quotas = Quotas()
    """Limits of pods besides the capacity of devices."""
    exact: Exact | None = None


def take_exact(core: Core, *, policy: PlacementPolicy, now_s: float) -> Snapshot:
    """Return the full present state; cheap, because it refers to frozen parts and copies little."""
    memory, known, table = core.ledger.memory(), core.inventory.memory(), core.table
    return Snapshot(
        snapshot_id=core.ledger.snapshot_id,
        time_s=now_s,
        writer=memory.writer,
        policy=policy,
        exact=Exact(
            inventory_revision=table.inventory_revision,
            heartbeat_timeout_s=core.inventory.timeout_s,
            trusts_unheard=core.inventory.trusts_unheard,
            inventory=known,
            ledger=memory,
            domains=table.domains.known(),
            depth=table.domains.depth,
            withheld=tuple(table.withheld()),
            quota=core.quota.memory(),
        ),
    )


def resume(exact: Exact) -> Core:
    """Restore the core as it was when ``exact`` was taken."""
    table = DeviceTable()
    inventory = Inventory(
        table,
        heartbeat_timeout_s=exact.heartbeat_timeout_s,
        trusts_unheard=exact.trusts_unheard,
    )
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
    return Core(ledger=ledger, inventory=inventory, quota=quota)


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
    """Return the present state as a document."""
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
    """Load a ledger, with its table, that gives the same decisions as the original."""
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
    """Load quotas and queues, and the usage under them, as they were written."""
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
