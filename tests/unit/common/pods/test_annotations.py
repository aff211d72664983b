# SPDX-License-Identifier: Apache-2.0
"""Annotations that users may not write, and the name of the limits annotation."""

import pytest

from hami_common.pods import annotations


@pytest.mark.parametrize(
    "key",
    [
        "hami.io/allocation",
        "hami.io/fence",
        "hami.io/vgpu-node",
        "hami.io/vgpu-time",
        "hami.io/bind-time",
        "hami.io/bind-phase",
        "hami.io/vgpu-devices-allocated",
        "hami.io/vgpu-devices-to-allocate",
        "hami.io/Ascend910B4-devices-allocated",
        "hami.io/dcu-devices-to-allocate",
        "hami.io/vgpu-mig-allocations",
        "main.limits.hami.io/v1",
        "main.limits.hami.io/v2",
    ],
)
def test_allocation_annotations_are_reserved(key: str) -> None:
    assert annotations.is_reserved(key)


@pytest.mark.parametrize(
    "key",
    [
        "hami.io/traceparent",
        "hami.io/gpu-scheduler-policy",
        "hami.io/node-scheduler-policy",
        "nvidia.com/use-gputype",
        "example.com/vgpu-devices-allocated",
        "allocation",
    ],
)
def test_request_annotations_belong_to_users(key: str) -> None:
    assert not annotations.is_reserved(key)


def test_the_limits_annotation_names_its_container_and_fits_kubernetes_rules() -> None:
    longest = "c" * 63
    key = annotations.limits(longest)
    assert key == f"{longest}.limits.hami.io/v1"
    prefix, _, name = key.partition("/")
    assert len(prefix) <= 253
    assert len(name) <= 63
    assert annotations.is_reserved(key)
