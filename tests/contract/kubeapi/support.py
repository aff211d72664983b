# SPDX-License-Identifier: Apache-2.0
"""Builders and waits for the API server contract. Pods name a scheduler that does not run."""

import base64
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import msgspec
import pytest
from aiohttp import web

from hami_sim.certs import CertificateAuthority
from hami_sim.kube import Access
from tests.support.kubeclient import KubeClient, StatusError, Watch

Obj = dict[str, Any]
WAIT_S = 30.0
NOBODY = "nobody-schedules"


class Cluster(msgspec.Struct, frozen=True):
    """The cluster under test."""

    access: Access
    namespace: str
    client: KubeClient


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid4().hex[:8]}"


def container(name: str = "main", **more: Any) -> Obj:
    return {"name": name, "image": "registry.example/app:1", **more}


def pod(name: str = "", *, containers: list[Obj] | None = None, **metadata: Any) -> Obj:
    named = {"name": name} if name else {}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {**named, **metadata},
        "spec": {"schedulerName": NOBODY, "containers": containers or [container()]},
    }


def limited(**limits: str) -> Obj:
    """A container with limits; `__` stands for `/` and `_` for `.` in resource names."""
    named = {key.replace("__", "/").replace("_", "."): value for key, value in limits.items()}
    return container(resources={"limits": named})


def config_map(name: str, data: dict[str, str] | None = None, **metadata: Any) -> Obj:
    return {
        "kind": "ConfigMap",
        "apiVersion": "v1",
        "metadata": {"name": name, **metadata},
        "data": data or {},
    }


@asynccontextmanager
async def fresh_namespace(client: KubeClient) -> AsyncIterator[str]:
    name = unique("contract")
    await client.create("namespaces", {"metadata": {"name": name}})

    async def has_account() -> bool:
        return await exists(client, "serviceaccounts", "default", name)

    await until(has_account)
    yield name
    for listed in (await client.list("pods", name))["items"]:
        await client.delete("pods", listed["metadata"]["name"], name, gracePeriodSeconds="0")
    await client.delete("namespaces", name)


@asynccontextmanager
async def a_node(client: KubeClient, **capacity: str) -> AsyncIterator[str]:
    name = unique("node")
    amounts = {"cpu": "8", "memory": "16Gi", "pods": "110", **capacity}
    await client.create("nodes", {"metadata": {"name": name}, "status": {"capacity": amounts}})
    yield name
    await client.delete("nodes", name)


async def exists(client: KubeClient, resource: str, name: str, namespace: str = "") -> bool:
    try:
        await client.get(resource, name, namespace)
    except StatusError as error:
        if error.code != 404:
            raise
        return False
    return True


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(WAIT_S):
        while not await condition():
            await anyio.sleep(0.02)


class Refusal(msgspec.Struct):
    """The Status that was refused, available after the block."""

    caught: list[StatusError] = msgspec.field(default_factory=list)

    @property
    def error(self) -> StatusError:
        return self.caught[0]


@contextmanager
def refused(code: int, reason: str, message: str = "") -> Iterator[Refusal]:
    """Expect a failure Status: code, reason and a part of the message."""
    refusal = Refusal()
    with pytest.raises(StatusError) as raised:
        yield refusal
    error = raised.value
    refusal.caught.append(error)
    assert (error.code, error.reason) == (code, reason), str(error)
    assert error.status["kind"] == "Status"
    assert error.status["status"] == "Failure"
    assert message in error.message


class Events:
    """The events of a watch, one at a time, with a deadline."""

    def __init__(self, watch: Watch) -> None:
        self._iterator = watch.__aiter__()

    async def next(self) -> tuple[str, Obj]:
        with anyio.fail_after(WAIT_S):
            while True:
                kind, obj = await self._iterator.__anext__()
                if kind != "BOOKMARK":
                    return kind, obj

    async def any(self) -> tuple[str, Obj]:
        with anyio.fail_after(WAIT_S):
            return await self._iterator.__anext__()

    async def named(self) -> tuple[str, str]:
        kind, obj = await self.next()
        return kind, obj["metadata"]["name"]

    async def ended(self) -> bool:
        with anyio.fail_after(WAIT_S):
            async for kind, _ in self._iterator:
                if kind != "BOOKMARK":
                    return False
        return True


class Hook(msgspec.Struct):
    """A webhook server of the test: the requests it received, and its responses."""

    url: str
    ca_bundle: str
    answer: Callable[[Obj], Obj]
    requests: list[Obj] = msgspec.field(default_factory=list)


def allow(request: Obj) -> Obj:
    del request
    return {"allowed": True}


@asynccontextmanager
async def webhook_server(names: Sequence[str] = ("127.0.0.1",)) -> AsyncIterator[Hook]:
    authority = CertificateAuthority()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        certificate, key, _ = authority.issue_files(Path(folder), names)
        context.load_cert_chain(certificate, key)
    hook = Hook(url="", ca_bundle=base64.b64encode(authority.pem).decode(), answer=allow)

    async def serve(request: web.Request) -> web.Response:
        review = await request.json()
        hook.requests.append(review["request"])
        response = hook.answer(review["request"])
        return web.json_response(
            {
                "kind": "AdmissionReview",
                "apiVersion": "admission.k8s.io/v1",
                "response": {"uid": review["request"]["uid"], **response},
            }
        )

    app = web.Application()
    app.router.add_post("/{tail:.*}", serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    hook.url = f"https://127.0.0.1:{runner.addresses[0][1]}/admit"
    try:
        yield hook
    finally:
        await runner.cleanup()


@asynccontextmanager
async def registered(
    cluster: Cluster, hook: Hook, *, mutating: bool, prefix: str = "hook", **fields: Any
) -> AsyncIterator[str]:
    """Register a hook for pods of the test's namespace, and wait until it is in force."""
    kind = "Mutating" if mutating else "Validating"
    resource = f"{kind.lower()}webhookconfigurations.admissionregistration.k8s.io"
    name = unique(prefix)
    entry = {
        "name": f"{name}.example.com",
        "clientConfig": {"url": hook.url, "caBundle": hook.ca_bundle},
        "rules": [
            {
                "operations": ["CREATE"],
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods"],
            }
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        **fields,
    }
    await cluster.client.create(
        resource,
        {
            "kind": f"{kind}WebhookConfiguration",
            "apiVersion": "admissionregistration.k8s.io/v1",
            "metadata": {"name": name},
            "webhooks": [entry],
        },
    )
    try:
        yield entry["name"]
    finally:
        await cluster.client.delete(resource, name)
