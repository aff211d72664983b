# SPDX-License-Identifier: Apache-2.0
"""The library on the host: named by content, never written to again, removed when unused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hami_nodeagent.shell.install import Installer, InstallFailed, mapped_inodes
from hami_nodeagent.shell.limiter import COLLECT_S, Limiter
from tests.unit.nodeagent.core.builders import Given
from tests.unit.nodeagent.shell.support import enforcing, fake_library, make_site

PROC = Path("/proc")
DAY_S = 86_400.0


def installer(directory: Path, content: bytes = b"one") -> Installer:
    return Installer(fake_library(directory, content), directory / "host", proc=PROC)


def test_versions_lie_beside_each_other(tmp_path: Path) -> None:
    one = installer(tmp_path, b"one").install()
    two = installer(tmp_path, b"two").install()
    assert one.library != two.library
    assert one.preload == two.preload
    assert one.library.read_bytes().endswith(b"one")
    assert one.library.stat().st_mode & 0o777 == 0o755
    assert one.preload.stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "host").stat().st_mode & 0o777 == 0o755


def test_installation_is_idempotent(tmp_path: Path) -> None:
    first = installer(tmp_path).install()
    inode = first.library.stat().st_ino
    with first.library.open("rb") as reading:
        for _ in range(3):
            assert installer(tmp_path).install() == first
        assert os.fstat(reading.fileno()).st_nlink == 1
    assert first.library.stat().st_ino == inode


def test_damaged_file_is_replaced_by_a_new_one_not_written_to(tmp_path: Path) -> None:
    first = installer(tmp_path).install()
    first.library.write_bytes(b"damaged")
    with first.library.open("rb") as mapped:
        again = installer(tmp_path).install()
        assert again.library.read_bytes() == fake_library(tmp_path).read_bytes()
        assert mapped.read() == b"damaged"


def test_missing_or_foreign_library_error_names_the_setting(tmp_path: Path) -> None:
    nowhere = Installer(tmp_path / "no.so", tmp_path / "host", proc=PROC)
    with pytest.raises(InstallFailed, match=r"no\.so cannot be read.*set library"):
        nowhere.install()
    text = tmp_path / "text.so"
    text.write_text("hello")
    with pytest.raises(InstallFailed, match="no shared library"):
        Installer(text, tmp_path / "host", proc=PROC).install()
    (tmp_path / "file").touch()
    with pytest.raises(InstallFailed, match="not writable on this node"):
        Installer(fake_library(tmp_path), tmp_path / "file" / "host", proc=PROC).install()


def test_only_old_versions_without_users_are_removed(tmp_path: Path) -> None:
    paths = {
        name: installer(tmp_path, name.encode()).install().library for name in ("a", "b", "c", "d")
    }
    stranger = tmp_path / "host" / "notes.txt"
    stranger.touch()
    leftover = tmp_path / "host" / ".install-00ff"
    leftover.touch()
    now_s = paths["a"].stat().st_mtime
    for path in (*paths.values(), stranger, leftover):
        os.utime(path, (now_s - DAY_S, now_s - DAY_S))
    os.utime(paths["d"], (now_s, now_s))
    keep = {paths["a"].name}
    sleeper = subprocess.Popen([sys.executable, "-c", _MAP, str(paths["b"])], stdout=-1)
    try:
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == b"mapped\n"
        removed = installer(tmp_path, b"a").collect(keep=keep, unused_for_s=60, now_s=now_s)
    finally:
        sleeper.kill()
        sleeper.communicate()
    assert removed == [paths["c"].name]
    left = {path.name for path in (tmp_path / "host").iterdir()}
    assert left >= {paths["a"].name, paths["b"].name, paths["d"].name, "notes.txt"}
    assert leftover.name not in left
    later_s = now_s + 61
    again = installer(tmp_path, b"a").collect(keep=keep, unused_for_s=60, now_s=later_s)
    assert sorted(again) == sorted((paths["b"].name, paths["d"].name))


_MAP = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("mapped", flush=True)
__import__("time").sleep(60)
"""


def test_no_version_is_removed_while_processes_are_unreadable(tmp_path: Path) -> None:
    old = installer(tmp_path, b"old").install().library
    blind = Installer(fake_library(tmp_path), tmp_path / "host", proc=tmp_path / "no-proc")
    now_s = old.stat().st_mtime + DAY_S
    assert blind.collect(keep=(), unused_for_s=60, now_s=now_s) == []
    assert old.is_file()


def test_own_libraries_are_seen_as_mapped() -> None:
    inode = Path(sys.executable).resolve().stat().st_ino
    assert mapped_inodes(PROC, frozenset({inode, 1})) == frozenset({inode})


@pytest.mark.anyio
async def test_versions_that_grants_name_are_kept(tmp_path: Path) -> None:
    site = make_site(tmp_path / "state", **enforcing(tmp_path, library_keep_s=0.0))
    old = installer(tmp_path, b"old").install().library
    older = installer(tmp_path, b"older").install().library
    for path in (old, older):
        os.utime(path, (0, 0))
    fake_library(tmp_path)
    pod = Given("pod")
    site.picture.grants.add(pod.grant("main", "a", library=old.name))
    adopted = Given("other").grant("main", "b", adopted=True)
    site.picture.grants.add(adopted)
    await Limiter(site).collect()
    assert older.is_file(), "kubelet may repeat an answer that named it"
    site.picture.grants.remove(adopted)
    limiter = Limiter(site)
    await limiter.collect()
    assert (old.is_file(), older.is_file()) == (True, False)
    site.picture.grants.drop_pod(pod.uid)
    await limiter.collect()
    assert old.is_file(), f"looked for again only after {COLLECT_S} s"
    await Limiter(site).collect()
    assert not old.is_file()
