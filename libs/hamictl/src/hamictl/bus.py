# SPDX-License-Identifier: Apache-2.0
"""The integration stream, read from any sequence on: what ``events`` and ``trace`` show.

Messages are read one after the other by their sequence, which is also how reading goes on after a
break: no consumer is kept on the server. The newest message of the stream is the end, unless the
reader follows. Times in Unix seconds.
"""

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import anyio
import click
import msgspec

from hami_common.bus import subjects
from hami_common.errors import Unavailable, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.runtime import natsio
from hami_common.runtime.natsio import Bus

KINDS = (
    "allocation",
    "state",
    "device",
    "partition",
    "decision",
    "admission",
    "usage",
    "breach",
)
START_S = 5.0
POLL_S = 0.3
_NOT_FOUND = 404

nats_option = click.option(
    "--nats",
    envvar="HAMICTL_NATS",
    default="nats://127.0.0.1:4222",
    show_default=True,
    show_envvar=True,
    help="The NATS server, for example by kubectl port-forward.",
)
_creds_option = click.option(
    "--nats-creds", envvar="HAMICTL_NATS_CREDS", default="", help="Credentials file of the login."
)
_seed_option = click.option(
    "--nats-seed",
    envvar="HAMICTL_NATS_SEED",
    default="",
    help="File with the seed of the login, such as that of Secret hami-bus-operator.",
)
ca_option = click.option(
    "--nats-ca", envvar="HAMICTL_NATS_CA", default="", help="PEM bundle; given: TLS is required."
)


def creds_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of the login to the bus, of which at most one is given."""
    return _creds_option(_seed_option(command))


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


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which events."""

    kinds: frozenset[str] = frozenset(KINDS)
    node: str = ""
    namespace: str = ""
    pod: str = ""

    def has(self, event: Event) -> bool:
        """Whether the event is one of them."""
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
    """The bus; ``Unavailable`` when it does not answer."""
    login = natsio.NatsLogin(creds=nats_creds, seed_file=nats_seed)
    async with natsio.connect(
        [nats], name="hamictl", login=login, ca_file=nats_ca, start_timeout_s=START_S
    ) as bus:
        yield bus


async def read_events(
    bus: Bus, wanted: Wanted, *, start: int, follow: bool
) -> AsyncIterator[Event]:
    """Wanted events from sequence ``start`` on, in order; ``follow``: for ever.

    ``start`` 0 is the end of the stream, or its beginning where it is not followed. What the
    stream no longer has is skipped.
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
        if wanted.has(found):
            yield found


async def last_sequence(bus: Bus) -> int:
    """Sequence of the newest message."""
    answer = await _api(bus, f"STREAM.INFO.{subjects.EVENTS_STREAM}", {})
    if "error" in answer:
        raise Unavailable(peer="NATS", detail=str(answer["error"].get("description")))
    return int(answer["state"]["last_seq"])


async def _next(bus: Bus, sequence: int, pattern: str) -> Event | None:
    question = {"seq": sequence, "next_by_subj": pattern}
    answer = await _api(bus, f"STREAM.MSG.GET.{subjects.EVENTS_STREAM}", question)
    if (error := answer.get("error")) is not None:
        if error.get("code") == _NOT_FOUND:
            return None
        raise Unavailable(peer="NATS", detail=str(error.get("description")))
    return event_of(answer["message"])


async def _api(bus: Bus, what: str, question: dict[str, Any]) -> dict[str, Any]:
    answer = await bus.request(f"$JS.API.{what}", json.dumps(question).encode())
    try:
        decoded: dict[str, Any] = msgspec.json.decode(answer.data, type=dict[str, Any])
    except UNDECODABLE as error:
        raise WireInvalid(what=what, problem=str(error)) from error
    return decoded


def event_of(message: dict[str, Any]) -> Event:
    """An event from the message as JetStream's API gives it."""
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
    """The node that the subject names: who may publish on it speaks for that node alone."""
    try:
        return subjects.named(subject)["node"]
    except WireInvalid:
        return str(record.get("node", ""))


def _to_micros(text: str) -> str:
    """RFC 3339 with at most six digits of a second, as Python reads it."""
    head, dot, rest = text.partition(".")
    if not dot:
        return text.replace("Z", "+00:00")
    digits = rest.rstrip("Z")
    return f"{head}.{digits[:6]:0<6}+00:00"


def summary(event: Event) -> str:
    """The event in one line, without who and where."""
    record = event.record
    match event.kind:
        case "allocation":
            text = f"{record.get('op')} {record.get('allocation_id', '')[:8]}"
        case "state":
            text = str(record.get("state"))
        case "decision":
            text = f"{record.get('verb')}: {record.get('verdict')}"
            if record.get("refusals"):
                text += f", {record['refusals'][0].get('text')}"
        case "admission":
            text = "allowed" if record.get("allowed", True) else "denied"
        case "breach":
            text = f"{record.get('kind')}: {record.get('used_mib', 0)} MiB used"
        case "device":
            text = f"{len(record.get('devices') or [])} devices of {record.get('vendor')}"
        case "usage":
            text = f"{len(record.get('shares') or [])} shares"
        case _:
            text = ""
    more = record.get("reason") or record.get("error") or record.get("code") or ""
    return f"{text} ({more})" if more else text
