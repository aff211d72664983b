# SPDX-License-Identifier: Apache-2.0
"""Answers who consumed device time, at which price, and who holds devices without using them.

Sums up the slices of ``metering`` by namespace, queue, model, node or pod. Sums inside are integers
(device nanoseconds, milliseconds, millionths of the currency times nanoseconds); an answer has
seconds and units of the currency. Device time of a group is what its shares reserve; all groups of
an answer together have its total.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Literal

from msgspec import Struct

from hami_common.errors import RequestInvalid
from hami_common.events.allocation import AllocationRecord
from hami_common.events.idle import IdleActionRecord, IdleOutcome, IdlePolicy
from hami_common.events.inventory import NodeDevices
from hami_common.events.usage import UsageRecord
from hami_common.model.placement import Booked
from hami_common.model.prices import MICRO, Prices
from hami_registry.core.lifetimes import (
    MS,
    DeviceKey,
    Life,
    Listing,
    listings,
    lives,
    milliseconds,
)
from hami_registry.core.metering import (
    PPM,
    RECENT_MS,
    RECENT_SAMPLES,
    Held,
    Slice,
    Spent,
    Use,
    slices,
    spend,
    unknown_devices,
    use_of,
    within,
)

By = Literal["namespace", "queue", "model", "node", "pod", "sku", "class", "label"]
NS: Final = 1_000_000_000
HOUR_S: Final = 3600


class ConsumptionRow(Struct, frozen=True, kw_only=True):
    """Device time of one group; device-seconds unless another unit is named."""

    name: str
    """Namespace, queue, model, node, namespace and pod, SKU as ``<name>@<version>``, class of the
    SKU, or value of the label; an empty queue, SKU, class or value: pods that have none.
    """
    allocations: int
    """Allocations that held a share."""
    reserved_s: float
    """Device time that shares reserved: the larger of their parts of memory and compute."""
    used_s: float
    """Of it used: the larger part of memory or compute, at most the reserved one."""
    wasted_s: float
    """Of it measured and not used."""
    unmeasured_s: float
    """Of it without a sample: before a container ran, or while its agent was silent."""
    idle_s: float
    """Of it in samples without any work on the device."""
    whole_s: float
    """Device time if each container had whole devices."""
    saved_s: float
    """``whole_s`` less ``reserved_s``."""
    overcommitted_s: float
    """Of it while shares reserved more memory of the device than it has."""
    occupied_s: float
    """Device time in which the group held a share of the device. A device that several groups share
    counts for each of them, and once in the total.
    """
    memory_mib_s: float
    """Reserved memory, in MiB-seconds."""
    used_mib_s: float
    """Used memory, in MiB-seconds."""
    core_pct_s: float
    """Reserved compute, in percent of one device times seconds."""
    device_time_s: float
    """Time that work ran on devices, as the limiter counted it, in seconds."""
    throttled_s: float
    """Time that launches waited for the compute limit or for higher priorities, in seconds."""
    refusals: int
    """Requests for memory that the limit refused."""
    cost: float | None
    """Price of ``reserved_s``; null: no prices are configured."""
    wasted_cost: float | None
    """Price of ``wasted_s``."""
    whole_cost: float | None
    """Price of ``whole_s``."""


class FleetTime(Struct, frozen=True, kw_only=True):
    """Capacity of all devices times the interval, and what no allocation reserved of it."""

    capacity_s: float
    """Device-seconds: reserved + free - overlap."""
    free_s: float
    """Device-seconds that neither memory nor compute of a share reserves."""
    overlap_s: float
    """Device-seconds that count for several shares, because they reserve different resources."""
    capacity_mib_s: float
    """MiB-seconds: reserved + free."""
    free_mib_s: float
    capacity_core_pct_s: float
    """Percent of one device times seconds: reserved + free."""
    free_core_pct_s: float


class Consumption(Struct, frozen=True, kw_only=True):
    """Device time between two times."""

    from_s: float
    to_s: float
    complete_since_s: float
    """Time of the oldest event that is stored: what was released before is missing; 0: no event was
    ever removed.
    """
    unknown: int
    """Allocations whose amounts are not known for a part of the interval: their reservation is
    older than the stored events, or no record describes their device.
    """
    cut: str
    """Reason for which events are missing at the end of the interval; empty: none are."""
    by: By
    label: str
    """Key of the label; empty: rows are not by a label."""
    namespace: str
    """Only this namespace; empty: all."""
    currency: str
    """Of the prices; empty: no prices are configured."""
    unpriced: tuple[str, ...]
    """Models without a price; their device time is in no amount of money. Sorted."""
    items: tuple[ConsumptionRow, ...]
    """Sorted by reserved device time, largest first, then by name."""
    total: ConsumptionRow
    fleet: FleetTime | None
    """Null where only one namespace is asked for."""


class IdleAction(Struct, frozen=True, kw_only=True):
    """Newest action of the scheduler on an idle allocation."""

    policy: IdlePolicy
    outcome: IdleOutcome
    """``waiting``: the policy applies from ``due_s`` on."""
    code: str
    """Reason of a refusal as a stable word (docs/runbook/errors.md); empty: none."""
    reason: str
    time_s: float
    due_s: float


class IdleShare(Struct, frozen=True, kw_only=True):
    """An allocation's part of a device that did no work for some time and still is reserved."""

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
    """Begin of the idle time."""
    is_since_known: bool
    """False: it was idle already when the measurement began."""
    measured_by: Literal["limiter", "driver"]
    """``driver``: no limiter counts the work; the driver's utilization was 0 in every sample."""
    lost_s: float
    """Reserved device-seconds since then."""
    cost: float | None
    """Price of them; null: no price is configured."""
    action: IdleAction | None
    """Newest action in this idle time; null: none, or policies are off."""


class IdleList(Struct, frozen=True, kw_only=True):
    """Idle shares, that with the most lost device time first."""

    minutes: int
    """Shares that were idle at least so long are listed."""
    to_s: float
    """Time of the answer, at which the shares are idle."""
    measured_since_s: float
    """Begin of the measurement: idle time before it is not known."""
    namespace: str
    currency: str
    cut: str
    """Reason for which samples are missing, so that idle shares may be too; empty: none are."""
    items: tuple[IdleShare, ...]


class _Sums(Struct, kw_only=True):
    """Sums of one group: nanoseconds, milliseconds, micros of the currency times nanoseconds."""

    lives: set[int]
    reserved: int = 0
    whole: int = 0
    overcommitted: int = 0
    occupied: int = 0
    memory: int = 0
    core: int = 0
    spent: Spent
    device_ms: int = 0
    waited_ms: int = 0
    refusals: int = 0
    cost: int = 0
    wasted_cost: int = 0
    whole_cost: int = 0


def _no_sums() -> _Sums:
    return _Sums(lives=set(), spent=Spent())


class Meter(Struct, frozen=True, kw_only=True):
    """Everything that is known about devices and their use around an interval."""

    lives: list[Life]
    listings: dict[DeviceKey, list[Listing]]
    use: Use
    start_ms: int
    end_ms: int
    prices: Prices

    @classmethod
    def of(
        cls,
        *,
        ledger: Iterable[AllocationRecord],
        devices: Iterable[NodeDevices],
        usage: Iterable[UsageRecord],
        from_s: float,
        to_s: float,
        prices: Prices,
    ) -> "Meter":
        """Read all records; those of before the interval describe its begin."""
        return cls(
            lives=lives(ledger),
            listings=listings(devices),
            use=use_of(usage),
            start_ms=milliseconds(from_s),
            end_ms=milliseconds(to_s),
            prices=prices,
        )

    def consumption(
        self,
        *,
        by: By,
        label: str = "",
        namespace: str = "",
        complete_since_s: float = 0.0,
        cut: str = "",
    ) -> Consumption:
        """Sum up the interval; by ``label``: key of the label."""
        group = _GROUPS.get(by, partial(_label_of, label))
        groups: dict[str, _Sums] = defaultdict(_no_sums)
        total, fleet = _no_sums(), _FleetSums()
        price_of = self.prices.micros()
        unpriced: set[str] = set()
        counted: set[int] = set()
        for piece in self._slices():
            fleet.add(piece)
            price = price_of(piece.device.model)
            occupied: set[str] = set()
            for held in piece.held:
                life = self.lives[held.life]
                if namespace not in ("", life.namespace):
                    continue
                name = group(life, piece.device)
                occupied.add(name)
                if price is None:
                    unpriced.add(piece.device.model)
                spent = Spent()
                spend(spent, piece, held, self.use.samples_of(life, piece.device.uuid))
                for sums in (groups[name], total):
                    _add(sums, piece, held, spent, price or 0)
                if held.life not in counted:
                    counted.add(held.life)
                    self._count((groups[name], total), life)
            for sums in (*(groups[name] for name in occupied), *((total,) if occupied else ())):
                sums.occupied += PPM * piece.length_ms
        has_prices = bool(self.prices.currency)
        rows = [_row(name, sums, has_prices=has_prices) for name, sums in groups.items()]
        return Consumption(
            from_s=self.start_ms / MS,
            to_s=self.end_ms / MS,
            complete_since_s=complete_since_s,
            unknown=self._unknown(namespace),
            cut=cut,
            by=by,
            label=label if by == "label" else "",
            namespace=namespace,
            currency=self.prices.currency,
            unpriced=tuple(sorted(unpriced)) if has_prices else (),
            items=tuple(sorted(rows, key=lambda row: (-row.reserved_s, row.name))),
            total=_row("", total, has_prices=has_prices),
            fleet=None if namespace else fleet.answer(),
        )

    def idle(
        self,
        *,
        minutes: int,
        namespace: str = "",
        cut: str = "",
        actions: Iterable[IdleActionRecord] = (),
    ) -> IdleList:
        """List the shares that are reserved at the end and were idle at least ``minutes``."""
        by_allocation = {action.allocation_id: action for action in actions}
        price_of = self.prices.micros()
        history: dict[tuple[int, str], list[tuple[Slice, Held]]] = defaultdict(list)
        for piece in self._slices():
            for held in piece.held:
                life = self.lives[held.life]
                if life.end_ms > self.end_ms and namespace in ("", life.namespace):
                    history[held.life, piece.device.uuid].append((piece, held))
        found = [
            share
            for (number, uuid), parts in history.items()
            if (
                share := self._idle_share(
                    self.lives[number],
                    uuid,
                    parts,
                    price_of,
                    by_allocation.get(self.lives[number].allocation_id),
                )
            )
            is not None
            and self.end_ms - milliseconds(share.since_s) >= minutes * 60 * MS
        ]
        return IdleList(
            minutes=minutes,
            to_s=self.end_ms / MS,
            measured_since_s=self.start_ms / MS,
            namespace=namespace,
            currency=self.prices.currency,
            cut=cut,
            items=tuple(sorted(found, key=lambda one: (-one.lost_s, one.namespace, one.pod))),
        )

    def _idle_share(
        self,
        life: Life,
        uuid: str,
        parts: list[tuple[Slice, Held]],
        price_of: Callable[[str], int | None],
        action: IdleActionRecord | None,
    ) -> IdleShare | None:
        """Return the idle time up to the end; ``None`` without a recent sample, or at work."""
        samples = self.use.samples_of(life, uuid)
        if not samples or samples[-1].compute_ppm:
            return None
        newest = samples[-1]
        if self.end_ms - newest.end_ms > max(
            RECENT_SAMPLES * (newest.end_ms - newest.start_ms), RECENT_MS
        ):
            return None
        since_ms = newest.start_ms
        is_known = False
        for sample in reversed(samples):
            if sample.compute_ppm or sample.end_ms < since_ms:
                is_known = sample.end_ms == since_ms
                break
            since_ms = sample.start_ms
        if since_ms <= life.start_ms:
            since_ms, is_known = life.start_ms, life.is_begin_known
        piece, held = parts[-1]
        lost = sum(
            part.ppm * (one.end_ms - max(one.start_ms, since_ms))
            for one, part in parts
            if one.end_ms > since_ms
        )
        price = price_of(piece.device.model) if self.prices.currency else None
        return IdleShare(
            namespace=life.namespace,
            pod=life.pod,
            pod_uid=life.pod_uid,
            queue=life.queue,
            node=life.node,
            uuid=uuid,
            index=piece.device.number,
            model=piece.device.model,
            memory_mib=held.memory_mib,
            core_pct=held.core_pct,
            exclusive=_booked_last(life, uuid).exclusive,
            since_s=since_ms / MS,
            is_since_known=is_known,
            measured_by="limiter" if newest.is_counted else "driver",
            lost_s=lost / NS,
            cost=None if price is None else _money(lost * price),
            action=None if action is None or action.time_s * MS < since_ms else _action(action),
        )

    def _slices(self) -> Iterable[Slice]:
        return slices(self.lives, self.listings, start_ms=self.start_ms, end_ms=self.end_ms)

    def _count(self, several: Iterable[_Sums], life: Life) -> None:
        """Add the counters of an allocation; they count for the first of its devices."""
        start_ms, end_ms = self.start_ms, self.end_ms
        device_ms = waited_ms = refusals = 0
        for growth in self.use.growths_of(life):
            if start_ms <= growth.start_ms and growth.end_ms <= end_ms:
                device_ms += growth.device_ms
                waited_ms += growth.waited_ms
                refusals += growth.refusals
            elif growth.start_ms < end_ms and growth.end_ms > start_ms:
                part = partial(within, growth=growth, start_ms=start_ms, end_ms=end_ms)
                device_ms += part(growth.device_ms)
                waited_ms += part(growth.waited_ms)
                refusals += part(growth.refusals)
        for sums in several:
            sums.device_ms += device_ms
            sums.waited_ms += waited_ms
            sums.refusals += refusals

    def _unknown(self, namespace: str) -> int:
        """Count the allocations whose amounts are not known for a part of the interval."""
        devices = unknown_devices(self.lives, self.listings)
        return sum(
            (not life.is_begin_known and self.start_ms < life.start_ms <= self.end_ms)
            or any(
                (life.node, uuid) in devices
                for booking in life.bookings
                if booking.start_ms < self.end_ms and booking.end_ms > self.start_ms
                for uuid in booking.by_device
            )
            for life in self.lives
            if namespace in ("", life.namespace)
        )


class _FleetSums:
    """Sums over all devices."""

    def __init__(self) -> None:
        self.capacity = self.free = self.overlap = 0
        self.capacity_mib = self.free_mib = 0
        self.capacity_core = self.free_core = 0

    def add(self, piece: Slice) -> None:
        length_ms = piece.length_ms
        self.capacity += piece.capacity_ppm * length_ms
        self.free += piece.free_ppm * length_ms
        self.overlap += piece.overlap_ppm * length_ms
        memory_mib = sum(held.memory_mib for held in piece.held)
        core_pct = sum(held.core_pct for held in piece.held)
        self.capacity_mib += piece.capacity_mib * length_ms
        self.free_mib += (piece.capacity_mib - memory_mib) * length_ms
        self.capacity_core += piece.capacity_core_pct * length_ms
        self.free_core += (piece.capacity_core_pct - core_pct) * length_ms

    def answer(self) -> FleetTime:
        return FleetTime(
            capacity_s=self.capacity / NS,
            free_s=self.free / NS,
            overlap_s=self.overlap / NS,
            capacity_mib_s=self.capacity_mib / MS,
            free_mib_s=self.free_mib / MS,
            capacity_core_pct_s=self.capacity_core / MS,
            free_core_pct_s=self.free_core / MS,
        )


_GROUPS: Final[Mapping[By, Callable[[Life, Listing], str]]] = {
    "namespace": lambda life, _: life.namespace,
    "queue": lambda life, _: life.queue,
    "model": lambda _, device: device.model,
    "node": lambda life, _: life.node,
    "pod": lambda life, _: f"{life.namespace}/{life.pod}",
    "sku": lambda life, _: life.sku,
    "class": lambda life, _: life.service_class,
}
BYS: Final[tuple[By, ...]] = (*_GROUPS, "label")


def _label_of(key: str, life: Life, device: Listing) -> str:
    del device
    return next((value for name, value in life.labels if name == key), "")


def _add(sums: _Sums, piece: Slice, held: Held, spent: Spent, price: int) -> None:
    length_ms = piece.length_ms
    whole = held.slots * PPM * length_ms
    sums.lives.add(held.life)
    sums.reserved += held.ppm * length_ms
    sums.whole += whole
    if piece.is_overcommitted:
        sums.overcommitted += held.ppm * length_ms
    sums.memory += held.memory_mib * length_ms
    sums.core += held.core_pct * length_ms
    for name in Spent.__struct_fields__:
        setattr(sums.spent, name, getattr(sums.spent, name) + getattr(spent, name))
    sums.cost += price * held.ppm * length_ms
    sums.wasted_cost += price * spent.wasted_ns
    sums.whole_cost += price * whole


def _row(name: str, sums: _Sums, *, has_prices: bool) -> ConsumptionRow:
    spent = sums.spent
    return ConsumptionRow(
        name=name,
        allocations=len(sums.lives),
        reserved_s=sums.reserved / NS,
        used_s=spent.used_ns / NS,
        wasted_s=spent.wasted_ns / NS,
        unmeasured_s=(sums.reserved - spent.used_ns - spent.wasted_ns) / NS,
        idle_s=spent.idle_ns / NS,
        whole_s=sums.whole / NS,
        saved_s=(sums.whole - sums.reserved) / NS,
        overcommitted_s=sums.overcommitted / NS,
        occupied_s=sums.occupied / NS,
        memory_mib_s=sums.memory / MS,
        used_mib_s=spent.used_mib_ms / MS,
        core_pct_s=sums.core / MS,
        device_time_s=sums.device_ms / MS,
        throttled_s=sums.waited_ms / MS,
        refusals=sums.refusals,
        cost=_money(sums.cost) if has_prices else None,
        wasted_cost=_money(sums.wasted_cost) if has_prices else None,
        whole_cost=_money(sums.whole_cost) if has_prices else None,
    )


def _money(micro_ns: int) -> float:
    """Return micros of the currency per hour, times nanoseconds, as units of the currency."""
    return micro_ns / (MICRO * NS * HOUR_S)


def _action(record: IdleActionRecord) -> IdleAction:
    return IdleAction(
        policy=record.policy,
        outcome=record.outcome,
        code=record.code,
        reason=record.reason,
        time_s=record.time_s,
        due_s=record.due_s,
    )


def _booked_last(life: Life, uuid: str) -> Booked:
    return next(one.by_device[uuid] for one in reversed(life.bookings) if uuid in one.by_device)


def interval(
    from_s: float | None, to_s: float | None, *, now_s: float, default_s: float
) -> tuple[float, float]:
    """Return the interval that is asked for, at most up to now; by default the last ``default_s``.

    ``RequestInvalid`` when it is empty.
    """
    end_s = now_s if to_s is None else min(to_s, now_s)
    start_s = end_s - default_s if from_s is None else from_s
    if start_s >= end_s:
        raise RequestInvalid(
            field="query parameter from",
            problem="is not before the end of the interval",
            fix="give a time in the past, before parameter to",
        )
    return start_s, end_s
