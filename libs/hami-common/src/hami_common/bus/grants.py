# SPDX-License-Identifier: Apache-2.0
"""Permissions of each login on the bus, and the server configuration that enforces them.

Four accounts, and a fifth where regions are copied to a hub (ADR 46):

- ``HAMI`` has the streams; only the scheduler, the registry and the operator are in it.
- ``EDGE`` has all other logins: webhook, agents, integrations.
- ``AUTH`` has only the service that admits users without a key (auth callout).
- ``SYS`` is the server's own.
- ``REGIONS`` has the copies of a region's streams, in the region and in the hub. Leaf nodes
  connect to it alone.

Permissions alone do not isolate logins: a permission checks the subject of a message, never its
reply subject, and JetStream answers to whatever reply subject a request has. Within one account, a
login that may store one record could direct its acknowledgement, or the record itself, to any
subject, the ledger included. Between accounts an answer reaches only the requester's account (ADR
0013; tests/integration/registry/test_bus_access.py proves both).

Pure: subjects in, permissions and text out.
"""

import hmac
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import WireInvalid
from hami_common.vendors.catalog import Catalog

HAMI, EDGE, AUTH, SYSTEM = "HAMI", "EDGE", "AUTH", "SYS"
REGIONS = "REGIONS"
SOURCE_PREFIX = "hami.source"
"""First tokens of the subjects by which ``REGIONS`` reads ``HAMI``; a random one follows."""
INBOX = "_INBOX"
API = "$JS.API"
AUTH_REQUESTS = "$SYS.REQ.USER.AUTH"
"""Subject on which a server asks for the admission of a user."""
AUTH_TIMEOUT_S = 5
"""Longest time that a server waits for that answer."""

MESSAGE_MAX_BYTES = 384 << 10
"""Largest message, with headers, of an agent, the webhook or an integration. The largest that an
honest agent sends: 64 devices with their partitions and links report 277 KiB, usage of 640 shares
is 266 KiB."""
HEADER_BYTES = 4 << 10
"""Part of ``MESSAGE_MAX_BYTES`` that is reserved for headers."""
REPORT_MAX_BYTES = MESSAGE_MAX_BYTES
STATE_MAX_BYTES = 64 << 10
EDGE_CONNECTIONS = 20_000
"""Agents, of which each has two connections while it renews its login, and integrations."""
USER_SUBSCRIPTIONS = 256
"""Subscriptions of one connection outside the account of the streams."""
USER_DATA_BYTES = 1 << 30
"""Bytes of one login of at most an hour; carried in the JWT, not enforced by nats-server 2.15."""
VENDORS = tuple(sorted(vendor.name for vendor in Catalog.from_settings().vendors))
"""Vendor words for which agents may report devices."""

STREAMS = (
    *(subjects.stream_of(bucket) for bucket in subjects.BUCKETS),
    subjects.stream_of(subjects.POLICIES_BUCKET),
    subjects.EVENTS_STREAM,
    subjects.REPORTS_STREAM,
    subjects.DEAD_LETTERS_STREAM,
)
SOURCED_STREAMS = (
    subjects.EVENTS_STREAM,
    *(subjects.stream_of(bucket) for bucket in subjects.BUCKETS),
)
"""Streams of a region that a hub has copies of."""
HUB_CA_FILE = "/hub-ca/ca.crt"
"""CA of the hub's certificate, in the pod of a region's server."""
SEED_VARIABLE = "HAMI_REGION_SEED"
"""Environment variable of a region's server with the seed of its login at the hub."""
SEED_PLACE = "seed from the environment"
HUB = subjects.HUB
"""JetStream domain of a hub."""
KEPT_IN_REGION = (f"{SOURCE_PREFIX}.>", f"{API}.>", "$JS.EVENT.>", f"{INBOX}.>")
"""Subjects of ``REGIONS`` that a region does not send to its hub, for ``deny_exports``: messages on
them contain the subjects of the sources, and a hub can subscribe to everything."""
_BUCKET_STREAMS = tuple(subjects.stream_of(bucket) for bucket in subjects.BUCKETS)


class Regions(Struct, frozen=True, kw_only=True):
    """Part of a server in the copying of regions."""

    public: str
    """Key with which the registry logs in to ``REGIONS``."""
    region: str = ""
    """Name of this region, whose streams are copied; empty: this is the hub."""
    source: str = ""
    """In a region: its ``source_token``."""
    leaf_by_region: Mapping[str, str] = {}
    """In the hub: the key with which each region's servers log in."""
    hub: str = ""
    """In a region: address of the hub for leaf nodes, ``tls://HOST:PORT``."""


class Grant(Struct, frozen=True, kw_only=True):
    """Permissions of one user of one account; any subject not listed is denied."""

    account: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False
    """True when the user may answer the requests that it receives."""


def inbox(role: str, name: str = "") -> str:
    """Prefix of the subjects on which a role, or one of its users, receives answers."""
    return f"{INBOX}.{role}.{subjects.escape(name)}" if name else f"{INBOX}.{role}"


def scheduler() -> Grant:
    """Writes ledger, states ``bound``, rollbacks, decisions; reads events, forgets old records."""
    return Grant(
        account=HAMI,
        publish=(
            subjects.kv_subject(subjects.ALLOC_BUCKET, "*.*"),
            subjects.kv_subject(subjects.STATE_BUCKET, "*.*"),
            subjects.kv_subject(subjects.POLICIES_BUCKET, "*.*"),
            f"{subjects.EVENT_PREFIX}.decision.*.*",
            f"{subjects.EVENT_PREFIX}.idleaction.*.*",
            f"{subjects.EVENT_PREFIX}.quarantine.scheduler.*",
            f"{subjects.DEAD_LETTER_PREFIX}.scheduler.>",
            f"{subjects.ASK_PREFIX}.*.*",
            *_declares(),
            *_reads(
                (
                    *_BUCKET_STREAMS,
                    subjects.stream_of(subjects.POLICIES_BUCKET),
                    subjects.EVENTS_STREAM,
                )
            ),
            *(
                f"{API}.STREAM.PURGE.{subjects.stream_of(bucket)}"
                for bucket in (subjects.ALLOC_BUCKET, subjects.STATE_BUCKET)
            ),
        ),
        subscribe=(
            f"{inbox('scheduler')}.>",
            f"{subjects.HEARTBEAT_PREFIX}.*",
            f"{subjects.FAULT_PREFIX}.*",
        ),
    )


def registry() -> Grant:
    """Writes canonical devices, idle times and dead letters, reads all, asks and answers agents."""
    logs = (subjects.EVENTS_STREAM, subjects.REPORTS_STREAM, subjects.DEAD_LETTERS_STREAM)
    return Grant(
        account=HAMI,
        publish=(
            subjects.kv_subject(subjects.DEVICES_BUCKET, "*.*"),
            f"{subjects.EVENT_PREFIX}.quarantine.registry.*",
            f"{subjects.EVENT_PREFIX}.idle.*.*",
            f"{subjects.DEAD_LETTER_PREFIX}.>",
            f"{subjects.ASK_PREFIX}.*.*",
            *_declares(),
            *_reads((*_BUCKET_STREAMS, *logs)),
            *(f"{API}.CONSUMER.LIST.{stream}" for stream in logs),
            *(f"$JS.ACK.{stream}.>" for stream in logs),
        ),
        subscribe=(
            f"{inbox('registry')}.>",
            f"{subjects.HEARTBEAT_PREFIX}.*",
            f"{subjects.RECORDS_PREFIX}.*.*",
        ),
        answers=True,
    )


def operator() -> Grant:
    """Everything in the account of the streams: backup, restore, repair."""
    return Grant(account=HAMI, publish=(">",), subscribe=(">",))


def webhook() -> Grant:
    """Publishes the outcomes of admission."""
    return Grant(
        account=EDGE,
        publish=(
            f"{subjects.EVENT_PREFIX}.admission.*.*",
            f"{subjects.EVENT_PREFIX}.quarantine.webhook.*",
        ),
        subscribe=(f"{inbox('webhook')}.>",),
    )


def authenticator() -> Grant:
    """Answers the server's auth callout requests."""
    return Grant(account=AUTH, publish=(), subscribe=(AUTH_REQUESTS,), answers=True)


def agent(node: str) -> Grant:
    """Publishes for one node and reads the records of that node."""
    token = subjects.escape(node)
    event = subjects.EVENT_PREFIX
    letters = f"{subjects.DEAD_LETTER_PREFIX}.nodeagent.KV.{subjects.ALLOC_BUCKET}.{token}.*"
    return Grant(
        account=EDGE,
        publish=(
            *(subjects.report(node, vendor) for vendor in VENDORS),
            subjects.heartbeat(node),
            subjects.fault(node),
            f"{event}.breach.{token}.*",
            *(subjects.partition_event(node, vendor) for vendor in VENDORS),
            f"{event}.usage.{token}",
            subjects.quarantine_event("nodeagent", node),
            subjects.kv_subject(subjects.STATE_BUCKET, f"{token}.*"),
            letters,
            *(subjects.records(node, bucket) for bucket in subjects.BUCKETS),
            *(f"{_last(bucket)}.{token}.>" for bucket in subjects.BUCKETS),
        ),
        subscribe=(
            f"{inbox('agent', node)}.>",
            subjects.alloc_feed(node),
            f"{subjects.ASK_PREFIX}.{token}.*",
        ),
        answers=True,
    )


def integration(consumer: str) -> Grant:
    """Reads events through its own consumer, which the registry created; publishes nothing."""
    stream = subjects.EVENTS_STREAM
    return Grant(
        account=EDGE,
        publish=(
            f"{API}.CONSUMER.MSG.NEXT.{stream}.{consumer}",
            f"$JS.ACK.{stream}.{consumer}.>",
        ),
        subscribe=(f"{INBOX}.integration.{consumer}.>",),
    )


def consumer_of(namespace: str, account: str) -> str:
    """Name of the consumer of a ServiceAccount; no two have the same."""
    return f"{subjects.escape(namespace)}_{subjects.escape(account)}"


_STATIC = {
    "scheduler": scheduler,
    "registry": registry,
    "operator": operator,
    "webhook": webhook,
    "authenticator": authenticator,
}
STATIC_USERS = tuple(_STATIC)
"""Users with a key of their own; all others are admitted by the authenticator."""


def _declares() -> tuple[str, ...]:
    verbs = ("CREATE", "UPDATE")
    return tuple(f"{API}.STREAM.{verb}.{stream}" for verb in verbs for stream in STREAMS)


def _reads(streams: Iterable[str]) -> tuple[str, ...]:
    found = [f"{API}.STREAM.INFO.{stream}" for stream in STREAMS]
    for stream in streams:
        found += [
            f"{API}.STREAM.MSG.GET.{stream}",
            f"{API}.DIRECT.GET.{stream}",
            f"{API}.CONSUMER.CREATE.{stream}.>",
            f"{API}.CONSUMER.MSG.NEXT.{stream}.*",
        ]
    return tuple(found)


def _last(bucket: str) -> str:
    """Direct get of the newest value on the subject that ends the request's own subject."""
    return f"{API}.DIRECT.GET.{subjects.stream_of(bucket)}.$KV.{bucket}"


# --- exports and imports between the accounts -----------------------------------------------------


class _Service(Struct, frozen=True):
    subject: str
    many: bool = False
    """True when one request has several answers."""


_TO_HAMI = (
    _Service(f"{subjects.REPORT_PREFIX}.*.*"),
    _Service(f"{subjects.HEARTBEAT_PREFIX}.*"),
    _Service(f"{subjects.FAULT_PREFIX}.*"),
    _Service(f"{subjects.EVENT_PREFIX}.breach.*.*"),
    _Service(f"{subjects.EVENT_PREFIX}.partition.*.*"),
    _Service(f"{subjects.EVENT_PREFIX}.usage.*"),
    _Service(f"{subjects.EVENT_PREFIX}.admission.*.*"),
    _Service(f"{subjects.EVENT_PREFIX}.quarantine.*.*"),
    _Service(f"{subjects.DEAD_LETTER_PREFIX}.nodeagent.>"),
    _Service(subjects.kv_subject(subjects.STATE_BUCKET, "*.*")),
    _Service(f"{subjects.RECORDS_PREFIX}.*.*", many=True),
    *(_Service(f"{_last(bucket)}.>") for bucket in subjects.BUCKETS),
    _Service(f"{API}.CONSUMER.MSG.NEXT.{subjects.EVENTS_STREAM}.*", many=True),
    _Service(f"$JS.ACK.{subjects.EVENTS_STREAM}.>"),
)
_TO_EDGE = (_Service(f"{subjects.ASK_PREFIX}.*.*"),)
_HEARD_IN_EDGE = (f"{subjects.ALLOC_FEED_PREFIX}.*.*",)


def permissions(grant: Grant) -> dict[str, Any]:
    """The grant in the notation of the server's configuration."""
    said: dict[str, Any] = {
        # An empty list of allowed subjects would allow every subject.
        "publish": {"allow": list(grant.publish)} if grant.publish else {"deny": [">"]},
        "subscribe": {"allow": list(grant.subscribe)} if grant.subscribe else {"deny": [">"]},
    }
    if grant.answers:
        said["allow_responses"] = {"max": -1, "expires": "1m"}
    return said


def claims(grant: Grant, *, name: str, ends_s: int) -> dict[str, Any]:
    """The grant as claims of a user's JWT (version 2) that ends at a Unix time."""
    limits: dict[str, Any] = {
        "pub": {"allow": list(grant.publish)} if grant.publish else {"deny": [">"]},
        "sub": {"allow": list(grant.subscribe)} if grant.subscribe else {"deny": [">"]},
    }
    if grant.answers:
        limits["resp"] = {"max": -1, "ttl": 60_000_000_000}
    return {
        "aud": grant.account,
        "exp": ends_s,
        "name": name,
        "nats": {
            "type": "user",
            "version": 2,
            "subs": USER_SUBSCRIPTIONS,
            "data": USER_DATA_BYTES,
            "payload": MESSAGE_MAX_BYTES,
            **limits,
        },
    }


def source_token(seed: str) -> str:
    """Return the random token of an installation in the subjects of its sources.

    Derived from the seed of the region's login, which the server's configuration and the registry
    both have and the hub has not. 128 bits.
    """
    return hmac.new(seed.strip().encode(), SOURCE_PREFIX.encode(), "sha256").hexdigest()[:32]


def source_api(token: str) -> str:
    """Prefix under which ``REGIONS`` reaches the part of the API of ``HAMI`` that it needs."""
    return f"{SOURCE_PREFIX}.{token}.API"


def source_delivery(token: str) -> str:
    """Prefix of the subjects on which the sources in ``REGIONS`` get their messages."""
    return f"{SOURCE_PREFIX}.{token}.deliver"


def leaf_denials(region: str) -> tuple[str, ...]:
    """Subjects that a hub may not send into a region, for ``deny_imports`` of its leaf node.

    Sources of the hub create consumers at ``$JS.<region>.API.CONSUMER``, and nothing else.
    """
    api = f"$JS.{subjects.region(region)}.API"
    others = ("STREAM", "ACCOUNT", "META", "SERVER", "DIRECT")
    return ("hami.>", "$KV.>", f"{API}.>", f"{api}.INFO", *(f"{api}.{one}.>" for one in others))


def _remote(regions: Regions) -> dict[str, Any]:
    """Return the leaf node connection of a region to its hub; the seed is in the environment."""
    return {
        "remotes": [
            {
                "url": regions.hub,
                "account": REGIONS,
                "deny_imports": list(leaf_denials(regions.region)),
                "deny_exports": list(KEPT_IN_REGION),
                "tls": {"ca_file": HUB_CA_FILE},
                "nkey": SEED_PLACE,
            }
        ]
    }


def _regions(regions: Regions, accounts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the account of the copies; in a region, let it read the streams of ``HAMI``."""
    users: list[dict[str, Any]] = [{"nkey": regions.public}]
    for name, key in regions.leaf_by_region.items():
        # A leaf node answers the hub's requests; it asks neither the hub nor other regions.
        denied = {
            "deny": ["hami.>", "$KV.>", f"{subjects.REGION_PREFIX}.>", "$JS.*.API.>", f"{API}.>"]
        }
        # It receives the requests of the hub's sources to it, and nothing of other regions.
        asked = {"allow": [f"$JS.{subjects.region(name)}.API.CONSUMER.>", "$JS.FC.>", "$JS.ACK.>"]}
        users.append({"nkey": key, "permissions": {"publish": denied, "subscribe": asked}})
    account: dict[str, Any] = {"jetstream": {"max_bytes_required": True}, "users": users}
    if not regions.region:
        return account
    if not regions.source:
        raise WireInvalid(what="keys of the bus", problem="the region has no token of its sources")
    delivery = f"{source_delivery(regions.source)}.>"
    sources = [f"{API}.CONSUMER.CREATE.{stream}" for stream in SOURCED_STREAMS]
    accounts[HAMI]["exports"] += [
        *({"service": subject, "accounts": [REGIONS]} for subject in sources),
        {"service": "$JS.FC.>", "accounts": [REGIONS]},
        {"stream": delivery, "accounts": [REGIONS]},
    ]
    account["imports"] = [
        *(
            {
                "service": {"account": HAMI, "subject": subject},
                "to": subject.replace(API, source_api(regions.source), 1),
            }
            for subject in sources
        ),
        {"service": {"account": HAMI, "subject": "$JS.FC.>"}},
        {"stream": {"account": HAMI, "subject": delivery}},
    ]
    return account


def server_config(*, issuer: str, users: Mapping[str, str], regions: Regions | None = None) -> str:
    """Configuration of accounts, users and auth callout, to be included in the server's file.

    ``issuer`` is the public account key whose JWTs are trusted; ``users`` has the public user key
    of each of ``STATIC_USERS``. ``regions``: the server's part in the copying of regions.
    """
    if missing := [name for name in STATIC_USERS if name not in users]:
        raise WireInvalid(what="keys of the bus", problem=f"{missing[0]} has none")
    grants = {name: make() for name, make in _STATIC.items()}
    accounts: dict[str, dict[str, Any]] = {
        HAMI: {
            # A service that creates a stream must state how much storage it reserves.
            "jetstream": {"max_bytes_required": True},
            "limits": {"max_connections": 256},
            "exports": [
                *(_export(service) for service in _TO_HAMI),
                *({"stream": subject, "accounts": [EDGE]} for subject in _HEARD_IN_EDGE),
            ],
            "imports": [_import(service, EDGE) for service in _TO_EDGE],
        },
        EDGE: {
            "limits": {
                "max_connections": EDGE_CONNECTIONS,
                "max_subscriptions": USER_SUBSCRIPTIONS,
                "max_payload": MESSAGE_MAX_BYTES,
            },
            "exports": [_export(service, to=HAMI) for service in _TO_EDGE],
            "imports": [
                *(_import(service, HAMI) for service in _TO_HAMI),
                *({"stream": {"account": HAMI, "subject": s}} for s in _HEARD_IN_EDGE),
            ],
        },
        AUTH: {"limits": {"max_connections": 64}},
        SYSTEM: {},
    }
    for account, content in accounts.items():
        content["users"] = [
            {"nkey": users[name], "permissions": permissions(grant)}
            for name, grant in grants.items()
            if grant.account == account
        ]
    own = [users[name] for name in STATIC_USERS]
    if regions is not None:
        accounts[REGIONS] = _regions(regions, accounts)
        own += [user["nkey"] for user in accounts[REGIONS]["users"]]
    callout = {"issuer": issuer, "account": AUTH, "auth_users": own}
    parts: dict[str, Any] = {
        "accounts": accounts,
        "system_account": SYSTEM,
        "authorization": {"timeout": AUTH_TIMEOUT_S, "auth_callout": callout},
    }
    if regions is not None and regions.hub:
        parts["leafnodes"] = _remote(regions)
    # The server reads JSON values in its configuration; only the top level is its own notation.
    text = "".join(
        f"{name}: {msgspec.json.format(msgspec.json.encode(part), indent=1).decode()}\n"
        for name, part in parts.items()
    )
    return text.replace(f'"{SEED_PLACE}"', f"${SEED_VARIABLE}")


def _export(service: _Service, *, to: str = EDGE) -> dict[str, Any]:
    made: dict[str, Any] = {"service": service.subject, "accounts": [to]}
    return {**made, "response_type": "stream"} if service.many else made


def _import(service: _Service, account: str) -> dict[str, Any]:
    return {"service": {"account": account, "subject": service.subject}}
