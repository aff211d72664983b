# SPDX-License-Identifier: Apache-2.0
"""Compares placement policies: places recorded arrivals again under each, and measures the packing.

Arrivals are placed in order by the same filter, scores and picks as in the live scheduler. A pod
that fits nowhere waits, and starts as soon as a release or a change of devices lets it in; pods
that wait are tried in order of arrival, and later ones may pass. A pod runs as long as it was
recorded to run; one that was not released yet stays. Pods with devices at the start keep them. The
record itself is measured in the same way, with the devices that were given.

All pods get the compared policy, also those that named one. Quotas, queues, priorities, preemption
and gangs are not evaluated. Silent agents and faults of devices are not part of the history, only
health and cordons of canonical records. The cost is the price of the devices in use, those with any
share; others could be switched off or returned. Memory in MiB, times in Unix seconds, durations in
seconds, shares of a whole as fractions 0..1.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import ContainerShares, Placement
from hami_common.model.prices import MICRO, Prices
from hami_common.model.request import (
    DevicePolicy,
    NodePolicy,
    PlacementPolicy,
    PodRequest,
    ScoringWeights,
)
from hami_core.placement.fit import NO_PLAN, Plan, compile_request
from hami_core.placement.pick import pick
from hami_core.placement.verdicts import Verdicts
from hami_core.planning.defrag import Tenant, plan_moves
from hami_core.planning.packing import Asks, Fill, asks_of, fill, stranded, used_by_model
from hami_core.replay.arrivals import History, Run
from hami_core.table.table import DeviceTable

POLICIES_MOST: Final = 8
PLACEMENTS_MOST: Final = 10_000
"""Arrivals that one answer places again, times its policies."""
SAMPLES: Final = 120
"""Points of the series."""
ASKS_MEASURED: Final = 16
"""Most frequent requests by which stranded memory is measured."""
HOURS_MOST: Final = 168.0
"""Hours that the event stream keeps."""
_P95: Final = 0.95
_HOUR_S: Final = 3600.0
_NO_PRICES: Final = Prices()
_MOVE_TRIALS: Final = 300
_MOVE_TARGETS: Final = 8

Shares = tuple[ContainerShares, ...]


class PolicyChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy to compare; what is absent is as configured at the scheduler."""

    node_policy: NodePolicy | None = None
    device_policy: Annotated[tuple[DevicePolicy, ...], Meta(min_length=1, max_length=5)] | None = (
        None
    )
    weights: ScoringWeights | None = None

    def over(self, default: PlacementPolicy) -> PlacementPolicy:
        """Return the full policy."""
        return replace(
            default,
            node=self.node_policy or default.node,
            device=self.device_policy or default.device,
            weights=self.weights or default.weights,
        )


class PolicyQuestion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Place the arrivals of the last hours again under other policies."""

    hours: Annotated[float, Meta(gt=0, le=HOURS_MOST)] = 24.0
    """Length of the period, which ends now."""
    policies: Annotated[tuple[PolicyChoice, ...], Meta(min_length=1, max_length=POLICIES_MOST)] = (
        PolicyChoice(node_policy="binpack"),
        PolicyChoice(node_policy="spread"),
    )
    prices: Prices = Prices()
    """Prices of devices, such as ``GET /v1/config`` of the registry has; absent: no cost."""


class Series(Struct, frozen=True, kw_only=True):
    """The state at equally spaced times; the n-th values of all columns belong together."""

    devices_used: tuple[int, ...]
    devices_free: tuple[int, ...]
    """Usable devices without any share."""
    used_devices_full: tuple[float, ...]
    """Booked memory as a fraction of the capacity of the devices in use."""
    stranded: tuple[float, ...]
    waiting: tuple[int, ...]
    """Pods that wait for devices."""


class ComparedPolicy(Struct, frozen=True, kw_only=True):
    """A policy as it was applied to all pods."""

    node_policy: NodePolicy
    device_policy: tuple[DevicePolicy, ...]
    weights: ScoringWeights


class PolicyResult(Struct, frozen=True, kw_only=True):
    """Packing of the period under one policy."""

    policy: ComparedPolicy | None
    """``None``: as recorded."""
    placed_at_once: int
    waited: int
    """Pods that did not fit when they arrived."""
    never_placed: int
    """Pods of ``waited`` that fit at no time; their wait counts to the end of the period."""
    wait_total_s: float
    wait_p95_s: float
    """Of the pods that waited; 0 without one."""
    used_devices_full_mean: float
    """Mean over the time in which any device was in use."""
    used_devices_full_peak: float
    devices_used_peak: int
    devices_free_mean: float
    stranded_mean: float
    """Fraction of the free memory that the arrivals' requests cannot use, mean of the series."""
    makespan_s: float | None
    """From the first arrival to the end of the last pod; ``None``: some pod has no end."""
    device_hours: float
    """Hours of devices in use, within the period."""
    cost: float | None
    """Price of ``device_hours``; ``None`` without prices."""
    series: Series


class PolicyComparison(Struct, frozen=True, kw_only=True):
    """The same arrivals under several policies."""

    from_s: float
    """Begin of the period, later than asked for if ``left_out`` is not 0."""
    until_s: float
    devices: int
    """Usable devices at the end of the period."""
    arrivals: int
    running: int
    """Pods that had devices at the start and kept them."""
    left_out: int
    """Earlier arrivals that were not placed again."""
    without_begin: int
    """Pods that ended in the period and whose reservation is no longer stored."""
    series_s: tuple[float, ...]
    """Times of the values of all series."""
    recorded: PolicyResult
    results: tuple[PolicyResult, ...]
    """In the order of the question."""
    currency: str
    """ISO 4217 code of all costs; empty: no prices."""
    unpriced: tuple[str, ...]
    """Models of devices in use without a price, which are in no cost."""


class PodOutcome(Struct, frozen=True, kw_only=True):
    """One arrival under one policy."""

    namespace: str
    pod: str
    node: str
    """Empty: it never got devices."""
    devices: tuple[str, ...]
    """UUIDs, in the order of containers and shares."""
    wait_s: float
    """To the end of the period for a pod that never got devices."""


class Compared(NamedTuple):
    """A comparison, with the arrivals behind its figures."""

    comparison: PolicyComparison
    recorded: tuple[PodOutcome, ...]
    """In order of arrival."""
    pods: tuple[tuple[PodOutcome, ...], ...]
    """Likewise, by policy."""


def compare(
    history: History,
    policies: Sequence[PlacementPolicy],
    *,
    check: Callable[[], None],
    prices: Prices = _NO_PRICES,
) -> PolicyComparison:
    """Place the arrivals under each policy; ``check`` is called between pods and may raise."""
    return compare_pods(history, policies, check=check, prices=prices).comparison


def compare_pods(
    history: History,
    policies: Sequence[PlacementPolicy],
    *,
    check: Callable[[], None],
    prices: Prices = _NO_PRICES,
) -> Compared:
    """Compare as ``compare`` does, and also return each arrival."""
    measured = dict(asks_of(run.request for run in history.arrivals).most_common(ASKS_MEASURED))
    times = _times(history)
    worlds = [
        _World(history, policy, _Meter(measured, times), check).run()
        for policy in (None, *policies)
    ]
    recorded, *results = (world.result(prices) for world in worlds)
    micros = prices.micros()
    models = {model for world in worlds for model in world.meter.used_s_by_model}
    comparison = PolicyComparison(
        from_s=history.from_s,
        until_s=history.until_s,
        devices=fill(worlds[0].table).devices,
        arrivals=len(history.arrivals),
        running=len(history.running),
        left_out=history.left_out,
        without_begin=history.without_begin,
        series_s=times,
        recorded=recorded,
        results=tuple(results),
        currency=prices.currency,
        unpriced=tuple(sorted(one for one in models if prices.currency and micros(one) is None)),
    )
    of_recorded, *pods = (world.pods() for world in worlds)
    return Compared(comparison, of_recorded, tuple(pods))


class Lived(NamedTuple):
    """Times of one pod, in the period or after it."""

    start_s: float
    end_s: float | None


class Placed(Struct, frozen=True, kw_only=True):
    """The same arrivals under one policy, with moves of running pods."""

    result: PolicyResult
    lives: Mapping[str, Lived]
    """By uid, of the pods that were placed."""
    moves: int
    """Running pods that were moved so that another one fits."""
    booked_mean: float
    """Booked memory as a fraction of the capacity of all usable devices, mean over the period."""
    booked_peak: float


def place(
    history: History, policy: PlacementPolicy, *, moves_most: int, check: Callable[[], None]
) -> Placed:
    """Place the arrivals; where none fits, up to ``moves_most`` running pods are moved for it.

    A move takes no time, and the moved pod ends when it would have ended.
    """
    measured = dict(asks_of(run.request for run in history.arrivals).most_common(ASKS_MEASURED))
    meter = _Meter(measured, _times(history))
    world = _World(history, policy, meter, check, moves_most=moves_most).run()
    return Placed(
        result=world.result(_NO_PRICES),
        lives=world.lives,
        moves=world.moves,
        booked_mean=_mean(meter.booked_s, meter.measured_s),
        booked_peak=round(meter.booked_peak, 4),
    )


def _times(history: History) -> tuple[float, ...]:
    length = history.until_s - history.from_s
    return tuple(history.from_s + length * n / (SAMPLES - 1) for n in range(SAMPLES))


_RELEASE, _PUT, _ARRIVAL = range(3)
"""Order of what happens at the same moment."""


class _Waiting(NamedTuple):
    run: Run
    request: PodRequest
    plan: Plan
    """Equal for pods that fit on the same nodes."""


class _Active(Struct):
    """A pod with devices."""

    request: PodRequest
    node: str
    containers: Shares


class _World:
    """One pass over the history under one policy."""

    def __init__(
        self,
        history: History,
        policy: PlacementPolicy | None,
        meter: "_Meter",
        check: Callable[[], None],
        moves_most: int = 0,
    ) -> None:
        self.table = meter.table
        self.policy = policy
        self.meter = meter
        self.waits_s: list[float] = []
        """Waits of the pods that were placed late."""
        self._started: dict[int, tuple[float, str, Shares]] = {}
        """Wait, node and shares of placed arrivals, by identity of the run."""
        self.waiting: list[_Waiting] = []
        """In order of arrival."""
        self.placed_at_once = 0
        self.last_end_s: float | None = history.from_s
        """``None``: a pod has no end."""
        self.lives: dict[str, Lived] = {}
        self.moves = 0
        self._moves_most = moves_most
        self._active: dict[int, _Active] = {}
        """By the number of its start."""
        self._history = history
        self._check = check
        self._verdicts = Verdicts(self.table)
        self._nodes: list[str] = []
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._number = 0

    def run(self) -> "_World":
        """Let everything happen, also what follows the period."""
        history = self._history
        for devices in history.devices:
            self.table.upsert_node(devices)
        self._nodes = self.table.nodes()
        for run in history.running:
            self._book(run.request, run.node, run.containers, end_s=run.end_s)
        for put in history.puts:
            self._at(put.time_s, _PUT, partial(self._put, put.devices))
        for run in history.arrivals:
            self._at(run.arrival_s, _ARRIVAL, partial(self._arrive, run))
        while self._events:
            now_s, _, _, happen = heapq.heappop(self._events)
            self.meter.advance(now_s, waiting=len(self.waiting))
            happen(now_s)
            self._check()
        self.meter.finish(waiting=len(self.waiting))
        return self

    def _at(self, time_s: float, order: int, happen: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, order, self._number, happen))

    def _book(
        self, request: PodRequest, node: str, containers: Shares, *, end_s: float | None
    ) -> None:
        self.table.book(node, containers)
        self._number += 1
        number, active = self._number, _Active(request, node, containers)
        self._active[number] = active
        if end_s is not None:
            self._at(end_s, _RELEASE, partial(self._release, number))

    def _release(self, number: int, now_s: float) -> None:
        active = self._active.pop(number)
        self.table.unbook(active.node, active.containers)
        self._retry(active.node, now_s)
        if self.waiting and self._moves_most:
            one = self.waiting[0]
            placement = self._made_to_fit(one.request)
            if placement is not None:
                del self.waiting[0]
                self.waits_s.append(now_s - one.run.arrival_s)
                self._start(one.run, placement.node, placement.containers, now_s)

    def _made_to_fit(self, request: PodRequest) -> Placement | None:
        """Move running pods so that this one fits, if a plan is found."""
        if not self._moves_most:
            return None
        plan = plan_moves(
            self.table,
            request,
            [
                Tenant(
                    request=replace(active.request, uid=str(number)),
                    node=active.node,
                    containers=active.containers,
                )
                for number, active in self._active.items()
            ],
            most_moves=self._moves_most,
            most_trials=_MOVE_TRIALS,
            most_targets=_MOVE_TARGETS,
        )
        if not plan.moves:
            return None
        for move in plan.moves:
            active = self._active[int(move.uid)]
            self.table.unbook(active.node, active.containers)
            self.table.book(move.target, move.takes)
            active.node, active.containers = move.target, move.takes
        self.moves += len(plan.moves)
        return Placement(node=plan.node, containers=plan.containers)

    def _put(self, devices: NodeDevices, now_s: float) -> None:
        self.table.upsert_node(devices)
        self._nodes = self.table.nodes()
        self._retry(devices.node, now_s)

    def _arrive(self, run: Run, now_s: float) -> None:
        if self.policy is None:
            if run.is_placed and run.start_s <= now_s:
                self._start(run, run.node, run.containers, now_s)
                self.placed_at_once += 1
                return
            self.waiting.append(_Waiting(run, run.request, NO_PLAN))
            if run.is_placed:
                self._at(run.start_s, _ARRIVAL, partial(self._start_recorded, run))
            return
        request = replace(run.request, policy=self.policy)
        placement = self._placed(request, self._candidates(run))
        if placement is None and not run.is_pinned:
            placement = self._made_to_fit(request)
        if placement is None:
            self.waiting.append(_Waiting(run, request, compile_request(request)))
        else:
            self.placed_at_once += 1
            self._start(run, placement.node, placement.containers, now_s)

    def _start_recorded(self, run: Run, now_s: float) -> None:
        """Start a pod that waited, when the record has it start."""
        self.waiting = [one for one in self.waiting if one.run is not run]
        self.waits_s.append(now_s - run.arrival_s)
        self._start(run, run.node, run.containers, now_s)

    def _candidates(self, run: Run) -> Sequence[str]:
        if run.is_pinned:
            return [run.node]
        return self._nodes if run.offered is None else run.offered

    def _placed(self, request: PodRequest, nodes: Sequence[str]) -> Placement | None:
        fitting = self._verdicts.filter(request, nodes).left
        if not len(fitting):
            return None
        node = self._verdicts.prioritize(request, fitting).best(1)[0][0]
        return _picked(self.table, request, node)

    def _retry(self, node: str, now_s: float) -> None:
        """Start pods that wait and now fit on ``node``, the only one that has more capacity."""
        if self.policy is None:
            return
        refused: set[Plan] = set()
        left: list[_Waiting] = []
        for one in self.waiting:
            placement = None
            if one.plan not in refused and self._is_candidate(one.run, node):
                placement = _picked(self.table, one.request, node)
                if placement is None:
                    refused.add(one.plan)
            if placement is None:
                left.append(one)
                continue
            self.waits_s.append(now_s - one.run.arrival_s)
            self._start(one.run, node, placement.containers, now_s)
        self.waiting = left

    @staticmethod
    def _is_candidate(run: Run, node: str) -> bool:
        if run.is_pinned:
            return run.node == node
        return run.offered is None or node in run.offered

    def _start(self, run: Run, node: str, containers: Shares, now_s: float) -> None:
        end_s = None if run.end_s is None else now_s + (run.end_s - run.start_s)
        if end_s is None or self.last_end_s is None:
            self.last_end_s = None
        else:
            self.last_end_s = max(self.last_end_s, end_s)
        self._started[id(run)] = (now_s - run.arrival_s, node, containers)
        self.lives[run.request.uid] = Lived(now_s, end_s)
        self._book(run.request, node, containers, end_s=end_s)

    def pods(self) -> tuple[PodOutcome, ...]:
        """Return the arrivals in order."""
        return tuple(self._outcome(run) for run in self._history.arrivals)

    def _outcome(self, run: Run) -> PodOutcome:
        waited_s = max(0.0, self._history.until_s - run.arrival_s)
        wait_s, node, containers = self._started.get(id(run), (waited_s, "", ()))
        return PodOutcome(
            namespace=run.request.namespace,
            pod=run.request.name,
            node=node,
            devices=tuple(share.uuid for one in containers for share in one.shares),
            wait_s=round(wait_s, 3),
        )

    def result(self, prices: Prices) -> PolicyResult:
        """Return the figures."""
        until_s, arrivals = self._history.until_s, self._history.arrivals
        waits_s = sorted(
            self.waits_s + [max(0.0, until_s - one.run.arrival_s) for one in self.waiting]
        )
        makespan_s = None
        if arrivals and self.last_end_s is not None and not self.waiting:
            makespan_s = round(self.last_end_s - arrivals[0].arrival_s, 3)
        meter = self.meter
        return PolicyResult(
            policy=None
            if self.policy is None
            else ComparedPolicy(
                node_policy=self.policy.node,
                device_policy=self.policy.device,
                weights=self.policy.weights,
            ),
            placed_at_once=self.placed_at_once,
            waited=len(waits_s),
            never_placed=len(self.waiting),
            wait_total_s=round(sum(waits_s), 3),
            wait_p95_s=round(waits_s[ceil(_P95 * len(waits_s)) - 1], 3) if waits_s else 0.0,
            used_devices_full_mean=_mean(meter.full_s, meter.in_use_s),
            used_devices_full_peak=round(meter.full_peak, 4),
            devices_used_peak=meter.used_peak,
            devices_free_mean=_mean(meter.free_s, meter.measured_s),
            stranded_mean=_mean(sum(meter.stranded), len(meter.stranded)),
            makespan_s=makespan_s,
            device_hours=round(sum(meter.used_s_by_model.values()) / _HOUR_S, 4),
            cost=_cost(meter.used_s_by_model, prices),
            series=Series(
                devices_used=tuple(meter.used),
                devices_free=tuple(meter.free),
                used_devices_full=tuple(meter.full),
                stranded=tuple(meter.stranded),
                waiting=tuple(meter.waiting),
            ),
        )


class _Meter:
    """Sums up the state of a table over time, and samples it."""

    def __init__(self, measured: Asks, times: Sequence[float]) -> None:
        """Sample at ``times``, of which the first and last are begin and end of the period."""
        self.table = DeviceTable()
        self._measured = measured
        self._times = times
        self._now_s = times[0]
        self.full_s = self.in_use_s = self.free_s = self.measured_s = self.booked_s = 0.0
        self.full_peak = self.booked_peak = 0.0
        self.used_peak = 0
        self.used_s_by_model: dict[str, float] = {}
        """Seconds of devices in use."""
        self.used: list[int] = []
        self.free: list[int] = []
        self.full: list[float] = []
        self.stranded: list[float] = []
        self.waiting: list[int] = []

    def advance(self, now_s: float, *, waiting: int) -> None:
        """Count the present state from the last call until ``now_s``, within the period."""
        until_s = min(now_s, self._times[-1])
        if until_s > self._now_s:
            full = fill(self.table)
            self._count(full, until_s - self._now_s)
            self._sample(full, waiting, bisect_left(self._times, until_s))
            self._now_s = until_s

    def finish(self, *, waiting: int) -> None:
        """Count the state to the end of the period."""
        self.advance(self._times[-1], waiting=waiting)
        self._sample(fill(self.table), waiting, len(self._times))

    def _count(self, full: Fill, for_s: float) -> None:
        self.measured_s += for_s
        self.free_s += for_s * (full.devices - full.devices_used)
        booked = full.booked_mib / full.capacity_mib if full.capacity_mib else 0.0
        self.booked_s += for_s * booked
        self.booked_peak = max(self.booked_peak, booked)
        self.used_peak = max(self.used_peak, full.devices_used)
        if full.devices_used:
            for model, count in used_by_model(self.table).items():
                before_s = self.used_s_by_model.get(model, 0.0)
                self.used_s_by_model[model] = before_s + for_s * count
            self.in_use_s += for_s
            self.full_s += for_s * full.used_devices_full
            self.full_peak = max(self.full_peak, full.used_devices_full)

    def _sample(self, full: Fill, waiting: int, until: int) -> None:
        """Take all samples before number ``until``: they are of the present state."""
        count = until - len(self.used)
        if count > 0:
            self.used += [full.devices_used] * count
            self.free += [full.devices - full.devices_used] * count
            self.full += [round(full.used_devices_full, 4)] * count
            self.stranded += [round(stranded(self.table, self._measured), 4)] * count
            self.waiting += [waiting] * count


def _picked(table: DeviceTable, request: PodRequest, node: str) -> Placement | None:
    placement = pick(table, request, node)
    return placement if isinstance(placement, Placement) else None


def _cost(used_s_by_model: Mapping[str, float], prices: Prices) -> float | None:
    """Return the price of the devices in use."""
    if not prices.currency:
        return None
    micros = prices.micros()
    total = sum(
        seconds / _HOUR_S * (micros(model) or 0)
        for model, seconds in sorted(used_s_by_model.items())
    )
    return round(total / MICRO, 4)


def _mean(total: float, count: float) -> float:
    return round(total / count, 4) if count else 0.0
