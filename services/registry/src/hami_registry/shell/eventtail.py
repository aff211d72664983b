# SPDX-License-Identifier: Apache-2.0
"""Serves events of the stream as server-sent events: replay from a position, filter, then live.

Data of a server-sent event is the CloudEvent in JSON format (CloudEvents 1.0, JSON event format),
``subject`` is the subject on the bus, the extension ``sequence`` the stream sequence, which is also
the id. A payload that is not JSON is ``data_base64``. Callers of one namespace get events whose
payload names it, without the names of others. Times in Unix seconds.
"""

import base64
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final

import anyio
import msgspec
from msgspec import Struct

from hami_common.bounds import INT64_MAX
from hami_common.bus import subjects
from hami_common.errors import RequestInvalid, WireInvalid
from hami_common.events import codec
from hami_common.events.catalog import FAMILIES, EventFamily, family_of
from hami_common.events.decision import DecisionRecord
from hami_common.runtime.natsio.history import Event, History
from hami_common.units import whole

WORDS: Final = tuple(family.word for family in FAMILIES)
_WITHOUT_NAMESPACE: Final = frozenset({"device", "policy", "usage"})
"""Families whose events belong to no namespace."""
KEEP_ALIVE_S: Final = 15.0
"""Time without an event after which a comment is sent."""
_KEEP_ALIVE: Final = b": still here\n\n"
_TOKEN: Final = re.compile(r"[-a-zA-Z0-9_]+|\*")
_encoder = msgspec.json.Encoder()


class _Owner(Struct, frozen=True):
    namespace: str = ""
    node: str = ""


_owner = msgspec.json.Decoder(_Owner)


class Subscription(Struct, frozen=True, kw_only=True):
    """Subscription on the bus that a stream of events corresponds to."""

    stream: str
    filter_subjects: tuple[str, ...]
    schemas: tuple[str, ...]
    """Payloads, as named in ``docs/schemas``."""


class Wanted(Struct, frozen=True, kw_only=True):
    """Selection of events."""

    filters: tuple[str, ...]
    """Filter subjects of the bus; they do not overlap."""
    node: str = ""
    namespace: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Wanted":
        """Read the parameters ``kind``, ``subject``, ``node`` and ``namespace``."""
        node, namespace = query.get("node", ""), query.get("namespace", "")
        for name, value in (("node", node), ("namespace", namespace)):
            if value:
                _escaped(name, value)
        subject = query.get("subject", "")
        if subject:
            if query.get("kind"):
                raise RequestInvalid(
                    field="query parameter subject",
                    problem="is given together with kind",
                    fix="give one of them",
                )
            return cls(filters=(_subject(subject),), node=node, namespace=namespace)
        words = [part.strip() for part in query.get("kind", ",".join(WORDS)).split(",")]
        if unknown := sorted(set(words) - set(WORDS)):
            raise RequestInvalid(
                field="query parameter kind",
                problem=f"{unknown[0][:40]!r} is not a kind",
                fix=f"give some of {', '.join(WORDS)}",
            )
        families = [
            one
            for one in FAMILIES
            if one.word in words and not (namespace and one.word in _WITHOUT_NAMESPACE)
        ]
        if not families:
            raise RequestInvalid(
                field="query parameter kind",
                problem=f"events of kind {words[0]} belong to no namespace",
                fix="leave out namespace, or ask for another kind",
            )
        filters = tuple(_filter(one, node, namespace) for one in families)
        return cls(filters=filters, node=node, namespace=namespace)

    def subscription(self) -> bytes:
        """Return how an integration would subscribe to the same, as a server-sent event."""
        found = Subscription(
            stream=subjects.EVENTS_STREAM,
            filter_subjects=self.filters,
            schemas=tuple(
                one.schema_name
                for one in FAMILIES
                if any(_overlap(one.subject_filter, text) for text in self.filters)
            ),
        )
        return b"event: subscription\ndata: " + _encoder.encode(found) + b"\n\n"

    def message(self, event: Event) -> bytes | None:
        """Return the server-sent event; ``None`` if the event is not selected."""
        try:
            owner = _owner.decode(event.data)
        except codec.UNDECODABLE:
            owner = _Owner()
        if self.namespace not in ("", owner.namespace):
            return None
        if self.node and self.node != (_node(event.subject) or owner.node):
            return None
        data = event.data
        if self.namespace and event.word == "decision":
            decision = event.record(DecisionRecord)
            if decision is None:
                return None
            data = codec.encode(decision.for_namespace())
        return server_sent(event, data)


def server_sent(event: Event, data: bytes) -> bytes:
    """Return the event with payload ``data`` as a server-sent event."""
    attributes = {
        name.removeprefix("ce-"): value
        for name, value in event.headers.items()
        if name.startswith("ce-")
    }
    stored = datetime.fromtimestamp(event.stored_s, tz=UTC).isoformat().replace("+00:00", "Z")
    document: dict[str, Any] = {
        "specversion": "1.0",
        "id": str(event.sequence),
        "type": _type(event.subject),
        "source": "/bus",
        "time": stored,
        **attributes,
        "subject": event.subject,
        "sequence": str(event.sequence),
        "datacontenttype": "application/json",
    }
    try:
        msgspec.json.decode(data)
    except codec.UNDECODABLE:
        document["data_base64"] = base64.b64encode(data).decode()
    else:
        document["data"] = msgspec.Raw(data)
    text = _encoder.encode(document).replace(b"\r", b" ").replace(b"\n", b" ")
    return f"event: event\nid: {event.sequence}\ndata: ".encode() + text + b"\n\n"


async def tail(
    history: History,
    wanted: Wanted,
    *,
    after: int | None,
    since_s: float | None,
    limit: int,
    follow: bool,
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events; ``limit`` 0: without end.

    Without a position, ``follow`` begins with what is stored after the subscription was yielded.
    """
    first, last = await history.extent()
    yield wanted.subscription()
    if follow and after is None and since_s is None:
        after = last
    elif after is not None and (after > last or after + 1 < first):
        yield _gap(after, first, last)
        after = max(0, first - 1)
    sent, cut = 0, ""
    if follow:
        quiet_s = anyio.current_time() + KEEP_ALIVE_S
        async with aclosing(history.follow(wanted.filters, after=after, since_s=since_s)) as events:
            async for event in events:
                message = None if event is None else wanted.message(event)
                if message is None and anyio.current_time() < quiet_s:
                    continue
                yield message or _KEEP_ALIVE
                quiet_s = anyio.current_time() + KEEP_ALIVE_S
                sent += message is not None
                if sent == limit and limit:
                    break
    elif after is not None or since_s is not None:
        async with history.read(wanted.filters, since_s=since_s, after=after) as reading:
            async with aclosing(reading.events()) as stored:
                async for event in stored:
                    message = wanted.message(event)
                    if message is not None:
                        sent += 1
                        yield message
                        if sent == limit:
                            break
            cut = reading.cut
    yield b"event: end\ndata: " + _encoder.encode({"cut": cut} if cut else {}) + b"\n\n"


def position_of(text: str) -> tuple[int | None, float | None]:
    """Return (sequence, time) of a parameter ``since``: one of them, or none of an empty one."""
    if not text:
        return None, None
    sequence = whole(text, most=INT64_MAX)
    if sequence is not None:
        return sequence, None
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return None, moment.timestamp()
    except (ValueError, OverflowError):
        pass
    raise RequestInvalid(
        field="query parameter since",
        problem=f"{text[:40]!r} is neither a sequence nor a time with an offset",
        fix="give the id of an event, or a time such as 2026-01-31T08:00:00Z",
    )


def _gap(after: int, first: int, last: int) -> bytes:
    why = (
        f"events {after + 1} to {first - 1} are not stored any more"
        if after <= last
        else f"the stream ends at {last}: the bus lost its data, or the position is of another bus"
    )
    data = {"reason": why, "first": first, "last": last}
    return b"event: gap\ndata: " + _encoder.encode(data) + b"\n\n"


def _filter(family: EventFamily, node: str, namespace: str) -> str:
    known = {"node": node, "namespace": namespace}
    tokens = [subjects.escape(known[token]) if known.get(token) else "*" for token in family.tokens]
    return ".".join((subjects.EVENT_PREFIX, family.word, *tokens))


def _subject(text: str) -> str:
    prefix = f"{subjects.EVENT_PREFIX}."
    tokens: Sequence[str] = text.removeprefix(prefix).split(".")
    if tokens[-1] == ">":
        tokens = [*tokens[:-1], "x"]
    if text.startswith(prefix) and all(_TOKEN.fullmatch(token) for token in tokens):
        return text
    raise RequestInvalid(
        field="query parameter subject",
        problem=f"{text[:80]!r} is not a filter within {subjects.EVENT_PREFIX}",
        fix=f"give a filter such as {prefix}allocation.*.* or {prefix}>",
    )


def _overlap(pattern: str, other: str) -> bool:
    """Return whether two filters of the bus have a subject in common; ``pattern`` has no ``>``."""
    tokens, others = pattern.split("."), other.split(".")
    if others[-1] == ">":
        others, tokens = others[:-1], tokens[: len(others) - 1]
    return len(tokens) == len(others) and all(
        a == b or "*" in (a, b) for a, b in zip(tokens, others, strict=True)
    )


def _escaped(name: str, value: str) -> str:
    try:
        return subjects.escape(value)
    except WireInvalid as error:
        raise RequestInvalid(
            field=f"query parameter {name}", problem=error.problem, fix="give a Kubernetes name"
        ) from error


def _node(subject: str) -> str:
    try:
        return subjects.named(subject)["node"]
    except WireInvalid:
        return ""


def _type(subject: str) -> str:
    """Return the type of an event without a header."""
    try:
        return f"io.hami.{family_of(subject).word}"
    except WireInvalid:
        return "io.hami.unknown"
