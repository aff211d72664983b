# SPDX-License-Identifier: Apache-2.0
"""Changes of existing pods: allocation annotations stay, ephemeral containers stay limited."""

from typing import Any

import msgspec
import pytest
from jsonpatch import apply_patch
from msgspec.structs import replace

from hami_common.compat import volcano
from hami_common.dra.podclaims import encode_resources
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.pods.visibility import DEVICE_VARIABLES
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_webhook.core.mutate import AdmissionPolicy, Verdict
from hami_webhook.core.validate import validate_ephemeral, validate_update

CATALOG = Catalog.from_settings()
POLICY = AdmissionPolicy()


def view(
    annotations: dict[str, str] | None = None, labels: dict[str, str] | None = None
) -> PodView:
    metadata = {"name": "p", "annotations": annotations or {}, "labels": labels or {}}
    return msgspec.convert({"metadata": metadata, "spec": {}}, PodView)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {keys.ALLOCATION: "x"}),
        ({keys.ALLOCATION: "x"}, {keys.ALLOCATION: "y"}),
        ({keys.ALLOCATION: "x"}, {}),
        ({keys.limits("a"): "x"}, {keys.limits("a"): "y"}),
    ],
    ids=["added", "changed", "removed", "limits changed"],
)
def test_reserved_annotation_is_not_changed_by_users(
    before: dict[str, str], after: dict[str, str]
) -> None:
    verdict = validate_update(
        view(before), view(after), user="alice", policy=POLICY, catalog=CATALOG
    )
    assert not verdict.allowed
    assert "only the HAMi scheduler may write it" in verdict.message


def test_reserved_annotation_may_be_changed_by_the_scheduler() -> None:
    scheduler = POLICY.trusted_users[0]
    verdict = validate_update(
        view(), view({keys.FENCE: "1"}), user=scheduler, policy=POLICY, catalog=CATALOG
    )
    assert verdict.allowed


SETTLED = [
    ({}, {keys.CLAIMED_RESOURCES: "{}"}),
    ({keys.CLAIMED_RESOURCES: "{}"}, {keys.CLAIMED_RESOURCES: '{"main":{}}'}),
    ({keys.CLAIMED_RESOURCES: "{}"}, {}),
    ({keys.CLAIMED_RESOURCES: "{}"}, {keys.CLAIMED_RESOURCES: "{}", keys.ALLOCATION_MODE: "dra"}),
    ({keys.ALLOCATION_MODE: "dra"}, {keys.ALLOCATION_MODE: "device-plugin"}),
    ({keys.ALLOCATION_MODE: "dra"}, {}),
    ({keys.MEMORY_LIMIT: "6000"}, {keys.MEMORY_LIMIT: "9000"}),
    ({keys.CORES_LIMIT: "60"}, {}),
]


@pytest.mark.parametrize(("before", "after"), SETTLED)
def test_mode_and_resources_are_settled_at_creation(
    before: dict[str, str], after: dict[str, str]
) -> None:
    ours = {keys.MANAGED_LABEL: "true"}
    verdict = validate_update(
        view(before, ours), view(after, ours), user="alice", policy=POLICY, catalog=CATALOG
    )
    assert not verdict.allowed
    assert "the creation of the pod settles how it gets its devices" in verdict.message


def claimed_pod(**resources: Any) -> dict[str, Any]:
    """A pod with its resources in the annotation, and these of its container ``main``."""
    moved = encode_resources({"main": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}})
    main = {"name": "main", "resources": {"claims": [{"name": "hami"}], **resources}}
    return {
        "metadata": {"name": "p", "annotations": {keys.CLAIMED_RESOURCES: moved}},
        "spec": {"containers": [main]},
    }


@pytest.mark.parametrize(
    ("applied", "stored"),
    [
        ({"limits": {"nvidia.com/gpumem": "3k"}}, {}),
        (
            {
                "limits": {"cpu": "1", "nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000},
                "requests": {"nvidia.com/gpu": "1"},
            },
            {"limits": {"cpu": "1"}},
        ),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "1"}}),
    ],
)
def test_unchanged_manifest_can_be_applied_again(
    applied: dict[str, Any], stored: dict[str, Any]
) -> None:
    old, new = claimed_pod(), claimed_pod(**applied)
    views = [msgspec.convert(one, PodView) for one in (old, new)]
    verdict = validate_update(*views, user="alice", policy=POLICY, catalog=CATALOG)
    assert verdict.allowed, verdict.message
    assert apply_patch(new, list(verdict.operations)) == claimed_pod(**stored)


@pytest.mark.parametrize(
    "limits", [{"nvidia.com/gpumem": "4000"}, {"nvidia.com/gpucores": "1"}, {"amd.com/gpu": "1"}]
)
def test_amounts_of_a_claim_are_not_changed_by_limits(limits: dict[str, str]) -> None:
    views = [msgspec.convert(one, PodView) for one in (claimed_pod(), claimed_pod(limits=limits))]
    verdict = validate_update(*views, user="alice", policy=POLICY, catalog=CATALOG)
    assert not verdict.allowed
    assert "delete the pod and create it again" in verdict.message


def test_mode_of_a_pod_that_is_not_ours_is_free() -> None:
    after = view({keys.ALLOCATION_MODE: "dra"})
    verdict = validate_update(view(), after, user="alice", policy=POLICY, catalog=CATALOG)
    assert verdict == Verdict()


def test_other_annotations_are_free() -> None:
    assert (
        validate_update(view(), view({"a": "b"}), user="alice", policy=POLICY, catalog=CATALOG)
        == Verdict()
    )


def test_managed_label_cannot_be_removed() -> None:
    managed = view(labels={keys.MANAGED_LABEL: "true"})
    assert not validate_update(
        managed, view(), user="alice", policy=POLICY, catalog=CATALOG
    ).allowed
    assert validate_update(managed, managed, user="alice", policy=POLICY, catalog=CATALOG).allowed


def ephemeral(**more: Any) -> Verdict:
    main = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    old = {"metadata": {"name": "p"}, "spec": {"containers": [main]}}
    debug = {"name": "debug", "image": "tools", **more}
    new = {**old, "spec": {**old["spec"], "ephemeralContainers": [debug]}}  # type: ignore[dict-item]
    verdict = validate_ephemeral(
        new, msgspec.convert(old, PodView), msgspec.convert(new, PodView), catalog=CATALOG
    )
    if verdict.allowed:
        after = apply_patch(new, list(verdict.operations))
        mounts = after["spec"]["ephemeralContainers"][0].get("volumeMounts", [])
        return Verdict(warnings=tuple(mount["mountPath"] for mount in mounts))
    return verdict


def test_ephemeral_container_gets_the_limits_of_its_target() -> None:
    assert ephemeral(targetContainerName="main").warnings == ("/etc/hami", "/run/hami")


def test_ephemeral_container_without_target_gets_nothing() -> None:
    assert ephemeral().warnings == ()


def test_privileged_ephemeral_container_is_refused() -> None:
    verdict = ephemeral(securityContext={"privileged": True})
    assert "ephemeral container debug" in verdict.message


@pytest.mark.parametrize("variable", DEVICE_VARIABLES)
def test_ephemeral_container_cannot_grab_devices_by_environment(variable: str) -> None:
    verdict = ephemeral(env=[{"name": variable, "value": "all"}])
    assert variable in verdict.message


def test_ephemeral_container_cannot_mount_over_the_limits() -> None:
    verdict = ephemeral(volumeMounts=[{"name": "v", "mountPath": "/etc/hami"}])
    assert "reserved" in verdict.message


def test_ephemeral_containers_of_other_pods_are_free() -> None:
    old = msgspec.convert({"spec": {"containers": [{"name": "m"}]}}, PodView)
    assert validate_ephemeral({}, old, old, catalog=CATALOG) == Verdict()


def of_claimed(**more: Any) -> Verdict:
    """The verdict on an ephemeral container of a pod whose container ``main`` uses a claim."""
    debug = {"name": "debug", "targetContainerName": "main", **more}
    resources = encode_resources({"main": {"nvidia.com/gpu": "1"}})
    document: dict[str, Any] = {
        "metadata": {"name": "p", "annotations": {keys.CLAIMED_RESOURCES: resources}},
        "spec": {
            "containers": [{"name": "main"}, {"name": "idle"}],
            "ephemeralContainers": [debug],
        },
    }
    new = msgspec.convert(document, PodView)
    old = replace(new, spec=replace(new.spec, ephemeral_containers=None))
    return validate_ephemeral(document, old, new, catalog=CATALOG)


def test_ephemeral_container_cannot_use_a_claim_and_gets_a_warning() -> None:
    verdict = of_claimed()
    assert verdict.allowed
    assert verdict.operations == ()
    (warning,) = verdict.warnings
    assert warning == (
        "ephemeral container debug: it sees no device, because main has its share by a claim, "
        "which ephemeral containers cannot use"
    )
    assert of_claimed(targetContainerName="idle").warnings == ()


@pytest.mark.parametrize(
    "more",
    [
        {"securityContext": {"privileged": True}},
        {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]},
        {"volumeMounts": [{"name": "v", "mountPath": "/etc/hami"}]},
    ],
)
def test_ephemeral_container_of_a_pod_with_a_claim_is_held_to_the_same_rules(
    more: dict[str, Any],
) -> None:
    assert not of_claimed(**more).allowed


VOLCANO = Catalog.from_settings(VendorSettings(nvidia=NvidiaSettings(dialects=("volcano",))))
VOLCANOS_USER = "system:serviceaccount:volcano-system:volcano-scheduler"


@pytest.mark.parametrize(
    ("node", "before", "after", "kept"),
    [
        ("", {}, {volcano.POD_IDS: "a"}, {}),
        ("", {volcano.POD_IDS: "a"}, {volcano.POD_IDS: "a", "b": "c"}, {"b": "c"}),
        ("n1", {volcano.POD_IDS: "a"}, {volcano.POD_IDS: "x"}, {volcano.POD_IDS: "a"}),
        ("n1", {volcano.POD_IDS: "a"}, {}, {volcano.POD_IDS: "a"}),
        ("n1", {volcano.POD_IDS: "a"}, None, {volcano.POD_IDS: "a"}),
        ("n1", {}, {volcano.POD_IDS: "x"}, {}),
    ],
)
def test_devices_for_volcano_are_written_with_the_binding_alone(
    node: str,
    before: dict[str, str],
    after: dict[str, str] | None,
    kept: dict[str, str],
) -> None:
    old, new = (
        {"metadata": {"name": "p", "annotations": notes}, "spec": {"nodeName": node}}
        for notes in (before, after)
    )
    views = [msgspec.convert(one, PodView) for one in (old, new)]
    verdict = validate_update(*views, user=VOLCANOS_USER, policy=POLICY, catalog=VOLCANO)
    assert verdict.allowed
    changed = apply_patch(new, list(verdict.operations))
    assert changed["metadata"]["annotations"] == kept
    assert validate_update(*views, user=VOLCANOS_USER, policy=POLICY, catalog=CATALOG) == Verdict()
    (user,) = POLICY.trusted_users
    assert validate_update(*views, user=user, policy=POLICY, catalog=VOLCANO) == Verdict()
