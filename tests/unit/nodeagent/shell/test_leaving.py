# SPDX-License-Identifier: Apache-2.0
"""An agent that is asked to stop is given no more pods and serves those on their way."""

from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from hami_nodeagent.shell import leaving
from hami_nodeagent.shell.leaving import leave
from hami_nodeagent.shell.site import Site
from tests.unit.nodeagent.core.builders import Given
from tests.unit.nodeagent.shell.support import know, make_site

pytestmark = pytest.mark.anyio


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(leaving, "SETTLE_S", 0.05)
    site = make_site(tmp_path, leave_s=5.0)
    site.picture.note_served("nvidia", served=True)
    site.picture.note_in_status("nvidia")
    return site


async def test_nothing_is_offered_while_it_leaves(site: Site) -> None:
    assert site.picture.offered() == {"nvidia"}
    changed = site.picture.changed
    await leave(site)
    assert changed.is_set(), "a heartbeat is sent at once"
    assert site.picture.offered() == frozenset()
    assert site.picture.served == {"nvidia"}


async def test_it_waits_for_pods_that_have_a_reservation_and_no_devices(site: Site) -> None:
    granted, awaited = Given("granted"), Given("awaited")
    know(site, granted, awaited)
    site.picture.grants.add(granted.grant("main", "a"))
    assert site.picture.awaited() == (f"{awaited.facts.namespace}/awaited",)
    has_left = anyio.Event()

    async def stop() -> None:
        await leave(site)
        has_left.set()

    async with anyio.create_task_group() as group:
        group.start_soon(stop)
        await anyio.sleep(0.3)
        assert not has_left.is_set()
        site.picture.grants.add(awaited.grant("main", "b"))
        site.picture.note_change()
        with anyio.fail_after(2):
            await has_left.wait()


async def test_pod_that_ended_is_not_awaited(site: Site) -> None:
    pod = Given("pod")
    know(site, pod)
    site.picture.pods.end(pod.uid, now_s=1)
    assert site.picture.awaited() == ()


async def test_pod_with_a_claim_is_not_awaited(site: Site) -> None:
    """Kubelet asks the next agent for it."""
    pod = Given("pod")
    pod.entry = replace(pod.entry, record=replace(pod.record, claim="c"))
    know(site, pod)
    assert site.picture.awaited() == ()


async def test_wait_for_a_pod_that_never_comes_is_bounded(site: Site, tmp_path: Path) -> None:
    site.use(make_site(tmp_path, leave_s=0.2).settings)
    know(site, Given("pod"))
    with anyio.fail_after(2):
        await leave(site)


@pytest.mark.parametrize("leave_s", [0.0, 5.0])
async def test_it_stops_at_once_without_the_bus_or_by_its_settings(
    site: Site, tmp_path: Path, leave_s: float
) -> None:
    site.use(make_site(tmp_path, leave_s=leave_s).settings)
    site.picture.view.bus_connected = leave_s == 0.0
    know(site, Given("pod"))
    with anyio.fail_after(0.04):
        await leave(site)
    assert site.picture.offered() == {"nvidia"}
