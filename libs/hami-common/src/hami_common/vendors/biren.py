# SPDX-License-Identifier: Apache-2.0
"""Biren: whole cards, or the equal parts into which an administrator cut them.

Each part counts as a card of its own.
"""

from collections.abc import Sequence

from msgspec import Struct

from hami_common.vendors.protocol import RenderContext
from hami_common.vendors.sharing import (
    Description,
    Family,
    Given,
    Plan,
    SelectorKeys,
    ShareVendor,
    mount,
    node,
    number_of,
)

NAME = "biren"


class BirenSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``biren`` of the vendor configuration."""

    resource_count_name: str = "birentech.com/gpu"
    resource_aliases: dict[str, str] = {}
    runtime_class: str = ""


class Biren(ShareVendor):
    """Pure half of the vendor Biren."""

    def __init__(self, settings: BirenSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        s = settings or BirenSettings()
        super().__init__(
            Description(
                name=NAME,
                families=(Family(count=s.resource_count_name),),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(
                    allow_uuids=("birentech.com/use-gpuuuid",),
                    deny_uuids=("birentech.com/nouse-gpuuuid",),
                ),
                runtime_class=s.runtime_class,
                node_env=("BR_PHY_CARDS", "BIREN_VISIBLE_DEVICES"),
                cdi_kind="birentech.com/gpu",
            )
        )

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """Devices by number."""
        del context
        cards = [f"card_{number_of(device)}" for _, device in given]
        return Plan(
            env={"BR_PHY_CARDS": ",".join(cards)},
            nodes=tuple(node(f"/dev/biren/{card}") for card in cards),
            mounts=(mount("/usr/bin/brsmi"),),
        )

    def cdi_name(self, pair: Given) -> str:
        """The card's name."""
        return f"card_{number_of(pair.device)}"
