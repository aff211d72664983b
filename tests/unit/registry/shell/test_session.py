# SPDX-License-Identifier: Apache-2.0
"""Sessions: name, login and view of a caller."""

from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict

from hami_common.errors import Unauthenticated
from hami_common.runtime.gate import FrontProxy, Gate
from hami_common.runtime.httpd import Request, Response
from hami_common.runtime.kubeauth import KubeAuth
from hami_registry.shell.session import Session, Sessions
from tests.support.manualclock import ManualClock

pytestmark = pytest.mark.anyio


class Cluster:
    """An API server that knows the users ``admin`` and ``tenant``, whose tokens are their names."""

    async def create(self, path: str, body: bytes) -> bytes:
        spec = msgspec.json.decode(body)["spec"]
        if path.endswith("tokenreviews"):
            known = spec["token"] in {"admin", "tenant"}
            user = {"username": spec["token"]} if known else {}
            return msgspec.json.encode({"status": {"authenticated": known, "user": user}})
        return msgspec.json.encode({"status": {"allowed": spec["user"] == "admin"}})


async def session(gate: Gate, **headers: str) -> Session:
    handler = Sessions(gate).routes()["GET", "/v1/session"]
    answer = await handler(
        Request(
            method="GET",
            path="/v1/session",
            query={},
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
    expected = Session(login="none", user="", sees_everything=True)
    assert await session(Gate(None)) == expected
    assert await session(Gate(None), Authorization="Bearer whatever") == expected


async def test_caller_without_a_token_learns_that_one_is_required() -> None:
    assert await session(closed()) == Session(login="token", user="", sees_everything=False)


async def test_caller_learns_its_name_and_view() -> None:
    for user in ("admin", "tenant"):
        found = await session(closed(), Authorization=f"Bearer {user}")
        assert found == Session(login="token", user=user, sees_everything=user == "admin")


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
    expected = Session(login="proxy", user="admin", sees_everything=True)
    assert msgspec.json.decode(answer.body, type=Session) == expected
