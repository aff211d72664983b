# SPDX-License-Identifier: Apache-2.0
"""Bindings of other schedulers: reserved and completed, denied with the reason, or left alone."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from hami_common.compat import volcano
from hami_common.errors import Conflict, Unavailable, WireInvalid
from hami_common.pods import annotations as keys
from hami_common.pods.limits import decode as decode_limits
from hami_common.runtime.httpd import Request, Response
from hami_common.vendors.catalog import VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_scheduler.settings import BindAdmissionSettings
from hami_scheduler.shell.bindadmission import PATH
from tests.support.bindings import binding, changed, review
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_quota import put_quota, quota
from tests.unit.scheduler.shell.world import LEASE_S, Running, World, pod_path, quiet

pytestmark = pytest.mark.anyio

NODE = builders.devices("n1")
OTHER = builders.devices("n2")
GET, APPEND = 0, 1
"""Numbers of the calls of an admission without faults."""
Obj = dict[str, Any]


async def world_with(*pods: Obj) -> World:
    world = World()
    await world.add_devices(NODE)
    await world.add_devices(OTHER)
    for pod in pods:
        world.add_pod(pod)
    return world


async def send(s: Running, body: bytes, **more: Any) -> Response:
    handler = s.scheduler.bind_admission.routes()["POST", PATH]
    request = Request(method="POST", path=PATH, query={}, headers={}, body=body, params={}, **more)
    response = await handler(request)
    assert isinstance(response, Response)
    return response


async def admit(s: Running, document: Obj, **request: Any) -> Obj:
    """The answer to a review."""
    answer = await send(s, json.dumps(review(document, **request)).encode())
    assert answer.status == 200
    response: Obj = json.loads(answer.body)["response"]
    assert response["uid"] == "review-1"
    return response


async def bind(world: World, s: Running, document: Obj) -> str:
    """Post as another scheduler; returns the error, empty when the pod is bound."""
    response = await admit(s, document)
    if not response["allowed"]:
        return str(response["status"]["message"])
    try:
        metadata = document["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        world.kube.bind(path, changed(document, response))
    except Conflict as error:
        return str(error)
    return ""


async def settle(world: World, *running: Running) -> None:
    """Let background tasks end, then let every lease expire."""
    for s in running:
        await s.scheduler.drain(limit_s=1)
    await world.advance(LEASE_S + 5, "n1", "n2")


def raising(error: Exception) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    return fail


# --- pods that request devices --------------------------------------------------------------------


async def test_binding_gets_allocation_limits_and_preconditions() -> None:
    world = await world_with(builders.pod("a", mem_mib=2000, cores=30))
    async with world.scheduler() as s:
        version = world.kube.pod("a")["metadata"]["resourceVersion"]
        document = binding("a", "n1")
        after = changed(document, await admit(s, document))["metadata"]
        assert (after["uid"], after["resourceVersion"]) == ("uid-a", version)
        assert set(after["annotations"]) == {keys.ALLOCATION, keys.limits("main")}
        signed = world.verifier.verify(
            after["annotations"][keys.ALLOCATION], pod_uid="uid-a", node="n1"
        )
        assert signed.allocation_id == world.live()[0].allocation_id
        limits = decode_limits(after["annotations"][keys.limits("main")])
        assert [(d.memory_mib, d.core_pct) for d in limits.devices] == [(2000, 30)]
        assert s.value("hami_scheduler_binds_total", outcome="admitted") == 1
        await s.scheduler.drain(limit_s=1)
    (decision,) = world.decisions()
    assert (decision.verdict, decision.node) == ("placed", "n1")
    assert decision.containers == world.live()[0].containers


async def test_pod_is_reported_bound_as_soon_as_the_watch_delivers_it() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        assert await bind(world, s, binding("a", "n1", uid="uid-a")) == ""
        await quiet()
        await s.scheduler.drain(limit_s=1)
        assert [state.state for state in world.states().values()] == ["bound"]
        calls = len(s.seen.calls)
        # A later version of the pod writes nothing again.
        world.kube.change(pod_path(world.kube.pod("a")), status={"phase": "Pending", "x": 1})
        await quiet()
        await s.scheduler.drain(limit_s=1)
        assert s.seen.calls[calls:] == []
    world.check_settled(NODE, OTHER)


async def test_pods_that_other_schedulers_bind_never_exceed_a_device() -> None:
    world = await world_with(*(builders.pod(f"p{i}", mem_mib=3000) for i in range(20)))
    async with world.scheduler() as s, world.scheduler("s2") as t:
        errors: list[str] = []

        async def one(number: int) -> None:
            name, node = f"p{number}", ("n1", "n2")[number % 2]
            if number % 3:
                errors.append(await bind(world, (s, t)[number % 2], binding(name, node)))
            else:
                errors.append(await s.bind(world.kube.pod(name), node))

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(one, number)
        world.check(NODE, OTHER)
        assert "" in errors
        refused = [error for error in errors if error]
        assert refused
        assert all("CardInsufficientMemory" in error or "try again" in error for error in refused)
        await settle(world, s, t)
    world.check_settled(NODE, OTHER)


async def test_repeated_review_finds_the_reservation_of_the_first() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        document = binding("a", "n1", uid="uid-a")
        first = changed(document, await admit(s, document))
        # Invoked again for the same request, after another webhook changed the Binding.
        second = changed(first, await admit(s, first))
        (record,) = world.live()
        for after in (first, second):
            signed = world.verifier.verify(
                after["metadata"]["annotations"][keys.ALLOCATION], pod_uid="uid-a", node="n1"
            )
            assert signed.allocation_id == record.allocation_id
        world.kube.bind(pod_path(world.kube.pod("a")), second)
        await settle(world, s)
    world.check_settled(NODE, OTHER)


async def test_forged_and_copied_reserved_annotations_are_replaced() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        copied = {
            keys.ALLOCATION: "forged",
            keys.FENCE: "x/1",
            keys.limits("side"): "{}",
            "hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,1,1:;",
            "team": "a",
        }
        document = binding("a", "n1", uid="uid-a", annotations=copied)
        after = changed(document, await admit(s, document))["metadata"]["annotations"]
        assert set(after) == {keys.ALLOCATION, keys.limits("main"), "team"}
        world.verifier.verify(after[keys.ALLOCATION], pod_uid="uid-a", node="n1")


async def test_refusal_reaches_the_binder_and_reserves_nothing() -> None:
    world = await world_with(builders.pod("a", mem_mib=10**6))
    async with world.scheduler() as s:
        response = await admit(s, binding("a", "n1"))
        assert response["allowed"] is False
        assert response["status"]["code"] == 403
        assert response["status"]["message"].startswith("node n1: CardInsufficientMemory")
        await s.scheduler.drain(limit_s=1)
    assert world.live() == []
    assert [one.verdict for one in world.decisions()] == ["refused"]


async def test_quota_refuses_a_binding_of_another_scheduler() -> None:
    world = await world_with(builders.pod("a", namespace="team-a", mem_mib=8192))
    put_quota(world, quota(6000))
    async with world.scheduler() as s:
        response = await admit(s, binding("a", "n1", namespace="team-a"))
        assert response["status"]["code"] == 403
        assert 'quota "gpu" limits.nvidia.com/gpumem' in response["status"]["message"]
    assert world.live() == []


async def test_pod_that_bypassed_admission_is_refused_with_the_fix() -> None:
    pod = builders.pod("a")
    del pod["metadata"]["labels"][keys.MANAGED_LABEL]
    world = await world_with(pod)
    async with world.scheduler() as s:
        response = await admit(s, binding("a", "n1"))
        assert response["status"]["code"] == 403
        assert "PodNotAdmitted" in response["status"]["message"]


# --- dry run --------------------------------------------------------------------------------------


async def test_dry_run_reserves_and_records_nothing() -> None:
    world = await world_with(builders.pod("a"), builders.pod("b", mem_mib=10**6))
    async with world.scheduler() as s:
        document = binding("a", "n1")
        response = await admit(s, document, dryRun=True)
        assert response["allowed"] is True
        assert "annotations" not in changed(document, response)["metadata"]
        refused = await admit(s, binding("b", "n1"), dryRun=True)
        assert refused["status"]["message"].startswith("node n1: CardInsufficientMemory")
        await s.scheduler.drain(limit_s=1)
        assert s.value("hami_scheduler_binds_total", outcome="dry-run") == 1
        assert [call for call in s.seen.calls if call != "get pod"] == []
    assert world.records() == {}
    assert world.decisions() == []


async def test_dry_run_leaves_the_quota_as_it_is() -> None:
    pods = [builders.pod(name, namespace="team-a", mem_mib=6000) for name in ("a", "b")]
    world = await world_with(*pods)
    put_quota(world, quota(6000))
    async with world.scheduler() as s:
        a, b = (binding(name, "n1", namespace="team-a") for name in ("a", "b"))
        assert (await admit(s, a, dryRun=True))["allowed"] is True
        assert await bind(world, s, b) == ""
        assert "limits.nvidia.com/gpumem" in await bind(world, s, a)


# --- Bindings that are left to the API server ----------------------------------------------------


async def test_pod_without_devices_is_bound_by_uid_alone() -> None:
    pod = builders.pod("a")
    pod["spec"]["containers"][0]["resources"] = {}
    del pod["metadata"]["labels"]
    world = await world_with(pod)
    async with world.scheduler() as s:
        document = binding("a", "n1", annotations={keys.ALLOCATION: "forged", "team": "a"})
        after = changed(document, await admit(s, document))["metadata"]
        assert after["uid"] == "uid-a"
        assert "resourceVersion" not in after
        assert after["annotations"] == {"team": "a"}
        await s.scheduler.drain(limit_s=1)
    assert world.records() == {}
    assert world.decisions() == []


async def test_binding_with_an_outdated_version_reserves_nothing() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        error = await bind(world, s, binding("a", "n1", uid="uid-a", resourceVersion="1"))
        assert "Precondition failed: ResourceVersion" in error
    assert world.records() == {}


@pytest.mark.parametrize("uid", ["", "uid-a"])
async def test_binding_of_a_bound_pod_reserves_nothing_and_loses_its_allocation(uid: str) -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        assert await bind(world, s, binding("a", "n1")) == ""
        await s.scheduler.drain(limit_s=1)
        appended = len(world.records())
        more = {"uid": uid} if uid else {}
        document = binding("a", "n2", annotations={keys.ALLOCATION: "forged"}, **more)
        response = await admit(s, document)
        assert response["allowed"] is True
        assert changed(document, response)["metadata"]["annotations"] == {}
        assert "is already assigned" in await bind(world, s, document)
        assert len(world.records()) == appended


async def test_binding_of_a_pod_that_does_not_exist_is_denied() -> None:
    """Allowed, it could bind a pod of that name which is created a moment later."""
    world = await world_with()
    async with world.scheduler() as s:
        response = await admit(s, binding("a", "n1"))
        assert response["status"]["code"] == 404
        assert response["status"]["message"] == 'pods "a" not found'


async def test_binding_of_an_earlier_pod_of_the_name_reserves_nothing() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        assert "UID" in await bind(world, s, binding("a", "n1", uid="uid-before"))
    assert world.records() == {}


@pytest.mark.parametrize(
    "request_fields",
    [
        {"operation": "UPDATE"},
        {"subResource": "eviction"},
        {"resource": {"group": "", "version": "v1", "resource": "nodes"}},
    ],
)
async def test_other_reviews_are_allowed_unread(request_fields: Obj) -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        response = await admit(s, binding("a", "n1"), **request_fields)
        assert response == {"uid": "review-1", "allowed": True}
        assert s.seen.calls == []


async def test_collection_of_bindings_is_reviewed_by_the_name_in_the_object() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        resource = {"group": "", "version": "v1", "resource": "bindings"}
        response = await admit(s, binding("a", "n1"), resource=resource, subResource="", name="")
        assert response["allowed"] is True
    assert len(world.live()) == 1


async def test_binding_to_no_node_is_left_to_the_api_server() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        document = binding("a", "")
        assert (await admit(s, document))["allowed"] is True
        document = binding("a", "n1")
        document["target"]["kind"] = "Pod"
        assert (await admit(s, document))["allowed"] is True
    assert world.records() == {}


async def test_unreadable_review_is_an_error_of_the_caller() -> None:
    world = await world_with()
    async with world.scheduler() as s:
        with pytest.raises(WireInvalid):
            await send(s, b"{}")
        document = binding("a", "n1")
        document["metadata"]["annotations"] = ["x"]
        with pytest.raises(WireInvalid, match=r"request\.object"):
            await send(s, json.dumps(review(document)).encode())


# --- faults ---------------------------------------------------------------------------------------


async def test_binding_that_is_not_stored_returns_its_share_with_the_lease() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        response = await admit(s, binding("a", "n1"))
        assert len(world.live()) == 1
        await settle(world, s)
        assert world.live() == []
        # The API server stores the Binding late: the pod has moved on since.
        late = changed(binding("a", "n1"), response)
        with pytest.raises(Conflict, match="ResourceVersion"):
            world.kube.bind(pod_path(world.kube.pod("a")), late)
        assert await bind(world, s, binding("a", "n2")) == ""
        await settle(world, s)
    world.check_settled(NODE, OTHER)


async def test_pod_that_changed_after_the_answer_is_admitted_again_with_the_same_share() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        document = binding("a", "n1", uid="uid-a")
        response = await admit(s, document)
        path = pod_path(world.kube.pod("a"))
        world.kube.change(path, metadata={"labels": {"team": "a"}})
        with pytest.raises(Conflict):
            world.kube.bind(path, changed(document, response))
        assert await bind(world, s, document) == ""
        assert len(world.records()) == 1
        await settle(world, s)
    world.check_settled(NODE, OTHER)


async def test_scheduler_that_dies_after_the_reservation_is_replaced_by_another() -> None:
    world = await world_with(builders.pod("a"))
    document = binding("a", "n1", uid="uid-a")
    async with world.scheduler("s2") as other:
        async with world.scheduler() as s, anyio.create_task_group() as group:
            reached = anyio.Event()

            async def stall() -> None:
                reached.set()
                await anyio.sleep_forever()

            s.seen.after[APPEND] = stall
            group.start_soon(admit, s, document)
            await reached.wait()
            group.cancel_scope.cancel()
        assert len(world.live()) == 1
        await quiet()
        assert await bind(world, other, document) == ""
        assert len(world.records()) == 1
        await settle(world, other)
    world.check_settled(NODE, OTHER)


async def test_answer_comes_before_the_api_server_stops_waiting() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler(bind_admission=BindAdmissionSettings(wait_s=0.05)) as s:
        s.seen.before[GET] = anyio.sleep_forever
        response = await admit(s, binding("a", "n1", uid="uid-a"))
        assert response["status"]["code"] == 503
        assert "no answer in" in response["status"]["message"]
        cause = s.value("hami_scheduler_verb_errors_total", verb="admit", cause="unavailable")
        assert cause == 1
        assert await bind(world, s, binding("a", "n1")) == ""


async def test_api_server_that_cannot_be_read_is_a_temporary_denial() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.before[0] = raising(Unavailable(peer="API server", detail="gone"))
        response = await admit(s, binding("a", "n1"))
        assert (response["allowed"], response["status"]["code"]) == (False, 503)


async def test_binding_is_denied_until_the_ledger_is_complete() -> None:
    world = await world_with(builders.pod("a"))
    async with world.scheduler() as s:
        s.state.lost("pods")
        response = await admit(s, binding("a", "n1", uid="uid-a"))
        assert response["status"]["code"] == 503
        assert "not in sync" in response["status"]["message"]


async def test_caller_with_another_certificate_is_refused() -> None:
    world = await world_with(builders.pod("a"))
    names = BindAdmissionSettings(client_names=("kube-apiserver",))
    async with world.scheduler(bind_admission=names) as s:
        body = json.dumps(review(binding("a", "n1"))).encode()
        stranger = {"subject": ((("commonName", "someone"),),)}
        answer = await send(s, body, peer_certificate=stranger)
        assert answer.status == 403
        api_server = {"subject": ((("commonName", "kube-apiserver"),),)}
        assert (await send(s, body, peer_certificate=api_server)).status == 200


async def test_volcanos_own_choice_is_replaced_by_the_ledgers() -> None:
    world = await world_with(builders.pod("p", mem_mib=3000))
    vendors = VendorSettings(nvidia=NvidiaSettings(dialects=("volcano",)))
    async with world.scheduler(vendors=vendors) as s:
        copied = {volcano.POD_IDS: "GPU-9,NVIDIA,3000,10:", volcano.TO_ALLOCATE: "GPU-9,…"}
        document = binding("p", "n1", uid="uid-p", annotations=copied)
        assert await bind(world, s, document) == ""
        notes = world.kube.pod("p")["metadata"]["annotations"]
        assert notes[volcano.POD_IDS] == "GPU-n1-0,NVIDIA,3000,10:"
        assert notes[volcano.TO_ALLOCATE] == ""
