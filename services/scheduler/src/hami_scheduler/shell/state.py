# SPDX-License-Identifier: Apache-2.0
"""Everything this replica knows, in one place: devices, ledger, pods, and whether that is complete.

Touched only from the event loop and never across an await, so each reader sees one snapshot
(style 2.7). The feeds write the inventory and the pods; only the ledger books shares. Effects that
the ledger asks for go to ``carry_out``, which must not block. Seconds throughout.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import anyio

from hami_common.errors import InvariantBroken, Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.ports import Clock
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.supervise import Supervisor
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import Accepted, Effect, RecordSeen, Stimulus, Wiped
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from hami_scheduler.shell.isolation import RECORD, Withheld, record_key
from hami_scheduler.shell.metrics import Metrics

_log = logging.getLogger(__name__)

PARTS = ("inventory", "records", "states", "pods", "quotas")
"""What must have been delivered once before anything can be decided."""


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
        """How many placed pods have a priority."""

    def put(self, pod: PodFacts) -> PodFacts | None:
        """Take a version; returns the one it replaces."""
        before = self._by_uid.get(pod.uid)
        self._by_uid[pod.uid] = pod
        self._leave_group(before)
        if pod.group:
            self._members.setdefault(pod.group, set()).add(pod.uid)
        if pod.group and pod.node and not pod.is_finished:
            self._groups.setdefault(pod.group, {})[pod.uid] = pod.node
        if pod.node and not pod.is_finished:
            self._priorities[pod.priority] += 1
        if pod.is_waiting():
            self._waiting.add(pod.uid)
        else:
            self._waiting.discard(pod.uid)
        return before

    def drop(self, uid: str) -> PodFacts | None:
        """Forget a pod; returns what was known of it."""
        self._waiting.discard(uid)
        before = self._by_uid.pop(uid, None)
        self._leave_group(before)
        return before

    def _leave_group(self, pod: PodFacts | None) -> None:
        if pod is not None and pod.node and not pod.is_finished:
            self._priorities[pod.priority] -= 1
            if not self._priorities[pod.priority]:
                del self._priorities[pod.priority]
        known = set() if pod is None else self._members.get(pod.group, set())
        if pod is not None and pod.uid in known:
            known.discard(pod.uid)
            if not known:
                del self._members[pod.group]
        members = {} if pod is None else self._groups.get(pod.group, {})
        if pod is not None and members.pop(pod.uid, None) is not None and not members:
            del self._groups[pod.group]

    def nodes_of_group(self, group: str) -> list[str]:
        """Where the placed members of a gang are, one entry for each."""
        return list(self._groups.get(group, {}).values())

    def members_of_group(self, group: str) -> list[PodFacts]:
        """Every known pod of a gang, by uid."""
        return [self._by_uid[uid] for uid in sorted(self._members.get(group, ()))]

    def lowest_priority(self) -> int | None:
        """The lowest priority of the pods that have a node; ``None`` when there are none."""
        return min(self._priorities, default=None)

    def get(self, uid: str) -> PodFacts | None:
        """What is known of the pod with this uid."""
        return self._by_uid.get(uid)

    def has_waiting(self) -> bool:
        """Whether a pod that asks for devices has no node yet."""
        return bool(self._waiting)

    def waiting_count(self) -> int:
        """How many pods that ask for devices have no node yet."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[PodFacts]:
        """Every pod."""
        return iter(self._by_uid.values())

    def __len__(self) -> int:
        """How many pods are known."""
        return len(self._by_uid)


class State:
    """Devices, ledger, pods and their completeness."""

    def __init__(
        self,
        *,
        table: DeviceTable,
        ledger: Ledger,
        clock: Clock,
        metrics: Metrics,
        carry_out: Callable[[Effect], object],
        quarantine: Quarantine,
        supervisor: Supervisor,
        verdicts: Verdicts | None = None,
    ) -> None:
        """Hand effects of the ledger to ``carry_out``."""
        self.quarantine = quarantine
        """What cannot be handled now, see ``isolation``."""
        self.supervisor = supervisor
        self.table = table
        self.ledger = ledger
        self.verdicts = verdicts or Verdicts(table)
        self.pods = Pods()
        self.withheld = Withheld(table)
        self.clock = clock
        self._metrics = metrics
        self._carry_out = carry_out
        self._missing = set(PARTS)
        self._progress = anyio.Event()
        self._gone = anyio.Event()
        self.storage_epoch = 0
        """Counts how often the ledger was emptied: what the bus answered before is void after."""

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

        ``InvariantBroken`` is logged with the story and raised, like any other error.
        """
        try:
            effects: Iterable[Effect] = self.ledger.handle(stimulus)
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
            self._carry_out(effect)

    def empty(self) -> None:
        """Forget the ledger: the bus lost its storage, or nobody can tell whether it did."""
        self.storage_epoch += 1
        self._gone = anyio.Event()
        self.lost("records")
        self.lost("states")
        self.tell(Wiped(now_s=self.clock.now_s()))
        self.withheld.clear(RECORD)
        self.refresh()

    def require_storage(self, epoch: int) -> None:
        """``Unavailable`` when the ledger was emptied since ``epoch``: an answer may be older."""
        if epoch != self.storage_epoch:
            raise Unavailable(peer="NATS", detail="the storage was lost meanwhile")

    def records_gone(self) -> None:
        """The bus holds less than we have folded of it: only a new watch can tell what is true."""
        self._gone.set()

    async def wait_records_gone(self) -> None:
        """Return once ``records_gone`` was told since the ledger was emptied last."""
        await self._gone.wait()

    # --- completeness ----------------------------------------------------------------------------

    def delivered(self, part: str) -> None:
        """``part`` (of ``PARTS``) has been delivered once in full."""
        self._missing.discard(part)

    def has(self, part: str) -> bool:
        """Whether ``part`` has been delivered."""
        return part not in self._missing

    def lost(self, part: str) -> None:
        """``part`` must be delivered anew before anything is decided."""
        self._missing.add(part)
        self.refresh()

    def missing(self) -> list[str]:
        """What is not complete yet, in words for an operator."""
        missing = sorted(self._missing)
        if not missing and not self.ledger.ready:
            missing.append("comparison of ledger and pods")
        return missing

    @property
    def is_complete(self) -> bool:
        """Whether decisions can be made."""
        return not self._missing and self.ledger.ready

    def refresh(self) -> None:
        """Tell those who wait that completeness may have changed."""
        self._progress.set()
        self._metrics.ready.set(self.is_complete)

    async def wait_complete(self, *, wait_s: float) -> None:
        """Return once decisions can be made, else ``Unavailable`` says what is missing."""
        if self.is_complete:
            return
        with anyio.move_on_after(wait_s):
            while self.missing():
                await self._wait_progress()
        self.require_complete()

    def require_complete(self) -> None:
        """``Unavailable`` unless decisions can be made."""
        if not self.is_complete:
            missing = ", ".join(self.missing())
            raise Unavailable(peer="scheduler", detail=f"not in sync, waiting for {missing}")

    async def wait_comparable(self) -> None:
        """Return once records, states and pods were delivered, so that they can be compared."""
        while not (self.ledger.synced and self.has("pods")):
            await self._wait_progress()

    async def wait_emptied(self) -> None:
        """Return once the ledger has to be compared with the pods before it can be used again."""
        while self.ledger.ready:
            await self._wait_progress()

    async def _wait_progress(self) -> None:
        if self._progress.is_set():
            self._progress = anyio.Event()
        await self._progress.wait()


def _record_of(stimulus: Stimulus) -> AllocationRecord | None:
    """The ledger record that a stimulus brings, ``None`` where it brings none or several."""
    if isinstance(stimulus, RecordSeen):
        return stimulus.record
    return stimulus.append.record if isinstance(stimulus, Accepted) else None
