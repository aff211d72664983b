# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for Biren devices. Memory in MiB."""

from tests.contract.vendors.fact import Fact, copies
from tests.contract.vendors.shape import device

CARD = device("biren", "Biren", 65024, mode="whole", slots=1)

FACTS = (
    Fact(
        why="whole devices by count",
        on=copies(CARD, 2),
        limits={"birentech.com/gpu": 2},
        gives=("0: 65024 MiB, 100 %, whole", "1: 65024 MiB, 100 %, whole"),
    ),
    Fact(
        why="count 0 is no device",
        on=CARD,
        limits={"birentech.com/gpu": 0},
        gives=(),
        warns="asks for no device",
    ),
    Fact(
        why="a device has one container",
        on=CARD,
        limits={"birentech.com/gpu": 1},
        before=1,
        waits="CardTimeSlicingExhausted",
    ),
    Fact(
        why="HAMi's numbers of cards are rejected",
        on=CARD,
        limits={"birentech.com/gpu": 1},
        annotations={"birentech.com/nouse-gpuuuid": "card_0"},
        rejected="write the UUID that hamictl get devices shows",
        differs="numbered-uuids",
    ),
)
