# SPDX-License-Identifier: Apache-2.0
"""Facts read from the Neuron driver's sysfs, on trees as its releases make them."""

from pathlib import Path

import pytest

from hami_nodeagent.drivers.awsneuron.tree import Tree, condition_of, read
from hami_nodeagent.drivers.parse.seen import Condition

HOME = "devices/virtual/neuron_device/neuron3"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The tree of a device with two cores."""
    put(tmp_path, "info/architecture/device_name", "Trainium2\n")
    put(tmp_path, "info/serial_number", "00AB3f5517c0de42\n")
    put(tmp_path, "reset", "1\n")
    put(tmp_path, "stats/hardware/mem_ecc_uncorrected", "0\n")
    put(tmp_path, "stats/hardware/sram_ecc_uncorrected", "0\n")
    put(tmp_path, "stats/hardware/mem_ecc_repairable_uncorrected", "0\n")
    for core, used in ((0, 3 << 30), (1, (1 << 30) + 5)):
        put(tmp_path, f"neuron_core{core}/stats/memory_usage/device_mem/total", f"{used}\n")
        put(tmp_path, f"neuron_core{core}/stats/status/hw_nc_ue_error/total", "0\n")
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    path = root / HOME / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_working_device_reports_kind_serial_and_memory_of_all_cores(root: Path) -> None:
    tree = read(str(root), 3)
    assert tree == Tree(
        kind="trainium2",
        attributes={"serial": "00ab3f5517c0de42"},
        state=1,
        memory_errors=0,
        core_errors=0,
        used_mib=4096,
    )
    assert condition_of(tree, 0) == (Condition.GOOD, "")


def test_missing_files_report_nothing(tmp_path: Path) -> None:
    assert read(str(tmp_path), 3) == Tree()
    assert condition_of(Tree(), 0) == (Condition.GOOD, "")
    assert condition_of(Tree(), 2) == (Condition.BAD, "2 uncorrectable memory errors")


@pytest.mark.parametrize("text", ["", "\n", "-1", "1e9", "٣", "0x10", "9" * 30, "\x00"])
def test_text_that_is_no_number_is_unknown(root: Path, text: str) -> None:
    for name in ("reset", "stats/hardware/mem_ecc_uncorrected"):
        put(root, name, text)
    put(root, "stats/hardware/sram_ecc_uncorrected", text)
    for core in range(2):
        put(root, f"neuron_core{core}/stats/memory_usage/device_mem/total", text)
    tree = read(str(root), 3)
    assert (tree.state, tree.memory_errors, tree.used_mib) == (None, None, None)
    assert condition_of(tree, 0) == (Condition.GOOD, "")


@pytest.mark.parametrize(
    ("name", "text", "condition", "reason"),
    [
        (
            "stats/hardware/sram_ecc_uncorrected",
            "4",
            Condition.BAD,
            "4 uncorrectable memory errors",
        ),
        (
            "neuron_core1/stats/status/hw_nc_ue_error/total",
            "2",
            Condition.BAD,
            "2 uncorrectable errors of its cores",
        ),
        ("reset", "2", Condition.BAD, "the driver could not reset the device"),
        ("reset", "0", Condition.DOUBTFUL, "the driver resets the device"),
        ("reset", "9", Condition.GOOD, ""),
    ],
)
def test_errors_and_resets_are_conditions(
    root: Path, name: str, text: str, condition: Condition, reason: str
) -> None:
    put(root, name, text)
    assert condition_of(read(str(root), 3), 0) == (condition, reason)


def test_repairable_errors_are_reported_and_do_not_condemn(root: Path) -> None:
    put(root, "stats/hardware/mem_ecc_repairable_uncorrected", "1\n")
    tree = read(str(root), 3)
    assert tree.attributes["repairable_errors"] == "1"
    assert condition_of(tree, 0)[0] is Condition.GOOD


def test_impossible_amount_of_memory_is_unknown(root: Path) -> None:
    put(root, "neuron_core0/stats/memory_usage/device_mem/total", str((1 << 60) - 1))
    assert read(str(root), 3).used_mib is None
