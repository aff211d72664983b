# SPDX-License-Identifier: Apache-2.0
"""Calls the HTTP APIs of registry and scheduler.

The Structs declare the fields that are printed; additional fields of a newer service are ignored.
Memory in MiB, compute in percent of one device, times in Unix seconds.
"""

from typing import Any, TypeVar

import aiohttp
import anyio
import msgspec

from hami_common.events.allocation import CLAIM
from hami_common.events.codec import UNDECODABLE
from hami_common.events.decision import DecisionRecord
from hami_common.model.isolation import BOOKED, Isolation
from hami_common.model.placement import ContainerShares
from hami_common.model.quarantine import QuarantinedObject
from hamictl import credentials
from hamictl.errors import Absent, Refused, Unreachable

T = TypeVar("T")
TIMEOUT_S = 15.0
LONG_S = 60.0
"""Timeout of requests that wait for a node."""
_NOT_FOUND = 404
_NO = (400, 401, 403, 409, 422)
_OK = 200


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one node."""

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
    """One device and its bookings."""

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
    foreign_mib: int = 0
    burst_mib: int = 0
    healthy: bool
    cordoned: bool
    health_reason: str = ""
    numa: int | None = None
    isolation: Isolation = BOOKED
    overcommit: str = ""


class NamedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One placement policy."""

    name: str
    node: str
    device: tuple[str, ...]
    weights: dict[str, int]


class CanaryRollback(msgspec.Struct, frozen=True, kw_only=True):
    """Rollback of a canary policy."""

    time_s: float
    reason: str
    writer: str = ""


class CanaryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the canary's pods, or of its control group."""

    pods: int
    refused_pct: float
    refusals_per_min: float
    wait_p95_s: float
    packing_pct: float | None


class CanaryVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Newest evaluation of a canary."""

    canary: CanaryFigures
    control: CanaryFigures
    is_decidable: bool


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """State of the canary."""

    definition: dict[str, Any]
    digest: str
    state: str
    rollback: CanaryRollback | None
    verdict: CanaryVerdict | None


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    """The policies file as a scheduler applies it."""

    file: str
    problem: str
    default: NamedPolicy
    items: tuple[NamedPolicy, ...]
    canary: Canary | None


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one pod, or of one ResourceClaim."""

    namespace: str
    pod: str
    pod_uid: str = ""
    node: str
    state: str
    allocation_id: str
    ledger_seq: int
    reserved_s: float
    containers: tuple[ContainerShares, ...]
    state_s: float = 0.0
    code: str = ""
    reason: str = ""
    enforcement: str = ""
    origin: str = ""
    claim: str = ""
    """ResourceClaim through which the pod gets its shares."""
    sku: str = ""
    service_class: str = msgspec.field(default="", name="class")

    @property
    def holder(self) -> str:
        """Name of the pod, or of the claim with a mark."""
        if self.origin == CLAIM:
            return f"{self.pod} (claim)"
        return f"{self.pod} (claim {self.claim})" if self.claim else self.pod


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
    """Response of ``/v1/nodes``."""

    items: tuple[Node, ...]


class Devices(msgspec.Struct, frozen=True):
    """Response of ``/v1/devices``."""

    items: tuple[Device, ...]


class Allocations(msgspec.Struct, frozen=True):
    """Response of ``/v1/allocations``."""

    items: tuple[Allocation, ...]


class QuarantinedObjects(msgspec.Struct, frozen=True):
    """Response of ``/v1/quarantine``."""

    items: tuple[QuarantinedObject, ...]


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Expected time until a pod starts."""

    wait_s: float | None
    basis: str
    served: int
    window_s: float


class WaitingPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that waits, with its position in its queue."""

    namespace: str
    pod: str
    queue: str
    created_s: float
    position: int
    ahead: dict[str, int]
    reason: str | None
    text: str
    estimate: Estimate


class Queues(msgspec.Struct, frozen=True):
    """Response of ``/v1/queues``."""

    items: tuple[Queue, ...]
    problem: str = ""
    waiting: tuple["WaitingPod", ...] = ()


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """Amount of one resource that a namespace may still use."""

    resource: str
    amount: int | None
    text: str = ""


class Quotas(msgspec.Struct, frozen=True):
    """Response of ``/v1/quotas``."""

    items: tuple[Quota, ...]
    headroom: tuple["Headroom", ...] | None = None


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Number of shares of one size that fit."""

    size: str
    memory_mib: int
    core_pct: int
    count: int


class Stranded(msgspec.Struct, frozen=True, kw_only=True):
    """Free memory that no share can use, for one cause."""

    cause: str
    devices: int
    memory_mib: int


class StrandedBy(msgspec.Struct, frozen=True, kw_only=True):
    """Part of it that the allocations of one namespace cause; empty: all others."""

    namespace: str
    memory_mib: int


class ModelCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one model."""

    vendor: str
    model: str
    devices: int
    devices_offering: int
    capacity_mib: int
    free_mib: int
    foreign_mib: int
    burst_mib: int = 0
    largest_mib: int
    largest_core_pct: int
    largest_on: str
    fits: tuple[Fit, ...] = ()
    stranded: tuple[Stranded, ...] = ()
    stranded_by: tuple[StrandedBy, ...] = ()


class Capacity(msgspec.Struct, frozen=True):
    """Response of ``/v1/capacity``."""

    items: tuple[ModelCapacity, ...]


class SkuAlternative(msgspec.Struct, frozen=True, kw_only=True):
    """One vendor by which a SKU can be served."""

    vendor: str
    types: tuple[str, ...]
    limits: dict[str, str]
    annotations: dict[str, str]


class Sku(msgspec.Struct, frozen=True, kw_only=True):
    """One SKU of the catalog."""

    name: str
    version: int
    state: str
    successor: str
    service_class: str = msgspec.field(name="class")
    devices: int
    memory_mib: int
    compute_pct: int
    memory_limit_mib: int = 0
    compute_limit_pct: int = 0
    link: str
    min_isolation: str
    price_hour: float
    alternatives: tuple[SkuAlternative, ...]


class Skus(msgspec.Struct, frozen=True, kw_only=True):
    """Response of ``/v1/skus``."""

    digest: str
    problem: str
    currency: str
    required: bool
    neutral: tuple[str, ...]
    items: tuple[Sku, ...]


class Explanation(msgspec.Struct, frozen=True):
    """Response of ``/v1/explain``."""

    namespace: str
    pod: str
    decisions: tuple[DecisionRecord, ...]
    allocations: tuple[Allocation, ...]


class ShareUse(msgspec.Struct, frozen=True, kw_only=True):
    """One container on one device, as ``ShareNow`` on the wire; zeros are printed too."""

    namespace: str
    pod: str
    container: str
    vendor: str
    uuid: str
    memory_mib: int
    core_pct: int = 0
    used_mib: int = 0
    used_core_pct: int = 0
    is_whole: bool = False
    is_held: bool = False
    is_over: bool = False


class NodeUse(msgspec.Struct, frozen=True, kw_only=True):
    """Current use of a node."""

    node: str
    time_s: float
    shares: tuple[ShareUse, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """Response of ``/v1/usage``."""

    items: tuple[NodeUse, ...]
    silent: tuple[str, ...] = ()


class ConsumptionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Device time of one group; device-seconds unless another unit is named."""

    name: str
    allocations: int
    reserved_s: float
    used_s: float
    wasted_s: float
    unmeasured_s: float
    idle_s: float
    whole_s: float
    saved_s: float
    overcommitted_s: float
    occupied_s: float
    memory_mib_s: float
    used_mib_s: float
    core_pct_s: float
    device_time_s: float
    throttled_s: float
    refusals: int
    cost: float | None
    wasted_cost: float | None
    whole_cost: float | None


class FleetTime(msgspec.Struct, frozen=True, kw_only=True):
    """Device-seconds of all devices."""

    capacity_s: float
    free_s: float
    overlap_s: float
    capacity_mib_s: float
    free_mib_s: float
    capacity_core_pct_s: float
    free_core_pct_s: float


class Consumption(msgspec.Struct, frozen=True, kw_only=True):
    """Response of ``/v1/consumption``."""

    from_s: float
    to_s: float
    complete_since_s: float
    unknown: int
    cut: str
    by: str
    label: str
    namespace: str
    currency: str
    unpriced: tuple[str, ...]
    items: tuple[ConsumptionRow, ...]
    total: ConsumptionRow
    fleet: FleetTime | None


class IdleAction(msgspec.Struct, frozen=True, kw_only=True):
    """Newest action on an idle allocation."""

    policy: str
    outcome: str
    code: str
    reason: str
    time_s: float
    due_s: float


class IdleShare(msgspec.Struct, frozen=True, kw_only=True):
    """An idle part of a device."""

    namespace: str
    pod: str
    pod_uid: str
    queue: str
    node: str
    uuid: str
    index: int
    model: str
    memory_mib: int
    core_pct: int
    exclusive: bool
    since_s: float
    is_since_known: bool
    measured_by: str
    lost_s: float
    cost: float | None
    action: IdleAction | None = None


class IdleShares(msgspec.Struct, frozen=True, kw_only=True):
    """Response of ``/v1/idle``."""

    minutes: int
    to_s: float
    measured_since_s: float
    namespace: str
    currency: str
    cut: str
    items: tuple[IdleShare, ...]


class Resized(msgspec.Struct, frozen=True, kw_only=True):
    """Response of ``/v1/resize``."""

    namespace: str
    pod: str
    node: str
    allocation_id: str
    ledger_seq: int
    container: ContainerShares
    before: ContainerShares
    in_force: bool


class _Fault(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""


class _Error(msgspec.Struct, frozen=True):
    error: _Fault | str = ""

    @property
    def text(self) -> str:
        """Return the message."""
        return self.error if isinstance(self.error, str) else self.error.message


def fetch(base: str, path: str, **params: str) -> bytes:
    """Return the body of a GET; raises ``Absent`` for 404."""
    return anyio.run(ask, base, path, params)


def send(kind: type[T], base: str, path: str, body: object) -> T:
    """Send a POST and decode the answer; raises ``Refused`` with the service's reason."""
    data = anyio.run(ask, base, path, {}, msgspec.json.encode(body), LONG_S)
    return _decoded(kind, data, base, path)


def read(kind: type[T], base: str, path: str, **params: str) -> T:
    """Send a GET and decode the answer."""
    return _decoded(kind, fetch(base, path, **params), base, path)


def _decoded(kind: type[T], body: bytes, base: str, path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        message = f"{base}{path}: unexpected answer: {error}"
        raise Unreachable(message) from error


async def ask(
    base: str,
    path: str,
    params: dict[str, str],
    post: bytes | None = None,
    limit_s: float = TIMEOUT_S,
) -> bytes:
    """Send one request; ``post``: the body of a POST."""
    given = {name: value for name, value in params.items() if value}
    timeout = aiohttp.ClientTimeout(total=limit_s)
    method = "GET" if post is None else "POST"
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(
                method,
                f"{base.rstrip('/')}{path}",
                params=given,
                data=post,
                headers=await credentials.headers(base),
                ssl=credentials.tls(base),
            ) as answer,
        ):
            body = await answer.read()
            status = answer.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        message = f"{base} does not answer: {str(error) or type(error).__name__}"
        raise Unreachable(message) from error
    if status == _OK:
        return body
    try:
        text = msgspec.json.decode(body, type=_Error).text
    except UNDECODABLE:
        text = ""
    text = text or f"{base}{path}: HTTP {status}"
    if status == _NOT_FOUND:
        raise Absent(text)
    raise Refused(text) if status in _NO else Unreachable(text)
