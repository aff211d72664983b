# SPDX-License-Identifier: Apache-2.0
"""What-if: pods are placed as the scheduler would, and the closest fit is the closest there is."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.request import (
    ContainerRequest,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
)
from hami_scheduler.core.ledger import Ledger
from hami_scheduler.core.stimuli import FeedSynced, Repaired
from hami_scheduler.core.table import DeviceTable
from hami_scheduler.core.verdicts import Verdicts
from hami_scheduler.core.whatif import Change, closest_fits, packing, simulate


def device(node: str, number: int, **more: object) -> Device:
    given: dict[str, object] = {
        "uuid": f"{node}-{number}",
        "vendor": "nvidia",
        "index": number,
        "type": "T4",
        "memory_mib": 1000,
        "capacity_mib": 1000,
        "slots": 4,
        **more,
    }
    return msgspec.convert(given, Device)


def ledger_of(*nodes: tuple[str, list[Device]]) -> Ledger:
    table = DeviceTable()
    for name, devices in nodes:
        table.upsert_node(
            NodeDevices(
                node=name,
                vendor="nvidia",
                boot_id="",
                seq=1,
                time_s=0,
                config_generation=1,
                devices=tuple(devices),
            )
        )
    ledger = Ledger(table, writer="test")
    ledger.handle(FeedSynced(now_s=0))
    ledger.handle(Repaired(now_s=0))
    return ledger


def pod(name: str, *, count: int = 1, mib: int = 100, core: int = 0, **more: object) -> PodRequest:
    ask = DeviceRequest(
        vendor="nvidia", count=count, memory_mib=mib, core_pct=core, exclusive=core == 100
    )
    return PodRequest(
        uid=name,
        namespace="ns",
        name=name,
        containers=(ContainerRequest(name="main", kind="app", requests=(ask,)),),
        selectors={"nvidia": msgspec.convert(more, DeviceSelector)},
    )


def closest(ledger: Ledger, request: PodRequest) -> dict[str, Change]:
    found = closest_fits(ledger, Verdicts(ledger.table), request)
    assert [change.cost for change in found] == sorted(change.cost for change in found)
    return {change.what: change for change in found}


def test_each_pod_is_booked_before_the_next_is_asked_about() -> None:
    ledger = ledger_of(("a", [device("a", 0)]))
    outcomes = list(simulate(ledger, [pod(f"p{n}", mib=400) for n in range(3)], now_s=0))
    assert [outcome.node for outcome in outcomes] == ["a", "a", ""]
    assert outcomes[0].containers[0].shares[0].memory_mib == 400
    assert "200" in outcomes[2].refusals[0].text
    assert outcomes[2].refusals[0].nodes == 1
    ledger.check()


def test_the_largest_memory_that_fits_is_found_to_the_mib() -> None:
    ledger = ledger_of(("a", [device("a", 0)]), ("b", [device("b", 0)]))
    list(simulate(ledger, [pod("x", mib=377), pod("y", mib=700)], now_s=0))
    change = closest(ledger, pod("late", mib=900))["memory_mib"]
    assert (change.fits, change.node) == ("623", "a")
    assert change.cost == pytest.approx(1 - 623 / 900, abs=1e-4)
    assert str(change) == "container main: memory_mib 623 instead of 900 would fit on a"


@pytest.mark.parametrize(
    ("request_", "what", "fits"),
    [
        (pod("p", count=5, mib=10), "count", "2"),
        (pod("p", core=80), "core_pct", "50"),
        (pod("p", core=100), "core_pct", "50"),
        (pod("p", allow_types=["H100"]), "allow_types", "any"),
        (pod("p", deny_uuids=["a-0", "a-1"]), "deny_uuids", "any"),
    ],
)
def test_each_kind_of_change(request_: PodRequest, what: str, fits: str) -> None:
    ledger = ledger_of(("a", [device("a", n) for n in range(2)]))
    list(simulate(ledger, [pod("x", count=2, core=50)], now_s=0))
    assert closest(ledger, request_)[what].fits == fits


def test_nothing_is_offered_where_no_single_change_helps() -> None:
    ledger = ledger_of(("a", [device("a", 0, healthy=False)]))
    assert closest(ledger, pod("p")) == {}


def test_memory_and_compute_together_where_neither_alone_helps() -> None:
    ledger = ledger_of(("a", [device("a", 0)]), ("b", [device("b", 0)]))
    list(simulate(ledger, [pod("x", mib=600, core=50), pod("y", mib=900, core=10)], now_s=0))
    used = {node: ledger.table.usage(node, f"{node}-0") for node in ("a", "b")}
    assert {usage.memory_mib for usage in used.values() if usage} == {600, 900}
    found = closest(ledger, pod("late", mib=800, core=95))
    assert list(found) == ["memory_mib and core_pct"]
    change = found["memory_mib and core_pct"]
    assert (change.asked, change.fits) == ("800 and 95", "400 and 50")
    tries = [
        1 - mib / 800 * core / 95
        for mib in range(1, 801, 1)
        for core in (50, 90)
        if (core <= 50 and mib <= 400) or (core <= 90 and mib <= 100)
    ]
    assert change.cost == pytest.approx(min(tries), abs=1e-4)


def test_wish_to_be_alone_is_named_where_it_alone_keeps_the_pod_out() -> None:
    ledger = ledger_of(("a", [device("a", 0)]))
    list(simulate(ledger, [pod("x", mib=100)], now_s=0))
    alone = pod("late", mib=100)
    alone = msgspec.structs.replace(
        alone, policy=msgspec.structs.replace(alone.policy, device=("mutex", "binpack"))
    )
    change = closest(ledger, alone)["mutex"]
    assert (change.asked, change.fits) == ("mutex,binpack", "binpack")


@settings(max_examples=60, deadline=None)
@given(used=st.lists(st.integers(0, 1000), min_size=1, max_size=6), asked=st.integers(1001, 4000))
def test_closest_memory_equals_trying_every_amount(used: list[int], asked: int) -> None:
    ledger = ledger_of(*((f"n{n}", [device(f"n{n}", 0)]) for n in range(len(used))))
    for number, mib in enumerate(used):
        if mib:
            name = f"n{number}"
            request = pod(f"u{number}", mib=mib, allow_uuids=[f"{name}-0"])
            assert next(iter(simulate(ledger, [request], now_s=0))).node == name
    free = max(1000 - mib for mib in used)
    found = closest(ledger, pod("p", mib=asked)).get("memory_mib")
    assert (found.fits if found else "0") == str(free)


def test_packing_counts_what_cannot_be_used_any_more() -> None:
    devices = [device("a", n) for n in range(2)]
    ledger = ledger_of(("a", devices))
    known = [("a", one) for one in devices]
    wanted = [pod("w", mib=500)]
    empty = packing(ledger, known, wanted)
    assert (empty.devices_used, empty.stranded, empty.used_devices_full) == (0, 0.0, 0.0)
    list(simulate(ledger, [pod("x", mib=600)], now_s=0))
    some = packing(ledger, known, wanted)
    assert (some.devices, some.devices_used, some.booked_mib) == (2, 1, 600)
    assert some.used_devices_full == 0.6
    assert some.stranded == pytest.approx(400 / 1400, abs=1e-4)
