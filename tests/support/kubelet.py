# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with gRPC over unix sockets: a directory with a short path, and gRPC's poller.

A socket's path has at most 107 bytes, which pytest's own directories exceed. gRPC keeps one poller
thread while any of its objects lives; it is started before the leak check takes its first look.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

__all__ = ["grpc_poller", "short_path"]

IN_MEMORY = Path("/dev/shm")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a short path, on a file system in memory where there is one."""
    base = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="hk-", dir=base, ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture(scope="session", autouse=True)
def grpc_poller() -> Iterator[None]:
    """Keep gRPC's poller alive for the whole run; it needs a loop to begin with."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        grpc.aio.init_grpc_aio()
    finally:
        asyncio.set_event_loop(None)
    yield
    grpc.aio.shutdown_grpc_aio()
    loop.close()
