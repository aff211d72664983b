# SPDX-License-Identifier: Apache-2.0
"""Composition root of the registry: bus, read models, canonical writer, API; orders start and stop.

Start: declare the streams, read the buckets to their ends, settle the configuration's generation,
then take reports and serve. The registry keeps nothing of its own: killed at any point, another
start reads buckets, reports and configuration and goes on. Without an API server only cordons
stand still; without the registry scheduling goes on with what it published last (design D19).
"""

import logging
import socket
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import anyio
from anyio.abc import TaskGroup, TaskStatus

from hami_common import grants, subjects
from hami_common.errors import SettingsInvalid, Unavailable, WireInvalid
from hami_common.nkeys import NKey
from hami_common.ports import KubeApi
from hami_common.runtime import kubeio
from hami_common.runtime.gate import Gate, require_private
from hami_common.runtime.httpd import HttpApp, Request, Response, TlsFiles, serve
from hami_common.runtime.kubeauth import KubeAuth
from hami_common.runtime.natsio import (
    Bus,
    BusLimits,
    NatsBucket,
    NatsLogin,
    NatsPublisher,
    connect,
    ensure_consumer,
    keep_bus,
    serve_records,
)
from hami_common.runtime.service import ServiceContext, run
from hami_common.runtime.tasks import background
from hami_registry.core.device_config import DeviceConfig
from hami_registry.core.inventory import Inventory
from hami_registry.core.projection import Projection
from hami_registry.settings import Settings
from hami_registry.shell import openapi
from hami_registry.shell.agents import Agents
from hami_registry.shell.api import RULES, Api
from hami_registry.shell.authenticator import Authenticator
from hami_registry.shell.canonical import CanonicalWriter
from hami_registry.shell.config_file import ConfigFile
from hami_registry.shell.cordons import Cordons
from hami_registry.shell.deadletters import DeadLetters
from hami_registry.shell.follow import follow
from hami_registry.shell.metrics import Metrics
from hami_registry.shell.reports import Reports
from hami_registry.shell.views import Views

SERVICE = "registry"
REST_S = 0.05
"""How long the bus is not listened to, after it was, while nobody waits for an answer from it."""

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the service; returns the exit code."""
    return run(serve_registry, service=SERVICE, settings_type=Settings, argv=argv)


class _Parts:
    """What the tasks share."""

    def __init__(self, context: ServiceContext[Settings], bus: Bus) -> None:
        settings = context.settings
        replica = settings.replica or socket.gethostname()
        self.metrics = Metrics(context.registry)
        self.kube: KubeApi | None = None
        """Set while the API server is connected."""
        self.config_file = ConfigFile(settings.device_config_file, metrics=self.metrics)
        self.writer = CanonicalWriter(
            inventory=Inventory(self.config_file.load()),
            bucket=NatsBucket(bus, subjects.DEVICES_BUCKET),
            clock=context.clock,
            metrics=self.metrics,
            source=f"/registry/{replica}",
            keep_cordons=settings.watch_nodes,
        )
        self.views = Views(
            projection=Projection(liveness_s=settings.liveness_s),
            clock=context.clock,
            metrics=self.metrics,
            queue_size=settings.listener_queue_size,
            limit=settings.listener_limit,
        )
        self.api = Api(
            views=self.views,
            writer=self.writer,
            config_file=self.config_file,
            agents=Agents(
                ask=partial(_ask, bus), clock=context.clock, version=version("hami-registry")
            ),
            clock=context.clock,
        )


async def serve_registry(
    context: ServiceContext[Settings],
    *,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until ``context.stopping``; started, with its port, once it is ready."""
    settings = context.settings
    async with connect(
        settings.nats_urls,
        name="hami-registry",
        login=NatsLogin.of(settings, inbox=grants.inbox("registry")),
        ca_file=settings.nats_ca_file,
        start_timeout_s=settings.start_timeout_s,
        request_timeout_s=settings.bus_timeout_s,
        rest_s=REST_S,
    ) as bus:
        parts = _Parts(context, bus)
        async with background() as group:
            await _start_following(group, context, bus, parts)
            group.start_soon(serve_records, bus)
            if settings.bus_issuer_seed_file:
                await _start_authenticator(group, context, bus, parts)
            group.start_soon(_write, parts.writer, settings)
            group.start_soon(_watch_config, parts, settings)
            if settings.watch_nodes or settings.bus_issuer_seed_file or settings.auth != "none":
                group.start_soon(_with_kube, parts, settings)
            async with background() as servers:
                port = await _start_servers(servers, context, parts)
                context.ready.set()
                task_status.started(port)
                await context.stopping.wait()
                parts.views.close_listeners()


async def _ask(bus: Bus, subject: str) -> bytes:
    """An answer to a question on the bus."""
    return (await bus.request(subject)).data


async def _start_following(
    group: TaskGroup, context: ServiceContext[Settings], bus: Bus, parts: _Parts
) -> None:
    settings = context.settings
    limits = BusLimits(replicas=settings.bus_replicas)
    await group.start(keep_bus, bus, limits, settings.start_timeout_s)
    views, metrics = parts.views, parts.metrics
    devices = NatsBucket(bus, subjects.DEVICES_BUCKET)
    await group.start(follow, devices, (parts.writer, views.devices), metrics)
    await group.start(follow, NatsBucket(bus, subjects.ALLOC_BUCKET), (views.ledger,), metrics)
    await group.start(follow, NatsBucket(bus, subjects.STATE_BUCKET), (views.states,), metrics)
    publisher = NatsPublisher(bus)
    group.start_soon(views.follow_decisions, bus, publisher)
    group.start_soon(views.follow_heartbeats, bus)
    reports = Reports(bus=bus, writer=parts.writer, publisher=publisher, metrics=metrics)
    group.start_soon(reports.run)
    group.start_soon(DeadLetters(bus=bus, publisher=publisher, metrics=metrics).run)


async def _start_servers(
    servers: TaskGroup, context: ServiceContext[Settings], parts: _Parts
) -> int:
    """Serve API, probes and metrics; the port of the API."""
    settings = context.settings
    described = openapi.encoded()

    async def openapi_document(request: Request) -> Response:
        del request
        return Response(body=described)

    auth = None
    if settings.auth == "kubernetes":
        has_tls = bool(settings.tls_cert_file)
        require_private(host=settings.http_host, field="http_host", has_tls=has_tls)
        auth = KubeAuth(lambda: parts.kube, clock=context.clock)
    pages = context.settings_file.routes()
    api = HttpApp(
        {
            **pages,
            **Gate(auth).guarded(parts.api.routes(), RULES),
            ("GET", "/openapi.json"): openapi_document,
        },
        registry=context.registry,
        ready=lambda: context.ready.is_set,
    )
    plain = (settings.http_host, settings.http_port, None, settings.grace_s)
    if not settings.tls_cert_file:
        return int(await servers.start(serve, api, *plain))
    tls = TlsFiles(settings.tls_cert_file, settings.tls_key_file)
    servers.start_soon(_watch_certificate, tls)
    encrypted = (settings.tls_host, settings.tls_port, tls, settings.grace_s)
    port = int(await servers.start(serve, api, *encrypted))
    probes = HttpApp(pages, registry=context.registry, ready=api.is_ready)
    await servers.start(serve, probes, *plain)
    return port


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
    )
    group.start_soon(_authenticate, authenticator, settings)


async def _authenticate(authenticator: Authenticator, settings: Settings) -> None:
    """Hear the servers' questions for ever, on a connection of the account for that."""
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
                await authenticator.run(bus)
        except Unavailable as error:
            _log.warning("bus not reached, nobody is admitted", extra={"problem": str(error)})


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


async def _watch_config(parts: _Parts, settings: Settings) -> None:
    def use(config: DeviceConfig) -> None:
        parts.writer.use_config(config, parts.views.projection.holdings())

    await parts.config_file.watch(use, interval_s=settings.device_config_poll_s)


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
                    await Cordons(parts.writer).run(api)
                await anyio.sleep_forever()
        except Unavailable as error:
            parts.kube = None
            _log.warning(
                "Kubernetes not reached, cordons stand still", extra={"problem": str(error)}
            )
