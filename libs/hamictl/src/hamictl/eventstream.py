# SPDX-License-Identifier: Apache-2.0
"""Reads the integration stream from a sequence number on, for ``events`` and ``trace``.

Messages are read one by one by sequence number, so a reader resumes after an interruption without a
consumer on the server. Reading ends at the newest message, unless the reader follows the stream.
Times in Unix seconds.
"""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final

import anyio
import msgspec

from hami_common.bus import subjects
from hami_common.errors import Denied, SettingsInvalid, Unavailable, WireInvalid
from hami_common.events.catalog import FAMILIES
from hami_common.events.codec import UNDECODABLE
from hami_common.runtime import natsio
from hami_common.runtime.natsio import Bus
from hamictl.errors import InputRefused, Unreachable

KINDS = tuple(one.word for one in FAMILIES)
START_S = 5.0
POLL_S = 0.3
_NOT_FOUND = 404
_Record = Mapping[str, Any]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the stream."""

    sequence: int
    time_s: float
    kind: str
    subject: str
    node: str
    namespace: str
    pod: str
    record: dict[str, Any]


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects events; an empty field selects all."""

    kinds: frozenset[str] = frozenset(KINDS)
    node: str = ""
    namespace: str = ""
    pod: str = ""

    def matches(self, event: Event) -> bool:
        """Return whether the event is selected."""
        return (
            event.kind in self.kinds
            and self.node in ("", event.node)
            and self.namespace in ("", event.namespace)
            and self.pod in ("", event.pod)
        )


@asynccontextmanager
async def open_bus(
    *, nats: str, nats_creds: str, nats_seed: str, nats_ca: str
) -> AsyncIterator[Bus]:
    """Connect to NATS; raises ``Unavailable`` if it does not answer."""
    login = natsio.NatsLogin(creds=nats_creds, seed_file=nats_seed)
    async with natsio.connect(
        [nats], name="hamictl", login=login, ca_file=nats_ca, start_timeout_s=START_S
    ) as bus:
        yield bus


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run work that uses the bus; its errors become errors of the command."""
    try:
        anyio.run(work)
    except (Unavailable, Denied) as error:
        raise Unreachable(str(error)) from error
    except SettingsInvalid as error:
        raise InputRefused(str(error)) from error


async def read_events(
    bus: Bus, wanted: Filter, *, start: int, follow: bool
) -> AsyncIterator[Event]:
    """Yield wanted events from sequence ``start`` on; ``follow``: until cancelled.

    ``start`` 0 is the end of the stream when following, else its beginning. Expired messages are
    skipped.
    """
    kind = next(iter(wanted.kinds)) if len(wanted.kinds) == 1 else ""
    pattern = f"{subjects.EVENT_PREFIX}.{kind or '*'}.>"
    if start == 0 and follow:
        start = await last_sequence(bus) + 1
    sequence = max(1, start)
    while True:
        found = await _next(bus, sequence, pattern)
        if found is None:
            if not follow:
                return
            await anyio.sleep(POLL_S)
            continue
        sequence = found.sequence + 1
        if wanted.matches(found):
            yield found


async def last_sequence(bus: Bus) -> int:
    """Return the sequence number of the newest message."""
    answer = await _api(bus, f"STREAM.INFO.{subjects.EVENTS_STREAM}", {})
    if "error" in answer:
        raise Unavailable(peer="NATS", detail=str(answer["error"].get("description")))
    return int(answer["state"]["last_seq"])


async def _next(bus: Bus, sequence: int, pattern: str) -> Event | None:
    request = {"seq": sequence, "next_by_subj": pattern}
    answer = await _api(bus, f"STREAM.MSG.GET.{subjects.EVENTS_STREAM}", request)
    if (error := answer.get("error")) is not None:
        if error.get("code") == _NOT_FOUND:
            return None
        raise Unavailable(peer="NATS", detail=str(error.get("description")))
    return event_of(answer["message"])


async def _api(bus: Bus, method: str, request: dict[str, Any]) -> dict[str, Any]:
    answer = await bus.request(f"$JS.API.{method}", json.dumps(request).encode())
    try:
        decoded: dict[str, Any] = msgspec.json.decode(answer.data, type=dict[str, Any])
    except UNDECODABLE as error:
        raise WireInvalid(what=method, problem=str(error)) from error
    return decoded


def event_of(message: dict[str, Any]) -> Event:
    """Decode a message of JetStream's API."""
    subject = str(message["subject"])
    tokens = subject.removeprefix(f"{subjects.EVENT_PREFIX}.").split(".")
    data = base64.b64decode(message.get("data") or "")
    try:
        record = msgspec.json.decode(data, type=dict[str, Any])
    except UNDECODABLE:
        record = {"undecodable_base64": base64.b64encode(data).decode()}
    stored_s = datetime.fromisoformat(_to_micros(str(message["time"]))).timestamp()
    return Event(
        sequence=int(message["seq"]),
        time_s=float(record.get("time_s") or stored_s),
        kind=tokens[0],
        subject=subject,
        node=_node(subject, record),
        namespace=str(record.get("namespace", "")),
        pod=str(record.get("pod", "")),
        record=record,
    )


def _node(subject: str, record: dict[str, Any]) -> str:
    """Node of the subject: a publisher may only use the subjects of its own node."""
    try:
        return subjects.named(subject)["node"]
    except WireInvalid:
        return str(record.get("node", ""))


def _to_micros(text: str) -> str:
    """Shorten RFC 3339 to six digits of a second, which Python can parse."""
    head, dot, rest = text.partition(".")
    if not dot:
        return text.replace("Z", "+00:00")
    digits = rest.rstrip("Z")
    return f"{head}.{digits[:6]:0<6}+00:00"


def summary(event: Event) -> str:
    """Summarize the event in one line, without its pod and node."""
    record = event.record
    describe = _TEXTS.get(event.kind)
    text = "" if describe is None else describe(record)
    more = record.get("reason") or record.get("error") or record.get("code") or ""
    return f"{text} ({more})" if more else text


def _decision(record: _Record) -> str:
    text = f"{record.get('verb')}: {record.get('verdict')}"
    refusals = record.get("refusals")
    return f"{text}, {refusals[0].get('text')}" if refusals else text


def _quarantine(record: _Record) -> str:
    over = "released" if record.get("is_over") else f"{record.get('failures')} failures"
    return f"{record.get('service')}: {record.get('kind')}, {over}: {record.get('problem')}"


_TEXTS: Final[Mapping[str, Callable[[_Record], str]]] = {
    "allocation": lambda it: f"{it.get('op')} {it.get('allocation_id', '')[:8]}",
    "state": lambda it: str(it.get("state")),
    "decision": _decision,
    "admission": lambda it: "allowed" if it.get("allowed", True) else "denied",
    "breach": lambda it: f"{it.get('kind')}: {it.get('used_mib', 0)} MiB used",
    "device": lambda it: f"{len(it.get('devices') or [])} devices of {it.get('vendor')}",
    "policy": lambda it: f"canary {it.get('policy')} rolled back",
    "usage": lambda it: f"{len(it.get('shares') or [])} shares",
    "idle": lambda it: (
        f"{it.get('change')}, {float(it.get('lost_s', 0)) / 3600:.2f} device hours lost"
    ),
    "idleaction": lambda it: f"{it.get('policy')}: {it.get('outcome')}",
    "quarantine": _quarantine,
}
