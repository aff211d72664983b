# SPDX-License-Identifier: Apache-2.0
"""Composition root of the registry: bus, read models, canonical writer, API; orders start and stop.

Start: serve probes, connect to the bus, declare the streams, read the buckets to their ends, settle
the configuration's generation, then consume reports and serve the API. The registry has no state of
its own: killed at any point, it restarts from buckets, reports and configuration. Without an API
server only cordons are not updated; without the registry scheduling continues with the devices
published last (design D19).
"""

import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup, TaskStatus

from hami_common.bus import grants, subjects
from hami_common.bus.nkeys import NKey
from hami_common.errors import SettingsInvalid, Unavailable, WireInvalid
from hami_common.ports import KubeApi
from hami_common.roles import Route
from hami_common.runtime import kubeio
from hami_common.runtime.gate import FrontProxy, Gate, require_private
from hami_common.runtime.httpd import (
    Handler,
    HttpApp,
    Listener,
    Request,
    Response,
    Servers,
    TlsFiles,
)
from hami_common.runtime.kubeauth import KubeAuth
from hami_common.runtime.natsio import (
    Bus,
    BusLimits,
    NatsBucket,
    NatsLogin,
    NatsPublisher,
    connect,
    ensure_bus,
    ensure_consumer,
    keep_bus,
    serve_records,
)
from hami_common.runtime.natsio.history import Bounds, History
from hami_common.runtime.places import Places
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.quarantinereport import QuarantineReporter
from hami_common.runtime.service import ServiceContext, run
from hami_common.runtime.skufile import sku_file
from hami_common.runtime.supervise import Supervisor
from hami_common.runtime.tasks import StartedOnce, background
from hami_common.runtime.watchedfile import WatchedFile
from hami_common.vendors.catalog import Catalog
from hami_registry.core import device_config
from hami_registry.core.device_config import DeviceConfig
from hami_registry.core.inventory import Inventory
from hami_registry.core.projection import Projection
from hami_registry.core.quarantined import Quarantined
from hami_registry.settings import Settings
from hami_registry.shell import historyapi, meteringapi, openapi, regions, skuapi
from hami_registry.shell.agents import Agents
from hami_registry.shell.api import Api, routes_of
from hami_registry.shell.authenticator import Authenticator
from hami_registry.shell.canonical import DEVICE_CONFIG, CanonicalWriter
from hami_registry.shell.console import Console
from hami_registry.shell.cordonapi import CordonApi
from hami_registry.shell.cordons import Cordons
from hami_registry.shell.deadletters import DeadLetters
from hami_registry.shell.fleet import FleetFeed
from hami_registry.shell.follow import Reader, follow
from hami_registry.shell.gateway import Gateway, SchedulerAddress
from hami_registry.shell.historyapi import HistoryApi
from hami_registry.shell.idle import IdleWatch
from hami_registry.shell.leases import Leases
from hami_registry.shell.meteringapi import MeteringApi
from hami_registry.shell.metrics import KINDS, Metrics
from hami_registry.shell.quarantined import follow_quarantine
from hami_registry.shell.regions import Regions
from hami_registry.shell.reports import Reports
from hami_registry.shell.session import Sessions
from hami_registry.shell.skuapi import SkuApi
from hami_registry.shell.system import System, follow_admissions
from hami_registry.shell.views import Views

SERVICE: Final = "registry"
REST_S = 0.05
"""Pause between two reads of the bus while no caller waits for an answer from it."""

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the service; returns the exit code."""
    return run(serve_registry, service=SERVICE, settings_type=Settings, argv=argv)


class _Parts:
    """State that the tasks share."""

    def __init__(self, context: ServiceContext[Settings], bus: Bus) -> None:
        settings = context.settings
        replica = settings.replica or socket.gethostname()
        self.replica = replica
        self.metrics = Metrics(context.registry)
        self.quarantine = Quarantine(kinds=KINDS, clock=context.clock, registry=context.registry)
        self.supervisor = Supervisor(clock=context.clock, registry=context.registry)
        self.kube: KubeApi | None = None
        """Set while the API server is connected."""
        path = settings.device_config_file
        self.config_file = WatchedFile.at_start(
            path,
            DEVICE_CONFIG,
            parse=partial(device_config.parse, name=path),
            default=DeviceConfig(),
            registry=context.registry,
        )
        self.skus = sku_file(
            settings.skus_file,
            vendors=Catalog.from_settings(settings.vendors),
            registry=context.registry,
        )
        self.writer = CanonicalWriter(
            inventory=Inventory(self.config_file.value),
            bucket=NatsBucket(bus, subjects.DEVICES_BUCKET),
            clock=context.clock,
            metrics=self.metrics,
            source=f"/registry/{replica}",
            keep_cordons=settings.watch_nodes,
            quarantine=self.quarantine,
        )
        projection = Projection(liveness_s=settings.liveness_s)
        places = Places(
            what="streams of /v1/watch, /v1/events and /v1/fleet/events",
            setting="listener_limit_per_caller",
            total=settings.listener_limit,
            per_caller=settings.listener_limit_per_caller,
            reserve=min(settings.listener_reserve, settings.listener_limit - 1),
        )
        self.history = History(
            bus,
            bounds=Bounds(
                messages=settings.history_messages,
                mib=settings.history_mib,
                time_s=settings.history_s,
            ),
            clock=context.clock,
        )
        self.fleet = FleetFeed(
            projection=projection,
            history=self.history,
            clock=context.clock,
            metrics=self.metrics,
            places=places,
            queue_size=settings.fleet_queue_size,
        )
        self.views = Views(
            projection=projection,
            clock=context.clock,
            metrics=self.metrics,
            quarantine=self.quarantine,
            queue_size=settings.listener_queue_size,
            places=places,
            fleet=self.fleet,
            identify=lambda name: NatsBucket(bus, name).identity(),
        )
        self.config_file.use = lambda config: self.writer.use_config(
            config, self.views.projection.holdings()
        )
        self.quarantined = Quarantined()
        questions = Places(
            what="requests to all agents or the event stream",
            setting="question_limit_per_caller",
            total=settings.question_limit,
            per_caller=settings.question_limit_per_caller,
        )
        self.metering_api = MeteringApi(
            history=self.history,
            projection=projection,
            questions=questions,
            prices=settings.prices,
            clock=context.clock,
        )
        self.regions = Regions(settings, clock=context.clock, listeners=places)
        self.history_api = HistoryApi(
            history=self.history,
            projection=projection,
            listeners=places,
            questions=questions,
            clock=context.clock,
        )
        self.api = Api(
            views=self.views,
            fleet=self.fleet,
            writer=self.writer,
            config_file=self.config_file,
            agents=Agents(
                ask=partial(_ask, bus),
                clock=context.clock,
                version=version("hami-registry"),
                quarantine=self.quarantine,
                server_version=lambda: bus.server_version,
            ),
            system=System(
                quarantined=self.quarantined,
                observed=self.views.observed,
                ask=partial(_ask, bus),
                leases=Leases(
                    lambda: self.kube, namespace=settings.leases_namespace, clock=context.clock
                ),
                clock=context.clock,
                replica=replica,
                version=version("hami-registry"),
                bus_version=lambda: bus.server_version,
            ),
            questions=questions,
            clock=context.clock,
            prices=lambda: self.metering_api.prices,
        )


async def serve_registry(
    context: ServiceContext[Settings],
    *,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until ``context.stopping``; started, with its port, once it is ready."""
    settings = context.settings
    servers = Servers()
    console = Console(settings.console_dir) if settings.console_dir else None
    _scheduler(settings).check(sends_tokens=settings.auth != "none")
    api = HttpApp(
        {**context.settings_file.routes(), **(console.routes() if console else {})},
        registry=context.registry,
        ready=lambda: context.ready.is_set,
        is_complete=False,
    )
    tls = _tls(settings)
    async with background() as serving:
        ports = await serving.start(
            servers.run, _listeners(api, tls, context), settings.grace_s, name="servers"
        )
        async with (
            connect(
                settings.nats_urls,
                name="hami-registry",
                login=NatsLogin.of(settings, inbox=grants.inbox("registry")),
                ca_file=settings.nats_ca_file,
                start_timeout_s=settings.start_timeout_s,
                request_timeout_s=settings.bus_timeout_s,
                rest_s=REST_S,
            ) as bus,
            background() as group,
        ):
            parts = _Parts(context, bus)
            context.settings_file.use = lambda changed: parts.metering_api.use(changed.prices)
            await _start_following(group, context, bus, parts)
            keep = parts.supervisor.keep
            group.start_soon(keep, "records", partial(serve_records, bus, parts.quarantine))
            if settings.bus_issuer_seed_file:
                await _start_authenticator(group, context, bus, parts)
            if settings.region or settings.regions:
                await group.start(_serve_regions, context, parts)
            group.start_soon(keep, "canonical devices", partial(_write, parts.writer, settings))
            for file in (parts.config_file, parts.skus):
                watch = partial(file.watch, context.clock, context.settings_file.poll_s)
                group.start_soon(keep, file.kind.title, watch)
            if settings.watch_nodes or settings.bus_issuer_seed_file or settings.auth != "none":
                group.start_soon(keep, "Kubernetes", partial(_with_kube, parts, settings))
            if tls is not None:
                group.start_soon(keep, "certificate", partial(_watch_certificate, tls))
            if console is not None:
                group.start_soon(keep, "console", console.watch)
            api.complete(_routes(context, parts))
            context.ready.set()
            task_status.started(ports[0])
            await context.stopping.wait()
            parts.views.close_listeners()
            parts.fleet.close_viewers()
            parts.history.close()
            parts.regions.close()
            await servers.close()


async def _serve_regions(
    context: ServiceContext[Settings], parts: _Parts, *, task_status: TaskStatus[None]
) -> None:
    """Keep the copies of this region, or of the regions of a hub, indefinitely."""
    settings = context.settings
    async with regions.connected(settings) as bus, background() as group:
        if settings.region:
            regions.copy_region(
                bus,
                settings,
                clock=context.clock,
                group=group,
                supervisor=parts.supervisor,
            )
        else:
            parts.regions.run(bus, group, parts.supervisor)
        task_status.started()
        await anyio.sleep_forever()


async def _ask(bus: Bus, subject: str) -> bytes:
    """Return the answer to a request on the bus."""
    return (await bus.request(subject)).data


async def _start_following(
    group: TaskGroup, context: ServiceContext[Settings], bus: Bus, parts: _Parts
) -> None:
    settings, keep = context.settings, parts.supervisor.keep
    limits = BusLimits(replicas=settings.bus_replicas)
    views, metrics, quarantine = parts.views, parts.metrics, parts.quarantine
    publisher = NatsPublisher(bus)
    await ensure_bus(bus, limits=limits, timeout_s=settings.start_timeout_s)
    group.start_soon(keep, "streams", partial(keep_bus, bus, limits, settings.start_timeout_s))
    group.start_soon(keep, "retries", quarantine.retry)
    reporter = QuarantineReporter(
        quarantine,
        publisher=publisher,
        clock=context.clock,
        service=SERVICE,
        replica=parts.replica,
        ids=lambda: secrets.token_hex(16),
    )
    group.start_soon(keep, "quarantine reports", reporter.work)
    await group.start(_follow, bus, parts, subjects.DEVICES_BUCKET, (parts.writer, views.devices))
    await group.start(_follow, bus, parts, subjects.ALLOC_BUCKET, (views.ledger,))
    await group.start(_follow, bus, parts, subjects.STATE_BUCKET, (views.states,))
    reports = Reports(
        bus=bus, writer=parts.writer, publisher=publisher, metrics=metrics, quarantine=quarantine
    )
    letters = DeadLetters(bus=bus, publisher=publisher, metrics=metrics, quarantine=quarantine)
    group.start_soon(keep, "decisions", partial(views.follow_decisions, bus, publisher))
    group.start_soon(keep, "heartbeats", partial(views.follow_heartbeats, bus))
    idle = IdleWatch(
        bus=bus,
        history=parts.history,
        views=parts.views,
        after_s=settings.idle_after_s,
        replica=parts.replica,
        clock=context.clock,
        metrics=metrics,
        quarantine=quarantine,
    )
    group.start_soon(keep, "idle allocations", idle.run)
    group.start_soon(keep, "fleet", parts.fleet.run)
    group.start_soon(keep, "capacity", parts.fleet.measure_capacity)
    group.start_soon(keep, "reports", reports.run)
    group.start_soon(keep, "advisories", letters.run)
    rows = partial(
        follow_quarantine,
        bus,
        rows=parts.quarantined,
        observed=views.observed,
        clock=context.clock,
        metrics=metrics,
        quarantine=quarantine,
    )
    group.start_soon(keep, "quarantine", rows)
    admissions = partial(follow_admissions, bus, observed=views.observed, clock=context.clock)
    group.start_soon(keep, "admissions", admissions)


async def _follow(
    bus: Bus,
    parts: _Parts,
    name: str,
    readers: Sequence[Reader],
    *,
    task_status: TaskStatus[None],
) -> None:
    """Follow a bucket indefinitely; started once everything stored was read."""
    status = StartedOnce(task_status)
    following = partial(
        follow,
        NatsBucket(bus, name),
        readers,
        parts.metrics,
        parts.quarantine,
        task_status=status,
    )
    await parts.supervisor.keep(name, following, expected=(Unavailable,))


def _tls(settings: Settings) -> TlsFiles | None:
    """Return the certificate of the API; ``None``: it is served without."""
    if settings.proxy_ca_file and not (settings.tls_cert_file and settings.auth == "kubernetes"):
        raise SettingsInvalid(
            field="proxy_ca_file",
            problem="the proxy's certificate is checked by TLS, and its users by the API server",
            fix='set tls_cert_file, tls_key_file and auth = "kubernetes" too',
        )
    if not settings.tls_cert_file:
        return None
    return TlsFiles(
        settings.tls_cert_file,
        settings.tls_key_file,
        client_ca_file=settings.proxy_ca_file,
        is_client_optional=True,
    )


def _listeners(
    api: HttpApp, tls: TlsFiles | None, context: ServiceContext[Settings]
) -> list[Listener]:
    """Return the address of the API first, then that of the probes if it is another."""
    settings = context.settings
    host, port = settings.http_host, settings.http_port
    if settings.auth == "kubernetes":
        require_private(host=host, field="http_host", has_tls=tls is not None)
    if tls is None:
        return [Listener(app=api, host=host, port=port)]
    pages = context.settings_file.routes()
    probes = HttpApp(pages, registry=context.registry, ready=api.is_ready)
    return [
        Listener(app=api, host=settings.tls_host, port=settings.tls_port, tls=tls),
        Listener(app=probes, host=host, port=port),
    ]


def _routes(context: ServiceContext[Settings], parts: _Parts) -> Mapping[Route, Handler]:
    """Return the routes of the API."""
    described = openapi.encoded()

    async def openapi_document(request: Request) -> Response:
        del request
        return Response(body=described)

    settings = context.settings
    auth = None
    if settings.auth == "kubernetes":
        auth = KubeAuth(lambda: parts.kube, clock=context.clock)
    proxy = None
    if settings.proxy_ca_file:
        proxy = FrontProxy(
            names=settings.proxy_names,
            user_header=settings.proxy_user_header,
            group_header=settings.proxy_group_header,
        )
    gate = Gate(auth, proxy)
    gateway = Gateway(
        _scheduler(settings),
        places=Places(
            what="requests to the scheduler",
            setting="question_limit_per_caller",
            total=settings.question_limit,
            per_caller=settings.question_limit_per_caller,
        ),
        proxied=gate.proxied,
    )
    parts.api.ask_scheduler = gateway.forward
    cordons = CordonApi(
        projection=parts.views.projection,
        connect_as=lambda token: kubeio.connect_as(
            token, settings.kubeconfig, user_agent="hami-console"
        ),
        own=lambda: parts.kube,
        is_open=settings.auth == "none",
        clock=context.clock,
    )
    return {
        **gate.guarded(
            {
                **parts.api.routes(),
                **routes_of(historyapi.OPERATIONS, parts.history_api, parts.views),
                **routes_of(meteringapi.OPERATIONS, parts.metering_api, parts.views),
                **routes_of(skuapi.OPERATIONS, SkuApi(parts.skus), parts.views),
                **routes_of(regions.OPERATIONS, parts.regions, parts.views),
            }
        ),
        **gateway.guarded(gate),
        **cordons.guarded(gate),
        **Sessions(gate).routes(),
        ("GET", "/openapi.json"): openapi_document,
    }


def _scheduler(settings: Settings) -> SchedulerAddress:
    """Return the scheduler's address."""
    return SchedulerAddress(
        url=settings.scheduler_url,
        ca_file=settings.scheduler_ca_file,
        cert_file=settings.scheduler_cert_file,
        key_file=settings.scheduler_key_file,
        timeout_s=settings.scheduler_timeout_s,
    )


async def _watch_certificate(tls: TlsFiles) -> None:
    await tls.watch(interval_s=2.0)


async def _start_authenticator(
    group: TaskGroup, context: ServiceContext[Settings], bus: Bus, parts: _Parts
) -> None:
    settings = context.settings

    async def make_consumer(name: str) -> None:
        await ensure_consumer(
            bus,
            subjects.EVENTS_STREAM,
            durable=name,
            filter_subject=f"{subjects.EVENT_PREFIX}.>",
        )

    authenticator = Authenticator(
        issuer=_issuer(settings.bus_issuer_seed_file),
        auth=KubeAuth(lambda: parts.kube, clock=context.clock, audiences=(settings.bus_audience,)),
        agents=frozenset(_account(text) for text in settings.bus_agents),
        make_consumer=make_consumer,
        login_s=settings.bus_login_s,
        clock=context.clock,
        metrics=parts.metrics,
        quarantine=parts.quarantine,
    )
    group.start_soon(_authenticate, authenticator, parts.supervisor, settings)


async def _authenticate(
    authenticator: Authenticator, supervisor: Supervisor, settings: Settings
) -> None:
    """Answer the servers' authentication requests indefinitely, on a connection of that account."""
    while True:
        try:
            async with connect(
                settings.nats_urls,
                name="hami-authenticator",
                login=NatsLogin(seed_file=settings.bus_authenticator_seed_file),
                ca_file=settings.nats_ca_file,
                start_timeout_s=settings.start_timeout_s,
                request_timeout_s=settings.bus_timeout_s,
            ) as bus:
                await supervisor.keep("logins", partial(authenticator.run, bus))
        except Unavailable as error:
            _log.warning("bus unreachable, no caller is admitted", extra={"problem": str(error)})


def _issuer(path: str) -> NKey:
    try:
        key = NKey.from_seed(Path(path).read_text(encoding="ascii"))
        if key.kind == "account":
            return key
        problem = f"is the seed of a {key.kind}"
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror or "not readable" if isinstance(error, OSError) else "is not ASCII"
    except WireInvalid as error:
        problem = error.problem
    raise SettingsInvalid(
        field="bus_issuer_seed_file",
        problem=f"{path}: {problem}",
        fix="give the seed of an account (SA…), as made by: hamictl bootstrap",
    )


def _account(text: str) -> tuple[str, str]:
    namespace, separator, name = text.partition("/")
    if not separator or not name or "/" in name:
        raise SettingsInvalid(
            field="bus_agents",
            problem=f"{text!r} is not namespace/name",
            fix="write namespace/name",
        )
    return namespace, name


async def _write(writer: CanonicalWriter, settings: Settings) -> None:
    await writer.run(resync_s=settings.resync_s, retry_s=settings.retry_s)


async def _with_kube(parts: _Parts, settings: Settings) -> None:
    """Follow the nodes, however long the API server takes to answer the first time."""
    while True:
        try:
            async with kubeio.connect(
                settings.kubeconfig,
                user_agent="hami-registry",
                start_timeout_s=settings.start_timeout_s,
            ) as api:
                parts.kube = api
                if settings.watch_nodes:
                    await Cordons(parts.writer, parts.quarantine).run(api)
                await anyio.sleep_forever()
        except Unavailable as error:
            _log.warning(
                "Kubernetes not reached, cordons stand still", extra={"problem": str(error)}
            )
        finally:
            parts.kube = None
