# SPDX-License-Identifier: Apache-2.0
"""The worlds of the bucket contract: in memory, one real nats-server, and a cluster of three."""

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import NotFound, Unavailable
from hami_common.ports import Bucket, Feed
from hami_common.runtime import natsio
from hami_common.runtime.natsio.jetstream import api
from hami_common.runtime.natsio.layout import stream_configs
from hami_sim.natsd import NatsCluster, NatsServer, run_nats_cluster, run_nats_server
from tests.support.memorybus import MemoryBucket, MemoryBus, MemoryFeed


class World(Protocol):
    def bucket(self, name: str = subjects.ALLOC_BUCKET) -> Bucket: ...

    def feed(self, node: str) -> Feed: ...

    async def interrupt(self) -> None:
        """Make the bus unavailable; it recovers with its store."""

    async def wipe(self) -> None:
        """Make the bus unavailable; it recovers empty."""


class MemoryWorld:
    def __init__(self) -> None:
        self.bus = MemoryBus()

    def bucket(self, name: str = subjects.ALLOC_BUCKET) -> Bucket:
        return MemoryBucket(self.bus, name)

    def feed(self, node: str) -> Feed:
        return MemoryFeed(self.bus, node)

    async def interrupt(self) -> None:
        self.bus.set_available(available=False)
        self.bus.set_available(available=True)

    async def wipe(self) -> None:
        self.bus.wipe()


class NatsWorld:
    def __init__(self, server: NatsServer, bus: natsio.Bus) -> None:
        self.server = server
        self.bus = bus

    def bucket(self, name: str = subjects.ALLOC_BUCKET) -> Bucket:
        return natsio.NatsBucket(self.bus, name)

    def feed(self, node: str) -> Feed:
        return natsio.RepublishedFeed(self.bus, node)

    async def interrupt(self) -> None:
        generation = self.bus.generation
        await self.server.restart()
        await self.bus.wait_connected(after=generation)

    async def wipe(self) -> None:
        generation = self.bus.generation
        await self.server.stop()
        await self.server.wipe()
        await self.server.start()
        await self.bus.wait_connected(after=generation)
        await natsio.ensure_bus(self.bus)


class NatsClusterWorld:
    """Three servers and three replicas of everything."""

    LIMITS = natsio.BusLimits(replicas=3)

    def __init__(self, servers: NatsCluster, bus: natsio.Bus) -> None:
        self.servers = servers
        self.bus = bus

    def bucket(self, name: str = subjects.ALLOC_BUCKET) -> Bucket:
        return natsio.NatsBucket(self.bus, name)

    def feed(self, node: str) -> Feed:
        return natsio.RepublishedFeed(self.bus, node)

    async def interrupt(self) -> None:
        """Every server crashes and comes back with its store."""
        generation = self.bus.generation
        for server in self.servers.servers:
            await server.kill()
        await self.servers.start()
        await self.bus.wait_connected(after=generation)
        for name in subjects.BUCKETS:
            await self._led(name)

    async def _led(self, name: str) -> None:
        """Wait until the servers have elected a leader of the bucket's stream."""
        with anyio.fail_after(20):
            while True:
                try:
                    await self.bucket(name).last_revision(">")
                except Unavailable:
                    await anyio.sleep(0.05)
                else:
                    return

    async def wipe(self) -> None:
        generation = self.bus.generation
        await self.servers.stop()
        for server in self.servers.servers:
            await server.wipe()
        await self.servers.start()
        await self.bus.wait_connected(after=generation)
        await natsio.ensure_bus(self.bus, limits=self.LIMITS)


@pytest.fixture(scope="module")
async def nats_cluster(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[NatsCluster]:
    """Three servers shared by all tests, because electing leaders takes seconds."""
    async with run_nats_cluster(tmp_path_factory.mktemp("nats-cluster")) as servers:
        yield servers


@pytest.fixture(
    params=["memory", "nats", pytest.param("nats-cluster", marks=pytest.mark.shares_cluster)]
)
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, nats_cluster: NatsCluster
) -> AsyncIterator[World]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    if request.param == "nats-cluster":
        async with natsio.connect(nats_cluster.urls, name="contract") as bus:
            for config in stream_configs(NatsClusterWorld.LIMITS):
                with suppress(NotFound):
                    await api(bus, f"STREAM.DELETE.{config['name']}")
            await natsio.ensure_bus(bus, limits=NatsClusterWorld.LIMITS)
            yield NatsClusterWorld(nats_cluster, bus)
        return
    async with (
        run_nats_server(tmp_path / "nats") as server,
        natsio.connect([server.url], name="contract") as bus,
    ):
        await natsio.ensure_bus(bus)
        yield NatsWorld(server, bus)
