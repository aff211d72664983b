# SPDX-License-Identifier: Apache-2.0
"""The kubelet contract on the real kubelet, with containerd and runc."""

import pytest

from tests.contract.kubelet.realnode import machine, node, plane  # noqa: F401 - fixtures
from tests.contract.kubelet.suite_allocation import (
    AdmissionContract,
    AllocationContract,
    StartContract,
)
from tests.contract.kubelet.suite_podresources import PodLifeContract, PodResourcesContract
from tests.contract.kubelet.suite_registration import RegistrationContract, RestartContract

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]


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
