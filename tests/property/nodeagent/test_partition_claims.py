# SPDX-License-Identifier: Apache-2.0
"""Partitions of pods and claims never overlap, and fresh counters agree with the ledger.

Pods are placed by our scheduler, claims by kube-scheduler's first fit from slices that may be
stale; both are booked by the ledger. Cards of all models, also with instances of others on them.
"""

from collections.abc import Mapping
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from hami_common.dra import names
from hami_common.dra.claims import containers_of
from hami_common.dra.partitions import places_of, share_of
from hami_common.events.allocation import CLAIM, AllocationRecord
from hami_common.model.device import Device
from hami_common.model.placement import NOTHING, ContainerShares, booked_by_device
from hami_common.model.request import DeviceRequest, DeviceSelector
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import Append, RecordSeen
from hami_core.table.table import DeviceTable
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.partitiondevices import overlap
from hami_nodeagent.core.partitions import without_foreign
from hami_nodeagent.core.slices import holdings_of, next_write, pages_of
from hami_sim.kubescheduler.devices import allocate
from tests.support import builders
from tests.support.mig import CHIPS, card, facts_of
from tests.unit.common.dra.test_claims import read

NODE = "n1"
CLASS = "hami-mig"
Obj = dict[str, Any]


class World:
    """One node, its ledger, and the slices that kube-scheduler sees."""

    def __init__(self, cards: list[Device]) -> None:
        self.cards = cards
        table = DeviceTable()
        table.upsert_node(builders.node_devices(NODE, cards))
        table.set_node_alive(NODE, "nvidia", alive=True)
        self.ledger = Ledger(table, writer="me", lease_s=30.0, fence_delay_s=3.0)
        self.allocations: dict[str, Obj] = {}
        self.slices: list[Obj] = []
        self.seq = 0
        self.is_fresh = False
        self.publish()

    def publish(self) -> None:
        """Let the agent bring the slices up to date."""
        records = [holding.record for holding in self.ledger.holdings()]
        pages = pages_of(self.cards, holdings_of(records))
        stored: dict[str, Obj] = {}
        while (write := next_write(NODE, pages, stored)) is not None:
            stored[write.name] = write.slice
        self.slices = list(stored.values())
        self.is_fresh = True

    def book(self, record: AllocationRecord, *, is_seen: bool) -> None:
        self.seq += 1
        self.ledger.handle(RecordSeen(seq=self.seq, record=record, now_s=0.0))
        self.is_fresh = self.is_fresh and is_seen

    def add_pod(self, uid: str, asked: DeviceRequest) -> None:
        selector = DeviceSelector(modes=("mig",))
        request = builders.pod(asked, uid=uid, selector=selector)
        planned = self.ledger.plan_bind(request, NODE, allocation_id=uid, now_s=0.0)
        if isinstance(planned, Append):
            self.book(planned.record, is_seen=False)

    def add_claim(self, uid: str, profile: str, count: int) -> None:
        """Allocate as kube-scheduler does, then book as our scheduler does."""
        domain = f'device.attributes["{names.DRIVER}"]'
        selector = {"cel": {"expression": f'{domain}.profile == "{profile}"'}}
        exactly = {
            "deviceClassName": CLASS,
            "selectors": [selector],
            "allocationMode": "ExactCount",
            "count": count,
        }
        claim = {"spec": {"devices": {"requests": [{"name": "main", "exactly": exactly}]}}}
        found = allocate(
            {"metadata": {"name": NODE}},
            [claim],
            slices=self.slices,
            classes={CLASS: {"spec": {}}},
            allocations=self.allocations.values(),
        )
        if found is None:
            self.judge_refusal(profile, count)
            return
        (allocation,) = found
        results = allocation["devices"]["results"]
        containers = containers_of(read(*results), self.cards)
        planned = self.ledger.plan_claim(
            node=NODE,
            claim=(uid, "default", uid),
            containers=containers,
            allocation_id=uid,
            now_s=0.0,
        )
        if isinstance(planned, Append):
            self.allocations[uid] = allocation
            self.book(planned.record, is_seen=True)
        else:
            event("stale slices: the ledger refused")
            assert not self.is_fresh, planned

    def judge_refusal(self, profile: str, count: int) -> None:
        """Check that the ledger refuses each place, too, if the slices are fresh."""
        if not self.is_fresh or count > 1:
            return
        for place in places_of(self.cards):
            if place.profile.name == profile:
                share = share_of(place.name, self.cards)
                assert share is not None
                refusal = self.ledger.plan_claim(
                    node=NODE,
                    claim=("other", "default", "other"),
                    containers=(ContainerShares(name="main", kind="app", shares=(share,)),),
                    allocation_id="other",
                    now_s=0.0,
                )
                assert not isinstance(refusal, Append), place.name

    def end(self, uid: str) -> None:
        (holding,) = self.ledger.holdings_of_pod(uid)
        planned = self.ledger.plan_release(holding, now_s=0.0, reason="gone")
        is_claim = self.allocations.pop(uid, None) is not None
        self.book(planned.record, is_seen=is_claim)

    def check(self) -> None:
        """No position of a card is held twice, and nothing is over capacity."""
        self.ledger.check()
        by_uuid = {one.uuid: one for one in self.cards}
        total = dict.fromkeys(by_uuid, NOTHING)
        for holding in self.ledger.holdings():
            for uuid, booked in booked_by_device(holding.record.containers).items():
                total[uuid] = total[uuid].plus(booked)
        for uuid, booked in total.items():
            device = by_uuid[uuid]
            assert overlap(device, booked.parts) == ""
            assert booked.memory_mib <= device.capacity_mib
            assert booked.core_pct <= device.capacity_core_pct
            usage = self.ledger.table.usage(NODE, uuid)
            assert usage is not None
            parts: Mapping[str, int] = booked.parts
            place = self.ledger.table.place(NODE)
            assert place is not None
            division = int(place.block.division[place.rows[uuid], place.column])
            assert not self.ledger.table.divisions[division].is_over(parts)


@st.composite
def cards(draw: st.DrawFn) -> list[Device]:
    """One or two cards of a model; a stranger's instance may be on the first."""
    chip = draw(st.sampled_from(CHIPS))
    found = [card(chip, number) for number in range(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        facts = facts_of(chip)
        size = draw(st.sampled_from(facts.partitions))
        stranger = Instance(
            uuid="GPU-0",
            instance_id="GI-1",
            profile=size.name,
            start=draw(st.sampled_from(size.starts)),
        )
        left = without_foreign(facts, [stranger])
        found[0] = builders.device(
            "GPU-0",
            memory_mib=left.memory_mib,
            mode="mig",
            partitions=left.partitions,
            resources=dict(left.resources),
            slots=draw(st.sampled_from([3, 10])),
        )
    return found


@settings(max_examples=60, deadline=None)
@given(cards(), st.data())
def test_partitions_of_pods_and_claims_never_overlap(
    known: list[Device], data: st.DataObject
) -> None:
    world = World(known)
    sizes = sorted({one.name for device in known for one in device.partitions})
    memory = sorted({one.memory_mib for device in known for one in device.partitions})
    for number in range(data.draw(st.integers(1, 14))):
        uid = f"uid-{number}"
        step = data.draw(st.sampled_from(["claim", "claim", "pod", "named pod", "end", "publish"]))
        if step == "claim":
            world.add_claim(
                uid, data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from([1, 1, 2]))
            )
        elif step == "pod":
            asked = DeviceRequest(
                vendor="nvidia",
                count=1,
                memory_mib=data.draw(st.sampled_from(memory)),
            )
            world.add_pod(uid, asked)
        elif step == "named pod":
            profile = data.draw(st.sampled_from(sizes))
            world.add_pod(
                uid, DeviceRequest(vendor="nvidia", count=1, profile=profile, modes=("mig",))
            )
        elif step == "publish":
            world.publish()
        elif held := sorted(one.record.pod_uid for one in world.ledger.holdings()):
            world.end(data.draw(st.sampled_from(held)))
        world.check()
    owners = {one.record.origin for one in world.ledger.holdings()}
    event(f"holders: {sorted('claim' if one == CLAIM else 'pod' for one in owners)}")
