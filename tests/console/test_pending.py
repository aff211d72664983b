# SPDX-License-Identifier: Apache-2.0
"""The view of waiting pods: the reason, the devices, and ways that really start the pod."""

import re
from functools import partial
from pathlib import Path

import aiohttp
import anyio
import pytest
from playwright.async_api import BrowserContext, Page, expect

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.decision import DecisionRecord, RefusalClass
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import NatsPublisher, connect
from hami_sim.cluster import Cluster
from hami_sim.natsd import NatsServer
from tests.console.conftest import SIZE, Check, Shoot, get
from tests.e2e.conftest import small_pod
from tests.support.registry import PODS_ONLY, RunningRegistry, review_by_name, run_registry

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster]

LARGE_MIB = 60_000


def pending(cluster: Cluster, path: str = "") -> str:
    return f"{cluster.url('registry')}/console/pending{path}"


@pytest.mark.usefixtures("own_pods")
async def test_pod_that_is_too_large_shows_the_way_that_starts_it(
    page: Page, cluster: Cluster, no_violations: Check, screenshot: Shoot
) -> None:
    await cluster.create_pod(small_pod("large", memory_mib=LARGE_MIB))
    await page.goto(pending(cluster))
    row = page.get_by_role("row", name="default/large")
    await expect(row).to_contain_text("Devices")
    await expect(row).to_contain_text("60000 MiB wanted")
    await no_violations(page)
    await screenshot(page, "pending")
    await row.get_by_role("link").click()

    await expect(page.get_by_text("0 of 2 nodes fit.")).to_be_visible()
    first = page.get_by_role("list", name="Ways to start it").get_by_role("listitem").first
    await expect(first).to_contain_text("Request less: memory (MiB)")
    offered = re.search(r"\(MiB\) (\d+) instead of 60000", await first.text_content() or "")
    assert offered is not None
    devices = page.get_by_role("table", name="Devices of the closest nodes")
    await expect(devices.get_by_text("too little free memory").first).to_be_visible()
    await expect(page.get_by_text("without a queue")).to_be_visible()
    await expect(page.locator(".figure", has_text="Estimated wait")).to_contain_text("unknown")
    await no_violations(page)
    await screenshot(page, "pending-pod")

    # The way of the page is applied as it is written, and the pod starts.
    await cluster.create_pod(small_pod("smaller", memory_mib=int(offered[1])))
    await cluster.until("the pod runs", lambda: cluster.pod_is("smaller", "Running"))
    await page.goto(pending(cluster, "/default/smaller"))
    await expect(page.get_by_text("does not wait for devices now")).to_be_visible()
    for name in ("smaller", "large"):
        await cluster.delete_pod(name)
        await cluster.until(f"{name} is gone", partial(cluster.pod_is_gone, name))
    await page.goto(pending(cluster))
    await expect(page.get_by_role("heading", name="Waiting pods", level=1)).to_be_visible()
    await expect(page.get_by_role("row", name="default/large")).to_have_count(0)


async def test_waiting_pods_of_the_page_are_those_of_the_api_in_chinese_too(
    page: Page, cluster: Cluster
) -> None:
    await cluster.create_pod(small_pod("waits", memory_mib=LARGE_MIB))
    await page.goto(pending(cluster))
    await page.get_by_label("Language").select_option("zh")
    row = page.get_by_role("row", name="default/waits")
    await expect(row).to_contain_text("设备")
    items = (await get(cluster, "/v1/waiting"))["items"]
    (found,) = [one for one in items if one["pod"] == "waits"]
    assert (found["reason"], found["code"]) == ("devices", "CardInsufficientMemory")
    await expect(row).to_contain_text(found["text"])
    await page.get_by_label("语言").select_option("en")
    await cluster.delete_pod("waits")
    await cluster.until("the pod is gone", partial(cluster.pod_is_gone, "waits"))


# --- tenants --------------------------------------------------------------------------------------


async def publish(publisher: NatsPublisher, namespace: str, pod: str) -> None:
    now_s = SystemClock().now_s()
    decision = DecisionRecord(
        verb="filter",
        namespace=namespace,
        pod=pod,
        pod_uid=f"uid-{pod}",
        time_s=now_s,
        created_s=now_s - 60,
        attempts=2,
        verdict="refused",
        snapshot_id="1.1",
        nodes_considered=2,
        refusals=(RefusalClass(code="QueueCannotBorrow", text="the queue is full", count=2),),
    )
    subject = subjects.decision_event(namespace, pod)
    await publisher.publish_stored(subject, codec.encode(decision))


async def status_of(registry: RunningRegistry, path: str) -> int:
    headers = {"Authorization": f"Bearer {PODS_ONLY}"}
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{registry.url}{path}", headers=headers) as found,
    ):
        return found.status


async def test_tenant_sees_the_waiting_pods_of_its_namespace_only(
    context: BrowserContext,
    built_console: Path,
    nats_server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    review_by_name(monkeypatch)
    settings = {"auth": "kubernetes", "console_dir": str(built_console)}
    async with (
        run_registry(nats_server.url, **settings) as registry,
        connect([nats_server.url], name="test") as bus,
    ):
        for namespace, pod in (("team-a", "mine"), ("team-b", "secret")):
            await publish(NatsPublisher(bus), namespace, pod)
        page = await context.new_page()
        await page.set_viewport_size({**SIZE})
        await page.goto(f"{registry.url}/console/pending")
        await page.get_by_label("Token").fill(PODS_ONLY)
        await page.get_by_role("button", name="Log in").click()
        await expect(page.get_by_role("alert")).to_contain_text("You may not read this")
        await page.get_by_label("Namespace", exact=True).fill("team-a")
        await page.keyboard.press("Enter")
        row = page.get_by_role("row", name="team-a/mine")
        await expect(row).to_contain_text("Share of the queue")
        await expect(row).to_contain_text("the queue is full")
        assert "secret" not in await page.content()
        await page.goto(f"{registry.url}/console/pending/team-b/secret")
        await expect(page.get_by_role("alert").first).to_contain_text("You may not read this")
        assert "queue is full" not in await page.content()
        for path in ("/v1/waiting", "/v1/waiting?namespace=team-b", "/v1/system"):
            assert await status_of(registry, path) == 403
        assert await status_of(registry, "/v1/waiting?namespace=team-a") == 200
        with anyio.fail_after(30):
            await page.close()
