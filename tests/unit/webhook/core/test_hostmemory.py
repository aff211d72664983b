# SPDX-License-Identifier: Apache-2.0
"""Memory limits of containers whose device memory recall may move to the host."""

from typing import Any

import msgspec
import pytest
from jsonpatch import apply_patch

from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_webhook.core.hostmemory import MARGIN_MIB
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, Verdict, mutate

CATALOG = Catalog.from_settings()
POLICY = AdmissionPolicy(add_recall_memory=True)
SHARE = {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "3000"}
RAISED_MIB = 2 * 3000 + MARGIN_MIB


def container(name: str = "main", limits: Any = None, requests: Any = None) -> dict[str, Any]:
    resources = {"limits": limits or {}, "requests": requests or {}}
    return {"name": name, "image": "app", "resources": resources}


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    metadata = {"name": "p", "namespace": "team-a"}
    return {"metadata": metadata, "spec": {"containers": list(containers), **spec}}


def review(document: dict[str, Any], policy: AdmissionPolicy = POLICY) -> Verdict:
    return mutate(
        document,
        msgspec.convert(document, PodView),
        catalog=CATALOG,
        policy=policy,
        at=Circumstances(
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", claim=""
        ),
    )


def admitted(document: dict[str, Any], policy: AdmissionPolicy = POLICY) -> dict[str, Any]:
    verdict = review(document, policy)
    assert verdict.allowed, verdict.message
    result: dict[str, Any] = apply_patch(document, list(verdict.operations))
    return result


def resources(document: dict[str, Any], index: int = 0) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = document["spec"]["containers"][index]["resources"]
    return found


@pytest.mark.parametrize(
    ("limit", "mib"),
    [("1Gi", 1024), ("1000M", 954), ("1", 1), ("1536Ki", 2), (str(5 << 20), 5)],
)
def test_limit_is_raised_by_the_shares_and_the_request_is_not(limit: str, mib: int) -> None:
    after = admitted(pod(container(limits=SHARE | {"memory": limit}, requests={"memory": "1"})))
    assert resources(after)["limits"]["memory"] == f"{mib + RAISED_MIB}Mi"
    assert resources(after)["requests"]["memory"] == "1"
    assert after["metadata"]["annotations"][keys.RECALL_MEMORY] == f"main={mib + RAISED_MIB}Mi"


def test_a_request_that_the_limit_stood_for_keeps_its_amount() -> None:
    after = admitted(pod(container(limits=SHARE | {"memory": "2Gi"})))
    assert resources(after)["requests"]["memory"] == "2Gi"


def test_without_the_policy_nothing_is_raised() -> None:
    after = admitted(pod(container(limits=SHARE | {"memory": "1Gi"})), AdmissionPolicy())
    assert resources(after)["limits"]["memory"] == "1Gi"


@pytest.mark.parametrize(
    "limits",
    [
        SHARE,
        {"memory": "1Gi"},
        {"nvidia.com/gpu": "1", "memory": "1Gi"},
        {"nvidia.com/mig-1g.10gb": "1", "memory": "1Gi"},
        {"amd.com/gpu": "1", "memory": "1Gi"},
        SHARE | {"memory": "a lot"},
    ],
    ids=["no limit", "no share", "whole device", "partition", "no recall", "no quantity"],
)
def test_other_containers_are_left_alone(limits: dict[str, str]) -> None:
    verdict = review(pod(container(limits=limits), container("asks", SHARE)))
    assert not [one for one in verdict.operations if one["path"].endswith("/memory")]
    assert not [one for one in verdict.warnings if "memory" in one]


def test_each_container_gets_the_memory_of_its_own_share() -> None:
    small = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "100", "memory": "1Gi"}
    after = admitted(pod(container("plain", {"memory": "1Gi"}), container("small", small)))
    assert resources(after)["limits"]["memory"] == "1Gi"
    assert resources(after, 1)["limits"]["memory"] == f"{1024 + 100 + MARGIN_MIB}Mi"


def test_admission_is_idempotent_until_the_limit_is_changed() -> None:
    once = admitted(pod(container(limits=SHARE | {"memory": "1Gi"})))
    assert review(once).operations == ()
    resources(once)["limits"]["memory"] = "2Gi"
    assert resources(admitted(once))["limits"]["memory"] == f"{2048 + RAISED_MIB}Mi"


def test_a_limit_of_the_whole_pod_is_raised_too() -> None:
    whole = {"limits": {"memory": "4Gi"}, "requests": {"memory": "1Gi"}}
    after = admitted(
        pod(container(limits=SHARE | {"memory": "1Gi"}), container("more", SHARE), resources=whole)
    )
    assert after["spec"]["resources"]["limits"]["memory"] == f"{4096 + 2 * RAISED_MIB}Mi"
    assert after["spec"]["resources"]["requests"]["memory"] == "1Gi"
    assert review(after).operations == ()


def test_a_guaranteed_pod_keeps_its_class() -> None:
    fixed = {"memory": "1Gi", "cpu": "1"}
    verdict = review(pod(container(limits=SHARE | fixed, requests=fixed)))
    assert not [one for one in verdict.operations if one["path"].endswith("/memory")]
    (warning,) = verdict.warnings
    assert "Guaranteed" in warning
    assert str(RAISED_MIB) in warning


def test_a_share_in_percent_gets_a_warning() -> None:
    share = {"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50", "memory": "1Gi"}
    verdict = review(pod(container(limits=share)))
    assert not [one for one in verdict.operations if one["path"].endswith("/memory")]
    (warning,) = verdict.warnings
    assert "container main: resources.limits.memory" in warning
