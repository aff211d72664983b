# SPDX-License-Identifier: Apache-2.0
"""Processes of tenants, seen from the runner: requests, answers, ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.guest import ANSWERS, MISSING
from tests.gpu.registry import Skipped

RUN = Path(__file__).resolve().parent / "run.py"
_LOG_TAIL = 600
_END_S = 5.0


class GuestFailed(Exception):
    """A process of a tenant ended or printed no answer."""


class Guest:
    """One process of a tenant; ``tests.gpu.guest`` runs in it."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        environment: dict[str, str],
        cwd: Path,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it; ``prefix``: a command that runs it."""
        self._name = name
        self._log = cwd / f"log-{time.monotonic_ns()}"
        answers, tell = os.pipe()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(RUN), "--guest", name, json.dumps(arguments)],
                env={**environment, ANSWERS: str(tell)},
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[tell],
                text=True,
            )
        os.close(tell)
        self._answers = os.fdopen(answers, encoding="ascii")

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def answer(self) -> dict[str, Any]:
        """Its next answer; ``GuestFailed`` if it ended."""
        line = self._answers.readline()
        if not line:
            code = self.process.wait()
            log = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip()
            msg = f"{self._name} ended with {code}: {log}"
            raise GuestFailed(msg)
        answer: dict[str, Any] = json.loads(line)
        if MISSING in answer:
            raise Skipped(f"{answer[MISSING]} is not installed")
        return answer

    def send(self, **request: Any) -> None:
        """Send a request; ``answer`` returns its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer."""
        self.send(**request)
        return self.answer()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, and wait for the end after SIGKILL."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def close(self) -> None:
        """Let it end by itself; kill it if it does not."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._answers.close()
