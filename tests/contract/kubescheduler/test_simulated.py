# SPDX-License-Identifier: Apache-2.0
"""The kube-scheduler contract on the simulated scheduler."""

from collections.abc import AsyncIterator

import pytest

from hami_sim.apiserver import ApiServer, Settings
from hami_sim.kube import Access
from hami_sim.kubescheduler import SchedulerSettings, SimScheduler
from tests.contract.kubescheduler.suite import ExtenderContract
from tests.contract.kubescheduler.suite_every_pod import EveryPodContract
from tests.contract.kubescheduler.support import Site, run_extender
from tests.support.kubeclient import KubeClient

pytestmark = pytest.mark.anyio


@pytest.fixture
def dra() -> bool:
    return False


@pytest.fixture
async def site(dra: bool) -> AsyncIterator[Site]:  # noqa: FBT001 - a fixture
    async with ApiServer(Settings()) as server, run_extender() as extender:
        access = Access(url=server.url, token=server.token)
        settings = SchedulerSettings.for_extender(
            extender.url, initial_backoff_s=0.05, max_backoff_s=0.1, dra=dra
        )
        async with KubeClient(access) as client, SimScheduler(access, settings):
            extender.client = client
            yield Site(client, extender)


class TestExtender(ExtenderContract):
    pass


class TestEveryPod(EveryPodContract):
    @pytest.fixture
    def dra(self) -> bool:
        return True
