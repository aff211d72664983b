# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for Cambricon cards. Memory in MiB, requested in blocks of 256 MiB."""

from hami_common.vendors.cambricon import CambriconSettings
from hami_common.vendors.catalog import VendorSettings
from tests.contract.vendors.fact import Fact, copies
from tests.contract.vendors.shape import device

CARD = device("cambricon", "MLU370-X4", 23308, mode="smlu")
ONE = {"cambricon.com/vmlu": 1}
MEMORY, CORE = "cambricon.com/mlu.smlu.vmemory", "cambricon.com/mlu.smlu.vcore"
WHOLE = "0: 23308 MiB, 100 %, whole"
PERCENT = VendorSettings(cambricon=CambriconSettings(memory_unit="percent"))

FACTS = (
    Fact(why="count alone is a whole card", on=CARD, limits=ONE, gives=(WHOLE,)),
    Fact(
        why="memory is in blocks of 256 MiB",
        on=CARD,
        limits={**ONE, MEMORY: 20, CORE: 30},
        gives=("0: 5120 MiB, 30 %",),
    ),
    Fact(
        why="memory without compute takes all of it",
        on=CARD,
        limits={**ONE, MEMORY: 20},
        gives=("0: 5120 MiB, 100 %, whole",),
    ),
    Fact(
        why="memory in percent, by the setting",
        on=CARD,
        limits={**ONE, MEMORY: 20, CORE: 20},
        settings=PERCENT,
        gives=("0: 4661 MiB, 20 %",),
        differs="cambricon-percent",
    ),
    Fact(
        why="memory in percent, by the name",
        on=CARD,
        limits={**ONE, f"{MEMORY}-percentage": 20, CORE: 20},
        gives=("0: 4661 MiB, 20 %",),
        differs="cambricon-percent",
    ),
    Fact(
        why="blocks win over the percentage",
        on=CARD,
        limits={**ONE, MEMORY: 20, f"{MEMORY}-percentage": 50, CORE: 30},
        gives=("0: 5120 MiB, 30 %",),
        warns=f"{MEMORY} wins",
        differs="cambricon-percent",
    ),
    Fact(
        why="compute above a card is all of it",
        on=CARD,
        limits={**ONE, MEMORY: 20, CORE: 120},
        gives=("0: 5120 MiB, 100 %, whole",),
        warns=f"{CORE} 120 is more than one device has, read as 100",
    ),
    Fact(
        why="parts of several cards",
        on=copies(CARD, 2),
        limits={"cambricon.com/vmlu": 2, MEMORY: 20},
        rejected="a container can have one sMLU instance only",
        differs="parts-of-several",
    ),
    Fact(
        why="parts only of cards in sMLU mode",
        on=device("cambricon", "MLU370-X4", 23308),
        limits={**ONE, MEMORY: 20, CORE: 30},
        waits="ModeNotFit: no device is in mode smlu",
        differs="cambricon-mode",
    ),
    Fact(
        why="memory without a count",
        on=CARD,
        limits={MEMORY: 20},
        rejected="add cambricon.com/vmlu: 1",
        differs="amount-without-count",
    ),
    Fact(
        why="count 0 is no device",
        on=CARD,
        limits={"cambricon.com/vmlu": 0},
        gives=(),
        warns="asks for no device",
    ),
    Fact(
        why="the names of the MLU370 are aliases",
        on=CARD,
        limits={"cambricon.com/mlunum": 1, "cambricon.com/mlu370.smlu.vmemory": 20, CORE: 30},
        gives=("0: 5120 MiB, 30 %",),
        warns="cambricon.com/mlu370.smlu.vmemory is read as cambricon.com/mlu.smlu.vmemory",
        differs="cambricon-370",
    ),
    Fact(
        why="types can be denied",
        on=CARD,
        limits=ONE,
        annotations={"cambricon.com/nouse-mlutype": "mlu370"},
        waits="CardTypeMismatch",
        differs="cambricon-types",
    ),
    Fact(
        why="HAMi's numbers of devices are rejected",
        on=CARD,
        limits=ONE,
        annotations={"cambricon.com/nouse-gpuuuid": "node-1-cambricon-mlu-0"},
        rejected="write the UUID that hamictl get devices shows",
        differs="numbered-uuids",
    ),
)
