# SPDX-License-Identifier: Apache-2.0
"""A whole pod's request and placement policy through all vendors."""

from typing import Any

import msgspec
import pytest

from hami_common.errors import RequestInvalid, SettingsInvalid
from hami_common.events.codec import out_of_range
from hami_common.model.request import PlacementPolicy, ScoringWeights
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog, VendorSettings, parse_policy
from hami_common.vendors.nvidia import NvidiaSettings

GPU = "nvidia.com/gpu"
CATALOG = Catalog.from_settings()


def pod(
    *,
    apps: list[dict[str, Any]],
    inits: list[dict[str, Any]] | None = None,
    annotations: dict[str, str] | None = None,
) -> PodView:
    def container(number: int, limits: dict[str, Any], prefix: str) -> dict[str, Any]:
        policy = limits.pop("restartPolicy", None)
        made = {"name": f"{prefix}{number}", "resources": {"limits": limits}}
        return made if policy is None else made | {"restartPolicy": policy}

    document = {
        "metadata": {
            "name": "web",
            "namespace": "ns",
            "uid": "u",
            "annotations": annotations or {},
        },
        "spec": {
            "containers": [container(n, dict(c), "app") for n, c in enumerate(apps)],
            "initContainers": [container(n, dict(c), "init") for n, c in enumerate(inits or [])],
        },
    }
    return msgspec.convert(document, PodView)


def test_ignored_vendors_own_no_resource() -> None:
    catalog = Catalog.from_settings(VendorSettings(ignored=("ascend",)))
    assert not any(name.startswith("huawei.com/") for name in catalog.resource_names())
    assert catalog.vendor("ascend").name == "ascend"
    ascend = pod(apps=[{"huawei.com/Ascend910A": "1"}])
    assert CATALOG.parse_pod(ascend) is not None
    assert catalog.parse_pod(ascend) is None
    with pytest.raises(SettingsInvalid, match="'ascnd' is not a vendor"):
        Catalog.from_settings(VendorSettings(ignored=("ascnd",)))


def test_only_containers_with_devices_are_in_the_request_in_order_of_admission() -> None:
    request = CATALOG.parse_pod(
        pod(
            apps=[{"cpu": "1"}, {GPU: "2"}],
            inits=[{GPU: "1"}, {GPU: "1", "restartPolicy": "Always"}, {"cpu": "1"}],
        )
    )
    assert request is not None
    assert [(c.name, c.kind) for c in request.containers] == [
        ("init0", "init"),
        ("init1", "sidecar"),
        ("app1", "app"),
    ]
    assert (request.uid, request.namespace, request.name) == ("u", "ns", "web")
    assert set(request.selectors) == {"nvidia"}


def test_a_pod_without_devices_has_no_request_but_may_have_annotations() -> None:
    assert CATALOG.parse_pod(pod(apps=[{"cpu": "1"}])) is None
    assert not CATALOG.mentions(pod(apps=[{"cpu": "1"}]))
    assert CATALOG.parse_pod(pod(apps=[{GPU: "0"}])) is None
    assert CATALOG.mentions(pod(apps=[{GPU: "0"}]))
    assert CATALOG.mentions(pod(apps=[{"cpu": "1"}], inits=[{"nvidia.com/gpucore": "1"}]))


def test_selector_is_not_parsed_for_a_pod_without_devices() -> None:
    annotations = {"nvidia.com/numa-bind": "nonsense"}
    assert CATALOG.parse_pod(pod(apps=[{"cpu": "1"}], annotations=annotations)) is None
    with pytest.raises(RequestInvalid, match="numa-bind"):
        CATALOG.parse_pod(pod(apps=[{GPU: "1"}], annotations=annotations))


def test_priority_is_per_container() -> None:
    request = CATALOG.parse_pod(pod(apps=[{GPU: "1", "nvidia.com/priority": "0"}, {GPU: "1"}]))
    assert request is not None
    assert [c.priority for c in request.containers] == [0, None]


def test_the_error_names_the_container() -> None:
    with pytest.raises(RequestInvalid, match=r"^container app1: "):
        CATALOG.parse_pod(pod(apps=[{GPU: "1"}, {GPU: "1", "nvidia.com/gpumem": "3Gi"}]))


def test_an_absent_namespace_is_default() -> None:
    view = msgspec.convert(
        {"spec": {"containers": [{"name": "a", "resources": {"limits": {GPU: 1}}}]}}, PodView
    )
    request = CATALOG.parse_pod(view)
    assert request is not None
    assert request.namespace == "default"


def test_settings_reach_the_vendors() -> None:
    settings = VendorSettings(nvidia=NvidiaSettings(resource_count_name="x.com/gpu"))
    assert "x.com/gpu" in Catalog.from_settings(settings).resource_names()
    assert CATALOG.vendor("nvidia").name == "nvidia"
    with pytest.raises(KeyError):
        CATALOG.vendor("acme")


DEFAULTS = PlacementPolicy(node="spread", device=("binpack",), weights=ScoringWeights(slot=9))


def test_without_annotations_the_clusters_defaults_hold() -> None:
    assert parse_policy({}, defaults=DEFAULTS) == DEFAULTS
    shipped = CATALOG.parse_pod(pod(apps=[{GPU: "1"}]))
    assert shipped is not None
    assert shipped.policy == PlacementPolicy(node="binpack", device=("spread",))


@pytest.mark.parametrize(
    ("text", "chain"),
    [
        ("binpack", ("binpack",)),
        ("binpack,numa", ("binpack", "numa")),
        (" mutex , topology-aware ", ("mutex", "topology-aware")),
        ("", ("binpack",)),
    ],
)
def test_device_policies_are_words_or_chains(text: str, chain: tuple[str, ...]) -> None:
    policy = parse_policy({"hami.io/gpu-scheduler-policy": text}, defaults=DEFAULTS)
    assert policy.device == chain


def test_annotations_win_over_defaults() -> None:
    policy = parse_policy(
        {
            "hami.io/node-scheduler-policy": "binpack",
            "hami.io/device-scoring-weights": "slot=0, core=2 ,memory=3",
        },
        defaults=DEFAULTS,
    )
    assert policy == PlacementPolicy(
        node="binpack", device=("binpack",), weights=ScoringWeights(slot=0, core=2, memory=3)
    )


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("hami.io/node-scheduler-policy", "tight", "'tight' is not a policy"),
        ("hami.io/node-scheduler-policy", "binpack,spread", "is not a policy"),
        ("hami.io/gpu-scheduler-policy", "binpack,tight", "'tight' is not a policy"),
        ("hami.io/gpu-scheduler-policy", "binpack,", "'' is not a policy"),
        ("hami.io/device-scoring-weights", "slot=1", "does not give all three"),
        ("hami.io/device-scoring-weights", "slot=0,core=0,memory=0", "does not give all three"),
        ("hami.io/device-scoring-weights", "slot=1,core=1,memory=-1", "is not a weight"),
        ("hami.io/device-scoring-weights", "slot=1,core=1,memory=1.5", "is not a weight"),
        ("hami.io/device-scoring-weights", "slot=1,core=1,slot=1", "is not a weight"),
        ("hami.io/device-scoring-weights", "slot=1,core=1,memory=٣", "is not a weight"),
    ],
)
def test_unknown_words_are_refused(key: str, value: str, problem: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        parse_policy({key: value}, defaults=DEFAULTS)
    assert caught.value.field == f"annotation {key}"
    assert problem in caught.value.problem
    assert caught.value.fix.startswith("write ")


@pytest.mark.parametrize("digits", [1, 6])
def test_weight_has_at_most_six_digits(digits: int) -> None:
    notes = {"hami.io/device-scoring-weights": f"slot={'9' * digits},core=1,memory=0"}
    request = CATALOG.parse_pod(pod(apps=[{GPU: "1"}], annotations=notes))
    assert request is not None
    assert request.policy.weights.slot == int("9" * digits)


@pytest.mark.parametrize("weight", ["9" * 7, "9" * 5000, "-1", "1.5", "²", "1_0", ""])
def test_other_weight_is_refused_with_the_field_and_the_bound(weight: str) -> None:
    notes = {"hami.io/device-scoring-weights": f"slot={weight},core=1,memory=1"}
    with pytest.raises(RequestInvalid) as caught:
        CATALOG.parse_pod(pod(apps=[{GPU: "1"}], annotations=notes))
    assert caught.value.field == "annotation hami.io/device-scoring-weights"
    assert "up to 999999" in caught.value.fix
    assert len(str(caught.value)) < 400


def test_pod_with_devices_has_at_most_200_containers() -> None:
    asks = [{GPU: "1"}] * 100
    assert CATALOG.parse_pod(pod(apps=asks, inits=asks)) is not None
    with pytest.raises(RequestInvalid, match=r"spec.containers: 201 containers.*at most 200"):
        CATALOG.parse_pod(pod(apps=[*asks, {"cpu": "1"}], inits=asks))
    assert CATALOG.parse_pod(pod(apps=[{"cpu": "1"}] * 1000)) is None


def test_largest_request_of_a_pod_is_within_the_bounds_of_the_ledger() -> None:
    """200 containers with 64 devices of the largest memory each: their sum fits into 64 bits."""
    limits = {GPU: "64", "nvidia.com/gpumem": str(2**31 - 1), "nvidia.com/gpucores": "100"}
    request = CATALOG.parse_pod(pod(apps=[limits] * 200))
    assert request is not None
    assert out_of_range(request) == ""
    asked = [one for container in request.containers for one in container.requests]
    assert sum(one.count * one.memory_mib for one in asked) < 2**63
