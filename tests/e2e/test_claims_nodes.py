# SPDX-License-Identifier: Apache-2.0
"""Enforcement of claims in containers of a real node: kubelet, containerd, runc and libvgpu.

The containers' programs use the fake CUDA driver, which gets into containers as NVIDIA's does.
Memory in MiB.
"""

import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from hami_common.dra.names import monitor_pool, pool_name
from hami_common.errors import Denied, Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.pods import annotations as keys
from hami_sim.cluster import ClusterSpec, NodeSpec
from hami_sim.hardware import profile as profiles
from tests.cluster.node.cluster import NodeCluster, run_node_cluster
from tests.cluster.node.driver import CONTROL_NODES, DRIVE_IMAGE
from tests.cluster.node.needs import programs_or_skip
from tests.cluster.node.node import base
from tests.contract.kubelet.dradriver import TestDriver
from tests.e2e.test_hamictl import hamictl
from tests.e2e.test_real_claims import GROUP, MONITOR, SYNC_S, slices_of
from tests.e2e.test_real_node import LIMIT_S, records_of
from tests.support.checker import lasting_problems, ledger_of
from tools import build_native, build_native_fakes

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(300),
]

NODE = "claims-node"
AGENT = f"agent-{NODE}"
KUBELET_ASKS_S = 1.5
"""Time from the Binding until kubelet waits for the agent's answer, and some more."""
PROFILE = "2xA30"
MEMORY_MIB = 24_165
"""As CUDA shows a whole device."""
RESTRICTED = "restricted"
"""Namespace with the strictest profile of Pod Security."""
SPACES = ("default", RESTRICTED)
ROOTS = ("pci0000:10", "pci0000:80")
"""PCIe roots of the two devices."""
OUT_OF_MEMORY = "error 2"
SHARE_MIB = 3000
COMMANDS = ("init", "count", "device 0", "info", "alloc 2500M", "alloc 600M", "nvml")
"""For the program ``drive``: the second allocation exceeds ``SHARE_MIB``."""
DRIVE = f"printf '%s\\n' {' '.join(repr(one) for one in COMMANDS)} | drive link"
WAIT = "trap 'exit 0' TERM; sleep 100000 & wait $!"
SECTIONS = {
    "env": "env | sort",
    "limits": "cat /etc/hami/limits 2>&1",
    "nodes": "ls /dev | grep nvidia",
    "mounts": "cut -d' ' -f5 /proc/self/mountinfo | sort | grep -e hami -e vgpu -e preload",
    "driver": f"{DRIVE} 2>&1",
}
TELL = "; ".join(f"echo ={name}=; {command}" for name, command in {**SECTIONS, "end": ":"}.items())
_FILLED = "printf 'init\\ndevice 0\\nfill 100M 100\\n' | drive link | grep 'ok [0-9]'"
FILL = f"while :; do {_FILLED}; sleep 0.3; done"
"""Prints again and again how many allocations of 100 MiB succeed, and the error of the next."""
Obj = dict[str, Any]


def hold(memory_mib: int) -> str:
    """Script of a container that allocates memory and keeps it."""
    commands = f"printf 'init\\ndevice 0\\nalloc {memory_mib}M\\n'; exec sleep 100000"
    return f"({commands}) | drive link"


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeCluster]:
    programs = programs_or_skip()
    directory = tmp_path_factory.mktemp("claims")
    write_sysfs(directory / "sys")
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile=PROFILE),),
        slots=16,
        injection="cdi",
        backoff_s=0.2,
        dra=True,
        nvml_library=str(
            build_native_fakes.build(build_native_fakes.DEFAULT_OUT) / build_native_fakes.NVML
        ),
        limiter=str(build_native.build("release")),
        settings={
            "scheduler": {"reconcile_s": "5"},
            "nodeagent": {
                "dra.monitor": "true",
                "drivers.nvidia.sysfs_root": str(directory / "sys"),
            },
        },
    )
    with tempfile.TemporaryDirectory(prefix="hn-", dir=base()) as disk:
        async with run_node_cluster(
            spec, programs, directory, Path(disk), sync_s=SYNC_S
        ) as cluster:
            await cluster.create(f"{GROUP}/deviceclasses", yaml.safe_load(MONITOR.read_text()))
            labels = {"pod-security.kubernetes.io/enforce": "restricted"}
            made = {"metadata": {"name": RESTRICTED, "labels": labels}}
            await cluster.create("/api/v1/namespaces", made)

            async def have_slices() -> bool:
                pools = [one["spec"]["pool"]["name"] for one in await slices_of(cluster)]
                return sorted(pools) == [pool_name(NODE), monitor_pool(NODE)]

            await cluster.until("slices are published", have_slices)
            yield cluster


def write_sysfs(root: Path) -> None:
    """Make the part of sysfs that gives the devices' PCIe roots, by their bus ids."""
    devices = root / "bus/pci/devices"
    devices.mkdir(parents=True)
    for pcie_root, device in zip(ROOTS, profiles.load(PROFILE).devices, strict=True):
        bus_id = device.bus_id.lower()[-12:]
        (root / "devices" / pcie_root / bus_id).mkdir(parents=True)
        (devices / bus_id).symlink_to(f"../../../devices/{pcie_root}/{bus_id}")


@pytest.fixture
async def cluster(running: NodeCluster) -> AsyncIterator[NodeCluster]:
    """Return the node; afterwards pods, claims, shares and CDI files of claims are all gone."""
    yield running
    await clear(running)


async def clear(cluster: NodeCluster) -> None:
    for space in SPACES:
        for kind in ("pods", "resourceclaims"):
            group = "/api/v1" if kind == "pods" else GROUP
            path = f"{group}/namespaces/{space}/{kind}"
            await cluster.request("DELETE", path)

    async def is_empty() -> bool:
        lists = [await cluster.request("GET", f"/api/v1/namespaces/{one}/pods") for one in SPACES]
        lists.append(await cluster.request("GET", f"{GROUP}/resourceclaims"))
        records = (await ledger_of(cluster)).values()
        return (
            not any(one["items"] for one in lists)
            and all(record.op == "release" for record in records)
            and files_of_claims(cluster) == []
        )

    await cluster.until("nothing is left", is_empty, limit_s=LIMIT_S)


async def live_records(cluster: NodeCluster) -> list[AllocationRecord]:
    return [one for one in (await ledger_of(cluster)).values() if one.op != "release"]


def files_of_claims(cluster: NodeCluster) -> list[str]:
    """List the CDI files of claims on the node."""
    return [one.name for one in cluster.node.containerd.cdi_directory.glob("hami-*")]


# ------------------------------------------------------------------------------------------- pods


def container(name: str = "main", script: str = f"{TELL}; {WAIT}", **more: Any) -> Obj:
    return {
        "name": name,
        "image": DRIVE_IMAGE,
        "command": ["sh", "-c", script],
        "resources": {"requests": {"cpu": "1m"}},
        **more,
    }


def pod(name: str, *containers: Obj, mode: str = "", **more: Any) -> Obj:
    return {
        "metadata": {
            "name": name,
            "annotations": {keys.ALLOCATION_MODE: mode} if mode else {},
        },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "containers": list(containers),
            **more,
        },
    }


def with_share(made: Obj, memory_mib: int = SHARE_MIB) -> Obj:
    """Add the resource limits of a share to a container."""
    limits = {
        "nvidia.com/gpu": "1",
        "nvidia.com/gpumem": str(memory_mib),
        "nvidia.com/gpucores": "30",
    }
    return {**made, "resources": {**made["resources"], "limits": limits}}


def with_claim(made: Obj, request: str = "main") -> Obj:
    """Let a container use a request of the pod's claim ``gpu``."""
    claims = [{"name": "gpu", "request": request}]
    return {**made, "resources": {**made["resources"], "claims": claims}}


def naming(claim: str) -> Obj:
    """The part of a pod's spec that makes a claim its claim ``gpu``."""
    return {"resourceClaims": [{"name": "gpu", "resourceClaimName": claim}]}


async def make_claim(
    cluster: NodeCluster, name: str, *requests: Obj, space: str = "default", **more: Any
) -> str:
    """Create a claim; returns its uid."""
    spec = {"devices": {"requests": list(requests), **more}}
    path = f"{GROUP}/namespaces/{space}/resourceclaims"
    made = await cluster.create(path, {"metadata": {"name": name}, "spec": spec})
    return str(made["metadata"]["uid"])


def asks(memory_mib: int = SHARE_MIB, name: str = "main") -> Obj:
    """A request of a claim for a share."""
    capacity = {"requests": {"memory": f"{memory_mib}Mi", "cores": "30"}}
    return {"name": name, "exactly": {"deviceClassName": "hami-share", "capacity": capacity}}


def asks_of(device_class: str, name: str = "main", **more: Any) -> Obj:
    return {"name": name, "exactly": {"deviceClassName": device_class, **more}}


async def runs(cluster: NodeCluster, *names: str, space: str = "default") -> None:
    for name in names:
        await cluster.until(
            f"{name} runs",
            partial(cluster.pod_is, name, "Running", namespace=space),
            limit_s=LIMIT_S,
        )


async def view_of(
    cluster: NodeCluster, name: str, part: str = "main", *, space: str = "default"
) -> dict[str, list[str]]:
    """Lines that ``TELL`` printed in a container, by section."""
    lines: list[str] = []

    async def is_complete() -> bool:
        lines[:] = (await cluster.container_log(name, part, namespace=space)).splitlines()
        return "=end=" in lines

    await cluster.until(f"{name} has told its view", is_complete, limit_s=LIMIT_S)
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("=") and line.endswith("="):
            found[line.strip("=")] = []
        else:
            found[list(found)[-1]].append(line)
    return found


def answers(view: dict[str, list[str]]) -> dict[str, str]:
    """Answers of the driver, by command."""
    return dict(zip(COMMANDS, view["driver"], strict=False))


def assert_is_limited(view: dict[str, list[str]], memory_mib: int = SHARE_MIB) -> None:
    """Check that a program sees one device with this much memory and gets no more."""
    found = answers(view)
    assert found["count"] == "ok 1"
    assert found["info"].split()[2] == str(memory_mib << 20)
    assert (found["alloc 2500M"], found["alloc 600M"]) == ("ok 0", OUT_OF_MEMORY)
    assert f"device.0.memory_mib={memory_mib}" in view["limits"]


# ------------------------------------------------------------------------- both modes on one node


async def test_both_modes_give_the_same_devices_limits_environment_and_refusals(
    cluster: NodeCluster,
) -> None:
    """One after the other, so that both are placed on the idle node."""
    views = {}
    for mode in ("device-plugin", "dra"):
        await cluster.create_pod(pod("same", with_share(container()), mode=mode))
        await runs(cluster, "same")
        view = await view_of(cluster, "same")
        assert_is_limited(view)
        (record,) = await live_records(cluster)
        assert bool(record.claim) == (mode == "dra")
        assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []
        view["limits"] = [line for line in view["limits"] if not line.startswith("allocation=")]
        views[mode] = {"device": [record.containers[0].shares[0].uuid], **view}
        await clear(cluster)
    assert views["dra"] == views["device-plugin"]
    assert len(views["dra"]["nodes"]) == 1 + len(CONTROL_NODES)


async def test_container_without_a_share_gets_nothing(cluster: NodeCluster) -> None:
    """Beside one with a share, in a pod of allocation mode dra and in one with a claim."""
    await make_claim(cluster, "claimed", asks())
    side = container("side")
    await cluster.create_pod(pod("asked", with_share(container()), side, mode="dra"))
    await cluster.create_pod(pod("claimed", with_claim(container()), side, **naming("claimed")))
    await runs(cluster, "asked", "claimed")
    for name in ("asked", "claimed"):
        assert_is_limited(await view_of(cluster, name))
        view = await view_of(cluster, name, "side")
        assert (view["nodes"], view["mounts"]) == ([], [])
        assert "No such file" in view["limits"][0]
        assert not [line for line in view["env"] if line.startswith(("CUDA_", "NVIDIA_"))]


async def test_limits_hold_without_privileges_and_against_variables_of_the_user(
    cluster: NodeCluster,
) -> None:
    """In a namespace of Pod Security's profile restricted, by pod and by a claim of its own."""
    security = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    bare = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    env = [
        {"name": name, "value": value}
        for name, value in (
            ("CUDA_DEVICE_MEMORY_LIMIT_0", "20000m"),
            ("CUDA_DEVICE_MEMORY_LIMIT", "20000m"),
            ("CUDA_DEVICE_SM_LIMIT", "100"),
            ("LD_PRELOAD", ""),
        )
    ]
    made = container(securityContext=bare, env=env)
    off = {"name": "CUDA_DISABLE_CONTROL", "value": "true"}
    refused = with_share(container(securityContext=bare, env=[off]))
    with pytest.raises(Denied, match="cannot switch its limits off"):
        await cluster.create_pod(pod("off", refused, mode="dra"), namespace=RESTRICTED)
    await make_claim(cluster, "claimed", asks(), space=RESTRICTED)
    pods = (
        pod("asked", with_share(made), mode="dra", securityContext=security),
        pod(
            "claimed",
            with_claim({**made, "env": [*env, off]}),
            securityContext=security,
            **naming("claimed"),
        ),
    )
    for one in pods:
        await cluster.create_pod(one, namespace=RESTRICTED)
    await runs(cluster, "asked", "claimed", space=RESTRICTED)
    for name in ("asked", "claimed"):
        view = await view_of(cluster, name, space=RESTRICTED)
        assert_is_limited(view)
        assert "CUDA_DEVICE_MEMORY_LIMIT_0=3000m" in view["env"], name


# ------------------------------------------------------------------------------- claims of users


async def last_line(cluster: NodeCluster, name: str, part: str = "main") -> str:
    return ["", *(await cluster.container_log(name, part)).splitlines()][-1]


async def holds(cluster: NodeCluster, name: str, part: str = "main") -> bool:
    """Return whether a container with the script of ``hold`` has its memory."""
    return await last_line(cluster, name, part) == "ok 0"


async def fills(cluster: NodeCluster, name: str, wanted: range) -> None:
    """Wait until a container with the script ``FILL`` gets this many times 100 MiB."""
    seen = ""

    async def gets() -> bool:
        nonlocal seen
        seen = await last_line(cluster, name)
        return seen.startswith("ok") and int(seen.split()[1]) in wanted

    try:
        await cluster.until(f"{name} gets {wanted}", gets)
    except Unavailable as error:
        raise AssertionError(f"{name} gets {seen!r}, wanted {wanted}") from error


async def test_containers_and_pods_that_share_a_claim_have_its_memory_together(
    cluster: NodeCluster,
) -> None:
    """Two containers of one pod hold half of it, another pod gets the rest, and later all."""
    uid = await make_claim(cluster, "shared", asks(3000))
    users = [with_claim(container("main", hold(1000))), with_claim(container("side", hold(500)))]
    await cluster.create_pod(pod("holds", *users, **naming("shared")))
    await runs(cluster, "holds")
    for part in ("main", "side"):
        await cluster.until(f"{part} has its memory", partial(holds, cluster, "holds", part))
    await cluster.create_pod(pod("fills", with_claim(container(script=FILL)), **naming("shared")))
    await runs(cluster, "fills")
    await fills(cluster, "fills", range(11, 16))
    assert files_of_claims(cluster) == [f"hami-{uid}.json"]
    assert [one.pod_uid for one in await live_records(cluster)] == [uid]
    await cluster.delete_pod("holds")
    await fills(cluster, "fills", range(26, 31))


async def test_claim_without_a_share_monitors_devices_that_are_full(cluster: NodeCluster) -> None:
    for number in range(len(ROOTS)):
        await make_claim(cluster, f"whole-{number}", asks_of("hami-whole"))
        made = with_claim(container(script=WAIT))
        await cluster.create_pod(pod(f"whole-{number}", made, **naming(f"whole-{number}")))
    await runs(cluster, *(f"whole-{number}" for number in range(len(ROOTS))))
    await cluster.request(
        "PATCH",
        "/api/v1/namespaces/default",
        {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}},
        content_type="application/merge-patch+json",
    )
    await make_claim(cluster, "watch", asks_of("hami-monitor", adminAccess=True))
    await cluster.create_pod(pod("watch", with_claim(container()), **naming("watch")))
    await runs(cluster, "watch")
    view = await view_of(cluster, "watch")
    found = answers(view)
    assert found["count"] == f"ok {len(ROOTS)}"
    assert int(found["info"].split()[2]) >> 20 == MEMORY_MIB
    assert "No such file" in view["limits"][0]
    assert "watch" not in await records_of(cluster)


async def test_share_is_on_the_pcie_root_of_a_nic_of_another_driver(cluster: NodeCluster) -> None:
    """The constraint excludes the first device, which fits as well."""
    nic = TestDriver(cluster.node.space.kubelet_directory, cluster.node.containerd.cdi_directory)
    nic.requests["aligned"] = ("nic",)
    await nic.serve()

    async def is_registered() -> bool:
        return bool(nic.statuses)

    await cluster.until("kubelet knows the other driver", is_registered)
    slices = f"{GROUP}/resourceslices"
    try:
        await cluster.create(slices, slice_of_nic(nic.name))
        await cluster.create(
            f"{GROUP}/deviceclasses",
            {
                "metadata": {"name": nic.name},
                "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{nic.name}'"}}]},
            },
        )
        aligned = {
            "requests": ["main", "nic"],
            "matchAttribute": "resource.kubernetes.io/pcieRoot",
        }
        requests = (asks(), asks_of(nic.name, "nic"))
        await make_claim(cluster, "aligned", *requests, constraints=[aligned])
        made = with_claim(container())
        made["resources"]["claims"].append({"name": "gpu", "request": "nic"})
        await cluster.create_pod(pod("aligned", made, **naming("aligned")))
        await runs(cluster, "aligned")
        view = await view_of(cluster, "aligned")
        assert_is_limited(view)
        assert "GIVEN_NIC=aligned" in view["env"]
        (share,) = (await records_of(cluster))["aligned"].containers[0].shares
        assert share.uuid == cluster.nvml[NODE].uuids[1]
        await clear(cluster)
    finally:
        await nic.close()
        await cluster.request("DELETE", f"{slices}/{nic.name}")


def slice_of_nic(driver: str) -> Obj:
    """A NIC below the PCIe root of the second device."""
    return {
        "metadata": {"name": driver},
        "spec": {
            "driver": driver,
            "nodeName": NODE,
            "pool": {"name": driver, "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": "nic",
                    "attributes": {"resource.kubernetes.io/pcieRoot": {"string": ROOTS[1]}},
                }
            ],
        },
    }


# ------------------------------------------------------------------------------------------ faults


async def use(cluster: NodeCluster, name: str) -> None:
    """Create a pod that prints its view of the claim of the same name."""
    await cluster.create_pod(pod(name, with_claim(container()), **naming(name)))


def spec_file(cluster: NodeCluster, uid: str) -> Path:
    """The CDI file of a claim on the node."""
    return cluster.node.containerd.cdi_directory / f"hami-{uid}.json"


def agent_file(cluster: NodeCluster, *parts: str) -> Path:
    """A file in the agent's state directory."""
    return cluster.directory.joinpath("agents", NODE, *parts)


async def exists(path: Path) -> bool:
    return path.exists()


async def is_sound(cluster: NodeCluster, name: str, uid: str) -> None:
    """Check that the pod runs with its one share, and that the node has one whole CDI file."""
    await runs(cluster, name)
    assert_is_limited(await view_of(cluster, name))
    assert [one.pod_uid for one in await live_records(cluster)] == [uid]
    assert files_of_claims(cluster) == [f"hami-{uid}.json"]
    json.loads(spec_file(cluster, uid).read_text())


@pytest.mark.parametrize("step", ["asked", "prepared"])
async def test_kubelet_dies_while_a_claim_is_prepared(cluster: NodeCluster, step: str) -> None:
    """With its question on the way to the agent, and with the answer just given."""
    name = f"kubelet-{step}"
    uid = await make_claim(cluster, name, asks())
    agent = cluster.processes[AGENT]
    if step == "asked":
        agent.freeze()
    try:
        await use(cluster, name)
        if step == "asked":

            async def is_bound() -> bool:
                return bool((await cluster.pod(name)).spec.node_name)

            await cluster.until("the pod is bound", is_bound)
            await anyio.sleep(KUBELET_ASKS_S)
        else:
            await cluster.until("it is prepared", partial(exists, spec_file(cluster, uid)))
        await cluster.node.kill_kubelet()
    finally:
        if step == "asked":
            agent.thaw()
    await cluster.node.start_kubelet()
    await is_sound(cluster, name, uid)


@pytest.mark.parametrize("step", ["half-written", "written"])
async def test_agent_dies_around_the_write_of_the_cdi_file(cluster: NodeCluster, step: str) -> None:
    """A pipe stops the agent at the write: of the CDI file, or of its book after that."""
    name = f"agent-{step}"
    uid = await make_claim(cluster, name, asks())
    spec = spec_file(cluster, uid)
    if step == "half-written":
        pipe, before = (
            spec.with_suffix(".new"),
            agent_file(cluster, "limits", uid, "main", "limits"),
        )
    else:
        pipe, before = agent_file(cluster, "claims", f"{uid}.new"), spec
    os.mkfifo(pipe)
    await use(cluster, name)
    await cluster.until(f"the agent is at {pipe.name}", partial(exists, before))
    assert spec.exists() == (step == "written")
    await cluster.processes[AGENT].kill()
    written = spec.read_bytes() if spec.exists() else b""
    pipe.unlink()
    if step == "half-written":
        pipe.write_text('{"cdiVersion": "0.')
    cluster.processes[AGENT].start()
    await is_sound(cluster, name, uid)
    assert written in (b"", spec.read_bytes())


async def test_cdi_file_that_an_agent_left_unfinished_goes_with_its_pod(
    cluster: NodeCluster,
) -> None:
    """The pod is deleted before the agent restarts, so nothing prepares the claim again."""
    uid = await make_claim(cluster, "left", asks())
    fresh = spec_file(cluster, uid).with_suffix(".new")
    os.mkfifo(fresh)
    await use(cluster, "left")
    before = agent_file(cluster, "limits", uid, "main", "limits")
    await cluster.until("the agent is at the write", partial(exists, before))
    await cluster.processes[AGENT].kill()
    fresh.unlink()
    fresh.write_text('{"cdiVersion": "0.')
    await cluster.delete_pod("left")
    cluster.processes[AGENT].start()


# --------------------------------------------------------------------------------------- uninstall


async def test_uninstall_waits_for_pods_with_claims_and_leaves_nothing(
    running: NodeCluster,
) -> None:
    """The last test: one pod runs by a claim of its own, one by mode dra has finished."""
    cluster = running
    await make_claim(cluster, "stays", asks())
    await cluster.create_pod(pod("stays", with_claim(container()), **naming("stays")))
    ended = with_share(container(script="true"))
    await cluster.create_pod(pod("ended", ended, mode="dra", restartPolicy="Never"))
    await runs(cluster, "stays")
    await cluster.until("the other pod ends", partial(cluster.pod_is, "ended", "Succeeded"))

    async def stays_alone() -> bool:
        done = await hamictl(cluster, "uninstall", "--dry-run", "-o", "json")
        return [one["pod"] for one in json.loads(done.stdout)["pods"]] == ["stays"]

    await cluster.until("Kubernetes frees the claim of the pod that ended", stays_alone)
    refused = await hamictl(cluster, "uninstall", "--keep-pods", "--wait", "0")
    assert refused.returncode == 1
    assert b"kubelet cannot end them without the agent" in refused.stdout
    assert len(await slices_of(cluster)) > 0
    assert_is_limited(await view_of(cluster, "stays"))
    await cluster.delete_pod("stays")
    await cluster.until("it is gone", partial(cluster.pod_is_gone, "stays"), limit_s=LIMIT_S)

    settings = agent_settings(cluster)
    # Its Deployments and DaemonSets do not exist here.
    for name in (*cluster.schedulers, *cluster.agents, *cluster.plugin_proxies):
        await cluster.processes[name].stop()
    command = [sys.executable, "-m", "hami_nodeagent", "remove", "--host", "/"]
    await anyio.run_process(cluster.node.space.look_command([*command, *settings]))
    done = await hamictl(cluster, "uninstall", "--wait", "0", "-o", "json")
    (node,) = json.loads(done.stdout)["nodes"]
    # Kubelet may report resources of the device plugin for five minutes more.
    assert set(node.get("resources_left", ())) <= {"nvidia.com/gpu", "hami.io/accelerators"}
    assert node.get("problem", "") == ""
    assert await slices_of(cluster) == []
    left = (await cluster.request("GET", f"{GROUP}/resourceclaims"))["items"]
    assert [one["metadata"].get("finalizers") for one in left] == [None] * len(left)
    assert files_of_claims(cluster) == []
    assert not agent_file(cluster).exists()
    notes = (await cluster.request("GET", f"/api/v1/nodes/{NODE}"))["metadata"]["annotations"]
    assert not [key for key in notes if key.startswith("hami.io/")]


def agent_settings(cluster: NodeCluster) -> list[str]:
    """Arguments with the settings of the agent's process."""
    text = Path(f"/proc/{cluster.processes[AGENT].pid}/cmdline").read_text()
    words = text.rstrip("\0").split("\0")
    return words[words.index("--set") :]
