# SPDX-License-Identifier: Apache-2.0
"""The library for the other processor that GPUs are sold with: it builds, and asks for as little.

Runs where a cross compiler is installed (Debian: gcc-aarch64-linux-gnu). Takes about 5 s. Nothing
of it is run: an emulator's atomic operations hold within one process only.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import build_native, gen_symbols

COMPILER, TOOLS = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-"
BASELINE = (2, 17)

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"there is no {COMPILER} here"
)


def dynamic_symbols(library: Path) -> list[str]:
    words = [f"{TOOLS}objdump", "-T", str(library)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def test_library_is_whole_on_aarch64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", COMPILER)
    library = build_native.build("release", tmp_path)
    symbols = dynamic_symbols(library)
    hooks = gen_symbols.read(gen_symbols.SOURCE.read_text()).hooks
    exported = {line.split()[-1] for line in symbols if " .text" in line}
    assert exported == {hook[0] for hook in hooks} | {"dlsym", "dlvsym"}
    needed = [line for line in symbols if "*UND*" in line]
    versions = {match[1] for line in needed if (match := re.search(r"GLIBC_([\d.]+)\)", line))}
    assert versions
    assert max(tuple(map(int, version.split("."))) for version in versions) <= BASELINE
    asked = {line.split()[-1] for line in needed}
    assert not {name for name in asked if name.startswith("__aarch64_")}, "libatomic's or libgcc's"
