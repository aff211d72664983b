# SPDX-License-Identifier: Apache-2.0
"""Admission of new pods: defaults, refusals, volumes, idempotence, minimal patches."""

from typing import Any

import msgspec
import pytest
from jsonpatch import apply_patch

from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, Verdict, mutate

CATALOG = Catalog.from_settings()
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def container(name: str = "main", **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "app", **more}


def asking(name: str = "main", more: dict[str, Any] | None = None, **limits: str) -> dict[str, Any]:
    named = {f"nvidia.com/{k.replace('_', '-')}": v for k, v in limits.items()}
    return container(name, resources={"limits": named}, **(more or {}))


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "team-a"},
        "spec": {"containers": list(containers), **spec},
    }


def review(
    document: dict[str, Any],
    policy: AdmissionPolicy | None = None,
    catalog: Catalog = CATALOG,
) -> Verdict:
    return mutate(
        document,
        msgspec.convert(document, PodView),
        catalog=catalog,
        policy=policy or AdmissionPolicy(),
        at=Circumstances(traceparent=TRACEPARENT, claim=""),
    )


def admitted(document: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    verdict = review(document, **kwargs)
    assert verdict.allowed, verdict.message
    result: dict[str, Any] = apply_patch(document, list(verdict.operations))
    return result


def limits_of(document: dict[str, Any], index: int = 0) -> dict[str, str]:
    result: dict[str, str] = document["spec"]["containers"][index]["resources"]["limits"]
    return result


def test_pod_without_device_resources_is_left_alone() -> None:
    verdict = review(pod(container()))
    assert verdict == Verdict()


def test_pod_with_devices_gets_scheduler_label_trace_and_volumes() -> None:
    after = admitted(pod(asking(gpu="1", gpumem="3000")))
    assert after["spec"]["schedulerName"] == "hami-scheduler"
    assert after["metadata"]["labels"][keys.MANAGED_LABEL] == "true"
    assert after["metadata"]["annotations"][keys.TRACEPARENT] == TRACEPARENT
    mounts = after["spec"]["containers"][0]["volumeMounts"]
    assert mounts == [
        {"name": "hami-limits-main", "mountPath": "/etc/hami", "readOnly": True},
        {"name": "hami-region-main", "mountPath": "/run/hami"},
    ]
    limits_volume, region_volume = after["spec"]["volumes"]
    assert limits_volume["downwardAPI"]["items"][0] == {
        "path": "limits",
        "fieldRef": {
            "apiVersion": "v1",
            "fieldPath": "metadata.annotations['main.limits.hami.io/v1']",
        },
    }
    assert region_volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Mi"}
    assert not any("subPath" in mount for mount in mounts)


def test_admission_is_idempotent() -> None:
    once = admitted(pod(asking(gpu="1", gpumem="3000"), asking("other", gpucores="30")))
    assert review(once).operations == ()


def test_patch_contains_only_changes() -> None:
    document = pod(asking(gpu="1", gpumem="100"), container("side"), volumes=[{"name": "v"}])
    paths = {operation["path"] for operation in review(document).operations}
    assert paths == {
        "/metadata/labels",
        "/metadata/annotations",
        "/spec/schedulerName",
        "/spec/containers/0/volumeMounts",
        "/spec/volumes/-",
    }


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        ({"gpu": "1"}, {"gpu": "1", "gpucores": "100"}),
        ({"gpu": "1", "gpumem": "3000"}, {"gpu": "1", "gpumem": "3000"}),
        ({"gpumem": "3000"}, {"gpu": "1", "gpumem": "3000"}),
        ({"gpucores": "50"}, {"gpu": "1", "gpucores": "50"}),
        ({"gpu": "1", "gpumem-percentage": "100"}, None),
        ({"gpu": "1", "gpumem-percentage": "50"}, {"gpu": "1", "gpumem-percentage": "50"}),
        ({"gpu": "1", "gpumem": "0"}, {"gpu": "1", "gpumem": "0"}),
        ({"gpu": "1", "gpucore": "30"}, {"gpu": "1", "gpucores": "30"}),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in (value or {}).items()) or "cores-added",
)
def test_defaults_follow_the_pod_interface(
    limits: dict[str, str], want: dict[str, str] | None
) -> None:
    if want is None:
        want = {**limits, "gpucores": "100"}
    full = {f"nvidia.com/{k}": v for k, v in limits.items()}
    after = admitted(pod(container(resources={"limits": full})))
    assert limits_of(after) == {f"nvidia.com/{k}": v for k, v in want.items()}


def test_init_containers_get_the_same_defaults() -> None:
    after = admitted(pod(container(), initContainers=[asking("prepare", gpumem="100")]))
    limits = after["spec"]["initContainers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "100"}
    assert after["spec"]["initContainers"][0]["volumeMounts"][0]["mountPath"] == "/etc/hami"


def test_memory_without_a_default_count_is_refused() -> None:
    catalog = Catalog.from_settings(VendorSettings(nvidia=NvidiaSettings(default_count=0)))
    verdict = review(pod(asking(gpumem="100")), catalog=catalog)
    assert not verdict.allowed
    assert "without a number of devices; add nvidia.com/gpu: 1" in verdict.message


def test_memory_and_percentage_together_warn_and_memory_wins() -> None:
    limits = {"nvidia.com/gpumem": "100", "nvidia.com/gpumem-percentage": "50"}
    verdict = review(pod(container(resources={"limits": limits})))
    assert verdict.allowed
    assert any("nvidia.com/gpumem wins" in warning for warning in verdict.warnings)


def test_alias_is_renamed_in_limits_and_requests_with_a_warning() -> None:
    both = {"nvidia.com/gpu": "1", "nvidia.com/gpucore": "30"}
    document = pod(container(resources={"limits": dict(both), "requests": dict(both)}))
    verdict = review(document)
    after = apply_patch(document, list(verdict.operations))
    resources = after["spec"]["containers"][0]["resources"]
    assert "nvidia.com/gpucore" not in resources["limits"] | resources["requests"]
    assert limits_of(after)["nvidia.com/gpucores"] == "30"
    assert any("please write nvidia.com/gpucores" in warning for warning in verdict.warnings)


@pytest.mark.parametrize(
    ("limits", "field", "fix"),
    [
        ({"gpu": "1", "gpumem": "3Gi"}, "nvidia.com/gpumem", "write 3072"),
        ({"gpu": "1", "gpumem": "0.5"}, "nvidia.com/gpumem", "whole number of MiB"),
        ({"gpu": "1", "gpumem": "-1"}, "nvidia.com/gpumem", "0 or more"),
        ({"gpu": "0.5"}, "nvidia.com/gpu", "whole number of devices"),
        ({"gpu": "4294967297"}, "nvidia.com/gpu", "at most 64"),
        ({"gpu": "1", "gpumem-percentage": "101"}, "gpumem-percentage", "0 to 100"),
        ({"gpu": "1", "gpucores": "x"}, "nvidia.com/gpucores", "whole number"),
        ({"gpu": "1", "priority": "8"}, "nvidia.com/priority", "at most 7"),
    ],
)
def test_quantity_that_cannot_work_is_refused_with_field_and_fix(
    limits: dict[str, str], field: str, fix: str
) -> None:
    full = {f"nvidia.com/{k}": v for k, v in limits.items()}
    verdict = review(pod(container(resources={"limits": full})))
    assert not verdict.allowed
    assert field in verdict.message
    assert fix in verdict.message
    assert "container main" in verdict.message


def test_limit_above_the_request_is_admitted_or_refused_with_the_fix() -> None:
    document = pod(asking(gpumem="3000", gpucores="30"))
    document["metadata"]["annotations"] = {keys.MEMORY_LIMIT: "6000", keys.CORES_LIMIT: "main=60"}
    after = admitted(document)
    assert document["metadata"]["annotations"].items() <= after["metadata"]["annotations"].items()
    assert review(after).operations == ()
    document["metadata"]["annotations"][keys.CLASS] = "guaranteed"
    verdict = review(document)
    assert (verdict.allowed, verdict.invalid) == (False, True)
    assert verdict.message == (
        "annotation hami.io/memory-limit: a pod of class guaranteed has no limit above its"
        " request; remove it, or the annotation hami.io/class"
    )


def test_priority_becomes_environment() -> None:
    after = admitted(pod(asking(gpu="1", priority="0")))
    assert {"name": "CUDA_TASK_PRIORITY", "value": "0"} in after["spec"]["containers"][0]["env"]


def test_core_policy_reaches_only_containers_with_devices() -> None:
    catalog = Catalog.from_settings(VendorSettings(nvidia=NvidiaSettings(core_policy="force")))
    after = admitted(pod(asking(gpu="1"), container("side")), catalog=catalog)
    names = [variable["name"] for variable in after["spec"]["containers"][0]["env"]]
    assert names == ["GPU_CORE_UTILIZATION_POLICY"]
    assert "env" not in after["spec"]["containers"][1]


def test_runtime_class_is_set_only_where_the_pod_has_none() -> None:
    catalog = Catalog.from_settings(VendorSettings(nvidia=NvidiaSettings(runtime_class="nvidia")))
    assert admitted(pod(asking(gpu="1")), catalog=catalog)["spec"]["runtimeClassName"] == "nvidia"
    own = admitted(pod(asking(gpu="1"), runtimeClassName="kata"), catalog=catalog)
    assert own["spec"]["runtimeClassName"] == "kata"


def test_environment_that_would_override_the_node_is_removed_with_a_warning() -> None:
    env = [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "MODE", "value": "x"},
        {"name": "CUDA_DEVICE_MEMORY_LIMIT_0", "value": "0"},
    ]
    document = pod(asking(gpu="1", gpumem="100", more={"env": env}))
    verdict = review(document)
    after = apply_patch(document, list(verdict.operations))
    assert after["spec"]["containers"][0]["env"] == [{"name": "MODE", "value": "x"}]
    assert len([w for w in verdict.warnings if "was removed" in w]) == 2


def test_switching_the_limiter_off_is_refused_for_a_share_and_allowed_for_a_whole_device() -> None:
    off = {"env": [{"name": "CUDA_DISABLE_CONTROL", "value": "true"}]}
    refused = review(pod(asking(gpu="1", gpumem="100", more=off)))
    assert not refused.allowed
    assert "CUDA_DISABLE_CONTROL" in refused.message
    assert review(pod(asking(gpu="1", more=off))).allowed


@pytest.mark.parametrize("group", ["containers", "initContainers"])
def test_privileged_container_anywhere_in_an_asking_pod_is_refused(group: str) -> None:
    document = pod(asking(gpu="1"))
    document["spec"].setdefault(group, []).append(
        container("root", securityContext={"privileged": True})
    )
    verdict = review(document)
    assert not verdict.allowed
    assert "container root: securityContext.privileged" in verdict.message


def test_privileged_pod_without_device_resources_is_left_alone() -> None:
    assert review(pod(container(securityContext={"privileged": True}))) == Verdict()


def test_node_name_is_refused_with_the_fix() -> None:
    verdict = review(pod(asking(gpu="1"), nodeName="gpu-1"))
    assert not verdict.allowed
    assert "kubernetes.io/hostname: gpu-1" in verdict.message


@pytest.mark.parametrize(
    "path", ["/etc/hami", "/etc/hami/", "/etc/hami/x", "/run/hami", "/etc/ld.so.preload"]
)
def test_mount_over_limiter_files_is_refused(path: str) -> None:
    mount = {"volumeMounts": [{"name": "v", "mountPath": path}]}
    verdict = review(pod(asking(gpu="1", more=mount), volumes=[{"name": "v", "emptyDir": {}}]))
    assert not verdict.allowed
    assert "reserved" in verdict.message


def test_mount_above_limiter_files_is_refused_where_they_are_mounted() -> None:
    mount: dict[str, Any] = {"volumeMounts": [{"name": "v", "mountPath": "/run"}]}
    refused = review(pod(asking(gpu="1", more=mount), volumes=[{"name": "v"}]))
    assert "mount a directory below /run" in refused.message
    assert review(pod(asking(gpu="1"), container("side", **mount), volumes=[{"name": "v"}])).allowed


def test_foreign_volume_with_the_name_of_a_limiter_volume_is_replaced() -> None:
    fake = {"name": "hami-limits-main", "emptyDir": {}}
    after = admitted(pod(asking(gpu="1"), volumes=[fake]))
    assert fake not in after["spec"]["volumes"]
    assert "downwardAPI" in next(
        v for v in after["spec"]["volumes"] if v["name"] == "hami-limits-main"
    )


def test_pod_of_another_scheduler_is_left_alone_but_for_forged_annotations() -> None:
    document = pod(asking(gpu="1"), schedulerName="volcano")
    assert review(document).operations == ()
    document["metadata"]["annotations"] = {keys.ALLOCATION: "{}", "team": "a"}
    after = admitted(document)
    assert after["metadata"]["annotations"] == {"team": "a"}
    assert after["spec"]["schedulerName"] == "volcano"


def test_pod_of_a_named_scheduler_is_prepared_and_stays_its_own() -> None:
    policy = AdmissionPolicy(other_schedulers=("volcano",))
    ours = admitted(pod(asking(gpu="1", gpumem="1000")))
    theirs = admitted(pod(asking(gpu="1", gpumem="1000"), schedulerName="volcano"), policy=policy)
    assert theirs["spec"] == {**ours["spec"], "schedulerName": "volcano"}
    assert theirs["metadata"]["labels"] == ours["metadata"]["labels"]
    assert review(theirs, policy=policy).operations == ()


def test_pod_without_a_scheduler_stays_with_a_named_default_scheduler() -> None:
    policy = AdmissionPolicy(other_schedulers=("default-scheduler",))
    assert admitted(pod(asking(gpu="1")), policy=policy)["spec"]["schedulerName"] == (
        "default-scheduler"
    )
    other = admitted(pod(asking(gpu="1"), schedulerName="hami-scheduler"), policy=policy)
    assert other["spec"]["schedulerName"] == "hami-scheduler"


def test_pod_of_a_named_scheduler_is_refused_like_ours() -> None:
    policy = AdmissionPolicy(other_schedulers=("volcano",))
    verdict = review(pod(asking(gpu="1", gpumem="3Gi"), schedulerName="volcano"), policy=policy)
    assert "the unit is MiB" in verdict.message
    fixed = review(pod(asking(gpu="1"), schedulerName="volcano", nodeName="n1"), policy=policy)
    assert "spec.nodeName" in fixed.message


def test_named_default_scheduler_is_kept_with_the_operators_setting() -> None:
    document = pod(asking(gpu="1"), schedulerName="default-scheduler")
    keep = AdmissionPolicy(overwrite_default_scheduler=False)
    assert review(document, policy=keep).operations == ()
    assert admitted(document)["spec"]["schedulerName"] == "hami-scheduler"


@pytest.mark.parametrize(
    "key",
    [
        keys.ALLOCATION,
        keys.FENCE,
        keys.limits("main"),
        "hami.io/vgpu-node",
        "hami.io/vgpu-devices-to-allocate",
        "hami.io/dcu-devices-allocated",
    ],
)
def test_user_written_allocation_annotation_is_stripped_with_a_warning(key: str) -> None:
    document = pod(asking(gpu="1"))
    document["metadata"]["annotations"] = {key: "forged", "hami.io/gpu-scheduler-policy": "binpack"}
    verdict = review(document)
    after = apply_patch(document, list(verdict.operations))
    assert key not in after["metadata"]["annotations"]
    assert after["metadata"]["annotations"]["hami.io/gpu-scheduler-policy"] == "binpack"
    assert any(key in warning for warning in verdict.warnings)


def test_callers_trace_is_continued() -> None:
    document = pod(asking(gpu="1"))
    callers = "00-11111111111111111111111111111111-2222222222222222-01"
    document["metadata"]["annotations"] = {keys.TRACEPARENT: callers}
    assert admitted(document)["metadata"]["annotations"][keys.TRACEPARENT] == callers


@pytest.mark.parametrize(
    "text",
    ["", "00-aa-bb-01", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01", "x" * 55],
)
def test_invalid_trace_parent_is_replaced(text: str) -> None:
    document = pod(asking(gpu="1"))
    document["metadata"]["annotations"] = {keys.TRACEPARENT: text}
    assert admitted(document)["metadata"]["annotations"][keys.TRACEPARENT] == TRACEPARENT


def test_unknown_policy_word_is_refused() -> None:
    document = pod(asking(gpu="1"))
    document["metadata"]["annotations"] = {keys.NODE_POLICY: "binpak"}
    verdict = review(document)
    assert not verdict.allowed
    assert keys.NODE_POLICY in verdict.message
    assert "binpack, spread" in verdict.message


def test_zero_devices_are_admitted_without_share_and_with_a_warning() -> None:
    verdict = review(pod(asking(gpu="0")))
    assert verdict.allowed
    assert "gets none" in verdict.warnings[0]
    assert not any("volumes" in operation["path"] for operation in verdict.operations)


def test_hidden_devices_affect_only_pods_with_devices() -> None:
    hide = AdmissionPolicy(hide_devices_from_others=True)
    after = admitted(pod(asking(gpu="1"), container("side")), policy=hide)
    none = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}
    assert after["spec"]["containers"][1]["env"] == [none]
    assert review(pod(container()), policy=hide) == Verdict()


def test_hidden_devices_are_those_of_the_requested_vendors() -> None:
    hide = AdmissionPolicy(hide_devices_from_others=True)
    npu = container(resources={"limits": {"huawei.com/Ascend910B3": "1"}})
    after = admitted(pod(npu, container("side")), policy=hide)
    assert after["spec"]["containers"][1]["env"] == [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"},
        {"name": "ASCEND_VISIBLE_DEVICES", "value": "void"},
    ]


@pytest.mark.parametrize("name", ["MR-V100-poddemo", "npu_pod", "-", "ä", ""])
@pytest.mark.parametrize("place", ["containers", "initContainers"])
def test_invalid_container_name_is_left_for_the_api_server_to_name(name: str, place: str) -> None:
    document = pod(asking(gpu="1"))
    document["spec"][place] = [*document["spec"].get(place, []), asking(name, gpu="1")]
    verdict = review(document)
    assert verdict == Verdict(concerns_us=True, is_ours=True)


def test_requests_equal_to_limits_stay_equal() -> None:
    both = {"nvidia.com/gpu": "1"}
    document = pod(container(resources={"limits": dict(both), "requests": dict(both)}))
    resources = admitted(document)["spec"]["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"]
