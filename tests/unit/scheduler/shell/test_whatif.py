# SPDX-License-Identifier: Apache-2.0
"""Questions to ``/v1/whatif``: answers on the live state, constraints of nodes, bounds, errors."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from hami_common.errors import HamiError, RequestInvalid, TooManyRequests, Unauthenticated
from hami_common.runtime.httpd import Request
from hami_core.replay import questions
from hami_scheduler.settings import Settings
from hami_scheduler.shell.listeners import guarded as guard
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World

pytestmark = pytest.mark.anyio
Obj = dict[str, Any]


@asynccontextmanager
async def scheduler(**settings: Any) -> AsyncIterator[tuple[World, Running]]:
    """One node of two cards of 16,000 MiB, labelled as a pool, with a taint."""
    world = World()
    await world.add_devices(builders.devices("n1", count=2))
    world.kube.put("/api/v1/nodes/n1", node("n1"))
    async with world.scheduler(**settings) as s:
        yield world, s


def node(name: str) -> Obj:
    labels = {"pool": "a", "kubernetes.io/hostname": name}
    taints = [{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]
    return {"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}}


async def post(s: Running, path: str, body: object) -> Any:
    handler = s.scheduler.what_if.routes()["POST", path]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = Request(method="POST", path=path, query={}, headers={}, body=raw, params={})
    with anyio.fail_after(30):
        response = await handler(request)
    return json.loads(response.body)  # type: ignore[union-attr]  # not streamed


def manifest(name: str, mem_mib: int, **spec: Any) -> Obj:
    """A pod as a user writes it."""
    made = builders.pod(name, mem_mib=mem_mib, cores=0)
    tolerated = {"tolerations": [{"operator": "Exists"}], **spec}
    return {"kind": "Pod", "metadata": {"name": name}, "spec": {**made["spec"], **tolerated}}


async def test_pods_of_a_call_are_booked_one_after_the_other_and_nothing_is_reserved() -> None:
    async with scheduler() as (world, s):
        before = s.state.ledger.snapshot_id
        pods = [manifest(f"p{n}", 10_000) for n in range(3)]
        answer = await post(s, "/v1/whatif/simulate", {"pods": pods, "explain": True})
        assert [one.get("node", "") for one in answer["pods"]] == ["n1", "n1", ""]
        assert [one.get("fitting", []) for one in answer["pods"]] == [["n1"], ["n1"], []]
        assert (answer["placed"], answer["refused"]) == (2, 1)
        assert "10000 MiB wanted" in answer["pods"][2]["refusals"][0]["text"]
        assert answer["pods"][2]["closest"][0]["fits"] == "6000"
        assert answer["snapshot_id"] == before == s.state.ledger.snapshot_id
        assert not world.records()


async def test_added_nodes_take_what_is_left() -> None:
    async with scheduler() as (_, s):
        pods = [manifest(f"p{n}", 10_000) for n in range(5)]
        body = {"pods": pods, "add": {"template": "n1", "nodes": 2}}
        answer = await post(s, "/v1/whatif/simulate", body)
        assert answer["added"] == ["n1-added-1", "n1-added-2"]
        assert answer["refused"] == 0
        assert set(answer["pods"][0]["fitting"]) == {"n1", "n1-added-1", "n1-added-2"}


async def test_waiting_pods_get_the_least_number_of_nodes() -> None:
    async with scheduler() as (world, s):
        bound = builders.pod("bound", mem_mib=10_000, cores=0)
        assert await s.bind(world.add_pod(bound), "n1") == ""
        for number in range(6):
            world.add_pod(waiting(f"p{number}", 9_000))
        world.add_pod(waiting("picky", 1000, nodeSelector={"pool": "b"}))
        world.add_pod(waiting("here", 1000, nodeSelector={"kubernetes.io/hostname": "n1"}))
        world.add_pod(waiting("huge", 17_000))
        await quiet_watch(s, 9)
        answer = await post(s, "/v1/whatif/scale", {"template": "n1"})
        # One more fits on n1, five need a card each.
        assert (answer["nodes"], answer["searched"]) == (3, 3)
        reasons = {one["pod"]: one["reason"] for one in answer["unhelped"]}
        assert sorted(reasons) == ["huge", "picky"]
        assert reasons["picky"] == "excluded by the pod's nodeSelector"
        assert "17000 MiB wanted" in reasons["huge"]
        assert {one["pod"]: one.get("node") for one in answer["pods"]}["here"] == "n1"
        short = await post(s, "/v1/whatif/scale", {"template": "n1", "nodes_most": 2})
        assert (short["nodes"], short["searched"]) == (None, 2)
        assert len(short["pods"]) == 9


def waiting(name: str, mem_mib: int, **spec: Any) -> Obj:
    pod = builders.pod(name, mem_mib=mem_mib, cores=0)
    pod["spec"] |= {"tolerations": [{"operator": "Exists"}], **spec}
    return pod


async def quiet_watch(s: Running, count: int) -> None:
    """Wait until the watch has delivered the waiting pods."""
    with anyio.fail_after(10):
        while s.state.pods.waiting_count() < count:
            await anyio.lowlevel.checkpoint()


async def test_taints_of_a_template_keep_pods_out_and_those_of_its_condition_do_not() -> None:
    async with scheduler() as (_, s):
        template = {
            "name": "pool",
            "devices": [json.loads(json.dumps(DEVICES))],
            "taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}],
        }
        tolerates = [{"key": "gpu", "operator": "Exists"}]
        only = {"key": "node.kubernetes.io/not-ready", "operator": "Exists"}
        pods = [
            manifest("out", 12_000, tolerations=[]),
            manifest("in", 12_000, tolerations=tolerates),
        ]
        answer = await post(s, "/v1/whatif/scale", {"template": template, "pods": pods})
        assert answer["nodes"] == 1
        assert [one["reason"] for one in answer["unhelped"]] == [
            "excluded by taint gpu without a toleration of the pod"
        ]
        # A copy of n1 is ready: the taint of its condition is not part of the template.
        pods = [manifest(f"p{n}", 12_000, tolerations=[]) for n in range(2)]
        answer = await post(s, "/v1/whatif/scale", {"template": "n1", "pods": pods})
        assert answer["nodes"] == 1
        pods = [manifest(f"p{n}", 12_000, tolerations=[only]) for n in range(2)]
        answer = await post(s, "/v1/whatif/scale", {"template": "n1", "pods": pods})
        assert answer["nodes"] == 0


DEVICES = {
    "node": "pool",
    "vendor": "nvidia",
    "boot_id": "",
    "seq": 1,
    "time_s": 0,
    "config_generation": 1,
    "devices": [
        {
            "uuid": f"GPU-{number}",
            "vendor": "nvidia",
            "index": number,
            "type": "NVIDIA H100",
            "memory_mib": 16000,
            "capacity_mib": 16000,
        }
        for number in range(2)
    ],
}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("simulate", b"{", "body: "),
        ("simulate", {"pods": []}, "`$.pods`"),
        ("simulate", {"pods": [{}], "more": 1}, "unknown field `more`"),
        ("simulate", {"pods": [{"kind": "Deployment"}]}, "pods[0].kind: is 'Deployment'"),
        ("simulate", {"pods": [{"spec": {"containers": 1}}]}, "pods[0]: "),
        ("simulate", {"pods": [{}], "add": {"template": "n1", "nodes": 1001}}, "1000"),
        ("scale", {"template": "absent"}, "template: no node absent has devices"),
        ("scale", {"template": {"name": "x"}}, "template.devices: is empty"),
        ("scale", {"template": {"name": "x", "devices": [DEVICES, DEVICES]}}, "a vendor twice"),
        ("scale", {"template": "n1", "nodes_most": -1}, "nodes_most"),
        ("scale", {}, "template"),
        ("policy", {"hours": 0}, "hours"),
        ("policy", {"hours": 169}, "168"),
        ("policy", {"policies": []}, "policies"),
        ("policy", {"policies": [{"node_policy": "tetris"}]}, "tetris"),
    ],
)
async def test_mistakes_are_named(path: str, body: object, text: str) -> None:
    async with scheduler() as (_, s):
        with pytest.raises(RequestInvalid) as caught:
            await post(s, f"/v1/whatif/{path}", body)
        assert text in str(caught.value)
        # The next question is answered.
        answer = await post(s, "/v1/whatif/simulate", {"pods": [manifest("p", 100)]})
        assert answer["placed"] == 1


async def test_answer_is_bounded_in_names_time_and_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pods = [manifest(f"p{n}", 100) for n in range(3)]
    async with scheduler(whatif_s=0.0) as (_, s):
        with pytest.raises(RequestInvalid, match="takes longer than 0 s"):
            await post(s, "/v1/whatif/simulate", {"pods": pods})
    async with scheduler() as (world, s):
        monkeypatch.setattr(questions, "FITTING_MOST", 2)
        with pytest.raises(RequestInvalid, match="send at most 2 pods, or set fitting to false"):
            await post(s, "/v1/whatif/simulate", {"pods": pods})
        answer = await post(s, "/v1/whatif/simulate", {"pods": pods, "fitting": False})
        assert answer["placed"] == 3
        monkeypatch.setattr(questions, "PODS_MOST", 1)
        for number in range(2):
            world.add_pod(waiting(f"w{number}", 100))
        await quiet_watch(s, 2)
        with pytest.raises(RequestInvalid, match="2 pods wait, one answer covers 1"):
            await post(s, "/v1/whatif/scale", {"template": "n1"})


async def test_policies_are_compared_on_the_live_allocations() -> None:
    async with scheduler() as (world, s):
        for number in range(2):
            assert await s.bind(world.add_pod(waiting(f"p{number}", 6_000)), "n1") == ""
        policies = [{"device_policy": ["binpack"]}, {"device_policy": ["spread"]}]
        await world.clock.advance(5)
        answer = await post(s, "/v1/whatif/policy", {"hours": 1, "policies": policies})
        packed, spread = answer["results"]
        assert (answer["arrivals"], answer["running"]) == (2, 0)
        assert (packed["devices_used_peak"], spread["devices_used_peak"]) == (1, 2)
        assert packed["policy"]["device_policy"] == ["binpack"]
        assert packed["policy"]["node_policy"] == "binpack"
        assert answer["recorded"]["devices_used_peak"] == 2
    async with scheduler(whatif_policy_s=0.0) as (_, s):
        with pytest.raises(RequestInvalid, match="hours: the answer takes longer than 0 s"):
            await post(s, "/v1/whatif/policy", {})


async def test_second_question_at_a_time_is_refused() -> None:
    pods = [manifest(f"p{n}", 100) for n in range(3)]
    outcomes: list[str] = []

    async with scheduler() as (_, s):

        async def one() -> None:
            try:
                await post(s, "/v1/whatif/simulate", {"pods": pods})
                outcomes.append("answered")
            except HamiError as error:
                outcomes.append(type(error).__name__)

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            group.start_soon(one)
    assert sorted(outcomes) == [TooManyRequests.__name__, "answered"]


async def test_callers_without_a_token_get_no_answer() -> None:
    async with scheduler() as (world, s):
        settings = Settings(signing_key_file="unused", auth="kubernetes")
        guarded = guard(s.scheduler.what_if.routes(), settings, world.kube, world.clock)
        assert {path for _, path in guarded} >= {"/v1/whatif/scale", "/v1/whatif/simulate"}
        for (method, path), handler in guarded.items():
            request = Request(method=method, path=path, query={}, headers={}, body=b"{}", params={})
            with pytest.raises(Unauthenticated):
                await handler(request)


async def test_drain_says_which_pods_start_elsewhere_and_why_others_do_not() -> None:
    async with scheduler() as (world, s):
        world.kube.put("/api/v1/nodes/n2", node("n2"))
        daemon = builders.pod("daemon", mem_mib=1000, cores=0)
        daemon["metadata"]["ownerReferences"] = [{"kind": "DaemonSet", "name": "d", "uid": "d"}]
        bound = [
            waiting("small", 6_000, priority=10),
            waiting("large", 14_000),
            waiting("picky", 1_000, nodeSelector={"kubernetes.io/hostname": "n1"}),
            daemon,
        ]
        for pod in bound:
            assert await s.bind(world.add_pod(pod), "n1") == ""
        await world.add_devices(builders.devices("n2", count=1))
        with anyio.fail_after(10):
            while len(s.state.table.nodes()) < 2:
                await anyio.lowlevel.checkpoint()
        before = s.state.ledger.snapshot_id
        answer = await post(s, "/v1/whatif/drain", {"node": "n1"})
        pods = {one["pod"]: one for one in answer["pods"]}
        assert list(pods) == ["small", "large", "picky"], "the highest priority first"
        assert pods["small"]["node"] == "n2"
        assert (answer["placed"], answer["refused"]) == (1, 2)
        texts = {name: [r["text"] for r in one.get("refusals", ())] for name, one in pods.items()}
        assert any("14000 MiB wanted" in text for text in texts["large"])
        assert "excluded by the drain" in texts["large"]
        assert "excluded by the pod's nodeSelector" in texts["picky"]
        assert pods["large"]["closest"][0]["fits"] == "10000"
        assert [(one["pod"], one["why"]) for one in answer["staying"]] == [
            ("daemon", "belongs to a DaemonSet, which a drain ignores")
        ]
        assert answer["snapshot_id"] == before == s.state.ledger.snapshot_id
        empty = await post(s, "/v1/whatif/drain", {"node": "n2"})
        assert (empty["pods"], empty["staying"]) == ([], [])


async def test_drain_frees_the_quota_of_the_moved_pods() -> None:
    async with scheduler() as (world, s):
        world.kube.put("/api/v1/nodes/n2", node("n2"))
        hard = {"limits.nvidia.com/gpumem": "6000"}
        path = "/api/v1/namespaces/default/resourcequotas/q"
        world.kube.put(
            path, {"metadata": {"name": "q", "namespace": "default"}, "spec": {"hard": hard}}
        )
        await world.add_devices(builders.devices("n2", count=1))
        assert await s.bind(world.add_pod(waiting("p", 6_000)), "n1") == ""
        with anyio.fail_after(10):
            while len(s.state.table.nodes()) < 2:
                await anyio.lowlevel.checkpoint()
        answer = await post(s, "/v1/whatif/drain", {"node": "n1"})
        assert [one.get("node") for one in answer["pods"]] == ["n2"]


async def test_drain_of_an_unknown_node_is_refused() -> None:
    async with scheduler() as (_, s):
        with pytest.raises(RequestInvalid, match="node: n9 has reported no device"):
            await post(s, "/v1/whatif/drain", {"node": "n9"})
