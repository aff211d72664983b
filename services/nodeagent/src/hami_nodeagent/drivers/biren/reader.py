# SPDX-License-Identifier: Apache-2.0
"""Biren through its library BRML, or through brsmi's query and the sysfs path of ``card_<N>``.

Both interfaces identify a card by ``card_<N>`` of the node, because brsmi reports no other
identity. brsmi reports no health either: a card without an answer is a failed probe. Only the
library reports the instances of a card that SVI divides.
"""

from pathlib import Path

from msgspec.structs import replace

from hami_nodeagent.drivers.biren import binding as brml
from hami_nodeagent.drivers.biren import parse
from hami_nodeagent.drivers.library import TwoWayReader
from hami_nodeagent.drivers.parse import forms, library
from hami_nodeagent.drivers.parse.seen import Seen, Sight

_QUERY = (
    "gpu",
    f"--query-gpu={','.join(parse.COLUMNS)}",
    "--format=csv,noheader,nounits",
)


class BirenReader(TwoWayReader):
    """BRML, or brsmi."""

    vendor = "biren"
    tool_name = "brsmi"
    program = brml.PROGRAM

    async def glance_library(self) -> Sight:
        """One run for all cards."""
        return await self._told("glance")

    async def survey_library(self) -> Sight:
        """The same, and the links."""
        return await self._told("survey")

    async def _told(self, word: str) -> Sight:
        sight = await self.library.ask(library.devices, word)
        devices = tuple(
            replace(seen, uuid=self._identity(seen), type=parse.TYPE, mode="whole")
            for seen in sight.devices
        )
        return replace(sight, devices=devices)

    async def glance_tool(self) -> Sight:
        """See ``survey_tool``."""
        return await self.survey_tool()

    async def survey_tool(self) -> Sight:
        """Run the query and read the PCI address of each card."""
        cards = await self.ask(parse.cards, *_QUERY)
        return Sight(devices=tuple([await self._placed(card) for card in cards]))

    async def _placed(self, card: Seen) -> Seen:
        address = await self.read_files(self._address, card.index)
        return replace(card, uuid=self._identity(card), bus_id=address, mode="whole")

    def _identity(self, card: Seen) -> str:
        return f"{self.settings.node}-card_{card.index}"

    def _address(self, number: int) -> str:
        """Return the PCI address of ``/sys/class/biren/card_<N>``; empty where sysfs has none."""
        link = Path(self.settings.sysfs_root) / f"class/biren/card_{number}/device"
        try:
            return forms.bus_id(link.resolve(strict=True).name)
        except OSError:
            return ""
