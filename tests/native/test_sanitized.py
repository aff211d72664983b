# SPDX-License-Identifier: Apache-2.0
"""The whole library under the sanitizers, in processes that know nothing of them.

Random use of memory in three containers, with forks and kills, as in test_property_memory.py; what
a sanitizer reports goes to files, and there must be none. ``HAMI_NATIVE_SANITIZED_OPS`` is the
number of operations for each (3,000 unless it says otherwise; about 10 s for each).
"""

import os
import random
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.gpucontainers import gpu_node
from tests.native.test_property_memory import EXACT, run_until, storms_on
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


@pytest.mark.timeout(120 + OPERATIONS / 100)
@pytest.mark.parametrize("variant", ["asan", "tsan"])
def test_random_use_gives_no_sanitizer_report(
    drivers: Path, containers_work: None, tmp_path: Path, variant: str
) -> None:
    # One line of /etc/ld.so.preload, in which the sanitizer must come first.
    library = Path(f"{runtime(RUNTIMES[variant])} {build_native.build(variant)}")
    reports = tmp_path / "reports"
    reports.mkdir()
    env = {
        VARIABLES[variant]: f"{OPTIONS[variant]}:log_path={reports}/report",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={reports}/report",
        "STORM_SKIP": "nothing",
    }
    randomness = random.Random(1)
    with gpu_node("8xH100", drivers, library=library) as node, ExitStack() as stack:
        storms = storms_on(node, drivers / "storm", EXACT, randomness, env)
        for storm in storms:
            stack.callback(storm.close)
        run_until(storms, OPERATIONS, randomness)
        for storm in storms:
            mapped = Path(f"/proc/{storm.pid}/maps").read_text()
            assert all(name in mapped for name in (RUNTIMES[variant], build_native.LIBRARY))
    found = sorted(reports.iterdir())
    assert not found, found[0].read_text(errors="replace")[:6000]
    assert sum(storm.figures[0] for storm in storms) >= OPERATIONS
