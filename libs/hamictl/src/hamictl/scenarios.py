# SPDX-License-Identifier: Apache-2.0
"""Reads a scenario file, generates its trace, and places it on a simulated fleet of equal cards.

Arrivals are generated from the parameters of the file and its seed: the same file gives the same
trace. They are placed by the scheduler's core (``hami_core.replay.compare``), over simulated time;
each case of the file is one pass with its own number of cards and mode of use. Times in seconds
since the begin of the trace, memory in MiB.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from hami_common.events.codec import UNDECODABLE
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.request import (
    ContainerRequest,
    DeviceRequest,
    PlacementPolicy,
    PodRequest,
)
from hami_core.replay.arrivals import History, Run
from hami_core.replay.compare import Placed, place
from hamictl import inputs
from hamictl.errors import InputRefused

HOUR_S: Final = 3600.0
DAY_H: Final = 24.0
_Count = Annotated[int, Meta(ge=1, le=10_000)]
_Hours = Annotated[float, Meta(ge=0, le=24 * 31)]


class Card(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kind of card that all nodes have."""

    memory_mib: _Count | Annotated[int, Meta(ge=1, le=1 << 20)] = 24_576
    slots: _Count = 10
    per_node: _Count = 1


class Group(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pods of one kind, with the distribution of their sizes and times."""

    name: str
    memory_mib: tuple[int, ...]
    """Sizes, each equally likely."""
    core_pct: int = 0
    count: int = 0
    """Pods at ``from_h``; instead of ``per_hour``."""
    per_hour: float = 0.0
    """Mean arrivals per hour (Poisson) between ``from_h`` and ``to_h``."""
    from_h: _Hours = 0.0
    to_h: _Hours = 0.0
    hours: tuple[float, ...] = ()
    """Durations in hours, each equally likely; empty: until ``until_h``."""
    until_h: _Hours = 0.0
    by_day: tuple[int, ...] = ()
    """Replicas of a service in each of equal parts of a day, repeated every day; instead of
    ``count`` and ``per_hour``. A replica starts and ends with the part."""
    requests_per_s: float = 0.0
    """Requests that one replica serves."""
    deadline_h: float = 0.0
    """Hours after ``from_h`` by which each pod should have ended; 0: none."""


class Case(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pass over the trace."""

    name: str
    cards: _Count
    whole_cards: bool = False
    """Each pod takes a whole card, as without sharing."""
    cards_of: dict[str, int] = {}
    """Cards that are dedicated to a group, by its name; pods of it use no others."""
    moves: Annotated[int, Meta(ge=0, le=4)] = 0
    """Running pods that may be moved so that a waiting one fits."""


class Check(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound of a figure, ``<case>.<figure>``."""

    text: str
    value: str
    of: str = ""
    """Figure by which the value is divided; empty: none."""
    least: float | None = None
    most: float | None = None


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario file."""

    name: str
    purpose: str
    kind: Literal["trace"]
    seed: int = 1
    hours: _Hours
    """Length of the measured period."""
    card: Card = Card()
    groups: Annotated[tuple[Group, ...], Meta(min_length=1)]
    cases: Annotated[tuple[Case, ...], Meta(min_length=1)]
    checks: Annotated[tuple[Check, ...], Meta(min_length=1)]


class Figures(Struct, frozen=True, kw_only=True):
    """Results of one case."""

    cards: int
    arrivals: int
    placed_at_once: int
    never_placed: int
    wait_total_h: float
    makespan_h: float
    """From the first arrival to the end of the last pod; 0: some pod has no end."""
    booked_mean: float
    """Booked memory as a fraction of all cards' memory, mean over the period."""
    booked_peak: float
    cards_used_peak: int
    stranded_mean: float
    """Fraction of the free memory that the pods' requests cannot use."""
    moves: int
    late: int
    """Pods that ended after their deadline, or never started."""
    served: float
    """Requests that the replicas could serve, as a fraction of the demand; 1 without services."""


class Verdict(Struct, frozen=True, kw_only=True):
    """A check with its value."""

    text: str
    value: float
    least: float | None
    most: float | None
    ok: bool


class Outcome(Struct, frozen=True, kw_only=True):
    """All cases and checks of a scenario."""

    name: str
    purpose: str
    ok: bool
    figures: dict[str, Figures]
    checks: tuple[Verdict, ...]


def read(path: Path) -> Scenario:
    """Read a scenario file; ``InputRefused`` names the field."""
    content = inputs.read(path)
    try:
        return msgspec.toml.decode(content, type=Scenario)
    except UNDECODABLE as error:
        message = f"{path}: {error}"
        raise InputRefused(message) from error


def play(scenario: Scenario, *, check: Callable[[], None] = lambda: None) -> Outcome:
    """Place the trace in every case, and check the figures."""
    pods = list(_pods(scenario))
    figures = {case.name: _figures(scenario, case, pods, check) for case in scenario.cases}
    checks = tuple(_verdict(one, figures) for one in scenario.checks)
    return Outcome(
        name=scenario.name,
        purpose=scenario.purpose,
        ok=all(one.ok for one in checks),
        figures=figures,
        checks=checks,
    )


# --- the trace ------------------------------------------------------------------------------------


class _Pod(Struct, frozen=True, kw_only=True):
    uid: str
    group: Group
    memory_mib: int
    start_s: float
    end_s: float | None


def _pods(scenario: Scenario) -> Iterator[_Pod]:
    chance = random.Random(scenario.seed)  # noqa: S311 - a reproducible trace, no secret
    for group in scenario.groups:
        for number, (start_s, end_s) in enumerate(_lives(scenario, group, chance)):
            yield _Pod(
                uid=f"{group.name}-{number}",
                group=group,
                memory_mib=chance.choice(group.memory_mib),
                start_s=start_s,
                end_s=end_s,
            )


def _lives(
    scenario: Scenario, group: Group, chance: random.Random
) -> Iterator[tuple[float, float | None]]:
    """Yield start and end of each pod of the group."""
    if group.by_day:
        yield from _replicas(scenario, group)
        return
    starts_s = [group.from_h * HOUR_S] * group.count
    now_s = group.from_h * HOUR_S
    while group.per_hour:
        now_s += chance.expovariate(group.per_hour / HOUR_S)
        if now_s >= group.to_h * HOUR_S:
            break
        starts_s.append(now_s)
    for start_s in starts_s:
        if group.hours:
            yield start_s, start_s + chance.choice(group.hours) * HOUR_S
        else:
            yield start_s, group.until_h * HOUR_S or None


def _replicas(scenario: Scenario, group: Group) -> Iterator[tuple[float, float]]:
    """Yield the replicas of a service: each runs over consecutive parts that need it."""
    part_s = DAY_H / len(group.by_day) * HOUR_S
    count = round(scenario.hours * HOUR_S / part_s)
    wanted = [group.by_day[n % len(group.by_day)] for n in range(count)]
    for replica in range(max(wanted)):
        begun: int | None = None
        for number, replicas in enumerate([*wanted, 0]):
            if replicas > replica and begun is None:
                begun = number
            elif replicas <= replica and begun is not None:
                yield begun * part_s, number * part_s
                begun = None


# --- one case -------------------------------------------------------------------------------------


def _figures(
    scenario: Scenario, case: Case, pods: list[_Pod], check: Callable[[], None]
) -> Figures:
    pools = dict(case.cards_of)
    if left := case.cards - sum(pools.values()):
        pools[""] = left
    placed = {
        pool: _place(scenario, case, pods, check, pool=pool, cards=cards)
        for pool, cards in pools.items()
    }
    lives = {uid: life for one in placed.values() for uid, life in one.lives.items()}
    parts = [one.result for one in placed.values()]
    ends = [part.makespan_s for part in parts]
    late = 0
    lost_s = demand_s = 0.0
    for pod in pods:
        life, group = lives.get(pod.uid), pod.group
        if group.deadline_h:
            deadline_s = (group.from_h + group.deadline_h) * HOUR_S
            late += life is None or life.end_s is None or life.end_s > deadline_s
        if group.requests_per_s and pod.end_s is not None:
            length_s = pod.end_s - pod.start_s
            waited_s = length_s if life is None else min(length_s, life.start_s - pod.start_s)
            demand_s += length_s * group.requests_per_s
            lost_s += waited_s * group.requests_per_s
    return Figures(
        cards=case.cards,
        arrivals=len(pods),
        placed_at_once=sum(part.placed_at_once for part in parts),
        never_placed=sum(part.never_placed for part in parts),
        wait_total_h=round(sum(part.wait_total_s for part in parts) / HOUR_S, 3),
        makespan_h=round(max((end or 0.0 for end in ends), default=0.0) / HOUR_S, 3),
        booked_mean=_weighted(placed, pools, lambda one: one.booked_mean),
        booked_peak=_weighted(placed, pools, lambda one: one.booked_peak),
        cards_used_peak=sum(part.devices_used_peak for part in parts),
        stranded_mean=_weighted(placed, pools, lambda one: one.result.stranded_mean),
        moves=sum(one.moves for one in placed.values()),
        late=late,
        served=round(1 - lost_s / demand_s, 6) if demand_s else 1.0,
    )


def _weighted(
    placed: dict[str, Placed], pools: dict[str, int], value: Callable[[Placed], float]
) -> float:
    total = sum(value(placed[pool]) * cards for pool, cards in pools.items())
    return round(total / sum(pools.values()), 4)


def _place(
    scenario: Scenario,
    case: Case,
    pods: list[_Pod],
    check: Callable[[], None],
    *,
    pool: str,
    cards: int,
) -> Placed:
    """Place the pods of one pool of cards."""
    mine = [
        pod
        for pod in pods
        if (pod.group.name == pool if pool else pod.group.name not in case.cards_of)
    ]
    arrivals = tuple(
        Run(
            request=_request(pod, is_whole=case.whole_cards),
            node="",
            containers=(),
            start_s=pod.start_s,
            end_s=pod.end_s,
        )
        for pod in sorted(mine, key=lambda pod: (pod.start_s, pod.uid))
    )
    history = History(
        from_s=0.0,
        until_s=scenario.hours * HOUR_S,
        devices=tuple(_nodes(scenario.card, cards)),
        puts=(),
        running=(),
        arrivals=arrivals,
    )
    return place(history, PlacementPolicy(), moves_most=case.moves, check=check)


def _request(pod: _Pod, *, is_whole: bool) -> PodRequest:
    wanted = DeviceRequest(
        vendor="nvidia",
        count=1,
        memory_mib=0 if is_whole else pod.memory_mib,
        memory_pct=100 if is_whole else 0,
        core_pct=100 if is_whole else pod.group.core_pct,
        exclusive=is_whole,
    )
    return PodRequest(
        uid=pod.uid,
        namespace=pod.group.name,
        name=pod.uid,
        containers=(ContainerRequest(name="main", kind="app", requests=(wanted,)),),
    )


def _nodes(card: Card, cards: int) -> Iterator[NodeDevices]:
    for first in range(0, cards, card.per_node):
        node = f"node-{first // card.per_node}"
        yield NodeDevices(
            node=node,
            vendor="nvidia",
            boot_id="",
            seq=1,
            time_s=0.0,
            config_generation=1,
            devices=tuple(
                Device(
                    uuid=f"GPU-{node}-{index}",
                    vendor="nvidia",
                    index=index,
                    type="card",
                    memory_mib=card.memory_mib,
                    capacity_mib=card.memory_mib,
                    slots=card.slots,
                )
                for index in range(min(card.per_node, cards - first))
            ),
        )


# --- checks ---------------------------------------------------------------------------------------


def _verdict(one: Check, figures: dict[str, Figures]) -> Verdict:
    value = _value(one.value, figures)
    if one.of:
        divisor = _value(one.of, figures)
        value = value / divisor if divisor else float("inf")
    is_ok = (one.least is None or value >= one.least) and (one.most is None or value <= one.most)
    return Verdict(text=one.text, value=round(value, 4), least=one.least, most=one.most, ok=is_ok)


def _value(name: str, figures: dict[str, Figures]) -> float:
    case, _, figure = name.partition(".")
    if case not in figures or figure not in Figures.__struct_fields__:
        message = f"checks: {name!r} is no figure of a case; write <case>.<figure>, with one of: "
        raise InputRefused(message + ", ".join(Figures.__struct_fields__))
    return float(getattr(figures[case], figure))
