# SPDX-License-Identifier: Apache-2.0
"""The state of this replica: devices, ledger, pods, and their completeness.

Touched only from the event loop and never across an await, so each reader sees one snapshot (style
2.7). The feeds write the inventory and the pods; only the ledger books shares. Effects that the
ledger returns are queued with ``later``, which must not block. Seconds throughout.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator

import anyio

from hami_common.errors import InvariantBroken, Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.ports import Clock
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.supervise import Supervisor
from hami_core.core import Core
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import Accepted, Effect, RecordSeen, Stimulus, Task, Wiped
from hami_scheduler.shell.isolation import RECORD, Withheld, record_key
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.refusals import Refusals

_log = logging.getLogger(__name__)

PARTS = ("inventory", "records", "states", "pods", "quotas")
"""Parts that must have been delivered once before any decision."""


class Pods:
    """The newest known version of every managed pod."""

    def __init__(self) -> None:
        self._by_uid: dict[str, PodFacts] = {}
        self._waiting: set[str] = set()
        self._groups: dict[str, dict[str, str]] = {}
        """By gang: node of each placed member, by uid."""
        self._members: dict[str, set[str]] = {}
        """By gang: every member that is known."""
        self._priorities: Counter[int] = Counter()
        """Number of placed pods by eviction priority."""

    def put(self, pod: PodFacts) -> PodFacts | None:
        """Store a version; returns the one it replaces."""
        before = self._by_uid.get(pod.uid)
        self._by_uid[pod.uid] = pod
        self._leave_group(before)
        if pod.group:
            self._members.setdefault(pod.group, set()).add(pod.uid)
        if pod.group and pod.node and not pod.is_finished:
            self._groups.setdefault(pod.group, {})[pod.uid] = pod.node
        if pod.node and not pod.is_finished:
            self._priorities[pod.eviction_priority()] += 1
        if pod.is_waiting():
            self._waiting.add(pod.uid)
        else:
            self._waiting.discard(pod.uid)
        return before

    def drop(self, uid: str) -> PodFacts | None:
        """Drop a pod; returns its last facts."""
        self._waiting.discard(uid)
        before = self._by_uid.pop(uid, None)
        self._leave_group(before)
        return before

    def _leave_group(self, pod: PodFacts | None) -> None:
        if pod is not None and pod.node and not pod.is_finished:
            self._priorities[pod.eviction_priority()] -= 1
            if not self._priorities[pod.eviction_priority()]:
                del self._priorities[pod.eviction_priority()]
        known = set() if pod is None else self._members.get(pod.group, set())
        if pod is not None and pod.uid in known:
            known.discard(pod.uid)
            if not known:
                del self._members[pod.group]
        members = {} if pod is None else self._groups.get(pod.group, {})
        if pod is not None and members.pop(pod.uid, None) is not None and not members:
            del self._groups[pod.group]

    def nodes_of_group(self, group: str) -> list[str]:
        """Return the nodes of the placed members of a gang, one entry for each."""
        return list(self._groups.get(group, {}).values())

    def members_of_group(self, group: str) -> list[PodFacts]:
        """Return every known pod of a gang, by uid."""
        return [self._by_uid[uid] for uid in sorted(self._members.get(group, ()))]

    def lowest_priority(self) -> int | None:
        """Return the lowest eviction priority of the placed pods; ``None`` without such a pod."""
        return min(self._priorities, default=None)

    def get(self, uid: str) -> PodFacts | None:
        """Return the facts of the pod with this uid."""
        return self._by_uid.get(uid)

    def is_waiting(self, uid: str) -> bool:
        """Return whether the pod requests devices and has no node yet."""
        return uid in self._waiting

    def has_waiting(self) -> bool:
        """Return whether a pod that requests devices has no node yet."""
        return bool(self._waiting)

    def waiting(self) -> Iterator[PodFacts]:
        """Yield the pods that request devices and have no node yet."""
        return (self._by_uid[uid] for uid in self._waiting)

    def waiting_count(self) -> int:
        """Return the number of pods that request devices and have no node yet."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[PodFacts]:
        """Yield every pod."""
        return iter(self._by_uid.values())

    def __len__(self) -> int:
        """Return the number of known pods."""
        return len(self._by_uid)


class State:
    """Devices, ledger, pods and their completeness."""

    def __init__(
        self,
        *,
        core: Core,
        clock: Clock,
        metrics: Metrics,
        later: Callable[[Task], object],
        quarantine: Quarantine,
        supervisor: Supervisor,
    ) -> None:
        """Queue effects of the ledger as background tasks with ``later``."""
        self.quarantine = quarantine
        """Objects that cannot be handled now, see ``isolation``."""
        self.supervisor = supervisor
        self.core = core
        self.table = core.table
        """For reading, like ``ledger``: only ``core.answer`` changes them."""
        self.ledger = core.ledger
        self.pods = Pods()
        self.refusals = Refusals()
        self.withheld = Withheld(core)
        self.clock = clock
        self._metrics = metrics
        self.later = later
        """Queues a background task."""
        self._missing = set(PARTS)
        self._progress = anyio.Event()
        self._gone = anyio.Event()
        self.storage_epoch = 0
        """Counts how often the ledger was emptied.

        Earlier answers of the bus are void after that.
        """

    # --- the ledger ------------------------------------------------------------------------------

    def tell(self, stimulus: Stimulus) -> bool:
        """Fold one stimulus and pass on its effects; false when it broke an invariant (logged)."""
        try:
            self.fold(stimulus)
        except InvariantBroken:
            return False
        return True

    def fold(self, stimulus: Stimulus) -> None:
        """Fold one stimulus and pass on its effects; the node of a record that fails is withheld.

        ``InvariantBroken`` is logged with the history and raised, like any other error.
        """
        try:
            effects: list[Effect] = self.core.answer(stimulus)
        except Exception as error:
            if isinstance(error, InvariantBroken):
                self._metrics.broken_invariants.inc()
                _log.error(
                    "ledger refused a stimulus",
                    extra={
                        "stimulus": type(stimulus).__name__,
                        "what": error.what,
                        "history": error.history,
                    },
                )
            if (record := _record_of(stimulus)) is not None:
                key = record_key(record.node, record.pod_uid)
                self.withheld.add(RECORD, key, error, node=record.node)
            raise
        if len(self.withheld) and (record := _record_of(stimulus)) is not None:
            self.withheld.lift(RECORD, record_key(record.node, record.pod_uid))
        for effect in effects:
            self.later(effect)

    def empty(self) -> None:
        """Empty the ledger because the bus lost its storage or may have lost it."""
        self.storage_epoch += 1
        self._gone = anyio.Event()
        self.lost("records")
        self.lost("states")
        self.tell(Wiped(now_s=self.clock.now_s()))
        self.withheld.clear(RECORD)
        self.refresh()

    def require_storage(self, epoch: int) -> None:
        """Raise ``Unavailable`` when the ledger was emptied since ``epoch``.

        An answer may be older.
        """
        if epoch != self.storage_epoch:
            raise Unavailable(peer="NATS", detail="the storage was lost meanwhile")

    def records_gone(self) -> None:
        """Note that the bus contains less than was folded; only a new watch can resolve this."""
        self._gone.set()

    async def wait_records_gone(self) -> None:
        """Return once ``records_gone`` was called since the ledger was emptied last."""
        await self._gone.wait()

    # --- completeness ----------------------------------------------------------------------------

    def delivered(self, part: str) -> None:
        """Note that ``part`` (of ``PARTS``) has been delivered once in full."""
        self._missing.discard(part)

    def has(self, part: str) -> bool:
        """Return whether ``part`` has been delivered."""
        return part not in self._missing

    def lost(self, part: str) -> None:
        """Note that ``part`` must be delivered again before any decision."""
        self._missing.add(part)
        self.refresh()

    def missing(self) -> list[str]:
        """Return the incomplete parts, in words for an operator."""
        missing = sorted(self._missing)
        if not missing and not self.ledger.ready:
            missing.append("comparison of ledger and pods")
        return missing

    @property
    def is_complete(self) -> bool:
        """True when decisions can be made."""
        return not self._missing and self.ledger.ready

    def refresh(self) -> None:
        """Notify waiting tasks that completeness may have changed."""
        self._progress.set()
        self._metrics.ready.set(self.is_complete)

    async def wait_complete(self, *, wait_s: float) -> None:
        """Return once decisions can be made, else ``Unavailable`` names the incomplete parts."""
        if self.is_complete:
            return
        with anyio.move_on_after(wait_s):
            while self.missing():
                await self._wait_progress()
        self.require_complete()

    def require_complete(self) -> None:
        """Raise ``Unavailable`` unless decisions can be made."""
        if not self.is_complete:
            missing = ", ".join(self.missing())
            raise Unavailable(peer="scheduler", detail=f"not in sync, waiting for {missing}")

    async def wait_comparable(self) -> None:
        """Return once records, states and pods were delivered, so that they can be compared."""
        while not (self.ledger.synced and self.has("pods")):
            await self._wait_progress()

    async def wait_emptied(self) -> None:
        """Return once the ledger must be compared with the pods before it can be used again."""
        while self.ledger.ready:
            await self._wait_progress()

    async def _wait_progress(self) -> None:
        if self._progress.is_set():
            self._progress = anyio.Event()
        await self._progress.wait()


def _record_of(stimulus: Stimulus) -> AllocationRecord | None:
    """Return the ledger record of a stimulus, ``None`` where it has none or several."""
    if isinstance(stimulus, RecordSeen):
        return stimulus.record
    return stimulus.append.record if isinstance(stimulus, Accepted) else None
