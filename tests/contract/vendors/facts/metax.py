# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for MetaX devices. Memory in MiB, requested in GiB or bytes."""

from tests.contract.vendors.fact import Fact, Limits, copies
from tests.contract.vendors.shape import device

CARD = device("metax", "MXC500", 65536, mode="sgpu", slots=16)
WHOLE = device("metax", "MXC500", 65536, mode="native")
ONE: Limits = {"metax-tech.com/sgpu": 1}
MEMORY, CORE = "metax-tech.com/vmemory", "metax-tech.com/vcore"
QOS, APP = "metax-tech.com/sgpu-qos-policy", "metax-tech.com/sgpu-app-class"
PART: Limits = {**ONE, MEMORY: "4", CORE: 30}

FACTS = (
    Fact(
        why="whole GPUs by count",
        on=copies(WHOLE, 2),
        limits={"metax-tech.com/gpu": 2},
        gives=("0: 65536 MiB, 100 %, whole", "1: 65536 MiB, 100 %, whole"),
    ),
    Fact(
        why="containers may have GPUs of their own",
        on=copies(WHOLE, 2),
        limits={"metax-tech.com/gpu": 1},
        more=({"metax-tech.com/gpu": 1},),
        gives=("0: 65536 MiB, 100 %, whole", "1: 65536 MiB, 100 %, whole"),
        differs="metax-containers",
    ),
    Fact(
        why="a bare number of memory is GiB",
        on=CARD,
        limits=PART,
        gives=("0: 4096 MiB, 30 %, best-effort",),
    ),
    Fact(
        why="memory with letters is bytes",
        on=CARD,
        limits={**PART, MEMORY: "512Mi"},
        gives=("0: 512 MiB, 30 %, best-effort",),
    ),
    Fact(
        why="memory takes the driver's steps of 128 MiB",
        on=CARD,
        limits={**PART, MEMORY: "9000Mi"},
        gives=("0: 9088 MiB, 30 %, best-effort",),
        differs="metax-steps",
    ),
    Fact(
        why="memory without compute takes all of it",
        on=CARD,
        limits={**ONE, MEMORY: "4"},
        gives=("0: 4096 MiB, 100 %, best-effort, whole",),
    ),
    Fact(
        why="compute above a device is all of it",
        on=CARD,
        limits={**PART, CORE: 120},
        gives=("0: 4096 MiB, 100 %, best-effort, whole",),
        warns=f"{CORE} 120 is more than one device has, read as 100",
    ),
    Fact(
        why="the pod names the class of its sGPU",
        on=CARD,
        limits=PART,
        annotations={QOS: "fixed-share"},
        gives=("0: 4096 MiB, 30 %, fixed-share",),
    ),
    Fact(
        why="an unknown class is rejected",
        on=CARD,
        limits=PART,
        annotations={QOS: "best"},
        rejected="is not a class",
    ),
    Fact(
        why="an unknown class is rejected beside an app class, too",
        on=CARD,
        limits=PART,
        annotations={QOS: "best", APP: "online"},
        rejected="is not a class",
        differs="metax-qos-online",
    ),
    Fact(
        why="an empty app class is none",
        on=CARD,
        limits=PART,
        annotations={APP: ""},
        gives=("0: 4096 MiB, 30 %, best-effort",),
        differs="metax-empty-class",
    ),
    Fact(
        why="an online pod takes no compute",
        on=CARD,
        limits={**PART, CORE: 100},
        annotations={APP: "online"},
        gives=("0: 4096 MiB, 0 %, online",),
    ),
    Fact(
        why="a container with an app class has one sGPU",
        on=copies(CARD, 2),
        limits={**PART, "metax-tech.com/sgpu": 2},
        annotations={APP: "offline"},
        rejected="has one sGPU",
    ),
    Fact(
        why="sGPUs only of cards in sGPU mode",
        on=WHOLE,
        limits=PART,
        waits="ModeNotFit: no device is in mode sgpu",
        differs="metax-mode",
    ),
    Fact(
        why="memory without a count",
        on=CARD,
        limits={MEMORY: "4"},
        rejected="add metax-tech.com/sgpu: 1",
        differs="amount-without-count",
    ),
    Fact(
        why="count 0 is no device",
        on=CARD,
        limits={"metax-tech.com/sgpu": 0},
        gives=(),
        warns="asks for no device",
    ),
    Fact(
        why="HAMi's numbers of devices are rejected",
        on=CARD,
        limits=PART,
        annotations={"metax-tech.com/nouse-gpuuuid": "node-1-metax-0"},
        rejected="write the UUID that hamictl get devices shows",
        differs="numbered-uuids",
    ),
)
