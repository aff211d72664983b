# SPDX-License-Identifier: Apache-2.0
"""Laws of the expansion of neutral pods, for any catalog and any demand.

The same pod and catalog give the same expansion, a second admission changes nothing, alternatives
keep the catalog's order, and each of them asks its vendor for no less than the demand.
"""

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from jsonpatch import apply_patch

from hami_common.model.request import options
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.skus.catalog import SkuCatalog, SkuFile
from hami_common.vendors.catalog import Catalog
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, Verdict, mutate

CATALOG = Catalog.from_settings()
VENDORS: tuple[dict[str, Any], ...] = (
    {"vendor": "nvidia", "types": ["A100"]},
    {"vendor": "hygon", "devices": 1},
    {"vendor": "cambricon", "devices": 1},
    {"vendor": "ascend", "resource": "huawei.com/Ascend910B4", "compute_pct": 0, "devices": 1},
    {"vendor": "biren", "memory_mib": 0, "compute_pct": 0},
)
NEUTRAL = tuple({k: v for k, v in one.items() if k in ("vendor", "resource")} for one in VENDORS)
Document = dict[str, Any]


@st.composite
def catalogs(draw: st.DrawFn) -> SkuCatalog:
    """One SKU and the neutral alternatives, both over some vendors in some order."""
    sku = {
        "name": "s",
        "version": draw(st.integers(1, 9)),
        "devices": draw(st.integers(1, 4)),
        "memory_mib": draw(st.integers(1, 16_384)),
        "compute_pct": draw(st.integers(0, 99)),
        "alternative": draw(
            st.lists(st.sampled_from(VENDORS), min_size=1, unique_by=lambda one: one["vendor"])
        ),
    }
    neutral = draw(st.lists(st.sampled_from(NEUTRAL), unique_by=lambda one: one["vendor"]))
    file = msgspec.convert({"sku": [sku], "neutral": neutral}, SkuFile)
    return SkuCatalog(file, vendors=CATALOG)


_asks: st.SearchStrategy[dict[str, str]] = st.one_of(
    st.just({"sku.hami.io/s": "1"}),
    st.fixed_dictionaries(
        {"hami.io/memory": st.integers(1, 16_384).map(str)},
        optional={
            "hami.io/accelerators": st.integers(1, 3).map(str),
            "hami.io/compute": st.integers(1, 99).map(str),
        },
    ),
)


def pod_of(limits: dict[str, str], *, with_requests: bool) -> Document:
    resources = {"limits": limits, **({"requests": dict(limits)} if with_requests else {})}
    containers = [{"name": "main", "image": "i", "resources": resources}, {"name": "side"}]
    return {"metadata": {"name": "p"}, "spec": {"containers": containers}}


def review(pod: Document, skus: SkuCatalog) -> Verdict:
    return mutate(
        pod,
        msgspec.convert(pod, PodView),
        catalog=CATALOG,
        skus=skus,
        policy=AdmissionPolicy(),
        at=Circumstances(traceparent="", claim=""),
    )


@given(skus=catalogs(), limits=_asks, with_requests=st.booleans())
def test_expansion_is_deterministic_idempotent_and_enough(
    *, skus: SkuCatalog, limits: dict[str, str], with_requests: bool
) -> None:
    pod = pod_of(limits, with_requests=with_requests)
    verdict = review(pod, skus)
    assert review(pod, skus).operations == verdict.operations
    if not verdict.allowed:
        assert not any(name.startswith("sku.") for name in limits), verdict.message
        return
    made: Document = apply_patch(pod, list(verdict.operations))
    assert review(made, skus).operations == ()
    written = made["spec"]["containers"][0]["resources"]
    assert {name.partition("/")[0] for name in written["limits"]} == {"hami.io"}
    assert written.get("requests", written["limits"]) == written["limits"]

    listed = [one["vendor"] for one in _expansion(made)["alternatives"]]
    is_sku = "sku.hami.io/s" in limits
    order = [one.vendor for one in (skus.skus[0].alternative if is_sku else skus.file.neutral)]
    assert listed == [vendor for vendor in order if vendor in listed]
    assert not is_sku or listed == order
    request = CATALOG.parse_pod(msgspec.convert(made, PodView))
    assert request is not None
    wanted = int(written["limits"].get("hami.io/memory", "0"))
    for vendor, choice in zip(listed, options(request), strict=True):
        (asked,) = choice.containers[0].requests
        assert asked.vendor == vendor
        assert asked.memory_mib >= wanted or asked.memory_pct == 100


def _expansion(pod: Document) -> Document:
    found: Document = json.loads(pod["metadata"]["annotations"][keys.ALTERNATIVES])
    return found
