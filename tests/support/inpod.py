# SPDX-License-Identifier: Apache-2.0
"""Runs a Python module as it would run in a pod, where a cluster's names have addresses.

    python -P tests/support/inpod.py nats.hami-system.svc=127.0.0.1 hami_scheduler --config …

Certificates are checked against the names, so a service has to connect by name although everything
is on this machine. Imports nothing of ours, for it runs before the service does.
"""

import runpy
import socket
import sys
from typing import Any

_lookup = socket.getaddrinfo


def main(arguments: list[str]) -> None:
    """Run a module (second argument) with names (first: ``name=address,…``) known."""
    names, module, *rest = arguments
    address_by_name = dict(pair.split("=") for pair in names.split(","))

    def look_up(host: Any, *more: Any, **named: Any) -> Any:
        return _lookup(address_by_name.get(host, host), *more, **named)

    socket.getaddrinfo = look_up
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
