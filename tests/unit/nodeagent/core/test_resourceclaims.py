# SPDX-License-Identifier: Apache-2.0
"""The last gate of a ResourceClaim: record, amounts, devices and pods have to agree."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hami_common.dra import names
from hami_common.dra.claims import Consumer, ResourceClaim
from hami_common.events.allocation import CLAIM, AllocationRecord, StateRecord
from hami_common.model.device import Profile
from hami_common.model.placement import Booked, ContainerShares, Share
from hami_common.pods.podview import OwnerView
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.podfacts import Ask, ClaimUse, PodFacts
from hami_nodeagent.core.resourceclaims import (
    Code,
    Facts,
    Given,
    Refuse,
    Wait,
    decide,
    given_shares,
    prepared_devices,
    record_owner,
)
from tests.unit.nodeagent.core.builders import NODE, device

UID = "0d2f5a52-1111-4222-8333-444455556666"
MAIN = ContainerShares(
    name="main",
    kind="app",
    shares=(
        Share(vendor="nvidia", uuid="nvidia-1", memory_mib=200),
        Share(vendor="nvidia", uuid="nvidia-0", memory_mib=300, core_pct=30),
    ),
)
RECORD = AllocationRecord(
    op="reserve",
    allocation_id="a-1",
    node=NODE,
    pod_uid=UID,
    namespace="default",
    pod="c",
    containers=(MAIN,),
    origin=CLAIM,
)
POD = PodFacts(
    uid="pod-1",
    namespace="default",
    name="web",
    claims_by_container={"app": (ClaimUse(claim="c", request="main"),)},
)


def result(number: int, memory: str, cores: str = "0", **more: Any) -> dict[str, Any]:
    return {
        "request": "main/small",
        "driver": names.DRIVER,
        "pool": names.pool_name(NODE),
        "device": names.device_name(f"nvidia-{number}"),
        "consumedCapacity": {"memory": memory, "cores": cores, "slots": "1"},
        **more,
    }


RESULTS = (result(1, "200Mi"), result(0, "300Mi", "30"))


def claim(*results: dict[str, Any]) -> ResourceClaim:
    found = {
        "metadata": {"name": "c", "namespace": "default", "uid": UID},
        "status": {"allocation": {"devices": {"results": list(results)}}},
    }
    return msgspec.json.decode(msgspec.json.encode(found), type=ResourceClaim)


def booked(record: AllocationRecord, *results: dict[str, Any]) -> AllocationRecord:
    """The record with the id of an allocation."""
    return replace(record, allocation_id=claim(*results).allocation_id())


def facts(record: AllocationRecord | None = RECORD, *results: dict[str, Any], **more: Any) -> Facts:
    entry = Entry(record=booked(record, *(results or RESULTS)), sequence=1) if record else None
    given: dict[str, Any] = {
        "node": NODE,
        "entry": entry,
        "state": None,
        "devices": [device(number) for number in range(3)],
        "pods": [POD],
        **more,
    }
    return Facts(**given)


def test_claim_that_the_ledger_confirms_may_be_prepared() -> None:
    found = decide(claim(*RESULTS), facts())
    assert isinstance(found, Given)
    assert found.record.containers == (MAIN,)
    assert set(found.devices_by_uuid) == {"nvidia-0", "nvidia-1"}


def test_device_whose_configuration_changed_since_keeps_its_claims() -> None:
    whole = (result(0, "1000Mi"),)
    share = Share(vendor="nvidia", uuid="nvidia-0", memory_mib=1000, exclusive=True)
    record = replace(RECORD, containers=(replace(MAIN, shares=(share,)),))
    assert isinstance(decide(claim(*whole), facts(record, *whole)), Given)
    scaled = [device(0, capacity_mib=2000)]
    assert isinstance(decide(claim(*whole), facts(record, *whole, devices=scaled)), Given)


def test_results_of_other_drivers_do_not_matter() -> None:
    other = result(7, "1Gi", driver="nic.example.com", request="nic")
    assert isinstance(decide(claim(other, *RESULTS), facts(RECORD, other, *RESULTS)), Given)
    refusal = decide(claim(other), facts())
    assert isinstance(refusal, Refuse)
    assert refusal.message.startswith("hami: not-allocated: claim default/c ")


@pytest.mark.parametrize(
    "record",
    [
        None,
        replace(RECORD, op="release", containers=()),
        replace(RECORD, origin=""),
    ],
)
def test_claim_without_a_live_record_waits(record: AllocationRecord | None) -> None:
    found = decide(claim(*RESULTS), facts(record))
    assert isinstance(found, Wait)
    assert found.code == Code.LEDGER_UNKNOWN


@pytest.mark.parametrize(
    "results",
    [
        (RESULTS[0],),
        (RESULTS[0], result(0, "301Mi", "30")),
        (RESULTS[0], result(0, "300Mi", "31")),
        (RESULTS[0], result(2, "300Mi", "30")),
        (RESULTS[0], result(0, "300Mi", "30", request="side")),
        (*RESULTS, result(2, "1Mi")),
    ],
)
def test_every_difference_to_the_record_waits(results: tuple[dict[str, Any], ...]) -> None:
    found = decide(claim(*results), facts(RECORD, *results))
    assert isinstance(found, Wait)
    assert found.code == Code.LEDGER_MISMATCH


def test_record_of_an_earlier_allocation_of_the_same_devices_waits() -> None:
    later = (RESULTS[0], result(0, "300Mi", "30", shareID="another"))
    found = decide(claim(*later), facts())
    assert isinstance(found, Wait)
    assert found.code == Code.LEDGER_MISMATCH
    assert "earlier allocation" in found.text


def test_amounts_are_rounded_up_to_whole_units() -> None:
    odd = (RESULTS[0], result(0, str((299 << 20) + 1), "29500m"))
    assert isinstance(decide(claim(*odd), facts(RECORD, *odd)), Given)


@pytest.mark.parametrize(
    ("results", "more", "code"),
    [
        ((result(0, "300Mi", adminAccess=True),), {}, Code.ALLOCATION_INVALID),
        ((result(0, "300Mi", pool="elsewhere"),), {}, Code.ALLOCATION_INVALID),
        ((result(0, "300Mi", pool="other/hami"),), {}, Code.NOT_ALLOCATED),
        ((result(0, "300Mi", consumedCapacity=None),), {}, Code.ALLOCATION_INVALID),
        ((result(9, "300Mi"),), {}, Code.ALLOCATION_INVALID),
        (RESULTS, {"devices": [device(0, mode="mig"), device(1)]}, Code.DEVICE_UNKNOWN),
        (RESULTS, {"faulty": {"nvidia-1"}}, Code.DEVICE_UNHEALTHY),
        (RESULTS, {"devices": [device(0, healthy=False), device(1)]}, Code.DEVICE_UNHEALTHY),
    ],
)
def test_allocations_that_cannot_be_served_are_refused(
    results: tuple[dict[str, Any], ...], more: dict[str, Any], code: Code
) -> None:
    found = decide(claim(*results), facts(**more))
    assert isinstance(found, Refuse)
    assert found.code == code


def test_device_that_this_node_found_sound_may_be_used() -> None:
    known = [device(0, healthy=False), device(1)]
    assert isinstance(decide(claim(*RESULTS), facts(devices=known, sound={"nvidia-0"})), Given)


@pytest.mark.parametrize(
    "given",
    [
        Booked(memory_mib=701, slots=1),
        Booked(core_pct=71, slots=1),
        Booked(slots=10),
        Booked(slots=1, exclusive=True),
    ],
)
def test_shares_that_containers_were_given_count_whatever_the_ledger_says(given: Booked) -> None:
    found = decide(claim(*RESULTS), facts(given=lambda: {"nvidia-0": given}))
    assert isinstance(found, Wait)
    assert found.code == Code.DEVICE_FULL
    fits = Booked(memory_mib=700, core_pct=70, slots=9)
    assert isinstance(decide(claim(*RESULTS), facts(given=lambda: {"nvidia-0": fits})), Given)


def test_failed_or_unreadable_allocation_waits() -> None:
    state = StateRecord(
        state="failed",
        allocation_id=claim(*RESULTS).allocation_id(),
        node=NODE,
        pod_uid=UID,
        namespace="default",
        pod="c",
        ledger_seq=1,
        code="lost",
    )
    found = decide(claim(*RESULTS), facts(state=state))
    assert isinstance(found, Wait)
    assert found.code == Code.STATE_FAILED
    older = replace(state, allocation_id="a-0")
    assert isinstance(decide(claim(*RESULTS), facts(state=older)), Given)
    found = decide(claim(*RESULTS), facts(unreadable="the newest record cannot be read: x"))
    assert isinstance(found, Wait)
    assert found.code == Code.LEDGER_UNREADABLE


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"own_devices": {"app": "env[X]: remove it"}}, Code.DEVICES_OVERRIDDEN),
        ({"hidden_limits": {"app": "mount /etc: remove it"}}, Code.LIMITS_HIDDEN),
        (
            {"asks_by_resource": {"nvidia.com/gpu": (Ask(container="app", kind="app", count=1),)}},
            Code.SEVERAL_REQUESTS,
        ),
    ],
)
def test_pods_that_would_lift_the_limit_are_refused(change: dict[str, Any], code: Code) -> None:
    found = decide(claim(*RESULTS), facts(pods=[replace(POD, **change)]))
    assert isinstance(found, Refuse)
    assert found.code == code
    beside = replace(
        POD,
        claims_by_container={"other": POD.claims_by_container["app"]},
    )
    assert isinstance(decide(claim(*RESULTS), facts(pods=[replace(beside, **change)])), Given)


def two_requests(number: int = 2) -> tuple[AllocationRecord, tuple[dict[str, Any], ...]]:
    """Record and results of a claim with the requests ``main`` and, on this device, ``side``."""
    shares = (Share(vendor="nvidia", uuid=f"nvidia-{number}", memory_mib=400, core_pct=30),)
    record = replace(RECORD, containers=(MAIN, replace(MAIN, name="side", shares=shares)))
    return record, (*RESULTS, result(number, "400Mi", "30", request="side"))


def uses(**requests: tuple[str, ...]) -> PodFacts:
    """A pod whose containers name these requests of claim ``c``."""
    by_container = {
        name: tuple(ClaimUse(claim="c", request=one) for one in own)
        for name, own in requests.items()
    }
    return replace(POD, claims_by_container=by_container)


def test_requests_that_a_container_names_together_are_one_share() -> None:
    record, results = two_requests()
    alone = decide(claim(*results), facts(record, *results))
    assert isinstance(alone, Given)
    assert alone.containers() == record.containers
    for pod in (uses(app=("",)), uses(app=("side", "main"), other=("main", "side"))):
        found = decide(claim(*results), facts(record, *results, pods=[pod]))
        assert isinstance(found, Given)
        assert found.groups == (("main", "side"),)
        (merged,) = found.containers()
        assert merged.name == "main"
        assert merged.shares == (*MAIN.shares, *record.containers[1].shares)
        assert found.record.containers == record.containers


def test_shares_of_one_device_that_are_named_together_are_added() -> None:
    record, results = two_requests(0)
    found = decide(claim(*results), facts(record, *results, pods=[uses(app=("",))]))
    assert isinstance(found, Given)
    sums = {one.uuid: (one.memory_mib, one.core_pct) for one in found.containers()[0].shares}
    assert sums == {"nvidia-1": (200, 0), "nvidia-0": (700, 60)}
    record, results = two_requests(1)
    found = decide(claim(*results), facts(record, *results, pods=[uses(app=("",))]))
    assert isinstance(found, Given)
    sums = {one.uuid: (one.memory_mib, one.core_pct) for one in found.containers()[0].shares}
    assert sums["nvidia-1"] == (600, 0)  # one of both has no compute limit


def test_shares_that_cannot_be_one_are_refused() -> None:
    record, results = two_requests()
    for pods, claims in (
        ([uses(app=("main", "side"), other=("side",))], ()),
        ([uses(app=("",)), replace(uses(app=("main",)), uid="u-2", name="late")], ()),
        (
            [replace(POD, claims_by_container={"app": (ClaimUse(claim="c"), ClaimUse(claim="d"))})],
            ("c", "d"),
        ),
    ):
        found = decide(claim(*results), facts(record, *results, pods=pods, claims=claims))
        assert isinstance(found, Refuse)
        assert found.code == Code.SEVERAL_REQUESTS
    beside = {"app": (ClaimUse(claim="c", request="main"),), "other": (ClaimUse(claim="d"),)}
    pods = [replace(POD, claims_by_container=beside)]
    apart = decide(claim(*results), facts(record, *results, pods=pods, claims=("c", "d")))
    assert isinstance(apart, Given)


def test_unknown_pod_waits() -> None:
    record, results = two_requests()
    for pods in ([], [replace(POD, namespace="other")], [replace(POD, claims_by_container={})]):
        waiting = decide(claim(*results), facts(record, *results, pods=pods))
        assert isinstance(waiting, Wait)
        assert waiting.code == Code.POD_UNKNOWN


POD_RECORD = replace(
    RECORD,
    pod_uid="pod-1",
    pod="web",
    origin="",
    claim="c",
    containers=(
        replace(
            MAIN,
            name="app",
            shares=(*MAIN.shares, Share(vendor="hygon", uuid="d-0", memory_mib=50)),
        ),
        replace(
            MAIN, name="side", shares=(Share(vendor="nvidia", uuid="nvidia-2", memory_mib=100),)
        ),
    ),
)
OWNED = (
    result(2, "100Mi", request="side-nvidia"),
    result(0, "300Mi", "30", request="app-nvidia"),
    result(1, "200Mi", request="app-nvidia"),
    result(0, "50Mi", request="app-hygon", device=names.device_name("d-0")),
)
OWNER = replace(
    POD,
    claims_by_container={
        "first": (ClaimUse(claim="c", request="app-nvidia"),),
        "app": tuple(ClaimUse(claim="c", request=f"app-{one}") for one in ("nvidia", "hygon")),
        "side": (ClaimUse(claim="c", request="side-nvidia"),),
    },
)


def owned(*results: dict[str, Any], **more: Any) -> ResourceClaim:
    """The claim, controlled by the pod."""
    found = claim(*results)
    assert found.status is not None
    labels = more.get("labels", {"hami.io/managed": "true"})
    owner = OwnerView(kind="Pod", name="web", uid="pod-1", controller=more.get("controller", True))
    status = replace(
        found.status,
        reserved_for=tuple(Consumer(name=one, uid=one) for one in more.get("pods", ())),
    )
    metadata = replace(found.metadata, labels=labels, owner_references=[owner])
    return replace(found, metadata=metadata, status=status)


def of_pod(record: AllocationRecord | None = POD_RECORD, **more: Any) -> Facts:
    """Facts of the node of a pod that owns the claim."""
    given: dict[str, Any] = {
        "devices": [
            *(device(number) for number in range(3)),
            device(0, vendor="hygon", uuid="d-0"),
        ],
        "pods": [OWNER],
        "entry": Entry(record=record, sequence=1) if record else None,
        **more,
    }
    return facts(**given)


def test_claim_of_a_pod_is_compared_with_the_record_of_the_pod() -> None:
    found = decide(owned(*OWNED, pods=["pod-1"]), of_pod())
    assert isinstance(found, Given), found
    assert found.record.containers == POD_RECORD.containers
    assert set(found.devices_by_uuid) == {"nvidia-0", "nvidia-1", "nvidia-2", "d-0"}


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (None, Code.LEDGER_UNKNOWN),
        (replace(POD_RECORD, op="release", containers=()), Code.LEDGER_UNKNOWN),
        (replace(POD_RECORD, claim=""), Code.LEDGER_UNKNOWN),
        (replace(POD_RECORD, claim="other"), Code.LEDGER_UNKNOWN),
        (replace(POD_RECORD, namespace="other"), Code.LEDGER_UNKNOWN),
        (replace(POD_RECORD, containers=POD_RECORD.containers[:1]), Code.LEDGER_MISMATCH),
        (
            replace(POD_RECORD, containers=(POD_RECORD.containers[0], replace(MAIN, name="side"))),
            Code.LEDGER_MISMATCH,
        ),
    ],
)
def test_claim_of_a_pod_waits_for_the_record_of_the_pod(
    record: AllocationRecord | None, code: Code
) -> None:
    found = decide(owned(*OWNED), of_pod(record))
    assert isinstance(found, Wait)
    assert found.code == code


@pytest.mark.parametrize("more", [{"labels": {}}, {"labels": None}, {"controller": False}])
def test_claim_is_of_a_pod_by_label_and_controller_only(more: dict[str, Any]) -> None:
    assert record_owner(owned(*OWNED, **more)) == UID
    assert record_owner(owned(*OWNED)) == "pod-1"
    found = decide(owned(*OWNED, **more), of_pod())
    assert isinstance(found, Wait)
    assert found.code == Code.LEDGER_UNKNOWN


def test_claim_of_a_pod_is_for_that_pod_alone() -> None:
    found = decide(owned(*OWNED, pods=["pod-1", "thief"]), of_pod())
    assert isinstance(found, Refuse)
    assert found.code == Code.NOT_OWNER
    assert "thief" in found.text
    thief = replace(OWNER, uid="pod-2", name="thief")
    waiting = decide(owned(*OWNED), of_pod(pods=[thief]))
    assert isinstance(waiting, Wait)
    assert waiting.code == Code.POD_UNKNOWN
    assert isinstance(decide(owned(*OWNED), of_pod(pods=[thief, OWNER])), Given)


@pytest.mark.parametrize("uses", [("app-nvidia", "side-nvidia"), ("",)])
def test_container_of_a_pod_has_the_share_of_one_container(uses: tuple[str, ...]) -> None:
    both = {"first": tuple(ClaimUse(claim="c", request=one) for one in uses)}
    found = decide(owned(*OWNED), of_pod(pods=[replace(OWNER, claims_by_container=both)]))
    assert isinstance(found, Refuse)
    assert found.code == Code.SEVERAL_REQUESTS


def test_resized_share_keeps_its_claim_and_another_device_does_not() -> None:
    app, side = POD_RECORD.containers
    larger = replace(side, shares=(replace(side.shares[0], memory_mib=150),))
    elsewhere = replace(side, shares=(replace(side.shares[0], uuid="nvidia-1"),))
    grown = replace(POD_RECORD, containers=(app, larger))
    moved = replace(POD_RECORD, op="resize", containers=(app, elsewhere))
    claimed = owned(*OWNED)
    assert isinstance(decide(claimed, of_pod(grown)), Wait)
    assert isinstance(decide(claimed, of_pod(replace(grown, op="resize"))), Given)
    # The ledger was lost and rebuilt: the share is that for which the claim was prepared.
    assert isinstance(decide(claimed, of_pod(grown, prepared_id="a-1")), Given)
    assert isinstance(decide(claimed, of_pod(grown, prepared_id="a-0")), Wait)
    assert isinstance(decide(claimed, of_pod(moved, prepared_id="a-1")), Wait)
    user = replace(booked(RECORD, *RESULTS), op="resize")
    half = replace(MAIN.shares[0], memory_mib=100)
    user = replace(user, containers=(replace(MAIN, shares=(half, MAIN.shares[1])),))
    resized = facts(entry=Entry(record=user, sequence=2))
    assert isinstance(decide(claim(*RESULTS), resized), Given)


def test_cdi_names_come_with_the_first_device_of_a_request() -> None:
    found = prepared_devices(claim(*RESULTS), {"main": ("x/y=z",)})
    assert [one.cdi_ids for one in found] == [("x/y=z",), ()]
    assert {one.request for one in found} == {"main"}


def test_given_shares_are_summed_over_owners() -> None:
    found = given_shares([[MAIN], [MAIN], []])
    assert found["nvidia-0"] == Booked(memory_mib=600, core_pct=60, slots=2)


# --- hardware partitions

SIZES = (Profile(name="1g", memory_mib=100, core_pct=10, size=1, starts=(0, 1, 2)),)
CARD = device(7, mode="mig", partitions=SIZES)
PART = Share(vendor="nvidia", uuid="nvidia-7", memory_mib=100, core_pct=10, profile="1g", start=1)


def part(start: int, **more: Any) -> dict[str, Any]:
    found = result(7, "", **more)
    del found["consumedCapacity"]
    return {**found, "device": names.partition_name("nvidia-7", "1g", start)}


def divided(share: Share, *results: dict[str, Any], **more: Any) -> Facts:
    record = replace(RECORD, containers=(replace(MAIN, shares=(share,)),))
    return facts(record, *results, **{"devices": [CARD], **more})


def test_partition_that_the_ledger_confirms_may_be_prepared() -> None:
    found = decide(claim(part(1)), divided(PART, part(1)))
    assert isinstance(found, Given)
    assert found.devices_by_uuid == {"nvidia-7": CARD}


def test_amounts_of_a_partition_may_differ_since_a_new_driver_reports_its_size() -> None:
    older = replace(PART, memory_mib=96, core_pct=9)
    assert isinstance(decide(claim(part(1)), divided(older, part(1))), Given)


@pytest.mark.parametrize(
    "other", [replace(PART, start=2), replace(PART, profile="2g"), replace(PART, uuid="nvidia-0")]
)
def test_record_of_another_partition_waits(other: Share) -> None:
    found = decide(claim(part(1)), divided(other, part(1)))
    assert isinstance(found, Wait)
    assert found.code == Code.LEDGER_MISMATCH
    assert "the claim's allocation is main: nvidia-7 1g@1" in found.text


def test_place_that_another_container_was_given_is_full() -> None:
    given = Booked(memory_mib=100, core_pct=10, slots=1, parts={"1g@1": 1})
    found = decide(claim(part(1)), divided(PART, part(1), given=lambda: {"nvidia-7": given}))
    assert isinstance(found, Wait)
    assert found.code == Code.DEVICE_FULL
    assert "position 1 of device nvidia-7 twice" in found.text
    beside = replace(given, parts={"1g@2": 1})
    allowed = decide(claim(part(1)), divided(PART, part(1), given=lambda: {"nvidia-7": beside}))
    assert isinstance(allowed, Given)


def test_share_of_a_card_that_was_switched_into_mig_mode_is_refused() -> None:
    soft = (result(7, "100Mi"),)
    found = decide(claim(*soft), divided(PART, *soft))
    assert isinstance(found, Refuse)
    assert found.code == Code.DEVICE_UNKNOWN


def test_partition_of_a_card_that_left_mig_mode_or_is_unhealthy_is_refused() -> None:
    left = decide(claim(part(1)), divided(PART, part(1), devices=[device(7)]))
    assert isinstance(left, Refuse)
    assert left.code == Code.ALLOCATION_INVALID
    ill = decide(claim(part(1)), divided(PART, part(1), faulty={"nvidia-7"}))
    assert isinstance(ill, Refuse)
    assert ill.code == Code.DEVICE_UNHEALTHY
