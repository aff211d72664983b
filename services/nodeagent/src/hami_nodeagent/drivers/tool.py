# SPDX-License-Identifier: Apache-2.0
"""Runs a vendor's command-line tool: one run at a time, with a time limit and a bounded output.

Each run is a process group of its own with ``LANG=C`` and empty standard input. At the time limit
the whole group is killed. If a process survives (it hangs inside the kernel), further runs are
rejected at once until it exits. ``parse`` interprets the output, not this module. Times in seconds,
sizes in bytes.
"""

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from shutil import which

import anyio
from anyio.abc import ByteReceiveStream, Process
from msgspec import Struct

from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceHung,
    DriverDenied,
    DriverMissing,
    DriverTransient,
)

ANSWER_LIMIT = 4 << 20
"""Limit in bytes, larger than the output of any tool for a full node."""
LINES_LIMIT = 20_000
_REAP_S = 10.0
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


class Answer(Struct, frozen=True, kw_only=True):
    """Result of one run of a tool."""

    text: str
    """Standard output."""
    complaint: str = ""
    """Standard error."""
    status: int = 0

    @property
    def words(self) -> str:
        """All output, errors first, to search for error messages."""
        return f"{self.complaint}\n{self.text}".strip()


class Tool:
    """A vendor's tool on this machine."""

    def __init__(
        self,
        name: str,
        *,
        path: str = "",
        limit_s: float = 10.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``path``: the file to run; empty looks for ``name`` in ``PATH`` at each run."""
        self.name = name
        self._path = path
        self._limit_s = limit_s
        self._environment = dict(environment or {})
        self._turn = anyio.Lock()
        self._undead: Process | None = None

    @property
    def is_stuck(self) -> bool:
        """True while a killed process has not exited."""
        return self._undead is not None and self._undead.returncode is None

    def find(self) -> str | None:
        """Return the file to run, ``None`` if there is none."""
        return which(self._path or self.name)

    async def run(
        self,
        *arguments: str,
        limit_s: float | None = None,
        one_line: bool = False,
        given: str = "",
    ) -> Answer:
        """Run the tool with ``arguments`` and wait for its end.

        ``given``: the tool's standard input. ``one_line``: the tool never ends by itself; take its
        first line and end it. Errors: ``DriverMissing``, ``DriverDenied``, ``DeviceHung``,
        ``AnswerUnknown`` (more than ``ANSWER_LIMIT`` bytes or ``LINES_LIMIT`` lines).
        """
        doing = " ".join((self.name, *arguments))
        async with self._turn:
            if self.is_stuck:
                raise DeviceHung(doing=doing, detail="an earlier run has not ended yet")
            process = await self._start(doing, arguments, has_input=bool(given))
            try:
                if process.stdin is not None:
                    with suppress(anyio.BrokenResourceError):  # it has ended without reading
                        await process.stdin.send(given.encode())
                    await process.stdin.aclose()
                return await self._talk(
                    process, doing, self._limit_s if limit_s is None else limit_s, one_line=one_line
                )
            finally:
                await self._end(process)

    async def _start(self, doing: str, arguments: tuple[str, ...], *, has_input: bool) -> Process:
        path = self.find()
        if path is None:
            raise DriverMissing(
                doing=doing, detail=f"{self._path or self.name} is not installed", code=_NOT_FOUND
            )
        environment = {**os.environ, **self._environment, "LANG": "C", "LC_ALL": "C"}
        try:
            # Shielded: a cancellation during the start would leak the process.
            with anyio.CancelScope(shield=True):
                process = await anyio.open_process(
                    [path, *arguments],
                    stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
        except FileNotFoundError as error:
            raise DriverMissing(doing=doing, detail=str(error), code=_NOT_FOUND) from error
        except PermissionError as error:
            raise DriverDenied(doing=doing, detail=str(error), code=_NOT_EXECUTABLE) from error
        except OSError as error:
            raise DriverTransient(doing=doing, detail=str(error), code=error.errno or 0) from error
        return process

    async def _talk(
        self, process: Process, doing: str, limit_s: float, *, one_line: bool
    ) -> Answer:
        parts = {"text": bytearray(), "complaint": bytearray()}
        done = False
        with anyio.move_on_after(limit_s):
            async with anyio.create_task_group() as readers:
                if process.stderr is not None:
                    readers.start_soon(_read, process.stderr, parts["complaint"])
                if process.stdout is not None:
                    await _read(process.stdout, parts["text"], one_line=one_line)
                if one_line or len(parts["text"]) > ANSWER_LIMIT:
                    _kill(process)
            await process.wait()
            done = True
        if not done:
            raise DeviceHung(doing=doing, detail=f"no answer within {limit_s:g} s")
        if max(len(part) for part in parts.values()) > ANSWER_LIMIT:
            raise AnswerUnknown(doing=doing, detail=f"the answer exceeds {ANSWER_LIMIT} bytes")
        if max(part.count(b"\n") for part in parts.values()) > LINES_LIMIT:
            raise AnswerUnknown(doing=doing, detail=f"the answer exceeds {LINES_LIMIT} lines")
        text = parts["text"].decode("utf-8", "replace")
        return Answer(
            text=text,
            complaint=parts["complaint"].decode("utf-8", "replace"),
            status=0 if one_line and text else process.returncode or 0,
        )

    async def _end(self, process: Process) -> None:
        """Kill the process group and reap it; completes even if the caller is cancelled."""
        with anyio.CancelScope(shield=True):
            _kill(process)
            with anyio.move_on_after(_REAP_S):
                await process.wait()
            if process.returncode is None:
                self._undead = process
            else:
                await process.aclose()


async def _read(stream: ByteReceiveStream, into: bytearray, *, one_line: bool = False) -> None:
    """Collect output, up to one byte more than the limit."""
    with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
        while len(into) <= ANSWER_LIMIT and not (one_line and b"\n" in into):
            into += await stream.receive()


def _kill(process: Process) -> None:
    """End the process and its children; the group outlives a leader that has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
