# SPDX-License-Identifier: Apache-2.0
"""Memory above the request: from the ledger to the page that a container's library reads."""

import struct
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hami_common.model.device import Burst
from hami_nodeagent.settings import PrioritySettings
from tests.integration.nodeagent.plane import Ask, Plane, until
from tests.support.regions import own_region
from tests.unit.nodeagent.shell.support import fake_library

pytestmark = pytest.mark.anyio
MIB = 1 << 20
REQUEST_MIB, LIMIT_MIB = 4000, 30_000


def bound_mib(page: Path, uuid: str) -> int:
    """The bound of the page's first device; 0 without a valid one."""
    data = page.read_bytes() if page.exists() else bytes(192)
    name, sequence, lease_ns, memory = struct.unpack_from("<64sI4xQQ", data, 64)
    is_valid = name.rstrip(b"\0").decode() == uuid and lease_ns > time.monotonic_ns()
    return memory // MIB if is_valid and not sequence % 2 else 0


async def test_bound_follows_the_ledger_and_use_is_reported(plane: Plane) -> None:
    """A second pod books the memory, before it starts; when it ends the bound rises again."""
    device = plane.devices[0]
    pages = plane.directory / "priorities"
    settings: dict[str, Any] = {
        "enforcement": "libvgpu",
        "library": str(fake_library(plane.directory)),
        "library_dir": str(plane.directory / "libraries"),
        "pods_dir": str(plane.kubelet.directory / "pods"),
        "priority": PrioritySettings(directory=str(pages)),
    }
    async with plane.agent(**settings):
        ask = Ask(
            shares=((0, REQUEST_MIB),),
            memory_limit_mib=LIMIT_MIB,
            has_region=True,
            command="exec sleep 1000",
        )
        record = await plane.place("burst", ask)
        await plane.until_phase("burst", "Running")
        page = pages / "bells" / f"{record.pod_uid}_main" / "room-1"

        async def until_bound(mib: int) -> None:
            async def is_it() -> bool:
                return bound_mib(page, device.uuid) == mib

            await until(is_it)

        await until_bound(LIMIT_MIB)
        assert (
            b"device.0.memory_limit_mib=30000\n"
            in next(
                (plane.kubelet.directory / "pods" / record.pod_uid).rglob("limits")
            ).read_bytes()
        )
        plane.region(record.pod_uid).write_bytes(own_region(device.uuid, 5000 * MIB))
        wanted = (Burst(pod_uid=record.pod_uid, memory_mib=1024),)

        async def is_reported() -> bool:
            report = await plane.report()
            return {one.uuid: one.bursts for one in report.devices}[device.uuid] == wanted

        await until(is_reported)
        lowered_s = []
        for number in range(3):  # the fastest counts: other tests may occupy the machine
            other = plane.record(await plane.create(f"other-{number}", Ask(shares=((0, 20_000),))))
            began_s = time.monotonic()
            sequence = await plane.reserve(other)
            await until_bound(device.memory_mib - 20_000)
            lowered_s.append(time.monotonic() - began_s)
            await plane.reserve(replace(other, op="release", containers=()), sequence=sequence)
            await until_bound(LIMIT_MIB)
        await plane.kube.delete("pods", "burst", "default")

        async def is_gone() -> bool:
            report = await plane.report()
            return not page.exists() and not any(one.bursts for one in report.devices)

        await until(is_gone)
    assert min(lowered_s) < 1.0, "before the second pod can start"
