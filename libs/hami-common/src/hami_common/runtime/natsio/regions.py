# SPDX-License-Identifier: Apache-2.0
"""Streams with the copies of a region, in the region and in the hub (ADR 46).

In a region, the account ``REGIONS`` has copies of the streams of ``HAMI`` under their own names,
whose sources are on the same server. In the hub, each region has a stream of events and three
buckets, whose sources are these copies, in the JetStream domain of the region. A source resumes at
the sequence that it stored last. It copies no purges: ``purge`` removes old records.
Times in seconds.
"""

from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from hami_common.bus import grants, subjects
from hami_common.runtime.natsio.connection import Bus
from hami_common.runtime.natsio.jetstream import api
from hami_common.runtime.natsio.layout import BusLimits, ensure_streams

_NS: Final = 1_000_000_000


class CopyStatus(Struct, frozen=True, kw_only=True):
    """State of the sources of one region in the hub."""

    lag: int
    """Messages that the region has and the hub does not have yet, as of the last contact."""
    age_s: float | None
    """Time since the last contact with the region, of the source that was silent longest;
    ``None``: not since the start of the server.
    """
    events: int
    """Events that are stored."""


def outbox(limits: BusLimits, *, source: str) -> list[dict[str, Any]]:
    """Configuration of the copies in a region, for ``ensure_streams``.

    ``source``: the ``source_token`` of the installation.
    """
    external = {"api": grants.source_api(source), "deliver": grants.source_delivery(source)}
    return [
        {
            **_common(limits),
            "name": stream,
            "sources": [{"name": stream, "external": external}],
            **_retention(stream, limits),
        }
        for stream in grants.SOURCED_STREAMS
    ]


def copies(region: str, limits: BusLimits) -> list[dict[str, Any]]:
    """Configuration of a region's copies in the hub, for ``ensure_streams``."""
    prefix = subjects.region_event_prefix(region)
    found = [
        {
            **_common(limits),
            "name": subjects.region_events(region),
            "sources": [_from(region, subjects.EVENTS_STREAM, ">", f"{prefix}.>")],
            **_retention(subjects.EVENTS_STREAM, limits),
        }
    ]
    for bucket in subjects.BUCKETS:
        stream, name = subjects.stream_of(bucket), subjects.region_bucket(region, bucket)
        source = _from(
            region, stream, subjects.kv_subject(bucket, ">"), subjects.kv_subject(name, ">")
        )
        found.append(
            {
                **_common(limits),
                "name": subjects.stream_of(name),
                "sources": [source],
                **_retention(stream, limits),
            }
        )
    return found


def _common(limits: BusLimits) -> dict[str, Any]:
    return {
        "storage": "file",
        "num_replicas": limits.replicas,
        "retention": "limits",
        "discard": "old",
        "allow_direct": True,
    }


def _retention(stream: str, limits: BusLimits) -> dict[str, Any]:
    if stream == subjects.EVENTS_STREAM:
        return {"max_bytes": limits.events_max_bytes, "max_age": limits.events_max_age_s * _NS}
    most = {
        subjects.ALLOC_BUCKET: limits.ledger_max_bytes,
        subjects.STATE_BUCKET: limits.states_max_bytes,
        subjects.DEVICES_BUCKET: limits.devices_max_bytes,
    }
    bucket = next(name for name in subjects.BUCKETS if subjects.stream_of(name) == stream)
    return {"max_bytes": most[bucket], "max_msgs_per_subject": 1}


def _from(region: str, stream: str, source: str, target: str) -> dict[str, Any]:
    return {
        "name": stream,
        "external": {"api": f"$JS.{region}.API", "deliver": ""},
        "subject_transforms": [{"src": source, "dest": target}],
    }


async def keep_copies(bus: Bus, configs: Sequence[dict[str, Any]], *, timeout_s: float) -> None:
    """Declare the streams now and after each reconnect, indefinitely."""
    generation = 0
    while True:
        generation = await bus.wait_connected(after=generation)
        await ensure_streams(bus, configs, timeout_s=timeout_s)


async def status(bus: Bus, region: str) -> CopyStatus:
    """Return the state of a region's copies in the hub; ``Unavailable`` without the bus."""
    events = await api(bus, f"STREAM.INFO.{subjects.region_events(region)}")
    infos = [events]
    for bucket in subjects.BUCKETS:
        name = subjects.stream_of(subjects.region_bucket(region, bucket))
        infos.append(await api(bus, f"STREAM.INFO.{name}"))
    sources = [source for info in infos for source in info.get("sources") or ()]
    ages = [source["active"] / _NS for source in sources if source["active"] >= 0]
    return CopyStatus(
        lag=sum(int(source["lag"]) for source in sources),
        age_s=max(ages) if sources and len(ages) == len(sources) else None,
        events=int(events["state"]["messages"]),
    )


async def purge(bus: Bus, bucket: str, key: str, *, revision: int = 0) -> None:
    """Remove the values of a key from a copy, 0: all, else those up to a revision."""
    request: dict[str, Any] = {"filter": subjects.kv_subject(bucket, key)}
    if revision:
        request["seq"] = revision + 1
    await api(bus, f"STREAM.PURGE.{subjects.stream_of(bucket)}", request)
