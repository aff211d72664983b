# SPDX-License-Identifier: Apache-2.0
"""The contract of Dynamic Resource Allocation on the simulated plane."""

from collections.abc import AsyncIterator

import pytest

from hami_sim.apiserver import ApiServer, Settings
from hami_sim.kube import Access
from hami_sim.kubescheduler import SchedulerSettings, SimScheduler
from tests.contract.dra.suite_objects import DeviceObjectsContract
from tests.contract.dra.suite_scheduling import ClaimSchedulingContract
from tests.contract.kubeapi.support import Cluster, fresh_namespace
from tests.contract.kubescheduler.support import Site, run_extender
from tests.support.kubeclient import KubeClient

pytestmark = pytest.mark.anyio


@pytest.fixture
async def access() -> AsyncIterator[Access]:
    async with ApiServer(Settings()) as server:
        yield Access(url=server.url, token=server.token)


@pytest.fixture
async def cluster(access: Access) -> AsyncIterator[Cluster]:
    async with KubeClient(access) as client, fresh_namespace(client) as namespace:
        yield Cluster(access, namespace, client)


@pytest.fixture
async def site(access: Access) -> AsyncIterator[Site]:
    async with run_extender() as extender:
        settings = SchedulerSettings.for_extender(
            extender.url, initial_backoff_s=0.05, max_backoff_s=0.1
        )
        async with KubeClient(access) as client, SimScheduler(access, settings):
            extender.client = client
            yield Site(client, extender)


class TestObjects(DeviceObjectsContract):
    pass


class TestScheduling(ClaimSchedulingContract):
    pass
