# SPDX-License-Identifier: Apache-2.0
"""A real kubelet with containerd and runc, for the kubelet contract.

One control plane and one node serve all tests of a module; each test has a namespace and resources
of its own.
"""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hami_sim.kubernetes import ControlPlane, run_control_plane
from tests.cluster.node.image import APP
from tests.cluster.node.needs import programs_or_skip
from tests.cluster.node.node import NodeSpec, RealNode, base, run_node
from tests.contract.kubeapi.support import fresh_namespace
from tests.contract.kubelet.support import Node, until
from tests.support.kubeclient import KubeClient

NAME = "real-a"


@pytest.fixture(scope="module")
async def plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ControlPlane]:
    programs = programs_or_skip()
    async with run_control_plane(tmp_path_factory.mktemp("plane"), programs) as plane:
        yield plane


@pytest.fixture(scope="module")
async def machine(plane: ControlPlane) -> AsyncIterator[RealNode]:
    spec = NodeSpec(
        name=NAME,
        kubelet=Path(plane.programs.path("kubelet")),
        kubeconfig=plane.kubeconfig_for_node(NAME),
        # Capacities change often here, and production's ten seconds would be waited for each time;
        # so would the minute after which claims are prepared again.
        configuration={"nodeStatusUpdateFrequency": "250ms", "syncFrequency": "2s"},
    )
    with tempfile.TemporaryDirectory(prefix="hn-", dir=base()) as directory:
        async with run_node(spec, Path(directory)) as node, KubeClient(plane.access()) as client:
            await until(lambda: is_ready(client), bool)
            yield node


async def is_ready(client: KubeClient) -> bool:
    nodes = (await client.list("nodes"))["items"]
    conditions = nodes[0]["status"]["conditions"] if nodes else []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


@pytest.fixture
async def node(plane: ControlPlane, machine: RealNode) -> AsyncIterator[Node]:
    async with KubeClient(plane.access()) as client, fresh_namespace(client) as namespace:

        async def logs(pod: str, container: str) -> str:
            return machine.log(pod, container, namespace=namespace)

        yield Node(
            client=client,
            name=machine.name,
            namespace=namespace,
            plugin_directory=machine.plugin_directory,
            pod_resources_socket=machine.pod_resources_socket,
            image=APP,
            restart=machine.restart_kubelet,
            reboot=machine.reboot,
            logs=logs,
            cdi_directory=machine.containerd.cdi_directory,
        )
        for pod in (await client.list("pods", namespace))["items"]:
            body = {"gracePeriodSeconds": 0}
            await client.delete("pods", pod["metadata"]["name"], namespace, body=body)
