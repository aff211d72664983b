# SPDX-License-Identifier: Apache-2.0
"""Runs etcd, kube-apiserver, kube-controller-manager and kube-scheduler as one cluster would.

TLS everywhere, Node and RBAC authorization, the default admission plugins and NodeRestriction, an
audit log, service account tokens, the aggregation layer's certificates. All listen on one address,
127.0.0.1 by default. Each is a process of its own that tests can kill, freeze and start again on
the same ports and store. Differences from a production cluster: one replica without leader
election, an etcd that does not wait for the disk, and no kube-proxy, so webhooks are reached by URL
unless the caller runs a kube-proxy beside it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import yaml

from hami_common import namespaces
from hami_common.errors import Conflict, HamiError, Unavailable
from hami_sim.kube import Access, Objects
from hami_sim.kubernetes import configuration, programs
from hami_sim.kubernetes.pki import HOST, SERVICE_HOST, Pki, write_kubeconfig
from hami_sim.kubernetes.programs import Programs
from hami_sim.ports import free_port
from hami_sim.process import Process

START_S: Final = 180.0
"""Longest start; 8 s on two idle cores, many times that beside a running test suite."""
_POLL_S: Final = 0.1
_OK: Final = 200
ADMIN: Final = "kubernetes-admin"
ACCOUNT_NAMESPACES: Final = {"hami-nodeagent": namespaces.AGENTS}
"""Namespaces of service accounts that are not in the common namespace."""
TOKEN_LASTS_S: Final = 86_400
_COLLECTIONS: Final = {
    "Namespace": "namespaces",
    "ServiceAccount": "serviceaccounts",
    "ClusterRole": "clusterroles.rbac.authorization.k8s.io",
    "ClusterRoleBinding": "clusterrolebindings.rbac.authorization.k8s.io",
    "Role": "roles.rbac.authorization.k8s.io",
    "RoleBinding": "rolebindings.rbac.authorization.k8s.io",
}


class ControlPlane:
    """One control plane; made by ``run_control_plane``."""

    def __init__(
        self, directory: Path, found: Programs, *, host: str = HOST, within: Sequence[str] = ()
    ) -> None:
        """Keep all files below ``directory``; run the programs ``found``.

        ``host``: address of all servers. ``within``: start of the command lines of all programs,
        for example ``nsenter`` into the network namespace that has this address.
        """
        self.directory = directory
        self.programs = found
        self.host = host
        self._within = tuple(within)
        self.pki = Pki(directory / "pki", host=host)
        self.processes: dict[str, Process] = {}
        """``etcd``, ``kube-apiserver``, ``kube-controller-manager`` and, once it was added,
        ``kube-scheduler``."""
        self.ports = {
            name: free_port()
            for name in (
                programs.ETCD,
                "etcd-peer",
                programs.APISERVER,
                programs.CONTROLLERS,
                programs.SCHEDULER,
            )
        }

    # ---------------------------------------------------------------- who may come in

    @property
    def url(self) -> str:
        """Base URL of the API server."""
        return f"https://{self.host}:{self.ports[programs.APISERVER]}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.directory / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        """One JSON document per line."""
        return self.directory / "logs" / "audit.log"

    def access(self) -> Access:
        """Return the administrator's access to the API server."""
        return Access.from_kubeconfig(self.kubeconfig)

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """Kubeconfig of a user with a client certificate; made once per user."""
        path = self.directory / f"{user.replace(':', '-')}.kubeconfig"
        return write_kubeconfig(
            path,
            server=self.url,
            ca_file=self.pki.file("ca.crt"),
            client=self.pki.client(user, groups),
        )

    def kubeconfig_for_node(self, node: str) -> Path:
        """Kubeconfig of the kubelet of a node."""
        return self.kubeconfig_for(f"system:node:{node}", ("system:nodes",))

    async def token_for(self, account: str) -> str:
        """A token of one of our service accounts, as its pods would get one."""
        namespace = ACCOUNT_NAMESPACES.get(account, namespaces.SYSTEM)
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_LASTS_S},
        }
        async with Objects(self.access()) as client:
            answer = await client.act("serviceaccounts", account, "token", request, namespace)
        return str(answer["status"]["token"])

    async def kubeconfig_for_account(
        self, account: str, *, name: str = "", server: str = ""
    ) -> Path:
        """Kubeconfig of a service account, of another address when ``server`` is given."""
        return write_kubeconfig(
            self.directory / f"account-{name or account}.kubeconfig",
            server=server or self.url,
            ca_file="" if server else self.pki.file("ca.crt"),
            token=await self.token_for(account),
        )

    # ---------------------------------------------------------------- the processes

    def _add(self, name: str, arguments: Sequence[str]) -> Process:
        process = Process(
            name,
            [*self._within, self.programs.path(name), *arguments],
            log=self.directory / "logs" / f"{name}.log",
            # Go takes as many threads as it finds cores; the collector may work less often here.
            env={"GOGC": "200"},
        )
        self.processes[name] = process
        return process

    def _add_etcd(self) -> Process:
        client = f"https://{self.host}:{self.ports[programs.ETCD]}"
        peer = f"http://{self.host}:{self.ports['etcd-peer']}"
        return self._add(
            programs.ETCD,
            [
                "--name=here",
                f"--data-dir={self.directory / 'etcd'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=here={peer}",
                "--client-cert-auth",
                f"--trusted-ca-file={self.pki.file('etcd-ca.crt')}",
                f"--cert-file={self.pki.file('etcd-server.crt')}",
                f"--key-file={self.pki.file('etcd-server.key')}",
                "--unsafe-no-fsync",
                "--log-level=warn",
            ],
        )

    def _add_apiserver(self) -> Process:
        policy = self.directory / "audit-policy.yaml"
        policy.write_text(yaml.safe_dump(configuration.AUDIT_POLICY), encoding="utf-8")
        pki = self.pki.file
        return self._add(
            programs.APISERVER,
            [
                f"--bind-address={self.host}",
                f"--advertise-address={self.host}",
                f"--secure-port={self.ports[programs.APISERVER]}",
                # The Service "kubernetes" may not have a loopback address as an endpoint.
                f"--endpoint-reconciler-type={'none' if self.host == HOST else 'lease'}",
                f"--tls-cert-file={pki('apiserver.crt')}",
                f"--tls-private-key-file={pki('apiserver.key')}",
                f"--client-ca-file={pki('ca.crt')}",
                f"--etcd-servers=https://{self.host}:{self.ports[programs.ETCD]}",
                f"--etcd-cafile={pki('etcd-ca.crt')}",
                f"--etcd-certfile={pki('apiserver-etcd-client.crt')}",
                f"--etcd-keyfile={pki('apiserver-etcd-client.key')}",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--enable-bootstrap-token-auth=true",
                "--allow-privileged=true",
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
                f"--service-account-key-file={pki('sa.pub')}",
                f"--service-account-signing-key-file={pki('sa.key')}",
                f"--service-cluster-ip-range={SERVICE_HOST.rsplit('.', 2)[0]}.0.0/16",
                f"--kubelet-client-certificate={pki('apiserver-kubelet-client.crt')}",
                f"--kubelet-client-key={pki('apiserver-kubelet-client.key')}",
                "--kubelet-preferred-address-types=InternalIP,Hostname",
                f"--requestheader-client-ca-file={pki('front-proxy-ca.crt')}",
                "--requestheader-allowed-names=front-proxy-client",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-username-headers=X-Remote-User",
                f"--proxy-client-cert-file={pki('front-proxy-client.crt')}",
                f"--proxy-client-key-file={pki('front-proxy-client.key')}",
                f"--audit-policy-file={policy}",
                f"--audit-log-path={self.audit_log}",
                "--audit-log-maxsize=100",
                "--audit-log-maxbackup=2",
                "--shutdown-delay-duration=0s",
            ],
        )

    def _add_controllers(self) -> Process:
        kubeconfig = self.kubeconfig_for("system:kube-controller-manager")
        pki = self.pki.file
        return self._add(
            programs.CONTROLLERS,
            [
                f"--bind-address={self.host}",
                f"--secure-port={self.ports[programs.CONTROLLERS]}",
                f"--kubeconfig={kubeconfig}",
                f"--authentication-kubeconfig={kubeconfig}",
                f"--authorization-kubeconfig={kubeconfig}",
                "--leader-elect=false",
                "--use-service-account-credentials=true",
                "--controllers=*,bootstrap-signer-controller,token-cleaner-controller",
                f"--service-account-private-key-file={pki('sa.key')}",
                f"--root-ca-file={pki('ca.crt')}",
                f"--client-ca-file={pki('ca.crt')}",
                f"--requestheader-client-ca-file={pki('front-proxy-ca.crt')}",
                f"--cluster-signing-cert-file={pki('ca.crt')}",
                f"--cluster-signing-key-file={pki('ca.key')}",
            ],
        )

    def add_scheduler(
        self,
        kubeconfig: Path,
        *,
        extender_url: str = "",
        backoff_s: float = 1.0,
        dra: bool = False,
    ) -> Process:
        """Set up kube-scheduler, under the login given; the caller starts it.

        ``dra``: with the configuration of the component of that name.
        """
        path = self.directory / "kube-scheduler.yaml"
        document = configuration.scheduler_configuration(
            kubeconfig, extender_url=extender_url, backoff_s=backoff_s, dra=dra
        )
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return self._add_scheduler(kubeconfig, f"--config={path}")

    def add_default_scheduler(self) -> Process:
        """Set up the cluster's own kube-scheduler, without an extender; the caller starts it."""
        kubeconfig = self.kubeconfig_for("system:kube-scheduler")
        return self._add_scheduler(kubeconfig, f"--kubeconfig={kubeconfig}", "--leader-elect=false")

    def _add_scheduler(self, kubeconfig: Path, *arguments: str) -> Process:
        return self._add(
            programs.SCHEDULER,
            [
                *arguments,
                f"--bind-address={self.host}",
                f"--secure-port={self.ports[programs.SCHEDULER]}",
                f"--authentication-kubeconfig={kubeconfig}",
                f"--authorization-kubeconfig={kubeconfig}",
                "--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics",
            ],
        )

    async def start(self) -> None:
        """Bring up all but kube-scheduler; returns when pods can be created."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "logs").mkdir(exist_ok=True)
        self.pki.make()
        self.kubeconfig_for(ADMIN, ("system:masters",)).replace(self.kubeconfig)
        self._add_etcd().start()
        self._add_apiserver().start()
        await self.until("the API server is ready", self.is_api_ready, programs.APISERVER)
        self._add_controllers().start()
        await self.until("pods can be created", self._takes_pods, programs.CONTROLLERS)

    async def stop(self) -> None:
        """End all processes, in the order in which they need each other."""
        async with anyio.create_task_group() as group:
            for name in (programs.SCHEDULER, programs.CONTROLLERS):
                if name in self.processes:
                    group.start_soon(self.processes[name].stop)
        for name in (programs.APISERVER, programs.ETCD):
            if name in self.processes:
                # Watches of killed clients would hold a polite end for a minute.
                await self.processes[name].stop()

    async def install_accounts(self) -> None:
        """Make namespaces, accounts and roles of our services, from the shipped manifests."""
        files = ("namespace.yaml", "rbac.yaml")
        async with Objects(self.access()) as client:
            for document in (one for file in files for one in configuration.shipped(file)):
                await _create(client, _COLLECTIONS[document["kind"]], document)

    # ---------------------------------------------------------------- waiting

    async def until(self, what: str, condition: Callable[[], Awaitable[bool]], name: str) -> None:
        """Wait for ``condition`` while the process ``name`` lives."""
        with anyio.move_on_after(START_S):
            while not await condition():
                for part in (programs.ETCD, name):
                    process = self.processes[part]
                    if process.starts and not process.is_running():
                        raise Unavailable(peer=part, detail=f"ended; {process.tail()}")
                await anyio.sleep(_POLL_S)
            return
        detail = f"{what}: not in {START_S:g} s; {self.processes[name].tail()}"
        raise Unavailable(peer=name, detail=detail)

    async def is_api_ready(self) -> bool:
        """Return true if the API server reports that it is ready."""
        return await self._answers(f"{self.url}/readyz")

    async def is_healthy(self, name: str) -> bool:
        """Return true if the component reports that it is healthy."""
        if name == programs.ETCD:
            return await self._answers(f"{self.url}/readyz/etcd")
        path = "readyz" if name == programs.APISERVER else "healthz"
        return await self._answers(f"https://{self.host}:{self.ports[name]}/{path}")

    async def is_scheduler_ready(self) -> bool:
        """Return true if kube-scheduler has synced its caches."""
        return await self._answers(f"https://{self.host}:{self.ports[programs.SCHEDULER]}/readyz")

    async def scheduler_metrics(self) -> str:
        """Return kube-scheduler's metrics in Prometheus' text format."""
        url = f"https://{self.host}:{self.ports[programs.SCHEDULER]}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url, ssl=False) as response:
            response.raise_for_status()
            return await response.text()

    async def _answers(self, url: str) -> bool:
        # Controllers and scheduler serve probes under certificates of their own making.
        context = self.access().ssl_context() if url.startswith(self.url) else False
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
                session.get(url, ssl=context) as response,
            ):
                return response.status == _OK
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _takes_pods(self) -> bool:
        try:
            async with Objects(self.access()) as client:
                await client.get("serviceaccounts", "default", "default")
                await client.get("configmaps", "kube-root-ca.crt", "default")
        except HamiError:
            return False
        return True


async def _create(client: Objects, collection: str, document: dict[str, Any]) -> None:
    with suppress(Conflict):
        await client.create(collection, document)


@asynccontextmanager
async def run_control_plane(directory: Path, found: Programs) -> AsyncIterator[ControlPlane]:
    """A control plane without kube-scheduler that is ready on entry and gone on exit."""
    plane = ControlPlane(directory, found)
    try:
        await plane.start()
        yield plane
    finally:
        with anyio.move_on_after(60, shield=True):
            await plane.stop()
