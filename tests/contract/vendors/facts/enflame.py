# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for Enflame cards. Memory in MiB."""

from hami_common.vendors import enflame
from tests.contract.vendors.fact import Fact
from tests.contract.vendors.shape import device

SIZES = enflame.partitions_of({"1g.8gb": (1, 8), "2g.16gb": (2, 16), "6g.48gb": (6, 48)})
CARD = device(
    "enflame", "S60", 49152, mode="drs", partitions=SIZES, resources={"slices": 6}, slots=6
)
NATIVE = device("enflame", "S60", 49152)
TWO = "0: 16384 MiB, 33 %, 2g.16gb"

FACTS = (
    Fact(
        why="whole cards by count",
        on=NATIVE,
        limits={"enflame.com/gcu": 1},
        gives=("0: 49152 MiB, 100 %, whole",),
    ),
    Fact(why="slices by size", on=CARD, limits={"enflame.com/drs-gcu": 2}, gives=(TWO,)),
    Fact(
        why="slices win over memory and compute",
        on=CARD,
        limits={"enflame.com/drs-gcu": 2, "enflame.com/gcu-memory": 1},
        gives=(TWO,),
    ),
    Fact(
        why="a size that no card has",
        on=CARD,
        limits={"enflame.com/drs-gcu": 3},
        waits="CardPartitionMismatch",
    ),
    Fact(
        why="count 0 is rejected",
        on=CARD,
        limits={"enflame.com/drs-gcu": 0},
        rejected="enflame.com/drs-gcu]: 0 is no request",
    ),
    Fact(
        why="memory and compute get the smallest slice",
        on=CARD,
        limits={"enflame.com/gcu-memory": 5, "enflame.com/gcu-core": 30},
        becomes={"enflame.com/vgcu": "1"},
        gives=(TWO,),
        differs="enflame-vgcu",
    ),
    Fact(
        why="large numbers of memory are MiB",
        on=CARD,
        limits={"enflame.com/gcu-memory": 7000},
        gives=("0: 8192 MiB, 16 %, 1g.8gb",),
        differs="enflame-units",
    ),
    Fact(
        why="compute above a card is all of it",
        on=CARD,
        limits={"enflame.com/gcu-memory": 5, "enflame.com/gcu-core": 120},
        gives=("0: 49152 MiB, 100 %, 6g.48gb",),
        warns="enflame.com/gcu-core 120 is more than one device has, read as 100",
        differs="compute-above",
    ),
    *(
        Fact(
            why=f"{name} of 0 is rejected",
            on=CARD,
            limits={name: 0},
            rejected="0 is no share",
        )
        for name in ("enflame.com/gcu-memory", "enflame.com/gcu-core")
    ),
    Fact(
        why="HAMi's numbers of devices are rejected",
        on=CARD,
        limits={"enflame.com/drs-gcu": 2},
        annotations={"enflame.com/nouse-gpuuuid": "node-1-enflame-drs-0"},
        rejected="write the UUID that hamictl get devices shows",
        differs="numbered-uuids",
    ),
    Fact(
        why="HAMi's numbers of whole cards are rejected",
        on=NATIVE,
        limits={"enflame.com/gcu": 1},
        annotations={"enflame.com/nouse-gpuuuid": "node-1-GCU-0"},
        rejected="write the UUID that hamictl get devices shows",
        differs="numbered-uuids",
    ),
)
