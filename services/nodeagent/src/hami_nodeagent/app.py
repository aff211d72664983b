# SPDX-License-Identifier: Apache-2.0
"""Composition root of the node agent: drivers, kubelet, pods, ledger; orders start and stop.

An agent begins when no other one serves the node (``shell.turn``). Kubelet is served first, from
the files of the last run, because containers of this node may have to start while the bus or the
API server is unavailable (node reboot). Then the agent waits for the API server and the bus,
indefinitely unless ``start_timeout_s`` is set. Ready means that devices are reported and that
ledger and pods are read. At shutdown the connection to kubelet ends first; a plugin that is missing
for a moment stops no container.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Arguments
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus
from msgspec.structs import asdict

from hami_common.bus import grants, subjects
from hami_common.errors import SettingsInvalid, Unavailable
from hami_common.ports import KubeApi, Publisher
from hami_common.runtime import kubeio
from hami_common.runtime.footprint import settle
from hami_common.runtime.httpd import HttpApp, serve
from hami_common.runtime.kubeio import EventRecorder
from hami_common.runtime.natsio import (
    Bus,
    NatsBucket,
    NatsLogin,
    NatsPublisher,
    OwnBucket,
    RepublishedFeed,
    connect,
)
from hami_common.runtime.quarantinereport import QuarantineReporter
from hami_common.runtime.service import ServiceContext, run
from hami_common.runtime.tasks import StartedOnce, background, finish_within
from hami_common.runtime.trustedkeys import TrustedKeys
from hami_common.skus.expansion import ACCELERATORS
from hami_common.vendors import ascend, nvidia
from hami_common.vendors.catalog import Catalog
from hami_nodeagent.core.allowedprofiles import check_allowed
from hami_nodeagent.core.modes import check_setting
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.choice import chosen_drivers, report_untested
from hami_nodeagent.drivers.protocol import Driver, Inventory, MemoryCap, ModeSwitch
from hami_nodeagent.settings import NvidiaSettings, Settings
from hami_nodeagent.shell.allocate import Allocator, GrantKeeper
from hami_nodeagent.shell.amounts import Advertiser
from hami_nodeagent.shell.answers import Answers
from hami_nodeagent.shell.breaches import BreachTeller
from hami_nodeagent.shell.bursts import BurstKeeper
from hami_nodeagent.shell.check import SelfCheck
from hami_nodeagent.shell.checkpoint import Checkpoint
from hami_nodeagent.shell.deviceplugin import DevicePlugin
from hami_nodeagent.shell.devicewatch import DeviceWatch
from hami_nodeagent.shell.draplugin import DraPlugin
from hami_nodeagent.shell.feed import LedgerFeed
from hami_nodeagent.shell.hostcheck import HostCheck
from hami_nodeagent.shell.inotify import DirectoryWatch
from hami_nodeagent.shell.inventory import Reporter, VendorDevices, beat
from hami_nodeagent.shell.kubelet import PluginKeeper
from hami_nodeagent.shell.leaving import leave
from hami_nodeagent.shell.limiter import Limiter
from hami_nodeagent.shell.metrics import Metrics
from hami_nodeagent.shell.modes import ModeKeeper
from hami_nodeagent.shell.nodestatus import StatusWatch
from hami_nodeagent.shell.overcommit import OvercommitWatch
from hami_nodeagent.shell.partition_answers import PartitionAnswers
from hami_nodeagent.shell.partition_news import PartitionTeller
from hami_nodeagent.shell.partitions import Partitions
from hami_nodeagent.shell.picture import Picture
from hami_nodeagent.shell.pluginproxy import make_socket_directory
from hami_nodeagent.shell.podresources import PodResources, PodsPage
from hami_nodeagent.shell.pods import PodSource
from hami_nodeagent.shell.podsview import PodsView
from hami_nodeagent.shell.prepare import Preparer
from hami_nodeagent.shell.recall import RecallWatch
from hami_nodeagent.shell.relimit import Relimiter
from hami_nodeagent.shell.render import Renderer
from hami_nodeagent.shell.sequence import Sequence
from hami_nodeagent.shell.sharing import SharingKeeper
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.slices import SliceKeeper, withdraw
from hami_nodeagent.shell.states import States
from hami_nodeagent.shell.turn import Turn
from hami_nodeagent.shell.usage import UsageWatch
from hami_nodeagent.shell.usageevents import UsageTeller
from hami_nodeagent.shell.vnpucore import VnpuCore
from hami_nodeagent.shell.wall import MemoryWall

SERVICE = "nodeagent"
_CLOSE_S = 3.0

_log = logging.getLogger(__name__)


def main(argv: Arguments[str]) -> int:
    """Run the service; returns the exit code."""
    return run(serve_agent, service=SERVICE, settings_type=Settings, argv=argv)


class _Startable(Protocol):
    """A loop that reports when it has started."""

    def __call__(self, *, task_status: TaskStatus[None]) -> Awaitable[None]: ...


class _Parts:
    """State that the tasks share."""

    def __init__(self, context: ServiceContext[Settings]) -> None:
        settings = context.settings
        checkpoint = _checkpoint(settings)
        self.catalog = catalog = Catalog.from_settings(settings.vendors)
        picture = Picture(
            node=settings.node_name,
            grants=checkpoint.load_grants(),
            advertised=lambda device: catalog.vendor(device.vendor).advertised(device),
        )
        past = checkpoint.load_devices()
        for canonical in past:
            if canonical.node == settings.node_name:
                picture.set_canonical(canonical)
        self.has_past = bool(past)
        """An earlier run recorded devices, so containers of this node may depend on the agent."""
        self.context = context
        self.site = Site(
            picture=picture,
            settings=settings,
            clock=context.clock,
            metrics=Metrics(context.registry),
            checkpoint=checkpoint,
            sequence=Sequence(context.clock),
            tracing=context.tracing,
        )
        drivers = _drivers(settings, catalog)
        report_untested(drivers, catalog)
        self.vnpu_core = VnpuCore(settings)
        self.walls = {
            driver.vendor: MemoryWall(site=self.site, cap=driver, events=self.events)
            for driver in drivers
            if isinstance(driver, MemoryCap)
        }
        self.sharing = SharingKeeper(
            site=self.site, look_again=self._discover_nvidia, events=self.events
        )
        self.sources = tuple(
            VendorDevices(
                site=self.site,
                driver=driver,
                on_mismatch=context.stop,
                review=self._review_of(driver.vendor),
            )
            for driver in drivers
        )
        self.watch = DeviceWatch(
            site=self.site, wake=[source.look_again for source in self.sources]
        )
        self.vendor_by_resource = {
            family.count: source.vendor
            for source in self.sources
            for family in catalog.vendor(source.vendor).families
        }
        if self.vendor_by_resource:
            self.vendor_by_resource[ACCELERATORS] = ""
        self.keys = TrustedKeys(Path(settings.trusted_keys_dir))
        self.kubelet = PodResources(site=self.site, fallback=_fallback(settings))
        self.keeper = GrantKeeper(self.site)
        self.limiter = Limiter(self.site)
        self.partition_teller = PartitionTeller(site=self.site, publisher=lambda: self.publisher)
        self.partitions = Partitions(
            site=self.site,
            partitioners=[one for driver in drivers if (one := driver.partitioner) is not None],
            kubelet=self.kubelet,
            teller=self.partition_teller,
        )
        self.modes = tuple(
            ModeKeeper(site=self.site, switch=driver, look_again=source.look_again)
            for driver, source in zip(drivers, self.sources, strict=True)
            if driver.vendor == nvidia.NAME and isinstance(driver, ModeSwitch)
        )
        renderer = Renderer(catalog, settings)
        self.partition_answers = PartitionAnswers(
            site=self.site, renderer=renderer, partitions=self.partitions
        )
        self.allocator = Allocator(
            site=self.site,
            kubelet=self.kubelet,
            renderer=renderer,
            keeper=self.keeper,
            limiter=self.limiter,
            vnpu_core=self.vnpu_core,
            partitions=self.partition_answers,
        )
        self.preparer: Preparer | None = None
        """Prepared ResourceClaims; those of an earlier run also after DRA was switched off."""
        if settings.dra.enabled:
            checkpoint.begin_claims()
        if checkpoint.has_claims:
            self.preparer = Preparer(
                site=self.site,
                renderer=renderer,
                limiter=self.limiter,
                partitions=self.partitions,
                kube=lambda: self.kube,
            )
        self.recorder: EventRecorder | None = None
        self.kube: KubeApi | None = None
        """Set after the first connection to the API server."""
        self.publisher: Publisher | None = None
        """Set after the first connection to the bus."""
        self.usage = UsageWatch(
            site=self.site,
            drivers=drivers,
            teller=BreachTeller(
                site=self.site,
                events=lambda: self.recorder,
                publisher=lambda: self.publisher,
                kube=lambda: self.kube,
            ),
        )
        self.recall = tuple(
            RecallWatch(
                site=self.site,
                bells=self.limiter.priorities.bells,
                gates=self.limiter.gates,
                usage=driver.usage,
                events=self.events,
                kube=lambda: self.kube,
            )
            for driver in drivers
            if driver.vendor == nvidia.NAME
        )
        self.overcommit = OvercommitWatch(
            site=self.site,
            bells=self.limiter.priorities.bells,
            gates=self.limiter.quanta,
            look=lambda: self.usage.metrics.look,
            events=self.events,
        )
        self.bursts = BurstKeeper(
            site=self.site,
            bells=self.limiter.priorities.bells,
            look=lambda: self.usage.metrics.look,
            report=self._report_devices,
            events=self.events,
        )
        self.kube_ready = anyio.Event()
        self.bus_ready = anyio.Event()

    async def _review_nvidia(self, inventory: Inventory) -> Inventory:
        """Give NVIDIA's devices their modes of sharing, and mark those with memory limits."""
        reviewed = await self.sharing.review(inventory)
        wall = self.walls.get(nvidia.NAME)
        return reviewed if wall is None else await wall.review(reviewed)

    def _review_of(self, vendor: str) -> Callable[[Inventory], Awaitable[Inventory]] | None:
        """Return what changes the driver's inventories to what this node can serve."""
        reviews = {ascend.NAME: self.vnpu_core.review, nvidia.NAME: self._review_nvidia}
        return reviews.get(vendor)

    def _discover_nvidia(self) -> None:
        for source in self.sources:
            if source.vendor == nvidia.NAME:
                source.look_again()

    def _report_devices(self) -> None:
        for source in self.sources:
            source.note_change()

    async def tidy(self) -> None:
        """Remove files of pods and claims without grants."""
        book = self.site.picture.grants
        await anyio.to_thread.run_sync(self.vnpu_core.tidy, lambda uid: bool(book.of_pod(uid)))
        priorities = self.limiter.priorities
        await anyio.to_thread.run_sync(priorities.tidy, lambda uid: bool(book.of_pod(uid)))
        await self.partition_answers.tidy()
        if self.preparer is not None:
            await self.preparer.tidy(self.kubelet)

    def events(self) -> EventRecorder | None:
        """Return the recorder of Kubernetes events; ``None`` before the API server was reached."""
        return self.recorder


async def serve_agent(
    context: ServiceContext[Settings],
    *,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until ``context.stopping``; reports its HTTP port as started once it is ready."""
    settings = context.settings
    _check(settings)
    sockets = settings.plugin_socket_dir
    turn = Turn(
        Path(settings.state_dir),
        plugins=Path(settings.device_plugin_dir),
        agent_sockets=make_socket_directory(sockets) if sockets else None,
    )
    async with background() as group:
        app = HttpApp(
            context.settings_file.routes(),
            registry=context.registry,
            ready=lambda: context.ready.is_set or turn.is_awaited,
        )
        port = await group.start(serve, app, settings.http_host, settings.http_port)
        try:
            if await turn.take(context.stopping):
                await _serve_node(context, port, task_status)
        finally:
            turn.end()


def _check(settings: Settings) -> None:
    """Refuse settings that no driver could use, before the agent in service is asked to stop."""
    nvidia_settings = settings.drivers.nvidia
    check_setting(nvidia_settings.mig_mode, field="drivers.nvidia.mig_mode")
    check_setting(nvidia_settings.sharing, field="drivers.nvidia.sharing")
    check_allowed(nvidia_settings.mig_allowed_profiles, field="drivers.nvidia.mig_allowed_profiles")


async def _serve_node(
    context: ServiceContext[Settings], port: int, task_status: TaskStatus[int]
) -> None:
    parts = _Parts(context)
    context.settings_file.use = parts.site.use
    try:
        async with background() as group:
            keep = parts.site.supervisor.keep
            group.start_soon(keep, "retries", parts.site.quarantine.retry)
            for source in parts.sources:
                await group.start(_start_kept, parts.site, "discovery", source.discover)
                group.start_soon(keep, "probes", source.probe)
                group.start_soon(keep, "faults", source.wait_faults)
            group.start_soon(keep, "device events", parts.watch.run)
            group.start_soon(keep, "partitions", parts.partitions.run)
            for keeper in parts.modes:
                group.start_soon(keep, "modes", keeper.run)
            group.start_soon(keep, "sharing", parts.sharing.run)
            group.start_soon(keep, "partition changes", parts.partition_teller.run)
            await parts.limiter.current()
            async with background() as plugins:
                _serve_kubelet(plugins, parts)
                group.start_soon(_with_kube, parts)
                group.start_soon(_with_bus, parts)
                group.start_soon(_become_ready, group, parts, port, task_status)
                await context.stopping.wait()
                await leave(parts.site)
    finally:
        with finish_within(_CLOSE_S):
            await parts.kubelet.aclose()
            for source in parts.sources:
                await parts.site.quarantine.once("driver", source.aclose)


def _serve_kubelet(group: TaskGroup, parts: _Parts) -> None:
    settings = parts.site.settings
    watch = DirectoryWatch(
        (settings.device_plugin_dir,),
        clock=parts.site.clock,
        poll_s=settings.kubelet_poll_s,
    )
    group.start_soon(parts.site.supervisor.keep, "plugin directory", watch.run)
    if settings.pod_resources_view:
        view = PodsView(
            site=parts.site,
            kubelet=parts.kubelet,
            resources=parts.vendor_by_resource,
            socket=Path(settings.pod_resources_view),
        )
        keep = partial(parts.site.supervisor.keep, expected=(Unavailable,))
        group.start_soon(keep, "PodResources view", view.run)
    if settings.dra.enabled and parts.preparer is not None:
        dra_plugin = DraPlugin(site=parts.site, preparer=parts.preparer)
        keep = partial(parts.site.supervisor.keep, expected=(Unavailable,))
        group.start_soon(keep, "DRA plugin", dra_plugin.run)
    count_by_vendor: dict[str, int] = {}
    for resource, vendor in parts.vendor_by_resource.items():
        number = count_by_vendor[vendor] = count_by_vendor.get(vendor, 0) + 1
        plugin = DevicePlugin(
            site=parts.site,
            vendor=vendor,
            name=(vendor or "neutral") if number == 1 else f"{vendor}-{number}",
            resource=resource,
            allocator=parts.allocator,
            tracing=parts.context.tracing,
        )
        keeper = PluginKeeper(
            site=parts.site, plugin=plugin, pod_resources=parts.kubelet, directory=watch
        )
        group.start_soon(
            parts.site.supervisor.keep, "plugin", keeper.run, name=f"plugin {resource}"
        )


async def _start_kept(
    site: Site, name: str, loop: _Startable, *, task_status: TaskStatus[None]
) -> None:
    """Keep a loop running; reports as started once the loop does so for the first time."""
    status = StartedOnce(task_status)
    await site.supervisor.keep(name, lambda: loop(task_status=status), expected=(Unavailable,))


async def _become_ready(
    group: TaskGroup, parts: _Parts, port: int, task_status: TaskStatus[int]
) -> None:
    await parts.kube_ready.wait()
    await parts.bus_ready.wait()
    keep = parts.site.supervisor.keep
    group.start_soon(keep, "usage", parts.usage.run)
    usage_events = UsageTeller(
        site=parts.site,
        look=lambda: parts.usage.metrics.look,
        recalls=lambda: [use for watch in parts.recall for use in watch.uses()],
        publisher=lambda: parts.publisher,
    )
    group.start_soon(keep, "usage events", usage_events.run)
    group.start_soon(keep, "overcommit", parts.overcommit.run)
    group.start_soon(keep, "bursts", parts.bursts.run)
    if parts.limiter.is_wanted:
        group.start_soon(keep, "priorities", parts.limiter.priorities.run)
        for watch in parts.recall:
            group.start_soon(keep, "recall", watch.run)
    if parts.publisher is not None:
        reporter = QuarantineReporter(
            parts.site.quarantine,
            publisher=parts.publisher,
            clock=parts.site.clock,
            service="nodeagent",
            replica=parts.site.node,
            ids=lambda: secrets.token_hex(16),
            events=parts.recorder,
        )
        group.start_soon(keep, "quarantine reports", reporter.work)
    parts.context.ready.set()
    settle()
    _log.info("ready", extra={"node": parts.site.node, "port": port})
    task_status.started(port)


async def _with_kube(parts: _Parts) -> None:
    """Follow the pods and check grants against kubelet after the API server was reached."""
    settings = parts.site.settings
    while True:
        try:
            async with kubeio.connect(
                settings.kubeconfig,
                user_agent="hami-nodeagent",
                request_timeout_s=settings.api_timeout_s,
                start_timeout_s=settings.start_timeout_s,
            ) as kube:
                await _follow_pods(parts, kube)
        except Unavailable as error:
            if not parts.has_past:
                raise
            _log.warning("API server not reached", extra={"problem": str(error)})


async def _follow_pods(parts: _Parts, kube: KubeApi) -> None:
    site = parts.site
    parts.kube = kube
    parts.recorder = EventRecorder(
        kube, component="hami-nodeagent", clock=site.clock, instance=site.node
    )
    advertiser = Advertiser(
        site=site,
        kube=kube,
        vendors=[parts.catalog.vendor(source.vendor) for source in parts.sources],
        events=parts.events,
    )
    pods = PodSource(
        site=site,
        kube=kube,
        keys=parts.keys,
        resources=parts.vendor_by_resource,
        kubelet=parts.kubelet,
        amounts=advertiser.resources,
    )
    check = SelfCheck(
        site=site,
        kubelet=parts.kubelet,
        pods=pods,
        keys=parts.keys,
        keeper=parts.keeper,
        limiter=parts.limiter,
        vendor_by_resource=parts.vendor_by_resource,
        tidy=parts.tidy,
    )
    async with anyio.create_task_group() as group:
        await group.start(_start_kept, site, "pods", pods.follow)
        parts.allocator.pods = pods
        group.start_soon(site.supervisor.keep, "check", check.run)
        status = StatusWatch(site=site, kube=kube, vendor_by_resource=parts.vendor_by_resource)
        group.start_soon(site.supervisor.keep, "node status", status.run)
        group.start_soon(site.supervisor.keep, "amounts", advertiser.run)
        relimiter = Relimiter(site=site, keeper=parts.keeper)
        group.start_soon(site.supervisor.keep, "limits", relimiter.run)
        for wall in parts.walls.values():
            group.start_soon(site.supervisor.keep, "memory limits", wall.run)
        if site.settings.dra.enabled:
            group.start_soon(
                site.supervisor.keep, "ResourceSlices", SliceKeeper(site=site, kube=kube).run
            )
        else:
            group.start_soon(withdraw, site, kube)
        parts.kube_ready.set()


async def _with_bus(parts: _Parts) -> None:
    """Report devices and states and follow the ledger after the bus was reached."""
    settings = parts.site.settings
    while True:
        try:
            async with connect(
                settings.nats_urls,
                name=f"hami-nodeagent-{settings.node_name}",
                login=NatsLogin.of(settings, inbox=grants.inbox("agent", settings.node_name)),
                ca_file=settings.nats_ca_file,
                start_timeout_s=settings.start_timeout_s,
                request_timeout_s=settings.bus_timeout_s,
            ) as bus:
                await _use_bus(parts, bus)
        except Unavailable as error:
            if not parts.has_past:
                raise
            _log.warning("bus not reached", extra={"problem": str(error)})


async def _use_bus(parts: _Parts, bus: Bus) -> None:
    site = parts.site
    publisher = parts.publisher = NatsPublisher(bus)
    # A token login is limited to this node and cannot read records of other nodes.
    is_confined = bool(site.settings.nats_token_file)

    def bucket(name: str) -> NatsBucket:
        return OwnBucket(bus, name, site.node) if is_confined else NatsBucket(bus, name)

    ledger = bucket(subjects.ALLOC_BUCKET)
    feed = LedgerFeed(
        site=site,
        feed=RepublishedFeed(bus, site.node, bucket=ledger),
        bucket=ledger,
        publisher=publisher,
    )
    parts.allocator.records = feed
    states = States(
        site=site,
        bucket=bucket(subjects.STATE_BUCKET),
        generation=lambda: bus.generation,
        events=parts.events,
        holding=lambda vendor: parts.catalog.vendor(vendor).capability.memory_enforced,
    )
    devices = bucket(subjects.DEVICES_BUCKET)
    async with anyio.create_task_group() as group:
        keep = site.supervisor.keep
        group.start_soon(keep, "connection", partial(_mirror_connection, site, bus))
        vendors = tuple(source.vendor for source in parts.sources)
        beating = partial(beat, site=site, publisher=publisher, vendors=vendors)
        group.start_soon(keep, "heartbeats", beating)
        for source in parts.sources:  # vendors of this agent, whose loops are supervised each
            reporter = Reporter(
                site=site,
                source=source,
                publisher=publisher,
                devices=devices,
                generation=lambda: bus.generation,
                events=parts.events,
            )
            group.start_soon(keep, "canonical devices", reporter.follow_canonical)
            await group.start(_start_kept, site, "reports", reporter.tell)
        await group.start(_start_kept, site, "ledger", feed.follow)
        await group.start(_start_kept, site, "states", states.keep)
        answers = Answers(
            site=site,
            usage=parts.usage,
            recall=[one.request for one in parts.recall],
            holding=lambda vendor: parts.catalog.vendor(vendor).capability.memory_enforced,
            check=HostCheck(
                site=site, resources=parts.vendor_by_resource, more=[parts.watch.finding]
            ).check,
            version=version("hami-nodeagent"),
        )
        group.start_soon(keep, "questions", partial(answers.serve, bus))
        parts.allocator.states = states
        if parts.preparer is not None:
            parts.preparer.records, parts.preparer.states = feed, states
        parts.bus_ready.set()


async def _mirror_connection(site: Site, bus: Bus) -> None:
    """Mirror the state of the bus connection into the picture."""
    while True:
        changed = bus.changed
        if site.picture.view.bus_connected != bus.is_connected:
            site.picture.view.bus_connected = bus.is_connected
            site.metrics.bus_connected.set(bus.is_connected)
            site.picture.note_change()
        await changed.wait()


def _checkpoint(settings: Settings) -> Checkpoint:
    try:
        return Checkpoint(Path(settings.state_dir))
    except OSError as error:
        raise SettingsInvalid(
            field="state_dir",
            problem=f"{settings.state_dir}: {error.strerror or error}",
            fix="give a directory that the agent may write",
        ) from error


def _fallback(settings: Settings) -> PodsPage | None:
    if not settings.kubelet_pods_url:
        return None
    return PodsPage(
        settings.kubelet_pods_url,
        token_file=settings.kubelet_pods_token_file,
        ca_file=settings.kubelet_pods_ca_file,
    )


def _drivers(settings: Settings, catalog: Catalog) -> tuple[Driver, ...]:
    drivers = []
    if settings.drivers.nvidia.enabled:
        drivers.append(_nvidia_driver(settings.drivers.nvidia, settings.node_name))
    known = frozenset(vendor.name for vendor in catalog.vendors)
    return (*drivers, *chosen_drivers(settings.drivers, settings.node_name, known=known))


_NOT_OF_DRIVER = (
    "enabled",
    "mig_mode",
    "mig_allowed_profiles",
    "sharing",
    "mps_control",
    "mps_dir",
    "mps_check_s",
    "cgroup_root",
)
"""Settings of ``drivers.nvidia`` that the agent applies itself."""


def _nvidia_driver(settings: NvidiaSettings, node: str) -> Driver:
    shared = {
        "unified_memory_mib": settings.unified_memory_mib,
        "disable_health_checks": settings.disable_health_checks,
        "enable_health_checks": settings.enable_health_checks,
    }
    if settings.simulated_profile:
        return build_driver(
            "simulated",
            {
                **shared,
                "profile": settings.simulated_profile,
                "control": settings.simulated_control,
                "partitions": settings.simulated_partitions,
                "node": node,
            },
        )
    real = {
        name: value
        for name, value in asdict(settings).items()
        if name not in _NOT_OF_DRIVER and not name.startswith("simulated_")
    }
    return build_driver("nvidia", real)
