# SPDX-License-Identifier: Apache-2.0
"""Picks TCP ports on loopback for programs that must be told theirs before they start.

A port that the kernel just gave and took back may be given to the next outgoing connection before
its program listens. So ports are taken from below those that the kernel gives to connections, by
chance, so that two processes that pick at once seldom pick the same.
"""

import random
import socket
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
FIRST: Final = 10_240
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FEWEST: Final = 1_000
_TRIES: Final = 100

_picked: set[int] = set()
_random = random.SystemRandom()


def free_port() -> int:
    """A port on loopback that nobody listens on now, and that this process did not pick before."""
    first_given = _first_given()
    if first_given - FIRST >= _FEWEST:
        for _ in range(_TRIES):
            port = _random.randrange(FIRST, first_given)
            if port not in _picked and is_free(port):
                _picked.add(port)
                return port
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        given: int = probe.getsockname()[1]
        return given


def _first_given() -> int:
    """The lowest port that the kernel gives to connections; 0: not known."""
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def is_free(port: int) -> bool:
    """Whether nobody listens on this port of loopback."""
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
