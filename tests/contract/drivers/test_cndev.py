# SPDX-License-Identifier: Apache-2.0
"""The small tool that speaks to Cambricon's library, against a library of the same interface."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from hami_nodeagent.drivers.parse.cambricon import SmluCard, smlus
from hami_nodeagent.libraries.cndev import PROGRAM
from hami_nodeagent.libraries.loading import USAGE, Kind, run

SOURCE = Path(__file__).with_name("cndev_fake.c")
UUID = "77019915-8307-0000-0000-000000000000"
GIB = 1 << 30


class Machine:
    """A fake library and the tool's commands on it."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.fake = ctypes.CDLL(str(library))

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

    def unload_driver(self) -> None:
        ctypes.c_int.in_dll(self.fake, "cndev_fake_driver").value = 0


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake library, built once."""
    target = tmp_path_factory.mktemp("cndev") / "libcndev.so"
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *flags, "-o", str(target), str(SOURCE)], check=True)
    return target


@pytest.fixture
def machine(built: Path, tmp_path: Path) -> Machine:
    """A library with a state of its own: a copy is another library."""
    return Machine(Path(shutil.copy(built, tmp_path / "libcndev.so")))


def test_only_cards_in_smlu_mode_are_listed(machine: Machine) -> None:
    card = machine.card()
    assert (card.slot, card.uuid, card.memory_mib) == (0, UUID, 23308)
    assert (card.instances, card.profiles) == ((), ())


def test_an_instance_has_the_size_name_and_node_that_were_asked_for(machine: Machine) -> None:
    assert machine.run("create", UUID, "20", str(4 * GIB), "hami0") == (0, "", "")
    (one,) = machine.card().instances
    assert (one.name, one.quota, one.memory, one.used) == ("hami0", 20, 4 * GIB, 0)
    assert one.node == "/dev/cambricon-caps/cap_dev0_mi1"


def test_instances_of_one_size_share_a_profile_which_goes_with_the_last(
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


def test_what_the_card_has_not_is_refused_by_the_library(machine: Machine) -> None:
    assert machine.run("create", UUID, "90", str(GIB), "hami0")[0] == 0
    status, _, complaint = machine.run("create", UUID, "20", str(GIB), "hami1")
    assert (status, "INSUFFICIENT_SPACE (error 9)" in complaint) == (Kind.REFUSED, True)
    assert len(machine.card().profiles) == 1


def test_without_library_driver_or_card_the_reason_is_told(machine: Machine) -> None:
    _, complaint, status = run(PROGRAM, ("/nowhere/libcndev.so", "list"))
    assert (status, "error while loading shared libraries" in complaint) == (Kind.UNUSABLE, True)
    assert "there is no card" in machine.run("tidy", "no-such-card")[2]
    assert machine.run("sing")[0] == USAGE
    machine.unload_driver()
    status, _, complaint = machine.run("list")
    assert (status, "NO_DRIVER (error 1)" in complaint) == (Kind.MISSING, True)
