# SPDX-License-Identifier: Apache-2.0
"""The API server contract on kube-apiserver, with etcd and kube-controller-manager behind it.

One control plane serves all tests; each has a namespace of its own.
"""

from collections.abc import AsyncIterator

import pytest

from hami_sim.kube import Access
from hami_sim.kubernetes import ControlPlane, run_control_plane
from tests.cluster.needs import control_plane_or_skip
from tests.contract.kubeapi.suite_admission import AdmissionContract
from tests.contract.kubeapi.suite_lists import ListsContract, WatchContract
from tests.contract.kubeapi.suite_objects import (
    BindingContract,
    EvictionContract,
    GarbageContract,
    ObjectsContract,
    PodsContract,
    QuotaContract,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
async def plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ControlPlane]:
    programs = control_plane_or_skip()
    async with run_control_plane(tmp_path_factory.mktemp("plane"), programs) as plane:
        yield plane


@pytest.fixture
def access(plane: ControlPlane) -> Access:
    return plane.access()


class TestObjects(ObjectsContract):
    pass


class TestPods(PodsContract):
    pass


class TestBinding(BindingContract):
    pass


class TestEviction(EvictionContract):
    pass


class TestGarbage(GarbageContract):
    pass


class TestQuota(QuotaContract):
    pass


class TestLists(ListsContract):
    pass


class TestWatch(WatchContract):
    pass


class TestAdmission(AdmissionContract):
    pass
