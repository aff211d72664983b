# SPDX-License-Identifier: Apache-2.0
"""A Kunlunxin machine behind the fake libxpuml.so, whose cards can be cut by SR-IOV."""

from collections.abc import Mapping
from pathlib import Path

from tests.contract.drivers.library_xpuml import FAKE
from tests.support.fake_library import FakeLibrary


class FakeXpuml(FakeLibrary):
    """A machine whose cards are told, and cut, by the library."""

    def __init__(self, folder: Path, count: int, *, node: str = "node-a") -> None:
        self._using: set[int] = set()
        super().__init__(folder, FAKE, count, node=node)

    def parts(self, index: int) -> Mapping[str, Mapping[str, object]]:
        """Functions that are given are files of ours, and nothing of the machine's."""
        return {}

    def profiles(self, index: int) -> int:
        """Sizes stay."""
        return 0

    def cuts(self, index: int) -> int:
        """Into how many functions a card is cut."""
        path = self._folder / "cuts"
        words = path.read_text("ascii").split() if path.exists() else []
        parts = dict(zip(words[::2], words[1::2], strict=True))
        return int(parts.get(str(index), "0"))

    def occupy(self, index: int, number: str, *, busy: bool = True) -> None:
        """Processes use the card or one of its functions, or no more."""
        (self._using.add if busy else self._using.discard)(index)
        self._write()

    def machine_lines(self) -> list[str]:
        """Where the kernel shows functions."""
        return [f"sysfs {self.sysfs}"]

    def device_lines(self, index: int) -> list[str]:
        """A card and whether it is used."""
        first, *rest = super().device_lines(index)
        return [f"{first}\tusing={int(index in self._using)}", *rest]
