# SPDX-License-Identifier: Apache-2.0
"""Answers of filter, prioritize and bind to kube-scheduler."""

import json
from collections import defaultdict

import anyio
import pytest

from hami_common.errors import WireInvalid
from hami_common.events import codec
from hami_common.events.inventory import DeviceFault
from hami_common.pods import annotations
from hami_common.runtime.httpd import Request
from hami_core.replay.snapshot import Snapshot, load
from hami_scheduler.shell import decisions, verdictreports
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World, quiet

pytestmark = pytest.mark.anyio

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HOLD_S = 1.0


async def world_with_nodes() -> World:
    world = World()
    await world.add_devices(builders.devices("small", memory_mib=8000))
    await world.add_devices(builders.devices("big", memory_mib=32000))
    return world


def scores(priorities: list[builders.Obj]) -> dict[str, int]:
    """Score of each node; kube-scheduler gives 0 to nodes that are not named."""
    return defaultdict(int, {entry["Host"]: entry["Score"] for entry in priorities})


async def raw(s: Running, verb: str, body: bytes) -> bytes:
    handler = s.scheduler.extender.routes()["POST", f"/{verb}"]
    request = Request(method="POST", path=f"/{verb}", query={}, headers={}, body=body, params={})
    return bytes((await handler(request)).body)  # type: ignore[union-attr]  # no handler of ours streams


async def test_filter_returns_the_nodes_that_fit_or_why_none_does() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        answer = await s.filter(builders.pod("a", mem_mib=4000), ["small", "big", "none"])
        assert answer["NodeNames"] == ["small", "big"]
        assert answer["FailedNodes"] == {}
        answer = await s.filter(builders.pod("a", mem_mib=9000), ["small", "none"])
        assert s.value("hami_scheduler_node_refusals_total", code="NodeUnregistered") == 2
        await s.scheduler.drain(limit_s=1)
    assert answer["NodeNames"] == []
    assert answer["Error"] == ""
    assert answer["Nodes"] is None
    assert "9000 MiB wanted, at most 8000 MiB free" in answer["FailedNodes"]["small"]
    assert answer["FailedNodes"]["none"].startswith("NodeUnregistered")
    told = [[(r.code, r.nodes) for r in one.refusals] for one in world.decisions("filter")]
    assert [("NodeUnregistered", ("none",))] in told  # also where others fit


def preferring(spec: builders.Obj) -> builders.Obj:
    pod = builders.pod("b", mem_mib=1000)
    pod["spec"].update(spec)
    return pod


TERM = {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


async def test_filter_returns_the_best_nodes_and_a_reason_for_the_others() -> None:
    world = World()
    for i in range(5):
        await world.add_devices(builders.devices(f"n{i}", memory_mib=10000))
    world.add_pod(builders.pod("held", mem_mib=4000))
    async with world.scheduler(nodes_to_score=2) as s:
        assert await s.bind(world.kube.pod("held"), "n3") == ""
        names = ["n4", "n3", "n2", "none", "n0"]
        answer = await s.filter(builders.pod("a", mem_mib=1000), names)
        assert "n3" in answer["NodeNames"]  # the fullest
        assert len(answer["NodeNames"]) == 2
        ranked = scores(await s.prioritize(builders.pod("a", mem_mib=1000), answer["NodeNames"]))
        assert max(ranked, key=ranked.__getitem__) == "n3"
        only = await s.filter(builders.pod("a", mem_mib=1000), ["n2", "n1"])
        assert only["NodeNames"] == ["n2", "n1"]
        await s.scheduler.drain(limit_s=1)
    told = [(one.nodes_feasible, one.nodes_named) for one in world.decisions("filter")]
    assert sorted(told) == [(2, 0), (4, 2)]
    async with world.scheduler(nodes_to_score=0) as s:
        answer = await s.filter(builders.pod("a", mem_mib=1000), names)
        assert answer["NodeNames"] == ["n4", "n3", "n2", "n0"]


@pytest.mark.parametrize(
    "spec",
    [
        {"affinity": {"nodeAffinity": {PREFERRED: [TERM]}}},
        {"affinity": {"podAffinity": {PREFERRED: [TERM]}, "nodeAffinity": None}},
        {"affinity": {"podAntiAffinity": {REQUIRED: [{}], PREFERRED: [TERM]}}},
        {"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}]},
    ],
)
async def test_filter_names_every_node_to_a_pod_that_prefers_some(spec: builders.Obj) -> None:
    world = await world_with_nodes()
    async with world.scheduler(nodes_to_score=1) as s:
        answer = await s.filter(preferring(spec), ["small", "big"])
    assert answer["NodeNames"] == ["small", "big"]


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}, PREFERRED: []}}},
        {"affinity": {"podAntiAffinity": {REQUIRED: [{}]}}},
        {"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]},
        {"affinity": None, "topologySpreadConstraints": None},
    ],
)
async def test_constraints_of_a_pod_are_no_preferences(spec: builders.Obj) -> None:
    world = await world_with_nodes()
    async with world.scheduler(nodes_to_score=1) as s:
        answer = await s.filter(preferring(spec), ["small", "big"])
    assert len(answer["NodeNames"]) == 1


async def test_filter_answers_whole_nodes_with_whole_nodes() -> None:
    world = await world_with_nodes()
    nodes = [{"metadata": {"name": n}, "spec": {"x": n}} for n in ("small", "big")]
    body = json.dumps({"Pod": builders.pod("a", mem_mib=9000), "Nodes": {"items": nodes}}).encode()
    async with world.scheduler() as s:
        answer = json.loads(await raw(s, "filter", body))
        large = {"Pod": builders.pod("a", mem_mib=40000), "Nodes": {"items": nodes}}
        refused = json.loads(await raw(s, "filter", json.dumps(large).encode()))
    assert answer["Nodes"]["items"] == [nodes[1]]
    assert answer["NodeNames"] is None
    assert refused["Nodes"]["items"] == []
    assert refused["FailedNodes"].keys() == {"small", "big"}


async def test_filter_passes_pods_without_a_request() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        answer = await s.filter(builders.pod("a", gpu=None), ["small", "none"])
        assert answer["NodeNames"] == ["small", "none"]
        zero = builders.pod("a", gpu=0)
        assert (await s.filter(zero, ["none"]))["NodeNames"] == ["none"]
        assert await s.prioritize(zero, ["none"]) == [{"Host": "none", "Score": 0}]
    assert world.decisions("filter") == []


async def test_filter_reports_field_and_fix_of_an_invalid_request_for_every_node() -> None:
    world = await world_with_nodes()
    pod = builders.pod("a")
    pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = "3Gi"
    async with world.scheduler() as s:
        answer = await s.filter(pod, ["small", "big"])
    assert answer["NodeNames"] == []
    assert answer["FailedNodes"] == {}
    texts = set(answer["FailedAndUnresolvableNodes"].values())
    assert answer["FailedAndUnresolvableNodes"].keys() == {"small", "big"}
    assert len(texts) == 1
    assert "nvidia.com/gpumem" in texts.pop()


async def test_filter_and_prioritize_write_nothing() -> None:
    world = await world_with_nodes()
    pod = world.add_pod(builders.pod("a"))
    version = pod["metadata"]["resourceVersion"]
    async with world.scheduler() as s:
        await s.filter(pod, ["small", "big"])
        await s.prioritize(pod, ["small", "big"])
        assert s.seen.calls == []
    assert world.kube.pod("a")["metadata"]["resourceVersion"] == version
    assert world.records() == {}


async def test_calls_before_synchronization_are_refused_with_the_missing_parts() -> None:
    world = await world_with_nodes()
    world.bus.set_available(available=False)
    async with world.scheduler(wait=False) as s:
        pod = world.add_pod(builders.pod("a"))
        assert "records" in (await s.filter(pod, ["big"]))["Error"]
        assert "records" in await s.bind(pod, "big")
        assert await s.prioritize(pod, ["big"]) == [{"Host": "big", "Score": 0}]
        world.bus.set_available(available=True)
        await quiet()
        await world.agents_beat()
        assert (await s.filter(pod, ["big"]))["NodeNames"] == ["big"]


async def test_filter_waits_a_moment_for_the_synchronization() -> None:
    world = await world_with_nodes()
    world.bus.set_available(available=False)
    answers: list[builders.Obj] = []
    async with (
        world.scheduler(wait=False, sync_wait_s=5.0) as s,
        anyio.create_task_group() as group,
    ):

        async def ask() -> None:
            answers.append(await s.filter(builders.pod("a"), ["big"]))

        group.start_soon(ask)
        await quiet()
        assert answers == []
        world.bus.set_available(available=True)
        await quiet()
        assert len(answers) == 1
        assert answers[0]["Error"] == ""


async def test_node_is_used_after_its_agents_first_heartbeat_only() -> None:
    world = await world_with_nodes()
    async with world.scheduler(wait=False) as s:
        await quiet()
        pod = world.add_pod(builders.pod("a"))
        refused = await s.filter(pod, ["big"])
        assert refused["NodeNames"] == []
        assert "AgentSilent" in refused["FailedNodes"]["big"], refused
        await world.agents_beat()
        assert (await s.filter(pod, ["big"]))["NodeNames"] == ["big"]


async def test_prioritize_prefers_the_fuller_node_for_binpack_and_the_emptier_for_spread() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        names = ["small", "big"]
        pack = scores(await s.prioritize(builders.pod("a", mem_mib=4000), names))
        spread_pod = builders.pod("a", mem_mib=4000, annotated={annotations.NODE_POLICY: "spread"})
        spread = scores(await s.prioritize(spread_pod, names))
        await s.scheduler.drain(limit_s=1)
    assert 10 >= pack["small"] > pack["big"] == 0
    assert 10 >= spread["big"] > spread["small"] == 0
    (first, _) = world.decisions("prioritize")
    assert [score.node for score in first.feasible] == ["small", "big"]


@pytest.mark.parametrize(
    "key",
    [
        "scheduling.x-k8s.io/pod-group",
        "scheduling.k8s.io/group-name",
        "kueue.x-k8s.io/pod-group-name",
    ],
)
async def test_members_of_a_gang_are_drawn_to_the_rack_of_those_placed(key: str) -> None:
    world, rack = World(), "example.com/rack"
    for number in range(4):
        await world.add_devices(builders.devices(f"n{number}", count=2))
        node = {"metadata": {"name": f"n{number}", "labels": {rack: f"r{number // 2}"}}}
        world.kube.put(f"/api/v1/nodes/n{number}", node)
    names = [f"n{number}" for number in range(4)]
    async with world.scheduler(topology_labels=(rack,)) as s:
        first = world.add_pod(builders.pod("a", mem_mib=16000, annotated={key: "train"}))
        assert await s.bind(first, "n3") == ""
        await quiet()
        second = builders.pod("b", mem_mib=16000, gpu=2, annotated={key: "train"})
        near = scores(await s.prioritize(second, names))
        assert max(near, key=lambda node: near[node]) == "n2"
        other = builders.pod("c", mem_mib=16000, annotated={key: "other"})
        packed = scores(await s.prioritize(other, names))
        assert packed["n3"] > packed["n2"]
        world.kube.remove("/api/v1/namespaces/default/pods/a")
        await quiet()
        gone = scores(await s.prioritize(second, names))
        assert max(gone, key=lambda node: gone[node]) == "n0"


@pytest.mark.parametrize(
    ("verb", "body", "text"),
    [
        ("filter", b"", "ExtenderArgs"),
        ("filter", b"[]", "ExtenderArgs"),
        ("filter", b'{"Pod": {}}', "neither NodeNames nor Nodes"),
        ("filter", b'{"Pod": {}, "NodeNames": [1]}', "$.NodeNames[0]"),
        ("filter", b'{"Pod": {}, "Nodes": {"items": [{}]}}', "no metadata.name"),
        ("filter", b'{"NodeNames": []}', "Pod"),
        ("filter", b"\xff", "ExtenderArgs"),
        ("prioritize", b'{"Pod": {"spec": 7}, "NodeNames": []}', "spec"),
        ("bind", b"{}", "PodName"),
        (
            "bind",
            b'{"PodName": "", "PodNamespace": "d", "PodUID": "u", "Node": "n"}',
            "PodName is empty",
        ),
    ],
)
async def test_malformed_calls_are_refused_with_the_problem(
    verb: str, body: bytes, text: str
) -> None:
    world = World()
    async with world.scheduler() as s:
        try:
            await raw(s, verb, body)
        except WireInvalid as error:
            told = str(error)
        else:
            told = ""
    assert text in told


async def test_decision_of_filter_names_classes_and_carries_the_pods_trace() -> None:
    world = await world_with_nodes()
    pod = builders.pod("a", mem_mib=9000, annotated={annotations.TRACEPARENT: TRACEPARENT})
    async with world.scheduler() as s:
        await s.filter(pod, ["small", "big"])
        await s.scheduler.drain(limit_s=1)
    (record,) = world.decisions("filter")
    assert (record.verdict, record.nodes_considered, record.nodes_feasible) == ("feasible", 2, 1)
    (refused,) = record.refusals
    assert (refused.code, refused.count, refused.nodes) == ("CardInsufficientMemory", 1, ("small",))
    (message,) = (m for m in world.bus.published if ".decision." in m.subject)
    assert message.headers["traceparent"].split("-")[1] == TRACEPARENT.split("-")[1]
    assert message.headers["traceparent"] == TRACEPARENT


async def test_refusal_is_recorded_device_by_device_once_in_a_while() -> None:
    world = await world_with_nodes()
    held = world.add_pod(builders.pod("held", mem_mib=3000))
    pod = builders.pod("a", mem_mib=40_000)
    async with world.scheduler() as s:
        assert await s.bind(held, "small") == ""
        for wait_s in (0, verdictreports.DETAILS_S - 1, 1):
            await world.clock.advance(wait_s)
            await s.filter(pod, ["small", "big"])
        await s.scheduler.drain(limit_s=1)
    records = world.decisions("filter")
    assert [bool(one.closest) for one in records] == [True, False, True]
    first, second = records[0].closest
    assert (first.node, second.node) == ("big", "small")
    (device,) = second.devices
    assert (device.code, device.wanted.memory_mib) == ("CardInsufficientMemory", 40_000)
    assert device.free.memory_mib == 5000
    assert [(one.namespace, one.name, one.memory_mib) for one in device.holders] == [
        ("default", "held", 3000)
    ]


async def test_details_that_do_not_fit_into_a_message_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decisions, "PAYLOAD_MOST", 500)
    world = await world_with_nodes()
    async with world.scheduler() as s:
        await s.filter(builders.pod("a", mem_mib=40_000), ["small", "big"])
        await s.scheduler.drain(limit_s=1)
    (record,) = world.decisions("filter")
    assert (record.verdict, record.closest) == ("refused", ())


async def test_prioritize_records_why_the_best_node_is_best() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        await s.prioritize(builders.pod("a", mem_mib=4000), ["small", "big"])
        await s.scheduler.drain(limit_s=1)
    (record,) = world.decisions("prioritize")
    assert record.scores is not None
    assert [one.node for one in record.scores.nodes] == ["small", "big"]
    assert record.scores.decided_by == "fill"
    assert record.scores.nodes[0].memory == 0.5
    assert [one.uuid for one in record.scores.devices] == [
        builders.devices("small").devices[0].uuid
    ]


async def test_bind_continues_the_pods_trace_into_the_ledger() -> None:
    world = await world_with_nodes()
    pod = world.add_pod(builders.pod("a", annotated={annotations.TRACEPARENT: TRACEPARENT}))
    async with world.scheduler() as s:
        assert await s.bind(pod, "big") == ""
    (entry,) = world.bus.stream("hami_alloc").latest(">")
    assert entry.headers["traceparent"].split("-")[1] == TRACEPARENT.split("-")[1]
    assert entry.headers["ce-type"] == "io.hami.allocation.reserve.v1"
    assert entry.headers["ce-source"] == "/scheduler/s1"


async def test_bind_before_the_watch_delivers_the_pod_continues_the_trace_of_filter() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        pod = world.add_pod(builders.pod("a", annotated={annotations.TRACEPARENT: TRACEPARENT}))
        await quiet()
        s.scheduler.state.pods.drop(pod["metadata"]["uid"])
        await s.filter(pod, ["big"])
        assert await s.bind(pod, "big") == ""
    (entry,) = world.bus.stream("hami_alloc").latest(">")
    assert entry.headers["traceparent"].split("-")[1] == TRACEPARENT.split("-")[1]


async def test_bus_that_takes_no_decisions_slows_no_call_and_counts_the_drops() -> None:
    world = await world_with_nodes()
    async with world.scheduler(decision_queue_size=2, decision_hold_s=HOLD_S) as s:
        world.bus.set_available(available=False)
        for number in range(6):
            assert (await s.filter(builders.pod(f"p{number}"), ["big"]))["NodeNames"] == ["big"]
        await world.clock.advance(2 * HOLD_S)
        failed = s.value("hami_scheduler_queue_failures_total", queue="decisions")
        dropped = s.value("hami_scheduler_queue_drops_total", queue="decisions")
    assert failed + dropped == 6
    assert dropped > 0


async def test_snapshot_contains_the_inputs_of_decisions() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        assert await s.bind(world.add_pod(builders.pod("a", mem_mib=30000)), "big") == ""
        await world.fault(
            DeviceFault(
                node="small",
                vendor="nvidia",
                uuid="GPU-small-0",
                boot_id="boot-1",
                seq=9,
                time_s=0.0,
                healthy=False,
            )
        )
        handler = s.scheduler.what_if.routes()["GET", "/v1/snapshot"]
        response = await handler(
            Request(method="GET", path="/v1/snapshot", query={}, headers={}, body=b"", params={})
        )
        snapshot = codec.decode(bytes(response.body), Snapshot, what="snapshot")  # type: ignore[union-attr]  # not streamed
        live = s.state.ledger
        copy = load(snapshot)
        copy.check()
        assert list(copy.table.usages()) == list(live.table.usages())
        assert snapshot.snapshot_id == live.snapshot_id
        assert [(f.node, f.healthy) for f in snapshot.faults] == [("small", False)]
