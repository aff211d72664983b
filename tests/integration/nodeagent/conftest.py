# SPDX-License-Identifier: Apache-2.0
"""A node without its agent."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hami_sim.natsd import NatsServer
from tests.integration.nodeagent.plane import Plane, run_plane
from tests.support.kubelet import grpc_poller, short_path

__all__ = ["grpc_poller", "plane", "short_path"]


@pytest.fixture
async def plane(short_path: Path, nats_server: NatsServer) -> AsyncIterator[Plane]:
    """Bus, API server, kubelet and eight simulated devices of 16 splits."""
    async with run_plane(short_path, nats_server) as built:
        yield built
