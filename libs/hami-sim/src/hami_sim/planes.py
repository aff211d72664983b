# SPDX-License-Identifier: Apache-2.0
"""The two control planes a cluster can stand on: the simulated one and the real one.

Both offer the same: processes to start and kill, logins for our services and for kubelets, and a
kube-scheduler that calls our extender. Nothing above this module asks which one it has, except to
choose it. On the real one our services log in as their service accounts, under the shipped roles,
and kubelets as nodes.
"""

import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

import aiohttp
import anyio
import msgspec
import yaml

from hami_common.errors import Unavailable
from hami_sim.kube import Access, Objects
from hami_sim.kubernetes import ControlPlane, Programs, configuration, programs
from hami_sim.kubernetes.configuration import Document
from hami_sim.kubernetes.pki import HOST
from hami_sim.ports import free_port
from hami_sim.process import Process

PlaneName = Literal["sim", "real"]
VARIABLE: Final = "HAMI_PLANE"
"""Variable that names the default plane."""
APISERVER: Final = "apiserver"
SCHEDULER: Final = "kube-scheduler"
START_S: Final = 60.0
_POLL_S: Final = 0.05
_OK: Final = 200
_FAILED: Final = 400
WRITES: Final = frozenset({"create", "update", "patch", "delete"})


class Plane(Protocol):
    """Control plane of Kubernetes that a cluster uses."""

    name: PlaneName
    processes: dict[str, Process]
    """``apiserver``, ``kube-scheduler`` once it was added, and what else the plane runs."""

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        ...

    @property
    def url(self) -> str:
        """Base URL of the API server."""
        ...

    @property
    def port(self) -> int:
        """Port of the API server."""
        ...

    @property
    def stop_order(self) -> Sequence[str]:
        """Processes without kube-scheduler, those that others need last."""
        ...

    @property
    def webhook_settings(self) -> Mapping[str, str]:
        """Settings of the webhook for who the scheduler is here."""
        ...

    def access(self) -> Access:
        """Return the administrator's access to the API server."""
        ...

    def tls(self) -> ssl.SSLContext | None:
        """Return a proxy's TLS context for the API server; ``None`` for plain text."""
        ...

    async def start(self) -> None:
        """Start the API server and what it needs, and wait until pods can be created."""
        ...

    async def login(self, service: str, name: str, *, server: str = "") -> Path:
        """Kubeconfig for the process ``name`` of a service, of another address if given."""
        ...

    def kubelet_login(self, nodes: Sequence[str]) -> str:
        """Kubeconfig for kubelets; ``{node}`` in the path stands for the node's name."""
        ...

    async def add_scheduler(self, extender_url: str, *, backoff_s: float, dra: bool) -> None:
        """Set up kube-scheduler; with ``dra``, every pod meets the extender."""
        ...

    def dra_objects(self) -> list[Document]:
        """Return what the component ``dra`` adds to the API of this plane."""
        ...

    async def is_scheduler_ready(self) -> bool:
        """Return true if kube-scheduler is ready."""
        ...

    async def write_agents(self) -> list[str]:
        """User agent of every successful write so far that the API server's audit kept."""
        ...


class SimulatedPlane:
    """The simulated API server and scheduler; every client is the administrator."""

    name: PlaneName = "sim"

    def __init__(self, directory: Path) -> None:
        """Keep everything below ``directory``."""
        self._directory = directory
        self.port = free_port()
        self.processes: dict[str, Process] = {}
        self.stop_order: Sequence[str] = (APISERVER,)
        users = '["kubernetes-admin", "system:admin", "admin"]'
        self.webhook_settings: Mapping[str, str] = {"policy.trusted_users": users}

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self._directory / "admin.kubeconfig"

    @property
    def url(self) -> str:
        """Base URL of the API server."""
        return f"http://{HOST}:{self.port}"

    def access(self) -> Access:
        """Return the administrator's access to the API server."""
        return Access.from_kubeconfig(self.kubeconfig)

    def tls(self) -> None:
        """It speaks plain text."""

    def _add(self, name: str, module: str, arguments: Sequence[str]) -> None:
        self.processes[name] = Process(
            name,
            [sys.executable, "-m", module, *arguments],
            log=self._directory / "logs" / f"{name}.log",
            env={"PYTHONUNBUFFERED": "1"},
        )

    async def start(self) -> None:
        """Start the API server."""
        arguments = ["--port", str(self.port), "--kubeconfig", str(self.kubeconfig)]
        journal = self._directory / "etcd.journal"
        self._add(APISERVER, "hami_sim.apiserver", [*arguments, "--data", str(journal)])
        process = self.processes[APISERVER]
        process.start()
        async with aiohttp.ClientSession() as session:
            with anyio.move_on_after(START_S):
                while process.is_running():
                    if await answers(session, f"{self.url}/readyz"):
                        return
                    await anyio.sleep(_POLL_S)
        raise Unavailable(peer=APISERVER, detail=f"did not start; {process.tail()}")

    async def login(self, service: str, name: str, *, server: str = "") -> Path:
        """The administrator's kubeconfig, of another address if given."""
        del service
        if not server:
            return self.kubeconfig
        config = yaml.safe_load(self.kubeconfig.read_text())
        config["clusters"][0]["cluster"]["server"] = server
        path = self._directory / f"{name}.kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path

    def kubelet_login(self, nodes: Sequence[str]) -> str:
        """The administrator's kubeconfig."""
        del nodes
        return str(self.kubeconfig)

    async def add_scheduler(self, extender_url: str, *, backoff_s: float, dra: bool) -> None:
        """Set up the simulated kube-scheduler."""
        arguments = ["--kubeconfig", str(self.kubeconfig), "--extender-url", extender_url]
        arguments += ["--initial-backoff-s", f"{backoff_s:g}", *(["--dra"] if dra else [])]
        self._add(SCHEDULER, "hami_sim.kubescheduler", arguments)

    def dra_objects(self) -> list[Document]:
        """Return the classes; every client is the administrator, so no roles."""
        return [one for one in configuration.dra_objects() if one["kind"] == "DeviceClass"]

    async def is_scheduler_ready(self) -> bool:
        """Return true always: pods wait until the scheduler runs."""
        return True

    async def write_agents(self) -> list[str]:
        """Read the audit, which the simulated server keeps in memory."""
        async with Objects(self.access()) as client:
            entries = (await client.at("/hami-sim/audit"))["items"]
        return [
            str(entry.get("user_agent", ""))
            for entry in entries
            if entry["verb"] in WRITES and entry["code"] < _FAILED
        ]


class RealPlane:
    """etcd, kube-apiserver, kube-controller-manager and kube-scheduler."""

    name: PlaneName = "real"

    def __init__(self, directory: Path) -> None:
        """Keep everything below ``directory``; the programs are found by the environment."""
        self.control = ControlPlane(directory / "kubernetes", Programs.from_environment())
        self.processes: dict[str, Process] = {}
        self.stop_order: Sequence[str] = (programs.CONTROLLERS, APISERVER, programs.ETCD)
        self.webhook_settings: Mapping[str, str] = {}

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.control.kubeconfig

    @property
    def url(self) -> str:
        """Base URL of the API server."""
        return self.control.url

    @property
    def port(self) -> int:
        """Port of the API server."""
        return self.control.ports[programs.APISERVER]

    def access(self) -> Access:
        """Return the administrator's access to the API server."""
        return self.control.access()

    def tls(self) -> ssl.SSLContext | None:
        """Trust the cluster's authority."""
        return ssl.create_default_context(cadata=self.control.pki.ca_pem)

    async def start(self) -> None:
        """Start all but kube-scheduler and make our services' accounts."""
        try:
            await self.control.start()
        finally:
            self._take_processes()
        await self.control.install_accounts()

    def _take_processes(self) -> None:
        self.processes.update(
            (APISERVER if name == programs.APISERVER else name, process)
            for name, process in self.control.processes.items()
        )

    async def login(self, service: str, name: str, *, server: str = "") -> Path:
        """Kubeconfig of the service's account."""
        account = f"hami-{service}"
        return await self.control.kubeconfig_for_account(account, name=name, server=server)

    def kubelet_login(self, nodes: Sequence[str]) -> str:
        """One kubeconfig per node, as kubelet has it."""
        paths = {node: self.control.kubeconfig_for_node(node) for node in nodes}
        node, path = next(iter(paths.items()))
        return str(path.with_name(path.name.replace(node, "{node}")))

    async def add_scheduler(self, extender_url: str, *, backoff_s: float, dra: bool) -> None:
        """Set up kube-scheduler under its account."""
        login = await self.control.kubeconfig_for_account("hami-kube-scheduler", name=SCHEDULER)
        self.control.add_scheduler(login, extender_url=extender_url, backoff_s=backoff_s, dra=dra)
        self._take_processes()

    def dra_objects(self) -> list[Document]:
        """Return the roles and classes."""
        return configuration.dra_objects()

    def add_default_scheduler(self) -> Process:
        """Set up a kube-scheduler without the extender in place of the other, which has ended."""
        process = self.control.add_default_scheduler()
        self._take_processes()
        return process

    async def is_scheduler_ready(self) -> bool:
        """Return true if kube-scheduler has synced its caches."""
        return await self.control.is_scheduler_ready()

    async def scheduler_metrics(self) -> str:
        """Return kube-scheduler's metrics in Prometheus' text format."""
        return await self.control.scheduler_metrics()

    @property
    def audit_log(self) -> Path:
        """One JSON document per line."""
        return self.control.audit_log

    async def write_agents(self) -> list[str]:
        """Read the audit log."""
        agents = []
        for line in self.control.audit_log.read_bytes().splitlines():
            entry = msgspec.json.decode(line)
            code = (entry.get("responseStatus") or {}).get("code", 0)
            if entry["verb"] in WRITES and code < _FAILED:
                agents.append(str(entry.get("userAgent", "")))
        return agents


def chosen(name: PlaneName | None) -> PlaneName:
    """The plane that is meant: the one named, else the environment's, else the simulated one."""
    wanted = name or os.environ.get(VARIABLE) or "sim"
    if wanted == "real":
        return "real"
    if wanted == "sim":
        return "sim"
    msg = f"{VARIABLE}={wanted}: want sim or real"
    raise ValueError(msg)


def make_plane(name: PlaneName | None, directory: Path) -> Plane:
    """The plane for a cluster in ``directory``; nothing runs yet."""
    return RealPlane(directory) if chosen(name) == "real" else SimulatedPlane(directory)


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Return true if a server answers a GET with OK."""
    try:
        async with session.get(url) as response:
            return response.status == _OK
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
