# SPDX-License-Identifier: Apache-2.0
"""The contract of Dynamic Resource Allocation on the real kubelet, with containerd and runc.

Only on the newest Kubernetes: older releases lack parts of it, such as the health of devices.
"""

import pytest

from tests.contract.kubelet.realnode import machine, node, plane  # noqa: F401 - fixtures
from tests.contract.kubelet.suite_dra import ClaimContract, DriverContract, SliceContract

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]


class TestDraDrivers(DriverContract):
    pass


class TestDraClaims(ClaimContract):
    pass


class TestDraSlices(SliceContract):
    pass
