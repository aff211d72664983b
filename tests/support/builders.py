# SPDX-License-Identifier: Apache-2.0
"""Short ways to build devices, nodes, requests and holdings.

Every argument has a usable default. Memory in MiB, compute in percent of one device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Burst, Device, Link, Profile
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import (
    ContainerKind,
    ContainerRequest,
    DevicePolicy,
    DeviceRequest,
    DeviceSelector,
    NodePolicy,
    PlacementPolicy,
    PodRequest,
    ScoringWeights,
)
from hami_common.pods import annotations, limits


def as_admitted(pod: dict[str, Any]) -> dict[str, Any]:
    """The document of a pod with what admission adds: our label, the limits of each container."""
    labels = pod["metadata"].setdefault("labels", {})
    labels.setdefault(annotations.MANAGED_LABEL, "true")
    spec = pod["spec"]
    for container in (*(spec.get("initContainers") or []), *spec["containers"]):
        name = f"hami-limits-{container['name']}"
        field = f"metadata.annotations['{annotations.limits(container['name'])}']"
        item = {"path": limits.FILE_NAME, "fieldRef": {"apiVersion": "v1", "fieldPath": field}}
        mount = {"name": name, "mountPath": limits.DIRECTORY, "readOnly": True}
        container.setdefault("volumeMounts", []).append(mount)
        spec.setdefault("volumes", []).append({"name": name, "downwardAPI": {"items": [item]}})
    return pod


def device(
    uuid: str,
    *,
    vendor: str = "nvidia",
    index: int = 0,
    type: str = "NVIDIA A100",  # noqa: A002 - the field's name
    memory_mib: int = 40_000,
    capacity_mib: int | None = None,
    largest_mib: int = 0,
    core_pct: int = 100,
    slots: int = 10,
    numa: int | None = None,
    healthy: bool = True,
    cordoned: bool = False,
    mode: str = "soft",
    partitions: tuple[Profile, ...] = (),
    resources: dict[str, int] | None = None,
    attributes: dict[str, str] | None = None,
    memory_cap: bool = False,
    foreign_mib: int = 0,
    bursts: Mapping[str, int] | None = None,
) -> Device:
    """A registered device."""
    return Device(
        uuid=uuid,
        vendor=vendor,
        index=index,
        type=type,
        memory_mib=memory_mib,
        capacity_mib=memory_mib if capacity_mib is None else capacity_mib,
        overcommit="recall" if largest_mib else "managed",
        largest_mib=largest_mib,
        foreign_mib=foreign_mib,
        bursts=tuple(
            Burst(pod_uid=uid, memory_mib=mib) for uid, mib in sorted((bursts or {}).items())
        ),
        capacity_core_pct=core_pct,
        slots=slots,
        numa=numa,
        healthy=healthy,
        cordoned=cordoned,
        mode=mode,
        partitions=partitions,
        resources=resources or {},
        attributes=attributes or {},
        memory_cap=memory_cap,
    )


def devices(
    node: str, count: int, *, vendor: str = "nvidia", memory_mib: int = 40_000
) -> NodeDevices:
    """A node's devices ``<node>-<vendor>-0`` …, all alike."""
    return node_devices(
        node,
        [
            device(f"{node}-{vendor}-{i}", vendor=vendor, index=i, memory_mib=memory_mib)
            for i in range(count)
        ],
        vendor=vendor,
    )


def node_devices(
    node: str,
    devices: Sequence[Device],
    *,
    vendor: str = "nvidia",
    links: Sequence[tuple[str, str, int]] = (),
    seq: int = 1,
) -> NodeDevices:
    """The canonical inventory of one vendor on one node."""
    return NodeDevices(
        node=node,
        vendor=vendor,
        boot_id="0-boot",
        seq=seq,
        time_s=0.0,
        config_generation=1,
        devices=tuple(devices),
        links=tuple(Link(a=a, b=b, score=score) for a, b, score in links),
    )


def ask(
    count: int = 1,
    *,
    vendor: str = "nvidia",
    mib: int = 0,
    pct: int = 0,
    core: int = 0,
    exclusive: bool = False,
) -> DeviceRequest:
    """Request of a container to one vendor; defaults to 1,000 MiB of one device."""
    if not mib and not pct:
        mib = 1000
    return DeviceRequest(
        vendor=vendor,
        count=count,
        memory_mib=mib,
        memory_pct=pct,
        core_pct=core,
        exclusive=exclusive,
    )


def whole(count: int = 1, *, vendor: str = "nvidia") -> DeviceRequest:
    """Request whole devices, exclusively."""
    return ask(count, vendor=vendor, pct=100, core=100, exclusive=True)


def container(
    *requests: DeviceRequest,
    name: str = "main",
    kind: ContainerKind = "app",
    priority: int | None = None,
) -> ContainerRequest:
    """A container that asks for devices."""
    return ContainerRequest(name=name, kind=kind, requests=requests, priority=priority)


def pod(
    *containers: ContainerRequest | DeviceRequest,
    uid: str = "uid-1",
    name: str = "pod-1",
    node: NodePolicy = "binpack",
    device: Sequence[DevicePolicy] = ("spread",),
    weights: ScoringWeights | None = None,
    selector: DeviceSelector | None = None,
    selectors: dict[str, DeviceSelector] | None = None,
) -> PodRequest:
    """A pod's request; a bare ``DeviceRequest`` stands for a container ``main`` with just that."""
    if selectors is None:
        selectors = {} if selector is None else {"nvidia": selector}
    return PodRequest(
        uid=uid,
        namespace="default",
        name=name,
        containers=tuple(container(c) if isinstance(c, DeviceRequest) else c for c in containers),
        selectors=selectors,
        policy=PlacementPolicy(
            node=node, device=tuple(device), weights=weights or ScoringWeights()
        ),
    )


def share(
    uuid: str,
    mib: int = 1000,
    core: int = 0,
    *,
    vendor: str = "nvidia",
    exclusive: bool = False,
    profile: str = "",
    start: int | None = None,
    kind: str = "",
) -> Share:
    """A share of one device."""
    return Share(
        vendor=vendor,
        uuid=uuid,
        memory_mib=mib,
        core_pct=core,
        exclusive=exclusive,
        profile=profile,
        start=start,
        kind=kind,
    )


def held(*shares: Share, name: str = "main", kind: ContainerKind = "app") -> ContainerShares:
    """Shares of one container."""
    return ContainerShares(name=name, kind=kind, shares=shares)
