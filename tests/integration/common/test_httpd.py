# SPDX-License-Identifier: Apache-2.0
"""The services' HTTP server over real sockets: routes, limits, errors, TLS reload, shutdown."""

import io
import logging
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from anyio.streams.tls import TLSAttribute
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter

from hami_common.errors import (
    Conflict,
    Denied,
    InvariantBroken,
    NotFound,
    RequestInvalid,
    SettingsInvalid,
    Unavailable,
    WireInvalid,
)
from hami_common.runtime import httpd
from hami_common.runtime.httpd import HttpApp, Request, Response, StreamedResponse, TlsFiles
from hami_sim.certs import CertificateAuthority

pytestmark = pytest.mark.anyio

HOST = "127.0.0.1"


class Reply(Struct):
    method: str
    body: str
    params: dict[str, str]
    query: dict[str, str]


async def echo(request: Request) -> Response:
    return httpd.json_response(
        Reply(
            method=request.method,
            body=request.body.decode(),
            params=dict(request.params),
            query=dict(request.query),
        )
    )


def app(routes: dict[tuple[str, str], httpd.Handler] | None = None, **more: Any) -> HttpApp:
    defaults: dict[str, Any] = {"registry": CollectorRegistry(), "ready": lambda: True}
    return HttpApp(
        routes or {("POST", "/echo"): echo, ("GET", "/v1/pods/{namespace}/{pod}"): echo},
        **(defaults | more),
    )


@asynccontextmanager
async def served(
    application: HttpApp, *, tls: TlsFiles | None = None, grace_s: float = 5.0
) -> AsyncIterator[str]:
    async with anyio.create_task_group() as group:
        port = await group.start(httpd.serve, application, HOST, 0, tls, grace_s)
        yield f"{'http' if tls is None else 'https'}://{HOST}:{port}"
        group.cancel_scope.cancel()


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


async def test_exact_routes_and_parameters_reach_their_handlers() -> None:
    async with served(app()) as url, client() as session:
        async with session.post(f"{url}/echo?a=1", data=b"hi") as answer:
            assert answer.content_type == "application/json"
            assert await answer.json() == {
                "method": "POST",
                "body": "hi",
                "params": {},
                "query": {"a": "1"},
            }
        async with session.get(f"{url}/v1/pods/default/web-0.x") as answer:
            assert (await answer.json())["params"] == {"namespace": "default", "pod": "web-0.x"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not-found"),
        ("GET", "/v1/pods/default", 404, "not-found"),
        ("GET", "/v1/pods/a/b/c", 404, "not-found"),
        ("GET", "/echo", 405, "method-not-allowed"),
        ("DELETE", "/v1/pods/default/web", 405, "method-not-allowed"),
    ],
)
async def test_unknown_routes_are_refused_with_a_reason(
    method: str, path: str, status: int, code: str
) -> None:
    async with (
        served(app()) as url,
        client() as session,
        session.request(method, url + path) as answer,
    ):
        assert answer.status == status
        error = (await answer.json())["error"]
    assert error["code"] == code
    assert path in error["message"]


async def chunks(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413_and_names_the_limit(*, chunked: bool) -> None:
    async with served(app(body_limit=1000)) as url, client() as session:
        at_limit: Any = chunks([b"x" * 500] * 2) if chunked else b"x" * 1000
        async with session.post(f"{url}/echo", data=at_limit) as answer:
            assert answer.status == 200
            assert len((await answer.json())["body"]) == 1000
        over: Any = chunks([b"x" * 500, b"x" * 501]) if chunked else b"x" * 1001
        async with session.post(f"{url}/echo", data=over) as answer:
            assert answer.status == 413
            error = (await answer.json())["error"]
    assert error["limit_bytes"] == 1000
    assert "1000 bytes" in error["message"]


async def test_a_large_body_arrives_whole() -> None:
    body = os.urandom(6 << 20).hex().encode()
    async with (
        served(app(body_limit=20 << 20)) as url,
        client() as session,
        session.post(f"{url}/echo", data=io.BytesIO(body)) as answer,
    ):
        assert (await answer.json())["body"] == body.decode()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestInvalid(field="limits[x]", problem="p", fix="f"), 400, "request-invalid"),
        (WireInvalid(what="body", problem="no JSON"), 400, "wire-invalid"),
        (Denied(peer="API", detail="no"), 403, "denied"),
        (NotFound(what="pod a/b"), 404, "not-found"),
        (Conflict(what="pod"), 409, "conflict"),
        (Unavailable(peer="NATS", detail="away"), 503, "unavailable"),
        (InvariantBroken(what="impossible"), 500, "internal"),
    ],
)
async def test_errors_of_the_project_become_responses(
    error: Exception, status: int, code: str
) -> None:
    async def fail(request: Request) -> Response:
        raise error

    async with (
        served(app({("GET", "/x"): fail})) as url,
        client() as session,
        session.get(f"{url}/x") as answer,
    ):
        assert answer.status == status
        assert (await answer.json())["error"] == {"code": code, "message": str(error)}


async def test_a_bug_in_a_handler_is_500_is_logged_and_spares_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(request: Request) -> Response:
        raise ZeroDivisionError("secret detail")

    application = app({("GET", "/x"): fail, ("POST", "/echo"): echo})
    async with served(application) as url, client() as session:
        async with session.get(f"{url}/x") as answer:
            assert answer.status == 500
            assert "secret" not in await answer.text()
        async with session.post(f"{url}/echo", data=b"1") as answer:
            assert answer.status == 200
    loud = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert loud == ["handler failed"]


async def test_health_readiness_and_metrics_are_built_in() -> None:
    state = {"ready": False, "healthy": True}
    registry = CollectorRegistry()
    Counter("hami_test_things", "Things", registry=registry).inc(3)
    application = app(
        registry=registry, ready=lambda: state["ready"], healthy=lambda: state["healthy"]
    )
    async with served(application) as url, client() as session:

        async def status(path: str) -> int:
            async with session.get(url + path) as answer:
                return answer.status

        assert (await status("/healthz"), await status("/readyz")) == (200, 503)
        state.update(ready=True, healthy=False)
        assert (await status("/healthz"), await status("/readyz")) == (503, 200)
        async with session.get(f"{url}/metrics") as answer:
            assert "hami_test_things_total 3.0" in await answer.text()
            assert answer.content_type == "text/plain"


async def test_a_stream_reaches_the_listener_piece_by_piece() -> None:
    more = anyio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await more.wait()
        yield b"data: 2\n\n"

    async def stream(request: Request) -> StreamedResponse:
        return StreamedResponse(chunks=pieces())

    async with (
        served(app({("GET", "/events"): stream})) as url,
        client() as session,
        session.get(f"{url}/events") as answer,
    ):
        assert answer.content_type == "text/event-stream"
        assert await answer.content.readany() == b"data: 1\n\n"
        more.set()
        assert await answer.content.read() == b"data: 2\n\n"


@pytest.mark.parametrize("pause_s", [0.01, 600.0])
async def test_a_listener_that_leaves_ends_its_stream(pause_s: float) -> None:
    ended = anyio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b": tick\n\n"
                await anyio.sleep(pause_s)
        finally:
            ended.set()

    async def stream(request: Request) -> StreamedResponse:
        return StreamedResponse(chunks=pieces())

    async with served(app({("GET", "/events"): stream})) as url:
        async with client() as session, session.get(f"{url}/events") as answer:
            await answer.content.readany()
        with anyio.fail_after(20):
            await ended.wait()


async def test_shutdown_finishes_requests_in_flight_and_accepts_no_new_ones() -> None:
    entered, release = anyio.Event(), anyio.Event()

    async def slow(request: Request) -> Response:
        entered.set()
        await release.wait()
        return Response(body=b"done", content_type="text/plain")

    got: list[str] = []

    async def ask(url: str) -> None:
        async with client() as session, session.get(f"{url}/slow") as answer:
            got.append(await answer.text())

    async with anyio.create_task_group() as callers, anyio.create_task_group() as group:
        port = await group.start(httpd.serve, app({("GET", "/slow"): slow}), HOST, 0)
        url = f"http://{HOST}:{port}"
        callers.start_soon(ask, url)
        await entered.wait()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True), anyio.fail_after(20):
            while True:
                try:
                    await (await anyio.connect_tcp(HOST, port)).aclose()
                except OSError:
                    break
        release.set()
    assert got == ["done"]


async def test_a_request_that_takes_longer_than_the_grace_is_cut_off() -> None:
    entered = anyio.Event()

    async def stuck(request: Request) -> Response:
        entered.set()
        await anyio.sleep_forever()
        return Response()

    async def ask(url: str) -> None:
        async with client() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"{url}/stuck")

    with anyio.fail_after(20):
        async with (
            anyio.create_task_group() as callers,
            served(app({("GET", "/stuck"): stuck}), grace_s=0.1) as url,
        ):
            callers.start_soon(ask, url)
            await entered.wait()


async def test_a_port_in_use_is_a_settings_error() -> None:
    async with served(app()) as url:
        with pytest.raises(SettingsInvalid, match="in use"):
            await httpd.serve(app(), HOST, int(url.rpartition(":")[2]))


async def fingerprint(url: str) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    port = int(url.rpartition(":")[2])
    async with await anyio.connect_tcp(HOST, port, tls=True, ssl_context=context) as stream:
        certificate: bytes | None = stream.extra(TLSAttribute.peer_certificate_binary)  # noqa: S610 - not Django
        assert certificate is not None
        return certificate


async def test_a_replaced_certificate_is_used_without_restart(tmp_path: Path) -> None:
    authority = CertificateAuthority()
    cert, key, _ = authority.issue_files(tmp_path, ["localhost", HOST])
    tls = TlsFiles(str(cert), str(key))
    async with served(app(), tls=tls) as url:
        first = await fingerprint(url)
        assert tls.reload_if_changed() is False
        authority.issue_files(tmp_path, ["localhost", HOST])
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: tls.watch(interval_s=0.01))
            with anyio.fail_after(20):
                while await fingerprint(url) == first:
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()


async def test_a_pair_that_does_not_belong_together_leaves_the_old_one_in_use(
    tmp_path: Path,
) -> None:
    authority = CertificateAuthority()
    cert, key, _ = authority.issue_files(tmp_path, ["localhost", HOST])
    tls = TlsFiles(str(cert), str(key))
    async with served(app(), tls=tls) as url:
        first = await fingerprint(url)
        other_cert, _, _ = authority.issue_files(tmp_path / "other", ["localhost", HOST])
        cert.write_bytes(other_cert.read_bytes())
        with pytest.raises(SettingsInvalid, match="together"):
            tls.reload_if_changed()
        assert await fingerprint(url) == first
    with pytest.raises(SettingsInvalid, match="belong together"):
        TlsFiles(str(cert), str(key))


async def test_client_certificates_are_demanded_and_shown_to_the_handler(tmp_path: Path) -> None:
    authority = CertificateAuthority()
    cert, key, ca = authority.issue_files(tmp_path / "server", ["localhost", HOST])
    client_cert, client_key, _ = authority.issue_files(tmp_path / "client", ["registry"])
    seen: list[object] = []

    async def who(request: Request) -> Response:
        seen.append((request.peer_certificate or {}).get("subject"))
        return Response()

    tls = TlsFiles(str(cert), str(key), client_ca_file=str(ca))
    async with served(app({("GET", "/x"): who}), tls=tls) as url, client() as session:
        context = ssl.create_default_context(cafile=str(ca))
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await session.get(f"{url}/x", ssl=context)
        context = ssl.create_default_context(cafile=str(ca))
        context.load_cert_chain(client_cert, client_key)
        async with session.get(f"{url}/x", ssl=context) as answer:
            assert answer.status == 200
    assert "registry" in str(seen)
