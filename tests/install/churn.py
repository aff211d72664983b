# SPDX-License-Identifier: Apache-2.0
"""Pods with shares that come and go at a constant rate, with the outcome of each.

Seconds of this machine's monotonic clock. A pod is deleted ``lifetime_s`` after it runs. While
``most`` pods exist, the next one waits: a machine that starts fewer a second than ``rate_per_s``
would otherwise be asked for more and more of them at once. Every pod has another amount of memory,
which identifies its share.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import anyio
from anyio.abc import TaskGroup
from msgspec import Struct

from tests.install.tenant import NAMESPACE, share
from tests.support.kubeclient import KubeClient, StatusError

LABEL = "churn"
FIRST_MIB = 500
SIZES = 3000
_CORE_PCT = 5
_POLL_S = 0.1
_GONE_S = 60.0
_NOT_FOUND = 404

Document = dict[str, Any]


class Life(Struct, kw_only=True):
    """One pod."""

    name: str
    memory_mib: int
    created_s: float
    bound_s: float | None = None
    running_s: float | None = None
    deleted_s: float | None = None
    """The deletion was requested."""
    gone_s: float | None = None
    fault: str = ""

    def pending_s(self, now_s: float) -> float:
        """Time from creation until it ran."""
        return (self.running_s or self.gone_s or now_s) - self.created_s


class Churn:
    """Pods of one run; made by ``run_churn``."""

    def __init__(
        self, client: KubeClient, *, rate_per_s: float, lifetime_s: float, most: int
    ) -> None:
        self.lives: dict[str, Life] = {}
        self._most = most
        self._client = client
        self._pause_s = 1 / rate_per_s
        self._lifetime_s = lifetime_s
        self._is_ending = False

    async def run(self) -> None:
        """Create, follow and delete pods until ``end``; then follow until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow)
            group.start_soon(self._create)

    async def end(self, *, limit_s: float) -> None:
        """Create no more pods; returns when all have run and are gone, or after ``limit_s``."""
        self._is_ending = True
        with anyio.move_on_after(limit_s):
            while any(life.gone_s is None for life in self.lives.values()):
                await anyio.sleep(_POLL_S)

    async def delete_all(self) -> None:
        """Delete the pods that are left; returns when they are gone."""
        query = {"labelSelector": f"{LABEL}=yes"}
        with anyio.move_on_after(_GONE_S):
            while pods := (await self._client.list("pods", NAMESPACE, **query))["items"]:
                for pod in pods:
                    with suppress(aiohttp.ClientError, StatusError):
                        await self._client.delete("pods", pod["metadata"]["name"], NAMESPACE)
                await anyio.sleep(_POLL_S)

    def faults(self, *, pending_most_s: float) -> list[str]:
        """Return pods that were lost, rejected, or waited too long; one line each."""
        now_s = anyio.current_time()
        found = [f"{life.name}: {life.fault}" for life in self.lives.values() if life.fault]
        for life in self.lives.values():
            if life.pending_s(now_s) > pending_most_s:
                found.append(f"{life.name} was Pending for {life.pending_s(now_s):.1f} s")
            elif life.running_s is None and not life.fault:
                found.append(f"{life.name} never ran")
        return found

    def pending_s(self) -> list[float]:
        """Times from creation until running, sorted."""
        now_s = anyio.current_time()
        return sorted(life.pending_s(now_s) for life in self.lives.values())

    def rate_per_s(self) -> float:
        """Pods that were created a second."""
        created_s = [life.created_s for life in self.lives.values()]
        return len(created_s) / max(1.0, created_s[-1] - created_s[0])

    async def _create(self) -> None:
        due_s = anyio.current_time()
        while not self._is_ending:
            if sum(life.gone_s is None for life in self.lives.values()) >= self._most:
                await anyio.sleep(_POLL_S)
                due_s = anyio.current_time()
                continue
            number = len(self.lives)
            name = f"churn-{number}"
            memory_mib = FIRST_MIB + number % SIZES
            pod = share(name, memory_mib=memory_mib, core_pct=_CORE_PCT, labels={LABEL: "yes"})
            self.lives[name] = Life(
                name=name, memory_mib=memory_mib, created_s=anyio.current_time()
            )
            try:
                await self._client.create("pods", pod)
            except (StatusError, aiohttp.ClientError) as error:
                self.lives[name].fault = f"was refused: {error}"
                self.lives[name].gone_s = anyio.current_time()
            due_s += self._pause_s
            await anyio.sleep(max(0.0, due_s - anyio.current_time()))

    async def _follow(self) -> None:
        """Read every change of the pods, from a list and a watch after it."""
        query = {"labelSelector": f"{LABEL}=yes"}
        async with anyio.create_task_group() as group:
            while True:
                listed = await self._client.list("pods", NAMESPACE, **query)
                for pod in listed["items"]:
                    self._see(pod, group)
                version = listed["metadata"]["resourceVersion"]
                with suppress(aiohttp.ClientError, StatusError):
                    async with self._client.watch(
                        "pods", NAMESPACE, {**query, "resourceVersion": version}
                    ) as watch:
                        async for kind, pod in watch:
                            if kind == "ERROR":
                                break
                            self._see(pod, group, is_gone=kind == "DELETED")

    def _see(self, pod: Document, group: TaskGroup, *, is_gone: bool = False) -> None:
        life = self.lives[pod["metadata"]["name"]]
        now_s = anyio.current_time()
        status = pod["status"]
        if life.bound_s is None and pod["spec"].get("nodeName"):
            life.bound_s = now_s
        if life.running_s is None and status.get("phase") == "Running":
            life.running_s = now_s
            group.start_soon(self._delete, life)
        if status.get("phase") in ("Failed", "Succeeded") and life.deleted_s is None:
            life.fault = f"{status['phase']}: {status.get('reason')} {status.get('message')}"
            group.start_soon(self._delete, life)
        if is_gone:
            life.gone_s = now_s
            if life.deleted_s is None:
                life.fault = life.fault or "vanished"

    async def _delete(self, life: Life) -> None:
        await anyio.sleep(0 if life.fault else self._lifetime_s)
        life.deleted_s = anyio.current_time()
        while life.gone_s is None:
            try:
                await self._client.delete("pods", life.name, NAMESPACE)
            except aiohttp.ClientError:
                await anyio.sleep(_POLL_S)
            except StatusError as error:
                if error.code == _NOT_FOUND:
                    return
                await anyio.sleep(_POLL_S)
            else:
                return


@asynccontextmanager
async def run_churn(
    client: KubeClient, *, rate_per_s: float, lifetime_s: float, most: int
) -> AsyncIterator[Churn]:
    """Pods come and go while the block runs; the block ends the churn before it leaves.

    A block that fails leaves no pods either.
    """
    churn = Churn(client, rate_per_s=rate_per_s, lifetime_s=lifetime_s, most=most)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(churn.run)
            yield churn
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await churn.delete_all()
