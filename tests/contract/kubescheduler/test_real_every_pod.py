# SPDX-License-Identifier: Apache-2.0
"""The contract of component ``dra`` on kube-scheduler, of the newest Kubernetes."""

import pytest

from tests.contract.kubescheduler.realplane import extender, plane, site  # noqa: F401 - fixtures
from tests.contract.kubescheduler.suite_every_pod import EveryPodContract

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def dra() -> bool:
    return True


class TestEveryPod(EveryPodContract):
    pass
