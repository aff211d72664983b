# SPDX-License-Identifier: Apache-2.0
"""The shipped manifests say what our services and kube-scheduler need, and no more."""

from pathlib import Path

import pytest

from hami_sim.kubernetes import configuration
from hami_sim.kubescheduler.settings import DEFAULT_PROFILE, HAMI_PROFILE, OUR_RESOURCES, load

READS = {"get", "list", "watch"}


def test_every_resource_of_ours_is_the_extenders_to_count() -> None:
    settings = load(configuration.shipped_directory() / "kube-scheduler.yaml")
    (extender,) = settings.extenders
    assert tuple(sorted(resource.name for resource in extender.managed)) == OUR_RESOURCES
    assert all(resource.ignored_by_scheduler for resource in extender.managed)
    assert settings.profiles == (HAMI_PROFILE,), "others' pods are the cluster's own to place"


def test_component_dra_ignores_the_same_resources_and_manages_none() -> None:
    settings = load(configuration.shipped_directory() / configuration.DRA / "kube-scheduler.yaml")
    (extender,) = settings.extenders
    assert extender.managed == ()
    assert settings.ignored_resources >= set(OUR_RESOURCES)
    document = configuration.scheduler_configuration(
        Path("k"), extender_url="http://127.0.0.1:1", dra=True
    )
    assert "managedResources" not in document["extenders"][0]
    kinds = {one["kind"] for one in configuration.dra_objects()}
    assert {"ClusterRole", "ClusterRoleBinding", "DeviceClass"} <= kinds
    assert not any("Policy" in kind for kind in kinds)


def test_an_extender_sees_every_node_and_waiting_pods_are_soon_tried_again() -> None:
    (document,) = configuration.shipped("kube-scheduler.yaml")
    assert document["percentageOfNodesToScore"] == 100
    assert document["podMaxBackoffSeconds"] == 2
    assert document["extenders"][0]["nodeCacheCapable"] is True


@pytest.mark.parametrize(("asked_s", "initial"), [(0.05, 1), (1.0, 1), (2.5, 3)])
def test_backoff_is_in_whole_seconds(asked_s: float, initial: int) -> None:
    document = configuration.scheduler_configuration(
        Path("k"), extender_url="http://127.0.0.1:1", backoff_s=asked_s
    )
    assert document["podInitialBackoffSeconds"] == initial
    assert document["podMaxBackoffSeconds"] >= initial
    assert document["extenders"][0]["urlPrefix"] == "http://127.0.0.1:1"
    names = [profile["schedulerName"] for profile in document["profiles"]]
    assert names == [HAMI_PROFILE, DEFAULT_PROFILE], "there is no other kube-scheduler here"


def test_roles_name_what_they_allow() -> None:
    rules = [
        rule
        for document in configuration.shipped("rbac.yaml")
        for rule in document.get("rules", ())
    ]
    assert rules
    for rule in rules:
        words = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert not any("*" in word for word in words)
        assert "secrets" not in rule["resources"]


@pytest.mark.parametrize(
    ("account", "writes"),
    [
        # Nothing is deleted: kube-scheduler, whose role can, has an account of its own.
        (
            "hami-scheduler",
            {
                "pods": {"patch"},
                "pods/binding": {"create"},
                "pods/status": {"patch"},
                "pods/eviction": {"create"},
                "nodes": {"patch"},
                "events": {"create", "patch"},
                "tokenreviews": {"create"},
                "subjectaccessreviews": {"create"},
            },
        ),
        # Asking who calls, and what he may see, is a write only in name.
        ("hami-registry", {"tokenreviews": {"create"}, "subjectaccessreviews": {"create"}}),
        ("hami-nodeagent", {"events": {"create", "patch"}}),
    ],
)
def test_a_service_writes_only_this(account: str, writes: dict[str, set[str]]) -> None:
    roles = {
        document["metadata"]["name"]: document
        for document in configuration.shipped("rbac.yaml")
        if document["kind"] == "ClusterRole"
    }
    found = {
        resource: set(rule["verbs"]) - READS
        for rule in roles[account]["rules"]
        for resource in rule["resources"]
        if set(rule["verbs"]) - READS
    }
    assert found == writes
