# SPDX-License-Identifier: Apache-2.0
"""Cordons of the console: whose token writes, what is written, what is refused."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict

from hami_common.errors import (
    Conflict,
    Denied,
    HamiError,
    NotFound,
    RequestInvalid,
    Unauthenticated,
    Unavailable,
)
from hami_common.pods.annotations import DEVICE_CORDON, DEVICE_CORDON_REASONS
from hami_common.runtime.gate import Gate
from hami_common.runtime.httpd import Request, Response
from hami_registry.shell.cordonapi import CordonAnswer, CordonApi
from tests.support.manualclock import ManualClock

pytestmark = pytest.mark.anyio
ROUTE = ("POST", "/v1/cordon")


class Device:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


class Inventory:
    """A projection with two devices on ``gpu-1``."""

    def devices(self, *, node: str) -> list[Device]:
        return [Device("GPU-a"), Device("GPU-b")] if node == "gpu-1" else []


class Node:
    """The API server's node, with the user who wrote it last."""

    def __init__(self) -> None:
        self.annotations: dict[str, str] = {}
        self.writer = ""
        self.error: HamiError | None = None
        self.conflicts = 0

    def seen_by(self, user: str) -> Any:
        return Client(self, user)


class Client:
    def __init__(self, node: Node, user: str) -> None:
        self._node = node
        self._user = user

    async def get(self, path: str) -> bytes:
        assert path == "/api/v1/nodes/gpu-1"
        if self._node.error is not None:
            raise self._node.error
        metadata = {"resourceVersion": "7", "annotations": dict(self._node.annotations)}
        return msgspec.json.encode({"metadata": metadata})

    async def patch(self, path: str, body: bytes) -> bytes:
        if self._node.conflicts:
            self._node.conflicts -= 1
            raise Conflict(what=path)
        metadata = msgspec.json.decode(body)["metadata"]
        assert metadata["resourceVersion"] == "7"
        for name, value in metadata["annotations"].items():
            self._node.annotations.pop(name, None)
            if value is not None:
                self._node.annotations[name] = value
        self._node.writer = self._user
        return b"{}"


async def cordon(
    node: Node, body: object, *, token: str = "", is_open: bool = True, has_own: bool = True
) -> CordonAnswer:
    @asynccontextmanager
    async def connect_as(presented: str) -> AsyncIterator[Any]:
        yield node.seen_by(presented)

    inventory: Any = Inventory()
    api = CordonApi(
        projection=inventory,
        connect_as=connect_as,
        own=lambda: node.seen_by("registry") if has_own else None,
        is_open=is_open,
        clock=ManualClock(),
    )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = await api.guarded(Gate(None))[ROUTE](
        Request(
            method="POST",
            path="/v1/cordon",
            query={},
            headers=CIMultiDict(headers),
            body=body if isinstance(body, bytes) else msgspec.json.encode(body),
            params={},
        )
    )
    assert isinstance(answer, Response)
    return msgspec.json.decode(answer.body, type=CordonAnswer)


WANTED: dict[str, object] = {"node": "gpu-1", "device": "GPU-a", "cordoned": True}


async def test_cordon_is_written_with_the_callers_token() -> None:
    node = Node()
    answer = await cordon(node, {**WANTED, "reason": " fan "}, token="alice", is_open=False)
    assert node.writer == "alice"
    assert node.annotations[DEVICE_CORDON] == "GPU-a"
    assert json.loads(node.annotations[DEVICE_CORDON_REASONS])["GPU-a"]["reason"] == "fan"
    assert [(one.uuid, one.changed, one.reason) for one in answer.items] == [("GPU-a", True, "fan")]
    again = await cordon(node, {**WANTED, "reason": "fan"}, token="bob")
    assert not again.items[0].changed
    assert node.writer == "alice"


async def test_uncordon_keeps_the_other_devices_and_drops_the_reason() -> None:
    node = Node()
    await cordon(node, {"node": "gpu-1", "cordoned": True, "reason": "move"})
    assert node.annotations[DEVICE_CORDON] == "GPU-a,GPU-b"
    assert node.writer == "registry"
    await cordon(node, {**WANTED, "cordoned": False, "reason": "ignored"})
    assert node.annotations[DEVICE_CORDON] == "GPU-b"
    assert list(json.loads(node.annotations[DEVICE_CORDON_REASONS])) == ["GPU-b"]
    await cordon(node, {"node": "gpu-1", "cordoned": False})
    assert node.annotations == {}


async def test_vanished_device_can_be_uncordoned_but_not_cordoned() -> None:
    node = Node()
    node.annotations[DEVICE_CORDON] = "GPU-old"
    gone = {"node": "gpu-1", "device": "GPU-old"}
    with pytest.raises(NotFound, match="GPU-old"):
        await cordon(node, {**gone, "cordoned": True})
    await cordon(node, {**gone, "cordoned": False})
    assert node.annotations == {}
    with pytest.raises(NotFound, match="gpu-2"):
        await cordon(node, {"node": "gpu-2", "cordoned": True})


async def test_conflicts_are_retried_a_few_times() -> None:
    node = Node()
    node.conflicts = 4
    assert (await cordon(node, WANTED)).items[0].changed
    node.conflicts = 5
    with pytest.raises(Unavailable, match="kept changing"):
        await cordon(node, {**WANTED, "cordoned": False})


async def test_without_a_token_nothing_is_written_where_callers_must_log_in() -> None:
    node = Node()
    with pytest.raises(Unauthenticated, match="your own Kubernetes token"):
        await cordon(node, WANTED, is_open=False)
    with pytest.raises(Unavailable, match="not reached yet"):
        await cordon(node, WANTED, has_own=False)
    assert node.writer == ""


async def test_refusals_of_the_api_server_are_passed_on() -> None:
    node = Node()
    node.error = Denied(peer="API server", detail="alice cannot patch nodes", status=403)
    with pytest.raises(Denied, match="alice cannot patch nodes"):
        await cordon(node, WANTED, token="alice")
    node.error = Denied(peer="API server", detail="Unauthorized", status=401)
    with pytest.raises(Unauthenticated, match="rejects the token"):
        await cordon(node, WANTED, token="alice")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "body"),
        ({**WANTED, "cordoned": "yes"}, "body"),
        ({**WANTED, "unknown": 1}, "body"),
        ({"node": "gpu-1"}, "body"),
        ({**WANTED, "node": "../gpu"}, "node"),
        ({**WANTED, "node": ""}, "node"),
        ({**WANTED, "device": "GPU-a,GPU-b"}, "device"),
        ({**WANTED, "device": "a" * 129}, "device"),
        ({**WANTED, "reason": "x" * 501}, "reason"),
    ],
)
async def test_invalid_request_names_its_field(body: object, field: str) -> None:
    node = Node()
    with pytest.raises(RequestInvalid) as refused:
        await cordon(node, body)
    assert refused.value.field == field
    assert node.writer == ""
