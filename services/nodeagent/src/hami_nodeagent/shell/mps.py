# SPDX-License-Identifier: Apache-2.0
"""Runs the Multi-Process Service of one NVIDIA device: a control daemon as the agent's child.

The daemon starts a server when the first client connects. The service's directories are below
``<mps_dir>/<uuid>``: ``pipe``, which containers get, and ``log``. It is restarted when it ends, or
when a check fails: the daemon does not answer, or a new client (a child that calls ``cuInit``)
hangs. The latter is a known state after a client was killed with work in flight, in which the
daemon answers and only a restart helps. A restart ends the programs of all clients. Times in
seconds.

Commands of the control daemon: https://docs.nvidia.com/deploy/mps/appendix-tools-and-interface-reference.html
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import Process

from hami_common.ports import Clock
from hami_nodeagent.drivers.errors import DriverError, DriverMissing, DriverTransient
from hami_nodeagent.drivers.tool import Tool

CONTROL = "nvidia-cuda-mps-control"
_ASK_S = 5.0
_START_S = 10.0
_START_POLL_S = 0.1
_QUIT_S = 4
_QUIT = f"quit -t {_QUIT_S}"
_MULTIUSER: tuple[str, ...] = ("-multiuser-server",)
"""Lets clients of several users use one server; releases without it serve one user at a time."""
_AGAIN_S = 1.0
_AGAIN_MOST_S = 30.0
_NO_CUDA = 77
"""Exit status of the canary without the CUDA driver's library."""
_CANARY = (
    sys.executable,
    "-c",
    (
        "import ctypes, sys\n"
        "try: cuda = ctypes.CDLL('libcuda.so.1')\n"
        f"except OSError: sys.exit({_NO_CUDA})\n"
        "sys.exit(cuda.cuInit(0) != 0)\n"
    ),
)
_DIRECTORY_MODE = 0o755

_log = logging.getLogger(__name__)


class MpsService:
    """The Multi-Process Service of one device."""

    def __init__(
        self,
        uuid: str,
        *,
        directory: Path,
        control: str,
        clock: Clock,
        on_restart: Callable[[str], Awaitable[None]],
        check_s: float,
        canary: Sequence[str] = _CANARY,
    ) -> None:
        """``on_restart`` takes the reason of a restart, which ended the programs of all clients."""
        self.uuid = uuid
        self.problem = "it has not started yet"
        """Reason why it does not serve; empty: it does."""
        self._directory = directory / uuid
        self._clock = clock
        self._on_restart = on_restart
        self._check_s = check_s
        environment = {
            "CUDA_VISIBLE_DEVICES": uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self._directory / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._directory / "log"),
        }
        self._environment = environment
        self._control = Tool(CONTROL, path=control, limit_s=_ASK_S, environment=environment)
        self._options = [_MULTIUSER, ()]
        """Further options of the daemon, the next ones to try first."""
        self._canary = Tool("canary", path=canary[0], limit_s=_ASK_S, environment=environment)
        self._canary_arguments = tuple(canary[1:])

    async def run(self) -> None:
        """Keep the service running until cancelled, then end it."""
        pause_s = _AGAIN_S
        while True:
            has_served = False
            try:
                await self._serve()
            except (DriverError, OSError) as error:
                has_served, self.problem = not self.problem, str(error)
            extra = {"device": self.uuid, "problem": self.problem}
            _log.warning("MPS service failed", extra=extra)
            if has_served:
                pause_s = _AGAIN_S
                await self._on_restart(self.problem)
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _AGAIN_MOST_S)

    async def clients(self) -> Mapping[int, tuple[int, ...]]:
        """Return the PIDs of the clients, by the PID of their server."""
        found: dict[int, tuple[int, ...]] = {}
        for server in _numbers(await self._ask("get_server_list")):
            found[server] = _numbers(await self._ask(f"get_client_list {server}"))
        return found

    async def terminate(self, pids: Collection[int]) -> tuple[int, ...]:
        """End the contexts of these clients; return those that had any.

        A client that is killed with work in flight may fail its neighbors; one whose contexts were
        ended this way does not.
        """
        ended = []
        for server, clients in (await self.clients()).items():
            for client in clients:
                if client in pids:
                    await self._ask(f"terminate_client {server} {client}")
                    ended.append(client)
        return tuple(ended)

    async def _serve(self) -> None:
        """Start the daemon and check it until it fails; raises the reason."""
        with suppress(DriverError):  # one of an agent that was killed
            await self._ask(_QUIT)
        path = self._prepare()
        with anyio.CancelScope(shield=True):  # a cancellation during the start would leak it
            process = await anyio.open_process(
                [path, "-f", *self._options[0]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        try:
            try:
                await self._wait_ready(process)
            except DriverError:
                self._options.reverse()
                raise
            self.problem = ""
            _log.info("MPS service ready", extra={"device": self.uuid})
            while process.returncode is None:
                with anyio.move_on_after(self._check_s):
                    await process.wait()
                    break
                await self._check()
            detail = f"it ended with status {process.returncode}"
            raise DriverTransient(doing=CONTROL, detail=detail)
        finally:
            with anyio.CancelScope(shield=True):
                await self._end(process)

    def _prepare(self) -> str:
        """Make the service's directories, and return the control daemon's path."""
        path = self._control.find()
        if path is None:
            raise DriverMissing(doing="start the service", detail=f"{CONTROL} is not installed")
        for name in ("pipe", "log"):
            place = self._directory / name
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(_DIRECTORY_MODE)
        shared = self._directory.parent / "shm"
        shared.mkdir(exist_ok=True)
        shared.chmod(0o1777)
        return path

    async def _wait_ready(self, process: Process) -> None:
        until_s = self._clock.monotonic_s() + _START_S
        while True:
            try:
                await self._ask("get_default_active_thread_percentage")
            except DriverError:
                if process.returncode is not None or self._clock.monotonic_s() > until_s:
                    raise
                await self._clock.sleep(_START_POLL_S)
            else:
                return

    async def _check(self) -> None:
        await self._ask("get_default_active_thread_percentage")
        answer = await self._canary.run(*self._canary_arguments)
        if answer.status not in (0, _NO_CUDA):
            raise DriverTransient(doing="start a client", detail=f"status {answer.status}")

    async def _ask(self, command: str) -> str:
        answer = await self._control.run(given=f"{command}\n")
        if answer.status != 0:
            raise DriverTransient(doing=command, detail=answer.words[:200], code=answer.status)
        return answer.text

    async def _end(self, process: Process) -> None:
        """End daemon and servers: by command, and what is left of the group by a signal."""
        if process.returncode is None:
            with suppress(DriverError), anyio.move_on_after(_ASK_S):
                await self._ask(_QUIT)
                await process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await process.aclose()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split() if word.isascii() and word.isdigit())
