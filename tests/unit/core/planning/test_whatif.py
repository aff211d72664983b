# SPDX-License-Identifier: Apache-2.0
"""Simulation: pods are placed as by the scheduler, and the reported closest fit is the closest."""

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.events.allocation import Account
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device, Profile
from hami_common.model.request import (
    ContainerRequest,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
)
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import FeedSynced, Repaired
from hami_core.planning.whatif import (
    Change,
    Governed,
    Outcome,
    Scene,
    changes,
    simulate,
)
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.queues import QueueConfig, QueueTree
from hami_core.quota.resourcequota import Asker, Limit, Quota, Resource
from hami_core.table.table import DeviceTable


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
    found = changes(Scene(ledger, None), request)
    assert [change.cost for change in found] == sorted(change.cost for change in found)
    return {change.what: change for change in found}


def test_each_pod_is_booked_before_the_next_is_placed() -> None:
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
        (pod("p", allow_types=["H100"]), "nvidia.com/use-gputype", "any"),
        (pod("p", deny_uuids=["a-0", "a-1"]), "nvidia.com/nouse-gpuuuid", "any"),
    ],
)
def test_each_kind_of_change(request_: PodRequest, what: str, fits: str) -> None:
    ledger = ledger_of(("a", [device("a", n) for n in range(2)]))
    list(simulate(ledger, [pod("x", count=2, core=50)], now_s=0))
    assert closest(ledger, request_)[what].fits == fits


def test_mode_that_would_let_the_pod_in_is_offered_once() -> None:
    sizes = (Profile(name="1g", memory_mib=400, core_pct=25, size=1, starts=(0, 1)),)
    ledger = ledger_of(("a", [device("a", 0, mode="mig", partitions=sizes)]))
    several = changes(Scene(ledger, None), pod("p", count=2, mib=300))
    (change,) = [one for one in several if one.what == "nvidia.com/vgpu-mode"]
    assert (change.asked, change.fits, change.node) == ("none", "mig", "a")
    assert str(change) == "nvidia.com/vgpu-mode mig instead of none would fit on a"
    soft = changes(Scene(ledger, None), pod("p", mib=300, modes=["soft"]))
    assert [(one.what, one.fits) for one in soft] == [("nvidia.com/vgpu-mode", "any")]


def test_no_change_is_offered_where_no_single_change_suffices() -> None:
    ledger = ledger_of(("a", [device("a", 0, healthy=False)]))
    assert closest(ledger, pod("p")) == {}


@pytest.mark.timeout(30)  # a thousand filters, and long on a busy machine
def test_memory_and_compute_are_changed_together_where_neither_suffices() -> None:
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


def test_mutex_policy_is_named_where_it_alone_keeps_the_pod_out() -> None:
    ledger = ledger_of(("a", [device("a", 0)]))
    list(simulate(ledger, [pod("x", mib=100)], now_s=0))
    alone = pod("late", mib=100)
    alone = msgspec.structs.replace(
        alone, policy=msgspec.structs.replace(alone.policy, device=("mutex", "binpack"))
    )
    change = closest(ledger, alone)["hami.io/gpu-scheduler-policy"]
    assert (change.asked, change.fits) == ("mutex,binpack", "binpack")


def quotas_of(
    *,
    most_mib: int | None = None,
    tree: QueueTree | None = None,
    askers: Mapping[str, Asker] | None = None,
) -> Governed:
    """A quota of the pods' namespace, and queues."""
    quota = QuotaLedger()
    if most_mib is not None:
        limit = Limit(key="limits.nvidia.com/gpumem", most=most_mib)
        limits = {Resource("nvidia", "memory_mib"): limit}
        quota.put_quota(Quota(namespace="ns", name="q", limits=limits))
    quota.set_tree(tree or QueueTree())
    return Governed(quota, askers or {})


def refusals(outcome: Outcome) -> list[str]:
    return [refusal.text.partition(":")[0] for refusal in outcome.refusals]


def test_pods_are_placed_up_to_the_quota_and_the_remaining_amount_is_reported() -> None:
    ledger = ledger_of(("a", [device("a", 0), device("a", 1)]))
    governed = quotas_of(most_mib=1000)
    wanted = [pod("p0", mib=600), pod("p1", mib=500), pod("p2", mib=5000), pod("p3", mib=400)]
    outcomes = list(simulate(ledger, wanted, now_s=0, governed=governed))
    assert [outcome.node for outcome in outcomes] == ["a", "", "", "a"]
    assert outcomes[1].refusals[0].text == (
        'ResourceQuotaNotFit: quota "q" limits.nvidia.com/gpumem: 500 MiB wanted, 600 used,'
        " limit 1000"
    )
    assert [change.fits for change in outcomes[1].closest] == ["400"]
    # The existence of a placement is checked first.
    assert refusals(outcomes[2]) == ["CardInsufficientMemory"]
    assert [row.used for row in governed.quota.quota_rows()] == [1000]


def test_percentage_that_exceeds_the_quota_on_its_device_is_refused() -> None:
    big = device("a", 1, memory_mib=4000, capacity_mib=4000)
    ledger = ledger_of(("a", [device("a", 0, slots=0), big]))
    ask = DeviceRequest(vendor="nvidia", count=1, memory_pct=50)
    half = msgspec.structs.replace(
        pod("p"), containers=(ContainerRequest(name="main", kind="app", requests=(ask,)),)
    )
    (outcome,) = simulate(ledger, [half], now_s=0, governed=quotas_of(most_mib=1000), explain=False)
    assert outcome.node == ""
    assert outcome.refusals[0].text.startswith("node a: ResourceQuotaNotFit")
    assert "2000 MiB wanted" in outcome.refusals[0].text


def test_queues_lend_and_take_turns_in_a_simulation() -> None:
    ledger = ledger_of(("a", [device("a", n, slots=10) for n in range(4)]))
    queues = (
        QueueConfig(name="lender", guaranteed={"memory_mib": 800}),
        QueueConfig(name="x", guaranteed={"memory_mib": 100}, allowed_namespaces=("ns",)),
        QueueConfig(name="y", guaranteed={"memory_mib": 100}, allowed_namespaces=("ns",)),
    )
    tree = QueueTree(queues)
    wishes = ["x"] * 6 + ["y"] * 5 + ["x", "nobody"]
    names = [f"p{number}" for number in range(len(wishes))]
    askers = {
        name: Asker(account=Account(queue=wish), wish=wish)
        for name, wish in zip(names, wishes, strict=True)
    }
    governed = quotas_of(tree=tree, askers=askers)
    wanted = [pod(name, mib=100) for name in names]
    outcomes = list(simulate(ledger, wanted, now_s=0, governed=governed))
    assert [bool(outcome.node) for outcome in outcomes] == [True] * 10 + [False] * 3
    assert [refusals(outcome) for outcome in outcomes[10:]] == [
        ["QueueCannotBorrow"],
        ["QueueWaitsItsTurn"],
        ["QueueUnknown"],
    ]
    assert {row.queue: row.waiting for row in governed.quota.queue_rows()} == {
        "lender": 0,
        "x": 1,
        "y": 1,
    }


@pytest.mark.timeout(30)
@settings(max_examples=30, deadline=None)
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
