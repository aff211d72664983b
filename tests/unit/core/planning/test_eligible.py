# SPDX-License-Identifier: Apache-2.0
"""Nodes that a pod's own constraints exclude, by Kubernetes' rules."""

from typing import Any

import pytest

from hami_core.planning.eligible import excluded_nodes, exclusion

Document = dict[str, Any]


def node(name: str = "n", *, labels: dict[str, str] | None = None, **spec: object) -> Document:
    return {"metadata": {"name": name, "labels": labels}, "spec": spec}


def pod(**spec: object) -> Document:
    return {"metadata": {"name": "p"}, "spec": spec}


def affine(*terms: Document) -> Document:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}}
    return pod(affinity={"nodeAffinity": required})


def expression(key: str, operator: str, *values: str) -> Document:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": [*values]}]}


LABELED = node(labels={"zone": "a", "gen": "7", "below": "-2"})
TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


def test_pod_without_constraints_may_go_anywhere() -> None:
    assert exclusion(pod(), node()) == ""
    assert exclusion({"metadata": {}}, {"metadata": {"name": "n"}}) == ""


def test_node_name_and_selector_must_match() -> None:
    assert exclusion(pod(nodeName="n"), node()) == ""
    assert exclusion(pod(nodeName="m"), node()) == "the pod's nodeName"
    assert exclusion(pod(nodeSelector={"zone": "a"}), LABELED) == ""
    for selector in ({"zone": "b"}, {"zone": "a", "rack": "1"}):
        assert exclusion(pod(nodeSelector=selector), LABELED) == "the pod's nodeSelector"


@pytest.mark.parametrize(
    ("term", "is_allowed"),
    [
        (expression("zone", "In", "b", "a"), True),
        (expression("zone", "In", "b"), False),
        (expression("rack", "In", "a"), False),
        (expression("zone", "NotIn", "a"), False),
        (expression("rack", "NotIn", "a"), True),
        (expression("zone", "Exists"), True),
        (expression("rack", "Exists"), False),
        (expression("rack", "DoesNotExist"), True),
        (expression("gen", "Gt", "6"), True),
        (expression("gen", "Gt", "7"), False),
        (expression("below", "Lt", "-1"), True),
        (expression("zone", "Gt", "1"), False),
        (expression("zone", "Near", "a"), False),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}, True),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}, False),
        ({}, False),
    ],
)
def test_required_affinity_needs_a_matching_term(term: Document, *, is_allowed: bool) -> None:
    why = "" if is_allowed else "the pod's required node affinity"
    assert exclusion(affine(term), LABELED) == why
    assert exclusion(affine(expression("zone", "In", "x"), term), LABELED) == why
    assert exclusion(affine(), LABELED) == "the pod's required node affinity"


@pytest.mark.parametrize(
    ("toleration", "is_allowed"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"key": "gpu", "value": "yes"}, True),
        ({"key": "gpu", "value": "yes", "operator": "Equal", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "value": "no"}, False),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "cpu", "operator": "Exists"}, False),
        ({"value": "yes"}, False),
    ],
)
def test_taints_must_be_tolerated(toleration: Document, *, is_allowed: bool) -> None:
    why = "" if is_allowed else "taint gpu without a toleration of the pod"
    assert exclusion(pod(tolerations=[toleration]), node(taints=[TAINT])) == why


def test_preferred_taints_exclude_no_node() -> None:
    assert exclusion(pod(), node(taints=[{**TAINT, "effect": "PreferNoSchedule"}])) == ""


def test_cordoned_node_needs_a_toleration() -> None:
    assert exclusion(pod(), node(unschedulable=True)) == "cordon of the node (spec.unschedulable)"
    tolerations = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]
    assert exclusion(pod(tolerations=tolerations), node(unschedulable=True)) == ""


def test_only_known_nodes_are_reported_and_absent_ones_are_excluded() -> None:
    nodes = [node("a"), node("b", unschedulable=True), node("c", unschedulable=True)]
    assert excluded_nodes(pod(), nodes, ["a", "b", "gone"]) == {
        "b": "cordon of the node (spec.unschedulable)",
        "gone": "no such node in the Kubernetes API",
    }
