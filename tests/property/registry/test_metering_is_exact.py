# SPDX-License-Identifier: Apache-2.0
"""Metering a random day: what is reserved plus what is free is the capacity, to the millisecond.

Each device has lanes of a fourth of it, in which allocations follow each other, so that the true
amounts are known. The records arrive repeatedly and shuffled, as after restarts of replicas
and deliveries that were not acknowledged; agents restart with another boot ID and sequence,
containers restart and their counters begin again.

The law: over any interval, for memory and compute the sum over tenants is capacity times time
minus what is free, and for device time minus what is free and counted twice, each to the
millisecond. ``test_a_day_has_its_size`` states how much a day holds.
"""

import random
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.events import codec
from hami_common.events.allocation import Account, AllocationRecord
from hami_common.events.inventory import NodeDevices
from hami_common.events.usage import ContainerUsage, ShareUsage, UsageRecord
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.prices import Prices
from hami_registry.core.consumption import BYS, Consumption, Meter
from tests.support.builders import device

DAY_MS = 86_400_000
LANES = 4
SAMPLES = 24
MEMORY_MIB = 80_000
NODES = ("n1", "n2")
DEVICES = ("a", "b")
CAPACITY = len(NODES) * len(DEVICES)


class Life(NamedTuple):
    pod: int
    node: str
    uuid: str
    namespace: str
    steps: tuple[tuple[int, int, int], ...]
    """Time, memory, compute; the last one ends it and may lie after the day."""


def shares_of_a_day(rng: random.Random) -> list[Life]:
    found: list[Life] = []
    for node in NODES:
        for uuid in DEVICES:
            for _ in range(LANES):
                now = rng.randrange(-DAY_MS // 4, DAY_MS // 4)
                while now < DAY_MS:
                    times = [now]
                    for _ in range(rng.randint(1, 3)):
                        times.append(times[-1] + rng.randrange(1, DAY_MS // 3))
                    amounts = [
                        (rng.randint(1, MEMORY_MIB // LANES), rng.randint(0, 100 // LANES))
                        for _ in times
                    ]
                    found.append(
                        Life(
                            pod=len(found),
                            node=node,
                            uuid=uuid,
                            namespace=rng.choice(("team-a", "team-b", "team-c")),
                            steps=tuple((t, *a) for t, a in zip(times, amounts, strict=True)),
                        )
                    )
                    now = times[-1] + rng.choice((0, rng.randrange(1, DAY_MS // 8)))
    return found


def records_of(share: Life, rng: random.Random) -> list[AllocationRecord]:
    found = []
    for number, (time_ms, mib, core) in enumerate(share.steps):
        is_last = number == len(share.steps) - 1
        op: Any = "release" if is_last else "resize" if number else "reserve"
        one = Share(vendor="nvidia", uuid=share.uuid, memory_mib=mib, core_pct=core)
        record = AllocationRecord(
            op=op,
            allocation_id=f"x{share.pod}",
            node=share.node,
            pod_uid=f"u{share.pod}",
            namespace=share.namespace,
            pod=f"p{share.pod}",
            time_s=time_ms / 1000,
            containers=()
            if is_last
            else (ContainerShares(name="main", kind="app", shares=(one,)),),
            account=Account(queue=f"q-{share.namespace}") if share.pod % 2 else None,
            sku=f"s@{share.pod % 3}" if share.pod % 4 else "",
            labels=(("team", share.namespace),) if share.pod % 5 else (),
        )
        if time_ms <= DAY_MS:
            found += [record] * rng.choice((1, 1, 2))
    return found


def counters_of(
    share: Life, times: list[int], rng: random.Random
) -> tuple[dict[int, tuple[int, int]], int]:
    """Samples of device milliseconds and launches by time, and the true sum of their growth."""
    total = device_ms = launches = 0
    samples = {}
    for time in times:
        if not share.steps[0][0] < time < share.steps[-1][0]:
            continue
        grown = rng.choice((0, rng.randrange(1, 60_000)))
        if device_ms > grown and rng.random() < 0.2:  # the container restarted since
            device_ms = launches = 0
        device_ms += grown
        launches += 1
        total += grown
        samples[time] = (device_ms, launches)
    return samples, total


def usage_of(shares: list[Life], rng: random.Random) -> tuple[list[UsageRecord], int]:
    times = list(range(0, DAY_MS + 1, DAY_MS // SAMPLES))
    told: list[UsageRecord] = []
    total = 0
    for node in NODES:
        restarts = rng.sample(range(1, SAMPLES), k=rng.randint(0, 3))
        by_time: dict[int, list[tuple[Life, tuple[int, int]]]] = {time: [] for time in times}
        for share in shares:
            if share.node == node and share.steps[0][0] >= 0:
                samples, grown = counters_of(share, times, rng)
                total += grown
                for time, sample in samples.items():
                    by_time[time].append((share, sample))
        for number, (time, several) in enumerate(by_time.items()):
            who = [
                {
                    "namespace": share.namespace,
                    "pod": f"p{share.pod}",
                    "pod_uid": f"u{share.pod}",
                    "container": "main",
                }
                for share, _ in several
            ]
            record = UsageRecord(
                node=node,
                boot_id=f"b{sum(restart <= number for restart in restarts)}",
                seq=number - max((one for one in restarts if one <= number), default=0),
                time_s=time / 1000,
                every_s=DAY_MS / SAMPLES / 1000,
                shares=tuple(
                    ShareUsage(
                        vendor="nvidia",
                        uuid=share.uuid,
                        allocation_id=f"x{share.pod}",
                        used_mib=rng.randint(0, MEMORY_MIB // LANES),
                        **one,  # type: ignore[arg-type]  # the names of the pod
                    )
                    for one, (share, _) in zip(who, several, strict=True)
                ),
                containers=tuple(
                    ContainerUsage(
                        device_time_s=device_ms / 1000,
                        launches=launches,
                        **one,  # type: ignore[arg-type]  # the names of the pod
                    )
                    for one, (_, (device_ms, launches)) in zip(who, several, strict=True)
                ),
            )
            told += [record] * rng.choice((1, 1, 2))
    return told, total


def devices_of(node: str, rng: random.Random) -> list[NodeDevices]:
    devices = tuple(
        device(uuid, index=index, memory_mib=MEMORY_MIB) for index, uuid in enumerate(DEVICES)
    )
    record = NodeDevices(
        node=node,
        vendor="nvidia",
        boot_id="b",
        seq=1,
        time_s=-DAY_MS / 1000,
        config_generation=1,
        devices=devices,
    )
    return [record] * rng.choice((1, 3))


class Day:
    """The records of a day, and a way to meter parts of it."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.shares = shares_of_a_day(rng)
        self.ledger = [one for share in self.shares for one in records_of(share, rng)]
        self.devices = [one for node in NODES for one in devices_of(node, rng)]
        self.usage, self.device_ms = usage_of(self.shares, rng)
        for several in (self.ledger, self.devices, self.usage):
            rng.shuffle(several)

    def meter(self, start_ms: int, end_ms: int) -> Meter:
        return Meter.of(
            ledger=self.ledger,
            devices=self.devices,
            usage=self.usage,
            from_s=start_ms / 1000,
            to_s=end_ms / 1000,
            prices=Prices(currency="EUR", device_hour={"*": 1.0}),
        )

    def held(self, start_ms: int, end_ms: int) -> tuple[int, int, int]:
        """The true MiB-milliseconds, percent-milliseconds and shares' milliseconds."""
        memory = core = whole = 0
        for share in self.shares:
            for (begin, mib, pct), (end, _, _) in zip(share.steps, share.steps[1:], strict=False):
                length = max(0, min(end, end_ms) - max(begin, start_ms))
                memory += mib * length
                core += pct * length
                whole += length
        return memory, core, whole


def in_order(records: list[Any]) -> list[Any]:
    """Each record once, by its time."""
    once = {codec.encode(one): one for one in records}
    return sorted(once.values(), key=lambda one: one.time_s)


def exact(value: float, unit: int) -> int:
    return round(value * unit)


def amounts(found: Consumption) -> tuple[int, ...]:
    total = found.total
    seconds = (total.reserved_s, total.used_s, total.wasted_s, total.idle_s, total.whole_s)
    return tuple(exact(one, 10**9) for one in seconds)


@given(seed=st.integers(0, 2**32), cut=st.tuples(*[st.integers(0, DAY_MS)] * 2).map(sorted))
def test_reserved_and_free_are_the_capacity_over_any_interval(seed: int, cut: list[int]) -> None:
    start, end = cut[0], max(cut[1], cut[0] + 1)
    day = Day(seed)
    meter = day.meter(start, end)
    found = meter.consumption(by="namespace")
    memory, core, whole = day.held(start, end)
    fleet = found.fleet
    assert fleet is not None
    assert exact(found.total.memory_mib_s, 1000) == memory
    assert exact(found.total.core_pct_s, 1000) == core
    assert exact(found.total.whole_s, 10**9) == whole * 10**6
    length = end - start
    assert exact(fleet.capacity_mib_s, 1000) == CAPACITY * MEMORY_MIB * length
    assert memory + exact(fleet.free_mib_s, 1000) == CAPACITY * MEMORY_MIB * length
    assert core + exact(fleet.free_core_pct_s, 1000) == CAPACITY * 100 * length
    reserved = sum(exact(row.reserved_s, 10**9) for row in found.items)
    free, overlap = exact(fleet.free_s, 10**9), exact(fleet.overlap_s, 10**9)
    assert reserved + free - overlap == CAPACITY * length * 10**6
    assert min(free, overlap) >= 0
    for by in BYS:
        groups = meter.consumption(by=by, label="team" if by == "label" else "")
        assert sum(exact(row.reserved_s, 10**9) for row in groups.items) == reserved
        assert sum(exact(row.used_s, 10**9) for row in groups.items) == amounts(found)[1]
        assert groups.total == found.total
    assert found.unknown == 0


@given(seed=st.integers(0, 2**32), cut=st.integers(1, DAY_MS - 1))
def test_two_halves_are_the_day(seed: int, cut: int) -> None:
    day = Day(seed)
    whole = day.meter(0, DAY_MS).consumption(by="namespace")
    halves = [day.meter(*part).consumption(by="namespace") for part in ((0, cut), (cut, DAY_MS))]
    assert amounts(whole) == tuple(map(sum, zip(*map(amounts, halves), strict=True)))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), duplicates=st.integers(1, 3))
def test_repeated_and_reordered_deliveries_change_no_sum(seed: int, duplicates: int) -> None:
    """The answer to the records once and in order is that to any deliveries of them."""
    day = Day(seed)
    delivered = day.meter(0, DAY_MS).consumption(by="namespace")
    day.ledger = in_order(day.ledger) * duplicates
    day.devices = in_order(day.devices) * duplicates
    day.usage = in_order(day.usage) * duplicates
    assert day.meter(0, DAY_MS).consumption(by="namespace") == delivered


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_a_day_has_its_size(seed: int) -> None:
    day = Day(seed)
    nodes = {one.node for one in day.usage}
    assert nodes == set(NODES)
    assert len({(one.node, one.time_s) for one in day.usage}) == len(NODES) * (SAMPLES + 1)
    assert len(day.shares) >= CAPACITY * LANES
    assert len({share.namespace for share in day.shares}) == 3


@given(seed=st.integers(0, 2**32))
def test_restarts_lose_no_counted_time_and_use_is_within_the_share(seed: int) -> None:
    day = Day(seed)
    found = day.meter(0, DAY_MS).consumption(by="pod")
    assert exact(found.total.device_time_s, 1000) == day.device_ms
    for row in found.items:
        parts = (row.used_s, row.wasted_s, row.unmeasured_s)
        assert min(parts) >= 0
        assert sum(exact(part, 10**9) for part in parts) == exact(row.reserved_s, 10**9)
        assert row.idle_s <= row.reserved_s <= row.whole_s
