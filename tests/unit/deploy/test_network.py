# SPDX-License-Identifier: Apache-2.0
"""Network policies, disruption budgets and priorities select the pods that they are for.

Policies are judged as a network judges them: a pod that any policy of its namespace selects for a
direction may talk in that direction only as the policies that select it say. A peer without a
selector of namespaces is of the policy's own.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.deploy.test_files import MANIFESTS

Obj = dict[str, Any]
OBJECTS = [document for _, document in MANIFESTS if "metadata" in document]
POLICIES = [one for one in OBJECTS if one["kind"] == "NetworkPolicy"]
NAME = "app.kubernetes.io/name"
NAMESPACE = "kubernetes.io/metadata.name"
API_PORTS = {443, 6443}
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def templates() -> Iterator[tuple[str, Obj]]:
    """Every pod template as written, by path."""
    for path, document in MANIFESTS:
        spec = document.get("spec") or {}
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template:
            # A template has no namespace of its own: its pods are where their owner is.
            yield f"{path}:{document['kind']}", template | {"in": document["metadata"]["namespace"]}


PODS = list(templates())
IDS = [where for where, _ in PODS]


def selects(selector: Obj, labels: dict[str, str]) -> bool:
    named = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return named and all(
        one["operator"] == "In" and labels.get(one["key"]) in one["values"]
        for one in selector.get("matchExpressions", ())
    )


def labels_of(template: Obj) -> dict[str, str]:
    found: dict[str, str] = template.get("metadata", {}).get("labels", {})
    return found


def rules(template: Obj, direction: str) -> list[Obj]:
    """Traffic that policies allow a pod in a direction (``ingress``, ``egress``)."""
    return [
        rule | {"in": template["in"]}
        for policy in POLICIES
        if policy["metadata"]["namespace"] == template["in"]
        and selects(policy["spec"]["podSelector"], labels_of(template))
        for rule in policy["spec"].get(direction, ())
    ]


def concerns(rule: Obj, side: str, peer: Obj) -> bool:
    """Report if a rule selects the pods of a template of this project."""
    if side not in rule:
        return True
    return any(
        selects(one.get("podSelector", {}), labels_of(peer))
        and (
            selects(one["namespaceSelector"], {NAMESPACE: peer["in"]})
            if "namespaceSelector" in one
            else rule["in"] == peer["in"]
        )
        for one in rule[side]
    )


def ports(rule: Obj) -> set[int]:
    return {port["port"] for port in rule.get("ports", ())}


def bus() -> Obj:
    (found,) = (template for where, template in PODS if "nats.yaml" in where)
    return found


@pytest.mark.parametrize(("where", "template"), PODS, ids=IDS)
def test_pod_with_an_account_reaches_the_api_server(where: str, template: Obj) -> None:
    found = rules(template, "egress")
    if any(rule.keys() == {"in"} for rule in found):
        return  # it may talk to anybody
    reaches = any(ports(rule) >= API_PORTS and "to" not in rule for rule in found)
    mounts = [mount for one in template["spec"]["containers"] for mount in one["volumeMounts"]]
    has_token = template["spec"].get("automountServiceAccountToken", True) or any(
        mount["mountPath"] == ACCOUNT for mount in mounts
    )
    assert reaches is has_token, where


@pytest.mark.parametrize(("where", "template"), PODS, ids=IDS)
def test_pod_with_a_login_to_the_bus_reaches_it_and_is_let_in(where: str, template: Obj) -> None:
    volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
    has_login = bool(volumes & {"bus", "bus-token"})
    out = any(
        4222 in ports(rule) and concerns(rule, "to", bus()) for rule in rules(template, "egress")
    )
    let_in = any(
        4222 in ports(rule) and concerns(rule, "from", template) for rule in rules(bus(), "ingress")
    )
    assert (out, let_in) == (has_login, has_login), where


def test_registry_reaches_the_scheduler_and_is_let_in() -> None:
    (scheduler,) = (one for _, one in PODS if labels_of(one).get(NAME) == "hami-scheduler")
    for where, template in PODS:
        is_registry = labels_of(template).get(NAME) == "hami-registry"
        out = any(
            9443 in ports(rule) and concerns(rule, "to", scheduler)
            for rule in rules(template, "egress")
        )
        let_in = any(
            9443 in ports(rule) and concerns(rule, "from", template)
            for rule in rules(scheduler, "ingress")
        )
        reaches_all = any(rule.keys() == {"in"} for rule in rules(template, "egress"))
        assert (out or reaches_all, let_in) == (is_registry or reaches_all, is_registry), where


def test_servers_of_the_bus_reach_each_other() -> None:
    for direction, side in (("ingress", "from"), ("egress", "to")):
        assert any(
            6222 in ports(rule) and concerns(rule, side, bus()) for rule in rules(bus(), direction)
        )


@pytest.mark.parametrize(("where", "template"), PODS, ids=IDS)
def test_scrapers_reach_every_port_with_metrics(where: str, template: Obj) -> None:
    served = {
        port["containerPort"]
        for container in template["spec"]["containers"]
        for port in container.get("ports", ())
        if port["name"] in ("http", "probes", "monitor")
    }
    scraped = {
        number
        for rule in rules(template, "ingress")
        if any(
            one.get("namespaceSelector") == {"matchLabels": {"hami.io/scraper": "true"}}
            for one in rule.get("from", ())
        )
        for number in ports(rule)
    }
    assert served <= scraped, where


def test_all_other_traffic_is_denied_to_every_pod() -> None:
    denied = [one for one in POLICIES if one["metadata"]["name"] == "hami-nothing-else"]
    whole = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert all(one["spec"] == whole for one in denied)
    assert {one["metadata"]["namespace"] for one in denied} == {one["in"] for _, one in PODS}


def test_agents_send_their_spans_to_the_collector_and_are_let_in() -> None:
    (collector,) = (one for where, one in PODS if "otel" in where)
    for where, template in PODS:
        if "nodeagent" in where:
            assert any(
                4318 in ports(rule) and concerns(rule, "to", collector)
                for rule in rules(template, "egress")
            )
            assert any(
                4318 in ports(rule) and concerns(rule, "from", template)
                for rule in rules(collector, "ingress")
            )


def test_every_critical_service_has_one_budget_that_allows_one_eviction() -> None:
    budgets = [one["spec"] for one in OBJECTS if one["kind"] == "PodDisruptionBudget"]
    assert all(budget["maxUnavailable"] == 1 for budget in budgets)
    for where, template in PODS:
        kind, name = where.rpartition(":")[2], labels_of(template).get(NAME)
        is_needed = kind in ("Deployment", "StatefulSet") and name != "hami-otel-collector"
        mine = [one for one in budgets if selects(one["selector"], labels_of(template))]
        assert len(mine) == int(is_needed), where


def test_critical_pods_have_priority_over_tenants() -> None:
    values = {
        one["metadata"]["name"]: one["value"] for one in OBJECTS if one["kind"] == "PriorityClass"
    }
    for where, template in PODS:
        kind = where.rpartition(":")[2]
        if kind in ("Deployment", "StatefulSet", "DaemonSet") and "otel" not in where:
            # Above a tenant's usual classes, below what Kubernetes keeps for itself.
            assert 500_000_000 < values[template["spec"]["priorityClassName"]] < 1_000_000_000
    assert values["hami-nodeagent"] > values["hami-control-plane"]
