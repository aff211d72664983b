# SPDX-License-Identifier: Apache-2.0
"""Starts a program as a child process that tests can kill, freeze and start again.

The child writes to a log file and never outlives this process: the kernel sends it SIGKILL when its
parent ends. Only processes started here are ever signalled.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from hami_common.errors import Unavailable

STOP_S = 10.0
STOPPED_S = 2.0
"""Longest wait until a signal has stopped all threads of a program."""
_POLL_S = 0.02
_LOG_TAIL_LINES = 25

# Runs in the child, then becomes the program: PR_SET_PDEATHSIG (1) is set to SIGKILL (9).
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9);"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def dying_with_parent(argv: Sequence[str | Path]) -> list[str]:
    """Command line that runs ``argv`` (absolute program path) as a child that dies with us."""
    head = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    return [*head, *map(str, argv)]


def wait_stopped(pid: int) -> None:
    """Return once SIGSTOP has reached every thread: until then some still answer."""
    give_up_s = time.monotonic() + STOPPED_S
    while time.monotonic() < give_up_s:
        if all(state in ("T", "t", "Z", "X") for state in _thread_states(pid)):
            return
        time.sleep(_POLL_S / 10)


def _thread_states(pid: int) -> list[str]:
    states = []
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            states.append(thread.read_text().rpartition(")")[2].split()[0])
    return states


class Process:
    """One program with its log; not running when made."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``argv`` is run with this process's environment plus ``env``."""
        self.name = name
        self.log = log
        self.starts = 0
        self._argv = list(argv)
        self._env = dict(env or {})
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._child.pid if self._child is not None and self.is_running() else None

    def is_running(self) -> bool:
        """Return true if the program has been started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start the program; does nothing while it runs."""
        if self.is_running():
            return
        self.starts += 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                dying_with_parent(self._argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C at the terminal is for the parent, which then ends its children in order.
                start_new_session=True,
                env={**os.environ, **self._env},
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; ``Unavailable`` when the program does not run."""
        if self._child is None or not self.is_running():
            raise Unavailable(peer=self.name, detail=f"is not running; {self.tail()}")
        self._child.send_signal(number)

    def freeze(self) -> None:
        """Stop the program where it stands; it does nothing more once this returns."""
        self.signal(signal.SIGSTOP)
        if self._child is not None:
            wait_stopped(self._child.pid)

    def thaw(self) -> None:
        """Let a frozen program go on."""
        self.signal(signal.SIGCONT)

    async def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._child is not None and self.is_running():
            self._child.kill()
        await self._gone(STOP_S)

    async def stop(self) -> int | None:
        """Ask it to end, and make it after a grace period; its exit code."""
        if self._child is None:
            return None
        if self.is_running():
            self._child.send_signal(signal.SIGCONT)
            self._child.terminate()
            if not await self._gone(STOP_S):
                self._child.kill()
        await self._gone(STOP_S)
        return self._child.returncode

    async def _gone(self, limit_s: float) -> bool:
        with anyio.move_on_after(limit_s, shield=True):
            while self.is_running():
                await anyio.sleep(_POLL_S)
            return True
        return False

    def tail(self) -> str:
        """The last lines of the log, for error messages."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        except OSError:
            lines = []
        return f"log of {self.name}:\n" + "\n".join(lines)
