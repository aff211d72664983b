# SPDX-License-Identifier: Apache-2.0
"""HTTP and HTTPS server of the services: routes, body limit, health, metrics, orderly stop.

Routes without parameters are found by one dictionary look-up and pass no middleware, because
kube-scheduler waits for each filter call. A request's body is read whole, up to the application's
limit, before the handler runs. Errors of the ``HamiError`` tree become JSON answers
``{"error": {"code", "message", …}}``. Sizes in bytes, times in seconds. No access log.
"""

import logging
import os
import re
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

import anyio
import msgspec
from aiohttp import web
from anyio.abc import TaskStatus
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from hami_common.errors import (
    Conflict,
    Denied,
    HamiError,
    NotFound,
    RequestInvalid,
    SettingsInvalid,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
    WireInvalid,
)
from hami_common.runtime.tasks import background, finish_within

MIB_BYTES = 1 << 20
JSON_TYPE = "application/json"
STREAM_WRITE_S = 20.0
"""Longest wait until the peer of a stream takes a piece; then its connection is closed."""

PEER_CHECK_S = 0.5
"""Interval at which a stream looks whether its peer is still connected."""

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
CODES: tuple[tuple[type[HamiError], int, str], ...] = (
    (RequestInvalid, 400, "request-invalid"),
    (WireInvalid, 400, "wire-invalid"),
    (Unauthenticated, 401, "unauthenticated"),
    (Denied, 403, "denied"),
    (NotFound, 404, "not-found"),
    (Conflict, 409, "conflict"),
    (TooManyRequests, 429, "too-many-requests"),
    (Unavailable, 503, "unavailable"),
)
"""Status and stable code of each error; the first match counts."""


async def _everybody() -> bool:
    return True


class Request:
    """One request with its whole body."""

    __slots__ = (
        "body",
        "caller",
        "headers",
        "method",
        "params",
        "path",
        "peer_certificate",
        "query",
        "remote",
        "sees_everything",
    )

    def __init__(
        self,
        *,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes,
        params: Mapping[str, str],
        peer_certificate: Mapping[str, object] | None = None,
        remote: str = "",
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        """Case-insensitive."""
        self.body = body
        self.params = params
        """Values of ``{name}`` parts of the route."""
        self.peer_certificate = peer_certificate
        """Verified client certificate as ``ssl.SSLSocket.getpeercert`` gives it, or ``None``."""
        self.remote = remote
        """Address of the caller, without port; empty where the transport has none."""
        self.caller = remote
        """Key for limits per caller: behind a gate the user, else the peer's address."""
        self.sees_everything: Callable[[], Awaitable[bool]] = _everybody
        """Returns whether the caller may read the devices and allocations of all namespaces;
        without a gate every caller may.
        """


class Response(Struct, frozen=True, kw_only=True):
    """A complete answer."""

    body: bytes | bytearray = b""
    status: int = 200
    content_type: str = JSON_TYPE
    headers: Mapping[str, str] = {}


class StreamedResponse(Struct, frozen=True, kw_only=True):
    """An answer sent piece by piece until ``chunks`` ends (server-sent events)."""

    chunks: AsyncGenerator[bytes, None]
    """Closed when the answer ends, normally or not."""
    content_type: str = "text/event-stream"
    headers: Mapping[str, str] = msgspec.field(
        default_factory=lambda: {"cache-control": "no-store"}
    )


Handler = Callable[[Request], Awaitable[Response | StreamedResponse]]


def accepts_gzip(headers: Mapping[str, str]) -> bool:
    """Return whether the caller accepts ``Content-Encoding: gzip`` (RFC 9110, section 12.5.3)."""
    for part in headers.get("Accept-Encoding", "").lower().split(","):
        coding, *parameters = (word.strip() for word in part.split(";"))
        if coding == "gzip":
            return not any(re.fullmatch(r"q=0(\.0*)?", one) for one in parameters)
    return False


def json_response(value: object, *, status: int = 200) -> Response:
    """``value`` (a Struct or plain data) as JSON."""
    return Response(body=_encoder.encode(value), status=status)


def error_response(*, status: int, code: str, message: str, **facts: object) -> Response:
    """JSON error with a stable ``code``, a sentence, and facts as data."""
    return json_response({"error": {"code": code, "message": message, **facts}}, status=status)


class HttpApp:
    """Routes of one server, with ``/healthz``, ``/readyz`` and ``/metrics`` built in."""

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Handler],
        *,
        registry: CollectorRegistry,
        ready: Callable[[], bool],
        body_limit: int = 4 * MIB_BYTES,
        healthy: Callable[[], bool] = lambda: True,
        is_complete: bool = True,
    ) -> None:
        """Serve ``routes``, by method and path.

        A part ``{name}`` of a path matches one segment, ``{name...}`` at its end the rest.
        Without ``is_complete``, other paths are answered with 503 until ``complete`` was called.
        """
        self.body_limit = body_limit
        self.is_ready = ready
        self._registry = registry
        self._exact: dict[tuple[str, str], Handler] = {
            ("GET", "/healthz"): _probe(healthy),
            ("GET", "/readyz"): _probe(ready),
            ("GET", "/metrics"): self._metrics,
        }
        self._patterns: list[tuple[str, re.Pattern[str], Handler]] = []
        self._paths: set[str] = set()
        self._is_complete = is_complete
        self._add(routes)

    def complete(self, routes: Mapping[tuple[str, str], Handler]) -> None:
        """Serve ``routes`` too: the service has reached the peers that their handlers need."""
        self._add(routes)
        self._is_complete = True

    def _add(self, routes: Mapping[tuple[str, str], Handler]) -> None:
        for (method, path), handler in routes.items():
            if "{" in path:
                self._patterns.append((method, _pattern(path), handler))
            else:
                self._exact[method, path] = handler
        self._paths = {path for _, path in self._exact}

    async def _metrics(self, request: Request) -> Response:
        del request
        return Response(body=generate_latest(self._registry), content_type=CONTENT_TYPE_LATEST)

    def find(self, method: str, path: str) -> tuple[Handler, Mapping[str, str]] | Response:
        """Handler and parameters for a request, or the error response."""
        handler = self._exact.get((method, path))
        if handler is not None:
            return handler, {}
        known = path in self._paths
        for route_method, pattern, candidate in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                if route_method == method:
                    return candidate, match.groupdict()
                known = True
        if not known and not self._is_complete:
            return error_response(
                status=503, code="unavailable", message="the service is starting: see its log"
            )
        if known:
            return error_response(
                status=405, code="method-not-allowed", message=f"{method} is not offered at {path}"
            )
        return error_response(status=404, code="not-found", message=f"there is nothing at {path}")


def _pattern(path: str) -> re.Pattern[str]:
    start, rest = path, ""
    if (found := re.search(r"\{(\w+)\.\.\.\}$", path)) is not None:
        start, rest = path[: found.start()], f"(?P<{found[1]}>.+)"
    parts = re.split(r"\{(\w+)\}", start)
    return re.compile(
        "".join(
            f"(?P<{part}>[^/]+)" if position % 2 else re.escape(part)
            for position, part in enumerate(parts)
        )
        + rest
    )


def _probe(claim: Callable[[], bool]) -> Handler:
    async def probe(request: Request) -> Response:
        del request
        holds = claim()
        return Response(
            body=b"ok\n" if holds else b"not ok\n",
            status=200 if holds else 503,
            content_type="text/plain",
        )

    return probe


class TlsFiles:
    """Server certificate from files, which may be replaced while the server runs.

    ``context`` is created once and lives as long as the server. It hands each handshake to the
    context of the newest usable pair, which ``reload_if_changed`` re-creates: open connections
    continue undisturbed, and an old certificate never survives beside a new one of another key
    type.
    """

    def __init__(
        self,
        cert_file: str,
        key_file: str,
        *,
        client_ca_file: str = "",
        is_client_optional: bool = False,
    ) -> None:
        """Load the files now; with ``client_ca_file``, demand client certificates of that CA.

        If ``is_client_optional``, clients without a certificate are served too; one of another CA
        ends the handshake in both cases.
        """
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        self._verify = ssl.CERT_OPTIONAL if is_client_optional else ssl.CERT_REQUIRED
        self._seen = self._state()
        self._newest = self._load()
        # Called for each handshake, with or without a server name.
        self.context = self._load()
        self.context.sni_callback = self._use_newest

    def _use_newest(self, connection: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
        del name, context
        connection.context = self._newest

    def _state(self) -> tuple[tuple[int, int, int], ...]:
        names = [name for name in (self._cert_file, self._key_file, self._client_ca_file) if name]
        found = []
        for name in names:
            try:
                stat = os.stat(name)  # noqa: PTH116 - follows the symlinks Kubernetes swaps
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(found)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert_file, self._key_file, password=_no_password)
            if self._client_ca_file:
                context.verify_mode = self._verify
                context.load_verify_locations(self._client_ca_file)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise SettingsInvalid(
                field=f"certificate {self._cert_file} with key {self._key_file}",
                problem=str(error),
                fix="give readable PEM files, not encrypted, that belong together",
            ) from error
        return context

    def reload_if_changed(self) -> bool:
        """Load the files again when one changed; return True when it did.

        ``SettingsInvalid`` when they do not belong together; the old pair stays in use then.
        """
        state = self._state()
        if state == self._seen:
            return False
        self._newest = self._load()
        self._seen = state
        return True

    async def watch(self, *, interval_s: float = 5.0) -> None:
        """Check the files every ``interval_s`` until cancelled; a failed reload is retried."""
        while True:
            await anyio.sleep(interval_s)
            try:
                if self.reload_if_changed():
                    _log.info("certificate reloaded", extra={"cert_file": self._cert_file})
            except SettingsInvalid as error:
                _log.warning("certificate not reloaded", extra={"problem": str(error)})


def _no_password() -> str:
    # Without this, OpenSSL asks for the password of an encrypted key on the terminal.
    raise ValueError("the key is encrypted")


async def serve(
    app: HttpApp,
    host: str,
    port: int,
    tls: TlsFiles | None = None,
    grace_s: float = 10.0,
    *,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, then stop accepting; requests in flight have ``grace_s`` to end.

    For ``port = await group.start(serve, app, host, port)``: reports the bound port.
    """
    server = web.Server(_Adapter(app).handle, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=grace_s, handle_signals=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=None if tls is None else tls.context)
        try:
            await site.start()
        except OSError as error:
            raise SettingsInvalid(
                field=f"address {host}:{port}",
                problem=error.strerror or str(error),
                fix="choose an address of this machine and a free port, or port 0",
            ) from error
        bound = runner.addresses[0][1]
        _log.info("listening", extra={"host": host, "port": bound, "tls": tls is not None})
        task_status.started(bound)
        await anyio.sleep_forever()
    finally:
        with finish_within(grace_s + 1.0):
            await runner.cleanup()


class Listener(Struct, frozen=True, kw_only=True):
    """One address at which an application is served."""

    app: HttpApp
    host: str
    port: int
    tls: TlsFiles | None = None


class Servers:
    """Servers that start before the peers of their service are reached, and end before them.

    So the kubelet's probes are answered while the service waits for NATS or the API server.
    """

    def __init__(self) -> None:
        self._asked = anyio.Event()
        self._ended = anyio.Event()

    async def run(
        self,
        listeners: Sequence[Listener],
        grace_s: float,
        *,
        task_status: TaskStatus[list[int]] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until ``close``; reports the bound ports, in the order of ``listeners``."""
        async with background() as group:
            ports = [
                int(await group.start(serve, one.app, one.host, one.port, one.tls, grace_s))
                for one in listeners
            ]
            task_status.started(ports)
            await self._asked.wait()
        self._ended.set()

    async def close(self) -> None:
        """Stop accepting requests; returns when those in flight have ended."""
        self._asked.set()
        await self._ended.wait()


class _TooLarge(Exception):
    """The body exceeds the limit."""


class _Adapter:
    """Converts aiohttp's requests to ours."""

    def __init__(self, app: HttpApp) -> None:
        self._app = app

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        found = self._app.find(request.method, request.path)
        if isinstance(found, Response):
            return _answer(found)
        handler, params = found
        try:
            body = await self._body(request) if request.body_exists else b""
            outcome = await handler(
                Request(
                    method=request.method,
                    path=request.path,
                    query=request.query,
                    headers=request.headers,
                    body=body,
                    params=params,
                    peer_certificate=request.get_extra_info("peercert"),
                    remote=request.remote or "",
                )
            )
        except _TooLarge:
            return self._too_large()
        except HamiError as error:
            return _answer(_refusal(request, error))
        except Exception:  # noqa: BLE001 - one request must not end the server; logged, answered 500
            _log.exception("handler failed", extra={"path": request.path})
            return _answer(
                error_response(status=500, code="internal", message="internal error, see the log")
            )
        if isinstance(outcome, StreamedResponse):
            return await _stream(request, outcome)
        return _answer(outcome)

    async def _body(self, request: web.BaseRequest) -> bytes:
        limit = self._app.body_limit
        length = request.content_length
        if length is not None and length > limit:
            raise _TooLarge
        body = await request.content.readany()
        if len(body) == length:
            return body
        pieces = [body]
        size = len(body)
        while not request.content.at_eof():
            if size > limit:
                raise _TooLarge
            pieces.append(await request.content.readany())
            size += len(pieces[-1])
        if size > limit:
            raise _TooLarge
        return b"".join(pieces)

    def _too_large(self) -> web.Response:
        limit = self._app.body_limit
        answer = _answer(
            error_response(
                status=413,
                code="body-too-large",
                message=f"the body passes the limit of {limit} bytes; see setting http_body_limit",
                limit_bytes=limit,
            )
        )
        answer.force_close()
        return answer


def _refusal(request: web.BaseRequest, error: HamiError) -> Response:
    for error_type, status, code in CODES:
        if isinstance(error, error_type):
            return error_response(status=status, code=code, message=str(error))
    _log.error("handler failed", exc_info=error, extra={"path": request.path})
    return error_response(status=500, code="internal", message=str(error))


def _answer(response: Response) -> web.Response:
    headers = {"Content-Type": response.content_type, **response.headers}
    return web.Response(body=response.body, status=response.status, headers=headers)


async def _stream(request: web.BaseRequest, outcome: StreamedResponse) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": outcome.content_type, **outcome.headers})
    await answer.prepare(request)
    async with background() as group:
        group.start_soon(_cancel_without_peer, request, group.cancel_scope)
        try:
            async for chunk in outcome.chunks:
                with anyio.fail_after(STREAM_WRITE_S):
                    await answer.write(chunk)
            await answer.write_eof()
        except TimeoutError:
            # The peer does not read: an orderly end would wait for it, and keep what is buffered.
            _log.info("stream closed, its reader takes no data", extra={"path": request.path})
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            _log.debug("listener went away", extra={"path": request.path})
        finally:
            with finish_within(STREAM_WRITE_S):
                await outcome.chunks.aclose()
    return answer


async def _cancel_without_peer(request: web.BaseRequest, scope: anyio.CancelScope) -> None:
    """Cancel a stream soon after its peer has closed the connection.

    Without it, only the next piece would show that: a keep-alive, seconds later, while the stream
    occupies one of the caller's places.
    """
    while request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110 - aiohttp has no event for it
        await anyio.sleep(PEER_CHECK_S)
    scope.cancel()
