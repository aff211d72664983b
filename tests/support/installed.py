# SPDX-License-Identifier: Apache-2.0
"""An overlay, the shipped dev or another, on a real control plane, with services as processes.

The manifests are applied unchanged with kubectl. The input of each process comes from the API
server, as with kubelet: ConfigMaps and Secrets of the volumes that its pod mounts, tokens of its
ServiceAccount (an agent's bound to a pod on its node), kube-scheduler's configuration, the bus with
its accounts and certificates, calls of the webhook by its Service. An agent's come from the
DaemonSet of its node's first vendor. Different are paths (each below the folder of a volume,
because there is one file system), ports, and the simulated kubelets and devices. Times in seconds.
"""

import base64
import os
import ssl
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import yaml
from anyio.abc import TaskGroup
from nats.aio.client import Client

from hami_common.runtime import natsio
from hami_nodeagent.settings import Settings as AgentSettings
from hami_scheduler.settings import ApiSettings, BindAdmissionSettings
from hami_sim.cluster import (
    AGENTS_NAMESPACE,
    SYSTEM_NAMESPACE,
    Cluster,
    ClusterSpec,
    Document,
    NodeSpec,
)
from hami_sim.kubernetes import ControlPlane, configuration, programs
from hami_sim.kubernetes.pki import HOST, write_kubeconfig
from hami_sim.natsd import NatsServer
from hami_sim.planes import RealPlane
from hami_sim.ports import free_port
from hami_sim.process import Process
from tests.support import inpod
from tests.support.clusterips import ClusterIps, selector_config
from tests.support.kubeclient import KubeClient
from tests.support.shippedbus import relocated

OVERLAYS = configuration.shipped_directory().parent / "overlays"
OVERLAY = OVERLAYS / "dev"
BUS = f"nats.{SYSTEM_NAMESPACE}.svc"
REGISTRY = f"hami-registry.{SYSTEM_NAMESPACE}.svc"
SCHEDULER = f"hami-scheduler.{SYSTEM_NAMESPACE}.svc"
CONSOLE_INDEX = "<!doctype html><title>console</title>"
IN_IMAGE = "/opt/hami/"
"""Folder of files that are in the image, not in a volume."""
SERVERS = {"hami-webhook": "webhook-tls", "hami-bind-admission": "bind-admission"}
"""Servers that the API server calls, by their Services."""
PROGRAM_S = 150.0
"""Longest run of kubectl or hamictl: seconds on an idle machine, minutes beside a test suite."""
TOKEN_S = 3600
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Path of a container's ServiceAccount token."""
SLEEPER = ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.2; done"]
SPEC = ClusterSpec(
    nodes=(
        NodeSpec(name="gpu-a.example", profile="2xA30"),
        NodeSpec(name="gpu-b", profile="2xA30"),
    ),
    node_cpu="100",
    plane="real",
    settings={
        # The delays of production, shortened, because tests wait for them.
        "nodeagent": {"discovery_s": "1", "probe_s": "0.3", "health.recover_s": "1"},
        "scheduler": {
            "preempt_retry_s": "1",
            "capacity_touch_s": "0.3",
            # Nodes are watched only where the racks have labels.
            "topology_labels": '["example.com/rack"]',
        },
    },
)


class Plane(RealPlane):
    """The real control plane, whose API server reaches Services through ``cluster_ips``."""

    control: "_ControlPlane"

    def __init__(self, directory: Path, group: TaskGroup) -> None:
        """As of a cluster; the proxy runs in ``group``."""
        super().__init__(directory)
        self.control = _ControlPlane(directory / "kubernetes", self.control.programs)
        self.cluster_ips = ClusterIps()
        self._group = group

    async def start(self) -> None:
        """Start all but kube-scheduler; accounts and roles come with the overlay."""
        self.control.directory.mkdir(parents=True, exist_ok=True)
        self.control.selector.write_text(selector_config(self.control.socket))
        await self._group.start(self._serve)
        try:
            await self.control.start()
        finally:
            self._take_processes()

    async def _serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with self.cluster_ips.serve(self.control.socket):
            task_status.started()
            await anyio.sleep_forever()


class _ControlPlane(ControlPlane):
    @property
    def selector(self) -> Path:
        return self.directory / "egress-selector.yaml"

    @property
    def socket(self) -> Path:
        return self.directory / "egress.sock"

    def _add(self, name: str, arguments: Sequence[str]) -> Process:
        if name == programs.APISERVER:
            arguments = [*arguments, f"--egress-selector-config-file={self.selector}"]
        return super()._add(name, arguments)


async def run(
    *command: str, check: bool = True, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that calls the API server, whose answers may come from this loop."""
    with anyio.fail_after(PROGRAM_S):
        ended = await anyio.run_process(command, check=False, env=env)
    told = subprocess.CompletedProcess(
        command, ended.returncode, ended.stdout.decode(), ended.stderr.decode()
    )
    assert not check or told.returncode == 0, told.stderr
    return told


class Container:
    """The file system of one container of a pod template."""

    def __init__(self, pod: Document, name: str, folder_by_volume: Mapping[str, Path]) -> None:
        (self.spec,) = (c for c in pod["spec"]["containers"] if c["name"] == name)
        self._folders = {
            mount["mountPath"]: folder_by_volume[mount["name"]]
            for mount in self.spec["volumeMounts"]
        }

    def here(self, path: str) -> Path:
        """Return the local path of a container's path; fails if no volume is mounted there."""
        mounts = [mount for mount in self._folders if Path(path).is_relative_to(mount)]
        assert mounts, f"{path} is below none of {sorted(self._folders)}"
        mount = max(mounts, key=len)
        return self._folders[mount] / Path(path).relative_to(mount)

    @property
    def token(self) -> str:
        """Token of the account that the manifest mounts itself; empty: kubelet mounts the pod's."""
        return (self._folders[ACCOUNT] / "token").read_text() if ACCOUNT in self._folders else ""

    def config(self) -> Path:
        """Return the file of ``--config`` with local paths."""
        arguments = self.spec["args"]
        file = self.here(arguments[arguments.index("--config") + 1])
        text = file.read_text()
        values = {value for value in tomllib.loads(text).values() if isinstance(value, str)}
        for value in values:
            if value.startswith("/") and not value.startswith(IN_IMAGE):
                assert f'"{value}"' in text
                text = text.replace(f'"{value}"', f'"{self.here(value)}"')
        here = file.with_name(f"here-{file.name}")
        here.write_text(text)
        return here


class Installed(Cluster):
    """A cluster made from the shipped manifests."""

    plane: Plane

    def __init__(
        self,
        spec: ClusterSpec,
        directory: Path,
        group: TaskGroup,
        *,
        overlay: Path = OVERLAY,
        before: Callable[["Installed"], Awaitable[None]] | None = None,
    ) -> None:
        """Same as ``Cluster``; the others as of ``run_installed``."""
        super().__init__(spec, directory, group)
        self._overlay = overlay
        self._before = before
        self.plane = Plane(directory, group)
        self.applied: list[str] = []
        """Output of kubectl, a line per object."""
        self.made: list[str] = []
        """Objects that ``hamictl bootstrap`` reports as created."""
        self.operator_seed = Path()
        """File with the seed of the bus's operator."""
        self._stack = AsyncExitStack()
        self._client: KubeClient | None = None

    # ---------------------------------------------------------------- the outside

    @property
    def client(self) -> KubeClient:
        """The administrator's client."""
        assert self._client is not None
        return self._client

    @property
    def bus_url(self) -> str:
        """The bus by its name in the cluster."""
        return f"tls://{BUS}:{self.nats.port}"

    @property
    def ca_file(self) -> Path:
        """The authority of our certificates."""
        return self.directory / "ca.crt"

    def tls_context(self) -> ssl.SSLContext:
        """Trusts that authority alone."""
        return ssl.create_default_context(cafile=str(self.ca_file))

    async def kubectl(
        self, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator."""
        program = self.plane.control.programs.path("kubectl")
        return await run(program, f"--kubeconfig={self.kubeconfig}", *arguments, check=check)

    async def hamictl(
        self, *arguments: str, env: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run hamictl with the cluster's names."""
        return await run(*self.command("hamictl", arguments), check=check, env=env)

    def command(self, module: str, arguments: Sequence[str]) -> list[str]:
        """Command line of a module in a pod."""
        names = ",".join(f"{name}={HOST}" for name in (BUS, REGISTRY, SCHEDULER))
        return [sys.executable, "-P", str(inpod.__file__), names, module, *arguments]

    async def secret(self, name: str) -> dict[str, bytes]:
        """Content of a Secret of ours."""
        found = await self.client.get("secrets", name, SYSTEM_NAMESPACE)
        return {key: base64.b64decode(text) for key, text in found["data"].items()}

    async def token(
        self, account: str, *, namespace: str = SYSTEM_NAMESPACE, audience: str = "", of: str = ""
    ) -> str:
        """Request a token as kubelet would; ``of``: bound to this pod of the namespace."""
        spec: Document = {"expirationSeconds": TOKEN_S}
        if audience:
            spec["audiences"] = [audience]
        if of:
            uid = (await self.client.get("pods", of, namespace))["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": of, "uid": uid}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        made = await self.client.act("serviceaccounts", account, "token", request, namespace)
        return str(made["status"]["token"])

    async def registry(
        self, path: str, token: str = "", *, body: object = None
    ) -> tuple[int, bytes]:
        """Return status and body of the registry's answer, by its name in the cluster.

        With ``body``, which is sent as JSON, by POST.
        """
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"https://{HOST}:{self.ports['registry-tls']}{path}"
        trust = self.tls_context()
        method = "GET" if body is None else "POST"
        async with self.session.request(
            method, url, headers=headers, json=body, ssl=trust, server_hostname=REGISTRY
        ) as told:
            return told.status, await told.read()

    # ---------------------------------------------------------------- building

    def _add(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.processes[name] = Process(
            name,
            self.command(module, arguments),
            log=self.directory / "logs" / f"{name}.log",
            env={"PYTHONUNBUFFERED": "1", **(env or {})},
        )

    async def start(self) -> None:
        """Install, then start every part; returns when it is ready."""
        begun = anyio.current_time()
        try:
            await self.plane.start()
        finally:
            self.processes.update(self.plane.processes)
        self._client = await self._stack.enter_async_context(KubeClient(self.plane.access()))
        self._add_kubelet()
        if self._before is not None:
            await self._before(self)
        await self._install()
        self.timings_s["installed"] = anyio.current_time() - begun
        await self._start_bus()
        self.operator_seed = await self._log_in_as_operator()
        await self._add_all()
        for process in self.processes.values():
            process.start()
        for name in ("webhook", "registry", "scheduler"):
            await self.ready(name)
        await self._wait_for(self.plane.is_scheduler_ready, "kube-scheduler")
        if self._before is None:
            for name in self.agents:
                await self.ready(name)
            await self._wait_for(self.nodes_offer_devices, "kubelet")
        self.timings_s["cluster_ready"] = anyio.current_time() - begun

    async def stop(self) -> None:
        """End everything."""
        await super().stop()
        await self._stack.aclose()

    async def _install(self) -> None:
        self.applied = (await self.kubectl("apply", "-k", str(self._overlay))).stdout.splitlines()
        login = await self.plane.login("bootstrap", "bootstrap")

        async def is_made() -> bool:
            # As the Job does: the rights that were just granted take effect after a moment.
            told = await self.hamictl("bootstrap", "--kubeconfig", str(login), check=False)
            self.made += told.stdout.splitlines()
            return told.returncode == 0

        await self.until("keys and certificates are made", is_made, limit_s=PROGRAM_S)
        bundle = await self.client.get("configmaps", "hami-ca", SYSTEM_NAMESPACE)
        self.ca_file.write_text(bundle["data"]["ca.crt"])
        for service in (await self.client.list("services", SYSTEM_NAMESPACE))["items"]:
            name = SERVERS.get(service["metadata"]["name"])
            if name is not None:
                self.ports[name] = free_port()
                address = f"{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"
                self.plane.cluster_ips.port_by_service[address] = self.ports[name]

    async def _start_bus(self) -> None:
        """Start the shipped server and its file; only its addresses and paths are replaced."""
        pod = await self._template("statefulsets", "hami-nats")
        container = Container(pod, "nats", await self._volumes("nats", pod))
        text = relocated(container.here("/etc/nats/nats.conf").read_text(), container.here)
        accounts = self.directory / "nats" / "accounts.conf"
        accounts.parent.mkdir()
        accounts.write_bytes(container.here("/etc/nats/accounts.conf").read_bytes())
        self.nats = NatsServer(accounts.parent, config_text=text)
        await self.nats.start()

    async def _template(self, kind: str, name: str, namespace: str = SYSTEM_NAMESPACE) -> Document:
        path = f"/apis/apps/v1/namespaces/{namespace}/{kind}/{name}"
        template: Document = (await self.client.call("GET", path))["spec"]["template"]
        return template

    async def _volumes(
        self, name: str, pod: Document, hosts: Mapping[str, Path] | None = None, *, of: str = ""
    ) -> dict[str, Path]:
        """Folder of each volume of a pod, filled as kubelet would fill it; by volume.

        ``hosts``: folders for the host's paths, else empty ones. ``of``: the agent's pod, to which
        tokens are bound.
        """
        folders = {"data": self.directory / "volumes" / name / "data"}
        for volume in pod["spec"]["volumes"]:
            if (host := volume.get("hostPath")) is not None:
                there = self.directory / "hosts" / name / host["path"].strip("/")
                folders[volume["name"]] = (hosts or {}).get(host["path"], there)
                continue
            folder = folders[volume["name"]] = self.directory / "volumes" / name / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            for source in volume.get("projected", {}).get("sources", [volume]):
                for path, content in (await self._content(source, pod, of)).items():
                    (folder / path).write_bytes(content)
        return folders

    async def _content(self, source: Document, pod: Document, of: str) -> dict[str, bytes]:
        """Return the files of one source of a volume, by name."""
        namespace = AGENTS_NAMESPACE if of else SYSTEM_NAMESPACE
        if (token := source.get("serviceAccountToken")) is not None:
            account = pod["spec"]["serviceAccountName"]
            audience = token.get("audience", "")
            text = await self.token(account, namespace=namespace, audience=audience, of=of)
            return {token["path"]: text.encode()}
        if (config := source.get("configMap")) is not None:
            found = await self.client.get("configmaps", config["name"], namespace)
            data = {key: text.encode() for key, text in found["data"].items()}
        elif (config := source.get("secret")) is not None:
            assert not of, "agents mount no Secret"
            data = await self.secret(config["secretName"])
        else:
            return {}
        items = config.get("items")
        return {item["path"]: data[item["key"]] for item in items} if items else data

    async def _login(self, name: str, pod: Document, container: Container, *, of: str = "") -> Path:
        """Kubeconfig with the token that a container of a pod finds, or that kubelet mounts."""
        namespace = AGENTS_NAMESPACE if of else SYSTEM_NAMESPACE
        account = pod["spec"]["serviceAccountName"]
        return write_kubeconfig(
            self.directory / f"{name}.kubeconfig",
            server=self.plane.url,
            ca_file=self.plane.control.pki.file("ca.crt"),
            token=container.token or await self.token(account, namespace=namespace, of=of),
        )

    async def _add_all(self) -> None:
        self.ports["registry-tls"] = free_port()
        self.ports["scheduler-api"] = free_port()
        console = self.directory / "console"
        console.mkdir()
        (console / "index.html").write_text(CONSOLE_INDEX)
        for service, settings in (
            ("webhook", {"tls_host": HOST, "tls_port": str(self.ports["webhook-tls"])}),
            (
                "registry",
                {
                    "tls_host": HOST,
                    "tls_port": str(self.ports["registry-tls"]),
                    "console_dir": str(console),
                    "scheduler_url": f"https://{SCHEDULER}:{self.ports['scheduler-api']}",
                },
            ),
            ("scheduler", {"probe_host": HOST, "probe_port": "0"}),
        ):
            pod = await self._template("deployments", f"hami-{service}")
            container = Container(pod, service, folders := await self._volumes(service, pod))
            if service == "scheduler":
                api = ApiSettings()
                settings |= {
                    "api.host": HOST,
                    "api.port": str(self.ports["scheduler-api"]),
                    "api.tls_cert_file": str(container.here(api.tls_cert_file)),
                    "api.tls_key_file": str(container.here(api.tls_key_file)),
                }
            if "bind-admission" in self.ports and service == "scheduler":
                admission = BindAdmissionSettings()
                settings |= {
                    "bind_admission.host": HOST,
                    "bind_admission.port": str(self.ports["bind-admission"]),
                    "bind_admission.tls_cert_file": str(container.here(admission.tls_cert_file)),
                    "bind_admission.tls_key_file": str(container.here(admission.tls_key_file)),
                }
            if container.token or pod["spec"].get("automountServiceAccountToken", True):
                settings["kubeconfig"] = str(await self._login(service, pod, container))
            env = {one["name"]: one["value"] for one in container.spec.get("env", ())}
            self._add_configured(service, service, container, settings, env)
            if service == "scheduler":
                await self._add_kube_scheduler(pod, Container(pod, "kube-scheduler", folders))
        for node in self.spec.nodes if self._before is None else ():
            await self.run_agent_pod(f"agent-{node.name}", node)
            await self._add_agent(node, f"agent-{node.name}")

    def _add_kubelet(self) -> None:
        self._add(
            "kubelet",
            "hami_sim.kubelet",
            [
                *("--kubeconfig", self.plane.kubelet_login([n.name for n in self.spec.nodes])),
                *("--root", str(self.directory / "kubelet")),
                *("--node", ",".join(node.name for node in self.spec.nodes)),
                *("--cpu", self.spec.node_cpu, "--owner-pid", str(os.getpid())),
                "--kill-on-exit",
                *(f"--pretended-path={path}" for path in self.spec.pretended_paths),
            ],
        )
        self.processes["kubelet"].start()

    async def _add_kube_scheduler(self, pod: Document, container: Container) -> None:
        """Start kube-scheduler with the shipped configuration, leader election included."""
        assert container.token
        login = await self._login("kube-scheduler", pod, container)
        file = container.here("/etc/kube-scheduler/kube-scheduler.yaml")
        document = yaml.safe_load(file.read_text())
        document["clientConnection"] = {"kubeconfig": str(login), "qps": 1000, "burst": 1000}
        (extender,) = document["extenders"]
        extender["urlPrefix"] = self.url("scheduler")
        file.write_text(yaml.safe_dump(document))
        control = self.plane.control
        self.processes["kube-scheduler"] = control.processes[programs.SCHEDULER] = Process(
            "kube-scheduler",
            [
                control.programs.path(programs.SCHEDULER),
                f"--config={file}",
                f"--bind-address={HOST}",
                f"--secure-port={control.ports[programs.SCHEDULER]}",
                f"--authentication-kubeconfig={login}",
                f"--authorization-kubeconfig={login}",
            ],
            log=self.directory / "logs" / "kube-scheduler.log",
        )

    async def run_agent_pod(self, name: str, node: NodeSpec) -> None:
        """The pod of an agent on a node, as far as tokens are concerned: it only sleeps."""
        given = await self._agent_template(node)
        pod = {
            "metadata": {"name": name},  # its DaemonSet would adopt a pod with the labels
            "spec": {
                "serviceAccountName": given["serviceAccountName"],
                "priorityClassName": given["priorityClassName"],
                "tolerations": given["tolerations"],
                "nodeName": node.name,
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "agent", "image": "agent", "command": SLEEPER}],
            },
        }

        await self.until_registered(node.name)
        await self.client.create("pods", pod, AGENTS_NAMESPACE)

    async def until_registered(self, *names: str) -> None:
        """Wait until kubelets have registered these nodes."""

        async def are_there() -> bool:
            nodes = (await self.client.list("nodes"))["items"]
            return {one["metadata"]["name"] for one in nodes} >= set(names)

        await self.until(f"{', '.join(names)} are registered", are_there)

    async def start_agent(self, node: NodeSpec, pod: str) -> None:
        """Start the agent of a node whose DaemonSet has created this pod."""
        await self._add_agent(node, pod)
        for name in (f"agent-{node.name}", f"plugin-proxy-{node.name}"):
            self.processes[name].start()

    async def stop_agent(self, node: NodeSpec) -> None:
        """Stop the agent of a node, as kubelet does when its pod is deleted."""
        for name in (f"agent-{node.name}", f"plugin-proxy-{node.name}"):
            await self.processes[name].stop()

    async def _agent_template(self, node: NodeSpec) -> Document:
        """Pod specification of the agent of the node's first vendor."""
        name = f"hami-nodeagent-{next(iter(node.profiles()))}"
        spec: Document = (await self._template("daemonsets", name, AGENTS_NAMESPACE))["spec"]
        return spec

    async def _add_agent(self, node: NodeSpec, of: str) -> None:
        """``of``: the agent's pod."""
        name = f"agent-{node.name}"
        kubelet = self.directory / "kubelet" / node.name
        hosts = {
            "/var/lib/kubelet/device-plugins": kubelet / "device-plugins",
            "/var/lib/kubelet/pod-resources": kubelet / "pod-resources",
            "/var/lib/kubelet/pods": kubelet / "pods",
            "/var/lib/hami": self.directory / "hami" / node.name,
            "/run/hami-priority": self.directory / "priority" / node.name,
            "/var/run/cdi": self.directory / "cdi" / node.name,
        }
        pod = {"spec": await self._agent_template(node)}
        folders = await self._volumes(name, pod, hosts, of=of)
        container = Container(pod, "agent", folders)
        trusted = self.directory / "trusted"
        if not trusted.exists():
            trusted.symlink_to(folders["trusted-keys"])
        defaults = AgentSettings(node_name=node.name)
        paths = {
            "device_plugin_dir": defaults.device_plugin_dir,
            "pod_resources_socket": defaults.pod_resources_socket,
            "pods_dir": defaults.pods_dir,
            "state_dir": defaults.state_dir,
            "library_dir": defaults.library_dir,
            "priority.directory": defaults.priority.directory,
            "partitions.cdi_dir": defaults.partitions.cdi_dir,
        }
        settings = {
            **{key: str(container.here(path)) for key, path in paths.items()},
            "kubeconfig": str(await self._login(name, pod, container, of=of)),
            # Containers here have no driver: the library has its own tests.
            "enforcement": "none",
            "injection": "env",
            "usage.owners": "namespace",
            **self._driver_settings(node),
        }
        env = {one["name"]: one.get("value", node.name) for one in container.spec["env"]}
        self._add_configured(name, "nodeagent", container, settings, env)
        proxy = Container(pod, "plugin-proxy", folders)
        words = [_moved(proxy, word) for word in proxy.spec["args"]]
        self._add(f"plugin-proxy-{node.name}", "hami_nodeagent", words)

    def _add_configured(
        self,
        name: str,
        service: str,
        container: Container,
        settings: Mapping[str, str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.ports[name] = free_port()
        here = {
            "nats_urls": self.bus_url,
            "http_host": HOST,
            "http_port": str(self.ports[name]),
            "grace_s": "5",
            **settings,
            **self.spec.settings.get(service, {}),
        }
        sets = [part for key, value in here.items() for part in ("--set", f"{key}={value}")]
        self._add(name, f"hami_{service}", ["--config", str(container.config()), *sets], env)

    async def _log_in_as_operator(self) -> Path:
        """Let ``bus`` be the operator's; the file with the operator's seed."""
        seed = self.directory / "operator.seed"
        seed.write_bytes((await self.secret("hami-bus-operator"))["seed"])
        options, public_key = natsio.NatsLogin(seed_file=str(seed)).options()
        client = Client()
        client._public_nkey = public_key  # noqa: SLF001 - the library sets it from a seed only
        await client.connect(
            self.bus_url.replace(BUS, HOST),
            tls=self.tls_context(),
            tls_hostname=BUS,
            max_reconnect_attempts=-1,
            **options,
        )
        self._bus = client
        return seed


def _moved(container: Container, word: str) -> str:
    """Return an argument ``key=/path`` with its local path."""
    key, separator, path = word.partition("=")
    return f"{key}={container.here(path)}" if separator and path.startswith("/") else word


@asynccontextmanager
async def run_installed(
    directory: Path,
    spec: ClusterSpec = SPEC,
    *,
    overlay: Path = OVERLAY,
    before: Callable[[Installed], Awaitable[None]] | None = None,
) -> AsyncIterator[Installed]:
    """An installation that is ready on entry and gone on exit.

    ``before`` builds the contents of the cluster before ``overlay`` is applied to it. With it, the
    caller starts the agents, where DaemonSets create their pods.
    """
    async with anyio.create_task_group() as group:
        cluster = Installed(spec, directory, group, overlay=overlay, before=before)
        try:
            await cluster.start()
            yield cluster
        finally:
            with anyio.move_on_after(60, shield=True):
                await cluster.stop()
        group.cancel_scope.cancel()
