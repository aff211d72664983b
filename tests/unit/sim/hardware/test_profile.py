# SPDX-License-Identifier: Apache-2.0
"""Hardware profiles: all shipped ones are possible machines, impossible ones are refused."""

from pathlib import Path

import msgspec
import pytest

from hami_common.errors import SettingsInvalid
from hami_common.model import device
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.partitions import Division
from hami_sim.hardware import profile
from hami_sim.hardware.profile import Level
from tests.support.mig import facts_of

PROFILE = """
vendor = "nvidia"
uuid_prefix = "GPU-"
[driver]
version = "1"
[model]
name = "NVIDIA A30"
memory_mib = 24576
compute_units = 56
[[devices]]
bus_id = "00000000:17:00.0"
minor = 0
[[devices]]
bus_id = "{bus_id}"
minor = {minor}
{more}
"""


def written(
    tmp_path: Path, *, bus_id: str = "00000000:18:00.0", minor: int = 1, more: str = ""
) -> Path:
    path = tmp_path / "machine.toml"
    path.write_text(PROFILE.format(bus_id=bus_id, minor=minor, more=more), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "count", "memory_mib", "model"),
    [
        ("8xH200", 8, 143771, "NVIDIA H200"),
        ("8xB200", 8, 183359, "NVIDIA B200"),
        ("2xH200-MIG", 2, 143771, "NVIDIA H200"),
        ("8xH100", 8, 81559, "NVIDIA H100 80GB HBM3"),
        ("8xA100-40", 8, 40960, "NVIDIA A100-SXM4-40GB"),
        ("8xA100-80", 8, 81920, "NVIDIA A100-SXM4-80GB"),
        ("4xT4", 4, 15360, "Tesla T4"),
        ("2xA30", 2, 24576, "NVIDIA A30"),
        ("1xRTX-PRO-6000", 1, 97887, "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("2xL40S", 2, 46068, "NVIDIA L40S"),
    ],
)
def test_shipped_profile_loads(name: str, count: int, memory_mib: int, model: str) -> None:
    machine = profile.load(name)
    assert len(machine.devices) == count
    assert machine.memory_mib_of(count - 1) == memory_mib
    assert machine.name_of(0) == model


def test_every_shipped_profile_is_covered_above() -> None:
    assert len(profile.names("nvidia")) == 10


@pytest.mark.parametrize("vendor", [vendor.name for vendor in Catalog.from_settings().vendors])
def test_every_vendor_has_a_machine_with_possible_partitions(vendor: str) -> None:
    assert profile.names(vendor)
    for name in profile.names(vendor):
        machine = profile.load(name)
        partitions = tuple(
            msgspec.convert(msgspec.to_builtins(part), device.Profile)
            for part in machine.partitions
        )
        assert Division.check(partitions, machine.model.resources) == ""


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ("[[partitions]]\nmemory_mib = 24577", "larger than its device"),
        ("[[partitions]]\nmemory_mib = 1\nresources = { x = 1 }", "the model has not"),
    ],
)
def test_impossible_partitions_are_refused(tmp_path: Path, more: str, word: str) -> None:
    with pytest.raises(SettingsInvalid, match=word):
        profile.load(written(tmp_path, more=more))


def test_uuids_are_stable_per_node_and_differ_between_nodes_and_devices() -> None:
    machine = profile.load("2xA30")
    assert machine.uuid_of("node-a", 0) == "GPU-a75110f7-ff66-518b-8640-2d47c12972d8"
    uuids = {machine.uuid_of(node, index) for node in ("node-a", "node-b") for index in (0, 1)}
    assert len(uuids) == 4


def test_levels_follow_numa_unless_stated() -> None:
    levels = profile.load("8xA100-40").level_by_pair()
    assert levels[0, 1] is Level.MULTIPLE
    assert levels[0, 2] is Level.NODE
    assert levels[0, 4] is Level.SYSTEM


def test_device_may_differ_from_its_model(tmp_path: Path) -> None:
    machine = profile.load(written(tmp_path, more='name = "NVIDIA A10"\nmemory_mib = 1'))
    assert (machine.name_of(0), machine.name_of(1)) == ("NVIDIA A30", "NVIDIA A10")
    assert machine.memory_mib_of(1) == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"bus_id": "00000000:17:00.0"}, "two devices with one bus_id"),
        ({"minor": 0}, "two devices with one minor"),
        ({"more": '[fabric]\nkind = "magic"'}, "neither switch nor direct"),
        ({"more": '[[proximity]]\ndevices = [0, 2]\nlevel = "single"'}, r"outside 0\.\.1"),
        ({"more": '[[proximity]]\ndevices = [0, 1]\nlevel = "near"'}, "Invalid enum value 'near'"),
        ({"more": "colour = 1"}, "unknown field `colour`"),
    ],
)
def test_impossible_machine_is_refused(
    tmp_path: Path, changes: dict[str, str | int], problem: str
) -> None:
    with pytest.raises(SettingsInvalid, match=problem):
        profile.load(written(tmp_path, **changes))  # type: ignore[arg-type]  # table of keywords


def test_unknown_profile_name_lists_the_known_ones() -> None:
    with pytest.raises(SettingsInvalid, match="8xH200"):
        profile.load("16xH200")


def test_machine_in_mig_mode_has_the_plain_sizes_of_its_cards() -> None:
    told = {p.name: p for p in facts_of("H200-141").partitions if not p.by_name_only}
    machine = profile.load("2xH200-MIG")
    assert machine.model.mode == "mig"
    assert machine.model.resources == facts_of("H200-141").resources
    assert {p.name for p in machine.partitions} == told.keys()
    for part in machine.partitions:
        size = told[part.name]
        assert (part.memory_mib, part.core_pct, part.size, part.starts, part.resources) == (
            *(size.memory_mib, size.core_pct, size.size, size.starts, size.resources),
        )
