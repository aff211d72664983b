# SPDX-License-Identifier: Apache-2.0
"""A whole cluster in processes on this machine.

Real nats-server, real services, simulated hardware and kubelets, and a simulated or a real control
plane (see ``hami_sim.planes``).

The demo and the end-to-end tests use it. Every part is a process of its own, so that tests can
kill, freeze and restart it: ``nats``, ``apiserver``, ``kube-scheduler``, ``kubelet``, ``webhook``,
``scheduler``, ``registry`` and one ``agent-<node>`` per node. With ``taps`` a proxy stands before
each service's NATS and API connection and before the scheduler, so that a failure can hit one exact
point of an exchange. Reports are read from NATS, the API and the processes. Times in seconds.
"""

import json
import logging
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import nats
import nats.js.errors
import yaml
from anyio.abc import TaskGroup
from msgspec import Struct
from nats.aio.client import Client as NatsClient

from hami_common import namespaces
from hami_common.bus import subjects
from hami_common.errors import Denied, HamiError, NotFound, SettingsInvalid, Unavailable
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.codec import decode
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_common.pods.signing import Signer, Verifier
from hami_common.vendors.catalog import Catalog
from hami_sim.certs import CertificateAuthority
from hami_sim.hardware import profile as hardware
from hami_sim.hardware.control import SimulatedControl
from hami_sim.hardware.fake_nvml import STATE_VARIABLE, FakeNvml, write_capabilities
from hami_sim.kubelet.launcher import driver_programs
from hami_sim.kubelet.settings import KubeletSettings
from hami_sim.kubernetes.pki import HOST
from hami_sim.natsd import NatsServer
from hami_sim.planes import PlaneName, answers, make_plane
from hami_sim.ports import free_port
from hami_sim.process import Process
from hami_sim.tap import Tap

START_S = 60.0
NODE_MEMORY_MIB = 2 << 20
"""Memory that a simulated node reports: 2 TiB."""
_POLL_S = 0.05
_SERVES_CLAIMS = {
    "scheduler": {"dra.enabled": "true"},
    "nodeagent": {"dra.enabled": "true"},
    "webhook": {"policy.dra_enabled": "true"},
}
"""Settings of the component ``dra``, by service."""
CDI_DIRECTORIES = KubeletSettings().cdi_directories
SYSTEM_NAMESPACE = namespaces.SYSTEM
AGENTS_NAMESPACE = namespaces.AGENTS

Document = dict[str, Any]
_log = logging.getLogger(__name__)


class NodeSpec(Struct, frozen=True, kw_only=True):
    """One simulated node."""

    name: str
    profile: str
    """Hardware profile, see ``hami_sim.hardware.profile.names()``."""
    others: tuple[str, ...] = ()
    """Profiles of further vendors whose devices are in the same node."""
    agent_paths: tuple[str, ...] = ()
    """Directories that the agent and its plugin proxy import first: the sources of another version.
    """

    def profiles(self) -> dict[str, str]:
        """Path of the hardware profile by vendor."""
        return {
            hardware.load(name).vendor: str(hardware.path_of(name))
            for name in (self.profile, *self.others)
        }


DEFAULT_NODES = (
    NodeSpec(name="gpu-h200", profile="8xH200"),
    NodeSpec(name="gpu-a100", profile="8xA100-40"),
    NodeSpec(name="gpu-t4", profile="4xT4"),
    NodeSpec(name="gpu-a30", profile="2xA30"),
)


class ClusterSpec(Struct, frozen=True, kw_only=True):
    """Specification of the cluster to build."""

    nodes: tuple[NodeSpec, ...] = DEFAULT_NODES
    """Empty: the control plane and our central services only; the caller adds nodes."""
    slots: int = 10
    """Maximum number of containers that share a device."""
    injection: str = "env"
    """Injection method of agents: ``env``, ``devices`` or ``cdi``."""
    nvml_library: str = ""
    """A fake ``libnvidia-ml.so.1``: agents then find their devices through NVML, through the real
    binding, instead of reading the hardware profile. Containers get the fake driver beside it."""
    limiter: str = ""
    """The in-container library that holds containers to their shares; empty: nothing does."""
    console: str = ""
    """Directory of the built console, which the registry serves; empty: none."""
    taps: bool = False
    dra: bool = False
    """Component ``dra``: agents publish slices, the scheduler and the webhook serve claims, and
    kube-scheduler sends every pod to the extender (Kubernetes 1.36.2 or newer). A pod is in
    allocation mode ``dra`` by its annotation or its namespace's label ``hami.io/allocation-mode``;
    ``settings["webhook"]["policy.allocation_mode"] = "dra"`` makes it the default.
    """
    settings: Mapping[str, Mapping[str, str]] = {}
    """Further ``--set`` settings by service word.

    (``scheduler``, ``webhook``, ``registry``, ``nodeagent``).
    """
    pretended_paths: tuple[str, ...] = ()
    """Directories of vendors' drivers on a node: mounts from these directories are simulated."""
    node_cpu: str = "64"
    backoff_s: float = 1.0
    """First pause of kube-scheduler before it tries a pod again."""
    schedulers: int = 1
    """Scheduler replicas, all active; kube-scheduler calls the first, ``scheduler``."""
    plane: PlaneName | None = None
    """Control plane; ``None`` leaves the choice to ``HAMI_PLANE``, else it is the simulated one."""


class Cluster:
    """One running cluster; made by ``run_cluster``."""

    def __init__(self, spec: ClusterSpec, directory: Path, group: TaskGroup) -> None:
        """Keep everything of the cluster below ``directory``; run the taps in ``group``."""
        directory.mkdir(parents=True, exist_ok=True)
        self._group = group
        self.spec = spec
        self.directory = directory
        self.nats = NatsServer(directory / "nats")
        self.processes: dict[str, Process] = {}
        self.taps: dict[str, Tap] = {}
        """``<service>-nats``, ``<service>-api`` and ``extender`` when taps are on."""
        self.ports: dict[str, int] = {}
        self.timings_s: dict[str, float] = {}
        self.hardware = {
            node.name: SimulatedControl(directory / f"{node.name}.control.json")
            for node in spec.nodes
        }
        """Controls that inject faults into devices, by node."""
        self.nvml = {
            node.name: FakeNvml(self._machine(node.name), hardware.load(node.profile), node.name)
            for node in spec.nodes
            if spec.nvml_library and "nvidia" in node.profiles()
        }
        """The same where the devices are found through NVML."""
        self.plane = make_plane(spec.plane, directory)
        self._session: aiohttp.ClientSession | None = None
        self._token = ""
        self._bus: NatsClient | None = None

    # ---------------------------------------------------------------- building

    @property
    def cdi_directory(self) -> Path:
        """Directory for the CDI specs of claims, the same for all nodes."""
        return self.directory / "cdi"

    def _machine(self, node: str) -> Path:
        """State file of the node's fake devices, in a directory that containers see."""
        path = self.directory / "machines" / node / "state"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.plane.kubeconfig

    def verifier(self) -> Verifier:
        """Verifier of the cluster's allocation annotations."""
        return Verifier.from_pems(p.read_bytes() for p in (self.directory / "trusted").iterdir())

    @property
    def api_url(self) -> str:
        """Base URL of the API server."""
        return self.plane.url

    def url(self, service: str) -> str:
        """Base URL of a service's plain HTTP port."""
        return f"http://{HOST}:{self.ports[service]}"

    @property
    def schedulers(self) -> list[str]:
        """Names of the scheduler processes."""
        return ["scheduler", *(f"scheduler-{i}" for i in range(1, self.spec.schedulers))]

    @property
    def agents(self) -> list[str]:
        """Names of the agent processes."""
        return [f"agent-{node.name}" for node in self.spec.nodes]

    @property
    def plugin_proxies(self) -> list[str]:
        """Names of the processes that hold kubelet's connections for the agents."""
        return [f"plugin-proxy-{node.name}" for node in self.spec.nodes]

    async def _make_tap(self, name: str, port: int, *, tls: ssl.SSLContext | None = None) -> int:
        tap = Tap(port, tls=tls)
        await self._group.start(tap.serve)
        self.taps[name] = tap
        return tap.port

    async def _nats_url_for(self, service: str) -> str:
        port = self.nats.port
        if self.spec.taps:
            port = await self._make_tap(f"{service}-nats", port)
        return f"nats://{HOST}:{port}"

    async def _kubeconfig_for(self, service: str, name: str) -> Path:
        server = ""
        if self.spec.taps:
            port = await self._make_tap(f"{name}-api", self.plane.port, tls=self.plane.tls())
            server = f"http://{HOST}:{port}"
        return await self.plane.login(service, name, server=server)

    def _add(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.processes[name] = Process(
            name,
            [sys.executable, "-m", module, *arguments],
            log=self.directory / "logs" / f"{name}.log",
            env={"PYTHONUNBUFFERED": "1", **(env or {})},
        )

    async def _add_service(
        self,
        name: str,
        module: str,
        service: str,
        settings: Mapping[str, str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.ports.setdefault(name, free_port())
        effective = {
            "nats_urls": await self._nats_url_for(name),
            "kubeconfig": str(await self._kubeconfig_for(service, name)),
            "http_port": str(self.ports[name]),
            "grace_s": "5",
            **settings,
            **(_SERVES_CLAIMS.get(service, {}) if self.spec.dra else {}),
            **self.spec.settings.get(service, {}),
        }
        arguments = [
            part for key, value in effective.items() for part in ("--set", f"{key}={value}")
        ]
        self._add(name, module, arguments, env)

    async def start(self) -> None:
        """Bring everything up.

        Returns when each part is ready, nodes offer their devices, and schedulers receive reports
        of the agents.
        """
        begun = anyio.current_time()
        try:
            await self.plane.start()
        finally:
            self.processes.update(self.plane.processes)
        await self.nats.start()
        self._token = self.plane.access().token
        self.timings_s["kubernetes_and_nats"] = anyio.current_time() - begun
        if self.spec.dra:
            await self._install_dra()
        await self._add_all()
        for process in self.processes.values():
            process.start()
        for name in ("webhook", "registry", *self.schedulers, *self.agents):
            await self.ready(name)
        await self._wait_for(self.plane.is_scheduler_ready, "kube-scheduler")
        await self._register_webhook()
        await self._wait_for(self.nodes_offer_devices, "kubelet")
        for name in self.schedulers:
            await self._wait_for(partial(self._hears_agents, name), name)
        self._bus = await nats.connect(self.nats.url, name="harness", max_reconnect_attempts=-1)
        self.timings_s["cluster_ready"] = anyio.current_time() - begun

    async def _install_dra(self) -> None:
        """Create the roles and classes of the component ``dra``."""
        for document in self.plane.dra_objects():
            kind = document["kind"].lower()
            plural = f"{kind}es" if kind.endswith("s") else f"{kind}s"
            namespace = document["metadata"].get("namespace", "")
            at = f"namespaces/{namespace}/{plural}" if namespace else plural
            await self.create(f"/apis/{document['apiVersion']}/{at}", document)

    async def _add_all(self) -> None:
        keys = self.directory / "keys"
        keys.mkdir(exist_ok=True)
        signer = Signer.generate()
        (keys / "signing.pem").write_bytes(signer.private_pem())
        (keys / "signing.pem").chmod(0o600)
        trusted = self.directory / "trusted"
        trusted.mkdir(exist_ok=True)
        (trusted / "current.pub").write_bytes(signer.public_pem())
        certificate, key, _ = CertificateAuthority().issue_files(
            self.directory / "tls", [HOST, "localhost"]
        )
        devices = self.directory / "devices.toml"
        devices.write_text(f"[defaults]\nslots = {self.spec.slots}\n")
        self.ports["webhook-tls"] = free_port()
        await self._add_service(
            "webhook",
            "hami_webhook",
            "webhook",
            {
                "tls_port": str(self.ports["webhook-tls"]),
                "tls_cert_file": str(certificate),
                "tls_key_file": str(key),
                **self.plane.webhook_settings,
            },
        )
        self.ports.setdefault("scheduler", free_port())
        await self._add_service(
            "registry",
            "hami_registry",
            "registry",
            {
                "device_config_file": str(devices),
                "scheduler_url": self.url("scheduler"),
                "console_dir": self.spec.console,
            },
        )
        for name in self.schedulers:
            signing = {"signing_key_file": str(keys / "signing.pem"), "replica": name}
            await self._add_service(name, "hami_scheduler", "scheduler", signing)
        extender_port = self.ports["scheduler"]
        if self.spec.taps:
            extender_port = await self._make_tap("extender", extender_port)
        await self.plane.add_scheduler(
            f"http://{HOST}:{extender_port}", backoff_s=self.spec.backoff_s, dra=self.spec.dra
        )
        self.processes.update(self.plane.processes)
        if self.spec.nodes:
            await self._add_nodes(trusted)

    async def _add_nodes(self, trusted: Path) -> None:
        """Add kubelet, and an agent and a proxy for each node."""
        kubelet_root = self.directory / "kubelet"
        self._add(
            "kubelet",
            "hami_sim.kubelet",
            [
                *(
                    "--kubeconfig",
                    self.plane.kubelet_login([node.name for node in self.spec.nodes]),
                ),
                *("--root", str(kubelet_root)),
                *("--node", ",".join(node.name for node in self.spec.nodes)),
                *("--cpu", self.spec.node_cpu, "--owner-pid", str(os.getpid())),
                "--kill-on-exit",
                *self._driver_arguments(),
                *(f"--pretended-path={path}" for path in self.spec.pretended_paths),
                *(f"--cdi-directory={path}" for path in (*CDI_DIRECTORIES, self.cdi_directory)),
            ],
        )
        for node in self.spec.nodes:
            root = kubelet_root / node.name
            await self._add_service(
                f"agent-{node.name}",
                "hami_nodeagent",
                "nodeagent",
                {
                    "node_name": node.name,
                    "device_plugin_dir": str(root / "device-plugins"),
                    "plugin_socket_dir": str(self.directory / "plugins" / node.name),
                    "pod_resources_socket": str(root / "pod-resources" / "kubelet.sock"),
                    "state_dir": str(self.directory / "agents" / node.name),
                    "trusted_keys_dir": str(trusted),
                    "injection": self.spec.injection,
                    "pods_dir": str(root / "pods"),
                    "usage.owners": "namespace",
                    "host_memory_mib": str(NODE_MEMORY_MIB),
                    "dra.registry_dir": str(root / "plugins_registry"),
                    "dra.plugin_dir": str(self.directory / "dra" / node.name),
                    "dra.region_dir": str(self.directory / "claims" / node.name),
                    "dra.cdi_dir": str(self.cdi_directory),
                    **self._limiter_settings(node),
                    **self._driver_settings(node),
                },
                {STATE_VARIABLE: str(self._machine(node.name)), **_python_path(node)},
            )
            self._add(
                f"plugin-proxy-{node.name}",
                "hami_nodeagent",
                [
                    "plugin-proxy",
                    *("--set", f"device_plugin_dir={root / 'device-plugins'}"),
                    *("--set", f"plugin_socket_dir={self.directory / 'plugins' / node.name}"),
                ],
                _python_path(node),
            )

    def _driver_arguments(self) -> list[str]:
        """Arguments that pass the driver for containers to kubelet."""
        if not self.spec.nvml_library:
            return []
        return [
            *("--driver-libraries", str(Path(self.spec.nvml_library).parent)),
            *("--driver-programs", str(driver_programs())),
            *("--driver-state", str(self.directory / "machines" / "{node}" / "state")),
        ]

    def _limiter_settings(self, node: NodeSpec) -> dict[str, str]:
        if not self.spec.limiter:
            return {"enforcement": "none"}
        return {
            "library": self.spec.limiter,
            "library_dir": str(self.directory / "libraries" / node.name),
            "priority.directory": str(self.directory / "priorities" / node.name),
        }

    def _driver_settings(self, node: NodeSpec) -> dict[str, str]:
        profiles = node.profiles()
        nvidia = profiles.pop("nvidia", "")
        parts = {word: str(self.directory / f"{node.name}.{word}.parts.json") for word in profiles}
        others = {
            word: {"simulated_profile": path, "partitions": parts[word]}
            for word, path in profiles.items()
        }
        settings = {
            "drivers.serve": "[]",
            "drivers.vendors": msgspec.json.encode(others).decode(),
        }
        if not nvidia:
            return {**settings, "drivers.nvidia.enabled": "false"}
        if self.spec.nvml_library:
            proc = self.directory / "proc" / node.name
            write_capabilities(proc, hardware.load(nvidia))
            return {
                **settings,
                "drivers.nvidia.library_path": self.spec.nvml_library,
                "drivers.nvidia.proc_root": str(proc),
            }
        return {
            **settings,
            "drivers.nvidia.simulated_profile": nvidia,
            "drivers.nvidia.simulated_control": str(self.hardware[node.name].path),
            "drivers.nvidia.simulated_partitions": str(
                self.directory / f"{node.name}.nvidia.parts.json"
            ),
        }

    async def _register_webhook(self) -> None:
        arguments = [
            *(sys.executable, "-m", "hami_webhook", "--render-configuration"),
            *("--url", f"https://{HOST}:{self.ports['webhook-tls']}"),
            *("--ca-file", str(self.directory / "tls" / "ca.crt")),
            *(("--with-modes",) if self.spec.dra else ()),
        ]
        rendered = await anyio.run_process(arguments)
        for document in yaml.safe_load_all(rendered.stdout):
            if document:
                await self.create(
                    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", document
                )

    async def nodes_offer_devices(self) -> bool:
        """Return true if every node's kubelet announces allocatable devices of each vendor."""
        nodes = (await self.request("GET", "/api/v1/nodes"))["items"]
        counts = {vendor.name: vendor.resources.all() for vendor in Catalog.from_settings().vendors}
        offered = {
            node["metadata"]["name"]: {
                name
                for name, amount in node["status"].get("allocatable", {}).items()
                if amount.isdigit() and int(amount) > 0
            }
            for node in nodes
        }
        return all(
            counts[vendor] & offered.get(node.name, set())
            for node in self.spec.nodes
            for vendor in node.profiles()
        )

    async def _hears_agents(self, scheduler: str) -> bool:
        """Return true if the scheduler could allocate devices of each vendor on each node."""
        async with self.session.get(f"{self.url(scheduler)}/v1/snapshot") as response:
            if response.status != HTTPStatus.OK:
                return False
            seen = await response.json()
        known = {(one["node"], one["vendor"]) for one in seen.get("devices", ())}
        heard = known - {(node, vendor) for node, vendor in seen.get("silent", ())}
        return heard >= {
            (node.name, vendor) for node in self.spec.nodes for vendor in node.profiles()
        }

    async def stop(self) -> None:
        """End all processes, services first, then what they stand on."""
        order = [
            "kube-scheduler",
            "webhook",
            *self.schedulers,
            "registry",
            *self.agents,
            *self.plugin_proxies,
        ]
        async with anyio.create_task_group() as group:
            for name in order:
                if name in self.processes:
                    group.start_soon(self.processes[name].stop)
        for name in ("kubelet", *self.plane.stop_order):
            if name in self.processes:
                await self.processes[name].stop()
        if self._session is not None:
            await self._session.close()
        if self._bus is not None:
            await self._bus.close()
        await self.nats.stop()

    # ---------------------------------------------------------------- waiting

    async def _answers(self, url: str) -> bool:
        return await answers(self.session, url)

    async def _wait_for(self, condition: Callable[[], Awaitable[bool]], name: str) -> None:
        process = self.processes.get(name)
        with anyio.move_on_after(START_S):
            while not await condition():
                if process is not None and process.starts and not process.is_running():
                    raise Unavailable(peer=name, detail=f"ended while starting; {process.tail()}")
                await anyio.sleep(_POLL_S)
            return
        tail = process.tail() if process is not None else ""
        raise Unavailable(peer=name, detail=f"not ready in {START_S:g} s; {tail}")

    async def ready(self, name: str) -> None:
        """Wait until a service (again) answers that it is ready."""
        await self._wait_for(partial(self._answers, f"{self.url(name)}/readyz"), name)

    async def api_answers(self) -> bool:
        """Return true if the API server reports that it is ready."""
        return await self._answers(f"{self.api_url}/readyz")

    async def until(
        self, what: str, condition: Callable[[], Awaitable[bool]], *, limit_s: float = 60.0
    ) -> None:
        """Wait until ``condition`` holds; ``Unavailable`` names ``what`` did not happen."""
        with anyio.move_on_after(limit_s):
            while not await condition():
                await anyio.sleep(_POLL_S)
            return
        raise Unavailable(peer="cluster", detail=f"{what} did not happen in {limit_s:g} s")

    # ---------------------------------------------------------------- Kubernetes

    @property
    def session(self) -> aiohttp.ClientSession:
        """The harness's own HTTP session."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=20),
                connector=aiohttp.TCPConnector(ssl=self.plane.access().ssl_context()),
            )
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        body: Document | None = None,
        *,
        content_type: str = "application/json",
    ) -> Document:
        """One call of the Kubernetes API as the administrator."""
        headers = {"Content-Type": content_type}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = json.dumps(body) if body is not None else None
        async with self.session.request(
            method, f"{self.api_url}{path}", data=data, headers=headers
        ) as response:
            text = await response.text()
            if response.status == 404:  # noqa: PLR2004 - HTTP Not Found
                raise NotFound(what=path)
            if response.status >= 400:  # noqa: PLR2004 - HTTP errors
                raise Denied(peer="kube-apiserver", detail=text, status=response.status)
            document: Document = json.loads(text)
            return document

    async def create(self, path: str, document: Document) -> Document:
        """POST an object."""
        return await self.request("POST", path, document)

    async def create_pod(self, manifest: Document, *, namespace: str = "default") -> Document:
        """Create a pod from a manifest."""
        return await self.create(f"/api/v1/namespaces/{namespace}/pods", manifest)

    async def pod(self, name: str, *, namespace: str = "default") -> PodView:
        """A pod as our services see it; ``NotFound`` when it is gone."""
        return msgspec.convert(await self.pod_document(name, namespace=namespace), PodView)

    async def pod_document(self, name: str, *, namespace: str = "default") -> Document:
        """A pod as JSON."""
        return await self.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")

    async def pods(self, *, namespace: str = "default") -> list[PodView]:
        """All pods of a namespace."""
        items = (await self.request("GET", f"/api/v1/namespaces/{namespace}/pods"))["items"]
        return [msgspec.convert(item, PodView) for item in items]

    async def delete_pod(self, name: str, *, namespace: str = "default") -> None:
        """Delete a pod; it is gone once its containers have ended."""
        await self.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}")

    async def pod_is(self, name: str, phase: str, *, namespace: str = "default") -> bool:
        """Return true if the pod exists and is in this phase."""
        try:
            return (await self.pod(name, namespace=namespace)).status.phase == phase
        except NotFound:
            return False

    async def pod_is_gone(self, name: str, *, namespace: str = "default") -> bool:
        """Return true if the pod does not exist."""
        try:
            await self.pod(name, namespace=namespace)
        except NotFound:
            return True
        return False

    async def container_log(self, pod: str, container: str, *, namespace: str = "default") -> str:
        """Return a container's log from its node's kubelet; empty before it ran."""
        view = await self.pod(pod, namespace=namespace)
        if not view.spec.node_name:
            return ""
        node = await self.request("GET", f"/api/v1/nodes/{view.spec.node_name}")
        port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
        url = f"http://{HOST}:{port}/containerLogs/{namespace}/{pod}/{container}"
        try:
            async with self.session.get(url) as response:
                return await response.text() if response.status == 200 else ""  # noqa: PLR2004 - OK
        except aiohttp.ClientConnectionError:
            return ""

    # ---------------------------------------------------------------- bus

    @property
    def bus(self) -> NatsClient:
        """The harness's own connection, never through a tap."""
        if self._bus is None:
            raise Unavailable(peer="nats", detail="the cluster has not been started")
        return self._bus

    async def _history(self, bucket: str, key: str) -> list[tuple[int, bytes]]:
        """Every stored value of a key with its sequence, oldest first, by the stream leader."""
        stream, subject = subjects.stream_of(bucket), subjects.kv_subject(bucket, key)
        found: list[tuple[int, bytes]] = []
        sequence = 1
        while True:
            try:
                message = await self.bus.jetstream().get_msg(
                    stream, seq=sequence, subject=subject, next=True
                )
            except nats.js.errors.NotFoundError:
                return found
            found.append((message.seq or 0, message.data or b""))
            sequence = (message.seq or 0) + 1

    async def ledger_of(self, node: str, uid: str) -> list[tuple[int, AllocationRecord]]:
        """All ledger records of a pod on a node with their sequences, oldest first."""
        key = subjects.allocation_key(node, uid)
        history = await self._history(subjects.ALLOC_BUCKET, key)
        return [
            (sequence, decode(value, AllocationRecord, what=key)) for sequence, value in history
        ]

    async def states_of(self, node: str, uid: str) -> list[StateRecord]:
        """All state records of a pod on a node, oldest first."""
        key = subjects.allocation_key(node, uid)
        history = await self._history(subjects.STATE_BUCKET, key)
        return [decode(value, StateRecord, what=key) for _, value in history]

    async def event_count(self) -> int:
        """Messages in the integration stream."""
        info = await self.bus.jetstream().stream_info(subjects.EVENTS_STREAM)
        return info.state.messages

    # ---------------------------------------------------------------- read-back

    async def story_of(self, name: str, *, namespace: str = "default") -> Document:
        """Everything about one pod, read back from the API, NATS and its processes."""
        document = await self.pod_document(name, namespace=namespace)
        view = msgspec.convert(document, PodView)
        node, uid = view.spec.node_name, view.metadata.uid
        ledger = await self.ledger_of(node, uid) if node else []
        states = ["reserved"] if ledger else []
        if node:
            states += [state.state for state in await self.states_of(node, uid)]
        states += ["released" for _, record in ledger if record.op == "release"]
        placed = next((r for _, r in reversed(ledger) if r.op != "release"), None)
        shares = {c.name: c.shares for c in placed.containers} if placed else {}
        trace = view.annotations().get(annotations.TRACEPARENT, "").split("-")
        scheduled = [c for c in view.status.conditions or [] if c.type == "PodScheduled"]
        statuses = {
            status["name"]: status
            for group in ("initContainerStatuses", "containerStatuses")
            for status in document["status"].get(group) or []
        }
        containers = [
            {
                "name": container.name,
                "kind": kind,
                "pid": _pid_of(statuses.get(container.name, {})),
                "stdout": await self.container_log(name, container.name, namespace=namespace),
                "devices": [
                    {
                        "uuid": s.uuid,
                        "memory_mib": s.memory_mib,
                        "core_pct": s.core_pct,
                        "exclusive": s.exclusive,
                        "vendor": s.vendor,
                        "partition": s.part,
                    }
                    for s in shares.get(container.name, ())
                ],
            }
            for kind, container in view.containers_in_order()
        ]
        return {
            "namespace": view.metadata.namespace,
            "name": view.metadata.name,
            "uid": uid,
            "phase": view.status.phase,
            "node": node,
            "reason": next(
                (c.message for c in scheduled if c.status != "True"), view.status.message
            ),
            "states": states,
            "ledger_seq": ledger[-1][0] if ledger else 0,
            "trace_id": trace[1] if len(trace) == 4 else "",  # noqa: PLR2004 - W3C trace context
            "containers": containers,
        }

    async def explain(self, name: str, *, namespace: str = "default") -> Document:
        """The registry's explanation of a pod; empty when it knows nothing."""
        url = f"{self.url('registry')}/v1/explain/{namespace}/{name}"
        async with self.session.get(url) as response:
            document: Document = await response.json()
            return document if response.status == 200 else {}  # noqa: PLR2004 - HTTP OK


_SOCKET = "hami-nvidia.sock"
_SOCKET_PATH_LIMIT = 107
"""Characters of ``sun_path`` but the last, unix(7)."""


def _python_path(node: NodeSpec) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(node.agent_paths)} if node.agent_paths else {}


def _pid_of(status: Document) -> int | None:
    """Process id from a simulated container id ``sim://<pid>``."""
    identity = str(status.get("containerID", ""))
    text = identity.removeprefix("sim://").split("/")[0]
    return int(text) if text.isdigit() else None


@asynccontextmanager
async def run_cluster(spec: ClusterSpec, directory: Path) -> AsyncIterator[Cluster]:
    """A cluster that is ready on entry and gone on exit.

    ``SettingsInvalid`` when the sockets of plugins would have longer names than the kernel takes.
    """
    for node in spec.nodes:
        socket = directory / "kubelet" / node.name / "device-plugins" / _SOCKET
        if len(str(socket)) > _SOCKET_PATH_LIMIT:
            raise SettingsInvalid(
                field="directory",
                problem=f"{socket} is longer than {_SOCKET_PATH_LIMIT} characters",
                fix="choose a shorter one",
            )
    async with anyio.create_task_group() as group:
        cluster = Cluster(spec, directory, group)
        try:
            await _start(cluster)
            yield cluster
        finally:
            with anyio.move_on_after(60, shield=True):
                await cluster.stop()
        group.cancel_scope.cancel()


async def _start(cluster: Cluster) -> None:
    try:
        await cluster.start()
    except HamiError:
        for name, process in cluster.processes.items():
            if process.starts and not process.is_running():
                log = process.tail()
                _log.error("a part of the cluster ended", extra={"part": name, "log": log})
        raise
