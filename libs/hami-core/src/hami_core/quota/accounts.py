# SPDX-License-Identifier: Apache-2.0
"""Accounts the amounts used under each quota in stream order, and judges requests for more.

Fed only with the records of ``hami_alloc`` in stream order. So the usage just before a record is
the same for every replica that sees the record, and whether the record itself is within quota is
judged exactly there: ``verdict``. Only a writer whose own verdict on a reservation is good commits
it; a refused reservation is rolled back by its writer, or after its lease. All live records count,
including those that will be rolled back. Hence the sum of reservations that were judged good is
never above a limit, at no position of the stream and with any number of schedulers: the newest of
them was judged with all the older ones counted (ADR 0010).

Namespaces without a quota cost a dictionary entry per record: the usage of their pods is summed up
when a quota or a queue first needs it. ``first_look`` runs before a record is written; it also
counts reservations of this replica that are still in flight. Amounts as in ``quota``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.allocation import Account, AllocationRecord, is_of_owner
from hami_core.placement.reasons import NodeRefusal, RefusalCode
from hami_core.quota import documents as quota_memory
from hami_core.quota.documents import QuotaMemory
from hami_core.quota.queues import LOWEST_PRIORITY, Claim, Objection, QueueTree, QueueUse
from hami_core.quota.resourcequota import (
    MOST,
    NO_ACCOUNT,
    Amounts,
    Quota,
    Resource,
    add_to,
    amounts_of,
)

VERDICTS_KEPT: Final = 8192
TEXT_BYTES: Final = 170
_NAME_SHOWN: Final = 45
_SHORT_NAME: Final = 40
"""Maximum length of each of two names in one text."""

_Key = tuple[str, str]
_Surplus = Mapping[tuple[str, Resource], int]
Uses = tuple[tuple[str, int], ...]
"""Amounts by the name of the bound that they reduce."""
_UNITS: Final = {"memory_mib": " MiB", "core_pct": "%", "devices": ""}
_CODES: Final[dict[str, RefusalCode]] = {
    "limit": "QueueOverLimit",
    "borrow": "QueueCannotBorrow",
    "weight": "QueueCannotBorrow",
    "turn": "QueueWaitsItsTurn",
}


class _Entry:
    """Amounts of one live record; computed on first use."""

    __slots__ = ("_amounts", "record")

    def __init__(self, record: AllocationRecord) -> None:
        self.record = record
        self._amounts: dict[Resource, int] | None = None

    @property
    def account(self) -> Account:
        return _plain(self.record.account)

    @property
    def amounts(self) -> dict[Resource, int]:
        if self._amounts is None:
            self._amounts = amounts_of(self.record.containers, self.record.account)
        return self._amounts


def _plain(account: Account | None) -> Account:
    """Return the account without the attributes that only classify amounts."""
    if account is None:
        return NO_ACCOUNT
    return replace(account, resources=()) if account.resources else account


class QuotaRow(Struct, frozen=True, kw_only=True):
    """One limit of one ResourceQuota, with the usage under it."""

    namespace: str
    quota: str
    key: str
    resource: str
    used: int
    limit: int
    problem: str = ""


class QueueRow(Struct, frozen=True, kw_only=True):
    """One resource of one queue."""

    queue: str
    parent: str
    depth: int
    resource: str
    used: int
    guaranteed: int
    borrowed: int
    limit: int | None = None
    borrow_weight: int = 1
    lend: bool = True
    waiting: int = 0
    """Pods that wait for their queue to borrow."""


class HeadroomRow(Struct, frozen=True, kw_only=True):
    """Amount of one resource that a namespace may still use."""

    resource: str
    queue: str
    """Queue of the namespace's pods that name none; empty: they belong to no queue."""
    amount: int | None
    """``None``: neither a ResourceQuota nor a queue limits it."""
    code: str = ""
    """Refusal code of one more."""
    text: str = ""


class Lenders:
    """Pods that may be evicted for another one without taking a guarantee from a queue.

    No queue falls below its guarantee for a pod of another queue. Valid until the usage changes.
    """

    def __init__(
        self,
        *,
        leaf: str,
        owner: str,
        counted: Callable[[AllocationRecord], tuple[str, Amounts]],
        surplus: Callable[[str, str], _Surplus | None],
    ) -> None:
        """Serve a pod of queue ``leaf`` (empty: none) that is within the guarantee of ``owner``.

        ``counted`` returns the leaf and the amounts of a record, ``surplus`` that of a leaf beside
        another queue.
        """
        self.allowed: dict[str, int] = {}
        """Amount that each queue borrows of each resource, by the names that ``uses`` returns."""
        self.owner = owner
        """Empty: the pod is within no guarantee."""
        self._leaf = leaf
        self._counted = counted
        self._surplus = lru_cache(maxsize=None)(surplus)

    def uses(self, record: AllocationRecord, *, by_priority: bool) -> Uses | None:
        """Return by how much evicting the pod of the record reduces what its queues borrow.

        ``by_priority``: it has a lower priority; otherwise it leaves for a guarantee. ``None``: it
        must stay.
        """
        if not by_priority and not self.owner:
            return None
        if record.account is not None and record.account.is_spot:
            return ()  # it uses no guarantee
        queue, amounts = self._counted(record)
        surplus = self._surplus(queue, self._leaf if by_priority else self.owner) if queue else None
        if surplus is None:
            return () if by_priority else None
        uses: list[tuple[str, int]] = []
        for (name, resource), left in surplus.items():
            amount = amounts.get(resource, 0)
            if amount > left:
                return None
            if amount:
                bound = f"queue {name} {resource}"
                self.allowed[bound] = left
                uses.append((bound, amount))
        return tuple(uses)


class QuotaLedger:
    """Quotas, queues, and the usage under them."""

    def __init__(self) -> None:
        """Start without limits and usage."""
        self.seq = 0
        """Sequence of the newest record folded."""
        self.generation = 0
        """Incremented when the folded records are dropped."""
        self._is_exact = False
        self._live: dict[str, dict[_Key, _Entry]] = {}
        self._totals: dict[str, dict[Account, dict[Resource, int]]] = {}
        self._quotas: dict[str, dict[str, Quota]] = {}
        self._tree = QueueTree()
        self._use = QueueUse(self._tree)
        """Without pods of class spot."""
        self._use_of_all = QueueUse(self._tree)
        self._refused: OrderedDict[int, NodeRefusal] = OrderedDict()
        """Records that exceed a quota, by sequence."""
        self._coming: dict[str, _Entry] = {}
        """Reservations of this replica that the stream has not delivered yet, by allocation id."""
        self._claims: dict[str, Claim] = {}

    # --- what is limited -------------------------------------------------------------------------

    @property
    def tree(self) -> QueueTree:
        """The queue tree."""
        return self._tree

    def put_quota(self, quota: Quota) -> None:
        """Take the newest version of a ResourceQuota."""
        self._quotas.setdefault(quota.namespace, {})[quota.name] = quota

    def drop_quota(self, namespace: str, name: str) -> bool:
        """Drop a ResourceQuota; returns whether it was known."""
        known = self._quotas.get(namespace, {})
        found = known.pop(name, None)
        if not known:
            self._quotas.pop(namespace, None)
            self._totals.pop(namespace, None)
        return found is not None

    def quotas(self) -> Iterator[Quota]:
        """Yield every ResourceQuota that limits something of ours."""
        for namespace in sorted(self._quotas):
            for name in sorted(self._quotas[namespace]):
                yield self._quotas[namespace][name]

    def set_tree(self, tree: QueueTree) -> None:
        """Replace the queue tree."""
        self._tree = tree
        self._use = QueueUse(tree)
        self._use_of_all = QueueUse(tree)
        self._claims.clear()
        if tree:
            for namespace, entries in self._live.items():
                for entry in entries.values():
                    self._count_in_queue(namespace, entry.account, entry.amounts, 1)

    def governs(self, namespace: str, account: Account | None) -> bool:
        """Return whether any quota or queue applies to pods of this account."""
        if namespace not in self._quotas and not self._tree:
            return False
        if any(quota.counts(account) for quota in self._quotas.get(namespace, {}).values()):
            return True
        return bool(self._queue_of(namespace, account or NO_ACCOUNT))

    def _queue_of(self, namespace: str, account: Account) -> str:
        return self._tree.queue_of(namespace, account.queue) if self._tree else ""

    # --- folding ---------------------------------------------------------------------------------

    def fold(self, seq: int, record: AllocationRecord) -> None:
        """Fold the next record of the stream; one that was folded before is skipped."""
        if seq <= self.seq:
            return
        self.seq = seq
        key, namespace = (record.node, record.pod_uid), record.namespace
        self._take(namespace, key)
        self._coming.pop(record.allocation_id, None)
        if record.op == "release":
            return
        entry = _Entry(record)
        if self._is_exact and self.governs(namespace, record.account):
            taken = self._taken_over(record)
            for other in taken:
                self._take(namespace, other)
            refusal = self._judge(namespace, entry.account, entry.amounts)
            for other, held in taken.items():
                self._put(namespace, other, held)
            if refusal is not None:
                self._refused[seq] = refusal
            if len(self._refused) > VERDICTS_KEPT:
                self._refused.popitem(last=False)
        self._put(namespace, key, entry)

    def _taken_over(self, record: AllocationRecord) -> dict[_Key, _Entry]:
        """Return the hold of an object whose shares the record takes over; it is released next.

        Counted twice, a Workload at its limit could never start.
        """
        live = self._live.get(record.namespace, {})
        found = {key: live.get(key) for key in ((record.node, uid) for uid in record.awaits)}
        return {
            key: entry
            for key, entry in found.items()
            if entry is not None and is_of_owner(entry.record)
        }

    def synced(self) -> None:
        """Note that the stored records are folded; from here on the fold misses no record."""
        self._is_exact = True

    def reset(self) -> None:
        """Drop all usage because the stream restarts."""
        self.seq = 0
        self.generation += 1
        self._is_exact = False
        self._live.clear()
        self._totals.clear()
        self._refused.clear()
        self._coming.clear()
        self._use = QueueUse(self._tree)
        self._use_of_all = QueueUse(self._tree)

    def verdict(self, seq: int) -> NodeRefusal | None:
        """Return why the record with this sequence exceeds a quota; ``None`` when it does not.

        Call it when ``self.seq`` has reached the sequence. A record without an applicable quota
        passes.
        """
        return self._refused.get(seq)

    def _take(self, namespace: str, key: _Key) -> _Entry | None:
        entries = self._live.get(namespace, {})
        entry = entries.pop(key, None)
        if entry is not None:
            if not entries:
                del self._live[namespace]
            self._count(namespace, entry, -1)
        return entry

    def _put(self, namespace: str, key: _Key, entry: _Entry) -> None:
        self._live.setdefault(namespace, {})[key] = entry
        self._count(namespace, entry, 1)

    def _count(self, namespace: str, entry: _Entry, sign: int) -> None:
        totals = self._totals.get(namespace)
        if totals is not None:
            total = totals.setdefault(entry.account, {})
            add_to(total, entry.amounts, sign)
            if not total:
                del totals[entry.account]
        if self._tree:
            self._count_in_queue(namespace, entry.account, entry.amounts, sign)

    def _count_in_queue(
        self, namespace: str, account: Account, amounts: Amounts, sign: int
    ) -> None:
        queue = self._queue_of(namespace, account)
        if queue:
            self._use_of_all.add(queue, amounts, sign)
            if not account.is_spot:
                self._use.add(queue, amounts, sign)

    # --- asking ----------------------------------------------------------------------------------

    def first_look(
        self,
        namespace: str,
        account: Account | None,
        wanted: Amounts,
        *,
        own: Iterable[_Key] = (),
        waits: Callable[[str], bool] | None = None,
    ) -> NodeRefusal | None:
        """Return why the pod may not use ``wanted`` now; ``None`` when it may.

        ``own`` are keys of records that the pod already has and would release. With ``waits`` it
        must also be the turn of the pod's queue: ``waits`` returns whether the pod of a claim, by
        uid, still waits.
        """
        account = account or NO_ACCOUNT
        mine = [(key, entry) for key in own if (entry := self._take(namespace, key)) is not None]
        try:
            claims: tuple[Claim, ...] = ()
            if waits is not None and self._claims:
                self._claims = {uid: one for uid, one in self._claims.items() if waits(uid)}
                claims = tuple(self._claims.values())
            return self._judge(namespace, account, wanted, self._coming.values(), claims)
        finally:
            for key, entry in mine:
                self._put(namespace, key, entry)

    def expect(self, record: AllocationRecord) -> None:
        """Count a reservation that is about to be written until the stream delivers it."""
        self._coming[record.allocation_id] = _Entry(record)

    def expects(self, allocation_id: str) -> bool:
        """Return whether the reservation is counted although the stream has not delivered it."""
        return allocation_id in self._coming

    def stop_expecting(self, allocation_id: str) -> None:
        """Stop counting a reservation that was not written, or that the stream has delivered."""
        self._coming.pop(allocation_id, None)

    def claim(self, pod_uid: str, namespace: str, account: Account | None, wanted: Amounts) -> None:
        """Add the claim of a pod that could be placed and waits for its queue to borrow."""
        account = account or NO_ACCOUNT
        queue = self._queue_of(namespace, account)
        if queue:
            claim = Claim(queue=queue, wanted=dict(wanted), is_spot=account.is_spot)
            self._claims[pod_uid] = claim

    def unclaim(self, pod_uid: str) -> None:
        """Remove the claim of a pod."""
        self._claims.pop(pod_uid, None)

    def claims(self) -> Mapping[str, Claim]:
        """Return the pods that wait for their queues to borrow, by uid.

        Some may have ended since.
        """
        return self._claims

    def _judge(
        self,
        namespace: str,
        account: Account,
        wanted: Amounts,
        coming: Iterable[_Entry] = (),
        claims: Iterable[Claim] = (),
    ) -> NodeRefusal | None:
        coming = tuple(coming)
        refusal = self._judge_namespace(namespace, account, wanted, coming)
        if refusal is not None:
            return refusal
        queue = self._queue_of(namespace, account)
        if not queue:
            return None
        for one in coming:
            self._count_in_queue(one.record.namespace, one.account, one.amounts, 1)
        try:
            use = self._use_of_all if account.is_spot else self._use
            claims = [claim for claim in claims if account.is_spot or not claim.is_spot]
            objection = use.object_to(queue, wanted, claims, borrows=account.is_spot)
            return None if objection is None else self._refusal(queue, objection)
        finally:
            for one in coming:
                self._count_in_queue(one.record.namespace, one.account, one.amounts, -1)

    def _judge_namespace(
        self, namespace: str, account: Account, wanted: Amounts, coming: tuple[_Entry, ...]
    ) -> NodeRefusal | None:
        """Return the objection of the quota with the least headroom."""
        tightest: tuple[int, NodeRefusal] | None = None
        for quota in self._quotas.get(namespace, {}).values():
            if not quota.counts(account):
                continue
            for resource, limit in quota.limits.items():
                amount = wanted.get(resource, 0)
                if not amount:
                    continue
                used = self._used(quota, resource) + sum(
                    one.amounts.get(resource, 0)
                    for one in coming
                    if one.record.namespace == namespace and quota.counts(one.account)
                )
                room = limit.most - used - amount
                if room < 0 and (tightest is None or room < tightest[0]):
                    where = f'quota "{_clip(quota.name, _NAME_SHOWN)}" {limit.key}'
                    unit = _UNITS[resource.kind]
                    text = (
                        f"{where}: {limit.problem}"
                        if limit.problem
                        else f"{where}: {amount}{unit} wanted, {used} used, limit {limit.most}"
                    )
                    tightest = room, _refusal_of("ResourceQuotaNotFit", text)
        return None if tightest is None else tightest[1]

    def _refusal(self, queue: str, objection: Objection) -> NodeRefusal:
        resource = objection.resource
        amount = f"{objection.wanted}{_UNITS[resource.kind]}"
        name = _clip(objection.queue, _NAME_SHOWN)
        what = f"queue {name} {resource}: {amount} wanted, {objection.used} used"
        match objection.rule:
            case "limit":
                tail = f"limit {objection.most}"
            case "turn":
                tail = f"{objection.most} guaranteed, {_clip(objection.other, 32)} borrows first"
            case "weight":
                tail = f"{objection.most} guaranteed, it may not borrow"
            case _:
                tail = f"{objection.most} guaranteed, too little left to borrow"
        if objection.queue != queue:
            tail += f" (for {_clip(queue, 32)})"
        return _refusal_of(_CODES[objection.rule], f"{what}, {tail}")

    def queue_of(self, namespace: str, account: Account | None) -> str:
        """Return the queue under which pods of the account count; empty: none."""
        return self._queue_of(namespace, account or NO_ACCOUNT)

    def lenders(
        self,
        namespace: str,
        account: Account | None,
        wanted: Amounts,
        *,
        own: Iterable[_Key] = (),
    ) -> Lenders:
        """Return whose pods may be evicted for a pod that requests ``wanted``.

        ``own`` as in ``first_look``.
        """
        leaf = self.queue_of(namespace, account)
        mine = [(key, entry) for key in own if (entry := self._take(namespace, key)) is not None]
        is_spot = account is not None and account.is_spot
        owner = self._use.guarantor(leaf, wanted) if leaf and not is_spot else ""
        for key, entry in mine:
            self._put(namespace, key, entry)

        def counted(record: AllocationRecord) -> tuple[str, Amounts]:
            entry = self._live.get(record.namespace, {}).get((record.node, record.pod_uid))
            queue = self.queue_of(record.namespace, record.account)
            return queue, {} if entry is None else entry.amounts

        return Lenders(
            leaf=leaf,
            owner=owner,
            counted=counted,
            surplus=lambda queue, beside: self._use.surplus(queue, beside=beside),
        )

    def never(self, namespace: str, account: Account | None, wanted: Amounts) -> bool:
        """Return whether a limit is below ``wanted`` even while no other pod uses anything."""
        account = account or NO_ACCOUNT
        quotas = [one for one in self._quotas.get(namespace, {}).values() if one.counts(account)]
        queue = self._queue_of(namespace, account)
        path = self._tree.path(queue) if queue else ()
        for resource, amount in wanted.items():
            if not amount:
                continue
            most = [one.limits[resource].most for one in quotas if resource in one.limits]
            most += [
                self._tree.limits[name][resource]
                for name in path
                if resource in self._tree.limits[name]
            ]
            if path and resource in self._tree.managed:
                most.append(self._tree.total(resource))
            if most and min(most) < amount:
                return True
        return False

    def headroom(
        self, namespace: str, *, waits: Callable[[str], bool] | None = None
    ) -> list[HeadroomRow]:
        """Return the amount of each resource that one more pod of the namespace may use.

        Of each resource alone: a pod needs all of its resources at once. For pods that name no
        queue and that quotas without scopes count. ``waits`` as in ``first_look``.
        """
        queue = self._queue_of(namespace, NO_ACCOUNT)
        limited = {
            resource
            for quota in self._quotas.get(namespace, {}).values()
            for resource in quota.limits
        } | (set(self._tree.resources) if queue else set())
        return [
            self._headroom_row(namespace, queue, resource, waits) for resource in sorted(limited)
        ]

    def _headroom_row(
        self, namespace: str, queue: str, resource: Resource, waits: Callable[[str], bool] | None
    ) -> HeadroomRow:
        def refusal_of(amount: int) -> NodeRefusal | None:
            return self.first_look(namespace, None, {resource: amount}, waits=waits)

        refused = refusal_of(MOST)
        if refused is None:
            return HeadroomRow(resource=str(resource), queue=queue, amount=None)
        fits, exceeds = 0, MOST  # every rule that refuses an amount refuses any larger one
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            refusal = refusal_of(middle)
            if refusal is None:
                fits = middle
            else:
                exceeds, refused = middle, refusal
        return HeadroomRow(
            resource=str(resource), queue=queue, amount=fits, code=refused.code, text=refused.text
        )

    def _used(self, quota: Quota, resource: Resource) -> int:
        return sum(
            total.get(resource, 0)
            for account, total in self._totals_of(quota.namespace).items()
            if quota.counts(account)
        )

    def _totals_of(self, namespace: str) -> Mapping[Account, dict[Resource, int]]:
        totals = self._totals.get(namespace)
        if totals is None:
            totals = self._totals[namespace] = {}
            for entry in self._live.get(namespace, {}).values():
                add_to(totals.setdefault(entry.account, {}), entry.amounts)
        return totals

    # --- going on elsewhere ----------------------------------------------------------------------

    def memory(self) -> QuotaMemory:
        """Return everything that answers depend on."""
        return QuotaMemory(
            seq=self.seq,
            generation=self.generation,
            is_exact=self._is_exact,
            objects=tuple(map(quota_memory.written, self.quotas())),
            queues=tuple(self._tree.queues.values()),
            records=tuple(
                entry.record for entries in self._live.values() for entry in entries.values()
            ),
            refused=tuple(self._refused.items()),
            coming=tuple(entry.record for entry in self._coming.values()),
            claims=quota_memory.written_claims(self._claims),
        )

    def resume(self, memory: QuotaMemory) -> None:
        """Resume in an empty ledger from the point where ``memory`` was taken."""
        for document in memory.objects:
            self.put_quota(quota_memory.quota_of(document))
        self.set_tree(quota_memory.tree_of(memory.queues))
        for record in memory.records:
            self._put(record.namespace, (record.node, record.pod_uid), _Entry(record))
        self._refused.update(memory.refused)
        for record in memory.coming:
            self.expect(record)
        self._claims = quota_memory.claims_of(memory.claims)
        self.seq, self.generation = memory.seq, memory.generation
        self._is_exact = memory.is_exact

    # --- showing ---------------------------------------------------------------------------------

    def quota_rows(self) -> list[QuotaRow]:
        """Return every limit of every ResourceQuota of ours, by namespace and name."""
        return [
            QuotaRow(
                namespace=quota.namespace,
                quota=quota.name,
                key=limit.key,
                resource=str(resource),
                used=self._used(quota, resource),
                limit=limit.most,
                problem=limit.problem,
            )
            for quota in self.quotas()
            for resource, limit in quota.limits.items()
        ]

    def queue_rows(self) -> list[QueueRow]:
        """Return every queue and resource, each queue after its parent."""
        waiting: dict[str, int] = {}
        for claim in self._claims.values():
            for name in self._tree.path(claim.queue):
                waiting[name] = waiting.get(name, 0) + 1
        return [
            self._queue_row(name, resource, waiting.get(name, 0))
            for name in self._below("")
            for resource in sorted(self._tree.resources)
        ]

    def _queue_row(self, name: str, resource: Resource, waiting: int) -> QueueRow:
        tree, config = self._tree, self._tree.queues[name]
        guaranteed = tree.guaranteed[name].get(resource, 0)
        owned = min(self._use.used(name, resource), guaranteed)
        used = self._use_of_all.used(name, resource)
        is_managed = resource in tree.managed
        return QueueRow(
            queue=name,
            parent=config.parent,
            depth=len(tree.path(name)),
            resource=str(resource),
            used=used,
            guaranteed=guaranteed,
            borrowed=used - owned if is_managed else 0,
            limit=tree.limits[name].get(resource),
            borrow_weight=config.borrow_weight,
            lend=config.lend,
            waiting=waiting,
        )

    def _below(self, name: str) -> Iterator[str]:
        for child in self._tree.children[name]:
            yield child
            yield from self._below(child)


def unknown_queue(name: str, namespace: str) -> NodeRefusal:
    """Return the refusal of a pod that names a queue which its namespace cannot use."""
    return _refusal_of(
        "QueueUnknown",
        f'label hami.io/queue: "{_clip(name, _NAME_SHOWN)}" is no queue for pods of namespace'
        f" {_clip(namespace, _NAME_SHOWN)}",
    )


def priority_too_high(container: str, asked: int, queue: str, floor: int) -> NodeRefusal:
    """Return the refusal of a pod that requests a higher task priority than its queue allows."""
    return _refusal_of(
        "TaskPriorityTooHigh",
        f"container {_clip(container, _SHORT_NAME)}: priority {asked}; queue "
        f"{_clip(queue, _SHORT_NAME)} allows {floor} to {LOWEST_PRIORITY}: write "
        f"nvidia.com/priority: {floor}",
    )


def _refusal_of(code: RefusalCode, text: str) -> NodeRefusal:
    return NodeRefusal(code=code, text=_clip(f"{code}: {text}", TEXT_BYTES))


def _clip(text: str, length: int) -> str:
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= length else text[: length - 2] + ".."
