# SPDX-License-Identifier: Apache-2.0
"""The view of capacity shows the numbers of ``GET /v1/capacity``."""

from typing import Any

import pytest
from playwright.async_api import Page, expect

from hami_sim.cluster import Cluster
from tests.console.conftest import POD_MIB, Shoot

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster]

TOKEN = "sessionStorage.getItem('hami-token')"


async def _capacity(page: Page, query: str = "") -> Any:
    answer = await page.request.get(
        f"{page.url.split('/console/')[0]}/v1/capacity{query}",
        headers={"Authorization": f"Bearer {await page.evaluate(TOKEN)}"},
    )
    return (await answer.json())["items"]


async def test_figures_are_those_of_the_api(
    page: Page, cluster: Cluster, screenshot: Shoot
) -> None:
    await page.goto(f"{cluster.url('registry')}/console/capacity")
    models = await _capacity(page)
    free = sum(model["free_mib"] for model in models)
    total = sum(model["capacity_mib"] for model in models)
    assert total - free == 2 * POD_MIB
    figure = page.locator(".figure", has_text="Free memory").locator(".amount")
    await expect(figure).to_have_attribute("title", f"{free} MiB")
    table = page.get_by_role("table", name="By model")
    for model in models:
        row = table.get_by_role("row", name=model["model"])
        cells = await row.get_by_role("cell").all_text_contents()
        assert cells[1] == f"{model['devices_offering']} / {model['devices']}"
        assert cells[4] == model["largest_on"]
        assert [int(cell) for cell in cells[5:8]] == [fit["count"] for fit in model["fits"]]
    await screenshot(page, "capacity")


async def test_shares_of_a_size_are_counted(page: Page, cluster: Cluster) -> None:
    await page.goto(f"{cluster.url('registry')}/console/capacity")
    await page.get_by_label("Memory (MiB)").fill("6000")
    await page.get_by_label("Compute (%)").fill("30")
    await page.get_by_role("button", name="Count shares").click()
    models = await _capacity(page, "?memory_mib=6000&core_pct=30")
    await expect(page.get_by_role("columnheader", name="Fits this size")).to_be_visible()
    table = page.get_by_role("table", name="By model")
    for model in models:
        cells = await table.get_by_role("row", name=model["model"]).get_by_role("cell").all()
        assert await cells[8].text_content() == str(model["fits"][3]["count"])
