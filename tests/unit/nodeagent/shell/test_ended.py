# SPDX-License-Identifier: Apache-2.0
"""Lists of ended owners for the in-container library."""

from pathlib import Path

import pytest

from hami_nodeagent.core.living import ENDED_MOST, Owner, ended_text
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.ended import FILE_NAME, EndedLists

KEY = ("uid", "main")
NATIVE = Path(__file__).parents[4] / "native" / "libvgpu" / "src"


def owner(pid: int = 7, namespace: int = 4026532000, start_ticks: int = 99) -> Owner:
    return Owner(pid=pid, namespace=namespace, start_ticks=start_ticks)


def test_list_is_where_the_library_reads_it() -> None:
    assert f'LIMITS_SHARED "/bells/{FILE_NAME}"' in (NATIVE / "limits.h").read_text()
    longest = owner(2**32 - 1, 2**32 - 1, 2**48 - 1)
    many = [longest, *(owner(2**31 + number, 2**32 - 1, 2**48 - 2) for number in range(999))]
    text = ended_text(many)
    assert text.count("\n") == ENDED_MOST
    source = (NATIVE / "process.c").read_text()
    assert "#define ENDED_BYTES 16384u" in source
    assert len(text) < 16384


def test_list_has_only_owners_with_a_start_time() -> None:
    assert ended_text([owner(), owner(start_ticks=0), owner(pid=3)]) == (
        "3 4026532000 99\n7 4026532000 99\n"
    )


def test_list_follows_the_region_and_goes_when_all_are_reclaimed(tmp_path: Path) -> None:
    lists = EndedLists(tmp_path)
    lists.write({KEY: [owner()]})
    assert not list(tmp_path.iterdir()), "a container without the library has no directory"
    file = Doorbells(tmp_path).directory_of(KEY) / FILE_NAME
    lists = EndedLists(tmp_path)
    lists.write({KEY: []})
    assert not file.exists()
    lists.write({KEY: [owner()]})
    assert file.read_text() == "7 4026532000 99\n"
    assert file.stat().st_mode & 0o777 == 0o644
    inode = file.stat().st_ino
    lists.write({KEY: [owner()]})
    assert file.stat().st_ino == inode, "an equal list is not written again"
    lists.write({KEY: []})
    assert list(file.parent.iterdir()) == []


def test_list_that_cannot_be_written_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Doorbells(tmp_path).directory_of(KEY) / FILE_NAME
    file.mkdir()
    (file / "in the way").touch()
    lists = EndedLists(tmp_path)
    lists.write({KEY: [owner()]})
    assert "ended processes not listed" in caplog.text
    (file / "in the way").unlink()
    file.rmdir()
    lists.write({KEY: [owner()]})
    assert file.read_text()
