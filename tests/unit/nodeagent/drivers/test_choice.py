# SPDX-License-Identifier: Apache-2.0
"""Vendors that a node serves: by name, by pretense, by hardware."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_common.errors import SettingsInvalid
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import Capability, HardwareRun
from hami_common.vendors.sharing import ShareVendor
from hami_nodeagent.drivers.catalog import build_driver, detectable
from hami_nodeagent.drivers.choice import chosen_drivers, report_untested
from hami_nodeagent.settings import DriversSettings
from hami_sim.hardware import profile
from tests.fakes.vendoranswers import MAKE_BY_VENDOR
from tests.fakes.vendortools import VendorTools

KNOWN = frozenset(detectable())
Tables = dict[str, dict[str, str | float]]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tables:
    """Tables that match no vendor's hardware, on any machine."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return {word: {"sysfs_root": str(tmp_path / "none")} for word in detectable()}


def words(
    settings: DriversSettings, known: frozenset[str] = KNOWN, node: str = "node-a"
) -> list[str]:
    return [driver.vendor for driver in chosen_drivers(settings, node, known=known)]


def test_every_vendor_with_fake_tools_has_a_driver() -> None:
    assert set(detectable()) == set(MAKE_BY_VENDOR)


def test_machine_without_hardware_serves_no_vendor(bare: Tables) -> None:
    assert words(DriversSettings(vendors=bare)) == []


def test_only_the_vendor_of_the_present_hardware_is_served(bare: Tables, tmp_path: Path) -> None:
    tools = VendorTools(tmp_path, "cambricon", 1)
    tables: Tables = {**bare, "cambricon": {"sysfs_root": str(tools.sysfs)}}
    assert words(DriversSettings(vendors=tables)) == ["cambricon"]
    assert words(DriversSettings(vendors=tables, serve=())) == []


def test_management_controllers_and_processors_are_no_accelerators(
    bare: Tables, tmp_path: Path
) -> None:
    tables: Tables = dict(bare)
    for word, vendor, kind in (("ascend", "19e5", "030000"), ("hygon", "1d94", "060000")):
        place = tmp_path / word / "bus/pci/devices/0000:01:00.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text(f"0x{vendor}\n")
        (place / "class").write_text(f"0x{kind}\n")
        tables[word] = {"sysfs_root": str(tmp_path / word)}
    assert words(DriversSettings(vendors=tables)) == []


def test_virtual_functions_alone_are_no_hardware_of_the_host(bare: Tables, tmp_path: Path) -> None:
    place = tmp_path / "bus/pci/devices/0000:01:00.1"
    place.mkdir(parents=True)
    (place / "vendor").write_text("0xcabc\n")
    (place / "class").write_text("0x120000\n")
    (place / "physfn").mkdir()
    tables: Tables = {**bare, "cambricon": {"sysfs_root": str(tmp_path)}}
    assert words(DriversSettings(vendors=tables)) == []


def test_vendor_that_is_named_is_served_without_hardware(
    bare: Tables,
) -> None:
    assert words(DriversSettings(vendors=bare, serve=("metax", "amd"))) == ["metax", "amd"]


def test_vendor_without_resources_is_left_alone(bare: Tables) -> None:
    settings = DriversSettings(vendors=bare, serve=("metax", "amd"))
    assert words(settings, known=frozenset({"amd"})) == ["amd"]


def test_vendor_with_simulated_devices_is_served(bare: Tables, tmp_path: Path) -> None:
    text = profile.path_of("2xA30").read_text(encoding="utf-8")
    path = tmp_path / "mixed.toml"
    path.write_text(text.replace('"nvidia"', '"ascend"'), encoding="utf-8")
    tables: Tables = {**bare, "ascend": {"simulated_profile": str(path)}}
    assert words(DriversSettings(vendors=tables, serve=())) == ["ascend"]
    wrong: Tables = {**bare, "ascend": {"simulated_profile": str(profile.path_of("2xA30"))}}
    with pytest.raises(SettingsInvalid, match="it is a profile of nvidia"):
        words(DriversSettings(vendors=wrong))


def test_unknown_vendor_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsInvalid, match=r"drivers\.serve.*'asscend' is no vendor"):
        words(DriversSettings(serve=("asscend",)))
    with pytest.raises(SettingsInvalid, match=r"drivers\.vendors\.nvidia"):
        words(DriversSettings(vendors={"nvidia": {}}))


def test_unknown_key_of_a_vendor_is_refused() -> None:
    tables: Tables = {"metax": {"tool": "mx-smi"}}
    with pytest.raises(SettingsInvalid, match=r"drivers\.metax.*unknown field `tool`"):
        words(DriversSettings(serve=("metax",), vendors=tables))


def untested(caplog: pytest.LogCaptureFixture, catalog: Catalog) -> list[str]:
    """Vendors of the log lines about two drivers, of Ascend and of NVIDIA's simulated devices."""
    drivers = (
        build_driver("ascend", {"node": "a"}),
        build_driver("simulated", {"node": "a", "profile": str(profile.path_of("2xA30"))}),
    )
    report_untested(drivers, catalog)
    return [
        str(vars(line)["vendor"])
        for line in caplog.records
        if line.message == "vendor driver not tested on hardware"
    ]


def test_driver_that_never_ran_on_hardware_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert untested(caplog, Catalog.from_settings()) == ["ascend"]


def test_driver_that_ran_on_hardware_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    shipped = Catalog.from_settings()
    ascend = shipped.vendor("ascend")
    assert isinstance(ascend, ShareVendor)
    run = HardwareRun(device="910B3", driver="24.1", date="2026-12-01")
    ascend.about = replace(ascend.about, capability=Capability(hardware_tested=(run,)))
    assert untested(caplog, shipped) == []
