# SPDX-License-Identifier: Apache-2.0
"""Starts ``hami-recall`` as the agent does, and speaks with it (native/hami-recall/README.md)."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.closing import Closing

PATIENCE_S = 30.0
_PACKET = 512
_AS_THIRD = """
import os, sys
given = int(sys.argv[1])
os.dup2(given, 3)
if given != 3:
    os.close(given)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Program that becomes another one, with a descriptor of its own as the third."""


class RecallHelper(Closing):
    """One helper; requests are numbered from 1 on."""

    def __init__(self, program: Path, env: Mapping[str, str], *words: str | Path) -> None:
        """Start it with these arguments and one end of a socket as descriptor 3."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)
        self._count = 0
        self._answers: dict[int, str] = {}
        self.arrived: list[int] = []
        """Numbers of the answers, in the order in which they came."""
        argv = [str(theirs.fileno()), str(program), *map(str, words)]
        command = [sys.executable, "-ISc", _AS_THIRD, *argv]
        self.process = subprocess.Popen(command, env=dict(env), pass_fds=(theirs.fileno(),))
        theirs.close()

    def send(self, request: str) -> int:
        """Send a request and return its number."""
        self._count += 1
        self._socket.send(f"{self._count} {request}".encode())
        return self._count

    def answer(self, number: int) -> str:
        """Wait for the answer to this request; answers to others are kept."""
        while number not in self._answers:
            found, text = self.raw_answer().split(" ", 1)
            self._answers[int(found)] = text
            self.arrived.append(int(found))
        return self._answers.pop(number)

    def raw_answer(self) -> str:
        """Return the next packet."""
        packet = self._socket.recv(_PACKET)
        if not packet:
            raise ConnectionResetError("the helper has closed its socket")
        return packet.decode()

    def raw_send(self, text: bytes) -> None:
        """Send a packet as it is."""
        self._socket.send(text)

    def ask(self, request: str) -> str:
        """Send a request and return its answer."""
        return self.answer(self.send(request))

    @property
    def workers(self) -> tuple[int, ...]:
        """Pids of its child processes."""
        pid = self.process.pid
        with contextlib.suppress(FileNotFoundError):
            text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
            return tuple(map(int, text.split()))
        return ()

    def kill(self) -> None:
        """SIGKILL the helper; its workers finish their calls."""
        self.process.kill()
        self.close()

    def close(self) -> int:
        """Close the socket; the exit status of the helper, which ends then."""
        self._socket.close()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def is_running(pid: int) -> bool:
    """Return true if the process exists and is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
