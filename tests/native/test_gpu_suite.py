# SPDX-License-Identifier: Apache-2.0
"""The checks of ``./dev gpu`` pass on the fake driver, and each fails under its fault."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hami_nodeagent.core.region import Region
from hami_nodeagent.shell.regions import read_region
from tests.gpu import region
from tests.gpu.bench import Bench, scratch_directory
from tests.gpu.checks import compute, handover
from tests.gpu.machine import fake_machine
from tests.gpu.registry import CHECKS, Fault, Skipped
from tests.gpu.runner import all_checks, make_bench, run_check

RUN = Path(__file__).resolve().parents[1] / "gpu/run.py"
pytestmark = pytest.mark.timeout(240)
NUMBERS = 41
REAL_ONLY = ("9", "38", "39", "40", "41", "nvidia-smi")
"""Checks of what the fake driver does not have."""
TIMED = (compute.__name__, handover.__name__)
"""Modules whose checks measure device time in real time."""


def _of(*, are_timed: bool) -> list[str]:
    runs = [one for one in all_checks() if isinstance(one.fault, Fault)]
    return [one.id for one in runs if (one.run.__module__ in TIMED) == are_timed]


@pytest.fixture(scope="module")
def bench(limiter: Path) -> Iterator[Bench]:
    """Tenants on a fake machine."""
    with fake_machine() as machine, scratch_directory() as scratch:
        yield make_bench(machine, scratch)


def _runs(bench: Bench, id_: str) -> None:
    check = CHECKS[id_]
    passed = run_check(bench, check, is_faulty=False, left_s=check.deadline_s)
    if passed.reason.startswith("not resolvable"):
        pytest.skip(f"other work on this machine: {passed.reason}")
    assert passed.verdict == "pass", passed.line()
    failed = run_check(bench, check, is_faulty=True, left_s=check.deadline_s)
    if failed.reason.startswith("not resolvable"):
        pytest.skip(f"other work on this machine: {failed.reason}")
    assert failed.verdict == "fail", failed.line()
    assert failed.reason


@pytest.mark.parametrize("id_", _of(are_timed=False))
def test_check_passes_and_detects_its_fault(bench: Bench, id_: str) -> None:
    _runs(bench, id_)


@pytest.mark.alone
@pytest.mark.parametrize("id_", _of(are_timed=True))
def test_check_of_device_time_passes_and_detects_its_fault(bench: Bench, id_: str) -> None:
    _runs(bench, id_)


def test_every_check_is_there_and_few_need_a_real_driver() -> None:
    assert {id_ for id_ in CHECKS if id_.isdecimal()} == {str(n + 1) for n in range(NUMBERS)}
    real_only = {one.id for one in CHECKS.values() if isinstance(one.fault, str)}
    assert real_only == set(REAL_ONLY)


def test_check_that_takes_too_long_fails_and_leaves_no_process(bench: Bench) -> None:
    check = CHECKS["20"]
    with pytest.raises(Exception, match="took longer than"), bench.checking(0.5, Fault()):
        list(check.run(bench))


def test_framework_that_is_not_installed_skips_the_check(bench: Bench) -> None:
    with pytest.raises(Skipped, match="torch is not installed"), bench.checking(20, Fault()):
        bench.tenant().run("frameworks:torch_start")


def test_check_without_time_left_is_skipped(bench: Bench) -> None:
    result = run_check(bench, CHECKS["1"], is_faulty=False, left_s=1.0)
    assert (result.verdict, result.reason) == ("skipped", "the time for all checks is used up")


def test_regions_are_read_as_the_agent_reads_them(bench: Bench) -> None:
    with bench.checking(20, Fault()):
        tenant = bench.tenant(core_pct=50)
        guest = tenant.start("compute:spin", units=10_000, ahead=64)
        guest.answer()
        guest.ask(seconds=0.2)
        assert guest.ask(seconds=0.1)
        (own,) = region.read(tenant.region)
        shown = read_region(tenant.region)
        assert isinstance(shown, Region)
        (process,) = shown.processes
        assert (own.pid, own.launches, own.refusals) == (guest.pid, process.launches, 0)
        device = shown.devices[bench.machine.uuid]
        assert own.used_bytes == device.used_bytes
        assert own.context_bytes == device.context_bytes
        assert own.launches > 2


def test_runner_needs_no_installed_package(bench: Bench, tmp_path: Path) -> None:
    """As on a machine with a GPU: the runner does not know that this driver is a fake one."""
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(RUN), "4", "7", "10", "34", "35", "39"],
        env=dict(bench.machine.environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    verdicts = {one["check"]: (one["verdict"], one["reason"]) for one in lines}
    assert verdicts.pop("35")[0] in {"pass", "fail"}  # real bounds, beside other work
    assert verdicts.pop("39")[0] == "fail", "the fake NVML has no GPM; the next check still runs"
    assert verdicts == {
        "4": ("pass", ""),
        "7": ("pass", ""),
        "10": ("skipped", "torch is not installed"),
        "34": ("pass", ""),
    }, done.stderr


def test_machine_without_a_driver_is_reported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(RUN), "4"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "no NVIDIA driver" not in done.stderr:
        pytest.skip("this machine has a driver")
    assert done.returncode == 1


def test_results_are_printed_and_written(limiter: Path, tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--fake", "--fault", "--json", str(target), "4", "9"],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 1, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    run = json.loads(target.read_text(encoding="utf-8"))
    assert run["checks"] == lines
    assert [(one["check"], one["verdict"]) for one in lines] == [("4", "fail"), ("9", "skipped")]
    assert run["device"].startswith("fake NVIDIA")
    assert all(run[key] for key in ("driver", "date", "commit"))
    assert done.stdout.splitlines()[-1] == "0 pass, 1 fail, 1 skipped"
