# SPDX-License-Identifier: Apache-2.0
"""Compares ledger and pods: at start, after a loss of storage, and periodically (design D6).

No pod is bound before the first comparison is done. The ledger of a bus that lost everything is
rebuilt from the signed annotations of bound pods. Meanwhile a bind of another replica may still be
in flight, under a record that is gone; so every pod that waits for a node is first moved to a new
resourceVersion, which makes that late Binding fail, and the pods are read after that. Seconds
throughout.
"""

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

import anyio

from hami_common.errors import HamiError, Unavailable
from hami_common.events.allocation import is_of_claim
from hami_common.runtime.tasks import Backoff
from hami_core.ledger import repair
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import Examine, Repaired
from hami_scheduler.settings import Settings
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.feed import Feed
from hami_scheduler.shell.isolation import FENCE, RESTORE, TOMBSTONE, record_key
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.state import State

T = TypeVar("T")

PARALLEL = 16
"""Concurrent calls of one comparison."""
FORGET_AT_ONCE = 500
"""Tombstones removed by one comparison: each costs a few requests to the bus."""

_log = logging.getLogger(__name__)


class Recovery:
    """Keeps ledger and pods in agreement."""

    def __init__(
        self,
        *,
        state: State,
        feed: Feed,
        effects: Effects,
        settings: Settings,
        metrics: Metrics,
        writer: str,
        ids: Callable[[], str],
        restore_claims: Callable[[], Awaitable[None]],
    ) -> None:
        """``writer`` is the name under which an earlier run of this replica wrote.

        ``restore_claims`` books the claims that are in use and have no record.
        """
        self._state = state
        self._quarantine = state.quarantine
        self._feed = feed
        self._effects = effects
        self._settings = settings
        self._metrics = metrics
        self._writer = writer
        self._ids = ids
        self._restore_claims = restore_claims

    async def run(self) -> None:
        """Compare whenever it is due, indefinitely."""
        backoff = Backoff(first_s=self._settings.retry_s, most_s=10 * self._settings.retry_s)
        is_start = True
        while True:
            await self._state.wait_comparable()
            try:
                await self.compare()
            except HamiError as error:
                _log.warning("ledger and pods not compared", extra={"problem": str(error)})
                await self._state.clock.sleep(backoff.next_s())
                continue
            backoff.reset()
            if is_start:
                is_start = False
                self._examine_former_self()
            await self._until_due()

    async def _until_due(self) -> None:
        """Wait for the next round, or for the loss of the ledger."""
        async with anyio.create_task_group() as group:

            async def stop_after(wait: Callable[[], Awaitable[None]]) -> None:
                await wait()
                group.cancel_scope.cancel()

            group.start_soon(stop_after, self._pause)
            group.start_soon(stop_after, self._state.wait_emptied)

    async def _pause(self) -> None:
        await self._state.clock.sleep(self._settings.reconcile_s)

    async def compare(self) -> None:
        """Run one full comparison.

        Afterwards the ledger is fit for binding, else ``Unavailable``.
        """
        ledger = self._state.ledger
        wiped, self._feed.wiped = self._feed.wiped, False
        try:
            pods = {pod.uid: pod for pod in await self._effects.pods.list_all()}
            unlabelled: list[PodFacts] = []
            if not ledger.ready:
                # After the ledger was lost, only the pod itself records its share.
                unlabelled = await self._effects.pods.list_unlabelled()
                pods |= {pod.uid: pod for pod in unlabelled}
            steps = repair.compare(ledger.holdings(), pods)
            if not ledger.ready and (wiped or any(isinstance(s, repair.Restore) for s in steps)):
                self._metrics.rebuilds.inc()
                await self._fence_waiting(pods)
                steps = repair.compare(ledger.holdings(), pods)
            await self._restore([step for step in steps if isinstance(step, repair.Restore)])
            if not ledger.ready:
                await self._restore_claims()
        except HamiError:
            self._feed.wiped |= wiped
            raise
        is_lost_again = self._feed.wiped  # then the restored records are lost with the rest
        if not ledger.ready and ledger.synced and not is_lost_again:
            self._state.tell(Repaired(now_s=self._state.clock.now_s()))
            self._state.refresh()
            _log.info("ledger and pods agree", extra={"pods": len(pods), "steps": len(steps)})
        for pod in unlabelled:  # label them, so that our watch delivers their end
            for holding in ledger.holdings_of_pod(pod.uid):
                self._state.later(repair.Doubt(holding=holding))
        for step in steps:
            if not isinstance(step, repair.Restore) and not self._is_followed(step):
                self._metrics.repairs.labels(action=type(step).__name__.lower()).inc()
                self._state.later(step)
        await self._forget_tombstones()

    def _is_followed(self, step: repair.Step) -> bool:
        """Return whether the follower of claims compares this record all the time."""
        return (
            self._settings.dra.enabled
            and isinstance(step, repair.Doubt)
            and is_of_claim(step.holding.record)
        )

    async def _fence_waiting(self, pods: dict[str, PodFacts]) -> None:
        """Move every waiting pod to a new resourceVersion, and update ``pods`` with the results.

        A pod that cannot be moved is isolated. A Binding of it that is in flight gets the time that
        it may take, so that the list afterwards shows its node.
        """
        stamp = f"rebuilt-{self._ids()}"
        stuck: list[str] = []

        async def fence(pod: PodFacts) -> None:
            moved = await self._effects.pods.fence_waiting(pod, stamp=stamp)
            if moved is None or moved.uid != pod.uid:
                del pods[pod.uid]
            else:
                pods[pod.uid] = moved

        async def isolated(pod: PodFacts) -> None:
            if not await self._quarantine.run(
                FENCE,
                pod.uid,
                partial(fence, pod),
                passes=(Unavailable,),
                name=(pod.namespace, pod.name),
                is_retried=False,
            ):
                stuck.append(pod.uid)

        await _each([pod for pod in pods.values() if pod.is_waiting()], isolated)
        if stuck:
            await self._state.clock.sleep(self._settings.bind_wait_s + self._settings.api_timeout_s)
            now = {pod.uid: pod for pod in await self._effects.pods.list_all()}
            for uid in stuck:
                if uid in now:
                    pods[uid] = now[uid]
                else:
                    pods.pop(uid, None)

    async def _restore(self, steps: list[repair.Restore]) -> None:
        """Restore records: in order within a node, several nodes concurrently."""
        by_node: dict[str, list[repair.Restore]] = defaultdict(list)
        for step in steps:
            by_node[step.signed.placement.node].append(step)

        async def restore(node_steps: list[repair.Restore]) -> None:
            for step in node_steps:
                signed = step.signed
                await self._quarantine.run(
                    RESTORE,
                    signed.pod_uid,
                    partial(self._restore_one, step),
                    passes=(Unavailable,),
                    name=(signed.namespace, signed.pod),
                )

        await _each(list(by_node.values()), restore)

    async def _restore_one(self, step: repair.Restore) -> None:
        outcome = await self._effects.settling.restore(step)
        self._metrics.repairs.labels(action=outcome).inc()

    def _examine_former_self(self) -> None:
        """Examine reservations that an earlier run of this replica left unfinished.

        Shares reserved for pods whose bind had not begun stay as they are: kube-scheduler retries
        the pods, and the leases run.
        """
        for holding in self._state.ledger.reserved():
            record = holding.record
            if record.writer == self._writer and not record.held_for:
                self._state.later(Examine(holding=holding))

    async def _forget_tombstones(self) -> None:
        """Remove old releases of pods that are gone, never a node's newest record (design D3)."""
        before_s = self._state.clock.now_s() - self._settings.tombstone_s
        gone = [
            (node, uid)
            for node, uid in self._state.ledger.forgettable(seen_before_s=before_s)
            if self._state.pods.get(uid) is None
        ]
        for node, uid in gone[:FORGET_AT_ONCE]:
            try:
                await self._quarantine.run(
                    TOMBSTONE,
                    record_key(node, uid),
                    partial(self._forget_one, node, uid),
                    passes=(Unavailable,),
                    is_retried=False,  # the next comparison retries it
                )
            except Unavailable as error:
                _log.debug("tombstones kept until next time", extra={"problem": str(error)})
                return

    async def _forget_one(self, node: str, uid: str) -> None:
        await self._effects.ledger.forget(node, uid)


async def _each(items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Apply ``work`` to all items, some concurrently; the first failure ends it."""
    failures: list[HamiError] = []
    limiter = anyio.CapacityLimiter(PARALLEL)
    async with anyio.create_task_group() as group:

        async def one(item: T) -> None:
            async with limiter:
                if failures:
                    return
                try:
                    await work(item)
                except HamiError as error:
                    failures.append(error)

        for item in items:
            group.start_soon(one, item)
    if failures:
        raise failures[0]
