# SPDX-License-Identifier: Apache-2.0
"""Locks by key: in turn for one key, together for two, gone when unused."""

import anyio
import pytest

from hami_common.errors import Unavailable
from hami_scheduler.shell.keylocks import KeyLocks
from tests.unit.scheduler.shell.world import quiet

pytestmark = pytest.mark.anyio


async def test_one_key_is_held_in_turn_of_arrival() -> None:
    locks = KeyLocks("node")
    order: list[int] = []

    async def hold(number: int) -> None:
        async with locks.hold("a", wait_s=1):
            order.append(number)
            await anyio.lowlevel.checkpoint()
            order.append(number)

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(hold, number)
    assert order == [0, 0, 1, 1, 2, 2]
    assert len(locks) == 0


async def test_two_keys_are_held_together() -> None:
    locks = KeyLocks("node")
    async with locks.hold("a", wait_s=1), locks.hold("b", wait_s=1):
        assert len(locks) == 2
    assert len(locks) == 0


async def test_waiting_ends_after_its_timeout_and_names_the_key() -> None:
    locks = KeyLocks("node")
    problems: list[str] = []

    async def wait_in_vain() -> None:
        try:
            async with locks.hold("a", wait_s=0.01):
                problems.append("two hold one lock")
        except Unavailable as error:
            problems.append(str(error))

    async with anyio.create_task_group() as group, locks.hold("a", wait_s=1):
        group.start_soon(wait_in_vain)
        with anyio.fail_after(2):
            while not problems:
                await anyio.sleep(0.001)
    assert "node a" in problems[0]
    assert len(locks) == 0


async def test_canceled_or_failed_holder_releases_the_lock() -> None:
    locks = KeyLocks("pod")

    async def hold_for_ever() -> None:
        async with locks.hold("a", wait_s=1):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(hold_for_ever)
        group.start_soon(hold_for_ever)
        await quiet()
        group.cancel_scope.cancel()

    async def fail() -> None:
        async with locks.hold("a", wait_s=0.1):
            msg = "inside"
            raise ValueError(msg)

    with pytest.raises(ValueError, match="inside"):
        await fail()
    async with locks.hold("a", wait_s=0.1):
        assert len(locks) == 1
