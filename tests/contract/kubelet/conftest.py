# SPDX-License-Identifier: Apache-2.0
"""Planes on which the kubelet contract runs: each gives a Node."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hami_sim.apiserver import ApiServer, Settings
from hami_sim.kube import Access
from hami_sim.kubelet import KubeletSettings, run_kubelet
from tests.contract.kubelet.dradriver import TestDriver
from tests.contract.kubelet.support import Node
from tests.support.kubeclient import KubeClient
from tests.support.kubelet import grpc_poller, short_path

__all__ = ["grpc_poller", "node", "short_path"]

CPU = "8"


@pytest.fixture
async def node(short_path: Path) -> AsyncIterator[Node]:
    """A simulated kubelet; a suite against another plane overrides this fixture."""
    cdi = short_path / "cdi"
    cdi.mkdir()
    settings = KubeletSettings(
        cpu=CPU,
        node_status_s=1.0,
        cdi_directories=(str(cdi),),
        slices_wipe_s=1.0,
        claims_sync_s=1.0,
    )
    async with ApiServer(Settings()) as server:
        access = Access(url=server.url, token=server.token)
        async with (
            KubeClient(access) as client,
            run_kubelet("node-a", short_path, access, settings) as kubelet,
        ):

            async def logs(pod: str, container: str) -> str:
                return kubelet.logs(pod, container)

            yield Node(
                client=client,
                name=kubelet.name,
                namespace="default",
                plugin_directory=kubelet.plugin_directory,
                pod_resources_socket=kubelet.pod_resources_socket,
                image="simulated",
                restart=kubelet.restart,
                reboot=kubelet.reboot,
                logs=logs,
                cdi_directory=cdi,
            )


@pytest.fixture
async def driver(node: Node) -> AsyncIterator[TestDriver]:
    """A DRA driver to serve; at the end, its pods go first, for kubelet needs it to end them."""
    driver = TestDriver(node.kubelet_directory, node.cdi_directory)
    try:
        yield driver
        driver.before_prepare = driver.before_unprepare = None
        names = [
            p["metadata"]["name"] for p in (await node.client.list("pods", node.namespace))["items"]
        ]
        for name in names:
            await node.delete(name, grace_s=1)
        for name in names:
            await node.gone(name)
    finally:
        await driver.close()
