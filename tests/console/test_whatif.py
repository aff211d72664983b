# SPDX-License-Identifier: Apache-2.0
"""The view of what-if questions shows the answers of the scheduler."""

import pytest
from playwright.async_api import Page, expect

from hami_sim.cluster import Cluster
from tests.console.conftest import Check, Shoot

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster]


async def _open(page: Page, cluster: Cluster) -> None:
    await page.goto(f"{cluster.url('registry')}/console/whatif")
    await page.get_by_role("heading", name="Drain a node").wait_for()


@pytest.mark.usefixtures("own_pods")
async def test_drain_shows_where_the_pods_would_start(
    page: Page, cluster: Cluster, no_violations: Check, screenshot: Shoot
) -> None:
    node = (await cluster.pod("first")).spec.node_name
    other = "gpu-a" if node == "gpu-b" else "gpu-b"
    on_node = [one.metadata.name for one in await cluster.pods() if one.spec.node_name == node]
    await _open(page, cluster)
    await page.get_by_role("combobox", name="Node").select_option(node)
    await page.get_by_role("button", name="Show what a drain would move").click()
    table = page.get_by_role("table", name=f"Pods of {node}")
    await table.wait_for()
    for name in on_node:
        cells = table.get_by_role("row", name=f"default/{name}").get_by_role("cell")
        await expect(cells.nth(1)).to_have_text("starts")
        await expect(cells.nth(2)).to_have_text(other)
    await expect(table.get_by_role("row")).to_have_count(1 + len(on_node))
    figure = page.locator(".figure", has_text="Pods that would start").locator(".amount")
    await expect(figure).to_have_text(str(len(on_node)))
    await no_violations(page)
    await screenshot(page, "whatif")
    # Nothing was moved.
    assert (await cluster.pod("first")).spec.node_name == node


@pytest.mark.usefixtures("own_pods")
async def test_pods_that_fit_start_and_others_have_reasons_and_the_closest_fit(
    page: Page, cluster: Cluster, no_violations: Check
) -> None:
    await _open(page, cluster)
    await page.get_by_role("textbox", name="Resource limits").fill(
        "nvidia.com/gpu: 2\nnvidia.com/gpumem: 20000"
    )
    await page.get_by_role("spinbutton", name="Pods").fill("2")
    ask = page.get_by_role("button", name="Show where they would start")
    await ask.click()
    table = page.get_by_role("table", name="Pods to start")
    await table.wait_for()
    for name in ("pod-1", "pod-2"):
        cells = table.get_by_role("row", name=f"default/{name}").get_by_role("cell")
        await expect(cells.nth(1)).to_have_text("starts")
        await expect(cells.nth(2)).to_have_text("gpu-a")
        assert (await cells.nth(3).text_content() or "").count("19.5 GiB") == 2
    # No T4 has so much memory: 15,360 MiB is the most, and any other model would do.
    await page.get_by_role("textbox", name="Annotations").fill("nvidia.com/use-gputype: T4")
    await page.get_by_role("spinbutton", name="Pods").fill("1")
    await ask.click()
    row = table.get_by_role("row", name="default/pod-1")
    await expect(row).to_contain_text("waits")
    reasons = page.locator(".reasons")
    await expect(reasons).to_contain_text("20000 MiB")
    await expect(reasons).to_contain_text("use-gputype any instead of T4 would fit on gpu-a")
    await no_violations(page)


async def test_wrong_lines_and_limits_without_a_device_are_named(
    page: Page, cluster: Cluster
) -> None:
    await _open(page, cluster)
    limits = page.get_by_role("textbox", name="Resource limits")
    ask = page.get_by_role("button", name="Show where they would start")
    await limits.fill("nvidia.com/gpu 1")
    await ask.click()
    await expect(page.get_by_role("alert")).to_contain_text("nvidia.com/gpu 1")
    await limits.fill("cpu: 1")
    await ask.click()
    await expect(page.get_by_text("These limits name no device resource")).to_be_visible()
    await limits.fill("nvidia.com/gpu: 1\nnvidia.com/gpumem: 3Gi")
    await ask.click()
    await expect(page.get_by_text("write 3072")).to_be_visible()


async def test_texts_are_in_chinese(page: Page, cluster: Cluster) -> None:
    await _open(page, cluster)
    await page.get_by_label("Language").select_option("zh")
    await expect(page.get_by_role("heading", name="排空节点")).to_be_visible()
    node = (await cluster.pod("first")).spec.node_name
    await page.get_by_role("combobox", name="节点").select_option(node)
    await page.get_by_role("button", name="查看排空会移动哪些 Pod").click()
    await expect(page.get_by_text("可启动的 Pod")).to_be_visible()
