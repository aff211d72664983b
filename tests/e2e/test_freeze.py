# SPDX-License-Identifier: Apache-2.0
"""A scheduler that is stopped for a minute at any point of the path loses and doubles no share.

One scheduler per point, all of them active on one bus with the leases of production. The called one
runs into its point and is stopped there with SIGSTOP; the next one is called instead. Each resumes
after 60 s, when others have long placed its pod and its lease has expired. Ten and more of them are
stopped at the same time, so the whole takes two minutes and not half an hour.
"""

from collections.abc import AsyncIterator

import anyio
import msgspec
import pytest

from hami_common.errors import Unavailable
from hami_sim.cluster import Cluster, run_cluster
from hami_sim.tap import Trap
from tests.e2e.conftest import TAPPED, small_pod
from tests.e2e.faults import NODE, POINTS, Point
from tests.support.checker import lasting_problems, ledger_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(420)]

STOPPED_S = 60.0


@pytest.fixture
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """As many schedulers as points and one more, with the leases of production."""
    spec = msgspec.structs.replace(TAPPED, schedulers=len(POINTS) + 1, settings={})
    async with run_cluster(spec, tmp_path_factory.mktemp("freeze")) as running:
        yield running


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """A stopped scheduler."""

    scheduler: str
    since: float


async def freeze_at(cluster: Cluster, point: Point, scheduler: str, pod: str) -> Frozen:
    """Let the active scheduler run into the point, and leave it stopped there."""
    tap = cluster.taps[point.tap.replace("scheduler-", f"{scheduler}-")]

    async def stop() -> None:
        cluster.processes[scheduler].freeze()

    trap = tap.arm(Trap(point.pattern, point.direction, stop, deliver=point.deliver))
    selector = {} if point.name.startswith("prioritize") else {"kubernetes.io/hostname": NODE}
    await cluster.create_pod(small_pod(pod, nodeSelector=selector))
    with anyio.move_on_after(60):
        await trap.sprung.wait()
        return Frozen(scheduler=scheduler, since=anyio.current_time())
    raise Unavailable(peer="trap", detail=f"{point.name} never happened")


async def all_run(cluster: Cluster, names: list[str]) -> None:
    async def run() -> bool:
        phases = {pod.metadata.name: pod.status.phase for pod in await cluster.pods()}
        return all(phases[name] == "Running" for name in names)

    await cluster.until("all pods run", run, limit_s=90)


async def problems_left(cluster: Cluster) -> list[str]:
    verifier = cluster.verifier()
    return await lasting_problems(cluster, verifier, namespace="default", with_events=True)


async def test_stopped_for_a_minute_at_every_point(cluster: Cluster) -> None:
    frozen: list[Frozen] = []
    names = [f"pod-{number}" for number in range(len(POINTS))]
    schedulers = cluster.schedulers
    async with anyio.create_task_group() as group:

        async def go_on(stopped: Frozen) -> None:
            await anyio.sleep_until(stopped.since + STOPPED_S)
            cluster.processes[stopped.scheduler].thaw()

        for point, scheduler, successor, name in zip(
            POINTS, schedulers[:-1], schedulers[1:], names, strict=True
        ):
            stopped = await freeze_at(cluster, point, scheduler, name)
            await cluster.taps["extender"].retarget(cluster.ports[successor])
            frozen.append(stopped)
            group.start_soon(go_on, stopped)
        await all_run(cluster, names)
        assert await problems_left(cluster) == []

    assert len(frozen) == len(POINTS)
    assert all(cluster.processes[name].is_running() for name in schedulers)
    for name in schedulers:
        await cluster.ready(name)
    await all_run(cluster, names)
    assert await problems_left(cluster) == []
    for name in names:
        await cluster.delete_pod(name)

    async def all_free() -> bool:
        records = (await ledger_of(cluster)).values()
        return not await cluster.pods() and all(record.op == "release" for record in records)

    await cluster.until("every share is free", all_free, limit_s=60)
    assert await problems_left(cluster) == []
