# SPDX-License-Identifier: Apache-2.0
"""Callers of the registry's API share its places: none of them can lock the others out."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest

from hami_common.runtime.kubeauth import Access, Caller, KubeAuth
from hami_common.runtime.natsio import connect, ensure_bus
from hami_sim.natsd import NatsServer
from tests.support.registry import RunningRegistry, run_registry

pytestmark = pytest.mark.anyio

STREAMS = 256
"""As many as a replica serves."""
TENANT = "system:serviceaccount:tenant"


class Reviews:
    """The API server's part: a token is its owner's name; operators may read everything."""

    async def caller(self, token: str) -> Caller:
        return Caller(username=token)

    async def may(self, caller: Caller, access: Access) -> bool:
        return caller.username.startswith("operator") or access.namespace == "tenant"


@asynccontextmanager
async def guarded_registry(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[RunningRegistry]:
    """A registry that asks for tokens, on loopback."""
    reviews = Reviews()

    async def caller(_: KubeAuth, token: str) -> Caller:
        return await reviews.caller(token)

    async def may(_: KubeAuth, who: Caller, access: Access) -> bool:
        return await reviews.may(who, access)

    monkeypatch.setattr(KubeAuth, "caller", caller)
    monkeypatch.setattr(KubeAuth, "may", may)
    async with connect([nats.url], name="test") as bus:
        await ensure_bus(bus)
        async with run_registry(nats.url, auth="kubernetes", **settings) as registry:
            yield registry


class Watchers:
    """Streams that are open."""

    def __init__(self, http: aiohttp.ClientSession, stack: AsyncExitStack, url: str) -> None:
        self._http = http
        self._stack = stack
        self._url = url

    async def open(self, token: str, query: str = "") -> tuple[int, str]:
        """Begin a stream that stays open; its status, and the text of a refusal."""
        answer = await self._stack.enter_async_context(
            self._http.get(
                f"{self._url}/v1/watch{query}", headers={"Authorization": f"Bearer {token}"}
            )
        )
        if answer.status != 200:
            return answer.status, await answer.text()
        with anyio.fail_after(20):
            await answer.content.readline()
        return 200, ""

    async def open_many(self, token: str, amount: int, query: str) -> Counter[int]:
        return Counter([(await self.open(token, query))[0] for _ in range(amount)])


@asynccontextmanager
async def watching(registry: RunningRegistry) -> AsyncIterator[Watchers]:
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        AsyncExitStack() as stack,
    ):
        yield Watchers(http, stack, registry.url)


async def test_one_token_never_takes_the_last_place_of_an_operator(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        guarded_registry(nats_server, monkeypatch) as registry,
        watching(registry) as watchers,
    ):
        taken = await watchers.open_many(f"{TENANT}:a", STREAMS, "?namespace=tenant")
        assert (await watchers.open("operator"))[0] == 200
        assert taken[200] <= STREAMS // 8, "one caller has a small part of the places"
        assert taken[200] >= 1
        assert taken[429] == STREAMS - taken[200]


async def test_refusal_names_the_limit_and_the_fix(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        guarded_registry(nats_server, monkeypatch, listener_limit_per_caller=2) as registry,
        watching(registry) as watchers,
    ):
        await watchers.open_many(f"{TENANT}:a", 2, "?namespace=tenant")
        status, text = await watchers.open(f"{TENANT}:a", "?namespace=tenant")
        assert status == 429
        assert "too-many-requests" in text
        assert "2 per caller" in text
        assert "listener_limit_per_caller" in text


async def test_accounts_of_one_namespace_share_one_limit(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        guarded_registry(nats_server, monkeypatch, listener_limit_per_caller=3) as registry,
        watching(registry) as watchers,
    ):
        opened = [
            (await watchers.open(f"{TENANT}:account-{number}", "?namespace=tenant"))[0]
            for number in range(6)
        ]
        assert Counter(opened) == {200: 3, 429: 3}


async def test_many_tenants_together_leave_places_for_operators(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"listener_limit": 8, "listener_reserve": 2, "listener_limit_per_caller": 4}
    async with (
        guarded_registry(nats_server, monkeypatch, **limits) as registry,
        watching(registry) as watchers,
    ):
        opened = [
            (await watchers.open(f"user-{number}", "?namespace=tenant"))[0] for number in range(8)
        ]
        assert Counter(opened) == {200: 6, 503: 2}
        assert [(await watchers.open("operator"))[0] for _ in range(3)] == [200, 200, 503]
