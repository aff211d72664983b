# SPDX-License-Identifier: Apache-2.0
"""The file that the processes of a container share: made whole, and never believed."""

import os
import random
import struct
import subprocess
from pathlib import Path

import pytest

from tests.support.accounting import Container, limits_text

MIB = 1 << 20
GARBAGE_WRITES = 3000


@pytest.fixture
def container(tmp_path: Path) -> Container:
    """A container that may use 100 MiB of one device."""
    made = Container(tmp_path)
    made.write_limits(limits_text(("GPU-0", 100)))
    return made


def test_region_is_for_all_users_and_has_all_its_blocks(container: Container) -> None:
    with container.probe(before=("sh", "-c", 'umask 077; exec "$0"')) as probe:
        assert probe.ask("charge 0 1") == 1
        status = container.region.stat()
        assert status.st_mode & 0o777 == 0o666
        assert status.st_blocks * 512 >= status.st_size > 0
        assert [path.name for path in container.region.parent.iterdir()] == ["region-1"]


def test_region_outlives_its_processes_and_is_empty(container: Container) -> None:
    with container.probe() as probe:
        assert probe.ask("charge 0 9") == 1
    inode = container.region.stat().st_ino
    with container.probe() as probe:
        assert probe.ask(f"charge 0 {100 * MIB}") == 1
        assert probe.ask("processes") == 1
    assert container.region.stat().st_ino == inode


def test_processes_that_make_it_at_once_share_one(container: Container) -> None:
    probes = [container.probe() for _ in range(8)]
    try:
        for probe in probes:
            probe.tell(f"charge 0 {30 * MIB}")
        assert sum(int(probe.line()) for probe in probes) == 3
        assert {probe.ask("used 0") for probe in probes} == {90 * MIB}
    finally:
        for probe in probes:
            probe.kill()


def damage(path: Path, way: str) -> None:
    """Make a file of that name that is no region of this version."""
    whole = path.read_bytes()
    size = len(whole)
    changed = {
        "magic": (0, b"\1"),
        "layout": (8, b"\2"),
        "header_bytes": (12, b"\xff"),
        "file_bytes": (16, struct.pack("<Q", 2**63)),
        "device_count": (24, struct.pack("<I", 2**31)),
        "slot_count": (28, struct.pack("<I", 2**31)),
        "devices_offset": (32, struct.pack("<Q", 2**64 - 64)),
        "slots_offset": (40, struct.pack("<Q", 2**64 - 64)),
        "shares_offset": (48, struct.pack("<Q", 2**64 - 64)),
        "checksum": (56, b"\0\0\0\0"),
        "uuid": (128 + 128, b"GPU-of-somebody-else\0"),
    }
    if way in changed:
        at, new = changed[way]
        path.write_bytes(whole[:at] + new + whole[at + len(new) :])
        return
    path.unlink()
    match way:
        case "empty":
            path.touch()
        case "short":
            path.write_bytes(whole[:-1])
        case "long":
            path.write_bytes(whole + b"\0")
        case "garbage":
            path.write_bytes(random.Random(1).randbytes(size))
        case "directory":
            path.mkdir()
        case "link":
            (path.parent / "elsewhere").write_bytes(whole)
            path.symlink_to("elsewhere")
        case "pipe":
            os.mkfifo(path)
        case _:
            raise AssertionError(way)


@pytest.mark.parametrize(
    "way",
    [
        *("magic", "layout", "header_bytes", "file_bytes", "device_count", "slot_count"),
        *("devices_offset", "slots_offset", "shares_offset", "checksum", "uuid", "empty"),
        *("short", "long", "garbage", "directory", "link", "pipe"),
    ],
)
def test_invalid_region_file_is_moved_aside(container: Container, way: str) -> None:
    with container.probe() as probe:
        assert probe.ask("charge 0 1") == 1
    damage(container.region, way)
    with container.probe() as first, container.probe() as second:
        assert first.ask(f"charge 0 {60 * MIB}") == 1
        assert second.ask(f"charge 0 {60 * MIB}") == 0
        assert first.end() == ""
    assert container.region.is_file()
    assert "region-1.broken" in {path.name for path in container.region.parent.iterdir()}


def test_garbage_in_a_live_region_kills_no_process_and_is_survived(container: Container) -> None:
    chance = random.Random(7)
    with container.probe() as probe, container.probe() as other:
        assert probe.ask("charge 0 5") == other.ask("charge 0 5") == 1
        size = container.region.stat().st_size
        with container.region.open("r+b", buffering=0) as file:
            for number in range(GARBAGE_WRITES):
                # Mostly where it hurts: header, device, the first slots and shares.
                near = chance.choice((0, 128, 320, 320 + 2048 * 64, size - 64))
                file.seek(min(near + chance.randrange(256), size - 16))
                file.write(chance.choice((b"\0" * 16, b"\xff" * 16, chance.randbytes(16))))
                if number % 100 == 0:
                    for one in (probe, other):
                        assert one.ask(f"charge 0 {chance.randrange(1, 90) * MIB}") in {0, 1}
                        one.ask(f"refund 0 {chance.randrange(1, 90) * MIB}")
                        one.ask("used 0")
            file.seek(0)
            file.write(b"\0" * size)
        for one in (probe, other):
            assert one.ask(f"charge 0 {101 * MIB}") == 0
            assert one.ask("processes") >= 0
    with container.probe() as fresh:
        assert fresh.ask(f"charge 0 {101 * MIB}") == 0
        assert fresh.ask(f"charge 0 {100 * MIB}") == 1


def test_process_of_a_pod_without_a_region_is_limited_alone_with_a_warning(
    container: Container,
) -> None:
    container.region.parent.rmdir()
    with container.probe() as probe:
        assert probe.ask(f"charge 0 {100 * MIB}") == 1
        assert probe.ask("charge 0 1") == 0
        probe.tell("child charge 0 1; used 0")
        assert [int(probe.line()) for _ in range(3)] == [0, 100 * MIB, 0]
        (line,) = probe.end().splitlines()
        assert "limits hold for this one alone" in line


def test_file_in_place_of_the_directory_grants_nothing(container: Container) -> None:
    container.region.parent.rmdir()
    container.region.parent.write_text("")
    with container.probe() as probe:
        assert probe.ask("charge 0 1") == 0
        assert "no device memory for this process" in probe.end()


@pytest.mark.parametrize("options", ["size=64k", "ro"])
def test_full_or_read_only_directory_grants_nothing(container: Container, options: str) -> None:
    mount = f'mount -t tmpfs -o {options} none run/hami && exec "$0"'
    can = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False)
    if can.returncode:
        pytest.skip("needs leave to make namespaces")
    with container.probe(before=("unshare", "-Urm", "sh", "-c", mount)) as probe:
        assert probe.ask("charge 0 1") == 0
        (line,) = probe.end().splitlines()
        assert "no device memory for this process" in line
