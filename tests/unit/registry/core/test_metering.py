# SPDX-License-Identifier: Apache-2.0
"""Device time of allocations: hand-computed cases."""

from typing import Any

import pytest
from msgspec import structs

from hami_common.errors import RequestInvalid, SettingsInvalid
from hami_common.events.allocation import Account, AllocationRecord
from hami_common.events.idle import IdleActionRecord
from hami_common.events.inventory import NodeDevices
from hami_common.events.usage import ContainerUsage, ShareUsage, UsageRecord
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.prices import Prices
from hami_registry.core.consumption import Consumption, IdleList, Meter, interval
from tests.support.builders import device

EURO = Prices(currency="EUR", device_hour={"nvidia a100": 3.6})


def devices(*uuids: str, time_s: float = 0.0, node: str = "n", **more: Any) -> NodeDevices:
    boot_id = more.pop("boot_id", "b")
    return NodeDevices(
        node=node,
        vendor="nvidia",
        boot_id=boot_id,
        seq=int(time_s) + 1,
        time_s=time_s,
        config_generation=1,
        devices=tuple(
            device(uuid, index=i, memory_mib=1000, **more) for i, uuid in enumerate(uuids)
        ),
    )


def record(
    time_s: float,
    mib: int = 500,
    op: str = "reserve",
    *,
    core: int = 0,
    uuids: tuple[str, ...] = ("a",),
    exclusive: bool = False,
    **more: Any,
) -> AllocationRecord:
    shares = tuple(
        Share(vendor="nvidia", uuid=uuid, memory_mib=mib, core_pct=core, exclusive=exclusive)
        for uuid in uuids
    )
    pod = more.pop("pod", "p")
    return AllocationRecord(
        **{
            "op": op,
            "allocation_id": f"x-{pod}",
            "node": "n",
            "pod_uid": f"uid-{pod}",
            "namespace": "team-a",
            "pod": pod,
            "time_s": time_s,
            "containers": ()
            if op == "release"
            else (ContainerShares(name="main", kind="app", shares=shares),),
            **more,
        }
    )


def usage(
    time_s: float, *, device_s: float = 0.0, mib: int = 0, pod: str = "p", **more: Any
) -> UsageRecord:
    counters = {"launches": 1, "waited_s": 0.0, "refusals": 0, **more}
    core_pct = counters.pop("core_pct", 0)
    who: dict[str, Any] = {
        "namespace": "team-a",
        "pod": pod,
        "pod_uid": f"uid-{pod}",
        "container": "main",
    }
    return UsageRecord(
        node="n",
        boot_id="b",
        seq=int(time_s) + 1,
        time_s=time_s,
        every_s=60.0,
        shares=(
            ShareUsage(
                **who,
                vendor="nvidia",
                uuid="a",
                allocation_id=f"x-{pod}",
                used_mib=mib,
                core_pct=core_pct,
            ),
        ),
        containers=(ContainerUsage(**who, device_time_s=device_s, **counters),),
    )


def nothing(time_s: float) -> UsageRecord:
    return UsageRecord(node="n", boot_id="b", seq=int(time_s) + 1, time_s=time_s, every_s=60.0)


def meter(*records: Any, to_s: float = 1000.0, **more: Any) -> Meter:
    return Meter.of(
        **{
            "ledger": [one for one in records if isinstance(one, AllocationRecord)],
            "devices": [one for one in records if isinstance(one, NodeDevices)],
            "usage": [one for one in records if isinstance(one, UsageRecord)],
            "from_s": 0.0,
            "to_s": to_s,
            "prices": EURO,
            **more,
        }
    )


def consumed(*records: Any, by: Any = "namespace", namespace: str = "", **more: Any) -> Consumption:
    return meter(*records, **more).consumption(by=by, namespace=namespace)


def idle(*records: Any, minutes: int = 5, actions: Any = (), **more: Any) -> IdleList:
    return meter(*records, **more).idle(minutes=minutes, actions=actions)


def test_half_the_memory_for_an_interval_is_half_of_the_device_time() -> None:
    found = consumed(devices("a"), record(100.0), record(300.0, op="release"))
    (row,) = found.items
    assert (row.name, row.allocations) == ("team-a", 1)
    assert row.reserved_s == 100.0
    assert row.memory_mib_s == 500 * 200
    assert (row.whole_s, row.saved_s, row.occupied_s) == (200.0, 100.0, 200.0)
    assert row.cost == pytest.approx(3.6 * 100 / 3600)
    assert row.whole_cost == pytest.approx(3.6 * 200 / 3600)
    assert row.unmeasured_s == 100.0
    fleet = found.fleet
    assert fleet is not None
    assert (fleet.capacity_s, fleet.free_s, fleet.overlap_s) == (1000.0, 900.0, 0.0)
    assert (fleet.capacity_mib_s, fleet.free_mib_s) == (1_000_000.0, 900_000.0)


def test_the_larger_part_of_memory_and_compute_counts() -> None:
    found = consumed(devices("a"), record(0.0, 100, core=30), record(0.0, 800, core=10, pod="q"))
    assert found.total.reserved_s == 300.0 + 800.0
    fleet = found.fleet
    assert fleet is not None
    # 90 % of the memory and 40 % of the compute are taken: 10 % of the device are free.
    assert (fleet.free_s, fleet.overlap_s) == (100.0, 200.0)
    assert (fleet.free_core_pct_s, found.total.core_pct_s) == (60_000.0, 40_000.0)


def test_an_exclusive_share_reserves_the_whole_device() -> None:
    found = consumed(devices("a", capacity_mib=2000), record(0.0, 1000, core=100, exclusive=True))
    assert found.total.reserved_s == 1000.0
    assert found.total.memory_mib_s == 2_000_000.0
    assert found.fleet is not None
    assert found.fleet.free_mib_s == found.fleet.free_s == 0.0


def test_a_resize_counts_from_its_time_on() -> None:
    found = consumed(devices("a"), record(0.0, 500), record(400.0, 250, op="resize"))
    assert found.total.memory_mib_s == 500 * 400 + 250 * 600


def test_duplicates_and_their_order_change_nothing() -> None:
    told = [
        devices("a"),
        record(100.0),
        record(200.0, 250, op="resize"),
        record(300.0, op="release"),
    ]
    told += [usage(60.0 * i, device_s=6.0 * i, mib=100) for i in range(6)]
    assert consumed(*told) == consumed(*reversed(told), *told)


def test_a_renewed_reservation_begins_once() -> None:
    found = consumed(devices("a"), record(100.0), record(150.0, reason="renewed"))
    assert found.total.reserved_s == 450.0


def test_a_release_by_a_clock_that_lags_ends_only_its_own_allocation() -> None:
    found = consumed(
        devices("a"),
        record(100.0),
        record(200.0, allocation_id="y"),
        record(250.0, op="release"),
    )
    assert found.total.reserved_s == 450.0
    assert found.total.allocations == 2


def test_a_hold_that_awaits_a_pod_counts_after_that_pod() -> None:
    found = consumed(
        devices("a"),
        record(0.0, 1000),
        record(100.0, 1000, pod="q", awaits=("uid-p",)),
        record(130.0, op="release"),
        by="pod",
    )
    assert [(row.name, row.reserved_s) for row in found.items] == [
        ("team-a/q", 870.0),
        ("team-a/p", 130.0),
    ]


def test_an_unknown_begin_is_counted_and_not_guessed() -> None:
    told = [devices("a"), record(300.0, op="release"), record(400.0, op="resize", pod="q")]
    found = consumed(*told)
    assert found.unknown == 2
    assert found.total.reserved_s == 300.0


def test_a_share_of_a_device_that_no_record_describes_is_unknown() -> None:
    found = consumed(record(100.0))
    assert (found.unknown, found.total.reserved_s) == (1, 0.0)


def test_a_device_that_its_node_no_longer_lists_offers_what_is_held() -> None:
    found = consumed(devices("a"), devices(time_s=500.0), record(0.0, 400))
    assert found.fleet is not None
    assert found.fleet.capacity_s == 500.0 + 200.0
    assert found.fleet.free_s == 300.0
    assert found.total.reserved_s == 400.0


def test_a_node_counts_since_its_agent_started() -> None:
    found = consumed(
        devices("a", time_s=1_763_683_600.0, boot_id="1763683200000-1a2b"),
        from_s=1_763_683_100.0,
        to_s=1_763_683_700.0,
    )
    assert found.fleet is not None
    assert found.fleet.capacity_s == 500.0


def test_use_is_the_larger_part_and_the_rest_is_wasted_or_unmeasured() -> None:
    found = consumed(
        devices("a"),
        record(0.0),
        nothing(0.0),
        usage(60.0, device_s=6.0, mib=100),  # 10 % of memory, 10 % of compute
        usage(120.0, device_s=24.0, mib=100),  # 30 % of compute
        usage(180.0, device_s=84.0, mib=100),  # 100 %: more than the share
        usage(240.0, device_s=84.0, mib=250),  # idle
    )
    total = found.total
    assert total.used_s == 6 + 18 + 30 + 15
    assert total.wasted_s == 120 - total.used_s
    assert total.unmeasured_s == 500 - 120
    assert total.idle_s == 30.0
    assert total.device_time_s == 84.0
    assert total.used_mib_s == 60 * (100 + 100 + 100 + 250)
    assert total.wasted_cost == pytest.approx(3.6 * 51 / 3600)


def test_counters_that_fall_began_again_from_zero() -> None:
    found = consumed(
        devices("a"),
        record(0.0),
        nothing(0.0),
        usage(60.0, device_s=30.0, waited_s=9.0, refusals=4),
        usage(120.0, device_s=6.0, waited_s=1.0, refusals=1),
    )
    total = found.total
    assert (total.device_time_s, total.throttled_s, total.refusals) == (36.0, 10.0, 5)


def test_counters_before_the_first_sample_of_the_node_do_not_count() -> None:
    found = consumed(
        devices("a"), record(0.0), usage(60.0, device_s=30.0), usage(120.0, device_s=31.0)
    )
    assert found.total.device_time_s == 1.0
    assert found.total.unmeasured_s == 500 - 30


def test_a_lost_sample_is_made_up_for_and_a_long_silence_is_unmeasured() -> None:
    told = [devices("a"), record(0.0), nothing(0.0), usage(60.0, device_s=1.0)]
    assert consumed(*told, usage(180.0, device_s=2.0)).total.unmeasured_s == 500 - 90
    found = consumed(*told, usage(960.0, device_s=2.0))
    assert found.total.unmeasured_s == 500 - 30 - 300
    assert found.total.device_time_s == 2.0


def test_the_drivers_utilization_counts_where_no_limiter_does() -> None:
    found = consumed(devices("a"), record(0.0), nothing(0.0), usage(60.0, launches=0, core_pct=40))
    assert found.total.used_s == 24.0
    assert found.total.device_time_s == 0.0


def test_groups_add_up_to_the_total() -> None:
    told = [
        devices("a", "b"),
        devices("c", node="m", type="H200"),
        record(0.0),
        record(0.0, pod="q", namespace="team-b", uuids=("a", "b"), account=Account(queue="gold")),
        record(0.0, pod="r", node="m", uuids=("c",), exclusive=True),
    ]
    names = {}
    for by in ("namespace", "queue", "model", "node", "pod"):
        found = consumed(*told, by=by)
        names[by] = [row.name for row in found.items]
        assert sum(row.reserved_s for row in found.items) == found.total.reserved_s == 2500.0
    assert names == {
        "namespace": ["team-a", "team-b"],
        "queue": ["", "gold"],
        "model": ["NVIDIA A100", "H200"],
        "node": ["n", "m"],
        "pod": ["team-a/r", "team-b/q", "team-a/p"],
    }
    found = consumed(*told)
    assert found.unpriced == ("H200",)
    assert found.total.occupied_s == 3000.0


def test_a_service_and_seven_variants_take_two_devices_instead_of_eight() -> None:
    told: list[Any] = [devices("a", "b")]
    for number in range(8):
        uuid = "ab"[number % 2]
        told.append(record(0.0, 250, uuids=(uuid,), pod=f"variant-{number}"))
    total = consumed(*told, to_s=3600.0).total
    assert (total.whole_s, total.occupied_s, total.reserved_s) == (8 * 3600, 2 * 3600, 2 * 3600)
    assert total.cost == pytest.approx(7.2)
    assert total.whole_cost == pytest.approx(28.8)


def test_a_tenant_gets_its_own_time_and_no_capacity() -> None:
    told = [devices("a"), record(0.0), record(0.0, pod="q", namespace="team-b")]
    found = consumed(*told, namespace="team-b")
    assert [row.name for row in found.items] == ["team-b"]
    assert found.total.reserved_s == 500.0
    assert found.fleet is None


def test_without_prices_there_is_no_money() -> None:
    found = consumed(devices("a"), record(0.0), prices=Prices())
    assert (found.currency, found.unpriced, found.total.cost) == ("", (), None)


def test_an_idle_share_is_listed_with_its_lost_time() -> None:
    told = [devices("a"), record(0.0), nothing(0.0), usage(60.0, device_s=5.0)]
    told += [usage(60.0 * i, device_s=5.0) for i in range(2, 17)]
    (share,) = idle(*told).items
    assert (share.pod, share.node, share.model) == ("p", "n", "NVIDIA A100")
    assert (share.since_s, share.is_since_known, share.measured_by) == (60.0, True, "limiter")
    assert share.lost_s == 470.0
    assert share.cost == pytest.approx(3.6 * 470 / 3600)
    assert idle(*told, minutes=16).items == ()


def test_samples_that_a_reader_skips_leave_no_gap() -> None:
    told = [devices("a"), record(0.0)]
    told += [structs.replace(usage(300.0 * i), every_s=1.0) for i in range(4)]
    (share,) = idle(*told, to_s=960.0).items
    assert share.since_s == 0.0


def test_a_share_is_not_idle_while_it_works_or_is_not_measured_or_released() -> None:
    told = [devices("a"), record(0.0), nothing(0.0)]
    told += [usage(60.0 * i, device_s=5.0) for i in range(1, 16)]
    assert idle(*told, usage(960.0, device_s=6.0)).items == ()
    assert idle(*told, to_s=2000.0).items == ()
    assert idle(*told, record(950.0, op="release")).items == ()
    assert idle(devices("a"), record(0.0)).items == ()


def test_the_saving_of_a_fixture_computed_by_hand() -> None:
    """Two devices for 1000 s; sharing against a whole device for each container.

    ====== ============ ======= ======== ============ ==========
    pod    part         seconds reserved whole device saved
    ====== ============ ======= ======== ============ ==========
    web    1/2 of ``a``    1000      500         1000        500
    train  1/4 of ``a``     800      200          800        600
    batch  all of ``b``     400      400          400          0
    total                          1100         2200       1100
    ====== ============ ======= ======== ============ ==========

    At 3.6 an hour, a device second costs 0.001: 1.10 instead of 2.20.
    """
    found = consumed(
        devices("a", "b"),
        record(0.0, 500, pod="web"),
        record(100.0, 250, pod="train", namespace="team-b"),
        record(900.0, op="release", pod="train", namespace="team-b"),
        record(500.0, 1000, pod="batch", uuids=("b",), exclusive=True),
        record(900.0, op="release", pod="batch"),
    )
    total = found.total
    assert (total.reserved_s, total.whole_s, total.saved_s) == (1100.0, 2200.0, 1100.0)
    assert total.cost == pytest.approx(1.10)
    assert total.whole_cost == pytest.approx(2.20)
    saved = {row.name: (row.reserved_s, row.saved_s) for row in found.items}
    assert saved == {"team-a": (900.0, 500.0), "team-b": (200.0, 600.0)}
    assert found.fleet is not None
    assert found.fleet.capacity_s - found.fleet.free_s == total.reserved_s


def test_time_is_summed_up_by_sku_class_and_recorded_label() -> None:
    told = [
        devices("a"),
        record(0.0, 500, pod="p", sku="s-8g@2", service_class="spot", labels=(("team", "red"),)),
        record(0.0, 250, pod="q", sku="s-8g@3", service_class="spot", labels=(("app", "x"),)),
        record(0.0, 100, pod="r"),
    ]

    def rows(by: Any, **more: Any) -> dict[str, float]:
        found = meter(*told).consumption(by=by, **more)
        assert found.label == more.get("label", "")
        return {row.name: row.reserved_s for row in found.items}

    assert rows("sku") == {"s-8g@2": 500.0, "s-8g@3": 250.0, "": 100.0}
    assert rows("class") == {"spot": 750.0, "": 100.0}
    assert rows("label", label="team") == {"red": 500.0, "": 350.0}
    assert rows("label", label="app") == {"x": 250.0, "": 600.0}


def test_time_is_overcommitted_while_shares_reserve_more_than_the_memory() -> None:
    found = consumed(
        devices("a", capacity_mib=2000),
        record(0.0, 800, pod="p"),
        record(200.0, 600, pod="q"),
        record(700.0, op="release", pod="q"),
    )
    # Both from 200 s to 700 s: 0.4 and 0.3 of the capacity.
    assert found.total.overcommitted_s == pytest.approx(0.7 * 500)
    alone = consumed(devices("a", capacity_mib=2000), record(0.0, exclusive=True))
    assert alone.total.overcommitted_s == 0


def test_an_idle_share_has_the_newest_action_of_its_idle_time() -> None:
    told = [devices("a"), record(0.0), nothing(0.0)]
    told += [usage(60.0, device_s=5.0), *(usage(60.0 * i, device_s=5.0) for i in range(2, 17))]
    action = IdleActionRecord(
        policy="evict",
        outcome="refused",
        node="n",
        pod_uid="uid-p",
        allocation_id="x-p",
        namespace="team-a",
        pod="p",
        since_s=60.0,
        time_s=800.0,
        code="active",
    )
    (share,) = idle(*told, to_s=960.0, actions=[action]).items
    assert share.action is not None
    assert (share.action.policy, share.action.outcome) == ("evict", "refused")
    assert (share.action.code, share.action.time_s) == ("active", 800.0)
    earlier = structs.replace(action, time_s=30.0)
    other = structs.replace(action, allocation_id="y")
    for one in (earlier, other):
        assert idle(*told, to_s=960.0, actions=[one]).items[0].action is None


def test_idle_since_before_the_measurement_is_reported() -> None:
    told = [devices("a"), record(-500.0)]
    told += [usage(60.0 * i, launches=0) for i in range(17)]
    (share,) = idle(*told).items
    assert (share.since_s, share.is_since_known, share.measured_by) == (0.0, False, "driver")


@pytest.mark.parametrize(
    ("prices", "problem"),
    [
        ({"currency": "Euro"}, "setting prices.currency: 'Euro' is no code of a currency"),
        ({"device_hour": {"*": 1.0}}, "setting prices.currency: '' is no code of a currency"),
        ({"currency": "EUR"}, "setting prices.device_hour: has no price"),
        (
            {"currency": "EUR", "device_hour": {"H200": -1.0}},
            "setting prices.device_hour.H200: -1.0 is no price; give 0 to 1000000",
        ),
        (
            {"currency": "EUR", "device_hour": {"H200": float("nan")}},
            "setting prices.device_hour.H200: nan is no price",
        ),
        (
            {"currency": "EUR", "device_hour": {"H200": 1.0, "h200": 1.0}},
            "setting prices.device_hour.h200: is given twice",
        ),
    ],
)
def test_unusable_prices_name_the_field(prices: Any, problem: str) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        Prices(**prices).check()
    assert problem in str(caught.value)


def test_the_price_of_other_models_is_the_one_of_the_star() -> None:
    prices = Prices(currency="EUR", device_hour={"H200": 2.0, "*": 0.5})
    prices.check()
    Prices().check()
    price_of = prices.micros()
    assert (price_of("h200"), price_of("T4")) == (2_000_000, 500_000)


def test_the_interval_ends_now_at_the_latest() -> None:
    assert interval(None, None, now_s=100.0, default_s=60.0) == (40.0, 100.0)
    assert interval(10.0, 500.0, now_s=100.0, default_s=60.0) == (10.0, 100.0)
    with pytest.raises(RequestInvalid, match="is not before the end"):
        interval(200.0, None, now_s=100.0, default_s=60.0)
