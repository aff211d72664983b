# SPDX-License-Identifier: Apache-2.0
"""The API server contract on the simulated server."""

import pytest

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

pytestmark = pytest.mark.anyio


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
