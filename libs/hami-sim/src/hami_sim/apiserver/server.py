# SPDX-License-Identifier: Apache-2.0
"""The running server: store, routes, controllers and an HTTP listener under one task group."""

from __future__ import annotations

import base64
import secrets
import ssl
import tempfile
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio
import msgspec
from aiohttp import web
from anyio.abc import TaskGroup

from hami_sim.apiserver.admission import Webhooks
from hami_sim.apiserver.auth import AuditEntry, User, admin
from hami_sim.apiserver.controllers import Controllers
from hami_sim.apiserver.discovery import Discovery
from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.faults import Faults, Match
from hami_sim.apiserver.journal import Journal
from hami_sim.apiserver.kinds import SYSTEM_PRIORITIES, rules_for
from hami_sim.apiserver.operations import Operations
from hami_sim.apiserver.resources import Resource, ResourceTable
from hami_sim.apiserver.routes import Routes
from hami_sim.apiserver.settings import Settings
from hami_sim.apiserver.state import State
from hami_sim.apiserver.store import Store
from hami_sim.apiserver.subresources import Tokens
from hami_sim.certs import CertificateAuthority

_AUDIT_KEPT: Final = 200_000
_SHUTDOWN_S: Final = 1.0


class ApiServer:
    """A simulated API server; use it as an async context manager."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.table = ResourceTable(self.settings.resources)
        self.store = Store(
            self.table,
            window=self.settings.history_window,
            watch_limit=self.settings.watch_limit,
        )
        self.token = self.settings.admin_token or secrets.token_urlsafe(24)
        users: dict[str, User] = {self.token: admin(), **self.settings.tokens}
        self.tokens = Tokens(users)
        self.faults = Faults()
        self.audit: deque[AuditEntry] = deque(maxlen=_AUDIT_KEPT)
        self.webhooks = Webhooks(self.store, dict(self.settings.services), default=_default)
        self.operations = Operations(self.store, self.table, self.settings, self.webhooks)
        self.url = ""
        self.ca_pem = b""
        self._journal = Journal(self.settings.data) if self.settings.data else None
        self._routes: Routes | None = None
        self._runner: web.AppRunner | None = None
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        if self._journal is not None:
            self._journal.open(self.store)
        self._seed()
        await self._listen()
        if self.settings.controllers:
            self._tasks = anyio.create_task_group()
            await self._tasks.__aenter__()
            self._tasks.start_soon(Controllers(self.operations).run, name="controllers")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        suppressed: bool | None = None
        with anyio.CancelScope(shield=True):
            self.drop_watches()
            if self._runner is not None:
                await self._runner.cleanup()
                self._runner = None
            await self.webhooks.close()
            if self._journal is not None:
                self._journal.close()
        if self._tasks is not None:
            suppressed = await leave(self._tasks, kind, error, trace)
            self._tasks = None
        return suppressed

    def _seed(self) -> None:
        for name in self.settings.namespaces:
            self.operations.seed("namespaces", {"metadata": {"name": name}})
        for name, value in SYSTEM_PRIORITIES.items():
            self.operations.seed(
                "priorityclasses.scheduling.k8s.io", {"metadata": {"name": name}, "value": value}
            )

    async def _listen(self) -> None:
        app = web.Application(client_max_size=self.settings.max_body_bytes)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_S,
            keepalive_timeout=3600,
        )
        context, scheme = None, "http"
        if self.settings.tls:
            context, scheme = self._tls(), "https"
        app.router.add_route("*", "/{tail:.*}", self._serve)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, self.settings.host, self.settings.port, ssl_context=context, backlog=1024
        )
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"{scheme}://{self.settings.host}:{port}"
        discovery = Discovery(self.table, f"{self.settings.host}:{port}")
        self._routes = Routes(self._state(), discovery)

    def _state(self) -> State:
        return State(
            settings=self.settings,
            table=self.table,
            store=self.store,
            operations=self.operations,
            tokens=self.tokens,
            faults=self.faults,
            audit=self.audit,
        )

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self._routes is None:
            return web.Response(status=503)
        return await self._routes.handle(request)

    def _tls(self) -> ssl.SSLContext:
        authority = CertificateAuthority()
        self.ca_pem = authority.pem
        names = ("localhost", self.settings.host, "kubernetes.default.svc")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            certificate, key, _ = authority.issue_files(Path(folder), names)
            context.load_cert_chain(certificate, key)
        return context

    # -- what tests use

    def kubeconfig(self, path: Path, *, token: str = "", namespace: str = "default") -> Path:
        """Write a kubeconfig for this server; JSON, which every reader takes as YAML."""
        cluster: Obj = {"server": self.url}
        if self.ca_pem:
            cluster["certificate-authority-data"] = base64.b64encode(self.ca_pem).decode()
        name = "hami-sim"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token or self.token}}],
            "contexts": [
                {"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}
            ],
            "current-context": name,
        }
        path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
        path.chmod(0o600)
        return path

    def drop_watches(self, match: Match | None = None, *, cut: bool = False) -> int:
        """End open watches (all, or those that match); returns how many."""
        if self._routes is None:
            return 0
        return self._routes.watches.drop(match or Match(), cut=cut)

    @property
    def watch_count(self) -> int:
        """Count the watches in progress."""
        return 0 if self._routes is None else len(self._routes.watches)

    def requests(self, match: Match | None = None) -> list[AuditEntry]:
        """List audit entries that match."""
        wanted = match or Match()
        return [
            entry
            for entry in self.audit
            if all(
                not value or value == getattr(entry, field)
                for field, value in msgspec.structs.asdict(wanted).items()
            )
        ]


async def leave(
    tasks: TaskGroup,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> bool | None:
    """Stop background tasks; an error of the body passes through without being grouped."""
    tasks.cancel_scope.cancel()
    if error is None or isinstance(error, anyio.get_cancelled_exc_class()):
        return await tasks.__aexit__(kind, error, trace)
    await tasks.__aexit__(None, None, None)
    return None


def _default(resource: Resource, obj: Obj) -> None:
    rules_for(resource.storage_key).default(obj)
