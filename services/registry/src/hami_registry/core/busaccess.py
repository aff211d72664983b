# SPDX-License-Identifier: Apache-2.0
"""Decides the bus permissions of a token's bearer (ADR 0013).

An agent's account gets the grant of the node on which the token's pod runs, as the API server
reports it; without a node it gets no grant, because any copy of the token could be in use. Another
ServiceAccount gets the grant of an integration, if the cluster lets it watch the virtual resource
``events.hami.io``. Times in Unix seconds. Independent of the bus and of Kubernetes.
"""

import base64
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from hami_common.bus import grants
from hami_common.errors import WireInvalid

INTEGRATION_GROUP = "hami.io"
INTEGRATION_RESOURCE = "events"
INTEGRATION_VERB = "watch"
LEAST_S = 2
"""A login that would end sooner is refused."""


class Admission(Struct, frozen=True, kw_only=True):
    """Identity and grant of an admitted client."""

    name: str
    grant: grants.Grant
    consumer: str = ""
    """Consumer of the event stream that must exist for it."""


class Refusal(Struct, frozen=True, kw_only=True):
    """Refusal of a login."""

    reason: str


def of_agent(account: tuple[str, str], nodes: Sequence[str]) -> Admission | Refusal:
    """Return the grant of an agent's account; ``nodes``: the token's node from the API server."""
    name = "/".join(account)
    if len(nodes) != 1 or not nodes[0]:
        return Refusal(reason=f"the token of {name} is not bound to a pod on a node")
    try:
        grant = grants.agent(nodes[0])
    except WireInvalid as error:
        return Refusal(reason=str(error))
    return Admission(name=f"agent of {nodes[0]}", grant=grant)


def of_integration(account: tuple[str, str], *, may_watch: bool) -> Admission | Refusal:
    """Return the grant of another ServiceAccount."""
    name = "/".join(account)
    if not may_watch:
        return Refusal(
            reason=f"{name} may not {INTEGRATION_VERB} {INTEGRATION_RESOURCE}.{INTEGRATION_GROUP}"
        )
    try:
        consumer = grants.consumer_of(*account)
    except WireInvalid as error:
        return Refusal(reason=str(error))
    return Admission(
        name=f"integration {name}", grant=grants.integration(consumer), consumer=consumer
    )


def ends_s(token: str, *, now_s: float, most_s: float, spread: float) -> int:
    """Return the end of a login: with its token, and at the latest after ``most_s``.

    ``spread`` (0 to 1) subtracts up to a quarter of ``most_s``: clients that log in together
    reconnect at different times. The token's own claims are trusted: the API server verified them.
    """
    latest = now_s + most_s * (1 - spread / 4)
    claims = _claims(token)
    end = claims.get("exp")
    return int(min(latest, end)) if isinstance(end, int | float) else int(latest)


def _claims(token: str) -> Mapping[str, object]:
    parts = token.split(".")
    try:
        body = msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, IndexError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
