# SPDX-License-Identifier: Apache-2.0
"""Wakes device discovery when the kernel reports that a device appeared or disappeared.

Two event sources, neither of which needs a library of the vendor:

    uevents       netlink socket of the kernel (``NETLINK_KOBJECT_UEVENT``): drivers, PCI functions,
                  device nodes. The kernel sends them to every network namespace that the host's
                  user namespace owns, so a pod needs neither the host's network nor a capability.
    directories   inotify on directories of device nodes, for drivers that create nodes without a
                  uevent, and on the control files of simulated hardware.

An event only wakes discovery, which reads the hardware. Bursts are coalesced: discovery runs
``SETTLE_S`` after the first event and again ``AGAIN_S`` later, because a driver may need a
moment to serve a device that the bus has announced. Where a source is unavailable, the agent logs
it once, exports it and relies on ``discovery_s``. Times in seconds.
"""

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import anyio

from hami_common.events.asking import Finding
from hami_nodeagent.settings import Settings
from hami_nodeagent.shell import inotify
from hami_nodeagent.shell.metrics import Metrics
from hami_nodeagent.shell.site import Site

Source = Literal["uevents", "directories"]

SETTLE_S = 0.25
"""Time for which events are collected before discovery runs."""
AGAIN_S = 1.0
"""Time until discovery runs again. However many events arrive, discovery is started at most
twice in ``SETTLE_S + AGAIN_S``."""

_UEVENT_PROTOCOL = 15
_KERNEL_GROUP = 1
_ACTIONS = frozenset({b"add", b"remove", b"bind", b"unbind"})
_QUIET_SUBSYSTEMS = frozenset(
    b"bdi block bluetooth cgroup cpu event_source graphics hid input leds machinecheck memory mmc"
    b" mtd net power_supply queues regulator rtc scsi slab sound thermal tty usb vc virtio"
    b" workqueue".split()
)
"""Subsystems without accelerators, many of which change with every container."""
_QUIET_NODES = (b".", b"bsg", b"dm-", b"loop", b"md", b"nbd", b"nvme", b"rbd", b"sd", b"tty", b"vc")
"""Beginnings of names in ``/dev`` that are not accelerators: volumes and terminals."""
_OWN_USER_NAMESPACE = ["0", "0", "4294967295"]
_MESSAGE_BYTES = 1 << 16

_log = logging.getLogger(__name__)


def concerns_devices(message: bytes) -> bool:
    """Return whether a uevent of the kernel may concern an accelerator."""
    header, *fields = message.split(b"\0")
    action, at, _ = header.partition(b"@")
    if not at or action not in _ACTIONS:
        return False
    subsystem = next((one[10:] for one in fields if one.startswith(b"SUBSYSTEM=")), b"")
    return subsystem not in _QUIET_SUBSYSTEMS


def watched_directories(settings: Settings) -> dict[str, frozenset[bytes]]:
    """Return the names to watch by directory; no names: all but volumes and terminals.

    Watched are ``device_dirs`` and the control files of simulated hardware.
    """
    found: dict[str, frozenset[bytes]] = dict.fromkeys(settings.device_dirs, frozenset())
    controls = [settings.drivers.nvidia.simulated_control] + [
        str(table.get("simulated_control", "")) for table in settings.drivers.vendors.values()
    ]
    for control in (Path(one) for one in controls if one):
        directory = str(control.parent)
        if directory not in settings.device_dirs:
            found[directory] = found.get(directory, frozenset()) | {os.fsencode(control.name)}
    return found


class DeviceWatch:
    """Waits for events of this node's devices."""

    def __init__(self, *, site: Site, wake: Iterable[Callable[[], None]]) -> None:
        """``wake``: calls that start a discovery each."""
        self._metrics: Metrics = site.metrics
        self._clock = site.clock
        self._node = site.node
        self._poll_s = site.settings.discovery_s
        self._directories = watched_directories(site.settings)
        self._wake = tuple(wake)
        self._stirred = anyio.Event()
        self._problems: dict[Source, str] = {}
        self._names_by_watch: dict[int, frozenset[bytes]] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow, "uevents", open_uevents, self._read_uevents)
            group.start_soon(
                self._follow, "directories", self._open_directories, self._read_directories
            )
            group.start_soon(self._coalesce)

    def finding(self) -> Finding:
        """Return whether devices are noticed at once, for ``hamictl doctor``."""
        text = "; ".join(f"{source}: {problem}" for source, problem in self._problems.items())
        if not text:
            return Finding(
                check="device-events",
                verdict="PASS",
                text="the kernel reports devices that appear or disappear",
                node=self._node,
            )
        return Finding(
            check="device-events",
            verdict="WARN",
            text=f"{text}: devices may be noticed only every {self._poll_s:g} s",
            fix="see the section on new devices in docs/drivers.md, or lower discovery_s",
            node=self._node,
        )

    async def _follow(
        self, source: Source, opener: Callable[[], int], read: Callable[[int], bool]
    ) -> None:
        gauge = self._metrics.device_events_up.labels(source=source)
        try:
            descriptor = opener()
        except OSError as error:
            gauge.set(0)
            self._problems[source] = error.strerror or str(error)
            _log.warning(
                "device events unavailable, devices are polled",
                extra={
                    "source": source,
                    "problem": self._problems[source],
                    "interval_s": self._poll_s,
                },
            )
            return
        gauge.set(1)
        self._problems.pop(source, None)
        try:
            while True:
                await anyio.wait_readable(descriptor)
                if read(descriptor):
                    self._metrics.device_events.labels(source=source).inc()
                    self._stirred.set()
        finally:
            os.close(descriptor)

    async def _coalesce(self) -> None:
        while True:
            await self._stirred.wait()
            await self._clock.sleep(SETTLE_S)
            self._stirred = anyio.Event()
            self._discover()
            await self._clock.sleep(AGAIN_S)
            self._discover()

    def _discover(self) -> None:
        self._metrics.device_wakes.inc()
        for wake in self._wake:
            wake()

    @staticmethod
    def _read_uevents(descriptor: int) -> bool:
        """Read all queued uevents; true if one concerns devices, or if some were lost."""
        found = False
        with suppress(BlockingIOError):
            while True:
                try:
                    found |= concerns_devices(os.read(descriptor, _MESSAGE_BYTES))
                except OSError as error:
                    if error.errno != errno.ENOBUFS:
                        raise
                    found = True
        return found

    def _open_directories(self) -> int:
        """Return an inotify instance on the directories; ``OSError`` if one cannot be watched."""
        masks = {
            directory: inotify.ENTRIES | (inotify.CLOSE_WRITE if names else 0)
            for directory, names in self._directories.items()
        }
        descriptor, directories = inotify.open_inotify(masks)
        self._names_by_watch = {
            watch: self._directories[directory] for watch, directory in directories.items()
        }
        return descriptor

    def _read_directories(self, descriptor: int) -> bool:
        """Read all queued changes; true if an entry appeared or disappeared, or some were lost."""
        changes = list(inotify.read_changes(descriptor))
        return any(self._concerns_nodes(*change) for change in changes)

    def _concerns_nodes(self, watch: int, mask: int, name: bytes) -> bool:
        """Return whether the entry is one to watch, or whether events were lost."""
        if mask & inotify.OVERFLOW:
            return True
        names = self._names_by_watch.get(watch, frozenset())
        if names:
            return name in names
        return bool(mask & inotify.ENTRIES) and not name.startswith(_QUIET_NODES)


def open_uevents(uid_map: Path = Path("/proc/self/uid_map")) -> int:
    """Return a socket that receives the kernel's uevents; ``OSError`` where there are none."""
    if uid_map.read_text("ascii").split() != _OWN_USER_NAMESPACE:
        raise OSError(errno.EPERM, "the kernel sends no uevents to a user namespace of its own")
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_NETLINK, kind, _UEVENT_PROTOCOL) as own:
        own.bind((0, _KERNEL_GROUP))
        return own.detach()
