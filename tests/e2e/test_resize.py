# SPDX-License-Identifier: Apache-2.0
"""A running container's share grows and shrinks: ledger, annotation and limits file stay equal.

Real scheduler, agent and in-container library under the fake driver. The program in the container
queries the driver for its memory, several times a second, and prints it. Costs about 30 s.
"""

import re
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from hami_common.pods import annotations, limits
from hami_common.pods.limits import DeviceLimit
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hami_sim.tap import Direction, Trap
from tests.fakes.gpucontainers import why_not
from tools import build_native, build_native_fakes

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180), pytest.mark.shares_cluster]

NODE = "gpu-t4"
AGENT = f"agent-{NODE}"
HELD_MIB = 600
SOURCE = Path(__file__).parent / "meter.c"
INSIDE = "/opt/meter"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the program that containers run."""
    directory = tmp_path_factory.mktemp("meter")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", directory / "meter", SOURCE, "-ldl"], check=True)
    return directory


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    drivers = build_native_fakes.build(build_native_fakes.DEFAULT_OUT)
    limiter = build_native.build("release")
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="4xT4"),),
        nvml_library=str(drivers / build_native_fakes.NVML),
        limiter=str(limiter),
        taps=True,
        backoff_s=0.2,
        settings={"scheduler": {"resize_confirm_s": "12", "retry_s": "0.1"}},
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("resize")) as running:
        yield running


@pytest.fixture(autouse=True)
async def nothing_armed(cluster: Cluster) -> AsyncIterator[None]:
    yield
    for tap in cluster.taps.values():
        tap.disarm()
        await tap.heal()


def needs_containers() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"the limiter needs containers: {reason}")


async def start(cluster: Cluster, name: str, programs: Path, *, memory_mib: int) -> None:
    """Wait until a pod runs; with 0 MiB it has a whole device."""
    script = f"exec {INSIDE}/meter {HELD_MIB}"
    memory = {"nvidia.com/gpumem": memory_mib} if memory_mib else {}
    await cluster.create_pod(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "volumes": [{"name": "meter", "hostPath": {"path": str(programs)}}],
                "containers": [
                    {
                        "name": "main",
                        "image": "app",
                        "command": ["sh", "-c", script],
                        "volumeMounts": [{"name": "meter", "mountPath": INSIDE, "readOnly": True}],
                        "resources": {"limits": {"nvidia.com/gpu": 1, **memory}},
                    }
                ],
            },
        }
    )

    async def runs() -> bool:
        """Return True when the scheduler has the state too: then it ignores equal sizes."""
        status, refused = await resize(cluster, name)
        return status == 400 and "its allocation is" not in refused["error"]["message"]

    await cluster.until(f"{name} runs", runs, limit_s=60)


async def resize(cluster: Cluster, name: str, **wish: Any) -> tuple[int, dict[str, Any]]:
    body = {"namespace": "default", "pod": name, **wish}
    async with cluster.session.post(f"{cluster.url('scheduler')}/v1/resize", json=body) as answer:
        return answer.status, await answer.json()


async def seen_by_process(cluster: Cluster, name: str) -> int:
    """Return the last amount that the program in the container printed."""
    found = re.findall(r"^total=(\d+)$", await cluster.container_log(name, "main"), re.MULTILINE)
    return int(found[-1]) if found else 0


async def amounts(cluster: Cluster, name: str) -> dict[str, int]:
    """The container's memory by ledger, signed annotation, limits and process."""
    pod = await cluster.pod(name)
    uid, node = pod.metadata.uid, pod.spec.node_name
    notes = pod.annotations()
    signed = cluster.verifier().verify(notes[annotations.ALLOCATION], pod_uid=uid, node=node)
    devices: tuple[DeviceLimit, ...] = limits.decode(notes[annotations.limits("main")]).devices
    return {
        "ledger": (await cluster.ledger_of(node, uid))[-1][1].containers[0].shares[0].memory_mib,
        "signed": signed.placement.containers[0].shares[0].memory_mib,
        "limits": devices[0].memory_mib,
        "process": await seen_by_process(cluster, name),
    }


async def until_all_are(cluster: Cluster, name: str, wanted: set[int]) -> int:
    """Wait until ledger, annotations, file and process have the same amount, one of ``wanted``."""
    last: dict[str, int] = {}

    async def agree() -> bool:
        nonlocal last
        last = await amounts(cluster, name)
        return len(set(last.values())) == 1 and last["ledger"] in wanted

    try:
        await cluster.until(f"{name} has one of {wanted}", agree, limit_s=30)
    except Exception as error:
        log = await cluster.container_log(name, "main")
        raise AssertionError(f"{last}, {log[-500:]}") from error
    return last["ledger"]


async def test_running_process_sees_its_share_grow_and_shrink(
    cluster: Cluster, programs: Path
) -> None:
    needs_containers()
    await start(cluster, "worker", programs, memory_mib=2000)
    await until_all_are(cluster, "worker", {2000})

    status, grown = await resize(cluster, "worker", container="main", memory_mib=3000)
    assert (status, grown["in_force"]) == (200, True), grown
    await until_all_are(cluster, "worker", {3000})

    status, shrunk = await resize(cluster, "worker", memory_mib=1000)
    assert (status, shrunk["in_force"]) == (200, True), shrunk
    await until_all_are(cluster, "worker", {1000})

    status, refused = await resize(cluster, "worker", memory_mib=HELD_MIB - 100)
    assert (status, refused["error"]["code"]) == (409, "in-use"), refused
    assert await until_all_are(cluster, "worker", {1000})
    status, forced = await resize(cluster, "worker", memory_mib=HELD_MIB - 100, force=True)
    assert status == 200, forced
    await until_all_are(cluster, "worker", {HELD_MIB - 100})

    capacity = 16384
    status, refused = await resize(cluster, "worker", memory_mib=capacity + 10_000)
    assert (status, refused["error"]["code"]) == (409, "no-room"), refused
    await cluster.delete_pod("worker")


async def test_whole_device_and_nonsense_are_refused_with_the_fix(
    cluster: Cluster, programs: Path
) -> None:
    await start(cluster, "whole", programs, memory_mib=0)
    status, refused = await resize(cluster, "whole", memory_mib=1000)
    assert status == 400, refused
    assert "whole" in refused["error"]["message"]
    status, refused = await resize(cluster, "whole", container="side", memory_mib=1000)
    assert status == 400
    assert "main" in refused["error"]["message"]
    assert (await resize(cluster, "nobody", memory_mib=1000))[0] == 404
    assert (await resize(cluster, "whole", megabytes=1000))[0] == 400
    await cluster.delete_pod("whole")


KILLS = [
    # name, victim, tap, direction, pattern, delivered
    ("booked", "scheduler", "scheduler-nats", "up", b"PUB $KV.hami_alloc.", True),
    ("booking-answer-lost", "scheduler", "scheduler-nats", "down", b'"KV_hami_alloc"', False),
    ("annotation-not-sent", "scheduler", "scheduler-api", "up", b"PATCH ", False),
    ("annotation-sent", "scheduler", "scheduler-api", "up", b"PATCH ", True),
    ("agent-asked", AGENT, f"{AGENT}-nats", "down", b"hami.v1.ask.", True),
    ("given-back", "scheduler", "scheduler-nats", "up", b'"memory_mib":1500', True),
]


GROWING = ("booked", "annotation-not-sent")
"""Points at which a grow is killed, too: its other steps are those of a shrink."""
CASES = [(*one, 1500) for one in KILLS] + [(*one, 2500) for one in KILLS if one[0] in GROWING]


@pytest.mark.parametrize(
    ("name", "victim", "tap", "direction", "pattern", "deliver", "wanted_mib"),
    CASES,
    ids=[f"{one[0]}-{one[-1]}" for one in CASES],
)
async def test_killed_at_every_step_leaves_one_truth(
    cluster: Cluster,
    programs: Path,
    name: str,
    victim: str,
    tap: str,
    direction: Direction,
    pattern: bytes,
    deliver: bool,  # noqa: FBT001 - a table row
    wanted_mib: int,
) -> None:
    needs_containers()
    pod = f"{name}-{wanted_mib}"
    await start(cluster, pod, programs, memory_mib=2000)
    await until_all_are(cluster, pod, {2000})
    trap = Trap(pattern, direction, partial(cluster.processes[victim].kill), deliver=deliver)
    cluster.taps[tap].arm(trap)
    async with anyio.create_task_group() as group:

        async def ask() -> None:
            try:
                await resize(cluster, pod, memory_mib=wanted_mib)
            except aiohttp.ClientError:
                return  # killed before it answered

        group.start_soon(ask)
        with anyio.fail_after(30):
            await trap.sprung.wait()
        cluster.processes[victim].start()
    await cluster.ready(victim)
    assert await until_all_are(cluster, pod, {2000, wanted_mib}) in {2000, wanted_mib}
    status, done = await resize(cluster, pod, memory_mib=1800)
    assert status == 200, done
    await until_all_are(cluster, pod, {1800})
    await cluster.delete_pod(pod)
