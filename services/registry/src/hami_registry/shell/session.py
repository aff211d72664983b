# SPDX-License-Identifier: Apache-2.0
"""Names the caller, before and after a login (ADR 42)."""

from typing import Literal

from msgspec import Struct

from hami_common.runtime.gate import Gate, Route, everything
from hami_common.runtime.httpd import Handler, Request, Response, json_response
from hami_common.runtime.openapi import Operation


class Session(Struct, frozen=True, kw_only=True):
    """The caller, and how it is authenticated."""

    login: Literal["none", "token", "proxy"]
    """``none``: every caller is admitted; ``token``: a Kubernetes token is required; ``proxy``: an
    authenticating proxy names the caller.
    """
    user: str
    """Name of the user; empty when ``login`` is ``none``, and before a login."""
    sees_everything: bool
    """True when the caller may read nodes and the pods of all namespaces."""


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/session",
        name="session",
        text=(
            "The caller, and how callers are authenticated. A caller without a token gets an "
            "answer too, with an empty user."
        ),
        answer=Session,
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
        if not self._gate.is_closed:
            return Session(login="none", user="", sees_everything=True)
        caller = await self._gate.caller(request)
        if caller is None:
            return Session(login="token", user="", sees_everything=False)
        return Session(
            login="token" if self._gate.proxied(request) is None else "proxy",
            user=caller.username,
            sees_everything=await self._gate.may(caller, everything(request)),
        )
