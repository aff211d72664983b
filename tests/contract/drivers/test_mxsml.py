# SPDX-License-Identifier: Apache-2.0
"""The small tool that speaks to MetaX's library, against a library of the same interface."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from hami_nodeagent.drivers.errors import AnswerUnknown
from hami_nodeagent.drivers.parse.metax import Sgpu, SgpuGpu, sgpus
from hami_nodeagent.libraries.loading import USAGE, Kind, run
from hami_nodeagent.libraries.mxsml import PROGRAM

SOURCE = Path(__file__).with_name("mxsml_fake.c")


class Machine:
    """A fake library and the tool's command on it."""

    def __init__(self, library: Path) -> None:
        self._library = library
        self._fake = ctypes.CDLL(str(library))

    def set(self, name: str, number: int) -> None:
        ctypes.c_int.in_dll(self._fake, f"mxsml_fake_{name}").value = number

    def divide(self, vram_mib: dict[int, int]) -> None:
        table = (ctypes.c_uint * 16).in_dll(self._fake, "mxsml_fake_vram")
        for number, size in vram_mib.items():
            table[number] = size

    def run(self, *arguments: str) -> tuple[int, str, str]:
        text, complaint, status = run(PROGRAM, (str(self._library), *arguments))
        return status, text, complaint

    def gpu(self) -> SgpuGpu:
        status, text, complaint = self.run("list")
        assert (status, complaint) == (0, "")
        (gpu,) = sgpus(text)
        return gpu


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake library, built once."""
    target = tmp_path_factory.mktemp("mxsml") / "libmxsml.so"
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *flags, "-o", str(target), str(SOURCE)], check=True)
    return target


@pytest.fixture
def machine(built: Path, tmp_path: Path) -> Machine:
    """A library with a state of its own: a copy is another library."""
    return Machine(Path(shutil.copy(built, tmp_path / "libmxsml.so")))


def test_only_gpus_in_sgpu_mode_are_listed(machine: Machine) -> None:
    assert machine.gpu() == SgpuGpu(bus_id="0000:1f:00.0", scheduling=1, sgpus=())


def test_each_sgpu_has_size_use_and_an_alias_of_any_length(machine: Machine) -> None:
    machine.divide({0: 16384, 15: 9088})
    machine.set("class", 2)
    gpu = machine.gpu()
    assert gpu.scheduling == 2
    assert gpu.sgpus == (
        Sgpu(number=0, alias="a" * 32, compute_pct=20, memory_mib=16384, used=0),
        Sgpu(number=15, alias="p" * 32, compute_pct=35, memory_mib=9088, used=15 << 20),
    )


def test_what_an_older_library_does_not_tell_is_unknown(machine: Machine) -> None:
    machine.divide({3: 128})
    machine.set("blind", 1)
    assert machine.gpu().sgpus == (
        Sgpu(number=3, alias="", compute_pct=23, memory_mib=128, used=None),
    )


def test_without_library_driver_or_right_the_reason_is_told(machine: Machine) -> None:
    _, complaint, status = run(PROGRAM, ("/nowhere/libmxsml.so", "list"))
    assert (status, "error while loading shared libraries" in complaint) == (Kind.UNUSABLE, True)
    machine.divide({0: 128})
    machine.set("info", 8)
    words = "mxsml: mxSmlGetSgpuInfo: PERMISSION_DENIED (error 8)\n"
    assert machine.run("list")[::2] == (Kind.DENIED, words)
    machine.set("init", 21)
    assert "OPEN_DEVICE_FILE_FAILURE (error 21)" in machine.run("list")[2]
    assert machine.run("sing")[0] == USAGE


def test_a_library_without_these_calls_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "libmxsml.so"
    subprocess.run(["cc", "-shared", "-o", str(empty), "-xc", "/dev/null"], check=True)
    _, complaint, status = run(PROGRAM, (str(empty), "list"))
    assert (status, "mxSmlInit: FUNCTION_NOT_FOUND" in complaint) == (Kind.UNSUPPORTED, True)


@pytest.mark.parametrize(
    "change",
    [
        ('"number":3', '"number":0'),
        ('"memory_mib":9088', '"memory_mib":0'),
        ('"compute_pct":100', '"compute_pct":101'),
        ('"scheduling":1', '"scheduling":3'),
        ("0000:20:00.0", "0000:1f:00.0"),
        ("0000:20:00.0", "somewhere"),
        ("]}]}", "]}"),
    ],
)
def test_a_list_that_cannot_be_is_not_believed(change: tuple[str, str]) -> None:
    golden = Path(__file__).resolve().parents[2] / "golden/tools/metax/sgpus.json"
    text = golden.read_text("utf-8").replace(": ", ":")
    assert len(sgpus(text)) == 3
    assert change[0] in text
    with pytest.raises(AnswerUnknown):
        sgpus(text.replace(change[0], change[1]))
