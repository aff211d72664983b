# SPDX-License-Identifier: Apache-2.0
"""Evicts pods that use more memory than they request while their device lacks memory (ADR 52).

A device is short when a pod was placed on memory into which a burst grew before the agent reported
it. Every replica looks at the same records and chooses the same pods; a second eviction of a pod
has no effect. A device must be short for ``burst_evict_s``, so that a use that just fell ends no
pod. Evictions are within PodDisruptionBudgets; after a refusal the next pod of the device is tried.
With ``burst_delete_s``, budgets do not protect the pods of a device that is still short that much
later, because another pod lacks memory that it has booked. Seconds throughout.
"""

import logging
from functools import partial
from typing import Final

from hami_common.errors import HamiError
from hami_common.ports import KubeApi
from hami_common.runtime.kubeio.recorder import EventRecorder
from hami_core.ledger.podfacts import PodFacts
from hami_core.planning.bursts import Burst, Shortage, shortages
from hami_scheduler.settings import Settings
from hami_scheduler.shell.evictions import SPARED_S, Evictions, pod_reference
from hami_scheduler.shell.isolation import TICK
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.state import State

EVENT_REASON: Final = "BurstEvicted"

_log = logging.getLogger(__name__)


class Bursts:
    """Ends bursts on devices that are short of memory."""

    def __init__(
        self,
        *,
        state: State,
        evictions: Evictions,
        kube: KubeApi,
        settings: Settings,
        metrics: Metrics,
        writer: str,
    ) -> None:
        """Report evictions as Events of ``writer``."""
        self._state = state
        self._evictions = evictions
        self._settings = settings
        self._metrics = metrics
        self._events = EventRecorder(
            kube, component="hami-scheduler", clock=state.clock, instance=writer
        )
        self._since_s: dict[tuple[str, str], float] = {}
        """By node and UUID: time since which the device is short."""
        self._evicted_until_s: dict[str, float] = {}
        """By uid: time until which an evicted pod is not evicted again."""

    def use(self, settings: Settings) -> None:
        """Apply changed settings."""
        self._settings = settings

    async def work(self) -> None:
        """Look at all devices with bursts every ``tick_s``, indefinitely."""
        while True:
            await self._state.clock.sleep(self._settings.tick_s)
            if self._settings.burst_evict and self._state.is_complete:
                await self._look()
            else:
                self._since_s.clear()

    async def _look(self) -> None:
        now_s, pods = self._state.clock.monotonic_s(), self._state.pods
        found = shortages(self._state.ledger, pod_of=pods.get, members_of=pods.members_of_group)
        self._since_s = {
            key: self._since_s.get(key, now_s) for key in ((one.node, one.uuid) for one in found)
        }
        self._metrics.short_devices.set(len(found))
        for uid in [uid for uid, until_s in self._evicted_until_s.items() if until_s <= now_s]:
            del self._evicted_until_s[uid]
        for shortage in found:
            short_s = now_s - self._since_s[shortage.node, shortage.uuid]
            late_s = short_s - self._settings.burst_evict_s
            if late_s >= 0:
                is_forced = 0 < self._settings.burst_delete_s <= late_s
                await self._state.quarantine.run(
                    TICK,
                    f"bursts {shortage.node}/{shortage.uuid}",
                    partial(self._end, shortage, is_forced=is_forced),
                    is_retried=False,  # the next look does
                )

    async def _end(self, shortage: Shortage, *, is_forced: bool) -> None:
        """Evict the pods that return what the device lacks, until one eviction fails.

        ``is_forced``: a pod whose eviction is refused is deleted.
        """
        spared = frozenset[str]() if is_forced else self._evictions.rules({}).spared
        for burst in shortage.victims(lambda pod: pod.uid in spared):
            for pod in burst.leaves:
                if pod.uid in self._evicted_until_s:
                    continue
                try:
                    problem = await self._evictions.evict(pod)
                    if problem and is_forced:
                        problem = await self._evictions.delete(pod)
                except HamiError as error:
                    problem = str(error)
                if problem:
                    _log.warning(
                        "pod with burst not evicted",
                        extra={"namespace": pod.namespace, "pod": pod.name, "problem": problem},
                    )
                    return  # the next look tries another pod
                await self._report(shortage, burst, pod)

    async def _report(self, shortage: Shortage, burst: Burst, pod: PodFacts) -> None:
        self._evicted_until_s[pod.uid] = self._state.clock.monotonic_s() + SPARED_S
        self._metrics.bursts_evicted.inc()
        _log.warning(
            "pod with burst evicted",
            extra={
                "namespace": pod.namespace,
                "pod": pod.name,
                "node": shortage.node,
                "device": shortage.uuid,
                "short_mib": shortage.short_mib,
                "burst_mib": burst.burst_mib,
            },
        )
        user = "this pod" if pod.uid == burst.pod.uid else f"pod {burst.pod.name} of its gang"
        await self._events.record(
            pod_reference(pod),
            reason=EVENT_REASON,
            kind="Warning",
            message=f"Evicted because device {shortage.uuid} of node {shortage.node} lacks"
            f" {shortage.short_mib} MiB for the requests of its pods; {user} uses"
            f" {burst.burst_mib} MiB beyond its request",
        )
