# SPDX-License-Identifier: Apache-2.0
"""Runs the quotas: watches ResourceQuota objects, applies the queues file, answers filter and bind.

No decision is made before all quotas were listed once. A reservation under a quota is committed
only after the ledger's stream has delivered it and every record before it, and it was within all
quotas there: ``verdict`` waits for that. Pods without an applicable quota never wait. The rules are
in ``hami_core.quota``. Seconds throughout.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import anyio
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hami_common import documents
from hami_common.errors import RequestInvalid, Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.metrics.families import ZONE
from hami_common.model.request import PodRequest
from hami_common.model.waiting import WaitClass, class_of
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.ports import KubeApi, WatchEvent
from hami_common.runtime.httpd import Handler, Request, Response, json_response
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.watchedfile import FileKind, WatchedFile
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.podfacts import PodFacts, account_of
from hami_core.ledger.stimuli import (
    CapacityReturned,
    QueuesSet,
    QuotaAsked,
    QuotaDropped,
    QuotaExpected,
    QuotaFolded,
    QuotaJudged,
    QuotaLooked,
    QuotaPut,
    QuotaReset,
    QuotaSynced,
    QuotaUnexpected,
)
from hami_core.placement.reasons import NodeRefusal
from hami_core.placement.verdicts import Filtered
from hami_core.quota import documents as quota_memory
from hami_core.quota import queues
from hami_core.quota.accounts import HeadroomRow, QueueRow, QuotaRow
from hami_core.quota.documents import Quotas
from hami_core.quota.resourcequota import (
    LIMITS_PREFIX,
    NOBODY_SPECIAL,
    Asker,
    Quota,
    QuotaReader,
    amounts_of,
    count_resources,
    least_amounts,
)
from hami_core.quota.verdicts import Allowed
from hami_core.quota.waiting import Estimate, Place, Starts, Waiter, places
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.isolation import METRICS, QUOTA
from hami_scheduler.shell.podapi import bare_pod
from hami_scheduler.shell.state import State

QUOTAS = "/api/v1/resourcequotas"
FILE: Final = FileKind(name="queues", title="queues file", field="queues_file")
MOST_SERIES = 5000
"""Quota and queue rows exported as metrics; further ones are only counted."""

_log = logging.getLogger(__name__)


class QuotaAnswer(Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/quotas``."""

    items: list[QuotaRow]
    headroom: list[HeadroomRow] | None = None
    """For one namespace: what its pods may still use, of each limited resource alone; of resources
    that are not listed, quotas and queues set no limit. ``null`` without a namespace.
    """


class WaitingRow(Struct, frozen=True, kw_only=True):
    """A pod that waits, with its position in its queue."""

    namespace: str
    pod: str
    pod_uid: str
    queue: str
    """Empty: the pod belongs to no queue, and shares one order with all others of this kind."""
    priority: int
    created_s: float
    is_gated: bool
    """A scheduling gate keeps kube-scheduler from trying it."""
    wanted: dict[str, int]
    """Least amounts that it counts under quotas, by resource."""
    position: int
    """1: kube-scheduler tries it first. Not a promise: a smaller pod behind it may start first."""
    ahead: dict[str, int]
    """Amounts that the pods ahead request together, by resource."""
    reason: WaitClass | None
    """Class of the last refusal; ``null``: this replica has not refused the pod yet."""
    code: str
    text: str
    attempts: int
    """Consecutive refusals by this replica."""
    refused_s: float
    estimate: Estimate


class QueueAnswer(Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/queues``."""

    items: list[QueueRow]
    problem: str = ""
    """Reason why the file's present content is not in effect."""
    waiting: list[WaitingRow] = []
    """Pods that wait, by queue and position: of the namespace; without one, all, for callers who
    may read all devices and allocations. Positions count the pods of all namespaces.
    """


class QuotaKeeper:
    """All quotas of one scheduler."""

    def __init__(
        self,
        *,
        state: State,
        catalog: Catalog,
        kube: KubeApi,
        settings: Settings,
        registry: CollectorRegistry,
    ) -> None:
        """Read the queues file; ``SettingsInvalid`` when it is wrong."""
        self._core = core = state.core
        self.ledger = core.quota
        """Read-only here: changes go through the core."""
        self._state = state
        self.quarantine = state.quarantine
        self._reader = QuotaReader(catalog)
        self._names = count_resources(catalog)
        self._vendors = tuple(vendor.name for vendor in catalog.vendors)
        self._kube = kube
        self._settings = settings
        self._starts = Starts()
        self._progress = anyio.Event()
        self.file = WatchedFile.at_start(
            settings.queues_file,
            FILE,
            parse=self._tree_of,
            default=queues.QueueTree(),
            registry=registry,
        )
        self.file.use = self._use_tree
        if settings.queues_file:
            self._set_tree(self.file.value)

    # --- the stream ------------------------------------------------------------------------------

    def fold(self, seq: int, record: AllocationRecord) -> None:
        """Fold a record that the feed of ``hami_alloc`` delivered."""
        if record.op == "reserve" and not record.held_for:
            pod = self._state.pods.get(record.pod_uid)
            if pod is not None and pod.request is not None:
                self._starts.seen(self._waiter(pod, pod.request), now_s=record.time_s)
        self._core.answer(QuotaFolded(seq=seq, record=record))
        self._progressed()

    def synced(self) -> None:
        """Note that the feed has delivered everything that was stored."""
        self._core.answer(QuotaSynced())
        self._starts.begin(now_s=self._state.clock.now_s())

    def reset(self) -> None:
        """Reset because the feed restarts."""
        self._core.answer(QuotaReset())
        self._progressed()

    def _progressed(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()

    async def verdict(self, revision: int, *, generation: int) -> NodeRefusal | None:
        """Return why the reservation with this sequence exceeds a quota; ``None`` when it does not.

        ``generation``: of ``self.ledger``, from before the reservation was written. ``Unavailable``
        when the verdict cannot be determined.
        """
        with answer_within(self._settings.bus_timeout_s, peer="NATS"):
            while self.ledger.generation == generation and self.ledger.seq < revision:
                await self._progress.wait()
        if self.ledger.generation != generation:
            raise Unavailable(peer="NATS", detail="the storage was lost meanwhile")
        return self._core.answer(QuotaJudged(seq=revision))

    # --- filter and bind -------------------------------------------------------------------------

    def asker(self, pod: PodView) -> Asker:
        """Return who asks for the pod's devices, as quotas see it."""
        wish = pod.labels().get(keys.QUEUE_LABEL, "")
        return Asker(account=account_of(pod, self._names), wish=wish)

    def allowed(self, asker: Asker, request: PodRequest, filtered: Filtered) -> Filtered | Allowed:
        """Return filter's answer without the nodes that quotas refuse."""
        if not self._core.governs(request.namespace, asker):
            return filtered
        asker = replace(asker, own=self._nodes_of(request.uid))
        waiting = tuple(uid for uid in self.ledger.claims() if self._waits(uid))
        return self._core.answer(QuotaAsked(request=request, asker=asker, waiting=waiting))

    def expect(self, record: AllocationRecord, *, own: Sequence[tuple[str, str]]) -> str:
        """Count a record that is about to be written; returns why a quota refuses it, or nothing.

        ``own``: (node, pod uid) of shares that the record replaces.
        """
        if not self.ledger.governs(record.namespace, record.account):
            return ""
        self.stop_expecting(record.allocation_id)
        amounts = amounts_of(record.containers, record.account)
        refusal = self._core.answer(
            QuotaLooked(
                namespace=record.namespace,
                account=record.account,
                wanted=quota_memory.written_amounts(amounts),
                own=tuple(own),
            )
        )
        if refusal is not None:
            return refusal.text
        self._core.answer(QuotaExpected(record=record))
        return ""

    def stop_expecting(self, allocation_id: str) -> None:
        """Stop counting a record that is now in the ledger, or was never written."""
        if self.ledger.expects(allocation_id):
            self._core.answer(QuotaUnexpected(allocation_id=allocation_id))

    def _nodes_of(self, pod_uid: str) -> tuple[str, ...]:
        """Return the nodes on which the pod has a share."""
        held = self._state.ledger.holdings_of_pod(pod_uid)
        return tuple(sorted(holding.record.node for holding in held))

    def _waits(self, pod_uid: str) -> bool:
        pod = self._state.pods.get(pod_uid)
        return pod is not None and pod.is_waiting()

    # --- what is limited -------------------------------------------------------------------------

    async def watch(self) -> None:
        """Follow every ResourceQuota, indefinitely."""
        listed_names: set[tuple[str, str]] | None = set()
        async with self._kube.list_watch(QUOTAS) as events:
            async for event in events:
                if event.type == "SYNCED":
                    if listed_names is not None:
                        self._keep_only(listed_names)
                    listed_names = None
                    self._state.delivered("quotas")
                    self._state.refresh()
                    continue
                name = bare_pod(event.raw).names()
                await self._state.quarantine.run(
                    QUOTA,
                    "/".join(name),
                    partial(self._take, event, name),
                    name=name,
                    size_bytes=len(event.raw),
                )
                if listed_names is not None and event.type != "DELETED":
                    listed_names.add(name)

    def _keep_only(self, listed_names: set[tuple[str, str]]) -> None:
        for quota in list(self.ledger.quotas()):
            if (quota.namespace, quota.name) not in listed_names:
                self._core.answer(QuotaDropped(namespace=quota.namespace, name=quota.name))

    def _take(self, event: WatchEvent, names: tuple[str, str]) -> None:
        """Apply a quota; an unreadable one allows nothing."""
        namespace, name = names
        try:
            quota = None if event.type == "DELETED" else self._reader.read(event.raw)
        except Exception as error:
            problem = f"cannot be read: {type(error).__name__}"
            self._put_quota(self._reader.unreadable(namespace, name, problem=problem))
            raise
        if quota is None:
            if self._core.answer(QuotaDropped(namespace=namespace, name=name)):
                self._wake_pods()
            return
        for limit in quota.limits.values():
            if limit.problem:
                _log.warning(
                    "limit of a ResourceQuota is unreadable, nothing is allowed under it",
                    extra={
                        "namespace": namespace,
                        "quota": name,
                        "key": limit.key,
                        "problem": limit.problem,
                    },
                )
        self._put_quota(quota)
        self._wake_pods()

    def _put_quota(self, quota: Quota) -> None:
        self._core.answer(QuotaPut(quota=quota_memory.written(quota)))

    def _set_tree(self, tree: queues.QueueTree) -> None:
        self._core.answer(QueuesSet(queues=tuple(tree.queues.values())))

    def _wake_pods(self) -> None:
        node = next(iter(self._state.table.codes), "")
        if node:
            self._state.later(CapacityReturned(node=node))

    def _tree_of(self, content: bytes) -> queues.QueueTree:
        document = documents.toml(content, field="queues_file", fix="see docs/quota.md")
        return queues.parse(document, vendors=self._vendors)

    def _use_tree(self, tree: queues.QueueTree) -> None:
        self._set_tree(tree)
        self._wake_pods()

    # --- showing ---------------------------------------------------------------------------------

    def written(self) -> Quotas:
        """Return the limits, and the waiting pods as quotas see them, for a snapshot."""
        askers = {
            pod.uid: Asker(account=pod.account, wish=pod.queue_wish, own=self._nodes_of(pod.uid))
            for pod in self._state.pods
            if pod.is_waiting()
        }
        claims = {uid: claim for uid, claim in self.ledger.claims().items() if self._waits(uid)}
        return Quotas(
            objects=tuple(map(quota_memory.written, self.ledger.quotas())),
            queues=tuple(self.ledger.tree.queues.values()),
            claims=quota_memory.written_claims(claims),
            askers={uid: asker for uid, asker in askers.items() if asker != NOBODY_SPECIAL},
        )

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {("GET", "/v1/quotas"): self.show_quotas, ("GET", "/v1/queues"): self.show_queues}

    async def show_quotas(self, request: Request) -> Response:
        """Return every limit of the ResourceQuotas of ours, and the usage under it."""
        namespace = _namespace_of(request)
        await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
        rows = self.ledger.quota_rows()
        if not namespace:
            return json_response(QuotaAnswer(items=rows))
        return json_response(
            QuotaAnswer(
                items=[row for row in rows if row.namespace == namespace],
                headroom=self.ledger.headroom(namespace, waits=self._waits),
            )
        )

    async def show_queues(self, request: Request) -> Response:
        """Return the queues, the usage under them, and the pods that wait.

        For one namespace: the queues that its pods may use, with those above them, and its pods.
        """
        namespace = _namespace_of(request)
        await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
        tree = self.ledger.tree
        rows, waiting = self.ledger.queue_rows(), self.waiting()
        if namespace:
            leaves = [name for name in tree.queues if tree.admits(namespace, name)]
            leaves.append(tree.queue_of(namespace))
            shown = {above for name in leaves if name for above in tree.path(name)}
            rows = [row for row in rows if row.queue in shown]
            waiting = [row for row in waiting if row.namespace == namespace]
        elif not await request.sees_everything():
            waiting = []
        return json_response(QueueAnswer(items=rows, problem=self.file.problem, waiting=waiting))

    def waiting(self) -> list[WaitingRow]:
        """Return the pods that wait, by queue and position."""
        now_s = self._state.clock.now_s()
        found = [
            (pod, self._waiter(pod, pod.request))
            for pod in self._state.pods.waiting()
            if pod.request is not None
        ]
        place_by_uid = places(waiter for _, waiter in found)
        rows = [self._waiting_row(*one, place_by_uid[one[0].uid], now_s) for one in found]
        return sorted(rows, key=lambda row: (row.queue, row.position))

    def _waiting_row(self, pod: PodFacts, waiter: Waiter, place: Place, now_s: float) -> WaitingRow:
        refused = self._state.refusals.get(pod.uid)
        reason = None if refused is None else refused.reason
        waits_for = None if reason is None else class_of(reason.code)
        never = waits_for == "request" or self.ledger.never(
            pod.namespace, pod.account, waiter.wanted
        )
        return WaitingRow(
            namespace=pod.namespace,
            pod=pod.name,
            pod_uid=pod.uid,
            queue=waiter.queue,
            priority=pod.priority,
            created_s=pod.created_s,
            is_gated=pod.is_gated,
            wanted=quota_memory.written_amounts(waiter.wanted),
            position=place.position,
            ahead=quota_memory.written_amounts(place.ahead),
            reason=waits_for,
            code="" if reason is None else reason.code,
            text="" if reason is None else reason.text,
            attempts=0 if refused is None else refused.attempts,
            refused_s=0.0 if refused is None else refused.time_s,
            estimate=self._starts.estimate(waiter, place.position, never=never, now_s=now_s),
        )

    def _waiter(self, pod: PodFacts, request: PodRequest) -> Waiter:
        queue = self.ledger.tree.queue_of(
            pod.namespace, pod.account.queue if pod.account is not None else ""
        )
        return Waiter(
            uid=pod.uid,
            queue=queue,
            priority=pod.priority,
            created_s=pod.created_s,
            name=f"{pod.namespace}/{pod.name}",
            wanted=least_amounts(request, {}, pod.account),
        )


def _namespace_of(request: Request) -> str:
    """Return the namespace of the query, empty without one; any other parameter is refused."""
    for name in request.query:
        if name != "namespace":
            raise RequestInvalid(
                field=f"query parameter {name}",
                problem="is not known here",
                fix="known ones: namespace",
            )
    return request.query.get("namespace", "")


class QuotaMetrics(Collector):
    """Usage and limits at the time of the scrape.

    Labels: namespaces and resources that have a quota, and queues of the file; never a pod.
    """

    def __init__(self, keeper: QuotaKeeper) -> None:
        """Export the state of ``keeper``."""
        self._keeper = keeper

    def collect(self) -> Iterable[Metric]:
        """See the base class."""
        ledger = self._keeper.ledger
        quarantine = self._keeper.quarantine
        yield from _quota_metrics(ledger.quota_rows(), quarantine)
        yield from _queue_metrics(ledger.queue_rows(), quarantine)


def register(registry: CollectorRegistry, keeper: QuotaKeeper) -> None:
    """Export the metrics of ``keeper`` in ``registry``."""
    registry.register(QuotaMetrics(keeper))


def tightest(rows: list[QuotaRow]) -> list[QuotaRow]:
    """Return the quota with the least headroom of each key, in order of namespace and key."""
    found: dict[tuple[str, str], QuotaRow] = {}
    for row in rows:
        at = row.namespace, row.key.removeprefix(LIMITS_PREFIX)
        if at not in found or row.limit - row.used < found[at].limit - found[at].used:
            found[at] = row
    return [row for _, row in sorted(found.items())[:MOST_SERIES]]


def _quota_metrics(rows: list[QuotaRow], quarantine: Quarantine) -> Iterable[Metric]:
    """Yield quota metrics with names and labels as in HAMi."""
    used = GaugeMetricFamily(
        "hami_resource_quota_used",
        "Amount that the pods of a namespace hold of a resource limited by a ResourceQuota.",
        labels=["namespace", "quota_name", "limit", "zone"],
    )
    limit = GaugeMetricFamily(
        "hami_resource_quota_limit",
        "Limit of a resource in a namespace by its ResourceQuota.",
        labels=["namespace", "quota_name", "zone"],
    )

    def add(row: QuotaRow) -> None:
        name = row.key.removeprefix(LIMITS_PREFIX)
        used.add_metric([row.namespace, name, str(row.limit), ZONE], row.used)
        limit.add_metric([row.namespace, name, ZONE], row.limit)

    for row in tightest(rows):
        quarantine.call(METRICS, f"{row.namespace}/{row.key}", partial(add, row))
    yield used
    yield limit


def _queue_metrics(rows: list[QueueRow], quarantine: Quarantine) -> Iterable[Metric]:
    texts = {
        "used": "Amount that the pods of a queue and its children hold.",
        "guaranteed": "Guarantee of a queue.",
        "borrowed": "Amount that a queue holds beyond its guarantee.",
        "limit": "The most that a queue may hold; absent where it has no limit.",
    }
    families = {
        word: GaugeMetricFamily(f"hami_scheduler_queue_{word}", text, labels=["queue", "resource"])
        for word, text in texts.items()
    }
    waiting = GaugeMetricFamily(
        "hami_scheduler_queue_waiting_pods",
        "Pods that could be placed and wait for what their queue may borrow.",
        labels=["queue"],
    )

    def add(row: QueueRow) -> None:
        for word, family in families.items():
            value: int | None = getattr(row, word)
            if value is not None:
                family.add_metric([row.queue, row.resource], value)

    for row in rows[:MOST_SERIES]:
        quarantine.call(METRICS, f"queue/{row.queue}/{row.resource}", partial(add, row))
    for queue, count in {row.queue: row.waiting for row in rows[:MOST_SERIES]}.items():
        waiting.add_metric([queue], count)
    yield from families.values()
    yield waiting
