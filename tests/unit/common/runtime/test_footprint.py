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


# Counts the heaps that glibc makes for threads, each 64 MiB of reserved addresses, by their size.
ARENAS = """
import ctypes, threading
from pathlib import Path
from hami_common.runtime.footprint import use_one_arena

assert use_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
everyone = threading.Barrier(9)

def work():
    libc.malloc(4096)
    everyone.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
everyone.wait()
heaps = 0
for line in Path("/proc/self/maps").read_text().splitlines():
    first, _, last = line.split()[0].partition("-")
    heaps += int(first, 16) % (64 << 20) == 0 and line.split()[1] == "rw-p"
print(heaps)
"""


@pytest.mark.timeout(65)
@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize(("program", "has_heaps"), [(ARENAS, False), ("", True)])
def test_threads_share_one_arena(program: str, *, has_heaps: bool) -> None:
    program = program or ARENAS.replace("assert use_one_arena()", "")
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert (int(ran.stdout) > 0) is has_heaps


@pytest.mark.timeout(65)
@pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is glibc's")
def test_settle_returns_free_memory_and_freezes_what_is_left() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    returned_kib, frozen = map(int, ran.stdout.split())
    assert returned_kib > 48 << 10
    assert frozen > 1000
