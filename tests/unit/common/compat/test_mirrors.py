# SPDX-License-Identifier: Apache-2.0
"""Shares written as HAMi's annotations, for every vendor, as HAMi's own reader expects them."""

from datetime import UTC, datetime

import msgspec
import pytest

from hami_common.compat import adoption, hamiformat, mirrors
from hami_common.events.allocation import CarriedShare
from hami_common.model.device import Device, Profile
from hami_common.model.placement import ContainerShares, Share
from hami_common.vendors.kunlunxin import partitions_of
from tests.support import hami_reader
from tests.support.builders import device, held, share

KEY = {one.word: one.allocated for one in hamiformat.WORDS}
NO_MARK = adoption.TakenOver()


def of_pod(
    shares: ContainerShares, *devices: Device, mark: adoption.TakenOver = NO_MARK
) -> mirrors.Mirror:
    return mirrors.of_pod(
        ["setup", "main"],
        [shares],
        node="n1",
        devices={one.uuid: one for one in devices},
        mark=mark,
        time_s=1_785_578_400.9,
    )


def test_pod_annotations_contain_node_time_and_shares() -> None:
    mirror = of_pod(held(share("GPU-0", 3000, 20)), device("GPU-0"))
    assert mirror.annotations == {
        KEY["NVIDIA"]: ";GPU-0,NVIDIA,3000,20:;",
        "hami.io/vgpu-node": "n1",
        "hami.io/vgpu-time": "1785578400",
        "hami.io/bind-time": "1785578400",
        "hami.io/bind-phase": "success",
    }
    assert mirror.labels == {"hami.io/vgpu-node": "n1"}


CORES = (
    Profile(name="1nc", memory_mib=16_000, core_pct=50, size=1, starts=(0, 1)),
    Profile(memory_mib=32_000, core_pct=100, size=2, starts=(0,)),
)
MI300 = msgspec.structs.replace(
    device("D", vendor="amd", type="MI300X"), attributes={"compute_units": "304"}
)
NPU = device("D", vendor="ascend", type="Ascend910B4")
SGPU = device("D", vendor="metax", mode="sgpu")
DRS = device("D", vendor="enflame", mode="drs")


@pytest.mark.parametrize(
    ("owned", "given", "key", "entry"),
    [
        (device("D", vendor="hygon"), (2000, 15), "DCU", "D,DCU,2000,15"),
        (device("D", vendor="cambricon"), (2048, 10), "MLU", "n1-cambricon-mlu-0,MLU,2048,10"),
        (device("D", vendor="mthreads"), (2048, 32), "Mthreads", "n1-mthreads-0,Mthreads,2048,6"),
        (device("D", vendor="iluvatar", type="BI-V150"), (2048, 5), "BI-V150", "D,BI-V150,2048,5"),
        (NPU, (8192, 25), "Ascend910B4", "D,Ascend910B4,8192,25"),
        (SGPU, (4096, 30), "Metax-SGPU", "D,Metax-SGPU,4096,30"),
        (device("D", vendor="metax"), (40_000, 100), "Metax-GPU", "n1-metax-0,Metax-GPU,40000,100"),
        (DRS, (6144, 16), "Enflame", "n1-enflame-drs-0,Enflame,6144,16"),
        (device("D", vendor="enflame"), (40_000, 100), "GCU", "n1-GCU-0,GCU,40000,100"),
        (device("D", vendor="vastai"), (40_000, 100), "Vastai", "D,Vastai,0,0"),
        (device("D", vendor="biren"), (40_000, 100), "Biren", "D,Biren,0,0"),
        (MI300, (1000, 25), "AMD", "D,MI300X,1000,76"),
    ],
)
def test_amounts_are_in_hamis_units(
    owned: Device, given: tuple[int, int], key: str, entry: str
) -> None:
    mirror = of_pod(held(share("D", *given, vendor=owned.vendor)), owned)
    assert mirror.annotations[KEY[key]] == f";{entry}:;"
    read = hami_reader.used(
        [
            {
                "metadata": {"annotations": mirror.annotations},
                "spec": {"containers": [{"name": "setup"}, {"name": "main"}]},
            }
        ]
    )
    assert list(read) == [("n1", entry.split(",", maxsplit=1)[0])]


def test_hardware_partitions_keep_size_and_place() -> None:
    neuron = device("D", vendor="awsneuron", memory_mib=32_000, partitions=CORES)
    part = share("D", 16_000, 50, vendor="awsneuron", profile="1nc", start=1)
    mirror = of_pod(held(part), neuron)
    assert mirror.annotations[KEY["AWSNeuron"]] == ";n1-AWSNeuron-0,AWSNeuron,0,2:;"
    xpu = device("D", vendor="kunlunxin", memory_mib=98_304, partitions=partitions_of(98_304))
    part = share("D", 24_576, 25, vendor="kunlunxin", profile="1/4", kind="1/4")
    assert of_pod(held(part), xpu).annotations[KEY["XPU"]] == ";n1-kunlun-0,XPU,24576,25:;"
    whole = share("D", 98_304, 100, vendor="kunlunxin", exclusive=True)
    assert KEY["kunlun"] in of_pod(held(whole), xpu).annotations
    grid = (Profile(name="1g.5gb", memory_mib=4864, core_pct=14, size=1, starts=(0, 1, 2)),)
    gpu = device("GPU-0", mode="mig", partitions=grid)
    mirror = of_pod(held(share("GPU-0", 4864, 14, profile="1g.5gb", start=2)), gpu)
    (instance,) = hamiformat.decode_mig(mirror.annotations[hamiformat.MIG])
    assert (instance.container, instance.profile, instance.start, instance.size) == (
        1,
        "1g.5gb",
        2,
        1,
    )


def test_mig_instances_are_called_as_their_node_calls_them_or_not_at_all() -> None:
    grid = (Profile(name="1g.5gb", memory_mib=4864, core_pct=14, size=1, starts=(0, 1, 2)),)
    gpu = device("GPU-0", mode="mig", partitions=grid)
    parts = [share("GPU-0", 4864, 14, profile="1g.5gb", start=start) for start in (1, 2)]
    shares = ContainerShares(name="main", kind="app", shares=tuple(parts))
    names = {"mig_uuid": "MIG-1", "gpu_instance": "7", "compute_instance": "0"}
    half = {"mig_uuid": "MIG-2"}
    mirror = mirrors.of_pod(
        ["setup", "main"],
        [shares],
        node="n1",
        devices={"GPU-0": gpu},
        mark=NO_MARK,
        time_s=0,
        carried=[
            CarriedShare(container="main", number=number, names=told)
            for number, told in ((0, names), (1, half))
        ],
    )
    first, second = msgspec.json.decode(mirror.annotations[hamiformat.MIG])
    identity = {"migUUID": "MIG-1", "gpuInstanceID": 7, "computeInstanceID": 0}
    assert {key: first.get(key) for key in identity} == identity
    assert not identity.keys() & second.keys()
    assert (first["deviceIndex"], second["deviceIndex"]) == (0, 1)
    assert len(hamiformat.decode_mig(mirror.annotations[hamiformat.MIG])) == 2


def test_devices_keep_the_names_that_hami_had_for_them() -> None:
    mark = adoption.TakenOver(devices={"hygon": {"theirs": 3}})
    owned = device("ours", vendor="hygon", index=3)
    mirror = of_pod(held(share("ours", vendor="hygon")), owned, mark=mark)
    assert mirror.annotations[KEY["DCU"]] == ";theirs,DCU,1000,0:;"


def test_device_without_a_hami_name_is_omitted_and_reported() -> None:
    odd = device("D", vendor="ascend", type="Ascend950")
    for devices in ([odd], []):
        mirror = of_pod(held(share("D", vendor="ascend")), *devices)
        assert mirror.annotations == {}
        assert mirror.problems == ("HAMi has no word for device D",)


def test_node_registers_its_devices_as_hamis_plugins_do() -> None:
    gpus = [device("GPU-1", index=1, healthy=False), device("GPU-0", numa=1)]
    dcu = device("DCU-0", vendor="hygon", slots=4)
    capacity = device("X", vendor="cambricon")
    devices = {one.uuid: one for one in (*gpus, dcu, capacity)}
    mirror = mirrors.of_node(devices, node="n1", mark=NO_MARK, time_s=1_785_578_400.0)
    assert sorted(mirror.annotations) == [
        "hami.io/node-dcu-register",
        "hami.io/node-handshake",
        "hami.io/node-handshake-dcu",
        "hami.io/node-nvidia-register",
    ]
    read = hami_reader.registered({"metadata": {"annotations": mirror.annotations}})
    assert {name: total.mem for name, total in read.items()} == {
        "GPU-0": 40_000,
        "GPU-1": 40_000,
        "DCU-0": 40_000,
    }
    word = hamiformat.WORDS[0]
    first, second = hamiformat.decode_register(mirror.annotations[word.register], word)
    assert (first.id, first.numa, first.healthy, second.healthy) == ("GPU-0", 1, True, False)
    assert mirror.annotations["hami.io/node-handshake"].startswith("Reported_2026.08.01 ")


REGISTERED = {
    "nvidia": ("NVIDIA A100", "hami.io/node-nvidia-register", "hami.io/node-handshake"),
    "hygon": ("DCU-Z100", "hami.io/node-dcu-register", "hami.io/node-handshake-dcu"),
    "iluvatar": (
        "MR-V100",
        "hami.io/node-MR-V100-register",
        "hami.io/node-handshake-MR-V100",
    ),
    "ascend": (
        "Ascend910B4-1",
        "hami.io/node-register-Ascend910B4-1",
        "hami.io/node-handshake-Ascend910B4-1",
    ),
    "vastai": ("VA16", "hami.io/node-va-register", "hami.io/node-handshake-va"),
    "biren": ("Biren166", "hami.io/node-biren-register", "hami.io/node-handshake-biren"),
    "amd": ("MI300X", "hami.io/node-amd-register", ""),
}


@pytest.mark.parametrize("vendor", REGISTERED)
def test_registration_of_each_vendor_decodes_in_the_form_of_its_annotation(vendor: str) -> None:
    kind, key, handshake = REGISTERED[vendor]
    owned = [
        device("D-0", vendor=vendor, type=kind, slots=4, memory_mib=40_000),
        device("D-3", vendor=vendor, type=kind, index=3, slots=4, numa=1, healthy=False),
    ]
    mirror = mirrors.of_node(
        {one.uuid: one for one in owned}, node="n1", mark=NO_MARK, time_s=1_785_578_400.0
    )
    node = {"metadata": {"annotations": mirror.annotations}}
    assert hami_reader.registrations(node) == {
        key: [
            hami_reader.Registration(
                id=f"D-{index}",
                index=index,
                count=4,
                devmem=40_000,
                devcore=100,
                type=kind,
                numa=numa,
                mode="hami-core",
                health=healthy,
            )
            for index, numa, healthy in ((0, 0, True), (3, 1, False))
        ]
    }
    reported = datetime.fromtimestamp(1_785_578_400, tz=UTC)
    assert hami_reader.handshakes(node) == ({handshake: reported} if handshake else {})
    known = {key, handshake, hamiformat.ASCEND_SOFT if vendor == "ascend" else ""} - {""}
    assert set(mirror.annotations) == known


@pytest.mark.parametrize(("mode", "expected"), [("soft", "true"), ("vnpu", "false")])
def test_node_with_ascend_chips_shows_if_they_have_soft_shares(mode: str, expected: str) -> None:
    chip = device("D", vendor="ascend", type="Ascend910B4", mode=mode)
    mirror = mirrors.of_node({"D": chip}, node="n1", mark=NO_MARK, time_s=0)
    assert mirror.annotations["hami-vnpu-core"] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            share("D", 8192, 25, vendor="ascend", profile="vir05_1c_8g"),
            {"UUID": "D", "temp": "vir05_1c_8g", "memory": 8192},
        ),
        (share("D", 5000, 30, vendor="ascend"), {"UUID": "D", "memory": 5000, "core": 30}),
        (
            share("D", 32768, 100, vendor="ascend", exclusive=True),
            {"UUID": "D", "memory": 32768},
        ),
    ],
)
def test_chips_of_a_pod_are_shown_as_hamis_ascend_plugin_reads_them(
    given: Share, expected: dict[str, object]
) -> None:
    mirror = of_pod(held(given), NPU)
    pod = {"metadata": {"annotations": mirror.annotations}}
    assert hami_reader.chips(pod) == {"Ascend910B4": [expected]}


def test_node_registers_the_partitions_of_its_cards() -> None:
    sizes = (
        Profile(name="1g.5gb", memory_mib=4864, core_pct=14, size=1, starts=tuple(range(7))),
        Profile(name="1g.5gb+me", memory_mib=4864, size=1, starts=(0,), by_name_only=True),
        Profile(name="3g.20gb", memory_mib=19968, core_pct=42, size=4, starts=(0, 4)),
    )
    gpu = device("GPU-0", mode="mig", partitions=sizes)
    plain = device("GPU-1", index=1)
    mirror = mirrors.of_node(
        {"GPU-0": gpu, "GPU-1": plain}, node="n1", mark=NO_MARK, time_s=1_785_578_400.0
    )
    first, second = msgspec.json.decode(mirror.annotations["hami.io/node-nvidia-register"])
    assert (first["mode"], first["count"]) == ("mig", 7)
    assert [one["name"] for one in first["migProfiles"]] == ["1g.5gb", "3g.20gb"]
    assert first["migProfiles"][1] == {
        "name": "3g.20gb",
        "memoryMB": 19968,
        "core": 42,
        "sliceCount": 3,
        "placements": [{"start": 0, "size": 4}, {"start": 4, "size": 4}],
    }
    assert "migProfiles" not in second
    assert second["count"] == plain.slots


def test_long_node_names_are_no_labels() -> None:
    owned = device("GPU-0")
    mirror = mirrors.of_pod(
        ["main"],
        [held(Share(vendor="nvidia", uuid="GPU-0", memory_mib=1))],
        node="n" * 64,
        devices={"GPU-0": owned},
        mark=NO_MARK,
        time_s=0.0,
    )
    assert mirror.annotations["hami.io/vgpu-node"] == "n" * 64
    assert mirror.labels == {}
