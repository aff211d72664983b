# SPDX-License-Identifier: Apache-2.0
"""Kubelet's sums never reject a pod that the ledger placed, whatever happens to the devices.

Placement is that of the scheduling core, kubelet's rule that of the simulated kubelet, which the
contract suite compares with the real one. The agent learns of new devices late and of the ledger's
records at once. Memory in MiB.
"""

from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.events.codec import decode
from hami_common.model.device import Device, Profile
from hami_common.model.placement import ContainerShares, Placement
from hami_common.pods.podview import PodView
from hami_common.units import parse_quantity
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_core.placement.pick import pick
from hami_core.table.table import DeviceTable
from hami_nodeagent.core.amounts import (
    HeldPod,
    NodeAmounts,
    booked_of,
    change,
    resources_of,
    totals,
)
from hami_nodeagent.core.podfacts import requests_of
from hami_sim.kubelet.admission import check_fit
from hami_sim.kubelet.objects import pod_requests
from tests.support import builders

NODE = "n1"
CATALOG = Catalog.from_settings(VendorSettings(nvidia=NvidiaSettings(dialects=("volcano",))))
DIALECTS = (
    ("nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"),
    (
        "volcano.sh/vgpu-number",
        "volcano.sh/vgpu-memory",
        "volcano.sh/vgpu-memory-percentage",
        "volcano.sh/vgpu-cores",
    ),
)
MIG = (
    Profile(name="1g", memory_mib=5000, core_pct=14, size=1, starts=(0, 1, 2, 3)),
    Profile(name="2g", memory_mib=10000, core_pct=28, size=2, starts=(0, 2)),
)
Limits = dict[str, int | str]
Obj = dict[str, Any]


def nvidias_limits(names: tuple[str, str, str, str]) -> st.SearchStrategy[Limits]:
    number, memory, percentage, cores = names
    required: dict[str, st.SearchStrategy[int | str]] = {
        number: st.sampled_from((1, 1, 1, 1, 1, 2)),
        memory: st.sampled_from((0, 999, 3000, 3000, 4999, 10000)),
    }
    optional: dict[str, st.SearchStrategy[int | str]] = {
        percentage: st.sampled_from((1, 33, 50, 100)),
        cores: st.sampled_from((0, 1, 12, 33, 50, 250)),
        "nvidia.com/priority": st.sampled_from((0, 1, 7)),
    }
    return st.fixed_dictionaries(required, optional=optional)


def limits_of(vendor: str) -> st.SearchStrategy[Limits]:
    """Limits that admission accepts, and some that are read as less than what is written."""
    count = st.sampled_from((1, 1, 1, 1, 1, 2))
    if vendor == "nvidia":
        return st.sampled_from(DIALECTS).flatmap(nvidias_limits)
    if vendor == "mthreads":
        return st.fixed_dictionaries(
            {
                "mthreads.com/vgpu": count,
                "mthreads.com/sgpu-memory": st.sampled_from((2, 4, 16, 32)),
                "mthreads.com/sgpu-core": st.sampled_from((1, 1, 3, 5)),
            },
        )
    if vendor == "cambricon":
        return st.fixed_dictionaries(
            {
                "cambricon.com/vmlu": st.just(1),
                "cambricon.com/mlu.smlu.vcore": st.sampled_from((1, 5, 30)),
            },
            optional={
                "cambricon.com/mlu.smlu.vmemory": st.sampled_from((1, 7, 40, 78)),
                "cambricon.com/mlu.smlu.vmemory-percentage": st.sampled_from((10, 50)),
            },
        )
    return st.fixed_dictionaries(
        {
            "metax-tech.com/sgpu": count,
            "metax-tech.com/vmemory": st.sampled_from(("1", "8", "512Mi", "3Gi", "1500M")),
            "metax-tech.com/vcore": st.sampled_from((5, 10, 50)),
        },
    )


MODES = {"nvidia": "soft", "mthreads": "soft", "cambricon": "smlu", "metax": "sgpu"}


@st.composite
def device_lists(draw: st.DrawFn, vendor: str) -> tuple[Device, ...]:
    found = []
    for number in range(draw(st.sampled_from((1, 1, 1, 2, 3, 0)))):
        memory_mib = draw(st.sampled_from((20000, 20001, 40000)))
        divided = vendor == "nvidia" and draw(st.integers(0, 3)) == 3
        scaling = 1 if divided else draw(st.sampled_from((2, 1, 0.5)))
        found.append(
            builders.device(
                f"{vendor}-{number}",
                vendor=vendor,
                index=number,
                memory_mib=memory_mib,
                capacity_mib=int(memory_mib * scaling),
                core_pct=draw(st.sampled_from((200, 100, 150))),
                slots=draw(st.sampled_from((10, 40, 3, 2))),
                healthy=draw(st.integers(0, 7)) < 7,
                cordoned=draw(st.integers(0, 7)) == 7,
                mode="mig" if divided else MODES[vendor],
                partitions=MIG if divided else (),
            )
        )
    return tuple(found)


def is_more_than_a_device(pod: Obj) -> bool:
    """Return whether a container requests compute that is read as less than what is written."""
    containers = pod["spec"]["initContainers"] + pod["spec"]["containers"]
    limits = [container["resources"]["limits"] for container in containers]
    return any(one.get("nvidia.com/gpucores", 0) > 100 for one in limits)


class World:
    """Scheduler, agent and kubelet of one node."""

    def __init__(self, vendor: str) -> None:
        self.vendor = CATALOG.vendor(vendor)
        self.resources = resources_of(self.vendor)
        self.table = DeviceTable()
        self.ledger: dict[str, tuple[ContainerShares, ...]] = {}
        self.told: tuple[Device, ...] = ()
        """Devices that the agent knows."""
        self.pods: dict[str, Obj] = {}
        """Pods that kubelet has admitted."""
        self.node = NodeAmounts()

    def amounts(self, pod: Obj) -> dict[str, int]:
        return requests_of(decode(msgspec.json.encode(pod), PodView, what="pod"), self.resources)

    def held(self, uid: str) -> HeldPod:
        pod = self.pods.get(uid)
        return HeldPod(
            requests={} if pod is None else self.amounts(pod),
            booked=booked_of(self.vendor.name, self.ledger.get(uid, ())),
        )

    def apply(self, *, is_due: bool) -> None:
        """Let the agent look, and kubelet follow."""
        wanted = totals(
            self.vendor,
            self.told,
            is_usable=lambda device: device.healthy,
            pods=[self.held(uid) for uid in self.pods.keys() | self.ledger.keys()],
        )
        due = self.resources if is_due else ()
        patch = change(self.node, {self.vendor.name: wanted}, due=due).patch or {}
        merged = [
            {
                name: text
                for name, text in {**before, **patch.get(part, {}).get(key, {})}.items()
                if text is not None
            }
            for part, key, before in (
                ("status", "capacity", self.node.capacity),
                ("status", "allocatable", self.node.allocatable),
                ("metadata", "annotations", self.node.annotations),
            )
        ]
        self.node = NodeAmounts(capacity=merged[0], allocatable=merged[1], annotations=merged[2])
        again = change(self.node, {self.vendor.name: wanted}, due=due)
        assert again.patch is None, "a patch is written once"

    def admits(self, pod: Obj, beside: list[Obj]) -> bool:
        allocatable = {
            name: Decimal(int(parse_quantity(text) or 0))
            for name, text in self.node.allocatable.items()
        }
        refusal = check_fit(
            pod,
            pod_requests(pod),
            node={"metadata": {}, "spec": {}},
            allocatable={**allocatable, "pods": Decimal(1000)},
            others=[pod_requests(other) for other in beside],
        )
        return refusal is None

    def arrive(self, uid: str, pod: Obj) -> str:
        """Place a pod and let kubelet judge it before the agent knows it."""
        view = decode(msgspec.json.encode(pod), PodView, what="pod")
        request = CATALOG.parse_pod(view)
        if request is None or self.table.place(NODE) is None:
            return "unplaced"
        placement = pick(self.table, request, NODE)
        if not isinstance(placement, Placement):
            return "unplaced"
        self.table.book(NODE, placement.containers)
        self.ledger[uid] = placement.containers
        self.apply(is_due=False)
        if self.admits(pod, list(self.pods.values())):
            self.pods[uid] = pod
            return "admitted"
        assert is_more_than_a_device(pod), (pod, placement, self.node)
        self.end(uid)
        return "rejected"

    def end(self, uid: str) -> None:
        self.pods.pop(uid, None)
        self.table.unbook(NODE, self.ledger.pop(uid))

    def shrink(self, uid: str) -> None:
        """Resize the pod to half of its memory: its object requests what it did before."""
        before = self.ledger[uid]
        after = tuple(
            replace(
                one,
                shares=tuple(
                    share if share.profile else replace(share, memory_mib=share.memory_mib // 2)
                    for share in one.shares
                ),
            )
            for one in before
        )
        self.table.unbook(NODE, before)
        self.table.book(NODE, after)
        self.ledger[uid] = after

    def restart_kubelet(self) -> None:
        """Set all totals to 0, let the agent apply its own, and admit all pods again."""
        zeros = dict.fromkeys(self.node.capacity, "0")
        self.node = replace(self.node, capacity=zeros, allocatable=zeros)
        self.apply(is_due=False)
        admitted: list[Obj] = []
        for pod in self.pods.values():
            assert self.admits(pod, admitted), (pod, self.node)
            admitted.append(pod)


@st.composite
def pods(draw: st.DrawFn, vendor: str, uid: str) -> Obj:
    def containers(kind: str, most: int, least: int = 0) -> list[Obj]:
        extra = {"restartPolicy": "Always"} if kind == "sidecar" else {}
        return [
            {
                "name": f"{kind}{number}",
                "resources": {"limits": limits, "requests": limits},
                **extra,
            }
            for number in range(draw(st.sampled_from((least, least, most))))
            for limits in [draw(limits_of(vendor))]
        ]

    return {
        "metadata": {"name": uid, "namespace": "default", "uid": uid},
        "spec": {
            "initContainers": containers("sidecar", 1) + containers("init", 1),
            "containers": containers("app", 2, 1),
        },
    }


@pytest.mark.parametrize("vendor", MODES)
@settings(max_examples=50)
@given(data=st.data())
def test_kubelet_admits_each_pod_that_the_ledger_places(vendor: str, data: st.DataObject) -> None:
    world = World(vendor)
    latest: tuple[Device, ...] = data.draw(device_lists(vendor))
    world.table.upsert_node(builders.node_devices(NODE, latest, vendor=vendor))
    world.table.set_node_alive(NODE, vendor, alive=True)
    world.told = latest
    world.apply(is_due=True)
    for step in range(data.draw(st.integers(10, 40))):
        what = data.draw(
            st.sampled_from(
                ("pod", "pod", "pod", "pod", "end", "devices", "learn", "resize", "restart")
            )
        )
        uids = sorted(world.ledger)
        if what == "pod":
            world.arrive(f"u{step}", data.draw(pods(vendor, f"u{step}")))
        elif what == "devices":
            latest = data.draw(device_lists(vendor))
            world.table.upsert_node(builders.node_devices(NODE, latest, vendor=vendor))
            if data.draw(st.booleans()):
                world.told = latest
        elif what == "learn":
            world.told = latest
        elif what == "restart":
            world.restart_kubelet()
        elif uids and what == "end":
            world.end(data.draw(st.sampled_from(uids)))
        elif uids and what == "resize":
            world.shrink(data.draw(st.sampled_from(uids)))
        world.apply(is_due=data.draw(st.booleans()))
        requested = [pod_requests(pod) for pod in world.pods.values()]
        for name, text in world.node.allocatable.items():
            total = sum((one.get(name, Decimal(0)) for one in requested), Decimal(0))
            assert total <= Decimal(text), "never below what running pods request"
