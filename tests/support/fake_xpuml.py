# SPDX-License-Identifier: Apache-2.0
"""A Kunlunxin machine behind the fake libxpuml.so, whose cards can be cut by SR-IOV."""

from collections.abc import Mapping
from pathlib import Path

from tests.contract.drivers.library_xpuml import FAKE
from tests.support.fake_library import FakeLibrary


class FakeXpuml(FakeLibrary):
    """A machine whose cards the library reports and divides."""

    def __init__(self, folder: Path, count: int, *, node: str = "node-a") -> None:
        self._using: set[int] = set()
        super().__init__(folder, FAKE, count, node=node)

    def parts(self, index: int) -> Mapping[str, Mapping[str, object]]:
        """Return functions in use: files of ours, not real devices."""
        return {}

    def profiles(self, index: int) -> int:
        """Keep the sizes."""
        return 0

    def cuts(self, index: int) -> int:
        """Return the number of functions into which a card is divided."""
        path = self._folder / "cuts"
        words = path.read_text("ascii").split() if path.exists() else []
        parts = dict(zip(words[::2], words[1::2], strict=True))
        return int(parts.get(str(index), "0"))

    def occupy(self, index: int, number: str, *, busy: bool = True) -> None:
        """Attach processes to the card or one of its functions, or detach them."""
        (self._using.add if busy else self._using.discard)(index)
        self._write()

    def machine_lines(self) -> list[str]:
        """Directory in which the kernel shows functions."""
        return [f"sysfs {self.sysfs}"]

    def device_lines(self, index: int) -> list[str]:
        """A card and whether it is used."""
        first, *rest = super().device_lines(index)
        return [f"{first}\tusing={int(index in self._using)}", *rest]
