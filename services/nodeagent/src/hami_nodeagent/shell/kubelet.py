# SPDX-License-Identifier: Apache-2.0
"""Keeps one device plugin served and registered, whatever kubelet does.

A cycle is: wait for ids to announce and for kubelet's socket, serve, dial our own socket, register,
then watch. It ends, and the next begins, when kubelet's socket is another one (kubelet restarted:
it removes all plugin sockets first), when our own socket vanished, or when kubelet holds no
ListAndWatch stream although it took our registration. The old server is stopped before the next
starts, because kubelet drops whatever is registered when an old stream ends.

Where a plugin proxy stands between, the plugin is served to the proxy, which serves kubelet; an
agent that finds kubelet's stream still held there does not register again.

Before it registers, a plugin checks whether kubelet already has healthy ids of its resource: then
another plugin owns the resource, and to take it away would break that one's pods. Ids in our form
may be left from our own stream, which kubelet drops in a moment; those of NVIDIA's device plugin
with time slicing have this form too, and stay.

Kubelet lets a plugin that registers later take a resource over, and does not report it: the older
stream stays open. So kubelet's healthy ids are compared with those that were sent. While they
differ, the vendor is not offered to the scheduler. When kubelet has none left, because the other
plugin ended, ours registers again. Kubelet 1.37 keeps the ids of a plugin that ended beside another
one of its resource until kubelet or our plugin restarts, so there the vendor is offered after that.
Outside document: k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1. Seconds throughout.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import grpc
import grpc.aio

from hami_common.errors import Denied, HamiError, Unavailable
from hami_common.kubeletapi import deviceplugin as api
from hami_common.kubeletapi import deviceplugin_grpc
from hami_common.runtime.tasks import Backoff, finish_within
from hami_nodeagent.shell.deviceplugin import DevicePlugin
from hami_nodeagent.shell.inotify import DirectoryWatch
from hami_nodeagent.shell.pluginproxy import (
    KUBELET_SOCKET,
    STREAMS,
    VERSION,
    identity,
    listens,
    make_socket_directory,
)
from hami_nodeagent.shell.podresources import PodResources
from hami_nodeagent.shell.site import Site

PEER = "kubelet"
DIAL_S = 5.0
STREAM_S = 3.0
"""Time after a registration within which kubelet must open its stream, in seconds."""
STOP_S = 2.0
_LOOKS = 3
"""Consecutive checks that must agree before a difference counts: kubelet may lag behind a list."""
_LOOK_AGAIN_S = 1.0
_FOREIGN_S = 1.0
"""Time in which kubelet drops the ids of a stream of ours that ended, in seconds."""
_LISTENS_S = 0.02
"""Interval between attempts at kubelet's socket while kubelet does not run, in seconds."""

_log = logging.getLogger(__name__)
_CLIENT_OPTIONS = [
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    # gRPC's default backoff of 1 s would use up the time that a started kubelet leaves us to
    # register before it rejects pods.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
]


class PluginKeeper:
    """One plugin's life with kubelet."""

    def __init__(
        self,
        *,
        site: Site,
        plugin: DevicePlugin,
        pod_resources: PodResources,
        directory: DirectoryWatch,
    ) -> None:
        """``directory`` watches kubelet's directory of plugins."""
        self._directory = directory
        path = Path(site.settings.device_plugin_dir)
        self._plugin = plugin
        self._kubelet = path / KUBELET_SOCKET
        self._socket = path / f"hami-{plugin.name}.sock"
        """Socket that kubelet connects to."""
        self._own = self._socket
        """Socket that this plugin serves: the same, or the one that the proxy connects to."""
        if site.settings.plugin_socket_dir:
            agent_dir = make_socket_directory(site.settings.plugin_socket_dir)
            self._own = agent_dir / self._socket.name
        self._site = site
        self._picture = site.picture
        self._pod_resources = pod_resources
        self._clock = site.clock
        self._metrics = site.metrics
        self._quarantine = site.quarantine
        self._poll_s = site.settings.kubelet_poll_s
        self._is_dropped = False
        """Kubelet dropped the plugin although its stream is open, also the proxy's."""
        self.registered_count = 0

    async def run(self) -> None:
        """Register with kubelet and serve it until cancelled."""
        backoff = Backoff(first_s=self._poll_s, most_s=10.0)
        while True:
            cycle = partial(self._cycle, backoff)
            if not await self._quarantine.run(
                "plugin", self._plugin.resource, cycle, is_retried=False
            ):
                self._count("failed")
                await backoff.wait()

    async def _cycle(self, backoff: Backoff) -> None:
        """Serve, register and watch once; errors of kubelet are waited for here."""
        await self._wait_devices()
        run = await self._wait_kubelet()
        self._meet(run)
        try:
            async with self._served() as is_known:
                if is_known and not self._is_dropped:
                    self._count("kept")
                else:
                    await self._register()
                backoff.reset()
                self._quarantine.forget("plugin", self._plugin.resource)
                reason = await self._watch(run)
            _log.info(
                "registering again", extra={"resource": self._plugin.resource, "reason": reason}
            )
        except HamiError as error:
            outcome = "foreign" if isinstance(error, Denied) else "failed"
            self._count(outcome)
            _log.warning(
                "not registered with kubelet",
                extra={"resource": self._plugin.resource, "problem": str(error)},
            )
            await backoff.wait()

    async def _wait_devices(self) -> None:
        """A resource without any id is not registered: the node may belong to another plugin."""
        while True:
            changed = self._picture.changed
            if self._picture.splits(self._plugin.vendor, self._plugin.resource).all:
                return
            await changed.wait()

    async def _wait_kubelet(self) -> str:
        """Wait until kubelet listens.

        It rejects what it finds to be admitted before we have registered, about a second after it
        made its socket. A socket file alone may be one that outlived a reboot.
        """
        while True:
            changed = self._directory.changed
            run = identity(self._kubelet)
            if not run:
                await self._directory.wait(changed)
            elif await listens(self._kubelet):
                return run
            else:
                await anyio.sleep(min(self._poll_s, _LISTENS_S))

    def _meet(self, run: str) -> None:
        """Take note of kubelet's run before it can call us."""
        view = self._picture.view
        if view.kubelet == run:
            return
        if view.kubelet:
            _log.info("kubelet restarted")
            # Its version is read again; until then its list is trusted less.
            view.lists_active_only = False
        view.kubelet = run
        self._pod_resources.forget_settled()
        self._picture.note_change()

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[bool]:
        """Serve, and prove it by a call on kubelet's way; yields whether kubelet knows us still."""
        server = grpc.aio.server()
        deviceplugin_grpc.add_DevicePluginServicer_to_server(self._plugin, server)
        try:
            self._own.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{self._own}")
            await server.start()
        except (RuntimeError, OSError) as error:
            raise Unavailable(peer=str(self._own), detail=str(error)) from error
        own = identity(self._own)
        try:
            yield await self._dial_own()
        finally:
            with finish_within(STOP_S + 1.0):
                await server.stop(grace=0 if self._plugin.stream_count else None)
            if identity(self._own) == own:
                self._own.unlink(missing_ok=True)

    async def _dial_own(self) -> bool:
        """Call ourselves as kubelet would; whether the proxy says that kubelet listens to us."""
        async with grpc.aio.insecure_channel(
            f"unix:{self._socket}", options=_CLIENT_OPTIONS
        ) as channel:
            stub = deviceplugin_grpc.DevicePluginStub(channel)
            call = stub.GetDevicePluginOptions(api.Empty(), timeout=DIAL_S, wait_for_ready=True)
            try:
                await call
                trailing = dict(await call.trailing_metadata())
            except grpc.aio.AioRpcError as error:
                raise Unavailable(peer=str(self._socket), detail=str(error.details())) from error
        return str(trailing.get(STREAMS, "0")) != "0"

    async def _register(self) -> None:
        await self._refuse_foreign()
        request = api.RegisterRequest(
            version=VERSION,
            endpoint=self._socket.name,
            resource_name=self._plugin.resource,
            options=self._plugin.options,
        )
        async with grpc.aio.insecure_channel(
            f"unix:{self._kubelet}", options=_CLIENT_OPTIONS
        ) as channel:
            stub = deviceplugin_grpc.RegistrationStub(channel)
            try:
                await stub.Register(request, timeout=DIAL_S)
            except grpc.aio.AioRpcError as error:
                raise Unavailable(
                    peer=PEER, detail=f"Register: {error.code().name} {error.details()}"
                ) from error
        self.registered_count += 1
        self._is_dropped = False
        self._count("registered")
        _log.info(
            "registered with kubelet",
            extra={"resource": self._plugin.resource, "endpoint": self._socket.name},
        )

    async def _refuse_foreign(self) -> None:
        splits = self._picture.splits(self._plugin.vendor, self._plugin.resource)
        deadline_s = self._clock.monotonic_s() + _FOREIGN_S
        while True:
            served = await self._pod_resources.healthy_ids(
                self._plugin.resource, timeout_s=_FOREIGN_S
            )
            if not served:
                return
            foreign = sorted(one for one in served if not splits.owns(one))
            if foreign or self._clock.monotonic_s() >= deadline_s:
                example = (foreign or sorted(served))[0]
                raise Denied(
                    peer=PEER,
                    detail=f"another device plugin serves {self._plugin.resource} on this node, "
                    f"for example id {example!r}; remove that plugin or give our resource another "
                    "name",
                )
            await anyio.sleep(self._poll_s)

    async def _watch(self, run: str) -> str:
        """Return, with the reason, once a new cycle is needed."""
        own = identity(self._socket)
        silent_since_s = self._clock.monotonic_s()
        looks: list[frozenset[str]] = []
        while True:
            changed, silent = self._directory.changed, self._plugin.silent
            if identity(self._kubelet) != run:
                return "kubelet's socket is another one"
            if identity(self._socket) != own:
                return "our socket was removed"
            if self._plugin.stream_count:
                if await self._is_lost(looks):
                    self._is_dropped = True
                    return "kubelet dropped our devices"
                check_s = self._site.settings.check_s
                await self._directory.wait(
                    changed, silent, most_s=min(check_s, _LOOK_AGAIN_S) if looks else check_s
                )
                silent_since_s = self._clock.monotonic_s()
            elif self._clock.monotonic_s() - silent_since_s > STREAM_S:
                return "kubelet left"
            else:
                await anyio.sleep(self._poll_s)

    async def _is_lost(self, looks: list[frozenset[str]]) -> bool:
        """Return whether kubelet has none of the healthy ids that it was sent.

        If it has other ids, note that another plugin displaced ours. ``looks``: earlier answers
        that differed from what was sent.
        """
        sent = self._plugin.sent
        healthy = await self._pod_resources.healthy_ids(self._plugin.resource, timeout_s=_FOREIGN_S)
        if sent is None or healthy is None:
            return False
        if healthy == frozenset(split.id for split in sent.all if split.healthy):
            looks.clear()
            if self._plugin.is_displaced:
                self._plugin.displaced(is_displaced=False)
            return False
        if looks and looks[-1] != healthy:
            looks.clear()
        looks.append(healthy)
        if len(looks) < _LOOKS:
            return False
        del looks[:-_LOOKS]
        if healthy and not self._plugin.is_displaced:
            self._count("foreign")
            _log.error(
                "another device plugin took the resource over",
                extra={"resource": self._plugin.resource, "example_id": min(healthy)},
            )
            self._plugin.displaced(is_displaced=True)
        return not healthy

    def _count(self, outcome: str) -> None:
        self._metrics.registrations.labels(resource=self._plugin.resource, outcome=outcome).inc()
