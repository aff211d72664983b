# SPDX-License-Identifier: Apache-2.0
"""Puts the scheduler together and runs it: adapters, parts, tasks, orderly shutdown.

Start: bus and API server are waited for, streams are declared, feeds and recovery start, then HTTP
listens; calls are answered with an error text until ledger and pods agree. Stop: not ready, HTTP
takes no new calls and finishes those in flight, queued releases and decisions are written, tasks
end, bus and API client close. Seconds throughout.
"""

import gc
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path

import anyio
from msgspec import Struct
from prometheus_client import CollectorRegistry

from hami_common.bus import grants, subjects
from hami_common.errors import SettingsInvalid
from hami_common.pods.signing import Signer, Verifier
from hami_common.ports import BatchPublisher, Bucket, Clock, KubeApi
from hami_common.runtime import gate, httpd, kubeio, natsio
from hami_common.runtime.kubeauth import KubeAuth
from hami_common.runtime.kubeio.recorder import EventRecorder
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.quarantinereport import QuarantineReporter
from hami_common.runtime.service import ServiceContext, run
from hami_common.runtime.supervise import Supervisor
from hami_common.runtime.tasks import finish_within
from hami_common.runtime.telemetry import Tracing
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.podfacts import PodReader
from hami_core.ledger.repair import Holding, Restore
from hami_core.ledger.stimuli import CapacityReturned, Over
from hami_core.placement.verdicts import Verdicts
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.verdicts import QuotaVerdicts
from hami_core.replay.snapshot import Parts
from hami_core.table.inventory import Inventory
from hami_core.table.table import DeviceTable
from hami_scheduler.settings import Settings
from hami_scheduler.shell import takeover
from hami_scheduler.shell.backlog import Backlog, Isolation
from hami_scheduler.shell.binder import Binder
from hami_scheduler.shell.clustermetrics import ClusterMetrics
from hami_scheduler.shell.decisions import Decision, Decisions
from hami_scheduler.shell.effects import Chore, Effects, Ports, Queues
from hami_scheduler.shell.extender import Deciders, Extender
from hami_scheduler.shell.feed import Feed, Sources, Subscribe, always
from hami_scheduler.shell.gangs import Gangs
from hami_scheduler.shell.isolation import (
    CHORE,
    CONFIRMATION,
    DECISION,
    KINDS,
    record_key,
    reference,
)
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.mirror import HamiMirrors
from hami_scheduler.shell.preemption import Preemption
from hami_scheduler.shell.quota import QuotaKeeper, register
from hami_scheduler.shell.recorder import (
    LogSettings,
    RecordedInventory,
    RecordedLedger,
    RecordedQuotaLedger,
    RecordedQuotaVerdicts,
    RecordedTable,
    RecordedVerdicts,
    Recorder,
)
from hami_scheduler.shell.recovery import Recovery
from hami_scheduler.shell.resize import Ask, Resizer, nobody
from hami_scheduler.shell.state import State

GARBAGE = (20_000, 20, 50)
"""Thresholds of Python's cycle collector. With its own (700, 10, 10) it takes a twentieth of the
processor time, and walks over every pod and device known while a call waits."""
HEARTBEATS_S = 0.1
"""How long heartbeats are gathered before they are looked at; they count for seconds."""
NODE_WAITING = 256
"""Heartbeats, or faults, of one node that wait; more are dropped."""
REST_S = 0.05
"""How long the bus is not listened to, after it was, while nobody waits for an answer from it."""
RULES: Mapping[gate.Route, gate.Rule] = {
    ("GET", "/v1/queues"): gate.nodes,
    ("POST", "/v1/resize"): gate.resizes_pod,
}
"""Who may ask what of ``/v1/``, where it is not ``gate.everything``."""
DRAIN_S = 5.0
"""How long queued releases and decisions may take to be written at the end."""


class World(Struct, frozen=True, kw_only=True):
    """Everything outside the process, as ports."""

    devices: Bucket
    records: Bucket
    states: Bucket
    publisher: BatchPublisher
    subscribe: Subscribe
    kube: KubeApi
    clock: Clock
    is_connected: Callable[[], bool] = always
    """Whether the bus can be heard now; one in memory always can."""
    ask: Ask = nobody
    """Asks the agent of a node."""


class Keys(Struct, frozen=True, kw_only=True):
    """Who signs allocations, and whose signatures count."""

    signer: Signer
    verifier: Verifier


class Scheduler:
    """One scheduler, put together; ``run`` is its life."""

    def __init__(
        self,
        *,
        settings: Settings,
        world: World,
        keys: Keys,
        registry: CollectorRegistry,
        tracing: Tracing,
        writer: str,
        ids: Callable[[], str],
    ) -> None:
        """Write records as ``writer``; ``ids`` makes identifiers that nobody else makes."""
        self.metrics = metrics = Metrics(registry)
        clock, retry_s = world.clock, settings.retry_s
        self.quarantine = quarantine = Quarantine(kinds=KINDS, clock=clock, registry=registry)
        self._supervisor = supervisor = Supervisor(
            clock=clock, registry=registry, first_s=retry_s, most_s=10 * retry_s
        )
        self._reporter = QuarantineReporter(
            quarantine,
            publisher=world.publisher,
            clock=clock,
            service="scheduler",
            replica=writer,
            ids=ids,
            events=EventRecorder(
                world.kube, component="hami-scheduler", clock=clock, instance=writer
            ),
            refer=reference,
        )
        self.chores: Backlog[Chore] = Backlog(
            "chores",
            capacity=settings.chore_queue_size,
            dropped=metrics.dropped,
            failed=metrics.failed,
            isolation=Isolation(
                quarantine=quarantine, kind=CHORE, key=_chore_key, name=_chore_name
            ),
        )
        self.confirmations: Backlog[Holding] = Backlog(
            "confirmations",
            capacity=settings.chore_queue_size,
            dropped=metrics.dropped,
            failed=metrics.failed,
            isolation=Isolation(
                quarantine=quarantine, kind=CONFIRMATION, key=_holding_key, name=_holding_name
            ),
        )
        self.decisions: Backlog[Decision] = Backlog(
            "decisions",
            capacity=settings.decision_queue_size,
            dropped=metrics.dropped,
            failed=metrics.failed,
            isolation=Isolation(
                quarantine=quarantine,
                kind=DECISION,
                key=lambda decision: decision.record.pod_uid,
                name=lambda decision: (decision.record.namespace, decision.record.pod),
                is_retried=False,
            ),
        )
        parts = _parts(
            settings, clock=clock, metrics=metrics, quarantine=quarantine, writer=writer, ids=ids
        )
        self.recorder = parts.recorder
        inventory = parts.inventory
        self.state = state = State(
            table=parts.ledger.table,
            ledger=parts.ledger,
            verdicts=parts.verdicts,
            clock=world.clock,
            metrics=metrics,
            carry_out=self.chores.add,
            quarantine=quarantine,
            supervisor=supervisor,
        )
        catalog = Catalog.from_settings(settings.vendors)
        self._reader = reader = PodReader(
            catalog=catalog,
            verifier=keys.verifier,
            policy=settings.policy,
        )
        self._effects = effects = Effects(
            ports=Ports(
                records=world.records, states=world.states, kube=world.kube, tracing=tracing
            ),
            state=state,
            chores=self.chores,
            reader=reader,
            settings=settings,
            metrics=metrics,
            writer=writer,
            ids=ids,
        )
        self.quota = quota = QuotaKeeper(
            ledger=parts.quota,
            verdicts=parts.quota_verdicts,
            state=state,
            catalog=catalog,
            kube=world.kube,
            settings=settings,
            wake=self.chores.add,
        )
        register(registry, quota)
        self.cluster_metrics = ClusterMetrics(
            state=state, quota=quota, registry=registry, sets=settings.metric_names
        )
        metrics.waiting_pods.set_function(state.pods.waiting_count)
        self._feed = feed = Feed(
            sources=Sources(
                devices=world.devices,
                records=world.records,
                states=world.states,
                subscribe=world.subscribe,
                kube=world.kube,
                is_connected=world.is_connected,
            ),
            state=state,
            inventory=inventory,
            chores=self.chores,
            reader=reader,
            quota=quota,
            settings=settings,
            metrics=metrics,
        )
        self._recovery = Recovery(
            state=state,
            feed=feed,
            effects=effects,
            chores=self.chores,
            settings=settings,
            metrics=metrics,
            writer=writer,
            ids=ids,
        )
        self._publishing = Decisions(
            publisher=world.publisher,
            backlog=self.decisions,
            clock=clock,
            quarantine=quarantine,
            timeout_s=settings.bus_timeout_s,
            hold_s=settings.decision_hold_s,
            writer=writer,
            ids=ids,
        )
        self.binder = Binder(
            state=state,
            effects=effects,
            quota=quota,
            queues=Queues(chores=self.chores, confirmations=self.confirmations),
            signer=keys.signer,
            settings=settings,
            metrics=metrics,
            ids=ids,
        )
        self.resizer = Resizer(
            state=state,
            effects=effects,
            quota=quota,
            kube=world.kube,
            signer=keys.signer,
            ask=world.ask,
            settings=settings,
            metrics=metrics,
        )
        effects.align = self.resizer.align
        self.take_over = takeover.TakeOver(
            state=state,
            inventory=inventory,
            effects=effects,
            kube=world.kube,
            pods=takeover.Pods(reader=reader, catalog=catalog, signer=keys.signer),
            settings=settings,
            metrics=metrics,
            ids=ids,
        )
        self.binder.ensure = self.take_over.ensure
        feed.is_withheld = self.take_over.is_withheld
        feed.read_node = self._read_node
        self.mirrors = HamiMirrors(
            state=state, inventory=inventory, kube=world.kube, settings=settings
        )
        self.preemption = Preemption(
            state=state,
            binder=self.binder,
            effects=effects,
            records=world.records,
            kube=world.kube,
            decisions=self._publishing,
            settings=settings,
            metrics=metrics,
        )
        self.gangs = Gangs(
            state=state,
            binder=self.binder,
            effects=effects,
            kube=world.kube,
            chores=self.chores,
            decisions=self._publishing,
            settings=settings,
            metrics=metrics,
        )
        self.extender = Extender(
            state=state,
            inventory=inventory,
            reader=reader,
            deciders=Deciders(
                binder=self.binder,
                quota=quota,
                gangs=self.gangs,
                preemption=self.preemption,
            ),
            decisions=self._publishing,
            settings=settings,
            metrics=metrics,
            tracing=tracing,
        )
        self._settings = settings

    def use(self, settings: Settings) -> None:
        """Take over what is hot of ``settings``."""
        self._reader.prefer(settings.policy)
        if self.recorder is not None:
            self.recorder.prefer(settings.policy)
        self.extender.use(settings)
        self.preemption.use(settings)
        self.gangs.use(settings)

    async def run(self) -> None:
        """Run everything but HTTP, indefinitely; a loop that ends with an error is restarted."""
        most = self._settings.gather_most
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "feed": self._feed.run,
            "recovery": self._recovery.run,
            "take-over from HAMi": self.take_over.work,
            "mirrors for HAMi": self.mirrors.work,
            "wake waiting pods": self._effects.wake_waiting_pods,
            "preemption": self.preemption.work,
            "gangs": self.gangs.work,
            "wake gangs": self.gangs.wake,
            "decisions without a bind": self._publishing.watch,
            "quarantine": self.quarantine.retry,
            "quarantine reports": self._reporter.work,
            # Not gathered for a time: an agent's next state would come before it.
            "confirmations": partial(
                self.confirmations.work_together, self._effects.confirm_all, 0.0, most
            ),
            "decisions": partial(
                self.decisions.work_together,
                self._publishing.send,
                self._settings.gather_s,
                most,
            ),
        }
        for number in range(self._settings.chore_workers):
            loops[f"chores {number}"] = partial(self.chores.work, self._effects.carry_out)
        if self.recorder is not None:
            loops["stimulus log"] = self.recorder.work
        async with anyio.create_task_group() as group:
            for name, loop in loops.items():
                group.start_soon(self._supervisor.keep, name, loop, name=name)

    async def _read_node(self, node: str) -> None:
        """Fold what the bus has of a node, alone from planning there."""
        async with self._effects.planning(node):
            await self._effects.read_node(node)

    async def drain(self, *, limit_s: float) -> None:
        """Wait for what is queued, as long as that is worth it."""
        self._publishing.flush()
        with anyio.move_on_after(limit_s):
            await self.confirmations.drain(limit_s=limit_s)
            await self.chores.drain(limit_s=limit_s)
            await self.decisions.drain(limit_s=limit_s)
            if self.recorder is not None:
                await self.recorder.drain()


def _holding_key(holding: Holding) -> str:
    return record_key(holding.record.node, holding.record.pod_uid)


def _holding_name(holding: Holding) -> tuple[str, str]:
    return holding.record.namespace, holding.record.pod


def _chore_key(chore: Chore) -> str:
    what = type(chore).__name__
    match chore:
        case CapacityReturned(node=node) | Over(node=node):
            return f"{what}/{node}"
        case Restore(signed=signed):
            return f"{what}/{record_key(signed.placement.node, signed.pod_uid)}"
        case _:
            return f"{what}/{_holding_key(chore.holding)}"


def _chore_name(chore: Chore) -> tuple[str, str]:
    match chore:
        case CapacityReturned() | Over():
            return "", ""
        case Restore(signed=signed):
            return signed.namespace, signed.pod
        case _:
            return _holding_name(chore.holding)


class _Core(Struct, frozen=True, kw_only=True):
    """The parts that decide."""

    ledger: Ledger
    inventory: Inventory
    verdicts: Verdicts
    quota: QuotaLedger
    quota_verdicts: QuotaVerdicts
    recorder: Recorder | None = None


def _parts(
    settings: Settings,
    *,
    clock: Clock,
    metrics: Metrics,
    quarantine: Quarantine,
    writer: str,
    ids: Callable[[], str],
) -> _Core:
    """The parts that decide, recorded where the settings say so."""
    leases: dict[str, float] = {
        "lease_s": settings.lease_s,
        "fence_delay_s": settings.fence_delay_s,
    }
    timeout_s = settings.heartbeat_timeout_s
    if not settings.stimulus_log_dir:
        table, quota = DeviceTable(), QuotaLedger()
        return _Core(
            ledger=Ledger(table, writer=writer, **leases),
            inventory=Inventory(table, heartbeat_timeout_s=timeout_s),
            verdicts=Verdicts(table),
            quota=quota,
            quota_verdicts=QuotaVerdicts(table, quota),
        )
    recorder = Recorder(
        LogSettings(
            directory=Path(settings.stimulus_log_dir),
            segment_bytes=settings.stimulus_log_segment_bytes,
            segments=settings.stimulus_log_segments,
            queue_size=settings.stimulus_log_queue_size,
            retry_s=10 * settings.retry_s,
        ),
        clock=clock,
        metrics=metrics,
        quarantine=quarantine,
        run=ids(),
        program=version("hami-scheduler"),
    )
    table = RecordedTable(recorder)
    ledger = RecordedLedger(table, recorder, writer=writer, **leases)
    inventory = RecordedInventory(table, recorder, heartbeat_timeout_s=timeout_s)
    quota = RecordedQuotaLedger(recorder)
    recorder.watch(Parts(ledger, inventory, quota), policy=settings.policy)
    return _Core(
        ledger=ledger,
        inventory=inventory,
        verdicts=RecordedVerdicts(table, recorder),
        quota=quota,
        quota_verdicts=RecordedQuotaVerdicts(table, quota, recorder),
        recorder=recorder,
    )


def main(argv: Sequence[str]) -> int:
    """Run the service; returns the exit code."""
    return run(serve_scheduler, service="scheduler", settings_type=Settings, argv=argv)


async def serve_scheduler(context: ServiceContext[Settings]) -> None:
    """Run the scheduler until ``context`` is asked to stop."""
    settings = context.settings
    keys = load_keys(settings)
    # What a cluster needs lives as long as the cluster: look seldom for what became unreachable.
    gc.set_threshold(*GARBAGE)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            natsio.connect(
                settings.nats_urls,
                name="hami-scheduler",
                login=natsio.NatsLogin.of(settings, inbox=grants.inbox("scheduler")),
                ca_file=settings.nats_ca_file,
                start_timeout_s=settings.start_timeout_s,
                request_timeout_s=settings.bus_timeout_s,
                rest_s=REST_S,
            )
        )
        kube = await stack.enter_async_context(
            kubeio.connect(
                settings.kubeconfig,
                user_agent="hami-scheduler",
                request_timeout_s=settings.api_timeout_s,
                start_timeout_s=settings.start_timeout_s,
            )
        )
        scheduler = Scheduler(
            settings=settings,
            world=World(
                devices=natsio.NatsBucket(bus, subjects.DEVICES_BUCKET),
                records=natsio.NatsBucket(bus, subjects.ALLOC_BUCKET),
                states=natsio.NatsBucket(bus, subjects.STATE_BUCKET),
                publisher=natsio.NatsPublisher(bus),
                subscribe=partial(_subscribe, bus),
                kube=kube,
                clock=context.clock,
                is_connected=lambda: bus.is_connected,
                ask=partial(_ask, bus),
            ),
            keys=keys,
            registry=context.registry,
            tracing=context.tracing,
            writer=settings.replica or socket.gethostname(),
            ids=unique_ids(),
        )
        context.settings_file.use = scheduler.use
        pages = {**context.settings_file.routes(), **scheduler.cluster_metrics.routes()}
        routes = {
            **scheduler.extender.routes(),
            **scheduler.quota.routes(),
            **scheduler.resizer.routes(),
        }
        app = httpd.HttpApp(
            {**_guarded(routes, settings, kube, context.clock), **pages},
            registry=context.registry,
            ready=lambda: context.ready.is_set and scheduler.state.is_complete,
            body_limit=settings.body_limit_bytes,
        )
        probes = httpd.HttpApp(pages, registry=context.registry, ready=app.is_ready)
        async with anyio.create_task_group() as group:
            limits = natsio.BusLimits(replicas=settings.bus_replicas)
            await group.start(natsio.keep_bus, bus, limits, settings.start_timeout_s)
            group.start_soon(scheduler.run, name="scheduler")
            async with anyio.create_task_group() as serving:
                await serving.start(
                    httpd.serve, app, settings.http_host, settings.http_port, None, settings.grace_s
                )
                if settings.probe_host:
                    at = (settings.probe_host, settings.probe_port, None, settings.grace_s)
                    await serving.start(httpd.serve, probes, *at)
                context.ready.set()
                await context.stopping.wait()
                serving.cancel_scope.cancel()
            with finish_within(DRAIN_S):
                await scheduler.drain(limit_s=DRAIN_S)
            group.cancel_scope.cancel()


def _guarded(
    routes: Mapping[gate.Route, httpd.Handler], settings: Settings, kube: KubeApi, clock: Clock
) -> dict[gate.Route, httpd.Handler]:
    """The routes as the settings protect them: those of the extender by where they listen."""
    if settings.auth == "none":
        return dict(routes)
    gate.require_private(host=settings.http_host, field="http_host", has_tls=False)
    mine = {route: handler for route, handler in routes.items() if route[1].startswith("/v1/")}
    auth = KubeAuth(lambda: kube, clock=clock)
    return {**routes, **gate.Gate(auth).guarded(mine, RULES)}


async def _ask(bus: natsio.Bus, subject: str) -> bytes:
    """An agent's answer to a question."""
    return (await bus.request(subject)).data


def _subscribe(bus: natsio.Bus, subject: str) -> AbstractAsyncContextManager[natsio.Subscription]:
    """Subscribe; heartbeats, which come by the hundred and may wait, are read in batches."""
    is_heartbeat = subject.startswith(subjects.HEARTBEAT_PREFIX)
    return bus.subscribe(
        subject, per_subject=NODE_WAITING, gather_s=HEARTBEATS_S if is_heartbeat else 0.0
    )


def unique_ids() -> Callable[[], str]:
    """Makes identifiers that nobody else makes, without asking the kernel for each.

    The first half is drawn once for the process, the second counts.
    """
    mine, numbers = secrets.token_hex(8), count(1)
    return lambda: f"{mine}{next(numbers):016x}"


def load_keys(settings: Settings) -> Keys:
    """Keys from the files that ``settings`` names; ``SettingsInvalid`` names the wrong one."""
    signer = Signer.from_pem(_read(settings.signing_key_file, field="signing_key_file"))
    trusted = [
        _read(path, field=f"trusted_key_files[{number}]")
        for number, path in enumerate(settings.trusted_key_files)
    ]
    return Keys(signer=signer, verifier=Verifier.from_pems([signer.public_pem(), *trusted]))


def _read(path: str, *, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsInvalid(
            field=field, problem=f"{path!r}: {error.strerror}", fix="give the path of a PEM file"
        ) from error
