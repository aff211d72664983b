# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims at the API server: reads and writes them, each call bounded in time.

Seconds throughout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hami_common.apipath import api_path
from hami_common.dra.claims import ResourceClaim, shown_amounts
from hami_common.dra.names import BOOKED, DRIVER, GROUP, VERSION
from hami_common.errors import NotFound
from hami_common.events.codec import decode
from hami_common.model.placement import ContainerShares
from hami_common.ports import KubeApi
from hami_core.ledger.podclaim import StoredClaim
from hami_core.planning.conditions import Condition
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.podapi import LIST_TIMEOUTS

CLAIMS = api_path("apis", GROUP, VERSION, "resourceclaims")
_IDENTITY = ("driver", "pool", "device", "shareID")
_Change = Callable[[dict[str, Any]], None]
"""Changes one entry of ``status.devices`` in place."""
"""Fields that name an allocated device in the status of a claim."""


class _List(msgspec.Struct, frozen=True, kw_only=True):
    items: list[msgspec.Raw] | None = None


class ClaimApi:
    """Calls to the API server about claims."""

    def __init__(self, kube: KubeApi, *, settings: Settings) -> None:
        """Read and write claims with ``kube``."""
        self._kube = kube
        self._settings = settings

    async def get(self, namespace: str, name: str) -> ResourceClaim | None:
        """Return the claim as the API server has it now, ``None`` when it does not exist."""
        stored = await self.read(namespace, name)
        return None if stored is None else stored.claim

    async def read(self, namespace: str, name: str) -> StoredClaim | None:
        """Return as ``get``, with what a write must keep."""
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            try:
                raw = await self._kube.get(_path(namespace, name))
            except NotFound:
                return None
        return StoredClaim.of(raw)

    async def create(self, namespace: str, document: bytes) -> StoredClaim:
        """Create a claim. ``Conflict``: one of this name exists."""
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            return StoredClaim.of(await self._kube.create(_path(namespace), document))

    async def patch(
        self, claim: ResourceClaim, document: bytes, *, subresource: str = ""
    ) -> StoredClaim:
        """Merge ``document`` into the claim; ``Conflict`` unless it is still this version."""
        path = _path(claim.namespace, claim.metadata.name, *([subresource] if subresource else ()))
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            return StoredClaim.of(await self._kube.patch(path, document))

    async def report(self, claim: ResourceClaim, condition: Condition) -> bool:
        """Write the condition ``BOOKED`` to the devices of ours that are allocated to the claim.

        Returns whether this call wrote it: not if another replica wrote a condition with the same
        status and reason, nor if the allocation is another one by now. ``Conflict``: the claim
        changed meanwhile. ``Denied``: the account lacks ``patch`` on ``resourceclaims/status``, or
        ``arbitrary-node:patch`` on ``resourceclaims/driver`` for the driver.
        """

        def change(entry: dict[str, Any]) -> None:
            others = [one for one in entry.get("conditions") or () if one.get("type") != BOOKED]
            entry["conditions"] = [*others, msgspec.to_builtins(condition)]

        def changed(fresh: ResourceClaim) -> _Change | None:
            known = fresh.verdict()
            is_known = (known.status, known.reason) == (condition.status, condition.reason)
            return None if is_known else change

        return await self._patch_status(claim, changed)

    async def show(self, claim: ResourceClaim, containers: Sequence[ContainerShares]) -> bool:
        """Write the amounts in force into ``status.devices[].data`` of the devices of ours.

        ``containers``: the ledger's shares, by request. Returns whether this call wrote them: not
        if the status has them, nor if the allocation is another one by now. Errors as of
        ``report``.
        """

        def changed(fresh: ResourceClaim) -> _Change | None:
            amounts = shown_amounts(fresh, containers)

            def change(entry: dict[str, Any]) -> None:
                key = (entry["pool"], entry["device"], entry.get("shareID"))
                if key in amounts:
                    entry["data"] = amounts[key]

            return change if amounts else None

        return await self._patch_status(claim, changed)

    async def _patch_status(
        self, claim: ResourceClaim, changed: Callable[[ResourceClaim], _Change | None]
    ) -> bool:
        """Patch the devices of ours, unless the claim has another allocation by now.

        ``changed`` returns the change of each device's entry; ``None``: none is needed.
        """
        path = _path(claim.namespace, claim.metadata.name)
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            try:
                raw = await self._kube.get(path)
            except NotFound:
                return False
            fresh = read_claim(raw)
            is_same = fresh.uid == claim.uid and fresh.allocation_id() == claim.allocation_id()
            change = changed(fresh) if is_same else None
            if change is None:
                return False
            await self._kube.patch(f"{path}/status", _reporting(raw, change))
        return True

    async def list_all(self) -> list[msgspec.Raw]:
        """Return all claims as documents; none where the cluster has no such kind."""
        with answer_within(LIST_TIMEOUTS * self._settings.api_timeout_s, peer="API server"):
            try:
                pages = await self._kube.list_pages(CLAIMS, page_size=self._settings.list_page_size)
            except NotFound:
                return []
        return [item for page in pages for item in decode(page, _List, what="claims").items or ()]


def _path(namespace: str, *names: str) -> str:
    return api_path("apis", GROUP, VERSION, "namespaces", namespace, "resourceclaims", *names)


def _reporting(raw: bytes, change: _Change) -> bytes:
    """Return the patch that changes the status of our devices and leaves all others as they are.

    A merge patch replaces the list of devices as a whole; the resource version ensures that no
    other writer's entry is lost.
    """
    document: dict[str, Any] = msgspec.json.decode(raw)
    status = document["status"]
    devices: list[dict[str, Any]] = list(status.get("devices") or ())
    known = {_identity(one): one for one in devices}
    for result in status["allocation"]["devices"]["results"]:
        if result["driver"] != DRIVER:
            continue
        entry = known.get(_identity(result))
        if entry is None:
            entry = {key: result[key] for key in _IDENTITY if key in result}
            devices.append(entry)
        change(entry)
    version = document["metadata"].get("resourceVersion", "")
    patch = {"metadata": {"resourceVersion": version}, "status": {"devices": devices}}
    return msgspec.json.encode(patch)


def _identity(one: dict[str, Any]) -> tuple[object, ...]:
    return tuple(one.get(key) for key in _IDENTITY)


def read_claim(raw: bytes | msgspec.Raw) -> ResourceClaim:
    """Decode a claim; ``WireInvalid`` names the field that cannot be read."""
    return decode(bytes(raw), ResourceClaim, what="ResourceClaim")
