# SPDX-License-Identifier: Apache-2.0
"""Fake command-line tools of accelerator vendors, for machines without any of their hardware.

``VendorTools`` keeps a directory with the vendor's tools, each a small shell script that prints the
answer prepared for exactly the arguments it was given, and a tree as sysfs shows the cards. What
befalls cards and driver is told by methods; each prepares all answers anew and puts them in place
at once. What real tools print in each case is in ``vendoranswers``. Memory in MiB, compute in
percent of one card.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import NotFound
from hami_sim.hardware import vendoranswers
from hami_sim.hardware.fake_nvml import Process
from hami_sim.hardware.vendoranswers import Answer, Card, Make

_RENDER_NODE = "render\x44{}"
_SCRIPT = """#!/bin/sh
# Prints the answer that was prepared for these arguments.
answers='{answers}'
[ -e "$answers/hang" ] && {{ sleep 600 & wait; }}
IFS=_
file="$answers/{tool}/args_$*"
if [ ! -e "$file.out" ]; then
    echo "{tool}: unknown argument: $*" >&2
    exit 64
fi
[ -s "$file.err" ] && cat "$file.err" >&2
cat "$file.out"
read -r status < "$file.status"
exit "$status"
"""


class Machine(Struct, frozen=True, kw_only=True):
    """What is wrong with the machine as a whole; the first that is set decides."""

    trouble: Answer | None = None
    """Every tool answers this whatever it is asked."""
    hangs: bool = False
    garbled: str = ""
    """``garbage``: answers are noise; ``truncated``: they end in the middle."""


class VendorTools:
    """One vendor's tools on a fake machine. Cards are named by index."""

    def __init__(self, folder: Path, vendor: str, count: int, *, node: str = "node-a") -> None:
        """Put the tools of ``vendor`` for ``count`` cards into ``folder``, which must exist."""
        if vendor not in vendoranswers.MAKE_BY_VENDOR:
            raise NotFound(what=f"a fake tool of the vendor {vendor!r}")
        self.make: Make = vendoranswers.MAKE_BY_VENDOR[vendor]
        self.vendor = vendor
        self.node = node
        self.bin = folder / "bin"
        self.sysfs = folder / "sys"
        self.etc = folder / "etc"
        self._folder = folder
        self._generation = 0
        self._machine = Machine()
        self._cards = [vendoranswers.card(self.make, index) for index in range(count)]
        self.bin.mkdir(parents=True)
        self.etc.mkdir()
        answers = folder / "answers"
        for tool in self.make.tools:
            path = self.bin / tool
            path.write_text(_SCRIPT.format(answers=answers, tool=tool), encoding="ascii")
            path.chmod(0o755)
        self._write()

    @property
    def tool(self) -> Path:
        """The file of the vendor's main tool."""
        return self.bin / self.make.tools[0]

    @property
    def settings(self) -> dict[str, str]:
        """Where the agent's driver of this vendor finds the machine."""
        return {
            "tool_path": str(self.tool),
            "sysfs_root": str(self.sysfs),
            "etc_root": str(self.etc),
            "node": self.node,
        }

    def uuid_of(self, index: int) -> str:
        """Identity of a card, as the driver reports it."""
        return self.make.uuid(self._card(index), self.node)

    def numa_of(self, index: int) -> int:
        """NUMA node of a card."""
        return self._card(index).numa

    def bus_id_of(self, index: int) -> str:
        """PCI address of a card as sysfs writes it."""
        return self._card(index).bus_id

    # ---- cards ----------------------------------------------------------------------------------

    def lose(self, index: int) -> None:
        """The card breaks: its tool says so, or lists it no more where it cannot say it."""
        self._change(index, lost=True)

    def fail(self, index: int) -> None:
        """The tool has no proper values for the card."""
        self._change(index, failing=True)

    def restore(self, index: int) -> None:
        """The card works again."""
        self._change(index, lost=False, failing=False)

    def unplug(self, index: int) -> None:
        """The card is not in the machine."""
        self._change(index, present=False)

    def plug(self, index: int) -> None:
        """The opposite of ``unplug``."""
        self._change(index, present=True)

    def use(
        self, index: int, used_mib: int, core_pct: int, processes: Sequence[Process] = ()
    ) -> None:
        """What is done with the card."""
        self._change(index, used_mib=used_mib, core_pct=core_pct, processes=tuple(processes))

    # ---- the machine ----------------------------------------------------------------------------

    def unload_driver(self) -> None:
        """Tools answer that there is no driver."""
        self._set(Machine(trouble=self.make.no_driver))

    def remove_tools(self) -> None:
        """No tool is installed."""
        for tool in self.make.tools:
            (self.bin / tool).unlink(missing_ok=True)

    def answer(self, text: str, *, complaint: str = "", status: int = 1) -> None:
        """Tools answer this whatever they are asked."""
        self._set(Machine(trouble=Answer(text=text, complaint=complaint, status=status)))

    def hang(self) -> None:
        """Tools never answer."""
        self._set(Machine(hangs=True))

    def garble(self, how: str) -> None:
        """``garbage`` or ``truncated``."""
        self._set(Machine(garbled=how))

    def heal(self) -> None:
        """Tools answer as they should."""
        self._set(Machine())

    def answers(self) -> Mapping[tuple[str, tuple[str, ...]], Answer]:
        """What the tools say now, by tool and arguments."""
        present = [card for card in self._cards if card.present]
        prepared = self.make.answers(present, self._machine.trouble)
        if not present and self._machine.trouble is None:
            return dict.fromkeys(prepared, self.make.no_device)
        return prepared

    # ---- files ----------------------------------------------------------------------------------

    def _card(self, index: int) -> Card:
        if not 0 <= index < len(self._cards):
            raise NotFound(what=f"card {index} of the fake machine")
        return self._cards[index]

    def _change(self, index: int, **changes: object) -> None:
        self._cards[index] = replace(self._card(index), **changes)
        self._write()

    def _set(self, machine: Machine) -> None:
        self._machine = machine
        self._write()

    def _write(self) -> None:
        """Prepare all answers in a fresh directory and switch to it."""
        self._generation += 1
        fresh = self._folder / f"answers.{self._generation}"
        for (tool, arguments), answer in self.answers().items():
            told = self._garbled(answer)
            name = "args_" + "_".join(arguments)
            (fresh / tool).mkdir(parents=True, exist_ok=True)
            (fresh / tool / f"{name}.out").write_text(told.text, encoding="utf-8")
            (fresh / tool / f"{name}.err").write_text(told.complaint, encoding="utf-8")
            (fresh / tool / f"{name}.status").write_text(f"{told.status}\n", encoding="ascii")
        if self._machine.hangs:
            (fresh / "hang").touch()
        link = self._folder / "answers"
        beside = self._folder / f".answers.{os.getpid()}"
        beside.symlink_to(fresh.name)
        beside.replace(link)
        if self._generation > 1:
            shutil.rmtree(self._folder / f"answers.{self._generation - 1}", ignore_errors=True)
        self._write_sysfs()

    def _garbled(self, answer: Answer) -> Answer:
        if self._machine.garbled == "garbage":
            return replace(answer, text="\x1b[2J~~ %%@#! ???\n" * 3)
        if self._machine.garbled == "truncated":
            # In the middle of a line: a text that ends between two lines looks like a whole one.
            half = answer.text[: len(answer.text) * 6 // 10].rstrip("\n+-=|")
            return replace(answer, text=half[:-1].rstrip("\n+-=|"))
        return answer

    def _write_sysfs(self) -> None:
        devices = self.sysfs / "bus/pci/devices"
        devices.mkdir(parents=True, exist_ok=True)
        for card in self._cards:
            place = devices / card.bus_id
            if not card.present:
                shutil.rmtree(place, ignore_errors=True)
            elif not place.exists():
                place.mkdir()
                (place / "vendor").write_text(f"0x{self.make.pci_vendor}\n", encoding="ascii")
                (place / "class").write_text(f"0x{self.make.pci_class}\n", encoding="ascii")
                (place / "numa_node").write_text(f"{card.numa}\n", encoding="ascii")
                drm = place / "drm"
                drm.mkdir()
                (drm / f"card{card.index}").mkdir()
                (drm / _RENDER_NODE.format(128 + card.index)).mkdir()
