# SPDX-License-Identifier: Apache-2.0
"""Gates: their layout is that of the library, and waiting threads are woken."""

import re
import struct
import subprocess
from pathlib import Path

import pytest

from hami_nodeagent.shell import gates
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.gates import FILE_NAME, SIZE, Gates

KEY = ("uid-a", "main")
HEADER_FILE = Path(__file__).parents[4] / "native" / "libvgpu" / "src" / "gate.h"
WAITER = """
import ctypes, mmap, platform, sys
call = {"x86_64": 202, "aarch64": 98}[platform.machine()]
with open(sys.argv[1], "r+b") as file:
    page = mmap.mmap(file.fileno(), 64)
word = ctypes.c_uint32.from_buffer(page, 12)
print("ready", flush=True)
while word.value == 1:
    ctypes.CDLL(None).syscall(call, ctypes.byref(word), 0, 1, None, None, 0)
print(word.value, flush=True)
"""


@pytest.fixture
def made(tmp_path: Path) -> Gates:
    return Gates(Doorbells(tmp_path))


def page_of(directory: Path) -> Path:
    return directory / "bells" / "_".join(KEY) / FILE_NAME


def test_layout_is_the_librarys() -> None:
    text = HEADER_FILE.read_text()
    assert f"GATE_MAGIC UINT64_C({gates.MAGIC:#x})" in text
    assert f"GATE_LAYOUT {gates.LAYOUT}u" in text
    assert f"GATE_OPEN {gates.OPEN}u" in text
    assert f"/bells/{FILE_NAME}" in text
    assert f"sizeof(struct gate_page) == {SIZE}" in text
    at = dict(re.findall(r"offsetof\(struct gate_page, (\w+)\) == (\d+)", text))
    assert at == {
        "state": str(gates.STATE_AT),
        "turn": str(gates.TURN_AT),
        "lease_until_ns": str(gates.LEASE_AT),
    }
    assert f"/bells/{gates.QUANTUM_NAME}" in text
    assert struct.pack("<Q", gates.MAGIC) == b"VHAMIRC1"


def test_new_gate_is_closed_and_readable_by_all(made: Gates, tmp_path: Path) -> None:
    assert made.is_open(KEY) is None
    made.create(KEY)
    assert made.is_open(KEY) is False
    assert made.new == {KEY}
    page = page_of(tmp_path)
    assert page.stat().st_size == SIZE
    assert page.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in page.parent.iterdir()] == [FILE_NAME]


def test_gate_that_exists_keeps_state_and_file(made: Gates, tmp_path: Path) -> None:
    made.create(KEY)
    made.set(KEY, is_open=True)
    inode = page_of(tmp_path).stat().st_ino
    again = Gates(Doorbells(tmp_path))
    again.create(KEY)
    assert again.is_open(KEY) is True
    assert again.new == set()
    assert page_of(tmp_path).stat().st_ino == inode


@pytest.mark.parametrize("content", [b"", b"\0" * SIZE, b"x" * (SIZE + 1)])
def test_file_that_is_no_gate_is_replaced(made: Gates, tmp_path: Path, content: bytes) -> None:
    page_of(tmp_path).parent.mkdir(parents=True)
    page_of(tmp_path).write_bytes(content)
    assert made.is_open(KEY) is None
    made.create(KEY)
    assert made.is_open(KEY) is False


def test_each_change_has_a_new_turn(made: Gates, tmp_path: Path) -> None:
    made.create(KEY)
    turns = [made.turn_of(KEY)]
    for is_open in (True, False, True):
        made.set(KEY, is_open=is_open)
        assert made.is_open(KEY) is is_open
        turns.append(struct.unpack_from("<Q", page_of(tmp_path).read_bytes(), gates.TURN_AT)[0])
        assert made.turn_of(KEY) == turns[-1]
    assert turns == [1, 2, 3, 4]
    again = Gates(Doorbells(tmp_path))
    assert again.turn_of(KEY) == 4
    made.keep_only([])
    assert made.new == set()


def test_gate_for_quanta_is_open_and_closed_with_a_lease(tmp_path: Path) -> None:
    bells = Doorbells(tmp_path)
    made = Gates(bells, gates.QUANTUM_NAME)
    made.create(KEY)
    assert made.is_open(KEY) is True
    assert Gates(bells).is_open(KEY) is None
    page = bells.path_of(KEY) / gates.QUANTUM_NAME

    def lease_ns() -> int:
        return int(struct.unpack_from("<Q", page.read_bytes(), gates.LEASE_AT)[0])

    made.set(KEY, is_open=False, lease_until_ns=7)
    turn = made.turn_of(KEY)
    assert (made.is_open(KEY), lease_ns()) == (False, 7)
    made.set(KEY, is_open=False, lease_until_ns=8)
    assert (made.turn_of(KEY), lease_ns()) == (turn, 8)
    made.set(KEY, is_open=True)
    assert (made.is_open(KEY), lease_ns()) == (True, 0)


def test_gate_that_is_missing_cannot_be_set(made: Gates) -> None:
    with pytest.raises(FileNotFoundError):
        made.set(KEY, is_open=True)


def test_opening_wakes_a_process_that_waits_without_timeout(made: Gates, tmp_path: Path) -> None:
    made.create(KEY)
    with subprocess.Popen(
        ["python3", "-c", WAITER, page_of(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as waiter:
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "ready\n"
        while "futex" not in Path(f"/proc/{waiter.pid}/wchan").read_text():
            pass
        made.set(KEY, is_open=True)
        assert waiter.stdout.readline() == "0\n"
