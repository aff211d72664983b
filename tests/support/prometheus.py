# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes a test's targets once a second; skips where there is none.

The program is Debian's package ``prometheus``. Where ``HAMI_REQUIRE_CLUSTER=1`` it must be there.
"""

import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
import yaml

from hami_sim.ports import free_port
from hami_sim.process import Process
from tests.cluster.needs import is_required

HOST = "127.0.0.1"
START_S = 30.0


def program_or_skip(name: str) -> str:
    """Path of ``prometheus`` or ``promtool``; skips or fails without it."""
    found = shutil.which(name)
    if found is not None:
        return found
    reason = f"there is no {name} here: install the Debian package prometheus"
    if is_required():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class Prometheus:
    """One running server."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        """Ask the server on ``port``."""
        self._url = f"http://{HOST}:{port}"
        self._session = session

    async def _get(self, path: str, **params: str) -> Any:
        async with self._session.get(f"{self._url}{path}", params=params) as answer:
            return json.loads(await answer.read())

    async def is_ready(self) -> bool:
        """Return True when it answers."""
        try:
            async with self._session.get(f"{self._url}/-/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now; an expression in error fails the test."""
        answer = await self._get("/api/v1/query", query=expr)
        assert answer["status"] == "success", (expr, answer)
        data = answer["data"]
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    async def value(self, expr: str) -> float:
        """The one value of an expression; NaN when it has none or several."""
        found = await self.query(expr)
        return found[0][1] if len(found) == 1 else float("nan")

    async def targets(self) -> list[tuple[str, str, str]]:
        """(job, health, error) of each target."""
        answer = await self._get("/api/v1/targets")
        return [
            (one["labels"]["job"], one["health"], one["lastError"])
            for one in answer["data"]["activeTargets"]
        ]

    async def rules(self) -> dict[str, tuple[str, str]]:
        """Health and error of each rule, by name."""
        answer = await self._get("/api/v1/rules")
        return {
            rule["name"]: (rule["health"], rule.get("lastError", ""))
            for group in answer["data"]["groups"]
            for rule in group["rules"]
        }


@asynccontextmanager
async def run_prometheus(
    directory: Path, scrape: Sequence[Mapping[str, Any]], rules: Sequence[Path] = ()
) -> AsyncIterator[Prometheus]:
    """Run one with these ``scrape_configs`` for the time of the block."""
    program = program_or_skip("prometheus")
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {
                    "scrape_interval": "1s",
                    "scrape_timeout": "1s",
                    "evaluation_interval": "1s",
                },
                "rule_files": [str(path) for path in rules],
                "scrape_configs": list(scrape),
            }
        )
    )
    port = free_port()
    process = Process(
        "prometheus",
        [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={HOST}:{port}",
        ],
        log=directory / "prometheus.log",
    )
    async with aiohttp.ClientSession() as session:
        server = Prometheus(port, session)
        process.start()
        try:
            with anyio.fail_after(START_S):
                while not await server.is_ready():
                    await anyio.sleep(0.05)
            yield server
        finally:
            with anyio.CancelScope(shield=True):
                await process.kill()
