# SPDX-License-Identifier: Apache-2.0
"""Proxies kubelet's device plugin calls to the agent, so that an agent restart fails no pod.

Kubelet drops a device plugin as soon as its connection ends, and rejects every pod that requests
its resource until the plugin registers again; a rejected pod stays ``Failed``. This small process
keeps kubelet's connections open instead. The agent serves on sockets in ``plugin_socket_dir``; for
each of them, the proxy serves a socket of the same name in kubelet's plugin directory, and forwards
every call as opaque bytes. While the agent is unavailable, ``ListAndWatch`` streams stay open with
the last list, and calls wait for up to ``call_wait_s``. After ``hold_s`` without the agent, the
proxy ends the streams, which makes kubelet drop the plugin.

An interrupted call is retried with its age in the request metadata ``hami-repeated-s``. Responses
carry the number of kubelet's open streams in the trailing metadata ``hami-kubelet-streams``, which
shows a new agent that kubelet still has its registration. The agent itself registers with kubelet.
Seconds throughout.
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
from hami_common.runtime.footprint import settle
from hami_common.runtime.service import ServiceContext, run
from hami_common.runtime.settings import ServiceSettings
from hami_common.runtime.supervise import Supervisor
from hami_common.runtime.tasks import background, finish_within
from hami_nodeagent.shell.inotify import DirectoryWatch

SERVICE = "plugin-proxy"
REPEATED_S = "hami-repeated-s"
STREAMS = "hami-kubelet-streams"
VERSION = "v1beta1"
"""Version of kubelet's device plugin protocol."""
KUBELET_SOCKET = "kubelet.sock"
"""Kubelet's registration socket in the directory of plugins."""
PLUGIN_SOCKETS = "hami-*.sock"
"""Pattern of our sockets in that directory."""
LIST_AND_WATCH = "/v1beta1.DevicePlugin/ListAndWatch"
REFUSAL = "hami: "
"""Prefix of the agent's own refusals, which are not retried."""
_STOP_S = 1.0
_DIAL_S = 5.0
_AGAIN_S = 0.05
_READY = grpc.ChannelConnectivity.READY
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
    """Settings of the proxy. Bus and API server are not used."""

    device_plugin_dir: str = "/var/lib/kubelet/device-plugins"
    """Kubelet's directory of device plugins."""
    plugin_socket_dir: str = "/run/hami-agent/plugins"
    """Directory of the agent's sockets; only agent and proxy may have access."""
    hold_s: float = 60.0
    """Longest outage of the agent during which kubelet's streams stay open."""
    call_wait_s: float = 20.0
    """Time for which kubelet's call waits for the agent; kubelet admits no other pod meanwhile."""
    poll_s: float = 0.05
    """Interval at which the directories of sockets are read while the kernel reports no changes."""
    leave_with_agent_s: float = 0.0
    """Longest time after SIGTERM in which kubelet is served while the agent answers, because both
    are asked to stop at once and the agent waits for pods (``leave_s``). 0: stop at once."""


def main(argv: Sequence[str]) -> int:
    """Run the proxy; returns the exit code."""
    return run(serve_proxy, service=SERVICE, settings_type=Settings, argv=argv)


async def serve_proxy(context: ServiceContext[Settings]) -> None:
    """Serve every socket of the agent until asked to stop."""
    settings = context.settings
    make_socket_directory(settings.plugin_socket_dir)
    async with background() as group:
        supervisor = Supervisor(clock=context.clock, registry=context.registry)
        watch = DirectoryWatch(
            (settings.plugin_socket_dir, settings.device_plugin_dir),
            clock=context.clock,
            poll_s=settings.poll_s,
        )
        group.start_soon(supervisor.keep, "directories", watch.run)
        endpoints: dict[str, Endpoint] = {}
        find = partial(find_endpoints, settings, watch, supervisor, group.start_soon, endpoints)
        group.start_soon(supervisor.keep, "sockets", find)
        context.ready.set()
        settle()
        await context.stopping.wait()
        with anyio.move_on_after(settings.leave_with_agent_s):
            while any(one.has_agent() for one in endpoints.values()):  # noqa: ASYNC110 - gRPC has no event
                await anyio.sleep(settings.poll_s)


def make_socket_directory(path: str) -> Path:
    """Create the directory that proxy and agent share; ``SettingsInvalid`` if that fails."""
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


async def find_endpoints(
    settings: Settings,
    watch: DirectoryWatch,
    supervisor: Supervisor,
    start: Callable[..., object],
    endpoints: dict[str, "Endpoint"],
) -> None:
    """Serve each socket of the agent in its own task, which is restarted when it fails."""
    while True:
        changed = watch.changed
        for path in _sockets(settings.plugin_socket_dir):  # each is served in a task of its own
            if path.name not in endpoints:
                offered = Path(settings.device_plugin_dir) / path.name
                endpoints[path.name] = Endpoint(path, offered, settings, watch)
                start(supervisor.keep, path.stem, endpoints[path.name].run)
        await watch.wait(changed)


def _sockets(directory: str) -> list[Path]:
    return [path for path in Path(directory).glob("*.sock") if identity(path)]


def identity(socket: Path) -> str:
    """Return an identity that changes when the socket is re-created; empty without a socket."""
    try:
        status = socket.stat()
    except OSError:
        return ""
    if not stat.S_ISSOCK(status.st_mode):
        return ""
    return f"{status.st_dev:x}-{status.st_ino:x}-{status.st_mtime_ns:x}"


async def listens(socket: Path) -> bool:
    """Return whether a process accepts connections on ``socket``."""
    try:
        with anyio.fail_after(_DIAL_S):
            stream = await anyio.connect_unix(socket)
    except (OSError, TimeoutError):
        return False
    await anyio.aclose_forcefully(stream)
    return True


class Endpoint:
    """One plugin: the agent's socket, and the socket that is offered to kubelet."""

    def __init__(
        self, agent: Path, offered: Path, settings: Settings, watch: DirectoryWatch
    ) -> None:
        """Forward calls at ``offered`` to ``agent``; ``watch`` covers the directories of both."""
        self._directories = watch
        self._agent = agent
        self._offered = offered
        self._settings = settings
        self._channel: grpc.aio.Channel
        self._is_served = False
        self.streams = 0
        """ListAndWatch streams that kubelet has open now."""

    async def run(self) -> None:
        """Serve while the agent is connected, and for up to ``hold_s`` of each of its outages."""
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

    def has_agent(self) -> bool:
        """Return whether kubelet is served and the agent is connected."""
        return self._is_served and self._agent_state() == _READY

    def _agent_state(self) -> grpc.ChannelConnectivity:
        """Return the state of the connection to the agent; an idle one is made again."""
        return self._channel.get_state(try_to_connect=True)

    async def _wait_agent(self) -> None:
        # The state is read once per turn: gRPC's own threads change it between two reads.
        while (state := self._agent_state()) != _READY:
            await self._channel.wait_for_state_change(state)

    async def _serve(self) -> str:
        """Serve until kubelet removes the socket or an outage exceeds ``hold_s``; return why."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Handler(self),))
        self._offered.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{self._offered}")
        await server.start()
        own = identity(self._offered)
        _log.info("plugin offered", extra={"plugin": self._offered.name})
        self._is_served = True
        try:
            return await self._watch(own)
        finally:
            self._is_served = False
            with finish_within(_STOP_S + 1.0):
                await server.stop(grace=0)
            if identity(self._offered) == own:
                self._offered.unlink(missing_ok=True)

    async def _watch(self, own: str) -> str:
        """Return why serving must end, once it must."""
        hold_s = self._settings.hold_s
        turned = anyio.Event()
        gone_s: float | None = None

        async def follow_agent(state: grpc.ChannelConnectivity) -> None:
            nonlocal turned
            while True:
                await self._channel.wait_for_state_change(state)
                state = self._agent_state()
                before, turned = turned, anyio.Event()
                before.set()

        async with background() as group:
            # It follows from a state that was read before the loop below reads one: no change
            # between the two is missed.
            group.start_soon(follow_agent, self._agent_state())
            while True:
                changed, event = self._directories.changed, turned
                if identity(self._offered) != own:
                    return "kubelet removed the socket"
                left_s = hold_s
                if self._agent_state() == _READY:
                    gone_s = None
                else:
                    gone_s = anyio.current_time() if gone_s is None else gone_s
                    left_s = gone_s + hold_s - anyio.current_time()
                    if left_s <= 0:
                        return f"no agent for {hold_s:g} s"
                await self._directories.wait(changed, event, most_s=left_s)

    async def call(self, method: str, request: bytes, context: _Context) -> bytes:
        """Forward one call; retry it if interrupted, until an answer or ``call_wait_s`` is over."""
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
        """Yield the agent's device lists across agent restarts, each only if it changed."""
        self.streams += 1
        lists: _Stream = self._channel.unary_stream(LIST_AND_WATCH)
        sent = b""
        try:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    # Opaque bytes of one call, forwarded without decoding.
                    async for message in lists(request, wait_for_ready=True):
                        if message != sent:
                            sent = message
                            yield message
                await anyio.sleep(_AGAIN_S)
        finally:
            self.streams -= 1


class _Handler(grpc.GenericRpcHandler):
    """Routes every method of the service, with requests and responses as bytes."""

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
