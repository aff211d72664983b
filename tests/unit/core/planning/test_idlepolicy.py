# SPDX-License-Identifier: Apache-2.0
"""The memory to which idle containers shrink."""

from hami_common.model.placement import ContainerShares
from hami_core.planning.idlepolicy import shrunk_mib
from tests.support.builders import held, share

PEAKS = {("main", "a"): 1000, ("main", "b"): 12_000}


def shrunk(container: ContainerShares) -> int | None:
    return shrunk_mib(container, PEAKS, factor=1.5, least_mib=100)


def test_no_share_of_devices_of_different_sizes_grows() -> None:
    assert shrunk(held(share("a", 10_000), share("b", 40_000))) is None
    assert shrunk(held(share("a", 20_000), share("b", 40_000))) == 18_000
