# SPDX-License-Identifier: Apache-2.0
"""The kubelet contract on the simulated kubelet."""

import pytest

from tests.contract.kubelet.suite_allocation import (
    AdmissionContract,
    AllocationContract,
    StartContract,
)
from tests.contract.kubelet.suite_dra import ClaimContract, DriverContract, SliceContract
from tests.contract.kubelet.suite_podresources import PodLifeContract, PodResourcesContract
from tests.contract.kubelet.suite_registration import RegistrationContract, RestartContract

pytestmark = pytest.mark.anyio


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


class TestDraDrivers(DriverContract):
    pass


class TestDraClaims(ClaimContract):
    pass


class TestDraSlices(SliceContract):
    pass
