# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of each device that is in use without an allocation (ADR 44).

Foreign use is the memory of processes that belong to no holder of the device, and what the
processes of a container use beyond its share, or its memory limit above it, and the margin of
breaches. The driver attributes memory to processes, so memory that it keeps for itself does not
count. Small amounts are no foreign use: see ``ForeignRules``. The amount that is reported changes
in steps, and only when all recent samples agree, because each change is a new report of the node.
Memory in MiB.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from hami_nodeagent.core.breach import BreachRules, Process, has_pending_owner, holder_of
from hami_nodeagent.core.holders import Holder


class ForeignRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reporting of memory that processes outside HAMi use, which new pods are not given."""

    enabled: bool = True
    """``false``: no foreign use is reported, and its memory is offered to pods."""
    margin_mib: Annotated[int, Meta(ge=0)] = 512
    """Amount on a device that does not count: monitoring programs, contexts."""
    step_mib: Annotated[int, Meta(ge=1)] = 256
    """Reported amounts are multiples of it, rounded up."""
    looks: Annotated[int, Meta(ge=1)] = 3
    """Samples in a row that must show more before a higher amount is reported."""
    lower_looks: Annotated[int, Meta(ge=1)] = 10
    """Samples in a row that must show less before a lower amount is reported."""


def foreign_mib(
    holders: Sequence[Holder], processes: Iterable[Process], breach: BreachRules
) -> int:
    """Return the memory of one device that no allocation covers; ``holders`` are the device's."""
    total, own_by_share = 0, dict.fromkeys(holders, 0)
    for process in processes:
        holder = holder_of(process, holders)
        if holder is not None:
            own_by_share[holder] += process.used_mib
        elif not has_pending_owner(process, holders):
            total += process.used_mib
    for holder, used_mib in own_by_share.items():
        if not holder.is_whole:
            most_mib = holder.most_mib
            total += max(0, used_mib - most_mib - breach.margin_mib(most_mib))
    return total


class ForeignBook:
    """Amounts to report, by device UUID."""

    def __init__(self, rules: ForeignRules) -> None:
        """Start without samples."""
        self._rules = rules
        self._samples: dict[str, deque[int]] = {}
        self.reported: dict[str, int] = {}

    def look(self, found: Mapping[str, int], devices: Iterable[str]) -> bool:
        """Add a sample of foreign memory; return whether a reported amount changed.

        Devices that ``found`` lacks keep their amount, those that ``devices`` lacks are dropped.
        The first sample of a device is reported at once: the agent has just started.
        """
        before = dict(self.reported)
        known = frozenset(devices)
        for book in (self._samples, self.reported):
            for uuid in book.keys() - known:
                del book[uuid]
        if self._rules.enabled:
            for uuid in found.keys() & known:
                self._add(uuid, self._stepped(found[uuid]))
        return self.reported != before

    def _add(self, uuid: str, amount_mib: int) -> None:
        rules = self._rules
        samples = self._samples.setdefault(uuid, deque(maxlen=max(rules.looks, rules.lower_looks)))
        samples.append(amount_mib)
        recent = list(samples)
        least, most = min(recent[-rules.looks :]), max(recent[-rules.lower_looks :])
        # Where both windows allow a change, the higher amount is the safe one.
        self.reported[uuid] = max(least, min(most, self.reported.get(uuid, amount_mib)))

    def _stepped(self, amount_mib: int) -> int:
        if amount_mib <= self._rules.margin_mib:
            return 0
        return -(-amount_mib // self._rules.step_mib) * self._rules.step_mib
