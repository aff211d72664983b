# SPDX-License-Identifier: Apache-2.0
"""Quotas and queues decide the same after they are written and read."""

import pytest

from hami_common.errors import WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import Account, AllocationRecord
from hami_common.model.placement import ContainerShares, Share
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.documents import QuotaMemory, quota_of, resource_of, written
from hami_core.quota.queues import QueueConfig, QueueTree
from hami_core.quota.resourcequota import EVERY_VENDOR, KINDS, Limit, Quota, Resource, Scope

MEMORY = Resource("nvidia", "memory_mib")
ALL_MEMORY = Resource(EVERY_VENDOR, "memory_mib")
FAMILY = Resource("huawei.com/Ascend910B4", "devices")
QUEUES = (
    QueueConfig(name="top", guaranteed={"memory_mib": 900}),
    QueueConfig(name="a", parent="top", guaranteed={"memory_mib": 500}, namespaces=("team-a",)),
    QueueConfig(name="b", parent="top", limit={"nvidia/devices": 7}, namespaces=("team-b",)),
)


def record(uid: str, mib: int, *, namespace: str = "team-a") -> AllocationRecord:
    share = Share(vendor="nvidia", uuid=f"GPU-{uid}", memory_mib=mib)
    return AllocationRecord(
        op="reserve",
        allocation_id=f"id-{uid}",
        node="n1",
        pod_uid=uid,
        namespace=namespace,
        pod=uid,
        containers=(ContainerShares(name="m", kind="app", shares=(share,)),),
        account=Account(priority_class="high"),
    )


def ledger() -> QuotaLedger:
    found = QuotaLedger()
    scope = Scope(name="PriorityClass", operator="In", values=("high", "low"))
    limits = {
        MEMORY: Limit(key="limits.nvidia.com/gpumem", most=800),
        FAMILY: Limit(key="limits.huawei.com/Ascend910B4", problem="is no number"),
    }
    found.put_quota(Quota(namespace="team-a", name="q", limits=limits, scopes=(scope,)))
    found.set_tree(QueueTree(QUEUES, vendors=("nvidia",)))
    found.synced()
    found.fold(3, record("u1", 300))
    found.fold(5, record("u2", 600))
    found.fold(6, record("u3", 100, namespace="team-b"))
    found.expect(record("u4", 50))
    found.claim("u5", "team-b", Account(is_spot=True), {ALL_MEMORY: 200})
    return found


def test_ledger_of_quotas_restored_from_a_document_gives_the_same_answers() -> None:
    first = ledger()
    assert first.verdict(5) is not None
    told = codec.decode(codec.encode(first.memory()), QuotaMemory, what="memory")
    assert told == first.memory()
    second = QuotaLedger()
    second.resume(told)
    assert second.memory() == told
    assert second.quota_rows() == first.quota_rows()
    assert second.queue_rows() == first.queue_rows()
    for found in (first, second):
        found.fold(8, record("u4", 50))
        found.fold(9, record("u6", 1))
    assert [second.verdict(seq) for seq in (3, 5, 8, 9)] == [
        first.verdict(seq) for seq in (3, 5, 8, 9)
    ]
    high = Account(priority_class="high")
    for namespace in ("team-a", "team-b"):
        for mib in (0, 1, 100, 500, 5000):
            wanted = {MEMORY: mib, ALL_MEMORY: mib}
            answers = [
                found.first_look(namespace, high, wanted, waits="u5".__eq__)
                for found in (first, second)
            ]
            assert answers[0] == answers[1]


def test_quota_is_read_back_as_it_was_written() -> None:
    (quota,) = ledger().quotas()
    assert quota_of(written(quota)) == quota


@pytest.mark.parametrize("vendor", [EVERY_VENDOR, "nvidia", "huawei.com/Ascend910B4"])
def test_text_of_a_resource_is_read_back(vendor: str) -> None:
    for kind in KINDS:
        assert resource_of(str(Resource(vendor, kind))) == Resource(vendor, kind)


def test_unknown_resource_is_reported() -> None:
    with pytest.raises(WireInvalid, match="'nvidia/bytes' is none; write one of memory_mib"):
        resource_of("nvidia/bytes")
