# SPDX-License-Identifier: Apache-2.0
"""Usage that the agent publishes on the bus."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import Unavailable
from hami_common.events.codec import decode
from hami_common.events.usage import RecallUse, UsageRecord
from hami_common.model.device import Device
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.usage import ContainerRow, Counted, Row
from hami_nodeagent.drivers.protocol import DeviceUsage
from hami_nodeagent.settings import UsageSettings
from hami_nodeagent.shell.usageevents import UsageTeller
from hami_nodeagent.shell.usagemetrics import Look
from tests.unit.nodeagent.shell.support import make_site

pytestmark = pytest.mark.anyio

HOLDER = Holder(
    pod_uid="u1",
    namespace="team-a",
    pod="train-0",
    container="main",
    vendor="nvidia",
    uuid="GPU-1",
    number=0,
    limit_mib=3000,
    core_pct=30,
    allocation_id="a1",
)
RECALLS = (
    RecallUse(namespace="default", pod="a", pod_uid="u", container="main", moves=2, moved_mib=9),
)
LOOK = Look(
    rows=(Row(holder=HOLDER, used_bytes=(2100 << 20) + 5, core_pct=28),),
    containers=(
        ContainerRow(
            holder=HOLDER,
            counted=Counted(
                launches=7, waited_ns=1_500_000_000, refusals=1, device_time_ns=2_000_000_000
            ),
            processes=2,
        ),
    ),
    devices=(
        (
            Device(
                uuid="GPU-1",
                vendor="nvidia",
                index=0,
                type="A100",
                memory_mib=40960,
                capacity_mib=40960,
            ),
            DeviceUsage(uuid="GPU-1", used_mib=2600, core_pct=None),
        ),
    ),
)


class FakeBus:
    def __init__(self) -> None:
        self.published: list[tuple[str, UsageRecord, Mapping[str, str]]] = []
        self.is_away = False

    async def publish_stored(
        self, subject: str, data: bytes, *, headers: Mapping[str, str], message_id: str
    ) -> int:
        if self.is_away:
            raise Unavailable(peer="bus", detail="the test says so")
        assert message_id == headers["ce-id"]
        self.published.append((subject, decode(data, UsageRecord, what=subject), headers))
        return len(self.published)


def teller(directory: Path, look: Look = LOOK, **usage: Any) -> tuple[UsageTeller, FakeBus]:
    bus: Any = FakeBus()
    site = make_site(directory, usage=UsageSettings(**usage))
    telling = UsageTeller(
        site=site, look=lambda: look, recalls=lambda: RECALLS, publisher=lambda: bus
    )
    return telling, bus


async def test_one_message_reports_all_containers_and_devices(tmp_path: Path) -> None:
    telling, bus = teller(tmp_path)
    await telling.tell()
    ((subject, record, headers),) = bus.published
    assert subject == subjects.usage_event(record.node)
    assert record.recalls == RECALLS
    assert headers["ce-type"] == "io.hami.usage.sampled.v1"
    assert headers["ce-source"] == f"/nodeagent/{record.node}"
    (share,), (container,), (device,) = record.shares, record.containers, record.devices
    assert (share.pod, share.limit_mib, share.used_mib) == ("train-0", 3000, 2100)
    assert (share.limit_core_pct, share.core_pct, share.allocation_id) == (30, 28, "a1")
    assert (container.launches, container.waited_s, container.device_time_s) == (7, 1.5, 2.0)
    assert (container.processes, container.refusals) == (2, 1)
    assert (device.memory_mib, device.used_mib, device.core_pct) == (40960, 2600, 0)
    assert record.every_s == 60.0


async def test_node_without_devices_publishes_nothing(tmp_path: Path) -> None:
    telling, bus = teller(tmp_path, Look())
    await telling.tell()
    assert bus.published == []


async def test_unavailable_bus_loses_one_message_and_nothing_more(tmp_path: Path) -> None:
    telling, bus = teller(tmp_path)
    bus.is_away = True
    await telling.tell()
    bus.is_away = False
    await telling.tell()
    assert len(bus.published) == 1


async def test_disabled_usage_events_are_not_published(tmp_path: Path) -> None:
    telling, bus = teller(tmp_path, event_s=0.0)
    with anyio.fail_after(2):
        await telling.run()
    assert bus.published == []
