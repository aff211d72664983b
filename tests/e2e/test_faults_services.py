# SPDX-License-Identifier: Apache-2.0
"""Scheduler, registry and webhook killed at every point: see ``tests.e2e.faults``."""

import pytest

from hami_sim.cluster import Cluster
from tests.e2e.faults import IDS, POINTS, Point, all_is_over, cluster, kill_at

__all__ = ["cluster"]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240), pytest.mark.shares_cluster]


@pytest.mark.parametrize("victim", ["scheduler", "registry", "webhook"])
@pytest.mark.parametrize("point", POINTS, ids=IDS)
async def test_killed(cluster: Cluster, point: Point, victim: str) -> None:
    await kill_at(cluster, point, victim)


async def test_when_all_is_over_every_share_is_free(cluster: Cluster) -> None:
    await all_is_over(cluster)
