# SPDX-License-Identifier: Apache-2.0
"""``/v1/whatif/moments`` rebuilds a refusal from the events of a real stream."""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner

from hami_common.runtime.clock import SystemClock
from hami_sim.natsd import NatsServer
from hamictl.cli import main
from tests.integration.scheduler.site import Site, open_site
from tests.unit.scheduler.shell import builders

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
NAMES = [f"n{number:02d}" for number in range(1, 21)]


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with open_site(tmp_path, nats_server) as opened:
        yield opened


async def test_a_past_refusal_has_all_nodes_and_equals_the_record(site: Site) -> None:
    for name in NAMES:
        await site.add_node(builders.devices(name, count=1))
    async with aiohttp.ClientSession() as http:
        scheduler = site.scheduler("s1", http)
        await scheduler.start()
        await scheduler.until_ready()
        holders = [await site.add_pod(f"h{number}", mem_mib=9000, cores=0) for number in (1, 2)]
        for pod, node in zip(holders, NAMES, strict=False):
            assert await scheduler.bind(pod, node) == ""
        train = await site.add_pod("train", mem_mib=20_000, cores=0)
        answer = await scheduler.filter(train, NAMES)
        assert not answer["NodeNames"]
        refused_s = SystemClock().now_s()
        await anyio.sleep(0.05)
        # Afterwards the first holder ends, and a third pod gets devices.
        await site.kube.delete("pods", "h1", "default", gracePeriodSeconds="0")
        late = await site.add_pod("late", mem_mib=4000, cores=0)
        assert await scheduler.bind(late, NAMES[2]) == ""
        with anyio.fail_after(30):
            while sum(record.op == "release" for record in await site.log()) < 1:
                await anyio.sleep(0.1)

        async def ask(at_s: float, **query: str) -> tuple[int, dict[str, Any]]:
            at = datetime.fromtimestamp(at_s, tz=UTC).isoformat()
            url = f"{scheduler.url}/v1/whatif/moments/default/train"
            async with http.get(url, params={"at": at, **query}) as response:
                return response.status, json.loads(await response.read())

        # Decisions and copies of the ledger reach the event stream a moment later.
        with anyio.fail_after(30):
            while (
                (found := await ask(refused_s))[0] != 200
                or found[1]["compared"] != 20
                or found[1]["differing"]
            ):
                await anyio.sleep(0.1)
        moment = found[1]
        assert (moment["differing"], moment["assumed"], moment["nodes_feasible"]) == ([], 0, 0)
        assert sorted(one["node"] for one in moment["nodes"]) == NAMES
        by_node = {one["node"]: one for one in moment["nodes"]}
        recorded = moment["decision"]["closest"]
        assert len(recorded) == 16
        assert [by_node[one["node"]] for one in recorded] == recorded
        (first,), (third,) = by_node[NAMES[0]]["devices"], by_node[NAMES[2]]["devices"]
        assert [one["name"] for one in first["holders"]] == ["h1"]
        assert "holders" not in third
        assert moment["decision"]["request"]["containers"][0]["requests"][0]["memory_mib"] == 20_000
        status, one = await ask(refused_s, node=NAMES[1])
        assert (status, [node["node"] for node in one["nodes"]]) == (200, [NAMES[1]])
        status, problem = await ask(refused_s - 3600)
        assert status == 404
        assert "recorded filter of pod default/train at or before that time" in str(problem)

        words = ["explain", "pod", "train", "--scheduler", scheduler.url]
        at = datetime.fromtimestamp(refused_s, tz=UTC).isoformat()
        shown = await anyio.to_thread.run_sync(
            partial(CliRunner().invoke, main, [*words, "--at", at])
        )
        assert shown.exit_code == 0, shown.output
        assert "then: 0 nodes fit, 20 refuse, device by device:" in shown.output
        assert "default/h1 9000 MiB" in shown.output
        assert "All 20 recorded nodes are equal." in shown.output
        wrong = CliRunner().invoke(main, [*words, "--at", "yesterday"])
        assert wrong.exit_code == 2
        assert "--at yesterday: is no time" in wrong.output
