# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for Vastai devices. Memory in MiB."""

from tests.contract.vendors.fact import Fact, copies
from tests.contract.vendors.shape import device

CARD = device("vastai", "Vastai", 16384, mode="whole", slots=1)

FACTS = (
    Fact(
        why="whole devices by count",
        on=copies(CARD, 2),
        limits={"vastaitech.com/va": 2},
        gives=("0: 16384 MiB, 100 %, whole", "1: 16384 MiB, 100 %, whole"),
    ),
    Fact(
        why="count 0 is no device",
        on=CARD,
        limits={"vastaitech.com/va": 0},
        gives=(),
        warns="asks for no device",
    ),
    Fact(
        why="a device has one container",
        on=CARD,
        limits={"vastaitech.com/va": 1},
        before=1,
        waits="CardTimeSlicingExhausted",
    ),
)
