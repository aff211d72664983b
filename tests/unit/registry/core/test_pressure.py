# SPDX-License-Identifier: Apache-2.0
"""Waiting of containers, its cause, and the neighbors."""

import pytest

from hami_common.events.usage import ContainerUsage, RecallUse, ShareUsage, UsageRecord
from hami_registry.core.pressure import ContainerPressure, PressureFold


def counted(
    pod: str, waited_s: float = 0.0, *, device_time_s: float = 0.0, **more: int
) -> ContainerUsage:
    return ContainerUsage(
        namespace="team-" + pod[0],
        pod=pod,
        pod_uid=f"uid-{pod}",
        container="main",
        waited_s=waited_s,
        device_time_s=device_time_s,
        **more,
    )


def share(
    pod: str, uuid: str = "A", *, core: int = 0, limit: int = 0, starved_s: float = 0.0
) -> ShareUsage:
    return ShareUsage(
        namespace="team-" + pod[0],
        pod=pod,
        pod_uid=f"uid-{pod}",
        container="main",
        vendor="nvidia",
        uuid=uuid,
        used_mib=100,
        limit_core_pct=limit,
        core_pct=core,
        starved_s=starved_s,
    )


def evaluated(
    *records: tuple[tuple[ContainerUsage, ...], tuple[ShareUsage, ...]],
    namespace: str = "",
    **priority: int,
) -> list[ContainerPressure]:
    fold = PressureFold()
    for seq, (containers, shares) in enumerate(records):
        fold.seen(
            UsageRecord(
                node="n",
                boot_id="1",
                seq=seq,
                time_s=60.0 * seq,
                containers=containers,
                shares=shares,
            )
        )
    return fold.items(priority=lambda uid, _: priority.get(uid[-1]), namespace=namespace)


def test_counters_are_differences_and_a_fall_is_a_restart() -> None:
    shares = (share("a"), share("b"), share("c", "B"))
    (found,) = evaluated(
        ((counted("a", 5, launches=10, refusals=1), counted("b", 0, device_time_s=7)), shares),
        ((counted("a", 8, launches=20, refusals=1), counted("b", 0, device_time_s=9)), shares),
        ((counted("a", 2, launches=3, refusals=2), counted("b", 0, device_time_s=19)), shares),
    )
    assert (found.waited_s, found.launches, found.refusals) == (5.0, 13, 1)
    assert (found.seconds, found.node, found.pod_uid) == (120.0, "n", "uid-a")
    (device,) = found.devices
    assert [(one.pod, one.device_time_s) for one in device.neighbors] == [("b", 12.0)]


def test_container_that_started_in_the_time_counts_from_zero() -> None:
    old, new = counted("a", 5), counted("b", 3, refusals=2)
    (found,) = evaluated(((old,), (share("a"),)), ((old, new), (share("a"), share("b"))))
    assert (found.pod, found.waited_s, found.refusals) == ("b", 3.0, 2)


def test_neighbors_of_other_namespaces_keep_amounts_only() -> None:
    shares = (share("a", core=10), share("b", core=60), share("b", "B"))
    records = (
        ((counted("a"), counted("b")), shares),
        ((counted("a", 9), counted("b", 4, device_time_s=50)), shares),
    )
    assert [one.pod for one in evaluated(*records)] == ["a", "b"]
    (found,) = evaluated(*records, namespace="team-a")
    (neighbor,) = found.devices[0].neighbors
    assert (neighbor.namespace, neighbor.pod, neighbor.container) == ("", "", "")
    assert (neighbor.device_time_s, neighbor.core_pct, neighbor.used_mib) == (50.0, 60.0, 100)


@pytest.mark.parametrize(
    ("limit", "core", "starved_s", "other", "cause"),
    [
        (0, 10, 0.0, 1, "priority"),  # without a limit nothing else can be waited for
        (100, 10, 0.0, 1, "priority"),
        (30, 30, 0.0, 1, "limit"),  # no neighbor has a higher priority
        (30, 10, 0.0, 1, "limit"),
        (30, 10, 8.0, 0, "priority"),
        (30, 29, 0.0, 0, "limit"),
        (30, 10, 0.0, 0, "both"),
    ],
)
def test_cause_of_waiting(limit: int, core: int, starved_s: float, other: int, cause: str) -> None:
    before = (share("a", limit=limit, core=core), share("b"))
    after = (share("a", limit=limit, core=core, starved_s=starved_s), share("b"))
    (found,) = evaluated(
        ((counted("a"), counted("b")), before),
        ((counted("a", 10), counted("b")), after),
        b=other,
    )
    assert found.cause == cause
    assert found.starved_s == starved_s


def test_refusals_alone_have_no_cause_of_waiting() -> None:
    (found,) = evaluated(
        ((counted("a"),), (share("a"),)), ((counted("a", refusals=1),), (share("a"),))
    )
    assert (found.cause, found.refusals) == ("", 1)


def recall(pod: str, cause: str, moves: int, mib: int) -> RecallUse:
    return RecallUse(
        namespace="team-" + pod[0],
        pod=pod,
        pod_uid=f"uid-{pod}",
        container="main",
        for_namespace="team-" + cause[0] if cause else "",
        for_pod=cause,
        for_pod_uid=f"uid-{cause}" if cause else "",
        for_container="main" if cause else "",
        moves=moves,
        moved_mib=mib,
    )


def test_moves_to_the_host_are_listed_with_the_container_that_needed_the_memory() -> None:
    fold = PressureFold()
    records = (
        (recall("a", "b", 2, 4000),),
        (recall("a", "b", 5, 9000), recall("a", "", 1, 100)),
        (recall("a", "b", 1, 700), recall("a", "", 1, 100)),  # the agent was restarted
    )
    for seq, recalls in enumerate(records):
        fold.seen(
            UsageRecord(
                node="n",
                boot_id="1",
                seq=seq,
                time_s=60.0 * seq,
                containers=(counted("a"), counted("b")),
                shares=(share("a"), share("b")),
                recalls=recalls,
            )
        )

    def found(namespace: str) -> list[tuple[bool, str, int, int]]:
        (one,) = fold.items(priority=lambda *_: None, namespace=namespace)
        assert (one.pod, one.recalls, one.cause) == ("a", 5, "")
        return [(r.is_requested, r.pod, r.moves, r.moved_mib) for r in one.recalled_for]

    assert found("") == [(False, "b", 4, 5700), (True, "", 1, 100)]
    assert found("team-a") == [(False, "", 4, 5700), (True, "", 1, 100)]
