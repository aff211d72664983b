# SPDX-License-Identifier: Apache-2.0
"""Run the simulated kube-scheduler as a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import anyio

from hami_sim.kube import Access
from hami_sim.kubescheduler import SchedulerSettings, SimScheduler, load
from hami_sim.kubescheduler.settings import OUR_RESOURCES


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hami_sim.kubescheduler", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="a KubeSchedulerConfiguration")
    parser.add_argument("--extender-url", default="", help="instead of --config")
    parser.add_argument(
        "--managed-resource",
        action="append",
        default=[],
        metavar="NAME",
        help="a resource the extender manages alone; default: all of ours",
    )
    parser.add_argument("--initial-backoff-s", type=float, default=1.0)
    parser.add_argument("--max-backoff-s", type=float, default=2.0)
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> SchedulerSettings:
    if arguments.config:
        return load(arguments.config)
    if not arguments.extender_url:
        return SchedulerSettings(
            initial_backoff_s=arguments.initial_backoff_s, max_backoff_s=arguments.max_backoff_s
        )
    return SchedulerSettings.for_extender(
        arguments.extender_url,
        resources=tuple(arguments.managed_resource) or OUR_RESOURCES,
        initial_backoff_s=arguments.initial_backoff_s,
        max_backoff_s=arguments.max_backoff_s,
    )


async def _run(arguments: argparse.Namespace) -> None:
    access = Access.from_kubeconfig(arguments.kubeconfig)
    async with SimScheduler(access, _settings(arguments)):
        print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                break


if __name__ == "__main__":
    anyio.run(_run, _arguments())
