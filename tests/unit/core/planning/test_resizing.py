# SPDX-License-Identifier: Apache-2.0
"""Shares of a running container after a resize, and the resizes that are refused."""

import pytest

from hami_common.errors import RequestInvalid
from hami_common.events.allocation import AllocationRecord
from hami_common.model.placement import ContainerShares, Share
from hami_core.ledger.holding import Holding
from hami_core.planning.resizing import ResizeRequest, larger, resized, shrinks

SOFT = Share(vendor="nvidia", uuid="GPU-1", memory_mib=1000, core_pct=30)


def containers(*shares: Share, name: str = "main") -> ContainerShares:
    return ContainerShares(name=name, kind="app", shares=shares)


def holding(*held: ContainerShares) -> Holding:
    record = AllocationRecord(
        op="reserve",
        allocation_id="a",
        node="n",
        pod_uid="u",
        namespace="default",
        pod="web",
        containers=held,
    )
    return Holding(record=record, revision=7)


def wish(**more: object) -> ResizeRequest:
    return ResizeRequest(namespace="default", pod="web", **more)  # type: ignore[arg-type]  # a test's own table


def test_every_device_of_the_container_gets_the_amount_and_others_are_unchanged() -> None:
    second = Share(vendor="nvidia", uuid="GPU-2", memory_mib=1000, core_pct=30)
    side = containers(SOFT, name="side")
    changed, all_of_them = resized(
        holding(containers(SOFT, second), side),
        wish(container="main", memory_mib=2000),
        state="running",
    )
    assert [(one.memory_mib, one.core_pct) for one in changed.shares] == [(2000, 30), (2000, 30)]
    assert all_of_them == (changed, side)


def test_only_container_with_a_share_needs_no_name() -> None:
    changed, _ = resized(
        holding(containers(name="idle"), containers(SOFT)), wish(core_pct=50), state="running"
    )
    assert changed.name == "main"
    assert changed.shares[0].core_pct == 50
    assert changed.shares[0].memory_mib == 1000


@pytest.mark.parametrize(
    ("share", "says"),
    [
        (Share(vendor="nvidia", uuid="G", memory_mib=9, profile="1g.5gb", start=2), "1g.5gb@2"),
        (Share(vendor="nvidia", uuid="G", memory_mib=9, exclusive=True), "whole"),
        (Share(vendor="nvidia", uuid="G", memory_mib=9, mode="mps"), "Multi-Process Service"),
        (Share(vendor="ascend", uuid="A", memory_mib=9), "ascend"),
    ],
)
def test_resize_without_a_limits_file_is_refused_with_the_reason(share: Share, says: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        resized(holding(containers(share)), wish(memory_mib=5), state="running")
    assert says in str(refused.value)
    assert "start the pod again" in refused.value.fix


@pytest.mark.parametrize(
    ("more", "state", "says"),
    [
        ({"memory_mib": 5}, "bound", "bound"),
        ({}, "running", "nothing is asked for"),
        ({"memory_mib": 0}, "running", "0 is no amount"),
        ({"core_pct": 101}, "running", "101 is not a percentage"),
        ({"core_pct": -1}, "running", "-1 is not a percentage"),
        ({"memory_mib": 1000, "core_pct": 30}, "running", "has these shares already"),
        ({"memory_mib": 5, "container": "other"}, "running", "'other' has no share"),
    ],
)
def test_nonsense_is_refused_by_name(more: dict[str, object], state: str, says: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        resized(holding(containers(SOFT)), wish(**more), state=state)
    assert says in str(refused.value)


def test_container_must_be_named_where_several_have_shares() -> None:
    both = holding(containers(SOFT), containers(SOFT, name="side"))
    with pytest.raises(RequestInvalid, match="several") as refused:
        resized(both, wish(memory_mib=5), state="running")
    assert refused.value.fix == "name one of main, side"


def test_pod_without_shares_has_nothing_to_resize() -> None:
    with pytest.raises(RequestInvalid) as refused:
        resized(holding(containers()), wish(memory_mib=5), state="running")
    assert refused.value.fix == "choose another pod"


def test_larger_request_takes_the_maximum_of_each_amount() -> None:
    old = (containers(SOFT),)
    new = (containers(Share(vendor="nvidia", uuid="GPU-1", memory_mib=500, core_pct=60)),)
    upper = larger(old, new)
    assert [(one.memory_mib, one.core_pct) for one in upper[0].shares] == [(1000, 60)]
    assert shrinks(old, new)
    assert not shrinks(new, upper)


BURST = Share(
    vendor="nvidia",
    uuid="GPU-1",
    memory_mib=1000,
    core_pct=30,
    memory_limit_mib=3000,
    core_limit_pct=60,
)


@pytest.mark.parametrize(
    ("more", "want", "upper"),
    [
        ({"memory_mib": 2000}, (2000, 3000, 30, 60), (2000, 3000, 30, 60)),
        ({"memory_mib": 500}, (500, 3000, 30, 60), (1000, 3000, 30, 60)),
        ({"memory_mib": 3000}, (3000, 0, 30, 60), (3000, 0, 30, 60)),
        ({"memory_mib": 4000}, (4000, 0, 30, 60), (4000, 0, 30, 60)),
        ({"core_pct": 80}, (1000, 3000, 80, 80), (1000, 3000, 80, 80)),
        ({"core_pct": 0}, (1000, 3000, 0, 0), (1000, 3000, 30, 60)),
        ({"memory_mib": 4000, "core_pct": 10}, (4000, 0, 10, 60), (4000, 0, 30, 60)),
    ],
)
def test_resize_keeps_limits_that_are_above_the_new_request(
    more: dict[str, object], want: tuple[int, ...], upper: tuple[int, ...]
) -> None:
    before = (containers(BURST),)
    _, after = resized(holding(*before), wish(**more), state="running")
    booked = larger(before, after)
    for some, amounts in ((after, want), (booked, upper)):
        (one,) = some[0].shares
        assert (
            one.memory_mib,
            one.memory_limit_mib,
            one.core_pct,
            one.core_limit_pct,
        ) == amounts
    assert larger(booked, after) == booked, "the second step never grows"
