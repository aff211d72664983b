# SPDX-License-Identifier: Apache-2.0
"""Writers of the scheduler's parts to the outside: ledger, pods, claims, evictions, settling."""

from msgspec import Struct

from hami_core.ledger.holding import Holding
from hami_scheduler.shell.backlog import Backlog
from hami_scheduler.shell.claimkeeper import ClaimKeeper
from hami_scheduler.shell.evictions import Evictions
from hami_scheduler.shell.ledgerwriter import LedgerWriter
from hami_scheduler.shell.podapi import PodApi
from hami_scheduler.shell.podclaims import PodClaims
from hami_scheduler.shell.settling import Settling


class Effects(Struct, frozen=True, kw_only=True):
    """Writers that several parts share."""

    ledger: LedgerWriter
    pods: PodApi
    claims: PodClaims
    keeper: ClaimKeeper
    settling: Settling
    evictions: Evictions
    confirmations: Backlog[Holding]
    """Bound allocations whose state is to be reported, in batches."""
