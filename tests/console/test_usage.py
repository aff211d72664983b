# SPDX-License-Identifier: Apache-2.0
"""The views of usage and of idle shares show the numbers of the API, and those computed by hand."""

import csv
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from playwright.async_api import Browser, Page, Response, expect

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hamictl import client
from hamictl.commands.usage import as_csv
from tests.console.conftest import Check, Shoot, get, with_console
from tests.e2e.conftest import small_pod

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster]

MIB = 3840
PART = 0.25
"""Part of the profile's T4 that it is."""
EURO_PER_HOUR = 3600.0
PRICES = f'{{"currency": "EUR", "device_hour": {{"*": {EURO_PER_HOUR}}}}}'
SETTINGS = {"registry": {"prices": PRICES}, "nodeagent": {"usage.event_s": "1"}}
TENANT = "team-a"


@pytest.fixture(scope="module")
async def cluster(
    built_console: Path, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """One node; a pod of each of two namespaces, and one that has ended."""
    del browser  # without one the tests are skipped, and no cluster is needed
    spec = ClusterSpec(
        nodes=(NodeSpec(name="gpu-a", profile="4xT4"),),
        backoff_s=0.2,
        plane="sim",
        settings=SETTINGS,
    )
    async with run_cluster(
        with_console(built_console, spec), tmp_path_factory.mktemp("usage")
    ) as running:
        await running.create("/api/v1/namespaces", {"metadata": {"name": TENANT}})
        for name, namespace in (("serve", "default"), ("train", TENANT), ("ended", TENANT)):
            await running.create_pod(small_pod(name, memory_mib=MIB), namespace=namespace)
        for name, namespace in (("serve", "default"), ("train", TENANT), ("ended", TENANT)):
            await running.until(
                f"{name} runs",
                partial(running.pod_is, name, "Running", namespace=namespace),
            )
        yield running


@asynccontextmanager
async def _answer_of(page: Page, *parts: str) -> AsyncIterator[list[Any]]:
    """The answer that the page gets from an URL with these parts while the block runs."""
    found: list[Any] = []

    def is_wanted(response: Response) -> bool:
        return all(part in response.url for part in parts) and response.ok

    async with page.expect_response(is_wanted) as waiting:
        yield found
    response = await waiting.value
    found.append(await response.json())


async def _open_usage(page: Page, cluster: Cluster, by: str = "") -> Any:
    """Show the view by namespace, or ``by``; return the answer that it shows."""
    async with _answer_of(page, "/v1/consumption?") as found:
        await page.goto(f"{cluster.url('registry')}/console/usage")
    if by:
        async with _answer_of(page, f"by={by}") as found:
            await page.get_by_role("combobox", name="By", exact=True).select_option(by)
    await expect(page.get_by_role("table", name="Usage")).to_be_visible()
    return found[0]


def _text(seconds: float) -> str:
    """Device time of less than an hour, as the page writes it."""
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    minutes, rest = divmod(round(seconds), 60)
    parts = ([f"{minutes} min"] if minutes else []) + ([f"{rest} s"] if rest else [])
    return " ".join(parts)


async def _cells(page: Page, row: str) -> dict[str, str]:
    table = page.get_by_role("table", name="Usage")
    await expect(table.get_by_role("row", name=row)).to_be_visible()
    names = await table.get_by_role("columnheader").all_text_contents()
    cells = await table.get_by_role("row", name=row).get_by_role("cell").all_text_contents()
    return dict(zip((name.strip(" ▲▼") for name in names), cells, strict=True))


async def _is_held(cluster: Cluster, path: str) -> bool:
    items = (await get(cluster, path))["items"]
    return [one["state"] for one in items] == ["running"]


async def test_a_pods_time_and_price_are_as_computed_by_hand(page: Page, cluster: Cluster) -> None:
    path = f"/v1/allocations/{TENANT}/ended"
    await cluster.until("the share is shown", partial(_is_held, cluster, path))
    (held,) = (await get(cluster, path))["items"]
    await cluster.delete_pod("ended", namespace=TENANT)
    released: Any = None
    with anyio.fail_after(60):
        while released is None or released["state"] != "released":
            (released,) = (await get(cluster, path))["items"]
            await anyio.sleep(0.1)
    by_hand_s = PART * (released["reserved_s"] - held["reserved_s"])
    found = await _open_usage(page, cluster, "pod")
    row = next(one for one in found["items"] if one["name"] == f"{TENANT}/ended")
    # A bind may renew the reservation, which does not begin it again.
    assert row["reserved_s"] == pytest.approx(by_hand_s, abs=0.5)
    assert row["cost"] == pytest.approx(row["reserved_s"] * EURO_PER_HOUR / 3600)
    cells = await _cells(page, f"{TENANT}/ended")
    assert cells["Reserved"] == _text(row["reserved_s"])
    assert cells["Saved by sharing"] == _text(row["saved_s"])
    assert cells["Cost"] == f"EUR\u00a0{row['cost']:,.2f}"


async def test_groups_show_the_answer_and_add_up(
    page: Page, cluster: Cluster, no_violations: Check, screenshot: Shoot
) -> None:
    found = await _open_usage(page, cluster)
    assert [one["name"] for one in found["items"]] == [TENANT, "default"]
    for row in found["items"]:
        cells = await _cells(page, row["name"])
        assert cells["Reserved"] == _text(row["reserved_s"])
        assert cells["Allocations"] == str(row["allocations"])
        bar = page.get_by_role("img", name=f"{row['name']}: Used {_text(row['used_s'])}")
        await expect(bar).to_be_visible()
    total = page.locator(".figure", has=page.get_by_text("Reserved", exact=True))
    total = total.locator(".figure-value")
    await expect(total).to_have_text(_text(found["total"]["reserved_s"]))
    fleet = found["fleet"]
    reserved = sum(one["reserved_s"] for one in found["items"])
    assert reserved + fleet["free_s"] - fleet["overlap_s"] == pytest.approx(fleet["capacity_s"])
    await no_violations(page)
    await screenshot(page, "usage")


async def test_the_download_is_the_csv_of_hamictl(
    page: Page, cluster: Cluster, tmp_path: Path
) -> None:
    found = await _open_usage(page, cluster, "pod")
    async with page.expect_download() as waiting:
        await page.get_by_role("button", name="Download CSV").click()
    download = await waiting.value
    assert download.suggested_filename.startswith("usage-pod-")
    await download.save_as(tmp_path / "usage.csv")
    text = (await anyio.Path(tmp_path / "usage.csv").read_bytes()).decode()
    assert text == as_csv(msgspec.convert(found, client.Consumption))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["SubAccountId"] for row in rows} == {"default", TENANT}


async def test_the_namespace_filter_leaves_others_and_the_capacity_out(
    page: Page, cluster: Cluster
) -> None:
    await _open_usage(page, cluster)
    async with _answer_of(page, "/v1/consumption?", f"namespace={TENANT}") as found:
        await page.locator("input[name=namespace]").fill(TENANT)
        await page.keyboard.press("Enter")
    assert [one["name"] for one in found[0]["items"]] == [TENANT]
    assert found[0]["fleet"] is None
    table = page.get_by_role("table", name="Usage")
    await expect(table.get_by_role("row", name="default")).to_have_count(0)
    await expect(page.get_by_text("of all devices")).to_have_count(0)


@pytest.mark.timeout(150)
async def test_idle_shares_are_shown_once_they_are_idle(
    page: Page, cluster: Cluster, no_violations: Check, screenshot: Shoot
) -> None:
    await cluster.create_pod(small_pod("too-large", memory_mib=5 * MIB))
    await page.goto(f"{cluster.url('registry')}/console/idle")
    await expect(page.get_by_text("No share was idle for 30 minutes.")).to_be_visible()
    with anyio.fail_after(120):
        while len((await get(cluster, "/v1/idle?minutes=1"))["items"]) < 2:
            await anyio.sleep(1)
    async with _answer_of(page, "minutes=1") as found:
        await page.get_by_role("combobox", name="Idle for at least").select_option("1")
    table = page.get_by_role("table", name="Idle shares")
    for share in found[0]["items"]:
        row = table.get_by_role("row", name=f"{share['namespace']} {share['pod']}")
        await expect(row).to_contain_text(f"{MIB:,} MiB")
        await expect(row).to_contain_text(_text(share["lost_s"]))
        assert share["lost_s"] == pytest.approx(
            PART * (found[0]["to_s"] - share["since_s"]), rel=0.01
        )
    waiting = page.get_by_role("table", name="Pods waiting meanwhile")
    await expect(waiting.get_by_role("row", name="default too-large")).to_be_visible(timeout=40_000)
    await no_violations(page)
    await screenshot(page, "idle")
