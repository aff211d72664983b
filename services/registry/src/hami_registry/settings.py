# SPDX-License-Identifier: Apache-2.0
"""Settings of the registry. Durations in seconds, as each name says.

Loaded from file, environment and flags by ``hami_common.runtime.settings``.
"""

from typing import Literal

from hami_common import namespaces
from hami_common.runtime.settings import ServiceSettings


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may set, beyond what all services share."""

    device_config_file: str = ""
    """Device configuration, TOML when the name ends in ``.toml``, else YAML; empty: defaults."""
    device_config_poll_s: float = 1.0
    """How often that file is looked at."""
    watch_nodes: bool = True
    """Watch Kubernetes nodes for ``hami.io/device-cordon``. Without it no API server is needed."""
    liveness_s: float = 15.0
    """An agent counts as alive this long after its last heartbeat."""
    resync_s: float = 60.0
    """How often everything published is compared with what it should be."""
    bus_replicas: int = 1
    """Copies of each stream: 3 in production; a single server has room for 1."""
    bus_timeout_s: float = 2.0
    """Longest wait for one answer of the bus."""
    retry_s: float = 0.2
    """First pause before something that failed is tried again; grows to ten times this."""
    listener_queue_size: int = 1024
    """Changes waiting for one listener of ``/v1/watch``; a slower one is told and let go."""
    listener_limit: int = 256
    """Most listeners at a time."""
    listener_limit_per_caller: int = 16
    """Most listeners at a time of one caller: a user, all ServiceAccounts of one namespace, or an
    address where ``auth`` is ``none``."""
    listener_reserve: int = 32
    """Listeners of ``listener_limit`` that only those get who watch all namespaces."""
    question_limit: int = 32
    """Most requests at a time that are put to the agents of all nodes (usage, checks)."""
    question_limit_per_caller: int = 8
    """Most of them of one caller."""
    auth: Literal["none", "kubernetes"] = "none"
    """``kubernetes``: callers of the API show a Kubernetes token and read what the cluster lets
    them read (docs/security.md); ``none``: whoever reaches the port reads everything."""
    tls_host: str = "127.0.0.1"
    """Address of the API's HTTPS server; ``0.0.0.0`` or ``::`` in a cluster."""
    tls_port: int = 9443
    """Its port; 0 lets the kernel choose."""
    tls_cert_file: str = ""
    """Its certificate, PEM. With it the API is served there alone, and ``http_port`` has probes and
    metrics. Replaced files are used within seconds."""
    tls_key_file: str = ""
    """Private key of the certificate, PEM, not encrypted."""
    bus_issuer_seed_file: str = ""
    """Seed of the account key that signs logins to the bus (docs/security.md); empty: the bus
    admits by itself and this service is not asked."""
    bus_authenticator_seed_file: str = ""
    """Seed of the user under which the servers' questions are heard."""
    bus_audience: str = "hami-bus"
    """Audience of the tokens that are accepted there."""
    bus_agents: tuple[str, ...] = (f"{namespaces.AGENTS}/hami-nodeagent",)
    """ServiceAccounts of node agents, as ``namespace/name``."""
    bus_login_s: float = 3600.0
    """Longest time that a login to the bus holds; agents renew theirs well before."""
    replica: str = ""
    """Name under which this replica writes records; empty takes the host name."""
