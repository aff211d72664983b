# SPDX-License-Identifier: Apache-2.0
"""Settings of one simulated API server. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from hami_common.namespaces import AGENTS, SYSTEM
from hami_common.runtime.clock import SystemClock
from hami_sim.apiserver.auth import Authorizer, User, allow_all
from hami_sim.apiserver.resources import RESOURCES, Resource


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the server: listening address, users, and length of its history."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the kernel choose; `ApiServer.url` contains the port."""
    tls: bool = False
    """Serve HTTPS with a certificate from an own CA, which goes into the kubeconfig."""
    tokens: Mapping[str, User] = {}
    """Bearer tokens known besides the generated admin token (`ApiServer.token`)."""
    admin_token: str = ""
    """The admin's token; empty generates one. Set it where it must survive a restart."""
    anonymous: bool = False
    """Accept requests without a token as system:anonymous instead of answering 401."""
    open_http: bool = True
    """Treat plain HTTP without a token as admin: kubectl sends no token without TLS."""
    authorize: Authorizer = allow_all
    services: Mapping[tuple[str, str], str] = {}
    """(namespace, service name) → `host:port`, for webhooks registered by service."""
    namespaces: tuple[str, ...] = (
        "default",
        "kube-system",
        "kube-public",
        SYSTEM,
        AGENTS,
    )
    """Namespaces that exist from the start."""
    data: Path | None = None
    """Journal file; with it, state survives a restart of the process."""
    controllers: bool = True
    """Run the garbage, namespace, disruption and quota controllers."""
    service_account_volume: bool = False
    """Add the projected kube-api-access volume to pods, as a real server does."""
    default_tolerations: bool = True
    """Add the not-ready and unreachable tolerations of 300 s to pods."""
    binding_labels: bool = False
    """Copy a Binding's labels to the pod (PodTopologyLabelsAdmission, off in 1.34)."""
    history_window: int = 20_000
    """Changes kept per resource; older watches get 410 Gone."""
    watch_limit: int = 50_000
    """Undelivered changes after which a slow watch is cut off."""
    bookmark_interval_s: float = 60.0
    max_watch_s: float = 1800.0
    """Length of a watch that does not ask for another."""
    max_body_bytes: int = 3 * 1024 * 1024
    resources: tuple[Resource, ...] = RESOURCES
    clock: Callable[[], float] = SystemClock().now_s
    """Seconds since the epoch."""
