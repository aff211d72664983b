# SPDX-License-Identifier: Apache-2.0
"""Requests that reach the webhook: the match conditions, evaluated as CEL."""

import re
from typing import Any

import pytest

from hami_common.admission.configuration import Client, mutating_webhook_configuration
from hami_common.pods import annotations as keys
from hami_common.vendors.catalog import Catalog
from hami_sim.apiserver.cel import CelError, Program
from hami_sim.apiserver.selectors import selector_from_object

NAMES = Catalog.from_settings().resource_names()
CLIENT = Client(namespace="hami-system", service="hami-webhook", ca_bundle="Q0E=")
CONFIGURATION = mutating_webhook_configuration(NAMES, CLIENT)
VARIABLES = frozenset({"object", "oldObject", "request", "authorizer"})


def matches(position: int, new: dict[str, Any], old: dict[str, Any] | None = None) -> bool:
    conditions = CONFIGURATION["webhooks"][position]["matchConditions"]
    programs = [Program(condition["expression"], VARIABLES) for condition in conditions]
    env = {"object": new, "oldObject": old, "request": {}}
    return all(program.decide(env) for program in programs)


def pod(group: str = "containers", **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", **more.pop("metadata", {})},
        "spec": {
            "containers": [{"name": "idle"}],
            group: [{"name": "first"}, {"name": "main", **more}],
        },
    }


@pytest.mark.parametrize("group", ["containers", "initContainers", "ephemeralContainers"])
@pytest.mark.parametrize("kind", ["limits", "requests"])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_new_pod_that_names_a_resource_is_sent(group: str, kind: str, name: str) -> None:
    assert matches(0, pod(group, resources={kind: {"cpu": "1", name: "1"}}))


@pytest.mark.parametrize(
    "resources",
    [None, {}, {"limits": {}}, {"limits": {"cpu": "1"}}, {"requests": {"nvidia.com/gpux": "1"}}],
)
def test_new_pod_without_devices_is_not_sent(resources: dict[str, Any] | None) -> None:
    more: dict[str, Any] = {} if resources is None else {"resources": resources}
    assert not matches(0, pod(**more))
    assert not matches(0, {"metadata": {"name": "p"}, "spec": {}})


RESERVED = [
    *sorted(keys.RESERVED),
    "main.limits.hami.io/v1",
    "hami.io/vgpu-devices-allocated",
    "hami.io/mlu-devices-to-allocate",
]


@pytest.mark.parametrize("key", RESERVED)
def test_pod_with_a_forged_annotation_is_sent(key: str) -> None:
    assert keys.is_reserved(key)
    forged = pod(metadata={"annotations": {"a": "b", key: "x"}})
    assert matches(0, forged)
    assert matches(1, forged, pod())
    assert matches(1, pod(), forged)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"annotations": {}},
        {"annotations": {"hami.io/traceparent": "x", "example.com/x-devices-allocated": "y"}},
        {"labels": {}},
        {"labels": {keys.MANAGED_LABEL: "false"}},
    ],
)
def test_update_of_a_pod_without_the_label_is_not_sent(metadata: dict[str, Any]) -> None:
    assert not matches(1, pod(metadata=metadata), pod(metadata=metadata))


def test_pod_with_resources_in_the_annotation_is_sent() -> None:
    claimed = pod(metadata={"annotations": {keys.CLAIMED_RESOURCES: "{}"}})
    assert matches(0, claimed)
    assert matches(1, claimed, pod())
    assert matches(1, pod(), claimed)


@pytest.mark.parametrize(
    ("labels", "path"),
    [
        ({}, "/mutate"),
        ({keys.ALLOCATION_MODE: "dra"}, "/mutate/dra"),
        ({keys.ALLOCATION_MODE: "device-plugin"}, "/mutate/device-plugin"),
        ({keys.ALLOCATION_MODE: "something else"}, "/mutate"),
        ({keys.ALLOCATION_MODE: "dra", keys.WEBHOOK_LABEL: keys.WEBHOOK_IGNORE}, ""),
    ],
)
def test_label_of_a_namespace_chooses_the_path(labels: dict[str, str], path: str) -> None:
    for client in (CLIENT, Client(url="https://127.0.0.1:9443/mutate")):
        document = mutating_webhook_configuration(NAMES, client, with_modes=True)
        paths = []
        for webhook in document["webhooks"]:
            selected = selector_from_object(webhook["namespaceSelector"])
            assert selected is not None
            if selected.matches(labels) and webhook["rules"][0]["operations"] == ["CREATE"]:
                config = webhook["clientConfig"]
                paths.append(
                    config["service"]["path"]
                    if "service" in config
                    else config["url"].removeprefix("https://127.0.0.1:9443")
                )
        assert paths == ([path] if path else [])


def test_webhooks_of_all_modes_get_the_same_pods() -> None:
    document = mutating_webhook_configuration(NAMES, CLIENT, with_modes=True)
    first, *others, _ = document["webhooks"]
    assert len(others) == 2
    for webhook in others:
        for field in ("rules", "matchConditions", "failurePolicy", "reinvocationPolicy"):
            assert webhook[field] == first[field]


def test_update_that_drops_the_label_is_sent() -> None:
    ours = pod(metadata={"labels": {keys.MANAGED_LABEL: "true"}})
    assert matches(1, pod(), ours)
    assert matches(1, ours, pod())


ASKING = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}


def crowd(containers: int = 1, **entries: int) -> dict[str, Any]:
    one: dict[str, Any] = {"name": "main", **ASKING}
    for field in ("volumeMounts", "env"):
        one[field] = [{"name": f"x{i}"} for i in range(entries.get(field, 0))]
    many = [one, *({"name": f"c{i}", **ASKING} for i in range(containers - 1))]
    volumes = [{"name": f"v{i}"} for i in range(entries.get("volumes", 0))]
    return {"metadata": {"name": "p"}, "spec": {"containers": many, "volumes": volumes}}


@pytest.mark.parametrize(
    ("pod", "field"),
    [
        (crowd(201), "spec.containers"),
        (crowd(volumes=1601), "spec.volumes"),
        (crowd(volumeMounts=1601), "spec.containers[*].volumeMounts"),
        (crowd(env=3401), "spec.containers[*].env"),
    ],
    ids=lambda value: value if isinstance(value, str) else "pod",
)
def test_pod_that_is_too_large_is_refused_without_a_call(pod: dict[str, Any], field: str) -> None:
    with pytest.raises(CelError, match=re.escape(f"no such key: {field}: a pod that asks")):
        matches(0, pod)


def test_large_pod_within_the_bounds_is_sent() -> None:
    assert matches(0, crowd(200, volumes=1600, volumeMounts=1600, env=3400))


def test_large_pod_without_devices_is_left_alone() -> None:
    pod = crowd(300)
    for one in pod["spec"]["containers"]:
        del one["resources"]
    assert not matches(0, pod)


def test_pod_cannot_be_labelled_past_the_webhook() -> None:
    for webhook in CONFIGURATION["webhooks"]:
        assert "objectSelector" not in webhook


@pytest.mark.parametrize(
    ("labels", "is_sent"),
    [
        ({"kubernetes.io/metadata.name": "team-a"}, True),
        ({"kubernetes.io/metadata.name": "kube-system"}, True),
        ({"kubernetes.io/metadata.name": "team-a", keys.WEBHOOK_LABEL: "on"}, True),
        ({"kubernetes.io/metadata.name": "team-a", keys.WEBHOOK_LABEL: "ignore"}, False),
    ],
)
def test_only_a_label_exempts_a_namespace(labels: dict[str, str], *, is_sent: bool) -> None:
    for webhook in CONFIGURATION["webhooks"]:
        selected = selector_from_object(webhook["namespaceSelector"])
        assert selected is not None
        assert selected.matches(labels) is is_sent


def test_both_webhooks_fail_closed_and_have_no_side_effect_on_dry_run() -> None:
    for webhook in CONFIGURATION["webhooks"]:
        assert webhook["failurePolicy"] == "Fail"
        assert webhook["sideEffects"] == "NoneOnDryRun"
        assert webhook["admissionReviewVersions"] == ["v1"]
        assert webhook["clientConfig"]["caBundle"] == "Q0E="
    create, update = (webhook["rules"][0] for webhook in CONFIGURATION["webhooks"])
    assert (create["operations"], create["resources"]) == (["CREATE"], ["pods"])
    assert update["resources"] == ["pods", "pods/ephemeralcontainers"]


def test_url_replaces_the_service() -> None:
    client = Client(url="https://127.0.0.1:9443/mutate")
    assert client.document() == {"url": "https://127.0.0.1:9443/mutate"}


def test_names_with_quotes_stay_inside_the_expression() -> None:
    odd = mutating_webhook_configuration(["it's/odd\\name"], CLIENT)
    condition, *_ = odd["webhooks"][0]["matchConditions"]
    program = Program(condition["expression"], VARIABLES)
    asking = pod(resources={"limits": {"it's/odd\\name": "1"}})
    assert program.decide({"object": asking, "oldObject": None, "request": {}})
