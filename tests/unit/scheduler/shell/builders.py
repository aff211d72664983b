# SPDX-License-Identifier: Apache-2.0
"""Pods, devices and extender calls for tests of the scheduler's shell."""

import json
from typing import Any

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Burst, Device
from hami_common.pods import annotations
from tests.support.builders import as_admitted

Obj = dict[str, Any]


def pod(
    name: str,
    *,
    gpu: int | None = 1,
    mem_mib: int = 1000,
    cores: int = 10,
    uid: str = "",
    namespace: str = "default",
    managed: bool = True,
    annotated: dict[str, str] | None = None,
) -> Obj:
    """A pod as the webhook leaves it; ``gpu=None`` requests no device."""
    limits: dict[str, str] = {"cpu": "1"}
    if gpu is not None:
        limits |= {
            "nvidia.com/gpu": str(gpu),
            "nvidia.com/gpumem": str(mem_mib),
            "nvidia.com/gpucores": str(cores),
        }
    made: Obj = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"uid-{name}",
            "labels": {},
            "annotations": dict(annotated or {}),
        },
        "spec": {
            "schedulerName": "hami-scheduler",
            "containers": [
                {
                    "name": "main",
                    "image": "x",
                    "resources": {"limits": limits},
                }
            ],
        },
        "status": {"phase": "Pending"},
    }
    made = as_admitted(made)
    if not managed:
        del made["metadata"]["labels"][annotations.MANAGED_LABEL]
    return made


def devices(
    node: str,
    *,
    count: int = 1,
    memory_mib: int = 16000,
    slots: int = 16,
    boot_id: str = "boot-1",
    seq: int = 1,
    bursts: dict[str, int] | None = None,
) -> NodeDevices:
    """Canonical devices of a node, all equal.

    ``bursts``: memory (MiB) of each that pods use beyond their requests, by name.
    """
    return NodeDevices(
        node=node,
        vendor="nvidia",
        boot_id=boot_id,
        seq=seq,
        time_s=0.0,
        config_generation=1,
        devices=tuple(
            Device(
                uuid=f"GPU-{node}-{index}",
                vendor="nvidia",
                index=index,
                type="NVIDIA H100",
                memory_mib=memory_mib,
                capacity_mib=memory_mib,
                slots=slots,
                bursts=tuple(
                    Burst(pod_uid=f"uid-{name}", memory_mib=mib)
                    for name, mib in (bursts or {}).items()
                ),
            )
            for index in range(count)
        ),
    )


def filter_body(pod_object: Obj, names: list[str]) -> bytes:
    """Body of filter or prioritize, as kube-scheduler sends it with nodeCacheCapable."""
    return json.dumps({"Pod": pod_object, "Nodes": None, "NodeNames": names}).encode()


def bind_body(pod_object: Obj, node: str) -> bytes:
    """Body of bind."""
    meta = pod_object["metadata"]
    return json.dumps(
        {
            "PodName": meta["name"],
            "PodNamespace": meta["namespace"],
            "PodUID": meta["uid"],
            "Node": node,
        }
    ).encode()
