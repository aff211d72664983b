# SPDX-License-Identifier: Apache-2.0
"""Two sources decide in each run whether kubelet's list omits refused pods."""

from pathlib import Path

import pytest

from hami_nodeagent.shell.listkind import ListKind
from tests.unit.nodeagent.shell.support import FakeKubelet, FakePods, make_site

pytestmark = pytest.mark.anyio


class Bench:
    def __init__(self, directory: Path) -> None:
        site = make_site(directory)
        self.view = site.picture.view
        self.view.lists_active_only = False
        self.kubelet = FakeKubelet()
        self.pods = FakePods()
        self.kind = ListKind(
            picture=site.picture,
            kubelet=self.kubelet,
        )

    async def learned(self, *, reads: int = 3) -> bool:
        await self.kind.learn(self.pods, timeout_s=1.0, reads=reads)
        return self.view.lists_active_only


@pytest.mark.parametrize(
    ("version", "has_get", "active_only"),
    [
        ((1, 34), True, True),
        ((1, 37), True, True),
        ((2, 0), True, True),
        ((1, 33), True, False),  # Get enabled by hand, or the status of the kubelet before
        ((1, 34), False, False),  # the status is that of the newer kubelet before
        ((0, 0), True, False),
    ],
)
async def test_active_only_needs_the_version_and_the_running_kubelet_to_agree(
    tmp_path: Path, version: tuple[int, int], *, has_get: bool, active_only: bool
) -> None:
    bench = Bench(tmp_path)
    bench.pods.version, bench.kubelet.has_get = version, has_get
    assert await bench.learned() is active_only


async def test_what_is_known_is_not_read_again_in_the_same_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert await bench.learned()
    assert await bench.learned()
    assert bench.pods.versions_read == 1
    bench.view.kubelet, bench.view.lists_active_only = "another run", False
    assert await bench.learned()
    assert bench.pods.versions_read == 2


async def test_version_that_is_written_late_is_found_by_a_later_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.pods.version = (1, 33)
    assert not await bench.learned(reads=1)
    bench.pods.version = (1, 34)
    assert not await bench.learned(reads=1)
    assert await bench.learned()


@pytest.mark.parametrize("silent", ["API server", "kubelet"])
async def test_silent_source_leaves_it_unknown_and_is_asked_again(
    tmp_path: Path, silent: str
) -> None:
    bench = Bench(tmp_path)
    if silent == "kubelet":
        bench.kubelet.pods = None
    else:
        bench.pods.is_available = False
    assert not await bench.learned(reads=1)
    bench.kubelet.pods, bench.pods.is_available = (), True
    assert await bench.learned(reads=1)
