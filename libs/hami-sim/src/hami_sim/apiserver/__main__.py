# SPDX-License-Identifier: Apache-2.0
"""Run the simulated API server as a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import anyio

from hami_sim.apiserver import ApiServer, Settings
from hami_sim.kube import Access


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hami_sim.apiserver", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0 lets the kernel choose")
    parser.add_argument("--kubeconfig", type=Path, required=True, help="file to write")
    parser.add_argument("--data", type=Path, help="journal file, so that state survives a restart")
    parser.add_argument("--token", default="", help="the admin's bearer token")
    parser.add_argument("--tls", action="store_true", help="serve HTTPS with an own CA")
    parser.add_argument(
        "--service",
        action="append",
        default=[],
        metavar="NAMESPACE/NAME=HOST:PORT",
        help="where webhooks registered by service are found",
    )
    return parser.parse_args()


def _services(texts: list[str]) -> dict[tuple[str, str], str]:
    services = {}
    for text in texts:
        name, _, target = text.partition("=")
        namespace, _, service = name.partition("/")
        if not (namespace and service and target):
            sys.exit(f"--service {text}: want NAMESPACE/NAME=HOST:PORT")
        services[namespace, service] = target
    return services


def _token(arguments: argparse.Namespace) -> str:
    """Return the token of an existing kubeconfig, so that clients keep access after a restart."""
    if arguments.token or not arguments.kubeconfig.exists():
        return str(arguments.token)
    return Access.from_kubeconfig(arguments.kubeconfig).token


async def _run(arguments: argparse.Namespace) -> None:
    settings = Settings(
        port=arguments.port,
        tls=arguments.tls,
        data=arguments.data,
        admin_token=_token(arguments),
        services=_services(arguments.service),
    )
    async with ApiServer(settings) as server:
        server.kubeconfig(arguments.kubeconfig)
        print(json.dumps({"url": server.url, "pid": os.getpid()}), flush=True)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                break


if __name__ == "__main__":
    anyio.run(_run, _arguments())
