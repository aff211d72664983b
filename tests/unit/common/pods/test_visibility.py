# SPDX-License-Identifier: Apache-2.0
"""Variables that expose devices."""

from typing import Any

import msgspec
import pytest

from hami_common.pods.podview import ContainerView, EnvVarView
from hami_common.pods.visibility import DEVICE_VARIABLES, from_elsewhere, giving


def found(*env: dict[str, Any]) -> str:
    """The variable that exposes devices."""
    return giving(msgspec.convert(env, list[EnvVarView]))


@pytest.mark.parametrize("name", DEVICE_VARIABLES)
def test_a_variable_with_devices_or_from_elsewhere_gives_devices(name: str) -> None:
    assert found({"name": "A", "value": "all"}, {"name": name, "value": "all"}) == name
    assert found({"name": name, "valueFrom": {"configMapKeyRef": {"name": "x"}}}) == name


@pytest.mark.parametrize("more", [{}, {"value": ""}, {"value": "none"}, {"value": "void"}])
def test_a_variable_that_hides_devices_gives_none(more: dict[str, Any]) -> None:
    """The API server leaves out an empty value."""
    assert found({"name": "NVIDIA_VISIBLE_DEVICES", **more}) == ""


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        ([], set()),
        ([None], set(DEVICE_VARIABLES)),
        ([""], set(DEVICE_VARIABLES)),
        (["APP_"], set()),
        (["APP_", "NVIDIA_"], {"NVIDIA_VISIBLE_DEVICES"}),
        (["A"], {"AMD_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES", "AWS_NEURON_VISIBLE_DEVICES"}),
        (["NVIDIA_VISIBLE_DEVICES_"], set()),
    ],
)
def test_env_from_matches_what_its_prefixes_allow(
    prefixes: list[str | None], expected: set[str]
) -> None:
    document = {"name": "main", "envFrom": [{"prefix": prefix} for prefix in prefixes]}
    assert from_elsewhere(msgspec.convert(document, ContainerView)) == expected
