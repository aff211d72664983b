# SPDX-License-Identifier: Apache-2.0
"""Queries agents for the usage and the problems of their nodes.

All nodes that ever reported a device are queried concurrently. One that does not answer in time is
listed as silent, never left out. The bus is checked as well: every stream must exist. Times in
seconds.
"""

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TypeVar

import anyio
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.bus.grants import STREAMS
from hami_common.errors import HamiError, Unavailable, WireInvalid
from hami_common.events import codec
from hami_common.events.asking import CheckAnswer, Finding, Question, UsageAnswer
from hami_common.ports import Clock
from hami_common.runtime.quarantine import Quarantine

S = TypeVar("S", bound=Struct)

PARALLEL = 32
Ask = Callable[[str], Awaitable[bytes]]
"""From a subject to the answer; ``Unavailable`` when none came."""


class Usage(Struct, frozen=True, kw_only=True):
    """Present usage by node."""

    items: tuple[UsageAnswer, ...]
    silent: tuple[str, ...] = ()
    """Nodes whose agent did not answer."""


class Checks(Struct, frozen=True, kw_only=True):
    """Problems of nodes and bus that the registry can detect."""

    time_s: float
    """Time by the registry's clock."""
    version: str
    """Version of the registry."""
    items: tuple[CheckAnswer, ...]
    findings: tuple[Finding, ...] = ()
    """Findings about the bus."""
    silent: tuple[str, ...] = ()
    """Nodes whose agent did not answer."""


OLDEST_NATS = (2, 11)
"""The first release that answers a direct request for the last messages of many subjects."""


class Agents:
    """Client of the agents of all nodes."""

    def __init__(
        self,
        *,
        ask: Ask,
        clock: Clock,
        version: str,
        quarantine: Quarantine,
        server_version: Callable[[], str],
    ) -> None:
        """``server_version``: of the NATS server, empty while not connected."""
        self._quarantine = quarantine
        self._server_version = server_version
        self._ask = ask
        self._clock = clock
        self._version = version

    async def usage(self, nodes: list[str]) -> Usage:
        """Return the present usage on these nodes."""
        answers, silent = await self._all(nodes, "usage", UsageAnswer)
        return Usage(items=tuple(answers), silent=tuple(silent))

    async def checks(self, nodes: list[str]) -> Checks:
        """Return the problems on these nodes, and on the bus."""
        answers, silent = await self._all(nodes, "check", CheckAnswer)
        return Checks(
            time_s=self._clock.now_s(),
            version=self._version,
            items=tuple(answers),
            findings=(
                *_of_server(self._server_version()),
                *[await self._isolated_stream(name) for name in STREAMS],
            ),
            silent=tuple(silent),
        )

    async def _all(
        self, nodes: list[str], what: Question, kind: type[S]
    ) -> tuple[list[S], list[str]]:
        answer_by_node: dict[str, S] = {}
        limiter = anyio.CapacityLimiter(PARALLEL)

        async def ask(node: str) -> None:
            try:
                subject = subjects.ask(node, what)
                answer = codec.decode_on(subject, await self._ask(subject), kind)
                answer_by_node[node] = answer
            except (Unavailable, WireInvalid):
                return

        async def one(node: str) -> None:
            async with limiter:
                await self._quarantine.once("answer", partial(ask, node))

        async with anyio.create_task_group() as group:
            for node in nodes:
                group.start_soon(one, node)
        answers = [answer_by_node[node] for node in nodes if node in answer_by_node]
        return answers, [node for node in nodes if node not in answer_by_node]

    async def _isolated_stream(self, name: str) -> Finding:
        found: list[Finding] = []

        async def look() -> None:
            found.append(await self._stream(name))

        if await self._quarantine.once("answer", look):
            return found[0]
        return Finding(
            check="bus",
            verdict="FAIL",
            text=f"stream {name} cannot be checked",
            fix="see the registry's log",
        )

    async def _stream(self, name: str) -> Finding:
        try:
            answer = codec.decode(
                await self._ask(f"$JS.API.STREAM.INFO.{name}"), _StreamInfo, what=name
            )
        except HamiError as error:
            return Finding(
                check="bus",
                verdict="FAIL",
                text=f"JetStream reports nothing about stream {name}: {error}",
                fix="see the NATS server's log, and that JetStream has storage",
            )
        if answer.error is not None:
            return Finding(
                check="bus",
                verdict="FAIL",
                text=f"stream {name}: {answer.error.description}",
                fix="start the registry again: it declares what is missing",
            )
        return Finding(check="bus", verdict="PASS", text=f"stream {name} is there")


def _of_server(text: str) -> Iterator[Finding]:
    """Check the version of the NATS server; it has none while it is not connected."""
    if not text:
        return
    major, minor, *_ = (*map(int, text.split(".")), 0)
    oldest = f"{OLDEST_NATS[0]}.{OLDEST_NATS[1]}"
    if (major, minor) < OLDEST_NATS:
        yield Finding(
            check="bus",
            verdict="FAIL",
            text=f"the NATS server is {text}, older than {oldest}",
            fix=f"set the image nats to {oldest} or newer",
        )
    else:
        yield Finding(check="bus", verdict="PASS", text=f"the NATS server is {text}")


class _ApiError(Struct, frozen=True):
    description: str = ""


class _StreamInfo(Struct, frozen=True):
    error: _ApiError | None = None
