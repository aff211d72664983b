# SPDX-License-Identifier: Apache-2.0
"""The constraints of the component openshift admit the pods of the overlay, and no more.

OpenShift does not run here. Fields and strategies are those of ``security.openshift.io/v1``
SecurityContextConstraints (OpenShift 4.12 and newer); the built-in ``nonroot-v2`` is judged by its
published definition: any user but root, no host access, drop ALL.
"""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hamictl.uninstalling import Program, removal_pod
from tests.support.kustomize import containers_of, overlay, pods_of, rendered

ROOT = Path(__file__).parents[3]
KUSTOMIZE = ROOT / "deploy/kustomize"
STRATEGY = {
    "type": "object",
    "additionalProperties": False,
    "required": ["type"],
    "properties": {"type": {"enum": ["RunAsAny", "MustRunAs"]}},
}
USER = {
    **STRATEGY,
    "properties": {
        "type": {"enum": ["RunAsAny", "MustRunAs", "MustRunAsRange", "MustRunAsNonRoot"]}
    },
}
NAMES = {"type": "array", "items": {"type": "string"}}
FLAGS = (
    "allowHostDirVolumePlugin",
    "allowHostIPC",
    "allowHostNetwork",
    "allowHostPID",
    "allowHostPorts",
    "allowPrivilegeEscalation",
    "allowPrivilegedContainer",
    "readOnlyRootFilesystem",
)
SCC = {
    "type": "object",
    "additionalProperties": False,
    "required": [
        *FLAGS,
        *("runAsUser", "seLinuxContext", "fsGroup", "supplementalGroups", "volumes"),
        *("allowedCapabilities", "defaultAddCapabilities", "requiredDropCapabilities"),
    ],
    "properties": {
        **{flag: {"type": "boolean"} for flag in FLAGS},
        "apiVersion": {"const": "security.openshift.io/v1"},
        "kind": {"const": "SecurityContextConstraints"},
        "metadata": {"type": "object"},
        "runAsUser": USER,
        **dict.fromkeys(("seLinuxContext", "fsGroup", "supplementalGroups"), STRATEGY),
        **dict.fromkeys(
            (
                *("allowedCapabilities", "defaultAddCapabilities", "requiredDropCapabilities"),
                *("seccompProfiles", "volumes", "users", "groups"),
            ),
            NAMES,
        ),
    },
}

Obj = dict[str, Any]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Obj]:
    components = [KUSTOMIZE / "components" / name for name in ("hygon", "openshift")]
    directory = tmp_path_factory.mktemp("openshift") / "mine"
    return rendered(overlay(directory, KUSTOMIZE / "overlays/dev", components))


@pytest.fixture(scope="module")
def scc(objects: list[Obj]) -> Obj:
    (found,) = (one for one in objects if one["kind"] == "SecurityContextConstraints")
    return found


def test_constraints_have_the_fields_of_their_kind(scc: Obj) -> None:
    jsonschema.validate(scc, SCC)
    assert scc["users"] == scc["groups"] == [], "access is granted by the role"


def volume_kinds(pod: Obj) -> set[str]:
    return {kind for volume in pod.get("volumes", ()) for kind in volume if kind != "name"}


def needs(pod: Obj) -> Obj:
    """A pod's requests of the constraints."""
    containers = [one.get("securityContext", {}) for one in containers_of(pod)]
    return {
        "capabilities": {
            name for one in containers for name in one.get("capabilities", {}).get("add", ())
        },
        "volumes": volume_kinds(pod),
        "hostPID": pod.get("hostPID", False),
        "privileged": any(one.get("privileged", False) for one in containers),
        "escalates": any(one.get("allowPrivilegeEscalation", True) for one in containers),
        "writes": not all(one.get("readOnlyRootFilesystem", False) for one in containers),
        "network": pod.get("hostNetwork", False) or pod.get("hostIPC", False),
    }


def agents(objects: list[Obj]) -> list[Obj]:
    found = [pod for _, namespace, pod in pods_of(objects) if namespace == "hami-agents"]
    program = Program(vendor="nvidia", image="x", nodes=("n",), config_map="c")
    return [*found, removal_pod(program, "n", name="r", limit_s=60)["spec"]]


def test_every_pod_of_the_agents_is_admitted_and_nothing_is_granted_in_vain(
    objects: list[Obj], scc: Obj
) -> None:
    asked = [needs(pod) for pod in agents(objects)]
    assert len(asked) >= 3
    assert set().union(*(one["capabilities"] for one in asked)) == set(scc["allowedCapabilities"])
    assert set().union(*(one["volumes"] for one in asked)) <= set(scc["volumes"])
    assert any(one["hostPID"] for one in asked)
    for flag in ("privileged", "escalates", "writes", "network"):
        assert not any(one[flag] for one in asked), flag


def test_agents_have_a_selinux_type_that_may_write_to_the_host(objects: list[Obj]) -> None:
    for owner, namespace, pod in pods_of(objects):
        if namespace == "hami-agents":
            assert pod["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}, owner


def test_services_fit_the_built_in_constraints_for_any_user_but_root(objects: list[Obj]) -> None:
    for owner, namespace, pod in pods_of(objects):
        if namespace != "hami-system":
            continue
        assert pod["securityContext"]["runAsNonRoot"], owner
        assert "hostPath" not in volume_kinds(pod), owner
        for container in containers_of(pod):
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}, owner
            assert context["allowPrivilegeEscalation"] is False, owner


def test_only_accounts_of_the_two_namespaces_may_use_constraints(objects: list[Obj]) -> None:
    found = {
        one["metadata"]["namespace"]: (one["roleRef"]["name"], one["subjects"])
        for one in objects
        if one["kind"] == "RoleBinding" and one["metadata"]["name"] == "hami-scc"
    }
    group = {"kind": "Group", "apiGroup": "rbac.authorization.k8s.io"}
    assert found == {
        "hami-agents": (
            "hami-scc",
            [{**group, "name": "system:serviceaccounts:hami-agents"}],
        ),
        "hami-system": (
            "system:openshift:scc:nonroot-v2",
            [{**group, "name": "system:serviceaccounts:hami-system"}],
        ),
    }
