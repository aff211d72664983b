# SPDX-License-Identifier: Apache-2.0
"""Policies by namespace, and canaries that are rolled back once, on all replicas and for good."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from hami_common.bus import subjects
from hami_common.errors import SettingsInvalid
from hami_common.events import codec
from hami_common.events.policy import RollbackRecord
from hami_common.runtime.httpd import Request, Response
from hami_core.replay.rerun import rerun
from hami_scheduler.shell import policies
from hamictl import traces
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World, quiet, reread

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]
POLICIES = """
default = "even"

[policies.even]
node = "spread"
device = ["spread"]

[policies.packed]
node = "binpack"
device = ["binpack"]

[canary]
policy = "packed"
namespaces = ["team-a"]
pods_least = 2
revision = 1

[[canary.objectives]]
measure = "refused_pct"
most_pct_of_control = 100
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policies.toml"
    path.write_text(POLICIES, encoding="utf-8")
    return path


async def world_of() -> World:
    world = World()
    for node in NODES:
        await world.add_devices(builders.devices(node, count=2, memory_mib=16000))
    return world


@asynccontextmanager
async def running(world: World, file: Path, **settings: Any) -> AsyncIterator[Running]:
    async with world.scheduler(policies_file=str(file), **settings) as s:
        yield s


async def view(s: Running) -> Any:
    request = Request(method="GET", path="/v1/policies", query={}, headers={}, body=b"", params={})
    response = await s.scheduler.policies.policies(request)
    assert isinstance(response, Response)
    return json.loads(response.body)


async def ask(world: World, s: Running, name: str, namespace: str, **wanted: Any) -> Any:
    return await s.filter(world.add_pod(builders.pod(name, namespace=namespace, **wanted)), NODES)


async def break_objective(world: World, s: Running, tag: str = "") -> None:
    """Refuse both pods of the canary's namespace, and none of the control group."""
    for number in range(2):
        await ask(world, s, f"huge{tag}-{number}", "team-a", mem_mib=60_000)
        await ask(world, s, f"small{tag}-{number}", "team-b", mem_mib=1000)


def rollbacks(world: World) -> list[RollbackRecord]:
    entries = world.bus.stream(subjects.POLICIES_BUCKET).latest(">")
    return [codec.decode(one.value, RollbackRecord, what=one.key) for one in entries]


async def test_the_canary_has_its_policy_and_annotations_come_first(file: Path) -> None:
    world = await world_of()
    own = {"hami.io/node-scheduler-policy": "spread"}
    async with running(world, file) as s:
        await ask(world, s, "a", "team-a")
        await ask(world, s, "b", "team-b")
        await ask(world, s, "own", "team-a", annotated=own)
        shown = await view(s)
        assert s.value("hami_scheduler_canary_running") == 1
        await s.scheduler.drain(limit_s=5)  # decisions that wait for a bind
    policies = {
        one.pod: (one.request.policy.node, one.request.policy.device)
        for one in world.decisions("filter")
        if one.request is not None
    }
    assert policies == {
        "a": ("binpack", ("binpack",)),
        "b": ("spread", ("spread",)),
        "own": ("spread", ("binpack",)),
    }
    weights = {"slot": 1, "core": 1, "memory": 1}
    even = {"name": "even", "node": "spread", "device": ["spread"], "weights": weights}
    assert shown["default"] == even
    assert [one["name"] for one in shown["items"]] == ["even", "packed"]
    assert shown["canary"]["state"] == "running"


async def test_a_missed_objective_is_rolled_back_once_for_all_replicas(file: Path) -> None:
    world = await world_of()
    async with running(world, file) as one, running(world, file) as two:
        for s in (one, two):
            await break_objective(world, s)
        # Both replicas saw the objective missed, and write at the same time.
        await one.scheduler.policies.judge()
        await two.scheduler.policies.judge()
        await quiet()
        (record,) = rollbacks(world)
        assert record.policy == "packed"
        assert record.reason == "refused_pct is 100, at most 100 % of the control group's 0"
        assert (record.canary_pods, record.control_pods) == (2, 2)
        counted = [s.value("hami_scheduler_canary_rollbacks_total") for s in (one, two)]
        assert sorted(counted) == [0, 1]
        for s in (one, two):
            shown = (await view(s))["canary"]
            assert shown["state"] == "rolled-back"
            assert shown["rollback"]["reason"] == record.reason
            assert s.value("hami_scheduler_canary_running") == 0
            assert s.scheduler.policies.policy_for("team-a").node == "spread"
    async with running(world, file) as restarted:
        assert (await view(restarted))["canary"]["state"] == "rolled-back"
        assert restarted.scheduler.policies.policy_for("team-a").node == "spread"


async def test_another_revision_starts_again_and_an_equal_one_does_not(file: Path) -> None:
    world = await world_of()
    async with running(world, file) as s:
        await break_objective(world, s)
        await s.scheduler.policies.judge()
        file.write_text(POLICIES + "# a comment\n", encoding="utf-8")
        await reread(s.scheduler.policies.file)
        assert (await view(s))["canary"]["state"] == "rolled-back"
        file.write_text(POLICIES.replace("revision = 1", "revision = 2"), encoding="utf-8")
        await reread(s.scheduler.policies.file)
        assert (await view(s))["canary"]["state"] == "running"
        assert s.scheduler.policies.policy_for("team-a").node == "binpack"
        await s.scheduler.policies.judge()
        assert len(rollbacks(world)) == 1, "the new canary has no pods yet"
        await break_objective(world, s, "again")
        await s.scheduler.policies.judge()
        assert len(rollbacks(world)) == 2


async def test_an_objective_that_is_met_changes_nothing(file: Path) -> None:
    world = await world_of()
    async with running(world, file) as s:
        for number in range(2):
            await ask(world, s, f"a{number}", "team-a")
            await ask(world, s, f"b{number}", "team-b")
        await s.scheduler.policies.judge()
        shown = (await view(s))["canary"]
        assert shown["state"] == "running"
        assert (shown["verdict"]["is_decidable"], shown["verdict"]["missed"]) == (True, "")
    assert rollbacks(world) == []


async def test_pods_that_another_replica_binds_or_that_are_deleted_wait_no_longer(
    file: Path,
) -> None:
    text = POLICIES.replace("refused_pct", "wait_p95_s").replace(
        "most_pct_of_control = 100", "most = 100"
    )
    file.write_text(text, encoding="utf-8")
    world = await world_of()
    async with running(world, file) as s:
        await break_objective(world, s)
        await s.scheduler.policies.judge()
        pods = "/api/v1/namespaces/team-a/pods"
        world.kube.change(f"{pods}/huge-0", spec={"nodeName": "n1"})
        world.kube.remove(f"{pods}/huge-1")
        await quiet()
        await s.scheduler.policies.judge()
        await world.advance(200, *NODES)
        await s.scheduler.policies.judge()
        figures = (await view(s))["canary"]["verdict"]["canary"]
    assert figures["pods"] == 1
    assert figures["wait_p95_s"] <= 60, "at the next evaluation or the one after"
    assert rollbacks(world) == []


async def test_other_tasks_run_while_the_packing_is_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "NODES_AT_ONCE", 1)
    world = await world_of()
    turns: list[bool] = []

    async def other() -> None:
        while True:
            turns.append(True)
            await anyio.lowlevel.checkpoint()

    async with running(world, file) as s:
        for name, namespace in (("a", "team-a"), ("b", "team-b")):
            made = builders.pod(name, namespace=namespace, mem_mib=4000)
            world.add_pod(made)
            await quiet()
            assert await s.bind(made, "n1") == ""
            await quiet()
        async with anyio.create_task_group() as group:
            group.start_soon(other)
            await s.scheduler.policies.judge()
            group.cancel_scope.cancel()
        verdict = (await view(s))["canary"]["verdict"]
    assert len(turns) >= len(NODES)
    assert (verdict["canary"]["packing_pct"], verdict["control"]["packing_pct"]) == (25.0, 25.0)


async def test_refusals_of_pods_with_their_own_policy_or_by_gangs_do_not_count(file: Path) -> None:
    world = await world_of()
    own = {"hami.io/node-scheduler-policy": "spread"}
    async with running(world, file) as s:
        for number in range(3):
            await ask(world, s, f"o{number}", "team-a", mem_mib=60_000, annotated=own)
            await ask(world, s, f"b{number}", "team-b")
        await s.scheduler.policies.judge()
        assert (await view(s))["canary"]["verdict"]["canary"]["pods"] == 0


async def test_the_rollback_outlives_the_storage_of_the_bus(file: Path) -> None:
    world = await world_of()
    async with running(world, file) as s:
        await break_objective(world, s)
        await s.scheduler.policies.judge()
        await quiet()
        world.bus.wipe()
        await quiet()
        assert s.scheduler.policies.policy_for("team-a").node == "spread"
        assert len(rollbacks(world)) == 1


async def test_an_invalid_file_leaves_the_last_valid_one_in_force(file: Path) -> None:
    world = await world_of()
    async with running(world, file) as s:
        file.write_text(POLICIES.replace('"binpack"', '"tight"'), encoding="utf-8")
        await reread(s.scheduler.policies.file)
        assert "tight" in (await view(s))["problem"]
        assert s.value("hami_policies_file_valid") == 0
        assert s.scheduler.policies.policy_for("team-a").node == "binpack"
        file.write_text(POLICIES.replace('["team-a"]', '["team-b"]'), encoding="utf-8")
        await reread(s.scheduler.policies.file)
        assert (await view(s))["problem"] == ""
        assert s.scheduler.policies.policy_for("team-a").node == "spread"
        assert s.scheduler.policies.policy_for("team-b").node == "binpack"


async def test_a_wrong_file_ends_the_start(file: Path) -> None:
    file.write_text("[policies]\n", encoding="utf-8")
    with pytest.raises(SettingsInvalid, match="has 0 policies"):
        async with running(World(), file):
            pass


async def test_a_replay_of_a_canary_with_its_rollback_is_exact(file: Path, tmp_path: Path) -> None:
    world = await world_of()
    log = tmp_path / "log"
    async with running(world, file, stimulus_log_dir=str(log)) as s:
        await break_objective(world, s)
        await s.scheduler.policies.judge()
        await ask(world, s, "later", "team-a")
        await s.scheduler.drain(limit_s=5)
    report = rerun(traces.items([log]))
    assert report.is_identical
    asked = traces.read_log([log]).history.arrivals
    assert {run.request.name: run.request.policy.node for run in asked} == {
        "huge-0": "binpack",
        "huge-1": "binpack",
    }
    assert report.by_kind["FilterAsked"] == 5
