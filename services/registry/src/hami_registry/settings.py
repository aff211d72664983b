# SPDX-License-Identifier: Apache-2.0
"""Settings of the registry. Durations in seconds, with the suffix ``_s``.

Loaded from file, environment and flags by ``hami_common.runtime.settings``.
"""

from typing import ClassVar, Literal

from hami_common import namespaces
from hami_common.model.prices import Prices
from hami_common.runtime import gate
from hami_common.runtime.settings import ServiceSettings


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may set, beyond what all services share."""

    HOT: ClassVar[frozenset[str]] = ServiceSettings.HOT | {"prices"}
    device_config_file: str = ""
    """Device configuration, TOML when the name ends in ``.toml``, else YAML; empty: defaults."""
    skus_file: str = ""
    """Catalog of SKUs, TOML, the same as the webhook's; see docs/skus.md. Empty: there are none."""
    watch_nodes: bool = True
    """Watch Kubernetes nodes for ``hami.io/device-cordon``. Without it no API server is needed."""
    liveness_s: float = 15.0
    """Time for which an agent counts as alive after its last heartbeat."""
    resync_s: float = 60.0
    """Interval at which all published records are compared with their desired content."""
    bus_replicas: int = 1
    """Copies of each stream: 3 in production; a single server supports only 1."""
    bus_timeout_s: float = 2.0
    """Longest wait for one answer of the bus."""
    retry_s: float = 0.2
    """First pause before a failed operation is retried; grows to ten times this."""
    listener_queue_size: int = 1024
    """Changes waiting for one listener of ``/v1/watch``; a slower one is disconnected."""
    listener_limit: int = 256
    """Maximum concurrent listeners of ``/v1/watch`` and ``/v1/events``, and viewers of
    ``/v1/fleet/events``.
    """
    listener_limit_per_caller: int = 16
    """Maximum concurrent listeners of one caller: a user, all ServiceAccounts of one namespace, or
    an address where ``auth`` is ``none``.
    """
    listener_reserve: int = 32
    """Listeners of ``listener_limit`` that are reserved for callers that watch all namespaces."""
    fleet_queue_size: int = 32
    """Events waiting for one viewer of ``/v1/fleet/events``; a slower one is disconnected."""
    question_limit: int = 32
    """Maximum concurrent requests that query the agents of all nodes (usage, checks) or read the
    event stream (timeline, pressure, workloads), and as many that are forwarded to the scheduler.
    """
    question_limit_per_caller: int = 8
    """Maximum of them for one caller."""
    history_messages: int = 100_000
    """Events that one request may read; an answer that needs more is incomplete and states that."""
    history_mib: int = 256
    """Payloads of events that one request may read, MiB, likewise."""
    history_s: float = 5.0
    """Time that one request may read events, likewise."""
    auth: Literal["none", "kubernetes"] = "none"
    """``kubernetes``: callers of the API present a Kubernetes token and may read what the cluster's
    RBAC lets them read (docs/security.md); ``none``: any caller that reaches the port reads
    everything.
    """
    console_dir: str = ""
    """Directory of the built console, served under ``/console/``; empty: no console."""
    scheduler_url: str = ""
    """Address of the scheduler's API for the routes that are forwarded to it; empty: they answer
    503. Unless ``auth`` is ``none``, ``https://`` or on loopback.
    """
    scheduler_ca_file: str = ""
    """PEM bundle of the CA of that address; empty: the system's."""
    scheduler_cert_file: str = ""
    """Client certificate that is presented there, PEM; only needed with ``proxy_ca_file``."""
    scheduler_key_file: str = ""
    """Private key of that certificate, PEM, not encrypted."""
    scheduler_timeout_s: float = 60.0
    """Longest wait for an answer of the scheduler; a resize waits for the node."""
    tls_host: str = "127.0.0.1"
    """Address of the API's HTTPS server; ``0.0.0.0`` or ``::`` in a cluster."""
    tls_port: int = 9443
    """Port of that server; 0 lets the kernel choose."""
    tls_cert_file: str = ""
    """Certificate of that server, PEM.

    With it the API is served only there, and ``http_port`` serves probes and metrics. Replaced
    files are used within seconds.
    """
    tls_key_file: str = ""
    """Private key of the certificate, PEM, not encrypted."""
    proxy_ca_file: str = ""
    """CA of the client certificate of an authenticating proxy, PEM (docs/console.md).

    On connections with such a certificate the proxy names the caller in headers; other callers
    present tokens as before. Empty: no proxy. Needs ``auth = "kubernetes"`` and ``tls_cert_file``.
    """
    proxy_names: tuple[str, ...] = ()
    """Common names of that certificate; empty: all that the CA signed."""
    proxy_user_header: str = gate.USER_HEADER
    """Header with the name of the user."""
    proxy_group_header: str = gate.GROUP_HEADER
    """Header with a group of the user, once per group."""
    bus_issuer_seed_file: str = ""
    """Seed of the account key that signs logins to the bus (docs/security.md).

    Empty: the bus authenticates clients by itself and sends no requests to this service.
    """
    bus_authenticator_seed_file: str = ""
    """Seed of the user that receives the servers' authentication requests."""
    bus_audience: str = "hami-bus"
    """Audience of the tokens that are accepted there."""
    bus_agents: tuple[str, ...] = (f"{namespaces.AGENTS}/hami-nodeagent",)
    """ServiceAccounts of node agents, as ``namespace/name``."""
    bus_login_s: float = 3600.0
    """Maximum lifetime of a login to the bus; agents renew theirs well before."""
    region: str = ""
    """Name of this region, whose streams a hub copies (docs/regions.md); empty: no region."""
    regions: tuple[str, ...] = ()
    """Regions that this registry shows, as the registry of a hub."""
    regions_seed_file: str = ""
    """Seed of the login to the account of the copies (Secret ``hami-bus-regions``)."""
    region_stale_s: float = 5.0
    """A region without contact for this time is reported as stale."""
    leases_namespace: str = namespaces.SYSTEM
    """Namespace of the Leases that ``/v1/system`` lists."""
    replica: str = ""
    """Name under which this replica writes records; empty takes the host name."""
    idle_after_s: float = 1800.0
    """Time without any work on its devices after which an allocation is published as idle, see
    docs/usage.md; 0: never.
    """
    prices: Prices = Prices()
