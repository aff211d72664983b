# SPDX-License-Identifier: Apache-2.0
"""Recorded call sequences of frameworks, replayed under the limiter on the fake driver.

A sequence has the order, the sizes and the reactions to errors that its framework documents. Each
runs with a limit that it fits and with one that it hits, in the release library and in the one with
address sanitizer. Every result, the charge at every marked line and the zero at the end are exact:
in cuMemGetInfo, in NVML and in the fake driver's own books. Takes about 20 s.
"""

from pathlib import Path

import pytest

from hami_sim.hardware.fake_nvml import FakeNvml
from tests.native.test_sanitized import OPTIONS, RUNTIMES, VARIABLES, runtime
from tests.support.calls import Replay, Sequence, read
from tests.support.cuda_child import CudaChild
from tools import build_native

pytestmark = pytest.mark.timeout(120)  # the first test builds the libraries

FILES = sorted((Path(__file__).parent / "sequences").glob("*.txt"))
SEQUENCES = [
    pytest.param(sequence, id=f"{path.stem}-{sequence.name}")
    for path in FILES
    for sequence in read(path)
]


@pytest.fixture(params=["release", "asan"])
def environment(request: pytest.FixtureRequest, guest: CudaChild, tmp_path: Path) -> dict[str, str]:
    """Environment of a process in the container, with the library of this variant."""
    if request.param == "release":
        return guest.environment
    preload = f"{runtime(RUNTIMES['asan'])} {build_native.build('asan')}"
    (tmp_path / "reports").mkdir()
    return guest.environment | {
        "LD_PRELOAD": preload,
        VARIABLES["asan"]: f"{OPTIONS['asan']}:log_path={tmp_path}/reports/report",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={tmp_path}/reports/report",
    }


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_sequence_gives_its_results_and_its_charges(
    environment: dict[str, str], machine: FakeNvml, tmp_path: Path, sequence: Sequence
) -> None:
    with Replay(sequence, environment, machine.path) as replay:
        replay.run(machine.uuids[0])
    for report in tmp_path.glob("reports/*"):
        pytest.fail(report.read_text(errors="replace")[:6000])


def test_every_framework_meets_a_limit_and_hits_one() -> None:
    for path in FILES:
        codes = [{step.code for step in sequence.steps} for sequence in read(path)]
        assert {0} in codes, path.name
        assert any(2 in found for found in codes), path.name


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("cuMemAlloc_v2 >a 2M = 12M", "main"),
        ("cuMemAlloc_v2 >a 2M -> OUT_OF_MEMORY", "returned 0"),
        ("cuMemAlloc_v2 >a 2M", "end"),
    ],
    ids=["charge", "result", "rest"],
)
def test_replay_rejects_a_line_that_differs(
    guest: CudaChild, machine: FakeNvml, tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "sequence.txt"
    path.write_text(f"[wrong] limit 64M\n{line}\n")
    with (
        Replay(read(path)[0], guest.environment, machine.path) as replay,
        pytest.raises(AssertionError, match=reason),
    ):
        replay.run(machine.uuids[0])


@pytest.mark.parametrize(
    "line",
    ["cuMemFree_v2 a = 2X", "malloc 2M", "cuMemFree_v2 a -> MEMORY"],
    ids=["size", "function", "error"],
)
def test_line_that_is_no_call_is_rejected_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "sequence.txt"
    path.write_text(f"[wrong] limit 64M\n\n{line}\n")
    with pytest.raises(ValueError, match=r"sequence\.txt:3: not a "):
        read(path)
