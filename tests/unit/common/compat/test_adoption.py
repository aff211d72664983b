# SPDX-License-Identifier: Apache-2.0
"""Pods allocated by HAMi are read completely or conservatively, and only on their own node."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from hami_common.compat import adoption, hamiformat
from hami_common.errors import WireInvalid
from hami_common.model.device import Device, Profile
from hami_common.model.placement import Share
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.kunlunxin import partitions_of
from tests.support import hami_cluster
from tests.support.builders import device

CATALOG = Catalog.from_settings()
KEY = {one.word: one.allocated for one in hamiformat.WORDS}
_decoder = msgspec.json.Decoder(PodView)


def pod(
    containers: Sequence[dict[str, str]], annotated: dict[str, str], *, inits: int = 0
) -> PodView:
    """A pod on node ``n1``; its first ``inits`` containers are init containers."""
    specs: list[dict[str, Any]] = [
        {"name": f"c{i}", "resources": {"limits": limits}} for i, limits in enumerate(containers)
    ]
    document = {
        "metadata": {"name": "p", "namespace": "default", "uid": "u", "annotations": annotated},
        "spec": {
            "nodeName": "n1",
            "initContainers": specs[:inits],
            "containers": specs[inits:],
        },
        "status": {"phase": "Running"},
    }
    return _decoder.decode(json.dumps(document))


def read(
    view: PodView, devices: Sequence[Device], mark: adoption.TakenOver | None = None
) -> adoption.Adopted:
    by_vendor: dict[str, list[Device]] = {}
    for one in devices:
        by_vendor.setdefault(one.vendor, []).append(one)
    node = adoption.NodeView(name="n1", devices=by_vendor, mark=mark or adoption.TakenOver())
    return adoption.read(view, node, CATALOG)


def shares(found: adoption.Adopted) -> list[Share]:
    return [share for container in found.containers for share in container.shares]


def gpus(count: int = 2, **more: Any) -> list[Device]:
    return [device(f"GPU-{i}", index=i, **more) for i in range(count)]


GPU = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "20"}


def nvidia(text: str) -> dict[str, str]:
    return {KEY["NVIDIA"]: text, hamiformat.NODE: "n1"}


def test_shares_are_taken_as_they_were_given() -> None:
    found = read(pod([GPU], nvidia("GPU-1,NVIDIA,3000,20:;")), gpus())
    assert not found.problems
    assert shares(found) == [Share(vendor="nvidia", uuid="GPU-1", memory_mib=3000, core_pct=20)]
    assert (found.containers[0].name, found.containers[0].kind) == ("c0", "app")


def test_lost_padding_does_not_shift_containers() -> None:
    # HAMi writes one entry for the one container that asks, whatever stands before it.
    found = read(pod([{}, GPU], nvidia("GPU-0,NVIDIA,3000,20:;"), inits=1), gpus())
    assert not found.problems
    assert [(one.name, one.kind) for one in found.containers] == [("c1", "app")]


def test_kept_padding_does_not_shift_containers() -> None:
    limits = {"iluvatar.ai/MR-V100-vgpu": "1", "iluvatar.ai/MR-V100.vMem": "8"}
    text = {KEY["MR-V100"]: ";I-0,MR-V100,2048,0:;", hamiformat.NODE: "n1"}
    found = read(pod([{}, limits], text), [device("I-0", vendor="iluvatar", type="MR-V100")])
    assert not found.problems
    assert [one.name for one in found.containers] == ["c1"]


def held(vendor: str, **more: Any) -> Device:
    return device("D", vendor=vendor, **more)


MI300 = msgspec.structs.replace(held("amd"), attributes={"compute_units": "304"})


@pytest.mark.parametrize(
    ("word", "limits", "entry", "owned", "want"),
    [
        ("DCU", "hygon.com/dcunum=1 dcumem=2000 dcucores=15", "2000,15", held("hygon"), (2000, 15)),
        (
            "MLU",
            "cambricon.com/vmlu=1 mlu.smlu.vmemory=8 mlu.smlu.vcore=10",
            "2048,10",
            held("cambricon"),
            (2048, 10),
        ),
        (
            "Mthreads",
            "mthreads.com/vgpu=1 sgpu-memory=4 sgpu-core=5",
            "2048,5",
            held("mthreads"),
            (2048, 32),
        ),
        (
            "Metax-SGPU",
            "metax-tech.com/sgpu=1 vmemory=4 vcore=30",
            "4096,30",
            held("metax", mode="sgpu"),
            (4096, 30),
        ),
        ("AMD", "amd.com/gpu=1 gpumem=1000 gpucores=25", "1000,76", MI300, (1000, 25)),
        (
            "Ascend910B4",
            "huawei.com/Ascend910B4=1 Ascend910B4-memory=8192",
            "8192,0",
            held("ascend", type="Ascend910B4", memory_mib=32_768),
            (8192, 0),
        ),
    ],
)
def test_amounts_are_converted_to_units_of_the_project(
    word: str, limits: str, entry: str, owned: Device, want: tuple[int, int]
) -> None:
    prefix, _, rest = limits.partition("/")
    named = dict(part.split("=") for part in rest.split())
    text = {KEY[word]: f"D,{word},{entry}:;", hamiformat.NODE: "n1"}
    asked = {f"{prefix}/{name}": value for name, value in named.items()}
    found = read(pod([asked], text), [owned])
    assert not found.problems
    (share,) = shares(found)
    assert (share.uuid, share.memory_mib, share.core_pct, share.exclusive) == ("D", *want, False)


@pytest.mark.parametrize(
    ("word", "limits", "vendor"),
    [
        ("Metax-GPU", {"metax-tech.com/gpu": "1"}, "metax"),
        ("GCU", {"enflame.com/gcu": "1"}, "enflame"),
        ("kunlun", {"kunlunxin.com/xpu": "1"}, "kunlunxin"),
        ("Vastai", {"vastaitech.com/va": "1"}, "vastai"),
        ("Biren", {"birentech.com/gpu": "1"}, "biren"),
    ],
)
def test_whole_devices_are_held_whole_whatever_amounts_say(
    word: str, limits: dict[str, str], vendor: str
) -> None:
    text = {KEY[word]: f"D,{word},0,0:;", hamiformat.NODE: "n1"}
    (share,) = shares(read(pod([limits], text), [device("D", vendor=vendor)]))
    assert (share.memory_mib, share.core_pct, share.exclusive) == (40_000, 100, True)


def test_mask_of_cores_becomes_a_partition() -> None:
    parts = (
        Profile(name="1nc", memory_mib=16_000, core_pct=50, size=1, starts=(0, 1)),
        Profile(memory_mib=32_000, core_pct=100, size=2, starts=(0,)),
    )
    owned = device("n1-AWSNeuron-0", vendor="awsneuron", memory_mib=32_000, partitions=parts)
    text = {KEY["AWSNeuron"]: "n1-AWSNeuron-0,AWSNeuron,0,2:;", hamiformat.NODE: "n1"}
    (share,) = shares(read(pod([{"aws.amazon.com/neuroncore": "1"}], text), [owned]))
    assert (share.profile, share.start, share.memory_mib) == ("1nc", 1, 16_000)
    text[KEY["AWSNeuron"]] = "n1-AWSNeuron-0,AWSNeuron,0,3:;"
    (share,) = shares(read(pod([{"aws.amazon.com/neuron": "1"}], text), [owned]))
    assert (share.profile, share.exclusive) == ("", True)


def test_hardware_partitions_are_found_by_size() -> None:
    owned = device("D", vendor="kunlunxin", memory_mib=98_304, partitions=partitions_of(98_304))
    limits = {"kunlunxin.com/vxpu": "1", "kunlunxin.com/vxpu-memory": "24576"}
    text = {KEY["XPU"]: "D,XPU,24576,25:;", hamiformat.NODE: "n1"}
    (share,) = shares(read(pod([limits], text), [owned]))
    assert (share.profile, share.kind, share.memory_mib) == ("1/4", "1/4", 24_576)


def test_mig_instances_keep_their_place() -> None:
    parts = (Profile(name="1g.5gb", memory_mib=4864, core_pct=14, size=1, starts=(0, 1, 2, 3)),)
    owned = device("GPU-0", mode="mig", partitions=parts)
    text = nvidia("GPU-0,NVIDIA,4864,14:;")
    instance = {"containerIndex": 0, "deviceIndex": 0, "gpuUUID": "GPU-0", "profile": "1g.5gb"}
    text[hamiformat.MIG] = json.dumps([{**instance, "placement": {"start": 2, "size": 1}}])
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "4000"}
    found = read(pod([limits], text), [owned])
    assert [(one.profile, one.start) for one in shares(found)] == [("1g.5gb", 2)]
    del text[hamiformat.MIG]
    found = read(pod([limits], text), [owned])
    assert shares(found)[0].exclusive
    assert "where partition" in found.problems[0]


def test_devices_are_found_by_the_names_that_the_node_had() -> None:
    devices = [device(f"OURS-{i}", vendor="hygon", index=i) for i in range(3)]
    limits = {"hygon.com/dcunum": "1", "hygon.com/dcumem": "1000", "hygon.com/dcucores": "10"}
    text = {KEY["DCU"]: "theirs-2,DCU,1000,10:;", hamiformat.NODE: "n1"}
    mark = adoption.TakenOver(devices={"hygon": {"theirs-2": 2}})
    assert [one.uuid for one in shares(read(pod([limits], text), devices, mark))] == ["OURS-2"]


def test_numbered_devices_are_counted_in_order_of_index() -> None:
    devices = [device(f"OURS-{i}", vendor="mthreads", index=i) for i in (4, 7, 9)]
    limits = {
        "mthreads.com/vgpu": "1",
        "mthreads.com/sgpu-memory": "4",
        "mthreads.com/sgpu-core": "4",
    }
    text = {KEY["Mthreads"]: "n1-mthreads-1,Mthreads,2048,4:;", hamiformat.NODE: "n1"}
    assert [one.uuid for one in shares(read(pod([limits], text), devices))] == ["OURS-7"]


def test_share_of_an_unknown_device_counts_on_all_that_it_may_be() -> None:
    two = {**GPU, "nvidia.com/gpu": "2"}
    found = read(pod([two], nvidia("GPU-0,NVIDIA,3000,20:GPU-gone,NVIDIA,3000,20:;")), gpus(3))
    assert "no device GPU-gone" in found.problems[0]
    assert [one.uuid for one in shares(found)] == ["GPU-0", "GPU-1", "GPU-2"]
    assert {one.memory_mib for one in shares(found)} == {3000}


@pytest.mark.parametrize("text", ["", "GPU-0,NVIDIA,3000,20:", "rubbish;", ";;", ";"])
def test_unreadable_shares_count_as_requested_on_every_device(text: str) -> None:
    found = read(pod([GPU], nvidia(text)), gpus(3))
    assert found.problems
    assert [(one.uuid, one.memory_mib) for one in shares(found)] == [
        ("GPU-0", 3000),
        ("GPU-1", 3000),
        ("GPU-2", 3000),
    ]


def test_annotation_below_the_request_is_ignored() -> None:
    found = read(pod([GPU], nvidia("GPU-0,NVIDIA,1,0:;")), gpus())
    assert [(one.memory_mib, one.core_pct) for one in shares(found)] == [(3000, 20)]
    assert "asks for 3000 MiB" in found.problems[0]


def test_pod_without_a_request_holds_nothing() -> None:
    found = read(pod([{"cpu": "1"}], nvidia("GPU-0,NVIDIA,40000,100:;")), gpus())
    assert not found.containers
    assert "no container asks" in found.problems[0]


def test_unsupported_request_is_adopted_by_its_annotation() -> None:
    strange = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3Gi"}
    found = read(pod([strange], nvidia("GPU-0,NVIDIA,3072,0:;")), gpus())
    assert [(one.uuid, one.memory_mib) for one in shares(found)] == [("GPU-0", 3072)]
    found = read(pod([strange], nvidia("")), gpus())
    assert [one.exclusive for one in shares(found)] == [True, True]


def test_devices_that_are_not_known_yet_keep_hamis_name() -> None:
    found = read(pod([GPU], nvidia("GPU-0,NVIDIA,3000,20:;")), [])
    assert [(one.uuid, one.memory_mib) for one in shares(found)] == [("GPU-0", 3000)]


def test_mark_of_a_node_survives_a_round_trip_and_invalid_text_is_refused() -> None:
    mark = adoption.TakenOver(pods=("u1", "u2"), devices={"nvidia": {"GPU-0": 0}})
    assert adoption.decode_mark(adoption.encode_mark(mark)) == mark
    for text in ("", "[]", '{"pods": 1}', "{" * 9000):
        with pytest.raises(WireInvalid, match="taken-over"):
            adoption.decode_mark(text)


def test_committed_cluster_is_the_one_that_is_built() -> None:
    assert hami_cluster.FILE.read_text(encoding="utf-8") == hami_cluster.text()
