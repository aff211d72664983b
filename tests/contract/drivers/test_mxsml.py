# SPDX-License-Identifier: Apache-2.0
"""The program that calls MetaX's library, against a library of the same interface."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceHung
from hami_nodeagent.drivers.metax.binding import PROGRAM
from hami_nodeagent.drivers.metax.parse import Sgpu, SgpuGpu, sgpus
from hami_nodeagent.drivers.parse.library import devices
from hami_nodeagent.drivers.parse.seen import Condition, Sight
from hami_nodeagent.drivers.protocol import ProcessUsage
from hami_nodeagent.drivers.rules import Neighbour
from hami_nodeagent.libraries.loading import USAGE, Kind, run
from tests.fakes.vendoranswers import Answer
from tests.support.fake_library import built
from tests.support.vendor_parts import KIND_BY_VENDOR, PartBench

UUID = "GPU-0000000{}-0000-0000-0000-000000000000"


class Machine:
    """A fake library, the machine behind it, and the program's commands."""

    def __init__(self, folder: Path) -> None:
        self._library = Path(shutil.copy(built("mxsml_fake.c"), folder / "libmxsml.so"))
        self._fake = ctypes.CDLL(str(self._library))
        self.write("sgpu=1", "sgpu=0", "")

    def write(self, *gpus: str, more: tuple[str, ...] = ()) -> None:
        """GPUs with these keys in addition to the common ones."""
        lines = ["version 3.4.4", *more]
        for index, keys in enumerate(gpus):
            own = f"index={index}\tuuid={UUID.format(index)}\tname=MXC500\tmemory_mib=65536"
            lines.append(f"device\t{own}\tbus_id=0000:{0x1F + index:02x}:00.0\t{keys}")
        (self._library.parent / "machine").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def set(self, name: str, number: int) -> None:
        ctypes.c_int.in_dll(self._fake, f"mxsml_fake_{name}").value = number

    def divide(self, vram_mib: dict[int, int]) -> None:
        table = (ctypes.c_uint * 16).in_dll(self._fake, "mxsml_fake_vram")
        for number, size in vram_mib.items():
            table[number] = size

    def run(self, *arguments: str) -> tuple[int, str, str]:
        text, complaint, status = run(PROGRAM, (str(self._library), *arguments))
        return status, text, complaint

    def told(self, word: str = "survey") -> Sight:
        status, text, complaint = self.run(word)
        assert (status, complaint) == (0, "")
        return devices(text)

    def gpu(self) -> SgpuGpu:
        status, text, complaint = self.run("list")
        assert (status, complaint) == (0, "")
        (gpu,) = sgpus(text)
        return gpu


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A library with a state of its own, because a copy is loaded as another library."""
    return Machine(tmp_path)


def test_only_gpus_in_sgpu_mode_are_listed(machine: Machine) -> None:
    machine.set("class", 1)
    assert machine.gpu() == SgpuGpu(
        index=0,
        uuid=UUID.format(0),
        bus_id="0000:1f:00.0",
        memory_mib=65536,
        scheduling=1,
        sgpus=(),
    )


def test_each_sgpu_has_size_use_and_an_alias_of_any_length(machine: Machine) -> None:
    machine.divide({0: 16384, 15: 9088})
    machine.set("class", 2)
    gpu = machine.gpu()
    assert gpu.scheduling == 2
    assert gpu.sgpus == (
        Sgpu(number=0, alias="a" * 32, compute_pct=20, memory_mib=16384, used=0),
        Sgpu(number=15, alias="p" * 32, compute_pct=35, memory_mib=9088, used=15 << 20),
    )


def test_missing_values_of_an_older_library_are_unknown(machine: Machine) -> None:
    machine.divide({3: 128})
    machine.set("blind", 1)
    assert machine.gpu().sgpus == (
        Sgpu(number=3, alias="", compute_pct=23, memory_mib=128, used=None),
    )


def test_reason_is_reported_without_library_driver_or_permission(machine: Machine) -> None:
    _, complaint, status = run(PROGRAM, ("/nowhere/libmxsml.so", "list"))
    assert (status, "error while loading shared libraries" in complaint) == (Kind.UNUSABLE, True)
    machine.divide({0: 128})
    machine.write("sgpu=1", more=("answer mxSmlGetSgpuInfo 8",))
    words = "mxsml: mxSmlGetSgpuInfo: PERMISSION_DENIED (error 8)\n"
    assert machine.run("list")[::2] == (Kind.DENIED, words)
    machine.write(more=("answer mxSmlInit 21",))
    assert "OPEN_DEVICE_FILE_FAILURE (error 21)" in machine.run("list")[2]
    assert machine.run("sing")[0] == USAGE


def test_a_library_without_these_calls_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "libmxsml.so"
    subprocess.run(["cc", "-shared", "-o", str(empty), "-xc", "/dev/null"], check=True)
    _, complaint, status = run(PROGRAM, (str(empty), "list"))
    assert (status, "too old, it has no mxSmlInit" in complaint) == (Kind.UNUSABLE, True)


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
def test_impossible_list_is_rejected(change: tuple[str, str]) -> None:
    golden = Path(__file__).resolve().parents[2] / "golden/tools/metax/sgpus.json"
    text = golden.read_text("utf-8").replace(": ", ":")
    assert len(sgpus(text)) == 3
    assert change[0] in text
    with pytest.raises(AnswerUnknown):
        sgpus(text.replace(change[0], change[1]))


# ---- GPUs ----------------------------------------------------------------------------------------


def test_gpu_is_reported_with_everything_that_mx_smi_shows(machine: Machine) -> None:
    machine.write(
        "sgpu=1\tused_mib=812\tcore_pct=7\ttemperature_c=35\tpower_w=57",
        more=("process 0 4711 1500",),
    )
    sight = machine.told()
    (seen,) = sight.devices
    assert (seen.uuid, seen.type, seen.bus_id) == (UUID.format(0), "MXC500", "0000:1f:00.0")
    assert (seen.index, seen.mode, seen.memory_mib, seen.used_mib) == (0, "sgpu", 65536, 812)
    assert (seen.core_pct, seen.temperature_c, seen.power_w) == (7, 35, 57)
    assert seen.processes == (ProcessUsage(pid=4711, used_mib=1500),)
    assert sight.driver_version == "3.4.4"


def test_links_are_those_of_the_matrix(machine: Machine) -> None:
    machine.write("", "numa=0", "numa=1")
    views = machine.told().views
    assert views["0", "1"] == views["1", "0"] == Neighbour(level="node", fabric_links=1)
    assert views["0", "2"] == Neighbour(level="system")


def test_a_gpu_that_is_not_available_is_lost_and_one_that_fails_doubted(machine: Machine) -> None:
    machine.write("lost=1", "failing=1", "")
    lost, failing, good = machine.told("glance").devices
    assert (lost.condition, lost.uuid) == (Condition.BAD, "")
    assert lost.reason == "Not Available(MetaX Sysfs File Unaccessible)"
    assert failing.condition is Condition.DOUBTFUL
    assert failing.reason == "mxSmlGetDeviceState: SYSFS_ERROR (error 4)"
    assert (good.condition, good.mode) == (Condition.GOOD, "whole")


def test_missing_values_of_a_gpu_are_unknown(machine: Machine) -> None:
    calls = (
        *("MemoryInfo", "DeviceIpUsage", "TemperatureInfo", "BoardPowerInfo", "DeviceVersion"),
        *("NumberOfProcess", "SgpuToggle", "DeviceTopology"),
    )
    machine.write("", "", more=tuple(f"answer mxSmlGet{call} 3" for call in calls))
    sight = machine.told()
    seen = sight.devices[0]
    assert (seen.condition, seen.mode, seen.memory_mib) == (Condition.GOOD, "whole", None)
    assert (seen.core_pct, seen.temperature_c, seen.power_w) == (None, None, None)
    assert (seen.processes, sight.driver_version, sight.views) == (None, "", {})


# ---- making sGPUs --------------------------------------------------------------------------------


def test_an_sgpu_has_the_requested_size_class_and_alias(machine: Machine) -> None:
    assert machine.run("create", "0", "4096", "30", "hami0", "1") == (0, '{"number": 0}\n', "")
    assert machine.run("create", "0", "128", "5", "hami1") == (0, '{"number": 1}\n', "")
    gpu = machine.gpu()
    assert gpu.scheduling == 1
    assert [(one.alias, one.memory_mib, one.compute_pct) for one in gpu.sgpus] == [
        ("hami0", 4096, 30),
        ("hami1", 128, 5),
    ]
    assert machine.run("remove", "0", "0") == (0, "", "")
    assert [one.number for one in machine.gpu().sgpus] == [1]


def test_an_sgpu_that_gets_no_alias_is_removed_again(machine: Machine) -> None:
    machine.write("sgpu=1", more=("answer mxSmlSetSgpuAlias 5",))
    status, _, complaint = machine.run("create", "0", "4096", "30", "hami0")
    assert (status, "mxSmlSetSgpuAlias" in complaint) == (Kind.TRANSIENT, True)
    assert machine.gpu().sgpus == ()


def test_unsupported_requests_are_refused_by_the_library(machine: Machine) -> None:
    assert machine.run("create", "0", "65536", "30", "hami0")[0] == 0
    assert machine.run("create", "0", "128", "30", "hami1")[0] == Kind.TRANSIENT
    assert machine.run("create", "0", "128", "30", "hami1", "2")[0] == Kind.TRANSIENT
    assert machine.run("remove", "0", "7")[0] == Kind.GONE
    machine.write("sgpu=1", more=("answer mxSmlRemoveSgpu 23",))
    assert machine.run("remove", "0", "0")[0] == Kind.IN_USE
    assert len(machine.gpu().sgpus) == 1


@pytest.mark.anyio
async def test_an_sgpu_interrupted_before_its_alias_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = PartBench(KIND_BY_VENDOR["metax-mxsml"], tmp_path)
    bench.answer_in_process(monkeypatch)
    say = bench.tools.say

    def cut_off(tool: str, arguments: tuple[str, ...]) -> Answer:
        if arguments[0] != "create":
            return say(tool, arguments)
        assert say(tool, (*arguments[:4], "", *arguments[5:])).status == 0
        raise TimeoutError

    monkeypatch.setattr(bench.tools, "say", cut_off)
    with pytest.raises(DeviceHung):
        await bench.partitioner().create(bench.wanted())
    assert bench.in_hardware() == 0
