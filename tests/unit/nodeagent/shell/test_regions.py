# SPDX-License-Identifier: Apache-2.0
"""Regions in volumes that belong to tenants: read once, never followed, never mapped."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hami_nodeagent.core.region import SIZE_MAX, Refused, Region
from hami_nodeagent.shell.regions import read_region, region_path
from tests.support.regions import Built, Process, Used

DATA = Built(processes=(Process(1, (Used(5),)),)).data()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = region_path(tmp_path / "pods", "uid-1", "hami-region-main")
    found.parent.mkdir(parents=True)
    return found


def test_region_is_found_where_kubelet_keeps_the_volume(tmp_path: Path, path: Path) -> None:
    path.write_bytes(DATA)
    expected = "pods/uid-1/volumes/kubernetes.io~empty-dir/hami-region-main/region-1"
    assert path == tmp_path / expected
    found = read_region(path)
    assert isinstance(found, Region)
    assert found.devices["GPU-0"].used_bytes == 5


def _link(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(DATA)
    path.symlink_to(other)


def _huge(path: Path) -> None:
    path.write_bytes(DATA)
    os.truncate(path, SIZE_MAX + 1)


TRAPS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda _: None, "missing"),
    "link": (_link, "not-a-file"),
    "dangling link": (lambda path: path.symlink_to("/nowhere"), "not-a-file"),
    "pipe": (os.mkfifo, "not-a-file"),
    "directory": (lambda path: path.mkdir(), "not-a-file"),
    "huge": (_huge, "size"),
    "empty": (lambda path: path.touch(), "size"),
    "grown": (lambda path: path.write_bytes(DATA + b"x"), "header"),
    "cut": (lambda path: path.write_bytes(DATA[:-1]), "header"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_traps_are_refused_without_opening_them(path: Path, trap: str) -> None:
    lay, reason = TRAPS[trap]
    lay(path)
    assert read_region(path) == Refused(reason=reason)  # type: ignore[arg-type]  # table of words


def test_nothing_stays_open_or_mapped(path: Path) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    for trap in ("file", "pipe"):
        path.unlink(missing_ok=True)
        if trap == "file":
            path.write_bytes(DATA)
        else:
            os.mkfifo(path)
        read_region(path)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert str(path.parent) not in Path("/proc/self/maps").read_text()


def test_names_that_are_no_names_are_refused(tmp_path: Path) -> None:
    assert read_region(region_path(tmp_path, "uid", "a\0b")) == Refused(reason="unreadable")
