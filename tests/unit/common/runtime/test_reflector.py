# SPDX-License-Identifier: Apache-2.0
"""One unreadable object stops neither a list nor a watch."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

import anyio
import pytest

from hami_common.ports import WatchEvent
from hami_common.runtime.kubeio.reflector import reflect

pytestmark = pytest.mark.anyio

GOOD = {"metadata": {"uid": "u1", "name": "good", "resourceVersion": "5"}}
BAD = {"metadata": {"uid": 7, "name": "bad"}}


class Source:
    """A server whose objects are texts."""

    def __init__(self, listed: list[str], watched: list[str]) -> None:
        self._listed = listed
        self._watched = watched

    async def pages(self, path: str, selectors: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        items = ",".join(self._listed)
        yield f'{{"metadata":{{"resourceVersion":"9"}},"items":[{items}]}}'.encode()

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], *, idle_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async def lines() -> AsyncIterator[bytes]:
            for text in self._watched:
                yield f'{{"type":"MODIFIED","object":{text}}}\n'.encode()
            await anyio.sleep_forever()

        yield lines()


async def events_of(source: Source, count: int) -> list[WatchEvent]:
    found: list[WatchEvent] = []
    with anyio.fail_after(5):
        async with reflect(source, "/api/v1/pods", {}) as events:  # type: ignore[arg-type]  # as much of a source as is used
            async for event in events:
                found.append(event)
                if len(found) == count:
                    break
    return found


async def test_an_unreadable_object_of_a_list_is_delivered_and_the_others_follow() -> None:
    source = Source([json.dumps(BAD), json.dumps(GOOD)], [])
    found = await events_of(source, 3)
    assert [event.type for event in found] == ["ADDED", "ADDED", "SYNCED"]
    assert [json.loads(event.raw) for event in found[:2]] == [BAD, GOOD]


async def test_an_unreadable_object_of_a_watch_is_delivered_and_the_others_follow() -> None:
    source = Source([], [json.dumps(BAD), json.dumps(GOOD)])
    found = await events_of(source, 3)
    assert [event.type for event in found] == ["SYNCED", "MODIFIED", "MODIFIED"]
    assert [json.loads(event.raw) for event in found[1:]] == [BAD, GOOD]
    assert found[2].resource_version == "5"
