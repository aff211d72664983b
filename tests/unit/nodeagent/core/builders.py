# SPDX-License-Identifier: Apache-2.0
"""Pods, records and lists for tests of the agent's decisions."""

from collections.abc import Mapping
from typing import Any

from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.model.request import ContainerKind
from hami_common.pods.signing import SignedPlacement
from hami_nodeagent.core.claims import Entry, ListedPod, Request, View
from hami_nodeagent.core.grants import Grant, GrantBook
from hami_nodeagent.core.podfacts import Ask, PodFacts

NODE = "node-a"
GPU = "nvidia.com/gpu"
NPU = "huawei.com/Ascend910B"
VENDORS = {GPU: "nvidia", NPU: "ascend"}
KUBELET = "run-1"
Container = tuple[str, ContainerKind, Mapping[str, int]]
"""Name, kind, count by resource."""
Ids = Mapping[str, Mapping[str, set[str]]]
"""Container → resource → ids."""


def device(number: int, *, vendor: str = "nvidia", **more: Any) -> Device:
    given: dict[str, Any] = {
        "uuid": f"{vendor}-{number}",
        "vendor": vendor,
        "index": number,
        "type": "TEST",
        "memory_mib": 1000,
        "capacity_mib": 1000,
        **more,
    }
    return Device(**given)


class Given:
    """One pod with a container per entry of ``containers``."""

    def __init__(
        self,
        name: str,
        *containers: Container,
        uid: str = "",
        sequence: int = 1,
        **facts: Any,
    ) -> None:
        containers = containers or (("main", "app", {GPU: 1}),)
        self.uid = uid or f"uid-{name}"
        self.name = name
        self.containers = containers
        shares = tuple(
            ContainerShares(
                name=container,
                kind=kind,
                shares=tuple(
                    Share(vendor=VENDORS[resource], uuid=f"{VENDORS[resource]}-{n}", memory_mib=10)
                    for resource, count in counts.items()
                    for n in range(count)
                ),
            )
            for container, kind, counts in containers
            if counts
        )
        self.record = AllocationRecord(
            op="reserve",
            allocation_id=f"allocation-{self.uid}",
            node=NODE,
            pod_uid=self.uid,
            namespace="default",
            pod=name,
            containers=shares,
        )
        self.entry = Entry(record=self.record, sequence=sequence)
        self.facts = PodFacts(
            uid=self.uid,
            namespace="default",
            name=name,
            kind_by_container={container: kind for container, kind, _ in containers},
            asks_by_resource={
                resource: tuple(
                    Ask(container=container, kind=kind, count=counts[resource])
                    for container, kind, counts in containers
                    if resource in counts
                )
                for resource in {r for _, _, counts in containers for r in counts}
            },
            **{
                "signed": SignedPlacement(
                    pod_uid=self.uid,
                    namespace="default",
                    pod=name,
                    allocation_id=self.record.allocation_id,
                    ledger_seq=sequence,
                    placement=Placement(node=NODE, containers=shares),
                ),
                "limits_mounted": frozenset(container for container, _, _ in containers),
                **facts,
            },
        )

    def listed(self, ids: Ids | None = None, **more: Any) -> ListedPod:
        """The pod as kubelet lists it, with these ids by container and resource."""
        return ListedPod(
            namespace="default",
            name=self.name,
            ids_by_container={
                container: {r: frozenset(i) for r, i in (ids or {}).get(container, {}).items()}
                for container, kind, _ in self.containers
                if kind != "init"
            },
            **more,
        )

    def grant(self, container: str, *ids: str, resource: str = GPU, **more: Any) -> Grant:
        """A grant of one container."""
        kind = next(k for name, k, _ in self.containers if name == container)
        given: dict[str, Any] = {"kubelet": KUBELET, "uuids": (), **more}
        return Grant(
            pod_uid=self.uid,
            namespace="default",
            pod=self.name,
            container=container,
            kind=kind,
            vendor=VENDORS[resource],
            resource=resource,
            allocation_id=self.record.allocation_id,
            ids=tuple(sorted(ids)),
            **given,
        )

    def state(self, state: Any, **more: Any) -> StateRecord:
        """A state of its allocation."""
        given: dict[str, Any] = {"allocation_id": self.record.allocation_id, **more}
        return StateRecord(
            state=state,
            node=NODE,
            pod_uid=self.uid,
            namespace="default",
            pod=self.name,
            ledger_seq=1,
            **given,
        )


def view(*pods: Given, grants: tuple[Grant, ...] = (), **more: Any) -> View:
    """The agent's knowledge after it received every update about ``pods``."""
    by_name: dict[tuple[str, str], tuple[PodFacts, ...]] = {}
    for pod in pods:
        name = ("default", pod.name)
        by_name[name] = (*by_name.get(name, ()), pod.facts)
    given: dict[str, Any] = {
        "pods_by_name": by_name,
        "entries_by_uid": {pod.uid: pod.entry for pod in pods},
        "states_by_uid": {},
        "devices_by_uuid": {
            one.uuid: one
            for vendor in VENDORS.values()
            for one in (device(number, vendor=vendor) for number in range(4))
        },
        "kubelet": KUBELET,
        **more,
    }
    return View(grants=GrantBook(grants), **given)


def request(*ids: str, resource: str = GPU) -> Request:
    return Request(vendor=VENDORS[resource], resource=resource, ids=ids or ("a",))
