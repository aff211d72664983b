# SPDX-License-Identifier: Apache-2.0
"""Sums in the order of the ledger's stream, and verdicts on its records."""

from typing import Any

from msgspec.structs import replace

from hami_common.events.allocation import Account, AllocationRecord
from hami_common.model.placement import ContainerShares, Share
from hami_core.quota.accounts import TEXT_BYTES, QuotaLedger, unknown_queue
from hami_core.quota.queues import QueueConfig, QueueTree
from hami_core.quota.resourcequota import Limit, Quota, Resource, Scope

MEMORY = Resource("nvidia", "memory_mib")
ALL_MEMORY = Resource("", "memory_mib")
DEVICES = Resource("nvidia", "devices")
KEY = "limits.nvidia.com/gpumem"


def record(uid: str, mib: int, *, namespace: str = "team-a", **changes: Any) -> AllocationRecord:
    share = Share(vendor="nvidia", uuid=f"GPU-{uid}", memory_mib=mib)
    fields: dict[str, Any] = {
        "op": "reserve",
        "allocation_id": f"id-{uid}",
        "node": "n1",
        "pod_uid": uid,
        "namespace": namespace,
        "pod": uid,
        "containers": (ContainerShares(name="m", kind="app", shares=(share,)),),
        **changes,
    }
    return AllocationRecord(**fields)


def released(uid: str, **changes: Any) -> AllocationRecord:
    return replace(record(uid, 0, **changes), op="release", containers=())


def quota(most: int, *, name: str = "q", **fields: Any) -> Quota:
    limits = {MEMORY: Limit(key=KEY, most=most)}
    return Quota(**{"namespace": "team-a", "name": name, "limits": limits, **fields})


def ledger(*quotas: Quota) -> QuotaLedger:
    found = QuotaLedger()
    for one in quotas:
        found.put_quota(one)
    found.synced()
    return found


def text_of(found: QuotaLedger, mib: int, **fields: Any) -> str:
    account = fields.pop("account", None)
    refusal = found.first_look("team-a", account, {MEMORY: mib, ALL_MEMORY: mib}, **fields)
    return "" if refusal is None else refusal.text


def test_sum_of_a_namespace_is_limited_and_the_text_has_the_arithmetic() -> None:
    found = ledger(quota(6000))
    found.fold(1, record("a", 4096))
    assert text_of(found, 1904) == ""
    assert text_of(found, 4096) == (
        'ResourceQuotaNotFit: quota "q" limits.nvidia.com/gpumem: 4096 MiB wanted, 4096 used,'
        " limit 6000"
    )
    found.fold(2, released("a"))
    assert text_of(found, 6000) == ""


def test_quota_created_after_the_pods_counts_them() -> None:
    found = ledger()
    found.fold(1, record("a", 500))
    found.fold(2, record("b", 500, namespace="team-b"))
    found.put_quota(quota(1000))
    assert text_of(found, 500) == ""
    assert "500 used" in text_of(found, 501)
    assert found.drop_quota("team-a", "q")
    assert not found.drop_quota("team-a", "q")
    assert text_of(found, 5000) == ""
    found.put_quota(quota(1000))
    assert "500 used" in text_of(found, 501)


def test_of_several_quotas_the_tightest_holds() -> None:
    found = ledger(quota(1000), quota(800, name="tight"), quota(900, name="mid"))
    assert 'quota "tight"' in text_of(found, 1100)
    assert 'quota "tight"' in text_of(found, 850)
    assert text_of(found, 800) == ""


def test_limit_of_zero_refuses_every_request() -> None:
    found = ledger(quota(0))
    assert "limit 0" in text_of(found, 1)
    assert found.first_look("team-a", None, {DEVICES: 1}) is None


def test_unreadable_limit_reports_its_problem() -> None:
    limits = {MEMORY: Limit(key=KEY, problem="'10Gi' looks like bytes; write 10240")}
    assert "write 10240" in text_of(ledger(quota(0, limits=limits)), 1)


def test_scoped_quota_counts_the_pods_in_its_scope() -> None:
    high = Account(priority_class="high")
    scope = Scope(name="PriorityClass", operator="In", values=("high",))
    found = ledger(quota(1000, scopes=(scope,)))
    found.fold(1, record("a", 600, account=high))
    found.fold(2, record("b", 5000))
    assert text_of(found, 9000) == ""
    assert "600 used" in text_of(found, 500, account=high)
    assert found.governs("team-a", high)
    assert not found.governs("team-a", None)
    assert not found.governs("team-b", high)


def test_record_is_judged_at_its_position_in_the_stream() -> None:
    found = ledger(quota(1000))
    found.fold(1, record("a", 600))
    found.fold(2, record("b", 600))
    found.fold(3, released("a"))
    assert found.verdict(1) is None
    second = found.verdict(2)
    assert second is not None
    assert "600 MiB wanted, 600 used, limit 1000" in second.text


def test_record_to_be_rolled_back_counts_until_it_is_released() -> None:
    found = ledger(quota(1000))
    for seq, uid in enumerate("abc", start=1):
        found.fold(seq, record(uid, 600))
    assert found.verdict(3) is not None
    found.fold(4, released("b"))
    found.fold(5, released("c"))
    found.fold(6, record("d", 400))
    assert found.verdict(6) is None


def test_renewed_record_counts_once() -> None:
    found = ledger(quota(1000))
    found.fold(1, record("a", 600))
    found.fold(2, record("a", 600, reason="renewed"))
    assert found.verdict(2) is None
    assert "600 used" in text_of(found, 500)


def test_records_seen_twice_count_once() -> None:
    found = ledger(quota(1000))
    found.fold(1, record("a", 600))
    found.fold(2, released("a"))
    found.fold(1, record("a", 600))
    assert text_of(found, 1000) == ""


def test_own_reservation_of_the_pod_is_given_up_for_the_new_one() -> None:
    found = ledger(quota(1000))
    found.fold(1, record("a", 600))
    assert text_of(found, 1000, own=[("n1", "a")]) == ""
    assert "600 used" in text_of(found, 1000)


def test_reservation_under_way_counts_until_the_stream_shows_it() -> None:
    found = ledger(quota(1000))
    found.expect(record("a", 600))
    assert "600 used" in text_of(found, 500)
    found.fold(1, record("a", 600))
    assert found.verdict(1) is None
    assert text_of(found, 400) == ""
    found.expect(record("b", 600))
    found.stop_expecting("id-b")
    assert text_of(found, 400) == ""


def test_no_record_is_judged_before_the_stream_is_synced() -> None:
    found = QuotaLedger()
    found.put_quota(quota(100))
    found.fold(1, record("a", 600))
    assert found.verdict(1) is None
    assert "600 used" in text_of(found, 1)


def test_emptied_ledger_drops_bookings_and_keeps_quotas() -> None:
    found = ledger(quota(1000))
    found.set_tree(QueueTree([QueueConfig(name="x", limit={"memory_mib": 900}, namespaces=("*",))]))
    found.fold(7, record("a", 600))
    generation = found.generation
    found.reset()
    assert (found.seq, found.generation) == (0, generation + 1)
    assert text_of(found, 900) == ""
    assert text_of(found, 901) != ""


def test_queues_hold_pods_of_several_namespaces() -> None:
    found = ledger()
    found.fold(1, record("a", 100))
    tree = QueueTree(
        [
            QueueConfig(name="x", limit={"memory_mib": 1000}, namespaces=("team-a", "team-b")),
            QueueConfig(name="y", allowed_namespaces=("team-a",)),
        ]
    )
    found.set_tree(tree)
    found.fold(2, record("b", 300, namespace="team-b"))
    found.fold(3, record("c", 5000, account=Account(queue="y")))
    assert text_of(found, 600) == ""
    assert text_of(found, 601) == (
        "QueueOverLimit: queue x memory_mib: 601 MiB wanted, 400 used, limit 1000"
    )
    assert text_of(found, 601, account=Account(queue="y")) == ""
    found.expect(record("d", 500, namespace="team-b"))
    assert "900 used" in text_of(found, 200)
    assert found.verdict(2) is None
    rows = {row.queue: row for row in found.queue_rows()}
    assert (rows["x"].used, rows["x"].limit, rows["y"].used) == (400, 1000, 5000)
    assert rows["x"].guaranteed == rows["x"].borrowed == 0


def test_quota_of_the_namespace_is_checked_before_the_queue() -> None:
    found = ledger(quota(100))
    found.set_tree(QueueTree([QueueConfig(name="x", limit={"memory_mib": 50}, namespaces=("*",))]))
    assert text_of(found, 200).startswith("ResourceQuotaNotFit")
    assert text_of(found, 80).startswith("QueueOverLimit")


def test_queue_waits_for_the_turn_of_a_pending_pod() -> None:
    found = ledger()
    found.set_tree(
        QueueTree(
            [
                QueueConfig(name="x", namespaces=("team-a",)),
                QueueConfig(name="y", namespaces=("team-b",)),
                QueueConfig(name="idle", guaranteed={"memory_mib": 100}),
            ]
        )
    )
    found.fold(1, record("a", 50))
    found.claim("uid-b", "team-b", None, {ALL_MEMORY: 40})
    waiting = {"uid-b"}
    assert found.queue_rows()[1].waiting == 1
    text = text_of(found, 10, waits=waiting.__contains__)
    assert text == (
        "QueueWaitsItsTurn: queue x memory_mib: 10 MiB wanted, 50 used, 0 guaranteed,"
        " y borrows first"
    )
    assert text_of(found, 10) == "", "turns are asked for placing only"
    waiting.clear()
    assert text_of(found, 10, waits=waiting.__contains__) == ""
    assert text_of(found, 51).startswith("QueueCannotBorrow")


def test_rows_list_every_limit() -> None:
    found = ledger(quota(1000), quota(500, name="r"))
    found.fold(1, record("a", 300))
    assert [(row.quota, row.resource, row.used, row.limit) for row in found.quota_rows()] == [
        ("q", "nvidia/memory_mib", 300, 1000),
        ("r", "nvidia/memory_mib", 300, 500),
    ]


def test_texts_are_one_short_line_of_ascii() -> None:
    found = ledger(quota(1, name="q" * 200 + "é\n"))
    for text in (text_of(found, 10**12), unknown_queue("ä" * 300, "n" * 63).text):
        assert len(text) <= TEXT_BYTES
        assert text.isascii()
        assert "\n" not in text


# --- headroom -------------------------------------------------------------------------------------


def headroom(found: QuotaLedger, namespace: str = "team-a") -> dict[str, tuple[int | None, str]]:
    return {row.resource: (row.amount, row.code) for row in found.headroom(namespace)}


def test_headroom_is_what_the_tightest_quota_leaves() -> None:
    found = ledger(quota(6000), quota(5000, name="tight"))
    found.fold(1, record("a", 4096))
    assert headroom(found) == {"nvidia/memory_mib": (904, "ResourceQuotaNotFit")}
    assert text_of(found, 904) == ""
    assert "905 MiB wanted" in found.headroom("team-a")[0].text
    found.put_quota(quota(4000))
    assert headroom(found) == {"nvidia/memory_mib": (0, "ResourceQuotaNotFit")}
    assert headroom(found, "team-b") == {}


def test_headroom_includes_what_the_queue_may_borrow() -> None:
    found = ledger()
    queues = [
        QueueConfig(name="a", guaranteed={"memory_mib": 4000}, namespaces=("team-a",)),
        QueueConfig(name="b", guaranteed={"memory_mib": 3000}, namespaces=("team-b",)),
    ]
    found.set_tree(QueueTree(queues))
    found.fold(1, record("a", 1000))
    assert headroom(found) == {"memory_mib": (6000, "QueueCannotBorrow")}
    found.fold(2, record("b", 2000, namespace="team-b"))
    assert headroom(found) == {"memory_mib": (4000, "QueueCannotBorrow")}
    assert headroom(found, "team-b") == {"memory_mib": (4000, "QueueCannotBorrow")}
    assert found.headroom("team-b")[0].queue == "b"


def test_request_above_a_limit_can_never_start() -> None:
    found = ledger(quota(6000))
    found.set_tree(
        QueueTree(
            [
                QueueConfig(
                    name="a", guaranteed={"memory_mib": 4000}, namespaces=("team-a", "team-b")
                )
            ]
        )
    )
    assert found.never("team-a", None, {MEMORY: 6001})
    assert found.never("team-b", None, {ALL_MEMORY: 4001})
    assert not found.never("team-a", None, {MEMORY: 6000, ALL_MEMORY: 4000})
    found.fold(1, record("a", 4000))
    assert not found.never("team-a", None, {MEMORY: 4000, ALL_MEMORY: 4000})


def test_other_pods_do_not_wait_for_the_turn_of_a_spot_pod() -> None:
    found = ledger()
    found.set_tree(
        QueueTree(
            [
                QueueConfig(name="x", namespaces=("team-a",)),
                QueueConfig(name="y", namespaces=("team-b",)),
                QueueConfig(name="idle", guaranteed={"memory_mib": 100}),
            ]
        )
    )
    spot = Account(is_spot=True)
    found.fold(1, record("a", 50))
    found.claim("uid-b", "team-b", spot, {ALL_MEMORY: 40})
    assert text_of(found, 10, waits=lambda _: True) == ""
    assert text_of(found, 10, account=spot, waits=lambda _: True).startswith("QueueWaitsItsTurn")


def test_spot_pods_of_other_queues_leave_by_priority() -> None:
    found = ledger()
    found.set_tree(
        QueueTree(
            [
                QueueConfig(name="x", namespaces=("team-a",)),
                QueueConfig(name="y", namespaces=("team-b",), guaranteed={"memory_mib": 1000}),
            ]
        )
    )
    spot = Account(is_spot=True)
    cheap = record("cheap", 100, namespace="team-b", account=spot)
    own = record("own", 100, namespace="team-b")
    found.fold(1, cheap)
    found.fold(2, own)
    lenders = found.lenders("team-a", spot, {ALL_MEMORY: 100})
    assert lenders.uses(cheap, by_priority=True) == ()
    assert lenders.uses(own, by_priority=True) is None, "the guarantee of y"
    assert lenders.uses(cheap, by_priority=False) is None
