# SPDX-License-Identifier: Apache-2.0
"""Services without NATS and without an API server: alive, not ready, and ready soon after both.

Each service runs as its own process with the settings of its image, but for addresses and paths.
"""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import anyio
import pytest

from hami_common.pods.signing import Signer
from hami_sim.apiserver import ApiServer
from hami_sim.apiserver import Settings as ApiSettings
from hami_sim.certs import CertificateAuthority
from hami_sim.hardware import profile as hardware
from hami_sim.natsd import NatsServer
from hami_sim.ports import free_port
from hami_sim.process import Process

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

TOKEN = "t"
SERVICES = ("registry", "scheduler", "nodeagent", "webhook")
NEEDS_PEERS = ("registry", "scheduler", "nodeagent")
PROBES = 15
"""Probes of each service during the outage."""
PROBE_S = 0.2
READY_S = 40.0
"""Limit from the return of the peers to readiness; retries come every second or two."""


class Site:
    """Processes, and the addresses of peers that do not run yet."""

    def __init__(self, directory: Path, http: aiohttp.ClientSession) -> None:
        self.directory = directory
        self.nats = NatsServer(directory / "nats")
        self.api_port = free_port()
        self.port_by_service = {name: free_port() for name in SERVICES}
        self.processes: dict[str, Process] = {}
        self._http = http
        CertificateAuthority().issue_files(directory, ["localhost"])
        (directory / "signing.pem").write_bytes(Signer.generate().private_pem())
        self.api = ApiServer(ApiSettings(port=self.api_port, admin_token=TOKEN))
        self.api.url = f"http://127.0.0.1:{self.api_port}"
        self.api.kubeconfig(directory / "kubeconfig")

    def settings(self, name: str) -> dict[str, str]:
        here = self.directory
        own: dict[str, dict[str, str]] = {
            "registry": {},
            "scheduler": {"signing_key_file": str(here / "signing.pem")},
            "webhook": {
                "tls_host": "127.0.0.1",
                "tls_port": "0",
                "tls_cert_file": str(here / "tls.crt"),
                "tls_key_file": str(here / "tls.key"),
            },
            "nodeagent": {
                "node_name": "n",
                "enforcement": "none",
                "injection": "env",
                "drivers.nvidia.simulated_profile": str(hardware.path_of("2xA30")),
                **{
                    key: str(here / key)
                    for key in ("device_plugin_dir", "state_dir", "trusted_keys_dir")
                },
                "pod_resources_socket": str(here / "pod-resources.sock"),
                "priority.directory": str(here / "priority"),
            },
        }
        return {
            "nats_urls": self.nats.url,
            "kubeconfig": str(here / "kubeconfig"),
            "http_host": "127.0.0.1",
            "http_port": str(self.port_by_service[name]),
            **own[name],
        }

    def start(self, name: str) -> None:
        words = [sys.executable, "-m", f"hami_{name}"]
        for key, value in self.settings(name).items():
            words += ["--set", f"{key}={value}"]
        self.processes[name] = Process(name, words, log=self.directory / f"{name}.log")
        self.processes[name].start()

    async def stop(self) -> dict[str, int]:
        codes = {name: await process.stop() for name, process in self.processes.items()}
        return {name: -1 if code is None else code for name, code in codes.items()}

    async def probe(self, name: str, path: str) -> int:
        """Status of the answer; 0: none."""
        try:
            async with self._http.get(
                f"http://127.0.0.1:{self.port_by_service[name]}{path}"
            ) as answer:
                return answer.status
        except aiohttp.ClientConnectionError:
            return 0

    async def until(self, name: str, path: str, status: int, within_s: float) -> None:
        with anyio.fail_after(within_s):
            while await self.probe(name, path) != status:
                assert self.processes[name].is_running(), self.log(name)
                await anyio.sleep(0.05)

    def log(self, name: str) -> str:
        return self.processes[name].log.read_text()[-2000:]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    for folder in ("device_plugin_dir", "trusted_keys_dir", "priority"):
        (tmp_path / folder).mkdir()
    timeout = aiohttp.ClientTimeout(total=10.0)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        site = Site(tmp_path, http)
        # A first start chooses the port of all later ones.
        await site.nats.start()
        await site.nats.stop()
        try:
            yield site
        finally:
            await site.stop()
            await site.nats.stop()


async def test_services_outlive_missing_peers_and_are_ready_soon_after_they_come(
    site: Site,
) -> None:
    for name in SERVICES:
        site.start(name)
    for name in SERVICES:
        await site.until(name, "/healthz", 200, within_s=30)
    for _ in range(PROBES):
        for name in SERVICES:
            assert await site.probe(name, "/healthz") == 200, site.log(name)
        for name in NEEDS_PEERS:
            assert await site.probe(name, "/readyz") == 503, name
        await anyio.sleep(PROBE_S)
    assert await site.probe("webhook", "/readyz") == 200
    for name in NEEDS_PEERS:
        assert "waiting for a peer" in site.log(name)
    await site.nats.start()
    async with site.api:
        for name in SERVICES:
            await site.until(name, "/readyz", 200, within_s=READY_S)
        # Those are the processes of the beginning: none has ended meanwhile.
        assert await site.stop() == dict.fromkeys(SERVICES, 0)


@pytest.mark.parametrize("name", NEEDS_PEERS)
async def test_service_that_waits_for_peers_stops_at_once(site: Site, name: str) -> None:
    site.start(name)
    await site.until(name, "/healthz", 200, within_s=30)
    begun_s = anyio.current_time()
    assert await site.stop() == {name: 0}
    assert anyio.current_time() - begun_s < 15.0


async def test_paths_of_an_api_that_starts_are_answered_with_503(site: Site) -> None:
    site.start("registry")
    await site.until("registry", "/healthz", 200, within_s=30)
    assert await site.probe("registry", "/v1/nodes") == 503
