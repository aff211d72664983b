# SPDX-License-Identifier: Apache-2.0
"""Programs of a limited container, by the C library that loads them: which ones load the limiter.

The program of musl needs Debian's package musl-tools.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hami_nodeagent.core.loaders import Loader, loader_of
from tests.fakes.gpucontainers import GpuNode

SOURCE = (
    '#include <stdio.h>\nint main(void) { puts("up"); fflush(stdout); return getchar() > 0; }\n'
)


@pytest.mark.parametrize(
    ("compiler", "loader"),
    [(("cc",), "limiter"), (("cc", "-static"), "static"), (("musl-gcc",), "musl")],
    ids=["glibc", "static", "musl"],
)
def test_agent_sees_which_programs_run_without_the_limiter(
    node: GpuNode, tmp_path: Path, compiler: Sequence[str], loader: Loader
) -> None:
    if shutil.which(compiler[0]) is None:
        if os.environ.get("CI"):
            pytest.fail(f"CI must have {compiler[0]}")
        pytest.skip(f"{compiler[0]} is missing")
    (tmp_path / "program.c").write_text(SOURCE)
    program = tmp_path / "program"
    subprocess.run([*compiler, "-o", str(program), str(tmp_path / "program.c")], check=True)
    container = node.container(0, memory_mib=1024)
    process = container.start([program])
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert process.returncode == 0
    assert loader_of(maps) == loader
