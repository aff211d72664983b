# SPDX-License-Identifier: Apache-2.0
"""Containers that the driver limits, and the limit of each."""

from typing import Any

from msgspec.structs import replace

from hami_common.model.placement import Share
from hami_nodeagent.core.breach import BreachRules
from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.core.holders import holders_of
from hami_nodeagent.core.podbook import PodBook
from hami_nodeagent.core.wall import walls_of
from tests.unit.nodeagent.core.builders import Given, device

RULES = BreachRules(memory_margin_mib=512, memory_margin_pct=5)
IDS = {"containerd://aa": "main"}


def walls(
    memory_mib: int,
    *,
    limit_mib: int = 0,
    capped: bool = True,
    exclusive: bool = False,
    origin: str = "",
    **pod: Any,
) -> list[tuple[str, str, int | None]]:
    given = Given("train", **{"container_by_id": IDS, **pod})
    share = Share(
        vendor="nvidia",
        uuid="nvidia-0",
        memory_mib=memory_mib,
        memory_limit_mib=limit_mib,
        exclusive=exclusive,
    )
    containers = (replace(given.record.containers[0], shares=(share,)),)
    record = replace(given.record, containers=containers, origin=origin)
    entries = {given.uid: replace(given.entry, record=record)}
    book, grants = PodBook(), GrantBook([given.grant("main", "id")])
    book.put(given.facts, revision=1, now_s=0)
    size: dict[str, Any] = {"memory_mib": 40_000, "capacity_mib": 40_000}
    devices = {"nvidia-0": device(0, memory_cap=capped, **size)}
    found = walls_of(holders_of(entries, book, grants, devices), book, entries, devices, RULES)
    return [(one.container_id, one.holder.uuid, one.limit_mib) for one in found]


def test_limit_is_the_share_with_the_margin_of_breach_detection() -> None:
    assert walls(3000) == [("aa", "nvidia-0", 3512)]
    assert walls(20_000) == [("aa", "nvidia-0", 21_000)]


def test_memory_limit_above_the_request_is_within_the_wall() -> None:
    assert walls(3000, limit_mib=20_000) == [("aa", "nvidia-0", 21_000)]
    assert walls(3000, limit_mib=39_000) == [("aa", "nvidia-0", None)]


def test_limit_as_large_as_the_device_is_none() -> None:
    assert walls(39_000) == [("aa", "nvidia-0", None)]


def test_container_without_id_waits_for_its_status() -> None:
    assert walls(3000, container_by_id={}) == []
    assert walls(3000, container_by_id={"containerd://bb": "other"}) == []


def test_ephemeral_container_is_limited_as_its_target() -> None:
    found = walls(3000, container_by_id={**IDS, "containerd://bb": "main"})
    assert found == [("aa", "nvidia-0", 3512), ("bb", "nvidia-0", 3512)]


def test_whole_devices_other_drivers_and_pods_of_hami_have_no_limit() -> None:
    assert walls(40_000, exclusive=True) == []
    assert walls(3000, capped=False) == []
    assert walls(3000, origin="hami") == []
