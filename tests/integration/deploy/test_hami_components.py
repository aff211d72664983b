# SPDX-License-Identifier: Apache-2.0
"""Overlays for users of HAMi: what the components of a migration and of its node label change.

``kubectl kustomize`` renders; the settings are loaded as the scheduler loads them, and the policy
is evaluated by the simulated API server's own CEL.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.runtime.settings import load
from hami_common.vendors.catalog import Catalog
from hami_scheduler.settings import Settings
from hami_sim.apiserver.cel import Program
from hami_sim.kubernetes.programs import KUBECTL
from hami_sim.kubescheduler.fit import NodeState, refusal
from hami_webhook.core.validate import validate_update
from hami_webhook.settings import Settings as WebhookSettings
from hamictl.nodeselection import selects
from tests.cluster.needs import control_plane_or_skip

KUSTOMIZE = Path(__file__).parents[3] / "deploy/kustomize"
COMPONENTS = ("hami-take-over", "hami-mirrors", "hami-mirrors-nodes")
POLICY = "allocation-annotations.hami.io"
CONTAINERS = {"containers": [{"name": "main"}]}
ROOM = {"allocatable": {"cpu": "64", "memory": "64Gi", "ephemeral-storage": "64Gi", "pods": "9"}}


def render(directory: Path, components: tuple[str, ...]) -> dict[tuple[str, str], dict[str, Any]]:
    """All objects of the base with these components, by kind and name."""
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUSTOMIZE / "base", directory)],
        "components": [
            os.path.relpath(KUSTOMIZE / "components" / name, directory) for name in components
        ],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    done = subprocess.run(
        [control_plane_or_skip().path(KUBECTL), "kustomize", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load_all(done.stdout)
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """All objects of an overlay for a migration."""
    return render(tmp_path_factory.mktemp("overlay"), COMPONENTS)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Pod specification of the NVIDIA agent that accepts HAMi's node label."""
    directory = tmp_path_factory.mktemp("node-label")
    found = render(directory, ("nvidia", "hami-node-label"))
    spec: dict[str, Any] = found["DaemonSet", "hami-nodeagent-nvidia"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize(
    ("labels", "is_registered"),
    [
        ({"gpu": "on"}, True),
        ({"hami.io/nvidia": "true"}, True),
        ({"gpu": "on", "hami.io/nvidia": "true"}, True),
        ({}, False),
        ({"gpu": "off"}, False),
        ({"nvidia.com/gpu.present": "true"}, False),
    ],
)
def test_agent_runs_on_nodes_with_the_label_of_hamis_chart(
    agent: dict[str, Any], labels: dict[str, str], *, is_registered: bool
) -> None:
    node = NodeState({"metadata": {"name": "n", "labels": labels}, "status": ROOM})
    assert (refusal({"spec": agent}, node, frozenset()) is None) is is_registered
    assert selects(agent, labels) is is_registered, "hamictl doctor agrees"


def test_scheduler_takes_over_and_mirrors(
    rendered: dict[tuple[str, str], dict[str, Any]],
) -> None:
    pod = rendered["Deployment", "hami-scheduler"]["spec"]["template"]["spec"]
    (scheduler,) = (one for one in pod["containers"] if one["name"] == "scheduler")
    environment = {one["name"]: one["value"] for one in scheduler["env"]}
    loaded = load(
        Settings,
        service="scheduler",
        argv=["--set", "signing_key_file=k"],
        environ=environment,
    ).settings
    assert (loaded.take_over, loaded.mirror_pods, loaded.mirror_nodes) == (True, True, True)
    plain = load(
        Settings, service="scheduler", argv=["--set", "signing_key_file=k"], environ={}
    ).settings
    assert (plain.take_over, plain.mirror_pods, plain.mirror_nodes) == (False, False, False)


def test_pods_of_volcano_are_taken_over_without_accounts_of_hami(tmp_path: Path) -> None:
    found = render(tmp_path, ("take-over",))
    pod = found["Deployment", "hami-scheduler"]["spec"]["template"]["spec"]
    (scheduler,) = (one for one in pod["containers"] if one["name"] == "scheduler")
    environment = {one["name"]: one["value"] for one in scheduler["env"]}
    assert environment["HAMI_SCHEDULER_TAKE_OVER"] == "true"
    rules = found["ClusterRole", "hami-scheduler"]["rules"]
    assert any("nodes" in rule["resources"] and "get" in rule["verbs"] for rule in rules)
    (condition,) = found["ValidatingAdmissionPolicy", POLICY]["spec"]["matchConditions"]
    assert "kube-system" not in condition["expression"]


def test_scheduler_may_read_the_nodes_whose_annotations_it_changes(
    rendered: dict[tuple[str, str], dict[str, Any]],
) -> None:
    rules = rendered["ClusterRole", "hami-scheduler"]["rules"]
    verbs = {verb for rule in rules if "nodes" in rule["resources"] for verb in rule["verbs"]}
    assert verbs >= {"get", "patch"}


@pytest.mark.parametrize(
    ("user", "is_asked"),
    [
        ("system:serviceaccount:hami-system:hami-scheduler", False),
        ("system:serviceaccount:kube-system:hami-scheduler", False),
        ("system:serviceaccount:kube-system:hami-device-plugin", False),
        ("system:serviceaccount:team-a:hami-scheduler", True),
        ("kubernetes-admin", True),
    ],
)
def test_only_hamis_own_accounts_write_its_annotations(
    rendered: dict[tuple[str, str], dict[str, Any]], user: str, *, is_asked: bool
) -> None:
    policy = rendered["ValidatingAdmissionPolicy", POLICY]
    (condition,) = policy["spec"]["matchConditions"]
    request: dict[str, Any] = {"request": {"userInfo": {"username": user}}}
    program = Program(condition["expression"], frozenset({"request"}))
    assert program.decide(request) is is_asked


def test_webhook_trusts_the_accounts_that_the_policy_does(
    rendered: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """Else HAMi's plugin could not note on its last pods that their devices are allocated."""
    pod = rendered["Deployment", "hami-webhook"]["spec"]["template"]["spec"]
    (webhook,) = pod["containers"]
    environment = {one["name"]: one["value"] for one in webhook["env"]}
    policy = load(WebhookSettings, service="webhook", environ=environment, argv=[]).settings.policy
    (condition,) = rendered["ValidatingAdmissionPolicy", POLICY]["spec"]["matchConditions"]
    program = Program(condition["expression"], frozenset({"request"}))
    assert len(policy.trusted_users) == 3
    for user in policy.trusted_users:
        assert not program.decide({"request": {"userInfo": {"username": user}}}), user
    old = {"metadata": {"annotations": {keys.HAMI_BIND_PHASE: "allocating"}}, "spec": CONTAINERS}
    new = {"metadata": {"annotations": {keys.HAMI_BIND_PHASE: "success"}}, "spec": CONTAINERS}
    for user, is_allowed in (
        ("system:serviceaccount:kube-system:hami-device-plugin", True),
        ("system:serviceaccount:team-a:hami-device-plugin", False),
    ):
        views = (msgspec.convert(one, PodView) for one in (old, new))
        verdict = validate_update(*views, user=user, policy=policy, catalog=Catalog.from_settings())
        assert verdict.allowed is is_allowed
