# SPDX-License-Identifier: Apache-2.0
"""Answers why a pod was placed or refused at a past time, on all nodes and devices (ADR 48).

The decision, the ledger and the devices are read from the event stream, which keeps seven days, and
evaluated in a thread, one question at a time. Seconds throughout.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import anyio
import anyio.to_thread
import msgspec

from hami_common.bus import subjects
from hami_common.errors import NotFound, RequestInvalid, TooManyRequests
from hami_common.events.decision import DecisionRecord, Moment
from hami_common.runtime.httpd import Handler, Request, Response
from hami_common.runtime.natsio.history import Event
from hami_common.runtime.openapi import Operation, Parameter
from hami_core.replay.moment import filter_at, moment_of
from hami_scheduler.settings import Settings
from hami_scheduler.shell.pastevents import FILTERS, StoredEvents, decoded, numbered
from hami_scheduler.shell.state import State

PATH = "/v1/whatif/moments/{namespace}/{pod}"

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path=PATH,
        name="moment",
        text="All nodes and devices at the time of a recorded filter of the pod, computed again "
        "from stored events with the recorded request, and compared with the record. Quotas, "
        "gangs and preemption are not evaluated. Holders in other namespaces are named only to "
        "callers who may read the devices and allocations of all namespaces.",
        answer=Moment,
        parameters=(
            Parameter(name="namespace", place="path", text="Namespace of the pod."),
            Parameter(name="pod", place="path", text="Name of the pod."),
            Parameter(
                name="at",
                place="query",
                text="Time as RFC 3339: the newest filter at or before it; now when absent.",
            ),
            Parameter(name="node", place="query", text="Only this node; all when absent."),
        ),
        errors={
            404: "No filter of such a pod is stored at or before that time.",
            429: "The replica computes another answer.",
        },
    ),
)


class Moments:
    """Handler of the operation."""

    def __init__(self, *, state: State, stored: StoredEvents, settings: Settings) -> None:
        """``stored`` reads the event stream."""
        self._state = state
        self._stored = stored
        self._settings = settings
        self._turn = anyio.Lock()

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handler by method and path."""
        return {("GET", PATH): self.moment}

    async def moment(self, request: Request) -> Response:
        """See ``OPERATIONS``."""
        at_s = _time_of(request.query.get("at", ""), now_s=self._state.clock.now_s())
        sees_everything = await request.sees_everything()
        with anyio.move_on_after(self._settings.whatif_s) as scope:
            async with self._turn:
                scope.deadline = float("inf")
                body = await self._moment(request, at_s, sees_everything=sees_everything)
            return Response(body=body)
        raise TooManyRequests(
            problem="this replica computes another answer", fix="try again in a moment"
        )

    async def _moment(self, request: Request, at_s: float, *, sees_everything: bool) -> bytes:
        namespace, pod = request.params["namespace"], request.params["pod"]
        limit_s = self._settings.whatif_policy_s
        await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
        events = await self._stored([subjects.decision_event(namespace, pod)], limit_s)
        records = [one for event in events if (one := event.record(DecisionRecord)) is not None]
        decision = filter_at(records, at_s)
        if decision is None:
            raise NotFound(what=f"recorded filter of pod {namespace}/{pod}{_since(events)}")
        stored = await self._stored(FILTERS, limit_s)
        present = tuple(self._state.core.inventory.devices())
        live = tuple(holding.record for holding in self._state.ledger.holdings())

        def computed() -> bytes:
            _, puts = decoded(stored)
            found = moment_of(
                decision,
                numbered(stored),
                puts,
                present=present,
                live=live,
                node=request.query.get("node", ""),
            )
            return msgspec.json.encode(found if sees_everything else found.for_namespace())

        return await anyio.to_thread.run_sync(computed)


def _since(events: Sequence[Event]) -> str:
    """Return from when on decisions of the pod are stored."""
    if not events:
        return "; the event stream keeps seven days"
    oldest = datetime.fromtimestamp(int(events[0].stored_s), tz=UTC)
    return f" at or before that time; the oldest stored one is of {oldest:%Y-%m-%dT%H:%M:%SZ}"


def _time_of(text: str, *, now_s: float) -> float:
    if not text:
        return now_s
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise RequestInvalid(
            field="query parameter at",
            problem=f"{text[:40]!r} is not a time",
            fix="give a time with an offset, such as 2026-01-31T08:00:00Z",
        )
    return moment.timestamp()
