# SPDX-License-Identifier: Apache-2.0
"""The simulation's own paths, `/hami-sim/…`: faults, watches, history and audit over HTTP.

They do over HTTP what tests in the same process do through `ApiServer`; only the admin may.
"""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from hami_sim.apiserver import errors
from hami_sim.apiserver.auth import ADMIN_GROUP, User
from hami_sim.apiserver.faults import Action, Fault, Match
from hami_sim.apiserver.forms import json_response, read_body
from hami_sim.apiserver.state import State
from hami_sim.apiserver.watches import Watches

PREFIX: Final = "/hami-sim/"


class _WireFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault as another process sends it: `Fault` without its function."""

    action: Action
    match: Match = Match()
    delay_s: float = 0.0
    code: int = 503
    message: str = "injected fault"
    retry_after_s: int | None = None
    times: int = 1


class _WireDrop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The watches that another process wants ended."""

    match: Match = Match()
    cut: bool = False


async def serve(state: State, watches: Watches, request: web.Request, user: User) -> web.Response:
    """Serve one request on a path of the simulation."""
    if ADMIN_GROUP not in user.groups:
        raise errors.forbidden(request.path, "", "only the admin controls the simulation")
    word = request.path.removeprefix(PREFIX)
    match request.method, word:
        case "GET", "audit":
            entries = [msgspec.to_builtins(entry) for entry in state.audit]
            return json_response({"items": entries})
        case "DELETE", "faults":
            state.faults.clear()
            return json_response(errors.success_status())
        case "POST", "forget-history":
            state.store.forget_history()
            return json_response(errors.success_status())
        case "POST", ("faults" | "drop-watches"):
            body = await read_body(request, max_bytes=state.settings.max_body_bytes, optional=True)
            return _change(state, watches, word, body or {})
        case _:
            raise errors.path_not_found()


def _change(state: State, watches: Watches, word: str, body: object) -> web.Response:
    try:
        if word == "faults":
            wire = msgspec.convert(body, _WireFault)
            state.faults.add(Fault(**msgspec.structs.asdict(wire)))
            return json_response(errors.success_status(), code=201)
        wish = msgspec.convert(body, _WireDrop)
    except msgspec.ValidationError as error:
        raise errors.bad_request(str(error)) from error
    return json_response({"dropped": watches.drop(wish.match, cut=wish.cut)})
