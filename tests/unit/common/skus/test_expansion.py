# SPDX-License-Identifier: Apache-2.0
"""A pod with alternatives is read once per alternative, as a pod of its vendor."""

import pytest

from hami_common.errors import RequestInvalid
from hami_common.model.request import options
from hami_common.pods import annotations as keys
from hami_common.pods.podview import (
    ContainerView,
    MetadataView,
    PodSpecView,
    PodView,
    ResourcesView,
)
from hami_common.skus.expansion import (
    Alternative,
    Expansion,
    encode,
    terms_of,
    views_of,
)
from hami_common.vendors.catalog import Catalog, VendorSettings

CATALOG = Catalog.from_settings()
NVIDIA = Alternative(
    vendor="nvidia",
    limits={"main": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "8192"}},
    types=("A100",),
)
ASCEND = Alternative(
    vendor="ascend",
    limits={"main": {"huawei.com/Ascend910B4": "1", "huawei.com/Ascend910B4-memory": "8192"}},
    annotations={"huawei.com/vnpu-mode": "hami-core"},
)
EXPANSION = Expansion(
    sku="s-8g@3",
    service_class="spot",
    link="numa",
    min_isolation=(("memory", "C"),),
    alternatives=(NVIDIA, ASCEND),
)


def pod(expansion: Expansion | None, *names: str, **more: str) -> PodView:
    marks = {} if expansion is None else {keys.ALTERNATIVES: encode(expansion)}
    limits: dict[str, str | int | float] = {"hami.io/accelerators": "1", "cpu": "2"}
    containers = [
        ContainerView(name=name, resources=ResourcesView(limits=limits))
        for name in names or ("main",)
    ]
    return PodView(
        metadata=MetadataView(name="p", uid="u", annotations={**marks, **more}),
        spec=PodSpecView(containers=[*containers, ContainerView(name="side")]),
    )


def test_each_alternative_is_a_request_of_its_vendor() -> None:
    request = CATALOG.parse_pod(pod(EXPANSION))
    assert request is not None
    first, second = options(request)
    assert [one.vendor for one in first.containers[0].requests] == ["nvidia"]
    assert first.selectors["nvidia"].allow_types == ("A100",)
    assert [one.vendor for one in second.containers[0].requests] == ["ascend"]
    assert second.containers[0].requests[0].modes == ("soft",), "by the alternative's annotation"
    for choice in (first, second):
        (selector,) = choice.selectors.values()
        assert selector.numa_bind
        assert selector.min_isolation == (("memory", "C"),)
        assert choice.others == ()


def test_pods_own_constraints_hold_beside_those_of_the_sku() -> None:
    request = CATALOG.parse_pod(
        pod(EXPANSION, **{keys.MIN_ISOLATION: "fault=B", "nvidia.com/nouse-gpuuuid": "GPU-1"})
    )
    assert request is not None
    selector = request.selectors["nvidia"]
    assert selector.min_isolation == (("fault", "B"), ("memory", "C"))
    assert selector.deny_uuids == ("GPU-1",)


def test_best_connected_devices_are_preferred_on_demand() -> None:
    fastest = Expansion(link="fastest", alternatives=(NVIDIA,))
    request = CATALOG.parse_pod(pod(fastest))
    assert request is not None
    assert request.policy.device[0] == "topology-aware"
    assert request.others == ()


def test_vendor_that_a_service_ignores_is_skipped() -> None:
    ignoring = Catalog.from_settings(VendorSettings(ignored=("nvidia",)))
    request = ignoring.parse_pod(pod(EXPANSION))
    assert request is not None
    assert [one.vendor for one in request.containers[0].requests] == ["ascend"]
    with pytest.raises(RequestInvalid, match="no vendor of this installation"):
        ignoring.parse_pod(pod(Expansion(alternatives=(NVIDIA,))))


@pytest.mark.parametrize(
    ("view", "problem"),
    [
        (pod(None), "is missing for container main"),
        (pod(None, **{keys.ALTERNATIVES: "{"}), "cannot be read"),
        (pod(Expansion(alternatives=())), "does not list the containers"),
        (pod(EXPANSION, "main", "second"), "does not list the containers"),
        (
            pod(Expansion(alternatives=(Alternative(vendor="nvidia", limits={"main": {}}),))),
            "asks for no device",
        ),
    ],
)
def test_pod_that_admission_did_not_expand_is_refused(view: PodView, problem: str) -> None:
    with pytest.raises(RequestInvalid, match=problem):
        CATALOG.parse_pod(view)


def test_sku_and_class_are_those_of_the_expansion() -> None:
    assert terms_of(pod(EXPANSION)) == ("s-8g@3", "spot")
    assert terms_of(pod(Expansion(alternatives=(NVIDIA,)))) == ("", "")
    assert terms_of(pod(None)) == ("", "")
    assert terms_of(pod(None, **{keys.ALTERNATIVES: "{"})) == ("", "")


def test_quotas_see_the_limits_of_every_alternative() -> None:
    names = [set(view.spec.containers[0].limits()) for view in views_of(pod(EXPANSION))]
    assert names == [
        {"cpu", "nvidia.com/gpu", "nvidia.com/gpumem"},
        {"cpu", "huawei.com/Ascend910B4", "huawei.com/Ascend910B4-memory"},
    ]
    plain = pod(None)
    assert views_of(plain) == (plain,)
    broken = pod(None, **{keys.ALTERNATIVES: "{"})
    assert views_of(broken) == (broken,)
