# SPDX-License-Identifier: Apache-2.0
"""The rules by which NVIDIA's DCGM exporter attributes devices to pods.

Fact source: dcgm-exporter, ``internal/pkg/transformation/kubernetes.go``, of 2026-08-20. It calls
PodResources ``List`` and resolves each device id of the resources ``nvidia.com/gpu``,
``nvidia.com/mig-*`` and those of ``--nvidia-resource-names``. It knows these forms:

=========================  =====================================================================
``GPU-<uuid>``             the device
``GPU-<uuid>::<n>``        the device, label ``vgpu`` = n (NVIDIA's device plugin, shared devices)
``<device>/vgpu<n>``       the device, label ``vgpu`` = n (GKE)
``MIG-<uuid>``             the GPU instance that the driver has under this name
``nvidia<i>/gi<j>``        GPU instance j of device i (GKE)
=========================  =====================================================================
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from msgspec import Struct

from hami_common.kubeletapi import podresources as api

RESOURCE = "nvidia.com/gpu"
MIG_PREFIX = "nvidia.com/mig-"
_GKE_INSTANCE = re.compile(r"^nvidia([0-9]+)/gi([0-9]+)(?:/vgpu[0-9]+)?$")


class Attribution(Struct, frozen=True, kw_only=True):
    """The labels that the exporter adds to the metrics of a device."""

    namespace: str
    pod: str
    container: str
    vgpu: str = ""


def attributions(
    answer: api.ListPodResourcesResponse,
    *,
    virtual_gpus: bool,
    instances: Mapping[str, str] | None = None,
    resources: Collection[str] = (),
) -> dict[str, list[Attribution]]:
    """Return the series of each device, by UUID or by identifier of a GPU instance.

    ``virtual_gpus``: option ``--kubernetes-virtual-gpus``; without it, the last pod remains and has
    no label ``vgpu``. ``instances``: GPU instance (``<gpu>-<instance>``) of each MIG UUID, as the
    driver resolves it. ``resources``: option ``--nvidia-resource-names``.
    """
    found: dict[str, list[Attribution]] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            for entry in container.devices:
                name = entry.resource_name
                if name not in (RESOURCE, *resources) and not name.startswith(MIG_PREFIX):
                    continue
                for device_id in entry.device_ids:
                    for device in _devices(device_id, instances or {}):
                        one = Attribution(
                            namespace=pod.namespace,
                            pod=pod.name,
                            container=container.name,
                            vgpu=_vgpu(device_id) if virtual_gpus else "",
                        )
                        before = found.get(device, []) if virtual_gpus else []
                        found[device] = [*before, one]
    return found


def _vgpu(device_id: str) -> str:
    for separator in ("/vgpu", "::"):
        if separator in device_id:
            return device_id.partition(separator)[2]
    return ""


def _devices(device_id: str, instances: Mapping[str, str]) -> list[str]:
    """Return the devices whose metrics the exporter would give to the holder of an id."""
    if device_id.startswith("MIG-"):
        known = [instances[device_id]] if device_id in instances else []
        return [*known, device_id.removeprefix("MIG-"), device_id]
    if match := _GKE_INSTANCE.match(device_id):
        return [f"{match[1]}-{match[2]}", device_id]
    for separator in ("/vgpu", "::"):
        if separator in device_id:
            return [device_id.partition(separator)[0], device_id]
    return [device_id]
