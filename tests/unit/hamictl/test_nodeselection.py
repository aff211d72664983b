# SPDX-License-Identifier: Apache-2.0
"""Nodes that a pod template selects by their labels."""

from typing import Any

import pytest

from hamictl.nodeselection import selects

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def affine(*terms: list[dict[str, Any]]) -> dict[str, Any]:
    """A pod specification with these terms of expressions."""
    found = [{"matchExpressions": expressions} for expressions in terms]
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": found}}}}


def on(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


@pytest.mark.parametrize(
    ("pod", "is_selected"),
    [
        ({}, True),
        ({"nodeSelector": {"gpu": "on"}}, True),
        ({"nodeSelector": {"gpu": "on", "zone": "b"}}, False),
        (affine([on("gpu", "In", "on", "yes")]), True),
        (affine([on("gpu", "In", "off")]), False),
        (affine([on("gpu", "In", "off")], [on("zone", "In", "a")]), True),
        (affine([on("gpu", "In", "on"), on("zone", "In", "b")]), False),
        (affine([on("zone", "NotIn", "b")]), True),
        (affine([on("rack", "NotIn", "b")]), True),
        (affine([on("zone", "NotIn", "a")]), False),
        (affine([on("gpu", "Exists")]), True),
        (affine([on("rack", "Exists")]), False),
        (affine([on("rack", "DoesNotExist")]), True),
        (affine([on("gpu", "DoesNotExist")]), False),
        (affine([on("zone", "Gt", "1")]), False),
        (affine([]), False),
        (affine(), False),
        ({"nodeSelector": {"zone": "b"}, **affine([on("gpu", "Exists")])}, False),
    ],
)
def test_terms_are_alternatives_and_expressions_hold_together(
    pod: dict[str, Any], *, is_selected: bool
) -> None:
    assert selects(pod, {"gpu": "on", "zone": "a"}) is is_selected
