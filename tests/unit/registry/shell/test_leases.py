# SPDX-License-Identifier: Apache-2.0
"""Leases as the state of the control plane lists them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from hami_common.errors import Denied, HamiError, Unavailable, WireInvalid
from hami_registry.core.system import LeaseRow
from hami_registry.shell.leases import Leases
from tests.support.manualclock import ManualClock

pytestmark = pytest.mark.anyio
NOW_S = 1_750_000_000.0  # 2025-06-15T15:06:40Z


class Kube:
    """An API server with these Leases in one namespace."""

    def __init__(self, *items: Any, problem: HamiError | None = None) -> None:
        self._pages = [msgspec.json.encode({"items": [one]}) for one in items]
        self._problem = problem

    async def list_pages(self, path: str) -> Sequence[bytes]:
        assert path == "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
        if self._problem is not None:
            raise self._problem
        return self._pages


def lease(name: str, **spec: Any) -> Any:
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": spec}


def leases_of(kube: Any) -> Leases:
    return Leases(lambda: kube, namespace="ns", clock=ManualClock(now_s=NOW_S))


async def test_our_leases_are_listed_by_name_and_others_are_not_read() -> None:
    held = {
        "holderIdentity": "s-1",
        "acquireTime": "2025-06-15T15:00:00.000000Z",
        "renewTime": "2025-06-15T15:06:30.500000Z",
        "leaseDurationSeconds": 15,
        "leaseTransitions": 3,
    }
    stale = {**held, "renewTime": "2025-06-15T15:06:20Z", "acquireTime": None}
    kube = Kube(
        lease("hami-idle", **stale),
        lease("other", holderIdentity=7),
        lease("hami-defrag", **held),
        lease("hami-claims", holderIdentity=""),
    )
    assert await leases_of(kube).rows() == (
        LeaseRow(
            name="hami-claims",
            holder="",
            since_s=None,
            renewed_s=None,
            lease_s=0.0,
            transitions=0,
            is_expired=True,
        ),
        LeaseRow(
            name="hami-defrag",
            holder="s-1",
            since_s=NOW_S - 400,
            renewed_s=NOW_S - 9.5,
            lease_s=15.0,
            transitions=3,
            is_expired=False,
        ),
        LeaseRow(
            name="hami-idle",
            holder="s-1",
            since_s=None,
            renewed_s=NOW_S - 20,
            lease_s=15.0,
            transitions=3,
            is_expired=True,
        ),
    )


@pytest.mark.parametrize(
    ("kube", "error"),
    [
        (None, Unavailable),
        (Kube(problem=Denied(peer="the API server", detail="no right", status=403)), Denied),
        (Kube(lease("hami-idle", renewTime="yesterday")), WireInvalid),
        (Kube(lease("hami-idle", holderIdentity=7)), WireInvalid),
    ],
    ids=["not-reached", "denied", "no-time", "no-name"],
)
async def test_leases_that_cannot_be_listed_have_a_reason(
    kube: Any, error: type[HamiError]
) -> None:
    with pytest.raises(error):
        await leases_of(kube).rows()
