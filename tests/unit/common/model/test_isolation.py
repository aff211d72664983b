# SPDX-License-Identifier: Apache-2.0
"""Classes of isolation agree with what vendors enforce, and demands select devices by them."""

import msgspec
import pytest

from hami_common.errors import RequestInvalid
from hami_common.model.isolation import (
    BOOKED,
    EXCLUSIVE,
    GRADES,
    HOOK,
    MIG,
    PROPERTIES,
    isolation_of,
    parse_least,
)
from hami_common.model.request import DeviceRequest, DeviceSelector, serves_mode
from hami_common.pods.annotations import MIN_ISOLATION
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import Vendor

VENDORS = Catalog.from_settings().vendors


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)
def test_grades_agree_with_what_the_vendor_enforces(vendor: Vendor) -> None:
    name, can = vendor.name, vendor.capability
    classes = [isolation_of(name, divided=way, exclusive=False) for way in (False, True)]
    for enforced, grades in (
        (can.memory_enforced, {one.memory for one in classes}),
        (can.compute_enforced, {one.compute for one in classes}),
    ):
        assert (grades == {"D"}) == (not enforced)
    assert ("A" in {one.bandwidth for one in classes}) == (name == "nvidia"), "MIG only"


def test_whole_device_is_shared_with_no_other() -> None:
    assert isolation_of("vastai", divided=False, exclusive=True) == EXCLUSIVE
    assert isolation_of("unknown", divided=False, exclusive=False) == BOOKED


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("", ()),
        ("B", (("memory", "B"), ("compute", "B"))),
        (" memory=B , fault=A ", (("fault", "A"), ("memory", "B"))),
        ("bandwidth=D", (("bandwidth", "D"),)),
    ],
)
def test_demand_is_one_grade_or_pairs(text: str, least: tuple[tuple[str, str], ...]) -> None:
    assert parse_least(text, field="f") == least


@pytest.mark.parametrize(
    "text", ["E", "AB", "b", "memory", "memory=", "memory=E", "speed=A", "memory=A,memory=B", "A,"]
)
def test_other_text_is_refused_with_the_fix(text: str) -> None:
    with pytest.raises(RequestInvalid, match="pairs such as memory=B,fault=A") as refused:
        parse_least(text, field="annotation x")
    assert refused.value.field == "annotation x"


@pytest.mark.parametrize("grade", GRADES)
@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize(("mode", "divided"), [("soft", False), ("mig", True)])
def test_device_serves_a_demand_that_its_class_meets(
    name: str, grade: str, mode: str, *, exclusive: bool, divided: bool
) -> None:
    request = DeviceRequest(vendor="nvidia", count=1, memory_mib=1, exclusive=exclusive)
    if exclusive and divided:
        return  # no whole device is given of one in MIG mode
    found = EXCLUSIVE if exclusive else MIG if divided else HOOK
    selector = DeviceSelector(min_isolation=((name, grade),))
    serves = serves_mode(request, selector, mode, divided=divided)
    assert serves == (getattr(found, name) <= grade)


@pytest.mark.parametrize(
    ("least", "serves"),
    [("memory=B", True), ("memory=A", False), ("B", False), ("memory=B,compute=C", True)],
)
def test_limit_of_the_driver_raises_the_grade_of_memory_only(least: str, *, serves: bool) -> None:
    request = DeviceRequest(vendor="nvidia", count=1, memory_mib=1)
    selector = DeviceSelector(min_isolation=parse_least(least, field="f"))
    assert serves_mode(request, selector, "soft", divided=False, memory_cap=True) == serves
    assert not serves_mode(request, selector, "soft", divided=False)
    assert serves_mode(request, selector, "mig", divided=True, memory_cap=True), "has grade A"


def test_class_with_the_drivers_limit_has_a_name_of_its_own() -> None:
    found = isolation_of("nvidia", divided=False, exclusive=False, memory_cap=True)
    assert str(found) == "hook+wall (memory=B compute=C fault=B bandwidth=D)"


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("timeslice", "timeslice (memory=C compute=D fault=B bandwidth=D)"),
        ("mps", "mps (memory=C compute=C fault=D bandwidth=D)"),
        ("soft", "hook (memory=C compute=C fault=B bandwidth=D)"),
    ],
)
def test_class_follows_the_mode_of_the_device(mode: str, words: str) -> None:
    assert str(isolation_of("nvidia", mode=mode, divided=False, exclusive=False)) == words


def asking(demand: str) -> PodView:
    return msgspec.convert(
        {
            "metadata": {"name": "p", "uid": "u", "annotations": {MIN_ISOLATION: demand}},
            "spec": {
                "containers": [
                    {
                        "name": "main",
                        "resources": {"limits": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "9"}},
                    }
                ]
            },
        },
        PodView,
    )


def test_demand_of_a_pod_reaches_the_selectors_of_its_vendors() -> None:
    parsed = Catalog.from_settings().parse_pod(asking("B"))
    assert parsed is not None
    assert parsed.selectors["nvidia"].min_isolation == (("memory", "B"), ("compute", "B"))
    with pytest.raises(RequestInvalid, match=r"annotation hami\.io/min-isolation"):
        Catalog.from_settings().parse_pod(asking("best"))
