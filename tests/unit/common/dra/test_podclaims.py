# SPDX-License-Identifier: Apache-2.0
"""Requests of pods as requests of their claim."""

from typing import Any

import msgspec
import pytest

from hami_common.dra.podclaims import (
    as_claimed,
    by_request,
    claim_of,
    encode_resources,
    owner_pod,
    request_name,
    requests_of,
    restored,
    uses_of,
)
from hami_common.errors import RequestInvalid
from hami_common.events.codec import decode
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import ClaimUseView, MetadataView, PodView
from hami_common.vendors.catalog import Catalog

CATALOG = Catalog.from_settings()


def pod(
    app: dict[str, dict[str, str]],
    *,
    init: dict[str, dict[str, str]] | None = None,
    annotations: dict[str, str] | None = None,
) -> PodView:
    document: dict[str, Any] = {
        "metadata": {"uid": "u", "name": "p", "namespace": "ns", "annotations": annotations or {}},
        "spec": {
            "containers": [{"name": n, "resources": {"limits": r}} for n, r in app.items()],
            "initContainers": [
                {"name": n, "resources": {"limits": r}} for n, r in (init or {}).items()
            ],
        },
    }
    return decode(msgspec.json.encode(document), PodView, what="pod")


def asked(view: PodView) -> PodRequest:
    request = CATALOG.parse_pod(view)
    assert request is not None
    return request


GPU = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}
SMALL = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000", "nvidia.com/gpucores": "10"}
LARGE = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "9000", "nvidia.com/gpucores": "30"}


def test_moved_resources_are_the_same_request() -> None:
    whole = pod({"main": GPU, "plain": {}}, init={"load": SMALL})
    note = encode_resources({"main": GPU, "load": SMALL})
    moved = pod(
        {"main": {}, "plain": {}}, init={"load": {}}, annotations={keys.CLAIMED_RESOURCES: note}
    )
    assert CATALOG.parse_pod(moved) is None
    assert asked(restored(moved)) == asked(whole)
    assert restored(whole) is whole


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "cannot be read"), ('{"other":{"nvidia.com/gpu":"1"}}', "names container other")],
)
def test_unreadable_annotation_is_named(text: str, problem: str) -> None:
    with pytest.raises(RequestInvalid, match=problem):
        restored(pod({"main": {}}, annotations={keys.CLAIMED_RESOURCES: text}))


def test_small_init_container_uses_the_request_of_an_app_container() -> None:
    request = asked(pod({"main": GPU}, init={"load": SMALL, "large": LARGE}))
    requests = requests_of(request)
    assert [(one.name, one.users) for one in requests] == [
        ("large-nvidia", ("large",)),
        ("main-nvidia", ("load", "main")),
    ]
    assert uses_of(requests, "load") == (ClaimUseView(name="hami", request="main-nvidia"),)
    claimed = as_claimed(request, claim="c")
    assert [(one.name, one.kind) for one in claimed.containers] == [
        ("large", "app"),
        ("main", "app"),
    ]
    assert claimed.claim == "c"
    assert claimed.selectors["nvidia"].modes == ("soft",)


def test_init_container_uses_the_requests_of_one_container() -> None:
    """A container has one limits file and one usage region, so it has the share of one."""
    dcu = {"hygon.com/dcunum": "1", "hygon.com/dcumem": "2000", "hygon.com/dcucores": "20"}
    apart = asked(pod({"gpu": GPU, "dcu": dcu}, init={"load": {**SMALL, **dcu}}))
    assert {one.name: one.users for one in requests_of(apart)} == {
        "load-nvidia": ("load",),
        "load-hygon": ("load",),
        "gpu-nvidia": ("gpu",),
        "dcu-hygon": ("dcu",),
    }
    assert [one.name for one in as_claimed(apart, claim="c").containers] == ["load", "gpu", "dcu"]
    both = asked(pod({"gpu": GPU, "all": {**GPU, **dcu}}, init={"load": {**SMALL, **dcu}}))
    assert {one.users for one in requests_of(both)} == {("load", "all"), ("gpu",)}


@pytest.mark.parametrize(
    ("labels", "owner", "found"),
    [
        ({"hami.io/managed": "true"}, {"kind": "Pod", "controller": True}, "u"),
        ({"hami.io/managed": "true"}, {"kind": "Pod"}, ""),
        ({"hami.io/managed": "true"}, {"kind": "Job", "controller": True}, ""),
        ({}, {"kind": "Pod", "controller": True}, ""),
    ],
)
def test_pod_owns_a_claim_with_our_label(
    labels: dict[str, str], owner: dict[str, Any], found: str
) -> None:
    document = {"labels": labels, "ownerReferences": [{"name": "p", "uid": "u", **owner}]}
    assert owner_pod(decode(msgspec.json.encode(document), MetadataView, what="metadata")) == found


def test_init_container_without_a_compute_limit_is_not_given_one() -> None:
    free = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    requests = requests_of(asked(pod({"main": GPU}, init={"load": free})))
    assert [one.container for one in requests] == ["load", "main"]


@pytest.mark.parametrize(
    ("limits", "annotations", "problem"),
    [
        ({"huawei.com/Ascend910B3": "1"}, {}, "given by annotations"),
        (GPU, {"nvidia.com/vgpu-mode": "mig"}, "in mode mig"),
        ({"nvidia.com/gpu": "33"}, {}, "33 devices"),
    ],
)
def test_what_no_claim_can_give_is_refused(
    limits: dict[str, str], annotations: dict[str, str], problem: str
) -> None:
    with pytest.raises(RequestInvalid, match=problem):
        as_claimed(asked(pod({"main": limits}, annotations=annotations)), claim="c")


def test_record_of_two_vendors_has_a_request_for_each() -> None:
    shares = (
        Share(vendor="nvidia", uuid="GPU-1", memory_mib=1),
        Share(vendor="hygon", uuid="DCU-1", memory_mib=2),
        Share(vendor="nvidia", uuid="GPU-2", memory_mib=1),
    )
    found = by_request((ContainerShares(name="main", kind="app", shares=shares),))
    assert [(one.name, [share.uuid for share in one.shares]) for one in found] == [
        ("main-hygon", ["DCU-1"]),
        ("main-nvidia", ["GPU-1", "GPU-2"]),
    ]


def test_request_names_are_labels_and_differ() -> None:
    long = ["x" * 63, "x" * 62 + "y", "a" * 54 + "-" + "b" * 8]
    names = {request_name(one, "nvidia") for one in long}
    assert len(names) == 3
    assert all(len(name) <= 63 and not name.endswith("-") for name in names)


def test_claim_is_that_of_our_entry() -> None:
    document = {
        "metadata": {"annotations": {keys.CLAIMED_RESOURCES: "{}"}},
        "spec": {
            "resourceClaims": [
                {"name": "nic", "resourceClaimName": "n"},
                {"name": "hami", "resourceClaimName": "hami-1"},
            ]
        },
    }
    assert claim_of(decode(msgspec.json.encode(document), PodView, what="pod")) == "hami-1"
