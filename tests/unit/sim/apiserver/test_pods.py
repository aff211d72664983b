# SPDX-License-Identifier: Apache-2.0
"""Pods: quality of service classes, resize, extended resource names."""

from typing import Any

import pytest

from hami_sim.apiserver.errors import clone
from hami_sim.apiserver.pods import (
    apply_resize,
    default_pod,
    is_extended_resource,
    qos_class,
    set_condition,
)


@pytest.mark.parametrize(
    ("name", "extended"),
    [
        ("nvidia.com/gpu", True),
        ("huawei.com/Ascend910", True),
        ("cpu", False),
        ("kubernetes.io/batch", False),
        ("requests.nvidia.com/gpu", False),
        ("hugepages-2Mi", False),
    ],
)
def test_extended_resource_names(name: str, *, extended: bool) -> None:
    assert is_extended_resource(name) is extended


def made(*resources: dict[str, Any]) -> dict[str, Any]:
    containers = [
        {"name": f"c{n}", "image": "i:1", "resources": item} for n, item in enumerate(resources)
    ]
    pod = {"metadata": {"name": "p"}, "spec": {"containers": containers}}
    default_pod(pod)
    return pod


@pytest.mark.parametrize(
    ("resources", "want"),
    [
        ([{}], "BestEffort"),
        ([{"limits": {"nvidia.com/gpu": "1"}}], "BestEffort"),
        ([{"requests": {"cpu": "1"}}], "Burstable"),
        ([{"limits": {"cpu": "1", "memory": "1Gi"}}], "Guaranteed"),
        ([{"limits": {"cpu": "1", "memory": "1Gi"}}, {}], "Burstable"),
        ([{"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}], "Burstable"),
    ],
)
def test_qos_class(resources: list[dict[str, Any]], want: str) -> None:
    assert qos_class(made(*resources)["spec"]) == want


@pytest.mark.parametrize(
    ("image", "policy"),
    [
        ("app", "Always"),
        ("app:latest", "Always"),
        ("host:5000/app", "Always"),
        ("app:1", "IfNotPresent"),
        ("app@sha256:abc", "IfNotPresent"),
    ],
)
def test_image_pull_policy_follows_the_tag(image: str, policy: str) -> None:
    pod = {"metadata": {}, "spec": {"containers": [{"name": "c", "image": image}]}}
    default_pod(pod)
    assert pod["spec"]["containers"][0]["imagePullPolicy"] == policy


def test_defaults_are_idempotent() -> None:
    once = made({"limits": {"cpu": "1000m", "nvidia.com/gpumem": 3000}})
    twice = clone(once)
    default_pod(twice)
    assert twice == once


def test_resize_takes_cpu_and_memory_only() -> None:
    old = made({"requests": {"cpu": "1"}, "limits": {"nvidia.com/gpu": "1"}})
    wanted = clone(old)
    wanted["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "2"
    wanted["spec"]["schedulerName"] = "ignored"
    assert apply_resize(wanted, old) == []
    assert wanted["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "2"
    assert wanted["spec"]["schedulerName"] == "default-scheduler"
    wanted["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "2"}
    (cause,) = apply_resize(wanted, old)
    assert "only cpu and memory resources are mutable" in cause.message


def test_condition_keeps_its_transition_time_while_its_value_stays() -> None:
    status: dict[str, Any] = {}
    set_condition(status, "PodScheduled", "False", "t1", reason="Unschedulable")
    set_condition(status, "PodScheduled", "False", "t2", reason="Other")
    assert status["conditions"][0]["lastTransitionTime"] == "t1"
    set_condition(status, "PodScheduled", "True", "t3")
    assert status["conditions"][0]["lastTransitionTime"] == "t3"
    assert "reason" not in status["conditions"][0]
