# SPDX-License-Identifier: Apache-2.0
"""An Ascend machine behind the fake libdcmi.so, with the methods of ``VendorTools``.

What befalls it is written into the text file that the library reads at each ``dcmi_init``. Commands
of the small tool are answered in this process (``say``), or by a process that loads the library.
Memory in MiB, compute in percent of one chip.
"""

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import anyio.lowlevel
import pytest

from hami_nodeagent.drivers import dcmi
from hami_nodeagent.drivers.ascend_dcmi import TOOL
from hami_nodeagent.drivers.tool import Answer as ToolAnswer
from hami_nodeagent.drivers.tool import Tool
from hami_sim.hardware import vendorparts
from hami_sim.hardware.fake_nvml import Process
from hami_sim.hardware.vendoranswers import MAKE_BY_VENDOR, Answer, Make
from hami_sim.hardware.vendortools import VendorTools

SOURCE = Path(__file__).resolve().parents[1] / "contract/drivers/dcmi_fake.c"
_FLAGS = ("-shared", "-fPIC", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
_BEFORE = 3
"""Arguments before the command: ``-I``, the program, the library."""
_BYTES_PER_MIB = 1 << 20


@functools.cache
def built() -> Path:
    """The fake library, built once in a process of tests."""
    target = Path(tempfile.mkdtemp(prefix="dcmi-")) / "libdcmi.so"
    subprocess.run(["cc", *_FLAGS, "-o", str(target), str(SOURCE), "-ldl"], check=True)
    return target


class FakeDcmi:
    """A machine whose chips are told by the library. Chips are named by logic id."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        node: str = "node-a",
        model: str = "",
        dies: int = 1,
        build: Callable[[], Path] = built,
    ) -> None:
        """``dies``: chips on each card, two for a 910C."""
        self.make: Make = MAKE_BY_VENDOR["ascend"]
        self.model = model or self.make.model
        self.dies = dies
        self._tools = VendorTools(folder, "ascend", count, node=node, model=self.model)
        self._tools.remove_tools()
        self.sysfs, self.etc, self.node = self._tools.sysfs, self._tools.etc, node
        self.library = Path(shutil.copy(build(), folder / "libdcmi.so"))
        self._folder = folder
        self._count = count
        self._lost: set[int] = set()
        self._failing: set[int] = set()
        self._absent: set[int] = set()
        self._busy: dict[int, tuple[int, int, tuple[Process, ...]]] = {}
        self._answers: dict[str, int] = {}
        self._codes: dict[int, int] = {}
        self._trips: list[tuple[str, str]] = []
        self._machine: list[str] = []
        self.super_pod = 0
        self.shared: set[int] = set()
        self._write()

    @property
    def settings(self) -> dict[str, str]:
        """Where the agent's driver finds the machine."""
        return {
            **self._tools.settings,
            "interface": "library",
            "library_path": str(self.library),
        }

    def uuid_of(self, index: int) -> str:
        """Identity of a chip, as the driver reports it; the same as through npu-smi."""
        return self._tools.uuid_of(index)

    def bus_id_of(self, index: int) -> str:
        """PCI address as sysfs writes it."""
        return self._tools.bus_id_of(index)

    def numa_of(self, index: int) -> int:
        """NUMA node."""
        return self._tools.numa_of(index)

    # ---- chips ----------------------------------------------------------------------------------

    def lose(self, index: int) -> None:
        """An important alarm."""
        self._lost.add(index)
        self._write()

    def fail(self, index: int) -> None:
        """Its health is not told."""
        self._failing.add(index)
        self._write()

    def restore(self, index: int) -> None:
        """It works again."""
        self._lost.discard(index)
        self._failing.discard(index)
        self._write()

    def unplug(self, index: int) -> None:
        """The library does not list it."""
        self._tools.unplug(index)
        self._absent.add(index)
        self._write()

    def plug(self, index: int) -> None:
        """The opposite."""
        self._tools.plug(index)
        self._absent.discard(index)
        self._write()

    def use(
        self, index: int, used_mib: int, core_pct: int, processes: Iterable[Process] = ()
    ) -> None:
        """What is done with the chip."""
        self._busy[index] = (used_mib, core_pct, tuple(processes))
        self._write()

    def report(self, index: int, code: int) -> None:
        """The chip has an error code."""
        self._codes[index] = code
        self._write()

    # ---- vNPUs ----------------------------------------------------------------------------------

    def parts(self, index: int) -> Mapping[str, Mapping[str, object]]:
        """Live vNPUs of a chip by number."""
        card, chip = divmod(index, self.dies)
        return {
            words[2]: {"template": words[3], "busy": words[4] == "1"}
            for words in self._vdevs()
            if words[:2] == [str(card), str(chip)]
        }

    def cuts(self, index: int) -> int:
        """Chips are not cut as a whole."""
        return 0

    def profiles(self, index: int) -> int:
        """Templates stay."""
        return 0

    def occupy(self, index: int, number: str, *, busy: bool = True) -> None:
        """A container uses a vNPU, or no more."""
        card, chip = divmod(index, self.dies)
        rows = []
        for words in self._vdevs():
            mine = words[:3] == [str(card), str(chip), number]
            rows.append(" ".join([*words[:4], str(int(busy)) if mine else words[4]]) + "\n")
        (self._folder / "vdevs").write_text("".join(rows), encoding="ascii")

    def _vdevs(self) -> list[list[str]]:
        path = self._folder / "vdevs"
        return (
            [line.split() for line in path.read_text("ascii").splitlines()] if path.exists() else []
        )

    def trip(self, word: str, how: str, *, times: int = 1) -> None:
        """The next commands with ``word`` go wrong, as ``VendorTools.trip`` has it."""
        self._trips += [(word, how)] * times

    def forgive(self) -> None:
        """No command goes wrong any more that was to."""
        self._trips.clear()
        self._write()

    # ---- the machine ----------------------------------------------------------------------------

    def unload_driver(self) -> None:
        """The library finds no driver."""
        self.refuse("dcmi_init", -8005)

    def remove_tools(self) -> None:
        """No library is installed."""
        self.library.unlink()

    def answer(self, text: str, *, complaint: str = "", status: int = 1) -> None:
        """Of all that tools may say the library knows one: no driver."""
        self.unload_driver()

    def refuse(self, call: str, code: int) -> None:
        """A call of the library answers this code."""
        self._answers[call] = code
        self._write()

    def garble(self, how: str) -> None:
        """Answers that cannot be."""
        self._machine = [f"garbled {how}"]
        self._write()

    def hang(self) -> None:
        """The library's first call never returns."""
        self._machine = ["hang"]
        self._write()

    def heal(self) -> None:
        """The library answers as it should."""
        self._machine, self._answers = [], {}
        self._write()

    def say(self, tool: str, arguments: tuple[str, ...]) -> Answer:
        """What a run of the small tool would say, and do, in this process."""
        if tool != TOOL:
            return Answer(text="", complaint=f"{tool}: command not found", status=127)
        words = " ".join(arguments[_BEFORE:])
        trip = next((one for one in self._trips if one[0] in words), None)
        if trip is not None:
            self._trips.remove(trip)
            if trip[1] == "hang":
                raise TimeoutError
            self._write(trip=trip[1])
        text, complaint, status = dcmi.run(arguments[_BEFORE:], library=arguments[_BEFORE - 1])
        if trip is not None:
            self._write()
            if trip[1] == "stall":
                raise TimeoutError
        return Answer(text=text, complaint=complaint, status=status)

    def answer_in_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let every tool be answered by ``say``: the same calls, without a process each."""

        async def run(tool: Tool, *arguments: str, **_: object) -> ToolAnswer:
            await anyio.lowlevel.checkpoint()
            said = self.say(tool.name, arguments)
            return ToolAnswer(text=said.text, complaint=said.complaint, status=said.status)

        monkeypatch.setattr(Tool, "run", run)

    # ---- files ----------------------------------------------------------------------------------

    def _write(self, *, trip: str = "") -> None:
        kind = vendorparts.ASCEND_CHIPS[self.model]
        lines = [f"version {self.make.version}", *self._machine]
        if trip:
            lines.append(f"trip {trip}")
        lines += [f"answer {call} {code}" for call, code in self._answers.items()]
        lines.append(f"chip {self.model} {kind['ids']} {_numbers(kind['totals'])}")
        lines += [
            f"template {self.model} {name} {_numbers(amounts)}"
            for name, amounts in kind["templates"].items()
        ]
        for index in range(self._count):
            if index not in self._absent:
                lines += self._lines(index)
        fresh = self._folder / "machine.new"
        fresh.write_text("\n".join(lines) + "\n", encoding="ascii")
        fresh.replace(self._folder / "machine")

    def _lines(self, index: int) -> list[str]:
        card, chip = divmod(index, self.dies)
        memory_mib = vendorparts.ASCEND_CHIPS[self.model]["memory_mib"]
        used_mib, core_pct, processes = self._busy.get(index, (0, 0, ()))
        health = 2 if index in self._lost else 0xFFFFFFFF if index in self._failing else 0
        is_hbm = int(not self.model.startswith("310P"))
        place = self.bus_id_of(index).replace(":", " ").replace(".", " ")
        numbers = (
            *(memory_mib, used_mib, core_pct, 36, 912, is_hbm),
            *(int(index in self.shared), self.super_pod, health, self._codes.get(index, 0)),
        )
        die = self.uuid_of(index).replace("-", " ")
        words = " ".join(map(str, (card, chip, index, index, self.model, *numbers)))
        return [
            f"card {words} {place} {die}",
            *(
                f"process {card} {chip} {one.pid} {one.used_mib * _BYTES_PER_MIB}"
                for one in processes
            ),
        ]


def _numbers(amounts: Iterable[int | None]) -> str:
    return " ".join("-1" if amount is None else str(amount) for amount in amounts)
