# SPDX-License-Identifier: Apache-2.0
"""Agent, NATS and API server killed, and NATS cut off, at every point: see ``tests.e2e.faults``."""

from functools import partial

import anyio
import pytest

from hami_sim.cluster import Cluster
from tests.e2e.conftest import small_pod
from tests.e2e.faults import (
    AGENT,
    API_POINTS,
    IDS,
    POINTS,
    Point,
    all_is_over,
    cluster,
    kill_at,
    run_into,
    settled,
)

__all__ = ["cluster"]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240), pytest.mark.shares_cluster]


@pytest.mark.parametrize("victim", [AGENT, "nats"])
@pytest.mark.parametrize("point", POINTS, ids=IDS)
async def test_killed(cluster: Cluster, point: Point, victim: str) -> None:
    await kill_at(cluster, point, victim)


@pytest.mark.parametrize("point", POINTS, ids=IDS)
async def test_scheduler_cut_from_nats(cluster: Cluster, point: Point) -> None:
    async def harm() -> None:
        await cluster.taps["scheduler-nats"].cut()

    name = await run_into(cluster, point, harm)
    await anyio.sleep(2)
    await cluster.taps["scheduler-nats"].heal()
    assert await settled(cluster, name) == []
    await cluster.delete_pod(name)


async def replaced_if_refused(cluster: Cluster, name: str) -> None:
    """Act as a controller for a pod that kubelet refused: re-create it.

    An agent that cannot read a pod at the API server within its time refuses it, and never guesses.
    """

    async def decided() -> bool:
        return (await cluster.pod(name)).status.phase in ("Running", "Failed")

    await cluster.until(f"kubelet has decided on {name}", decided, limit_s=40)
    status = (await cluster.pod(name)).status
    if status.phase == "Failed":
        assert status.reason == "UnexpectedAdmissionError", status
        await cluster.delete_pod(name)
        await cluster.until(f"{name} is gone", partial(cluster.pod_is_gone, name))
        await cluster.create_pod(small_pod(name))


@pytest.mark.parametrize(
    "point", API_POINTS, ids=[IDS[POINTS.index(point)] for point in API_POINTS]
)
async def test_api_server_killed(cluster: Cluster, point: Point) -> None:
    name = await run_into(cluster, point, cluster.processes["apiserver"].kill)
    cluster.processes["apiserver"].start()
    await cluster.until("the API server answers", cluster.api_answers, limit_s=60)
    await replaced_if_refused(cluster, name)
    assert await settled(cluster, name) == []


async def test_when_all_is_over_every_share_is_free(cluster: Cluster) -> None:
    await all_is_over(cluster)
