# SPDX-License-Identifier: Apache-2.0
"""Quotas as seen by kube-scheduler, operators and two schedulers at once."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from hami_common.errors import RequestInvalid, SettingsInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.pods import annotations
from hami_common.runtime.httpd import Request, Response
from hami_common.skus.expansion import Alternative, Expansion, encode
from hami_core.planning.ways import Surroundings, standing
from hami_core.planning.whatif import Governed
from hami_core.replay.snapshot import Snapshot, load, load_quotas
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_shared_reservation import Gate
from tests.unit.scheduler.shell.world import LEASE_S, Running, World, pod_path, quiet, reread

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]
QUEUES = """
[[queue]]
name = "vision"
guaranteed = { memory_mib = 4000 }
namespaces = ["team-a"]
[[queue]]
name = "speech"
guaranteed = { memory_mib = 4000 }
namespaces = ["team-b"]
"""


def quota(most_mib: int | str, *, name: str = "gpu", **spec: Any) -> builders.Obj:
    return {
        "metadata": {"name": name, "namespace": "team-a", "uid": f"uid-{name}"},
        "spec": {"hard": {"limits.nvidia.com/gpumem": str(most_mib)}, **spec},
    }


def put_quota(world: World, document: builders.Obj) -> str:
    meta = document["metadata"]
    path = f"/api/v1/namespaces/{meta['namespace']}/resourcequotas/{meta['name']}"
    world.kube.put(path, document)
    return path


def pod(name: str, *, namespace: str = "team-a", labels: Any = None, **ask: Any) -> builders.Obj:
    made = builders.pod(name, namespace=namespace, **ask)
    made["metadata"]["labels"] |= labels or {}
    return made


async def world_with(*documents: builders.Obj, memory_mib: int = 16000) -> World:
    world = World()
    for node in NODES:
        await world.add_devices(builders.devices(node, count=2, memory_mib=memory_mib))
    for document in documents:
        put_quota(world, document)
    return world


async def get(s: Running, path: str, *, operator: bool = True, **query: str) -> Any:
    async def sees_everything() -> bool:
        return operator

    handler = s.scheduler.quota.routes()["GET", path]
    request = Request(method="GET", path=path, query=query, headers={}, body=b"", params={})
    request.sees_everything = sees_everything
    response = await handler(request)
    assert isinstance(response, Response)
    return json.loads(response.body)


async def bind(world: World, s: Running, name: str, node: str = "n1", **ask: Any) -> str:
    return await s.bind(world.add_pod(pod(name, **ask)), node)


# --- filter --------------------------------------------------------------------------------------


async def test_pod_beyond_the_quota_is_refused_on_all_nodes_with_one_text() -> None:
    world = await world_with(quota(6000))
    async with world.scheduler() as s:
        answer = await s.filter(pod("a", gpu=2, mem_mib=4096), NODES)
        assert answer["NodeNames"] == []
        text = 'quota "gpu" limits.nvidia.com/gpumem: 8192 MiB wanted, 0 used, limit 6000'
        assert set(answer["FailedNodes"].values()) == {f"ResourceQuotaNotFit: {text}"}
        answer = await s.filter(pod("a", gpu=1, mem_mib=4096), NODES)
        assert answer["NodeNames"] == NODES
        await quiet()
    assert s.value("hami_scheduler_node_refusals_total", code="ResourceQuotaNotFit") == 2
    decided = world.decisions("filter")[0]
    assert (decided.verdict, decided.nodes_feasible) == ("refused", 0)
    assert [(r.code, r.count, r.nodes) for r in decided.refusals] == [
        ("ResourceQuotaNotFit", 2, ("n1", "n2"))
    ]


async def test_pod_that_fits_no_device_is_refused_for_that_and_not_for_the_quota() -> None:
    world = await world_with(quota(6000))
    async with world.scheduler() as s:
        answer = await s.filter(pod("a", mem_mib=20000), NODES)
    assert all(text.startswith("CardInsuff") for text in answer["FailedNodes"].values())


async def test_nodes_where_the_pod_does_not_fit_keep_their_reason() -> None:
    world = await world_with(quota(6000))
    await world.add_devices(builders.devices("small", memory_mib=1000))
    async with world.scheduler() as s:
        answer = await s.filter(pod("a", mem_mib=7000), [*NODES, "small"])
    assert answer["FailedNodes"]["small"].startswith("CardInsufficientMemory")
    assert answer["FailedNodes"]["n1"].startswith("ResourceQuotaNotFit")


async def test_percentage_counts_the_mib_of_each_nodes_devices() -> None:
    world = await world_with(quota(6000))
    await world.add_devices(builders.devices("small", memory_mib=8000))
    asked = pod("a")
    limits = asked["spec"]["containers"][0]["resources"]["limits"]
    del limits["nvidia.com/gpumem"]
    limits["nvidia.com/gpumem-percentage"] = "50"
    async with world.scheduler() as s:
        answer = await s.filter(asked, [*NODES, "small"])
        assert answer["NodeNames"] == ["small"]
        answer = await s.filter(asked, NODES)
        assert "8000 MiB wanted" in answer["FailedNodes"]["n1"]
        assert await s.bind(world.add_pod(asked), "small") == ""
        await quiet()
        used = (await get(s, "/v1/quotas"))["items"][0]["used"]
    assert used == 4000


async def test_namespace_without_a_quota_is_not_checked() -> None:
    world = await world_with(quota(1))
    async with world.scheduler() as s:
        free = pod("a", namespace="free", mem_mib=9000)
        assert (await s.filter(free, NODES))["NodeNames"] == NODES
        assert await s.bind(world.add_pod(free), "n1") == ""
    assert s.seen.calls[:2] == ["append hami_alloc", "post binding"]


async def test_two_tenants_with_quotas_of_their_own_share_one_device() -> None:
    theirs = quota(3000, name="theirs")
    theirs["metadata"]["namespace"] = "team-b"
    world = World()
    await world.add_devices(builders.devices("n1", count=1, memory_mib=16000))
    put_quota(world, quota(6000))
    put_quota(world, theirs)
    async with world.scheduler() as s:
        assert await bind(world, s, "a1", mem_mib=4000) == ""
        assert await bind(world, s, "b1", namespace="team-b", mem_mib=3000) == ""
        assert "4000 used, limit 6000" in await bind(world, s, "a2", mem_mib=3000)
        refusal = await bind(world, s, "b2", namespace="team-b", mem_mib=1000)
        assert "3000 used, limit 3000" in refusal
        assert await bind(world, s, "a3", mem_mib=2000) == ""
        await quiet()
        used = {q["namespace"]: q["used"] for q in (await get(s, "/v1/quotas"))["items"]}
    assert used == {"team-a": 6000, "team-b": 3000}
    uuids = [share.uuid for record in world.live() for c in record.containers for share in c.shares]
    assert (len(uuids), len(set(uuids))) == (3, 1)


async def test_bind_takes_the_first_alternative_within_quota() -> None:
    world = await world_with(quota(0))
    others = builders.devices("n1")
    (gpu,) = others.devices
    dcu = replace(gpu, uuid="DCU-0", vendor="hygon", type="Z100")
    await world.add_devices(replace(others, vendor="hygon", devices=(dcu,)))
    limits = [
        {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"},
        {"hygon.com/dcunum": "1", "hygon.com/dcumem": "1000"},
    ]
    expansion = Expansion(
        alternatives=tuple(
            Alternative(vendor=vendor, limits={"main": mine})
            for vendor, mine in zip(("nvidia", "hygon"), limits, strict=True)
        )
    )
    asking = pod("a", gpu=None, annotated={annotations.ALTERNATIVES: encode(expansion)})
    asking["spec"]["containers"][0]["resources"]["limits"]["hami.io/accelerators"] = "1"
    async with world.scheduler() as s:
        assert (await s.filter(asking, NODES))["NodeNames"] == ["n1"]
        assert await s.bind(world.add_pod(asking), "n1") == ""
        await quiet()
    (record,) = world.live()
    assert [share.uuid for one in record.containers for share in one.shares] == ["DCU-0"]


async def test_quota_may_be_added_changed_and_removed_at_run_time() -> None:
    world = await world_with()
    async with world.scheduler() as s:
        assert await bind(world, s, "a", mem_mib=3000) == ""
        await quiet()
        path = put_quota(world, quota(5000))
        await quiet()
        asked = pod("b", mem_mib=3000)
        assert "3000 used, limit 5000" in str(await s.filter(asked, NODES))
        put_quota(world, quota(6000))
        await quiet()
        assert (await s.filter(asked, NODES))["NodeNames"] == NODES
        put_quota(world, quota(10))
        await quiet()
        world.kube.remove(path)
        await quiet()
        assert (await s.filter(asked, NODES))["NodeNames"] == NODES


async def test_waiting_pods_are_tried_again_when_a_quota_grows() -> None:
    world = await world_with(quota(10))
    async with world.scheduler() as s:
        world.add_pod(pod("a"))
        await world.advance(7, *NODES)
        before = len(world.kube.node_touches)
        put_quota(world, quota(9000))
        await quiet()
    assert len(world.kube.node_touches) > before
    assert s.value("hami_scheduler_quota_races_total") == 0


async def test_scope_of_a_quota_matches_the_pod() -> None:
    world = await world_with(quota(100, scopes=["Terminating"]))
    async with world.scheduler() as s:
        short = pod("a")
        short["spec"]["activeDeadlineSeconds"] = 60
        assert (await s.filter(pod("b"), NODES))["NodeNames"] == NODES
        assert (await s.filter(short, NODES))["NodeNames"] == []
        assert "1000 MiB wanted" in await s.bind(world.add_pod(short), "n1")


# --- bind ----------------------------------------------------------------------------------------


async def test_bind_beyond_the_quota_writes_nothing() -> None:
    world = await world_with(quota(5000))
    async with world.scheduler() as s:
        assert await bind(world, s, "a", mem_mib=3000) == ""
        error = await bind(world, s, "b", "n2", mem_mib=3000)
        assert error.startswith("ResourceQuotaNotFit")
        assert "3000 MiB wanted, 3000 used, limit 5000" in error
        await quiet()
    assert s.seen.calls.count("append hami_alloc") == 1
    assert s.value("hami_scheduler_binds_total", outcome="no-quota") == 1
    assert world.decisions()[-1].verdict == "refused"


async def test_bind_within_a_quota_appends_once() -> None:
    world = await world_with(quota(5000))
    async with world.scheduler() as s:
        assert await bind(world, s, "a", mem_mib=3000) == ""
    assert s.seen.calls[:2] == ["append hami_alloc", "post binding"]


async def test_released_share_may_be_used_again() -> None:
    world = await world_with(quota(5000))
    async with world.scheduler() as s:
        assert await bind(world, s, "a", mem_mib=3000) == ""
        await quiet()
        world.kube.remove(pod_path(world.kube.pod("a", "team-a")))
        await quiet()
        assert await bind(world, s, "b", mem_mib=5000) == ""


async def test_many_binds_at_once_never_exceed_the_quota() -> None:
    world = await world_with(quota(5000))
    errors: list[str] = []
    async with world.scheduler() as s:
        async with anyio.create_task_group() as group:

            async def one(number: int) -> None:
                name, node = f"p{number}", NODES[number % 2]
                errors.append(await bind(world, s, name, node, mem_mib=1000, cores=1))

            for number in range(12):
                group.start_soon(one, number)
        await quiet()
    assert errors.count("") == 5
    assert len(world.live()) == 5
    assert s.value("hami_scheduler_quota_races_total") == 0, "one process does not race with itself"


async def test_of_two_schedulers_that_both_may_only_the_first_in_the_ledger_does() -> None:
    world = await world_with(quota(5000))
    async with world.scheduler("s1") as s1, world.scheduler("s2") as s2:
        gates = [Gate(), Gate()]
        s1.seen.before[0], s2.seen.before[0] = gates
        errors: dict[str, str] = {}
        async with anyio.create_task_group() as group:

            async def one(s: Running, name: str, node: str) -> None:
                errors[name] = await bind(world, s, name, node, mem_mib=3000)

            group.start_soon(one, s1, "a", "n1")
            group.start_soon(one, s2, "b", "n2")
            for gate in gates:
                await gate.reached.wait()
            await gates[1].open()
            await gates[0].open()
        await quiet()
    assert errors["b"] == ""
    assert "3000 MiB wanted, 3000 used, limit 5000" in errors["a"]
    assert [record.pod for record in world.live()] == ["b"]
    assert world.bound() == {"b": "n2"}
    assert s1.value("hami_scheduler_quota_races_total") == 1


async def test_reservation_beyond_the_quota_is_released_after_its_writer_died() -> None:
    world = await world_with(quota(5000))
    async with world.scheduler("s2") as s2:
        async with world.scheduler("s1") as s1:
            before, after = Gate(), Gate()
            s1.seen.before[0], s1.seen.after[0] = before, after
            async with anyio.create_task_group() as group:
                group.start_soon(bind, world, s1, "a", "n1")
                await before.reached.wait()
                assert await bind(world, s2, "b", "n2", mem_mib=4500) == ""
                await before.open()
                await after.reached.wait()
                group.cancel_scope.cancel()
        await quiet()
        assert sorted(record.pod for record in world.live()) == ["a", "b"]
        assert "1000 MiB wanted, 5500 used" in await bind(world, s2, "c", "n1")
        await world.advance(LEASE_S + 10, *NODES)
        assert [record.pod for record in world.live()] == ["b"]
        assert await bind(world, s2, "d", "n1", mem_mib=500) == ""


async def test_reservation_of_a_dead_scheduler_is_judged_again_before_use() -> None:
    world = await world_with(quota(5000))
    async with world.scheduler("s2") as s2:
        async with world.scheduler("s1") as s1:
            before, after = Gate(), Gate()
            s1.seen.before[0], s1.seen.after[0] = before, after
            async with anyio.create_task_group() as group:
                group.start_soon(bind, world, s1, "a", "n1")
                await before.reached.wait()
                assert await bind(world, s2, "b", "n2", mem_mib=4500) == ""
                await before.open()
                await after.reached.wait()
                group.cancel_scope.cancel()
        await quiet()
        error = await s2.bind(world.kube.pod("a", "team-a"), "n1")
        assert "1000 MiB wanted, 4500 used, limit 5000" in error
        assert [record.pod for record in world.live()] == ["b"]
    assert world.bound() == {"b": "n2"}


async def test_bind_whose_stream_stops_releases_the_share() -> None:
    def fold(seq: int, record: AllocationRecord) -> None:
        """The feed delivers nothing any more."""

    world = await world_with(quota(5000))
    async with world.scheduler(bus_timeout_s=0.5) as s:
        s.scheduler.quota.fold = fold  # type: ignore[method-assign]  # a stream that is silent
        assert "no answer in 0.5 s" in await bind(world, s, "a")
    assert world.live() == []
    assert world.bound() == {}


async def test_storage_lost_before_the_verdict_binds_nothing() -> None:
    world = await world_with(quota(5000))
    async with world.scheduler() as s:

        async def lose() -> None:
            world.bus.wipe()
            await quiet()

        s.seen.after[0] = lose
        assert await bind(world, s, "a") != ""
    assert world.bound() == {}


# --- queues --------------------------------------------------------------------------------------


async def test_queues_share_guarantees(tmp_path: Path) -> None:
    file = tmp_path / "queues.toml"
    file.write_text(QUEUES)
    world = await world_with()
    async with world.scheduler(queues_file=str(file)) as s:
        assert await bind(world, s, "a", mem_mib=6000) == ""
        await quiet()
        waits = world.add_pod(pod("b", mem_mib=3000))
        assert "QueueCannotBorrow: queue vision memory_mib" in str(await s.filter(waits, NODES))
        assert await bind(world, s, "c", "n2", mem_mib=4000, namespace="team-b") == ""
        await quiet()
        rows = {row["queue"]: row for row in (await get(s, "/v1/queues"))["items"]}
        await quiet()
        world.kube.remove(pod_path(world.kube.pod("a", "team-a")))
        await quiet()
        assert (await s.filter(waits, NODES))["NodeNames"] == NODES
    assert (rows["vision"]["used"], rows["vision"]["borrowed"]) == (6000, 2000)
    assert (rows["vision"]["waiting"], rows["speech"]["used"]) == (1, 4000)


async def test_queue_by_label_must_be_one_that_the_namespace_may_use(tmp_path: Path) -> None:
    file = tmp_path / "queues.toml"
    file.write_text(QUEUES + 'allowed_namespaces = ["team-a"]\nlimit = { memory_mib = 4000 }\n')
    world = await world_with()
    async with world.scheduler(queues_file=str(file)) as s:
        wrong = pod("a", labels={"hami.io/queue": "vison"})
        assert 'QueueUnknown: label hami.io/queue: "vison"' in str(await s.filter(wrong, NODES))
        kueue = pod("b", mem_mib=5000, labels={"kueue.x-k8s.io/queue-name": "their-own"})
        assert (await s.filter(kueue, NODES))["NodeNames"] == NODES
        named = pod("c", mem_mib=5000, labels={"hami.io/queue": "speech"})
        assert "QueueOverLimit: queue speech" in str(await s.filter(named, NODES))


async def test_queues_file_is_read_again_and_a_wrong_one_is_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "queues.toml"
    file.write_text(QUEUES)
    world = await world_with()
    async with world.scheduler(queues_file=str(file)) as s:
        assert s.value("hami_queues_file_valid") == 1
        large = pod("a", mem_mib=9000)
        assert "QueueCannotBorrow" in str(await s.filter(large, NODES))
        file.write_text(QUEUES.replace("guaranteed", "garanteed"))
        await reread(s.scheduler.quota.file)
        assert s.value("hami_queues_file_valid") == 0
        assert "did you mean guaranteed?" in (await get(s, "/v1/queues"))["problem"]
        assert "QueueCannotBorrow" in str(await s.filter(large, NODES))
        file.write_text(QUEUES.replace("4000", "9000"))
        await reread(s.scheduler.quota.file)
        assert (await s.filter(large, NODES))["NodeNames"] == NODES
        assert (await get(s, "/v1/queues"))["problem"] == ""


async def test_wrong_queues_file_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "queues.toml"
    file.write_text("[[queue")
    world = await world_with()
    with pytest.raises(SettingsInvalid, match="is not TOML"):
        async with world.scheduler(queues_file=str(file)):
            pass


# --- showing -------------------------------------------------------------------------------------


async def test_use_and_limits_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "queues.toml"
    file.write_text(QUEUES)
    world = await world_with(quota(5000), quota("10Gi", name="typo"))
    async with world.scheduler(queues_file=str(file)) as s:
        rows = (await get(s, "/v1/quotas"))["items"]
        assert rows[0] == {
            "namespace": "team-a",
            "quota": "gpu",
            "key": "limits.nvidia.com/gpumem",
            "resource": "nvidia/memory_mib",
            "used": 0,
            "limit": 5000,
            "problem": "",
        }
        assert "write 10240" in rows[1]["problem"]
        assert "write 10240" in await bind(world, s, "a")
        world.kube.remove("/api/v1/namespaces/team-a/resourcequotas/typo")
        await quiet()
        assert await bind(world, s, "b", mem_mib=3000) == ""
        await quiet()
    labels = {"namespace": "team-a", "quota_name": "nvidia.com/gpumem", "zone": "vGPU"}
    assert s.value("hami_resource_quota_used", **labels, limit="5000") == 3000
    assert s.value("hami_resource_quota_limit", **labels) == 5000
    queue = {"queue": "vision", "resource": "memory_mib"}
    assert s.value("hami_scheduler_queue_used", **queue) == 3000
    assert s.value("hami_scheduler_queue_guaranteed", **queue) == 4000
    assert s.value("hami_scheduler_queue_waiting_pods", queue="vision") == 0


async def test_snapshot_answers_about_quotas_and_queues_as_the_scheduler_does(
    tmp_path: Path,
) -> None:
    file = tmp_path / "queues.toml"
    file.write_text(QUEUES.replace("4000", "5000"))
    world = await world_with(quota(6000))
    asked = {
        "first": pod("first", mem_mib=5000),
        "quota": pod("quota", mem_mib=3000),
        "turn": pod("turn", namespace="team-b", mem_mib=9000),
        "waits": pod("waits", namespace="team-b", mem_mib=9000),
        "lost": pod("lost", labels={"hami.io/queue": "nowhere"}),
        "fits": pod("fits", namespace="team-b", mem_mib=4000),
    }
    async with world.scheduler(queues_file=str(file)) as s:
        for one in asked.values():
            world.add_pod(one)
        assert await s.bind(asked["first"], "n1") == ""
        await quiet()
        answers = {
            name: set((await s.filter(one, NODES))["FailedNodes"].values())
            for name, one in asked.items()
            if name != "first"
        }
        answers["turn"] = set((await s.filter(asked["turn"], NODES))["FailedNodes"].values())
        handler = s.scheduler.what_if.routes()["GET", "/v1/snapshot"]
        request = Request(
            method="GET", path="/v1/snapshot", query={}, headers={}, body=b"", params={}
        )
        response = await handler(request)
        assert isinstance(response, Response)
    codes = {name: {text.partition(":")[0] for text in texts} for name, texts in answers.items()}
    assert codes["quota"] == {"ResourceQuotaNotFit"}
    assert codes["waits"] == {"QueueCannotBorrow"}
    assert codes["lost"] == {"QueueUnknown"}
    assert codes["fits"] == set()
    known = codec.decode(bytes(response.body), Snapshot, what="snapshot")
    assert {one.pod_uid for one in known.quotas.claims} == {"uid-turn", "uid-waits"}
    governed = Governed(load_quotas(known), known.quotas.askers)
    waiting = {request.name: request for request in known.waiting}
    assert set(waiting) == set(answers)
    for name, wanted in waiting.items():
        told = standing(load(known), wanted, Surroundings(now_s=0), governed=governed)
        assert {refusal.text for refusal in told.refusals} == answers[name], name


async def test_object_that_is_no_quota_is_passed_over() -> None:
    world = await world_with({"metadata": {"name": "bad", "namespace": "team-a"}, "spec": [1]})
    async with world.scheduler() as s:
        assert (await s.filter(pod("a"), NODES))["NodeNames"] == NODES


def waiting_pod(world: World, name: str, *, age_s: float = 60.0, **ask: Any) -> builders.Obj:
    made = pod(name, **ask)
    created = datetime.fromtimestamp(world.clock.now_s() - age_s, tz=UTC)
    made["metadata"]["creationTimestamp"] = created.isoformat()
    return world.add_pod(made)


async def test_waiting_pods_show_their_position_and_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "queues.toml"
    file.write_text(QUEUES)
    world = await world_with()
    async with world.scheduler(queues_file=str(file)) as s:
        old = waiting_pod(world, "old", mem_mib=9000, age_s=100.0)
        waiting_pod(world, "young", mem_mib=3000)
        waiting_pod(world, "theirs", namespace="team-b")
        await quiet()
        await s.filter(old, NODES)
        await s.filter(old, NODES)
        rows = {row["pod"]: row for row in (await get(s, "/v1/queues"))["waiting"]}
        mine = await get(s, "/v1/queues", operator=False, namespace="team-b")
        hidden = await get(s, "/v1/queues", operator=False)
        with pytest.raises(RequestInvalid, match="queue"):
            await get(s, "/v1/queues", queue="vision")
    assert (rows["old"]["position"], rows["old"]["ahead"]) == (1, {})
    assert (rows["old"]["reason"], rows["old"]["code"]) == ("queue", "QueueCannotBorrow")
    assert rows["old"]["attempts"] == 2
    assert rows["old"]["estimate"] == {
        "wait_s": None,
        "basis": "never",
        "served": 0,
        "window_s": 0.0,
    }
    assert (rows["young"]["position"], rows["young"]["ahead"]["memory_mib"]) == (2, 9000)
    assert (rows["young"]["reason"], rows["young"]["estimate"]["basis"]) == (None, "few-starts")
    assert [row["pod"] for row in mine["waiting"]] == ["theirs"]
    assert {row["queue"] for row in mine["items"]} == {"speech"}
    assert hidden["waiting"] == []
    assert {row["queue"] for row in hidden["items"]} == {"vision", "speech"}


async def test_estimate_comes_from_the_pods_of_the_queue_that_started(tmp_path: Path) -> None:
    file = tmp_path / "queues.toml"
    file.write_text(QUEUES)
    world = await world_with()
    async with world.scheduler(queues_file=str(file)) as s:
        for name in ("a", "b", "c"):
            waiting_pod(world, name, mem_mib=1000)
        await quiet()
        for name in ("a", "b", "c"):
            assert await s.bind(world.kube.pod(name, "team-a"), "n1") == ""
        await world.advance(600, *NODES)
        waiting_pod(world, "d", mem_mib=1000)
        waiting_pod(world, "large", mem_mib=1001, age_s=1.0)
        await quiet()
        rows = {row["pod"]: row["estimate"] for row in (await get(s, "/v1/queues"))["waiting"]}
    assert rows["d"]["basis"] == "rate"
    assert rows["d"]["served"] == 3
    assert rows["d"]["wait_s"] == pytest.approx(200, abs=5)
    assert (rows["large"]["basis"], rows["large"]["wait_s"]) == ("none-as-large", None)


async def test_namespace_shows_what_it_may_still_use() -> None:
    world = await world_with(quota(6000))
    async with world.scheduler() as s:
        assert await bind(world, s, "a", mem_mib=1000) == ""
        await quiet()
        mine = await get(s, "/v1/quotas", namespace="team-a")
        others = await get(s, "/v1/quotas", namespace="team-b")
        everything = await get(s, "/v1/quotas")
    assert [(row["resource"], row["amount"]) for row in mine["headroom"]] == [
        ("nvidia/memory_mib", 5000)
    ]
    assert len(mine["items"]) == 1
    assert (others["items"], others["headroom"]) == ([], [])
    assert everything["headroom"] is None


# --- refused pods --------------------------------------------------------------------------------


async def test_refusals_are_counted_and_the_end_of_a_refused_pod_is_published() -> None:
    world = await world_with(quota(500))
    async with world.scheduler() as s:
        gone = waiting_pod(world, "gone")
        placed = waiting_pod(world, "placed")
        early = pod("early")
        await quiet()
        for one in (gone, gone, placed, early):
            await s.filter(one, NODES)
        await quiet()
        refused = [one for one in world.decisions("filter") if one.pod == "gone"]
        put_quota(world, quota(5000))
        await quiet()
        assert await s.bind(placed, "n1") == ""
        world.kube.remove(pod_path(gone))
        world.kube.remove(pod_path(placed))
        await world.advance(5, *NODES)
        ends = [one.pod for one in world.decisions("filter") if one.ended]
        await world.advance(5, *NODES)
        again = [one.pod for one in world.decisions("filter") if one.ended]
    assert [one.attempts for one in refused] == [1, 2]
    assert refused[0].created_s == pytest.approx(world.clock.now_s() - 70, abs=15)
    assert ends == again == ["gone"]
