# SPDX-License-Identifier: Apache-2.0
"""Requests that the registry forwards to the scheduler, over real connections."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from aiohttp import web

from hami_common.errors import SettingsInvalid
from hami_common.runtime import httpd
from hami_common.runtime.gate import Gate
from hami_common.runtime.places import Places
from hami_common.runtime.telemetry import make_registry
from hami_registry.shell.gateway import FORWARDED, Gateway, SchedulerAddress
from hami_sim.certs import CertificateAuthority
from tests.support.registry import run_registry

pytestmark = pytest.mark.anyio
HOST = "127.0.0.1"


class Scheduler:
    """A scheduler that records requests and answers what a test wants."""

    def __init__(self) -> None:
        self.seen: list[web.BaseRequest] = []
        self.bodies: list[bytes] = []
        self.answer: Callable[[], web.StreamResponse] = lambda: web.json_response({"items": []})

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append(request)
        self.bodies.append(await request.read())
        return self.answer()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        runner = web.ServerRunner(web.Server(self.handle))
        await runner.setup()
        try:
            site = web.TCPSite(runner, HOST, 0)
            await site.start()
            yield f"http://{HOST}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def gateway_to(url: str, **settings: Any) -> AsyncIterator[str]:
    gate = Gate(None)
    gateway = Gateway(
        SchedulerAddress(url=url, **{"timeout_s": 5.0, **settings}),
        places=Places(what="requests", setting="limit", total=2, per_caller=2),
        proxied=gate.proxied,
    )
    app = httpd.HttpApp(
        gateway.guarded(gate), registry=make_registry(service="t"), ready=bool, body_limit=1000
    )
    async with anyio.create_task_group() as group:
        port = await group.start(httpd.serve, app, HOST, 0, None, 0.1)
        yield f"http://{HOST}:{port}"
        group.cancel_scope.cancel()


@pytest.fixture
async def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
async def gateway(scheduler: Scheduler) -> AsyncIterator[str]:
    async with scheduler.running() as url, gateway_to(url) as base:
        yield base


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_request_and_answer_pass_unchanged(
    scheduler: Scheduler, gateway: str, http: aiohttp.ClientSession
) -> None:
    text = b'{"error":{"code":"denied","message":"tenant may not"}}'
    scheduler.answer = lambda: web.Response(
        body=text, status=403, content_type="application/json", headers={"X-Inner": "secret"}
    )
    for method, path in FORWARDED:
        body = b'{"pods": 1}' if method == "POST" else None
        headers = {"Authorization": "Bearer abc", "Content-Type": "application/json"}
        async with http.request(method, gateway + path, data=body, headers=headers) as answer:
            assert answer.status == 403
            assert await answer.read() == text
            assert answer.headers["Cache-Control"] == "no-store"
            assert "X-Inner" not in answer.headers
        seen = scheduler.seen[-1]
        assert (seen.method, seen.path) == (method, path)
        assert seen.headers["Authorization"] == "Bearer abc"
        assert scheduler.bodies[-1] == (body or b"")
    assert len(scheduler.seen) == len(FORWARDED)


async def test_query_passes_with_repeated_and_encoded_values(
    scheduler: Scheduler, gateway: str, http: aiohttp.ClientSession
) -> None:
    query = [("a", "x y&z=1"), ("a", "é/#?"), ("b", "")]
    async with http.get(f"{gateway}/v1/queues", params=query) as answer:
        assert answer.status == 200
    assert list(scheduler.seen[0].query.items()) == query


async def test_headers_of_the_connection_and_of_strangers_stay_behind(
    scheduler: Scheduler, gateway: str, http: aiohttp.ClientSession
) -> None:
    sent = {
        "Cookie": "session=1",
        "X-Forwarded-For": "10.0.0.1",
        "X-Remote-User": "admin",
        "Connection": "keep-alive, Authorization",
        "Upgrade": "websocket",
        "Authorization": "Bearer abc",
    }
    async with http.get(f"{gateway}/v1/queues", headers=sent) as answer:
        assert answer.status == 200
    seen = scheduler.seen[0].headers
    assert seen["Authorization"] == "Bearer abc"
    for name in ("Cookie", "X-Forwarded-For", "X-Remote-User", "Upgrade"):
        assert name not in seen
    assert seen["Host"] != gateway.removeprefix("http://")


async def test_paths_that_are_not_forwarded_do_not_reach_the_scheduler(
    scheduler: Scheduler, gateway: str, http: aiohttp.ClientSession
) -> None:
    for method, path in (
        ("GET", "/v1/snapshot"),
        ("POST", "/filter"),
        ("POST", "/v1/whatif/%2e%2e/%2e%2e/bind"),
        ("POST", "/v1/queues"),
        ("GET", "/v1/queues/x"),
    ):
        async with http.request(method, gateway + path) as answer:
            assert answer.status in (404, 405), path
    async with http.post(f"{gateway}/v1/resize", data=b"x" * 2000) as answer:
        assert answer.status == 413
    assert scheduler.seen == []


async def test_failed_post_is_not_repeated(
    scheduler: Scheduler, gateway: str, http: aiohttp.ClientSession
) -> None:
    def cut() -> web.StreamResponse:
        transport = scheduler.seen[-1].transport
        assert transport is not None
        transport.abort()
        return web.Response()

    scheduler.answer = cut
    async with http.post(f"{gateway}/v1/resize", json={}) as answer:
        assert answer.status == 503
        assert "the scheduler is unavailable" in await answer.text()
    assert len(scheduler.seen) == 1


async def test_redirect_is_not_followed(
    scheduler: Scheduler, gateway: str, http: aiohttp.ClientSession
) -> None:
    scheduler.answer = lambda: web.Response(status=307, headers={"Location": "http://10.0.0.1/"})
    async with http.get(f"{gateway}/v1/queues") as answer:
        assert answer.status == 503
        assert "redirect" in await answer.text()


async def test_missing_silent_and_absent_scheduler_answer_503(
    scheduler: Scheduler, http: aiohttp.ClientSession
) -> None:
    async def message(base: str) -> str:
        async with http.get(f"{base}/v1/queues") as answer:
            assert answer.status == 503
            return str(msgspec.json.decode(await answer.read())["error"]["message"])

    async with gateway_to("") as base:
        assert "set scheduler_url" in await message(base)
    async with scheduler.running() as url:
        pass
    async with gateway_to(url) as base:
        assert "/v1/queues" in await message(base)
    listener = await anyio.create_tcp_listener(local_host=HOST, local_port=0)
    async with listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - not Django
        async with gateway_to(f"http://{HOST}:{port}", timeout_s=0.2) as base:
            assert await message(base)


async def test_scheduler_with_a_certificate_of_another_ca_is_refused(
    scheduler: Scheduler, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    authority, other = CertificateAuthority(), CertificateAuthority(name="other")
    cert, key, ca = authority.issue_files(tmp_path / "scheduler", [HOST])
    _, _, other_ca = other.issue_files(tmp_path / "other", [HOST])

    async def queues(request: httpd.Request) -> httpd.Response:
        return httpd.json_response({"token": request.headers["Authorization"]})

    app = httpd.HttpApp(
        {("GET", "/v1/queues"): queues}, registry=make_registry(service="s"), ready=bool
    )
    async with anyio.create_task_group() as group:
        tls = httpd.TlsFiles(str(cert), str(key))
        port = await group.start(httpd.serve, app, HOST, 0, tls, 0.1)
        url, headers = f"https://{HOST}:{port}", {"Authorization": "Bearer abc"}
        async with (
            gateway_to(url, ca_file=str(ca)) as base,
            http.get(f"{base}/v1/queues", headers=headers) as answer,
        ):
            assert await answer.json() == {"token": "Bearer abc"}
        async with (
            gateway_to(url, ca_file=str(other_ca)) as base,
            http.get(f"{base}/v1/queues", headers=headers) as answer,
        ):
            assert answer.status == 503
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"url": "scheduler:443"}, "is not http"),
        ({"url": "https://scheduler/v1"}, "is not http"),
        ({"url": "http://10.0.0.1:9398"}, "would be readable"),
        ({"url": "https://scheduler", "ca_file": "/absent/ca.crt"}, "No such file"),
        ({"url": "https://scheduler", "cert_file": "/absent/tls.crt"}, "belong together"),
    ],
)
def test_address_that_cannot_be_used_is_refused_at_start(
    settings: dict[str, str], text: str
) -> None:
    with pytest.raises(SettingsInvalid, match=text):
        SchedulerAddress(timeout_s=1.0, **settings).check(sends_tokens=True)


def test_plain_address_is_accepted_where_no_tokens_are_sent() -> None:
    SchedulerAddress(url="http://10.0.0.1:9398", timeout_s=1.0).check(sends_tokens=False)
    SchedulerAddress(url="http://127.0.0.1:9398", timeout_s=1.0).check(sends_tokens=True)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"proxy_ca_file": "/ca.crt"}, "proxy_ca_file"),
        ({"proxy_ca_file": "/ca.crt", "auth": "kubernetes"}, "proxy_ca_file"),
        ({"scheduler_url": "http://10.0.0.1:9398", "auth": "kubernetes"}, "scheduler_url"),
        ({"console_dir": "/absent"}, "console_dir /absent"),
    ],
)
async def test_registry_does_not_start_with_settings_that_cannot_work(
    settings: dict[str, Any], field: str
) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(SettingsInvalid, check=lambda error: error.field == field),
        allow_unwrapped=True,
        flatten_subgroups=True,
    ):
        async with run_registry("nats://127.0.0.1:1", **settings):
            pytest.fail("the registry started")
