# SPDX-License-Identifier: Apache-2.0
"""In-tree filters and scores, and the sentence about refusals."""

from typing import Any

import pytest

from hami_sim.kubescheduler.fit import (
    NodeRefusal,
    NodeState,
    explain,
    refusal,
    requests_of,
    scores,
)


def node(name: str = "n", **more: Any) -> NodeState:
    spec = more.pop("spec", {})
    labels = more.pop("labels", {})
    status = {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "3", **more.pop("amounts", {})}}
    return NodeState(
        {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": {**status, **more}}
    )


def pod(uid: str = "p", requests: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    container = {"name": "c", "resources": {"requests": requests or {}}}
    return {"metadata": {"uid": uid}, "spec": {"containers": [container], **spec}}


def reasons(one: dict[str, Any], state: NodeState, *ignored: str) -> tuple[str, ...]:
    found = refusal(one, state, frozenset(ignored))
    return found.reasons if found else ()


def test_a_node_with_room_takes_the_pod() -> None:
    assert reasons(pod(requests={"cpu": "1"}), node()) == ()


def test_amounts_of_other_pods_count() -> None:
    state = node()
    state.add(pod("other", {"cpu": "3"}))
    assert reasons(pod(requests={"cpu": "2"}), state) == ("Insufficient cpu",)
    state.remove(pod("other"))
    assert reasons(pod(requests={"cpu": "2"}), state) == ()


def test_a_pod_counted_twice_counts_once() -> None:
    state = node()
    for _ in range(2):
        state.add(pod("other", {"cpu": "2"}))
    assert reasons(pod(requests={"cpu": "2"}), state) == ()


def test_ignored_resources_are_left_to_the_extender() -> None:
    asks = pod(requests={"nvidia.com/gpumem": "3k"})
    assert reasons(asks, node()) == ("Insufficient nvidia.com/gpumem",)
    assert reasons(asks, node(), "nvidia.com/gpumem") == ()


def test_too_many_pods() -> None:
    state = node()
    for name in "abc":
        state.add(pod(name))
    assert reasons(pod(), state) == ("Too many pods",)


def test_cordoned_tainted_and_unready_nodes() -> None:
    taint = {"key": "dedicated", "value": "x", "effect": "NoSchedule"}
    unready = [{"type": "Ready", "status": "False"}]
    assert reasons(pod(), node(spec={"unschedulable": True})) == ("node(s) were unschedulable",)
    assert reasons(pod(), node(spec={"taints": [taint]})) == (
        "node(s) had untolerated taint {dedicated: x}",
    )
    assert reasons(pod(), node(conditions=unready)) == (
        "node(s) had untolerated taint {node.kubernetes.io/not-ready: }",
    )
    tolerant = pod(tolerations=[{"operator": "Exists"}])
    assert reasons(tolerant, node(spec={"taints": [taint], "unschedulable": True})) == ()


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        ({"terms": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}, True),
        ({"terms": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"terms": [{"key": "gpus", "operator": "Gt", "values": ["4"]}]}, True),
        ({"terms": [{"key": "none", "operator": "DoesNotExist"}]}, True),
    ],
)
def test_node_selector_and_required_affinity(spec: dict[str, Any], *, fits: bool) -> None:
    if "terms" in spec:
        required = {"nodeSelectorTerms": [{"matchExpressions": spec["terms"]}]}
        key = "requiredDuringSchedulingIgnoredDuringExecution"
        spec = {"affinity": {"nodeAffinity": {key: required}}}
    found = reasons(pod(**spec), node(labels={"zone": "a", "gpus": "8"}))
    assert found == (() if fits else ("node(s) didn't match Pod's node affinity/selector",))


def test_requests_take_the_larger_of_init_and_main_and_add_sidecars() -> None:
    one = {
        "spec": {
            "containers": [{"resources": {"requests": {"cpu": "1"}}}] * 2,
            "initContainers": [
                {"resources": {"requests": {"cpu": "500m"}}, "restartPolicy": "Always"},
                {"resources": {"requests": {"cpu": "4", "memory": "1Gi"}}},
            ],
            "overhead": {"cpu": "250m"},
        }
    }
    found = requests_of(one)
    assert str(found["cpu"]) == "4.750000000"
    assert found["memory"] == 2**30


def test_scores_prefer_the_emptier_node_and_preferred_labels() -> None:
    empty, full = node("empty"), node("full")
    full.add(pod("other", {"cpu": "3", "memory": "6Gi"}))
    asks = pod(requests={"cpu": "500m", "memory": "1Gi"})
    found = scores(asks, [empty, full])
    assert found["empty"] > found["full"]
    preferred = {
        "weight": 10,
        "preference": {"matchExpressions": [{"key": "full", "operator": "Exists"}]},
    }
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    wishes = pod(requests={"cpu": "1"}, affinity={"nodeAffinity": {key: [preferred]}})
    labelled = node("full", labels={"full": ""})
    assert scores(wishes, [empty, labelled])["full"] > scores(wishes, [empty, labelled])["empty"]


def test_explanation_groups_nodes_by_reason() -> None:
    refusals = {
        "a": NodeRefusal(("Insufficient cpu",)),
        "b": NodeRefusal(("Insufficient cpu", "Too many pods")),
        "c": NodeRefusal(("node(s) were unschedulable",), resolvable=False),
    }
    assert explain(refusals, 3, preempts=True) == (
        "0/3 nodes are available: 1 Too many pods, 1 node(s) were unschedulable, "
        "2 Insufficient cpu. preemption: 0/3 nodes are available: "
        "1 Preemption is not helpful for scheduling, "
        "2 No preemption victims found for incoming pod."
    )
    assert explain(refusals, 3, preempts=False).endswith(
        "preemption: not eligible due to preemptionPolicy=Never."
    )
