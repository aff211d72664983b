# SPDX-License-Identifier: Apache-2.0
"""A refusal that an annotation causes, or would lift, ends with the annotation."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from hami_common.model.device import Device, Profile
from hami_common.model.request import DeviceRequest, DeviceSelector, PodRequest
from hami_core.placement.pick import pick
from hami_core.placement.reasons import TEXT_BYTES, NodeRefusal, explain
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, container, device, held, node_devices, pod, share, whole

SIZES = (
    Profile(name="1g.5gb", memory_mib=5000, core_pct=14, size=1, starts=(0, 1, 2, 3)),
    Profile(name="4g.20gb", memory_mib=20_000, core_pct=100, size=4, starts=(0,)),
)
MIG = "; write nvidia.com/vgpu-mode: mig"


def mig(uuid: str, index: int = 0) -> Device:
    return device(uuid, index=index, memory_mib=20_480, mode="mig", partitions=SIZES)


def table_of(devices: Sequence[Device], vendor: str = "nvidia") -> DeviceTable:
    table = DeviceTable()
    table.upsert_node(node_devices("n", devices, vendor=vendor))
    return table


def text(table: DeviceTable, request: PodRequest) -> str:
    """The one text that filter, bind and explain give."""
    (refused,) = Verdicts(table).filter(request, ["n"]).refused().values()
    picked = pick(table, request, "n")
    assert isinstance(picked, NodeRefusal)
    explained = explain(table, request, "n").refusal
    assert explained is not None
    assert refused == picked.text == explained.text
    assert len(refused) <= TEXT_BYTES
    return refused


@pytest.mark.parametrize(
    ("cards", "wanted", "code"),
    [
        ([mig("a"), mig("b", 1)], ask(2, mib=4000), "ModeNotFit"),
        ([mig("a"), mig("b", 1)], ask(2, pct=20), "ModeNotFit"),
        ([mig("a")], ask(2, mib=4000), "NodeInsufficientDevice"),
        (
            [mig("a"), device("b", index=1)],
            ask(2, mib=4000),
            "AllocatedCardsInsufficientRequest",
        ),
        ([mig("a")], whole(), "ModeNotFit"),
        ([mig("a"), mig("b", 1)], whole(2), "ModeNotFit"),
    ],
)
def test_request_that_mig_mode_would_serve_names_it(
    cards: list[Device], wanted: DeviceRequest, code: str
) -> None:
    table, request = table_of(cards), pod(wanted)
    refused = text(table, request)
    assert refused.startswith(f"{code}: ")
    assert refused.endswith(MIG)
    named = replace(request, selectors={"nvidia": DeviceSelector(modes=("mig",))})
    assert Verdicts(table).filter(named, ["n"]).feasible == ["n"]


def test_mode_is_not_named_where_it_would_not_help() -> None:
    soft = table_of([device("a")])
    assert "annotation" not in text(soft, pod(ask(2)))
    assert "vgpu-mode" not in text(soft, pod(ask(2)))
    too_large = table_of([mig("a"), mig("b", 1)])
    assert "vgpu-mode" not in text(too_large, pod(ask(2, mib=30_000)))
    bound = pod(ask(2), selector=DeviceSelector(numa_bind=True))
    assert "vgpu-mode" not in text(table_of([mig("a")]), bound)


@pytest.mark.parametrize(
    ("cards", "modes", "end"),
    [
        ([device("a")], ("mig",), "; write nvidia.com/vgpu-mode: hami-core"),
        ([mig("a")], ("soft",), MIG),
        ([mig("a")], ("mps",), MIG),
        ([device("a", mode="mps")], ("mig",), "; write nvidia.com/vgpu-mode: mps"),
        ([device("a", mode="timeslice")], (), "; write nvidia.com/vgpu-mode: timeslice"),
        ([device("a", mode="mps")], (), "; write nvidia.com/vgpu-mode: mps"),
    ],
)
def test_mode_annotation_that_no_device_suits_names_one_that_does(
    cards: list[Device], modes: tuple[str, ...], end: str
) -> None:
    request = pod(ask(), selector=DeviceSelector(modes=modes))
    assert text(table_of(cards), request).endswith(end)


def test_mode_annotation_alone_is_named_where_no_other_word_helps() -> None:
    table = table_of([device("a", mode="whole")])
    request = pod(ask(), selector=DeviceSelector(modes=("mig",)))
    assert text(table, request).endswith("(annotation nvidia.com/vgpu-mode)")


@pytest.mark.parametrize(
    ("selector", "key"),
    [
        (DeviceSelector(allow_types=("H100",)), "nvidia.com/use-gputype"),
        (DeviceSelector(deny_types=("A100",)), "nvidia.com/nouse-gputype"),
        (DeviceSelector(allow_uuids=("x",)), "nvidia.com/use-gpuuuid"),
        (DeviceSelector(deny_uuids=("a", "b")), "nvidia.com/nouse-gpuuuid"),
        (DeviceSelector(numa_bind=True), "nvidia.com/numa-bind"),
    ],
)
def test_selector_that_no_device_passes_names_its_annotation(
    selector: DeviceSelector, key: str
) -> None:
    table = table_of([device("a", numa=0), device("b", index=1, numa=1)])
    assert text(table, pod(ask(2), selector=selector)).endswith(f" (annotation {key})")


def test_text_is_shortened_before_its_annotation() -> None:
    many = DeviceSelector(allow_types=tuple(f"type-{n}-of-a-very-long-list" for n in range(8)))
    request = pod(container(ask(), name="a" * 60), container(ask(), name="b" * 60), selector=many)
    assert text(table_of([device("a")]), request).endswith(".. (annotation nvidia.com/use-gputype)")


def test_pod_that_wants_idle_devices_learns_of_its_policy() -> None:
    table = table_of([device("a")])
    table.book("n", [held(share("a"))])
    assert text(table, pod(ask(), device=("mutex",))).endswith(
        "no device is idle (annotation hami.io/gpu-scheduler-policy: mutex)"
    )
    assert text(table, pod(whole(), device=("mutex",))).endswith("no device is idle")


def test_types_of_the_resource_name_are_no_annotation() -> None:
    request = pod(replace(ask(), types=("T4",)))
    assert text(table_of([device("a")]), request).endswith("wanted: T4")


@pytest.mark.parametrize(
    ("device_mode", "asked_mode", "end"),
    [
        ("soft", "vnpu", "; write huawei.com/vnpu-mode: hami-core"),
        ("vnpu", "soft", "; remove huawei.com/vnpu-mode"),
    ],
)
def test_mode_of_ascend_is_in_the_request_and_named_too(
    device_mode: str, asked_mode: str, end: str
) -> None:
    table = table_of([device("a", vendor="ascend", mode=device_mode)], vendor="ascend")
    request = pod(replace(ask(vendor="ascend"), modes=(asked_mode,)))
    assert text(table, request).endswith(end)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("best-effort", "metax-tech.com/sgpu-qos-policy"),
        ("offline", "metax-tech.com/sgpu-app-class"),
    ],
)
def test_class_of_metax_is_named(kind: str, key: str) -> None:
    table = table_of([device("a", vendor="metax", mode="sgpu")], vendor="metax")
    table.book("n", [held(share("a", vendor="metax", kind="fixed-share"))])
    request = pod(replace(ask(vendor="metax"), modes=("sgpu",), kind=kind))
    assert text(table, request).endswith(f" than {kind} (annotation {key})")


def test_keys_per_chip_are_named_for_the_chip_of_the_request() -> None:
    table = table_of([device("a", vendor="ascend", type="Ascend910B4")], vendor="ascend")
    request = pod(
        replace(ask(vendor="ascend"), types=("Ascend910B4",)),
        selectors={"ascend": DeviceSelector(allow_uuids=("x",))},
    )
    assert text(table, request).endswith("(annotation hami.io/use-Ascend910B4-uuid)")
