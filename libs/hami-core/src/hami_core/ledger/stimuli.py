# SPDX-License-Identifier: Apache-2.0
"""What the shell tells the core (stimuli) and what the ledger asks the shell to do (effects).

Times are seconds of this replica's clock; sequences are stream sequences of the bucket concerned.
How those of the ledger are used together stands in ``hami_core.ledger.ledger``. The others are
calls of the inventory, the table, filter, prioritize and the plans of the ledger, as they stand in
a stimulus log: see ``hami_core.replay.stimuluslog``.
"""

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.allocation import Account, AllocationRecord, StateRecord
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices
from hami_common.model.request import PodRequest
from hami_common.pods.signing import SignedPlacement
from hami_common.ports import Expect
from hami_core.ledger.repair import Holding
from hami_core.quota.documents import WrittenQuota
from hami_core.quota.queues import QueueConfig
from hami_core.quota.resourcequota import Asker


class RecordSeen(Struct, frozen=True, kw_only=True):
    """The feed of ``hami_alloc`` delivered a record."""

    seq: int
    record: AllocationRecord
    now_s: float


class StateSeen(Struct, frozen=True, kw_only=True):
    """A state record was delivered by the feed of ``hami_state``, or our own was accepted."""

    seq: int
    state: StateRecord
    now_s: float


class NodeRead(Struct, frozen=True, kw_only=True):
    """One consistent read of the newest record of every key of a node.

    All as of one sequence of the stream: else a record could be skipped, and the fence would lie.
    """

    node: str
    entries: tuple[tuple[int, AllocationRecord], ...]
    now_s: float


class FeedSynced(Struct, frozen=True, kw_only=True):
    """What was stored in ``hami_alloc`` and ``hami_state`` before the watches began has arrived."""

    now_s: float


class Repaired(Struct, frozen=True, kw_only=True):
    """Ledger and pods were compared once in full, and the steps were carried out."""

    now_s: float


class Tick(Struct, frozen=True, kw_only=True):
    """Time went on."""

    now_s: float


class Wiped(Struct, frozen=True, kw_only=True):
    """The bus lost its storage: sequences begin anew."""

    now_s: float


class Append(Struct, frozen=True, kw_only=True):
    """Store ``record`` under ``key`` of ``hami_alloc`` on the condition ``expect``.

    Then ``handle(Accepted(...))``.
    """

    record: AllocationRecord
    key: str
    expect: Expect
    fenced: bool
    """Whether the condition is the node's fence (else: the key's own sequence)."""

    def under(self, account: Account | None) -> "Append":
        """The same, with what quotas count the pod under."""
        return replace(self, record=replace(self.record, account=account))


class Accepted(Struct, frozen=True, kw_only=True):
    """The bus accepted an ``Append`` of ours with sequence ``seq``."""

    append: Append
    seq: int
    now_s: float


class Reuse(Struct, frozen=True, kw_only=True):
    """The pod already holds a fitting reservation on this node: renew it, then bind with it."""

    holding: Holding


class WriteState(Struct, frozen=True, kw_only=True):
    """Store ``state`` under ``key`` of ``hami_state`` on the condition ``expect``.

    Then ``handle(StateSeen(...))``.
    """

    state: StateRecord
    key: str
    expect: Expect


class Examine(Struct, frozen=True, kw_only=True):
    """A lease ran out.

    Find out whether the Binding arrived, and make sure that it cannot arrive any more.
    """

    holding: Holding


class CapacityReturned(Struct, frozen=True, kw_only=True):
    """Shares on this node became free: pods that wait may fit now."""

    node: str


class Over(Struct, frozen=True, kw_only=True):
    """Devices that are now booked beyond their capacity.

    Because pods that run win over arithmetic (design D6).
    """

    node: str
    uuids: tuple[str, ...]


Stimulus = RecordSeen | StateSeen | NodeRead | FeedSynced | Repaired | Tick | Wiped | Accepted
Effect = Examine | CapacityReturned | Over


# --- calls, as a log of stimuli has them ----------------------------------------------------------


class DevicesPut(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``Inventory.put``; cordons are part of the devices."""

    devices: NodeDevices
    revision: int
    now_s: float


class DevicesRemoved(Struct, frozen=True, kw_only=True):
    """``Inventory.remove``."""

    node: str
    vendor: str


class DevicesBegin(Struct, frozen=True, kw_only=True):
    """``Inventory.begin_again``."""


class DevicesEnd(Struct, frozen=True, kw_only=True):
    """``Inventory.end_again``."""


class HeartbeatHeard(Struct, frozen=True, kw_only=True):
    """``Inventory.hear``."""

    heartbeat: Heartbeat
    now_s: float


class BusUnheard(Struct, frozen=True, kw_only=True):
    """``Inventory.deaf``."""

    now_s: float


class SilenceJudged(Struct, frozen=True, kw_only=True):
    """``Inventory.tick``."""

    now_s: float


class FaultHeard(Struct, frozen=True, kw_only=True):
    """``Inventory.take_fault``."""

    fault: DeviceFault


class NodeStands(Struct, frozen=True, kw_only=True):
    """``DeviceTable.set_domain``."""

    node: str
    path: tuple[str, ...]


class NodeWithheld(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``DeviceTable.set_withheld``."""

    node: str
    vendor: str = ""
    withheld: bool


class Forgotten(Struct, frozen=True, kw_only=True):
    """``Ledger.forget``."""

    node: str
    pod_uid: str


class FilterAsked(Struct, frozen=True, kw_only=True):
    """``Verdicts.filter``."""

    request: PodRequest
    names: int = -1
    """Which of the log's lists of names."""


class PrioritizeAsked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``Verdicts.prioritize``."""

    request: PodRequest
    names: int = -1
    near: tuple[str, ...] = ()


class BindPlanned(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``Ledger.plan_bind``."""

    request: PodRequest
    node: str
    allocation_id: str
    now_s: float
    fenced: str = ""


class HoldPlanned(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``Ledger.plan_hold``."""

    request: PodRequest
    node: str
    allocation_id: str
    now_s: float
    held_for: str
    lease_s: float
    awaits: tuple[str, ...] = ()
    fenced: str = ""


class RestorePlanned(Struct, frozen=True, kw_only=True):
    """``Ledger.plan_restore``."""

    signed: SignedPlacement
    now_s: float
    must: bool


class QuotaPut(Struct, frozen=True, kw_only=True):
    """``QuotaLedger.put_quota``."""

    quota: WrittenQuota


class QuotaDropped(Struct, frozen=True, kw_only=True):
    """``QuotaLedger.drop_quota``."""

    namespace: str
    name: str


class QueuesSet(Struct, frozen=True, kw_only=True):
    """``QuotaLedger.set_tree``."""

    queues: tuple[QueueConfig, ...]


class QuotaFolded(Struct, frozen=True, kw_only=True):
    """``QuotaLedger.fold``."""

    seq: int
    record: AllocationRecord


class QuotaSynced(Struct, frozen=True, kw_only=True):
    """``QuotaLedger.synced``."""


class QuotaReset(Struct, frozen=True, kw_only=True):
    """``QuotaLedger.reset``."""


class QuotaExpected(Struct, frozen=True, kw_only=True):
    """``QuotaLedger.expect``."""

    record: AllocationRecord


class QuotaUnexpected(Struct, frozen=True, kw_only=True):
    """``QuotaLedger.stop_expecting``."""

    allocation_id: str


class QuotaAsked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``QuotaVerdicts.allowed``, about the answer of the newest ``FilterAsked``."""

    request: PodRequest
    asker: Asker
    waiting: tuple[str, ...] = ()


class QuotaLooked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``QuotaLedger.first_look``, of what is about to be reserved."""

    namespace: str
    wanted: dict[str, int]
    account: Account | None = None
    own: tuple[tuple[str, str], ...] = ()


class QuotaJudged(Struct, frozen=True, kw_only=True):
    """``QuotaLedger.verdict``."""

    seq: int
