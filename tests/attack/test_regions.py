# SPDX-License-Identifier: Apache-2.0
"""Usage regions are files of a tenant: no file that a tenant can leave there stops the agent."""

import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hami_nodeagent.core.region import FILE_NAME, LINE, SIZE_MAX, Reason, Refused, Region, Work
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.regions import read_activity, read_region
from tests.support.regions import Built, Process, Used, seal

DAMAGES = 3_000
PROCESSOR_S = 1.0


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def as_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def as_loop(path: Path) -> None:
    path.symlink_to(path)


def as_endless_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def as_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (as_pipe, "not-a-file"),
        (as_socket, "not-a-file"),
        (as_link, "not-a-file"),
        (as_loop, "not-a-file"),
        (as_folder, "not-a-file"),
        (as_endless_file, "size"),
    ],
)
def test_no_kind_of_file_holds_the_agent(
    tmp_path: Path, leave: Callable[[Path], None], reason: Reason
) -> None:
    path = tmp_path / FILE_NAME
    leave(path)
    started_s = time.process_time()
    assert read_region(path) == Refused(reason=reason)
    assert read_activity(path) == Refused(reason=reason)
    assert time.process_time() - started_s < PROCESSOR_S


def test_largest_region_with_the_processes_of_others_is_read_in_time(tmp_path: Path) -> None:
    """Every slot is taken, on every device, by owners that do not exist."""
    path = tmp_path / FILE_NAME
    everybody = [
        Process(pid, [Used(1 << 40)] * 64, namespace=pid, start=(1 << 48) - 1)
        for pid in range(1, 2049)
    ]
    path.write_bytes(
        Built(uuids=[f"GPU-{n}" for n in range(64)], processes=everybody, slots=2048).data()
    )
    assert path.stat().st_size == SIZE_MAX
    started_s = time.process_time()
    found = read_region(path, Living(Path("/proc")).dead_of)
    assert time.process_time() - started_s < PROCESSOR_S
    assert isinstance(found, Region)
    assert len(found.processes) + len(found.ended) == len(everybody)


def test_no_bytes_in_the_file_raise(tmp_path: Path) -> None:
    chance = random.Random(20261123)
    path = tmp_path / FILE_NAME
    living = Living(Path("/proc"))
    good = Built(uuids=("GPU-a", "GPU-b"), processes=[Process(1, (Used(5), Used(6)))]).data()
    understood = 0
    for number in range(DAMAGES):
        data = bytearray(good)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        if number % 5 == 0:
            del data[chance.randrange(len(data)) :]
        if number % 2 and len(data) >= LINE:
            seal(data)
        path.write_bytes(data)
        assert isinstance(read_activity(path), Work | Refused)
        understood += isinstance(read_region(path, living.dead_of), Region)
    assert 0 < understood < DAMAGES
