# SPDX-License-Identifier: Apache-2.0
"""The registry's HTTP API: devices, allocations and their reasons.

Every answer is JSON and reports in headers how far the buckets were read: a client that just wrote
a ledger record finds in ``x-hami-ledger-seq`` whether this answer includes it. An unknown query
parameter is refused by name, because a filter that is silently ignored would change the meaning of
the answer. The table ``OPERATIONS`` is also the source of ``/openapi.json``.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus

import msgspec
from msgspec import Struct, structs

from hami_common.bus import subjects
from hami_common.errors import NotFound, RequestInvalid, Unavailable
from hami_common.events import codec
from hami_common.events.asking import Finding
from hami_common.events.decision import Moment
from hami_common.model.prices import Prices
from hami_common.model.quarantine import QuarantinedObject
from hami_common.ports import Clock
from hami_common.runtime.httpd import Request, Response, StreamedResponse, accepts_gzip
from hami_common.runtime.openapi import Operation, Parameter
from hami_common.runtime.places import Places
from hami_common.runtime.watchedfile import WatchedFile
from hami_registry.core.capacity import Capacity
from hami_registry.core.device_config import DeviceConfig
from hami_registry.core.fleet import FleetDocument, Position
from hami_registry.core.projection import AllocationView, DeviceView, ExplainView, NodeView
from hami_registry.core.system import SystemView
from hami_registry.core.waiting import Waiting
from hami_registry.shell.agents import Agents, Checks, Usage
from hami_registry.shell.canonical import CanonicalWriter
from hami_registry.shell.fleet import FleetFeed
from hami_registry.shell.pastfleet import time_of
from hami_registry.shell.system import Known, System
from hami_registry.shell.views import Change, Views, server_sent_events

KEEP_ALIVE_S = 15.0
AMOUNT_DIGITS = 9
KINDS = ("allocation", "state", "device", "decision")
LEDGER_SEQ = "x-hami-ledger-seq"
STATE_SEQ = "x-hami-state-seq"
DEVICES_SEQ = "x-hami-devices-seq"

_encoder = msgspec.json.Encoder()


class NodeList(Struct, frozen=True, kw_only=True):
    """All nodes that ever reported a device, sorted by name."""

    items: tuple[NodeView, ...]


class NodeDetail(Struct, frozen=True, kw_only=True):
    """One node with its devices and their allocations."""

    node: NodeView
    devices: tuple[DeviceView, ...]
    allocations: tuple[AllocationView, ...]


class DeviceList(Struct, frozen=True, kw_only=True):
    """Devices, sorted by node, vendor and index."""

    items: tuple[DeviceView, ...]


class AllocationList(Struct, frozen=True, kw_only=True):
    """Allocations, sorted by namespace, pod and ledger sequence."""

    items: tuple[AllocationView, ...]


class QuarantineList(Struct, frozen=True, kw_only=True):
    """Objects in quarantine, sorted by service, replica, kind and key."""

    items: tuple[QuarantinedObject, ...]


class WaitingList(Struct, frozen=True, kw_only=True):
    """Pods that wait, the longest first."""

    items: tuple[Waiting, ...]


class ConfigView(Struct, frozen=True, kw_only=True):
    """The device configuration and the prices in use."""

    generation: int
    """Incremented with each accepted change; canonical devices carry the generation they were made
    with.
    """
    file: str
    """Path of the file; empty: defaults."""
    problem: str
    """Reason why the present content of the file is not in use; empty when it is."""
    config: DeviceConfig
    prices: Prices
    """Prices of device time, of the settings."""


_NODE = Parameter(name="node", place="path", text="Name of the node.")
_NAMESPACE = Parameter(name="namespace", place="path", text="Namespace of the pod.")
_POD = Parameter(name="pod", place="path", text="Name of the pod.")
_BY_NODE = Parameter(name="node", place="query", text="Only of this node.")
_BY_NAMESPACE = Parameter(name="namespace", place="query", text="Only of this namespace.")

OPERATIONS: tuple[Operation, ...] = (
    Operation(path="/v1/nodes", name="nodes", text="All nodes with totals.", answer=NodeList),
    Operation(
        path="/v1/nodes/{node}",
        name="node",
        text="One node with its devices and allocations.",
        answer=NodeDetail,
        parameters=(_NODE,),
        errors={404: "No such node has reported a device."},
    ),
    Operation(
        path="/v1/devices",
        name="devices",
        text="Devices with what is booked on them.",
        answer=DeviceList,
        parameters=(
            _BY_NODE,
            Parameter(name="vendor", place="query", text="Only of this vendor, such as nvidia."),
        ),
    ),
    Operation(
        path="/v1/allocations",
        name="allocations",
        text="Allocations of pods.",
        answer=AllocationList,
        parameters=(
            _BY_NAMESPACE,
            Parameter(
                name="released",
                place="query",
                text="Also list released allocations.",
                values=("true", "false"),
            ),
        ),
    ),
    Operation(
        path="/v1/allocations/{namespace}/{pod}",
        name="allocations_of_pod",
        text="All allocations of pods of this name, released ones too, oldest first.",
        answer=AllocationList,
        parameters=(_NAMESPACE, _POD),
        errors={404: "No pod of this name ever held a device."},
    ),
    Operation(
        path="/v1/explain/{namespace}/{pod}",
        name="explain",
        text=(
            "Why a pod is where it is, or is nowhere. Holders of devices in other namespaces are "
            "named only to callers who may read the devices and allocations of all namespaces. "
            "With at: the scheduler computes all nodes and devices of that time from stored "
            "events, with the recorded request, and compares them with the record."
        ),
        answer=ExplainView,
        parameters=(
            _NAMESPACE,
            _POD,
            Parameter(
                name="at",
                place="query",
                text="Time as RFC 3339: the newest recorded filter at or before it.",
            ),
            Parameter(name="node", place="query", text="With at: only this node."),
        ),
        errors={
            404: "Nothing is known about a pod of this name.",
            429: "The caller, or the scheduler, has as many such requests open as allowed.",
        },
    ),
    Operation(
        path="/v1/waiting",
        name="waiting",
        text=(
            "Pods that wait, with the last refusal, its class and the number of attempts. A pod "
            "without a decision for ten minutes is left out."
        ),
        answer=WaitingList,
        parameters=(_BY_NAMESPACE,),
    ),
    Operation(
        path="/v1/system",
        name="system",
        text=(
            "State of the control plane: replicas that wrote lately, agents by version, streams "
            "and consumers of the bus, quarantine, dead letters, and concerns."
        ),
        answer=SystemView,
        errors={429: "The caller has as many such requests open as one caller may have."},
    ),
    Operation(
        path="/v1/usage",
        name="usage",
        text="Current usage of each container's share, as the agents report it.",
        answer=Usage,
        parameters=(_BY_NODE,),
        errors={429: "The caller has as many such requests open as one caller may have."},
    ),
    Operation(
        path="/v1/checks",
        name="checks",
        text="Problems of nodes and the bus, as the agents report them.",
        answer=Checks,
        parameters=(_BY_NODE,),
        errors={429: "The caller has as many such requests open as one caller may have."},
    ),
    Operation(
        path="/v1/quarantine",
        name="quarantine",
        text=(
            "Objects that a service cannot handle, isolated and retried, with the reason. One row "
            "per replica of a service; a row that its replica no longer repeats is dropped."
        ),
        answer=QuarantineList,
        parameters=(_BY_NAMESPACE,),
    ),
    Operation(
        path="/v1/fleet",
        name="fleet",
        text=(
            "All nodes, devices and allocations in columns, compressed with gzip for callers that "
            "accept it. With a namespace: only its allocations; use by others is in the devices' "
            "amounts. With at: as of that time, rebuilt from events; silent agents are unknown "
            "then, and the id is no position of the live fleet."
        ),
        answer=FleetDocument,
        parameters=(
            _BY_NAMESPACE,
            Parameter(
                name="at",
                place="query",
                text="Time of the last seven days as RFC 3339; now when absent.",
            ),
        ),
        errors={429: "The caller has as many such requests open as one caller may have."},
    ),
    Operation(
        path="/v1/fleet/events",
        name="fleet_events",
        text=(
            "Changes of the fleet as server-sent events: event fleet has as data a document like "
            "that of /v1/fleet, with the changed nodes and all their content, and as id its "
            "position. After event reset, load /v1/fleet again: changes since the position are not "
            "known. Event end: the reader is too slow or the replica stops; connect again."
        ),
        parameters=(
            Parameter(
                name="since",
                place="query",
                text="Id of the snapshot; a header Last-Event-ID takes precedence.",
            ),
            _BY_NAMESPACE,
        ),
        errors={429: "The caller has as many streams open as one caller may have."},
    ),
    Operation(
        path="/v1/capacity",
        name="capacity",
        text=(
            "By model: the largest share that can still be given, how many shares of a size fit, "
            "and the free memory that no share can use, by cause and namespace."
        ),
        answer=Capacity,
        parameters=(
            Parameter(
                name="memory_mib", place="query", text="Also count shares with this memory, in MiB."
            ),
            Parameter(
                name="core_pct",
                place="query",
                text="Compute of these shares, in percent of one device; 0 when absent.",
            ),
            _BY_NAMESPACE,
        ),
        errors={429: "The caller has as many such requests open as one caller may have."},
    ),
    Operation(
        path="/v1/config",
        name="config",
        text="The device configuration and the prices in use.",
        answer=ConfigView,
    ),
    Operation(
        path="/v1/watch",
        name="watch",
        text=(
            "Changes from now on as server-sent events: event is the kind, data the record, id the "
            "kind and its stream sequence. The stream ends with event end when the reader is too "
            "slow or the replica stops: read the lists again, then watch again. A stream of one "
            "namespace does not name the holders of devices in other namespaces."
        ),
        parameters=(
            Parameter(
                name="kind",
                place="query",
                text="Comma list of the kinds wanted; all when absent.",
            ),
            _BY_NODE,
            _BY_NAMESPACE,
        ),
        errors={429: "The caller has as many streams open as one caller may have."},
    ),
)


def _is_clusterwide(request: Request) -> bool:
    """Return whether the answer needs permission to read the whole cluster."""
    return not request.query.get("namespace")


async def _no_scheduler(request: Request, path: str) -> Response:
    del request
    raise Unavailable(peer="the scheduler", detail=f"{path}: no gateway to it")


Answerer = Callable[[Request], Awaitable[Response | StreamedResponse]]


class Api:
    """Handlers of the operations."""

    def __init__(  # noqa: PLR0913 - the parts of the service, by name
        self,
        *,
        views: Views,
        fleet: FleetFeed,
        writer: CanonicalWriter,
        config_file: WatchedFile[DeviceConfig],
        agents: Agents,
        system: System,
        questions: Places,
        clock: Clock,
        prices: Callable[[], Prices] = Prices,
    ) -> None:
        """``questions`` bounds the concurrent requests that query the agents of all nodes.

        ``prices`` returns those in force.
        """
        self._views = views
        self._projection = views.projection
        self._fleet = fleet
        self._writer = writer
        self._config_file = config_file
        self._agents = agents
        self._system = system
        self._quarantined = system.quarantined
        self._questions = questions
        self._clock = clock
        self._prices = prices
        self.ask_scheduler: Callable[[Request, str], Awaitable[Response]] = _no_scheduler
        """Forwards a request to a path of the scheduler."""

    def routes(self) -> dict[tuple[str, str], Answerer]:
        """Return every operation as a route of the HTTP server."""
        return routes_of(OPERATIONS, self, self._views)

    def _json(self, value: Struct) -> Response:
        return Response(body=_encoder.encode(value), headers=self._freshness())

    def _freshness(self) -> dict[str, str]:
        views = self._views
        return {
            LEDGER_SEQ: str(views.ledger.sequence),
            STATE_SEQ: str(views.states.sequence),
            DEVICES_SEQ: str(views.devices.sequence),
            "cache-control": "no-store",
        }

    async def nodes(self, request: Request) -> Response:
        """See ``OPERATIONS``, as for all methods that follow."""
        del request
        return self._json(NodeList(items=tuple(self._projection.nodes(now_s=self._clock.now_s()))))

    async def node(self, request: Request) -> Response:
        name = request.params["node"]
        for view in self._projection.nodes(now_s=self._clock.now_s()):
            if view.node == name:
                held = [a for a in self._projection.allocations() if a.node == name]
                return self._json(
                    NodeDetail(
                        node=view,
                        devices=tuple(self._projection.devices(node=name)),
                        allocations=tuple(held),
                    )
                )
        raise NotFound(what=f"node {name}")

    async def devices(self, request: Request) -> Response:
        query = request.query
        found = self._projection.devices(node=query.get("node"), vendor=query.get("vendor"))
        return self._json(DeviceList(items=tuple(found)))

    async def allocations(self, request: Request) -> Response:
        found = self._projection.allocations(
            namespace=request.query.get("namespace"),
            released=request.query.get("released") == "true",
        )
        return self._json(AllocationList(items=tuple(found)))

    async def allocations_of_pod(self, request: Request) -> Response:
        namespace, pod = request.params["namespace"], request.params["pod"]
        found = self._projection.allocations(namespace=namespace, released=True)
        items = tuple(view for view in found if view.pod == pod)
        if not items:
            raise NotFound(what=f"an allocation of pod {namespace}/{pod}")
        return self._json(AllocationList(items=items))

    async def explain(self, request: Request) -> Response:
        namespace, pod = request.params["namespace"], request.params["pod"]
        found = self._projection.explain(namespace, pod)
        if "at" in request.query:
            path = f"/v1/whatif/moments/{namespace}/{pod}"
            answer = await self.ask_scheduler(request, path)
            if answer.status != HTTPStatus.OK:
                return answer
            moment = codec.decode(bytes(answer.body), Moment, what="answer of the scheduler")
            empty = ExplainView(namespace=namespace, pod=pod, decisions=(), allocations=())
            found = structs.replace(found or empty, moment=moment)
        if found is None:
            raise NotFound(what=f"pod {namespace}/{pod}")
        return self._json(found if await request.sees_everything() else found.for_namespace())

    def _waiting(self, namespace: str | None) -> list[Waiting]:
        return self._views.waiting.rows(
            namespace=namespace,
            placed=self._projection.placed_uids(),
            now_s=self._clock.now_s(),
        )

    async def waiting(self, request: Request) -> Response:
        found = self._waiting(request.query.get("namespace") or None)
        return self._json(WaitingList(items=tuple(found)))

    async def system(self, request: Request) -> Response:
        views = self._views
        known = Known(
            nodes=tuple(self._projection.node_names()),
            silent=tuple(self._projection.silent(now_s=self._clock.now_s())),
            read_seq_by_stream={
                subjects.stream_of(subjects.DEVICES_BUCKET): views.devices.sequence,
                subjects.stream_of(subjects.ALLOC_BUCKET): views.ledger.sequence,
                subjects.stream_of(subjects.STATE_BUCKET): views.states.sequence,
            },
            config_generation=self._writer.inventory.generation,
            config_problem=self._config_file.problem,
            waiting=len(self._waiting(None)),
        )
        with self._questions.hold(request.caller, is_operator=True):
            return self._json(await self._system.view(known))

    async def usage(self, request: Request) -> Response:
        with self._questions.hold(request.caller, is_operator=True):
            return self._json(await self._agents.usage(self._nodes_of(request)))

    async def checks(self, request: Request) -> Response:
        with self._questions.hold(request.caller, is_operator=True):
            checks = await self._agents.checks(self._nodes_of(request))
        findings = (*checks.findings, self._quarantine_finding())
        return self._json(structs.replace(checks, findings=findings))

    def _quarantine_finding(self) -> Finding:
        rows = self._quarantined.rows(now_s=self._clock.monotonic_s())
        if not rows:
            return Finding(check="quarantine", verdict="PASS", text="no object is in quarantine")
        oldest = min(rows, key=lambda row: row.first_s)
        name = f"{oldest.namespace}/{oldest.name}" if oldest.namespace else oldest.key
        return Finding(
            check="quarantine",
            verdict="WARN",
            text=f"{len(rows)} objects cannot be handled, first {oldest.kind} {name} by "
            f"{oldest.service}: {oldest.problem}",
            fix="hamictl get quarantine; mend or delete the object, or report the bug",
        )

    async def quarantine(self, request: Request) -> Response:
        rows = self._quarantined.rows(
            namespace=request.query.get("namespace") or None, now_s=self._clock.monotonic_s()
        )
        return self._json(QuarantineList(items=tuple(rows)))

    def _nodes_of(self, request: Request) -> list[str]:
        wanted = request.query.get("node")
        known = [view.node for view in self._projection.nodes(now_s=self._clock.now_s())]
        return [name for name in known if wanted in (None, name)]

    async def config(self, request: Request) -> Response:
        del request
        return self._json(
            ConfigView(
                generation=self._writer.inventory.generation,
                file=self._config_file.path,
                problem=self._config_file.problem,
                config=self._writer.inventory.config,
                prices=self._prices(),
            )
        )

    async def fleet(self, request: Request) -> Response:
        small = accepts_gzip(request.headers)
        namespace = request.query.get("namespace", "")
        headers = {**self._freshness(), "vary": "accept-encoding"}
        with self._questions.hold(request.caller, is_operator=_is_clusterwide(request)):
            if "at" in request.query:
                at_s = time_of(request.query["at"], now_s=self._clock.now_s())
                body = await self._fleet.at(at_s, namespace, compressed=small)
            else:
                body = await self._fleet.snapshot(namespace, compressed=small)
        if small:
            headers["content-encoding"] = "gzip"
        return Response(body=body, headers=headers)

    async def fleet_events(self, request: Request) -> StreamedResponse:
        since = request.headers.get("Last-Event-ID", "") or request.query.get("since", "")
        if not since:
            raise RequestInvalid(
                field="query parameter since",
                problem="is missing",
                fix="load /v1/fleet and give its id",
            )
        caller, is_operator = request.caller, _is_clusterwide(request)
        position = Position.parse(since)
        self._fleet.check_room(caller, is_operator=is_operator)
        return StreamedResponse(
            chunks=self._fleet.events(
                position,
                namespace=request.query.get("namespace", ""),
                caller=caller,
                is_operator=is_operator,
                keep_alive_s=KEEP_ALIVE_S,
            )
        )

    async def capacity(self, request: Request) -> Response:
        query = request.query
        asked = asked_size(query)
        with self._questions.hold(request.caller, is_operator=_is_clusterwide(request)):
            return self._json(
                await self._fleet.capacity(namespace=query.get("namespace", ""), asked=asked)
            )

    async def watch(self, request: Request) -> StreamedResponse:
        query = request.query
        kinds = {part.strip() for part in query.get("kind", ",".join(KINDS)).split(",")}
        if unknown := sorted(kinds - set(KINDS)):
            raise RequestInvalid(
                field="kind",
                problem=f"{unknown[0]!r} is not a kind",
                fix=f"give some of {', '.join(KINDS)}",
            )
        node, namespace = query.get("node"), query.get("namespace")

        def wanted(change: Change) -> bool:
            return (
                change.kind in kinds
                and node in (None, change.node)
                and namespace in (None, change.namespace)
            )

        caller, is_operator = request.caller, _is_clusterwide(request)
        self._views.check_room(caller, is_operator=is_operator)
        return StreamedResponse(
            chunks=server_sent_events(
                self._views,
                wanted,
                caller=caller,
                is_operator=is_operator,
                keep_alive_s=KEEP_ALIVE_S,
            )
        )


def routes_of(
    operations: Sequence[Operation], handlers: object, views: Views
) -> dict[tuple[str, str], Answerer]:
    """Return each operation as a route to the method of ``handlers`` with its name.

    Unknown query parameters are refused, and every request while ``views`` are not complete.
    """
    return {
        ("GET", operation.path): _checked(operation, getattr(handlers, operation.name), views)
        for operation in operations
    }


def _checked(operation: Operation, answer: Answerer, views: Views) -> Answerer:
    known = {p.name: p for p in operation.parameters if p.place == "query"}

    async def checked(request: Request) -> Response | StreamedResponse:
        _check_query(request.query, known)
        if not views.is_synced:
            raise Unavailable(peer="this replica", detail="it is still reading the bus")
        return await answer(request)

    return checked


def asked_size(query: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the size of a share that a question about capacity names, MiB and percent."""
    core_pct = _amount(query, "core_pct", least=0)
    memory_mib = _amount(query, "memory_mib", least=1)
    if memory_mib is None and core_pct is not None:
        raise RequestInvalid(
            field="query parameter core_pct",
            problem="is given without memory_mib",
            fix="give memory_mib too",
        )
    return None if memory_mib is None else (memory_mib, core_pct or 0)


def _amount(query: Mapping[str, str], name: str, *, least: int) -> int | None:
    """Return a whole number of the query; ``None`` when it is absent."""
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= AMOUNT_DIGITS):
        problem = f"{text[:40]!r} is not a whole number of at most {AMOUNT_DIGITS} digits"
    elif int(text) < least:
        problem = f"{text} is below {least}"
    else:
        return int(text)
    raise RequestInvalid(
        field=f"query parameter {name}", problem=problem, fix=f"give {least} or more"
    )


def _check_query(query: Mapping[str, str], known: Mapping[str, Parameter]) -> None:
    for name, value in query.items():
        parameter = known.get(name)
        if parameter is None:
            raise RequestInvalid(
                field=f"query parameter {name}",
                problem="is not known here",
                fix=f"known ones: {', '.join(sorted(known)) or 'none'}",
            )
        if parameter.values and value not in parameter.values:
            raise RequestInvalid(
                field=f"query parameter {name}",
                problem=f"{value!r} is not one of its values",
                fix=f"give {' or '.join(parameter.values)}",
            )
