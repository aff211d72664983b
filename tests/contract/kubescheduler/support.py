# SPDX-License-Identifier: Apache-2.0
"""A scripted extender, and builders and waits for the kube-scheduler contract."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import anyio
import msgspec
from aiohttp import web

from tests.support.kubeclient import KubeClient

Obj = dict[str, Any]
WAIT_S = 60.0
QUIET_S = 3.2
"""Time without an event that counts as proof that none comes: a pod that was woken waits for the
end of its back-off, 2 s at most, before its next attempt, and the queue is checked each second."""
NAMESPACE = "default"


class Extender:
    """An extender whose answers a test sets; it binds through the API as the real one does."""

    def __init__(self) -> None:
        self.url = ""
        self.client: KubeClient | None = None
        self.reset()

    def reset(self) -> None:
        """Let every node fit, with no score, and bind."""
        self.calls: list[tuple[str, Obj]] = []
        self.filter: Callable[[Obj], Obj] = lambda args: {"NodeNames": args["NodeNames"]}
        self.scores: dict[str, int] = {}
        self.bind_error = ""

    async def serve(self, request: web.Request) -> web.Response:
        verb = request.path.strip("/")
        body = await request.json()
        self.calls.append((verb, body))
        if verb == "filter":
            return web.json_response(self.filter(body))
        if verb == "prioritize":
            hosts = [{"Host": n, "Score": self.scores.get(n, 0)} for n in body["NodeNames"]]
            return web.json_response(hosts)
        if self.bind_error or self.client is None:
            return web.json_response({"Error": self.bind_error})
        await self.client.bind(
            body["PodName"], body["Node"], namespace=body["PodNamespace"], uid=body["PodUID"]
        )
        return web.json_response({"Error": ""})

    def calls_for(self, pod: str) -> list[tuple[str, Obj]]:
        """Calls about one pod, in order."""
        return [
            (verb, body)
            for verb, body in self.calls
            if pod in (body.get("PodName"), body.get("Pod", {}).get("metadata", {}).get("name"))
        ]

    def verbs_for(self, pod: str) -> list[str]:
        return [verb for verb, _ in self.calls_for(pod)]


@asynccontextmanager
async def run_extender() -> AsyncIterator[Extender]:
    extender = Extender()
    app = web.Application()
    app.router.add_post("/{verb}", extender.serve)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    extender.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield extender
    finally:
        await runner.cleanup()


class Site(msgspec.Struct, frozen=True):
    """An API server with a kube-scheduler that calls the extender; nodes are the test's own."""

    client: KubeClient
    extender: Extender

    async def node(self, name: str, **more: Any) -> None:
        capacity = {"cpu": "4", "memory": "8Gi", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        status = {"capacity": capacity, "conditions": [ready]}
        metadata = {"name": name, "labels": {"name": name}}
        await self.client.create("nodes", {"metadata": metadata, "status": status, **more})

    async def nodes_are_seen(self, *, last: str) -> None:
        """Wait until the scheduler has seen all nodes, of which this one was created last."""
        pod = await self.pod({"cpu": "1"}, nodeSelector={"name": last})
        await self.bound(pod)
        await self.client.delete("pods", pod["metadata"]["name"], NAMESPACE, gracePeriodSeconds="0")

    async def pod(self, limits: dict[str, str] | None = None, **spec: Any) -> Obj:
        name = f"pod-{uuid4().hex[:8]}"
        limits = {"nvidia.com/gpu": "1"} if limits is None else limits
        container = {"name": "c", "image": "i:1", "resources": {"limits": limits}}
        manifest = {
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "schedulerName": "hami-scheduler",
                "containers": [container],
                # No kubelet keeps the nodes ready.
                "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}],
                **spec,
            },
        }
        return await self.client.create("pods", manifest)

    async def bound(self, pod: Obj) -> str:
        """The node of a pod, once it has one."""
        name = pod["metadata"]["name"]

        async def has_node() -> bool:
            found = await self.client.get("pods", name, NAMESPACE)
            return bool(found["spec"].get("nodeName"))

        await until(has_node)
        return str((await self.client.get("pods", name, NAMESPACE))["spec"]["nodeName"])

    async def condition(self, pod: Obj, reason: str) -> str:
        """Message of the condition PodScheduled, once it has this reason."""
        messages: list[str] = []

        async def noted() -> bool:
            found = await self.client.get("pods", pod["metadata"]["name"], NAMESPACE)
            messages.extend(
                item["message"]
                for item in found["status"].get("conditions") or ()
                if item["type"] == "PodScheduled" and item.get("reason") == reason
            )
            return bool(messages)

        await until(noted)
        return messages[-1]

    async def clear(self) -> None:
        """Remove all pods and nodes."""
        for pod in (await self.client.list("pods", NAMESPACE))["items"]:
            name = pod["metadata"]["name"]
            await self.client.delete("pods", name, NAMESPACE, gracePeriodSeconds="0")
        for node in (await self.client.list("nodes"))["items"]:
            await self.client.delete("nodes", node["metadata"]["name"])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(WAIT_S):
        while not await condition():
            await anyio.sleep(0.02)
