# SPDX-License-Identifier: Apache-2.0
"""Sessions: name, login and view of a caller."""

from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict

from hami_common import roles
from hami_common.errors import RequestInvalid, Unauthenticated
from hami_common.runtime.gate import FrontProxy, Gate
from hami_common.runtime.httpd import Request, Response
from hami_common.runtime.kubeauth import KubeAuth
from hami_registry.shell.session import Session, Sessions
from tests.support.manualclock import ManualClock

pytestmark = pytest.mark.anyio
OPEN = ("GET /v1/session", "GET /v1/skus")
ALL = tuple(" ".join(route) for route in sorted(roles.OPEN | roles.ROUTES.keys()))


class Cluster:
    """An API server that knows the users ``admin`` and ``tenant``, whose tokens are their names.

    The tenant may get the allocations of ``team-a``.
    """

    def __init__(self) -> None:
        self.reviews: list[dict[str, str]] = []

    async def create(self, path: str, body: bytes) -> bytes:
        spec = msgspec.json.decode(body)["spec"]
        if path.endswith("tokenreviews"):
            known = spec["token"] in {"admin", "tenant"}
            user = {"username": spec["token"]} if known else {}
            return msgspec.json.encode({"status": {"authenticated": known, "user": user}})
        about = spec["resourceAttributes"]
        self.reviews.append(about)
        is_own = about.get("namespace") == "team-a" and about["resource"] == "allocations"
        return msgspec.json.encode({"status": {"allowed": spec["user"] == "admin" or is_own}})


async def session(gate: Gate, *, namespace: str = "", **headers: str) -> Session:
    handler = Sessions(gate).routes()["GET", "/v1/session"]
    answer = await handler(
        Request(
            method="GET",
            path="/v1/session",
            query={"namespace": namespace} if namespace else {},
            headers=CIMultiDict(headers),
            body=b"",
            params={},
        )
    )
    assert isinstance(answer, Response)
    assert answer.headers["cache-control"] == "no-store"
    return msgspec.json.decode(answer.body, type=Session)


def closed() -> Gate:
    kube: Any = Cluster()
    return Gate(KubeAuth(lambda: kube, clock=ManualClock()))


async def test_open_api_needs_no_login() -> None:
    expected = Session(login="none", user="", sees_everything=True, routes=ALL)
    assert await session(Gate(None)) == expected
    assert await session(Gate(None), Authorization="Bearer whatever") == expected


async def test_caller_without_a_token_learns_that_one_is_required() -> None:
    expected = Session(login="token", user="", sees_everything=False, routes=OPEN[:1])
    assert await session(closed()) == expected
    assert await session(closed(), namespace="team-a") == expected


async def test_caller_learns_its_name_and_view() -> None:
    for user in ("admin", "tenant"):
        found = await session(closed(), Authorization=f"Bearer {user}")
        sees, routes = user == "admin", ALL if user == "admin" else OPEN
        assert found == Session(login="token", user=user, sees_everything=sees, routes=routes)


async def test_caller_learns_the_routes_of_a_namespace() -> None:
    found = await session(closed(), namespace="team-a", Authorization="Bearer tenant")
    assert "GET /v1/allocations" in found.routes
    assert "GET /v1/queues" not in found.routes
    assert "GET /v1/fleet" not in found.routes
    other = await session(closed(), namespace="team-b", Authorization="Bearer tenant")
    assert other.routes == OPEN


async def test_further_namespace_costs_the_reviews_of_that_namespace_alone() -> None:
    cluster, clock = Cluster(), ManualClock()
    kube: Any = cluster
    gate = Gate(KubeAuth(lambda: kube, clock=clock))
    await session(gate, namespace="team-a", Authorization="Bearer tenant")
    await clock.advance(5.0)  # refusals of requests are asked again after 2 s
    await session(gate, Authorization="Bearer tenant")
    cluster.reviews.clear()
    for name in ("team-b", "team-c", "team-b"):
        await session(gate, namespace=name, Authorization="Bearer tenant")
    assert {one.get("namespace", "") for one in cluster.reviews} == {"team-b", "team-c"}
    namespaced = {
        right for rule in roles.ROUTES.values() for right in rule.rights if not right.is_clusterwide
    }
    assert len(cluster.reviews) == 2 * len(namespaced) == 6
    await clock.advance(6.0)
    cluster.reviews.clear()
    await session(gate, namespace="team-b", Authorization="Bearer tenant")
    assert all(one.get("namespace", "") == "" for one in cluster.reviews)


async def test_namespace_that_cannot_exist_is_refused() -> None:
    with pytest.raises(RequestInvalid):
        await session(closed(), namespace="Team A", Authorization="Bearer tenant")


@pytest.mark.parametrize("value", ["Bearer forged", "Bearer ", "Basic YWRtaW46", ""])
async def test_invalid_credential_is_refused(value: str) -> None:
    with pytest.raises(Unauthenticated):
        await session(closed(), Authorization=value)


async def test_caller_whom_the_proxy_names_learns_so() -> None:
    kube: Any = Cluster()
    gate = Gate(KubeAuth(lambda: kube, clock=ManualClock()), FrontProxy())
    handler = Sessions(gate).routes()["GET", "/v1/session"]
    answer = await handler(
        Request(
            method="GET",
            path="/v1/session",
            query={},
            headers=CIMultiDict({"X-Remote-User": "admin", "Authorization": "Bearer forged"}),
            body=b"",
            params={},
            peer_certificate={"subject": ((("commonName", "proxy"),),)},
        )
    )
    assert isinstance(answer, Response)
    expected = Session(login="proxy", user="admin", sees_everything=True, routes=ALL)
    assert msgspec.json.decode(answer.body, type=Session) == expected
