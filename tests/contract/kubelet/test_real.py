# SPDX-License-Identifier: Apache-2.0
"""The kubelet contract on the real kubelet, with containerd and runc.

One control plane and one node serve all tests; each test has a namespace and resources of its own.
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
from tests.contract.kubelet.suite_allocation import (
    AdmissionContract,
    AllocationContract,
    StartContract,
)
from tests.contract.kubelet.suite_dra import ClaimContract, DriverContract, SliceContract
from tests.contract.kubelet.suite_podresources import PodLifeContract, PodResourcesContract
from tests.contract.kubelet.suite_registration import RegistrationContract, RestartContract
from tests.contract.kubelet.support import Node, until
from tests.support.kubeclient import KubeClient

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]

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


class TestRegistration(RegistrationContract):
    pass


class TestRestart(RestartContract):
    pass


class TestAllocation(AllocationContract):
    pass


class TestAdmission(AdmissionContract):
    pass


class TestStart(StartContract):
    pass


class TestPodResources(PodResourcesContract):
    pass


class TestPodLife(PodLifeContract):
    pass


class TestDraDrivers(DriverContract):
    pass


class TestDraClaims(ClaimContract):
    pass


class TestDraSlices(SliceContract):
    pass
