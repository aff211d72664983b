# SPDX-License-Identifier: Apache-2.0
"""One bus, one Kubernetes API and any number of schedulers, in memory and on one hand-moved clock.

``Interposer`` stands between a scheduler and its ports: it counts the calls of the paths that
write, lets a test act before or after any of them, and can block one indefinitely, which is how a
crash or a stopped process appears to others. ``check`` reads pods and the ledger's log, never a
table of this project.
"""

import asyncio
import heapq
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import count
from typing import Any

import anyio
import anyio.lowlevel
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.errors import HamiError, WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.decision import DecisionRecord
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices
from hami_common.pods.signing import Signer, Verifier
from hami_common.ports import Bucket, Entry, Expect, KubeApi, Reset, Synced, WatchEvent, Write
from hami_common.runtime.httpd import Request
from hami_common.runtime.telemetry import Tracing
from hami_common.runtime.watchedfile import WatchedFile
from hami_scheduler.app import Keys, Scheduler
from hami_scheduler.app import World as Outside
from hami_scheduler.settings import Settings
from hami_scheduler.shell.idleevents import IdleEvents, NothingIdle
from hami_scheduler.shell.resize import Ask, no_agent
from tests.support import ledgercheck
from tests.support.manualclock import ManualClock
from tests.support.memorybus import (
    MemoryBucket,
    MemoryBus,
    MemoryPublisher,
    Published,
    matches,
    one_by_one,
)
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.fakekube import FakeKube, Obj

LEASE_S = 30.0
STEP_S = 7.0
"""Below the heartbeat timeout."""


QUIET_ROUNDS = 3
"""A cancellation reaches the tasks of a group through callbacks, between which all tasks wait."""


async def reread(file: WatchedFile[Any]) -> None:
    """Read a file twice, because a change applies once two reads agree."""
    await file.look()
    await file.look()


async def quiet() -> None:
    """Return once every other task waits for an event that no task is about to trigger."""
    this = asyncio.current_task()
    rounds = 0
    while True:
        await asyncio.sleep(0)
        others = [task for task in asyncio.all_tasks() if task is not this]
        # As anyio.wait_all_tasks_blocked, which sleeps 0.1 s whenever some task is not at rest yet.
        waiters = [getattr(task, "_fut_waiter", None) for task in others]
        is_quiet = all(waiter is not None and not waiter.done() for waiter in waiters)
        rounds = rounds + 1 if is_quiet else 0
        if rounds == QUIET_ROUNDS:
            return


class HandClock(ManualClock):
    """A clock moved by hand, in steps that take no real time."""

    async def advance(self, delay_s: float) -> None:
        target_s = self._elapsed_s + delay_s
        await quiet()
        while self._sleepers and self._sleepers[0][0] <= target_s:
            wake_s, _, event = heapq.heappop(self._sleepers)
            self._elapsed_s = max(self._elapsed_s, wake_s)
            event.set()
            await quiet()
        self._elapsed_s = target_s


class Interposer:
    """Sees each call on the ports of one scheduler."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.before: dict[int, Callable[[], Awaitable[None]]] = {}
        self.after: dict[int, Callable[[], Awaitable[None]]] = {}

    async def around(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        number = len(self.calls)
        self.calls.append(what)
        try:
            if number in self.before:
                await self.before[number]()
            answer = await call()
        except HamiError:
            if number in self.after:
                await self.after[number]()
            raise
        if number in self.after:
            await self.after[number]()
        return answer


class SeenBucket:
    """A bucket whose calls are seen."""

    def __init__(self, inner: Bucket, seen: Interposer) -> None:
        self.name = inner.name
        self._inner = inner
        self._seen = seen

    async def get(self, key: str) -> Entry | None:
        entry: Entry | None = await self._seen.around(
            f"get {self.name}", lambda: self._inner.get(key)
        )
        return entry

    async def latest(self, key_filter: str = ">") -> Sequence[Entry]:
        entries: Sequence[Entry] = await self._seen.around(
            f"latest {self.name}", lambda: self._inner.latest(key_filter)
        )
        return entries

    async def append(
        self,
        key: str,
        value: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        expect: Expect | None = None,
    ) -> int:
        revision: int = await self._seen.around(
            f"append {self.name}",
            lambda: self._inner.append(key, value, headers=headers, expect=expect),
        )
        return revision

    async def append_all(self, writes: Sequence[Write]) -> list[int | HamiError]:
        return await one_by_one(self, writes)

    async def last_revision(self, subject_filter: str) -> int:
        return await self._inner.last_revision(subject_filter)

    def watch(
        self, key_filter: str = ">"
    ) -> AbstractAsyncContextManager[AsyncIterator[Entry | Synced | Reset]]:
        return self._inner.watch(key_filter)

    async def forget(self, key: str) -> None:
        await self._inner.forget(key)


class SeenKube:
    """A Kubernetes API whose calls on single objects are seen."""

    def __init__(self, inner: KubeApi, seen: Interposer) -> None:
        self._inner = inner
        self._seen = seen

    async def get(self, path: str) -> bytes:
        raw: bytes = await self._seen.around("get pod", lambda: self._inner.get(path))
        return raw

    async def list_pages(
        self, path: str, *, label_selector: str = "", field_selector: str = "", page_size: int = 500
    ) -> Sequence[bytes]:
        return await self._inner.list_pages(
            path,
            label_selector=label_selector,
            field_selector=field_selector,
            page_size=page_size,
        )

    def metadata_pages(
        self, path: str, *, label_selector: str = "", page_size: int = 500
    ) -> AsyncIterator[bytes]:
        return self._inner.metadata_pages(path, label_selector=label_selector, page_size=page_size)

    async def create(self, path: str, body: bytes) -> bytes:
        kind = path.rsplit("/", 1)[1]
        raw: bytes = await self._seen.around(f"post {kind}", lambda: self._inner.create(path, body))
        return raw

    async def patch(
        self, path: str, body: bytes, *, content_type: str = "application/merge-patch+json"
    ) -> bytes:
        if "/nodes/" in path:
            # Touches that wake kube-scheduler: no step of anything, see FakeKube.node_touches.
            return await self._inner.patch(path, body, content_type=content_type)
        raw: bytes = await self._seen.around(
            f"patch {path.rsplit('/', 2)[1]}",
            lambda: self._inner.patch(path, body, content_type=content_type),
        )
        return raw

    async def replace(self, path: str, body: bytes) -> bytes:
        return await self._inner.replace(path, body)

    async def delete(self, path: str, *, body: bytes = b"") -> None:
        await self._inner.delete(path, body=body)

    def list_watch(
        self, path: str, *, label_selector: str = "", field_selector: str = ""
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        return self._inner.list_watch(
            path, label_selector=label_selector, field_selector=field_selector
        )


class Running:
    """A scheduler that runs, and how kube-scheduler calls it."""

    def __init__(self, scheduler: Scheduler, seen: Interposer, registry: CollectorRegistry) -> None:
        self.scheduler = scheduler
        self.seen = seen
        self.registry = registry
        self.state = scheduler.state

    async def call(self, verb: str, body: bytes) -> Any:
        handler = self.scheduler.extender.routes()["POST", f"/{verb}"]
        request = Request(
            method="POST", path=f"/{verb}", query={}, headers={}, body=body, params={}
        )
        response = await handler(request)
        return json.loads(response.body)  # type: ignore[union-attr]  # no handler of ours streams

    async def filter(self, pod: Obj, names: list[str]) -> Any:
        return await self.call("filter", builders.filter_body(pod, names))

    async def prioritize(self, pod: Obj, names: list[str]) -> Any:
        return await self.call("prioritize", builders.filter_body(pod, names))

    async def bind(self, pod: Obj, node: str) -> str:
        """Error text of the bind; empty when the pod is bound."""
        error: str = (await self.call("bind", builders.bind_body(pod, node)))["Error"]
        return error

    def value(self, name: str, **labels: str) -> float:
        """Value of a metric, 0 when it never moved."""
        return self.registry.get_sample_value(name, labels) or 0.0


class World:
    """The environment of all schedulers of one test."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.bus = MemoryBus(clock=self.clock)
        self.kube = FakeKube()
        self.signer = Signer.generate()
        self.verifier = Verifier.from_pems([self.signer.public_pem()])
        self._ids = count(1)
        self.idle: IdleEvents = NothingIdle()
        self.ask: Ask = no_agent

    # --- changes by others -----------------------------------------------------------------------

    async def add_devices(self, devices: NodeDevices) -> None:
        bucket = MemoryBucket(self.bus, subjects.DEVICES_BUCKET)
        key = subjects.devices_key(devices.node, devices.vendor)
        await bucket.append(key, codec.encode(devices))
        await self._beat(devices.node, devices.vendor)

    async def agents_beat(self) -> None:
        """A heartbeat of every node with devices, as each agent sends one every few seconds."""
        for key in self.bus.stream(subjects.DEVICES_BUCKET).latest(">"):
            with suppress(WireInvalid):
                devices = codec.decode(key.value, NodeDevices, what=key.key)
                await self._beat(devices.node, devices.vendor)

    async def _beat(self, node: str, vendor: str) -> None:
        beat = Heartbeat(node=node, boot_id="boot-1", seq=1, time_s=0.0, vendors=(vendor,))
        await self.publish(subjects.heartbeat(node), codec.encode(beat))

    async def heartbeat(self, *nodes: str) -> None:
        for node in nodes:
            beat = Heartbeat(node=node, boot_id="boot-1", seq=1, time_s=0.0, vendors=("nvidia",))
            await self.publish(subjects.heartbeat(node), codec.encode(beat))

    async def fault(self, fault: DeviceFault) -> None:
        await self.publish(subjects.fault(fault.node), codec.encode(fault))

    async def publish(self, subject: str, data: bytes) -> None:
        await MemoryPublisher(self.bus).publish(subject, data)
        await quiet()

    def add_pod(self, pod: Obj) -> Obj:
        return self.kube.put(pod_path(pod), pod)

    async def record(self, record: AllocationRecord, *, expect: Expect | None = None) -> int:
        """Write to the ledger as another scheduler would."""
        bucket = MemoryBucket(self.bus, subjects.ALLOC_BUCKET)
        key = subjects.allocation_key(record.node, record.pod_uid)
        return await bucket.append(key, codec.encode(record), expect=expect)

    async def report_state(self, state: StateRecord) -> int:
        bucket = MemoryBucket(self.bus, subjects.STATE_BUCKET)
        key = subjects.allocation_key(state.node, state.pod_uid)
        return await bucket.append(key, codec.encode(state))

    async def advance(self, delay_s: float, *nodes: str) -> None:
        """Let time pass, with heartbeats of ``nodes``."""
        passed = 0.0
        while passed < delay_s:
            await self.heartbeat(*nodes)
            await self.clock.advance(STEP_S)
            passed += STEP_S
        await quiet()

    # --- schedulers ------------------------------------------------------------------------------

    @asynccontextmanager
    async def scheduler(
        self,
        writer: str = "s1",
        *,
        wait: bool = True,
        signer: Signer | None = None,
        **settings: Any,
    ) -> AsyncIterator[Running]:
        """Run one for the time of the block; leaving the block cuts it off at its current step."""
        seen = Interposer()
        registry = CollectorRegistry()
        scheduler = Scheduler(
            settings=Settings(
                signing_key_file="unused",
                lease_s=LEASE_S,
                **{"tick_s": STEP_S, "sync_wait_s": 0.05, "gather_s": 0.0, **settings},
            ),
            world=Outside(
                devices=MemoryBucket(self.bus, subjects.DEVICES_BUCKET),
                records=SeenBucket(MemoryBucket(self.bus, subjects.ALLOC_BUCKET), seen),
                states=SeenBucket(MemoryBucket(self.bus, subjects.STATE_BUCKET), seen),
                policies=MemoryBucket(self.bus, subjects.POLICIES_BUCKET),
                publisher=MemoryPublisher(self.bus),
                subscribe=self._subscribe,
                kube=SeenKube(self.kube, seen),
                clock=self.clock,
                idle=self.idle,
                ask=self.ask,
            ),
            keys=Keys(signer=signer or self.signer, verifier=self.verifier),
            registry=registry,
            tracing=Tracing(service="scheduler"),
            writer=writer,
            ids=lambda: f"{writer}-{next(self._ids)}",
        )
        running = Running(scheduler, seen, registry)
        async with anyio.create_task_group() as group:
            group.start_soon(scheduler.run)
            if wait:
                await quiet()
                await self.agents_beat()
                assert scheduler.state.is_complete, scheduler.state.missing()
            yield running
            group.cancel_scope.cancel()

    @asynccontextmanager
    async def _subscribe(self, subject: str) -> AsyncIterator[AsyncIterator[Published]]:
        send, receive = anyio.create_memory_object_stream[Published](1000)

        def listen(message: Published) -> None:
            if matches(message.subject, subject):
                try:
                    send.send_nowait(message)
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    return  # the subscriber has gone

        self.bus.on_publish(listen)
        with send, receive:
            yield aiter(receive)

    # --- the truth -------------------------------------------------------------------------------

    def records(self) -> dict[str, tuple[int, AllocationRecord]]:
        """Newest record by key, with its sequence."""
        entries = self.bus.stream(subjects.ALLOC_BUCKET).latest(">")
        return {
            entry.key: (entry.revision, codec.decode(entry.value, AllocationRecord, what=entry.key))
            for entry in entries
        }

    def live(self) -> list[AllocationRecord]:
        return [record for _, record in self.records().values() if record.op != "release"]

    def states(self) -> dict[str, StateRecord]:
        entries = self.bus.stream(subjects.STATE_BUCKET).latest(">")
        return {
            entry.key: codec.decode(entry.value, StateRecord, what=entry.key) for entry in entries
        }

    def decisions(self, verb: str = "bind") -> list[DecisionRecord]:
        found = [
            codec.decode(message.data, DecisionRecord, what=message.subject)
            for message in self.bus.published
            if message.subject.startswith(f"{subjects.EVENT_PREFIX}.decision.")
        ]
        return [one for record in found for one in record.unfolded() if one.verb == verb]

    def bound(self) -> dict[str, str]:
        """Node by name of each assigned pod."""
        return {
            pod["metadata"]["name"]: pod["spec"]["nodeName"]
            for pod in self.kube.pods()
            if pod["spec"].get("nodeName")
        }

    def check(self, *capacity: NodeDevices) -> None:
        """No device is assigned twice: by the annotations of pods, and by the ledger."""
        ledgercheck.check(self.kube.pods(), self.live(), verifier=self.verifier, capacity=capacity)

    def check_settled(self, *capacity: NodeDevices) -> None:
        """Also: every bound pod holds what it carries, and no other pod holds anything."""
        ledgercheck.check_settled(
            self.kube.pods(), self.live(), verifier=self.verifier, capacity=capacity
        )


def pod_path(pod: Obj) -> str:
    meta = pod["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
