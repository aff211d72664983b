# SPDX-License-Identifier: Apache-2.0
"""The whole system on a real node: kubelet, containerd and runc under the real control plane.

One cluster serves all tests, in their order. The tests read a container's view from inside it: its
environment, its limits file, the device nodes it may open. Shares differ by pod, so that each
identifies its pod. Times and memory in seconds and MiB.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
import pytest
from msgspec import Struct

from hami_common.events.allocation import AllocationRecord
from hami_common.kubeletapi import podresources, podresources_grpc
from hami_common.pods import annotations, limits
from hami_common.pods.podview import PodView
from hami_nodeagent.shell import agentdevices
from hami_sim.cluster import ClusterSpec, NodeSpec
from hami_sim.kube import Access
from hami_sim.process import Process
from tests.cluster.node.cluster import KUBELET_TAP, NodeCluster, run_node_cluster
from tests.cluster.node.image import APP
from tests.cluster.node.needs import programs_or_skip
from tests.cluster.node.node import base
from tests.cluster.node.space import DEVICE_MAJOR
from tests.support.checker import lasting_problems, ledger_of
from tests.support.dcgm import attributions
from tests.support.kubeclient import KubeClient

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(400),
]

NODE = "real-gpu"
AGENT = f"agent-{NODE}"
PODS = "/api/v1/namespaces/default/pods"
LIMIT_S = 180.0
"""Longest wait for a crowd of pods; 30 s on two idle cores."""
CPU_MILLI = 25
FIRST_MIB = 1000
SPEC = ClusterSpec(
    nodes=(NodeSpec(name=NODE, profile="8xA100-40"),),
    slots=16,
    injection="devices",
    backoff_s=0.2,
    # The agent checks as rarely as in production: what it learns late must keep no pod away.
    settings={"scheduler": {"reconcile_s": "5"}},
)
TELL = (
    "env; echo ---; cat /etc/hami/limits; echo ---; "
    "for n in /dev/nvidia[0-9]*; do echo $n; done; echo ---; "
    "trap 'exit 0' TERM; sleep 100000 & wait $!"
)
FOLLOW = (
    "trap 'exit 0' TERM; while :; do cmp -s /etc/hami/limits /tmp/seen || "
    "{ cp /etc/hami/limits /tmp/seen; cat /tmp/seen; echo ---; }; sleep 0.05; done"
)


def share(
    name: str, memory_mib: int, *, script: str = TELL, cpu_milli: int = CPU_MILLI, **more: Any
) -> dict[str, Any]:
    wanted = {
        "nvidia.com/gpu": "1",
        "nvidia.com/gpumem": str(memory_mib),
        "cpu": f"{cpu_milli}m",
        "memory": "16Mi",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "main",
                    "image": APP,
                    "command": ["sh", "-c", script],
                    "resources": {"limits": wanted},
                }
            ],
            **more,
        },
    }


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeCluster]:
    programs = programs_or_skip()
    with tempfile.TemporaryDirectory(prefix="hn-", dir=base()) as disk:
        async with run_node_cluster(
            SPEC, programs, tmp_path_factory.mktemp("real"), Path(disk)
        ) as cluster:
            yield cluster


class Told(Struct, frozen=True, kw_only=True):
    """A container's view of its limits and devices."""

    env: dict[str, str]
    limits: limits.Limits
    nodes: tuple[str, ...]


def told_of(text: str) -> Told:
    environment, file, nodes, *_ = text.split("---\n")
    return Told(
        env=dict(line.partition("=")[::2] for line in environment.splitlines()),
        limits=limits.decode(file),
        nodes=tuple(nodes.split()),
    )


async def told_by(cluster: NodeCluster, name: str) -> Told:
    async def has_spoken() -> bool:
        return (await cluster.container_log(name, "main")).count("---\n") >= 3

    await cluster.until(f"{name} tells what it has", has_spoken, limit_s=LIMIT_S)
    return told_of(await cluster.container_log(name, "main"))


async def records_of(cluster: NodeCluster) -> dict[str, AllocationRecord]:
    """The newest ledger record of each pod, by name."""
    return {record.pod: record for record in (await ledger_of(cluster)).values()}


async def has_its_own(cluster: NodeCluster, names: Sequence[str]) -> list[str]:
    """Return differences between a container's file, environment or devices and its own record."""
    records = await records_of(cluster)
    minors = cluster.minors()
    wrong = []
    for name in names:
        told = await told_by(cluster, name)
        [shares] = records[name].containers
        [own] = shares.shares
        expected = (
            limits.limits_of(shares, allocation_id=records[name].allocation_id),
            own.uuid,
            f"{own.memory_mib}m",
            (f"/dev/nvidia{minors[own.uuid]}",),
        )
        found = (
            told.limits,
            told.env["NVIDIA_VISIBLE_DEVICES"],
            told.env["CUDA_DEVICE_MEMORY_LIMIT_0"],
            told.nodes,
        )
        if found != expected:
            wrong.append(f"{name} has {found}, its record says {expected}")
    return wrong


async def in_phase(cluster: NodeCluster, phase: str) -> list[PodView]:
    return [pod for pod in await cluster.pods() if pod.status.phase == phase]


async def all_run(cluster: NodeCluster, names: Sequence[str]) -> None:
    async def run() -> bool:
        running = {pod.metadata.name for pod in await in_phase(cluster, "Running")}
        return running >= set(names)

    await cluster.until(f"{len(names)} pods run", run, limit_s=LIMIT_S)


async def is_bound(cluster: NodeCluster, name: str) -> None:
    async def has_node() -> bool:
        return (await cluster.pod(name)).spec.node_name == NODE

    await cluster.until(f"{name} is bound", has_node)


async def sound(cluster: NodeCluster) -> list[str]:
    """Return problems left once the parts had time to agree."""
    verifier = cluster.verifier()
    return await lasting_problems(cluster, verifier, namespace="default", with_events=True)


async def runs(cluster: NodeCluster) -> dict[str, tuple[str, int]]:
    """(container id, restarts) of each pod's container, without pods that are being deleted."""
    documents = (await cluster.request("GET", PODS))["items"]
    return {
        document["metadata"]["name"]: (status.get("containerID", ""), status["restartCount"])
        for document in documents
        if "deletionTimestamp" not in document["metadata"]
        for status in document["status"].get("containerStatuses") or ()
    }


def pids_of(cluster: NodeCluster, seen: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """Process id by container id; what the runtime still stops belongs to none of these pods."""
    ids = {container.rpartition("//")[2] for container, _ in seen.values()}
    return {one: pid for one, pid in cluster.node.container_pids().items() if one in ids}


async def quantiles(cluster: NodeCluster, name: str) -> tuple[int, int, float]:
    """(how many, how many within 100 ms, mean in seconds) of a histogram of the agent."""
    count = await cluster.metric(AGENT, f"{name}_count")
    fast = await cluster.metric(AGENT, f"{name}_bucket", labels='.*le="0.1".*')
    total_s = await cluster.metric(AGENT, f"{name}_sum")
    return int(count), int(fast), total_s / count


TOTAL, FITTING = 64, 51
"""A fifth of the pods do not fit beside the CPU use that the scheduler does not see."""
CROWD = tuple(f"crowd-{i}" for i in range(TOTAL))


@pytest.fixture(scope="module")
async def crowd(cluster: NodeCluster) -> tuple[str, ...]:
    """64 pods created at once, of which kubelet admits 51: the names of those.

    A pod in a file of kubelet's, in a namespace that does not exist, takes CPU that is invisible to
    schedulers, because the API server refuses its mirror.
    """
    hidden_milli = await cluster.cpu_milli() - FITTING * CPU_MILLI - CPU_MILLI // 2
    cluster.node.add_static_pod(hidden("filler", hidden_milli))

    async def hidden_runs() -> bool:
        return "up" in cluster.node.log(f"filler-{NODE}", "main", namespace="nowhere")

    await cluster.until("the hidden pod runs", hidden_runs, limit_s=LIMIT_S)
    async with anyio.create_task_group() as group:
        for i, name in enumerate(CROWD):
            group.start_soon(cluster.create_pod, share(name, FIRST_MIB + 10 * i))

    async def settled() -> bool:
        phases = [pod.status.phase for pod in await cluster.pods()]
        return phases.count("Running") + phases.count("Failed") == TOTAL

    await cluster.until("kubelet has judged all pods", settled, limit_s=LIMIT_S)
    cluster.node.remove_static_pod("filler")
    return tuple(pod.metadata.name for pod in await in_phase(cluster, "Running"))


def hidden(
    name: str, cpu_milli: int, *, namespace: str = "nowhere", **limits: str
) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": APP,
        "command": ["sh", "-c", "echo up; exec sleep 100000"],
        "resources": {"requests": {"cpu": f"{cpu_milli}m"}, "limits": limits},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]},
    }


async def test_pods_rejected_for_cpu_neither_lose_nor_double_a_share(
    cluster: NodeCluster,
    crowd: tuple[str, ...],
    record_property: Callable[[str, object], None],
) -> None:
    rejected = await in_phase(cluster, "Failed")
    assert len(rejected) == TOTAL - FITTING
    assert {pod.status.reason for pod in rejected} == {"OutOfcpu"}
    assert await has_its_own(cluster, crowd) == []
    assert await sound(cluster) == []
    records = await records_of(cluster)
    assert {records[pod.metadata.name].op for pod in rejected} == {"release"}

    async def grants_match() -> bool:
        return await cluster.metric(AGENT, "hami_nodeagent_grants") == FITTING

    await cluster.until("the agent holds no grant of a rejected pod", grants_match)
    for name in ("podresources_list", "allocate"):
        count, fast, mean_s = await quantiles(cluster, f"hami_nodeagent_{name}_seconds")
        record_property(name, f"{fast} of {count} within 100 ms, mean {1000 * mean_s:.1f} ms")
        assert count >= TOTAL
        if name == "podresources_list":
            assert fast > 0.5 * count  # the median; all of them on idle cores


async def test_dcgm_exporter_attributes_every_share_to_its_pod(
    cluster: NodeCluster, crowd: tuple[str, ...]
) -> None:
    """It resolves kubelet's own list, by the rules of tests/support/dcgm.py."""
    socket = cluster.node.pod_resources_socket
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        stub = podresources_grpc.PodResourcesListerStub(channel)
        answer = await stub.List(podresources.ListPodResourcesRequest(), timeout=60.0)
    found = attributions(answer, virtual_gpus=True)
    records = await records_of(cluster)
    for device, of_device in found.items():
        if "::" in device:
            continue
        assert len({one.vgpu for one in of_device}) == len(of_device)
        for one in of_device:
            assert records[one.pod].containers[0].shares[0].uuid == device
    held = {one.pod for of_device in found.values() for one in of_device}
    assert held == set(crowd)
    assert max(len(of_device) for of_device in found.values()) > 1, "no device is shared"


async def test_rejected_pods_are_replaced_once_there_is_room(
    cluster: NodeCluster, crowd: tuple[str, ...]
) -> None:
    names = []
    for pod in await in_phase(cluster, "Failed"):
        await cluster.delete_pod(pod.metadata.name)
        names.append(f"again-{pod.metadata.name}")
        await cluster.create_pod(share(names[-1], 3000 + len(names)))
    await all_run(cluster, names)
    assert await has_its_own(cluster, [*crowd, *names]) == []
    assert await sound(cluster) == []


async def test_container_may_open_its_own_device_and_no_other(
    cluster: NodeCluster, crowd: tuple[str, ...]
) -> None:
    """No driver answers behind the nodes, so allowed opens end in ENXIO, the rest in EPERM."""
    minors = cluster.minors()
    script = (
        f"for n in {' '.join(map(str, sorted(minors.values())))}; do "
        f"mknod /tmp/$n c {DEVICE_MAJOR} $n; (: < /tmp/$n) 2>&1; done; echo ---; sleep 100000"
    )
    await cluster.create_pod(share("opens", 1234, script=script))

    async def has_tried() -> bool:
        return "---" in await cluster.container_log("opens", "main")

    await cluster.until("the container has tried all", has_tried, limit_s=LIMIT_S)
    tried = (await cluster.container_log("opens", "main")).splitlines()
    allowed = {line.split("/tmp/")[1][0] for line in tried if "No such device" in line}
    refused = {line.split("/tmp/")[1][0] for line in tried if "not permitted" in line}
    [own] = (await records_of(cluster))["opens"].containers[0].shares
    assert allowed == {str(minors[own.uuid])}
    assert refused == {str(minor) for minor in minors.values()} - allowed


async def test_unprivileged_agent_opens_the_devices_that_are_named_and_no_other(
    cluster: NodeCluster, crowd: tuple[str, ...]
) -> None:
    """An agent of another vendor sees the host's /dev: a mount alone opens none."""
    minors = sorted(cluster.minors().values())
    named = minors[: len(minors) // 2]
    patterns = [f"/dev/nvidia{minor}" for minor in named]
    command = [sys.executable, "-m", "hami_nodeagent", "agent-devices"]
    for setting in (f"devices={json.dumps(patterns)}", "http_port=0", "poll_s=0.1"):
        command += ["--set", setting]
    plugin = Process(
        "agent-devices",
        cluster.node.space.look_command(command),
        log=cluster.directory / "logs" / "agent-devices.log",
    )
    plugin.start()
    try:

        async def offered() -> bool:
            node = await cluster.request("GET", f"/api/v1/nodes/{NODE}")
            count = node["status"]["allocatable"].get(agentdevices.RESOURCE)
            return bool(count == str(len(agentdevices.DEVICE_IDS)))

        await cluster.until("the node offers the agent's devices", offered, limit_s=LIMIT_S)
        nodes = " ".join(f"/dev/nvidia{minor}" for minor in minors)
        script = f"for n in {nodes}; do (: < $n) 2>&1; done; echo ---; sleep 100000"
        for name, limits_of in (
            ("agent-like", {agentdevices.RESOURCE: "1"}),
            ("with-mount-alone", {}),
        ):
            await cluster.create_pod(_with_dev(name, script, limits_of))
        opened = {}
        for name in ("agent-like", "with-mount-alone"):

            async def has_tried(name: str = name) -> bool:
                return "---" in await cluster.container_log(name, "main")

            await cluster.until(f"{name} has tried all", has_tried, limit_s=LIMIT_S)
            tried = (await cluster.container_log(name, "main")).splitlines()
            opened[name] = {
                int(re.findall(r"/dev/nvidia(\d+)", line)[0])
                for line in tried
                if "No such device" in line
            }
            refused = [line for line in tried if "not permitted" in line]
            assert len(refused) == len(minors) - len(opened[name])
        assert opened == {"agent-like": set(named), "with-mount-alone": set()}
    finally:
        for name in ("agent-like", "with-mount-alone"):
            await cluster.delete_pod(name)
        await plugin.stop()


def _with_dev(name: str, script: str, wanted: dict[str, str]) -> dict[str, Any]:
    """A pod like an agent's: root, unprivileged, with the host's /dev to read."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "main",
                    "image": APP,
                    "command": ["sh", "-c", script],
                    "resources": {"limits": {"cpu": "10m", "memory": "16Mi", **wanted}},
                    "securityContext": {
                        "runAsUser": 0,
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]},
                    },
                    "terminationMessagePath": "/tmp/termination-log",
                    "volumeMounts": [
                        {"name": "dev", "mountPath": "/dev", "readOnly": True},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                {"name": "dev", "hostPath": {"path": "/dev"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


async def test_changed_limits_reach_a_running_container(
    cluster: NodeCluster,
    crowd: tuple[str, ...],
    record_property: Callable[[str, object], None],
) -> None:
    await cluster.create_pod(share("follows", 2000, script=FOLLOW))
    key = annotations.limits("main")
    # Only the scheduler's account may write limits.
    login = await cluster.plane.login("scheduler", "limits-writer")
    took_s = []
    before_s = time.monotonic()
    for memory_mib in (2000, 1500, 1750):
        if memory_mib != 2000:
            text = (await cluster.pod("follows")).annotations()[key]
            changed = re.sub(r"memory_mib=\d+", f"memory_mib={memory_mib}", text)
            before_s = time.monotonic()
            patch = {"metadata": {"annotations": {key: changed}}}
            async with KubeClient(Access.from_kubeconfig(login)) as client:
                await client.patch("pods", "follows", patch, namespace="default")

        async def seen(wanted: str = f"memory_mib={memory_mib}\n") -> bool:
            return wanted in await cluster.container_log("follows", "main")

        await cluster.until(f"the container reads {memory_mib}", seen, limit_s=LIMIT_S)
        took_s.append(time.monotonic() - before_s)
    record_property("annotation_to_file_s", " ".join(f"{one:.2f}" for one in took_s[1:]))


async def test_killed_agent_disturbs_no_container(
    cluster: NodeCluster, crowd: tuple[str, ...]
) -> None:
    before = await runs(cluster)
    pids = pids_of(cluster, before)
    assert len(pids) >= 30
    await cluster.processes[AGENT].kill()
    await cluster.create_pod(share("meanwhile", 1111))
    await is_bound(cluster, "meanwhile")
    cluster.processes[AGENT].start()
    await all_run(cluster, ["meanwhile"])
    after = await runs(cluster)
    assert {name: after[name] for name in before} == before
    assert pids_of(cluster, before) == pids
    assert await has_its_own(cluster, ["meanwhile"]) == []
    assert await sound(cluster) == []


async def test_restarted_kubelet_kills_no_container_and_takes_what_was_bound_meanwhile(
    cluster: NodeCluster,
    crowd: tuple[str, ...],
    record_property: Callable[[str, object], None],
) -> None:
    before = await runs(cluster)
    pids = pids_of(cluster, before)
    # Kubelet would reject a pod that it finds before the plugin has registered again. On a slow
    # machine that may happen, so kubelet is kept from its pods until then.
    await cluster.taps[KUBELET_TAP].cut()
    await cluster.create_pod(share("between", 1112))
    await is_bound(cluster, "between")
    await cluster.node.restart_kubelet()
    up_s = time.monotonic()
    await cluster.registered()
    took_s = time.monotonic() - up_s
    record_property("kubelet_listens_to_plugin_registered_s", f"{took_s:.2f}")
    await cluster.taps[KUBELET_TAP].heal()
    await all_run(cluster, [*crowd, "between"])
    after = await runs(cluster)
    assert {name: after[name] for name in before} == before
    assert pids_of(cluster, before) == pids
    assert await has_its_own(cluster, ["between"]) == []
    assert await sound(cluster) == []


async def test_static_pod_without_a_mirror_keeps_no_share_away_and_gets_none(
    cluster: NodeCluster, crowd: tuple[str, ...]
) -> None:
    """The API server never shows these pods: one has no namespace, one's mirror is refused."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await cluster.create("/api/v1/namespaces", {"metadata": {"name": "strict", "labels": labels}})
    unseen = {"unseen": "nowhere", "refused": "strict"}

    async def unseen_run() -> bool:
        return all(
            "up" in cluster.node.log(f"{name}-{NODE}", "main", namespace=namespace)
            for name, namespace in unseen.items()
        )

    for name, namespace in unseen.items():
        cluster.node.add_static_pod(hidden(name, 1, namespace=namespace))
    await cluster.until("the hidden pods run", unseen_run, limit_s=LIMIT_S)
    assert (await cluster.request("GET", "/api/v1/namespaces/strict/pods"))["items"] == []

    # Kubelet admits a pod as soon as the plugin has registered, before any check of the agent.
    await cluster.taps[KUBELET_TAP].cut()
    await cluster.create_pod(share("beside", 1113, cpu_milli=1))
    await is_bound(cluster, "beside")
    await cluster.node.restart_kubelet()
    await cluster.registered()
    await cluster.taps[KUBELET_TAP].heal()
    await all_run(cluster, ["beside"])

    # A static pod that requests a device has no allocation; it must not get that of another pod.
    cluster.node.add_static_pod(hidden("forged", 1, **{"nvidia.com/gpu": "1"}))
    beside = [f"beside-{number}" for number in range(4)]
    for number, name in enumerate(beside):
        await cluster.create_pod(share(name, 1114 + number, cpu_milli=1))
    await all_run(cluster, beside)
    assert await has_its_own(cluster, ["beside", *beside]) == []
    assert cluster.node.log(f"forged-{NODE}", "main", namespace="nowhere") == ""
    for name in (*unseen, "forged"):
        cluster.node.remove_static_pod(name)
    assert await sound(cluster) == []


async def test_pod_that_reaches_kubelet_without_the_plugin_is_rejected(
    cluster: NodeCluster, crowd: tuple[str, ...]
) -> None:
    """Such a pod exists only by accident: it was bound in the moment in which the plugin died."""
    await cluster.kill_plugin()

    async def none_offered() -> bool:
        return not await cluster.nodes_offer_devices()

    await cluster.until("kubelet knows that the plugin is gone", none_offered, limit_s=60)
    orphan = share("orphan", 1000)
    orphan["spec"]["schedulerName"] = "nobody"
    await cluster.create_pod(orphan)
    target = {"kind": "Node", "name": NODE}
    await cluster.create(
        f"{PODS}/orphan/binding", {"metadata": {"name": "orphan"}, "target": target}
    )

    async def failed() -> bool:
        return await cluster.pod_is("orphan", "Failed")

    await cluster.until("kubelet rejects the pod", failed, limit_s=60)
    status = (await cluster.pod_document("orphan"))["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    assert status["message"] == (
        "Pod was rejected: Allocate failed due to no healthy devices present; "
        "cannot allocate unhealthy devices nvidia.com/gpu, which is unexpected"
    )
    assert "containerStatuses" not in status
    await cluster.delete_pod("orphan")
    await cluster.start_plugin()
    assert await sound(cluster) == []


async def test_pods_come_back_with_their_shares_after_a_reboot(
    cluster: NodeCluster, crowd: tuple[str, ...]
) -> None:
    """The API server is reached after the agent has registered: pods that come earlier are
    rejected.
    """
    names = [pod.metadata.name for pod in await in_phase(cluster, "Running")]
    before = await runs(cluster)
    told = {name: await told_by(cluster, name) for name in crowd}
    boot = await cluster.boot_id()
    await cluster.kill_plugin()
    await cluster.taps[KUBELET_TAP].cut()
    await cluster.node.reboot()
    await cluster.start_plugin()
    await cluster.taps[KUBELET_TAP].heal()

    async def came_back() -> bool:
        after = await runs(cluster)
        return all(after.get(name, before[name])[0] not in ("", before[name][0]) for name in names)

    await cluster.until("every container was started anew", came_back, limit_s=LIMIT_S)
    await all_run(cluster, names)
    assert await cluster.boot_id() != boot
    assert {name: await told_by(cluster, name) for name in crowd} == told
    assert await has_its_own(cluster, crowd) == []
    assert await cluster.metric(AGENT, "hami_nodeagent_starts_total") >= len(names)
    assert await sound(cluster) == []
