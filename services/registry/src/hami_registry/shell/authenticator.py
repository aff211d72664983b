# SPDX-License-Identifier: Apache-2.0
"""Answers the bus servers' authentication requests (auth callout, ADR 0013).

A server sends each login without a key of its own configuration to ``$SYS.REQ.USER.AUTH``, as a JWT
that it signed. The answer is a JWT of ours with the user's permissions or a reason to refuse.
Replicas share the requests. When the API server does not answer, the login is refused and the
client retries; existing logins stay valid until they end. Outside document: ADR-26 of the NATS
architecture. Tokens are never logged. Times in seconds.
"""

import logging
import random
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import msgspec
from msgspec import Struct

from hami_common.bus import grants, nkeys
from hami_common.errors import HamiError, WireInvalid
from hami_common.ports import Clock
from hami_common.runtime.kubeauth import NODE_NAME, Access, KubeAuth
from hami_common.runtime.natsio import Bus, Message
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.tasks import background
from hami_registry.core import busaccess
from hami_registry.core.busaccess import Admission, Refusal
from hami_registry.shell.metrics import Metrics

AUDIENCE = "nats-authorization-request"
_AT_ONCE = 64
"""Maximum concurrent requests; a server waits 5 s for an answer."""
_QUEUE = "authenticators"

_log = logging.getLogger(__name__)


class _ServerId(Struct, frozen=True):
    id: str


class _ConnectOptions(Struct, frozen=True):
    auth_token: str = ""


class _Asked(Struct, frozen=True):
    server_id: _ServerId
    user_nkey: str
    connect_opts: _ConnectOptions = _ConnectOptions()


class _Question(Struct, frozen=True):
    aud: str
    iss: str
    nats: _Asked


class Authenticator:
    """Admits agents and integrations by their Kubernetes tokens."""

    def __init__(
        self,
        *,
        issuer: nkeys.NKey,
        auth: KubeAuth,
        agents: frozenset[tuple[str, str]],
        make_consumer: Callable[[str], Awaitable[None]],
        login_s: float,
        clock: Clock,
        metrics: Metrics,
        quarantine: Quarantine,
    ) -> None:
        """``agents``: (namespace, name) of the agents' ServiceAccounts.

        ``make_consumer`` creates the consumer of an integration if it does not exist.
        """
        self._issuer = issuer
        self._auth = auth
        self._agents = agents
        self._make_consumer = make_consumer
        self._login_s = login_s
        self._clock = clock
        self._metrics = metrics
        self._quarantine = quarantine

    async def run(self, bus: Bus) -> None:
        """Answer indefinitely; ``bus`` is logged in to the account of the authenticator."""
        limiter = anyio.CapacityLimiter(_AT_ONCE)
        async with (
            bus.subscribe(grants.AUTH_REQUESTS, queue=_QUEUE) as questions,
            background() as group,
        ):
            async for message in questions:
                group.start_soon(self._isolated, bus, message, limiter)

    async def _isolated(self, bus: Bus, message: Message, limiter: anyio.CapacityLimiter) -> None:
        """Answer one login; after a failure its server, which waits a few seconds, refuses it."""
        await self._quarantine.once("login", partial(self._answer, bus, message, limiter))

    async def _answer(self, bus: Bus, message: Message, limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            try:
                asked = _question(message.data)
            except WireInvalid as error:
                _log.warning("auth request not understood", extra={"problem": str(error)})
                return
            answer = await self._judged(asked)
        await bus.publish(message.reply, answer.encode())

    async def _judged(self, asked: _Asked) -> str:
        now_s = self._clock.now_s()
        token = asked.connect_opts.auth_token
        try:
            outcome = await self._decide(token)
            if isinstance(outcome, Admission) and outcome.consumer:
                await self._make_consumer(outcome.consumer)
        except HamiError as error:
            _log.warning("login not judged", extra={"problem": str(error)})
            self._metrics.bus_logins.labels(outcome="error").inc()
            return self._response(asked, {"error": "not judged, come again"}, now_s=now_s)
        if isinstance(outcome, Admission):
            spread = random.random()  # noqa: S311 - spreads load, guards no secret
            ends = busaccess.ends_s(token, now_s=now_s, most_s=self._login_s, spread=spread)
            if ends >= now_s + busaccess.LEAST_S:
                self._metrics.bus_logins.labels(outcome="admitted").inc()
                _log.info("admitted to the bus", extra={"user": outcome.name, "ends_s": ends})
                user = self._issuer.jwt(
                    grants.claims(outcome.grant, name=outcome.name, ends_s=ends),
                    subject=asked.user_nkey,
                    issued_s=int(now_s),
                )
                return self._response(asked, {"jwt": user}, now_s=now_s)
            outcome = Refusal(reason=f"the token of {outcome.name} has ended")
        self._metrics.bus_logins.labels(outcome="refused").inc()
        _log.warning("refused at the bus", extra={"reason": outcome.reason})
        return self._response(asked, {"error": outcome.reason}, now_s=now_s)

    async def _decide(self, token: str) -> Admission | Refusal:
        if not token:
            return Refusal(reason="no token was given")
        caller = await self._auth.caller(token)
        if caller is None:
            return Refusal(reason="the token is not good, or not for the bus")
        account = caller.account
        if account is None:
            return Refusal(reason=f"{caller.username} is no ServiceAccount")
        if account in self._agents:
            return busaccess.of_agent(account, caller.extra.get(NODE_NAME, ()))
        wanted = Access(
            verb=busaccess.INTEGRATION_VERB,
            resource=busaccess.INTEGRATION_RESOURCE,
            group=busaccess.INTEGRATION_GROUP,
        )
        return busaccess.of_integration(account, may_watch=await self._auth.may(caller, wanted))

    def _response(self, asked: _Asked, decision: dict[str, str], *, now_s: float) -> str:
        claims = {
            "aud": asked.server_id.id,
            "nats": {"type": "authorization_response", "version": 2, **decision},
        }
        return self._issuer.jwt(claims, subject=asked.user_nkey, issued_s=int(now_s))


def _question(data: bytes) -> _Asked:
    what = "auth request"
    try:
        claims = nkeys.verified_claims(data.decode(), issuer_kind="server")
        question = msgspec.convert(claims, _Question)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise WireInvalid(what=what, problem="does not decode") from error
    if question.aud != AUDIENCE or question.iss != question.nats.server_id.id:
        raise WireInvalid(what=what, problem="is not of the server it names")
    return question.nats
