# SPDX-License-Identifier: Apache-2.0
"""Quotas at work: watches ResourceQuota objects, reads the queues file, answers filter and bind.

Nothing is decided before all quotas were listed once. The queues file is read again when its
content changes; one that is wrong is told and the last good one stays in force. A reservation under
a quota is put into force only when the ledger's stream has shown it and every record before it, and
it was within all quotas there: ``verdict`` waits for that. Pods that no quota is about wait for
nothing. What is decided stands in ``core.quota_ledger`` and ``core.queues``. Seconds throughout.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import anyio
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hami_common import documents
from hami_common.errors import SettingsInvalid, Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.metrics.families import ZONE
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.ports import KubeApi, WatchEvent
from hami_common.runtime.httpd import Handler, Request, Response, json_response
from hami_common.runtime.quarantine import Quarantine
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.podfacts import account_of
from hami_core.ledger.stimuli import CapacityReturned
from hami_core.placement.reasons import NodeRefusal
from hami_core.placement.verdicts import Filtered
from hami_core.quota import documents as quota_memory
from hami_core.quota import queues
from hami_core.quota.accounts import QueueRow, QuotaLedger, QuotaRow
from hami_core.quota.documents import Quotas
from hami_core.quota.resourcequota import (
    LIMITS_PREFIX,
    NOBODY_SPECIAL,
    Asker,
    QuotaReader,
    count_resources,
)
from hami_core.quota.verdicts import Allowed, QuotaVerdicts
from hami_scheduler.settings import Settings
from hami_scheduler.shell.effects import answer_within, bare_pod
from hami_scheduler.shell.isolation import METRICS, QUOTA
from hami_scheduler.shell.state import State

QUOTAS = "/api/v1/resourcequotas"
MOST_SERIES = 5000
"""Quota and queue rows shown as metrics; the rest is only counted."""

_log = logging.getLogger(__name__)


class QuotaAnswer(Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/quotas``."""

    items: list[QuotaRow]


class QueueAnswer(Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/queues``."""

    items: list[QueueRow]
    problem: str = ""
    """Why the file as it stands is not the one in force."""


class QuotaKeeper:
    """All quotas of one scheduler."""

    def __init__(
        self,
        *,
        ledger: QuotaLedger,
        verdicts: QuotaVerdicts,
        state: State,
        catalog: Catalog,
        kube: KubeApi,
        settings: Settings,
        wake: Callable[[CapacityReturned], object],
    ) -> None:
        """Read the queues file; ``SettingsInvalid`` when it is wrong.

        ``wake``: pods that wait may be allowed now.
        """
        self.ledger = ledger
        self._verdicts = verdicts
        self._state = state
        self.quarantine = state.quarantine
        self._reader = QuotaReader(catalog)
        self._names = count_resources(catalog)
        self._vendors = tuple(vendor.name for vendor in catalog.vendors)
        self._kube = kube
        self._settings = settings
        self._wake = wake
        self._progress = anyio.Event()
        self._file = b""
        self.problem = ""
        """What is wrong with the queues file as it stands, empty when it is in force."""
        if settings.queues_file:
            self._file = self._read_file()
            self.ledger.set_tree(self._tree_of(self._file))

    # --- the stream ------------------------------------------------------------------------------

    def fold(self, seq: int, record: AllocationRecord) -> None:
        """The feed of ``hami_alloc`` delivered a record."""
        self.ledger.fold(seq, record)
        self._progressed()

    def synced(self) -> None:
        """The feed has delivered what was stored."""
        self.ledger.synced()

    def reset(self) -> None:
        """The feed begins anew."""
        self.ledger.reset()
        self._progressed()

    def _progressed(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()

    async def verdict(self, revision: int, *, generation: int) -> NodeRefusal | None:
        """Why the reservation with this sequence is beyond a quota; ``None`` when it is within.

        ``generation``: of ``self.ledger``, from before the reservation was written. ``Unavailable``
        when nobody can tell.
        """
        with answer_within(self._settings.bus_timeout_s, peer="NATS"):
            while self.ledger.generation == generation and self.ledger.seq < revision:
                await self._progress.wait()
        if self.ledger.generation != generation:
            raise Unavailable(peer="NATS", detail="the storage was lost meanwhile")
        return self.ledger.verdict(revision)

    # --- filter and bind -------------------------------------------------------------------------

    def allowed(self, pod: PodView, request: PodRequest, filtered: Filtered) -> Filtered | Allowed:
        """Filter's answer, less what quotas refuse."""
        wish = pod.labels().get(keys.QUEUE_LABEL, "")
        asker = Asker(account=account_of(pod, self._names), wish=wish)
        if not self._verdicts.governs(request.namespace, asker):
            return filtered
        asker = replace(asker, own=self._nodes_of(request.uid))
        waiting = tuple(uid for uid in self.ledger.claims() if self._waits(uid))
        return self._verdicts.allowed(request, filtered, asker, waiting=waiting)

    def _nodes_of(self, pod_uid: str) -> tuple[str, ...]:
        """Nodes on which the pod has a share."""
        held = self._state.ledger.holdings_of_pod(pod_uid)
        return tuple(sorted(holding.record.node for holding in held))

    def _waits(self, pod_uid: str) -> bool:
        pod = self._state.pods.get(pod_uid)
        return pod is not None and pod.is_waiting()

    # --- what is limited -------------------------------------------------------------------------

    async def watch(self) -> None:
        """Follow every ResourceQuota, for ever."""
        told: set[tuple[str, str]] | None = set()
        async with self._kube.list_watch(QUOTAS) as events:
            async for event in events:
                if event.type == "SYNCED":
                    if told is not None:
                        self._keep_only(told)
                    told = None
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
                if told is not None and event.type != "DELETED":
                    told.add(name)

    def _keep_only(self, told: set[tuple[str, str]]) -> None:
        for quota in list(self.ledger.quotas()):
            if (quota.namespace, quota.name) not in told:
                self.ledger.drop_quota(quota.namespace, quota.name)

    def _take(self, event: WatchEvent, names: tuple[str, str]) -> None:
        """Put a quota in force; one that cannot be read allows nothing."""
        namespace, name = names
        try:
            quota = None if event.type == "DELETED" else self._reader.read(event.raw)
        except Exception as error:
            problem = f"cannot be read: {type(error).__name__}"
            self.ledger.put_quota(self._reader.unreadable(namespace, name, problem=problem))
            raise
        if quota is None:
            if self.ledger.drop_quota(namespace, name):
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
        self.ledger.put_quota(quota)
        self._wake_pods()

    def _wake_pods(self) -> None:
        node = next(iter(self._state.table.codes), "")
        if node:
            self._wake(CapacityReturned(node=node))

    async def follow_file(self) -> None:
        """Read the queues file again whenever its content changes, for ever."""
        while True:
            await self._state.clock.sleep(self._settings.queues_reload_s)
            self.reload()

    def reload(self) -> None:
        """Take the queues file as it is now; one that is wrong is told, once."""
        try:
            content = self._read_file()
        except SettingsInvalid as error:
            self._tell(str(error))
            return
        if content == self._file:
            return
        self._file = content
        try:
            tree = self._tree_of(content)
        except SettingsInvalid as error:
            self._tell(str(error))
            return
        self.problem = ""
        self.ledger.set_tree(tree)
        _log.info("queues file taken", extra={"queues": len(tree.queues)})
        self._wake_pods()

    def _tell(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            _log.error(
                "queues file is wrong, the last good one stays in force", extra={"problem": problem}
            )

    def _read_file(self) -> bytes:
        path = self._settings.queues_file
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise SettingsInvalid(
                field="queues_file",
                problem=f"{path!r}: {error.strerror}",
                fix="give the path of a TOML file, see docs/quota.md",
            ) from error

    def _tree_of(self, content: bytes) -> queues.QueueTree:
        document = documents.toml(content, field="queues_file", fix="see docs/quota.md")
        return queues.parse(document, vendors=self._vendors)

    # --- showing ---------------------------------------------------------------------------------

    def written(self) -> Quotas:
        """What is limited, and the pods that wait as quotas look at them, for a snapshot."""
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
        """Handlers by method and path."""
        return {("GET", "/v1/quotas"): self.show_quotas, ("GET", "/v1/queues"): self.show_queues}

    async def show_quotas(self, request: Request) -> Response:
        """Every limit of every ResourceQuota of ours, and what is used under it."""
        del request
        await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
        return json_response(QuotaAnswer(items=self.ledger.quota_rows()))

    async def show_queues(self, request: Request) -> Response:
        """Every queue and what is used under it."""
        del request
        await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
        return json_response(QueueAnswer(items=self.ledger.queue_rows(), problem=self.problem))


class QuotaMetrics(Collector):
    """Use and limits as they are when metrics are read.

    Labels: namespaces and resources that have a quota, and queues of the file; never a pod.
    """

    def __init__(self, keeper: QuotaKeeper) -> None:
        """Show what ``keeper`` knows."""
        self._keeper = keeper

    def collect(self) -> Iterable[Metric]:
        """See the base class."""
        ledger = self._keeper.ledger
        quarantine = self._keeper.quarantine
        yield from _quota_metrics(ledger.quota_rows(), quarantine)
        yield from _queue_metrics(ledger.queue_rows(), quarantine)
        yield GaugeMetricFamily(
            "hami_scheduler_queues_file_valid",
            "1 while the queues file as it stands is in force.",
            value=not self._keeper.problem,
        )


def register(registry: CollectorRegistry, keeper: QuotaKeeper) -> None:
    """Show the metrics of ``keeper`` in ``registry``."""
    registry.register(QuotaMetrics(keeper))


def tightest(rows: list[QuotaRow]) -> list[QuotaRow]:
    """Of several quotas with one key the one with the least room, in order of namespace and key."""
    found: dict[tuple[str, str], QuotaRow] = {}
    for row in rows:
        at = row.namespace, row.key.removeprefix(LIMITS_PREFIX)
        if at not in found or row.limit - row.used < found[at].limit - found[at].used:
            found[at] = row
    return [row for _, row in sorted(found.items())[:MOST_SERIES]]


def _quota_metrics(rows: list[QuotaRow], quarantine: Quarantine) -> Iterable[Metric]:
    """Names and labels as in HAMi."""
    used = GaugeMetricFamily(
        "hami_resource_quota_used",
        "What the pods of a namespace hold of a resource that a ResourceQuota limits.",
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
        "used": "What the pods below a queue hold.",
        "guaranteed": "What a queue is guaranteed.",
        "borrowed": "What a queue holds beyond its guarantee.",
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
