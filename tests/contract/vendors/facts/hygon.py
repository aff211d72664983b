# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for Hygon DCUs. Memory in MiB."""

from tests.contract.vendors.fact import Fact, copies
from tests.contract.vendors.shape import device

K100_AI = device("hygon", "DCU-K100_AI", 65520, slots=4)
Z100L = device("hygon", "DCU-Z100L", 32752, slots=4)
ONE = {"hygon.com/dcunum": 1}
MEMORY, CORES = "hygon.com/dcumem", "hygon.com/dcucores"
WHOLE = "0: 65520 MiB, 100 %, whole"

FACTS = (
    Fact(why="count alone is a whole DCU", on=K100_AI, limits=ONE, gives=(WHOLE,)),
    Fact(
        why="memory is in MiB, compute in percent",
        on=K100_AI,
        limits={**ONE, MEMORY: 2000, CORES: 30},
        gives=("0: 2000 MiB, 30 %",),
    ),
    Fact(
        why="memory without compute takes all of it",
        on=K100_AI,
        limits={**ONE, MEMORY: 2000},
        gives=("0: 2000 MiB, 100 %, whole",),
    ),
    Fact(
        why="compute above a DCU is all of it",
        on=K100_AI,
        limits={**ONE, MEMORY: 2000, CORES: 120},
        gives=("0: 2000 MiB, 100 %, whole",),
        warns="hygon.com/dcucores 120 is more than one device has, read as 100",
    ),
    Fact(
        why="parts of several DCUs",
        on=copies(K100_AI, 2),
        limits={"hygon.com/dcunum": 2, MEMORY: 2000},
        rejected="a container can have one virtual DCU only",
        differs="parts-of-several",
    ),
    Fact(
        why="memory that is no number",
        on=K100_AI,
        limits={**ONE, MEMORY: "2Gi"},
        rejected="looks like bytes",
        differs="quantities",
    ),
    Fact(
        why="memory without a count",
        on=K100_AI,
        limits={MEMORY: 2000},
        rejected="add hygon.com/dcunum: 1",
        differs="amount-without-count",
    ),
    Fact(
        why="count 0 is no device",
        on=K100_AI,
        limits={"hygon.com/dcunum": 0},
        gives=(),
        warns="asks for no device",
    ),
    *(
        Fact(
            why=f"type {word} matches any part of the type",
            on=K100_AI,
            limits=ONE,
            annotations={"hygon.com/use-dcutype": word},
            gives=(WHOLE,),
        )
        for word in ("K100", "K100_AI", "k100_ai", "DCU-K100_AI", "Z100,K100")
    ),
    Fact(
        why="type Z100 matches a Z100L",
        on=Z100L,
        limits=ONE,
        annotations={"hygon.com/use-dcutype": "Z100"},
        gives=("0: 32752 MiB, 100 %, whole",),
    ),
    *(
        Fact(
            why=f"denied type {word} matches any part of the type",
            on=Z100L,
            limits=ONE,
            annotations={"hygon.com/nouse-dcutype": word},
            waits="CardTypeMismatch",
        )
        for word in ("K100_AI,Z100", "z100l", "DCU")
    ),
)
