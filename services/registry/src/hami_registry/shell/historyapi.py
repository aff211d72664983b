# SPDX-License-Identifier: Apache-2.0
"""Handlers of the routes that answer from the event stream: events, timeline, pressure, workload.

The stream is read for each request (``history``) and folded by pure modules; an answer that is
incomplete states the reason in ``cut``. A caller that may read one namespace gets the names of that
namespace only. Memory in MiB, compute in percent of one device, times in Unix seconds.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final

import msgspec
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import NotFound, RequestInvalid
from hami_common.events.allocation import CLAIM, AllocationRecord, StateRecord
from hami_common.events.breach import BreachRecord
from hami_common.events.decision import AdmissionRecord, DecisionRecord
from hami_common.events.inventory import NodeDevices
from hami_common.events.partition import PartitionRecord
from hami_common.events.usage import UsageRecord
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares
from hami_common.ports import Clock
from hami_common.runtime.httpd import Request, Response, StreamedResponse
from hami_common.runtime.natsio.history import FILTERS_MOST, Event, History, Reading
from hami_common.runtime.openapi import Operation, Parameter
from hami_common.runtime.places import Places
from hami_common.units import whole
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import ResourceNames
from hami_registry.core.pressure import ContainerPressure, PressureFold
from hami_registry.core.projection import AllocationView, Projection
from hami_registry.core.rightsize import RightSize, names_for, recommend
from hami_registry.core.timeline import PodFold, Slice, Timeline, TimelineFold, slices_of
from hami_registry.core.workload import (
    ContainerWorkload,
    DeviceWorkload,
    Workload,
    WorkloadFold,
    right_sizes,
)
from hami_registry.shell.eventtail import WORDS, Wanted, position_of, tail

HOUR_S: Final = 3600.0
WEEK_H: Final = 168.0
"""Age of the oldest events."""
LIMIT_MOST: Final = 1_000_000
_USAGE_EVERY_S: Final = 60.0
"""Usual interval of a node's usage records."""
_HOURS: Final = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4})?")
_CATALOG: Final = Catalog.from_settings()
_encoder = msgspec.json.Encoder()

_NODE = Parameter(name="node", place="query", text="Only of this node.")
_NAMESPACE = Parameter(
    name="namespace",
    place="query",
    text="Only of this namespace; required of callers who may not read all namespaces.",
)


def _hours(default: str) -> Parameter:
    return Parameter(
        name="hours",
        place="query",
        text=f"Hours until now, above 0 and at most {WEEK_H:g}; {default} when absent.",
    )


class Pressure(Struct, frozen=True, kw_only=True):
    """Containers that waited or were refused memory, the longest waiting first."""

    from_s: float
    until_s: float
    items: tuple[ContainerPressure, ...]
    cut: str
    """Reason for which the answer is incomplete; empty: it is complete."""


_TOO_MANY = {429: "The caller has as many such requests open as one caller may have."}
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/events",
        name="events",
        text=(
            "Events of the stream HAMI_EVENTS as server-sent events. Data is the CloudEvent in its "
            "JSON format, with the subject of the bus; id is the stream sequence, and a reconnect "
            "with Last-Event-ID leaves no gap. With a namespace: only events whose payload names "
            "it. The first event, subscription, names stream, filter subjects and schemas for an "
            "integration. Event gap: the position is not stored any more, or unknown; what follows "
            "begins with the oldest event. Event end: the end of the stream, the limit, or the "
            "replica stops."
        ),
        parameters=(
            Parameter(
                name="kind",
                place="query",
                text=f"Comma list of {', '.join(WORDS)}; all when absent.",
            ),
            Parameter(
                name="subject",
                place="query",
                text="Filter of the bus within hami.v1.event, instead of kind: * is one token, "
                "> at the end any number.",
            ),
            _NODE,
            _NAMESPACE,
            Parameter(
                name="since",
                place="query",
                text="Stream sequence after which to begin, or a time as RFC 3339; new events when "
                "absent. A header Last-Event-ID takes precedence.",
            ),
            Parameter(
                name="limit",
                place="query",
                text="End after this number of events; none when absent.",
            ),
            Parameter(
                name="follow",
                place="query",
                text="Wait for new events at the end of the stream; true when absent.",
                values=("true", "false"),
            ),
        ),
        errors={429: "The caller has as many streams open as one caller may have."},
    ),
    Operation(
        path="/v1/timeline",
        name="timeline",
        text=(
            "Past of the devices of a node, or of one device: the slices of time that "
            "pods held, and changes of health, cordon, partitions, states and breaches. With a "
            "namespace: slices of others have no names, and their entries are left out."
        ),
        answer=Timeline,
        parameters=(
            Parameter(name="node", place="query", text="Node; may be left out if uuid is given."),
            Parameter(name="uuid", place="query", text="Only of the device with this UUID."),
            _NAMESPACE,
            _hours("168"),
        ),
        errors={404: "No such node or device is known.", **_TOO_MANY},
    ),
    Operation(
        path="/v1/pressure",
        name="pressure",
        text=(
            "Containers whose launches waited or whose memory requests were refused, the cause, "
            "and the containers with shares of the same devices. With a namespace: only its "
            "containers; neighbors of others have no names."
        ),
        answer=Pressure,
        parameters=(_NODE, _NAMESPACE, _hours("1")),
        errors=_TOO_MANY,
    ),
    Operation(
        path="/v1/workloads/{namespace}/{pod}",
        name="workload",
        text=(
            "Limits, use, peak, waiting, recommended request and events of a pod that holds "
            "devices, or held them last."
        ),
        answer=Workload,
        parameters=(
            Parameter(name="namespace", place="path", text="Namespace of the pod."),
            Parameter(name="pod", place="path", text="Name of the pod."),
            _hours("24"),
        ),
        errors={404: "No pod of this name ever held a device.", **_TOO_MANY},
    ),
)


class HistoryApi:
    """Handlers of the operations."""

    def __init__(
        self,
        *,
        history: History,
        projection: Projection,
        listeners: Places,
        questions: Places,
        clock: Clock,
    ) -> None:
        """``listeners`` bounds open streams, ``questions`` readings of the stream."""
        self._history = history
        self._projection = projection
        self._listeners = listeners
        self._questions = questions
        self._clock = clock

    # --- events -------------------------------------------------------------------------------

    async def events(self, request: Request) -> StreamedResponse:
        """See ``OPERATIONS``, as for all methods that follow."""
        query = request.query
        wanted = Wanted.of(query)
        after, since_s = position_of(
            request.headers.get("Last-Event-ID", "") or query.get("since", "")
        )
        chunks = tail(
            self._history,
            wanted,
            after=after,
            since_s=since_s,
            limit=limit_of(query.get("limit", "")),
            follow=query.get("follow") != "false",
        )
        is_operator = not wanted.namespace
        self._listeners.check(request.caller, is_operator=is_operator)
        return StreamedResponse(
            chunks=self._held(chunks, caller=request.caller, is_operator=is_operator)
        )

    async def _held(
        self, chunks: AsyncGenerator[bytes, None], *, caller: str, is_operator: bool
    ) -> AsyncGenerator[bytes, None]:
        """Occupy a place while the stream is open."""
        with self._listeners.hold(caller, is_operator=is_operator):
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    # --- timeline -----------------------------------------------------------------------------

    async def timeline(self, request: Request) -> Response:
        query = request.query
        node, uuid = query.get("node", ""), query.get("uuid", "")
        namespace = query.get("namespace", "")
        node = self._node_of(node, uuid)
        until_s = self._clock.now_s()
        fold = TimelineFold(node, from_s=until_s - _asked_hours(query, WEEK_H) * HOUR_S)
        token = subjects.escape(node)
        filters = [
            f"{subjects.EVENT_PREFIX}.{word}.{token}.*"
            for word in ("allocation", "state", "device", "partition", "breach")
        ]
        # From the oldest event on: it decides what is held at the begin.
        async with self._reading(request, filters, since_s=None) as reading:
            async for event in reading:
                _fold_timeline(fold, event)
        held = [one for view in self._projection.live_of(node) for one in _held(view)]
        return _json(
            fold.timeline(
                held=held, until_s=until_s, uuid=uuid, namespace=namespace, cut=reading.cut
            )
        )

    def _node_of(self, node: str, uuid: str) -> str:
        if not node and not uuid:
            raise RequestInvalid(
                field="query parameter node",
                problem="is missing, and uuid too",
                fix="name a node, or a device by its UUID",
            )
        if not node:
            found = [one.node for one in self._projection.devices() if one.uuid == uuid]
            if not found:
                raise NotFound(what=f"device {uuid}; if it was removed, name its node too")
            return found[0]
        if not self._projection.devices_of(node):
            raise NotFound(what=f"node {node}")
        return node

    # --- pressure -----------------------------------------------------------------------------

    async def pressure(self, request: Request) -> Response:
        query = request.query
        namespace = query.get("namespace", "")
        hours = _asked_hours(query, 1.0)
        until_s = self._clock.now_s()
        since_s = until_s - hours * HOUR_S
        views = self._projection.allocations(namespace=namespace or None, released=True)
        nodes = {
            view.node
            for view in views
            if view.state != "released" or max(view.reserved_s, view.state_s) >= since_s
        }
        if query.get("node"):
            nodes &= {query["node"]}
        fold, cut = PressureFold(), ""
        if nodes:
            cut = await self._fold_usage(request, nodes, since_s, hours, fold.seen)
        items = fold.items(priority=self._priority(nodes), namespace=namespace)
        return _json(Pressure(from_s=since_s, until_s=until_s, items=tuple(items), cut=cut))

    async def _fold_usage(
        self,
        request: Request,
        nodes: set[str],
        since_s: float,
        hours: float,
        take: Callable[[UsageRecord], None],
    ) -> str:
        """Fold the usage of nodes; of many, only the first and the newest record of each."""
        if len(nodes) <= FILTERS_MOST:
            filters = [subjects.usage_event(node) for node in sorted(nodes)]
        else:
            filters = [f"{subjects.EVENT_PREFIX}.usage.*"]
        is_many = len(nodes) * hours * HOUR_S / _USAGE_EVERY_S > self._history.bounds.messages
        missing = set(nodes)
        async with (
            self._reading(request, filters, since_s=since_s) as reading,
            aclosing(reading.events()) as events,
        ):
            async for event in events:
                record = event.record(UsageRecord)
                if record is None or record.node not in nodes:
                    continue
                if is_many and record.node not in missing:
                    continue
                take(record)
                missing.discard(record.node)
                if is_many and not missing:
                    break
        if not is_many:
            return reading.cut
        async with self._reading(request, filters, newest_only=True) as newest:
            async for event in newest:
                record = event.record(UsageRecord)
                if record is not None and record.node in nodes:
                    take(record)
        return newest.cut or (
            "of each node only the first and the newest record was read, so containers that ended "
            "in between are missing; ask for fewer hours, a node or a namespace"
        )

    @asynccontextmanager
    async def _reading(
        self,
        request: Request,
        filters: Sequence[str],
        *,
        since_s: float | None = None,
        newest_only: bool = False,
    ) -> AsyncIterator[Reading]:
        with self._questions.hold(request.caller, is_operator=True):
            async with self._history.read(
                filters, since_s=since_s, is_newest_only=newest_only
            ) as reading:
                yield reading

    # --- workload -----------------------------------------------------------------------------

    async def workload(self, request: Request) -> Response:
        namespace, pod = request.params["namespace"], request.params["pod"]
        views = [
            view
            for view in self._projection.allocations(namespace=namespace, released=True)
            if view.pod == pod and view.origin != CLAIM
        ]
        if not views:
            raise NotFound(what=f"an allocation of pod {namespace}/{pod}")
        view = max(views, key=lambda one: (one.state != "released", one.ledger_seq))
        until_s = self._clock.now_s()
        since_s = until_s - _asked_hours(request.query, 24.0) * HOUR_S
        use, pressure = WorkloadFold(view.pod_uid), PressureFold()
        usage = (subjects.usage_event(view.node),)
        async with self._reading(request, usage, since_s=since_s) as reading:
            async for event in reading:
                record = event.record(UsageRecord)
                if record is not None:
                    use.seen(record)
                    pressure.seen(record)
        uid, prefix = subjects.escape(view.pod_uid), subjects.EVENT_PREFIX
        filters = (
            *(f"{prefix}.{word}.*.{uid}" for word in ("allocation", "state", "breach")),
            subjects.decision_event(namespace, pod),
            subjects.admission_event(namespace, pod),
        )
        lives = PodFold()
        async with self._reading(request, filters) as events:
            async for event in events:
                _fold_pod(lives, event)
        waiting = {
            one.container: one
            for one in pressure.items(
                priority=self._priority([view.node]),
                namespace="" if await request.sees_everything() else namespace,
            )
            if one.pod_uid == view.pod_uid
        }
        known = {one.uuid: one for one in self._devices(view.node)}
        entries, shortened = lives.entries()
        return _json(
            Workload(
                namespace=namespace,
                pod=pod,
                allocation=view,
                from_s=since_s,
                until_s=until_s,
                sampled_s=use.sampled_s,
                every_s=use.every_s,
                containers=tuple(
                    _container(use, one, waiting.get(one.name), known)
                    for one in view.containers or lives.containers
                ),
                entries=entries,
                cut=reading.cut or events.cut or shortened,
            )
        )

    def _devices(self, node: str) -> Iterable[Device]:
        for published in self._projection.devices_of(node):
            yield from published.devices

    def _priority(self, nodes: Iterable[str]) -> Callable[[str, str], int | None]:
        found = {
            (view.pod_uid, container.name): container.priority
            for node in nodes
            for view in self._projection.live_of(node)
            for container in view.containers
        }
        return lambda uid, name: found.get((uid, name))


def _container(
    use: WorkloadFold,
    shares: ContainerShares,
    pressure: ContainerPressure | None,
    known: Mapping[str, Device],
) -> ContainerWorkload:
    devices = [
        use.device(shares.name, share, model=known[share.uuid].type if share.uuid in known else "")
        for share in shares.shares
    ]
    is_throttled = pressure is not None and pressure.cause in {"limit", "both"}

    def recommended(vendor: str, devices: Sequence[DeviceWorkload]) -> RightSize | None:
        device = known.get(devices[0].uuid)
        if device is None or not any(one.peak_s for one in devices):
            return None
        names = _names(vendor, device)
        if names is None:
            return None
        return recommend(use.use(devices, is_throttled=is_throttled), device, names)

    return ContainerWorkload(
        name=shares.name,
        kind=shares.kind,
        priority=shares.priority,
        processes=use.processes(shares.name),
        seen_s=use.seen_s(shares.name),
        devices=tuple(devices),
        pressure=pressure,
        right_size=right_sizes(devices, recommended),
    )


def _names(vendor: str, device: Device) -> ResourceNames | None:
    try:
        known = _CATALOG.vendor(vendor)
    except KeyError:
        return None
    return names_for(known.families, known.advertised(device))


def _fold_timeline(fold: TimelineFold, event: Event) -> None:
    """Fold one event; one that does not decode is left out, as consumers dead-letter it."""
    sequence, stored_s = event.sequence, event.stored_s
    match event.word:
        case "allocation":
            if (allocation := event.record(AllocationRecord)) is not None:
                fold.allocation_seen(allocation, sequence, stored_s)
        case "state":
            if (state := event.record(StateRecord)) is not None:
                fold.state_seen(state, sequence, stored_s)
        case "device":
            if (devices := event.record(NodeDevices)) is not None:
                fold.devices_seen(devices, sequence, stored_s)
        case "partition":
            if (partition := event.record(PartitionRecord)) is not None:
                fold.partition_seen(partition, sequence, stored_s)
        case "breach":
            if (breach := event.record(BreachRecord)) is not None:
                fold.breach_seen(breach, sequence, stored_s)


def _fold_pod(lives: PodFold, event: Event) -> None:
    """Fold one event of a pod, as ``_fold_timeline``."""
    sequence, stored_s = event.sequence, event.stored_s
    match event.word:
        case "allocation":
            if (allocation := event.record(AllocationRecord)) is not None:
                lives.allocation_seen(allocation, sequence, stored_s)
        case "state":
            if (state := event.record(StateRecord)) is not None:
                lives.state_seen(state, sequence, stored_s)
        case "breach":
            if (breach := event.record(BreachRecord)) is not None:
                lives.breach_seen(breach, sequence, stored_s)
        case "decision":
            if (decision := event.record(DecisionRecord)) is not None:
                lives.decision_seen(decision, sequence)
        case "admission":
            if (admission := event.record(AdmissionRecord)) is not None:
                lives.admission_seen(admission, sequence)


def _held(view: AllocationView) -> list[Slice]:
    return slices_of(
        view.containers,
        begin_s=view.reserved_s,
        namespace=view.namespace,
        pod=view.pod,
        pod_uid=view.pod_uid,
        allocation_id=view.allocation_id,
        origin=view.origin,
    )


def _asked_hours(query: Mapping[str, str], default: float) -> float:
    text = query.get("hours", "")
    if not text:
        return default
    if _HOURS.fullmatch(text) and 0 < float(text) <= WEEK_H:
        return float(text)
    raise RequestInvalid(
        field="query parameter hours",
        problem=f"{text[:40]!r} is not a number of hours above 0 and at most {WEEK_H:g}",
        fix="give hours such as 1 or 0.5",
    )


def limit_of(text: str) -> int:
    """Return the most events that a request wants, 0: all; ``RequestInvalid`` for no number."""
    if not text:
        return 0
    found = whole(text, most=LIMIT_MOST)
    if found:
        return found
    raise RequestInvalid(
        field="query parameter limit",
        problem=f"{text[:40]!r} is not a whole number from 1 to {LIMIT_MOST}",
        fix="give a number of events, or leave it out",
    )


def _json(value: Struct) -> Response:
    return Response(body=_encoder.encode(value), headers={"cache-control": "no-store"})
