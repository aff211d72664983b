# SPDX-License-Identifier: Apache-2.0
"""Biren through brsmi's query, and sysfs for the address of ``card_<N>``.

brsmi tells no identity and no health: a card that is not answered for is a failed probe.
"""

from pathlib import Path

from msgspec.structs import replace

from hami_nodeagent.drivers.parse import biren as parse
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Seen, Sight
from hami_nodeagent.drivers.reader import Signs, ToolReader

SIGNS = Signs(pci_vendors=("1ee0",), paths=("class/biren",), tool="brsmi")
_QUERY = (
    "gpu",
    f"--query-gpu={','.join(parse.COLUMNS)}",
    "--format=csv,noheader,nounits",
)


class BirenReader(ToolReader):
    """brsmi."""

    vendor = "biren"
    tool_name = "brsmi"

    async def glance(self) -> Sight:
        """See ``survey``."""
        return await self.survey()

    async def survey(self) -> Sight:
        """The query, and where each card sits."""
        cards = await self.ask(parse.cards, *_QUERY)
        return Sight(devices=tuple([await self._placed(card) for card in cards]))

    async def _placed(self, card: Seen) -> Seen:
        address = await self.read_files(self._address, card.index)
        return replace(
            card, uuid=f"{self.settings.node}-card_{card.index}", bus_id=address, mode="whole"
        )

    def _address(self, number: int) -> str:
        """PCI address behind ``/sys/class/biren/card_<N>``; empty where sysfs does not tell."""
        link = Path(self.settings.sysfs_root) / f"class/biren/card_{number}/device"
        try:
            return forms.bus_id(link.resolve(strict=True).name)
        except OSError:
            return ""
