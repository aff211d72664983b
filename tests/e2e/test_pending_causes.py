# SPDX-License-Identifier: Apache-2.0
"""A waiting pod shows the cause in its PodScheduled condition: one precise line for each cause.

Every cause has a node of its own on paper, with the obstacle there; the pod selects that node, so
kube-scheduler names no other reason of ours. All pods are created at once.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import msgspec
import nats
import pytest
from msgspec import Struct

from hami_common.errors import NotFound
from hami_common.model.device import DeviceFacts
from hami_sim.cluster import Cluster, ClusterSpec, run_cluster
from tests.support.paper_nodes import PaperAgents, PaperNode, add_nodes, devices_of, each

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240), pytest.mark.shares_cluster]

SPEC = ClusterSpec(nodes=(), settings={"scheduler": {"heartbeat_timeout_s": "6"}})
MEMORY_MIB = 40_000
MESSAGE_BYTES = 1024
HEARTBEAT_S = 1.0
GPU, MEMORY, PERCENT, CORES = (
    f"nvidia.com/{word}" for word in ("gpu", "gpumem", "gpumem-percentage", "gpucores")
)
SELECTOR = "kubernetes.io/hostname"
CONTROLLERS = "kube-controller-manager"
DEVICES_TOML = """
[[rules]]
nodes = ["one-slot"]
slots = 1
"""

Limits = Mapping[str, int]


class Cause(Struct, frozen=True, kw_only=True):
    """Cause for which a pod waits."""

    line: str
    """The line of ours."""
    asks: Limits
    node: str
    beside: tuple[Limits, ...] = ()
    """Requests of pods that are bound there before."""
    devices: int = 1
    facts: Mapping[str, Any] = {}
    annotations: Mapping[str, str] = {}
    init: Limits = {}
    second: Limits = {}
    """Requests of an init container and a second container."""


CAUSES = (
    Cause(
        node="memory",
        asks={GPU: 1, MEMORY: 50_000},
        line="CardInsufficientMemory: 50000 MiB wanted, at most 40000 MiB free on a device"
        " (memory)",
    ),
    Cause(
        node="percentage",
        asks={GPU: 1, PERCENT: 50},
        beside=({GPU: 1, MEMORY: 30_000},),
        line="CardInsufficientMemory: 20000 MiB (50%) wanted, at most 10000 MiB free on a device"
        " (percentage)",
    ),
    Cause(
        node="init",
        asks={GPU: 1, MEMORY: 1000},
        init={GPU: 1, MEMORY: 41_000},
        line="CardInsufficientMemory: setup: 41000 MiB wanted, at most 40000 MiB free on a device"
        " (init)",
    ),
    Cause(
        node="second-container",
        asks={GPU: 1, MEMORY: 30_000},
        second={GPU: 1, MEMORY: 20_000},
        line="CardInsufficientMemory: second: 20000 MiB wanted, at most 10000 MiB free on a device"
        " (second-container)",
    ),
    Cause(
        node="cores",
        asks={GPU: 1, MEMORY: 1000, CORES: 50},
        beside=({GPU: 1, MEMORY: 1000, CORES: 60},),
        line="CardInsufficientCore: 50% compute wanted, at most 40% free on a device (cores)",
    ),
    Cause(
        node="no-core-left",
        asks={GPU: 1, MEMORY: 1000},
        beside=({GPU: 1, MEMORY: 1000, CORES: 60}, {GPU: 1, MEMORY: 1000, CORES: 40}),
        line="CardComputeUnitsExhausted: all compute of the devices is handed out",
    ),
    Cause(
        node="one-slot",
        asks={GPU: 1, MEMORY: 1000},
        beside=({GPU: 1, MEMORY: 1000},),
        line="CardTimeSlicingExhausted: every slot of the devices is taken",
    ),
    Cause(
        node="not-idle",
        asks={GPU: 1, MEMORY: 1000, CORES: 100},
        beside=({GPU: 1, MEMORY: 1000},),
        line="ExclusiveDeviceAllocateConflict: no device is idle",
    ),
    Cause(
        node="held",
        asks={GPU: 1, MEMORY: 1000},
        beside=({GPU: 1, MEMORY: 1000, CORES: 100},),
        line="ExclusiveDeviceAllocateConflict: every device is held exclusively",
    ),
    Cause(
        node="mutex",
        asks={GPU: 1, MEMORY: 1000},
        beside=({GPU: 1, MEMORY: 1000},),
        annotations={"hami.io/gpu-scheduler-policy": "mutex"},
        line="ExclusiveDeviceAllocateConflict: no device is idle"
        " (annotation hami.io/gpu-scheduler-policy: mutex)",
    ),
    Cause(
        node="type",
        asks={GPU: 1, MEMORY: 1000},
        annotations={"nvidia.com/use-gputype": "A100"},
        line="CardTypeMismatch: no device is of a type wanted: A100"
        " (annotation nvidia.com/use-gputype)",
    ),
    Cause(
        node="type-denied",
        asks={GPU: 1, MEMORY: 1000},
        annotations={"nvidia.com/nouse-gputype": "H100"},
        line="CardTypeMismatch: no device is of a type wanted: not H100"
        " (annotation nvidia.com/nouse-gputype)",
    ),
    Cause(
        node="uuid",
        asks={GPU: 1, MEMORY: 1000},
        annotations={"nvidia.com/use-gpuuuid": "GPU-elsewhere-0"},
        line="CardUuidMismatch: no device has a UUID wanted: GPU-elsewhere-0"
        " (annotation nvidia.com/use-gpuuuid)",
    ),
    Cause(
        node="uuid-denied",
        asks={GPU: 1, MEMORY: 1000},
        annotations={"nvidia.com/nouse-gpuuuid": "GPU-uuid-denied-0"},
        line="CardUuidMismatch: no device has a UUID wanted: not GPU-uuid-denied-0"
        " (annotation nvidia.com/nouse-gpuuuid)",
    ),
    Cause(
        node="mode",
        asks={GPU: 1, MEMORY: 1000},
        annotations={"nvidia.com/vgpu-mode": "mps"},
        line="ModeNotFit: no device is in mode mps; write nvidia.com/vgpu-mode: hami-core",
    ),
    Cause(
        node="cordoned",
        asks={GPU: 1, MEMORY: 1000},
        line="CardCordoned: every healthy device is cordoned",
    ),
    Cause(
        node="unhealthy",
        asks={GPU: 1, MEMORY: 1000},
        facts={"healthy": False, "health_reason": "Xid 79"},
        line="CardNotHealth: no device is healthy",
    ),
    Cause(
        node="silent",
        asks={GPU: 1, MEMORY: 1000},
        line="NodeAgentSilent: the node's agent is silent or not registered with kubelet",
    ),
    Cause(
        node="no-device",
        asks={GPU: 1, MEMORY: 1000},
        devices=0,
        line="NodeUnregistered: no device of this kind is registered on the node",
    ),
    Cause(
        node="too-few",
        asks={GPU: 4, MEMORY: 1000},
        devices=2,
        annotations={"hami.io/gpu-scheduler-policy": "topology-aware"},
        line="NodeInsufficientDevice: 4 devices wanted, at most 2 on a node (too-few)",
    ),
    Cause(
        node="some-fit",
        asks={GPU: 2, MEMORY: 20_000},
        beside=({GPU: 1, MEMORY: 30_000},),
        devices=2,
        line="AllocatedCardsInsufficientRequest: 2 devices wanted, at most 1 fit on a node"
        " (some-fit); others CardInsufficientMemory",
    ),
    Cause(
        node="numa",
        asks={GPU: 2, MEMORY: 1000},
        devices=2,
        annotations={"nvidia.com/numa-bind": "true"},
        line="NumaNotFit: 2 devices of one NUMA node wanted, at most 1 fit (numa)"
        " (annotation nvidia.com/numa-bind)",
    ),
)
BY_NODE = {cause.node: cause for cause in CAUSES}
EVERYWHERE = "everywhere"
"""A pod that selects no node and is refused by all, for reasons of several classes."""


def paper_node(cause: Cause) -> PaperNode:
    devices: tuple[DeviceFacts, ...] = ()
    if cause.devices:
        devices = devices_of(cause.node, cause.devices, memory_mib=MEMORY_MIB, **cause.facts)
    cordon = {"hami.io/device-cordon": "GPU-cordoned-0"} if cause.node == "cordoned" else {}
    return PaperNode(name=cause.node, devices=devices, annotations=cordon)


def pod(
    name: str,
    asks: Limits,
    *,
    node: str = "",
    annotations: Mapping[str, str] | None = None,
    init: Limits | None = None,
    second: Limits | None = None,
) -> dict[str, Any]:
    def container(word: str, limits: Limits) -> dict[str, Any]:
        texts = {resource: str(amount) for resource, amount in limits.items()}
        return {"name": word, "image": "app", "resources": {"limits": texts}}

    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": dict(annotations or {})},
        "spec": {
            "nodeSelector": {SELECTOR: node} if node else {},
            "initContainers": [container("setup", init)] if init else [],
            "containers": [
                container("main", asks),
                *([container("second", second)] if second else []),
            ],
        },
    }


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """All nodes, their bound pods, and the pods that wait."""
    folder = tmp_path_factory.mktemp("pending")
    async with (
        run_cluster(SPEC, folder) as running,
        await nats.connect(running.nats.url, name="paper agents") as client,
        anyio.create_task_group() as group,
    ):
        if CONTROLLERS in running.processes:
            await running.processes[CONTROLLERS].stop()
        agents = PaperAgents(client, heartbeat_s=HEARTBEAT_S)
        group.start_soon(agents.live)
        with (folder / "devices.toml").open("a", encoding="utf-8") as config:
            config.write(DEVICES_TOML)
        nodes = [paper_node(cause) for cause in CAUSES]
        await add_nodes(running, nodes)
        await each([node for node in nodes if node.devices], agents.report)
        agents.heard.remove("silent")
        await running.until("the scheduler knows who is alive", lambda: _is_known(running))
        occupants = [
            pod(f"on-{cause.node}-{number}", asks, node=cause.node)
            for cause in CAUSES
            for number, asks in enumerate(cause.beside)
        ]
        await each(occupants, running.create_pod)

        async def bound() -> bool:
            found = await running.pods()
            return len(found) == len(occupants) and all(one.spec.node_name for one in found)

        await running.until("what is beside is bound", bound, limit_s=60)
        waiting = [
            pod(
                cause.node,
                cause.asks,
                node=cause.node,
                annotations=cause.annotations,
                init=cause.init,
                second=cause.second,
            )
            for cause in CAUSES
        ]
        waiting.append(pod(EVERYWHERE, {GPU: 1, MEMORY: 99_999}))
        await each(waiting, running.create_pod)
        yield running
        group.cancel_scope.cancel()


async def _is_known(cluster: Cluster) -> bool:
    """Return True when the inventory matches the nodes: devices, cordon, slots, silent agents."""
    try:
        async with cluster.session.get(f"{cluster.url('scheduler')}/v1/snapshot") as response:
            if response.status != 200:
                return False  # it does not have its ledger yet
            known = await response.json()
    except OSError:
        return False
    devices = {d["uuid"]: d for node in known.get("devices", []) for d in node.get("devices", [])}
    wanted = sum(cause.devices for cause in CAUSES)
    return (
        len(devices) == wanted
        and bool(devices["GPU-cordoned-0"].get("cordoned"))
        and devices["GPU-one-slot-0"].get("slots", 10) == 1
        and [name for name, *_ in known.get("silent", [])] == ["silent"]
    )


async def message_of(cluster: Cluster, name: str) -> str:
    """The message of the pod's PodScheduled condition, empty until there is one."""
    try:
        document = await cluster.pod_document(name)
    except NotFound:
        return ""
    for condition in document.get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            assert condition["reason"] == "Unschedulable"
            return str(condition["message"])
    return ""


def refusals_of(message: str) -> list[str]:
    """The lines of ours in a message: kube-scheduler puts the number of nodes before each."""
    found = []
    for cause in CAUSES:
        code = cause.line.partition(":")[0]
        found += [code] * message.count(f" {code}: ")
    return sorted(set(found))


@pytest.mark.parametrize("node", BY_NODE)
async def test_waiting_pod_shows_the_cause(cluster: Cluster, node: str) -> None:
    cause = BY_NODE[node]
    message = ""

    async def told() -> bool:
        nonlocal message
        message = await message_of(cluster, node)
        return f" 1 {cause.line}" in message

    with anyio.move_on_after(60):
        while not await told():
            await anyio.sleep(0.1)
    assert f" 1 {cause.line}" in message
    assert refusals_of(message) == [cause.line.partition(":")[0]]
    assert message.partition(f" 1 {cause.line}")[2][:1] in (",", ".")
    assert len(message.encode()) <= MESSAGE_BYTES


async def test_pod_that_every_node_refuses_gets_one_line_for_each_class(cluster: Cluster) -> None:
    message = ""

    async def told() -> bool:
        nonlocal message
        message = await message_of(cluster, EVERYWHERE)
        return "CardInsufficientMemory" in message

    with anyio.move_on_after(60):
        while not await told():
            await anyio.sleep(0.1)
    assert message.startswith(f"0/{len(CAUSES)} nodes are available: ")
    assert " 1 NodeUnregistered: no device of this kind is registered on the node" in message
    assert " 1 CardNotHealth: no device is healthy" in message
    assert " 1 CardCordoned: every healthy device is cordoned" in message
    assert len(message.encode()) <= MESSAGE_BYTES


def test_causes_are_twenty_or_more_and_differ() -> None:
    assert len({msgspec.json.encode(cause) for cause in CAUSES}) >= 20
    assert len(BY_NODE) == len(CAUSES)
