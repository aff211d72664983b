# SPDX-License-Identifier: Apache-2.0
"""Attacks the services over the bus: a simulated cluster of real processes and a real nats-server.

Messages go out in groups. After each group every service is asked whether it is alive; the
processor time that its process uses until it answers is the time its event loop was held.
"""

import json
import os
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from hami_common.errors import HamiError
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.attack.fuzz import messages
from tests.attack.fuzz.laws import DETAIL, TEXT_MOST, Case, Told, chance_of, resident_mib
from tests.attack.fuzz.requests import ERROR
from tests.e2e.conftest import small_pod

SPEC = ClusterSpec(
    nodes=(
        NodeSpec(name=messages.OTHER, profile="2xA30"),
        NodeSpec(name=messages.OWN, profile="4xT4"),
    ),
    backoff_s=0.2,
    plane="sim",
)
GROUP = 50
READ_EVERY = 20
"""Groups between two readings of the services' own HTTP interfaces."""
ANSWER_S = 60.0
GOOD_POD_S = 90.0
GROUP_MARK = re.compile(r"^ *\| ")
"""Prefix of each line of an exception in a group."""
ERROR_LINE = re.compile(r"(?!ExceptionGroup|BaseExceptionGroup)[A-Za-z_][\w.]*(: |$)")
FORESEEN = ("hami_common.errors.", "msgspec.")
TICK_HZ = os.sysconf("SC_CLK_TCK")
READ = (
    ("registry", "/v1/nodes"),
    ("registry", "/v1/devices"),
    ("registry", "/v1/allocations"),
    ("registry", "/v1/explain/team/train"),
    ("registry", "/v1/config"),
    ("registry", "/metrics"),
    ("scheduler", "/v1/snapshot"),
    ("scheduler", "/v1/queues"),
    ("scheduler", "/metrics"),
    ("webhook", "/metrics"),
    (f"agent-{messages.OTHER}", "/metrics"),
    (f"agent-{messages.OWN}", "/metrics"),
)


class ServiceEnded(Exception):
    """A process of the cluster has exited."""


class _Services:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._names = ("webhook", "registry", *cluster.schedulers, *cluster.agents)
        self._sent = 0
        self._held_s = 0.0
        self._start_mib: dict[str, float] = {}
        self._read = {name: _size(cluster.processes[name].log) for name in self._names}

    async def take(self, case: Case) -> Told:
        await self._cluster.bus.publish(case.kind, case.body)
        self._sent += 1
        kind = next((kind for kind in messages.KINDS if messages.is_of(kind, case.kind)), "other")
        problem = ""
        if self._sent % GROUP == 0:
            problem = await self._rest()
        if not problem and self._sent % (GROUP * READ_EVERY) == 0:
            problem = await self._read_all()
        return Told(problem=problem, outcome=kind)

    async def _rest(self) -> str:
        """Wait until every service has answered; returns what they logged as unexpected."""
        await self._cluster.bus.flush(timeout=int(ANSWER_S))
        held: list[float] = []

        async def ask(name: str) -> None:
            begun_s = self._used_s(name)
            await self._get(name, "/healthz")
            held.append(self._used_s(name) - begun_s)

        async with anyio.create_task_group() as group:
            for name in self._names:
                group.start_soon(ask, name)
        self._held_s += max(held)
        return next((text for name in self._names if (text := self._logged(name))), "")

    async def _read_all(self) -> str:
        """Read all interfaces; returns the first that answers 500."""
        for name, path in READ:
            status = await self._get(name, path)
            if status == ERROR:
                return f"HTTP {status}: {name} {path}"
        return ""

    async def _get(self, name: str, path: str) -> int:
        url = f"{self._cluster.url(name)}{path}"
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with self._cluster.session.get(url, timeout=timeout) as response:
                await response.read()
                return response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServiceEnded(f"{name}{DETAIL}{self._last_words(name)}") from error

    def _used_s(self, name: str) -> float:
        process = self._cluster.processes[name]
        try:
            text = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
        except OSError as error:
            raise ServiceEnded(f"{name}{DETAIL}{self._last_words(name)}") from error
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICK_HZ

    def _logged(self, name: str) -> str:
        """Return the first unforeseen exception that the service has logged since the last look."""
        log = self._cluster.processes[name].log
        with log.open("rb") as file:
            file.seek(self._read[name])
            text = file.read()
        self._read[name] += len(text)
        for line in text.splitlines():
            if problem := _unforeseen(line):
                return f"{name}: {problem}"
        return ""

    def _last_words(self, name: str) -> str:
        lines = self._cluster.processes[name].log.read_bytes().splitlines()
        found = [problem for line in lines[-20:] if (problem := _unforeseen(line))]
        return found[-1] if found else "no reason was logged"

    async def finish(self) -> str:
        """Run a good pod on the node that the sender has no login for."""
        problem = await self._rest() or await self._read_all()
        pod = small_pod("good", nodeSelector={"kubernetes.io/hostname": messages.OTHER})
        try:
            await self._cluster.create_pod(pod)
            await self._cluster.until("the good pod runs", self._runs, limit_s=GOOD_POD_S)
        except HamiError as error:
            story = (await self._cluster.story_of("good"))["reason"]
            return problem or f"a good pod does not run afterwards{DETAIL}{error}; {story}"
        return problem

    async def _runs(self) -> bool:
        return await self._cluster.pod_is("good", "Running")

    def processor_s(self) -> float:
        return self._held_s

    def resident_mib(self) -> float:
        """Return the most that any service has grown by."""
        grown = []
        for name in self._names:
            now_mib = resident_mib(self._cluster.processes[name].pid or 0)
            grown.append(now_mib - self._start_mib.setdefault(name, now_mib))
        return max(grown)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _unforeseen(line: bytes) -> str:
    """Return the exception in a line of a log, unless it refuses input."""
    try:
        entry: dict[str, Any] = json.loads(line)
    except ValueError:
        return ""
    lines = [GROUP_MARK.sub("", one) for one in str(entry.get("exception", "")).splitlines()]
    errors = [one for one in lines if ERROR_LINE.match(one)]
    if not errors or errors[-1].startswith(FORESEEN):
        return ""
    ours = [one for one in lines if "/hami_" in one]
    where = ours[-1].split(", in")[0].rpartition("/")[2].replace('", line ', ":") if ours else ""
    kind, _, text = errors[-1].partition(": ")
    return f"{entry.get('message', '')}: {kind} at {where}{DETAIL}{text[:TEXT_MOST]}"


class Bus:
    """Messages on the bus."""

    name = "bus"
    full = 100_000
    few = 1_000
    is_shrunk = False

    def make(self, seed: str, number: int) -> Case:
        """Make a message; its subject is the kind of the case."""
        return messages.make(chance_of(seed, self.name, number))

    @asynccontextmanager
    async def service(self) -> AsyncIterator[_Services]:
        """Start a cluster."""
        with tempfile.TemporaryDirectory(prefix="hf-") as folder:
            async with run_cluster(SPEC, Path(folder)) as cluster:
                yield _Services(cluster)
