# SPDX-License-Identifier: Apache-2.0
"""Shares that a ResourceClaim holds, from the allocation that kube-scheduler stored in it.

Outside document: ``resource.k8s.io/v1``, ResourceClaim (Kubernetes 1.37). The scheduler books these
shares in the ledger and the node agent compares them with the record, so both must derive them
here. Results of other drivers in the same claim are left out. Memory in MiB, compute in percent of
one device.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from math import ceil
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from hami_common.bounds import (
    MEMORY_MIB_MOST,
    OBJECT_LIST_MOST,
    MapKey,
    Name,
    ObjectText,
    Quantity,
    Reference,
    Uid,
    Word,
)
from hami_common.dra import partitions
from hami_common.dra.names import (
    BOOKED,
    CORES,
    DRIVER,
    MEMORY,
    MONITOR,
    SOFT_MODE,
    VENDORS_BY_ANNOTATION,
    device_name,
    monitor_pool,
    node_of_pool,
    pool_name,
)
from hami_common.errors import RequestInvalid
from hami_common.model.device import RECALL, Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.pods.podview import MetadataView
from hami_common.units import MIB_BYTES, parse_quantity, shown

UNPREPARED: Final = "unprepared"
"""Code of the state of a claim that no container of the node uses any more."""
MEMORY_LEAST_MIB: Final = 2
"""Least legal capacity of memory in a slice: the smallest request and one step."""
_WHOLE_PCT: Final = 100
_ID_DIGITS: Final = 32


class Result(Struct, frozen=True, kw_only=True, rename="camel"):
    """One allocated device."""

    request: Reference = ""
    """Request of the claim; ``<request>/<subrequest>`` for one of several alternatives."""
    driver: Name = ""
    pool: Reference = ""
    device: Word = ""
    admin_access: bool | None = None
    share_id: Uid | None = field(default=None, name="shareID")
    consumed_capacity: (
        Annotated[dict[MapKey, Quantity], Meta(max_length=OBJECT_LIST_MOST)] | None
    ) = None

    @property
    def is_monitor(self) -> bool:
        """True for a node's device ``MONITOR`` that is given with admin access."""
        node = self.pool.partition("/")[0]
        known = (monitor_pool(node), MONITOR)
        return self.admin_access is True and (self.pool, self.device) == known

    def consumed(self, capacity: str) -> str | None:
        """Return the quantity of a capacity of ours that the result takes; ``None``: not given."""
        amounts = self.consumed_capacity or {}
        return amounts.get(capacity, amounts.get(f"{DRIVER}/{capacity}"))


class _Devices(Struct, frozen=True, kw_only=True):
    results: Annotated[tuple[Result, ...], Meta(max_length=OBJECT_LIST_MOST)] | None = None


class Allocation(Struct, frozen=True, kw_only=True, rename="camel"):
    """``status.allocation``."""

    devices: _Devices = _Devices()
    allocation_timestamp: ObjectText | None = None


class Consumer(Struct, frozen=True, kw_only=True, rename="camel"):
    """One entry of ``status.reservedFor``."""

    resource: Name = ""
    name: Name = ""
    uid: Uid = ""


class Condition(Struct, frozen=True, kw_only=True):
    """One condition of an allocated device."""

    type: Reference = ""
    status: Word = ""
    reason: Word = ""
    message: ObjectText = ""


class _DeviceStatus(Struct, frozen=True, kw_only=True):
    driver: Name = ""
    pool: Reference = ""
    device: Word = ""
    share_id: Uid | None = field(default=None, name="shareID")
    conditions: Annotated[tuple[Condition, ...], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    data: msgspec.Raw = msgspec.Raw(b"null")
    """Amounts in force of a share of ours, see ``data_of``; any document of another driver."""


class _Status(Struct, frozen=True, kw_only=True, rename="camel"):
    allocation: Allocation | None = None
    reserved_for: Annotated[tuple[Consumer, ...], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    devices: Annotated[tuple[_DeviceStatus, ...], Meta(max_length=OBJECT_LIST_MOST)] | None = None


class ResourceClaim(Struct, frozen=True, kw_only=True):
    """The fields of a claim that we read."""

    metadata: MetadataView
    status: _Status | None = None

    @property
    def uid(self) -> str:
        """UID of the claim."""
        return self.metadata.uid

    @property
    def namespace(self) -> str:
        """Namespace of the claim."""
        return self.metadata.namespace or "default"

    def consumers(self) -> Sequence[Consumer]:
        """Return the pods for which the claim is reserved."""
        return (self.status.reserved_for if self.status else None) or ()

    def results(self) -> tuple[Result, ...]:
        """Return the allocated devices of our driver that are shares; empty without any."""
        return tuple(one for one in self._ours() if not one.is_monitor)

    def monitors(self) -> tuple[Result, ...]:
        """Return the allocated devices ``MONITOR``, which have no share and no ledger record."""
        return tuple(one for one in self._ours() if one.is_monitor)

    def _ours(self) -> Iterable[Result]:
        allocation = self.status.allocation if self.status else None
        results = allocation.devices.results if allocation else None
        return (one for one in results or () if one.driver == DRIVER)

    def verdict(self) -> Condition:
        """Return the condition ``BOOKED``, with empty fields where there is none.

        All devices of ours have the same one, because it is written for all of them together.
        """
        for device in (self.status.devices if self.status else None) or ():
            for one in device.conditions or ():
                if device.driver == DRIVER and one.type == BOOKED:
                    return one
        return Condition()

    def allocated_at(self) -> str:
        """Return the time at which the allocation was stored, as text that sorts by time."""
        allocation = self.status.allocation if self.status else None
        return (allocation.allocation_timestamp if allocation else None) or ""

    def allocation_id(self) -> str:
        """Return the id of the ledger record for this allocation; empty without one of ours.

        Every reader derives the same id, also after the ledger was lost. Another allocation of the
        same claim has another id, by its time and its share ids.
        """
        results = self.results()
        if not results:
            return ""
        parts = [self.uid, self.allocated_at()]
        for one in results:
            amounts = sorted((one.consumed_capacity or {}).items())
            parts += [one.request, one.pool, one.device, one.share_id or ""]
            parts += [f"{name}={amount}" for name, amount in amounts]
        return sha256("\0".join(parts).encode()).hexdigest()[:_ID_DIGITS]


def data_of(share: Share) -> dict[str, str]:
    """Return ``status.devices[].data`` of a share that was resized: its amounts in force."""
    return {MEMORY: f"{share.memory_mib}Mi", CORES: str(share.core_pct)}


def shown_amounts(
    claim: ResourceClaim, containers: Iterable[ContainerShares]
) -> dict[tuple[str, str, str | None], dict[str, str]]:
    """Return the amounts that the claim's status is to show, by pool, device and share id.

    ``containers``: the ledger's shares, by request. Empty if the status has the amounts in force:
    those of ``status.devices[].data``, and of the allocation where there is no such entry.
    Hardware partitions are left out: their amounts follow from their size.
    """
    wanted = {
        (container.name, device_name(share.uuid)): share
        for container in containers
        for share in container.shares
        if not share.profile
    }
    shown = _data_by_device(claim)
    found: dict[tuple[str, str, str | None], dict[str, str]] = {}
    is_shown = True
    for number, one in enumerate(claim.results()):
        share = wanted.get((one.request.partition("/")[0], one.device))
        if share is None:
            continue
        key, data = (one.pool, one.device, one.share_id), data_of(share)
        found[key] = data
        if key in shown:
            is_shown = is_shown and shown[key] == data
        else:
            memory_mib = _amount(number, one, MEMORY, unit=MIB_BYTES, most=MEMORY_MIB_MOST)
            core_pct = _amount(number, one, CORES, unit=1, most=_WHOLE_PCT)
            is_shown = is_shown and (memory_mib, core_pct) == (share.memory_mib, share.core_pct)
    return {} if is_shown else found


def in_force(
    claim: ResourceClaim, containers: Iterable[ContainerShares]
) -> tuple[ContainerShares, ...]:
    """Return the claim's shares with the amounts that its status shows since a resize.

    ``containers``: as of ``containers_of``. Amounts that cannot be read are left out.
    """
    shown = _data_by_device(claim)
    amounts = {
        (one.request.partition("/")[0], one.device): data
        for one in claim.results()
        if (data := shown.get((one.pool, one.device, one.share_id))) is not None
    }
    return tuple(
        replace(
            container,
            shares=tuple(
                _resized(share, amounts.get((container.name, device_name(share.uuid)), {}))
                for share in container.shares
            ),
        )
        for container in containers
    )


def _resized(share: Share, data: dict[str, str]) -> Share:
    memory, cores = (parse_quantity(data.get(name, "")) for name in (MEMORY, CORES))
    if not memory or cores is None or share.profile or share.exclusive:
        return share
    memory_mib, core_pct = ceil(memory / MIB_BYTES), ceil(cores)
    if not (0 < memory_mib <= MEMORY_MIB_MOST and 0 <= core_pct <= _WHOLE_PCT):
        return share
    return replace(share, memory_mib=memory_mib, core_pct=core_pct)


def _data_by_device(claim: ResourceClaim) -> dict[tuple[str, str, str | None], dict[str, str]]:
    """Return the amounts that the status shows, by pool, device and share id."""
    found: dict[tuple[str, str, str | None], dict[str, str]] = {}
    for one in (claim.status.devices if claim.status else None) or ():
        if one.driver != DRIVER or bytes(one.data) == b"null":
            continue
        try:
            data = msgspec.json.decode(one.data, type=dict[str, str])
        except (msgspec.DecodeError, UnicodeError):
            data = {}  # of another writer: it is written again
        found[one.pool, one.device, one.share_id] = data
    return found


def is_published(device: Device) -> bool:
    """Return whether claims may have shares of the device.

    Only devices that are shared by limits, whose memory stays on the device.
    """
    return (
        device.mode == SOFT_MODE
        and not device.partitions
        and device.vendor not in VENDORS_BY_ANNOTATION
        and device.capacity_mib >= MEMORY_LEAST_MIB
        and not (device.overcommit == RECALL and device.capacity_mib > device.memory_mib)
    )


def node_of(claim: ResourceClaim) -> str:
    """Return the node of the claim's devices of ours; empty without any.

    ``RequestInvalid``: a pool that is not ours, or devices of two nodes.
    """
    nodes: dict[str, None] = {}
    for number, one in enumerate(claim.results()):
        node = node_of_pool(one.pool)
        if not node:
            raise _invalid(
                number,
                "pool",
                f"{shown(one.pool)} is no pool of driver {DRIVER}, such as node/hami",
            )
        nodes[node] = None
        if len(nodes) > 1:
            names = " and ".join(nodes)
            raise _invalid(number, "pool", f"one claim has devices of the nodes {names}")
    return next(iter(nodes), "")


def containers_of(claim: ResourceClaim, devices: Iterable[Device]) -> tuple[ContainerShares, ...]:
    """Return the claim's shares, one container for each request, in the order of the results.

    ``devices``: those of the claim's node, of all vendors. A share with all compute, or all memory,
    of a device is the whole device, as for pods. A hardware partition has the amounts of its size.
    ``RequestInvalid`` names the result at fault.
    """
    node, devices = node_of(claim), tuple(devices)
    by_name = {device_name(device.uuid): device for device in devices}
    shares: dict[str, list[Share]] = {}
    for number, one in enumerate(claim.results()):
        if one.admin_access:
            raise _invalid(number, "adminAccess", "devices are not given with admin access")
        own = shares.setdefault(one.request.partition("/")[0], [])
        if (part := partitions.share_of(one.device, devices)) is not None:
            own.append(part)
            continue
        device = by_name.get(one.device)
        if device is None:
            raise _invalid(
                number, "device", f"{shown(one.device)} is not in the pool {pool_name(node)}"
            )
        memory_mib = _amount(number, one, MEMORY, unit=MIB_BYTES, most=MEMORY_MIB_MOST)
        core_pct = _amount(number, one, CORES, unit=1, most=_WHOLE_PCT)
        if not memory_mib:
            raise _invalid(number, f"consumedCapacity[{MEMORY}]", "a share needs memory")
        own.append(
            Share(
                vendor=device.vendor,
                uuid=device.uuid,
                memory_mib=memory_mib,
                core_pct=core_pct,
                exclusive=core_pct == _WHOLE_PCT or memory_mib >= device.capacity_mib,
            )
        )
    return tuple(
        ContainerShares(name=name, kind="app", shares=tuple(own)) for name, own in shares.items()
    )


def _amount(number: int, result: Result, capacity: str, *, unit: int, most: int) -> int:
    """Return what the result takes of a capacity, in whole units, rounded up."""
    text = result.consumed(capacity)
    field = f"consumedCapacity[{capacity}]"
    if text is None:
        raise _invalid(number, field, "it is missing, so the amount of the share is unknown")
    value = parse_quantity(text)
    amount = -1 if value is None or value < 0 else ceil(value / unit)
    if not 0 <= amount <= most:
        raise _invalid(number, field, f"{shown(text)} is not an amount from 0 to {most * unit}")
    return amount


def _invalid(number: int, field: str, problem: str) -> RequestInvalid:
    return RequestInvalid(
        field=f"status.allocation.devices.results[{number}].{field}",
        problem=problem,
        fix="delete the pods of the claim, so that devices are allocated to it again",
    )
