# SPDX-License-Identifier: Apache-2.0
"""The Lease as a holder writes it."""

from typing import Any

import anyio
import msgspec
import pytest

from hami_common.errors import Conflict, NotFound
from hami_scheduler.shell.leader import RENEWALS, Leader
from tests.unit.scheduler.shell.world import HandClock, quiet

pytestmark = pytest.mark.anyio
LEASE_S = 15.0


class Kube:
    """An API server with one Lease."""

    def __init__(self) -> None:
        self.lease: Any = None

    async def get(self, path: str) -> bytes:
        if self.lease is None:
            raise NotFound(what=path)
        return msgspec.json.encode(self.lease)

    async def create(self, path: str, body: bytes) -> bytes:
        del path
        return self._store(msgspec.json.decode(body), "")

    async def replace(self, path: str, body: bytes) -> bytes:
        document = msgspec.json.decode(body)
        if document["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict(what=path)
        return self._store(document, document["metadata"]["resourceVersion"])

    def _store(self, document: Any, before: str) -> bytes:
        document["metadata"]["resourceVersion"] = f"{before}i"
        self.lease = document
        return b"{}"


async def test_lease_states_since_when_its_holder_has_it() -> None:
    clock, kube = HandClock(), Kube()
    anything: Any = kube
    leaders = [
        Leader(anything, clock=clock, namespace="ns", name="hami-x", identity=name, lease_s=LEASE_S)
        for name in ("a", "b")
    ]
    async with anyio.create_task_group() as group:
        group.start_soon(leaders[0].lead, anyio.sleep_forever)
        await quiet()
        first = kube.lease["spec"]
        assert (first["holderIdentity"], first["acquireTime"]) == ("a", first["renewTime"])
        await clock.advance(LEASE_S / RENEWALS)
        await quiet()
        renewed = kube.lease["spec"]
        assert renewed["acquireTime"] == first["acquireTime"] < renewed["renewTime"]
        group.cancel_scope.cancel()
    async with anyio.create_task_group() as group:
        group.start_soon(leaders[1].lead, anyio.sleep_forever)
        for _ in range(5):
            await quiet()
            await clock.advance(LEASE_S / 2)
        taken = kube.lease["spec"]
        assert (taken["holderIdentity"], taken["leaseTransitions"]) == ("b", 2)
        assert taken["acquireTime"] > renewed["renewTime"]
        group.cancel_scope.cancel()
