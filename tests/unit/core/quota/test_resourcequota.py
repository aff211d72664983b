# SPDX-License-Identifier: Apache-2.0
"""Amounts that pods count under quotas, and the limits of ResourceQuota objects."""

import json
from typing import Any

import pytest

from hami_common.events.allocation import Account
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import ContainerKind
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.nvidia import Nvidia, NvidiaSettings
from hami_core.quota.resourcequota import (
    Quota,
    QuotaReader,
    Resource,
    amounts_of,
    least_amounts,
    vendors_by_percentage,
)
from tests.support import builders

MEMORY = Resource("nvidia", "memory_mib")
CORE = Resource("nvidia", "core_pct")
DEVICES = Resource("nvidia", "devices")
ALL_MEMORY = Resource("", "memory_mib")


def shares(name: str, kind: ContainerKind, *mib_on: tuple[str, int]) -> ContainerShares:
    return ContainerShares(
        name=name,
        kind=kind,
        shares=tuple(
            Share(vendor="nvidia", uuid=uuid, memory_mib=mib, core_pct=10) for uuid, mib in mib_on
        ),
    )


def read(hard: dict[str, Any], *, vendor: Nvidia | None = None, **spec: Any) -> Quota | None:
    document = {
        "kind": "ResourceQuota",
        "metadata": {"name": "q", "namespace": "team-a", "labels": {"x": "y"}},
        "spec": {"hard": hard, **spec},
        "status": {"used": {"pods": "3"}},
    }
    return QuotaReader(Catalog((vendor or Nvidia(),))).read(json.dumps(document).encode())


def quota(hard: dict[str, Any], *, vendor: Nvidia | None = None, **spec: Any) -> Quota:
    found = read(hard, vendor=vendor, **spec)
    assert found is not None
    return found


# --- counted amounts -----------------------------------------------------------------------------


def test_two_devices_count_twice() -> None:
    amounts = amounts_of((shares("main", "app", ("a", 4096), ("b", 4096)),))
    assert amounts[MEMORY] == amounts[ALL_MEMORY] == 8192
    assert amounts[CORE] == 20
    assert amounts[DEVICES] == 2


def test_init_container_counts_only_where_it_needs_more() -> None:
    pod = (
        shares("i", "init", ("a", 5000)),
        shares("s", "sidecar", ("a", 1000)),
        shares("j", "init", ("a", 3000)),
        shares("m", "app", ("a", 2500)),
    )
    assert amounts_of(pod)[MEMORY] == 5000
    assert amounts_of(pod[1:])[MEMORY] == 4000
    assert amounts_of((*pod[1:], shares("n", "app", ("a", 1000))))[MEMORY] == 4500


def test_devices_of_an_init_container_alone_count_as_the_ledger_books_them() -> None:
    pod = (shares("i", "init", ("a", 5000)), shares("m", "app", ("b", 3000)))
    assert amounts_of(pod)[MEMORY] == 8000


def test_vendors_count_each_and_together() -> None:
    other = Share(vendor="hygon", uuid="d", memory_mib=100)
    amounts = amounts_of(
        (
            ContainerShares(name="m", kind="app", shares=(other,)),
            shares("n", "app", ("a", 50)),
        )
    )
    assert amounts[MEMORY] == 50
    assert amounts[Resource("hygon", "memory_mib")] == 100
    assert amounts[ALL_MEMORY] == 150
    assert amounts[Resource("", "devices")] == 2


def test_request_counts_its_devices() -> None:
    amounts = least_amounts(builders.pod(builders.ask(2, mib=4096, core=30)), {})
    assert (amounts[MEMORY], amounts[CORE], amounts[DEVICES]) == (8192, 60, 2)


def test_request_by_percentage_counts_the_mib_of_the_device() -> None:
    request = builders.pod(builders.ask(2, pct=50))
    assert vendors_by_percentage(request) == ("nvidia",)
    assert least_amounts(request, {"nvidia": 40_000})[MEMORY] == 40_000
    assert MEMORY not in least_amounts(request, {})
    assert vendors_by_percentage(builders.pod(builders.ask(mib=10))) == ()


def test_least_of_a_pod_with_init_containers_is_its_largest_moment() -> None:
    request = builders.pod(
        builders.container(builders.ask(mib=700), name="i", kind="init"),
        builders.container(builders.ask(mib=200), name="s", kind="sidecar"),
        builders.container(builders.ask(mib=300), name="a"),
        builders.container(builders.ask(mib=300), name="b"),
    )
    assert least_amounts(request, {})[MEMORY] == 800
    assert least_amounts(request, {})[DEVICES] == 3


# --- ResourceQuota -------------------------------------------------------------------------------


def test_keys_that_hami_users_write_are_read() -> None:
    found = quota(
        {
            "limits.nvidia.com/gpumem": "6000",
            "limits.nvidia.com/gpucores": "120",
            "limits.nvidia.com/gpu": "3",
            "requests.nvidia.com/gpu": "1",
            "limits.cpu": "4",
            "pods": "10",
        }
    )
    assert (found.namespace, found.name) == ("team-a", "q")
    assert {r: limit.most for r, limit in found.limits.items()} == {
        MEMORY: 6000,
        CORE: 120,
        DEVICES: 3,
    }


def test_quota_without_a_known_key_is_ignored() -> None:
    assert read({"requests.nvidia.com/gpu": "1", "cpu": "4"}) is None


@pytest.mark.parametrize(
    ("text", "most"),
    [("24k", 24_000), ("3M", 3_000_000), (5, 5), ("0", 0), ("8589934592", 1 << 33)],
)
def test_plain_numbers_are_read_as_the_api_server_writes_them(text: str | int, most: int) -> None:
    limit = quota({"limits.nvidia.com/gpumem": text}).limits[MEMORY]
    assert (limit.most, limit.problem) == (most, "")


@pytest.mark.parametrize(
    ("text", "problem"), [("10Gi", "write 10240"), ("1500m", "whole"), ("-1", "negative")]
)
def test_unreadable_value_allows_nothing_and_names_the_fix(text: str, problem: str) -> None:
    limit = quota({"limits.nvidia.com/gpumem": text}).limits[MEMORY]
    assert limit.most == 0
    assert problem in limit.problem


def test_memory_factor_multiplies_the_limit() -> None:
    vendor = Nvidia(NvidiaSettings(memory_factor=256))
    found = quota({"limits.nvidia.com/gpumem": "10", "limits.nvidia.com/gpu": "10"}, vendor=vendor)
    assert found.limits[MEMORY].most == 2560
    assert found.limits[DEVICES].most == 10


def test_of_two_spellings_the_least_holds() -> None:
    found = quota({"limits.nvidia.com/gpucores": "50", "limits.nvidia.com/gpucore": "40"})
    assert found.limits[CORE].most == 40


@pytest.mark.parametrize(
    ("spec", "inside", "outside"),
    [
        ({"scopes": ["Terminating"]}, Account(is_terminating=True), Account()),
        ({"scopes": ["NotTerminating"]}, Account(), Account(is_terminating=True)),
        ({"scopes": ["BestEffort"]}, Account(is_best_effort=True), Account()),
        ({"scopes": ["NotBestEffort"]}, Account(), Account(is_best_effort=True)),
        (
            {"scopes": ["Terminating", "BestEffort"]},
            Account(is_terminating=True, is_best_effort=True),
            Account(is_terminating=True),
        ),
        ({"scopes": ["PriorityClass"]}, Account(priority_class="high"), Account()),
    ],
)
def test_scopes_say_which_pods_count(
    spec: dict[str, Any], inside: Account, outside: Account
) -> None:
    found = quota({"limits.nvidia.com/gpu": "1"}, **spec)
    assert found.counts(inside)
    assert not found.counts(outside)


@pytest.mark.parametrize(
    ("operator", "values", "high", "none"),
    [
        ("In", ["high"], True, False),
        ("In", ["low"], False, False),
        ("NotIn", ["high"], False, True),
        ("Exists", None, True, False),
        ("DoesNotExist", None, False, True),
    ],
)
def test_scope_selector_matches_the_priority_class(
    operator: str, values: list[str] | None, *, high: bool, none: bool
) -> None:
    expression = {"scopeName": "PriorityClass", "operator": operator, "values": values}
    found = quota({"limits.nvidia.com/gpu": "1"}, scopeSelector={"matchExpressions": [expression]})
    assert found.counts(Account(priority_class="high")) is high
    assert found.counts(None) is none


def test_scope_that_no_share_has_counts_no_pod() -> None:
    found = quota({"limits.nvidia.com/gpu": "1"}, scopes=["CrossNamespacePodAffinity"])
    assert not found.counts(Account())
