# SPDX-License-Identifier: Apache-2.0
"""Discovers one vendor's devices, watches their health, and reports to registry and scheduler.

Three loops ask the driver: discovery (including devices that appear later), probes, and faults that
devices report themselves. ``core.health`` judges the results; a changed verdict is published at
once as ``DeviceFault`` and repeated by the next ``NodeReport``, which is stored whenever the facts
differ from the last stored report and after each reconnect. A missing driver is a report with its
problem, not an error: the agent waits without open handles, so that the driver can be installed or
reloaded. Canonical devices are read from the registry's bucket by polling, because thousands of
agents cannot each have a consumer (design D23).

Times in seconds. The agent requests its restart in one case: the driver was replaced while its
library was loaded, and only a new process can load the new one.
"""

import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus
from msgspec.structs import replace

from hami_common.bounds import MEMORY_MIB_MOST, NAME_MOST, TEXT_MOST
from hami_common.bus import grants, subjects
from hami_common.errors import HamiError, NotFound, Unavailable, WireInvalid
from hami_common.events.codec import decode_on, encode, event_headers
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices, NodeReport
from hami_common.model.device import DeviceFacts, Link
from hami_common.ports import Bucket, Publisher
from hami_common.runtime.kubeio import EventRecorder, ObjectRef
from hami_common.runtime.tasks import Backoff
from hami_nodeagent.core.allowedprofiles import restrict
from hami_nodeagent.core.board import FaultsChanged
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.health import (
    DeviceListed,
    DriverGone,
    FaultSeen,
    HealthBook,
    HealthChanged,
    Stimulus,
)
from hami_nodeagent.core.partitions import faulty_text, foreign_text
from hami_nodeagent.drivers.errors import DriverError, DriverMismatch
from hami_nodeagent.drivers.protocol import Driver, Inventory
from hami_nodeagent.drivers.rules import within_bounds
from hami_nodeagent.settings import Settings
from hami_nodeagent.shell.site import Site

_FAULTS_LIMIT_S = 5.0
_UNJUDGED = "its health cannot be judged, see the agent's log"
_AWAIT_ANSWER_S = 0.25
_SETTLED_S = 1.0
"""Interval at which the bus and the partitions are checked for a reason to report again."""
REPORT_BYTES = grants.REPORT_MAX_BYTES - grants.HEADER_BYTES
"""Largest report; the rest is left to its headers."""
INSIST_RETRIES = 100
"""Pauses of ``report_retry_s`` after which facts are reported again while the registry's record is
of another run."""

_MEM_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB$", re.MULTILINE)
_KIB_PER_MIB = 1024
_log = logging.getLogger(__name__)


class VendorDevices:
    """One vendor's devices on this node with their health; works without the bus."""

    def __init__(
        self,
        *,
        site: Site,
        driver: Driver,
        on_mismatch: Callable[[], None],
        review: Callable[[Inventory], Awaitable[Inventory]] | None = None,
    ) -> None:
        """``review`` changes each inventory to what this node can serve."""
        self.vendor = driver.vendor
        self.devices: tuple[DeviceFacts, ...] = ()
        self.links: tuple[Link, ...] = ()
        self.driver_version = ""
        self.problem = "the driver was not asked yet"
        self.changes: list[HealthChanged] = []
        """Changed verdicts on devices that are not yet published, oldest first."""
        self.changes_of_parts: list[tuple[HealthChanged, Instance]] = []
        """The same of partitions."""
        self._faulty: dict[tuple[str, int], Instance] = {}
        """Partitions at fault, as they were when it happened: their places stay faulty."""
        self._driver = driver
        self._review = review
        self._picture = site.picture
        self._book = HealthBook(site.settings.health)
        self._settings = site.settings
        self._allowed = site.settings.drivers.nvidia.mig_allowed_profiles
        self._clock = site.clock
        self._metrics = site.metrics
        self._quarantine = site.quarantine
        self._is_listed = False
        """The last discovery listed the devices."""
        self._on_mismatch = on_mismatch
        self._was_up = False
        self._changed = anyio.Event()
        self._wanted = anyio.Event()

    def look_again(self) -> None:
        """Discover now, and let the reporter compare its facts with the last stored report."""
        self._wanted.set()
        self.note_change()

    @property
    def changed(self) -> anyio.Event:
        """Set at the next change of anything reported. Take it before reading."""
        return self._changed

    def facts(self) -> tuple[DeviceFacts, ...]:
        """All devices with the verdict on their health."""
        judged: list[DeviceFacts] = []
        for device in self.devices:
            is_judged = self._quarantine.call(
                "device",
                f"{self.vendor} {device.uuid}",
                partial(self._judge_one, device, judged),
            )
            if not is_judged:
                judged.append(replace(device, healthy=False, health_reason=_UNJUDGED))
        return tuple(judged)

    def _judge_one(self, device: DeviceFacts, judged: list[DeviceFacts]) -> None:
        judged.append(self._book.judge(device))

    async def discover(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Discover devices until cancelled; started after the first answer or failure."""
        while True:
            self._wanted = anyio.Event()
            is_done = await self._quarantine.run(
                "driver", f"{self.vendor} discovery", self._discover, is_retried=False
            )
            wait_s = self._settings.discovery_s
            if not is_done or not self._is_listed:
                wait_s = self._settings.discovery_retry_s
            task_status.started()
            task_status = anyio.TASK_STATUS_IGNORED
            with anyio.move_on_after(wait_s):
                await self._wanted.wait()

    async def _discover(self) -> None:
        self._is_listed = False
        try:
            inventory = await self._driver.discover()
            if self._review is not None:
                inventory = await self._review(inventory)
        except DriverError as error:
            self._take_failure(error)
        except Exception as error:
            self._take_failure(error)
            raise
        else:
            self._take(inventory)
            self._is_listed = True

    async def probe(self) -> None:
        """Probe the devices until cancelled."""
        while True:
            await self._clock.sleep(self._settings.probe_s)
            await self._ask("probe", self._driver.probe)

    async def wait_faults(self) -> None:
        """Record the faults that devices report, until cancelled."""
        while True:
            if not self._was_up:
                await self._clock.sleep(self._settings.discovery_retry_s)
                continue
            begun_s = self._clock.monotonic_s()
            await self._ask("wait for faults", self._wait_faults)
            if self._clock.monotonic_s() - begun_s < 0.01:  # noqa: PLR2004 - a loop that spins
                await self._clock.sleep(0.1)

    async def aclose(self) -> None:
        """Let go of the driver."""
        await self._driver.aclose()

    async def _wait_faults(self) -> tuple[Stimulus, ...]:
        return await self._driver.wait_faults(_FAULTS_LIMIT_S)

    async def _ask(self, doing: str, call: Callable[[], Awaitable[tuple[Stimulus, ...]]]) -> None:
        async def ask() -> None:
            try:
                stimuli = await call()
            except DriverError as error:
                _log.warning(
                    "driver does not answer",
                    extra={"vendor": self.vendor, "doing": doing, "problem": str(error)},
                )
                await self._clock.sleep(1.0)
            else:
                self._handle(stimuli)

        key = f"{self.vendor} {doing}"
        if not await self._quarantine.run("driver", key, ask, is_retried=False):
            await self._clock.sleep(1.0)

    def _take(self, inventory: Inventory) -> None:
        judged = [restrict(device, self._allowed) for device in inventory.devices]
        devices = tuple(device for device, _ in judged)
        problem = "; ".join((*inventory.problems, *(text for _, text in judged if text)))
        self._was_up = True
        self._metrics.driver_up.labels(vendor=self.vendor).set(1)
        if problem and problem != self.problem:
            _log.warning(
                "device discovery incomplete", extra={"vendor": self.vendor, "problem": problem}
            )
        before = (self.devices, self.links, self.driver_version, self.problem)
        self.devices, self.links = devices, inventory.links
        self.driver_version, self.problem = inventory.driver_version, problem
        self._handle(
            tuple(
                DeviceListed(
                    uuid=device.uuid, problem="" if device.healthy else device.health_reason
                )
                for device in inventory.devices
            )
        )
        if before != (self.devices, self.links, self.driver_version, self.problem):
            self.note_change()

    def _take_failure(self, error: Exception) -> None:
        self._metrics.driver_up.labels(vendor=self.vendor).set(0)
        text = str(error)
        if text != self.problem:
            _log.warning("driver missing", extra={"vendor": self.vendor, "problem": text})
            self.problem = text
            self.note_change()
        if self._was_up:
            self._handle((DriverGone(reason=text),))
            if isinstance(error, DriverMismatch) and error.is_loaded_here:
                self._on_mismatch()

    def _handle(self, stimuli: tuple[Stimulus, ...]) -> None:
        now_s = self._clock.monotonic_s()
        changes: list[HealthChanged] = []
        for one in stimuli:
            self._quarantine.call(
                "device",
                f"{self.vendor} {getattr(one, 'uuid', 'all')}",
                partial(self._handle_one, one, changes, now_s),
            )
        for change in changes:
            self._metrics.faults.labels(
                vendor=self.vendor, healthy=str(change.usable).lower()
            ).inc()
            _log.log(
                logging.INFO if change.usable else logging.WARNING,
                "device health changed",
                extra={
                    "vendor": self.vendor,
                    "device": change.uuid,
                    "part": change.part,
                    "usable": change.usable,
                    "reason": change.reason,
                    "story": self._book.story(change.uuid),
                },
            )
        facts = self.facts()
        for device in facts:
            self._metrics.device_healthy.labels(vendor=self.vendor, device=device.uuid).set(
                device.healthy
            )
        self._picture.set_health(
            self.vendor,
            faulty=frozenset(device.uuid for device in facts if not device.healthy),
            sound=frozenset(device.uuid for device in facts if device.healthy),
        )
        if changes:
            self.changes.extend(change for change in changes if change.part is None)
            self.note_change()

    def _handle_one(self, stimulus: Stimulus, changes: list[HealthChanged], now_s: float) -> None:
        for change in self._book.handle(self._located(stimulus), now_s):
            changes.append(change)
            self._note_part(change)

    def _located(self, stimulus: Stimulus) -> Stimulus:
        """The stimulus as it came; a fault of a partition that is not known is the device's."""
        if not isinstance(stimulus, FaultSeen) or stimulus.part is None or not stimulus.fatal:
            return stimulus
        key = (stimulus.uuid, stimulus.part)
        found = self._picture.partitions.numbered(*key)
        if found is None:
            return stimulus if key in self._faulty else replace(stimulus, part=None)
        self._faulty[key] = found
        return stimulus

    def _note_part(self, change: HealthChanged) -> None:
        """Let no new partition be made where one is at fault, until it is well again."""
        if change.part is None:
            return
        key = (change.uuid, change.part)
        self.changes_of_parts.append((change, self._faulty[key]))
        if change.usable:
            del self._faulty[key]
        own = tuple(one for (uuid, _), one in self._faulty.items() if uuid == change.uuid)
        self._picture.partitions.apply(FaultsChanged(uuid=change.uuid, faulty=own))
        self._metrics.partitions.labels(vendor=self.vendor, device=change.uuid, whose="faulty").set(
            len(own)
        )

    def note_change(self) -> None:
        """Let the reporter compare its facts with the last stored report now."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


class Reporter:
    """Reports one vendor's devices to the bus, and reads the registry's canonical devices."""

    def __init__(
        self,
        *,
        site: Site,
        source: VendorDevices,
        publisher: Publisher,
        devices: Bucket,
        generation: Callable[[], int],
        events: Callable[[], EventRecorder | None],
    ) -> None:
        """``generation`` grows with each connection to the bus."""
        self._source = source
        self._publisher = publisher
        self._bucket = devices
        self._generation = generation
        self._site = site
        self._picture = site.picture
        self._sequence = site.sequence
        self._events = events
        self._settings = site.settings
        self._host_memory_mib = min(host_memory_mib(site.settings), MEMORY_MIB_MOST)
        self._clock = site.clock
        self._metrics = site.metrics
        self._reported_seq = 0
        self._answered_seq = 0
        self.is_overruled = False
        """The registry's record was made from a report of another run, so not from ours."""

    async def tell(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Publish faults at once and reports on change; started after the first report."""
        backoff = Backoff(
            first_s=self._settings.report_retry_s, most_s=10 * self._settings.report_retry_s
        )
        stored: NodeReport | None = None
        stored_generation, stored_s = 0, 0.0
        while True:
            changed, picture_changed = self._source.changed, self._picture.changed
            await self._publish_faults()
            generation = self._generation()
            made: list[NodeReport] = []
            if not self._site.quarantine.call(
                "report", self._source.vendor, partial(self._make_report, made)
            ):
                await backoff.wait()
                continue
            report = made[0]
            insists_s = stored_s + INSIST_RETRIES * self._settings.report_retry_s
            insists = self.is_overruled and self._clock.monotonic_s() >= insists_s
            if report != stored or generation != stored_generation or insists:
                try:
                    await self._store(report)
                except HamiError as error:
                    level = logging.DEBUG if isinstance(error, Unavailable) else logging.ERROR
                    _log.log(level, "report not stored", extra={"problem": str(error)})
                    await backoff.wait()
                    continue
                backoff.reset()
                stored, stored_generation = report, generation
                stored_s = self._clock.monotonic_s()
                task_status.started()
                task_status = anyio.TASK_STATUS_IGNORED
            # The facts are those of the source and of the picture's partitions: the next report is
            # made after a change of one of them, or when the bus reconnected.
            while not changed.is_set():
                with anyio.move_on_after(_SETTLED_S):
                    await changed.wait()
                if (
                    picture_changed.is_set()
                    or generation != self._generation()
                    or self.is_overruled
                ):
                    break

    async def follow_canonical(self) -> None:
        """Read the registry's canonical devices until cancelled."""
        while True:
            try:
                await self._site.quarantine.run(
                    "canonical-devices",
                    self._source.vendor,
                    self._read_canonical,
                    passes=(Unavailable, NotFound),
                    is_retried=False,
                )
            except (Unavailable, NotFound) as error:
                _log.debug("canonical devices not read", extra={"problem": str(error)})
            awaited = self._answered_seq < self._reported_seq
            wait_s = self._settings.devices_poll_s
            await self._clock.sleep(min(wait_s, _AWAIT_ANSWER_S) if awaited else wait_s)

    def _report(self) -> NodeReport:
        """The present facts, without order and time, so that equal facts are equal.

        Room that partitions hold which were not made here, or are at fault, is not promised.
        """
        board = self._picture.partitions
        withheld = [
            f"device {device.uuid}: {text}"
            for device in self._source.devices
            for text in (
                foreign_text(board.foreign_by_uuid.get(device.uuid, ())),
                faulty_text(board.faulty_by_uuid.get(device.uuid, ())),
                board.mode_text(device.uuid),
            )
            if text
        ]
        # One device that the driver describes wrongly must not withhold the report of all others.
        facts, beyond = within_bounds(self._source.facts())
        return NodeReport(
            node=self._picture.node,
            vendor=self._source.vendor,
            boot_id=self._sequence.boot_id,
            seq=0,
            time_s=0.0,
            devices=tuple(
                replace(
                    board.withdraw(device),
                    foreign_mib=self._picture.foreign_mib(device.uuid),
                    bursts=self._picture.bursts(device.uuid),
                )
                for device in facts
            ),
            links=self._source.links,
            driver_version=self._source.driver_version[:NAME_MOST],
            agent_version=version("hami-nodeagent"),
            host_memory_mib=self._host_memory_mib,
            problem="; ".join(filter(None, (self._source.problem, *withheld, *beyond)))[:TEXT_MOST],
        )

    async def _store(self, report: NodeReport) -> None:
        from_now = replace(report, seq=self._sequence.next(), time_s=self._clock.now_s())
        data = encode(from_now)
        if len(data) > REPORT_BYTES:
            # Placement works without links, on a node with very many devices less well.
            problem = f"{len(data)} bytes are too large for a report: links left out"
            both = "; ".join(part for part in (report.problem, problem) if part)
            data = encode(replace(from_now, links=(), problem=both))
        await self._publisher.publish_stored(
            subjects.report(report.node, report.vendor),
            data,
            headers=self._headers("report.changed", from_now.time_s),
        )
        self._reported_seq = from_now.seq
        self._metrics.reports.labels(vendor=report.vendor).inc()
        _log.info(
            "devices reported",
            extra={
                "vendor": report.vendor,
                "devices": len(report.devices),
                "healthy": sum(device.healthy for device in report.devices),
                "problem": report.problem,
            },
        )

    def _make_report(self, made: list[NodeReport]) -> None:
        made.append(self._report())

    async def _publish_faults(self) -> None:
        while self._source.changes:
            change = self._source.changes.pop(0)
            # The next report repeats it, whether this message is delivered or not.
            await self._site.quarantine.once("fault", partial(self._publish_fault, change))
        while self._source.changes_of_parts:
            of_part = self._source.changes_of_parts.pop(0)
            await self._site.quarantine.once("fault", partial(self._tell_of_part, *of_part))

    async def _publish_fault(self, change: HealthChanged) -> None:
        fault = DeviceFault(
            node=self._picture.node,
            vendor=self._source.vendor,
            uuid=change.uuid,
            boot_id=self._sequence.boot_id,
            seq=self._sequence.next(),
            time_s=self._clock.now_s(),
            healthy=change.usable,
            reason=change.reason,
        )
        await self._publisher.publish(
            subjects.fault(self._picture.node),
            encode(fault),
            headers=self._headers("device.fault", fault.time_s),
        )
        uids = [grant.pod_uid for grant in self._picture.grants if change.uuid in grant.uuids]
        await self._tell_pods(change, uids, f"device {change.uuid}")

    async def _tell_of_part(self, change: HealthChanged, part: Instance) -> None:
        carried = self._picture.partitions.carried.items()
        uids = [
            owner.pod_uid
            for owner, one in carried
            if (one.uuid, one.instance_id) == (part.uuid, part.instance_id)
        ]
        await self._tell_pods(change, uids, f"partition {part.instance_id} of {part.uuid}")

    async def _tell_pods(self, change: HealthChanged, uids: Sequence[str], what: str) -> None:
        recorder = self._events()
        if recorder is None:
            return
        for uid in dict.fromkeys(uids):
            pod = self._picture.pods.find(uid)
            if pod is not None:
                await recorder.record(
                    ObjectRef(kind="Pod", namespace=pod.namespace, name=pod.name, uid=uid),
                    reason="DeviceRecovered" if change.usable else "DeviceUnhealthy",
                    message=f"{what}: {change.reason or 'may be used again'}",
                    kind="Normal" if change.usable else "Warning",
                )

    async def _read_canonical(self) -> None:
        key = subjects.devices_key(self._picture.node, self._source.vendor)
        entry = await self._bucket.get(key)
        if entry is None:
            return
        try:
            subject = subjects.kv_subject(subjects.DEVICES_BUCKET, key)
            canonical = decode_on(subject, entry.value, NodeDevices)
            _check_vendor(canonical, what=subject)
        except WireInvalid:
            self._metrics.undecodable.labels(what="canonical devices").inc()
            raise
        self.is_overruled = canonical.boot_id != self._sequence.boot_id
        if not self.is_overruled:
            self._answered_seq = max(self._answered_seq, canonical.seq)
        if self._picture.set_canonical(canonical):
            _log.info(
                "canonical devices changed",
                extra={
                    "vendor": self._source.vendor,
                    "devices": len(canonical.devices),
                    "config_generation": canonical.config_generation,
                },
            )
            await self._keep_canonical()

    async def _keep_canonical(self) -> None:
        checkpoint = self._site.checkpoint
        async with checkpoint.devices_turn:
            vendors = tuple(self._picture.canonical_by_vendor.values())
            try:
                await anyio.to_thread.run_sync(checkpoint.save_devices, vendors)
            except OSError as error:
                self._metrics.checkpoint_failures.inc()
                _log.warning("devices not kept on disk", extra={"problem": str(error)})

    def _headers(self, what: str, time_s: float) -> dict[str, str]:
        return event_headers(
            event_id=secrets.token_hex(16),
            event_type=f"io.hami.{what}.v1",
            source=f"/nodeagent/{self._picture.node}",
            time_s=time_s,
        )


def host_memory_mib(settings: Settings) -> int:
    """Return the node's memory, by the settings or the kernel; 0 if it is unknown."""
    if settings.host_memory_mib > 0:
        return settings.host_memory_mib
    try:
        text = (Path(settings.host_proc) / "meminfo").read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        _log.warning("memory of the node not read", extra={"problem": str(error)})
        return 0
    found = _MEM_TOTAL.search(text)
    return int(found[1]) // _KIB_PER_MIB if found else 0


def _check_vendor(canonical: NodeDevices, *, what: str) -> None:
    """Refuse a device of another vendor than the record's: its resources would not be known."""
    for device in canonical.devices:
        if device.vendor != canonical.vendor:
            raise WireInvalid(
                what=what,
                problem=f"device {device.uuid} is of vendor {device.vendor!r},"
                f" the record of {canonical.vendor!r}",
            )


async def beat(*, site: Site, publisher: Publisher, vendors: tuple[str, ...]) -> None:
    """Send heartbeats until cancelled, at once when kubelet accepts or loses a plugin.

    Also at once when the agent is asked to stop. Heartbeats are sent without devices, too: they
    show that the agent is alive.
    """
    while True:
        served = site.picture.offered()
        heartbeat = Heartbeat(
            node=site.node,
            boot_id=site.sequence.boot_id,
            seq=site.sequence.next(),
            time_s=site.clock.now_s(),
            vendors=tuple(vendor for vendor in vendors if vendor in served),
            unserved=tuple(vendor for vendor in vendors if vendor not in served),
            version=version("hami-nodeagent"),
        )
        try:
            await publisher.publish(subjects.heartbeat(site.node), encode(heartbeat))
            site.metrics.heartbeats.inc()
        except HamiError as error:
            _log.debug("heartbeat not sent", extra={"problem": str(error)})
        with anyio.move_on_after(site.settings.heartbeat_s):
            while site.picture.offered() == served:
                await site.picture.changed.wait()
