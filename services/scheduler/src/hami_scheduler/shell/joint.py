# SPDX-License-Identifier: Apache-2.0
"""Reserves the shares of several pods, all or none, for gangs and for pods to come."""

import logging
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

import anyio.lowlevel

from hami_common.errors import HamiError
from hami_core.ledger.holding import Holding
from hami_core.planning.gangs import Assignment

T = TypeVar("T")

_log = logging.getLogger(__name__)


async def stepwise(search: Generator[None, None, T]) -> T:
    """Run a search of the core; other tasks run between its steps."""
    try:
        while True:
            next(search)
            await anyio.lowlevel.checkpoint()
    except StopIteration as end:
        found: T = end.value
        return found


async def reserve_all(
    assignment: Assignment,
    reserve: Callable[[str, str], Awaitable[Holding]],
    *,
    release: Callable[[Holding], Awaitable[bool]],
) -> list[Holding]:
    """Call ``reserve`` with each uid and its node, in the order of the nodes' names.

    After an error, the shares reserved so far are released before it is raised.
    """
    acquired: list[Holding] = []
    try:
        for uid, placement in sorted(assignment.items(), key=lambda a: (a[1].node, a[0])):
            acquired.append(await reserve(uid, placement.node))
    except Exception:
        for holding in acquired:
            try:
                await release(holding)
            except HamiError as error:
                _log.warning("reserved share left to its lease", extra={"problem": str(error)})
        raise
    return acquired
