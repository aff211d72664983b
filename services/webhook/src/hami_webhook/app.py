# SPDX-License-Identifier: Apache-2.0
"""Composition root of the webhook: certificate, two servers, the event queue; orders the shutdown.

The webhook has no state. It is ready once its certificate is loaded and it listens; the bus may be
unavailable, admission does not wait for it. At shutdown readiness fails first, and the webhook
serves on for ``drain_s``, until the API server sends no more requests.
"""

import logging
import secrets
import socket
from collections.abc import Sequence
from functools import partial
from typing import get_args

import anyio
from anyio.abc import TaskStatus
from msgspec import Struct

from hami_common.admission.configuration import mutate_path
from hami_common.bus import grants
from hami_common.dra.podclaims import AllocationMode
from hami_common.errors import Unavailable
from hami_common.runtime.httpd import HttpApp, serve
from hami_common.runtime.natsio import NatsLogin, NatsPublisher, connect
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.quarantinereport import QuarantineReporter
from hami_common.runtime.service import ServiceContext, run
from hami_common.runtime.servingcertificate import ServingCertificate
from hami_common.runtime.skufile import sku_file
from hami_common.runtime.supervise import Supervisor
from hami_common.runtime.tasks import background
from hami_common.vendors.catalog import Catalog
from hami_webhook.core.rates import SourceRates
from hami_webhook.settings import Settings
from hami_webhook.shell import render
from hami_webhook.shell.admission import Admission
from hami_webhook.shell.callers import Callers
from hami_webhook.shell.events import AdmissionEvents
from hami_webhook.shell.metrics import KINDS, Metrics

SERVICE = "webhook"
_FLUSH_S = 2.0

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the service, or print its configuration object; returns the exit code."""
    if render.FLAG in argv:
        return render.main(argv)
    return run(serve_webhook, service=SERVICE, settings_type=Settings, argv=argv)


class Ports(Struct, frozen=True, kw_only=True):
    """Ports on which the webhook listens."""

    tls: int
    plain: int


async def serve_webhook(
    context: ServiceContext[Settings],
    *,
    task_status: TaskStatus[Ports] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until ``context.stopping``; started once it is ready."""
    settings = context.settings
    metrics = Metrics(context.registry)
    quarantine = Quarantine(kinds=KINDS, clock=context.clock, registry=context.registry)
    supervisor = Supervisor(clock=context.clock, registry=context.registry)
    keep = supervisor.keep
    certificate = ServingCertificate(
        settings.tls_cert_file,
        settings.tls_key_file,
        metrics=metrics,
        client_ca_file=settings.client_ca_file,
    )
    replica = settings.replica or socket.gethostname()
    events = AdmissionEvents(
        source=f"/webhook/{replica}",
        limit=settings.event_queue_size,
        metrics=metrics,
        quarantine=quarantine,
    )
    catalog = Catalog.from_settings(settings.vendors)
    skus = sku_file(settings.skus_file, vendors=catalog, registry=context.registry)
    admission = Admission(
        catalog=catalog,
        skus=lambda: skus.value,
        policy=settings.policy,
        tracing=context.tracing,
        clock=context.clock,
        metrics=metrics,
        events=events,
        callers=Callers(
            clock=context.clock,
            metrics=metrics,
            names=settings.client_names,
            cpu=SourceRates(per_s=settings.source_cpu_share, burst=settings.source_cpu_burst_s),
            events=SourceRates(
                per_s=settings.source_events_per_s, burst=settings.source_events_burst
            ),
        ),
    )
    context.settings_file.use = lambda changed: admission.use(changed.policy)
    app = HttpApp(
        {
            ("POST", "/webhook"): admission.mutate,
            ("POST", "/mutate"): admission.mutate,
            **{
                ("POST", mutate_path(mode)): partial(admission.mutate, namespace_mode=mode)
                for mode in get_args(AllocationMode)
            },
            ("POST", "/validate"): admission.validate,
        },
        registry=context.registry,
        ready=lambda: context.ready.is_set,
        body_limit=settings.body_limit_bytes,
    )
    probes = HttpApp(
        context.settings_file.routes(),
        registry=context.registry,
        ready=lambda: context.ready.is_set,
    )
    grace_s = settings.grace_s
    delivered = anyio.Event()
    try:
        async with background() as group:
            group.start_soon(keep, "retries", quarantine.retry)
            watch_skus = partial(skus.watch, context.clock, context.settings_file.poll_s)
            group.start_soon(keep, "catalog of SKUs", watch_skus)
            delivery = _Delivery(
                events=events,
                quarantine=quarantine,
                supervisor=supervisor,
                context=context,
                metrics=metrics,
                replica=replica,
            )
            deliver = partial(_deliver, delivery, delivered)
            group.start_soon(keep, "events", deliver)
            async with background() as servers:
                watch = partial(_watch_certificate, certificate, settings.tls_poll_s)
                servers.start_soon(keep, "certificate", watch)
                tls = (settings.tls_host, settings.tls_port, certificate.tls, grace_s)
                tls_port = await servers.start(serve, app, *tls)
                plain = (settings.http_host, settings.http_port, None, grace_s)
                plain_port = await servers.start(serve, probes, *plain)
                context.ready.set()
                task_status.started(Ports(tls=tls_port, plain=plain_port))
                await context.stopping.wait()
                await anyio.sleep(settings.drain_s)
            events.end()
            with anyio.move_on_after(_FLUSH_S):
                await delivered.wait()
    finally:
        events.close()


async def _watch_certificate(certificate: ServingCertificate, interval_s: float) -> None:
    await certificate.watch(interval_s=interval_s)


class _Delivery(Struct, frozen=True, kw_only=True):
    """Publishers to the bus."""

    events: AdmissionEvents
    quarantine: Quarantine
    supervisor: Supervisor
    context: ServiceContext[Settings]
    metrics: Metrics
    replica: str

    def reporter(self, publisher: NatsPublisher) -> QuarantineReporter:
        """Report the objects in quarantine here."""
        return QuarantineReporter(
            self.quarantine,
            publisher=publisher,
            clock=self.context.clock,
            service="webhook",
            replica=self.replica,
            ids=lambda: secrets.token_hex(16),
        )


async def _deliver(delivery: _Delivery, delivered: anyio.Event) -> None:
    """Publish queued events to the bus; without any address the queue is closed."""
    settings, events = delivery.context.settings, delivery.events
    if not settings.nats_urls:
        events.close()
        delivered.set()
        return
    while True:
        try:
            async with (
                connect(
                    settings.nats_urls,
                    name="hami-webhook",
                    login=NatsLogin.of(settings, inbox=grants.inbox("webhook")),
                    ca_file=settings.nats_ca_file,
                    start_timeout_s=settings.start_timeout_s,
                ) as bus,
                background() as group,
            ):
                delivery.metrics.bus_connected.set_function(lambda: float(bus.is_connected))
                publisher = NatsPublisher(bus)
                keep, reporter = delivery.supervisor.keep, delivery.reporter(publisher)
                group.start_soon(keep, "quarantine reports", reporter.work)
                await events.run(publisher)
                delivered.set()
                return
        except Unavailable as error:
            _log.warning("bus not reached, admission goes on", extra={"problem": str(error)})
