# SPDX-License-Identifier: Apache-2.0
"""Test facilities of the simulated API server: faults, lost history, restarts, identities."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from signal import SIGKILL
from subprocess import PIPE
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest

from hami_sim.apiserver import ApiServer, Fault, Match, RequestInfo, Settings, User
from hami_sim.kube import Access, Objects
from tests.contract.kubeapi.support import webhook_server
from tests.support.kubeclient import KubeClient, StatusError

pytestmark = pytest.mark.anyio
WAIT_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(WAIT_S):
        while not condition():
            await anyio.sleep(0.01)


def pod(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "i:1"}]},
    }


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer(Settings()) as server:
        yield server


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[KubeClient]:
    async with KubeClient(Access(url=server.url, token=server.token)) as client:
        yield client


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[ApiServer, KubeClient]]:
    async with ApiServer(settings) as server:
        access = Access(url=server.url, token=server.token)
        async with KubeClient(access) as client:
            yield server, client


# -- faults


async def test_denied_request_changes_nothing_and_the_next_one_passes(
    server: ApiServer, client: KubeClient
) -> None:
    match = Match(verb="create", resource="pods")
    server.faults.add(Fault(match=match, action="deny", code=503, retry_after_s=3))
    with pytest.raises(StatusError) as raised:
        await client.create("pods", pod("a"))
    assert raised.value.code == 503
    assert raised.value.headers["Retry-After"] == "3"
    assert server.store.get("pods", "default", "a") is None
    await client.create("pods", pod("a"))


async def test_cut_request_breaks_the_connection_before_it_is_served(
    server: ApiServer, client: KubeClient
) -> None:
    server.faults.add(Fault(match=Match(verb="create"), action="cut"))
    with pytest.raises(aiohttp.ClientError):
        await client.create("pods", pod("a"))
    assert server.store.get("pods", "default", "a") is None


async def test_lost_response_commits_the_write(server: ApiServer, client: KubeClient) -> None:
    await client.create("pods", pod("a"))
    match = Match(resource="pods", subresource="binding")
    server.faults.add(Fault(match=match, action="lose-response"))
    with pytest.raises(aiohttp.ClientError):
        await client.bind("a", "n")
    found = await client.get("pods", "a", "default")
    assert found["spec"]["nodeName"] == "n"
    (entry,) = server.requests(Match(subresource="binding"))
    assert entry.code == 201


async def test_delayed_request_arrives_late(server: ApiServer, client: KubeClient) -> None:
    server.faults.add(Fault(match=Match(name="a"), action="delay", delay_s=0.2))
    await client.create("pods", pod("a"))
    begun = anyio.current_time()
    await client.get("pods", "a", "default")
    assert anyio.current_time() - begun >= 0.2


async def test_fault_applies_only_to_matching_requests_and_a_given_number_of_times(
    server: ApiServer, client: KubeClient
) -> None:
    def is_b(request: RequestInfo) -> bool:
        return request.name == "b"

    server.faults.add(Fault(match=Match(verb="get"), where=is_b, action="deny", times=2))
    for name in ("a", "b"):
        await client.create("pods", pod(name))
    await client.get("pods", "a", "default")
    for _ in range(2):
        with pytest.raises(StatusError):
            await client.get("pods", "b", "default")
    await client.get("pods", "b", "default")
    assert [info.name for _, info in server.faults.met] == ["b", "b"]


async def test_faults_can_be_set_over_http(server: ApiServer, client: KubeClient) -> None:
    body = {"action": "deny", "match": {"resource": "nodes"}, "code": 429, "times": 0}
    await client.call("POST", "/hami-sim/faults", body=body)
    for _ in range(2):
        with pytest.raises(StatusError) as raised:
            await client.list("nodes")
        assert raised.value.code == 429
    await client.call("DELETE", "/hami-sim/faults")
    await client.list("nodes")
    listed = await client.call("GET", "/hami-sim/audit")
    assert [e["code"] for e in listed["items"] if e["resource"] == "nodes"] == [429, 429, 200]


async def test_malformed_fault_is_refused(server: ApiServer, client: KubeClient) -> None:
    with pytest.raises(StatusError) as raised:
        await client.call("POST", "/hami-sim/faults", body={"action": "explode"})
    assert raised.value.code == 400


# -- watches and history


async def test_follower_survives_dropped_watches_and_lost_history(
    server: ApiServer, client: KubeClient, tmp_path: Path
) -> None:
    seen: list[tuple[str, str]] = []

    def note(old: dict[str, Any] | None, new: dict[str, Any] | None) -> None:
        obj = new or old
        assert obj is not None
        seen.append(("gone" if new is None else "here", obj["metadata"]["name"]))

    synced = anyio.Event()
    access = Access.from_kubeconfig(server.kubeconfig(tmp_path / "kubeconfig"))
    async with Objects(access) as objects, anyio.create_task_group() as group:
        group.start_soon(partial(objects.follow, "pods", note, synced=synced.set))
        await synced.wait()
        await client.create("pods", pod("a"))
        await until(lambda: ("here", "a") in seen)
        assert server.drop_watches(Match(resource="pods"), cut=True) == 1
        await client.create("pods", pod("b"))
        await until(lambda: ("here", "b") in seen)
        server.faults.add(Fault(match=Match(verb="watch"), action="deny", code=500, times=1))
        server.drop_watches()
        await client.delete("pods", "a", "default")
        server.store.forget_history()
        await client.create("pods", pod("c"))
        await until(lambda: ("here", "c") in seen and ("gone", "a") in seen)
        group.cancel_scope.cancel()


async def test_watch_from_before_the_history_gets_an_expired_event(
    server: ApiServer, client: KubeClient
) -> None:
    made = await client.create("pods", pod("a"))
    await client.create("pods", pod("b"))
    server.store.forget_history()
    query = {"resourceVersion": made["metadata"]["resourceVersion"]}
    async with client.watch("pods", "default", query) as watch:
        async for kind, status in watch:
            assert kind == "ERROR"
            assert (status["code"], status["reason"]) == (410, "Expired")
            break


async def test_expired_pages_offer_a_token_to_continue_inconsistently(
    server: ApiServer, client: KubeClient
) -> None:
    for name in "abc":
        await client.create("pods", pod(name))
    first = await client.list("pods", "default", limit="1")
    await client.delete("pods", "b", "default")
    server.store.forget_history()
    with pytest.raises(StatusError) as raised:
        await client.list("pods", "default", **{"continue": first["metadata"]["continue"]})
    assert (raised.value.code, raised.value.reason) == (410, "Expired")
    token = raised.value.status["metadata"]["continue"]
    rest = await client.list("pods", "default", **{"continue": token})
    assert [item["metadata"]["name"] for item in rest["items"]] == ["c"]


async def test_bookmarks_move_the_revision_of_an_idle_watch() -> None:
    async with serving(Settings(bookmark_interval_s=0.05)) as (server, client):
        made = await client.create("pods", pod("a"))
        await client.create("nodes", {"metadata": {"name": "n"}})
        query = {
            "resourceVersion": made["metadata"]["resourceVersion"],
            "allowWatchBookmarks": "true",
        }
        async with client.watch("pods", "default", query) as watch:
            with anyio.fail_after(WAIT_S):
                kind, mark = await watch.__aiter__().__anext__()
        assert kind == "BOOKMARK"
        assert mark["kind"] == "Pod"
        assert int(mark["metadata"]["resourceVersion"]) == server.store.revision


async def test_bookmarks_never_overtake_events() -> None:
    async with serving(Settings(bookmark_interval_s=0.001)) as (server, client):
        query = {"resourceVersion": str(server.store.revision), "allowWatchBookmarks": "true"}
        async with (
            client.watch("pods", "default", query) as watch,
            anyio.create_task_group() as group,
        ):

            async def write() -> None:
                for number in range(100):
                    await client.create("pods", pod(f"p{number}"))

            group.start_soon(write)
            seen: list[tuple[str, int]] = []
            with anyio.fail_after(WAIT_S):
                async for kind, obj in watch:
                    seen.append((kind, int(obj["metadata"]["resourceVersion"])))
                    kinds = [kind for kind, _ in seen]
                    if kinds.count("ADDED") == 100 and "BOOKMARK" in kinds:
                        break
        revisions = [revision for _, revision in seen]
        assert revisions == sorted(revisions)


async def test_a_watch_is_in_the_audit_log_while_it_lasts(
    server: ApiServer, client: KubeClient
) -> None:
    async with client.watch("pods", "default"):
        (entry,) = server.requests(Match(verb="watch"))
        assert entry.code == 200
    await until(lambda: server.watch_count == 0)
    assert len(server.requests(Match(verb="watch"))) == 1


async def test_closed_watches_are_dropped(server: ApiServer, client: KubeClient) -> None:
    async with client.watch("pods", "default"):
        await until(lambda: server.watch_count == 1)
    await until(lambda: server.watch_count == 0)


# -- identities


async def test_users_audit_and_authorization() -> None:
    def only_reads(user: User, request: RequestInfo) -> bool | str:
        if user.name == "reader" and request.resource == "pods":
            return request.verb in ("get", "list", "watch") or "readers only read"
        return True

    tokens = {"reader-token": User(name="reader", groups=("team",))}
    settings = Settings(tokens=tokens, authorize=only_reads, open_http=False)
    async with ApiServer(settings) as server:
        access = Access(url=server.url, token="reader-token")
        async with KubeClient(access, user_agent="reader/1") as reader:
            await reader.list("pods")
            with pytest.raises(StatusError) as raised:
                await reader.create("pods", pod("a"))
            assert raised.value.code == 403
            text = 'User "reader" cannot create resource "pods" in API group "" in the namespace'
            assert text in raised.value.message
            assert "readers only read" in raised.value.message
            review = await reader.call(
                "POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body={}
            )
            assert review["status"]["userInfo"]["groups"] == ["team"]
        async with KubeClient(Access(url=server.url)) as stranger:
            with pytest.raises(StatusError) as raised:
                await stranger.list("pods")
            assert raised.value.code == 401
            assert (await stranger.raw("GET", "/readyz")).code == 200
        entries = [(e.user, e.verb, e.resource, e.code) for e in server.audit if e.resource]
        assert ("reader", "list", "pods", 200) in entries
        assert ("reader", "create", "pods", 403) in entries
        assert server.requests(Match(user="reader"))[0].user_agent == "reader/1"


async def test_service_account_tokens_carry_the_accounts_identity(
    server: ApiServer, client: KubeClient
) -> None:
    request = await client.act("serviceaccounts", "default", "token", {"spec": {}}, "default")
    token = request["status"]["token"]
    review = await client.call(
        "POST",
        "/apis/authentication.k8s.io/v1/tokenreviews",
        body={"spec": {"token": token}},
    )
    assert review["status"]["user"]["username"] == "system:serviceaccount:default:default"
    async with KubeClient(Access(url=server.url, token=token)) as pod_client:
        await pod_client.list("pods")
    assert server.audit[-1].user == "system:serviceaccount:default:default"


async def test_subject_access_review_calls_the_authorizer(client: KubeClient) -> None:
    review = await client.call(
        "POST",
        "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        body={"spec": {"user": "u", "resourceAttributes": {"verb": "get", "resource": "pods"}}},
    )
    assert review["status"]["allowed"] is True


# -- odds and ends of the surface


async def test_oversized_bodies_are_refused() -> None:
    async with serving(Settings(max_body_bytes=10_000)) as (_, client):
        big = pod("a")
        big["metadata"]["annotations"] = {"x": "y" * 20_000}
        with pytest.raises(StatusError) as raised:
            await client.create("pods", big)
        assert raised.value.code == 413


async def test_yaml_bodies_are_taken_and_protobuf_is_refused(client: KubeClient) -> None:
    path = "/api/v1/namespaces/default/configmaps"
    reply = await client.raw(
        "POST",
        path,
        data=b"metadata:\n  name: y\ndata:\n  a: b\n",
        headers={"Content-Type": "application/yaml"},
    )
    assert reply.code == 201
    proto = {"Content-Type": "application/vnd.kubernetes.protobuf"}
    body = b"k8s\x00\x0a\x09\x0a\x02v1\x12\x03Pod"
    assert (await client.raw("POST", path, data=body, headers=proto)).code == 415
    accept = {"Accept": "application/vnd.kubernetes.protobuf"}
    assert (await client.raw("GET", path, headers=accept)).code == 406


async def test_projected_token_volume_is_added_on_request() -> None:
    async with serving(Settings(service_account_volume=True)) as (_, client):
        made = await client.create("pods", pod("a"))
        (volume,) = made["spec"]["volumes"]
        assert volume["name"].startswith("kube-api-access-")
        (mount,) = made["spec"]["containers"][0]["volumeMounts"]
        assert mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"


async def test_webhooks_registered_by_service_are_found_through_the_settings() -> None:
    async with webhook_server(names=("hook.default.svc",)) as hook:
        port = hook.url.split(":")[2].split("/")[0]
        settings = Settings(services={("default", "hook"): f"127.0.0.1:{port}"})
        async with serving(settings) as (server, client):
            await client.create(
                "validatingwebhookconfigurations.admissionregistration.k8s.io",
                {
                    "metadata": {"name": "hook"},
                    "webhooks": [
                        {
                            "name": "hook.example.com",
                            "clientConfig": {
                                "service": {"namespace": "default", "name": "hook"},
                                "caBundle": hook.ca_bundle,
                            },
                            "rules": [
                                {
                                    "operations": ["CREATE"],
                                    "apiGroups": [""],
                                    "apiVersions": ["v1"],
                                    "resources": ["pods"],
                                }
                            ],
                            "sideEffects": "None",
                            "admissionReviewVersions": ["v1"],
                        }
                    ],
                },
            )
            await client.create("pods", pod("a"))
            assert len(hook.requests) == 1
            assert [call.outcome for call in server.webhooks.calls] == ["allowed"]


# -- the process


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[anyio.abc.Process, str]]:
    command = [sys.executable, "-m", "hami_sim.apiserver", *arguments]
    async with await anyio.open_process(command, stdout=PIPE, stderr=None) as running:
        assert running.stdout is not None
        with anyio.fail_after(WAIT_S):
            line = await running.stdout.receive()
        yield running, msgspec.json.decode(line)["url"]
        if running.returncode is None:
            running.terminate()
            await running.wait()


async def test_state_and_token_survive_a_kill_of_the_process(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    arguments = ("--kubeconfig", str(kubeconfig), "--data", str(tmp_path / "data"))
    async with process(*arguments) as (running, _):
        access = Access.from_kubeconfig(kubeconfig)
        async with KubeClient(access) as client:
            for name in ("a", "b", "c"):
                await client.create("pods", pod(name))
            await client.bind("a", "n1", annotations={"k": "v"})
            await client.delete("pods", "b", "default")
            last = await client.list("pods", "default")
        running.send_signal(SIGKILL)
        await running.wait()
    async with (
        process(*arguments) as (_, url),
        KubeClient(Access(url=url, token=access.token)) as client,
    ):
        found = await client.list("pods", "default")
        assert found["items"] == last["items"]
        version, before = (int(x["metadata"]["resourceVersion"]) for x in (found, last))
        assert version >= before
        async with client.watch("pods", "default", {"resourceVersion": "3"}) as watch:
            kind, status = await watch.__aiter__().__anext__()
            assert (kind, status["code"]) == ("ERROR", 410)


async def test_torn_last_line_of_the_journal_is_dropped(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with serving(Settings(data=data)) as (server, client):
        await client.create("pods", pod("a"))
    with data.open("ab") as file:
        file.write(b'{"revision":9999,"key":"po')
    async with ApiServer(Settings(data=data)) as server:
        assert server.store.get("pods", "default", "a") is not None
        assert server.store.revision < 9999


# -- controllers


async def test_replica_set_keeps_its_number_of_pods(server: ApiServer, client: KubeClient) -> None:
    del server

    template = {"metadata": {"labels": {"app": "web"}}, "spec": pod("x")["spec"]}
    replica_set = {
        "metadata": {"name": "web"},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "web"}}, "template": template},
    }
    made = await client.create("replicasets.apps", replica_set, "default")

    async def names() -> set[str]:
        return {one["metadata"]["name"] for one in (await client.list("pods", "default"))["items"]}

    async def until_count(count: int) -> set[str]:
        with anyio.fail_after(WAIT_S):
            while len(found := await names()) != count:
                await anyio.sleep(0.01)
        return found

    first = await until_count(2)
    owned = (await client.list("pods", "default"))["items"]
    assert {one["metadata"]["ownerReferences"][0]["uid"] for one in owned} == {
        made["metadata"]["uid"]
    }
    (gone, kept) = sorted(first)
    await client.delete("pods", gone, "default", gracePeriodSeconds="0")
    with anyio.fail_after(WAIT_S):
        while len(found := await names()) != 2 or gone in found:
            await anyio.sleep(0.01)
    assert kept in found
    await client.patch("replicasets.apps", "web", {"spec": {"replicas": 1}}, namespace="default")
    assert await until_count(1) == {kept}, "the newest pod is deleted"
