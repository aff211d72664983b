# SPDX-License-Identifier: Apache-2.0
"""The node agent's code on the machine's driver: discovery, usage, health, breaches.

Runs outside of all tenants. Needs msgspec, anyio and nvidia-ml-py.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import msgspec

from hami_nodeagent.core.breach import BreachBook, BreachRules, Process
from hami_nodeagent.core.health import ProbePassed
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.protocol import DeviceUsage
from tests.gpu.guest import Answer, Steps


def driver(*, library: str, wait_s: float) -> Steps:
    """Discover twice, read usage, probe, and wait for faults."""

    async def look() -> Answer:
        found = build_driver("nvidia", {"library_path": library} if library else {})
        try:
            first, again = await found.discover(), await found.discover()
            usage = await found.usage()
            probes = await found.probe()
            faults = await found.wait_faults(wait_s)
        finally:
            await found.aclose()
        return {
            "is_stable": first == again,
            "driver_version": first.driver_version,
            "devices": msgspec.to_builtins(first.devices),
            "usage": msgspec.to_builtins(usage),
            "probes": [type(one).__name__ for one in probes],
            "passed": sum(isinstance(one, ProbePassed) for one in probes),
            "faults": [type(one).__name__ for one in faults],
        }

    yield anyio.run(look)


def holder_of(uuid: str, limit_mib: int, name: str, priority: int = 1) -> Holder:
    return Holder(
        pod_uid=name,
        namespace="default",
        pod=name,
        container="main",
        vendor="nvidia",
        uuid=uuid,
        number=0,
        limit_mib=limit_mib,
        priority=priority,
    )


def breaches(
    *,
    library: str,
    uuid: str,
    shares: list[list[Any]],
    expected: int,
    look_s: float,
    limit_s: float,
) -> Steps:
    """Compare usage with shares ``(pids, limit in MiB)`` until so many breaches are reported.

    Two more samples follow, which may report others.
    """

    async def look() -> Answer:
        found = build_driver("nvidia", {"library_path": library} if library else {})
        book = BreachBook(BreachRules())
        holders = [holder_of(uuid, limit, f"tenant-{n}") for n, (_, limit) in enumerate(shares)]
        owner_by_pid = {pid: f"tenant-{n}" for n, (pids, _) in enumerate(shares) for pid in pids}
        told: dict[str, Answer] = {}
        began, more = time.monotonic(), 2
        try:
            await found.discover()
            while time.monotonic() - began < limit_s and more:
                processes = _processes(await found.usage(), owner_by_pid)
                for breach in book.look(holders, processes, now_s=time.monotonic()).new:
                    seconds = time.monotonic() - began
                    figures = {"used_mib": breach.used_mib, "seconds": seconds}
                    told[breach.pod_uid] = {"kind": breach.kind, **figures}
                more -= len(told) >= expected
                await anyio.sleep(look_s)
        finally:
            await found.aclose()
        none = {"kind": "", "used_mib": 0, "seconds": limit_s}
        return {"told": [told.get(holder.pod_uid, none) for holder in holders]}

    yield anyio.run(look)


def _processes(
    usage: Sequence[DeviceUsage], owner_by_pid: Mapping[int, str]
) -> dict[str, list[Process]]:
    """The tenants' processes of each device."""
    return {
        device.uuid: [
            Process(
                pid=one.pid,
                pod_uid=owner_by_pid[one.pid],
                container="main",
                used_mib=one.used_mib or 0,
            )
            for one in device.processes or ()
            if one.pid in owner_by_pid
        ]
        for device in usage
    }
