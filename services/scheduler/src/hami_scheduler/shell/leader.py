# SPDX-License-Identifier: Apache-2.0
"""Elects one replica by a Lease of the Kubernetes API, for work that must run once per cluster.

Outside document: ``coordination.k8s.io/v1`` Lease. The holder renews the Lease several times in its
duration, and stops its work when it could not renew for two thirds of it. Another replica takes the
Lease that it saw unchanged for its whole duration by its own clock, so clocks of two machines are
never compared. Two holders may overlap briefly: the ledger's fences keep their work correct.
Seconds throughout.
"""

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import anyio
import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.bounds import SignedInt32, Word
from hami_common.errors import Conflict, HamiError, NotFound
from hami_common.events.codec import decode
from hami_common.ports import Clock, KubeApi
from hami_scheduler.shell.bounded import answer_within

RENEWALS = 5
"""Renewals in the duration of a Lease."""

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class _Metadata(Struct, frozen=True, kw_only=True, rename="camel"):
    resource_version: Word = ""


class _Spec(Struct, frozen=True, kw_only=True, rename="camel"):
    holder_identity: Word | None = None
    acquire_time: Word | None = None
    lease_transitions: SignedInt32 | None = None


class _Lease(Struct, frozen=True, kw_only=True):
    metadata: _Metadata = _Metadata()
    spec: _Spec = _Spec()


class Leader:
    """One replica's part in the election of one Lease."""

    def __init__(
        self,
        kube: KubeApi,
        *,
        clock: Clock,
        namespace: str,
        name: str,
        identity: str,
        lease_s: float,
    ) -> None:
        """Hold ``namespace/name`` as ``identity``, which no other running process uses."""
        self._kube = kube
        self._clock = clock
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._lease_s = lease_s
        self._seen: tuple[str, float] = ("", 0.0)
        """Version of the Lease of another replica, and the time at which it was first seen."""
        self.is_leader = False

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` whenever this replica holds the Lease; cancel it when that is lost.

        Runs indefinitely; an error of ``work`` ends the call.
        """
        while True:
            while not await self._try():
                await self._clock.sleep(self._lease_s / 3)
            _log.info("leadership acquired", extra={"lease": self._name})
            self.is_leader = True
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._until_lost, group.cancel_scope)
                    await work()
                    group.cancel_scope.cancel()
            finally:
                self.is_leader = False
            _log.warning("leadership lost", extra={"lease": self._name})

    async def _until_lost(self, scope: anyio.CancelScope) -> None:
        renewed_s = self._clock.monotonic_s()
        while self._clock.monotonic_s() - renewed_s < self._lease_s * 2 / 3:
            await self._clock.sleep(self._lease_s / RENEWALS)
            if await self._try():
                renewed_s = self._clock.monotonic_s()
        scope.cancel()

    async def _try(self) -> bool:
        """Take or renew the Lease; returns whether this replica holds it."""
        try:
            with answer_within(self._lease_s / RENEWALS, peer="API server"):
                return await self._take()
        except HamiError as error:
            if not isinstance(error, Conflict):  # another replica was faster
                _log.warning(
                    "lease not renewed", extra={"lease": self._name, "problem": str(error)}
                )
            return False

    async def _take(self) -> bool:
        collection = api_path(
            "apis", "coordination.k8s.io", "v1", "namespaces", self._namespace, "leases"
        )
        path = f"{collection}/{self._name}"
        try:
            lease = decode(await self._kube.get(path), _Lease, what=f"lease {self._name}")
        except NotFound:
            await self._kube.create(collection, self._document(_Lease()))
            return True
        holder, version = lease.spec.holder_identity or "", lease.metadata.resource_version
        if holder not in ("", self._identity):
            now_s = self._clock.monotonic_s()
            if self._seen[0] != version:
                self._seen = (version, now_s)
            if now_s - self._seen[1] < self._lease_s:
                return False
        await self._kube.replace(path, self._document(lease))
        return True

    def _document(self, before: _Lease) -> bytes:
        moment = datetime.fromtimestamp(self._clock.now_s(), tz=UTC)
        now = moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_new = before.spec.holder_identity != self._identity
        metadata = {"name": self._name, "namespace": self._namespace}
        if before.metadata.resource_version:
            metadata["resourceVersion"] = before.metadata.resource_version
        return _encoder.encode(
            {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": metadata,
                "spec": {
                    "holderIdentity": self._identity,
                    "leaseDurationSeconds": max(1, round(self._lease_s)),
                    "acquireTime": now if is_new else before.spec.acquire_time or now,
                    "renewTime": now,
                    "leaseTransitions": (before.spec.lease_transitions or 0) + is_new,
                },
            }
        )
