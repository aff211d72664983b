# SPDX-License-Identifier: Apache-2.0
"""Places of MIG instances while pods come and go, on every chip, over committed seeds.

No trace leaves a chip's table or touches an instance with an owner. Compared with HAMi's fixed rule
(1g and 3g at the highest free place, others at the lowest; the next larger profile where the
smallest has no place), no more slices are stranded: requested and refused while as many were free.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import pytest

from hami_common.model.device import Profile
from hami_common.vendors.partitions import NO_START, Division, choose_start, mask_of
from tests.support.mig import CHIPS, facts_of

SEEDS: Final = range(20261122, 20261122 + 60)
LENGTH: Final = 60
RELEASES: Final = 0.45
"""Part of a trace's steps that end an instance, as long as there is one."""


class Step(NamedTuple):
    """One step of a trace."""

    number: int
    """Of the request that is made or ended."""
    memory_mib: int
    """0: the request ends."""


def trace(seed: int, profiles: Sequence[Profile]) -> Iterator[Step]:
    """Requests for the sizes of ``profiles`` and their ends; the same for every rule."""
    dice = random.Random(seed)
    alive: list[int] = []
    made = 0
    for _ in range(LENGTH):
        if alive and dice.random() < RELEASES:
            yield Step(alive.pop(dice.randrange(len(alive))), 0)
        else:
            alive.append(made)
            yield Step(made, dice.choice(profiles).memory_mib)
            made += 1


def plain_of(chip: str) -> tuple[Profile, ...]:
    """Profiles that differ in size only; where two have one size, the one with fewer processors."""
    known: dict[int, Profile] = {}
    for profile in sorted(facts_of(chip).partitions, key=lambda p: (p.memory_mib, p.core_pct)):
        if not profile.by_name_only:
            known.setdefault(profile.memory_mib, profile)
    return tuple(known.values())


def hami_profiles(chip: str) -> tuple[Profile, ...]:
    """Those of HAMi's default list: one of each count of slices, without 4g beside 7g."""
    own = [p for p in facts_of(chip).partitions if not p.by_name_only]
    slices = {p.name.partition("g.")[0] for p in own}
    first: dict[str, Profile] = {}
    for profile in sorted(own, key=lambda p: p.memory_mib):
        word = profile.name.partition("g.")[0]
        if word != "4" or "7" not in slices:
            first.setdefault(word, profile)
    return tuple(first.values())


def by_hami(memory_mib: int, taken: int, profiles: Sequence[Profile]) -> tuple[Profile, int] | None:
    """HAMi's choice of profile and place."""
    for profile in sorted(profiles, key=lambda p: (p.memory_mib, p.core_pct)):
        if profile.memory_mib < memory_mib:
            continue
        is_high = profile.name.startswith(("1g.", "3g."))
        for start in sorted(profile.starts, reverse=is_high):
            if not mask_of(profile, start) & taken:
                return profile, start
    return None


def by_us(memory_mib: int, taken: int, profiles: Sequence[Profile]) -> tuple[Profile, int] | None:
    """Our choice: the smallest profile that fits the request, or none."""
    profile = min(
        (p for p in profiles if p.memory_mib >= memory_mib),
        key=lambda p: (p.memory_mib, p.core_pct),
    )
    start = choose_start(profile, taken, profiles)
    return None if start == NO_START else (profile, start)


def stranded(seed: int, profiles: tuple[Profile, ...], rule: object) -> int:
    """Slices that were refused in one trace although as many were free."""
    assert callable(rule)
    positions = max(max(p.starts) + p.size for p in profiles)
    size_of = {p.memory_mib: p.size for p in reversed(profiles)}
    held: dict[int, int] = {}
    taken = lost = 0
    for step in trace(seed, profiles):
        if not step.memory_mib:
            taken &= ~held.pop(step.number, 0)
            continue
        choice = rule(step.memory_mib, taken, profiles)
        if choice is None:
            free = positions - taken.bit_count()
            wanted = size_of[step.memory_mib]
            lost += wanted if free >= wanted else 0
        else:
            held[step.number] = mask_of(*choice)
            assert not held[step.number] & taken
            taken |= held[step.number]
    return lost


@pytest.mark.parametrize("of", [hami_profiles, plain_of], ids=["as in HAMi", "all plain"])
@pytest.mark.parametrize("chip", CHIPS)
def test_no_more_is_stranded_than_by_the_fixed_rule(chip: str, of: object) -> None:
    assert callable(of)
    profiles = of(chip)
    ours = [stranded(seed, profiles, by_us) for seed in SEEDS]
    theirs = [stranded(seed, profiles, by_hami) for seed in SEEDS]
    assert sum(ours) <= sum(theirs)
    if len(profiles) > 3:  # cards of four slices leave little to choose
        assert any(a < b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("chip", CHIPS)
def test_traces_stay_within_the_table_and_off_what_is_owned(chip: str) -> None:
    facts = facts_of(chip)
    division = Division(facts.partitions, facts.resources)
    refused = 0
    for seed in SEEDS:
        dice = random.Random(seed)
        owned: dict[int, tuple[Profile, int]] = {}
        for number in range(LENGTH):
            if owned and dice.random() < RELEASES:
                del owned[dice.choice(sorted(owned))]
                continue
            at = dice.randrange(len(division.profiles))
            profile = division.profiles[at]
            before = dict(owned)
            parts: dict[str, int] = {}
            for mine, start in owned.values():
                name = f"{mine.name}@{start}"
                parts[name] = parts.get(name, 0) + 1
            taken, spent = division.spent(parts)
            start = int(division.starts(at)[taken])
            assert start == choose_start(profile, taken, division.profiles)
            has_units = not bool(np.any(spent + division.needs[at] > division.capacity))
            if start == NO_START or not has_units:
                refused += 1
                continue
            assert start in profile.starts
            owned[number] = (profile, start)
            assert not mask_of(profile, start) & taken
            assert {key: owned[key] for key in before} == before
            assert not division.is_over({**parts, f"{profile.name}@{start}": 1})
            _check_counts(facts.partitions, facts.resources, list(owned.values()))
    assert refused > 0


def _check_counts(
    profiles: Sequence[Profile], totals: dict[str, int], owned: list[tuple[Profile, int]]
) -> None:
    for profile in profiles:
        if profile.limit:
            assert sum(mine is profile for mine, _ in owned) <= profile.limit
    for unit, total in totals.items():
        assert sum(mine.resources.get(unit, 0) for mine, _ in owned) <= total
