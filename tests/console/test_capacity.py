# SPDX-License-Identifier: Apache-2.0
"""The view of capacity shows the numbers of ``GET /v1/capacity``."""

import pytest
from playwright.async_api import Page, expect

from hami_sim.cluster import Cluster
from tests.console.conftest import POD_MIB, Shoot, get

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.shares_cluster,
    pytest.mark.usefixtures("own_pods"),
]


async def test_figures_are_those_of_the_api(
    page: Page, cluster: Cluster, screenshot: Shoot
) -> None:
    await page.goto(f"{cluster.url('registry')}/console/capacity")
    models = (await get(cluster, "/v1/capacity"))["items"]
    free = sum(model["free_mib"] for model in models)
    total = sum(model["capacity_mib"] for model in models)
    assert total - free == 2 * POD_MIB
    figure = page.locator(".figure", has_text="Free memory").locator(".amount")
    await expect(figure).to_have_attribute("title", f"{free} MiB")
    table = page.get_by_role("table", name="By model")
    for model in models:
        row = table.get_by_role("row", name=model["model"])
        cells = row.get_by_role("cell")
        await expect(cells.nth(1)).to_have_text(f"{model['devices_offering']} / {model['devices']}")
        await expect(cells.nth(4)).to_have_text(model["largest_on"])
        for column, fit in enumerate(model["fits"], start=5):
            await expect(cells.nth(column)).to_have_text(str(fit["count"]))
    await screenshot(page, "capacity")


async def test_shares_of_a_size_are_counted(page: Page, cluster: Cluster) -> None:
    await page.goto(f"{cluster.url('registry')}/console/capacity")
    await page.get_by_label("Memory (MiB)").fill("6000")
    await page.get_by_label("Compute (%)").fill("30")
    await page.get_by_role("button", name="Count shares").click()
    models = (await get(cluster, "/v1/capacity?memory_mib=6000&core_pct=30"))["items"]
    await expect(page.get_by_role("columnheader", name="Fits this size")).to_be_visible()
    table = page.get_by_role("table", name="By model")
    for model in models:
        cells = table.get_by_role("row", name=model["model"]).get_by_role("cell")
        await expect(cells.nth(8)).to_have_text(str(model["fits"][3]["count"]))
