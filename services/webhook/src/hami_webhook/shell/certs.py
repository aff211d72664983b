# SPDX-License-Identifier: Apache-2.0
"""Serving certificate: loads it at start, reloads changed files, measures its expiry.

New handshakes use the new pair, open connections continue. An invalid pair leaves the old one in
place, is logged and counted, and is retried when the files change. Times in seconds.
"""

import logging
from pathlib import Path

import anyio
from cryptography import x509

from hami_common.errors import SettingsInvalid
from hami_common.runtime.httpd import TlsFiles
from hami_webhook.shell.metrics import Metrics

_log = logging.getLogger(__name__)


class ServingCertificate:
    """The pair of files behind ``tls``, watched."""

    def __init__(
        self, cert_file: str, key_file: str, *, metrics: Metrics, client_ca_file: str = ""
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
