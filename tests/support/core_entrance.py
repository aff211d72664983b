# SPDX-License-Identifier: Apache-2.0
"""The entrance to the scheduling core: its methods by kind, and a guard against bypassing it."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import pytest

from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import Input
from hami_core.placement.verdicts import Verdicts
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.verdicts import QuotaVerdicts
from hami_core.table.inventory import Inventory
from hami_core.table.table import DeviceTable

PARTS: Final = (Ledger, DeviceTable, Inventory, Verdicts, QuotaLedger, QuotaVerdicts)

ANSWERED: Final = {
    "Ledger.handle",
    *(
        found[1]
        for kind in Input.__subclasses__()
        if (found := re.match(r"``(\w+\.\w+)``", kind.__doc__ or ""))
    ),
}
"""Methods that change the core or decide: each is called by ``Core.answer`` alone."""

WITHIN: Final = {
    *(f"Ledger.{name}" for name in ("resume",)),
    *(
        f"DeviceTable.{name}"
        for name in (
            "upsert_node",
            "remove_node",
            "set_health",
            "set_node_alive",
            "book",
            "unbook",
            "rebook",
            "lower_bursts",
            "restore_bursts",
        )
    ),
    *(f"Inventory.{name}" for name in ("resume",)),
    *(f"QuotaLedger.{name}" for name in ("claim", "unclaim", "resume")),
    *(f"QuotaVerdicts.{name}" for name in ("look",)),
}
"""Methods that change the core and are called by its other parts, or build it from a snapshot."""

READS: Final = {
    *(
        f"Ledger.{name}"
        for name in (
            "awaited",
            "carried_of",
            "check",
            "expired",
            "fence",
            "forgettable",
            "reserved_for",
            "holding",
            "holdings",
            "holdings_of_node",
            "holdings_of_pod",
            "holdings_of_owner",
            "memory",
            "ready",
            "reserved",
            "sequence_of",
            "snapshot_id",
            "state_of",
            "story",
            "synced",
            "uids_of_node",
        )
    ),
    *(
        f"DeviceTable.{name}"
        for name in (
            "burst_mib",
            "check",
            "has_divisions",
            "is_withheld",
            "name_ranks",
            "nodes",
            "nodes_with",
            "place",
            "shortfall",
            "usage",
            "usages",
            "withheld",
        )
    ),
    *(
        f"Inventory.{name}"
        for name in (
            "alive_count",
            "devices",
            "excess",
            "faults",
            "memory",
            "of_node",
            "silent",
            "silent_count",
        )
    ),
    *(
        f"QuotaLedger.{name}"
        for name in (
            "claims",
            "expects",
            "governs",
            "headroom",
            "lenders",
            "memory",
            "never",
            "queue_of",
            "queue_rows",
            "quota_rows",
            "quotas",
            "tree",
        )
    ),
    "QuotaVerdicts.governs",
    "Verdicts.comparison",
    "Verdicts.details",
}
"""Methods that change nothing."""

P = ParamSpec("P")
R = TypeVar("R")


def guard_entrance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail each call of the service into a method that only ``Core.answer`` may call."""
    for part in PARTS:
        for name in ANSWERED | WITHIN:
            of, _, method = name.partition(".")
            if of == part.__name__:
                monkeypatch.setattr(part, method, _guarded(getattr(part, method), name))


def _guarded(method: Callable[P, R], name: str) -> Callable[P, R]:
    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        frame = inspect.currentframe()
        caller = frame.f_back.f_globals["__name__"] if frame and frame.f_back else ""
        if caller.startswith("hami_scheduler"):
            pytest.fail(f"{caller} calls {name}: pass an input to Core.answer")
        return method(*args, **kwargs)

    return call
