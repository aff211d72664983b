# SPDX-License-Identifier: Apache-2.0
"""Distinguishes the API server from other callers, and bounds the use of each of the others.

With a client certificate the caller is the API server, and its use is not bounded. Without one the
caller is unknown: the source is then its address, which may use a share of the processor's time and
publish a rate of events. Each address leaves the others their share.
"""

import logging
from collections.abc import Collection

from hami_common.ports import Clock
from hami_common.runtime.httpd import Request, Response, error_response
from hami_common.runtime.servingcertificate import common_name
from hami_webhook.core.rates import SourceRates
from hami_webhook.shell.metrics import Metrics

API_SERVER = "kube-apiserver"
"""Source of callers with a verified client certificate."""

_log = logging.getLogger(__name__)


class Callers:
    """All callers of the webhook."""

    def __init__(
        self,
        *,
        clock: Clock,
        metrics: Metrics,
        cpu: SourceRates,
        events: SourceRates,
        names: Collection[str] = (),
    ) -> None:
        """Accept callers whose certificate has one of ``names``; empty: any verified one.

        ``cpu`` bounds a source's seconds of processor time, ``events`` its admission events.
        """
        self._clock = clock
        self._metrics = metrics
        self._cpu = cpu
        self._events = events
        self._names = frozenset(names)

    def identify(self, request: Request) -> tuple[str, Response | None]:
        """Return the source of a call, and the response to a refused one."""
        certificate = request.peer_certificate
        if certificate:
            name = common_name(certificate)
            if not self._names or name in self._names:
                return API_SERVER, None
            self._metrics.callers_refused.labels(cause="name").inc()
            _log.warning("caller refused", extra={"common_name": name, "address": request.remote})
            message = (
                f"client certificate of {name!r}: the name is not among the setting client_names; "
                "add it if it is the API server's"
            )
            return name, error_response(status=403, code="denied", message=message)
        if self._cpu.may_spend(request.remote, now_s=self._clock.monotonic_s()):
            return request.remote, None
        self._metrics.callers_refused.labels(cause="rate").inc()
        message = (
            f"{request.remote} has used its share of the webhook's processor time: wait, or raise "
            "the setting source_cpu_share"
        )
        return request.remote, error_response(status=429, code="too-many-requests", message=message)

    def charge(self, source: str, cpu_s: float) -> None:
        """Charge processor time of a call to its source."""
        if source != API_SERVER:
            self._cpu.spend(source, cpu_s, now_s=self._clock.monotonic_s())

    def may_publish(self, source: str) -> bool:
        """Return whether one more event of this source may be published; counts it either way."""
        if source == API_SERVER:
            return True
        now_s = self._clock.monotonic_s()
        if self._events.may_spend(source, now_s=now_s):
            self._events.spend(source, 1.0, now_s=now_s)
            return True
        self._metrics.events_dropped.labels(cause="rate").inc()
        return False
