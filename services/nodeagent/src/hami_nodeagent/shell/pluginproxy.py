# SPDX-License-Identifier: Apache-2.0
"""Stands between kubelet and the agent, so that a restart of the agent costs no pod.

Kubelet drops a device plugin in the moment its connection ends, and rejects every pod that asks for
its resource until it registers again; a rejected pod is ``Failed`` for good. This small process
holds kubelet's connections instead. The agent serves on sockets in ``plugin_socket_dir``; for each
of them a socket of the same name is served in kubelet's plugin directory, and every call is handed
on as bytes, unread. While the agent is away, ``ListAndWatch`` streams stay open with the last list,
and calls wait. Away for longer than ``hold_s``, kubelet is told by the end of its streams.

A call that broke off is made again with the metadata key ``hami-repeated-s``, its age; answers
carry the number of kubelet's streams as ``hami-kubelet-streams``, by which a new agent knows that
kubelet still holds its registration. Registering is the agent's own business. Seconds throughout.
"""

import logging
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import grpc
import grpc.aio

from hami_common.errors import SettingsInvalid
from hami_common.runtime.service import ServiceContext, run
from hami_common.runtime.settings import ServiceSettings
from hami_common.runtime.supervise import Supervisor
from hami_common.runtime.tasks import background, finish_within

SERVICE = "plugin-proxy"
REPEATED_S = "hami-repeated-s"
STREAMS = "hami-kubelet-streams"
VERSION = "v1beta1"
"""Of kubelet's protocol."""
KUBELET_SOCKET = "kubelet.sock"
"""Where kubelet takes registrations, in the directory of plugins."""
LIST_AND_WATCH = "/v1beta1.DevicePlugin/ListAndWatch"
REFUSAL = "hami: "
"""How the texts of the agent's own refusals begin: those are final."""
_STOP_S = 1.0
_AGAIN_S = 0.05
_TRANSPORT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
_CHANNEL_OPTIONS = [
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
]

_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[bytes, bytes]
_Unary = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
_Stream = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator may set. Bus and API server are not used."""

    device_plugin_dir: str = "/var/lib/kubelet/device-plugins"
    """Where kubelet looks for plugins."""
    plugin_socket_dir: str = "/run/hami-agent/plugins"
    """Where the agent serves; only the two may reach it."""
    hold_s: float = 60.0
    """How long kubelet is not told that the agent is away."""
    call_wait_s: float = 20.0
    """How long a call of kubelet waits for the agent. Kubelet admits no other pod meanwhile."""
    poll_s: float = 0.05
    """How often sockets are looked at."""


def main(argv: Sequence[str]) -> int:
    """Run the proxy; returns the exit code."""
    return run(serve_proxy, service=SERVICE, settings_type=Settings, argv=argv)


async def serve_proxy(context: ServiceContext[Settings]) -> None:
    """Serve every socket of the agent until asked to stop."""
    settings = context.settings
    make_socket_directory(settings.plugin_socket_dir)
    async with background() as group:
        supervisor = Supervisor(clock=context.clock, registry=context.registry)
        find = partial(_find_endpoints, settings, supervisor, group.start_soon, set())
        group.start_soon(supervisor.keep, "sockets", find)
        context.ready.set()
        await context.stopping.wait()


def make_socket_directory(path: str) -> Path:
    """The directory that proxy and agent share; ``SettingsInvalid`` when it cannot be made."""
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise SettingsInvalid(
            field="plugin_socket_dir",
            problem=f"{directory}: {error.strerror or error}",
            fix="give a directory that proxy and agent share and may write",
        ) from error
    return directory


async def _find_endpoints(
    settings: Settings, supervisor: Supervisor, start: Callable[..., object], known: set[str]
) -> None:
    """Serve each socket of the agent in its own task, which is restarted when it fails."""
    while True:
        for path in _sockets(settings.plugin_socket_dir):  # each is served in a task of its own
            if path.name not in known:
                known.add(path.name)
                offered = Path(settings.device_plugin_dir) / path.name
                start(supervisor.keep, path.stem, Endpoint(path, offered, settings).run)
        await anyio.sleep(settings.poll_s)


def _sockets(directory: str) -> list[Path]:
    return [path for path in Path(directory).glob("*.sock") if identity(path)]


def identity(socket: Path) -> str:
    """Names this very socket; another one after it was created anew, empty when there is none."""
    try:
        status = socket.stat()
    except OSError:
        return ""
    if not stat.S_ISSOCK(status.st_mode):
        return ""
    return f"{status.st_dev:x}-{status.st_ino:x}-{status.st_mtime_ns:x}"


class Endpoint:
    """One plugin: the agent's socket, and the one that kubelet sees."""

    def __init__(self, agent: Path, offered: Path, settings: Settings) -> None:
        """Hand calls at ``offered`` on to ``agent``."""
        self._agent = agent
        self._offered = offered
        self._settings = settings
        self._channel: grpc.aio.Channel
        self.streams = 0
        """ListAndWatch streams that kubelet holds now."""

    async def run(self) -> None:
        """Serve while there is an agent, and for a while when there is none."""
        async with grpc.aio.insecure_channel(
            f"unix:{self._agent}", options=_CHANNEL_OPTIONS
        ) as self._channel:
            while True:
                await self._wait_agent()
                try:
                    reason = await self._serve()
                except (OSError, RuntimeError) as error:
                    reason = str(error)
                    await anyio.sleep(self._settings.poll_s)
                _log.warning(
                    "plugin withdrawn", extra={"plugin": self._offered.name, "reason": reason}
                )

    def _is_agent_there(self) -> bool:
        state = self._channel.get_state(try_to_connect=True)
        return state == grpc.ChannelConnectivity.READY

    async def _wait_agent(self) -> None:
        while True:
            if self._is_agent_there():
                return
            await anyio.sleep(self._settings.poll_s)

    async def _serve(self) -> str:
        """Serve until a new socket is needed or the agent is away for too long; why it ended."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Handler(self),))
        self._offered.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{self._offered}")
        await server.start()
        own = identity(self._offered)
        _log.info("plugin offered", extra={"plugin": self._offered.name})
        try:
            return await self._watch(own)
        finally:
            with finish_within(_STOP_S + 1.0):
                await server.stop(grace=0)
            if identity(self._offered) == own:
                self._offered.unlink(missing_ok=True)

    async def _watch(self, own: str) -> str:
        seen_s = anyio.current_time()
        while True:
            await anyio.sleep(self._settings.poll_s)
            if identity(self._offered) != own:
                return "kubelet removed the socket"
            if self._is_agent_there():
                seen_s = anyio.current_time()
            elif anyio.current_time() - seen_s > self._settings.hold_s:
                return f"no agent for {self._settings.hold_s:g} s"

    async def call(self, method: str, request: bytes, context: _Context) -> bytes:
        """Hand one call on; again when it broke off, until the agent answers or time is up."""
        begun_s = anyio.current_time()
        give_up_s = begun_s + self._settings.call_wait_s
        metadata: tuple[tuple[str, str], ...] = ()
        while True:
            left_s = max(0.1, give_up_s - anyio.current_time())
            call: _Unary = self._channel.unary_unary(method)
            try:
                answer: bytes = await call(
                    request, timeout=left_s, wait_for_ready=True, metadata=metadata
                )
            except grpc.aio.AioRpcError as error:
                text = error.details() or ""
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    away = f"{REFUSAL}agent-away: the agent of this node does not answer"
                    await context.abort(grpc.StatusCode.UNAVAILABLE, away)
                if error.code() not in _TRANSPORT or text.startswith(REFUSAL):
                    await context.abort(error.code(), text)
                _log.warning("call broke off", extra={"method": method, "problem": text})
                await anyio.sleep(_AGAIN_S)
                metadata = ((REPEATED_S, f"{anyio.current_time() - begun_s:.3f}"),)
            else:
                context.set_trailing_metadata(((STREAMS, str(self.streams)),))
                return answer

    async def list_and_watch(self, request: bytes, _: _Context) -> AsyncIterator[bytes]:
        """The agent's lists, one after the other, over as many agents as it takes."""
        self.streams += 1
        lists: _Stream = self._channel.unary_stream(LIST_AND_WATCH)
        sent = b""
        try:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    # Bytes of one call, which are not looked at.
                    async for message in lists(request, wait_for_ready=True):
                        if message != sent:
                            sent = message
                            yield message
                await anyio.sleep(_AGAIN_S)
        finally:
            self.streams -= 1


class _Handler(grpc.GenericRpcHandler):
    """Every method of the service, as bytes."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        method = handler_call_details.method
        if method == LIST_AND_WATCH:
            return grpc.unary_stream_rpc_method_handler(self._endpoint.list_and_watch)

        async def call(request: bytes, context: _Context) -> bytes:
            return await self._endpoint.call(method, request, context)

        return grpc.unary_unary_rpc_method_handler(call)
