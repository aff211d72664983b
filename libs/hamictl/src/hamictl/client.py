# SPDX-License-Identifier: Apache-2.0
"""Reads from the HTTP APIs of registry and scheduler.

The answers' types are this program's own: the fields that it shows, whatever else a newer service
sends. Memory in MiB, compute in percent of one device, times in Unix seconds.
"""

from typing import TypeVar

import aiohttp
import anyio
import msgspec

from hami_common.events.decision import DecisionRecord
from hami_common.model.placement import ContainerShares
from hamictl.errors import Absent, Unreachable

T = TypeVar("T")
TIMEOUT_S = 15.0
_NOT_FOUND = 404
_OK = 200


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node's totals."""

    node: str
    vendors: tuple[str, ...]
    alive: bool
    devices: int
    devices_usable: int
    memory_mib: int
    capacity_mib: int
    booked_mib: int
    allocations: int
    problem: str = ""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device with what is booked on it."""

    node: str
    vendor: str
    uuid: str
    index: int
    type: str
    mode: str
    capacity_mib: int
    booked_mib: int
    capacity_core_pct: int
    booked_core_pct: int
    slots: int
    booked_slots: int
    exclusive: bool
    healthy: bool
    cordoned: bool
    health_reason: str = ""
    numa: int | None = None


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds what."""

    namespace: str
    pod: str
    node: str
    state: str
    allocation_id: str
    ledger_seq: int
    reserved_s: float
    containers: tuple[ContainerShares, ...]
    code: str = ""
    reason: str = ""
    enforcement: str = ""


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """One resource of one queue."""

    queue: str
    depth: int
    resource: str
    used: int
    guaranteed: int
    borrowed: int
    limit: int | None = None
    borrow_weight: int = 1
    waiting: int = 0


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of one ResourceQuota."""

    namespace: str
    quota: str
    key: str
    used: int
    limit: int
    problem: str = ""


class Nodes(msgspec.Struct, frozen=True):
    """Answer of ``/v1/nodes``."""

    items: tuple[Node, ...]


class Devices(msgspec.Struct, frozen=True):
    """Answer of ``/v1/devices``."""

    items: tuple[Device, ...]


class Allocations(msgspec.Struct, frozen=True):
    """Answer of ``/v1/allocations``."""

    items: tuple[Allocation, ...]


class Queues(msgspec.Struct, frozen=True):
    """Answer of ``/v1/queues``."""

    items: tuple[Queue, ...]
    problem: str = ""


class Quotas(msgspec.Struct, frozen=True):
    """Answer of ``/v1/quotas``."""

    items: tuple[Quota, ...]


class Explanation(msgspec.Struct, frozen=True):
    """Answer of ``/v1/explain``."""

    namespace: str
    pod: str
    decisions: tuple[DecisionRecord, ...]
    allocations: tuple[Allocation, ...]


class _Error(msgspec.Struct, frozen=True):
    error: str = ""


def fetch(base: str, path: str, **params: str) -> bytes:
    """The body of a GET; ``Absent`` for 404, ``Unreachable`` with the reason otherwise."""
    return anyio.run(_fetch, base, path, params)


def read(kind: type[T], base: str, path: str, **params: str) -> T:
    """The same, decoded."""
    body = fetch(base, path, **params)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        message = f"{base}{path}: the answer is not what this program reads: {error}"
        raise Unreachable(message) from error


async def _fetch(base: str, path: str, params: dict[str, str]) -> bytes:
    wanted = {name: value for name, value in params.items() if value}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{base.rstrip('/')}{path}", params=wanted) as answer,
        ):
            body = await answer.read()
            status = answer.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        message = f"{base} does not answer: {str(error) or type(error).__name__}"
        raise Unreachable(message) from error
    if status == _OK:
        return body
    try:
        told = msgspec.json.decode(body, type=_Error).error
    except msgspec.DecodeError:
        told = ""
    text = told or f"{base}{path}: HTTP {status}"
    raise Absent(text) if status == _NOT_FOUND else Unreachable(text)
