# SPDX-License-Identifier: Apache-2.0
"""Refusals name the request and the best available, in one text per class and under 1 KiB."""

import pytest

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Profile
from hami_common.model.placement import Share
from hami_common.model.request import DeviceSelector, PodRequest
from hami_core.placement.reasons import (
    CLASSES_SHOWN,
    RESOLVABLE,
    TEXT_BYTES,
    DeviceVerdict,
    explain,
)
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from hami_sim.kubescheduler.fit import NodeRefusal as Told
from hami_sim.kubescheduler.fit import explain as condition_of
from tests.support.builders import (
    ask,
    container,
    device,
    devices,
    held,
    node_devices,
    pod,
    share,
    whole,
)

NODES, TIMES = 300, 17
"""Texts do not depend on how many nodes have the same reason: each stands for seventeen."""


def texts(table: DeviceTable, request: PodRequest) -> set[str]:
    return set(Verdicts(table).filter(request, table.nodes()).refused().values())


def table_of(*messages: NodeDevices) -> DeviceTable:
    table = DeviceTable()
    for message in messages:
        table.upsert_node(message)
    return table


def test_memory_refusal_contains_the_request_the_best_free_amount_and_its_node() -> None:
    table = table_of(devices("a", 2), devices("b", 2))
    table.book("a", [held(share("a-nvidia-0", 30_000)), held(share("a-nvidia-1", 25_000))])
    table.book("b", [held(share("b-nvidia-0", 20_000)), held(share("b-nvidia-1", 35_000))])
    assert texts(table, pod(ask(mib=38_000))) == {
        "CardInsufficientMemory: 38000 MiB wanted, at most 20000 MiB free on a device (b)"
    }


@pytest.mark.parametrize("times", [1, TIMES])
def test_refusal_for_foreign_use_names_the_memory_of_processes_outside(times: int) -> None:
    table = table_of(
        *(
            node_devices(
                name, [device(f"{name}-0", foreign_mib=mib), device(f"{name}-1", cordoned=True)]
            )
            for number in range(times)
            for name, mib in ((f"a{number:02}", 12_032), (f"b{number:02}", 30_208))
        ),
        *(devices(f"c{number:02}", 1) for number in range(times)),
    )
    for number in range(times):
        table.book(f"c{number:02}", [held(share(f"c{number:02}-nvidia-0", 35_000))])
    assert texts(table, pod(ask(mib=30_000))) == {
        "CardForeignUse: 30000 MiB wanted, 27968 free, 12032 used by processes outside HAMi (a00)",
        "CardInsufficientMemory: 30000 MiB wanted, at most 5000 MiB free on a device (c00)",
    }
    assert "a00" in Verdicts(table).filter(pod(ask(mib=27_968)), table.nodes()).feasible
    found = Verdicts(table).filter(pod(whole()), table.nodes())
    assert found.refused()["b00"] == (
        "CardForeignUse: no device is unused, 12032 MiB used by processes outside HAMi (a00)"
    )
    assert found.feasible == []


@pytest.mark.parametrize("times", [1, TIMES])
def test_refusal_for_bursts_names_the_memory_beyond_the_requests(times: int) -> None:
    table = table_of(
        *(
            node_devices(
                f"{name}{number:02}",
                [device(f"{name}{number:02}-0", foreign_mib=foreign_mib, bursts=bursts)],
            )
            for number in range(times)
            for name, foreign_mib, bursts in (
                ("a", 4_000, {"p": 6_000, "q": 2_032}),
                ("b", 12_032, {"p": 1_024}),
            )
        )
    )
    assert texts(table, pod(ask(mib=30_000))) == {
        "CardBurstUse: 30000 MiB wanted, 27968 free, 8032 used by pods beyond their requests (a00)",
        "CardForeignUse: 30000 MiB wanted, 26944 free, 12032 used by processes outside HAMi (b00)",
    }
    assert "a00" in Verdicts(table).filter(pod(ask(mib=27_968)), table.nodes()).feasible
    (verdict,) = explain(table, pod(ask(mib=30_000)), "a00").steps[0].devices
    assert verdict == DeviceVerdict(
        uuid="a00-0",
        code="CardBurstUse",
        wanted=30_000,
        free=27_968,
        foreign_mib=4_000,
        burst_mib=8_032,
    )


def test_device_whose_last_burst_has_not_fallen_yet_is_not_given_whole() -> None:
    table = table_of(node_devices("n", [device("x", bursts={"gone": 256})]))
    assert texts(table, pod(whole())) == {
        "CardBurstUse: 40000 MiB wanted, 39744 free, 256 used by pods beyond their requests (n)"
    }


def test_overcommitted_device_with_foreign_use_is_not_given_whole() -> None:
    scaled = device("x", capacity_mib=80_000, foreign_mib=256)
    table = table_of(node_devices("n", [scaled]))
    (text,) = texts(table, pod(whole()))
    assert text.startswith("CardForeignUse: no device is unused, 256 MiB used by processes")
    assert not texts(table, pod(ask(mib=40_000)))
    explained = explain(table, pod(ask(mib=40_000)), "n").steps[0].devices
    assert explained == (DeviceVerdict(uuid="x", taken=True, foreign_mib=256),)


def test_percentage_text_shows_both_units() -> None:
    table = table_of(devices("a", 1))
    table.book("a", [held(share("a-nvidia-0", 30_000))])
    assert texts(table, pod(ask(pct=50))) == {
        "CardInsufficientMemory: 20000 MiB (50%) wanted, at most 10000 MiB free on a device (a)"
    }


def test_first_node_by_name_is_named_among_equals() -> None:
    table = table_of(devices("b", 1), devices("c", 1), devices("a", 1))
    (text,) = texts(table, pod(ask(mib=50_000)))
    assert text.endswith("(a)")


@pytest.mark.parametrize(
    ("message", "request_", "want"),
    [
        (devices("n", 1), pod(ask(2)), "NodeInsufficientDevice: 2 devices wanted, at most 1"),
        (devices("n", 1), pod(ask(core=101)), "CardInsufficientCore: 101% compute wanted, at most"),
        (
            devices("n", 1),
            pod(ask(), selector=DeviceSelector(allow_types=("H100",), deny_types=("T4",))),
            "CardTypeMismatch: no device is of a type wanted: H100, not T4",
        ),
        (
            devices("n", 1),
            pod(ask(), selector=DeviceSelector(allow_uuids=("u1",))),
            "CardUuidMismatch: no device has a UUID wanted: u1",
        ),
        (
            devices("n", 1),
            pod(ask(), selector=DeviceSelector(modes=("mig", "mps"))),
            "ModeNotFit: no device is in mode mig or mps",
        ),
        (
            devices("n", 1),
            pod(ask(), selector=DeviceSelector(min_isolation=(("fault", "A"),))),
            "ModeNotFit: no device that suits isolates a share by fault=A (hami.io/min-isolation)",
        ),
        (
            node_devices("n", [device("x", capacity_mib=80_000, largest_mib=40_000)]),
            pod(ask(mib=60_000)),
            "CardShareTooLarge: 60000 MiB wanted, a recalled share has at most 40000 MiB (n)",
        ),
        (
            node_devices("n", [device("x", healthy=False), device("y", index=1, cordoned=True)]),
            pod(ask()),
            "CardCordoned: every healthy device is cordoned",
        ),
        (
            node_devices("n", [device("x", healthy=False)]),
            pod(ask()),
            "CardNotHealth: no device is healthy",
        ),
        (
            node_devices("n", [device("x", slots=0)]),
            pod(ask()),
            "CardTimeSlicingExhausted: every slot of the devices is taken",
        ),
        (
            node_devices("n", [device("x", numa=0), device("y", index=1, numa=1)]),
            pod(ask(2), selector=DeviceSelector(numa_bind=True)),
            "NumaNotFit: 2 devices of one NUMA node wanted, at most 1 fit (n)",
        ),
        (
            node_devices("n", [device("x"), device("y", index=1, memory_mib=10)]),
            pod(ask(2, mib=20)),
            (
                "AllocatedCardsInsufficientRequest: 2 devices wanted, at most 1 fit on a node (n)"
                "; others CardInsufficientMemory"
            ),
        ),
        (
            devices("n", 1, vendor="ascend"),
            pod(ask()),
            "NodeUnregistered: no device of this kind is registered on the node",
        ),
    ],
)
def test_text_of_each_reason(message: NodeDevices, request_: PodRequest, want: str) -> None:
    (text,) = texts(table_of(message), request_)
    assert text.startswith(want)


@pytest.mark.parametrize(
    ("booked", "request_", "want"),
    [
        (
            share("n-nvidia-0", 1, 100),
            pod(ask()),
            "CardComputeUnitsExhausted: all compute of the devices is handed out",
        ),
        (
            share("n-nvidia-0", 1, exclusive=True),
            pod(ask()),
            "ExclusiveDeviceAllocateConflict: every device is held exclusively",
        ),
        (
            share("n-nvidia-0", 1),
            pod(ask(exclusive=True)),
            "ExclusiveDeviceAllocateConflict: no device is idle",
        ),
    ],
)
def test_refusal_text_of_shares_of_other_pods(
    booked: Share, request_: PodRequest, want: str
) -> None:
    table = table_of(devices("n", 1))
    table.book("n", [held(booked)])
    assert texts(table, request_) == {want}


def test_silent_agent_has_its_own_text() -> None:
    table = table_of(devices("n", 1))
    table.set_node_alive("n", "nvidia", alive=False)
    assert texts(table, pod(ask())) == {
        "NodeAgentSilent: the node's agent is silent or not registered with kubelet"
    }


def test_container_and_vendor_are_named_only_among_several() -> None:
    table = table_of(devices("n", 1), devices("n", 1, vendor="ascend"))
    several = pod(container(ask(), name="a"), container(ask(2), name="b"))
    (text,) = texts(table, several)
    assert text.startswith("NodeInsufficientDevice: b: 2 devices")
    vendors = pod(container(ask(), ask(2, vendor="ascend"), name="a"))
    (text,) = texts(table, vendors)
    assert text.startswith("NodeInsufficientDevice: ascend: 2 devices")


def test_shares_of_the_pods_own_containers_are_not_free() -> None:
    table = table_of(devices("n", 1))
    request = pod(
        container(ask(mib=30_000, core=60), name="a"), container(ask(mib=20_000), name="b")
    )
    assert texts(table, request) == {
        "CardInsufficientMemory: b: 20000 MiB wanted, at most 10000 MiB free on a device (n)"
    }


def test_binding_constraint_is_that_of_the_device_that_got_furthest() -> None:
    table = table_of(
        node_devices(
            "n",
            [
                device("a", healthy=False),
                device("b", index=1, type="T4"),
                device("c", index=2, memory_mib=100),
            ],
        )
    )
    (text,) = texts(table, pod(ask(mib=200), selector=DeviceSelector(allow_types=("A100",))))
    assert text.startswith("CardInsufficientMemory: 200 MiB wanted, at most 100 MiB free")


def test_many_reasons_stay_under_one_kibibyte_and_keep_the_largest_classes() -> None:
    table = DeviceTable()
    long = "a-rather-long-node-name-as-clouds-like-them.region.example"
    selector = DeviceSelector(
        allow_types=("A100", "é" * 100),
        modes=("soft",),
        deny_uuids=tuple(f"GPU-{i:036}" for i in range(300)),
    )
    request = pod(
        container(ask(), name="c" * 63),
        container(ask(2, mib=30_000, core=30), ask(vendor="ascend"), name="d" * 63),
        selector=selector,
    )
    for i in range(NODES):
        node = f"{long}-{i}"
        kinds = (
            device(f"GPU-{i:036}", type="A100"),
            device(f"x{i}", type="T4"),
            device(f"x{i}", mode="mig", type="A100"),
            device(f"x{i}", healthy=False, type="A100"),
            device(f"x{i}", cordoned=True, type="A100"),
            device(f"x{i}", slots=0, type="A100"),
            device(f"x{i}", memory_mib=500, type="A100"),
            device(f"x{i}", memory_mib=5_000, type="A100"),
            device(f"x{i}", type="A100"),
        )
        some = kinds[i % len(kinds)]
        table.upsert_node(node_devices(node, [some, device(f"y{i}", index=1, type="T4")]))
        if i % 10:
            table.upsert_node(devices(node, 1, vendor="ascend"))
    filtered = Verdicts(table).filter(request, table.nodes())
    refused = filtered.refused()
    assert len(filtered.refused()) == len(refused) == NODES
    shown = set(refused.values())
    assert len(filtered.classes()) > CLASSES_SHOWN
    assert len(shown) == CLASSES_SHOWN
    assert any(text.startswith("OtherReasons: ") for text in shown)
    assert all(len(text.encode()) <= TEXT_BYTES for text in shown)
    told = {
        f"{node}.{copy}": Told(reasons=(text,), resolvable=text.partition(":")[0] in RESOLVABLE)
        for node, text in refused.items()
        for copy in range(TIMES)
    }
    assert len(told) > 5_000
    assert 700 < len(condition_of(told, len(told), preempts=True).encode()) <= 1024
    assert sum(group.count for group in filtered.classes()) == NODES
    sizes = [group.count for group in filtered.classes()]
    assert sizes == sorted(sizes, reverse=True)


def test_refusals_caused_by_other_pods_are_resolvable_and_others_are_not() -> None:
    assert {"CardInsufficientMemory", "CardForeignUse", "CardBurstUse"} <= RESOLVABLE
    assert not RESOLVABLE & {"CardTypeMismatch", "NodeUnregistered", "NodeInsufficientDevice"}


# --- explain -------------------------------------------------------------------------------------


def test_explanation_shows_each_devices_answer() -> None:
    table = table_of(devices("n", 3))
    table.book("n", [held(share("n-nvidia-0", 35_000))])
    table.set_health("n", "n-nvidia-1", healthy=False)
    told = explain(table, pod(ask(mib=6_000)), "n")
    assert told.fits
    assert told.refusal is None
    (step,) = told.steps
    assert (step.container, step.vendor, step.count, step.fitting()) == ("main", "nvidia", 1, 1)
    assert step.devices == (
        DeviceVerdict(uuid="n-nvidia-0", code="CardInsufficientMemory", wanted=6_000, free=5_000),
        DeviceVerdict(uuid="n-nvidia-1", code="CardNotHealth"),
        DeviceVerdict(uuid="n-nvidia-2", taken=True),
    )


def test_explanation_of_a_partition_names_the_resource_that_is_too_small() -> None:
    small = Profile(name="v1", memory_mib=2, core_pct=12, resources={"core": 2, "cpu": 3})
    amounts = {"core": 8, "cpu": 7}
    divided = device("d", memory_mib=8, mode="mig", partitions=(small,), resources=amounts)
    table = table_of(node_devices("n", [divided]))
    three = pod(*(container(ask(mib=2), name=name) for name in "abc"))
    assert explain(table, three, "n").steps[-1].devices == (
        DeviceVerdict(uuid="d", code="CardPartitionInfeasible", wanted=3, free=1, resource="cpu"),
    )


def test_explanation_ends_with_the_step_that_fails() -> None:
    table = table_of(devices("n", 1))
    request = pod(
        container(whole(), name="a"), container(ask(), name="b"), container(ask(), name="c")
    )
    told = explain(table, request, "n")
    assert not told.fits
    assert [step.container for step in told.steps] == ["a", "b"]
    assert told.refusal is not None
    assert told.refusal.code == "ExclusiveDeviceAllocateConflict"


def test_explanation_of_missing_devices_is_limited_to_that_step() -> None:
    table = table_of(devices("n", 2))
    request = pod(container(ask(mib=50_000), name="a"), container(ask(vendor="ascend"), name="b"))
    told = explain(table, request, "n")
    assert [(step.container, step.vendor, step.devices) for step in told.steps] == [
        ("b", "ascend", ())
    ]
    assert told.refusal is not None
    assert told.refusal.code == "NodeUnregistered"


def test_explanation_leaves_other_vendors_devices_out() -> None:
    table = table_of(devices("n", 1), devices("n", 1, vendor="ascend"))
    (step,) = explain(table, pod(ask()), "n").steps
    assert [device.uuid for device in step.devices] == ["n-nvidia-0"]


def test_explanation_of_an_unknown_node_reports_node_unregistered() -> None:
    told = explain(DeviceTable(), pod(ask()), "n")
    assert (told.fits, told.steps) == (False, ())
    assert told.refusal is not None
    assert told.refusal.code == "NodeUnregistered"
