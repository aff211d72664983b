# SPDX-License-Identifier: Apache-2.0
"""The program that calls Cambricon's library, against a library of the same interface."""

import ctypes
import shutil
from pathlib import Path

import pytest

from hami_nodeagent.drivers.cambricon.binding import PROGRAM
from hami_nodeagent.drivers.cambricon.parse import SmluCard, smlus
from hami_nodeagent.drivers.parse.library import devices
from hami_nodeagent.drivers.parse.seen import Condition, Sight
from hami_nodeagent.drivers.protocol import ProcessUsage
from hami_nodeagent.drivers.rules import Neighbour
from hami_nodeagent.libraries.loading import USAGE, Kind, run
from tests.support.fake_library import built

UUID = "77019915-8307-0000-0000-000000000000"
GIB = 1 << 30


class Machine:
    """A fake library, the machine behind it, and the program's commands."""

    def __init__(self, folder: Path) -> None:
        self.library = Path(shutil.copy(built("cndev_fake.c"), folder / "libcndev.so"))
        self.fake = ctypes.CDLL(str(self.library))
        self.write_cards("smlu=1", "smlu=0")

    def write(
        self, *keys: str, answers: tuple[str, ...] = (), processes: tuple[str, ...] = ()
    ) -> None:
        """One card."""
        self.write_cards("\t".join(keys), more=(*answers, *processes))

    def write_cards(self, *cards: str, more: tuple[str, ...] = ()) -> None:
        """Cards with these keys in addition to the common ones."""
        lines = ["version 5.10.31", *more]
        for index, keys in enumerate(cards):
            uuid = f"{UUID[:-1]}{index}"
            own = f"index={index}\tuuid={uuid}\tname=MLU370-X8\tmemory_mib=23308"
            lines.append(f"device\t{own}\t{keys}")
        (self.library.parent / "machine").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def run(self, *arguments: str) -> tuple[int, str, str]:
        text, complaint, status = run(PROGRAM, (str(self.library), *arguments))
        return status, text, complaint

    def card(self) -> SmluCard:
        status, text, complaint = self.run("list")
        assert (status, complaint) == (0, "")
        (card,) = smlus(text)
        return card

    def fail_instances(self, *, fails: bool) -> None:
        ctypes.c_int.in_dll(self.fake, "cndev_fake_fail_instance").value = int(fails)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A library with a state of its own, because a copy is loaded as another library."""
    return Machine(tmp_path)


def test_only_cards_in_smlu_mode_are_listed(machine: Machine) -> None:
    card = machine.card()
    assert (card.slot, card.uuid, card.memory_mib) == (0, UUID, 23308)
    assert (card.instances, card.profiles) == ((), ())


def test_an_instance_has_the_requested_size_name_and_node(machine: Machine) -> None:
    assert machine.run("create", UUID, "20", str(4 * GIB), "hami0") == (0, "", "")
    (one,) = machine.card().instances
    assert (one.name, one.quota, one.memory, one.used) == ("hami0", 20, 4 * GIB, 0)
    assert one.node == "/dev/cambricon-caps/cap_dev0_mi1"


def test_instances_of_one_size_share_a_profile_removed_with_the_last(
    machine: Machine,
) -> None:
    for name in ("hami0", "hami1"):
        assert machine.run("create", UUID, "20", str(4 * GIB), name)[0] == 0
    first, second = machine.card().instances
    assert len(machine.card().profiles) == 1
    assert machine.run("destroy", UUID, str(first.id)) == (0, "", "")
    assert len(machine.card().profiles) == 1
    assert machine.run("destroy", UUID, str(second.id)) == (0, "", "")
    assert (machine.card().profiles, machine.card().instances) == ((), ())


def test_an_instance_that_fails_takes_its_new_profile_with_it(machine: Machine) -> None:
    machine.fail_instances(fails=True)
    status, _, complaint = machine.run("create", UUID, "20", str(4 * GIB), "hami0")
    assert (status, "IN_PROBLEM (error 18)" in complaint) == (Kind.TRANSIENT, True)
    assert machine.card().profiles == ()
    machine.fail_instances(fails=False)
    assert machine.run("create", UUID, "20", str(4 * GIB), "hami0")[0] == 0


def test_requests_beyond_the_card_are_refused_by_the_library(machine: Machine) -> None:
    assert machine.run("create", UUID, "90", str(GIB), "hami0")[0] == 0
    status, _, complaint = machine.run("create", UUID, "20", str(GIB), "hami1")
    assert (status, "INSUFFICIENT_SPACE (error 9)" in complaint) == (Kind.REFUSED, True)
    assert len(machine.card().profiles) == 1


def test_reason_is_reported_without_library_driver_or_card(machine: Machine) -> None:
    _, complaint, status = run(PROGRAM, ("/nowhere/libcndev.so", "list"))
    assert (status, "error while loading shared libraries" in complaint) == (Kind.UNUSABLE, True)
    assert "there is no card" in machine.run("tidy", "no-such-card")[2]
    assert machine.run("sing")[0] == USAGE
    machine.write(answers=("answer cndevInit 1",))
    status, _, complaint = machine.run("list")
    assert (status, "NO_DRIVER (error 1)" in complaint) == (Kind.MISSING, True)


# ---- cards ---------------------------------------------------------------------------------------


def told(machine: Machine, word: str = "survey") -> Sight:
    status, text, complaint = machine.run(word)
    assert (status, complaint) == (0, "")
    return devices(text)


def test_card_is_reported_with_everything_that_cnmon_shows(machine: Machine) -> None:
    machine.write(
        *("power_w=44", "temperature_c=41", "core_pct=7", "used_mib=812", "numa=1", "smlu=1"),
        *("bus=0x9b", "serial=0x7701991583070017"),
        processes=("process 0 4711 1500",),
    )
    (seen,) = told(machine).devices
    assert (seen.uuid, seen.type, seen.bus_id) == (f"MLU-{UUID}", "MLU370-X8", "0000:9b:00.0")
    assert (seen.index, seen.minor, seen.numa, seen.mode) == (0, 0, 1, "smlu")
    assert (seen.memory_mib, seen.used_mib, seen.core_pct) == (23308, 812, 7)
    assert (seen.temperature_c, seen.power_w) == (41, 44)
    assert seen.attributes == {"serial": "0x7701991583070017"}
    assert seen.processes == (ProcessUsage(pid=4711, used_mib=1500),)
    assert told(machine).driver_version == "5.10.31"


def test_links_count_live_ports_that_both_cards_report(machine: Machine) -> None:
    machine.write_cards(
        "ports=1 1 -1 2", "ports=0 0 0", "ports=1\tnuma=1", "ports=0\tnuma=1\tfailing=1"
    )
    views = told(machine).views
    assert views["0", "1"] == views["1", "0"] == Neighbour(level="node", fabric_links=2)
    assert views["0", "2"] == Neighbour(level="system")  # card 2 has no port to card 0
    assert len(views) == 6  # a card that does not answer has no links


@pytest.mark.parametrize(
    ("key", "condition", "reason"),
    [
        ("lost=1", Condition.BAD, "the device is in problem"),
        ("driver=7", Condition.BAD, "the driver's state is reset error"),
        ("compute_mode=2", Condition.BAD, "its compute mode is prohibited"),
        ("failing=1", Condition.DOUBTFUL, "cndevGetCardHealthState: UNKNOWN (error 7)"),
    ],
)
def test_health_reason_quotes_the_library(
    machine: Machine, key: str, condition: Condition, reason: str
) -> None:
    machine.write(key)
    (seen,) = told(machine, "glance").devices
    assert (seen.condition, seen.reason) == (condition, reason)


@pytest.mark.parametrize(
    ("code", "condition"),
    [(6, Condition.BAD), (18, Condition.BAD), (17, Condition.DOUBTFUL), (8, Condition.DOUBTFUL)],
)
def test_a_card_off_the_bus_or_in_problem_state_is_lost_and_others_in_doubt(
    machine: Machine, code: int, condition: Condition
) -> None:
    machine.write(answers=(f"answer cndevGetUUID {code}",))
    (seen,) = told(machine, "glance").devices
    assert (seen.condition, seen.uuid) == (condition, "")


def test_library_of_the_older_api_reports_the_same_except_states(machine: Machine) -> None:
    keys = ("power_w=44", "used_mib=812", "bus=0x9b", "ports=0")
    machine.write(*keys)
    now = told(machine)
    machine.write(*keys, answers=("api 5",))
    assert told(machine) == now
    machine.write("lost=1", answers=("api 5",))
    assert told(machine).devices[0].condition is Condition.BAD
    machine.write(answers=("api 4",))
    status, _, complaint = machine.run("glance")
    assert (status, "UNSUPPORTED_API_VERSION" in complaint) == (Kind.UNUSABLE, True)


def test_missing_values_of_a_card_are_unknown(machine: Machine) -> None:
    calls = (
        *("MemoryUsageV2", "MemoryUsage", "PCIeInfoV2", "PCIeInfo", "CardSN", "ProcessInfo"),
        *("NUMANodeIdByDevId", "DeviceUtilizationInfo", "TemperatureInfo", "DevicePowerInfo"),
        *("PowerInfo", "VersionInfo", "SMLUMode", "MimMode"),
    )
    machine.write(answers=tuple(f"answer cndevGet{call} 10" for call in calls))
    sight = told(machine)
    (seen,) = sight.devices
    assert (seen.condition, seen.uuid) == (Condition.GOOD, f"MLU-{UUID}")
    assert (seen.memory_mib, seen.bus_id, seen.numa, seen.attributes) == (None, "", None, {})
    assert (seen.core_pct, seen.temperature_c, seen.power_w) == (None, None, None)
    assert (seen.processes, seen.mode, sight.driver_version) == (None, "", "")


def test_more_processes_than_expected_are_all_reported(machine: Machine) -> None:
    machine.write(processes=tuple(f"process 0 {pid} 1" for pid in range(1, 121)))
    (seen,) = told(machine, "glance").devices
    assert seen.processes is not None
    assert len(seen.processes) == 120
