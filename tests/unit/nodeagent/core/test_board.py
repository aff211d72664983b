# SPDX-License-Identifier: Apache-2.0
"""The shared state of partitions: only events change it, and its views follow."""

from collections.abc import Mapping

import pytest

from hami_nodeagent.core.board import (
    Board,
    ContainerStarted,
    FaultsChanged,
    ModeNotice,
    ModeReported,
    PartitionFailed,
    PartitionsRead,
    SharesEnded,
)
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.partitions import Owner


def share(pod: str) -> Owner:
    return Owner(pod_uid=pod, allocation_id=f"{pod}-1", container="main")


def instance(name: str, uuid: str = "gpu-0") -> Instance:
    return Instance(uuid=uuid, instance_id=name, profile="1g", handles={"mig_uuid": name})


def reading(
    uuid: str, carried: Mapping[Owner, Instance], *foreign: Instance, **waiting: str
) -> PartitionsRead:
    return PartitionsRead(
        uuid=uuid,
        carried=carried,
        waiting={share(pod): text for pod, text in waiting.items()},
        foreign=foreign,
    )


def test_a_reading_replaces_what_its_device_carried_and_no_other_device() -> None:
    board = Board()
    view = board.carried
    board.apply(reading("gpu-0", {share("a"): instance("A"), share("b"): instance("B")}))
    board.apply(reading("gpu-1", {share("c"): instance("C", "gpu-1")}, instance("X", "gpu-1")))
    board.apply(reading("gpu-0", {share("b"): instance("B")}))
    assert {owner.pod_uid: one.instance_id for owner, one in view.items()} == {"b": "B", "c": "C"}
    assert [one.instance_id for one in board.foreign_by_uuid["gpu-1"]] == ["X"]


def test_a_failure_is_the_reason_until_a_reading_shows_the_partition() -> None:
    board = Board()
    assert board.lacking([share("a")]) == "it is being made"
    board.apply(PartitionFailed(owner=share("a"), text="no room"))
    board.apply(reading("gpu-0", {}, a="waits for a removal"))
    assert board.lacking([share("a")]) == "no room"
    board.apply(reading("gpu-0", {share("a"): instance("A")}))
    assert not board.lacking([share("a")])
    assert dict(board.trouble) == {}


def test_ended_shares_lose_their_reason_and_ended_pods_their_start() -> None:
    board = Board()
    for pod in ("a", "b"):
        board.apply(PartitionFailed(owner=share(pod), text="no room"))
    board.apply(ContainerStarted(owners=[share("a"), share("b")]))
    board.apply(SharesEnded(live={share("a")}, granted={"b"}))
    assert set(board.trouble) == {share("a")}
    assert board.started == {share("b")}


def test_a_mode_notice_ends_with_a_report_without_one() -> None:
    board = Board()
    notice = ModeNotice(text="waits for pod a/b", is_withheld=True)
    board.apply(ModeReported(uuid="gpu-0", notice=notice))
    assert board.mode_text("gpu-0") == "waits for pod a/b"
    board.apply(ModeReported(uuid="gpu-0", notice=None))
    assert not board.mode_text("gpu-0")


@pytest.mark.parametrize(
    "name", ["carried", "foreign_by_uuid", "faulty_by_uuid", "switching", "trouble"]
)
def test_views_refuse_changes(name: str) -> None:
    board = Board()
    board.apply(FaultsChanged(uuid="gpu-0", faulty=(instance("A"),)))
    view = getattr(board, name)
    with pytest.raises(TypeError):
        view["x"] = ()
