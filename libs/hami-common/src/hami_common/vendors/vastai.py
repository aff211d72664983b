# SPDX-License-Identifier: Apache-2.0
"""Vastai: whole cards, or whole dies where an administrator chose so.

With ``mutex`` a pod takes dies of cards that no other pod uses. Difference from HAMi v2.10: dies of
one card are not preferred to others.
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
    node,
    number_of,
)

NAME = "vastai"


class VastaiSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``vastai`` of the vendor configuration."""

    resource_count_name: str = "vastaitech.com/va"
    resource_aliases: dict[str, str] = {}
    runtime_class: str = ""


class Vastai(ShareVendor):
    """Pure half of the vendor Vastai."""

    def __init__(self, settings: VastaiSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        s = settings or VastaiSettings()
        super().__init__(
            Description(
                name=NAME,
                families=(Family(count=s.resource_count_name),),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(
                    allow_uuids=("vastaitech.com/use-gpuuuid",),
                    deny_uuids=("vastaitech.com/nouse-gpuuuid",),
                ),
                runtime_class=s.runtime_class,
                runtime_reads_env=False,
            )
        )

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """Devices by number."""
        del context
        return Plan(nodes=tuple(node(f"/dev/va{number_of(device)}") for _, device in given))
