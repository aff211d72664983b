# SPDX-License-Identifier: Apache-2.0
"""Input of the contract suite per vendor: the shapes of its users' manifests, and its settings.

One entry per vendor of the catalog, here or in a file ``case_<vendor>.py`` beside this one; the
suite fails for a vendor that has none.
"""

import importlib
from pathlib import Path

from hami_common.model.device import Profile
from hami_common.vendors import ascend, enflame
from hami_common.vendors.amd import Amd, AmdSettings
from hami_common.vendors.awsneuron import Awsneuron, AwsneuronSettings
from hami_common.vendors.biren import Biren, BirenSettings
from hami_common.vendors.cambricon import Cambricon, CambriconSettings
from hami_common.vendors.hygon import Hygon, HygonSettings
from hami_common.vendors.iluvatar import Iluvatar, IluvatarSettings
from hami_common.vendors.kunlunxin import Kunlunxin, KunlunxinSettings
from hami_common.vendors.metax import Metax, MetaxSettings
from hami_common.vendors.mthreads import Mthreads, MthreadsSettings
from hami_common.vendors.nvidia import Nvidia, NvidiaSettings
from hami_common.vendors.vastai import Vastai, VastaiSettings
from tests.contract.vendors.shape import Case, device

_B3 = next(chip for chip in ascend.CHIPS if chip.word == "Ascend910B3")
_DRS = enflame.partitions_of({"1g.8gb": (1, 8), "2g.16gb": (2, 16), "6g.48gb": (6, 48)})

CASES: dict[str, Case] = {
    "nvidia": Case(
        make=Nvidia,
        settings=NvidiaSettings,
        device=device("nvidia", "NVIDIA A100", 40960),
        whole={"nvidia.com/gpu": "1"},
        part={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"},
        part_mib=3000,
        bad=(("nvidia.com/gpu", "x"), ("nvidia.com/gpumem", "-1"), ("nvidia.com/gpucores", "0.5")),
        selector_uuid="nvidia.com/use-gpuuuid",
    ),
    "ascend": Case(
        make=ascend.Ascend,
        settings=ascend.AscendSettings,
        device=device(
            "ascend",
            "Ascend910B3",
            65536,
            mode="vnpu",
            partitions=ascend.partitions_of(_B3),
            resources=ascend.resources_of(_B3),
        ),
        whole={"huawei.com/Ascend910B3": "1"},
        part={"huawei.com/Ascend910B3": "1", "huawei.com/Ascend910B3-memory": "9000"},
        part_mib=16384,
        bad=(
            ("huawei.com/Ascend910B3", "x"),
            ("huawei.com/Ascend910B3-memory", "65537"),
            ("huawei.com/Ascend910B3-core", "10"),
        ),
        selector_uuid="hami.io/use-Ascend910B3-uuid",
    ),
    "cambricon": Case(
        make=Cambricon,
        settings=CambriconSettings,
        device=device("cambricon", "MLU370-X4", 23308, mode="smlu"),
        whole={"cambricon.com/vmlu": "1"},
        part={
            "cambricon.com/vmlu": "1",
            "cambricon.com/mlu.smlu.vmemory": "20",
            "cambricon.com/mlu.smlu.vcore": "10",
        },
        part_mib=5120,
        bad=(
            ("cambricon.com/vmlu", "2"),
            ("cambricon.com/mlu.smlu.vmemory", "1Gi"),
            ("cambricon.com/mlu.smlu.vcore", "1.5"),
        ),
        selector_uuid="cambricon.com/use-gpuuuid",
    ),
    "hygon": Case(
        make=Hygon,
        settings=HygonSettings,
        device=device("hygon", "DCU-K100_AI", 65520, slots=4),
        whole={"hygon.com/dcunum": "2"},
        part={"hygon.com/dcunum": "1", "hygon.com/dcumem": "2000", "hygon.com/dcucores": "30"},
        part_mib=2000,
        bad=(
            ("hygon.com/dcunum", "2"),
            ("hygon.com/dcumem", "2Gi"),
            ("hygon.com/dcucores", "-1"),
        ),
        selector_uuid="hygon.com/use-gpuuuid",
    ),
    "iluvatar": Case(
        make=Iluvatar,
        settings=IluvatarSettings,
        device=device("iluvatar", "MR-V100", 32768),
        whole={"iluvatar.ai/MR-V100-vgpu": "2"},
        part={"iluvatar.ai/gpu": "1", "iluvatar.ai/vcuda-memory": "64"},
        part_mib=16384,
        bad=(("iluvatar.ai/gpu", "1.5"), ("iluvatar.ai/vcuda-memory", "16Gi")),
        selector_uuid="hami.io/use-MR-V100-uuid",
    ),
    "mthreads": Case(
        make=Mthreads,
        settings=MthreadsSettings,
        device=device("mthreads", "MTT S4000", 49152),
        whole={"mthreads.com/vgpu": "1"},
        part={
            "mthreads.com/vgpu": "1",
            "mthreads.com/sgpu-memory": "32",
            "mthreads.com/sgpu-core": "8",
        },
        part_mib=16384,
        bad=(
            ("mthreads.com/vgpu", "x"),
            ("mthreads.com/sgpu-memory", "33"),
            ("mthreads.com/sgpu-core", "1.5"),
        ),
        refuses_zero=True,
        selector_uuid="mthreads.ai/use-gpuuuid",
    ),
    "metax": Case(
        make=Metax,
        settings=MetaxSettings,
        device=device("metax", "MXC500", 65536, mode="sgpu", slots=16),
        whole={"metax-tech.com/gpu": "1"},
        part={
            "metax-tech.com/sgpu": "1",
            "metax-tech.com/vmemory": "4",
            "metax-tech.com/vcore": "60",
        },
        part_mib=4096,
        annotations={"metax-tech.com/sgpu-qos-policy": "fixed-share"},
        bad=(
            ("metax-tech.com/gpu", "1"),
            ("metax-tech.com/vmemory", "4Xi"),
            ("metax-tech.com/vcore", "x"),
        ),
        selector_uuid="metax-tech.com/use-gpuuuid",
    ),
    "enflame": Case(
        make=enflame.Enflame,
        settings=enflame.EnflameSettings,
        device=device(
            "enflame",
            "S60",
            49152,
            mode="drs",
            partitions=_DRS,
            resources={"slices": 6},
            slots=6,
        ),
        whole={"enflame.com/gcu": "1"},
        part={"enflame.com/gcu-memory": "10", "enflame.com/gcu-core": "20"},
        part_mib=16384,
        bad=(("enflame.com/gcu-memory", "0"), ("enflame.com/gcu-core", "0")),
        selector_uuid="enflame.com/use-gpuuuid",
    ),
    "kunlunxin": Case(
        make=Kunlunxin,
        settings=KunlunxinSettings,
        device=device("kunlunxin", "P800 OAM", 98304, mode="sriov"),
        whole={"kunlunxin.com/xpu": "1"},
        part={"kunlunxin.com/vxpu": "1", "kunlunxin.com/vxpu-memory": "20000"},
        part_mib=24576,
        bad=(("kunlunxin.com/vxpu", "3"), ("kunlunxin.com/vxpu-memory", "24Gi")),
        selector_uuid="hami.io/use-xpu-uuid",
    ),
    "awsneuron": Case(
        make=Awsneuron,
        settings=AwsneuronSettings,
        device=device(
            "awsneuron",
            "inferentia2",
            32768,
            partitions=(
                Profile(
                    name="1nc",
                    memory_mib=16384,
                    core_pct=50,
                    resources={"neuroncores": 1},
                    size=1,
                    starts=(0, 1),
                ),
                Profile(
                    memory_mib=32768,
                    core_pct=100,
                    resources={"neuroncores": 2},
                    size=2,
                    starts=(0,),
                ),
            ),
            resources={"neuroncores": 2},
            attributes={"cores": "2"},
        ),
        whole={"aws.amazon.com/neuron": "1"},
        part={"aws.amazon.com/neuroncore": "1"},
        part_mib=16384,
        bad=(("aws.amazon.com/neuroncore", "3"), ("aws.amazon.com/neuron", "x")),
        refuses_zero=True,
        selector_uuid="aws.amazon.com/use-neuron-uuid",
    ),
    "amd": Case(
        make=Amd,
        settings=AmdSettings,
        device=device("amd", "AMD Instinct MI300X VF", 196288),
        whole={"amd.com/gpu": "1"},
        part={"amd.com/gpu": "1", "amd.com/gpumem": "8000", "amd.com/gpucores": "25"},
        part_mib=8000,
        bad=(("amd.com/gpucores", "0"), ("amd.com/gpumem", "8Gi"), ("amd.com/gpu", "-1")),
        selector_uuid="amd.com/use-gpu-uuid",
    ),
    "biren": Case(
        make=Biren,
        settings=BirenSettings,
        device=device("biren", "Biren", 65024, mode="whole", slots=1),
        whole={"birentech.com/gpu": "1"},
        bad=(("birentech.com/gpu", "0.5"),),
        selector_uuid="birentech.com/use-gpuuuid",
    ),
    "vastai": Case(
        make=Vastai,
        settings=VastaiSettings,
        device=device("vastai", "Vastai", 16384, mode="whole", slots=1),
        whole={"vastaitech.com/va": "1"},
        bad=(("vastaitech.com/va", "1m"),),
        selector_uuid="vastaitech.com/use-gpuuuid",
    ),
}

for _path in sorted(Path(__file__).parent.glob("case_*.py")):
    CASES[_path.stem.removeprefix("case_")] = importlib.import_module(
        f"tests.contract.vendors.{_path.stem}"
    ).CASE
