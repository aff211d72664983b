# SPDX-License-Identifier: Apache-2.0
"""The layout that kubelet gives to projected volumes."""

from pathlib import Path

import pytest

from hami_sim.kubelet.atomicwriter import File, check_path, write

NOW_S = 1_700_000_000.0


def test_files_show_by_way_of_the_data_link(tmp_path: Path) -> None:
    assert write(tmp_path, {"limits": File(b"a"), "k8s/labels": File(b"b", 0o400)}, now_s=NOW_S)
    assert (tmp_path / "limits").readlink() == Path("..data/limits")
    assert (tmp_path / "k8s").readlink() == Path("..data/k8s")
    assert (tmp_path / "..data").readlink().name.startswith("..2023_11_14_22_13_20.")
    assert (tmp_path / "limits").read_bytes() == b"a"
    assert (tmp_path / "k8s/labels").stat().st_mode & 0o777 == 0o400


def test_unchanged_payload_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"limits": File(b"a")}, now_s=NOW_S)
    before = (tmp_path / "..data").readlink()
    assert not write(tmp_path, {"limits": File(b"a")}, now_s=NOW_S + 1)
    assert (tmp_path / "..data").readlink() == before


def test_change_moves_the_link_and_removes_the_old_directory(tmp_path: Path) -> None:
    write(tmp_path, {"limits": File(b"a")}, now_s=NOW_S)
    before = tmp_path / (tmp_path / "..data").readlink()
    with (tmp_path / "limits").open("rb") as opened:
        assert write(tmp_path, {"limits": File(b"b")}, now_s=NOW_S)
        assert opened.read() == b"a"  # who opened the old file keeps it
    assert (tmp_path / "limits").read_bytes() == b"b"
    assert not before.exists()
    assert len(list(tmp_path.iterdir())) == 3  # the link, the directory, the file


def test_file_that_is_no_longer_projected_vanishes(tmp_path: Path) -> None:
    write(tmp_path, {"a": File(b"1"), "b": File(b"2")}, now_s=NOW_S)
    write(tmp_path, {"b": File(b"2")}, now_s=NOW_S)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("..")) == ["b"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "..data/x", ""])
def test_path_that_leaves_the_volume_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="invalid path"):
        check_path(path)
