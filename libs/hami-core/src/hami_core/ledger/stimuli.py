# SPDX-License-Identifier: Apache-2.0
"""Inputs of the scheduling core, with the type of each answer, and the ledger's effects.

``hami_core.core.Core.answer`` takes the inputs; the docstring of each names the method that
answers it. ``hami_core.ledger.ledger`` describes how those of the ledger are used together. The
names of the classes are the kinds of a stimulus log, see ``hami_core.replay.stimuluslog``.

Times are seconds of this replica's clock; sequences are stream sequences of the bucket concerned.
"""

from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from hami_common.compat.origins import HAMI
from hami_common.events.allocation import (
    Account,
    AllocationRecord,
    ReportedState,
    StateRecord,
)
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices
from hami_common.model.placement import ContainerShares, Placement
from hami_common.model.request import PodRequest
from hami_common.pods.signing import SignedPlacement
from hami_common.ports import Expect
from hami_core.ledger import repair
from hami_core.ledger.holding import Holding
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.reasons import NodeRefusal
from hami_core.placement.verdicts import Filtered, Scored
from hami_core.quota.documents import WrittenQuota
from hami_core.quota.queues import QueueConfig
from hami_core.quota.resourcequota import Asker
from hami_core.quota.verdicts import Allowed

Answer = TypeVar("Answer")


class Input(Struct, Generic[Answer], frozen=True, kw_only=True):
    """An input of the core; ``Answer`` is the type of what ``Core.answer`` returns for it."""


# --- plans and effects ----------------------------------------------------------------------------


class Append(Struct, frozen=True, kw_only=True):
    """Store ``record`` under ``key`` of ``hami_alloc`` on the condition ``expect``.

    Then ``handle(Accepted(...))``.
    """

    record: AllocationRecord
    key: str
    expect: Expect
    fenced: bool
    """True when the condition is the node's fence, else it is the key's own sequence."""

    def under(
        self,
        account: Account | None,
        *,
        sku: str = "",
        service_class: str = "",
        labels: tuple[tuple[str, str], ...] = (),
    ) -> "Append":
        """Return a copy with the identity under which quotas and bills count the pod."""
        record = replace(
            self.record, account=account, sku=sku, service_class=service_class, labels=labels
        )
        return replace(self, record=record)


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
    """The lease of a reservation expired.

    Find out whether the Binding arrived, and ensure that it cannot arrive any more.
    """

    holding: Holding


class CapacityReturned(Struct, frozen=True, kw_only=True):
    """Shares on this node became free: pods that wait may fit now."""

    node: str


class Over(Struct, frozen=True, kw_only=True):
    """Devices that are now booked beyond their capacity.

    This happens because running pods win over arithmetic (design D6).
    """

    node: str
    uuids: tuple[str, ...]


Effect = Examine | CapacityReturned | Over
Task = Effect | repair.Step
"""Work that the shell runs in the background; a comparison of ledger and pods finds it again."""
BindPlan = Append | Reuse | NodeRefusal
"""Plan of a pod's devices on a node."""


# --- inputs that the ledger handles ---------------------------------------------------------------


class RecordSeen(Input[list[Effect]], frozen=True, kw_only=True):
    """The feed of ``hami_alloc`` delivered a record."""

    seq: int
    record: AllocationRecord
    now_s: float


class StateSeen(Input[list[Effect]], frozen=True, kw_only=True):
    """A state record was delivered by the feed of ``hami_state``, or our own was accepted."""

    seq: int
    state: StateRecord
    now_s: float


class NodeRead(Input[list[Effect]], frozen=True, kw_only=True):
    """One consistent read of the newest record of every key of a node.

    All are as of one sequence of the stream: else a record could be skipped, and the fence would be
    wrong.
    """

    node: str
    entries: tuple[tuple[int, AllocationRecord], ...]
    now_s: float


class FeedSynced(Input[list[Effect]], frozen=True, kw_only=True):
    """The feeds have delivered what ``hami_alloc`` and ``hami_state`` stored before the watches."""

    now_s: float


class Repaired(Input[list[Effect]], frozen=True, kw_only=True):
    """Ledger and pods were compared once in full, and the steps were executed."""

    now_s: float


class Tick(Input[list[Effect]], frozen=True, kw_only=True):
    """Time passed."""

    now_s: float


class Wiped(Input[list[Effect]], frozen=True, kw_only=True):
    """The bus lost its storage: sequences restart."""

    now_s: float


class Accepted(Input[list[Effect]], frozen=True, kw_only=True):
    """The bus accepted an ``Append`` of ours with sequence ``seq``."""

    append: Append
    seq: int
    now_s: float


Stimulus = RecordSeen | StateSeen | NodeRead | FeedSynced | Repaired | Tick | Wiped | Accepted
"""Inputs that ``Ledger.handle`` answers."""


# --- inputs that each have a method -----------------------------------------------------------


class DevicesPut(Input[bool], frozen=True, kw_only=True, omit_defaults=True):
    """``Inventory.put``; cordons are part of the devices."""

    devices: NodeDevices
    revision: int
    now_s: float


class DevicesRemoved(Input[None], frozen=True, kw_only=True):
    """``Inventory.remove``."""

    node: str
    vendor: str


class DevicesBegin(Input[None], frozen=True, kw_only=True):
    """``Inventory.begin_again``."""


class DevicesEnd(Input[None], frozen=True, kw_only=True):
    """``Inventory.end_again``."""


class HeartbeatHeard(Input[bool], frozen=True, kw_only=True):
    """``Inventory.hear``."""

    heartbeat: Heartbeat
    now_s: float


class BusUnheard(Input[None], frozen=True, kw_only=True):
    """``Inventory.deaf``."""

    now_s: float


class SilenceJudged(Input[list[tuple[str, str]]], frozen=True, kw_only=True):
    """``Inventory.tick``."""

    now_s: float


class FaultHeard(Input[bool], frozen=True, kw_only=True):
    """``Inventory.take_fault``."""

    fault: DeviceFault


class NodeStands(Input[None], frozen=True, kw_only=True):
    """``DeviceTable.set_domain``."""

    node: str
    path: tuple[str, ...]


class NodeWithheld(Input[bool], frozen=True, kw_only=True, omit_defaults=True):
    """``DeviceTable.set_withheld``."""

    node: str
    vendor: str = ""
    withheld: bool


class Forgotten(Input[None], frozen=True, kw_only=True):
    """``Ledger.forget``."""

    node: str
    pod_uid: str


class FilterAsked(Input[Filtered], frozen=True, kw_only=True):
    """``Verdicts.filter``."""

    request: PodRequest
    names: int = -1
    """Number of the name list in the log."""


class PrioritizeAsked(Input[Scored], frozen=True, kw_only=True, omit_defaults=True):
    """``Verdicts.prioritize``."""

    request: PodRequest
    names: int = -1
    near: tuple[str, ...] = ()


class ShortlistAsked(Input[NodeNames], frozen=True, kw_only=True, omit_defaults=True):
    """``Verdicts.shortlist``, of the nodes that the newest filter or quota answer left."""

    request: PodRequest
    count: int
    near: tuple[str, ...] = ()


class BindPlanned(Input[BindPlan], frozen=True, kw_only=True, omit_defaults=True):
    """``Ledger.plan_bind``."""

    request: PodRequest
    node: str
    allocation_id: str
    now_s: float
    fenced: str = ""


class HoldPlanned(Input[BindPlan], frozen=True, kw_only=True, omit_defaults=True):
    """``Ledger.plan_hold``."""

    request: PodRequest
    node: str
    allocation_id: str
    now_s: float
    held_for: str
    lease_s: float
    awaits: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    fenced: str = ""


class TakePlanned(Input[BindPlan], frozen=True, kw_only=True, omit_defaults=True):
    """``Ledger.plan_take``."""

    request: PodRequest
    node: str
    held_uid: str
    allocation_id: str
    now_s: float
    fenced: str = ""


class RestorePlanned(Input[Append | NodeRefusal | None], frozen=True, kw_only=True):
    """``Ledger.plan_restore``."""

    signed: SignedPlacement
    now_s: float
    must: bool


class AdoptPlanned(Input[Append | None], frozen=True, kw_only=True, omit_defaults=True):
    """``Ledger.plan_adopt``."""

    node: str
    pod_uid: str
    namespace: str
    pod: str
    containers: tuple[ContainerShares, ...]
    allocation_id: str
    now_s: float
    reason: str = ""
    origin: str = HAMI.name
    """Of a log that does not contain it: the only one there was."""


class ClaimPlanned(
    Input[Append | NodeRefusal | None], frozen=True, kw_only=True, omit_defaults=True
):
    """``Ledger.plan_claim``."""

    node: str
    claim_uid: str
    namespace: str
    name: str
    containers: tuple[ContainerShares, ...]
    allocation_id: str
    now_s: float
    account: Account | None = None
    must: bool = False


class ResizePlanned(Input[Append | NodeRefusal], frozen=True, kw_only=True):
    """``Ledger.plan_resize``."""

    holding: Holding
    placement: Placement
    now_s: float
    reason: str
    limits: tuple[ContainerShares, ...] = ()
    """``AllocationRecord.limits``."""


class RenewPlanned(Input[Append], frozen=True, kw_only=True):
    """``Ledger.plan_renew``."""

    holding: Holding
    now_s: float


class ReleasePlanned(Input[Append], frozen=True, kw_only=True):
    """``Ledger.plan_release``."""

    holding: Holding
    now_s: float
    reason: str


class StatePlanned(Input[WriteState | None], frozen=True, kw_only=True, omit_defaults=True):
    """``Ledger.plan_state``."""

    holding: Holding
    state: ReportedState
    now_s: float
    code: str = ""
    reason: str = ""


class FailurePlanned(Input[WriteState | None], frozen=True, kw_only=True):
    """``Ledger.plan_failed``."""

    signed: SignedPlacement
    refusal: NodeRefusal
    now_s: float


class QuotaPut(Input[None], frozen=True, kw_only=True):
    """``QuotaLedger.put_quota``."""

    quota: WrittenQuota


class QuotaDropped(Input[bool], frozen=True, kw_only=True):
    """``QuotaLedger.drop_quota``."""

    namespace: str
    name: str


class QueuesSet(Input[None], frozen=True, kw_only=True):
    """``QuotaLedger.set_tree``."""

    queues: tuple[QueueConfig, ...]


class QuotaFolded(Input[None], frozen=True, kw_only=True):
    """``QuotaLedger.fold``."""

    seq: int
    record: AllocationRecord


class QuotaSynced(Input[None], frozen=True, kw_only=True):
    """``QuotaLedger.synced``."""


class QuotaReset(Input[None], frozen=True, kw_only=True):
    """``QuotaLedger.reset``."""


class QuotaExpected(Input[None], frozen=True, kw_only=True):
    """``QuotaLedger.expect``."""

    record: AllocationRecord


class QuotaUnexpected(Input[None], frozen=True, kw_only=True):
    """``QuotaLedger.stop_expecting``."""

    allocation_id: str


class QuotaAsked(Input[Filtered | Allowed], frozen=True, kw_only=True, omit_defaults=True):
    """``QuotaVerdicts.allowed``, for the answer of the newest ``FilterAsked``."""

    request: PodRequest
    asker: Asker
    waiting: tuple[str, ...] = ()


class QuotaLooked(Input[NodeRefusal | None], frozen=True, kw_only=True, omit_defaults=True):
    """``QuotaLedger.first_look``, at a reservation that is about to be stored."""

    namespace: str
    wanted: dict[str, int]
    account: Account | None = None
    own: tuple[tuple[str, str], ...] = ()


class QuotaJudged(Input[NodeRefusal | None], frozen=True, kw_only=True):
    """``QuotaLedger.verdict``."""

    seq: int
