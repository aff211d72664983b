# SPDX-License-Identifier: Apache-2.0
"""Requests to the Kubernetes API (port ``KubeApi``) with raw bytes in both directions.

Each request has a deadline. Answers map to errors: 404 ``NotFound``, 409 ``Conflict``, other 4xx
``Denied`` with the status, 5xx and all network errors ``Unavailable``; 429 is retried after the
server's ``Retry-After``, a few times and never longer than ``RETRY_AFTER_MOST_S``, because the
server promises not to have acted. 401 logs in again once: tokens and certificates rotate. Outside
document: Kubernetes API conventions (v1.34). Times in seconds.
"""

import logging
import ssl
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import anyio
import msgspec

from hami_common.errors import (
    Conflict,
    Denied,
    HamiError,
    NotFound,
    Unavailable,
)
from hami_common.events.codec import UNDECODABLE, decode
from hami_common.ports import WatchEvent
from hami_common.runtime.kubeio.login import Login, log_in
from hami_common.runtime.kubeio.reflector import GONE, reflect
from hami_common.runtime.tasks import Backoff, Waiting, finish_within
from hami_common.units import real

PEER = "the Kubernetes API"
JSON_TYPE = "application/json"
METADATA_TYPE = f"{JSON_TYPE};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,{JSON_TYPE};q=0.9"
"""Requests lists without spec and status; a server without support returns whole objects."""
CLOSE_S = 2.0
"""Longest orderly end of the session."""
RETRY_AFTER_TRIES = 3
RETRY_AFTER_MOST_S = 5.0
READ_BUFFER_BYTES = 1 << 21
"""A watch event can be as large as the largest object (etcd: 1.5 MiB)."""

_log = logging.getLogger(__name__)


class _StatusView(msgspec.Struct, frozen=True):
    """``meta/v1`` Status, the fields that we read."""

    reason: str = ""
    message: str = ""


class _PageMetadata(msgspec.Struct, frozen=True, rename={"continue_": "continue"}):
    continue_: str = ""


class _PageView(msgspec.Struct, frozen=True):
    metadata: _PageMetadata = _PageMetadata()


_status_decoder = msgspec.json.Decoder(_StatusView)


class KubeClient:
    """Port ``KubeApi``; see ``connect``."""

    def __init__(
        self,
        *,
        kubeconfig: str,
        context: str = "",
        user_agent: str = "hami",
        request_timeout_s: float = 15.0,
        token: str = "",
    ) -> None:
        """With ``token``, present it alone: the login names only the server and its CA."""
        self._token = token
        self._kubeconfig = kubeconfig
        self._context = context
        self._user_agent = user_agent
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=5.0)
        self._login: Login | None = None
        self._session: aiohttp.ClientSession | None = None
        self._login_lock = anyio.Lock()
        self._login_count = 0
        self._tls_files: tuple[object, ...] = ()
        self._directory = tempfile.TemporaryDirectory(prefix="hami-login-")

    async def log_in(self) -> None:
        """Read the kubeconfig or the service account, and open a session with that login."""
        login = await log_in(self._kubeconfig, self._context, Path(self._directory.name))
        if self._token:
            login = login.with_token(self._token)
        self._login = login
        self._login_count += 1
        tls_files = _tls_files(login)
        if self._session is not None and tls_files == self._tls_files:
            return  # only the token is new: requests and watches in flight continue
        old = self._session
        self._tls_files = tls_files
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=100, ssl=_tls(login)),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": self._user_agent, "Accept": JSON_TYPE},
            read_bufsize=READ_BUFFER_BYTES,
            # It makes two threads look for a proxy and a .netrc before each request.
            trust_env=_is_proxied(login.host),
        )
        if old is not None:
            await old.close()

    async def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        self._directory.cleanup()

    async def get(self, path: str) -> bytes:
        """One object."""
        return await self._call("GET", path)

    async def list_pages(
        self, path: str, *, label_selector: str = "", field_selector: str = "", page_size: int = 500
    ) -> Sequence[bytes]:
        """All pages of a list; starts over when the list's continue token expires."""
        selectors = _selectors(label_selector, field_selector)
        while True:
            try:
                return [page async for page in self.pages(path, selectors, page_size=page_size)]
            except Denied as error:
                if error.status != GONE:
                    raise
                _log.info("list expired half way", extra={"path": path})

    async def metadata_pages(
        self, path: str, *, label_selector: str = "", page_size: int = 500
    ) -> AsyncIterator[bytes]:
        """See the port."""
        selectors = _selectors(label_selector, "")
        try:
            async for page in self.pages(
                path, selectors, page_size=page_size, accept=METADATA_TYPE
            ):
                yield page
        except Denied as error:
            if error.status != GONE:
                raise
            raise Unavailable(peer=PEER, detail=f"list {path} expired half way") from error

    async def create(self, path: str, body: bytes) -> bytes:
        """POST ``body``; returns the created object."""
        return await self._call("POST", path, body=body)

    async def patch(
        self, path: str, body: bytes, *, content_type: str = "application/merge-patch+json"
    ) -> bytes:
        """PATCH; returns the object."""
        return await self._call("PATCH", path, body=body, content_type=content_type)

    async def replace(self, path: str, body: bytes) -> bytes:
        """PUT; returns the object."""
        return await self._call("PUT", path, body=body)

    async def delete(self, path: str, *, body: bytes = b"") -> None:
        """DELETE, with optional DeleteOptions."""
        await self._call("DELETE", path, body=body)

    def list_watch(
        self, path: str, *, label_selector: str = "", field_selector: str = ""
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """See the port."""
        selectors = _selectors(label_selector, field_selector)
        return reflect(self, path, selectors)

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], *, idle_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Body of a GET piece by piece; ``Unavailable`` when no data arrives for ``idle_s``."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=idle_s)
        session, url, headers = await self._prepare(path, query)
        try:
            async with session.get(url, headers=headers, timeout=timeout) as answer:
                if answer.status == 401:  # noqa: PLR2004 - Unauthorized
                    await self._log_in_again(self._login_count)
                if answer.status >= 400:  # noqa: PLR2004 - error
                    raise _failure(f"GET {path}", answer, await answer.read())
                yield answer.content.iter_any()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(peer=PEER, detail=f"GET {path}: {_text(error)}") from error

    async def pages(
        self,
        path: str,
        selectors: Mapping[str, str],
        *,
        page_size: int = 500,
        accept: str = "",
    ) -> AsyncGenerator[bytes, None]:
        """Pages of one list, one at a time; ``Denied`` (410) if the continue token expires."""
        query = {"limit": str(page_size), **selectors}
        while True:
            page = await self._call("GET", path, query=query, accept=accept)
            token = decode(page, _PageView, what=f"page of {path}").metadata.continue_
            yield page
            if not token:
                return
            query["continue"] = token

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        content_type: str = JSON_TYPE,
        query: Mapping[str, str] | None = None,
        accept: str = "",
    ) -> bytes:
        what = f"{method} {path}"
        logged_in_again = False
        backoff = Backoff(first_s=0.2, most_s=RETRY_AFTER_MOST_S)
        tries = 0
        while True:
            login = self._login_count
            session, url, headers = await self._prepare(path, query or {})
            if body:
                headers["Content-Type"] = content_type
            if accept:
                headers["Accept"] = accept
            try:
                async with session.request(
                    method, url, data=body or None, headers=headers, timeout=self._timeout
                ) as answer:
                    data = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Unavailable(peer=PEER, detail=f"{what}: {_text(error)}") from error
            if answer.status < 400:  # noqa: PLR2004 - no error
                return data
            if answer.status == 401 and not logged_in_again:  # noqa: PLR2004 - Unauthorized
                logged_in_again = True
                await self._log_in_again(login)
                continue
            tries += 1
            if answer.status == 429 and tries < RETRY_AFTER_TRIES:  # noqa: PLR2004 - Too Many
                await anyio.sleep(_retry_after_s(answer, backoff))
                continue
            raise _failure(what, answer, data)

    async def _prepare(
        self, path: str, query: Mapping[str, str]
    ) -> tuple[aiohttp.ClientSession, str, dict[str, str]]:
        session, login = self._session, self._login
        if session is None or login is None:
            raise Unavailable(peer=PEER, detail="the client is closed")
        url = f"{login.host}{path}"
        if query:
            url += f"?{urlencode(query)}"
        headers: dict[str, str] = {}
        if authorization := await login.authorization():
            headers["Authorization"] = authorization
        return session, url, headers

    async def _log_in_again(self, login: int) -> None:
        async with self._login_lock:
            if self._login_count == login:
                _log.info("logging in again")
                await self.log_in()


def _selectors(label_selector: str, field_selector: str) -> dict[str, str]:
    query = {}
    if label_selector:
        query["labelSelector"] = label_selector
    if field_selector:
        query["fieldSelector"] = field_selector
    return query


def _is_proxied(host: str) -> bool:
    """True when the environment names a proxy for the API server."""
    url = urlsplit(host)
    return url.scheme in getproxies() and not proxy_bypass(url.hostname or "")


def _tls(login: Login) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=login.ca_file)
    if login.cert_file:
        context.load_cert_chain(login.cert_file, keyfile=login.key_file)
    if not login.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _tls_files(login: Login) -> tuple[object, ...]:
    """Inputs of the TLS context: another value needs another session."""
    paths = (login.ca_file, login.cert_file, login.key_file)
    contents = (Path(path).read_bytes() if path else b"" for path in paths)
    return login.host, login.verify, *contents


def _retry_after_s(answer: aiohttp.ClientResponse, backoff: Backoff) -> float:
    asked_s = real(answer.headers.get("Retry-After", ""), least=0.0, most=RETRY_AFTER_MOST_S)
    return min(backoff.next_s(), RETRY_AFTER_MOST_S) if asked_s is None else asked_s


def _failure(what: str, answer: aiohttp.ClientResponse, data: bytes) -> HamiError:
    return failure(what, answer.status, data)


def failure(what: str, status: int, data: bytes) -> HamiError:
    """Error for an answer with ``status`` whose body is a ``Status`` object or text."""
    try:
        view = _status_decoder.decode(data)
        detail = ": ".join(part for part in (view.reason, view.message) if part)
    except UNDECODABLE:
        detail = data[:200].decode("utf-8", "replace").strip()
    if status == 404:  # noqa: PLR2004 - Not Found
        return NotFound(what=f"{what} ({detail})" if detail else what)
    if status == 409:  # noqa: PLR2004 - Conflict
        return Conflict(what=what, detail=detail)
    if status == 429 or status >= 500:  # noqa: PLR2004 - Too Many Requests, server errors
        return Unavailable(peer=PEER, detail=f"{what}: status {status} {detail}".rstrip())
    return Denied(peer=PEER, detail=f"{what}: {detail}", status=status)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


@asynccontextmanager
async def connect(
    kubeconfig: str,
    *,
    context: str = "",
    user_agent: str = "hami",
    request_timeout_s: float = 15.0,
    start_timeout_s: float = 60.0,
) -> AsyncIterator[KubeClient]:
    """Client for the time of the block, once the server answers (no ``kubeconfig``: in cluster).

    ``SettingsInvalid`` when there is no usable login, ``Unavailable`` when the server does not
    answer in ``start_timeout_s`` (0: never).
    """
    client = KubeClient(
        kubeconfig=kubeconfig,
        context=context,
        user_agent=user_agent,
        request_timeout_s=request_timeout_s,
    )
    try:
        await client.log_in()
        await _wait_for_answer(client, start_timeout_s)
        yield client
    finally:
        with finish_within(CLOSE_S):  # also when cancelled: the login's files must be removed
            await client.close()


@asynccontextmanager
async def connect_as(
    token: str, kubeconfig: str, *, user_agent: str = "hami", request_timeout_s: float = 15.0
) -> AsyncIterator[KubeClient]:
    """Client with the token of another user for the time of the block; does not try the server.

    The server is that of ``kubeconfig``; none of its credentials are presented.
    """
    client = KubeClient(
        kubeconfig=kubeconfig,
        user_agent=user_agent,
        request_timeout_s=request_timeout_s,
        token=token,
    )
    try:
        await client.log_in()
        yield client
    finally:
        with finish_within(CLOSE_S):
            await client.close()


async def _wait_for_answer(client: KubeClient, start_timeout_s: float) -> None:
    backoff = Backoff(first_s=0.1, most_s=2.0)
    waiting = Waiting(PEER, start_timeout_s)
    with anyio.move_on_after(waiting.limit_s):
        while True:
            try:
                await client.get("/version")
            except Unavailable as error:
                waiting.note(error.detail)
                await backoff.wait()
            except HamiError:
                return  # it answers; the caller handles refusals
            else:
                return
    raise Unavailable(peer=PEER, detail=f"{waiting.problem} (waited {start_timeout_s:g} s)")
