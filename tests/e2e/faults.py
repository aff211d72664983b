# SPDX-License-Identifier: Apache-2.0
"""A failure at every point of the reserve, bind and allocate path never loses or doubles a share.

Each case lets one pod run into a trap: at one exact point of an exchange (request sent or
delivered, answer lost or delivered) a part is killed with SIGKILL and restarted, or the scheduler
is cut from NATS. Afterwards the pod runs, and the pods and the streams agree: see
``tests.support.checker``. Two files contain the cases, so that they can run side by side; for
stopped and resumed schedulers see ``test_freeze``.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count

import anyio
import nats.errors
import pytest
from msgspec import Struct

from hami_common.errors import Unavailable
from hami_sim.cluster import Cluster
from hami_sim.tap import Direction, Trap
from tests.e2e.conftest import small_pod
from tests.support.checker import event_differences, ledger_of, problems_of

NODE = "gpu-a.example"
AGENT = f"agent-{NODE}"
_numbers = count(1)


class Point(Struct, frozen=True, kw_only=True):
    """Point at which the failure occurs."""

    name: str
    tap: str
    direction: Direction
    pattern: bytes
    deliver: bool


def _point(name: str, tap: str, direction: Direction, pattern: bytes, deliver: bool) -> Point:  # noqa: FBT001 - a table row
    return Point(name=name, tap=tap, direction=direction, pattern=pattern, deliver=deliver)


POINTS = (
    _point("filter asked", "extender", "up", b"POST /filter", deliver=False),
    _point("filter delivered", "extender", "up", b"POST /filter", deliver=True),
    _point("filter answer lost", "extender", "down", b'"FailedNodes"', deliver=False),
    _point("prioritize asked", "extender", "up", b"POST /prioritize", deliver=False),
    _point("prioritize answer lost", "extender", "down", b'"Score"', deliver=False),
    _point("bind asked", "extender", "up", b"POST /bind", deliver=False),
    _point("bind delivered", "extender", "up", b"POST /bind", deliver=True),
    _point("reserve not sent", "scheduler-nats", "up", b"PUB $KV.hami_alloc.", deliver=False),
    _point("reserve delivered", "scheduler-nats", "up", b"PUB $KV.hami_alloc.", deliver=True),
    _point(
        "reserve acknowledgement lost",
        "scheduler-nats",
        "down",
        b'"stream":"KV_hami_alloc"',
        deliver=False,
    ),
    _point(
        "reserve acknowledged",
        "scheduler-nats",
        "down",
        b'"stream":"KV_hami_alloc"',
        deliver=True,
    ),
    _point("binding not sent", "scheduler-api", "up", b"/binding HTTP", deliver=False),
    _point("binding delivered", "scheduler-api", "up", b"/binding HTTP", deliver=True),
    _point("binding answer lost", "scheduler-api", "down", b'"status":"Success"', deliver=False),
    _point("binding answered", "scheduler-api", "down", b'"status":"Success"', deliver=True),
    _point("bound not sent", "scheduler-nats", "up", b"PUB $KV.hami_state.", deliver=False),
    _point("bound delivered", "scheduler-nats", "up", b"PUB $KV.hami_state.", deliver=True),
    _point("bind answer lost", "extender", "down", b'{"Error"', deliver=False),
    _point(
        "record on its way to the agent", f"{AGENT}-nats", "down", b"hami.v1.alloc.", deliver=False
    ),
    _point(
        "pod on its way to the agent", f"{AGENT}-api", "down", b"hami.io/allocation", deliver=False
    ),
    _point("prepared not sent", f"{AGENT}-nats", "up", b'"state":"prepared"', deliver=False),
    _point("prepared delivered", f"{AGENT}-nats", "up", b'"state":"prepared"', deliver=True),
    _point(
        "prepared acknowledgement lost",
        f"{AGENT}-nats",
        "down",
        b'"stream":"KV_hami_state"',
        deliver=False,
    ),
)
IDS = [point.name.replace(" ", "-") for point in POINTS]
API_POINTS = [point for point in POINTS if point.tap.endswith("-api")]


@pytest.fixture
async def cluster(tapped_cluster: Cluster) -> AsyncIterator[Cluster]:
    """The cluster with everything running and no trap armed, before and after."""
    yield tapped_cluster
    for tap in tapped_cluster.taps.values():
        tap.disarm()
        await tap.heal()


async def run_into(cluster: Cluster, point: Point, harm: Callable[[], Awaitable[None]]) -> str:
    """Create a pod that springs the trap, and wait until it has; the pod's name."""
    name = f"pod-{next(_numbers)}"
    created = anyio.Event()

    async def harm_when_created() -> None:
        await created.wait()  # the path of a creation has no trap
        await harm()

    trap = Trap(point.pattern, point.direction, harm_when_created, deliver=point.deliver)
    cluster.taps[point.tap].arm(trap)
    # Two kinds of points need not happen for each pod: kube-scheduler does not ask for scores when
    # only one node fits, as it may be after an earlier failure, and the scheduler writes no state
    # "bound" when the agent's "prepared" came first. Then another pod triggers the trap.
    anywhere = point.name.startswith("prioritize")
    selector = {} if anywhere else {"kubernetes.io/hostname": NODE}
    may_be_skipped = anywhere or point.name.startswith("bound")

    for turn in range(5 if may_be_skipped else 1):
        pod = f"{name}-{turn}" if turn else name
        await cluster.create_pod(small_pod(pod, nodeSelector=selector), namespace="default")
        created.set()
        with anyio.move_on_after(20 if anywhere else 60) as waiting:
            if may_be_skipped:
                await _sprung_or_running(cluster, trap, pod)
                waiting.deadline = anyio.current_time() + 1
            await trap.sprung.wait()
            return pod
    raise Unavailable(peer="trap", detail=f"{point.name} never happened")


async def _sprung_or_running(cluster: Cluster, trap: Trap, pod: str) -> None:
    """Wait until the trap has sprung or ``pod`` runs without it."""
    while not trap.sprung.is_set() and (await cluster.pod(pod)).status.phase != "Running":
        await anyio.sleep(0.1)


async def settled(cluster: Cluster, name: str) -> list[str]:
    """Problems that remain once the pod runs; ``AssertionError`` when it never does."""

    async def is_decided() -> bool:
        phase = (await cluster.pod(name)).status.phase
        if phase == "Failed":  # permanently
            raise Unavailable(peer=f"pod {name}", detail="it has failed")
        return phase == "Running"

    try:
        await cluster.until(f"pod {name} runs", is_decided, limit_s=90)
    except Unavailable as error:
        story = await cluster.story_of(name)
        raise AssertionError(f"{error}; {story}") from error

    problems = ["not looked yet"]
    with anyio.move_on_after(45):
        while problems := await problems_now(cluster):
            await anyio.sleep(0.1)
    return problems


async def problems_now(cluster: Cluster) -> list[str]:
    """Return the violations at this moment; a timeout of the bus is one."""
    try:
        problems = await problems_of(cluster, cluster.verifier(), namespace="default")
        return problems + await event_differences(cluster)
    except (nats.errors.Error, TimeoutError) as error:
        return [repr(error)]


async def kill_at(cluster: Cluster, point: Point, victim: str) -> None:
    """Kill ``victim`` when a pod comes to ``point``, restart it, and let the cluster recover."""

    async def harm() -> None:
        if victim == "nats":
            await cluster.nats.kill()
        else:
            await cluster.processes[victim].kill()

    name = await run_into(cluster, point, harm)
    if victim == "nats":
        await cluster.nats.start()
    else:
        cluster.processes[victim].start()
    assert await settled(cluster, name) == []
    await cluster.delete_pod(name)
    if victim != "nats":
        await cluster.ready(victim)


async def all_is_over(cluster: Cluster) -> None:
    """Delete all pods; then every share is free and the books agree."""
    for pod in await cluster.pods():
        await cluster.delete_pod(pod.metadata.name)

    async def free() -> bool:
        return not await cluster.pods() and not await problems_now(cluster)

    await cluster.until("every pod is gone and every share free", free, limit_s=60)
    assert [r for r in (await ledger_of(cluster)).values() if r.op != "release"] == []
    assert await event_differences(cluster) == []
