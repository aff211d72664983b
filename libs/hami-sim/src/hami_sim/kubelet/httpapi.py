# SPDX-License-Identifier: Apache-2.0
"""Serves the HTTP paths that others read: /pods, /containerLogs, /healthz, and /sim/ for tests.

Plain HTTP without authentication, on an address of this machine only. `/pods` shows the pod
manager's pods as the API server last showed them, so a refused pod still looks Pending there for a
moment: kubelet does the same.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import anyio
import msgspec
from aiohttp import web

from hami_sim.kubelet.faults import FaultOrder, Faults
from hami_sim.kubelet.objects import Obj, key_of
from hami_sim.kubelet.plugins import Registration
from hami_sim.kubelet.podworker import PodWorker

_FOLLOW_S = 0.1


class Source(Protocol):
    """Source of the data that the API serves."""

    workers: dict[str, PodWorker]
    faults: Faults
    registration: Registration

    def all_pods(self) -> Collection[Obj]:
        """List the pod manager's pods."""
        ...

    def log_paths(self, namespace: str, name: str, container: str) -> list[Path]:
        """List the logs of a container's kept runs, oldest first."""
        ...


class HttpApi:
    """The server of one kubelet."""

    def __init__(self, source: Source, *, host: str) -> None:
        self._source = source
        self._host = host
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listen; returns the port."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/pods", self._pods),
                web.get("/runningpods/", self._pods),
                web.get("/containerLogs/{namespace}/{pod}/{container}", self._logs),
                web.get("/sim/containers", self._containers),
                web.post("/sim/faults", self._set_faults),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _healthz(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.Response(text="ok")

    async def _pods(self, request: web.Request) -> web.Response:  # noqa: ARG002
        document = {
            "kind": "PodList",
            "apiVersion": "v1",
            "metadata": {},
            "items": list(self._source.all_pods()),
        }
        return _json(document)

    async def _containers(self, request: web.Request) -> web.Response:  # noqa: ARG002
        rows: list[Obj] = []
        for worker in self._source.workers.values():
            namespace, pod = key_of(worker.pod)
            rows.extend(
                {
                    "namespace": namespace,
                    "pod": pod,
                    "pod_uid": worker.uid,
                    "name": container.name,
                    "attempt": container.attempt,
                    "pid": container.pid,
                    "is_running": container.running is not None,
                    "exit_code": container.ended.exit_code if container.ended else None,
                    "log": str(container.log),
                }
                for container in worker.containers()
            )
        return _json(rows)

    async def _set_faults(self, request: web.Request) -> web.Response:
        """Set faults of a kubelet that runs as a process; see FaultOrder."""
        try:
            order = msgspec.json.decode(await request.read(), type=FaultOrder)
        except msgspec.DecodeError as error:
            return web.Response(status=400, text=f"{error}\n")
        self._source.faults.obey(order)
        if order.drop_plugin:
            await self._source.registration.drop(order.drop_plugin)
        return web.Response(text="ok")

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        where = request.match_info
        paths = self._source.log_paths(where["namespace"], where["pod"], where["container"])
        if request.query.get("previous") == "true":
            paths = paths[:-1]
        if not paths:
            text = f'container "{where["container"]}" of pod "{where["pod"]}" has no log\n'
            return web.Response(status=404, text=text)
        content = paths[-1].read_bytes()
        end = len(content)
        if (tail := request.query.get("tailLines")) is not None:
            lines = content.splitlines(keepends=True)
            content = b"".join(lines[-int(tail) :]) if int(tail) else b""
        if request.query.get("follow") != "true":
            return web.Response(body=content, content_type="text/plain")
        return await self._follow(request, paths[-1], content, end)

    async def _follow(
        self, request: web.Request, path: Path, content: bytes, at: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        await response.write(content)
        while True:
            is_running = any(
                container.log == path and container.running
                for worker in self._source.workers.values()
                for container in worker.containers()
            )
            with path.open("rb") as file:
                file.seek(at)
                more = file.read()
            at += len(more)
            if more:
                await response.write(more)
            if not is_running:
                return response
            await anyio.sleep(_FOLLOW_S)


def _json(document: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
