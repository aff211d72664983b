# SPDX-License-Identifier: Apache-2.0
"""Quotas of every vendor of the catalog, by the resource names of its users."""

import json

import pytest

from hami_common.model.placement import ContainerShares, Share
from hami_common.pods.podview import ContainerView, PodSpecView, PodView, ResourcesView
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_core.ledger.podfacts import account_of
from hami_core.quota.resourcequota import (
    QuotaReader,
    Resource,
    amounts_of,
    count_resources,
    least_amounts,
)

CATALOG = Catalog.from_settings()


def limit_of(key: str, value: str) -> tuple[Resource, int, str]:
    document = {
        "metadata": {"name": "q", "namespace": "n"},
        "spec": {"hard": {f"limits.{key}": value}},
    }
    quota = QuotaReader(CATALOG).read(json.dumps(document).encode())
    assert quota is not None, key
    ((resource, limit),) = quota.limits.items()
    return resource, limit.most, limit.problem


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            name
            for vendor in CATALOG.vendors
            for family in vendor.families
            for name in (family.count, family.memory, family.cores)
            if name
        }
    ),
)
def test_every_count_memory_and_compute_resource_can_be_limited(name: str) -> None:
    resource, most, problem = limit_of(name, "0")
    assert most == 0
    assert resource.vendor
    assert not problem or "percentage of a device" in problem


def test_limit_is_in_the_units_of_the_vendor() -> None:
    """Moore Threads count memory in blocks of 512 MiB and compute in sixteenths of a device."""
    assert limit_of("mthreads.com/sgpu-memory", "4")[1] == 2048
    assert limit_of("mthreads.com/sgpu-core", "8")[1] == 50


def pod(*containers: tuple[str, dict[str, str | int | float]]) -> PodView:
    return PodView(
        spec=PodSpecView(
            containers=[
                ContainerView(name=name, resources=ResourcesView(limits=limits))
                for name, limits in containers
            ]
        )
    )


def test_vendor_with_several_count_resources_is_counted_by_each() -> None:
    view = pod(
        ("a", {"huawei.com/Ascend910B4": "1", "huawei.com/Ascend910B4-memory": "8192"}),
        ("b", {"huawei.com/Ascend310P": "1", "huawei.com/Ascend310P-memory": "3072"}),
        ("c", {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "100"}),
    )
    account = account_of(view, count_resources(CATALOG))
    assert account is not None
    assert account.resources == (
        ("a", "ascend", "huawei.com/Ascend910B4"),
        ("b", "ascend", "huawei.com/Ascend310P"),
    )
    held = tuple(
        ContainerShares(
            name=name, kind="app", shares=(Share(vendor=vendor, uuid=uuid, memory_mib=mib),)
        )
        for name, vendor, uuid, mib in (
            ("a", "ascend", "x", 8192),
            ("b", "ascend", "y", 3072),
            ("c", "nvidia", "z", 100),
        )
    )
    amounts = amounts_of(held, account)
    for key, mib in (("Ascend910B4", 8192), ("Ascend310P", 3072)):
        resource, _, _ = limit_of(f"huawei.com/{key}-memory", "1")
        assert amounts[resource] == mib
    assert amounts[Resource("ascend", "memory_mib")] == 11264
    assert amounts[Resource("", "memory_mib")] == 11364
    request = CATALOG.parse_pod(view)
    assert request is not None
    least = least_amounts(request, {}, account)
    assert least[Resource("huawei.com/Ascend310P", "memory_mib")] == 3072
    assert least[Resource("ascend", "devices")] == 2


def test_vendor_with_one_count_resource_needs_nothing_in_the_record() -> None:
    view = pod(("c", {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "100"}))
    assert account_of(view, count_resources(CATALOG)) is None


def test_quota_on_either_dialect_counts_both() -> None:
    settings = VendorSettings(nvidia=NvidiaSettings(dialects=("volcano",)))
    reader = QuotaReader(Catalog.from_settings(settings))
    found = []
    for name in ("nvidia.com/gpumem", "volcano.sh/vgpu-memory"):
        hard = {f"limits.{name}": "4000"}
        document = {"metadata": {"name": "q", "namespace": "n"}, "spec": {"hard": hard}}
        quota = reader.read(json.dumps(document).encode())
        assert quota is not None
        found.append({resource: limit.most for resource, limit in quota.limits.items()})
    assert found[0] == found[1]
    assert count_resources(Catalog.from_settings(settings)) == count_resources(CATALOG)
