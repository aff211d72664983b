# SPDX-License-Identifier: Apache-2.0
"""Two replicas on one reservation, in the orders that matter: a share in use is never released.

Happens when the elected kube-scheduler changes while a bind is under way, or when a lease runs out
under a slow bind. Each test holds calls at chosen steps and lets them go in the worst order.
"""

from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.abc import TaskGroup

from hami_common.errors import Denied
from hami_common.pods import annotations
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_binder import doing, foreign_record, raising
from tests.unit.scheduler.shell.world import LEASE_S, Running, World, pod_path, quiet

pytestmark = pytest.mark.anyio

NODE = builders.devices("n1")
POST = 1
DENIED = Denied(peer="API server", detail="no", status=403)


class Gate:
    """Holds all calls until opened; then does ``act``."""

    def __init__(self, act: Callable[[], Awaitable[None]] | None = None) -> None:
        self.reached = anyio.Event()
        self.opened = anyio.Event()
        self._act = act

    async def __call__(self) -> None:
        self.reached.set()
        await self.opened.wait()
        if self._act is not None:
            await self._act()

    async def open(self) -> None:
        self.opened.set()
        await quiet()


class Call:
    """One bind under way."""

    def __init__(self, group: TaskGroup, s: Running, world: World, name: str = "a") -> None:
        self.error: str | None = None

        async def bind() -> None:
            self.error = await s.bind(world.kube.pod(name), "n1")

        group.start_soon(bind)


async def world_with(*names: str, mem_mib: int = 9000) -> World:
    world = World()
    await world.add_devices(NODE)
    for name in names:
        world.add_pod(builders.pod(name, mem_mib=mem_mib))
    return world


async def test_refused_owner_does_not_release_a_share_taken_over_by_another() -> None:
    world = await world_with("a")
    async with world.scheduler("s1") as s1, world.scheduler("s2") as s2:
        slow = s1.seen.before[POST] = Gate(raising(DENIED))
        taken = s2.seen.before[POST] = Gate()
        async with anyio.create_task_group() as group:
            first = Call(group, s1, world)
            await slow.reached.wait()
            await quiet()
            second = Call(group, s2, world)
            await taken.reached.wait()
            await slow.open()
            assert first.error
            assert len(world.live()) == 1, "the second still means to bind with it"
            await taken.open()
            assert second.error == ""
    world.check_settled(NODE)


async def test_refused_successor_fences_before_it_releases_a_share_the_owner_may_still_bind() -> (
    None
):
    world = await world_with("a")
    async with world.scheduler("s1") as s1, world.scheduler("s2") as s2:
        slow = s1.seen.before[POST] = Gate()
        s2.seen.before[POST] = raising(DENIED)
        async with anyio.create_task_group() as group:
            first = Call(group, s1, world)
            await slow.reached.wait()
            await quiet()
            assert await s2.bind(world.kube.pod("a"), "n1") != ""
            assert world.live() == []
            await slow.open()
            assert first.error
    assert world.bound() == {}
    world.check_settled(NODE)


async def test_examiner_does_not_release_a_share_renewed_after_its_read() -> None:
    world = await world_with("a")
    async with world.scheduler("s1") as s1, world.scheduler("s2") as s2:
        path = pod_path(world.kube.pod("a"))
        slow = s1.seen.before[POST] = Gate(
            # Meanwhile another replica moved the pod and wrote over the examiner's mark.
            doing(
                lambda: world.kube.change(
                    path, metadata={"annotations": {annotations.FENCE: "another/1"}}
                )
            )
        )
        late = s1.seen.before[4] = Gate()
        async with anyio.create_task_group() as group:
            first = Call(group, s1, world)
            await slow.reached.wait()
            await quiet()
            examiner = s2.seen.after[1] = Gate()
            await world.advance(LEASE_S + 12, "n1")
            assert s2.seen.calls[:2] == ["get pod", "patch pods"]
            assert examiner.reached.is_set()
            await slow.open()
            assert s1.seen.calls[2:] == ["get pod", "append hami_alloc", "post binding"]
            await examiner.open()
            assert len(world.live()) == 1, "the first renewed it"
            await late.open()
            assert first.error == ""
    world.check_settled(NODE)


async def test_owner_that_sees_the_examiners_mark_gives_up() -> None:
    world = await world_with("a")
    async with world.scheduler("s1") as s1, world.scheduler("s2") as s2:
        slow = s1.seen.before[POST] = Gate()
        async with anyio.create_task_group() as group:
            first = Call(group, s1, world)
            await slow.reached.wait()
            await quiet()
            examiner = s2.seen.after[1] = Gate()
            await world.advance(LEASE_S + 12, "n1")
            await slow.open()
            assert first.error is not None
            assert "timed out and was released" in first.error
            await examiner.open()
    assert world.live() == []
    assert world.bound() == {}


async def test_bind_in_progress_picks_nothing_on_an_emptied_ledger() -> None:
    world = await world_with("old", "a")
    async with world.scheduler("s1") as s1:
        assert await s1.bind(world.kube.pod("old"), "n1") == ""
        await s1.scheduler.drain(limit_s=1)
        s1.seen.calls.clear()
        world.kube.change(pod_path(world.kube.pod("old")), spec={"nodeName": "n1"})
        listing = Gate()
        inner = world.kube.list_pages

        async def slow_list(*args: object, **more: object) -> object:
            await listing()
            return await inner(*args, **more)  # type: ignore[arg-type]  # passed on as it came

        async def other_writes() -> None:
            await world.record(foreign_record("uid-ghost", memory_mib=1))

        s1.seen.before[0] = other_writes
        stuck = s1.seen.before[1] = Gate()
        pod = world.add_pod(builders.pod("b", mem_mib=100))
        async with anyio.create_task_group() as group:
            call = Call(group, s1, world, pod["metadata"]["name"])
            await stuck.reached.wait()
            world.kube.list_pages = slow_list  # type: ignore[method-assign, assignment]  # slow API
            world.bus.wipe()
            await world.add_devices(NODE)
            await quiet()
            await stuck.open()
            assert call.error is not None
            assert "the storage was lost meanwhile" in call.error
            assert world.live() == []
            await listing.open()
        assert [record.pod for record in world.live()] == ["old"]
    world.check_settled(NODE)
