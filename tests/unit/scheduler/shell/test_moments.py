# SPDX-License-Identifier: Apache-2.0
"""A moment of the past is computed and encoded beside the loop, for its reader."""

import json
import threading
from collections.abc import Sequence

import pytest

from hami_common.events import codec
from hami_common.events.decision import DecisionRecord, Moment
from hami_common.runtime.httpd import Request, Response
from hami_common.runtime.natsio.history import Event
from hami_scheduler.settings import Settings
from hami_scheduler.shell.moments import PATH, Moments
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import World

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]


def event_of(decision: DecisionRecord) -> Event:
    return Event(
        sequence=1,
        stored_s=decision.time_s,
        subject=f"decision.{decision.namespace}.{decision.pod}",
        headers={},
        data=codec.encode(decision),
    )


async def test_answers_are_made_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for name in NODES:
        await world.add_devices(builders.devices(name))
    threads: list[int] = []
    reduced = Moment.for_namespace

    def for_namespace(moment: Moment) -> Moment:
        threads.append(threading.get_ident())
        return reduced(moment)

    async def sees_own_namespace() -> bool:
        return False

    async with world.scheduler() as s:
        await s.filter(world.add_pod(builders.pod("p")), NODES)
        await s.scheduler.drain(limit_s=5)
        (decision,) = world.decisions("filter")

        async def stored(filters: Sequence[str], limit_s: float) -> Sequence[Event]:
            del limit_s
            return [event_of(decision)] if ".decision." in filters[0] else []

        monkeypatch.setattr(Moment, "for_namespace", for_namespace)
        settings = Settings(signing_key_file="unused")
        moments = Moments(state=s.state, stored=stored, settings=settings)
        request = Request(
            method="GET",
            path=PATH,
            query={"at": "2999-01-01T00:00:00Z"},
            headers={},
            body=b"",
            params={"namespace": "default", "pod": "p"},
        )
        request.sees_everything = sees_own_namespace
        response = await moments.moment(request)
    assert isinstance(response, Response)
    found = json.loads(response.body)
    assert [one["node"] for one in found["nodes"]] == NODES
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
