# SPDX-License-Identifier: Apache-2.0
"""Bounds calls to a peer, and waits for events, in time. Seconds."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from hami_common.errors import Unavailable
from hami_common.ports import Clock


@contextmanager
def answer_within(limit_s: float, *, peer: str) -> Iterator[None]:
    """Bound one call to a peer; silence is ``Unavailable``."""
    try:
        with anyio.fail_after(limit_s):
            yield
    except TimeoutError as error:
        raise Unavailable(peer=peer, detail=f"no answer in {limit_s:g} s") from error


async def until_set(event: anyio.Event, clock: Clock, *, at_most_s: float) -> None:
    """Wait until the event is set, at most for a time of the clock."""
    async with anyio.create_task_group() as group:

        async def tick() -> None:
            await clock.sleep(at_most_s)
            group.cancel_scope.cancel()

        group.start_soon(tick)
        await event.wait()
        group.cancel_scope.cancel()
