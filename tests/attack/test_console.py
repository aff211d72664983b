# SPDX-License-Identifier: Apache-2.0
"""Attacks on the console's side of the registry: forged identities, foreign pages, smuggled input.

A registry behind TLS with an authenticating proxy, and a scheduler behind the registry, over real
connections. The API server's reviews are made up: ``alice`` may do everything, others nothing.
"""

import io
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest

from hami_common.roles import Route
from hami_common.runtime import httpd
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.gate import FrontProxy, Gate
from hami_common.runtime.kubeauth import KubeAuth
from hami_common.runtime.places import Places
from hami_common.runtime.telemetry import make_registry
from hami_registry.shell.console import Console
from hami_registry.shell.gateway import Gateway, SchedulerAddress
from hami_registry.shell.session import Sessions
from hami_scheduler.settings import ApiSettings
from hami_scheduler.shell.listeners import own_guarded
from hami_sim.certs import CertificateAuthority

pytestmark = pytest.mark.anyio
HOST = "127.0.0.1"
PROXY, REGISTRY = "console-proxy", "hami-registry"
OWN_PAGE = {"X-HAMi-Console": "1", "Sec-Fetch-Site": "same-origin"}
ALICE = {"X-Remote-User": "alice", "X-Remote-Group": "operators"}


class Cluster:
    """The reviews of an API server; remembers whom it was asked about."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def create(self, path: str, body: bytes) -> bytes:
        spec = msgspec.json.decode(body)["spec"]
        if path.endswith("tokenreviews"):
            known = spec["token"] in {"alice", "mallory"}
            user = {"username": spec["token"]} if known else {}
            return msgspec.json.encode({"status": {"authenticated": known, "user": user}})
        self.asked.append(spec)
        return msgspec.json.encode({"status": {"allowed": spec["user"] == "alice"}})


class Site:
    """The two services and the certificates of their callers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cluster = Cluster()
        self.reached: list[Mapping[str, str]] = []
        """Headers of the requests whose handlers ran at the scheduler."""
        self.authority = CertificateAuthority()
        self.proxies = CertificateAuthority(name="proxies")
        self.server = self.authority.issue_files(directory / "server", [HOST])
        self.url = ""
        self.scheduler_url = ""
        self.port = 0

    def certificate(self, name: str, authority: CertificateAuthority) -> tuple[str, str]:
        cert, key, _ = authority.issue_files(
            self.directory / f"{name}-{id(authority)}", [], common_name=name
        )
        return str(cert), str(key)

    @property
    def ca_file(self) -> str:
        return str(self.server[2])

    def proxy_ca(self) -> str:
        path = self.directory / "proxies.crt"
        path.write_bytes(self.proxies.pem)
        return str(path)

    def tls(self, client: tuple[str, str] | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        if client is not None:
            context.load_cert_chain(*client)
        return context

    async def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | list[tuple[str, str]],
        *,
        client: tuple[str, str] | None = None,
        base: str = "",
        data: bytes | io.BytesIO | None = None,
    ) -> tuple[int, Any]:
        """Return status and document of an answer."""
        connector = aiohttp.TCPConnector(ssl=self.tls(client), force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(
                method, f"{base or self.url}{path}", headers=headers, data=data
            ) as answer,
        ):
            text = await answer.read()
            is_json = answer.headers.get("Content-Type", "").startswith("application/json")
            return answer.status, msgspec.json.decode(text) if is_json else text


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    found = Site(tmp_path)
    kube: Any = found.cluster

    async def reached(request: httpd.Request) -> httpd.Response:
        found.reached.append(dict(request.headers))
        return httpd.json_response({"ok": True})

    routes: dict[Route, httpd.Handler] = {
        ("GET", "/v1/queues"): reached,
        ("POST", "/v1/whatif/drain"): reached,
    }
    options = ApiSettings(proxy_ca_file=found.proxy_ca(), proxy_names=(REGISTRY,))
    cert, key, _ = found.server
    tls = httpd.TlsFiles(
        str(cert), str(key), client_ca_file=found.proxy_ca(), is_client_optional=True
    )
    scheduler = httpd.HttpApp(
        own_guarded(routes, options, kube, SystemClock()),
        registry=make_registry(service="s"),
        ready=bool,
    )
    (tmp_path / "console").mkdir()
    (tmp_path / "console/index.html").write_bytes(b"console")
    (tmp_path / "secret").write_bytes(b"secret")
    async with anyio.create_task_group() as group:
        port = await group.start(httpd.serve, scheduler, HOST, 0, tls, 0.1)
        found.scheduler_url = f"https://{HOST}:{port}"
        own = Gate(KubeAuth(lambda: kube, clock=SystemClock()), FrontProxy(names=(PROXY,)))
        client_cert, client_key = found.certificate(REGISTRY, found.proxies)
        gateway = Gateway(
            SchedulerAddress(
                url=found.scheduler_url,
                ca_file=found.ca_file,
                cert_file=client_cert,
                key_file=client_key,
                timeout_s=20.0,
            ),
            places=Places(what="requests", setting="limit", total=4, per_caller=4),
            proxied=own.proxied,
        )
        registry = httpd.HttpApp(
            {
                **gateway.guarded(own),
                **Sessions(own).routes(),
                **Console(str(tmp_path / "console")).routes(),
            },
            registry=make_registry(service="r"),
            ready=bool,
        )
        found.port = await group.start(httpd.serve, registry, HOST, 0, tls, 0.1)
        found.url = f"https://{HOST}:{found.port}"
        yield found
        group.cancel_scope.cancel()


async def test_proxy_names_a_user_whom_the_scheduler_authorizes_too(site: Site) -> None:
    proxy = site.certificate(PROXY, site.proxies)
    status, session = await site.ask("GET", "/v1/session", ALICE, client=proxy)
    assert status == 200
    assert (session["login"], session["user"]) == ("proxy", "alice")
    assert session["sees_everything"]
    status, _ = await site.ask("GET", "/v1/queues", ALICE, client=proxy)
    assert status == 200
    assert site.reached[0]["X-Remote-User"] == "alice"
    groups = ["operators", "system:authenticated"]
    assert all(spec["groups"] == groups for spec in site.cluster.asked)
    body = b"{}"
    drain = "/v1/whatif/drain"
    status, _ = await site.ask("POST", drain, {**ALICE, **OWN_PAGE}, client=proxy, data=body)
    assert status == 200
    bob = {**OWN_PAGE, "X-Remote-User": "bob"}
    status, _ = await site.ask("POST", drain, bob, client=proxy, data=body)
    assert status == 403
    assert len(site.reached) == 2


async def test_identity_without_the_proxys_certificate_is_no_identity(site: Site) -> None:
    for base in (site.url, site.scheduler_url):
        status, _ = await site.ask("GET", "/v1/queues", ALICE, base=base)
        assert status == 401
        status, _ = await site.ask(
            "GET", "/v1/queues", {**ALICE, "Authorization": "Bearer mallory"}, base=base
        )
        assert status == 403
    _, session = await site.ask("GET", "/v1/session", ALICE)
    assert session == {
        "login": "token",
        "user": "",
        "sees_everything": False,
        "routes": ["GET /v1/session"],
    }
    assert site.reached == []


async def test_certificate_of_another_name_is_no_proxy(site: Site) -> None:
    for base, name in (
        (site.url, "someone"),
        (site.url, REGISTRY),
        (site.scheduler_url, PROXY),
    ):
        client = site.certificate(name, site.proxies)
        status, _ = await site.ask("GET", "/v1/queues", ALICE, client=client, base=base)
        assert status == 401, name
    assert site.reached == []


async def test_certificate_of_another_ca_is_refused(site: Site) -> None:
    for authority in (site.authority, CertificateAuthority(name="proxies")):
        client = site.certificate(PROXY, authority)
        with pytest.raises((aiohttp.ClientError, OSError)):
            await site.ask("GET", "/v1/queues", ALICE, client=client)
    assert site.reached == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-HAMi-Console": "1"},
        {"Sec-Fetch-Site": "same-origin"},
        {**OWN_PAGE, "Sec-Fetch-Site": "cross-site"},
        {**OWN_PAGE, "Sec-Fetch-Site": "same-site"},
        {**OWN_PAGE, "Sec-Fetch-Site": "none"},
        {**OWN_PAGE, "Sec-Fetch-Site": "same-origin, cross-site"},
    ],
)
async def test_foreign_page_changes_nothing_with_the_proxys_cookie(
    site: Site, headers: dict[str, str]
) -> None:
    proxy = site.certificate(PROXY, site.proxies)
    status, answer = await site.ask(
        "POST", "/v1/whatif/drain", {**ALICE, **headers}, client=proxy, data=b"{}"
    )
    assert status == 403
    assert "X-HAMi-Console" in answer["error"]["message"]
    assert site.reached == []


async def test_foreign_page_reads_nothing_with_the_proxys_cookie(site: Site) -> None:
    proxy = site.certificate(PROXY, site.proxies)
    for value in ("cross-site", "same-site"):
        headers = {**ALICE, "Sec-Fetch-Site": value}
        status, _ = await site.ask("GET", "/v1/queues", headers, client=proxy)
        assert status == 403
    assert site.reached == []


@pytest.mark.parametrize(
    "headers",
    [
        [("X-Remote-User", "alice"), ("X-Remote-User", "mallory")],
        [("X-Remote-User", "")],
        [("X-Remote-User", "system:serviceaccount:kube-system:default")],
        [("X-Remote-User", "alice"), ("X-Remote-Group", "system:masters")],
        [("X-Remote-User", "alice"), ("X-Remote-Group", "")],
        [("X-Remote-User", "x" * 257)],
        [("X-Remote-User", "ali\tce")],
        [("X-Remote-User", "alice"), *[("X-Remote-Group", str(i)) for i in range(257)]],
    ],
)
async def test_malformed_identity_of_the_proxy_is_refused(
    site: Site, headers: list[tuple[str, str]]
) -> None:
    proxy = site.certificate(PROXY, site.proxies)
    status, _ = await site.ask("GET", "/v1/queues", headers, client=proxy)
    assert status in (400, 401)
    assert site.reached == []
    assert site.cluster.asked == []


async def test_identity_does_not_pass_the_gateway_beside_a_token(site: Site) -> None:
    headers = {"Authorization": "Bearer alice", "X-Remote-User": "root", "Cookie": "a=b"}
    status, _ = await site.ask("GET", "/v1/queues", headers)
    assert status == 200
    assert site.reached[0]["Authorization"] == "Bearer alice"
    assert not {"X-Remote-User", "X-Remote-Group", "Cookie"} & site.reached[0].keys()


async def raw(site: Site, request: bytes) -> bytes:
    """Send bytes as they are; returns everything that the registry answers."""
    async with await anyio.connect_tcp(
        HOST, site.port, tls=True, ssl_context=site.tls(None), tls_standard_compatible=False
    ) as stream:
        await stream.send(request)
        answer = b""
        with anyio.move_on_after(10):
            try:
                while True:
                    answer += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass
        return answer


TOKEN = b"Authorization: Bearer alice\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        # Two lengths, and a length beside chunks: one of them hides a second request.
        b"POST /v1/whatif/drain HTTP/1.1\r\nHost: r\r\n"
        + TOKEN
        + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        b"0\r\n\r\nGET /v1/queues HTTP/1.1\r\nHost: r\r\n" + TOKEN + b"\r\n",
        b"POST /v1/whatif/drain HTTP/1.1\r\nHost: r\r\n"
        + TOKEN
        + b"Content-Length: 2\r\nContent-Length: 60\r\nConnection: close\r\n\r\n{}",
        # A header that continues in the next line.
        (
            b"GET /v1/queues HTTP/1.1\r\nHost: r\r\nX-A: b\r\n Authorization: Bearer alice\r\n"
            b"Connection: close\r\n\r\n"
        ),
        (
            b"GET /v1/queues HTTP/1.1\r\nHost: r\r\nAuthorization : Bearer alice\r\n"
            b"Connection: close\r\n\r\n"
        ),
        # Values that would become header lines at the scheduler.
        (
            b"GET /v1/queues HTTP/1.1\r\nHost: r\r\nAuthorization: Bearer alice\r"
            b"X-Remote-User: root\r\nConnection: close\r\n\r\n"
        ),
        (
            b"GET /v1/queues?a=b HTTP/1.1\r\nX-Remote-User: root HTTP/1.1\r\nHost: r\r\n"
            b"Connection: close\r\n\r\n"
        ),
    ],
)
async def test_smuggled_requests_and_headers_do_not_reach_the_scheduler(
    site: Site, request_bytes: bytes
) -> None:
    answer = await raw(site, request_bytes)
    assert answer.split(b" ", 2)[1] in (b"400", b"401")
    assert site.reached == []


@pytest.mark.parametrize(
    "path",
    [
        "/console/../secret",
        "/console/..%2fsecret",
        "/console/%2e%2e/secret",
        "/console/%2e%2e%2f%2e%2e%2fetc/passwd",
        "/console/..\\secret",
        "/console//etc/passwd",
        "/console/%00secret",
        "/console/assets/../../secret",
        "//secret",
    ],
)
async def test_no_path_leaves_the_directory_of_the_console(site: Site, path: str) -> None:
    answer = await raw(
        site, f"GET {path} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n".encode()
    )
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ", 2)[1] in (b"200", b"400", b"404")
    assert b"root:" not in answer
    if b" 200 " in head.partition(b"\r\n")[0]:
        assert body == b"console"
        assert b"default-src 'none'" in head


async def test_page_of_the_console_cannot_be_framed_or_run_other_code(site: Site) -> None:
    answer = await raw(site, b"GET /console/ HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
    head = answer.partition(b"\r\n\r\n")[0].decode().lower()
    for word in ("script-src 'self';", "frame-ancestors 'none'", "x-content-type-options: nosniff"):
        assert word in head
    assert "unsafe" not in head
    assert "access-control-allow" not in head


async def test_oversize_body_is_refused_before_it_is_read(site: Site) -> None:
    headers = {"Authorization": "Bearer alice"}
    status, answer = await site.ask(
        "POST", "/v1/whatif/drain", headers, data=io.BytesIO(b"x" * (4 * httpd.MIB_BYTES + 1))
    )
    assert status == 413
    assert answer["error"]["code"] == "body-too-large"
    announced = b"POST /v1/whatif/drain HTTP/1.1\r\nHost: r\r\nContent-Length: 99999999999\r\n\r\n"
    assert b" 413 " in (await raw(site, announced)).partition(b"\r\n")[0]
    assert site.reached == []


async def test_error_does_not_repeat_the_token(site: Site) -> None:
    status, answer = await site.ask("GET", "/v1/queues", {"Authorization": "Bearer hunter2-secret"})
    assert status == 401
    assert "hunter2" not in json.dumps(answer)
