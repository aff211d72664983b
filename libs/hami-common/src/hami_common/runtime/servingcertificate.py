# SPDX-License-Identifier: Apache-2.0
"""Serving certificate: loads it at start, reloads changed files, measures its expiry.

New handshakes use the new pair, open connections continue. An invalid pair leaves the old one in
place, is logged and counted, and is retried when the files change. Times in seconds.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import anyio
from cryptography import x509
from prometheus_client import Counter, Gauge

from hami_common.errors import SettingsInvalid
from hami_common.runtime.httpd import TlsFiles

_log = logging.getLogger(__name__)


class CertificateMetrics(Protocol):
    """Metrics of a certificate; a service's may include them."""

    certificate_not_after: Gauge
    """Unix time at which it expires."""
    certificate_reloads: Counter
    """Reloads by label ``outcome``: ``ok``, ``failed``."""


class ServingCertificate:
    """The pair of files behind ``tls``, watched."""

    def __init__(
        self,
        cert_file: str,
        key_file: str,
        *,
        metrics: CertificateMetrics,
        client_ca_file: str = "",
    ) -> None:
        """Load the files; ``SettingsInvalid`` when they are invalid.

        With ``client_ca_file``, callers without a certificate of that CA are refused.
        """
        self._cert_file = Path(cert_file)
        self._metrics = metrics
        self._reported = ""
        self.tls = TlsFiles(cert_file, key_file, client_ca_file=client_ca_file)
        self._measure()

    async def watch(self, *, interval_s: float) -> None:
        """Check the files every ``interval_s``, indefinitely."""
        while True:
            await anyio.sleep(interval_s)
            self.check()

    def check(self) -> None:
        """Reload the files if they changed."""
        try:
            changed = self.tls.reload_if_changed()
        except SettingsInvalid as error:
            problem = str(error)
            if problem != self._reported:
                self._metrics.certificate_reloads.labels(outcome="failed").inc()
                _log.error("certificate kept", extra={"problem": problem})
                self._reported = problem
            return
        if changed:
            self._reported = ""
            self._metrics.certificate_reloads.labels(outcome="ok").inc()
            self._measure()
            _log.info("certificate reloaded", extra={"cert_file": str(self._cert_file)})

    def _measure(self) -> None:
        try:
            certificate = x509.load_pem_x509_certificate(self._cert_file.read_bytes())
        except (OSError, ValueError) as error:
            _log.warning("certificate cannot be measured", extra={"problem": str(error)})
            return
        self._metrics.certificate_not_after.set(certificate.not_valid_after_utc.timestamp())


def common_name(certificate: Mapping[str, object]) -> str:
    """Return the common name in a verified certificate, as ``ssl`` reports it.

    Empty without one.
    """
    subject = certificate.get("subject")
    for part in subject if isinstance(subject, tuple) else ():
        for key, value in part:
            if key == "commonName":
                return str(value)
    return ""
