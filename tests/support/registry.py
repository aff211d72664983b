# SPDX-License-Identifier: Apache-2.0
"""Reports and running registries for tests."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.inventory import NodeDevices, NodeReport
from hami_common.model.device import DeviceFacts
from hami_common.ports import Bucket, Publisher
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.kubeauth import Access, Caller, KubeAuth
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.service import ServiceContext
from hami_registry.app import serve_registry
from hami_registry.settings import Settings
from hami_registry.shell.metrics import KINDS

TENANT, PODS_ONLY, ADMIN = "tenant", "pods-only", "admin"


def review_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a token as its owner's name; the tenant reads devices and the shares of ``team-a``."""

    async def caller(_: KubeAuth, token: str) -> Caller:
        return Caller(username=token)

    async def may(_: KubeAuth, who: Caller, access: Access) -> bool:
        if who.username == ADMIN:
            return True
        if access.resource == "devices":
            return who.username == TENANT
        return access.namespace == "team-a"

    monkeypatch.setattr(KubeAuth, "caller", caller)
    monkeypatch.setattr(KubeAuth, "may", may)


def report(
    *uuids: str, node: str = "gpu-1", boot_id: str = "1", seq: int = 1, vendor: str = "nvidia"
) -> NodeReport:
    """A report of healthy devices."""
    return NodeReport(
        node=node,
        vendor=vendor,
        boot_id=boot_id,
        seq=seq,
        time_s=0.0,
        devices=tuple(
            DeviceFacts(uuid=uuid, vendor=vendor, index=i, type="NVIDIA H200", memory_mib=1000)
            for i, uuid in enumerate(uuids)
        ),
    )


async def send(publisher: Publisher, message: NodeReport) -> None:
    """Report as an agent does."""
    subject = subjects.report(message.node, message.vendor)
    await publisher.publish_stored(subject, codec.encode(message))


async def stored(bucket: Bucket, node: str = "gpu-1", vendor: str = "nvidia") -> NodeDevices | None:
    """Canonical devices as they are stored now."""
    entry = await bucket.get(subjects.devices_key(node, vendor))
    return None if entry is None else codec.decode(entry.value, NodeDevices, what=entry.key)


async def until_stored(
    bucket: Bucket,
    is_wanted: Callable[[NodeDevices], bool],
    *,
    node: str = "gpu-1",
    within_s: float = 20.0,
) -> NodeDevices:
    """Return canonical devices once they match."""
    found: NodeDevices | None = None
    with anyio.move_on_after(within_s):
        while True:
            found = await stored(bucket, node)
            if found is not None and is_wanted(found):
                return found
            await anyio.sleep(0.005)
    message = f"not as wanted within {within_s:g} s: {found}"
    raise AssertionError(message)


class RunningRegistry:
    """One registry inside the test."""

    def __init__(self, context: ServiceContext[Settings], port: int) -> None:
        self.context = context
        self.url = f"http://127.0.0.1:{port}"

    def sample(self, name: str, **labels: str) -> float:
        """Value of one of its metrics, 0 when it was never set."""
        return self.context.registry.get_sample_value(name, labels) or 0.0


def quarantine(registry: CollectorRegistry | None = None) -> Quarantine:
    """Quarantine of objects whose handling fails."""
    return Quarantine(
        kinds=KINDS, clock=SystemClock(), registry=registry or CollectorRegistry(), first_s=0.01
    )


@asynccontextmanager
async def run_registry(nats_url: str, **settings: Any) -> AsyncIterator[RunningRegistry]:
    """The service for the time of the block, without an API server unless settings name one."""
    chosen = {
        "nats_urls": [nats_url],
        "watch_nodes": False,
        "config_poll_s": 0.02,
        "retry_s": 0.05,
        "grace_s": 5.0,
        "replica": "registry-0",
        **settings,
    }
    context = ServiceContext(service="registry", settings=Settings(**chosen))
    try:
        async with anyio.create_task_group() as group:
            port = await group.start(serve_registry, context)
            yield RunningRegistry(context, port)
            context.stop()
    finally:
        context.tracing.close()
