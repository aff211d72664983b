# SPDX-License-Identifier: Apache-2.0
"""Copies of this region for a hub, and the routes by which a hub shows its regions (ADR 46).

Both use a connection of their own, to the account ``REGIONS``. The routes read the last known
content of each region, also while the region or the link to it is unavailable. Times in seconds.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct

from hami_common.bus import grants, subjects
from hami_common.errors import HamiError, NotFound, RequestInvalid, SettingsInvalid, WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_common.ports import Bucket, Clock, Entry, Reset, Synced
from hami_common.runtime.httpd import Request, Response, StreamedResponse, json_response
from hami_common.runtime.natsio import Bus, BusLimits, NatsBucket, NatsLogin, connect, regions
from hami_common.runtime.natsio.history import Bounds, History
from hami_common.runtime.openapi import Operation, Parameter
from hami_common.runtime.places import Places
from hami_common.runtime.settings import read
from hami_common.runtime.supervise import Supervisor
from hami_registry.core import regions as core
from hami_registry.core.projection import Projection
from hami_registry.settings import Settings
from hami_registry.shell.api import asked_size
from hami_registry.shell.eventtail import Wanted, position_of, tail
from hami_registry.shell.historyapi import limit_of

LOOK_S: Final = 1.0
"""Interval at which the freshness of regions is read."""
SWEEP_S: Final = 3600.0
RELEASED_S: Final = 86_400.0
"""Released allocations are removed from copies after this time."""
_LOST: Final = regions.CopyStatus(lag=0, age_s=None, events=0)

_log = logging.getLogger(__name__)


class RegionList(Struct, frozen=True, kw_only=True):
    """Regions, sorted by name; empty unless this is the registry of a hub."""

    items: tuple[core.RegionView, ...]


class RegionNodeList(Struct, frozen=True, kw_only=True):
    """Nodes, sorted by region and name."""

    items: tuple[core.RegionNode, ...]


class RegionAllocationList(Struct, frozen=True, kw_only=True):
    """Allocations, sorted by region, namespace and pod."""

    items: tuple[core.RegionAllocation, ...]


class RegionCapacityList(Struct, frozen=True, kw_only=True):
    """Capacity, sorted by region."""

    items: tuple[core.RegionCapacity, ...]


_REGION = Parameter(name="region", place="query", text="Only of this region.")
_NO_REGION = {404: "The hub has no region of this name."}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/regions",
        name="regions",
        text="Regions of a hub with their totals and freshness.",
        answer=RegionList,
    ),
    Operation(
        path="/v1/regions/nodes",
        name="region_nodes",
        text="Nodes of all regions of a hub.",
        answer=RegionNodeList,
        parameters=(_REGION,),
        errors=_NO_REGION,
    ),
    Operation(
        path="/v1/regions/allocations",
        name="region_allocations",
        text="Allocations of all regions of a hub, without released ones.",
        answer=RegionAllocationList,
        parameters=(
            _REGION,
            Parameter(name="namespace", place="query", text="Only of this namespace."),
        ),
        errors=_NO_REGION,
    ),
    Operation(
        path="/v1/regions/capacity",
        name="region_capacity",
        text="Capacity of each region of a hub by model, as in /v1/capacity.",
        answer=RegionCapacityList,
        parameters=(
            _REGION,
            Parameter(
                name="memory_mib", place="query", text="Also count shares with this memory, in MiB."
            ),
            Parameter(
                name="core_pct", place="query", text="Compute of these shares; 0 when absent."
            ),
        ),
        errors=_NO_REGION,
    ),
    Operation(
        path="/v1/regions/events",
        name="region_events",
        text=(
            "Events of one region as server-sent events, as in /v1/events. The sequence is that of "
            "the hub's copy; events are complete, in the order of the region."
        ),
        parameters=(
            Parameter(name="region", place="query", text="Region, required."),
            Parameter(name="kind", place="query", text="Comma list of kinds; all when absent."),
            Parameter(name="node", place="query", text="Only of this node."),
            Parameter(
                name="limit", place="query", text="Most events that are sent; absent: no limit."
            ),
            Parameter(
                name="follow",
                place="query",
                text="Keep the stream open for new events; true when absent.",
                values=("true", "false"),
            ),
            Parameter(
                name="since",
                place="query",
                text="Sequence or RFC 3339 time to start after; a header Last-Event-ID takes "
                "precedence.",
            ),
        ),
        errors={**_NO_REGION, 429: "The caller has as many streams open as one caller may have."},
    ),
)


def _check_region(name: str, *, field: str) -> None:
    try:
        subjects.region(name)
    except WireInvalid as error:
        raise SettingsInvalid(
            field=field, problem=str(error), fix="give the names of docs/regions.md"
        ) from error


class _Region:
    """Content of one region, as far as the hub has copied it."""

    def __init__(self, name: str, *, bus: Bus, bounds: Bounds, clock: Clock) -> None:
        self.name = name
        self.projection = Projection(liveness_s=0.0)
        self.status = _LOST
        self.heard_s: float | None = None
        """Monotonic time of the last contact with the region."""
        self.history = History(
            bus,
            bounds=bounds,
            clock=clock,
            stream=subjects.region_events(name),
            prefix=subjects.region_event_prefix(name),
        )

    def take(self, bucket: str, entry: Entry) -> None:
        subject = subjects.kv_subject(bucket, entry.key)
        if bucket == subjects.DEVICES_BUCKET:
            self.projection.devices_seen(codec.decode_on(subject, entry.value, NodeDevices))
        elif bucket == subjects.ALLOC_BUCKET:
            record = codec.decode_on(subject, entry.value, AllocationRecord)
            self.projection.record_seen(entry.key, entry.revision, record)
        else:
            state = codec.decode_on(subject, entry.value, StateRecord)
            self.projection.state_seen(entry.key, entry.revision, state)

    def reset(self, bucket: str) -> None:
        projection = self.projection
        {
            subjects.DEVICES_BUCKET: projection.reset_devices,
            subjects.ALLOC_BUCKET: projection.reset_ledger,
            subjects.STATE_BUCKET: projection.reset_states,
        }[bucket]()


class Regions:
    """Regions of a hub, and handlers of the operations."""

    def __init__(self, settings: Settings, *, clock: Clock, listeners: Places) -> None:
        """``listeners`` bounds open streams of events."""
        for field, names in (("regions", settings.regions), ("region", (settings.region,))):
            for name in filter(None, names):
                _check_region(name, field=field)
        self._settings = settings
        self._clock = clock
        self._listeners = listeners
        self._regions: dict[str, _Region] = {}

    def run(self, bus: Bus, group: TaskGroup, supervisor: Supervisor) -> None:
        """Declare the copies, read what is stored, and start to follow it."""
        settings, keep = self._settings, supervisor.keep
        bounds = Bounds(
            messages=settings.history_messages, mib=settings.history_mib, time_s=settings.history_s
        )
        limits = BusLimits(replicas=settings.bus_replicas)
        wanted = []
        for name in sorted(settings.regions):
            region = _Region(name, bus=bus, bounds=bounds, clock=self._clock)
            self._regions[name] = region
            wanted += regions.copies(name, limits)
        group.start_soon(
            keep,
            "copies of regions",
            partial(regions.keep_copies, bus, wanted, timeout_s=settings.start_timeout_s),
        )
        for region in self._regions.values():
            for bucket in subjects.BUCKETS:
                following = partial(self._follow, bus, region, bucket)
                group.start_soon(keep, f"{bucket} of region {region.name}", following)
            looking = partial(self._look, bus, region)
            group.start_soon(keep, f"state of region {region.name}", looking)
            sweeping = partial(
                sweep,
                bus,
                self._clock,
                ledger=subjects.region_bucket(region.name, subjects.ALLOC_BUCKET),
                states=subjects.region_bucket(region.name, subjects.STATE_BUCKET),
                forget=region.projection.forget,
            )
            group.start_soon(keep, f"old records of region {region.name}", sweeping)

    def close(self) -> None:
        """End all streams of events."""
        for region in self._regions.values():
            region.history.close()

    async def _follow(self, bus: Bus, region: _Region, bucket: str) -> None:
        region.reset(bucket)
        copy = NatsBucket(bus, subjects.region_bucket(region.name, bucket))
        async with copy.watch() as items:
            async for item in items:
                if isinstance(item, Entry):
                    try:
                        region.take(bucket, item)
                    except WireInvalid as error:
                        _log.warning(
                            "value of a region skipped",
                            extra={"region": region.name, "problem": str(error)},
                        )
                elif isinstance(item, Reset):
                    region.reset(bucket)

    async def _look(self, bus: Bus, region: _Region) -> None:
        while True:
            try:
                status = await regions.status(bus, region.name)
            except HamiError as error:
                _log.debug("state of a region unknown", extra={"problem": str(error)})
            else:
                region.status = status
                if status.age_s is not None:
                    region.heard_s = self._clock.monotonic_s() - status.age_s
            await anyio.sleep(LOOK_S)

    def _chosen(self, request: Request) -> Sequence[_Region]:
        name = request.query.get("region", "")
        if not name:
            return tuple(self._regions.values())
        if name not in self._regions:
            raise NotFound(what=f"region {name[:40]}")
        return (self._regions[name],)

    # --- handlers -------------------------------------------------------------------------------

    async def regions(self, request: Request) -> Response:
        """See ``OPERATIONS``, as for all methods that follow."""
        del request
        return json_response(RegionList(items=tuple(self._view(o) for o in self._regions.values())))

    def _view(self, region: _Region) -> core.RegionView:
        now_s = self._clock.monotonic_s()
        age_s = None if region.heard_s is None else max(0.0, now_s - region.heard_s)
        return core.view(
            region.name,
            core.nodes(region.name, region.projection),
            age_s=None if age_s is None else round(age_s, 1),
            stale=age_s is None or age_s > self._settings.region_stale_s,
            lag=region.status.lag,
            events=region.status.events,
        )

    async def region_nodes(self, request: Request) -> Response:
        return json_response(
            RegionNodeList(
                items=tuple(
                    node
                    for region in self._chosen(request)
                    for node in core.nodes(region.name, region.projection)
                )
            )
        )

    async def region_allocations(self, request: Request) -> Response:
        namespace = request.query.get("namespace") or None
        return json_response(
            RegionAllocationList(
                items=tuple(
                    core.RegionAllocation(region=region.name, allocation=allocation)
                    for region in self._chosen(request)
                    for allocation in region.projection.allocations(namespace=namespace)
                )
            )
        )

    async def region_capacity(self, request: Request) -> Response:
        asked = asked_size(request.query)
        return json_response(
            RegionCapacityList(
                items=tuple(
                    core.capacity(region.name, region.projection, asked=asked)
                    for region in self._chosen(request)
                )
            )
        )

    async def region_events(self, request: Request) -> StreamedResponse:
        query = request.query
        if not query.get("region"):
            raise RequestInvalid(
                field="query parameter region", problem="is missing", fix="name one of /v1/regions"
            )
        (region,) = self._chosen(request)
        wanted = Wanted.of(query)
        after, since_s = position_of(
            request.headers.get("Last-Event-ID", "") or query.get("since", "")
        )
        self._listeners.check(request.caller, is_operator=True)
        chunks = tail(
            region.history,
            wanted,
            after=after,
            since_s=since_s,
            limit=limit_of(query.get("limit", "")),
            follow=query.get("follow") != "false",
        )
        return StreamedResponse(chunks=self._held(chunks, request.caller))

    async def _held(
        self, chunks: AsyncGenerator[bytes, None], caller: str
    ) -> AsyncGenerator[bytes, None]:
        """Occupy a place while the stream is open."""
        with self._listeners.hold(caller, is_operator=True):
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk


async def sweep(
    bus: Bus,
    clock: Clock,
    *,
    ledger: str,
    states: str,
    forget: Callable[[str], None] = lambda _: None,
) -> None:
    """Remove allocations from copies of buckets a day after their release, indefinitely.

    The copy itself names them: the ledger forgets releases earlier, while this replica may be down.
    ``forget`` is called with each key.
    """
    while True:
        before_s = clock.now_s() - RELEASED_S
        old = await released(NatsBucket(bus, ledger), before_s=before_s)
        for key, revision in old.items():
            await regions.purge(bus, states, key)
            await regions.purge(bus, ledger, key, revision=revision)
            forget(key)
        await anyio.sleep(SWEEP_S)


async def released(copy: Bucket, *, before_s: float) -> dict[str, int]:
    """Return the allocations that were released before a time, with their revisions."""
    found: dict[str, int] = {}
    async with copy.watch() as items:
        async for item in items:
            if isinstance(item, Synced):
                break
            if isinstance(item, Reset):
                found.clear()
                continue
            subject = subjects.kv_subject(subjects.ALLOC_BUCKET, item.key)
            try:
                record = codec.decode_on(subject, item.value, AllocationRecord)
            except WireInvalid:
                continue  # reported by the reader of the copy
            found.pop(item.key, None)
            if record.op == "release" and record.time_s < before_s:
                found[item.key] = item.revision
    return found


def copy_region(
    bus: Bus,
    settings: Settings,
    *,
    clock: Clock,
    group: TaskGroup,
    supervisor: Supervisor,
) -> None:
    """Keep the copies of this region, from which a hub reads."""
    limits = BusLimits(replicas=settings.bus_replicas)
    seed = read(Path(settings.regions_seed_file), field="regions_seed_file")
    source = grants.source_token(seed.decode("ascii", "replace"))
    outbox = regions.outbox(limits, source=source)
    keeping = partial(regions.keep_copies, bus, outbox, timeout_s=settings.start_timeout_s)
    group.start_soon(supervisor.keep, "copies for the hub", keeping)
    sweeping = partial(
        sweep, bus, clock, ledger=subjects.ALLOC_BUCKET, states=subjects.STATE_BUCKET
    )
    group.start_soon(supervisor.keep, "old records for the hub", sweeping)


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[Bus]:
    """Connect to the account of the copies."""
    async with connect(
        settings.nats_urls,
        name="hami-registry-regions",
        login=NatsLogin(seed_file=settings.regions_seed_file, inbox=grants.inbox("regions")),
        ca_file=settings.nats_ca_file,
        start_timeout_s=settings.start_timeout_s,
        request_timeout_s=settings.bus_timeout_s,
    ) as bus:
        yield bus
