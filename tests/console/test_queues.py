# SPDX-License-Identifier: Apache-2.0
"""The view of queues: shares, positions, and what a namespace may still use."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.console.conftest import Check, Shoot, with_console
from tests.e2e.conftest import small_pod

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster, pytest.mark.timeout(240)]

QUEUES = """
[[queue]]
name = "research"
[[queue]]
name = "vision"
parent = "research"
guaranteed = { memory_mib = 4000 }
namespaces = ["team-a"]
[[queue]]
name = "speech"
parent = "research"
guaranteed = { memory_mib = 4000 }
namespaces = ["team-b"]
"""
QUOTA = {
    "metadata": {"name": "gpu"},
    "spec": {"hard": {"limits.nvidia.com/gpumem": "7000"}},
}


@pytest.fixture(scope="module")
async def cluster(
    built_console: Path, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """Two queues of 4,000 MiB each; ``team-a`` uses 5,000 of them and has two pods that wait."""
    del browser  # without one the tests are skipped, and no cluster is needed
    in_team_a = {"namespace": "team-a"}
    folder = tmp_path_factory.mktemp("queues")
    file = folder / "queues.toml"
    file.write_text(QUEUES)
    spec = ClusterSpec(
        nodes=(NodeSpec(name="gpu-a", profile="4xT4"),),
        backoff_s=0.2,
        plane="sim",
        settings={"scheduler": {"queues_file": str(file)}},
    )
    async with run_cluster(with_console(built_console, spec), folder / "site") as running:
        for namespace in ("team-a", "team-b"):
            await running.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        await running.create("/api/v1/namespaces/team-a/resourcequotas", QUOTA)
        await running.create_pod(small_pod("runs", memory_mib=5000), namespace="team-a")
        await running.until("it runs", partial(running.pod_is, "runs", "Running", **in_team_a))
        for name, memory_mib in (("first", 3500), ("second", 2900)):
            await running.create_pod(small_pod(name, memory_mib=memory_mib), **in_team_a)
            await running.until(f"{name} is refused", partial(is_refused, running, name))
        yield running


async def is_refused(cluster: Cluster, name: str) -> bool:
    pod = await cluster.pod(name, namespace="team-a")
    return any(one.reason == "Unschedulable" for one in pod.status.conditions or [])


async def test_queues_show_shares_positions_and_reasons(
    page: Page, cluster: Cluster, no_violations: Check, screenshot: Shoot
) -> None:
    await page.goto(f"{cluster.url('registry')}/console/queues")
    tree = page.get_by_role("table", name="Queues", exact=True)
    vision = tree.get_by_role("row", name="vision")
    texts = ("vision", "Memory", "5,000 MiB", "4,000 MiB", "1,000 MiB", "–")
    for column, text in enumerate(texts):
        await expect(vision.get_by_role("cell").nth(column)).to_have_text(text)
    waiting = page.get_by_role("table", name="Waiting pods")
    first = waiting.get_by_role("row", name="team-a/first")
    second = waiting.get_by_role("row", name="team-a/second")
    await expect(first.get_by_role("cell").nth(1)).to_have_text("1")
    await expect(second.get_by_role("cell").nth(1)).to_have_text("2")
    await expect(first).to_contain_text("Quota of the namespace")
    await expect(second).to_contain_text("3,500 MiB")
    await expect(first).to_contain_text("unknown: only 0 pods")
    await no_violations(page)
    await screenshot(page, "queues")


async def test_namespace_sees_what_it_can_still_ask_for(
    page: Page, cluster: Cluster, no_violations: Check
) -> None:
    await page.goto(f"{cluster.url('registry')}/console/queues")
    await page.get_by_label("Namespace", exact=True).fill("team-a")
    await page.keyboard.press("Enter")
    still = page.get_by_role("table", name="What team-a can still ask for")
    quota = still.get_by_role("row", name="nvidia: Memory")
    await expect(quota.get_by_role("cell").nth(1)).to_have_text("2,000 MiB")
    await expect(quota).to_contain_text('quota "gpu"')
    largest = page.get_by_role("table", name="Largest share that is free")
    await expect(largest.get_by_role("row")).to_have_count(2)
    await no_violations(page)
    # A pod of the amount that the page allows starts.
    await page.get_by_label("Namespace", exact=True).fill("team-b")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("table", name="What team-b can still ask for")).to_contain_text(
        "4,000 MiB"
    )
    await expect(page.get_by_role("table", name="Waiting pods")).to_have_count(0)
    await expect(page.get_by_text("Loading…")).to_have_count(0)
    await expect(page.get_by_role("main")).not_to_contain_text("team-a")
    await cluster.create_pod(small_pod("most", memory_mib=4000), namespace="team-b")
    await cluster.until("it runs", lambda: cluster.pod_is("most", "Running", namespace="team-b"))
