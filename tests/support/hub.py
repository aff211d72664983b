# SPDX-License-Identifier: Apache-2.0
"""A hub and regions as real NATS servers with the generated accounts, and links that can be cut."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import SocketStream, TaskGroup

from hami_common.bus import grants
from hami_common.bus.nkeys import NKey
from hami_common.runtime import natsio
from hami_common.runtime.natsio import Bus, NatsLogin
from hami_sim.natsd import HOST, NatsServer
from hami_sim.ports import free_port


class Link:
    """A TCP connection that a test cuts: nothing passes, and new connections are refused."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.port = 0
        self.is_cut = False
        self._open: set[SocketStream] = set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Pass connections on until cancelled."""
        self.port = free_port()
        listener = await anyio.create_tcp_listener(local_host=HOST, local_port=self.port)
        async with listener:
            task_status.started()
            await listener.serve(self._pass)

    async def cut(self) -> None:
        """End all connections and refuse new ones."""
        self.is_cut = True
        for stream in list(self._open):
            await stream.aclose()

    def restore(self) -> None:
        """Accept connections again."""
        self.is_cut = False

    async def _pass(self, near: SocketStream) -> None:
        async with near:
            if self.is_cut:
                return
            try:
                far = await anyio.connect_tcp(HOST, self._target)
            except OSError:
                return
            self._open |= {near, far}
            try:
                async with far, anyio.create_task_group() as group:
                    group.start_soon(_copy, near, far, group)
                    group.start_soon(_copy, far, near, group)
            finally:
                self._open -= {near, far}


async def _copy(source: SocketStream, target: SocketStream, group: TaskGroup) -> None:
    try:
        async for piece in source:
            await target.send(piece)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass
    group.cancel_scope.cancel()


class Place:
    """One server with the keys of its users: the hub, or a region."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.keys = {user: NKey.generate("user") for user in (*grants.STATIC_USERS, "regions")}
        self.keys["issuer"] = NKey.generate("account")
        directory.mkdir(parents=True)
        self.server: NatsServer

    def seed_file(self, user: str) -> str:
        """File with the seed of a user."""
        path = self.directory / f"{user}.seed"
        path.write_text(self.keys[user].seed, encoding="ascii")
        return str(path)

    def source(self) -> str:
        """Token of the subjects of its sources."""
        return grants.source_token(self.keys["regions"].seed)

    def settings(self) -> dict[str, str]:
        """Settings of the logins of a registry."""
        return {
            "nats_seed_file": self.seed_file("registry"),
            "regions_seed_file": self.seed_file("regions"),
        }

    def make_server(self, *, config: str, regions: grants.Regions) -> None:
        """Create the server with its accounts."""
        accounts = grants.server_config(
            issuer=self.keys["issuer"].public,
            users={name: self.keys[name].public for name in grants.STATIC_USERS},
            regions=regions,
        )
        domain = regions.region or grants.HUB
        jetstream = f"jetstream {{\ndomain: {domain}\nstore_dir: {self.directory / 'store'}\n}}\n"
        text = f"server_name: {self.name}\n{jetstream}{config}\n{accounts}"
        self.server = NatsServer(self.directory / "nats", config_text=text)

    @asynccontextmanager
    async def login(self, user: str) -> AsyncIterator[Bus]:
        """A connection of one of the users."""
        login = NatsLogin(seed_file=self.seed_file(user), inbox=grants.inbox(user))
        async with natsio.connect(
            [self.server.url], name=user, login=login, start_timeout_s=20
        ) as bus:
            yield bus


class Fleet:
    """The hub, its regions, and the link of each."""

    def __init__(self, hub: Place, regions: Mapping[str, Place], links: Mapping[str, Link]) -> None:
        self.hub = hub
        self.regions = regions
        self.links = links


@asynccontextmanager
async def run_fleet(directory: Path, names: Sequence[str]) -> AsyncIterator[Fleet]:
    """Run the servers for the time of the block."""
    hub = Place("hub", directory / "hub")
    regions = {name: Place(name, directory / name) for name in names}
    port = free_port()
    leaves = {name: place.keys["regions"].public for name, place in regions.items()}
    hub.make_server(
        config=f"leafnodes {{ listen: {HOST}:{port}, no_advertise: true }}",
        regions=grants.Regions(public=hub.keys["regions"].public, leaf_by_region=leaves),
    )
    links = {name: Link(port) for name in names}
    async with AsyncExitStack() as stack, anyio.create_task_group() as group:
        for name, place in regions.items():
            await group.start(links[name].run)
            denied = ", ".join(f'"{one}"' for one in grants.leaf_denials(name))
            kept = ", ".join(f'"{one}"' for one in grants.KEPT_IN_REGION)
            remote = (
                f"url: nats-leaf://{HOST}:{links[name].port}, account: {grants.REGIONS}, "
                f"nkey: {place.keys['regions'].seed}, deny_imports: [{denied}], "
                f"deny_exports: [{kept}]"
            )
            place.make_server(
                config=f"leafnodes {{ remotes: [{{ {remote} }}] }}",
                regions=grants.Regions(
                    public=place.keys["regions"].public, region=name, source=place.source()
                ),
            )
        for place in (hub, *regions.values()):
            stack.push_async_callback(place.server.stop)
            await place.server.start()
        yield Fleet(hub, regions, links)
        group.cancel_scope.cancel()
