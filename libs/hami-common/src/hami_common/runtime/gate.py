# SPDX-License-Identifier: Apache-2.0
"""Authorizes callers of HTTP handlers by the cluster's RBAC.

A caller presents its Kubernetes token (``Authorization: Bearer``). The table of routes
(``hami_common.roles``) names the rights that a request requires, in its namespace or in all; the
API server answers whether the caller has them. A stream is authorized again every
``STREAM_CHECK_S`` and ends when its reader loses a right. Without an API server every caller is
rejected.

Behind an authenticating proxy (``FrontProxy``, ADR 42) the proxy may name user and groups in
headers instead, as the front proxy of a Kubernetes API server does. The headers count only on a
connection whose client certificate the proxy's CA signed. Such a caller usually has a cookie at the
proxy, so a request that changes something must come from a page of the own origin. A request
without any credential (no gate) must not come from a foreign page either.
"""

import ipaddress
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from urllib.parse import urlsplit

import anyio
import msgspec
from msgspec import Struct

from hami_common.errors import Denied, HamiError, RequestInvalid, SettingsInvalid, Unauthenticated
from hami_common.events.codec import UNDECODABLE
from hami_common.roles import (
    EVERYTHING,
    OPEN,
    ROUTES,
    UNLISTED,
    Right,
    Route,
    Rule,
)
from hami_common.runtime.httpd import Handler, Request, Response, StreamedResponse
from hami_common.runtime.kubeauth import Access, Caller, KubeAuth
from hami_common.runtime.servingcertificate import common_name

STREAM_CHECK_S = 60.0
STREAM_END = b"event: end\ndata: {}\n\n"
_SCHEME = "bearer "
USER_HEADER = "X-Remote-User"
GROUP_HEADER = "X-Remote-Group"
CONSOLE_HEADER = "X-HAMi-Console"
"""Sent by the console with each request; a foreign page cannot set it."""
SITE_HEADER = "Sec-Fetch-Site"
"""Set by browsers: https://www.w3.org/TR/fetch-metadata/."""
SAME_ORIGIN = "same-origin"
_SAFE = ("GET", "HEAD")
_RESERVED = "system:"
AUTHENTICATED = "system:authenticated"
"""Group of every caller that is authenticated, as the API server adds it."""
_LONGEST_NAME = 256
_GROUPS_MOST = 256

_log = logging.getLogger(__name__)


class _InBody(Struct, frozen=True):
    namespace: str


_in_body = msgspec.json.Decoder(_InBody)
_object = msgspec.json.Decoder(dict[str, object])


def _namespace_of(rule: Rule, request: Request) -> str:
    """Return the namespace that the request is about; empty: all of them."""
    if rule.is_namespace_in_body:
        return _namespace_in(request.body)
    return request.params.get("namespace") or request.query.get("namespace", "")


def _accesses(rule: Rule, namespace: str, *, changes: bool = False) -> tuple[Access, ...]:
    rights = rule.rights if namespace else (*rule.rights, *rule.if_clusterwide)
    if changes:
        rights = (*rights, *rule.if_changing)
    return tuple(_access(right, namespace) for right in rights)


def _changes(rule: Rule, body: bytes) -> bool:
    """Return whether the body asks for a change; ``RequestInvalid`` when it is no JSON object."""
    if not rule.changes:
        return False
    try:
        fields = _object.decode(body)
    except UNDECODABLE as error:
        raise RequestInvalid(field="body", problem=str(error), fix="send a JSON object") from error
    return any(fields.get(name, False) is not False for name in rule.changes)


def _access(right: Right, namespace: str) -> Access:
    return Access(
        verb=right.verb,
        resource=right.resource,
        group=right.group,
        subresource=right.subresource,
        namespace="" if right.is_clusterwide else namespace,
    )


def _namespace_in(body: bytes) -> str:
    try:
        namespace = _in_body.decode(body).namespace
    except UNDECODABLE as error:
        raise RequestInvalid(
            field="body", problem=str(error), fix="send a JSON object with namespace and pod"
        ) from error
    if not namespace:
        raise RequestInvalid(field="namespace", problem="is empty", fix="name the pod's namespace")
    return namespace


_EVERYTHING = tuple(_access(right, "") for right in EVERYTHING)


class FrontProxy(Struct, frozen=True, kw_only=True):
    """An authenticating proxy before the service.

    Header names as of Kubernetes' front proxy:
    https://kubernetes.io/docs/reference/access-authn-authz/authentication/#authenticating-proxy.
    """

    names: Collection[str] = ()
    """Common names of its client certificate; empty: all that the CA signed."""
    user_header: str = USER_HEADER
    group_header: str = GROUP_HEADER

    def caller(self, request: Request) -> Caller | None:
        """Return the caller that the proxy names; ``None`` when no proxy sent the request.

        ``Unauthenticated`` when the headers are malformed, ``Denied`` when a page of another origin
        sent the request, or may have sent one that changes something.
        """
        certificate = request.peer_certificate
        if not certificate or (self.names and common_name(certificate) not in self.names):
            return None
        users = _values(request.headers, self.user_header)
        if not users:
            return None
        groups = _values(request.headers, self.group_header)
        if len(users) > 1 or len(groups) > _GROUPS_MOST:
            raise Unauthenticated(
                problem=f"the proxy sent {len(users)} users and {len(groups)} groups",
                fix=f"let it send one {self.user_header} and at most {_GROUPS_MOST} groups",
            )
        for name in (*users, *groups):
            if not _is_proxied_name(name):
                raise Unauthenticated(
                    problem=f"the proxy sent the user or group {name[:40]!r}",
                    fix=f"let it send names of 1 to {_LONGEST_NAME} characters that do not begin "
                    f"with {_RESERVED}",
                )
        _require_own_page(request)
        return Caller(username=users[0], groups=(*groups, AUTHENTICATED))


def _values(headers: Mapping[str, str], name: str) -> Sequence[str]:
    """Return all values of a header that may be repeated."""
    found = getattr(headers, "getall", None)
    if found is None:
        return (headers[name],) if name in headers else ()
    return tuple(found(name, ()))


def _is_proxied_name(name: str) -> bool:
    return 0 < len(name) <= _LONGEST_NAME and name.isprintable() and not name.startswith(_RESERVED)


def _require_own_page(request: Request) -> None:
    """Raise ``Denied`` when another page may have sent the request with the proxy's cookie."""
    if request.method in _SAFE:
        _refuse_foreign_pages(request)
        return
    site = request.headers.get(SITE_HEADER, "")
    if site == SAME_ORIGIN and CONSOLE_HEADER in request.headers:
        return
    raise Denied(
        peer="the service",
        detail=f"a request that changes something needs the header {CONSOLE_HEADER} and "
        f"{SITE_HEADER}: {SAME_ORIGIN}, as the console sends them",
        status=403,
    )


def _refuse_foreign_pages(request: Request) -> None:
    """Raise ``Denied`` when a browser sent the request for a page of another origin."""
    site = request.headers.get(SITE_HEADER, "")
    origin = request.headers.get("Origin", "")
    if site:
        is_foreign = site not in (SAME_ORIGIN, "none")
    else:
        is_foreign = bool(origin) and urlsplit(origin).netloc != request.headers.get("Host", "")
    if not is_foreign:
        return
    raise Denied(
        peer="the service",
        detail=f"a page of another origin ({(origin or site)[:100]}) sent the request",
        status=403,
    )


Credential = Callable[[], Awaitable[Caller]]
"""Returns the present owner of a credential; ``Unauthenticated`` once it is invalid."""


class Gate:
    """Guards the handlers of one server."""

    def __init__(self, auth: KubeAuth | None, proxy: FrontProxy | None = None) -> None:
        """Without ``auth`` every caller is admitted. ``proxy`` may identify callers too."""
        self._auth = auth
        self._proxy = proxy

    @property
    def is_closed(self) -> bool:
        """Return whether callers must authenticate."""
        return self._auth is not None

    def proxied(self, request: Request) -> Caller | None:
        """Return the caller whom the proxy names; ``None`` when it did not send the request."""
        return None if self._auth is None or self._proxy is None else self._proxy.caller(request)

    async def caller(self, request: Request) -> Caller | None:
        """Return the authenticated caller; ``None`` when the request has no credential.

        ``Unauthenticated`` when the credential is invalid.
        """
        if self._auth is None:
            return None
        if "Authorization" not in request.headers and self.proxied(request) is None:
            return None
        return await _credential(self._auth, self._proxy, request)()

    async def sees_everything(self, caller: Caller) -> bool:
        """Return whether the caller may read devices, and the allocations of all namespaces."""
        return self._auth is None or await _may(self._auth, caller, _EVERYTHING)

    async def routes_of(self, caller: Caller | None, namespace: str) -> list[Route]:
        """Return the routes that the caller may call for a namespace, empty: for all.

        A further namespace of the same caller costs one review for each right that has one.
        """
        if self._auth is None:
            return sorted((*OPEN, *ROUTES))
        if caller is None:
            return sorted(OPEN)
        needed = {route: frozenset(_accesses(rule, namespace)) for route, rule in ROUTES.items()}
        every = frozenset[Access]().union(*needed.values())
        of_all = frozenset(access for access in every if not access.namespace)
        has = await self._auth.granted(caller, of_all)
        has |= await self._auth.granted(caller, every - of_all)
        return sorted((*OPEN, *(route for route, rights in needed.items() if rights <= has)))

    def guarded(self, routes: Mapping[Route, Handler]) -> dict[Route, Handler]:
        """The same routes, each behind its rule."""
        auth = self._auth
        if auth is None:
            return {
                route: handler if route[0] in _SAFE else _own_pages(handler)
                for route, handler in routes.items()
            }
        return {
            route: _guard(auth, self._proxy, handler, ROUTES.get(route, UNLISTED))
            for route, handler in routes.items()
        }


def _own_pages(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response | StreamedResponse:
        _refuse_foreign_pages(request)
        return await handler(request)

    return guarded


def _guard(auth: KubeAuth, proxy: FrontProxy | None, handler: Handler, rule: Rule) -> Handler:
    async def guarded(request: Request) -> Response | StreamedResponse:
        credential = _credential(auth, proxy, request)
        namespace, changes = _namespace_of(rule, request), _changes(rule, request.body)
        needed = _accesses(rule, namespace, changes=changes)
        caller = await _judge(auth, credential, needed)
        request.caller = _counted_as(caller)
        request.sees_everything = partial(_may, auth, caller, _EVERYTHING)
        outcome = await handler(request)
        if isinstance(outcome, Response):
            return outcome
        return StreamedResponse(
            chunks=_checked(outcome.chunks, auth, credential, needed),
            content_type=outcome.content_type,
            headers=outcome.headers,
        )

    return guarded


def _credential(auth: KubeAuth, proxy: FrontProxy | None, request: Request) -> Credential:
    """Return the credential of a request: the proxy's headers, else its token."""
    named = None if proxy is None else proxy.caller(request)
    token = "" if named is not None else token_of(request)

    async def owner() -> Caller:
        caller = named or await auth.caller(token)
        if caller is None:
            raise Unauthenticated(
                problem="the token is not good, or not any more", fix="log in to the cluster again"
            )
        return caller

    return owner


async def _judge(auth: KubeAuth, credential: Credential, needed: Sequence[Access]) -> Caller:
    caller = await credential()
    for access in needed:
        if not await auth.may(caller, access):
            raise Denied(peer="the cluster", detail=_refusal(caller, access), status=403)
    return caller


async def _may(auth: KubeAuth, caller: Caller, needed: Sequence[Access]) -> bool:
    for access in needed:
        if not await auth.may(caller, access):
            return False
    return True


def _counted_as(caller: Caller) -> str:
    """Key for per-caller limits: a namespace can create any number of ServiceAccounts."""
    account = caller.account
    return caller.username if account is None else f"system:serviceaccounts:{account[0]}"


def _refusal(caller: Caller, access: Access) -> str:
    right = Right(
        verb=access.verb,
        resource=access.resource,
        group=access.group,
        subresource=access.subresource,
    )
    where = f"in namespace {access.namespace}" if access.namespace else "in the whole cluster"
    return f"{caller.username} may not {right.text} {where}"


def token_of(request: Request) -> str:
    """Return the caller's Kubernetes token; ``Unauthenticated`` without one."""
    value = request.headers.get("Authorization", "")
    if not value.lower().startswith(_SCHEME):
        raise Unauthenticated(
            problem="no token was given", fix="send Authorization: Bearer <Kubernetes token>"
        )
    return value[len(_SCHEME) :].strip()


async def _checked(
    chunks: AsyncGenerator[bytes, None],
    auth: KubeAuth,
    credential: Credential,
    needed: Sequence[Access],
) -> AsyncGenerator[bytes, None]:
    check_at = anyio.current_time() + STREAM_CHECK_S
    try:
        async for chunk in chunks:
            if anyio.current_time() >= check_at:
                try:
                    await _judge(auth, credential, needed)
                except HamiError as error:
                    _log.info("stream ended", extra={"problem": str(error)})
                    yield STREAM_END
                    return
                check_at = anyio.current_time() + STREAM_CHECK_S
            yield chunk
    finally:
        await chunks.aclose()


def require_private(*, host: str, field: str, has_tls: bool) -> None:
    """Refuse settings under which tokens would cross the network as plain text."""
    if has_tls or is_loopback(host):
        return
    raise SettingsInvalid(
        field=field,
        problem=f"{host} is reached over the network, where tokens would be readable",
        fix="listen on 127.0.0.1, or give a certificate by tls_cert_file and tls_key_file",
    )


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
