# SPDX-License-Identifier: Apache-2.0
"""Admission of pods that ask by SKU or for neutral resources."""

import json
from typing import Any

import msgspec
import pytest
from jsonpatch import apply_patch

from hami_common.model.request import options
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.skus.catalog import SkuCatalog, parse
from hami_common.vendors.catalog import Catalog
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, Verdict, mutate
from hami_webhook.core.validate import validate_update

CATALOG = Catalog.from_settings()
TEXT = """
[[sku]]
name = "s-8g"
version = 3
class = "spot"
memory_mib = 8192
compute_pct = 25
min_isolation = "memory=D"
[[sku.alternative]]
vendor = "nvidia"
types = ["A100"]
[[sku.alternative]]
vendor = "ascend"
resource = "huawei.com/Ascend910B4"
compute_pct = 0

[[sku]]
name = "whole"
[[sku.alternative]]
vendor = "nvidia"

[[sku]]
name = "burst"
memory_mib = 4096
memory_limit_mib = 12288
[[sku.alternative]]
vendor = "nvidia"
[[sku.alternative]]
vendor = "ascend"
resource = "huawei.com/Ascend910B4"

[[sku]]
name = "old"
version = 7
state = "retired"
successor = "s-8g"
[[sku.alternative]]
vendor = "nvidia"

[[neutral]]
vendor = "nvidia"
[[neutral]]
vendor = "ascend"
resource = "huawei.com/Ascend910B4"
"""
SKUS = parse(TEXT, vendors=CATALOG)
ONLY = parse(f"required = true\n{TEXT}", vendors=CATALOG)
NEUTRAL = {"hami.io/accelerators": "1", "hami.io/memory": "8192", "hami.io/compute": "25"}
Document = dict[str, Any]


def container(name: str = "main", *, requests: bool = False, **limits: str) -> Document:
    names = {key.replace("__", "/").replace("_", "-"): value for key, value in limits.items()}
    names = {key.replace("sku/", "sku.hami.io/"): value for key, value in names.items()}
    names = {key.replace("hami/", "hami.io/"): value for key, value in names.items()}
    one: Document = {"name": name, "image": "app"}
    if names:
        one["resources"] = {"limits": names, **({"requests": dict(names)} if requests else {})}
    return one


def pod(*containers: Document, annotations: dict[str, str] | None = None, **spec: Any) -> Document:
    metadata: Document = {"name": "p", "namespace": "team"}
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": {"containers": list(containers), **spec}}


def review(document: Document, *, skus: SkuCatalog = SKUS, **policy: Any) -> Verdict:
    return mutate(
        document,
        msgspec.convert(document, PodView),
        catalog=CATALOG,
        skus=skus,
        policy=AdmissionPolicy(**policy),
        at=Circumstances(traceparent="", claim="hami-0123456789abcdef"),
    )


def admitted(document: Document, **options: Any) -> Document:
    verdict = review(document, **options)
    assert verdict.allowed, verdict.message
    made: Document = apply_patch(document, list(verdict.operations))
    assert review(made, **options).operations == (), "a second call changes nothing"
    return made


def expansion(document: Document) -> Document:
    found: Document = json.loads(document["metadata"]["annotations"][keys.ALTERNATIVES])
    return found


BY_RESOURCE = pod(container(sku__s_8g="1", requests=True))
BY_ANNOTATION = pod(container(), annotations={keys.SKU: "s-8g"})
WITHOUT_REQUESTS = pod(
    {
        "name": "main",
        "image": "app",
        "resources": {"limits": {"sku.hami.io/s-8g": 1}, "requests": None},
    }
)
BY_BOTH = pod(container("side"), container(sku__s_8g="1"), annotations={keys.SKU: "s-8g"})


@pytest.mark.parametrize("asking", [BY_RESOURCE, BY_ANNOTATION, BY_BOTH, WITHOUT_REQUESTS])
def test_sku_becomes_neutral_resources_and_alternatives(asking: Document) -> None:
    made = admitted(asking)
    assert made["spec"]["schedulerName"] == "hami-scheduler"
    assert made["metadata"]["annotations"][keys.SKU] == "s-8g"
    main = next(one for one in made["spec"]["containers"] if one["name"] == "main")
    assert main["resources"]["limits"] == NEUTRAL
    assert (main["resources"].get("requests") or NEUTRAL) == NEUTRAL
    assert expansion(made) == {
        "sku": "s-8g@3",
        "class": "spot",
        "min_isolation": [["memory", "D"]],
        "alternatives": [
            {
                "vendor": "nvidia",
                "types": ["A100"],
                "limits": {
                    "main": {
                        "nvidia.com/gpu": "1",
                        "nvidia.com/gpumem": "8192",
                        "nvidia.com/gpucores": "25",
                    }
                },
            },
            {
                "vendor": "ascend",
                "limits": {
                    "main": {
                        "huawei.com/Ascend910B4": "1",
                        "huawei.com/Ascend910B4-memory": "8192",
                    }
                },
            },
        ],
    }


def test_other_resources_of_the_container_stay() -> None:
    made = admitted(pod(container(sku__whole="1", cpu="2", requests=True)))
    resources = made["spec"]["containers"][0]["resources"]
    assert resources == {
        "limits": {"cpu": "2", "hami.io/accelerators": "1"},
        "requests": {"cpu": "2", "hami.io/accelerators": "1"},
    }


def test_neutral_resources_get_a_count_and_the_vendors_of_the_catalog() -> None:
    made = admitted(
        pod(container(hami__memory="2000"), container("second", hami__accelerators="1"))
    )
    first, second = (one["resources"]["limits"] for one in made["spec"]["containers"])
    assert first == {"hami.io/accelerators": "1", "hami.io/memory": "2000"}
    assert second == {"hami.io/accelerators": "1"}
    found = expansion(made)
    assert "sku" not in found
    assert [one["vendor"] for one in found["alternatives"]] == ["nvidia", "ascend"]
    assert found["alternatives"][1]["limits"] == {
        "main": {"huawei.com/Ascend910B4": "1", "huawei.com/Ascend910B4-memory": "2000"},
        "second": {"huawei.com/Ascend910B4": "1"},
    }


@pytest.mark.parametrize(
    ("asking", "message"),
    [
        (pod(container(sku__s_9g="1")), "'s-9g' is not a SKU of this cluster; did you mean s-8g?"),
        (pod(container(sku__old="1")), "SKU old@7 is retired; ask for s-8g"),
        (pod(container(), annotations={keys.SKU: "old"}), "annotation hami.io/sku: SKU old@7"),
        (pod(container(sku__s_8g="2")), "'2' is not 1; write 1"),
        (pod(container(sku__s_8g="1", sku__whole="1")), "stands beside sku.hami.io/s-8g"),
        (
            pod(container(sku__s_8g="1"), annotations={keys.SKU: "whole"}),
            "asks for the SKUs s-8g and whole",
        ),
        (
            pod(container(sku__s_8g="1"), container("second", sku__s_8g="1")),
            "container second: resources.limits: asks for devices beside container main",
        ),
        (
            pod(container(), container("second"), annotations={keys.SKU: "s-8g"}),
            "write sku.hami.io/s-8g: 1 in the limits of the one that gets the devices",
        ),
        (
            pod(container(hami__memory="9000", sku__s_8g="1")),
            "resources.limits[hami.io/memory]: '9000' is not what SKU s-8g@3 has; remove it",
        ),
        (
            pod(
                {"name": "m", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
                container("second", sku__s_8g="1"),
            ),
            "container m: resources.limits: asks for nvidia in a pod that asks without a vendor",
        ),
        (
            pod(container(sku__s_8g="1"), annotations={"nvidia.com/use-gputype": "T4"}),
            "selects T4, and so does the SKU",
        ),
        (
            pod(container(sku__s_8g="1"), annotations={keys.CLASS: "guaranteed"}),
            "guaranteed is not the class of SKU s-8g@3",
        ),
        (
            pod(container(hami__memory="8192"), annotations={keys.CLASS: "gold"}),
            "annotation hami.io/class: 'gold' is unknown",
        ),
        (
            pod(container(sku__burst="1"), annotations={keys.MEMORY_LIMIT: "9000"}),
            "annotation hami.io/memory-limit: SKU burst@1 settles the limits of the pod; remove it",
        ),
        (
            pod(container(sku__s_8g="1"), annotations={keys.CORES_LIMIT: "50"}),
            "annotation hami.io/cores-limit: SKU s-8g@3 settles the limits of the pod; remove it",
        ),
        (
            pod(container(hami__memory="8192"), annotations={keys.MEMORY_LIMIT: "8191"}),
            "annotation hami.io/memory-limit: container main requests 8192 MiB, more than its",
        ),
        (pod(container(hami__memory="3Gi")), "looks like bytes"),
        (pod(container(hami__accelerators="0")), "0 is no request"),
        (pod(container(hami__compute="300")), "container main: resources.limits[hami.io/compute]"),
        (
            pod(container(sku__s_8g="1"), annotations={keys.ALLOCATION_MODE: "dra"}),
            "a claim names devices of one vendor",
        ),
    ],
)
def test_wrong_request_is_denied_with_field_and_fix(asking: Document, message: str) -> None:
    verdict = review(asking)
    assert not verdict.allowed
    assert message in verdict.message


def test_cluster_may_give_devices_by_sku_only() -> None:
    for asking in (
        pod({"name": "m", "resources": {"limits": {"nvidia.com/gpu": "1"}}}),
        pod(container(hami__memory="2000")),
    ):
        verdict = review(asking, skus=ONLY)
        assert not verdict.allowed
        assert (
            "by SKU only; write sku.hami.io/NAME: 1 with one of burst, s-8g, whole"
            in verdict.message
        )
    assert review(BY_RESOURCE, skus=ONLY).allowed
    assert review(pod(container()), skus=ONLY).allowed, "a pod without devices"


def test_pods_of_schedulers_that_are_not_ours_are_left_alone() -> None:
    verdict = review({**BY_RESOURCE, "spec": {**BY_RESOURCE["spec"], "schedulerName": "volcano"}})
    assert verdict.allowed
    assert verdict.operations == ()


def test_expansion_that_a_user_wrote_is_replaced_or_removed() -> None:
    forged = {keys.ALTERNATIVES: '{"sku":"free@1","alternatives":[]}'}
    made = admitted(pod(container(sku__whole="1"), annotations=forged))
    assert expansion(made)["sku"] == "whole@1"
    plain = admitted(
        pod({"name": "m", "resources": {"limits": {"nvidia.com/gpu": "1"}}}, annotations=forged)
    )
    assert keys.ALTERNATIVES not in plain["metadata"]["annotations"]
    bare = admitted(pod(container(), annotations=forged))
    assert "annotations" not in bare["metadata"]
    other = admitted(pod(container(), annotations={**forged, "a": "b"}))
    assert other["metadata"]["annotations"] == {"a": "b"}


def test_new_version_of_a_sku_reaches_pods_that_are_admitted_later_only() -> None:
    made = admitted(BY_RESOURCE)
    later = parse(TEXT.replace("version = 3", "version = 4"), vendors=CATALOG)
    assert expansion(admitted(BY_RESOURCE, skus=later))["sku"] == "s-8g@4"
    view = msgspec.convert(made, PodView)
    changed = apply_patch(
        made,
        [
            {
                "op": "replace",
                "path": "/metadata/annotations/hami.io~1alternatives",
                "value": "{}",
            }
        ],
    )
    verdict = validate_update(
        view,
        msgspec.convert(changed, PodView),
        user="alice",
        policy=AdmissionPolicy(),
        catalog=CATALOG,
    )
    assert not verdict.allowed
    assert "metadata.annotations[hami.io/alternatives]" in verdict.message


def test_variables_of_every_alternative_are_removed_and_hidden() -> None:
    one = container(sku__s_8g="1")
    one["env"] = [
        {"name": "ASCEND_VISIBLE_DEVICES", "value": "0"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
    ]
    verdict = review(pod(one, container("side")), hide_devices_from_others=True)
    made = apply_patch(pod(one, container("side")), list(verdict.operations))
    main, side = made["spec"]["containers"]
    assert main.get("env", []) == []
    hidden = {variable["name"] for variable in side["env"]}
    assert {"NVIDIA_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"} <= hidden


def test_memory_limits_are_raised_for_recall_by_the_vendor_that_has_it() -> None:
    one = container(sku__s_8g="1", memory="1Gi")
    swapped = TEXT.replace('vendor = "nvidia"\ntypes = ["A100"]', 'vendor = "hygon"')
    swapped = swapped.replace(
        'vendor = "hygon"', 'vendor = "hygon"\n[[sku.alternative]]\nvendor = "nvidia"', 1
    )
    made = admitted(pod(one), skus=parse(swapped, vendors=CATALOG), add_recall_memory=True)
    limits = made["spec"]["containers"][0]["resources"]["limits"]
    assert limits["memory"] == f"{1024 + 8192 + 64}Mi"


def test_limit_of_a_sku_is_in_the_alternatives_that_have_it() -> None:
    made = admitted(pod(container("side"), container(sku__burst="1")))
    found = [one.get("annotations") for one in expansion(made)["alternatives"]]
    assert found == [{"hami.io/memory-limit": "main=12288"}, None]
    request = CATALOG.parse_pod(msgspec.convert(made, PodView))
    assert request is not None
    limits = [one.containers[0].requests[0].memory_limit_mib for one in options(request)]
    assert limits == [12288, 0]


def test_limit_of_a_neutral_pod_stays_its_annotation() -> None:
    made = admitted(pod(container(hami__memory="4096"), annotations={keys.MEMORY_LIMIT: "12288"}))
    assert made["metadata"]["annotations"][keys.MEMORY_LIMIT] == "12288"
    request = CATALOG.parse_pod(msgspec.convert(made, PodView))
    assert request is not None
    limits = [one.containers[0].requests[0].memory_limit_mib for one in options(request)]
    assert limits == [12288, 0]
