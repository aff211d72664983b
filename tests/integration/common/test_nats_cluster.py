# SPDX-License-Identifier: Apache-2.0
"""Fenced appends on three servers, of which one after the other is killed or stopped.

Acknowledged appends are stored once, no two appends pass one fence, and reading back after a lost
answer shows the truth: the promises that the ledger rests on (design D3).
"""

from collections.abc import AsyncIterator
from itertools import count

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import Conflict, Unavailable
from hami_common.ports import Entry, Expect
from hami_common.runtime import natsio
from hami_sim.natsd import NatsCluster, run_nats_cluster

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

NODES = ("gpu-a", "gpu-b")
WRITERS = 3
ROUNDS = 3
QUIET_S = 1.0


@pytest.fixture
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsCluster]:
    """Three servers with the streams of the project, three replicas each."""
    async with run_nats_cluster(tmp_path_factory.mktemp("nats")) as running:
        async with natsio.connect(running.urls, name="declare") as bus:
            await natsio.ensure_bus(bus, limits=natsio.BusLimits(replicas=3))
        yield running


class Writer:
    """Appends under the fence of a node, as a scheduler does; every value in a key of its own."""

    def __init__(self, name: str, servers: NatsCluster) -> None:
        self._name = name
        self._urls = servers.urls
        self._numbers = count()
        self.acknowledged: dict[str, int] = {}
        """Revision by key."""

    async def run(self) -> None:
        async with natsio.connect(self._urls, name=self._name, request_timeout_s=1.0) as bus:
            bucket = natsio.NatsBucket(bus, subjects.ALLOC_BUCKET)
            while True:
                try:
                    await self._append(bucket)
                except (Conflict, Unavailable):
                    await anyio.sleep(0.01)

    async def _append(self, bucket: natsio.NatsBucket) -> None:
        number = next(self._numbers)
        node = NODES[number % len(NODES)]
        fence = subjects.kv_subject(subjects.ALLOC_BUCKET, f"{node}.>")
        last = await bucket.last_revision(fence)
        key = f"{node}.{self._name}-{number}"
        expect = Expect(subject=fence, sequence=last)
        try:
            revision = await bucket.append(key, str(last).encode(), expect=expect)
        except Unavailable:
            revision = await self._read_back(bucket, key)
        if revision:
            self.acknowledged[key] = revision

    async def _read_back(self, bucket: natsio.NatsBucket, key: str) -> int:
        """Read an append whose answer was lost; returns 0 when it is not stored so far."""
        while True:
            try:
                entry = await bucket.get(key)
            except Unavailable:
                await anyio.sleep(0.05)
            else:
                return entry.revision if entry is not None else 0


async def read_all(bucket: natsio.NatsBucket) -> dict[str, Entry]:
    """Every record by key, once the servers have settled."""
    with anyio.fail_after(30):
        while True:
            try:
                return {entry.key: entry for entry in await bucket.latest()}
            except Unavailable:
                await anyio.sleep(0.1)


async def progress(writers: list[Writer]) -> None:
    """Return once every writer has appended another value."""
    before = [len(writer.acknowledged) for writer in writers]
    with anyio.fail_after(40):
        while any(len(writer.acknowledged) <= n for writer, n in zip(writers, before, strict=True)):
            await anyio.sleep(0.02)


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_nothing_acknowledged_is_lost_and_no_fence_is_passed_twice(
    servers: NatsCluster, how: str
) -> None:
    writers = [Writer(f"writer-{number}", servers) for number in range(WRITERS)]
    async with anyio.create_task_group() as group:
        for writer in writers:
            group.start_soon(writer.run)
        await progress(writers)
        for number in range(ROUNDS):
            victim = servers.servers[number % len(servers.servers)]
            if how == "kill":
                await victim.kill()
                await progress(writers)
                await victim.start()
            else:
                victim.freeze()
                await anyio.sleep(QUIET_S)
                await progress(writers[:1])
                victim.thaw()
            await progress(writers)
        group.cancel_scope.cancel()
    async with natsio.connect(servers.urls, name="reader") as bus:
        bucket = natsio.NatsBucket(bus, subjects.ALLOC_BUCKET)
        stored = await read_all(bucket)
        last = max(entry.revision for entry in stored.values())
        assert last == len(stored), "a record was stored twice or lost"
    for writer in writers:
        for key, revision in writer.acknowledged.items():
            assert stored[key].revision == revision
    for node in NODES:
        before = 0
        for entry in sorted(stored.values(), key=lambda entry: entry.revision):
            if entry.key.startswith(f"{node}."):
                assert int(entry.value) == before, f"{entry.key} passed a fence that was not its"
                before = entry.revision
