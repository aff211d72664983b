# SPDX-License-Identifier: Apache-2.0
"""Follows objects of an API group that may be missing in the cluster, and reconciles them.

One replica does this (``Leader``), and without the group's kinds nothing happens. The owner reads
each event, and has a round at each change, at most one interval after the last. Seconds throughout.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

import anyio
import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.bounds import Word
from hami_common.errors import Denied, HamiError, NotFound, Unavailable
from hami_common.events.codec import decode
from hami_common.ports import KubeApi, WatchEvent
from hami_core.planning.conditions import kube_time
from hami_scheduler.settings import HoldSettings, Settings
from hami_scheduler.shell.bounded import answer_within, until_set
from hami_scheduler.shell.feed import NODES
from hami_scheduler.shell.leader import Leader
from hami_scheduler.shell.podapi import bare_pod
from hami_scheduler.shell.state import State

FIELD_MANAGER: Final = "hami-placement"
APPLY: Final = "application/apply-patch+yaml"
CORE: Final = {"nodes": NODES, "podtemplates": "/api/v1/podtemplates"}
"""Paths of followed kinds that every cluster has."""

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class _Resource(Struct, frozen=True):
    name: Word = ""


class _Resources(Struct, frozen=True):
    """``APIResourceList`` of one version."""

    resources: list[_Resource] = []


class Followed(Struct, frozen=True, kw_only=True):
    """The objects to follow."""

    group: str
    versions: tuple[str, ...]
    """The first of them that serves the kinds is used."""
    kinds: tuple[str, ...]
    """Plural names, of the group or of ``CORE``."""
    isolation: str
    """Kind under which unreadable objects are kept apart, see ``isolation``."""


class Reconciler(Protocol):
    """The part that knows the objects."""

    def forget(self) -> None:
        """Forget all objects, because they are listed again."""

    def take(self, kind: str, event: WatchEvent) -> None:
        """Read one event; errors are kept apart by the follower."""

    def listed(self) -> None:
        """Note that a kind was listed as a whole."""

    async def round(self, *, is_synced: bool) -> None:
        """Reconcile; ``is_synced``: every kind was listed."""


class Follower:
    """Watches of the kinds that one reconciler needs."""

    def __init__(
        self,
        reconciler: Reconciler,
        followed: Followed,
        *,
        state: State,
        kube: KubeApi,
        settings: Settings,
        options: HoldSettings,
        writer: str,
    ) -> None:
        """Follow objects for ``reconciler``; ``writer`` names this replica in the election."""
        self._reconciler = reconciler
        self._group = followed.group
        self._versions = followed.versions
        self._kinds = followed.kinds
        self._isolation = followed.isolation
        self._state = state
        self._kube = kube
        self._leader = Leader(
            kube,
            clock=state.clock,
            namespace=options.namespace,
            name=options.lease_name,
            identity=writer,
            lease_s=options.leader_lease_s,
        )
        self._timeout_s = settings.api_timeout_s
        self._discovery_s = options.discovery_s
        self._tick_s = settings.tick_s
        self._clock = state.clock
        self._synced: set[str] = set()
        self._wake = anyio.Event()
        self._is_complaining = False
        self.version = ""

    async def work(self) -> None:
        """Follow while this replica leads; indefinitely."""
        await self._leader.lead(self._serve)

    async def _serve(self) -> None:
        """Serve whenever the group's kinds exist; wait and try again otherwise."""
        while True:
            try:
                self.version = await self._discover()
                if self.version:
                    await self._follow()
            except (NotFound, Denied, Unavailable) as error:
                level = logging.DEBUG if self._is_complaining else logging.WARNING
                self._is_complaining = True
                _log.log(
                    level,
                    "objects not followed",
                    extra={"group": self._group, "problem": str(error)},
                )
            await self._clock.sleep(self._discovery_s)

    async def _discover(self) -> str:
        """Return the version of the group to use; empty while it lacks kinds that we read."""
        for version in self._versions:
            try:
                with answer_within(self._timeout_s, peer="API server"):
                    raw = await self._kube.get(api_path("apis", self._group, version))
            except NotFound:
                continue
            kinds = decode(raw, _Resources, what=f"kinds of {self._group}").resources
            if {one.name for one in kinds} >= set(self._kinds) - CORE.keys():
                return version
        return ""

    async def _until_gone(self) -> None:
        """Return when the group's kinds were removed."""
        while True:
            await self._clock.sleep(self._discovery_s)
            try:
                if await self._discover() != self.version:
                    return
            except HamiError as error:
                _log.debug("kinds unknown", extra={"group": self._group, "problem": str(error)})

    async def _follow(self) -> None:
        """Watch and reconcile while the kinds exist; an error of a watch is raised."""
        self._synced, self._wake = set(), anyio.Event()
        self._reconciler.forget()
        failures: list[HamiError] = []
        async with anyio.create_task_group() as group:

            async def until_over(run: Callable[[], Awaitable[None]]) -> None:
                try:
                    await run()
                except HamiError as error:
                    failures.append(error)
                group.cancel_scope.cancel()

            for kind in self._kinds:
                group.start_soon(until_over, partial(self._watch, kind))
            group.start_soon(until_over, self._until_gone)
            group.start_soon(self._reconcile)
        if failures:
            raise failures[0]

    async def _watch(self, kind: str) -> None:
        async with self._kube.list_watch(CORE.get(kind) or self.path(kind)) as events:
            async for event in events:
                if event.type == "SYNCED":
                    self._synced.add(kind)
                    self._is_complaining = False
                    self._reconciler.listed()
                else:
                    name = bare_pod(event.raw)
                    await self._state.quarantine.run(
                        self._isolation,
                        f"{kind}/{name.metadata.namespace}/{name.metadata.name}",
                        partial(self._take, kind, event),
                        name=name.names(),
                        size_bytes=len(event.raw),
                        is_retried=False,  # the next version of the object is read
                    )
                self._wake.set()

    def _take(self, kind: str, event: WatchEvent) -> None:
        self._reconciler.take(kind, event)

    async def _reconcile(self) -> None:
        while True:
            if self._wake.is_set():
                self._wake = anyio.Event()
            await self._reconciler.round(is_synced=self._synced >= set(self._kinds))
            await until_set(self._wake, self._clock, at_most_s=self._tick_s)

    def path(self, kind: str, *names: str) -> str:
        """Return the path of a kind of the group, or of an object; ``names``: namespace and name.

        An object without a namespace has its name only.
        """
        where = ("namespaces", names[0]) if len(names) > 1 else ()
        return api_path("apis", self._group, self.version, *where, kind, *names[-1:])

    async def apply_status(
        self,
        path: str,
        kind: str,
        metadata: Mapping[str, str],
        status: Mapping[str, Any],
    ) -> None:
        """Write our part of an object's status by server-side apply.

        ``metadata``: its name, and what the object must still be.
        """
        document = {
            "apiVersion": f"{self._group}/{self.version}",
            "kind": kind,
            "metadata": metadata,
            "status": status,
        }
        with answer_within(self._timeout_s, peer="API server"):
            await self._kube.patch(
                f"{path}/status?fieldManager={FIELD_MANAGER}&force=true",
                _encoder.encode(document),
                content_type=APPLY,
            )

    def now(self) -> str:
        """Return the time as Kubernetes writes it."""
        return kube_time(self._clock.now_s())
