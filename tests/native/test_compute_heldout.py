# SPDX-License-Identifier: Apache-2.0
"""The compute limit keeps its promises for loads that its constants were not chosen on.

Loads are drawn by chance from fixed seeds, in virtual time: every run is exact and repeatable.
"""

import math
import random
from pathlib import Path

import pytest

from tests.support import compute
from tests.support.compute import simulate

CAP_ERROR = 3.0
OVERSHOOT = 10.0
TENANT_ERROR = 5.0
CONVERGED_S = 3.0
EQUAL = 1.2


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compute.build("simulation", tmp_path_factory.mktemp("heldout"))


def any_us(chance: random.Random, least: float = 10, most: float = 20_000) -> float:
    """A duration; each order of magnitude is as likely as any other."""
    return round(math.exp(chance.uniform(math.log(least), math.log(most))), 1)


def any_work(chance: random.Random) -> str:
    """A kernel or graph whose runs differ by up to three percent."""
    jitter, graph = chance.choice([0, 10, 30]), chance.choice([0, 1])
    return f"work us={any_us(chance)} jitter={jitter} graph={graph}"


@pytest.mark.parametrize("seed", range(16))
def test_cap_holds(program: Path, seed: int) -> None:
    chance = random.Random(f"held out: cap {seed}")
    pct = chance.randint(10, 90)
    works = " ".join(any_work(chance) for _ in range(1 if seed % 2 else chance.randint(2, 8)))
    words = f"sms={chance.randint(1, 200)} seconds=10 tenant pct={pct} process thread {works}"
    result = simulate(program, words)
    tenant = result.tenants[0]
    assert tenant.share(0, 10) == pytest.approx(pct, abs=CAP_ERROR)
    assert max(tenant.windows()) < pct + OVERSHOOT
    assert tenant.share(CONVERGED_S) == pytest.approx(pct, abs=CAP_ERROR)
    assert all(process.late == 0 for process in result.processes)


@pytest.mark.parametrize("seed", range(12))
def test_two_tenants_get_their_shares(program: Path, seed: int) -> None:
    chance = random.Random(f"held out: two {seed}")
    small_pct = (10, 20, 30)[seed % 3]
    result = simulate(
        program,
        f"seconds=13 seed={seed} tenant pct={small_pct} process thread {any_work(chance)}",
        f"tenant pct={100 - small_pct} process thread {any_work(chance)}",
    )
    small, large = (tenant.share(CONVERGED_S) for tenant in result.tenants)
    assert small == pytest.approx(small_pct, abs=TENANT_ERROR)
    assert large == pytest.approx(100 - small_pct, abs=TENANT_ERROR)


@pytest.mark.parametrize("seed", range(10))
def test_equal_processes_of_a_container_get_equal_parts(program: Path, seed: int) -> None:
    chance = random.Random(f"held out: equal {seed}")
    pct, work = chance.choice([20, 35, 50, 80]), any_work(chance)
    processes = [f"process thread {work}" for _ in range(chance.randint(2, 8))]
    result = simulate(program, f"seconds=15 seed={seed} tenant pct={pct}", *processes)
    parts = [process.pct for process in result.processes]
    assert max(parts) <= EQUAL * min(parts)
    assert result.tenants[0].share(0, 10) == pytest.approx(pct, abs=CAP_ERROR)


@pytest.mark.parametrize("us", [15, 70, 700, 3000])
def test_sixteen_processes_that_begin_together_get_equal_parts(program: Path, us: int) -> None:
    processes = [f"process thread work us={us}" for _ in range(16)]
    result = simulate(program, "seconds=10 seed=5 tenant pct=35", *processes)
    parts = [process.pct for process in result.processes]
    assert max(parts) <= EQUAL * min(parts)
    assert result.tenants[0].share() == pytest.approx(35, abs=CAP_ERROR)


@pytest.mark.parametrize(
    ("us", "us2", "permille"),
    [(70, 1200, 350), (500, 6800, 800), (30, 560, 300), (1100, 12_000, 700), (200, 1500, 850)],
)
def test_one_name_for_short_and_long_work_is_counted_in_full(
    program: Path, us: int, us2: int, permille: int
) -> None:
    words = (
        f"seconds=14 seed=3 tenant pct=40 process thread work us={us} us2={us2} chance2={permille}"
    )
    tenant = simulate(program, words).tenants[0]
    assert tenant.share(CONVERGED_S) == pytest.approx(40, abs=CAP_ERROR)


VARYING = [
    "us=300 us2=3000 chance2=200",
    "us=1000 us2=5000 chance2=300",
    "us=10000 jitter=400",
    "us=2500 jitter=400",
]
"""Durations that a neighbor's time slices could explain as well."""


@pytest.mark.parametrize("work", VARYING)
def test_work_that_varies_as_slices_do_is_counted_in_full(program: Path, work: str) -> None:
    words = f"seconds=14 seed=3 tenant pct=40 process thread work {work}"
    tenant = simulate(program, words).tenants[0]
    assert tenant.share(CONVERGED_S) == pytest.approx(40, abs=CAP_ERROR)


@pytest.mark.parametrize("work", VARYING)
def test_varying_work_and_a_busy_neighbor_are_distinguished(program: Path, work: str) -> None:
    words = f"seconds=14 seed=3 tenant pct=40 process thread work {work}"
    result = simulate(program, words, "tenant pct=60 process thread work us=700")
    small, large = (tenant.share(CONVERGED_S) for tenant in result.tenants)
    assert small == pytest.approx(40, abs=TENANT_ERROR)
    assert large == pytest.approx(60, abs=TENANT_ERROR)


def test_three_tenants_get_their_shares(program: Path) -> None:
    works = ((20, 9000), (30, 200), (50, 2500))
    words = (f"tenant pct={pct} process thread work us={us}" for pct, us in works)
    result = simulate(program, "seconds=13", *words)
    for (pct, _), tenant in zip(works, result.tenants, strict=True):
        assert tenant.share(CONVERGED_S) == pytest.approx(pct, abs=TENANT_ERROR)


def test_processes_with_long_kernels_that_begin_together_get_equal_parts(program: Path) -> None:
    processes = ["process thread work us=19146 jitter=10"] * 28
    result = simulate(program, "seconds=15 seed=802 tenant pct=80", *processes)
    parts = [process.pct for process in result.processes]
    assert max(parts) <= EQUAL * min(parts)
    assert result.tenants[0].share(CONVERGED_S) == pytest.approx(80, abs=TENANT_ERROR)


@pytest.mark.parametrize("seed", range(6))
def test_work_that_grows_suddenly_is_repaid(program: Path, seed: int) -> None:
    chance = random.Random(f"held out: change {seed}")
    pct, us = chance.randint(20, 70), any_us(chance, 10, 2000)
    us3 = min(us * any_us(chance, 5, 200), 20_000)
    words = f"seconds=40 tenant pct={pct} process thread work us={us} us3={us3:.1f} from_ms=2000"
    assert simulate(program, words).tenants[0].share() == pytest.approx(pct, abs=CAP_ERROR)


@pytest.mark.parametrize(
    ("count", "us", "pct"), [(29, 10_519, 50), (30, 4828, 20), (14, 16_828, 35), (26, 9089, 50)]
)
def test_many_processes_that_begin_together_keep_to_the_limit_from_the_first_second(
    program: Path, count: int, us: int, pct: int
) -> None:
    processes = [f"process thread work us={us} jitter=10"] * count
    result = simulate(program, f"seconds=15 seed=5 tenant pct={pct}", *processes)
    parts = [process.pct for process in result.processes]
    assert max(parts) <= EQUAL * min(parts)
    assert result.tenants[0].share(0, 10) == pytest.approx(pct, abs=CAP_ERROR)
    assert result.tenants[0].share(CONVERGED_S) == pytest.approx(pct, abs=CAP_ERROR)


LONG_US = 20_000
CHANGED_S = 2.037
"""In the middle of a period."""


@pytest.mark.parametrize("pct", [10, 48, 70, 90])
def test_cap_holds_when_a_hundred_microseconds_become_twenty_milliseconds(
    program: Path, pct: int
) -> None:
    work = f"work us=100 us3={LONG_US} from_ms={CHANGED_S * 1000:.0f}"
    result = simulate(program, f"seconds=13 tenant pct={pct} process thread {work}")
    tenant = result.tenants[0]
    assert tenant.share(CHANGED_S, CHANGED_S + 10) == pytest.approx(pct, abs=CAP_ERROR)
    assert max(tenant.windows()) < pct + OVERSHOOT
    assert result.processes[0].late == 0


@pytest.mark.parametrize("late_us", [0, 60])
@pytest.mark.parametrize("pct", [20, 48, 70, 90])
def test_ten_microseconds_that_become_twenty_milliseconds_are_repaid_in_three_seconds(
    program: Path, pct: int, late_us: int
) -> None:
    """Queued work runs: about 34 launches, and as many more as waiters sleep too long."""
    work = f"work us=10 us3={LONG_US} from_ms={CHANGED_S * 1000:.0f}"
    words = f"seconds=15 late_us={late_us} tenant pct={pct} process thread {work}"
    result = simulate(program, words)
    tenant = result.tenants[0]
    queued_s = 34 * LONG_US / 1e6 * (1.5 if late_us else 1)
    begun = tenant.series[int(CHANGED_S / compute.STEP_S) :]
    above_s = sum(max(0, part - pct) for part in begun[:20]) / 100 * compute.STEP_S
    assert above_s < queued_s
    settled = tenant.windows(CHANGED_S + CONVERGED_S)
    assert pct - TENANT_ERROR < min(settled)
    assert max(settled) < pct + TENANT_ERROR
    assert result.processes[0].late == 0


@pytest.mark.parametrize("neighbour_us", [800, 12_000])
@pytest.mark.parametrize("us", [40, 900, 7000, 15_000])
def test_cap_holds_beside_a_neighbor_that_never_pauses(
    program: Path, us: int, neighbour_us: int
) -> None:
    words = f"seconds=13 tenant pct=40 process thread work us={us} tenant limited=0"
    result = simulate(program, words, f"process thread work us={neighbour_us}")
    assert result.tenants[0].share(CONVERGED_S) == pytest.approx(40, abs=TENANT_ERROR)


@pytest.mark.parametrize("us", [900, 15_000])
def test_cap_is_not_exceeded_where_probes_measure_nothing(program: Path, us: int) -> None:
    words = f"seconds=13 probes=0 tenant pct=40 process thread work us={us} tenant limited=0"
    share = simulate(program, words, "process thread work us=800").tenants[0].share(CONVERGED_S)
    assert 40 / 2 - CAP_ERROR < share < 40 + CAP_ERROR


@pytest.mark.parametrize("pause_us", [200_000, 1_000_000])
def test_cap_holds_beside_an_intermittent_neighbor(program: Path, pause_us: int) -> None:
    words = "seconds=16 tenant pct=40 process thread work us=9000 tenant limited=0 process"
    result = simulate(program, words, f"thread sync=1000 pause_us={pause_us} work us=1000")
    assert result.tenants[0].share(CONVERGED_S) == pytest.approx(40, abs=TENANT_ERROR)
