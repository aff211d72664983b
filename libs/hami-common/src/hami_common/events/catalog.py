# SPDX-License-Identifier: Apache-2.0
"""Catalog of the events for integrations: every family, its subjects, types and payload.

docs/events.md, docs/asyncapi.json and docs/schemas/ are generated from this list, the dead-letter
consumer decodes by it, and the golden payloads are checked against it. Families: design D34. Tokens
of a subject are Kubernetes names with ``.`` written as ``_``.
"""

from collections.abc import Mapping

from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import WireInvalid
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.breach import BreachRecord
from hami_common.events.decision import AdmissionRecord, DecisionRecord
from hami_common.events.idle import (
    IDLE_CHANGES,
    IDLE_OUTCOMES,
    IdleActionRecord,
    IdleRecord,
)
from hami_common.events.inventory import NodeDevices
from hami_common.events.partition import PARTITION_CHANGES, PartitionRecord
from hami_common.events.policy import RollbackRecord
from hami_common.events.quarantine import QuarantineRecord
from hami_common.events.usage import UsageRecord


class EventFamily(Struct, frozen=True, kw_only=True):
    """Events of one kind: one subject pattern, one payload type."""

    word: str
    """Third token of the subject."""
    noun: str = ""
    """Third word of the CloudEvents type; empty: ``word``."""
    payload: type[Struct]
    version: int = 1
    tokens: tuple[str, ...]
    """Meaning of the subject's tokens after the word, in order."""
    kinds: tuple[str, ...]
    """Fourth word of the CloudEvents type."""
    producer: str
    """Service that writes it; also the first segment of ``ce-source``."""
    bucket: str = ""
    """Bucket whose values the server copies; empty: published directly."""
    tells: str
    """Occasion on which an event is sent, in a sentence."""

    @property
    def subject_filter(self) -> str:
        """Filter over all events of the family."""
        return f"{subjects.EVENT_PREFIX}.{self.word}.{'.'.join('*' for _ in self.tokens)}"

    @property
    def address(self) -> str:
        """The subject with its tokens in braces."""
        tokens = ".".join(f"{{{token}}}" for token in self.tokens)
        return f"{subjects.EVENT_PREFIX}.{self.word}.{tokens}"

    @property
    def types(self) -> tuple[str, ...]:
        """Values of ``ce-type``."""
        return tuple(
            f"io.hami.{self.noun or self.word}.{what}.v{self.version}" for what in self.kinds
        )

    @property
    def schema_name(self) -> str:
        """Name of the payload's schema, with its version."""
        return f"{self.word}.v{self.version}"


TOKENS: Mapping[str, str] = {
    "node": "Node of the cluster.",
    "pod_uid": "UID of the pod.",
    "pod_uid_or_host": "UID of the pod, or `host` where the process belongs to none.",
    "vendor": "Vendor word, such as `nvidia`.",
    "namespace": "Namespace of the pod.",
    "pod": "Name of the pod.",
    "service": "Service that reports it.",
    "policy": "Name of the policy.",
    "digest": "Hash of the canary's definition.",
    "replica": "Name of the service's replica; of an agent, its node.",
    "pod_or_prefix": "Name of the pod, or its generateName prefix without the final `-`.",
}
"""Meaning of each token that appears in a subject."""

FAMILIES: tuple[EventFamily, ...] = (
    EventFamily(
        word="allocation",
        payload=AllocationRecord,
        tokens=("node", "pod_uid"),
        kinds=("reserve", "resize", "release"),
        producer="scheduler",
        bucket=subjects.ALLOC_BUCKET,
        tells="The ledger gave a pod its shares, changed them, or took them back.",
    ),
    EventFamily(
        word="state",
        payload=StateRecord,
        tokens=("node", "pod_uid"),
        kinds=("bound", "prepared", "running", "failed"),
        producer="scheduler, nodeagent",
        bucket=subjects.STATE_BUCKET,
        tells="An allocation came one step further, or failed.",
    ),
    EventFamily(
        word="device",
        payload=NodeDevices,
        tokens=("node", "vendor"),
        kinds=("changed",),
        producer="registry",
        bucket=subjects.DEVICES_BUCKET,
        tells="The devices of one vendor on a node changed: number, capacity, health, cordon.",
    ),
    EventFamily(
        word="partition",
        payload=PartitionRecord,
        tokens=("node", "vendor"),
        kinds=PARTITION_CHANGES,
        producer="nodeagent",
        tells="A hardware partition was made, given to an allocation, removed, or could not be.",
    ),
    EventFamily(
        word="decision",
        payload=DecisionRecord,
        tokens=("namespace", "pod"),
        kinds=("filter", "prioritize", "bind", "preempt", "gang"),
        producer="scheduler",
        tells="The scheduler decided about a pod, and why. Sent without guarantee: under overload"
        " decisions are dropped and counted, never the placements themselves.",
    ),
    EventFamily(
        word="admission",
        payload=AdmissionRecord,
        tokens=("namespace", "pod_or_prefix"),
        kinds=("decided",),
        producer="webhook",
        tells="A pod that asks for devices was admitted, changed or refused.",
    ),
    EventFamily(
        word="usage",
        payload=UsageRecord,
        tokens=("node",),
        kinds=("sampled",),
        producer="nodeagent",
        tells=(
            "Use of devices by the containers of a node, once a minute. Best effort: counters are"
            " cumulative, so the next message includes a lost one."
        ),
    ),
    EventFamily(
        word="idle",
        noun="allocation",
        payload=IdleRecord,
        tokens=("node", "pod_uid"),
        kinds=IDLE_CHANGES,
        producer="registry",
        tells="An allocation did no work on its devices for `idle_after_s` (30 minutes), or works"
        " again. Each idle period has one message of each, also after restarts.",
    ),
    EventFamily(
        word="idleaction",
        payload=IdleActionRecord,
        tokens=("node", "pod_uid"),
        kinds=IDLE_OUTCOMES,
        producer="scheduler",
        tells="The scheduler applied its policy to an idle allocation, refused to, or waits.",
    ),
    EventFamily(
        word="breach",
        payload=BreachRecord,
        tokens=("node", "pod_uid_or_host"),
        kinds=("memory", "compute", "foreign"),
        producer="nodeagent",
        tells="A process uses more of a device than its container was given.",
    ),
    EventFamily(
        word="quarantine",
        payload=QuarantineRecord,
        tokens=("service", "replica"),
        kinds=("entered", "released"),
        producer="scheduler, registry, nodeagent, webhook",
        tells="A service cannot handle an object: it retries it with backoff and goes on with the"
        " others. Repeated while that lasts, and sent once when it is over.",
    ),
    EventFamily(
        word="policy",
        payload=RollbackRecord,
        tokens=("policy", "digest"),
        kinds=("rolledback",),
        producer="scheduler",
        bucket=subjects.POLICIES_BUCKET,
        tells="A canary policy missed an objective and was rolled back.",
    ),
)


def family_of(subject: str) -> EventFamily:
    """Family of an event's subject; ``WireInvalid`` when it belongs to none."""
    prefix = f"{subjects.EVENT_PREFIX}."
    word, *tokens = subject.removeprefix(prefix).split(".")
    for family in FAMILIES:
        if subject.startswith(prefix) and family.word == word:
            if len(tokens) == len(family.tokens) and all(tokens):
                return family
            break
    raise WireInvalid(what=f"subject {subject!r}", problem="is not one of an event of ours")
