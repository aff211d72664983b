# SPDX-License-Identifier: Apache-2.0
"""Random operations of all actors of a cluster with two schedulers.

Each operation is one action of one actor: kube-scheduler asks a replica to bind, or the API server
to admit another scheduler's Binding, Volcano reserves before one, an agent reports a state, an
operator resizes a share, users and kubelets change pods, nodes and replicas vanish and return, time
passes. Many run at once. The operations drawn depend on the seed and on the state of the cluster.
Memory in MiB, compute in percent of one device.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import anyio
import msgspec

from hami_common.bus import subjects
from hami_common.dra.claims import UNPREPARED, ResourceClaim
from hami_common.dra.names import device_name
from hami_common.errors import Conflict, NotFound, Unavailable
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, ReportedState, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import Placement, Share
from hami_common.pods import annotations
from hami_common.pods import limits as limits_file
from hami_common.pods.signing import SignedPlacement
from hami_common.ports import Entry, Expect
from hami_core.ledger.holding import Holding
from hami_core.ledger.podclaim import FINALIZER
from hami_core.ledger.stimuli import Accepted, Append, RecordSeen, StateSeen
from hami_core.placement.reasons import NodeRefusal
from hami_scheduler.shell.extender_wire import BindArgs
from hami_sim.apiserver.errors import Obj, clone
from tests.support import claims
from tests.support.builders import as_admitted
from tests.support.ledger_world import LedgerWorld, Replica

SLOTS = ("alpha", "beta")
WORKERS = 8
WAITING = 14
"""About twice as many pods as wait for a node at any time."""
CROWD = 40
"""Assigned pods below which pods end less often."""
BY_CLAIM = 0.3
"""Portion of pods that get their devices through a claim."""
CLAIMS = 12
"""Claims below which claims end less often."""
RESIZABLE = frozenset({"bound", "prepared", "running"})
NEXT: dict[str | None, ReportedState] = {None: "bound", "bound": "prepared", "prepared": "running"}
FINISHED = ("Succeeded", "Failed")
OVERDUE = 1.5
"""Mean intervals after which an operation that chance has left out so far is executed."""


def cluster_nodes() -> list[NodeDevices]:
    """Six nodes, all different, small enough to be full most of the time."""
    return [
        _node("n0", count=4, memory_mib=16_000, slots=4),
        _node("n1.rack-7.example", count=8, memory_mib=80_000, slots=10),
        _node("n2", count=2, memory_mib=24_000, slots=10, scaling=1.5, cores=150),
        _node("n3", count=4, memory_mib=40_000, slots=16),
        _node("n4", count=1, memory_mib=140_000, slots=20),
        _node("n5.rack-7.example", count=6, memory_mib=24_000, slots=2),
    ]


def _node(
    node: str, *, count: int, memory_mib: int, slots: int, scaling: float = 1.0, cores: int = 100
) -> NodeDevices:
    return NodeDevices(
        node=node,
        vendor="nvidia",
        boot_id="1750000000000-a",
        seq=1,
        time_s=0.0,
        config_generation=1,
        devices=tuple(
            Device(
                uuid=f"GPU-{node}-{index}",
                vendor="nvidia",
                index=index,
                type="NVIDIA A100" if index % 2 else "NVIDIA H100",
                memory_mib=memory_mib,
                capacity_mib=int(memory_mib * scaling),
                capacity_core_pct=cores,
                slots=slots,
                numa=index // 2,
            )
            for index in range(count)
        ),
    )


class Chaos:
    """Draws operations and executes them."""

    def __init__(self, world: LedgerWorld, rng: random.Random) -> None:
        self.world = world
        self.done: Counter[str] = Counter()
        """Operations by kind."""
        self.outcomes: Counter[str] = Counter()
        self._rng = rng
        self._pods = 0
        self._resizes = 0
        self._gangs = 0
        self._claims = 0
        self._with_claims = True
        self._tried: dict[str, str] = {}
        """Node of a pod's last attempt."""
        self._verified: dict[str, SignedPlacement] = {}
        self.operations: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self.bind, 34.0),
            (self.bind_by_both, 4.0),
            (self.abandon_bind, 3.0),
            (self.gang, 6.0),
            (self.session, 6.0),
            (self.report_state, 28.0),
            (self.claim, 4.0),
            (self.end_claim, 4.0),
            (self.report_claim, 3.0),
            (self.allocate_pod_claim, 12.0),
            (self.collect_claims, 1.0),
            (self.resize, 6.0),
            (self.end_pod, 18.0),
            (self.touch_pod, 3.0),
            (self.let_time_pass, 4.0),
            (self.repeat_record, 1.5),
            (self.repeat_state, 1.0),
            (self.arm_trouble, 2.0),
            (self.break_device, 0.8),
            (self.break_reserved_device, 0.5),
            (self.lose_or_return_node, 0.5),
            (self.bind_past_us, 0.3),
            (self.take_label, 0.2),
            (self.replace_replica, 0.08),
            (self.cut_link, 0.2),
            (self.break_feed, 0.06),
            (self.end_watches, 0.05),
            (self.forget_history, 0.06),
        ]

    def leave_out(self, name: str) -> None:
        """Exclude the operation of this name; ``claim``: also of pods."""
        self._with_claims = self._with_claims and name != "claim"
        self.operations = [(kind, n) for kind, n in self.operations if kind.__name__ != name]

    async def run(self, count: int) -> None:
        """Execute ``count`` operations, several at a time."""
        left = count

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                kind = self._draw()
                self.done[kind.__name__] += 1
                await kind()

        async with anyio.create_task_group() as group:
            for _ in range(WORKERS):
                group.start_soon(work)

    def _draw(self) -> Callable[[], Awaitable[None]]:
        """Draw by weight; an operation absent for ``OVERDUE`` mean intervals comes now."""
        weights = [weight for _, weight in self.operations]
        done, total = self.done.total(), sum(weights)
        for kind, weight in self.operations:
            if not self.done[kind.__name__] and done > OVERDUE * total / weight:
                return kind
        return self._rng.choices([kind for kind, _ in self.operations], weights)[0]

    # --- kube-scheduler --------------------------------------------------------------------------

    async def bind(self) -> None:
        await self._bind(self._waiting_pod(), self._replica())

    async def bind_by_both(self) -> None:
        """Let two schedulers handle the same pod: ours, others, or one of each."""
        pod = self._waiting_pod()
        async with anyio.create_task_group() as group:
            for slot in SLOTS:
                group.start_soon(self._bind, pod, self.world.replicas[slot])

    async def abandon_bind(self) -> None:
        """Let the caller hang up at some point."""
        scope = anyio.CancelScope()
        async with anyio.create_task_group() as group:
            group.start_soon(self._bind, self._waiting_pod(), self._replica(), scope)
            for _ in range(self._rng.randrange(40)):
                await anyio.lowlevel.checkpoint()
            scope.cancel()

    async def gang(self) -> None:
        """Let kube-schedulers place all waiting members of a gang at the same time."""
        members = self._waiting_gang()
        nodes = list(self.world.devices)
        names = nodes if self._rng.random() < 0.5 else self._rng.sample(nodes, 3)

        async def place(pod: Obj, replica: Replica) -> None:
            self.outcomes[f"gang {await replica.place(pod, names)}"] += 1

        for pod in members:
            self.world.leave(partial(place, pod, self._replica()))  # may wait for other members
        for _ in range(50):
            await anyio.lowlevel.checkpoint()

    def _waiting_gang(self) -> list[Obj]:
        """Return the waiting members of a gang, or those of a new one."""
        waiting: dict[str, list[Obj]] = defaultdict(list)
        for pod in self.world.kube.pods():
            name = pod["metadata"].get("annotations", {}).get(annotations.GANG)
            if name and not pod["spec"].get("nodeName") and pod["status"]["phase"] not in FINISHED:
                waiting[name].append(pod)
        if waiting and self._rng.random() < 0.8:
            return waiting[self._rng.choice(sorted(waiting))]
        self._gangs += 1
        size = self._rng.choice((2, 3, 4))
        marks = {annotations.GANG: f"g{self._gangs}", annotations.GANG_SIZE: str(size)}
        return [self._new_pod(marks) for _ in range(size)]

    async def _bind(
        self, pod: Obj, replica: Replica, scope: anyio.CancelScope | None = None
    ) -> None:
        args = self._attempt(pod)
        is_ours = self._rng.random() < 0.7

        async def ask() -> None:
            if is_ours:
                self.outcomes[f"bind {await replica.bind(args, scope=scope)}"] += 1
            else:
                self.outcomes[f"admit {await replica.admit(args, scope=scope)}"] += 1

        if any(link.state == "hanging" for link in replica.links):
            self.world.leave(ask)  # the caller times out
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
        else:
            await ask()

    async def session(self) -> None:
        """Reserve as a session of Volcano does; then bind, give up, both at once, or vanish."""
        if any(
            link.state == "hanging" for one in self.world.replicas.values() for link in one.links
        ):
            return  # the caller would wait until its timeout
        args = self._attempt(self._waiting_pod())
        self.outcomes[f"prepare {await self._replica().prepare(args)}"] += 1
        ending = self._rng.random()

        async def admit() -> None:
            self.outcomes[f"admit {await self._replica().admit(args)}"] += 1

        async def withdraw() -> None:
            self.outcomes[f"withdraw {await self._replica().withdraw(args)}"] += 1

        async with anyio.create_task_group() as group:
            if ending < 0.6:
                group.start_soon(admit)
            if 0.4 < ending < 0.9:
                group.start_soon(withdraw)

    def _attempt(self, pod: Obj) -> BindArgs:
        """Choose a node for a pod, often the one of its last attempt."""
        meta = pod["metadata"]
        if meta["uid"] not in self._tried or self._rng.random() < 0.5:
            self._tried[meta["uid"]] = self._rng.choice(list(self.world.devices))
        return BindArgs(
            pod_name=meta["name"],
            pod_namespace=meta["namespace"],
            pod_uid=meta["uid"],
            node=self._tried[meta["uid"]],
        )

    def _waiting_pod(self) -> Obj:
        waiting = [
            pod
            for pod in self.world.kube.pods()
            if not pod["spec"].get("nodeName") and pod["status"]["phase"] not in FINISHED
        ]
        if not waiting or self._rng.randrange(WAITING) >= len(waiting):
            return self._new_pod()
        return self._rng.choice(waiting)

    def _new_pod(self, gang: Mapping[str, str] = MappingProxyType({})) -> Obj:
        self._pods += 1
        rng = self._rng
        name = f"p{self._pods}"
        if self._pods > 1 and rng.random() < 0.2:
            old = f"p{rng.randrange(max(1, self._pods - 100), self._pods)}"
            name = name if self.world.kube.pod("default", old) else old
        containers = [self._container(f"c{i}") for i in range(rng.choice((1, 1, 1, 2, 3)))]
        inits = [self._container(f"i{i}") for i in range(rng.choice((0, 0, 0, 1, 2)))]
        for init in inits:
            if rng.random() < 0.4:
                init["restartPolicy"] = "Always"
        marks = dict(gang)
        if rng.random() < 0.3:
            marks["hami.io/gpu-scheduler-policy"] = rng.choice(("binpack", "spread", "numa"))
        if rng.random() < 0.15:
            marks["nvidia.com/use-gputype"] = rng.choice(("A100", "H100"))
        pod = as_admitted(
            {
                "metadata": {
                    "name": name,
                    "namespace": "default",
                    "uid": f"uid-{self._pods}",
                    "labels": {annotations.MANAGED_LABEL: "true"},
                    "annotations": marks,
                },
                "spec": {
                    "schedulerName": "hami-scheduler",
                    "containers": containers,
                    "initContainers": inits,
                },
            }
        )
        if self._with_claims and rng.random() < BY_CLAIM and claims.asks(pod):
            pod = claims.by_claim(pod, f"hami-{self._pods}")
        return self.world.kube.add_pod(pod)

    def _container(self, name: str) -> Obj:
        rng = self._rng
        limits: dict[str, str] = {}
        shape = rng.random()
        if shape < 0.9:
            limits["nvidia.com/gpu"] = rng.choice(("1", "1", "1", "1", "1", "1", "2", "3"))
        if shape < 0.6:
            limits["nvidia.com/gpumem"] = str(rng.randrange(500, 9_000, 250))
            limits["nvidia.com/gpucores"] = str(rng.choice((0, 0, 5, 10, 30)))
        elif shape < 0.8:
            limits["nvidia.com/gpumem-percentage"] = str(rng.choice((5, 10, 15, 25, 50)))
        elif shape < 0.85:
            limits["nvidia.com/gpucores"] = "100"
        return {"name": name, "image": "x", "resources": {"limits": limits}}

    # --- claims ----------------------------------------------------------------------------------

    async def claim(self) -> None:
        """Allocate devices to a claim by first fit, as a kube-scheduler that knows claims alone."""
        rng, node = self._rng, self._rng.choice(list(self.world.devices))
        idle = [one for one in self._claims_of_users() if not one.get("status")]
        if idle and rng.random() < 0.4:
            claim = clone(rng.choice(idle))
        else:
            self._claims += 1
            claim = claims.claim(f"claim{self._claims}")
        memory_mib, core_pct = rng.randrange(500, 9_000, 250), rng.choice((0, 0, 5, 10, 30, 100))
        given: Counter[str] = Counter()
        cores: Counter[str] = Counter()
        for other in self.world.kube.claims():
            for name, memory, core in allocated(other):
                given[name] += memory
                cores[name] += core
        fitting = [
            device.uuid
            for device in self.world.devices[node].devices
            if given[device_name(device.uuid)] + memory_mib <= device.capacity_mib
            and cores[device_name(device.uuid)] + core_pct <= device.capacity_core_pct
        ]
        count = rng.choice((1, 1, 1, 2))
        if len(fitting) < count:
            self.outcomes["claim unallocatable"] += 1
            return
        results = [
            claims.result(
                uuid,
                node,
                memory=f"{memory_mib}Mi",
                cores=str(core_pct),
                shareID=f"share-{rng.randrange(1 << 60)}",
            )
            for uuid in fitting[:count]
        ]
        claim["status"] = {
            "allocation": claims.allocation(*results),
            "reservedFor": [claims.consumer(claim["metadata"]["name"])],
        }
        self.world.kube.put_claim(claim)
        self.outcomes["claim allocated"] += 1

    def _claims_of_users(self) -> list[Obj]:
        return [one for one in self.world.kube.claims() if not claims.pod_of(one)]

    async def allocate_pod_claim(self) -> None:
        """Allocate devices to the claim of a waiting pod as kube-scheduler, or of none; then bind.

        Its choice is often one that the policy does not make or the ledger does not have.
        """
        rng, kube = self._rng, self.world.kube
        waiting = {
            pod["metadata"]["uid"]: pod
            for pod in kube.pods()
            if not pod["spec"].get("nodeName") and pod["status"]["phase"] not in FINISHED
        }
        found = [one for one in kube.claims() if claims.pod_of(one) in waiting]
        if not found:
            self.outcomes["pod-claim none"] += 1
            return
        claim = rng.choice(found)
        pod = waiting[claims.pod_of(claim)]
        if not (claim.get("status") or {}).get("allocation"):
            node = rng.choice(list(self.world.devices))
            uuids = [device.uuid for device in self.world.devices[node].devices]
            results = []
            for request in claim["spec"]["devices"]["requests"]:
                exactly = request["exactly"]
                amounts = exactly.get("capacity", {}).get("requests", {})
                memory, cores = amounts.get("memory", "16000Mi"), amounts.get("cores", "0")
                chosen = rng.sample(uuids, min(exactly["count"], len(uuids)))
                results += [
                    claims.result(uuid, node, memory=memory, cores=cores, request=request["name"])
                    for uuid in chosen
                ]
            claim = clone(claim)
            claim["metadata"]["finalizers"] = [FINALIZER]
            meta = pod["metadata"]
            consumer = {"resource": "pods", "name": meta["name"], "uid": meta["uid"]}
            claim["status"] = {
                "allocation": claims.allocation(*results),
                "reservedFor": [consumer],
            }
            kube.put_claim(claim)
            self._tried[meta["uid"]] = node
            self.outcomes["pod-claim allocated"] += 1
        if rng.random() < 0.8:
            await self._bind(pod, self._replica())

    async def collect_claims(self) -> None:
        """Delete claims whose pods are gone, and deallocate those of finished pods."""
        kube = self.world.kube
        pods = {pod["metadata"]["uid"]: pod for pod in kube.pods()}
        for claim in list(kube.claims()):
            uid = claims.pod_of(claim)
            if uid and uid not in pods:
                kube.drop_claim(claim)
                self.outcomes["pod-claim collected"] += 1
            elif uid and pods[uid]["status"]["phase"] in FINISHED and claim.get("status"):
                kube.put_claim({**clone(claim), "status": {}})

    async def end_claim(self) -> None:
        """Deallocate a claim, delete it, or both."""
        found = self._claims_of_users()
        if not found or len(found) < self._rng.randrange(CLAIMS):
            self.outcomes["end-claim put-off"] += 1
            return
        claim = clone(self._rng.choice(found))
        if claim.get("status") and self._rng.random() < 0.6:
            claim["status"] = {}
            self.world.kube.put_claim(claim)
            self.outcomes["end-claim deallocated"] += 1
        else:
            self.world.kube.drop_claim(claim)
            self.outcomes["end-claim deleted"] += 1

    async def report_claim(self) -> None:
        """Prepare a claim with a matching record as its agent, or unprepare one without pods."""
        records = [
            holding.record
            for holding in self._replica().scheduler.state.ledger.holdings()
            if holding.record.origin
        ]
        if not records:
            return
        record = self._rng.choice(records)
        if record.node in self.world.silent:
            return
        claim = next(
            (c for c in self.world.kube.claims() if c["metadata"]["uid"] == record.pod_uid), None
        )
        try:
            outcome = await self._report_claim(record, claim)
        except (Conflict, Unavailable) as error:
            outcome = type(error).__name__
        self.outcomes[f"claim {outcome}"] += 1

    async def _report_claim(self, record: AllocationRecord, claim: Obj | None) -> str:
        key = subjects.allocation_key(record.node, record.pod_uid)
        stored, before = await self.world.records.get(key), await self.world.states.get(key)
        if stored is None or before is None:
            return "not-reported"
        record = codec.decode(stored.value, AllocationRecord, what=key)
        state = codec.decode(before.value, StateRecord, what=key)
        if record.op == "release" or state.allocation_id != record.allocation_id:
            return "other-record"
        is_used = claim is not None and allocation_id(claim) == record.allocation_id
        if not (is_used and state.state == "bound") and not (
            not is_used and state.state == "prepared" and not state.code
        ):
            return "nothing-to-do"
        written = msgspec.structs.replace(
            state,
            state="prepared",
            ledger_seq=stored.revision,
            code="" if is_used else UNPREPARED,
            writer=f"agent-{record.node}",
        )
        expect = Expect(
            subject=subjects.kv_subject(subjects.STATE_BUCKET, key), sequence=before.revision
        )
        await self.world.states.append(key, codec.encode(written), expect=expect)
        return "prepared" if is_used else "unprepared"

    # --- agents ----------------------------------------------------------------------------------

    async def report_state(self) -> None:
        """Report the next state of a pod as the agent of its node, if allowed."""
        pod = self._assigned_pod()
        if pod is None or pod["spec"]["nodeName"] in self.world.silent:
            self.outcomes["state nothing-to-do"] += 1
            return
        try:
            self.outcomes[f"state {await self._report(pod)}"] += 1
        except Conflict:
            self.outcomes["state conflict"] += 1
        except Unavailable:
            self.outcomes["state unavailable"] += 1

    async def _report(self, pod: Obj) -> str:
        meta, node = pod["metadata"], pod["spec"]["nodeName"]
        signed = self._signed(pod)
        if signed is None:
            return "no-allocation"
        key = subjects.allocation_key(node, meta["uid"])
        stored = await self.world.records.get(key)
        if stored is None:
            return "no-record"
        record = codec.decode(stored.value, AllocationRecord, what=key)
        if record.op == "release" or record.allocation_id != signed.allocation_id:
            return "other-record"
        before = await self.world.states.get(key)
        now: ReportedState | None = None
        if before is not None:
            state = codec.decode(before.value, StateRecord, what=key)
            now = state.state if state.allocation_id == record.allocation_id else None
        following = NEXT.get(now)
        if now != "failed" and self._rng.random() < 0.04:
            following = "failed"
        if following is None:
            return "nothing-to-do"
        if record.claim and following != "bound" and not self._has_its_claim(record):
            return "claim-differs"
        state = StateRecord(
            state=following,
            allocation_id=record.allocation_id,
            node=node,
            pod_uid=meta["uid"],
            namespace=meta["namespace"],
            pod=meta["name"],
            ledger_seq=stored.revision,
            time_s=self.world.clock.now_s(),
            writer=f"agent-{node}",
        )
        expect = Expect(
            subject=subjects.kv_subject(subjects.STATE_BUCKET, key),
            sequence=0 if before is None else before.revision,
        )
        await self.world.states.append(key, codec.encode(state), expect=expect)
        if following == "running":
            await self.world.kube.set_status(pod, phase="Running")
        return following

    def _has_its_claim(self, record: AllocationRecord) -> bool:
        """Return whether the pod's claim has the devices of the record: else it is not prepared."""
        wanted = sorted(
            (device_name(share.uuid), share.memory_mib, share.core_pct)
            for container in record.containers
            for share in container.shares
        )
        found = [one for one in self.world.kube.claims() if one["metadata"]["name"] == record.claim]
        return [sorted(allocated(one)) for one in found] == [wanted]

    def _assigned_pod(self) -> Obj | None:
        found = [
            pod
            for pod in self.world.kube.pods()
            if pod["spec"].get("nodeName") and pod["status"]["phase"] not in FINISHED
        ]
        return self._rng.choice(found) if found else None

    def _signed(self, pod: Obj) -> SignedPlacement | None:
        text = pod["metadata"].get("annotations", {}).get(annotations.ALLOCATION)
        if text is None:
            return None
        signed = self._verified.get(text)
        if signed is None:
            signed = self._verified[text] = self.world.verifier.verify(
                text, pod_uid=pod["metadata"]["uid"], node=pod["spec"]["nodeName"]
            )
        return signed

    # --- an operator who resizes shares ----------------------------------------------------------

    async def resize(self) -> None:
        """Change one share of a bound pod, in the ledger and then in the pod's annotation."""
        replica = self._replica()
        ledger = replica.scheduler.state.ledger
        holdings = [
            holding
            for holding in ledger.holdings()
            if ledger.state_of(holding.record.node, holding.record.pod_uid) in RESIZABLE
            and not holding.record.origin  # such a claim is refused a resize
        ]
        if not holdings or not replica.scheduler.state.is_complete:
            self.outcomes["resize nothing-to-do"] += 1
            return
        holding = self._rng.choice(holdings)
        self._resizes += 1
        plan = ledger.plan_resize(
            holding,
            self._resized(holding),
            now_s=self.world.clock.now_s(),
            reason=f"resize {self._resizes}",
        )
        if isinstance(plan, NodeRefusal):
            self.outcomes["resize no-fit"] += 1
            return
        seq = await self._store_resize(plan)
        if seq == 0:
            self.outcomes["resize conflict"] += 1
            return
        replica.scheduler.state.tell(Accepted(append=plan, seq=seq, now_s=self.world.clock.now_s()))
        self.outcomes[f"resize {await self._carry_to_pod(plan.key, plan.record)}"] += 1

    def _resized(self, holding: Holding) -> Placement:
        record = holding.record
        containers = list(record.containers)
        at = self._rng.randrange(len(containers))
        factor = self._rng.choice((0.25, 0.5, 0.75, 1.25, 1.5, 2.0))

        def other(share: Share) -> Share:
            core_pct = share.core_pct
            if not share.exclusive:
                core_pct = min(90, int(core_pct * factor))
            return msgspec.structs.replace(
                share, memory_mib=max(1, int(share.memory_mib * factor)), core_pct=core_pct
            )

        containers[at] = msgspec.structs.replace(
            containers[at], shares=tuple(other(share) for share in containers[at].shares)
        )
        return Placement(node=record.node, containers=tuple(containers))

    async def _store_resize(self, plan: Append) -> int:
        """Sequence of the stored record; 0 when the append failed and never will be stored.

        An append with an unknown outcome is sent again unchanged: either it is accepted now, and
        the first one never can be, or the fence has moved, and the key shows the writer.
        """
        while True:
            try:
                return await self.world.records.append(
                    plan.key, codec.encode(plan.record), expect=plan.expect
                )
            except Unavailable:
                continue
            except Conflict:
                break
        found = await self._insist(lambda: self.world.records.get(plan.key))
        if found is None:
            return 0
        record = codec.decode(found.value, AllocationRecord, what=plan.key)
        return found.revision if record.reason == plan.record.reason else 0

    async def _carry_to_pod(self, key: str, resized: AllocationRecord) -> str:
        """Sign the pod's ledger record into its annotation, unless it is there.

        The record is read after the pod and written on the pod's version, so the last of several
        operators leaves the newest record there.
        """
        namespace, name = resized.namespace, resized.pod
        while True:
            pod = self.world.kube.pod(namespace, name)
            if pod is None or pod["metadata"]["uid"] != resized.pod_uid:
                return "pod-gone"
            found = await self._insist(lambda: self.world.records.get(key))
            if found is None:
                return "released"
            record = codec.decode(found.value, AllocationRecord, what=key)
            there = self._signed(pod)
            if there is None or record.op == "release":
                return "released"
            if (there.allocation_id, there.placement.containers) == (
                record.allocation_id,
                record.containers,
            ):
                return "done"
            change = {
                "metadata": {
                    "uid": record.pod_uid,
                    "resourceVersion": pod["metadata"]["resourceVersion"],
                    "annotations": self._marks(record, found.revision),
                }
            }
            await self.world.troubles.pause()
            path = f"/api/v1/namespaces/{namespace}/pods/{name}"
            try:
                await self.world.kube.patch(path, msgspec.json.encode(change))
            except Conflict:
                continue
            except NotFound:
                return "pod-gone"

    def _marks(self, record: AllocationRecord, seq: int) -> dict[str, str]:
        """Annotations of a pod with this record."""
        signed = SignedPlacement(
            pod_uid=record.pod_uid,
            namespace=record.namespace,
            pod=record.pod,
            allocation_id=record.allocation_id,
            ledger_seq=seq,
            placement=Placement(node=record.node, containers=record.containers),
        )
        marks = {annotations.ALLOCATION: self.world.signer.sign(signed)}
        for container in record.containers:
            marks[annotations.limits(container.name)] = limits_file.encode(
                limits_file.limits_of(container, allocation_id=record.allocation_id)
            )
        return marks

    async def _insist(self, ask: Callable[[], Awaitable[Entry | None]]) -> Entry | None:
        while True:
            try:
                return await ask()
            except Unavailable:
                continue

    # --- users and kubelets ----------------------------------------------------------------------

    async def end_pod(self) -> None:
        """Finish a pod, delete it with grace or by force, or end its grace."""
        rng, kube = self._rng, self.world.kube
        pods = kube.pods()
        if not pods:
            self.outcomes["end nothing-to-do"] += 1
            return
        assigned = [pod for pod in pods if pod["spec"].get("nodeName")]
        if len(assigned) < rng.randrange(CROWD):
            self.outcomes["end put-off"] += 1
            return
        waiting = len(pods) - len(assigned)
        pod = rng.choice(pods) if waiting > WAITING / 2 or not assigned else rng.choice(assigned)
        await self._end(pod)

    async def _end(self, pod: Obj) -> None:
        rng, kube = self._rng, self.world.kube
        finished = pod["status"]["phase"] in FINISHED
        leaving = "deletionTimestamp" in pod["metadata"]
        way = rng.random()
        if finished or leaving or way < 0.3:
            self.outcomes["end removed"] += 1
            await kube.remove_pod(pod, grace_s=0)
        elif pod["spec"].get("nodeName") and way < 0.6:
            self.outcomes["end finished"] += 1
            await kube.set_status(pod, phase=rng.choice(FINISHED))
        else:
            self.outcomes["end deleted"] += 1
            await kube.remove_pod(pod, grace_s=30)

    async def touch_pod(self) -> None:
        """Write to a pod, so that its resourceVersion moves."""
        pods = self.world.kube.pods()
        if pods:
            stamp = str(self._rng.randrange(1_000_000))
            await self._patch(self._rng.choice(pods), {"annotations": {"example.com/x": stamp}})

    async def take_label(self) -> None:
        """Remove our label from an assigned pod."""
        pod = self._assigned_pod()
        if pod is not None:
            await self._patch(pod, {"labels": {annotations.MANAGED_LABEL: None}})

    async def _patch(self, pod: Obj, metadata: dict[str, Any]) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        change = {"metadata": {"uid": meta["uid"], **metadata}}
        try:
            await self.world.kube.patch(path, msgspec.json.encode(change))
        except (NotFound, Conflict):
            self.outcomes["patch too-late"] += 1

    async def bind_past_us(self) -> None:
        """Assign one of our pods as another scheduler, without any allocation."""
        meta = self._waiting_pod()["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding"
        node = self._rng.choice(list(self.world.devices))
        body = {"metadata": {"name": meta["name"]}, "target": {"kind": "Node", "name": node}}
        try:
            await self.world.kube.create(path, msgspec.json.encode(body))
        except (NotFound, Conflict):
            self.outcomes["patch too-late"] += 1

    # --- the bus, nodes, replicas, time ----------------------------------------------------------

    async def repeat_record(self) -> None:
        """Deliver a ledger record again to a replica that has folded it."""
        replica = self._replica()
        ledger = replica.scheduler.state.ledger
        entry = self._some_acked(subjects.ALLOC_BUCKET)
        if entry is None:
            return
        record = codec.decode(entry.value, AllocationRecord, what=entry.key)
        if entry.revision <= ledger.fence(record.node) and ledger.story(
            record.node, record.pod_uid
        ):
            now_s = self.world.clock.now_s()
            replica.scheduler.state.tell(RecordSeen(seq=entry.revision, record=record, now_s=now_s))
            self.outcomes["repeat record"] += 1

    async def repeat_state(self) -> None:
        """Deliver a state early, late or repeatedly."""
        replica = self._replica()
        entry = self._some_acked(subjects.STATE_BUCKET)
        if entry is None:
            return
        state = codec.decode(entry.value, StateRecord, what=entry.key)
        if replica.scheduler.state.ledger.story(state.node, state.pod_uid):
            now_s = self.world.clock.now_s()
            replica.scheduler.state.tell(StateSeen(seq=entry.revision, state=state, now_s=now_s))
            self.outcomes["repeat state"] += 1

    def _some_acked(self, bucket: str) -> Entry | None:
        acked = self.world.acked[bucket]
        if not acked:
            return None
        newest = next(reversed(acked))
        return acked.get(self._rng.randrange(max(0, newest - 300), newest + 1))

    async def arm_trouble(self) -> None:
        """Inject a fault into the next write."""
        self.world.troubles.armed = self._rng.choice(("lost", "answer-lost", "late"))

    async def let_time_pass(self) -> None:
        await self.world.pass_time(self._rng.uniform(0.3, 3.0))

    async def break_device(self) -> None:
        """Fail a device, or recover it."""
        node = self._rng.choice(list(self.world.devices))
        device = self._rng.choice(self.world.devices[node].devices)
        await self.world.tell_fault(node, device.uuid, healthy=self._rng.random() < 0.85)

    async def break_reserved_device(self) -> None:
        """Fail a device that a pod has reserved; retry the pod on that node."""
        ledger = self._replica().scheduler.state.ledger
        promised = [holding.record for holding in ledger.reserved()]
        if not promised:
            return
        record = self._rng.choice(promised)
        pod = self.world.kube.pod(record.namespace, record.pod)
        uuids = [share.uuid for container in record.containers for share in container.shares]
        await self.world.tell_fault(record.node, self._rng.choice(uuids), healthy=False)
        if pod is not None and pod["metadata"]["uid"] == record.pod_uid:
            self._tried[record.pod_uid] = record.node
            await self._bind(pod, self._replica())

    async def lose_or_return_node(self) -> None:
        """Silence a node, perhaps withdraw its inventory too; or recover it."""
        world = self.world
        try:
            if world.silent and self._rng.random() < 0.6:
                node = self._rng.choice(sorted(world.silent))
                await world.show_devices(node)
                world.silent.discard(node)
            elif not world.silent:
                node = self._rng.choice(list(world.devices))
                world.silent.add(node)
                if self._rng.random() < 0.6:
                    await world.hide_devices(node)
        except Unavailable:
            self.outcomes["inventory unavailable"] += 1

    async def replace_replica(self) -> None:
        """Kill a scheduler at any point, and start a replacement."""
        slot = self._rng.choice(SLOTS)
        if self.world.replicas[slot].is_killed:
            return
        await self.world.replace(slot)
        self.outcomes["replica replaced"] += 1

    async def cut_link(self) -> None:
        """Cut a replica from bus or API server, or stop it unnoticed, for a while."""
        if any(link.state != "up" for r in self.world.replicas.values() for link in r.links):
            return  # the other one continues
        links = self._replica().links
        if self._rng.random() < 0.5:
            for link in links:
                link.become("hanging")
        else:
            self._rng.choice(links).become("down")
        for _ in range(self._rng.choice((1, 5, 30))):
            await self.world.pass_time(1.0)
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
        for link in links:
            link.become("up")

    def mend(self) -> None:
        """Repair every link, and deliver everything."""
        self.world.troubles.calm = True
        for replica in self.world.replicas.values():
            for link in replica.links:
                link.become("up")

    async def break_feed(self) -> None:
        self._replica().break_feeds()

    async def end_watches(self) -> None:
        self.world.kube.end_watches()

    async def forget_history(self) -> None:
        self.world.kube.forget_history()

    def _replica(self) -> Replica:
        return self.world.replicas[self._rng.choice(SLOTS)]


def allocated(claim: Obj) -> list[tuple[str, int, int]]:
    """Return (name of the device, MiB, percent) of each device that the claim has."""
    results = (
        (claim.get("status") or {}).get("allocation", {}).get("devices", {}).get("results", [])
    )
    return [
        (
            one["device"],
            int(one["consumedCapacity"]["memory"].removesuffix("Mi")),
            int(one["consumedCapacity"]["cores"]),
        )
        for one in results
    ]


def allocation_id(claim: Obj) -> str:
    """Return the id of the record that the claim's allocation is to have."""
    return msgspec.convert(claim, ResourceClaim).allocation_id()
