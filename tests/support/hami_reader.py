# SPDX-License-Identifier: Apache-2.0
"""Counts a cluster as HAMi 2.10's scheduler does: from annotations of nodes and pods, nothing else.

Pods count that carry ``hami.io/vgpu-node``, are not finished, and name a device in one of the keys;
entries at the places of init containers run before the others, so a device holds the larger of both
(HAMi's ``pkg/device/pods.go`` and ``initContainer.go``). None of our code. Memory in MiB.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, NamedTuple

Obj = dict[str, Any]


class Used(NamedTuple):
    """Use of a device in HAMi's view."""

    mem: int = 0
    cores: int = 0
    slots: int = 0


class Total(NamedTuple):
    """Registered capacity of a device."""

    mem: int
    cores: int
    slots: int


def registered(node: Obj) -> dict[str, Total]:
    """Devices that a node offers to HAMi."""
    found: dict[str, Total] = {}
    for key, text in (node["metadata"].get("annotations") or {}).items():
        if not (key.startswith("hami.io/node-") and "register" in key):
            continue
        if text.startswith("["):
            for one in json.loads(text):
                found[one["id"]] = Total(one["devmem"], one["devcore"], one["count"])
        else:
            for entry in filter(None, text.split(":")):
                fields = entry.split(",")
                assert len(fields) in {7, 9}, entry
                found[fields[0]] = Total(int(fields[2]), int(fields[3]), int(fields[1]))
    return found


@dataclass(frozen=True)
class Registration:
    """All fields of a device that a node registers; HAMi's JSON omits zeros and false."""

    id: str
    index: int = 0
    count: int = 0
    devmem: int = 0
    devcore: int = 0
    type: str = ""
    numa: int = 0
    mode: str = ""
    health: bool = False


_JSON_REGISTERS = re.compile(
    r"hami\.io/(node-nvidia-register|node-register-(Ascend\w+(-1)?|xpu)|node-(va|biren|amd)-register)"
)
_CSV_REGISTERS = re.compile(r"hami\.io/node-(dcu|MR-V\d+|BI-V\d+)-register")


def registrations(node: Obj) -> dict[str, list[Registration]]:
    """Return the registered devices by annotation, read in the form that HAMi has for that key."""
    found: dict[str, list[Registration]] = {}
    for key, text in (node["metadata"].get("annotations") or {}).items():
        if _JSON_REGISTERS.fullmatch(key):
            names = [field.name for field in fields(Registration)]
            found[key] = [
                Registration(**{name: one[name] for name in names if name in one})
                for one in json.loads(text)
            ]
        elif _CSV_REGISTERS.fullmatch(key):
            assert text.endswith(":"), text
            found[key] = [_from_csv(entry.split(",")) for entry in text[:-1].split(":")]
    return found


def _from_csv(items: list[str]) -> Registration:
    assert len(items) in {7, 9}, items
    count, devmem, devcore = map(int, items[1:4])
    return Registration(
        id=items[0],
        index=int(items[7]) if len(items) == 9 else 0,
        count=count,
        devmem=devmem,
        devcore=devcore,
        type=items[4],
        numa=int(items[5]),
        mode=items[8] if len(items) == 9 else "hami-core",
        health={"true": True, "false": False}[items[6]],
    )


def handshakes(node: Obj) -> dict[str, datetime]:
    """Return the times that plugins reported, by annotation."""
    return {
        key: datetime.strptime(text, "Reported_%Y.%m.%d %H:%M:%S").replace(tzinfo=UTC)
        for key, text in (node["metadata"].get("annotations") or {}).items()
        if key.startswith("hami.io/node-handshake")
    }


def chips(pod: Obj) -> dict[str, list[Obj]]:
    """Return a pod's Ascend chips by word, as HAMi's Ascend plugin and HAMi-WebUI read them."""
    return {
        key.partition("/")[2]: json.loads(text)
        for key, text in (pod["metadata"].get("annotations") or {}).items()
        if re.fullmatch(r"huawei\.com/Ascend[\w-]+", key)
    }


def placed(pods: Iterable[Obj]) -> list[Obj]:
    """Pods that HAMi's scheduler counts."""
    return [
        pod
        for pod in pods
        if "hami.io/vgpu-node" in (pod["metadata"].get("annotations") or {})
        and (pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}
    ]


def used(pods: Iterable[Obj]) -> dict[tuple[str, str], Used]:
    """By (node, device): use by pods."""
    total: dict[tuple[str, str], Used] = defaultdict(Used)
    for pod in placed(pods):
        notes = pod["metadata"]["annotations"]
        node = notes["hami.io/vgpu-node"]
        for device, own in _of_pod(pod, notes).items():
            before = total[node, device]
            total[node, device] = Used(*(a + b for a, b in zip(before, own, strict=True)))
    return dict(total)


def _of_pod(pod: Obj, notes: dict[str, str]) -> dict[str, Used]:
    inits = len(pod["spec"].get("initContainers") or [])
    first: dict[str, Used] = {}
    apps: dict[str, Used] = defaultdict(Used)
    for key, text in notes.items():
        if not (key.startswith("hami.io/") and key.endswith("-allocated")):
            continue
        for place, container in enumerate(text.split(";")):
            for entry in filter(None, container.split(":")):
                device, _, mem, cores = entry.split(",")[:4]
                one = Used(int(mem), int(cores), 1)
                if place < inits:
                    before = first.get(device, Used())
                    first[device] = Used(*(max(a, b) for a, b in zip(before, one, strict=True)))
                else:
                    apps[device] = Used(*(a + b for a, b in zip(apps[device], one, strict=True)))
    return {
        device: Used(
            *(max(a, b) for a, b in zip(first.get(device, Used()), apps[device], strict=True))
        )
        for device in {*first, *apps}
    }


def over_capacity(nodes: Iterable[Obj], pods: Iterable[Obj]) -> list[str]:
    """Devices that are over-booked in HAMi's view, one line each."""
    totals = {
        (node["metadata"]["name"], device): total
        for node in nodes
        for device, total in registered(node).items()
    }
    return [
        f"{node} {device}: {own} of {totals[node, device]}"
        for (node, device), own in sorted(used(pods).items())
        if (node, device) in totals
        and any(a > b for a, b in zip(own, totals[node, device], strict=True))
    ]
