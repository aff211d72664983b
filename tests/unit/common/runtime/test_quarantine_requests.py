# SPDX-License-Identifier: Apache-2.0
"""Requests that nobody repeats here, and items handled in worker threads, are isolated too."""

import pytest
from prometheus_client import CollectorRegistry

from hami_common.errors import Unavailable
from hami_common.runtime.clock import ManualClock
from hami_common.runtime.quarantine import Quarantine, sift

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


def test_items_that_fail_are_told_apart_from_the_others() -> None:
    handled, failed = sift(["1", "x", "2"], int)
    assert handled == [("1", 1), ("2", 2)]
    assert [(item, type(error)) for item, error in failed] == [("x", ValueError)]
