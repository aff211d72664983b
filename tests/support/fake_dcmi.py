# SPDX-License-Identifier: Apache-2.0
"""An Ascend machine behind the fake libdcmi.so, with the methods of ``VendorTools``.

Its library reads another form of the machine's file than those of other vendors, and stores vNPUs
in files of its own. Chips are named by logic id. Memory in MiB, compute in percent of one chip.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hami_nodeagent.drivers.ascend import binding as dcmi
from hami_nodeagent.drivers.errors import (
    DeviceBusy,
    DriverDenied,
    DriverMissing,
    DriverTransient,
    NotSupported,
)
from tests.fakes import vendorparts
from tests.fakes.vendoranswers import Answer
from tests.support.fake_library import FakeLibrary, LibraryFake, built

_BYTES_PER_MIB = 1 << 20
DCMI = LibraryFake(
    vendor="ascend",
    program=dcmi.PROGRAM,
    source="dcmi_fake.c",
    no_driver=("dcmi_init", -8005),
    keys=lambda _: {},
    refusals=(
        ("dcmi_init", -8005, DriverMissing),
        ("dcmi_init", -8002, DriverDenied),
        ("dcmi_init", -8006, DriverTransient),
        ("dcmi_get_card_list", -8005, DriverMissing),
        ("dcmi_get_card_list", -8020, DeviceBusy),
        ("dcmi_get_card_list", -8255, NotSupported),
        ("dcmi_get_card_list", -8017, DriverTransient),
        ("dcmi_get_card_list", -31, DriverTransient),
    ),
    only_library=frozenset({"device_share"}),
)


class FakeDcmi(FakeLibrary):
    """A machine whose chips the library reports. Chips are named by logic id."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        node: str = "node-a",
        model: str = "",
        dies: int = 1,
        build: Callable[[], Path] | None = None,
    ) -> None:
        """``dies``: chips on each card, two for a 910C."""
        self.dies = dies
        self.super_pod = 0
        self.shared: set[int] = set()
        self._codes: dict[int, int] = {}
        self._builds = build
        super().__init__(folder, DCMI, count, node=node, model=model)

    def build(self) -> Path:
        """The fake library's file."""
        return self._builds() if self._builds is not None else built(self.fake.source)

    # ---- chips ----------------------------------------------------------------------------------

    def report(self, index: int, code: int) -> None:
        """The chip has an error code."""
        self._codes[index] = code
        self._write()

    def tell(self, index: int, event: int, serial: int, *, replays: bool = False) -> None:
        """Notify subscribers of a new fault of the chip; ``replays``: later ones as well."""
        path = self._folder / "faults"
        known = path.read_text("ascii") if path.exists() else "replay\n" if replays else ""
        path.write_text(f"{known}{index} {event:x} {serial} 1\n", encoding="ascii")

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
        """Keep the templates."""
        return 0

    def occupy(self, index: int, number: str, *, busy: bool = True) -> None:
        """Attach a container to a vNPU, or detach it."""
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

    # ---- the machine ----------------------------------------------------------------------------

    def say(self, tool: str, arguments: tuple[str, ...]) -> Answer:
        """Return the output of a run of the small tool, with its effects, in this process.

        It sends no notifications: the library's thread would outlive the run.
        """
        if "wait" in arguments:
            return Answer(text="[]")
        return super().say(tool, arguments)

    # ---- files ----------------------------------------------------------------------------------

    def machine_lines(self) -> list[str]:
        """The chip's tables."""
        kind = vendorparts.ASCEND_CHIPS[self.model]
        return [
            f"chip {self.model} {kind['ids']} {_numbers(kind['totals'])}",
            *(
                f"template {self.model} {name} {_numbers(amounts)}"
                for name, amounts in kind["templates"].items()
            ),
        ]

    def device_lines(self, index: int) -> list[str]:
        """A chip and its processes."""
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
