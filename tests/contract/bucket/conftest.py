# SPDX-License-Identifier: Apache-2.0
"""The worlds in which the bucket contract holds: in memory, and over a real nats-server."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from hami_common import subjects
from hami_common.ports import Bucket, Feed
from hami_common.runtime import natsio
from hami_common.runtime.memory import MemoryBucket, MemoryBus, MemoryFeed
from hami_sim.natsd import NatsServer, run_nats_server


class World(Protocol):
    def bucket(self, name: str = subjects.ALLOC_BUCKET) -> Bucket: ...

    def feed(self, node: str) -> Feed: ...

    async def interrupt(self) -> None:
        """The bus is away and comes back with its store."""

    async def wipe(self) -> None:
        """The bus is away and comes back empty."""


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


@pytest.fixture(params=["memory", "nats"])
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, anyio_backend: str
) -> AsyncIterator[World]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    async with (
        run_nats_server(tmp_path / "nats") as server,
        natsio.connect([server.url], name="contract") as bus,
    ):
        await natsio.ensure_bus(bus)
        yield NatsWorld(server, bus)
