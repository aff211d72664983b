# SPDX-License-Identifier: Apache-2.0
"""Decides what becomes of one device's hardware partitions next (design D24, ADR 0012).

A decision compares four things: shares of the ledger that need a partition (``Need``), what the
agent has written in its journal (``Note``), what the hardware shows now (``Instance``), and who may
still use what. It returns the journal as it should be and at most one step to take. Whoever takes
the step stores the journal first, takes it, reads the hardware again, and asks for the next
decision. So a decision after a crash is the same as any other, and needs no story of its own.

Phases of a note::

    creating      written before the hardware is told to make one; ends at the next reading, which
                  shows the new instance (then ``made``), a rest of it (then ``destroying``) or
                  nothing (then there is no note any more)
    made          an instance carries the share
    destroying    written before the hardware is told to remove one; ends when a reading shows
                  neither it nor, at its place, a rest of it

Rules: an instance whose owner the ledger names, or whose container may still run, or in which
processes run, is not touched. What this agent made and nobody owns is removed. What it did not make
is *foreign*: left alone, unless the operator wants otherwise, and told, because its room must not
be promised. Removals go before creations, oldest reservation first. Without a journal an instance
is taken for ours only if it is what exactly one share of the ledger needs, and no other instance
is; or if it is the one that the share's container was given.

Nothing is removed, and nothing is decided about a device whose journal was lost, before ledger and
pods are known. Memory in MiB, compute in percent, positions as in ``hami_common.model.device``.
Knows no disk, no clock and no vendor.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.allocation import CarriedShare, StateRecord
from hami_common.model.device import Device, DeviceFacts, Profile
from hami_common.model.placement import ContainerShares, Share, part_word
from hami_common.vendors.handles import handle_key, needs_instance
from hami_nodeagent.core.claims import Entry, ListedPod
from hami_nodeagent.core.grants import Grant, GrantBook
from hami_nodeagent.core.podbook import PodBook
from hami_nodeagent.drivers.partitioner import Instance, Wanted

FILE_VERSION = 1
WITHHELD = "withheld"
"""Resource that no device has: a size needs one when all its places are taken by what others made,
or by what is at fault."""

FAULT_NUMBER = "gpu_instance"
"""The handle by which faults name a partition."""
TOLD = ("mig_uuid", FAULT_NUMBER, "compute_instance")
"""Handles by which NVIDIA's tools know a MIG instance; only these have the first."""

Phase = Literal["creating", "made", "destroying"]
ChangeKind = Literal["created", "adopted", "removed", "lost"]


class Owner(Struct, frozen=True, kw_only=True, omit_defaults=True, order=True):
    """One share of one container of one reservation; empty: nobody."""

    pod_uid: str = ""
    allocation_id: str = ""
    container: str = ""
    number: int = 0
    """Place among the container's shares, over all vendors."""


NOBODY = Owner()


class Need(Struct, frozen=True, kw_only=True):
    """A share that a partition is to carry."""

    owner: Owner
    wanted: Wanted
    may_run: bool = False
    """The container was given the share, so it may use an instance now."""


class Note(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the journal."""

    owner: Owner = NOBODY
    vendor: str
    wanted: Wanted
    phase: Phase
    instance_id: str = ""
    before: tuple[str, ...] = ()
    """Instances that the device had when the creation was begun."""


class JournalFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The journal on disk."""

    version: int
    surveyed: tuple[str, ...] = ()
    """Devices whose instances were all told apart: what has no note there is foreign."""
    notes: tuple[Note, ...] = ()


class Look(Struct, frozen=True, kw_only=True):
    """All that a decision on one device looks at."""

    uuid: str
    vendor: str
    instances: tuple[Instance, ...]
    """As just read, of this device."""
    notes: tuple[Note, ...]
    """Of this device."""
    needs: tuple[Need, ...] = ()
    """On this device, oldest first."""
    kept: Collection[Owner] = ()
    """Owners that the ledger does not name any more, yet their containers may run."""
    profiles: tuple[Profile, ...] = ()
    totals: Mapping[str, int] = {}
    memory_mib: int = 0
    is_complete: bool = True
    """Ledger and pods are known, so that who is not named owns nothing."""
    is_surveyed: bool = True
    told: Mapping[Owner, str] = {}
    """Instances that the hardware named when it was told to make them."""
    given: Mapping[Owner, str] = {}
    """Instances that containers were given, where that is known although the journal is lost."""
    creations_later: Collection[Owner] = ()
    removals_later: Collection[str] = ()
    """What failed and is not to be tried yet."""
    collect_foreign: bool = False


class Create(Struct, frozen=True, kw_only=True):
    """Tell the hardware to make one."""

    need: Need


class Destroy(Struct, frozen=True, kw_only=True):
    """Tell the hardware to remove one."""

    instance: Instance
    owner: Owner


class Change(Struct, frozen=True, kw_only=True):
    """What the reading showed to have happened."""

    kind: ChangeKind
    owner: Owner
    wanted: Wanted
    instance_id: str


class Plan(Struct, frozen=True, kw_only=True):
    """A decision."""

    notes: tuple[Note, ...]
    """The journal's lines of this device, to be stored before the step is taken."""
    is_surveyed: bool
    step: Create | Destroy | None = None
    carried: Mapping[Owner, Instance] = {}
    """Instances by the share that they carry."""
    foreign: tuple[Instance, ...] = ()
    changes: tuple[Change, ...] = ()
    waiting: Mapping[Owner, str] = {}
    """Shares without an instance for which nothing can be done now, and why."""
    busy: tuple[str, ...] = ()
    """Instances that are nobody's but used by processes."""


def fits(instance: Instance, wanted: Wanted) -> bool:
    """Whether the instance is what is wanted, as far as the hardware tells."""
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
    """Whether the instance can be used; else it is what a broken creation left."""
    return bool(instance.profile or instance.handles)


def decide(look: Look) -> Plan:
    """What the journal should say about a device, and what is to be done next."""
    return _Decision(look).plan()


class _Decision:
    """One decision in the making."""

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

    # -- what the reading says about the notes

    def _settle(self) -> None:
        """Compare each note with the hardware; every begun creation ends here."""
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
        """What a removal that broke off left at the place, under a name of its own."""
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
        """The same share of the same pod under a new reservation keeps its instance."""
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
        """Tell apart what is on a device of which the journal says nothing."""
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

    # -- what is to be done

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

    # -- small questions

    def _unclaimed(self) -> list[Instance]:
        claimed = {note.instance_id for note in self.notes}
        return [one for one in self.look.instances if one.instance_id not in claimed]

    def _bare_needs(self) -> list[Need]:
        """Needs for which there is no instance."""
        has = {note.owner for note in self.notes if note.phase == "made"}
        return [need for need in self.look.needs if need.owner not in has]

    def _tell(self, kind: ChangeKind, note: Note) -> None:
        self.changes.append(
            Change(kind=kind, owner=note.owner, wanted=note.wanted, instance_id=note.instance_id)
        )


def _is_surely(instance: Instance, wanted: Wanted) -> bool:
    """Whether it is what is wanted, by what the hardware tells."""
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
    """What the device lacks for a partition beside those it has; empty: nothing that we know."""
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


# -- who needs and who may use what


def divided_shares(
    container: ContainerShares, vendors: Collection[str], devices_by_uuid: Mapping[str, Device]
) -> Iterator[tuple[int, Share]]:
    """Shares that a partition is to carry, with their place; ``vendors``: what this node divides.

    Of a device that is not known yet nothing is needed.
    """
    for number, share in enumerate(container.shares):
        device = devices_by_uuid.get(share.uuid)
        if share.vendor in vendors and device is not None and needs_instance(share, device):
            yield number, share


def owner_of(entry: Entry, container: str, number: int) -> Owner:
    """The owner that a share is."""
    return Owner(
        pod_uid=entry.record.pod_uid,
        allocation_id=entry.record.allocation_id,
        container=container,
        number=number,
    )


class Facts(Struct, frozen=True, kw_only=True):
    """What the agent knows of who needs and may use partitions."""

    entries_by_uid: Mapping[str, Entry]
    states_by_uid: Mapping[str, StateRecord]
    failed: Collection[str]
    """Pods whose allocation this agent found wrong."""
    pods: PodBook
    grants: GrantBook
    started: Collection[Owner] = ()
    """Shares whose container was let start by this run of the agent."""
    left: Collection[str] = ()
    """Pods of which kubelet has nothing left although their grants stand."""
    is_ledger_known: bool = True

    def needs(
        self,
        vendors: Collection[str],
        devices_by_uuid: Mapping[str, Device],
        notes: Iterable[Note],
    ) -> dict[str, tuple[Need, ...]]:
        """By device, what the ledger wants carried, oldest first.

        While the ledger is not known, what containers were given before must do.
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
        """Whether a container may run with the share, whatever the ledger says."""
        if owner.pod_uid in self.left or not owner.pod_uid:
            return False
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
        """Whether the reservation is void, so that no further container starts with it."""
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
            # The room may be somebody else's until the pod is bound to it.
            signed = pod.signed if pod is not None else None
            return signed is not None and signed.allocation_id == record.allocation_id
        return True


def wanted_of(share: Share) -> Wanted:
    """The partition for a share."""
    return Wanted(
        uuid=share.uuid,
        profile=share.profile,
        start=share.start,
        kind=share.kind,
        memory_mib=share.memory_mib,
        core_pct=share.core_pct,
    )


def have_left(pods: PodBook, grants: GrantBook, listing: Sequence[ListedPod]) -> frozenset[str]:
    """Pods that are gone from the API server and from kubelet, although their grants stand.

    A listed pod of the same name is another one if it does not show the ids that were granted, or
    if a younger grant holds them.
    """
    listed = {(one.namespace, one.name): one for one in listing}
    return frozenset(
        uid
        for uid in grants.pod_uids()
        if ((pod := pods.find(uid)) is None or pod.gone)
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
        other.time_s > grant.time_s and other.pod_uid != grant.pod_uid
        for other in grants.of_ids(grant.resource, grant.ids)
    )
    if is_succeeded:
        return False
    shown = listed.ids_by_container.get(grant.container)
    if shown is None:  # an ordinary init container is never listed
        return grant.kind == "init"
    return shown.get(grant.resource) == frozenset(grant.ids)


# -- what the scheduler is told


def without_foreign(facts: DeviceFacts, foreign: Sequence[Instance]) -> DeviceFacts:
    """The device without the room that foreign instances hold.

    Totals shrink, starts that are taken are struck out, and a size that has no place left needs
    something that the device has not. A device without a table of sizes takes no new pods: nothing
    smaller than that can be said of it.
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
    """The device without the places of partitions that are at fault.

    Who has such a partition keeps it, so totals stay: the ledger counts it until its pod ends.
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
    """Foreign instances of one device, for an operator; empty: none."""
    if not foreign:
        return ""
    words = sorted(
        f"{one.instance_id} ({one.profile or 'of unknown size'}"
        f"{'' if one.start is None else f' at {one.start}'})"
        for one in foreign
    )
    return f"partitions that were not made by this agent: {', '.join(words)}"


def faulty_text(faulty: Sequence[Instance]) -> str:
    """Partitions of one device that are at fault, for an operator; empty: none."""
    words = sorted(f"{one.instance_id} ({one.profile} at {one.start})" for one in faulty)
    return f"partitions at fault: {', '.join(words)}" if words else ""


# -- what the rest of the agent asks


class Told(Struct, frozen=True, kw_only=True):
    """What is said of a card whose mode is not, or may not stay, what it should be."""

    text: str
    is_withheld: bool
    """It is to get no new pods."""


class Board:
    """Which partitions carry shares now, as last read; owned by ``shell.partitions``."""

    def __init__(self) -> None:
        self.vendors: frozenset[str] = frozenset()
        """Vendors whose devices this node divides."""
        self.devices_by_uuid: Mapping[str, Device] = {}
        self.carried: dict[Owner, Instance] = {}
        self.foreign_by_uuid: dict[str, tuple[Instance, ...]] = {}
        self.faulty_by_uuid: dict[str, tuple[Instance, ...]] = {}
        """Places that get no new partition, by device; owned by ``shell.inventory``."""
        self.switching: dict[str, Told] = {}
        """Cards whose mode is being switched, or cannot be; owned by ``shell.modes``."""
        self.trouble: dict[Owner, str] = {}
        """Why a share has no partition yet."""
        self.started: set[Owner] = set()
        """Shares whose container was let start, until their pod's grants end."""

    def owners(self, entry: Entry, container: str, vendor: str = "") -> dict[Owner, str]:
        """Shares of a container that need a partition, with their device."""
        return {
            owner_of(entry, shares.name, number): share.uuid
            for shares in entry.record.containers
            if shares.name == container
            for number, share in divided_shares(shares, self.vendors, self.devices_by_uuid)
            if vendor in ("", share.vendor)
        }

    def are_all_there(self, entry: Entry) -> bool:
        """Whether every partition that a pod needs was read back."""
        return all(
            owner in self.carried
            for container in entry.record.containers
            for owner in self.owners(entry, container.name)
        )

    def lacking(self, owners: Iterable[Owner]) -> str:
        """Why a container's partitions are not there, empty when they are."""
        for owner in owners:
            if owner not in self.carried:
                return self.trouble.get(owner) or "it is being made"
        return ""

    def handles(
        self, owners: Mapping[Owner, str], shares: Sequence[Share] = ()
    ) -> dict[str, dict[str, str]]:
        """``RenderContext.handles`` of a container's ``shares``.

        ``owners``: those of one vendor, as far as they are known.
        """
        shares_by_uuid = Counter(owners.values()) | Counter(share.uuid for share in shares)
        found: dict[str, dict[str, str]] = {}
        for owner, uuid in owners.items():
            one = self.carried.get(owner)
            if one is not None:
                is_only = shares_by_uuid[uuid] == 1
                part = "" if is_only else part_word(one.profile, one.start)
                found[handle_key(uuid, part)] = dict(one.handles)
        return found

    def told(self, entry: Entry) -> tuple[CarriedShare, ...]:
        """The MIG instances that carry the pod's shares, for who reads the pod's state."""
        record = entry.record
        return tuple(
            CarriedShare(
                container=owner.container,
                number=owner.number,
                names={word: one.handles[word] for word in TOLD if word in one.handles},
            )
            for owner, one in sorted(self.carried.items())
            if (owner.pod_uid, owner.allocation_id) == (record.pod_uid, record.allocation_id)
            and TOLD[0] in one.handles
        )

    def withdraw(self, device: DeviceFacts) -> DeviceFacts:
        """The device without what is held outside or at fault, for the report.

        One whose mode is to be switched takes no new pods; those that it has stay.
        """
        left = without_foreign(device, self.foreign_by_uuid.get(device.uuid, ()))
        told = self.switching.get(device.uuid)
        if told is not None and told.is_withheld:
            left = replace(left, cordoned=True)
        return without_faulty(left, self.faulty_by_uuid.get(device.uuid, ()))

    def mode_text(self, uuid: str) -> str:
        """What is said of the switching of a device's mode; empty: nothing."""
        told = self.switching.get(uuid)
        return "" if told is None else told.text

    def numbered(self, uuid: str, number: int) -> Instance | None:
        """The partition of a device that faults call by this number."""
        carried = [one for one in self.carried.values() if one.uuid == uuid]
        for one in (*carried, *self.foreign_by_uuid.get(uuid, ())):
            if one.handles.get(FAULT_NUMBER) == str(number) and one.profile:
                return one
        return None


def table_of(device: Device | None) -> tuple[tuple[Profile, ...], Mapping[str, int], int]:
    """Sizes, totals and memory of a device; nothing of one that is not known."""
    if device is None:
        return (), {}, 0
    return device.partitions, device.resources, device.memory_mib
