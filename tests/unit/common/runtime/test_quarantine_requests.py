# SPDX-License-Identifier: Apache-2.0
"""Isolation of requests without a retry, and of items handled in worker threads."""

import pytest
from prometheus_client import CollectorRegistry

from hami_common.errors import Unavailable
from hami_common.runtime.quarantine import Quarantine, sift
from tests.support.manualclock import ManualClock

pytestmark = pytest.mark.anyio


def fail() -> None:
    raise ValueError("odd")


def be_unavailable() -> None:
    raise Unavailable(peer="bus", detail="gone")


async def test_a_request_that_fails_is_counted_and_makes_no_entry() -> None:
    registry = CollectorRegistry()
    quarantine = Quarantine(kinds=("login",), clock=ManualClock(), registry=registry)
    assert not await quarantine.once("login", fail)
    assert await quarantine.once("login", lambda: None)
    with pytest.raises(Unavailable):
        await quarantine.once("login", be_unavailable, passes=(Unavailable,))
    assert quarantine.entries() == []
    name = "hami_quarantine_failures_total"
    assert registry.get_sample_value(name, {"kind": "login"}) == 1


def test_failing_items_are_separated_from_the_others() -> None:
    handled, failed = sift(["1", "x", "2"], int)
    assert handled == [("1", 1), ("2", 2)]
    assert [(item, type(error)) for item, error in failed] == [("x", ValueError)]
