# SPDX-License-Identifier: Apache-2.0
"""Decides the next step for one device's hardware partitions (design D24, ADR 0012).

A decision compares four things: shares of the ledger that need a partition (``Need``), the agent's
journal (``Note``), the partitions on the hardware (``Instance``), and the owners that may still use
them. It returns the new journal and at most one step. The caller stores the journal, executes the
step, reads the hardware again, and asks for the next decision. So a decision after a crash needs no
special case.

Phases of a note::

    creating      written before a creation is requested; ends at the next reading, which
                  shows the new instance (then ``made``), a rest of it (then ``destroying``) or
                  nothing (then there is no note any more)
    made          an instance carries the share
    destroying    written before a removal is requested; ends when a reading shows
                  neither it nor, at its place, a rest of it

Rules: an instance whose owner the ledger names, whose container may still run, or in which
processes run, is not touched. Instances of this agent without an owner are removed. Instances that
this agent did not create are *foreign*: they are left alone, unless the operator configures their
removal, and are reported, because their capacity must not be offered. Removals go before creations,
oldest reservation first. Without a journal an instance is adopted only if it matches exactly one
share of the ledger and is the only match, or if the share's container was given it.

Nothing is removed, and nothing is decided about a device whose journal was lost, before ledger and
pods are known. Memory in MiB, compute in percent, positions as in ``hami_common.model.device``.
Depends on no disk, clock or vendor.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.allocation import StateRecord
from hami_common.model.device import Device, DeviceFacts, Profile
from hami_common.model.placement import ContainerShares, Share
from hami_common.vendors.handles import needs_instance
from hami_nodeagent.core.claims import Entry, ListedPod
from hami_nodeagent.core.grants import Grant, GrantBook
from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.core.podbook import PodBook

FILE_VERSION = 1
WITHHELD = "withheld"
"""Resource that no device has. A size requires it when all places of the size are foreign or
faulty."""

FAULT_NUMBER = "gpu_instance"
"""Handle by which fault reports name a partition."""
TOLD = ("mig_uuid", FAULT_NUMBER, "compute_instance")
"""Handles by which NVIDIA's tools name a MIG instance; only MIG instances have the first."""

Phase = Literal["creating", "made", "destroying"]
ChangeKind = Literal["created", "adopted", "removed", "lost"]


class Owner(Struct, frozen=True, kw_only=True, omit_defaults=True, order=True):
    """One share of one container of one reservation; empty: no owner."""

    pod_uid: str = ""
    allocation_id: str = ""
    container: str = ""
    number: int = 0
    """Position among the container's shares, over all vendors."""


NOBODY = Owner()


class Need(Struct, frozen=True, kw_only=True):
    """A share that requires a partition."""

    owner: Owner
    wanted: Wanted
    may_run: bool = False
    """The container was given the share, so it may be using an instance."""


class Note(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the journal."""

    owner: Owner = NOBODY
    vendor: str
    wanted: Wanted
    phase: Phase
    instance_id: str = ""
    before: tuple[str, ...] = ()
    """Instances on the device when the creation began."""


class JournalFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The journal on disk."""

    version: int
    surveyed: tuple[str, ...] = ()
    """Devices whose instances were all identified: an instance without a note there is foreign."""
    notes: tuple[Note, ...] = ()


class Look(Struct, frozen=True, kw_only=True):
    """Input of a decision on one device."""

    uuid: str
    vendor: str
    instances: tuple[Instance, ...]
    """Instances of this device, as just read."""
    notes: tuple[Note, ...]
    """Notes of this device."""
    needs: tuple[Need, ...] = ()
    """Needs on this device, oldest first."""
    kept: Collection[Owner] = ()
    """Owners that are no longer in the ledger while their containers may still run."""
    profiles: tuple[Profile, ...] = ()
    totals: Mapping[str, int] = {}
    memory_mib: int = 0
    is_complete: bool = True
    """Ledger and pods are known, so an owner that is not listed owns nothing."""
    is_surveyed: bool = True
    told: Mapping[Owner, str] = {}
    """Instances that the hardware named in the response to a creation."""
    given: Mapping[Owner, str] = {}
    """Instances given to containers, where known although the journal is lost."""
    creations_later: Collection[Owner] = ()
    removals_later: Collection[str] = ()
    """Failed removals whose retry is not due yet."""
    collect_foreign: bool = False


class Create(Struct, frozen=True, kw_only=True):
    """Create one partition."""

    need: Need


class Destroy(Struct, frozen=True, kw_only=True):
    """Destroy one partition."""

    instance: Instance
    owner: Owner


class Change(Struct, frozen=True, kw_only=True):
    """A change of the hardware that the reading showed."""

    kind: ChangeKind
    owner: Owner
    wanted: Wanted
    instance_id: str


class Plan(Struct, frozen=True, kw_only=True):
    """A decision."""

    notes: tuple[Note, ...]
    """Journal lines of this device, to be stored before the step is executed."""
    is_surveyed: bool
    step: Create | Destroy | None = None
    carried: Mapping[Owner, Instance] = {}
    """Instances by the share that they carry."""
    foreign: tuple[Instance, ...] = ()
    changes: tuple[Change, ...] = ()
    waiting: Mapping[Owner, str] = {}
    """Shares without an instance for which no step is possible now, with the reason."""
    busy: tuple[str, ...] = ()
    """Instances without an owner that processes use."""


def fits(instance: Instance, wanted: Wanted) -> bool:
    """Return whether the instance matches ``wanted``, as far as the hardware reports it."""
    if instance.uuid != wanted.uuid or instance.profile != wanted.profile:
        return False
    if instance.kind and wanted.kind and instance.kind != wanted.kind:
        return False
    if not wanted.profile:
        is_same_core = not instance.core_pct or instance.core_pct == wanted.core_pct
        is_same_size = not instance.memory_mib or instance.memory_mib == wanted.memory_mib
        return is_same_size and is_same_core
    return wanted.start is None or instance.start in (None, wanted.start)


def is_whole(instance: Instance) -> bool:
    """Return whether the instance is usable, and not the rest of an interrupted creation."""
    return bool(instance.profile or instance.handles)


def decide(look: Look) -> Plan:
    """Return the new journal of a device and the next step."""
    return _Decision(look).plan()


class _Decision:
    """One decision in progress."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.is_surveyed = look.is_surveyed
        self.by_id = {one.instance_id: one for one in look.instances}
        self.notes: list[Note] = []
        self.changes: list[Change] = []
        self.waiting: dict[Owner, str] = {}
        self.busy: list[str] = []
        self.needed = {need.owner for need in look.needs}

    def plan(self) -> Plan:
        self._settle()
        self._hand_over()
        if not self.is_surveyed and self.look.is_complete:
            self._survey()
        foreign = tuple(self._unclaimed()) if self.is_surveyed else ()
        step: Create | Destroy | None = self._removal(foreign)
        if step is None and self.is_surveyed:
            step = self._creation()
        return Plan(
            notes=tuple(self.notes),
            is_surveyed=self.is_surveyed,
            step=step,
            carried={
                note.owner: self.by_id[note.instance_id]
                for note in self.notes
                if note.phase == "made"
            },
            foreign=foreign,
            changes=tuple(self.changes),
            waiting=self.waiting,
            busy=tuple(self.busy),
        )

    # -- comparison of the notes with the reading

    def _settle(self) -> None:
        """Compare each note with the hardware; every started creation ends here."""
        begun = []
        for note in self.look.notes:
            if note.phase == "creating":
                begun.append(note)
            elif self._is_there(note):
                self.notes.append(note)
            elif note.phase == "destroying" and (rest := self._rest_of(note)):
                self.notes.append(replace(note, instance_id=rest))
            else:
                self._tell("lost" if note.phase == "made" else "removed", note)
        for note in begun:
            self._settle_creation(note)

    def _is_there(self, note: Note) -> bool:
        found = self.by_id.get(note.instance_id)
        if found is None:
            return False
        if note.phase == "destroying" and not is_whole(found):
            return True
        return fits(found, note.wanted)

    def _rest_of(self, note: Note) -> str:
        """Return the rest of an interrupted removal at the note's place, under another id."""
        noted = {one.instance_id for one in self.look.notes}
        for one in self.look.instances:
            is_at_place = one.start is not None and one.start == note.wanted.start
            if is_at_place and not is_whole(one) and one.instance_id not in noted:
                return one.instance_id
        return ""

    def _settle_creation(self, note: Note) -> None:
        fresh = [one for one in self._unclaimed() if one.instance_id not in note.before]
        made = [one for one in fresh if is_whole(one) and fits(one, note.wanted)]
        named = [one for one in made if one.instance_id == self.look.told.get(note.owner)]
        for one in named or made:
            if len(named or made) == 1:
                now = replace(note, phase="made", instance_id=one.instance_id, before=())
                self.notes.append(now)
                self._tell("created", now)
        self.notes.extend(
            replace(note, phase="destroying", instance_id=one.instance_id, before=())
            for one in fresh
            if not is_whole(one)
        )

    def _hand_over(self) -> None:
        """Keep the instance of a share whose pod has a new reservation."""
        bare = self._bare_needs()
        for place, note in enumerate(self.notes):
            if note.phase != "made" or note.owner in self.needed:
                continue
            for need in bare:
                same_container = (need.owner.pod_uid, need.owner.container, need.owner.number) == (
                    note.owner.pod_uid,
                    note.owner.container,
                    note.owner.number,
                )
                if same_container and need.wanted == note.wanted:
                    self.notes[place] = replace(note, owner=need.owner)
                    bare.remove(need)
                    break

    def _survey(self) -> None:
        """Identify the instances of a device that the journal does not cover."""
        for need in self._bare_needs():
            found = self.by_id.get(self.look.given.get(need.owner, ""))
            if found is not None and found in self._unclaimed() and fits(found, need.wanted):
                self._adopt(need, found)
        doubtful = False
        bare = self._bare_needs()
        for need in bare:
            candidates = [one for one in self._unclaimed() if _is_surely(one, need.wanted)]
            rivals = [
                other
                for other in bare
                if other is not need and any(_is_surely(one, other.wanted) for one in candidates)
            ]
            if len(candidates) == 1 and not rivals:
                self._adopt(need, candidates[0])
            elif candidates and need.may_run:
                doubtful = True
                self.waiting[need.owner] = (
                    f"the journal is lost, and {len(candidates)} instances may be the one that "
                    "this container uses"
                )
        self.is_surveyed = not doubtful

    def _adopt(self, need: Need, found: Instance) -> None:
        note = Note(
            owner=need.owner,
            vendor=self.look.vendor,
            wanted=need.wanted,
            phase="made",
            instance_id=found.instance_id,
        )
        self.notes.append(note)
        self._tell("adopted", note)

    # -- next step

    def _removal(self, foreign: Sequence[Instance]) -> Destroy | None:
        step = None
        for place, note in enumerate(self.notes):
            if note.phase == "made" and not self._is_nobodys(note.owner):
                continue
            found = self.by_id[note.instance_id]
            if found.is_busy:
                self.busy.append(found.instance_id)
            elif step is None and found.instance_id not in self.look.removals_later:
                self.notes[place] = replace(note, phase="destroying")
                step = Destroy(instance=found, owner=note.owner)
        if step is not None or not (self.look.collect_foreign and self.look.is_complete):
            return step
        for one in foreign:
            if not one.is_busy and one.instance_id not in self.look.removals_later:
                self.notes.append(
                    Note(
                        vendor=self.look.vendor,
                        wanted=_wanted_like(one),
                        phase="destroying",
                        instance_id=one.instance_id,
                    )
                )
                return Destroy(instance=one, owner=NOBODY)
        return None

    def _is_nobodys(self, owner: Owner) -> bool:
        if owner in self.needed or owner in self.look.kept:
            return False
        return self.look.is_complete

    def _creation(self) -> Create | None:
        going = [note for note in self.notes if note.phase == "destroying"] or self.busy
        for need in self._bare_needs():
            if need.owner in self.look.creations_later:
                self.waiting[need.owner] = "it is tried again"
                continue
            lack = shortage(self.look, need.wanted)
            if lack and going:
                self.waiting[need.owner] = f"what held its room is still there: {lack}"
                continue
            self.notes.append(
                Note(
                    owner=need.owner,
                    vendor=self.look.vendor,
                    wanted=need.wanted,
                    phase="creating",
                    before=tuple(sorted(self.by_id)),
                )
            )
            return Create(need=need)
        return None

    # -- helpers

    def _unclaimed(self) -> list[Instance]:
        claimed = {note.instance_id for note in self.notes}
        return [one for one in self.look.instances if one.instance_id not in claimed]

    def _bare_needs(self) -> list[Need]:
        """Return needs without an instance."""
        has = {note.owner for note in self.notes if note.phase == "made"}
        return [need for need in self.look.needs if need.owner not in has]

    def _tell(self, kind: ChangeKind, note: Note) -> None:
        self.changes.append(
            Change(kind=kind, owner=note.owner, wanted=note.wanted, instance_id=note.instance_id)
        )


def _is_surely(instance: Instance, wanted: Wanted) -> bool:
    """Return whether the instance certainly matches, by the hardware's own data."""
    is_told = bool(instance.profile or instance.memory_mib)
    return is_whole(instance) and is_told and fits(instance, wanted)


def _wanted_like(instance: Instance) -> Wanted:
    return Wanted(
        uuid=instance.uuid,
        profile=instance.profile,
        start=instance.start,
        kind=instance.kind,
        memory_mib=instance.memory_mib,
        core_pct=instance.core_pct,
    )


def shortage(look: Look, wanted: Wanted) -> str:
    """Return the resource that the device lacks for another partition; empty: none known."""
    if not wanted.profile:
        used_mib = sum(one.memory_mib for one in look.instances)
        free_mib = look.memory_mib - used_mib
        return f"{free_mib} MiB are free" if free_mib < wanted.memory_mib else ""
    by_name = {profile.name: profile for profile in look.profiles}
    profile = by_name.get(wanted.profile)
    if profile is None:
        return ""
    taken: dict[str, int] = {}
    for one in look.instances:
        if one.profile in by_name:
            for name, amount in by_name[one.profile].need(one.start).items():
                taken[name] = taken.get(name, 0) + amount
    limits = {f"limit {one.name}": one.limit for one in look.profiles if one.limit}
    for name, amount in profile.need(wanted.start).items():
        total = look.totals.get(name, limits.get(name, 1 if name.startswith("position ") else 0))
        free = total - taken.get(name, 0)
        if free < amount:
            return f"{name}: {max(0, free)} of {total} free, {amount} needed"
    return ""


# -- needs and users of partitions


def divided_shares(
    container: ContainerShares, vendors: Collection[str], devices_by_uuid: Mapping[str, Device]
) -> Iterator[tuple[int, Share]]:
    """Yield shares that require a partition, with position; ``vendors``: vendors divided here.

    A device that is not known yet requires nothing.
    """
    for number, share in enumerate(container.shares):
        device = devices_by_uuid.get(share.uuid)
        if share.vendor in vendors and device is not None and needs_instance(share, device):
            yield number, share


def owner_of(entry: Entry, container: str, number: int) -> Owner:
    """Return the owner that represents a share."""
    return Owner(
        pod_uid=entry.record.pod_uid,
        allocation_id=entry.record.allocation_id,
        container=container,
        number=number,
    )


class Facts(Struct, frozen=True, kw_only=True):
    """Facts about the need for partitions and their use."""

    entries_by_uid: Mapping[str, Entry]
    states_by_uid: Mapping[str, StateRecord]
    failed: Collection[str]
    """Pods whose allocation this agent marked as failed."""
    pods: PodBook
    grants: GrantBook
    started: Collection[Owner] = ()
    """Shares whose container was allowed to start in this run of the agent."""
    left: Collection[str] = ()
    """Pods that kubelet no longer lists although their grants exist."""
    is_ledger_known: bool = True

    def needs(
        self,
        vendors: Collection[str],
        devices_by_uuid: Mapping[str, Device],
        notes: Iterable[Note],
    ) -> dict[str, tuple[Need, ...]]:
        """Return the shares that require a partition, by device, oldest first.

        While the ledger is unknown, the shares that containers were given before are used.
        """
        found: dict[str, list[Need]] = {}
        for entry in sorted(self.entries_by_uid.values(), key=lambda entry: entry.sequence):
            if not self._is_wanted(entry):
                continue
            for container in entry.record.containers:
                for number, share in divided_shares(container, vendors, devices_by_uuid):
                    owner = owner_of(entry, container.name, number)
                    found.setdefault(share.uuid, []).append(
                        Need(owner=owner, wanted=wanted_of(share), may_run=self._has_grant(owner))
                    )
        if not self.is_ledger_known:
            known = {need.owner for needs in found.values() for need in needs}
            for note in notes:
                is_used = note.phase != "destroying" and self.may_use(note.owner)
                if note.owner not in known and is_used:
                    found.setdefault(note.wanted.uuid, []).append(
                        Need(owner=note.owner, wanted=note.wanted, may_run=True)
                    )
        return {uuid: tuple(needs) for uuid, needs in found.items()}

    def may_use(self, owner: Owner) -> bool:
        """Return whether a container may run with the share, whatever the ledger contains."""
        if owner.pod_uid in self.left or not owner.pod_uid:
            return False
        if self.grants.is_by_claim(owner.pod_uid):
            return self._has_grant(owner)  # until the claim is unprepared
        pod = self.pods.find(owner.pod_uid)
        if pod is not None and pod.finished:
            return False
        if owner in self.started:
            return True
        if self._has_failed(owner):
            return pod is not None and owner.container in pod.started
        if self._has_grant(owner):
            return True
        if pod is None or pod.gone:
            return False
        if pod.signed is None:
            return bool(pod.annotation_problem)
        return pod.signed.allocation_id == owner.allocation_id

    def _has_failed(self, owner: Owner) -> bool:
        """Return whether the reservation failed, so that no further container starts with it."""
        state = self.states_by_uid.get(owner.pod_uid)
        return owner.pod_uid in self.failed or (
            state is not None
            and state.state == "failed"
            and state.allocation_id == owner.allocation_id
        )

    def _has_grant(self, owner: Owner) -> bool:
        return any(
            grant.allocation_id == owner.allocation_id
            for grant in self.grants.of_pod(owner.pod_uid)
        )

    def _is_wanted(self, entry: Entry) -> bool:
        record = entry.record
        if record.op == "release" or self._has_failed(owner_of(entry, "", 0)):
            return False
        pod = self.pods.find(record.pod_uid)
        if pod is not None and (pod.gone or pod.finished):
            return False
        if record.held_for:
            # Another pod may own the capacity until this pod is bound to it.
            signed = pod.signed if pod is not None else None
            return signed is not None and signed.allocation_id == record.allocation_id
        return True


def wanted_of(share: Share) -> Wanted:
    """Return the partition for a share."""
    return Wanted(
        uuid=share.uuid,
        profile=share.profile,
        start=share.start,
        kind=share.kind,
        memory_mib=share.memory_mib,
        core_pct=share.core_pct,
    )


def have_left(pods: PodBook, grants: GrantBook, listing: Sequence[ListedPod]) -> frozenset[str]:
    """Return pods that are gone from API server and kubelet although their grants exist.

    Claims are no pods: kubelet unprepares them.
    A listed pod of the same name is another pod if it does not show the granted ids, or if another
    pod of this name has a younger grant of these ids.
    """
    listed = {(one.namespace, one.name): one for one in listing}
    return frozenset(
        uid
        for uid in grants.pod_uids()
        if not grants.is_by_claim(uid)
        and ((pod := pods.find(uid)) is None or pod.gone)
        and not any(
            _is_shown(grant, listed.get((grant.namespace, grant.pod)), grants)
            for grant in grants.of_pod(uid)
        )
    )


def _is_shown(grant: Grant, listed: ListedPod | None, grants: GrantBook) -> bool:
    if listed is None:
        return False
    if listed.uid:
        return listed.uid == grant.pod_uid
    is_succeeded = any(
        other.time_s > grant.time_s
        and other.pod_uid != grant.pod_uid
        and (other.namespace, other.pod) == (grant.namespace, grant.pod)
        for other in grants.of_ids(grant.resource, grant.ids)
    )
    if is_succeeded:
        return False
    shown = listed.ids_by_container.get(grant.container)
    if shown is None:  # an ordinary init container is never listed
        return grant.kind == "init"
    return shown.get(grant.resource) == frozenset(grant.ids)


# -- report to the scheduler


def without_foreign(facts: DeviceFacts, foreign: Sequence[Instance]) -> DeviceFacts:
    """Return the device without the capacity of foreign instances.

    Totals shrink, occupied start positions are removed, and a size without a free place requires a
    resource that the device lacks. A device without a table of sizes takes no new pods, because no
    smaller restriction can be expressed for it.
    """
    if not foreign:
        return facts
    if not facts.partitions:
        return replace(
            facts, healthy=False, health_reason=facts.health_reason or foreign_text(foreign)
        )
    by_name = {profile.name: profile for profile in facts.partitions}
    totals = dict(facts.resources)
    positions: set[int] = set()
    counts: dict[str, int] = {}
    for one in foreign:
        profile = by_name.get(one.profile)
        if profile is None or not one.profile:
            continue
        counts[one.profile] = counts.get(one.profile, 0) + 1
        for name, amount in profile.resources.items():
            totals[name] = max(0, totals.get(name, 0) - amount)
        if one.start is not None:
            positions.update(range(one.start, one.start + profile.size))
    is_unknown = any(one.profile not in by_name or not one.profile for one in foreign)
    profiles = tuple(
        _without(profile, positions, counts.get(profile.name, 0), is_blocked=is_unknown)
        for profile in facts.partitions
    )
    return replace(facts, partitions=profiles, resources={**totals, WITHHELD: 0})


def without_faulty(facts: DeviceFacts, faulty: Sequence[Instance]) -> DeviceFacts:
    """Return the device without the places of faulty partitions.

    Pods with such a partition keep it, so totals stay: the ledger counts it until its pod ends.
    """
    by_name = {profile.name: profile for profile in facts.partitions}
    positions = {
        at
        for one in faulty
        if one.profile in by_name and one.start is not None
        for at in range(one.start, one.start + by_name[one.profile].size)
    }
    if not positions:
        return facts
    profiles = tuple(_without(one, positions, 0, is_blocked=False) for one in facts.partitions)
    return replace(facts, partitions=profiles, resources={**facts.resources, WITHHELD: 0})


def _without(profile: Profile, positions: set[int], count: int, *, is_blocked: bool) -> Profile:
    free = tuple(
        start
        for start in profile.starts
        if positions.isdisjoint(range(start, start + profile.size))
    )
    is_full = bool(profile.starts) and not free
    is_used_up = 0 < profile.limit <= count
    if is_blocked or is_full or is_used_up or not profile.name:
        return replace(profile, resources={**profile.resources, WITHHELD: 1})
    return replace(profile, starts=free, limit=max(0, profile.limit - count))


def foreign_text(foreign: Sequence[Instance]) -> str:
    """Return a text for the operator on foreign instances of one device; empty: none."""
    if not foreign:
        return ""
    words = sorted(
        f"{one.instance_id} ({one.profile or 'of unknown size'}"
        f"{'' if one.start is None else f' at {one.start}'})"
        for one in foreign
    )
    return f"partitions that were not made by this agent: {', '.join(words)}"


def faulty_text(faulty: Sequence[Instance]) -> str:
    """Return a text for the operator on faulty partitions of one device; empty: none."""
    words = sorted(f"{one.instance_id} ({one.profile} at {one.start})" for one in faulty)
    return f"partitions at fault: {', '.join(words)}" if words else ""


def table_of(device: Device | None) -> tuple[tuple[Profile, ...], Mapping[str, int], int]:
    """Return sizes, totals and memory of a device; empty values for an unknown device."""
    if device is None:
        return (), {}, 0
    return device.partitions, device.resources, device.memory_mib
