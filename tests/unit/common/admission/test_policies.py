# SPDX-License-Identifier: Apache-2.0
"""Requests that the API server refuses by itself: the shipped policies, evaluated as CEL.

``tests/attack/test_admission_policies.py`` tries them on a real API server.
"""

from functools import cache
from typing import Any

import pytest

from hami_common.admission import bounds
from hami_common.admission.configuration import bind_by
from hami_common.admission.mounts import mounts_of
from hami_common.admission.policies import (
    ENVIRONMENT_ALLOWED,
    ENVIRONMENT_LABEL,
    admission_policies,
)
from hami_common.dra.podclaims import POD_CLAIM, claim_name, request_name
from hami_common.pods import annotations as keys
from hami_common.pods.visibility import DEVICE_VARIABLES
from hami_common.vendors.catalog import Catalog
from hami_sim.apiserver.cel import Program
from hami_sim.apiserver.selectors import selector_from_object

DOCUMENTS = admission_policies(Catalog.from_settings())
POLICIES = {d["metadata"]["name"]: d["spec"] for d in DOCUMENTS if "validations" in d["spec"]}
BINDINGS = {d["metadata"]["name"]: d["spec"] for d in DOCUMENTS if "policyName" in d["spec"]}
NAMES = frozenset({"object", "oldObject", "request", "variables"})

Obj = dict[str, Any]


@cache
def program(text: str) -> Program:
    return Program(text, NAMES)


def refusals(
    pod: Obj, *, operation: str = "CREATE", old: Obj | None = None, kind: str = "Pod"
) -> set[str]:
    """Names of the policies that refuse the request."""
    found = set()
    for name, spec in POLICIES.items():
        env: Obj = {
            "object": pod,
            "oldObject": old,
            "request": {
                "operation": operation,
                "kind": {"kind": kind},
                "userInfo": {"username": "tess"},
            },
        }
        env["variables"] = {
            one["name"]: program(one["expression"])(env) for one in spec.get("variables", [])
        }

        def holds(rule: Obj, env: Obj = env) -> bool:
            return program(rule["expression"]).decide(env)

        if all(map(holds, spec.get("matchConditions", []))):
            found |= {name for rule in spec["validations"] if not holds(rule)}
    return {name.removesuffix(".hami.io") for name in found}


def share(name: str = "main", **more: Any) -> Obj:
    return {"name": name, "resources": {"limits": {"nvidia.com/gpu": "1"}}, **more}


def pod(*containers: Obj, labels: dict[str, str] | None = None, **spec: Any) -> Obj:
    spec = {"schedulerName": "hami-scheduler", "containers": list(containers), **spec}
    return {"metadata": {"name": "p", "labels": labels or {}}, "spec": spec}


def prepared(name: str = "main") -> Obj:
    """A pod as the webhook makes it."""
    path = f"metadata.annotations['{keys.limits(name)}']"
    item = {"path": "limits", "fieldRef": {"apiVersion": "v1", "fieldPath": path}}
    mounts = mounts_of(name)
    volumes = [
        {"name": mounts[0]["name"], "downwardAPI": {"items": [item]}},
        {"name": mounts[1]["name"], "emptyDir": {"medium": "Memory"}},
    ]
    return pod(share(name, volumeMounts=mounts), volumes=volumes)


@pytest.mark.parametrize("name", ["main", "c" * 63, "ends-with-dashes" + "-" * 40 + "x"])
def test_pod_prepared_by_the_webhook_is_admitted(name: str) -> None:
    assert refusals(prepared(name)) == set()


def claimed(name: str = "main", text: str = "{}", **more: Any) -> Obj:
    """A pod that gets its devices by a claim, as the webhook makes it."""
    use = {"name": POD_CLAIM, "request": request_name(name, "nvidia")}
    made = pod(
        {"name": name, "resources": {"claims": [use]}, **more},
        labels={keys.MANAGED_LABEL: "true"},
        resourceClaims=[{"name": POD_CLAIM, "resourceClaimName": claim_name("a")}],
    )
    made["metadata"]["annotations"] = {keys.CLAIMED_RESOURCES: text}
    return made


def test_pod_with_a_claim_is_limited_as_one_with_limits() -> None:
    assert refusals(claimed()) == set()
    assert refusals(claimed(volumeMounts=[{"name": "v", "mountPath": "/etc/hami"}])) == {"limiter"}
    assert refusals(claimed(volumeMounts=[{"name": "v", "mountPath": "/etc"}])) == {"limiter"}
    assert refusals(claimed(envFrom=[{"configMapRef": {"name": "c"}}])) == {"limiter"}
    crowd = claimed()
    crowd["spec"]["volumes"] = [{"name": f"v{i}"} for i in range(2000)]
    assert refusals(crowd) == {"pod-bounds"}
    ignored = claimed()
    ignored["spec"]["schedulerName"] = "theirs"
    ignored["metadata"]["labels"] = {keys.WEBHOOK_LABEL: keys.WEBHOOK_IGNORE}
    assert refusals(ignored) == {"webhook-opt-out"}


def test_volumes_that_would_hide_the_mounts_of_a_claim_are_refused() -> None:
    hiding = prepared()
    assert refusals(hiding) == set()
    hiding["metadata"]["annotations"] = {keys.CLAIMED_RESOURCES: "{}"}
    assert refusals(hiding) == {"limiter"}


def test_resources_of_a_claim_are_settled_at_creation() -> None:
    without, policy = claimed(), {"allocation-annotations"}
    del without["metadata"]["annotations"]
    other = claimed(text='{"main":{"nvidia.com/gpumem":"99999"}}')
    assert refusals(claimed(), operation="UPDATE", old=claimed()) == set()
    assert refusals(without, operation="UPDATE", old=without) == set()
    for before, after in ((claimed(), other), (claimed(), without), (without, claimed())):
        assert refusals(after, operation="UPDATE", old=before) == policy
    binding = {"metadata": {"name": "p", "annotations": {keys.CLAIMED_RESOURCES: "{}"}}}
    binding["spec"] = {"containers": []}
    assert refusals(binding, kind="Binding") == policy


def test_pods_without_devices_are_admitted() -> None:
    mounts = [{"name": "v", "mountPath": "/etc//hami"}]
    plain = {"name": "main", "volumeMounts": mounts}
    assert refusals(pod(plain, schedulerName="default-scheduler")) == set()
    assert refusals(pod(share(volumeMounts=mounts), schedulerName="volcano")) == set()


def test_label_is_refused_only_where_it_has_an_effect() -> None:
    ignore = {keys.WEBHOOK_LABEL: keys.WEBHOOK_IGNORE}
    other = "default-scheduler"
    assert refusals(pod(share(), labels=ignore)) == {"webhook-opt-out"}
    assert refusals(pod(share(), labels=ignore, schedulerName=other)) == {"webhook-opt-out"}
    assert refusals(pod({"name": "a"}, labels=ignore)) == {"webhook-opt-out"}
    assert refusals(pod({"name": "a"}, labels=ignore, schedulerName=other)) == set()
    assert refusals(pod(share(), labels={keys.WEBHOOK_LABEL: "yes"})) == set()


@pytest.mark.parametrize(
    ("resources", "is_refused"),
    [
        ({}, True),
        ({"limits": {"nvidia.com/gpu": "0"}}, True),
        ({"limits": {"nvidia.com/priority": "1"}}, True),
        ({"limits": {"amd.com/gpu": "1"}}, True),
        ({"requests": {"nvidia.com/gpu": "1"}}, True),
        ({"limits": {"nvidia.com/gpu": "1"}}, False),
    ],
)
def test_variable_needs_devices_of_its_own_vendor(resources: Obj, *, is_refused: bool) -> None:
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    told = refusals(pod({"name": "main", "resources": resources, "env": env}))
    assert ("device-environment" in told) is is_refused


def test_monitors_of_vendors_may_select_devices_by_variable() -> None:
    assert reaches("device-environment", "team-a")
    assert not reaches("device-environment", "kube-system")
    allowed = {ENVIRONMENT_LABEL: ENVIRONMENT_ALLOWED}
    assert not reaches("device-environment", "team-a", **allowed)


@pytest.mark.parametrize("variable", DEVICE_VARIABLES)
def test_variable_without_devices_is_admitted(variable: str) -> None:
    for value in ({}, {"value": ""}, {"value": "none"}, {"value": "void"}):
        assert refusals(pod({"name": "main", "env": [{"name": variable, **value}]})) == set()
    given = {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert refusals(pod({"name": "main", "env": [given]})) == {"device-environment"}


def test_device_list_mount_is_refused_for_every_pod() -> None:
    mount = {"name": "v", "mountPath": "/var//run/nvidia-container-devices/all"}
    told = refusals(pod({"name": "main", "volumeMounts": [mount]}, schedulerName="any"))
    assert told == {"device-environment"}


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({"downwardAPI": {"items": []}}, True),
        ({"configMap": {"name": "cm"}}, True),
        (
            {
                "downwardAPI": {
                    "items": [{"path": "limits", "fieldRef": {"fieldPath": "metadata.name"}}]
                }
            },
            True,
        ),
        (
            {
                "downwardAPI": {
                    "items": [
                        {
                            "path": "limits",
                            "fieldRef": {
                                "fieldPath": f"metadata.annotations['{keys.limits('other')}']"
                            },
                        }
                    ]
                }
            },
            True,
        ),
    ],
)
def test_volume_named_like_a_limiter_volume_counts_as_one(change: Obj, *, is_refused: bool) -> None:
    made = prepared()
    made["spec"]["volumes"][0] = {"name": "hami-limits-main", **change}
    assert ("limiter" in refusals(made)) is is_refused


@pytest.mark.parametrize("path", ["/run/x", "/data/", "/etc/hami-x", "/var/run/x", "/a..b/...c"])
def test_other_paths_pass(path: str) -> None:
    assert refusals(pod(share(volumeMounts=[{"name": "v", "mountPath": path}]))) == set()


@pytest.mark.parametrize("field", ["volumeMounts", "volumeDevices"])
@pytest.mark.parametrize(
    "path",
    ["/etc/hami", "/etc/./hami", "/etc", "etc/hami", "/var/run/hami", "/run", "/proc/1/root/etc"],
)
def test_path_over_the_limiter_is_refused(field: str, path: str) -> None:
    key = "mountPath" if field == "volumeMounts" else "devicePath"
    asking = share() | {field: [{"name": "v", key: path}]}
    assert refusals(pod(asking)) == {"limiter"}


def test_ephemeral_container_alone_is_judged_in_an_old_pod() -> None:
    """Objects created before these policies may stay."""
    bad = {"name": "v", "mountPath": "/etc//hami"}
    old = pod(share(volumeMounts=[bad]))
    plain = {"name": "debug", "targetContainerName": "main"}
    new = pod(share(volumeMounts=[bad]), ephemeralContainers=[plain])
    assert refusals(new, operation="UPDATE", old=old) == set()
    worse = pod(share(), ephemeralContainers=[{**plain, "volumeMounts": [bad]}])
    assert refusals(worse, operation="UPDATE", old=old) == {"limiter"}
    ours = pod(share(), ephemeralContainers=[{**plain, "volumeMounts": mounts_of("main")}])
    assert refusals(ours, operation="UPDATE", old=old) == set()


@pytest.mark.parametrize(
    ("source", "is_refused"),
    [({}, True), ({"prefix": "NVIDIA_"}, True), ({"prefix": "APP_"}, False)],
)
def test_env_from_is_refused_where_it_could_set_a_device_variable(
    source: Obj, *, is_refused: bool
) -> None:
    for one in (share(envFrom=[source]), {"name": "side", "envFrom": [source]}):
        assert ("limiter" in refusals(pod(share("first"), one))) is is_refused
    pinned = [{"name": name, "value": "void"} for name in DEVICE_VARIABLES]
    assert "limiter" not in refusals(pod(share(envFrom=[source], env=pinned)))


def test_size_of_a_pod_with_devices_is_bounded() -> None:
    assert refusals(pod(*(share(f"c{i}") for i in range(200)))) == set()
    assert refusals(pod(*(share(f"c{i}") for i in range(201)))) == {"pod-bounds"}
    crowd = pod(*({"name": f"c{i}"} for i in range(201)))
    assert refusals(crowd) == set()


def reaches(policy: str, namespace: str, **labels: str) -> bool:
    """True if the policy's binding selects the namespace."""
    selector = BINDINGS[f"{policy}.hami.io"]["matchResources"]["namespaceSelector"]
    selected = selector_from_object(selector)
    assert selected is not None
    return selected.matches({"kubernetes.io/metadata.name": namespace, **labels})


def test_policies_hold_where_the_webhook_does() -> None:
    exempt = {keys.WEBHOOK_LABEL: keys.WEBHOOK_IGNORE}
    for policy in ("webhook-opt-out", "pod-bounds", "limiter"):
        for namespace in ("team-a", "kube-system", "hami-system"):
            assert reaches(policy, namespace)
            assert not reaches(policy, namespace, **exempt)
    assert "matchResources" not in BINDINGS["allocation-annotations.hami.io"]
    assert all(spec["validationActions"] == ["Deny"] for spec in BINDINGS.values())


def test_pods_that_the_webhook_prepared_for_another_scheduler_obey_the_same_rules() -> None:
    over = share(volumeMounts=[{"name": "x", "mountPath": "/etc/hami"}])
    managed = {keys.MANAGED_LABEL: "true"}
    assert refusals(pod(over, labels=managed, schedulerName="volcano")) == {"limiter"}
    assert refusals(pod(over, schedulerName="volcano")) == set()
    many = [share(f"c{number}") for number in range(bounds.MOST_CONTAINERS + 1)]
    assert refusals(pod(*many, labels=managed, schedulerName="volcano")) == {"pod-bounds"}


BINDERS = "system:serviceaccount:volcano-system:volcano-scheduler,jane"


@pytest.mark.parametrize(
    ("user", "kind", "is_left_out"),
    [
        ("jane", "Binding", True),
        ("system:serviceaccount:volcano-system:volcano-scheduler", "Binding", True),
        ("jane", "Pod", False),
        ("jan", "Binding", False),
        ("", "Binding", False),
    ],
)
def test_only_bindings_of_binders_are_admitted_by_the_scheduler(
    user: str, kind: str, *, is_left_out: bool
) -> None:
    request = {"userInfo": {"username": user}, "kind": {"group": "", "kind": kind}}
    env = {"object": None, "oldObject": None, "request": request, "variables": {}}
    assert program(bind_by(BINDERS)).decide(env) is is_left_out
    (policy,) = (
        document["spec"]
        for document in admission_policies(Catalog.from_settings(), binders=BINDERS)
        if document["metadata"]["name"] == "allocation-annotations.hami.io"
        and "validations" in document["spec"]
    )
    *_, exception = policy["matchConditions"]
    assert program(exception["expression"]).decide(env) is not is_left_out
