# SPDX-License-Identifier: Apache-2.0
"""Login, preferences, keyboard, accessibility and lost contact of the console."""

import pytest
from playwright.async_api import Page, Route, expect

from hami_sim.cluster import Cluster
from tests.console.conftest import POD_MIB, Check, log_in
from tests.e2e.conftest import small_pod

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster]

REJECTED = r"status of 401"
"""Chromium reports every answer of this kind in its console."""
CUT_MS = 30_000
LISTENS = "() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 200)))"
"""Returns after the page has drawn, and has run what follows: its listeners for keys."""


async def test_wrong_token_is_reported_and_the_right_one_opens_the_console(
    anonymous_page: Page, cluster: Cluster, token: str, expected_errors: list[str]
) -> None:
    expected_errors.append(REJECTED)
    page = anonymous_page
    await page.goto(f"{cluster.url('registry')}/console/capacity")
    field = page.get_by_label("Token")
    await expect(field).to_be_focused()
    await field.fill("no-such-token")
    await field.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("does not accept this token")
    await field.fill(token)
    await field.press("Enter")
    await expect(page.get_by_role("heading", name="Capacity", exact=True)).to_be_visible()
    assert await page.evaluate("document.cookie") == ""


async def test_token_lives_as_long_as_the_tab_and_ends_with_the_logout(page: Page) -> None:
    await page.reload()
    await expect(page.get_by_role("navigation")).to_be_visible()
    other = await page.context.new_page()
    await other.goto(page.url)
    await expect(other.get_by_label("Token")).to_be_visible()
    await page.get_by_role("button", name="Log out").click()
    await page.reload()
    await expect(page.get_by_label("Token")).to_be_visible()


async def test_token_that_expires_leads_to_the_login(
    page: Page, expected_errors: list[str]
) -> None:
    expected_errors.append(REJECTED)
    await page.evaluate("sessionStorage.setItem('hami-token', 'expired')")
    await page.reload()
    await expect(page.get_by_role("alert")).to_contain_text("no longer accepted")


async def test_language_is_switched_and_kept(page: Page, cluster: Cluster) -> None:
    await page.goto(f"{cluster.url('registry')}/console/capacity")
    await page.get_by_label("Language").select_option("zh")
    await expect(page.get_by_role("heading", name="容量", exact=True)).to_be_visible()
    await page.reload()
    await expect(page.get_by_role("heading", name="容量", exact=True)).to_be_visible()
    await expect(page.locator("html")).to_have_attribute("lang", "zh")


async def test_theme_is_switched_and_kept(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = await page.evaluate(background)
    await page.get_by_label("Theme").select_option("dark")
    await expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = await page.evaluate(background)
    assert dark != light
    await page.reload()
    await expect(page.get_by_role("navigation")).to_be_visible()
    await expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert await page.evaluate(background) == dark
    await page.get_by_label("Theme").select_option("auto")
    await expect(page.locator("html")).to_have_attribute("data-theme", "auto")
    await page.emulate_media(color_scheme="light")
    assert await page.evaluate(background) == light
    await page.emulate_media(color_scheme="dark")
    assert await page.evaluate(background) == dark


async def test_views_are_reached_by_keyboard(page: Page) -> None:
    await page.goto(page.url)
    await expect(page.get_by_role("navigation")).to_be_visible()
    await page.keyboard.press("Tab")
    skip = page.get_by_role("button", name="Skip to content")
    await expect(skip).to_be_focused()
    await expect(skip).to_be_in_viewport()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("main")).to_be_focused()
    link = page.get_by_role("navigation").get_by_role("link", name="Capacity")
    await link.focus()
    await page.keyboard.press("Enter")
    await expect(link).to_have_attribute("aria-current", "page")


async def test_slash_focuses_the_search_which_opens_a_view(page: Page, cluster: Cluster) -> None:
    await page.goto(f"{cluster.url('registry')}/console/no-such-view")
    await page.get_by_text("This page does not exist.").wait_for()
    await page.evaluate(LISTENS)
    await page.keyboard.press("/")
    field = page.get_by_role("combobox", name="Search")
    await expect(field).to_be_focused()
    await page.keyboard.type("nothing like this")
    await expect(page.get_by_text("Nothing found.")).to_be_visible()
    await page.keyboard.press("Escape")
    await page.keyboard.type("capac")
    await expect(page.get_by_role("option", name="Capacity")).to_be_visible()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Capacity", exact=True)).to_be_visible()
    await expect(page.get_by_role("main")).to_be_focused()


async def test_console_offers_what_the_caller_may_do(page: Page, cluster: Cluster) -> None:
    """The rights of a viewer of one namespace, as the session reports them."""

    async def limited(route: Route) -> None:
        answer = await route.fetch()
        session = await answer.json()
        tenant = {"GET /v1/allocations", "GET /v1/workloads/{namespace}/{pod}", "GET /v1/queues"}
        session["routes"] = sorted(tenant) if "namespace=default" in route.request.url else []
        await route.fulfill(response=answer, json=session)

    await page.route("**/v1/session*", limited)
    await page.goto(f"{cluster.url('registry')}/console/workloads/default/first")
    links = page.get_by_role("navigation").get_by_role("link")
    await expect(page.get_by_text("Your role needs a namespace")).to_be_visible()
    await expect(links).to_have_count(0)
    field = page.get_by_label("Namespace", exact=True)
    await field.fill("default")
    await field.press("Enter")
    await expect(links).to_have_count(2)
    await expect(page.get_by_role("button", name="Resize")).to_be_disabled()
    await page.get_by_role("combobox", name="Search").fill("capac")
    await expect(page.get_by_text("Nothing found.")).to_be_visible()
    await page.unroute("**/v1/session*", limited)
    await page.reload()
    await expect(page.get_by_role("button", name="Resize")).to_be_enabled()
    await expect(links.filter(has_text="Control plane")).to_be_visible()


async def test_table_is_sorted_by_keyboard(page: Page, cluster: Cluster) -> None:
    await page.goto(f"{cluster.url('registry')}/console/capacity")
    heading = page.get_by_role("columnheader", name="Largest share")
    await heading.get_by_role("button").focus()
    cells = page.get_by_role("table", name="By model").locator("tbody td:first-child")
    await page.keyboard.press("Enter")
    await expect(heading).to_have_attribute("aria-sort", "descending")
    await expect(cells.first).to_contain_text("A100")
    await page.keyboard.press("Space")
    await expect(heading).to_have_attribute("aria-sort", "ascending")
    await expect(cells.first).to_contain_text("T4")


async def test_unknown_page_is_reported(page: Page, cluster: Cluster) -> None:
    await page.goto(f"{cluster.url('registry')}/console/no-such-view")
    await expect(page.get_by_text("This page does not exist.")).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_views_have_no_violations(
    page: Page, cluster: Cluster, no_violations: Check, theme: str
) -> None:
    await page.get_by_label("Theme").select_option(theme)
    links = page.get_by_role("navigation").get_by_role("link")
    await expect(links.filter(has_text="Control plane")).to_be_visible()
    paths = [await link.get_attribute("href") for link in await links.all()]
    assert paths
    for path in paths:
        await page.goto(f"{cluster.url('registry')}{path}")
        await page.get_by_role("heading", level=1).wait_for()
        await expect(page.get_by_text("Loading…")).to_have_count(0)
        await no_violations(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_login_has_no_violations(
    anonymous_page: Page, cluster: Cluster, no_violations: Check, theme: str
) -> None:
    await anonymous_page.goto(f"{cluster.url('registry')}/console/")
    await anonymous_page.get_by_label("Theme").select_option(theme)
    await no_violations(anonymous_page)


@pytest.mark.parametrize("width", [1280, 400])
async def test_page_does_not_scroll_sideways(page: Page, cluster: Cluster, width: int) -> None:
    await page.set_viewport_size({"width": width, "height": 800})
    await page.goto(f"{cluster.url('registry')}/console/capacity")
    await page.get_by_role("heading", name="Capacity", exact=True).wait_for()
    overflow = "(e => e.scrollWidth - e.clientWidth)"
    assert await page.evaluate(f"{overflow}(document.documentElement)") == 0
    assert await page.evaluate(f"{overflow}(document.getElementById('content'))") == 0


@pytest.mark.usefixtures("own_pods")
async def test_lost_contact_is_reported_and_the_view_catches_up(
    anonymous_page: Page, cluster: Cluster, token: str
) -> None:
    page = anonymous_page
    await log_in(page, cluster, token)
    await page.goto(f"{cluster.url('registry')}/console/capacity")
    free = page.locator(".figure", has_text="Free memory").locator(".amount")
    before = await free.get_attribute("title")
    assert before is not None
    registry = cluster.processes["registry"]
    registry.freeze()
    try:
        await cluster.create_pod(small_pod("meanwhile", memory_mib=POD_MIB))
        await expect(page.get_by_text("No contact with the server")).to_be_visible(timeout=CUT_MS)
        assert await free.get_attribute("title") == before
        await page.wait_for_timeout(CUT_MS)
        await expect(page.get_by_text("No contact with the server")).to_be_visible()
    finally:
        registry.thaw()
    await expect(page.get_by_text("No contact with the server")).to_be_hidden(timeout=CUT_MS)
    after = f"{int(before.split()[0]) - POD_MIB} MiB"
    await expect(free).to_have_attribute("title", after, timeout=CUT_MS)
    await cluster.delete_pod("meanwhile")
    await expect(free).to_have_attribute("title", before, timeout=CUT_MS)
