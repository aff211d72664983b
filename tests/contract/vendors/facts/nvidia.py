# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for NVIDIA devices. Memory in MiB."""

from hami_common.vendors.catalog import VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from tests.contract.vendors.fact import Fact, copies
from tests.contract.vendors.shape import device

A100 = device("nvidia", "NVIDIA A100-SXM4-40GB", 40960)
T4 = device("nvidia", "NVIDIA-Tesla T4", 15360)
ONE = {"nvidia.com/gpu": 1}
PART = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}
WHOLE = "0: 40960 MiB, 100 %, whole"
PART_GIVES = "0: 3000 MiB, 0 %"

FACTS = (
    Fact(
        why="count alone is a whole device",
        on=A100,
        limits=ONE,
        becomes={"nvidia.com/gpucores": "100"},
        gives=(WHOLE,),
        sees={"CUDA_DEVICE_MEMORY_LIMIT_0": None},
    ),
    Fact(
        why="memory is in MiB, compute unlimited without gpucores",
        on=A100,
        limits=PART,
        gives=(PART_GIVES,),
        sees={"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m", "CUDA_DEVICE_SM_LIMIT": "0"},
    ),
    Fact(
        why="memory without a count gets one device",
        on=A100,
        limits={"nvidia.com/gpumem": 3000},
        becomes={"nvidia.com/gpu": "1"},
        gives=(PART_GIVES,),
    ),
    Fact(
        why="memory without a count and without a default count is rejected",
        on=A100,
        limits={"nvidia.com/gpumem": 3000},
        settings=VendorSettings(nvidia=NvidiaSettings(default_count=0)),
        rejected="without a number of devices; add nvidia.com/gpu: 1",
        differs="amount-without-count",
    ),
    Fact(
        why="percentage and cores are per device",
        on=copies(A100, 2),
        limits={"nvidia.com/gpu": 2, "nvidia.com/gpumem-percentage": 50, "nvidia.com/gpucores": 30},
        gives=("0: 20480 MiB, 30 %", "1: 20480 MiB, 30 %"),
        sees={"CUDA_DEVICE_MEMORY_LIMIT_1": "20480m", "CUDA_DEVICE_SM_LIMIT_1": "30"},
    ),
    Fact(
        why="100 percent of the memory is a whole device",
        on=A100,
        limits={**ONE, "nvidia.com/gpumem-percentage": 100},
        gives=(WHOLE,),
    ),
    Fact(
        why="memory wins over its percentage",
        on=A100,
        limits={**PART, "nvidia.com/gpumem-percentage": 50},
        gives=(PART_GIVES,),
        warns="nvidia.com/gpumem wins",
    ),
    Fact(
        why="memory 0 is unset, and prevents the default of all compute",
        on=A100,
        limits={**ONE, "nvidia.com/gpumem": 0},
        gives=("0: 40960 MiB, 0 %",),
    ),
    Fact(
        why="compute above a device is all of it",
        on=A100,
        limits={**PART, "nvidia.com/gpucores": 150},
        gives=("0: 3000 MiB, 100 %, whole",),
        warns="nvidia.com/gpucores 150 is more than one device has, read as 100",
    ),
    Fact(
        why="count 0 is no device",
        on=A100,
        limits={"nvidia.com/gpu": 0},
        gives=(),
        warns="gets none",
    ),
    Fact(
        why="more devices than any node has are rejected",
        on=A100,
        limits={"nvidia.com/gpu": 65},
        rejected="write at most 64",
        differs="count-above-64",
    ),
    *(
        Fact(
            why=f"count {text} is rejected",
            on=A100,
            limits={"nvidia.com/gpu": text},
            rejected=f"resources.limits[nvidia.com/gpu]: '{text}'",
            differs="quantities",
        )
        for text in ("1.5", "-1", "4Gi")
    ),
    Fact(
        why="bytes are rejected with the number to write",
        on=A100,
        limits={**ONE, "nvidia.com/gpumem": "3Gi"},
        rejected="looks like bytes; the unit is MiB, not bytes: write 3072",
        differs="quantities",
    ),
    Fact(
        why="a negative percentage is rejected",
        on=A100,
        limits={**ONE, "nvidia.com/gpumem-percentage": -1},
        rejected="outside 0..100",
        differs="nvidia-percentage",
    ),
    Fact(
        why="a truth value that HAMi cannot read is rejected",
        on=A100,
        limits=ONE,
        annotations={"nvidia.com/numa-bind": "maybe"},
        rejected="is not a truth value",
        differs="nvidia-numa-bind",
    ),
    Fact(
        why="an unknown mode is rejected",
        on=A100,
        limits=ONE,
        annotations={"nvidia.com/vgpu-mode": "foo"},
        rejected="names no known mode",
        differs="nvidia-mode",
    ),
    Fact(
        why="an unknown policy is rejected",
        on=A100,
        limits=ONE,
        annotations={"hami.io/gpu-scheduler-policy": "tight"},
        rejected="is not a policy",
        differs="policies",
    ),
    Fact(
        why="a share without its limits is rejected",
        on=A100,
        limits=PART,
        variables={"CUDA_DISABLE_CONTROL": "true"},
        rejected="cannot switch its limits off",
        differs="nvidia-opt-out",
    ),
    Fact(
        why="the older spelling gpucore counts",
        on=A100,
        limits={**PART, "nvidia.com/gpucore": 30},
        gives=("0: 3000 MiB, 30 %",),
        warns="nvidia.com/gpucore is read as nvidia.com/gpucores",
        differs="nvidia-gpucore",
    ),
    *(
        Fact(
            why=f"priority {level} of {place}",
            on=A100,
            limits={**PART, "nvidia.com/priority": level} if place == "limits" else PART,
            variables={"CUDA_TASK_PRIORITY": str(level)} if place == "env" else {},
            gives=(PART_GIVES,),
            becomes={} if (place, level) == ("env", 1) else {"nvidia.com/priority": str(level)},
            sees={"CUDA_TASK_PRIORITY": str(level)},
            warns="is read as nvidia.com/priority" if (place, level) == ("env", 0) else "",
        )
        for place in ("limits", "env")
        for level in (0, 1)
    ),
    Fact(
        why="priorities above 7 are rejected",
        on=A100,
        limits={**PART, "nvidia.com/priority": 8},
        rejected="write at most 7",
        differs="nvidia-priority",
    ),
    *(
        Fact(
            why=f"type {word} matches any part of the type",
            on=(A100, copies(T4, 2)[1]),
            limits=ONE,
            annotations={"nvidia.com/use-gputype": word},
            gives=(WHOLE,),
        )
        for word in ("A100", "a100-sxm4", "V100, A100")
    ),
    Fact(
        why="a denied type matches any part of the type",
        on=(A100, copies(T4, 2)[1]),
        limits=ONE,
        annotations={"nvidia.com/nouse-gputype": "a100"},
        gives=("1: 15360 MiB, 100 %, whole",),
    ),
    Fact(
        why="all types denied",
        on=A100,
        limits=ONE,
        annotations={"nvidia.com/nouse-gputype": "A100,T4"},
        waits="CardTypeMismatch",
    ),
)
