# SPDX-License-Identifier: Apache-2.0
"""A real node as a fixture: kubelet, containerd and runc in namespaces of their own.

::

    async with run_node(NodeSpec(...), directory) as node:
        node.plugin_directory, node.pod_resources_socket   # as seen from outside
        await node.restart_kubelet()                       # containers go on
        await node.reboot()                                # everything ends; disks stay

``directory`` needs a short path, for it holds unix sockets. Kubelet runs with its defaults, save
that it never evicts, tolerates swap and cgroup version 1, and leaves firewall and sysctls of this
machine alone. With ``NodeSpec.network`` the node has a network of its own and cannot write outside
of ``directory``. On exit every process, mount, cgroup and network device of the node is gone.
"""

import json
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import yaml
from msgspec import Struct

from hami_sim.ports import free_port
from hami_sim.process import Process
from tests.cluster.node.containerd import SOCKET, Containerd
from tests.cluster.node.image import Image
from tests.cluster.node.space import Space

START_S = 60.0
_STATIC_PODS = "manifests"
_POD_VOLUME = re.compile(r"/kubelet/pods/([0-9a-f-]{36})/")


class NodeSpec(Struct, frozen=True, kw_only=True):
    """Parts of the node."""

    name: str
    kubelet: Path
    """The program; called with ``kubelet_arguments`` before its own."""
    kubelet_arguments: tuple[str, ...] = ()
    kubeconfig: Path
    """Credentials of ``system:node:<name>``."""
    client_ca: Path | None = None
    """Authority that signs client certificates of kubelet's own server."""
    configuration: Mapping[str, Any] = {}
    """Further fields of KubeletConfiguration."""
    labels: Mapping[str, str] = {}
    devices: tuple[str, ...] = ()
    """Names of device nodes in the node's /dev; no driver is behind them."""
    network: Path | None = None
    """File of the network namespace of a contained node."""
    address: str = ""
    """The node's address; empty: one of this machine."""
    runtimes: Mapping[str, Path] = {}
    """OCI runtimes by the name of their handler, in addition to runc."""
    images: tuple[Image, ...] = ()
    """Images that the node has from the start, beside those of busybox."""


class RealNode:
    """One running node; made by ``run_node``."""

    def __init__(self, spec: NodeSpec, directory: Path) -> None:
        self.spec = spec
        self.name = spec.name
        self.directory = directory
        self.space = Space(directory, devices=spec.devices, network=spec.network)
        self.containerd = Containerd(
            self.space,
            runtimes=spec.runtimes,
            images=spec.images,
        )
        self.kubelet: Process | None = None
        self.port = 0
        self.static_pods = directory / _STATIC_PODS
        self.static_pods.mkdir(parents=True, exist_ok=True)

    @property
    def plugin_directory(self) -> Path:
        """Kubelet's device plugin directory."""
        return self.space.kubelet_directory / "device-plugins"

    @property
    def pod_resources_socket(self) -> Path:
        """Kubelet's PodResources socket."""
        return self.space.kubelet_directory / "pod-resources" / "kubelet.sock"

    async def start(self) -> None:
        """Bring the node up; returns when kubelet listens for plugins."""
        await self.space.start()
        await self.containerd.start()
        await self.start_kubelet()

    async def start_kubelet(self) -> None:
        """Start kubelet; returns when it listens."""
        before = _identity(self.plugin_directory / "kubelet.sock")
        if self.kubelet is None:
            self.port = free_port()
        self._configure()
        arguments: list[str | Path] = [
            self.spec.kubelet,
            *self.spec.kubelet_arguments,
            "--config",
            self.directory / "kubelet.yaml",
            "--kubeconfig",
            self.spec.kubeconfig,
            *("--hostname-override", self.name),
            *("--node-ip", self.spec.address or _address()),
            "--cert-dir",
            self.directory / "pki",
            *("--node-labels", ",".join(f"{k}={v}" for k, v in self.spec.labels.items())),
            "--v=2",
        ]
        self.kubelet = Process(
            f"kubelet-{self.name}",
            self.space.command(arguments),
            log=self.directory / "logs" / "kubelet.log",
        )
        self.kubelet.start()
        with anyio.fail_after(START_S):
            while not (
                _identity(self.plugin_directory / "kubelet.sock") not in ((0, 0), before)
                and _answers(self.plugin_directory / "kubelet.sock")
                and _answers(self.pod_resources_socket)
            ):
                if not self.kubelet.is_running():
                    raise RuntimeError(self.kubelet.tail())
                await anyio.sleep(0.05)

    async def kill_kubelet(self) -> None:
        """End kubelet as a crash would; containers go on."""
        if self.kubelet is not None:
            await self.kubelet.kill()

    async def restart_kubelet(self) -> None:
        """Restart kubelet; returns when it listens again."""
        await self.kill_kubelet()
        await self.start_kubelet()

    async def restart_containerd(self) -> None:
        """Restart containerd as an update of its package does; containers go on."""
        await self.containerd.stop()
        await self.containerd.start()

    async def cut_power(self) -> None:
        """End everything at once; data in memory is lost."""
        await self.space.kill()
        for process in (self.kubelet, self.containerd.process):
            if process is not None:
                await process.kill()
        self.containerd.remove_bridge()

    async def reboot(self) -> None:
        """Cut the power and come up again, with another boot id; disks keep what they have."""
        await self.cut_power()
        await self.start()

    def add_static_pod(self, pod: Mapping[str, Any]) -> None:
        """Give kubelet a pod that the API server does not know before."""
        fresh = self.directory / f"{pod['metadata']['name']}.yaml"
        fresh.write_text(yaml.safe_dump(pod))
        fresh.replace(self.static_pods / fresh.name)

    def remove_static_pod(self, name: str) -> None:
        """Remove such a pod."""
        (self.static_pods / f"{name}.yaml").unlink()

    def log(self, pod: str, container: str, *, namespace: str = "default") -> str:
        """Output of the newest run of a container; empty before its first line."""
        pods = sorted((self.directory / "log" / "pods").glob(f"{namespace}_{pod}_*"), key=_changed)
        files = sorted((pods[-1] / container).glob("*.log"), key=_run) if pods else []
        if not files:
            return ""
        lines = files[-1].read_text(errors="replace").splitlines()
        # <time> <stream> <F(ull)|P(artial)> <text>
        parts = [line.split(" ", 3) for line in lines]
        return "".join(p[3] + ("\n" if p[2] == "F" else "") for p in parts if len(p) == 4)

    def container_pids(self) -> dict[str, int]:
        """Process ids, as the node counts them, of running containers by container id."""
        listed = subprocess.run(
            self.containerd.ctr("task", "ls"),
            capture_output=True,
            text=True,
            check=True,
        )
        rows = [line.split() for line in listed.stdout.splitlines()[1:]]
        return {row[0]: int(row[1]) for row in rows if row[2] == "RUNNING"}

    def container_mounts(self) -> list[tuple[str, str]]:
        """(uid of the pod, mounts as /proc shows them) of each running container with volumes."""
        found = []
        for pid in self.container_pids().values():
            try:
                mounts = (self.space.seen(Path("/proc")) / str(pid) / "mountinfo").read_text()
            except OSError:
                continue
            if (pod := _POD_VOLUME.search(mounts)) is not None:
                found.append((pod[1], mounts))
        return found

    def _configure(self) -> None:
        authentication: dict[str, Any] = {"anonymous": {"enabled": False}}
        if self.spec.client_ca is not None:
            authentication["x509"] = {"clientCAFile": str(self.spec.client_ca)}
        never = ("memory.available", "nodefs.available", "nodefs.inodesFree")
        configuration = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": self.port,
            "healthzPort": 0,
            "authentication": authentication,
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.space.cgroup}",
            "failSwapOn": False,
            "failCgroupV1": False,
            "enforceNodeAllocatable": ["none"],
            "evictionHard": dict.fromkeys(
                (*never, "imagefs.available", "imagefs.inodesFree", "pid.available"), "0%"
            ),
            "imageGCHighThresholdPercent": 100,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "maxPods": 150,
            "podLogsDir": "/var/log/pods",
            "resolvConf": "",
            "staticPodPath": str(self.static_pods),
            **self.spec.configuration,
        }
        (self.directory / "kubelet.yaml").write_text(yaml.safe_dump(configuration))


def base() -> Path | None:
    """Best parent for the directory of a node: in memory, where this machine has such a place."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else None


@asynccontextmanager
async def run_node(spec: NodeSpec, directory: Path) -> AsyncIterator[RealNode]:
    """A node that is up on entry and gone, without a trace, on exit."""
    node = RealNode(spec, directory)
    try:
        await node.start()
        yield node
    finally:
        with anyio.CancelScope(shield=True):
            await node.cut_power()


def _address() -> str:
    """An address of this machine that is not loopback, which kubelet does not take."""
    told = subprocess.run(
        ["ip", "-json", "-4", "address", "show", "up", "scope", "global"],
        capture_output=True,
        text=True,
        check=True,
    )
    addresses = [
        entry["local"] for link in json.loads(told.stdout) for entry in link.get("addr_info", ())
    ]
    return str(addresses[0]) if addresses else "0.0.0.0"  # noqa: S104 - kubelet then looks itself


def _identity(path: Path) -> tuple[int, int]:
    """Changes when the file is re-created; zeros when there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def _run(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else -1
