# SPDX-License-Identifier: Apache-2.0
"""A pod gets the same devices by its claim as by the device plugin, and its claim accepts them.

Random states of a node with pods of both modes. kube-scheduler judges a claim by the slices of the
same state: if it found no devices on a node where the planner finds some, the pod would wait,
and the scheduler would never be asked.
"""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.dra.names import DRIVER, SHARE_CLASS, SOFT_MODE, device_name, pool_name
from hami_common.dra.podclaims import as_claimed, by_request, requests_of
from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import ContainerShares, Placement
from hami_common.model.request import (
    ContainerKind,
    ContainerRequest,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
)
from hami_core.ledger.podclaim import claim_document, on_published
from hami_core.placement.pick import pick
from hami_core.table.table import DeviceTable
from hami_nodeagent.core.slices import holdings_of, pages_of
from hami_sim.apiserver.dra import default_claim
from hami_sim.kubescheduler.devices import allocate
from tests.property.scheduler import clusters
from tests.support import builders
from tests.unit.core.facts import pod_facts

NODE = clusters.NODES[0]
VENDOR = "nvidia"
NODE_OBJECT = {"metadata": {"name": NODE, "labels": {}}}
SELECTED = {"spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]}}
CLASSES = {SHARE_CLASS: SELECTED}
Obj = dict[str, Any]


class World:
    """A node, and the pods of both modes on it."""

    def __init__(self, inventory: NodeDevices) -> None:
        self.devices = inventory.devices
        self.table = DeviceTable()
        self.table.upsert_node(inventory)
        self.table.set_node_alive(NODE, VENDOR, alive=True)
        self.records: list[AllocationRecord] = []

    def __repr__(self) -> str:
        return f"World(devices={self.devices}, records={self.records})"

    def picked(self, request: PodRequest) -> Placement | None:
        found = pick(self.table, on_published(request, self.devices), NODE)
        return found if isinstance(found, Placement) else None

    def book(self, request: PodRequest, placement: Placement) -> None:
        self.table.book(NODE, placement.containers)
        number = len(self.records)
        self.records.append(
            AllocationRecord(
                op="reserve",
                allocation_id=f"a-{number}",
                node=NODE,
                pod_uid=f"uid-{number}",
                namespace="default",
                pod=f"pod-{number}",
                containers=placement.containers,
                claim=request.claim,
            )
        )

    def slices(self) -> list[Obj]:
        """Return the slices that the agent publishes in this state."""
        pages = pages_of(self.devices, holdings_of(self.records))
        pool = {"name": pool_name(NODE), "generation": 1, "resourceSliceCount": len(pages)}
        return [
            {
                "metadata": {"name": f"s{number}"},
                "spec": {"driver": DRIVER, "pool": pool, "nodeName": NODE, "devices": list(page)},
            }
            for number, page in enumerate(pages)
        ]

    def allocations(self) -> list[Obj]:
        """Those of the claims of the pods here."""
        return [allocation_of(one.containers) for one in self.records if one.claim]

    def proposed(self, pod: PodRequest, only: tuple[ContainerShares, ...] = ()) -> Obj | None:
        """The allocation that kube-scheduler finds for the pod's claim, of ``only`` if given."""
        facts = pod_facts(
            request=as_claimed(pod, claim="claim"), claim="claim", claim_requests=requests_of(pod)
        )
        claim = json.loads(claim_document(facts, self.devices))
        default_claim(claim)
        slices = self.slices()
        if only:
            names = {device_name(share.uuid) for held in only for share in held.shares}
            for one in slices:
                shown = one["spec"]["devices"]
                one["spec"]["devices"] = [device for device in shown if device["name"] in names]
        found = allocate(
            NODE_OBJECT, [claim], slices=slices, classes=CLASSES, allocations=self.allocations()
        )
        return found[0] if found else None


def allocation_of(containers: tuple[ContainerShares, ...]) -> Obj:
    results = [
        {
            "request": held.name,
            "driver": DRIVER,
            "pool": pool_name(NODE),
            "device": device_name(share.uuid),
            "consumedCapacity": {
                "memory": f"{share.memory_mib}Mi",
                "cores": str(share.core_pct),
                "slots": "1",
            },
        }
        for held in by_request(containers)
        for share in held.shares
    ]
    return {"devices": {"results": results}}


@st.composite
def asked(draw: st.DrawFn) -> DeviceRequest:
    """Request of one container; small, so that many fit."""
    if draw(st.integers(0, 5)) == 0:
        return builders.whole(vendor=VENDOR)
    memory_mib = draw(st.sampled_from((0, 1, 2, 4, 8)))
    return DeviceRequest(
        vendor=VENDOR,
        kind=draw(st.sampled_from(("", "", "", "", "online", "offline"))),
        types=draw(st.sampled_from(((), (), (), ("T4",)))),
        count=draw(st.sampled_from((1, 1, 1, 2, 3))),
        memory_mib=memory_mib,
        memory_pct=0 if memory_mib else draw(st.sampled_from((10, 50, 100))),
        core_pct=draw(st.sampled_from((0, 0, 10, 50, 100))),
    )


@st.composite
def requests(draw: st.DrawFn) -> PodRequest:
    """A pod's request for shares that a claim can give."""
    kinds: tuple[ContainerKind, ...] = draw(
        st.sampled_from((("app",), ("app",), ("init", "app"), ("sidecar", "app")))
    )
    selector = draw(st.one_of(*2 * [st.just(DeviceSelector())], clusters.selectors(VENDOR)))
    return builders.pod(
        *(
            ContainerRequest(name=f"c{number}", kind=kind, requests=(draw(asked()),))
            for number, kind in enumerate(kinds)
        ),
        device=draw(st.sampled_from(clusters.CHAINS)),
        weights=draw(st.sampled_from(clusters.WEIGHTS)),
        selectors={VENDOR: replace(selector, modes=(SOFT_MODE,))},
    )


@st.composite
def worlds(draw: st.DrawFn, *, all_published: bool = False) -> World:
    """A node after random arrivals of both modes; claims can have ``all_published`` devices."""
    inventory = draw(clusters.inventories(NODE, VENDOR, divided=False))
    if all_published:
        devices = tuple(
            replace(one, mode=SOFT_MODE, overcommit="managed", largest_mib=0)
            for one in inventory.devices
        )
        inventory = replace(inventory, devices=devices)
    world = World(inventory)
    for _ in range(draw(st.integers(0, 4))):
        pod = draw(requests())
        request = as_claimed(pod, claim="claim") if draw(st.booleans()) else pod
        placement = world.picked(request)
        if placement is not None:
            world.book(request, placement)
    return world


@settings(max_examples=200)
@given(st.one_of(worlds(), worlds(all_published=True), worlds(all_published=True)), requests())
def test_claim_accepts_what_the_policies_choose(world: World, pod: PodRequest) -> None:
    placement = world.picked(as_claimed(pod, claim="claim"))
    if placement is None:
        return
    assert world.proposed(pod) is not None
    assert world.proposed(pod, placement.containers) is not None


@settings(max_examples=200)
@given(worlds(all_published=True), requests())
def test_policies_choose_the_same_devices_in_both_modes(world: World, pod: PodRequest) -> None:
    """Without init containers: by claim, these hold for the life of the pod what no other has."""
    pod = replace(pod, containers=tuple(one for one in pod.containers if one.kind != "init"))
    claimed = world.picked(as_claimed(pod, claim="claim"))
    plugged = world.picked(pod)
    assert (claimed and claimed.containers) == (plugged and plugged.containers)
