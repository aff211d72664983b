# SPDX-License-Identifier: Apache-2.0
"""Templates for autoscalers from the document of a node, and the errors."""

from typing import Any

import click
import pytest

from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import ResourceNames
from hamictl import nodetemplates

OFFERED = {
    "cpu": "8",
    "nvidia.com/gpu": "20",
    "nvidia.com/gpumem": "80k",
    "nvidia.com/gpucores": "200",
    "nvidia.com/gpumem-percentage": "2000",
    "nvidia.com/priority": "140",
}


def families() -> list[ResourceNames]:
    return [names for vendor in Catalog.from_settings().vendors for names in vendor.families]


def document(
    offered: dict[str, str], labels: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    status = {"capacity": {"cpu": "8", "memory": "64Gi"}, "allocatable": offered}
    return {"metadata": {"name": "n1", "labels": labels or {}}, "spec": spec, "status": status}


def pool_node(*given: Any, **more: Any) -> nodetemplates.PoolNode:
    return nodetemplates.pool_node(document(*given, **more), families())


def test_node_with_all_amounts_lacks_nothing() -> None:
    node = pool_node(OFFERED)
    assert node.missing == ()
    assert node.counts == {"nvidia.com/gpu": "20"}
    assert node.resources == {
        **{name: text for name, text in OFFERED.items() if name != "cpu"},
        "nvidia.com/gpumem": "80000",
    }


def test_amounts_of_zero_are_missing() -> None:
    node = pool_node({**OFFERED, "nvidia.com/gpumem": "0"})
    assert node.missing == ("nvidia.com/gpumem",)


def test_tags_have_resources_labels_and_taints_but_not_those_of_the_nodes_condition() -> None:
    taints = [
        {"key": "gpu", "effect": "NoSchedule"},
        {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"},
    ]
    node = pool_node(OFFERED, {"pool": "a"}, taints=taints)
    labels = nodetemplates.chosen_labels(node, ["pool"])
    tags = nodetemplates.asg_tags(node, group="asg", labels=labels)
    assert {tag["ResourceId"] for tag in tags} == {"asg"}
    prefix = "k8s.io/cluster-autoscaler/node-template/"
    values = {tag["Key"].removeprefix(prefix): tag["Value"] for tag in tags}
    assert values["resources/nvidia.com/gpumem"] == "80000"
    assert values["label/pool"] == "a"
    assert [values[key] for key in values if key.startswith("taint/")] == [":NoSchedule"]


def test_equal_quantities_in_other_words_are_no_difference() -> None:
    node = pool_node(OFFERED)
    offered = {**OFFERED, "nvidia.com/gpumem": "0.08M"}
    template = {"kind": "Node", "status": {"allocatable": offered}}
    assert nodetemplates.differences(node, template) == []
    del offered["nvidia.com/gpucores"]
    (one,) = nodetemplates.differences(node, template)
    assert (one.resource, one.found, one.wanted) == ("nvidia.com/gpucores", "", "200")


def test_scheduler_config_ignores_what_the_node_does_not_offer() -> None:
    def ignored(node: nodetemplates.PoolNode, *, counts_only: bool) -> list[str]:
        made = nodetemplates.scheduler_config(node, counts_only=counts_only)
        (profile,) = made["profiles"]
        found: list[str] = profile["pluginConfig"][0]["args"]["ignoredResources"]
        return found

    assert ignored(pool_node(OFFERED), counts_only=False) == []
    few = pool_node({"nvidia.com/gpu": "20", "nvidia.com/gpumem": "80000"})
    assert "nvidia.com/gpucores" in ignored(few, counts_only=False)
    assert "nvidia.com/gpumem" not in ignored(few, counts_only=False)
    assert "nvidia.com/gpumem" in ignored(few, counts_only=True)


def test_mistakes_are_named() -> None:
    node = pool_node(OFFERED, {f"l{number}": "x" for number in range(60)})
    with pytest.raises(click.ClickException, match="offers no shares of devices"):
        pool_node({"cpu": "8"})
    with pytest.raises(click.ClickException, match="--label pool: node n1 has no such label"):
        nodetemplates.chosen_labels(node, ["pool"])
    with pytest.raises(click.ClickException, match="65 tags, a group has at most 50"):
        nodetemplates.asg_tags(node, group="g", labels=node.labels)
    with pytest.raises(click.ClickException, match=r"no label node.kubernetes.io/instance-type"):
        nodetemplates.node_overlay(node, name="x")
    with pytest.raises(click.ClickException, match="neither a Node nor has it Tags"):
        nodetemplates.differences(node, {"kind": "Pod"})
