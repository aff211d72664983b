# SPDX-License-Identifier: Apache-2.0
"""Run the schedulers of a simulated cluster in one process.

As in a real cluster, one kube-scheduler calls the extender and another serves ``default-scheduler``
without one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
from msgspec.structs import replace

from hami_sim.kube import Access
from hami_sim.kubescheduler import SchedulerSettings, SimScheduler, load
from hami_sim.kubescheduler.settings import DEFAULT_PROFILE, OUR_RESOURCES


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
    parser.add_argument("--dra", action="store_true", help="as in component dra")
    parser.add_argument("--initial-backoff-s", type=float, default=1.0)
    parser.add_argument("--max-backoff-s", type=float, default=2.0)
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> list[SchedulerSettings]:
    """Return the settings of each kube-scheduler."""
    schedulers = []
    if arguments.config:
        schedulers.append(load(arguments.config))
    elif arguments.extender_url:
        ours = SchedulerSettings.for_extender(
            arguments.extender_url,
            resources=tuple(arguments.managed_resource) or OUR_RESOURCES,
            initial_backoff_s=arguments.initial_backoff_s,
            max_backoff_s=arguments.max_backoff_s,
            dra=arguments.dra,
        )
        profiles = tuple(one for one in ours.profiles if one != DEFAULT_PROFILE)
        schedulers.append(replace(ours, profiles=profiles))
    if not any(DEFAULT_PROFILE in one.profiles for one in schedulers):
        own = SchedulerSettings(
            profiles=(DEFAULT_PROFILE,),
            initial_backoff_s=arguments.initial_backoff_s,
            max_backoff_s=arguments.max_backoff_s,
        )
        schedulers.append(own)
    return schedulers


async def _run(arguments: argparse.Namespace) -> None:
    access = Access.from_kubeconfig(arguments.kubeconfig)
    async with AsyncExitStack() as stack:
        for settings in _settings(arguments):
            await stack.enter_async_context(SimScheduler(access, settings))
        print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                break


if __name__ == "__main__":
    anyio.run(_run, _arguments())
