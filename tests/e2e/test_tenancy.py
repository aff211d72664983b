# SPDX-License-Identifier: Apache-2.0
"""Who reads what of the registry and the bus, judged by a real API server.

The registry runs under the account and the roles that the manifests give it, on a bus with the
accounts that ``hamictl bootstrap`` makes; tenants, agents and integrations bring real tokens.
"""

import base64
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import nats.errors
import pytest
from nats.aio.client import Client

from hami_common import grants, subjects
from hami_common.runtime import kubeio
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.service import ServiceContext
from hami_registry.app import serve_registry
from hami_registry.settings import Settings
from hami_sim.apiserver.client import KubeClient
from hami_sim.kubernetes import configuration, run_control_plane
from hami_sim.natsd import NatsServer, run_nats_server
from hamictl.bootstrap import Plan, bootstrap
from tests.cluster.needs import control_plane_or_skip
from tests.support.busaccess import intruder_at

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]

OVERLAY = configuration.shipped_directory().parent / "overlays" / "dev"
NAMESPACE = "tenant"
PLAN = Plan(namespace="hami-system", service="hami-webhook", webhook="hami-webhook")
LIMIT_S = 40.0

Obj = dict[str, Any]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(LIMIT_S):
        while not await condition():
            await anyio.sleep(0.2)


class Tenancy:
    """The registry under the account that the manifests give it, on a bus of the shipped accounts.

    It judges tokens by the reviews of the real API server.
    """

    def __init__(self, client: KubeClient, server: NatsServer, base: str) -> None:
        self.client = client
        self.server = server
        self._base = base

    async def status(self, path: str, token: str = "") -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            aiohttp.ClientSession() as session,
            session.get(self._base + path, headers=headers) as told,
        ):
            return told.status

    async def token(self, account: str, namespace: str, *, audience: str = "", of: str = "") -> str:
        """A token; ``of``: bound to this pod of the namespace."""
        spec: Obj = {"expirationSeconds": 3600, **({"audiences": [audience]} if audience else {})}
        if of:
            uid = (await self.client.get("pods", of, namespace))["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": of, "uid": uid}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        client = self.client
        made = await client.act("serviceaccounts", account, "token", request, namespace)
        return str(made["status"]["token"])

    async def is_admitted(self, token: str) -> bool:
        client = Client()
        try:
            await client.connect(
                self.server.url, token=token, allow_reconnect=False, max_reconnect_attempts=1
            )
        except (nats.errors.Error, OSError):
            return False
        else:
            return True
        finally:
            await client.close()

    async def bind(self, kind: str, role: str, account: str) -> None:
        """Give a role to an account of the tenant's namespace, everywhere or there."""
        plural = "clusterrolebindings" if kind == "ClusterRoleBinding" else "rolebindings"
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": f"{account}-{role}"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": role,
            },
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}],
        }
        where = "" if kind == "ClusterRoleBinding" else f"/namespaces/{NAMESPACE}"
        path = f"/apis/rbac.authorization.k8s.io/v1{where}/{plural}"
        await self.client.call("POST", path, body=binding)


@pytest.fixture(scope="module")
async def tenancy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tenancy]:
    programs = control_plane_or_skip()
    folder = tmp_path_factory.mktemp("tenancy")
    async with (
        run_control_plane(folder / "plane", programs) as plane,
        KubeClient(plane.access()) as client,
    ):
        await client.create("namespaces", {"metadata": {"name": NAMESPACE}})
        kubectl = [programs.path("kubectl"), f"--kubeconfig={plane.kubeconfig}"]
        with anyio.fail_after(LIMIT_S):
            applied = await anyio.run_process(
                [*kubectl, "apply", "-k", str(OVERLAY)], check=False, stderr=subprocess.STDOUT
            )
        assert applied.returncode == 0, applied.stdout
        async with kubeio.connect(str(plane.kubeconfig), start_timeout_s=30) as kube:
            now = datetime.fromtimestamp(SystemClock().now_s(), tz=UTC)
            await bootstrap(kube, PLAN, now=now)
        login = await plane.kubeconfig_for_account("hami-registry", name="tenancy")
        async with run_registry(client, folder, str(login)) as found:
            yield found


@asynccontextmanager
async def run_registry(client: KubeClient, folder: Path, login: str) -> AsyncIterator[Tenancy]:
    accounts = await client.get("configmaps", "hami-bus-accounts", "hami-system")
    secret = await client.get("secrets", "hami-bus-registry", "hami-system")
    for name, text in secret["data"].items():
        (folder / name).write_bytes(base64.b64decode(text))
    for account in ("reader", "stranger", "admin"):
        await client.create("serviceaccounts", {"metadata": {"name": account}}, NAMESPACE)
    config = accounts["data"]["accounts.conf"]
    async with (
        run_nats_server(folder / "nats", config_text=config) as server,
        anyio.create_task_group() as group,
    ):
        settings = Settings(
            nats_urls=[server.url],
            nats_seed_file=str(folder / "seed"),
            bus_issuer_seed_file=str(folder / "issuer"),
            bus_authenticator_seed_file=str(folder / "authenticator"),
            kubeconfig=login,
            auth="kubernetes",
        )
        context = ServiceContext(service="registry", settings=settings)
        port = await group.start(serve_registry, context)
        found = Tenancy(client, server, f"http://127.0.0.1:{port}")

        async def is_up() -> bool:
            # The rights that were just granted are known after a moment.
            return await found.status("/v1/nodes", "nobody's") == 401

        await until(is_up)
        for account, kind, role in (
            ("reader", "RoleBinding", "edit"),
            ("admin", "ClusterRoleBinding", "cluster-admin"),
        ):
            await found.bind(kind, role, account)
        yield found
        context.stop()


class TestTenancy:
    async def test_tenant_reads_allocations_of_its_namespace_alone(self, tenancy: Tenancy) -> None:
        reader = await tenancy.token("reader", NAMESPACE)
        own = f"/v1/allocations?namespace={NAMESPACE}"

        async def is_known() -> bool:
            return await tenancy.status(own, reader) == 200

        await until(is_known)
        for path in (
            "/v1/allocations?namespace=hami-system",
            "/v1/allocations/hami-system/web",
            "/v1/explain/hami-system/web",
            "/v1/allocations",
            "/v1/watch",
            "/v1/watch?namespace=hami-system",
            "/v1/nodes",
            "/v1/devices",
            "/v1/usage",
        ):
            assert await tenancy.status(path, reader) == 403, path
        assert await tenancy.status(f"/v1/explain/{NAMESPACE}/web", reader) == 404
        admin = await tenancy.token("admin", NAMESPACE)
        for path in ("/v1/allocations", "/v1/nodes", "/v1/devices"):
            assert await tenancy.status(path, admin) == 200
        for bad in ("", "forged", await tenancy.token("admin", NAMESPACE, audience="hami-bus")):
            assert await tenancy.status("/v1/allocations", bad) == 401

    async def test_agents_token_speaks_for_the_node_of_its_pod(self, tenancy: Tenancy) -> None:
        client = tenancy.client
        system, account = "hami-system", "hami-nodeagent"
        for node in ("n-1", "n-2"):
            await client.create("nodes", {"metadata": {"name": node}})
        agent = {
            "metadata": {"name": "agent-n-1"},
            "spec": {
                "serviceAccountName": account,
                "nodeName": "n-1",
                "containers": [{"name": "agent", "image": "app"}],
            },
        }
        await client.create("pods", agent, system)
        bound = await tenancy.token(account, system, audience="hami-bus", of="agent-n-1")
        async with intruder_at(
            tenancy.server.url, bound, prefix=grants.inbox("agent", "n-1")
        ) as bad:
            states = f"$KV.{subjects.STATE_BUCKET}"
            stored = await bad.client.request(f"{states}.n-1.p", b"{}", timeout=10)
            assert b'"seq"' in stored.data
            forbidden = (
                subjects.heartbeat("n-2"),
                subjects.report("n-2", "nvidia"),
                f"{states}.n-2.p",
                f"$KV.{subjects.ALLOC_BUCKET}.n-1.p",
            )
            for subject in forbidden:
                await bad.client.publish(subject, b"{}")
            for subject in forbidden:
                assert await bad.is_forbidden(subject), subject
        assert not await tenancy.is_admitted(await tenancy.token(account, system, of="agent-n-1"))
        assert not await tenancy.is_admitted(
            await tenancy.token(account, system, audience="hami-bus")
        )
        await client.delete("pods", "agent-n-1", system, gracePeriodSeconds="0")

        async def is_refused() -> bool:
            return not await tenancy.is_admitted(bound)

        await until(is_refused)

    async def test_who_may_watch_events_reads_them_from_the_bus_and_nobody_else(
        self, tenancy: Tenancy
    ) -> None:
        editor = await tenancy.token("reader", NAMESPACE, audience="hami-bus")
        assert not await tenancy.is_admitted(editor)
        stranger = await tenancy.token("stranger", NAMESPACE, audience="hami-bus")
        assert not await tenancy.is_admitted(stranger)
        assert not await tenancy.is_admitted("")
        await tenancy.bind("ClusterRoleBinding", "hami-integration", "stranger")

        async def is_admitted() -> bool:
            return await tenancy.is_admitted(stranger)

        await until(is_admitted)
