# SPDX-License-Identifier: Apache-2.0
"""Parts that views share, on a page of their own: a table of 40,000 rows, a dialog, a chart."""

import subprocess
from pathlib import Path

import anyio.to_thread
import pytest
from playwright.async_api import BrowserContext, Page, expect

from tests.console.conftest import Check
from tools import build_console

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster]

ROWS = 40_000
DRAWN_MOST = 100
ESBUILD = ("node_modules/esbuild/bin/esbuild", "test/parts.tsx", "--bundle", "--log-level=error")
PREACT = ("--jsx=automatic", "--jsx-import-source=preact")
PAGE = (
    '<!doctype html><html lang="en"><title>Parts</title><link rel="stylesheet" href="parts.css">'
    '<script defer src="parts.js"></script>'
)


@pytest.fixture(scope="module")
async def address(built_console: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of the page."""
    del built_console  # its packages are installed
    folder = tmp_path_factory.mktemp("parts")

    def bundle() -> None:
        with build_console.prepared() as node:
            command: list[str | Path] = [
                node,
                *ESBUILD,
                *PREACT,
                f"--outfile={folder / 'parts.js'}",
            ]
            subprocess.run(command, cwd=build_console.CONSOLE, check=True)

    await anyio.to_thread.run_sync(bundle)
    page = folder / "index.html"
    page.write_text(PAGE)
    return page.as_uri()


@pytest.fixture
async def parts(context: BrowserContext, address: str) -> Page:
    """The page of parts."""
    page = await context.new_page()
    await page.goto(address)
    return page


async def test_only_visible_rows_of_a_long_table_are_drawn(parts: Page) -> None:
    table = parts.get_by_role("table", name="Nodes")
    await expect(table).to_have_attribute("aria-rowcount", str(ROWS + 1))
    drawn = table.locator("tbody tr[data-row]")
    await expect(drawn.first).to_contain_text("node-0")
    assert await drawn.count() < DRAWN_MOST
    await parts.locator(".table-frame").evaluate("frame => frame.scrollTo(0, 28 * 20000)")
    await expect(table.get_by_role("row", name="node-20010")).to_be_visible()
    assert await drawn.count() < DRAWN_MOST


async def test_long_table_is_sorted_as_a_whole(parts: Page) -> None:
    table = parts.get_by_role("table", name="Nodes")
    await parts.get_by_role("button", name="Memory").click()
    largest = max((index * 7919) % 40_960 for index in range(ROWS))
    await expect(table.locator("tbody tr[data-row]").first).to_contain_text(str(largest))


async def test_rows_are_walked_and_opened_by_keyboard(parts: Page) -> None:
    await parts.locator("tbody tr[tabindex='0']").focus()
    focused = parts.locator("tbody tr:focus")
    for key, row in (
        ("ArrowDown", 1),
        ("End", ROWS - 1),
        ("ArrowUp", ROWS - 2),
        ("Home", 0),
        ("ArrowDown", 1),
    ):
        await parts.keyboard.press(key)
        await expect(focused).to_have_attribute("data-row", str(row))
        await expect(focused).to_be_in_viewport()
    await parts.keyboard.press("Enter")
    dialog = parts.get_by_role("dialog", name="node-1")
    await expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    await parts.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    await expect(focused).to_have_attribute("data-row", "1")
    await expect(parts.locator("#confirmed")).to_be_empty()


async def test_dialog_confirms(parts: Page) -> None:
    await parts.locator("tr[data-row='2']").click()
    await parts.get_by_role("button", name="Cordon").click()
    await expect(parts.get_by_role("dialog")).to_be_hidden()
    await expect(parts.locator("#confirmed")).to_have_text("node-2")


async def test_chart_names_its_last_values(parts: Page) -> None:
    chart = parts.get_by_role("img", name="Memory. used: ")
    await expect(chart).to_have_accessible_name("Memory. used: 188 MiB, peak: 199 MiB")
    await expect(chart.locator("canvas")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_parts_have_no_violations(parts: Page, no_violations: Check, scheme: str) -> None:
    await parts.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    await no_violations(parts)
    await parts.locator("tr[data-row='2']").click()
    await parts.get_by_role("dialog").wait_for()
    await no_violations(parts)
