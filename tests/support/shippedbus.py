# SPDX-License-Identifier: Apache-2.0
"""The shipped configuration of the bus, run unchanged: only paths, ports and names are replaced.

The file of the component, the accounts that ``hamictl bootstrap`` creates and certificates as it
creates them. Times in seconds.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hami_common.bus import grants
from hami_common.bus.nkeys import NKey
from hami_common.certificates import issue, new_authority
from hami_common.runtime import natsio
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import Bus, NatsLogin
from hami_sim.natsd import NatsServer
from hami_sim.ports import free_port

COMPONENTS = Path(__file__).parents[2] / "deploy/kustomize/components"
SERVERS = {"nats": 1, "nats-cluster": 3}
"""Components with a file of the server's, and how many servers they run."""
_VALID = timedelta(days=1)


def shipped(component: str) -> str:
    """The file of a component."""
    return (COMPONENTS / component / "nats.conf").read_text(encoding="utf-8")


def relocated(text: str, here: Callable[[str], Path]) -> str:
    """Return the file with local paths, without name and addresses."""
    text = re.sub(r"(?m)^(server_name|listen|http): .*$", "", text)
    return re.sub(r"(?m)^(\s*\w+: )(/\S+)$", lambda found: f"{found[1]}{here(found[2])}", text)


class ShippedBus:
    """The servers of one component."""

    def __init__(self, component: str, directory: Path) -> None:
        """Keep everything below ``directory``; no server runs yet."""
        self.directory = directory
        self.keys = {name: NKey.generate("user") for name in grants.STATIC_USERS}
        self.keys["issuer"] = NKey.generate("account")
        self.servers: list[NatsServer] = []
        directory.mkdir(parents=True, exist_ok=True)
        self._certify()
        routes = [free_port() for _ in range(SERVERS[component])]
        for number, port in enumerate(routes):
            self.servers.append(self._server(shipped(component), number, port, routes))

    @property
    def urls(self) -> list[str]:
        """Addresses for clients."""
        return [f"tls://localhost:{server.port}" for server in self.servers]

    @property
    def ca_file(self) -> str:
        """The authority of the certificates."""
        return str(self.directory / "ca/ca.crt")

    def _certify(self) -> None:
        now = datetime.fromtimestamp(SystemClock().now_s(), tz=UTC)
        authority = new_authority("test", now=now, valid=_VALID)
        serving = issue(authority, ["localhost"], now=now, valid=_VALID, is_client=True)
        files = {
            "ca/ca.crt": authority.certificate,
            "tls/tls.crt": serving.certificate,
            "tls/tls.key": serving.key,
        }
        for name, content in files.items():
            path = self.directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)

    def _server(self, text: str, number: int, port: int, routes: Sequence[int]) -> NatsServer:
        own = self.directory / f"server-{number}"
        (own / "run/nats").mkdir(parents=True)

        def here(path: str) -> Path:
            is_shared = path.startswith(("/tls/", "/ca/"))
            return (self.directory if is_shared else own) / path.lstrip("/")

        text = relocated(text, here)
        text = text.replace("0.0.0.0:6222", f"127.0.0.1:{port}")
        for peer, peer_port in enumerate(routes):
            name = f"hami-nats-{peer}.nats.hami-system.svc:6222"
            text = text.replace(name, f"localhost:{peer_port}")
        accounts = grants.server_config(
            issuer=self.keys["issuer"].public,
            users={name: self.keys[name].public for name in grants.STATIC_USERS},
        )
        (own / "accounts.conf").write_text(accounts, encoding="utf-8")
        return NatsServer(own, config_text=f"server_name: hami-nats-{number}\n{text}")

    def login(self, name: str) -> NatsLogin:
        """The login of a user with a key."""
        path = self.directory / f"{name}.seed"
        path.write_text(self.keys[name].seed, encoding="ascii")
        return NatsLogin(seed_file=str(path), inbox=grants.inbox(name))

    @asynccontextmanager
    async def service(self, name: str) -> AsyncIterator[Bus]:
        """A connection as services make it."""
        async with natsio.connect(
            self.urls,
            name=name,
            login=self.login(name),
            ca_file=self.ca_file,
            start_timeout_s=20,
        ) as bus:
            yield bus


@asynccontextmanager
async def run_shipped(component: str, directory: Path) -> AsyncIterator[ShippedBus]:
    """The servers of a component for the time of the block."""
    bus = ShippedBus(component, directory)
    async with AsyncExitStack() as stack:
        for server in bus.servers:
            stack.push_async_callback(server.stop)
            await server.start()
        yield bus


def images() -> Mapping[str, str]:
    """Image name to tag, of the component that runs the servers."""
    text = (COMPONENTS / "nats/kustomization.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"\{name: (\S+), newTag: (\S+)\}", text))
