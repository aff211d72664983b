# SPDX-License-Identifier: Apache-2.0
"""Biren through BRML: facts of the library beyond the contract of libraries."""

import shutil
from pathlib import Path

import pytest

from hami_nodeagent.drivers.biren.binding import PROGRAM
from hami_nodeagent.drivers.parse.library import devices
from hami_nodeagent.drivers.parse.seen import Condition, Sight
from hami_nodeagent.drivers.rules import Neighbour
from hami_nodeagent.libraries.loading import Kind, run
from tests.support.fake_library import built


class Machine:
    """A fake library, the machine behind it, and the program's commands."""

    def __init__(self, folder: Path) -> None:
        self._library = Path(shutil.copy(built("brml_fake.c"), folder / "libbiren-ml.so"))

    def write(self, *cards: str, more: tuple[str, ...] = ()) -> None:
        """Cards with these keys in addition to the common ones."""
        lines = ["version 1.5.0", *more]
        for index, keys in enumerate(cards):
            own = f"index={index}\tmemory_mib=65536\tbus=0x{0x11 + index:02x}"
            lines.append(f"device\t{own}\t{keys}")
        (self._library.parent / "machine").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def told(self, word: str = "survey") -> Sight:
        text, complaint, status = run(PROGRAM, (str(self._library), word))
        assert (status, complaint) == (0, "")
        return devices(text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A library with a state of its own, because a copy is loaded as another library."""
    return Machine(tmp_path)


def test_instances_of_a_divided_card_are_devices_with_numbers_of_their_own(
    machine: Machine,
) -> None:
    machine.write("svi=2\tnumber=0", "number=2", more=("process 0 4711 100",))
    sight = machine.told()
    assert [(one.index, one.minor, one.memory_mib) for one in sight.devices] == [
        (0, 0, 32768),
        (1, 1, 32768),
        (2, 2, 65536),
    ]
    assert [one.attributes.get("svi") for one in sight.devices] == ["1/2", "1/2", None]
    assert [one.bus_id[5:7] for one in sight.devices] == ["11", "11", "12"]
    assert sight.views == {}
    assert sight.driver_version == "1.5.0"


def test_links_have_the_bridge_and_the_direct_ports(machine: Machine) -> None:
    machine.write("direct=3", "direct=3", "numa=1")
    views = machine.told().views
    assert views["0", "1"] == views["1", "0"] == Neighbour(level="node", fabric_links=3)
    assert views["0", "2"] == Neighbour(level="system")


@pytest.mark.parametrize(
    ("keys", "condition", "reason"),
    [
        ("health=1", Condition.GOOD, ""),
        ("health=2", Condition.DOUBTFUL, "health: critical warning"),
        ("health=3", Condition.BAD, "health: error"),
        ("health=9", Condition.DOUBTFUL, "health: 9"),
        ("failing=1", Condition.DOUBTFUL, "brmlDeviceGetHealthStatus: UNKNOWN (error 255)"),
    ],
)
def test_health_reason_quotes_the_library(
    machine: Machine, keys: str, condition: Condition, reason: str
) -> None:
    machine.write(keys)
    (seen,) = machine.told("glance").devices
    assert (seen.condition, seen.reason) == (condition, reason)


def test_a_card_without_a_handle_is_a_problem_and_hides_no_other(machine: Machine) -> None:
    machine.write("", "gone=1", "")
    sight = machine.told()
    assert [one.index for one in sight.devices] == [0, 2]
    assert sight.problems == ("card 1: brmlDeviceGetHandleByIndex: NOT_FOUND (error 5)",)


def test_missing_values_of_a_card_are_unknown(machine: Machine) -> None:
    calls = (
        *("HealthStatus", "MemoryInfo", "UtilizationRates", "Temperature", "PowerUsage"),
        *("ComputeRunningProcesses", "PciInfo", "GpuInfo", "UUID", "NumaNode", "SviMode"),
    )
    machine.write("", more=tuple(f"answer brmlDeviceGet{call} 3" for call in calls))
    (seen,) = machine.told().devices
    assert (seen.condition, seen.index) == (Condition.GOOD, 0)
    assert (seen.memory_mib, seen.core_pct, seen.temperature_c, seen.power_w) == (None,) * 4
    assert (seen.processes, seen.bus_id, seen.numa, seen.attributes) == (None, "", None, {})


def test_an_impossible_number_of_instances_is_nonsense(machine: Machine) -> None:
    machine.write("svi=77")
    library = str(machine._library)  # noqa: SLF001 - the machine is this file's
    _, complaint, status = run(PROGRAM, (library, "glance"))
    assert (status, "77 instances" in complaint) == (Kind.NONSENSE, True)
