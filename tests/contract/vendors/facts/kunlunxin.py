# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for Kunlunxin XPUs. Memory in MiB."""

from hami_common.vendors import kunlunxin
from tests.contract.vendors.fact import Fact, Limits, copies
from tests.contract.vendors.shape import device

XPU = device(
    "kunlunxin", "P800 OAM", 98304, mode="sriov", partitions=kunlunxin.partitions_of(98304)
)


def vxpu(memory_mib: int) -> Limits:
    """One vXPU."""
    return {"kunlunxin.com/vxpu": 1, "kunlunxin.com/vxpu-memory": memory_mib}


WHOLE = "0: 98304 MiB, 100 %, whole"

FACTS = (
    Fact(why="whole XPUs by count", on=XPU, limits={"kunlunxin.com/xpu": 1}, gives=(WHOLE,)),
    Fact(
        why="memory is rounded up to a quarter",
        on=XPU,
        limits=vxpu(20000),
        gives=("0: 24576 MiB, 25 %, 1/4",),
    ),
    Fact(
        why="memory is rounded up to a half",
        on=XPU,
        limits=vxpu(30000),
        gives=("0: 49152 MiB, 50 %, 1/2",),
    ),
    Fact(
        why="more than a half is a whole XPU, even above its memory",
        on=XPU,
        limits=vxpu(200_000),
        gives=(WHOLE,),
    ),
    Fact(
        why="a vXPU without memory is a whole XPU",
        on=XPU,
        limits={"kunlunxin.com/vxpu": 1},
        gives=(WHOLE,),
    ),
    Fact(
        why="memory 0 is unset",
        on=XPU,
        limits=vxpu(0),
        gives=(WHOLE,),
        differs="memory-zero",
    ),
    Fact(
        why="three devices cannot be connected",
        on=copies(XPU, 8),
        limits={"kunlunxin.com/xpu": 3},
        rejected="write 1, 2, 4 or 8",
    ),
    Fact(
        why="four quarters of an XPU and no fifth",
        on=XPU,
        limits=vxpu(20000),
        before=4,
        waits="CardInsufficientMemory",
    ),
    Fact(
        why="memory without a count",
        on=XPU,
        limits={"kunlunxin.com/vxpu-memory": 20000},
        rejected="add kunlunxin.com/vxpu: 1",
        differs="amount-without-count",
    ),
    Fact(
        why="count 0 is no device",
        on=XPU,
        limits={"kunlunxin.com/vxpu": 0},
        gives=(),
        warns="asks for no device",
    ),
    Fact(
        why="HAMi's numbers of devices are rejected",
        on=XPU,
        limits={"kunlunxin.com/xpu": 1},
        annotations={"baidu.com/use-gpuuuid": "node-1-kunlun-0"},
        rejected="write the UUID that hamictl get devices shows",
        differs="numbered-uuids",
    ),
)
