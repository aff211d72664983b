# SPDX-License-Identifier: Apache-2.0
"""Planes on which the API server contract runs: each gives an Access, the rest is common."""

from collections.abc import AsyncIterator

import pytest

from hami_sim.apiserver import ApiServer, Settings
from hami_sim.kube import Access
from tests.contract.kubeapi.support import Cluster, fresh_namespace
from tests.support.kubeclient import KubeClient


@pytest.fixture
async def access() -> AsyncIterator[Access]:
    """The simulated server; a suite against another plane overrides this fixture."""
    async with ApiServer(Settings(tls=True)) as server:
        yield Access(url=server.url, token=server.token, ca_pem=server.ca_pem.decode())


@pytest.fixture
async def cluster(access: Access) -> AsyncIterator[Cluster]:
    async with KubeClient(access) as client, fresh_namespace(client) as namespace:
        yield Cluster(access, namespace, client)
