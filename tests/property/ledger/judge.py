# SPDX-License-Identifier: Apache-2.0
"""Judges a cluster from its pods and the messages of its streams, never by a scheduler's own view.

``absorb`` reads new messages of the streams and checks, message by message and in stream order, the
invariants of every moment: no device over capacity, no impossible change of state, no acknowledged
message that is not stored, no gap. ``differences`` returns the violations once no operation is in
flight: ledger, pods and every replica's own table must agree. Memory in MiB, compute in percent of
one device.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator

from msgspec import Struct

from hami_common.bus import subjects
from hami_common.dra.claims import UNPREPARED
from hami_common.dra.names import device_name
from hami_common.errors import InvariantBroken
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.model.placement import booked_by_device
from hami_common.pods import annotations
from hami_common.ports import Entry
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import RecordSeen, StateSeen
from hami_core.table.table import DeviceTable
from tests.property.ledger.chaos import allocated, allocation_id
from tests.support.claims import pod_of
from tests.support.ledger_world import Held, Key, LedgerWorld, Replica, fold, rebuild

Device = tuple[str, str]
"""(node, UUID)."""

FIRST_STATES = frozenset({"bound", "failed"})
STEPS = frozenset(
    {
        ("bound", "prepared"),
        ("prepared", "running"),
        ("bound", "failed"),
        ("prepared", "failed"),
        ("running", "failed"),
    }
)
"""Changes of a reported state that design D5 allows, written down here independently."""
KINDS = {
    subjects.ALLOC_BUCKET: "allocation",
    subjects.STATE_BUCKET: "state",
    subjects.DEVICES_BUCKET: "device",
}


class Sum(Struct):
    """Bookings on one device."""

    memory_mib: int = 0
    core_pct: int = 0
    slots: int = 0
    exclusive: int = 0


class Judge:
    """Reads the streams and stores their content."""

    def __init__(self, world: LedgerWorld, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self.problems: list[str] = []
        """Violations at some moment, the first ones."""
        self.stored: Counter[str] = Counter()
        """Messages by bucket, since the bus was last wiped."""
        self.events: Counter[str] = Counter()
        """Events by kind, likewise."""
        self._capacity = {
            (node, device.uuid): device
            for node, devices in world.devices.items()
            for device in devices.devices
        }
        self.begin_again()

    def begin_again(self, *, settled: bool = True) -> None:
        """Read streams that begin again, their sequences too.

        ``settled``: no operation was in flight, so that no agent names a sequence of the streams
        before, and no Binding arrives for a record in them.
        """
        self._is_settled = settled
        self.stored.clear()
        self.events.clear()
        self._read: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._log: dict[int, tuple[str, AllocationRecord]] = {}
        self._live: dict[str, AllocationRecord] = {}
        self._newest: dict[str, tuple[int, AllocationRecord]] = {}
        self._sums: dict[Device, Sum] = defaultdict(Sum)
        self._states: dict[str, tuple[int, StateRecord]] = {}
        self._past: dict[str, set[str]] = defaultdict(set)
        self._awaited: dict[tuple[str, str], list[bytes]] = defaultdict(list)
        self._is_shown: dict[str, bool] = {}
        """Nodes by whether the newest stored value has devices: a write may come late."""
        self._events_read = 0
        self._assigned_judged = 0
        self._shadow = Ledger(DeviceTable(), writer="shadow")

    # --- at every moment -------------------------------------------------------------------------

    async def absorb(self) -> None:
        """Read on, and judge each message on the ones before it."""
        outside = self._world.outside
        # States first: each belongs to a record that was stored before it.
        states = await outside.read(subjects.STATE_BUCKET, after=self._read[subjects.STATE_BUCKET])
        records = await outside.read(subjects.ALLOC_BUCKET, after=self._read[subjects.ALLOC_BUCKET])
        devices = await outside.read(
            subjects.DEVICES_BUCKET, after=self._read[subjects.DEVICES_BUCKET]
        )
        for bucket, entries in (
            (subjects.ALLOC_BUCKET, records),
            (subjects.STATE_BUCKET, states),
            (subjects.DEVICES_BUCKET, devices),
        ):
            self._account(bucket, entries)
        for entry in devices:
            self._is_shown[subjects.parse_devices_key(entry.key)[0]] = bool(entry.value)
        decoded = [
            (entry, codec.decode(entry.value, AllocationRecord, what=entry.key))
            for entry in records
        ]
        for entry, record in decoded:
            self._take_record(entry, record)
        reported = [
            (entry, codec.decode(entry.value, StateRecord, what=entry.key)) for entry in states
        ]
        for entry, state in reported:
            self._take_state(entry, state)
        self._judge_assignments()
        self._shuffle_into_shadow(decoded, reported)

    def _account(self, bucket: str, entries: list[Entry]) -> None:
        """Verify that no message is missing, and acknowledged messages are the stored ones."""
        acked = self._world.acked[bucket]
        for entry in entries:
            self._read[bucket] += 1
            if entry.revision != self._read[bucket]:
                self._say(f"{bucket}: sequence {self._read[bucket]} is missing")
                self._read[bucket] = entry.revision
            told = acked.get(entry.revision)
            if told is not None and (told.key, told.value) != (entry.key, entry.value):
                self._say(f"{bucket}: {entry.key} was acknowledged with another message's sequence")
            self.stored[bucket] += 1
            self._awaited[KINDS[bucket], entry.key].append(entry.value)
        newest = max(acked, default=0)
        if newest > self._read[bucket]:
            self._say(f"{bucket}: sequence {newest} was acknowledged but is not stored")

    def _take_record(self, entry: Entry, record: AllocationRecord) -> None:
        key = entry.key
        before = self._live.pop(key, None)
        if before is not None:
            self._book(before, -1)
        if record.op != "release":
            self._live[key] = record
            for uuid in self._book(record, 1):
                self._say(
                    f"{uuid} on {record.node} is over capacity after sequence {entry.revision}:"
                    f" {self._sums[record.node, uuid]}"
                )
        if record.op == "resize" and (
            before is None or before.allocation_id != record.allocation_id
        ):
            self._say(f"sequence {entry.revision} resizes what {key} does not hold")
        self._log[entry.revision] = (key, record)
        self._newest[key] = (entry.revision, record)

    def _book(self, record: AllocationRecord, sign: int) -> list[str]:
        """Add to the sums; return the devices that are over capacity now."""
        over = []
        for uuid, booked in booked_by_device(record.containers).items():
            total = self._sums[record.node, uuid]
            total.memory_mib += sign * booked.memory_mib
            total.core_pct += sign * booked.core_pct
            total.slots += sign * booked.slots
            total.exclusive += sign * booked.exclusive
            device = self._capacity[record.node, uuid]
            if (
                total.memory_mib > device.capacity_mib
                or total.core_pct > device.capacity_core_pct
                or total.slots > device.slots
                or (total.exclusive and total.slots > booked.slots)
            ):
                over.append(uuid)
        return over if sign > 0 else []

    def _take_state(self, entry: Entry, state: StateRecord) -> None:
        key = entry.key
        _, before = self._states.get(key, (0, None))
        if before is None or before.allocation_id != state.allocation_id:
            if before is not None:
                self._past[key].add(before.allocation_id)
            if state.state not in FIRST_STATES or state.allocation_id in self._past[key]:
                self._say(
                    f"{key}: state {state.state} of {state.allocation_id} comes out of nothing"
                )
        elif (before.state, state.state) not in STEPS and not (
            state.code == UNPREPARED and before.state == state.state == "prepared"
        ):
            self._say(f"{key}: {before.state} became {state.state}")
        if state.code == "share-lost":
            self._say(f"{key}: the share of {state.allocation_id} was lost: {state.reason}")
        known = self._log.get(state.ledger_seq)
        if self._is_settled and (
            known is None
            or known[0] != key
            or known[1].allocation_id != state.allocation_id
            or known[1].op == "release"
        ):
            self._say(
                f"{key}: state {state.state} names sequence {state.ledger_seq}, which is not a"
                f" record of {state.allocation_id}"
            )
        self._states[key] = (entry.revision, state)

    def _judge_assignments(self) -> None:
        """Verify that every Binding took effect under a reservation that was not released."""
        fresh = self._world.assigned[self._assigned_judged :]
        self._assigned_judged += len(fresh)
        if not fresh or not self._is_settled:
            return
        by_key: dict[str, list[tuple[int, AllocationRecord]]] = defaultdict(list)
        for seq, (key, record) in self._log.items():
            by_key[key].append((seq, record))
        for assigned in fresh:
            known = [
                record
                for seq, record in by_key[subjects.allocation_key(*assigned.key)]
                if seq <= assigned.log_seq
            ]
            if (
                not known
                or known[-1].op == "release"
                or known[-1].allocation_id != assigned.allocation_id
            ):
                self._say(f"{assigned.key} was assigned with {assigned.allocation_id}, not held")

    def _shuffle_into_shadow(
        self,
        records: list[tuple[Entry, AllocationRecord]],
        states: list[tuple[Entry, StateRecord]],
    ) -> None:
        """Fold all records again in another order: per key by sequence, with repetitions."""
        queues: dict[tuple[str, str], list[RecordSeen | StateSeen]] = defaultdict(list)
        for entry, record in records:
            queues["record", entry.key].append(
                RecordSeen(seq=entry.revision, record=record, now_s=0.0)
            )
        for entry, state in states:
            queues["state", entry.key].append(StateSeen(seq=entry.revision, state=state, now_s=0.0))
        order = [at for at, queue in queues.items() for _ in queue]
        self._rng.shuffle(order)
        at_position = dict.fromkeys(queues, 0)
        told: list[RecordSeen | StateSeen] = []
        for at in order:
            stimulus = queues[at][at_position[at]]
            at_position[at] += 1
            told.append(stimulus)
            self._tell_shadow(stimulus)
            if self._rng.random() < 0.3:
                self._tell_shadow(self._rng.choice(told))

    def _tell_shadow(self, stimulus: RecordSeen | StateSeen) -> None:
        try:
            self._shadow.handle(stimulus)
        except InvariantBroken as error:
            self._say(f"the fold refused a stimulus: {error}")

    def _say(self, problem: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(problem)

    def ledger(self) -> dict[Key, Held]:
        """Holders by the newest records."""
        return fold((seq, record) for seq, record in self._newest.values())

    # --- without operations in flight ------------------------------------------------------------

    def differences(self) -> list[str]:
        """Return the differences between pods, ledger and replicas."""
        world = self._world
        by_ledger = self.ledger()
        by_pods = rebuild(world.kube.pods(), world.verifier)
        of_claims = {
            (record.node, record.pod_uid): by_ledger[record.node, record.pod_uid]
            for _, record in self._newest.values()
            if record.op != "release" and record.origin
        }
        of_pods = {key: held for key, held in by_ledger.items() if key not in of_claims}
        found = list(_compared("ledger", of_pods, "pods", by_pods))
        found += self._claim_differences(of_claims)
        found += self._pod_claim_differences()
        holders: Counter[str] = Counter(uid for _, uid in by_ledger)
        found += [f"pod {uid} holds {n} allocations" for uid, n in holders.items() if n > 1]
        found += self._limits_differences()
        for replica in world.replicas.values():
            found += self._replica_differences(replica, by_ledger)
        found += _compared("shuffled fold", _held_by(self._shadow), "ledger", by_ledger)
        return found

    def _claim_differences(self, booked: dict[Key, Held]) -> Iterator[str]:
        """Compare records with the claims' allocations: each that fits has its record."""
        booked = dict(booked)
        for claim in self._world.kube.claims():
            uid, shares = claim["metadata"]["uid"], allocated(claim)
            if not shares or pod_of(claim):
                continue
            node = claim["status"]["allocation"]["devices"]["results"][0]["pool"].partition("/")[0]
            held = booked.pop((node, uid), None)
            wanted = [(self._uuid(node, name), memory, core) for name, memory, core in shares]
            if held is None:
                if all(self._has_room(node, *one) for one in wanted):
                    yield f"claim {uid} on {node} fits and has no record: {wanted}"
            elif held.allocation_id != allocation_id(claim):
                yield f"claim {uid} has the record of another allocation"
            elif wanted != [
                (share.uuid, share.memory_mib, share.core_pct)
                for container in held.containers
                for share in container.shares
            ]:
                yield f"claim {uid} has {held} in the ledger, and was allocated {wanted}"
        for key in sorted(booked):
            yield f"{key}: the ledger has a claim's share without an allocation"

    def _pod_claim_differences(self) -> Iterator[str]:
        """Compare the claim of each bound pod with its record."""
        kube = self._world.kube
        stored = {claim["metadata"]["name"]: claim for claim in kube.claims()}
        pods = {pod["metadata"]["uid"]: pod for pod in kube.pods()}
        for _, record in self._newest.values():
            pod = pods.get(record.pod_uid)
            if record.op == "release" or not record.claim or pod is None:
                continue
            if pod["spec"].get("nodeName") != record.node:
                continue
            claim = stored.get(record.claim)
            status = {} if claim is None else claim.get("status", {})
            if claim is None or not status.get("allocation"):
                if claim is not None or "deletionTimestamp" not in pod["metadata"]:
                    yield f"claim {record.claim} of a bound pod is not allocated"
                continue
            given = sorted(
                (
                    one["request"].removesuffix("-nvidia"),
                    one["pool"].removesuffix("/hami"),
                    *amounts,
                )
                for one, amounts in zip(
                    status["allocation"]["devices"]["results"], allocated(claim), strict=True
                )
            )
            wanted = sorted(
                (
                    container.name,
                    record.node,
                    device_name(share.uuid),
                    share.memory_mib,
                    share.core_pct,
                )
                for container in record.containers
                for share in container.shares
            )
            # A resize changes the record alone, once the share was prepared.
            is_same = (
                [one[:3] for one in given] == [one[:3] for one in wanted]
                if record.op == "resize"
                else given == wanted
            )
            if not is_same:
                yield f"claim {record.claim} has {given}, and the record {wanted}"
            if [one["uid"] for one in status.get("reservedFor", [])] != [record.pod_uid]:
                yield f"claim {record.claim} is not reserved for its pod"

    def _uuid(self, node: str, name: str) -> str:
        return next(uuid for at, uuid in self._capacity if at == node and device_name(uuid) == name)

    def _has_room(self, node: str, uuid: str, memory_mib: int, core_pct: int) -> bool:
        """Return whether a device that is in use could take another share."""
        world, total = self._world, self._sums[node, uuid]
        device = self._capacity[node, uuid]
        is_whole = core_pct == 100 or memory_mib >= device.capacity_mib
        return (
            node not in world.silent
            and self._is_shown[node]
            and (node, uuid) not in world.faulty
            and not total.exclusive
            and not (is_whole and total.slots)
            and total.memory_mib + memory_mib <= device.capacity_mib
            and total.core_pct + max(core_pct, 1) <= device.capacity_core_pct
            and total.slots < device.slots
        )

    def _limits_differences(self) -> Iterator[str]:
        """Compare a container's limits with its pod's allocation."""
        for pod in self._world.kube.pods():
            marks = pod["metadata"].get("annotations", {})
            if annotations.ALLOCATION in marks and pod["spec"].get("nodeName"):
                signed = self._world.verifier.verify(
                    marks[annotations.ALLOCATION],
                    pod_uid=pod["metadata"]["uid"],
                    node=pod["spec"]["nodeName"],
                )
                for container in signed.placement.containers:
                    text = marks.get(annotations.limits(container.name), "")
                    for number, share in enumerate(container.shares):
                        if f"device.{number}.memory_mib={share.memory_mib}\n" not in text:
                            yield f"limits of {pod['metadata']['name']} are not its shares"

    def _replica_differences(self, replica: Replica, by_ledger: dict[Key, Held]) -> Iterator[str]:
        ledger, name = replica.scheduler.state.ledger, replica.name
        if not replica.scheduler.state.is_complete:
            yield f"{name} is not in sync: {replica.scheduler.state.missing()}"
            return
        yield from _compared(name, _held_by(ledger), "ledger", by_ledger)
        for holding in ledger.holdings():
            key = subjects.allocation_key(holding.record.node, holding.record.pod_uid)
            seq, _ = self._newest.get(key, (0, None))
            if holding.revision != seq:
                yield f"{name} has {key} at sequence {holding.revision}, the stream at {seq}"
            _, state = self._states.get(key, (0, None))
            if holding.state != state:
                yield f"{name} has state {holding.state} of {key}, the stream {state}"
        yield from self._pod_differences(replica)
        sums = {at: total for at, total in self._sums.items() if total != Sum()}
        for node, uuid, usage in ledger.table.usages():
            total = sums.pop((node, uuid), Sum())
            booked = Sum(usage.memory_mib, usage.core_pct, usage.slots, usage.exclusive_holders)
            if booked != total:
                yield f"{name} has {booked} on {uuid}, the ledger {total}"
        if sums:
            yield f"{name} has nothing booked on {sorted(sums)}"
        try:
            ledger.check()
        except InvariantBroken as error:
            yield f"{name}: {error}"
        if broken := replica.value("hami_scheduler_broken_invariants_total"):
            yield f"{name} refused {broken:g} stimuli"

    def _pod_differences(self, replica: Replica) -> Iterator[str]:
        known = {pod.uid: (pod.resource_version, pod.node) for pod in replica.scheduler.state.pods}
        for pod in self._world.kube.pods():
            meta = pod["metadata"]
            if annotations.MANAGED_LABEL in meta.get("labels", {}):
                truth = (meta["resourceVersion"], pod["spec"].get("nodeName", ""))
                seen = known.pop(meta["uid"], None)
                if seen != truth:
                    yield f"{replica.name} sees pod {meta['uid']} as {seen}, it is {truth}"
        for uid in known:
            yield f"{replica.name} sees pod {uid}, which is gone"

    async def event_differences(self) -> list[str]:
        """Events that are no stored message, or in another order; empty where there is no bus."""
        events = await self._world.outside.read_events(after=self._events_read)
        if events is None:
            return []
        for seq, subject, data in events:
            self._events_read = seq
            kind, key = subject.removeprefix(f"{subjects.EVENT_PREFIX}.").split(".", 1)
            self.events[kind] += 1
            if kind not in KINDS.values():
                continue  # decisions, which no bucket stores
            awaited = self._awaited[kind, key]
            if not awaited or awaited.pop(0) != data:
                self._say(f"event {seq} of {subject} is not the next accepted append of its key")
        counts = {kind: self.stored[bucket] for bucket, kind in KINDS.items()}
        return [
            f"{kind}: {self.events[kind]} events, {count} accepted appends"
            for kind, count in counts.items()
            if self.events[kind] != count
        ]


def _held_by(ledger: Ledger) -> dict[Key, Held]:
    return {
        (holding.record.node, holding.record.pod_uid): Held(
            holding.record.allocation_id, holding.record.containers
        )
        for holding in ledger.holdings()
    }


def _compared(
    one: str, held_by_one: dict[Key, Held], other: str, held_by_other: dict[Key, Held]
) -> Iterator[str]:
    for key in sorted(held_by_one.keys() | held_by_other.keys()):
        mine, theirs = held_by_one.get(key), held_by_other.get(key)
        if mine != theirs:
            yield f"{key}: {one} has {mine}, {other} has {theirs}"
