# SPDX-License-Identifier: Apache-2.0
"""Memory of the start is returned to the kernel, and excluded from later collections."""

import subprocess
import sys

import pytest

# Frees half of many small objects, so that the heap's top stays in use and only trimming helps.
PROGRAM = """
import ctypes, gc
from pathlib import Path
from hami_common.runtime.footprint import settle

def anonymous_kib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(64 << 10) for _ in range(1024)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
for block in blocks[:-1]:
    libc.free(block)
before = anonymous_kib()
settle()
print(before - anonymous_kib(), gc.get_freeze_count())
"""


@pytest.mark.timeout(65)
@pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is glibc's")
def test_settle_returns_free_memory_and_freezes_what_is_left() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    returned_kib, frozen = map(int, ran.stdout.split())
    assert returned_kib > 48 << 10
    assert frozen > 1000
