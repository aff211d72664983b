# SPDX-License-Identifier: Apache-2.0
"""Clusters with two schedulers, on the in-memory bus and on a real nats-server."""

import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from hami_sim.natsd import NatsServer, run_nats_cluster
from tests.property.ledger.chaos import SLOTS, cluster_nodes
from tests.property.ledger.drive import Drive
from tests.support.ledger_outside import MemoryOutside, nats_outside
from tests.support.ledger_troubles import SteppedClock
from tests.support.ledger_world import OTHERS, ledger_world

OPERATIONS = int(os.environ.get("HAMI_PROPERTY_OPS", "40000"))
SEED = int(os.environ.get("HAMI_PROPERTY_SEED", "34"))

OpenDrive = Callable[[int], AbstractAsyncContextManager[Drive]]
"""Opens a cluster for a seed."""


@pytest.fixture(autouse=True)
def _quiet_logs() -> Iterator[None]:
    """Silence logs: refusals and faults produce thousands of warnings in these tests."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@asynccontextmanager
async def memory_drive(seed: int) -> AsyncIterator[Drive]:
    clock = SteppedClock()
    async with ledger_world(
        MemoryOutside(clock), clock=clock, nodes=cluster_nodes(), rng=random.Random(seed)
    ) as world:
        yield Drive(world, seed)


@pytest.fixture
def nats_drive(nats_server: NatsServer) -> OpenDrive:
    return partial(_drive_on, [nats_server])


@pytest.fixture
async def replicated_drive(tmp_path: Path, anyio_backend: str) -> AsyncIterator[OpenDrive]:
    """Three servers; each scheduler uses another one, and so reads from another replica."""
    async with run_nats_cluster(tmp_path) as cluster:
        yield partial(_drive_on, cluster.servers)


@asynccontextmanager
async def _drive_on(servers: Sequence[NatsServer], seed: int) -> AsyncIterator[Drive]:
    async with (
        nats_outside(servers, (OTHERS, *SLOTS)) as outside,
        ledger_world(
            outside, clock=SteppedClock(), nodes=cluster_nodes(), rng=random.Random(seed)
        ) as world,
    ):
        yield Drive(world, seed)
