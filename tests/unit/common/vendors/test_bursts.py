# SPDX-License-Identifier: Apache-2.0
"""Limits above the request: which pods may have them, and the errors of all others."""

from typing import Any

import msgspec
import pytest

from hami_common.errors import RequestInvalid
from hami_common.model.request import options
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.skus.expansion import Alternative, Expansion, encode
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings

SETTINGS = VendorSettings(nvidia=NvidiaSettings(mig_profiles=("1g.10gb",)))
CATALOG = Catalog.from_settings(SETTINGS)
SHARE = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}
WHOLE = {"nvidia.com/gpu": "1"}
MEMORY, CORES = keys.MEMORY_LIMIT, keys.CORES_LIMIT


def pod(
    containers: dict[str, dict[str, str]],
    annotations: dict[str, str],
    *,
    inits: dict[str, dict[str, str]] | None = None,
) -> PodView:
    def listed(some: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
        return [{"name": name, "resources": {"limits": one}} for name, one in some.items()]

    document = {
        "metadata": {"name": "p", "uid": "u", "annotations": annotations},
        "spec": {"containers": listed(containers), "initContainers": listed(inits or {})},
    }
    return msgspec.convert(document, PodView)


def limits_of(view: PodView) -> list[dict[str, tuple[int, int]]]:
    """Return the limits of each container, for each alternative."""
    request = CATALOG.parse_pod(view)
    assert request is not None
    return [
        {
            one.name: (asked.memory_limit_mib, asked.core_limit_pct)
            for one in choice.containers
            for asked in one.requests
        }
        for choice in options(request)
    ]


@pytest.mark.parametrize(
    ("annotations", "want"),
    [
        ({}, {"main": (0, 0), "side": (0, 0)}),
        ({MEMORY: " "}, {"main": (0, 0), "side": (0, 0)}),
        ({MEMORY: "6000"}, {"main": (6000, 0), "side": (6000, 0)}),
        ({MEMORY: "main=6000"}, {"main": (6000, 0), "side": (0, 0)}),
        ({MEMORY: " main = 6000 , side=3000"}, {"main": (6000, 0), "side": (3000, 0)}),
        ({CORES: "60"}, {"main": (0, 60), "side": (0, 60)}),
        ({CORES: "side=100"}, {"main": (0, 0), "side": (0, 100)}),
        ({MEMORY: "side=4000", CORES: "main=30"}, {"main": (0, 30), "side": (4000, 0)}),
        (
            {MEMORY: "6000", keys.CLASS: "burstable", "nvidia.com/vgpu-mode": "hami-core"},
            {"main": (6000, 0), "side": (6000, 0)},
        ),
        ({MEMORY: "6000", keys.CLASS: "spot"}, {"main": (6000, 0), "side": (6000, 0)}),
    ],
)
def test_limits_are_of_all_containers_or_of_the_named_ones(
    annotations: dict[str, str], want: dict[str, tuple[int, int]]
) -> None:
    assert limits_of(pod({"main": SHARE, "log": {"cpu": "1"}, "side": SHARE}, annotations)) == [
        want
    ]


def test_init_containers_and_each_of_several_devices_have_limits() -> None:
    several = {**SHARE, "nvidia.com/gpu": "2"}
    view = pod({"main": several}, {MEMORY: "load=4000,main=6000"}, inits={"load": SHARE})
    assert limits_of(view) == [{"load": (4000, 0), "main": (6000, 0)}]


def test_limit_of_a_request_in_percent_is_compared_on_the_device() -> None:
    half = {"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50"}
    assert limits_of(pod({"main": half}, {MEMORY: "1"})) == [{"main": (1, 0)}]


MAIN = {"main": SHARE}
WITH_LOG = {"main": SHARE, "log": {"cpu": "1"}}


@pytest.mark.parametrize(
    ("containers", "annotations", "message"),
    [
        (MAIN, {MEMORY: "6Gi"}, "'6Gi' looks like bytes; the unit is MiB, not bytes: write 6144"),
        (MAIN, {MEMORY: "main=6Gi"}, "'6Gi' looks like bytes"),
        (MAIN, {MEMORY: "6000.5"}, "'6000.5' is not a whole number; write a whole number of MiB"),
        (MAIN, {MEMORY: "-1"}, "'-1' is negative"),
        (MAIN, {MEMORY: "0"}, "0 is no limit; write 1 or more, or remove it"),
        (MAIN, {MEMORY: "much"}, "'much' is not a Kubernetes quantity"),
        (MAIN, {MEMORY: "6000,7000"}, "is not a Kubernetes quantity"),
        (MAIN, {MEMORY: "main="}, "'' is not a Kubernetes quantity"),
        (MAIN, {MEMORY: "99999999999"}, "looks like bytes"),
        (MAIN, {MEMORY: "main=6000,7000"}, "'7000' is not a container and its limit"),
        (MAIN, {MEMORY: "main=6000,"}, "'' is not a container and its limit"),
        (MAIN, {MEMORY: "main=6000,main=6000"}, "names container 'main' twice; write one number"),
        (
            MAIN,
            {MEMORY: "side=6000"},
            (
                "names container 'side', which the pod does not have; write one number for all, or"
                " name each of main at most once, such as main=6000"
            ),
        ),
        (WITH_LOG, {CORES: "log=60"}, "names container 'log', which requests no devices; write"),
        (
            MAIN,
            {MEMORY: "2999"},
            "container main requests 3000 MiB, more than its limit of 2999; write at least 3000",
        ),
        (MAIN, {CORES: "29"}, "container main requests 30 percent of one device, more than"),
        (MAIN, {CORES: "101"}, "'101' is too large; write at most 100"),
        (
            {"main": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}},
            {CORES: "60"},
            (
                "container main requests no compute that the limit could exceed; request compute,"
                " such as nvidia.com/gpucores: 30"
            ),
        ),
        (
            MAIN,
            {MEMORY: "6000", keys.CLASS: "guaranteed"},
            (
                "a pod of class guaranteed has no limit above its request; remove it, or the"
                " annotation hami.io/class"
            ),
        ),
        (MAIN, {CORES: "60", keys.CLASS: "guaranteed"}, "a pod of class guaranteed has no limit"),
        ({"main": WHOLE}, {MEMORY: "6000"}, "container main requests whole devices of"),
        ({"main": WHOLE}, {CORES: "100"}, "container main requests whole devices of"),
        (
            {"main": {"nvidia.com/gpu": "1", "nvidia.com/gpucores": "50"}},
            {MEMORY: "6000"},
            "container main requests all memory of devices of nvidia",
        ),
        (
            {"main": SHARE, "side": WHOLE},
            {MEMORY: "6000"},
            (
                "container side requests whole devices of nvidia; remove it, or name"
                " only containers with shares, such as main=6000"
            ),
        ),
        (
            {"main": {"nvidia.com/mig-1g.10gb": "1"}},
            {MEMORY: "6000"},
            "container main requests 1g.10gb of nvidia, whose size is fixed",
        ),
        (
            MAIN,
            {MEMORY: "6000", "nvidia.com/vgpu-mode": "mps"},
            "container main requests devices of nvidia in mode mps, which has no such limits",
        ),
        (
            {"main": {"hygon.com/dcunum": "1", "hygon.com/dcumem": "3000"}},
            {MEMORY: "6000"},
            "container main requests devices of hygon, which have no limits above the request",
        ),
        (
            {"main": {**SHARE, "hygon.com/dcunum": "1", "hygon.com/dcumem": "3000"}},
            {MEMORY: "6000"},
            "container main requests devices of hygon, which have no limits above the request",
        ),
    ],
)
def test_wrong_limit_is_refused_with_annotation_and_fix(
    containers: dict[str, dict[str, str]], annotations: dict[str, str], message: str
) -> None:
    with pytest.raises(RequestInvalid) as caught:
        CATALOG.parse_pod(pod(containers, annotations))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"annotation {next(iter(annotations))}: ")


def neutral(annotations: dict[str, str], **limits: dict[str, str]) -> PodView:
    alternatives = tuple(
        Alternative(vendor=vendor, limits={"main": one}) for vendor, one in limits.items()
    )
    text = encode(Expansion(alternatives=alternatives))
    return pod({"main": {"hami.io/memory": "3000"}}, {**annotations, keys.ALTERNATIVES: text})


HYGON = {"hygon.com/dcunum": "1", "hygon.com/dcumem": "3000"}


def test_limit_of_a_neutral_pod_holds_for_the_alternatives_that_have_it() -> None:
    view = neutral({MEMORY: "6000", CORES: "60"}, hygon=HYGON, nvidia=SHARE)
    assert limits_of(view) == [{"main": (0, 0)}, {"main": (6000, 60)}]
    whole = neutral({MEMORY: "6000"}, nvidia=WHOLE)
    assert limits_of(whole) == [{"main": (0, 0)}]


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({MEMORY: "2000"}, "requests 3000 MiB, more than its limit of 2000"),
        ({MEMORY: "6Gi"}, "looks like bytes"),
        ({MEMORY: "side=6000"}, "names container 'side', which the pod does not have"),
        ({MEMORY: "6000", keys.CLASS: "guaranteed"}, "class guaranteed"),
    ],
)
def test_wrong_limit_of_a_neutral_pod_is_refused(annotations: dict[str, str], message: str) -> None:
    with pytest.raises(RequestInvalid, match=message):
        CATALOG.parse_pod(neutral(annotations, hygon=HYGON, nvidia=SHARE))
