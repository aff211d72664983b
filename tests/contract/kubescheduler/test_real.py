# SPDX-License-Identifier: Apache-2.0
"""The kube-scheduler contract on kube-scheduler, with the shipped configuration and roles."""

import pytest

from tests.contract.kubescheduler.realplane import dra, extender, plane, site  # noqa: F401 - fixtures
from tests.contract.kubescheduler.suite import ExtenderContract

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]


class TestExtender(ExtenderContract):
    pass
