# SPDX-License-Identifier: Apache-2.0
"""A real control plane with kube-scheduler, with the shipped configuration and roles.

One control plane serves all tests of a module; each has nodes of its own, and no kubelet keeps them
ready.
"""

from collections.abc import AsyncIterator

import pytest

from hami_sim.kubernetes import ControlPlane, run_control_plane
from hami_sim.kubernetes.programs import SCHEDULER
from tests.cluster.needs import control_plane_or_skip
from tests.contract.kubescheduler.support import Extender, Site, run_extender
from tests.support.kubeclient import KubeClient


@pytest.fixture(scope="module")
async def extender() -> AsyncIterator[Extender]:
    async with run_extender() as extender:
        yield extender


@pytest.fixture(scope="module")
def dra() -> bool:
    """Configuration of kube-scheduler: of the component ``dra``, if a module overrides this."""
    return False


@pytest.fixture(scope="module")
async def plane(
    tmp_path_factory: pytest.TempPathFactory,
    extender: Extender,
    dra: bool,  # noqa: FBT001 - a fixture
) -> AsyncIterator[ControlPlane]:
    programs = control_plane_or_skip()
    async with run_control_plane(tmp_path_factory.mktemp("plane"), programs) as plane:
        await plane.install_accounts()
        login = await plane.kubeconfig_for_account("hami-kube-scheduler")
        plane.add_scheduler(login, extender_url=extender.url, dra=dra).start()
        await plane.until("the scheduler is ready", plane.is_scheduler_ready, SCHEDULER)
        yield plane


@pytest.fixture
async def site(plane: ControlPlane, extender: Extender) -> AsyncIterator[Site]:
    async with KubeClient(plane.access()) as client:
        extender.client = client
        site = Site(client, extender)
        try:
            yield site
        finally:
            await site.clear()
            extender.reset()
