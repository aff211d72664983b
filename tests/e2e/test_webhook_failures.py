# SPDX-License-Identifier: Apache-2.0
"""A webhook that cannot answer, on a real API server: our pods wait, other pods are unaffected.

Each failure is one that operators meet: no process listens, the Service has no endpoints, the API
server does not trust the certificate, or the webhook accepts the connection and never answers. The
configuration is rendered by the webhook itself.
"""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
import yaml

from hami_sim.certs import CertificateAuthority
from hami_sim.kubernetes import run_control_plane
from hami_webhook.shell.render import FLAG, render
from tests.cluster.needs import control_plane_or_skip
from tests.support.admission import asking_pod
from tests.support.kubeclient import KubeClient, StatusError
from tests.support.webhook import HOST, RunningWebhook, run_webhook

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(240),
]

CONFIGURATIONS = "mutatingwebhookconfigurations.admissionregistration.k8s.io"
NAMESPACE = "team-a"
TIMEOUT_S = 2
KNOWN_S = 60.0
"""The API server follows changes of webhook configurations within seconds."""

Obj = dict[str, Any]


def idle_pod(name: str) -> Obj:
    pod = asking_pod(name)
    del pod["spec"]["containers"][0]["resources"]
    return pod


class Site:
    """An API server, a webhook that works, and further listeners."""

    def __init__(
        self, client: KubeClient, webhook: RunningWebhook, authority: Path, silent_port: int
    ) -> None:
        self.client = client
        self.webhook = webhook
        self._authority = authority
        self._silent_port = silent_port
        self._is_registered = False
        self._stranger = CertificateAuthority().pem

    async def register(self, trouble: str, folder: Path) -> None:
        """Replace the configuration by one with a failure; empty: none."""
        authority, where = self._authority, ["--url", self.webhook.url]
        if trouble == "nobody listens":
            where = ["--url", f"https://{HOST}:1"]
        elif trouble == "no endpoints":
            where = ["--service", f"{NAMESPACE}/hami-webhook"]
        elif trouble == "wrong authority":
            authority = folder / "stranger.crt"
            authority.write_bytes(self._stranger)
        elif trouble == "never answers":
            where = ["--url", f"https://{HOST}:{self._silent_port}"]
        arguments = [FLAG, *where, "--ca-file", str(authority), "--timeout-s", str(TIMEOUT_S)]
        document: Obj = yaml.safe_load(render(arguments))
        name = document["metadata"]["name"]
        if not self._is_registered:
            self._is_registered = True
            await self.client.create(CONFIGURATIONS, document)
            return
        change = {"webhooks": document["webhooks"]}
        await self.client.patch(CONFIGURATIONS, name, change)

    async def creation(self, pod: Obj) -> str:
        """Return the API server's error for the pod; empty when it created it."""
        try:
            await self.client.create("pods", pod, NAMESPACE)
        except StatusError as error:
            return str(error)
        return ""

    async def serves(self, name: str) -> None:
        """Wait until a pod with requests is created and prepared."""
        number, scheduler = 0, ""
        with anyio.fail_after(KNOWN_S):
            while scheduler != "hami-scheduler":
                number += 1
                if await self.creation(asking_pod(f"{name}-{number}")) == "":
                    pod = await self.client.get("pods", f"{name}-{number}", NAMESPACE)
                    scheduler = pod["spec"]["schedulerName"]

    async def names(self) -> set[str]:
        answer = await self.client.list("pods", NAMESPACE)
        return {item["metadata"]["name"] for item in answer["items"]}


@asynccontextmanager
async def silence() -> AsyncIterator[int]:
    """Open a port that accepts connections and never answers."""

    async def hold(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await anyio.sleep_forever()

    listener = await anyio.create_tcp_listener(local_host=HOST)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, hold)
        attribute = anyio.abc.SocketAttribute.local_port
        yield listener.extra(attribute)  # noqa: S610 - a listener's attribute, no database
        group.cancel_scope.cancel()


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    programs = control_plane_or_skip()
    folder = tmp_path_factory.mktemp("failures")
    async with (
        run_control_plane(folder, programs) as plane,
        KubeClient(plane.access()) as client,
        run_webhook(folder / "tls", CertificateAuthority()) as webhook,
        silence() as silent_port,
    ):
        await client.create("namespaces", {"metadata": {"name": NAMESPACE}})
        account = {"metadata": {"name": "default"}}
        with contextlib.suppress(StatusError):  # the controller may be faster
            await client.create("serviceaccounts", account, NAMESPACE)
        service = {"metadata": {"name": "hami-webhook"}, "spec": {"ports": [{"port": 443}]}}
        await client.create("services", service, NAMESPACE)
        site = Site(client, webhook, folder / "tls" / "ca.crt", silent_port)
        await site.register("", folder)
        await site.serves("first")
        yield site


TROUBLES = {
    "nobody listens": "connection refused",
    "no endpoints": f"hami-webhook.{NAMESPACE}.svc",
    "wrong authority": "certificate signed by unknown authority",
    "never answers": "context deadline exceeded",
}


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_pod_that_asks_is_not_created_and_others_are_as_ever(
    site: Site, tmp_path: Path, trouble: str
) -> None:
    await site.register(trouble, tmp_path)
    number, said = 0, ""
    with anyio.fail_after(KNOWN_S):
        while TROUBLES[trouble] not in said:
            number += 1
            said = await site.creation(asking_pod(f"probe-{number}"))
            if not said:  # under the configuration before this one
                pod = await site.client.get("pods", f"probe-{number}", NAMESPACE)
                assert pod["spec"]["schedulerName"] == "hami-scheduler"
    assert 'failed calling webhook "' in said
    before = await site.names()
    # From here on the failure is in effect: no pod with requests is admitted, whatever resource it
    # names.
    asks: dict[str, Obj] = {
        "plain": asking_pod("asks-plain"),
        "init": asking_pod("asks-init"),
        "requests": asking_pod("asks-requests"),
    }
    init = asks["init"]["spec"]
    init["initContainers"] = [{**init["containers"][0], "name": "first"}]
    del init["containers"][0]["resources"]
    container = asks["requests"]["spec"]["containers"][0]
    container["resources"] = {"requests": container["resources"]["limits"]}
    for kind, pod in asks.items():
        said = await site.creation(pod)
        assert TROUBLES[trouble] in said, kind
    calls = site.webhook.sample("hami_webhook_admission_seconds_count")
    others = {f"other-{trouble.replace(' ', '-')}-{i}" for i in range(5)}
    began_s = anyio.current_time()
    for name in others:
        assert await site.creation(idle_pod(name)) == ""
    assert anyio.current_time() - began_s < len(others) * TIMEOUT_S  # none waited for us
    assert site.webhook.sample("hami_webhook_admission_seconds_count") == calls
    assert await site.names() == before | others


async def test_pods_are_created_again_when_the_webhook_has_recovered(
    site: Site, tmp_path: Path
) -> None:
    await site.register("", tmp_path)
    await site.serves("back")
