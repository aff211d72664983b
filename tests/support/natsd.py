# SPDX-License-Identifier: Apache-2.0
"""Fixtures around a real nats-server: each test has its own server, port and store."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hami_sim.natsd import NatsServer, run_nats_server

__all__ = ["nats_server"]


@pytest.fixture
async def nats_server(tmp_path: Path, anyio_backend: str) -> AsyncIterator[NatsServer]:
    """A running server that the test may stop, kill, freeze, restart or wipe."""
    async with run_nats_server(tmp_path / "nats") as server:
        yield server
