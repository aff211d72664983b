# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a bind: bound and held, refused and released, or left to the lease's expiry."""

import json
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from hami_common.bus import subjects
from hami_common.errors import Denied, NotFound, SettingsInvalid, Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.model.placement import ContainerShares, Share
from hami_common.pods import annotations
from hami_common.pods.limits import decode as decode_limits
from hami_common.pods.signing import Signer
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import LEASE_S, Running, World, pod_path, quiet

pytestmark = pytest.mark.anyio

NODE = builders.devices("n1")
OTHER = builders.devices("n2")
APPEND, POST = 0, 1
"""Numbers of the calls of a bind without faults."""


async def world_with(*pods: builders.Obj) -> World:
    world = World()
    await world.add_devices(NODE)
    await world.add_devices(OTHER)
    for pod in pods:
        world.add_pod(pod)
    return world


def raising(error: Exception) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    return fail


def doing(act: Callable[[], object]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await anyio.lowlevel.checkpoint()
        act()

    return run


async def settle(world: World, *running: Running) -> None:
    """Let background tasks end, then let every lease expire."""
    for s in running:
        await s.scheduler.drain(limit_s=1)
    await world.advance(LEASE_S + 5, "n1", "n2")


def foreign_record(pod_uid: str, *, node: str = "n1", memory_mib: int = 1000) -> AllocationRecord:
    return AllocationRecord(
        op="reserve",
        allocation_id=f"foreign-{pod_uid}",
        node=node,
        pod_uid=pod_uid,
        namespace="default",
        pod=pod_uid.removeprefix("uid-"),
        containers=(
            ContainerShares(
                name="main",
                kind="app",
                shares=(
                    Share(
                        vendor="nvidia",
                        uuid=f"GPU-{node}-0",
                        memory_mib=memory_mib,
                        core_pct=10,
                    ),
                ),
            ),
        ),
        lease_s=LEASE_S,
        writer="another",
    )


# --- the good path --------------------------------------------------------------------------------


async def test_bind_commits_signed_allocation_and_limits_with_the_binding() -> None:
    world = await world_with(builders.pod("a", mem_mib=2000, cores=30))
    async with world.scheduler() as s:
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        await s.scheduler.drain(limit_s=1)
        assert s.seen.calls == ["append hami_alloc", "post binding", "append hami_state"]
    world.check_settled(NODE, OTHER)
    limits = decode_limits(
        world.kube.pod("a")["metadata"]["annotations"][annotations.limits("main")]
    )
    assert [(d.memory_mib, d.core_pct) for d in limits.devices] == [(2000, 30)]
    assert [state.state for state in world.states().values()] == ["bound"]
    (decision,) = world.decisions()
    assert (decision.verdict, decision.node) == ("placed", "n1")
    assert decision.containers == world.live()[0].containers


async def test_binding_names_uid_and_resource_version_of_the_pod() -> None:
    world = await world_with(builders.pod("a"))
    version = world.kube.pod("a")["metadata"]["resourceVersion"]
    posted: list[builders.Obj] = []
    inner = world.kube.create

    async def create(path: str, body: bytes) -> bytes:
        posted.append(json.loads(body))
        return await inner(path, body)

    world.kube.create = create  # type: ignore[method-assign]  # the test watches the wire
    async with world.scheduler() as s:
        assert await s.bind(world.kube.pod("a"), "n1") == ""
    assert posted[0]["metadata"]["uid"] == "uid-a"
    assert posted[0]["metadata"]["resourceVersion"] == version


async def test_repeated_bind_of_a_bound_pod_succeeds_and_writes_nothing() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        await s.scheduler.drain(limit_s=1)
        calls = len(s.seen.calls)
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        assert len(s.seen.calls) == calls
        assert s.value("hami_scheduler_binds_total", outcome="already-bound") == 1


async def test_two_binds_of_one_pod_at_once_commit_once() -> None:
    world = await world_with(builders.pod("a"))
    errors: list[str] = []
    async with world.scheduler() as s, anyio.create_task_group() as group:

        async def bind() -> None:
            errors.append(await s.bind(world.kube.pod("a"), "n1"))

        group.start_soon(bind)
        group.start_soon(bind)
    assert errors == ["", ""]
    assert [name for name in s.seen.calls if name == "post binding"] == ["post binding"]
    world.check_settled(NODE, OTHER)


async def test_pod_without_request_is_bound_without_reservation() -> None:
    world = await world_with(builders.pod("a", gpu=None))
    async with world.scheduler() as s:
        assert await s.bind(world.kube.pod("a"), "n1") == ""
    assert world.bound() == {"a": "n1"}
    assert world.records() == {}


async def test_pod_that_the_watch_has_not_shown_is_read_from_the_api() -> None:
    world = await world_with()
    async with world.scheduler() as s:
        world.kube.is_blind = True
        pod = world.add_pod(builders.pod("a"))
        assert await s.bind(pod, "n1") == ""
    assert s.seen.calls[0] == "get pod"
    world.check_settled(NODE, OTHER)


# --- refusals -------------------------------------------------------------------------------------


async def test_bind_refuses_node_without_capacity_and_reserves_nothing() -> None:
    world = await world_with(builders.pod("a", mem_mib=999999))
    async with world.scheduler() as s:
        error = await s.bind(world.kube.pod("a"), "n1")
    assert "CardInsufficientMemory" in error
    assert world.records() == {}
    assert s.seen.calls == []


async def test_bind_refuses_pod_that_was_recreated_under_the_same_name() -> None:
    world = await world_with(builders.pod("a", uid="new"))
    async with world.scheduler() as s:
        error = await s.bind(builders.pod("a", uid="old"), "n1")
    assert "does not exist any more" in error
    assert world.bound() == {}


async def test_bind_refuses_pod_that_another_node_has() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        assert await s.bind(world.kube.pod("a"), "n2") == ""
        error = await s.bind(world.kube.pod("a"), "n1")
    assert "assigned to node n2" in error
    world.check_settled(NODE, OTHER)


async def test_bind_refuses_invalid_request_with_the_fix() -> None:
    pod = builders.pod("a")
    pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = "3Gi"
    world = await world_with(pod)
    async with world.scheduler() as s:
        error = await s.bind(world.kube.pod("a"), "n1")
    assert "nvidia.com/gpumem" in error
    assert "write 3072" in error


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, "is being deleted"),
        ({"status": {"phase": "Failed"}}, "has finished"),
    ],
)
async def test_bind_refuses_pod_that_ends(changes: builders.Obj, text: str) -> None:
    world = await world_with(builders.pod("a"))
    world.kube.change(pod_path(world.kube.pod("a")), **changes)
    async with world.scheduler() as s:
        assert text in await s.bind(world.kube.pod("a"), "n1")
    assert world.records() == {}


# --- the ledger's race ----------------------------------------------------------------------------


async def test_lost_race_for_the_node_picks_again() -> None:
    world = await world_with(builders.pod("a"), builders.pod("b"))
    async with world.scheduler() as s:

        async def other_writes() -> None:
            await world.record(foreign_record("uid-b"))

        s.seen.before[APPEND] = other_writes
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        assert s.value("hami_scheduler_fence_conflicts_total") == 1
    world.check(NODE, OTHER)
    assert {record.pod_uid for record in world.live()} == {"uid-a", "uid-b"}


async def test_lost_race_for_the_last_capacity_is_refused() -> None:
    world = await world_with(builders.pod("a", mem_mib=9000), builders.pod("b"))
    async with world.scheduler() as s:

        async def other_writes() -> None:
            await world.record(foreign_record("uid-b", memory_mib=9000))

        s.seen.before[APPEND] = other_writes
        assert "CardInsufficientMemory" in await s.bind(world.kube.pod("a"), "n1")
    world.check(NODE, OTHER)
    assert [record.pod_uid for record in world.live()] == ["uid-b"]


async def test_bind_on_a_node_that_keeps_changing_fails_and_reserves_nothing() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler(fence_tries=3) as s:
        for number in range(3):

            async def other_writes(number: int = number) -> None:
                await world.record(foreign_record(f"uid-x{number}", memory_mib=1))

            s.seen.before[2 * number] = other_writes
        assert "changed 3 times" in await s.bind(world.kube.pod("a"), "n1")
    assert "uid-a" not in {record.pod_uid for record in world.live()}


async def test_lost_acknowledgement_of_the_append_is_found_by_reading_back() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        world.bus.lose_next_ack = True
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        assert s.value("hami_scheduler_lost_acks_total") == 1
    world.check_settled(NODE, OTHER)
    assert len(world.records()) == 1


async def test_append_that_never_arrived_is_written_again() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.before[APPEND] = raising(Unavailable(peer="NATS", detail="cut"))
        assert await s.bind(world.kube.pod("a"), "n1") == ""
    world.check_settled(NODE, OTHER)


async def test_append_that_arrives_late_is_refused_by_the_fence() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        late: list[Callable[[], Awaitable[object]]] = []
        records = s.scheduler.extender._binder._effects.ledger._records  # noqa: SLF001
        inner = records._inner  # type: ignore[attr-defined]  # noqa: SLF001
        append = inner.append

        async def cut_off(*args: object, **more: object) -> int:
            if not late:
                late.append(lambda: append(*args, **more))
                raise Unavailable(peer="NATS", detail="on its way")
            revision: int = await append(*args, **more)
            return revision

        inner.append = cut_off
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        with pytest.raises(Exception, match="changed concurrently"):
            await late[0]()
    world.check_settled(NODE, OTHER)


async def test_bind_without_the_bus_is_refused_and_reserves_nothing() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        world.bus.set_available(available=False)
        assert "unavailable" in await s.bind(world.kube.pod("a"), "n1")
        world.bus.set_available(available=True)
        assert await s.bind(world.kube.pod("a"), "n1") == ""
    world.check_settled(NODE, OTHER)


async def test_report_that_the_bus_does_not_take_is_made_later() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.after[POST] = doing(lambda: world.bus.set_available(available=False))
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        assert await s.scheduler.confirmations.drain(limit_s=1)
        assert world.states() == {}
        world.bus.set_available(available=True)
        await world.advance(5, "n1", "n2")
        assert [state.state for state in world.states().values()] == ["bound"]
    world.check_settled(NODE, OTHER)


async def test_append_stored_while_the_bus_fails_is_released_after_its_lease() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:

        async def cut() -> None:
            world.bus.set_available(available=False)
            raise Unavailable(peer="NATS", detail="answer lost")

        s.seen.after[APPEND] = cut
        assert "unavailable" in await s.bind(world.kube.pod("a"), "n1")
        assert len(world.live()) == 1
        world.bus.set_available(available=True)
        await settle(world, s)
        assert world.live() == []
        assert s.value("hami_scheduler_reservations_examined_total", finding="free") == 1


async def test_pod_recreated_under_the_fence_gives_the_share_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:

        async def cut() -> None:
            world.bus.set_available(available=False)
            raise Unavailable(peer="NATS", detail="answer lost")

        s.seen.after[APPEND] = cut
        assert "unavailable" in await s.bind(world.kube.pod("a"), "n1")
        patch = world.kube.patch

        async def recreate_first(path: str, body: bytes, **more: str) -> bytes:
            if "/pods/" not in path:
                return await patch(path, body, **more)
            monkeypatch.undo()
            world.kube.remove(path)
            world.add_pod(builders.pod("a", uid="second"))
            return await patch(path, body, **more)

        monkeypatch.setattr(world.kube, "patch", recreate_first)
        world.bus.set_available(available=True)
        await settle(world, s)
        assert world.live() == []
        assert s.value("hami_scheduler_reservations_examined_total", finding="gone") == 1


async def test_retry_after_a_stored_append_takes_the_same_reservation_over() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:

        async def cut() -> None:
            world.bus.set_available(available=False)
            raise Unavailable(peer="NATS", detail="answer lost")

        s.seen.after[APPEND] = cut
        assert await s.bind(world.kube.pod("a"), "n1") != ""
        allocation_id = world.live()[0].allocation_id
        world.bus.set_available(available=True)
        await quiet()
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        assert [record.allocation_id for record in world.live()] == [allocation_id]
        await settle(world, s)
    world.check_settled(NODE, OTHER)


# --- the API server's answers ---------------------------------------------------------------------


async def test_pod_changed_under_the_bind_is_read_and_bound_again() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.before[POST] = doing(
            lambda: world.kube.change(
                pod_path(world.kube.pod("a")), metadata={"labels": {"team": "x"}}
            )
        )
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        assert s.value("hami_scheduler_binding_conflicts_total") == 1
        await settle(world, s)
    world.check_settled(NODE, OTHER)


async def test_reservation_is_released_when_the_pods_request_changes_during_bind() -> None:
    world = await world_with(builders.pod("a"))

    def grow() -> None:
        pod = world.kube.pod("a")
        pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = "4000"
        world.add_pod(pod)

    async with world.scheduler() as s:
        s.seen.before[POST] = doing(grow)
        assert "request changed" in await s.bind(world.kube.pod("a"), "n1")
    assert world.live() == []
    assert world.bound() == {}


async def test_reservation_is_released_when_the_pod_keeps_changing() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler(binding_tries=2) as s:
        for number in (1, 4):
            s.seen.before[number] = doing(
                lambda number=number: world.kube.change(  # type: ignore[misc]  # bound per round
                    pod_path(world.kube.pod("a")), metadata={"labels": {"n": str(number)}}
                )
            )
        assert "kept changing" in await s.bind(world.kube.pod("a"), "n1")
    assert world.live() == []


async def test_reservation_is_released_when_the_pod_is_deleted_during_bind() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.before[POST] = doing(lambda: world.kube.remove(pod_path(builders.pod("a"))))
        assert "a" in await s.bind(builders.pod("a"), "n1")
        await s.scheduler.tasks.drain(limit_s=1)
    assert world.live() == []


async def test_reservation_is_released_when_the_pod_is_recreated_during_bind() -> None:
    world = await world_with(builders.pod("a"))

    def recreate() -> None:
        world.kube.remove(pod_path(builders.pod("a")))
        world.add_pod(builders.pod("a", uid="second"))

    async with world.scheduler() as s:
        s.seen.before[POST] = doing(recreate)
        assert "does not exist any more" in await s.bind(builders.pod("a"), "n1")
        await s.scheduler.tasks.drain(limit_s=1)
    assert world.live() == []
    assert world.bound() == {}


async def test_reservation_is_released_when_deletion_starts_during_bind() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.before[POST] = doing(
            lambda: world.kube.change(
                pod_path(world.kube.pod("a")), metadata={"deletionTimestamp": "now"}
            )
        )
        assert "is being deleted" in await s.bind(world.kube.pod("a"), "n1")
    assert world.live() == []


async def test_reservation_is_released_when_the_pod_is_bound_elsewhere_during_bind() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.before[POST] = doing(
            lambda: world.kube.change(pod_path(world.kube.pod("a")), spec={"nodeName": "n7"})
        )
        assert "assigned to node n7" in await s.bind(world.kube.pod("a"), "n1")
        await s.scheduler.tasks.drain(limit_s=1)
    assert world.live() == []


@pytest.mark.parametrize(
    "error",
    [
        Denied(peer="API server", detail="forbidden by policy", status=403),
        NotFound(what="pods/binding"),
    ],
)
async def test_binding_refused_for_good_gives_the_share_back_at_once(error: Exception) -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.before[POST] = raising(error)
        assert str(error) in await s.bind(world.kube.pod("a"), "n1")
        assert world.live() == []
        assert await s.bind(world.kube.pod("a"), "n1") == ""
    world.check_settled(NODE, OTHER)


async def test_binding_with_lost_answer_is_found_in_the_pod() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.after[POST] = raising(Unavailable(peer="API server", detail="connection reset"))
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        await settle(world, s)
    world.check_settled(NODE, OTHER)


async def test_binding_that_never_arrived_is_fenced_and_released() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.before[POST] = raising(Unavailable(peer="API server", detail="timeout"))
        before = world.kube.pod("a")["metadata"]["resourceVersion"]
        assert "timeout" in await s.bind(world.kube.pod("a"), "n1")
        assert world.live() == []
        assert world.kube.pod("a")["metadata"]["resourceVersion"] != before
        assert annotations.FENCE in world.kube.pod("a")["metadata"]["annotations"]
        assert await s.bind(world.kube.pod("a"), "n1") == ""
    world.check_settled(NODE, OTHER)


async def test_binding_that_arrives_after_the_fence_is_refused() -> None:
    world = await world_with(builders.pod("a"))
    late: list[tuple[str, bytes]] = []
    inner = world.kube.create

    async def delay(path: str, body: bytes) -> bytes:
        if not late:
            late.append((path, body))
            raise Unavailable(peer="API server", detail="timeout")
        return await inner(path, body)

    world.kube.create = delay  # type: ignore[method-assign]  # a Binding stuck in the network
    async with world.scheduler() as s:
        assert await s.bind(world.kube.pod("a"), "n1") != ""
        with pytest.raises(Exception, match="Precondition failed"):
            await inner(*late[0])
        assert world.bound() == {}
        assert world.live() == []


async def test_api_server_outage_after_the_binding_leaves_the_reservation_to_its_lease() -> None:
    world = await world_with(builders.pod("a"))
    away = Unavailable(peer="API server", detail="away")
    async with world.scheduler() as s:
        s.seen.before[POST] = raising(away)
        s.seen.before[POST + 1] = raising(away)
        assert "examined when its lease ends" in await s.bind(world.kube.pod("a"), "n1")
        assert len(world.live()) == 1
        await settle(world, s)
        assert world.live() == []
    world.check_settled(NODE, OTHER)


async def test_settling_that_finds_the_binding_done_reports_success() -> None:
    world = await world_with(builders.pod("a"))
    inner = world.kube.create
    late: list[tuple[str, bytes]] = []

    async def delay(path: str, body: bytes) -> bytes:
        late.append((path, body))
        raise Unavailable(peer="API server", detail="timeout")

    async def arrive() -> None:
        await inner(*late[0])

    world.kube.create = delay  # type: ignore[method-assign]  # a Binding stuck in the network
    async with world.scheduler() as s:
        s.seen.after[POST + 1] = arrive  # after the pod was read, before it is moved
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        await settle(world, s)
    world.check_settled(NODE, OTHER)


async def test_state_that_cannot_be_written_is_written_when_the_lease_ends() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        for number in range(2, 7):
            s.seen.before[number] = raising(Unavailable(peer="NATS", detail="away"))
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        await settle(world, s)
        await settle(world, s)
    assert [state.state for state in world.states().values()] == ["bound"]
    world.check_settled(NODE, OTHER)


# --- several schedulers ---------------------------------------------------------------------------


async def test_reservation_of_another_replica_is_taken_over_and_commits_once() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler("s1") as first, world.scheduler("s2") as second:
        stuck = anyio.Event()
        free = anyio.Event()

        async def stop() -> None:
            stuck.set()
            await free.wait()

        first.seen.before[POST] = stop
        errors: list[str] = []
        async with anyio.create_task_group() as group:

            async def bind() -> None:
                errors.append(await first.bind(world.kube.pod("a"), "n1"))

            group.start_soon(bind)
            await stuck.wait()
            await quiet()
            assert await second.bind(world.kube.pod("a"), "n1") == ""
            free.set()
        assert errors == [""]
        assert len(world.live()) == 1
        await settle(world, first, second)
    world.check_settled(NODE, OTHER)


async def test_bind_to_two_nodes_by_two_replicas_holds_one_share() -> None:
    world = await world_with(builders.pod("a"))
    errors: dict[str, str] = {}
    async with world.scheduler("s1") as first, world.scheduler("s2") as second:
        async with anyio.create_task_group() as group:

            async def bind(s: Running, node: str) -> None:
                errors[node] = await s.bind(world.kube.pod("a"), node)

            group.start_soon(bind, first, "n1")
            group.start_soon(bind, second, "n2")
        await settle(world, first, second)
    assert sorted(map(bool, errors.values())) == [False, True]
    world.check_settled(NODE, OTHER)


async def test_allocation_signed_with_an_untrusted_key_does_not_count_as_bound() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler("s1", signer=Signer.generate()) as s:
        assert await s.bind(world.kube.pod("a"), "n1") == ""
        await quiet()
        assert "not signed with a trusted key" in await s.bind(world.kube.pod("a"), "n1")
        world.bus.stream(subjects.STATE_BUCKET).wipe()
        await settle(world, s)
        assert len(world.live()) == 1, "what our keys cannot read may still be in use"


async def test_hundred_pods_at_once_on_one_node_never_double_book() -> None:
    node = builders.devices("n1", count=8, slots=16, memory_mib=80000)
    world = World()
    await world.add_devices(node)
    pods = [world.add_pod(builders.pod(f"p{i}", mem_mib=5000, cores=5)) for i in range(130)]
    errors: list[str] = []
    async with world.scheduler() as s, anyio.create_task_group() as group:

        async def bind(pod: builders.Obj) -> None:
            errors.append(await s.bind(pod, "n1"))

        for pod in pods:
            group.start_soon(bind, pod)
    assert errors.count("") == 128
    assert s.value("hami_scheduler_fence_conflicts_total") == 0
    world.check_settled(node)


async def test_record_has_the_labels_of_the_setting_also_after_the_ledger_is_lost() -> None:
    pod = builders.pod("p")
    pod["metadata"]["labels"] |= {"team": "vision", "secret": "x"}
    world = await world_with(pod)
    async with world.scheduler(usage_labels=("team", "app")) as s:
        assert await s.bind(pod, "n1") == ""
        (record,) = world.live()
        assert record.labels == (("team", "vision"),)
        world.kube.change(pod_path(pod), status={"phase": "Running"})
        world.bus.wipe()
        await settle(world, s)
        await world.advance(600, "n1", "n2")
        (restored,) = world.live()
        assert restored.labels == record.labels


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (tuple(f"l{n}" for n in range(9)), "names 9 labels; name at most 8"),
        (("",), "'' is no key of a label"),
    ],
)
async def test_labels_that_cannot_be_recorded_are_refused(
    keys: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(SettingsInvalid, match="usage_labels") as caught:
        async with World().scheduler(usage_labels=keys, wait=False):
            await anyio.lowlevel.checkpoint()
    assert problem in str(caught.value)
