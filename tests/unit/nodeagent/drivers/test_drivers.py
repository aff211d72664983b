# SPDX-License-Identifier: Apache-2.0
"""The list of drivers, and settings that are refused when one is chosen."""

import pytest

from hami_common.errors import SettingsInvalid
from hami_nodeagent.drivers.catalog import DRIVERS, build_driver
from hami_nodeagent.drivers.interfaces import INTERFACES

TOOL_READERS = sorted(kind.name for kind in DRIVERS if kind.signs is not None)


def test_each_vendor_has_one_default_interface_and_a_reason() -> None:
    assert sorted(INTERFACES) == sorted({*TOOL_READERS, "nvidia"})
    for one in INTERFACES.values():
        assert one.reason
        assert {"library": one.library, "tool": one.tool}[one.default]


@pytest.mark.parametrize("vendor", TOOL_READERS)
def test_library_is_accepted_only_where_the_table_names_one(vendor: str) -> None:
    if INTERFACES[vendor].library:
        build_driver(vendor, {"interface": "library"})
    else:
        with pytest.raises(SettingsInvalid, match="tool only"):
            build_driver(vendor, {"interface": "library"})


def test_names_are_unique() -> None:
    names = [kind.name for kind in DRIVERS]
    assert len(set(names)) == len(names)


def test_nvidia_driver_is_built_from_its_settings_without_touching_the_library() -> None:
    driver = build_driver("nvidia", {"library_path": "/nowhere", "call_deadline_s": 1.5})
    assert driver.vendor == "nvidia"
    assert not driver.is_stuck


def test_unknown_driver_is_refused_with_the_known_names() -> None:
    with pytest.raises(SettingsInvalid, match=r"use one of nvidia, ascend, .*simulated"):
        build_driver("nvidea", {})


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("nvidia", {"deadline": 3}, "unknown field `deadline`"),
        ("nvidia", {"call_deadline_s": "soon"}, "call_deadline_s"),
        ("simulated", {"node": "n1"}, "profile"),
    ],
)
def test_wrong_settings_are_refused_by_field(
    name: str, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(SettingsInvalid, match=problem):
        build_driver(name, settings)


def test_simulated_driver_refuses_a_profile_that_is_not_there() -> None:
    with pytest.raises(SettingsInvalid, match=r"missing\.toml"):
        build_driver("simulated", {"profile": "/nowhere/missing.toml", "node": "n1"})
