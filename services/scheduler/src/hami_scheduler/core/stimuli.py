# SPDX-License-Identifier: Apache-2.0
"""What the shell tells the ledger (stimuli) and what the ledger asks the shell to do (effects).

Times are seconds of this replica's clock; sequences are stream sequences of the bucket concerned.
How they are used together stands in ``hami_scheduler.core.ledger``.
"""

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.allocation import Account, AllocationRecord, StateRecord
from hami_common.ports import Expect
from hami_scheduler.core.repair import Holding


class RecordSeen(Struct, frozen=True, kw_only=True):
    """The feed of ``hami_alloc`` delivered a record."""

    seq: int
    record: AllocationRecord
    now_s: float


class StateSeen(Struct, frozen=True, kw_only=True):
    """A state record was delivered by the feed of ``hami_state``, or our own was accepted."""

    seq: int
    state: StateRecord
    now_s: float


class NodeRead(Struct, frozen=True, kw_only=True):
    """One consistent read of the newest record of every key of a node.

    All as of one sequence of the stream: else a record could be skipped, and the fence would lie.
    """

    node: str
    entries: tuple[tuple[int, AllocationRecord], ...]
    now_s: float


class FeedSynced(Struct, frozen=True, kw_only=True):
    """What was stored in ``hami_alloc`` and ``hami_state`` before the watches began has arrived."""

    now_s: float


class Repaired(Struct, frozen=True, kw_only=True):
    """Ledger and pods were compared once in full, and the steps were carried out."""

    now_s: float


class Tick(Struct, frozen=True, kw_only=True):
    """Time went on."""

    now_s: float


class Wiped(Struct, frozen=True, kw_only=True):
    """The bus lost its storage: sequences begin anew."""

    now_s: float


class Append(Struct, frozen=True, kw_only=True):
    """Store ``record`` under ``key`` of ``hami_alloc`` on the condition ``expect``.

    Then ``handle(Accepted(...))``.
    """

    record: AllocationRecord
    key: str
    expect: Expect
    fenced: bool
    """Whether the condition is the node's fence (else: the key's own sequence)."""

    def under(self, account: Account | None) -> "Append":
        """The same, with what quotas count the pod under."""
        return replace(self, record=replace(self.record, account=account))


class Accepted(Struct, frozen=True, kw_only=True):
    """The bus accepted an ``Append`` of ours with sequence ``seq``."""

    append: Append
    seq: int
    now_s: float


class Reuse(Struct, frozen=True, kw_only=True):
    """The pod already holds a fitting reservation on this node: renew it, then bind with it."""

    holding: Holding


class WriteState(Struct, frozen=True, kw_only=True):
    """Store ``state`` under ``key`` of ``hami_state`` on the condition ``expect``.

    Then ``handle(StateSeen(...))``.
    """

    state: StateRecord
    key: str
    expect: Expect


class Examine(Struct, frozen=True, kw_only=True):
    """A lease ran out.

    Find out whether the Binding arrived, and make sure that it cannot arrive any more.
    """

    holding: Holding


class CapacityReturned(Struct, frozen=True, kw_only=True):
    """Shares on this node became free: pods that wait may fit now."""

    node: str


class Over(Struct, frozen=True, kw_only=True):
    """Devices that are now booked beyond their capacity.

    Because pods that run win over arithmetic (design D6).
    """

    node: str
    uuids: tuple[str, ...]


Stimulus = RecordSeen | StateSeen | NodeRead | FeedSynced | Repaired | Tick | Wiped | Accepted
Effect = Examine | CapacityReturned | Over
