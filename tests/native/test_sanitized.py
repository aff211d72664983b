# SPDX-License-Identifier: Apache-2.0
"""The whole library under the sanitizers, in processes that know nothing of them.

Random use of memory in three containers, with forks and kills, as in test_property_memory.py; what
a sanitizer reports goes to files, and there must be none. ``HAMI_NATIVE_SANITIZED_OPS`` is the
number of operations for each (3,000 unless it says otherwise; about 10 s for each). Threads at a
gate that closes and opens take another 6 s for each.
"""

import os
import random
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.gpucontainers import gpu_node
from tests.native.test_property_memory import EXACT, run_until, storms_on
from tests.support.drive import Drive
from tests.support.gate import Gate, park_at_random
from tools import build_native

OPERATIONS = int(os.environ.get("HAMI_NATIVE_SANITIZED_OPS", "3000"))
RUNTIMES = {"asan": "libasan.so", "tsan": "libtsan.so"}
VARIABLES = {"asan": "ASAN_OPTIONS", "tsan": "TSAN_OPTIONS"}
OPTIONS = {
    "asan": "detect_leaks=0:verify_asan_link_order=0",
    "tsan": "report_signal_unsafe=0:die_after_fork=0",
}


def runtime(name: str) -> Path:
    """The library that the compiler links into sanitized programs."""
    words = ["cc", f"-print-file-name={name}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()).resolve(strict=True)


def sanitized(variant: str) -> Path:
    """One line of /etc/ld.so.preload, in which the sanitizer must come first."""
    return Path(f"{runtime(RUNTIMES[variant])} {build_native.build(variant)}")


def reporting(variant: str, reports: Path) -> dict[str, str]:
    """Environment in which the sanitizers write to this folder, which is made."""
    reports.mkdir()
    return {
        VARIABLES[variant]: f"{OPTIONS[variant]}:log_path={reports}/report",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={reports}/report",
    }


def assert_none(reports: Path) -> None:
    """Fail with the first report."""
    found = sorted(reports.iterdir())
    assert not found, found[0].read_text(errors="replace")[:6000]


@pytest.mark.timeout(120 + OPERATIONS / 100)
@pytest.mark.parametrize("variant", ["asan", "tsan"])
def test_random_use_gives_no_sanitizer_report(
    drivers: Path, containers_work: None, tmp_path: Path, variant: str
) -> None:
    library = sanitized(variant)
    reports = tmp_path / "reports"
    env = {**reporting(variant, reports), "STORM_SKIP": "nothing"}
    randomness = random.Random(1)
    with gpu_node("8xH100", drivers, library=library) as node, ExitStack() as stack:
        storms = storms_on(node, drivers / "storm", EXACT, randomness, env)
        for storm in storms:
            stack.callback(storm.close)
        run_until(storms, OPERATIONS, randomness)
        for storm in storms:
            mapped = Path(f"/proc/{storm.pid}/maps").read_text()
            assert all(name in mapped for name in (RUNTIMES[variant], build_native.LIBRARY))
    assert_none(reports)
    assert sum(storm.figures[0] for storm in storms) >= OPERATIONS


@pytest.mark.timeout(120)
@pytest.mark.parametrize("variant", ["asan", "tsan"])
def test_threads_at_a_gate_give_no_sanitizer_report(
    drivers: Path, containers_work: None, tmp_path: Path, variant: str
) -> None:
    reports = tmp_path / "reports"
    env = reporting(variant, reports)
    with ExitStack() as stack:
        node = stack.enter_context(gpu_node("8xH100", drivers, library=sanitized(variant)))
        container = node.container(0, memory_mib=4000)
        gate = stack.enter_context(Gate(container))
        controller = stack.enter_context(Drive(drivers / "drive", env=node.environment))
        controller.ask("init")
        gate.open()
        storm = stack.enter_context(container.start([drivers / "threads", "6", "5000", "7"], env))
        assert storm.stdout is not None
        assert storm.stdout.readline() == "ready\n"
        cycles = park_at_random(gate, controller, storm.pid, random.Random(7), 4.0)
        good, *bad = map(int, storm.stdout.readline().split())
    assert_none(reports)
    assert cycles >= 10
    assert good > 500
    assert bad == [0, 0, 0]
