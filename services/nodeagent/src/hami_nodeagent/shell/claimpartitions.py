# SPDX-License-Identifier: Apache-2.0
"""Hardware partitions of ResourceClaims (ADR 0040).

``shell.partitions`` creates the partitions of every ledger record of this node, those of claims
among them, and removes them when the record is released and the claim unprepared. Here a claim
waits for them, and gets their names.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from hami_common.events.allocation import AllocationRecord
from hami_common.model.placement import Share
from hami_common.vendors.protocol import RenderContext
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.grants import Grant
from hami_nodeagent.core.partitions import Owner
from hami_nodeagent.core.resourceclaims import Code, Refuse
from hami_nodeagent.shell.site import Site


class Hardware(Protocol):
    """The node's partitions; ``shell.partitions.Partitions``."""

    async def ensure_shares(self, owners: Mapping[Owner, str]) -> str: ...


class ClaimPartitions:
    """The partitions of this node's claims."""

    def __init__(self, site: Site, hardware: Hardware) -> None:
        self._board = site.picture.partitions
        self._hardware = hardware
        self._is_cdi = site.settings.injection == "cdi"

    def owners_of(self, record: AllocationRecord, vendor: str = "") -> dict[Owner, str]:
        """Return the record's shares that need a partition, with their device."""
        entry = Entry(record=record, sequence=0)
        return {
            owner: uuid
            for container in record.containers
            for owner, uuid in self._board.owners(entry, container.name, vendor).items()
        }

    async def ensure(self, record: AllocationRecord) -> Refuse | None:
        """Wait until a new reading shows the claim's partitions; a refusal if that takes long."""
        owners = self.owners_of(record)
        if not owners:
            return None
        problem = await self._hardware.ensure_shares(owners)
        if not problem:
            return None
        return Refuse(
            code=Code.PARTITION_NOT_READY,
            text=f"claim {record.namespace}/{record.pod}: its hardware partition is not there: "
            f"{problem}",
        )

    def context_of(
        self,
        record: AllocationRecord,
        grant: Grant,
        own: Sequence[Share],
        context: RenderContext,
    ) -> RenderContext:
        """Return the input for rendering one request, with the names of its partitions.

        The claim's CDI file then has all that a partition needs, because the vendors' own files
        name whole devices.
        """
        owners = {
            owner: uuid
            for owner, uuid in self.owners_of(record, grant.vendor).items()
            if owner.container == grant.container
        }
        if not owners:
            return context
        return replace(
            context,
            mode="devices" if self._is_cdi else context.mode,
            handles=self._board.handles(owners, own),
            divides=True,
        )
