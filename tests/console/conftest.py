# SPDX-License-Identifier: Apache-2.0
"""The console in a real Chromium against a running simulated cluster.

``page`` is a tab of a caller who is logged in. It fails the test on errors in the browser's log,
violations of the Content-Security-Policy and requests to other hosts. All modules of a worker share
one cluster, and are marked ``anyio`` and ``shares_cluster``. A module that needs another cluster
overrides the fixture ``cluster``, with the settings of ``with_console``.
"""

import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import msgspec
import pytest
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    ViewportSize,
    async_playwright,
    expect,
)

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.cluster.needs import is_required
from tests.e2e.conftest import small_pod
from tools import build_console

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images" / "console"
AXE = ROOT / "console/node_modules/axe-core/axe.min.js"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZE: ViewportSize = {"width": 1280, "height": 800}
SEEN_MS = 15_000
"""Longest wait for a change of the page."""
expect.set_options(timeout=SEEN_MS)
OWN_PODS = ("first", "second")
NODES = (
    NodeSpec(name="gpu-a", profile="8xA100-40"),
    NodeSpec(name="gpu-b", profile="4xT4"),
)
POD_MIB = 3000
SERIOUS = frozenset({"serious", "critical"})

Check = Callable[[Page], Awaitable[None]]
Shoot = Callable[[Page, str], Awaitable[None]]


def _missing(reason: str) -> None:
    if is_required():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def with_console(built: Path, spec: ClusterSpec, *, auth: str = "kubernetes") -> ClusterSpec:
    """The cluster with a registry that serves the console."""
    registry = {**spec.settings.get("registry", {}), "auth": auth}
    settings = {**spec.settings, "registry": registry}
    return msgspec.structs.replace(spec, console=str(built), settings=settings)


@pytest.fixture(scope="session")
async def built_console() -> Path:
    """Directory of the built console."""
    try:
        return await anyio.to_thread.run_sync(build_console.build)
    except subprocess.CalledProcessError as error:
        _missing(f"the console was not built: {error}")
        raise


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    """One Chromium for all tests of the worker."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        _missing("Chromium is not installed (Debian: apt install chromium fonts-dejavu-core)")
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield running
        finally:
            await running.close()


@pytest.fixture(scope="session")
async def cluster(
    built_console: Path, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """Two nodes and two running pods; the registry requires a token."""
    del browser  # without one the tests are skipped, and no cluster is needed
    looks = {"usage.look_s": "0.3", "usage.idle_look_s": "0.3"}
    given = ClusterSpec(nodes=NODES, backoff_s=0.2, plane="sim", settings={"nodeagent": looks})
    spec = with_console(built_console, given)
    async with run_cluster(spec, tmp_path_factory.mktemp("console")) as running:
        for name in OWN_PODS:
            await running.create_pod(small_pod(name, memory_mib=POD_MIB))
        for name in OWN_PODS:
            await running.until(f"{name} runs", partial(running.pod_is, name, "Running"))
        yield running


@pytest.fixture
def token(cluster: Cluster) -> str:
    """Token of the cluster's administrator."""
    return cluster.plane.access().token


async def get(cluster: Cluster, path: str) -> Any:
    """Answer of the registry to the cluster's administrator."""
    headers = {"Authorization": f"Bearer {cluster.plane.access().token}"}
    url = f"{cluster.url('registry')}{path}"
    async with cluster.session.get(url, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


@pytest.fixture
async def own_pods(cluster: Cluster) -> None:
    """Wait until the registry shows no shares but those of the shared cluster's own pods.

    Pods that an earlier test left are deleted. The registry reads releases after pods are gone.
    """

    async def are_alone() -> bool:
        for pod in await cluster.pods():
            name = pod.metadata.name
            if name not in OWN_PODS and not pod.metadata.deletion_timestamp:
                await cluster.delete_pod(name)
        held = (await get(cluster, "/v1/allocations"))["items"]
        devices = (await get(cluster, "/v1/devices"))["items"]
        return (
            {pod.metadata.name for pod in await cluster.pods()} == set(OWN_PODS)
            and sorted((one["pod"], one["state"]) for one in held)
            == [(name, "running") for name in OWN_PODS]
            and sum(one["booked_mib"] for one in devices) == len(OWN_PODS) * POD_MIB
        )

    await cluster.until("only the cluster's own pods hold shares", are_alone, limit_s=60)


@pytest.fixture
def expected_errors() -> list[str]:
    """Regular expressions of errors in the browser's console that the test causes."""
    return []


@pytest.fixture
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    """A browser profile of its own, with English as its language and the light theme."""
    made = await browser.new_context(viewport=SIZE, locale="en-US", color_scheme="light")
    made.set_default_timeout(SEEN_MS)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def anonymous_page(
    context: BrowserContext, cluster: Cluster, expected_errors: list[str]
) -> AsyncIterator[Page]:
    """A tab without a token, on an empty page."""
    page = await context.new_page()
    origin = cluster.url("registry")
    problems: list[str] = []

    def note_message(message: ConsoleMessage) -> None:
        if message.type == "error" or "Content Security Policy" in message.text:
            problems.append(message.text)

    def note_request(request: Request) -> None:
        asked = urlsplit(request.url)
        if asked.scheme not in ("data", "blob") and f"{asked.scheme}://{asked.netloc}" != origin:
            problems.append(f"request to another host: {request.url}")

    page.on("console", note_message)
    page.on("pageerror", lambda error: problems.append(f"uncaught: {error}"))
    page.on("request", note_request)
    yield page
    left = [p for p in problems if not any(re.search(known, p) for known in expected_errors)]
    assert not left, left


@pytest.fixture
async def page(anonymous_page: Page, cluster: Cluster, token: str) -> Page:
    """A logged-in tab that shows the first view of the console."""
    await log_in(anonymous_page, cluster, token)
    return anonymous_page


async def log_in(page: Page, cluster: Cluster, token: str) -> None:
    """Open the console and log in through its form."""
    await page.goto(f"{cluster.url('registry')}/console/")
    await page.get_by_label("Token").fill(token)
    await page.get_by_role("button", name="Log in").click()
    await page.get_by_role("navigation").wait_for()


@pytest.fixture
def no_violations() -> Check:
    """Check the page's accessibility: serious and critical findings of axe fail the test."""

    async def check(page: Page) -> None:
        await page.evaluate(await anyio.Path(AXE).read_text(encoding="utf-8"))
        result = await page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        found = [
            f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes']]}"
            for one in result["violations"]
            if one["impact"] in SERIOUS
        ]
        assert not found, found

    return check


@pytest.fixture
def screenshot(request: pytest.FixtureRequest) -> Shoot:
    """Write the page to ``docs/images/console/NAME.png`` if the run was asked for screenshots."""
    wanted = request.config.getoption("--screenshots")

    async def shoot(page: Page, name: str) -> None:
        if wanted:
            await page.screenshot(path=IMAGES / f"{name}.png", animations="disabled")

    return shoot
