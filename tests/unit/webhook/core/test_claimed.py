# SPDX-License-Identifier: Apache-2.0
"""Allocation mode ``dra``: limits become uses of a claim; forged and copied pods."""

import copy
import json
from typing import Any

import msgspec
import pytest
from jsonpatch import apply_patch

from hami_common.dra.podclaims import claim_name, claim_of, is_claimed, restored
from hami_common.errors import SettingsInvalid
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.runtime.settings import load
from hami_common.vendors.catalog import Catalog
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, Verdict, mutate
from hami_webhook.core.validate import validate_create
from hami_webhook.settings import Settings

CATALOG = Catalog.from_settings()
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CLAIM = claim_name("review")
SERVES = AdmissionPolicy(dra_enabled=True)
BY_DEFAULT = AdmissionPolicy(dra_enabled=True, allocation_mode="dra")
DRA = {keys.ALLOCATION_MODE: "dra"}
GPU = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}
Pod = dict[str, Any]


def container(name: str = "main", limits: dict[str, str] | None = None, **more: Any) -> Pod:
    resources = {"resources": {"limits": limits}} if limits else {}
    return {"name": name, "image": "app", **resources, **more}


def pod(*containers: Pod, annotations: dict[str, str] | None = None, **spec: Any) -> Pod:
    metadata: Pod = {"name": "p", "namespace": "team-a"}
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": {"containers": list(containers), **spec}}


def view(document: Pod) -> PodView:
    return msgspec.convert(document, PodView)


def review(
    document: Pod,
    policy: AdmissionPolicy = SERVES,
    *,
    claim: str = CLAIM,
    namespace_mode: str = "",
) -> Verdict:
    return mutate(
        document,
        view(document),
        catalog=CATALOG,
        policy=policy,
        at=Circumstances(traceparent=TRACEPARENT, claim=claim, namespace_mode=namespace_mode),
    )


def admitted(document: Pod, policy: AdmissionPolicy = SERVES, **more: str) -> Pod:
    verdict = review(document, policy, **more)
    assert verdict.allowed, verdict.message
    result: Pod = apply_patch(copy.deepcopy(document), list(verdict.operations))
    return result


def claimed_in(document: Pod) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(
        document["metadata"]["annotations"][keys.CLAIMED_RESOURCES]
    )
    return found


def asking_in_dra(**spec: Any) -> Pod:
    return pod(container(limits=GPU), annotations=DRA, **spec)


def test_limits_become_uses_of_a_claim() -> None:
    after = admitted(asking_in_dra())
    assert after["spec"] == {
        "schedulerName": "hami-scheduler-claims",
        "containers": [
            {
                "name": "main",
                "image": "app",
                "resources": {"claims": [{"name": "hami", "request": "main-nvidia"}]},
            }
        ],
        "resourceClaims": [{"name": "hami", "resourceClaimName": CLAIM}],
    }
    assert claimed_in(after) == {"main": GPU}
    assert after["metadata"]["labels"] == {keys.MANAGED_LABEL: "true"}
    assert after["metadata"]["annotations"][keys.TRACEPARENT] == TRACEPARENT
    assert claim_of(view(after)) == CLAIM


NIC = {"name": "nic", "resourceClaimTemplateName": "nic"}


@pytest.mark.parametrize(
    ("limits", "spec", "scheduler"),
    [
        ({**GPU, "cpu": "1", "hugepages-2Mi": "2Mi"}, {}, "hami-scheduler-claims"),
        (GPU, {"schedulerName": "hami-scheduler"}, "hami-scheduler-claims"),
        (GPU, {"schedulerName": "hami-scheduler-claims"}, "hami-scheduler-claims"),
        (GPU, {"resourceClaims": [NIC]}, "hami-scheduler"),
        (
            GPU,
            {"resourceClaims": [NIC], "schedulerName": "hami-scheduler-claims"},
            "hami-scheduler",
        ),
        ({**GPU, "example.com/nic": "1"}, {}, "hami-scheduler"),
        (GPU, {"schedulerName": "volcano"}, "volcano"),
    ],
)
def test_pod_goes_to_the_profile_that_leaves_its_only_claim_to_hami(
    limits: dict[str, str], spec: Pod, scheduler: str
) -> None:
    policy = AdmissionPolicy(dra_enabled=True, other_schedulers=("volcano",))
    once = admitted(pod(container(limits=limits), annotations=DRA, **spec), policy)
    assert once["spec"]["schedulerName"] == scheduler
    assert admitted(once, policy)["spec"]["schedulerName"] == scheduler


def test_pod_of_device_plugin_mode_leaves_the_profile_of_claims() -> None:
    live = admitted(asking_in_dra())
    del live["metadata"]["annotations"][keys.ALLOCATION_MODE]
    assert admitted(live)["spec"]["schedulerName"] == "hami-scheduler"


def test_profile_of_claims_follows_the_name_of_the_scheduler() -> None:
    policy = AdmissionPolicy(dra_enabled=True, scheduler_name="accelerators")
    assert admitted(asking_in_dra(), policy)["spec"]["schedulerName"] == "accelerators-claims"


@pytest.mark.parametrize("key", ["scheduler_name=x-claims", "other_schedulers=y,x-claims"])
def test_scheduler_named_like_a_profile_of_claims_is_refused(key: str) -> None:
    with pytest.raises(SettingsInvalid, match=r"x-claims.*give the scheduler another name"):
        load(Settings, service="webhook", argv=["--set", f"policy.{key}"], environ={})


def test_request_of_the_pod_is_that_of_device_plugin_mode() -> None:
    dra = view(admitted(asking_in_dra()))
    plugin = view(admitted(pod(container(limits=GPU))))
    assert not is_claimed(plugin)
    assert CATALOG.parse_pod(restored(dra)) == CATALOG.parse_pod(plugin)


def test_other_resources_stay_and_defaults_are_kept_in_the_annotation() -> None:
    limits = {"cpu": "2", "memory": "1Gi", "nvidia.com/gpumem": "3000"}
    main = container(limits=limits)
    main["resources"]["requests"] = {"cpu": "1", "nvidia.com/gpumem": "3000"}
    after = admitted(pod(main, annotations=DRA))
    resources = after["spec"]["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": "2", "memory": "1Gi"}
    assert resources["requests"] == {"cpu": "1"}
    assert claimed_in(after)["main"]["nvidia.com/gpumem"] == "3000"
    assert claimed_in(after)["main"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize(
    ("annotation", "namespace", "default", "by_claim"),
    [
        ("dra", "", "device-plugin", True),
        ("dra", "device-plugin", "device-plugin", True),
        ("device-plugin", "dra", "dra", False),
        ("", "dra", "device-plugin", True),
        ("", "device-plugin", "dra", False),
        ("", "", "dra", True),
        ("", "", "device-plugin", False),
    ],
)
def test_annotation_wins_over_namespace_wins_over_installation(
    annotation: str, namespace: str, default: Any, *, by_claim: bool
) -> None:
    document = pod(
        container(limits=GPU),
        annotations={keys.ALLOCATION_MODE: annotation} if annotation else None,
    )
    policy = AdmissionPolicy(dra_enabled=True, allocation_mode=default)
    after = admitted(document, policy, namespace_mode=namespace)
    assert is_claimed(view(after)) is by_claim
    assert ("volumes" in after["spec"]) is not by_claim


def test_unknown_mode_is_denied() -> None:
    verdict = review(pod(container(limits=GPU), annotations={keys.ALLOCATION_MODE: "cdi"}))
    assert not verdict.allowed
    assert verdict.invalid
    assert verdict.message == (
        "annotation hami.io/allocation-mode: 'cdi' is not an allocation mode; "
        "write one of device-plugin, dra"
    )


def test_pod_that_asks_for_nothing_is_left_alone_in_any_mode() -> None:
    assert review(pod(container(), annotations=DRA)) == Verdict()
    assert review(pod(container()), BY_DEFAULT) == Verdict()


UNCLAIMABLE = [
    ({"nvidia.com/gpu": "33"}, "33 devices are requested"),
    ({"huawei.com/Ascend910B3": "1"}, "given by annotations"),
]


@pytest.mark.parametrize(("limits", "why"), UNCLAIMABLE)
def test_pod_that_no_claim_can_serve_is_denied_if_it_asked_for_dra(
    limits: dict[str, str], why: str
) -> None:
    verdict = review(pod(container(limits=limits), annotations=DRA))
    assert not verdict.allowed
    assert verdict.invalid
    assert why in verdict.message
    assert "set annotation hami.io/allocation-mode: device-plugin" in verdict.message


@pytest.mark.parametrize(("limits", "why"), UNCLAIMABLE)
def test_pod_that_no_claim_can_serve_stays_with_a_warning_otherwise(
    limits: dict[str, str], why: str
) -> None:
    document = pod(container(limits=limits))
    verdict = review(document, BY_DEFAULT)
    told = [one for one in verdict.warnings if "stays in allocation mode device-plugin" in one]
    assert len(told) == 1
    assert why in told[0]
    after = admitted(document, BY_DEFAULT)
    assert not is_claimed(view(after))
    plugin = admitted(document)
    assert after == plugin


def test_installation_without_claims_denies_the_annotation_and_ignores_the_label() -> None:
    off = AdmissionPolicy()
    verdict = review(asking_in_dra(), off)
    assert not verdict.allowed
    assert "install component dra" in verdict.message
    by_label = review(pod(container(limits=GPU)), off, namespace_mode="dra")
    assert any("stays in allocation mode" in one for one in by_label.warnings)
    assert not is_claimed(view(admitted(pod(container(limits=GPU)), off, namespace_mode="dra")))


def test_init_container_uses_the_request_of_the_container_that_covers_it() -> None:
    small = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000", "nvidia.com/gpucores": "10"}
    large = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "9000"}
    after = admitted(
        pod(
            container(limits=GPU),
            annotations=DRA,
            initContainers=[container("little", limits=small), container("big", limits=large)],
        )
    )
    inits = after["spec"]["initContainers"]
    assert inits[0]["resources"] == {"claims": [{"name": "hami", "request": "main-nvidia"}]}
    assert inits[1]["resources"] == {"claims": [{"name": "hami", "request": "big-nvidia"}]}
    assert claimed_in(after) == {"main": GPU, "little": small, "big": large}


@pytest.mark.parametrize("policy", [SERVES, BY_DEFAULT])
def test_admission_is_idempotent(policy: AdmissionPolicy) -> None:
    two = pod(
        container(limits=GPU, envFrom=[{"configMapRef": {"name": "c"}}]),
        container("side", limits={"nvidia.com/gpumem": "500", "cpu": "1"}),
        container("none"),
        annotations=DRA,
        initContainers=[container("init", limits=GPU)],
        resourceClaims=[{"name": "nic", "resourceClaimTemplateName": "nic"}],
    )
    once = admitted(two, policy)
    again = review(once, policy)
    assert again.allowed, again.message
    assert again.operations == ()


def test_another_admission_changes_the_name_of_the_claim_alone() -> None:
    once = admitted(asking_in_dra())
    other = claim_name("other review")
    copied = admitted(once, claim=other)
    assert claim_of(view(copied)) == other
    copied["spec"]["resourceClaims"] = once["spec"]["resourceClaims"]
    assert copied == once


def test_pods_made_from_the_yaml_of_a_live_pod_get_claims_of_their_own() -> None:
    live = admitted(asking_in_dra())
    live["metadata"]["annotations"][keys.ALLOCATION] = "signed"
    live["metadata"]["annotations"][keys.limits("main")] = "limits"
    names = set()
    for number in range(3):
        replica = copy.deepcopy(live)
        replica["metadata"] |= {"name": "", "generateName": "web-"}
        after = admitted(replica, claim=claim_name(f"replica {number}"))
        names.add(claim_of(view(after)))
        assert keys.ALLOCATION not in after["metadata"]["annotations"]
    assert len(names | {claim_of(view(live))}) == 4


def test_yaml_of_a_pod_in_dra_gets_limits_again_where_the_mode_is_device_plugin() -> None:
    live = admitted(pod(container(limits=GPU)), BY_DEFAULT)
    after = admitted(live)
    assert after == admitted(pod(container(limits=GPU)))


def test_yaml_of_a_pod_of_device_plugin_loses_the_volumes_in_dra() -> None:
    live = admitted(pod(container(limits=GPU)))
    live["metadata"]["annotations"] |= DRA
    after = admitted(live)
    assert "volumes" not in after["spec"]
    assert "volumeMounts" not in after["spec"]["containers"][0]
    assert after == admitted(asking_in_dra())


def test_annotation_of_the_user_is_another_spelling_of_limits() -> None:
    spelled = pod(
        container(),
        annotations={**DRA, keys.CLAIMED_RESOURCES: json.dumps({"main": GPU})},
    )
    assert admitted(spelled) == admitted(asking_in_dra())


@pytest.mark.parametrize(
    ("text", "limits", "message"),
    [
        ("{", None, "cannot be read"),
        ('{"other": {"nvidia.com/gpu": "1"}}', None, "container other"),
        ('{"main": {"nvidia.com/gpu": "1"}}', {"nvidia.com/gpumem": "1"}, "is beside resource"),
        ('{"main": {"cpu": "1"}}', None, "'cpu', which is not a resource of HAMi"),
        ('{"main": {"nvidia.com/gpumem": "3Gi", "nvidia.com/gpu": "1"}}', None, "MiB"),
        ('{"main": {"nvidia.com/gpu": "-1"}}', None, "nvidia.com/gpu"),
    ],
)
@pytest.mark.parametrize("mode", ["dra", "device-plugin"])
def test_wrong_annotation_is_denied(
    mode: str, text: str, limits: dict[str, str] | None, message: str
) -> None:
    verdict = review(
        pod(
            container(limits=limits),
            annotations={keys.ALLOCATION_MODE: mode, keys.CLAIMED_RESOURCES: text},
        )
    )
    assert not verdict.allowed
    assert verdict.invalid
    assert message in verdict.message


def test_annotation_without_resources_is_removed() -> None:
    after = admitted(pod(container(), annotations={keys.CLAIMED_RESOURCES: "{}"}))
    assert after == {
        "metadata": {"name": "p", "namespace": "team-a"},
        "spec": {"containers": [container()]},
    }


def test_annotation_on_a_pod_of_a_foreign_scheduler_is_denied() -> None:
    spelled = {**DRA, keys.CLAIMED_RESOURCES: json.dumps({"main": GPU})}
    verdict = review(pod(container(), annotations=spelled, schedulerName="theirs"))
    assert not verdict.allowed
    assert "scheduler theirs" in verdict.message


def test_pod_keeps_claims_of_its_own() -> None:
    nic = {"name": "nic", "resourceClaimTemplateName": "nic"}
    main = container(limits=GPU)
    main["resources"]["claims"] = [{"name": "nic"}]
    after = admitted(pod(main, annotations=DRA, resourceClaims=[nic]))
    assert after["spec"]["resourceClaims"] == [
        nic,
        {"name": "hami", "resourceClaimName": CLAIM},
    ]
    assert after["spec"]["containers"][0]["resources"]["claims"] == [
        {"name": "nic"},
        {"name": "hami", "request": "main-nvidia"},
    ]


OWN = [
    {"name": "hami", "resourceClaimName": "mine"},
    {"name": "hami", "resourceClaimTemplateName": "mine"},
    {"name": "hami", "resourceClaimName": claim_name("forged")},
]


@pytest.mark.parametrize("own", OWN)
def test_claim_of_the_user_by_our_name_is_denied(own: dict[str, str]) -> None:
    verdict = review(asking_in_dra(resourceClaims=[own]))
    assert not verdict.allowed
    assert verdict.message == (
        "spec.resourceClaims[hami]: HAMi calls the claim for the pod's resource limits by this "
        "name; give the claim another name, here and in resources.claims of the containers"
    )


@pytest.mark.parametrize("own", OWN)
def test_claim_of_the_user_by_our_name_stays_where_we_add_none(own: dict[str, str]) -> None:
    after = admitted(pod(container(limits=GPU), resourceClaims=[own]))
    assert after["spec"]["resourceClaims"] == [own]


@pytest.mark.parametrize("own", OWN[:2])
def test_foreign_claim_beside_the_annotation_is_denied(own: dict[str, str]) -> None:
    once = admitted(asking_in_dra())
    once["spec"]["resourceClaims"] = [own]
    assert "HAMi calls the claim" in review(once).message


def test_forged_name_of_another_pods_claim_is_replaced() -> None:
    victim = claim_name("the review of another pod")
    once = admitted(asking_in_dra())
    once["spec"]["resourceClaims"][0]["resourceClaimName"] = victim
    assert claim_of(view(admitted(once))) == CLAIM


def test_container_without_a_share_cannot_use_the_share_of_another() -> None:
    thief = container("thief")
    thief["resources"] = {"claims": [{"name": "hami", "request": "main-nvidia"}]}
    first = review(pod(container(limits=GPU), thief, annotations=DRA))
    assert "HAMi calls the claim" in first.message
    once = admitted(pod(container(limits=GPU), container("thief"), annotations=DRA))
    once["spec"]["containers"][1]["resources"] = thief["resources"]
    after = admitted(once)
    assert "resources" not in after["spec"]["containers"][1]


def test_refusals_are_those_of_device_plugin_mode() -> None:
    privileged = container(limits=GPU, securityContext={"privileged": True})
    for spec in (
        pod(privileged, annotations=DRA),
        pod(container(limits=GPU), annotations=DRA, nodeName="n"),
        pod(
            container(limits=GPU, volumeMounts=[{"name": "v", "mountPath": "/etc/hami"}]),
            annotations=DRA,
        ),
        pod(
            container(
                limits=GPU, volumeMounts=[{"name": "hami-limits-x", "mountPath": "/etc/hami"}]
            ),
            annotations=DRA,
        ),
    ):
        verdict = review(spec)
        assert not verdict.allowed
        plain = copy.deepcopy(spec)
        del plain["metadata"]["annotations"]
        assert verdict == review(plain)
        hidden = admitted(asking_in_dra())
        hidden["spec"] |= {k: v for k, v in spec["spec"].items() if k == "nodeName"}
        main = hidden["spec"]["containers"][0]
        main |= {k: v for k, v in spec["spec"]["containers"][0].items() if k != "resources"}
        assert review(hidden).message == verdict.message


def test_env_from_is_as_with_injection_by_cdi() -> None:
    main = container(limits=GPU, envFrom=[{"configMapRef": {"name": "c"}}])
    by_envvar = AdmissionPolicy(dra_enabled=True, injection="env")
    assert not review(pod(main), by_envvar).allowed
    after = admitted(pod(main, annotations=DRA), by_envvar)
    env = {one["name"]: one["value"] for one in after["spec"]["containers"][0]["env"]}
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_pods_of_a_scheduler_in_the_policy_use_claims_too() -> None:
    policy = AdmissionPolicy(dra_enabled=True, other_schedulers=("default-scheduler",))
    after = admitted(asking_in_dra(), policy)
    assert after["spec"]["schedulerName"] == "default-scheduler"
    assert claim_of(view(after)) == CLAIM


def test_recall_raises_no_limits_of_pods_with_claims() -> None:
    policy = AdmissionPolicy(dra_enabled=True, add_recall_memory=True)
    after = admitted(pod(container(limits={**GPU, "memory": "1Gi"}), annotations=DRA), policy)
    assert after["spec"]["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}


def test_validating_webhook_denies_a_pod_whose_claim_was_changed_after_us() -> None:
    once = admitted(asking_in_dra())
    assert validate_create(review(once), view(once)).allowed
    more_use = copy.deepcopy(once)
    more_use["spec"]["containers"].append(
        container("thief", resources={"claims": [{"name": "hami", "request": "main-nvidia"}]})
    )
    covered = copy.deepcopy(once)
    covered["spec"]["volumes"] = [{"name": "hami-limits-main", "emptyDir": {}}]
    covered["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "hami-limits-main", "mountPath": "/etc/hami", "readOnly": True}
    ]
    without = copy.deepcopy(once)
    del without["spec"]["resourceClaims"]
    for changed in (more_use, covered, without):
        verdict = validate_create(review(changed), view(changed))
        assert not verdict.allowed
        assert "another webhook" in verdict.message
