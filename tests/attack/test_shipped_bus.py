# SPDX-License-Identifier: Apache-2.0
"""The shipped configuration of the bus holds every stream that the services declare."""

from pathlib import Path

import pytest

from hami_common.bus import subjects
from hami_common.errors import Denied
from hami_common.ports import Expect
from hami_common.runtime import natsio
from hami_common.runtime.natsio.jetstream import api
from hami_common.runtime.natsio.layout import stream_configs
from tests.support.shippedbus import SERVERS, run_shipped

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("component", sorted(SERVERS))
async def test_fresh_installation_declares_every_stream_and_keeps_the_ledger(
    component: str, tmp_path: Path
) -> None:
    limits = natsio.BusLimits(replicas=SERVERS[component])
    async with run_shipped(component, tmp_path) as site, site.service("registry") as registry:
        await natsio.ensure_bus(registry, limits=limits, timeout_s=30)
        for config in stream_configs(limits):
            info = await api(registry, f"STREAM.INFO.{config['name']}")
            assert info["config"]["max_bytes"] == config["max_bytes"] > 0, config["name"]
        async with site.service("scheduler") as scheduler:
            await natsio.ensure_bus(scheduler, limits=limits, timeout_s=30)
            ledger = natsio.NatsBucket(scheduler, subjects.ALLOC_BUCKET)
            key = subjects.allocation_key("gpu-a", "p1")
            first = Expect(subject=subjects.node_fence("gpu-a"), sequence=0)
            assert await ledger.append(key, b"record", expect=first) == 1
            await natsio.ensure_bus(registry, limits=limits, timeout_s=30)
            assert (await ledger.get(key)) is not None


async def test_no_stream_without_a_limit_can_be_made(tmp_path: Path) -> None:
    async with run_shipped("nats", tmp_path) as site, site.service("operator") as operator:
        config = {"name": "GREEDY", "subjects": ["greedy.>"], "storage": "file", "num_replicas": 1}
        with pytest.raises(Denied, match="max bytes"):
            await api(operator, "STREAM.CREATE.GREEDY", config)
