# SPDX-License-Identifier: Apache-2.0
"""A bus with its accounts, keys and authenticator, and a stand-in for the reviews of an API server.

The servers, the permissions and the logins are real; only the owners of tokens are invented here.
"""

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
from nats.aio.client import Client

from hami_common.bus import grants, subjects
from hami_common.bus.nkeys import NKey
from hami_common.errors import Unavailable
from hami_common.ports import KubeApi
from hami_common.runtime import natsio
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.kubeauth import NODE_NAME, KubeAuth
from hami_common.runtime.natsio import Bus, NatsLogin
from hami_common.runtime.settings import ServiceSettings
from hami_common.runtime.tasks import background
from hami_common.runtime.telemetry import make_registry
from hami_registry.shell.authenticator import Authenticator
from hami_registry.shell.metrics import Metrics
from hami_sim.natsd import NatsServer, run_nats_server
from tests.support.registry import quarantine

AGENT = ("hami-agents", "hami-nodeagent")
AUDIENCE = "hami-bus"


def token(name: str, *, ends_s: float) -> str:
    """Return a string in the form of a service account token."""
    parts = ({"alg": "RS256"}, {"exp": ends_s, "name": name})
    texts = [base64.urlsafe_b64encode(msgspec.json.encode(p)).decode().rstrip("=") for p in parts]
    return ".".join([*texts, "c2lnbmF0dXJl"])


class Reviews:
    """Answers TokenReviews and SubjectAccessReviews (the part of ``KubeApi`` that is used)."""

    def __init__(self) -> None:
        self.users: dict[str, dict[str, Any]] = {}
        """Status of a TokenReview by token; all others are not authenticated."""
        self.allowed: set[str] = set()
        """Names of users whose access reviews are allowed."""
        self.is_down = False
        self.asked = 0

    def know(
        self, text: str, account: tuple[str, str], *, node: str = "", audience: str = AUDIENCE
    ) -> str:
        """Register the token as one of this ServiceAccount."""
        user: dict[str, Any] = {"username": f"system:serviceaccount:{account[0]}:{account[1]}"}
        if node:
            user["extra"] = {NODE_NAME: [node]}
        self.users[text] = {"authenticated": True, "user": user, "audiences": [audience]}
        return text

    async def create(self, path: str, body: bytes) -> bytes:
        """Answer one review."""
        self.asked += 1
        if self.is_down:
            raise Unavailable(peer="API server", detail="down")
        spec = msgspec.json.decode(body)["spec"]
        if "tokenreviews" in path:
            known = self.users.get(spec["token"], {"authenticated": False})
            meant = set(known.get("audiences", ())) & set(spec["audiences"])
            # A real one sends an empty user with an invalid token.
            status = known if meant else {"authenticated": False, "user": {}}
        else:
            status = {"allowed": spec["user"] in self.allowed}
        return msgspec.json.encode({"status": status})


class Site:
    """One server, its keys, and the authenticator that answers its requests."""

    def __init__(self, directory: Path, server: NatsServer, keys: Mapping[str, NKey]) -> None:
        self.server = server
        self.reviews = Reviews()
        self.clock = SystemClock()
        self.login_s = 600.0
        self.limits: natsio.BusLimits | None = None
        """Capacity of the streams, if not the shipped one."""
        self._directory = directory
        self._keys = keys
        self._count = 0

    def file(self, content: str) -> str:
        """A file of its own with this content."""
        self._count += 1
        path = self._directory / f"file-{self._count}"
        path.write_text(content, encoding="ascii")
        return str(path)

    def seed_file(self, name: str) -> str:
        """The seed of a user with a key."""
        return self.file(self._keys[name].seed)

    def agent_token(self, node: str, *, valid_s: float = 600.0, name: str = "agent") -> str:
        """A good token of an agent on this node."""
        text = token(f"{name}-{self._count}-{node}", ends_s=self.clock.now_s() + valid_s)
        self._count += 1
        return self.reviews.know(text, AGENT, node=node)

    @asynccontextmanager
    async def service(self, name: str) -> AsyncIterator[Bus]:
        """A connection of a user with a key."""
        login = NatsLogin(seed_file=self.seed_file(name), inbox=grants.inbox(name))
        async with natsio.connect(
            [self.server.url], name=name, login=login, start_timeout_s=30
        ) as bus:
            yield bus

    @asynccontextmanager
    async def agent(
        self, node: str, token_file: str, *, renew_s: float = 0.0, start_timeout_s: float = 30.0
    ) -> AsyncIterator[Bus]:
        """A connection as agents make it."""
        settings = ServiceSettings(nats_token_file=token_file, nats_renew_s=renew_s)
        login = NatsLogin.of(settings, inbox=grants.inbox("agent", node))
        async with natsio.connect(
            [self.server.url],
            name=f"agent-{node}",
            login=login,
            start_timeout_s=start_timeout_s,
            request_timeout_s=5.0,
        ) as bus:
            yield bus

    @asynccontextmanager
    async def registry(self) -> AsyncIterator[Bus]:
        """The registry's part: streams, records, and answers to the servers."""
        async with self.service("registry") as bus, self.service("authenticator") as questions:
            await natsio.ensure_bus(bus, limits=self.limits)

            async def make_consumer(name: str) -> None:
                await natsio.ensure_consumer(
                    bus,
                    subjects.EVENTS_STREAM,
                    durable=name,
                    filter_subject=f"{subjects.EVENT_PREFIX}.>",
                )

            kube: Any = self.reviews
            reviewer: KubeApi = kube
            authenticator = Authenticator(
                issuer=self._keys["issuer"],
                auth=KubeAuth(lambda: reviewer, clock=self.clock, audiences=(AUDIENCE,), ttl_s=0.2),
                agents=frozenset({AGENT}),
                make_consumer=make_consumer,
                login_s=self.login_s,
                clock=self.clock,
                metrics=Metrics(make_registry(service="registry")),
                quarantine=quarantine(),
            )
            async with background() as group:
                group.start_soon(natsio.serve_records, bus, quarantine())
                group.start_soon(authenticator.run, questions)
                yield bus


@asynccontextmanager
async def run_site(directory: Path, *, config_text: str = "") -> AsyncIterator[Site]:
    """Run a server with the accounts of an installation, and no authenticator yet.

    ``config_text`` is further configuration of the server.
    """
    keys = {name: NKey.generate("user") for name in grants.STATIC_USERS}
    keys["issuer"] = NKey.generate("account")
    config = grants.server_config(
        issuer=keys["issuer"].public,
        users={name: keys[name].public for name in grants.STATIC_USERS},
    )
    async with run_nats_server(directory / "nats", config_text=config + config_text) as server:
        yield Site(directory, server, keys)


class Intruder:
    """A client that may request anything and records the server's permission errors."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.forbidden: list[str] = []

    async def take_error(self, error: Exception) -> None:
        """Callback of the client."""
        self.forbidden.append(str(error).lower())

    async def settle(self) -> None:
        """Wait until the server has processed all that was sent so far."""
        await self.client.flush(timeout=30)

    async def is_forbidden(self, subject: str) -> bool:
        """Return True when the server denied this subject."""
        with anyio.move_on_after(30):
            while not any(f'"{subject.lower()}"' in text for text in self.forbidden):
                await self.settle()
                await anyio.sleep(0.01)
            return True
        return False


@asynccontextmanager
async def intruder(site: Site, text: str, *, prefix: str) -> AsyncIterator[Intruder]:
    """Log in with a token and then misbehave."""
    async with intruder_at(site.server.url, text, prefix=prefix) as found:
        yield found


@asynccontextmanager
async def intruder_at(
    url: str, text: str, *, prefix: str, **options: Any
) -> AsyncIterator[Intruder]:
    """The same at any server; ``options`` are the client library's."""
    client = Client()
    found = Intruder(client)
    await client.connect(
        url,
        token=text,
        inbox_prefix=prefix,
        error_cb=found.take_error,
        allow_reconnect=False,
        connect_timeout=30,
        **options,
    )
    try:
        yield found
    finally:
        await client.close()
