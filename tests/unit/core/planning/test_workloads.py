# SPDX-License-Identifier: Apache-2.0
"""Demand of Kueue's Workloads, and the texts of the answers."""

import json
from typing import Any

import msgspec
import pytest

from hami_common.errors import RequestInvalid
from hami_common.events.allocation import Account
from hami_common.pods.signing import Verifier
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.podfacts import PodReader
from hami_core.planning.demands import (
    Demand,
    Verdict,
    demands_of,
    empty_table,
    held,
    impossible,
    never_fits,
    nodes_for,
    refused,
)
from hami_core.planning.gangs import SIZE_MOST
from hami_core.planning.workloads import Flavor, Readiness, Workload, pod_set_updates, pod_sets_of
from hami_core.table.table import DeviceTable
from tests.support.builders import device, node_devices
from tests.support.searches import result_of

Obj = dict[str, Any]
READER = PodReader(catalog=Catalog.from_settings(), verifier=Verifier.from_pems([]))


def template(limits: Obj, **spec: Any) -> Obj:
    container = {"name": "main", "image": "x", "resources": {"limits": limits}}
    return {"metadata": {"creationTimestamp": None}, "spec": {"containers": [container], **spec}}


def workload(*pod_sets: Obj, conditions: Obj | None = None, **status: Any) -> Workload:
    listed = [{"type": key, "status": value} for key, value in (conditions or {}).items()]
    document = {
        "metadata": {"name": "w", "namespace": "ns", "uid": "u"},
        "spec": {"podSets": list(pod_sets)},
        "status": {"conditions": listed, **status},
    }
    return msgspec.json.decode(json.dumps(document), type=Workload)


def pod_set(count: int, limits: Obj, name: str = "main", **spec: Any) -> Obj:
    return {"name": name, "count": count, "template": template(limits, **spec)}


def demands(
    *pod_sets: Obj, flavors: dict[str, Flavor] | None = None, **status: Any
) -> list[Demand]:
    made = workload(*pod_sets, **status)
    return demands_of(made.metadata, pod_sets_of(made, flavors or {}), reader=READER)


SHARE = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}


def test_demand_has_the_defaults_that_admission_adds() -> None:
    whole, share, percent = demands(
        pod_set(1, {"nvidia.com/gpu": "2"}, "whole"),
        pod_set(2, {"nvidia.com/gpumem": "3000"}, "share"),
        pod_set(3, {"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "25"}, "percent"),
    )
    (asked,) = whole.request.containers[0].requests
    assert (asked.count, asked.memory_pct, asked.core_pct) == (2, 100, 100)
    (asked,) = share.request.containers[0].requests
    assert (asked.count, asked.memory_mib) == (1, 3000)
    (asked,) = percent.request.containers[0].requests
    assert asked.memory_pct == 25
    members = list(percent.members("u", frozenset({"n"})))
    assert [one.request.uid for one in members] == ["u-2-0", "u-2-1", "u-2-2"]
    assert {(one.request.namespace, one.request.name) for one in members} == {("ns", "w")}


def test_pod_sets_without_devices_or_pods_have_no_demand() -> None:
    found = demands(pod_set(1, {"cpu": "1"}, "cpu"), pod_set(0, SHARE, "none"), pod_set(1, SHARE))
    assert [(one.pod_set, one.index) for one in found] == [("main", 2)]
    assert pod_set_updates(found, "u") == [{"name": "main", "annotations": {"hami.io/hold": "u"}}]


def test_partial_admission_counts_the_admitted_pods() -> None:
    admission = {"podSetAssignments": [{"name": "main", "count": 2}]}
    (found,) = demands(pod_set(5, SHARE), admission=admission)
    assert found.count == 2


V1BETA1 = {
    "levels": ["rack", "host"],
    "domains": [
        {"values": ["r1", "node-a.x"], "count": 2},
        {"values": ["r1", "node-b.x"], "count": 1},
        {"values": ["r2", "c"], "count": 3},
    ],
}
V1BETA2 = {
    "levels": ["rack", "host"],
    "slices": [
        {
            "domainCount": 2,
            "valuesPerLevel": [
                {"universal": "r1"},
                {"individual": {"prefix": "node-", "suffix": ".x", "roots": ["a", "b"]}},
            ],
            "podCounts": {"individual": [2, 1]},
        },
        {
            "domainCount": 1,
            "valuesPerLevel": [{"universal": "r2"}, {"individual": {"roots": ["c"]}}],
            "podCounts": {"universal": 3},
        },
    ],
}


@pytest.mark.parametrize("assignment", [V1BETA1, V1BETA2])
def test_pods_of_each_domain_are_a_set_of_their_own(assignment: Obj) -> None:
    assigned = {"name": "main", "count": 6, "topologyAssignment": assignment}
    found = demands(
        pod_set(6, SHARE, nodeSelector={"pool": "x"}), admission={"podSetAssignments": [assigned]}
    )
    assert [(one.label, one.count, one.pod["spec"]["nodeSelector"]) for one in found] == [
        ("main in r1/node-a.x", 2, {"pool": "x", "rack": "r1", "host": "node-a.x"}),
        ("main in r1/node-b.x", 1, {"pool": "x", "rack": "r1", "host": "node-b.x"}),
        ("main in r2/c", 3, {"pool": "x", "rack": "r2", "host": "c"}),
    ]
    uids = [m.request.uid for one in found for m in one.members("u", frozenset())]
    assert len(set(uids)) == 6
    assert pod_set_updates(found, "u") == [{"name": "main", "annotations": {"hami.io/hold": "u"}}]
    assert held(found).message == "devices of 6 pods are held"


def test_account_is_that_of_the_pods() -> None:
    made = pod_set(1, SHARE, priorityClassName="high")
    made["template"]["metadata"]["labels"] = {"hami.io/queue": "team"}
    (found,) = demands(made)
    # Kubernetes calls a pod without CPU and memory BestEffort, once it exists.
    assert found.account is not None
    assert found.account.queue == "team"
    assert found.account.priority_class == "high"
    assert found.account.is_best_effort
    (found,) = demands(pod_set(1, {**SHARE, "cpu": "1"}))
    assert not (found.account or Account()).is_best_effort


def test_nodes_obey_flavor_selector_and_taints() -> None:
    table = DeviceTable()
    for name in ("a", "b", "c", "d"):
        table.upsert_node(node_devices(name, [device(f"{name}-0")]))
    nodes: dict[str, Obj] = {
        "a": {"metadata": {"name": "a", "labels": {"pool": "x"}}, "spec": {}},
        "b": {"metadata": {"name": "b", "labels": {"pool": "y"}}, "spec": {}},
        "c": {
            "metadata": {"name": "c", "labels": {"pool": "x"}},
            "spec": {"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]},
        },
        "no-devices": {"metadata": {"name": "no-devices", "labels": {"pool": "x"}}, "spec": {}},
    }
    spec: Obj = {"nodeLabels": {"pool": "x"}}
    admission = {"podSetAssignments": [{"name": "main", "flavors": {"nvidia.com/gpu": "f"}}]}
    flavors = {"f": msgspec.convert({"spec": spec}, Flavor)}
    (found,) = demands(pod_set(1, SHARE), flavors=flavors, admission=admission)
    assert nodes_for(found, table, nodes) == {"a"}
    spec["tolerations"] = [{"key": "k", "operator": "Exists"}]
    flavors = {"f": msgspec.convert({"spec": spec}, Flavor)}
    (found,) = demands(pod_set(1, SHARE), flavors=flavors, admission=admission)
    assert nodes_for(found, table, nodes) == {"a", "c"}
    (found,) = demands(pod_set(1, SHARE, nodeSelector={"pool": "y"}))
    assert nodes_for(found, table, nodes) == {"b"}


def test_invalid_request_names_pod_set_field_and_fix() -> None:
    bad = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3Gi"}
    with pytest.raises(RequestInvalid) as raised:
        demands(pod_set(1, SHARE), pod_set(1, bad, "second"))
    assert raised.value.field.startswith("pod set second: container main: resources.limits")
    assert "3072" in raised.value.fix
    with pytest.raises(RequestInvalid, match=r"spec\.podSets: 10001 pods request devices"):
        demands(pod_set(SIZE_MOST + 1, SHARE))


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, False),
        ({"QuotaReserved": "True"}, True),
        ({"QuotaReserved": "False"}, False),
        ({"QuotaReserved": "True", "Evicted": "True"}, False),
        ({"QuotaReserved": "True", "Evicted": "False", "Admitted": "True"}, True),
        ({"QuotaReserved": "True", "Finished": "True"}, False),
    ],
)
def test_quota_counts_as_reserved(conditions: Obj, *, expected: bool) -> None:
    assert workload(pod_set(1, SHARE), conditions=conditions).is_reserved() is expected


def test_texts_of_the_answers() -> None:
    found = demands(pod_set(3, SHARE), pod_set(1, SHARE, "large"))
    assert held(found) == Verdict(state="Ready", message="devices of 4 pods are held")
    assert held(found[1:]).message == "devices of 1 pod are held"
    assert held([]).state == "Ready"
    assert refused(found, {"large": "too large (2 nodes)"}, {"main": 2}) == Verdict(
        state="Retry",
        message="no room for 4 pods at once: pod set large: too large (2 nodes);"
        " pod set main: 2 of 3 would fit now",
    )
    verdict = impossible(found, "main", 7)
    assert verdict.state == "Rejected"
    assert "pod set main: 3 pods would not fit on the devices of all 7 nodes" in verdict.message


def test_empty_table_ignores_health_and_cordons_and_bookings() -> None:
    devices = node_devices(
        "a", [device("a-0", healthy=False, memory_mib=4000), device("a-1", index=1, cordoned=True)]
    )
    table = empty_table([devices])
    (small,) = demands(pod_set(2, SHARE))
    assert result_of(never_fits(table, "u", [small])) == ""
    (large,) = demands(pod_set(1, {"nvidia.com/gpu": "3", "nvidia.com/gpumem": "1"}, "large"))
    assert result_of(never_fits(table, "u", [small, large])) == "large"
    assert result_of(never_fits(DeviceTable(), "u", [large])) == ""


def test_check_becomes_inactive_only_after_its_patience() -> None:
    readiness = Readiness(patience_s=60.0)
    assert readiness.judge(is_ready=False, now_s=0.0) is None
    assert readiness.judge(is_ready=True, now_s=1.0) is True
    for now_s in (2.0, 30.0, 61.0):  # counts from 2
        assert readiness.judge(is_ready=False, now_s=now_s) is True
    assert readiness.judge(is_ready=True, now_s=61.5) is True
    assert readiness.judge(is_ready=False, now_s=62.0) is True
    assert readiness.judge(is_ready=False, now_s=122.0) is False
    assert readiness.judge(is_ready=True, now_s=123.0) is True
