# SPDX-License-Identifier: Apache-2.0
"""Drives the recorded parts of a scheduler's core through a random life, without bus and API.

Devices come, go, fall silent and fail; pods are filtered, scored, bound, confirmed and released, by
this scheduler and by another; quotas and queues come, change and go, and limit pods; the bus is
wiped now and then. Everything is drawn from one seed, so that a failure can be repeated. Seconds
throughout.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from hami_common.events.allocation import Account, AllocationRecord, StateRecord
from hami_common.events.inventory import DeviceFault, Heartbeat
from hami_common.model.request import (
    Choice,
    DevicePolicy,
    PlacementPolicy,
    PodRequest,
    ScoringWeights,
)
from hami_common.runtime.quarantine import Quarantine
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import (
    Accepted,
    Append,
    BindPlanned,
    BusUnheard,
    DevicesBegin,
    DevicesEnd,
    DevicesPut,
    DevicesRemoved,
    FaultHeard,
    FeedSynced,
    FilterAsked,
    Forgotten,
    HeartbeatHeard,
    HoldPlanned,
    NodeRead,
    NodeStands,
    PrioritizeAsked,
    QueuesSet,
    QuotaAsked,
    QuotaDropped,
    QuotaExpected,
    QuotaFolded,
    QuotaJudged,
    QuotaLooked,
    QuotaPut,
    QuotaReset,
    QuotaSynced,
    QuotaUnexpected,
    RecordSeen,
    ReleasePlanned,
    Repaired,
    ShortlistAsked,
    SilenceJudged,
    StatePlanned,
    StateSeen,
    Tick,
    Wiped,
)
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.verdicts import Filtered
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.documents import written, written_amounts
from hami_core.quota.queues import QueueConfig, QueueTree
from hami_core.quota.resourcequota import Asker, Limit, Quota, Resource, Scope, amounts_of
from hami_core.quota.verdicts import Allowed
from hami_core.table.inventory import Inventory
from hami_core.table.table import DeviceTable
from hami_scheduler.shell.isolation import STIMULUS
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.recorder import LogSettings, RecordedCore, Recorder
from tests.support import builders
from tests.support.manualclock import ManualClock

CHAINS: tuple[tuple[DevicePolicy, ...], ...] = (
    ("spread",),
    ("binpack",),
    ("numa", "binpack"),
    ("mutex",),
    ("topology-aware",),
)
BOOT = "0000000000001-aa"
NAMESPACES = ("default", "team-a", "team-b")


@dataclass
class Drive:
    """A scheduler's core, recorded, and its random inputs."""

    directory: Path
    seed: int
    nodes: int = 12
    segment_bytes: int = 1 << 20
    queue_size: int = 1 << 20
    segments: int = 1000
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.metrics = Metrics(CollectorRegistry())
        self.recorder = Recorder(
            LogSettings(
                directory=self.directory,
                segment_bytes=self.segment_bytes,
                segments=self.segments,
                queue_size=self.queue_size,
                retry_s=0.0,
            ),
            clock=self.clock,
            metrics=self.metrics,
            quarantine=Quarantine(
                kinds=(STIMULUS,), clock=self.clock, registry=CollectorRegistry()
            ),
            run=f"run{self.seed}",
            program="test",
            policy=PlacementPolicy(),
        )
        table = DeviceTable()
        self.ledger = Ledger(table, writer="s1", lease_s=30.0, fence_delay_s=3.0)
        self.quota = QuotaLedger()
        self.core = RecordedCore(
            self.recorder,
            ledger=self.ledger,
            inventory=Inventory(table, heartbeat_timeout_s=15.0),
            quota=self.quota,
        )
        self.answer = self.core.answer
        self.names = [f"node-{number:02d}" for number in range(self.nodes)]
        self.now_s = 1000.0
        self.seq = 0
        self.state_seq = 0
        self.pods = 0
        self.decisions = 0
        for node in self.names:
            self.devices(node)
        self.answer(QuotaSynced())
        self.answer(FeedSynced(now_s=self.now_s))
        self.answer(Repaired(now_s=self.now_s))

    def count(self, what: str) -> int:
        """Number of stimuli that were ``recorded`` or ``dropped``."""
        name = f"hami_scheduler_stimuli_{what}_total"
        return int(self.metrics.registry.get_sample_value(name) or 0)

    # --- possible steps --------------------------------------------------------------------------

    def step(self) -> None:
        """Run one random step."""
        chance = self.random.random()
        self.now_s += self.random.random()
        if chance < 0.70:
            self.pod()
        elif chance < 0.85:
            self.release()
        elif chance < 0.90:
            self.random.choice((self.heartbeats, self.heartbeats, self.limits))()
        else:
            node = self.random.choice(self.names)
            self.random.choice(
                (self.devices, self.fault, self.foreign, self.domain, self.read, self.rare)
            )(node)
            self.answer(Tick(now_s=self.now_s))
            self.answer(SilenceJudged(now_s=self.now_s))

    def devices(self, node: str) -> None:
        """Publish a node's devices again, as the registry."""
        self.seq += 1
        count = self.random.choice((0, 2, 4, 8, 8))
        known = [
            builders.device(
                f"{node}-{i}",
                index=i,
                type=self.random.choice(("A100", "T4")),
                memory_mib=16_000,
                slots=self.random.choice((2, 10)),
                numa=self.random.choice((None, 0, 1)),
                healthy=self.random.random() > 0.1,
                cordoned=self.random.random() < 0.1,
                foreign_mib=self.random.choice((0, 0, 0, 2_048, 12_032)),
                bursts={f"uid-{self.pods}": self.random.choice((256, 2_048))} if i % 3 else {},
            )
            for i in range(count)
        ]
        links = [(a.uuid, b.uuid, self.random.choice((10, 50))) for a in known for b in known]
        links = [link for link in links if link[0] < link[1]]
        message = builders.node_devices(node, known, links=links, seq=self.seq)
        self.answer(DevicesPut(devices=message, revision=self.seq, now_s=self.now_s))

    def heartbeats(self) -> None:
        """Send heartbeats of most agents."""
        for node in self.names:
            if self.random.random() < 0.9:
                unserved = ("nvidia",) if self.random.random() < 0.05 else ()
                beat = Heartbeat(
                    node=node,
                    boot_id=BOOT,
                    seq=1,
                    time_s=self.now_s,
                    vendors=() if unserved else ("nvidia",),
                    unserved=unserved,
                )
                self.answer(HeartbeatHeard(heartbeat=beat, now_s=self.now_s))

    def limits(self) -> None:
        """Change a quota, or the queues."""
        draw = self.random
        if draw.random() < 0.3:
            guaranteed = draw.choice((0, 60_000, 200_000))
            tree = (
                QueueTree(
                    vendors=("nvidia",),
                    queues=(
                        QueueConfig(
                            name=name,
                            guaranteed={"memory_mib": guaranteed},
                            limit=draw.choice(({}, {"nvidia/devices": 12})),
                            borrow_weight=draw.choice((0, 1, 3)),
                            namespaces=(namespace,),
                        )
                        for name, namespace in zip(("a", "b"), NAMESPACES[1:], strict=True)
                    ),
                )
                if draw.random() < 0.8
                else QueueTree()
            )
            self.answer(QueuesSet(queues=tuple(tree.queues.values())))
            return
        namespace = draw.choice(NAMESPACES[:2])
        if draw.random() < 0.3:
            self.answer(QuotaDropped(namespace=namespace, name="quota"))
            return
        most = draw.choice((0, 20_000, 100_000))
        limit = Limit(key="limits.nvidia.com/gpumem", most=most)
        quota = Quota(
            namespace=namespace,
            name="quota",
            limits={Resource("nvidia", "memory_mib"): limit},
            scopes=draw.choice(((), (Scope(name="Terminating"),))),
        )
        self.answer(QuotaPut(quota=written(quota)))

    def fault(self, node: str) -> None:
        """Fail a device, or recover it."""
        self.answer(
            FaultHeard(
                fault=DeviceFault(
                    node=node,
                    vendor="nvidia",
                    uuid=f"{node}-{self.random.randrange(8)}",
                    boot_id=BOOT,
                    seq=self.random.randrange(10_000),
                    time_s=self.now_s,
                    healthy=self.random.random() < 0.5,
                )
            )
        )

    def domain(self, node: str) -> None:
        """Change a node's labels."""
        path = self.random.choice(((), ("spine",), ("spine", "rack"), ("spine", "", "x")))
        self.answer(NodeStands(node=node, path=path))

    def read(self, node: str) -> None:
        """Read a node consistently."""
        entries = tuple((h.revision, h.record) for h in self.ledger.holdings_of_node(node))
        self.answer(NodeRead(node=node, entries=entries, now_s=self.now_s))

    def rare(self, node: str) -> None:
        """Run a rare step."""
        match self.random.randrange(6):
            case 0:
                self.answer(DevicesRemoved(node=node, vendor="nvidia"))
            case 1:
                self.answer(DevicesBegin())
                self.devices(node)
                self.answer(DevicesEnd())
            case 2:
                self.answer(BusUnheard(now_s=self.now_s))
            case 3:
                for gone, uid in self.ledger.forgettable(seen_before_s=self.now_s - 5):
                    self.answer(Forgotten(node=gone, pod_uid=uid))
            case 4:
                self.wipe()
            case _:
                self.devices(node)

    def wipe(self) -> None:
        """Wipe the storage of the bus."""
        self.answer(QuotaReset())
        self.answer(Wiped(now_s=self.now_s))
        self.answer(QuotaSynced())
        self.answer(FeedSynced(now_s=self.now_s))
        self.answer(Repaired(now_s=self.now_s))

    def foreign(self, node: str) -> None:
        """Write as another scheduler."""
        self.seq += 1
        record = AllocationRecord(
            op="reserve",
            allocation_id=f"other-{self.seq}",
            node=node,
            pod_uid=f"other-{self.seq}",
            namespace="default",
            pod="other",
            containers=(builders.held(builders.share(f"{node}-{self.random.randrange(8)}", 500)),),
            writer="s2",
        )
        self.seen(record)

    def seen(self, record: AllocationRecord) -> None:
        """Deliver a record of the feed."""
        self.answer(RecordSeen(seq=self.seq, record=record, now_s=self.now_s))
        self.answer(QuotaFolded(seq=self.seq, record=record))

    # --- pods ------------------------------------------------------------------------------------

    def pod(self) -> None:
        """Filter and score a pod, and most often bind it."""
        self.pods += 1
        request = self.request()
        names = self.random.sample(self.names, self.random.randint(2, len(self.names)))
        fitting = self.answer(FilterAsked(request=request), NodeNames.of([*names, "unknown"]))
        self.decisions += 1
        account = self.random.choice((None, Account(is_terminating=True), Account(queue="a")))
        asker = Asker(account=account, wish=self.random.choice(("", "", "", "a")))
        filtered: Filtered | Allowed = fitting
        if self.core.governs(request.namespace, asker):
            waiting = tuple(uid for uid in self.quota.claims() if self.random.random() < 0.9)
            filtered = self.answer(QuotaAsked(request=request, asker=asker, waiting=waiting))
            self.decisions += 1
        if not len(filtered.left):
            return
        near = tuple(self.random.sample(self.names, 2)) if self.random.random() < 0.2 else ()
        left = filtered.left
        if self.random.random() < 0.5:
            left = self.answer(ShortlistAsked(request=request, count=2, near=near))
            self.decisions += 1
        scored = self.answer(PrioritizeAsked(request=request, near=near), left)
        node = scored.best(1)[0][0]
        if self.random.random() < 0.1:
            node = self.random.choice(self.names)
        if self.random.random() < 0.1:
            leaving = [h.record.pod_uid for h in self.ledger.holdings_of_node(node)[:1]]
            held = self.answer(
                HoldPlanned(
                    request=request,
                    node=node,
                    allocation_id=f"h-{self.pods}",
                    now_s=self.now_s,
                    held_for="preemption",
                    lease_s=20.0,
                    awaits=tuple(leaving),
                )
            )
            self.decisions += 2
            if isinstance(held, Append):
                self.accept(held)
            return
        plan = self.answer(
            BindPlanned(
                request=request, node=node, allocation_id=f"s1-{self.pods}", now_s=self.now_s
            )
        )
        self.decisions += 2
        if isinstance(plan, Append):
            plan = plan.under(account)
            if not self.may(plan):
                return
            self.accept(plan)
            if self.quota.governs(request.namespace, account):
                self.answer(QuotaJudged(seq=self.seq))
                self.decisions += 1
            holding = self.ledger.holding(node, request.uid)
            if holding is not None and self.random.random() < 0.9:
                write = self.answer(StatePlanned(holding=holding, state="bound", now_s=self.now_s))
                if write is not None:
                    self.stated(write.state)

    def may(self, plan: Append) -> bool:
        """True when quotas allow a reservation to be written; it is then counted."""
        record = plan.record
        if not self.quota.governs(record.namespace, record.account):
            return True
        wanted = amounts_of(record.containers, record.account)
        self.decisions += 1
        asked = QuotaLooked(
            namespace=record.namespace, account=record.account, wanted=written_amounts(wanted)
        )
        if self.answer(asked) is not None:
            return False
        self.answer(QuotaExpected(record=record))
        if self.random.random() < 0.2:
            self.answer(QuotaUnexpected(allocation_id=record.allocation_id))
        return True

    def request(self) -> PodRequest:
        """Request of a random pod; few templates, as in production."""
        draw = self.random
        containers = [
            builders.container(
                builders.ask(
                    draw.choice((1, 1, 2)), mib=draw.choice((1000, 3000, 9000)), core=10 * n
                ),
                name=f"c{n}",
                kind=draw.choice(("app", "app", "init")),
            )
            for n in range(draw.choice((1, 1, 1, 2)))
        ]
        if draw.random() < 0.1:
            containers = [builders.container(builders.whole(draw.choice((1, 4))))]
        pod = builders.pod(
            *containers,
            uid=f"uid-{self.pods}",
            name=f"pod-{self.pods}",
            node=draw.choice(("binpack", "spread")),
            device=draw.choice(CHAINS),
            weights=draw.choice((None, ScoringWeights(slot=0, core=1, memory=3))),
        )
        others: tuple[Choice, ...] = ()
        if draw.random() < 0.2:
            others = (Choice(containers=(builders.container(builders.ask(mib=500), name="c0"),)),)
        return replace(pod, namespace=draw.choice(NAMESPACES), others=others)

    def accept(self, plan: Append) -> None:
        """Accept an append, as the bus."""
        self.seq += 1
        self.answer(Accepted(append=plan, seq=self.seq, now_s=self.now_s))
        if self.random.random() < 0.9:
            self.seen(plan.record)

    def stated(self, state: StateRecord) -> None:
        """Accept a state, as the bus."""
        self.state_seq += 1
        self.answer(StateSeen(seq=self.state_seq, state=state, now_s=self.now_s))

    def release(self) -> None:
        """End some pods."""
        holdings = list(self.ledger.holdings())
        for holding in self.random.sample(holdings, min(len(holdings), 3)):
            plan = self.answer(ReleasePlanned(holding=holding, now_s=self.now_s, reason="pod-gone"))
            self.accept(plan)
