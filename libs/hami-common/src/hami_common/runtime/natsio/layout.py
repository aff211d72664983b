# SPDX-License-Identifier: Apache-2.0
"""Declares the streams and buckets, the same from every service, in any order and at any time.

A stream is created only where there is none: the server checks its free storage first, and
therefore rejects the creation of an existing one. When several services create one at once, those
that get an error read it again. Where the configuration differs, it is updated to ours; changes
that the server rejects are reported with the names that differ. Streams and subjects: docs/wire.md,
design D3, D23, D34. Sizes in bytes, ages in seconds.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from anyio.abc import TaskStatus
from msgspec import Struct

from hami_common.bus import grants, subjects
from hami_common.errors import Denied, NotFound, SettingsInvalid, Unavailable
from hami_common.runtime.natsio.connection import PEER, Bus
from hami_common.runtime.natsio.deadletters import ADVISORIES
from hami_common.runtime.natsio.jetstream import ApiRefusal, api
from hami_common.runtime.tasks import Backoff, Waiting

HISTORY = {
    subjects.ALLOC_BUCKET: 64,
    subjects.STATE_BUCKET: 64,
    subjects.DEVICES_BUCKET: 16,
    subjects.POLICIES_BUCKET: 4,
}
"""Values kept per key. Sources copy stored values only: too short a history loses events."""
EVENTS_PER_SUBJECT = 12_000
"""Events kept per subject: a week of a node's usage at one a minute has 10,080."""
_EVENT_KIND = {
    subjects.ALLOC_BUCKET: "allocation",
    subjects.STATE_BUCKET: "state",
    subjects.DEVICES_BUCKET: "device",
    subjects.POLICIES_BUCKET: "policy",
}
_NS = 1_000_000_000
_DAY_S = 24 * 3600

_log = logging.getLogger(__name__)


class BusLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capacity of each stream, which the server reserves when the stream is created.

    No stream can use another's capacity, so a flood of reports, states or events leaves the ledger
    its own. A bucket and the reports reject messages beyond their capacity, because they are the
    source of truth; events and dead letters drop their oldest.
    """

    replicas: int = 1
    """Servers that hold each stream: 3 in production, 1 on a single server."""
    events_max_age_s: int = 7 * _DAY_S
    events_max_bytes: int = 2 << 30
    ledger_max_bytes: int = 1 << 30
    """Bucket ``hami_alloc``: some 800,000 records."""
    states_max_bytes: int = 512 << 20
    devices_max_bytes: int = 512 << 20
    policies_max_bytes: int = 4 << 20
    """Bucket ``hami_policies``: some 5,000 rollbacks of canaries."""
    reports_max_bytes: int = 256 << 20
    dead_letters_max_age_s: int = 30 * _DAY_S
    dead_letters_max_bytes: int = 256 << 20


def stream_configs(limits: BusLimits) -> list[dict[str, Any]]:
    """Configuration of every stream, in the order in which they are created."""
    common = {"storage": "file", "num_replicas": limits.replicas, "retention": "limits"}
    max_bytes = {
        subjects.ALLOC_BUCKET: limits.ledger_max_bytes,
        subjects.STATE_BUCKET: limits.states_max_bytes,
        subjects.DEVICES_BUCKET: limits.devices_max_bytes,
        subjects.POLICIES_BUCKET: limits.policies_max_bytes,
    }
    buckets = [
        {**_bucket_config(bucket, common), "max_bytes": max_bytes[bucket]} for bucket in _EVENT_KIND
    ]
    events = {
        **common,
        "name": subjects.EVENTS_STREAM,
        "subjects": [
            f"{subjects.EVENT_PREFIX}.decision.>",
            f"{subjects.EVENT_PREFIX}.admission.>",
            f"{subjects.EVENT_PREFIX}.breach.>",
            f"{subjects.EVENT_PREFIX}.partition.>",
            f"{subjects.EVENT_PREFIX}.usage.>",
            f"{subjects.EVENT_PREFIX}.idle.>",
            f"{subjects.EVENT_PREFIX}.idleaction.>",
            f"{subjects.EVENT_PREFIX}.quarantine.>",
        ],
        "sources": [
            {
                "name": subjects.stream_of(bucket),
                "subject_transforms": [
                    {
                        "src": subjects.kv_subject(bucket, "*.*"),
                        "dest": f"{subjects.EVENT_PREFIX}.{_EVENT_KIND[bucket]}"
                        ".{{wildcard(1)}}.{{wildcard(2)}}",
                    }
                ],
            }
            for bucket in _EVENT_KIND
        ],
        "max_msgs_per_subject": EVENTS_PER_SUBJECT,
        "discard": "old",
        "max_age": limits.events_max_age_s * _NS,
        "max_bytes": limits.events_max_bytes,
        "allow_direct": True,
    }
    reports = {
        **common,
        "name": subjects.REPORTS_STREAM,
        "subjects": [f"{subjects.REPORT_PREFIX}.>"],
        "max_msgs_per_subject": 1,
        "max_msg_size": grants.REPORT_MAX_BYTES,
        "max_bytes": limits.reports_max_bytes,
        "discard": "new",
        "allow_direct": True,
    }
    dead_letters = {
        **common,
        "name": subjects.DEAD_LETTERS_STREAM,
        "subjects": [f"{subjects.DEAD_LETTER_PREFIX}.>", *ADVISORIES],
        "discard": "old",
        "max_age": limits.dead_letters_max_age_s * _NS,
        "max_bytes": limits.dead_letters_max_bytes,
    }
    # The events stream comes before the buckets, and so copies each value from the first one on.
    return [events, *buckets, reports, dead_letters]


def reserved_bytes(limits: BusLimits) -> int:
    """Sum of the streams' reservations on each server that stores all of them."""
    return sum(config["max_bytes"] for config in stream_configs(limits))


def _bucket_config(bucket: str, common: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        **common,
        "name": subjects.stream_of(bucket),
        "subjects": [subjects.kv_subject(bucket, ">")],
        "max_msgs_per_subject": HISTORY[bucket],
        "discard": "new",
        "allow_direct": True,
        "deny_delete": True,
        "allow_rollup_hdrs": False,
    }
    if bucket == subjects.STATE_BUCKET:
        config["max_msg_size"] = grants.STATE_MAX_BYTES
    if bucket == subjects.ALLOC_BUCKET:
        config["republish"] = {
            "src": subjects.kv_subject(bucket, "*.*"),
            "dest": f"{subjects.ALLOC_FEED_PREFIX}.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}",
        }
    return config


async def ensure_bus(bus: Bus, *, limits: BusLimits | None = None, timeout_s: float = 30.0) -> None:
    """Create every stream as declared.

    ``Unavailable`` when the server is not ready in ``timeout_s`` (0: never).
    """
    await ensure_streams(bus, stream_configs(limits or BusLimits()), timeout_s=timeout_s)


async def ensure_streams(
    bus: Bus, configs: Sequence[Mapping[str, Any]], *, timeout_s: float
) -> None:
    """Create these streams; see ``ensure_bus``."""
    backoff = Backoff(first_s=0.1, most_s=2.0)
    waiting = Waiting("JetStream", timeout_s)
    with anyio.move_on_after(waiting.limit_s):
        while True:
            try:
                for config in configs:
                    await _ensure_stream(bus, config)
            except (Unavailable, NotFound, ApiRefusal) as error:
                # Refusals may be temporary too: servers of a cluster start one after the other.
                waiting.note(str(error))
                await backoff.wait()
            else:
                return
    raise Unavailable(
        peer=PEER, detail=f"streams not declared in {timeout_s:g} s: {waiting.problem}"
    )


async def keep_bus(
    bus: Bus,
    limits: BusLimits | None = None,
    timeout_s: float = 30.0,
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Declare the streams now and after each reconnect, in case the server lost them (design D6).

    For ``await group.start(keep_bus, bus)``: reports started once everything is declared.
    """
    generation = bus.generation
    await ensure_bus(bus, limits=limits, timeout_s=timeout_s)
    task_status.started()
    while True:
        generation = await bus.wait_connected(after=generation)
        try:
            await ensure_bus(bus, limits=limits, timeout_s=timeout_s)
        except (Unavailable, Denied, SettingsInvalid) as error:
            _log.warning("streams not declared after reconnect", extra={"problem": str(error)})


async def _ensure_stream(bus: Bus, config: Mapping[str, Any]) -> None:
    name = config["name"]
    try:
        current = (await api(bus, f"STREAM.INFO.{name}"))["config"]
    except NotFound:
        await api(bus, f"STREAM.CREATE.{name}", config)
        return
    differing = sorted(key for key, value in config.items() if current.get(key) != value)
    if not differing:
        return
    try:
        await api(bus, f"STREAM.UPDATE.{name}", {**current, **config})
    except ApiRefusal as refusal:
        raise SettingsInvalid(
            field=f"stream {name}",
            problem=f"exists with other values of {', '.join(differing)} ({refusal.detail})",
            fix="make the settings of all services equal, or migrate or remove the stream",
        ) from refusal
    _log.info("stream updated", extra={"stream": name, "changed": differing})
