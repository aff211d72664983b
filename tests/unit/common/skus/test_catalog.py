# SPDX-License-Identifier: Apache-2.0
"""The catalog of SKUs: what a SKU expands to, and errors that name the field and the fix."""

import re

import pytest

from hami_common.errors import RequestInvalid, SettingsInvalid
from hami_common.skus.catalog import Demand, SkuCatalog, parse
from hami_common.vendors.catalog import Catalog, VendorSettings

VENDORS = Catalog.from_settings()
_ASCEND = '[[sku.alternative]]\nvendor = "ascend"\nresource = "huawei.com/Ascend910B4"'
GOOD = """
currency = "USD"

[[sku]]
name = "s-8g"
version = 2
class = "guaranteed"
devices = 2
memory_mib = 8192
compute_pct = 25
link = "numa"
min_isolation = "memory=C"
price_hour = 0.4
[[sku.alternative]]
vendor = "nvidia"
types = ["A100"]
[[sku.alternative]]
vendor = "cambricon"
devices = 1
compute_pct = 30
[[sku.alternative]]
vendor = "biren"
memory_mib = 0
compute_pct = 0

[[sku]]
name = "old"
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


def catalog_of(text: str) -> SkuCatalog:
    return parse(text, vendors=VENDORS)


def test_sku_expands_to_the_limits_of_each_vendor_in_order() -> None:
    catalog = catalog_of(GOOD)
    sku = catalog.active("s-8g", where="pod")
    assert sku.title == "s-8g@2"
    found = catalog.expand(sku, "main")
    assert [(one.vendor, one.types, one.limits["main"]) for one in found] == [
        (
            "nvidia",
            ("A100",),
            {
                "nvidia.com/gpu": "2",
                "nvidia.com/gpumem": "8192",
                "nvidia.com/gpucores": "25",
            },
        ),
        (
            "cambricon",
            (),
            {
                "cambricon.com/vmlu": "1",
                "cambricon.com/mlu.smlu.vmemory": "32",
                "cambricon.com/mlu.smlu.vcore": "30",
            },
        ),
        ("biren", (), {"birentech.com/gpu": "2"}),
    ]


def test_neutral_demand_expands_to_the_vendors_that_can_serve_it() -> None:
    catalog = catalog_of(GOOD)
    both = catalog.expand_neutral({"main": Demand(memory_mib=4096)})
    assert [one.vendor for one in both] == ["nvidia", "ascend"]
    several = catalog.expand_neutral({"main": Demand(devices=2, memory_mib=4096)})
    assert [one.vendor for one in several] == ["nvidia"], "a part of one chip only"


def test_neutral_demand_without_vendors_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="names no vendor for them"):
        catalog_of("").expand_neutral({"main": Demand()})


def test_unknown_and_retired_skus_are_refused_with_what_to_write() -> None:
    catalog = catalog_of(GOOD)
    with pytest.raises(RequestInvalid, match=re.escape("is not a SKU of this cluster; did you")):
        catalog.active("s-8gb", where="pod")
    with pytest.raises(RequestInvalid, match=re.escape("SKU old@1 is retired; ask for s-8g")):
        catalog.active("old", where="pod")


def changed(before: str, after: str) -> str:
    assert before in GOOD
    return GOOD.replace(before, after, 1)


@pytest.mark.parametrize(
    ("text", "field", "part"),
    [
        ("[[sku]", "catalog of SKUs", "is not TOML"),
        (
            changed(
                '[[neutral]]\nvendor = "nvidia"',
                '[[neutral]]\nvendor = "nvidia"\nmemory_limit_mib = 9000',
            ),
            "neutral 1 (nvidia)",
            "which the pod itself gives",
        ),
        (
            changed('currency = "USD"', 'currencies = "USD"'),
            "catalog of SKUs: currencies",
            "currency",
        ),
        (changed("devices = 2", "device = 2"), "sku s-8g: device", "did you mean devices"),
        (changed("devices = 2", "devices = 0"), "sku s-8g: devices", "outside 1..64"),
        (changed("devices = 2", 'devices = "2"'), "sku[0].devices", "Expected `int`"),
        (changed("compute_pct = 25", "compute_pct = 125"), "sku s-8g: compute_pct", "0..100"),
        (changed("version = 2", "version = 0"), "sku s-8g: version", "below 1"),
        (changed('name = "s-8g"', 'name = "S 8G"'), "sku 'S 8G': name", "lower case"),
        (changed('name = "old"', 'name = "s-8g"'), "sku s-8g: name", "is there twice"),
        (changed('class = "guaranteed"', 'class = "gold"'), "sku s-8g: class", "burstable"),
        (changed('state = "retired"', 'state = "off"'), "sku old: state", "retired"),
        (changed('successor = "s-8g"', 'successor = "s-9"'), "sku old: successor", "s-8g"),
        (changed('successor = "s-8g"', 'successor = "old"'), "sku old: successor", "another SKU"),
        (changed("price_hour = 0.4", "price_hour = -1.0"), "sku s-8g: price_hour", "no price"),
        (changed("price_hour = 0.4", "price_hour = nan"), "sku s-8g: price_hour", "no price"),
        (changed('currency = "USD"', ""), "currency", "ISO 4217"),
        (changed('link = "numa"', 'link = "near"'), "sku[0].link", "Invalid enum value"),
        (changed('"memory=C"', '"memory=X"'), "sku s-8g: min_isolation", "grade"),
        (
            changed('vendor = "nvidia"', 'vendor = "nvida"'),
            "sku s-8g: alternative 1 (nvida): vendor",
            "did you mean nvidia",
        ),
        (
            changed("memory_mib = 0\ncompute_pct = 0", "compute_pct = 0"),
            "sku s-8g: alternative 3 (biren): memory_mib",
            "write memory_mib = 0",
        ),
        (
            changed("memory_mib = 0\ncompute_pct = 0", "memory_mib = 0"),
            "sku s-8g: alternative 3 (biren): compute_pct",
            "write compute_pct = 0",
        ),
        (
            changed('vendor = "biren"', 'vendor = "ascend"\nresource = "huawei.com/Ascend"'),
            "sku s-8g: alternative 3 (ascend): resource",
            "count resource of ascend",
        ),
        (
            changed('vendor = "biren"', 'vendor = "nvidia"\nannotations = { "hami.io/x" = "1" }'),
            "sku s-8g: alternative 3 (nvidia): annotations",
            "not the vendor's",
        ),
        (
            changed(
                '[[neutral]]\nvendor = "nvidia"', '[[neutral]]\nvendor = "nvidia"\ndevices = 1'
            ),
            "neutral 1 (nvidia)",
            "which the pod itself gives",
        ),
        ('[[sku]]\nname = "a"\nalternative = []', "sku a: alternative", "names no vendor"),
        (
            f'[[sku]]\nname = "a"\n{_ASCEND}\n{_ASCEND.replace("910B4", "310P")}',
            "sku a: alternative 2 (ascend): resource",
            "a SKU for each resource",
        ),
        (
            f'[[sku]]\nname = "a"\ncompute_pct = 20\nmemory_mib = 4096\n{_ASCEND}',
            "sku a: alternative 1 (ascend): resources.limits[huawei.com/Ascend910B4-core]",
            "follows from its memory",
        ),
    ],
)
def test_wrong_catalog_is_refused_with_field_and_fix(text: str, field: str, part: str) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        catalog_of(text)
    assert caught.value.field == field
    assert part in f"{caught.value.problem}; {caught.value.fix}"


def test_ignored_vendor_and_mixed_runtime_classes_are_refused() -> None:
    text = '[[sku]]\nname = "a"\n[[sku.alternative]]\nvendor = "biren"'
    ignoring = Catalog.from_settings(VendorSettings(ignored=("biren",)))
    with pytest.raises(SettingsInvalid, match=re.escape("vendors.ignored")):
        parse(text, vendors=ignoring)
    from hami_common.vendors.nvidia import NvidiaSettings  # noqa: PLC0415 - one test needs it

    classes = Catalog.from_settings(VendorSettings(nvidia=NvidiaSettings(runtime_class="nvidia")))
    with pytest.raises(SettingsInvalid, match="runtime class"):
        parse(f'{text}\n[[sku.alternative]]\nvendor = "nvidia"', vendors=classes)


def test_soft_shares_of_ascend_are_asked_for_by_annotation() -> None:
    catalog = catalog_of(
        '[[sku]]\nname = "a"\ncompute_pct = 20\nmemory_mib = 4096\n'
        '[[sku.alternative]]\nvendor = "ascend"\nresource = "huawei.com/Ascend910B4"\n'
        'annotations = { "huawei.com/vnpu-mode" = "hami-core" }'
    )
    (one,) = catalog.expand(catalog.skus[0], "main")
    assert one.annotations == {"huawei.com/vnpu-mode": "hami-core"}


BURST = """
[[sku]]
name = "b"
memory_mib = 4096
compute_pct = 25
memory_limit_mib = 12288
compute_limit_pct = 75
[[sku.alternative]]
vendor = "nvidia"
[[sku.alternative]]
vendor = "nvidia"
types = ["T4"]
memory_limit_mib = 8192
compute_limit_pct = 0
[[sku.alternative]]
vendor = "nvidia"
memory_mib = 0
compute_pct = 0
[[sku.alternative]]
vendor = "hygon"
"""


def test_limits_above_the_demand_hold_for_the_alternatives_that_have_them() -> None:
    (sku,) = (catalog := catalog_of(BURST)).skus
    found = [one.annotations for one in catalog.expand(sku, "main")]
    assert found == [
        {"hami.io/memory-limit": "main=12288", "hami.io/cores-limit": "main=75"},
        {"hami.io/memory-limit": "main=8192"},
        {},
        {},
    ]


@pytest.mark.parametrize(
    ("before", "after", "field", "part"),
    [
        ("_limit_mib = 12288", "_limit_mib = -1", "sku b: memory_limit_mib", "0..16777216"),
        ("_limit_pct = 75", "_limit_pct = 101", "sku b: compute_limit_pct", "0..100"),
        (
            "_limit_mib = 12288",
            "_limit_mib = 4000",
            "sku b: alternative 1 (nvidia): memory_limit_mib",
            "requests 4096 MiB, more than its limit of 4000; write at least 4096",
        ),
        (
            "_limit_pct = 75",
            "_limit_pct = 20",
            "sku b: alternative 1 (nvidia): compute_limit_pct",
            "requests 25 percent of one device, more than its limit of 20",
        ),
        (
            "_limit_pct = 75",
            '_limit_pct = 75\nclass = "guaranteed"',
            "sku b: memory_limit_mib",
            "class guaranteed has no limit above its request; remove it, or write class",
        ),
        (
            'vendor = "hygon"',
            'vendor = "hygon"\nmemory_limit_mib = 8192',
            "sku b: alternative 4 (hygon): memory_limit_mib",
            "requests devices of hygon, which have no limits above the request; remove it",
        ),
        (
            "memory_mib = 0\ncompute_pct = 0",
            "compute_pct = 0",
            "sku b: alternative 3 (nvidia): compute_limit_pct",
            "requests no compute",
        ),
        (
            BURST,
            (
                '[[sku]]\nname = "b"\nmemory_mib = 9\nmemory_limit_mib = 9000\n'
                '[[sku.alternative]]\nvendor = "nvidia"\nmemory_limit_mib = 0'
            ),
            "sku b: memory_limit_mib",
            "holds for no alternative: the first sets 0; remove it",
        ),
        (
            BURST,
            '[[sku]]\nname = "b"\nmemory_limit_mib = 9000\n[[sku.alternative]]\nvendor = "nvidia"',
            "sku b: memory_limit_mib",
            "holds for no alternative: the first requests whole devices of nvidia; remove it, or",
        ),
    ],
)
def test_wrong_limit_is_refused_with_field_and_fix(
    before: str, after: str, field: str, part: str
) -> None:
    assert before in BURST
    with pytest.raises(SettingsInvalid) as caught:
        catalog_of(BURST.replace(before, after, 1))
    assert caught.value.field == field
    assert part in f"{caught.value.problem}; {caught.value.fix}"


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("compute_pct = 25", "compute_pct = 30", "is still 2"),
        ("price_hour = 0.4", "price_hour = 0.5", "is still 2"),
        ("version = 2", "version = 1", "is below 2"),
        ("compute_pct = 25", "compute_pct = 25\nstate = 'retired'", ""),
        ("version = 2\n", "version = 3\nstate = 'retired'\n", ""),
        ("currency", "required = true\ncurrency", ""),
        ('types = ["A100"]', 'types = ["A100"]\nresource = "nvidia.com/gpu"', ""),
    ],
)
def test_changed_sku_needs_a_new_version(before: str, after: str, problem: str) -> None:
    later = catalog_of(changed(before, after))
    if not problem:
        later.require_successor_of(catalog_of(GOOD))
        return
    with pytest.raises(SettingsInvalid, match=problem) as caught:
        later.require_successor_of(catalog_of(GOOD))
    assert caught.value.field == "sku s-8g: version"


def test_first_resource_may_be_written_or_left_out() -> None:
    ascend = VENDORS.vendor("ascend").families
    text = '[[sku]]\nname = "a"\nmemory_mib = 0\n'
    implicit = '[[sku.alternative]]\nvendor = "ascend"\n'
    first, second = (f'{implicit}resource = "{one.count}"\n' for one in ascend[:2])
    for one, other in ((implicit, first), (first, implicit)):
        catalog_of(text + one).require_successor_of(catalog_of(text + other))
        assert len(catalog_of(text + one + other).skus[0].alternative) == 2
    with pytest.raises(SettingsInvalid, match="is still 1"):
        catalog_of(text + second).require_successor_of(catalog_of(text + implicit))
    with pytest.raises(SettingsInvalid, match="differs from"):
        catalog_of(text + implicit + second)
