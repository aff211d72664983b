# SPDX-License-Identifier: Apache-2.0
"""Reports breaches and, where the operator configures it, evicts the pod (design D27).

A breach is reported as a Kubernetes Event on the pod (on the node for processes of the host), as a
message on the bus (docs/wire.md) and as a log line. Messages that the bus does not accept are kept,
up to a limit, and sent at a later sample. An eviction goes through the API server, so that
disruption budgets and grace periods apply, names the pod by uid, and is retried until it is
accepted.
"""

import logging
from collections.abc import Callable
from functools import partial

from hami_common.bus import subjects
from hami_common.errors import HamiError, NotFound
from hami_common.events.breach import BreachProcess, BreachRecord
from hami_common.ports import KubeApi, Publisher
from hami_common.runtime.kubeio import EventRecorder, ObjectRef
from hami_nodeagent.core.breach import Breach, Outcome
from hami_nodeagent.core.podfacts import PodFacts
from hami_nodeagent.shell.eviction import evict
from hami_nodeagent.shell.outbox import Letter, Outbox
from hami_nodeagent.shell.site import Site

REASON = "LimitBreached"
REASON_UNLIMITED = "ShareNotHeld"
REASON_TRAFFIC = "MemoryBandwidthHigh"

_log = logging.getLogger(__name__)


class BreachTeller:
    """Reports the breaches of each sample."""

    def __init__(
        self,
        *,
        site: Site,
        events: Callable[[], EventRecorder | None],
        publisher: Callable[[], Publisher | None],
        kube: Callable[[], KubeApi | None],
    ) -> None:
        """Create the reporter; the peers are read at each use, as each may be unset until then."""
        self._site = site
        self._events = events
        self._kube = kube
        self._outbox = Outbox(publisher, site.quarantine)
        self._to_evict: dict[str, PodFacts] = {}
        self._unlimited: dict[str, PodFacts] = {}
        """Pods to evict because a container of them did not load the library."""
        self._chosen: frozenset[str] = frozenset()
        """Pods that were in ``_to_evict`` before the last requests."""
        self._evicted: frozenset[str] = frozenset()
        """Pods whose eviction was accepted since the last report of their breach."""

    def pod_of(self, breach: Breach) -> PodFacts | None:
        """Return the pod of the breaching process."""
        return self._site.picture.pods.find(breach.pod_uid) if breach.pod_uid else None

    def _is_evictable(self, pod: PodFacts | None) -> bool:
        """Return whether the namespace allows evictions and this project placed the pod.

        Breaches of pods that HAMi placed are reported without any action.
        """
        entry = self._site.picture.entries_by_uid.get(pod.uid) if pod is not None else None
        if pod is None or (entry is not None and entry.record.origin):
            return False
        usage = self._site.settings.usage
        return usage.actions.get(pod.namespace, usage.action) == "evict"

    async def tell_unlimited(self, pod: PodFacts, problem: str) -> None:
        """Report a pod whose containers are not limited; the next sample evicts it if allowed."""
        _log.warning("limiter not loaded", extra={"pod": pod.title, "problem": problem})
        self._unlimited[pod.uid] = pod
        recorder = self._events()
        if recorder is not None:
            await recorder.record(
                self._regarding(pod),
                reason=REASON_UNLIMITED,
                message=f"the share is booked, not enforced: {problem}",
                kind="Warning",
            )

    async def report_traffic(self, pod_uid: str, text: str) -> None:
        """Report a container that uses most of a device's memory bandwidth."""
        pod, recorder = self._site.picture.pods.find(pod_uid), self._events()
        if pod is None or recorder is None:
            return
        _log.warning("memory bandwidth used up", extra={"pod": pod.title, "text": text})
        await recorder.record(
            self._regarding(pod), reason=REASON_TRAFFIC, message=text, kind="Warning"
        )

    async def tell(self, outcome: Outcome, vendor: str) -> None:
        """Send the due reports; unavailable peers are retried at the next sample."""
        for breach in outcome.tell:
            pod = self.pod_of(breach)
            await self._site.quarantine.run(
                "breach",
                f"{breach.pod_uid}/{breach.container}/{breach.uuid}/{breach.kind}",
                partial(self._tell, breach, vendor, is_new=breach in outcome.new),
                name=(pod.namespace, pod.name) if pod is not None else ("", ""),
            )
        for breach in outcome.ended:
            extra = {"pod_uid": breach.pod_uid, "kind": breach.kind, "device": breach.uuid}
            _log.info("breach ended", extra=extra)
        self._choose_evictions(outcome)
        await self._outbox.send()
        await self._evict()

    async def _tell(self, breach: Breach, vendor: str, *, is_new: bool) -> None:
        pod = self.pod_of(breach)
        evicts = self._is_evictable(pod)
        title = pod.title if pod is not None else breach.pod_uid
        _log.warning("breach", extra={"pod": title, "kind": breach.kind, "text": breach.text})
        if is_new:
            self._site.metrics.breaches.labels(kind=breach.kind).inc()
        recorder = self._events()
        if recorder is not None:
            await recorder.record(
                self._regarding(pod), reason=REASON, message=breach.text, kind="Warning"
            )
        record = self._record(breach, vendor, pod, evicts=evicts)
        self._outbox.put(
            Letter(
                subject=subjects.breach_event(record.node, record.pod_uid),
                event_type=f"io.hami.breach.{record.kind}.v1",
                source=f"/nodeagent/{record.node}",
                time_s=record.time_s,
                record=record,
                traceparent=self._traceparent_of(record.pod_uid),
            )
        )

    def _regarding(self, pod: PodFacts | None) -> ObjectRef:
        if pod is None:
            return ObjectRef(kind="Node", name=self._site.node, uid=self._site.node)
        return ObjectRef(kind="Pod", namespace=pod.namespace, name=pod.name, uid=pod.uid)

    def _record(
        self, breach: Breach, vendor: str, pod: PodFacts | None, *, evicts: bool
    ) -> BreachRecord:
        holder = breach.holder
        return BreachRecord(
            kind=breach.kind,
            node=self._site.node,
            vendor=vendor,
            uuid=breach.uuid,
            boot_id=self._site.sequence.boot_id,
            seq=self._site.sequence.next(),
            time_s=self._site.clock.now_s(),
            namespace=pod.namespace if pod is not None else "",
            pod=pod.name if pod is not None else "",
            pod_uid=breach.pod_uid,
            container=breach.container,
            allocation_id=holder.allocation_id if holder is not None else "",
            limit_mib=holder.most_mib if holder is not None else 0,
            used_mib=breach.used_mib,
            limit_core_pct=holder.core_pct if holder is not None else 0,
            core_pct=breach.core_pct,
            processes=tuple(
                BreachProcess(
                    pid=one.pid,
                    command=one.command,
                    used_mib=one.used_mib,
                    core_pct=one.core_pct,
                )
                for one in breach.processes
            ),
            action="evict" if evicts else "event",
        )

    def _traceparent_of(self, pod_uid: str) -> str:
        pod = self._site.picture.pods.find(pod_uid) if pod_uid else None
        return pod.traceparent if pod is not None else ""

    def _choose_evictions(self, outcome: Outcome) -> None:
        """Choose the pods in breach; an accepted request is repeated with the next report."""
        accepted = self._evicted | (self._chosen - self._to_evict.keys())
        accepted -= {breach.pod_uid for breach in outcome.tell}
        self._evicted = frozenset(uid for uid in accepted if self._site.picture.pods.find(uid))
        pods = self._site.picture.pods
        self._unlimited = {uid: pod for uid, pod in self._unlimited.items() if pods.find(uid)}
        candidates = [*map(self.pod_of, outcome.going), *self._unlimited.values()]
        self._to_evict = {
            pod.uid: pod
            for pod in candidates
            if pod is not None and self._is_evictable(pod) and pod.uid not in self._evicted
        }
        self._chosen = frozenset(self._to_evict)

    async def _evict(self) -> None:
        kube = self._kube()
        if kube is None:
            return
        for pod in list(self._to_evict.values()):
            # Retried at each sample, until the breach ends.
            await self._site.quarantine.run(
                "eviction",
                pod.uid,
                partial(self._evict_one, kube, pod),
                name=(pod.namespace, pod.name),
                is_retried=False,
            )

    async def _evict_one(self, kube: KubeApi, pod: PodFacts) -> None:
        try:
            await evict(kube, pod)
        except NotFound:
            _log.info("pod to evict is gone", extra={"pod": pod.title})
        except HamiError as error:
            _log.warning("not evicted", extra={"pod": pod.title, "problem": str(error)})
            return
        else:
            self._site.metrics.evictions.inc()
            _log.warning("evicted", extra={"pod": pod.title})
        del self._to_evict[pod.uid]
