# SPDX-License-Identifier: Apache-2.0
"""``/v1/whatif/policy`` compares policies by the ledger's events of a real stream."""

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

from hami_sim.natsd import NatsServer
from hamictl.cli import main
from tests.integration.scheduler.site import SchedulerProcess, Site, open_site
from tests.unit.scheduler.shell import builders

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
QUESTION = {
    "hours": 1,
    "policies": [
        {"node_policy": "binpack", "device_policy": ["binpack"]},
        {"node_policy": "spread", "device_policy": ["spread"]},
        {},
    ],
}


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with open_site(tmp_path, nats_server) as opened:
        yield opened


async def test_released_pods_are_placed_again_under_each_policy(site: Site, tmp_path: Path) -> None:
    for name in ("n1", "n2"):
        await site.add_node(builders.devices(name, count=2))
    async with aiohttp.ClientSession() as http:
        scheduler = site.scheduler("s1", http)
        await scheduler.start()
        await scheduler.until_ready()

        async def ask() -> dict[str, Any]:
            status, body = await scheduler.post("/v1/whatif/policy", json.dumps(QUESTION).encode())
            assert status == 200, body
            answer: dict[str, Any] = json.loads(body)
            return answer

        assert (await ask())["arrivals"] == 0
        for name in ("p0", "p1", "p2"):
            pod = await site.add_pod(name, mem_mib=5000, cores=0)
            assert await scheduler.bind(pod, "n1") == ""
        for name in ("p0", "p1"):
            await site.kube.delete("pods", name, "default", gracePeriodSeconds="0")
        with anyio.fail_after(30):
            while sum(record.op == "release" for record in await site.log()) < 2:
                await anyio.sleep(0.1)
        # The server copies the ledger to the event stream a moment later.
        with anyio.fail_after(30):
            while (answer := await ask())["arrivals"] < 3:
                await anyio.sleep(0.1)
        assert (answer["devices"], answer["left_out"], answer["without_begin"]) == (4, 0, 0)
        packed, spread, configured = answer["results"]
        # Bound to n1, whose devices were spread: 10,000 MiB on one of them, 5,000 on the other.
        assert answer["recorded"]["devices_used_peak"] == 2
        assert answer["recorded"]["used_devices_full_peak"] == pytest.approx(15 / 32, abs=1e-4)
        assert packed["devices_used_peak"] == 1
        assert packed["used_devices_full_peak"] == pytest.approx(15 / 16, abs=1e-4)
        assert spread["devices_used_peak"] == 3
        assert spread["used_devices_full_peak"] == pytest.approx(5 / 16, abs=1e-4)
        assert configured["policy"]["device_policy"] == ["spread"]
        assert [one["placed_at_once"] for one in answer["results"]] == [3, 3, 3]
        assert packed["series"]["devices_used"][-1] == 1
        assert (answer["currency"], packed["cost"]) == ("", None)
        await _costs_follow_prices(scheduler)
        words = [
            "simulate",
            "--since",
            "1h",
            "--policy",
            "device=binpack",
            "--policy",
            "device=spread",
        ]
        shown = await anyio.to_thread.run_sync(
            partial(CliRunner().invoke, main, [*words, "--scheduler", scheduler.url])
        )
        assert shown.exit_code == 0, shown.output
        recorded, packed_row, *_ = shown.output.splitlines()[1:]
        assert recorded.startswith("as recorded")
        assert packed_row.startswith("node=binpack;device=binpack")
        assert packed_row.split()[1:4] == ["3", "0", "0"]
        assert "3 pods arrived since" in shown.output


async def _costs_follow_prices(scheduler: SchedulerProcess) -> None:
    def priced(currency: str) -> bytes:
        prices = {"currency": currency, "device_hour": {"*": 3600.0}}
        return json.dumps({**QUESTION, "prices": prices}).encode()

    status, body = await scheduler.post("/v1/whatif/policy", priced("EUR"))
    assert status == 200, body
    answer = json.loads(body)
    packed, spread, _ = answer["results"]
    assert (answer["currency"], answer["unpriced"]) == ("EUR", [])
    assert packed["cost"] == pytest.approx(3600 * packed["device_hours"], abs=0.5)
    # One device holds what spread puts on three.
    assert 0 < packed["cost"] < spread["cost"]
    status, body = await scheduler.post("/v1/whatif/policy", priced("euro"))
    assert status == 400, body
    assert b"prices.currency" in body
