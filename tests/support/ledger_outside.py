# SPDX-License-Identifier: Apache-2.0
"""The outside of several schedulers in one process: a Kubernetes API and a bus.

The API is the simulated server's own store and write path (``hami_sim.apiserver``), called without
HTTP: bindings with uid and resourceVersion preconditions, merge patches, status, deletion with
grace, list and watch with 410. The bus is either the in-memory one or a real nats-server; both are
read back as a log, message by message, by a reader that shares nothing with the schedulers.
"""

import asyncio
import selectors
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from itertools import cycle
from typing import Protocol

import anyio
import anyio.lowlevel
import msgspec

from hami_common.bus import subjects
from hami_common.errors import Denied, Unavailable
from hami_common.ports import BatchPublisher, Bucket, Clock, Entry, WatchEvent
from hami_common.runtime import natsio
from hami_common.runtime.kubeio.client import failure
from hami_common.runtime.kubeio.reflector import reflect
from hami_common.runtime.natsio.connection import Bus
from hami_common.runtime.natsio.consume import Heartbeat, ordered_session, parse_ack
from hami_common.runtime.natsio.jetstream import api, user_headers
from hami_scheduler.shell.feed import Subscribe
from hami_sim.apiserver import ApiError, Settings, subresources
from hami_sim.apiserver.admission import Webhooks
from hami_sim.apiserver.auth import admin
from hami_sim.apiserver.calls import Call, DeleteOptions
from hami_sim.apiserver.dra import CLAIMS
from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.kinds import rules_for
from hami_sim.apiserver.operations import Operations
from hami_sim.apiserver.patches import merge_patch
from hami_sim.apiserver.resources import Resource, ResourceTable
from hami_sim.apiserver.selectors import parse_labels
from hami_sim.apiserver.store import Change, Filter, Store, Subscription
from hami_sim.natsd import NatsServer
from tests.support.memorybus import MemoryBucket, MemoryBus, MemoryPublisher, Published, matches

READ_LIMIT_S = 20.0
READER = "reader"
_CLAIMS_API = "/apis/resource.k8s.io/v1"
_LEASES_API = "/apis/coordination.k8s.io/v1"
LEASES = "leases.coordination.k8s.io"


class _Selector(selectors.SelectSelector):
    """Never waits: time jumps to the moment that the loop would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another, for ever")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop without sockets whose time moves by hand, or when nothing is left to do.

    A run on it depends on its seed alone, not on the machine.
    """

    def __init__(self) -> None:
        self._stepped = _Selector()
        super().__init__(self._stepped)

    def time(self) -> float:
        return self._stepped.now_s

    def advance(self, step_s: float) -> None:
        self._stepped.now_s += step_s


class SimulatedKube:
    """Port ``KubeApi`` on the simulated API server's store, and what kubelets and users do."""

    def __init__(self, clock: Clock) -> None:
        settings = Settings(clock=clock.now_s, controllers=False)
        self._table = ResourceTable(settings.resources)
        self.store = Store(self._table, window=5_000)
        self._operations = Operations(
            self.store,
            self._table,
            settings,
            Webhooks(self.store, {}, default=_default),
        )
        self._user = admin()
        for name in ("default", "hami-system"):
            self._operations.seed("namespaces", {"metadata": {"name": name}})
        self.events = 0
        """Events that schedulers recorded."""
        self._watches: list[tuple[str, Subscription]] = []
        """Open watches, fed in the order in which they began."""
        self.store.on_change.append(self._feed_watches)

    # --- actions of other actors -----------------------------------------------------------------

    def add_node(self, name: str) -> None:
        self._operations.seed("nodes", {"metadata": {"name": name}})

    def add_pod(self, pod: Obj) -> Obj:
        """Store a pod as the webhook left it, under the uid that it brings."""
        assert self.pod(pod["metadata"]["namespace"], pod["metadata"]["name"]) is None
        rules = rules_for("pods")
        rules.default(pod)
        rules.prepare_create(pod)
        return self.store.put("pods", pod).obj

    def claims(self) -> list[Obj]:
        return [stored.obj for stored in self.store.tables[CLAIMS].rows.values()]

    def put_claim(self, claim: Obj) -> Obj:
        """Store a claim with its status, as kube-scheduler and kube-controller-manager leave it."""
        return self.store.put(CLAIMS, claim).obj

    def drop_claim(self, claim: Obj) -> None:
        """Remove a claim without finalizers."""
        self.store.remove(CLAIMS, claim["metadata"]["namespace"], claim["metadata"]["name"])

    def pods(self) -> list[Obj]:
        return [stored.obj for stored in self.store.tables["pods"].rows.values()]

    def pod(self, namespace: str, name: str) -> Obj | None:
        stored = self.store.get("pods", namespace, name)
        return None if stored is None else stored.obj

    async def set_status(self, pod: Obj, **status: object) -> None:
        """Set the status that kubelet reports; no effect when the pod is gone.

        A finished pod stays finished.
        """
        meta = pod["metadata"]
        call = self._call("pods", meta["namespace"], meta["name"], "status")
        change = {"metadata": {"uid": meta["uid"]}, "status": status}

        def changed(current: Obj) -> Obj:
            is_finished = current["status"].get("phase") in ("Succeeded", "Failed")
            is_another = current["metadata"]["uid"] != meta["uid"]
            return current if is_finished or is_another else _merged(current, change)

        try:
            await self._operations.update(call, changed)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    async def remove_pod(self, pod: Obj, *, grace_s: int) -> None:
        """Delete this very pod, or begin to; no effect when it is gone."""
        meta = pod["metadata"]
        options = DeleteOptions(grace_s=grace_s, uid=meta["uid"])
        call = self._call("pods", meta["namespace"], meta["name"])
        try:
            await self._operations.delete(call, options)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def on_change(self, listener: Callable[[str, Change], None]) -> None:
        """Call ``listener`` with each change, at the moment it takes effect."""
        self.store.on_change.append(listener)

    def end_watches(self) -> None:
        """End every watch in the orderly way: clients resume where they were."""
        for _, subscription in self._watches:
            subscription.close()

    def forget_history(self) -> None:
        """End every watch and answer 410 to all that resume: clients list again."""
        self.store.put("configmaps", {"metadata": {"namespace": "default", "name": "tick"}})
        self.store.forget_history()
        self.end_watches()

    # --- hami_common.ports.KubeApi ---------------------------------------------------------------

    async def get(self, path: str) -> bytes:
        resource, namespace, name, _ = _parts(path)
        with _refusals(f"GET {path}"):
            return self._operations.get(self._call(resource, namespace, name)).body

    async def list_pages(
        self, path: str, *, label_selector: str = "", field_selector: str = "", page_size: int = 500
    ) -> Sequence[bytes]:
        assert not field_selector
        wanted = Filter(labels=parse_labels(label_selector))
        table = self.store.tables[_collection(path)]
        bodies = [
            table.rows[name].body for name in table.names() if wanted.matches(table.rows[name].obj)
        ]
        head = b'{"metadata":{"resourceVersion":"%d"},"items":[' % self.store.revision
        return [
            head + b",".join(bodies[at : at + page_size]) + b"]}"
            for at in range(0, max(1, len(bodies)), page_size)
        ]

    async def metadata_pages(
        self, path: str, *, label_selector: str = "", page_size: int = 500
    ) -> AsyncIterator[bytes]:
        for page in await self.list_pages(path, label_selector=label_selector, page_size=page_size):
            yield page

    async def create(self, path: str, body: bytes) -> bytes:
        if path.endswith("/events"):
            self.events += 1
            return body
        resource, namespace, name, subresource = _parts(path)
        if resource in (CLAIMS, LEASES):
            with _refusals(f"POST {path}"):
                stored = await self._operations.create(
                    self._call(resource, namespace, ""), msgspec.json.decode(body)
                )
            return stored.body
        assert subresource == "binding", path
        call = self._call("pods", namespace, name, subresource)
        sub = call.resource.subresource(subresource)
        assert sub is not None
        with _refusals(f"POST {path}"):
            answer = await subresources.bind(self._operations, call, sub, msgspec.json.decode(body))
        return msgspec.json.encode(answer)

    async def patch(
        self, path: str, body: bytes, *, content_type: str = "application/merge-patch+json"
    ) -> bytes:
        assert content_type == "application/merge-patch+json"
        change = msgspec.json.decode(body)
        if "/events/" in path:
            self.events += 1
            return body
        if path.startswith("/api/v1/nodes/"):
            call = self._call("nodes", "", path.rsplit("/", 1)[1])
        else:
            resource, namespace, name, subresource = _parts(path)
            assert resource in ("pods", CLAIMS), path
            call = self._call(resource, namespace, name, subresource)
        with _refusals(f"PATCH {path}"):
            stored = await self._operations.update(call, lambda current: _merged(current, change))
        return stored.body

    async def replace(self, path: str, body: bytes) -> bytes:
        resource, namespace, name, _ = _parts(path)
        assert resource == LEASES, path
        change = msgspec.json.decode(body)
        call = self._call(resource, namespace, name)
        with _refusals(f"PUT {path}"):
            stored = await self._operations.update(call, lambda _: change, replaces=True)
        return stored.body

    async def delete(self, path: str, *, body: bytes = b"") -> None:
        raise Denied(peer="the Kubernetes API", detail=f"no scheduler deletes {path}", status=403)

    def list_watch(
        self, path: str, *, label_selector: str = "", field_selector: str = ""
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        assert not field_selector
        return reflect(self, path, {"labelSelector": label_selector})

    # --- hami_common.runtime.kubeio.reflector.Source ---------------------------------------------

    async def pages(
        self, path: str, selectors: Mapping[str, str], *, page_size: int = 500
    ) -> AsyncGenerator[bytes, None]:
        """Pages of one list."""
        for page in await self.list_pages(
            path, label_selector=selectors["labelSelector"], page_size=page_size
        ):
            yield page

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], *, idle_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Lines of a watch."""
        resource = _collection(path)
        wanted = Filter(labels=parse_labels(query["labelSelector"]))
        with _refusals(f"watch {path}"):
            subscription = self.store.subscribe(resource, wanted, int(query["resourceVersion"]))
        self.store.tables[resource].detach(subscription)
        self._watches.append((resource, subscription))
        try:
            yield self._lines(subscription)
        finally:
            self._watches.remove((resource, subscription))
            subscription.close()

    async def _lines(self, subscription: Subscription) -> AsyncIterator[bytes]:
        while deliveries := await subscription.drain():
            for delivery in deliveries:
                yield b'{"type":"%s","object":%s}\n' % (
                    delivery.type.encode(),
                    delivery.stored.body,
                )

    def _feed_watches(self, resource: str, change: Change) -> None:
        for watched, subscription in self._watches:
            if watched == resource:
                subscription.offer(change)

    def _call(self, resource: str, namespace: str, name: str, subresource: str = "") -> Call:
        return Call(
            resource=self._table.by_key(resource),
            subresource=subresource,
            namespace=namespace,
            name=name,
            user=self._user,
        )


def _default(resource: Resource, obj: Obj) -> None:
    rules_for(resource.storage_key).default(obj)


def _merged(current: Obj, change: Obj) -> Obj:
    merged = merge_patch(current, change)
    assert isinstance(merged, dict)
    return merged


def _collection(path: str) -> str:
    """Resource of which all namespaces are listed or watched."""
    if path == f"{_CLAIMS_API}/resourceclaims":
        return CLAIMS
    words = path.split("/")
    assert words[:3] == ["", "api", "v1"], path
    assert len(words) == 4, path
    return words[3]


def _parts(path: str) -> tuple[str, str, str, str]:
    """Resource, namespace, name and subresource of the path of a pod, a claim or a Lease."""
    for base, resource in ((_CLAIMS_API, CLAIMS), (_LEASES_API, LEASES)):
        if path.startswith(f"{base}/"):
            _, namespace, kind, *names = path.removeprefix(f"{base}/").split("/")
            assert resource.startswith(f"{kind}."), path
            name, subresource = [*names, "", ""][:2]
            return resource, namespace, name, subresource
    words = path.split("/")
    assert words[:4] == ["", "api", "v1", "namespaces"], path
    assert words[5] == "pods", path
    return "pods", words[4], words[6], words[7] if len(words) > 7 else ""


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Refusals of the server as the real client raises them."""
    try:
        yield
    except ApiError as error:
        status = msgspec.json.encode(error.to_status())
        raise failure(what, error.code, status) from error


# --- the bus -----------------------------------------------------------------------------------


class Connection(msgspec.Struct, frozen=True):
    """The bus as one process sees it."""

    bucket: Callable[[str], Bucket]
    publisher: BatchPublisher
    subscribe: Subscribe


class Outside(Protocol):
    """A bus that can be read back."""

    async def connect(self, name: str) -> Connection:
        """Return the bus as a new process sees it."""
        ...

    async def read(self, bucket: str, *, after: int) -> list[Entry]:
        """Return every stored message of a bucket later than that sequence."""
        ...

    async def read_events(self, *, after: int) -> list[tuple[int, str, bytes]] | None:
        """(sequence, subject, payload) of the event stream; ``None`` where there is none."""
        ...

    async def wipe(self) -> None:
        """Lose everything that is stored."""
        ...

    def pass_loop_time(self, step_s: float) -> None:
        """Advance limits and pauses in loop time with the schedulers' clock."""
        ...


class MemoryOutside:
    """The in-memory bus. It has no event stream."""

    def __init__(self, clock: Clock) -> None:
        self._bus = MemoryBus(clock=clock)

    async def connect(self, name: str) -> Connection:
        del name
        return Connection(
            bucket=lambda bucket: MemoryBucket(self._bus, bucket),
            publisher=MemoryPublisher(self._bus),
            subscribe=self._subscribe,
        )

    async def read(self, bucket: str, *, after: int) -> list[Entry]:
        return self._bus.stream(bucket).after(">", after)

    async def read_events(self, *, after: int) -> list[tuple[int, str, bytes]] | None:
        del after
        return None

    async def wipe(self) -> None:
        self._bus.wipe()

    def pass_loop_time(self, step_s: float) -> None:
        # A tenth: else every call in flight would reach its limit.
        if isinstance(loop := asyncio.get_running_loop(), SteppedLoop):
            loop.advance(step_s / 10)

    @asynccontextmanager
    async def _subscribe(self, subject: str) -> AsyncIterator[AsyncIterator[Published]]:
        send, receive = anyio.create_memory_object_stream[Published](100_000)

        def listen(message: Published) -> None:
            if matches(message.subject, subject):
                try:
                    send.send_nowait(message)
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    return  # the subscriber has ended

        self._bus.on_publish(listen)
        with send, receive:
            yield aiter(receive)


class NatsOutside:
    """A real nats-server, over connections of which each stands for one process."""

    def __init__(
        self, buses: Mapping[str, Bus], *, restart_empty: Callable[[], Awaitable[None]]
    ) -> None:
        self._buses = buses
        self._restart_empty = restart_empty

    async def connect(self, name: str) -> Connection:
        bus = self._buses[name]
        return Connection(
            bucket=lambda bucket: natsio.NatsBucket(bus, bucket),
            publisher=natsio.NatsPublisher(bus),
            subscribe=bus.subscribe,
        )

    async def read(self, bucket: str, *, after: int) -> list[Entry]:
        found = await self._read(
            subjects.stream_of(bucket), subjects.kv_subject(bucket, ">"), after=after
        )
        return [
            Entry(
                key=subjects.key_of(bucket, entry.key), value=entry.value, revision=entry.revision
            )
            for entry in found
        ]

    async def read_events(self, *, after: int) -> list[tuple[int, str, bytes]] | None:
        found = await self._read(subjects.EVENTS_STREAM, f"{subjects.EVENT_PREFIX}.>", after=after)
        return [(entry.revision, entry.key, entry.value) for entry in found]

    async def _read(self, stream: str, subject: str, *, after: int) -> list[Entry]:
        with anyio.fail_after(READ_LIMIT_S):
            while True:
                try:
                    return await self._read_once(stream, subject, after=after)
                except Unavailable:
                    await anyio.sleep(0.05)  # servers that elect a leader do not answer meanwhile

    async def _read_once(self, stream: str, subject: str, *, after: int) -> list[Entry]:
        bus = self._buses[READER]
        last = (await api(bus, f"STREAM.INFO.{stream}"))["state"]["last_seq"]
        found: list[Entry] = []
        if last > after:
            start = {"deliver_policy": "by_start_sequence", "opt_start_seq": after + 1}
            async with ordered_session(
                bus, stream=stream, start=start, filter_subjects=(subject,)
            ) as (
                session,
                _,
            ):
                async for message in session.messages():
                    if isinstance(message, Heartbeat):
                        continue
                    sequences = parse_ack(message.reply)
                    assert sequences is not None
                    found.append(
                        Entry(
                            key=message.subject,
                            value=message.data,
                            revision=sequences.stream,
                            headers=user_headers(message),
                        )
                    )
                    if sequences.stream >= last:
                        break
        return found

    async def wipe(self) -> None:
        generation = self._buses[READER].generation
        await self._restart_empty()
        await self._buses[READER].wait_connected(after=generation)
        await natsio.ensure_bus(self._buses[READER])

    def pass_loop_time(self, step_s: float) -> None:
        """Do nothing: a real server's time is the machine's."""


@asynccontextmanager
async def nats_outside(
    servers: Sequence[NatsServer], names: Sequence[str]
) -> AsyncIterator[NatsOutside]:
    """Connections for processes of these names, and for the reader, to one server each in turn.

    Every stream has a replica on every server.
    """

    async def restart_empty() -> None:
        for server in servers:
            await server.kill()
            await server.wipe()
        for server in servers:
            await server.start()

    async with AsyncExitStack() as stack:
        buses = {
            name: await stack.enter_async_context(natsio.connect([server.url], name=name))
            for name, server in zip((*names, READER), cycle(servers), strict=False)
        }
        limits = natsio.BusLimits(replicas=len(servers))
        await natsio.ensure_bus(buses[READER], limits=limits)
        yield NatsOutside(buses, restart_empty=restart_empty)
