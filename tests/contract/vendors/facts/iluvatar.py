# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for Iluvatar chips. Memory in MiB, requested in blocks of 256 MiB."""

from tests.contract.vendors.fact import Fact, copies
from tests.contract.vendors.shape import device

CHIP = device("iluvatar", "MR-V100", 32768)
ONE = {"iluvatar.ai/MR-V100-vgpu": 1}
MEMORY, CORE = "iluvatar.ai/MR-V100.vMem", "iluvatar.ai/MR-V100.vCore"

FACTS = (
    Fact(
        why="count alone is a whole chip",
        on=CHIP,
        limits=ONE,
        gives=("0: 32768 MiB, 100 %, whole",),
        sees={"SOL_CONTINER_NAME": "c0", "IX_VISIBLE_DEVICES": "iluvatar-0"},
    ),
    Fact(
        why="memory is in blocks of 256 MiB",
        on=CHIP,
        limits={**ONE, MEMORY: 64, CORE: 50},
        gives=("0: 16384 MiB, 50 %",),
    ),
    Fact(
        why="the older names match any chip",
        on=CHIP,
        limits={"iluvatar.ai/gpu": 1, "iluvatar.ai/vcuda-memory": 64, "iluvatar.ai/vcuda-core": 50},
        gives=("0: 16384 MiB, 50 %",),
        differs="iluvatar-names",
    ),
    Fact(
        why="several chips are whole ones",
        on=copies(CHIP, 2),
        limits={"iluvatar.ai/MR-V100-vgpu": 2, MEMORY: 64, CORE: 200},
        gives=("0: 32768 MiB, 100 %, whole", "1: 32768 MiB, 100 %, whole"),
    ),
    Fact(
        why="compute above a chip is all of it",
        on=CHIP,
        limits={**ONE, MEMORY: 64, CORE: 120},
        gives=("0: 16384 MiB, 100 %, whole",),
        warns=f"{CORE} 120 is more than one device has, read as 100",
    ),
    Fact(
        why="memory without a count",
        on=CHIP,
        limits={MEMORY: 64},
        rejected="add iluvatar.ai/MR-V100-vgpu: 1",
        differs="amount-without-count",
    ),
    Fact(
        why="count 0 is no device",
        on=CHIP,
        limits={"iluvatar.ai/MR-V100-vgpu": 0},
        gives=(),
        warns="asks for no device",
    ),
    Fact(
        why="a name selects its chip",
        on=CHIP,
        limits={"iluvatar.ai/MR-V50-vgpu": 1},
        waits="CardTypeMismatch: no device is of a type wanted: MR-V50",
    ),
)
