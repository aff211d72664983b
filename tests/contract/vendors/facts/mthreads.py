# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for Moore Threads devices. Memory in MiB, requested in blocks of 512 MiB."""

from tests.contract.vendors.fact import Fact, copies
from tests.contract.vendors.shape import device

S4000 = device("mthreads", "MTT S4000", 49152)
ONE = {"mthreads.com/vgpu": 1}
MEMORY, CORE = "mthreads.com/sgpu-memory", "mthreads.com/sgpu-core"
WHOLE = "0: 49152 MiB, 100 %, whole"

FACTS = (
    Fact(why="count alone is a whole device", on=S4000, limits=ONE, gives=(WHOLE,)),
    Fact(
        why="compute without memory is a whole device",
        on=S4000,
        limits={**ONE, CORE: 4},
        gives=(WHOLE,),
    ),
    Fact(
        why="memory in blocks of 512 MiB, compute in sixteenths",
        on=S4000,
        limits={**ONE, MEMORY: 32, CORE: 8},
        gives=("0: 16384 MiB, 50 %",),
        sees={
            "MTHREADS_QOS_MEMORY_LIMIT": str(16384 << 20),
            "MTHREADS_QOS_COMPUTING_POWER_WEIGHT": "50",
        },
    ),
    Fact(
        why="other sizes are rejected",
        on=S4000,
        limits={**ONE, MEMORY: 5},
        rejected="write 2, 4, 8, 16, 32, 64 or 96",
    ),
    Fact(
        why="memory 0 is unset",
        on=S4000,
        limits={**ONE, MEMORY: 0},
        gives=(WHOLE,),
        differs="memory-zero",
    ),
    Fact(
        why="several devices are whole ones",
        on=copies(S4000, 2),
        limits={"mthreads.com/vgpu": 2, MEMORY: 192, CORE: 32},
        gives=(WHOLE, "1: 49152 MiB, 100 %, whole"),
    ),
    Fact(
        why="containers may have different devices",
        on=copies(S4000, 2),
        limits=ONE,
        more=(ONE,),
        gives=(WHOLE, "1: 49152 MiB, 100 %, whole"),
        differs="mthreads-containers",
    ),
    Fact(
        why="compute above a device is all of it",
        on=S4000,
        limits={**ONE, MEMORY: 32, CORE: 20},
        gives=("0: 16384 MiB, 100 %, whole",),
        warns=f"{CORE} 20 is more than one device has, read as 16",
    ),
    Fact(
        why="count 0 is rejected",
        on=S4000,
        limits={"mthreads.com/vgpu": 0},
        rejected="mthreads.com/vgpu]: 0 is no request",
    ),
    Fact(
        why="memory without a count",
        on=S4000,
        limits={MEMORY: 32},
        rejected="add mthreads.com/vgpu: 1",
        differs="amount-without-count",
    ),
    Fact(
        why="HAMi's numbers of devices are rejected",
        on=S4000,
        limits=ONE,
        annotations={"mthreads.ai/nouse-gpuuuid": "node-1-mthreads-0"},
        rejected="write the UUID that hamictl get devices shows",
        differs="numbered-uuids",
    ),
)
