# SPDX-License-Identifier: Apache-2.0
"""Brings an API server's calls of Services to processes of this machine, as kube-proxy would.

The API server is configured to reach the cluster through a proxy (egress selector, HTTP CONNECT
over a unix socket) that maps address and port of a Service to a port here. It checks certificates
against the Service's name, as in a cluster. Outside document: KEP-1281.
"""

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import yaml
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

HOST = "127.0.0.1"
_HEAD_LIMIT = 4096
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)

_log = logging.getLogger(__name__)


def selector_config(path: Path) -> str:
    """Configuration that sends calls into the cluster through the unix socket ``path``."""
    transport = {"uds": {"udsName": str(path)}}
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
    async def serve(self, path: Path) -> AsyncIterator[None]:
        """Take calls at ``path`` for the time of the block."""
        listener = await anyio.create_unix_listener(path)
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
                        group.start_soon(_pump, caller, service)
                        group.start_soon(_pump, service, caller)
            except (*_GONE, anyio.DelimiterNotFound, anyio.IncompleteRead) as error:
                _log.debug("call ended", extra={"problem": repr(error)})


async def _pump(source: SocketStream, sink: SocketStream) -> None:
    """Forward until one side is gone, and then end the other direction too.

    Shutting the sockets down wakes the other pump. Cancelling it instead, or closing the unix
    socket while it waits, races in anyio 4.16: the loop may already have queued ``set_result`` of
    the future that the cancellation ends, which fails with InvalidStateError.
    """
    with suppress(*_GONE):
        while True:
            await sink.send(await source.receive())
    for stream in (source, sink):
        with suppress(OSError):
            raw = stream.extra(SocketAttribute.raw_socket)  # noqa: S610 - not of Django
            raw.shutdown(socket.SHUT_RDWR)
