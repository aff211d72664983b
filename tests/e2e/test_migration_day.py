# SPDX-License-Identifier: Apache-2.0
"""A platform engineer's migration from HAMi 2.10, command by command as docs/migration.md has it.

On the real control plane, with the shipped manifests, kubectl and hamictl: HAMi's configuration is
imported, the control plane replaced, three nodes migrate while HAMi's pods run, pods of four
vendors are placed around them, and one node is rolled back. ``tests.support.hami_site`` names the
simulated parts: kubelets, devices, and HAMi's own programs. Memory in MiB.
"""

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import yaml
from click.testing import CliRunner

from hami_common.compat import hamiformat
from hami_common.errors import Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.model.placement import booked_by_device
from hami_sim.cluster import ClusterSpec, NodeSpec
from hami_sim.demo_mixed import PRETENDED
from hami_sim.hardware import profile as hardware
from hami_sim.kubernetes.programs import SCHEDULER
from hamictl.cli import main
from tests.cluster.needs import control_plane_or_skip
from tests.support import hami_reader
from tests.support.checker import inventory_of, ledger_of, over_capacity
from tests.support.hami_site import ILUVATAR, NVIDIA, HamiSite
from tests.support.hosts import make_host
from tests.support.installed import OVERLAY, OVERLAYS, REGISTRY, Installed, run_installed
from tests.support.kubelet import grpc_poller
from tests.support.kustomize import overlay
from tests.support.rbac import COLLECTIONS, GROUP

__all__ = ["grpc_poller"]

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(400),
]

Obj = dict[str, Any]
ROOT = Path(__file__).parents[2]
KUSTOMIZE = OVERLAYS.parent
RUN_S = 90.0
OPERATOR, SYSTEM = "operator", "hami-system"
NODES = (
    NodeSpec(name="gpu-a", profile="2xA30"),
    NodeSpec(name="gpu-b", profile="2xA30"),
    NodeSpec(name="ilu-a", profile="4xMR-V100"),
    NodeSpec(name="xpu-a", profile="8xP800"),
    NodeSpec(name="mx-a", profile="8xMXC500"),
)
NEW = {"xpu-a": "kunlunxin", "mx-a": "metax"}
"""Nodes that HAMi never had."""
SLOTS = {"gpu-b": 8}
VALUES: Obj = {
    "schedulerName": "hami-scheduler",
    "scheduler": {
        "defaultSchedulerPolicy": {
            "nodeSchedulerPolicy": "binpack",
            "gpuSchedulerPolicy": "spread",
        },
        "kubeScheduler": {"image": {"tag": "v1.31.0"}},
    },
    "devicePlugin": {
        "deviceSplitCount": NVIDIA.slots,
        "deviceMemoryScaling": 1,
        "passDeviceSpecsEnabled": True,
        "nvidiaNodeSelector": {"gpu": "on"},
    },
    "devices": {"iluvatar": {"enabled": True}},
}
DEVICE_CONFIG: Obj = {
    "nvidia": {
        "resourceCountName": "nvidia.com/gpu",
        "resourceMemoryName": "nvidia.com/gpumem",
        "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
        "resourceCoreName": "nvidia.com/gpucores",
        "resourcePriorityName": "nvidia.com/priority",
        "defaultMemory": 0,
        "defaultCores": 0,
        "defaultGPUNum": 1,
        "deviceSplitCount": NVIDIA.slots,
        "deviceMemoryScaling": 1,
        "deviceCoreScaling": 1,
    },
    "iluvatars": [
        {
            "chipName": "MR-V100",
            "commonWord": "MR-V100",
            "resourceCountName": "iluvatar.ai/MR-V100-vgpu",
            "resourceMemoryName": "iluvatar.ai/MR-V100.vMem",
            "resourceCoreName": "iluvatar.ai/MR-V100.vCore",
        }
    ],
}
NODE_CONFIG: Obj = {
    "nodeconfig": [{"name": name, "devicesplitcount": count} for name, count in SLOTS.items()]
}
WHOLE = "whole-device.yaml"
"""An A30 of its own, of which there is one."""
FITTING = (
    "memory-percentage.yaml",
    "cores.yaml",
    "multi-container.yaml",
    "init-container.yaml",
    "iluvatar/shares.yaml",
    "iluvatar/whole.yaml",
    "kunlunxin/shares.yaml",
    "kunlunxin/half.yaml",
    "metax/shares.yaml",
)
REFUSED = "whole-node.yaml"
"""Two free A30 on one node, where HAMi's pods have a share of three of the four."""


def uuid(node: str, index: int) -> str:
    profile = next(one.profile for one in NODES if one.name == node)
    return hardware.load(profile).uuid_of(node, index)


def asking(name: str, **limits: str) -> Obj:
    """A container with limits."""
    return {"name": name, "resources": {"limits": limits}}


def nvidia(name: str, count: int, memory_mib: int, core_pct: int) -> Obj:
    amounts = {"gpu": count, "gpumem": memory_mib, "gpucores": core_pct}
    return asking(name, **{f"nvidia.com/{key}": str(value) for key, value in amounts.items()})


THEIRS: dict[str, tuple[str, Sequence[Obj], str]] = {
    # name: (node, containers, HAMi's annotation, without containers that ask for nothing)
    "notebook": (
        "gpu-a",
        [nvidia("main", 1, 6000, 30)],
        f"{uuid('gpu-a', 0)},NVIDIA,6000,30:;",
    ),
    "train": (
        "gpu-a",
        [nvidia("main", 2, 4000, 20)],
        f"{uuid('gpu-a', 0)},NVIDIA,4000,20:{uuid('gpu-a', 1)},NVIDIA,4000,20:;",
    ),
    "serve": (
        "gpu-b",
        [{"name": "proxy"}, nvidia("main", 1, 10_000, 40)],
        f"{uuid('gpu-b', 1)},NVIDIA,10000,40:;",
    ),
    "infer": (
        "ilu-a",
        [
            asking(
                "main",
                **{
                    "iluvatar.ai/MR-V100-vgpu": "1",
                    "iluvatar.ai/MR-V100.vMem": "32",
                    "iluvatar.ai/MR-V100.vCore": "30",
                },
            )
        ],
        f"{uuid('ilu-a', 2)},MR-V100,8192,30:;",
    ),
}


def spec(host: Path) -> ClusterSpec:
    # The manner of injection is the imported one, which an installation here replaces by default.
    agent = {"discovery_s": "1", "host_root": str(host), "injection": "devices"}
    return ClusterSpec(
        nodes=NODES,
        node_cpu="100",
        plane="real",
        pretended_paths=PRETENDED,
        settings={"nodeagent": agent},
    )


async def hamictl(*words: str) -> str:
    """Run a command that needs no name of the cluster, in this process; returns its output."""
    done = await anyio.to_thread.run_sync(partial(CliRunner().invoke, main, words))
    assert done.exit_code == 0, done.output
    return done.stdout


async def import_config(directory: Path) -> Path:
    """Import HAMi's configuration; returns the overlay of the migration."""
    directory.mkdir()
    words = []
    for option, name, document in (
        ("--values", "values.yaml", VALUES),
        ("--device-config", "device-config.yaml", DEVICE_CONFIG),
        ("--node-config", "config.json", NODE_CONFIG),
    ):
        (directory / name).write_text(yaml.safe_dump(document))
        words += [option, str(directory / name)]
    imported = directory / "from-hami"
    base = KUSTOMIZE / "base" / "config"
    told = await hamictl("import-config", *words, "--base", str(base), "--out", str(imported))
    assert "warning" not in told
    agent = tomllib.loads((imported / "config" / "nodeagent.toml").read_text())
    assert agent["injection"] == "devices"
    components = [
        KUSTOMIZE / "components" / name
        for name in ("iluvatar", *NEW.values(), "hami-take-over", "hami-mirrors")
    ]
    release = control_plane_or_skip().version(SCHEDULER)
    tags = {"kube-scheduler": release}
    return overlay(directory / "mine", OVERLAY, [*components, imported], tags=tags)


def booked(records: Iterable[AllocationRecord]) -> dict[tuple[str, str], hami_reader.Used]:
    """Amounts of the ledger as HAMi counts its own: by node and device."""
    total: dict[tuple[str, str], hami_reader.Used] = defaultdict(hami_reader.Used)
    for record in records:
        for device, held in booked_by_device(record.containers).items():
            old = total[record.node, device]
            more = (held.memory_mib, held.core_pct, held.slots)
            total[record.node, device] = hami_reader.Used(
                *(a + b for a, b in zip(old, more, strict=True))
            )
    return dict(total)


class Day:
    """The cluster during the migration."""

    def __init__(self, site: Installed, hami: HamiSite) -> None:
        self.site = site
        self.hami = hami
        self.kubeconfig = ("--kubeconfig", str(site.kubeconfig))
        self.began: dict[str, Obj] = {}
        """HAMi's pods before the migration, by name."""

    async def states(self, word: str) -> dict[str, Obj]:
        told = await hamictl("migrate", word, *self.kubeconfig, "-o", "json")
        return {one["node"]: one for one in json.loads(told)["items"]}

    async def theirs(self) -> dict[str, Obj]:
        return {name: await self.site.pod_document(name) for name in THEIRS}

    async def check_theirs(self) -> None:
        """HAMi's pods run as before and hold exactly what HAMi gave them."""
        pods = await self.theirs()
        for name, pod in pods.items():
            (before, now) = (one["status"]["containerStatuses"] for one in (self.began[name], pod))
            assert pod["status"]["phase"] == "Running"
            assert [one["containerID"] for one in now] == [one["containerID"] for one in before]
            assert [one["restartCount"] for one in now] == [0] * len(now)
        records = await self.records()
        given = [records[name] for name in THEIRS]
        assert {(one.origin, one.reason) for one in given} == {("hami", "")}
        assert booked(given) == hami_reader.used(pods.values())

    async def until_runs(self, *names: str) -> None:
        for name in names:
            try:
                is_running = partial(self.site.pod_is, name, "Running")
                await self.site.until(f"{name} runs", is_running, limit_s=RUN_S)
            except Unavailable:
                story = await self.site.story_of(name)
                raise AssertionError(f"{name}: {story['phase']}: {story['reason']}") from None

    async def records(self) -> dict[str, AllocationRecord]:
        """Live records of the ledger, by pod."""
        stored = (await ledger_of(self.site)).values()
        return {one.pod: one for one in stored if one.op != "release"}

    async def until_booked(self) -> None:
        async def are_booked() -> bool:
            return (await self.records()).keys() == THEIRS.keys()

        await self.site.until("HAMi's pods are booked", are_booked, limit_s=RUN_S)


async def add_volume(site: Installed) -> None:
    """Give the cluster a default StorageClass with a volume for the bus."""
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    await site.client.call(
        "POST",
        "/apis/storage.k8s.io/v1/storageclasses",
        body={
            "metadata": {"name": "disks", "annotations": default},
            "provisioner": "kubernetes.io/no-provisioner",
        },
    )
    await site.client.call(
        "POST",
        "/api/v1/persistentvolumes",
        body={
            "metadata": {"name": "disk-0"},
            "spec": {
                "storageClassName": "disks",
                "capacity": {"storage": "12Gi"},
                "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": "/srv/disk-0"},
            },
        },
    )


async def plan(day: Day) -> None:
    found = await day.states("plan")
    assert {one["side"] for one in found.values()} == {"hami"}
    assert {node: (one["vendors"], one["former_pods"]) for node, one in found.items()} == {
        "gpu-a": (["nvidia"], 2),
        "gpu-b": (["nvidia"], 1),
        "ilu-a": (["iluvatar"], 1),
    }
    assert not any(one.get("problems") for one in found.values())


async def migrate(day: Day) -> None:
    await hamictl("migrate", "node", "gpu-a", *day.kubeconfig)
    await hamictl("migrate", "node", "gpu-b", *day.kubeconfig)
    own = [
        *("--node-label", "=".join(ILUVATAR.label)),
        *("--plugin-label", "=".join(ILUVATAR.plugin)),
    ]
    await hamictl("migrate", "node", "ilu-a", *own, *day.kubeconfig)
    for node, vendor in NEW.items():
        await day.site.kubectl("label", "node", node, f"hami.io/{vendor}=true")
    await day.until_booked()
    await day.check_theirs()
    await day.site.until("nodes offer devices", day.site.nodes_offer_devices, limit_s=RUN_S)
    slots = {
        one.node: {device.slots for device in one.devices} for one in await inventory_of(day.site)
    }
    assert slots["gpu-a"] == {NVIDIA.slots}
    assert slots["gpu-b"] == {SLOTS["gpu-b"]}


async def apply(day: Day, *files: str) -> list[str]:
    """Create the pods of these examples with kubectl; returns their names."""
    paths = [ROOT / "examples" / file for file in files]
    await day.site.kubectl("apply", *(f"--filename={path}" for path in paths))
    documents = [one for path in paths for one in yaml.safe_load_all(path.read_text()) if one]
    return [one["metadata"]["name"] for one in documents]


async def use(day: Day) -> None:
    """Create pods of four vendors: those that fit run, and the last one is refused in words."""
    site = day.site
    names = await apply(day, WHOLE)
    await day.until_runs(*names)
    whole = await site.story_of(*names)
    (device,) = whole["containers"][0]["devices"]
    assert device["uuid"] == uuid("gpu-b", 0), "the only A30 without a pod of HAMi"
    names += await apply(day, *FITTING)
    await day.until_runs(*names)
    (refused,) = await apply(day, REFUSED)
    reason = ""

    async def is_refused() -> bool:
        nonlocal reason
        reason = (await site.story_of(refused))["reason"]
        return "NodeUnregistered" in reason

    await site.until(f"{refused} is refused", is_refused, limit_s=RUN_S)
    assert await site.pod_is(refused, "Pending")
    assert "2 CardInsufficientMemory: 24576 MiB (100%) wanted" in reason
    assert "3 NodeUnregistered" in reason
    await day.check_theirs()
    live = [one.containers for one in (await day.records()).values()]
    assert len(live) == len(THEIRS) + len(names)
    assert over_capacity(live, await inventory_of(site)) == []


async def diagnose(day: Day) -> None:
    """Check that doctor finds no fault, and that HAMi has no node."""
    site = day.site
    await site.client.create("serviceaccounts", {"metadata": {"name": OPERATOR}}, SYSTEM)
    binding = {
        "metadata": {"name": OPERATOR},
        "roleRef": {
            "apiGroup": GROUP,
            "kind": "ClusterRole",
            "name": "hami-platform-admin",
        },
        "subjects": [{"kind": "ServiceAccount", "name": OPERATOR, "namespace": SYSTEM}],
    }
    await site.client.create(COLLECTIONS["ClusterRoleBinding"], binding)
    told = await site.hamictl(
        *("doctor", *day.kubeconfig, "-o", "json"),
        *("--scheduler", site.url("scheduler")),
        *("--registry", f"https://{REGISTRY}:{site.ports['registry-tls']}"),
        env={
            "HAMICTL_CA_FILE": str(site.ca_file),
            "HAMICTL_TOKEN": await site.token(OPERATOR),
        },
        check=False,
    )
    found = json.loads(told.stdout)
    assert [one for one in found["findings"] if one["verdict"] != "PASS"] == []
    states = await day.states("status")
    assert {one["side"] for one in states.values()} == {"ours"}
    assert sum(one["taken_over"] for one in states.values()) == len(THEIRS)


async def roll_back(day: Day) -> None:
    """Return gpu-b to HAMi, whose plugin serves it again and which counts every pod on it."""
    query = {"fieldSelector": "spec.nodeName=gpu-b"}
    path = "/api/v1/namespaces/default/pods"

    async def are_mirrored() -> bool:
        pods = (await day.site.client.call("GET", path, query=query))["items"]
        return all(hamiformat.NODE in pod["metadata"].get("annotations", {}) for pod in pods)

    await day.site.until("pods have HAMi's annotations", are_mirrored)
    await hamictl("migrate", "rollback", "gpu-b", *day.kubeconfig)
    assert (await day.states("status"))["gpu-b"]["side"] == "hami"
    pods = (await day.site.client.call("GET", path, query=query))["items"]
    assert {pod["status"]["phase"] for pod in pods} == {"Running"}
    names = {pod["metadata"]["name"] for pod in pods}
    assert names >= {"serve", "whole-device"}
    records = [one for name, one in (await day.records()).items() if name in names]
    assert hami_reader.used(pods) == booked(records)
    await day.hami.until_serves(day.site, "gpu-b")


async def test_cluster_of_hami_migrates_in_a_day(
    tmp_path_factory: pytest.TempPathFactory, record_property: Any
) -> None:
    control_plane_or_skip()
    tmp_path = tmp_path_factory.mktemp("day")  # sockets have short names
    make_host(tmp_path / "host")
    begun = anyio.current_time()
    chosen = await import_config(tmp_path / "hami")
    kinds = {"gpu-a": NVIDIA, "gpu-b": NVIDIA, "ilu-a": ILUVATAR}
    hami = HamiSite(kinds, SLOTS)
    async with anyio.create_task_group() as group:

        async def before(site: Installed) -> None:
            await add_volume(site)
            await hami.build(site)
            await group.start(hami.follow, site)
            for name, (node, containers, text) in THEIRS.items():
                await hami.place(site, name, node, containers, text)

        at = tmp_path / "at"
        async with run_installed(at, spec(tmp_path / "host"), overlay=chosen, before=before) as one:
            day = Day(one, hami)
            try:
                day.began = await day.theirs()
                for step in (plan, migrate, use, diagnose, roll_back):
                    await step(day)
                    record_property(f"{step.__name__}_s", round(anyio.current_time() - begun, 1))
            finally:
                group.cancel_scope.cancel()
