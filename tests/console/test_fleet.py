# SPDX-License-Identifier: Apache-2.0
"""The fleet's map shows the devices of the cluster, follows changes, and can be used by keys.

The unit tests of ``console/`` check the pixels. Here the table beside the map, the panel of the
chosen device and the attributes of the canvas show the content.
"""

import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from playwright.async_api import BrowserContext, Locator, Page, Request, expect

from hami_sim.cluster import Cluster
from hami_sim.hardware.fake_nvml import Process
from hami_sim.tap import run_tap
from tests.console.conftest import OWN_PODS, POD_MIB, SEEN_MS, Check, Shoot, get
from tests.e2e.conftest import small_pod

DEVICES = 12
T4_MIB = 15_360
CUT_S = 30.0

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster]


async def _open(page: Page, cluster: Cluster, query: str = "", view: str = "fleet") -> None:
    await page.goto(f"{cluster.url('registry')}/console/{view}{query}")
    await page.get_by_role("heading", level=1).wait_for()


def _map(page: Page) -> Locator:
    return page.get_by_role("application")


def _table(page: Page) -> Locator:
    return page.get_by_role("table", name="Devices")


def _row(page: Page, node: str, index: int) -> Locator:
    return page.locator(
        f'tr:has(td:nth-child(1):text-is("{node}")):has(td:nth-child(2):text-is("{index}"))'
    )


@asynccontextmanager
async def _pods(cluster: Cluster, *manifests: dict[str, Any]) -> AsyncIterator[None]:
    """Running pods that are deleted afterwards: the modules of a worker share the cluster."""
    names: list[str] = [one["metadata"]["name"] for one in manifests]
    try:
        for one in manifests:
            await cluster.create_pod(one)
        for name in names:
            await cluster.until(f"{name} runs", partial(cluster.pod_is, name, "Running"))
        yield
    finally:
        for name in names:
            await cluster.delete_pod(name)
        for name in names:
            await cluster.until(f"{name} is gone", partial(cluster.pod_is_gone, name))


def _on(uuid: str, name: str, *, memory_mib: int, core_pct: int = 0) -> dict[str, Any]:
    """A pod with a share of this device."""
    pod = small_pod(name, memory_mib=memory_mib)
    pod["metadata"]["annotations"] = {"nvidia.com/use-gpuuuid": uuid}
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    if core_pct:
        limits["nvidia.com/gpucores"] = str(core_pct)
    return pod


@pytest.fixture
async def last_t4(cluster: Cluster, own_pods: None) -> str:
    """UUID of the last device of gpu-b, which the cluster's own pods leave free."""
    del own_pods
    answer = await get(cluster, "/v1/devices?node=gpu-b")
    found = [one for one in answer["items"] if one["index"] == 3]
    assert found[0]["booked_mib"] == 0
    return str(found[0]["uuid"])


@pytest.mark.usefixtures("own_pods")
async def test_every_device_is_shown_with_its_amounts(
    page: Page, cluster: Cluster, screenshot: Shoot
) -> None:
    await _open(page, cluster)
    await expect(page.locator(".figure", has_text="Devices").first).to_contain_text(str(DEVICES))
    await expect(_map(page)).to_have_accessible_name("Map of the devices of 2 nodes")
    await expect(page.locator("canvas")).to_have_attribute("data-painted", re.compile(r"[1-9]"))
    await page.get_by_role("button", name="Show table").click()
    answer = await get(cluster, "/v1/devices")
    assert len(answer["items"]) == DEVICES
    assert sum(one["booked_mib"] for one in answer["items"]) == len(OWN_PODS) * POD_MIB
    for one in answer["items"]:
        cells = _row(page, one["node"], one["index"]).get_by_role("cell")
        await expect(cells.nth(2)).to_have_text(one["type"])
        memory = cells.nth(5).locator(".amount")
        await expect(memory.nth(0)).to_have_attribute("title", f"{one['booked_mib']} MiB")
        await expect(memory.nth(1)).to_have_attribute("title", f"{one['capacity_mib']} MiB")
        await expect(cells.nth(6)).to_have_text(f"{one['booked_core_pct']} %")
    await screenshot(page, "fleet")


async def test_ten_containers_with_ten_percent_each_show_a_full_device(
    page: Page, cluster: Cluster, last_t4: str
) -> None:
    await _open(page, cluster, "?q=node:gpu-b&table=1")
    row = _row(page, "gpu-b", 3)
    await expect(row.get_by_role("cell").nth(6)).to_have_text("0 %")
    names = [f"tenth-{n}" for n in range(10)]
    pods = [_on(last_t4, name, memory_mib=1000, core_pct=10) for name in names]
    async with _pods(cluster, *pods):
        await expect(row.get_by_role("cell").nth(6)).to_have_text("100 %")
        await row.click()
        panel = page.locator("[data-device='gpu-b/3']")
        compute = panel.get_by_role("meter", name="Compute")
        await expect(compute).to_have_attribute("aria-valuenow", "100")
        await expect(compute).to_have_attribute("aria-valuetext", "100 % / 100 %")
        links = panel.get_by_role("list").get_by_role("link")
        await expect(links).to_have_count(10)
        shown = sorted(await links.all_text_contents())
        assert shown == sorted(f"default/{name}" for name in names)
        assert await links.first.get_attribute("href") == f"/console/workloads/{shown[0]}"
    await expect(row.get_by_role("cell").nth(6)).to_have_text("0 %")


async def test_change_is_drawn_without_a_reload(page: Page, cluster: Cluster, last_t4: str) -> None:
    await _open(page, cluster)
    canvas = page.locator("canvas")
    await expect(canvas).to_have_attribute("data-painted", re.compile(r"[1-9]"))
    before = await canvas.get_attribute("data-painted")
    pixels = await canvas.evaluate(PIXELS)
    async with _pods(cluster, _on(last_t4, "drawn", memory_mib=T4_MIB // 2)):
        await expect(canvas).not_to_have_attribute("data-painted", str(before))
        await page.wait_for_function(
            f"before => ({PIXELS})(document.querySelector('canvas')) != before", arg=pixels
        )


DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Returns after the page has handled earlier input and drawn what follows from it."""
PIXELS = """canvas => {
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let sum = 0;
  for (const value of data) sum = (sum * 31 + value) % 4294967291;
  return sum;
}"""


def _holders(row: Locator) -> Locator:
    """The cell with the namespaces of the shares, the eleventh column."""
    return row.get_by_role("cell").nth(10)


async def test_stream_that_is_cut_marks_the_page_stale_and_resumes_without_a_gap(
    context: BrowserContext, cluster: Cluster, token: str, last_t4: str
) -> None:
    page = await context.new_page()
    snapshots: list[str] = []

    def note(request: Request) -> None:
        if request.url.split("?")[0].endswith("/v1/fleet"):
            snapshots.append(request.url)

    page.on("request", note)
    async with run_tap(cluster.ports["registry"]) as tap:
        await page.goto(f"http://127.0.0.1:{tap.port}/console/fleet?q=node:gpu-b&table=1")
        await page.get_by_label("Token").fill(token)
        await page.get_by_role("button", name="Log in").click()
        row = _row(page, "gpu-b", 3)
        await expect(_holders(row)).to_have_text("")
        banner = page.locator(".stale-place .banner")
        await expect(banner).to_have_count(0)
        await tap.cut()
        begin = time.monotonic()
        async with _pods(cluster, _on(last_t4, "unseen", memory_mib=2000)):
            await expect(banner).to_be_visible(timeout=SEEN_MS)
            await anyio.sleep(max(0.0, CUT_S - (time.monotonic() - begin)))
            await expect(_holders(row)).to_have_text("")
            await tap.heal()
            await expect(_holders(row)).to_have_text("default", timeout=SEEN_MS)
            await expect(page.locator(".stale-place .banner")).to_have_count(0)
        await expect(_holders(row)).to_have_text("")
    assert len(snapshots) == 1, "the stream resumed from its position"


async def test_restarted_registry_leads_to_a_new_snapshot(
    page: Page, cluster: Cluster, expected_errors: list[str], last_t4: str
) -> None:
    expected_errors.append("Failed to load resource")
    await _open(page, cluster, "?q=node:gpu-b&table=1")
    row = _row(page, "gpu-b", 3)
    await expect(_holders(row)).to_have_text("")
    await cluster.processes["registry"].kill()
    async with _pods(cluster, _on(last_t4, "meanwhile", memory_mib=2000)):
        cluster.processes["registry"].start()
        await cluster.ready("registry")
        await expect(_holders(row)).to_have_text("default", timeout=2 * SEEN_MS)
        await expect(page.locator(".stale-place .banner")).to_have_count(0)


async def test_search_counts_and_lists_what_it_finds(page: Page, cluster: Cluster) -> None:
    await _open(page, cluster)
    await page.get_by_role("button", name="Show table").click()
    search = page.get_by_role("searchbox", name="Search")
    await search.fill("t4")
    await expect(page.locator("[data-matches]")).to_have_attribute("data-matches", "4")
    await expect(_table(page).locator("tbody tr")).to_have_count(4)
    await search.fill("pod:first")
    await expect(page.locator("[data-matches]")).to_have_attribute("data-matches", "1")
    await expect(_table(page).locator("tbody tr")).to_contain_text("default")
    await search.fill("is:nonsense")
    await expect(page.get_by_text("No device is in the state nonsense.")).to_be_visible()
    await expect(page).to_have_url(re.compile("q=is%3Anonsense"))


async def test_keys_choose_and_open_a_device(
    page: Page, cluster: Cluster, expected_errors: list[str]
) -> None:
    expected_errors.append("404")
    await _open(page, cluster)
    await _map(page).focus()
    await page.keyboard.press("Home")
    await expect(page.locator("[data-device='gpu-a/0']")).to_be_visible()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("[data-device='gpu-a/1']")).to_be_visible()
    await page.keyboard.press("ArrowDown")
    await expect(page.locator("[data-device='gpu-a/5']")).to_be_visible()
    await page.keyboard.press("End")
    panel = page.locator("[data-device='gpu-b/3']")
    await expect(panel).to_be_visible()
    devices = await get(cluster, "/v1/devices?node=gpu-b")
    uuid = next(one["uuid"] for one in devices["items"] if one["index"] == 3)
    link = panel.get_by_role("link", name="gpu-b #3")
    await expect(link).to_have_attribute("href", f"/console/devices/gpu-b/{uuid}")
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile(f"/devices/gpu-b/{uuid}$"))


async def test_pointer_shows_and_chooses_a_device(page: Page, cluster: Cluster) -> None:
    await _open(page, cluster)
    canvas = page.locator("canvas")
    await expect(canvas).to_have_attribute("data-painted", re.compile(r"[1-9]"))
    box = await canvas.bounding_box()
    assert box
    found = page.locator("[data-device]")
    # Tiles have gaps between them: some of these points are within a tile.
    for dx, dy in [(9 * n - 90, 30 * m) for m in (-1, 0, 1) for n in range(20)]:
        x, y = box["x"] + box["width"] / 2 + dx, box["y"] + box["height"] / 2 + dy
        await page.mouse.move(x, y)
        await page.evaluate(DRAWN)
        if await found.count():
            break
    shown = await found.get_attribute("data-device")
    await page.mouse.down()
    await page.mouse.up()
    await page.mouse.move(box["x"] - 20, box["y"] - 20)
    await expect(page.locator("[data-device]")).to_have_attribute("data-device", str(shown))


async def test_devices_with_foreign_use_are_listed(
    page: Page, cluster: Cluster, last_t4: str, screenshot: Shoot
) -> None:
    await _open(page, cluster, view="devices")
    await expect(page.get_by_text("No device matches.")).to_be_visible()
    hardware = cluster.hardware["gpu-b"]
    hardware.set_processes(3, [Process(pid=os.getpid(), used_mib=4000)])
    try:
        row = _row(page, "gpu-b", 3)
        await expect(row).to_contain_text("Foreign use")
        await expect(row.get_by_role("cell").nth(7)).to_contain_text("4,096 MiB")
        await screenshot(page, "devices")
        await _open(page, cluster, f"/gpu-b/{last_t4}", view="devices")
        await expect(page.locator(".figure", has_text="Foreign use")).to_contain_text("4,096 MiB")
    finally:
        hardware.set_processes(3, [])
    await _open(page, cluster, view="devices")
    await expect(page.get_by_text("No device matches.")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_views_have_no_serious_violations(
    page: Page, cluster: Cluster, scheme: Any, no_violations: Check
) -> None:
    await page.emulate_media(color_scheme=scheme)
    await _open(page, cluster, "?table=1")
    await _map(page).focus()
    await page.keyboard.press("Home")
    await expect(page.locator("[data-device='gpu-a/0']")).to_be_visible()
    await no_violations(page)
    await _open(page, cluster, view="devices")
    await no_violations(page)


@pytest.mark.parametrize("view", ["fleet", "devices"])
async def test_views_fit_a_narrow_screen(page: Page, cluster: Cluster, view: str) -> None:
    await page.set_viewport_size({"width": 400, "height": 800})
    await _open(page, cluster, "?table=1", view=view)
    await page.locator(".figure").first.wait_for()
    overflow = "e => e.scrollWidth - e.clientWidth"
    assert await page.locator("#content").evaluate(overflow) == 0
