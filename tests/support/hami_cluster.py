# SPDX-License-Identifier: Apache-2.0
"""A cluster that HAMi 2.10 runs: nodes with its registrations, pods with its annotations.

Written after HAMi's own formats and none of our code, as an independent input for our readers.
``python -m tests.support.hami_cluster`` writes ``tests/golden/hami/cluster.json``. Memory in MiB.
"""

import json
import random
from pathlib import Path
from typing import Any

Obj = dict[str, Any]
FILE = Path(__file__).resolve().parents[1] / "golden" / "hami" / "cluster.json"

NVIDIA, DCU, ILUVATAR, MLU, XPU = "NVIDIA", "DCU", "MR-V100", "MLU", "kunlun"
ALLOCATED = {
    NVIDIA: "hami.io/vgpu-devices-allocated",
    DCU: "hami.io/dcu-devices-allocated",
    ILUVATAR: "hami.io/MR-V100-devices-allocated",
    MLU: "hami.io/cambricon-mlu-devices-allocated",
    XPU: "hami.io/kunlun-allocated",
}
REGISTER = {
    NVIDIA: "hami.io/node-nvidia-register",
    DCU: "hami.io/node-dcu-register",
    ILUVATAR: "hami.io/node-MR-V100-register",
}
HANDSHAKE = {
    NVIDIA: "hami.io/node-handshake",
    DCU: "hami.io/node-handshake-dcu",
    ILUVATAR: "hami.io/node-handshake-MR-V100",
}
LIMITS = {
    NVIDIA: ("nvidia.com/gpu", "nvidia.com/gpumem", 1, "nvidia.com/gpucores"),
    DCU: ("hygon.com/dcunum", "hygon.com/dcumem", 1, "hygon.com/dcucores"),
    ILUVATAR: (
        "iluvatar.ai/MR-V100-vgpu",
        "iluvatar.ai/MR-V100.vMem",
        256,
        "iluvatar.ai/MR-V100.vCore",
    ),
    MLU: (
        "cambricon.com/vmlu",
        "cambricon.com/mlu.smlu.vmemory",
        256,
        "cambricon.com/mlu.smlu.vcore",
    ),
    XPU: ("kunlunxin.com/xpu", "", 1, ""),
}
MEMORY = {NVIDIA: 40_960, DCU: 65_536, ILUVATAR: 32_768, MLU: 24_576, XPU: 98_304}
SLOTS = {NVIDIA: 10, DCU: 4, ILUVATAR: 10, MLU: 100, XPU: 100}
DEVICES = {NVIDIA: 4, DCU: 4, ILUVATAR: 4, MLU: 4, XPU: 8}
NODES = {
    "gpu-a": NVIDIA,
    "gpu-b": NVIDIA,
    "gpu-c.example": NVIDIA,
    "dcu-a": DCU,
    "ilu-a": ILUVATAR,
    "mlu-a": MLU,
    "xpu-a": XPU,
}
PODS = {"gpu-a": 9, "gpu-b": 9, "gpu-c.example": 8, "dcu-a": 7, "ilu-a": 8, "mlu-a": 5, "xpu-a": 4}


def device_ids(node: str) -> list[str]:
    """HAMi's ids of the devices of a node."""
    word = NODES[node]
    names = {
        NVIDIA: "GPU-{node}-000{i}",
        DCU: "dcu-of-{node}-{i}",
        ILUVATAR: "GPU-ilu-{node}-{i}",
        MLU: "{node}-cambricon-mlu-{i}",
        XPU: "{node}-kunlun-{i}",
    }
    return [names[word].format(node=node, i=i) for i in range(DEVICES[word])]


def _node(name: str) -> Obj:
    word, ids = NODES[name], device_ids(name)
    mem, count = MEMORY[word], SLOTS[word]
    notes: dict[str, str] = {}
    if word == NVIDIA:
        notes[REGISTER[word]] = json.dumps(
            [
                {"id": one, "index": i, "count": count, "devmem": mem, "devcore": 100}
                | {"type": "NVIDIA A100-SXM4-40GB", "mode": "hami-core", "health": True}
                for i, one in enumerate(ids)
            ]
        )
    elif word in REGISTER:
        notes[REGISTER[word]] = "".join(
            f"{one},{count},{mem},100,{word},0,true,{i},hami-core:" for i, one in enumerate(ids)
        )
    if word in HANDSHAKE:
        notes[HANDSHAKE[word]] = "Requesting_2026-08-01 10:00:00"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"gpu": "on"}, "annotations": notes},
        "spec": {},
    }


class _Room:
    """Free capacity of one device."""

    def __init__(self, word: str) -> None:
        self.mem, self.cores, self.slots = MEMORY[word], 100, SLOTS[word]


def build(seed: int = 2010) -> Obj:
    """Nodes, and fifty pods placed by HAMi's rules."""
    rng = random.Random(seed)
    pods = []
    for node, count in PODS.items():
        room = {one: _Room(NODES[node]) for one in device_ids(node)}
        own: list[Obj] = []
        while len(own) < count:
            pod = _pod(rng, f"{node.partition('.')[0]}-{len(own)}", node, NODES[node], room)
            own += [] if pod is None else [pod]
        pods += own
    return {"nodes": [_node(name) for name in NODES], "pods": pods}


def _pod(rng: random.Random, name: str, node: str, word: str, room: dict[str, _Room]) -> Obj | None:
    """One pod; ``None`` where it does not fit."""
    plain = {"name": "plain", "image": "x"}
    init: list[Obj] = []
    apps: list[Obj] = []
    entries: list[str] = []
    asking = 2 if word == NVIDIA and rng.random() < 0.3 else 1
    for number in range(asking):
        count = 2 if word == NVIDIA and rng.random() < 0.2 else 1
        mem = 1024 * rng.randint(2, 5)
        cores = rng.choice((5, 10, 15))
        if word == XPU:
            mem, cores = MEMORY[word], 100
        free = [
            one
            for one, left in room.items()
            if left.mem >= mem and left.cores >= cores and left.slots > 0
        ]
        if len(free) < count:
            return None
        chosen = rng.sample(free, count)
        for one in chosen:
            left = room[one]
            left.mem, left.cores, left.slots = left.mem - mem, left.cores - cores, left.slots - 1
        names = LIMITS[word]
        limits = {names[0]: str(count)}
        if names[1]:
            limits |= {names[1]: str(mem // names[2]), names[3]: str(cores)}
        apps.append({"name": f"main-{number}", "image": "x", "resources": {"limits": limits}})
        entries.append("".join(f"{one},{word},{mem},{cores}:" for one in chosen) + ";")
    if rng.random() < 0.3:
        # HAMi loses the empty entries of vendors whose devices have a model name.
        at = rng.randint(0, len(apps))
        apps.insert(at, plain)
        if word not in {NVIDIA, DCU}:
            entries.insert(at, ";")
    if rng.random() < 0.2:
        init.append({**plain, "name": "setup"})
        if word not in {NVIDIA, DCU}:
            entries.insert(0, ";")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "labels": {"hami.io/vgpu-node": node},
            "annotations": {
                ALLOCATED[word]: "".join(entries),
                "hami.io/vgpu-node": node,
                "hami.io/vgpu-time": "1785578400",
                "hami.io/bind-time": "1785578401",
                "hami.io/bind-phase": "success",
            },
        },
        "spec": {
            "schedulerName": "hami-scheduler",
            "nodeName": node,
            "initContainers": init,
            "containers": apps,
        },
        "status": {"phase": "Running"},
    }


def text() -> str:
    """The committed file."""
    return json.dumps(build(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
