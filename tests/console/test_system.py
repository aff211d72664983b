# SPDX-License-Identifier: Apache-2.0
"""The view of the control plane: replicas, agents and streams, and an agent that falls silent."""

from datetime import UTC, datetime

import pytest
from playwright.async_api import Page, expect

from hami_common.bus.grants import STREAMS
from hami_common.runtime.clock import SystemClock
from hami_sim.cluster import Cluster
from tests.console.conftest import Check, Shoot

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster]

SILENT_MS = 40_000
"""Longest wait until the registry counts an agent as silent (15 s), and the page shows it."""


async def test_control_plane_that_keeps_up(
    page: Page, cluster: Cluster, no_violations: Check, screenshot: Shoot
) -> None:
    now = datetime.fromtimestamp(SystemClock().now_s(), tz=UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {
        "holderIdentity": "scheduler-1",
        "leaseDurationSeconds": 3600,
        "acquireTime": now,
        "renewTime": now,
        "leaseTransitions": 2,
    }
    document = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "hami-defrag"},
        "spec": spec,
    }
    await cluster.create("/apis/coordination.k8s.io/v1/namespaces/hami-system/leases", document)
    await page.goto(f"{cluster.url('registry')}/console/system")
    await expect(page.get_by_text("Nothing observable is behind.")).to_be_visible()
    leases = page.get_by_role("table", name="Leases of background tasks")
    lease = leases.get_by_role("row", name="hami-defrag")
    await expect(lease).to_contain_text("scheduler-1")
    await expect(lease).to_contain_text("held")
    replicas = page.get_by_role("table", name="Replicas that wrote in the last 15 minutes")
    for service in ("scheduler", "webhook", "registry"):
        await expect(replicas.get_by_role("row", name=service)).to_have_count(1)
    await expect(page.locator(".figure", has_text="Agents reporting")).to_contain_text("of 2 nodes")
    streams = page.get_by_role("table", name="Streams of the bus")
    await expect(streams.get_by_role("row", name="available")).to_have_count(len(STREAMS))
    consumers = page.get_by_role("table", name="Consumers")
    await expect(consumers.get_by_role("row", name="HAMI_EVENTS").first).to_be_visible()
    await no_violations(page)
    await screenshot(page, "system")


@pytest.mark.timeout(120)
async def test_silent_agent_is_named(page: Page, cluster: Cluster) -> None:
    await page.goto(f"{cluster.url('registry')}/console/system")
    agent = cluster.processes["agent-gpu-b"]
    agent.freeze()
    try:
        concerns = page.get_by_role("list", name="To look at")
        await expect(concerns).to_contain_text(
            "1 agents sent no heartbeat lately, for example on gpu-b", timeout=SILENT_MS
        )
        await expect(page.get_by_text("gpu-b: silent")).to_be_visible()
    finally:
        agent.thaw()
    await expect(page.get_by_text("Nothing observable is behind.")).to_be_visible(timeout=SILENT_MS)
