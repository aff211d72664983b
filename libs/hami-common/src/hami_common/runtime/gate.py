# SPDX-License-Identifier: Apache-2.0
"""Authorizes callers of HTTP handlers by what the cluster lets them read with kubectl.

A caller presents its Kubernetes token (``Authorization: Bearer``). For each route a rule names the
required permissions on the Kubernetes API: read the pods of the requested namespace, read nodes, or
both everywhere. A route without a rule requires all of them. A stream is authorized again every
``STREAM_CHECK_S`` and ends when its reader loses the permission. Without an API server every caller
is rejected.
"""

import ipaddress
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial

import anyio
import msgspec
from msgspec import Struct

from hami_common.errors import Denied, HamiError, RequestInvalid, SettingsInvalid, Unauthenticated
from hami_common.events.codec import UNDECODABLE
from hami_common.runtime.httpd import Handler, Request, Response, StreamedResponse
from hami_common.runtime.kubeauth import Access, Caller, KubeAuth

STREAM_CHECK_S = 60.0
STREAM_END = b"event: end\ndata: {}\n\n"
_SCHEME = "bearer "

Rule = Callable[[Request], Sequence[Access]]
Route = tuple[str, str]

_log = logging.getLogger(__name__)
_NODES = Access(verb="get", resource="nodes")


def nodes(request: Request) -> Sequence[Access]:
    """Rule for objects without namespace: nodes and devices."""
    del request
    return (_NODES,)


def everything(request: Request) -> Sequence[Access]:
    """Rule for nodes and the pods of all namespaces."""
    del request
    return (_NODES, Access(verb="get", resource="pods"))


def pods(request: Request) -> Sequence[Access]:
    """Rule for the pods of the namespace in the path or query; without one, of all namespaces."""
    namespace = request.params.get("namespace") or request.query.get("namespace", "")
    return (Access(verb="get", resource="pods", namespace=namespace),)


class _OfPod(Struct, frozen=True):
    namespace: str


_of_pod = msgspec.json.Decoder(_OfPod)


def resizes_pod(request: Request) -> Sequence[Access]:
    """Rule for changing the resources of a pod that the body names."""
    try:
        namespace = _of_pod.decode(request.body).namespace
    except UNDECODABLE as error:
        raise RequestInvalid(
            field="body", problem=str(error), fix="send a JSON object with namespace and pod"
        ) from error
    if not namespace:
        raise RequestInvalid(field="namespace", problem="is empty", fix="name the pod's namespace")
    return (Access(verb="patch", resource="pods", subresource="resize", namespace=namespace),)


class Gate:
    """Guards the handlers of one server."""

    def __init__(self, auth: KubeAuth | None) -> None:
        """Without ``auth`` every caller is admitted."""
        self._auth = auth

    @property
    def is_closed(self) -> bool:
        """Return whether callers must authenticate."""
        return self._auth is not None

    async def caller(self, request: Request) -> Caller | None:
        """Return the authenticated caller; ``None`` when the request has no credential.

        ``Unauthenticated`` when the credential is invalid.
        """
        if self._auth is None or "Authorization" not in request.headers:
            return None
        return await _judge(self._auth, _token(request), ())

    async def may(self, caller: Caller, needed: Sequence[Access]) -> bool:
        """Return whether the caller has all these permissions."""
        return self._auth is None or await _may(self._auth, caller, needed)

    def guarded(
        self, routes: Mapping[Route, Handler], rules: Mapping[Route, Rule]
    ) -> dict[Route, Handler]:
        """The same routes, each behind its rule."""
        auth = self._auth
        if auth is None:
            return dict(routes)
        return {
            route: _guard(auth, handler, rules.get(route, everything))
            for route, handler in routes.items()
        }


def _guard(auth: KubeAuth, handler: Handler, rule: Rule) -> Handler:
    async def guarded(request: Request) -> Response | StreamedResponse:
        token = _token(request)
        needed = rule(request)
        caller = await _judge(auth, token, needed)
        request.caller = _counted_as(caller)
        request.sees_everything = partial(_may, auth, caller, everything(request))
        outcome = await handler(request)
        if isinstance(outcome, Response):
            return outcome
        return StreamedResponse(
            chunks=_checked(outcome.chunks, auth, token, needed),
            content_type=outcome.content_type,
            headers=outcome.headers,
        )

    return guarded


async def _judge(auth: KubeAuth, token: str, needed: Sequence[Access]) -> Caller:
    caller = await auth.caller(token)
    if caller is None:
        raise Unauthenticated(
            problem="the token is not good, or not any more", fix="log in to the cluster again"
        )
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
    what = f"{access.resource}/{access.subresource}" if access.subresource else access.resource
    where = f"in namespace {access.namespace}" if access.namespace else "in the whole cluster"
    return f"{caller.username} may not {access.verb} {what} {where}"


def _token(request: Request) -> str:
    value = request.headers.get("Authorization", "")
    if not value.lower().startswith(_SCHEME):
        raise Unauthenticated(
            problem="no token was given", fix="send Authorization: Bearer <Kubernetes token>"
        )
    return value[len(_SCHEME) :].strip()


async def _checked(
    chunks: AsyncGenerator[bytes, None], auth: KubeAuth, token: str, needed: Sequence[Access]
) -> AsyncGenerator[bytes, None]:
    check_at = anyio.current_time() + STREAM_CHECK_S
    try:
        async for chunk in chunks:
            if anyio.current_time() >= check_at:
                try:
                    await _judge(auth, token, needed)
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
    if has_tls or _is_loopback(host):
        return
    raise SettingsInvalid(
        field=field,
        problem=f"{host} is reached over the network, where tokens would be readable",
        fix="listen on 127.0.0.1, or give a certificate by tls_cert_file and tls_key_file",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
