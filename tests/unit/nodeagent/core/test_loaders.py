# SPDX-License-Identifier: Apache-2.0
"""Processes that did not load the in-container library are recognized by the files they mapped."""

import pytest

from hami_nodeagent.core.loaders import REASON_BY_LOADER, Judgment, Loader, loader_of

LIMITER = "7f00-7f01 r-xp 00000000 08:01 12  /usr/local/vgpu/libvgpu.so\n"
GLIBC = "7f02-7f03 r-xp 00000000 08:01 13  /usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2\n"
OLD_GLIBC = "7f02-7f03 r-xp 00000000 08:01 13  /lib64/ld-2.17.so\n"
ARM_GLIBC = "7f02-7f03 r-xp 00000000 08:01 13  /lib/ld-linux-aarch64.so.1\n"
MUSL = "7f04-7f05 r-xp 00000000 08:01 14  /lib/ld-musl-x86_64.so.1\n"
HEAP = "5500-5501 rw-p 00000000 00:00 0  [heap]\n"


@pytest.mark.parametrize(
    ("maps", "loader"),
    [
        (GLIBC + LIMITER, "limiter"),
        (LIMITER.replace(".so", ".so (deleted)") + GLIBC, "limiter"),
        (GLIBC + HEAP, "glibc"),
        (OLD_GLIBC, "glibc"),
        (ARM_GLIBC, "glibc"),
        (MUSL, "musl"),
        (MUSL.replace("ld-musl", "libc.musl"), "musl"),
        (MUSL.replace("ld-musl-x86_64.so.1", "x86_64-linux-musl/libc.so"), "musl"),
        (GLIBC.replace("ld-linux-x86-64.so.2", "libc.so.6"), "static"),
        (HEAP, "static"),
        (HEAP.replace("[heap]", "/data/ld-musl-x86_64.so.1.bak"), "static"),
        (HEAP.replace("[heap]", "/data/notlibvgpu.so"), "static"),
    ],
)
def test_loader_is_read_from_the_maps(maps: str, loader: Loader) -> None:
    assert loader_of(maps) == loader


def test_process_without_the_library_counts_in_the_second_look() -> None:
    judgment = Judgment()
    assert judgment.look({7: "musl"}) is None
    assert judgment.look({7: "musl"}) == "musl"
    assert "musl" in REASON_BY_LOADER["musl"]


def test_process_that_was_just_started_does_not_count() -> None:
    judgment = Judgment()
    for pid in range(5):
        assert judgment.look({pid: "glibc"}) is None
    assert judgment.look({4: "limiter"}) == "limiter"


def test_one_limited_process_shows_that_the_image_loads_the_library() -> None:
    judgment = Judgment()
    assert judgment.look({1: "glibc", 2: "static"}) is None
    assert judgment.look({1: "glibc", 2: "limiter"}) == "limiter"


def test_static_programs_decide_nothing() -> None:
    judgment = Judgment()
    assert [judgment.look({1: "static"}) for _ in range(3)] == [None] * 3
    assert judgment.looks == 3
