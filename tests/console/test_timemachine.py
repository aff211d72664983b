# SPDX-License-Identifier: Apache-2.0
"""The time machine compares policies on recorded pods, and shows the fleet of a past time."""

import json
import re
from datetime import datetime, timedelta
from typing import Any

import anyio
import pytest
from playwright.async_api import Page, expect

from hami_sim.cluster import Cluster
from tests.console.conftest import POD_MIB, SEEN_MS, Check, Shoot

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster]


async def _open(page: Page, cluster: Cluster) -> None:
    await page.goto(f"{cluster.url('registry')}/console/timemachine")
    await page.get_by_role("heading", name="Time machine").wait_for()


async def test_policies_are_compared_with_the_record(
    page: Page, cluster: Cluster, no_violations: Check, screenshot: Shoot
) -> None:
    await _open(page, cluster)
    await page.get_by_role("combobox", name="Period").select_option("last hour")
    is_answer = re.compile(r"/v1/whatif/policy$")
    async with page.expect_response(is_answer) as waiting:
        await page.get_by_role("button", name="Compare").click()
    response = await waiting.value
    asked = [
        (one["node_policy"], one["device_policy"])
        for one in json.loads(response.request.post_data or "")["policies"]
    ]
    assert asked == [("binpack", ["binpack"]), ("spread", ["spread"])]
    answer: Any = await response.json()
    table = page.get_by_role("table", name="Comparison")
    packed, spread = answer["results"]
    # Both pods fit on one device: binpack fills it more than spread fills two.
    assert answer["arrivals"] >= 2
    assert packed["devices_used_peak"] < spread["devices_used_peak"]
    assert packed["used_devices_full_peak"] > spread["used_devices_full_peak"]
    names = ("as recorded", "binpack / binpack", "spread / spread")
    for name, result in zip(names, (answer["recorded"], packed, spread), strict=True):
        cells = table.get_by_role("row", name=name).get_by_role("cell")
        await expect(cells.nth(0)).to_have_text(name)
        for column, key in enumerate(("placed_at_once", "waited", "never_placed"), start=1):
            await expect(cells.nth(column)).to_have_text(str(result[key]))
        full = f"{round(100 * result['used_devices_full_peak'], 1):g} %"
        await expect(cells.nth(6)).to_have_text(full)
    figure = page.locator(".figure", has_text="Pods arrived").locator(".amount")
    await expect(figure).to_have_text(str(answer["arrivals"]))
    chart = page.get_by_role("img", name=re.compile("^Devices in use"))
    last = {
        name: r["series"]["devices_used"][-1]
        for name, r in zip(names[1:], (packed, spread), strict=True)
    }
    for name, value in last.items():
        await expect(chart).to_have_attribute(
            "aria-label", re.compile(re.escape(f"{name}: {value}"))
        )
    await no_violations(page)
    await screenshot(page, "timemachine")


@pytest.mark.usefixtures("own_pods")
async def test_fleet_of_a_time_names_its_holders(
    page: Page, cluster: Cluster, no_violations: Check
) -> None:
    await _open(page, cluster)
    table = page.get_by_role("table", name="Shares at that time")
    names = ("first", "second")
    with anyio.fail_after(SEEN_MS / 1000):
        while True:  # pods that started less than a second ago are later than the time asked for
            now = await _now(page)
            await _show(page, now)
            await expect(table).to_be_visible()
            running = table.get_by_role("row").filter(has_text="running")
            if await running.count() == len(names):
                break
    for name in names:
        node = (await cluster.pod(name)).spec.node_name
        row = table.get_by_role("row", name=f"default/{name}")
        for column, text in ((1, "running"), (2, node), (4, f"{POD_MIB:,} MiB")):
            await expect(row.get_by_role("cell").nth(column)).to_have_text(str(text))
    await no_violations(page)
    await _show(page, now - timedelta(hours=6))
    await expect(page.get_by_text("No pod held a device at that time.")).to_be_visible()
    await expect(page.get_by_text("of 12 devices")).to_be_visible()


async def test_time_of_the_future_is_refused(
    page: Page, cluster: Cluster, expected_errors: list[str]
) -> None:
    expected_errors.append("400")
    await _open(page, cluster)
    await _show(page, await _now(page) + timedelta(days=2))
    await expect(page.get_by_role("alert")).to_contain_text("not a time of the last seven days")


async def _now(page: Page) -> datetime:
    """The browser's time, as its fields have it."""
    return datetime.fromisoformat(await page.evaluate("new Date().toLocaleString('sv-SE')"))


async def _show(page: Page, at: datetime) -> None:
    await page.get_by_label("Time", exact=True).fill(at.isoformat(timespec="seconds"))
    await page.get_by_role("button", name="Show the fleet").click()
