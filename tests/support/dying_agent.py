# SPDX-License-Identifier: Apache-2.0
"""Runs the agent and restarts it whenever SIGKILL ended it, as kubelet does.

``python dying_agent.py DIRECTORY --config FILE``. The agent is a forked process, so that a start
costs no imports; each killed one leaves a line in DIRECTORY/deaths. Besides the kills in the script
of the hardware, it is killed around a write of its journal of partitions: a test puts one of
``POINTS`` into the file DIRECTORY/armed, and the next write that reaches this point is killed.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

POINTS = ("journal.begin", "journal.written", "journal.stored")
"""Before anything is written; when it is beside its place; when it is in its place."""
ARMED, DEATHS = "armed", "deaths"
_DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl."""


class Reaper:
    """An audit hook that kills the process at the armed point."""

    def __init__(self, directory: Path) -> None:
        self._armed = directory / ARMED
        self._state = str(directory / "state")
        self._journal = f"{self._state}/partitions"
        self._was_renamed = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        """``open`` has (path, mode, flags), ``os.rename`` (from, to, ...)."""
        if event == "os.rename" and str(arguments[1]) == f"{self._journal}.json":
            self._strike("journal.written")
            self._was_renamed = True
        elif event == "open" and str(arguments[0]) == f"{self._journal}.new":
            self._strike("journal.begin")
        elif event == "open" and str(arguments[0]) == self._state and self._was_renamed:
            self._was_renamed = False
            self._strike("journal.stored")

    def _strike(self, point: str) -> None:
        if self._armed.exists() and self._armed.read_text() == point:
            self._armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def supervise(directory: Path, agent: Callable[[], int]) -> int:
    """Restart agents until one ends otherwise than by SIGKILL."""
    while True:
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
            sys.addaudithook(Reaper(directory))
            os._exit(agent())
        signal.signal(signal.SIGTERM, lambda *_, child=pid: os.kill(child, signal.SIGTERM))
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            return os.waitstatus_to_exitcode(status)
        with (directory / DEATHS).open("a") as file:
            file.write(f"{pid}\n")


def main() -> int:
    """Run agents with the arguments given."""
    from hami_nodeagent import app  # noqa: PLC0415 - tests read POINTS without the agent

    directory, *rest = sys.argv[1:]
    return supervise(Path(directory), lambda: app.main(rest))


if __name__ == "__main__":
    sys.exit(main())
