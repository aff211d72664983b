# SPDX-License-Identifier: Apache-2.0
"""A machine behind a fake vendor library, with the methods of ``VendorTools``.

Its state is written into the text file that the library reads at each start
(``tests/contract/drivers/library_machine.h``). Commands of the library's program are answered in
this process (``say``), or by a process that loads the library. Memory in MiB, compute in percent.
"""

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import anyio.lowlevel
import pytest
from msgspec import Struct
from msgspec.structs import replace

from hami_nodeagent.drivers.errors import DriverError
from hami_nodeagent.drivers.tool import Answer as ToolAnswer
from hami_nodeagent.drivers.tool import Tool
from hami_nodeagent.libraries import loading
from hami_nodeagent.libraries.loading import Program
from hami_sim.hardware.fake_nvml import Process
from tests.fakes.vendoranswers import MAKE_BY_VENDOR, Answer, Make
from tests.fakes.vendortools import VendorTools

SOURCES = Path(__file__).resolve().parents[1] / "contract/drivers"
_FLAGS = ("-shared", "-fPIC", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
_BEFORE = 3
"""Arguments before those of ``loading.run``: ``-I -m MODULE``."""


class Device(Struct, frozen=True, kw_only=True):
    """One device of the machine, for ``LibraryFake.keys``."""

    index: int
    uuid: str
    """As the agent's driver reports it."""
    bus_id: str
    numa: int
    memory_mib: int
    type: str
    used_mib: int = 0
    core_pct: int = 0
    lost: bool = False
    failing: bool = False


class LibraryFake(Struct, frozen=True, kw_only=True):
    """One vendor's fake library and its parameters for the contract of all libraries."""

    vendor: str
    program: Program
    source: str
    """C file in ``tests/contract/drivers``."""
    also: tuple[str, ...] = ()
    """Further names of the same file beside it."""
    words: tuple[str, ...] = ()
    """Further lines of the machine's file."""
    no_driver: tuple[str, int]
    """Call and code of a library without a driver."""
    keys: Callable[[Device], Mapping[str, object]]
    """Keys of a device in the machine's file beside ``index``, ``bus_id``, ``domain``, ``bus``,
    ``device``, ``function``, ``numa``, ``memory_mib``, ``used_mib``, ``core_pct``, ``lost``,
    ``failing``, ``temperature_c`` (36), ``power_w`` (91).
    """
    refusals: tuple[tuple[str, int, type[DriverError]], ...]
    """Calls of a complete read, their error codes, and the resulting errors."""
    only_library: frozenset[str] = frozenset()
    """Attributes that only the library reports."""
    only_tool: frozenset[str] = frozenset()
    """Attributes that only the tool reports."""
    same_links: bool = True
    """Library and tool report the same links."""
    make: Mapping[str, object] = {}
    """Fields of ``Make`` (``tells_loss`` and the like) in which the library differs from the
    tool."""

    @property
    def name(self) -> str:
        """Vendor and library."""
        return f"{self.vendor}-{self.program.word}"


@functools.cache
def built(source: str) -> Path:
    """A fake library, built once in a process of tests."""
    target = Path(tempfile.mkdtemp(prefix="library-")) / "library.so"
    command = ["cc", *_FLAGS, "-o", str(target), str(SOURCES / source), "-ldl"]
    subprocess.run(command, check=True)
    return target


class FakeLibrary:
    """A machine whose devices the library reports. Devices are named by index."""

    def __init__(
        self, folder: Path, fake: LibraryFake, count: int, *, node: str = "node-a", model: str = ""
    ) -> None:
        self.fake = fake
        self.make: Make = replace(MAKE_BY_VENDOR[fake.vendor], **fake.make)
        self.model = model or self.make.model
        self.node = node
        self._tools = VendorTools(folder, fake.vendor, count, node=node, model=self.model)
        self._tools.remove_tools()
        self.sysfs, self.etc = self._tools.sysfs, self._tools.etc
        self.library = Path(shutil.copy(self.build(), folder / fake.program.files[0]))
        for name in fake.also:
            shutil.copy(self.library, folder / name)
        self._folder = folder
        self._count = count
        self._lost: set[int] = set()
        self._failing: set[int] = set()
        self._absent: set[int] = set()
        self._busy: dict[int, tuple[int, int, tuple[Process, ...]]] = {}
        self._answers: dict[str, int] = {}
        self._machine: list[str] = []
        self._trips: list[tuple[str, str]] = []
        self._write()

    def build(self) -> Path:
        """The fake library's file."""
        return built(self.fake.source)

    @property
    def settings(self) -> dict[str, str]:
        """Settings with the path of the machine, for the agent's driver."""
        return {
            **self._tools.settings,
            "interface": "library",
            "library_path": str(self.library),
        }

    def uuid_of(self, index: int) -> str:
        """Identity of a device, as the driver reports it; the same as through the tool."""
        return self._tools.uuid_of(index)

    def bus_id_of(self, index: int) -> str:
        """PCI address as sysfs writes it."""
        return self._tools.bus_id_of(index)

    def numa_of(self, index: int) -> int:
        """NUMA node."""
        return self._tools.numa_of(index)

    # ---- devices --------------------------------------------------------------------------------

    def lose(self, index: int) -> None:
        """Break the device."""
        self._lost.add(index)
        self._write()

    def fail(self, index: int) -> None:
        """Make its calls fail."""
        self._failing.add(index)
        self._write()

    def restore(self, index: int) -> None:
        """Repair it."""
        self._lost.discard(index)
        self._failing.discard(index)
        self._write()

    def unplug(self, index: int) -> None:
        """Remove it from the library's list."""
        self._tools.unplug(index)
        self._absent.add(index)
        self._write()

    def plug(self, index: int) -> None:
        """Add it to the library's list."""
        self._tools.plug(index)
        self._absent.discard(index)
        self._write()

    def use(
        self, index: int, used_mib: int, core_pct: int, processes: Iterable[Process] = ()
    ) -> None:
        """Set the use of the device."""
        self._busy[index] = (used_mib, core_pct, tuple(processes))
        self._write()

    # ---- the machine ----------------------------------------------------------------------------

    def unload_driver(self) -> None:
        """The library finds no driver."""
        self.refuse(*self.fake.no_driver)

    def remove_tools(self) -> None:
        """No library is installed."""
        self.library.unlink()

    def answer(self, text: str, *, complaint: str = "", status: int = 1) -> None:
        """Report an outage; of all tool errors the library has one: no driver."""
        self.unload_driver()

    def refuse(self, call: str, code: int) -> None:
        """Make a call of the library return this code."""
        self._answers[call] = code
        self._write()

    def garble(self, how: str) -> None:
        """Make the library return invalid values."""
        self._machine = [f"garbled {how}"]
        self._write()

    def hang(self) -> None:
        """Make the library's first call block."""
        self._machine = ["hang"]
        self._write()

    def crash(self) -> None:
        """Make the library's first call end the process; never in this one."""
        self._machine = ["crash"]
        self._write()

    def chatter(self) -> None:
        """Make the library print on standard output."""
        self._machine = ["noise"]
        self._write()

    def heal(self) -> None:
        """End all errors of the library."""
        self._machine, self._answers = [], {}
        self._write()

    def trip(self, word: str, how: str, *, times: int = 1) -> None:
        """Make the next commands with ``word`` fail, as ``VendorTools.trip`` does."""
        self._trips += [(word, how)] * times

    def forgive(self) -> None:
        """Cancel the failures of ``trip``."""
        self._trips.clear()
        self._write()

    def say(self, tool: str, arguments: tuple[str, ...]) -> Answer:
        """Return the output of a run of the program, with its effects, in this process."""
        words = " ".join(arguments)
        trip = next((one for one in self._trips if one[0] in words), None)
        if trip is None:
            return self._said(tool, arguments)
        self._trips.remove(trip)
        if trip[1] == "hang":
            raise TimeoutError
        self._write(trip=trip[1])
        said = self._said(tool, arguments)
        self._write()
        if trip[1] == "stall":
            raise TimeoutError
        return said

    def _said(self, tool: str, arguments: tuple[str, ...]) -> Answer:
        if tool != f"hami-{self.fake.program.word}":
            return Answer(text="", complaint=f"{tool}: command not found", status=127)
        text, complaint, status = loading.run(self.fake.program, arguments[_BEFORE:])
        return Answer(text=text, complaint=complaint, status=status)

    def answer_in_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let every tool be answered by ``say``: the same calls, without a process each."""

        async def run(tool: Tool, *arguments: str, **_: object) -> ToolAnswer:
            await anyio.lowlevel.checkpoint()
            said = self.say(tool.name, arguments)
            return ToolAnswer(text=said.text, complaint=said.complaint, status=said.status)

        monkeypatch.setattr(Tool, "run", run)

    # ---- the file -------------------------------------------------------------------------------

    def _write(self, *, trip: str = "") -> None:
        lines = [f"version {self.make.version}", *self._machine]
        if trip:
            lines.append(f"trip {trip}")
        lines += [f"answer {call} {code}" for call, code in self._answers.items()]
        lines += self.machine_lines()
        for index in range(self._count):
            if index not in self._absent:
                lines += self.device_lines(index)
        fresh = self._folder / "machine.new"
        fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
        fresh.replace(self._folder / "machine")

    def machine_lines(self) -> list[str]:
        """Lines of the file about the machine."""
        return list(self.fake.words)

    def device_lines(self, index: int) -> list[str]:
        """Lines of the file about a device."""
        used_mib, core_pct, processes = self._busy.get(index, (0, 0, ()))
        device = Device(
            index=index,
            uuid=self.uuid_of(index),
            bus_id=self.bus_id_of(index),
            numa=self.numa_of(index),
            memory_mib=self.make.memory_mib,
            type=self.make.type,
            used_mib=used_mib,
            core_pct=core_pct,
            lost=index in self._lost,
            failing=index in self._failing,
        )
        domain, bus, rest = device.bus_id.split(":")
        slot, function = rest.split(".")
        keys = {
            "index": index,
            "bus_id": device.bus_id,
            "domain": f"0x{domain}",
            "bus": f"0x{bus}",
            "device": f"0x{slot}",
            "function": function,
            "numa": device.numa,
            "memory_mib": device.memory_mib,
            "used_mib": used_mib,
            "core_pct": core_pct,
            "lost": int(device.lost),
            "failing": int(device.failing),
            "temperature_c": 36,
            "power_w": 91,
            **self.fake.keys(device),
        }
        return [
            "\t".join(["device", *(f"{key}={value}" for key, value in keys.items())]),
            *(f"process {index} {one.pid} {one.used_mib}" for one in processes),
        ]
