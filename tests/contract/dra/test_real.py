# SPDX-License-Identifier: Apache-2.0
"""The contract of Dynamic Resource Allocation on the newest Kubernetes, without kubelet.

Older releases are left out: sharing of devices by capacity is off by default before 1.36.
"""

from collections.abc import AsyncIterator

import pytest

from hami_sim.kubernetes import ControlPlane
from tests.contract.dra.suite_objects import DeviceObjectsContract
from tests.contract.dra.suite_scheduling import ClaimSchedulingContract
from tests.contract.kubeapi.support import Cluster, fresh_namespace
from tests.contract.kubescheduler.realplane import (  # noqa: F401 - fixtures
    dra,
    extender,
    plane,
    site,
)
from tests.support.kubeclient import KubeClient

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]


@pytest.fixture
async def cluster(
    plane: ControlPlane,  # noqa: F811 - the fixture
) -> AsyncIterator[Cluster]:
    access = plane.access()
    async with KubeClient(access) as client, fresh_namespace(client) as namespace:
        yield Cluster(access, namespace, client)


class TestObjects(DeviceObjectsContract):
    pass


class TestScheduling(ClaimSchedulingContract):
    pass
