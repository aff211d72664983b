# SPDX-License-Identifier: Apache-2.0
"""Capabilities of an attacker in one container of an installation, or in one of its images.

Facts about the objects that ``kubectl kustomize`` renders: both overlays, and the agents of all
vendors with every component that has pods. The API server's treatment of them is in
``tests/e2e/test_deploy.py``, and that of a node in ``tests/e2e/test_real_node.py``.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hami_sim.apiserver.cel import Program
from hami_webhook.core.mutate import AdmissionPolicy
from tests.support.kustomize import (
    containers_of,
    overlay,
    pinned_copy,
    pods_of,
    rendered,
    rendering,
)

Obj = dict[str, Any]
KUSTOMIZE = Path(__file__).parents[2] / "deploy" / "kustomize"
SERVICES = "hami-system"
AGENTS = "hami-agents"
LEVEL = "pod-security.kubernetes.io/enforce"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
DIVIDED_BY_CALLS = ("ascend", "cambricon", "enflame", "kunlunxin", "metax")
PRIVILEGED = {f"DaemonSet/hami-nodeagent-{vendor}" for vendor in DIVIDED_BY_CALLS}
"""Agents that divide devices through calls of a driver; docs/vendors.md has the reasons."""
CAPABILITIES = {
    # Regions and /proc of other users' containers.
    "agent": {"DAC_READ_SEARCH", "DAC_OVERRIDE", "SYS_PTRACE"},
    # Sockets in kubelet's directory and in the agent's.
    "plugin-proxy": {"DAC_OVERRIDE"},
}
VOLUMES = {"configMap", "secret", "emptyDir", "projected", "persistentVolumeClaim", "downwardAPI"}
"""Kinds of volumes that Pod Security's level restricted allows, of those that are in use."""
HOST = ("hostPID", "hostNetwork", "hostIPC")
PINNED = re.compile(r"[^@]+@sha256:[0-9a-f]{64}")


@pytest.fixture(scope="module")
def installations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Obj]]:
    """Objects by what is installed."""
    directory = tmp_path_factory.mktemp("deployment")
    copy = pinned_copy(directory)
    components = sorted(
        path.parent
        for path in (copy / "components").glob("*/kustomization.yaml")
        if path.parent.name not in ("cert-manager", "prometheus-operator", "verify-images")
    )
    # With these, NVIDIA's agent has more rights: tests/integration/deploy/test_vendor_agents.py.
    rights = ("nvidia-without-cdi", "nvidia-memory-cap", "nvidia-mps")
    others = ("nats-cluster", "region", *rights)  # a hub is no region of another one
    everything = [one for one in components if one.name not in others]
    everything.sort(key=lambda one: one.name == "hub")  # it extends nats
    names = [directory / f"{name}.yaml" for name in ("bind-admission", "hub")]
    for file in names:
        shutil.copy(copy / "components" / file.stem / "example.yaml", file)
    whole = overlay(directory / "all", copy / "base", everything, files=names)
    return {
        "dev": rendered(copy / "overlays" / "dev"),
        "prod": rendered(copy / "overlays" / "prod"),
        "all components": rendered(whole),
    }


@pytest.fixture(params=["dev", "prod", "all components"])
def objects(request: pytest.FixtureRequest, installations: dict[str, list[Obj]]) -> list[Obj]:
    return installations[request.param]


def containers(objects: list[Obj]) -> Iterator[tuple[str, Obj, Obj]]:
    """Every container: its pod's owner, the pod, itself."""
    for owner, _, pod in pods_of(objects):
        for container in containers_of(pod):
            yield owner, pod, container


def of_kind(objects: list[Obj], kind: str) -> list[Obj]:
    return [one for one in objects if one["kind"] == kind]


def test_every_container_has_the_runtimes_system_call_filter(objects: list[Obj]) -> None:
    for owner, pod, container in containers(objects):
        context = pod.get("securityContext", {}) | container["securityContext"]
        assert context.get("seccompProfile") == {"type": "RuntimeDefault"}, owner


def test_no_container_has_a_right_that_is_not_listed_with_its_reason(objects: list[Obj]) -> None:
    privileged = set()
    for owner, _, container in containers(objects):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, owner
        if context.get("privileged"):
            assert container["name"] == "agent"
            privileged.add(owner)
            continue
        assert context["allowPrivilegeEscalation"] is False, owner
        assert context["capabilities"]["drop"] == ["ALL"], owner
        added = set(context["capabilities"].get("add", ()))
        assert added <= CAPABILITIES.get(container["name"], set()), owner
    assert privileged == PRIVILEGED & {owner for owner, _, _ in pods_of(objects)}


def test_pods_beside_the_services_are_held_to_a_level_of_pod_security(objects: list[Obj]) -> None:
    levels = {
        one["metadata"]["name"]: one["metadata"].get("labels", {}).get(LEVEL)
        for one in of_kind(objects, "Namespace")
    }
    assert levels.pop("hami-default", "baseline") == "baseline"  # of the component default-tenant
    assert levels == {SERVICES: "restricted", AGENTS: "privileged"}
    for owner, namespace, pod in pods_of(objects):
        if namespace != SERVICES:
            assert (namespace, owner.partition("/")[0]) == (AGENTS, "DaemonSet")
            continue
        assert pod["securityContext"]["runAsNonRoot"] is True, owner
        assert not [word for word in HOST if pod.get(word)], owner
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        assert kinds <= VOLUMES, owner


def test_agents_hold_no_secret_and_no_key(objects: list[Obj]) -> None:
    for owner, namespace, pod in pods_of(objects):
        if namespace == AGENTS:
            assert not [one for one in pod["volumes"] if "secret" in one], owner


def test_token_of_each_container_of_the_schedulers_pod_is_its_own(objects: list[Obj]) -> None:
    (pod,) = (pod for owner, _, pod in pods_of(objects) if owner == "Deployment/hami-scheduler")
    assert pod.get("automountServiceAccountToken", True) is False
    assert not pod.get("shareProcessNamespace")
    tokens = {
        container["name"]: mount["name"]
        for container in pod["containers"]
        for mount in container["volumeMounts"]
        if mount["mountPath"] == ACCOUNT
    }
    assert tokens.keys() == {"scheduler", "kube-scheduler"}
    for container in pod["containers"]:
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted & set(tokens.values()) == {tokens[container["name"]]}


def test_no_account_has_the_rights_of_kube_scheduler_and_of_the_extender(
    objects: list[Obj],
) -> None:
    roles_by_account: dict[str, set[str]] = {}
    for one in (*of_kind(objects, "ClusterRoleBinding"), *of_kind(objects, "RoleBinding")):
        for subject in one["subjects"]:
            roles_by_account.setdefault(subject["name"], set()).add(one["roleRef"]["name"])
    own = roles_by_account["hami-scheduler"]
    assert (
        "hami-scheduler"
        in own
        <= {
            "hami-scheduler",
            "hami-scheduler-defrag",
            "hami-scheduler-dra",
            "hami-scheduler-idle",
            "hami-scheduler-kueue",
            "hami-scheduler-provisioning",
        }
    )
    assert "system:kube-scheduler" in roles_by_account["hami-kube-scheduler"]
    ours = [
        one
        for one in (*of_kind(objects, "ClusterRole"), *of_kind(objects, "Role"))
        if one["metadata"]["name"] in own
    ]
    assert len(ours) >= len(own)
    verbs = {
        verb
        for one in ours
        for rule in one["rules"]
        for verb in rule["verbs"]
        if "pods" in rule["resources"]
    }
    assert not verbs & {"delete", "create", "update", "*"}


def test_production_runs_no_image_by_its_tag(installations: dict[str, list[Obj]]) -> None:
    images = {container["image"] for _, _, container in containers(installations["prod"])}
    assert len(images) >= 7
    assert [image for image in sorted(images) if not PINNED.fullmatch(image)] == []


def test_production_is_not_rendered_before_its_images_have_digests() -> None:
    done = rendering(KUSTOMIZE / "overlays" / "prod")
    assert done.returncode != 0
    assert "run dev pin-images first" in done.stderr
    assert done.stdout == ""


def test_webhook_trusts_no_user_whom_the_policy_refuses(
    installations: dict[str, list[Obj]],
) -> None:
    (policy,) = (
        one
        for one in of_kind(installations["dev"], "ValidatingAdmissionPolicy")
        if one["metadata"]["name"] == "allocation-annotations.hami.io"
    )
    (condition,) = policy["spec"]["matchConditions"]
    program = Program(condition["expression"], frozenset({"request"}))
    for user in AdmissionPolicy().trusted_users:
        is_judged = program.decide({"request": {"userInfo": {"username": user}}})
        assert is_judged is False, user


@pytest.mark.parametrize(
    ("resources", "is_allowed"),
    [
        ({"limits": {"hami.io/agent-devices": "1"}}, False),
        ({"requests": {"hami.io/agent-devices": "1"}}, False),
        ({"limits": {"hami.io/agent-devices": "0"}}, False),
        ({"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "1"}}, True),
        (None, True),
    ],
)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_pod_of_a_tenant_is_not_given_the_devices_of_the_agents(
    installations: dict[str, list[Obj]], kind: str, resources: Obj | None, *, is_allowed: bool
) -> None:
    (policy,) = (
        one
        for one in of_kind(installations["all components"], "ValidatingAdmissionPolicy")
        if one["metadata"]["name"] == "agent-devices.hami.io"
    )
    (binding,) = (
        one
        for one in of_kind(installations["all components"], "ValidatingAdmissionPolicyBinding")
        if one["metadata"]["name"] == "agent-devices.hami.io"
    )
    (exempt,) = binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert (exempt["operator"], exempt["values"]) == ("NotIn", [AGENTS])
    container: Obj = {"name": "c"} | ({} if resources is None else {"resources": resources})
    spec: dict[str, list[Obj]] = {"containers": [{"name": "main"}]}
    spec[kind] = [*spec.get(kind, []), container]
    object_ = {"object": {"spec": spec}}
    (variable,) = policy["spec"]["variables"]
    found = Program(variable["expression"], frozenset({"object"}))(object_)
    (rule,) = policy["spec"]["validations"]
    program = Program(rule["expression"], frozenset({"object", "variables"}))
    assert program.decide(object_ | {"variables": {"containers": found}}) is is_allowed
