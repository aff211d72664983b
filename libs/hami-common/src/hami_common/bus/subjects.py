# SPDX-License-Identifier: Apache-2.0
"""Builds and parses every subject, stream, bucket and key name on the bus.

All other modules take these names from here.

Kubernetes names may contain dots and dots split NATS tokens, so each name is one token with ``.``
written as ``_`` (never legal in a Kubernetes name; KV keys refuse ``%`` and ``~``). The round trip
is exact.
"""

import re
from collections.abc import Mapping

from hami_common.errors import WireInvalid

DEVICES_BUCKET = "hami_devices"
ALLOC_BUCKET = "hami_alloc"
STATE_BUCKET = "hami_state"
POLICIES_BUCKET = "hami_policies"
EVENTS_STREAM = "HAMI_EVENTS"
REPORTS_STREAM = "HAMI_REPORTS"
DEAD_LETTERS_STREAM = "HAMI_DEAD_LETTERS"

BUCKETS = (DEVICES_BUCKET, ALLOC_BUCKET, STATE_BUCKET)
"""Buckets with keys of nodes. ``POLICIES_BUCKET`` has keys ``<policy>.<digest>``, of schedulers."""

HUB = "hub"
"""JetStream domain of a hub; no region has this name."""
REGION_PREFIX = "region"
"""First token of the subjects under which a hub stores the events of regions."""

EVENT_PREFIX = "hami.v1.event"
ALLOC_FEED_PREFIX = "hami.v1.alloc"
REPORT_PREFIX = "hami.v1.report"
HEARTBEAT_PREFIX = "hami.v1.heartbeat"
FAULT_PREFIX = "hami.v1.fault"
ASK_PREFIX = "hami.v1.ask"
RECORDS_PREFIX = "hami.v1.records"
DEAD_LETTER_PREFIX = "hami.v1.deadletter"

NODES_OWN: Mapping[str, str] = {
    REPORT_PREFIX: "vendor",
    HEARTBEAT_PREFIX: "",
    FAULT_PREFIX: "",
    ASK_PREFIX: "",
    ALLOC_FEED_PREFIX: "pod_uid",
    f"{EVENT_PREFIX}.allocation": "pod_uid",
    f"{EVENT_PREFIX}.state": "pod_uid",
    f"{EVENT_PREFIX}.device": "vendor",
    f"{EVENT_PREFIX}.breach": "pod_uid",
    f"{EVENT_PREFIX}.partition": "vendor",
    f"{EVENT_PREFIX}.usage": "",
    f"{EVENT_PREFIX}.idle": "pod_uid",
    f"{EVENT_PREFIX}.idleaction": "pod_uid",
    f"$KV.{DEVICES_BUCKET}": "vendor",
    f"$KV.{ALLOC_BUCKET}": "pod_uid",
    f"$KV.{STATE_BUCKET}": "pod_uid",
}
"""Subjects ``<prefix>.<node>`` and ``<prefix>.<node>.<token>`` that speak for one node: by prefix,
which field of the payload the token repeats; empty: none."""
HOST = "host"
"""Stands for the pod of a breach by a process of the host itself."""

_REGION = re.compile(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?")
_NAME = re.compile(r"[a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9])?")
_TOKEN = re.compile(r"[-a-zA-Z0-9_]+")


def escape(name: str) -> str:
    """One subject token for a Kubernetes name (RFC 1123 subdomain)."""
    if _NAME.fullmatch(name) is None:
        raise WireInvalid(
            what=f"name {name!r}",
            problem="is not a Kubernetes name, so it cannot be part of a subject",
        )
    return name.replace(".", "_")


def unescape(token: str) -> str:
    """Kubernetes name that ``token`` was made from."""
    if _TOKEN.fullmatch(token) is None:
        raise WireInvalid(what=f"subject token {token!r}", problem="was not made by escape()")
    return token.replace("_", ".")


def stream_of(bucket: str) -> str:
    """Name of the stream behind a key-value bucket."""
    return f"KV_{bucket}"


def kv_subject(bucket: str, key: str) -> str:
    """Subject on which the value of ``key`` is stored.

    ``key`` may end in the wildcards ``*`` or ``>``.
    """
    return f"$KV.{bucket}.{key}"


def key_of(bucket: str, subject: str) -> str:
    """Key whose value is stored on ``subject``."""
    prefix = f"$KV.{bucket}."
    if not subject.startswith(prefix):
        raise WireInvalid(
            what=f"subject {subject!r}", problem=f"does not belong to bucket {bucket}"
        )
    return subject[len(prefix) :]


def allocation_key(node: str, pod_uid: str) -> str:
    """Key of an allocation and of its state."""
    return f"{escape(node)}.{escape(pod_uid)}"


def policy_key(policy: str, digest: str) -> str:
    """Key of the rollback of a canary policy."""
    return f"{escape(policy)}.{digest}"


def region(name: str) -> str:
    """Return the name of a region; ``WireInvalid`` unless it can be part of subjects and names."""
    if _REGION.fullmatch(name) is None:
        raise WireInvalid(
            what=f"region {name[:40]!r}",
            problem="is not a name of 1 to 32 lower case letters, digits and '-'",
        )
    if name == HUB:
        raise WireInvalid(
            what=f"region {name!r}",
            problem="has the name of the hub's own streams: choose another, such as hub-east",
        )
    return name


def region_bucket(name: str, bucket: str) -> str:
    """Bucket of a hub with the copy of a region's bucket."""
    return f"{REGION_PREFIX}_{region(name)}_{bucket.removeprefix('hami_')}"


def region_events(name: str) -> str:
    """Stream of a hub with a region's events."""
    return f"REGION_{region(name)}_EVENTS"


def region_event_prefix(name: str) -> str:
    """Prefix before the subjects of a region's events in a hub."""
    return f"{REGION_PREFIX}.{region(name)}"


def parse_allocation_key(key: str) -> tuple[str, str]:
    """(node, pod uid) of an allocation key."""
    node, separator, uid = key.partition(".")
    if not separator or "." in uid:
        raise WireInvalid(what=f"key {key!r}", problem="is not <node>.<pod-uid>")
    return unescape(node), unescape(uid)


def named(subject: str) -> dict[str, str]:
    """Return the required fields of the payload: ``node``, and ``vendor`` or ``pod_uid``.

    The bus lets each login publish on the subjects of its own node only, so the subject identifies
    the sender. ``WireInvalid`` when the subject is not that of a node.
    """
    tokens = subject.split(".")
    for size in (len(tokens) - 1, len(tokens) - 2):
        field = NODES_OWN.get(".".join(tokens[:size]))
        if field is None or (field and size != len(tokens) - 2):
            continue
        found = {"node": unescape(tokens[size])}
        if field:
            value = unescape(tokens[-1])
            is_host = value == HOST and tokens[-3] == "breach"
            found[field] = "" if is_host else value
        return found
    raise WireInvalid(what=f"subject {subject!r}", problem="is not the subject of a node")


def node_fence(node: str) -> str:
    """Filter over all ledger records of a node.

    Byte-identical in every fenced append (design D3).
    """
    return f"$KV.{ALLOC_BUCKET}.{escape(node)}.>"


def node_keys(node: str) -> str:
    """Key filter over all allocations (or states) of a node."""
    return f"{escape(node)}.>"


def devices_key(node: str, vendor: str) -> str:
    """Key of the canonical devices of one vendor on one node."""
    return f"{escape(node)}.{escape(vendor)}"


def parse_devices_key(key: str) -> tuple[str, str]:
    """(node, vendor) of a devices key."""
    node, separator, vendor = key.partition(".")
    if not separator or "." in vendor:
        raise WireInvalid(what=f"key {key!r}", problem="is not <node>.<vendor>")
    return unescape(node), unescape(vendor)


def report(node: str, vendor: str) -> str:
    """Subject of an agent's raw report."""
    return f"{REPORT_PREFIX}.{escape(node)}.{escape(vendor)}"


def heartbeat(node: str) -> str:
    """Subject of a node's heartbeat."""
    return f"{HEARTBEAT_PREFIX}.{escape(node)}"


def fault(node: str) -> str:
    """Subject of a node's device faults and recoveries."""
    return f"{FAULT_PREFIX}.{escape(node)}"


def ask(node: str, what: str) -> str:
    """Subject of a question to a node's agent; ``*`` as ``what`` is all questions."""
    return f"{ASK_PREFIX}.{escape(node)}.{what}"


def records(node: str, bucket: str) -> str:
    """Subject on which an agent requests the newest values of a bucket that concern its node."""
    return f"{RECORDS_PREFIX}.{escape(node)}.{bucket}"


def parse_records(subject: str) -> tuple[str, str]:
    """(node, bucket) of such a request."""
    prefix = f"{RECORDS_PREFIX}."
    node, separator, bucket = subject.removeprefix(prefix).partition(".")
    if not subject.startswith(prefix) or not separator or bucket not in BUCKETS:
        raise WireInvalid(what=f"subject {subject!r}", problem=f"is not {prefix}<node>.<bucket>")
    return unescape(node), bucket


def alloc_feed(node: str) -> str:
    """Filter over a node's accepted ledger records as the server republishes them (D23)."""
    return f"{ALLOC_FEED_PREFIX}.{escape(node)}.*"


def decision_event(namespace: str, pod: str) -> str:
    """Subject of a scheduling decision."""
    return f"{EVENT_PREFIX}.decision.{escape(namespace)}.{escape(pod)}"


def admission_event(namespace: str, pod: str) -> str:
    """Subject of an admission; ``pod`` may be a generateName prefix such as ``web-``."""
    return f"{EVENT_PREFIX}.admission.{escape(namespace)}.{escape(pod.rstrip('-.') or 'unnamed')}"


def breach_event(node: str, pod_uid: str) -> str:
    """Subject of a breach by a process of this pod; an empty uid stands for the host itself."""
    return f"{EVENT_PREFIX}.breach.{escape(node)}.{escape(pod_uid or HOST)}"


def partition_event(node: str, vendor: str) -> str:
    """Subject of a change of a hardware partition."""
    return f"{EVENT_PREFIX}.partition.{escape(node)}.{escape(vendor)}"


def usage_event(node: str) -> str:
    """Subject of a node's usage."""
    return f"{EVENT_PREFIX}.usage.{escape(node)}"


def idle_event(node: str, pod_uid: str) -> str:
    """Subject of the idle time of a pod's allocation."""
    return f"{EVENT_PREFIX}.idle.{escape(node)}.{escape(pod_uid)}"


def idle_action_event(node: str, pod_uid: str) -> str:
    """Subject of the actions on a pod's idle allocation."""
    return f"{EVENT_PREFIX}.idleaction.{escape(node)}.{escape(pod_uid)}"


def quarantine_event(service: str, replica: str) -> str:
    """Subject on which one replica of a service reports objects in quarantine."""
    return f"{EVENT_PREFIX}.quarantine.{escape(service)}.{escape(replica)}"


def parse_quarantine_event(subject: str) -> tuple[str, str]:
    """(service, replica) of such a report."""
    prefix = f"{EVENT_PREFIX}.quarantine."
    service, separator, replica = subject.removeprefix(prefix).partition(".")
    if not subject.startswith(prefix) or not separator or "." in replica:
        raise WireInvalid(
            what=f"subject {subject!r}", problem=f"is not {prefix}<service>.<replica>"
        )
    return unescape(service), unescape(replica)


def dead_letter(service: str, subject: str) -> str:
    """Subject under which ``service`` stores a message from ``subject`` that does not decode."""
    return f"{DEAD_LETTER_PREFIX}.{escape(service)}.{subject.replace('$', '').replace(' ', '_')}"
