# SPDX-License-Identifier: Apache-2.0
"""Several schedulers at once on one bus and one Kubernetes API, all in one process, with faults.

``LedgerWorld`` assembles whole schedulers as ``hami_scheduler.app`` does, lets them be killed at
any point and replaced, and records the facts that an external judge needs: the bus's
acknowledgements, and the position of the log when a pod became assigned. ``fold`` and ``rebuild``
are the two independent readings of the holders of shares: the newest ledger records, and the signed
annotations of pods alone. Neither uses code of the scheduler. Memory in MiB, compute in percent of
one device, times in seconds of the clock that the test moves.
"""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import Struct
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.errors import Conflict, Denied, NotFound, Unavailable
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices
from hami_common.model.placement import ContainerShares
from hami_common.pods import annotations
from hami_common.pods.signing import Signer, Verifier
from hami_common.ports import Bucket, Entry
from hami_common.runtime.httpd import Request, Response
from hami_common.runtime.tasks import background
from hami_common.runtime.telemetry import Tracing
from hami_core.ledger.binding import binding_path
from hami_core.ledger.ledger import Hold
from hami_scheduler.app import Keys, Scheduler
from hami_scheduler.app import World as Ports
from hami_scheduler.settings import DraSettings, Settings
from hami_scheduler.shell.binder import Refused
from hami_scheduler.shell.extender_wire import BindArgs
from hami_scheduler.shell.volcano import purpose
from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.store import Change
from tests.support import bindings
from tests.support.ledger_outside import Connection, Outside, SimulatedKube
from tests.support.ledger_troubles import (
    Link,
    SteppedClock,
    TroubledBucket,
    TroubledKube,
    Troubles,
)

LEASE_S = 30.0
HOLD_S = 20.0
RECONCILE_S = 60.0
TOMBSTONE_S = 500.0
HEARTBEAT_S = 5.0
OTHERS = "others"
"""Name of the connection of all processes except schedulers."""


class Held(Struct, frozen=True):
    """Shares of one pod on one node."""

    allocation_id: str
    containers: tuple[ContainerShares, ...]


Key = tuple[str, str]
"""(node, pod uid)."""


def fold(log: Iterable[tuple[int, AllocationRecord]]) -> dict[Key, Held]:
    """Return holders by the ledger: the newest record of each key, unless it is a release."""
    newest: dict[Key, tuple[int, AllocationRecord]] = {}
    for seq, record in log:
        key = (record.node, record.pod_uid)
        if seq > newest.get(key, (0, None))[0]:
            newest[key] = (seq, record)
    return {
        key: Held(record.allocation_id, record.containers)
        for key, (_, record) in newest.items()
        if record.op != "release"
    }


def rebuild(pods: Iterable[Obj], verifier: Verifier) -> dict[Key, Held]:
    """Return holders by the signed annotations of assigned, unfinished pods alone."""
    held: dict[Key, Held] = {}
    for pod in pods:
        metadata, node = pod["metadata"], pod["spec"].get("nodeName", "")
        annotation = metadata.get("annotations", {}).get(annotations.ALLOCATION)
        if not node or not annotation or pod["status"].get("phase") in ("Succeeded", "Failed"):
            continue
        signed = verifier.verify(annotation, pod_uid=metadata["uid"], node=node)
        held[node, metadata["uid"]] = Held(signed.allocation_id, signed.placement.containers)
    return held


class Assigned(Struct, frozen=True):
    """A pod became assigned with an allocation."""

    key: Key
    allocation_id: str
    log_seq: int
    """Known position of the ledger at that moment."""


class Replica:
    """A scheduler that runs until it is killed."""

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        registry: CollectorRegistry,
        *,
        records: TroubledBucket,
        states: TroubledBucket,
        kube: TroubledKube,
        links: tuple[Link, Link],
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.records = records
        self.states = states
        self.kube = kube
        self.links = links
        """To the bus and to the API server."""
        self.is_killed = False
        self._registry = registry
        self._life = anyio.CancelScope()
        self._calls: list[anyio.CancelScope] = []
        self._gone = anyio.Event()

    async def live(self) -> None:
        with self._life:
            await self.scheduler.run()
        self._gone.set()

    async def kill(self) -> None:
        """Kill it at any point, calls in flight included."""
        self.is_killed = True
        for scope in (self._life, *self._calls):
            scope.cancel()
        await self._gone.wait()

    def break_feeds(self) -> None:
        """Make its watches of ledger and states end with an error."""
        for bucket in (self.records, self.states):
            bucket.break_watches()

    async def bind(self, args: BindArgs, *, scope: anyio.CancelScope | None = None) -> str:
        """Call its bind, as kube-scheduler would; returns the outcome in one word."""

        async def bind() -> str:
            return (await self.scheduler.binder.bind(args)).outcome

        return await self._outcome(bind, scope)

    async def admit(self, args: BindArgs, *, scope: anyio.CancelScope | None = None) -> str:
        """Post a Binding as another scheduler whose review this replica answers."""

        async def admit_and_store() -> str:
            admitted = await self.scheduler.binder.admit(
                args, resource_version="", is_dry_run=False
            )
            document = bindings.binding(
                args.pod_name, args.node, namespace=args.pod_namespace, uid=args.pod_uid
            )
            if admitted.pod is not None:
                document["metadata"]["resourceVersion"] = admitted.pod.resource_version
                document["metadata"]["annotations"] = dict(admitted.annotations)
            path = binding_path(args.pod_namespace, args.pod_name)
            try:
                await self.kube.create(path, msgspec.json.encode(document))
            except (Conflict, Denied, NotFound, Unavailable) as error:
                return f"{admitted.outcome}, {type(error).__name__}"
            return admitted.outcome

        return await self._outcome(admit_and_store, scope)

    async def place(self, pod: Obj, names: list[str]) -> str:
        """Filter and bind a pod as kube-scheduler would; returns the outcome in one word."""

        async def filter_and_bind() -> str:
            body = msgspec.json.encode({"Pod": pod, "NodeNames": names, "Nodes": None})
            request = Request(
                method="POST", path="/filter", query={}, headers={}, body=body, params={}
            )
            answer = await self.scheduler.extender.filter(request)
            assert isinstance(answer, Response)
            found = msgspec.json.decode(answer.body)["NodeNames"]
            if not found:
                return "refused"
            metadata = pod["metadata"]
            args = BindArgs(
                pod_name=metadata["name"],
                pod_namespace=metadata["namespace"],
                pod_uid=metadata["uid"],
                node=found[0],
            )
            return (await self.scheduler.binder.bind(args)).outcome

        return await self._outcome(filter_and_bind, None)

    async def prepare(self, args: BindArgs) -> str:
        """Reserve before a Binding, as a session of Volcano does."""

        async def prepare() -> str:
            hold = Hold(held_for=purpose(args.pod_namespace, args.pod_name), lease_s=HOLD_S)
            return (await self.scheduler.binder.prepare(args, hold)).outcome

        return await self._outcome(prepare, None)

    async def withdraw(self, args: BindArgs) -> str:
        """Release what a session reserved."""

        async def withdraw() -> str:
            held_for = purpose(args.pod_namespace, args.pod_name)
            await self.scheduler.binder.withdraw(args.pod_uid, args.node, held_for=held_for)
            return "done"

        return await self._outcome(withdraw, None)

    async def _outcome(
        self, call: Callable[[], Awaitable[str]], scope: anyio.CancelScope | None
    ) -> str:
        outcome = "cut-off"
        if self.is_killed or not self.scheduler.state.is_complete:
            return "not-in-sync"
        with scope or anyio.CancelScope() as limit:
            self._calls.append(limit)
            try:
                outcome = await call()
            except Refused as refused:
                outcome = refused.outcome
            except (Conflict, Unavailable):
                outcome = "unavailable"
            finally:
                self._calls.remove(limit)
        return outcome

    def value(self, metric: str, **labels: str) -> float:
        """Return a metric of the scheduler, 0 when it was never set."""
        return self._registry.get_sample_value(metric, labels) or 0.0


class LedgerWorld:
    """The outside of all schedulers, and the schedulers."""

    def __init__(
        self, *, outside: Outside, clock: SteppedClock, rng: random.Random, group: TaskGroup
    ) -> None:
        self.clock = clock
        self.outside = outside
        self.rng = rng
        self.kube = SimulatedKube(clock)
        self.troubles = Troubles(rng, clock, group)
        self.signer = Signer.generate()
        self.verifier = Verifier.from_pems([self.signer.public_pem()])
        self.replicas: dict[str, Replica] = {}
        self.acked: dict[str, dict[int, Entry]] = {bucket: {} for bucket in subjects.BUCKETS}
        """Appends that the bus acknowledged, by bucket and sequence."""
        self.assigned: list[Assigned] = []
        self.devices: dict[str, NodeDevices] = {}
        """Devices of each node, present or not."""
        self.silent: set[str] = set()
        """Nodes whose agents send no heartbeats."""
        self.faulty: set[Key] = set()
        """(node, UUID) of devices whose newest report is a fault."""
        self.hidden: set[str] = set()
        """Nodes whose devices the registry has withdrawn."""
        self.all_replicas: list[Replica] = []
        """All replicas, including killed ones."""
        self._connections: dict[str, Connection] = {}
        self._group = group
        self._ids = count(1)
        self._log_seq = 0
        self._heard_s = 0.0
        self.kube.on_change(self._watch_assignments)

    async def open(self, nodes: Iterable[NodeDevices]) -> None:
        """Bring the cluster up, without a scheduler."""
        connection = await self.outside.connect(OTHERS)
        self.publisher = connection.publisher
        link = Link()
        self.records = self._troubled(connection.bucket(subjects.ALLOC_BUCKET), link)
        self.states = self._troubled(connection.bucket(subjects.STATE_BUCKET), link)
        self.inventory = self._troubled(connection.bucket(subjects.DEVICES_BUCKET), link)
        for devices in nodes:
            self.devices[devices.node] = devices
            self.kube.add_node(devices.node)
            await self.show_devices(devices.node)

    def _troubled(self, bucket: Bucket, link: Link) -> TroubledBucket:
        return TroubledBucket(bucket, self.troubles, link, accepted=self._accepted)

    def _accepted(self, bucket: str, entry: Entry) -> None:
        self.acked[bucket][entry.revision] = entry
        if bucket == subjects.ALLOC_BUCKET:
            self._log_seq = max(self._log_seq, entry.revision)

    def _watch_assignments(self, resource: str, change: Change) -> None:
        pod = change.new.obj
        node = pod.get("spec", {}).get("nodeName", "")
        if resource != "pods" or not node or change.old is None:
            return
        annotation = pod["metadata"].get("annotations", {}).get(annotations.ALLOCATION)
        if annotation and not change.old.obj["spec"].get("nodeName"):
            uid = pod["metadata"]["uid"]
            signed = self.verifier.verify(annotation, pod_uid=uid, node=node)
            self.assigned.append(Assigned((node, uid), signed.allocation_id, self._log_seq))

    def leave(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` without waiting for it."""
        self._group.start_soon(work)

    # --- schedulers ------------------------------------------------------------------------------

    async def start(self, slot: str, *, writer: str = "") -> Replica:
        """Start a scheduler in ``slot``; it writes as ``writer``, or as the slot."""
        name = writer or slot
        self._heard_s = -HEARTBEAT_S  # heartbeats follow when time passes next
        if slot not in self._connections:
            self._connections[slot] = await self.outside.connect(slot)
        connection = self._connections[slot]
        registry = CollectorRegistry()
        bus_link, api_link = Link(), Link()
        records = self._troubled(connection.bucket(subjects.ALLOC_BUCKET), bus_link)
        states = self._troubled(connection.bucket(subjects.STATE_BUCKET), bus_link)
        kube = TroubledKube(self.kube, self.troubles, api_link)
        scheduler = Scheduler(
            settings=Settings(
                signing_key_file="unused",
                lease_s=LEASE_S,
                reconcile_s=RECONCILE_S,
                tombstone_s=TOMBSTONE_S,
                dra=DraSettings(enabled=True),
            ),
            world=Ports(
                devices=connection.bucket(subjects.DEVICES_BUCKET),
                records=records,
                states=states,
                policies=connection.bucket(subjects.POLICIES_BUCKET),
                publisher=connection.publisher,
                subscribe=connection.subscribe,
                kube=kube,
                clock=self.clock,
            ),
            keys=Keys(signer=self.signer, verifier=self.verifier),
            registry=registry,
            tracing=Tracing(service="scheduler"),
            writer=name,
            ids=lambda: f"{name}-{next(self._ids)}",
        )
        replica = self.replicas[slot] = Replica(
            name,
            scheduler,
            registry,
            records=records,
            states=states,
            kube=kube,
            links=(bus_link, api_link),
        )
        self.all_replicas.append(replica)
        self._group.start_soon(replica.live)
        return replica

    async def replace(self, slot: str) -> Replica:
        """Kill the scheduler in ``slot`` and start another, under the same name or a new one."""
        await self.replicas[slot].kill()
        fresh = f"{slot}-{next(self._ids)}"
        return await self.start(slot, writer=self.rng.choice((slot, fresh)))

    async def stop(self, slot: str) -> None:
        """Kill the scheduler in ``slot`` and leave it empty."""
        await self.replicas.pop(slot).kill()

    async def wipe(self) -> None:
        """Lose everything the bus stored; the registry publishes its devices again."""
        self.troubles.connections += 1
        await self.outside.wipe()
        for acked in self.acked.values():
            acked.clear()
        self.assigned.clear()
        self._log_seq = 0
        for node in self.devices:
            if node not in self.hidden:
                await self._insist_on_devices(node)

    async def _insist_on_devices(self, node: str) -> None:
        while True:
            try:
                await self.show_devices(node)
            except Unavailable:
                continue
            return

    # --- nodes and time --------------------------------------------------------------------------

    async def show_devices(self, node: str) -> None:
        """Publish the node's devices as the registry, newer than any publication before."""
        self.hidden.discard(node)
        known = self.devices[node]
        devices = self.devices[node] = msgspec.structs.replace(known, seq=known.seq + 1)
        await self.inventory.append(
            subjects.devices_key(node, devices.vendor), codec.encode(devices)
        )
        self.faulty = {at for at in self.faulty if at[0] != node}

    async def hide_devices(self, node: str) -> None:
        """Withdraw the node's devices as the registry."""
        self.hidden.add(node)
        key = subjects.devices_key(node, self.devices[node].vendor)
        await self.inventory.append(key, b"")

    async def tell_fault(self, node: str, uuid: str, *, healthy: bool) -> None:
        """Report a device as faulty, or as recovered, as the agent."""
        known = self.devices[node]
        self.devices[node] = msgspec.structs.replace(known, seq=known.seq + 1)
        (self.faulty.discard if healthy else self.faulty.add)((node, uuid))
        fault = DeviceFault(
            node=node,
            vendor=known.vendor,
            uuid=uuid,
            boot_id=known.boot_id,
            seq=known.seq + 1,
            time_s=self.clock.now_s(),
            healthy=healthy,
        )
        await self.publisher.publish(subjects.fault(node), codec.encode(fault))

    async def pass_time(self, step_s: float) -> None:
        """Move the clock, with heartbeats of the live agents in time."""
        if self.clock.monotonic_s() + step_s - self._heard_s >= HEARTBEAT_S:
            self._heard_s = self.clock.monotonic_s()
            for node, devices in self.devices.items():
                if node not in self.silent:
                    beat = Heartbeat(
                        node=node,
                        boot_id=devices.boot_id,
                        seq=devices.seq,
                        time_s=self.clock.now_s(),
                        vendors=(devices.vendor,),
                    )
                    await self.publisher.publish(subjects.heartbeat(node), codec.encode(beat))
        self.clock.advance(step_s)
        self.outside.pass_loop_time(step_s)
        await self.troubles.pause()


@asynccontextmanager
async def ledger_world(
    outside: Outside, *, clock: SteppedClock, nodes: Iterable[NodeDevices], rng: random.Random
) -> AsyncIterator[LedgerWorld]:
    """A cluster for the time of the block; leaving it kills every scheduler."""
    async with background() as group:
        world = LedgerWorld(outside=outside, clock=clock, rng=rng, group=group)
        await world.open(nodes)
        yield world
