# SPDX-License-Identifier: Apache-2.0
"""The limiter with the system calls of Linux 3.10, the oldest kernel that HAMi supports.

A seccomp filter answers later ones with ENOSYS. Takes about 8 s.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.gpucontainers import GpuNode
from tests.native.conftest import StartDrive
from tests.native.test_compute import ERROR, shares, work, work_on
from tests.support.drive import NOT_INITIALIZED, OUT_OF_MEMORY

MIB = 1 << 20


@pytest.fixture(scope="module")
def old_kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that runs another one with the system calls of Linux 3.10."""
    program = tmp_path_factory.mktemp("oldkernel") / "oldkernel"
    source = Path(__file__).parent / "oldkernel.c"
    subprocess.run(["cc", "-std=c11", "-D_GNU_SOURCE", "-o", program, source], check=True)
    return program


def test_later_system_calls_fail(old_kernel: Path) -> None:
    code = "import os; print(os.pidfd_open(os.getpid()))"
    ended = subprocess.run(
        [old_kernel, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "Function not implemented" in ended.stderr


def test_limits_hold(node: GpuNode, start_drive: StartDrive, old_kernel: Path) -> None:
    container = node.container(0, memory_mib=1000, core_pct=40)
    first, second = (start_drive(container, wrapper=[old_kernel]) for _ in range(2))
    work_on(first)
    work_on(second)
    free, total = first.ask("info")
    assert total == 1000 * MIB
    assert first.code(f"alloc {free + MIB}") == OUT_OF_MEMORY
    first.ask(f"alloc {free // 2}")
    assert second.code(f"alloc {free // 2 + MIB}") == OUT_OF_MEMORY
    together = shares(node, [first, second], work("fixed_500us"))
    assert sum(together) == pytest.approx(40, abs=ERROR)
    assert first.code("spawn") == NOT_INITIALIZED
    first.ask("reap")
    second.kill()
    (alone,) = shares(node, [first], work("fixed_1ms"))
    assert alone == pytest.approx(40, abs=ERROR)
