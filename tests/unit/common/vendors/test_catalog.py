# SPDX-License-Identifier: Apache-2.0
"""A whole pod's request and placement policy through all vendors."""

from typing import Any

import msgspec
import pytest

from hami_common.errors import RequestInvalid
from hami_common.model.request import PlacementPolicy, ScoringWeights
from hami_common.podview import PodView
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


def test_only_containers_that_ask_are_in_the_request_in_order_of_admission() -> None:
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


def test_a_pod_without_devices_has_no_request_but_may_mention_us() -> None:
    assert CATALOG.parse_pod(pod(apps=[{"cpu": "1"}])) is None
    assert not CATALOG.mentions(pod(apps=[{"cpu": "1"}]))
    assert CATALOG.parse_pod(pod(apps=[{GPU: "0"}])) is None
    assert CATALOG.mentions(pod(apps=[{GPU: "0"}]))
    assert CATALOG.mentions(pod(apps=[{"cpu": "1"}], inits=[{"nvidia.com/gpucore": "1"}]))


def test_a_selector_nobody_needs_is_not_even_read() -> None:
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
def test_unknown_words_are_refused_never_guessed(key: str, value: str, problem: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        parse_policy({key: value}, defaults=DEFAULTS)
    assert caught.value.field == f"annotation {key}"
    assert problem in caught.value.problem
    assert caught.value.fix.startswith("write ")
