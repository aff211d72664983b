# SPDX-License-Identifier: Apache-2.0
"""Sockets at which containers report that they begin to launch or are idle.

The library's side is ``native/libvgpu/src/bell.h``. Each container has a datagram socket in a
directory of its own, which is mounted read-only over the directory of all sockets, so a container
reaches no socket but its own. A datagram reports that the container's region should be read, or the
state of a process behind a closed gate (``REPORTS``). A container that rings more often than
``RATE_HZ`` is muted until its next turn and is polled meanwhile; its datagrams are dropped by the
kernel once its own queue is full.

The kernel names the sender of each datagram (``SCM_CREDENTIALS``, unix(7)); the process is then
watched (``pidfd_open(2)``), so its death is seen at once. Not thread-safe; nothing here blocks.
"""

import logging
import os
import select
import shutil
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import anyio

from hami_nodeagent.core.priorities import ContainerKey
from hami_nodeagent.core.recall import ReportKind

DIRECTORY_NAME = "bells"
SOCKET_NAME = "bell-1"
RATE_HZ = 70.0
"""Sustained rate of answers per container."""
BURST = 100.0
NEEDLESS_TOKENS = 5
"""Price of an answer that found no change, in answers."""
REPORTS: Mapping[bytes, ReportKind] = {
    b"w": "waits",
    b"p": "drained",
    b"u": "unmovable",
    b"b": "busy",
}
"""Bytes for ``core.recall`` and ``core.thrash``; all others are for ``core.priorities``."""
Listener = Callable[[ContainerKey, int, ReportKind, int | None], None]
"""Called with the container, the pid of the process, its report, and the turn of the gate that the
report names."""
_DATAGRAMS_MAX = 4
"""Datagrams of one container that are read at a time."""
_PROCESSES_MAX = 32
"""Watched processes of one container."""
_CREDENTIALS = struct.Struct("iII")
_TURN = struct.Struct("<Q")

_log = logging.getLogger(__name__)


@dataclass
class _Bell:
    """The socket of one container."""

    key: ContainerKey
    socket: socket.socket
    tokens: float = BURST
    filled_s: float = 0.0
    pidfds: dict[int, int] = field(default_factory=dict)
    """Descriptor by pid."""

    def take(self, now_s: float) -> float:
        """Take a token; return the seconds until there is one, 0 where it was taken."""
        self.tokens = min(BURST, self.tokens + (now_s - self.filled_s) * RATE_HZ)
        self.filled_s = now_s
        if self.tokens >= 1:
            self.tokens -= 1
            return 0.0
        return (1 - self.tokens) / RATE_HZ


class Doorbells:
    """The sockets of one node's containers."""

    def __init__(self, directory: Path) -> None:
        """Keep the sockets below ``directory``, which containers see."""
        self._root = directory / DIRECTORY_NAME
        self._bells: dict[ContainerKey, _Bell] = {}
        self._by_descriptor: dict[int, _Bell] = {}
        self._muted_until_s: dict[ContainerKey, float] = {}
        self._failed: set[ContainerKey] = set()
        self.listeners: list[Listener] = []
        """Get the reports of processes behind closed gates."""

    @cached_property
    def _epoll(self) -> select.epoll:
        """Created at the first use, and again after ``close``."""
        return select.epoll()

    def directory_of(self, key: ContainerKey) -> Path:
        """Create the container's directory and return it; ``OSError`` if that is not possible."""
        own = self.path_of(key)
        own.mkdir(parents=True, exist_ok=True)
        for directory in (self._root, own):
            directory.chmod(0o755)
        return own

    def path_of(self, key: ContainerKey) -> Path:
        """Return the path of the container's directory."""
        return self._root / "_".join(key)

    def listen(self, keys: Collection[ContainerKey]) -> None:
        """Listen to these containers, and to no others."""
        for key in set(self._bells) - set(keys):
            self._close(key)
        self._failed &= set(keys)
        for key in keys:
            if key not in self._bells:
                try:
                    self._open(key)
                except OSError as error:
                    self._report(key, error)

    def tidy(self, is_kept: Callable[[str], bool]) -> None:
        """Remove the directories of pods (by uid) that are not kept."""
        with suppress(OSError):
            for directory in self._root.iterdir():
                if not is_kept(directory.name.partition("_")[0]):
                    shutil.rmtree(directory, ignore_errors=True)

    def is_open(self, key: ContainerKey) -> bool:
        """Return whether the container's socket exists, so that it need not be polled."""
        return key in self._bells

    def pids_of(self, key: ContainerKey) -> frozenset[int]:
        """Return the host's pids of the container's processes that rang and have not ended."""
        bell = self._bells.get(key)
        return frozenset(bell.pidfds) if bell else frozenset()

    async def wait(self) -> None:
        """Wait for a datagram or a death."""
        await anyio.wait_readable(self._epoll.fileno())

    def rung(self, now_s: float) -> tuple[set[ContainerKey], set[ContainerKey]]:
        """Return the containers that rang, and those of which a process died.

        Reports are passed to the listeners; a container that only reported is not returned.
        """
        rang: set[ContainerKey] = set()
        bereft: set[ContainerKey] = set()
        for descriptor, _ in self._epoll.poll(0):
            bell = self._by_descriptor.get(descriptor)
            if bell is None:
                continue
            if descriptor != bell.socket.fileno():
                self._forget_process(bell, descriptor)
                bereft.add(bell.key)
            elif muted_s := bell.take(now_s):
                self._epoll.modify(descriptor, 0)
                self._muted_until_s[bell.key] = now_s + muted_s
            elif self._drain(bell):
                rang.add(bell.key)
        return rang, bereft

    def charge_needless(self, key: ContainerKey) -> None:
        """Charge a container for a datagram after which nothing had changed."""
        if bell := self._bells.get(key):
            bell.tokens -= NEEDLESS_TOKENS - 1

    def unmute(self, now_s: float) -> float | None:
        """Unmute containers whose turn it is; return the seconds until the next one's turn."""
        for key, until_s in list(self._muted_until_s.items()):
            if until_s <= now_s:
                del self._muted_until_s[key]
                self._epoll.modify(self._bells[key].socket.fileno(), select.EPOLLIN)
        if not self._muted_until_s:
            return None
        return min(self._muted_until_s.values()) - now_s

    def close(self) -> None:
        """Close all sockets; the doorbells can be used again."""
        for key in list(self._bells):
            self._close(key)
        epoll = self.__dict__.pop("_epoll", None)
        if epoll is not None:
            epoll.close()

    def _open(self, key: ContainerKey) -> None:
        directory = self.directory_of(key)
        path = directory / SOCKET_NAME
        path.unlink(missing_ok=True)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        parent = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            bound.bind(f"/proc/self/fd/{parent}/{SOCKET_NAME}")  # sun_path holds 108 bytes
            path.chmod(0o666)
        except OSError:
            bound.close()
            raise
        finally:
            os.close(parent)
        self._bells[key] = self._by_descriptor[bound.fileno()] = _Bell(key, bound)
        self._epoll.register(bound.fileno(), select.EPOLLIN)

    def _close(self, key: ContainerKey) -> None:
        bell = self._bells.pop(key)
        self._muted_until_s.pop(key, None)
        for descriptor in list(bell.pidfds.values()):
            self._forget_process(bell, descriptor)
        del self._by_descriptor[bell.socket.fileno()]
        self._epoll.unregister(bell.socket.fileno())
        bell.socket.close()

    def _drain(self, bell: _Bell) -> bool:
        """Read datagrams; return whether the container's region should be read."""
        rang = False
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        for _ in range(_DATAGRAMS_MAX):
            try:
                data, ancillary, _, _ = bell.socket.recvmsg(1 + _TURN.size, space)
            except OSError:
                break
            report = REPORTS.get(data[:1])
            turn = _TURN.unpack_from(data, 1)[0] if len(data) > _TURN.size else None
            rang = rang or report is None
            for level, kind, sender in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid = _CREDENTIALS.unpack_from(sender)[0]
                    self._watch_process(bell, pid)
                    if report is not None:
                        for listener in self.listeners:
                            listener(bell.key, pid, report, turn)
        return rang

    def _watch_process(self, bell: _Bell, pid: int) -> None:
        if pid <= 0 or pid in bell.pidfds or len(bell.pidfds) >= _PROCESSES_MAX:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return  # it has ended, or the kernel is older than 5.3
        bell.pidfds[pid] = descriptor
        self._by_descriptor[descriptor] = bell
        self._epoll.register(descriptor, select.EPOLLIN)

    def _forget_process(self, bell: _Bell, descriptor: int) -> None:
        bell.pidfds = {pid: one for pid, one in bell.pidfds.items() if one != descriptor}
        del self._by_descriptor[descriptor]
        self._epoll.unregister(descriptor)
        os.close(descriptor)

    def _report(self, key: ContainerKey, error: OSError) -> None:
        if key not in self._failed:
            self._failed.add(key)
            extra = {"container": "/".join(key), "problem": error.strerror or str(error)}
            _log.warning("doorbell not created, the container is polled", extra=extra)
