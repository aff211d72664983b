# SPDX-License-Identifier: Apache-2.0
"""Handlers of the routes about consumption: device time and its price, idle shares.

For each request, allocation, device and usage events are read from the stream (``history``),
completed by what the buckets hold now, and summed up in a thread. An answer that lacks events says
since when it is complete, and what is missing. Times in Unix seconds.
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Final, TypeVar, cast

import anyio.to_thread
import msgspec
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import AllocationRecord
from hami_common.events.idle import IdleActionRecord
from hami_common.events.inventory import NodeDevices
from hami_common.events.usage import UsageRecord
from hami_common.model.prices import Prices
from hami_common.ports import Clock
from hami_common.runtime.httpd import Request, Response
from hami_common.runtime.natsio.history import FILTERS_MOST, Event, History
from hami_common.runtime.openapi import Operation, Parameter
from hami_common.runtime.places import Places
from hami_common.units import whole
from hami_registry.core.consumption import BYS, By, Consumption, IdleList, Meter, interval
from hami_registry.core.lifetimes import lives
from hami_registry.core.projection import Projection

T = TypeVar("T", bound=Struct)
DAY_S: Final = 86_400.0
WEEK_MINUTES: Final = 7 * 24 * 60
MINUTES: Final = 30
BEFORE_S: Final = 660.0
"""Samples read from before the interval, to which counters in it are compared."""
CLOCKS_S: Final = 60.0
"""Largest difference between a record's time and the time at which it is stored."""
SAMPLES: Final = 288
"""Samples of each node that are taken of an interval, if there are few nodes."""
SAMPLES_MOST: Final = 10_000
"""Samples that are taken of all nodes, up to ``STEP_MOST_S``: some 1.5 s with 16 shares each."""
STEP_MOST_S: Final = 540.0
"""Longest time between two samples of a node: below the time that one sample covers at most."""
BEGINS_MOST: Final = 2048
"""Allocations whose reservation is looked for before the interval."""
_TIME_MOST: Final = 1e11
_encoder = msgspec.json.Encoder()

_TOO_MANY: Final = {429: "The caller has as many such requests open as one caller may have."}
_NAMESPACE: Final = Parameter(
    name="namespace",
    place="query",
    text="Only of this namespace; required of callers who may not read all namespaces.",
)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/consumption",
        name="consumption",
        text=(
            "Device time that pods reserved, used and wasted, what it costs, and what sharing "
            "saves against whole devices. Allocations released before complete_since_s are missing."
        ),
        answer=Consumption,
        parameters=(
            Parameter(
                name="from",
                place="query",
                text="Begin: RFC 3339 or Unix seconds; 24 hours before the end when absent.",
            ),
            Parameter(
                name="to",
                place="query",
                text="End, likewise; now when absent or in the future.",
            ),
            Parameter(
                name="by",
                place="query",
                text="Attribute by which time is summed up; namespace when absent.",
                values=BYS,
            ),
            Parameter(
                name="label",
                place="query",
                text="Key of the label, with by=label; one that the scheduler records.",
            ),
            _NAMESPACE,
        ),
        errors=_TOO_MANY,
    ),
    Operation(
        path="/v1/idle",
        name="idle",
        text=(
            "Shares that are reserved and did no work on their device for some time, with the "
            "device time lost, and the newest action of the scheduler's policy on each."
        ),
        answer=IdleList,
        parameters=(
            Parameter(
                name="minutes",
                place="query",
                text=f"Least idle time, 1 to {WEEK_MINUTES} minutes; {MINUTES} when absent.",
            ),
            _NAMESPACE,
        ),
        errors=_TOO_MANY,
    ),
)


class _Sampled(Struct, frozen=True):
    """Usage record without its content."""

    node: str
    time_s: float


class MeteringApi:
    """Handlers of the operations."""

    def __init__(
        self,
        *,
        history: History,
        projection: Projection,
        questions: Places,
        prices: Prices,
        clock: Clock,
    ) -> None:
        """``questions`` bounds readings of the stream; ``SettingsInvalid`` for bad ``prices``."""
        self._history = history
        self._projection = projection
        self._questions = questions
        self._clock = clock
        self.use(prices)

    def use(self, prices: Prices) -> None:
        """Apply these prices from now on; ``SettingsInvalid``, without any change, for bad ones."""
        prices.check()
        self.prices = prices

    async def consumption(self, request: Request) -> Response:
        """See ``OPERATIONS``, as for all methods that follow."""
        query = request.query
        from_s, to_s = interval(
            _time(query, "from"), _time(query, "to"), now_s=self._clock.now_s(), default_s=DAY_S
        )
        by, namespace = cast("By", query.get("by", "namespace")), query.get("namespace", "")
        label = query.get("label", "")
        if bool(label) != (by == "label"):
            raise RequestInvalid(
                field="query parameter label",
                problem="is given without by=label" if label else "is absent, with by=label",
                fix="give both, such as by=label&label=team",
            )
        with self._questions.hold(request.caller, is_operator=not namespace):
            since_s = await self._complete_since_s()
            meter, cut = await self._meter(from_s, to_s, namespace)
        answer = await anyio.to_thread.run_sync(
            lambda: meter.consumption(
                by=by, label=label, namespace=namespace, complete_since_s=since_s, cut=cut
            )
        )
        return _json(answer)

    async def idle(self, request: Request) -> Response:
        namespace = request.query.get("namespace", "")
        minutes = _minutes(request.query)
        to_s = self._clock.now_s()
        from_s = to_s - max(DAY_S, minutes * 60.0 + BEFORE_S)
        with self._questions.hold(request.caller, is_operator=not namespace):
            meter, cut = await self._meter(from_s, to_s, namespace, most_s=minutes * 60 / 3)
            actions, _ = await self._read("idleaction.*.*", IdleActionRecord, is_newest_only=True)
        answer = await anyio.to_thread.run_sync(
            lambda: meter.idle(minutes=minutes, namespace=namespace, cut=cut, actions=actions)
        )
        return _json(answer)

    async def _complete_since_s(self) -> float:
        """Return the time of the oldest event that is stored; 0 while none was ever removed."""
        oldest, _ = await self._history.extent()
        if oldest <= 1:
            return 0.0
        async with (
            self._history.read([f"{subjects.EVENT_PREFIX}.>"]) as reading,
            aclosing(reading.events()) as events,
        ):
            async for event in events:
                return event.stored_s
        return self._clock.now_s()

    async def _meter(
        self, from_s: float, to_s: float, namespace: str, *, most_s: float = STEP_MOST_S
    ) -> tuple[Meter, str]:
        """Read everything about an interval; with the reason for which events are missing.

        Samples of a node that are closer than a step, at most ``most_s``, are skipped: counters
        are cumulative.
        """
        ledger, cut = await self._ledger(from_s, to_s)
        devices = list(self._projection.published())
        found, cut_devices = await self._read("device.*.*", NodeDevices)
        devices += found
        nodes = {one.node for one in ledger if namespace in ("", one.namespace)}
        usage, cut_usage = await self._usage(nodes, from_s, to_s, most_s)

        def meter() -> Meter:
            return Meter.of(
                ledger=ledger,
                devices=devices,
                usage=usage,
                from_s=from_s,
                to_s=to_s,
                prices=self.prices,
            )

        return await anyio.to_thread.run_sync(meter), cut or cut_devices or cut_usage

    async def _ledger(self, from_s: float, to_s: float) -> tuple[list[AllocationRecord], str]:
        """Read the ledger's records of an interval, and those of before that it depends on."""
        records, cut = await self._read(
            "allocation.*.*", AllocationRecord, since_s=from_s - CLOCKS_S, until_s=to_s + CLOCKS_S
        )
        records += self._projection.ledger_records()
        begins = [
            f"{subjects.EVENT_PREFIX}.allocation.{subjects.allocation_key(life.node, life.pod_uid)}"
            for life in await anyio.to_thread.run_sync(lives, records)
            if not life.is_begin_known and from_s * 1000 < life.start_ms
        ]
        begins = sorted(set(begins))[:BEGINS_MOST]
        for start in range(0, len(begins), FILTERS_MOST):
            several = begins[start : start + FILTERS_MOST]
            found, _ = await self._read(several, AllocationRecord, until_s=to_s + CLOCKS_S)
            records += found
        return records, cut

    async def _usage(
        self, nodes: set[str], from_s: float, to_s: float, most_s: float
    ) -> tuple[list[UsageRecord], str]:
        step_s = max((to_s - from_s) / SAMPLES, len(nodes) * (to_s - from_s) / SAMPLES_MOST)
        step_s = min(step_s, most_s)
        filters = [f"{subjects.EVENT_PREFIX}.usage.*"]
        if len(nodes) <= FILTERS_MOST:
            filters = [subjects.usage_event(node) for node in sorted(nodes)]
        if not filters:
            return [], ""
        kept: dict[str, float] = {}
        """Time of the last sample that was taken, by subject."""
        skipped: dict[str, Event] = {}
        """Newest sample since then."""
        found: list[Event] = []
        async with (
            self._history.read(filters, since_s=from_s - BEFORE_S) as reading,
            aclosing(reading.events()) as events,
        ):
            async for event in events:
                if event.stored_s > to_s + CLOCKS_S:
                    break
                sampled = event.record(_Sampled)
                if sampled is None:
                    continue
                if sampled.time_s < kept.get(event.subject, -step_s) + step_s:
                    skipped[event.subject] = event
                    continue
                found.append(event)
                kept[event.subject] = sampled.time_s
                skipped.pop(event.subject, None)
        records = (event.record(UsageRecord) for event in (*found, *skipped.values()))
        return [record for record in records if record is not None], reading.cut

    async def _read(
        self,
        filters: Sequence[str] | str,
        kind: type[T],
        *,
        since_s: float | None = None,
        until_s: float = _TIME_MOST,
        is_newest_only: bool = False,
    ) -> tuple[list[T], str]:
        """Read the records of events; of a text, those of the family and tokens that it names."""
        if isinstance(filters, str):
            filters = [f"{subjects.EVENT_PREFIX}.{filters}"]
        found: list[T] = []
        async with (
            self._history.read(filters, since_s=since_s, is_newest_only=is_newest_only) as reading,
            aclosing(reading.events()) as events,
        ):
            async for event in events:
                if event.stored_s > until_s:
                    break
                if (record := event.record(kind)) is not None:
                    found.append(record)
        return found, reading.cut


def _time(query: Mapping[str, str], name: str) -> float | None:
    """Return a time of the query in Unix seconds; ``None`` when it is absent."""
    text = query.get(name, "")
    if not text:
        return None
    try:
        found = float(text) if text[:1].isdecimal() and _is_number(text) else _moment(text)
    except (ValueError, OverflowError):
        found = -1.0
    if not 0 <= found <= _TIME_MOST:
        raise RequestInvalid(
            field=f"query parameter {name}",
            problem=f"{text[:40]!r} is no time",
            fix="give RFC 3339 such as 2026-05-01T00:00:00Z, or Unix seconds",
        )
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.replace(".", "", 1).isdecimal()


def _moment(text: str) -> float:
    """Read RFC 3339; ``ValueError`` for other text, also for a time without zone."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(text)
    return moment.timestamp()


def _minutes(query: Mapping[str, str]) -> int:
    text = query.get("minutes", "")
    found = whole(text, least=1, most=WEEK_MINUTES) if text else MINUTES
    if found is None:
        raise RequestInvalid(
            field="query parameter minutes",
            problem=f"{text[:40]!r} is not a whole number from 1 to {WEEK_MINUTES}",
            fix="give minutes such as 30",
        )
    return found


def _json(value: Struct) -> Response:
    return Response(body=_encoder.encode(value), headers={"cache-control": "no-store"})
