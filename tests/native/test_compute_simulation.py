# SPDX-License-Identifier: Apache-2.0
"""The compute limit keeps its promises on a simulated device, in virtual time.

The figures are those of docs/limiter-compute.md. Every run is exact and repeatable.
"""

from pathlib import Path

import pytest

from tests.support import compute
from tests.support.compute import Simulation, simulate

CAP_ERROR = 3.0
OVERSHOOT = 10.0
TENANT_ERROR = 5.0
CONVERGED_S = 3.0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compute.build("simulation", tmp_path_factory.mktemp("simulation"))


def holds_cap(result: Simulation, pct: float) -> None:
    """One tenant: the cap over 10 s, its overshoot, and its convergence."""
    tenant = result.tenants[0]
    assert tenant.share(0, 10) == pytest.approx(pct, abs=CAP_ERROR)
    assert max(tenant.windows()) < pct + OVERSHOOT
    after = tenant.windows(CONVERGED_S)
    assert pct - TENANT_ERROR < min(after)
    assert max(after) < pct + TENANT_ERROR
    assert all(process.late == 0 for process in result.processes)


@pytest.mark.parametrize("pct", [10, 20, 30, 50, 70, 90])
@pytest.mark.parametrize("us", [10, 100, 1000, 5000, 20000])
def test_cap_holds_for_kernels_of_any_length(program: Path, us: int, pct: int) -> None:
    words = f"seconds=10 tenant pct={pct} process thread work us={us}"
    holds_cap(simulate(program, words), pct)


@pytest.mark.parametrize("late_us", [60, 1000])
@pytest.mark.parametrize("us", [10, 1000])
def test_cap_holds_where_waiters_oversleep(program: Path, us: int, late_us: int) -> None:
    words = f"seconds=10 late_us={late_us} tenant pct=90 process thread work us={us}"
    holds_cap(simulate(program, words), 90)


@pytest.mark.parametrize("sms", [1, 20, 80, 132, 200])
@pytest.mark.parametrize("blocks", [1, 100, 10_000, 1_000_000])
def test_cap_holds_for_any_size_of_device_and_grid(program: Path, sms: int, blocks: int) -> None:
    waves = -(-blocks // sms)
    us = min(20.0, 20_000 / waves)
    words = f"sms={sms} seconds=10 tenant pct=40 process thread"
    result = simulate(program, words, f"work us={us} wave=1 blocks={blocks} graph={blocks % 3}")
    holds_cap(result, 40)


LAYERS = " ".join(
    f"work us={us} blocks={blocks}"
    for us, blocks in ((5, 10), (20, 100), (50, 400), (3, 1), (120, 1000), (9, 64))
)


@pytest.mark.parametrize("way", ["", "sync=200 pause_us=500", "launch_ns=20000"])
def test_cap_holds_for_mixed_kernels(program: Path, way: str) -> None:
    words = f"seconds=10 tenant pct=30 process thread {way} {LAYERS}"
    holds_cap(simulate(program, words), 30)


@pytest.mark.parametrize("jitter", [50, 300])
def test_cap_holds_for_noisy_durations(program: Path, jitter: int) -> None:
    words = f"seconds=10 tenant pct=60 process thread work us=200 jitter={jitter}"
    holds_cap(simulate(program, words), 60)


@pytest.mark.parametrize(("us", "us2", "permille"), [(10, 400, 200), (1000, 20000, 500)])
def test_cap_holds_for_varying_durations_when_the_agent_knows_it_is_alone(
    program: Path, us: int, us2: int, permille: int
) -> None:
    work = f"work us={us} us2={us2} chance2={permille}"
    result = simulate(program, f"seconds=20 tenant pct=40 page=1 force=1 process thread {work}")
    assert result.tenants[0].share() == pytest.approx(40, abs=CAP_ERROR)


@pytest.mark.parametrize("small_pct", [10, 20, 30])
@pytest.mark.parametrize(
    ("small_us", "large_us"),
    [(10, 10), (10, 20000), (1000, 1000), (5000, 100), (20000, 10), (20000, 1000), (20000, 20000)],
)
def test_two_tenants_get_their_shares(
    program: Path, small_pct: int, small_us: int, large_us: int
) -> None:
    result = simulate(
        program,
        f"seconds=18 tenant pct={small_pct} process thread work us={small_us}",
        f"tenant pct={100 - small_pct} process thread work us={large_us}",
    )
    small, large = (tenant.share(CONVERGED_S) for tenant in result.tenants)
    assert small == pytest.approx(small_pct, abs=TENANT_ERROR)
    assert large == pytest.approx(100 - small_pct, abs=TENANT_ERROR)


@pytest.mark.parametrize("us", [10, 1000, 20000])
def test_cap_holds_beside_a_neighbor_without_limit(program: Path, us: int) -> None:
    result = simulate(
        program,
        f"seconds=13 tenant pct=30 process thread work us={us}",
        "tenant limited=0 process thread work us=500",
    )
    assert result.tenants[0].share(CONVERGED_S) == pytest.approx(30, abs=TENANT_ERROR)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("us", [10, 1000, 20000])
def test_equal_processes_of_a_container_get_equal_parts(program: Path, count: int, us: int) -> None:
    process = f"process thread work us={us}"
    result = simulate(program, "seconds=15 tenant pct=50", *(process for _ in range(count)))
    parts = [process.pct for process in result.processes]
    assert max(parts) <= 1.2 * min(parts)
    assert result.tenants[0].share(CONVERGED_S) == pytest.approx(50, abs=CAP_ERROR)


def test_processes_with_short_and_long_kernels_get_equal_parts(program: Path) -> None:
    process = "process thread work us="
    result = simulate(program, f"seconds=15 tenant pct=40 {process}10 {process}20000")
    parts = [process.pct for process in result.processes]
    assert max(parts) <= 1.2 * min(parts)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("us", [10, 100, 2000])
@pytest.mark.parametrize("blocks", ["part", "all"])
def test_overlapping_streams_count_once(program: Path, count: int, us: int, blocks: str) -> None:
    size = 132 // count if blocks == "part" else 1000
    threads = " ".join(f"thread work us={us} blocks={size} stream={i}" for i in range(count))
    result = simulate(program, f"seconds=13 tenant pct=40 process {threads}")
    assert result.tenants[0].share(CONVERGED_S) == pytest.approx(40, abs=CAP_ERROR)


def test_share_of_a_dead_process_goes_to_the_others(program: Path) -> None:
    process = "process thread work us=1000"
    words = f"seconds=12 tenant pct=40 process end_ms=5000 thread work us=1000 {process}"
    result = simulate(program, words)
    assert result.tenants[0].share(6) == pytest.approx(40, abs=CAP_ERROR)


@pytest.mark.parametrize(("before", "after"), [(10, 90), (90, 10), (30, 60)])
def test_a_new_limit_holds_within_a_second(program: Path, before: int, after: int) -> None:
    words = f"seconds=10 tenant pct={before} pct2={after} at_ms=5000 process thread work us=1000"
    tenant = simulate(program, words).tenants[0]
    assert tenant.share(3, 5) == pytest.approx(before, abs=CAP_ERROR)
    assert tenant.share(6, 10) == pytest.approx(after, abs=CAP_ERROR)


@pytest.mark.parametrize(("us", "us3"), [(10, 1000), (1000, 10), (20000, 100)])
def test_a_new_duration_is_followed(program: Path, us: int, us3: int) -> None:
    work = f"work us={us} us3={us3} from_ms=5000"
    tenant = simulate(program, f"seconds=15 tenant pct=40 process thread {work}").tenants[0]
    assert tenant.share(3, 5) == pytest.approx(40, abs=CAP_ERROR)
    assert tenant.share(11, 15) == pytest.approx(40, abs=CAP_ERROR)


@pytest.mark.parametrize(("us", "us3"), [(10, 1000), (100, 2000), (1000, 20000)])
def test_time_used_before_its_measurement_is_repaid(program: Path, us: int, us3: int) -> None:
    work = f"work us={us} us3={us3} from_ms=2000"
    tenant = simulate(program, f"seconds=40 tenant pct=50 process thread {work}").tenants[0]
    assert tenant.share() == pytest.approx(50, abs=CAP_ERROR)


def test_a_container_under_its_limit_never_waits(program: Path) -> None:
    work = "thread sync=20 pause_us=20000 work us=500"
    result = simulate(program, f"seconds=10 tenant pct=60 process {work}")
    assert result.processes[0].longest_wait_ms < 1
    assert result.tenants[0].share(1) == pytest.approx(33.3, abs=1)


def test_a_lone_container_may_have_the_whole_device(program: Path) -> None:
    words = "seconds=5 tenant pct=20 page=1 process thread work us=1000"
    assert simulate(program, words).tenants[0].share(1) > 99


def test_throttled_lower_priority_still_gets_a_free_device(program: Path) -> None:
    words = "seconds=5 tenant pct=100 paced=1 page=2 process thread work us=1000"
    assert simulate(program, words).tenants[0].share(1) > 95


@pytest.mark.parametrize("us", [20, 100, 1000])
def test_short_queue_beside_a_rival_leaves_the_device_busy(program: Path, us: int) -> None:
    words = f"seconds=5 tenant pct=100 paced=1 rival=1 page=2 process thread work us={us}"
    assert simulate(program, words).tenants[0].share(1) > 90


def test_backlog_of_a_lower_priority_is_short(program: Path) -> None:
    words = "seconds=5 tenant pct=100 paced=1 page=2 process end_ms=3000 thread work us=1000"
    assert simulate(program, words).tenants[0].share(3) == 0


ALONE_THEN_BESIDE = "pct=30 force=1 page=1 page2=2 page2_ms=5000 process thread"
NEIGHBOR = "tenant limited=0 process start_ms=5000 thread work us=500"


@pytest.mark.parametrize("us", [1000, 2000, 5000])
def test_too_few_answers_alone_do_not_lower_charges(program: Path, us: int) -> None:
    """Three of ten probes are answered, at random; used, the container would get 50 percent."""
    words = f"seconds=30 answered=300 tenant {ALONE_THEN_BESIDE} work us={us}"
    result = simulate(program, words, NEIGHBOR)
    assert result.processes[0].implausible
    assert result.tenants[0].share(8) < 30 + CAP_ERROR


@pytest.mark.parametrize("us", [100, 1000, 2000])
def test_too_many_answers_beside_a_neighbor_do_not_raise_charges(program: Path, us: int) -> None:
    """All probes are answered; used, the container would get 6 to 15 percent."""
    words = f"seconds=30 answered=1000 tenant {ALONE_THEN_BESIDE} work us={us}"
    result = simulate(program, words, NEIGHBOR)
    assert result.processes[0].implausible
    assert result.tenants[0].share(8) == pytest.approx(30, abs=TENANT_ERROR)


@pytest.mark.parametrize("neighbor", ["", "sync=1 pause_us=10000"])
@pytest.mark.parametrize("us", [100, 1000, 5000])
def test_true_answers_are_plausible(program: Path, us: int, neighbor: str) -> None:
    words = f"seconds=30 tenant {ALONE_THEN_BESIDE} work us={us}"
    result = simulate(program, words, NEIGHBOR.replace("thread", f"thread {neighbor}"))
    assert not result.processes[0].implausible
    assert result.tenants[0].share(8) == pytest.approx(30, abs=TENANT_ERROR)


@pytest.mark.parametrize("slice_us", [500, 1000, 2000, 3500])
@pytest.mark.parametrize("work", ["us=100", "us=1000", "us=100 us2=250 chance2=50"])
def test_time_slice_of_the_driver_is_learned(program: Path, slice_us: int, work: str) -> None:
    """With a constant of 2 ms, 0.1 ms of work in slices of 0.5 ms would be charged twice."""
    result = simulate(
        program,
        f"seconds=14 slice_us={slice_us} tenant pct=30 process thread work {work}",
        "tenant limited=0 process thread work us=500",
    )
    assert 0.6 * slice_us < result.processes[0].slice_us <= 1.02 * slice_us
    assert result.tenants[0].share(CONVERGED_S) == pytest.approx(30, abs=TENANT_ERROR)
