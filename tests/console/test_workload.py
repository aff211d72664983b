# SPDX-License-Identifier: Apache-2.0
"""Workloads, their devices, pressure and events: the pages answer what happened, and why.

Use is recorded by the agents once a minute; the tests publish the records of hours at once. Pods of
priority and neighbors run in the simulated cluster.
"""

import json
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from playwright.async_api import Page, expect

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.usage import ContainerUsage, ShareUsage, UsageRecord
from hami_common.runtime.clock import SystemClock
from hami_sim.cluster import Cluster
from tests.console.conftest import Check, Shoot, get
from tests.e2e.conftest import small_pod

pytestmark = [pytest.mark.anyio, pytest.mark.shares_cluster]

SLOW, BUSY = "slow", "busy"
MINUTES = 90
PEAK_MIB = 1700
WAITED_S = 89.0


class Scene:
    """A pod that waits for its limit beside a busy neighbor on the same device."""

    def __init__(self, cluster: Cluster, allocations: dict[str, Any]) -> None:
        self.cluster = cluster
        self.allocations = allocations
        self.node: str = allocations[SLOW]["node"]
        self.uuid: str = allocations[SLOW]["containers"][0]["shares"][0]["uuid"]

    def url(self, path: str) -> str:
        return f"{self.cluster.url('registry')}/console/{path}"

    async def get(self, path: str) -> Any:
        return await get(self.cluster, path)

    async def publish(self, subject: str, record: Any) -> None:
        await self.cluster.bus.jetstream().publish(subject, codec.encode(record))

    async def record_use(self) -> None:
        """Publish the use of the last hour and a half."""
        begin_s = SystemClock().now_s() - 60 * MINUTES
        names = {
            pod: {
                "namespace": "default",
                "pod": pod,
                "pod_uid": self.allocations[pod]["pod_uid"],
                "container": "main",
            }
            for pod in (SLOW, BUSY)
        }
        for minute in range(MINUTES):
            record = UsageRecord(
                node=self.node,
                boot_id="1",
                seq=minute + 1,
                time_s=begin_s + 60 * minute,
                every_s=60.0,
                shares=tuple(
                    ShareUsage(
                        vendor="nvidia",
                        uuid=self.uuid,
                        limit_mib=2000,
                        used_mib=PEAK_MIB if minute == 10 else 1000,
                        limit_core_pct=30,
                        core_pct=30,
                        **one,
                    )
                    for one in names.values()
                ),
                containers=(
                    ContainerUsage(
                        processes=1,
                        waited_s=float(minute),
                        device_time_s=10.0 * minute,
                        **names[SLOW],
                    ),
                    ContainerUsage(processes=2, device_time_s=40.0 * minute, **names[BUSY]),
                ),
            )
            await self.publish(subjects.usage_event(self.node), record)


@pytest.fixture(scope="module")
async def pods(cluster: Cluster) -> AsyncIterator[None]:
    """Both pods with recorded use, on one device of node gpu-b, deleted after the module."""
    uuid = ""
    for name in (SLOW, BUSY):
        pod = small_pod(name, memory_mib=2000)
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "gpu-b"}
        pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpucores"] = "30"
        if uuid:
            pod["metadata"]["annotations"] = {"nvidia.com/use-gpuuuid": uuid}
        await cluster.create_pod(pod)
        await cluster.until(f"{name} runs", partial(cluster.pod_is, name, "Running"))
        await cluster.until(f"{name} runs in the registry", partial(_runs, cluster, name))
        uuid = (await _allocations(cluster))[name]["containers"][0]["shares"][0]["uuid"]
    await Scene(cluster, await _allocations(cluster)).record_use()
    yield
    for name in (SLOW, BUSY):
        await cluster.delete_pod(name)
    for name in (SLOW, BUSY):
        await cluster.until(f"{name} is gone", partial(cluster.pod_is_gone, name))


@pytest.fixture
async def scene(cluster: Cluster, pods: None) -> Scene:
    del pods
    return Scene(cluster, await _allocations(cluster))


async def _allocations(cluster: Cluster) -> dict[str, Any]:
    """Allocations of the registry, by pod."""
    items = (await get(cluster, "/v1/allocations?namespace=default"))["items"]
    return {one["pod"]: one for one in items}


async def _runs(cluster: Cluster, name: str) -> bool:
    found = (await _allocations(cluster)).get(name)
    return found is not None and found["state"] == "running"


async def _limit_is(scene: Scene, memory_mib: int) -> bool:
    found = await scene.get(f"/v1/workloads/default/{SLOW}")
    return bool(found["containers"][0]["devices"][0]["limit_mib"] == memory_mib)


async def _is_cordoned(scene: Scene) -> bool:
    items = (await scene.get(f"/v1/devices?node={scene.node}"))["items"]
    return bool(next(one for one in items if one["uuid"] == scene.uuid)["cordoned"])


def _figure(page: Page, label: str) -> Any:
    return page.locator(".figure", has=page.get_by_text(label, exact=True))


async def test_workload_shows_peak_waiting_and_right_size(
    page: Page, scene: Scene, no_violations: Check, screenshot: Shoot
) -> None:
    await page.goto(scene.url("workloads"))
    await page.get_by_role("link", name=SLOW, exact=True).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(f"default/{SLOW}")
    device = page.get_by_role("region", name=scene.uuid).first
    await expect(device.locator("dd").first).to_contain_text("1,700 MiB")
    await expect(_figure(page, "Waited for compute")).to_contain_text("1 min 29 s")
    await expect(_figure(page, "Waited for compute")).to_contain_text("own compute limit")
    # The peak plus 15 %; compute is not reduced, because its limit held it back.
    size = _figure(page, "Recommended request")
    await expect(size).to_contain_text("1,955 MiB · 35 %")
    await expect(size).to_contain_text("1.5 h")
    neighbors = page.get_by_role("table", name=f"Neighbors on {scene.uuid}")
    await expect(neighbors.get_by_role("link", name=f"default/{BUSY}")).to_be_visible()
    history = page.get_by_role("table", name="History")
    for change in ("reserved", "bound", "running"):
        await expect(history.get_by_text(change, exact=True)).to_be_visible()
    await no_violations(page)
    await screenshot(page, "workload")


async def test_resize_shows_before_and_after_and_restarts_nothing(page: Page, scene: Scene) -> None:
    await page.goto(scene.url(f"workloads/default/{SLOW}"))
    form = page.get_by_role("form", name="Resize container main")
    await form.get_by_label("New memory limit").fill("2600")
    await form.get_by_role("button", name="Resize", exact=True).click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_role("row", name="Memory")).to_have_text(
        re.compile(r"2,000 MiB.*2,600 MiB")
    )
    await expect(dialog.get_by_role("row", name="Compute")).to_have_text(re.compile("30 %.*30 %"))
    await dialog.get_by_role("button", name="Cancel").click()
    before = await scene.get(f"/v1/workloads/default/{SLOW}")
    assert before["containers"][0]["devices"][0]["limit_mib"] == 2000

    await form.get_by_role("button", name="Resize", exact=True).click()
    await dialog.get_by_role("button", name="Resize").click()
    await expect(
        page.get_by_text(re.compile("has the new limits|limits are booked"))
    ).to_be_visible()
    await scene.cluster.until("the limit is shown", partial(_limit_is, scene, 2600))
    after = await scene.get(f"/v1/workloads/default/{SLOW}")
    assert after["allocation"]["pod_uid"] == before["allocation"]["pod_uid"]
    await expect(
        page.get_by_role("table", name="History").get_by_text("resized", exact=True)
    ).to_be_visible()


async def test_resize_beyond_the_device_is_refused_with_the_reason(
    page: Page, scene: Scene, expected_errors: list[str]
) -> None:
    expected_errors.append("status of 4")
    await page.goto(scene.url(f"workloads/default/{SLOW}"))
    form = page.get_by_role("form", name="Resize container main")
    await form.get_by_label("New memory limit").fill("99999999")
    await form.get_by_role("button", name="Resize", exact=True).click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Resize").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("do not fit on")


async def test_device_shows_who_held_it_and_what_happened(
    page: Page, scene: Scene, no_violations: Check, screenshot: Shoot
) -> None:
    await page.goto(scene.url(f"devices/{scene.node}/{scene.uuid}"))
    holders = page.get_by_role("table", name="Who held it")
    for name in (SLOW, BUSY):
        await expect(holders.get_by_role("link", name=f"default/{name}").first).to_be_visible()
        await expect(page.locator(".lanes-bar", has_text=f"default/{name}").first).to_be_visible()
    await expect(_figure(page, "Health")).to_contain_text("healthy")
    changes = page.get_by_role("table", name="What happened")
    await expect(changes.get_by_text("reserved", exact=True).first).to_be_visible()
    await no_violations(page)
    await screenshot(page, "device")


async def test_device_is_cordoned_with_a_reason_and_uncordoned(
    page: Page, scene: Scene, no_violations: Check
) -> None:
    await page.goto(scene.url(f"devices/{scene.node}/{scene.uuid}"))
    await page.get_by_role("button", name="Cordon", exact=True).click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("Running pods stay.")
    await dialog.get_by_label("Reason").fill("fan replaced")
    await no_violations(page)
    await dialog.get_by_role("button", name="Cancel").click()
    assert not await _is_cordoned(scene)

    await page.get_by_role("button", name="Cordon", exact=True).click()
    await dialog.get_by_role("button", name="Cordon", exact=True).click()
    await expect(_figure(page, "Health")).to_contain_text("cordoned")
    await scene.cluster.until("the device is cordoned", partial(_is_cordoned, scene))

    await page.get_by_role("button", name="Uncordon").click()
    await dialog.get_by_role("button", name="Uncordon").click()
    await expect(page.get_by_role("button", name="Cordon", exact=True)).to_be_visible()
    await expect(_figure(page, "Health")).not_to_contain_text("cordoned")


async def test_pressure_names_cause_and_neighbor(
    page: Page, scene: Scene, no_violations: Check, screenshot: Shoot
) -> None:
    await page.goto(scene.url("pressure"))
    table = page.get_by_role("table", name="Containers under pressure")
    row = table.get_by_role("row", name=SLOW)
    await expect(row).to_contain_text("own compute limit")
    await expect(row.get_by_role("cell").last).to_have_text(f"default/{BUSY}")
    await expect(page.get_by_text("not for a neighbor")).to_be_visible()
    await no_violations(page)
    await screenshot(page, "pressure")
    await page.get_by_label("Namespace").fill("empty")
    await page.get_by_label("Namespace").press("Enter")
    await expect(page.get_by_text("No container waited")).to_be_visible()
    await page.get_by_role("button", name="Show all namespaces").click()


async def test_events_are_live_and_resume_after_a_pause_without_a_gap(
    page: Page, scene: Scene, no_violations: Check, screenshot: Shoot
) -> None:
    subject = subjects.usage_event("gpu-x")
    await page.goto(scene.url("events"))
    await page.get_by_label("Kind").select_option("usage")
    await page.get_by_label("Node").fill("gpu-x")
    await page.get_by_role("button", name="Apply").click()
    await expect(page.get_by_text("hami.v1.event.usage.gpu-x", exact=True).first).to_be_visible()
    rows = page.get_by_role("table", name="Newest events").locator("tbody tr")

    async def publish() -> str:
        record = UsageRecord(node="gpu-x", boot_id="1", seq=1, time_s=1.0)
        stored = await scene.cluster.bus.jetstream().publish(subject, codec.encode(record))
        return f"{stored.seq}"

    first = await publish()
    await expect(rows).to_have_count(1)
    await page.get_by_role("button", name="Pause").click()
    await expect(page.get_by_text(f"Paused after sequence {first}")).to_be_visible()
    second, third = await publish(), await publish()
    await page.get_by_role("button", name="Resume").click()
    await expect(rows).to_have_count(3)
    for place, sequence in enumerate((third, second, first)):
        await expect(rows.nth(place).get_by_role("cell").first).to_have_text(sequence)

    await rows.first.click()
    payload = json.loads(await page.locator(".events-payload").text_content() or "")
    assert payload["data"]["node"] == "gpu-x"
    facts = page.locator(".events-facts")
    for text in (
        "HAMI_EVENTS",
        "docs/schemas/usage.v1.json",
        f"--kind usage --from {int(third) + 1}",
    ):
        await expect(facts).to_contain_text(text)
    await no_violations(page)
    await screenshot(page, "events")

    # A replay from a sequence begins with the event after it.
    await page.get_by_label("After sequence").fill(first)
    await page.get_by_role("button", name="Apply").click()
    await expect(rows).to_have_count(2)


@pytest.mark.parametrize("view", ["workloads", "pressure", "events"])
async def test_views_are_readable_in_the_dark_and_in_chinese(
    page: Page, scene: Scene, view: str, no_violations: Check
) -> None:
    await page.emulate_media(color_scheme="dark")
    await page.goto(scene.url(view))
    await page.locator("select[name=language]").select_option("zh")
    title = {"workloads": "工作负载", "pressure": "压力", "events": "事件"}[view]
    await expect(page.get_by_role("heading", level=1)).to_have_text(title)
    await no_violations(page)
