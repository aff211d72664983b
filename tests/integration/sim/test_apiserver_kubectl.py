# SPDX-License-Identifier: Apache-2.0
"""kubectl against the simulated API server: the one built for the tests, else the machine's."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

from hami_sim.apiserver import ApiServer, Settings
from hami_sim.kube import STRATEGIC, Access
from hami_sim.kubernetes.programs import VARIABLE
from tests.support.kubeclient import KubeClient

KUBECTL = shutil.which(
    "kubectl", path=os.pathsep.join([os.environ.get(VARIABLE, ""), os.environ["PATH"]])
)
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(KUBECTL is None, reason="kubectl is neither built nor installed"),
]
MANIFEST = """
apiVersion: v1
kind: Pod
metadata:
  name: web
  labels: {app: web}
spec:
  schedulerName: nobody-schedules
  containers:
  - name: main
    image: registry.example/app:1
    resources:
      limits: {nvidia.com/gpu: "1", nvidia.com/gpumem: 3k}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: conf}
data: {a: b}
"""


class Kubectl:
    """kubectl with its own home, on one kubeconfig."""

    def __init__(self, home: Path, kubeconfig: Path) -> None:
        self._env = {"HOME": str(home), "KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin"}

    async def __call__(self, *arguments: str, text: str = "", code: int = 0) -> str:
        done = await anyio.run_process(
            [KUBECTL or "kubectl", *arguments],
            env=self._env,
            input=text.encode(),
            check=False,
        )
        output = done.stdout.decode() + done.stderr.decode()
        assert done.returncode == code, output
        return output

    async def start(self, *arguments: str) -> anyio.abc.Process:
        return await anyio.open_process([KUBECTL or "kubectl", *arguments], env=self._env)


@pytest.fixture(params=["http", "https"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[ApiServer]:
    async with ApiServer(Settings(tls=request.param == "https")) as server:
        yield server


@pytest.fixture
async def kubectl(server: ApiServer, tmp_path: Path) -> Kubectl:
    return Kubectl(tmp_path, server.kubeconfig(tmp_path / "kubeconfig"))


@pytest.fixture
async def client(server: ApiServer, tmp_path: Path) -> AsyncIterator[KubeClient]:
    access = Access.from_kubeconfig(server.kubeconfig(tmp_path / "client"))
    async with KubeClient(access) as client:
        yield client


async def test_apply_get_and_delete(kubectl: Kubectl) -> None:
    assert "pod/web created" in await kubectl("apply", "-f", "-", text=MANIFEST)
    assert "pod/web unchanged" in await kubectl("apply", "-f", "-", text=MANIFEST)
    changed = MANIFEST.replace("app: web", "app: other")
    assert "pod/web configured" in await kubectl("apply", "-f", "-", text=changed)
    wide = await kubectl("get", "pods", "-o", "wide")
    assert wide.splitlines()[0].split()[:7] == [
        "NAME",
        "READY",
        "STATUS",
        "RESTARTS",
        "AGE",
        "IP",
        "NODE",
    ]
    assert wide.splitlines()[1].split()[:4] == ["web", "0/1", "Pending", "0"]
    yaml = await kubectl("get", "pod", "web", "-o", "yaml")
    assert "nvidia.com/gpumem: 3k" in yaml
    assert "app: other" in yaml
    assert 'pod "web" deleted' in await kubectl("delete", "pod", "web")
    assert "NotFound" in await kubectl("get", "pod", "web", code=1)


async def test_server_side_apply_and_removed_fields(kubectl: Kubectl) -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: '1', b: '2'}\n"
    await kubectl("apply", "--server-side", "-f", "-", text=text)
    await kubectl("apply", "--server-side", "-f", "-", text=text.replace(", b: '2'", ""))
    data = await kubectl("get", "configmap", "c", "-o", "jsonpath={.data}")
    assert msgspec.json.decode(data) == {"a": "1"}


async def test_describe_shows_events_and_conditions(kubectl: Kubectl, client: KubeClient) -> None:
    await kubectl("apply", "-f", "-", text=MANIFEST)
    made = await client.get("pods", "web", "default")
    about = {
        "kind": "Pod",
        "namespace": "default",
        "name": "web",
        "uid": made["metadata"]["uid"],
    }
    await client.create(
        "events.events.k8s.io",
        {
            "metadata": {"name": "web.1", "namespace": "default"},
            "eventTime": "2026-01-02T03:04:05.000000Z",
            "reportingController": "hami-scheduler",
            "reportingInstance": "x",
            "action": "Scheduling",
            "reason": "FailedScheduling",
            "regarding": about,
            "note": "0/1 nodes are available: 1 too small.",
            "type": "Warning",
        },
    )
    text = await kubectl("describe", "pod", "web")
    assert "nvidia.com/gpumem:  3k" in text
    assert "FailedScheduling" in text
    assert "hami-scheduler" in text
    assert "0/1 nodes are available: 1 too small." in text
    listed = await kubectl("get", "events")
    assert "FailedScheduling" in listed


async def test_watch_prints_changes(kubectl: Kubectl, client: KubeClient) -> None:
    await kubectl("apply", "-f", "-", text=MANIFEST)
    watching = await kubectl.start("get", "pods", "-w")
    assert watching.stdout is not None
    text = ""
    try:
        with anyio.fail_after(40):
            while "web" not in text:
                text += (await watching.stdout.receive()).decode()
            await client.patch(
                "pods",
                "web",
                {"status": {"phase": "Running"}},
                namespace="default",
                subresource="status",
                kind=STRATEGIC,
            )
            while "Running" not in text:
                text += (await watching.stdout.receive()).decode()
    finally:
        watching.terminate()
        await watching.aclose()
    assert text.count("NAME") == 1


async def test_nodes_label_annotate_cordon_and_patch(kubectl: Kubectl, client: KubeClient) -> None:
    await client.create(
        "nodes",
        {
            "metadata": {"name": "n1", "labels": {"node-role.kubernetes.io/worker": ""}},
            "status": {
                "conditions": [{"type": "Ready", "status": "True"}],
                "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
                "nodeInfo": {"kubeletVersion": "v1.34.0"},
            },
        },
    )
    wide = (await kubectl("get", "nodes", "-o", "wide")).splitlines()[1].split()
    assert wide[:3] == ["n1", "Ready", "worker"]
    assert wide[4:6] == ["v1.34.0", "10.0.0.1"]
    await kubectl("cordon", "n1")
    assert "SchedulingDisabled" in await kubectl("get", "nodes")
    await kubectl("label", "node", "n1", "zone=a")
    await kubectl("annotate", "node", "n1", "note=b")
    await kubectl("patch", "node", "n1", "-p", '{"spec":{"unschedulable":null}}')
    node = await client.get("nodes", "n1")
    assert node["metadata"]["labels"]["zone"] == "a"
    assert node["metadata"]["annotations"]["note"] == "b"
    assert "unschedulable" not in node["spec"]
