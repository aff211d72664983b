# SPDX-License-Identifier: Apache-2.0
"""A simulated API server with one simulated kubelet, and short forms of what runs on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from hami_sim.apiserver import ApiServer, Settings
from hami_sim.kube import Access
from hami_sim.kubelet import KubeletSettings, SimKubelet, run_kubelet
from tests.contract.kubelet.support import Node
from tests.support.kubeclient import KubeClient
from tests.support.kubelet import grpc_poller, short_path

__all__ = ["access", "bench", "client", "grpc_poller", "short_path"]

Bench = Callable[..., AbstractAsyncContextManager[tuple[Node, SimKubelet]]]


@pytest.fixture
async def access() -> AsyncIterator[Access]:
    async with ApiServer(Settings()) as server:
        yield Access(url=server.url, token=server.token)


@pytest.fixture
async def client(access: Access) -> AsyncIterator[KubeClient]:
    async with KubeClient(access) as opened:
        yield opened


@pytest.fixture
def bench(access: Access, client: KubeClient, short_path: Path) -> Bench:
    """Makes a kubelet with the settings given, for the time of a block."""

    @asynccontextmanager
    async def make(**settings: object) -> AsyncIterator[tuple[Node, SimKubelet]]:
        chosen = KubeletSettings(**{"node_status_s": 1.0, **settings})  # type: ignore[arg-type]  # cases
        async with run_kubelet("node-a", short_path, access, chosen) as kubelet:

            async def logs(pod: str, container: str) -> str:
                return kubelet.logs(pod, container)

            node = Node(
                client=client,
                name=kubelet.name,
                namespace="default",
                plugin_directory=kubelet.plugin_directory,
                pod_resources_socket=kubelet.pod_resources_socket,
                image="simulated",
                cdi_directory=short_path / "cdi",
                restart=kubelet.restart,
                reboot=kubelet.reboot,
                logs=logs,
            )
            yield node, kubelet

    return make
