# SPDX-License-Identifier: Apache-2.0
"""Partitions that kube-scheduler allocated to claims are booked where they fit, and only there."""

import pytest
from msgspec.structs import replace

from hami_common.dra.names import partition_name
from hami_common.dra.partitions import share_of
from hami_common.events.allocation import CLAIM, AllocationRecord
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import Append, RecordSeen
from hami_core.placement.reasons import NodeRefusal
from hami_core.table.table import DeviceTable
from tests.support import builders
from tests.support.builders import held
from tests.support.mig import card

NODE = "n1"
CARDS = (card("H200-141"), card("H200-141", 1))


def ledger_of(*devices: Device) -> Ledger:
    table = DeviceTable()
    table.upsert_node(builders.node_devices(NODE, devices))
    table.set_node_alive(NODE, "nvidia", alive=True)
    return Ledger(table, writer="me", lease_s=30.0, fence_delay_s=3.0)


def part(profile: str, start: int, number: int = 0) -> Share:
    found = share_of(partition_name(f"GPU-{number}", profile, start), CARDS)
    assert found is not None
    return found


def plan(
    ledger: Ledger, *containers: ContainerShares, uid: str = "c", must: bool = False
) -> Append | NodeRefusal | None:
    return ledger.plan_claim(
        node=NODE,
        claim=(uid, "default", "claim"),
        containers=containers,
        allocation_id="a",
        now_s=1.0,
        must=must,
    )


def hold(ledger: Ledger, *shares: Share, seq: int = 1) -> None:
    """Let a pod have these shares."""
    record = AllocationRecord(
        op="reserve",
        allocation_id=f"a-{seq}",
        node=NODE,
        pod_uid=f"pod-{seq}",
        namespace="default",
        pod=f"pod-{seq}",
        containers=(held(*shares),),
    )
    ledger.handle(RecordSeen(seq=seq, record=record, now_s=0.0))


def test_partitions_of_one_claim_are_booked_with_size_and_place() -> None:
    ledger = ledger_of(*CARDS)
    shares = (part("1g.18gb", 6), part("3g.71gb", 0), part("1g.18gb", 5, 1))
    planned = plan(ledger, held(*shares))
    assert isinstance(planned, Append)
    assert planned.record.containers == (held(*shares),)
    assert (planned.record.origin, planned.fenced) == (CLAIM, True)


@pytest.mark.parametrize(
    ("theirs", "wanted", "text"),
    [
        # The size has no place at all, or another one than the allocation's.
        (("7g.141gb", 0), ("1g.18gb", 3), "CardInsufficientMemory: device GPU-0: "),
        (("3g.71gb", 0), ("1g.18gb", 3), "CardPartitionInfeasible: device GPU-0: 1g.18gb@3 is"),
        (("1g.18gb", 3), ("4g.71gb", 0), "CardPartitionInfeasible: device GPU-0: "),
        (("1g.18gb+me", 6), ("1g.18gb+me", 5), "CardPartitionInfeasible: device GPU-0: "),
    ],
)
def test_partition_is_refused_where_another_holds_what_it_takes(
    theirs: tuple[str, int], wanted: tuple[str, int], text: str
) -> None:
    ledger = ledger_of(*CARDS)
    hold(ledger, part(*theirs))
    refusal = plan(ledger, held(part(*wanted)))
    assert isinstance(refusal, NodeRefusal)
    assert text in refusal.text
    assert isinstance(plan(ledger, held(part(*wanted)), must=True), Append)


def test_two_partitions_of_one_claim_must_not_overlap() -> None:
    refusal = plan(ledger_of(*CARDS), held(part("3g.71gb", 4), part("1g.18gb", 6)))
    assert isinstance(refusal, NodeRefusal)
    assert refusal.text == (
        "CardPartitionInfeasible: device GPU-0: 3g.71gb@4, 1g.18gb@6 is not free"
    )


@pytest.mark.parametrize(
    ("device", "share", "code"),
    [
        (replace(CARDS[0], cordoned=True), part("1g.18gb", 6), "CardCordoned"),
        (replace(CARDS[0], healthy=False), part("1g.18gb", 6), "CardNotHealth"),
        (replace(CARDS[0], mode="soft", partitions=()), part("1g.18gb", 6), "ModeNotFit"),
        (CARDS[0], replace(part("1g.18gb", 6), start=7), "CardPartitionMismatch"),
        (CARDS[0], replace(part("1g.18gb", 6), memory_mib=1), "CardPartitionMismatch"),
        (CARDS[0], replace(part("1g.18gb", 6), profile="1g.10gb"), "CardPartitionMismatch"),
    ],
)
def test_card_that_does_not_offer_the_partition_refuses(
    device: Device, share: Share, code: str
) -> None:
    refusal = plan(ledger_of(device), held(share))
    assert isinstance(refusal, NodeRefusal)
    assert refusal.code == code
    assert refusal.text.startswith(f"{code}: device GPU-0: ")


def test_claim_with_a_share_beside_its_partition_is_judged_by_both() -> None:
    soft = builders.device("GPU-9", index=9, memory_mib=1000)
    ledger = ledger_of(*CARDS, soft)
    wanted = (held(part("1g.18gb", 6), name="a"), held(builders.share("GPU-9", 600), name="b"))
    assert isinstance(plan(ledger, *wanted), Append)
    hold(ledger, builders.share("GPU-9", 500))
    refusal = plan(ledger, *wanted)
    assert isinstance(refusal, NodeRefusal)
    assert "device GPU-9" in refusal.text
