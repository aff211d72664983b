# SPDX-License-Identifier: Apache-2.0
"""The table of pointers under threads, with and without sanitizers. Takes about 5 s."""

import subprocess
from pathlib import Path

import pytest

from tools import build_native

SOURCE = build_native.ROOT / "native/libvgpu/tests/load/table_stress.c"
TABLE = build_native.SOURCES / "table.c"


@pytest.mark.parametrize(
    ("flags", "rounds"),
    [(["-O2"], 3000), (["-fsanitize=thread", "-O1"], 200), (["-fsanitize=address"], 300)],
    ids=["plain", "tsan", "asan"],
)
def test_concurrent_threads_lose_and_duplicate_nothing(
    tmp_path: Path, flags: list[str], rounds: int
) -> None:
    program = tmp_path / "table_stress"
    base = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-pthread"]
    sources = [str(SOURCE), str(TABLE)]
    subprocess.run(["cc", *base, *flags, "-o", str(program), *sources], check=True)
    for _ in range(3):
        done = subprocess.run(
            [program, "4", str(rounds)], capture_output=True, text=True, check=False, timeout=50
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "0 errors\n", "")
