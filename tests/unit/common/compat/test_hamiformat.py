# SPDX-License-Identifier: Apache-2.0
"""HAMi's annotations are read as HAMi 2.10 writes them, and nothing else is."""

import pytest

from hami_common.compat import hamiformat
from hami_common.compat.hamiformat import Given, Registered, Word
from hami_common.errors import WireInvalid
from hami_common.vendors.catalog import Catalog


def word(name: str) -> Word:
    return next(one for one in hamiformat.WORDS if one.word == name)


def test_every_vendor_has_a_hami_name() -> None:
    vendors = {vendor.name for vendor in Catalog.from_settings().vendors}
    assert {one.vendor for one in hamiformat.WORDS} == vendors


@pytest.mark.parametrize(
    ("name", "allocated", "register"),
    [
        ("NVIDIA", "hami.io/vgpu-devices-allocated", "hami.io/node-nvidia-register"),
        (
            "Ascend910B4-1",
            "hami.io/Ascend910B4-1-devices-allocated",
            "hami.io/node-register-Ascend910B4-1",
        ),
        ("MLU", "hami.io/cambricon-mlu-devices-allocated", ""),
        ("DCU", "hami.io/dcu-devices-allocated", "hami.io/node-dcu-register"),
        ("MR-V50", "hami.io/MR-V50-devices-allocated", "hami.io/node-MR-V50-register"),
        ("Mthreads", "hami.io/mthreads-vgpu-devices-allocated", ""),
        ("Metax-GPU", "hami.io/metax-gpu-devices-allocated", ""),
        ("Metax-SGPU", "hami.io/metax-sgpu-devices-allocated", ""),
        ("GCU", "hami.io/enflame-gcu-devices-allocated", ""),
        ("Enflame", "hami.io/enflame-vgpu-devices-allocated", ""),
        ("kunlun", "hami.io/kunlun-allocated", ""),
        ("XPU", "hami.io/xpu-devices-allocated", "hami.io/node-register-xpu"),
        ("AWSNeuron", "hami.io/aws-neuron-devices-allocated", ""),
        ("AMD", "hami.io/amd-devices-allocated", "hami.io/node-amd-register"),
        ("Vastai", "hami.io/Vastai-devices-allocated", "hami.io/node-va-register"),
        ("Biren", "hami.io/Biren-devices-allocated", "hami.io/node-biren-register"),
    ],
)
def test_keys_are_those_of_hami(name: str, allocated: str, register: str) -> None:
    assert (word(name).allocated, word(name).register) == (allocated, register)


def test_shares_keep_containers_and_order() -> None:
    text = "GPU-a,NVIDIA,8192,30:GPU-b,NVIDIA,8192,30:;;GPU-a,NVIDIA,1024,0:;"
    found = hamiformat.decode_shares(text, what="x")
    assert [[one.id for one in entry] for entry in found] == [["GPU-a", "GPU-b"], [], ["GPU-a"]]
    assert found[2] == (Given(id="GPU-a", type="NVIDIA", memory_mib=1024, cores=0),)
    assert hamiformat.encode_shares(found) == text


@pytest.mark.parametrize(
    "text",
    [
        "GPU-a,NVIDIA,8192,30:",
        "GPU-a,NVIDIA,8192:;",
        "GPU-a,NVIDIA,many,30:;",
        "GPU-a,NVIDIA,-1,30:;",
        "GPU-a,NVIDIA,99999999999,30:;",
        ",NVIDIA,8192,30:;",
        "GPU-a,NVIDIA,8192,30:;GPU-b",
        ";" * 600,
        "a,b,1,1:" * 600 + ";",
        "x" * 300_000,
    ],
)
def test_shares_that_are_cut_off_or_no_shares_are_refused_by_name(text: str) -> None:
    with pytest.raises(WireInvalid, match="annotation of a pod"):
        hamiformat.decode_shares(text, what="annotation of a pod")


def test_devices_of_a_node_are_read_in_both_forms() -> None:
    text = (
        '[{"id":"GPU-a","index":3,"count":10,"devmem":40960,"devcore":100,'
        '"type":"NVIDIA A100","numa":1,"mode":"hami-core","health":true,"migProfiles":[]}]'
    )
    (device,) = hamiformat.decode_register(text, word("NVIDIA"))
    assert (device.id, device.index, device.memory_mib, device.healthy) == ("GPU-a", 3, 40960, True)
    bare, numbered = hamiformat.decode_register(
        "DCU-1,4,65536,100,DCU,0,true:DCU-2,4,65536,100,DCU,1,false,5,hami-core:", word("DCU")
    )
    assert (bare.index, bare.healthy, bare.mode) == (None, True, "hami-core")
    assert (numbered.index, numbered.healthy, numbered.numa) == (5, False, 1)


@pytest.mark.parametrize("name", ["NVIDIA", "DCU"])
def test_devices_of_a_node_survive_a_round_trip(name: str) -> None:
    device = Registered(
        id="x", index=2, count=4, memory_mib=1000, cores=100, type=name, numa=1, healthy=True
    )
    text = hamiformat.encode_register([device], word(name))
    assert hamiformat.decode_register(text, word(name)) == (device,)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[{}]", "NVIDIA"),
        ("{}", "NVIDIA"),
        ("[" * 5000, "NVIDIA"),
        ("DCU-1,4,65536:", "DCU"),
        (",4,65536,100,DCU,0,true:", "DCU"),
    ],
)
def test_devices_of_a_node_that_do_not_decode_are_refused_by_name(text: str, name: str) -> None:
    with pytest.raises(WireInvalid, match="register"):
        hamiformat.decode_register(text, word(name))


def test_mig_instances_are_read_with_their_place() -> None:
    text = (
        '[{"containerIndex":1,"deviceIndex":0,"gpuUUID":"GPU-a","profile":"1g.5gb",'
        '"placement":{"start":3,"size":1},"migUUID":"MIG-x"}]'
    )
    (found,) = hamiformat.decode_mig(text)
    assert (found.container, found.device, found.profile, found.start) == (1, 0, "1g.5gb", 3)
    with pytest.raises(WireInvalid, match="twice"):
        hamiformat.decode_mig(f"[{text[1:-1]},{text[1:-1]}]")


def test_number_of_a_device_is_read_from_names_of_that_node_only() -> None:
    assert hamiformat.number_in("n1-cambricon-mlu-3", word("MLU"), "n1") == 3
    assert hamiformat.number_in("n2-cambricon-mlu-3", word("MLU"), "n1") is None
    assert hamiformat.number_in("n1-cambricon-mlu-x", word("MLU"), "n1") is None
    assert hamiformat.number_in("n1-cambricon-mlu-3", word("NVIDIA"), "n1") is None
