# SPDX-License-Identifier: Apache-2.0
"""Callers that an HTTP API admits, over a real connection; the reviews are made up here."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from multidict import CIMultiDict

from hami_common.errors import Denied, SettingsInvalid, Unavailable
from hami_common.roles import Route
from hami_common.runtime import gate, httpd
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.kubeauth import KubeAuth
from hami_common.runtime.telemetry import make_registry

pytestmark = pytest.mark.anyio

TENANT, ADMIN = "of-tenant", "of-admin"


class Cluster:
    """An API server with two users; the tenant may read and resize shares in ``team-a``."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_down = False
        self.users = {TENANT: "tenant", ADMIN: "admin"}

    async def create(self, path: str, body: bytes) -> bytes:
        if self.is_down:
            raise Unavailable(peer="API server", detail="down")
        self.asked.append(path.rpartition("/")[2])
        spec = msgspec.json.decode(body)["spec"]
        if path.endswith("tokenreviews"):
            name = self.users.get(spec["token"])
            # A real one sends an empty user with a token that is no good.
            status: dict[str, Any] = {"authenticated": name is not None, "user": {}}
            if name:
                status["user"] = {"username": name, "groups": ["people"]}
            return msgspec.json.encode({"status": status})
        wanted = spec["resourceAttributes"]
        is_own = wanted.get("namespace") == "team-a" and wanted["resource"] != "devices"
        return msgspec.json.encode({"status": {"allowed": spec["user"] == "admin" or is_own}})


async def answer(request: httpd.Request) -> httpd.Response:
    return httpd.json_response({"at": request.path})


async def breadth(request: httpd.Request) -> httpd.Response:
    return httpd.json_response({"sees_everything": await request.sees_everything()})


async def stream(request: httpd.Request) -> httpd.StreamedResponse:
    del request

    async def chunks() -> Any:
        while True:
            yield b": here\n\n"
            await anyio.sleep(0.01)

    return httpd.StreamedResponse(chunks=chunks())


PATHS: dict[Route, httpd.Handler] = {
    ("GET", "/v1/nodes"): answer,
    ("GET", "/v1/allocations"): answer,
    ("GET", "/v1/allocations/{namespace}/{pod}"): answer,
    ("GET", "/v1/explain/{namespace}/{pod}"): breadth,
    ("POST", "/v1/resize"): answer,
    ("GET", "/v1/watch"): stream,
    ("GET", "/v1/unlisted"): answer,
}


class Caller:
    def __init__(self, session: aiohttp.ClientSession, base: str, cluster: Cluster) -> None:
        self._session = session
        self.base = base
        self.cluster = cluster

    async def status(self, path: str, token: str = "", *, body: object = None) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        method = "GET" if body is None else "POST"
        data = None if body is None else msgspec.json.encode(body)
        url = self.base + path
        async with self._session.request(method, url, headers=headers, data=data) as told:
            await told.read()
            return told.status

    async def json(self, path: str, token: str) -> object:
        headers = {"Authorization": f"Bearer {token}"}
        async with self._session.get(self.base + path, headers=headers) as told:
            return await told.json()

    @asynccontextmanager
    async def watching(self, path: str, token: str) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Authorization": f"Bearer {token}"}
        async with self._session.get(self.base + path, headers=headers) as told:
            yield told


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    cluster = Cluster()
    kube: Any = cluster
    auth = KubeAuth(lambda: kube, clock=SystemClock(), ttl_s=0.5)
    app = httpd.HttpApp(
        gate.Gate(auth).guarded(PATHS), registry=make_registry(service="t"), ready=bool
    )
    async with anyio.create_task_group() as group, aiohttp.ClientSession() as session:
        port = await group.start(httpd.serve, app, "127.0.0.1", 0, None, 0.1)
        yield Caller(session, f"http://127.0.0.1:{port}", cluster)
        group.cancel_scope.cancel()


async def test_handler_learns_whether_the_caller_may_read_everything(caller: Caller) -> None:
    assert await caller.json("/v1/explain/team-a/p", TENANT) == {"sees_everything": False}
    assert await caller.json("/v1/explain/team-a/p", ADMIN) == {"sees_everything": True}


async def test_tenant_reads_its_own_namespaces_alone(caller: Caller) -> None:
    assert await caller.status("/v1/allocations/team-a/p", TENANT) == 200
    assert await caller.status("/v1/allocations?namespace=team-a", TENANT) == 200
    for path in (
        "/v1/allocations/team-b/p",
        "/v1/allocations",
        "/v1/allocations?namespace=",
        "/v1/nodes",
        "/v1/unlisted",
    ):
        assert await caller.status(path, TENANT) == 403, path
        assert await caller.status(path, ADMIN) == 200, path
    own, other = {"namespace": "team-a", "pod": "p"}, {"namespace": "team-b", "pod": "p"}
    assert await caller.status("/v1/resize", TENANT, body=own) == 200
    assert await caller.status("/v1/resize", TENANT, body=other) == 403
    damaged_bodies: tuple[object, ...] = ({}, {"namespace": ""}, [], {"namespace": 1})
    for damaged in damaged_bodies:
        assert await caller.status("/v1/resize", TENANT, body=damaged) == 400, damaged


@pytest.mark.parametrize("token", ["", "forged", "x" * 20_000, "a b", "Bearer of-admin"])
async def test_invalid_token_is_refused(caller: Caller, token: str) -> None:
    for path in ("/v1/nodes", "/v1/allocations/team-a/p", "/v1/watch?namespace=team-a"):
        # A header of 20,000 bytes is refused by the server itself.
        assert await caller.status(path, token) in (400, 401), path


async def test_every_caller_is_refused_while_the_api_server_is_down(caller: Caller) -> None:
    caller.cluster.is_down = True
    assert await caller.status("/v1/allocations/team-a/p", TENANT) == 503
    caller.cluster.is_down = False
    assert await caller.status("/v1/allocations/team-a/p", TENANT) == 200


async def test_answers_are_remembered_for_a_moment_and_not_longer(caller: Caller) -> None:
    for _ in range(5):
        assert await caller.status("/v1/allocations/team-a/p", ADMIN) == 200
    assert len(caller.cluster.asked) < 10
    del caller.cluster.users[ADMIN]
    with anyio.fail_after(20):
        while await caller.status("/v1/allocations/team-a/p", ADMIN) != 401:
            await anyio.sleep(0.05)


async def test_stream_ends_when_its_reader_may_not_read_any_more(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "STREAM_CHECK_S", 0.1)
    async with caller.watching("/v1/watch?namespace=team-a", TENANT) as told:
        assert told.status == 200
        await told.content.readline()
        del caller.cluster.users[TENANT]
        with anyio.fail_after(20):
            rest = await told.content.read()
    assert rest.endswith(gate.STREAM_END)


def asked(method: str, **headers: str) -> httpd.Request:
    return httpd.Request(
        method=method,
        path="/v1/resize",
        query={},
        headers=CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()}),
        body=b"",
        params={},
    )


async def test_every_caller_is_admitted_without_authentication() -> None:
    routes = gate.Gate(None).guarded(PATHS)
    assert {route: routes[route] for route in PATHS if route[0] == "GET"} == {
        route: PATHS[route] for route in PATHS if route[0] == "GET"
    }
    resize = routes["POST", "/v1/resize"]
    own = {"Sec_Fetch_Site": "same-origin", "Origin": "http://127.0.0.1:1", "Host": "127.0.0.1:1"}
    for headers in ({}, {"Sec_Fetch_Site": "none"}, own):
        assert isinstance(await resize(asked("POST", **headers)), httpd.Response)


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Origin": "http://evil.example", "Host": "127.0.0.1:1"},
        {"Origin": "null", "Host": "127.0.0.1:1"},
        {"Origin": "http://127.0.0.1:2", "Host": "127.0.0.1:1"},
    ],
)
async def test_foreign_page_changes_nothing_where_no_login_is_needed(
    headers: dict[str, str],
) -> None:
    resize = gate.Gate(None).guarded(PATHS)["POST", "/v1/resize"]
    with pytest.raises(Denied, match="page of another origin"):
        await resize(asked("POST", **headers))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "registry.example"])  # noqa: S104
def test_tokens_do_not_cross_the_network_in_the_clear(host: str) -> None:
    with pytest.raises(SettingsInvalid, match="would be readable"):
        gate.require_private(host=host, field="http_host", has_tls=False)
    gate.require_private(host=host, field="http_host", has_tls=True)
    for local in ("127.0.0.1", "::1", "localhost"):
        gate.require_private(host=local, field="http_host", has_tls=False)
