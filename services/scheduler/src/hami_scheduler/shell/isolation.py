# SPDX-License-Identifier: Apache-2.0
"""Keep objects that cannot be handled apart from the rest: kinds of objects, and withheld nodes.

While a ledger record cannot be folded, a share may be missing from the table; while the devices of
a vendor cannot be ingested, the table may be stale. Until that is resolved, such a node gets no new
allocations (fail closed): ``Withheld`` records the object. The table refuses then.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hami_common.bus import subjects
from hami_common.dra.names import GROUP, VERSION
from hami_common.errors import WireInvalid
from hami_common.runtime.kubeio.recorder import ObjectRef
from hami_common.runtime.quarantine import Quarantine, Quarantined
from hami_core.core import Core
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import NodeWithheld

CALL, GANG, MIRROR, POD, PREEMPTION, RESTORE = (
    "call",
    "gang",
    "mirror",
    "pod",
    "preemption",
    "restore",
)
CHORE, CONFIRMATION, DECISION = "chore", "confirmation", "decision"
RECORD, STATE, DEVICES, HEARTBEAT, FAULT = "record", "state", "devices", "heartbeat", "fault"
NODE, QUOTA, TAKE_OVER, METRICS, STIMULUS = "node", "quota", "takeover", "metrics", "stimulus"
TICK, WAKE, TOMBSTONE, BUDGET = "tick", "wake", "tombstone", "budget"
WORKLOAD: Final = "workload"
PROVISIONING: Final = "provisioning"
FENCE: Final = "fence"
IDLE: Final = "idle"
CLAIM: Final = "claim"
KINDS: Final = (
    BUDGET,
    CALL,
    CHORE,
    CLAIM,
    CONFIRMATION,
    DECISION,
    DEVICES,
    FAULT,
    FENCE,
    GANG,
    HEARTBEAT,
    IDLE,
    METRICS,
    MIRROR,
    NODE,
    POD,
    PREEMPTION,
    PROVISIONING,
    QUOTA,
    RECORD,
    RESTORE,
    STATE,
    STIMULUS,
    TAKE_OVER,
    TICK,
    TOMBSTONE,
    WAKE,
    WORKLOAD,
)
"""Kinds of objects that the scheduler handles one by one, see docs/runbook/quarantine.md."""
POD_KINDS: Final = (CALL, DECISION, FENCE, MIRROR, POD, PREEMPTION, RESTORE, TAKE_OVER)
"""Kinds whose key is the uid of a pod: dropped with it."""
NODE_KINDS: Final = (METRICS, MIRROR, NODE, TAKE_OVER, WAKE)
"""Kinds whose key is the name of a node, unless the entry has the name of a pod or a ``/``."""

_Object = tuple[str, str]
"""(kind, key)."""
_Place = tuple[str, str]
"""(node, vendor); an empty vendor is all of the node."""

_log = logging.getLogger(__name__)


class Withheld:
    """Nodes without new allocations, and the objects that are the reason."""

    def __init__(self, core: Core) -> None:
        """Withhold nodes of ``core``."""
        self._core = core
        self._places: dict[_Object, tuple[_Place, Exception]] = {}
        self._counts: Counter[_Place] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def node_count(self) -> int:
        """Return how many nodes are withheld, of one vendor or all."""
        return len({node for node, _ in self._counts})

    def add(self, kind: str, key: str, error: Exception, *, node: str, vendor: str = "") -> None:
        """Withhold a node, or one vendor there, because of one object."""
        self.lift(kind, key, is_quiet=True)
        place = (node, vendor)
        self._places[kind, key] = (place, error)
        self._counts[place] += 1
        if self._core.answer(NodeWithheld(node=node, vendor=vendor, withheld=True)):
            _log.error(
                "node withheld",
                extra={
                    "node": node,
                    "vendor": vendor,
                    "kind": kind,
                    "key": key,
                    "problem": f"{type(error).__name__}: {error}"[:500],
                },
            )

    def lift(self, kind: str, key: str, *, is_quiet: bool = False) -> None:
        """Drop one object as a reason; the node is usable again when no other is left."""
        known = self._places.pop((kind, key), None)
        if known is None:
            return
        place, _ = known
        self._counts[place] -= 1
        if not self._counts[place]:
            del self._counts[place]
            if not is_quiet:
                node, vendor = place
                self._core.answer(NodeWithheld(node=node, vendor=vendor, withheld=False))
                _log.warning("node no longer withheld", extra={"node": node, "vendor": vendor})

    def problem(self, kind: str, key: str) -> Exception | None:
        """Return why a node is withheld because of this object, ``None`` when none is."""
        known = self._places.get((kind, key))
        return None if known is None else known[1]

    def keys(self, kind: str, *, node: str) -> list[str]:
        """Return the keys of the objects of one kind for which a node is withheld."""
        return [
            key
            for (some, key), (place, _) in self._places.items()
            if some == kind and place[0] == node
        ]

    def clear(self, kind: str) -> None:
        """Drop all objects of one kind as reasons: they will be delivered again."""
        for some, key in list(self._places):
            if some == kind:
                self.lift(some, key)

    @contextmanager
    def unless_handled(self, kind: str, key: str, *, node: str, vendor: str = "") -> Iterator[None]:
        """Withhold the place if the block raises, and lift that if it succeeds."""
        try:
            yield
        except Exception as error:
            self.add(kind, key, error, node=node, vendor=vendor)
            raise
        if self._places:
            self.lift(kind, key)


def record_key(node: str, pod_uid: str) -> str:
    """Return the key of a ledger record, also where its names cannot be stored."""
    try:
        return subjects.allocation_key(node, pod_uid)
    except WireInvalid:
        return f"{node}/{pod_uid}"


def pod_name(pod: PodFacts | None) -> tuple[str, str]:
    """Return (namespace, name) of a pod, empty where unknown."""
    return ("", "") if pod is None else (pod.namespace, pod.name)


def forget_pod(quarantine: Quarantine, uid: str) -> None:
    """Release everything whose key is the uid of a pod that no longer exists."""
    if len(quarantine):
        for kind in POD_KINDS:
            quarantine.forget(kind, uid)


def reference(entry: Quarantined) -> ObjectRef | None:
    """Return the object that the Event of an entry is about, ``None`` where there is none."""
    if entry.kind in POD_KINDS and entry.name:
        return ObjectRef(kind="Pod", name=entry.name, namespace=entry.namespace, uid=entry.key)
    if entry.kind == CLAIM and entry.name:
        return ObjectRef(
            kind="ResourceClaim",
            name=entry.name,
            namespace=entry.namespace,
            uid=entry.key,
            api_version=f"{GROUP}/{VERSION}",
        )
    if entry.kind in (RECORD, STATE, CHORE, CONFIRMATION) and entry.name and entry.namespace:
        return ObjectRef(kind="Pod", name=entry.name, namespace=entry.namespace)
    if entry.kind == QUOTA and entry.name:
        return ObjectRef(kind="ResourceQuota", name=entry.name, namespace=entry.namespace)
    if node := _node_of(entry):
        return ObjectRef(kind="Node", name=node, uid=node)
    return None


def _node_of(entry: Quarantined) -> str:
    """Return the name of the entry's node, empty without one."""
    if entry.kind in NODE_KINDS:
        return "" if "/" in entry.key else entry.key
    try:
        if entry.kind in (RECORD, STATE):
            return subjects.parse_allocation_key(entry.key)[0]
        if entry.kind == DEVICES:
            return subjects.parse_devices_key(entry.key)[0]
        if entry.kind in (HEARTBEAT, FAULT):
            subject, _, _ = entry.key.partition("/")
            return subjects.unescape(subject.rpartition(".")[2])
    except WireInvalid:
        return ""
    return ""


def quarantined_call(
    quarantine: Quarantine, uid: str, names: tuple[str, str], error: Exception
) -> str:
    """Quarantine a call about one pod that failed; returns the text for its caller."""
    quarantine.failed(CALL, uid, error, name=names)
    entry = quarantine.get(CALL, uid)
    problem = type(error).__name__ if entry is None else entry.problem
    return f"PodQuarantined: the scheduler failed on this pod, it is tried again: {problem}"
