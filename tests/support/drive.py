# SPDX-License-Identifier: Apache-2.0
"""Drives the test program ``drive`` (native/libvgpu/tests/programs/drive.c lists its commands)."""

import contextlib
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.fakes.gpucontainers import GpuContainer
from tests.support.closing import Closing

OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
_ANSWER_S = 50.0


class DriverError(Exception):
    """The driver answered with a CUresult that is not success."""

    def __init__(self, command: str, code: int) -> None:
        super().__init__(f"{command}: error {code}")
        self.code = code


class Drive(Closing):
    """One process that uses the driver, in a container or, without one, on the bare machine."""

    def __init__(
        self,
        program: Path,
        *,
        container: GpuContainer | None = None,
        env: Mapping[str, str] | None = None,
        way: str = "link",
        wrapper: Sequence[Path] = (),
    ) -> None:
        """``env`` is added to a container's environment; without one it is all of it.

        ``wrapper`` is a command that runs the program.
        """
        words = [*map(str, wrapper), str(program), way]
        self.process = subprocess.Popen(
            container.command(words) if container else words,
            env=container.environment(env) if container else dict(env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def send(self, command: str) -> None:
        """Send a command; read its answer with ``answer``."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self, command: str = "") -> list[str]:
        """Return the words after "ok"; ``DriverError`` for an error, naming the command."""
        assert self.process.stdout is not None
        if not self.has_answer(_ANSWER_S):
            raise TimeoutError(command)
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            code = self.process.wait()
            msg = f"{command}: the program ended with {code}: {self.process.stderr.read()}"
            raise RuntimeError(msg)
        words = line.split()
        if words[0] == "error":
            raise DriverError(command, int(words[1]))
        assert words[0] == "ok", f"{command}: {line}"
        return words[1:]

    def has_answer(self, within_s: float) -> bool:
        """Return true once the next answer can be read; false if it does not come in time."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], within_s)[0])

    def ask(self, command: str) -> list[int]:
        """One command and the numbers of its answer."""
        self.send(command)
        return [int(word) for word in self.answer(command)]

    def code(self, command: str) -> int:
        """One command and its CUresult."""
        try:
            self.ask(command)
        except DriverError as error:
            return error.code
        return 0

    def begin(self, device: int = 0) -> Self:
        """Initialize and make the primary context of a device current."""
        self.ask("init")
        self.ask(f"device {device}")
        return self

    @property
    def free_bytes(self) -> int:
        """Free bytes as cuMemGetInfo reports."""
        return self.ask("info")[0]

    @property
    def used_bytes(self) -> int:
        """Total less free, as cuMemGetInfo reports."""
        free, total = self.ask("info")
        return total - free

    def stop(self) -> None:
        """SIGSTOP, and wait until all threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        deadline = time.monotonic() + _ANSWER_S
        while any(
            (task / "stat").read_text().rpartition(")")[2].split()[0] != "T"
            for task in tasks.iterdir()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has ended the process."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Let the process end by itself and wait for it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
