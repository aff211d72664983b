# SPDX-License-Identifier: Apache-2.0
"""Gives a site a network of its own: one network namespace, joined to this machine by a veth pair.

The pair is the only change to this machine: one interface with one address of 198.19.0.0/16 (RFC
2544, reserved for tests), no route beyond its own /30, no firewall rule. Pods reach each other and
the site's node, and nothing beyond the pair's other end. Namespace and pair vanish with the holding
process, which dies with this one. Needs root.
"""

import asyncio
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from uuid import uuid4

import anyio
from anyio.abc import SocketAttribute, SocketStream

from hami_sim.kubernetes.pki import HOST
from hami_sim.process import dying_with_parent

POOL = IPv4Network("198.19.0.0/16")
_PREFIX = 30
_CONNECT_S = 5.0
_PART_BYTES = 1 << 16
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Network:
    """One network namespace; ``start`` makes it, ``stop`` removes it."""

    def __init__(self) -> None:
        self._link = f"hs{uuid4().hex[:8]}"
        self._holder: subprocess.Popen[bytes] | None = None
        self.address = ""
        """Address of the site, as this machine and the site itself use it."""
        self.gateway = ""
        """Address of this machine on the pair."""

    @property
    def file(self) -> Path:
        """The namespace as a file, as ``nsenter --net`` takes it."""
        assert self._holder is not None, "the network is not started"
        return Path(f"/proc/{self._holder.pid}/ns/net")

    def command(self) -> list[str]:
        """Start of a command line that runs the rest of it in the namespace."""
        return [shutil.which("nsenter") or "nsenter", f"--net={self.file}", "--"]

    def start(self) -> None:
        """Make the namespace and the pair."""
        sleep = shutil.which("sleep") or "sleep"
        unshare = shutil.which("unshare") or "unshare"
        shell = shutil.which("sh") or "/bin/sh"
        self._holder = subprocess.Popen(
            dying_with_parent([unshare, "--net", shell, "-c", f"echo; exec {sleep} infinity"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            self.stop()
            msg = "a network namespace cannot be made"
            raise RuntimeError(msg)
        pid = str(self._holder.pid)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        self._take_addresses()
        _ip("link", "set", self._link, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{self.address}/{_PREFIX}", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", self.gateway),
        ):
            _ip(*words, within=self.command())
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        subprocess.run([*self.command(), shell, "-c", forward], check=True)

    @asynccontextmanager
    async def relay(self, target: Callable[[], Awaitable[tuple[str, int]]]) -> AsyncIterator[int]:
        """A port of 127.0.0.1 here that leads to an address inside, which is asked per connection.

        Connections end when their target cannot be reached.
        """

        async def carry(near: SocketStream) -> None:
            async with near:
                inside = await anyio.to_thread.run_sync(self._connected, await target())
                reader, writer = await asyncio.open_connection(sock=inside)
                try:
                    async with anyio.create_task_group() as group:
                        group.start_soon(_send, near, writer)
                        group.start_soon(_receive, reader, near)
                finally:
                    writer.close()
                    with anyio.CancelScope(shield=True), suppress(OSError):
                        await writer.wait_closed()

        async def serve(near: SocketStream) -> None:
            try:
                await carry(near)
            except* (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass

        async with (
            await anyio.create_tcp_listener(local_host=HOST) as listener,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listener.serve, serve)
            yield int(listener.extra_attributes[SocketAttribute.local_port]())
            group.cancel_scope.cancel()

    def _connected(self, address: tuple[str, int]) -> socket.socket:
        def connect() -> socket.socket:
            # The thread belongs to the namespace from here to its end.
            file = os.open(self.file, os.O_RDONLY)
            try:
                if _LIBC.setns(file, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(file)
            return socket.create_connection(address, timeout=_CONNECT_S)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(connect).result()

    def _take_addresses(self) -> None:
        """Give this machine's end an address whose subnet no other interface here has."""
        taken = _addresses()
        free = [net for net in POOL.subnets(new_prefix=_PREFIX) if not taken & set(net.hosts())]
        # At random: another site may choose at the same time.
        gateway, address = secrets.choice(free).hosts()
        self.gateway, self.address = str(gateway), str(address)
        _ip("address", "add", f"{gateway}/{_PREFIX}", "dev", self._link)

    def stop(self) -> None:
        """End the namespace and the pair; processes in it must have ended."""
        if self._holder is None:
            return
        subprocess.run(["ip", "link", "delete", self._link], capture_output=True, check=False)
        self._holder.kill()
        self._holder.wait()
        if self._holder.stdout is not None:
            self._holder.stdout.close()
        self._holder = None


async def _send(near: SocketStream, far: asyncio.StreamWriter) -> None:
    async for part in near:
        far.write(part)
        await far.drain()
    far.write_eof()


async def _receive(far: asyncio.StreamReader, near: SocketStream) -> None:
    while part := await far.read(_PART_BYTES):
        await near.send(part)
    await near.send_eof()


def _addresses() -> set[IPv4Address]:
    listed = subprocess.run(["ip", "-json", "-4", "address"], capture_output=True, check=True)
    return {
        IPv4Address(entry["local"])
        for link in json.loads(listed.stdout)
        for entry in link.get("addr_info", ())
    }


def _ip(*words: str, within: list[str] | None = None) -> None:
    done = subprocess.run(
        [*(within or ()), "ip", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        msg = f"ip {' '.join(words)}: {done.stderr.strip()}"
        raise RuntimeError(msg)
