# SPDX-License-Identifier: Apache-2.0
"""Names the caller, before and after a login (ADR 42)."""

from typing import Literal

from msgspec import Struct

from hami_common.apipath import checked_name
from hami_common.roles import Route
from hami_common.runtime.gate import Gate
from hami_common.runtime.httpd import Handler, Request, Response, json_response
from hami_common.runtime.openapi import Operation, Parameter


class Session(Struct, frozen=True, kw_only=True):
    """The caller, and how it is authenticated."""

    login: Literal["none", "token", "proxy"]
    """``none``: every caller is admitted; ``token``: a Kubernetes token is required; ``proxy``: an
    authenticating proxy names the caller.
    """
    user: str
    """Name of the user; empty when ``login`` is ``none``, and before a login."""
    sees_everything: bool
    """True when the caller may read devices, and the allocations of all namespaces."""
    routes: tuple[str, ...]
    """Routes that the caller may call for the requested namespace, or for all namespaces, as
    ``GET /v1/nodes``.
    """


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/session",
        name="session",
        text=(
            "The caller, and how callers are authenticated. A caller without a token gets an "
            "answer too, with an empty user."
        ),
        answer=Session,
        parameters=(
            Parameter(
                name="namespace",
                place="query",
                text="List the routes that the caller may call for this namespace.",
            ),
        ),
        errors={401: "The token is invalid or expired."},
    ),
)


class Sessions:
    """Handler of the operation."""

    def __init__(self, gate: Gate) -> None:
        """Answer as ``gate`` admits callers."""
        self._gate = gate

    def routes(self) -> dict[Route, Handler]:
        """Return the route; it needs no guard."""
        return {("GET", "/v1/session"): self._session}

    async def _session(self, request: Request) -> Response:
        response = json_response(await self._about(request))
        return Response(body=response.body, headers={"cache-control": "no-store"})

    async def _about(self, request: Request) -> Session:
        caller = await self._gate.caller(request)
        namespace = request.query.get("namespace", "")
        if namespace:
            checked_name(namespace, field="namespace")
        allowed = await self._gate.routes_of(caller, namespace)
        routes = tuple(" ".join(route) for route in allowed)
        if not self._gate.is_closed:
            return Session(login="none", user="", sees_everything=True, routes=routes)
        if caller is None:
            return Session(login="token", user="", sees_everything=False, routes=routes)
        return Session(
            login="token" if self._gate.proxied(request) is None else "proxy",
            user=caller.username,
            sees_everything=await self._gate.sees_everything(caller),
            routes=routes,
        )
