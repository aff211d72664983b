# SPDX-License-Identifier: Apache-2.0
"""Settings of the webhook.

Durations in seconds, sizes in bytes or MiB, with suffixes such as ``_s``.

Loaded from file, environment and flags by ``hami_common.runtime.settings``.
"""

from typing import ClassVar

from hami_common.runtime.settings import ServiceSettings
from hami_webhook.core.mutate import AdmissionPolicy


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may set, beyond what all services share.

    ``http_host`` and ``http_port`` are the plain server for probes and metrics; admission is
    served on ``tls_host`` and ``tls_port`` only.
    """

    HOT: ClassVar[frozenset[str]] = ServiceSettings.HOT | {"policy"}

    tls_host: str = "127.0.0.1"
    """Address for the API server's calls; ``0.0.0.0`` or ``::`` in a cluster."""
    tls_port: int = 9443
    """0 lets the kernel choose; the choice is logged."""
    tls_cert_file: str = "/tls/tls.crt"
    """Serving certificate with its chain, PEM. Replaced files are used within ``tls_poll_s``."""
    tls_key_file: str = "/tls/tls.key"
    """Private key of the certificate, PEM, not encrypted."""
    tls_poll_s: float = 1.0
    """Interval at which the two files are polled."""

    client_ca_file: str = ""
    """CA of the client certificates that callers must present, PEM; empty: any caller is accepted.

    The API server presents one if its ``--admission-control-config-file`` names a kubeconfig for
    webhooks.
    """
    client_names: tuple[str, ...] = ()
    """Common names of certificates that are accepted with ``client_ca_file``.

    Empty: all that the CA signed.
    """
    source_cpu_share: float = 0.8
    """Fraction of one processor that calls from one address may use on average, where they present
    no certificate. Calls beyond it are answered with 429.
    """
    source_cpu_burst_s: float = 30.0
    """Processor time that an address may use in a burst, in seconds."""
    source_events_per_s: float = 200.0
    """Admission events per second that calls from one address may publish on average, where they
    present no certificate. More are dropped and counted.
    """
    source_events_burst: int = 2000
    """Events that an address may publish in a burst."""

    drain_s: float = 3.0
    """Time for which to serve on after SIGTERM, so that the API server's load balancing notices the
    failed readiness before connections are refused. Part of ``grace_s``.
    """

    policy: AdmissionPolicy = AdmissionPolicy()
    """Permissions of admission; see ``AdmissionPolicy``."""
    skus_file: str = ""
    """Catalog of SKUs, TOML; see docs/skus.md. Empty: there are none. A changed file is read within
    ``config_poll_s``; while it is invalid, the last valid one stays in force.
    """
    body_limit_bytes: int = 8 << 20
    """Largest review. A pod is at most 1.5 MiB in etcd and an update carries two of them."""

    event_queue_size: int = 1024
    """Admission events waiting for the bus. When full, new ones are dropped and counted: neither a
    slow nor an absent bus may delay an admission."""
    replica: str = ""
    """Name under which this replica publishes events; empty takes the host name."""
