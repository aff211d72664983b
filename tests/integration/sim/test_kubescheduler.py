# SPDX-License-Identifier: Apache-2.0
"""The simulated kube-scheduler against the simulated API server and a scripted extender."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import web

from hami_sim.apiserver import ApiServer, Fault, Match, Settings
from hami_sim.kube import Access
from hami_sim.kubescheduler import (
    ExtenderSettings,
    ManagedResource,
    SchedulerSettings,
    SimScheduler,
)
from tests.support.kubeclient import KubeClient

pytestmark = pytest.mark.anyio
WAIT_S = 30.0
Obj = dict[str, Any]


class Script:
    """An extender whose answers a test sets; it binds through the API as the real one does."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self.calls: list[tuple[str, Obj]] = []
        self.filter: Callable[[Obj], Obj] = lambda args: {"NodeNames": args["NodeNames"]}
        self.scores: dict[str, int] = {}
        self.bind_error = ""
        self.bind_delay_s = 0.0
        self.binding_now = 0
        self.binding_peak = 0
        self.url = ""

    async def serve(self, request: web.Request) -> web.Response:
        verb = request.path.strip("/")
        body = await request.json()
        self.calls.append((verb, body))
        if verb == "filter":
            return web.json_response(self.filter(body))
        if verb == "prioritize":
            names = body["NodeNames"]
            return web.json_response(
                [{"Host": name, "Score": self.scores.get(name, 0)} for name in names]
            )
        self.binding_now += 1
        self.binding_peak = max(self.binding_peak, self.binding_now)
        await anyio.sleep(self.bind_delay_s)
        self.binding_now -= 1
        if self.bind_error:
            return web.json_response({"Error": self.bind_error})
        await self._client.bind(
            body["PodName"], body["Node"], namespace=body["PodNamespace"], uid=body["PodUID"]
        )
        return web.json_response({"Error": ""})

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.calls]


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer(Settings()) as server:
        yield server


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[KubeClient]:
    async with KubeClient(Access(url=server.url, token=server.token)) as client:
        yield client


@pytest.fixture
async def script(client: KubeClient) -> AsyncIterator[Script]:
    script = Script(client)
    app = web.Application()
    app.router.add_post("/{verb}", script.serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield script
    await runner.cleanup()


@asynccontextmanager
async def scheduling(server: ApiServer, script: Script, **more: Any) -> AsyncIterator[SimScheduler]:
    options = {"initial_backoff_s": 0.05, "max_backoff_s": 0.1, "timeout_s": 2.0, **more}
    settings = SchedulerSettings.for_extender(script.url, **options)
    access = Access(url=server.url, token=server.token)
    async with SimScheduler(access, settings) as scheduler:
        yield scheduler


async def node(client: KubeClient, name: str, **more: Any) -> None:
    capacity = {"cpu": "4", "memory": "8Gi", "pods": "110"}
    await client.create(
        "nodes",
        {"metadata": {"name": name}, "status": {"capacity": capacity}, **more},
    )


def pod(name: str, limits: dict[str, str] | None = None, **spec: Any) -> Obj:
    limits = {"nvidia.com/gpu": "1"} if limits is None else limits
    container = {"name": "c", "image": "i:1", "resources": {"limits": limits}}
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"schedulerName": "hami-scheduler", "containers": [container], **spec},
    }


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(WAIT_S):
        while not await condition():
            await anyio.sleep(0.01)


async def bound(client: KubeClient, name: str) -> str:
    async def has_node() -> bool:
        found = await client.get("pods", name, "default")
        return bool(found["spec"].get("nodeName"))

    await until(has_node)
    return str((await client.get("pods", name, "default"))["spec"]["nodeName"])


async def condition(client: KubeClient, name: str, reason: str) -> str:
    message = ""

    async def noted() -> bool:
        nonlocal message
        found = await client.get("pods", name, "default")
        for item in found["status"].get("conditions") or ():
            if item["type"] == "PodScheduled" and item.get("reason") == reason:
                message = item["message"]
        return bool(message)

    await until(noted)
    return message


async def test_extender_filters_scores_and_binds_with_the_protocols_bodies(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    for name in ("n1", "n2", "n3"):
        await node(client, name)
    script.filter = lambda _args: {
        "NodeNames": ["n1", "n3"],
        "FailedNodes": {"n2": "too small"},
        "Error": "",
    }
    script.scores = {"n3": 10}
    made = await client.create("pods", pod("a"))
    async with scheduling(server, script):
        assert await bound(client, "a") == "n3"
    assert script.verbs() == ["filter", "prioritize", "bind"]
    filtered, scored, bind = (body for _, body in script.calls)
    assert set(filtered) == {"Pod", "Nodes", "NodeNames"}
    assert sorted(filtered["NodeNames"]) == ["n1", "n2", "n3"]
    assert filtered["Nodes"] is None
    assert filtered["Pod"]["metadata"]["uid"] == made["metadata"]["uid"]
    assert sorted(scored["NodeNames"]) == ["n1", "n3"]
    assert bind == {
        "PodName": "a",
        "PodNamespace": "default",
        "PodUID": made["metadata"]["uid"],
        "Node": "n3",
    }
    listed = await client.list("events", "default", fieldSelector="reason=Scheduled")
    texts = [item["message"] for item in listed["items"]]
    assert texts in ([], ["Successfully assigned default/a to n3"])


async def test_one_feasible_node_is_not_scored(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    await client.create("pods", pod("a"))
    async with scheduling(server, script):
        await bound(client, "a")
    assert script.verbs() == ["filter", "bind"]


async def test_pods_without_managed_resources_never_meet_the_extender(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    await client.create("pods", pod("a", {"cpu": "1"}))
    await client.create("pods", pod("b", {"cpu": "1"}, schedulerName="default-scheduler"))
    async with scheduling(server, script):
        for name in ("a", "b"):
            assert await bound(client, name) == "n1"
    assert script.calls == []


async def test_pods_of_other_schedulers_are_left_alone(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    await client.create("pods", pod("other", schedulerName="somebody-else"))
    await client.create("pods", pod("mine"))
    async with scheduling(server, script):
        await bound(client, "mine")
    other = await client.get("pods", "other", "default")
    assert "nodeName" not in other["spec"]


async def test_refusals_are_counted_into_condition_and_event(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    for name in ("n1", "n2"):
        await node(client, name)
    await node(client, "n3", spec={"unschedulable": True})
    script.filter = lambda args: {
        "NodeNames": [],
        "FailedNodes": dict.fromkeys(args["NodeNames"], "memory: wants 9 MiB, best 3 MiB"),
    }
    await client.create("pods", pod("a"))
    async with scheduling(server, script):
        message = await condition(client, "a", "Unschedulable")

        async def reported() -> bool:
            selector = "reason=FailedScheduling,involvedObject.name=a"
            listed = await client.list("events", "default", fieldSelector=selector)
            return [item["message"] for item in listed["items"]] == [message]

        await until(reported)
    assert message == (
        "0/3 nodes are available: 1 node(s) were unschedulable, "
        "2 memory: wants 9 MiB, best 3 MiB. "
        "preemption: 0/3 nodes are available: "
        "1 Preemption is not helpful for scheduling, "
        "2 No preemption victims found for incoming pod."
    )


async def test_unschedulable_pod_is_tried_again_only_after_a_cluster_event(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    script.filter = lambda _args: {"NodeNames": [], "FailedNodes": {"n1": "full"}}
    await client.create("pods", pod("a"))
    async with scheduling(server, script) as scheduler:
        await condition(client, "a", "Unschedulable")

        async def settled() -> bool:
            return scheduler.queue.counts()["unschedulable"] == 1

        await until(settled)
        writes = len(server.requests(Match(verb="patch", resource="pods")))
        tries = script.verbs().count("filter")
        await client.patch("nodes", "n1", {"metadata": {"annotations": {"touched": "1"}}})

        async def tried_again() -> bool:
            return script.verbs().count("filter") > tries

        await until(tried_again)
        script.filter = lambda args: {"NodeNames": args["NodeNames"]}
        await client.patch("nodes", "n1", {"metadata": {"annotations": {"touched": "2"}}})
        assert await bound(client, "a") == "n1"
    # The same refusal is not written twice.
    assert len(server.requests(Match(verb="patch", resource="pods"))) == writes


async def test_node_heartbeats_requeue_no_pod(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    beat = {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}
    await client.patch("nodes", "n1", {"status": {"conditions": [beat]}}, subresource="status")
    script.filter = lambda _args: {"NodeNames": [], "FailedNodes": {"n1": "full"}}
    await client.create("pods", pod("a"))
    async with scheduling(server, script) as scheduler:
        await condition(client, "a", "Unschedulable")

        async def settled() -> bool:
            return scheduler.queue.counts()["unschedulable"] == 1

        await until(settled)
        tries = script.verbs().count("filter")
        beat = {**beat, "lastHeartbeatTime": "2026-01-01T00:00:10Z"}
        beaten = await client.patch(
            "nodes", "n1", {"status": {"conditions": [beat]}}, subresource="status"
        )

        async def seen() -> bool:
            return scheduler.node_version("n1") == str(beaten["metadata"]["resourceVersion"])

        await until(seen)
        assert scheduler.queue.counts()["unschedulable"] == 1
        assert script.verbs().count("filter") == tries


async def test_failing_extender_is_a_scheduler_error_and_is_retried(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    script.filter = lambda _args: {"Error": "ledger is not ready"}
    await client.create("pods", pod("a"))
    async with scheduling(server, script):
        assert await condition(client, "a", "SchedulerError") == "ledger is not ready"
        script.filter = lambda args: {"NodeNames": args["NodeNames"]}
        assert await bound(client, "a") == "n1"


async def test_refused_bind_frees_the_node_and_is_retried(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    script.bind_error = "lost the race"
    await client.create("pods", pod("a", {"nvidia.com/gpu": "1", "cpu": "3"}))
    async with scheduling(server, script):
        assert await condition(client, "a", "SchedulerError") == "lost the race"
        script.bind_error = ""
        assert await bound(client, "a") == "n1"


async def test_binds_run_side_by_side_while_filters_do_not(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    script.bind_delay_s = 0.1
    for number in range(8):
        await client.create("pods", pod(f"p{number}"))
    async with scheduling(server, script):
        for number in range(8):
            await bound(client, f"p{number}")
    assert script.binding_peak == 8


async def test_assumed_pods_count_before_they_are_bound(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    script.bind_delay_s = 0.2
    for name in ("a", "b"):
        await client.create("pods", pod(name, {"nvidia.com/gpu": "1", "cpu": "3"}))
    async with scheduling(server, script):
        message = await condition(client, "b", "Unschedulable")
        assert "1 Insufficient cpu" in message
        assert await bound(client, "a") == "n1"
        await client.delete("pods", "a", "default", gracePeriodSeconds="0")
        assert await bound(client, "b") == "n1"


async def test_gated_pods_wait_until_their_gates_are_removed(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    gated = pod("gated", schedulingGates=[{"name": "example.com/wait"}])
    await client.create("pods", gated)
    await client.create("pods", pod("free"))
    async with scheduling(server, script):
        await bound(client, "free")
        await client.patch(
            "pods", "gated", {"spec": {"schedulingGates": None}}, namespace="default"
        )
        assert await bound(client, "gated") == "n1"


async def test_scheduler_continues_after_its_watches_were_cut(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    async with scheduling(server, script):
        await client.create("pods", pod("a"))
        await bound(client, "a")
        server.drop_watches(cut=True)
        server.store.forget_history()
        await client.create("pods", pod("b"))
        assert await bound(client, "b") == "n1"


async def test_lost_answer_of_a_plain_binding_leaves_the_pod_bound_once(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    match = Match(resource="pods", subresource="binding")
    server.faults.add(Fault(match=match, action="lose-response"))
    await client.create("pods", pod("a", {"cpu": "3"}))
    async with scheduling(server, script):
        assert await bound(client, "a") == "n1"
        await client.create("pods", pod("b", {"cpu": "3"}))
        assert "1 Insufficient cpu" in await condition(client, "b", "Unschedulable")


async def test_whole_nodes_are_sent_to_an_extender_without_a_cache(
    server: ApiServer, client: KubeClient, script: Script
) -> None:
    await node(client, "n1")
    script.filter = lambda args: {"Nodes": args["Nodes"]}
    managed = (ManagedResource(name="nvidia.com/gpu", ignored_by_scheduler=True),)
    extender = ExtenderSettings(url=script.url, node_cache_capable=False, managed=managed)
    access = Access(url=server.url, token=server.token)
    await client.create("pods", pod("a"))
    async with SimScheduler(access, SchedulerSettings(extenders=(extender,))):
        await bound(client, "a")
    _, body = script.calls[0]
    assert body["NodeNames"] is None
    assert [item["metadata"]["name"] for item in body["Nodes"]["items"]] == ["n1"]


async def test_process_runs_a_scheduler_with_the_extender_and_one_without(
    server: ApiServer, client: KubeClient, script: Script, tmp_path: Path
) -> None:
    capacity = {"cpu": "4", "memory": "8Gi", "pods": "110", "nvidia.com/gpu": "2"}
    await node(client, "n1", status={"capacity": capacity})
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
    command = [
        *(sys.executable, "-m", "hami_sim.kubescheduler"),
        *("--kubeconfig", str(kubeconfig), "--extender-url", script.url),
    ]
    async with await anyio.open_process(command, stdout=PIPE, stderr=None) as running:
        assert running.stdout is not None
        with anyio.fail_after(WAIT_S):
            ready = msgspec.json.decode(await running.stdout.receive())
        assert ready["ready"] is True
        await client.create("pods", pod("a"))
        assert await bound(client, "a") == "n1"
        assert script.verbs() == ["filter", "bind"]
        await client.create("pods", pod("past", schedulerName="default-scheduler"))
        assert await bound(client, "past") == "n1"
        assert script.verbs() == ["filter", "bind"], "a cluster's own scheduler has no extender"
        running.terminate()
        assert await running.wait() == 0
