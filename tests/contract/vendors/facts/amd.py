# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for AMD devices. Memory in MiB."""

from tests.contract.vendors.fact import Fact
from tests.contract.vendors.shape import device

MI300X = device("amd", "AMD Instinct MI300X VF", 196288)
ONE = {"amd.com/gpu": 1}
WHOLE = "0: 196288 MiB, 100 %, whole"

FACTS = (
    Fact(why="count alone is a whole device", on=MI300X, limits=ONE, gives=(WHOLE,)),
    Fact(
        why="memory is in MiB, compute in percent",
        on=MI300X,
        limits={**ONE, "amd.com/gpumem": 8000, "amd.com/gpucores": 25},
        gives=("0: 8000 MiB, 25 %",),
        sees={"HIP_DEVICE_MEMORY_LIMIT": "8000m", "ROCR_VISIBLE_DEVICES": "amd-0"},
    ),
    Fact(
        why="memory without compute takes all of it",
        on=MI300X,
        limits={**ONE, "amd.com/gpumem": 8000},
        gives=("0: 8000 MiB, 100 %, whole",),
    ),
    Fact(
        why="memory 0 is unset",
        on=MI300X,
        limits={**ONE, "amd.com/gpumem": 0},
        gives=(WHOLE,),
    ),
    Fact(
        why="compute 0 is rejected",
        on=MI300X,
        limits={**ONE, "amd.com/gpucores": 0},
        rejected="0 is no share of compute",
    ),
    Fact(
        why="compute above a device is all of it",
        on=MI300X,
        limits={**ONE, "amd.com/gpucores": 120},
        gives=(WHOLE,),
        warns="amd.com/gpucores 120 is more than one device has, read as 100",
        differs="compute-above",
    ),
    Fact(
        why="memory without a count",
        on=MI300X,
        limits={"amd.com/gpumem": 8000},
        rejected="add amd.com/gpu: 1",
        differs="amount-without-count",
    ),
    Fact(
        why="count 0 is no device",
        on=MI300X,
        limits={"amd.com/gpu": 0},
        gives=(),
        warns="asks for no device",
    ),
    Fact(
        why="a type matches any part of the type",
        on=MI300X,
        limits=ONE,
        annotations={"amd.com/use-gputype": "mi300"},
        gives=(WHOLE,),
    ),
    Fact(
        why="a denied type matches any part of the type",
        on=MI300X,
        limits=ONE,
        annotations={"amd.com/nouse-gputype": "MI300"},
        waits="CardTypeMismatch",
    ),
)
