# SPDX-License-Identifier: Apache-2.0
"""Picks TCP ports on loopback for programs that must know their port before they start.

The kernel may assign a port that it has just allocated and released to the next outgoing
connection before the program listens. Ports are therefore picked at random below the ephemeral
range; random picks of concurrent processes seldom collide.
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
    """Return an unused port on loopback that this process did not pick before."""
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
    """Return true if this port of loopback is unused."""
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
