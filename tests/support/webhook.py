# SPDX-License-Identifier: Apache-2.0
"""Runs the real webhook service inside a test, over TLS on ports of the kernel's choice."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from hami_common.runtime.service import ServiceContext
from hami_sim.certs import CertificateAuthority
from hami_webhook.app import Ports, serve_webhook
from hami_webhook.settings import Settings

HOST = "127.0.0.1"


class RunningWebhook:
    """One service with its certificate files."""

    def __init__(
        self, context: ServiceContext[Settings], ports: Ports, trusted: ssl.SSLContext
    ) -> None:
        self.context = context
        self.ports = ports
        self.trusted = trusted

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.ports.tls}"

    @property
    def plain_url(self) -> str:
        return f"http://{HOST}:{self.ports.plain}"

    def sample(self, name: str, **labels: str) -> float:
        return self.context.registry.get_sample_value(name, labels) or 0.0

    def session(self, *, reuse: bool = True) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=self.trusted, force_close=not reuse)
        return aiohttp.ClientSession(connector=connector)


@asynccontextmanager
async def run_webhook(
    directory: Path, authority: CertificateAuthority, **settings: Any
) -> AsyncIterator[RunningWebhook]:
    """The service for the time of the block; ``directory`` gets the certificate files."""
    certificate, key, _ = authority.issue_files(directory, [HOST])
    chosen = {
        "nats_urls": [],
        "tls_port": 0,
        "tls_cert_file": str(certificate),
        "tls_key_file": str(key),
        "tls_poll_s": 0.02,
        "drain_s": 0.0,
        "grace_s": 5.0,
        **settings,
    }
    context = ServiceContext(service="webhook", settings=Settings(**chosen))
    trusted = ssl.create_default_context(cadata=authority.pem.decode())
    try:
        async with anyio.create_task_group() as group:
            ports = await group.start(serve_webhook, context)
            yield RunningWebhook(context, ports, trusted)
            context.stop()
    finally:
        context.tracing.close()
