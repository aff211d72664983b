# SPDX-License-Identifier: Apache-2.0
"""Orders the pods that wait, by queue, and estimates when one starts.

kube-scheduler tries pending pods by priority, then by age; a pod that is refused does not hold up
those behind it. So a position is the order of attempts, not a promise: a smaller pod may start
first. Pods that belong to no queue share one order.

An estimate extrapolates what was observed: how many pods of the queue started in the last hour
after they had waited. Without enough of them, or without one that requested at least as much as
this pod, there is no estimate. Memory in MiB, compute in percent of one device, times in seconds.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from msgspec import Struct

from hami_core.quota.resourcequota import Amounts, Resource, add_to

WINDOW_S: Final = 3600.0
"""Age up to which a start counts."""
WAITED_S: Final = 10.0
"""Least time between creation and reservation of a pod that counts as one that waited."""
LEAST_SERVED: Final = 3
"""Starts in the window from which a rate is derived."""
LEAST_WINDOW_S: Final = 60.0
SERVED_MOST: Final = 20_000
"""Starts that are remembered, of all queues together; beyond, the oldest are dropped."""

Basis = Literal["rate", "few-starts", "none-as-large", "never"]
"""``rate``: extrapolated; otherwise why there is no estimate: too few pods of the queue started in
the window; none of them was as large; a limit is below what the pod requests.
"""


class Waiter(Struct, frozen=True, kw_only=True):
    """A pod that waits."""

    uid: str
    queue: str
    """Empty: of no queue."""
    priority: int
    created_s: float
    name: str
    """``namespace/name``; orders pods of equal age."""
    wanted: Amounts


class Place(Struct, frozen=True, kw_only=True):
    """Position of a pod in its queue."""

    position: int
    """1: kube-scheduler tries it first."""
    ahead: Mapping[Resource, int]
    """Amounts that the pods ahead request together."""


class Estimate(Struct, frozen=True, kw_only=True):
    """Expected time until a pod starts, with its basis."""

    wait_s: float | None
    """``None``: there is no basis for an estimate."""
    basis: Basis
    served: int
    """Pods of the queue that started in the window after they had waited."""
    window_s: float
    """Time that was observed, at most an hour."""


def places(waiters: Iterable[Waiter]) -> dict[str, Place]:
    """Return the position of each pod among those of its queue, by uid."""
    found: dict[str, Place] = {}
    number_by_queue: dict[str, int] = {}
    ahead_by_queue: dict[str, dict[Resource, int]] = {}
    ordered = sorted(waiters, key=lambda one: (-one.priority, one.created_s, one.name, one.uid))
    for one in ordered:
        ahead = ahead_by_queue.setdefault(one.queue, {})
        number = number_by_queue[one.queue] = number_by_queue.get(one.queue, 0) + 1
        found[one.uid] = Place(position=number, ahead=dict(ahead))
        add_to(ahead, one.wanted)
    return found


class _Start(Struct, frozen=True):
    queue: str
    time_s: float
    wanted: Amounts


class Starts:
    """Pods that started after they had waited, as far as they were observed."""

    def __init__(self) -> None:
        """Start without observations."""
        self._since_s: float | None = None
        self._starts: OrderedDict[str, _Start] = OrderedDict()
        """By pod uid, the oldest first."""

    def begin(self, *, now_s: float) -> None:
        """Note that every start from now on is observed; earlier ones are dropped."""
        self._since_s = now_s
        self._starts.clear()

    def seen(self, waiter: Waiter, *, now_s: float) -> None:
        """Note that a pod received its devices; one that hardly waited does not count."""
        if self._since_s is None or not waiter.created_s:
            return
        if now_s - waiter.created_s >= WAITED_S:
            self._starts.pop(waiter.uid, None)
            self._starts[waiter.uid] = _Start(waiter.queue, now_s, waiter.wanted)
        while len(self._starts) > SERVED_MOST:
            self._starts.popitem(last=False)

    def estimate(self, waiter: Waiter, position: int, *, never: bool, now_s: float) -> Estimate:
        """Estimate the time until the pod at ``position`` starts.

        ``never``: a limit is below its request.
        """
        while self._starts and next(iter(self._starts.values())).time_s < now_s - WINDOW_S:
            self._starts.popitem(last=False)
        since_s = now_s if self._since_s is None else self._since_s
        window_s = max(0.0, min(WINDOW_S, now_s - since_s))
        mine = [one for one in self._starts.values() if one.queue == waiter.queue]
        wait_s: float | None = None
        basis: Basis
        if never:
            basis = "never"
        elif len(mine) < LEAST_SERVED or window_s < LEAST_WINDOW_S:
            basis = "few-starts"
        elif not any(_covers(one.wanted, waiter.wanted) for one in mine):
            basis = "none-as-large"
        else:
            basis, wait_s = "rate", position * window_s / len(mine)
        return Estimate(wait_s=wait_s, basis=basis, served=len(mine), window_s=window_s)


def _covers(larger: Amounts, smaller: Amounts) -> bool:
    return all(larger.get(resource, 0) >= amount for resource, amount in smaller.items())
