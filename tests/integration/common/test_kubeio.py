# SPDX-License-Identifier: Apache-2.0
"""Kubernetes client, list-and-watch and event recorder against the simulated API server."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import web

from hami_common.errors import Conflict, Denied, NotFound, SettingsInvalid, Unavailable
from hami_common.ports import WatchEvent
from hami_common.runtime import kubeio
from hami_common.runtime.kubeio import reflector
from hami_common.runtime.kubeio.login import log_in
from hami_sim.apiserver import ApiServer, Fault, Match, RequestInfo, Settings, User
from hami_sim.certs import CertificateAuthority
from tests.support.manualclock import ManualClock

pytestmark = pytest.mark.anyio

PODS = "/api/v1/namespaces/default/pods"
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
Fixture = tuple[ApiServer, kubeio.KubeClient]


@pytest.fixture
async def kube(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Fixture]:
    async with (
        ApiServer(Settings(controllers=False, history_window=200)) as server,
        kubeio.connect(str(server.kubeconfig(tmp_path / "kubeconfig"))) as client,
    ):
        await client.create(
            "/api/v1/namespaces/default/serviceaccounts", b'{"metadata":{"name":"default"}}'
        )
        yield server, client


def pod(name: str, **metadata: object) -> bytes:
    return msgspec.json.encode(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **metadata},
            "spec": {"containers": [{"name": "main", "image": "busybox"}]},
        }
    )


def decoded(data: bytes) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(data)
    return document


async def take(events: AsyncIterator[WatchEvent], count: int) -> list[WatchEvent]:
    taken: list[WatchEvent] = []
    with anyio.fail_after(30):
        while len(taken) < count:
            taken.append(await anext(events))
    return taken


def told(events: list[WatchEvent]) -> list[tuple[str, str]]:
    return [(e.type, decoded(e.raw)["metadata"]["name"] if e.raw else "") for e in events]


async def test_objects_are_created_read_patched_replaced_and_deleted(kube: Fixture) -> None:
    _, client = kube
    created = decoded(await client.create(PODS, pod("web", labels={"a": "1"})))
    assert created["metadata"]["uid"]
    patched = decoded(await client.patch(f"{PODS}/web", b'{"metadata":{"annotations":{"k":"v"}}}'))
    assert patched["metadata"]["annotations"] == {"k": "v"}
    patched["metadata"]["labels"] = {"a": "2"}
    await client.replace(f"{PODS}/web", msgspec.json.encode(patched))
    assert decoded(await client.get(f"{PODS}/web"))["metadata"]["labels"] == {"a": "2"}
    await client.delete(f"{PODS}/web", body=b'{"gracePeriodSeconds":0}')
    with pytest.raises(NotFound, match="pods/web"):
        await client.get(f"{PODS}/web")


async def test_an_existing_name_and_an_old_resource_version_are_conflicts(kube: Fixture) -> None:
    _, client = kube
    first = decoded(await client.create(PODS, pod("web")))
    with pytest.raises(Conflict, match="AlreadyExists"):
        await client.create(PODS, pod("web"))
    await client.patch(f"{PODS}/web", b'{"metadata":{"labels":{"x":"y"}}}')
    with pytest.raises(Conflict):
        await client.replace(f"{PODS}/web", msgspec.json.encode(first))


async def test_an_invalid_object_is_denied_with_the_servers_reason(kube: Fixture) -> None:
    _, client = kube
    with pytest.raises(Denied) as caught:
        await client.create(PODS, pod("Not_A_Name"))
    assert caught.value.status == 422
    assert "Invalid" in caught.value.detail


async def test_a_forbidden_request_is_denied(tmp_path: Path) -> None:
    def authorize(user: User, request: RequestInfo) -> bool | str:
        return request.resource != "secrets" or "no secrets for you"

    settings = Settings(authorize=authorize)
    async with (
        ApiServer(settings) as server,
        kubeio.connect(str(server.kubeconfig(tmp_path / "k"))) as client,
    ):
        with pytest.raises(Denied, match="no secrets for you") as caught:
            await client.get("/api/v1/namespaces/default/secrets/x")
        assert caught.value.status == 403


async def test_server_errors_and_broken_connections_are_unavailable(kube: Fixture) -> None:
    server, client = kube
    await client.create(PODS, pod("web"))
    server.faults.add(Fault(match=Match(resource="pods", verb="get"), action="deny", code=500))
    with pytest.raises(Unavailable, match="status 500"):
        await client.get(f"{PODS}/web")
    server.faults.add(Fault(match=Match(verb="patch"), action="lose-response"))
    with pytest.raises(Unavailable):
        await client.patch(f"{PODS}/web", b'{"metadata":{"labels":{"x":"y"}}}')
    labels = decoded(await client.get(f"{PODS}/web"))["metadata"]["labels"]
    assert labels == {"x": "y"}, "an unknown outcome may well have happened"


async def test_a_slow_answer_is_unavailable_after_the_request_timeout(tmp_path: Path) -> None:
    async with (
        ApiServer(Settings()) as server,
        kubeio.connect(str(server.kubeconfig(tmp_path / "k")), request_timeout_s=0.2) as client,
    ):
        server.faults.add(Fault(match=Match(resource="pods"), action="delay", delay_s=30))
        with anyio.fail_after(20), pytest.raises(Unavailable):
            await client.get(f"{PODS}/web")


async def test_too_many_requests_is_retried_after_the_servers_delay(
    kube: Fixture,
) -> None:
    server, client = kube
    await client.create(PODS, pod("web"))
    server.faults.add(
        Fault(match=Match(verb="get"), action="deny", code=429, retry_after_s=0, times=2)
    )
    await client.get(f"{PODS}/web")
    server.faults.add(
        Fault(match=Match(verb="get"), action="deny", code=429, retry_after_s=0, times=0)
    )
    with pytest.raises(Unavailable, match="429"):
        await client.get(f"{PODS}/web")


async def test_a_rotated_token_is_read_again_and_the_request_repeated(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    async with ApiServer(Settings()) as server:
        server.kubeconfig(path, token="expired")
        async with kubeio.connect(str(path), start_timeout_s=20) as client:
            with pytest.raises(Denied) as caught:
                await client.get("/api/v1/namespaces/default")
            assert caught.value.status == 401
            server.kubeconfig(path)
            assert decoded(await client.get("/api/v1/namespaces/default"))["kind"] == "Namespace"


async def test_another_users_token_is_presented_without_our_credentials(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    authority = CertificateAuthority()
    cert, key, _ = authority.issue_files(tmp_path / "client", [], common_name="registry")
    async with ApiServer(Settings(tls=True)) as server:
        config = decoded(server.kubeconfig(path).read_bytes())
        user = config["users"][0]["user"]
        user.update({"client-certificate": str(cert), "client-key": str(key)})
        path.write_bytes(msgspec.json.encode(config))
        ours = await log_in(str(path), "", tmp_path)
        assert ours.cert_file == str(cert)
        theirs = ours.with_token("theirs")
        assert (theirs.cert_file, theirs.key_file) == (None, None)
        assert (theirs.host, theirs.ca_file) == (ours.host, ours.ca_file)
        async with kubeio.connect_as("forged", str(path)) as client:
            with pytest.raises(Denied) as caught:
                await client.get("/api/v1/namespaces/default")
            assert caught.value.status == 401
        async with kubeio.connect_as(server.token, str(path)) as client:
            assert decoded(await client.get("/api/v1/namespaces/default"))["kind"] == "Namespace"


async def test_tls_servers_are_verified_with_the_kubeconfigs_authority(tmp_path: Path) -> None:
    async with (
        ApiServer(Settings(tls=True)) as server,
        kubeio.connect(str(server.kubeconfig(tmp_path / "good"))) as client,
    ):
        await client.get("/api/v1/namespaces/default")
        config = decoded((tmp_path / "good").read_bytes())
        del config["clusters"][0]["cluster"]["certificate-authority-data"]
        (tmp_path / "bad").write_bytes(msgspec.json.encode(config))
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            async with kubeio.connect(str(tmp_path / "bad"), start_timeout_s=2):
                pytest.fail("an unknown authority signed the certificate")


async def test_paths_in_a_kubeconfig_are_relative_to_it(tmp_path: Path) -> None:
    async with ApiServer(Settings(tls=True)) as server:
        config = decoded(server.kubeconfig(tmp_path / "inline").read_bytes())
        (tmp_path / "ca.pem").write_bytes(server.ca_pem)
        (tmp_path / "token").write_text(server.token)
        cluster = config["clusters"][0]["cluster"]
        del cluster["certificate-authority-data"]
        cluster["certificate-authority"] = "ca.pem"
        config["users"][0]["user"] = {"tokenFile": "token"}
        (tmp_path / "with-files").write_bytes(msgspec.json.encode(config))
        async with kubeio.connect(str(tmp_path / "with-files")) as client:
            await client.get("/api/v1/namespaces/default")


@pytest.mark.parametrize("text", ["", "just text", "{", "clusters: [{}]", "clusters: 3"])
async def test_an_invalid_kubeconfig_is_a_settings_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    with pytest.raises(SettingsInvalid, match="kubeconfig"):
        async with kubeio.connect(str(tmp_path / "kubeconfig")):
            pytest.fail("this is no kubeconfig")


async def test_no_login_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="kubeconfig"):
        async with kubeio.connect(str(tmp_path / "missing")):
            pytest.fail("there is no such file")


async def test_no_server_in_time_is_unavailable(tmp_path: Path) -> None:
    async with ApiServer(Settings()) as server:
        path = server.kubeconfig(tmp_path / "k")
    with pytest.raises(Unavailable, match=r"waited 0\.3 s"):
        async with kubeio.connect(str(path), start_timeout_s=0.3):
            pytest.fail("the server is gone")


async def test_lists_are_read_in_pages_until_the_last(kube: Fixture) -> None:
    _, client = kube
    for number in range(7):
        await client.create(CONFIG_MAPS, config_map(f"c-{number}", group=str(number % 2)))
    pages = await client.list_pages(CONFIG_MAPS, page_size=3)
    assert [len(decoded(page)["items"]) for page in pages] == [3, 3, 1]
    even = await client.list_pages(CONFIG_MAPS, label_selector="group=0")
    names = [item["metadata"]["name"] for page in even for item in decoded(page)["items"]]
    assert names == ["c-0", "c-2", "c-4", "c-6"]


async def test_metadata_is_read_in_pages_without_the_rest_of_the_objects(kube: Fixture) -> None:
    _, client = kube
    for number in range(5):
        await client.create(CONFIG_MAPS, config_map(f"c-{number}", group=str(number % 2)))
    pages = client.metadata_pages(CONFIG_MAPS, label_selector="group!=1", page_size=2)
    items = [decoded(page)["items"] async for page in pages]
    assert [len(page) for page in items] == [2, 1]
    found = [item for page in items for item in page]
    assert [item["metadata"]["name"] for item in found] == ["c-0", "c-2", "c-4"]
    assert all("data" not in item for item in found)


async def test_a_list_of_metadata_that_expires_half_way_is_unavailable(tmp_path: Path) -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/version":
            return web.Response(body=b"{}")
        if request.query.get("continue"):
            return web.Response(status=410, body=b'{"reason":"Expired"}')
        return web.Response(body=b'{"metadata":{"continue":"more"}}')

    async with raw_server(handle, tmp_path / "k") as client:
        with pytest.raises(Unavailable, match="expired half way"):
            [page async for page in client.metadata_pages("/api/v1/things")]


def config_map(name: str, *, group: str = "") -> bytes:
    return msgspec.json.encode(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "labels": {"group": group}},
            "data": {"k": "v"},
        }
    )


async def test_list_watch_delivers_existing_objects_then_synced_then_changes(kube: Fixture) -> None:
    _, client = kube
    for name in ("a", "b"):
        await client.create(PODS, pod(name))
    async with client.list_watch(PODS) as events:
        first = await take(events, 3)
        assert sorted(told(first)[:2]) == [("ADDED", "a"), ("ADDED", "b")]
        assert first[2].type == "SYNCED"
        assert int(first[2].resource_version) > 0
        await client.create(PODS, pod("c"))
        await client.patch(f"{PODS}/a", b'{"metadata":{"labels":{"x":"y"}}}')
        await client.delete(f"{PODS}/b", body=b'{"gracePeriodSeconds":0}')
        later = await take(events, 3)
        assert told(later) == [("ADDED", "c"), ("MODIFIED", "a"), ("DELETED", "b")]
        assert decoded(later[2].raw)["spec"]["containers"][0]["name"] == "main"


async def test_list_watch_follows_selectors(kube: Fixture) -> None:
    _, client = kube
    async with client.list_watch(PODS, label_selector="managed=true") as events:
        assert (await take(events, 1))[0].type == "SYNCED"
        await client.create(PODS, pod("other"))
        await client.create(PODS, pod("ours", labels={"managed": "true"}))
        await client.patch(f"{PODS}/ours", b'{"metadata":{"labels":{"managed":null}}}')
        assert told(await take(events, 2)) == [("ADDED", "ours"), ("DELETED", "ours")]


async def test_a_broken_watch_resumes_where_it_was(kube: Fixture) -> None:
    server, client = kube
    async with client.list_watch(PODS) as events:
        await take(events, 1)
        await client.create(PODS, pod("a"))
        assert told(await take(events, 1)) == [("ADDED", "a")]
        for cut in (True, False):
            server.drop_watches(cut=cut)
            await client.create(PODS, pod(f"b-{cut}".lower()))
            assert told(await take(events, 1)) == [("ADDED", f"b-{cut}".lower())]
    assert len(server.requests(Match(resource="pods", verb="list"))) == 1, (
        "nothing was listed again"
    )


async def test_only_the_difference_is_delivered_after_a_410(kube: Fixture) -> None:
    server, client = kube
    for name in ("stays", "changes", "goes", "again"):
        await client.create(PODS, pod(name))
    async with client.list_watch(PODS) as events:
        await take(events, 5)
        # The watch cannot come back while the collection changes and history is dropped.
        server.faults.add(Fault(match=Match(resource="pods", verb="watch"), action="deny"))
        server.drop_watches(cut=True)
        await client.patch(f"{PODS}/changes", b'{"metadata":{"labels":{"x":"y"}}}')
        await client.delete(f"{PODS}/goes", body=b'{"gracePeriodSeconds":0}')
        await client.delete(f"{PODS}/again", body=b'{"gracePeriodSeconds":0}')
        reborn = decoded(await client.create(PODS, pod("again")))
        await client.create(PODS, pod("comes"))
        server.store.forget_history()
        events_after = await take(events, 6)
        by_kind = sorted(told(events_after[:-1]))
        assert by_kind == [
            ("ADDED", "again"),
            ("ADDED", "comes"),
            ("DELETED", "again"),
            ("DELETED", "goes"),
            ("MODIFIED", "changes"),
        ]
        assert events_after[-1].type == "SYNCED"
        names = told(events_after)
        assert names.index(("DELETED", "again")) < names.index(("ADDED", "again"))
        gone = decoded(events_after[names.index(("DELETED", "again"))].raw)
        assert gone["metadata"]["uid"] != reborn["metadata"]["uid"]
        assert gone.keys() == {"metadata"}
        await client.create(PODS, pod("after"))
        assert told(await take(events, 1)) == [("ADDED", "after")]


async def test_a_failing_first_list_is_tried_until_it_succeeds(
    kube: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = kube
    await client.create(PODS, pod("a"))
    server.faults.add(Fault(match=Match(verb="list"), action="deny", code=403, times=2))
    async with client.list_watch(PODS) as events:
        assert told(await take(events, 2)) == [("ADDED", "a"), ("SYNCED", "")]
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert [r.message for r in warnings] == ["list or watch interrupted"] * 2


async def test_many_changes_are_delivered_in_order_without_loss(kube: Fixture) -> None:
    server, client = kube
    async with client.list_watch(CONFIG_MAPS) as events, anyio.create_task_group() as group:
        await take(events, 1)

        async def write(writer: int) -> None:
            for number in range(40):
                await client.create(CONFIG_MAPS, config_map(f"c-{writer}-{number}"))
                if number % 13 == 0:
                    server.drop_watches(cut=True)

        for writer in range(4):
            group.start_soon(write, writer)
        seen = await take(events, 160)
    versions = [int(event.resource_version) for event in seen]
    assert versions == sorted(set(versions))
    assert {event.type for event in seen} == {"ADDED"}


@asynccontextmanager
async def raw_server(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], kubeconfig: Path
) -> AsyncIterator[kubeio.KubeClient]:
    """A client of a server that sends malformed responses."""
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        kubeconfig.write_bytes(
            msgspec.json.encode(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": url}}],
                    "users": [{"name": "u", "user": {}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        async with kubeio.connect(str(kubeconfig)) as client:
            yield client
    finally:
        await runner.cleanup()


LIST = b'{"metadata":{"resourceVersion":"7"},"items":[]}'


async def test_watch_lines_split_anywhere_and_bookmarks_move_the_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = (
        '{"type":"MODIFIED","object":{"metadata":{"name":"b","uid":"2","resourceVersion":"91"},'
        '"data":"' + "x" * 3_000_000 + '"}}'
    )
    lines = [
        '{"type":"ADDED","object":{"metadata":{"name":"ü","uid":"1","resourceVersion":"8"}}}',
        '{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"90"}}}',
        large,
    ]
    asked: list[str] = []
    body = ("\n".join(lines) + "\n").encode()
    cuts = [5, 90, 91, 200, 100_000]

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/version" or "watch" not in request.query:
            return web.Response(body=LIST)
        asked.append(request.query["resourceVersion"])
        answer = web.StreamResponse()
        await answer.prepare(request)
        if len(asked) == 1:
            for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
                await answer.write(body[start:end])
        elif len(asked) == 2:
            await answer.write(b'{"type":"ERROR","object":{"kind":"Status","code":500}}\n')
        else:
            await answer.write(b'{"type":"DELETED","object":{"metadata":{"name":"b","uid":"2",')
            await answer.write(b'"resourceVersion":"99"}}}\n')
        return answer

    async with (
        raw_server(handle, tmp_path / "k") as client,
        client.list_watch("/api/v1/things") as events,
    ):
        seen = await take(events, 4)
    assert told(seen) == [("SYNCED", ""), ("ADDED", "ü"), ("MODIFIED", "b"), ("DELETED", "b")]
    assert len(seen[2].raw) > 3_000_000
    assert asked[:3] == ["7", "91", "91"]


async def test_a_silent_watch_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "IDLE_S", 0.1)
    watches = 0

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal watches
        if "watch" not in request.query:
            return web.Response(body=LIST)
        watches += 1
        answer = web.StreamResponse()
        await answer.prepare(request)
        if watches == 3:
            await answer.write(b'{"type":"ADDED","object":{"metadata":{"name":"a","uid":"1"}}}\n')
        await anyio.sleep(0.4)
        return answer

    async with (
        raw_server(handle, tmp_path / "k") as client,
        client.list_watch("/api/v1/things") as events,
    ):
        assert told(await take(events, 2)) == [("SYNCED", ""), ("ADDED", "a")]


async def test_a_list_that_expires_half_way_is_begun_again(tmp_path: Path) -> None:
    asked: list[str] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        token = request.query.get("continue", "")
        if request.path == "/version":
            return web.Response(body=b"{}")
        asked.append(token)
        if token == "first":
            return web.Response(status=410, body=b'{"reason":"Expired"}')
        nxt = "first" if len(asked) == 1 else ""
        return web.Response(body=b'{"metadata":{"continue":"%s"}}' % nxt.encode())

    async with raw_server(handle, tmp_path / "k") as client:
        assert len(await client.list_pages("/api/v1/things")) == 1
    assert asked == ["", "first", ""]


async def test_an_answer_that_is_no_status_object_is_quoted(tmp_path: Path) -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/version":
            return web.Response(body=b"{}")
        return web.Response(status=418, body=b"<html>a proxy speaks</html>")

    async with raw_server(handle, tmp_path / "k") as client:
        with pytest.raises(Denied, match="a proxy speaks"):
            await client.get("/api/v1/things")


async def test_events_that_repeat_are_counted_on_one_object(kube: Fixture) -> None:
    _, client = kube
    created = decoded(await client.create(PODS, pod("web")))
    clock = ManualClock()
    recorder = kubeio.EventRecorder(client, component="hami-scheduler", clock=clock)
    regarding = kubeio.ObjectRef(
        kind="Pod", name="web", namespace="default", uid=created["metadata"]["uid"]
    )
    for _ in range(3):
        await recorder.record(regarding, reason="NoShare", message="no node", kind="Warning")
        await clock.advance(60)
    await recorder.record(regarding, reason="Placed", message="on node-1")
    (page,) = await client.list_pages("/api/v1/namespaces/default/events")
    events = {item["reason"]: item for item in decoded(page)["items"]}
    assert events.keys() == {"NoShare", "Placed"}
    repeated = events["NoShare"]
    assert (repeated["count"], repeated["type"]) == (3, "Warning")
    assert repeated["lastTimestamp"] > repeated["firstTimestamp"]
    assert repeated["involvedObject"]["uid"] == created["metadata"]["uid"]
    assert recorder.failed_count == 0


async def test_an_event_after_the_window_or_its_expiry_is_a_new_object(kube: Fixture) -> None:
    _, client = kube
    clock = ManualClock()
    recorder = kubeio.EventRecorder(client, component="c", clock=clock)
    node = kubeio.ObjectRef(kind="Node", name="node-1.example", uid="u")
    events_path = "/api/v1/namespaces/default/events"

    async def names() -> set[str]:
        (page,) = await client.list_pages(events_path)
        return {item["metadata"]["name"] for item in decoded(page)["items"]}

    await recorder.record(node, reason="Fault", message="x")
    (first,) = await names()
    await client.delete(f"{events_path}/{first}")
    await recorder.record(node, reason="Fault", message="x")
    (second,) = await names()
    await clock.advance(601)
    await recorder.record(node, reason="Fault", message="x")
    assert len({first, second} | await names()) == 3


async def test_a_lost_event_is_counted_and_never_an_error(kube: Fixture) -> None:
    server, client = kube
    recorder = kubeio.EventRecorder(client, component="c", clock=ManualClock())
    server.faults.add(Fault(match=Match(resource="events"), action="deny", code=500))
    await recorder.record(kubeio.ObjectRef(kind="Node", name="n"), reason="R", message="m" * 5000)
    assert recorder.failed_count == 1
    await recorder.record(kubeio.ObjectRef(kind="Node", name="n"), reason="R", message="m" * 5000)
    assert recorder.failed_count == 1


async def test_the_environments_proxy_is_used_except_for_hosts_it_excludes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    seen: list[tuple[str, str]] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        credentials = request.headers.get("Proxy-Authorization", "")
        seen.append((request.raw_path, credentials))
        return web.Response(body=b"{}")

    async with raw_server(handle, tmp_path / "direct"):
        text = (tmp_path / "direct").read_text()
        proxy = decoded(text.encode())["clusters"][0]["cluster"]["server"]
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_text(text.replace(proxy, "http://api.invalid"))
        monkeypatch.setenv("http_proxy", proxy.replace("//", "//me:p%40ss@"))
        seen.clear()
        async with kubeio.connect(str(elsewhere), start_timeout_s=20) as client:
            await client.get("/api/v1/things")
        assert seen[-1] == ("http://api.invalid/api/v1/things", "Basic bWU6cEBzcw==")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with kubeio.connect(str(tmp_path / "direct"), start_timeout_s=20) as client:
            await client.get("/api/v1/things")
        assert seen[-1] == ("/api/v1/things", "")
