# SPDX-License-Identifier: Apache-2.0
"""Dead owners are found through the host's /proc, with as few reads as possible."""

import os
from pathlib import Path

import pytest

from hami_nodeagent.core.living import Owner
from hami_nodeagent.shell.living import Living

HOST, INNER = 4026531836, 4026532000


class Proc:
    """A directory as the kernel shows it; counts the walks by what they leave behind."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run(1, "1", HOST)
        self.run(2, "2", HOST)
        (self.root / "self").symlink_to("2")

    def run(
        self, pid: int, numbers: str, namespace: int, *, start: int = 50, state: str = "S"
    ) -> None:
        directory = self.root / str(pid)
        (directory / "ns").mkdir(parents=True)
        (directory / "stat").write_text(f"{pid} (x) {state} " + "1 " * 16 + f"1 0 {start} 0\n")
        (directory / "status").write_text(f"Name:\tx\nNSpid:\t{numbers}\n")
        (directory / "ns/pid").symlink_to(f"pid:[{namespace}]")

    def end(self, pid: int) -> None:
        for path in sorted((self.root / str(pid)).rglob("*"), reverse=True):
            path.unlink() if path.is_symlink() or path.is_file() else path.rmdir()
        (self.root / str(pid)).rmdir()


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


def owner(pid: int = 7, namespace: int = INNER, start_ticks: int = 50) -> Owner:
    return Owner(pid=pid, namespace=namespace, start_ticks=start_ticks)


def test_owner_in_a_container_dies_when_its_process_does(proc: Proc) -> None:
    living = Living(proc.root)
    proc.run(900, "900 7", INNER)
    assert living.dead_of([owner()]) == set()
    proc.end(900)
    assert living.dead_of([owner()]) == {owner()}
    proc.run(901, "901 7", INNER, start=60)
    assert living.dead_of([owner(), owner(start_ticks=60)]) == {owner()}


def test_zombie_has_ended(proc: Proc) -> None:
    proc.run(900, "900 7", INNER, state="Z")
    assert Living(proc.root).dead_of([owner()]) == {owner()}


def test_known_owner_needs_one_read(proc: Proc) -> None:
    living = Living(proc.root)
    proc.run(900, "900 7", INNER)
    assert living.dead_of([owner()]) == set()
    (proc.root / "900/status").unlink()  # a walk would not find it any more
    assert living.dead_of([owner()]) == set()
    proc.run(901, "901 8", INNER)
    assert living.dead_of([owner(), owner(8), owner(9)]) == {owner(9)}


def test_end_of_a_recognized_process_needs_no_walk(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Living, "_walk", lambda _: pytest.fail("walked"))
    living = Living(proc.root)
    proc.run(900, "900 7", INNER)
    proc.run(901, "901 8", INNER)
    owners = [owner(), owner(8), owner(9)]
    living.recognize(900, owners)
    living.recognize(901, owners)
    living.recognize(902, owners)
    assert [living.recognizes(one) for one in owners] == [True, True, False]
    assert living.ended_of(owners) == frozenset()
    proc.end(900)
    assert living.ended_of(owners) == {owner()}
    assert living.ended_of(owners) == frozenset(), "reported once"


@pytest.mark.parametrize(
    "claimed",
    [owner(start_ticks=0), owner(start_ticks=51), owner(namespace=HOST), owner(namespace=0)],
)
def test_owner_that_may_be_another_process_is_not_recognized(proc: Proc, claimed: Owner) -> None:
    living = Living(proc.root)
    proc.run(900, "900 7", INNER)
    living.recognize(900, [claimed])
    assert not living.recognizes(claimed)
    proc.end(900)
    assert living.ended_of([claimed]) == frozenset()


def test_processes_are_not_judged_where_proc_cannot_be_read(tmp_path: Path, proc: Proc) -> None:
    assert Living(tmp_path / "absent").dead_of([owner()]) == set()
    (proc.root / "1/stat").unlink()
    assert Living(proc.root).dead_of([owner()]) == set()


def test_real_proc_knows_this_process_and_no_other_start() -> None:
    living = Living(Path("/proc"))
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    inode = Path("/proc/self/ns/pid").stat().st_ino & ((1 << 32) - 1)
    me = Owner(pid=os.getpid(), namespace=inode, start_ticks=int(fields[19]))
    other = Owner(pid=me.pid, namespace=inode, start_ticks=me.start_ticks + 1)
    assert living.dead_of([me, other]) == {other}


def test_unused_owners_are_dropped(proc: Proc) -> None:
    living = Living(proc.root)
    assert living.dead_of([owner()]) == {owner()}
    living.keep_only([])
    proc.run(900, "900 7", INNER)
    assert living.dead_of([owner()]) == set()
