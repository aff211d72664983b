# SPDX-License-Identifier: Apache-2.0
"""Background tasks, shielded cleanup, backoff."""

import anyio
import pytest

from hami_common.runtime.tasks import Backoff, background, finish_within

pytestmark = pytest.mark.anyio


async def test_background_tasks_end_with_the_block() -> None:
    ended = anyio.Event()

    async def task() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with background() as group:
        group.start_soon(task)
        await anyio.wait_all_tasks_blocked()
    assert ended.is_set()


async def test_an_error_of_the_block_is_not_wrapped() -> None:
    async def block() -> None:
        async with background() as group:
            group.start_soon(anyio.sleep_forever)
            raise LookupError

    with pytest.raises(LookupError):
        await block()


async def test_a_task_that_fails_ends_the_block() -> None:
    async def fail() -> None:
        raise LookupError

    async def block() -> None:
        async with background() as group:
            group.start_soon(fail)
            await anyio.sleep(10)

    with pytest.raises(ExceptionGroup) as caught:
        await block()
    assert isinstance(caught.value.exceptions[0], LookupError)


async def test_cleanup_continues_under_cancellation_until_its_timeout() -> None:
    steps: list[str] = []
    with anyio.CancelScope() as scope:
        try:
            scope.cancel()
            await anyio.sleep(1)
        finally:
            with finish_within(0.05):
                await anyio.sleep(0.01)
                steps.append("first")
                await anyio.sleep(10)
                steps.append("never")
    assert steps == ["first"]


def test_backoff_doubles_up_to_the_limit_and_resets_after_success() -> None:
    backoff = Backoff(first_s=1.0, most_s=5.0)
    for limit in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert limit / 2 <= backoff.next_s() <= limit
    backoff.reset()
    assert backoff.next_s() <= 1.0
