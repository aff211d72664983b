# SPDX-License-Identifier: Apache-2.0
"""Documents of the claim of a pod: what it asks for, and the devices that a record writes."""

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hami_common.dra.claims import ResourceClaim, containers_of
from hami_common.dra.podclaims import as_claimed, owner_pod, requests_of
from hami_common.events.codec import decode
from hami_common.model.placement import ContainerShares, Share
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.podclaim import (
    StoredClaim,
    allocate_document,
    claim_document,
    clear_document,
    has_devices,
    holds,
    is_reserved_for,
    on_published,
)
from hami_sim.apiserver.cel import Program
from hami_sim.kubescheduler.devices import Device as Offered
from hami_sim.kubescheduler.devices import _view
from tests.support import claims
from tests.support.builders import device
from tests.unit.core.facts import pod_facts, record

CATALOG = Catalog.from_settings()
A100, H100 = device("GPU-a", type="NVIDIA A100"), device("GPU-h", type="H100", memory_mib=80_000)
Obj = dict[str, Any]


def exactly(
    limits: dict[str, str], *, annotations: dict[str, str] | None = None, devices: Any = (A100,)
) -> Obj:
    """The request of the claim of a pod with one container."""
    document = {
        "metadata": {"uid": "u1", "name": "p", "namespace": "ns", "annotations": annotations or {}},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
    }
    request = CATALOG.parse_pod(decode(json.dumps(document).encode(), PodView, what="pod"))
    assert request is not None
    pod = pod_facts(
        request=as_claimed(request, claim="hami-1"),
        claim="hami-1",
        claim_requests=requests_of(request),
    )
    (found,) = json.loads(claim_document(pod, devices))["spec"]["devices"]["requests"]
    assert found["name"] == "main-nvidia"
    exact: Obj = found["exactly"]
    return exact


@pytest.mark.parametrize(
    ("limits", "count", "amounts"),
    [
        ({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}, 1, {"memory": "3000Mi"}),
        (
            {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"},
            2,
            {"memory": "3000Mi", "cores": "30"},
        ),
        # The least amount on any of the vendor's devices; the bind writes the exact one.
        ({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50"}, 1, {"memory": "20000Mi"}),
        ({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "1"}, 1, {"memory": "400Mi"}),
    ],
)
def test_amounts_are_those_of_the_limits(
    limits: dict[str, str], count: int, amounts: dict[str, str]
) -> None:
    found = exactly(limits, devices=(A100, H100, device("X", vendor="hygon", memory_mib=1000)))
    assert (found["count"], found["capacity"]["requests"]) == (count, amounts)


def test_whole_device_asks_for_no_memory_which_is_the_default_of_the_slice() -> None:
    found = exactly({"nvidia.com/gpu": "1", "nvidia.com/gpucores": "100"})
    assert found["capacity"]["requests"] == {"cores": "100"}


def test_percentage_without_any_device_asks_for_the_least() -> None:
    found = exactly({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50"}, devices=())
    assert found["capacity"]["requests"] == {"memory": "1Mi"}


GPU = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}


def selected(annotations: dict[str, str], **attributes: str) -> bool:
    """Return whether a device with these attributes passes the selectors of the pod's claim."""
    offered = Offered(
        id=("gpu.hami.io", "n1/hami", "d"),
        spec={"attributes": {name: {"string": text} for name, text in attributes.items()}},
        is_local=True,
    )
    return all(
        Program(one["cel"]["expression"], frozenset({"device"})).decide({"device": _view(offered)})
        for one in exactly(GPU, annotations=annotations)["selectors"]
    )


@pytest.mark.parametrize(
    ("annotations", "attributes", "is_selected"),
    [
        ({}, {"vendor": "nvidia"}, True),
        ({}, {"vendor": "hygon"}, False),
        ({}, {}, False),
        ({"nvidia.com/use-gputype": "a100,h100"}, {"type": "NVIDIA A100-SXM"}, True),
        ({"nvidia.com/use-gputype": "a100"}, {"type": "NVIDIA H100"}, False),
        ({"nvidia.com/nouse-gputype": "A100"}, {"type": "nvidia a100"}, False),
        ({"nvidia.com/nouse-gputype": "A100"}, {"type": "NVIDIA H100"}, True),
        ({"nvidia.com/use-gpuuuid": "GPU-1,GPU-2"}, {"uuid": "GPU-2"}, True),
        ({"nvidia.com/use-gpuuuid": "GPU-1"}, {"uuid": "GPU-11"}, False),
        ({"nvidia.com/nouse-gpuuuid": "GPU-1"}, {"uuid": "GPU-1"}, False),
        # Too long to be published: left to the bind.
        ({"nvidia.com/use-gputype": "A100", "nvidia.com/use-gpuuuid": "x"}, {}, True),
        # CEL would judge it otherwise than we do: left to the bind.
        ({"nvidia.com/use-gputype": "Ämt"}, {"type": "other"}, True),
    ],
)
def test_selectors_are_true_for_every_device_that_may_serve(
    annotations: dict[str, str], attributes: dict[str, str], *, is_selected: bool
) -> None:
    if attributes or annotations:
        attributes = {"vendor": "nvidia", **attributes}
    assert selected(annotations, **attributes) == is_selected


def test_words_of_users_stay_text() -> None:
    assert not selected({"nvidia.com/use-gputype": '"); true || ("'}, vendor="nvidia", type="x")


def test_long_list_is_left_to_the_bind() -> None:
    uuids = ",".join(f"GPU-{number:040}" for number in range(500))
    found = exactly(GPU, annotations={"nvidia.com/use-gpuuuid": uuids})
    assert len(found["selectors"]) == 1


# ------------------------------------------------------------------------------------- allocation


RECORD = replace(
    record("a1"),
    claim="hami-1",
    containers=(
        ContainerShares(
            name="z",
            kind="app",
            shares=(
                Share(vendor="nvidia", uuid="GPU-0", memory_mib=1000, core_pct=10),
                Share(vendor="nvidia", uuid="GPU-1", memory_mib=1000, core_pct=10),
            ),
        ),
        ContainerShares(
            name="a",
            kind="sidecar",
            shares=(Share(vendor="nvidia", uuid="GPU-0", memory_mib=500, exclusive=True),),
        ),
    ),
)


def stored(document: Obj) -> ResourceClaim:
    return decode(json.dumps(document).encode(), ResourceClaim, what="claim")


def allocated(**changes: Any) -> ResourceClaim:
    claim = stored({"metadata": {"name": "hami-1", "uid": "c", "resourceVersion": "7"}})
    numbers = iter(range(10))
    document = allocate_document(
        claim,
        replace(RECORD, **changes),
        config=msgspec.Raw(b"null"),
        at="1970-01-01T00:00:00Z",
        share_ids=lambda: f"00000000-0000-4000-8000-{next(numbers):012}",
    )
    patch = json.loads(document)
    assert patch["metadata"] == {"uid": "c", "resourceVersion": "7"}
    assert "config" not in patch["status"]["allocation"]["devices"]
    return stored({"metadata": {"name": "hami-1", "uid": "c"}, "status": patch["status"]})


def test_written_allocation_holds_the_record_and_reads_as_its_shares() -> None:
    claim = allocated()
    assert holds(claim, RECORD)
    assert is_reserved_for(claim, "u1")
    found = containers_of(claim, [device("GPU-0"), device("GPU-1")])
    assert [one.name for one in found] == ["a-nvidia", "z-nvidia"]
    assert len({one.share_id for one in claim.results()}) == 3
    assert claim.allocated_at() == "1970-01-01T00:00:00Z"


def test_order_of_requests_and_devices_does_not_matter() -> None:
    turned = tuple(replace(one, shares=one.shares[::-1]) for one in RECORD.containers[::-1])
    assert holds(allocated(containers=turned), RECORD)


@pytest.mark.parametrize(
    ("share", "has_same_devices"),
    [
        ({"memory_mib": 999}, True),
        ({"core_pct": 11}, True),
        ({"uuid": "GPU-2"}, False),
        ({"uuid": "GPU-1"}, False),
    ],
)
def test_any_other_device_or_amount_differs(share: Obj, *, has_same_devices: bool) -> None:
    first, second = RECORD.containers
    changed = replace(first, shares=(replace(first.shares[0], **share), first.shares[1]))
    claim = allocated(containers=(changed, second))
    assert not holds(claim, RECORD)
    assert has_devices(claim, RECORD) == has_same_devices


def test_lacking_request_other_node_and_no_allocation_differ() -> None:
    assert not holds(allocated(containers=RECORD.containers[:1]), RECORD)
    assert not holds(allocated(), replace(RECORD, containers=RECORD.containers[:1]))
    assert not holds(allocated(node="n2"), RECORD)
    assert not holds(stored({"metadata": {"name": "hami-1"}}), RECORD)


def test_clearing_takes_consumers_and_devices_too() -> None:
    document = json.loads(clear_document(allocated()))
    assert document["status"] == {"allocation": None, "reservedFor": None, "devices": None}
    assert document["metadata"]["uid"] == "c"


@pytest.mark.parametrize(
    ("labels", "owner", "uid"),
    [
        ({"hami.io/managed": "true"}, {"kind": "Pod", "controller": True}, "u1"),
        ({}, {"kind": "Pod", "controller": True}, ""),
        ({"hami.io/managed": "true"}, {"kind": "Pod"}, ""),
        ({"hami.io/managed": "true"}, {"kind": "Job", "controller": True}, ""),
    ],
)
def test_claim_of_a_pod_has_our_label_and_the_pod_as_its_controller(
    labels: dict[str, str], owner: Obj, uid: str
) -> None:
    document = claims.claim("c", labels=labels, ownerReferences=[{"uid": "u1", **owner}])
    assert owner_pod(stored(document).metadata) == uid


def test_devices_that_are_not_published_are_excluded_for_claims_only() -> None:
    document = {
        "metadata": {"uid": "u1", "name": "p", "namespace": "ns"},
        "spec": {"containers": [{"name": "main", "resources": {"limits": GPU}}]},
    }
    request = CATALOG.parse_pod(decode(json.dumps(document).encode(), PodView, what="pod"))
    assert request is not None
    recall = device("GPU-r", capacity_mib=80_000, largest_mib=40_000)
    assert on_published(request, [A100, recall]) is request
    claimed = as_claimed(request, claim="hami-1")
    assert on_published(claimed, [A100]) is claimed
    assert on_published(claimed, [A100, recall]).selectors["nvidia"].deny_uuids == ("GPU-r",)


@pytest.mark.parametrize(
    ("own", "other", "is_older"),
    [
        ("9", "10", True),
        ("10", "9", False),
        ("10", "10", False),
        ("9a", "10b", False),  # no number: counts as newer
        ("", "10", False),
    ],
)
def test_version_is_older_only_if_both_are_numbers(own: str, other: str, *, is_older: bool) -> None:
    document = claims.claim("c")
    one, two = (
        StoredClaim.of(json.dumps(changed).encode())
        for version in (own, other)
        for changed in [
            {**document, "metadata": {**document["metadata"], "resourceVersion": version}}
        ]
    )
    assert one.is_older_than(two) == is_older
