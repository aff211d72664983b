# SPDX-License-Identifier: Apache-2.0
"""Decides at which addresses the scheduler serves, and which protection each route has there.

The extender has one address, the probes may have another; bind admission, Volcano and ``/v1/`` for
other pods have their own where the settings enable them. Routes and handlers are added once the
scheduler is assembled; what they answer is not known here.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from msgspec import Struct

from hami_common.ports import Clock, KubeApi
from hami_common.roles import Route
from hami_common.runtime import gate, httpd
from hami_common.runtime.kubeauth import KubeAuth
from hami_common.runtime.service import ServiceContext
from hami_common.runtime.servingcertificate import ServingCertificate
from hami_scheduler.settings import ApiSettings, Settings
from hami_scheduler.shell.metrics import CertificateMetrics


def extender_and_probes(
    context: ServiceContext[Settings], is_ready: Callable[[], bool]
) -> list[httpd.Listener]:
    """Return the address of the extender, then that of the probes if the settings name one."""
    settings = context.settings
    if settings.auth == "kubernetes":
        gate.require_private(host=settings.http_host, field="http_host", has_tls=False)
    addresses = [(settings.http_host, settings.http_port)]
    if settings.probe_host:
        addresses.append((settings.probe_host, settings.probe_port))
    return [
        httpd.Listener(
            app=httpd.HttpApp(
                context.settings_file.routes(),
                registry=context.registry,
                ready=is_ready,
                body_limit=settings.body_limit_bytes,
                is_complete=False,
            ),
            host=host,
            port=port,
        )
        for host, port in addresses
    ]


class Admission(Struct, frozen=True, kw_only=True):
    """Listener of bind admission, and what keeps its certificate up to date."""

    listener: httpd.Listener
    watch: Callable[[], Awaitable[None]]


def bind_admission(
    context: ServiceContext[Settings], is_ready: Callable[[], bool]
) -> Admission | None:
    """Return the address at which the API server posts Bindings; ``None`` if it does not."""
    settings = context.settings.bind_admission
    if not settings.enabled:
        return None
    certificate = ServingCertificate(
        settings.tls_cert_file,
        settings.tls_key_file,
        metrics=CertificateMetrics(context.registry),
        client_ca_file=settings.client_ca_file,
    )
    app = httpd.HttpApp({}, registry=context.registry, ready=is_ready, is_complete=False)
    return Admission(
        listener=httpd.Listener(
            app=app, host=settings.host, port=settings.port, tls=certificate.tls
        ),
        watch=partial(certificate.watch, interval_s=settings.tls_poll_s),
    )


def volcano(
    context: ServiceContext[Settings], is_ready: Callable[[], bool]
) -> list[httpd.Listener]:
    """Return the address at which Volcano calls, if it does."""
    settings = context.settings
    options = settings.volcano_extender
    if not options.enabled:
        return []
    app = httpd.HttpApp(
        {},
        registry=context.registry,
        ready=is_ready,
        body_limit=settings.body_limit_bytes,
        is_complete=False,
    )
    return [httpd.Listener(app=app, host=options.host, port=options.port)]


def api(context: ServiceContext[Settings], is_ready: Callable[[], bool]) -> list[httpd.Listener]:
    """Return the address of ``/v1/`` for other pods, if there is one."""
    options = context.settings.api
    if not options.enabled:
        return []
    app = httpd.HttpApp(
        {},
        registry=context.registry,
        ready=is_ready,
        body_limit=context.settings.body_limit_bytes,
        is_complete=False,
    )
    tls = httpd.TlsFiles(
        options.tls_cert_file,
        options.tls_key_file,
        client_ca_file=options.proxy_ca_file,
        is_client_optional=True,
    )
    return [httpd.Listener(app=app, host=options.host, port=options.port, tls=tls)]


def _own(routes: Mapping[Route, httpd.Handler]) -> dict[Route, httpd.Handler]:
    """Return the routes that are none of the extender's."""
    return {route: one for route, one in routes.items() if route[1].startswith("/v1/")}


def own_guarded(
    routes: Mapping[Route, httpd.Handler], options: ApiSettings, kube: KubeApi, clock: Clock
) -> dict[Route, httpd.Handler]:
    """Return the routes ``/v1/`` as other pods reach them."""
    proxy = gate.FrontProxy(names=options.proxy_names) if options.proxy_ca_file else None
    auth = KubeAuth(lambda: kube, clock=clock)
    return gate.Gate(auth, proxy).guarded(_own(routes))


def guarded(
    routes: Mapping[Route, httpd.Handler], settings: Settings, kube: KubeApi, clock: Clock
) -> dict[Route, httpd.Handler]:
    """Return the routes with the protection of the settings.

    The extender's depend on the address.
    """
    auth = None if settings.auth == "none" else KubeAuth(lambda: kube, clock=clock)
    return {**routes, **gate.Gate(auth).guarded(_own(routes))}
