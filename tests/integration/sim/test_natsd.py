# SPDX-License-Identifier: Apache-2.0
"""A real nats-server that starts, crashes, loses its store and recovers, as other tests require."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import anyio
import nats
import psutil
import pytest
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from hami_common.errors import Unavailable
from hami_sim.natsd import STOP_S, NatsServer, run_nats_server

pytestmark = pytest.mark.anyio


async def put(url: str, value: bytes) -> None:
    """Keep ``value`` in a bucket of the server, made at first use."""
    client = await nats.connect(url)
    try:
        bucket = await client.jetstream().create_key_value(bucket="kept")
        await bucket.put("key", value)
    finally:
        await client.close()


async def get(url: str) -> bytes | None:
    """Value kept by ``put``."""
    client = await nats.connect(url)
    try:
        bucket = await client.jetstream().key_value("kept")
        return (await bucket.get("key")).value
    finally:
        await client.close()


async def test_server_is_ready_with_jetstream_when_the_fixture_returns(
    nats_server: NatsServer,
) -> None:
    await put(nats_server.url, b"now")
    assert await get(nats_server.url) == b"now"
    assert nats_server.port > 0
    assert nats_server.store.is_dir()


async def test_restart_keeps_port_and_store(nats_server: NatsServer) -> None:
    port, pid = nats_server.port, nats_server.pid
    await put(nats_server.url, b"kept over a stop")
    await nats_server.restart()
    assert nats_server.port == port
    assert nats_server.pid != pid
    assert await get(nats_server.url) == b"kept over a stop"


async def test_kill_ends_the_process_and_start_recovers_the_store(nats_server: NatsServer) -> None:
    pid = nats_server.pid
    assert pid is not None
    await put(nats_server.url, b"kept over a crash")
    await nats_server.kill()
    assert not psutil.pid_exists(pid)
    assert nats_server.pid is None
    await nats_server.start()
    assert await get(nats_server.url) == b"kept over a crash"


async def test_client_reconnects_by_itself_after_a_crash(nats_server: NatsServer) -> None:
    client = await nats.connect(nats_server.url, reconnect_time_wait=0.05)
    try:
        await nats_server.kill()
        await nats_server.start()
        with anyio.fail_after(10):
            while not client.is_connected:
                await anyio.sleep(0.01)
            await client.flush()
    finally:
        await client.close()


async def test_wipe_deletes_all_data(nats_server: NatsServer) -> None:
    await put(nats_server.url, b"gone")
    await nats_server.stop()
    await nats_server.wipe()
    await nats_server.start()
    with pytest.raises(NotFoundError):
        await get(nats_server.url)


async def test_wipe_refuses_while_the_server_runs(nats_server: NatsServer) -> None:
    with pytest.raises(RuntimeError, match="stop the server"):
        await nats_server.wipe()


async def test_frozen_server_is_silent_until_thawed(nats_server: NatsServer) -> None:
    answered = anyio.Event()

    async def ask(client: Client) -> None:
        await client.flush(timeout=20)
        answered.set()

    client = await nats.connect(nats_server.url)
    try:
        nats_server.freeze()
        async with anyio.create_task_group() as tg:
            tg.start_soon(ask, client)
            with anyio.move_on_after(0.3) as silence:
                await answered.wait()
            nats_server.thaw()
        assert silence.cancelled_caught
        assert answered.is_set()
    finally:
        await client.close()


async def test_stop_ends_a_frozen_server(nats_server: NatsServer) -> None:
    nats_server.freeze()
    started_s = time.monotonic()
    await nats_server.stop()
    assert time.monotonic() - started_s < STOP_S


async def test_users_of_the_configuration_are_enforced(tmp_path: Path) -> None:
    users = 'authorization { users = [ { user: "agent", password: "secret" } ] }'
    async with run_nats_server(tmp_path, config_text=users) as server:
        async with await anyio.connect_tcp("127.0.0.1", server.port) as stranger:
            await stranger.send(b'CONNECT {"user":"agent","pass":"guess"}\r\nPING\r\n')
            told = b""
            with suppress(anyio.EndOfStream):
                while True:
                    told += await stranger.receive()
        client = await nats.connect(server.url, user="agent", password="secret")
        await client.close()
    assert b"-ERR 'Authorization Violation'" in told
    assert b"PONG" not in told


async def test_start_with_a_broken_configuration_reports_the_log(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="nosuchword"):
        async with run_nats_server(tmp_path, config_text="nosuchword: 1"):
            pass


async def test_two_servers_share_nothing(tmp_path: Path) -> None:
    async with run_nats_server(tmp_path / "a") as first, run_nats_server(tmp_path / "b") as second:
        await put(first.url, b"only in the first")
        with pytest.raises(NotFoundError):
            await get(second.url)


def test_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import sys, anyio, pathlib\n"
        "from hami_sim.natsd import run_nats_server\n"
        "async def main():\n"
        "    async with run_nats_server(pathlib.Path(sys.argv[1])) as server:\n"
        "        print(server.pid, flush=True)\n"
        "        await anyio.sleep(60)\n"
        "anyio.run(main)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=-1) as parent:
        assert parent.stdout is not None
        server_pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while _is_alive(server_pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_alive(server_pid)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
