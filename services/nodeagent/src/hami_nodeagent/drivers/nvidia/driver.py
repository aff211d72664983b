# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver: runs NVML's blocking calls (``nvml``) and isolates faults of single cards.

Every call runs in the lane of its device, so a hung card costs one thread and one deadline. NVML
fixes its device list when it is opened: cards that appear later, and cards that return from a
reset, need a close and a new open. ``discover`` reopens NVML when the kernel's list of bound cards
has changed, when no card was listed, or when a card is lost (not more often than ``reopen_min_s``),
and only while no call hangs.

An error of waiting for events does not affect the state of any device: the event set is re-created.
Obeys design D22 and D25.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
from msgspec import Struct
from msgspec.structs import replace

from hami_common.model.device import DeviceFacts, Link
from hami_nodeagent.core.hardware import CardMode
from hami_nodeagent.core.health import (
    DeviceLost,
    DriverGone,
    ProbeFailed,
    ProbePassed,
    Stimulus,
)
from hami_nodeagent.drivers.errors import (
    DeviceGone,
    DeviceHung,
    DriverError,
    DriverMismatch,
    DriverMissing,
)
from hami_nodeagent.drivers.nvidia import gpm, mig, nvml
from hami_nodeagent.drivers.nvidia.lane import Lane
from hami_nodeagent.drivers.nvidia.partitioner import MigPartitioner
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.protocol import DeviceUsage, Inventory
from hami_nodeagent.drivers.rules import Neighbour, fault_policy, links_of

_PAUSE_S = 1.0
"""Pause in seconds after a failed wait, so that a broken driver is not polled in a tight loop."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


class NvidiaDriverSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings to reach NVML and to classify its errors and faults."""

    library_path: str = ""
    """File to load as libnvidia-ml.so.1, or root of the file system in which a driver container has
    it; empty lets the dynamic linker find it."""
    sysfs_root: str = "/sys"
    """Directory of sysfs, for NUMA nodes and the list of bound cards."""
    proc_root: str = "/proc"
    """Directory of procfs, for the device nodes of MIG instances."""
    call_deadline_s: float = 5.0
    """Longest time one call may take before its device counts as hung."""
    partition_deadline_s: float = 60.0
    """The same for the reading, making and removing of MIG instances."""
    reopen_min_s: float = 60.0
    """Shortest time between two new opens of NVML for the sake of a lost card: each one closes the
    event set for a moment."""
    unified_memory_mib: int = 0
    """Memory to count for devices that share the host's (NVML reports none); 0 leaves them out."""
    disable_health_checks: str = ""
    """Xids that never condemn a device, ``xids`` for all, ``all`` for probes as well
    (DP_DISABLE_HEALTHCHECKS)."""
    enable_health_checks: str = ""
    """Xids that always condemn, ``all`` for every one (DP_ENABLE_HEALTHCHECKS)."""


@dataclass(slots=True, kw_only=True)
class _Card:
    """One device that has been listed at least once."""

    facts: DeviceFacts
    lane: Lane
    handle: nvml.Handle | None
    """``None`` while the card is lost or NVML is closed."""
    last_sample_us: int = 0
    """Newest process sample that was read."""
    samples: mig.Samples = field(default_factory=mig.Samples)
    """Of the load of its MIG instances; used in the card's lane only."""
    traffic: gpm.Series = field(default_factory=gpm.Series)
    """The same of the card, while it is not divided."""

    def open_handle(self) -> nvml.Handle:
        """Return the handle; call inside the lane, because a reopen waits for all lanes."""
        if self.handle is None:
            raise DeviceGone(doing=self.lane.name, detail="the device is not open")
        return self.handle


def _read_uses(card: _Card, since_us: int) -> tuple[DeviceUsage, int]:
    handle = card.open_handle()
    usage, newest_us = nvml.read_usage(card.facts.uuid, handle, since_us)
    if card.facts.mode != mig.MODE:
        usage = gpm.with_traffic(usage, handle.raw, card.traffic)
    else:
        card.traffic.close()
        try:
            usage = replace(usage, instances=mig.read_uses(handle.raw, card.samples))
        except DriverError as error:  # the other values of the card stay valid
            extra = {"uuid": card.facts.uuid, "error": str(error)}
            _log.warning("use of MIG instances cannot be read", extra=extra)
    return usage, newest_us


def _read_mode(uuid: str, handle: nvml.Handle) -> CardMode | None:
    return mig.read_mode(handle.raw, uuid)


def _read_facts(
    index: int, sysfs_root: str, unified_memory_mib: int
) -> tuple[nvml.Handle, DeviceFacts]:
    handle, facts = nvml.read_facts(index, sysfs_root, unified_memory_mib)
    return handle, mig.with_sizes(handle.raw, facts)


class NvidiaDriver:
    """Driver protocol over NVML."""

    def __init__(self, settings: NvidiaDriverSettings | None = None) -> None:
        """Store the settings; the first call that needs NVML opens it."""
        self._settings = settings or NvidiaDriverSettings()
        self._policy = fault_policy(
            nvml.VENDOR,
            disable=self._settings.disable_health_checks,
            enable=self._settings.enable_health_checks,
        )
        self._library = Lane("NVML", self._settings.call_deadline_s)
        self._event_lane = Lane("NVML events", self._settings.call_deadline_s)
        self._lane_by_index: dict[int, Lane] = {}
        self._card_by_uuid: dict[str, _Card] = {}
        self._events = nvml.Events()
        self._opening = anyio.Lock()
        self._discovering = anyio.Lock()
        self._is_open = False
        self._bound_at_open: frozenset[str] | None = None
        self._opened_at_s = 0.0
        self._partitioner = MigPartitioner(self, self._settings.proc_root)

    @property
    def vendor(self) -> str:
        """The word ``nvidia``."""
        return nvml.VENDOR

    @property
    def partitioner(self) -> Partitioner | None:
        """MIG, on those cards that are in MIG mode."""
        return self._partitioner

    @property
    def is_stuck(self) -> bool:
        """A call hangs inside NVML."""
        return any(lane.is_stuck for lane in self._lanes())

    # ---- the Driver protocol --------------------------------------------------------------------

    async def discover(self) -> Inventory:
        """List all cards; raises the errors that the protocol lists."""
        async with self._discovering:
            await self._open()
            try:
                return await self._discover()
            except (DriverMissing, DriverMismatch):
                await self._forget_library()
                raise

    async def probe(self) -> tuple[Stimulus, ...]:
        """Read identity, memory and lasting defects of each card."""
        if not self._policy.probes or not self._card_by_uuid:
            return ()
        try:
            await self._open()
        except DriverError as error:
            return (DriverGone(reason=str(error)),)
        results: dict[str, Stimulus] = {}
        async with anyio.create_task_group() as probers:
            for card in list(self._card_by_uuid.values()):
                probers.start_soon(self._probe_card, card, results)
        for result in results.values():
            if isinstance(result, DriverGone):
                await self._forget_library()
                return (result,)
        return tuple(results[uuid] for uuid in sorted(results))

    async def wait_faults(self, limit_s: float) -> tuple[Stimulus, ...]:
        """Wait for Xid and memory error events on all cards that were listed by now."""
        try:
            await self._open()
            return await self._wait_events(limit_s)
        except DeviceGone as error:
            # NVML does not report which card it is; probes do.
            _log.warning("a watched device is lost", extra={"error": str(error)})
            await anyio.sleep(min(limit_s, _PAUSE_S))
            return tuple(s for s in await self.probe() if not isinstance(s, ProbePassed))
        except (DriverMissing, DriverMismatch) as error:
            await self._forget_library()
            await anyio.sleep(min(limit_s, _PAUSE_S))
            return (DriverGone(reason=str(error)),)
        except DriverError as error:
            _log.warning("waiting for device events failed", extra={"error": str(error)})
            await anyio.sleep(min(limit_s, _PAUSE_S))
            return ()

    async def usage(self) -> tuple[DeviceUsage, ...]:
        """Memory, load and processes of each card that answers."""
        await self._open()
        results: dict[str, DeviceUsage] = {}
        async with anyio.create_task_group() as readers:
            for card in list(self._card_by_uuid.values()):
                readers.start_soon(self._read_usage, card, results)
        cards = sorted(self._card_by_uuid.values(), key=lambda card: card.facts.index)
        return tuple(results[c.facts.uuid] for c in cards if c.facts.uuid in results)

    async def aclose(self) -> None:
        """Close NVML unless a call hangs in it."""
        async with self._opening:
            if not self._is_open:
                return
            try:
                async with self._lanes_held("close NVML"):
                    await self._close_locked()
            except DriverError as error:
                _log.warning("NVML could not be closed", extra={"error": str(error)})

    # ---- calls of the partitioner ---------------------------------------------------------------

    async def listed(self) -> tuple[DeviceFacts, ...]:
        """All cards that were ever listed, in order of index."""
        if not self._card_by_uuid:
            await self.discover()
        cards = sorted(self._card_by_uuid.values(), key=lambda card: card.facts.index)
        return tuple(card.facts for card in cards)

    async def ask_card(self, uuid: str, doing: str, fn: Callable[[nvml.Handle], T]) -> T:
        """Run ``fn`` in the card's lane, with the deadline of partitions."""
        await self._open()
        card = self._card_by_uuid.get(uuid)
        if card is None:
            raise DeviceGone(doing=doing, detail=f"the driver never listed {uuid}")
        return await card.lane.call(
            doing,
            lambda: fn(card.open_handle()),
            deadline_s=self._settings.partition_deadline_s,
        )

    async def cap_memory(self, uuid: str, group: Path, limit_mib: int | None) -> None:
        """Set the driver's limit of a cgroup (615 and later), and read it back."""
        await self._open()
        doing, card = "limit memory", self._card_by_uuid.get(uuid)
        if card is None:
            raise DeviceGone(doing=doing, detail=f"the driver never listed {uuid}")
        await card.lane.call(
            doing, lambda: nvml.cap_memory(card.open_handle(), str(group), limit_mib)
        )

    async def modes(self) -> tuple[CardMode, ...]:
        """Return the MIG mode of each card that supports MIG."""
        found = []
        for facts in await self.listed():
            try:
                mode = await self.ask_card(
                    facts.uuid, "read the MIG mode", partial(_read_mode, facts.uuid)
                )
            except DeviceGone:
                continue
            if mode is not None:
                found.append(mode)
        return tuple(found)

    async def switch_mode(self, uuid: str, *, is_divided: bool) -> None:
        """Enable or disable MIG mode; afterwards, re-register the events of all cards.

        Meanwhile no other call for the card runs, and no event set of the agent keeps it open.
        """
        await self._open()
        card = self._card_by_uuid.get(uuid)
        if card is None:
            raise DeviceGone(doing="switch the MIG mode", detail=f"the driver never listed {uuid}")

        def switch() -> None:
            nvml.free_events(self._events)
            card.samples.keep_only(frozenset())
            card.traffic.close()
            try:
                mig.switch_mode(card.open_handle().raw, uuid, is_divided=is_divided)
            finally:
                card.handle = None  # the old handle is void; the next probe reopens the card
                with suppress(DriverError):
                    card.handle = nvml.Handle(nvml.find(uuid))

        async with self._discovering, self._event_lane.hold("switch the MIG mode"):
            await card.lane.call(
                "switch the MIG mode", switch, deadline_s=self._settings.partition_deadline_s
            )

    # ---- opening and closing --------------------------------------------------------------------

    def _lanes(self) -> list[Lane]:
        """Return all lanes, in the order in which they may be acquired together."""
        indices = sorted(self._lane_by_index)
        return [self._library, self._event_lane, *(self._lane_by_index[i] for i in indices)]

    async def _open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._open_locked()

    async def _reopen(self) -> None:
        """Make NVML read a new device list; keep the old one while a call hangs.

        No call may run between closing and opening: it would report an absent driver.
        """
        async with self._opening:
            self._opened_at_s = anyio.current_time()
            try:
                async with self._lanes_held("reopen NVML"):
                    await self._close_locked()
                    await self._open_locked()
            except DeviceHung as error:
                _log.warning("NVML cannot be reopened", extra={"error": str(error)})

    async def _forget_library(self) -> None:
        """Drop all handles after the driver was unloaded, even if closing fails."""
        await self.aclose()
        self._drop_handles()

    @asynccontextmanager
    async def _lanes_held(self, doing: str) -> AsyncIterator[None]:
        async with AsyncExitStack() as held:
            for lane in self._lanes():
                if lane is not self._library:
                    await held.enter_async_context(lane.hold(doing))
            yield

    async def _open_locked(self) -> None:
        """Caller holds ``_opening``."""
        path = self._settings.library_path
        await self._library.call("open", lambda: nvml.open_library(path))
        self._is_open = True
        self._opened_at_s = anyio.current_time()
        self._bound_at_open = await self._bound_addresses()

    async def _close_locked(self) -> None:
        """Caller holds ``_opening`` and all lanes but the library's."""
        events, cards = self._events, list(self._card_by_uuid.values())

        def close() -> None:
            for card in cards:
                card.samples.keep_only(frozenset())
                card.traffic.close()
            nvml.close_library(events)

        await self._library.call("close", close)
        self._drop_handles()

    def _drop_handles(self) -> None:
        self._is_open = False
        self._events = nvml.Events()
        for card in self._card_by_uuid.values():
            card.handle = None
            card.samples, card.traffic = mig.Samples(), gpm.Series()  # NVML has freed its own

    async def _bound_addresses(self) -> frozenset[str] | None:
        root = self._settings.sysfs_root
        return await self._library.call("list cards", lambda: nvml.bound_addresses(root))

    async def _wants_reopen(self, count: int) -> bool:
        if count == 0 or await self._bound_addresses() != self._bound_at_open:
            return True
        any_lost = any(card.handle is None for card in self._card_by_uuid.values())
        return any_lost and (
            anyio.current_time() - self._opened_at_s >= self._settings.reopen_min_s
        )

    # ---- discovery ------------------------------------------------------------------------------

    async def _discover(self) -> Inventory:
        count = await self._library.call("count devices", nvml.count_devices)
        if await self._wants_reopen(count):
            await self._reopen()
            count = await self._library.call("count devices", nvml.count_devices)
        version = await self._library.call("read the version", nvml.driver_version)
        found: dict[str, _Card] = {}
        failures: dict[int, DriverError] = {}
        async with anyio.create_task_group() as readers:
            for index in range(count):
                readers.start_soon(self._read_card, index, found, failures)
        for error in failures.values():
            if isinstance(error, DriverMissing | DriverMismatch):
                raise error
        absent = self._absent_cards(found, failures)
        self._card_by_uuid |= found
        links, contradictions = await self._read_links(found)
        facts = [card.facts for card in found.values()]
        return Inventory(
            devices=tuple(sorted(facts + absent, key=lambda device: device.index)),
            links=links,
            driver_version=version,
            problems=(
                *(f"device {index}: {failures[index]}" for index in sorted(failures)),
                *contradictions,
            ),
        )

    async def _read_card(
        self, index: int, found: dict[str, _Card], failures: dict[int, DriverError]
    ) -> None:
        lane = self._lane_by_index.setdefault(
            index, Lane(f"device {index}", self._settings.call_deadline_s)
        )
        root, unified_mib = self._settings.sysfs_root, self._settings.unified_memory_mib
        try:
            handle, facts = await lane.call(
                "read facts", lambda: _read_facts(index, root, unified_mib)
            )
        except DriverError as error:
            failures[index] = error
            return
        known = self._card_by_uuid.get(facts.uuid)
        found[facts.uuid] = _Card(
            facts=facts,
            lane=lane,
            handle=handle,
            last_sample_us=0 if known is None else known.last_sample_us,
            samples=mig.Samples() if known is None else known.samples,
            traffic=gpm.Series() if known is None else known.traffic,
        )

    def _absent_cards(
        self, found: dict[str, _Card], failures: dict[int, DriverError]
    ) -> list[DeviceFacts]:
        """Cards listed before but not in this round: still reported, not healthy."""
        absent = []
        for uuid, card in self._card_by_uuid.items():
            if uuid in found:
                continue
            card.handle = None
            error = failures.get(card.facts.index)
            reason = str(error) if error else "the driver does not list the device any more"
            absent.append(replace(card.facts, healthy=False, health_reason=reason))
        return absent

    async def _read_links(
        self, found: dict[str, _Card]
    ) -> tuple[tuple[Link, ...], tuple[str, ...]]:
        views: dict[str, nvml.LinkView] = {}
        async with anyio.create_task_group() as readers:
            for uuid in found:
                readers.start_soon(self._read_view, uuid, found, views)
        views_by_pair = {}
        for a, view in views.items():
            for b, level in view.level_by_uuid.items():
                direct = view.direct_by_bus_id.get(found[b].facts.bus_id, 0)
                switched = min(view.switch_links, views[b].switch_links) if b in views else 0
                views_by_pair[a, b] = Neighbour(level=level, fabric_links=direct or switched)
        return links_of(tuple(card.facts for card in found.values()), views_by_pair)

    async def _read_view(
        self, uuid: str, found: dict[str, _Card], views: dict[str, nvml.LinkView]
    ) -> None:
        others = [card for other, card in found.items() if other != uuid]
        if not others:
            return

        def read() -> nvml.LinkView:
            peers = {c.facts.uuid: c.handle for c in others if c.handle is not None}
            return nvml.read_links(found[uuid].open_handle(), peers)

        try:
            views[uuid] = await found[uuid].lane.call("read links", read)
        except DriverError as error:
            extra = {"uuid": uuid, "error": str(error)}
            _log.warning("links of a device cannot be read", extra=extra)

    # ---- one card -------------------------------------------------------------------------------

    async def _probe_card(self, card: _Card, results: dict[str, Stimulus]) -> None:
        uuid = card.facts.uuid
        try:
            handle = await card.lane.call("probe", lambda: nvml.probe(uuid, card.handle))
        except (DriverMissing, DriverMismatch) as error:
            results[uuid] = DriverGone(reason=str(error))
        except DeviceGone as error:
            card.handle = None
            results[uuid] = DeviceLost(uuid=uuid, reason=str(error))
        except DeviceHung as error:
            results[uuid] = DeviceLost(uuid=uuid, reason=str(error))
        except DriverError as error:
            results[uuid] = ProbeFailed(uuid=uuid, reason=str(error))
        else:
            card.handle = handle
            results[uuid] = ProbePassed(uuid=uuid)

    async def _read_usage(self, card: _Card, results: dict[str, DeviceUsage]) -> None:
        uuid, since_us = card.facts.uuid, card.last_sample_us
        try:
            usage, newest_us = await card.lane.call(
                "read usage", lambda: _read_uses(card, since_us)
            )
        except DriverError as error:
            extra = {"uuid": uuid, "error": str(error)}
            _log.warning("usage of a device cannot be read", extra=extra)
            return
        card.last_sample_us = newest_us
        results[uuid] = usage

    async def _wait_events(self, limit_s: float) -> tuple[Stimulus, ...]:
        if not self._handles():
            await anyio.sleep(limit_s)
            return ()
        return await self._event_lane.call(
            "wait for events",
            lambda: nvml.wait_events(self._events, self._handles(), limit_s, self._policy),
            deadline_s=limit_s + self._settings.call_deadline_s,
        )

    def _handles(self) -> dict[str, nvml.Handle]:
        """Return handles by UUID; call inside a lane, because a reopen waits for all lanes."""
        cards = list(self._card_by_uuid.values())
        return {card.facts.uuid: card.handle for card in cards if card.handle is not None}
