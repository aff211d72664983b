# SPDX-License-Identifier: Apache-2.0
"""A live record of the ledger together with the newest state of its allocation."""

from msgspec import Struct

from hami_common.events.allocation import AllocationRecord, StateRecord

EXISTING_CONTAINERS = frozenset({"prepared", "running"})
"""States of allocations that win any dispute: their containers exist."""


class Holding(Struct, frozen=True, kw_only=True):
    """A live record of the ledger, with the state that belongs to it."""

    record: AllocationRecord
    revision: int
    state: StateRecord | None = None

    def containers_exist(self) -> bool:
        """Return whether the agent reported that the pod's containers were prepared or run."""
        return (
            self.state is not None
            and self.state.allocation_id == self.record.allocation_id
            and self.state.state in EXISTING_CONTAINERS
        )
