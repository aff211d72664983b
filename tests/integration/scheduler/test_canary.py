# SPDX-License-Identifier: Apache-2.0
"""A canary is rolled back on a real bus: for both replicas, after a restart, and as an event."""

import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.policy import RollbackRecord
from hami_common.runtime import natsio
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio.history import Bounds, Event, History
from hami_sim.natsd import NatsServer
from hamictl.cli import main
from tests.integration.scheduler.site import SchedulerProcess, Site, open_site
from tests.unit.scheduler.shell import builders

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
NAMES = ["n1", "n2"]
POLICIES = """
[policies.packed]
node = "binpack"
device = ["binpack"]

[canary]
policy = "packed"
namespaces = ["team-a"]
pods_least = 2

[[canary.objectives]]
measure = "refused_pct"
most = 50
"""


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with open_site(tmp_path, nats_server) as opened:
        yield opened


async def shown(s: SchedulerProcess) -> Any:
    return json.loads(await s.get("/v1/policies"))["canary"]


async def until_state(s: SchedulerProcess, state: str) -> Any:
    with anyio.fail_after(20):
        while (found := await shown(s))["state"] != state:
            await anyio.sleep(0.1)
    return found


async def test_both_replicas_roll_back_and_stay_so_after_a_restart(
    site: Site, tmp_path: Path
) -> None:
    for name in NAMES:
        await site.add_node(builders.devices(name, count=2))
    file = tmp_path / "policies.toml"
    file.write_text(POLICIES, encoding="utf-8")
    settings = {"policies_file": str(file), "canary_s": 0.3, "config_poll_s": 0.3}
    async with aiohttp.ClientSession() as http:
        one, two = (site.scheduler(name, http, **settings) for name in ("s1", "s2"))
        for s in (one, two):
            await s.start()
            await s.until_ready()
            await until_state(s, "running")
        for number in range(2):
            for namespace, mem_mib in (("team-a", 900_000), ("team-b", 1000)):
                pod = builders.pod(f"{namespace}-{number}", namespace=namespace, mem_mib=mem_mib)
                await one.filter(pod, NAMES)
        first = await until_state(one, "rolled-back")
        other = await until_state(two, "rolled-back")
        assert first["rollback"] == other["rollback"]
        assert first["rollback"]["reason"] == "refused_pct is 100, at most 50"
        assert other["verdict"] is None or other["verdict"]["canary"]["pods"] == 0

        bucket = natsio.NatsBucket(site.bus, subjects.POLICIES_BUCKET)
        (entry,) = await bucket.latest()
        record = codec.decode(entry.value, RollbackRecord, what=entry.key)
        assert entry.key == subjects.policy_key("packed", record.digest)
        assert record.writer == "s1"
        (event,) = await events(site)
        assert event.record(RollbackRecord) == record
        assert event.headers["ce-type"] == "io.hami.policy.rolledback.v1"

        await two.process.kill()
        await two.start()
        await two.until_ready()
        assert (await until_state(two, "rolled-back"))["rollback"]["reason"]
        printed = await anyio.to_thread.run_sync(
            partial(CliRunner().invoke, main, ["get", "policies", "--scheduler", one.url])
        )
        assert printed.exit_code == 0, printed.output
        assert "Canary packed: rolled-back" in printed.output
        assert "refused_pct is 100, at most 50" in printed.output
        lines = printed.output.splitlines()
        assert lines[1].split() == ["(setting)", "binpack", "spread", *lines[1].split()[3:]]
        assert lines[2].split()[0] == "packed"
        assert lines[2].split()[-1] == "canary"

        # Another revision is another canary.
        file.write_text(POLICIES.replace("[canary]", "[canary]\nrevision = 2"), encoding="utf-8")
        for s in (one, two):
            await until_state(s, "running")


async def events(site: Site) -> list[Event]:
    """Return the events of the family, which the server copies a moment later."""
    bounds = Bounds(messages=10, mib=1, time_s=5)
    history = History(site.bus, bounds=bounds, clock=SystemClock())
    found: list[Event] = []
    with anyio.fail_after(20):
        while not found:
            async with history.read([f"{subjects.EVENT_PREFIX}.policy.>"]) as reading:
                found = [event async for event in reading]
    return found
