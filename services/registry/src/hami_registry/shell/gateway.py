# SPDX-License-Identifier: Apache-2.0
"""Forwards requests to the scheduler, so that browsers have one address (ADR 42).

Only the routes of ``FORWARDED`` exist. Of the caller's headers only its credential and the type of
the body are sent on, and of the answer's headers only its type; hop-by-hop headers never cross.
The gate has authenticated and authorized the caller by the scheduler's rules; the scheduler does so
again with the same credential. A request is sent once: no connection is reused and nothing is
retried. Sizes in bytes, times in seconds.
"""

import io
import os
import ssl
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from msgspec import Struct

from hami_common.errors import HamiError, SettingsInvalid, Unavailable
from hami_common.roles import Route
from hami_common.runtime import gate
from hami_common.runtime.gate import Gate
from hami_common.runtime.httpd import MIB_BYTES, Handler, Request, Response
from hami_common.runtime.kubeauth import Caller
from hami_common.runtime.places import Places

FORWARDED: Final[tuple[Route, ...]] = (
    ("GET", "/v1/queues"),
    ("GET", "/v1/quotas"),
    ("GET", "/v1/policies"),
    ("POST", "/v1/resize"),
    ("GET", "/v1/whatif/pods/{namespace}/{pod}"),
    ("GET", "/v1/whatif/moments/{namespace}/{pod}"),
    ("POST", "/v1/whatif/simulate"),
    ("POST", "/v1/whatif/scale"),
    ("POST", "/v1/whatif/drain"),
    ("POST", "/v1/whatif/policy"),
    ("POST", "/v1/defrag"),
)
ANSWER_MOST: Final = 64 * MIB_BYTES
_SENT_ON: Final = ("Content-Type", gate.CONSOLE_HEADER, gate.SITE_HEADER)
_PEER: Final = "the scheduler"
_REDIRECTS: Final = range(300, 400)


class SchedulerAddress(Struct, frozen=True, kw_only=True):
    """Address of the scheduler and the files of the connection to it, from the settings."""

    url: str
    """Without path; empty: none."""
    ca_file: str = ""
    """PEM; empty: the system's."""
    cert_file: str = ""
    key_file: str = ""
    timeout_s: float

    def check(self, *, sends_tokens: bool) -> None:
        """Raise ``SettingsInvalid`` when the address or the files cannot be used."""
        if not self.url:
            return
        parts = urlsplit(self.url)
        is_plain = parts.scheme == "http"
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise SettingsInvalid(
                field="scheduler_url",
                problem=f"{self.url!r} is not http(s)://HOST[:PORT]",
                fix="give the address of the scheduler's API, without a path",
            )
        if is_plain and sends_tokens and not gate.is_loopback(parts.hostname):
            raise SettingsInvalid(
                field="scheduler_url",
                problem=f"{self.url} is reached over the network, where tokens would be readable",
                fix="give an https:// address",
            )
        if bool(self.cert_file) != bool(self.key_file):
            raise SettingsInvalid(
                field="scheduler_cert_file",
                problem="certificate and key belong together",
                fix="set scheduler_cert_file and scheduler_key_file, or neither",
            )
        if not is_plain:
            self.context()

    def context(self) -> ssl.SSLContext:
        """Return a new TLS context; ``SettingsInvalid`` when a file is not usable."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise SettingsInvalid(
                field="scheduler_ca_file, scheduler_cert_file or scheduler_key_file",
                problem=str(error),
                fix="give readable PEM files, not encrypted, that belong together",
            ) from error
        return context


class Gateway:
    """Handlers of the forwarded routes."""

    def __init__(
        self,
        address: SchedulerAddress,
        *,
        places: Places,
        proxied: Callable[[Request], Caller | None],
    ) -> None:
        """``places`` bounds the requests in flight; ``proxied`` names callers without a token."""
        self._address = address
        self._places = places
        self._proxied = proxied
        self._is_tls = address.url.startswith("https:")
        self._seen: tuple[tuple[int, int], ...] = ()
        self._context: ssl.SSLContext | None = None

    def guarded(self, gate_: Gate) -> dict[Route, Handler]:
        """Return the routes behind the scheduler's rules."""
        return gate_.guarded(dict.fromkeys(FORWARDED, self._forward))

    async def _forward(self, request: Request) -> Response:
        return await self.forward(request, request.path)

    async def forward(self, request: Request, path: str) -> Response:
        """Return the scheduler's answer to an authorized request, at another path of it."""
        if not self._address.url:
            raise Unavailable(
                peer=_PEER, detail="this registry does not know its address: set scheduler_url"
            )
        headers = self._headers(request)
        with self._places.hold(request.caller, is_operator=False):
            try:
                return await self._ask(request, path, headers)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                text = str(error) or type(error).__name__
                raise Unavailable(peer=_PEER, detail=f"{path}: {text}") from error

    def _headers(self, request: Request) -> list[tuple[str, str]]:
        found = request.headers
        headers = [(name, found[name]) for name in _SENT_ON if name in found]
        caller = self._proxied(request)
        if caller is None:
            if "Authorization" in found:
                headers.append(("Authorization", found["Authorization"]))
            return headers
        if not self._address.cert_file:
            raise Unavailable(
                peer=_PEER,
                detail="it does not know the users of the proxy: set scheduler_cert_file and "
                "scheduler_key_file here, and api.proxy_ca_file there",
            )
        headers.append((gate.USER_HEADER, caller.username))
        # The scheduler adds the reserved group again and refuses it in a header.
        named = (group for group in caller.groups if group != gate.AUTHENTICATED)
        return [*headers, *((gate.GROUP_HEADER, group) for group in named)]

    async def _ask(self, request: Request, path: str, headers: list[tuple[str, str]]) -> Response:
        # A new connection each time: a request on a reused one may have to be sent twice.
        connector = aiohttp.TCPConnector(force_close=True, ssl=self._tls())
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self._address.timeout_s, sock_connect=5.0),
                headers={"User-Agent": "hami-registry"},
                trust_env=False,
            ) as session,
            session.request(
                request.method,
                f"{self._address.url.rstrip('/')}{path}",
                params=_query(request.query),
                data=io.BytesIO(request.body) if request.body else None,
                headers=headers,
                allow_redirects=False,
            ) as answer,
        ):
            body = await _bounded(answer)
            if answer.status in _REDIRECTS:
                raise Unavailable(peer=_PEER, detail=f"it answered {answer.status}, a redirect")
            return Response(
                body=body,
                status=answer.status,
                content_type=answer.headers.get("Content-Type", "application/json"),
                headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
            )

    def _tls(self) -> ssl.SSLContext | bool:
        """Return the TLS context of the present files."""
        if not self._is_tls:
            return True
        address = self._address
        names = [name for name in (address.ca_file, address.cert_file, address.key_file) if name]
        seen = tuple(_state(name) for name in names)
        if self._context is None or seen != self._seen:
            try:
                self._context = address.context()
            except HamiError as error:
                raise Unavailable(peer=_PEER, detail=str(error)) from error
            self._seen = seen
        return self._context


def _query(query: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return all parameters, repeated ones too."""
    return list(query.items())


def _state(name: str) -> tuple[int, int]:
    try:
        stat = os.stat(name)  # noqa: PTH116 - follows the symlinks Kubernetes swaps
    except OSError:
        return (0, 0)
    return stat.st_ino, stat.st_mtime_ns


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > ANSWER_MOST:
            raise Unavailable(
                peer=_PEER, detail=f"its answer has more than {ANSWER_MOST // MIB_BYTES} MiB"
            )
    return bytes(body)
