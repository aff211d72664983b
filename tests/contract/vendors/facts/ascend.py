# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for Ascend chips. Memory in MiB."""

from hami_common.model.device import Device
from hami_common.vendors import ascend
from tests.contract.vendors.fact import Fact, copies
from tests.contract.vendors.shape import device

SOFT = {ascend.MODE: ascend.SOFT_WORD}


def chip(word: str) -> Device:
    """A chip that templates divide."""
    about = next(one for one in ascend.CHIPS if one.word == word)
    return device(
        "ascend",
        word,
        about.memory_capacity_mib,
        mode=ascend.PART_MODE,
        partitions=ascend.partitions_of(about),
        resources=ascend.resources_of(about),
    )


def soft(word: str) -> Device:
    """A chip that the vendor's limiter shares."""
    about = next(one for one in ascend.CHIPS if one.word == word)
    return device("ascend", word, about.memory_capacity_mib)


def ask(word: str, count: int = 1, **more: int) -> dict[str, int]:
    """Names of the chip ``word``, with ``memory`` and ``core``."""
    name = f"huawei.com/{word}"
    return {name: count, **{f"{name}-{part}": value for part, value in more.items()}}


ROUNDED = (
    ("Ascend910B3", 16384, "16384 MiB, 25 %, vir05_1c_16g"),
    ("Ascend910B4", 5000, "8192 MiB, 25 %, vir05_1c_8g"),
    ("Ascend310P", 1024, "3072 MiB, 12 %, vir01"),
    ("Ascend310P", 4096, "6144 MiB, 25 %, vir02"),
    ("Ascend310P", 7000, "12288 MiB, 50 %, vir04"),
    ("Ascend310P", 13000, "21527 MiB, 100 %, whole"),
    ("Ascend310P", 24576, "21527 MiB, 100 %, whole"),
    ("Ascend910A", 8738, "8738 MiB, 26 %, vir08"),
    ("Ascend910B4-1", 16385, "32768 MiB, 50 %, vir10_3c_32g"),
    ("Ascend910C", 100, "16384 MiB, 25 %, vir05_1c_16g"),
)
B3_WHOLE = "0: 65536 MiB, 100 %, whole"

FACTS = (
    *(
        Fact(
            why=f"{memory} MiB of an {word} take the next template",
            on=chip(word),
            limits=ask(word, memory=memory),
            gives=(f"0: {gives}",),
            becomes={f"huawei.com/{word}-memory": str(memory)},
            differs="ascend-910c-part" if word == "Ascend910C" else "ascend-rounded",
        )
        for word, memory, gives in ROUNDED
    ),
    Fact(
        why="count alone is a whole chip",
        on=chip("Ascend910B3"),
        limits=ask("Ascend910B3"),
        gives=(B3_WHOLE,),
    ),
    Fact(
        why="memory 0 is unset",
        on=chip("Ascend310P"),
        limits=ask("Ascend310P", memory=0),
        gives=("0: 21527 MiB, 100 %, whole",),
        differs="memory-zero",
    ),
    Fact(
        why="several chips with memory 0 are whole ones",
        on=copies(chip("Ascend910B3"), 2),
        limits=ask("Ascend910B3", 2, memory=0),
        gives=(B3_WHOLE, "1: 65536 MiB, 100 %, whole"),
        differs="memory-zero",
    ),
    Fact(
        why="more memory than the chip has",
        on=chip("Ascend910B3"),
        limits=ask("Ascend910B3", memory=65537),
        rejected="more than the chip has; write at most 65536",
    ),
    Fact(
        why="parts of several chips",
        on=copies(chip("Ascend910B3"), 2),
        limits=ask("Ascend910B3", 2, memory=16384),
        rejected="a container can have one vNPU only",
    ),
    Fact(
        why="compute of a template follows from its memory",
        on=chip("Ascend910B3"),
        limits=ask("Ascend910B3", core=50),
        rejected="huawei.com/vnpu-mode: hami-core",
    ),
    Fact(
        why="memory without a count",
        on=chip("Ascend910B3"),
        limits={"huawei.com/Ascend910B3-memory": 16384},
        rejected="add huawei.com/Ascend910B3: 1",
        differs="amount-without-count",
    ),
    Fact(
        why="count 0 is no device",
        on=chip("Ascend910B3"),
        limits=ask("Ascend910B3", 0),
        gives=(),
        warns="asks for no device",
    ),
    Fact(
        why="soft shares have the requested size",
        on=soft("Ascend910B3"),
        limits=ask("Ascend910B3", memory=5000, core=30),
        annotations=SOFT,
        gives=("0: 5000 MiB, 30 %",),
        sees={"NPU_MEM_QUOTA": "5000", "NPU_PRIORITY": "30", "ASCEND_VISIBLE_DEVICES": "0"},
    ),
    Fact(
        why="compute of a soft share above a chip is all of it",
        on=soft("Ascend910B3"),
        limits=ask("Ascend910B3", memory=5000, core=120),
        annotations=SOFT,
        gives=("0: 5000 MiB, 100 %",),
        warns="huawei.com/Ascend910B3-core 120 is more than one device has, read as 100",
    ),
    Fact(
        why="a part without the annotation waits for a divided chip",
        on=soft("Ascend910B3"),
        limits=ask("Ascend910B3", memory=5000),
        waits="ModeNotFit",
        differs="ascend-part-on-soft",
    ),
    Fact(
        why="a soft part waits for a soft chip",
        on=chip("Ascend910B3"),
        limits=ask("Ascend910B3", memory=5000),
        annotations=SOFT,
        waits="ModeNotFit",
    ),
    Fact(
        why="a whole chip needs no soft chip",
        on=chip("Ascend910B3"),
        limits=ask("Ascend910B3"),
        annotations=SOFT,
        gives=(B3_WHOLE,),
        differs="ascend-whole-soft",
    ),
    Fact(
        why="an unknown mode is rejected",
        on=chip("Ascend910B3"),
        limits=ask("Ascend910B3"),
        annotations={ascend.MODE: "vir"},
        rejected="is not a mode",
        differs="ascend-mode",
    ),
    Fact(
        why="910C come in modules of two",
        on=copies(chip("Ascend910C"), 2),
        limits=ask("Ascend910C"),
        becomes={"huawei.com/Ascend910C": "2"},
        gives=(B3_WHOLE, "1: 65536 MiB, 100 %, whole"),
    ),
    Fact(
        why="three 910C are not whole modules",
        on=copies(chip("Ascend910C"), 4),
        limits=ask("Ascend910C", 3),
        rejected="3 chips are not whole modules of two; write 2 or 4",
    ),
    Fact(
        why="a 910B4 request never gets a 910B4-1",
        on=chip("Ascend910B4-1"),
        limits=ask("Ascend910B4"),
        waits="CardTypeMismatch: no device is of a type wanted: Ascend910B4",
        differs="ascend-types",
    ),
    Fact(
        why="six AI CPUs are six vir03_1c_8g",
        on=chip("Ascend910B2"),
        limits=ask("Ascend910B2", memory=8192),
        before=6,
        waits=(
            "CardPartitionInfeasible: vir03_1c_8g (8192 MiB) wanted: 1 aicpu needed, 0 of 6"
            " and 16384 MiB free (node)"
        ),
        differs="ascend-ai-cpus",
    ),
    *(
        Fact(
            why=f"any 910 as {word}, on an {type_}",
            on=chip(type_),
            limits=ask(word, memory=9000),
            gives=("0: 16384 MiB, 50 %, vir10_3c_16g",)
            if type_ == "Ascend910B4"
            else ("0: 16384 MiB, 25 %, vir05_1c_16g",),
            warns=f"huawei.com/{word} is read as huawei.com/Ascend910" if word[0] == "a" else "",
            differs="ascend-any-910",
        )
        for word in ("Ascend910", "ascend910")
        for type_ in ("Ascend910B3", "Ascend910B4")
    ),
    Fact(
        why="compute of any 910",
        on=soft("Ascend910B4"),
        limits=ask("ascend910", memory=9000, core=40),
        annotations=SOFT,
        gives=("0: 9000 MiB, 40 %",),
        sees={"NPU_MEM_QUOTA": "9000", "NPU_PRIORITY": "40"},
        warns="huawei.com/ascend910-core is read as huawei.com/Ascend910-core",
        differs="ascend-any-910",
    ),
    Fact(
        why="a 310P is no 910",
        on=chip("Ascend310P"),
        limits=ask("Ascend910"),
        waits="CardTypeMismatch",
        differs="ascend-any-910",
    ),
)
