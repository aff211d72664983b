# SPDX-License-Identifier: Apache-2.0
"""The ledger of shares: a pure state machine that folds stimuli and returns effects.

State list and transitions: ``hami_core.ledger.states`` (design D5). The state of an allocation is
the join of the newest ``AllocationRecord`` (bucket ``hami_alloc``, written by schedulers) and the
newest ``StateRecord`` of the same allocation id (bucket ``hami_state``, written by scheduler and
agent).

Order: within one key only a higher sequence replaces a lower one, so duplicates and any reordering
between keys are harmless. The fence of a node is the highest sequence up to which EVERYTHING of
that node was folded (design D3): it moves with the feed, with a consistent read of the node, and
with our own append that was conditional on the fence. It does not move with our own append that was
conditional on its key only: a record of another replica may lie between.

Times are seconds of this replica's clock, given with each stimulus; two machines' clocks are never
compared: a lease runs from when WE first saw the record.

How the shell uses this
-----------------------
* One ``Ledger`` over one ``DeviceTable``, both touched only from the event loop. Only the ledger
  books on the table.
* Watch of ``hami_alloc``: ``handle(RecordSeen(...))`` per entry, in stream order. Watch of
  ``hami_state``: ``StateSeen``. When both have delivered what was stored: ``FeedSynced``.
  ``handle`` returns effects to execute; an error means that the stimulus was not folded: log the
  history of an ``InvariantBroken``, withhold the node of a record, go on.
* ``ready`` is true once the feed is synced and the steps of the first full comparison with the pods
  were executed (``Repaired``). Do not bind before.
* bind: ``plan_bind(...)`` returns ``Append`` (store it; then ``handle(Accepted(...))``), ``Reuse``
  (this pod already has a fitting reservation here: ``plan_renew`` it, or it may be released while
  its Binding is in flight, then post the Binding for it) or a ``NodeRefusal``. A reservation that
  no longer suits is never overwritten while its Binding may be in flight: the refusal is
  ``ReservationInDoubt`` then, and the next ``Tick`` asks to examine it. ``Conflict`` on the append:
  ``handle(NodeRead(...))`` with ONE consistent read of the node's keys; if
  ``sequence_of(node, uid, allocation_id)`` is above 0 the append was stored after all, else plan
  again (the same allocation id may be used), at most 3 times.
* A fenced reservation must never be reused, nor its Binding posted again: pass ``plan_bind`` the
  pod's annotation ``hami.io/fence``.
* Binding accepted: ``plan_state(node, uid, state="bound", ...)`` gives the ``WriteState``. Known
  failure: ``plan_release(...)`` gives the ``Append``.
* Repair: ``repair.compare(ledger.holdings(), pods)``. For a ``Restore`` call ``plan_restore(...)``
  just before acting: it gives ``Append`` (fenced; on ``Conflict`` fold and plan again), ``None``
  (the ledger already contains it) or a ``NodeRefusal`` (the share is lost: write state ``failed``
  with ``plan_failed``). Restore pods whose containers exist with ``must=True``: they win over
  arithmetic, and ``Over`` reports it.
* Lease: ``Tick`` every second gives ``Examine`` for each reservation whose lease expired, and again
  after another lease while nothing changed.
* The storage was wiped (revisions below ``feed_seq``): ``handle(Wiped(...))``, fold the new feed,
  ``FeedSynced``, repair, ``Repaired``.
* Tombstones: ``forgettable(...)`` names keys whose release is old and not its node's newest record,
  and keys that have a state and no record; ``Bucket.forget`` them, then ``forget`` them here.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.errors import InvariantBroken
from hami_common.events.allocation import (
    CLAIM,
    Account,
    AllocationRecord,
    AllocationState,
    CarriedShare,
    ReportedState,
    StateRecord,
    is_of_owner,
    joined_state,
    owner_of,
)
from hami_common.model.placement import (
    NOTHING,
    Booked,
    ContainerShares,
    Placement,
    booked_by_device,
)
from hami_common.model.request import (
    ContainerRequest,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
)
from hami_common.pods.signing import SignedPlacement
from hami_common.ports import Expect
from hami_core.ledger import claimedparts
from hami_core.ledger.holding import Holding
from hami_core.ledger.states import may_follow
from hami_core.ledger.stimuli import (
    Accepted,
    Append,
    CapacityReturned,
    Effect,
    Examine,
    FeedSynced,
    NodeRead,
    Over,
    RecordSeen,
    Repaired,
    Reuse,
    StateSeen,
    Stimulus,
    Tick,
    Wiped,
    WriteState,
)
from hami_core.placement.pick import pick, satisfies, with_limits
from hami_core.placement.reasons import NodeRefusal
from hami_core.table.table import DeviceTable

KEYS_PER_NODE: Final = 4_096
"""Pods of a node whose states are kept without a record; kubelet runs 110, at most some 500."""
STORY_LINES: Final = 24
SHARE_LOST: Final = "share-lost"

_Key = tuple[str, str]


class StoryLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change of an allocation."""

    time_s: float
    what: str
    seq: int = 0

    def __str__(self) -> str:
        return f"{self.time_s:.3f} {self.what}" + (f" (sequence {self.seq})" if self.seq else "")


class HeldLine(Struct, frozen=True, array_like=True):
    """State of one key, except its history."""

    seq: int
    record: AllocationRecord | None
    state_seq: int
    state: StateRecord | None
    seen_s: float
    examine_at_s: float


class LedgerMemory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Full state of a ledger, from which another one can resume, see ``Ledger.memory``."""

    lease_s: float
    fence_delay_s: float
    writer: str = ""
    feed_seq: int = 0
    synced: bool = False
    repaired: bool = False
    held: tuple[HeldLine, ...] = ()
    fences: dict[str, int] = {}


class Hold(Struct, frozen=True, kw_only=True):
    """Reason and duration for which a share is reserved before its pod is bound."""

    held_for: str
    """``preemption``, ``gang`` or ``volcano`` with ``<namespace>/<name>``, or ``purpose_of``."""
    lease_s: float
    awaits: tuple[str, ...] = ()
    """UIDs of pods on the node whose end frees this share."""
    keeps: tuple[str, ...] = ()
    """UIDs of those whose end frees it by their bursts: their own shares are not taken."""


class _Held:
    """State of one key."""

    __slots__ = ("examine_at_s", "record", "seen_s", "seq", "state", "state_seq", "story")

    def __init__(self) -> None:
        self.record: AllocationRecord | None = None
        self.seq = 0
        self.state: StateRecord | None = None
        self.state_seq = 0
        self.seen_s = 0.0
        self.examine_at_s = 0.0
        self.story: tuple[StoryLine, ...] = ()

    def joined(self) -> AllocationState | None:
        """Return the state of the allocation, ``None`` where no record was seen."""
        return None if self.record is None else joined_state(self.record, self.state)

    def tell(self, now_s: float, what: str, seq: int = 0) -> None:
        """Append one line to the history."""
        self.story = (*self.story[1 - STORY_LINES :], StoryLine(time_s=now_s, what=what, seq=seq))


class Ledger:
    """All allocations of the cluster that this replica has received."""

    def __init__(
        self,
        table: DeviceTable,
        *,
        writer: str = "",
        lease_s: float = 30.0,
        fence_delay_s: float = 3.0,
    ) -> None:
        """Book on ``table``; write records as ``writer``.

        See the settings of the same names for the two times.
        """
        self.table = table
        self.feed_seq = 0
        """Highest sequence of ``hami_alloc`` that the feed has delivered."""
        self._writer = writer
        self._lease_s = lease_s
        self._fence_delay_s = fence_delay_s
        self._held: dict[_Key, _Held] = {}
        self._nodes_by_uid: dict[str, tuple[str, ...]] = {}
        self._uids_by_node: dict[str, set[str]] = {}
        self._fence_by_node: dict[str, int] = {}
        self._reserved: set[_Key] = set()
        self._owners: dict[_Key, set[str]] = {}
        """Owners of those of ``_reserved`` that are held for an object (``is_of_owner``)."""
        self._of_owners: dict[str, set[_Key]] = {}
        """The same by owner: the uid of the object, or ``held_for``."""
        self._synced = False
        self._repaired = False

    # --- reading ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True when the ledger is complete; binding before would assign shares that are taken."""
        return self._synced and self._repaired

    @property
    def synced(self) -> bool:
        """True when the feed has delivered everything that was stored."""
        return self._synced

    @property
    def snapshot_id(self) -> str:
        """Name of the present state in decisions: ``<ledger sequence>.<inventory revision>``."""
        return f"{self.feed_seq}.{self.table.inventory_revision}"

    def fence(self, node: str) -> int:
        """Return the sequence that a fenced append for ``node`` must expect."""
        return self._fence_by_node.get(node, 0)

    def holding(self, node: str, pod_uid: str) -> Holding | None:
        """Return the live allocation of this pod on this node."""
        held = self._held.get((node, pod_uid))
        return None if held is None else _live(held)

    def holdings(self) -> Iterator[Holding]:
        """Yield every live allocation."""
        for held in self._held.values():
            if (holding := _live(held)) is not None:
                yield holding

    def holdings_of_pod(self, pod_uid: str) -> list[Holding]:
        """Return the pod's live allocations.

        There is one, or briefly several while bind attempts overlap.
        """
        found = (self.holding(node, pod_uid) for node in self._nodes_by_uid.get(pod_uid, ()))
        return [holding for holding in found if holding is not None]

    def holdings_of_node(self, node: str) -> list[Holding]:
        """Return the node's live allocations, by pod uid."""
        found = (self.holding(node, uid) for uid in sorted(self._uids_by_node.get(node, ())))
        return [holding for holding in found if holding is not None]

    def uids_of_node(self, node: str) -> Iterable[str]:
        """Return the UIDs of pods that have, or had, an allocation on the node."""
        return self._uids_by_node.get(node, ())

    def reserved_for(self, pod_uid: str, *, fenced: str = "") -> Holding | None:
        """Return the share that is reserved for a pod without an observed Binding, oldest first.

        One without ``held_for`` belongs to a bind that has begun: a Binding may be on its way.
        ``fenced``: the pod's annotation ``hami.io/fence``; the allocation it names is being rolled
        back.
        """
        reserved = [
            holding
            for holding in self.holdings_of_pod(pod_uid)
            if self.state_of(holding.record.node, pod_uid) == "reserved"
            and holding.record.allocation_id != fenced.partition("/")[0]
        ]
        return min(reserved, key=lambda holding: holding.revision, default=None)

    def awaited(self, holding: Holding) -> list[Holding]:
        """Return the holdings that must leave the node before the share of ``holding`` is free."""
        record = holding.record
        found = (self.holding(record.node, uid) for uid in record.awaits)
        return [other for other in found if other is not None]

    def state_of(self, node: str, pod_uid: str) -> AllocationState | None:
        """Return the state of the newest allocation under this key."""
        held = self._held.get((node, pod_uid))
        return None if held is None else held.joined()

    def carried_of(self, node: str, pod_uid: str) -> tuple[CarriedShare, ...]:
        """Return the partitions that carry the pod's shares, as the node's agent reported them."""
        held = self._held.get((node, pod_uid))
        if held is None or held.record is None or held.state is None:
            return ()
        is_of_record = held.state.allocation_id == held.record.allocation_id
        return held.state.carried if is_of_record else ()

    def sequence_of(self, node: str, pod_uid: str, allocation_id: str) -> int:
        """Return the sequence of the live record with this allocation id, 0 without one."""
        holding = self.holding(node, pod_uid)
        if holding is None or holding.record.allocation_id != allocation_id:
            return 0
        return holding.revision

    def story(self, node: str, pod_uid: str) -> list[StoryLine]:
        """Return the recent history of this key, oldest first."""
        held = self._held.get((node, pod_uid))
        return [] if held is None else list(held.story)

    # --- folding ---------------------------------------------------------------------------------

    def handle(self, stimulus: Stimulus) -> list[Effect]:
        """Fold ``stimulus`` and return the effects to execute, in order.

        After an error, the record or state at fault was not folded at all, and the table matches
        the folded records; of a ``NodeRead`` those with lower sequences were folded.
        """
        match stimulus:
            case RecordSeen(seq=seq, record=record, now_s=now_s):
                effects = self._fold_record(seq, record, now_s)
                self.feed_seq = max(self.feed_seq, seq)
                self._move_fence(record.node, seq)
                return effects
            case Accepted(append=append, seq=seq, now_s=now_s):
                effects = self._fold_record(seq, append.record, now_s)
                if append.fenced:
                    self._move_fence(append.record.node, seq)
                return effects
            case NodeRead(node=node, entries=entries, now_s=now_s):
                effects = []
                for seq, record in sorted(entries, key=lambda entry: entry[0]):
                    effects += self._fold_record(seq, record, now_s)
                    self._move_fence(node, seq)
                return effects
            case StateSeen(seq=seq, state=state, now_s=now_s):
                self._fold_state(seq, state, now_s)
                return []
            case Tick(now_s=now_s):
                return self._tick(now_s)
            case FeedSynced():
                self._synced = True
                return []
            case Repaired():
                self._repaired = True
                return []
            case Wiped():
                self._wipe()
                return []

    def _fold_record(self, seq: int, record: AllocationRecord, now_s: float) -> list[Effect]:
        key = (record.node, record.pod_uid)
        held = self._held.get(key)
        if held is not None and seq <= held.seq:
            return []
        try:
            effects = self._book(None if held is None else held.record, record)
        except Exception:
            self._restore(record.node)
            raise
        if held is None:
            held = self._adopt(key)
        if record.op == "reserve":  # a new reservation, or one renewed: its lease begins
            held.seen_s = now_s
            held.examine_at_s = now_s + self._patience_s(record)
        held.record, held.seq = record, seq
        held.tell(
            now_s,
            f"{record.op} {record.allocation_id} by {record.writer or 'unknown'}"
            + (f": {record.reason}" if record.reason else ""),
            seq,
        )
        self._index(key, held)
        return effects

    def _book(self, before: AllocationRecord | None, record: AllocationRecord) -> list[Effect]:
        """Book a record instead of the one before it."""
        effects: list[Effect] = []
        is_release = record.op == "release"
        if before is not None and before.op != "release":
            self.table.unbook(record.node, before.containers)
            if is_release:
                effects.append(CapacityReturned(node=record.node))
        if not is_release:
            over = self.table.book(record.node, record.containers)
            if over and not record.awaits:  # a share that awaits pods is over capacity by design
                effects.append(Over(node=record.node, uuids=over))
        return effects

    def _restore(self, node: str) -> None:
        """Rebuild a node's bookings from the folded records after one could not be booked."""
        held = [holding.record.containers for holding in self.holdings_of_node(node)]
        self.table.rebook(node, held)

    def _fold_state(self, seq: int, state: StateRecord, now_s: float) -> None:
        key = (state.node, state.pod_uid)
        held = self._held.get(key)
        if held is None:
            if len(self._uids_by_node.get(state.node, ())) >= KEYS_PER_NODE:
                return  # an agent may write states of any number of pods without a record
            held = self._adopt(key)
        if seq <= held.state_seq:
            return
        before = held.state
        if (
            before is not None
            and before.allocation_id == state.allocation_id
            and not may_follow(before.state, state.state)
        ):
            raise InvariantBroken(
                what=f"allocation {state.allocation_id} of pod {state.namespace}/{state.pod} on"
                f" {state.node} cannot go from {before.state} to {state.state}",
                history=[str(line) for line in held.story],
            )
        held.state, held.state_seq = state, seq
        held.tell(
            now_s,
            f"state {state.state} {state.allocation_id} by {state.writer or 'unknown'}"
            + (f": {state.code} {state.reason}".rstrip() if state.code or state.reason else ""),
            seq,
        )
        self._index(key, held)

    def _adopt(self, key: _Key) -> _Held:
        node, uid = key
        held = self._held[key] = _Held()
        self._nodes_by_uid[uid] = (*self._nodes_by_uid.get(uid, ()), node)
        self._uids_by_node.setdefault(node, set()).add(uid)
        return held

    def _index(self, key: _Key, held: _Held) -> None:
        self._reserved.discard(key)
        for owner in self._owners.pop(key, ()):
            self._of_owners[owner].discard(key)
            if not self._of_owners[owner]:
                del self._of_owners[owner]
        if held.record is not None and held.joined() == "reserved":
            self._reserved.add(key)
            if is_of_owner(held.record):
                self._owners[key] = {owner_of(held.record), held.record.held_for}
                for owner in self._owners[key]:
                    self._of_owners.setdefault(owner, set()).add(key)

    def _patience_s(self, record: AllocationRecord) -> float:
        lease_s = record.lease_s or self._lease_s
        return lease_s if record.writer == self._writer else lease_s + self._fence_delay_s

    def _move_fence(self, node: str, seq: int) -> None:
        if seq > self._fence_by_node.get(node, 0):
            self._fence_by_node[node] = seq

    def _tick(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for holding in self.expired(now_s):
            held = self._held[holding.record.node, holding.record.pod_uid]
            held.examine_at_s = now_s + self._patience_s(holding.record)
            held.tell(now_s, "lease ran out, to be examined")
            effects.append(Examine(holding=holding))
        return effects

    def _wipe(self) -> None:
        for node in sorted({holding.record.node for holding in self.holdings()}):
            self.table.rebook(node, ())
        self._held.clear()
        self._nodes_by_uid.clear()
        self._uids_by_node.clear()
        self._fence_by_node.clear()
        self._reserved.clear()
        self._owners.clear()
        self._of_owners.clear()
        self.feed_seq = 0
        self._synced = self._repaired = False

    # --- leases and tombstones -------------------------------------------------------------------

    def reserved(self) -> list[Holding]:
        """Return the reservations without an observed Binding, oldest first.

        A restarted replica examines these, which its previous run may have left.
        """
        found = [self._held[key] for key in self._reserved]
        found.sort(key=lambda held: held.seq)
        return [holding for held in found if (holding := _live(held)) is not None]

    def expired(self, now_s: float) -> list[Holding]:
        """Return reservations with an expired lease that were not examined within another lease.

        Oldest first.
        """
        return [
            holding
            for holding in self.reserved()
            if self._held[holding.record.node, holding.record.pod_uid].examine_at_s <= now_s
        ]

    def forgettable(self, *, seen_before_s: float) -> list[tuple[str, str]]:
        """Return (node, pod uid) of releases and of states without a record, folded before then.

        A node's newest record is never among them (design D3: the fence would move back).
        """
        return [
            key
            for key, held in self._held.items()
            if held.story
            and held.story[-1].time_s < seen_before_s
            and (
                held.record is None
                or (held.record.op == "release" and held.seq < self.fence(key[0]))
            )
        ]

    def forget(self, node: str, pod_uid: str) -> None:
        """Drop a tombstone, after the bucket deleted it."""
        held = self._held.get((node, pod_uid))
        if held is None or (held.record is not None and held.record.op != "release"):
            return
        del self._held[node, pod_uid]
        nodes = tuple(name for name in self._nodes_by_uid[pod_uid] if name != node)
        if nodes:
            self._nodes_by_uid[pod_uid] = nodes
        else:
            del self._nodes_by_uid[pod_uid]
        uids = self._uids_by_node[node]
        uids.discard(pod_uid)
        if not uids:
            del self._uids_by_node[node]

    # --- planning --------------------------------------------------------------------------------

    def plan_bind(
        self, request: PodRequest, node: str, *, allocation_id: str, now_s: float, fenced: str = ""
    ) -> Append | Reuse | NodeRefusal:
        """Plan the pod's devices on ``node``.

        ``fenced``: the pod's annotation ``hami.io/fence``, empty when it has none.
        """
        own = self.holding(node, request.uid)
        if own is not None and own.record.allocation_id != fenced.partition("/")[0]:
            held = self._held[node, request.uid]
            if waiting := len(self.awaited(own)):
                return NodeRefusal(
                    code="VictimsLeaving",
                    text=f"VictimsLeaving: {waiting} pods have not left yet",
                )
            if held.joined() != "reserved" or satisfies(
                self.table, request, node, own.record.containers
            ):
                return Reuse(holding=own)
            # A Binding with the old shares may be in flight: it must not meet a new record.
            held.examine_at_s = now_s
            return NodeRefusal(
                code="ReservationInDoubt",
                text="ReservationInDoubt: an earlier reservation of the pod is being released",
            )
        self.table.lower_bursts(node, request.uid)
        try:
            chosen = pick(
                self.table, request, node, without=() if own is None else own.record.containers
            )
        finally:
            self.table.restore_bursts(node, request.uid)
        if isinstance(chosen, NodeRefusal):
            return chosen
        return self._reserve(
            request, node, chosen.containers, allocation_id=allocation_id, now_s=now_s
        )

    def plan_hold(
        self,
        request: PodRequest,
        node: str,
        *,
        allocation_id: str,
        now_s: float,
        hold: Hold,
        fenced: str = "",
    ) -> Append | Reuse | NodeRefusal:
        """Plan a reservation of devices on ``node`` for a pod whose bind has not begun.

        The awaited pods still use their shares: the devices are then booked beyond their capacity,
        so that the capacity those pods free stays reserved, and ``plan_bind`` waits until they have
        left.
        """
        own = self.holding(node, request.uid)
        if own is not None:
            is_fenced = own.record.allocation_id == fenced.partition("/")[0]
            if own.record.held_for == hold.held_for and not is_fenced:
                return Reuse(holding=own)
            return NodeRefusal(
                code="ReservationInDoubt",
                text="ReservationInDoubt: an earlier reservation of the pod is being released",
            )
        awaited = [self.holding(node, uid) for uid in hold.awaits]
        leaving = [other for other in awaited if other is not None]
        freed = [other for other in leaving if other.record.pod_uid not in hold.keeps]
        for other in leaving:
            self.table.lower_bursts(node, other.record.pod_uid)
        for other in freed:
            self.table.unbook(node, other.record.containers)
        try:
            chosen = pick(self.table, request, node)
        finally:
            for other in freed:
                self.table.book(node, other.record.containers)
            for other in leaving:
                self.table.restore_bursts(node, other.record.pod_uid)
        if isinstance(chosen, NodeRefusal):
            return chosen
        return self._reserve(
            request,
            node,
            chosen.containers,
            allocation_id=allocation_id,
            now_s=now_s,
            hold=hold,
            awaits=tuple(sorted(other.record.pod_uid for other in leaving)),
        )

    def plan_take(
        self,
        request: PodRequest,
        node: str,
        *,
        held_uid: str,
        allocation_id: str,
        now_s: float,
        fenced: str = "",
    ) -> Append | Reuse | NodeRefusal:
        """Plan the shares that are held for the pod under ``held_uid`` (``is_of_owner``).

        Until the hold is released its devices are booked twice, so that no other pod gets them. If
        the hold does not suit, this is ``plan_bind``.
        """
        hold = self.holding(node, held_uid)
        if (
            hold is None
            or not is_of_owner(hold.record)
            or hold.record.namespace != request.namespace
            or self.holding(node, request.uid) is not None
            or not satisfies(self.table, request, node, hold.record.containers)
        ):
            return self.plan_bind(
                request, node, allocation_id=allocation_id, now_s=now_s, fenced=fenced
            )
        taken = with_limits(self.table, request, node, hold.record.containers)
        return self._reserve(
            request,
            node,
            tuple(
                replace(shares, priority=container.priority)
                for container, shares in zip(request.containers, taken, strict=True)
            ),
            allocation_id=allocation_id,
            now_s=now_s,
            awaits=(held_uid,),
        )

    def _reserve(
        self,
        request: PodRequest,
        node: str,
        containers: tuple[ContainerShares, ...],
        *,
        allocation_id: str,
        now_s: float,
        hold: Hold | None = None,
        awaits: tuple[str, ...] = (),
    ) -> Append:
        """Plan the record of a reservation; ``hold``: one that is made before the bind."""
        return self._append(
            AllocationRecord(
                op="reserve",
                allocation_id=allocation_id,
                node=node,
                pod_uid=request.uid,
                namespace=request.namespace,
                pod=request.name,
                containers=containers,
                time_s=now_s,
                lease_s=self._lease_s if hold is None else hold.lease_s,
                writer=self._writer,
                held_for="" if hold is None else hold.held_for,
                awaits=awaits,
                claim=request.claim,
            ),
            fenced=True,
        )

    def holdings_of_owner(self, owner: str) -> list[Holding]:
        """Return the shares held for the pods of an object that are not bound yet, by uid.

        ``owner``: the uid of the object, or ``held_for`` of the shares.
        """
        keys = self._of_owners.get(owner, ())
        found = [holding for key in keys if (holding := self.holding(*key)) is not None]
        return sorted(found, key=lambda holding: (holding.record.pod_uid, holding.revision))

    def plan_restore(
        self, signed: SignedPlacement, *, now_s: float, must: bool
    ) -> Append | NodeRefusal | None:
        """Plan to restore the ledger record of a bound pod from its signed placement.

        ``None`` when the ledger contains it. ``must``: its containers exist.
        """
        node, uid = signed.placement.node, signed.pod_uid
        own = self.holding(node, uid)
        if own is not None and own.record.allocation_id == signed.allocation_id:
            return None
        if not must:
            lacking = self.table.shortfall(
                node,
                signed.placement.containers,
                without=() if own is None else own.record.containers,
                believe=True,
            )
            if lacking:
                return NodeRefusal(
                    code="ShareLost",
                    text="the share that the pod was bound with is taken on " + ", ".join(lacking),
                )
        return self._append(
            AllocationRecord(
                op="reserve",
                allocation_id=signed.allocation_id,
                node=node,
                pod_uid=uid,
                namespace=signed.namespace,
                pod=signed.pod,
                containers=signed.placement.containers,
                time_s=now_s,
                lease_s=self._lease_s,
                writer=self._writer,
                reason="restored from the bound pod",
                origin=signed.origin,
                claim=signed.claim,
            ),
            fenced=True,
        )

    def plan_adopt(
        self,
        *,
        node: str,
        pod: tuple[str, str, str],
        containers: tuple[ContainerShares, ...],
        allocation_id: str,
        now_s: float,
        origin: str,
        reason: str = "",
    ) -> Append | None:
        """Plan a ledger record for devices that another system gave a pod; ``None`` if it exists.

        ``pod``: uid, namespace and name. ``origin``: that system. Capacity is not checked: the
        containers exist.
        """
        uid, namespace, name = pod
        own = self.holding(node, uid)
        if own is not None and (own.record.origin != origin or own.record.containers == containers):
            return None
        return self._append(
            AllocationRecord(
                op="reserve" if own is None else "resize",
                allocation_id=allocation_id if own is None else own.record.allocation_id,
                node=node,
                pod_uid=uid,
                namespace=namespace,
                pod=name,
                containers=containers,
                time_s=now_s,
                lease_s=self._lease_s,
                writer=self._writer,
                reason=reason,
                origin=origin,
            ),
            fenced=True,
        )

    def plan_claim(
        self,
        *,
        node: str,
        claim: tuple[str, str, str],
        containers: tuple[ContainerShares, ...],
        allocation_id: str,
        now_s: float,
        account: Account | None = None,
        must: bool = False,
    ) -> Append | NodeRefusal | None:
        """Plan a ledger record for the devices that kube-scheduler allocated to a ResourceClaim.

        ``claim``: uid, namespace and name. ``None`` when the record exists. The devices must pass
        what a new pod's must, unless containers use them already (``must``).
        """
        uid, namespace, name = claim
        if own := self.holdings_of_pod(uid):
            if any(one.record.allocation_id == allocation_id for one in own):
                return None
            return NodeRefusal(
                code="ReservationInDoubt",
                text="ReservationInDoubt: an earlier allocation of the claim is being released",
            )
        if not must:
            if (
                refusal := claimedparts.refusal_of(self.table, node, claim, containers)
            ) is not None:
                return refusal
            shared = claimedparts.without_parts(containers)
            for uuid, request in _requests_by_device(claim, shared):
                chosen = pick(self.table, request, node)
                if isinstance(chosen, NodeRefusal):
                    code, _, fact = chosen.text.partition(": ")
                    return replace(chosen, text=f"{code}: device {uuid}: {fact}")
                if not satisfies(self.table, request, node, _only(uuid, shared)):
                    return NodeRefusal(
                        code="ModeNotFit",
                        text=f"ModeNotFit: device {uuid}: it serves hardware partitions only",
                    )
        return self._append(
            AllocationRecord(
                op="reserve",
                allocation_id=allocation_id,
                node=node,
                pod_uid=uid,
                namespace=namespace,
                pod=name,
                containers=containers,
                time_s=now_s,
                lease_s=self._lease_s,
                writer=self._writer,
                account=account,
                origin=CLAIM,
            ),
            fenced=True,
        )

    def plan_resize(
        self,
        holding: Holding,
        placement: Placement,
        *,
        now_s: float,
        reason: str,
        limits: tuple[ContainerShares, ...] = (),
    ) -> Append | NodeRefusal:
        """Plan a change of an allocation's shares, on the same node and under the same id."""
        record = holding.record
        lacking = self.table.shortfall(
            record.node, placement.containers, without=record.containers, own=record.pod_uid
        )
        if placement.node != record.node or lacking:
            return NodeRefusal(
                code="ShareLost",
                text="the new shares do not fit on " + (", ".join(lacking) or placement.node),
            )
        return self._append(
            replace(
                record,
                op="resize",
                containers=placement.containers,
                time_s=now_s,
                writer=self._writer,
                reason=reason,
                held_for="",
                awaits=(),
                limits=limits,
            ),
            fenced=True,
        )

    def plan_renew(self, holding: Holding, *, now_s: float) -> Append:
        """Plan to take over a reservation and renew its lease, unless its record has changed since.

        Takes no more capacity, so the append is conditional on its key only. A bind begins with it:
        ``held_for`` ends, so that no replica releases the share as one without a Binding. No
        Binding is posted under a hold of an object, which keeps its own lease.
        """
        if is_of_owner(holding.record):
            record = replace(holding.record, time_s=now_s, writer=self._writer)
            return self._append(record, fenced=False, sequence=holding.revision)
        return self._append(
            replace(
                holding.record,
                op="reserve",
                time_s=now_s,
                lease_s=self._lease_s,
                writer=self._writer,
                reason="renewed",
                held_for="",
            ),
            fenced=False,
            sequence=holding.revision,
        )

    def plan_release(self, holding: Holding, *, now_s: float, reason: str) -> Append:
        """Plan to release the share, unless the record has changed since ``holding`` was read."""
        record = holding.record
        return self._append(
            AllocationRecord(
                op="release",
                allocation_id=record.allocation_id,
                node=record.node,
                pod_uid=record.pod_uid,
                namespace=record.namespace,
                pod=record.pod,
                time_s=now_s,
                writer=self._writer,
                reason=reason,
            ),
            fenced=False,
            sequence=holding.revision,
        )

    def _append(self, record: AllocationRecord, *, fenced: bool, sequence: int = 0) -> Append:
        key = subjects.allocation_key(record.node, record.pod_uid)
        if fenced:
            expect = Expect(
                subject=subjects.node_fence(record.node), sequence=self.fence(record.node)
            )
        else:
            expect = Expect(
                subject=subjects.kv_subject(subjects.ALLOC_BUCKET, key), sequence=sequence
            )
        return Append(record=record, key=key, expect=expect, fenced=fenced)

    def plan_state(
        self,
        holding: Holding,
        state: ReportedState,
        *,
        now_s: float,
        code: str = "",
        reason: str = "",
    ) -> WriteState | None:
        """Plan to report a state of a live allocation; ``None`` when it is already that far."""
        record = holding.record
        now = self.state_of(record.node, record.pod_uid)
        if now is None or now == state or not may_follow(now, state):
            return None
        return self._write_state(
            record, state, ledger_seq=holding.revision, now_s=now_s, code=code, reason=reason
        )

    def plan_failed(
        self, signed: SignedPlacement, refusal: NodeRefusal, *, now_s: float
    ) -> WriteState | None:
        """Plan to report that a bound pod's share is lost, so that the agent refuses it.

        ``None`` when that is reported already.
        """
        held = self._held.get((signed.placement.node, signed.pod_uid))
        state = None if held is None else held.state
        if (
            state is not None
            and state.allocation_id == signed.allocation_id
            and state.state == "failed"
        ):
            return None
        record = AllocationRecord(
            op="reserve",
            allocation_id=signed.allocation_id,
            node=signed.placement.node,
            pod_uid=signed.pod_uid,
            namespace=signed.namespace,
            pod=signed.pod,
        )
        return self._write_state(
            record,
            "failed",
            ledger_seq=signed.ledger_seq,
            now_s=now_s,
            code=SHARE_LOST,
            reason=refusal.text,
        )

    def _write_state(
        self,
        record: AllocationRecord,
        state: ReportedState,
        *,
        ledger_seq: int,
        now_s: float,
        code: str,
        reason: str,
    ) -> WriteState:
        key = subjects.allocation_key(record.node, record.pod_uid)
        held = self._held.get((record.node, record.pod_uid))
        return WriteState(
            key=key,
            expect=Expect(
                subject=subjects.kv_subject(subjects.STATE_BUCKET, key),
                sequence=0 if held is None else held.state_seq,
            ),
            state=StateRecord(
                state=state,
                allocation_id=record.allocation_id,
                node=record.node,
                pod_uid=record.pod_uid,
                namespace=record.namespace,
                pod=record.pod,
                ledger_seq=ledger_seq,
                time_s=now_s,
                writer=self._writer,
                code=code,
                reason=reason,
            ),
        )

    # --- as a document ---------------------------------------------------------------------------

    def memory(self) -> LedgerMemory:
        """Return everything that plans and effects depend on, except the contents of the table."""
        return LedgerMemory(
            lease_s=self._lease_s,
            fence_delay_s=self._fence_delay_s,
            writer=self._writer,
            feed_seq=self.feed_seq,
            synced=self._synced,
            repaired=self._repaired,
            held=tuple(
                HeldLine(h.seq, h.record, h.state_seq, h.state, h.seen_s, h.examine_at_s)
                for h in self._held.values()
            ),
            fences=dict(self._fence_by_node),
        )

    def resume(self, memory: LedgerMemory) -> None:
        """Resume from ``memory`` in an empty ledger with the same settings."""
        for line in memory.held:
            about = line.record or line.state
            if about is None:
                continue
            key = (about.node, about.pod_uid)
            held = self._adopt(key)
            held.seq, held.record = line.seq, line.record
            held.state_seq, held.state = line.state_seq, line.state
            held.seen_s, held.examine_at_s = line.seen_s, line.examine_at_s
            held.tell(line.seen_s, "known from a snapshot", line.seq)
            if line.record is not None and line.record.op != "release":
                self.table.book(line.record.node, line.record.containers)
            self._index(key, held)
        self._fence_by_node = dict(memory.fences)
        self.feed_seq = memory.feed_seq
        self._synced, self._repaired = memory.synced, memory.repaired

    # --- checking --------------------------------------------------------------------------------

    def check(self) -> None:
        """Recompute every total from the live records and compare with the table.

        ``InvariantBroken`` names the first difference.
        """
        want: dict[tuple[str, str], Booked] = {}
        exclusive: dict[tuple[str, str], int] = {}
        for holding in self.holdings():
            record = holding.record
            for uuid, booked in booked_by_device(record.containers).items():
                at = (record.node, uuid)
                want[at] = want.get(at, NOTHING).plus(booked)
                exclusive[at] = exclusive.get(at, 0) + booked.exclusive
        for node, uuid, usage in self.table.usages():
            at = (node, uuid)
            expected = want.pop(at, NOTHING)
            if (
                usage.memory_mib,
                usage.core_pct,
                usage.slots,
                usage.exclusive_holders,
            ) != (expected.memory_mib, expected.core_pct, expected.slots, exclusive.get(at, 0)):
                raise InvariantBroken(
                    what=f"device {uuid} on {node} has {usage} booked, its records sum to"
                    f" {expected}",
                    history=self._stories(node, uuid),
                )
        if want:
            (node, uuid), expected = next(iter(want.items()))
            raise InvariantBroken(
                what=f"device {uuid} on {node} is not in the table, its records sum to {expected}",
                history=self._stories(node, uuid),
            )
        self.table.check()

    def _stories(self, node: str, uuid: str) -> list[str]:
        lines: list[str] = []
        for holding in self.holdings_of_node(node):
            if uuid in booked_by_device(holding.record.containers):
                lines += [str(line) for line in self.story(node, holding.record.pod_uid)]
        return lines


def _live(held: _Held) -> Holding | None:
    if held.record is None or held.record.op == "release":
        return None
    return Holding(record=held.record, revision=held.seq, state=held.state)


def _only(uuid: str, containers: Iterable[ContainerShares]) -> tuple[ContainerShares, ...]:
    """Return the shares on one device, in their containers."""
    found = (
        replace(one, shares=tuple(share for share in one.shares if share.uuid == uuid))
        for one in containers
    )
    return tuple(one for one in found if one.shares)


def _requests_by_device(
    claim: tuple[str, str, str], containers: Iterable[ContainerShares]
) -> Iterator[tuple[str, PodRequest]]:
    """Yield what the claim takes of each device as the request of a pod that names the device."""
    uid, namespace, name = claim
    containers = tuple(containers)
    vendors = {share.uuid: share.vendor for one in containers for share in one.shares}
    for uuid, vendor in vendors.items():
        asked = tuple(
            ContainerRequest(
                name=one.name,
                kind=one.kind,
                requests=tuple(
                    DeviceRequest(
                        vendor=vendor,
                        count=1,
                        memory_mib=share.memory_mib,
                        core_pct=share.core_pct,
                        exclusive=share.exclusive,
                    )
                    for share in one.shares
                ),
            )
            for one in _only(uuid, containers)
        )
        yield (
            uuid,
            PodRequest(
                uid=uid,
                namespace=namespace,
                name=name,
                containers=asked,
                selectors={vendor: DeviceSelector(allow_uuids=(uuid,))},
            ),
        )
