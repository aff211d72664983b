# SPDX-License-Identifier: Apache-2.0
"""Cordons devices for the console, with the caller's own token (ADR 42).

The API server authorizes the patch of the node, and its audit log names the caller. The registry's
own account is used only where ``auth`` is ``none``.
"""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
from msgspec import Struct

from hami_common.apipath import checked_name
from hami_common.errors import Denied, NotFound, RequestInvalid, Unauthenticated, Unavailable
from hami_common.events.codec import UNDECODABLE
from hami_common.ports import Clock, KubeApi
from hami_common.roles import Route
from hami_common.runtime import gate
from hami_common.runtime.devicecordon import (
    REASON_LENGTH_MOST,
    CordonChange,
    Cordoned,
    change_cordon,
)
from hami_common.runtime.gate import Gate
from hami_common.runtime.httpd import Handler, Request, Response, json_response
from hami_common.runtime.openapi import Operation
from hami_registry.core.projection import Projection

_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_UNAUTHORIZED = 401


class CordonRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Desired state of one device, or of all devices of a node."""

    node: str
    cordoned: bool
    device: str = ""
    """UUID; empty: all devices that the node has now."""
    reason: str = ""
    """Recorded for other operators, at most 500 characters."""


class CordonAnswer(Struct, frozen=True, kw_only=True):
    """Devices of a node after a cordon or uncordon."""

    items: tuple[Cordoned, ...]


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/cordon",
        name="cordon",
        method="post",
        text=(
            "Mark devices unschedulable for new pods, or schedulable again; running pods stay. "
            "Writes annotations of the node with the caller's token, which needs get and patch of "
            "nodes."
        ),
        body=CordonRequest,
        answer=CordonAnswer,
        errors={
            401: "The token is missing, or the API server rejects it.",
            403: "The API server denies the caller get or patch of nodes.",
            404: "No such node or device.",
        },
    ),
)
_decoder = msgspec.json.Decoder(CordonRequest)

ConnectAs = Callable[[str], AbstractAsyncContextManager[KubeApi]]
"""Returns a client of the API server with a token."""


class CordonApi:
    """Handler of the operation."""

    def __init__(
        self,
        *,
        projection: Projection,
        connect_as: ConnectAs,
        own: Callable[[], KubeApi | None],
        is_open: bool,
        clock: Clock,
    ) -> None:
        """``own`` is the registry's own client, used without a token if ``is_open``."""
        self._projection = projection
        self._connect_as = connect_as
        self._own = own
        self._is_open = is_open
        self._clock = clock

    def guarded(self, gate_: Gate) -> dict[Route, Handler]:
        """Return the route behind its rule."""
        return gate_.guarded({("POST", "/v1/cordon"): self._cordon})

    async def _cordon(self, request: Request) -> Response:
        wanted = _decoded(request.body)
        change = CordonChange(
            uuids=self._uuids(wanted),
            cordoned=wanted.cordoned,
            reason=wanted.reason.strip() if wanted.cordoned else "",
            now_s=self._clock.now_s(),
        )
        async with self._client(request) as api:
            try:
                done = await change_cordon(api, wanted.node, change)
            except Denied as error:
                if error.status != _UNAUTHORIZED:
                    raise
                raise Unauthenticated(
                    problem="the API server rejects the token", fix="log in to the cluster again"
                ) from error
        return json_response(CordonAnswer(items=done))

    def _uuids(self, wanted: CordonRequest) -> tuple[str, ...]:
        known = tuple(view.uuid for view in self._projection.devices(node=wanted.node))
        if not wanted.device:
            if not known:
                raise NotFound(what=f"a device of node {wanted.node}")
            return known
        # A device that has vanished must be uncordoned by name.
        if wanted.cordoned and wanted.device not in known:
            raise NotFound(what=f"device {wanted.device} of node {wanted.node}")
        return (wanted.device,)

    @asynccontextmanager
    async def _client(self, request: Request) -> AsyncIterator[KubeApi]:
        if "Authorization" in request.headers:
            async with self._connect_as(gate.token_of(request)) as api:
                yield api
            return
        if not self._is_open:
            raise Unauthenticated(
                problem="a cordon is written with your own Kubernetes token, and none was given",
                fix="let the proxy send Authorization too, or run: hamictl cordon device",
            )
        own = self._own()
        if own is None:
            raise Unavailable(peer="API server", detail="not reached yet")
        yield own


def _decoded(body: bytes) -> CordonRequest:
    try:
        wanted = _decoder.decode(body)
    except UNDECODABLE as error:
        raise RequestInvalid(
            field="body",
            problem=str(error),
            fix='send {"node": NAME, "device": UUID, "cordoned": true, "reason": TEXT}',
        ) from error
    checked_name(wanted.node, field="node")
    if wanted.device and _UUID.fullmatch(wanted.device) is None:
        raise RequestInvalid(
            field="device",
            problem=f"{wanted.device[:40]!r} is not the UUID of a device",
            fix="copy it from /v1/devices",
        )
    if len(wanted.reason) > REASON_LENGTH_MOST:
        raise RequestInvalid(
            field="reason",
            problem=f"has {len(wanted.reason)} characters",
            fix=f"give at most {REASON_LENGTH_MOST}",
        )
    return wanted
