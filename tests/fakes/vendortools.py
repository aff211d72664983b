# SPDX-License-Identifier: Apache-2.0
"""Fake command-line tools of accelerator vendors, for machines without any of their hardware.

``VendorTools`` keeps a directory with the vendor's tools, each a small shell script that prints the
answer prepared for exactly the arguments it was given, and a tree of the cards as in sysfs.
Methods inject faults into cards and driver; each prepares all answers again and replaces them
atomically. ``vendoranswers`` contains the output of real tools in each case. ``vendorparts``, which
the scripts run, answers commands about hardware partitions. Memory in MiB, compute in percent of
one card.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import NotFound
from hami_sim.hardware.fake_nvml import Process
from tests.fakes import vendoranswers, vendorparts
from tests.fakes.vendoranswers import Answer, Card, Make

_RENDER_NODE = "render\x44{}"
_SCRIPT = """#!/bin/sh
# Prints the answer that was prepared for these arguments.
answers='{answers}'
[ -e "$answers/hang" ] && {{ sleep 600 & wait; }}
IFS=_
file="$answers/{tool}/args_$*"
[ -e "$file.out" ] || file="$answers/trouble"
if [ ! -e "$file.out" ]; then
    unset IFS
    exec '{python}' -I -S '{parts}' '{folder}' {tool} "$@"
fi
[ -s "$file.err" ] && cat "$file.err" >&2
cat "$file.out"
read -r status < "$file.status"
exit "$status"
"""


class Machine(Struct, frozen=True, kw_only=True):
    """Faults of the machine as a whole; the first that is set applies."""

    trouble: Answer | None = None
    """Every tool answers this whatever it is asked."""
    hangs: bool = False
    garbled: str = ""
    """``garbage``: answers are noise; ``truncated``: they end in the middle."""


class VendorTools:
    """One vendor's tools on a fake machine. Cards are named by index."""

    def __init__(
        self,
        folder: Path,
        vendor: str,
        count: int,
        *,
        node: str = "node-a",
        model: str = "",
        divided: bool = False,
    ) -> None:
        """Put the tools of ``vendor`` for ``count`` cards into ``folder``, which must exist.

        ``model``: another chip than the vendor's usual one. ``divided``: the cards are in the mode
        in which they can be divided.
        """
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
        self._cards = [
            vendoranswers.card(self.make, index, model=model, divided=divided)
            for index in range(count)
        ]
        self.bin.mkdir(parents=True)
        self.etc.mkdir()
        answers = folder / "answers"
        for tool in self.make.tools:
            path = self.bin / tool
            script = _SCRIPT.format(
                answers=answers,
                tool=tool,
                folder=folder,
                python=sys.executable,
                parts=vendorparts.__file__,
            )
            path.write_text(script, encoding="utf-8")
            path.chmod(0o755)
        with vendorparts.state_of(folder) as state:
            state["sysfs"] = str(self.sysfs)
        self._write()

    @property
    def tool(self) -> Path:
        """The file of the vendor's main tool."""
        return self.bin / self.make.tools[0]

    @property
    def settings(self) -> dict[str, str]:
        """Settings with which the agent's driver of this vendor finds the machine."""
        return {
            "tool_path": str(self.tool),
            "sysfs_root": str(self.sysfs),
            "etc_root": str(self.etc),
            "shares_root": str(self._folder / "shares"),
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
        """Break the card: its tool reports the loss, or no longer lists the card."""
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
        """Set the card's usage."""
        self._change(index, used_mib=used_mib, core_pct=core_pct, processes=tuple(processes))

    # ---- partitions -----------------------------------------------------------------------------

    def parts(self, index: int) -> Mapping[str, Mapping[str, object]]:
        """The card's partitions now, by the vendor's number."""
        with vendorparts.state_of(self._folder) as state:
            found: Mapping[str, Mapping[str, object]] = state.get("parts", {}).get(str(index), {})
        return found

    def cuts(self, index: int) -> int:
        """Into how many equal parts a card is cut, where a card is cut as a whole."""
        with vendorparts.state_of(self._folder) as state:
            return int(state.get("cuts", {}).get(str(index), 0))

    def profiles(self, index: int) -> int:
        """Return the number of sMLU profiles of a card."""
        with vendorparts.state_of(self._folder) as state:
            return len(state.get("profiles", {}).get(str(index), []))

    def occupy(self, index: int, number: str, *, busy: bool = True) -> None:
        """Processes use a partition, or no more; where a card is cut as a whole, any of them."""
        with vendorparts.state_of(self._folder) as state:
            state.setdefault("using", {})[str(index)] = busy
            part = state.get("parts", {}).get(str(index), {}).get(number)
            if part is not None:
                part["busy"] = busy

    def trip(self, word: str, how: str, *, times: int = 1) -> None:
        """Make the next commands with ``word`` fail.

        ``fail``: the command has no effect and reports failure. ``late``: it takes effect and
        reports failure. ``hang``, ``stall``: it never ends, before or after it takes effect.
        ``garbage``: it takes effect and its output is noise.
        """
        with vendorparts.state_of(self._folder) as state:
            state.setdefault("faults", []).extend([{"word": word, "how": how}] * times)

    def forgive(self) -> None:
        """No command goes wrong any more that was to."""
        with vendorparts.state_of(self._folder) as state:
            state["faults"] = []

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
        """Return the tools' current answers, by tool and arguments."""
        present = [card for card in self._cards if card.present]
        prepared = self.make.answers(present, self._machine.trouble)
        if not present and self._machine.trouble is None:
            return dict.fromkeys(prepared, self.make.no_device)
        return prepared

    def say(self, tool: str, arguments: tuple[str, ...]) -> Answer:
        """Return the answer of a tool's run and apply its effect, without starting a process.

        Raises ``TimeoutError`` if the run would never end.
        """
        prepared = self._told.get((tool, arguments))
        healthy = self._machine.trouble is None and any(card.present for card in self._cards)
        if not healthy:
            return prepared or self._machine.trouble or self.make.no_device
        if prepared is not None and not vendorparts.is_live(tool, arguments):
            return self._garbled(prepared)
        (text, complaint, status), how = vendorparts.run(self._folder, tool, list(arguments))
        if how in vendorparts.ENDLESS:
            raise TimeoutError
        return self._garbled(Answer(text=text, complaint=complaint, status=status))

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
        healthy = self._machine.trouble is None and any(card.present for card in self._cards)
        self._told = self.answers()
        for (tool, arguments), answer in self._told.items():
            if healthy and vendorparts.is_live(tool, arguments):
                continue
            told = self._garbled(answer)
            (fresh / tool).mkdir(parents=True, exist_ok=True)
            _put(fresh / tool / ("args_" + "_".join(arguments)), told)
        fresh.mkdir(exist_ok=True)
        if self._machine.hangs:
            (fresh / "hang").touch()
        if self._machine.garbled:
            (fresh / self._machine.garbled).touch()
        if not healthy:
            _put(fresh / "trouble", self._machine.trouble or self.make.no_device)
        present = [
            {**card.plain(), "uuid": self.make.uuid(card, self.node).partition("-")[2]}
            for card in self._cards
            if card.present
        ]
        (self._folder / "cards.json").write_text(json.dumps(present), encoding="utf-8")
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
        if self.make.sysfs_class:
            self._write_class(self.sysfs / "class" / self.make.sysfs_class)
        if self.make.tree is not None:
            self._write_tree(self.make.tree)

    def _write_class(self, folder: Path) -> None:
        """Links to the cards, where the vendor's driver shows them in a class of its own."""
        shutil.rmtree(folder, ignore_errors=True)
        for card in self._cards:
            if card.present:
                place = folder / f"card_{card.index}"
                place.mkdir(parents=True)
                (place / "device").symlink_to(self.sysfs / "bus/pci/devices" / card.bus_id)

    def _write_tree(self, files: Callable[[Card], Mapping[str, str]]) -> None:
        """Write the files in which the vendor's driver shows the present cards."""
        for card in self._cards:
            for name, text in files(card).items():
                path = self.sysfs / name
                if card.present:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="ascii")
                elif path.exists():
                    path.unlink()
                    with suppress(OSError):  # others are still there
                        os.removedirs(path.parent)


def _put(path: Path, answer: Answer) -> None:
    """Store an answer where the script looks for it."""
    for suffix, text in ((".out", answer.text), (".err", answer.complaint)):
        path.with_name(path.name + suffix).write_text(text, encoding="utf-8")
    path.with_name(path.name + ".status").write_text(f"{answer.status}\n", encoding="ascii")
