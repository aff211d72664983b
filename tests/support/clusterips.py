# SPDX-License-Identifier: Apache-2.0
"""Brings an API server's calls of Services to processes of this machine, as kube-proxy would.

The API server is configured to reach the cluster through a proxy (egress selector, HTTP CONNECT
over a unix socket) that maps address and port of a Service to a port here. It checks certificates
against the Service's name, as in a cluster. Outside document: KEP-1281.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import yaml
from anyio.abc import ByteStream, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

HOST = "127.0.0.1"
_HEAD_LIMIT = 4096
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)

_log = logging.getLogger(__name__)


def selector_config(socket: Path) -> str:
    """Configuration that sends the API server's calls into the cluster through ``socket``."""
    transport = {"uds": {"udsName": str(socket)}}
    return yaml.safe_dump(
        {
            "apiVersion": "apiserver.k8s.io/v1beta1",
            "kind": "EgressSelectorConfiguration",
            "egressSelections": [
                {
                    "name": "cluster",
                    "connection": {"proxyProtocol": "HTTPConnect", "transport": transport},
                }
            ],
        }
    )


class ClusterIps:
    """The proxy with its table."""

    def __init__(self) -> None:
        self.port_by_service: dict[str, int] = {}
        """Port on this machine by ``<cluster IP>:<port>`` of a Service."""

    @asynccontextmanager
    async def serve(self, socket: Path) -> AsyncIterator[None]:
        """Take calls at ``socket`` for the time of the block."""
        listener = await anyio.create_unix_listener(socket)
        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, self._take)
            yield
            group.cancel_scope.cancel()

    async def _take(self, caller: SocketStream) -> None:
        async with caller:
            try:
                reader = BufferedByteReceiveStream(caller)
                head = await reader.receive_until(b"\r\n\r\n", _HEAD_LIMIT)
                where = head.split()[1].decode()
                port = self.port_by_service.get(where)
                if port is None:
                    await caller.send(b"HTTP/1.1 502 no endpoints\r\n\r\n")
                    return
                async with await anyio.connect_tcp(HOST, port) as service:
                    await caller.send(b"HTTP/1.1 200 OK\r\n\r\n")
                    if reader.buffer:
                        await service.send(reader.buffer)
                    async with anyio.create_task_group() as group:
                        group.start_soon(_pump, caller, service, group.cancel_scope)
                        group.start_soon(_pump, service, caller, group.cancel_scope)
            except (*_GONE, anyio.DelimiterNotFound, anyio.IncompleteRead) as error:
                _log.debug("call ended", extra={"problem": repr(error)})


async def _pump(source: ByteStream, sink: ByteStream, scope: anyio.CancelScope) -> None:
    """Forward until one side is gone; its owner closes the streams once nothing waits for them."""
    try:
        while True:
            await sink.send(await source.receive())
    except _GONE:
        scope.cancel()
