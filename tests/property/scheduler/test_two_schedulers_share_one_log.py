# SPDX-License-Identifier: Apache-2.0
"""Two schedulers, one fenced log, all faults between them.

Each scheduler has its own table and ledger and receives the log late, twice, and in any order
between nodes. Acknowledgements are lost, schedulers stop between reserve, Binding and state,
Bindings arrive late, agents report, nodes leave and return, pods are resized and deleted,
schedulers restart, the bus loses its storage. The judge of capacity reads the log and the pods,
never a table.

``HAMI_PROPERTY_OPS`` sets the number of operations (40,000 where it is not set).
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from msgspec import structs

from hami_common.bus import subjects
from hami_common.events.allocation import AllocationRecord, ReportedState, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import (
    ContainerShares,
    Placement,
    booked_by_device,
)
from hami_common.model.request import PodRequest
from hami_common.pods.signing import SignedPlacement
from hami_common.ports import Expect
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import (
    Accepted,
    Append,
    Examine,
    FeedSynced,
    NodeRead,
    RecordSeen,
    Repaired,
    Reuse,
    StateSeen,
    Tick,
    Wiped,
    WriteState,
)
from hami_core.placement.reasons import NodeRefusal
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from tests.support import builders
from tests.support.reservation_log import FencedLog

OPERATIONS = int(os.environ.get("HAMI_PROPERTY_OPS", "40000"))
QUIET_EVERY = 2_000
NODES = [f"node-{i}.example" for i in range(12)]
DEVICES = 4
MEMORY_MIB = 1000
SLOTS = 3
LEASE_S = 30.0
NEXT_STATE: dict[ReportedState | None, ReportedState] = {
    None: "bound",
    "bound": "prepared",
    "prepared": "running",
}
SHAPES: tuple[Callable[[str], PodRequest], ...] = (
    lambda uid: builders.pod(builders.ask(mib=300, core=20), uid=uid),
    lambda uid: builders.pod(builders.ask(mib=500), uid=uid, node="spread"),
    lambda uid: builders.pod(builders.ask(2, pct=40, core=30), uid=uid, device=("binpack",)),
    lambda uid: builders.pod(builders.whole(), uid=uid),
    lambda uid: builders.pod(
        builders.container(builders.ask(mib=700), name="i", kind="init"),
        builders.container(builders.ask(mib=200, core=10), name="s", kind="sidecar"),
        builders.container(builders.ask(mib=300), name="a"),
        builders.container(builders.ask(mib=300), name="b"),
        uid=uid,
    ),
)


@dataclass
class Pod:
    """A pod as the API server has it."""

    request: PodRequest
    version: int = 0
    node: str = ""
    signed: SignedPlacement | None = None
    fence: str = ""
    containers_exist: bool = False

    @property
    def uid(self) -> str:
        return self.request.uid


@dataclass
class LateBinding:
    """A Binding that was sent and has not arrived."""

    uid: str
    version: int
    record: AllocationRecord
    seq: int


@dataclass
class Scheduler:
    """One replica: its table, its ledger and its position in the log."""

    name: str
    table: DeviceTable = field(default_factory=DeviceTable)
    unread: dict[str, list[tuple[int, AllocationRecord]]] = field(default_factory=dict)
    read: int = 0
    states_read: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.table, writer=self.name, lease_s=LEASE_S, fence_delay_s=3.0)
        self.verdicts = Verdicts(self.table)


def inventory(node: str) -> NodeDevices:
    """Return the report of the node's agent."""
    return builders.node_devices(
        node,
        [
            builders.device(f"{node}-{i}", index=i, memory_mib=MEMORY_MIB, slots=SLOTS)
            for i in range(DEVICES)
        ],
    )


class World:
    """The cluster, and the operations on it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.records: FencedLog[AllocationRecord] = FencedLog(subjects.ALLOC_BUCKET)
        self.states: FencedLog[StateRecord] = FencedLog(subjects.STATE_BUCKET)
        self.pods: dict[str, Pod] = {}
        self.gone: set[str] = set()
        self.late: list[LateBinding] = []
        self.late_releases: list[tuple[Scheduler, Append]] = []
        self.ids = 0
        self.did: Counter[str] = Counter()
        self.used: Counter[tuple[str, str]] = Counter()
        self.schedulers = [self.start(f"scheduler-{i}") for i in range(2)]

    # --- schedulers ------------------------------------------------------------------------------

    def start(self, name: str) -> Scheduler:
        """A fresh replica that has folded what is stored."""
        scheduler = Scheduler(name)
        for node in NODES:
            scheduler.table.upsert_node(inventory(node))
        for seq, record in sorted(self.records.latest.values(), key=lambda entry: entry[0]):
            scheduler.ledger.handle(RecordSeen(seq=seq, record=record, now_s=self.now_s))
        for seq, state in sorted(self.states.latest.values(), key=lambda entry: entry[0]):
            scheduler.ledger.handle(StateSeen(seq=seq, state=state, now_s=self.now_s))
        scheduler.read, scheduler.states_read = len(self.records.entries), len(self.states.entries)
        scheduler.ledger.handle(FeedSynced(now_s=self.now_s))
        scheduler.ledger.handle(Repaired(now_s=self.now_s))
        return scheduler

    def deliver(self, scheduler: Scheduler, *, everything: bool = False) -> None:
        """Deliver feed records: nodes in any order, each node's records in order, some twice."""
        for seq, node, record in self.records.entries[scheduler.read :]:
            scheduler.unread.setdefault(node, []).append((seq, record))
        scheduler.read = len(self.records.entries)
        nodes = list(scheduler.unread)
        self.random.shuffle(nodes)
        for node in nodes:
            queue = scheduler.unread[node]
            some = len(queue) if everything else self.random.randint(0, len(queue))
            for seq, record in queue[:some]:
                for _ in range(1 + (self.random.random() < 0.1)):
                    scheduler.ledger.handle(RecordSeen(seq=seq, record=record, now_s=self.now_s))
            if self.random.random() < 0.1 and queue[:some]:
                seq, record = queue[0]
                scheduler.ledger.handle(RecordSeen(seq=seq, record=record, now_s=self.now_s))
            del queue[:some]
            if not queue:
                del scheduler.unread[node]
        until = (
            len(self.states.entries)
            if everything
            else self.random.randint(scheduler.states_read, len(self.states.entries))
        )
        for seq, _, state in self.states.entries[scheduler.states_read : until]:
            scheduler.ledger.handle(StateSeen(seq=seq, state=state, now_s=self.now_s))
        scheduler.states_read = until

    def repeat(self, scheduler: Scheduler) -> None:
        """Deliver old records again, in any order."""
        for seq, _, record in self.random.sample(
            self.records.entries[-200:], min(40, len(self.records.entries))
        ):
            scheduler.ledger.handle(RecordSeen(seq=seq, record=record, now_s=self.now_s))
        for seq, _, state in self.random.sample(
            self.states.entries[-200:], min(40, len(self.states.entries))
        ):
            scheduler.ledger.handle(StateSeen(seq=seq, state=state, now_s=self.now_s))

    def append(self, scheduler: Scheduler, append: Append) -> bool:
        """Store a record; the acknowledgement may be lost.

        Return True when the ledger has it now.
        """
        record = append.record
        before = self.records.latest.get((record.node, record.pod_uid))
        seq = self.records.append(record, append.expect)
        if seq is None:
            self.did["conflict"] += 1
        else:
            self.account(record, None if before is None else before[1])
            if self.random.random() > 0.1:
                scheduler.ledger.handle(Accepted(append=append, seq=seq, now_s=self.now_s))
                return True
            self.did["lost acknowledgement"] += 1
        self.read_node(scheduler, record.node)
        return bool(scheduler.ledger.sequence_of(record.node, record.pod_uid, record.allocation_id))

    def read_node(self, scheduler: Scheduler, node: str) -> None:
        scheduler.ledger.handle(
            NodeRead(node=node, entries=self.records.of_node(node), now_s=self.now_s)
        )

    def account(self, record: AllocationRecord, before: AllocationRecord | None) -> None:
        """Verify, as the judge, that bookings in the log never exceed any device."""
        for sign, containers in ((-1, before.containers if before else ()), (1, record.containers)):
            for uuid, booked in booked_by_device(containers).items():
                self.used[uuid, "mib"] += sign * booked.memory_mib
                self.used[uuid, "core"] += sign * booked.core_pct
                self.used[uuid, "slots"] += sign * booked.slots
                self.used[uuid, "holders"] += sign * booked.exclusive
                self.used[uuid, "pods"] += sign
        for uuid in booked_by_device(record.containers):
            assert self.used[uuid, "mib"] <= MEMORY_MIB
            assert self.used[uuid, "core"] <= 100
            assert self.used[uuid, "slots"] <= SLOTS
            assert not self.used[uuid, "holders"] or self.used[uuid, "pods"] == 1

    def write(self, scheduler: Scheduler, write: WriteState | None) -> None:
        if write is None:
            return
        seq = self.states.append(write.state, write.expect)
        if seq is not None:
            scheduler.ledger.handle(StateSeen(seq=seq, state=write.state, now_s=self.now_s))

    # --- binding ---------------------------------------------------------------------------------

    def bind(self, scheduler: Scheduler) -> None:
        waiting = [pod for pod in self.pods.values() if not pod.node]
        if len(waiting) < 5 or self.random.random() < 0.3:
            uid = f"uid-{len(self.pods) + len(self.gone)}"
            pod = self.pods[uid] = Pod(self.random.choice(SHAPES)(uid))
        else:
            pod = self.random.choice(waiting)
        seen = replace(pod)
        held = scheduler.ledger.holdings_of_pod(pod.uid)
        feasible = scheduler.verdicts.filter(pod.request, NODES).feasible
        if held and self.random.random() < 0.5:
            node = held[0].record.node
        elif feasible:
            node = self.random.choice(feasible)
        else:
            self.did["refused"] += 1
            return
        self.ids += 1
        for _ in range(3):
            plan = scheduler.ledger.plan_bind(
                pod.request,
                node,
                allocation_id=f"a{self.ids}",
                now_s=self.now_s,
                fenced=seen.fence,
            )
            if isinstance(plan, NodeRefusal):
                self.did[plan.code] += 1
                return
            if isinstance(plan, Reuse):
                self.did["reused"] += 1
                plan = scheduler.ledger.plan_renew(plan.holding, now_s=self.now_s)
            if self.append(scheduler, plan):
                holding = scheduler.ledger.holding(node, pod.uid)
                assert holding is not None
                self.did["reserved"] += 1
                self.post(scheduler, seen, holding)
                return
        self.did["gave up"] += 1

    def post(self, scheduler: Scheduler, seen: Pod, holding: Holding) -> None:
        """Let the Binding arrive, arrive late, be lost, or fail for a known reason."""
        binding = LateBinding(seen.uid, seen.version, holding.record, holding.revision)
        chance = self.random.random()
        if chance < 0.1:
            self.did["stopped before Binding"] += 1
        elif chance < 0.25:
            self.late.append(binding)
        elif chance < 0.3:
            self.did["denied"] += 1
            # A Binding of an earlier attempt may be in flight: only the lease may end this one.
            if not any(b.uid == seen.uid for b in self.late):
                self.append(
                    scheduler,
                    scheduler.ledger.plan_release(holding, now_s=self.now_s, reason="denied"),
                )
        elif self.arrive(binding) and self.random.random() < 0.9:
            self.write(scheduler, scheduler.ledger.plan_state(holding, "bound", now_s=self.now_s))

    def arrive(self, binding: LateBinding) -> bool:
        """The API server takes a Binding, if it was made for this very version of the pod."""
        pod = self.pods.get(binding.uid)
        if pod is None or pod.node or pod.version != binding.version:
            self.did["Binding refused"] += 1
            return False
        record = binding.record
        pod.node, pod.version = record.node, pod.version + 1
        pod.signed = signed_of(record, binding.seq)
        self.did["bound"] += 1
        return True

    def late_binding(self, scheduler: Scheduler) -> None:
        if self.late:
            self.arrive(self.late.pop(self.random.randrange(len(self.late))))

    def tick(self, scheduler: Scheduler) -> None:
        self.now_s += self.random.choice((0.1, 1.0, 10.0))
        for effect in scheduler.ledger.handle(Tick(now_s=self.now_s)):
            assert isinstance(effect, Examine)
            if self.random.random() < 0.8:
                self.examine(scheduler, effect.holding)

    def examine(self, scheduler: Scheduler, holding: Holding) -> None:
        """Check for the Binding; if it has not arrived, prevent it from arriving."""
        self.did["examined"] += 1
        record = holding.record
        pod = self.pods.get(record.pod_uid)
        if pod is not None and not pod.node:
            pod.version += 1
            pod.fence = record.allocation_id
        if (
            pod is not None
            and pod.signed is not None
            and pod.signed.allocation_id == record.allocation_id
            and pod.node == record.node
        ):
            self.write(scheduler, scheduler.ledger.plan_state(holding, "bound", now_s=self.now_s))
            return
        if self.random.random() < 0.3:
            self.did["stopped before release"] += 1
            append = scheduler.ledger.plan_release(holding, now_s=self.now_s, reason="lease")
            self.late_releases.append((scheduler, append))
            return
        self.release(scheduler, holding, "lease ran out")

    def late_release(self, scheduler: Scheduler) -> None:
        """Continue a scheduler that had stopped before it released."""
        if self.late_releases:
            some = self.random.randrange(len(self.late_releases))
            self.append(*self.late_releases.pop(some))

    def all_late_releases(self) -> None:
        """Continue every scheduler that had stopped before it released."""
        while self.late_releases:
            self.append(*self.late_releases.pop())

    def release(self, scheduler: Scheduler, holding: Holding, reason: str) -> None:
        append = scheduler.ledger.plan_release(holding, now_s=self.now_s, reason=reason)
        self.append(scheduler, append)

    # --- what else happens -----------------------------------------------------------------------

    def agent(self, scheduler: Scheduler) -> None:
        """Report a bound pod's state as its agent."""
        bound = [pod for pod in self.pods.values() if pod.signed is not None]
        if not bound:
            return
        pod = self.random.choice(bound)
        assert pod.signed is not None
        found = self.records.latest.get((pod.node, pod.uid))
        if found is None or found[1].op == "release":
            return
        if found[1].allocation_id != pod.signed.allocation_id:
            return
        state_seq, state = self.states.latest.get((pod.node, pod.uid), (0, None))
        before = (
            None
            if state is None or state.allocation_id != pod.signed.allocation_id
            else state.state
        )
        after = NEXT_STATE.get(before)
        if after is None:
            return
        pod.containers_exist |= after == "prepared"
        record = StateRecord(
            state=after,
            allocation_id=pod.signed.allocation_id,
            node=pod.node,
            pod_uid=pod.uid,
            namespace="default",
            pod=pod.request.name,
            ledger_seq=found[0],
        )
        key = subjects.kv_subject(subjects.STATE_BUCKET, subjects.allocation_key(pod.node, pod.uid))
        assert self.states.append(record, Expect(subject=key, sequence=state_seq)) is not None
        self.did[f"agent: {after}"] += 1

    def resize(self, scheduler: Scheduler) -> None:
        """Another size for the shares of a bound pod."""
        bound = [pod for pod in self.pods.values() if pod.signed is not None]
        if not bound:
            return
        pod = self.random.choice(bound)
        assert pod.signed is not None
        holding = scheduler.ledger.holding(pod.node, pod.uid)
        if holding is None or holding.record.allocation_id != pod.signed.allocation_id:
            return
        factor = self.random.choice((0.5, 1.5, 2.0))
        containers = tuple(resized(c, factor) for c in holding.record.containers)
        plan = scheduler.ledger.plan_resize(
            holding,
            Placement(node=pod.node, containers=containers),
            now_s=self.now_s,
            reason="asked for",
        )
        if isinstance(plan, Append) and self.append(scheduler, plan):
            now = scheduler.ledger.holding(pod.node, pod.uid)
            if now is not None and now.record.containers == containers:
                pod.signed = signed_of(now.record, now.revision)
                pod.version += 1
                self.did["resized"] += 1

    def delete(self, scheduler: Scheduler) -> None:
        """End a pod; this scheduler learns it now, the other one at its next comparison."""
        if len(self.pods) < 20:
            return
        uid = self.random.choice(list(self.pods))
        del self.pods[uid]
        self.gone.add(uid)
        self.did["deleted"] += 1
        for holding in scheduler.ledger.holdings_of_pod(uid):
            self.release(scheduler, holding, "pod gone")

    def lose_node(self, scheduler: Scheduler) -> None:
        """Withdraw a node from this scheduler's inventory, or silence it, or fail one device."""
        node = self.random.choice(NODES)
        chance = self.random.random()
        if chance < 0.4:
            scheduler.table.remove_node(node)
        elif chance < 0.7:
            scheduler.table.set_node_alive(node, "nvidia", alive=False)
        else:
            uuid = f"{node}-{self.random.randrange(DEVICES)}"
            scheduler.table.set_health(node, uuid, healthy=False)

    def bring_node(self, scheduler: Scheduler) -> None:
        node = self.random.choice(NODES)
        scheduler.table.upsert_node(inventory(node))
        scheduler.table.set_node_alive(node, "nvidia", alive=True)

    def restart(self, scheduler: Scheduler) -> None:
        self.schedulers[self.schedulers.index(scheduler)] = self.start(scheduler.name)
        self.did["restarted"] += 1

    # --- repair and comparison -------------------------------------------------------------------

    def repair(self, scheduler: Scheduler) -> None:
        """The full comparison of ledger and pods, as the shell makes it."""
        for holding in list(scheduler.ledger.holdings()):
            record = holding.record
            pod = self.pods.get(record.pod_uid)
            if pod is None or (pod.node and pod.node != record.node):
                self.release(scheduler, holding, "no pod needs it")
        bound = [pod for pod in self.pods.values() if pod.signed is not None]
        bound.sort(key=lambda pod: pod.signed.ledger_seq if pod.signed else 0)
        for pod in bound:
            for _ in range(3):
                assert pod.signed is not None
                plan = scheduler.ledger.plan_restore(
                    pod.signed, now_s=self.now_s, must=pod.containers_exist
                )
                assert not isinstance(plan, NodeRefusal), "the share of a bound pod was lost"
                if plan is None or self.append(scheduler, plan):
                    break
            restored = scheduler.ledger.holding(pod.node, pod.uid)
            assert restored is not None
            self.write(scheduler, scheduler.ledger.plan_state(restored, "bound", now_s=self.now_s))

    def wipe(self, scheduler: Scheduler) -> None:
        """Wipe the bus; the first scheduler rebuilds the ledger from the pods."""
        self.quiet()
        before = committed(scheduler.ledger)
        self.records = FencedLog(subjects.ALLOC_BUCKET)
        self.states = FencedLog(subjects.STATE_BUCKET)
        self.used.clear()
        self.late.clear()
        for each in self.schedulers:
            each.ledger.handle(Wiped(now_s=self.now_s))
            assert not each.ledger.ready
            assert not any(each.ledger.holdings())
            each.read = each.states_read = 0
            each.unread.clear()
            each.ledger.handle(FeedSynced(now_s=self.now_s))
        for pod in self.pods.values():
            if not pod.node:
                pod.version += 1
        self.repair(scheduler)
        assert committed(scheduler.ledger) == before
        for each in self.schedulers:
            each.ledger.handle(Repaired(now_s=self.now_s))
        self.did["wiped"] += 1

    def quiet(self) -> None:
        """Deliver and settle everything: the ledgers are equal, and match the pods' annotations."""
        for binding in self.late:
            self.arrive(binding)
        self.late.clear()
        self.all_late_releases()
        for scheduler in self.schedulers:
            for node in NODES:
                scheduler.table.upsert_node(inventory(node))
                scheduler.table.set_node_alive(node, "nvidia", alive=True)
        for scheduler in self.schedulers:
            self.deliver(scheduler, everything=True)
            self.repair(scheduler)
            self.now_s += 2 * LEASE_S
            for effect in scheduler.ledger.handle(Tick(now_s=self.now_s)):
                assert isinstance(effect, Examine)
                self.examine(scheduler, effect.holding)
            self.all_late_releases()
        for scheduler in self.schedulers:
            self.deliver(scheduler, everything=True)
            self.repeat(scheduler)
            scheduler.ledger.check()
        first, second = (committed(scheduler.ledger) for scheduler in self.schedulers)
        assert first == second
        proven = {
            (pod.node, pod.uid): (pod.signed.allocation_id, pod.signed.placement.containers)
            for pod in self.pods.values()
            if pod.signed is not None
        }
        assert first == proven
        assert self.rebuilt() == proven
        stored = {
            key: (record.allocation_id, record.containers)
            for key, (_, record) in self.records.latest.items()
            if record.op != "release"
        }
        assert first == stored

    def rebuilt(self) -> dict[tuple[str, str], tuple[str, tuple[ContainerShares, ...]]]:
        """Return the ledger of a scheduler that starts from the pods alone."""
        fresh = Scheduler("rebuilder")
        for node in NODES:
            fresh.table.upsert_node(inventory(node))
        log: FencedLog[AllocationRecord] = FencedLog(subjects.ALLOC_BUCKET)
        for pod in self.pods.values():
            if pod.signed is not None:
                plan = fresh.ledger.plan_restore(pod.signed, now_s=0.0, must=False)
                assert isinstance(plan, Append)
                seq = log.append(plan.record, plan.expect)
                assert seq is not None
                fresh.ledger.handle(Accepted(append=plan, seq=seq, now_s=0.0))
        fresh.ledger.check()
        return committed(fresh.ledger)


def signed_of(record: AllocationRecord, seq: int) -> SignedPlacement:
    """Return the content of the pod's annotation."""
    return SignedPlacement(
        pod_uid=record.pod_uid,
        namespace=record.namespace,
        pod=record.pod,
        allocation_id=record.allocation_id,
        ledger_seq=seq,
        placement=Placement(node=record.node, containers=record.containers),
    )


def resized(container: ContainerShares, factor: float) -> ContainerShares:
    """The container with more or less memory."""
    return structs.replace(
        container,
        shares=tuple(
            structs.replace(s, memory_mib=max(1, int(s.memory_mib * factor)))
            for s in container.shares
        ),
    )


def committed(ledger: Ledger) -> dict[tuple[str, str], tuple[str, tuple[ContainerShares, ...]]]:
    """(allocation, shares) by key of all live records."""
    return {
        (h.record.node, h.record.pod_uid): (h.record.allocation_id, h.record.containers)
        for h in ledger.holdings()
    }


def operations(world: World) -> Iterator[Callable[[Scheduler], None]]:
    """Yield the next operation, indefinitely."""
    weighted = {
        world.bind: 30,
        world.deliver: 25,
        world.agent: 12,
        world.delete: 10,
        world.resize: 6,
        world.tick: 6,
        world.late_binding: 6,
        world.late_release: 2,
        world.lose_node: 3,
        world.bring_node: 8,
    }
    while True:
        yield from world.random.choices(list(weighted), list(weighted.values()), k=1000)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [20_240_607])
def test_no_share_is_lost_or_doubled_whatever_happens(seed: int) -> None:
    world = World(seed)
    happening = operations(world)
    for number in range(1, OPERATIONS + 1):
        next(happening)(world.random.choice(world.schedulers))
        if number % QUIET_EVERY == 0:
            world.quiet()
            if number % (10 * QUIET_EVERY) == 0:
                world.wipe(world.random.choice(world.schedulers))
            elif number % (3 * QUIET_EVERY) == 0:
                world.restart(world.random.choice(world.schedulers))
    world.quiet()
    print(dict(world.did))
    wanted = {"bound", "conflict", "lost acknowledgement", "examined", "resized", "deleted"}
    wanted |= {"Binding refused", "reused", "stopped before Binding", "restarted", "agent: running"}
    if OPERATIONS >= 20_000:
        assert wanted <= world.did.keys()
