# SPDX-License-Identifier: Apache-2.0
"""Reconciles the hardware partitions of this node with the ledger (design D24, ADR 0012).

For each device: read the hardware, let ``core.partitions`` decide, store the journal, execute the
one step that was decided, and repeat until no step is left. Each device is reconciled by one task
at a time; devices are reconciled in parallel, and share readings where possible. A device is
checked when the picture changes (a record arrives, a pod ends), when a container is about to start
(``ensure``), and every ``look_s``, because other tools can create and remove partitions, too.

Failed steps are retried with exponential backoff. A share that never had a partition is given up
after ``tries`` attempts: its allocation fails, with code and reason. A share that had a partition
and lost it, or that is a claim's, is retried until it has one. ``PreStartContainer`` and
``NodePrepareResources`` are the only kubelet calls that wait here for the hardware, for at most
``pre_start_wait_s``. Times in seconds.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from hami_common.errors import Unavailable
from hami_common.events.allocation import is_of_claim
from hami_common.runtime.quarantine import sift
from hami_nodeagent.core.board import (
    PartitionFailed,
    PartitionsRead,
    SharesEnded,
    VendorsDivided,
)
from hami_nodeagent.core.claims import ListedPod
from hami_nodeagent.core.grants import Grant
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.partitions import (
    FILE_VERSION,
    Change,
    Create,
    Destroy,
    Facts,
    JournalFile,
    Look,
    Need,
    Note,
    Owner,
    Plan,
    decide,
    foreign_text,
    have_left,
    shortage,
    table_of,
)
from hami_nodeagent.core.reporting import Failure
from hami_nodeagent.drivers.errors import DriverError, PartitionBusy, PartitionRefused
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.shell.partition_news import PartitionTeller
from hami_nodeagent.shell.site import Site

REFUSED = "partition-refused"
"""The hardware has no capacity for the partition, or does not support its size."""
UNMADE = "partition-unmade"
"""The hardware or its driver failed."""
_LIST_EVERY_S = 0.5
"""Minimum interval between two queries of kubelet for the containers of deleted pods."""

_log = logging.getLogger(__name__)


class PodLister(Protocol):
    """Kubelet's own list of pods; ``shell.podresources.PodResources``."""

    async def list(self, *, timeout_s: float | None = None) -> Sequence[ListedPod]: ...


def _key_of(owner: Owner) -> str:
    """Return the key of a share in quarantine."""
    return f"{owner.pod_uid}/{owner.container}/{owner.number}"


@dataclass
class _Ticket:
    """One reading that several callers wait for."""

    instances: tuple[Instance, ...] | None = None
    error: DriverError | None = None


class Reader:
    """Reads a vendor's partitions; concurrent callers are coalesced into the next reading."""

    def __init__(self, partitioner: Partitioner) -> None:
        self.partitioner = partitioner
        self._turn = anyio.Lock()
        self._waiting: _Ticket | None = None

    async def read(self) -> tuple[Instance, ...]:
        """Return the instances, from a reading begun after this call; errors as ``instances``."""
        ticket = self._waiting = self._waiting or _Ticket()
        async with self._turn:
            if ticket.instances is None and ticket.error is None:
                self._waiting = None
                try:
                    ticket.instances = await self.partitioner.instances()
                except DriverError as error:
                    ticket.error = error
        if ticket.error is not None:
            raise ticket.error
        return ticket.instances or ()


@dataclass
class _Later:
    """Backoff of an operation that failed and is retried."""

    attempts: int = 0
    not_before_s: float = 0.0


@dataclass
class _Known:
    """Last known state of one device."""

    vendor: str
    notes: tuple[Note, ...] = ()
    is_surveyed: bool = False
    is_stored: bool = True
    """The journal on disk has the same content."""
    instances: tuple[Instance, ...] | None = None
    begun_s: float = -1.0
    """Start of the last reading after which no step was left; monotonic."""
    asked_s: float = -1.0
    """Time of the last request for a reading that begins no earlier; monotonic."""
    later: _Later = field(default_factory=_Later)
    """Backoff after a failed reading, or after a failure to store the journal."""
    removals: dict[str, _Later] = field(default_factory=dict)
    foreign: str = ""


class Partitions:
    """Reconciles the partitions of one node, for all vendors whose devices it divides."""

    def __init__(
        self,
        *,
        site: Site,
        partitioners: Iterable[Partitioner],
        kubelet: PodLister,
        teller: PartitionTeller,
    ) -> None:
        self._readers = {one.vendor: Reader(one) for one in partitioners}
        self._site = site
        self._picture = site.picture
        self._board = site.picture.partitions
        self._settings = site.settings.partitions
        self._clock = site.clock
        self._metrics = site.metrics
        self._kubelet = kubelet
        self._teller = teller
        self._known: dict[str, _Known] = {}
        self._working: set[str] = set()
        self._creations: dict[Owner, _Later] = {}
        self._told: dict[Owner, str] = {}
        self._took_s: dict[tuple[str, str], float] = {}
        self._lost: set[Owner] = set()
        """Shares that lost their partition and have no new one yet."""
        self._left: frozenset[str] = frozenset()
        self._listed_at_s = 0.0
        self._turn = anyio.Lock()
        self._quarantine = site.quarantine
        self.given: dict[Owner, str] = {}
        """Instances that containers got in earlier runs of the agent, for a lost journal."""
        self._board.apply(VendorsDivided(vendors=frozenset(self._readers)))
        self._load()

    @property
    def is_idle(self) -> bool:
        """Return whether no device is being reconciled."""
        return not self._working

    async def run(self) -> None:
        """Reconcile the partitions with the ledger until cancelled."""
        async with anyio.create_task_group() as group:
            while True:
                changed = self._picture.changed
                now_s = self._clock.monotonic_s()
                await self._quarantine.run(
                    "partition", "look", partial(self._begin, group), is_retried=False
                )
                await self._picture.wait_change(changed, self._pause_s(now_s))

    async def _begin(self, group: TaskGroup) -> None:
        """Start the reconciliation of each device that is due."""
        await self._look_for_left()
        for uuid in self._due(self._clock.monotonic_s()):
            self._working.add(uuid)
            group.start_soon(self._work, uuid)

    async def ensure(self, grants: Collection[Grant]) -> str:
        """Wait until a new reading of the hardware shows these containers' partitions.

        Return the reason if that takes longer than ``pre_start_wait_s``; empty on success.
        """
        return await self.ensure_shares(
            {owner: uuid for grant in grants for owner, uuid in self.owners_of(grant).items()}
        )

    async def ensure_shares(self, owners: Mapping[Owner, str]) -> str:
        """Wait for the partitions of these shares, given with their devices; as ``ensure``."""
        begun_s = self._clock.monotonic_s()
        self.check_soon(*owners.values())
        with anyio.move_on_after(self._settings.pre_start_wait_s):
            while True:
                changed = self._picture.changed
                is_read = all(
                    uuid in self._known and self._known[uuid].begun_s >= begun_s
                    for uuid in owners.values()
                )
                if is_read and not self._board.lacking(owners):
                    return ""
                await changed.wait()
        return self._board.lacking(owners) or "the hardware does not report it"

    def check_soon(self, *uuids: str) -> None:
        """Request a new reading of these devices now, regardless of earlier readings."""
        for uuid in uuids:
            if uuid in self._known:
                self._known[uuid].asked_s = self._clock.monotonic_s()
        self._picture.note_change()

    def owners_of(self, grant: Grant) -> dict[Owner, str]:
        """Shares of a granted container that need a partition, with their device.

        If the ledger's record of the allocation is not known, the journal is used instead.
        """
        entry = self._picture.entries_by_uid.get(grant.pod_uid)
        if entry is not None and entry.record.allocation_id == grant.allocation_id:
            return self._board.owners(entry, grant.container, grant.vendor)
        return {
            note.owner: note.wanted.uuid
            for known in self._known.values()
            for note in known.notes
            if note.vendor == grant.vendor
            and (note.owner.pod_uid, note.owner.allocation_id, note.owner.container)
            == (grant.pod_uid, grant.allocation_id, grant.container)
        }

    # -- which devices need work

    def _due(self, now_s: float) -> list[str]:
        """Return the devices to reconcile now."""
        for uuid, device in self._picture.view.devices_by_uuid.items():
            if device.vendor in self._readers:
                self._known.setdefault(uuid, _Known(vendor="")).vendor = device.vendor
        facts = self._facts()
        needs = self._needs(facts)
        candidates = [
            uuid
            for uuid, known in self._known.items()
            if uuid not in self._working
            and known.vendor in self._readers
            and known.later.not_before_s <= now_s
        ]
        judged, failed = sift(
            candidates,
            lambda uuid: self._has_work(uuid, self._known[uuid], needs.get(uuid, ()), facts, now_s),
        )
        for uuid, _ in judged:
            self._quarantine.forget("partition", f"{uuid} look")
        for uuid, error in failed:
            self._quarantine.failed("partition", f"{uuid} look", error)
            self._put_off(self._known[uuid].later)
        return [uuid for uuid, has_work in judged if has_work]

    def _has_work(
        self, uuid: str, known: _Known, needs: tuple[Need, ...], facts: Facts, now_s: float
    ) -> bool:
        is_old = known.instances is None or known.begun_s + self._settings.look_s <= now_s
        if is_old or known.asked_s > known.begun_s:
            return True
        plan = decide(self._look(uuid, known, known.instances or (), needs, facts))
        return (
            plan.step is not None
            or not known.is_stored
            or plan.notes != known.notes
            or plan.is_surveyed != known.is_surveyed
        )

    def _pause_s(self, now_s: float) -> float:
        """Return the seconds until something is due, unless the picture changes before."""
        times = [self._settings.look_s]
        for uuid, known in self._known.items():
            if uuid in self._working:
                continue  # its end is a change
            times.append(known.begun_s + self._settings.look_s - now_s)
            times.append(known.later.not_before_s - now_s)
            times.extend(later.not_before_s - now_s for later in known.removals.values())
        times.extend(later.not_before_s - now_s for later in self._creations.values())
        if self._suspects():
            times.append(_LIST_EVERY_S)
        # Overdue times do not count: ``_begin`` started what is possible; the rest needs a change.
        return min([one for one in times if one > 0], default=self._settings.look_s)

    def _facts(self) -> Facts:
        picture = self._picture
        return Facts(
            entries_by_uid=picture.entries_by_uid,
            states_by_uid=picture.states_by_uid,
            failed=picture.failures_by_uid,
            pods=picture.pods,
            grants=picture.grants,
            started=self._board.started,
            left=self._left,
            is_ledger_known=picture.ledger_known,
        )

    def _needs(self, facts: Facts) -> dict[str, tuple[Need, ...]]:
        notes = [note for known in self._known.values() for note in known.notes]
        return facts.needs(self._board.vendors, self._picture.view.devices_by_uuid, notes)

    def _look(
        self,
        uuid: str,
        known: _Known,
        instances: Iterable[Instance],
        needs: tuple[Need, ...],
        facts: Facts,
    ) -> Look:
        now_s = self._clock.monotonic_s()
        profiles, totals, memory_mib = table_of(self._picture.view.devices_by_uuid.get(uuid))
        return Look(
            uuid=uuid,
            vendor=known.vendor,
            instances=tuple(one for one in instances if one.uuid == uuid),
            notes=known.notes,
            needs=needs,
            kept={note.owner for note in known.notes if facts.may_use(note.owner)},
            profiles=profiles,
            totals=totals,
            memory_mib=memory_mib,
            is_complete=self._picture.ledger_known and self._picture.pods_known,
            is_surveyed=known.is_surveyed,
            told=self._told,
            given=self.given,
            creations_later={
                owner for owner, one in self._creations.items() if one.not_before_s > now_s
            },
            removals_later={
                number for number, one in known.removals.items() if one.not_before_s > now_s
            },
            collect_foreign=self._settings.collect_foreign,
        )

    def _suspects(self) -> set[str]:
        """Return deleted pods whose partitions are kept only because of their grants."""
        picture = self._picture
        holding = {note.owner.pod_uid for known in self._known.values() for note in known.notes}
        return {
            uid
            for uid in holding & picture.grants.pod_uids()
            if uid not in self._left
            and not picture.grants.is_by_claim(uid)
            and ((pod := picture.pods.find(uid)) is None or pod.gone)
        }

    async def _look_for_left(self) -> None:
        """Find deleted pods that kubelet no longer lists: their containers cannot run any more."""
        self._left = self._left & self._picture.grants.pod_uids()
        now_s = self._clock.monotonic_s()
        is_time = now_s >= self._listed_at_s + _LIST_EVERY_S
        if not self._picture.pods_known or not is_time or not self._suspects():
            return
        self._listed_at_s = now_s
        try:
            listing = await self._kubelet.list()
        except Unavailable as error:
            _log.debug("kubelet does not list its pods", extra={"problem": str(error)})
            return
        left = have_left(self._picture.pods, self._picture.grants, listing)
        self._left = self._left | left

    # -- reconciliation of one device

    async def _work(self, uuid: str) -> None:
        known = self._known[uuid]
        try:
            attempt = partial(self._bring_up_to_date, uuid, known)
            if not await self._quarantine.run("partition", uuid, attempt, is_retried=False):
                self._put_off(known.later)
        finally:
            self._working.discard(uuid)
            self._picture.note_change()

    async def _bring_up_to_date(self, uuid: str, known: _Known) -> None:
        """Read, decide, store the journal and execute the step, until no step is left."""
        while True:
            begun_s = self._clock.monotonic_s()
            try:
                instances = await self._readers[known.vendor].read()
            except DriverError as error:
                self._note_unread(uuid, known, error)
                return
            facts = self._facts()
            needs = self._needs(facts).get(uuid, ())
            plan = decide(self._look(uuid, known, instances, needs, facts))
            known.instances = instances
            if not await self._store(uuid, known, plan):
                return
            self._show(uuid, known, plan)
            known.later = _Later()
            if plan.step is None:
                known.begun_s = begun_s
                return
            if isinstance(plan.step, Create):
                await self._create(known, plan.step.need, needs_text=self._lack(uuid, plan))
            else:
                await self._destroy(known, plan.step)

    async def _store(self, uuid: str, known: _Known, plan: Plan) -> bool:
        """Store the journal as decided; return whether it is on disk."""
        if (plan.notes, plan.is_surveyed) != (known.notes, known.is_surveyed):
            known.notes, known.is_surveyed = plan.notes, plan.is_surveyed
            known.is_stored = False
        if known.is_stored:
            return True
        try:
            async with self._turn:
                file = JournalFile(
                    version=FILE_VERSION,
                    surveyed=tuple(u for u, one in self._known.items() if one.is_surveyed),
                    notes=tuple(note for one in self._known.values() for note in one.notes),
                )
                await anyio.to_thread.run_sync(self._site.checkpoint.save_partitions, file)
        except OSError as error:
            self._metrics.checkpoint_failures.inc()
            _log.error(
                "journal of partitions not stored, hardware is left alone",
                extra={"device": uuid, "problem": str(error)},
            )
            self._put_off(known.later)
            return False
        known.is_stored = True
        return True

    async def _create(self, known: _Known, need: Need, *, needs_text: str) -> None:
        begun_s = self._clock.monotonic_s()
        partitioner = self._readers[known.vendor].partitioner
        self._told.pop(need.owner, None)
        try:
            made = await partitioner.create(need.wanted)
        except PartitionRefused as error:
            text = f"{error}; {needs_text}" if needs_text else str(error)
            self._note_unmade(known.vendor, need, REFUSED, text)
        except DriverError as error:
            self._note_unmade(known.vendor, need, UNMADE, str(error))
        except Exception as error:  # noqa: BLE001 - a driver's bug; counted, reported and retried
            self._quarantine.failed("partition", _key_of(need.owner), error)
            self._note_unmade(known.vendor, need, UNMADE, "internal error, see the agent's log")
        else:
            self._quarantine.forget("partition", _key_of(need.owner))
            self._told[need.owner] = made.instance_id
            took_s = self._clock.monotonic_s() - begun_s
            self._took_s[made.uuid, made.instance_id] = took_s
            self._metrics.partition_seconds.labels(vendor=known.vendor, doing="create").observe(
                took_s
            )

    async def _destroy(self, known: _Known, step: Destroy) -> None:
        begun_s = self._clock.monotonic_s()
        found = step.instance
        try:
            await self._readers[known.vendor].partitioner.destroy(found)
        except PartitionBusy as error:
            self._note_unremoved(known, step, "partition-busy", str(error))
        except DriverError as error:
            self._note_unremoved(known, step, UNMADE, str(error))
        except Exception as error:  # noqa: BLE001 - a driver's bug; counted, reported and retried
            self._quarantine.failed("partition", f"{found.uuid}/{found.instance_id}", error)
            self._note_unremoved(known, step, UNMADE, "internal error, see the agent's log")
        else:
            self._quarantine.forget("partition", f"{found.uuid}/{found.instance_id}")
            known.removals.pop(found.instance_id, None)
            took_s = self._clock.monotonic_s() - begun_s
            self._took_s[found.uuid, found.instance_id] = took_s
            self._metrics.partition_seconds.labels(vendor=known.vendor, doing="destroy").observe(
                took_s
            )

    # -- results of readings and steps

    def _show(self, uuid: str, known: _Known, plan: Plan) -> None:
        """Report the result of a reading to the rest of the agent, the metrics and the bus."""
        self._board.apply(
            PartitionsRead(
                uuid=uuid, carried=plan.carried, waiting=plan.waiting, foreign=plan.foreign
            )
        )
        for owner in plan.carried:
            self._creations.pop(owner, None)
            self._lost.discard(owner)
        self._tell_foreign(uuid, known, plan)
        self._metrics.partitions.labels(vendor=known.vendor, device=uuid, whose="ours").set(
            len(plan.carried)
        )
        self._metrics.partitions.labels(vendor=known.vendor, device=uuid, whose="foreign").set(
            len(plan.foreign)
        )
        for change in plan.changes:
            self._note_change(known.vendor, change)
        self._forget_ended(known)

    def _tell_foreign(self, uuid: str, known: _Known, plan: Plan) -> None:
        text = foreign_text(plan.foreign)
        if text == known.foreign:
            return
        known.foreign = text
        if text:
            _log.warning("foreign partitions", extra={"device": uuid, "text": text})
        else:
            _log.info("no foreign partitions any more", extra={"device": uuid})

    def _note_change(self, vendor: str, change: Change) -> None:
        if change.kind == "lost":
            self._lost.add(change.owner)
        self._told.pop(change.owner, None)
        self._metrics.partition_changes.labels(vendor=vendor, change=change.kind).inc()
        _log.log(
            logging.WARNING if change.kind == "lost" else logging.INFO,
            "partition changed",
            extra={
                "change": change.kind,
                "device": change.wanted.uuid,
                "instance": change.instance_id,
                "profile": change.wanted.profile,
                "start": change.wanted.start,
                "pod_uid": change.owner.pod_uid,
                "container": change.owner.container,
            },
        )
        took_s = self._took_s.pop((change.wanted.uuid, change.instance_id), 0.0)
        self._teller.tell(vendor, change, took_s=took_s)

    def _note_unmade(self, vendor: str, need: Need, code: str, text: str) -> None:
        later = self._creations.setdefault(need.owner, _Later())
        self._put_off(later)
        self._board.apply(PartitionFailed(owner=need.owner, text=text))
        self._metrics.partition_failures.labels(vendor=vendor, code=code).inc()
        _log.warning(
            "partition not made",
            extra={
                "device": need.wanted.uuid,
                "profile": need.wanted.profile,
                "start": need.wanted.start,
                "pod_uid": need.owner.pod_uid,
                "code": code,
                "problem": text,
                "attempt": later.attempts,
            },
        )
        self._give_up_perhaps(vendor, need, later, code, text)

    def _give_up_perhaps(
        self, vendor: str, need: Need, later: _Later, code: str, text: str
    ) -> None:
        had_one = need.owner in self._lost or need.owner in self.given
        uid = need.owner.pod_uid
        entry = self._picture.entries_by_uid.get(uid)
        if entry is not None and is_of_claim(entry.record):
            return  # kubelet shows the reason and retries as long as the claim is allocated
        if later.attempts < self._settings.tries or had_one:
            return
        reason = f"container {need.owner.container}, {later.attempts} attempts: {text}"
        self._picture.failures_by_uid.setdefault(uid, Failure(code=code, reason=reason))
        self._teller.tell_failed(vendor, need.owner, need.wanted, code=code, reason=text)

    def _note_unread(self, uuid: str, known: _Known, error: DriverError) -> None:
        self._put_off(known.later)
        self._metrics.partition_failures.labels(vendor=known.vendor, code="partition-unread").inc()
        _log.warning(
            "partitions not read",
            extra={"device": uuid, "problem": str(error), "attempt": known.later.attempts},
        )
        for need in self._needs(self._facts()).get(uuid, ()):
            if need.owner not in self._board.carried:
                self._board.apply(PartitionFailed(owner=need.owner, text=str(error)))
                self._give_up_perhaps(known.vendor, need, known.later, UNMADE, str(error))

    def _note_unremoved(self, known: _Known, step: Destroy, code: str, text: str) -> None:
        found = step.instance
        later = known.removals.setdefault(found.instance_id, _Later())
        self._put_off(later)
        self._metrics.partition_failures.labels(vendor=known.vendor, code=code).inc()
        _log.warning(
            "partition not removed",
            extra={
                "device": found.uuid,
                "instance": found.instance_id,
                "code": code,
                "problem": text,
                "attempt": later.attempts,
            },
        )

    def _lack(self, uuid: str, plan: Plan) -> str:
        """Return the capacity that the device lacks for the step, for the reason of a refusal."""
        if not isinstance(plan.step, Create):
            return ""
        known = self._known[uuid]
        look = self._look(uuid, known, known.instances or (), (), self._facts())
        parts = (shortage(look, plan.step.need.wanted), foreign_text(plan.foreign))
        return "; ".join(part for part in parts if part)

    def _put_off(self, later: _Later) -> None:
        pause_s = min(self._settings.retry_s * 2**later.attempts, self._settings.retry_most_s)
        later.attempts += 1
        later.not_before_s = self._clock.monotonic_s() + pause_s

    def _forget_ended(self, known: _Known) -> None:
        """Drop the state of shares and instances that no longer exist."""
        live = {need.owner for needs in self._needs(self._facts()).values() for need in needs}
        for memory in (self._creations, self._told):
            for owner in [owner for owner in memory if owner not in live]:
                del memory[owner]
        self._lost &= live
        self._board.apply(SharesEnded(live=live, granted=self._picture.grants.pod_uids()))
        shown = {one.instance_id for one in known.instances or ()}
        for number in [number for number in known.removals if number not in shown]:
            del known.removals[number]

    def _load(self) -> None:
        file = self._site.checkpoint.load_partitions()
        if file is None:
            if self._readers:
                _log.info("no journal of partitions, what exists is compared with the ledger")
            return
        for note in file.notes:
            known = self._known.setdefault(note.wanted.uuid, _Known(vendor=note.vendor))
            known.notes = (*known.notes, note)
        for uuid in file.surveyed:
            device = self._picture.view.devices_by_uuid.get(uuid)
            vendor = device.vendor if device is not None else ""
            self._known.setdefault(uuid, _Known(vendor=vendor)).is_surveyed = True
