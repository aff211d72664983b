# SPDX-License-Identifier: Apache-2.0
"""Requests of whole pods, service classes, names of resources."""

from decimal import Decimal

import pytest

from hami_sim.kubelet.objects import Obj, is_extended, pod_requests, qos_class


def container(name: str, *, sidecar: bool = False, **limits: str) -> Obj:
    made: Obj = {"name": name, "resources": {"limits": dict(limits)}}
    return {**made, "restartPolicy": "Always"} if sidecar else made


def pod(apps: list[Obj], inits: list[Obj] | None = None, **spec: object) -> Obj:
    return {"metadata": {}, "spec": {"containers": apps, "initContainers": inits or [], **spec}}


def test_requests_of_application_containers_add_up() -> None:
    assert pod_requests(pod([container("a", cpu="1"), container("b", cpu="500m")])) == {
        "cpu": Decimal("1.5")
    }


def test_largest_init_container_counts_when_it_exceeds_the_sum() -> None:
    made = pod([container("a", cpu="1")], [container("i", cpu="3"), container("j", cpu="2")])
    assert pod_requests(made)["cpu"] == 3


def test_sidecar_counts_beside_applications_and_later_init_containers() -> None:
    made = pod(
        [container("a", cpu="1")],
        [container("i", cpu="2"), container("s", sidecar=True, cpu="1"), container("j", cpu="3")],
    )
    assert pod_requests(made)["cpu"] == 4  # j beside s; a beside s is only 2


def test_overhead_is_added() -> None:
    assert pod_requests(pod([container("a", cpu="1")], overhead={"cpu": "250m"})) == {
        "cpu": Decimal("1.25")
    }


def test_request_wins_over_limit() -> None:
    made = {"name": "a", "resources": {"limits": {"cpu": "4"}, "requests": {"cpu": "1"}}}
    assert pod_requests(pod([made]))["cpu"] == 1


@pytest.mark.parametrize(
    ("resources", "want"),
    [
        ({}, "BestEffort"),
        ({"limits": {"nvidia.com/gpu": "1"}}, "BestEffort"),
        ({"requests": {"cpu": "1"}}, "Burstable"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, "Guaranteed"),
        ({"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1"}}, "Burstable"),
    ],
)
def test_service_class(resources: Obj, want: str) -> None:
    assert qos_class(pod([{"name": "a", "resources": resources}])) == want


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("nvidia.com/gpu", True),
        ("cpu", False),
        ("hugepages-2Mi", False),
        ("kubernetes.io/batch", False),
        ("requests.nvidia.com/gpu", False),
    ],
)
def test_extended_resources(name: str, want: bool) -> None:  # noqa: FBT001 - table case
    assert is_extended(name) is want
