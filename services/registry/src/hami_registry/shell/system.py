# SPDX-License-Identifier: Apache-2.0
"""Collects the state of the control plane: streams and consumers of the bus, and who writes to it.

The webhook is known by its admission events, whose header ``ce-source`` names the replica. A stream
or consumer that the bus does not report has a reason in the answer, never zeros. JetStream's API:
https://docs.nats.io/reference/reference-protocols/nats_api_reference.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import anyio
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.bus.grants import STREAMS
from hami_common.errors import HamiError, WireInvalid
from hami_common.events import codec
from hami_common.ports import Clock
from hami_common.runtime.natsio import Bus, pull_events
from hami_registry.core.quarantined import Quarantined
from hami_registry.core.system import (
    REPLICA_S,
    ConsumerRow,
    CopyRow,
    CountRow,
    LeaseRow,
    Observed,
    StreamRow,
    SystemView,
    concerns_of,
)
from hami_registry.shell.agents import Ask
from hami_registry.shell.leases import Leases

LOGS = (subjects.EVENTS_STREAM, subjects.REPORTS_STREAM, subjects.DEAD_LETTERS_STREAM)
"""Streams whose consumers are listed: of the buckets, each reader has its own for a short time."""
_API = "$JS.API"


class Known(Struct, frozen=True, kw_only=True):
    """State that this replica knows without the bus."""

    nodes: tuple[str, ...]
    silent: tuple[str, ...]
    read_seq_by_stream: Mapping[str, int]
    config_generation: int
    config_problem: str
    waiting: int


class System:
    """Answers ``/v1/system``."""

    def __init__(
        self,
        *,
        quarantined: Quarantined,
        observed: Observed,
        ask: Ask,
        leases: Leases,
        clock: Clock,
        replica: str,
        version: str,
        bus_version: Callable[[], str],
    ) -> None:
        """``replica``: of this process; ``bus_version``: of the NATS server."""
        self.quarantined = quarantined
        self._observed = observed
        self._ask = ask
        self._leases = leases
        self._clock = clock
        self._replica = replica
        self._version = version
        self._bus_version = bus_version

    async def view(self, known: Known) -> SystemView:
        """Return the state of the control plane now."""
        stream_by_name: dict[str, StreamRow] = {}
        consumers_by_name: dict[str, tuple[ConsumerRow, ...]] = {}
        problems: list[str] = []
        leases: tuple[LeaseRow, ...] = ()
        leases_problem = ""

        async def look_at_stream(name: str) -> None:
            read_seq = known.read_seq_by_stream.get(name)
            stream_by_name[name] = await self._stream(name, read_seq)

        async def look_at_consumers(name: str) -> None:
            try:
                consumers_by_name[name] = await self._consumers(name)
            except HamiError as error:
                problems.append(str(error))

        async def look_at_leases() -> None:
            nonlocal leases, leases_problem
            try:
                leases = await self._leases.rows()
            except HamiError as error:
                leases_problem = str(error)

        async with anyio.create_task_group() as group:
            group.start_soon(look_at_leases)
            for name in STREAMS:
                group.start_soon(look_at_stream, name)
            for name in LOGS:
                group.start_soon(look_at_consumers, name)
        streams = tuple(stream_by_name[name] for name in STREAMS)
        consumers = tuple(row for name in LOGS for row in consumers_by_name.get(name, ()))
        now_s = self._clock.now_s()
        self._observed.message_seen("registry", self._replica, "answer", time_s=now_s)
        rows = self.quarantined.rows(now_s=self._clock.monotonic_s())
        quarantined = Counter(row.service for row in rows)
        agents = self._observed.agents(known.nodes, known.silent)
        dead_letters = stream_by_name[subjects.DEAD_LETTERS_STREAM].messages
        return SystemView(
            time_s=now_s,
            replica=self._replica,
            version=self._version,
            bus_version=self._bus_version(),
            config_generation=known.config_generation,
            config_problem=known.config_problem,
            replicas=self._observed.replicas(now_s=now_s),
            agents=agents,
            streams=streams,
            consumers=consumers,
            consumers_problem=problems[0] if problems else "",
            leases=leases,
            leases_problem=leases_problem,
            quarantined=tuple(
                CountRow(service=service, count=count)
                for service, count in sorted(quarantined.items())
            ),
            dead_letters=dead_letters,
            waiting=known.waiting,
            concerns=concerns_of(
                agents=agents,
                version=self._version,
                streams=streams,
                consumers=consumers,
                quarantined=quarantined,
                dead_letters=dead_letters,
                config_problem=known.config_problem,
            ),
        )

    async def _stream(self, name: str, read_seq: int | None) -> StreamRow:
        problem, info = "", _Stream()
        try:
            info = codec.decode(await self._ask(f"{_API}.STREAM.INFO.{name}"), _Stream, what=name)
            problem = info.error.description if info.error is not None else ""
        except HamiError as error:
            problem = str(error)
        cluster = info.cluster
        return StreamRow(
            name=name,
            messages=info.state.messages,
            size_bytes=info.state.bytes,
            limit_bytes=info.config.max_bytes,
            last_seq=info.state.last_seq,
            read_seq=read_seq,
            consumers=info.state.consumer_count,
            leader=cluster.leader if cluster is not None else "",
            has_leader=cluster is None or cluster.leader != "" or not cluster.name,
            copies=tuple(
                CopyRow(server=one.name, is_current=one.current and not one.offline, lag=one.lag)
                for one in (cluster.replicas if cluster is not None else ()) or ()
            ),
            problem=problem,
        )

    async def _consumers(self, stream: str) -> tuple[ConsumerRow, ...]:
        answer = codec.decode(
            await self._ask(f"{_API}.CONSUMER.LIST.{stream}"), _Consumers, what=stream
        )
        if answer.error is not None:
            raise WireInvalid(what=f"stream {stream}", problem=answer.error.description)
        return tuple(
            ConsumerRow(
                stream=stream,
                name=one.name,
                is_durable=bool(one.config.durable_name),
                pending=one.num_pending,
                unacknowledged=one.num_ack_pending,
                redelivered=one.num_redelivered,
            )
            for one in answer.consumers or ()
        )


async def follow_admissions(bus: Bus, *, observed: Observed, clock: Clock) -> None:
    """Note which replicas of the webhook admit pods, indefinitely."""
    async with pull_events(
        bus,
        subjects.EVENTS_STREAM,
        filter_subjects=(f"{subjects.EVENT_PREFIX}.admission.>",),
        deliver=datetime.fromtimestamp(clock.now_s() - REPLICA_S, tz=UTC),
    ) as deliveries:
        async for delivery in deliveries:
            service, _, replica = delivery.headers.get("ce-source", "").lstrip("/").partition("/")
            if service == "webhook":
                observed.message_seen(service, replica, "admission", time_s=delivery.time_s)
            await delivery.ack()


class _Error(Struct, frozen=True):
    description: str = ""


class _State(Struct, frozen=True):
    messages: int = 0
    bytes: int = 0
    last_seq: int = 0
    consumer_count: int = 0


class _StreamConfig(Struct, frozen=True):
    max_bytes: int = -1


class _Copy(Struct, frozen=True):
    name: str = ""
    current: bool = False
    offline: bool = False
    lag: int = 0


class _Cluster(Struct, frozen=True):
    name: str = ""
    leader: str = ""
    replicas: tuple[_Copy, ...] | None = None


class _Stream(Struct, frozen=True):
    error: _Error | None = None
    state: _State = _State()
    config: _StreamConfig = _StreamConfig()
    cluster: _Cluster | None = None


class _ConsumerConfig(Struct, frozen=True):
    durable_name: str = ""


class _Consumer(Struct, frozen=True):
    name: str = ""
    config: _ConsumerConfig = _ConsumerConfig()
    num_pending: int = 0
    num_ack_pending: int = 0
    num_redelivered: int = 0


class _Consumers(Struct, frozen=True):
    error: _Error | None = None
    consumers: tuple[_Consumer, ...] | None = None
