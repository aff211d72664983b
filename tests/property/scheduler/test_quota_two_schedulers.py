# SPDX-License-Identifier: Apache-2.0
"""Two schedulers compete for quotas on one log: never beyond a limit, none lost, none stuck.

Each scheduler receives the log late and dies between any two steps. A reservation is in force once
its writer judged it good; only then may its pod be bound. The judge reads the log alone: at every
position the reservations in force are within every limit, and at rest all live records are. Limits
here: two ResourceQuota objects on one namespace, one with a scope, and a tree of three queues.
Memory in MiB.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.events.allocation import Account, AllocationRecord
from hami_common.model.placement import ContainerShares, Share
from hami_common.ports import Expect
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.queues import QueueConfig, QueueTree
from hami_core.quota.resourcequota import Limit, Quota, Resource, Scope, amounts_of
from tests.support.reservation_log import FencedLog

MEMORY = Resource("nvidia", "memory_mib")
NODES = [f"n{i}" for i in range(6)]
NAMESPACES = ("team-a", "team-b", "team-c")
HIGH = Account(priority_class="high")
STEPS = 4_000
QUOTAS = (
    Quota(
        namespace="team-a",
        name="all",
        limits={MEMORY: Limit(key="limits.nvidia.com/gpumem", most=1000)},
    ),
    Quota(
        namespace="team-a",
        name="high",
        limits={MEMORY: Limit(key="limits.nvidia.com/gpumem", most=600)},
        scopes=(Scope(name="PriorityClass", operator="In", values=("high",)),),
    ),
)
GUARANTEED = {"qa": 500, "qb": 400, "qc": 300}
QUEUE_LIMIT = {"qb": 700}
TREE = QueueTree(
    [
        QueueConfig(
            name=name,
            guaranteed={"memory_mib": GUARANTEED[name]},
            limit={"memory_mib": QUEUE_LIMIT[name]} if name in QUEUE_LIMIT else {},
            namespaces=(namespace,),
        )
        for name, namespace in zip(GUARANTEED, NAMESPACES, strict=True)
    ]
)
QUEUE_OF = dict(zip(NAMESPACES, GUARANTEED, strict=True))


@dataclass
class Attempt:
    """One bind in progress."""

    record: AllocationRecord
    seq: int = 0


@dataclass
class Scheduler:
    """One replica, and its position in the log."""

    quota: QuotaLedger
    heard: int
    attempts: list[Attempt] = field(default_factory=list)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.log: FencedLog[AllocationRecord] = FencedLog(subjects.ALLOC_BUCKET)
        self.in_force: set[str] = set()
        """Allocation ids that their writer judged good."""
        self.ended: dict[str, int] = {}
        self.did: Counter[str] = Counter()
        self.pods = 0
        self.schedulers = [self.start() for _ in range(2)]

    def start(self) -> Scheduler:
        """A fresh replica: it is shown the newest record of every key, as a bucket's watch does."""
        quota = QuotaLedger()
        for one in QUOTAS:
            quota.put_quota(one)
        quota.set_tree(TREE)
        for seq, record in sorted(self.log.latest.values(), key=lambda entry: entry[0]):
            quota.fold(seq, record)
        quota.synced()
        return Scheduler(quota, len(self.log.entries))

    def hear(self, scheduler: Scheduler, until: int) -> None:
        for seq, _, record in self.log.entries[scheduler.heard : until]:
            scheduler.quota.fold(seq, record)
        scheduler.heard = max(scheduler.heard, until)

    # --- steps -----------------------------------------------------------------------------------

    def ask(self, scheduler: Scheduler) -> None:
        """Check the quota, and send the reservation."""
        self.pods += 1
        node, namespace = self.random.choice(NODES), self.random.choice(NAMESPACES)
        share = Share(
            vendor="nvidia", uuid=f"{node}-0", memory_mib=self.random.choice((50, 100, 150, 300))
        )
        record = AllocationRecord(
            op="reserve",
            allocation_id=f"a{self.pods}",
            node=node,
            pod_uid=f"u{self.pods}",
            namespace=namespace,
            pod=f"p{self.pods}",
            containers=(ContainerShares(name="m", kind="app", shares=(share,)),),
            account=self.random.choice((None, HIGH)),
        )
        wanted = amounts_of(record.containers)
        if scheduler.quota.first_look(namespace, record.account, wanted) is not None:
            self.did["refused at first look"] += 1
            return
        scheduler.quota.expect(record)
        scheduler.attempts.append(Attempt(record))

    def go_on(self, scheduler: Scheduler) -> None:
        """One step of one attempt: append, or judge."""
        if not scheduler.attempts:
            return
        attempt = self.random.choice(scheduler.attempts)
        if not attempt.seq:
            seq = self.append(attempt.record)
            if seq is None:
                self.did["node fence"] += 1
            else:
                attempt.seq = seq
            return
        if scheduler.quota.seq < attempt.seq:
            return  # the stream has not delivered it yet
        scheduler.attempts.remove(attempt)
        scheduler.quota.stop_expecting(attempt.record.allocation_id)
        if scheduler.quota.verdict(attempt.seq) is None:
            self.in_force.add(attempt.record.allocation_id)
            self.did["bound"] += 1
        else:
            self.did["lost the race"] += 1
            self.release(attempt.record)

    def append(self, record: AllocationRecord) -> int | None:
        """Append with the node's fence; the writer's view of the node may be stale."""
        fence = subjects.node_fence(record.node)
        known = max((seq for seq, _ in self.log.of_node(record.node)), default=0)
        if self.random.random() < 0.1:
            known -= 1
        return self.log.append(record, Expect(subject=fence, sequence=known))

    def release(self, record: AllocationRecord) -> None:
        key = subjects.allocation_key(record.node, record.pod_uid)
        seq, _ = self.log.latest[record.node, record.pod_uid]
        expect = Expect(subject=subjects.kv_subject(subjects.ALLOC_BUCKET, key), sequence=seq)
        assert self.log.append(replace(record, op="release", containers=()), expect) is not None

    def live(self) -> list[AllocationRecord]:
        return [record for _, record in self.log.latest.values() if record.op != "release"]

    def end_a_pod(self) -> None:
        bound = [record for record in self.live() if record.allocation_id in self.in_force]
        if bound:
            self.release(self.random.choice(bound))

    def renew(self) -> None:
        """Write the reservation again, for a retried bind."""
        bound = [record for record in self.live() if record.allocation_id in self.in_force]
        if bound:
            record = self.random.choice(bound)
            key = subjects.allocation_key(record.node, record.pod_uid)
            seq, _ = self.log.latest[record.node, record.pod_uid]
            expect = Expect(subject=subjects.kv_subject(subjects.ALLOC_BUCKET, key), sequence=seq)
            assert self.log.append(replace(record, reason="renewed"), expect) is not None

    def die(self) -> None:
        """Kill a scheduler with its attempts in any state; start a replacement."""
        self.did["died"] += 1
        number = self.random.randrange(len(self.schedulers))
        self.schedulers[number] = self.start()

    def leases_end(self) -> None:
        """Release unbound reservations without a live attempt."""
        worked_on = {a.record.allocation_id for s in self.schedulers for a in s.attempts}
        for record in self.live():
            if record.allocation_id not in self.in_force | worked_on:
                self.did["lease ended"] += 1
                self.release(record)

    def step(self) -> None:
        scheduler = self.random.choice(self.schedulers)
        chance = self.random.random()
        if chance < 0.25:
            self.ask(scheduler)
        elif chance < 0.60:
            self.go_on(scheduler)
        elif chance < 0.85:
            self.hear(scheduler, self.random.randint(scheduler.heard, len(self.log.entries)))
        elif chance < 0.95:
            self.end_a_pod()
        elif chance < 0.97:
            self.renew()
        elif chance < 0.98:
            self.die()
        else:
            self.leases_end()

    def rest(self) -> None:
        """Let all replicas receive all records and finish; leases end."""
        for _ in range(1000):
            for scheduler in self.schedulers:
                self.hear(scheduler, len(self.log.entries))
                self.go_on(scheduler)
            if not any(scheduler.attempts for scheduler in self.schedulers):
                break
        else:
            pytest.fail("an attempt never ends")
        self.leases_end()
        for scheduler in self.schedulers:
            self.hear(scheduler, len(self.log.entries))

    # --- the judge -------------------------------------------------------------------------------

    def check_log(self) -> None:
        """At every position what is in force is within every limit."""
        held: dict[tuple[str, str], tuple[AllocationRecord, int]] = {}
        judged: set[str] = set()
        for _, node, record in self.log.entries:
            key = node, record.pod_uid
            held.pop(key, None)
            if record.op == "release" or record.allocation_id not in self.in_force:
                continue
            held[key] = record, record.containers[0].shares[0].memory_mib
            by_namespace: Counter[str] = Counter()
            high = 0
            for other, mib in held.values():
                by_namespace[other.namespace] += mib
                high += mib * (other.namespace == "team-a" and other.account == HIGH)
            assert by_namespace["team-a"] <= 1000
            assert high <= 600
            assert by_namespace["team-b"] <= QUEUE_LIMIT["qb"]
            if record.allocation_id in judged:
                continue
            judged.add(record.allocation_id)
            own = by_namespace[record.namespace]
            if own > GUARANTEED[QUEUE_OF[record.namespace]]:
                assert by_namespace.total() <= sum(GUARANTEED.values()), "borrowed from nobody"

    def check_rest(self) -> None:
        """Verify that only bound reservations are live, and all replicas count the same."""
        assert {record.allocation_id for record in self.live()} <= self.in_force
        used: Counter[str] = Counter()
        for record in self.live():
            used[record.namespace] += record.containers[0].shares[0].memory_mib
        assert used["team-a"] <= 1000
        for scheduler in self.schedulers:
            rows = {row.queue: row.used for row in scheduler.quota.queue_rows()}
            assert rows == {QUEUE_OF[name]: used[name] for name in NAMESPACES}
            assert scheduler.quota.quota_rows()[0].used == used["team-a"]


@pytest.mark.parametrize("seed", range(3))
def test_two_schedulers_never_exceed_a_limit_and_leave_nothing_behind(seed: int) -> None:
    world = World(seed)
    for number in range(STEPS):
        world.step()
        if number % 500 == 499:
            world.rest()
            world.check_rest()
    world.check_log()
    for what in ("bound", "lost the race", "refused at first look", "died", "lease ended"):
        assert world.did[what] > 5, (what, world.did)
