# SPDX-License-Identifier: Apache-2.0
"""Pages with the present bounds of containers, and the report of what they use of them."""

import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from hami_common.model.device import Burst
from hami_common.model.placement import Share
from hami_common.runtime.tasks import background
from hami_nodeagent.core.breach import BreachRules
from hami_nodeagent.core.bursts import SETTLE_S
from hami_nodeagent.core.holders import holders_of
from hami_nodeagent.core.living import View
from hami_nodeagent.core.podfacts import ClaimUse
from hami_nodeagent.core.usage import Row
from hami_nodeagent.settings import DraSettings, PrioritySettings, UsageSettings
from hami_nodeagent.shell import bursts, page
from hami_nodeagent.shell.bursts import BoundPage, BurstKeeper
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.regions import read_region, region_path
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.usagemetrics import Look
from tests.support.regions import Built, Process, Used, own_region
from tests.unit.nodeagent.core.builders import Given, device
from tests.unit.nodeagent.shell.support import know, make_site, until

pytestmark = pytest.mark.anyio
MIB = 1 << 20
GPU = "nvidia-0"
NATIVE = Path(__file__).parents[4] / "native" / "libvgpu" / "src"


LAYOUT = """
#include <stdio.h>
#include "room.h"
int main(void) {
    printf("%llu %u %u %u %zu %zu %zu %zu %zu %zu\\n", 0ULL + ROOM_MAGIC, ROOM_LAYOUT,
           ROOM_DEVICES, ROOM_UUID, sizeof(struct room_page), sizeof(struct room_device),
           offsetof(struct room_page, devices), offsetof(struct room_device, sequence),
           offsetof(struct room_device, lease_until_ns),
           offsetof(struct room_device, memory_bytes));
    return 0;
}
"""


def test_layout_is_that_of_the_c_header(tmp_path: Path) -> None:
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(LAYOUT)
    subprocess.run(["cc", "-std=c11", f"-I{NATIVE}", "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert printed.split() == [
        *map(str, (bursts.MAGIC, page.LAYOUT, page.DEVICES_MAX, page.UUID_BYTES, page.SIZE)),
        *map(str, (page.DEVICE_BYTES, page.HEADER_BYTES, page.SEQUENCE_AT, page.LEASE_AT)),
        str(bursts.MEMORY_AT),
    ]


class FakeRecorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    async def record(self, regarding: Any, *, reason: str, message: str, kind: str) -> None:
        del kind
        self.events.append((regarding.name, reason, message))


class Node:
    """A site with a device of 1000 MiB, and its keeper of bursts."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self.directory = directory
        self.site: Site = make_site(
            directory / "state",
            pods_dir=str(directory / "pods"),
            priority=PrioritySettings(directory=str(directory / "pages"), neighbours_s=0.01),
            **more,
        )
        self.site.picture.ledger_known = self.site.picture.pods_known = True
        self.bells = Doorbells(directory / "pages")
        self.recorder = FakeRecorder()
        self.reports = 0
        self.sample = Look()
        self.keeper = self.fresh()

    def fresh(self) -> BurstKeeper:
        """A keeper as after a restart of the agent."""
        return BurstKeeper(
            site=self.site,
            bells=self.bells,
            look=lambda: self.sample,
            report=self._count,
            events=lambda: self.recorder,  # type: ignore[arg-type,return-value]  # a stand-in
        )

    def _count(self) -> None:
        self.reports += 1

    def describe(self, **more: Any) -> None:
        """Store the device as the registry publishes it."""
        (known,) = self.site.picture.canonical_by_vendor.values()
        self.site.picture.set_canonical(replace(known, devices=(device(0, **more),)))

    def reserve(self, name: str, memory_mib: int, limit_mib: int = 0) -> Given:
        """Enter a pod's record into the ledger; no container has its share yet."""
        pod = Given(name, region_volumes={"main": "region"})
        share = Share(vendor="nvidia", uuid=GPU, memory_mib=memory_mib, memory_limit_mib=limit_mib)
        containers = (replace(pod.record.containers[0], shares=(share,)),)
        pod.entry = replace(pod.entry, record=replace(pod.record, containers=containers))
        know(self.site, pod)
        return pod

    def start(self, pod: Given, *, used_mib: int = 0) -> None:
        """Grant the pod its share, with a doorbell and a region."""
        self.site.picture.grants.add(pod.grant("main", pod.name))
        self.bells.directory_of((pod.uid, "main"))
        self.use(pod, used_mib)
        self.site.picture.note_change()

    def use(self, pod: Given, used_mib: int) -> None:
        path = region_path(self.directory / "pods", pod.uid, "region")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("fresh").write_bytes(own_region(GPU, used_mib * MIB))
        path.with_name("fresh").replace(path)

    def page(self, pod: Given) -> Path:
        return self.bells.path_of((pod.uid, "main")) / "room-1"

    def bound_mib(self, pod: Given) -> int | None:
        """The bound in the page, as the library reads it; ``None`` without a valid one."""
        try:
            data = self.page(pod).read_bytes()
        except FileNotFoundError:
            return None
        assert len(data) == page.SIZE == 64 + 64 * 128
        assert data[:8] == b"VHAMIRM1"
        assert struct.unpack_from("<III", data, 8) == (1, 128, 64)
        name, sequence, lease_ns, memory = struct.unpack_from("<64sI4xQQ", data, 64)
        assert sequence % 2 == 0
        is_valid = name.rstrip(b"\0").decode() == GPU and lease_ns > time.monotonic_ns()
        return int(memory // MIB) if is_valid else None

    async def until_bound(self, pod: Given, mib: int | None) -> None:
        await until(lambda: self.bound_mib(pod) == mib)

    def bursts(self) -> dict[str, int]:
        return {one.pod_uid: one.memory_mib for one in self.site.picture.bursts(GPU)}


@asynccontextmanager
async def running(run: Callable[[], Any]) -> AsyncIterator[None]:
    async with background() as group:
        group.start_soon(run)
        yield


async def test_reservations_lower_the_bound_and_releases_raise_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    pod = node.reserve("a", 100, 800)
    node.start(pod)
    async with running(node.keeper.run):
        await node.until_bound(pod, 800)
        assert node.page(pod).stat().st_mode & 0o777 == 0o644
        inode = node.page(pod).stat().st_ino
        other = node.reserve("b", 600)
        await node.until_bound(pod, 400)
        other.entry = replace(other.entry, record=replace(other.record, op="release"))
        know(node.site, other)
        await node.until_bound(pod, 800)
        node.site.picture.set_foreign({GPU: 512})
        await node.until_bound(pod, 488)
        assert node.page(pod).stat().st_ino == inode
        assert node.site.picture.bounds_mib == {((pod.uid, "main"), GPU): 488}


async def test_two_containers_get_equal_parts_once_the_lowered_bound_has_settled(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    first = node.reserve("a", 100, 1000)
    node.start(first)
    async with running(node.keeper.run):
        await node.until_bound(first, 1000)
        second = node.reserve("b", 100, 1000)
        node.start(second)
        await node.until_bound(first, 500)
        assert node.bound_mib(second) in (None, 100)
        await node.until_bound(second, 500)
        node.use(second, 500)
        await until(lambda: node.bursts() == {second.uid: 400})


async def test_without_a_current_ledger_leases_end(tmp_path: Path) -> None:
    node = Node(tmp_path)
    pod = node.reserve("a", 100, 800)
    node.start(pod)
    node.site.use(
        replace(
            node.site.settings,
            priority=replace(node.site.settings.priority, lease_s=0.2),
        )
    )
    async with running(node.keeper.run):
        await node.until_bound(pod, 800)
        node.site.picture.view.bus_connected = False
        node.site.picture.note_change()
        await node.until_bound(pod, None)
        assert node.site.picture.bounds_mib == {}
        node.site.picture.view.bus_connected = True
        node.site.picture.note_change()
        await node.until_bound(pod, 800)


async def test_ledger_that_is_replaced_during_a_read_changes_no_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    pod, other = node.reserve("a", 100, 1000), node.reserve("b", 600)
    node.start(pod, used_mib=300)
    await node.keeper.look()
    assert (node.bound_mib(pod), node.bursts()) == (400, {pod.uid: 256})
    begun, go, picture = threading.Event(), threading.Event(), node.site.picture

    def slow(*arguments: Any) -> Any:
        begun.set()
        go.wait()
        return read_region(*arguments)

    monkeypatch.setattr(bursts, "read_region", slow)
    async with anyio.create_task_group() as group:
        group.start_soon(node.keeper.look)
        await until(begun.is_set)
        picture.ledger_known = False
        del picture.entries_by_uid[other.uid]  # its record follows
        picture.pods.end(other.uid, now_s=0)  # without an annotation that counts
        picture.note_change()
        go.set()
    assert (node.bound_mib(pod), node.bursts()) == (400, {pod.uid: 256})
    assert picture.bounds_mib == {}
    picture.ledger_known = True
    picture.note_change()
    await node.keeper.look()
    assert node.bound_mib(pod) == 1000


async def test_page_is_kept_over_a_restart_and_ends_with_the_limit(tmp_path: Path) -> None:
    node = Node(tmp_path)
    pod = node.reserve("a", 100, 800)
    node.start(pod)
    async with running(node.keeper.run):
        await node.until_bound(pod, 800)
    inode = node.page(pod).stat().st_ino
    rival = node.reserve("b", 100, 800)
    node.start(rival)
    keeper = node.fresh()
    await keeper.look()
    assert (node.bound_mib(pod), node.bound_mib(rival)) == (500, 200), "the old bound counts"
    assert node.page(pod).stat().st_ino == inode
    node.reserve("a", 100)
    await keeper.look()
    assert node.bound_mib(pod) is None
    node.page(rival).unlink()
    await keeper.look()
    assert node.bound_mib(rival) is not None, "a page that was removed is created again"
    node.bells.tidy(lambda _: False)
    await keeper.look()
    assert not node.page(rival).exists()


async def test_share_that_grows_beyond_its_limit_keeps_its_bound(tmp_path: Path) -> None:
    node = Node(tmp_path)
    pod = node.reserve("a", 100, 800)
    node.start(pod, used_mib=700)
    await node.keeper.look()
    assert (node.bound_mib(pod), node.bursts()) == (800, {pod.uid: 700})
    node.reserve("a", 900)
    for _ in range(2):
        await node.keeper.look()
        assert node.bound_mib(pod) == 900
        node.site.picture.note_change()
    await anyio.sleep(bursts.REPORT_S)
    await node.keeper.look()
    assert node.bursts() == {}


async def test_devices_without_bursts_leave_the_request(tmp_path: Path) -> None:
    node = Node(tmp_path)
    pod = node.reserve("a", 100, 800)
    node.start(pod, used_mib=300)
    node.describe(capacity_mib=2000)
    await node.keeper.look()
    assert node.bound_mib(pod) == 100


async def test_use_above_the_request_is_reported_at_once_and_seldom(tmp_path: Path) -> None:
    node = Node(tmp_path)
    pod = node.reserve("a", 100, 800)
    node.start(pod)
    async with running(node.keeper.run):
        await until(lambda: node.reports == 1)
        await anyio.sleep(bursts.REPORT_S + 0.1)
        node.use(pod, 101)
        began_s = time.monotonic()
        await until(lambda: node.bursts() == {pod.uid: 256})
        assert time.monotonic() - began_s < bursts.REPORT_S / 2
        node.use(pod, 400)
        await until(lambda: node.bursts() == {pod.uid: 512})
        assert time.monotonic() - began_s > bursts.REPORT_S - 0.1
        assert node.reports == 3
        node.site.picture.pods.end(pod.uid, now_s=0)
        node.site.picture.note_change()
        await until(lambda: not node.bursts())
        assert node.reports == 4


async def test_use_that_changes_without_end_is_reported_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bursts, "REPORT_S", 0.0)
    monkeypatch.setattr(bursts, "STEADY_S", 1000.0)
    monkeypatch.setattr(bursts, "REPORTS_AHEAD", 3)
    node = Node(tmp_path)
    pod = node.reserve("a", 100, 800)
    node.start(pod)
    await node.keeper.look()
    assert node.reports == 1
    for used_mib, reports in ((101, 2), (400, 3), (700, 3)):
        node.use(pod, used_mib)
        await node.keeper.look()
        assert node.reports == reports
    assert node.bursts() == {pod.uid: 512}
    # Ten times as many may be sent ahead: the same as if their time had passed.
    monkeypatch.setattr(bursts, "REPORTS_AHEAD", 30)
    await node.keeper.look()
    assert node.bursts() == {pod.uid: 700}


async def test_amounts_of_the_last_run_are_reported_before_the_first_sample(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    used = (Burst(pod_uid="uid-a", memory_mib=256),)
    node.describe(bursts=used)
    assert node.site.picture.bursts(GPU) == used
    await node.keeper.look()
    assert node.site.picture.bursts(GPU) == ()
    assert node.reports == 1


async def test_unreadable_region_counts_as_before(tmp_path: Path) -> None:
    node = Node(tmp_path)
    pod = node.reserve("a", 100, 800)
    node.start(pod, used_mib=699)
    await node.keeper.look()
    region_path(node.directory / "pods", pod.uid, "region").write_bytes(b"none")
    await node.keeper.look()
    rival = node.reserve("b", 100, 800)
    node.start(rival)
    await node.keeper.look()
    await anyio.sleep(SETTLE_S + 0.05)
    await node.keeper.look()
    assert node.bound_mib(rival) == 300
    assert node.bursts() == {pod.uid: 700}


async def test_owners_of_all_regions_are_searched_by_one_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, walks, walk = Node(tmp_path), [], Living._walk  # noqa: SLF001 - counted

    def counted(living: Living) -> View:
        walks.append(living)
        return walk(living)

    monkeypatch.setattr(Living, "_walk", counted)
    for name in ("a", "b", "c"):
        pod = node.reserve(name, 100, 800)
        node.start(pod)
        forged = Process(2**22 + ord(name), (Used(300 * MIB),), start=1)
        path = region_path(node.directory / "pods", pod.uid, "region")
        path.write_bytes(Built(uuids=(GPU,), processes=(forged,)).data())
    await node.keeper.look()
    assert len(walks) == 1
    await node.keeper.look()
    assert len(walks) == 1


async def test_use_that_only_the_driver_shows_counts_beyond_the_margin(tmp_path: Path) -> None:
    node = Node(tmp_path, usage=UsageSettings(breach=BreachRules(memory_margin_mib=50)))
    pod = node.reserve("a", 100, 800)
    node.start(pod, used_mib=0)
    picture = node.site.picture
    (holder,) = holders_of(
        picture.entries_by_uid, picture.pods, picture.grants, picture.view.devices_by_uuid
    )
    node.sample = Look(rows=[Row(holder=holder, driver_bytes=150 * MIB)])
    await node.keeper.look()
    assert node.bursts() == {}
    node.sample = Look(rows=[Row(holder=holder, driver_bytes=700 * MIB)])
    node.keeper = node.fresh()
    await node.keeper.look()
    assert node.bursts() == {pod.uid: 700}


async def test_event_names_use_request_and_reason_once_per_fall(tmp_path: Path) -> None:
    node = Node(tmp_path)
    pod = node.reserve("a", 100, 800)
    node.start(pod, used_mib=500)
    async with running(node.keeper.run):
        await node.until_bound(pod, 800)
        node.reserve("b", 700)
        await node.until_bound(pod, 100)
        await until(lambda: bool(node.recorder.events))
        await anyio.sleep(0.1)
        node.use(pod, 200)
        await anyio.sleep(0.1)
        node.use(pod, 500)
        await anyio.sleep(0.1)
    text = (
        "container main uses 500 MiB of device nvidia-0, requested 100 MiB, and gets no more "
        "above 100 MiB: 800 of 1000 MiB are booked"
    )
    assert node.recorder.events == [("a", "BurstEnded", text)]


async def test_containers_with_one_share_by_a_claim_have_one_page(tmp_path: Path) -> None:
    node = Node(tmp_path, dra=DraSettings(region_dir=str(tmp_path / "claims")))
    claim = node.reserve("claim", 100, 800)
    node.site.picture.pods.end(claim.uid, now_s=0)
    claim.entry = replace(claim.entry, record=replace(claim.entry.record, origin="claim"))
    node.site.picture.entries_by_uid[claim.uid] = claim.entry
    uses = {"app": (ClaimUse(claim="claim", request="main"),)}
    for name in ("one", "two"):
        user = Given(name, ("app", "app", {}), claims_by_container=uses)
        node.site.picture.pods.put(user.facts, revision=1, now_s=0)
    node.site.picture.grants.add(claim.grant("main", is_claim=True))
    await node.keeper.look()
    assert node.bound_mib(claim) is None, "without the library there is no directory"
    node.bells.directory_of((claim.uid, "main"))
    path = tmp_path / "claims" / claim.uid / "main" / "region-1"
    path.parent.mkdir(parents=True)
    path.write_bytes(own_region(GPU, 400 * MIB))
    async with running(node.keeper.run):
        await node.until_bound(claim, 800)
        await until(lambda: node.bursts() == {claim.uid: 512})
        node.reserve("other", 800)
        await until(lambda: len(node.recorder.events) == 2)
    assert {(name, reason) for name, reason, _ in node.recorder.events} == {
        ("one", "BurstEnded"),
        ("two", "BurstEnded"),
    }
    assert node.recorder.events[0][2].startswith("container app uses 400 MiB of device nvidia-0")


def test_devices_of_a_page_that_are_not_written_lose_their_lease(tmp_path: Path) -> None:
    page = BoundPage(tmp_path / "room-1")
    page.write({"GPU-a": 5, "GPU-b": 6}, lease_until_ns=100)
    assert page.bounds(99) == {"GPU-a": 5, "GPU-b": 6}
    page.write({"GPU-b": 7}, lease_until_ns=100)
    assert page.bounds(99) == {"GPU-b": 7}
    assert page.bounds(100) == {}
    page.close()
    again = BoundPage(tmp_path / "room-1")
    assert again.bounds(99) == {"GPU-b": 7}
    again.close()
