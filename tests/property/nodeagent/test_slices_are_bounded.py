# SPDX-License-Identifier: Apache-2.0
"""Published capacities and the claims' consumption never exceed a device, whatever holds it.

Claims are taken as kube-scheduler does it: from the published value less the consumption of the
claims so far, never from a device with a taint.
"""

from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.dra import names
from hami_common.events.allocation import CLAIM, AllocationRecord
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share, booked_by_device
from hami_common.units import parse_quantity
from hami_nodeagent.core.slices import DEVICES_MOST, holdings_of, next_write, pages_of
from hami_sim.apiserver.dra import check_slice, check_slice_update, default_slice
from tests.unit.nodeagent.core.builders import NODE, device

Obj = dict[str, Any]
MIB = 1 << 20


@st.composite
def devices(draw: st.DrawFn) -> tuple[Device, ...]:
    return tuple(
        device(
            number,
            capacity_mib=draw(st.integers(1, 8)),
            capacity_core_pct=draw(st.sampled_from([100, 200])),
            slots=draw(st.integers(1, 4)),
            healthy=draw(st.booleans()),
            cordoned=draw(st.booleans()),
            bus_id=draw(st.sampled_from(["", "00000000:3B:00.0", "?"])),
            numa=draw(st.sampled_from([None, 0, 1])),
        )
        for number in range(draw(st.integers(1, 3)))
    )


def is_free(target: Device, records: list[AllocationRecord], share: Share) -> bool:
    """Return whether the ledger would accept the share beside the records."""
    booked = [
        found for one in records if (found := booked_by_device(one.containers).get(share.uuid))
    ]
    return (
        sum(one.memory_mib for one in booked) + share.memory_mib <= target.capacity_mib
        and sum(one.core_pct for one in booked) + share.core_pct <= target.capacity_core_pct
        and len(booked) + 1 <= target.slots
    )


@given(
    st.integers(2, 8),
    st.lists(
        st.tuples(st.sampled_from(["claim", "resize", "pod"]), st.integers(1, 8), st.booleans()),
        max_size=12,
    ),
)
def test_resized_claims_are_offered_to_no_other(
    capacity_mib: int, steps: list[tuple[str, int, bool]]
) -> None:
    """kube-scheduler subtracts what each claim was allocated, not what a resize made of it."""
    target = device(0, capacity_mib=capacity_mib, slots=100)
    records: list[AllocationRecord] = []
    allocated: dict[str, tuple[ContainerShares, ...]] = {}
    consumed_mib = 0
    for number, (step, memory_mib, is_known) in enumerate(steps):
        share = Share(vendor="nvidia", uuid="nvidia-0", memory_mib=memory_mib, core_pct=1)
        claimed = [one for one in records if one.origin == CLAIM]
        if step == "pod" and is_free(target, records, share):
            records.append(record(number, "", share))
        elif step == "claim":
            ((shown,),) = pages_of([target], holdings_of(records, allocated))
            if shown.get("taints") or (consumed_mib + memory_mib) * MIB > amount(shown, "memory"):
                continue
            fresh = record(number, CLAIM, share)
            assert is_free(target, records, share)
            consumed_mib += memory_mib
            records.append(fresh)
            if is_known:
                allocated[fresh.pod_uid] = fresh.containers
        elif step == "resize" and claimed:
            others = [one for one in records if one is not claimed[0]]
            if is_free(target, others, share):
                resized = record(0, CLAIM, share).containers
                records = [replace(claimed[0], op="resize", containers=resized), *others]
        assert (
            sum(one.memory_mib for held in records for one in held.containers[0].shares)
            <= capacity_mib
        )


def record(number: int, origin: str, *shares: Share) -> AllocationRecord:
    return AllocationRecord(
        op="reserve",
        allocation_id=f"a-{number}",
        node=NODE,
        pod_uid=f"uid-{number}",
        namespace="default",
        pod=f"pod-{number}",
        containers=(ContainerShares(name="main", kind="app", shares=shares),),
        origin=origin,
    )


shares = st.builds(
    Share,
    vendor=st.just("nvidia"),
    uuid=st.sampled_from([f"nvidia-{number}" for number in range(3)]),
    memory_mib=st.integers(1, 8),
    core_pct=st.sampled_from([0, 1, 50, 100]),
    exclusive=st.sampled_from([False, False, False, True]),
    kind=st.sampled_from(["", "", "", "online"]),
)


def amount(device: Obj, capacity: str) -> Fraction:
    value = parse_quantity(device["capacity"][capacity]["value"])
    assert value is not None
    return value


def slice_object(page: tuple[Obj, ...]) -> Obj:
    write = next_write(NODE, [page], {})
    assert write is not None
    return write.slice


@given(devices(), st.lists(st.tuples(st.booleans(), shares), max_size=12))
def test_claims_and_pods_together_never_exceed_a_device(
    known: tuple[Device, ...], arrivals: list[tuple[bool, Share]]
) -> None:
    by_uuid = {one.uuid: one for one in known}
    records: list[AllocationRecord] = []

    def used(uuid: str) -> tuple[int, int, int]:
        booked = [found for one in records if (found := booked_by_device(one.containers).get(uuid))]
        return (
            sum(one.memory_mib for one in booked),
            sum(one.core_pct for one in booked),
            sum(one.slots for one in booked),
        )

    for number, (is_claim, share) in enumerate(arrivals):
        target = by_uuid.get(share.uuid)
        if target is None:
            continue
        memory, cores, slots = used(share.uuid)
        if not is_claim:
            # The ledger accepts a pod that fits, claims included.
            if (
                memory + share.memory_mib <= target.capacity_mib
                and cores + share.core_pct <= target.capacity_core_pct
                and slots + 1 <= target.slots
                and not (share.exclusive and slots)
                and not any(
                    one.exclusive
                    for old in records
                    for container in old.containers
                    for one in container.shares
                    if one.uuid == share.uuid
                )
            ):
                records.append(record(number, "", share))
            continue
        (page,) = pages_of(known, holdings_of(records))
        assert not check_slice(defaulted(page))
        shown = {one["name"]: one for one in page}.get(names.device_name(share.uuid))
        if shown is None or shown.get("taints"):
            continue
        claimed = [one for one in records if one.origin == CLAIM]
        own = [
            found for one in claimed if (found := booked_by_device(one.containers).get(share.uuid))
        ]
        if (
            sum(one.memory_mib for one in own) * MIB + share.memory_mib * MIB
            <= amount(shown, "memory")
            and sum(one.core_pct for one in own) + share.core_pct <= amount(shown, "cores")
            and sum(one.slots for one in own) + 1 <= amount(shown, "slots")
        ):
            plain = Share(
                vendor="nvidia",
                uuid=share.uuid,
                memory_mib=share.memory_mib,
                core_pct=share.core_pct,
            )
            records.append(record(number, CLAIM, plain))
            memory, cores, slots = used(share.uuid)
            assert memory <= target.capacity_mib
            assert cores <= target.capacity_core_pct
            assert slots <= target.slots
            assert target.healthy
            assert not target.cordoned
            others = holdings_of(records)[share.uuid].others
            assert not others.exclusive
            assert others.kind == ""


def defaulted(page: tuple[Obj, ...]) -> Obj:
    found = slice_object(page)
    default_slice(found)
    return found


@given(
    st.lists(
        st.sampled_from([0, 1, DEVICES_MOST, DEVICES_MOST + 1, 3 * DEVICES_MOST]),
        min_size=1,
        max_size=4,
    )
)
def test_writes_lead_to_one_complete_pool_and_then_end(counts: list[int]) -> None:
    stored: dict[str, Obj] = {}
    revision = 0
    for count in counts:
        pages = pages_of([device(number) for number in range(count)], {})
        for _ in range(20):
            write = next_write(NODE, pages, stored, owner_uid="node-uid")
            if write is None:
                break
            revision += 1
            if write.verb == "delete":
                del stored[write.name]
                continue
            fresh = {**write.slice}
            default_slice(fresh)
            complaints = (
                check_slice(fresh)
                if write.verb == "create"
                else check_slice_update(fresh, stored[write.name])
            )
            assert not complaints
            fresh["metadata"] = {**fresh["metadata"], "resourceVersion": str(revision)}
            stored[write.name] = fresh
        assert next_write(NODE, pages, stored, owner_uid="node-uid") is None
        pools = {str(one["spec"]["pool"]) for one in stored.values()}
        assert len(pools) == 1
        shown = [one["name"] for item in stored.values() for one in item["spec"]["devices"]]
        assert len(set(shown)) == len(shown) == count
        assert len(stored) == next(iter(stored.values()))["spec"]["pool"]["resourceSliceCount"]
