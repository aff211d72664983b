# SPDX-License-Identifier: Apache-2.0
"""Manifests of AI operators on a real API server: admitted, placed, limited.

The operators' resources are stored without a schema, and ``tests/support/operators.py`` creates
what each operator would create from them. Manifests of the guides are read from their pages. One
cluster with simulated nodes serves all cases. Memory in MiB.
"""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from msgspec import Struct

from hami_common.errors import Denied, NotFound
from hami_common.pods import limits
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.cluster.needs import control_plane_or_skip
from tests.support import operators
from tests.support.checker import lasting_problems, ledger_of
from tests.support.operators import HAMI, KINDS, Obj, Operator, runnable

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]

SPEC = ClusterSpec(
    nodes=(
        NodeSpec(name="gpu-a", profile="8xA100-40"),
        NodeSpec(name="gpu-b", profile="8xA100-40"),
    ),
    slots=8,
    node_cpu="200",
    plane="real",
    backoff_s=0.2,
)
GUIDES = Path(__file__).parents[2] / "docs/guides"
NAMESPACE = "default"
LIMIT_S = 120.0
PATHS = {
    "Pod": "/api/v1",
    "Deployment": "/apis/apps/v1",
    "StatefulSet": "/apis/apps/v1",
    "Job": "/apis/batch/v1",
}


class Case(Struct, frozen=True, kw_only=True):
    """One operator's object, and the shares of its pods."""

    name: str
    create: Operator
    document: Obj
    shares: dict[str, list[tuple[int, int]]]
    """Container with a share → (devices, MiB on each) of each pod that has it."""
    pods: int


def guide(page: str) -> Obj:
    """Return the manifest of a guide."""
    text = (GUIDES / page).read_text()
    document: Obj = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    return document


def wants(count: int, memory_mib: int, **more: str) -> Obj:
    return {"limits": {"nvidia.com/gpu": count, "nvidia.com/gpumem": memory_mib, **more}}


def template(name: str, resources: Obj) -> Obj:
    return {"spec": {"containers": [{"name": name, "image": "app", "resources": resources}]}}


def set_of_jobs() -> Obj:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "driver"},
        "spec": {
            "replicatedJobs": [
                {
                    "name": "leader",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "parallelism": 1,
                            "completions": 1,
                            "template": template("leader", {}),
                        }
                    },
                },
                {
                    "name": "workers",
                    "replicas": 2,
                    "template": {
                        "spec": {
                            "parallelism": 1,
                            "completions": 1,
                            "template": template("worker", wants(1, 5000)),
                        }
                    },
                },
            ]
        },
    }


def leader_worker_set() -> Obj:
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "lws"},
        "spec": {
            "replicas": 2,
            "leaderWorkerTemplate": {
                "size": 2,
                "leaderTemplate": template("leader", wants(1, 6000)),
                "workerTemplate": template("worker", wants(2, 7000)),
            },
        },
    }


def volcano_job() -> Obj:
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": "vcjob"},
        "spec": {
            "minAvailable": 3,
            "schedulerName": HAMI,
            "tasks": [
                {"name": "ps", "replicas": 1, "template": template("ps", wants(1, 3000))},
                {
                    "name": "worker",
                    "replicas": 2,
                    "template": template("worker", wants(1, 4000, **{"nvidia.com/gpucores": "30"})),
                },
            ],
        },
    }


CASES = (
    Case(
        name="ray",
        create=operators.ray,
        document=guide("ray.md"),
        shares={"ray-worker": [(1, 8000)] * 2},
        pods=3,
    ),
    Case(
        name="kserve",
        create=operators.kserve,
        document=guide("kserve.md"),
        shares={"kserve-container": [(2, 8000)]},
        pods=1,
    ),
    Case(
        name="vllm",
        create=operators.unchanged,
        document=guide("vllm.md"),
        shares={"vllm": [(1, 10_000)] * 2},
        pods=2,
    ),
    Case(
        name="trainer",
        create=operators.trainer,
        document=guide("trainer.md"),
        shares={"node": [(1, 12_000)] * 2},
        pods=2,
    ),
    Case(
        name="jobset",
        create=operators.jobset,
        document=set_of_jobs(),
        shares={"worker": [(1, 5000)] * 2},
        pods=3,
    ),
    Case(
        name="lws",
        create=operators.leader_worker_set,
        document=leader_worker_set(),
        shares={"leader": [(1, 6000)] * 2, "worker": [(2, 7000)] * 2},
        pods=4,
    ),
    Case(
        name="volcano",
        create=operators.volcano,
        document=volcano_job(),
        shares={"ps": [(1, 3000)], "worker": [(1, 4000)] * 2},
        pods=3,
    ),
)


def path_of(document: Obj) -> str:
    version, kind = document["apiVersion"], document["kind"]
    known = {f"{one.group}/{one.version}": one.plural for one in KINDS if one.kind == kind}
    plural = known.get(version, f"{kind.lower()}s")
    prefix = "/api" if version == "v1" else "/apis"
    return f"{prefix}/{version}/namespaces/{NAMESPACE}/{plural}"


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    control_plane_or_skip()
    async with run_cluster(SPEC, tmp_path_factory.mktemp("operators")) as cluster:
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for kind in KINDS:
            await cluster.create(definitions, kind.definition())

        async def are_served() -> bool:
            try:
                for kind in KINDS:
                    await cluster.request("GET", f"/apis/{kind.group}/{kind.version}/{kind.plural}")
            except (NotFound, Denied):  # not served yet, or its storage is initializing
                return False
            return True

        await cluster.until("the resources are served", are_served, limit_s=LIMIT_S)
        async with anyio.create_task_group() as group:
            for case in CASES:
                group.start_soon(apply, cluster, case)
        yield cluster


async def apply(cluster: Cluster, case: Case) -> None:
    """Create the user's object, unless Kubernetes knows it, and what the operator creates."""
    if case.create is not operators.unchanged:
        await cluster.create(path_of(case.document), case.document)
    for document in case.create(case.document):
        await cluster.create(path_of(document), runnable(document, case.name))


async def pods_of(cluster: Cluster, case: Case) -> list[Obj]:
    path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=case%3D{case.name}"
    items: list[Obj] = (await cluster.request("GET", path))["items"]
    return items


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_operators_pods_get_the_shares_of_the_manifest(cluster: Cluster, case: Case) -> None:
    async def all_run() -> bool:
        pods = await pods_of(cluster, case)
        phases = [pod["status"].get("phase") for pod in pods]
        return phases == ["Running"] * case.pods

    await cluster.until(f"{case.pods} pods of {case.name} run", all_run, limit_s=LIMIT_S)
    found: dict[str, list[tuple[int, int]]] = {}
    for pod in await pods_of(cluster, case):
        name = pod["metadata"]["name"]
        for container in pod["spec"]["containers"]:
            if "nvidia.com/gpu" not in container.get("resources", {}).get("limits", {}):
                continue
            assert pod["spec"]["schedulerName"] == HAMI
            given = await limits_of(cluster, name, container["name"])
            assert len({device.uuid for device in given.devices}) == len(given.devices)
            (memory_mib,) = {device.memory_mib for device in given.devices}
            found.setdefault(container["name"], []).append((len(given.devices), memory_mib))
    assert found == case.shares


async def limits_of(cluster: Cluster, pod: str, container: str) -> limits.Limits:
    """Return the limits that the container reads."""

    async def has_printed() -> bool:
        return bool(await cluster.container_log(pod, container))

    await cluster.until(f"{pod} prints its limits", has_printed, limit_s=LIMIT_S)
    return limits.decode(await cluster.container_log(pod, container))


async def test_volcanos_pod_group_is_a_gang(cluster: Cluster) -> None:
    """A group that needs four members has three: none of them is placed."""
    document = volcano_job()
    document["metadata"]["name"] = "short"
    document["spec"]["minAvailable"] = 4
    for one in operators.volcano(document):
        await cluster.create(path_of(one), runnable(one, "short"))

    async def are_refused() -> bool:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=case%3Dshort"
        pods = (await cluster.request("GET", path))["items"]
        messages = [
            one.get("message", "") for pod in pods for one in pod["status"].get("conditions", [])
        ]
        assert not any(pod["spec"].get("nodeName") for pod in pods)
        return sum("GangIncomplete" in message for message in messages) == 3

    await cluster.until("the gang waits for its fourth member", are_refused, limit_s=LIMIT_S)


async def test_trainers_automatic_number_of_processes_gets_a_warning(cluster: Cluster) -> None:
    """Trainer took ``nvidia.com/gpumem`` for the devices of a node."""
    job = guide("trainer.md")
    headers = {}
    for number in (12_000, 1):
        job["spec"]["trainer"]["numProcPerNode"] = number
        (document,) = operators.trainer(job)
        spec: Obj = document["spec"]["template"]["spec"]
        container: Obj = spec["containers"][0]
        pod: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "auto"},
            "spec": {"containers": [{k: v for k, v in container.items() if k != "ports"}]},
        }
        headers[number] = await warnings_of(cluster, pod)
    (warning,) = headers[12_000]
    assert "PET_NPROC_PER_NODE starts 12000 processes" in warning
    assert "numProcPerNode: 1 in the TrainJob" in warning
    assert headers[1] == []


async def warnings_of(cluster: Cluster, pod: Obj) -> Sequence[str]:
    """Create a pod in a dry run; return the warnings of the API server."""
    url = f"{cluster.api_url}/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All"
    access = cluster.plane.access()
    headers = {"Content-Type": "application/json"}
    if token := access.token:
        headers["Authorization"] = f"Bearer {token}"
    async with cluster.session.post(url, data=json.dumps(pod), headers=headers) as response:
        assert response.status == 201, await response.text()
        return response.headers.getall("Warning", [])


async def test_ledger_and_pods_agree(cluster: Cluster) -> None:
    assert await lasting_problems(cluster, cluster.verifier(), namespace=NAMESPACE) == []
    live = [one for one in (await ledger_of(cluster)).values() if one.op != "release"]
    assert len(live) == sum(len(of_case) for case in CASES for of_case in case.shares.values())
