# SPDX-License-Identifier: Apache-2.0
"""Variables that give devices."""

from typing import Any

import msgspec
import pytest

from hami_common.podview import EnvVarView
from hami_common.visibility import DEVICE_VARIABLES, giving


def found(*env: dict[str, Any]) -> str:
    """The variable that gives devices."""
    return giving(msgspec.convert(env, list[EnvVarView]))


@pytest.mark.parametrize("name", DEVICE_VARIABLES)
def test_a_variable_with_devices_or_from_elsewhere_gives_devices(name: str) -> None:
    assert found({"name": "A", "value": "all"}, {"name": name, "value": "all"}) == name
    assert found({"name": name, "valueFrom": {"configMapKeyRef": {"name": "x"}}}) == name


@pytest.mark.parametrize("more", [{}, {"value": ""}, {"value": "none"}, {"value": "void"}])
def test_a_variable_that_hides_devices_gives_none(more: dict[str, Any]) -> None:
    """The API server leaves out an empty value."""
    assert found({"name": "NVIDIA_VISIBLE_DEVICES", **more}) == ""
