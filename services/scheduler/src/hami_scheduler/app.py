# SPDX-License-Identifier: Apache-2.0
"""Assembles and runs the scheduler: adapters, parts, tasks, orderly shutdown.

Start: listen on HTTP, wait for bus and API server, declare streams, start feeds and recovery; calls
are answered with an error until ledger and pods agree. Stop: readiness fails, HTTP
refuses new calls and finishes those in flight, queued releases and decisions are written, tasks
end, bus and API client close. Seconds throughout.
"""

import gc
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path

import anyio
from msgspec import Struct, structs
from prometheus_client import CollectorRegistry

from hami_common.bounds import LABEL_MOST, NAME_MOST, USAGE_LABELS_MOST
from hami_common.bus import grants, subjects
from hami_common.errors import SettingsInvalid
from hami_common.pods.signing import Signer, Verifier
from hami_common.ports import BatchPublisher, Bucket, Clock, KubeApi
from hami_common.runtime import httpd, kubeio, natsio
from hami_common.runtime.kubeio.recorder import EventRecorder
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.quarantinereport import QuarantineReporter
from hami_common.runtime.service import ServiceContext, run
from hami_common.runtime.settings import read
from hami_common.runtime.supervise import Supervisor
from hami_common.runtime.tasks import background, finish_within
from hami_common.runtime.telemetry import Tracing
from hami_common.runtime.trustedkeys import TrustedKeys
from hami_common.vendors.catalog import Catalog
from hami_core.core import Core
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.podfacts import PodReader
from hami_core.ledger.repair import Restore
from hami_core.ledger.stimuli import CapacityReturned, Over, Task
from hami_core.quota.accounts import QuotaLedger
from hami_core.table.inventory import Inventory
from hami_core.table.table import DeviceTable
from hami_scheduler.settings import Settings
from hami_scheduler.shell import listeners, takeover
from hami_scheduler.shell.background import BackgroundTasks
from hami_scheduler.shell.backlog import Backlog, Isolation
from hami_scheduler.shell.bindadmission import BindAdmission
from hami_scheduler.shell.binder import Binder
from hami_scheduler.shell.bindingreports import BindingReports
from hami_scheduler.shell.bursts import Bursts
from hami_scheduler.shell.claimapi import ClaimApi
from hami_scheduler.shell.claimkeeper import ClaimKeeper
from hami_scheduler.shell.claims import Claims
from hami_scheduler.shell.clustermetrics import ClusterMetrics
from hami_scheduler.shell.decisions import Decision, Decisions
from hami_scheduler.shell.defrag import Defrag
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.evictions import Evictions
from hami_scheduler.shell.extender import Deciders, Extender
from hami_scheduler.shell.feed import Feed, Sources, Subscribe, always
from hami_scheduler.shell.gangs import Gangs
from hami_scheduler.shell.idle import IdlePolicies, IdlePorts
from hami_scheduler.shell.idleevents import IdleEvents, NothingIdle, StoredIdleEvents
from hami_scheduler.shell.isolation import (
    CHORE,
    CONFIRMATION,
    DECISION,
    KINDS,
    record_key,
    reference,
)
from hami_scheduler.shell.kueue import Placement
from hami_scheduler.shell.ledgerwriter import LedgerPorts, LedgerWriter
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.mirror import HamiMirrors
from hami_scheduler.shell.moments import Moments
from hami_scheduler.shell.pastevents import (
    PastEvents,
    StoredEvents,
    no_events,
    nothing_stored,
    past_events,
    stored_events,
)
from hami_scheduler.shell.podapi import PodApi
from hami_scheduler.shell.podclaims import PodClaims
from hami_scheduler.shell.podways import PodWays
from hami_scheduler.shell.policies import PolicyKeeper
from hami_scheduler.shell.preemption import Preemption
from hami_scheduler.shell.provisioning import Provisioning
from hami_scheduler.shell.quota import QuotaKeeper, register
from hami_scheduler.shell.recorder import LogSettings, RecordedCore, Recorder
from hami_scheduler.shell.recovery import Recovery
from hami_scheduler.shell.resize import Ask, Resizer, no_agent
from hami_scheduler.shell.settling import Settling
from hami_scheduler.shell.state import State
from hami_scheduler.shell.unasked import Unasked
from hami_scheduler.shell.verdictreports import VerdictReports
from hami_scheduler.shell.volcano import VolcanoExtender
from hami_scheduler.shell.wakeup import Waker
from hami_scheduler.shell.whatif import WhatIf

SWITCH_S = 0.0005
"""Longest time for which a thread that answers a question may delay the loop, per turn."""
GARBAGE = (20_000, 20, 50)
"""Thresholds of Python's cycle collector.

With the defaults (700, 10, 10) it takes a twentieth of the processor time, and walks over every
known pod and device while a call waits.
"""
HEARTBEATS_S = 0.1
"""Interval at which gathered heartbeats are processed; they are valid for seconds."""
NODE_WAITING = 256
"""Maximum waiting heartbeats, or faults, of one node; more are dropped."""
REST_S = 0.05
"""Pause between two reads of the bus while no caller waits for an answer from it."""
DRAIN_S = 5.0
"""Maximum time to write queued releases and decisions at shutdown."""


class World(Struct, frozen=True, kw_only=True):
    """Everything outside the process, as ports."""

    devices: Bucket
    records: Bucket
    states: Bucket
    policies: Bucket
    publisher: BatchPublisher
    subscribe: Subscribe
    kube: KubeApi
    clock: Clock
    is_connected: Callable[[], bool] = always
    """Returns whether the bus is connected; an in-memory bus always is."""
    ask: Ask = no_agent
    """Sends a request to the agent of a node."""
    past: PastEvents = nothing_stored
    """Reads the ledger and the devices of the last days."""
    stored: StoredEvents = no_events
    """Reads all stored events of some subjects."""
    idle: IdleEvents = NothingIdle()
    """Idle periods of allocations."""


class Keys(Struct, frozen=True, kw_only=True):
    """Key that signs allocations, and keys whose signatures are trusted."""

    signer: Signer
    verifier: Verifier


class Scheduler:
    """One assembled scheduler, which ``run`` executes."""

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
        """Write records as ``writer``; ``ids`` makes globally unique identifiers."""
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
        self._settings = settings
        self._queues(quarantine)
        self._core = core = _core(
            settings, clock=clock, metrics=metrics, quarantine=quarantine, writer=writer, ids=ids
        )
        self.state = state = State(
            core=core,
            clock=clock,
            metrics=metrics,
            later=self.tasks.add,
            quarantine=quarantine,
            supervisor=supervisor,
        )
        catalog = Catalog.from_settings(settings.vendors)
        self._reader = reader = PodReader(
            catalog=catalog,
            verifier=keys.verifier,
            policy=settings.policy,
            usage_labels=_usage_labels(settings),
        )
        self.policies = PolicyKeeper(
            state=state,
            bucket=world.policies,
            settings=settings,
            registry=registry,
            writer=writer,
            ids=ids,
        )
        reader.prefer(self.policies.policy_for)
        self._effects = effects = self._writers(world, tracing=tracing, writer=writer, ids=ids)
        self._waker = waker = Waker(world.kube, state=state, settings=settings)
        self.quota = quota = QuotaKeeper(
            state=state,
            catalog=catalog,
            kube=world.kube,
            settings=settings,
            registry=registry,
        )
        register(registry, quota)
        self.cluster_metrics = ClusterMetrics(
            state=state, quota=quota, registry=registry, sets=settings.metric_names
        )
        metrics.waiting_pods.set_function(state.pods.waiting_count)
        self.take_over = takeover.TakeOver(
            state=state,
            effects=effects,
            kube=world.kube,
            pods=takeover.Pods(reader=reader, catalog=catalog, signer=keys.signer),
            settings=settings,
            metrics=metrics,
            ids=ids,
        )
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
            effects=effects,
            is_withheld=self.take_over.is_withheld,
            reader=reader,
            quota=quota,
            settings=settings,
            metrics=metrics,
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
            observe=self.policies.observe,
        )
        self.binder = Binder(
            state=state,
            effects=effects,
            quota=quota,
            ensure=self.take_over.ensure,
            signer=keys.signer,
            settings=settings,
            metrics=metrics,
            ids=ids,
        )
        self.claims = Claims(
            state=state,
            binder=self.binder,
            effects=effects,
            kube=world.kube,
            decisions=self._publishing,
            settings=settings,
            metrics=metrics,
            writer=writer,
        )
        self._recovery = Recovery(
            state=state,
            feed=feed,
            effects=effects,
            settings=settings,
            metrics=metrics,
            writer=writer,
            ids=ids,
            restore_claims=self.claims.restore,
        )
        reports = BindingReports(
            state=state,
            decisions=self._publishing,
            settings=settings,
            metrics=metrics,
            tracing=tracing,
        )
        self.bind_admission = BindAdmission(
            binder=self.binder, pods=effects.pods, reports=reports, settings=settings
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
        self.idle = IdlePolicies(
            state=state,
            effects=effects,
            quota=quota,
            resizer=self.resizer,
            ports=IdlePorts(
                events=world.idle, publisher=world.publisher, kube=world.kube, ask=world.ask
            ),
            settings=settings,
            metrics=metrics,
            writer=writer,
        )
        self.resizer.on_claim = self.claims.resized
        self._background = BackgroundTasks(
            effects=effects,
            waker=waker,
            align=self.resizer.align,
            clock=clock,
            settings=settings,
            metrics=metrics,
        )
        self.mirrors = HamiMirrors(state=state, kube=world.kube, settings=settings)
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
        self.bursts = Bursts(
            state=state,
            evictions=effects.evictions,
            kube=world.kube,
            settings=settings,
            metrics=metrics,
            writer=writer,
        )
        self.gangs = Gangs(
            state=state,
            binder=self.binder,
            effects=effects,
            kube=world.kube,
            decisions=self._publishing,
            settings=settings,
            metrics=metrics,
        )
        self.placement = Placement(
            state=state,
            reader=reader,
            binder=self.binder,
            effects=effects,
            kube=world.kube,
            settings=settings,
            metrics=metrics,
            writer=writer,
        )
        self.provisioning = Provisioning(
            state=state,
            reader=reader,
            binder=self.binder,
            effects=effects,
            kube=world.kube,
            settings=settings,
            metrics=metrics,
            writer=writer,
        )
        self.what_if = WhatIf(
            state=state,
            quota=quota,
            kube=world.kube,
            catalog=catalog,
            past=world.past,
            settings=settings,
            writer=writer,
        )
        self.moments = Moments(state=state, stored=world.stored, settings=settings)
        self.pod_ways = PodWays(
            state=state, kube=world.kube, take=self.what_if.take, settings=settings
        )
        self.defrag = Defrag(
            state=state,
            binder=self.binder,
            effects=effects,
            kube=world.kube,
            take=self.what_if.take,
            settings=settings,
            metrics=metrics,
            writer=writer,
        )
        self.extender = Extender(
            state=state,
            reader=reader,
            deciders=Deciders(
                binder=self.binder,
                bindings=reports,
                quota=quota,
                gangs=self.gangs,
                preemption=self.preemption,
            ),
            decisions=self._publishing,
            settings=settings,
            metrics=metrics,
            tracing=tracing,
        )

        self._unasked = Unasked(
            state=state,
            extender=self.extender,
            keeper=effects.keeper,
            kube=world.kube,
            settings=settings,
        )
        self.volcano = VolcanoExtender(
            state=state,
            reader=reader,
            binder=self.binder,
            bindings=reports,
            quota=quota,
            decisions=self._publishing,
            settings=settings,
            metrics=metrics,
        )
        self.policies.changed = self._policies_changed
        self._policies_changed()

    def _queues(self, quarantine: Quarantine) -> None:
        """Create the queues of background work."""
        metrics, capacity = self.metrics, self._settings.chore_queue_size
        self.tasks: Backlog[Task] = Backlog(
            "chores",
            capacity=capacity,
            dropped=metrics.dropped,
            failed=metrics.failed,
            isolation=Isolation(quarantine=quarantine, kind=CHORE, key=_task_key, name=_task_name),
        )
        self.confirmations: Backlog[Holding] = Backlog(
            "confirmations",
            capacity=capacity,
            dropped=metrics.dropped,
            failed=metrics.failed,
            isolation=Isolation(
                quarantine=quarantine, kind=CONFIRMATION, key=_holding_key, name=_holding_name
            ),
        )
        self.decisions: Backlog[Decision] = Backlog(
            "decisions",
            capacity=self._settings.decision_queue_size,
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

    def _writers(
        self, world: World, *, tracing: Tracing, writer: str, ids: Callable[[], str]
    ) -> Effects:
        """Create the writers to the bus and the API server."""
        settings, state = self._settings, self.state
        ledger = LedgerWriter(
            LedgerPorts(records=world.records, states=world.states, tracing=tracing),
            state=state,
            settings=settings,
            metrics=self.metrics,
            writer=writer,
            ids=ids,
        )
        pods = PodApi(
            world.kube, state=state, reader=self._reader, settings=settings, tracing=tracing
        )
        claims = PodClaims(
            api=ClaimApi(world.kube, settings=settings),
            state=state,
            ledger=ledger,
            pods=pods,
            metrics=self.metrics,
            tracing=tracing,
        )
        settling = Settling(state=state, ledger=ledger, pods=pods, claims=claims, settings=settings)
        return Effects(
            ledger=ledger,
            pods=pods,
            claims=claims,
            keeper=ClaimKeeper(
                state=state,
                claims=claims,
                kube=world.kube,
                settings=settings,
                writer=writer,
            ),
            settling=settling,
            evictions=Evictions(state=state, pods=pods, kube=world.kube, settings=settings),
            confirmations=self.confirmations,
        )

    def use(self, settings: Settings) -> None:
        """Apply the hot-reloadable settings of ``settings``."""
        self._settings = settings
        self.policies.use(settings)
        self._policies_changed()
        self.extender.use(settings)
        self.preemption.use(settings)
        self.bursts.use(settings)
        self._effects.evictions.use(settings)
        self.gangs.use(settings)

    def _policies_changed(self) -> None:
        """Show the default policy in snapshots, and answer what-if questions with it."""
        default = self.policies.default
        if isinstance(self._core, RecordedCore):
            self._core.recorder.prefer(default)
        self.what_if.use(structs.replace(self._settings, policy=default))

    async def run(self) -> None:
        """Run everything but HTTP, indefinitely; a loop that ends with an error is restarted."""
        most = self._settings.gather_most
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "feed": self._feed.run,
            "recovery": self._recovery.run,
            "take-over from HAMi": self.take_over.work,
            "mirrors for HAMi": self.mirrors.work,
            "wake waiting pods": self._waker.work,
            "preemption": self.preemption.work,
            "bursts": self.bursts.work,
            "gangs": self.gangs.work,
            "wake gangs": self.gangs.wake,
            "placement for Kueue": self.placement.work,
            "provisioning requests": self.provisioning.work,
            "defragmentation": self.defrag.work,
            "claims": self.claims.work,
            "idle allocations": self.idle.work,
            "claims of pods": self._effects.keeper.work,
            "pods without a question": self._unasked.work,
            "decisions without a bind": self._publishing.watch,
            "refused pods": VerdictReports(state=self.state, decisions=self._publishing).watch,
            "quarantine": self.quarantine.retry,
            "quarantine reports": self._reporter.work,
            # Not gathered for a time: an agent's next state would overtake it.
            "confirmations": partial(
                self.confirmations.work_together, self._effects.ledger.confirm_all, 0.0, most
            ),
            "decisions": partial(
                self.decisions.work_together,
                self._publishing.send,
                self._settings.gather_s,
                most,
            ),
        }
        for number in range(self._settings.chore_workers):
            loops[f"chores {number}"] = partial(self.tasks.work, self._background.run)
        for file in (self.quota.file, self.policies.file):
            if file.path:
                loops[file.kind.title] = partial(file.watch, self.state.clock, self._poll_s)
        if self._settings.policies_file:
            loops |= {
                "rollbacks": self.policies.follow_rollbacks,
                "canary": self.policies.evaluate,
            }
        if isinstance(self._core, RecordedCore):
            loops["stimulus log"] = self._core.recorder.work
        async with anyio.create_task_group() as group:
            for name, loop in loops.items():
                group.start_soon(self._supervisor.keep, name, loop, name=name)

    def _poll_s(self) -> float:
        """Return the interval at which files are polled."""
        return self._settings.config_poll_s

    async def keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run a further loop, restarted when it ends with an error."""
        await self._supervisor.keep(name, loop)

    async def drain(self, *, limit_s: float) -> None:
        """Wait for queued work, up to ``limit_s``."""
        self._publishing.flush()
        with anyio.move_on_after(limit_s):
            await self.confirmations.drain(limit_s=limit_s)
            await self.tasks.drain(limit_s=limit_s)
            await self.decisions.drain(limit_s=limit_s)
            if isinstance(self._core, RecordedCore):
                await self._core.recorder.drain()


def _usage_labels(settings: Settings) -> tuple[str, ...]:
    """Return the keys of the labels to be recorded; ``SettingsInvalid`` for unusable ones."""
    keys = settings.usage_labels
    if len(keys) > USAGE_LABELS_MOST:
        raise SettingsInvalid(
            field="usage_labels",
            problem=f"names {len(keys)} labels",
            fix=f"name at most {USAGE_LABELS_MOST}, because each allocation records them",
        )
    for key in keys:
        if not 0 < len(key) <= NAME_MOST + 1 + LABEL_MOST:
            raise SettingsInvalid(
                field="usage_labels",
                problem=f"{key[:40]!r} is no key of a label",
                fix="give a key such as team or app.kubernetes.io/part-of",
            )
    return keys


def _holding_key(holding: Holding) -> str:
    return record_key(holding.record.node, holding.record.pod_uid)


def _holding_name(holding: Holding) -> tuple[str, str]:
    return holding.record.namespace, holding.record.pod


def _task_key(task: Task) -> str:
    what = type(task).__name__
    match task:
        case CapacityReturned(node=node) | Over(node=node):
            return f"{what}/{node}"
        case Restore(signed=signed):
            return f"{what}/{record_key(signed.placement.node, signed.pod_uid)}"
        case _:
            return f"{what}/{_holding_key(task.holding)}"


def _task_name(task: Task) -> tuple[str, str]:
    match task:
        case CapacityReturned() | Over():
            return "", ""
        case Restore(signed=signed):
            return signed.namespace, signed.pod
        case _:
            return _holding_name(task.holding)


def _core(
    settings: Settings,
    *,
    clock: Clock,
    metrics: Metrics,
    quarantine: Quarantine,
    writer: str,
    ids: Callable[[], str],
) -> Core:
    """Make the core, recorded if the settings name a directory for the log."""
    table, quota = DeviceTable(), QuotaLedger()
    ledger = Ledger(
        table, writer=writer, lease_s=settings.lease_s, fence_delay_s=settings.fence_delay_s
    )
    inventory = Inventory(
        table, heartbeat_timeout_s=settings.heartbeat_timeout_s, trusts_unheard=False
    )
    if not settings.stimulus_log_dir:
        return Core(ledger=ledger, inventory=inventory, quota=quota)
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
        policy=settings.policy,
    )
    return RecordedCore(recorder, ledger=ledger, inventory=inventory, quota=quota)


def main(argv: Sequence[str]) -> int:
    """Run the service; returns the exit code."""
    return run(serve_scheduler, service="scheduler", settings_type=Settings, argv=argv)


async def serve_scheduler(context: ServiceContext[Settings]) -> None:
    """Run the scheduler until ``context`` is asked to stop."""
    settings = context.settings
    keys = load_keys(settings)
    # Objects of a cluster live as long as the cluster: collect unreachable ones rarely.
    gc.set_threshold(*GARBAGE)
    sys.setswitchinterval(SWITCH_S)
    scheduler: Scheduler | None = None

    def is_ready() -> bool:
        return scheduler is not None and context.ready.is_set and scheduler.state.is_complete

    servers, served = httpd.Servers(), listeners.extender_and_probes(context, is_ready)
    admission = listeners.bind_admission(context, is_ready)
    volcano, api = listeners.volcano(context, is_ready), listeners.api(context, is_ready)
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(background())
        await serving.start(
            servers.run,
            [*served, *([admission.listener] if admission else []), *volcano, *api],
            settings.grace_s,
            name="servers",
        )
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
            world=_world(bus, kube, context.clock),
            keys=keys,
            registry=context.registry,
            tracing=context.tracing,
            writer=settings.replica or socket.gethostname(),
            ids=unique_ids(),
        )
        context.settings_file.use = scheduler.use
        routes = {
            **scheduler.extender.routes(),
            **scheduler.quota.routes(),
            **scheduler.resizer.routes(),
            **scheduler.what_if.routes(),
            **scheduler.pod_ways.routes(),
            **scheduler.defrag.routes(),
            **scheduler.moments.routes(),
            **scheduler.policies.routes(),
        }
        pages = scheduler.cluster_metrics.routes()
        async with anyio.create_task_group() as group:
            limits = natsio.BusLimits(replicas=settings.bus_replicas)
            await group.start(natsio.keep_bus, bus, limits, settings.start_timeout_s)
            group.start_soon(scheduler.run, name="scheduler")
            extender, *probes = served
            guarded = listeners.guarded(routes, settings, kube, context.clock)
            extender.app.complete({**guarded, **pages})
            for one in probes:
                one.app.complete(pages)
            if admission:
                admission.listener.app.complete(scheduler.bind_admission.routes())
                group.start_soon(scheduler.keep, "certificate", admission.watch)
            for one in api:
                own = listeners.own_guarded(routes, settings.api, kube, context.clock)
                one.app.complete(own)
                if one.tls is not None:
                    group.start_soon(one.tls.watch)
            for one in volcano:
                one.app.complete(scheduler.volcano.routes())
            context.ready.set()
            await context.stopping.wait()
            await servers.close()
            with finish_within(DRAIN_S):
                await scheduler.drain(limit_s=DRAIN_S)
            group.cancel_scope.cancel()


def _world(bus: natsio.Bus, kube: KubeApi, clock: Clock) -> World:
    """Return the ports on one bus and one API server."""
    return World(
        devices=natsio.NatsBucket(bus, subjects.DEVICES_BUCKET),
        records=natsio.NatsBucket(bus, subjects.ALLOC_BUCKET),
        states=natsio.NatsBucket(bus, subjects.STATE_BUCKET),
        policies=natsio.NatsBucket(bus, subjects.POLICIES_BUCKET),
        publisher=natsio.NatsPublisher(bus),
        subscribe=partial(_subscribe, bus),
        kube=kube,
        clock=clock,
        is_connected=lambda: bus.is_connected,
        ask=partial(_ask, bus),
        past=partial(past_events, bus, clock),
        stored=partial(stored_events, bus, clock),
        idle=StoredIdleEvents(bus, clock=clock),
    )


async def _ask(bus: natsio.Bus, subject: str, data: bytes = b"") -> bytes:
    """Return an agent's answer to a request."""
    return (await bus.request(subject, data)).data


def _subscribe(bus: natsio.Bus, subject: str) -> AbstractAsyncContextManager[natsio.Subscription]:
    """Subscribe; heartbeats, which arrive by the hundred and may wait, are read in batches."""
    is_heartbeat = subject.startswith(subjects.HEARTBEAT_PREFIX)
    return bus.subscribe(
        subject, per_subject=NODE_WAITING, gather_s=HEARTBEATS_S if is_heartbeat else 0.0
    )


def unique_ids() -> Callable[[], str]:
    """Return a generator of globally unique identifiers that avoids a system call for each.

    The first half is drawn once for the process, the second counts.
    """
    mine, numbers = secrets.token_hex(8), count(1)
    return lambda: f"{mine}{next(numbers):016x}"


def load_keys(settings: Settings) -> Keys:
    """Load the keys from the files that ``settings`` names.

    ``SettingsInvalid`` names a wrong private key; a public one that is no key is left out.
    """
    signer = Signer.from_pem(read(Path(settings.signing_key_file), field="signing_key_file"))
    trusted = TrustedKeys(Path(settings.trusted_keys_dir)).pems if settings.trusted_keys_dir else ()
    return Keys(signer=signer, verifier=Verifier.from_pems([signer.public_pem(), *trusted]))
