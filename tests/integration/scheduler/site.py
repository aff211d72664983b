# SPDX-License-Identifier: Apache-2.0
"""Real bus, simulated API server, and schedulers as processes that can be killed and frozen."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import Heartbeat, NodeDevices
from hami_common.pods.signing import Signer, Verifier
from hami_common.runtime import natsio
from hami_common.runtime.tasks import background
from hami_sim.apiserver import ApiServer
from hami_sim.apiserver import Settings as ApiSettings
from hami_sim.kube import Access
from hami_sim.natsd import NatsServer
from hami_sim.process import Process
from tests.support import ledgercheck
from tests.support.kubeclient import KubeClient
from tests.unit.scheduler.shell import builders

Obj = dict[str, Any]
POLL_S = 0.02


async def until(condition: Callable[[], bool], *, within_s: float = 40.0) -> None:
    """Wait for a condition of another process."""
    with anyio.fail_after(within_s):
        while not condition():
            await anyio.sleep(POLL_S)


class SchedulerProcess:
    """One scheduler as a process."""

    def __init__(self, process: Process, http: aiohttp.ClientSession) -> None:
        self.process = process
        self._http = http
        self.url = ""

    async def start(self) -> None:
        """Start and learn the port from the log."""
        seen = self.process.log.stat().st_size if self.process.log.exists() else 0
        self.process.start()

        def is_listening() -> bool:
            assert self.process.is_running(), self.process.log.read_text()[seen:]
            for line in self.process.log.read_bytes()[seen:].splitlines():
                entry = json.loads(line) if line.startswith(b"{") else {}
                if entry.get("message") == "listening":
                    self.url = f"http://127.0.0.1:{entry['port']}"
            return bool(self.url)

        self.url = ""
        await until(is_listening)

    async def until_ready(self) -> None:
        """Wait until calls are answered with decisions, and each agent's heartbeat has arrived."""
        with anyio.fail_after(40):
            while await self.status("/readyz") != 200:
                await anyio.sleep(POLL_S)
            while json.loads(await self.get("/v1/snapshot")).get("silent"):
                await anyio.sleep(POLL_S)

    async def status(self, path: str) -> int:
        try:
            async with self._http.get(self.url + path) as response:
                return response.status
        except aiohttp.ClientConnectionError:
            return 0

    async def get(self, path: str) -> bytes:
        async with self._http.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        async with self._http.post(self.url + path, data=body) as response:
            return response.status, await response.read()

    async def filter(self, pod: Obj, names: list[str]) -> Any:
        status, body = await self.post("/filter", builders.filter_body(pod, names))
        assert status == 200, body
        return json.loads(body)

    async def bind(self, pod: Obj, node: str) -> str:
        """Error text; ``cut off`` when the process ended meanwhile."""
        try:
            status, body = await self.post("/bind", builders.bind_body(pod, node))
        except aiohttp.ClientError:
            return "cut off"
        assert status == 200, body
        error: str = json.loads(body)["Error"]
        return error


BEAT_S = 0.1
"""Interval of heartbeats."""


class Site:
    """Everything of one test."""

    def __init__(
        self, directory: Path, nats: NatsServer, api: ApiServer, kube: KubeClient, bus: natsio.Bus
    ) -> None:
        self.directory = directory
        self.nats = nats
        self.api = api
        self.kube = kube
        self.bus = bus
        self.signer = Signer.generate()
        self.verifier = Verifier.from_pems([self.signer.public_pem()])
        self.capacity: list[NodeDevices] = []
        self.records = natsio.NatsBucket(bus, subjects.ALLOC_BUCKET)
        self._devices = natsio.NatsBucket(bus, subjects.DEVICES_BUCKET)
        self._publisher = natsio.NatsPublisher(bus)
        self.schedulers: list[SchedulerProcess] = []
        (directory / "signing.pem").write_bytes(self.signer.private_pem())
        api.kubeconfig(directory / "kubeconfig")

    async def add_node(self, devices: NodeDevices) -> None:
        self.capacity.append(devices)
        await self.kube.create("nodes", {"metadata": {"name": devices.node}})
        await self.put_devices(devices)

    async def put_devices(self, devices: NodeDevices) -> None:
        key = subjects.devices_key(devices.node, devices.vendor)
        await self._devices.append(key, codec.encode(devices))

    async def beat(self) -> None:
        """Publish heartbeats of all nodes until cancelled."""
        while True:
            for devices in self.capacity:
                beat = Heartbeat(
                    node=devices.node, boot_id="boot-1", seq=1, time_s=0.0, vendors=("nvidia",)
                )
                await self._publisher.publish(subjects.heartbeat(devices.node), codec.encode(beat))
            await anyio.sleep(BEAT_S)

    async def add_pod(self, name: str, **request: Any) -> Obj:
        pod = builders.pod(name, **request)
        del pod["metadata"]["uid"], pod["status"]
        return await self.kube.create("pods", pod, "default")

    async def pods(self) -> list[Obj]:
        return list((await self.kube.list("pods", "default"))["items"])

    async def bound(self) -> dict[str, str]:
        return {
            pod["metadata"]["name"]: pod["spec"]["nodeName"]
            for pod in await self.pods()
            if pod["spec"].get("nodeName")
        }

    async def log(self) -> list[AllocationRecord]:
        """Newest record of every key."""
        return [
            codec.decode(entry.value, AllocationRecord, what=entry.key)
            for entry in await self.records.latest()
        ]

    async def check(self) -> None:
        ledgercheck.check(
            await self.pods(), await self.log(), verifier=self.verifier, capacity=self.capacity
        )

    async def check_settled(self, *, within_s: float = 40.0) -> None:
        """Wait until pods and ledger agree."""
        deadline = anyio.current_time() + within_s
        while True:
            try:
                ledgercheck.check_settled(
                    await self.pods(),
                    await self.log(),
                    verifier=self.verifier,
                    capacity=self.capacity,
                )
            except AssertionError:
                if anyio.current_time() > deadline:
                    raise
                await anyio.sleep(10 * POLL_S)
            else:
                return

    def scheduler(
        self, name: str, http: aiohttp.ClientSession, **settings: Any
    ) -> SchedulerProcess:
        """A scheduler with its own settings file; not started yet."""
        lines = {
            "nats_urls": [self.nats.url],
            "kubeconfig": str(self.directory / "kubeconfig"),
            "signing_key_file": str(self.directory / "signing.pem"),
            "http_port": 0,
            "replica": name,
            "grace_s": 5.0,
            **settings,
        }
        config = self.directory / f"{name}.toml"
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items()))
        process = Process(
            name,
            [sys.executable, "-m", "hami_scheduler", "--config", str(config)],
            log=self.directory / f"{name}.log",
        )
        scheduler = SchedulerProcess(process, http)
        self.schedulers.append(scheduler)
        return scheduler


@asynccontextmanager
async def open_site(directory: Path, nats: NatsServer) -> AsyncIterator[Site]:
    """A site for the time of the block; its schedulers end with it."""
    async with (
        ApiServer(ApiSettings()) as api,
        KubeClient(Access(url=api.url, token=api.token)) as kube,
        natsio.connect([nats.url], name="test", start_timeout_s=30) as bus,
        background() as group,
    ):
        await natsio.ensure_bus(bus)
        site = Site(directory, nats, api, kube, bus)
        group.start_soon(site.beat)
        try:
            yield site
        finally:
            for scheduler in site.schedulers:
                await scheduler.process.kill()
